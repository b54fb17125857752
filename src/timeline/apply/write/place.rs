//! Places nodes in the base: new directories, staged files, links, and files rewritten in place.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{StateWriter, flags_of, xattr_list};
use crate::base::{BaseStat, WriteDir};
use crate::error::{FsError, FsResult};
use crate::fs::Found;
use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::fs::merged::lower::LowerNode;
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::file::Rename;
use crate::sys::flags;
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Node};
use crate::types::{Fingerprint, Ino, Name, TreePath};

/// The names that a file of the base has beside the one that is written.
#[derive(Default)]
struct FurtherNames {
    inside: Vec<TreePath>,
    /// Whether there are names outside of the base as well.
    is_linked_outside: bool,
}

impl<'a> StateWriter<'a> {
    /// The directory that holds a path, the name in it, and the name under which content is staged
    /// there.
    fn dir_to_stage_in(&self, path: &TreePath) -> FsResult<(WriteDir<'a>, Name, Name)> {
        let (dir, name) = path.split().ok_or(FsError::NotPermitted)?;
        Ok((self.writer.dir(&dir)?, name, self.stages.name_in(&dir)?))
    }

    /// Places the node of a change.
    pub(super) fn place(&mut self, change: &PathChange) -> FsResult<()> {
        // Resolved anew: what the plan found in the base, say below a directory that was renamed
        // since, may be removed from there, and is then in the pre-images.
        let new = self.to.resolve(&change.path)?;
        let ino = new.ino().ok_or(FsError::NotFound)?;
        let (record, _) = self.to.record(&new)?;
        self.outcome.inos.insert(change.path.clone(), ino);
        if let Body::Dir { .. } = &record.body {
            let (dir, name) = self.dir(&change.path)?;
            return dir.mkdir(&name, 0o700);
        }
        if let Some(first) = self.other_link(ino, &change.path)? {
            return self.link(ino, &first, &change.path, planned(change));
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

    /// A path of the base at which the same file stands already as it is to be.
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
            let (dir, _) = link.split().ok_or(FsError::NotFound)?;
            if unchanged && self.dir_if_there(&dir)?.is_some() {
                return Ok(Some(link.clone()));
            }
        }
        Ok(None)
    }

    /// Gives the file at `first` another name.
    ///
    /// # Errors
    /// [`FsError::Drift`] if another program put another file at either path.
    fn link(
        &mut self,
        ino: Ino,
        first: &TreePath,
        path: &TreePath,
        planned: &Found,
    ) -> FsResult<()> {
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
        self.rename_staged(&dir, &staged, (path, &name), planned, &stands)?;
        // A rename of one link of a file over another link does nothing (rename(2)), and the staged
        // name remains.
        if dir.stat(&staged)?.is_some() { dir.unlink(&staged) } else { Ok(()) }
    }

    /// The further names of the file that stands at `path`, of which `stat` is the metadata.
    fn further_names(&self, ino: Ino, path: &TreePath, stat: &BaseStat) -> FsResult<FurtherNames> {
        let mut inside = Vec::new();
        for (link, _) in self.linked.iter().filter(|(link, of)| **of == ino && *link != path) {
            let Some((above, name)) = link.split() else { continue };
            let dir = self.dir_if_there(&above)?;
            let there = dir.map(|dir| dir.stat(&name)).transpose()?.flatten();
            if there.is_some_and(|there| (there.dev, there.ino) == (stat.dev, stat.ino)) {
                inside.push(link.clone());
            }
        }
        let is_linked_outside = stat.nlink as usize > inside.len() + 1;
        Ok(FurtherNames { inside, is_linked_outside })
    }

    /// Places a regular file.
    ///
    /// A file with further names is rewritten in place, because a new file would separate them. If
    /// some of its names are outside of the base, it must not be written: then its names in the
    /// base become names of a new file.
    fn place_file(
        &mut self,
        dir: &WriteDir<'_>,
        (name, staged): (&Name, &Name),
        (change, new): (&PathChange, &Found),
        record: &Node,
    ) -> FsResult<()> {
        let ino = new.ino().ok_or(FsError::NotFound)?;
        let further = match (&change.old, dir.stat(name)?) {
            (Found::Base(old_ino, _, LowerNode::Base(_)), Some(now))
                if now.nlink > 1 && ino == *old_ino =>
            {
                self.further_names(ino, &change.path, &now)?
            }
            (Found::Base(..) | Found::Upper(..) | Found::Nothing(_), _) => FurtherNames::default(),
        };
        if !further.inside.is_empty() && !further.is_linked_outside {
            return self.rewrite_file(dir, name, (change, new), record);
        }
        let flags = flags_of(dir, name, planned(change))?;
        let file = dir.create_file(staged)?;
        if let Some(flags) = flags {
            // Before the content: some flags can only be given to an empty file.
            self.note_lost_flags(&change.path, flags::give(&file, flags));
        }
        self.copy_content(new, record.size(), &file)?;
        self.publish(dir, staged, name, (change, ino), record, Some(file))?;
        self.move_further_names(ino, &change.path, further.inside)
    }

