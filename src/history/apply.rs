//! Writing the tree into the base, and taking that back.
//!
//! An apply is made of steps that can each be cut off:
//!
//! 1. The plan: what differs between the base as it is and the tree. A path at which the base is not as it was when the
//!    tree covered it is a conflict, and then nothing is written.
//! 2. A pre-image layer records, for every path that will be touched, what is there, with the bytes that would be lost.
//!    It is synced and marked before the first change of the base.
//! 3. The base is written: new content is staged next to its target and renamed over it.
//! 4. What was left at each path is recorded, and the pre-image layer is sealed: this is the moment of the apply.
//!
//! An apply that fails is taken back: the base is set back to the pre-images. An unsealed pre-image layer found at a
//! start belongs to an apply that was cut off, and is taken back then. The files of the base are not the same ones after
//! that, only their bytes are: so a taken-back apply begins an epoch like any other, in which the tree finds the bytes it
//! left in the base, and every node its number.
//!
//! The same code writes the tree home, sets the base back and undoes an apply: each makes a list of paths look as in a
//! state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::{Base, BaseStat, WriteDir};
use crate::error::{Attempt, Error, FsError, FsResult, Kind, Result};
use crate::fs::lower::{self, ANY_TIMES, Lower, LowerNode, PreHistory, PreImages};
use crate::fs::{Found, State};
use crate::history::diff::{self, PathChange, What};
use crate::history::home::write_base;
use crate::history::{Showing, Target, Timeline, close};
use crate::store::Store;
use crate::store::layer::{LayerContents, Upper};
use crate::store::record::{Body, LayerKind, Left, Node, OpVerb, Origin, PreImage, PreNode, Record, Source};
use crate::tree::Tree;
use crate::types::{ByteRange, Epoch, FileKind, Fingerprint, Ino, TreePath};

/// Bytes copied at once.
pub(super) const STEP: u64 = 1 << 20;
/// The message of the seal of an apply that was taken back.
const TAKEN_BACK: &str = "taken back";

/// What an apply would do.
pub struct Plan {
    /// The base as it is.
    pub from: State,
    /// What it is to become.
    pub to: State,
    /// Where they differ, times of directories included.
    pub changes: Vec<PathChange>,
    /// Paths at which the base is not as the tree knows it, and why.
    pub conflicts: Vec<(TreePath, String)>,
}

impl Timeline {
    /// Finds out what an apply would do. Only at or below `paths`, if there are any.
    ///
    /// # Errors
    /// What the base or the store answers.
    pub fn plan_apply(&self, paths: &[TreePath]) -> Result<Plan> {
        let _turn = self.turn();
        self.flush()?;
        self.plan(self.fs.state(), paths)
    }

    fn plan(&self, to: State, paths: &[TreePath]) -> Result<Plan> {
        let from = self.base_state()?;
        let mut changes = diff::changes(&from, &to, false).attempt(|| "compare with the base")?;
        if !paths.is_empty() {
            changes = select(changes, paths);
        }
        let conflicts = self.conflicts(&to, &changes).attempt(|| "compare with the base")?;
        Ok(Plan { from, to, changes, conflicts })
    }

    /// Writes the tree into the base. With conflicts, writes nothing.
    ///
    /// # Errors
    /// What the base or the store answers; the base is then as it was.
    pub fn apply(&self, paths: &[TreePath]) -> Result<Plan> {
        let _turn = self.turn();
        self.check_not_stuck()?;
        self.flush()?;
        let (sealed, _) = self.secure("apply")?;
        let plan = self.plan(self.state_of(sealed)?, paths)?;
        if !plan.conflicts.is_empty() || plan.changes.is_empty() {
            return Ok(plan);
        }
        let description = format!("{} paths", plan.changes.len());
        let epoch = self.write_home(&plan)?;
        let target = Target { layer: None, epoch };
        // The whole tree is in the base now, so the head can lie on the base again. A part, or a tree that was written
        // to meanwhile, stays over the base as it was, which the pre-images keep showing.
        let shown = paths.is_empty()
            && self
                .show(
                    OpVerb::Apply,
                    target,
                    &self.state_of(target)?,
                    description.clone(),
                    Showing::SameContent,
                )?
                .is_some();
        if !shown {
            self.log(OpVerb::Apply, description, sealed)?;
        }
        Ok(plan)
    }

