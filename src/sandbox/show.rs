//! Reads single paths of a state, without a mount.

use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::{Found, State};
use crate::sandbox::{Node, Rev, Sandbox, Shown};
use crate::tree::Body;
use crate::types::{ByteRange, FileKind, Ino, PERM_BITS, TreePath};

/// The largest part of a file in one answer, in bytes.
const MAX_PART: u64 = 4 << 20;

impl Sandbox {
    /// Reads a node: a file's content from `offset`, a link's target, or a directory's entries.
    pub(super) fn show(&self, rev: &Rev, path: &TreePath, offset: u64) -> Result<Shown> {
        // Later parts of a file must come from the same state, so a relative rev is resolved once.
        let pinned = match rev {
            Rev::Now | Rev::Base | Rev::Head { back: 0, .. } => rev.clone(),
            Rev::Back(_) | Rev::Id(_) | Rev::Name(_) | Rev::Of { .. } | Rev::Head { .. } => {
                Rev::Id(self.checkpoint_named(rev)?)
            }
        };
        let state = self.state(&pinned)?;
        let attempt = || format!("show '{path}' of {rev}");
        let found = state.resolve_visible(path).attempt(attempt)?;
        let node = node_of(&state, path, &found).ok_or_else(|| {
            Error::new(Kind::NoStore, attempt(), "there is no such path")
                .hint("the path of a directory shows what is in it")
        })?;
        let mut shown = Shown { rev: pinned, node, bytes: Vec::new(), entries: Vec::new() };
        match shown.node.file {
            FileKind::File => {
                let range = ByteRange::at(offset, MAX_PART);
                shown.bytes = state.read_range(&found, range).attempt(attempt)?;
            }
            FileKind::Symlink => {
                if let Body::Symlink { target } = &state.record(&found).attempt(attempt)?.0.body {
                    shown.bytes = target.clone();
                }
            }
            FileKind::Dir => shown.entries = entries_of(&state, path, &found).attempt(attempt)?,
            FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block => {}
        }
        Ok(shown)
    }
}

/// The entries of a directory, sorted by name.
fn entries_of(state: &State, path: &TreePath, found: &Found) -> FsResult<Vec<Node>> {
    let (dir, lower) = state.as_dir(found).unwrap_or((Ino::ROOT, None));
    state.check_dir(lower.as_ref())?;
    let mut entries = Vec::new();
    for name in state.merged_names(dir, lower.as_ref())?.into_keys() {
        let found = state.find(dir, lower.as_ref(), &name)?;
        entries.extend(node_of(state, &path.join(&name), &found));
    }
    Ok(entries)
}

fn node_of(state: &State, path: &TreePath, found: &Found) -> Option<Node> {
    let attr = state.attr(found)?;
    Some(Node {
        path: path.clone(),
        file: attr.kind,
        ino: attr.ino,
        mode: attr.meta.mode & PERM_BITS,
        uid: attr.meta.uid,
        gid: attr.meta.gid,
        size: attr.size,
        mtime: attr.meta.mtime,
    })
}
