//! Maintains a store: drops and holds checkpoints, collects garbage, compacts, checks and repairs.

use std::path::Path;
use std::sync::Arc;

use crate::error::Result;
use crate::sandbox::states::checkpoint_of;
use crate::sandbox::{
    Checked, Checkpoint, Collected, Info, KeepPolicy, LayerSpace, Protected, Rev, Sandbox,
    Savepoint,
};
use crate::timeline::gc::Keep;
use crate::timeline::{Due, Effort, fsck, gc};

impl Sandbox {
    /// Drops a checkpoint. Waits for the readers of states.
    pub(super) fn drop_checkpoint(&self, rev: &Rev) -> Result<Checkpoint> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        let layer = self.checkpoint_named(rev)?;
        let dropped = self.checkpoint_info(layer)?;
        self.timeline.drop_checkpoint(layer)?;
        Ok(dropped)
    }

    /// Sets or removes the hold on a checkpoint.
    pub(super) fn hold(&self, rev: &Rev, held: bool) -> Result<Checkpoint> {
        let layer = self.checkpoint_named(rev)?;
        self.timeline.hold(layer, held)?;
        self.checkpoint_info(layer)
    }

    /// Compacts the store as far as possible: journals, edit histories, equal content, and small
    /// layers. A mounted sandbox does this in the background where it pays. The visible tree and
    /// all checkpoints stay the same.
    ///
    /// # Errors
    /// The store cannot be read or written. Nothing is lost.
    pub fn compact(&self) -> Result<()> {
        self.timeline.maintain_edit_history(true, &|| false);
        self.timeline.shorten_journal(Effort::Everything)?;
        self.timeline.compact(Effort::Everything)?;
        self.timeline.dedup(&|| true)?;
        self.timeline.archive_cold(Effort::Everything, &|| true)
    }

    /// Sets whether equal content is stored only once. It is on by default.
    pub fn set_dedup(&self, on: bool) {
        self.timeline.set_dedup(on);
    }

    /// Sets which paths an apply writes only with consent. The default is the built-in list.
    pub fn set_protected(&self, list: Protected) {
        self.timeline.set_protected(list);
    }

    /// Checks the store. Nothing is rewritten meanwhile.
    pub(super) fn check(&self, read_data: bool) -> Result<Checked> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        self.timeline.check(read_data).map(checked)
    }

    /// Checks a store without opening it, so the store may be damaged. With `read_data`, reads all
    /// content and verifies its checksums.
    ///
    /// # Errors
    /// There is no store at `path`, or it has another format.
    pub fn check_store(path: &Path, read_data: bool) -> Result<Checked> {
        fsck::check(path, read_data).map(checked)
    }

    /// Checks a store that no process has open, and repairs what can be repaired without loss:
    /// damaged indexes and checksums are rebuilt from the journals and the content. The remaining
    /// damage is listed with the problems.
    ///
    /// # Errors
    /// As for [`Sandbox::check_store`]. The store cannot be written.
    /// [`Kind::InUse`](crate::error::Kind::InUse) if a process has it open.
    pub fn repair_store(path: &Path, read_data: bool) -> Result<Checked> {
        let repaired = fsck::repair(path)?;
        let mut checked = Sandbox::check_store(path, read_data)?;
        // List each problem once.
        checked
            .problems
            .retain(|problem| !repaired.left.iter().any(|left| left.ends_with(problem)));
        checked.problems.extend(repaired.left);
        Ok(Checked { repaired: repaired.done, ..checked })
    }

    /// The disk space of each layer.
    pub(super) fn info(&self) -> Result<Info> {
        let store = self.timeline.store();
        let mut layers = Vec::new();
        for info in store.catalog() {
            let layer = info.header.layer;
            let Some((own, shared)) = store.content_space(layer)? else { continue };
            layers.push(LayerSpace {
                layer,
                name: info.seal.as_ref().and_then(|seal| seal.name.clone()),
                open: info.seal.is_none(),
                logical: own + shared,
                stored: store.layer_usage(layer),
                shared,
            });
        }
        Ok(Info {
            layers,
            store_bytes: store.disk_usage(),
            to_do: self.timeline.layers_to_deduplicate(),
        })
    }

    /// Sets what the background collection of a mounted sandbox may drop; `None` turns it off.
    /// `limit` is the most that the sandbox may store, in bytes.
    pub fn set_policy(&self, policy: Option<KeepPolicy>, limit: Option<u64>) {
        let mut terms = self.shared.terms.lock();
        (terms.policy, terms.limit) = (policy, limit);
    }

    /// Pins all states that exist now: the background collection keeps them until
    /// [`Sandbox::unpin_states`].
    pub fn pin_states(&self) {
        self.shared.terms.lock().pinned =
            self.timeline.sealed().iter().map(|info| info.header.layer).collect();
    }

    /// Unpins the states of [`Sandbox::pin_states`] and collects garbage if that pays. Returns the
    /// dropped checkpoints.
    ///
    /// # Errors
    /// The store cannot be read or written.
    pub fn unpin_states(&self) -> Result<Vec<Checkpoint>> {
        let terms = {
            let mut terms = self.shared.terms.lock();
            terms.pinned.clear();
            terms.clone()
        };
        let spared = terms.spared();
        let Some(policy) = terms.policy else { return Ok(Vec::new()) };
        if self.timeline.is_due(&policy, &spared, false) == Due::Not {
            return Ok(Vec::new());
        }
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        let collected = self.timeline.collect_by(&policy, &spared, &|| true)?;
        Ok(self.dropped(&collected))
    }

    /// Records which checkpoints, holds, operations and edits exist, for [`Sandbox::rewind_to`].
    pub fn savepoint(&self) -> Savepoint {
        self.timeline.savepoint()
    }

    /// Removes the checkpoints, holds, operations and edits that were made after a savepoint. First
    /// the tree must be [reset](Sandbox::reset_to) to a state that existed at the savepoint.
    ///
    /// # Errors
    /// The tree lies on a state that would be removed, or the store cannot be written. Some of the
    /// records may then remain.
    pub fn rewind_to(&self, savepoint: &Savepoint) -> Result<()> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        self.timeline.rewind_to(savepoint)
    }

    /// Collects garbage. Waits for the readers of states; programs in the mount go on.
    pub(super) fn gc(&self, keep: &Keep, dry_run: bool) -> Result<Collected> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        let collected = self.timeline.gc(keep, dry_run)?;
        Ok(Collected {
            dropped: self.dropped(&collected),
            layers: collected.layers,
            bytes: collected.bytes,
            store_bytes: self.timeline.store().disk_usage(),
        })
    }

    fn dropped(&self, collected: &gc::Collected) -> Vec<Checkpoint> {
        let parent = self.timeline.parent();
        collected.dropped.iter().filter_map(|info| checkpoint_of(info, parent)).collect()
    }
}

fn checked(report: fsck::Report) -> Checked {
    Checked {
        problems: report.problems.iter().map(ToString::to_string).collect(),
        repaired: Vec::new(),
        layers: report.layers,
        records: report.records,
        extents: report.extents,
        bytes_read: report.bytes_read,
        bytes_without_sum: report.bytes_without_sum,
        warnings: report.warnings.iter().map(ToString::to_string).collect(),
        edits: report.edits,
    }
}
