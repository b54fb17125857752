//! Links, as the mount serves them: the answer to READLINK is where the jail is.
//!
//! READLINK names a node and not the directory in which the kernel met it; a link may have several names, and may have been
//! moved since it was looked up. So every directory through which a link was handed out counts, until the kernel forgets
//! the link, and a text is served only if it stays inside from each of them. If one of them, in which the link has no name
//! any more, is too near to the root, the answer is ESTALE and the link gets another id: the kernel then walks the path
//! again, asks for every name, and whoever stands in the old place finds that there is no such link.
//!
//! Two things go on after the answer, and are followed in [`crate::jail::ClimbGuard`]: the kernel's walk of the text; and, when
//! a directory was moved, its own view of the tree, which is behind ours until it has taken our answer. Only one rename
//! from a directory into another can be under way at a time (the kernel holds `s_vfs_rename_mutex`). A link in a directory
//! that it moves can be walked from both places; where that makes a difference the answer waits until the kernel is
//! through.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{FsError, FsResult};
use crate::fs::kernel::nodes::Place;
use crate::fs::{Core, Found, Fs, State, Target};
use crate::jail::{Answer, Jail, NameTarget, Policy, Walk};
use crate::store::record::Body;
use crate::sys;
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

/// Refusals that are kept for `status`.
const REFUSALS: usize = 100;

/// What READLINK is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkReply {
    /// This text.
    Text(Vec<u8>),
    /// It depends on a move of a directory that the kernel has not taken in yet.
    Wait(Move),
}

/// A directory that moves into another one: the kernel may still see it where it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The directory into which it moves, which the kernel has locked until it is through.
    pub into: NodeId,
    /// Its name there.
    pub name: Name,
    dir: NodeId,
    /// How many levels it was below the root.
    depth: usize,
    number: u64,
}

/// A blocked way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The link, or the directory that was not moved.
    pub path: TreePath,
    /// What it was.
    pub what: Refused,
    /// The thread that asked; 0 if it is not to be seen.
    pub pid: u32,
    /// The name of its program (`comm`), if it was to be seen.
    pub process: Vec<u8>,
}

/// What was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refused {
    /// Following or reading a link with this text.
    Link(Vec<u8>),
    /// Moving a directory to this path: links below it would have led out.
    Rename(TreePath),
}

impl Fs {
    /// The text of a link, as the kernel may follow it; `pid` is who asks.
    ///
    /// # Errors
    /// EXDEV for a link that leads out, which is noted for `status`; ESTALE if the kernel must look it up again;
    /// EINVAL for what is not a link.
    pub fn readlink(&self, id: NodeId, pid: u32) -> FsResult<LinkReply> {
        if id.is_in_snapdir() {
            return self.snapdir_readlink(id, pid);
        }
        let jail = Arc::clone(&self.jail.lock());
        let answer = self.core().answer_link(&jail, id)?;
        match answer {
            Judged::Text(text) => Ok(LinkReply::Text(text)),
            Judged::Wait(which) => Ok(LinkReply::Wait(which)),
            Judged::Out { path, text } => {
                self.refuse(path, Refused::Link(text), pid);
                Err(FsError::LeavesJail)
            }
        }
    }

    /// Says that the kernel has taken a move in.
    pub fn move_finished(&self, which: &Move) {
        self.core().moves_in_flight.retain(|now| now.number != which.number);
    }

    /// The text of a link as it is stored, for callers that do not follow it.
    ///
    /// # Errors
    /// EINVAL for what is not a link, or what the base answers.
    pub fn link_text(&self, id: NodeId) -> FsResult<Vec<u8>> {
        if id.is_in_snapdir() {
            return self.snapdir_link_text(id);
        }
        let core = self.core();
        match &core.record_of(&core.target(id)?)?.body {
            Body::Symlink { target } => Ok(target.clone()),
            Body::File { .. } | Body::Dir { .. } | Body::Special => Err(FsError::Invalid),
        }
    }

