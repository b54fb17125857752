//! Rolls back an apply that failed or was interrupted: makes the base equal to the pre-images.
//!
//! * Changes that another program made to the base meanwhile are kept and reported. They are
//!   conflicts of the next apply.
//! * A path that cannot be rolled back does not keep the others from it. If its obstacle can go
//!   away, as a read-only base, a full disk or a missing right can, the rollback stays
//!   *unfinished*: the layer is not sealed, readers still see the pre-images, and the rollback is
//!   retried later (see [`super::unfinished`]).
//! * Each attempt starts from the pre-images in the journal, so an attempt can be interrupted as
//!   well.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::{Base, BaseStat, Obstacle};
use crate::error::{Attempt, Error, FsError, FsResult, Result, if_exists};
use crate::fs::State;
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::{PreHistory, PreImages, read_history};
use crate::store::Store;
use crate::store::layer::{LayerContents, Upper};
use crate::store::record::{LayerKind, PreNode, Record};
use crate::sys::capabilities;
use crate::timeline::apply::claims::{Claims, DoubtfulPaths};
use crate::timeline::apply::pre_images::{Images, Keep, TouchedPaths, collect, touched_paths};
use crate::timeline::apply::staging::Stages;
use crate::timeline::apply::write::{Failures, WriteOutcome, is_final, write_base};
use crate::timeline::apply::{post_images, staging};
use crate::timeline::checkpoint::seal_unused;
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Tree};
use crate::types::{Epoch, FileKind, TreePath};

/// The message in the seal of an apply that was rolled back. It is part of the store format.
pub(in crate::timeline) const ROLLED_BACK: &str = "taken back";

/// Paths that are not rolled back yet, and why. The root stands for a reason that concerns no
/// single path.
pub(in crate::timeline) type Remaining = Vec<(TreePath, String)>;

/// The result of a rollback.
pub(in crate::timeline) enum Rollback {
    /// It ended. The images as the base has them since, and a description of the paths that are not
    /// as they were before the apply.
    Ended(Box<PreImages>, Option<String>),
    /// It is to be retried.
    Unfinished(Remaining),
}

/// Paths that a rollback did not restore, or restored in doubt.
#[derive(Default)]
struct Exceptions {
    /// Left as another program made them.
    foreign: BTreeSet<TreePath>,
    /// Not as they were before the apply.
    failed: Failures,
    /// Restored although another program may have written them: a power cut destroyed the claims.
    doubtful: BTreeSet<TreePath>,
}