    /// Finds out what [`Timeline::undo_apply`] would do.
    ///
    /// # Errors
    /// When there was no apply, or what the base or the store answers.
    pub fn plan_undo(&self) -> Result<Plan> {
        let _turn = self.turn();
        self.plan(self.before_last_apply()?, &[])
    }

    fn before_last_apply(&self) -> Result<State> {
        let Some(before) = self.last_undoable() else {
            return Err(Error::new(Kind::NoStore, "undo apply", "nothing was applied yet"));
        };
        self.state_of(Target { layer: None, epoch: Epoch(before) })
    }

    /// The epoch that the last apply ended; what was taken back changed nothing.
    pub(super) fn last_undoable(&self) -> Option<u32> {
        let layers = self.store().catalog();
        let applies =
            layers.iter().filter(|l| l.header.kind == LayerKind::PreImage).filter_map(|l| l.seal.as_ref());
        let last = applies.enumerate().filter(|(_, seal)| seal.message != TAKEN_BACK).last();
        last.and_then(|(before, _)| u32::try_from(before).ok())
    }

    /// Sets the base back to what it was before the last apply. The tree stays as it is.
    ///
    /// # Errors
    /// As [`Timeline::apply`].
    pub fn undo_apply(&self) -> Result<Plan> {
        let _turn = self.turn();
        self.check_not_stuck()?;
        self.flush()?;
        let plan = self.plan(self.before_last_apply()?, &[])?;
        if plan.conflicts.is_empty() && !plan.changes.is_empty() {
            let (sealed, _) = self.secure("undo apply")?;
            self.write_home(&plan)?;
            self.log(OpVerb::UndoApply, format!("{} paths", plan.changes.len()), sealed)?;
        }
        Ok(plan)
    }

    /// Makes the base look as the plan says. Gives the epoch that this begins.
    fn write_home(&self, plan: &Plan) -> Result<Epoch> {
        let during = |e: Error| e.during("apply");
        let history = self.applies.lock().clone();
        let epoch = Epoch(u32::try_from(history.len()).unwrap_or(u32::MAX).saturating_add(1));
        let mut layer = self.store().create_layer(None, "", epoch, LayerKind::PreImage).map_err(during)?;
        let mut touched = touched_paths(&plan.changes);
        // With each of its names that comes or goes, a file has another change time and count under all others.
        let linked = linked_names(&plan.from, &plan.to, &plan.changes).attempt(|| "apply: read the base")?;
        for path in linked.into_keys() {
            touched.entry(path).or_insert(Keep::InPlace);
        }
        let images =
            record_images(&mut layer, &plan.from, &touched).attempt(|| "apply: keep what the base holds")?;
        layer.sync().map_err(during)?;
        let with_images: PreHistory =
            history.iter().cloned().chain([Arc::new(collect(&images, &[]))]).collect();
        let lower = |epoch: Epoch, history: &PreHistory| {
            Lower::new(Arc::clone(self.base()), Arc::clone(self.store()), epoch, history.clone())
        };
        let shown = self.fs().state().lower.epoch();
        // From here on nobody reads the base at these paths but through the pre-images.
        self.fs().set_lower(lower(shown, &with_images));
        let to =
            State { tree: plan.to.tree.clone(), lower: Arc::new(lower(plan.to.lower.epoch(), &with_images)) };
        let written = write_base(self.base(), &plan.from, &to, &plan.changes, &touched)
            .and_then(|inos| self.without_shared_numbers(plan, inos))
            .and_then(|inos| settle(self.store(), self.base(), &mut layer, images.clone(), &inos));
        let (settled, failure) = match written {
            Ok(settled) => (settled, None),
            Err(error) => {
                let back = take_back(self.store(), self.base(), &mut layer, images, &history);
                let settled = back.map_err(|e| self.stop_applying(e, &format!("apply failed ({error})")))?;
                (settled, Some(error))
            }
        };
        let message = if failure.is_some() { TAKEN_BACK } else { "" };
        close(self.store(), layer, message).map_err(|e| self.stop_applying(e, "apply"))?;
        let history: PreHistory = history.into_iter().chain([Arc::new(settled)]).collect();
        self.fs().set_lower(lower(shown, &history));
        *self.applies.lock() = history;
        failure.map_or(Ok(epoch), |error| Err(error).attempt(|| "apply: write the base"))
    }

