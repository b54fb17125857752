//! Makes paths of the base equal to a state. An apply, an undo and a rollback all use this.
//!
//! Always true:
//! * Every call on the base stays beneath it and follows no symlink.
//! * New content is staged next to its target and renamed over it. A file with several names in the
//!   base is rewritten in place instead, so that its names remain hard links.
//! * A path is checked once more directly before it is changed. If it is not what the plan found,
//!   the write ends with [`FsError::Drift`] rather than overwrite what another program put there.
//! * Before a path is changed, its new fingerprint is recorded in the journal (a *claim*). A
//!   rollback uses the claims to tell what the apply wrote from what another program wrote since.
//!
//! A crash can interrupt this at any point. The pre-images that were recorded before say how to
//! roll it back.

mod place;

use std::collections::{BTreeMap, BTreeSet};

use crate::base::{Attributes, Base, BaseStat, BaseWriter, PathLookup, WriteDir};
use crate::error::{Attempt, FsError, FsResult, if_exists};
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::sys::flags;
use crate::timeline::apply::pre_images::{TouchedPaths, linked_names};
use crate::timeline::apply::staging;
use crate::timeline::apply::staging::Stages;
use crate::timeline::diff::{PathChange, What};
use crate::tree::Node;
use crate::types::{FileKind, Fingerprint, Ino, Name, Timestamp, TreePath};

/// The result of writing the base.
#[derive(Default)]
pub(in crate::timeline) struct WriteOutcome {
    /// The inode number of each node that was written or kept.
    pub(in crate::timeline) inos: BTreeMap<TreePath, Ino>,
    /// The node at each touched path at the end. Only filled where the path may become
    /// inaccessible to us.
    seen: BTreeMap<TreePath, Option<BaseStat>>,
    /// Times that the filesystem of the base could not hold: the wanted one, and the one that it
    /// kept.
    pub(in crate::timeline) rounded: BTreeMap<TreePath, (Timestamp, Timestamp)>,
    /// Inode flags that were lost with the files that had them.
    pub(in crate::timeline) lost_flags: BTreeMap<TreePath, u32>,
}

impl WriteOutcome {
    /// The node at a path of the base now. If the write left its directory without access for us,
    /// this is the node that was there before.
    pub(in crate::timeline) fn stat(
        &self,
        base: &PathLookup<'_>,
        path: &TreePath,
    ) -> FsResult<Option<BaseStat>> {
        match (base.stat(path), self.seen.get(path)) {
            (Err(FsError::AccessDenied), Some(seen)) => Ok(*seen),
            (now, _) => if_exists(now),
        }
    }
}

/// Why some paths could not be written.
pub(in crate::timeline) type Failures = BTreeMap<TreePath, FsError>;

/// Records the fingerprint that a path is about to get.
pub(in crate::timeline) type Claim<'c> = &'c mut dyn FnMut(&TreePath, Fingerprint) -> FsResult<()>;

/// Makes the base equal to `to` at the changed paths, and syncs it.
///
/// With `failures`, a path that cannot be written is noted there, and the others are written; a
/// rollback wants that.
///
/// # Errors
/// The first path that cannot be written, without `failures`; errors of the store and of the sync.
pub(in crate::timeline) fn write_base<'a>(
    base: &'a Base,
    (from, to): (&'a State, &'a State),
    changes: &'a [PathChange],
    touched: &TouchedPaths,
    stages: &'a Stages,
    claim: Claim<'a>,
    failures: Option<&'a mut Failures>,
) -> FsResult<WriteOutcome> {
    // Opened before the first change: the kernel reports each write error since the open to every
    // open file, also if another process has seen the error already.
    let root = base.writer().dir(&TreePath::root())?;
    let goes_on = failures.is_some();
    let opened =
        staging::open(base, touched.keys(), goes_on).attempt(|| "open directories of the base")?;
    let mut writer = StateWriter {
        base,
        writer: base.writer(),
        from,
        to,
        changes: changes.iter().map(|change| (&change.path, change)).collect(),
        linked: linked_names(from, to, changes)?,
        placed: BTreeMap::new(),
        outcome: WriteOutcome::default(),
        rewritten: BTreeSet::new(),
        stages,
        claim,
        failures,
    };
    writer.remove_names(changes)?;
    writer.place_nodes(changes)?;
    writer.set_all_attributes(touched)?;
    writer.close_directories(&opened)?;
    // One sync for all: until the pre-image layer is sealed, a power cut rolls everything back.
    root.sync_filesystem()?;
    Ok(writer.outcome)
}

