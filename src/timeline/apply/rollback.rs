//! Rolls back an apply that failed, or that was cut off.
//!
//! A path that cannot be set back does not keep the others from it. If that can change, as with a
//! read-only base, a full disk or a missing right, the rollback stays *unfinished*: the layer of
//! the apply is not sealed, its pre-images go on showing what the base was, and the rollback is
//! tried again later ([`super::unfinished`]). Each attempt begins with the pre-images in the
//! journal.
//!
//! The base is set back to the pre-images, but for what somebody else did to it meanwhile: a path at which neither the pre-image stands
//! nor what the apply claimed to put there is left as it is, and named. It is a conflict from then on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::{Base, BaseStat, Obstacle};
use crate::error::{Attempt, Error, FsError, FsResult, Result};
use crate::fs::State;
use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::{PreHistory, PreImages, read_history};
use crate::store::Store;
use crate::store::io::writer::Writer;
use crate::store::layer::{LayerContents, Upper};
use crate::store::record::{LayerKind, Left, PreNode, Record};
use crate::sys::capabilities;
use crate::sys::clock;
use crate::timeline::apply::staging;
use crate::timeline::apply::staging::Stages;
use crate::timeline::apply::write::{Unable, Written, is_lasting, write_base};
use crate::timeline::apply::{Images, Keep, TAKEN_BACK, collect, found, settle, touched_paths};
use crate::timeline::checkpoint::seal_unused;
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Tree};
use crate::types::{Epoch, FileKind, Fingerprint, Timestamp, TreePath};

/// What an apply said it would put into the base.
#[derive(Default)]
pub(in crate::timeline) struct Claims {
    /// By number on the host: a file can stand at several of its paths.
    prints: BTreeMap<u64, Vec<Fingerprint>>,
    /// A power cut may have taken the last of them; what was changed before this moment is then taken for the apply's.
    lost_before: Option<Timestamp>,
}

impl Claims {
    /// The claims in the journal of an apply that was cut off.
    fn of(contents: &LayerContents, writer: Writer) -> Result<Claims> {
        let mut claims = Claims::default();
        for record in contents.records().chain(contents.unsynced.iter().cloned().map(Ok)) {
            match record? {
                Record::Left(Left { print: Some(print), .. }) => claims.note(print),
                // If the filesystem was only mounted again, its time is not known, and a doubtful path is left as it is.
                Record::Opened { writer: then } if !then.is_of_same_boot(writer) => {
                    claims.lost_before = Some(clock::booted());
                }
                _ => {}
            }
        }
        Ok(claims)
    }

    fn note(&mut self, print: Fingerprint) {
        self.prints.entry(print.ino).or_default().push(print);
    }

    /// Records in the journal of an apply what it is about to put at a path.
    pub(in crate::timeline) fn claim(
        &mut self,
        layer: &mut Upper,
        path: &TreePath,
        print: Fingerprint,
    ) -> FsResult<()> {
        // An attempt that fails as the one before it adds nothing to the journal.
        if self.prints.get(&print.ino).and_then(|prints| prints.last()) == Some(&print) {
            return Ok(());
        }
        layer.record(&Record::Left(Left { path: path.clone(), print: Some(print) }))?;
        self.note(print);
        Ok(())
    }

    /// Who put there what stands at a path.
    fn whose(&self, image: Option<&PreNode>, now: &BaseStat) -> Whose {
        // Directories are judged by what is in them: one that is not empty cannot be removed.
        if now.kind == FileKind::Dir {
            return Whose::Known;
        }
        // Whoever uses a fifo or a device changes its times.
        let has_content = matches!(now.kind, FileKind::File | FileKind::Symlink);
        let same_content = |size, mtime| !has_content || (size, mtime) == (now.size, now.mtime);
        let is_image = image.is_some_and(|image| {
            let is_node = image.host == now.ino && image.node.kind() == now.kind;
            is_node && same_content(image.node.size(), image.node.meta.mtime)
        });
        let ours = self.prints.get(&now.ino).map_or(&[][..], Vec::as_slice);
        // It was cut off while it was being written in place.
        let is_half_done = ours.last().is_some_and(|print| print.ctime == ANY_TIMES);
        let is_ours =
            is_half_done || ours.iter().any(|print| same_content(print.size, print.mtime));
        if is_image || is_ours {
            Whose::Known
        } else if self.lost_before.is_some_and(|boot| now.ctime < boot) {
            Whose::Lost
        } else {
            Whose::Foreign
        }
    }
}

