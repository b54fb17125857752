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

pub(in crate::timeline) mod conflict;
pub(in crate::timeline) mod land;
pub(in crate::timeline) mod preflight;
pub mod protected;
pub(in crate::timeline) mod rebase;
pub(in crate::timeline) mod rollback;
pub(in crate::timeline) mod staging;
pub(in crate::timeline) mod unfinished;
pub(in crate::timeline) mod write;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::{Base, BaseStat};
use crate::error::{Attempt, Error, FsError, FsResult, Kind, Result};
use crate::fs::merged::fingerprint::{ANY_TIMES, rounded};
use crate::fs::merged::lower::{Lower, LowerNode};
use crate::fs::merged::pre_images::{PreHistory, PreImages};
use crate::fs::{Found, State};
use crate::timeline::apply::protected::Consent;
use crate::timeline::apply::rollback::{Claims, Rollback, roll_back};
use crate::timeline::apply::write::{Written, write_base};
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};

use crate::store::Store;
use crate::store::layer::{LayerInfo, Upper};
use crate::store::record::{LayerKind, Left, OpVerb, PreImage, PreNode, Record};
use crate::timeline::apply::staging::Stages;
use crate::timeline::apply::unfinished::Unfinished;
use crate::timeline::checkpoint::seal_unused;
use crate::timeline::{Target, Timeline};
use crate::tree::{Body, Node, Origin, Source};
use crate::types::{Epoch, FileKind, Fingerprint, Ino, LayerId, Timestamp, TreePath};

/// The message of the seal of an apply that was taken back.
pub(super) const TAKEN_BACK: &str = "taken back";

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
    /// Paths that need the consent of the caller, and why.
    pub refused: Vec<(TreePath, String)>,
    /// Once it is written: what the base did not keep.
    pub not_kept: Vec<(TreePath, NotKept)>,
    /// Whether it only ends the rollback of an apply that failed or was cut off.
    pub is_rollback: bool,
}

/// What the base did not keep of a file that was written, replaced or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// Its filesystem cannot hold the time `wanted`, and made `kept` of it.
    Time {
        /// The time in the tree.
        wanted: Timestamp,
        /// The time in the base.
        kept: Timestamp,
    },
    /// These inode flags, as chattr(1) sets them. The new file could not be given them.
    Flags(u32),
}

/// A filesystem may keep times to two seconds (VFAT); that is not told.
const COARSE: u64 = 2;

/// The longest path that is written into the base, in bytes: most programs cannot name a longer one
/// (path_resolution(7), PATH_MAX).
const LONGEST_PATH: usize = 4095;

/// Lists the changes that an apply of `paths` writes to the base, or an apply of everything if there
/// are no paths.
///
/// # Errors
/// Those of reading the base; a path that is too long to be written. The list ends there, so a command
/// that nests directories does not decide how much memory it takes.
fn writable_changes(from: &State, to: &State, paths: &[TreePath]) -> Result<Vec<PathChange>> {
    let attempt = || "compare with the base";
    let mut changes = Vec::new();
    for change in diff::compare_for_apply(from, to).attempt(attempt)? {
        let change = change.attempt(attempt)?;
        if change.path.as_bytes().len() <= LONGEST_PATH {
            changes.push(change);
        } else if paths.is_empty() || paths.iter().any(|named| change.path.starts_with(named)) {
            let top = change
                .path
                .names()
                .next()
                .map(|name| TreePath::root().join(&name))
                .unwrap_or_default();
            let why =
                format!("a path below it is longer than {LONGEST_PATH} bytes; nothing is written");
            return Err(Error::new(Kind::Conflict, format!("apply '{top}'"), why)
                .hint("remove it in the sandbox, or apply other paths by naming them"));
        }
    }
    Ok(changes)
}

impl Timeline {
    /// Finds out what an apply would do. Only at or below `paths`, if there are any.
    ///
    /// # Errors
    /// What the base or the store answers.
    pub fn plan_apply(&self, paths: &[TreePath], consent: Consent) -> Result<Plan> {
        let _operation = self.lock_operation();
        self.flush()?;
        self.plan(self.fs.state(), paths, consent)
    }

    fn plan(&self, to: State, paths: &[TreePath], consent: Consent) -> Result<Plan> {
        let from = self.base_state()?;
        let mut changes = writable_changes(&from, &to, paths)?;
        if !paths.is_empty() {
            changes = select(changes, paths);
        }
        let conflicts = self.conflicts(&to, &changes).attempt(|| "compare with the base")?;
        let refused = protected::refused(&self.protected(), (&from, &to), &changes, paths, consent)
            .attempt(|| "look for what needs consent")?;
        Ok(Plan { from, to, changes, conflicts, refused, not_kept: Vec::new(), is_rollback: false })
    }

