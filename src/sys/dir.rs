//! Reads directories without losing a byte of a name.
//!
//! getdents64(2) is called directly: nix allocates for every entry, which is slow for a directory
//! of 100,000 names.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;

use crate::types::FileKind;

/// The buffer for one call: some 400 to 1,000 entries. A larger one is no faster, and slower for
/// the many small directories.
const BUFFER: usize = 32 * 1024;
/// The offset of `d_name` in `struct linux_dirent64` (getdents64(2)), after d_ino u64, d_off i64,
/// d_reclen u16 and d_type u8.
const NAME_OFFSET: usize = 19;

/// Calls `each` with name, `d_ino` and kind of each entry of the directory `fd`, from its offset to
/// the end, without `.` and `..`. A name has any length that the host permits. The `d_ino` of a
/// mount point is that of the directory below the mount. The kind is `None` if the filesystem does
/// not report it.
///
/// # Errors
/// Those of getdents64(2): EBADF for an `O_PATH` descriptor, ENOTDIR, ENOENT for a removed
/// directory.
pub fn for_each<Fd: AsFd>(
    fd: Fd,
    mut each: impl FnMut(&[u8], u64, Option<FileKind>),
) -> io::Result<()> {
    let mut buffer = vec![0u8; BUFFER];
    loop {
        let filled = getdents(&fd, &mut buffer)?;
        let Some(mut rest) = buffer.get(..filled).filter(|bytes| !bytes.is_empty()) else {
            return Ok(());
        };
        while !rest.is_empty() {
            let (record, tail) = split_record(rest).ok_or(Errno::EIO)?;
            if record.name != b"." && record.name != b".." {
                each(record.name, record.ino, record.kind);
            }
            rest = tail;
        }
    }
}

fn getdents<Fd: AsFd>(fd: Fd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        // SAFETY: getdents64(2) writes at most `count` bytes to the buffer, which is that long and
        // borrowed mutably; the descriptor is borrowed for the call.
        let read = unsafe {
            libc::syscall(
                libc::SYS_getdents64,
                fd.as_fd().as_raw_fd(),
                buffer.as_mut_ptr(),
                libc::c_uint::try_from(buffer.len()).unwrap_or(libc::c_uint::MAX),
            )
        };
        match Errno::result(read) {
            Ok(read) => return Ok(usize::try_from(read).unwrap_or(0)),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

struct Record<'a> {
    name: &'a [u8],
    ino: u64,
    kind: Option<FileKind>,
}

/// Splits the first `struct linux_dirent64` off `bytes`; `None` if it is incomplete.
fn split_record(bytes: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let ino = u64::from_ne_bytes(*bytes.first_chunk()?);
    let length = u16::from_ne_bytes(*bytes.get(16..)?.first_chunk()?);
    let kind = match *bytes.get(18)? {
        libc::DT_FIFO => Some(FileKind::Fifo),
        libc::DT_CHR => Some(FileKind::Char),
        libc::DT_DIR => Some(FileKind::Dir),
        libc::DT_BLK => Some(FileKind::Block),
        libc::DT_REG => Some(FileKind::File),
        libc::DT_LNK => Some(FileKind::Symlink),
        libc::DT_SOCK => Some(FileKind::Socket),
        _ => None,
    };
    let (record, tail) = bytes.split_at_checked(usize::from(length))?;
    let padded = record.get(NAME_OFFSET..)?;
    let name = padded.get(..padded.iter().position(|&byte| byte == 0)?)?;
    Some((Record { name, ino, kind }, tail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::MetadataExt;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a directory of the test itself")]
    fn every_entry_comes_once_with_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let mut expected = BTreeMap::new();
        for i in 0..5000 {
            let name = format!("{i:0>200}");
            let file = std::fs::File::create(dir.path().join(&name)).unwrap();
            expected
                .insert(name.into_bytes(), (file.metadata().unwrap().ino(), Some(FileKind::File)));
        }
        for name in [&b"\xff\n"[..], &[b'x'; 255], b"..."] {
            let path = dir.path().join(OsStr::from_bytes(name));
            std::fs::create_dir(&path).unwrap();
            expected.insert(
                name.to_vec(),
                (std::fs::metadata(&path).unwrap().ino(), Some(FileKind::Dir)),
            );
        }
        std::os::unix::fs::symlink("nowhere", dir.path().join("link")).unwrap();
        let ino = std::fs::symlink_metadata(dir.path().join("link")).unwrap().ino();
        expected.insert(b"link".to_vec(), (ino, Some(FileKind::Symlink)));

        let fd = std::fs::File::open(dir.path()).unwrap();
        let (mut found, mut count) = (BTreeMap::new(), 0);
        for_each(&fd, |name, ino, kind| {
            found.insert(name.to_vec(), (ino, kind));
            count += 1;
        })
        .unwrap();
        assert_eq!(count, expected.len());
        assert!(found == expected);
    }

    #[test]
    fn an_incomplete_record_is_refused() {
        let mut record = vec![0u8; 24];
        record[16] = 24;
        record[19] = b'a';
        assert!(split_record(&record).is_some());
        record[16] = 32;
        assert!(split_record(&record).is_none());
        record[16] = 24;
        record[19..].fill(b'a');
        assert!(split_record(&record).is_none());
        assert!(split_record(&record[..10]).is_none());
    }
}
