//! Operations on names: lookup, create, link, unlink, rename.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::ops::acl;
use crate::fs::{Caller, Core, Entry, Found, Fs, Move, Need, Refused, Target};
use crate::store::edits_log::How;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Meta, Node};
use crate::types::{FileKind, Ino, Name, NodeId, TYPE_BITS, TreePath};

/// The largest number of links of a file, as on ext4.
pub(in crate::fs) const LINK_MAX: u32 = 65_000;
const SETGID: u32 = 0o2000;

/// What a rename does about a name that exists (rename(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// It is replaced.
    Replace,
    /// It is an error: RENAME_NOREPLACE.
    NoReplace,
    /// The two change places: RENAME_EXCHANGE.
    Exchange,
}

/// What a new node is to be.
struct Newborn {
    mode: u32,
    rdev: u64,
    body: Body,
    umask: u32,
}

/// A name in a directory, with what it stands for.
struct Place {
    dir: Ino,
    lower: Option<TreePath>,
    name: Name,
    found: Found,
}

impl Fs {
    /// Finds a name in a directory and hands its node out.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, or what the base answers.
    pub fn lookup(&self, dir: NodeId, name: &Name) -> FsResult<Entry> {
        if let Some(entry) = self.enter_past(dir, name)? {
            return Ok(entry);
        }
        let mut core = self.core();
        core.coherence.name_looked_up(dir, name);
        let place = core.place(dir, name)?;
        core.note_alias(place.dir, name, &place.found);
        core.hand_out(dir, place.found)
    }

    /// Makes a file, fifo, socket or device (mknod(2)); `mode` has the type bits.
    ///
    /// # Errors
    /// EEXIST, ENOENT for a directory that is gone, or what the store answers.
    pub fn mknod(
        &self,
        dir: NodeId,
        name: &Name,
        mode: u32,
        rdev: u64,
        umask: u32,
        who: Caller,
    ) -> FsResult<Entry> {
        self.with_room(Need::More, || self.try_mknod(dir, name, mode, rdev, umask, who))
    }

    fn try_mknod(
        &self,
        dir: NodeId,
        name: &Name,
        mode: u32,
        rdev: u64,
        umask: u32,
        who: Caller,
    ) -> FsResult<Entry> {
        let mode = if mode & TYPE_BITS == 0 { mode | FileKind::File.type_bits() } else { mode };
        let body = match FileKind::from_mode(mode) {
            Some(FileKind::File) => Body::File { size: 0, origin: None },
            Some(FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block) => {
                Body::Special
            }
            Some(FileKind::Dir | FileKind::Symlink) | None => return Err(FsError::Invalid),
        };
        self.core().create(&self.store, dir, name, Newborn { mode, rdev, body, umask }, who)
    }

    /// Makes a directory; in the directory of the checkpoints, a checkpoint: from a thread that serves no request.
    ///
    /// # Errors
    /// As [`Fs::mknod`].
    pub fn mkdir(
        &self,
        dir: NodeId,
        name: &Name,
        mode: u32,
        umask: u32,
        who: Caller,
    ) -> FsResult<Entry> {
        if dir == NodeId::CHECKPOINTS {
            return self.make_checkpoint(name);
        }
        self.with_room(Need::More, || self.try_mkdir(dir, name, mode, umask, who))
    }

    fn try_mkdir(
        &self,
        dir: NodeId,
        name: &Name,
        mode: u32,
        umask: u32,
        who: Caller,
    ) -> FsResult<Entry> {
        let mode = (mode & !TYPE_BITS) | FileKind::Dir.type_bits();
        let newborn = Newborn { mode, rdev: 0, body: Body::Dir { base: None }, umask };
        self.core().create(&self.store, dir, name, newborn, who)
    }

    /// Makes a symbolic link. Any text is allowed; following it is another matter (see [`Fs::readlink`]).
    ///
    /// # Errors
    /// As [`Fs::mknod`]; ENAMETOOLONG for a text of more than 4095 bytes.
    pub fn symlink(&self, dir: NodeId, name: &Name, target: &[u8], who: Caller) -> FsResult<Entry> {
        self.with_room(Need::More, || self.try_symlink(dir, name, target, who))
    }

