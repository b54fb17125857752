//! Writing a state into the base: the step of an apply that changes it.
//!
//! The same code writes the tree home, sets the base back after a failure or a crash, and undoes an apply: each makes a
//! list of paths look as in a state. Every call is beneath the base and follows no link. New content is staged next to its
//! target and renamed over it; a file with further links in the base is written anew in place, so that they stay links. What is
//! written here may be cut off at any step: the pre-images that were recorded before tell how to take it back.
//!
//! Right before a path is changed it is looked at once more: what somebody else put there since the plan is not replaced but ends
//! the apply. And what will stand there is said before (a *claim*), so that whoever takes a cut-off apply back can tell what it wrote from
//! what somebody else wrote since.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::base::{Attributes, Base, BaseStat, BaseWriter, WriteDir};
use crate::error::{Attempt, FsError, FsResult};
use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::file::Rename;
use crate::sys::flags;
use crate::timeline::apply::staging;
use crate::timeline::apply::staging::Stages;
use crate::timeline::apply::{Keep, found, linked_names};
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Node};
use crate::types::{FileKind, Fingerprint, Ino, Name, Timestamp, TreePath};

/// What came of writing the base.
#[derive(Default)]
pub(in crate::timeline) struct Written {
    /// The number of each node that was made or kept.
    pub(in crate::timeline) inos: BTreeMap<TreePath, Ino>,
    /// What stood at each touched path when it was done, where that may not be seen again.
    seen: BTreeMap<TreePath, Option<BaseStat>>,
    /// Times that the filesystem of the base could not hold, and what it made of them.
    pub(in crate::timeline) rounded: BTreeMap<TreePath, (Timestamp, Timestamp)>,
    /// Inode flags that files of the base had, and that went with the files.
    pub(in crate::timeline) lost_flags: BTreeMap<TreePath, u32>,
}

impl Written {
    /// What stands at a path of the base now. In a directory that was closed since, also to us, it is what was left there.
    pub(in crate::timeline) fn stat(
        &self,
        base: &Base,
        path: &TreePath,
    ) -> FsResult<Option<BaseStat>> {
        match (base.stat(path), self.seen.get(path)) {
            (Err(FsError::AccessDenied), Some(seen)) => Ok(*seen),
            (now, _) => found(now),
        }
    }
}

/// Makes the base look as in `to` at the changed paths.
pub(in crate::timeline) fn write_base<'a>(
    base: &'a Base,
    (from, to): (&'a State, &'a State),
    changes: &'a [PathChange],
    touched: &BTreeMap<TreePath, Keep>,
    stages: &'a Stages,
    claim: Claim<'a>,
    unable: Option<&'a mut Unable>,
) -> FsResult<Written> {
    // Opened before the first change. The kernel tells each open file of the errors since then, also
    // if another process was told before.
    let root = base.writer().dir(&TreePath::root())?;
    let goes_on = unable.is_some();
    let opened =
        staging::open(base, touched.keys(), goes_on).attempt(|| "open directories of the base")?;
    let linked = linked_names(from, to, changes)?;
    let (placed, written, changed) = (BTreeMap::new(), Written::default(), BTreeSet::new());
    let (writer, has_stable_inodes) = (base.writer(), base.has_stable_inodes());
    let by_path = changes.iter().map(|change| (&change.path, change)).collect();
    let mut home = Home {
        writer,
        from,
        to,
        changes: by_path,
        linked,
        placed,
        written,
        changed,
        stages,
        claim,
        unable,
        has_stable_inodes,
    };
    for change in changes.iter().rev().filter(|c| matches!(c.what, What::Deleted | What::Type)) {
        let removed = home.remove(change);
        home.go_on(&change.path, removed).attempt(|| format!("remove '{}'", change.path))?;
    }
    for change in changes {
        match change.what {
            What::Added | What::Type | What::Content | What::Links => {
                let placed = home.place(change);
                home.go_on(&change.path, placed).attempt(|| format!("write '{}'", change.path))?
            }
            What::Deleted | What::Attributes | What::DirTimes => {}
            What::Renamed => return Err(FsError::Damage("an apply is planned without renames")),
        }
    }
    // Last, because every change of names changes the times of a directory; deepest first, because of the modes.
    for path in touched.keys().rev() {
        let set = home.set_attributes(path);
        home.go_on(path, set).attempt(|| format!("set the attributes of '{path}'"))?;
        if staging::can_be_kept_out() {
            match found(base.stat(path)) {
                Ok(seen) => drop(home.written.seen.insert(path.clone(), seen)),
                Err(_) if goes_on => {}
                Err(error) => return Err(error),
            }
        }
    }
    // The deepest first: behind a closed one nothing is reached.
    for (path, mode) in opened.iter().rev() {
        if !home.written.inos.contains_key(path) {
            let closed = staging::close(base, path, *mode);
            home.go_on(path, closed).attempt(|| format!("close '{path}'"))?;
        }
    }
    // One sync for all: until the pre-images are sealed, a power cut sets everything back anyway.
    root.sync_filesystem()?;
    Ok(home.written)
}

