//! What a sandbox answers, as data.

use serde::{Deserialize, Serialize};

use super::changes::Changes;
use super::request::Rev;
use crate::fs::Refusal;
use crate::types::{Epoch, FileKind, Ino, LayerId, Timestamp, TreePath};

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Show`].
    Shown(Shown),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Log`].
    Log(Vec<Checkpoint>),
    /// To [`Request::OpLog`].
    OpLog(Vec<Operation>),
    /// To [`Request::Checkpoint`], [`Request::Drop`] and [`Request::Hold`].
    Checkpoint(Checkpoint),
    /// To [`Request::Diff`], sorted by path, and [`Request::FileDiff`].
    Diff(Changes),
    /// To [`Request::Restore`], [`Request::Discard`] and [`Request::OpRestore`].
    Restored(Restored),
    /// To [`Request::Apply`].
    Applied(Applied),
    /// To [`Request::History`], newest first.
    History(Vec<FileVersion>),
    /// To [`Request::Undo`] and [`Request::Redo`].
    Stepped(Stepped),
    /// To [`Request::Gc`].
    Collected(Collected),
    /// To [`Request::Check`].
    Checked(Checked),
    /// To [`Request::Unmount`].
    Done,
    /// To [`Request::Info`].
    Info(Info),
}

impl Reply {
    /// The list of changes in it.
    pub(crate) fn changes(&mut self) -> Option<&mut Changes> {
        match self {
            Reply::Diff(changes) => Some(changes),
            Reply::Restored(restored) => Some(&mut restored.changes),
            Reply::Applied(applied) => Some(&mut applied.changes),
            Reply::Shown(_)
            | Reply::Status(_)
            | Reply::Log(_)
            | Reply::OpLog(_)
            | Reply::Checkpoint(_)
            | Reply::History(_)
            | Reply::Stepped(_)
            | Reply::Collected(_)
            | Reply::Checked(_)
            | Reply::Done
            | Reply::Info(_) => None,
        }
    }
}

/// What a store takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Its layers, oldest first.
    pub layers: Vec<LayerSpace>,
    /// Bytes on disk, of everything.
    pub store_bytes: u64,
    /// Sealed layers in which equal content is still to be looked for.
    pub to_do: u64,
}

/// What a layer takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpace {
    /// Its number; of a sealed one, that of the checkpoint.
    pub layer: LayerId,
    /// The name of the checkpoint.
    pub name: Option<String>,
    /// Whether it is the one that is written to, or was to be.
    pub open: bool,
    /// Bytes of content that were written to it and are still there, wherever.
    pub logical: u64,
    /// Bytes that it takes on disk, records and all.
    pub stored: u64,
    /// Bytes of its content that are stored with an equal one.
    pub shared: u64,
}

/// How an edit began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EditKind {
    /// The file was written.
    Write,
    /// It was truncated.
    Truncate,
    /// Another one was renamed over it.
    Replace,
    /// It was removed.
    Remove,
    /// It was renamed.
    Move,
    /// A restore, a discard or an op restore changed it.
    Restore,
    /// An undo or a redo changed it.
    Undo,
}

/// What a file was before an edit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileVersion {
    /// Its number: the versions of a path count from 1.
    pub number: u32,
    /// When the edit began that replaced it.
    pub time: Timestamp,
    /// How that edit began.
    pub edit: EditKind,
    /// Bytes; none if there was no file.
    pub size: Option<u64>,
    /// Mode.
    pub mode: Option<u32>,
    /// When it was last changed.
    pub mtime: Option<Timestamp>,
    /// Whether an undo or a redo put it there, and nothing was edited since.
    pub shown: bool,
}

/// What an undo or a redo of a file did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stepped {
    /// The path.
    pub path: TreePath,
    /// The version that stands there now; none if it is what was before the first undo.
    pub number: Option<u32>,
    /// Bytes before; none if there was no file.
    pub old_size: Option<u64>,
    /// Bytes now; none if there is no file.
    pub new_size: Option<u64>,
}

/// What stands at a path in a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The state that it is in: to ask for more of the same whatever is done meanwhile. A checkpoint is one by its number; '@' and 'base'
    /// are what they are at the time.
    pub rev: Rev,
    /// The node.
    pub node: Node,
    /// Of a file, its bytes from the offset on that was asked for: none at its end. Of a link, its text.
    pub bytes: Vec<u8>,
    /// Of a directory, what is in it, sorted by name.
    pub entries: Vec<Node>,
}

/// A node of a state, as `stat` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its path.
    pub path: TreePath,
    /// What kind of node it is.
    pub file: FileKind,
    /// Its inode number.
    pub ino: Ino,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Timestamp,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// What is not as it must be, one line each.
    pub problems: Vec<String>,
    /// What was mended, one line each.
    pub repaired: Vec<String>,
    /// Layers that were read.
    pub layers: u64,
    /// Records of journals that were read.
    pub records: u64,
    /// Extents that were followed.
    pub extents: u64,
    /// Bytes of content that were read and held against their checksums.
    pub bytes_read: u64,
    /// Bytes of content that have no checksums yet: those of the upper layer.
    pub bytes_without_sum: u64,
    /// What is wrong with the history of single files, one line each. The store is sound all the same.
    pub warnings: Vec<String>,
    /// Versions of single files that were followed.
    pub versions: u64,
}

