//! `--json`: one object per line, tagged with its `type`. docs/CLI.md lists them.
//!
//! Names are bytes and JSON is text. A path that is not UTF-8 has U+FFFD for its invalid bytes.
//! Only then a second field, whose name ends in `_hex`, has the exact bytes in hexadecimal.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::date;
use super::format;
use crate::error::{Error, Kind, Result};
use crate::fs::{Refusal, Refused};
use crate::sandbox::{
    Applied, Change, Checked, Checkpoint, Collected, FileEdit, Fork, Info, LayerSpace, Merged,
    Node, Operation, Restored, Status, Stepped,
};
use crate::types::{FileKind, TreePath, is_unprintable};

/// One line.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Line {
    Status {
        #[serde(flatten)]
        base: Bytes,
        #[serde(flatten)]
        store: Bytes,
        #[serde(flatten)]
        mount: Bytes,
        head: String,
        pid: Option<u32>,
        checkpoint: Option<u32>,
        checkpoint_name: Option<String>,
        changed: u64,
        to_apply: u64,
        epoch: u32,
        store_bytes: u64,
        kernel_nodes: u64,
        refused_links: u64,
        sync_failed: bool,
        rollback_unfinished: bool,
    },
    RefusedLink {
        #[serde(flatten)]
        path: Bytes,
        #[serde(flatten)]
        target: Bytes,
        pid: Option<u32>,
        #[serde(flatten)]
        process: Bytes,
    },
    RefusedRename {
        #[serde(flatten)]
        path: Bytes,
        #[serde(flatten)]
        to: Bytes,
        pid: Option<u32>,
        #[serde(flatten)]
        process: Bytes,
    },
    NotRolledBack {
        #[serde(flatten)]
        path: Bytes,
        reason: String,
    },
    BaseProblem {
        #[serde(flatten)]
        path: Bytes,
        reason: String,
    },
    Checkpoint {
        id: u32,
        head: String,
        name: Option<String>,
        message: String,
        time: String,
        secs: i64,
        nanos: u32,
        parent: Option<u32>,
        epoch: u32,
        automatic: bool,
        current: bool,
    },
    Operation {
        op: u64,
        head: String,
        time: String,
        secs: i64,
        nanos: u32,
        verb: String,
        description: String,
        tree: Option<u32>,
        epoch: u32,
    },
    Fork {
        name: String,
        parent: Option<String>,
        forked_at: Option<u32>,
        time: String,
        secs: i64,
        nanos: u32,
        abandoned: bool,
        #[serde(flatten)]
        mount: Bytes,
    },
    Attempt {
        attempt: u32,
        head: String,
        result: &'static str,
        exit: Option<u8>,
        signal: Option<u8>,
        seconds: f64,
        score: Option<f64>,
        checkpoint: Option<u32>,
        changes: Option<usize>,
        added: Option<usize>,
        modified: Option<usize>,
        deleted: Option<usize>,
        error: Option<String>,
    },
    Race {
        pick: &'static str,
        attempts: usize,
        winner: Option<u32>,
        checkpoint: Option<u32>,
        head: String,
        undo: Option<u64>,
        interrupted: bool,
        kept: Vec<String>,
    },
    Change {
        status: char,
        #[serde(flatten)]
        path: Bytes,
        #[serde(flatten)]
        old_path: Bytes,
        file: &'static str,
        #[serde(flatten)]
        target: Option<Bytes>,
        #[serde(skip_serializing_if = "Option::is_none")]
        danger: Option<String>,
        ino: u64,
        old_size: Option<u64>,
        new_size: Option<u64>,
        lines_added: Option<u64>,
        lines_removed: Option<u64>,
        binary: bool,
        #[serde(flatten)]
        patch: Option<Bytes>,
    },
    Node {
        #[serde(flatten)]
        path: Bytes,
        file: &'static str,
        ino: u64,
        mode: String,
        uid: u32,
        gid: u32,
        size: u64,
        secs: i64,
        nanos: u32,
    },
    Restored {
        to: String,
        before: Option<u32>,
        undo: Option<u64>,
        dry_run: bool,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        detached: Vec<String>,
        changes: usize,
    },
    Applied {
        epoch: u32,
        dry_run: bool,
        undo: bool,
        changes: usize,
        conflicts: usize,
        refused: usize,
        not_kept: u64,
    },
    Merged {
        head: String,
        into: String,
        before: Option<u32>,
        undo: Option<u64>,
        dry_run: bool,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        detached: Vec<String>,
        changes: usize,
        conflicts: u64,
    },
    Exported {
        form: &'static str,
        to: String,
        digest: Option<String>,
        entries: u64,
        bytes: u64,
        left_out: u64,
    },
    Imported {
        name: String,
        head: String,
        new_head: bool,
        entries: u64,
        left_out: u64,
        checkpoints: u64,
        edits: u64,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        unnamed: Vec<String>,
        before: Option<u32>,
        undo: Option<u64>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        detached: Vec<String>,
        changes: usize,
    },
    Unresolved {
        #[serde(flatten)]
        path: Bytes,
    },
    NotKept {
        #[serde(flatten)]
        path: Bytes,
        reason: String,
    },
    Refused {
        #[serde(flatten)]
        path: Bytes,
        reason: String,
    },
    Version {
        #[serde(flatten)]
        path: Bytes,
        number: u32,
        time: String,
        secs: i64,
        nanos: u32,
        edit: &'static str,
        size: Option<u64>,
        mode: Option<u32>,
        shown: bool,
    },
    Stepped {
        verb: &'static str,
        #[serde(flatten)]
        path: Bytes,
        number: Option<u32>,
        old_size: Option<u64>,
        new_size: Option<u64>,
    },
    Collected {
        bytes: u64,
        store_bytes: u64,
        dropped: u64,
        layers: u64,
        dry_run: bool,
    },
    Problem {
        text: String,
    },
    Warning {
        text: String,
    },
    Repaired {
        text: String,
    },
    Checked {
        problems: u64,
        layers: u64,
        records: u64,
        extents: u64,
        bytes_read: u64,
        bytes_without_sum: u64,
        warnings: u64,
        versions: u64,
    },
    Layer {
        layer: u32,
        name: Option<String>,
        open: bool,
        logical: u64,
        stored: u64,
        shared: u64,
    },
    Info {
        layers: u64,
        logical: u64,
        stored: u64,
        shared: u64,
        store_bytes: u64,
        to_do: u64,
    },
    Conflict {
        #[serde(flatten)]
        path: Bytes,
        reason: String,
    },
}