/// Writes a state into the base.
struct StateWriter<'a> {
    base: &'a Base,
    writer: BaseWriter<'a>,
    from: &'a State,
    to: &'a State,
    changes: BTreeMap<&'a TreePath, &'a PathChange>,
    /// All names that the base had of those changed files that have several.
    linked: BTreeMap<TreePath, Ino>,
    /// The first path at which each file was placed, and its metadata there. Its further names are
    /// made as links of that path.
    placed: BTreeMap<Ino, (TreePath, BaseStat)>,
    outcome: WriteOutcome,
    /// Host inodes of files that were rewritten in place. Under their other names they differ from
    /// the plan by our own doing.
    rewritten: BTreeSet<u64>,
    stages: &'a Stages,
    claim: Claim<'a>,
    /// Where a rollback notes failures, instead of ending with the first one.
    failures: Option<&'a mut Failures>,
}

impl<'a> StateWriter<'a> {
    /// Removes the names that go, the deepest first, so that directories are empty.
    fn remove_names(&mut self, changes: &[PathChange]) -> FsResult<()> {
        let removed = changes.iter().filter(|c| matches!(c.what, What::Deleted | What::Type));
        for change in removed.rev() {
            let removed = self.remove(change);
            self.note_failure(&change.path, removed)
                .attempt(|| format!("remove '{}'", change.path))?;
        }
        Ok(())
    }

    /// Places new nodes and new content, the directories before what is in them.
    fn place_nodes(&mut self, changes: &[PathChange]) -> FsResult<()> {
        for change in changes {
            match change.what {
                What::Added | What::Type | What::Content | What::Links => {
                    let placed = self.place(change);
                    self.note_failure(&change.path, placed)
                        .attempt(|| format!("write '{}'", change.path))?;
                }
                What::Deleted | What::Attributes | What::DirTimes => {}
                What::Renamed => {
                    return Err(FsError::Damage("an apply is planned without renames"));
                }
            }
        }
        Ok(())
    }

