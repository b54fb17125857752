//! Rebases the head onto the base as an apply left it.

use crate::error::{FsResult, Result};
use crate::fs::edits::EditHistory;
use crate::fs::switch::seal::Replaced;
use crate::fs::{Fs, Invalidations, State};
use crate::store::layer::Upper;
use crate::store::record::{Record, Seal};
use crate::tree::Tree;
use crate::types::LayerId;

/// The result of a rebase.
pub enum Rebasing {
    /// The head is over the new base.
    Rebased(Rebased),
    /// Programs changed more than may be carried over under the lock of changes. The layer for the
    /// rebase is returned unused.
    Moved(Upper),
}

/// The head is over the new base, with the same tree.
pub struct Rebased {
    /// The kernel must invalidate these.
    pub invalidations: Invalidations,
    /// The state before.
    pub from: State,
    /// The upper layer before, if anything is in it, and whether its seal is in the store.
    pub sealed: Option<(LayerId, Result<()>)>,
}

impl Fs {
    /// Installs the same tree over another base. `rebase` converts the present state, or returns
    /// none if that would take too long, because no change is served meanwhile. Every file has the
    /// same content in the result, wherever that is stored.
    ///
    /// If anything was written to the present upper layer, `next` begins with one record of all
    /// that the result has. So what was written is in one of the two layers, whenever the process
    /// ends.
    ///
    /// # Errors
    /// Those of the base and of the store; then nothing has changed.
    pub fn rebase(
        &self,
        mut next: Upper,
        seal: Seal,
        rebase: impl FnOnce(&State) -> FsResult<Option<State>>,
    ) -> FsResult<Rebasing> {
        let mut gate = self.sync_gate.lock();
        self.finish_pending(&mut gate)?;
        let mut core = self.writing();
        let from = core.state.clone();
        let Some(state) = core.released(|| rebase(&from))? else {
            return Ok(Rebasing::Moved(next));
        };
        let is_changed = core.upper.is_changed();
        let all = || Record::Edits(Tree::new().edits_to(&state.tree).collect());
        let all = is_changed.then(|| core.released(all));
        // The store takes a layer with a record for the present one, so nothing may fail after it,
        // and no program may write to the layer before.
        let invalidations = core.install(&state, true, |core| {
            Ok(core.released(|| all.iter().try_for_each(|record| next.record(record)))?)
        })?;
        let layer = core.upper.replace(next);
        let mark = core.edits.as_ref().map(EditHistory::log_mark);
        drop(core);
        let sealed = is_changed.then(|| {
            let id = layer.layer();
            let replaced = Replaced { layer, seal, mark, is_below_head: true, is_reported: false };
            (id, self.seal_replaced(&mut gate, replaced))
        });
        Ok(Rebasing::Rebased(Rebased { invalidations, from, sealed }))
    }
}
