//! Process control: sessions, priorities, CPU affinity, inherited descriptors, fork; and unique
//! numbers.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::sys::signal::SigSet;
use nix::unistd::{ForkResult, Pid, fork};

/// Makes the process the leader of its own session, detached from the terminal (setsid(2)).
///
/// # Errors
/// EPERM if it leads a process group.
pub fn new_session() -> io::Result<()> {
    nix::unistd::setsid()?;
    Ok(())
}

/// Lowers the priority of this thread to a nice value (setpriority(2), which on Linux sets that of
/// a thread). An unprivileged process cannot raise it again.
///
/// # Errors
/// Those of setpriority(2).
pub fn set_nice(nice: i32) -> io::Result<()> {
    // SAFETY: setpriority(2) takes three numbers and touches no memory; 0 is the calling thread.
    Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) })?;
    Ok(())
}

/// Gives this thread the lowest priority (sched_setscheduler(2): SCHED_IDLE). It holds within the
/// control group of the thread only, which may be that of its session; against threads of other
/// groups, the group gets its full share of the CPU.
///
/// # Errors
/// Those of sched_setscheduler(2).
pub fn set_idle_priority() -> io::Result<()> {
    let of_idle = libc::sched_param { sched_priority: 0 };
    // SAFETY: sched_setscheduler(2) reads the parameters during the call; 0 is the calling thread.
    Errno::result(unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const of_idle) })?;
    Ok(())
}

/// The CPUs that this thread may run on (sched_getaffinity(2)); empty if they are unknown.
pub fn cpus() -> BTreeSet<usize> {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect()
}

/// The CPU that this thread runs on right now (getcpu(2)).
///
/// # Errors
/// Those of getcpu(2).
pub fn cpu() -> io::Result<usize> {
    Ok(sched_getcpu()?)
}

/// Sets the CPUs that this thread may run on (sched_setaffinity(2)).
///
/// # Errors
/// EINVAL if the process may use none of them; and those of sched_setaffinity(2).
pub fn set_affinity(cpus: &BTreeSet<usize>) -> io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().try_for_each(|cpu| set.set(*cpu))?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// Takes ownership of an inherited descriptor by its number. It closes on exec from now on.
///
/// # Errors
/// EBADF if there is no such descriptor, or if it is one of the standard three.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(Errno::EBADF.into());
    }
    // SAFETY: fcntl(2) fails with EBADF if the descriptor is not open; the borrow ends with the
    // call.
    fcntl(unsafe { BorrowedFd::borrow_raw(number) }, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    // SAFETY: the descriptor is open, as just checked, and no code of this program owns an
    // inherited one.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Duplicates an inherited descriptor (F_DUPFD_CLOEXEC of fcntl(2)).
///
/// # Errors
/// EBADF if there is no such descriptor.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl(2) fails with EBADF if the descriptor is not open; the borrow ends with the
    // call.
    let copy = fcntl(unsafe { BorrowedFd::borrow_raw(number) }, FcntlArg::F_DUPFD_CLOEXEC(3))?;
    // SAFETY: fcntl(2) returns a new descriptor that no other code owns.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Whether two descriptors of this process share one open file description (KCMP_FILE of kcmp(2)).
/// False if the kernel does not tell.
pub fn is_same_open_file(one: RawFd, other: RawFd) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    let own = std::process::id();
    // SAFETY: kcmp(2) takes numbers and touches no memory.
    unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, one, other) == 0 }
}

/// Makes a command start with each descriptor at its number (dup2(2)). No number may be that of
/// another of the descriptors. A descriptor that is at its number stays there, past exec.
pub fn with_descriptors(command: &mut Command, descriptors: Vec<(OwnedFd, RawFd)>) -> &mut Command {
    let place = move || {
        for (descriptor, number) in &descriptors {
            let own = descriptor.as_raw_fd();
            // SAFETY: dup2(2) and fcntl(2) take numbers, and the child owns its descriptors by
            // number only.
            Errno::result(unsafe {
                if own == *number {
                    libc::fcntl(own, libc::F_SETFD, 0)
                } else {
                    libc::dup2(own, *number)
                }
            })?;
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec and only calls dup2(2) and fcntl(2), which are
    // permitted there (signal-safety(7)).
    unsafe { command.pre_exec(place) }
}

/// Forks (fork(2)). Returns the child's id, or `None` in the child.
///
/// # Errors
/// EBUSY if this process has several threads: the child would have only this one, and the locks of
/// the others would stay held. And those of fork(2).
pub fn fork_alone() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(Errno::EBUSY.into());
    }
    // SAFETY: fork(2): with a single thread, no other thread leaves anything half done, so the
    // child may run any code.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Starts a command in which no signal is blocked; std passes on the mask of this thread.
///
/// # Errors
/// As [`Command::spawn`].
pub fn spawn_with_signals(command: &mut Command) -> io::Result<Child> {
    let unblock = || SigSet::empty().thread_set_mask().map_err(io::Error::from);
    // SAFETY: the closure runs between fork and exec and only calls sigprocmask(2), which is
    // permitted there (signal-safety(7)).
    unsafe { command.pre_exec(unblock) };
    command.spawn()
}

/// Gives this process a new session keyring, without the keys of the old one (keyctl(2)).
///
/// # Errors
/// ENOSYS if the kernel has no keys, EPERM if a container forbids the call, EDQUOT.
pub fn new_session_keyring() -> io::Result<()> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    let anonymous = std::ptr::null::<libc::c_char>();
    // SAFETY: KEYCTL_JOIN_SESSION_KEYRING(2const) takes a name, or NULL for a new anonymous
    // keyring.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, anonymous) };
    Errno::result(result)?;
    Ok(())
}

