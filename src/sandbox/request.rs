//! The requests to a sandbox, as data.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::sandbox::transfer::Stream;
use crate::timeline::apply::protected::Consent;
use crate::types::{LayerId, TreePath, digits};

/// Names a state of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rev {
    /// `@`: the tree as it is now.
    Now,
    /// `@-N`: the N-th last checkpoint below the head, from 1. Automatic seals do not count.
    Back(u32),
    /// `base`: the base as it is now.
    Base,
    /// A checkpoint by its number.
    Id(LayerId),
    /// A checkpoint of this head by its name, or else the only one of the store.
    Name(String),
    /// `HEAD@NAME`: a checkpoint of a head by its name.
    Of {
        /// The name of the head.
        head: String,
        /// The name of the checkpoint.
        name: String,
    },
    /// `HEAD@` or `HEAD@-N`: the tree of a head as it is now, or its N-th last checkpoint.
    Head {
        /// The name of the head.
        head: String,
        /// The number of the checkpoint, from 1; 0 for the tree as it is now.
        back: u32,
    },
}

impl Rev {
    /// Parses a rev. Digits are a number; any other text that is not special is a name.
    ///
    /// ```
    /// use jailfs::sandbox::Rev;
    ///
    /// assert_eq!(Rev::parse("@"), Rev::Now);
    /// assert_eq!(Rev::parse("@-2"), Rev::Back(2));
    /// assert_eq!(Rev::parse("before-lunch"), Rev::Name("before-lunch".into()));
    /// assert_eq!(Rev::parse("try-2@-1"), Rev::Head { head: "try-2".into(), back: 1 });
    /// let of_head = Rev::Of { head: "try-2".into(), name: "green".into() };
    /// assert_eq!(Rev::parse("try-2@green"), of_head);
    /// assert_eq!(Rev::parse("./file@"), Rev::Name("./file@".into()));
    /// ```
    pub fn parse(text: &str) -> Rev {
        if let Some(back) = text.strip_prefix("@-").and_then(digits).filter(|n| *n > 0) {
            return Rev::Back(back);
        }
        if let Some((head, back)) = head_and_back(text) {
            return Rev::Head { head: head.to_owned(), back };
        }
        if let Some((head, name)) = head_and_name(text) {
            return Rev::Of { head: head.to_owned(), name: name.to_owned() };
        }
        match text {
            "@" => Rev::Now,
            "base" => Rev::Base,
            _ => digits(text).map_or_else(|| Rev::Name(text.to_owned()), |n| Rev::Id(LayerId(n))),
        }
    }
}

/// The parts of `HEAD@` and `HEAD@-N`. A text with a slash is a path.
fn head_and_back(text: &str) -> Option<(&str, u32)> {
    let (head, back) = text.rsplit_once('@')?;
    if head.is_empty() || head.contains('/') {
        return None;
    }
    match back {
        "" => Some((head, 0)),
        _ => Some((head, back.strip_prefix('-').and_then(digits).filter(|back| *back > 0)?)),
    }
}

/// The parts of `HEAD@NAME`. `PATH@2` is an edit of a file, and a text with a slash is a path.
fn head_and_name(text: &str) -> Option<(&str, &str)> {
    let (head, name) = text.split_once('@')?;
    let is_name = !name.is_empty() && digits(name).is_none() && !name.contains('@');
    (is_name && !head.is_empty() && !text.contains('/')).then_some((head, name))
}

impl fmt::Display for Rev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rev::Now => f.write_str("@"),
            Rev::Back(n) => write!(f, "@-{n}"),
            Rev::Base => f.write_str("base"),
            Rev::Id(id) => write!(f, "{id}"),
            Rev::Name(name) => f.write_str(name),
            Rev::Of { head, name } => write!(f, "{head}@{name}"),
            Rev::Head { head, back: 0 } => write!(f, "{head}@"),
            Rev::Head { head, back } => write!(f, "{head}@-{back}"),
        }
    }
}

/// Names a file as it is now, or as it was before an edit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRev {
    /// The path.
    pub path: TreePath,
    /// The number of the edit; `None` for the file as it is now.
    pub edit: Option<u32>,
}

impl fmt::Display for FileRev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.edit {
            Some(number) => write!(f, "'{}@{number}'", self.path),
            None => write!(f, "'{}'", self.path),
        }
    }
}

/// How much a diff says about each changed path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Detail {
    /// The path, and how it changed.
    NameStatus,
    /// Also the numbers of added and removed lines.
    Stat,
    /// Also a patch that `git apply` and `patch` accept.
    Patch,
}

