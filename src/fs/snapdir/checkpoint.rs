//! Operations on the tree of a checkpoint.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::extent_reader;
use crate::fs::snapdir::table::node_id;
use crate::fs::snapdir::{CheckpointNode, Item, dir_entry};
use crate::fs::{Attr, DirEntry, Entry, Found, Fs, ReadPlan, SeekTo, State};
use crate::tree::Xattrs;
use crate::types::{ByteRange, FileKind, Ino, Name, NodeId};

/// The names of a directory, sorted. A checkpoint does not change, so the position of a name is its
/// cookie.
pub(super) type Names = Vec<(Name, Ino, Option<FileKind>)>;

/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;

impl CheckpointNode {
    /// The node in the state of its checkpoint.
    pub(super) fn find(&self, state: &State) -> FsResult<Found> {
        if state.tree.node(self.ino).is_some() {
            return Ok(Found::Upper(self.ino, None));
        }
        let Some(path) = &self.base else {
            return Err(FsError::Damage("a held node is in no tree"));
        };
        match state.lower.lookup(path)? {
            Some((ino, node)) if ino == self.ino => Ok(Found::Base(ino, path.clone(), node)),
            _ => Err(state.lower.drift(path)),
        }
    }
}

impl Fs {
    pub(super) fn lookup_in_checkpoint(
        &self,
        dir: &CheckpointNode,
        name: &Name,
    ) -> FsResult<Entry> {
        let (found, attr) = self.in_checkpoint(dir.layer, |state| {
            let (ino, lower) = state.as_dir(&dir.find(state)?).ok_or(FsError::NotADirectory)?;
            state.check_dir(lower.as_ref())?;
            let found = state.find(ino, lower.as_ref(), name)?;
            let attr = state.attr(&found).ok_or(FsError::NotFound)?;
            Ok((found, attr))
        })?;
        let base = match found {
            Found::Base(_, path, _) => Some(path),
            Found::Upper(..) | Found::Nothing(_) => None,
        };
        let id = self.snapdir.table.lock().hold(CheckpointNode {
            layer: dir.layer,
            ino: attr.ino,
            base,
        });
        Ok(Entry { id, attr: self.snapdir_attr(id, attr) })
    }

    pub(super) fn attr_in_checkpoint(&self, id: NodeId, node: &CheckpointNode) -> FsResult<Attr> {
        let attr = self.in_checkpoint(node.layer, |state| {
            state.attr(&node.find(state)?).ok_or(FsError::NotFound)
        })?;
        Ok(self.snapdir_attr(id, attr))
    }