/// Gives the calling thread its own descriptor table with the standard three descriptors and `kept`
/// only (close_range(2), Linux 5.9; else unshare(2) and close(2)). The cost does not depend on the
/// number of descriptors.
///
/// The purpose: descriptors of other threads then close when *those* threads end, even while this
/// one waits for the kernel and cannot be ended. From then on this thread may use only `kept` and
/// descriptors that it opens itself. Other descriptor numbers of the program mean nothing in it.
///
/// # Errors
/// When a container forbids both calls. The thread then shares the table as before.
pub fn own_open_files(kept: Option<BorrowedFd<'_>>) -> io::Result<()> {
    // The numbers up to 2 are the standard ones.
    let kept = kept.map_or(2, |fd| fd.as_raw_fd().max(2));
    if close_range(kept + 1, RawFd::MAX, CLOSE_RANGE_UNSHARE).is_err() {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES)?;
        return close_listed(kept);
    }
    if kept > 3 { close_range(3, kept - 1, 0) } else { Ok(()) }
}

/// Closes all descriptors but the standard three and `kept`.
fn close_listed(kept: RawFd) -> io::Result<()> {
    let listed = std::fs::read_dir("/proc/thread-self/fd")?;
    // Collected first: reading the directory uses a descriptor too, which its owner closes.
    let numbers: Vec<RawFd> =
        listed.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|fd| *fd > 2 && *fd != kept) {
        match nix::unistd::close(number) {
            Ok(()) | Err(Errno::EBADF) => {}
            Err(error) => log::debug!("close descriptor {number} of a thread: {error}"),
        }
    }
    Ok(())
}

/// Copies the descriptor table for the calling thread first (close_range(2)).
const CLOSE_RANGE_UNSHARE: libc::c_long = 1 << 1;

/// Closes the descriptors from `first` to `last`, both included (close_range(2)).
fn close_range(first: RawFd, last: RawFd, flags: libc::c_long) -> io::Result<()> {
    let (first, last) = (libc::c_long::from(first), libc::c_long::from(last));
    // SAFETY: close_range(2) takes numbers only. It closes descriptors in a table that only this
    // thread has, by CLOSE_RANGE_UNSHARE or by a call with it before.
    Errno::result(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) })?;
    Ok(())
}

/// A number that differs between calls and between processes. For names of temporary files, not for
/// secrets.
pub fn unlikely_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn closing_in_a_thread_with_its_own_table_affects_no_other_thread() {
        let (file, kept) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let number = file.as_raw_fd();
        std::thread::scope(|scope| {
            let alone = scope.spawn(|| {
                super::own_open_files(Some(kept.as_fd())).unwrap();
                let gone = std::fs::metadata(format!("/proc/thread-self/fd/{number}")).is_err();
                let made = tempfile::tempfile().unwrap();
                (gone, kept.metadata().is_ok(), made.metadata().is_ok())
            });
            assert_eq!(alone.join().unwrap(), (true, true, true));
        });
        assert!(file.metadata().is_ok() && kept.metadata().is_ok());
    }

    #[test]
    fn a_table_of_its_own_has_the_standard_descriptors_and_the_kept_one() {
        let files: Vec<_> = (0..50).map(|_| tempfile::tempfile().unwrap()).collect();
        let left = |kept: Option<usize>| {
            let files = &files;
            let list = move || {
                super::own_open_files(kept.map(|at| files[at].as_fd())).unwrap();
                let open = |fd: &std::fs::File| fd.metadata().is_ok();
                let open = files.iter().enumerate().filter(|(_, fd)| open(fd)).map(|(at, _)| at);
                (open.collect::<Vec<_>>(), nix::sys::stat::fstat(std::io::stderr()).is_ok())
            };
            std::thread::scope(|scope| scope.spawn(list).join().unwrap())
        };
        assert_eq!(left(None), (vec![], true));
        for at in [0, 1, 30, 49] {
            assert_eq!(left(Some(at)), (vec![at], true));
        }
        assert!(files.iter().all(|file| file.metadata().is_ok()));
    }

    #[test]
    fn descriptors_are_not_closed_one_by_one() {
        let file = tempfile::tempfile().unwrap();
        let is_closed = std::thread::scope(|scope| {
            let alone = scope.spawn(|| {
                crate::sys::testing::refuse_call(libc::SYS_close, nix::errno::Errno::EPERM);
                super::own_open_files(None).unwrap();
                file.metadata().is_err()
            });
            alone.join().unwrap()
        });
        assert!(is_closed, "the descriptor is closed in the thread");
        assert!(file.metadata().is_ok());
    }

    #[test]
    fn unlikely_numbers_differ() {
        let numbers: std::collections::HashSet<u64> =
            (0..1000).map(|_| super::unlikely_number()).collect();
        assert_eq!(numbers.len(), 1000);
    }
}
