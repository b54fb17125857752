//! fsx: random operations on one file, each read compared with the expected content; across
//! checkpoints, applies and restores.
//!
//! fsx is stopped after some thousand operations, with dirty pages. The content of its file at that
//! time is the expected content of the checkpoint that is taken then. `JAILFS_FSX_OPS` is the
//! number of operations in each configuration; the seeds are fixed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::harness::Live;
use crate::tool;

const LIMIT: Duration = Duration::from_secs(600);
/// Operations between two stops.
const STRIDE: u64 = 3_000;

/// Operations in each configuration.
fn operations() -> u64 {
    std::env::var("JAILFS_FSX_OPS").map_or(20_000, |ops| ops.parse().unwrap())
}

const EVERYTHING: &str = "close_open = 1\nread = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\n\
    invalidate = 1\ntruncate = 3\n\
    fsync = 1\nfdatasync = 1\nposix_fallocate = 2\npunch_hole = 2\nsendfile = 2\n\
    posix_fadvise = 2\ncopy_file_range = 3\n";
/// Without posix_fallocate(3), which fsx calls with a length of 0 if operations are tiny or
/// aligned: that is EINVAL everywhere.
const NO_FALLOCATE: &str = "close_open = 1\nread = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\n\
    invalidate = 1\ntruncate = 3\n\
    fsync = 1\nfdatasync = 1\npunch_hole = 2\nsendfile = 2\nposix_fadvise = 2\n\
    copy_file_range = 3\n";
const NO_MMAP: &str = "close_open = 1\nread = 10\nwrite = 10\nmapread = 0\nmapwrite = 0\n\
    truncate = 3\n\
    posix_fallocate = 2\npunch_hole = 2\nsendfile = 2\ncopy_file_range = 3\n";
const MMAP_ONLY: &str = "close_open = 1\nread = 1\nwrite = 1\nmapread = 10\nmapwrite = 10\n\
    invalidate = 2\ntruncate = 3\n";
const SHRINK_AND_GROW: &str = "close_open = 1\nread = 5\nwrite = 5\nmapread = 5\nmapwrite = 5\n\
    truncate = 20\nposix_fallocate = 5\n";
const HOLES: &str =
    "read = 5\nwrite = 5\nmapread = 5\nmapwrite = 5\ntruncate = 1\npunch_hole = 20\n";
const COPIES: &str = "read = 5\nwrite = 5\nmapread = 5\nmapwrite = 5\ntruncate = 1\n\
    copy_file_range = 20\nsendfile = 5\n";
const SYNCS: &str = "close_open = 5\nread = 5\nwrite = 10\nmapwrite = 10\ntruncate = 2\nfsync = \
    3\n\
    fdatasync = 3\ninvalidate = 3\n";
/// Without operations that change the size or open the file again.
const FIXED_SIZE: &str = "close_open = 0\nread = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\n\
    truncate = 0\n\
    posix_fallocate = 0\npunch_hole = 5\nsendfile = 2\ncopy_file_range = 3\n";
const FIXED_SIZE_NO_MMAP: &str = "close_open = 0\nread = 10\nwrite = 10\nmapread = 0\n\
    mapwrite = 0\ntruncate = 0\n\
    posix_fallocate = 0\npunch_hole = 5\nsendfile = 2\ncopy_file_range = 3\n";
/// One descriptor for all, so that fsx keeps its file when another file gets the name.
const ONE_DESCRIPTOR: &str = "close_open = 0\nread = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\n\
    invalidate = 1\ntruncate = 3\n\
    posix_fallocate = 2\npunch_hole = 2\nsendfile = 2\ncopy_file_range = 3\n";

/// A running fsx.
struct Fsx {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
    said: Vec<String>,
    over: bool,
}