    /// What was refused because it leads out: the last hundred that differ, and how often in all.
    pub fn refusals(&self) -> (Vec<Refusal>, u64) {
        let core = self.core();
        (core.refused.iter().cloned().collect(), core.refused_count)
    }

    /// Notes what was refused. Without the lock of the head: it asks the host who it was. What is known already is only
    /// counted, so that nobody fills the log by trying again.
    pub(in crate::fs) fn refuse(&self, path: TreePath, what: Refused, pid: u32) {
        let process = sys::proc::program_of(pid).unwrap_or_default();
        let refusal = Refusal { path, what, pid, process };
        let mut core = self.core();
        core.refused_count += 1;
        let known = core.refused.iter().position(|old| {
            (&old.path, &old.what, &old.process) == (&refusal.path, &refusal.what, &refusal.process)
        });
        match known {
            Some(at) => drop(core.refused.remove(at)),
            None => log::warn!("{refusal}"),
        }
        if core.refused.len() >= REFUSALS {
            core.refused.pop_front();
        }
        core.refused.push_back(refusal);
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Refusal { path, what, pid, process } = self;
        match what {
            Refused::Link(text) => {
                write!(f, "refused the link '{path}', which leads to '{}'", text.escape_ascii())?
            }
            Refused::Rename(to) => {
                write!(f, "refused to move '{path}' to '{to}', from where its links lead out")?
            }
        }
        write!(f, ", for process {pid} ({})", process.escape_ascii())
    }
}

/// What is to be answered for a link.
enum Judged {
    Text(Vec<u8>),
    Wait(Move),
    Out { path: TreePath, text: Vec<u8> },
}

/// Whether a text may be served to whoever met its link in a certain directory.
enum Footing {
    /// It stays inside from there.
    Firm,
    /// It does as soon as the kernel has taken the move in.
    Soon(Move),
    /// It does not, or the directory is gone: the link cannot be met there any more.
    None,
}

/// A directory of the merged tree: its number and what it covers of the base.
pub(in crate::fs) type Dir = (Ino, Option<TreePath>);

/// The directory of a link that is nearest to the root: of several names, the one from which it climbs least.
pub(in crate::fs) fn shallowest_dir(state: &State, link: &Found) -> FsResult<Option<Dir>> {
    let mut dirs: Vec<Dir> = Vec::new();
    match link {
        Found::Upper(ino, _) => {
            for (dir, _) in state.tree.links(*ino) {
                dirs.push((dir, state.lower_path(dir)?));
            }
        }
        Found::Base(_, path, _) => {
            let Some((above, _)) = path.split() else { return Ok(None) };
            let Some((ino, _)) = state.lower.lookup(&above)? else { return Ok(None) };
            dirs.push((ino, Some(above)));
        }
        Found::Nothing(_) => {}
    }
    let mut best: Option<(usize, Dir)> = None;
    for dir in dirs {
        let depth = state.depth_of(dir.0, dir.1.as_ref())?;
        if best.as_ref().is_none_or(|(least, _)| depth < *least) {
            best = Some((depth, dir));
        }
    }
    Ok(best.map(|(_, dir)| dir))
}

/// Whether the base has names of this node that the tree does not know.
pub(in crate::fs) fn has_unseen_names(state: &State, link: &Found) -> bool {
    match link {
        Found::Upper(ino, _) => state
            .tree
            .node(*ino)
            .is_some_and(|n| n.meta.nlink as usize > state.tree.links(*ino).count()),
        Found::Base(_, _, node) => node.nlink() > 1,
        Found::Nothing(_) => false,
    }
}

