//! One mount as the rest of the program sees it: implements [`Kernel`] by notifications and
//! flushes.
//!
//! The kernel caches dentries, attributes and directory listings without a time limit. A switch to
//! another state therefore invalidates everything that it changed. Always true:
//! * Nothing here runs under a lock. The kernel may answer a notification only after the server has
//!   answered other requests.
//! * A large switch increments the kernel's *epoch* (Linux 6.16), which invalidates all dentries at
//!   once. The kernel then also detaches filesystems that are mounted inside the mount, without any
//!   message. So the epoch is never incremented while such a mount exists in any mount namespace.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Attempt, Error, Result};
use crate::fs::{Fs, Invalidations, Kernel};
use crate::fuse::flush_waiters::FlushWaiters;
use crate::fuse::notify::{Channel, Session};
use crate::fuse::recent_writeback::RecentWriteback;
use crate::sys;
use crate::types::{Name, NodeId, TreePath};

/// Above this number of dentries, a new epoch costs less than one notification for each.
const EPOCH_THRESHOLD: usize = 20_000;
/// How many nodes are looked up in the node table under one hold of the filesystem's lock.
const HELD_QUERY_CHUNK: usize = 256;

/// One mount, as a flush and an invalidation need it.
pub(super) struct Mount {
    pub(super) fs: Arc<Fs>,
    pub(super) channel: Arc<Channel>,
    pub(super) recent_writeback: Arc<RecentWriteback>,
    pub(super) flush_waiters: Arc<FlushWaiters>,
    pub(super) root: Root,
    /// `st_dev` of the files in the mount.
    pub(super) dev: u64,
    pub(super) writeback: bool,
    /// Whether users other than the daemon's own may enter.
    pub(super) all_users: bool,
}

/// How the daemon opens the root of the mount.
pub(super) enum Root {
    /// By the path of the mount point. It is opened only when needed: an open root keeps the mount
    /// busy.
    At(PathBuf),
    /// By a descriptor that stays open, because the mount point is in another mount namespace.
    Held(OwnedFd),
}

impl Kernel for Mount {
    fn flush(&self) -> Result<()> {
        if !self.channel.is_open() {
            return Ok(());
        }
        self.flush_dirty_pages()
    }

    fn invalidate(&self, what: &Invalidations) -> Result<()> {
        let invalidated = self.invalidate(what);
        self.fs.names_were_invalidated(&what.names);
        invalidated
    }

    fn mounts_inside(&self) -> Result<Vec<TreePath>> {
        let points =
            sys::mountinfo::points_inside(self.dev).attempt(|| "look for mounts inside")?;
        let paths = points.iter().map(|point| TreePath::parse(point.as_os_str().as_bytes()));
        Ok(paths.filter_map(std::result::Result::ok).collect())
    }

    fn is_connected(&self) -> bool {
        self.channel.session().is_some_and(|session| session.is_connected())
    }
}

impl Mount {
    /// Invalidates dentries, then listings, then attributes. Goes on after a failure, and returns
    /// the first one.
    fn invalidate(&self, what: &Invalidations) -> Result<()> {
        let Some(session) = self.channel.session() else { return Ok(()) };
        let mut first_failure = None;
        let mut note = |sent: io::Result<()>| {
            if let Err(error) = sent {
                first_failure.get_or_insert(error);
            }
        };
        if !self.invalidate_all_dentries(&session, &what.names) {
            for (dir, name) in &what.names {
                note(session.invalidate_dentry(*dir, name.as_os_str()));
            }
        }
        what.listings.iter().for_each(|id| note(session.invalidate_pages(*id)));
        // A reply that the kernel has not processed yet would restore old attributes after the
        // invalidation. The kernel processes it under the lock of the directory.
        what.within.iter().for_each(|dir| self.channel.wait_for_dir_lock(*dir));
        // The kernel drops most unused inodes together with their dentries and sends FORGET for
        // them. Such inodes need no notification.
        let attrs: Vec<NodeId> = what.attrs.iter().copied().collect();
        for chunk in attrs.chunks(HELD_QUERY_CHUNK) {
            let held = self.fs.still_held(chunk);
            held.into_iter().for_each(|id| note(session.invalidate_attributes(id)));
        }
        // Files of the base that changed behind the sandbox, as the switch noticed.
        let (nodes, names) = self.fs.take_invalidations();
        for id in nodes {
            self.channel.invalidate_pages(id);
            self.fs.node_was_invalidated(id);
        }
        names.iter().for_each(|(dir, name)| self.channel.invalidate_dentry(*dir, name));
        match first_failure {
            // A mount that ended meanwhile caches nothing.
            Some(_) if !self.channel.is_open() => Ok(()),
            Some(error) => Err(Error::io("invalidate what the kernel has cached", &error)),
            None => Ok(()),
        }
    }

    /// Invalidates all dentries at once if that is cheaper, harmless and supported. Returns whether
    /// it did.
    fn invalidate_all_dentries(&self, session: &Session, names: &BTreeSet<(NodeId, Name)>) -> bool {
        if names.len() <= EPOCH_THRESHOLD {
            return false;
        }
        // A dentry made from a READDIRPLUS reply gets the epoch of the moment in which the kernel
        // processes the reply (`fuse_direntplus_link`). That may be after the switch, although the
        // reply is from before it. So wait until each directory has processed its replies.
        let mut dirs: Vec<NodeId> = names.iter().map(|(dir, _)| *dir).collect();
        dirs.dedup();
        dirs.into_iter().for_each(|dir| self.channel.wait_for_dir_lock(dir));
        let has_mounts = sys::mountinfo::is_mounted_upon(self.dev);
        has_mounts.is_ok_and(|mounted| !mounted) && session.increment_epoch().is_ok()
    }
}
