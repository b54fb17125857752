//! Seals layers. This is the only place that seals the upper layer of a head in use.
//!
//! Always true:
//! * Changes go to the next layer before the seal of the present one begins, so programs do not
//!   wait for it.
//! * A layer whose seal failed is kept, and sealed before the next sync or seal succeeds. The
//!   layers above it are useless without it.

use crate::error::{FsResult, Result};
use crate::fs::edits::{EditHistory, LogMark};
use crate::fs::sync::SyncGate;
use crate::fs::writing::Writing;
use crate::fs::{Fs, Invalidations, State};
use crate::store::layer::Upper;
use crate::store::record::{Record, Seal};
use crate::sys::clock;
use crate::tree::Edit;
use crate::types::LayerId;

/// The result of a seal with a change directly after it.
pub struct Changed {
    /// The sealed layer.
    pub layer: LayerId,
    /// The state that it completes.
    pub from: State,
    /// The state after the change and what the kernel must invalidate, or why nothing was changed.
    pub to: FsResult<(State, Invalidations)>,
    /// Whether the seal is in the store.
    pub sealed: Result<()>,
}

/// Is told of a state that is fixed, and of the seal that its layer will get.
pub type Report<'r> = &'r mut dyn FnMut(LayerId, &Seal);

/// A layer to which changes no longer go, and what its seal needs.
pub(super) struct Replaced {
    pub(super) layer: Upper,
    pub(super) seal: Seal,
    /// The end of the log of the edit history when the layer was replaced.
    pub(super) mark: Option<LogMark>,
    /// Whether the head's record names a layer above it. Then it is synced before the seal is
    /// written, because the seal says that all records before it are synced, and a power cut could
    /// leave the seal and tear a record.
    pub(super) is_below_head: bool,
    /// Whether the seal was reported as made. Then no other one may take its place.
    pub(super) is_reported: bool,
}

impl Fs {
    /// Seals the upper layer; all further changes go to `next` at once. Returns the sealed layer
    /// and its state. A sync waits for the seal, because what it syncs lies above. Calls `report`
    /// as soon as the state is fixed and the seal survives the end of this process. A power cut can
    /// still take both then.
    ///
    /// # Errors
    /// As `Upper::seal`. Changes go to `next` all the same, and the layer is sealed before the
    /// next sync or seal succeeds: with this seal if it was reported.
    pub fn seal(
        &self,
        next: Upper,
        seal: Seal,
        report: Option<Report<'_>>,
    ) -> Result<(LayerId, State)> {
        let (layer, state, (), sealed) = self.seal_and(next, (seal, report), |_| ())?;
        sealed.map(|()| (layer, state))
    }

    /// Seals the upper layer and changes the state at the same moment, with nothing between the
    /// two. `make` returns the edits and the state to which they lead. Whether the change succeeded
    /// is returned beside the seal, which is made in any case.
    ///
    /// # Errors
    /// As [`Fs::seal`].
    pub fn seal_and_change(
        &self,
        next: Upper,
        seal: Seal,
        make: impl FnOnce(&State) -> FsResult<(Vec<Edit>, State)>,
    ) -> Result<Changed> {
        let (layer, from, to, sealed) = self.seal_and(next, (seal, None), |core| {
            let state = core.state.clone();
            let (edits, after) = core.released(|| make(&state))?;
            if edits.is_empty() {
                return Ok((after, Invalidations::default()));
            }
            let record = Record::Edits(edits);
            let invalidations = core.install(&after, false, |core| core.append(&record))?;
            core.check_journal();
            Ok((after, invalidations))
        })?;
        Ok(Changed { layer, from, to, sealed })
    }

    fn seal_and<T>(
        &self,
        next: Upper,
        (seal, report): (Seal, Option<Report<'_>>),
        then: impl FnOnce(&mut Writing<'_>) -> T,
    ) -> Result<(LayerId, State, T, Result<()>)> {
        // The gate comes first: otherwise a sync could find nothing to do in `next`, and succeed
        // before the seal.
        let mut gate = self.sync_gate.lock();
        self.finish_pending(&mut gate)?;
        let (mut replaced, state, result) = {
            let mut core = self.writing();
            let layer = core.upper.replace(next);
            let state = core.state.clone();
            let mark = core.edits.as_ref().map(EditHistory::log_mark);
            let replaced = Replaced { layer, seal, mark, is_below_head: false, is_reported: false };
            (replaced, state, then(&mut core))
        };
        let layer = replaced.layer.layer();
        if let Some(report) = report {
            if let Err(error) = replaced.layer.record(&Record::Sealing(replaced.seal.clone())) {
                gate.unsealed.push((replaced.layer, cut_off()));
                return Ok((layer, state, result, Err(error)));
            }
            replaced.is_reported = true;
            report(layer, &replaced.seal);
        }
        let sealed = self.seal_replaced(&mut gate, replaced);
        Ok((layer, state, result, sealed))
    }

    /// Seals a replaced layer, or keeps it for the next try.
    pub(super) fn seal_replaced(&self, gate: &mut SyncGate, replaced: Replaced) -> Result<()> {
        let Replaced { mut layer, seal, mark, is_below_head, is_reported } = replaced;
        let sealed = self.write_seal(&mut layer, seal.clone(), is_below_head);
        if sealed.is_err() {
            gate.unsealed.push((layer, if is_reported { seal } else { cut_off() }));
        } else if self.store.durable() {
            self.writing().note_edits_synced(mark);
        }
        sealed
    }

    /// Does what must precede the next sync or seal: syncs the last exchange of the journal, and
    /// seals the layers whose seal failed.
    pub(in crate::fs) fn finish_pending(&self, gate: &mut SyncGate) -> Result<()> {
        self.sync_exchange(gate)?;
        while let Some((mut layer, seal)) = gate.unsealed.pop() {
            if let Err(error) = self.write_seal(&mut layer, seal.clone(), true) {
                gate.unsealed.push((layer, seal));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Seals the layers whose seal failed.
    ///
    /// # Errors
    /// As `Upper::seal`.
    pub fn finish_seals(&self) -> Result<()> {
        self.finish_pending(&mut self.sync_gate.lock())
    }

    fn write_seal(&self, layer: &mut Upper, seal: Seal, is_below_head: bool) -> Result<()> {
        let ready =
            self.sync_identities().and_then(|()| if is_below_head { layer.sync() } else { Ok(()) });
        let sealed = ready.and_then(|()| self.store.seal_layer(layer, seal));
        if layer.is_failed() {
            self.writing().sync_failed();
        }
        sealed
    }
}

/// The seal of a layer whose own seal failed.
fn cut_off() -> Seal {
    Seal { name: None, message: "cut off".to_owned(), time: clock::now(), automatic: true }
}