/// Who put there what stands at a path.
#[derive(PartialEq, Eq)]
enum Whose {
    /// The apply, or the time before it.
    Known,
    /// Nobody knows any more; it is taken for the apply's.
    Lost,
    /// Somebody else.
    Foreign,
}

/// Paths that are not what they were before an apply, and why; the root, for what concerns no
/// single path.
pub(in crate::timeline) type Remaining = Vec<(TreePath, String)>;

/// What came of a rollback.
pub(in crate::timeline) enum Rollback {
    /// It has ended: the pre-images, with what is there since, and what is to be told of paths that
    /// are not what they were.
    Ended(Box<PreImages>, Option<String>),
    /// It is to be tried again.
    Unfinished(Remaining),
}

/// Paths that a rollback that has ended did not set back, or did in doubt.
#[derive(Default)]
struct Exceptions {
    /// Paths that were left as somebody else made them.
    left_alone: BTreeSet<TreePath>,
    /// Paths that are not what they were, and why.
    unable: Unable,
    /// Paths at which was set back what perhaps somebody else had made: a power cut took what the apply said of it.
    doubtful: BTreeSet<TreePath>,
}

impl Exceptions {
    /// Says which paths these are, if any.
    fn told(&self) -> Option<String> {
        let mut told = Vec::new();
        if !self.left_alone.is_empty() {
            told.push(told_of(&self.left_alone));
        }
        if !self.unable.is_empty() {
            let paths: Vec<String> =
                self.unable.iter().map(|(path, why)| format!("'{path}' ({why})")).collect();
            told.push(format!("not set back: {}", paths.join(", ")));
        }
        if !self.doubtful.is_empty() {
            let paths: Vec<String> = self.doubtful.iter().map(|path| format!("'{path}'")).collect();
            told.push(format!(
                "set back whoever changed it before the machine was started anew: {}",
                paths.join(", ")
            ));
        }
        (!told.is_empty()).then(|| told.join("; "))
    }
}

/// Says that these paths were left as somebody else made them.
pub(in crate::timeline) fn told_of(left_alone: &BTreeSet<TreePath>) -> String {
    let paths: Vec<String> = left_alone.iter().map(|path| format!("'{path}'")).collect();
    format!("changed by somebody else meanwhile and left so: {}", paths.join(", "))
}

/// Sets the base back to `images`, which an apply after `before` found, and records what is there
/// since, if that came to its end.
///
/// # Errors
/// Those of the store, and those of the base that concern no single path.
pub(in crate::timeline) fn roll_back(
    store: &Arc<Store>,
    base: &Arc<Base>,
    layer: &mut Upper,
    images: Images,
    before: &PreHistory,
    claims: &mut Claims,
) -> Result<Rollback> {
    // The apply may have closed them to itself already. What they are to be again, they are in the end.
    let mut paths: Vec<&TreePath> = images.iter().map(|(path, _)| path).collect();
    paths.sort_unstable();
    staging::open(base, paths.into_iter(), true).attempt(|| "open directories of the base")?;
    let mut failed = unreadable(base, &images);
    let readable: Vec<_> =
        images.iter().filter(|(path, _)| !failed.contains_key(path)).cloned().collect();
    let with_images: PreHistory =
        before.iter().cloned().chain([Arc::new(collect(&readable, &[]))]).collect();
    let stages = Stages::of(&readable);
    // Before anything is touched: whoever takes one name from a file changes the times of all of them.
    let attempt = || "look at the base";
    let (mut left_alone, doubtful) =
        claim_lost(layer, base, &readable, &stages, claims).attempt(attempt)?;
    left_alone.extend(lost_in_place(base, &readable).attempt(attempt)?);
    failed.extend(stages.remove_left(base));
    let (written, unable) =
        set_back(store, base, layer, (before, &with_images), &stages, claims, &mut left_alone)?;
    failed.extend(unable);
    let remaining = remaining(base, &failed);
    let exceptions = Exceptions { left_alone, unable: failed, doubtful };
    if let Some(remaining) = remaining {
        let others = Exceptions { unable: Unable::new(), ..exceptions };
        others.told().iter().for_each(|told| log::warn!("{told}"));
        return Ok(Rollback::Unfinished(remaining));
    }
    let is_other = exceptions.left_alone.iter().chain(exceptions.unable.keys()).cloned().collect();
    let images =
        settle(store, base, layer, images, &written, &is_other).attempt(|| "set the base back")?;
    Ok(Rollback::Ended(Box::new(images), exceptions.told()))
}