    fn try_symlink(&self, dir: NodeId, name: &Name, target: &[u8], who: Caller) -> FsResult<Entry> {
        if target.is_empty() || target.len() > 4095 {
            return Err(if target.is_empty() { FsError::NotFound } else { FsError::NameTooLong });
        }
        let body = Body::Symlink { target: target.to_vec() };
        let mode = FileKind::Symlink.type_bits() | 0o777;
        self.core().create(&self.store, dir, name, Newborn { mode, rdev: 0, body, umask: 0 }, who)
    }

    /// Gives a node another name (link(2)).
    ///
    /// # Errors
    /// EPERM for a directory, ENOENT for a node that is gone, EEXIST, EMLINK, or what the store answers.
    pub fn link(&self, id: NodeId, dir: NodeId, name: &Name) -> FsResult<Entry> {
        self.with_room(Need::More, || self.try_link(id, dir, name))
    }

    fn try_link(&self, id: NodeId, dir: NodeId, name: &Name) -> FsResult<Entry> {
        let mut core = self.core();
        let place = core.place(dir, name)?;
        let Found::Nothing(hides) = place.found else { return Err(FsError::Exists) };
        let target = core.target(id)?;
        if core.record_of(&target)?.kind() == FileKind::Dir {
            return Err(FsError::NotPermitted);
        }
        let ino = core.copy_up(id)?;
        let parent = dir;
        let (dir, _) = core.copy_up_dir(dir)?;
        let mut meta = core.meta(ino)?;
        if meta.nlink >= LINK_MAX {
            return Err(FsError::TooManyLinks);
        }
        meta.nlink += 1;
        meta.ctime = clock::now();
        let name = name.clone();
        let dentry =
            Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, hides: hides.clone() }) };
        let edits = vec![Edit::Meta { ino, meta }, dentry, core.touch_dir(dir, 0)?];
        core.commit(edits)?;
        core.hand_out(parent, Found::Upper(ino, hides))
    }

    /// Removes a name that is not a directory's.
    ///
    /// # Errors
    /// ENOENT, EISDIR, or what the store answers.
    pub fn unlink(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        self.with_room(Need::Less, || self.try_unlink(dir, name))
    }

    fn try_unlink(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        let mut core = self.core();
        let place = core.place(dir, name)?;
        if core.kind_of(&place.found)? == FileKind::Dir {
            return Err(FsError::IsADirectory);
        }
        let (dir, _) = core.copy_up_dir(dir)?;
        core.before_loss((place.dir, place.lower.as_ref()), name, &place.found, How::Removed);
        let mut edits = core.take_name_off(&place)?;
        edits.push(Edit::Dentry { dir, name: name.clone(), to: core.what_remains(&place.found) });
        edits.push(core.touch_dir(dir, 0)?);
        core.commit_after_orphaning(edits, &place.found)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// ENOENT, ENOTDIR, ENOTEMPTY, or what the store answers.
    pub fn rmdir(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        // Not "read-only", because checkpoints can be made there: giving one up is for `jailfs drop`.
        if dir == NodeId::CHECKPOINTS {
            return Err(FsError::NotPermitted);
        }
        self.with_room(Need::Less, || self.try_rmdir(dir, name))
    }

    fn try_rmdir(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        let parent = dir;
        let mut core = self.core();
        let place = core.place(dir, name)?;
        if core.kind_of(&place.found)? != FileKind::Dir {
            return Err(FsError::NotADirectory);
        }
        core.check_empty(&place.found)?;
        let (dir, _) = core.copy_up_dir(dir)?;
        let mut edits = core.take_name_off(&place)?;
        edits.insert(
            0,
            Edit::Dentry { dir, name: name.clone(), to: core.what_remains(&place.found) },
        );
        edits.push(core.touch_dir(dir, -1)?);
        let removed = place.found.ino().and_then(|ino| core.held.id_of(ino));
        core.commit_after_orphaning(edits, &place.found)?;
        if let Some(removed) = removed {
            core.links.dir_removed(removed, parent);
        }
        Ok(())
    }

    /// Moves a name (renameat2(2)). A directory moves as one name, whatever is below it. `pid` is who asks.
    ///
    /// # Errors
    /// As rename(2); EXDEV for a directory whose links would lead out from the new place, which is noted for `status`.
    pub fn rename(
        &self,
        from_dir: NodeId,
        from: &Name,
        to_dir: NodeId,
        to: &Name,
        mode: RenameMode,
        pid: u32,
    ) -> FsResult<()> {
        self.with_room(Need::Less, || self.try_rename(from_dir, from, to_dir, to, mode, pid))
    }

    fn try_rename(
        &self,
        from_dir: NodeId,
        from: &Name,
        to_dir: NodeId,
        to: &Name,
        mode: RenameMode,
        pid: u32,
    ) -> FsResult<()> {
        let mut core = self.core();
        core.need_record(&self.store)?;
        if from_dir != to_dir {
            // The kernel lets only one such rename at a time come to us: it is through with the one before.
            core.links.finish_moves();
        }
        core.coherence.check_name_is_current(from_dir, from)?;
        if mode == RenameMode::Exchange {
            core.coherence.check_name_is_current(to_dir, to)?;
        }
        let source = core.place(from_dir, from)?;
        let target = core.place(to_dir, to)?;
        let renamed = core.rename((from_dir, &source), (to_dir, &target), mode);
        if renamed == Err(FsError::LeavesJail) {
            let path = |place: &Place| core.dir_path(place.dir, place.lower.as_ref());
            let (path, to) = (path(&source)?.join(from), path(&target)?.join(to));
            drop(core);
            self.refuse(path, Refused::Rename(to), pid);
        }
        renamed
    }
}

