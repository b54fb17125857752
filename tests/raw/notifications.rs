//! Messages that the server sends without a request: notifications.

use std::time::Duration;

use nix::sys::stat::Mode;

use crate::common::raw::{Body, NOTIFICATION, ROOT, Raw, WRITE};

/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// `FUSE_NOTIFY_INVAL_INODE`. A notification has its kind where an answer has its errno.
const INVALIDATE_NODE: i32 = 2;
/// `FUSE_WRITE_KILL_SUIDGID`: the write clears set-id bits.
const KILL_SUIDGID: u32 = 1 << 2;

/// The answer to WRITE has no attributes, so the kernel would go on to show the old mode.
#[test]
fn the_mode_is_invalidated_before_the_answer_to_a_write_that_clears_set_id_bits() {
    let mut raw = Raw::new();
    let file = raw.mknod(ROOT, b"file", 0o106_755).unwrap();
    let write = Body::new().u64(0).u64(0).u32(4).u32(KILL_SUIDGID).u64(0).u32(0).u32(0);
    let write = write.bytes(b"data");

    let unique = raw.send(WRITE, file.node, &write);
    let first = raw.receive(PATIENCE).unwrap();
    // An offset below 0 stands for the attributes without the content.
    let attributes = Body::new().u64(file.node).u64(u64::MAX).u64(0);
    assert_eq!((first.unique, -first.errno), (NOTIFICATION, INVALIDATE_NODE));
    assert_eq!(first.body, attributes.0);
    let second = raw.receive(PATIENCE).unwrap();
    assert_eq!((second.unique, second.errno), (unique, 0));
    let bits = Mode::from_bits_truncate(raw.getattr(file.node).unwrap().mode);
    assert_eq!(bits, Mode::from_bits_truncate(0o755));

    // Nothing is left to clear, so the next write has only its answer.
    let unique = raw.send(WRITE, file.node, &write);
    assert_eq!(raw.receive(PATIENCE).unwrap().unique, unique);
    raw.still_serves();
    raw.end().unwrap();
}
