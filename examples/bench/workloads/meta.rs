//! Looks at a tree: the first time after the mount, the second time, and later. The host has the
//! base in memory each time. The second time is a step of its own, because after a read the kernel
//! asks once more for the access time.

use crate::Res;
use crate::material::Materials;
use crate::programs::{self, program};
use crate::runner::Run;
use crate::workloads::Workload;

/// A text that no file contains, so the search reads all files.
const NOWHERE: &str = "qqqqqqqqqq";
/// Messages whose only cost is their way to the daemon and back.
const ASKED: u64 = 20_000;

pub fn all() -> Vec<Workload> {
    let new = |name, about, run| {
        Workload::new("meta", name, about, Materials::repository as fn(&Materials) -> _, run)
            .needs(&["git"])
    };
    vec![
        Workload::new(
            "meta",
            "round-trip",
            "names that are not there: a message each",
            Materials::empty,
            round_trip,
        )
        .mutates(),
        new("find", "find -type f: names only", find),
        new("find-stat", "find -size: each file is looked at", find_stat),
        new("git-status", "git status", git_status),
        new("ls", "ls -lR", ls),
        new("du", "du -s", du),
        new("grep", "grep -r for what is nowhere", grep),
        new("ripgrep", "rg for what is nowhere", ripgrep).needs(&["git", "rg"]),
    ]
}

/// Runs the same program again and again. It runs in the base first, so that the host has all
/// files in memory.
fn thrice(run: &mut Run, name: &str, args: &[&str]) -> Res<()> {
    let tree = run.root().join("tree");
    programs::run_to(&mut program(name, args, &run.base.join("tree")), &[0, 1])?;
    let files = run.size.files;
    ["fresh", "second", "warm"]
        .into_iter()
        .try_for_each(|step| run.search(step, files, &mut program(name, args, &tree)))
}

/// Asks for each name once only, because the kernel caches the answer.
fn round_trip(run: &mut Run) -> Res<()> {
    let dir = run.root().join("new");
    std::fs::create_dir(&dir)?;
    run.timed("missing", ASKED, |_| {
        let found =
            (0..ASKED).any(|at| std::fs::symlink_metadata(dir.join(at.to_string())).is_ok());
        if found { Err("something is there".into()) } else { Ok(()) }
    })
}

fn find(run: &mut Run) -> Res<()> {
    thrice(run, "find", &[".", "-type", "f"])
}

fn find_stat(run: &mut Run) -> Res<()> {
    thrice(run, "find", &[".", "-size", "+1000000k"])
}

fn git_status(run: &mut Run) -> Res<()> {
    thrice(run, "git", &["status", "--porcelain"])
}

fn ls(run: &mut Run) -> Res<()> {
    thrice(run, "ls", &["-lR"])
}

fn du(run: &mut Run) -> Res<()> {
    thrice(run, "du", &["-s"])
}

fn grep(run: &mut Run) -> Res<()> {
    thrice(run, "grep", &["-r", "--exclude-dir=.git", NOWHERE, "."])
}

fn ripgrep(run: &mut Run) -> Res<()> {
    thrice(run, "rg", &["--no-config", "--no-ignore", NOWHERE, "."])
}
