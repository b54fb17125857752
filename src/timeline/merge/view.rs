//! Looks at one state by inode number: which node a name has, and where a node is.
//!
//! A node that a tree has no record of is in the base, and only its path leads to it. So [`Places`]
//! keeps the base path of each node that a lookup met.
//!
//! Each state of a merge reads the base as it was in its own epoch. A node has the same number in
//! all epochs, but an apply can have moved it. So the paths are kept by epoch, and a path that is
//! known of another epoch is only tried.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};

use crate::error::{FsError, FsResult};
use crate::fs::{Found, State};
use crate::tree::Body;
use crate::types::{Epoch, FileKind, Ino, Name, TreePath};

/// A name in a directory, which may have a node.
pub(super) type Slot = (Ino, Name);

/// The base paths of nodes that were met so far.
#[derive(Default)]
pub(super) struct Places(RefCell<BTreeMap<Epoch, InEpoch>>);

/// The paths in one epoch of the base.
#[derive(Default)]
struct InEpoch {
    known: HashMap<Ino, TreePath>,
    /// All base paths of files of which a tree mentions only other names.
    links: BTreeMap<TreePath, Ino>,
}

impl Places {
    fn in_epoch<T>(&self, epoch: Epoch, then: impl FnOnce(&mut InEpoch) -> T) -> T {
        then(self.0.borrow_mut().entry(epoch).or_default())
    }

    fn note(&self, epoch: Epoch, ino: Ino, path: &TreePath) {
        self.in_epoch(epoch, |places| places.known.insert(ino, path.clone()));
    }

    fn links_of(&self, epoch: Epoch, ino: Ino) -> Vec<TreePath> {
        self.in_epoch(epoch, |places| {
            let links = places.links.iter().filter(|(_, of)| **of == ino);
            links.map(|(path, _)| path.clone()).collect()
        })
    }

    /// The paths at which a node may be in an epoch: the one that is known, or else those of other
    /// epochs.
    fn of(&self, epoch: Epoch, ino: Ino) -> Vec<TreePath> {
        if ino == Ino::ROOT {
            return vec![TreePath::root()];
        }
        let all = self.0.borrow();
        if let Some(known) = all.get(&epoch).and_then(|places| places.known.get(&ino)) {
            return vec![known.clone()];
        }
        all.values().filter_map(|places| places.known.get(&ino).cloned()).collect()
    }
}

/// A state, and the base paths that were met.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) state: &'a State,
    pub(super) places: &'a Places,
}

