//! Many heads of one store: real mounts by one daemon, and the programs that work in them.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failure is what a test is for"
)]

#[path = "mounted_forks/costs.rs"]
mod costs;
#[path = "mounted_forks/ends.rs"]
mod ends;
#[expect(dead_code, reason = "each test file uses another part of this")]
#[path = "common/live.rs"]
mod harness;
#[path = "mounted_forks/parent.rs"]
mod parent;
#[path = "mounted_forks/shown.rs"]
mod shown;
#[path = "mounted_forks/verbs.rs"]
mod verbs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use harness::{Live, shell, snapshot, text};

/// A sandbox, and a directory beside it for the mounts of its forks. Dropping it unmounts them.
struct Forked {
    live: Live,
    dir: PathBuf,
}

impl Forked {
    fn new(script: &str) -> Forked {
        let live = Live::new(script);
        let dir = live.mnt.parent().unwrap().join("forks");
        std::fs::create_dir(&dir).unwrap();
        Forked { live, dir }
    }

    /// The mount point of a fork.
    fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Makes a fork of `main`, and mounts it.
    fn fork(&self, name: &str) -> PathBuf {
        let point = self.at(name);
        self.live.jailfs(&["fork", name, point.to_str().unwrap()]);
        point
    }

    /// Runs `jailfs -C DIR`, whether or not it succeeds.
    fn try_in(&self, dir: &Path, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("-C").arg(dir).args(words).current_dir("/").output().unwrap()
    }

    /// The same; it must succeed.
    #[track_caller]
    fn run_in(&self, dir: &Path, words: &[&str]) -> String {
        let output = self.try_in(dir, words);
        assert!(output.status.success(), "jailfs {words:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The same; it must fail with this code. Returns what it says.
    #[track_caller]
    fn fails_in(&self, dir: &Path, words: &[&str], code: i32) -> String {
        let output = self.try_in(dir, words);
        assert_eq!(output.status.code(), Some(code), "jailfs {words:?}: {}", text(&output));
        String::from_utf8(output.stderr).unwrap()
    }

    /// Mounts a head at the mount point of its name.
    fn mount(&self, head: &str) -> PathBuf {
        let point = self.at(head);
        let output = self.try_mount(head, &point);
        assert!(output.status.success(), "mount {head}: {}", text(&output));
        point
    }

    fn try_mount(&self, head: &str, point: &Path) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let command = command.args(["mount", "--head", head]).args([&self.live.base, point]);
        command.arg("--store").arg(&self.live.store).current_dir("/").output().unwrap()
    }

    fn umount(&self, point: &Path) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let output = command.arg("umount").arg(point).current_dir("/").output().unwrap();
        assert!(output.status.success(), "umount: {}", text(&output));
    }

    fn is_mounted(&self, point: &Path) -> bool {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.lines().any(|line| line.split(' ').nth(1) == point.to_str())
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        for entry in std::fs::read_dir(&self.dir).unwrap().flatten() {
            if self.is_mounted(&entry.path()) {
                let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
                let command = command.args(["umount", "--lazy"]).arg(entry.path());
                drop(command.current_dir("/").output());
            }
        }
    }
}

/// Everything that can be seen of a tree, without access times: a look at it changes them.
fn seen(dir: &Path) -> Vec<String> {
    snapshot(dir, false)
}

#[track_caller]
fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "{what}: it does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn write(path: impl AsRef<Path>, text: &str) {
    std::fs::write(path, text).unwrap();
}

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))
}

fn sh(dir: &Path, script: &str) -> String {
    shell(dir, script)
}
