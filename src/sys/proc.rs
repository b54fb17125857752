//! Reads `/proc` for facts about other processes and the machine.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nix::sys::stat::makedev;

/// The processes that may hold dirty pages of a filesystem through a mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// `st_ino` of a file and the id of a process that maps it shared. Sorted, without duplicates.
    pub files: Vec<(u64, u32)>,
    /// Processes whose mappings are not readable: they may map any file.
    pub unreadable: Vec<u32>,
}

/// Finds the live shared mappings of files of the filesystem `dev` in `/proc/*/maps`.
///
/// * Read-only mappings count too: they may have been writable when their pages became dirty
///   (mprotect(2)).
/// * An unreadable process counts if its user can reach the mount: if its real uid is ours, or
///   always with `all_users`.
/// * Kernel threads and zombies map nothing. But a process whose first thread has ended looks like
///   a zombie; its other threads are read.
/// * A process that `hidepid` hides is not seen at all.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn shared_maps(dev: u64, all_users: bool) -> io::Result<Scan> {
    let own_uid = nix::unistd::getuid().as_raw();
    let mut scan = Scan::default();
    for pid in numbered(std::fs::read_dir("/proc")?) {
        match maps_of(pid) {
            Ok(text) => scan.files.extend(parse_maps(&text, dev).into_iter().map(|ino| (ino, pid))),
            // The process and its mappings have ended meanwhile.
            Err(error) if is_gone(&error) => {}
            // Permission denied: the process has memory.
            Err(_) => {
                let Ok(status) = std::fs::read(format!("/proc/{pid}/status")) else {
                    continue;
                };
                if all_users || real_uid(&status) == Some(own_uid) {
                    scan.unreadable.push(pid);
                }
            }
        }
    }
    scan.files.sort_unstable();
    scan.files.dedup();
    Ok(scan)
}

/// The mappings of a process, read from its first thread or, if that has ended, from any other.
fn maps_of(pid: u32) -> io::Result<Vec<u8>> {
    let text = std::fs::read(format!("/proc/{pid}/maps"))?;
    if !text.is_empty() {
        return Ok(text);
    }
    for thread in
        numbered(std::fs::read_dir(format!("/proc/{pid}/task"))?).filter(|thread| *thread != pid)
    {
        match std::fs::read(format!("/proc/{pid}/task/{thread}/maps")) {
            Ok(text) if text.is_empty() => {}
            Err(error) if is_gone(&error) => {}
            other => return other,
        }
    }
    Ok(Vec::new())
}

/// The entries of a directory of `/proc` that are numbers.
pub(super) fn numbered(listed: std::fs::ReadDir) -> impl Iterator<Item = u32> {
    listed.filter_map(|entry| parse_number(entry.ok()?.file_name().as_bytes()))
}

/// The first two numbers of the kernel's release (uname(2)); `None` if it has another form.
pub fn kernel_release() -> Option<(u32, u32)> {
    let about = nix::sys::utsname::uname().ok()?;
    parse_release(about.release().as_bytes())
}

fn parse_release(text: &[u8]) -> Option<(u32, u32)> {
    let mut numbers = text
        .split(|byte| !byte.is_ascii_digit())
        .map(|part| std::str::from_utf8(part).ok()?.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Whether the kernel supports a filesystem of this name (proc_filesystems(5)).
///
/// # Errors
/// When `/proc/filesystems` cannot be read.
pub fn has_filesystem(name: &[u8]) -> io::Result<bool> {
    let text = std::fs::read("/proc/filesystems")?;
    let mut lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    Ok(lines.any(|line| line.rsplit(|byte| *byte == b'\t').next() == Some(name)))
}

/// Identifies the present boot of the machine (random(4)).
///
/// # Errors
/// When `/proc/sys/kernel/random/boot_id` cannot be read; `InvalidData` if it is no id.
pub fn boot_id() -> io::Result<[u8; 16]> {
    #[cfg(feature = "crash-points")]
    if let Some((boot, _)) = crate::sys::failpoint::boot() {
        return Ok(boot);
    }
    let text = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    parse_id(&text)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "boot_id is not an id"))
}

