//! What the kernel is told and asked around a change of state.
//!
//! **Forgetting.** The kernel remembers names, attributes and listings for ever, so a switch tells it what it must not
//! remember: name by name, or, when there are very many, all names at once by a new *epoch* (Linux 6.16). The latter also
//! unmounts, silently, what is mounted inside the mount, so never while there is such a mount in any namespace.
//!
//! **Bringing home** what programs wrote and the kernel still has: see [`super::homeward`].
//!
//! Both run without any lock: the kernel's answers depend on requests that the door must be able to serve meanwhile.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fuser::{INodeNo, Notifier};
use parking_lot::Mutex;

use crate::error::{Attempt, Error, Result};
use crate::fs::{Forgotten, Fs, Kernel};
use crate::fuse::homeward::Homeward;
use crate::sys;
use crate::types::{Name, NodeId, TreePath};

/// From so many names on a new epoch costs less than telling each.
const MANY_NAMES: usize = 20_000;
/// Nodes of which it is asked at once whether the kernel holds them, under the lock of the filesystem.
const ASKED_AT_ONCE: usize = 256;

/// Bytes before the name in the message that lets one expire.
const EXPIRY: usize = 32;
/// A name that no file has: it is longer than names are.
const NOBODY: &[u8] = &[b'-'; 256];

/// The session as others than its own thread use it; closed when that thread ends, so that no copy of the descriptor
/// keeps a mount alive that nobody serves.
#[derive(Default)]
pub(super) struct Channel {
    line: Mutex<Option<Arc<Line>>>,
    /// Whether the kernel can be told that a name is to be asked for again, and keeps what it has of it (Linux 6.2).
    lets_names_expire: AtomicBool,
}

struct Line {
    notifier: Notifier,
    raw: OwnedFd,
}

impl Channel {
    /// Opens the channel; `raw` is a copy of the session's descriptor.
    pub(super) fn connect(&self, notifier: Notifier, raw: OwnedFd) {
        *self.line.lock() = Some(Arc::new(Line { notifier, raw }));
    }

    /// Closes it, for good.
    pub(super) fn close(&self) {
        *self.line.lock() = None;
    }

    /// Notes what the kernel said of itself.
    pub(super) fn agreed(&self, lets_names_expire: bool) {
        self.lets_names_expire.store(lets_names_expire, Ordering::Relaxed);
    }

    /// Returns when the kernel is through with a move of a directory to `name` in `dir`, which it has locked meanwhile.
    pub(super) fn wait_for_move(&self, dir: NodeId, name: &Name) {
        if !self.lets_names_expire.load(Ordering::Relaxed) {
            return self.wait_for_lock(dir);
        }
        // If it does not know the name any more, or the directory, the move was over before.
        if let Some(line) = self.line()
            && let Err(error) = line.expire_name(dir, name)
        {
            log::debug!("wait for a move into directory {}: {error}", dir.0);
        }
    }

    /// Returns when nobody holds the lock of a directory in the kernel who held it when this was called (up to Linux 6.18:
    /// [`super::handshake`]).
    pub(super) fn wait_for_lock(&self, dir: NodeId) {
        // The kernel says that it does not know the name, or not the directory, in which then nothing is under way.
        if let Some(line) = self.line()
            && let Err(error) = line.notifier.inval_entry(INodeNo(dir.0), OsStr::from_bytes(NOBODY))
        {
            log::debug!("wait for directory {}: {error}", dir.0);
        }
    }

    /// Makes the kernel ask for a name again. It may wait for the lock of the directory.
    pub(super) fn forget_name(&self, dir: NodeId, name: &Name) {
        if let Some(line) = self.line()
            && let Err(error) = line.notifier.inval_entry(INodeNo(dir.0), name.as_os_str())
        {
            log::debug!("forget a name in directory {}: {error}", dir.0);
        }
    }

    /// Makes the kernel forget the attributes of a file and all that it has of its content.
    pub(super) fn forget_content(&self, id: NodeId) {
        if let Some(line) = self.line()
            && let Err(error) = line.forget_listing(id)
        {
            log::debug!("forget node {}: {error}", id.0);
        }
    }

    /// Sends an answer as it is to be written.
    ///
    /// # Errors
    /// ENOENT if nobody waits for it any more; ENOTCONN when the channel is closed.
    pub(super) fn answer(&self, message: &[u8]) -> io::Result<()> {
        let line = self.line().ok_or(nix::errno::Errno::ENOTCONN)?;
        nix::unistd::write(&line.raw, message)?;
        Ok(())
    }

    fn line(&self) -> Option<Arc<Line>> {
        self.line.lock().clone()
    }
}

impl Line {
    /// Makes all names that the kernel holds be asked for anew. fuser does not know this message:
    ///
    /// ```text
    /// fuse_out_header = len u32 (16) | error i32 (8: FUSE_NOTIFY_INC_EPOCH) | unique u64 (0: a notification)
    /// ```
    fn begin_epoch(&self) -> io::Result<()> {
        let mut message = [0; 16];
        let words = [16_u32.to_ne_bytes(), 8_u32.to_ne_bytes()];
        for (to, from) in message.iter_mut().zip(words.as_flattened()) {
            *to = *from;
        }
        nix::unistd::write(&self.raw, &message)?;
        Ok(())
    }

