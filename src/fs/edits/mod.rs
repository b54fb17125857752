//! Keeps the edit history of single files: for each edit, the file as it was before.
//!
//! * A history belongs to a **path**, not to a file. It has what the path had before it was
//!   written, replaced, removed or moved away, whatever the path is now. After a rename of a file,
//!   the history is found by the new path too; after a rename of a directory, the histories below
//!   it are found by the new paths only.
//! * The edits of a path are numbered. A later edit has a larger number, and no number is reused
//!   while the path has a history.
//! * The log in the store has the same content as the memory: each change is one record, and a
//!   replay runs the same code ([`Histories`]).
//! * The edit history never makes an operation fail. Without edits it costs no system call.
//!
//! An edit ends when its file was not changed for [`QUIET`], so a program that writes a file in
//! many steps makes one edit. An edit keeps no copy of the bytes: it refers to their addresses,
//! which are pinned ([`PinnedRanges`]) so that they are not overwritten.

mod budget;
mod by_path;
mod compare;
mod content;
mod histories;
mod mark;
mod path_history;
mod paths;
mod pending_backups;
mod pinned_ranges;
mod recording;
mod rolling_match;
mod sharing;
mod travel;
mod undo;

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use crate::fs::Fs;
use crate::store::Store;
use crate::store::edits_log::{
    EditsLog, EditsLogRecord, EditsWrite, LoggedEdit, NewLog, WrittenEdits,
};
use crate::sys::clock;
use crate::tree::Source;
use crate::types::{Ino, LayerId, Timestamp};

pub(super) use content::state_of;
pub use histories::Histories;
pub use mark::EditsSavepoint;
pub(super) use paths::{HistoryName, SavedFile};
use pending_backups::PendingBackups;
use pinned_ranges::PinnedRanges;
pub(super) use recording::Touch;
pub use sharing::Tended;
pub use travel::PathEdits;
pub use undo::{EditInfo, Step, StepError, Stepped};

/// An edit ends when its file was not changed for this long.
pub const QUIET: Duration = Duration::from_secs(1);
/// A file with more extents is not kept: its history would cost more than it is worth.
pub const MAX_EXTENTS: usize = 4096;
/// With this many active edits, the ended ones are removed from the table.
const PRUNE_ACTIVE: usize = 4096;

/// A position in the log. A rewrite of the log makes it invalid.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LogMark {
    rewrites: u64,
    count: u64,
}

/// Returns the present time.
pub type Clock = Box<dyn Fn() -> Timestamp + Send + Sync>;

/// A file that is being edited.
struct ActiveEdit {
    /// When the file was last changed.
    last: Timestamp,
    /// Whether this edit created the file.
    is_new: bool,
}

/// The edit histories of a head.
pub struct EditHistory {
    histories: Histories,
    active: HashMap<Ino, ActiveEdit>,
    /// The size of `active` at which ended edits are removed from it.
    prune_active_at: usize,
    /// Names that new files lost by a rename. If a file comes to such a name again, it was a
    /// backup.
    pending: PendingBackups,
    pinned: PinnedRanges,
    log: EditsLog,
    /// How many times the log was rewritten.
    rewrites: u64,
    clock: Clock,
    /// When the last edit began.
    last_edit: Timestamp,
    /// Changes with each change of which edits exist: the mtime of the directories in
    /// `.jailfs/history`.
    changed: Timestamp,
    /// Called at the beginning of an edit.
    notice: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Deref for EditHistory {
    type Target = Histories;
    fn deref(&self) -> &Histories {
        &self.histories
    }
}

impl DerefMut for EditHistory {
    fn deref_mut(&mut self) -> &mut Histories {
        &mut self.histories
    }
}

/// The time from `then` to `now`; `None` if the clock was set back.
fn since(now: Timestamp, then: Timestamp) -> Option<Duration> {
    let nanos = |t: Timestamp| i128::from(t.secs) * 1_000_000_000 + i128::from(t.nanos);
    let between = nanos(now).checked_sub(nanos(then))?;
    u64::try_from(between).ok().map(Duration::from_nanos)
}

impl ActiveEdit {
    /// Whether the edit has not ended. Setting the clock back ends it.
    fn is_active(&self, now: Timestamp) -> bool {
        since(now, self.last).is_some_and(|quiet| quiet < QUIET)
    }
}

impl EditHistory {
    /// Reads the histories of a head from the store. Writes nothing yet. Edits whose pools are
    /// missing or too short are dropped.
    pub(super) fn open(store: &Arc<Store>, head: &str) -> EditHistory {
        let (mut log, mut recorded) = EditsLog::open(store, head);
        let mut histories = Histories::of(&mut recorded);
        drop(recorded);
        let ends = pool_ends(store, &histories);
        if histories.retain_entries(|entry| is_there(&ends, &entry.edit)) {
            log.mark_stale();
        }
        histories.garbage = 0;
        histories.dropped_layers.clear();
        EditHistory {
            histories,
            active: HashMap::new(),
            prune_active_at: PRUNE_ACTIVE,
            pending: PendingBackups::new(),
            pinned: PinnedRanges::default(),
            log,
            rewrites: 0,
            clock: Box::new(clock::now),
            last_edit: Timestamp::default(),
            changed: clock::now(),
            notice: None,
        }
    }