impl Core {
    fn place(&self, dir: NodeId, name: &Name) -> FsResult<Place> {
        if dir == NodeId::ROOT && self.snapdir_name.as_ref() == Some(name) {
            return Err(FsError::ReadOnly);
        }
        let (at, base) = (self.place_in_base(dir).cloned(), Arc::clone(self.lower.base()));
        let near = at.as_ref().map(|path| base.lookup_in(path));
        let (dir, lower, _) = self.live_dir(dir, near.as_ref())?;
        self.check_dir(lower.as_ref())?;
        let found = self.find_in(dir, lower.as_ref(), name, near.as_ref())?;
        Ok(Place { dir, lower, name: name.clone(), found })
    }

    fn rename(
        &mut self,
        (from_dir, source): (NodeId, &Place),
        (to_dir, target): (NodeId, &Place),
        mode: RenameMode,
    ) -> FsResult<()> {
        let Some(moved) = source.found.ino() else { return Err(FsError::NotFound) };
        match (mode, &target.found) {
            (RenameMode::NoReplace, Found::Upper(..) | Found::Base(..)) => {
                return Err(FsError::Exists);
            }
            (RenameMode::Exchange, Found::Nothing(_)) => return Err(FsError::NotFound),
            _ => {}
        }
        if Some(moved) == target.found.ino() {
            return Ok(());
        }
        let mut moves = vec![self.check_move((from_dir, source), (to_dir, target))?];
        let lost = target.found.ino();
        let mut lost_dir = None;
        if mode == RenameMode::Exchange {
            moves.push(self.check_move((to_dir, target), (from_dir, source))?);
            self.exchange(from_dir, to_dir, source, target)?;
        } else {
            lost_dir = lost.and_then(|ino| self.held.id_of(ino));
            self.replace(from_dir, to_dir, source, target)?;
        }
        self.links.add_moves(moves.into_iter().flatten());
        if let Some(lost) = lost_dir {
            self.links.dir_removed(lost, to_dir);
        }
        let came = lost.filter(|_| mode == RenameMode::Exchange);
        for (ino, dir) in [(Some(moved), to_dir), (came, from_dir)] {
            if let Some((ino, kind)) = ino.and_then(|ino| Some((ino, self.tree.node(ino)?.kind())))
            {
                self.note_advertised_in(dir, ino, kind);
            }
        }
        Ok(())
    }

    /// Remembers a name by which the tree does not know a file with several links.
    pub(in crate::fs) fn note_alias(&mut self, dir: Ino, name: &Name, found: &Found) {
        let (ino, links) = match found {
            Found::Upper(ino, Some(_)) if self.tree.dentry(dir, name).is_none() => (*ino, 2),
            Found::Base(ino, _, node) if node.kind() != FileKind::Dir => (*ino, node.nlink()),
            _ => return,
        };
        if links > 1 {
            self.coherence.add_aliases(ino, [(dir, name.clone())]);
        }
    }

    fn kind_of(&self, found: &Found) -> FsResult<FileKind> {
        match found {
            Found::Upper(ino, _) => self.tree.node(*ino).map(|n| n.kind()).ok_or(FsError::NotFound),
            Found::Base(_, _, node) => Ok(node.kind()),
            Found::Nothing(_) => Err(FsError::NotFound),
        }
    }

