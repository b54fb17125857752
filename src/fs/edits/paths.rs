//! The versions as names: what the directories of `.jailfs/history` have.
//!
//! A path with versions is a directory of them, by number. At the same path there may be, or have been, a directory in which
//! something has versions: then it is both. Should something in it be called as one of the numbers, that keeps its name, so that
//! every path of the tree is found by itself, and the version has an `@` before its number; as many as it takes.
//!
//! A version that says that there was no file is no name: there is nothing to show.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use super::{EditHistory, Entry};
use crate::fs::Fs;
use crate::store::edits_log::{Content, EditsLogRecord};
use crate::sys::clock;
use crate::types::{FileKind, Name, Timestamp, TreePath};

/// A version that is a file, as whoever holds it knows it.
#[derive(Clone)]
pub(in crate::fs) struct Kept {
    /// No other version has it while the head is open.
    pub(in crate::fs) serial: u64,
    /// Its number.
    pub(in crate::fs) number: u32,
    /// When the edit began that replaced it.
    pub(in crate::fs) time: Timestamp,
    /// What the file was.
    pub(in crate::fs) content: Arc<Content>,
}

/// What a name stands for.
pub(in crate::fs) enum Shown {
    /// A path that has versions, or below which something has some.
    Path(TreePath),
    /// A version of the directory's own path.
    Version(Kept),
}

fn just_after(time: Timestamp) -> Timestamp {
    match time.nanos {
        999_999_999.. => Timestamp { secs: time.secs.saturating_add(1), nanos: 0 },
        nanos => Timestamp { nanos: nanos + 1, ..time },
    }
}

impl Entry {
    fn kept(&self) -> Option<Kept> {
        let content = self.version.content.as_ref()?;
        (content.node.kind() == FileKind::File).then(|| Kept {
            serial: self.serial,
            number: self.number,
            time: self.version.time,
            content: Arc::clone(content),
        })
    }
}

impl EditHistory {
    /// Notes the time if a record changes which versions there are.
    pub(super) fn note_change(&mut self, record: &EditsLogRecord) {
        match record {
            EditsLogRecord::Opened { .. }
            | EditsLogRecord::Remapped { .. }
            | EditsLogRecord::SyncedTo(_)
            | EditsLogRecord::SyncFailed => {}
            EditsLogRecord::Bounds(_)
            | EditsLogRecord::Kept(_)
            | EditsLogRecord::Copied { .. }
            | EditsLogRecord::Moved { .. }
            | EditsLogRecord::Exchanged { .. }
            | EditsLogRecord::At { .. }
            | EditsLogRecord::Dropped { .. }
            | EditsLogRecord::List { .. } => {
                self.changed = clock::now().max(just_after(self.changed))
            }
        }
    }

    /// When it last changed which versions there are.
    pub(in crate::fs) fn changed(&self) -> Timestamp {
        self.changed
    }

    /// Whether something below a directory has versions, be the directory there or not.
    pub(in crate::fs) fn has_below(&self, dir: &TreePath) -> bool {
        let first = self.lists.range(dir.join(&Name::before_all())..).next();
        first.is_some_and(|(path, _)| path.starts_with(dir))
    }

    fn has(&self, path: &TreePath) -> bool {
        self.lists.contains_key(path) || self.has_below(path)
    }

    /// The names in a directory that have versions themselves, or below which something has some.
    fn names_in(&self, dir: &TreePath) -> BTreeMap<Name, (bool, bool)> {
        let mut names: BTreeMap<Name, (bool, bool)> = BTreeMap::new();
        let depth = dir.names().count();
        let mut from = Bound::Included(dir.join(&Name::before_all()));
        while let Some((path, _)) = self.lists.range((from, Bound::Unbounded)).next() {
            if !path.starts_with(dir) {
                break;
            }
            from = Bound::Excluded(path.clone());
            let mut rest = path.names().skip(depth);
            let Some(name) = rest.next() else { continue };
            let is_below = rest.next().is_some();
            if is_below && let Ok(next) = Name::new(&[name.as_bytes(), b"0"].concat()) {
                // However many there are below this name: all come before the one with the byte that follows '/'.
                from = Bound::Included(dir.join(&next));
            }
            let found = names.entry(name).or_default();
            if is_below { found.1 = true } else { found.0 = true }
        }
        names
    }

    /// The name under which a version of a path is shown in the directory of the path.
    fn shown_name(&self, path: &TreePath, number: u32) -> Option<Name> {
        let mut name = Name::new(number.to_string().as_bytes()).ok()?;
        while self.has(&path.join(&name)) {
            name = Name::new(&[b"@", name.as_bytes()].concat()).ok()?;
        }
        Some(name)
    }

    /// What a name in the directory of a path stands for.
    pub(in crate::fs) fn shown(&mut self, dir: &TreePath, name: &Name) -> Option<Shown> {
        let below = dir.join(name);
        // Whoever asks by name is told as by `jailfs history`.
        self.claim(&below);
        if self.has(&below) {
            return Some(Shown::Path(below));
        }
        let number: u32 =
            std::str::from_utf8(name.as_bytes()).ok()?.trim_start_matches('@').parse().ok()?;
        let kept =
            self.lists.get(dir)?.entries.iter().find(|entry| entry.number == number)?.kept()?;
        (self.shown_name(dir, number)? == *name).then_some(Shown::Version(kept))
    }

    /// All names in the directory of a path.
    pub(in crate::fs) fn all_shown(&self, dir: &TreePath) -> Vec<(Name, Shown)> {
        let below =
            self.names_in(dir).into_keys().map(|name| (name.clone(), Shown::Path(dir.join(&name))));
        let list = self.lists.get(dir).into_iter().flat_map(|list| &list.entries);
        let own = list.filter_map(Entry::kept);
        let own =
            own.filter_map(|kept| Some((self.shown_name(dir, kept.number)?, Shown::Version(kept))));
        below.chain(own).collect()
    }

    /// The version of a path that has a serial number; none if it was given up since, or is another path's.
    pub(in crate::fs) fn kept(&self, path: &TreePath, serial: u64) -> Option<Kept> {
        self.lists.get(path)?.entries.iter().find(|entry| entry.serial == serial)?.kept()
    }
}

impl Fs {
    /// The names in a directory, be it there or not, that have versions, or below which some have. Says of each whether it has
    /// versions itself, and whether something below it has.
    pub fn version_names(&self, dir: &TreePath) -> BTreeMap<Name, (bool, bool)> {
        self.core().edits.as_ref().map(|versions| versions.names_in(dir)).unwrap_or_default()
    }
}
