//! `.jailfs/history`: the files before edits, by path and number.
//!
//! * The names come from the edit histories at each request. Only the last listing is cached, until
//!   the set of edits changes. The mtime of every directory is the time of the last change, so that
//!   the kernel and programs notice an old listing.
//! * An edit is identified by its serial. A process that has a dropped edit open gets ESTALE, never
//!   another edit. No bytes are freed while a request reads them ([`Fs::read_guard`]).
//! * A path that is hidden in the base is not shown here either, also after it was moved.
//! * The permissions of the tree hold: the directory of a path has the mode, owner and ACL of the
//!   live directory. If that does not exist, only the owner of the nearest existing one above may
//!   enter.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::edits::{EditHistory, HistoryName, SavedFile, state_of};
use crate::fs::snapdir::dir_entry;
use crate::fs::snapdir::table::{EditRef, Item, edit_id, history_id};
use crate::fs::{Attr, DirEntry, Entry, Found, Fs, State};
use crate::tree::Meta;
use crate::types::{FileKind, Ino, Name, NodeId, Timestamp, TreePath};

/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;
/// Cookies of names are below this limit, because the kernel treats them as signed offsets.
const COOKIES: u64 = 1 << 62;

/// The last listing, valid until the set of edits changes.
#[derive(Clone)]
pub(super) struct Listing {
    path: TreePath,
    changed: Timestamp,
    names: Arc<Vec<DirEntry>>,
}

impl Fs {
    /// Whether edits are recorded.
    pub(super) fn has_history(&self) -> bool {
        self.core().records_edits()
    }

    /// Asks the edit histories; ENOENT if edits are not recorded.
    fn ask_edits<T>(&self, ask: impl FnOnce(&mut EditHistory) -> T) -> FsResult<T> {
        let mut core = self.writing();
        core.edits.as_mut().filter(|edits| edits.is_on()).map(ask).ok_or(FsError::NotFound)
    }

    /// `.jailfs/history`.
    pub(super) fn history_root(&self) -> FsResult<Entry> {
        let attr = self.attr_of_path(&TreePath::root())?;
        Ok(Entry { id: NodeId::HISTORY, attr: self.snapdir_attr(NodeId::HISTORY, attr) })
    }

    /// Looks up a name in the directory of a path.
    pub(super) fn lookup_in_history(&self, dir: &TreePath, name: &Name) -> FsResult<Entry> {
        self.core().lower.check_not_hidden(dir)?;
        let item =
            self.ask_edits(|edits| edits.resolve_name(dir, name))?.ok_or(FsError::NotFound)?;
        let (attr, first, what) = match item {
            HistoryName::Path(path) => {
                (self.attr_of_path(&path)?, history_id(&path), Item::History(path))
            }
            HistoryName::Edit(saved) => {
                let first = edit_id(dir, saved.number, saved.time);
                (
                    attr_of_saved(&saved),
                    first,
                    Item::Edit(EditRef { path: dir.clone(), serial: saved.serial }),
                )
            }
        };
        let id = self.snapdir.table.lock().hold_at(first, what);
        Ok(Entry { id, attr: self.snapdir_attr(id, attr) })
    }

    /// The attributes of the directory of a path, except its inode number.
    pub(super) fn attr_of_path(&self, path: &TreePath) -> FsResult<Attr> {
        let (changed, has_below) =
            self.ask_edits(|edits| (edits.changed(), edits.has_below(path)))?;
        let (near, is_there) = self.in_live(|state| nearest_dir(state, path))?;
        let mode = match (is_there, has_below) {
            (true, _) => near.mode,
            // The permissions of the removed directory are not known.
            (false, true) => FileKind::Dir.type_bits() | 0o700,
            (false, false) => FileKind::Dir.type_bits() | 0o555,
        };
        // A link count of 1 means that subdirectories are not counted.
        let meta = Meta { mode, nlink: 1, atime: changed, mtime: changed, ctime: changed, ..near };
        Ok(Attr { ino: Ino(0), kind: FileKind::Dir, meta, size: 4096, blocks: 8 })
    }

    /// The attributes of the file before an edit, except its inode number.
    pub(super) fn attr_of_edit(&self, edit: &EditRef) -> FsResult<Attr> {
        self.saved_file(edit).map(|saved| attr_of_saved(&saved))
    }

    fn saved_file(&self, edit: &EditRef) -> FsResult<SavedFile> {
        let saved = self.ask_edits(|edits| edits.saved_file(&edit.path, edit.serial));
        saved.ok().flatten().ok_or(FsError::Stale)
    }