    /// The numbers of what was written, without those of nodes that an apply by path wrote to another path while they still
    /// stand in the base where they came from: two files of the base never share a number.
    fn without_shared_numbers(
        &self,
        plan: &Plan,
        inos: BTreeMap<TreePath, Ino>,
    ) -> FsResult<BTreeMap<TreePath, Ino>> {
        let mut own = BTreeMap::new();
        let mut ids = self.store().identities().lock();
        for (path, ino) in &inos {
            let origin = match plan.to.tree.node(*ino).map(|n| &n.body) {
                Some(Body::File { origin: Some(origin), .. }) => Some(&origin.path),
                Some(Body::Dir { base }) => base.as_ref(),
                _ => None,
            };
            let stays = match origin.filter(|origin| *origin != path).map(|origin| (origin, inos.get(origin)))
            {
                None => false,
                Some((_, Some(now))) => now == ino,
                Some((origin, None)) => match found(self.base().stat(origin))? {
                    Some(stat) => ids.of(stat.dev, stat.ino)? == *ino,
                    None => false,
                },
            };
            // A further link of the same file is the same file.
            let same_file = match found(self.base().stat(path))? {
                Some(stat) => ids.of(stat.dev, stat.ino)? == *ino,
                None => false,
            };
            if !stays || same_file {
                own.insert(path.clone(), *ino);
            }
        }
        Ok(own)
    }

    /// After a failure that leaves an apply half done: only a start of jailfs can take it back.
    fn stop_applying(&self, error: Error, during: &str) -> Error {
        self.apply_is_stuck.store(true, std::sync::atomic::Ordering::SeqCst);
        error.during(during).hint("unmount and mount again: the apply is then taken back")
    }

    fn check_not_stuck(&self) -> Result<()> {
        if !self.apply_is_stuck.load(std::sync::atomic::Ordering::SeqCst) {
            return Ok(());
        }
        Err(Error::new(Kind::InUse, "apply", "an apply before it failed and could not be taken back")
            .hint("unmount and mount again: it is then taken back"))
    }
}

/// Records what was left at each path: prints for the next apply, and numbers, so that every node keeps its own.
fn settle(
    store: &Store,
    base: &Base,
    layer: &mut Upper,
    mut images: Images,
    inos: &BTreeMap<TreePath, Ino>,
) -> FsResult<PreImages> {
    let mut ids = store.identities().lock();
    let (dev, _) = base.root_id();
    let now: Vec<Option<BaseStat>> =
        images.iter().map(|(path, _)| found(base.stat(path))).collect::<FsResult<_>>()?;
    for ((_, image), stat) in images.iter().zip(&now) {
        let Some(image) = image else { continue };
        // The host may give the number of a file that is gone to another one, which must not pass for it.
        let is_alone = image.node.kind() == FileKind::Dir || image.node.meta.nlink <= 1;
        let is_gone = stat.as_ref().is_none_or(|stat| stat.ino != image.host);
        if is_gone && is_alone && ids.of(dev, image.host)? == image.ino {
            let fresh = ids.fresh()?;
            ids.name(dev, image.host, fresh)?;
        }
    }
    let mut left = Vec::new();
    for ((path, image), stat) in images.iter_mut().zip(now) {
        if let (Some(stat), Some(ino)) = (&stat, inos.get(path)) {
            ids.name(stat.dev, stat.ino, *ino)?;
        }
        let print = stat.map(|s| s.fingerprint());
        left.push((path.clone(), print));
        layer.record(&Record::Left(Left { path: path.clone(), print }))?;
        // Bytes that were left in place are found by the print that the file has from now on.
        if let (
            Some(print),
            Some(PreNode { node: Node { body: Body::File { origin: Some(origin), .. }, .. }, .. }),
        ) = (print, image.as_mut())
        {
            *origin = Arc::new(Origin { path: path.clone(), print });
            layer.record(&Record::PreImage(PreImage { path: path.clone(), node: image.clone() }))?;
        }
    }
    Ok(collect(&images, &left))
}

