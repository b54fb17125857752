//! Answers questions about held nodes: which file a number means, and by which path it is reached.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::FsResult;
use crate::fs::kernel::nodes::NodeState;
use crate::fs::merged::answers;
use crate::fs::{Core, Fs};
use crate::types::{FileKind, Ino, NodeId, TreePath};

impl Fs {
    /// A path by which a live node is seen now; none for an orphan, or if no name is known.
    pub fn path_of(&self, ino: Ino) -> Option<TreePath> {
        self.with_core(|core| core.path_of(ino)).ok().flatten()
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
        let (mut files, mut in_base) = (Vec::new(), Vec::new());
        let lower = {
            let core = self.core();
            for (_, held) in core.held.iter() {
                match (&held.state, core.tree.node(held.ino)) {
                    (NodeState::Orphan, _) | (NodeState::Live { base: None }, None) => {}
                    (NodeState::Live { .. }, Some(node)) if node.kind() != FileKind::File => {}
                    (NodeState::Live { .. }, Some(_)) => files.push(held.ino),
                    (NodeState::Live { base: Some(path) }, None) => {
                        in_base.push((held.ino, path.clone()));
                    }
                }
            }
            Arc::clone(&core.lower)
        };
        let is_file = |path: &TreePath| {
            let found = lower.lookup(path).ok().flatten();
            found.is_some_and(|(_, node)| node.kind() == FileKind::File)
        };
        files.extend(in_base.into_iter().filter(|(_, path)| is_file(path)).map(|(ino, _)| ino));
        files
    }
}

impl Core {
    /// A path by which a live node is seen now. A file may have lost some of its names.
    ///
    /// # Errors
    /// [`FsError::MustWait`](crate::error::FsError::MustWait).
    pub(in crate::fs) fn path_of(&self, ino: Ino) -> FsResult<Option<TreePath>> {
        if ino == Ino::ROOT {
            return Ok(Some(TreePath::root()));
        }
        for path in self.paths_seen(ino)? {
            let found = answers::known(self.resolve(&path))?;
            if found.is_some_and(|found| found.ino() == Some(ino)) {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// The paths by which the kernel may see a node.
    fn paths_seen(&self, ino: Ino) -> FsResult<Vec<TreePath>> {
        let mut paths = Vec::new();
        paths.extend(self.tree.path(ino));
        if let Some((above, name)) =
            self.held.id_of(ino).and_then(|id| self.held.base_path(id)?.split())
            && let Some((dir, _)) = answers::known(self.lower.lookup(&above))?.flatten()
            && let Some(dir) = answers::known(self.dir_path(dir, Some(&above)))?
        {
            paths.push(dir.join(&name));
        }
        for (dir, name) in self.coherence.aliases(ino) {
            let base = self.held.id_of(*dir).and_then(|id| self.held.base_path(id));
            let dir = answers::known(self.dir_path(*dir, base))?;
            paths.extend(dir.map(|dir| dir.join(name)));
        }
        Ok(paths)
    }
}
