//! inotify(7): a process that watches gets the events of other processes.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::both::same;
use crate::harness::Live;

/// How long a test waits for the event of a last close.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Watches of directories, and their events.
struct Watch(File, Vec<(i32, String)>);

impl Watch {
    fn new() -> Watch {
        // SAFETY: inotify_init1(2) returns a new descriptor, which only this value owns.
        let file = unsafe {
            let fd = libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        Watch(file, Vec::new())
    }

    fn add(&mut self, path: &Path, name: &str) {
        let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: inotify_add_watch(2) reads the path, which ends with NUL.
        let watch = unsafe {
            libc::inotify_add_watch(self.0.as_raw_fd(), path.as_ptr(), libc::IN_ALL_EVENTS)
        };
        assert!(watch >= 0, "{}", std::io::Error::last_os_error());
        self.1.push((watch, name.to_owned()));
    }

    /// The events since the last call, and those that come until `last` is among them. A child that
    /// another test has just forked holds copies of this process's files until it calls exec(2),
    /// so the last close may come later.
    fn events_until(&mut self, last: &str) -> Vec<String> {
        let end = Instant::now() + CLOSE_LIMIT;
        let mut events = self.events();
        while !events.iter().any(|event| event == last) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
            events.extend(self.events());
        }
        events
    }

    /// The events since the last call: watch, event, name. Cookies are left out.
    fn events(&mut self) -> Vec<String> {
        let (mut events, mut buffer) = (Vec::new(), [0; 1 << 16]);
        while let Ok(len) = self.0.read(&mut buffer) {
            let mut at = 0;
            while at < len {
                let number = |from: usize| {
                    u32::from_ne_bytes(buffer[at + from..at + from + 4].try_into().unwrap())
                };
                let (watch, mask, name_len) = (number(0) as i32, number(4), number(12) as usize);
                let name = &buffer[at + 16..at + 16 + name_len];
                let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                let (_, watched) = self.1.iter().find(|(number, _)| *number == watch).unwrap();
                events.push(format!(
                    "{watched}: {} {}",
                    event(mask),
                    String::from_utf8_lossy(name)
                ));
                at += 16 + name_len;
            }
        }
        events
    }
}

fn event(mask: u32) -> String {
    let names = [
        (libc::IN_ACCESS, "access"),
        (libc::IN_MODIFY, "modify"),
        (libc::IN_ATTRIB, "attrib"),
        (libc::IN_CLOSE_WRITE, "close after writing"),
        (libc::IN_CLOSE_NOWRITE, "close"),
        (libc::IN_OPEN, "open"),
        (libc::IN_MOVED_FROM, "moved from"),
        (libc::IN_MOVED_TO, "moved to"),
        (libc::IN_CREATE, "create"),
        (libc::IN_DELETE, "delete"),
        (libc::IN_DELETE_SELF, "delete self"),
        (libc::IN_MOVE_SELF, "move self"),
        (libc::IN_ISDIR, "directory"),
        (libc::IN_IGNORED, "ignored"),
    ];
    let found: Vec<_> =
        names.iter().filter(|(bit, _)| mask & bit != 0).map(|(_, name)| *name).collect();
    assert!(!found.is_empty(), "{mask:#x}");
    found.join("+")
}

fn base(dir: &Path) {
    fs::create_dir(dir.join("dir")).unwrap();
    fs::write(dir.join("dir/file"), "of the base").unwrap();
    fs::create_dir(dir.join("dir/sub")).unwrap();
    fs::write(dir.join("other"), "").unwrap();
}

#[test]
fn a_watcher_gets_the_same_events_as_on_the_host() {
    same(base, |side| {
        let mut watch = Watch::new();
        watch.add(&side.at("dir"), "dir");
        watch.add(&side.at("dir/file"), "file");
        let scripts = [
            "cat dir/file",
            "echo more >> dir/file",
            "chmod 600 dir/file; touch dir/file",
            "setfattr -n user.a -v b dir/file",
            "ln dir/file dir/second",
            "rm dir/second",
            "mv dir/file dir/renamed",
            "mv dir/renamed elsewhere",
            "mv elsewhere dir/file",
            "mv other dir/file",
            "mkdir dir/new; rmdir dir/sub",
            "mkfifo dir/p; ln -s x dir/l; rm dir/p dir/l",
            "rm dir/file",
            "ls dir",
            "rmdir dir/new dir",
        ];
        for script in scripts {
            // Another process does this; the shell itself opens nothing here.
            let done =
                Command::new("sh").arg("-c").arg(script).current_dir(side.at("")).output().unwrap();
            assert!(done.status.success(), "{script}: {}", String::from_utf8_lossy(&done.stderr));
            let events = watch.events();
            side.note(script, events);
        }
    });
}

#[test]
fn writes_of_every_kind_give_events() {
    same(base, |side| {
        let mut watch = Watch::new();
        watch.add(&side.at("dir"), "dir");
        let mut file = OpenOptions::new().read(true).write(true).open(side.at("dir/file")).unwrap();
        file.write_all(b"x").unwrap();
        side.note("write", watch.events());
        file.set_len(3).unwrap();
        side.note("cut", watch.events());
        fs::set_permissions(side.at("dir/file"), PermissionsExt::from_mode(0o640)).unwrap();
        side.note("chmod", watch.events());
        nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, 100).unwrap();
        side.note("room", watch.events());
        drop(file);
        side.note("close", watch.events_until("dir: close after writing file"));
    });
}

/// A restore changes no file by a system call, so a watcher gets no event, as on a network
/// filesystem. Watches of nodes that stay go on.
#[test]
fn a_restore_gives_no_events_and_watches_of_kept_nodes_go_on() {
    let live = Live::new("mkdir dir; echo one > dir/file; echo stays > dir/stays");
    live.checkpoint("one");
    live.sh("echo two > dir/file; echo new > dir/new");
    let mut watch = Watch::new();
    watch.add(&live.mnt.join("dir"), "dir");
    watch.add(&live.mnt.join("dir/stays"), "stays");
    live.restore("one");
    let events = watch.events();
    let changes = |events: &[String]| {
        events.iter().filter(|line| !line.contains("open") && !line.contains("close")).count()
    };
    assert_eq!(changes(&events), 0, "{events:?}");
    live.sh("echo more >> dir/stays; echo again > dir/again");
    let events = watch.events();
    for line in ["stays: modify ", "dir: create again", "dir: modify stays"] {
        assert!(events.iter().any(|events| events == line), "{line}: {events:?}");
    }
}