impl View<'_> {
    fn epoch(&self) -> Epoch {
        self.state.lower.epoch()
    }

    /// Notes that the base has a node at a path.
    pub(super) fn note(&self, ino: Ino, path: &TreePath) {
        self.places.note(self.epoch(), ino, path);
    }

    /// Notes and returns the node that the base has at a path.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn note_at(&self, path: &TreePath) -> FsResult<Option<Ino>> {
        let ino = self.state.lower.lookup(path)?.map(|(ino, _)| ino);
        ino.iter().for_each(|ino| self.note(*ino, path));
        Ok(ino)
    }

    /// Notes with which base path a directory of the tree merges.
    pub(super) fn note_dir(&self, ino: Ino) {
        if let Some(Body::Dir { base: Some(path) }) = self.state.tree.node(ino).map(|n| &n.body) {
            self.note(ino, path);
        }
    }

    /// Finds and notes all base paths of some files. This is a scan of the base.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn note_links(&self, wanted: &HashSet<Ino>) -> FsResult<()> {
        let links = self.state.lower.names_of(wanted)?;
        self.places.in_epoch(self.epoch(), |places| places.links.extend(links));
        Ok(())
    }

    /// The node at a name.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn at(&self, (dir, name): &Slot) -> FsResult<Found> {
        let Some(lower) = self.lower_of(*dir)? else { return Ok(Found::Nothing(None)) };
        let found = self.state.find(*dir, lower.as_ref(), name)?;
        if let Found::Base(ino, path, _) = &found {
            self.note(*ino, path);
        }
        Ok(found)
    }

    /// A node, if the state has it.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn node(&self, ino: Ino) -> FsResult<Found> {
        if self.state.tree.node(ino).is_some() {
            return Ok(Found::Upper(ino, None));
        }
        for path in self.places.of(self.epoch(), ino) {
            if let Some((at, node)) = self.state.lower.lookup(&path)?
                && at == ino
                && self.shows(&path)?
            {
                return Ok(Found::Base(ino, path, node));
            }
        }
        Ok(Found::Nothing(None))
    }

    /// The base path that a directory merges with. The outer `None` says that the state has no such
    /// directory.
    pub(super) fn lower_of(&self, dir: Ino) -> FsResult<Option<Option<TreePath>>> {
        Ok(match self.node(dir)? {
            Found::Upper(..) => self.state.lower_path(dir).ok(),
            Found::Base(_, path, node) => (node.kind() == FileKind::Dir).then_some(Some(path)),
            Found::Nothing(_) => None,
        })
    }

    /// The names in a directory; none if the state does not have it.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn names(&self, dir: Ino) -> FsResult<Vec<Name>> {
        let Some(lower) = self.lower_of(dir)? else { return Ok(Vec::new()) };
        Ok(self.state.merged_names(dir, lower.as_ref())?.into_keys().collect())
    }

    /// The directory above a directory; none for the root, and for a directory that the state does
    /// not have.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn parent(&self, dir: Ino) -> FsResult<Option<Ino>> {
        let Some(lower) = self.lower_of(dir)? else { return Ok(None) };
        Ok(self.state.parent_of(dir, lower.as_ref())?.map(|(above, _)| above))
    }

    /// The path of a directory; none if the state does not have it.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn dir_path(&self, dir: Ino) -> FsResult<Option<TreePath>> {
        let Some(lower) = self.lower_of(dir)? else { return Ok(None) };
        match self.state.dir_path(dir, lower.as_ref()) {
            Ok(path) => Ok(Some(path)),
            Err(FsError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the state shows what the base has at a path.
    fn shows(&self, path: &TreePath) -> FsResult<bool> {
        let mut path = path.clone();
        while let Some((above, name)) = path.split() {
            let Some((dir, _)) = self.state.lower.lookup(&above)? else { return Ok(false) };
            match self.state.tree.node(dir).map(|node| &node.body) {
                Some(Body::Dir { base: Some(base) }) if *base == above => {
                    return Ok(self.state.tree.dentry(dir, &name).is_none());
                }
                Some(_) => return Ok(false),
                None => path = above,
            }
        }
        Ok(true)
    }
}

impl View<'_> {
    /// The known paths of a node.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn paths_of(&self, ino: Ino) -> FsResult<Vec<TreePath>> {
        let mut paths = Vec::new();
        match self.node(ino)? {
            Found::Upper(..) if ino == Ino::ROOT => paths.push(TreePath::root()),
            Found::Upper(..) => {
                let tree = &self.state.tree;
                paths.extend(tree.links(ino).filter_map(|(dir, name)| tree.path_in(dir, name)));
                for path in self.places.links_of(self.epoch(), ino) {
                    let shown = self.shown_at(&path, ino)?.filter(|path| !paths.contains(path));
                    paths.extend(shown);
                }
            }
            Found::Base(_, path, _) => match path.split() {
                None => paths.push(TreePath::root()),
                Some((above, name)) => {
                    if let Some((dir, _)) = self.state.lower.lookup(&above)? {
                        self.note(dir, &above);
                        paths.extend(self.dir_path(dir)?.map(|dir| dir.join(&name)));
                    }
                }
            },
            Found::Nothing(_) => {}
        }
        Ok(paths)
    }

    /// The path at which the state shows a node that the base has at `path`; none if it does not.
    fn shown_at(&self, path: &TreePath, ino: Ino) -> FsResult<Option<TreePath>> {
        let Some((above, name)) = path.split() else { return Ok(None) };
        let Some((dir, _)) = self.state.lower.lookup(&above)? else { return Ok(None) };
        self.note(dir, &above);
        if self.at(&(dir, name.clone()))?.ino() != Some(ino) {
            return Ok(None);
        }
        Ok(self.dir_path(dir)?.map(|dir| dir.join(&name)))
    }

    /// Whether the tree mentions only other names of a file than the base has.
    pub(super) fn has_unseen_names(&self, ino: Ino) -> bool {
        let tree = &self.state.tree;
        tree.node(ino).is_some_and(|node| {
            node.kind() != FileKind::Dir
                && node.meta.nlink as usize > tree.links_of(ino, node).count()
        })
    }
}