    fn create(
        &mut self,
        store: &Arc<crate::store::Store>,
        dir: NodeId,
        name: &Name,
        newborn: Newborn,
        who: Caller,
    ) -> FsResult<Entry> {
        let parent = dir;
        let place = self.place(dir, name)?;
        let Found::Nothing(hides) = place.found else { return Err(FsError::Exists) };
        self.need_node(store)?;
        let (dir, _) = self.copy_up_dir(dir)?;
        let is_dir = matches!(newborn.body, Body::Dir { .. });
        let above = self.tree.node(dir).cloned().ok_or(FsError::NotFound)?;
        let ino = store.identities().lock().fresh()?;
        let now = clock::now();
        let (mut mode, xattrs) = match newborn.body {
            Body::Symlink { .. } => (newborn.mode, None),
            _ => acl::inherit(&above.xattrs, newborn.mode, newborn.umask, is_dir)?,
        };
        let mut gid = who.gid;
        if above.meta.mode & SETGID != 0 {
            gid = above.meta.gid;
            if is_dir {
                mode |= SETGID;
            }
        }
        let nlink = if is_dir { 2 } else { 1 };
        let meta = Meta {
            mode,
            uid: who.uid,
            gid,
            nlink,
            rdev: newborn.rdev,
            atime: now,
            mtime: now,
            ctime: now,
        };
        let node = Node { meta, xattrs, body: newborn.body };
        let edits = vec![
            Edit::Put { ino, node: Box::new(node) },
            Edit::Dentry {
                dir,
                name: name.clone(),
                to: Some(Dentry::Child { ino, hides: hides.clone() }),
            },
            self.touch_dir(dir, i32::from(is_dir))?,
        ];
        let is_file = FileKind::from_mode(mode) == Some(FileKind::File);
        self.commit(edits)?;
        if is_file {
            self.file_made(ino, (dir, place.lower.as_ref()), name);
        }
        self.hand_out(parent, Found::Upper(ino, hides))
    }

    /// The edits that take the name of a file away without a kernel that asks for it.
    pub(in crate::fs) fn take_away(
        &mut self,
        path: &TreePath,
        found: &Found,
    ) -> FsResult<Vec<Edit>> {
        let (above, name) = path.split().ok_or(FsError::IsADirectory)?;
        let (dir, lower) = match self.resolve(&above)? {
            Found::Base(ino, base, node) => (self.copy_up_base(ino, &base, &node)?, Some(base)),
            Found::Upper(ino, _) => (ino, self.lower_path(ino)?),
            Found::Nothing(_) => return Err(FsError::NotFound),
        };
        let place = Place { dir, lower, name, found: found.clone() };
        let mut edits = self.take_name_off(&place)?;
        edits.push(Edit::Dentry { dir, name: place.name.clone(), to: self.what_remains(found) });
        edits.push(self.touch_dir(dir, 0)?);
        Ok(edits)
    }

    /// What a directory says of a name once the node behind it lost it.
    fn what_remains(&self, found: &Found) -> Option<Dentry> {
        match found {
            Found::Upper(_, hides) | Found::Nothing(hides) => hides.clone().map(Dentry::Whiteout),
            Found::Base(ino, _, node) => Some(Dentry::Whiteout(node.fingerprint(*ino))),
        }
    }

    /// The edits for a node that loses the name at `place`; the name itself is the caller's. Keeps an orphan of a node
    /// that is held and goes altogether.
    fn take_name_off(&mut self, place: &Place) -> FsResult<Vec<Edit>> {
        // A base file with more links must keep count of them in the tree.
        let found = match &place.found {
            Found::Base(_, _, node) if node.kind() != FileKind::Dir && node.nlink() > 1 => {
                let (ino, hides) = self.copy_up_found(place.dir, &place.name, &place.found)?;
                Found::Upper(ino, hides)
            }
            other => other.clone(),
        };
        let Found::Upper(ino, _) = found else { return Ok(Vec::new()) };
        let node = self.tree.node(ino).cloned().ok_or(FsError::NotFound)?;
        let mut meta = node.meta;
        if node.kind() == FileKind::Dir || meta.nlink <= 1 {
            return Ok(vec![Edit::Remove { ino }]);
        }
        meta.nlink -= 1;
        meta.ctime = clock::now();
        Ok(vec![Edit::Meta { ino, meta }])
    }

