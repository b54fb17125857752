//! The merged tree, as far as it differs from the base: an immutable value that is cheap to clone.
//!
//! Always true, and checked by [`Tree::verify`]:
//! * every name of kind `Child` is in a directory of the tree and refers to a node of the tree;
//! * `links` is the exact reverse of those names;
//! * every node but the root has a name, unless it is a base file with further names in the base;
//! * a file has a link count of at least the number of its names here;
//! * a directory has one name, and its parents lead to the root;
//! * the extents of a file do not overlap and end at or before its size; adjacent extents whose
//!   bytes are adjacent in the source are one extent.
//!
//! Four ordered maps with structural sharing hold a state: nodes by [`Ino`], names by (directory,
//! name), reverse links by (child, directory, name), and extents by (file, offset). So a checkpoint
//! is a clone, a restore is an assignment, and [`Tree::diff`] costs what differs. One map for all
//! names (and one for all extents) needs little more memory than the records themselves, and makes
//! a diff one pass; a map per directory would do neither.
//!
//! The tree makes no system call and knows neither the kernel nor disks.

mod delta;
mod edit;
mod extents;
mod node;
mod persistent_map;
mod validate;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::types::{ByteRange, FileKind, Ino, Name, TreePath};
pub use edit::Edit;
pub use extents::{Extent, Segment, Source};
pub use node::{Body, Dentry, Hides, Meta, Node, Origin, Xattrs};
pub(crate) use persistent_map::PersistentMap;

/// One state of the tree.
#[derive(Clone, Default)]
pub struct Tree {
    nodes: PersistentMap<Ino, Arc<Node>>,
    dentries: PersistentMap<(Ino, Name), Dentry>,
    links: PersistentMap<(Ino, Ino, Name), ()>,
    extents: PersistentMap<(Ino, u64), Extent>,
}

/// An edit that does not fit the tree: the journal, or the code, contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misfit(pub &'static str);

impl Misfit {
    const NO_NODE: Misfit = Misfit("an edit of a node that is not in the tree");
    const NAME_IN_NO_DIRECTORY: Misfit =
        Misfit("a name in a node that is not a directory of the tree");
    const REMOVAL_OF_NO_NODE: Misfit = Misfit("removal of a node that is not in the tree");
    const SIZE_OF_NO_FILE: Misfit = Misfit("a size for a node that is not a file");
    const CONTENT_OF_NO_FILE: Misfit = Misfit("content for a node that is not a file of the tree");
    const BEYOND_THE_END: Misfit = Misfit("content beyond the end of a file");
}

/// The difference between two trees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeDiff {
    /// Nodes whose records differ, or that one tree lacks.
    pub nodes: BTreeSet<Ino>,
    /// Files whose extents differ.
    pub contents: BTreeSet<Ino>,
    /// Names with a different meaning.
    pub names: BTreeSet<(Ino, Name)>,
}

impl TreeDiff {
    /// Whether the trees are equal.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.contents.is_empty() && self.names.is_empty()
    }
}

impl Tree {
    /// A tree that equals the base.
    pub fn new() -> Tree {
        Tree::default()
    }

    /// Whether the tree equals the base.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The number of nodes that differ from the base.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Number of all entries: nodes, names and extents.
    pub fn entries(&self) -> usize {
        self.nodes.len() + self.dentries.len() + self.extents.len()
    }

    /// The record of a node; `None` if it is as in the base or does not exist.
    pub fn node(&self, ino: Ino) -> Option<&Arc<Node>> {
        self.nodes.get(&ino)
    }

    /// All nodes that differ from the base.
    pub fn nodes(&self) -> impl Iterator<Item = (Ino, &Arc<Node>)> {
        self.nodes.iter().map(|(ino, node)| (*ino, node))
    }

    /// The entry for a name; `None` if the base shows through.
    pub fn dentry(&self, dir: Ino, name: &Name) -> Option<&Dentry> {
        self.dentries.get_by(|(at, there)| (at, there).cmp(&(&dir, name)))
    }

    /// The entries of a directory, sorted by name.
    pub fn dentries(&self, dir: Ino) -> impl Iterator<Item = (&Name, &Dentry)> {
        let from = self.dentries.at_or_after_by(move |(at, _)| first_of(at, dir));
        from.take_while(move |((at, _), _)| *at == dir).map(|((_, name), dentry)| (name, dentry))
    }

    /// The names of a node in this tree: (directory, name), sorted.
    pub fn links(&self, ino: Ino) -> impl Iterator<Item = (Ino, &Name)> {
        let from = self.links.at_or_after_by(move |(at, ..)| first_of(at, ino));
        from.take_while(move |((at, ..), ())| *at == ino).map(|((_, dir, name), ())| (*dir, name))
    }