impl Exceptions {
    fn describe(&self) -> Option<String> {
        let mut parts = Vec::new();
        if !self.foreign.is_empty() {
            parts.push(describe_foreign(&self.foreign));
        }
        if !self.failed.is_empty() {
            let paths: Vec<String> =
                self.failed.iter().map(|(path, why)| format!("'{path}' ({why})")).collect();
            parts.push(format!("not rolled back: {}", paths.join(", ")));
        }
        if !self.doubtful.is_empty() {
            parts.push(format!(
                "rolled back, although another program may have changed it before the reboot: {}",
                quoted(&self.doubtful)
            ));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// Says that these paths were left as another program made them.
pub(in crate::timeline) fn describe_foreign(paths: &BTreeSet<TreePath>) -> String {
    format!("changed by another program meanwhile and left as it is: {}", quoted(paths))
}

fn quoted(paths: &BTreeSet<TreePath>) -> String {
    let quoted: Vec<String> = paths.iter().map(|path| format!("'{path}'")).collect();
    quoted.join(", ")
}

/// Makes the base equal to `images`, which an apply after the applies `before` recorded with the
/// names `stages`. If that ends, records what the base has since.
///
/// # Errors
/// Those of the store, and those of the base that concern no single path.
pub(in crate::timeline) fn roll_back(
    store: &Arc<Store>,
    base: &Arc<Base>,
    layer: &mut Upper,
    (images, stages): (Images, &Stages),
    before: &PreHistory,
    claims: &mut Claims,
) -> Result<Rollback> {
    open_directories(base, &images)?;
    let mut failed = unreadable(base, &images);
    let readable: Images =
        images.iter().filter(|(path, _)| !failed.contains_key(path)).cloned().collect();
    // This comes before the first change: removing one name of a file changes the change time under
    // all its names.
    let attempt = || "look at the base";
    let DoubtfulPaths { mut foreign, lost } =
        claims.renew_lost(layer, base, &readable, stages).attempt(attempt)?;
    foreign.extend(lost_in_place(base, &readable).attempt(attempt)?);
    failed.extend(stages.remove_left(base));
    let restore = Restore::new(store, base, before, &readable)?;
    let (written, unwritten) = restore.write(layer, stages, claims, &mut foreign)?;
    failed.extend(unwritten);
    if let Some(remaining) = remaining(base, &failed) {
        let others = Exceptions { foreign, failed: Failures::new(), doubtful: lost };
        others.describe().iter().for_each(|others| log::warn!("{others}"));
        return Ok(Rollback::Unfinished(remaining));
    }
    let not_restored = foreign.iter().chain(failed.keys()).cloned().collect();
    let images = post_images::record(store, base, layer, images, &written, &not_restored)
        .attempt(|| "roll back the base")?;
    let exceptions = Exceptions { foreign, failed, doubtful: lost };
    Ok(Rollback::Ended(Box::new(images), exceptions.describe()))
}

/// Gives us access to the directories that the apply may have closed already. Their attributes are
/// restored at the end.
fn open_directories(base: &Base, images: &Images) -> Result<()> {
    let mut paths: Vec<&TreePath> = images.iter().map(|(path, _)| path).collect();
    paths.sort_unstable();
    staging::open(base, paths.into_iter(), true).attempt(|| "open directories of the base")?;
    Ok(())
}

/// The paths of the base that cannot be looked at.
fn unreadable(base: &Base, images: &Images) -> Failures {
    let failure = |path: &TreePath| if_exists(base.stat(path)).err();
    images.iter().filter_map(|(path, _)| Some((path.clone(), failure(path)?))).collect()
}

/// All paths that were not rolled back, and why, if another attempt may succeed with any of them.
fn remaining(base: &Base, failed: &Failures) -> Option<Remaining> {
    let is_read_only = base.obstacle().ok().flatten();
    let has_rights = may_change_owners();
    let mut may_succeed = false;
    let mut remaining = Remaining::new();
    for (path, error) in failed {
        // A change of another program is never rolled back, whatever else is in the way.
        let is_drift = matches!(error, FsError::Drift(_));
        let obstacle = is_read_only.or_else(|| obstacle_at(base, path)).filter(|_| !is_drift);
        let is_refused = matches!(error, FsError::NotPermitted) && has_rights;
        may_succeed |= obstacle.is_some() || is_refused || !is_final(error);
        remaining.push((
            path.clone(),
            obstacle.map_or_else(|| error.to_string(), |why| why.to_string()),
        ));
    }
    may_succeed.then_some(remaining)
}

/// Whether this process may change files of other users, and give them away. An EPERM then comes
/// from a flag or a security module, so it may not come again.
fn may_change_owners() -> bool {
    const NEEDED: u64 = capabilities::CHOWN | capabilities::FOWNER;
    capabilities::effective().is_ok_and(|have| have & NEEDED == NEEDED)
}

/// An obstacle to a change at a path that the user can remove.
fn obstacle_at(base: &Base, path: &TreePath) -> Option<Obstacle> {
    let in_dir = path.split().and_then(|(dir, _)| base.obstacle_in(&dir).ok().flatten());
    in_dir.or_else(|| base.obstacle_to_remove(path).ok().flatten())
}

/// The paths of files whose bytes the apply left in place and that are not there any more.
///
/// Such files cannot be made again. The apply may have given one of them another name, under which
/// it still exists: that path is returned as well, so that the last copy of the bytes is not
/// removed.
fn lost_in_place(base: &Base, images: &Images) -> FsResult<BTreeSet<TreePath>> {
    let (mut lost, mut nodes) = (BTreeSet::new(), BTreeSet::new());
    for (path, image) in images {
        let Some(image) = image else { continue };
        let Body::File { size, origin: Some(_) } = image.node.body else { continue };
        let is_it = |stat: &BaseStat| {
            let is_node = stat.ino == image.host || !base.has_stable_inodes();
            stat.kind == FileKind::File && stat.size == size && is_node
        };
        if size > 0 && !if_exists(base.stat(path))?.is_some_and(|stat| is_it(&stat)) {
            lost.insert(path.clone());
            nodes.insert((image.host, size));
        }
    }
    for (path, _) in images.iter().filter(|_| base.has_stable_inodes() && !nodes.is_empty()) {
        // The host may have given the inode to another file of the same size. Leaving that file is
        // better than to lose the bytes.
        if if_exists(base.stat(path))?.is_some_and(|stat| nodes.contains(&(stat.ino, stat.size))) {
            lost.insert(path.clone());
        }
    }
    Ok(lost)
}

/// The part of a rollback that writes the base.
struct Restore<'a> {
    base: &'a Base,
    /// The base as it is.
    from: State,
    /// The base before the apply.
    to: State,
    changes: Vec<PathChange>,
    /// The paths of the pre-images.
    touched_by_apply: BTreeSet<TreePath>,
}

impl<'a> Restore<'a> {
    /// Compares the base as it is with `images`, which an apply after the applies `before`
    /// recorded.
    fn new(
        store: &Arc<Store>,
        base: &'a Arc<Base>,
        before: &PreHistory,
        images: &Images,
    ) -> Result<Restore<'a>> {
        let history: PreHistory =
            before.iter().cloned().chain([Arc::new(collect(images, &[]))]).collect();
        let at = |epoch: usize| {
            let epoch = Epoch(u32::try_from(epoch).unwrap_or(u32::MAX));
            let lower = Lower::new(Arc::clone(base), Arc::clone(store), epoch, history.clone());
            State { tree: Tree::new(), lower: Arc::new(lower) }
        };
        let (from, to) = (at(history.len()), at(before.len()));
        let changes = diff::changes(&from, &to).attempt(|| "roll back the base")?;
        let touched_by_apply =
            history.last().iter().flat_map(|images| images.paths().cloned()).collect();
        Ok(Restore { base, from, to, changes, touched_by_apply })
    }

    /// Writes everything but `foreign` paths, and adds to these what else is left because of
    /// another program. Returns what was written, and what could not be written.
    fn write(
        mut self,
        layer: &mut Upper,
        stages: &Stages,
        claims: &mut Claims,
        foreign: &mut BTreeSet<TreePath>,
    ) -> Result<(WriteOutcome, Failures)> {
        let attempt = || "roll back the base";
        foreign.extend(mounted(self.base, &self.touched_by_apply).attempt(attempt)?);
        foreign.extend(self.added_by_others());
        let in_use = self.dirs_in_use(foreign).attempt(attempt)?;
        let touched = self.keep_back(foreign, &in_use);
        foreign.extend(in_use);
        let mut claim = |path: &TreePath, print| claims.claim(layer, path, print);
        let mut failures = Failures::new();
        let states = (&self.from, &self.to);
        let written = write_base(
            self.base,
            states,
            &self.changes,
            &touched,
            stages,
            &mut claim,
            Some(&mut failures),
        )
        .attempt(attempt)?;
        Ok((written, failures))
    }

    /// The topmost paths that would be removed although the apply did not make them: another
    /// program put them into directories that the apply made.
    fn added_by_others(&self) -> BTreeSet<TreePath> {
        let mut added = BTreeSet::new();
        let mut topmost: Option<&TreePath> = None;
        for path in removed(&self.changes).filter(|path| !self.touched_by_apply.contains(*path)) {
            if topmost.is_none_or(|top| !path.starts_with(top)) {
                added.insert(path.clone());
                topmost = Some(path);
            }
        }
        added
    }

    /// The directories that would be removed, but hold something that stays.
    fn dirs_in_use(&self, foreign: &BTreeSet<TreePath>) -> FsResult<BTreeSet<TreePath>> {
        let removed: BTreeSet<&TreePath> = removed(&self.changes).collect();
        let mut in_use = BTreeSet::new();
        // Deepest first: a directory stays if anything in it stays.
        for path in removed.iter().rev() {
            let stat = if_exists(self.base.stat(path))?;
            if !stat.is_some_and(|stat| stat.kind == FileKind::Dir && !stat.foreign) {
                continue;
            }
            let stays = |inside: &TreePath| {
                !removed.contains(inside) || foreign.contains(inside) || in_use.contains(inside)
            };
            let is_in_use = match self.base.list(path) {
                // Without access we cannot remove what is in it.
                Err(FsError::AccessDenied) => true,
                entries => entries?.iter().any(|entry| stays(&path.join(&entry.name))),
            };
            if is_in_use {
                in_use.insert((*path).clone());
            }
        }
        Ok(in_use)
    }

    /// Drops the changes of directories in use, and those at and below foreign paths: nothing can
    /// be restored below a file that stays. Returns the paths that the other changes touch.
    fn keep_back(
        &mut self,
        foreign: &BTreeSet<TreePath>,
        in_use: &BTreeSet<TreePath>,
    ) -> TouchedPaths {
        let stays = |path: &TreePath| {
            in_use.contains(path) || path.upwards().any(|above| foreign.contains(&above))
        };
        self.changes.retain(|change| !stays(&change.path));
        let mut touched = touched_paths(&self.changes);
        for path in std::mem::take(&mut self.touched_by_apply) {
            touched.entry(path).or_insert(Keep::InPlace);
        }
        touched.retain(|path, _| !stays(path));
        touched
    }
}

/// The paths whose node is removed.
fn removed(changes: &[PathChange]) -> impl Iterator<Item = &TreePath> {
    changes.iter().filter(|c| matches!(c.what, What::Deleted | What::Type)).map(|c| &c.path)
}

/// The paths, and their directories, at which another filesystem is mounted. The base's own
/// nodes there cannot be reached.
fn mounted(base: &Base, paths: &BTreeSet<TreePath>) -> FsResult<BTreeSet<TreePath>> {
    let (mut seen, mut mounted) = (BTreeSet::new(), BTreeSet::new());
    for path in paths {
        for path in path.upwards().take_while(|path| seen.insert(path.clone())) {
            if if_exists(base.stat(&path))?.is_some_and(|stat| stat.foreign) {
                mounted.insert(path);
            }
        }
    }
    Ok(mounted)
}

/// The layers of interrupted applies: pre-image layers that are neither sealed nor abandoned.
///
/// # Errors
/// Damage.
pub(in crate::timeline) fn interrupted(store: &Store) -> Result<Vec<LayerContents>> {
    let mut all = store.catalog();
    all.retain(|l| l.header.kind == LayerKind::PreImage && l.seal.is_none());
    let mut interrupted = Vec::new();
    for info in all {
        let contents = store.read_layer(info.header.layer)?;
        if !contents.has(|record| matches!(record, Record::Abandoned))? {
            interrupted.push(contents);
        }
    }
    Ok(interrupted)
}

/// Rolls back an interrupted apply. Returns what remains, if the rollback is unfinished.
///
/// # Errors
/// Those of [`roll_back`]; damage.
pub(in crate::timeline) fn resume(
    store: &Arc<Store>,
    base: &Arc<Base>,
    contents: LayerContents,
) -> Result<Option<Remaining>> {
    let id = contents.info.header.layer;
    let during = |e: Error| e.during(format!("roll back the apply of layer {id}"));
    let mut layer = store.reopen_layer(&contents).map_err(during)?;
    let Some(images) = images_of(&contents).map_err(during)? else {
        layer.record(&Record::Abandoned).map_err(during)?;
        layer.sync().map_err(during)?;
        return Ok(None);
    };
    let stages = Stages::of(&contents).map_err(during)?;
    let mut claims = Claims::of(&contents, store.writer())?;
    // The reopened journal ends before the claims whose sync failed.
    for lost in contents.unsynced.iter().filter(|record| matches!(record, Record::Left(_))) {
        layer.record(lost).map_err(during)?;
    }
    drop(contents);
    let before = read_history(store).map_err(during)?;
    let recorded = (images, &stages);
    match roll_back(store, base, &mut layer, recorded, &before, &mut claims).map_err(during)? {
        Rollback::Unfinished(remaining) => Ok(Some(remaining)),
        Rollback::Ended(_, exceptions) => {
            seal_unused(store, &mut layer, ROLLED_BACK).map_err(during)?;
            log::warn!("an interrupted apply was rolled back");
            exceptions.iter().for_each(|exceptions| log::warn!("{exceptions}"));
            Ok(None)
        }
    }
}

/// The pre-images of an interrupted apply. None if they are incomplete: then the apply has not
/// changed the base.
///
/// # Errors
/// Damage.
pub(in crate::timeline) fn images_of(contents: &LayerContents) -> Result<Option<Images>> {
    let Some(complete) = contents.position(|record| matches!(record, Record::Synced))? else {
        return Ok(None);
    };
    let images =
        contents.records().take(complete).filter_map(|record| record.map(image_in).transpose());
    images.collect::<Result<Images>>().map(Some)
}

fn image_in(record: Record) -> Option<(TreePath, Option<PreNode>)> {
    match record {
        Record::PreImage(image) => Some((image.path, image.node)),
        Record::Header(_) | Record::Opened { .. } | Record::Edits(_) | Record::Synced => None,
        Record::Seal(_) | Record::Left(_) | Record::Abandoned => None,
        Record::SyncedTo(_) | Record::Compact | Record::SyncFailed(_) => None,
        Record::Redo(_) | Record::Sealing(_) => None,
    }
}