    /// Sets the attributes of all touched paths. This comes after all changes of names, which
    /// change the times of directories, and goes from the deepest path up, because a mode can deny
    /// access to what is below.
    fn set_all_attributes(&mut self, touched: &TouchedPaths) -> FsResult<()> {
        for path in touched.keys().rev() {
            let set = self.set_attributes(path);
            self.note_failure(path, set).attempt(|| format!("set the attributes of '{path}'"))?;
            if staging::modes_apply_to_us() {
                match if_exists(self.base.stat(path)) {
                    Ok(seen) => drop(self.outcome.seen.insert(path.clone(), seen)),
                    Err(_) if self.failures.is_some() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Sets the modes of the directories that were opened for the write and got no attributes, the
    /// deepest first.
    fn close_directories(&mut self, opened: &BTreeMap<TreePath, u32>) -> FsResult<()> {
        for (path, mode) in opened.iter().rev() {
            if !self.outcome.inos.contains_key(path) {
                let closed = staging::close(self.base, path, *mode);
                self.note_failure(path, closed).attempt(|| format!("close '{path}'"))?;
            }
        }
        Ok(())
    }

    /// Notes the failure of one path in a rollback. An error of the store concerns no single path.
    fn note_failure(&mut self, path: &TreePath, done: FsResult<()>) -> FsResult<()> {
        match (done, &mut self.failures) {
            (Err(FsError::Store(error)), _) => Err(FsError::Store(error)),
            (Err(error), Some(failures)) => {
                // If the staged content cannot be removed either, that is the error to report: the
                // next attempt has to remove it.
                let error = self.stages.remove_for(&self.writer, path).err().unwrap_or(error);
                self.outcome.inos.remove(path);
                failures.entry(path.clone()).or_insert(error);
                Ok(())
            }
            (done, _) => done,
        }
    }

    /// The directory that holds a path, and the name in it.
    fn dir(&self, path: &TreePath) -> FsResult<(WriteDir<'a>, Name)> {
        let (dir, name) = path.split().ok_or(FsError::NotPermitted)?;
        Ok((self.writer.dir(&dir)?, name))
    }

    /// A directory of the base, if a directory stands there now. It may have become something else
    /// meanwhile, also a symlink.
    fn dir_if_there(&self, path: &TreePath) -> FsResult<Option<WriteDir<'a>>> {
        match self.writer.dir(path) {
            Err(FsError::LeavesJail) => Ok(None),
            dir => if_exists(dir),
        }
    }

    fn remove(&mut self, change: &PathChange) -> FsResult<()> {
        let (dir, name) = self.dir(&change.path)?;
        let flags = flags_of(&dir, &name, &change.old)?;
        match self.check_planned(&dir, (&change.path, &name), &change.old)? {
            None => Ok(()),
            Some(stat) if stat.kind == FileKind::Dir => dir.rmdir(&name),
            Some(stat) => {
                // Under another name the file keeps its flags. A new file inherits those of its
                // directory.
                if stat.nlink == 1
                    && let Some(flags) = flags
                {
                    self.note_lost_flags(&change.path, flags & !dir.own_flags()?);
                }
                dir.unlink(&name)
            }
        }
    }

    fn note_lost_flags(&mut self, path: &TreePath, lost: u32) {
        if !flags::letters(lost).is_empty() {
            self.outcome.lost_flags.insert(path.clone(), lost);
        }
    }

    /// The attributes that a node is to have. A rollback may be unable to set the owner, and then
    /// keeps ours.
    fn attributes<'x>(&self, record: &Node, xattrs: &'x [(Vec<u8>, Vec<u8>)]) -> Attributes<'x> {
        let meta = &record.meta;
        let (mode, uid, gid, atime, mtime) =
            (meta.mode, meta.uid, meta.gid, meta.atime, meta.mtime);
        Attributes { mode, uid, gid, atime, mtime, xattrs, may_keep_owner: self.failures.is_some() }
    }

    /// Notes which attributes the base did not take: the time, and in a rollback the owner.
    fn note_rounding(&mut self, path: &TreePath, record: &Node, is: &BaseStat) {
        if is.mtime != record.meta.mtime {
            self.outcome.rounded.insert(path.clone(), (record.meta.mtime, is.mtime));
        }
        if let Some(failures) = &mut self.failures
            && (is.uid, is.gid) != (record.meta.uid, record.meta.gid)
        {
            failures.entry(path.clone()).or_insert(FsError::NotPermitted);
        }
    }

    /// Sets the attributes of what stands at a path, if anything does.
    fn set_attributes(&mut self, path: &TreePath) -> FsResult<()> {
        if self.failures.as_ref().is_some_and(|failures| failures.contains_key(path)) {
            return Ok(());
        }
        let wanted = self.to.resolve(path)?;
        let Some(ino) = wanted.ino() else { return Ok(()) };
        if !self.changes.contains_key(path) && self.is_unapplied_link(path, &wanted)? {
            return Ok(());
        }
        let (record, _) = self.to.record(&wanted)?;
        let xattrs = xattr_list(&record);
        let attributes = self.attributes(&record, &xattrs);
        let was_placed = self.outcome.inos.insert(path.clone(), ino).is_some();
        if record.kind() == FileKind::Dir {
            let dir = self.writer.dir(path)?;
            dir.set_own_attributes(&attributes)?;
            self.note_rounding(path, &record, &dir.own_stat()?);
            return Ok(());
        }
        let (dir, name) = self.dir(path)?;
        if self.placed.contains_key(&ino) {
            return Ok(());
        }
        if let Some(now) = dir.stat(&name)? {
            let is_same = was_placed
                || match self.changes.get(path) {
                    Some(change) => self.is_same(&change.old, &now),
                    None => self.is_same(&self.from.resolve(path)?, &now),
                };
            if !is_same {
                return Err(FsError::Drift(path.clone()));
            }
            self.rewritten.insert(now.ino);
            (self.claim)(path, Fingerprint { mtime: record.meta.mtime, ..now.fingerprint() })?;
        }
        let is = dir.set_attributes(&name, &attributes)?;
        self.note_rounding(path, &record, &is);
        // The filesystem may have rounded the time, so the claim before does not match.
        if is.mtime != record.meta.mtime && self.rewritten.contains(&is.ino) {
            (self.claim)(path, is.fingerprint())?;
        }
        Ok(())
    }

    /// Whether the base has a further name of a changed file at a path where the tree has another
    /// node that is not applied.
    fn is_unapplied_link(&self, path: &TreePath, wanted: &Found) -> FsResult<bool> {
        let stands = self.from.resolve(path)?;
        let are_dirs = self.from.as_dir(&stands).is_some() && self.to.as_dir(wanted).is_some();
        Ok(stands.ino() != wanted.ino() && !are_dirs)
    }

    /// Checks that a name is what the plan found there, and returns what stands there now.
    ///
    /// # Errors
    /// [`FsError::Drift`] if another program changed it since.
    fn check_planned(
        &self,
        dir: &WriteDir<'_>,
        (path, name): (&TreePath, &Name),
        planned: &Found,
    ) -> FsResult<Option<BaseStat>> {
        let now = dir.stat(name)?;
        let is_same = match (planned, &now) {
            (Found::Nothing(_), None) => true,
            (Found::Nothing(_), Some(_)) | (_, None) => false,
            (planned, Some(now)) => self.is_same(planned, now),
        };
        if is_same { Ok(now) } else { Err(FsError::Drift(path.clone())) }
    }

    /// Whether a node of the base is the planned one with the same content. The change time is not
    /// compared, because the apply itself changes it when it adds and removes names of the file.
    fn is_same(&self, planned: &Found, now: &BaseStat) -> bool {
        let Found::Base(_, _, LowerNode::Base(planned)) = planned else { return false };
        let same_content = planned.kind == FileKind::Dir
            || self.rewritten.contains(&now.ino)
            || (planned.size, planned.mtime) == (now.size, now.mtime);
        self.is_same_node(planned, now) && same_content
    }

    fn is_same_node(&self, planned: &BaseStat, now: &BaseStat) -> bool {
        (planned.ino == now.ino || !self.base.has_stable_inodes()) && planned.kind == now.kind
    }
}

/// The inode flags of the regular file that a plan found at a name; none if it found another kind
/// of node.
fn flags_of(dir: &WriteDir<'_>, name: &Name, planned: &Found) -> FsResult<Option<u32>> {
    match planned {
        Found::Base(_, _, LowerNode::Base(stat)) if stat.kind == FileKind::File => {
            if_exists(dir.flags(name))
        }
        _ => Ok(None),
    }
}

fn xattr_list(record: &Node) -> Vec<(Vec<u8>, Vec<u8>)> {
    record
        .xattrs
        .iter()
        .flat_map(|x| x.iter())
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// Whether a failure is final for its path. Another failure, such as a full disk or a missing
/// right, may be gone at the next attempt.
pub(in crate::timeline) fn is_final(error: &FsError) -> bool {
    matches!(
        error,
        FsError::Drift(_)
            | FsError::NotPermitted
            | FsError::NotFound
            | FsError::Exists
            | FsError::NotEmpty
            | FsError::NotADirectory
            | FsError::IsADirectory
            | FsError::Unsupported
            | FsError::TooManyLinks
    )
}