/// Sets the base back to `images`, which an apply after `before` found, and records what is there since.
fn take_back(
    store: &Arc<Store>,
    base: &Arc<Base>,
    layer: &mut Upper,
    images: Images,
    before: &PreHistory,
) -> Result<PreImages> {
    let with_images: PreHistory = before.iter().cloned().chain([Arc::new(collect(&images, &[]))]).collect();
    let inos = set_back(store, base, before, &with_images)?;
    settle(store, base, layer, images, &inos).attempt(|| "set the base back")
}

/// What the base holds at each touched path.
type Images = Vec<(TreePath, Option<PreNode>)>;

fn collect(images: &Images, left: &[(TreePath, Option<Fingerprint>)]) -> PreImages {
    let mut all = PreImages::default();
    for (path, node) in images {
        all.insert(path, node.clone().map(Arc::new));
    }
    for (path, print) in left {
        all.set_left(path.clone(), *print);
    }
    all
}

/// A node that may not be there.
pub(super) fn found<T>(result: FsResult<T>) -> FsResult<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(FsError::NotFound | FsError::NotADirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The changes at or below some paths, and the new directories that they need.
fn select(changes: Vec<PathChange>, paths: &[TreePath]) -> Vec<PathChange> {
    let wanted = |change: &PathChange| {
        paths.iter().any(|path| {
            let needs = matches!(change.what, What::Added | What::Type) && path.starts_with(&change.path);
            change.path.starts_with(path) || needs
        })
    };
    changes.into_iter().filter(wanted).collect()
}

/// The paths at which an apply changes something: the changes, and the directories in which names come and go.
fn touched_paths(changes: &[PathChange]) -> BTreeMap<TreePath, Keep> {
    let mut touched = BTreeMap::new();
    for change in changes {
        let renames = !matches!(change.what, What::Attributes | What::DirTimes);
        if renames && let Some((dir, _)) = change.path.split() {
            touched.entry(dir).or_insert(Keep::InPlace);
        }
        touched.insert(change.path.clone(), if renames { Keep::Copy } else { Keep::InPlace });
    }
    touched
}

/// All names that the base has of those files with several names of which names come or go, or that are written anew.
pub(super) fn linked_names(
    from: &State,
    to: &State,
    changes: &[PathChange],
) -> FsResult<BTreeMap<TreePath, Ino>> {
    let several = |state: &State, found: &Found| {
        state.attr(found).filter(|a| a.kind != FileKind::Dir && a.meta.nlink > 1).map(|a| a.ino)
    };
    let named = changes.iter().filter(|c| !matches!(c.what, What::Attributes | What::DirTimes));
    let wanted = named.flat_map(|c| [several(from, &c.old), several(to, &c.new)]).flatten().collect();
    from.lower.names_of(&wanted)
}

/// What becomes of the bytes of a file that an apply touches.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// They would be lost, so they are copied.
    Copy,
    /// They stay where they are.
    InPlace,
}

/// Records what the base holds at the touched paths.
fn record_images(layer: &mut Upper, from: &State, touched: &BTreeMap<TreePath, Keep>) -> FsResult<Images> {
    let mut images = Images::new();
    for (path, keep) in touched {
        let found = from.resolve(path)?;
        let node = match (&found, found.ino()) {
            (Found::Nothing(_), _) | (_, None) => None,
            (_, Some(ino)) => Some(image_of(layer, from, &found, ino, *keep)?),
        };
        layer.record(&Record::PreImage(PreImage { path: path.clone(), node: node.clone() }))?;
        images.push((path.clone(), node));
    }
    Ok(images)
}

fn image_of(layer: &mut Upper, from: &State, found: &Found, ino: Ino, keep: Keep) -> FsResult<PreNode> {
    let (node, extents) = from.record(found)?;
    let mut node = Arc::unwrap_or_clone(node);
    let host = match found {
        Found::Base(_, _, LowerNode::Base(stat)) => stat.ino,
        Found::Base(..) | Found::Covered(..) | Found::Nothing(_) => 0,
    };
    let Body::File { size, origin } = &mut node.body else { return Ok(PreNode { ino, host, node, extents }) };
    if keep == Keep::InPlace {
        if let Some(origin) = origin {
            let print = Fingerprint { ctime: ANY_TIMES, ..origin.print };
            *origin = Arc::new(Origin { path: origin.path.clone(), print });
        }
        return Ok(PreNode { ino, host, node, extents });
    }
    let size = *size;
    *origin = None;
    let mut kept = Vec::new();
    let mut at = 0;
    while at < size {
        let range = ByteRange { start: at, end: (at + STEP).min(size) };
        let bytes = from.read_range(found, range)?;
        if bytes.iter().any(|b| *b != 0) {
            let offset = layer.pool.allocate(ino, range, true);
            layer.pool.write(offset, &bytes)?;
            kept.push((range, Source::Pool { layer: layer.layer(), offset }));
        }
        at = range.end;
    }
    Ok(PreNode { ino, host, node, extents: kept })
}

