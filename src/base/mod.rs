//! The base: the user's directory, read-only for us except through `apply`.
//!
//! Always true here: every access is relative to a descriptor of the base directory and stays beneath it; no symlink is
//! followed, no mount is entered, also not in a race with whoever changes the base (`resolve.rs`). A mount point inside
//! the base is shown as *foreign*, a directory without names, and what is mounted there is never asked: it may be our
//! own mount, and asking would wait for ourselves.
//!
//! There are two descriptors. The *plain* one says what is in the base. Names, bytes, link texts and attributes are read
//! through the *view*, where the kernel lets us have one: a private clone of the mount, read-only and without access
//! times, so that reading leaves no trace and a mistake here cannot write. Without the privilege for it the view
//! is the plain descriptor; files and directories are then opened with `O_NOATIME` where their owner is us, and only
//! the access time of a symlink may change (readlinkat(2) takes no flag for it).
//!
//! [`BaseWriter`] is the one door through which `apply` changes the base.

mod attributes;
mod dir_lookup;
mod mark;
mod obstacle;
mod resolve;
mod stat;
#[cfg(test)]
mod tests;
mod write;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, readlinkat};
use nix::sys::stat::Mode;
use nix::sys::statvfs::{Statvfs, fstatvfs};
use parking_lot::RwLock;

use crate::error::{Attempt, Error, FsError, FsResult, Result};
use crate::sys;
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::types::{BaseMark, FileKind, Name, TreePath};

pub use attributes::Attributes;
pub use dir_lookup::DirLookup;
pub use obstacle::Obstacle;
pub use stat::BaseStat;
pub use write::{BaseWriter, WriteDir};

use resolve::{Resolver, Root};

/// An opened base directory.
pub struct Base {
    plain: Root,
    view: Option<Root>,
    resolver: Resolver,
    path: Vec<u8>,
    id: (u64, u64),
    mark: Option<BaseMark>,
    keeps_numbers: bool,
    /// Whether the kernel knows all of a file without asking anybody.
    answers_at_once: bool,
    hidden: RwLock<Arc<[TreePath]>>,
}

/// One name in a directory of the base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseEntry {
    /// The name.
    pub name: Name,
    /// The `d_ino` that the directory gives.
    pub ino: u64,
    /// The device of the directory, as in [`BaseStat::dev`].
    pub dev: u64,
    /// What it is, where the directory says so; of a mount point, what lies under the mount.
    pub kind: Option<FileKind>,
}

/// What of the kernel to use; all of it, except in tests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means {
    /// openat2(2), or else a walk name by name.
    pub openat2: bool,
    /// A private view, or else the plain directory.
    pub view: bool,
}

impl Base {
    /// Opens the directory that a person named; a symlink in what they typed is followed, here and nowhere else.
    ///
    /// # Errors
    /// In words, if there is no such directory or it may not be read.
    pub fn open(path: &Path) -> Result<Base> {
        Base::open_with(path, Means { openat2: true, view: true })
    }

    pub(crate) fn open_with(path: &Path, means: Means) -> Result<Base> {
        let attempt = || format!("open base '{}'", path.display());
        let path = sys::path::resolve(path).attempt(attempt).map_err(explain)?;
        let root = open_directory(&path)
            .map_err(std::io::Error::from)
            .attempt(attempt)
            .map_err(explain)?;
        let stat = nix::sys::stat::fstat(&root).map_err(std::io::Error::from).attempt(attempt)?;
        // Without a private view we go on: the promise "no byte changes" does not rest on it.
        let view = if means.view { sys::mount::clone_private_readonly(&root).ok() } else { None };
        let mark = mark::of_root(&root, stat.st_ino);
        let (keeps_numbers, answers_at_once) =
            (mark::keeps_numbers(&root), mark::answers_at_once(&root));
        Ok(Base {
            mark,
            keeps_numbers,
            answers_at_once,
            plain: Root::new(root),
            view: view.map(Root::new),
            resolver: Resolver::new(means.openat2),
            path: path.into_os_string().into_vec(),
            id: (stat.st_dev, stat.st_ino),
            hidden: RwLock::new(Arc::from([])),
        })
    }

