//! Watches how long the journal of the upper layer gets, and exchanges it for a shorter one while
//! programs write.
//!
//! The journal grows with each change, also when a program overwrites the same bytes or renames the
//! same file. [`crate::timeline`] knows what it would be at its shortest, and when that pays.

use crate::error::{Error, FsResult, Result};
use crate::fs::{Core, Fs, Unfinished};
use crate::store::layer::{JournalEnd, Upper};
use crate::tree::Tree;
use crate::types::LayerId;

/// A journal of fewer bytes is never looked at.
pub const SMALL_JOURNAL: u64 = 8 << 20;
/// Bytes of records that may be copied while nothing else is answered: some milliseconds.
const MOST_AT_LAST: u64 = 64 << 10;
/// How often the rewrite copies what came meanwhile, before it copies the rest in any case.
const TRIES: u32 = 8;

/// Is told that the journal is to be looked at. Called with the lock of the head: it only takes
/// notice.
pub type JournalNotice = Box<dyn Fn() + Send + Sync>;

/// The journal and the tree of the upper layer at one moment.
pub struct OpenJournal {
    /// Where the journal ends.
    pub end: JournalEnd,
    /// The tree that it leads to.
    pub tree: Tree,
}

/// When the journal of a layer is looked at next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextLook {
    /// Which layer.
    pub layer: LayerId,
    /// When the journal has so many bytes.
    pub bytes: u64,
    /// Or when the tree has fewer entries.
    pub entries: usize,
}

impl NextLook {
    /// The first look at a layer.
    pub fn first(layer: LayerId) -> NextLook {
        NextLook { layer, bytes: SMALL_JOURNAL, entries: 0 }
    }
}

/// Who is told, and when.
pub(super) struct JournalWatch {
    next: NextLook,
    notice: Option<JournalNotice>,
}

impl JournalWatch {
    pub(super) fn of(upper: &Upper) -> JournalWatch {
        JournalWatch { next: NextLook::first(upper.layer()), notice: None }
    }
}

impl Fs {
    /// Says who is told that the journal is to be looked at.
    pub fn set_journal_notice(&self, notice: Option<JournalNotice>) {
        self.core().journal.notice = notice;
    }

    /// Says when the journal is to be looked at next. Says nothing of another layer than the upper.
    pub fn look_at_journal(&self, next: NextLook) {
        let mut core = self.core();
        if core.upper.layer() == next.layer {
            core.journal.next = next;
        }
    }

    /// The journal of the upper layer as it is now.
    pub fn open_journal(&self) -> OpenJournal {
        let core = self.core();
        OpenJournal { end: core.upper.journal_end(), tree: core.tree.clone() }
    }

    /// Exchanges the journal of the upper layer for one that says only what came of it since
    /// `below`, the tree of the layer below. Programs go on writing meanwhile. They wait for the
    /// last step only, which is a rename; whoever syncs waits for a sync more.
    ///
    /// # Errors
    /// As the calls it is made of, and when another layer is the upper one by now; then the journal
    /// is what it was.
    pub fn rewrite_journal(&self, from: &OpenJournal, below: &Tree) -> FsResult<()> {
        // First, as the rest of it is done while those who sync wait.
        self.sync()?;
        let mut rewrite =
            self.store.begin_journal_rewrite(&from.end, below.edits_to(&from.tree))?;
        // No sync, seal or exchange of the layer is under way from here on.
        let mut gate = self.sync_gate.lock();
        self.seal_unfinished(&mut gate)?;
        rewrite.follow(&self.core().upper.journal_end())?;
        self.sync_all_but_journal()?;
        rewrite.mark_synced()?;
        for _ in 0..TRIES {
            let end = self.core().upper.journal_end();
            if rewrite.follow(&end)? <= MOST_AT_LAST {
                break;
            }
        }
        self.core().upper.go_on_in(&mut rewrite)?;
        gate.exchange = Some(rewrite.exchange());
        Ok(self.finish_exchange(&mut gate)?)
    }

    /// Syncs what the records of the upper layer refer to.
    fn sync_all_but_journal(&self) -> FsResult<()> {
        if !self.store.durable() {
            return Ok(());
        }
        let work = self.core().upper.begin_sync();
        if let Some(work) = work {
            self.sync_step(|| work.sync_pool())?;
        }
        Ok(self.sync_identities()?)
    }

    /// Makes the last exchange of the journal survive a power cut. Before that, a power cut brings the
    /// old journal back, with no more than was synced until then: so no sync and no seal is
    /// acknowledged before. If there is no room for it, the next sync tries it again.
    pub(super) fn finish_exchange(&self, unfinished: &mut Unfinished) -> Result<()> {
        let Some(exchange) = &unfinished.exchange else { return Ok(()) };
        let mut synced = exchange.sync();
        if synced.as_ref().is_err_and(Error::is_full) && self.store.release_reserve() {
            synced = exchange.sync();
            self.store.keep_reserve();
        }
        match &synced {
            Ok(()) => unfinished.exchange = None,
            Err(error) if error.is_full() => {}
            Err(_) => self.core().exchange_failed(),
        }
        synced
    }
}

impl Core {
    /// Tells that the journal is to be looked at, if so; once, until the next look is said.
    pub(super) fn watch_journal(&mut self) {
        let len = self.upper.journal_len();
        if len < SMALL_JOURNAL {
            return;
        }
        if self.journal.next.layer != self.upper.layer() {
            self.journal.next = NextLook::first(self.upper.layer());
        }
        let NextLook { layer, bytes, entries } = self.journal.next;
        if len < bytes && self.tree.entries() >= entries {
            return;
        }
        self.journal.next = NextLook { layer, bytes: u64::MAX, entries: 0 };
        if let Some(notice) = &self.journal.notice {
            notice();
        }
    }
}
