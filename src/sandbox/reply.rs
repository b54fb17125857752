//! The replies of a sandbox, as data.

use serde::{Deserialize, Serialize};

use super::changes::Changes;
use super::request::Rev;
use crate::fs::Refusal;
use crate::types::{Epoch, FileKind, Ino, LayerId, Timestamp, TreePath};

/// The answer to a [`Request`](crate::sandbox::Request).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To `Show`.
    Shown(Shown),
    /// To `Status`.
    Status(Status),
    /// To `Log`, newest first.
    Log(Vec<Checkpoint>),
    /// To `OpLog`, newest first.
    OpLog(Vec<Operation>),
    /// To `Checkpoint`, `Drop` and `Hold`.
    Checkpoint(Checkpoint),
    /// To `Diff`, sorted by path, and to `FileDiff`.
    Diff(Changes),
    /// To `Restore`, `Discard` and `OpRestore`.
    Restored(Restored),
    /// To `Apply`.
    Applied(Applied),
    /// To `History`, newest first.
    History(Vec<FileEdit>),
    /// To `Undo` and `Redo`.
    Stepped(Stepped),
    /// To `Gc`.
    Collected(Collected),
    /// To `Check`.
    Checked(Checked),
    /// To `Unmount` and `DropFork`.
    Done,
    /// To `Info`.
    Info(Info),
    /// To `Fork`, in the order of the names.
    Forked(Vec<Fork>),
    /// To `Forks`, sorted by name.
    Forks(Vec<Fork>),
    /// To `Merge`.
    Merged(Merged),
    /// To `Export`.
    Exported(Exported),
    /// To `Describe`.
    Described(Described),
    /// To `Import`.
    Imported(Imported),
}

impl Reply {
    /// The list of changes in the reply.
    pub(crate) fn changes(&mut self) -> Option<&mut Changes> {
        match self {
            Reply::Diff(changes) => Some(changes),
            Reply::Restored(restored) => Some(&mut restored.changes),
            Reply::Applied(applied) => Some(&mut applied.changes),
            Reply::Merged(merged) => Some(&mut merged.changes),
            Reply::Imported(imported) => Some(&mut imported.changes),
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
            | Reply::Info(_)
            | Reply::Forked(_)
            | Reply::Exported(_)
            | Reply::Described(_)
            | Reply::Forks(_) => None,
        }
    }
}

/// A head of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fork {
    /// Its name.
    pub name: String,
    /// The head that it was forked from; `None` for the first head.
    pub parent: Option<String>,
    /// The sealed state that it began with; `None` for the first head.
    pub forked_at: Option<LayerId>,
    /// When it was forked, or created.
    pub time: Timestamp,
    /// The layer on top of it.
    pub top: LayerId,
    /// Whether a race has made it that was killed.
    pub is_abandoned: bool,
    /// The host path of its mount point, as bytes, if it is mounted.
    pub mount_point: Option<Vec<u8>>,
}

/// The disk space of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Its layers, oldest first.
    pub layers: Vec<LayerSpace>,
    /// Bytes on disk of the whole store.
    pub store_bytes: u64,
    /// Sealed layers that are not deduplicated yet.
    pub to_do: u64,
}

/// The disk space of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpace {
    /// Its number. A sealed layer has the number of its checkpoint.
    pub layer: LayerId,
    /// The name of the checkpoint.
    pub name: Option<String>,
    /// Whether it is not sealed.
    pub open: bool,
    /// Bytes of content that were written to it and still exist, wherever they are stored.
    pub logical: u64,
    /// Bytes on disk, including its records.
    pub stored: u64,
    /// Bytes of its content that share the storage of equal content.
    pub shared: u64,
}

/// How an edit changed a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EditKind {
    /// It was written.
    Write,
    /// It was truncated.
    Truncate,
    /// Another file was renamed over it.
    Replace,
    /// It was removed.
    Remove,
    /// It was renamed.
    Move,
    /// A restore, discard or op restore changed it.
    Restore,
    /// An undo or redo changed it.
    Undo,
}

/// An edit of a file, and the file before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEdit {
    /// The number of the edit: those of a path count from 1.
    pub number: u32,
    /// When the edit began.
    pub time: Timestamp,
    /// How it began.
    pub kind: EditKind,
    /// Size before it, in bytes; `None` if there was no file.
    pub size: Option<u64>,
    /// Mode before it.
    pub mode: Option<u32>,
    /// Last change of the content before it.
    pub mtime: Option<Timestamp>,
    /// Whether an undo or redo made this the current content, and no edit followed.
    pub is_current: bool,
}

