//! The end of a session in which a thread fails.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use jailfs::internals::fuse::{MountOptions, hand_out, open_device};
use nix::mount::{MntFlags, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::common::raw::Raw;

/// The session takes the connection of another mount for its own, so that the test sees whether it
/// aborts that.
#[test]
fn a_session_aborts_its_connection_when_one_of_its_threads_fails() {
    let dir = tempfile::tempdir().unwrap();
    let other = hand_out(open_device().unwrap(), dir.path(), true).unwrap();
    let options = MountOptions { parallel: Some(2), ..MountOptions::default() };
    let raw = Raw::with(|_| (), other.dev, &options);
    let is_aborted = || {
        let mut ready = [PollFd::new(other.device.as_fd(), PollFlags::POLLIN)];
        poll(&mut ready, PollTimeout::ZERO).unwrap();
        ready[0].revents().unwrap().contains(PollFlags::POLLERR)
    };
    assert!(!is_aborted());
    raw.send_bytes(b"no request");
    let end = Instant::now() + Duration::from_secs(20);
    while !is_aborted() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    let has_ended = is_aborted();
    umount2(dir.path(), MntFlags::MNT_DETACH).unwrap();
    assert!(has_ended, "the connection was not aborted");
}