    /// Writes the tree into the base. With conflicts, or without a consent that is needed, writes nothing.
    ///
    /// # Errors
    /// What the base or the store answers; the base is then as it was.
    pub fn apply(&self, paths: &[TreePath], consent: Consent) -> Result<Plan> {
        let _operation = self.lock_operation();
        self.check_finished()?;
        self.flush()?;
        let (sealed, _) = self.seal_present("apply")?;
        let mut plan = self.plan(self.state_of(sealed)?, paths, consent)?;
        if !plan.conflicts.is_empty() || !plan.refused.is_empty() || plan.changes.is_empty() {
            return Ok(plan);
        }
        let description = format!("{} paths", plan.changes.len());
        let epoch = self.write_home(&mut plan)?;
        // The whole tree is in the base now, so the head can lie on the base again, with what was written meanwhile. After a part it
        // stays over the base as it was, which the pre-images keep showing.
        let shown = if paths.is_empty() { self.land(sealed, epoch, &description) } else { Ok(()) };
        // What was shown has its record, and what was written has one, whatever came of the rest.
        let is_shown = self.fs().state().lower.epoch() == epoch;
        let logged =
            if is_shown { Ok(0) } else { self.log_operation(OpVerb::Apply, description, sealed) };
        logged.and(shown).map_err(after_writing)?;
        Ok(plan)
    }

    /// Finds out what [`Timeline::undo_apply`] would do.
    ///
    /// # Errors
    /// When there was no apply, or what the base or the store answers.
    pub fn plan_undo(&self) -> Result<Plan> {
        let _operation = self.lock_operation();
        match self.plan_rollback()? {
            Some(rest) => Ok(rest),
            None => self.plan(self.before_last_apply()?, &[], Consent::ALL),
        }
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
        let applied = |l: &&LayerInfo| {
            let seal = l.seal.as_ref().filter(|_| l.header.kind == LayerKind::PreImage);
            seal.is_some_and(|seal| seal.message != TAKEN_BACK)
        };
        layers.iter().rfind(applied).map(|l| l.header.epoch.0.saturating_sub(1))
    }

    /// Sets the base back to what it was before the last apply; one that is not rolled back yet is
    /// the last. The tree stays as it is.
    ///
    /// # Errors
    /// As [`Timeline::apply`].
    pub fn undo_apply(&self) -> Result<Plan> {
        let _operation = self.lock_operation();
        self.flush()?;
        if let Some(rest) = self.plan_rollback()? {
            return self.finish_rollback().map(|()| rest);
        }
        let mut plan = self.plan(self.before_last_apply()?, &[], Consent::ALL)?;
        if plan.conflicts.is_empty() && !plan.changes.is_empty() {
            let (sealed, _) = self.seal_present("undo apply")?;
            self.write_home(&mut plan)?;
            let description = format!("{} paths", plan.changes.len());
            self.log_operation(OpVerb::UndoApply, description, sealed).map_err(after_writing)?;
        }
        Ok(plan)
    }