impl Core {
    /// Judges a link.
    fn answer_link(&mut self, jail: &Jail, id: NodeId) -> FsResult<Judged> {
        if self.table.get(id).is_some_and(|held| held.retired) {
            return Err(FsError::Stale);
        }
        let target = self.target(id)?;
        let node = self.record_of(&target)?;
        let Body::Symlink { target: text } = &node.body else { return Err(FsError::Invalid) };
        let link = match &target {
            Target::Upper(ino) => Found::Upper(*ino, None),
            Target::Base(ino, path, node) => Found::Base(*ino, path.clone(), node.clone()),
            Target::Orphan(_) => Found::Nothing(None),
        };
        let Some(dir) = shallowest_dir(&self.state, &link)? else { return Err(FsError::NotFound) };
        let merged = Merged::of(&self.state);
        let handle = merged.handle(dir);
        match jail.resolve(&merged, handle, text)? {
            Answer::Text(served) if jail.policy == Policy::Literal || Jail::climb(&served) == 0 => {
                Ok(Judged::Text(served))
            }
            // A link with further names that we do not see is judged as if one of them stood in the root.
            Answer::Text(served) if !has_unseen_names(&self.state, &link) => self.serve(id, served),
            Answer::Text(_) | Answer::Escapes { .. } => {
                let (Target::Upper(ino) | Target::Base(ino, ..) | Target::Orphan(ino)) = &target;
                Ok(Judged::Out { path: self.path_of(*ino).unwrap_or_default(), text: text.clone() })
            }
        }
    }

    /// Serves a text that climbs, if it stays inside from every directory in which the kernel may have met the link.
    fn serve(&mut self, id: NodeId, text: Vec<u8>) -> FsResult<Judged> {
        let up = Jail::climb(&text);
        let mut met = self.advertised_in.get(&id).cloned().unwrap_or_default();
        met.retain(|dir| self.table.get(*dir).is_some());
        for dir in &met {
            match self.footing(*dir, up) {
                Footing::Firm => {}
                Footing::Soon(which) => return Ok(Judged::Wait(which)),
                Footing::None => {
                    self.table.retire(id);
                    self.advertised_in.remove(&id);
                    return Err(FsError::Stale);
                }
            }
        }
        for dir in &met {
            self.climb_guard.serve(id, *dir, up);
        }
        self.advertised_in.insert(id, met);
        Ok(Judged::Text(text))
    }

    fn footing(&self, dir: NodeId, up: usize) -> Footing {
        if self.table.get(dir).is_none_or(|held| held.place == Place::Orphan) {
            return Footing::None;
        }
        let Some(depth) = self.depth_seen(dir) else { return Footing::None };
        if up > depth {
            return Footing::None;
        }
        // By its old place a walk would lead out, or would come to a directory that is not marked with more than one step
        // to go.
        let matters = |which: &&Move| {
            let levels = self.levels_below(dir, which.dir);
            levels.is_some_and(|levels| up > which.depth + levels || up > levels + 2)
        };
        self.moves_in_flight
            .iter()
            .find(matters)
            .map_or(Footing::Firm, |which| Footing::Soon(which.clone()))
    }

    /// Notes that the kernel sees a node in a directory from now on.
    pub(in crate::fs) fn note_advertised_in(&mut self, dir: NodeId, ino: Ino, kind: FileKind) {
        let Some(id) = self.table.id_of(ino) else { return };
        match kind {
            FileKind::Symlink => drop(self.advertised_in.entry(id).or_default().insert(dir)),
            FileKind::Dir => self.table.set_within(id, dir),
            FileKind::File
            | FileKind::Fifo
            | FileKind::Socket
            | FileKind::Char
            | FileKind::Block => {}
        }
    }