/// What a gc gave back, or would.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// The checkpoints that were given up for it, oldest first.
    pub dropped: Vec<Checkpoint>,
    /// The sealed layers whose records nothing needs.
    pub layers: Vec<LayerId>,
    /// Bytes on disk.
    pub bytes: u64,
    /// Bytes that the store takes on disk now.
    pub store_bytes: u64,
}

/// How a sandbox stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The base, as bytes of its path on the host.
    pub base: Vec<u8>,
    /// The store, as bytes of its path on the host.
    pub store: Vec<u8>,
    /// The mount point, as bytes of its path, if it is mounted.
    pub mount: Option<Vec<u8>>,
    /// The process that serves it, if it is mounted.
    pub pid: Option<u32>,
    /// The last checkpoint below the head.
    pub checkpoint: Option<Checkpoint>,
    /// Number of paths that differ from the last checkpoint (from the base, if there is none).
    pub changed: u64,
    /// Number of paths that an apply would write: those that differ from the base, whatever checkpoints there are.
    pub to_apply: u64,
    /// Number of applies so far.
    pub epoch: Epoch,
    /// Bytes that the store takes on disk.
    pub store_bytes: u64,
    /// Nodes that the kernel holds now.
    pub kernel_nodes: u64,
    /// Ways out that were blocked, each once for a program, newest last, at most 100.
    pub refusals: Vec<Refusal>,
    /// How many times one was blocked.
    pub refused_count: u64,
    /// Paths of the base that could not be read, or that changed behind our back, with the reason; at most 100. First, with the
    /// root, why `changed` may not count what was written through mappings.
    pub base_problems: Vec<(TreePath, String)>,
    /// Whether a sync of the store failed: nothing can be changed until it is mounted again, and what was not synced before may
    /// be lost.
    pub sync_failed: bool,
    /// The paths of the base that a failed apply changed and that are not rolled back yet, with the
    /// reason; the root, for what concerns no single path. None if there is no such apply.
    pub rollback: Option<Vec<(TreePath, String)>>,
}

/// A sealed state of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its number.
    pub id: LayerId,
    /// Its name.
    pub name: Option<String>,
    /// Its message.
    pub message: String,
    /// When it was made.
    pub time: Timestamp,
    /// The checkpoint or automatic seal below it.
    pub parent: Option<LayerId>,
    /// The epoch of the base that it lies over.
    pub epoch: Epoch,
    /// Whether jailfs made it itself, before a restore, discard or apply.
    pub automatic: bool,
    /// Whether the head lies on it.
    pub current: bool,
}

/// An operation that changed which state the tree shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Its number, from 1.
    pub op: u64,
    /// When it was done.
    pub time: Timestamp,
    /// What was done: `create`, `checkpoint`, `seal`, `restore`, `discard`, `apply`, `op restore`.
    pub verb: String,
    /// On what, for people.
    pub description: String,
    /// The sealed layer that holds the tree as it was right after it; none for the base itself.
    pub tree: Option<LayerId>,
    /// The epoch of the base that the tree lies over.
    pub epoch: Epoch,
}

/// What a restore did, or would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// The state that the tree shows now.
    pub to: String,
    /// The automatic seal that holds the tree as it was before; none if nothing had changed since a checkpoint.
    pub before: Option<LayerId>,
    /// The operation to go back to for the tree as it was before; none if nothing was done, or if it is not known any more.
    pub undo: Option<u64>,
    /// Paths at which something was mounted, and is no longer.
    pub detached: Vec<TreePath>,
    /// The paths that changed, as from the tree before to the tree now. A file that was written counts as modified, also where
    /// its bytes are the same again.
    pub changes: Changes,
}

/// What an apply did, or would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The paths written, created or removed in the base.
    pub changes: Changes,
    /// The epoch of the base after it.
    pub epoch: Epoch,
    /// Paths of the base that changed behind our back. If there are any, nothing was written.
    pub conflicts: Vec<(TreePath, String)>,
    /// Paths that need the consent of the caller, and why. If there are any, nothing was written.
    pub refused: Vec<(TreePath, String)>,
    /// Paths of which the base did not keep everything, and what; at most [`MOST_TOLD`].
    pub not_kept: Vec<(TreePath, String)>,
    /// How many there are in all.
    pub not_kept_count: u64,
    /// Whether it only ended the rollback of an apply that failed or was cut off.
    pub is_rollback: bool,
}

/// Paths of which it is told what the base did not keep.
pub const MOST_TOLD: usize = 20;
