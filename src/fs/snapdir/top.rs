//! The directories `.jailfs`, `.jailfs/checkpoints` and `.jailfs/forks`, and the texts.
//!
//! A text is generated at its lookup and is then a node of its own. So a process that has it open
//! reads it to the end, and its size is right. The kernel is told to look the name up each time.

use std::sync::Arc;

use crate::error::{FsError, FsResult, Kind};
use crate::fs::snapdir::{Item, SnapdirView, Text, dir_entry};
use crate::fs::{Attr, DirEntry, Entry, Fs};
use crate::tree::Meta;
use crate::types::{FileKind, Ino, LayerId, Name, NodeId, Timestamp};

/// The names in `.jailfs`.
pub(super) const CHECKPOINTS: &[u8] = b"checkpoints";
pub(super) const FORKS: &[u8] = b"forks";
pub(super) const HISTORY: &[u8] = b"history";
const STATUS: &[u8] = b"status";
const LOG: &[u8] = b"log";
/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;

impl Fs {
    /// Looks up a name in the snapshot directory, or its own name in the root. `None` if neither
    /// applies.
    pub(in crate::fs) fn lookup_snapdir(
        &self,
        dir: NodeId,
        name: &Name,
    ) -> FsResult<Option<Entry>> {
        if dir.is_in_snapdir() {
            return self.snapdir_lookup(dir, name).map(Some);
        }
        let is_it =
            dir == NodeId::ROOT && self.snapdir_view().is_some_and(|view| view.name == *name);
        if !is_it {
            return Ok(None);
        }
        self.top_entry(NodeId::SNAPDIR).map(Some)
    }

    /// The entry of the snapshot directory in a listing of `dir`, if it is listed there. Its cookie
    /// is the largest.
    pub(in crate::fs) fn snapdir_entry(&self, dir: NodeId) -> Option<DirEntry> {
        if dir != NodeId::ROOT {
            return None;
        }
        let view = self.snapdir_view().filter(|view| view.listed)?;
        Some(dir_entry(
            NodeId::SNAPDIR,
            i64::MAX.unsigned_abs(),
            FileKind::Dir,
            view.name.as_bytes(),
        ))
    }

    fn snapdir_lookup(&self, dir: NodeId, name: &Name) -> FsResult<Entry> {
        match self.snapdir_node(dir)? {
            Item::Top => match name.as_bytes() {
                CHECKPOINTS => self.top_entry(NodeId::CHECKPOINTS),
                FORKS => self.top_entry(NodeId::FORKS),
                HISTORY if self.has_history() => self.history_root(),
                STATUS => self.hold_text(Text::Status),
                LOG => self.hold_text(Text::Log),
                _ => Err(FsError::NotFound),
            },
            Item::Checkpoints => {
                let names = self.checkpoint_names();
                let info = self.checkpoint_named(&names, name).ok_or(FsError::NotFound)?;
                let layer = info.header.layer;
                let label = names.label(&info);
                // Other names are links to this one. A directory with two names would be moved from
                // one to the other by the kernel.
                if label.as_bytes() == name.as_bytes() {
                    return self.hold_root(layer);
                }
                // The time of the seal, because gc may give the layer the time of one below.
                let time = info.seal.as_ref().map_or(info.header.time, |seal| seal.time);
                self.hold_made(Item::Alias(Arc::from(label.as_bytes()), time))
            }
            Item::Text(..) | Item::Alias(..) | Item::Edit(_) => Err(FsError::NotADirectory),
            Item::Node(node) => self.lookup_in_checkpoint(&node, name),
            Item::History(dir) => self.lookup_in_history(&dir, name),
            Item::Forks => self.lookup_fork(name),
            Item::Fork(dir) => self.lookup_in_fork(&dir, name),
        }
    }

    fn top_entry(&self, id: NodeId) -> FsResult<Entry> {
        Ok(Entry { id, attr: self.top_attr(id)? })
    }

    fn hold_text(&self, which: Text) -> FsResult<Entry> {
        let text = self.archive()?.text(which)?;
        self.hold_made(Item::Text(Arc::from(text.into_bytes()), crate::sys::clock::now()))
    }