    /// Makes the base look as the plan says, and notes in the plan what the base did not keep. Returns
    /// the epoch that this begins.
    fn write_home(&self, plan: &mut Plan) -> Result<Epoch> {
        let during = |e: Error| e.during("apply");
        preflight::check(self.base(), plan)?;
        self.was_rolled_back.store(false, Ordering::SeqCst);
        let history = self.applies.lock().clone();
        let epoch = Epoch(u32::try_from(history.len()).unwrap_or(u32::MAX).saturating_add(1));
        let mut layer =
            self.store().create_layer(None, "", epoch, LayerKind::PreImage).map_err(during)?;
        let (touched, stages, images) = keep_images(&mut layer, plan)
            .map_err(|error| self.withdraw((layer.layer(), epoch), during(error)))?;
        let with_images: PreHistory =
            history.iter().cloned().chain([Arc::new(collect(&images, &[]))]).collect();
        let lower = |epoch: Epoch, history: &PreHistory| {
            Lower::new(Arc::clone(self.base()), Arc::clone(self.store()), epoch, history.clone())
        };
        let shown = self.fs().state().lower.epoch();
        // From here on nobody reads the base at these paths but through the pre-images, whatever becomes of the apply.
        *self.applies.lock() = with_images.clone();
        self.fs().set_lower(lower(shown, &with_images));
        let to = State {
            tree: plan.to.tree.clone(),
            lower: Arc::new(lower(plan.to.lower.epoch(), &with_images)),
        };
        let mut claims = Claims::default();
        let mut claim = |path: &TreePath, print| claims.claim(&mut layer, path, print);
        let states = (&plan.from, &to);
        let written =
            write_base(self.base(), states, &plan.changes, &touched, &stages, &mut claim, None)
                .and_then(|written| self.without_shared_numbers(plan, written))
                .and_then(|written| {
                    // What somebody else made of it meanwhile is a conflict for the next apply, and nothing that the tree may be put on.
                    let foreign = rollback::foreign(self.base(), &images, &claims, |path| {
                        written.stat(self.base(), path)
                    })?;
                    if !foreign.is_empty() {
                        log::warn!("{}", rollback::told_of(&foreign));
                    }
                    plan.not_kept = not_kept(&written);
                    settle(
                        self.store(),
                        self.base(),
                        &mut layer,
                        images.clone(),
                        &written,
                        &foreign,
                    )
                });
        let (settled, failure) = match written {
            Ok(settled) => (settled, None),
            Err(error) => {
                match self.roll_back_now(&mut layer, epoch, images, &history, &mut claims) {
                    Ok((images, told)) => (images, Some((error, told))),
                    Err(rest) => return Err(self.leave_unfinished(rest, in_words(error))),
                }
            }
        };
        let message = if failure.is_some() { TAKEN_BACK } else { "" };
        if let Err(why) = seal_unused(self.store(), &mut layer, message) {
            let rest = Unfinished::whole(layer.layer(), epoch, &why);
            return Err(self.leave_unfinished(rest, during(why)));
        }
        let history: PreHistory = history.into_iter().chain([Arc::new(settled)]).collect();
        self.fs().set_lower(lower(shown, &history));
        *self.applies.lock() = history;
        let Some((error, told)) = failure else { return Ok(epoch) };
        let error = in_words(error);
        Err(match told {
            Some(told) => error.hint(told),
            None if error.kind == Kind::Conflict => {
                error.hint("it was changed while the apply was under way; the apply was taken back")
            }
            None => error,
        })
    }

    /// Sets the base back after a failure. Returns what is there since, and what is to be told of
    /// it; or what is left to do.
    fn roll_back_now(
        &self,
        layer: &mut Upper,
        epoch: Epoch,
        images: Images,
        before: &PreHistory,
        claims: &mut Claims,
    ) -> std::result::Result<(PreImages, Option<String>), Unfinished> {
        match roll_back(self.store(), self.base(), layer, images, before, claims) {
            Ok(Rollback::Ended(images, told)) => Ok((*images, told)),
            Ok(Rollback::Unfinished(remaining)) => {
                Err(Unfinished::new(layer.layer(), epoch, remaining))
            }
            Err(why) => Err(Unfinished::whole(layer.layer(), epoch, &why)),
        }
    }

    /// The numbers of what was written, without those of nodes that an apply by path wrote to another path while they still
    /// stand in the base where they came from: two files of the base never share a number.
    fn without_shared_numbers(&self, plan: &Plan, mut written: Written) -> FsResult<Written> {
        let mut own = BTreeMap::new();
        let mut ids = self.store().identities().lock();
        let inos = &written.inos;
        for (path, ino) in inos {
            let origin = match plan.to.tree.node(*ino).map(|n| &n.body) {
                Some(Body::File { origin: Some(origin), .. }) => Some(&origin.path),
                Some(Body::Dir { base }) => base.as_ref(),
                _ => None,
            };
            let stays = match origin
                .filter(|origin| *origin != path)
                .map(|origin| (origin, inos.get(origin)))
            {
                None => false,
                Some((_, Some(now))) => now == ino,
                Some((origin, None)) => match written.stat(self.base(), origin)? {
                    Some(stat) => ids.of(stat.dev, stat.ino)? == *ino,
                    None => false,
                },
            };
            // A further link of the same file is the same file.
            let same_file = match written.stat(self.base(), path)? {
                Some(stat) => ids.of(stat.dev, stat.ino)? == *ino,
                None => false,
            };
            if !stays || same_file {
                own.insert(path.clone(), *ino);
            }
        }
        written.inos = own;
        Ok(written)
    }

    /// After a failure before the base was written. What the layer says is not to be taken back: the next apply begins the same epoch.
    fn withdraw(&self, (layer, epoch): (LayerId, Epoch), error: Error) -> Error {
        match self.store().withdraw_layer(layer) {
            Ok(()) if error.kind == Kind::Conflict => {
                error.hint("it was changed while the apply was under way; nothing was written")
            }
            Ok(()) => error,
            Err(why) => {
                log::warn!("{why}");
                self.leave_unfinished(Unfinished::whole(layer, epoch, &why), error)
            }
        }
    }
}