    pub(super) fn readdir_in_checkpoint(
        &self,
        id: NodeId,
        node: &CheckpointNode,
        after: u64,
        take: &mut dyn FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        let (names, up) = self.in_checkpoint(node.layer, |state| {
            let (dir, lower) = state.as_dir(&node.find(state)?).ok_or(FsError::NotADirectory)?;
            state.check_dir(lower.as_ref())?;
            let up = state.parent_of(dir, lower.as_ref())?.map(|(ino, _)| ino);
            let known =
                self.snapdir.listing.lock().clone().filter(|(of, _)| *of == id && after > 0);
            if let Some((_, names)) = known {
                return Ok((names, up));
            }
            let names = state.merged_names(dir, lower.as_ref())?;
            let names: Names =
                names.into_iter().map(|(name, (ino, kind))| (name, ino, kind)).collect();
            Ok((Arc::new(names), up))
        })?;
        *self.snapdir.listing.lock() = Some((id, Arc::clone(&names)));
        let up = up.map_or(NodeId::CHECKPOINTS, |ino| node_id(node.layer, ino));
        for (cookie, name, ino) in [(1, &b"."[..], id), (2, &b".."[..], up)] {
            if cookie > after && !take(dir_entry(ino, cookie, FileKind::Dir, name)) {
                return Ok(());
            }
        }
        let from = usize::try_from(after.saturating_sub(FIRST_COOKIE - 1)).unwrap_or(usize::MAX);
        for (at, (name, ino, kind)) in names.iter().enumerate().skip(from) {
            let kind = match kind {
                Some(kind) => *kind,
                None => self.kind_in_checkpoint(node, name)?,
            };
            let entry = dir_entry(
                node_id(node.layer, *ino),
                FIRST_COOKIE + at as u64,
                kind,
                name.as_bytes(),
            );
            if !take(entry) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn kind_in_checkpoint(&self, dir: &CheckpointNode, name: &Name) -> FsResult<FileKind> {
        self.in_checkpoint(dir.layer, |state| {
            let (ino, lower) = state.as_dir(&dir.find(state)?).ok_or(FsError::NotADirectory)?;
            let found = state.find(ino, lower.as_ref(), name)?;
            Ok(state.attr(&found).map_or(FileKind::File, |attr| attr.kind))
        })
    }

    /// Reads a file in the snapshot directory. With `nowait`, returns `None` if the read would wait
    /// for the disk.
    ///
    /// # Errors
    /// As [`Fs::read`]. ESTALE for a checkpoint that was freed.
    pub fn snapdir_read(
        &self,
        id: NodeId,
        offset: u64,
        len: u64,
        nowait: bool,
    ) -> FsResult<Option<Vec<u8>>> {
        let range = ByteRange::at(offset, len);
        match self.snapdir_node(id)? {
            Item::Top | Item::Checkpoints | Item::Forks | Item::History(_) => {
                Err(FsError::IsADirectory)
            }
            Item::Fork(node) => self.read_in_fork(id, &node, range),
            Item::Alias(..) => Err(FsError::Invalid),
            Item::Text(text, _) => {
                let range = crate::tree::within(range, text.len() as u64);
                let (from, to) = (usize::try_from(range.start), usize::try_from(range.end));
                let part = from.ok().zip(to.ok()).and_then(|(from, to)| text.get(from..to));
                Ok(Some(part.unwrap_or_default().to_vec()))
            }
            Item::Node(node) => self.in_checkpoint(node.layer, |state| {
                let reading = state.lower.reading();
                let pieces = state.plan(&node.find(state)?, range)?;
                ReadPlan::new(pieces, Arc::clone(&state.lower), reading).read(nowait)
            }),
            Item::Edit(edit) => self.in_edit(&edit, |state, found| {
                let reading = state.lower.reading();
                let pieces = state.plan(found, range)?;
                ReadPlan::new(pieces, Arc::clone(&state.lower), reading).read(nowait)
            }),
        }
    }

    /// Finds data or a hole in a file of the snapshot directory.
    pub(in crate::fs) fn snapdir_seek(&self, id: NodeId, offset: u64, to: SeekTo) -> FsResult<u64> {
        match self.snapdir_node(id)? {
            Item::Node(node) => self
                .in_checkpoint(node.layer, |state| seek_in(state, &node.find(state)?, offset, to)),
            Item::Edit(edit) => {
                self.in_edit(&edit, |state, found| seek_in(state, found, offset, to))
            }
            Item::Fork(node) => {
                self.in_fork(&node, |state, found| seek_in(state, found, offset, to))
            }
            Item::Text(text, _) => {
                let size = text.len() as u64;
                match to {
                    _ if offset >= size => Err(FsError::NoSuchOffset),
                    SeekTo::Data => Ok(offset),
                    SeekTo::Hole => Ok(size),
                }
            }
            Item::Top | Item::Checkpoints | Item::Forks | Item::Alias(..) | Item::History(_) => {
                Err(FsError::Invalid)
            }
        }
    }

    /// The first data in a range of a file of the snapshot directory, as [`Fs::next_data`].
    pub(in crate::fs) fn snapdir_data(
        &self,
        id: NodeId,
        range: ByteRange,
    ) -> FsResult<(u64, Option<ByteRange>)> {
        match self.snapdir_node(id)? {
            Item::Node(node) => {
                self.in_checkpoint(node.layer, |state| state.first_data(&node.find(state)?, range))
            }
            Item::Edit(edit) => self.in_edit(&edit, |state, found| state.first_data(found, range)),
            Item::Fork(node) => self.in_fork(&node, |state, found| state.first_data(found, range)),
            Item::Text(text, _) => {
                let range = crate::tree::within(range, text.len() as u64);
                Ok((range.end, (!range.is_empty()).then_some(range)))
            }
            Item::Top | Item::Checkpoints | Item::Forks | Item::Alias(..) | Item::History(_) => {
                Err(FsError::Invalid)
            }
        }
    }

    /// The extended attributes of a node of the snapshot directory.
    pub(in crate::fs) fn snapdir_xattrs(&self, id: NodeId) -> FsResult<Xattrs> {
        match self.snapdir_node(id)? {
            Item::Node(node) => {
                self.in_checkpoint(node.layer, |state| xattrs_in(state, node.find(state)?))
            }
            Item::Edit(edit) => self.in_edit(&edit, |state, found| xattrs_in(state, found.clone())),
            Item::Fork(node) => self.in_fork(&node, |state, found| xattrs_in(state, found.clone())),
            // Those of the live directory, because its ACL also protects its histories.
            Item::History(path) => self.in_live(|state| {
                let found = state.resolve(&path)?;
                if state.as_dir(&found).is_some() { xattrs_in(state, found) } else { Ok(None) }
            }),
            Item::Top | Item::Checkpoints | Item::Forks => Ok(None),
            Item::Text(..) | Item::Alias(..) => Ok(None),
        }
    }
}

fn xattrs_in(state: &State, found: Found) -> FsResult<Xattrs> {
    match found {
        Found::Base(_, path, lower) => state.lower.xattrs(&path, &lower),
        found => Ok(state.record(&found)?.0.xattrs.clone()),
    }
}

fn seek_in(state: &State, found: &Found, offset: u64, to: SeekTo) -> FsResult<u64> {
    let size = state.attr(found).ok_or(FsError::NotFound)?.size;
    if offset >= size {
        return Err(FsError::NoSuchOffset);
    }
    let _reading = state.lower.reading();
    extent_reader::seek(|range| state.plan(found, range), offset, size, to)
}
