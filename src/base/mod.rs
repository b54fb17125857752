//! The base: the directory of the user, which only `apply` changes.
//!
//! * Every access is relative to a descriptor of the base directory and stays beneath it. No
//!   symlink is followed and no mount is entered, also while another process renames in the base
//!   (`resolve.rs`).
//! * A mount point inside the base is shown as *foreign*: a directory without names, or a node
//!   without content. The mounted filesystem is never asked. It may be our own mount, and this
//!   process would wait for itself.
//! * Only [`BaseWriter`] changes the base.
//!
//! There are two descriptors of the root. The *plain* one finds nodes and sees where other mounts
//! begin. Names, content, symlink targets and attributes are read through the *view*: a private
//! clone of the mount that is read-only and does not update access times. Reading then leaves no
//! trace, and a bug here cannot write. Cloning a mount needs a privilege. Without it, the plain
//! descriptor serves as the view. Files and directories of our own user are then opened with
//! `O_NOATIME`. Only the access time of a symlink can still change, because readlinkat(2) has no
//! such flag.

mod attributes;
mod dir_lookup;
mod errno;
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
pub use dir_lookup::{DirLookup, PathLookup};
pub use obstacle::Obstacle;
pub use stat::{BaseStat, require_file};
pub use write::{BaseWriter, WriteDir};

use errno::{read_errno, read_error};
use resolve::{Resolver, Root, open_failpoint};

/// An opened base directory.
pub struct Base {
    plain: Root,
    view: Option<Root>,
    resolver: Resolver,
    path: Vec<u8>,
    id: (u64, u64),
    mark: Option<BaseMark>,
    has_stable_inodes: bool,
    /// Whether the kernel can stat a file without asking a server.
    is_local: bool,
    hidden: RwLock<Arc<[TreePath]>>,
}

/// A directory entry of the base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseEntry {
    /// The name.
    pub name: Name,
    /// The inode number in the directory (`d_ino`).
    pub ino: u64,
    /// The device of the directory, as in [`BaseStat::dev`].
    pub dev: u64,
    /// The kind of node, if the directory has it. For a mount point, that of the node under the
    /// mount.
    pub kind: Option<FileKind>,
}

/// Which features of the kernel to use. Only tests switch one off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    /// openat2(2); otherwise paths are walked name by name.
    pub openat2: bool,
    /// A private view; otherwise the plain directory.
    pub view: bool,
}

impl Base {
    /// Opens the directory that the user named. Symlinks in `path` are followed, here and nowhere
    /// else.
    ///
    /// # Errors
    /// If there is no such directory or it is not readable; with a hint.
    pub fn open(path: &Path) -> Result<Base> {
        Base::open_with(path, Features { openat2: true, view: true })
    }

    pub(crate) fn open_with(path: &Path, features: Features) -> Result<Base> {
        let attempt = || format!("open base '{}'", path.display());
        let path = sys::path::resolve(path).attempt(attempt).map_err(add_hint)?;
        let root = open_directory(&path)
            .map_err(std::io::Error::from)
            .attempt(attempt)
            .map_err(add_hint)?;
        let stat = nix::sys::stat::fstat(&root).map_err(std::io::Error::from).attempt(attempt)?;
        // The view is optional: isolation does not depend on it.
        let view =
            if features.view { sys::mount::clone_private_readonly(&root).ok() } else { None };
        let mark = mark::of_root(&root, stat.st_ino);
        let (has_stable_inodes, is_local) = (mark::has_stable_inodes(&root), mark::is_local(&root));
        Ok(Base {
            mark,
            has_stable_inodes,
            is_local,
            plain: Root::new(root),
            view: view.map(Root::new),
            resolver: Resolver::new(features.openat2),
            path: path.into_os_string().into_vec(),
            id: (stat.st_dev, stat.st_ino),
            hidden: RwLock::new(Arc::from([])),
        })
    }

