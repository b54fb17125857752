//! Compares fingerprints of base nodes, and defines the two values with a special meaning.

use crate::types::{Fingerprint, Timestamp};

/// The change time in the fingerprint of a file whose attributes an apply is setting. The file's
/// times are then not compared.
pub const ANY_TIMES: Timestamp = Timestamp { secs: i64::MIN, nanos: 0 };

/// Encodes that the filesystem of the base cannot hold the time `wanted`, and stored `kept` when an
/// apply set it. The record of what an apply left contains such entries; no file has inode 0.
pub fn rounded(wanted: Timestamp, kept: Timestamp) -> Fingerprint {
    Fingerprint { dev: 0, ino: 0, size: u64::MAX, mtime: wanted, ctime: kept }
}

/// The times `(wanted, kept)` in a fingerprint that [`rounded`] made; `None` for any other.
pub(super) fn as_rounded(print: &Fingerprint) -> Option<(Timestamp, Timestamp)> {
    (print.ino == 0 && print.size == u64::MAX).then_some((print.mtime, print.ctime))
}

/// Whether a file still has the expected fingerprint. The device number is not compared, because it
/// may change at a reboot.
pub fn matches(expected: &Fingerprint, found: &Fingerprint) -> bool {
    let (mtime, ctime) = match expected.ctime == ANY_TIMES {
        true => (found.mtime, found.ctime),
        false => (expected.mtime, expected.ctime),
    };
    Fingerprint { mtime, ctime, dev: found.dev, ..*expected } == *found
}
