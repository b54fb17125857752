//! Rename (renameat2(2)). A directory moves as one name, whatever is below it.

use crate::error::{FsError, FsResult};
use crate::fs::kernel::nodes::Held;
use crate::fs::merged::answers;
use crate::fs::ops::slot::Slot;
use crate::fs::writing::Writing;
use crate::fs::{Found, Fs, Move, Need, Refused};
use crate::store::edits_log::How;
use crate::sys::clock;
use crate::tree::{Dentry, Edit};
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

/// The treatment of a new name that exists (rename(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// Replaces the node there.
    Replace,
    /// Fails: RENAME_NOREPLACE.
    NoReplace,
    /// Exchanges the two nodes: RENAME_EXCHANGE.
    Exchange,
}

impl Fs {
    /// Renames a name; `pid` is the caller, for the log.
    ///
    /// # Errors
    /// As rename(2); EXDEV for a directory whose symlinks would lead out of the jail from the new
    /// place, which is recorded for `status`.
    pub fn rename(
        &self,
        from_dir: NodeId,
        from: &Name,
        to_dir: NodeId,
        to: &Name,
        mode: RenameMode,
        pid: u32,
    ) -> FsResult<()> {
        let names = [(from_dir, from), (to_dir, to)];
        self.with_room(Need::Less, || {
            let renamed = self.change_names(names, |core| {
                core.need_record()?;
                core.try_rename(names, mode)
            });
            if let Renamed::LeavesJail(path, to) = renamed? {
                self.refuse(path, Refused::Rename(to), pid);
                return Err(FsError::LeavesJail);
            }
            Ok(())
        })
    }
}

/// The result of a rename.
enum Renamed {
    Done,
    /// Symlinks in the directory of the first path would lead out of the jail at the second.
    LeavesJail(TreePath, TreePath),
}

