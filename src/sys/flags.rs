//! Inode flags, as chattr(1) sets them (ioctl_iflags(2)).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

/// The flags that a program may give to a regular file, with their letters in chattr(1). Append
/// only (`a`) and immutable (`i`) are not among them: no file that has one can be replaced.
const OF_FILES: [(u32, char); 11] = [
    (0x1, 's'),
    (0x2, 'u'),
    (0x4, 'c'),
    (0x8, 'S'),
    (0x40, 'd'),
    (0x80, 'A'),
    (0x400, 'm'),
    (0x4000, 'j'),
    (0x8000, 't'),
    (0x0080_0000, 'C'),
    (0x0200_0000, 'x'),
];

/// The flags of an open file or directory; none where the filesystem has no flags.
///
/// # Errors
/// Those of ioctl(2): EBADF for an `O_PATH` descriptor.
pub fn get<Fd: AsFd>(file: Fd) -> io::Result<u32> {
    let mut flags: libc::c_int = 0;
    // SAFETY: FS_IOC_GETFLAGS writes one int, although its number speaks of a long
    // (ioctl_iflags(2)).
    let result =
        unsafe { libc::ioctl(file.as_fd().as_raw_fd(), libc::FS_IOC_GETFLAGS, &raw mut flags) };
    match Errno::result(result) {
        Ok(_) => Ok(flags.cast_unsigned()),
        Err(Errno::ENOTTY | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => Ok(0),
        Err(errno) => Err(errno.into()),
    }
}

fn set<Fd: AsFd>(file: Fd, flags: u32) -> io::Result<()> {
    let flags: libc::c_int = flags.cast_signed();
    // SAFETY: FS_IOC_SETFLAGS reads one int; the descriptor is borrowed for the call.
    let result =
        unsafe { libc::ioctl(file.as_fd().as_raw_fd(), libc::FS_IOC_SETFLAGS, &raw const flags) };
    Errno::result(result)?;
    Ok(())
}

/// Gives an open file those of `wanted` that a program may give to a file, and no others of these.
/// Returns the flags that it could not be given.
pub fn give<Fd: AsFd>(file: Fd, wanted: u32) -> u32 {
    let mask = OF_FILES.iter().fold(0, |mask, (flag, _)| mask | flag);
    let wanted = wanted & mask;
    let Ok(has) = get(&file) else { return wanted };
    let all = has & !mask | wanted;
    if all == has || set(&file, all).is_ok() {
        return 0;
    }
    // One of them is refused: each alone. Those that the directory gave it stay.
    let (mut has, mut missing) = (has, 0);
    for (flag, _) in OF_FILES.iter().filter(|(flag, _)| wanted & flag != 0) {
        match set(&file, has | flag) {
            Ok(()) => has |= flag,
            Err(_) => missing |= flag,
        }
    }
    missing
}

/// Those flags that [`give`] gives, as the letters of chattr(1).
pub fn letters(flags: u32) -> String {
    OF_FILES.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, letter)| letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const APPEND: u32 = 0x20;
    const IMMUTABLE: u32 = 0x10;

    #[test]
    fn flags_are_given_and_read_and_others_stay() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let before = get(&file).unwrap();
        // The no-dump and no-atime flags are those that every filesystem with flags has.
        assert_eq!(give(&file, 0x40 | 0x80 | APPEND | IMMUTABLE), 0);
        assert_eq!(get(&file).unwrap(), before | 0x40 | 0x80);
        assert_eq!(letters(get(&file).unwrap()), "dA");
        assert_eq!(give(&file, 0x80), 0);
        assert_eq!(get(&file).unwrap(), before | 0x80);
        let (pipe, _other) = nix::unistd::pipe().unwrap();
        assert_eq!(get(&pipe).unwrap(), 0);
        assert_eq!(give(&pipe, 0x40), 0x40);
        assert_eq!(give(&pipe, APPEND), 0);
    }
}