/// A field whose value is bytes: a path, a link target, a patch. It is flattened into its line, as
/// one field of text, and a second one in hexadecimal if the bytes are not UTF-8.
pub(super) struct Bytes {
    name: &'static str,
    /// `None` is written as `null`.
    value: Option<Vec<u8>>,
}

impl Bytes {
    fn new(name: &'static str, value: &[u8]) -> Bytes {
        Bytes { name, value: Some(value.to_owned()) }
    }

    fn path(path: &TreePath) -> Bytes {
        Bytes::new("path", path.as_bytes())
    }

    fn nullable(name: &'static str, value: Option<&[u8]>) -> Bytes {
        Bytes { name, value: value.map(<[u8]>::to_owned) }
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(None)?;
        let text = self.value.as_deref().map(String::from_utf8_lossy);
        fields.serialize_entry(self.name, &text)?;
        if let Some(bytes) =
            self.value.as_deref().filter(|bytes| std::str::from_utf8(bytes).is_err())
        {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            fields.serialize_entry(&format!("{}_hex", self.name), &hex)?;
        }
        fields.end()
    }
}

impl Line {
    /// The line as text, without a newline.
    ///
    /// # Errors
    /// None is known; the signature of serde_json has one.
    pub(super) fn text(&self) -> Result<String> {
        let text = serde_json::to_string(self).map_err(|error| {
            Error::new(Kind::Failed, "write the output as JSON", error.to_string())
        })?;
        Ok(escaped(&text))
    }

    pub(super) fn status(status: &Status) -> Line {
        Line::Status {
            base: Bytes::new("base", &status.base),
            store: Bytes::new("store", &status.store),
            mount: Bytes::nullable("mount", status.mount.as_deref()),
            head: status.head.clone(),
            pid: status.pid,
            checkpoint: status.checkpoint.as_ref().map(|checkpoint| checkpoint.id.0),
            checkpoint_name: status
                .checkpoint
                .as_ref()
                .and_then(|checkpoint| checkpoint.name.clone()),
            changed: status.changed,
            to_apply: status.to_apply,
            epoch: status.epoch.0,
            store_bytes: status.store_bytes,
            kernel_nodes: status.kernel_nodes,
            refused_links: status.refused_count,
            sync_failed: status.sync_failed,
            rollback_unfinished: status.rollback.is_some(),
        }
    }

