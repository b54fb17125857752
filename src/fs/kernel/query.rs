//! Answers questions about held nodes: which file a number means, and by which path it is reached.

use std::collections::BTreeSet;

use crate::fs::kernel::nodes::{Held, NodeState};
use crate::fs::{Core, Fs};
use crate::types::{FileKind, Ino, NodeId, TreePath};

impl Fs {
    /// A path by which a live node is seen now; none for an orphan, or if no name is known.
    pub fn path_of(&self, ino: Ino) -> Option<TreePath> {
        self.core().path_of(ino)
    }

    /// The id of a live node, if the kernel holds it.
    pub fn id_of(&self, ino: Ino) -> Option<NodeId> {
        self.core().held.id_of(ino)
    }

    /// The live nodes that a number in `/proc/PID/maps` can mean. The kernel shows the number that
    /// it heard last. For a node that is held under another id, that is the id until the kernel has
    /// asked for its attributes.
    pub fn nodes_numbered(&self, number: u64) -> BTreeSet<Ino> {
        let core = self.core();
        let by_id = core.held.get(NodeId(number)).filter(|held| held.is_live());
        let by_ino = core.held.id_of(Ino(number)).map(|_| Ino(number));
        by_id.map(|held| held.ino).into_iter().chain(by_ino).collect()
    }

    /// The numbers of those nodes that are live.
    pub fn live_files(&self, ids: &[NodeId]) -> Vec<Ino> {
        let core = self.core();
        let held = ids.iter().filter_map(|id| core.held.get(*id));
        held.filter(|held| held.is_live()).map(|held| held.ino).collect()
    }

    /// Those nodes that the kernel still holds.
    pub fn still_held(&self, ids: &[NodeId]) -> Vec<NodeId> {
        let core = self.core();
        ids.iter().filter(|id| core.held.get(**id).is_some()).copied().collect()
    }

    /// The number of nodes that the kernel holds, the root included.
    pub fn held_nodes(&self) -> usize {
        self.core().held.count()
    }

    /// The live regular files that the kernel holds.
    pub fn held_files(&self) -> Vec<Ino> {
        let core = self.core();
        let is_file = |held: &Held| match (&held.state, core.tree.node(held.ino)) {
            (NodeState::Orphan, _) => false,
            (NodeState::Live { .. }, Some(node)) => node.kind() == FileKind::File,
            (NodeState::Live { base }, None) => base
                .as_ref()
                .and_then(|path| core.lower.lookup(path).ok().flatten())
                .is_some_and(|(_, node)| node.kind() == FileKind::File),
        };
        core.held.iter().filter(|(_, held)| is_file(held)).map(|(_, held)| held.ino).collect()
    }
}

impl Core {
    /// A path by which a live node is seen now. A file may have lost some of its names.
    pub(in crate::fs) fn path_of(&self, ino: Ino) -> Option<TreePath> {
        if ino == Ino::ROOT {
            return Some(TreePath::root());
        }
        let in_tree = self.tree.path(ino);
        let id = self.held.id_of(ino);
        let in_base = id.and_then(|id| self.held.base_path(id)).and_then(|path| {
            let (above, name) = path.split()?;
            let (dir, _) = self.lower.lookup(&above).ok()??;
            Some(self.dir_path(dir, Some(&above)).ok()?.join(&name))
        });
        let aliases = self.coherence.aliases(ino).filter_map(|(dir, name)| {
            let base = self.held.id_of(*dir).and_then(|id| self.held.base_path(id));
            Some(self.dir_path(*dir, base).ok()?.join(name))
        });
        let mut candidates = in_tree.into_iter().chain(in_base).chain(aliases);
        candidates.find(|path| self.resolve(path).is_ok_and(|found| found.ino() == Some(ino)))
    }
}