/// The paths that a merge takes, and the head that wins at each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeTerms {
    /// The name of the other head.
    pub head: String,
    /// Merges only these paths and all below them; everything if empty.
    pub paths: Vec<TreePath>,
    /// Only lists what would change.
    pub dry_run: bool,
    /// Writes conflicts of text into the files.
    pub markers: bool,
    /// Decides conflicts at and below these paths for this head.
    pub ours: Vec<TreePath>,
    /// Decides conflicts at and below these paths for the other head.
    pub theirs: Vec<TreePath>,
    /// Patterns of paths that are taken from one head as a whole, besides `.git`.
    pub units: Vec<Vec<u8>>,
    /// As for [`Request::Restore`].
    pub detach_mounts: bool,
}

/// The terms of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportTerms {
    /// The state.
    pub state: Rev,
    /// Exports only the difference to this state.
    pub since: Option<Rev>,
    /// Whether the archive becomes a layer, in which the names of whiteouts have a meaning.
    pub is_layer: bool,
    /// The end of a pipe for the archive.
    #[serde(skip)]
    pub stream: Stream,
}

/// The terms of a description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescribeTerms {
    /// The state.
    pub state: Rev,
    /// Describes this many of the checkpoints that lead to it as well, before it.
    pub history: u64,
    /// Names files of the base by their digests instead of their content.
    pub is_thin: bool,
    /// Describes the edit history of the head as well, after the state.
    pub has_edits: bool,
    /// The end of a pipe for the chunks and the tree blob of each state, and those of the edits, as
    /// [`FrameReader`](super::transfer::FrameReader) reads them.
    #[serde(skip)]
    pub stream: Stream,
}

/// The terms of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportTerms {
    /// A name of the archives, for people.
    pub name: String,
    /// The head whose tree is replaced; a new one if there is none of this name. `None` for the
    /// head of the request.
    pub into: Option<String>,
    /// The state that the archives change. `None` if they are a whole tree.
    pub onto: Option<Rev>,
    /// Whether the archives are layers of an image.
    pub is_layers: bool,
    /// Whether described states with the bytes of their chunks come instead of archives.
    pub is_state: bool,
    /// The checkpoint that the first described state continues; `None` for the present tree.
    pub after: Option<LayerId>,
    /// As for [`Request::Restore`].
    pub detach_mounts: bool,
    /// The end of a pipe with the archives, as [`FrameWriter`](super::transfer::FrameWriter)
    /// writes them.
    #[serde(skip)]
    pub stream: Stream,
}

