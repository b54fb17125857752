//! Decides when garbage collection runs in the background, and what it keeps.
//!
//! Always true:
//! * unless the user sets limits, it frees only what `jailfs gc` frees: states that no checkpoint,
//!   hold or recent operation leads to;
//! * the checkpoint below the present tree stays, and so does a state that a process has open, or
//!   has as its working directory, under `.jailfs`.
//!
//! Deciding costs as much as listing the layers, collecting as much as reading all records that are
//! kept. So a collection runs only if it frees enough, or if space is short.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::{FsResult, Result};
use crate::fs::Invalidations;
use crate::store::layer::LayerInfo;
use crate::timeline::gc::{Collected, Keep, is_checkpoint};
use crate::timeline::{Common, Timeline};
use crate::types::{LayerId, NodeId};

/// So many unneeded states are worth a collection,
const MIN_LAYERS: usize = 32;
/// and so are unneeded states of so many bytes.
const MIN_BYTES: u64 = 64 << 20;
/// Space is short if less than this fraction (one in so many) of the disk, or of the limit, is
/// free,
const SHORT_PART: u64 = 16;
/// unless so many bytes are free.
const PLENTY: u64 = 1 << 30;
/// The kernel is asked to drop single nodes of a state only if it holds at most so many of them.
const MAX_NAMES: usize = 2000;

/// The states that a collection in the background keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The number of latest operations whose states are kept.
    pub operations: u64,
    /// The number of newest checkpoints of each head that are kept; `None` keeps all.
    pub checkpoints: Option<u64>,
    /// Drop checkpoints, the oldest first, when the store takes more bytes than this.
    pub store_bytes: Option<u64>,
}

impl Policy {
    /// The default of [`Policy::operations`].
    pub const OPERATIONS: u64 = 100;
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { operations: Policy::OPERATIONS, checkpoints: None, store_bytes: None }
    }
}

/// Whether a collection is worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// There is nothing to free, or too little.
    Not,
    /// When the mount is idle.
    WhenIdle,
    /// At once: space is short.
    Now,
}

impl Common {
    /// Whether it is time to collect. After an operation found the disk full (`is_full`), anything
    /// that can be freed is worth it.
    pub fn is_due(&self, policy: &Policy, spared: &BTreeSet<LayerId>, is_full: bool) -> Due {
        let keep = self.keep_by(policy, spared);
        let is_over = policy.store_bytes.is_some_and(|limit| self.store.disk_usage() > limit);
        if is_over && !self.droppable(&keep).is_empty() {
            return Due::Now;
        }
        let has_too_many = !self.excess_checkpoints(&keep).is_empty();
        let needed = self.needed(&keep, &Collected::default(), &BTreeSet::new());
        let mut unneeded = self.sealed();
        unneeded.retain(|info| !needed.contains(&info.header.layer));
        let is_short = is_full || is_over || self.room_is_short();
        match (has_too_many || !unneeded.is_empty(), is_short) {
            (true, true) => Due::Now,
            (true, false) if has_too_many || self.is_worth_it(&unneeded, needed.len()) => {
                Due::WhenIdle
            }
            (true | false, _) => Due::Not,
        }
    }

