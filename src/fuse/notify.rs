//! Notifications from the daemon to the kernel, over the session's descriptor.
//!
//! A notification makes the kernel drop a dentry, attributes or cached pages, or waits for a lock
//! of the kernel. fuser sends most of them; the messages that it does not know are written here by
//! hand.
//!
//! No caller may hold a lock: the kernel may answer only after the server has answered other
//! requests.

use std::ffi::OsStr;
use std::io;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fuser::{INodeNo, Notifier};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use crate::fuse::wire::Device;
use crate::types::{Name, NodeId};

/// Bytes before the name in an expire message: `fuse_out_header` and `fuse_notify_inval_entry_out`.
const EXPIRE_PREFIX: usize = 32;
/// A name that no file can have, because it is longer than NAME_MAX.
const UNUSED_NAME: &[u8] = &[b'-'; 256];

/// The session, shared with threads that do not serve it. It closes when the serving thread ends;
/// otherwise this copy of the descriptor would keep a mount alive that nothing serves.
#[derive(Default)]
pub(super) struct Channel {
    session: Mutex<Option<Arc<Session>>>,
    /// Whether the kernel supports FUSE_EXPIRE_ONLY (Linux 6.2): an expired dentry is looked up
    /// again, but stays in place until then.
    can_expire_dentries: AtomicBool,
}

/// An open session.
pub(super) struct Session {
    notifier: Notifier,
    device: Arc<Device>,
}

impl Channel {
    /// Opens the channel.
    pub(super) fn connect(&self, notifier: Notifier, device: Arc<Device>) {
        *self.session.lock() = Some(Arc::new(Session { notifier, device }));
    }

    /// Closes the channel for good.
    pub(super) fn close(&self) {
        *self.session.lock() = None;
    }

    pub(super) fn is_open(&self) -> bool {
        self.session.lock().is_some()
    }

    /// The session; `None` when it is closed.
    pub(super) fn session(&self) -> Option<Arc<Session>> {
        self.session.lock().clone()
    }

    /// Records what INIT negotiated.
    pub(super) fn set_negotiated(&self, can_expire_dentries: bool) {
        self.can_expire_dentries.store(can_expire_dentries, Ordering::Relaxed);
    }

    /// Waits until the kernel has completed a rename of a directory to `name` in `dir`. The kernel
    /// holds the lock of `dir` until then.
    pub(super) fn wait_for_rename(&self, dir: NodeId, name: &Name) {
        if !self.can_expire_dentries.load(Ordering::Relaxed) {
            return self.wait_for_dir_lock(dir);
        }
        // An error means that the kernel no longer has the dentry or the directory. Then the rename
        // completed earlier.
        if let Some(session) = self.session()
            && let Err(error) = session.expire_dentry(dir, name)
        {
            log::debug!("wait for a rename into directory {}: {error}", dir.0);
        }
    }

    /// Waits until whichever thread holds the kernel's lock of a directory now has released it.
    /// Works up to Linux 6.18; see [`super::init`].
    pub(super) fn wait_for_dir_lock(&self, dir: NodeId) {
        // The kernel reports that it does not know the name, or that it does not know the
        // directory. In the latter case no operation is under way in it.
        if let Some(session) = self.session()
            && let Err(error) = session.invalidate_dentry(dir, OsStr::from_bytes(UNUSED_NAME))
        {
            log::debug!("wait for directory {}: {error}", dir.0);
        }
    }

    /// Invalidates a dentry. May wait for the kernel's lock of the directory.
    pub(super) fn invalidate_dentry(&self, dir: NodeId, name: &Name) {
        if let Some(session) = self.session()
            && let Err(error) = session.invalidate_dentry(dir, name.as_os_str())
        {
            log::debug!("invalidate a name in directory {}: {error}", dir.0);
        }
    }

    /// Invalidates the attributes of a node. Waits for no lock that a request may hold.
    pub(super) fn invalidate_attributes(&self, id: NodeId) {
        if let Some(session) = self.session()
            && let Err(error) = session.invalidate_attributes(id)
        {
            log::debug!("invalidate the attributes of node {}: {error}", id.0);
        }
    }

    /// Invalidates the attributes and all cached pages of a node.
    pub(super) fn invalidate_pages(&self, id: NodeId) {
        if let Some(session) = self.session()
            && let Err(error) = session.invalidate_pages(id)
        {
            log::debug!("invalidate node {}: {error}", id.0);
        }
    }
}

impl Session {
    /// Whether the connection is up. The kernel reports an error on the device once it is aborted.
    pub(super) fn is_connected(&self) -> bool {
        let mut device = [PollFd::new(self.device.as_fd(), PollFlags::empty())];
        !matches!(poll(&mut device, PollTimeout::ZERO), Ok(1..))
    }

    /// Invalidates all dentries at once. fuser does not know this message:
    ///
    /// ```text
    /// fuse_out_header = len u32 (16) | error i32 (8: FUSE_NOTIFY_INC_EPOCH)
    ///                 | unique u64 (0: a notification)
    /// ```
    pub(super) fn increment_epoch(&self) -> io::Result<()> {
        let mut message = [0; 16];
        let words = [16_u32.to_ne_bytes(), 8_u32.to_ne_bytes()];
        for (to, from) in message.iter_mut().zip(words.as_flattened()) {
            *to = *from;
        }
        Ok(self.device.write(&[IoSlice::new(&message)])?)
    }

    /// Makes the kernel look a name up again, without dropping its dentry. fuser does not know the
    /// flag:
    ///
    /// ```text
    /// fuse_out_header             = len u32 | error i32 (3: FUSE_NOTIFY_INVAL_ENTRY)
    ///                             | unique u64 (0: a notification)
    /// fuse_notify_inval_entry_out = parent u64 | length of the name u32
    ///                             | flags u32 (1: FUSE_EXPIRE_ONLY) | the name, NUL
    /// ```
    fn expire_dentry(&self, dir: NodeId, name: &Name) -> io::Result<()> {
        let name = name.as_bytes();
        let message = [
            &u32::try_from(EXPIRE_PREFIX + name.len() + 1).unwrap_or(u32::MAX).to_ne_bytes()[..],
            &3_u32.to_ne_bytes(),
            &0_u64.to_ne_bytes(),
            &dir.0.to_ne_bytes(),
            &u32::try_from(name.len()).unwrap_or(u32::MAX).to_ne_bytes(),
            &1_u32.to_ne_bytes(),
            name,
            b"\0",
        ];
        Ok(self.device.write(&[IoSlice::new(&message.concat())])?)
    }

    pub(super) fn invalidate_dentry(&self, dir: NodeId, name: &OsStr) -> io::Result<()> {
        self.notifier.inval_entry(INodeNo(dir.0), name)
    }

    pub(super) fn invalidate_attributes(&self, id: NodeId) -> io::Result<()> {
        // A negative offset leaves the pages alone.
        self.notifier.inval_inode(INodeNo(id.0), -1, 0)
    }

    pub(super) fn invalidate_pages(&self, id: NodeId) -> io::Result<()> {
        // Length 0 means all pages. The pages of a directory hold its cached listing.
        self.notifier.inval_inode(INodeNo(id.0), 0, 0)
    }
}