    /// Says what of the base nobody is told from now on: what is at and below these paths, wherever a tree shows it.
    pub fn hide(&self, paths: Vec<TreePath>) {
        *self.hidden.write() = paths.into();
    }

    /// Whether anything is hidden.
    pub fn hides_any(&self) -> bool {
        !self.hidden.read().is_empty()
    }

    /// Whether what is at a path is told to nobody.
    pub fn hides(&self, path: &TreePath) -> bool {
        self.hidden.read().iter().any(|hidden| path.starts_with(hidden))
    }

    /// The absolute path of the base on the host, without links, as it was when opened.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// `st_dev` and `st_ino` of the base directory.
    pub fn root_id(&self) -> (u64, u64) {
        self.id
    }

    /// What the directory is known by when it has another path, or its device another number; none where the filesystem gives
    /// out numbers anew.
    pub fn mark(&self) -> Option<BaseMark> {
        self.mark
    }

    /// Whether nodes have the same numbers when the filesystem was mounted anew.
    pub fn keeps_numbers(&self) -> bool {
        self.keeps_numbers
    }

    /// Whether reading goes through a private read-only view that leaves no access times.
    pub fn has_private_view(&self) -> bool {
        self.view.is_some()
    }

    /// What is at `path`; of a symlink, the link itself.
    ///
    /// # Errors
    /// `NotFound` also if a symlink, a mount point or no directory stands on the way; `AccessDenied`.
    pub fn stat(&self, path: &TreePath) -> FsResult<BaseStat> {
        match self.find(path)? {
            Found::Here(object) => self.stat_of(&object),
            Found::Foreign => self.stat_foreign(path),
        }
    }

    /// What is known of an object in the base.
    fn stat_of(&self, object: &OwnedFd) -> FsResult<BaseStat> {
        let mut stat = BaseStat::of(object)?;
        if stat.dev != self.id.0 {
            stat.dev = mark::other_device(object, stat.dev);
        }
        Ok(stat)
    }

    /// The names in the directory `path`, in the order of the host; none in a foreign one. A name that is longer than
    /// [`crate::types::NAME_MAX`], which some filesystems have, is left out with a warning.
    ///
    /// # Errors
    /// `NotADirectory`; `NotFound` and `AccessDenied` as in [`Base::stat`].
    pub fn list(&self, path: &TreePath) -> FsResult<Vec<BaseEntry>> {
        self.list_seen(path, &self.stat(path)?)
    }