    /// Collects by the policy, while `go` returns true. The caller keeps readers of states out
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Common::gc`].
    pub fn collect_by(
        &self,
        policy: &Policy,
        spared: &BTreeSet<LayerId>,
        go: &dyn Fn() -> bool,
    ) -> Result<Collected> {
        let mut keep = self.keep_by(policy, spared);
        keep.spared.extend(self.open_heads().iter().flat_map(|head| head.fs.layers_in_use()));
        // Free a little more than the limit asks for, so that the next collection is not due at
        // once.
        keep.store_bytes = keep.store_bytes.map(|limit| limit - limit / SHORT_PART);
        // A collection writes before it frees; on a full disk it may use the reserve.
        self.with_reserve(|| self.gc_while(&keep, false, go))
    }

    /// Invalidates the kernel's dentries of states that may be freed, so that it sends FORGET for
    /// all nodes that no process uses. With `whole`, it invalidates the directory of each state.
    /// Otherwise it invalidates the remaining nodes one by one: a node that was open the first time
    /// kept its parents from being dropped.
    pub fn ask_kernel_for_states(&self, policy: &Policy, spared: &BTreeSet<LayerId>, whole: bool) {
        let keep = self.keep_by(policy, spared);
        for head in self.open_heads() {
            self.ask_kernel_of(&head, &keep, whole);
        }
    }

    fn ask_kernel_of(&self, head: &Timeline, keep: &Keep, whole: bool) {
        let held = head.fs.layers_in_use();
        let mut may_go = self.sealed();
        may_go.retain(|l| held.contains(&l.header.layer) && !keep.spared.contains(&l.header.layer));
        let names = if whole {
            let names = head.fs.checkpoint_entries(&may_go);
            names.into_iter().map(|name| (NodeId::CHECKPOINTS, name)).collect()
        } else {
            let names =
                may_go.iter().map(|info| head.fs.names_in_use(info.header.layer, MAX_NAMES));
            names.filter_map(FsResult::ok).flatten().collect()
        };
        let what = Invalidations { names, ..Invalidations::default() };
        if let Err(error) = head.kernel().invalidate(&what) {
            log::debug!("{error}");
        }
    }

    fn keep_by(&self, policy: &Policy, spared: &BTreeSet<LayerId>) -> Keep {
        let mut spared = spared.clone();
        // The checkpoint below the present tree of a head takes no space of its own.
        spared.extend(self.tops().into_iter().filter_map(|top| self.checkpoint_below(top)));
        Keep {
            operations: policy.operations,
            checkpoints: policy.checkpoints,
            store_bytes: policy.store_bytes,
            spared,
        }
    }

    /// The first checkpoint at or below a layer.
    fn checkpoint_below(&self, top: LayerId) -> Option<LayerId> {
        let mut at = Some(top);
        while let Some(info) = at.and_then(|layer| self.store.layer(layer)) {
            if is_checkpoint(&info) {
                return Some(info.header.layer);
            }
            at = info.header.parent;
        }
        None
    }

    fn is_worth_it(&self, unneeded: &[LayerInfo], needed: usize) -> bool {
        if unneeded.len() >= MIN_LAYERS.max(needed / 8) {
            return true;
        }
        let usage = |info: &LayerInfo| {
            let layer = info.header.layer;
            let archived = info.archived.and_then(|_| self.store.content_space(layer).ok()?);
            self.store.layer_usage(layer) + archived.map_or(0, |(own, _)| own)
        };
        unneeded.iter().map(usage).sum::<u64>() >= MIN_BYTES
    }

    /// Whether the store's disk, or the sandbox's quota, is nearly full.
    fn room_is_short(&self) -> bool {
        let is_short = |head: &Arc<Timeline>| {
            head.fs.statfs().is_ok_and(|space| {
                let bytes = |blocks: u64| blocks.saturating_mul(u64::from(space.block_size));
                bytes(space.available) < PLENTY.min(bytes(space.blocks) / SHORT_PART)
            })
        };
        self.open_heads().iter().any(is_short)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::base::Base;
    use crate::jail::{Jail, Policy as Links};
    use crate::store::{Store, StoreOptions};

    fn timeline(dir: &std::path::Path) -> Arc<Timeline> {
        let base = dir.join("base");
        std::fs::create_dir(&base).unwrap();
        let base = Base::open(&base).unwrap();
        let path = base.path().to_owned();
        let store =
            Store::create(&dir.join("store"), &path, base.root_id(), StoreOptions::default())
                .unwrap();
        let (policy, allowed_targets) = (Links::Deny, Vec::new());
        let jail = Jail { policy, mount_point: path.clone(), base_path: path, allowed_targets };
        Timeline::open(&Common::open(Arc::new(store), Arc::new(base)).unwrap(), "main", jail)
            .unwrap()
    }

    /// The caller may be the thread that answers the kernel, and the compaction may wait for one of
    /// its answers.
    #[test]
    fn reclaiming_space_does_not_wait_for_a_compaction() {
        let dir = tempfile::tempdir().unwrap();
        let timeline = Arc::new(timeline(dir.path()));
        let _compacting = timeline.compacting.lock();
        let (sender, receiver) = mpsc::channel();
        let other = Arc::clone(&timeline);
        std::thread::spawn(move || sender.send(other.reclaim_now()));
        assert_eq!(receiver.recv_timeout(Duration::from_secs(60)), Ok(None));
    }

    #[test]
    fn the_default_policy_drops_no_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let timeline = timeline(dir.path());
        let none = BTreeSet::new();
        let made: Vec<LayerId> =
            (0..3).map(|_| timeline.checkpoint(None, String::new(), None).unwrap()).collect();
        for is_full in [false, true] {
            assert_eq!(timeline.is_due(&Policy::default(), &none, is_full), Due::Not);
        }
        let one = Policy { checkpoints: Some(1), operations: 0, ..Policy::default() };
        assert_eq!(timeline.is_due(&one, &none, false), Due::WhenIdle);
        assert_eq!(timeline.is_due(&one, &none, true), Due::Now);
        assert_eq!(
            timeline.is_due(&one, &made.iter().copied().collect(), true),
            Due::Not,
            "they are spared"
        );
        let collected =
            timeline.collect_by(&one, &made[..1].iter().copied().collect(), &|| true).unwrap();
        let dropped: Vec<LayerId> =
            collected.dropped.iter().map(|info| info.header.layer).collect();
        assert_eq!(dropped, made[1..2]);
        assert_eq!(timeline.is_due(&one, &made[..1].iter().copied().collect(), true), Due::Not);
    }
}