    pub(super) fn refusal(refusal: &Refusal) -> Line {
        let path = Bytes::path(&refusal.path);
        let process = Bytes::new("process", &refusal.process);
        let pid = Some(refusal.pid).filter(|pid| *pid != 0);
        match &refusal.what {
            Refused::Link(target) => {
                Line::RefusedLink { path, target: Bytes::new("target", target), pid, process }
            }
            Refused::Rename(to) => {
                Line::RefusedRename { path, to: Bytes::new("to", to.as_bytes()), pid, process }
            }
        }
    }

    pub(super) fn not_rolled_back(path: &TreePath, reason: &str) -> Line {
        Line::NotRolledBack { path: Bytes::path(path), reason: reason.to_owned() }
    }

    pub(super) fn base_problem(path: &TreePath, reason: &str) -> Line {
        Line::BaseProblem { path: Bytes::path(path), reason: reason.to_owned() }
    }

    pub(super) fn checkpoint(checkpoint: &Checkpoint) -> Line {
        Line::Checkpoint {
            id: checkpoint.id.0,
            head: checkpoint.head.clone(),
            name: checkpoint.name.clone(),
            message: checkpoint.message.clone(),
            time: date::utc(checkpoint.time),
            secs: checkpoint.time.secs,
            nanos: checkpoint.time.nanos,
            parent: checkpoint.parent.map(|parent| parent.0),
            epoch: checkpoint.epoch.0,
            automatic: checkpoint.automatic,
            current: checkpoint.current,
        }
    }

    pub(super) fn operation(operation: &Operation) -> Line {
        Line::Operation {
            op: operation.op,
            head: operation.head.clone(),
            time: date::utc(operation.time),
            secs: operation.time.secs,
            nanos: operation.time.nanos,
            verb: operation.verb.clone(),
            description: operation.description.clone(),
            tree: operation.tree.map(|tree| tree.0),
            epoch: operation.epoch.0,
        }
    }

    pub(super) fn fork(fork: &Fork) -> Line {
        Line::Fork {
            name: fork.name.clone(),
            parent: fork.parent.clone(),
            forked_at: fork.forked_at.map(|at| at.0),
            time: date::utc(fork.time),
            secs: fork.time.secs,
            nanos: fork.time.nanos,
            abandoned: fork.is_abandoned,
            mount: Bytes::nullable("mount", fork.mount_point.as_deref()),
        }
    }

    pub(super) fn node(node: &Node) -> Line {
        Line::Node {
            path: Bytes::path(&node.path),
            file: file_kind(node.file),
            ino: node.ino.0,
            mode: format!("{:04o}", node.mode),
            uid: node.uid,
            gid: node.gid,
            size: node.size,
            secs: node.mtime.secs,
            nanos: node.mtime.nanos,
        }
    }

    pub(super) fn change(change: &Change) -> Line {
        let old_path = change.old_path.as_ref().map(TreePath::as_bytes);
        Line::Change {
            status: format::letter(change.kind),
            path: Bytes::path(&change.path),
            old_path: Bytes::nullable("old_path", old_path),
            file: file_kind(change.file),
            target: change.target.as_deref().map(|target| Bytes::new("target", target)),
            danger: change.danger.clone(),
            ino: change.ino.0,
            old_size: change.old_size,
            new_size: change.new_size,
            lines_added: change.lines.map(|(added, _)| added),
            lines_removed: change.lines.map(|(_, removed)| removed),
            binary: change.binary,
            patch: change.patch.as_deref().map(|patch| Bytes::new("patch", patch)),
        }
    }

    pub(super) fn version(path: &TreePath, version: &FileEdit) -> Line {
        Line::Version {
            path: Bytes::path(path),
            number: version.number,
            time: date::utc(version.time),
            secs: version.time.secs,
            nanos: version.time.nanos,
            edit: format::edit(version.kind),
            size: version.size,
            mode: version.mode,
            shown: version.is_current,
        }
    }