/// A request to a sandbox. [`Sandbox::handle`](crate::sandbox::Sandbox::handle) answers it with the
/// [`Reply`](crate::sandbox::Reply) variant that names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Describes the sandbox: paths, counts of changes, problems.
    Status,
    /// Lists the checkpoints, newest first.
    Log,
    /// Finds a checkpoint.
    Find {
        /// The state.
        rev: Rev,
    },
    /// Lists the operations, newest first.
    OpLog,
    /// Makes a checkpoint: seals the tree as it is now.
    Checkpoint {
        /// A name to find it by. No other checkpoint of this head has it; it is not a number and
        /// not `base`, and has no `@`.
        name: Option<String>,
        /// A message for people.
        message: String,
    },
    /// As `Checkpoint`, answered before the checkpoint is on the disk: it survives a kill, and a
    /// power cut can take it. The next request to any head of the store, except `Status`, waits
    /// until it is on the disk, and fails if that failed.
    CheckpointEarly {
        /// As in `Checkpoint`.
        name: Option<String>,
        /// As in `Checkpoint`.
        message: String,
    },
    /// Lists what differs between two states.
    Diff {
        /// The older state.
        from: Rev,
        /// The newer state.
        to: Rev,
        /// Lists only changes at and below these paths; all if empty.
        paths: Vec<TreePath>,
        /// How much to say about each path.
        detail: Detail,
    },
    /// Makes the tree equal to a checkpoint or the base.
    Restore {
        /// The state to restore.
        to: Rev,
        /// Restores only these paths and all below them; everything if empty.
        paths: Vec<TreePath>,
        /// Only lists what would change.
        dry_run: bool,
        /// Detaches mounts on directories that the restore removes, instead of refusing.
        detach_mounts: bool,
    },
    /// Reads one path of a state.
    Show {
        /// The state.
        rev: Rev,
        /// The path.
        path: TreePath,
        /// Where to start in a file, in bytes. A reply holds a part of it of limited size.
        offset: u64,
    },
    /// Makes the tree equal to the base as it is now: discards all that an apply would write.
    Discard {
        /// As for [`Request::Restore`].
        detach_mounts: bool,
    },
    /// Writes the tree into the base.
    Apply {
        /// Writes only these paths and all below them; everything if empty.
        paths: Vec<TreePath>,
        /// Only lists what would be written.
        dry_run: bool,
        /// Undoes the last apply in the base instead.
        undo: bool,
        /// Which dangerous changes the caller consents to.
        consent: Consent,
    },
    /// Makes the tree what it was right after an operation.
    OpRestore {
        /// The number of the operation.
        op: u64,
        /// As for [`Request::Restore`].
        detach_mounts: bool,
    },
    /// Lists the edits of a file, newest first.
    History {
        /// The path of the file. It may have been removed.
        path: TreePath,
    },
    /// Compares two files, each as it is now or as it was before an edit.
    FileDiff {
        /// The older one.
        from: FileRev,
        /// The newer one.
        to: FileRev,
        /// How much to say.
        detail: Detail,
    },
    /// Undoes the last edits of a file.
    Undo {
        /// The path of the file. It may have been removed.
        path: TreePath,
        /// The number of edits.
        steps: u32,
    },
    /// Reverts the last undos of a file.
    Redo {
        /// The path of the file.
        path: TreePath,
        /// The number of edits.
        steps: u32,
    },
    /// Drops a checkpoint. [`Request::Gc`] frees its space.
    Drop {
        /// The checkpoint.
        rev: Rev,
    },
    /// Sets or removes a hold on a checkpoint. A held checkpoint cannot be dropped, also not by
    /// [`Request::Gc`].
    Hold {
        /// The checkpoint.
        rev: Rev,
        /// Whether it is to be held.
        held: bool,
    },
    /// Collects garbage: frees the space of states that nothing needs.
    Gc {
        /// Keeps the states that this many of the last operations can go back to.
        operations: u64,
        /// Drops all but this many of the newest checkpoints, and the held ones.
        keep: Option<u64>,
        /// Drops the oldest checkpoints until the store takes at most this many bytes.
        max_store: Option<u64>,
        /// Only lists what would be freed.
        dry_run: bool,
    },
    /// Checks the consistency of the store.
    Check {
        /// Also reads all content and verifies its checksums.
        read_data: bool,
    },
    /// Unmounts and ends the daemon.
    Unmount,
    /// Lists the disk space of each layer.
    Info,
    /// Makes heads that begin with the tree as it is now, or with a sealed state.
    Fork {
        /// Their names. None of them is in use.
        names: Vec<String>,
        /// The state; `None` for the tree as it is now.
        from: Option<Rev>,
    },
    /// Lists the heads.
    Forks,
    /// Merges another head into this one.
    Merge(MergeTerms),
    /// Writes a state as a tar archive to a pipe.
    Export(ExportTerms),
    /// Describes a state as a tree blob, and writes it with its chunks to a pipe.
    Describe(DescribeTerms),
    /// Replaces the tree by that of archives from a pipe.
    Import(ImportTerms),
    /// Removes a head that is not mounted. [`Request::Gc`] frees what only it needed.
    DropFork {
        /// The name of the head.
        name: String,
    },
}

impl Request {
    /// The pipe that travels beside the request.
    pub(crate) fn stream(&self) -> Option<&Stream> {
        match self {
            Request::Export(terms) => Some(&terms.stream),
            Request::Describe(terms) => Some(&terms.stream),
            Request::Import(terms) => Some(&terms.stream),
            _ => None,
        }
    }

    /// Whether the reply has a list of changes.
    pub(crate) fn is_listed(&self) -> bool {
        match self {
            Request::Diff { .. }
            | Request::FileDiff { .. }
            | Request::Restore { .. }
            | Request::Discard { .. }
            | Request::OpRestore { .. }
            | Request::Merge(_)
            | Request::Import(_)
            | Request::Apply { .. } => true,
            Request::Status
            | Request::Log
            | Request::Find { .. }
            | Request::OpLog
            | Request::Checkpoint { .. }
            | Request::CheckpointEarly { .. }
            | Request::Show { .. }
            | Request::History { .. }
            | Request::Undo { .. }
            | Request::Redo { .. }
            | Request::Drop { .. }
            | Request::Hold { .. }
            | Request::Gc { .. }
            | Request::Check { .. }
            | Request::Unmount
            | Request::Info
            | Request::Fork { .. }
            | Request::Forks
            | Request::Export(_)
            | Request::Describe(_)
            | Request::DropFork { .. } => false,
        }
    }
}