/// What could not be done at some paths.
pub(in crate::timeline) type Unable = BTreeMap<TreePath, FsError>;

/// Records what will stand at a path.
pub(in crate::timeline) type Claim<'c> = &'c mut dyn FnMut(&TreePath, Fingerprint) -> FsResult<()>;

/// The base while it is written.
struct Home<'a> {
    writer: BaseWriter<'a>,
    from: &'a State,
    to: &'a State,
    /// What differs, by path.
    changes: BTreeMap<&'a TreePath, &'a PathChange>,
    /// All names that the base had of the files with several that the changes concern.
    linked: BTreeMap<TreePath, Ino>,
    /// Where a file was put, and what it was there, so that its further links are links.
    placed: BTreeMap<Ino, (TreePath, BaseStat)>,
    written: Written,
    /// Numbers on the host of files that were changed in place, so that they are not taken for somebody else's under their other names.
    changed: BTreeSet<u64>,
    stages: &'a Stages,
    claim: Claim<'a>,
    /// Who sets the base back goes on with the rest.
    unable: Option<&'a mut Unable>,
    /// Whether a node that has another number now is another node.
    has_stable_inodes: bool,
}

impl<'a> Home<'a> {
    fn dir(&self, path: &TreePath) -> FsResult<(WriteDir<'a>, Name)> {
        let (dir, name) = path.split().ok_or(FsError::NotPermitted)?;
        Ok((self.writer.dir(&dir)?, name))
    }

    /// The same, with the name under which something is staged there.
    fn dir_to_stage_in(&self, path: &TreePath) -> FsResult<(WriteDir<'a>, Name, Name)> {
        let (dir, name) = path.split().ok_or(FsError::NotPermitted)?;
        Ok((self.writer.dir(&dir)?, name, self.stages.name_in(&dir)?))
    }

