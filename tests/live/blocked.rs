//! Holds the lock of a directory in the kernel: its names are read into memory that blocks every
//! writer until it is released.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Memory that blocks every access, also by the kernel in a system call, until it is released.
pub struct Blocked {
    faults: OwnedFd,
    address: usize,
}

const PAGE: usize = 4096;
const PAGES: usize = 16;

#[expect(unsafe_code, reason = "userfaultfd(2) has no safe wrapper here")]
impl Blocked {
    pub fn new() -> Blocked {
        // SAFETY: mmap(2) creates a new mapping; userfaultfd(2) creates a descriptor; the
        // structures are those of ioctl_userfaultfd(2).
        unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let address =
                libc::mmap(std::ptr::null_mut(), PAGE * PAGES, access, flags, -1, 0) as usize;
            // Without O_NONBLOCK, poll(2) reports POLLERR at once.
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            let faults = OwnedFd::from_raw_fd(i32::try_from(fd).unwrap());
            let blocked = Blocked { faults, address };
            blocked.call(0x3f, &mut [0xaa, 0, 0]);
            // UFFDIO_REGISTER, for missing pages.
            blocked.call(0, &mut [address as u64, (PAGE * PAGES) as u64, 1, 0]);
            blocked
        }
    }

    fn call<const N: usize>(&self, number: u64, arguments: &mut [u64; N]) {
        let request = (3 << 30) | ((N as u64 * 8) << 16) | (0xaa << 8) | number;
        // SAFETY: ioctl_userfaultfd(2) reads and writes a structure as large as the request says.
        let result =
            unsafe { libc::ioctl(self.faults.as_raw_fd(), request, arguments.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    /// Waits until a thread blocks on the memory.
    pub fn wait(&self) {
        let mut ready = [PollFd::new(self.faults.as_fd(), PollFlags::POLLIN)];
        let count = poll(&mut ready, PollTimeout::from(20_000_u16)).unwrap();
        assert_eq!(count, 1, "no thread blocked");
        assert_eq!(ready[0].revents(), Some(PollFlags::POLLIN));
    }

    /// Releases all threads.
    pub fn open(&self) {
        self.call(4, &mut [self.address as u64, (PAGE * PAGES) as u64, 0, 0]);
    }

    /// Reads names of a directory into the memory. Returns the number of bytes.
    pub fn list(&self, dir: &File) -> i64 {
        let (fd, len) = (dir.as_raw_fd(), PAGE * PAGES);
        // SAFETY: getdents64(2) writes at most `len` bytes to memory that is that long.
        unsafe { libc::syscall(libc::SYS_getdents64, fd, self.address as *mut u8, len) }
    }
}

/// Releases all threads when it is dropped, also by a panic: a blocked thread could not be joined.
pub struct Opening<'a>(pub &'a Blocked);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Whether a thread of a process waits for a lock in the kernel for longer than a moment.
pub fn waits_in_the_kernel(pid: nix::unistd::Pid) -> bool {
    let waiting = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).ok();
        let is_waiting =
            |stat: &String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('D'));
        tasks.filter_map(|task| stat(task.ok()?)).filter(is_waiting).count() > 0
    };
    (0..20).all(|_| {
        std::thread::sleep(Duration::from_millis(10));
        waiting()
    })
}
