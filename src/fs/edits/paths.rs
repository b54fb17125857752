//! The edit histories as names, for the directories of `.jailfs/history`.
//!
//! A path with a history is a directory of its edits, by number. The same path may also be, or have
//! been, a directory with histories below it, and then shows both. If such a name equals the number
//! of an edit, the name wins, so that every path of the tree is found. The edit then gets an `@`
//! before its number, or several.
//!
//! An edit before which there was no file has no name, because there is nothing to show.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::EditHistory;
use super::path_history::Entry;
use crate::fs::Fs;
use crate::store::edits_log::{Content, EditsLogRecord};
use crate::sys::clock;
use crate::types::{FileKind, Name, Timestamp, TreePath};

/// A file as it was before an edit.
#[derive(Clone)]
pub(in crate::fs) struct SavedFile {
    /// The serial of the edit, which is never reused while the head is open.
    pub(in crate::fs) serial: u64,
    /// The number of the edit.
    pub(in crate::fs) number: u32,
    /// When the edit began.
    pub(in crate::fs) time: Timestamp,
    /// The file before it.
    pub(in crate::fs) content: Arc<Content>,
}

/// The meaning of a name in `.jailfs/history`.
pub(in crate::fs) enum HistoryName {
    /// A path with a history, or with histories below it.
    Path(TreePath),
    /// An edit of the directory's own path.
    Edit(SavedFile),
}

fn just_after(time: Timestamp) -> Timestamp {
    match time.nanos {
        999_999_999.. => Timestamp { secs: time.secs.saturating_add(1), nanos: 0 },
        nanos => Timestamp { nanos: nanos + 1, ..time },
    }
}

impl Entry {
    fn saved_file(&self) -> Option<SavedFile> {
        let content = self.edit.content.as_ref()?;
        (content.node.kind() == FileKind::File).then(|| SavedFile {
            serial: self.serial,
            number: self.number,
            time: self.edit.time,
            content: Arc::clone(content),
        })
    }
}

impl EditHistory {
    /// Updates the time of [`EditHistory::changed`] if a record changes which edits exist.
    pub(super) fn note_change(&mut self, record: &EditsLogRecord) {
        match record {
            EditsLogRecord::Opened { .. }
            | EditsLogRecord::Remapped { .. }
            | EditsLogRecord::SyncedTo(_)
            | EditsLogRecord::SyncFailed
            | EditsLogRecord::Compared { .. } => {}
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

    /// When the set of edits last changed.
    pub(in crate::fs) fn changed(&self) -> Timestamp {
        self.changed
    }

    /// Whether a path below `dir` has a history. The directory itself may not exist.
    pub(in crate::fs) fn has_below(&self, dir: &TreePath) -> bool {
        let first = dir.join(&Name::before_all());
        self.by_path.from(&first).next().is_some_and(|(path, _)| path.starts_with(dir))
    }

    fn has(&self, path: &TreePath) -> bool {
        self.by_path.contains(path) || self.has_below(path)
    }

    /// The names in a directory that have a history, and those with histories below them.
    fn names_in(&self, dir: &TreePath) -> BTreeMap<Name, (bool, bool)> {
        let mut names: BTreeMap<Name, (bool, bool)> = BTreeMap::new();
        let depth = dir.names().count();
        // The path to go on at, and whether it was looked at.
        let mut from = (dir.join(&Name::before_all()), false);
        let next = |(from, is_done): &(TreePath, bool)| {
            let mut paths = self.by_path.from(from).map(|(path, _)| path);
            paths.find(|path| !is_done || *path != from)
        };
        while let Some(path) = next(&from) {
            if !path.starts_with(dir) {
                break;
            }
            from = (path.clone(), true);
            let mut rest = path.names().skip(depth);
            let Some(name) = rest.next() else { continue };
            let is_below = rest.next().is_some();
            if is_below && let Ok(next) = Name::new(&[name.as_bytes(), b"0"].concat()) {
                // Skips all paths below this name: "0" is the byte after "/".
                from = (dir.join(&next), false);
            }
            let found = names.entry(name).or_default();
            if is_below { found.1 = true } else { found.0 = true }
        }
        names
    }

    /// The name of an edit in the directory of its path.
    fn edit_name(&self, path: &TreePath, number: u32) -> Option<Name> {
        let mut name = Name::new(number.to_string().as_bytes()).ok()?;
        while self.has(&path.join(&name)) {
            name = Name::new(&[b"@", name.as_bytes()].concat()).ok()?;
        }
        Some(name)
    }

    /// Resolves a name in the directory of a path.
    pub(in crate::fs) fn resolve_name(
        &mut self,
        dir: &TreePath,
        name: &Name,
    ) -> Option<HistoryName> {
        let below = dir.join(name);
        // As for `jailfs history`, a pending backup counts.
        self.claim_pending(&below);
        if self.has(&below) {
            return Some(HistoryName::Path(below));
        }
        let number: u32 =
            std::str::from_utf8(name.as_bytes()).ok()?.trim_start_matches('@').parse().ok()?;
        let saved = self
            .by_path
            .get(dir)?
            .entries
            .iter()
            .find(|entry| entry.number == number)?
            .saved_file()?;
        (self.edit_name(dir, number)? == *name).then_some(HistoryName::Edit(saved))
    }

    /// All names in the directory of a path.
    pub(in crate::fs) fn all_names(&self, dir: &TreePath) -> Vec<(Name, HistoryName)> {
        let below = self
            .names_in(dir)
            .into_keys()
            .map(|name| (name.clone(), HistoryName::Path(dir.join(&name))));
        let list = self.by_path.get(dir).into_iter().flat_map(|list| &list.entries);
        let own = list.filter_map(Entry::saved_file);
        let own = own.filter_map(|saved_file| {
            Some((self.edit_name(dir, saved_file.number)?, HistoryName::Edit(saved_file)))
        });
        below.chain(own).collect()
    }

    /// The file before the edit of `path` with this serial; `None` if the edit was dropped, or
    /// belongs to another path.
    pub(in crate::fs) fn saved_file(&self, path: &TreePath, serial: u64) -> Option<SavedFile> {
        self.by_path.get(path)?.entries.iter().find(|entry| entry.serial == serial)?.saved_file()
    }
}

impl Fs {
    /// The names in a directory that have a history (the first flag), or histories below them (the
    /// second). The directory itself may not exist.
    pub fn names_with_edits(&self, dir: &TreePath) -> BTreeMap<Name, (bool, bool)> {
        self.core().edits.as_ref().map(|history| history.names_in(dir)).unwrap_or_default()
    }
}