/// Makes the base look as before the last of `with_images`. Gives the number of each node that it touched.
fn set_back(
    store: &Arc<Store>,
    base: &Arc<Base>,
    before: &PreHistory,
    with_images: &PreHistory,
) -> Result<BTreeMap<TreePath, Ino>> {
    let at = |epoch: usize| {
        let epoch = Epoch(u32::try_from(epoch).unwrap_or(u32::MAX));
        let lower = Lower::new(Arc::clone(base), Arc::clone(store), epoch, with_images.clone());
        State { tree: Tree::new(), lower: Arc::new(lower) }
    };
    let attempt = || "set the base back";
    let (from, to) = (at(with_images.len()), at(before.len()));
    let changes = diff::changes(&from, &to, false).attempt(attempt)?;
    let mut touched = touched_paths(&changes);
    for path in with_images.last().iter().flat_map(|images| images.paths()) {
        touched.entry(path.clone()).or_insert(Keep::InPlace);
    }
    remove_staged(base, touched.keys()).attempt(attempt)?;
    write_base(base, &from, &to, &changes, &touched).attempt(attempt)
}

/// Removes what an apply that was cut off had staged.
fn remove_staged<'p>(base: &Base, touched: impl Iterator<Item = &'p TreePath>) -> FsResult<()> {
    let dirs: BTreeSet<TreePath> = touched.filter_map(|path| path.split().map(|(dir, _)| dir)).collect();
    for path in dirs {
        let Some(names) = found(base.list(&path))? else { continue };
        for entry in names.iter().filter(|e| WriteDir::is_temp_name(&e.name)) {
            base.writer().dir(&path)?.unlink(&entry.name)?;
        }
    }
    Ok(())
}

/// The applies that were cut off: the next start takes them back.
///
/// # Errors
/// Damage.
pub(super) fn unfinished(store: &Store) -> Result<Vec<LayerContents>> {
    let mut all = store.catalog();
    all.retain(|l| l.header.kind == LayerKind::PreImage && l.seal.is_none());
    let read = all.iter().map(|l| store.read_layer(l.header.layer));
    let mut contents = read.collect::<Result<Vec<_>>>()?;
    contents.retain(|contents| !contents.records.iter().any(|r| matches!(r, Record::Abandoned)));
    Ok(contents)
}

/// Sets the base back to what it was before an apply that was cut off.
///
/// # Errors
/// What the base or the store answers; the next start tries again.
pub(super) fn roll_back_unfinished(store: &Arc<Store>, base: &Arc<Base>) -> Result<()> {
    for contents in unfinished(store)? {
        let id = contents.info.header.layer;
        let during = |e: Error| e.during(format!("roll back the apply of layer {id}"));
        let mut layer = store.reopen_layer(&contents).map_err(during)?;
        // The base is written only after the images were complete and marked so.
        let Some(complete) = contents.records.iter().position(|r| matches!(r, Record::Synced)) else {
            layer.record(&Record::Abandoned).map_err(during)?;
            layer.sync().map_err(during)?;
            continue;
        };
        let images: Images = contents.records.into_iter().take(complete).filter_map(image_in).collect();
        let before = lower::read_history(store).map_err(during)?;
        take_back(store, base, &mut layer, images, &before).map_err(during)?;
        close(store, layer, TAKEN_BACK).map_err(during)?;
        log::warn!("an apply that was cut off was taken back");
    }
    Ok(())
}

fn image_in(record: Record) -> Option<(TreePath, Option<PreNode>)> {
    match record {
        Record::PreImage(image) => Some((image.path, image.node)),
        Record::Header(_) | Record::Opened { .. } | Record::Edits(_) | Record::Synced => None,
        Record::Seal(_) | Record::Left(_) | Record::Abandoned => None,
        Record::SyncedTo(_) | Record::Compact | Record::SyncFailed(_) => None,
    }
}
