//! What stands at single paths of a state.

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{Found, State};
use crate::sandbox::Sandbox;
use crate::sandbox::{Node, Rev, Shown};
use crate::store::record::Body;
use crate::types::{ByteRange, FileKind, Ino, PERM_BITS, TreePath};

/// How much of a file one answer takes, in bytes.
const PART: u64 = 4 << 20;
/// Paths that the log of operations names.
const NAMED: usize = 3;

/// What was restored, for the log of operations.
pub(super) fn description(state: &str, paths: &[TreePath]) -> String {
    let named: Vec<String> = paths.iter().take(NAMED).map(|path| format!("'{path}'")).collect();
    let more = match paths.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{} of {state}{more}", named.join(", "))
}

impl Sandbox {
    /// What stands at a path; of a file, the content from `offset` on.
    pub(super) fn show(&self, rev: &Rev, path: &TreePath, offset: u64) -> Result<Shown> {
        let pinned = match rev {
            Rev::Now | Rev::Base => rev.clone(),
            Rev::Back(_) | Rev::Id(_) | Rev::Name(_) => Rev::Id(self.checkpoint_named(rev)?),
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
                let range = ByteRange::at(offset, PART);
                shown.bytes = state.read_range(&found, range).attempt(attempt)?;
            }
            FileKind::Symlink => {
                if let Body::Symlink { target } = &state.record(&found).attempt(attempt)?.0.body {
                    shown.bytes = target.clone();
                }
            }
            FileKind::Dir => {
                let (dir, lower) = state.as_dir(&found).unwrap_or((Ino::ROOT, None));
                state.check_dir(lower.as_ref()).attempt(attempt)?;
                for name in state.merged_names(dir, lower.as_ref()).attempt(attempt)?.into_keys() {
                    let found = state.find(dir, lower.as_ref(), &name).attempt(attempt)?;
                    shown.entries.extend(node_of(&state, &path.join(&name), &found));
                }
            }
            FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block => {}
        }
        Ok(shown)
    }
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
