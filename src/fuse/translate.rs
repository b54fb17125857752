//! Converts attributes, times and device numbers between the protocol's types and ours.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};

use crate::fs::{Attr, SetTime};
use crate::types::{FileKind, NodeId, PERM_BITS, Timestamp};

/// A lifetime without an end for the kernel's caches: a century, which overflows none of its
/// clocks.
pub(super) const FOREVER: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// The preferred size of reads and writes that `stat` reports, in bytes.
pub(super) const BLOCK_SIZE: u32 = 4096;

/// The protocol's type of a node.
pub(super) fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Dir => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::Char => FileType::CharDevice,
        FileKind::Block => FileType::BlockDevice,
    }
}

/// Attributes in the protocol's form, with inode number `number`.
pub(super) fn file_attr(number: u64, attr: &Attr) -> FileAttr {
    let ctime = system_time(attr.meta.ctime);
    FileAttr {
        ino: INodeNo(number),
        size: attr.size,
        blocks: attr.blocks,
        atime: system_time(attr.meta.atime),
        mtime: system_time(attr.meta.mtime),
        ctime,
        crtime: ctime,
        kind: file_type(attr.kind),
        perm: u16::try_from(attr.meta.mode & PERM_BITS).unwrap_or_default(),
        nlink: attr.meta.nlink,
        uid: attr.meta.uid,
        gid: attr.meta.gid,
        rdev: encode_device(attr.meta.rdev),
        blksize: BLOCK_SIZE,
        flags: 0,
    }
}

/// A negative LOOKUP reply that the kernel may cache: an entry of node 0.
pub(super) fn no_entry() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

/// A time in the protocol's form; 1970 if the host cannot represent it.
pub(super) fn system_time(time: Timestamp) -> SystemTime {
    let whole = Duration::from_secs(time.secs.unsigned_abs());
    let second =
        if time.secs < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
    second
        .and_then(|s| s.checked_add(Duration::from_nanos(time.nanos.into())))
        .unwrap_or(UNIX_EPOCH)
}

/// A time to set. fuser *subtracts* the nanoseconds from a time before 1970, although they count
/// forward (its `time.rs` has a TODO about that). Taking the difference to 1970 apart again gives
/// the original seconds and nanoseconds.
pub(super) fn set_time(time: TimeOrNow) -> SetTime {
    let time = match time {
        TimeOrNow::Now => return SetTime::Now,
        TimeOrNow::SpecificTime(time) => time,
    };
    SetTime::To(match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Timestamp {
            secs: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            nanos: after.subsec_nanos(),
        },
        Err(before) => {
            let before = before.duration();
            Timestamp {
                secs: 0_i64.saturating_sub_unsigned(before.as_secs()),
                nanos: before.subsec_nanos(),
            }
        }
    })
}

/// Decodes a device number as the kernel sends it (`new_encode_dev`: 12 bits of major, 20 of minor)
/// to `st_rdev`.
pub(super) fn decode_device(device: u32) -> u64 {
    let major = (device & 0xfff00) >> 8;
    let minor = (device & 0xff) | ((device >> 12) & 0xfff00);
    nix::sys::stat::makedev(major.into(), minor.into())
}

/// The reverse of [`decode_device`]. Larger numbers are truncated, as the kernel does.
pub(super) fn encode_device(device: u64) -> u32 {
    let major = nix::sys::stat::major(device) & 0xfff;
    let minor = nix::sys::stat::minor(device) & 0xf_ffff;
    u32::try_from((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)).unwrap_or_default()
}

/// The node id of a request.
pub(super) fn node(number: INodeNo) -> NodeId {
    NodeId(number.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How fuser decodes the time that the kernel sends.
    fn as_fuser_decodes(secs: i64, nanos: u32) -> SystemTime {
        if secs >= 0 {
            UNIX_EPOCH + Duration::new(secs.unsigned_abs(), nanos)
        } else {
            UNIX_EPOCH - Duration::new(secs.unsigned_abs(), nanos)
        }
    }

    #[test]
    fn a_time_survives_the_round_trip_also_before_1970() {
        for (secs, nanos) in [
            (0, 0),
            (0, 1),
            (1_700_000_000, 999_999_999),
            (-1, 0),
            (-1, 1),
            (-1, 999_999_999),
            (-86_400, 5),
            (i64::MAX, 0),
        ] {
            let sent = TimeOrNow::SpecificTime(as_fuser_decodes(secs, nanos));
            let SetTime::To(time) = set_time(sent) else { panic!("not a time") };
            assert_eq!(time, Timestamp { secs, nanos });
        }
        assert_eq!(set_time(TimeOrNow::Now), SetTime::Now);
    }

    #[test]
    fn every_time_is_converted_without_a_panic() {
        assert_eq!(
            system_time(Timestamp { secs: -1, nanos: 750_000_000 }),
            UNIX_EPOCH - Duration::from_millis(250)
        );
        assert_eq!(system_time(Timestamp { secs: 2, nanos: 5 }), UNIX_EPOCH + Duration::new(2, 5));
        for secs in [i64::MIN, i64::MIN + 1, i64::MAX] {
            for nanos in [0, 999_999_999, u32::MAX] {
                system_time(Timestamp { secs, nanos });
            }
        }
    }

    #[test]
    fn device_numbers_keep_their_parts() {
        for (major, minor) in [(1, 3), (0, 0), (8, 255), (259, 256), (4095, 1_048_575)] {
            let device = nix::sys::stat::makedev(major, minor);
            assert_eq!(decode_device(encode_device(device)), device, "{major}:{minor}");
        }
        assert_eq!(encode_device(nix::sys::stat::makedev(1, 3)), 0x103);
        assert_eq!(decode_device(0x0010_0800), nix::sys::stat::makedev(8, 256));
    }
}
