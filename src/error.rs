//! The two error types of the library.
//!
//! * [`Error`] is for people. It says what was attempted, on which object, and why it failed, and
//!   it may have a hint. Its [`Kind`] is for programs, and decides the exit code of the command.
//!   All methods of [`Sandbox`](crate::sandbox::Sandbox) return it.
//! * [`FsError`] is for programs in the mount. It has one variant per reason to refuse a file
//!   operation, and `fuse` maps it to an errno in one exhaustive match. All file operations of
//!   [`Fs`](crate::sandbox::Fs) return it.
//!
//! # Example
//!
//! ```
//! use jailfs::error::{Attempt, Error, FsError, Kind};
//! use jailfs::sandbox::{Sandbox, StoreOptions};
//! use jailfs::types::{Name, NodeId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let (base, store) = (dir.path().join("base"), dir.path().join("store"));
//! # std::fs::create_dir(&base)?;
//! // Programs look at the kind; people read the text.
//! let error = Sandbox::open(&store).err().ok_or("there is no store yet")?;
//! assert_eq!((error.kind, error.kind.exit_code()), (Kind::NoStore, 10));
//!
//! // A file operation fails like the system call.
//! let sandbox = Sandbox::create_or_open(&base, &store, &StoreOptions::default())?;
//! let name = Name::new(b"missing").map_err(FsError::from)?;
//! let looked_up = sandbox.fs().lookup(NodeId::ROOT, &name);
//! assert_eq!(looked_up.as_ref().err(), Some(&FsError::NotFound));
//!
//! // `attempt` makes it an error for people.
//! let error: Error = looked_up.attempt(|| "look up 'missing'").err().ok_or("it is missing")?;
//! assert_eq!(error.to_string(), "look up 'missing': no such file or directory");
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

use crate::types::{BadName, TreePath};

/// A result of the library.
pub type Result<T> = std::result::Result<T, Error>;
/// A result of a file operation.
pub type FsResult<T> = std::result::Result<T, FsError>;

/// Classifies an [`Error`]. The exit codes are a stable interface (docs/CLI.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// It failed: exit code 1.
    Failed,
    /// The command line is invalid: 2.
    Usage,
    /// The base changed behind the sandbox, or only a part succeeded: 3.
    Conflict,
    /// The store is damaged: 4.
    Damage,
    /// No store, head or checkpoint has this name: 10.
    NoStore,
    /// Another process uses the store or the mount point: 11.
    InUse,
    /// The mount cannot be made: 12.
    CannotMount,
    /// The path leads out of the jail: 13.
    LeavesJail,
}

impl Kind {
    /// The exit code of a command that ends with this error.
    pub fn exit_code(self) -> u8 {
        match self {
            Kind::Failed => 1,
            Kind::Usage => 2,
            Kind::Conflict => 3,
            Kind::Damage => 4,
            Kind::NoStore => 10,
            Kind::InUse => 11,
            Kind::CannotMount => 12,
            Kind::LeavesJail => 13,
        }
    }
}

/// An error for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// Decides the exit code.
    pub kind: Kind,
    /// The attempted action and its object: `seal checkpoint 7: write layers/00000007/journal`.
    pub attempt: String,
    /// Why it failed: `No space left on device`.
    pub reason: String,
    /// A hint for the user.
    pub hint: Option<String>,
    /// The errno of the host, if one was the reason.
    pub errno: Option<i32>,
    /// Whether the main work succeeded and only its completion failed. Do not attempt it again.
    pub is_done: bool,
}

impl Error {
    /// An error of `kind`.
    pub fn new(kind: Kind, attempt: impl Into<String>, reason: impl Into<String>) -> Error {
        Error {
            kind,
            attempt: attempt.into(),
            reason: reason.into(),
            hint: None,
            errno: None,
            is_done: false,
        }
    }

    /// A system call failed during `attempt`.
    pub fn io(attempt: impl Into<String>, error: &io::Error) -> Error {
        let mut reason = error.to_string();
        if let Some(at) = reason.find(" (os error") {
            reason.truncate(at);
        }
        Error { errno: error.raw_os_error(), ..Error::new(Kind::Failed, attempt, reason) }
    }

    /// A file of the store is damaged.
    pub fn damage(attempt: impl Into<String>, reason: impl Into<String>) -> Error {
        Error::new(Kind::Damage, attempt, reason)
    }

    /// Whether a disk or a quota is full.
    pub fn is_full(&self) -> bool {
        self.errno == Some(libc::ENOSPC) || self.errno == Some(libc::EDQUOT)
    }

    /// The same error with a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// The same error as another kind.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Error {
        self.kind = kind;
        self
    }

    /// The same error after `what` has succeeded, which is not undone.
    #[must_use]
    pub fn after(self, what: impl fmt::Display) -> Error {
        if self.is_done {
            return self;
        }
        Error { attempt: format!("{what}, but then: {}", self.attempt), is_done: true, ..self }
    }

    /// The same error as a part of a larger attempt.
    #[must_use]
    pub fn during(mut self, attempt: impl fmt::Display) -> Error {
        self.attempt = format!("{attempt}: {}", self.attempt);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.attempt, self.reason)
    }
}

impl std::error::Error for Error {}

/// Adds the attempted action to a failed system call.
pub trait Attempt<T> {
    /// Converts the error to an [`Error`] for `attempt`.
    ///
    /// # Errors
    /// The error of `self`, converted.
    fn attempt<S: Into<String>>(self, attempt: impl FnOnce() -> S) -> Result<T>;
}

impl<T> Attempt<T> for io::Result<T> {
    fn attempt<S: Into<String>>(self, attempt: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| Error::io(attempt(), &error))
    }
}

