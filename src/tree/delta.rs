//! Computes the shortest list of edits from one tree to another.
//!
//! Replaying the edits over the first tree gives exactly the second. So a journal can be compacted
//! to its outcome, and a whole tree can be written as the edits that lead to it from the empty one.

use super::{Body, Edit, Tree};
use crate::types::{ByteRange, Ino};

impl Tree {
    /// The edits that lead from `self` to `other`, in an order in which each is valid. The cost is
    /// in proportion to the difference, if one tree was cloned from the other.
    pub fn edits_to<'t>(&'t self, other: &'t Tree) -> impl Iterator<Item = Edit> + 't {
        let diff = self.diff(other);
        let gone: Vec<Ino> =
            diff.nodes.iter().copied().filter(|ino| other.node(*ino).is_none()).collect();
        let nodes = diff.nodes.into_iter().flat_map(|ino| self.node_edits(other, ino));
        let contents = diff.contents.into_iter().flat_map(|ino| self.content_edits(other, ino));
        // Removing a directory removes its names.
        let names = diff.names.into_iter().filter(|(dir, _)| other.node(*dir).is_some());
        let names = names.map(|(dir, name)| {
            let to = other.dentry(dir, &name).cloned();
            Edit::Dentry { dir, name, to }
        });
        nodes.chain(contents).chain(names).chain(gone.into_iter().map(|ino| Edit::Remove { ino }))
    }

    fn node_edits(&self, other: &Tree, ino: Ino) -> Vec<Edit> {
        let Some(node) = other.node(ino) else { return Vec::new() };
        let put = Edit::Put { ino, node: Box::new((**node).clone()) };
        // `Put` keeps the extents of the old record, so those beyond the new size must go first.
        match (self.node(ino).map(|n| &n.body), &node.body) {
            (Some(Body::File { size: before, .. }), Body::File { size, .. }) if size < before => {
                vec![Edit::Resize { ino, size: *size }, put]
            }
            _ => vec![put],
        }
    }

    fn content_edits(&self, other: &Tree, ino: Ino) -> Vec<Edit> {
        let Some(Body::File { size, .. }) = other.node(ino).map(|n| &n.body) else {
            return Vec::new();
        };
        let mut edits = Vec::new();
        // Holes first: a new extent joins its neighbours, so outdated ones must be gone.
        for (start, extent) in self.extents(ino).filter(|(start, _)| start < size) {
            let range = ByteRange { start, end: (start + extent.len).min(*size) };
            for hole in other.segments(ino, range).iter().filter(|segment| segment.source.is_none())
            {
                edits.push(Edit::Map { ino, range: hole.range, to: None });
            }
        }
        for (start, extent) in other.extents(ino) {
            if self.extent_at(ino, start) != Some((start, extent)) {
                let range = ByteRange::at(start, extent.len);
                edits.push(Edit::Map { ino, range, to: Some(extent.source) });
            }
        }
        edits
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::{Dentry, Meta, Node, Source};
    use crate::types::{Fingerprint, LayerId, Name, Timestamp};

    const T: Timestamp = Timestamp { secs: 0, nanos: 0 };

    fn node(mode: u32, body: Body) -> Node {
        let meta = Meta { mode, uid: 0, gid: 0, nlink: 1, rdev: 0, atime: T, mtime: T, ctime: T };
        Node { meta, xattrs: None, body }
    }

    /// An edit from four numbers. It may be invalid, which shows when it is applied.
    fn edit((kind, ino, a, b): (u8, u64, u64, u64)) -> Edit {
        let ino = Ino(ino);
        let name = Name::new(format!("n{}", a % 4).as_bytes()).unwrap();
        let print =
            std::sync::Arc::new(Fingerprint { dev: 0, ino: a, size: 0, mtime: T, ctime: T });
        match kind {
            // A number never changes its kind.
            0..3 => {
                let (mode, body) = match ino.0 {
                    0..2 => (0o40_755, Body::Dir { base: None }),
                    2..5 => (0o100_644, Body::File { size: 100 + b % 3, origin: None }),
                    _ => (0o120_777, Body::Symlink { target: vec![b as u8] }),
                };
                Edit::Put { ino, node: Box::new(node(mode, body)) }
            }
            3 => Edit::Resize { ino, size: b },
            4 => Edit::Map { ino, range: ByteRange::at(a, b % 40), to: None },
            5 => Edit::Remove { ino },
            6 => Edit::Dentry {
                dir: ino,
                name,
                to: Some(Dentry::Child { ino: Ino(b % 6), hides: None }),
            },
            7 => Edit::Dentry { dir: ino, name, to: Some(Dentry::Whiteout(print)) },
            8 => Edit::Dentry { dir: ino, name, to: None },
            _ => {
                let to = Some(Source::Pool { layer: LayerId(b as u32 % 2), offset: a });
                Edit::Map { ino, range: ByteRange::at(a, b % 40), to }
            }
        }
    }

    fn are_equal(a: &Tree, b: &Tree) -> bool {
        a.nodes.iter().eq(b.nodes.iter())
            && a.dentries.iter().eq(b.dentries.iter())
            && a.links.iter().eq(b.links.iter())
            && a.extents.iter().eq(b.extents.iter())
    }

    /// The filesystem never puts a record that is too small for the existing content.
    fn has_room(tree: &Tree, edit: &Edit) -> bool {
        let Edit::Put { ino, node } = edit else { return true };
        tree.size(*ino) <= node.size()
    }

    proptest! {
        #[test]
        fn replaying_the_edits_gives_the_other_tree(
            edits in prop::collection::vec((0u8..14, 0u64..6, 0u64..90, 0u64..120), 1..120),
            cut in 0usize..120,
        ) {
            let mut tree = Tree::new();
            let mut first = tree.clone();
            for (at, words) in edits.into_iter().enumerate() {
                let edit = edit(words);
                if has_room(&tree, &edit) {
                    tree.apply(&edit).ok();
                }
                if at == cut {
                    first = tree.clone();
                }
            }
            for (from, to) in [(&first, &tree), (&tree, &first), (&Tree::new(), &tree)] {
                let mut made = from.clone();
                for edit in from.edits_to(to) {
                    prop_assert!(made.apply(&edit).is_ok(), "{edit:?} is invalid");
                }
                prop_assert!(are_equal(&made, to));
            }
        }
    }
}