/// The result of an undo or a redo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stepped {
    /// The path.
    pub path: TreePath,
    /// The file is now as it was before this edit; `None` if it is as before the first undo.
    pub number: Option<u32>,
    /// Size before, in bytes; `None` if there was no file.
    pub old_size: Option<u64>,
    /// Size now, in bytes; `None` if there is no file.
    pub new_size: Option<u64>,
}

/// A path of a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The state, to ask for the next part of the same file. A checkpoint is named by its number.
    /// `@` and `base` may have changed by then.
    pub rev: Rev,
    /// The node.
    pub node: Node,
    /// For a file, its bytes from the requested offset; empty at its end. For a link, its target.
    pub bytes: Vec<u8>,
    /// For a directory, its entries, sorted by name.
    pub entries: Vec<Node>,
}

/// A node of a state, as `stat` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its path.
    pub path: TreePath,
    /// Its type.
    pub file: FileKind,
    /// Its inode number.
    pub ino: Ino,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Timestamp,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// The problems, one line each.
    pub problems: Vec<String>,
    /// The repairs, one line each.
    pub repaired: Vec<String>,
    /// Layers that were read.
    pub layers: u64,
    /// Journal records that were read.
    pub records: u64,
    /// Extents that were followed.
    pub extents: u64,
    /// Bytes of content whose checksums were verified.
    pub bytes_read: u64,
    /// Bytes of content that have no checksums yet: those of the upper layer.
    pub bytes_without_sum: u64,
    /// Problems with edit histories, one line each. They do not make the store unsound.
    pub warnings: Vec<String>,
    /// Edits that were followed.
    pub edits: u64,
}

/// The result of a garbage collection or its dry run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// The dropped checkpoints, oldest first.
    pub dropped: Vec<Checkpoint>,
    /// The sealed layers whose records nothing needs.
    pub layers: Vec<LayerId>,
    /// Freed bytes on disk.
    pub bytes: u64,
    /// Bytes that the store takes on disk now.
    pub store_bytes: u64,
}

/// The status of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The name of the head.
    pub head: String,
    /// The host path of the base, as bytes.
    pub base: Vec<u8>,
    /// The host path of the store, as bytes.
    pub store: Vec<u8>,
    /// The host path of the mount point, as bytes, if it is mounted.
    pub mount: Option<Vec<u8>>,
    /// The process that serves the mount.
    pub pid: Option<u32>,
    /// The last checkpoint below the head.
    pub checkpoint: Option<Checkpoint>,
    /// Number of paths that differ from the last checkpoint, or from the base without one.
    pub changed: u64,
    /// Number of paths that an apply would write. Checkpoints do not change this number.
    pub to_apply: u64,
    /// Number of applies so far.
    pub epoch: Epoch,
    /// Bytes that the store takes on disk.
    pub store_bytes: u64,
    /// Nodes that the kernel holds now.
    pub kernel_nodes: u64,
    /// Refused links and renames that would have led out of the mount: one per program and path,
    /// newest last, at most 100.
    pub refusals: Vec<Refusal>,
    /// Number of all refusals.
    pub refused_count: u64,
    /// Paths of the base that could not be read or that drifted, with the reason; at most 100. If
    /// the first path is the root, `changed` may lack writes through mappings.
    pub base_problems: Vec<(TreePath, String)>,
    /// Whether a sync of the store failed. Then the tree is read-only until the next mount, and
    /// changes that were not synced before may be lost.
    pub sync_failed: bool,
    /// The files with conflict markers of a merge, and what it put beside others.
    pub unresolved: Vec<TreePath>,
    /// `Some` if an apply failed and its rollback is not finished: the paths of the base that are
    /// not rolled back, with the reason. The root stands for a reason without a path.
    pub rollback: Option<Vec<(TreePath, String)>>,
}

/// A sealed state of the tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its number.
    pub id: LayerId,
    /// The head that it was made of.
    pub head: String,
    /// Its name.
    pub name: Option<String>,
    /// Its message.
    pub message: String,
    /// When it was made.
    pub time: Timestamp,
    /// The checkpoint or automatic seal below it.
    pub parent: Option<LayerId>,
    /// The epoch of the base below it.
    pub epoch: Epoch,
    /// Whether it is an automatic seal, made before a restore, discard or apply.
    pub automatic: bool,
    /// Whether the head lies directly on it.
    pub current: bool,
}

