//! Links of a checkpoint's tree, jailed to that tree; and who last changed a node.
//!
//! No directory of a checkpoint ever moves, so a link is judged where it stands and that is all: nothing need be followed
//! as in [`crate::fs::ops::symlink`]. Of a link with several names the one nearest to the root counts; a text that climbs is not served
//! if some of them are not known.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::jail_walk::{self, Resolved};
use crate::fs::snapdir::{Node, What};
use crate::fs::{Found, Fs, LinkReply, Refused, State, Target};
use crate::jail::{Jail, Policy};
use crate::tree::Body;
use crate::types::{LayerId, Name, NodeId, TreePath};

/// What of a file was last changed by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody: it is as in the base.
    Base,
    /// It was changed since the last checkpoint or seal.
    Upper,
    /// It was changed before the seal of this layer.
    Layer(LayerId),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Base => f.write_str("base"),
            Origin::Upper => f.write_str("upper"),
            Origin::Layer(layer) => write!(f, "layer {layer}"),
        }
    }
}

impl Fs {
    /// The text of a link of the past, as the kernel may follow it; `pid` is who asks.
    pub(in crate::fs) fn past_readlink(&self, id: NodeId, pid: u32) -> FsResult<LinkReply> {
        let node = match self.past_node(id)? {
            What::Alias(text, _) => return Ok(LinkReply::Text(text.to_vec())),
            What::Node(node) => node,
            What::Top | What::Checkpoints | What::Text(..) | What::Path(_) | What::Version(_) => {
                return Err(FsError::Invalid);
            }
        };
        let jail = Arc::clone(&self.jail.lock());
        match self.in_past(node.layer, |state| judge(&jail, state, &node))? {
            Judged::Text(text) => Ok(LinkReply::Text(text)),
            Judged::Out { path, text } => {
                self.refuse(self.path_in_past(node.layer, &path), Refused::Link(text), pid);
                Err(FsError::LeavesJail)
            }
        }
    }

    /// Where a path of a checkpoint is seen in the mount.
    fn path_in_past(&self, layer: LayerId, path: &TreePath) -> TreePath {
        let top = self
            .snapdir_view()
            .map_or_else(TreePath::root, |view| TreePath::root().join(&view.name));
        let number = layer.to_string();
        let dirs = [super::top::CHECKPOINTS, number.as_bytes()].map(Name::new);
        let whole = dirs.into_iter().flatten().chain(path.names());
        whole.fold(top, |path, name| path.join(&name))
    }

    /// The text of a link of the past as it is stored.
    pub(in crate::fs) fn past_link_text(&self, id: NodeId) -> FsResult<Vec<u8>> {
        match self.past_node(id)? {
            What::Alias(text, _) => Ok(text.to_vec()),
            What::Node(node) => {
                self.in_past(node.layer, |state| text_of(state, &node.find(state)?))
            }
            What::Top | What::Checkpoints | What::Text(..) | What::Path(_) | What::Version(_) => {
                Err(FsError::Invalid)
            }
        }
    }

    /// Whether readlink(2) tells the text of a link as it is stored, to callers that do not follow it. Where links are literal
    /// because the view is the jail, a checkpoint's still must not be followed out of its tree.
    pub fn tells_stored_text_of(&self, id: NodeId) -> bool {
        let policy = self.jail.lock().policy;
        policy == Policy::Show || (id.is_in_snapdir() && policy == Policy::Literal)
    }

    /// Who last changed a node. May read the records of many layers.
    ///
    /// # Errors
    /// ENODATA for what is gone, or has none; else what the store answers.
    pub fn origin(&self, id: NodeId) -> FsResult<Origin> {
        if id.is_in_snapdir() {
            let What::Node(node) = self.past_node(id)? else { return Err(FsError::NoAttribute) };
            return self.in_past(node.layer, |state| {
                let found = node.find(state)?;
                if is_as_in_base(state, &found)? {
                    return Ok(Origin::Base);
                }
                let layer = self.archive()?.last_change(node.ino, Some(node.layer))?;
                Ok(layer.map_or(Origin::Base, Origin::Layer))
            });
        }
        let _guard = self.reclaim.read_again();
        let (state, found) = {
            let core = self.core();
            match core.target(id)? {
                Target::Upper(ino) => (core.state.clone(), Found::Upper(ino, None)),
                Target::Base(..) => return Ok(Origin::Base),
                Target::Orphan(_) => return Err(FsError::NoAttribute),
            }
        };
        if is_as_in_base(&state, &found)? {
            return Ok(Origin::Base);
        }
        let (Some(ino), archive) = (found.ino(), self.archive()?) else {
            return Err(FsError::NoAttribute);
        };
        let parent = archive.parent();
        let below = match parent {
            Some(layer) => archive.tree(layer)?,
            None => crate::tree::Tree::new(),
        };
        let same = below.node(ino) == state.tree.node(ino)
            && below.extents(ino).eq(state.tree.extents(ino));
        if !same {
            return Ok(Origin::Upper);
        }
        Ok(archive.last_change(ino, parent)?.map_or(Origin::Upper, Origin::Layer))
    }
}

/// Whether a node is what the base has, although it is in the tree: something else was done to its directory.
fn is_as_in_base(state: &State, found: &Found) -> FsResult<bool> {
    let Found::Upper(ino, _) = found else { return Ok(true) };
    let Some(node) = state.tree.node(*ino) else { return Ok(true) };
    let path = match &node.body {
        Body::Dir { base: Some(path) } => path,
        Body::File { origin: Some(origin), .. } => &origin.path,
        _ => return Ok(false),
    };
    let Some((at, lower)) = state.lower.lookup(path)? else { return Ok(false) };
    let (record, extents) = state.lower.record(path, &lower)?;
    let known = state.record(found)?;
    Ok(at == *ino && record == **node && extents == known.1)
}

/// What is to be answered for a link.
enum Judged {
    Text(Vec<u8>),
    Out { path: TreePath, text: Vec<u8> },
}

fn text_of(state: &State, found: &Found) -> FsResult<Vec<u8>> {
    match &state.record(found)?.0.body {
        Body::Symlink { target } => Ok(target.clone()),
        Body::File { .. } | Body::Dir { .. } | Body::Special => Err(FsError::Invalid),
    }
}

fn judge(jail: &Jail, state: &State, node: &Node) -> FsResult<Judged> {
    let found = node.find(state)?;
    let text = text_of(state, &found)?;
    // An absolute text names the live tree, or the host. What is meant is the same place of this tree: a relative text, then.
    let policy = match jail.policy {
        Policy::Rewrite => Policy::Rewrite,
        _ if text.starts_with(b"/") => Policy::Rewrite,
        Policy::Deny | Policy::Show | Policy::Literal => Policy::Deny,
    };
    let jail = Jail { policy, ..jail.clone() };
    match jail_walk::resolve(&jail, state, &found, &text)? {
        Resolved::Inside(served) | Resolved::Climbs(served) => Ok(Judged::Text(served)),
        Resolved::Escapes => {
            let path = found.ino().and_then(|ino| match &found {
                Found::Base(_, path, _) => shown_path(state, path),
                _ => state.tree.path(ino),
            });
            Ok(Judged::Out { path: path.unwrap_or_default(), text })
        }
    }
}

fn shown_path(state: &State, path: &TreePath) -> Option<TreePath> {
    let (above, name) = path.split()?;
    let (dir, _) = state.lower.lookup(&above).ok()??;
    Some(state.dir_path(dir, Some(&above)).ok()?.join(&name))
}
