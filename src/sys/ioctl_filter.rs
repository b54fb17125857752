//! A filter on ioctl(2) (seccomp(2)).
//!
//! A process with a terminal can push characters into its input as if they were typed (TIOCSTI; where the kernel allows it:
//! `dev.tty.legacy_tiocsti`), and on a virtual console paste what is selected (TIOCLINUX). Whoever reads that terminal
//! next, a shell outside for one, executes them.

use std::io;

use nix::errno::Errno;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Where `struct seccomp_data` has the number of the call, the architecture, and the half of the second argument that the
/// kernel looks at: it takes a request as 32 bits, so a filter that compares 64 can be got around.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const REQUEST: u32 = if cfg!(target_endian = "little") { 24 } else { 28 };

/// The number of ioctl(2) in every architecture in which a process of this machine can make calls (`AUDIT_ARCH_*` of
/// linux/audit.h; x32 is told by a bit of the number).
const IOCTL: &[(u32, u32)] = &[
    (0xc000_003e, 16),                // x86_64
    (0xc000_003e, 0x4000_0000 | 514), // x32
    (0x4000_0003, 54),                // i386
    (0xc000_00b7, 29),                // aarch64
    (0x4000_0028, 54),                // arm
    (0xc000_00f3, 29),                // riscv64
];

/// The requests by which input is made up.
pub const MADE_UP_INPUT: [u32; 2] = [libc::TIOCSTI as u32, libc::TIOCLINUX as u32];

/// Makes ioctl(2) answer EPERM to `requests`, for this thread and all that it starts. It must not be able to gain
/// privileges (PR_SET_NO_NEW_PRIVS).
///
/// # Errors
/// EINVAL where the kernel has no filters; EACCES without PR_SET_NO_NEW_PRIVS.
pub fn refuse(requests: &[u32]) -> io::Result<()> {
    let mut program = program(requests);
    let len = u16::try_from(program.len()).map_err(|_| Errno::E2BIG)?;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    // SAFETY: PR_SET_SECCOMP(2const) copies the program, which is as long as it says and lives for the call.
    let result =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0) };
    Errno::result(result)?;
    Ok(())
}

/// For each architecture: is it that, is it the call, is it one of the requests? Jumps count from the next line.
fn program(requests: &[u32]) -> Vec<libc::sock_filter> {
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let count = u8::try_from(requests.len()).unwrap_or(u8::MAX);
    let refused = libc::SECCOMP_RET_ERRNO | (libc::EPERM.cast_unsigned() & libc::SECCOMP_RET_DATA);
    let mut lines = Vec::new();
    for &(architecture, number) in IOCTL {
        // Over the rest of this block: four lines, the requests, and two returns.
        lines.push(line(LOAD, 0, 0, ARCHITECTURE));
        lines.push(line(IF_EQUAL, 0, count.saturating_add(5), architecture));
        lines.push(line(LOAD, 0, 0, NUMBER));
        lines.push(line(IF_EQUAL, 0, count.saturating_add(3), number));
        lines.push(line(LOAD, 0, 0, REQUEST));
        for (at, request) in (1..).zip(requests) {
            lines.push(line(IF_EQUAL, count.saturating_sub(at).saturating_add(1), 0, *request));
        }
        lines.push(line(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
        lines.push(line(RETURN, 0, 0, refused));
    }
    lines.push(line(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ioctl(request: u64) -> Errno {
        let mut byte = b'x';
        // SAFETY: ioctl(2) on a descriptor that is not open touches no memory; if it were one of a terminal, the request
        // takes a byte or a structure of which this is the first one.
        let result = unsafe { libc::syscall(libc::SYS_ioctl, -1, request, &raw mut byte) };
        Errno::result(result).unwrap_err()
    }

    #[test]
    fn made_up_input_is_refused_and_everything_else_is_not() {
        std::thread::spawn(|| {
            assert_eq!(ioctl(libc::TIOCSTI), Errno::EBADF);
            nix::sys::prctl::set_no_new_privs().unwrap();
            refuse(&MADE_UP_INPUT).unwrap();
            assert_eq!(ioctl(libc::TIOCSTI), Errno::EPERM);
            assert_eq!(ioctl(libc::TIOCLINUX), Errno::EPERM);
            assert_eq!(ioctl(libc::TIOCSTI | 1 << 40), Errno::EPERM, "the kernel sees 32 bits");
            assert_eq!(ioctl(libc::TIOCGWINSZ), Errno::EBADF);
            assert!(std::fs::read("/proc/self/stat").is_ok());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn every_jump_lands_in_the_program() {
        for count in 0..4 {
            let program = program(&vec![7; count]);
            for (at, line) in program.iter().enumerate() {
                let furthest = at + 1 + usize::from(line.jt.max(line.jf));
                assert!(line.code != IF_EQUAL || furthest < program.len(), "{at}");
            }
        }
    }
}