    /// As [`Tree::links`], for a node whose record is at hand: stops after its link count.
    pub fn links_of(&self, ino: Ino, node: &Node) -> impl Iterator<Item = (Ino, &Name)> {
        let count = if node.kind() == FileKind::Dir { 1 } else { node.meta.nlink };
        self.links(ino).take(count as usize)
    }

    /// The parent directory of `ino` and its name there, by its first name.
    pub fn parent(&self, ino: Ino) -> Option<(Ino, &Name)> {
        self.links(ino).next()
    }

    /// The path of a node by its first name; `None` if it has no name in this tree.
    pub fn path(&self, ino: Ino) -> Option<TreePath> {
        if ino == Ino::ROOT {
            return Some(TreePath::root());
        }
        let (dir, name) = self.parent(ino)?;
        self.path_in(dir, name)
    }

    /// The path of a name in a directory of this tree.
    pub fn path_in(&self, dir: Ino, name: &Name) -> Option<TreePath> {
        let mut names = vec![name];
        let mut at = dir;
        // Real trees are never this deep, although they can exceed PATH_MAX. A cycle would be.
        while at != Ino::ROOT {
            let (up, name) = self.parent(at)?;
            names.push(name);
            at = up;
            if names.len() > 1 << 20 {
                return None;
            }
        }
        let bytes = names.iter().rev().map(|n| n.as_bytes()).collect::<Vec<_>>().join(&b'/');
        TreePath::parse(&bytes).ok()
    }

    /// How many levels a directory is below the root.
    pub fn depth(&self, dir: Ino) -> Option<usize> {
        let mut depth = 0;
        let mut at = dir;
        while at != Ino::ROOT {
            at = self.parent(at)?.0;
            depth += 1;
            if depth > 1 << 20 {
                return None;
            }
        }
        Some(depth)
    }

    /// Applies one edit.
    ///
    /// # Errors
    /// [`Misfit`] if the edit refers to a missing node. The tree is then unchanged.
    pub fn apply(&mut self, edit: &Edit) -> Result<(), Misfit> {
        match edit {
            Edit::Put { ino, node } => drop(self.nodes.insert(*ino, Arc::new((**node).clone()))),
            Edit::Meta { ino, meta } => self.node_mut(*ino)?.meta = *meta,
            Edit::Xattr { ino, name, value } => {
                set_xattr(&mut self.node_mut(*ino)?.xattrs, name, value.as_ref())
            }
            Edit::Resize { ino, size } => self.resize(*ino, *size)?,
            Edit::Map { ino, range, to } => self.map(*ino, *range, *to)?,
            Edit::Dentry { dir, name, to } => self.set_dentry(*dir, name, to.clone())?,
            Edit::Remove { ino } => self.remove(*ino)?,
        }
        Ok(())
    }

    /// Inserts a record with its extents under a number that the tree does not have yet.
    ///
    /// # Errors
    /// [`Misfit`] if the node cannot have content. The record is inserted all the same.
    pub fn put_whole(
        &mut self,
        ino: Ino,
        node: Arc<Node>,
        extents: impl IntoIterator<Item = (ByteRange, Source)>,
    ) -> Result<(), Misfit> {
        self.nodes.insert(ino, node);
        extents.into_iter().try_for_each(|(range, source)| self.map(ino, range, Some(source)))
    }

    fn node_mut(&mut self, ino: Ino) -> Result<&mut Node, Misfit> {
        self.nodes.get_mut(&ino).map(Arc::make_mut).ok_or(Misfit::NO_NODE)
    }

    fn set_dentry(&mut self, dir: Ino, name: &Name, to: Option<Dentry>) -> Result<(), Misfit> {
        if !matches!(self.nodes.get(&dir).map(|n| &n.body), Some(Body::Dir { .. })) {
            return Err(Misfit::NAME_IN_NO_DIRECTORY);
        }
        let key = (dir, name.clone());
        if let Some(Dentry::Child { ino, .. }) = &to {
            self.links.insert((*ino, dir, name.clone()), ());
        }
        let before = match to.clone() {
            Some(dentry) => self.dentries.insert(key, dentry),
            None => self.dentries.remove(&key),
        };
        let still = |ino: Ino| matches!(&to, Some(Dentry::Child { ino: now, .. }) if *now == ino);
        if let Some(Dentry::Child { ino, .. }) = before
            && !still(ino)
        {
            self.links.remove(&(ino, dir, name.clone()));
        }
        Ok(())
    }

