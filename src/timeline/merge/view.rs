//! Looks at one state by inode number: which node a name has, and where a node is.
//!
//! A node that a tree has no record of is in the base, and only its path leads to it. So [`Places`]
//! keeps the base path of each node that a lookup met. All three states of a merge lie over the
//! same epoch of the base, so they share the paths.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use crate::error::{FsError, FsResult};
use crate::fs::{Found, State};
use crate::tree::{Body, Tree};
use crate::types::{FileKind, Ino, Name, TreePath};

/// A name in a directory, which may have a node.
pub(super) type Slot = (Ino, Name);

/// The base paths of nodes that were met so far.
#[derive(Default)]
pub(super) struct Places {
    known: RefCell<HashMap<Ino, TreePath>>,
    /// All base paths of files of which a tree mentions only other names.
    links: RefCell<BTreeMap<TreePath, Ino>>,
}

impl Places {
    /// Notes with which base path a directory of a tree merges.
    pub(super) fn note_dir(&self, tree: &Tree, ino: Ino) {
        if let Some(Body::Dir { base: Some(path) }) = tree.node(ino).map(|node| &node.body) {
            self.known.borrow_mut().insert(ino, path.clone());
        }
    }

    /// Notes all base paths of some files.
    pub(super) fn note_links(&self, links: BTreeMap<TreePath, Ino>) {
        self.links.borrow_mut().extend(links);
    }

    fn links_of(&self, ino: Ino) -> Vec<TreePath> {
        let links = self.links.borrow();
        links.iter().filter(|(_, of)| **of == ino).map(|(path, _)| path.clone()).collect()
    }

    pub(super) fn note(&self, ino: Ino, path: &TreePath) {
        self.known.borrow_mut().insert(ino, path.clone());
    }

    pub(super) fn of(&self, ino: Ino) -> Option<TreePath> {
        if ino == Ino::ROOT {
            return Some(TreePath::root());
        }
        self.known.borrow().get(&ino).cloned()
    }
}

/// A state, and the base paths that were met.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) state: &'a State,
    pub(super) places: &'a Places,
}

impl View<'_> {
    /// The node at a name.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn at(&self, (dir, name): &Slot) -> FsResult<Found> {
        let Some(lower) = self.lower_of(*dir)? else { return Ok(Found::Nothing(None)) };
        let found = self.state.find(*dir, lower.as_ref(), name)?;
        if let Found::Base(ino, path, _) = &found {
            self.places.note(*ino, path);
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
        let Some(path) = self.places.of(ino) else { return Ok(Found::Nothing(None)) };
        match self.state.lower.lookup(&path)? {
            Some((at, node)) if at == ino && self.shows(&path)? => Ok(Found::Base(ino, path, node)),
            _ => Ok(Found::Nothing(None)),
        }
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
                for path in self.places.links_of(ino) {
                    let shown = self.shown_at(&path, ino)?.filter(|path| !paths.contains(path));
                    paths.extend(shown);
                }
            }
            Found::Base(_, path, _) => match path.split() {
                None => paths.push(TreePath::root()),
                Some((above, name)) => {
                    if let Some((dir, _)) = self.state.lower.lookup(&above)? {
                        self.places.note(dir, &above);
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
        self.places.note(dir, &above);
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