    pub(super) fn stepped(verb: &'static str, stepped: &Stepped) -> Line {
        let Stepped { number, old_size, new_size, .. } = *stepped;
        Line::Stepped { verb, path: Bytes::path(&stepped.path), number, old_size, new_size }
    }

    pub(super) fn restored(restored: &Restored, dry_run: bool) -> Line {
        Line::Restored {
            to: restored.to.clone(),
            before: restored.before.map(|before| before.0),
            undo: restored.undo,
            dry_run,
            detached: restored.detached.iter().map(ToString::to_string).collect(),
            changes: restored.changes.len(),
        }
    }

    pub(super) fn applied(applied: &Applied, dry_run: bool, undo: bool) -> Line {
        Line::Applied {
            epoch: applied.epoch.0,
            dry_run,
            undo,
            changes: applied.changes.len(),
            conflicts: applied.conflicts.len(),
            refused: applied.refused.len(),
            not_kept: applied.not_kept_count,
        }
    }

    pub(super) fn collected(collected: &Collected, dry_run: bool) -> Line {
        Line::Collected {
            bytes: collected.bytes,
            store_bytes: collected.store_bytes,
            dropped: collected.dropped.len() as u64,
            layers: collected.layers.len() as u64,
            dry_run,
        }
    }

    pub(super) fn problem(text: &str) -> Line {
        Line::Problem { text: text.to_owned() }
    }

    pub(super) fn warning(text: &str) -> Line {
        Line::Warning { text: text.to_owned() }
    }

    pub(super) fn repaired(text: &str) -> Line {
        Line::Repaired { text: text.to_owned() }
    }

    pub(super) fn checked(checked: &Checked) -> Line {
        Line::Checked {
            problems: checked.problems.len() as u64,
            layers: checked.layers,
            records: checked.records,
            extents: checked.extents,
            bytes_read: checked.bytes_read,
            bytes_without_sum: checked.bytes_without_sum,
            warnings: checked.warnings.len() as u64,
            versions: checked.edits,
        }
    }

    pub(super) fn layer(space: &LayerSpace) -> Line {
        Line::Layer {
            layer: space.layer.0,
            name: space.name.clone(),
            open: space.open,
            logical: space.logical,
            stored: space.stored,
            shared: space.shared,
        }
    }

    pub(super) fn info(info: &Info) -> Line {
        let sum = |of: fn(&LayerSpace) -> u64| info.layers.iter().map(of).sum();
        Line::Info {
            layers: info.layers.len() as u64,
            logical: sum(|space| space.logical),
            stored: sum(|space| space.stored),
            shared: sum(|space| space.shared),
            store_bytes: info.store_bytes,
            to_do: info.to_do,
        }
    }

    pub(super) fn refused(path: &TreePath, reason: &str) -> Line {
        Line::Refused { path: Bytes::path(path), reason: reason.to_owned() }
    }

    pub(super) fn not_kept(path: &TreePath, reason: &str) -> Line {
        Line::NotKept { path: Bytes::path(path), reason: reason.to_owned() }
    }

    pub(super) fn unresolved(path: &TreePath) -> Line {
        Line::Unresolved { path: Bytes::path(path) }
    }

    pub(super) fn merged(merged: &Merged, dry_run: bool) -> Line {
        Line::Merged {
            head: merged.head.clone(),
            into: merged.into.clone(),
            before: merged.before.map(|before| before.0),
            undo: merged.undo,
            dry_run,
            detached: merged.detached.iter().map(ToString::to_string).collect(),
            changes: merged.changes.len(),
            conflicts: merged.conflict_count,
        }
    }

    pub(super) fn conflict(path: &TreePath, reason: &str) -> Line {
        Line::Conflict { path: Bytes::path(path), reason: reason.to_owned() }
    }
}

/// Escapes characters that act on a terminal, as JSON escapes them. In JSON they occur in strings
/// only.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if is_unprintable(c) {
            let mut units = [0; 2];
            c.encode_utf16(&mut units)
                .iter()
                .for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        } else {
            text.push(c);
        }
    }
    text
}

fn file_kind(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "file",
        FileKind::Dir => "dir",
        FileKind::Symlink => "symlink",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
        FileKind::Char => "char",
        FileKind::Block => "block",
    }
}

#[cfg(test)]
mod tests;
