//! `.jailfs/history`: the versions of files as files, by path and number.
//!
//! Always true:
//! * Which names there are is asked of the versions each time; nothing is kept here that could be old but the last listing, which
//!   counts only until the versions change. The time of change of every directory is that of the last change of any version,
//!   so whoever remembers a listing sees by it that it is old.
//! * A version is known by its serial number. One that was given up is ESTALE to whoever has it open, never another one; its
//!   bytes are not given back while somebody reads them ([`Fs::read_guard`]).
//! * What is hidden of the base is not told by this way either, also if it has moved.
//! * Nobody comes by this way to what the tree keeps from him: the directory of a path has mode, owner and ACL of the directory that
//!   is there. Where there is none any more, only the owner of the nearest one above it may look into it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::edits::{EditHistory, Kept, Shown, state_of};
use crate::fs::snapdir::dir_entry;
use crate::fs::snapdir::table::{Version, What, number_of_path, number_of_version};
use crate::fs::{Attr, DirEntry, Entry, Found, Fs, State};
use crate::tree::Meta;
use crate::types::{FileKind, Ino, Name, NodeId, Timestamp, TreePath};

/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;
/// Cookies of names are below this, so that the kernel takes them for positive offsets.
const COOKIES: u64 = 1 << 62;

/// A directory of a path as it was listed when the versions were last changed.
#[derive(Clone)]
pub(super) struct Listing {
    path: TreePath,
    changed: Timestamp,
    names: Arc<Vec<DirEntry>>,
}

impl Fs {
    /// Whether there are versions to be shown.
    pub(super) fn keeps_history(&self) -> bool {
        self.core().keeps_versions()
    }

    /// Asks the versions, if any are kept.
    fn ask_versions<T>(&self, ask: impl FnOnce(&mut EditHistory) -> T) -> FsResult<T> {
        let mut core = self.core();
        core.edits.as_mut().filter(|versions| versions.is_on()).map(ask).ok_or(FsError::NotFound)
    }

    /// `.jailfs/history`.
    pub(super) fn history_root(&self) -> FsResult<Entry> {
        let attr = self.attr_of_path(&TreePath::root())?;
        Ok(Entry { id: NodeId::HISTORY, attr: self.past_attr(NodeId::HISTORY, attr) })
    }

    /// What a name in the directory of a path stands for.
    pub(super) fn lookup_in_history(&self, dir: &TreePath, name: &Name) -> FsResult<Entry> {
        self.core().lower.check_not_hidden(dir)?;
        let shown =
            self.ask_versions(|versions| versions.shown(dir, name))?.ok_or(FsError::NotFound)?;
        let (attr, first, what) = match shown {
            Shown::Path(path) => {
                (self.attr_of_path(&path)?, number_of_path(&path), What::Path(path))
            }
            Shown::Version(kept) => {
                let first = number_of_version(dir, kept.number, kept.time);
                (
                    attr_of_kept(&kept),
                    first,
                    What::Version(Version { path: dir.clone(), serial: kept.serial }),
                )
            }
        };
        let id = self.snapdir.table.lock().hold_at(first, what);
        Ok(Entry { id, attr: self.past_attr(id, attr) })
    }

    /// What `stat` shows of the directory of a path, but its number.
    pub(super) fn attr_of_path(&self, path: &TreePath) -> FsResult<Attr> {
        let (changed, has_below) =
            self.ask_versions(|versions| (versions.changed(), versions.has_below(path)))?;
        let (near, is_there) = self.in_live(|state| nearest_dir(state, path))?;
        let mode = match (is_there, has_below) {
            (true, _) => near.mode,
            // Who could look into it, nobody knows any more.
            (false, true) => FileKind::Dir.type_bits() | 0o700,
            (false, false) => FileKind::Dir.type_bits() | 0o555,
        };
        // One link: the directories in it are not counted.
        let meta = Meta { mode, nlink: 1, atime: changed, mtime: changed, ctime: changed, ..near };
        Ok(Attr { ino: Ino(0), kind: FileKind::Dir, meta, size: 4096, blocks: 8 })
    }

    /// What `stat` shows of a version, but its number.
    pub(super) fn attr_of_version(&self, version: &Version) -> FsResult<Attr> {
        self.kept(version).map(|kept| attr_of_kept(&kept))
    }

    fn kept(&self, version: &Version) -> FsResult<Kept> {
        let kept = self.ask_versions(|versions| versions.kept(&version.path, version.serial));
        kept.ok().flatten().ok_or(FsError::Stale)
    }

