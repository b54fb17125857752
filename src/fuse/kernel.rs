//! What the kernel is told and asked around a change of state.
//!
//! **Forgetting.** The kernel remembers names, attributes and listings for ever, so a switch tells it what it must not
//! remember: name by name, or, when there are very many, all names at once by a new *epoch* (Linux 6.16). The latter also
//! unmounts, silently, what is mounted inside the mount, so never while there is such a mount in any namespace.
//!
//! **Bringing home.** Bytes that processes wrote through shared mappings are in the kernel until somebody asks for them.
//! syncfs(2) only starts that, so each file that can have such bytes is opened through the mount and synced. These are
//! the files with a live shared mapping (close and munmap sync by themselves); with the writeback cache, or where a process
//! cannot be looked into, all files that the kernel holds.
//!
//! Both run in the thread of whoever changes the state, without any lock: the kernel's answers depend on requests that
//! the door must be able to serve meanwhile.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{INodeNo, Notifier};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{Mode, fstat};
use parking_lot::Mutex;

use crate::error::{Attempt, Error, Result};
use crate::fs::{Forgotten, Fs, Kernel};
use crate::sys;
use crate::types::{Ino, NodeId, TreePath};

/// From so many names on a new epoch costs less than telling each.
const MANY_NAMES: usize = 20_000;
/// How long a file is looked for that is renamed again and again meanwhile.
const PATIENCE: Duration = Duration::from_secs(10);

/// The session as others than its own thread use it; closed when that thread ends, so that no copy of the descriptor
/// keeps a mount alive that nobody serves.
#[derive(Default)]
pub(super) struct Channel(Mutex<Option<Arc<Line>>>);

struct Line {
    notifier: Notifier,
    raw: OwnedFd,
}

impl Channel {
    /// Opens the channel; `raw` is a copy of the session's descriptor.
    pub(super) fn connect(&self, notifier: Notifier, raw: OwnedFd) {
        *self.0.lock() = Some(Arc::new(Line { notifier, raw }));
    }

    /// Closes it, for good.
    pub(super) fn close(&self) {
        *self.0.lock() = None;
    }

    /// Returns when nobody holds the lock of a directory in the kernel who held it when this was called. `name` is one that
    /// the directory does not have.
    pub(super) fn wait_for_lock(&self, dir: NodeId, name: &OsStr) {
        // The kernel says that it does not know the name, or not the directory, in which then nothing is under way.
        if let Some(line) = self.line()
            && let Err(error) = line.notifier.inval_entry(INodeNo(dir.0), name)
        {
            log::debug!("wait for directory {}: {error}", dir.0);
        }
    }

    fn line(&self) -> Option<Arc<Line>> {
        self.0.lock().clone()
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
        let scan = sys::proc::shared_maps(self.dev, self.all_users)
            .attempt(|| "find out who has files of the mount mapped")?;
        let mut files: BTreeSet<Ino> =
            scan.files.iter().flat_map(|(number, _)| self.fs.meant_by(*number)).collect();
        if self.writeback || !scan.unreadable.is_empty() {
            files.extend(self.fs.held_files());
        }
        if files.is_empty() {
            return Ok(());
        }
        let root = self.open_root()?;
        for ino in files {
            self.flush_file(&root, ino)?;
        }
        Ok(())
    }

    fn forget(&self, what: &Forgotten) -> Result<()> {
        let Some(line) = self.channel.line() else { return Ok(()) };
        let mut first_failure = None;
        let mut note = |told: io::Result<()>| {
            if let Err(error) = told {
                first_failure.get_or_insert(error);
            }
        };
        if !self.forget_all_names(&line, what.names.len()) {
            for (dir, name) in &what.names {
                note(line.notifier.inval_entry(INodeNo(dir.0), name.as_os_str()));
            }
        }
        what.attrs.iter().for_each(|id| note(line.forget_attributes(*id)));
        what.listings.iter().for_each(|id| note(line.forget_listing(*id)));
        match first_failure {
            // A mount that ended meanwhile remembers nothing.
            Some(_) if self.channel.line().is_none() => Ok(()),
            Some(error) => Err(Error::io("tell the kernel what changed", &error)),
            None => Ok(()),
        }
    }
}

impl Mount {
    /// Drops all names at once, if that is cheaper, harmless and possible. Whether it was done.
    fn forget_all_names(&self, line: &Line, names: usize) -> bool {
        names > MANY_NAMES
            && sys::mountinfo::is_mounted_upon(self.dev).is_ok_and(|mounted| !mounted)
            && line.begin_epoch().is_ok()
    }

    fn open_root(&self) -> Result<OwnedFd> {
        let point = match &self.root {
            Root::At(point) => point,
            Root::Held(root) => return root.try_clone().attempt(|| "enter the mount"),
        };
        let attempt = || format!("enter the mount '{}'", point.display());
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let root = open(point, flags, Mode::empty()).map_err(io::Error::from).attempt(attempt)?;
        let stat = fstat(&root).map_err(io::Error::from).attempt(attempt)?;
        if stat.st_dev != self.dev {
            return Err(Error::new(crate::error::Kind::Failed, attempt(), "something else is mounted there"));
        }
        Ok(root)
    }

    /// Brings home what is dirty of one file; of one that is gone, its bytes belong to its holders alone.
    fn flush_file(&self, root: &OwnedFd, ino: Ino) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let Some(path) = self.fs.path_of(ino) else { return Ok(()) };
            let errno = match open_for_sync(root, &path) {
                Ok(file) if fstat(&file).is_ok_and(|stat| stat.st_ino == ino.0) => {
                    return sys::file::sync_file_range_all(&file).attempt(|| format!("bring home '{path}'"));
                }
                Err(Errno::EACCES) if self.nobody_could_write(ino, &path) => return Ok(()),
                // Renamed between our question and the open: by now it may have a name that stays for long enough.
                Ok(_) => Errno::ESTALE,
                Err(errno) => errno,
            };
            let renamed = matches!(errno, Errno::ESTALE | Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP);
            if !renamed || Instant::now() > end {
                return Err(Error::io(format!("bring home '{path}'"), &errno.into()));
            }
        }
    }

    /// Whether a file that we may not open is one that no process in the mount may open either: it is another user's, and
    /// only our own user may enter.
    fn nobody_could_write(&self, ino: Ino, path: &TreePath) -> bool {
        let state = self.fs.state();
        let found = state.resolve(path).ok().filter(|found| found.ino() == Some(ino));
        let owner = found.and_then(|found| state.attr(&found)).map(|attr| attr.meta.uid);
        !self.all_users && owner.is_some_and(|owner| owner != nix::unistd::geteuid().as_raw())
    }
}

/// Opens a file of the mount for reading or, where that is not allowed, for writing: the descriptor only names the file.
/// Neither a link nor another mount is entered on the way.
fn open_for_sync(root: &OwnedFd, path: &TreePath) -> nix::Result<OwnedFd> {
    match open_within(root, path, OFlag::O_RDONLY) {
        Err(Errno::EACCES) => open_within(root, path, OFlag::O_WRONLY),
        other => other,
    }
}

fn open_within(root: &OwnedFd, path: &TreePath, access: OFlag) -> nix::Result<OwnedFd> {
    let flags = access | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let within =
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    match openat2(root, path.as_os_str(), OpenHow::new().flags(flags).resolve(within)) {
        // An old kernel, or a container that forbids it: the number of what was opened is checked in any case.
        Err(Errno::ENOSYS | Errno::EPERM) => openat(root, path.as_os_str(), flags, Mode::empty()),
        other => other,
    }
}
