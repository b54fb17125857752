//! Runs the same operations in a plain directory and in a mount.

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use jailfs::internals::fuse::MountOptions;
use nix::errno::Errno;

use crate::common::Bench;

/// One of the two directories, and the outcomes there.
pub struct Side {
    dir: PathBuf,
    lines: Vec<String>,
}

impl Side {
    fn new(dir: &Path) -> Side {
        Side { dir: dir.to_path_buf(), lines: Vec::new() }
    }

    /// A path in this directory.
    pub fn at(&self, path: &str) -> PathBuf {
        if path.is_empty() { self.dir.clone() } else { self.dir.join(path) }
    }

    /// Records a value.
    pub fn note(&mut self, what: &str, value: impl Debug) {
        self.lines.push(format!("{what}: {value:?}"));
    }

    /// Records the outcome of an operation: its value, or the name of its errno.
    pub fn tried<T: Debug, E: Into<io::Error>>(&mut self, what: &str, result: Result<T, E>) {
        match result {
            Ok(value) => self.lines.push(format!("{what}: {value:?}")),
            Err(error) => {
                let error: io::Error = error.into();
                let errno = Errno::from_raw(error.raw_os_error().expect("an errno"));
                self.lines.push(format!("{what}: {errno:?}"));
            }
        }
    }

    /// Runs a shell script, and records its output and exit status.
    pub fn sh(&mut self, script: &str) {
        self.as_user(0, script);
    }

    /// The same with an argument, `$1`.
    pub fn sh_with(&mut self, script: &str, argument: &str) {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", argument]);
        self.say(command, &format!("{script}\nwith {argument}"));
    }

    /// The same as another user, whose only group has the same number.
    pub fn as_user(&mut self, user: u32, script: &str) {
        let mut command = if user == 0 {
            let mut command = Command::new("sh");
            command.arg("-c");
            command
        } else {
            let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
            let mut command = Command::new("setpriv");
            command.args([&user, &group, "--clear-groups", "sh", "-c"]);
            command
        };
        command.arg(script);
        self.say(command, script);
    }

    fn say(&mut self, mut command: Command, what: &str) {
        let output = command.current_dir(&self.dir).env("LC_ALL", "C").output().unwrap();
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        // Some programs print the whole path.
        let text = String::from_utf8_lossy(&text).replace(self.dir.to_str().unwrap(), "DIR");
        self.lines.push(format!("{what}\n{text}status {:?}", output.status.code()));
    }
}

/// Runs the same in both directories, each created by `fill`, and compares. Returns the outcomes.
#[track_caller]
pub fn same(fill: impl Fn(&Path), act: impl Fn(&mut Side)) -> Vec<String> {
    compare(&[MountOptions::default()], fill, act)
}

/// The same also with `-o writeback`, where the kernel keeps its own sizes and times.
#[track_caller]
pub fn same_also_with_writeback(fill: impl Fn(&Path), act: impl Fn(&mut Side)) -> Vec<String> {
    let writeback = MountOptions { writeback: true, ..MountOptions::default() };
    compare(&[MountOptions::default(), writeback], fill, act)
}

#[track_caller]
fn compare(mounts: &[MountOptions], fill: impl Fn(&Path), act: impl Fn(&mut Side)) -> Vec<String> {
    let plain = tempfile::tempdir().unwrap();
    let open = || std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(plain.path(), open()).unwrap();
    let dir = plain.path().join("dir");
    std::fs::create_dir(&dir).unwrap();
    fill(&dir);
    let mut wanted = Side::new(&dir);
    act(&mut wanted);
    assert!(!wanted.lines.is_empty(), "nothing was compared");
    for options in mounts {
        let bench = Bench::with(options, &fill);
        let mut found = Side::new(&bench.at(""));
        act(&mut found);
        for (at, (on_host, in_mount)) in wanted.lines.iter().zip(&found.lines).enumerate() {
            let before = &found.lines[at.saturating_sub(3)..at];
            assert_eq!(
                on_host, in_mount,
                "on the host, and in the mount {options:?}; before that: {before:#?}"
            );
        }
        assert_eq!(wanted.lines.len(), found.lines.len());
    }
    wanted.lines
}

/// Runs something as another user, in a thread of its own.
pub fn as_user<T: Send>(user: u32, groups: &[u32], act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let none = std::ptr::null::<u32>();
            let list = if groups.is_empty() { none } else { groups.as_ptr() };
            // SAFETY: the bare system calls setgroups(2), setresgid(2) and setresuid(2) read
            // `groups.len()` numbers and change the credentials of the calling thread only, which
            // ends after `act`.
            let failed = unsafe {
                libc::syscall(libc::SYS_setgroups, groups.len(), list)
                    | libc::syscall(libc::SYS_setresgid, user, user, user)
                    | libc::syscall(libc::SYS_setresuid, user, user, user)
            };
            assert_eq!(failed, 0, "root may become any user");
            act()
        });
        thread.join().unwrap()
    })
}