/// The paths of the base that cannot be looked at.
fn unreadable(base: &Base, images: &Images) -> Unable {
    let failure = |path: &TreePath| found(base.stat(path)).err();
    images.iter().filter_map(|(path, _)| Some((path.clone(), failure(path)?))).collect()
}

/// All paths that could not be set back, and why, if any of them may be the next time: then the
/// rollback has not ended.
fn remaining(base: &Base, failed: &Unable) -> Option<Remaining> {
    let is_read_only = base.obstacle().ok().flatten();
    let has_rights = may_change_owners();
    let mut may_be_set_back = false;
    let mut remaining = Remaining::new();
    for (path, error) in failed {
        // What somebody else changed stays, whatever else is in the way.
        let is_drift = matches!(error, FsError::Drift(_));
        let obstacle = is_read_only.or_else(|| obstacle_at(base, path)).filter(|_| !is_drift);
        let is_refused = matches!(error, FsError::NotPermitted) && has_rights;
        may_be_set_back |= obstacle.is_some() || is_refused || !is_lasting(error);
        remaining.push((
            path.clone(),
            obstacle.map_or_else(|| error.to_string(), |why| why.to_string()),
        ));
    }
    may_be_set_back.then_some(remaining)
}

/// Whether this process may change files of other users, and give them away. An EPERM then comes
/// from a flag or a security module, so it may not come again.
fn may_change_owners() -> bool {
    const NEEDED: u64 = capabilities::CHOWN | capabilities::FOWNER;
    capabilities::effective().is_ok_and(|have| have & NEEDED == NEEDED)
}

/// What is in the way of a change at a path, and can be taken out of it.
fn obstacle_at(base: &Base, path: &TreePath) -> Option<Obstacle> {
    let in_dir = path.split().and_then(|(dir, _)| base.obstacle_in(&dir).ok().flatten());
    in_dir.or_else(|| base.obstacle_to_remove(path).ok().flatten())
}

/// The paths of files whose bytes the apply left where they were and that are not there any more. They cannot be made again; under
/// another name that the apply gave them they may be still, which then stays.
fn lost_in_place(base: &Base, images: &Images) -> FsResult<BTreeSet<TreePath>> {
    let (mut lost, mut nodes) = (BTreeSet::new(), BTreeSet::new());
    for (path, image) in images {
        let Some(image) = image else { continue };
        let Body::File { size, origin: Some(_) } = image.node.body else { continue };
        let is_it = |stat: &BaseStat| {
            let is_node = stat.ino == image.host || !base.has_stable_inodes();
            stat.kind == FileKind::File && stat.size == size && is_node
        };
        if size > 0 && !found(base.stat(path))?.is_some_and(|stat| is_it(&stat)) {
            lost.insert(path.clone());
            nodes.insert((image.host, size));
        }
    }
    for (path, _) in images.iter().filter(|_| base.has_stable_inodes() && !nodes.is_empty()) {
        // The host may have given the number to another file by now; one of the same size is left, rather than the last bytes lost.
        if found(base.stat(path))?.is_some_and(|stat| nodes.contains(&(stat.ino, stat.size))) {
            lost.insert(path.clone());
        }
    }
    Ok(lost)
}

