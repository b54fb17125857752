//! What `/proc` tells about other processes and the machine.

use std::io;
use std::os::unix::ffi::OsStrExt;

use nix::sys::stat::makedev;

/// Who may hold dirty pages of a filesystem through a mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// `st_ino` of a file, and the process that has it mapped shared and writable. Sorted, each pair once.
    pub files: Vec<(u64, u32)>,
    /// Processes whose mappings we may not see: they may have any file mapped.
    pub unreadable: Vec<u32>,
}

/// Finds the live shared writable mappings (`rw-s`) of files of the filesystem `dev`, by reading `/proc/*/maps`.
/// Unreadable processes count if their real uid is ours, or all of them if `all_users`: those whose users can reach
/// the mount. Kernel threads and zombies map nothing. Processes hidden by `hidepid` are not seen at all.
///
/// # Errors
/// Those of reading `/proc`.
pub fn shared_writable_maps(dev: u64, all_users: bool) -> io::Result<Scan> {
    let own_uid = nix::unistd::getuid().as_raw();
    let mut scan = Scan::default();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry.ok().and_then(|entry| parse_number(entry.file_name().as_bytes())) else {
            continue;
        };
        match std::fs::read(format!("/proc/{pid}/maps")) {
            Ok(text) => {
                scan.files.extend(parse_maps(&text, dev).into_iter().map(|ino| (ino, pid)));
            }
            // The process ended meanwhile, and its mappings with it.
            Err(error) if is_gone(&error) => {}
            Err(_) => {
                let Ok(status) = std::fs::read(format!("/proc/{pid}/status")) else {
                    continue;
                };
                if has_memory(&status) && (all_users || real_uid(&status) == Some(own_uid)) {
                    scan.unreadable.push(pid);
                }
            }
        }
    }
    scan.files.sort_unstable();
    scan.files.dedup();
    Ok(scan)
}

/// Distinguishes one boot of the machine from the next (random(4)).
///
/// # Errors
/// Those of reading `/proc/sys/kernel/random/boot_id`; `InvalidData` if that is no id.
pub fn boot_id() -> io::Result<[u8; 16]> {
    let text = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    parse_id(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "boot_id is not an id"))
}

/// The effective capabilities of a thread, as a mask (capabilities(7)); `None` if it is gone or hidden from us.
pub fn effective_capabilities(tid: u32) -> Option<u64> {
    let status = std::fs::read(format!("/proc/{tid}/status")).ok()?;
    let digits = status_line(&status, b"CapEff:")?.trim_ascii();
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// The inode numbers of the shared writable mappings of files of `dev`, each once (proc_pid_maps(5)).
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
    let (&write, &shared) = (permissions.get(1)?, permissions.get(3)?);
    if write != b'w' || shared != b's' {
        return None;
    }
    let device = std::str::from_utf8(fields.nth(1)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device = makedev(u64::from_str_radix(major, 16).ok()?, u64::from_str_radix(minor, 16).ok()?);
    let ino: u64 = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    (device == dev && ino != 0).then_some(ino)
}

/// Kernel threads and zombies have no `VmSize` line (proc_pid_status(5)).
fn has_memory(status: &[u8]) -> bool {
    status_line(status, b"VmSize:").is_some()
}

fn real_uid(status: &[u8]) -> Option<u32> {
    parse_number(
        status_line(status, b"Uid:")?.split(|byte| byte.is_ascii_whitespace()).find(|f| !f.is_empty())?,
    )
}

fn status_line<'a>(status: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))
}

fn parse_number(digits: &[u8]) -> Option<u32> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn parse_id(text: &[u8]) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.iter().copied().filter(|&byte| byte != b'-' && byte != b'\n').collect();
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
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::process::CommandExt;

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
    fn only_shared_writable_mappings_of_the_device_count() {
        assert_eq!(parse_maps(MAPS, makedev(8, 1)), [42, 43]);
        assert_eq!(parse_maps(MAPS, makedev(8, 2)), [46]);
        assert!(parse_maps(MAPS, makedev(0, 0)).is_empty());
    }

    #[test]
    fn a_live_mapping_is_found_by_its_process() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let (dev, ino) = (file.metadata().unwrap().dev(), file.metadata().unwrap().ino());
        let own = (ino, std::process::id());
        assert!(!shared_writable_maps(dev, true).unwrap().files.contains(&own));
        let length = std::num::NonZeroUsize::new(4096).unwrap();
        // SAFETY: mmap(2) of a file of that length at an address that the kernel chooses; nothing reads or writes it.
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
        assert!(shared_writable_maps(dev, true).unwrap().files.contains(&own));
        // SAFETY: munmap(2) of exactly what was mapped above and is not used again.
        assert_eq!(unsafe { libc::munmap(address, length.get()) }, 0);
        assert!(!shared_writable_maps(dev, true).unwrap().files.contains(&own));
    }

    const WATCHED: &str = "JAILFS_TEST_WATCHED_PID";

    /// Runs the next test again in a process of an ordinary user, who may not look into this one.
    #[test]
    fn an_ordinary_user_is_told_whom_it_cannot_see() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sys::proc::tests::ordinary_user", "--nocapture", "--test-threads=1"])
            .env(WATCHED, std::process::id().to_string())
            .uid(65534)
            .gid(65534)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("1 passed"), "{text}");
    }

    #[test]
    fn ordinary_user() {
        let Ok(watched) = std::env::var(WATCHED) else {
            return;
        };
        let watched: u32 = watched.parse().unwrap();
        let everybody = shared_writable_maps(1, true).unwrap();
        assert!(everybody.unreadable.contains(&watched));
        for pid in &everybody.unreadable {
            if let Ok(status) = std::fs::read(format!("/proc/{pid}/status")) {
                assert!(status_line(&status, b"Kthread:").is_none_or(|flag| flag.ends_with(b"0")), "{pid}");
            }
        }
        let ours = shared_writable_maps(1, false).unwrap();
        assert!(!ours.unreadable.contains(&watched) && !ours.unreadable.contains(&std::process::id()));
    }

    #[test]
    fn capabilities_of_a_thread_are_read() {
        assert!(effective_capabilities(std::process::id()).is_some());
        assert_eq!(effective_capabilities(0), None);
    }

    #[test]
    fn kernel_threads_have_no_memory() {
        let own = std::fs::read("/proc/self/status").unwrap();
        assert!(has_memory(&own));
        assert_eq!(real_uid(&own), Some(nix::unistd::getuid().as_raw()));
        assert!(!has_memory(b"Name:\tkthreadd\nUid:\t0\t0\t0\t0\n"));
    }

    #[test]
    fn the_boot_id_stays() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
        assert_eq!(parse_id(b"00112233-4455-6677-8899-aabbccddeeff\n").unwrap()[15], 0xff);
        assert!(parse_id(b"0011").is_none() && parse_id(&[b'x'; 32]).is_none());
    }
}