    fn remove(&mut self, ino: Ino) -> Result<(), Misfit> {
        self.nodes.remove(&ino).ok_or(Misfit::REMOVAL_OF_NO_NODE)?;
        self.drop_extents(ino, 0);
        let names: Vec<Name> = self.dentries(ino).map(|(name, _)| name.clone()).collect();
        for name in names {
            if let Some(Dentry::Child { ino: child, .. }) =
                self.dentries.remove(&(ino, name.clone()))
            {
                self.links.remove(&(child, ino, name));
            }
        }
        Ok(())
    }

    /// The difference from `self` to `other`. The cost is in proportion to the difference, if one
    /// was cloned from the other.
    pub fn diff(&self, other: &Tree) -> TreeDiff {
        // `collect` builds a set from sorted items in linear time.
        TreeDiff {
            nodes: self.nodes.diff(&other.nodes).copied().collect(),
            contents: self.extents.diff(&other.extents).map(|(ino, _)| *ino).collect(),
            names: self.dentries.diff(&other.dentries).cloned().collect(),
        }
    }

    /// Checks the invariants of the tree.
    ///
    /// # Errors
    /// The first violation, and where it is.
    pub fn verify(&self) -> Result<(), String> {
        for ((dir, name), dentry) in &self.dentries {
            if !matches!(self.nodes.get(dir).map(|n| &n.body), Some(Body::Dir { .. })) {
                return Err(format!(
                    "name {name} stands in {dir:?}, which is not a directory of the tree"
                ));
            }
            if let Dentry::Child { ino, .. } = dentry {
                if !self.nodes.contains_key(ino) {
                    return Err(format!(
                        "name {name} in {dir:?} refers to {ino:?}, which is not in the tree"
                    ));
                }
                if !self.links.contains_key(&(*ino, *dir, name.clone())) {
                    return Err(format!("name {name} in {dir:?} has no reverse link from {ino:?}"));
                }
            }
        }
        for ((ino, dir, name), ()) in &self.links {
            let named = self.dentry(*dir, name);
            if !matches!(named, Some(Dentry::Child { ino: child, .. }) if child == ino) {
                return Err(format!(
                    "reverse link of {ino:?} to {name} in {dir:?} without that name"
                ));
            }
        }
        for (ino, node) in &self.nodes {
            self.verify_node(*ino, node)?;
        }
        let mut before: Option<(Ino, u64, Extent)> = None;
        for ((ino, start), extent) in &self.extents {
            let Some(Body::File { size, .. }) = self.nodes.get(ino).map(|n| &n.body) else {
                return Err(format!("extent of {ino:?}, which is not a file of the tree"));
            };
            if extent.len == 0 || start + extent.len > *size {
                return Err(format!("extent of {ino:?} at {start} ends beyond the size {size}"));
            }
            if let Some((b_ino, b_start, b)) = before
                && b_ino == *ino
            {
                let end = b_start + b.len;
                if end > *start || (end == *start && b.source.advanced(b.len) == extent.source) {
                    return Err(format!(
                        "extents of {ino:?} at {b_start} and {start} overlap or are not joined"
                    ));
                }
            }
            before = Some((*ino, *start, *extent));
        }
        Ok(())
    }

    fn verify_node(&self, ino: Ino, node: &Node) -> Result<(), String> {
        let names = self.links(ino).count();
        let is_dir = matches!(node.body, Body::Dir { .. });
        if ino != Ino::ROOT && names == 0 && (is_dir || node.meta.nlink == 0) {
            return Err(format!("{ino:?} has no name"));
        }
        if is_dir && ino != Ino::ROOT && (names != 1 || self.depth(ino).is_none()) {
            return Err(format!("directory {ino:?} has {names} names or is not below the root"));
        }
        if !is_dir && (node.meta.nlink as usize) < names {
            return Err(format!("{ino:?} has {names} names but counts {} links", node.meta.nlink));
        }
        Ok(())
    }
}

/// Compares a key with the first key of a node: a key of the node itself is greater.
fn first_of(at: &Ino, ino: Ino) -> Ordering {
    at.cmp(&ino).then(Ordering::Greater)
}

/// Sets or removes one attribute. An empty set becomes `None`.
pub fn set_xattr(xattrs: &mut Xattrs, name: &[u8], value: Option<&Vec<u8>>) {
    let mut map = xattrs.take().unwrap_or_default();
    let inner = Arc::make_mut(&mut map);
    match value {
        Some(value) => drop(inner.insert(name.to_vec(), value.clone())),
        None => drop(inner.remove(name)),
    }
    *xattrs = (!map.is_empty()).then_some(map);
}

/// The part of `range` that lies within `[0, size)`.
pub fn within(range: ByteRange, size: u64) -> ByteRange {
    ByteRange { start: range.start.min(size), end: range.end.min(size) }
}