    /// The same for what was `seen` there just now.
    ///
    /// # Errors
    /// As [`Base::list`].
    pub fn list_seen(&self, path: &TreePath, seen: &BaseStat) -> FsResult<Vec<BaseEntry>> {
        if seen.foreign {
            return Ok(Vec::new());
        }
        if seen.kind != FileKind::Dir {
            return Err(FsError::NotADirectory);
        }
        let dev = seen.dev;
        let directory = self.open_quietly(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        let mut entries = Vec::new();
        failpoint::hit(Failpoint::BaseRead)?;
        sys::dir::for_each(&directory, |name, ino, kind| match Name::new(name) {
            Ok(name) => entries.push(BaseEntry { name, ino, dev, kind }),
            Err(_) => log::warn!("base: left out a name of {} bytes in {path}", name.len()),
        })?;
        Ok(entries)
    }

    /// Opens the regular file `path` for reading.
    ///
    /// # Errors
    /// `IsADirectory`; `Invalid` for a symlink, fifo, socket or device; `AccessDenied` also for a mount point;
    /// `NotFound` as in [`Base::stat`].
    pub fn open_file(&self, path: &TreePath) -> FsResult<File> {
        self.open_file_seen(path, &self.stat(path)?)
    }

    /// The same for what was `seen` there just now: it is not looked at once more before it is opened.
    ///
    /// # Errors
    /// As [`Base::open_file`].
    pub fn open_file_seen(&self, path: &TreePath, seen: &BaseStat) -> FsResult<File> {
        if seen.foreign {
            return Err(FsError::AccessDenied);
        }
        must_be_file(seen.kind)?;
        // If a fifo takes the place of the file now, O_NONBLOCK keeps us from waiting for its writer.
        let file =
            self.open_quietly(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)?;
        must_be_file(BaseStat::of(&file)?.kind)?;
        Ok(File::from(file))
    }

    /// The text of the symlink `path`.
    ///
    /// # Errors
    /// `Invalid` if it is no symlink; `NotFound` and `AccessDenied` as in [`Base::stat`].
    pub fn readlink(&self, path: &TreePath) -> FsResult<Vec<u8>> {
        self.readlink_seen(path, &self.stat(path)?)
    }

    /// The same for what was `seen` there just now.
    ///
    /// # Errors
    /// As [`Base::readlink`].
    pub fn readlink_seen(&self, path: &TreePath, seen: &BaseStat) -> FsResult<Vec<u8>> {
        if seen.foreign || seen.kind != FileKind::Symlink {
            return Err(FsError::Invalid);
        }
        let link = self.open_in_view(path)?;
        failpoint::hit(Failpoint::BaseRead).map_err(read_failure)?;
        // Of what is no link any more readlinkat(2) says ENOENT: it is gone.
        Ok(readlinkat(&link, "").map_err(read_error)?.into_vec())
    }

    /// The extended attributes of `path`, of a symlink its own, sorted by name: `user.`, `security.`,
    /// `system.posix_acl_access` and `_default`, and `trusted.` where we may see them. None of a foreign directory.
    ///
    /// # Errors
    /// `NotFound` and `AccessDenied` as in [`Base::stat`].
    pub fn xattrs(&self, path: &TreePath) -> FsResult<Vec<(Vec<u8>, Vec<u8>)>> {
        self.xattrs_seen(path, &self.stat(path)?)
    }

    /// The same for what was `seen` there just now.
    ///
    /// # Errors
    /// As [`Base::xattrs`].
    pub fn xattrs_seen(
        &self,
        path: &TreePath,
        seen: &BaseStat,
    ) -> FsResult<Vec<(Vec<u8>, Vec<u8>)>> {
        if seen.foreign {
            return Ok(Vec::new());
        }
        let object = self.open_in_view(path)?;
        failpoint::hit(Failpoint::BaseRead).map_err(read_failure)?;
        attributes::read_xattrs(&object).map_err(read_failure)
    }

    /// Where something else is mounted upon the base now: what is shown there is empty.
    ///
    /// # Errors
    /// Those of reading `/proc/self/mountinfo`.
    pub fn mounts_inside(&self) -> std::io::Result<Vec<TreePath>> {
        let base = sys::file::mount_id(&self.plain.fd);
        let below = |point: &[u8]| {
            let rest = point.strip_prefix(&self.path[..])?;
            let rest = if self.path == b"/" { rest } else { rest.strip_prefix(b"/")? };
            TreePath::parse(rest).ok().filter(|path| !path.is_root())
        };
        let all = sys::mountinfo::read()?;
        // What is mounted upon a mount of the base is inside that one.
        let upon = all.iter().filter(|mount| base.is_none_or(|base| mount.parent == base));
        let mut found: Vec<TreePath> = upon.filter_map(|mount| below(&mount.mount_point)).collect();
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Sizes and limits of the filesystem that holds the base (statvfs(3)).
    ///
    /// # Errors
    /// Those of the host.
    pub fn statvfs(&self) -> FsResult<Statvfs> {
        fstatvfs(&self.plain.fd).map_err(read_error)
    }

    /// The door for `apply`.
    pub fn writer(&self) -> BaseWriter<'_> {
        BaseWriter::new(&self.plain, &self.resolver)
    }

    /// Finds `path` from the plain root, which sees where other mounts begin.
    fn find(&self, path: &TreePath) -> FsResult<Found> {
        match self.resolver.open(&self.plain, path.as_bytes(), O_PATH) {
            Ok(object) => Ok(Found::Here(object)),
            Err(Errno::EXDEV) if self.is_mount_point(path) => Ok(Found::Foreign),
            Err(errno) => Err(read_error(errno)),
        }
    }

    /// Whether the last name is what cannot be entered: its parent can be.
    fn is_mount_point(&self, path: &TreePath) -> bool {
        path.split().is_some_and(|(parent, _)| {
            self.resolver.open(&self.plain, parent.as_bytes(), O_PATH).is_ok()
        })
    }

    fn open_in_view(&self, path: &TreePath) -> FsResult<OwnedFd> {
        let root = self.view.as_ref().unwrap_or(&self.plain);
        self.resolver.open(root, path.as_bytes(), O_PATH).map_err(read_error)
    }

    /// Opens `path` in the view so that no access time changes, if that is ours to decide.
    fn open_quietly(&self, path: &TreePath, flags: OFlag) -> FsResult<OwnedFd> {
        let root = self.view.as_ref().unwrap_or(&self.plain);
        // O_NOATIME is for the owner and CAP_FOWNER only, and EPERM for everybody else (open(2)).
        self.resolver
            .open(root, path.as_bytes(), flags | OFlag::O_NOATIME)
            .or_else(|errno| match errno {
                Errno::EPERM => self.resolver.open(root, path.as_bytes(), flags),
                other => Err(other),
            })
            .map_err(read_error)
    }

    /// What is under the mount at `path`, as far as it can be told without asking the mounted filesystem.
    fn stat_foreign(&self, path: &TreePath) -> FsResult<BaseStat> {
        if let Some(view) = &self.view {
            // The view has no other mounts, so it shows what lies under this one.
            let under = self.resolver.open(view, path.as_bytes(), O_PATH).map_err(read_error)?;
            return Ok(BaseStat::of(&under)?.into_foreign());
        }
        // The directory entry tells number and kind of what lies under it; the rest is taken from the parent.
        let (parent, name) = path.split().ok_or(FsError::NotFound)?;
        let entry = self
            .list(&parent)?
            .into_iter()
            .find(|entry| entry.name == name)
            .ok_or(FsError::NotFound)?;
        let kind = entry.kind.unwrap_or(FileKind::Dir);
        let mode = kind.type_bits() | if kind == FileKind::Dir { 0o755 } else { 0 };
        Ok(BaseStat { ino: entry.ino, kind, mode, blocks: 0, ..self.stat(&parent)? }.into_foreign())
    }
}

enum Found {
    Here(OwnedFd),
    Foreign,
}

/// Refers to an object without opening it; a symlink, to the link itself.
const O_PATH: OFlag = OFlag::O_PATH;

/// Refuses what is not a regular file.
fn must_be_file(kind: FileKind) -> FsResult<()> {
    match kind {
        FileKind::File => Ok(()),
        FileKind::Dir => Err(FsError::IsADirectory),
        FileKind::Symlink
        | FileKind::Fifo
        | FileKind::Socket
        | FileKind::Char
        | FileKind::Block => Err(FsError::Invalid),
    }
}

/// Opens the base so that its names can be read, which `O_PATH` alone would not show.
fn open_directory(path: &Path) -> std::result::Result<OwnedFd, Errno> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    may_open()?;
    let directory = open(path, flags | OFlag::O_PATH, Mode::empty())?;
    nix::fcntl::openat(&directory, ".", flags, Mode::empty())?;
    Ok(directory)
}

