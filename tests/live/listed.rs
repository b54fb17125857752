//! What comes with the names of a directory, around a restore.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::harness::Live;

/// More names than are told one by one.
const MANY: &str = "
import os
for dir in ['many/%d' % n for n in range(70)] + ['late']:
    os.makedirs(dir, exist_ok=True)
    for n in range(300):
        with open(f'{dir}/{n}', 'w') as file: file.write('TEXT')
";

/// Memory that nobody can write to until it is let in: whoever tries waits, also the kernel in a system call.
struct Blocked {
    faults: OwnedFd,
    address: usize,
}

const PAGE: usize = 4096;
const PAGES: usize = 16;

#[expect(unsafe_code, reason = "userfaultfd(2) has no safe wrapper here")]
impl Blocked {
    fn new() -> Blocked {
        // SAFETY: mmap(2) of memory that nobody has; userfaultfd(2) makes a descriptor; the structures are those of ioctl_userfaultfd(2).
        unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let address = libc::mmap(std::ptr::null_mut(), PAGE * PAGES, access, flags, -1, 0) as usize;
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            let faults = OwnedFd::from_raw_fd(i32::try_from(fd).unwrap());
            let blocked = Blocked { faults, address };
            blocked.call(0x3f, &mut [0xaa, 0, 0]);
            // UFFDIO_REGISTER, for pages that are missing.
            blocked.call(0, &mut [address as u64, (PAGE * PAGES) as u64, 1, 0]);
            blocked
        }
    }

    fn call<const N: usize>(&self, number: u64, arguments: &mut [u64; N]) {
        let request = (3 << 30) | ((N as u64 * 8) << 16) | (0xaa << 8) | number;
        // SAFETY: ioctl_userfaultfd(2) reads and writes a structure as large as the request says.
        let result = unsafe { libc::ioctl(self.faults.as_raw_fd(), request, arguments.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    /// Waits until somebody waits.
    fn wait(&self) {
        let mut ready = [PollFd::new(self.faults.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut ready, PollTimeout::from(20_000_u16)).unwrap(), 1, "nobody came");
    }

    /// Lets everybody in.
    fn open(&self) {
        self.call(4, &mut [self.address as u64, (PAGE * PAGES) as u64, 0, 0]);
    }

    /// Reads names of a directory into it; gives the number of bytes.
    fn list(&self, dir: &File) -> i64 {
        let (fd, len) = (dir.as_raw_fd(), PAGE * PAGES);
        // SAFETY: getdents64(2) writes at most `len` bytes to memory that is that long.
        unsafe { libc::syscall(libc::SYS_getdents64, fd, self.address as *mut u8, len) }
    }
}

/// Number, size and mode of each file by its name, as a listing and then a look say.
fn seen(dir: &Path) -> BTreeMap<String, (u64, u64, u32)> {
    let look = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        let stat = entry.metadata().unwrap();
        assert_eq!(entry.ino(), stat.ino(), "{entry:?}");
        (entry.file_name().into_string().unwrap(), (stat.ino(), stat.len(), stat.mode()))
    };
    std::fs::read_dir(dir).unwrap().map(look).collect()
}

fn fill(live: &Live, text: &str) {
    live.sh(&format!("python3 -c \"{}\"", MANY.replace("TEXT", text)));
}

/// Lets everybody in when it is dropped, also by a panic: who waits could not be joined.
struct Opening<'a>(&'a Blocked);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Restores `start` while a thread takes in what was listed before, which it is kept from until the restore waits for it, or is over.
/// What is seen then in the directory, by somebody who stands in it.
fn restore_while_taking_in(live: &Live, dir: &str) -> BTreeMap<String, (u64, u64, u32)> {
    let (look, listed) = (live.mnt.join("look"), live.mnt.join(dir));
    let blocked = Blocked::new();
    // Somebody stands in the directory, so it is not looked up anew.
    let dir = File::options().read(true).open(&listed).unwrap();
    let inside = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string());
    std::thread::scope(|scope| {
        let opening = Opening(&blocked);
        let reader = scope.spawn(|| {
            // The name came alone, and is asked for. From here on files come to this thread with their names.
            seen(&look);
            blocked.list(&dir)
        });
        blocked.wait();
        let mut restore = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let mut restore = restore
            .arg("-C")
            .arg(&live.mnt)
            .args(["restore", "start"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while restore.try_wait().unwrap().is_none() && !waits_in_the_kernel(live.pid()) {
            assert!(Instant::now() < end, "the restore neither ends nor waits");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(opening);
        assert!(reader.join().unwrap() > 0);
        assert!(restore.wait().unwrap().success());
    });
    seen(&inside)
}

/// Whether a thread of a process waits for a lock of the kernel, for longer than a moment.
fn waits_in_the_kernel(pid: nix::unistd::Pid) -> bool {
    let waiting = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).ok();
        let is_waiting = |stat: &String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('D'));
        tasks.filter_map(|task| stat(task.ok()?)).filter(is_waiting).count() > 0
    };
    (0..20).all(|_| {
        std::thread::sleep(Duration::from_millis(10));
        waiting()
    })
}

