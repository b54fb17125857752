//! The parts of becoming a daemon, and random numbers.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::sys::signal::SigSet;
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, Pid, dup2_stderr, dup2_stdin, dup2_stdout, fork};

/// Makes the process the leader of a session of its own, away from the terminal (setsid(2)).
///
/// # Errors
/// EPERM if it leads a process group already.
pub fn new_session() -> io::Result<()> {
    nix::unistd::setsid()?;
    Ok(())
}

/// Connects standard input, output and error to `/dev/null` (dup2(2)).
///
/// # Errors
/// Those of open(2) and dup2(2).
pub fn silence_stdio() -> io::Result<()> {
    let null = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(())
}

/// Lets other threads of the machine go before this one (setpriority(2): of a thread, on Linux). There is no way back for a
/// process without privileges.
///
/// # Errors
/// Those of setpriority(2).
pub fn stand_back(nice: i32) -> io::Result<()> {
    // SAFETY: setpriority(2) takes three numbers and touches no memory; 0 is the calling thread.
    Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) })?;
    Ok(())
}

/// Gives this thread the lowest priority (sched_setscheduler(2): SCHED_IDLE). Among the threads of its control group, which may be that of its session:
/// with those of others the group shares the CPU as any other.
///
/// # Errors
/// Those of sched_setscheduler(2).
pub fn give_way() -> io::Result<()> {
    let of_idle = libc::sched_param { sched_priority: 0 };
    // SAFETY: sched_setscheduler(2) reads the parameters during the call; 0 is the calling thread.
    Errno::result(unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const of_idle) })?;
    Ok(())
}

/// The CPUs that this thread may run on (sched_getaffinity(2)); none if nobody says.
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

/// Lets this thread run on these CPUs only (sched_setaffinity(2)).
///
/// # Errors
/// EINVAL if it is none that the process may use. And those of sched_setaffinity(2).
pub fn stay_on(cpus: &BTreeSet<usize>) -> io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().try_for_each(|cpu| set.set(*cpu))?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// Whether the CPU says that it is one of a virtual machine (the flag `hypervisor` of `/proc/cpuinfo`, on x86; others do not say).
pub fn is_in_virtual_machine() -> bool {
    let says = |text: String| {
        let flags = text.lines().find(|line| line.starts_with("flags")).map(str::to_owned);
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
    };
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(says)
}

/// Takes a descriptor that this process has inherited and was told the number of; it is not kept over exec from now on.
///
/// # Errors
/// EBADF if there is none of that number, or if it is one of the standard three.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(Errno::EBADF.into());
    }
    // SAFETY: fcntl(2) answers EBADF for a descriptor that is not open, and the borrow ends with the call.
    fcntl(unsafe { BorrowedFd::borrow_raw(number) }, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    // SAFETY: it is open, as was just seen, and nobody in this program owns a descriptor that it was started with.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A second descriptor of what an inherited one leads to (F_DUPFD_CLOEXEC of fcntl(2)).
///
/// # Errors
/// EBADF if there is none of that number.
pub fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl(2) answers EBADF for a descriptor that is not open, and the borrow ends with the call.
    let copy = fcntl(unsafe { BorrowedFd::borrow_raw(number) }, FcntlArg::F_DUPFD_CLOEXEC(3))?;
    // SAFETY: fcntl(2) returns a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Whether two descriptors of this process share one open file, with its offset (KCMP_FILE of kcmp(2)). False where the kernel
/// does not say.
pub fn is_same_open_file(one: RawFd, other: RawFd) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    let own = std::process::id();
    // SAFETY: kcmp(2) takes numbers and touches no memory.
    unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, one, other) == 0 }
}