/// The process that holds the flock(2) of a file, by `/proc/locks`. `None` if no process holds it,
/// or the holder is in a foreign pid namespace.
///
/// # Errors
/// When `/proc/locks` cannot be read.
pub fn flock_holder<Fd: AsFd>(file: Fd) -> io::Result<Option<u32>> {
    let stat = nix::sys::stat::fstat(file)?;
    let (major, minor) = (nix::sys::stat::major(stat.st_dev), nix::sys::stat::minor(stat.st_dev));
    let wanted = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let locks = std::fs::read_to_string("/proc/locks")?;
    Ok(locks.lines().find_map(|line| holder_in(line, &wanted)))
}

/// `1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF`. A waiting process has an arrow after the
/// number.
fn holder_in(line: &str, wanted: &str) -> Option<u32> {
    let mut words = line.split_ascii_whitespace().skip(1);
    (words.next()? == "FLOCK").then_some(())?;
    let pid = words.nth(2)?.parse().ok().filter(|pid| *pid > 0)?;
    (words.next()? == wanted).then_some(pid)
}

/// The initial user namespace: the kernel gives it a fixed number (`USER_NS_INIT_INO`).
const INITIAL_USER_NAMESPACE: &[u8] = b"user:[4026531837]";

/// The privileges of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Privileges {
    /// Its effective capabilities, as a mask (capabilities(7)). 0 if it is in another user
    /// namespace than the initial one: there every user can get all of them. `None` if the
    /// namespace is hidden.
    pub capabilities: Option<u64>,
    /// Its supplementary groups.
    pub groups: Vec<u32>,
}

/// The privileges of a thread (proc_pid_status(5)); `None` if it has ended or is hidden.
pub fn privileges(tid: u32) -> Option<Privileges> {
    let (capabilities, groups) =
        parse_privileges(&std::fs::read(format!("/proc/{tid}/status")).ok()?)?;
    let namespace = std::fs::read_link(format!("/proc/{tid}/ns/user")).ok();
    let is_initial = |found: PathBuf| found.as_os_str().as_bytes() == INITIAL_USER_NAMESPACE;
    let capabilities = namespace.map(|found| if is_initial(found) { capabilities } else { 0 });
    Some(Privileges { capabilities, groups })
}

/// How a process is confined, as far as every process may read it (proc_pid_status(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confines {
    /// In how many pid namespaces it has an id, counted from that of this `/proc`.
    pub depth: usize,
    /// The number of its seccomp filters. Before Linux 5.9, which does not count them, 1 if there
    /// are any.
    pub filters: u32,
}

impl Confines {
    /// Reads those of a process; `None` if it has ended or is hidden.
    pub fn of(pid: u32) -> Option<Confines> {
        parse_confines(&std::fs::read(format!("/proc/{pid}/status")).ok()?)
    }
}

fn parse_confines(status: &[u8]) -> Option<Confines> {
    let numbers = status_line(status, b"NSpid:")?.split(u8::is_ascii_whitespace);
    let count = |key: &[u8]| parse_number(status_line(status, key)?.trim_ascii());
    let filters =
        count(b"Seccomp_filters:").unwrap_or_else(|| u32::from(count(b"Seccomp:") == Some(2)));
    Some(Confines { depth: numbers.filter(|number| !number.is_empty()).count(), filters })
}

/// Whether a process is `ancestor` or a descendant of it, also one that was reparented to it.
pub fn comes_from(mut pid: u32, ancestor: u32) -> bool {
    let mut child = u64::MAX;
    loop {
        // A parent that started later than its child has only reused the parent's id.
        let Some((parent, started)) =
            parent_and_start(pid).filter(|(_, started)| *started <= child)
        else {
            return false;
        };
        if pid == ancestor || parent == 0 {
            return pid == ancestor;
        }
        (pid, child) = (parent, started);
    }
}

/// The fourth and the twenty-second field of proc_pid_stat(5). Fields are counted after the name,
/// which may contain any bytes.
fn parent_and_start(pid: u32) -> Option<(u32, u64)> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let behind = stat.rsplitn(2, |byte| *byte == b')').next()?;
    let mut fields = std::str::from_utf8(behind).ok()?.split_ascii_whitespace().skip(1);
    Some((fields.next()?.parse().ok()?, fields.nth(17)?.parse().ok()?))
}

/// The effective capabilities and the groups.
fn parse_privileges(status: &[u8]) -> Option<(u64, Vec<u32>)> {
    let digits = status_line(status, b"CapEff:")?.trim_ascii();
    let capabilities = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    let groups = status_line(status, b"Groups:")?.split(u8::is_ascii_whitespace);
    Some((capabilities, groups.filter_map(parse_number).collect()))
}