/// The paths at which somebody else changed something, by what stands there.
pub(in crate::timeline) fn foreign(
    base: &Base,
    images: &Images,
    claims: &Claims,
    stat: impl Fn(&TreePath) -> FsResult<Option<BaseStat>>,
) -> FsResult<BTreeSet<TreePath>> {
    let mut foreign = BTreeSet::new();
    judge(base, images, stat, |path, image, now| {
        if claims.whose(image, now) == Whose::Foreign {
            foreign.insert(path.clone());
        }
        Ok(())
    })?;
    Ok(foreign)
}

/// The same. What a power cut took the claims of is claimed again, so that it is still known if this, too, is cut off, when it has
/// other times; these paths are the others.
fn claim_lost(
    layer: &mut Upper,
    base: &Base,
    images: &Images,
    stages: &Stages,
    claims: &mut Claims,
) -> FsResult<(BTreeSet<TreePath>, BTreeSet<TreePath>)> {
    let (mut foreign, mut lost) = (BTreeSet::new(), BTreeSet::new());
    // What is staged goes, whatever it is by now.
    let stat = |path: &TreePath| if stages.has(path) { Ok(None) } else { found(base.stat(path)) };
    judge(base, images, stat, |path, image, now| match claims.whose(image, now) {
        Whose::Known => Ok(()),
        Whose::Lost => {
            lost.insert(path.clone());
            claims.claim(layer, path, now.fingerprint())
        }
        Whose::Foreign => {
            foreign.insert(path.clone());
            Ok(())
        }
    })?;
    Ok((foreign, lost))
}

/// Looks at all that stands at the paths of an apply, if files can be told apart.
fn judge(
    base: &Base,
    images: &Images,
    stat: impl Fn(&TreePath) -> FsResult<Option<BaseStat>>,
    mut each: impl FnMut(&TreePath, Option<&PreNode>, &BaseStat) -> FsResult<()>,
) -> FsResult<()> {
    for (path, image) in images.iter().filter(|_| base.has_stable_inodes()) {
        if let Some(now) = stat(path)? {
            each(path, image.as_ref(), &now)?;
        }
    }
    Ok(())
}

/// Makes the base look as before the last of `with_images`, but for what is left alone. Gives the number of each node that it touched.
fn set_back(
    store: &Arc<Store>,
    base: &Arc<Base>,
    layer: &mut Upper,
    (before, with_images): (&PreHistory, &PreHistory),
    stages: &Stages,
    claims: &mut Claims,
    left_alone: &mut BTreeSet<TreePath>,
) -> Result<(Written, Unable)> {
    let at = |epoch: usize| {
        let epoch = Epoch(u32::try_from(epoch).unwrap_or(u32::MAX));
        let lower = Lower::new(Arc::clone(base), Arc::clone(store), epoch, with_images.clone());
        State { tree: Tree::new(), lower: Arc::new(lower) }
    };
    let attempt = || "set the base back";
    let (from, to) = (at(with_images.len()), at(before.len()));
    let touched_by_apply: BTreeSet<TreePath> =
        with_images.last().iter().flat_map(|images| images.paths().cloned()).collect();
    let mut changes = diff::changes(&from, &to).attempt(attempt)?;
    left_alone.extend(mounted(base, &touched_by_apply).attempt(attempt)?);
    // All that the apply made is in the images: what else is in a directory that it made, somebody put there.
    let goes =
        changes.iter().filter(|c| matches!(c.what, What::Deleted | What::Type)).map(|c| &c.path);
    let mut topmost: Option<&TreePath> = None;
    for path in goes.filter(|path| !touched_by_apply.contains(*path)) {
        // What is below it stays with it.
        if topmost.is_none_or(|top| !path.starts_with(top)) {
            left_alone.insert(path.clone());
            topmost = Some(path);
        }
    }
    let in_use = dirs_in_use(base, &changes, left_alone).attempt(attempt)?;
    // What the apply put into a directory that stays goes; what would stand below a file that stays cannot come back.
    let stays = |path: &TreePath| in_use.contains(path) || is_in(left_alone, path);
    changes.retain(|change| !stays(&change.path));
    let mut touched = touched_paths(&changes);
    for path in touched_by_apply {
        touched.entry(path).or_insert(Keep::InPlace);
    }
    touched.retain(|path, _| !stays(path));
    left_alone.extend(in_use);
    let mut claim = |path: &TreePath, print| claims.claim(layer, path, print);
    let mut unable = Unable::new();
    let written =
        write_base(base, (&from, &to), &changes, &touched, stages, &mut claim, Some(&mut unable))
            .attempt(attempt)?;
    Ok((written, unable))
}