    /// The edit of a directory in which a name was added or removed; `links` is the change of its
    /// number of subdirectories.
    pub(in crate::fs) fn touch_dir(&self, dir: Ino, links: i32) -> FsResult<Edit> {
        let mut meta = self.meta(dir)?;
        meta.mtime = clock::now();
        meta.ctime = meta.mtime;
        // A filesystem that does not count subdirectories shows 1 for every directory.
        if meta.nlink >= 2 {
            meta.nlink = meta.nlink.saturating_add_signed(links).max(2);
        }
        // As on ext4: from here on it is not counted any more.
        if meta.nlink > LINK_MAX {
            meta.nlink = 1;
        }
        Ok(Edit::Meta { ino: dir, meta })
    }

    /// Commits edits that may take the node of `found` out of the tree, and keeps what its holders need.
    fn commit_after_orphaning(&mut self, edits: Vec<Edit>, found: &Found) -> FsResult<()> {
        let gone = match found {
            Found::Upper(ino, _) => edits
                .iter()
                .any(|e| matches!(e, Edit::Remove { ino: gone } if gone == ino))
                .then_some((*ino, Target::Upper(*ino))),
            Found::Base(ino, path, node) => {
                let last = node.kind() == FileKind::Dir || node.nlink() <= 1;
                last.then(|| (*ino, Target::Base(*ino, path.clone(), node.clone())))
            }
            Found::Nothing(_) => None,
        };
        // What is left must be taken while it is there, and kept only if the journal took the edits.
        let Some((ino, target)) = gone else { return self.commit(edits) };
        let Some(id) = self.held.id_of(ino) else { return self.commit(edits) };
        let kept = self.record_and_extents(&target)?;
        self.commit(edits)?;
        if let Target::Base(_, _, node) = &target {
            self.coherence.note_recorded(&mut self.held, id, node);
        }
        self.held.make_orphan(id, kept, self.state.lower.epoch(), |meta| {
            meta.nlink = 0;
            meta.ctime = clock::now();
        })
    }

    fn check_empty(&self, found: &Found) -> FsResult<()> {
        // As for one that may not be read.
        if self.is_hidden(found) {
            return Err(FsError::AccessDenied);
        }
        let names = match found {
            Found::Upper(ino, _) => self.merged_names(*ino, self.lower_path(*ino)?.as_ref())?,
            Found::Base(ino, path, _) => self.merged_names(*ino, Some(path))?,
            Found::Nothing(_) => return Err(FsError::NotFound),
        };
        if names.is_empty() { Ok(()) } else { Err(FsError::NotEmpty) }
    }

    /// Refuses a move that rename(2) does not allow, or that would let links below lead out. Gives that of a directory into
    /// another one.
    fn check_move(
        &mut self,
        (from_dir, source): (NodeId, &Place),
        (to_dir, target): (NodeId, &Place),
    ) -> FsResult<Option<Move>> {
        let Some(moved) = source.found.ino() else { return Err(FsError::NotFound) };
        if self.kind_of(&source.found)? != FileKind::Dir {
            return Ok(None);
        }
        let mut at = (target.dir, target.lower.clone());
        loop {
            if at.0 == moved {
                return Err(FsError::Invalid);
            }
            match self.parent_of(at.0, at.1.as_ref())? {
                Some(up) => at = up,
                None => break,
            }
        }
        self.begin_move(moved, from_dir, (to_dir, &target.name))
    }

