//! Rolls a sandbox back to a savepoint, so that a failed attempt leaves nothing for the next one.
//!
//! * Checkpoints, holds, operations and the edit history are as they were at the savepoint. Only
//!   the numbers of new layers and operations go on.
//! * The tree itself must be rolled back before, to a state that existed at the savepoint.
//! * If a rewind is interrupted, the rest are ordinary checkpoints and operations.

use std::collections::BTreeSet;

use crate::error::{Error, Kind, Result};
use crate::fs::EditsSavepoint;
use crate::store::record::OpRecord;
use crate::timeline::gc::{Keep, is_checkpoint};
use crate::timeline::{Policy, Timeline};
use crate::types::LayerId;

/// The checkpoints, holds, operations and edits that existed at one time.
pub struct Savepoint {
    /// The sealed states.
    states: BTreeSet<LayerId>,
    holds: BTreeSet<LayerId>,
    /// The number of the last operation.
    operation: u64,
    edits: EditsSavepoint,
}

impl Timeline {
    /// Takes a savepoint.
    pub fn savepoint(&self) -> Savepoint {
        let _operation = self.lock_operation();
        Savepoint {
            states: self.states(),
            holds: self.store.holds(),
            operation: self.store.ops().last().map_or(0, |(number, _)| *number),
            edits: self.fs.edits_savepoint(),
        }
    }

    fn states(&self) -> BTreeSet<LayerId> {
        self.sealed().iter().map(|info| info.header.layer).collect()
    }

    /// Drops what was made since a savepoint. The caller keeps readers of states out meanwhile.
    ///
    /// # Errors
    /// The tree lies on a state that would be dropped, or the store failed. After a failure of the
    /// store, a part may still be there.
    pub fn rewind_to(&self, savepoint: &Savepoint) -> Result<()> {
        let attempt = "roll back to the savepoint";
        {
            let _operation = self.lock_operation();
            if self.parent().is_some_and(|layer| !savepoint.states.contains(&layer)) {
                return Err(Error::new(
                    Kind::Failed,
                    attempt,
                    "the tree lies on a state that is newer",
                ));
            }
            let _compacting = self.compacting.lock();
            let is_own = |layer: &LayerId| {
                self.store.layer(*layer).is_none_or(|info| self.store.is_of(&info, &self.head))
            };
            // The changes of other heads meanwhile stay.
            let mut holds = self.store.holds();
            holds.retain(|layer| savepoint.holds.contains(layer) || !is_own(layer));
            holds.extend(&savepoint.holds);
            self.with_reserve(|| self.store.set_holds(&holds)).map_err(|e| e.during(attempt))?;
            let is_newer = |(number, _): &&(u64, OpRecord)| *number > savepoint.operation;
            let ops = self.store.ops();
            if ops.iter().filter(is_newer).all(|(_, op)| op.head == self.head) {
                self.with_reserve(|| self.store.cut_ops(savepoint.operation))
                    .map_err(|e| e.during(attempt))?;
            }
            self.fs.rewind_edits(&savepoint.edits);
            let mut made = self.sealed();
            made.retain(|info| {
                let is_new = !savepoint.states.contains(&info.header.layer);
                is_checkpoint(info) && is_new && is_own(&info.header.layer)
            });
            for info in made {
                self.with_reserve(|| self.unmark_checkpoint(&info))
                    .map_err(|e| e.during(attempt))?;
            }
        }
        let keep = Keep {
            operations: Policy::OPERATIONS,
            checkpoints: None,
            store_bytes: None,
            spared: savepoint.states.clone(),
        };
        self.with_reserve(|| self.gc(&keep, false)).map_err(|e| e.during(attempt))?;
        Ok(())
    }
}