/// Whether a path is one of these, or below one.
fn is_in(paths: &BTreeSet<TreePath>, path: &TreePath) -> bool {
    path.upwards().any(|path| paths.contains(&path))
}

/// The paths at or above these at which somebody mounted something: that is not the base's, and what is under it cannot be reached.
fn mounted(base: &Base, paths: &BTreeSet<TreePath>) -> FsResult<BTreeSet<TreePath>> {
    let (mut seen, mut mounted) = (BTreeSet::new(), BTreeSet::new());
    for path in paths {
        for path in path.upwards().take_while(|path| seen.insert(path.clone())) {
            if found(base.stat(&path))?.is_some_and(|stat| stat.foreign) {
                mounted.insert(path);
            }
        }
    }
    Ok(mounted)
}

/// The directories that would go, but in which somebody put something that stays.
fn dirs_in_use(
    base: &Base,
    changes: &[PathChange],
    left_alone: &BTreeSet<TreePath>,
) -> FsResult<BTreeSet<TreePath>> {
    let go: BTreeSet<&TreePath> = changes
        .iter()
        .filter(|c| matches!(c.what, What::Deleted | What::Type))
        .map(|c| &c.path)
        .collect();
    let mut kept = BTreeSet::new();
    // Deepest first: a directory stays if anything in it does.
    for path in go.iter().rev() {
        let Some(stat) = found(base.stat(path))?.filter(|stat| stat.kind == FileKind::Dir) else {
            continue;
        };
        if stat.foreign {
            continue;
        }
        let stays = |inside: &TreePath| {
            !go.contains(inside) || left_alone.contains(inside) || kept.contains(inside)
        };
        let in_use = match base.list(path) {
            // Nobody can remove what is in it.
            Err(FsError::AccessDenied) => true,
            entries => entries?.iter().any(|entry| stays(&path.join(&entry.name))),
        };
        if in_use {
            kept.insert((*path).clone());
        }
    }
    Ok(kept)
}

/// The applies that did not come to their end.
///
/// # Errors
/// Damage.
pub(in crate::timeline) fn unfinished(store: &Store) -> Result<Vec<LayerContents>> {
    let mut all = store.catalog();
    all.retain(|l| l.header.kind == LayerKind::PreImage && l.seal.is_none());
    let mut unfinished = Vec::new();
    for info in all {
        let contents = store.read_layer(info.header.layer)?;
        if !contents.has(|record| matches!(record, Record::Abandoned))? {
            unfinished.push(contents);
        }
    }
    Ok(unfinished)
}

/// Rolls back an apply that did not come to its end. Returns what remains, if the rollback did not
/// either.
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
    let mut claims = Claims::of(&contents, store.writer())?;
    // After a sync that failed they were cut off.
    for lost in contents.unsynced.iter().filter(|record| matches!(record, Record::Left(_))) {
        layer.record(lost).map_err(during)?;
    }
    drop(contents);
    let before = read_history(store).map_err(during)?;
    match roll_back(store, base, &mut layer, images, &before, &mut claims).map_err(during)? {
        Rollback::Unfinished(remaining) => Ok(Some(remaining)),
        Rollback::Ended(_, told) => {
            seal_unused(store, &mut layer, TAKEN_BACK).map_err(during)?;
            log::warn!("an apply that was cut off was taken back");
            if let Some(told) = told {
                log::warn!("{told}");
            }
            Ok(None)
        }
    }
}

/// The pre-images of an apply that did not come to its end; none if they were not complete: then it
/// did not change the base.
///
/// # Errors
/// Damage.
pub(in crate::timeline) fn images_of(contents: &LayerContents) -> Result<Option<Images>> {
    // The base is written only after the images were complete and marked so.
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
        Record::SyncedTo(_) | Record::Compact | Record::SyncFailed(_) | Record::Cells(_) => None,
    }
}