    /// Makes a name be asked for anew, without letting go of it. fuser does not know the flag:
    ///
    /// ```text
    /// fuse_out_header             = len u32 | error i32 (3: FUSE_NOTIFY_INVAL_ENTRY) | unique u64 (0: a notification)
    /// fuse_notify_inval_entry_out = parent u64 | length of the name u32 | flags u32 (1: FUSE_EXPIRE_ONLY) | the name, NUL
    /// ```
    fn expire_name(&self, dir: NodeId, name: &Name) -> io::Result<()> {
        let name = name.as_bytes();
        let message = [
            &u32::try_from(EXPIRY + name.len() + 1).unwrap_or(u32::MAX).to_ne_bytes()[..],
            &3_u32.to_ne_bytes(),
            &0_u64.to_ne_bytes(),
            &dir.0.to_ne_bytes(),
            &u32::try_from(name.len()).unwrap_or(u32::MAX).to_ne_bytes(),
            &1_u32.to_ne_bytes(),
            name,
            b"\0",
        ];
        nix::unistd::write(&self.raw, &message.concat())?;
        Ok(())
    }

    fn forget_attributes(&self, id: NodeId) -> io::Result<()> {
        // A negative offset leaves the pages alone.
        self.notifier.inval_inode(INodeNo(id.0), -1, 0)
    }

    fn forget_listing(&self, id: NodeId) -> io::Result<()> {
        // Length 0 means all pages: those of a directory are its cached names.
        self.notifier.inval_inode(INodeNo(id.0), 0, 0)
    }
}

/// The kernel side of one mount.
pub(super) struct Mount {
    pub(super) fs: Arc<Fs>,
    pub(super) channel: Arc<Channel>,
    pub(super) homeward: Arc<Homeward>,
    pub(super) root: Root,
    /// `st_dev` of the files in the mount.
    pub(super) dev: u64,
    pub(super) writeback: bool,
    /// Whether other users than ours may enter.
    pub(super) all_users: bool,
}

/// How we come into a mount.
pub(super) enum Root {
    /// By its mount point. It is opened only when needed, because that keeps the mount busy.
    At(PathBuf),
    /// By its root, held open: the mount point is in another mount namespace.
    Held(OwnedFd),
}

impl Kernel for Mount {
    fn flush(&self) -> Result<()> {
        if self.channel.line().is_none() {
            return Ok(());
        }
        self.bring_home()
    }

    fn forget(&self, what: &Forgotten) -> Result<()> {
        let told = self.tell(what);
        self.fs.names_are_told(&what.names);
        told
    }

    fn mounts_inside(&self) -> Result<Vec<TreePath>> {
        let points = sys::mountinfo::points_inside(self.dev).attempt(|| "look for mounts inside")?;
        let paths = points.iter().map(|point| TreePath::parse(point.as_os_str().as_bytes()));
        Ok(paths.filter_map(std::result::Result::ok).collect())
    }
}

impl Mount {
    fn tell(&self, what: &Forgotten) -> Result<()> {
        let Some(line) = self.channel.line() else { return Ok(()) };
        let mut first_failure = None;
        let mut note = |told: io::Result<()>| {
            if let Err(error) = told {
                first_failure.get_or_insert(error);
            }
        };
        if !self.forget_all_names(&line, &what.names) {
            for (dir, name) in &what.names {
                note(line.notifier.inval_entry(INodeNo(dir.0), name.as_os_str()));
            }
        }
        what.listings.iter().for_each(|id| note(line.forget_listing(*id)));
        // What the kernel does not have yet it cannot forget. It takes in what we answered with the lock of the directory.
        what.within.iter().for_each(|dir| self.channel.wait_for_lock(*dir));
        // With its names the kernel lets go of most of what nobody uses, and tells us so: of such there is nothing to forget.
        let attrs: Vec<NodeId> = what.attrs.iter().copied().collect();
        for some in attrs.chunks(ASKED_AT_ONCE) {
            self.fs.still_held(some).into_iter().for_each(|id| note(line.forget_attributes(id)));
        }
        // Files that somebody changed in the base, which the switch met.
        let (nodes, names) = self.fs.outdated();
        for id in nodes {
            self.channel.forget_content(id);
            self.fs.is_forgotten(id);
        }
        names.iter().for_each(|(dir, name)| self.channel.forget_name(*dir, name));
        match first_failure {
            // A mount that ended meanwhile remembers nothing.
            Some(_) if self.channel.line().is_none() => Ok(()),
            Some(error) => Err(Error::io("tell the kernel what changed", &error)),
            None => Ok(()),
        }
    }

    /// Drops all names at once, if that is cheaper, harmless and possible. Whether it was done.
    fn forget_all_names(&self, line: &Line, names: &BTreeSet<(NodeId, Name)>) -> bool {
        if names.len() <= MANY_NAMES {
            return false;
        }
        // A name that came with a listing is of the epoch in which the kernel takes it in (`fuse_direntplus_link`), which may be behind
        // our answer: from before the switch.
        let mut dirs: Vec<NodeId> = names.iter().map(|(dir, _)| *dir).collect();
        dirs.dedup();
        dirs.into_iter().for_each(|dir| self.channel.wait_for_lock(dir));
        sys::mountinfo::is_mounted_upon(self.dev).is_ok_and(|mounted| !mounted) && line.begin_epoch().is_ok()
    }
}
