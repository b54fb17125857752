//! The tree of an import: the present state, changed entry by entry.
//!
//! Always true: the tree is valid after each call ([`crate::tree::Tree::verify`]), so that any
//! sequence of entries leads to a tree that can be shown.

use std::collections::HashMap;
use std::sync::Arc;

use super::Limits;
use crate::error::{FsError, FsResult, Result};
use crate::fs::{Found, State};
use crate::store::Store;
use crate::store::layer::Upper;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Hides, Meta, Misfit, Node};
use crate::types::{FileKind, Ino, Name, Timestamp, TreePath};

/// A directory: its number, and its path in the base if it merges one.
pub(super) type Dir = (Ino, Option<TreePath>);

/// The cost of an entry besides its names and attributes, in bytes.
const ENTRY: u64 = 256;

/// A state that is being made.
pub(super) struct Builder<'a> {
    pub(super) state: State,
    store: &'a Arc<Store>,
    pub(super) layer: &'a mut Upper,
    pub(super) limits: Limits,
    /// The nodes that archives have, and the number of the archive that had each last.
    seen: HashMap<Ino, u32>,
    archive: u32,
    /// Whether a hard link can lead to a file that no archive has.
    pub(super) takes_unseen_links: bool,
    /// Whether names of whiteouts have a meaning.
    pub(super) has_whiteouts: bool,
    metadata: u64,
    pub(super) entries: u64,
    pub(super) left_out: u64,
    /// The directory of the last entry.
    last_dir: Option<(TreePath, Dir)>,
    now: Timestamp,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        state: State,
        store: &'a Arc<Store>,
        layer: &'a mut Upper,
        limits: Limits,
    ) -> Builder<'a> {
        Builder {
            state,
            store,
            layer,
            limits,
            seen: HashMap::new(),
            archive: 0,
            takes_unseen_links: false,
            has_whiteouts: false,
            metadata: 0,
            entries: 0,
            left_out: 0,
            last_dir: None,
            now: clock::now(),
        }
    }

    pub(super) fn finish(self) -> State {
        self.state
    }

    /// Begins an archive that lies on those before.
    pub(super) fn begin_archive(&mut self) {
        self.archive += 1;
        self.last_dir = None;
    }

    /// Counts an entry with so many bytes of names and attributes. False above the limit.
    pub(super) fn count(&mut self, bytes: u64) -> bool {
        self.entries += 1;
        self.metadata = self.metadata.saturating_add(bytes).saturating_add(ENTRY);
        self.metadata <= self.limits.metadata
    }

    pub(super) fn now(&self) -> Timestamp {
        self.now
    }

    pub(super) fn fresh(&self) -> Result<Ino> {
        self.store.identities().lock().fresh()
    }

    pub(super) fn edit(&mut self, edit: &Edit) -> FsResult<()> {
        self.state.tree.apply(edit).map_err(|Misfit(what)| FsError::Damage(what))
    }

    pub(super) fn see(&mut self, ino: Ino) {
        self.seen.insert(ino, self.archive);
    }

    /// Whether an archive has the node.
    pub(super) fn is_seen(&self, ino: Ino) -> bool {
        self.seen.contains_key(&ino)
    }

    /// Whether the present archive has the node.
    pub(super) fn is_of_this_archive(&self, ino: Ino) -> bool {
        self.seen.get(&ino) == Some(&self.archive)
    }

    /// The node at a name of a directory.
    pub(super) fn find(&self, dir: &Dir, name: &Name) -> FsResult<Found> {
        self.state.find(dir.0, dir.1.as_ref(), name)
    }

    /// The directory at a path. Missing directories are made. `Err` inside is the path of an entry
    /// that is no directory.
    pub(super) fn dir_at(
        &mut self,
        path: &TreePath,
    ) -> FsResult<std::result::Result<Dir, TreePath>> {
        if let Some((last, dir)) = &self.last_dir
            && last == path
        {
            return Ok(Ok(dir.clone()));
        }
        let (mut at, mut walked) = (self.state.root(), TreePath::root());
        self.see(Ino::ROOT);
        for name in path.names() {
            walked = walked.join(&name);
            let found = self.find(&at, &name)?;
            at = match self.state.as_dir(&found) {
                Some(dir) => dir,
                None => match found.ino() {
                    Some(ino) if self.is_seen(ino) || self.takes_unseen_links => {
                        return Ok(Err(walked));
                    }
                    _ => self.make_dir(&at, &name)?,
                },
            };
            self.see(at.0);
        }
        self.last_dir = Some((path.clone(), at.clone()));
        Ok(Ok(at))
    }

    /// Makes a directory that no entry describes yet.
    fn make_dir(&mut self, at: &Dir, name: &Name) -> FsResult<Dir> {
        let meta = Meta {
            mode: FileKind::Dir.type_bits() | 0o755,
            uid: 0,
            gid: 0,
            nlink: 2,
            rdev: 0,
            atime: self.now,
            mtime: self.now,
            ctime: self.now,
        };
        let node = Node { meta, xattrs: None, body: Body::Dir { base: None } };
        let ino = self.put_new(at, name, node)?;
        Ok((ino, None))
    }

    /// Puts a new node at a name, in the place of what is there.
    pub(super) fn put_new(&mut self, at: &Dir, name: &Name, node: Node) -> FsResult<Ino> {
        self.detach(at, name)?;
        let ino = self.fresh()?;
        self.edit(&Edit::Put { ino, node: Box::new(node) })?;
        self.attach(at, name, ino)?;
        Ok(ino)
    }

    /// Puts the record of a base node into the tree.
    pub(super) fn copy_up(&mut self, found: &Found) -> FsResult<()> {
        let Found::Base(ino, path, node) = found else { return Ok(()) };
        for edit in self.state.copy_up_edits(*ino, path, node)? {
            self.edit(&edit)?;
        }
        Ok(())
    }

    /// Puts the record of a directory into the tree.
    fn copy_up_dir(&mut self, dir: &Dir) -> FsResult<()> {
        if self.state.tree.node(dir.0).is_some() {
            return Ok(());
        }
        let path = dir.1.clone().ok_or(FsError::NotFound)?;
        let found = self.state.lower.lookup(&path)?;
        let (ino, node) = found.ok_or_else(|| self.state.lower.drift(&path))?;
        if ino != dir.0 {
            return Err(self.state.lower.drift(&path));
        }
        self.copy_up(&Found::Base(ino, path, node))
    }

    fn hidden(&self, at: &Dir, name: &Name) -> FsResult<Hides> {
        Ok(match self.find(at, name)? {
            Found::Upper(_, hides) | Found::Nothing(hides) => hides,
            Found::Base(ino, _, node) => Some(node.fingerprint(ino)),
        })
    }

    /// Gives a name to a node of the tree. No other node has it.
    pub(super) fn attach(&mut self, at: &Dir, name: &Name, ino: Ino) -> FsResult<()> {
        self.copy_up_dir(at)?;
        let hides = self.hidden(at, name)?;
        let to = Some(Dentry::Child { ino, hides });
        self.edit(&Edit::Dentry { dir: at.0, name: name.clone(), to })?;
        if self.state.tree.node(ino).is_some_and(|node| node.kind() == FileKind::Dir) {
            self.count_subdir(at.0, 1)?;
        }
        Ok(())
    }

    /// Adds to the link count of a directory. One that does not count its subdirectories stays.
    fn count_subdir(&mut self, dir: Ino, by: i64) -> FsResult<()> {
        let Some(node) = self.state.tree.node(dir) else { return Ok(()) };
        let meta = node.meta;
        if meta.nlink < 2 {
            return Ok(());
        }
        let nlink = (i64::from(meta.nlink) + by).max(2);
        let meta = Meta { nlink: u32::try_from(nlink).unwrap_or(u32::MAX), ..meta };
        self.edit(&Edit::Meta { ino: dir, meta })
    }

    /// Removes a name with all below it.
    pub(super) fn detach(&mut self, at: &Dir, name: &Name) -> FsResult<()> {
        let found = self.find(at, name)?;
        if found.ino().is_none() {
            return Ok(());
        }
        self.last_dir = None;
        self.copy_up_dir(at)?;
        let is_dir = self.state.as_dir(&found);
        if let Some(dir) = is_dir.clone() {
            self.empty(dir)?;
        }
        let to = self.hidden(at, name)?.map(Dentry::Whiteout);
        self.edit(&Edit::Dentry { dir: at.0, name: name.clone(), to })?;
        match is_dir {
            Some((ino, _)) => {
                self.count_subdir(at.0, -1)?;
                self.forget(ino)
            }
            None => self.unlink(&found),
        }
    }

    /// Unlinks all nodes below a directory that is about to go. A base file with one name goes with
    /// the directory, so nothing is recorded of it.
    fn empty(&mut self, top: Dir) -> FsResult<()> {
        // Not by recursion: directories nest deeper than the stack.
        let mut dirs = vec![top.clone()];
        let mut all = Vec::new();
        while let Some(dir) = dirs.pop() {
            for name in self.state.merged_names(dir.0, dir.1.as_ref())?.into_keys() {
                let found = self.find(&dir, &name)?;
                match self.state.as_dir(&found) {
                    Some(below) => dirs.push(below),
                    None => self.unlink_in(&dir, &name, &found)?,
                }
            }
            if dir.0 != top.0 {
                all.push(dir.0);
            }
        }
        all.into_iter().try_for_each(|dir| self.forget(dir))
    }

    /// Unlinks a file in a directory that is about to go.
    fn unlink_in(&mut self, dir: &Dir, name: &Name, found: &Found) -> FsResult<()> {
        let is_plain = self.state.attr(found).is_none_or(|attr| attr.meta.nlink < 2);
        if matches!(found, Found::Base(..)) && is_plain {
            return Ok(());
        }
        self.copy_up(found)?;
        self.copy_up_dir(dir)?;
        self.edit(&Edit::Dentry { dir: dir.0, name: name.clone(), to: None })?;
        self.unlink(found)
    }

    /// Takes a name away from a file, and removes it with the last one.
    fn unlink(&mut self, found: &Found) -> FsResult<()> {
        let Some(ino) = found.ino() else { return Ok(()) };
        if let (Found::Base(..), Some(attr)) = (found, self.state.attr(found))
            && attr.meta.nlink > 1
            && self.state.tree.node(ino).is_none()
        {
            // Its further names in the base must show the smaller count.
            let (node, extents) = self.state.record(found)?;
            self.edit(&Edit::Put { ino, node: Box::new(Node::clone(&node)) })?;
            for (range, source) in extents {
                self.edit(&Edit::Map { ino, range, to: Some(source) })?;
            }
        }
        let Some(node) = self.state.tree.node(ino) else {
            self.seen.remove(&ino);
            return Ok(());
        };
        let meta = node.meta;
        if meta.nlink < 2 {
            return self.forget(ino);
        }
        self.edit(&Edit::Meta {
            ino,
            meta: Meta { nlink: meta.nlink - 1, ctime: self.now, ..meta },
        })
    }

    /// Removes a node without a name from the tree.
    fn forget(&mut self, ino: Ino) -> FsResult<()> {
        self.seen.remove(&ino);
        match self.state.tree.node(ino).is_some() {
            true => self.edit(&Edit::Remove { ino }),
            false => Ok(()),
        }
    }
}
