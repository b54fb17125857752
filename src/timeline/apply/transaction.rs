//! Writes a plan into the base as a transaction: record pre-images, write, seal; or roll back.
//!
//! * All states are read through the pre-images from the moment they are complete, so a reader
//!   never sees a base that is half written.
//! * A transaction ends sealed, or it is left as an [`UnfinishedRollback`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Attempt, Error, FsError, FsResult, Kind, Result};
use crate::fs::merged::pre_images::{PreHistory, PreImages};
use crate::fs::{Found, State};
use crate::store::layer::Upper;
use crate::store::record::LayerKind;
use crate::timeline::Timeline;
use crate::timeline::apply::claims::Claims;
use crate::timeline::apply::plan::Plan;
use crate::timeline::apply::pre_images::{Images, Keep, TouchedPaths};
use crate::timeline::apply::rollback::{ROLLED_BACK, Rollback, roll_back};
use crate::timeline::apply::staging::Stages;
use crate::timeline::apply::unfinished::UnfinishedRollback;
use crate::timeline::apply::write::write_base;
use crate::timeline::apply::{post_images, pre_images, preflight, rollback};
use crate::timeline::checkpoint::seal_unused;
use crate::types::{Epoch, LayerId, TreePath};

/// An apply or an undo whose pre-images are recorded and whose layer is not sealed.
struct Transaction {
    /// The pre-image layer.
    layer: Upper,
    /// The epoch of the base that the transaction begins.
    epoch: Epoch,
    /// The applies before this one.
    earlier: PreHistory,
    /// The same, and this one.
    with_images: PreHistory,
    images: Images,
    touched: TouchedPaths,
    stages: Stages,
    claims: Claims,
}

impl Timeline {
    /// Makes the base look as the plan says, and notes in the plan what the base did not keep.
    /// Seals the pre-image layer with `message`. Returns the epoch that this begins.
    ///
    /// # Errors
    /// Fails if the plan cannot be written; the base is then as it was before. The error says so if
    /// the base could not be rolled back.
    pub(in crate::timeline) fn write_plan(&self, plan: &mut Plan, message: &str) -> Result<Epoch> {
        preflight::check(self.base(), plan)?;
        self.was_rolled_back.store(false, Ordering::SeqCst);
        let mut transaction = self.begin(plan)?;
        match self.write_changes(&mut transaction, plan) {
            Ok(images) => self.commit(transaction, images, message),
            Err(error) => Err(self.abort(transaction, describe(error))),
        }
    }

    /// Records the pre-images, and lets all states be read through them.
    fn begin(&self, plan: &Plan) -> Result<Transaction> {
        let during = |error: Error| error.during("apply");
        let earlier = self.applies.lock().clone();
        let epoch = Epoch(u32::try_from(earlier.len()).unwrap_or(u32::MAX).saturating_add(1));
        let mut layer =
            self.store().create_layer(None, "", epoch, LayerKind::PreImage).map_err(during)?;
        let (touched, stages, images) = record_pre_images(&mut layer, plan)
            .map_err(|error| self.withdraw((layer.layer(), epoch), during(error)))?;
        let with_images: PreHistory =
            earlier.iter().cloned().chain([Arc::new(pre_images::collect(&images, &[]))]).collect();
        self.install_history(&with_images);
        let claims = Claims::default();
        Ok(Transaction { layer, epoch, earlier, with_images, images, touched, stages, claims })
    }

    /// Writes the changes of the plan into the base, and records what the base has afterwards.
    fn write_changes(&self, transaction: &mut Transaction, plan: &mut Plan) -> FsResult<PreImages> {
        let Transaction { layer, images, touched, stages, claims, .. } = transaction;
        let to = State {
            tree: plan.to.tree.clone(),
            lower: Arc::new(self.lower(plan.to.lower.epoch(), &transaction.with_images)),
        };
        let mut claim = |path: &TreePath, print| claims.claim(layer, path, print);
        let states = (&plan.from, &to);
        let written =
            write_base(self.base(), states, &plan.changes, touched, stages, &mut claim, None)?;
        let written = post_images::drop_shared_numbers(self.store(), self.base(), plan, written)?;
        let lookup = self.base().lookup_paths();
        let foreign =
            claims.foreign_paths(self.base(), images, |path| written.stat(&lookup, path))?;
        if !foreign.is_empty() {
            log::warn!("{}", rollback::describe_foreign(&foreign));
        }
        plan.not_kept = post_images::not_kept(&written);
        post_images::record(self.store(), self.base(), layer, images.clone(), &written, &foreign)
    }

