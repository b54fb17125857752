//! Whether edits fit a tree, before anything is written of them.
//!
//! Always true: [`Tree::apply`] takes the edits of a list that fits, each after those before it. So what is recorded can
//! always be replayed; a journal with an edit that does not fit would make its layer unreadable.

use std::collections::BTreeMap;

use super::{Body, Edit, Misfit, Tree};
use crate::types::Ino;

/// What an edit can be about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stands {
    Nothing,
    Dir,
    File { size: u64 },
    Other,
}

impl Stands {
    fn for_body(body: &Body) -> Stands {
        match body {
            Body::File { size, .. } => Stands::File { size: *size },
            Body::Dir { .. } => Stands::Dir,
            Body::Symlink { .. } | Body::Special => Stands::Other,
        }
    }
}

impl Tree {
    /// Finds out whether all of a list of edits can be applied, one after the other. The tree stays as it is.
    ///
    /// # Errors
    /// What [`Tree::apply`] would answer to the first one that does not fit.
    pub fn fits(&self, edits: &[Edit]) -> Result<(), Misfit> {
        let mut changed: BTreeMap<Ino, Stands> = BTreeMap::new();
        for edit in edits {
            let stands = |ino: &Ino| {
                let in_tree = || self.node(*ino).map_or(Stands::Nothing, |node| Stands::for_body(&node.body));
                changed.get(ino).copied().unwrap_or_else(in_tree)
            };
            let (ino, becomes) = match edit {
                Edit::Put { ino, node } => (ino, Stands::for_body(&node.body)),
                Edit::Meta { ino, .. } | Edit::Xattr { ino, .. } => match stands(ino) {
                    Stands::Nothing => return Err(Misfit::NO_NODE),
                    Stands::Dir | Stands::File { .. } | Stands::Other => continue,
                },
                Edit::Resize { ino, size } => match stands(ino) {
                    Stands::Nothing => return Err(Misfit::NO_NODE),
                    Stands::File { .. } => (ino, Stands::File { size: *size }),
                    Stands::Dir | Stands::Other => return Err(Misfit::SIZE_OF_NO_FILE),
                },
                Edit::Map { ino, range, .. } => match stands(ino) {
                    Stands::File { size } if range.is_empty() || range.end > size => {
                        return Err(Misfit::BEYOND_THE_END);
                    }
                    Stands::File { .. } => continue,
                    Stands::Nothing | Stands::Dir | Stands::Other => {
                        return Err(Misfit::CONTENT_OF_NO_FILE);
                    }
                },
                Edit::Dentry { dir, .. } => match stands(dir) {
                    Stands::Dir => continue,
                    Stands::Nothing | Stands::File { .. } | Stands::Other => {
                        return Err(Misfit::NAME_IN_NO_DIRECTORY);
                    }
                },
                Edit::Remove { ino } => match stands(ino) {
                    Stands::Nothing => return Err(Misfit::REMOVAL_OF_NO_NODE),
                    Stands::Dir | Stands::File { .. } | Stands::Other => (ino, Stands::Nothing),
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
        let meta = Meta { mode: 0o644, uid: 0, gid: 0, nlink: 1, rdev: 0, atime: t, mtime: t, ctime: t };
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
                4 => Edit::Map { ino, range: ByteRange { start: a.min(b), end: a.max(b) }, to: None },
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
        fn edits_fit_exactly_if_they_can_be_applied(
            before in proptest::collection::vec(edit(), 0..12),
            edits in proptest::collection::vec(edit(), 1..6),
        ) {
            let mut tree = Tree::new();
            for edit in before {
                let _fitted = tree.apply(&edit);
            }
            let said = tree.fits(&edits);
            let done = edits.iter().try_for_each(|edit| tree.apply(edit));
            prop_assert_eq!(said, done);
        }
    }
}