    /// Hides the nodes at and below these paths, wherever a tree shows them. Replaces earlier
    /// paths.
    pub fn hide(&self, paths: Vec<TreePath>) {
        *self.hidden.write() = paths.into();
    }

    /// Whether any path is hidden.
    pub fn hides_any(&self) -> bool {
        !self.hidden.read().is_empty()
    }

    /// Whether a path is hidden.
    pub fn hides(&self, path: &TreePath) -> bool {
        self.hidden.read().iter().any(|hidden| path.starts_with(hidden))
    }

    /// The absolute path of the base on the host, without symlinks, from when it was opened.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// `st_dev` and `st_ino` of the base directory.
    pub fn root_id(&self) -> (u64, u64) {
        self.id
    }

    /// Identifies the directory at another path, or when its device has another number. `None`
    /// where inode numbers are not stable.
    pub fn mark(&self) -> Option<BaseMark> {
        self.mark
    }

    /// Whether inode numbers stay the same when the filesystem is mounted again.
    pub fn has_stable_inodes(&self) -> bool {
        self.has_stable_inodes
    }

    /// Whether reads go through a private read-only view, which updates no access times.
    pub fn has_private_view(&self) -> bool {
        self.view.is_some()
    }

    /// The metadata of the node at `path`, which may be a symlink.
    ///
    /// # Errors
    /// `NotFound`, also if a symlink, a mount point or a non-directory is on the way;
    /// `AccessDenied`.
    pub fn stat(&self, path: &TreePath) -> FsResult<BaseStat> {
        match self.find(path)? {
            Found::Here(object) => self.stat_of(&object),
            Found::Foreign => self.stat_foreign(path),
        }
    }

    /// The metadata of an object in the base, with a lasting device number.
    fn stat_of(&self, object: &OwnedFd) -> FsResult<BaseStat> {
        let mut stat = BaseStat::of(object)?;
        if stat.dev != self.id.0 {
            stat.dev = mark::other_device(object, stat.dev);
        }
        Ok(stat)
    }

    /// The entries of the directory `path`, in the order of the host; none for a foreign one. A
    /// name that is longer than [`crate::types::NAME_MAX`], which some filesystems allow, is left
    /// out with a warning.
    ///
    /// # Errors
    /// `NotADirectory`; `NotFound` and `AccessDenied` as in [`Base::stat`].
    pub fn list(&self, path: &TreePath) -> FsResult<Vec<BaseEntry>> {
        self.list_with_stat(path, &self.stat(path)?)
    }

