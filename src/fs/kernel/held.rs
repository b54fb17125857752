//! What the kernel holds, seen from outside of it: which file a number means, and by which path it is reached.

use std::collections::BTreeSet;

use crate::fs::kernel::nodes::Place;
use crate::fs::{Core, Fs};
use crate::types::{FileKind, Ino, NodeId, TreePath};

impl Fs {
    /// A path by which a live node is seen now; none for one that is gone, or of which no name is known.
    pub fn path_of(&self, ino: Ino) -> Option<TreePath> {
        self.core().path_of(ino)
    }

    /// By which number the kernel knows a live node, if it does.
    pub fn id_of(&self, ino: Ino) -> Option<NodeId> {
        self.core().table.id_of(ino)
    }

    /// The nodes that a number in `/proc/PID/maps` can mean: the kernel shows there the number that it heard last, which
    /// for a renumbered node is its id until its attributes were asked for.
    pub fn nodes_numbered(&self, number: u64) -> BTreeSet<Ino> {
        let core = self.core();
        let by_id = core
            .table
            .get(NodeId(number))
            .filter(|held| held.place != Place::Orphan)
            .map(|held| held.ino);
        by_id.into_iter().chain(core.table.id_of(Ino(number)).map(|_| Ino(number))).collect()
    }

    /// Those of the nodes that are not gone.
    pub fn live_files(&self, ids: &[NodeId]) -> Vec<Ino> {
        let core = self.core();
        let live = ids
            .iter()
            .filter_map(|id| core.table.get(*id))
            .filter(|held| held.place != Place::Orphan);
        live.map(|held| held.ino).collect()
    }

    /// Those of the nodes that the kernel has not let go of.
    pub fn still_held(&self, ids: &[NodeId]) -> Vec<NodeId> {
        let core = self.core();
        ids.iter().filter(|id| core.table.get(**id).is_some()).copied().collect()
    }

    /// The regular files that the kernel holds and that are not gone.
    pub fn held_files(&self) -> Vec<Ino> {
        let core = self.core();
        let live = core.table.iter().filter_map(|(_, held)| match &held.place {
            Place::Live { base } => Some((held.ino, base.as_ref())),
            Place::Orphan => None,
        });
        let is_file = |ino: Ino, base: Option<&TreePath>| match core.tree.node(ino) {
            Some(node) => node.kind() == FileKind::File,
            None => base
                .and_then(|path| core.lower.lookup(path).ok().flatten())
                .is_some_and(|(_, node)| node.kind() == FileKind::File),
        };
        live.filter(|(ino, base)| is_file(*ino, *base)).map(|(ino, _)| ino).collect()
    }
}

impl Core {
    pub(in crate::fs) fn path_of(&self, ino: Ino) -> Option<TreePath> {
        if ino == Ino::ROOT {
            return Some(TreePath::root());
        }
        let copied_up = self.tree.path(ino);
        let known = self.aliases.get(&ino).into_iter().flatten().filter_map(|(dir, name)| {
            let base = self.table.id_of(*dir).and_then(|id| self.base_path(id));
            Some(self.dir_path(*dir, base.as_ref()).ok()?.join(name))
        });
        let in_base = self.table.id_of(ino).and_then(|id| self.base_path(id)).and_then(|path| {
            let (above, name) = path.split()?;
            let (dir, _) = self.lower.lookup(&above).ok()??;
            Some(self.dir_path(dir, Some(&above)).ok()?.join(&name))
        });
        // Of a file with several names some may have been removed.
        let mut candidates = copied_up.into_iter().chain(in_base).chain(known);
        candidates.find(|path| self.resolve(path).is_ok_and(|found| found.ino() == Some(ino)))
    }

    /// Where a live held node is in the base.
    fn base_path(&self, id: NodeId) -> Option<TreePath> {
        match &self.table.get(id)?.place {
            Place::Live { base } => base.clone(),
            Place::Orphan => None,
        }
    }
}