    /// Seals the transaction with `message`. `images` are what earlier states read from now on.
    fn commit(&self, transaction: Transaction, images: PreImages, message: &str) -> Result<Epoch> {
        let Transaction { mut layer, epoch, earlier, .. } = transaction;
        if let Err(why) = seal_unused(self.store(), &mut layer, message) {
            let unfinished = UnfinishedRollback::of_all(layer.layer(), epoch, &why);
            return Err(self.leave_unfinished(unfinished, why.during("apply")));
        }
        let history: PreHistory = earlier.into_iter().chain([Arc::new(images)]).collect();
        self.install_history(&history);
        Ok(epoch)
    }

    /// Rolls the transaction back after `error`, which is returned with what became of the base.
    fn abort(&self, mut transaction: Transaction, error: Error) -> Error {
        let (images, exceptions) = match self.roll_back_now(&mut transaction) {
            Ok(rolled_back) => rolled_back,
            Err(unfinished) => return self.leave_unfinished(unfinished, error),
        };
        if let Err(error) = self.commit(transaction, images, ROLLED_BACK) {
            return error;
        }
        match exceptions {
            Some(exceptions) => error.hint(exceptions),
            None if error.kind == Kind::Conflict => {
                error.hint("it was changed during the apply; the apply was rolled back")
            }
            None => error,
        }
    }

    /// Rolls back. Returns the images as the base has them since, and a description of the paths
    /// that are not as they were before.
    fn roll_back_now(
        &self,
        transaction: &mut Transaction,
    ) -> std::result::Result<(PreImages, Option<String>), UnfinishedRollback> {
        let Transaction { layer, epoch, earlier, images, stages, claims, .. } = transaction;
        let recorded = (std::mem::take(images), &*stages);
        match roll_back(self.store(), self.base(), layer, recorded, earlier, claims) {
            Ok(Rollback::Ended(images, exceptions)) => Ok((*images, exceptions)),
            Ok(Rollback::Unfinished(remaining)) => {
                Err(UnfinishedRollback::new(layer.layer(), *epoch, remaining))
            }
            Err(why) => Err(UnfinishedRollback::of_all(layer.layer(), *epoch, &why)),
        }
    }

    /// Removes the layer of a transaction that failed before the first write to the base. Otherwise
    /// the next start would roll it back.
    fn withdraw(&self, (layer, epoch): (LayerId, Epoch), error: Error) -> Error {
        match self.store().withdraw_layer(layer) {
            Ok(()) if error.kind == Kind::Conflict => {
                error.hint("it was changed during the apply; nothing is written")
            }
            Ok(()) => error,
            Err(why) => {
                log::warn!("{why}");
                self.leave_unfinished(UnfinishedRollback::of_all(layer, epoch, &why), error)
            }
        }
    }
}

fn describe(error: FsError) -> Error {
    match FsResult::<std::convert::Infallible>::Err(error).attempt(|| "apply: write the base") {
        Err(error) => error,
        Ok(never) => match never {},
    }
}

/// Records the pre-images of all paths that a plan touches, and syncs them. Returns these paths,
/// and the names under which content will be staged.
///
/// # Errors
/// Those of the base and the store; a touched path at which another filesystem is mounted.
fn record_pre_images(layer: &mut Upper, plan: &Plan) -> Result<(TouchedPaths, Stages, Images)> {
    let read = || "read the base";
    let mut touched = pre_images::touched_paths(&plan.changes);
    // A change under one name of a file changes the change time, and perhaps the link count, under
    // all its names.
    let linked = pre_images::linked_names(&plan.from, &plan.to, &plan.changes).attempt(read)?;
    let replaced = plan.changes.iter().filter(|change| pre_images::replaces_name(change));
    let dirs: BTreeSet<TreePath> = replaced
        .map(|change| &change.path)
        .chain(linked.keys())
        .filter_map(|path| path.split())
        .map(|(dir, _)| dir)
        .collect();
    let stages = Stages::choose(&plan.from, dirs).attempt(read)?;
    for path in linked.into_keys().chain(stages.paths()) {
        touched.entry(path).or_insert(Keep::InPlace);
    }
    let mut walk = plan.from.resolve_many();
    let found: Vec<(&TreePath, Found, Keep)> = touched
        .iter()
        .map(|(path, keep)| Ok((path, walk.resolve(path)?, *keep)))
        .collect::<FsResult<_>>()
        .attempt(read)?;
    if let Some((path, ..)) = found.iter().find(|(_, found, _)| pre_images::is_mounted(found)) {
        return Err(FsError::LeavesJail)
            .attempt(|| format!("write '{path}', at which something is mounted"));
    }
    let images =
        pre_images::record(layer, &plan.from, found).attempt(|| "record the pre-images")?;
    stages.record(layer)?;
    layer.sync()?;
    Ok((touched, stages, images))
}