fn in_words(error: FsError) -> Error {
    match FsResult::<std::convert::Infallible>::Err(error).attempt(|| "apply: write the base") {
        Err(error) => error,
        Ok(never) => match never {},
    }
}

/// An error of what comes after the base was written and the apply was sealed.
fn after_writing(error: Error) -> Error {
    error.after("the base was written").hint("'jailfs apply --undo' sets it back")
}

/// What the base did not keep.
fn not_kept(written: &Written) -> Vec<(TreePath, NotKept)> {
    let is_advertised =
        |wanted: Timestamp, kept: Timestamp| wanted.secs.abs_diff(kept.secs) >= COARSE;
    let times = written.rounded.iter().filter(|(_, (wanted, kept))| is_advertised(*wanted, *kept));
    let times =
        times.map(|(path, (wanted, kept))| (path, NotKept::Time { wanted: *wanted, kept: *kept }));
    let flags = written.lost_flags.iter().map(|(path, lost)| (path, NotKept::Flags(*lost)));
    times.chain(flags).map(|(path, what)| (path.clone(), what)).collect()
}

/// Records what was left at each path: prints for the next apply, and numbers, so that every node keeps its own.
pub(super) fn settle(
    store: &Store,
    base: &Base,
    layer: &mut Upper,
    mut images: Images,
    written: &Written,
    left_alone: &BTreeSet<TreePath>,
) -> FsResult<PreImages> {
    let mut ids = store.identities().lock();
    let (dev, _) = base.root_id();
    let now: Vec<Option<BaseStat>> =
        images.iter().map(|(path, _)| written.stat(base, path)).collect::<FsResult<_>>()?;
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
        if let (Some(stat), Some(ino)) = (&stat, written.inos.get(path)) {
            ids.name(stat.dev, stat.ino, *ino)?;
        }
        // Of what somebody else made there, nothing is known: it is a conflict, and not the bytes that were there.
        let is_known =
            !left_alone.contains(path) || stat.as_ref().is_some_and(|s| s.kind == FileKind::Dir);
        let print = if is_known { stat.map(|s| s.fingerprint()) } else { Some(UNKNOWN) };
        let rounded = written.rounded.get(path).map(|(wanted, kept)| Some(rounded(*wanted, *kept)));
        for print in rounded.into_iter().chain([print]) {
            left.push((path.clone(), print));
            layer.record(&Record::Left(Left { path: path.clone(), print }))?;
        }
        // Bytes that were left in place are found by the print that the file has from now on.
        if let (
            Some(print),
            Some(PreNode {
                node: Node { body: Body::File { origin: Some(origin), .. }, .. }, ..
            }),
        ) = (print, image.as_mut())
        {
            *origin = Arc::new(Origin { path: path.clone(), print });
            layer
                .record(&Record::PreImage(PreImage { path: path.clone(), node: image.clone() }))?;
        }
    }
    Ok(collect(&images, &left))
}

/// The print of a file that is not known: none has it.
const UNKNOWN: Fingerprint = Fingerprint {
    dev: 0,
    ino: 0,
    size: 0,
    mtime: Timestamp { secs: 0, nanos: 0 },
    ctime: Timestamp { secs: 0, nanos: 0 },
};

/// What the base holds at each touched path.
pub(super) type Images = Vec<(TreePath, Option<PreNode>)>;

pub(super) fn collect(images: &Images, left: &[(TreePath, Option<Fingerprint>)]) -> PreImages {
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
            let needs =
                matches!(change.what, What::Added | What::Type) && path.starts_with(&change.path);
            change.path.starts_with(path) || needs
        })
    };
    changes.into_iter().filter(wanted).collect()
}