    /// Refuses a move of a directory from which walks in it would lead out, and notes that it leaves `from`. `name` is its new one.
    pub(in crate::fs) fn begin_move(
        &mut self,
        moved: Ino,
        from: NodeId,
        (into, name): (NodeId, &Name),
    ) -> FsResult<Option<Move>> {
        // Whom the kernel has not seen nobody stands in.
        let Some(dir) = self.table.id_of(moved).filter(|_| from != into) else { return Ok(None) };
        // A kernel that let go of a directory above one that it names is none; whatever it is, it gets no way out.
        let [before, after] =
            [from, into].map(|above| self.depth_seen(above).map(|depth| depth + 1));
        let rises = before.is_none() || after < before;
        if rises
            && !self
                .climb_guard
                .may_stand_at(after.unwrap_or(0), |marked| self.levels_below(marked, dir))
        {
            return Err(FsError::LeavesJail);
        }
        let mut walks = std::mem::take(&mut self.climb_guard);
        walks.leave(from, |marked| self.levels_below(marked, dir));
        self.climb_guard = walks;
        self.moves += 1;
        let (name, depth) = (name.clone(), before.unwrap_or(0));
        Ok(Some(Move { into, name, dir, depth, number: self.moves }))
    }

    /// How many levels the kernel sees a directory below the root.
    fn depth_seen(&self, dir: NodeId) -> Option<usize> {
        self.levels_below(dir, NodeId::ROOT)
    }

    /// How many levels the kernel sees a directory below another; none if it is not.
    fn levels_below(&self, dir: NodeId, top: NodeId) -> Option<usize> {
        self.table.line(dir).position(|(id, _)| id == top)
    }

    /// Of the directories that a switch cuts off, those in which a walk may be under way leave it to the one above.
    pub(in crate::fs) fn cut_climb_marks(&mut self, cut: &BTreeSet<NodeId>) {
        let mut marked: Vec<NodeId> =
            self.climb_guard.dirs().filter(|dir| cut.contains(dir)).collect();
        // What is above gets the marks of what is below, and may be cut off, too. All that is below such a one is cut off.
        while let Some(dir) = marked.pop() {
            let Some(above) = self.table.get(dir).and_then(|held| held.within) else { continue };
            self.climb_guard.remove(dir, above);
            if cut.contains(&above) {
                marked.push(above);
            }
        }
    }
}

/// The merged tree, as the resolver walks it. The resolver wants small handles, so directories are numbered as they are met.
pub(in crate::fs) struct Merged<'a> {
    state: &'a State,
    met: RefCell<Vec<Dir>>,
}

impl<'a> Merged<'a> {
    pub(in crate::fs) fn of(state: &'a State) -> Merged<'a> {
        Merged { state, met: RefCell::new(Vec::new()) }
    }

    pub(in crate::fs) fn handle(&self, dir: Dir) -> usize {
        let mut met = self.met.borrow_mut();
        if let Some(known) = met.iter().position(|m| m.0 == dir.0) {
            return known;
        }
        met.push(dir);
        met.len() - 1
    }

    fn dir(&self, handle: usize) -> FsResult<Dir> {
        self.met.borrow().get(handle).cloned().ok_or(FsError::NotFound)
    }
}

impl Walk for Merged<'_> {
    type Dir = usize;

    fn root(&self) -> usize {
        self.handle(self.state.root())
    }

    fn parent(&self, dir: usize) -> Option<usize> {
        let dir = self.dir(dir).ok()?;
        let up = self.state.parent_of(dir.0, dir.1.as_ref()).ok()??;
        Some(self.handle(up))
    }

    fn lookup(&self, dir: usize, name: &Name) -> FsResult<Option<NameTarget<usize>>> {
        let dir = self.dir(dir)?;
        let found = self.state.find(dir.0, dir.1.as_ref(), name)?;
        if let Some(dir) = self.state.as_dir(&found) {
            return Ok(Some(NameTarget::Dir(self.handle(dir))));
        }
        Ok(match &found {
            Found::Nothing(_) => None,
            Found::Upper(ino, _) => match self.state.tree.node(*ino).map(|n| &n.body) {
                Some(Body::Symlink { target }) => Some(NameTarget::Symlink(target.clone())),
                Some(_) => Some(NameTarget::Other),
                None => None,
            },
            Found::Base(_, path, node) => Some(match node.kind() {
                FileKind::Symlink => NameTarget::Symlink(self.state.lower.readlink(path, node)?),
                _ => NameTarget::Other,
            }),
        })
    }
}