/// Why a file operation is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FsError {
    /// The name does not exist, or the node was removed: ENOENT.
    NotFound,
    /// The name exists: EEXIST.
    Exists,
    /// The node must be a directory: ENOTDIR.
    NotADirectory,
    /// The node must not be a directory: EISDIR.
    IsADirectory,
    /// The directory is not empty: ENOTEMPTY.
    NotEmpty,
    /// Refused to every caller, or to this one: EPERM.
    NotPermitted,
    /// The daemon has no permission to read this node of the base: EACCES.
    AccessDenied,
    /// An argument is invalid: EINVAL.
    Invalid,
    /// The name is longer than 255 bytes: ENAMETOOLONG.
    NameTooLong,
    /// The file would exceed the largest file size: EFBIG.
    FileTooBig,
    /// There is no data or hole at or after this offset: ENXIO.
    NoSuchOffset,
    /// The extended attribute does not exist: ENODATA.
    NoAttribute,
    /// The value does not fit into the caller's buffer: ERANGE.
    Range,
    /// The value of an extended attribute is too large: E2BIG.
    TooLarge,
    /// The disk or the quota is full: ENOSPC.
    NoSpace,
    /// The attributes of the file are too large together, or the sandbox has its largest number of
    /// files: ENOSPC. Freeing space does not help.
    LimitReached,
    /// The file has the largest possible number of links: EMLINK.
    TooManyLinks,
    /// The operation is not supported for this node or in this mode: EOPNOTSUPP.
    Unsupported,
    /// A link or a rename would lead out of the mount: EXDEV.
    LeavesJail,
    /// The kernel uses a name that the node no longer has, and must look it up again: ESTALE.
    Stale,
    /// The mount is read-only: EROFS.
    ReadOnly,
    /// The base changed behind the sandbox at this path: EIO.
    Drift(TreePath),
    /// An operation under the lock of its head needs an answer of the base, a write to a pool, or
    /// the end of a change. It runs again after that, so no caller sees this: EIO.
    MustWait,
    /// The state in memory or on disk contradicts itself: EIO.
    Damage(&'static str),
    /// A system call failed with this errno.
    Host(i32),
    /// The store failed.
    Store(Box<Error>),
}

impl fmt::Display for FsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FsError::NotFound => f.write_str("no such file or directory"),
            FsError::Exists => f.write_str("file exists"),
            FsError::NotADirectory => f.write_str("not a directory"),
            FsError::IsADirectory => f.write_str("is a directory"),
            FsError::NotEmpty => f.write_str("directory not empty"),
            FsError::NotPermitted => f.write_str("operation not permitted"),
            FsError::AccessDenied => f.write_str("permission denied"),
            FsError::Invalid => f.write_str("invalid argument"),
            FsError::NameTooLong => f.write_str("file name too long"),
            FsError::FileTooBig => f.write_str("file too large"),
            FsError::NoSuchOffset => f.write_str("no data or hole at this offset"),
            FsError::NoAttribute => f.write_str("no such attribute"),
            FsError::Range => f.write_str("value does not fit"),
            FsError::TooLarge => f.write_str("value too large"),
            FsError::NoSpace => f.write_str("no space left"),
            FsError::LimitReached => f.write_str("a limit is reached"),
            FsError::TooManyLinks => f.write_str("too many links"),
            FsError::Unsupported => f.write_str("operation not supported"),
            FsError::LeavesJail => f.write_str("would leave the mount"),
            FsError::Stale => f.write_str("stale name"),
            FsError::ReadOnly => f.write_str("read-only mount"),
            FsError::Drift(path) => write!(f, "the base changed behind the sandbox: {path}"),
            FsError::MustWait => f.write_str("the operation must wait before it can go on"),
            FsError::Damage(what) => write!(f, "inconsistent state: {what}"),
            FsError::Host(errno) => write!(f, "{}", io::Error::from_raw_os_error(*errno)),
            FsError::Store(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for FsError {}

impl From<io::Error> for FsError {
    fn from(error: io::Error) -> FsError {
        FsError::Host(error.raw_os_error().unwrap_or(5))
    }
}

impl From<Error> for FsError {
    fn from(error: Error) -> FsError {
        FsError::Store(Box::new(error))
    }
}

impl From<BadName> for FsError {
    fn from(bad: BadName) -> FsError {
        match bad {
            BadName::TooLong => FsError::NameTooLong,
            BadName::Invalid => FsError::Invalid,
        }
    }
}

impl From<FsError> for Error {
    fn from(error: FsError) -> Error {
        match error {
            FsError::Store(error) => *error,
            FsError::Host(errno) => {
                Error::io("file operation", &io::Error::from_raw_os_error(errno))
            }
            FsError::Drift(_) => Error::new(Kind::Conflict, "read the base", error.to_string()),
            FsError::Damage(_) => Error::damage("file operation", error.to_string()),
            FsError::LeavesJail => {
                Error::new(Kind::LeavesJail, "file operation", error.to_string())
            }
            other => Error::new(Kind::Failed, "file operation", other.to_string()),
        }
    }
}

/// Turns the error of a path that does not exist into none.
///
/// # Errors
/// All other errors.
pub fn if_exists<T>(result: FsResult<T>) -> FsResult<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(FsError::NotFound | FsError::NotADirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Adds the attempted action to a failed file operation.
impl<T> Attempt<T> for FsResult<T> {
    fn attempt<S: Into<String>>(self, attempt: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| match error {
            FsError::Store(error) => error.during(attempt().into()),
            other => {
                let mut error = Error::from(other);
                error.attempt = attempt().into();
                error
            }
        })
    }
}