    /// Gives the names in the directory of a path to `take`, as [`Fs::readdir`] does.
    ///
    /// They are in the order of their hashes, which are the cookies: so whoever goes on after one neither misses nor repeats any that
    /// was there all the time, whatever came and went, and nothing is kept for him.
    pub(super) fn readdir_in_history(
        &self,
        id: NodeId,
        path: &TreePath,
        after: u64,
        take: &mut dyn FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        self.core().lower.check_not_hidden(path)?;
        let up = path.split().map_or(NodeId::SNAPDIR, |(above, _)| number_of_path(&above));
        for (cookie, name, ino) in [(1, &b"."[..], id), (2, &b".."[..], up)] {
            if cookie > after && !take(dir_entry(ino, cookie, FileKind::Dir, name)) {
                return Ok(());
            }
        }
        let names = self.listed_in_history(path)?;
        let from = names.partition_point(|entry| entry.cookie <= after);
        for entry in names.iter().skip(from) {
            if !take(entry.clone()) {
                break;
            }
        }
        Ok(())
    }

    fn listed_in_history(&self, path: &TreePath) -> FsResult<Arc<Vec<DirEntry>>> {
        let last = self.snapdir.shown.lock().clone().filter(|last| last.path == *path);
        let (changed, shown) = self.ask_versions(|versions| {
            let changed = versions.changed();
            let is_old = last.as_ref().is_none_or(|last| last.changed != changed);
            (changed, is_old.then(|| versions.all_shown(path)))
        })?;
        let (None, Some(last)) = (&shown, last) else {
            let mut names: Vec<DirEntry> = shown
                .into_iter()
                .flatten()
                .map(|(name, shown)| listed(path, &name, &shown))
                .collect();
            names.sort_unstable_by(|a, b| (a.cookie, &a.name).cmp(&(b.cookie, &b.name)));
            let mut next = FIRST_COOKIE;
            for entry in &mut names {
                entry.cookie = entry.cookie.max(next);
                next = entry.cookie + 1;
            }
            let names = Arc::new(names);
            *self.snapdir.shown.lock() =
                Some(Listing { path: path.clone(), changed, names: Arc::clone(&names) });
            return Ok(names);
        };
        Ok(last.names)
    }

    /// Finds something out about a version. What was found out while the base was exchanged does not count.
    pub(super) fn in_version<T>(
        &self,
        version: &Version,
        look: impl Fn(&State, &Found) -> FsResult<T>,
    ) -> FsResult<T> {
        let _guard = self.reclaim.read_again();
        loop {
            let live = Arc::clone(&self.core().state.lower);
            let kept = self.kept(version)?;
            let (state, found) = state_of(self, &kept.content);
            let told = look(&state, &found);
            if Arc::ptr_eq(&live, &self.core().state.lower) {
                return told;
            }
        }
    }

    /// The same about the tree as it is.
    pub(super) fn in_live<T>(&self, look: impl Fn(&State) -> FsResult<T>) -> FsResult<T> {
        let _guard = self.reclaim.read_again();
        loop {
            let state = self.state();
            let told = look(&state);
            if Arc::ptr_eq(&state.lower, &self.core().state.lower) {
                return told;
            }
        }
    }
}

/// The attributes of the directory at a path, or of the nearest one above it that is there; and whether it is at the path.
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

fn attr_of_kept(kept: &Kept) -> Attr {
    let node = &kept.content.node;
    let blocks = kept.content.extents.iter().map(|(range, _)| range.len().div_ceil(4096) * 8).sum();
    // Whatever other names the file had: they are no names of this one.
    let meta = Meta { nlink: 1, ..node.meta };
    Attr { ino: Ino(0), kind: FileKind::File, meta, size: node.size(), blocks }
}

/// A name in the directory of a path, with the cookie that it has if no other name has the same.
fn listed(dir: &TreePath, name: &Name, shown: &Shown) -> DirEntry {
    let mut hasher = DefaultHasher::new();
    name.as_bytes().hash(&mut hasher);
    let cookie = FIRST_COOKIE + hasher.finish() % COOKIES;
    let (number, kind) = match shown {
        Shown::Path(path) => (number_of_path(path), FileKind::Dir),
        Shown::Version(kept) => (number_of_version(dir, kept.number, kept.time), FileKind::File),
    };
    dir_entry(number, cookie, kind, name.as_bytes())
}