/// An operation that changed which state the tree is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Its number, from 1.
    pub op: u64,
    /// The head.
    pub head: String,
    /// When it was done.
    pub time: Timestamp,
    /// Its kind: `create`, `checkpoint`, `seal`, `restore`, `discard`, `apply`, `undo apply`,
    /// `op restore`, `fork`, `drop fork`, `merge`, `import` or `pull`.
    pub verb: String,
    /// Its object, for people.
    pub description: String,
    /// The sealed layer with the tree right after it; `None` for the base itself.
    pub tree: Option<LayerId>,
    /// The epoch of the base below that tree.
    pub epoch: Epoch,
}

/// The result of a restore or its dry run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// The state that the tree is in now, for people.
    pub to: String,
    /// The automatic seal with the tree as it was before; `None` if that was a checkpoint already.
    pub before: Option<LayerId>,
    /// An `OpRestore` of this operation restores the tree as it was before. `None` if nothing was
    /// done, or the operation is not in the log any more.
    pub undo: Option<u64>,
    /// Paths at which mounts were detached.
    pub detached: Vec<TreePath>,
    /// The changed paths, from the tree before to the tree now. A rewritten file counts as
    /// modified, even if its bytes are equal.
    pub changes: Changes,
}

/// The result of a merge or its dry run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// The head that was merged.
    pub head: String,
    /// The head that it was merged into.
    pub into: String,
    /// Paths that both heads changed differently, sorted, with the change of this head and that of
    /// the other one, for people. With any of them, nothing was changed. At most 10,000.
    pub conflicts: Vec<(TreePath, String, String)>,
    /// The number of all conflicts.
    pub conflict_count: u64,
    /// Files with conflict markers, and the copies of the other head's side that are beside ours.
    pub unresolved: Vec<TreePath>,
    /// The automatic seal with the tree as it was before.
    pub before: Option<LayerId>,
    /// As for [`Restored`].
    pub undo: Option<u64>,
    /// Paths at which mounts were detached.
    pub detached: Vec<TreePath>,
    /// As for [`Restored`].
    pub changes: Changes,
}

/// The result of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exported {
    /// The number of entries.
    pub entries: u64,
    /// Bytes of content, without holes.
    pub bytes: u64,
    /// Sockets, which no archive can hold; at most 20.
    pub skipped: Vec<TreePath>,
    /// The number of all of them.
    pub skipped_count: u64,
}

/// The result of a description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    /// The name of the head.
    pub head: String,
    /// The sealed state, if it is not the base.
    pub checkpoint: Option<Checkpoint>,
    /// The checkpoints that were described before it, oldest first.
    pub history: Vec<Checkpoint>,
    /// The number of entries.
    pub entries: u64,
}

/// The result of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imported {
    /// The name of the archives.
    pub name: String,
    /// The head that shows them.
    pub head: String,
    /// Whether that head is new.
    pub is_new_head: bool,
    /// The number of entries.
    pub entries: u64,
    /// Extended attributes of other systems, which were left out.
    pub left_out: u64,
    /// The number of checkpoints that came along.
    pub checkpoints: u64,
    /// The number of edits that came along.
    pub edits: u64,
    /// The names of those that have none here, because another checkpoint has the name.
    pub unnamed: Vec<String>,
    /// The automatic seal with the tree as it was before.
    pub before: Option<LayerId>,
    /// As for [`Restored`].
    pub undo: Option<u64>,
    /// Paths at which mounts were detached.
    pub detached: Vec<TreePath>,
    /// As for [`Restored`]; empty for a new head.
    pub changes: Changes,
}

/// The result of an apply or its dry run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The paths that were written, created or removed in the base.
    pub changes: Changes,
    /// The epoch of the base after it.
    pub epoch: Epoch,
    /// Paths of the base that drifted, with the reason. If there are any, nothing was written.
    pub conflicts: Vec<(TreePath, String)>,
    /// Paths that need the consent of the caller, with the reason. If there are any, nothing was
    /// written.
    pub refused: Vec<(TreePath, String)>,
    /// Paths of which the base cannot store everything, and what it lacks; at most
    /// [`MAX_NOT_KEPT`].
    pub not_kept: Vec<(TreePath, String)>,
    /// Number of all such paths.
    pub not_kept_count: u64,
    /// Whether it only finished the rollback of an earlier apply that failed or was interrupted.
    pub is_rollback: bool,
}

/// The largest number of paths in [`Applied::not_kept`].
pub const MAX_NOT_KEPT: usize = 20;
