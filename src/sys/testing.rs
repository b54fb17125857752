//! Makes system calls fail, so that tests can check fallbacks.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;

use nix::errno::Errno;

/// Runs a test of this program alone, as an ordinary user, with an environment variable that tells
/// it so.
pub(crate) fn run_as_ordinary_user(test: &str, (name, value): (&str, &OsStr)) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(name, value)
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

/// Makes the system call `number` fail with `errno` in this thread only, until the thread ends
/// (seccomp(2)), as the profile of a container does.
pub(crate) fn refuse_call(number: libc::c_long, errno: Errno) {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        line(LOAD_NUMBER, 0, 0, 0),
        line(JUMP_IF_EQUAL, 0, 1, u32::try_from(number).unwrap()),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | (errno as u32)),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).unwrap(),
        filter: program.as_mut_ptr(),
    };
    // SAFETY: prctl(2) with PR_SET_NO_NEW_PRIVS takes numbers. With PR_SET_SECCOMP it copies the
    // program, whose length is correct.
    unsafe {
        Errno::result(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)).unwrap();
        let mode = libc::SECCOMP_MODE_FILTER;
        Errno::result(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program)).unwrap();
    }
}

/// Makes the system call `number` with three numbers as arguments, which must not be valid
/// addresses.
///
/// # Errors
/// The error of the kernel or of a filter.
pub(crate) fn raw_call(number: i64, arguments: [u64; 3]) -> Result<i64, Errno> {
    let [first, second, third] = arguments;
    // SAFETY: syscall(2). Tests pass numbers that are no addresses of this process, so the kernel
    // writes to none of its memory.
    Errno::result(unsafe { libc::syscall(number, first, second, third, 0, 0, 0) })
}
