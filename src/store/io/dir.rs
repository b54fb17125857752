//! A directory of a store.
//!
//! Every file is opened relative to the descriptor of its directory. So a store that is moved while
//! it is open stays whole.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

use crate::error::{Attempt, Result};
use crate::store::io::disk;
use crate::sys::lock::{Rank, check_not_held};

/// An open directory: the root of a store, or one below it.
pub struct StoreDir {
    fd: OwnedFd,
    path: PathBuf,
}

impl StoreDir {
    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// As open(2).
    pub fn open(path: &Path) -> Result<StoreDir> {
        let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
        let fd = disk::look()
            .and_then(|()| openat(AT_FDCWD, path, flags, Mode::empty()))
            .map_err(std::io::Error::from)
            .attempt(|| format!("open store '{}'", path.display()))?;
        Ok(StoreDir { fd, path: path.to_owned() })
    }

    /// Opens a directory in this one.
    ///
    /// # Errors
    /// As open(2).
    pub fn dir(&self, name: &str) -> Result<StoreDir> {
        let fd = disk::open_to_read(&self.fd, name, OFlag::O_DIRECTORY)
            .map_err(std::io::Error::from)
            .attempt(|| format!("open {}", self.show(name)))?;
        Ok(StoreDir { fd, path: self.path.join(name) })
    }

    /// Creates a directory in this one, if it does not exist, and opens it.
    ///
    /// # Errors
    /// As mkdir(2) and open(2).
    pub fn make_dir(&self, name: &str) -> Result<StoreDir> {
        disk::mkdir(self, name).attempt(|| format!("create {}", self.show(name)))?;
        self.dir(name)
    }

    /// Opens a file for reading and writing; creates it if `create`.
    ///
    /// # Errors
    /// As open(2).
    pub fn file(&self, name: &str, create: bool) -> Result<File> {
        let mut flags = OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        if create {
            flags |= OFlag::O_CREAT;
        }
        disk::open(self, name, flags).attempt(|| format!("open {}", self.show(name)))
    }

    /// Bytes of a file; `None` if there is no such file.
    ///
    /// # Errors
    /// As fstatat(2).
    pub fn size(&self, name: &str) -> Result<Option<u64>> {
        let flags = nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW;
        match disk::look().and_then(|()| nix::sys::stat::fstatat(&self.fd, name, flags)) {
            Ok(stat) => Ok(Some(u64::try_from(stat.st_size).unwrap_or(0))),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => {
                Err(std::io::Error::from(errno)).attempt(|| format!("stat {}", self.show(name)))
            }
        }
    }

    /// Opens a file for reading; `None` if there is no such file.
    ///
    /// # Errors
    /// As open(2).
    pub fn open_file(&self, name: &str) -> Result<Option<File>> {
        match disk::open_to_read(&self.fd, name, OFlag::empty()) {
            Ok(fd) => Ok(Some(File::from(fd))),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => {
                Err(std::io::Error::from(errno)).attempt(|| format!("open {}", self.show(name)))
            }
        }
    }