/// The program of a thread (`comm`), without a newline; `None` if it has ended or is hidden.
pub fn program_of(tid: u32) -> Option<Vec<u8>> {
    let mut name = std::fs::read(format!("/proc/{tid}/comm")).ok()?;
    if name.last() == Some(&b'\n') {
        name.pop();
    }
    Some(name)
}

/// Whether a blocked thread is in readlink(2) or readlinkat(2). `None` if that is unknown: the
/// thread has ended, is hidden, or runs. Worker threads of the kernel, such as those of io_uring,
/// are in none. A thread that uses another ABI (32 bits) is in none either: its numbers mean other
/// calls.
pub fn is_in_readlink(tid: u32) -> Option<bool> {
    let path = format!("/proc/{tid}/syscall");
    for _ in 0..ABOUT_TO_SLEEP {
        match std::fs::read(&path).ok()? {
            // It has sent its request and is about to wait for the reply.
            running if running.starts_with(b"running") => std::thread::yield_now(),
            text => return parse_syscall(&text),
        }
    }
    None
}

/// How often to look again at a thread that is about to sleep.
const ABOUT_TO_SLEEP: usize = 1000;

/// `89 0x7ffe... 0x... 0x... 0x... 0x... 0x... SP PC` (proc_pid_syscall(5)), or `running`, or `-1
/// SP PC`.
fn parse_syscall(text: &[u8]) -> Option<bool> {
    let text = std::str::from_utf8(text).ok()?;
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    let [number, .., stack, counter] = &fields[..] else { return None };
    let number: libc::c_long = number.parse().ok()?;
    // A worker thread of the kernel keeps the number of the call that created it, but has no stack.
    let has_stack = |address: &str| address.strip_prefix("0x").is_some_and(|digits| digits != "0");
    Some(READLINKS.contains(&number) && fields.len() == 9 && has_stack(stack) && has_stack(counter))
}

