//! What can be asked of a sandbox, as data.
//!
//! The command line, the control socket and embedding programs all say the same [`Request`] and get the same
//! [`Reply`]: with a daemon they travel over the socket, without one the command holds the store itself.

use serde::{Deserialize, Serialize};

use crate::timeline::apply::protected::Consent;
use crate::types::{LayerId, TreePath, digits};

/// Names a state of the tree: `@`, `@-N`, `base`, a checkpoint's number or its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rev {
    /// `@`: the tree as it is now.
    Now,
    /// `@-N`, N from 1: the N-th last checkpoint below the head.
    Back(u32),
    /// `base`: the base as it is now.
    Base,
    /// A checkpoint's number.
    Id(LayerId),
    /// A checkpoint's name.
    Name(String),
}

impl Rev {
    /// Reads what a person typed. Digits are a number; all else that is not special is a name.
    pub fn parse(text: &str) -> Rev {
        if let Some(back) = text.strip_prefix("@-").and_then(digits).filter(|n| *n > 0) {
            return Rev::Back(back);
        }
        match text {
            "@" => Rev::Now,
            "base" => Rev::Base,
            _ => digits(text).map_or_else(|| Rev::Name(text.to_owned()), |n| Rev::Id(LayerId(n))),
        }
    }
}

impl std::fmt::Display for Rev {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rev::Now => f.write_str("@"),
            Rev::Back(n) => write!(f, "@-{n}"),
            Rev::Base => f.write_str("base"),
            Rev::Id(id) => write!(f, "{id}"),
            Rev::Name(name) => f.write_str(name),
        }
    }
}

/// How much a diff tells of each changed path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Detail {
    /// Which paths changed, and how.
    NameStatus,
    /// With the number of lines added and removed.
    Stat,
    /// With a patch that `git apply` and `patch` accept.
    Patch,
}

/// Something asked of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// How the sandbox stands.
    Status,
    /// The checkpoints, newest first.
    Log,
    /// The operations, newest first.
    OpLog,
    /// Seals the tree as it is now.
    Checkpoint {
        /// A name to find it by; must be new, and neither a number nor special (`@...`, `base`).
        name: Option<String>,
        /// A message for people.
        message: String,
    },
    /// What differs between two states.
    Diff {
        /// The older state.
        from: Rev,
        /// The newer state.
        to: Rev,
        /// Only at or below these paths; all if empty.
        paths: Vec<TreePath>,
        /// How much to tell.
        detail: Detail,
    },
    /// Makes the tree what it was at a checkpoint.
    Restore {
        /// Which.
        to: Rev,
        /// Only at and below these paths, and the rest stays; all if empty.
        paths: Vec<TreePath>,
        /// Only say what would change.
        dry_run: bool,
        /// Detach what is mounted inside on directories that do not stay, instead of refusing.
        detach_mounts: bool,
    },
    /// What stands at a path in a state.
    Show {
        /// Which state.
        rev: Rev,
        /// The path.
        path: TreePath,
        /// Of a file, the content from this byte on, as much as an answer takes.
        offset: u64,
    },
    /// Makes the tree what the base is now: throws away everything that an apply would write.
    Discard {
        /// As for [`Request::Restore`].
        detach_mounts: bool,
    },
    /// Writes the tree into the base.
    Apply {
        /// Only at or below these paths; all if empty.
        paths: Vec<TreePath>,
        /// Only say what would be written.
        dry_run: bool,
        /// Instead, take the last apply back out of the base.
        undo: bool,
        /// Which dangers the caller takes.
        consent: Consent,
    },
    /// Makes the tree what it was right after an operation of the log.
    OpRestore {
        /// Its number.
        op: u64,
        /// As for [`Request::Restore`].
        detach_mounts: bool,
    },
    /// The versions of a file: what edits replaced.
    History {
        /// Its path; it need not be there any more.
        path: TreePath,
    },
    /// What differs between two versions of files.
    FileDiff {
        /// The older one.
        from: FileRev,
        /// The newer one.
        to: FileRev,
        /// How much to tell.
        detail: Detail,
    },
    /// Makes a file what it was before its last edits.
    Undo {
        /// Its path; it need not be there any more.
        path: TreePath,
        /// How many edits.
        steps: u32,
    },
    /// Takes undos of a file back.
    Redo {
        /// Its path.
        path: TreePath,
        /// How many.
        steps: u32,
    },
    /// Gives a checkpoint up; [`Request::Gc`] gives its space back.
    Drop {
        /// Which.
        rev: Rev,
    },
    /// Keeps a checkpoint from being dropped, by a person or by [`Request::Gc`].
    Hold {
        /// Which.
        rev: Rev,
        /// Or not any more.
        held: bool,
    },
    /// Gives back the space of what nothing needs.
    Gc {
        /// What so many of the last operations can go back to stays.
        operations: u64,
        /// Give up all but the newest checkpoints, so many, and those that are held.
        keep: Option<u64>,
        /// Give up the oldest checkpoints until the store takes no more than this many bytes.
        max_store: Option<u64>,
        /// Only say what would be given back.
        dry_run: bool,
    },
    /// Holds the store against everything that must be true of it.
    Check {
        /// Read every byte of content, too.
        read_data: bool,
    },
    /// Unmounts and ends the daemon.
    Unmount,
    /// What the store takes, layer by layer.
    Info,
}

impl Request {
    /// Whether the reply has a list of changes.
    pub(crate) fn is_listed(&self) -> bool {
        match self {
            Request::Diff { .. }
            | Request::FileDiff { .. }
            | Request::Restore { .. }
            | Request::Discard { .. }
            | Request::OpRestore { .. }
            | Request::Apply { .. } => true,
            Request::Status
            | Request::Log
            | Request::OpLog
            | Request::Checkpoint { .. }
            | Request::Show { .. }
            | Request::History { .. }
            | Request::Undo { .. }
            | Request::Redo { .. }
            | Request::Drop { .. }
            | Request::Hold { .. }
            | Request::Gc { .. }
            | Request::Check { .. }
            | Request::Unmount
            | Request::Info => false,
        }
    }
}

/// A file as it is, or a version of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRev {
    /// The path.
    pub path: TreePath,
    /// The number of the version; none is the file as it is.
    pub version: Option<u32>,
}

impl std::fmt::Display for FileRev {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.version {
            Some(number) => write!(f, "'{}@{number}'", self.path),
            None => write!(f, "'{}'", self.path),
        }
    }
}