/// The kernel takes a node in that came with a listing from before the restore, when the restore tells it to forget all names at once.
#[test]
fn what_was_listed_before_a_restore_and_is_taken_in_late_is_forgotten() {
    let mut live = Live::with_options("mkdir look; echo x > look/at", &["--volatile"]);
    fill(&live, "start");
    live.checkpoint("start");
    fill(&live, "changed");
    live.remount();
    live.sh("find many -type f -size +100k");
    let found = restore_while_taking_in(&live, "late");
    assert_eq!(found.len(), 300);
    let wanted = live.json(&["show", "start:late"]);
    for (name, (ino, size, _)) in found {
        let node = wanted.iter().find(|node| node["path"] == format!("late/{name}")).unwrap();
        assert_eq!((node["ino"].as_u64(), size), (Some(ino), 5), "{name}");
        assert_eq!(std::fs::read(live.mnt.join("late").join(name)).unwrap(), b"start");
    }
    let [start, changed] = ["start", "changed"].map(|text| live.sh(&format!("grep -rlx {text} . | wc -l")));
    assert_eq!((start.trim(), changed.trim()), ("21300", "0"));
}

/// The same of attributes: the file is the same one, and the kernel is told to forget what it does not have yet.
#[test]
fn attributes_that_were_listed_before_a_restore_and_are_taken_in_late_are_forgotten() {
    let mut live = Live::new("mkdir look late; echo x > look/at; for n in 1 2 3; do echo x > late/$n; done");
    live.sh("chmod 640 late/*; chmod 1777 late");
    live.checkpoint("start");
    live.sh("chmod 600 late/*");
    live.remount();
    let found = restore_while_taking_in(&live, "late");
    assert_eq!(found.values().map(|(_, _, mode)| mode & 0o7777).collect::<Vec<_>>(), [0o640; 3]);
}

/// A file whose former content somebody holds has another id than its number, and comes with both.
#[test]
fn a_listing_tells_the_number_of_a_file_that_a_restore_brought_back() {
    let live = Live::new("mkdir dir look; echo x > look/at; for n in 1 2 3 4 5; do echo base > dir/$n; done");
    live.sh("for n in 1 2 3; do echo mine > dir/$n; done");
    let dir = live.mnt.join("dir");
    let before = seen(&dir);
    live.checkpoint("start");
    let mut holder = live.puppet("dir");
    holder.run(
        "fds = [os.open(str(n), os.O_RDWR) for n in (1, 2, 4)]; [os.pwrite(fd, b'more', 9) for fd in fds]",
    );
    live.restore("start");
    // The file is looked at, so those of the other directory come with their names.
    seen(&live.mnt.join("look"));
    assert_eq!(seen(&dir), before);
    holder.gives("[os.fstat(fd).st_size for fd in fds]", "[13, 13, 13]");
    holder.gives("{name: os.stat(name).st_ino == int(number) for number, name in (line.split() for line in os.popen('ls -i'))}", "{'1': True, '2': True, '3': True, '4': True, '5': True}");
}