#[cfg(target_arch = "x86_64")]
const READLINKS: &[libc::c_long] = &[libc::SYS_readlink, libc::SYS_readlinkat];
#[cfg(not(target_arch = "x86_64"))]
const READLINKS: &[libc::c_long] = &[libc::SYS_readlinkat];

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// The inode numbers of the shared mappings of files of `dev`, without duplicates
/// (proc_pid_maps(5)).
///
/// `7f00-7f10 rw-s 00000000 08:01 4242  /path`
fn parse_maps(text: &[u8], dev: u64) -> Vec<u64> {
    let mut found: Vec<u64> =
        text.split(|&byte| byte == b'\n').filter_map(|line| parse_map(line, dev)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn parse_map(line: &[u8], dev: u64) -> Option<u64> {
    let mut fields = line.split(|&byte| byte == b' ');
    let permissions = fields.nth(1)?;
    if permissions.get(3) != Some(&b's') {
        return None;
    }
    let device = std::str::from_utf8(fields.nth(1)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device =
        makedev(u64::from_str_radix(major, 16).ok()?, u64::from_str_radix(minor, 16).ok()?);
    let ino: u64 = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    (device == dev && ino != 0).then_some(ino)
}

fn real_uid(status: &[u8]) -> Option<u32> {
    parse_number(
        status_line(status, b"Uid:")?
            .split(|byte| byte.is_ascii_whitespace())
            .find(|f| !f.is_empty())?,
    )
}

fn status_line<'a>(status: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))
}

fn parse_number(digits: &[u8]) -> Option<u32> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn parse_id(text: &[u8]) -> Option<[u8; 16]> {
    let digits: Vec<u8> =
        text.iter().copied().filter(|&byte| byte != b'-' && byte != b'\n').collect();
    let mut id = [0; 16];
    if digits.len() != 2 * id.len() {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::testing::run_as_ordinary_user;
    use std::os::unix::fs::MetadataExt;

    const MAPS: &[u8] = b"\
        55d0-55d1 r--p 00000000 08:01 10                         /bin/cat\n\
        7f00-7f01 rw-s 00000000 08:01 42                         /data/with space\n\
        7f01-7f02 rw-s 00001000 08:01 42                         /data/with space (deleted)\n\
        7f02-7f03 -w-s 00000000 08:01 43\n\
        7f03-7f04 r--s 00000000 08:01 44                         /data/read only\n\
        7f04-7f05 rw-p 00000000 08:01 45                         /data/private\n\
        7f05-7f06 rw-s 00000000 08:02 46                         /other/device\n\
        7f06-7f07 rw-s 00000000 08:01 0\n\
        7f07-7f08 rw-p 00000000 00:00 0                          [heap]\n\
        torn";

    #[test]
    fn the_kernel_release_is_parsed() {
        assert!(kernel_release().is_some_and(|release| release > (5, 0)));
        for (text, release) in
            [("6.18.0-rc1+", Some((6, 18))), ("6.1", Some((6, 1))), ("10.0.3", Some((10, 0)))]
        {
            assert_eq!(parse_release(text.as_bytes()), release);
        }
        assert_eq!([parse_release(b""), parse_release(b"six.one"), parse_release(b"6")], [None; 3]);
    }

    #[test]
    fn known_filesystems_are_found() {
        assert!(has_filesystem(b"proc").unwrap() && !has_filesystem(b"pro").unwrap());
        assert!(!has_filesystem(b"nodev").unwrap() && !has_filesystem(b"").unwrap());
    }

    #[test]
    fn only_shared_mappings_of_the_device_count() {
        assert_eq!(parse_maps(MAPS, makedev(8, 1)), [42, 43, 44]);
        assert_eq!(parse_maps(MAPS, makedev(8, 2)), [46]);
        assert!(parse_maps(MAPS, makedev(0, 0)).is_empty());
    }

    #[test]
    fn a_live_mapping_is_found_by_its_process() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let (dev, ino) = (file.metadata().unwrap().dev(), file.metadata().unwrap().ino());
        let own = (ino, std::process::id());
        assert!(!shared_maps(dev, true).unwrap().files.contains(&own));
        let length = std::num::NonZeroUsize::new(4096).unwrap();
        // SAFETY: mmap(2) of a file of that length at an address that the kernel chooses; the test
        // neither reads nor writes it.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length.get(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                std::os::fd::AsRawFd::as_raw_fd(&file),
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        assert!(shared_maps(dev, true).unwrap().files.contains(&own));
        // SAFETY: munmap(2) of exactly the mapping from above, which is not used again.
        assert_eq!(unsafe { libc::munmap(address, length.get()) }, 0);
        assert!(!shared_maps(dev, true).unwrap().files.contains(&own));
    }

    #[test]
    fn a_read_only_mapping_is_found_after_the_first_thread_has_ended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let metadata = file.as_file().metadata().unwrap();
        let script = "import ctypes, mmap, sys, threading
file = open(sys.argv[1], 'r+b')
m = mmap.mmap(file.fileno(), 0)
libc, address = ctypes.CDLL(None), ctypes.addressof(ctypes.c_char.from_buffer(m))
def go():
    main.join(0.1)
    while open('/proc/self/stat').read().split(') ')[1][0] != 'Z': pass
    print('alone', libc.mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ), flush=True)
    sys.stdin.read()
main = threading.current_thread()
threading.Thread(target=go).start()
libc.pthread_exit(None)";
        let mut command = std::process::Command::new("python3");
        let command = command.args(["-I", "-S", "-c", script]).arg(file.path());
        let pipe = std::process::Stdio::piped;
        let mut child = command.stdin(pipe()).stdout(pipe()).spawn().unwrap();
        let mut said = [0; 8];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        let found = shared_maps(metadata.dev(), true).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(said, *b"alone 0\n");
        assert!(found.files.contains(&(metadata.ino(), child.id())), "{found:?}");
    }

    const WATCHED: &str = "JAILFS_TEST_WATCHED_PID";

    /// Runs the next test in a process of an ordinary user, who may not inspect this one.
    #[test]
    fn an_ordinary_user_gets_the_list_of_unreadable_processes() {
        let own = std::process::id().to_string();
        run_as_ordinary_user("sys::proc::tests::ordinary_user", (WATCHED, own.as_ref()));
    }

    #[test]
    fn ordinary_user() {
        let Ok(watched) = std::env::var(WATCHED) else {
            return;
        };
        let watched: u32 = watched.parse().unwrap();
        let all_users = shared_maps(1, true).unwrap();
        assert!(all_users.unreadable.contains(&watched));
        for pid in &all_users.unreadable {
            if let Ok(status) = std::fs::read(format!("/proc/{pid}/status")) {
                assert!(
                    status_line(&status, b"Kthread:").is_none_or(|flag| flag.ends_with(b"0")),
                    "{pid}"
                );
            }
        }
        let ours = shared_maps(1, false).unwrap();
        assert!(
            !ours.unreadable.contains(&watched) && !ours.unreadable.contains(&std::process::id())
        );
    }

    #[test]
    fn privileges_of_a_thread_are_read() {
        assert!(privileges(std::process::id()).unwrap().capabilities.is_some());
        assert_eq!(privileges(0), None);
        let parsed =
            parse_privileges(b"Name:\tx\nGroups:\t4 24 1000 \nCapEff:\t000001ffffffffff\n")
                .unwrap();
        assert_eq!(parsed, (0x1ff_ffff_ffff, vec![4, 24, 1000]));
        assert_eq!(parse_privileges(b"Groups:\t \nCapEff:\t0\n"), Some((0, Vec::new())));
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn only_a_blocked_readlink_of_our_own_abi_is_one() {
        let tail = "0xffffff9c 0x7ffc0000 0x7ffc1000 0x1000 0x0 0x0 0x7ffc2000 0x7f0000001000\n";
        for (number, is) in
            [("89", true), ("267", true), ("257", false), ("78", false), ("85", false)]
        {
            assert_eq!(parse_syscall(format!("{number} {tail}").as_bytes()), Some(is), "{number}");
        }
        // A worker of io_uring, created during a readlink, has no stack.
        let worker = b"267 0xffffff9c 0x7ffc0000 0x7ffc1000 0x1000 0x0 0x0 0x0 0x0\n";
        assert_eq!(parse_syscall(worker), Some(false));
        assert_eq!(
            parse_syscall(b"1073741913 0x0 0x0 0x0 0x0 0x0 0x0 0x1 0x1\n"),
            Some(false),
            "x32"
        );
        assert_eq!(
            parse_syscall(b"-1 0x7ffc2000 0x7f0000001000\n"),
            Some(false),
            "in no system call"
        );
        for odd in [&b"running\n"[..], b"", b"\xff", b"0x59 1 2"] {
            assert_eq!(parse_syscall(odd), None);
        }
        assert_eq!(is_in_readlink(0), None);
        assert_eq!(
            is_in_readlink(std::process::id()),
            is_in_readlink(std::process::id()).filter(|is| !is)
        );
        assert_eq!(program_of(0), None);
    }

    #[test]
    fn the_confinement_of_a_process_is_read() {
        let parse = |text: &str| parse_confines(text.as_bytes());
        let confined = parse("NSpid:\t77\t3\nSeccomp:\t2\nSeccomp_filters:\t4\n");
        assert_eq!(confined, Some(Confines { depth: 2, filters: 4 }));
        assert_eq!(parse("NSpid:\t7\nSeccomp:\t2\n"), Some(Confines { depth: 1, filters: 1 }));
        assert_eq!(parse("NSpid:\t7\nSeccomp:\t0\n"), Some(Confines { depth: 1, filters: 0 }));
        assert_eq!(parse("Seccomp:\t0\n"), None);
        assert!(Confines::of(std::process::id()).is_some() && Confines::of(u32::MAX).is_none());
    }

    #[test]
    fn a_process_descends_from_its_parents() {
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(
            comes_from(child.id(), own)
                && comes_from(own, own)
                && comes_from(child.id(), child.id())
        );
        assert!(!comes_from(own, child.id()) && !comes_from(1, own) && !comes_from(u32::MAX, own));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_real_uid_is_read() {
        let own = std::fs::read("/proc/self/status").unwrap();
        assert_eq!(real_uid(&own), Some(nix::unistd::getuid().as_raw()));
        assert_eq!(real_uid(b"Name:\tkthreadd\nUid:\t0\t1\t2\t3\n"), Some(0));
    }

    #[test]
    fn the_boot_id_is_stable() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
        assert_eq!(parse_id(b"00112233-4455-6677-8899-aabbccddeeff\n").unwrap()[15], 0xff);
        assert!(parse_id(b"0011").is_none() && parse_id(&[b'x'; 32]).is_none());
    }
}