    /// A directory of the base, if one stands there now: it may have become something else by then, also a link.
    fn dir_still(&self, path: &TreePath) -> FsResult<Option<WriteDir<'a>>> {
        match self.writer.dir(path) {
            Err(FsError::LeavesJail) => Ok(None),
            dir => found(dir),
        }
    }

    /// Goes on after a failure at one path, if that is wanted. A failure of the store is about no
    /// path.
    fn go_on(&mut self, path: &TreePath, done: FsResult<()>) -> FsResult<()> {
        match (done, &mut self.unable) {
            (Err(FsError::Store(error)), _) => Err(FsError::Store(error)),
            (Err(error), Some(unable)) => {
                // What is left of it is removed by the next attempt, which this error asks for.
                let error = self.stages.remove_in(&self.writer, path).err().unwrap_or(error);
                // What stands there now is nothing that was put there.
                self.written.inos.remove(path);
                unable.entry(path.clone()).or_insert(error);
                Ok(())
            }
            (done, _) => done,
        }
    }

    /// What a node is to have. Who sets the base back may not be able to give it its owner.
    fn attributes<'x>(&self, record: &Node, xattrs: &'x [(Vec<u8>, Vec<u8>)]) -> Attributes<'x> {
        let meta = &record.meta;
        let (mode, uid, gid, atime, mtime) =
            (meta.mode, meta.uid, meta.gid, meta.atime, meta.mtime);
        Attributes { mode, uid, gid, atime, mtime, xattrs, may_keep_owner: self.unable.is_some() }
    }

    /// Notes what a node of the base did not get: its owner, or its time.
    fn note_made(&mut self, path: &TreePath, record: &Node, is: &BaseStat) {
        if is.mtime != record.meta.mtime {
            self.written.rounded.insert(path.clone(), (record.meta.mtime, is.mtime));
        }
        if let Some(unable) = &mut self.unable
            && (is.uid, is.gid) != (record.meta.uid, record.meta.gid)
        {
            unable.entry(path.clone()).or_insert(FsError::NotPermitted);
        }
    }

    fn remove(&mut self, change: &PathChange) -> FsResult<()> {
        let (dir, name) = self.dir(&change.path)?;
        let flags = flags_of(&dir, &name, &change.old)?;
        match self.as_planned(&dir, (&change.path, &name), &change.old)? {
            None => Ok(()),
            Some(stat) if stat.kind == FileKind::Dir => dir.rmdir(&name),
            Some(stat) => {
                // Under another name the file keeps them. A new file has those of its directory.
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
            self.written.lost_flags.insert(path.clone(), lost);
        }
    }

    fn place(&mut self, change: &PathChange) -> FsResult<()> {
        // Not as the plan found it: what it shows of the base, say below a renamed directory, may be removed from there
        // by now, and is kept in the pre-images.
        let new = self.to.resolve(&change.path)?;
        let ino = new.ino().ok_or(FsError::NotFound)?;
        let (record, _) = self.to.record(&new)?;
        self.written.inos.insert(change.path.clone(), ino);
        if let Body::Dir { .. } = &record.body {
            let (dir, name) = self.dir(&change.path)?;
            return dir.mkdir(&name, 0o700);
        }
        if let Some(first) = self.other_link(ino, &change.path)? {
            return self.link(ino, &first, &change.path, self.planned(change));
        }
        let (dir, name, staged) = self.dir_to_stage_in(&change.path)?;
        match &record.body {
            Body::File { .. } => {
                return self.place_file(&dir, (&name, &staged), (change, &new), &record);
            }
            Body::Symlink { target } => dir.symlink(&staged, target)?,
            Body::Special => dir.mknod(&staged, record.meta.mode, record.meta.rdev)?,
            Body::Dir { .. } => return Ok(()),
        }
        self.publish(&dir, &staged, &name, (change, ino), &record, None)
    }

    /// A path of the base at which the same file stands already, as it is to be.
    fn other_link(&self, ino: Ino, path: &TreePath) -> FsResult<Option<TreePath>> {
        if let Some((first, _)) = self.placed.get(&ino) {
            return Ok(Some(first.clone()));
        }
        for (link, _) in self.linked.iter().filter(|(link, of)| **of == ino && *link != path) {
            let (old, new) = (self.from.resolve(link)?, self.to.resolve(link)?);
            if old.ino() != Some(ino) || new.ino() != Some(ino) {
                continue;
            }
            let unchanged = diff::same_content(self.from, &old, self.to, &new)?;
            if unchanged && self.dir_still(&link.split().ok_or(FsError::NotFound)?.0)?.is_some() {
                return Ok(Some(link.clone()));
            }
        }
        Ok(None)
    }

    /// Gives the file at `first` another name, unless somebody put another one there.
    fn link(&mut self, ino: Ino, first: &TreePath, path: &TreePath, old: &Found) -> FsResult<()> {
        let stands = match self.placed.get(&ino) {
            Some((_, placed)) => *placed,
            None => match self.from.resolve(first)? {
                Found::Base(is, _, LowerNode::Base(stat)) if is == ino => *stat,
                _ => return Err(FsError::Drift(first.clone())),
            },
        };
        let (from_dir, from) = self.dir(first)?;
        let (dir, name, staged) = self.dir_to_stage_in(path)?;
        dir.hard_link_from(&from_dir, &from, &staged)?;
        self.put(&dir, &staged, (path, &name), old, &stands)?;
        // Renaming one link of a file over another does nothing (rename(2)), and the staged name stays.
        if dir.stat(&staged)?.is_some() { dir.unlink(&staged) } else { Ok(()) }
    }

    /// The further names that a file of the base has in the base just now, and whether it has others elsewhere.
    fn further_names(
        &self,
        ino: Ino,
        path: &TreePath,
        stat: &BaseStat,
    ) -> FsResult<(Vec<TreePath>, bool)> {
        let mut names = Vec::new();
        for (link, _) in self.linked.iter().filter(|(link, of)| **of == ino && *link != path) {
            let Some((above, name)) = link.split() else { continue };
            let dir = self.dir_still(&above)?;
            let there = dir.map(|dir| dir.stat(&name)).transpose()?.flatten();
            if there.is_some_and(|there| (there.dev, there.ino) == (stat.dev, stat.ino)) {
                names.push(link.clone());
            }
        }
        let is_elsewhere = stat.nlink as usize > names.len() + 1;
        Ok((names, is_elsewhere))
    }

    fn place_file(
        &mut self,
        dir: &WriteDir<'_>,
        (name, staged): (&Name, &Name),
        (change, new): (&PathChange, &Found),
        record: &Node,
    ) -> FsResult<()> {
        let old = &change.old;
        let ino = new.ino().ok_or(FsError::NotFound)?;
        // A file with more links is written anew in place: a new file would leave the other links behind. Unless some are
        // outside of the base: what is there is not ours to write, so the names in the base become those of a new file.
        let (further, is_elsewhere) = match (old, dir.stat(name)?) {
            (Found::Base(old_ino, _, LowerNode::Base(_)), Some(now))
                if now.nlink > 1 && ino == *old_ino =>
            {
                self.further_names(ino, &change.path, &now)?
            }
            (Found::Base(..) | Found::Upper(..) | Found::Nothing(_), _) => (Vec::new(), false),
        };
        if !further.is_empty() && !is_elsewhere {
            // What was opened is what is written to, whatever stands at the name since.
            let (file, opened) = dir.open_to_rewrite(name)?;
            if !self.is_same(old, &opened) {
                return Err(FsError::Drift(change.path.clone()));
            }
            // Size and times are anything until it is done.
            (self.claim)(&change.path, Fingerprint { ctime: ANY_TIMES, ..opened.fingerprint() })?;
            if let Err(error) = self.as_planned(dir, (&change.path, name), old) {
                // It is not written to, and not to be set back.
                (self.claim)(&change.path, Fingerprint { size: u64::MAX, ..opened.fingerprint() })?;
                return Err(error);
            }
            self.changed.insert(opened.ino);
            failpoint::hit(Failpoint::BaseWrite)?;
            file.set_len(0)?;
            self.copy_content(new, record.size(), &file)?;
            let stat =
                dir.set_file_attributes(file, &self.attributes(record, &xattr_list(record)))?;
            self.note_made(&change.path, record, &stat);
            self.placed.insert(ino, (change.path.clone(), stat));
            return (self.claim)(&change.path, stat.fingerprint());
        }
        let flags = flags_of(dir, name, self.planned(change))?;
        let file = dir.create_file(staged)?;
        if let Some(flags) = flags {
            // Some can only be given to an empty file.
            self.note_lost_flags(&change.path, flags::give(&file, flags));
        }
        self.copy_content(new, record.size(), &file)?;
        self.publish(dir, staged, name, (change, ino), record, Some(file))?;
        let stays =
            |link: &TreePath| -> FsResult<bool> { Ok(self.to.resolve(link)?.ino() == Some(ino)) };
        for link in further {
            // Those that change, too, have their turn.
            if !self.changes.contains_key(&link) && stays(&link)? {
                let old = self.from.resolve(&link)?;
                let linked = self.link(ino, &change.path, &link, &old);
                self.go_on(&link, linked)?;
            }
        }
        Ok(())
    }

    fn copy_content(&self, found: &Found, size: u64, to: &File) -> FsResult<()> {
        to.set_len(size)?;
        for range in self.to.data(found) {
            let range = range?;
            let bytes = self.to.read_range(found, range)?;
            if bytes.len() as u64 != range.len() {
                return Err(FsError::Damage("a file is shorter than its record says"));
            }
            if bytes.iter().any(|b| *b != 0) {
                failpoint::hit(Failpoint::BaseWrite)?;
                to.write_all_at(&bytes, range.start)?;
            }
        }
        Ok(())
    }

    /// Gives a path its attributes, if it is there.
    fn set_attributes(&mut self, path: &TreePath) -> FsResult<()> {
        if self.unable.as_ref().is_some_and(|unable| unable.contains_key(path)) {
            return Ok(());
        }
        let wanted = self.to.resolve(path)?;
        let Some(ino) = wanted.ino() else { return Ok(()) };
        if !self.changes.contains_key(path) && self.is_other(path, &wanted)? {
            return Ok(());
        }
        let (record, _) = self.to.record(&wanted)?;
        let xattrs = xattr_list(&record);
        let attributes = self.attributes(&record, &xattrs);
        let was_placed = self.written.inos.insert(path.clone(), ino).is_some();
        if record.kind() == FileKind::Dir {
            let dir = self.writer.dir(path)?;
            dir.set_own_attributes(&attributes)?;
            self.note_made(path, &record, &dir.own_stat()?);
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
            // Under its other names, too, it is another from now on.
            self.changed.insert(now.ino);
            (self.claim)(path, Fingerprint { mtime: record.meta.mtime, ..now.fingerprint() })?;
        }
        let is = dir.set_attributes(&name, &attributes)?;
        self.note_made(path, &record, &is);
        // A filesystem may keep times less exactly than they were asked for.
        if is.mtime != record.meta.mtime && self.changed.contains(&is.ino) {
            (self.claim)(path, is.fingerprint())?;
        }
        Ok(())
    }

    /// Whether the base has a further name of a changed file at a path at which the tree has something else, which is not applied.
    fn is_other(&self, path: &TreePath, wanted: &Found) -> FsResult<bool> {
        let stands = self.from.resolve(path)?;
        let are_dirs = self.from.as_dir(&stands).is_some() && self.to.as_dir(wanted).is_some();
        Ok(stands.ino() != wanted.ino() && !are_dirs)
    }

    /// Gives what was staged its attributes and its name. A file is known by its descriptor, whatever stands at its name by now.
    fn publish(
        &mut self,
        dir: &WriteDir<'_>,
        staged: &Name,
        name: &Name,
        (change, ino): (&PathChange, Ino),
        record: &Node,
        file: Option<File>,
    ) -> FsResult<()> {
        let xattrs = xattr_list(record);
        let attributes = self.attributes(record, &xattrs);
        let made = match file {
            Some(file) => dir.set_file_attributes(file, &attributes)?,
            None => dir.set_attributes(staged, &attributes)?,
        };
        self.note_made(&change.path, record, &made);
        self.put(dir, staged, (&change.path, name), self.planned(change), &made)?;
        self.placed.insert(ino, (change.path.clone(), made));
        Ok(())
    }

    /// What a change finds at its path: what was another kind of node was removed before.
    fn planned<'c>(&self, change: &'c PathChange) -> &'c Found {
        if change.what == What::Type { &Found::Nothing(None) } else { &change.old }
    }

    /// Moves what was staged to its name, if it is what was `made` and nobody changed what stands there.
    fn put(
        &mut self,
        dir: &WriteDir<'_>,
        staged: &Name,
        (path, name): (&TreePath, &Name),
        old: &Found,
        made: &BaseStat,
    ) -> FsResult<()> {
        let drift = || FsError::Drift(path.clone());
        let stat = dir.stat(staged)?.ok_or_else(drift)?;
        if !self.is_same_node(made, &stat) || (made.size, made.mtime) != (stat.size, stat.mtime) {
            return Err(drift());
        }
        (self.claim)(path, stat.fingerprint())?;
        let how = match self.as_planned(dir, (path, name), old)? {
            None => Rename::NoReplace,
            Some(_) => Rename::Replace,
        };
        match dir.rename(staged, dir, name, how) {
            // A filesystem that cannot refuse to replace.
            Err(FsError::Invalid) if how == Rename::NoReplace => {
                dir.rename(staged, dir, name, Rename::Replace)
            }
            Err(FsError::Exists) => Err(drift()),
            renamed => renamed,
        }
    }

    /// What stands at a name now, if that is what the plan found there.
    ///
    /// # Errors
    /// [`FsError::Drift`] if somebody changed it since.
    fn as_planned(
        &self,
        dir: &WriteDir<'_>,
        (path, name): (&TreePath, &Name),
        old: &Found,
    ) -> FsResult<Option<BaseStat>> {
        let now = dir.stat(name)?;
        let is_same = match (old, &now) {
            (Found::Nothing(_), None) => true,
            (Found::Nothing(_), Some(_)) | (_, None) => false,
            (old, Some(now)) => self.is_same(old, now),
        };
        if is_same { Ok(now) } else { Err(FsError::Drift(path.clone())) }
    }

    /// Whether a node of the base is the one that was found, with the same content. Its change time may be another: by the names
    /// that an apply gives it, and takes from it.
    fn is_same(&self, old: &Found, now: &BaseStat) -> bool {
        let Found::Base(_, _, LowerNode::Base(old)) = old else { return false };
        let same_content = old.kind == FileKind::Dir
            || self.changed.contains(&now.ino)
            || (old.size, old.mtime) == (now.size, now.mtime);
        self.is_same_node(old, now) && same_content
    }

    fn is_same_node(&self, old: &BaseStat, now: &BaseStat) -> bool {
        (old.ino == now.ino || !self.has_stable_inodes) && old.kind == now.kind
    }
}

/// The inode flags of the file that a plan found at a name; none if it is no file of the base.
fn flags_of(dir: &WriteDir<'_>, name: &Name, planned: &Found) -> FsResult<Option<u32>> {
    match planned {
        Found::Base(_, _, LowerNode::Base(stat)) if stat.kind == FileKind::File => {
            found(dir.flags(name))
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

/// Whether a failure is about the path, and not about a disk that may be better the next time, or a right that may be given.
pub(in crate::timeline) fn is_lasting(error: &FsError) -> bool {
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