    /// Writes the content of a file in place.
    fn rewrite_file(
        &mut self,
        dir: &WriteDir<'_>,
        name: &Name,
        (change, new): (&PathChange, &Found),
        record: &Node,
    ) -> FsResult<()> {
        let (path, ino) = (&change.path, new.ino().ok_or(FsError::NotFound)?);
        // Only the opened file is written, whatever another program puts at the name since.
        let (file, opened) = dir.open_to_rewrite(name)?;
        if !self.is_same(&change.old, &opened) {
            return Err(FsError::Drift(path.clone()));
        }
        // While it is written, the file is empty or has its new size, and has any times.
        let size = record.size();
        (self.claim)(path, Fingerprint { ctime: ANY_TIMES, size, ..opened.fingerprint() })?;
        if let Err(error) = self.check_planned(dir, (path, name), &change.old) {
            // Nothing was written, so a rollback must not touch the file: this claim fits no file.
            (self.claim)(path, Fingerprint { size: u64::MAX, ..opened.fingerprint() })?;
            return Err(error);
        }
        self.rewritten.insert(opened.ino);
        failpoint::hit(Failpoint::BaseWrite)?;
        file.set_len(0)?;
        self.copy_content(new, record.size(), &file)?;
        let stat = dir.set_file_attributes(file, &self.attributes(record, &xattr_list(record)))?;
        self.note_rounding(path, record, &stat);
        self.placed.insert(ino, (path.clone(), stat));
        (self.claim)(path, stat.fingerprint())
    }

    /// Makes the unchanged further names of a replaced file links of the new file at `path`. Names
    /// that change are placed with their own change.
    fn move_further_names(
        &mut self,
        ino: Ino,
        path: &TreePath,
        further: Vec<TreePath>,
    ) -> FsResult<()> {
        for link in further {
            if !self.changes.contains_key(&link) && self.to.resolve(&link)?.ino() == Some(ino) {
                let old = self.from.resolve(&link)?;
                let linked = self.link(ino, path, &link, &old);
                self.note_failure(&link, linked)?;
            }
        }
        Ok(())
    }

    /// Copies the data ranges of a file. The ranges between them, and ranges of zeros, become
    /// holes.
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

    /// Sets the attributes of a staged node and renames it over its target. For a regular file,
    /// `file` is the descriptor that was written, so that its name cannot be swapped.
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
        self.note_rounding(&change.path, record, &made);
        self.rename_staged(dir, staged, (&change.path, name), planned(change), &made)?;
        self.placed.insert(ino, (change.path.clone(), made));
        Ok(())
    }

    /// Renames a staged node over its target.
    ///
    /// # Errors
    /// [`FsError::Drift`] if the staged node is not the one that was `made`, or the target is not
    /// what the plan found.
    fn rename_staged(
        &mut self,
        dir: &WriteDir<'_>,
        staged: &Name,
        (path, name): (&TreePath, &Name),
        planned: &Found,
        made: &BaseStat,
    ) -> FsResult<()> {
        let drift = || FsError::Drift(path.clone());
        let stat = dir.stat(staged)?.ok_or_else(drift)?;
        if !self.is_same_node(made, &stat) || (made.size, made.mtime) != (stat.size, stat.mtime) {
            return Err(drift());
        }
        (self.claim)(path, stat.fingerprint())?;
        let how = match self.check_planned(dir, (path, name), planned)? {
            None => Rename::NoReplace,
            Some(_) => Rename::Replace,
        };
        match dir.rename(staged, dir, name, how) {
            // Some filesystems do not support RENAME_NOREPLACE.
            Err(FsError::Invalid) if how == Rename::NoReplace => {
                dir.rename(staged, dir, name, Rename::Replace)
            }
            Err(FsError::Exists) => Err(drift()),
            renamed => renamed,
        }
    }
}

/// The node that a change finds at its path when it is placed. A node of another kind was removed
/// before.
fn planned(change: &PathChange) -> &Found {
    if change.what == What::Type { &Found::Nothing(None) } else { &change.old }
}
