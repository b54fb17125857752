//! Validates edits before they are written to the journal.
//!
//! Always true: [`Tree::apply`] accepts each edit of a valid list, in order. So whatever is
//! recorded can be replayed. A journal with one invalid edit would make its whole layer unreadable.

use std::collections::BTreeMap;

use super::{Body, Edit, Misfit, Tree};
use crate::types::Ino;

/// The kind of a node, as far as edits depend on it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Nothing,
    Dir,
    File { size: u64 },
    Other,
}

impl Kind {
    fn for_body(body: &Body) -> Kind {
        match body {
            Body::File { size, .. } => Kind::File { size: *size },
            Body::Dir { .. } => Kind::Dir,
            Body::Symlink { .. } | Body::Special => Kind::Other,
        }
    }
}

impl Tree {
    /// Checks that a list of edits can be applied in order. Does not change the tree.
    ///
    /// # Errors
    /// The error that [`Tree::apply`] would return for the first invalid edit.
    pub fn validate(&self, edits: &[Edit]) -> Result<(), Misfit> {
        let mut changed: BTreeMap<Ino, Kind> = BTreeMap::new();
        for edit in edits {
            let kind_of = |ino: &Ino| {
                let in_tree =
                    || self.node(*ino).map_or(Kind::Nothing, |node| Kind::for_body(&node.body));
                changed.get(ino).copied().unwrap_or_else(in_tree)
            };
            let (ino, becomes) = match edit {
                Edit::Put { ino, node } => (ino, Kind::for_body(&node.body)),
                Edit::Meta { ino, .. } | Edit::Xattr { ino, .. } => match kind_of(ino) {
                    Kind::Nothing => return Err(Misfit::NO_NODE),
                    Kind::Dir | Kind::File { .. } | Kind::Other => continue,
                },
                Edit::Resize { ino, size } => match kind_of(ino) {
                    Kind::Nothing => return Err(Misfit::NO_NODE),
                    Kind::File { .. } => (ino, Kind::File { size: *size }),
                    Kind::Dir | Kind::Other => return Err(Misfit::SIZE_OF_NO_FILE),
                },
                Edit::Map { ino, range, .. } => match kind_of(ino) {
                    Kind::File { size } if range.is_empty() || range.end > size => {
                        return Err(Misfit::BEYOND_THE_END);
                    }
                    Kind::File { .. } => continue,
                    Kind::Nothing | Kind::Dir | Kind::Other => {
                        return Err(Misfit::CONTENT_OF_NO_FILE);
                    }
                },
                Edit::Dentry { dir, .. } => match kind_of(dir) {
                    Kind::Dir => continue,
                    Kind::Nothing | Kind::File { .. } | Kind::Other => {
                        return Err(Misfit::NAME_IN_NO_DIRECTORY);
                    }
                },
                Edit::Remove { ino } => match kind_of(ino) {
                    Kind::Nothing => return Err(Misfit::REMOVAL_OF_NO_NODE),
                    Kind::Dir | Kind::File { .. } | Kind::Other => (ino, Kind::Nothing),
                },
            };
            changed.insert(*ino, becomes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Dentry, Meta, Node};
    use crate::types::{ByteRange, Name, Timestamp};
    use proptest::prelude::*;

    fn node(kind: u8, size: u64) -> Box<Node> {
        let t = Timestamp::default();
        let meta =
            Meta { mode: 0o644, uid: 0, gid: 0, nlink: 1, rdev: 0, atime: t, mtime: t, ctime: t };
        let body = match kind % 3 {
            0 => Body::File { size, origin: None },
            1 => Body::Dir { base: None },
            _ => Body::Special,
        };
        Box::new(Node { meta, xattrs: None, body })
    }

    fn edit() -> impl Strategy<Value = Edit> {
        (0u8..7, 2u64..6, any::<u8>(), 0u64..20, 0u64..20).prop_map(|(which, ino, kind, a, b)| {
            let ino = Ino(ino);
            match which {
                0 => Edit::Put { ino, node: node(kind, a) },
                1 => Edit::Meta { ino, meta: node(kind, a).meta },
                2 => Edit::Xattr { ino, name: b"user.a".to_vec(), value: None },
                3 => Edit::Resize { ino, size: a },
                4 => {
                    Edit::Map { ino, range: ByteRange { start: a.min(b), end: a.max(b) }, to: None }
                }
                5 => {
                    let to = Dentry::Child { ino: Ino(b), hides: None };
                    Edit::Dentry { dir: ino, name: Name::new(b"n").unwrap(), to: Some(to) }
                }
                _ => Edit::Remove { ino },
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn a_list_is_valid_exactly_if_it_can_be_applied(
            before in proptest::collection::vec(edit(), 0..12),
            edits in proptest::collection::vec(edit(), 1..6),
        ) {
            let mut tree = Tree::new();
            for edit in before {
                let _fitted = tree.apply(&edit);
            }
            let validated = tree.validate(&edits);
            let applied = edits.iter().try_for_each(|edit| tree.apply(edit));
            prop_assert_eq!(validated, applied);
        }
    }
}
