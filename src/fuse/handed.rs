//! A mount that another process made, and the checks of one whose descriptors came from a client.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::libc::{S_IFCHR, S_IFMT};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{fstat, makedev};

use crate::error::{Attempt, Error, Kind, Result};
use crate::sys;

/// How long the first message of such a mount may take, in milliseconds.
const INIT_LIMIT: u16 = 1000;
/// The number of `/dev/fuse`: 10:229 on every Linux (admin-guide/devices.txt).
const FUSE_DEVICE: u64 = makedev(10, 229);

/// A mount that another process made in its own mount namespace.
#[derive(Debug)]
pub struct Handed {
    /// The session's device.
    pub device: OwnedFd,
    /// The root of the mount (O_PATH).
    pub root: OwnedFd,
    /// `st_dev` of its files.
    pub dev: u64,
    /// Whether users other than the daemon's own may enter.
    pub all_users: bool,
}

impl Handed {
    /// A mount that another process says it made. Never asks the mount itself: no process serves it
    /// yet.
    ///
    /// # Errors
    /// [`Kind::CannotMount`]: these are not the descriptors of a mount that waits for its server.
    pub fn received(descriptors: Vec<OwnedFd>, dev: u64, all_users: bool) -> Result<Handed> {
        let refuse = |why: &str| Err(Error::new(Kind::CannotMount, "take a mount over", why));
        let mut descriptors = descriptors.into_iter();
        let (Some(device), Some(root)) = (descriptors.next(), descriptors.next()) else {
            return refuse("its descriptors did not come with the request");
        };
        let stat = fstat(&device).map_err(io::Error::from).attempt(|| "take a mount over")?;
        let is_device = stat.st_mode & S_IFMT == S_IFCHR && stat.st_rdev == FUSE_DEVICE;
        if !is_device {
            return refuse("the first descriptor is no FUSE device");
        }
        if sys::file::device_of(&root) != Some(dev) {
            return refuse("the second descriptor is not in the mount");
        }
        // The kernel has sent INIT when it made the mount. A read without it would block.
        let mut ready = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
        let polled = poll(&mut ready, PollTimeout::from(INIT_LIMIT));
        polled.map_err(io::Error::from).attempt(|| "take a mount over")?;
        if ready.first().and_then(PollFd::revents) != Some(PollFlags::POLLIN) {
            return refuse("the FUSE device has no mount that waits for its server");
        }
        Ok(Handed { device, root, dev, all_users })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use nix::fcntl::OFlag;
    use nix::unistd::pipe2;

    #[test]
    fn only_a_mount_that_waits_for_its_server_is_taken_over() {
        let open = |path: &str| OwnedFd::from(File::options().read(true).open(path).unwrap());
        let root = || open("/");
        let dev = sys::file::device_of(root()).unwrap();
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC).unwrap();
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        let null = || open("/dev/null");
        let idle = || sys::mount::open_device().unwrap();
        let table = [
            (vec![], "did not come"),
            (vec![null()], "did not come"),
            (vec![reader, root()], "no FUSE device"),
            (vec![writer, root()], "no FUSE device"),
            (vec![file(), root()], "no FUSE device"),
            (vec![null(), root()], "no FUSE device"),
            (vec![idle(), open("/proc/self/status")], "not in the mount"),
            (vec![idle(), root()], "no mount that waits"),
        ];
        for (descriptors, why) in table {
            let error = Handed::received(descriptors, dev, false).unwrap_err();
            assert!(error.reason.contains(why), "{why}: {error}");
        }
    }
}