impl Fsx {
    /// Starts it on a file, with a configuration (the lines above `[weights]`) and the weights.
    fn start(live: &Live, file: &Path, head: &str, weights: &str, seed: u64) -> Fsx {
        let name = file.file_name().unwrap().to_str().unwrap();
        let configuration = live.outside().join(format!("{name}.toml"));
        std::fs::write(&configuration, format!("{head}\n[weights]\n{weights}")).unwrap();
        let mut command = Command::new(tool("fsx"));
        // With -v it prints each operation.
        command.args(["-v", "-S", &seed.to_string(), "-N", &operations().to_string()]);
        command.arg("-f").arg(configuration).arg("-P").arg(live.outside()).arg(file);
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Fsx { child, stderr, said: Vec::new(), over: false }
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Lets it run this many operations, and stops it wherever it is then. Returns false if it has
    /// ended.
    fn advance(&mut self) -> bool {
        let mut line = String::new();
        for _ in 0..STRIDE {
            line.clear();
            if self.stderr.read_line(&mut line).unwrap() == 0 {
                self.over = true;
                return false;
            }
            if self.said.len() >= 100 {
                self.said.remove(0);
            }
            self.said.push(line.clone());
        }
        kill(self.pid(), Signal::SIGSTOP).unwrap();
        match waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).unwrap() {
            WaitStatus::Stopped(..) => true,
            // It finished its last operation before the signal came.
            WaitStatus::Exited(_, 0) => {
                self.over = true;
                false
            }
            other => panic!("{other:?}\n{}", self.said.concat()),
        }
    }

    fn go_on(&self) {
        kill(self.pid(), Signal::SIGCONT).unwrap();
    }

    /// Lets it end; it must have found no fault.
    fn finish(mut self) {
        while !self.over && self.advance() {
            self.go_on();
        }
        // It may have been waited for already.
        if let Ok(status) = self.child.wait() {
            assert!(status.success(), "{status}\n{}", self.said.concat());
        }
    }
}

fn runs_clean(live: &Live, name: &str, head: &str, weights: &str, seed: u64) {
    Fsx::start(live, &live.mnt.join(name), head, weights, seed).finish();
}

/// Takes a checkpoint at each stop; afterwards each has the content that fsx had then.
fn keeps_every_checkpoint(live: &Live, name: &str, head: &str, weights: &str, seed: u64) {
    let file = live.mnt.join(name);
    let mut fsx = Fsx::start(live, &file, head, weights, seed);
    let mut kept = Vec::new();
    while fsx.advance() {
        let checkpoint = format!("{name}-{}", kept.len());
        kept.push((checkpoint.clone(), std::fs::read(&file).unwrap()));
        live.checkpoint(&checkpoint);
        fsx.go_on();
    }
    fsx.finish();
    let last = std::fs::read(&file).unwrap();
    live.checkpoint(&format!("{name}-last"));
    assert!(kept.len() as u64 >= operations() / STRIDE - 1, "{} checkpoints", kept.len());
    for (checkpoint, content) in kept.iter().rev().step_by(2).chain(kept.iter()) {
        live.restore(checkpoint);
        assert!(std::fs::read(&file).unwrap() == *content, "{checkpoint} is not what fsx had");
    }
    live.restore(&format!("{name}-last"));
    assert!(std::fs::read(&file).unwrap() == last, "the end of {name} is not what fsx had");
}

macro_rules! clean {
    ($($test:ident: $weights:expr, $head:expr, $seed:expr;)*) => {
        $(#[test]
        fn $test() {
            let live = Live::with_limit("", &[], LIMIT);
            runs_clean(&live, stringify!($test), $head, $weights, $seed);
        })*
    };
}

clean! {
    fsx_finds_no_fault_with_everything: EVERYTHING, "", 1;
    fsx_finds_no_fault_with_another_seed: EVERYTHING, "", 0xfeed;
    fsx_finds_no_fault_in_a_large_file: EVERYTHING, "flen = 8388608\n[opsize]\nmax = 262144", 2;
    fsx_finds_no_fault_without_mappings: NO_MMAP, "", 3;
    fsx_finds_no_fault_with_mappings_only: MMAP_ONLY, "", 4;
    fsx_finds_no_fault_in_mappings_that_are_not_synced: MMAP_ONLY, "nomsyncafterwrite = true", 5;
    fsx_finds_no_fault_when_the_size_changes_all_the_time: SHRINK_AND_GROW, "", 6;
    fsx_finds_no_fault_among_holes: HOLES, "", 7;
    fsx_finds_no_fault_in_copied_ranges: COPIES, "", 8;
    fsx_finds_no_fault_in_tiny_operations: NO_FALLOCATE, "flen = 20000\n[opsize]\nmax = 100", 9;
    fsx_finds_no_fault_in_whole_blocks: NO_FALLOCATE, "[opsize]\nalign = 4096", 10;
}

