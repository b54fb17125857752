//! Drops capabilities (capabilities(7)).
//!
//! `libc` has neither the structures of capset(2) nor the capability numbers. Version 3 of the
//! structures holds 64 bits in two halves.

use std::io;

use nix::errno::Errno;

/// The version of the structures (`_LINUX_CAPABILITY_VERSION_3`).
const VERSION: u32 = 0x2008_0522;
/// The highest number that a set can hold.
const HIGHEST: u32 = 63;

/// CAP_CHOWN.
pub const CHOWN: u64 = 1 << 0;
/// CAP_DAC_OVERRIDE.
pub const DAC_OVERRIDE: u64 = 1 << 1;
/// CAP_FOWNER.
pub const FOWNER: u64 = 1 << 3;
/// CAP_FSETID.
pub const FSETID: u64 = 1 << 4;
/// CAP_KILL.
pub const KILL: u64 = 1 << 5;
/// CAP_SETGID.
pub const SETGID: u64 = 1 << 6;
/// CAP_SETUID.
pub const SETUID: u64 = 1 << 7;
/// CAP_NET_BIND_SERVICE.
pub const NET_BIND_SERVICE: u64 = 1 << 10;
/// CAP_SYS_CHROOT.
pub const SYS_CHROOT: u64 = 1 << 18;
/// CAP_SYS_ADMIN.
pub const SYS_ADMIN: u64 = 1 << 21;
/// CAP_SETFCAP.
pub const SETFCAP: u64 = 1 << 31;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Half {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Drops every capability of this thread that is not in `keep`, for good and also for programs that
/// it executes. No capability stays inheritable or ambient.
///
/// # Errors
/// EPERM: limiting the bounding set needs CAP_SETPCAP.
pub fn keep_only(keep: u64) -> io::Result<()> {
    for number in 0..=HIGHEST {
        if keep & (1 << number) == 0 && in_bounding_set(number) {
            drop_from_bounding_set(number)?;
        }
    }
    clear_ambient()?;
    limit(keep)
}

/// Drops every effective and permitted capability of this thread that is not in `keep`.
///
/// # Errors
/// Those of capset(2).
pub fn limit(keep: u64) -> io::Result<()> {
    let mut halves = [Half::default(); 2];
    capget(&mut halves)?;
    for (half, keep) in halves.iter_mut().zip([keep, keep >> 32]) {
        let keep = u32::try_from(keep & u64::from(u32::MAX)).unwrap_or(0);
        half.permitted &= keep;
        half.effective = half.permitted;
        half.inheritable = 0;
    }
    capset(&halves)
}

/// The effective capabilities of this thread.
///
/// # Errors
/// Those of capget(2).
pub fn effective() -> io::Result<u64> {
    let mut halves = [Half::default(); 2];
    capget(&mut halves)?;
    let [low, high] = halves;
    Ok(u64::from(low.effective) | u64::from(high.effective) << 32)
}

fn in_bounding_set(number: u32) -> bool {
    // SAFETY: PR_CAPBSET_READ takes a number and touches no memory (PR_CAPBSET_READ(2const)). It
    // fails with EINVAL for a number that the kernel does not know.
    unsafe { libc::prctl(libc::PR_CAPBSET_READ, libc::c_ulong::from(number), 0, 0, 0) == 1 }
}

fn drop_from_bounding_set(number: u32) -> io::Result<()> {
    // SAFETY: PR_CAPBSET_DROP takes a number and touches no memory (PR_CAPBSET_DROP(2const)).
    let result =
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(number), 0, 0, 0) };
    Errno::result(result)?;
    Ok(())
}

fn clear_ambient() -> io::Result<()> {
    // SAFETY: PR_CAP_AMBIENT_CLEAR_ALL takes numbers and touches no memory
    // (PR_CAP_AMBIENT(2const)).
    let result =
        unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    match Errno::result(result) {
        // Before Linux 4.3 there are no ambient capabilities.
        Ok(_) | Err(Errno::EINVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn capget(halves: &mut [Half; 2]) -> io::Result<()> {
    let mut header = Header { version: VERSION, pid: 0 };
    // SAFETY: capget(2) reads and writes a header, and writes the two structures that version 3
    // has.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, halves.as_mut_ptr()) };
    Errno::result(result)?;
    Ok(())
}

fn capset(halves: &[Half; 2]) -> io::Result<()> {
    let mut header = Header { version: VERSION, pid: 0 };
    // SAFETY: capset(2) reads and writes a header, and reads the two structures that version 3 has.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, halves.as_ptr()) };
    Errno::result(result)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str) -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let digits = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(digits.trim_start_matches(':').trim(), 16).unwrap()
    }

    #[test]
    fn a_dropped_capability_is_gone_from_every_set() {
        std::thread::spawn(|| {
            assert_eq!(effective().unwrap(), line("CapEff"));
            keep_only(CHOWN | SETFCAP).unwrap();
            let kept = CHOWN | SETFCAP;
            for set in ["CapEff", "CapPrm", "CapBnd"] {
                assert_eq!(line(set) & !kept, 0, "{set}");
            }
            assert_eq!((line("CapInh"), line("CapAmb")), (0, 0));
            assert_eq!(effective().unwrap(), line("CapEff"));
            limit(0).unwrap();
            assert_eq!(effective().unwrap(), 0);
        })
        .join()
        .unwrap();
    }
}