    fn replace(
        &mut self,
        from_dir: NodeId,
        to_dir: NodeId,
        source: &Place,
        target: &Place,
    ) -> FsResult<()> {
        let moves_dir = self.kind_of(&source.found)? == FileKind::Dir;
        let mut lost_dir = false;
        match &target.found {
            Found::Nothing(_) => {}
            found => {
                lost_dir = self.kind_of(found)? == FileKind::Dir;
                match (moves_dir, lost_dir) {
                    (true, false) => return Err(FsError::NotADirectory),
                    (false, true) => return Err(FsError::IsADirectory),
                    (true, true) => self.check_empty(found)?,
                    (false, false) => {}
                }
            }
        }
        let (from, _) = self.copy_up_dir(from_dir)?;
        let (to, _) = self.copy_up_dir(to_dir)?;
        let (ino, hides) = self.copy_up_found(from, &source.name, &source.found)?;
        let hidden = match &target.found {
            Found::Upper(_, hides) | Found::Nothing(hides) => hides.clone(),
            Found::Base(ino, _, node) => Some(node.fingerprint(*ino)),
        };
        let after = Found::Upper(ino, hides);
        let mut edits = Vec::with_capacity(8);
        edits.push(Edit::Dentry {
            dir: from,
            name: source.name.clone(),
            to: self.what_remains(&after),
        });
        let dentry = Some(Dentry::Child { ino, hides: hidden });
        let lost = if matches!(target.found, Found::Nothing(_)) {
            Vec::new()
        } else {
            self.take_name_off(target)?
        };
        edits.push(Edit::Dentry { dir: to, name: target.name.clone(), to: dentry });
        edits.extend(lost);
        let left = -i32::from(moves_dir);
        let come = i32::from(moves_dir) - i32::from(lost_dir);
        if from == to {
            edits.push(self.touch_dir(from, left + come)?);
        } else {
            edits.push(self.touch_dir(from, left)?);
            edits.push(self.touch_dir(to, come)?);
        }
        let mut meta = self.meta(ino)?;
        meta.ctime = clock::now();
        edits.push(Edit::Meta { ino, meta });
        if moves_dir {
            let paths = self.paths_of_move(source, target);
            self.commit_after_orphaning(edits, &target.found)?;
            if let Some((from, to)) = paths {
                self.dir_moved(from, to);
            }
            return Ok(());
        }
        if self.keeps_versions()
            && let Some((from, to)) = self.paths_of_move(source, target)
        {
            self.before_loss(
                (target.dir, target.lower.as_ref()),
                &target.name,
                &target.found,
                How::Replaced,
            );
            let is_over = !matches!(target.found, Found::Nothing(_));
            self.before_move(&from, &source.found, &to, is_over);
        }
        self.commit_after_orphaning(edits, &target.found)
    }

    /// The paths of a rename, if versions are to follow it.
    fn paths_of_move(&self, source: &Place, target: &Place) -> Option<(TreePath, TreePath)> {
        let path = |place: &Place| {
            Some(self.dir_path(place.dir, place.lower.as_ref()).ok()?.join(&place.name))
        };
        self.keeps_versions().then(|| Some((path(source)?, path(target)?))).flatten()
    }

    fn exchange(
        &mut self,
        from_dir: NodeId,
        to_dir: NodeId,
        source: &Place,
        target: &Place,
    ) -> FsResult<()> {
        let (from, _) = self.copy_up_dir(from_dir)?;
        let (to, _) = self.copy_up_dir(to_dir)?;
        let (a, a_hides) = self.copy_up_found(from, &source.name, &source.found)?;
        let (b, b_hides) = self.copy_up_found(to, &target.name, &target.found)?;
        let mut edits = vec![
            Edit::Dentry {
                dir: from,
                name: source.name.clone(),
                to: Some(Dentry::Child { ino: b, hides: a_hides }),
            },
            Edit::Dentry {
                dir: to,
                name: target.name.clone(),
                to: Some(Dentry::Child { ino: a, hides: b_hides }),
            },
        ];
        let is_dir =
            |core: &Core, ino| core.tree.node(ino).is_some_and(|n| n.kind() == FileKind::Dir);
        let moved = i32::from(is_dir(self, b)) - i32::from(is_dir(self, a));
        if from == to {
            edits.push(self.touch_dir(from, 0)?);
        } else {
            edits.push(self.touch_dir(from, moved)?);
            edits.push(self.touch_dir(to, -moved)?);
        }
        for ino in [a, b] {
            // A directory of the two may be the parent whose names were just counted: take its attributes from there.
            let counted = edits.iter_mut().find_map(|edit| match edit {
                Edit::Meta { ino: found, meta } if *found == ino => Some(meta),
                _ => None,
            });
            match counted {
                Some(meta) => meta.ctime = clock::now(),
                None => {
                    let mut meta = self.meta(ino)?;
                    meta.ctime = clock::now();
                    edits.push(Edit::Meta { ino, meta });
                }
            }
        }
        if is_dir(self, a) || is_dir(self, b) {
            let paths = self.paths_of_move(source, target);
            self.commit(edits)?;
            if let Some((a, b)) = paths {
                self.dirs_exchanged(a, b);
            }
            return Ok(());
        }
        for place in [source, target] {
            self.before_loss(
                (place.dir, place.lower.as_ref()),
                &place.name,
                &place.found,
                How::Replaced,
            );
        }
        self.commit(edits)
    }
}