    /// As [`Base::list`], for a caller that has the metadata already.
    ///
    /// # Errors
    /// As [`Base::list`].
    pub fn list_with_stat(&self, path: &TreePath, stat: &BaseStat) -> FsResult<Vec<BaseEntry>> {
        if stat.foreign {
            return Ok(Vec::new());
        }
        if stat.kind != FileKind::Dir {
            return Err(FsError::NotADirectory);
        }
        let directory = self.open_quietly(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        read_names(&directory, stat.dev, path)
    }

    /// Opens the regular file `path` for reading.
    ///
    /// # Errors
    /// `IsADirectory`; `Invalid` for a symlink, fifo, socket or device; `AccessDenied`, also for a
    /// mount point; `NotFound` as in [`Base::stat`].
    pub fn open_file(&self, path: &TreePath) -> FsResult<File> {
        self.open_file_with_stat(path, &self.stat(path)?)
    }

    /// As [`Base::open_file`], for a caller that has the metadata already.
    ///
    /// # Errors
    /// As [`Base::open_file`].
    pub fn open_file_with_stat(&self, path: &TreePath, stat: &BaseStat) -> FsResult<File> {
        if stat.foreign {
            return Err(FsError::AccessDenied);
        }
        require_file(stat.kind)?;
        // If a fifo has replaced the file meanwhile, O_NONBLOCK avoids waiting for its writer.
        let file =
            self.open_quietly(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)?;
        require_file(BaseStat::of(&file)?.kind)?;
        Ok(File::from(file))
    }

    /// The target of the symlink `path`.
    ///
    /// # Errors
    /// `Invalid` if it is not a symlink; `NotFound` and `AccessDenied` as in [`Base::stat`].
    pub fn readlink(&self, path: &TreePath) -> FsResult<Vec<u8>> {
        self.readlink_with_stat(path, &self.stat(path)?)
    }

    /// As [`Base::readlink`], for a caller that has the metadata already.
    ///
    /// # Errors
    /// As [`Base::readlink`].
    pub fn readlink_with_stat(&self, path: &TreePath, stat: &BaseStat) -> FsResult<Vec<u8>> {
        if stat.foreign || stat.kind != FileKind::Symlink {
            return Err(FsError::Invalid);
        }
        let link = self.open_in_view(path)?;
        failpoint::hit(Failpoint::BaseRead).map_err(read_error)?;
        // If another node has replaced the symlink, readlinkat(2) fails with ENOENT, which fits.
        Ok(readlinkat(&link, "").map_err(read_errno)?.into_vec())
    }

    /// The extended attributes of the node at `path`, which may be a symlink, sorted by name:
    /// `user.`, `security.`, `system.posix_acl_access` and `_default`, and `trusted.` if this
    /// process may read them. A foreign node has none.
    ///
    /// # Errors
    /// `NotFound` and `AccessDenied` as in [`Base::stat`].
    pub fn xattrs(&self, path: &TreePath) -> FsResult<Vec<(Vec<u8>, Vec<u8>)>> {
        self.xattrs_with_stat(path, &self.stat(path)?)
    }

    /// As [`Base::xattrs`], for a caller that has the metadata already.
    ///
    /// # Errors
    /// As [`Base::xattrs`].
    pub fn xattrs_with_stat(
        &self,
        path: &TreePath,
        stat: &BaseStat,
    ) -> FsResult<Vec<(Vec<u8>, Vec<u8>)>> {
        if stat.foreign {
            return Ok(Vec::new());
        }
        let object = self.open_in_view(path)?;
        failpoint::hit(Failpoint::BaseRead).map_err(read_error)?;
        attributes::read_xattrs(&object).map_err(read_error)
    }

    /// The present mount points inside the base, which are shown as foreign.
    ///
    /// # Errors
    /// As read(2) of `/proc/self/mountinfo`.
    pub fn mounts_inside(&self) -> std::io::Result<Vec<TreePath>> {
        let base = sys::file::mount_id(&self.plain.fd);
        let below = |point: &[u8]| {
            let rest = point.strip_prefix(&self.path[..])?;
            let rest = if self.path == b"/" { rest } else { rest.strip_prefix(b"/")? };
            TreePath::parse(rest).ok().filter(|path| !path.is_root())
        };
        let all = sys::mountinfo::read()?;
        // A mount upon another mount of the base is inside that one, so only direct children count.
        let upon = all.iter().filter(|mount| base.is_none_or(|base| mount.parent == base));
        let mut found: Vec<TreePath> = upon.filter_map(|mount| below(&mount.mount_point)).collect();
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Sizes and limits of the filesystem that holds the base.
    ///
    /// # Errors
    /// As statvfs(3).
    pub fn statvfs(&self) -> FsResult<Statvfs> {
        fstatvfs(&self.plain.fd).map_err(read_errno)
    }

    /// Opens directories for changes; only for `apply`.
    pub fn writer(&self) -> BaseWriter<'_> {
        BaseWriter::new(&self.plain, &self.resolver, self.is_local)
    }

    /// Opens `path` with `O_PATH` from the plain root, which sees mount points.
    fn find(&self, path: &TreePath) -> FsResult<Found> {
        match self.resolver.open(&self.plain, path.as_bytes(), O_PATH) {
            Ok(object) => Ok(Found::Here(object)),
            Err(Errno::EXDEV) if self.is_mount_point(path) => Ok(Found::Foreign),
            Err(errno) => Err(read_errno(errno)),
        }
    }

    /// Whether the last name of `path` is the mount point that could not be entered: if so, its
    /// parent can be opened.
    fn is_mount_point(&self, path: &TreePath) -> bool {
        path.split().is_some_and(|(parent, _)| {
            self.resolver.open(&self.plain, parent.as_bytes(), O_PATH).is_ok()
        })
    }

    fn open_in_view(&self, path: &TreePath) -> FsResult<OwnedFd> {
        let root = self.view.as_ref().unwrap_or(&self.plain);
        self.resolver.open(root, path.as_bytes(), O_PATH).map_err(read_errno)
    }

    /// Opens `path` in the view, without updating access times if this process may ask for that.
    fn open_quietly(&self, path: &TreePath, flags: OFlag) -> FsResult<OwnedFd> {
        let root = self.view.as_ref().unwrap_or(&self.plain);
        // O_NOATIME needs the owner or CAP_FOWNER; otherwise open(2) fails with EPERM.
        self.resolver
            .open(root, path.as_bytes(), flags | OFlag::O_NOATIME)
            .or_else(|errno| match errno {
                Errno::EPERM => self.resolver.open(root, path.as_bytes(), flags),
                other => Err(other),
            })
            .map_err(read_errno)
    }

    /// The metadata of the node under the mount at `path`, as far as it is available without asking
    /// the mounted filesystem.
    fn stat_foreign(&self, path: &TreePath) -> FsResult<BaseStat> {
        if let Some(view) = &self.view {
            // The view has no other mounts, so it shows the node under this one.
            let under = self.resolver.open(view, path.as_bytes(), O_PATH).map_err(read_errno)?;
            return Ok(BaseStat::of(&under)?.into_foreign());
        }
        // The directory entry has number and kind of the node under the mount. The rest is taken
        // from the parent.
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

/// The result of opening a path.
enum Found {
    Here(OwnedFd),
    /// A mount point.
    Foreign,
}

/// Refers to a node, also a symlink, without opening it.
const O_PATH: OFlag = OFlag::O_PATH;

/// The entries of an opened directory. An apply can remove it meanwhile; then getdents64(2) fails
/// with ENOENT.
fn read_names(directory: &OwnedFd, dev: u64, path: &TreePath) -> FsResult<Vec<BaseEntry>> {
    let mut entries = Vec::new();
    let take = |name: &[u8], ino, kind| match Name::new(name) {
        Ok(name) => entries.push(BaseEntry { name, ino, dev, kind }),
        Err(_) => log::warn!("base: left out a name of {} bytes in {path}", name.len()),
    };
    failpoint::hit(Failpoint::BaseRead)
        .and_then(|()| sys::dir::for_each(directory, take))
        .map_err(read_error)?;
    Ok(entries)
}

/// Opens the base with `O_PATH`, and checks that its names can be read, which `O_PATH` does not.
fn open_directory(path: &Path) -> std::result::Result<OwnedFd, Errno> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    open_failpoint()?;
    let directory = open(path, flags | OFlag::O_PATH, Mode::empty())?;
    nix::fcntl::openat(&directory, ".", flags, Mode::empty())?;
    Ok(directory)
}

fn add_hint(error: Error) -> Error {
    match error.errno.map(Errno::from_raw) {
        Some(Errno::ENOENT) => error.hint("name an existing directory"),
        Some(Errno::ENOTDIR) => {
            error.hint("the base must be a directory; name the one that holds the file")
        }
        Some(Errno::EACCES | Errno::EPERM) => {
            error.hint("run as a user that may read the directory")
        }
        _ => error,
    }
}

impl std::fmt::Debug for Base {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Base({})", Path::new(std::ffi::OsStr::from_bytes(&self.path)).display())
    }
}