    /// Reads a whole file; `None` if there is no such file.
    ///
    /// # Errors
    /// As open(2) and read(2).
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(mut file) = self.open_file(name)? else { return Ok(None) };
        let mut bytes = Vec::new();
        disk::look()
            .map_err(std::io::Error::from)
            .and_then(|()| file.read_to_end(&mut bytes))
            .attempt(|| format!("read {}", self.show(name)))?;
        Ok(Some(bytes))
    }

    /// Publishes `bytes` as a file. After a crash the file has its old content or the new one,
    /// never a mix.
    ///
    /// # Errors
    /// As open(2), pwrite(2), fdatasync(2), rename(2) and fsync(2). The old content then stays,
    /// except after a failed fsync(2) of the directory.
    pub fn publish(&self, name: &str, bytes: &[u8], durable: bool) -> Result<()> {
        self.replace(name, bytes, durable)?;
        if durable { self.sync() } else { Ok(()) }
    }

    /// As [`StoreDir::publish`], without the sync of the directory: a power cut may bring the old
    /// content back.
    ///
    /// # Errors
    /// As open(2), pwrite(2), fdatasync(2) and rename(2). The old content then stays.
    pub fn replace(&self, name: &str, bytes: &[u8], durable: bool) -> Result<()> {
        let temp = format!("{name}.new");
        let what = || format!("publish {}", self.show(name));
        let flags = OFlag::O_WRONLY
            | OFlag::O_CREAT
            | OFlag::O_TRUNC
            | OFlag::O_CLOEXEC
            | OFlag::O_NOFOLLOW;
        let file = disk::open(self, &temp, flags).attempt(what)?;
        disk::write_at(&file, bytes, 0).attempt(what)?;
        if durable {
            disk::sync(&file).attempt(what)?;
        }
        disk::rename(self, &temp, name).attempt(what)
    }

    /// Publishes several files, as [`StoreDir::publish`] each, with one sync of the directory.
    ///
    /// # Errors
    /// As [`StoreDir::publish`]. Any of the files may then be published.
    pub fn publish_all(&self, files: &[(&str, Vec<u8>)], durable: bool) -> Result<()> {
        let temp = |name: &str| format!("{name}.new");
        let flags = OFlag::O_WRONLY
            | OFlag::O_CREAT
            | OFlag::O_TRUNC
            | OFlag::O_CLOEXEC
            | OFlag::O_NOFOLLOW;
        let mut written = Vec::new();
        for (name, bytes) in files {
            let what = || format!("publish {}", self.show(name));
            let file = disk::open(self, &temp(name), flags).attempt(what)?;
            disk::write_at(&file, bytes, 0).attempt(what)?;
            written.push((name, file));
        }
        for (name, file) in written.iter().filter(|_| durable) {
            disk::sync(file).attempt(|| format!("publish {}", self.show(name)))?;
        }
        for (name, _) in files {
            let what = || format!("publish {}", self.show(name));
            disk::rename(self, &temp(name), name).attempt(what)?;
        }
        if durable { self.sync() } else { Ok(()) }
    }

    /// Creates an unlinked file in this directory.
    ///
    /// # Errors
    /// As open(2).
    pub fn scratch(&self) -> Result<File> {
        check_not_held(Rank::Core);
        // Through the descriptor, because the store may have been moved.
        disk::look()
            .map_err(std::io::Error::from)
            .and_then(|()| tempfile::tempfile_in(format!("/proc/self/fd/{}", self.fd.as_raw_fd())))
            .attempt(|| format!("create a scratch file in {}", self.path.display()))
    }

    /// Lists the names in this directory for which `select` returns a value.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn list<T>(&self, select: impl Fn(&str) -> Option<T>) -> Result<Vec<T>> {
        let what = || format!("list {}", self.path.display());
        disk::look().map_err(std::io::Error::from).attempt(what)?;
        let fd = self.fd.as_fd().try_clone_to_owned().attempt(what)?;
        let mut dir = nix::dir::Dir::from_fd(fd).map_err(std::io::Error::from).attempt(what)?;
        let mut found = Vec::new();
        for entry in dir.iter() {
            let entry = entry.map_err(std::io::Error::from).attempt(what)?;
            found.extend(entry.file_name().to_str().ok().and_then(&select));
        }
        Ok(found)
    }

    /// Removes a file. A missing file is no error.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn remove(&self, name: &str) -> Result<()> {
        disk::remove(self, name).attempt(|| format!("remove {}", self.show(name)))
    }

    /// Syncs the names in this directory.
    ///
    /// # Errors
    /// As fsync(2).
    pub fn sync(&self) -> Result<()> {
        disk::sync_dir(self).attempt(|| format!("sync {}", self.path.display()))
    }

    /// The path of the directory when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a name in this directory, for messages.
    pub fn show(&self, name: &str) -> String {
        self.path.join(name).display().to_string()
    }
}

impl AsFd for StoreDir {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
