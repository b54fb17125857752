//! Switches a head to another state, in place, while the kernel holds nodes of the present one.
//!
//! These rules make a switch exact. They serve restore, undo, discard and apply alike.
//!
//! * A file keeps its id only if both states have its number, and its content is identical (with
//!   `-o writeback` its times as well). Every other held file becomes an orphan: its holders keep
//!   the old content, and can never change the new tree.
//! * A directory keeps its id only if it has the same name in the same kept directory in both
//!   states. So no live dentry of the kernel ever moves, and a process that stands in a directory
//!   that moved or vanished gets ENOENT.
//! * A switch happens under the lock of changes. It compares the states without the core lock, and
//!   takes it to install the new one. The kernel's caches are invalidated after it, without a lock,
//!   because the kernel waits for requests that need one.

pub(in crate::fs) mod compare;
pub(in crate::fs) mod install;
mod plan;
pub(in crate::fs) mod rebase;
pub(in crate::fs) mod seal;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::FsResult;
use crate::fs::merged::lower::Lower;
use crate::fs::{Fs, State};
use crate::store::layer::Upper;
use crate::types::{Name, NodeId};

/// Cached names, attributes and pages to invalidate after a switch, without any lock held.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Invalidations {
    /// Names that stand for another node now, or for none.
    pub names: BTreeSet<(NodeId, Name)>,
    /// Nodes whose attributes differ: kept ones, and orphans, which have no link any more.
    pub attrs: BTreeSet<NodeId>,
    /// Directories whose names differ, orphans included.
    pub listings: BTreeSet<NodeId>,
    /// Directories in which the kernel may be about to cache a node of `attrs` with the attributes
    /// from before the switch.
    pub within: BTreeSet<NodeId>,
}

/// The result of a switch.
pub struct Switched {
    /// The kernel must invalidate these.
    pub invalidations: Invalidations,
    /// The upper layer before the switch.
    pub layer: Upper,
    /// The state before the switch, which that layer completes.
    pub state: State,
}

impl Fs {
    /// Installs another state; all further changes go to `upper`.
    ///
    /// # Errors
    /// Those of the base; then nothing has changed.
    pub fn switch(&self, state: State, upper: Upper) -> FsResult<Switched> {
        // A sync under way belongs to the layer that was the upper one when it began.
        let mut gate = self.sync_gate.lock();
        self.sync_exchange(&mut gate)?;
        let mut core = self.writing();
        let before = core.state.clone();
        let invalidations = core.install(&state, false, |_| Ok(()))?;
        let layer = core.upper.replace(upper);
        Ok(Switched { invalidations, layer, state: before })
    }

    /// Reads the base through `lower` from now on: with the pre-images of an apply that is about to
    /// change the base, or without them.
    pub fn set_lower(&self, lower: Lower) {
        self.writing().state.lower = Arc::new(lower);
    }
}
