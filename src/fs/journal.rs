//! Replaces the journal of the upper layer by a shorter one while programs write.
//!
//! [`crate::fs::upper`] says when that is to be considered.

use crate::error::{FsResult, Result};
use crate::fs::Fs;
use crate::fs::sync::SyncGate;
use crate::fs::upper::{JournalNotice, NextCheck};
use crate::store::layer::JournalEnd;
use crate::tree::Tree;

/// Bytes of records that may be copied while changes wait, which takes some milliseconds.
const MAX_COPY_UNDER_LOCK: u64 = 64 << 10;
/// The number of passes over new records before the rest is copied while changes wait in any case.
const PASSES: u32 = 8;

/// The journal and the tree of the upper layer at one moment.
pub struct OpenJournal {
    /// Where the journal ends.
    pub end: JournalEnd,
    /// The tree that it leads to.
    pub tree: Tree,
}

impl Fs {
    /// Sets the function that is called when the length of the journal is to be checked.
    pub fn set_journal_notice(&self, notice: Option<JournalNotice>) {
        self.writing().upper.set_notice(notice);
    }

    /// Sets the next check of the journal's length. Does nothing if its layer is no longer the
    /// upper one.
    pub fn set_next_journal_check(&self, next: NextCheck) {
        self.writing().upper.set_next_check(next);
    }

    /// The end of the journal of the upper layer as it is now.
    pub fn journal_end(&self) -> JournalEnd {
        self.writing().upper.journal_end()
    }

    /// The journal of the upper layer as it is now.
    pub fn open_journal(&self) -> OpenJournal {
        let core = self.writing();
        OpenJournal { end: core.upper.journal_end(), tree: core.tree.clone() }
    }

    /// Replaces the journal of the upper layer by the edits that lead from `below`, the tree of the
    /// layer below, to the present tree. Programs write meanwhile. Changes wait for the last step
    /// only, which is a rename; a sync waits for one more sync. If a checkpoint or a switch has
    /// sealed that layer meanwhile, its journal stays as it is: compaction shortens sealed ones.
    ///
    /// # Errors
    /// Those of the store; then the journal is unchanged.
    pub fn rewrite_journal(&self, from: &OpenJournal, below: &Tree) -> FsResult<()> {
        // The syncs that follow are then short. Other syncs wait for them.
        self.sync()?;
        let mut rewrite =
            self.store.begin_journal_rewrite(&from.end, below.edits_to(&from.tree))?;
        // From here on no sync, seal or rewrite of the layer is under way.
        let mut gate = self.sync_gate.lock();
        self.finish_pending(&mut gate)?;
        let end = self.journal_end();
        if end.layer != from.end.layer {
            return Ok(());
        }
        rewrite.follow(&end)?;
        self.sync_all_but_journal()?;
        rewrite.mark_synced()?;
        for _ in 0..PASSES {
            let end = self.journal_end();
            if rewrite.follow(&end)? <= MAX_COPY_UNDER_LOCK {
                break;
            }
        }
        {
            let mut core = self.writing();
            core.upper.check()?;
            let end = core.upper.journal_end();
            core.released(|| rewrite.publish(&end))?;
            core.upper.go_on_in(&mut rewrite);
        }
        gate.exchange = Some(rewrite.exchange());
        Ok(self.sync_exchange(&mut gate)?)
    }

    /// Syncs the content and the inode numbers to which the records of the upper layer refer.
    fn sync_all_but_journal(&self) -> FsResult<()> {
        if !self.store.durable() {
            return Ok(());
        }
        // Also if all records are synced: the bytes of some may be in the old journal only.
        let work = self.writing().upper.sync_work();
        self.sync_step(|| work.sync_pool())?;
        self.writing().upper.note_pool_synced(&work);
        Ok(self.sync_identities()?)
    }

    /// Makes the last exchange of the journal durable. Before that, a power cut brings back the old
    /// journal, as far as it was synced at the exchange. So no sync and no seal succeeds earlier.
    /// If the disk is full, the next sync tries again.
    pub(super) fn sync_exchange(&self, gate: &mut SyncGate) -> Result<()> {
        let Some(exchange) = &gate.exchange else { return Ok(()) };
        let synced = self.store.with_reserve(|| exchange.sync());
        match &synced {
            Ok(()) => gate.exchange = None,
            Err(error) if error.is_full() => {}
            Err(_) => {
                let mut core = self.writing();
                core.sync_failed();
                core.upper.exchange_failed();
            }
        }
        synced
    }
}
