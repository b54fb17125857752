//! The directories `.jailfs` and `.jailfs/checkpoints`, and the texts.
//!
//! A text is made when its name is looked up, and is a node of its own from then on: whoever has it open reads on in what
//! it was, and its size is right. The kernel is told to ask for the name each time.

use std::sync::Arc;

use crate::error::{FsError, FsResult, Kind};
use crate::fs::snapdir::{SnapdirView, Text, What, dir_entry, is_state, name_of};
use crate::fs::{Attr, DirEntry, Entry, Fs};
use crate::tree::Meta;
use crate::types::{FileKind, Ino, LayerId, Name, NodeId, Timestamp};

/// The names in `.jailfs`.
pub(super) const CHECKPOINTS: &[u8] = b"checkpoints";
pub(super) const HISTORY: &[u8] = b"history";
const STATUS: &[u8] = b"status";
const LOG: &[u8] = b"log";
/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;

impl Fs {
    /// What the root says of a name, if it is that of the past.
    pub(in crate::fs) fn enter_past(&self, dir: NodeId, name: &Name) -> FsResult<Option<Entry>> {
        if dir.is_in_snapdir() {
            return self.past_lookup(dir, name).map(Some);
        }
        let is_it =
            dir == NodeId::ROOT && self.snapdir_view().is_some_and(|view| view.name == *name);
        Ok(is_it.then(|| Entry { id: NodeId::SNAPDIR, attr: self.top_attr(NodeId::SNAPDIR) }))
    }