/// Makes a command begin with each descriptor under its number (dup2(2)). No number may be that of another descriptor here.
pub fn with_descriptors(command: &mut Command, descriptors: Vec<(OwnedFd, RawFd)>) -> &mut Command {
    let place = move || {
        for (descriptor, number) in &descriptors {
            // SAFETY: dup2(2) takes numbers, and the child owns none of its descriptors but by number.
            Errno::result(unsafe { libc::dup2(descriptor.as_raw_fd(), *number) })?;
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec and only calls dup2(2), which is safe there (signal-safety(7)).
    unsafe { command.pre_exec(place) }
}

/// Makes a child that goes on from here (fork(2)): its number, or `None` in the child.
///
/// # Errors
/// EBUSY if this process has several threads: in the child only this one would live, and the locks of the others would be
/// held for ever. And those of fork(2).
pub fn fork_alone() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(Errno::EBUSY.into());
    }
    // SAFETY: fork(2): with a single thread nothing is left half done by another, so the child may do what it likes.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Starts a command in which no signal is blocked: std hands the mask of this thread on.
///
/// # Errors
/// As [`Command::spawn`].
pub fn spawn_with_signals(command: &mut Command) -> io::Result<Child> {
    let unblock = || SigSet::empty().thread_set_mask().map_err(io::Error::from);
    // SAFETY: the closure runs between fork and exec and only calls sigprocmask(2), which is safe there
    // (signal-safety(7)).
    unsafe { command.pre_exec(unblock) };
    command.spawn()
}

/// Gives this process a session keyring of its own, without the keys of the one that it was started with (keyctl(2)).
///
/// # Errors
/// ENOSYS where the kernel has no keys, EPERM where a container does not let the call through, EDQUOT.
pub fn new_session_keyring() -> io::Result<()> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    let anonymous = std::ptr::null::<libc::c_char>();
    // SAFETY: KEYCTL_JOIN_SESSION_KEYRING(2const) takes a name, or NULL for a new keyring without one.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, anonymous) };
    Errno::result(result)?;
    Ok(())
}

/// Gives the calling thread a table of open files of its own, in which there are the standard three and `kept`, and nothing else
/// (close_range(2), Linux 5.9; else unshare(2) and close(2)).
///
/// Why somebody wants that: what other threads have open is closed when *they* end, although this thread cannot be ended because
/// it waits for an answer of the kernel. Every other descriptor that this program knows by its number means nothing in this
/// thread from then on: it may use only what was named here and what it opens itself.
///
/// # Errors
/// Where a container allows neither call; the thread shares the table as before.
pub fn own_open_files(kept: Option<BorrowedFd<'_>>) -> io::Result<()> {
    if unshare_open_files().is_err() {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES)?;
    }
    let kept = kept.map(|fd| fd.as_raw_fd());
    let listed = std::fs::read_dir("/proc/thread-self/fd")?;
    // Collected first: the directory that is read has a descriptor too, and it is closed by its owner.
    let numbers: Vec<RawFd> =
        listed.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|fd| *fd > 2 && Some(*fd) != kept) {
        match nix::unistd::close(number) {
            Ok(()) | Err(Errno::EBADF) => {}
            Err(error) => log::debug!("close descriptor {number} of a thread: {error}"),
        }
    }
    Ok(())
}

fn unshare_open_files() -> io::Result<()> {
    const CLOSE_RANGE_UNSHARE: libc::c_long = 1 << 1;
    // No descriptor has the highest number: nothing is closed by this, and no table is left half copied.
    let none = libc::c_long::from(RawFd::MAX);
    // SAFETY: close_range(2) takes numbers only; with CLOSE_RANGE_UNSHARE it closes in a table that this thread alone has.
    Errno::result(unsafe { libc::syscall(libc::SYS_close_range, none, none, CLOSE_RANGE_UNSHARE) })?;
    Ok(())
}

/// A number that differs from call to call and from process to process; for names of temporary files, not for
/// secrets.
pub fn unlikely_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn what_a_thread_with_open_files_of_its_own_closes_stays_open_for_the_others() {
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
    fn unlikely_numbers_differ() {
        let numbers: std::collections::HashSet<u64> = (0..1000).map(|_| super::unlikely_number()).collect();
        assert_eq!(numbers.len(), 1000);
    }
}