    fn hold_made(&self, what: Item) -> FsResult<Entry> {
        let id = self.snapdir.table.lock().hold_made(what);
        Ok(Entry { id, attr: self.snapdir_getattr(id)? })
    }

    /// The attributes of a node of the snapshot directory.
    pub(in crate::fs) fn snapdir_getattr(&self, id: NodeId) -> FsResult<Attr> {
        match self.snapdir_node(id)? {
            Item::Top | Item::Checkpoints | Item::Forks => self.top_attr(id),
            Item::Fork(node) => self.attr_in_fork(id, &node),
            Item::Text(text, time) => Ok(made_attr(id, FileKind::File, text.len(), time)),
            Item::Alias(text, time) => Ok(made_attr(id, FileKind::Symlink, text.len(), time)),
            Item::Node(node) => self.attr_in_checkpoint(id, &node),
            Item::History(path) => Ok(self.snapdir_attr(id, self.attr_of_path(&path)?)),
            Item::Edit(edit) => Ok(self.snapdir_attr(id, self.attr_of_edit(&edit)?)),
        }
    }

    /// The attributes of the three directories. Their owner is the user of the daemon.
    fn top_attr(&self, id: NodeId) -> FsResult<Attr> {
        let since = self.snapdir_since();
        let makes = self.snapdir_view().is_some_and(|view: SnapdirView| view.makes);
        let mode = if makes { 0o040_755 } else { 0o040_555 };
        let (mode, names, time) = match id {
            NodeId::SNAPDIR => (0o040_555, 2 + usize::from(self.has_history()), since),
            NodeId::FORKS => {
                let others = self.other_heads()?;
                (mode, others.heads.len(), others.changed)
            }
            _ => {
                // An upper bound: a label that is too long for a name is not listed.
                let (all, last) = self.seen_checkpoints();
                (mode, all, last.unwrap_or_default())
            }
        };
        let nlink = u32::try_from(names).unwrap_or(u32::MAX).saturating_add(2);
        Ok(Attr {
            kind: FileKind::Dir,
            meta: meta(mode, nlink, time.max(since)),
            size: 4096,
            blocks: 8,
            ino: Ino(id.0),
        })
    }

    /// The number of checkpoints that this head sees, and the time of the last seal among them.
    fn seen_checkpoints(&self) -> (usize, Option<Timestamp>) {
        if self.fence().is_none() {
            return self.store.listed();
        }
        let (mut count, mut last) = (0, None);
        let sees = self.visibility();
        self.store.for_each_layer(|info| {
            if let Some(seal) = info.listed_seal().filter(|_| sees(info)) {
                (count, last) = (count + 1, last.max(Some(seal.time)));
            }
        });
        (count, last)
    }

    /// The names in `checkpoints`, sorted: all but automatic seals, each by its label.
    fn listed_checkpoints(&self) -> Vec<(Name, LayerId, Timestamp)> {
        let mut all: Vec<(Name, LayerId, Timestamp)> = Vec::new();
        let names = self.checkpoint_names();
        let sees = self.visibility();
        for info in &self.store.layers_where(sees) {
            let Some(seal) = info.listed_seal() else { continue };
            if let Ok(name) = Name::new(names.label(info).as_bytes()) {
                all.push((name, info.header.layer, seal.time));
            }
        }
        all.sort();
        all
    }