    /// Makes a change, in memory and in the log. The record is written to the file of the log
    /// before the next record of the journal and before the next bytes in place, or at the end of
    /// the operation (`fs/writing.rs`).
    fn append(&mut self, record: EditsLogRecord) {
        let number = self.log.next_number();
        let mut gone = Vec::new();
        self.apply(record.clone(), number, &mut |entry| gone.push(entry));
        self.release(gone);
        self.note_change(&record);
        self.log.append(record);
    }

    /// Begins to write what the file of the log lacks: records, or all of the histories if the log
    /// must be rewritten.
    pub(super) fn begin_write(&mut self) -> Option<EditsWrite> {
        let EditHistory { log, histories, .. } = self;
        log.begin_write(|| {
            let now = histories.snapshot();
            Box::new(move || now.records())
        })
    }

    /// Begins to put a new log in the place of the old one.
    pub(super) fn begin_publish(&mut self, new: NewLog) -> EditsWrite {
        self.log.begin_publish(new)
    }

    /// Ends a write to the log.
    pub(super) fn end_write(&mut self, written: WrittenEdits) {
        if self.log.end_write(written) {
            self.renumber_records();
        }
    }

    /// Adapts the record numbers after a rewrite of the log.
    fn renumber_records(&mut self) {
        let synced = self.synced;
        self.has_compared = false;
        // Records 0 and 1 say who wrote the log, and the bounds.
        let mut at = 2;
        self.by_path.change_all(|_, list| {
            for entry in &mut list.entries {
                entry.record = if entry.record < synced { 0 } else { at };
                entry.log_record = at;
            }
            at += 1;
        });
        self.synced = 1;
        self.rewrites += 1;
    }

    /// The end of the log. All content that its records refer to was written before this call.
    pub(super) fn log_mark(&self) -> LogMark {
        LogMark { rewrites: self.rewrites, count: self.log.count() }
    }

    /// Records that all content that was written before a mark is synced.
    pub(super) fn note_synced(&mut self, mark: LogMark) {
        if mark.rewrites == self.rewrites && mark.count > self.synced + 1 && !self.log.has_failed()
        {
            self.append(EditsLogRecord::SyncedTo(mark.count));
        }
    }

    /// Records that a sync failed.
    pub(super) fn note_sync_failed(&mut self) {
        if self.is_on() {
            self.append(EditsLogRecord::SyncFailed);
        }
    }

    /// Records which edits were compared, for the next process.
    fn note_compared(&mut self) {
        if self.has_compared {
            let record = self.compared_record();
            self.append(record);
        }
    }
}

impl Fs {
    /// Rewrites the log of the edit history if much of it is obsolete, or if a write to it failed.
    /// Programs go on meanwhile. If their work appends a record, this call drops the new log. After
    /// three such calls, the next one rewrites the log under the lock of changes.
    fn compact_edits_log(&self) {
        let (rewrite, histories) = {
            let mut core = self.writing();
            let Some(history) = &mut core.edits else { return };
            if history.log.must_rewrite() {
                history.log.request_rewrite();
                return core.write_edits();
            }
            let Some(rewrite) = history.log.begin_rewrite() else { return };
            (rewrite, history.histories.snapshot())
        };
        if !rewrite.pays(|| histories.by_path.edits()) {
            return;
        }
        let written = rewrite.write(histories.records());
        // While a clone lives, each change of a history copies that history.
        drop(histories);
        match written {
            Ok(new) => self.writing().publish_edits(new),
            Err(error) => {
                log::debug!("{error}; the log of the edit history stays as long as it is")
            }
        }
    }
}

/// The ends of the pools that contents refer to, for layers that exist.
fn pool_ends(store: &Store, histories: &Histories) -> BTreeMap<LayerId, u64> {
    let mut ends = BTreeMap::new();
    let contents = histories.all().filter_map(|(.., edit)| edit.content.as_deref());
    for (_, source) in contents.flat_map(|content| &content.extents) {
        let Source::Pool { layer, .. } = *source else { continue };
        if ends.contains_key(&layer) || store.layer(layer).is_none() {
            continue;
        }
        let end = store.pool_end(layer).unwrap_or_else(|error| {
            // The content may exist. If it were dropped here, gc would free it while the log still
            // names it.
            log::warn!("{error}");
            u64::MAX
        });
        ends.insert(layer, end);
    }
    ends
}

/// Whether the pools that an edit refers to exist and are long enough.
fn is_there(ends: &BTreeMap<LayerId, u64>, edit: &LoggedEdit) -> bool {
    let Some(content) = &edit.content else { return true };
    content.extents.iter().all(|(range, source)| match source {
        Source::Base { .. } => true,
        Source::Pool { layer, offset } => {
            ends.get(layer).is_some_and(|end| offset.saturating_add(range.len()) <= *end)
        }
    })
}