#[test]
fn fsx_finds_no_fault_with_a_writeback_cache() {
    let live = Live::with_limit("", &["-o", "writeback"], LIMIT);
    runs_clean(&live, "file", "", EVERYTHING, 11);
}

#[test]
fn fsx_finds_no_fault_while_it_syncs() {
    let live = Live::with_limit("", &[], LIMIT);
    runs_clean(&live, "file", "", SYNCS, 12);
}

#[test]
fn fsx_finds_no_fault_in_a_file_of_the_base() {
    let live = Live::with_limit(
        "head -c 300000 /dev/urandom > mapped; cp mapped plain; cp mapped cut",
        &[],
        LIMIT,
    );
    runs_clean(&live, "mapped", "blockmode = true", FIXED_SIZE, 13);
    runs_clean(&live, "plain", "blockmode = true", FIXED_SIZE_NO_MMAP, 14);
    // This one begins with a truncate.
    runs_clean(&live, "cut", "", EVERYTHING, 15);
}

#[test]
fn checkpoints_have_the_content_that_fsx_had() {
    let live = Live::with_limit("head -c 262144 /dev/urandom > base", &[], LIMIT);
    keeps_every_checkpoint(&live, "new", "", EVERYTHING, 16);
    keeps_every_checkpoint(&live, "base", "blockmode = true", FIXED_SIZE, 17);
}

#[test]
fn checkpoints_have_the_content_that_fsx_had_with_a_writeback_cache() {
    let live = Live::with_limit("", &["-o", "writeback"], LIMIT);
    keeps_every_checkpoint(&live, "new", "", EVERYTHING, 18);
}

/// After an apply, the file that fsx has open is a base file with the same bytes, and fsx goes on
/// with it.
#[test]
fn fsx_goes_on_while_its_file_is_applied() {
    let mut live = Live::with_limit("", &[], LIMIT);
    live.applied = true;
    let file = live.mnt.join("file");
    let mut fsx = Fsx::start(&live, &file, "", EVERYTHING, 19);
    let mut kept = Vec::new();
    while fsx.advance() {
        let content = std::fs::read(&file).unwrap();
        let checkpoint = format!("c{}", kept.len());
        live.checkpoint(&checkpoint);
        live.jailfs(&["apply"]);
        assert!(
            std::fs::read(live.base.join("file")).unwrap() == content,
            "the applied file is the one that fsx had"
        );
        kept.push((checkpoint, content));
        fsx.go_on();
    }
    fsx.finish();
    for (checkpoint, content) in kept.iter().rev() {
        live.restore(checkpoint);
        assert!(std::fs::read(&file).unwrap() == *content, "{checkpoint} is not what fsx had");
    }
}

/// A restore orphans the file of fsx, which goes on with the orphan and finds no fault in it.
#[test]
fn fsx_goes_on_with_an_orphan_after_a_restore() {
    let live = Live::with_limit("", &[], LIMIT);
    let file = live.mnt.join("file");
    let mut fsx = Fsx::start(&live, &file, "", ONE_DESCRIPTOR, 20);
    assert!(fsx.advance());
    let content = std::fs::read(&file).unwrap();
    live.checkpoint("first");
    fsx.go_on();
    assert!(fsx.advance());
    live.restore("first");
    fsx.go_on();
    fsx.finish();
    assert!(
        std::fs::read(&file).unwrap() == content,
        "the writes of fsx to its copy are in the tree"
    );
}