impl Writing<'_> {
    fn try_rename(
        &mut self,
        [(from_dir, from), (to_dir, to)]: [(NodeId, &Name); 2],
        mode: RenameMode,
    ) -> FsResult<Renamed> {
        if from_dir != to_dir {
            // The kernel sends one rename between directories at a time, so it has completed the
            // one before.
            self.links.finish_moves();
        }
        self.coherence.check_name_is_current(from_dir, from)?;
        if mode == RenameMode::Exchange {
            self.coherence.check_name_is_current(to_dir, to)?;
        }
        let (source, target) = (self.slot(from_dir, from)?, self.slot(to_dir, to)?);
        match self.rename(&source, &target, mode) {
            Ok(()) => Ok(Renamed::Done),
            Err(FsError::LeavesJail) => {
                Ok(Renamed::LeavesJail(self.slot_path(&source)?, self.slot_path(&target)?))
            }
            Err(error) => Err(error),
        }
    }

    fn rename(&mut self, source: &Slot, target: &Slot, mode: RenameMode) -> FsResult<()> {
        let Some(moved) = source.found.ino() else { return Err(FsError::NotFound) };
        match (mode, &target.found) {
            (RenameMode::NoReplace, Found::Upper(..) | Found::Base(..)) => {
                return Err(FsError::Exists);
            }
            (RenameMode::Exchange, Found::Nothing(_)) => return Err(FsError::NotFound),
            _ => {}
        }
        let replaced = target.found.ino();
        if Some(moved) == replaced {
            return Ok(());
        }
        let mut moves = vec![self.check_move(source, target)?];
        if mode == RenameMode::Exchange {
            moves.push(self.check_move(target, source)?);
        }
        let moves: Vec<Move> = moves.into_iter().flatten().collect();
        if moves.is_empty() {
            return self.carry_out(source, target, mode, moves);
        }
        // Between the check of a move and the move, no text is served that could lead out from the
        // new place.
        self.links.set_moving(true);
        let result = self.carry_out(source, target, mode, moves);
        self.links.set_moving(false);
        result
    }

    /// Makes a rename that was checked.
    fn carry_out(
        &mut self,
        source: &Slot,
        target: &Slot,
        mode: RenameMode,
        moves: Vec<Move>,
    ) -> FsResult<()> {
        let (moved, replaced) = (source.found.ino(), target.found.ino());
        if mode == RenameMode::Exchange {
            self.exchange(source, target, &moves)?;
        } else {
            if let Some(removed) = self.replace(source, target, &moves)? {
                self.links.dir_removed(removed, target.parent);
            }
        }
        self.links.add_moves(moves);
        if let Some(moved) = moved {
            self.note_renamed(moved, target.parent);
        }
        if let Some(exchanged) = replaced.filter(|_| mode == RenameMode::Exchange) {
            self.note_renamed(exchanged, source.parent);
        }
        Ok(())
    }

    /// Notes that the kernel sees a node in another directory.
    fn note_renamed(&mut self, ino: Ino, dir: NodeId) {
        if let Some(kind) = self.tree.node(ino).map(|node| node.kind()) {
            self.note_advertised_in(dir, ino, kind);
        }
    }

    /// Refuses to move a directory below itself, or where its symlinks would lead out of the jail.
    /// Returns the move of a directory into another one.
    fn check_move(&mut self, source: &Slot, target: &Slot) -> FsResult<Option<Move>> {
        let Some(moved) = source.found.ino() else { return Err(FsError::NotFound) };
        if self.kind_in(source)? != FileKind::Dir {
            return Ok(None);
        }
        let mut at = (target.dir, target.lower.clone());
        loop {
            if at.0 == moved {
                return Err(FsError::Invalid);
            }
            match self.parent_of(at.0, at.1.as_ref())? {
                Some(parent) => at = parent,
                None => break,
            }
        }
        self.begin_move(moved, source.parent, (target.parent, &target.name))
    }

    /// Moves a node to another name. Returns the id of the orphan that was there.
    fn replace(
        &mut self,
        source: &Slot,
        target: &Slot,
        moves: &[Move],
    ) -> FsResult<Option<NodeId>> {
        let moves_dir = self.kind_in(source)? == FileKind::Dir;
        let removes_dir = self.check_replace(moves_dir, target)?;
        self.copy_up_parent(source)?;
        self.copy_up_parent(target)?;
        let (ino, hides) = self.copy_up_found(source.dir, &source.name, &source.found)?;
        self.check_slots_are_seen([source, target], &[(ino, source.parent)], moves)?;
        let mut edits = Vec::with_capacity(8);
        let to = hides.map(Dentry::Whiteout);
        edits.push(Edit::Dentry { dir: source.dir, name: source.name.clone(), to });
        let loss = self.stage_loss_of_name(target.dir, &target.name, &target.found)?;
        let to = Some(Dentry::Child { ino, hides: target.found.hides() });
        edits.push(Edit::Dentry { dir: target.dir, name: target.name.clone(), to });
        edits.extend(loss);
        let arrives = i32::from(moves_dir) - i32::from(removes_dir);
        self.touch_dirs(&mut edits, (source.dir, -i32::from(moves_dir)), (target.dir, arrives))?;
        let mut meta = self.meta(ino)?;
        meta.ctime = clock::now();
        edits.push(Edit::Meta { ino, meta });

        let paths = self.paths_for_history(source, target)?;
        let orphan = self.orphan_of(&edits, &target.found)?;
        if !moves_dir && let Some((from, to)) = &paths {
            self.before_loss(target.dir(), &target.name, &target.found, How::Replaced)?;
            let is_over = target.found.ino().is_some();
            self.before_move(from, &source.found, to, is_over)?;
        }
        let removed = self.commit_with_orphan(edits, orphan)?;
        if moves_dir && let Some((from, to)) = paths {
            self.dir_moved(from, to);
        }
        Ok(removed)
    }

    /// Checks that the kernel still sees the directories of two slots, and each moved directory
    /// where it was found and as its move was checked. The tree has all of them by now, so no
    /// lookup cuts one off after this check.
    ///
    /// # Errors
    /// ESTALE, and the kernel walks the paths again.
    fn check_slots_are_seen(
        &self,
        slots: [&Slot; 2],
        moved: &[(Ino, NodeId)],
        moves: &[Move],
    ) -> FsResult<()> {
        let is_seen = |slot: &Slot| self.held.id_of(slot.dir) == Some(slot.parent);
        let is_live = |id: NodeId| self.held.get(id).is_some_and(Held::is_live);
        if !slots.into_iter().all(is_seen) || !moves.iter().all(|checked| is_live(checked.dir())) {
            return Err(FsError::Stale);
        }
        let is_dir = |ino| self.tree.node(ino).is_some_and(|node| node.kind() == FileKind::Dir);
        let mut dirs = moved.iter().filter(|(ino, _)| is_dir(*ino));
        dirs.try_for_each(|(ino, parent)| self.check_is_seen_in(*parent, *ino))
    }

    /// Checks that a directory replaces an empty directory, and any other node no directory.
    /// Returns whether a directory is replaced.
    fn check_replace(&self, moves_dir: bool, target: &Slot) -> FsResult<bool> {
        if target.found.ino().is_none() {
            return Ok(false);
        }
        let removes_dir = self.kind_in(target)? == FileKind::Dir;
        match (moves_dir, removes_dir) {
            (true, false) => Err(FsError::NotADirectory),
            (false, true) => Err(FsError::IsADirectory),
            (true, true) => self.check_empty(&target.found).map(|()| true),
            (false, false) => Ok(false),
        }
    }

    fn exchange(&mut self, source: &Slot, target: &Slot, moves: &[Move]) -> FsResult<()> {
        self.copy_up_parent(source)?;
        self.copy_up_parent(target)?;
        let (a, a_hides) = self.copy_up_found(source.dir, &source.name, &source.found)?;
        let (b, b_hides) = self.copy_up_found(target.dir, &target.name, &target.found)?;
        let moved = [(a, source.parent), (b, target.parent)];
        self.check_slots_are_seen([source, target], &moved, moves)?;
        let child = |slot: &Slot, ino, hides| Edit::Dentry {
            dir: slot.dir,
            name: slot.name.clone(),
            to: Some(Dentry::Child { ino, hides }),
        };
        let mut edits = vec![child(source, b, a_hides), child(target, a, b_hides)];
        let [a_is_dir, b_is_dir] =
            [a, b].map(|ino| self.tree.node(ino).is_some_and(|node| node.kind() == FileKind::Dir));
        let arrives = i32::from(b_is_dir) - i32::from(a_is_dir);
        self.touch_dirs(&mut edits, (source.dir, arrives), (target.dir, -arrives))?;
        for ino in [a, b] {
            // One of the two may be the parent of the other, and then has an edit already.
            let touched = edits.iter_mut().find_map(|edit| match edit {
                Edit::Meta { ino: touched, meta } if *touched == ino => Some(meta),
                _ => None,
            });
            match touched {
                Some(meta) => meta.ctime = clock::now(),
                None => {
                    let mut meta = self.meta(ino)?;
                    meta.ctime = clock::now();
                    edits.push(Edit::Meta { ino, meta });
                }
            }
        }
        if a_is_dir || b_is_dir {
            let paths = self.paths_for_history(source, target)?;
            self.commit(edits)?;
            if let Some((a, b)) = paths {
                self.dirs_exchanged(a, b);
            }
            return Ok(());
        }
        for slot in [source, target] {
            self.before_loss(slot.dir(), &slot.name, &slot.found, How::Replaced)?;
        }
        self.commit(edits)
    }

    /// Adds the edits for two directories whose names changed, and by how much their numbers of
    /// subdirectories did. The two may be one.
    fn touch_dirs(
        &self,
        edits: &mut Vec<Edit>,
        (from, from_links): (Ino, i32),
        (to, to_links): (Ino, i32),
    ) -> FsResult<()> {
        if from == to {
            edits.push(self.touch_dir(from, from_links + to_links)?);
        } else {
            edits.push(self.touch_dir(from, from_links)?);
            edits.push(self.touch_dir(to, to_links)?);
        }
        Ok(())
    }

    /// The old and the new path of a rename, if the edit history follows it.
    ///
    /// # Errors
    /// [`FsError::MustWait`].
    fn paths_for_history(
        &self,
        source: &Slot,
        target: &Slot,
    ) -> FsResult<Option<(TreePath, TreePath)>> {
        if !self.records_edits() {
            return Ok(None);
        }
        let from = answers::known(self.slot_path(source))?;
        let to = answers::known(self.slot_path(target))?;
        Ok(from.zip(to))
    }
}
