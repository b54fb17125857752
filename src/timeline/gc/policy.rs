//! Giving space back without being asked: when that pays, and what stays then.
//!
//! Always true:
//! * without a word from a person, only that goes which `jailfs gc` would take: states that neither a checkpoint, nor a hold, nor
//!   one of the last operations leads to;
//! * the checkpoint that the tree lies on stays, and so does a state that somebody stands in or reads in the mount.
//!
//! Looking whether it pays costs what a list of the layers costs, collecting as much as all records that are kept. So it is done
//! when there is enough to be had for that, or when room is short.

use std::collections::BTreeSet;

use crate::error::{FsResult, Result};
use crate::fs::Invalidations;
use crate::store::layer::LayerInfo;
use crate::timeline::Timeline;
use crate::timeline::gc::{Collected, Keep, is_checkpoint};
use crate::types::{LayerId, Name, NodeId};

/// So many states that nothing needs are worth a collection.
const MIN_LAYERS: usize = 32;
/// As are so many bytes of them.
const MIN_BYTES: u64 = 64 << 20;
/// Room is short when less than this part of the disk, or of the limit, is left.
const SHORT_PART: u64 = 16;
/// It never is with so many bytes.
const PLENTY: u64 = 1 << 30;
/// Of a state of which the kernel holds more nodes than these, it is not asked for single ones.
const MAX_NAMES: usize = 2000;

/// What may go without being asked for each time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// What so many of the last operations can go back to stays.
    pub operations: u64,
    /// The newest checkpoints that stay, so many; none keeps all.
    pub checkpoints: Option<u64>,
    /// Checkpoints are given up, the oldest first, when the store takes more bytes than these.
    pub store_bytes: Option<u64>,
}

/// The name of a state in the mount.
fn name_of(info: &LayerInfo) -> Option<Name> {
    let name = info.seal.as_ref()?.name.clone();
    Name::new(name.unwrap_or_else(|| info.header.layer.to_string()).as_bytes()).ok()
}

impl Policy {
    /// What stays of the operations if nobody says otherwise.
    pub const OPERATIONS: u64 = 100;
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { operations: Policy::OPERATIONS, checkpoints: None, store_bytes: None }
    }
}

/// Whether there is something to collect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// There is nothing, or it does not pay.
    Not,
    /// When nobody asks for anything.
    WhenIdle,
    /// At once: room is short.
    Now,
}

impl Timeline {
    /// Whether it is time to collect. Who has met a full disk is glad of anything.
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

    /// Gives back what may go, as long as `go` says so. Whoever asks keeps others from looking at states meanwhile.
    ///
    /// # Errors
    /// As [`Timeline::gc`].
    pub fn collect_by(
        &self,
        policy: &Policy,
        spared: &BTreeSet<LayerId>,
        go: &dyn Fn() -> bool,
    ) -> Result<Collected> {
        let mut keep = self.keep_by(policy, spared);
        keep.spared.extend(self.fs.layers_in_use());
        // A little more than is asked for, so that it is not asked for again at once.
        keep.store_bytes = keep.store_bytes.map(|limit| limit - limit / SHORT_PART);
        // What gives space back takes some first; on a full disk the reserve is for it.
        self.with_reserve(|| self.gc_while(&keep, false, go))
    }

    /// Makes the kernel let go of what it remembers of states that may go, but for what somebody stands in or has open. First whole
    /// states; what it still holds of them then is asked for node by node, because who had it open kept it from going with the rest.
    pub fn ask_kernel_for_states(&self, policy: &Policy, spared: &BTreeSet<LayerId>, whole: bool) {
        let held = self.fs.layers_in_use();
        let keep = self.keep_by(policy, spared);
        let mut may_go = self.sealed();
        may_go.retain(|l| held.contains(&l.header.layer) && !keep.spared.contains(&l.header.layer));
        let names = if whole {
            let names = may_go.iter().filter_map(name_of).map(|name| (NodeId::CHECKPOINTS, name));
            names.collect()
        } else {
            let names =
                may_go.iter().map(|info| self.fs.names_in_use(info.header.layer, MAX_NAMES));
            names.filter_map(FsResult::ok).flatten().collect()
        };
        let what = Invalidations { names, ..Invalidations::default() };
        if let Err(error) = self.kernel().invalidate(&what) {
            log::debug!("{error}");
        }
    }

    fn keep_by(&self, policy: &Policy, spared: &BTreeSet<LayerId>) -> Keep {
        let mut spared = spared.clone();
        // It takes no space of its own as long as the tree lies on it.
        spared.extend(
            self.ancestry().iter().find(|info| is_checkpoint(info)).map(|info| info.header.layer),
        );
        Keep {
            operations: policy.operations,
            checkpoints: policy.checkpoints,
            store_bytes: policy.store_bytes,
            spared,
        }
    }

    fn is_worth_it(&self, unneeded: &[LayerInfo], needed: usize) -> bool {
        if unneeded.len() >= MIN_LAYERS.max(needed / 8) {
            return true;
        }
        unneeded.iter().map(|info| self.store.layer_usage(info.header.layer)).sum::<u64>()
            >= MIN_BYTES
    }

    /// Whether the disk of the store, or what the sandbox may store, is nearly full.
    fn room_is_short(&self) -> bool {
        self.fs.statfs().is_ok_and(|space| {
            let bytes = |blocks: u64| blocks.saturating_mul(u64::from(space.block_size));
            bytes(space.available) < PLENTY.min(bytes(space.blocks) / SHORT_PART)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use super::*;
    use crate::base::Base;
    use crate::jail::{Jail, Policy as Links};
    use crate::store::{Store, StoreOptions};

    fn timeline(dir: &std::path::Path) -> Timeline {
        let base = dir.join("base");
        std::fs::create_dir(&base).unwrap();
        let base = Base::open(&base).unwrap();
        let path = base.path().to_owned();
        let store =
            Store::create(&dir.join("store"), &path, base.root_id(), StoreOptions::default())
                .unwrap();
        let (policy, allowed_targets) = (Links::Deny, Vec::new());
        let jail = Jail { policy, mount_point: path.clone(), base_path: path, allowed_targets };
        Timeline::open(Arc::new(store), Arc::new(base), "main", jail).unwrap()
    }

    /// It may be the thread that answers the kernel, and whoever tidies up may wait for an answer of that.
    #[test]
    fn who_needs_room_does_not_wait_for_who_tidies_up() {
        let dir = tempfile::tempdir().unwrap();
        let timeline = Arc::new(timeline(dir.path()));
        let _compacting = timeline.compacting.lock();
        let (tell, told) = mpsc::channel();
        let asking = Arc::clone(&timeline);
        std::thread::spawn(move || tell.send(asking.reclaim_now()));
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(None));
    }

    #[test]
    fn without_a_word_no_checkpoint_goes_and_nothing_is_due() {
        let dir = tempfile::tempdir().unwrap();
        let timeline = timeline(dir.path());
        let none = BTreeSet::new();
        let made: Vec<LayerId> =
            (0..3).map(|_| timeline.checkpoint(None, String::new()).unwrap()).collect();
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