fn explain(error: Error) -> Error {
    match error.errno.map(Errno::from_raw) {
        Some(Errno::ENOENT) => error.hint("name an existing directory"),
        Some(Errno::ENOTDIR) => {
            error.hint("the base is a directory; name the one that holds the file")
        }
        Some(Errno::EACCES | Errno::EPERM) => {
            error.hint("run as a user who may read the directory")
        }
        _ => error,
    }
}

/// Says that something is about to be opened or looked at.
fn may_open() -> std::result::Result<(), Errno> {
    failpoint::hit(Failpoint::BaseOpen)
        .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}

/// What an errno of a read means. A name that the host's filesystem cannot hold is not there; and what cannot be
/// reached without following a link or entering a mount is not in the base.
fn read_error(errno: Errno) -> FsError {
    match errno {
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV | Errno::ENAMETOOLONG => {
            FsError::NotFound
        }
        Errno::EACCES | Errno::EPERM => FsError::AccessDenied,
        other => FsError::Host(other as i32),
    }
}

fn read_failure(error: std::io::Error) -> FsError {
    error
        .raw_os_error()
        .map_or(FsError::Host(libc::EIO), |errno| read_error(Errno::from_raw(errno)))
}

impl std::fmt::Debug for Base {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Base({})", Path::new(std::ffi::OsStr::from_bytes(&self.path)).display())
    }
}