    /// Lists a directory of the snapshot directory, as [`Fs::readdir`] does.
    pub(in crate::fs) fn snapdir_readdir(
        &self,
        id: NodeId,
        after: u64,
        take: &mut dyn FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        let mut entries = match self.snapdir_node(id)? {
            Item::Top => {
                let history = dir_entry(NodeId::HISTORY, FIRST_COOKIE + 3, FileKind::Dir, HISTORY);
                let entries = [
                    dir_entry(NodeId::SNAPDIR, 1, FileKind::Dir, b"."),
                    dir_entry(NodeId::ROOT, 2, FileKind::Dir, b".."),
                    dir_entry(NodeId::CHECKPOINTS, FIRST_COOKIE, FileKind::Dir, CHECKPOINTS),
                    // A text gets its id at its lookup. The listing has a number that no node has.
                    dir_entry(
                        NodeId(NodeId::SNAPDIR.0 + 4),
                        FIRST_COOKIE + 1,
                        FileKind::File,
                        STATUS,
                    ),
                    dir_entry(NodeId(NodeId::SNAPDIR.0 + 5), FIRST_COOKIE + 2, FileKind::File, LOG),
                    dir_entry(NodeId::FORKS, FIRST_COOKIE + 4, FileKind::Dir, FORKS),
                ];
                entries.into_iter().chain(self.has_history().then_some(history)).collect()
            }
            Item::Checkpoints => {
                let mut entries = vec![
                    dir_entry(NodeId::CHECKPOINTS, 1, FileKind::Dir, b"."),
                    dir_entry(NodeId::SNAPDIR, 2, FileKind::Dir, b".."),
                ];
                for (name, layer, _) in self.listed_checkpoints() {
                    // The number of a checkpoint is never reused, so it is a stable cookie.
                    let cookie = FIRST_COOKIE + u64::from(layer.0);
                    let id = super::table::node_id(layer, Ino::ROOT);
                    entries.push(dir_entry(id, cookie, FileKind::Dir, name.as_bytes()));
                }
                entries
            }
            Item::Forks => self.list_heads()?,
            Item::Fork(node) => return self.readdir_in_fork(id, &node, after, take),
            Item::Text(..) | Item::Alias(..) | Item::Edit(_) => {
                return Err(FsError::NotADirectory);
            }
            Item::Node(node) => return self.readdir_in_checkpoint(id, &node, after, take),
            Item::History(path) => return self.readdir_in_history(id, &path, after, take),
        };
        entries.sort_by_key(|entry| entry.cookie);
        for entry in entries.into_iter().filter(|entry| entry.cookie > after) {
            if !take(entry) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The names in `forks`. A hash is the cookie.
    fn list_heads(&self) -> FsResult<Vec<DirEntry>> {
        let mut entries = vec![
            dir_entry(NodeId::FORKS, 1, FileKind::Dir, b"."),
            dir_entry(NodeId::SNAPDIR, 2, FileKind::Dir, b".."),
        ];
        for head in self.other_heads()?.heads {
            let id = super::table::fork_id(&head, Ino::ROOT, None);
            // The ids of two heads could have one place in the range; then one is listed twice or
            // not at all, in a listing of several parts.
            entries.push(dir_entry(id, id.0, FileKind::Dir, head.name.as_bytes()));
        }
        Ok(entries)
    }

    /// Makes a checkpoint for mkdir(2) in `checkpoints`. Called from a thread that serves no
    /// request.
    pub(in crate::fs) fn make_checkpoint(&self, name: &Name) -> FsResult<Entry> {
        if !self.snapdir_view().is_some_and(|view| view.makes) {
            return Err(FsError::ReadOnly);
        }
        if self.checkpoint_named(&self.checkpoint_names(), name).is_some() {
            return Err(FsError::Exists);
        }
        let text = std::str::from_utf8(name.as_bytes()).map_err(|_| FsError::Invalid)?;
        let layer =
            self.archive()?.checkpoint(text.to_owned()).map_err(|error| match error.kind {
                Kind::Usage => FsError::Invalid,
                _ => error.into(),
            })?;
        self.hold_root(layer)
    }
}

fn meta(mode: u32, nlink: u32, time: Timestamp) -> Meta {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    Meta { mode, uid, gid, nlink, rdev: 0, atime: time, mtime: time, ctime: time }
}

fn made_attr(id: NodeId, kind: FileKind, len: usize, time: Timestamp) -> Attr {
    let mode = kind.type_bits() | if kind == FileKind::Symlink { 0o777 } else { 0o444 };
    let size = len as u64;
    Attr { ino: Ino(id.0), kind, meta: meta(mode, 1, time), size, blocks: size.div_ceil(4096) * 8 }
}
