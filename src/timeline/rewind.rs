//! Forgetting what happened since a moment: an attempt that failed leaves the next one nothing, neither to find nor in its way.
//!
//! Checkpoints, holds, operations and versions of single files are what they were; only numbers go on. Cut off anywhere, what is
//! left to forget are checkpoints and operations like any other. The tree must have been taken back before: it lies on a state
//! that was there at the moment.

use std::collections::BTreeSet;

use crate::error::{Error, Kind, Result};
use crate::fs::VersionMark;
use crate::timeline::gc::{Keep, is_checkpoint};
use crate::timeline::{Policy, Timeline};
use crate::types::LayerId;

/// What there was at a moment, besides the tree.
pub struct Savepoint {
    /// The sealed states.
    states: BTreeSet<LayerId>,
    holds: BTreeSet<LayerId>,
    /// The number of the last operation.
    operation: u64,
    versions: VersionMark,
}

impl Timeline {
    /// Remembers what there is now.
    pub fn moment(&self) -> Savepoint {
        let _turn = self.turn();
        Savepoint {
            states: self.states(),
            holds: self.store.holds(),
            operation: self.store.ops().last().map_or(0, |(number, _)| *number),
            versions: self.fs.mark_versions(),
        }
    }

    fn states(&self) -> BTreeSet<LayerId> {
        self.sealed().iter().map(|info| info.header.layer).collect()
    }

    /// Forgets what happened since a moment. Nobody looks at states meanwhile.
    ///
    /// # Errors
    /// When the tree lies on a state that is to be forgotten, or what the store answers: then something of it may still be there.
    pub fn rewind_to(&self, moment: &Savepoint) -> Result<()> {
        let attempt = "forget what happened since";
        {
            let _turn = self.turn();
            if self.parent().is_some_and(|layer| !moment.states.contains(&layer)) {
                return Err(Error::new(
                    Kind::Failed,
                    attempt,
                    "the tree lies on a state that was made since",
                ));
            }
            let _tidying = self.compacting.lock();
            self.with_reserve(|| self.store.set_holds(&moment.holds))
                .map_err(|e| e.during(attempt))?;
            self.with_reserve(|| self.store.cut_ops(moment.operation))
                .map_err(|e| e.during(attempt))?;
            self.fs.go_back_to_versions(&moment.versions);
            let mut made = self.sealed();
            made.retain(|info| is_checkpoint(info) && !moment.states.contains(&info.header.layer));
            for info in made {
                self.with_reserve(|| self.give_up(&info)).map_err(|e| e.during(attempt))?;
            }
        }
        let keep = Keep {
            operations: Policy::OPERATIONS,
            checkpoints: None,
            store_bytes: None,
            spared: moment.states.clone(),
        };
        self.with_reserve(|| self.gc(&keep, false)).map_err(|e| e.during(attempt))?;
        Ok(())
    }
}