    /// Lists the directory of a path, as [`Fs::readdir`] does.
    ///
    /// The hash of a name is its cookie. So a reader that continues neither misses nor repeats a
    /// name that existed all the time, and no position is stored for it.
    pub(super) fn readdir_in_history(
        &self,
        id: NodeId,
        path: &TreePath,
        after: u64,
        take: &mut dyn FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        self.core().lower.check_not_hidden(path)?;
        let up = path.split().map_or(NodeId::SNAPDIR, |(above, _)| history_id(&above));
        for (cookie, name, ino) in [(1, &b"."[..], id), (2, &b".."[..], up)] {
            if cookie > after && !take(dir_entry(ino, cookie, FileKind::Dir, name)) {
                return Ok(());
            }
        }
        let names = self.history_entries(path)?;
        let from = names.partition_point(|entry| entry.cookie <= after);
        for entry in names.iter().skip(from) {
            if !take(entry.clone()) {
                break;
            }
        }
        Ok(())
    }

    fn history_entries(&self, path: &TreePath) -> FsResult<Arc<Vec<DirEntry>>> {
        let last = self.snapdir.history_listing.lock().clone().filter(|last| last.path == *path);
        let (changed, item) = self.ask_edits(|edits| {
            let changed = edits.changed();
            let is_old = last.as_ref().is_none_or(|last| last.changed != changed);
            (changed, is_old.then(|| edits.all_names(path)))
        })?;
        let (None, Some(last)) = (&item, last) else {
            let mut names: Vec<DirEntry> = item
                .into_iter()
                .flatten()
                .map(|(name, item)| entry_of(path, &name, &item))
                .collect();
            names.sort_unstable_by(|a, b| (a.cookie, &a.name).cmp(&(b.cookie, &b.name)));
            let mut next = FIRST_COOKIE;
            for entry in &mut names {
                entry.cookie = entry.cookie.max(next);
                next = entry.cookie + 1;
            }
            let names = Arc::new(names);
            *self.snapdir.history_listing.lock() =
                Some(Listing { path: path.clone(), changed, names: Arc::clone(&names) });
            return Ok(names);
        };
        Ok(last.names)
    }

    /// Calls `look` with the file before an edit. Calls it again if an apply replaced the base
    /// meanwhile.
    pub(super) fn in_edit<T>(
        &self,
        edit: &EditRef,
        look: impl Fn(&State, &Found) -> FsResult<T>,
    ) -> FsResult<T> {
        let _guard = self.read_again();
        loop {
            let live = Arc::clone(&self.core().state.lower);
            let saved = self.saved_file(edit)?;
            let (state, found) = state_of(self, &saved.content);
            let result = look(&state, &found);
            if Arc::ptr_eq(&live, &self.core().state.lower) {
                return result;
            }
        }
    }

    /// Calls `look` with the live tree. Calls it again if an apply replaced the base meanwhile.
    pub(super) fn in_live<T>(&self, look: impl Fn(&State) -> FsResult<T>) -> FsResult<T> {
        let _guard = self.read_again();
        loop {
            let state = self.state();
            let result = look(&state);
            if Arc::ptr_eq(&state.lower, &self.core().state.lower) {
                return result;
            }
        }
    }
}

/// The attributes of the directory at a path, or of the nearest existing one above it, and whether
/// it is at the path.
fn nearest_dir(state: &State, path: &TreePath) -> FsResult<(Meta, bool)> {
    let mut at = path.clone();
    loop {
        let attr = state.attr(&state.resolve(&at)?).filter(|attr| attr.kind == FileKind::Dir);
        if let Some(attr) = attr {
            return Ok((attr.meta, at == *path));
        }
        at = at.split().ok_or(FsError::NotFound)?.0;
    }
}

fn attr_of_saved(saved: &SavedFile) -> Attr {
    let node = &saved.content.node;
    let blocks =
        saved.content.extents.iter().map(|(range, _)| range.len().div_ceil(4096) * 8).sum();
    // The file may have had other names. They are not names of this node.
    let meta = Meta { nlink: 1, ..node.meta };
    Attr { ino: Ino(0), kind: FileKind::File, meta, size: node.size(), blocks }
}

/// An entry of the directory of a path, with its hash as cookie. The caller resolves collisions.
fn entry_of(dir: &TreePath, name: &Name, item: &HistoryName) -> DirEntry {
    let mut hasher = DefaultHasher::new();
    name.as_bytes().hash(&mut hasher);
    let cookie = FIRST_COOKIE + hasher.finish() % COOKIES;
    let (number, kind) = match item {
        HistoryName::Path(path) => (history_id(path), FileKind::Dir),
        HistoryName::Edit(saved) => (edit_id(dir, saved.number, saved.time), FileKind::File),
    };
    dir_entry(number, cookie, kind, name.as_bytes())
}
