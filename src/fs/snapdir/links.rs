//! READLINK in a checkpoint, jailed to the tree of the checkpoint; and which layer last changed a
//! node.
//!
//! No directory of a checkpoint ever moves. So a link is resolved from its own directory, and
//! nothing need be tracked as in [`crate::fs::ops::symlink`]. For a link with several names, the
//! name nearest to the root decides. If some of its names are not known, a text that climbs is
//! refused.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::jail_walk::{self, Resolved};
use crate::fs::snapdir::Item;
use crate::fs::{Found, Fs, LinkReply, Refused, State, Target};
use crate::jail::{Jail, Policy};
use crate::tree::Body;
use crate::types::{LayerId, Name, NodeId, TreePath};

/// Which layer last changed a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// None: it is as in the base.
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
    /// The text of a link that the kernel may follow. `pid` is the calling process.
    pub(in crate::fs) fn snapdir_readlink(&self, id: NodeId, pid: u32) -> FsResult<LinkReply> {
        let node = match self.snapdir_node(id)? {
            Item::Alias(text, _) => return Ok(LinkReply::Text(text.to_vec())),
            Item::Node(node) => node,
            Item::Fork(node) => return self.readlink_in_fork(&node),
            Item::Top | Item::Checkpoints | Item::Forks | Item::Text(..) => {
                return Err(FsError::Invalid);
            }
            Item::History(_) | Item::Edit(_) => return Err(FsError::Invalid),
        };
        let jail = Arc::clone(&self.jail.lock());
        let judged =
            self.in_checkpoint(node.layer, |state| judge(&jail, state, &node.find(state)?))?;
        match judged {
            Judged::Text(text) => Ok(LinkReply::Text(text)),
            Judged::Out { path, text } => {
                self.refuse(self.path_in_mount(node.layer, &path), Refused::Link(text), pid);
                Err(FsError::LeavesJail)
            }
        }
    }

    /// The path in the mount of a path in a checkpoint.
    fn path_in_mount(&self, layer: LayerId, path: &TreePath) -> TreePath {
        let top = self
            .snapdir_view()
            .map_or_else(TreePath::root, |view| TreePath::root().join(&view.name));
        let number = layer.to_string();
        let dirs = [super::top::CHECKPOINTS, number.as_bytes()].map(Name::new);
        let whole = dirs.into_iter().flatten().chain(path.names());
        whole.fold(top, |path, name| path.join(&name))
    }

    /// The stored text of a link.
    pub(in crate::fs) fn snapdir_link_text(&self, id: NodeId) -> FsResult<Vec<u8>> {
        match self.snapdir_node(id)? {
            Item::Alias(text, _) => Ok(text.to_vec()),
            Item::Node(node) => {
                self.in_checkpoint(node.layer, |state| text_of(state, &node.find(state)?))
            }
            Item::Fork(node) => self.link_text_in_fork(&node),
            Item::Top | Item::Checkpoints | Item::Forks | Item::Text(..) => Err(FsError::Invalid),
            Item::History(_) | Item::Edit(_) => Err(FsError::Invalid),
        }
    }

    /// Whether readlink(2) returns the stored text of a link to callers that do not follow it. With
    /// the literal policy the view is the jail, but a link of a checkpoint must still stay in its
    /// tree.
    pub fn tells_stored_text_of(&self, id: NodeId) -> bool {
        let policy = self.jail.lock().policy;
        policy == Policy::Show || (id.is_in_snapdir() && policy == Policy::Literal)
    }

    /// Which layer last changed a node. May read the records of many layers.
    ///
    /// # Errors
    /// ENODATA for a removed node, and for nodes of `.jailfs` outside a checkpoint. The store
    /// cannot be read.
    pub fn origin(&self, id: NodeId) -> FsResult<Origin> {
        if id.is_in_snapdir() {
            let Item::Node(node) = self.snapdir_node(id)? else { return Err(FsError::NoAttribute) };
            return self.in_checkpoint(node.layer, |state| {
                let found = node.find(state)?;
                if is_as_in_base(state, &found)? {
                    return Ok(Origin::Base);
                }
                let layer = self.archive()?.last_change(node.ino, Some(node.layer))?;
                Ok(layer.map_or(Origin::Base, Origin::Layer))
            });
        }
        let _guard = self.read_again();
        let (state, target) =
            self.with_node(id, |core| Ok((core.state.clone(), core.target(id)?)))?;
        let found = match target {
            Target::Upper(ino) => Found::Upper(ino, None),
            Target::Base(..) => return Ok(Origin::Base),
            Target::Orphan(_) => return Err(FsError::NoAttribute),
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

/// Whether a node equals the base, although it may be in the tree because its directory was
/// changed.
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

/// The answer to READLINK.
pub(super) enum Judged {
    Text(Vec<u8>),
    Out { path: TreePath, text: Vec<u8> },
}

pub(super) fn text_of(state: &State, found: &Found) -> FsResult<Vec<u8>> {
    match &state.record(found)?.0.body {
        Body::Symlink { target } => Ok(target.clone()),
        Body::File { .. } | Body::Dir { .. } | Body::Special => Err(FsError::Invalid),
    }
}

/// Judges a link as if the root of its tree were the root of the mount.
pub(super) fn judge(jail: &Jail, state: &State, found: &Found) -> FsResult<Judged> {
    let text = text_of(state, found)?;
    // An absolute text leads to the live tree or the host. Make it relative, so that it leads to
    // the same path of this checkpoint.
    let policy = match jail.policy {
        Policy::Rewrite => Policy::Rewrite,
        _ if text.starts_with(b"/") => Policy::Rewrite,
        Policy::Deny | Policy::Show | Policy::Literal => Policy::Deny,
    };
    let jail = Jail { policy, ..jail.clone() };
    match jail_walk::resolve(&jail, state, found, &text)? {
        Resolved::Inside(served) | Resolved::Climbs(served) => Ok(Judged::Text(served)),
        Resolved::Escapes => {
            let path = found.ino().and_then(|ino| match found {
                Found::Base(_, path, _) => visible_path(state, path),
                _ => state.tree.path(ino),
            });
            Ok(Judged::Out { path: path.unwrap_or_default(), text })
        }
    }
}

fn visible_path(state: &State, path: &TreePath) -> Option<TreePath> {
    let (above, name) = path.split()?;
    let (dir, _) = state.lower.lookup(&above).ok()??;
    Some(state.dir_path(dir, Some(&above)).ok()?.join(&name))
}