/// The paths at which an apply changes something: the changes, and the directories in which names come and go.
pub(super) fn touched_paths(changes: &[PathChange]) -> BTreeMap<TreePath, Keep> {
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

/// All names that the base has of those files with several names that change, or of which names come or go.
pub(super) fn linked_names(
    from: &State,
    to: &State,
    changes: &[PathChange],
) -> FsResult<BTreeMap<TreePath, Ino>> {
    let several = |state: &State, found: &Found| {
        state.attr(found).filter(|a| a.kind != FileKind::Dir && a.meta.nlink > 1).map(|a| a.ino)
    };
    let wanted = changes
        .iter()
        .flat_map(|c| [several(from, &c.old), several(to, &c.new)])
        .flatten()
        .collect();
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

/// Keeps what the base holds at all paths that a plan touches, so that it outlives a power cut.
fn keep_images(
    layer: &mut Upper,
    plan: &Plan,
) -> Result<(BTreeMap<TreePath, Keep>, Stages, Images)> {
    let mut touched = touched_paths(&plan.changes);
    let renames = |change: &&PathChange| !matches!(change.what, What::Attributes | What::DirTimes);
    let changed: Vec<&TreePath> =
        plan.changes.iter().filter(renames).map(|change| &change.path).collect();
    // What is changed under one of its names has another change time, and perhaps count, under all others.
    let linked = linked_names(&plan.from, &plan.to, &plan.changes).attempt(|| "read the base")?;
    let dirs = changed
        .into_iter()
        .chain(linked.keys())
        .filter_map(|path| path.split())
        .map(|(dir, _)| dir);
    let stages = Stages::choose(&plan.from, dirs.collect()).attempt(|| "read the base")?;
    for path in linked.into_keys().chain(stages.paths()) {
        touched.entry(path).or_insert(Keep::InPlace);
    }
    let found = touched.iter().map(|(path, keep)| Ok((path, plan.from.resolve(path)?, *keep)));
    let found: Vec<_> = found.collect::<FsResult<_>>().attempt(|| "read the base")?;
    if let Some((path, ..)) = found.iter().find(|(_, found, _)| is_mounted(found)) {
        return Err(FsError::LeavesJail)
            .attempt(|| format!("write '{path}', at which something is mounted"));
    }
    let images = record_images(layer, &plan.from, found).attempt(|| "keep what the base holds")?;
    layer.sync()?;
    Ok((touched, stages, images))
}

/// Whether something is mounted there in the base: what is there is not the base's.
fn is_mounted(found: &Found) -> bool {
    matches!(found, Found::Base(_, _, LowerNode::Base(stat)) if stat.foreign)
}

/// Records what the base holds at the touched paths. The names of one file share the copy of its bytes, those under which it is
/// left in place, too: it is the same file that is written anew.
fn record_images(
    layer: &mut Upper,
    from: &State,
    found: Vec<(&TreePath, Found, Keep)>,
) -> FsResult<Images> {
    let copied: HashSet<Ino> = found
        .iter()
        .filter(|(.., keep)| *keep == Keep::Copy)
        .filter_map(|(_, found, _)| found.ino())
        .collect();
    let mut copies: HashMap<Ino, PreNode> = HashMap::new();
    let mut images = Images::new();
    for (path, found, keep) in found {
        let node = match (&found, found.ino()) {
            (Found::Nothing(_), _) | (_, None) => None,
            (_, Some(ino)) => Some(match copies.get(&ino) {
                Some(copy) => copy.clone(),
                None if copied.contains(&ino) => {
                    let copy = image_of(layer, from, &found, ino, Keep::Copy)?;
                    copies.insert(ino, copy.clone());
                    copy
                }
                None => image_of(layer, from, &found, ino, keep)?,
            }),
        };
        layer.record(&Record::PreImage(PreImage { path: path.clone(), node: node.clone() }))?;
        images.push((path.clone(), node));
    }
    Ok(images)
}

fn image_of(
    layer: &mut Upper,
    from: &State,
    found: &Found,
    ino: Ino,
    keep: Keep,
) -> FsResult<PreNode> {
    let (node, extents) = from.record(found)?;
    let mut node = Arc::unwrap_or_clone(node);
    let host = match found {
        Found::Base(_, _, LowerNode::Base(stat)) => stat.ino,
        Found::Base(..) | Found::Upper(..) | Found::Nothing(_) => 0,
    };
    let Body::File { origin, .. } = &mut node.body else {
        return Ok(PreNode { ino, host, node, extents });
    };
    if keep == Keep::InPlace {
        if let Some(origin) = origin {
            let print = Fingerprint { ctime: ANY_TIMES, ..origin.print };
            *origin = Arc::new(Origin { path: origin.path.clone(), print });
        }
        return Ok(PreNode { ino, host, node, extents });
    }
    *origin = None;
    let mut kept = Vec::new();
    for range in from.data(found) {
        let range = range?;
        let bytes = from.read_range(found, range)?;
        if bytes.iter().any(|b| *b != 0) {
            let offset = layer.pool.allocate(ino, range, true);
            layer.pool.write(offset, &bytes)?;
            kept.push((range, Source::Pool { layer: layer.layer(), offset }));
        }
    }
    Ok(PreNode { ino, host, node, extents: kept })
}