    /// The entry of the past in the listing of the root, if it is listed there. Its cookie is behind all others.
    pub(in crate::fs) fn listed_past(&self, dir: NodeId) -> Option<DirEntry> {
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

    fn past_lookup(&self, dir: NodeId, name: &Name) -> FsResult<Entry> {
        match self.past_node(dir)? {
            What::Top => match name.as_bytes() {
                CHECKPOINTS => {
                    Ok(Entry { id: NodeId::CHECKPOINTS, attr: self.top_attr(NodeId::CHECKPOINTS) })
                }
                HISTORY if self.keeps_history() => self.history_root(),
                STATUS => self.hold_text(Text::Status),
                LOG => self.hold_text(Text::Log),
                _ => Err(FsError::NotFound),
            },
            What::Checkpoints => {
                let info = self.checkpoint_called(name).ok_or(FsError::NotFound)?;
                let layer = info.header.layer;
                match name_of(&info).filter(|called| called.as_bytes() != name.as_bytes()) {
                    // One directory must not have two names, or the kernel would move it from one to the other.
                    Some(called) => {
                        // That of the seal: gc gives a layer the time of one below it.
                        let time = info.seal.as_ref().map_or(info.header.time, |seal| seal.time);
                        let what = What::Alias(Arc::from(called.as_bytes()), time);
                        self.hold_made(what)
                    }
                    None => self.hold_root(layer),
                }
            }
            What::Text(..) | What::Alias(..) | What::Version(_) => Err(FsError::NotADirectory),
            What::Node(node) => self.lookup_in_checkpoint(&node, name),
            What::Path(dir) => self.lookup_in_history(&dir, name),
        }
    }

    fn hold_text(&self, which: Text) -> FsResult<Entry> {
        let text = self.archive()?.text(which)?;
        self.hold_made(What::Text(Arc::from(text.into_bytes()), crate::sys::clock::now()))
    }

    fn hold_made(&self, what: What) -> FsResult<Entry> {
        let id = self.snapdir.table.lock().hold_made(what);
        Ok(Entry { id, attr: self.past_getattr(id)? })
    }

    /// What `stat` shows of a node of the past.
    pub(in crate::fs) fn past_getattr(&self, id: NodeId) -> FsResult<Attr> {
        match self.past_node(id)? {
            What::Top | What::Checkpoints => Ok(self.top_attr(id)),
            What::Text(text, time) => Ok(made_attr(id, FileKind::File, text.len(), time)),
            What::Alias(text, time) => Ok(made_attr(id, FileKind::Symlink, text.len(), time)),
            What::Node(node) => self.attr_in_checkpoint(id, &node),
            What::Path(path) => Ok(self.past_attr(id, self.attr_of_path(&path)?)),
            What::Version(version) => Ok(self.past_attr(id, self.attr_of_version(&version)?)),
        }
    }

    /// What `stat` shows of the two directories: they are of whoever serves the mount.
    fn top_attr(&self, id: NodeId) -> Attr {
        let since = self.past_since();
        let makes = self.snapdir_view().is_some_and(|view: SnapdirView| view.makes);
        let (mode, nlink, time) = if id == NodeId::SNAPDIR {
            (0o040_555, 3 + u32::from(self.keeps_history()), since)
        } else {
            let all = self.listed_checkpoints();
            let last = all.iter().map(|(_, _, time)| *time).max().unwrap_or_default();
            let mode = if makes { 0o040_755 } else { 0o040_555 };
            (mode, u32::try_from(all.len()).unwrap_or(u32::MAX).saturating_add(2), last.max(since))
        };
        Attr {
            kind: FileKind::Dir,
            meta: meta(mode, nlink, time),
            size: 4096,
            blocks: 8,
            ino: Ino(id.0),
        }
    }

    /// The names in `checkpoints`, sorted: what people made, by name or else by number.
    fn listed_checkpoints(&self) -> Vec<(Name, LayerId, Timestamp)> {
        let mut all: Vec<(Name, LayerId, Timestamp)> = Vec::new();
        for info in self.store.catalog().iter().filter(|info| is_state(info)) {
            let Some(seal) = info.seal.as_ref().filter(|seal| !seal.automatic) else { continue };
            let name = seal.name.clone().unwrap_or_else(|| info.header.layer.to_string());
            if let Ok(name) = Name::new(name.as_bytes()) {
                all.push((name, info.header.layer, seal.time));
            }
        }
        all.sort();
        all
    }

    /// Gives the names of a directory of the past to `take`, as [`Fs::readdir`] does.
    pub(in crate::fs) fn past_readdir(
        &self,
        id: NodeId,
        after: u64,
        take: &mut dyn FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        let mut entries = match self.past_node(id)? {
            What::Top => {
                let history = dir_entry(NodeId::HISTORY, FIRST_COOKIE + 3, FileKind::Dir, HISTORY);
                let entries = [
                    dir_entry(NodeId::SNAPDIR, 1, FileKind::Dir, b"."),
                    dir_entry(NodeId::ROOT, 2, FileKind::Dir, b".."),
                    dir_entry(NodeId::CHECKPOINTS, FIRST_COOKIE, FileKind::Dir, CHECKPOINTS),
                    // A text gets its number when it is looked up; until then it has one that nothing else has.
                    dir_entry(
                        NodeId(NodeId::SNAPDIR.0 + 4),
                        FIRST_COOKIE + 1,
                        FileKind::File,
                        STATUS,
                    ),
                    dir_entry(NodeId(NodeId::SNAPDIR.0 + 5), FIRST_COOKIE + 2, FileKind::File, LOG),
                ];
                entries.into_iter().chain(self.keeps_history().then_some(history)).collect()
            }
            What::Checkpoints => {
                let mut entries = vec![
                    dir_entry(NodeId::CHECKPOINTS, 1, FileKind::Dir, b"."),
                    dir_entry(NodeId::SNAPDIR, 2, FileKind::Dir, b".."),
                ];
                for (name, layer, _) in self.listed_checkpoints() {
                    // The number of a checkpoint is never another's, so it can be where a reader goes on.
                    let cookie = FIRST_COOKIE + u64::from(layer.0);
                    let number = super::table::number(layer, Ino::ROOT);
                    entries.push(dir_entry(number, cookie, FileKind::Dir, name.as_bytes()));
                }
                entries
            }
            What::Text(..) | What::Alias(..) | What::Version(_) => {
                return Err(FsError::NotADirectory);
            }
            What::Node(node) => return self.readdir_in_checkpoint(id, &node, after, take),
            What::Path(path) => return self.readdir_in_history(id, &path, after, take),
        };
        entries.sort_by_key(|entry| entry.cookie);
        for entry in entries.into_iter().filter(|entry| entry.cookie > after) {
            if !take(entry) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Makes a checkpoint, as mkdir(2) in `checkpoints`. From a thread that serves no request.
    pub(in crate::fs) fn make_checkpoint(&self, name: &Name) -> FsResult<Entry> {
        if !self.snapdir_view().is_some_and(|view| view.makes) {
            return Err(FsError::ReadOnly);
        }
        if self.checkpoint_called(name).is_some() {
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
