//! What the kernel was told of files that only the base has.
//!
//! It remembers their size, and what was read of them, for ever. If somebody changes such a file in the base, its new bytes
//! must not be read into what is left of the old ones, nor cut at the old size, nor must a program write to a place that it chose by
//! the old content. So a read or a write that meets the change is refused (EIO, and a line in `status`), and the kernel is made
//! to forget the file: what is asked then is answered by the file as it now is.
//!
//! A switch changes nothing of what the kernel has read of the files that it keeps. So what it was told stays, and of a file that
//! a switch gives back to the base it is what the record said, or what the apply left.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::error::{FsError, FsResult};
use crate::fs::kernel::nodes::Place;
use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Core, Found, Fs, State, Target};
use crate::store::record::Body;
use crate::types::{FileKind, Ino, Name, NodeId, Timestamp, TreePath};

/// What changes when the content of a file does: its size, and when that was; and, if somebody sets the time back, when anything
/// of it was changed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    size: u64,
    mtime: Timestamp,
    ctime: Timestamp,
    /// What also changes that: links, mode, owner and group.
    others: [u32; 4],
}

/// What became of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    /// What else was changed says why the change time is another one: a clone that links the files of the base is not a reason to
    /// refuse a read.
    Attributes,
    Content,
}

impl Told {
    fn change_to(self, now: Told) -> Change {
        if self == now {
            Change::Nothing
        } else if (self.size, self.mtime) == (now.size, now.mtime) && self.others != now.others {
            Change::Attributes
        } else {
            Change::Content
        }
    }
}

/// Names that are let go of at once.
const NAMES_AT_ONCE: usize = 256;

/// What `status` says of such a file.
const CHANGED: &str =
    "changed in the base while the mount remembered it: what was read or written then failed";

fn of(node: &LowerNode) -> Option<Told> {
    match node {
        LowerNode::Base(stat) if stat.kind == FileKind::File => {
            let others = [stat.nlink, stat.mode, stat.uid, stat.gid];
            Some(Told { size: stat.size, mtime: stat.mtime, ctime: stat.ctime, others })
        }
        // A pre-image is in the store, and nobody changes it.
        LowerNode::Base(_) | LowerNode::Pre(..) => None,
    }
}

/// What the kernel knows of a file that a switch leaves to the base, where it is at `path`: it goes on with what it has read of
/// `old`. None if it was told already what that is. The file may be another one by now, so what it is now says nothing.
pub(in crate::fs) fn left_to_base(
    (before, old): (&State, &Found),
    after: &State,
    (path, node): (&TreePath, &LowerNode),
) -> Option<Told> {
    let now = of(node)?;
    let origin = match old {
        Found::Base(_, _, LowerNode::Base(_)) => return None,
        Found::Upper(ino, _) => match before.tree.node(*ino).map(|node| &node.body) {
            Some(Body::File { origin: Some(origin), .. }) => Some(origin.print),
            Some(_) | None => None,
        },
        Found::Base(_, _, LowerNode::Pre(..)) | Found::Nothing(_) => None,
    };
    // What was covered may be what an apply has put there since.
    let left = after.lower.left_after(before.lower.epoch(), path).flatten();
    let print = left.or(origin).filter(|print| print.ctime != ANY_TIMES);
    Some(print.map_or(now, |print| Told {
        size: print.size,
        mtime: print.mtime,
        ctime: print.ctime,
        ..now
    }))
}

/// What the kernel remembers as it is not any more.
#[derive(Default)]
pub(crate) struct PendingInvalidations {
    /// Whether there is a kernel that remembers anything.
    pub(in crate::fs) has_kernel: bool,
    /// Whether it goes by its own size and times of every file that it holds, whatever it is told (`-o writeback`).
    pub(in crate::fs) writeback: bool,
    /// Names that lead to a node which the base does not have there any more. Behind a lock, since whoever only looks finds them.
    names: Mutex<BTreeSet<(NodeId, Name)>>,
    nodes: BTreeMap<NodeId, Forgetting>,
    /// Nodes that it has forgotten and not asked for since. Who began to read before it forgot has former bytes already.
    unasked: BTreeSet<NodeId>,
}

/// What the kernel must forget of a node.
#[derive(Clone, Copy)]
struct Forgetting {
    /// Whether somebody is telling it already.
    is_advertised: bool,
    /// Whether its content cannot be read until then.
    refused: bool,
}

impl PendingInvalidations {
    /// The kernel must forget a node.
    fn add(&mut self, id: NodeId, change: Change) {
        let refused = match change {
            Change::Nothing => return,
            Change::Attributes => false,
            Change::Content => true,
        };
        let known = self.nodes.entry(id).or_insert(Forgetting { is_advertised: false, refused });
        if refused && !known.refused {
            // What it forgets just now may be read again by the time that this is noted.
            *known = Forgetting { is_advertised: false, refused };
        }
    }

    fn is_refused(&self, id: NodeId) -> bool {
        self.unasked.contains(&id) || self.nodes.get(&id).is_some_and(|known| known.refused)
    }

    /// The kernel asks for a node that nobody else can change.
    pub(in crate::fs) fn let_go(&mut self, id: NodeId) {
        self.unasked.remove(&id);
    }

    /// The kernel holds a node no longer: there is nothing to forget.
    pub(in crate::fs) fn drop_node(&mut self, id: NodeId) {
        self.unasked.remove(&id);
        self.nodes.remove(&id);
    }
}

impl Core {
    /// Notes names that stand for something else since a switch, until the kernel is told.
    pub(in crate::fs) fn note_names_to_invalidate(&mut self, names: &BTreeSet<(NodeId, Name)>) {
        if self.pending.has_kernel {
            self.names_to_invalidate.extend(names.iter().cloned());
        }
    }

    /// Refuses to move what stands at a name since a switch as long as the kernel may hold what stood there before: it moves that, and
    /// would then have it under a name of which nobody tells it anything. It asks for the name and comes again.
    ///
    /// # Errors
    /// ESTALE.
    pub(in crate::fs) fn check_name_is_current(&self, dir: NodeId, name: &Name) -> FsResult<()> {
        let is_untold = !self.names_to_invalidate.is_empty()
            && self.names_to_invalidate.contains(&(dir, name.clone()));
        if is_untold { Err(FsError::Stale) } else { Ok(()) }
    }

    /// Notes that the kernel asked for a name.
    pub(in crate::fs) fn name_looked_up(&mut self, dir: NodeId, name: &Name) {
        if !self.names_to_invalidate.is_empty() {
            self.names_to_invalidate.remove(&(dir, name.clone()));
        }
    }

    /// Notes what the kernel knows of a node that is the base's again.
    pub(in crate::fs) fn note_left(&mut self, id: NodeId, told: Told) {
        if self.pending.has_kernel {
            self.table.set_advertised(id, Some(told));
        }
    }

    /// Notes what the kernel is told of a node.
    pub(in crate::fs) fn note_advertised(&mut self, id: NodeId, node: &LowerNode) {
        if !self.pending.has_kernel {
            return;
        }
        let Some(now) = of(node).filter(|_| self.table.get(id).is_some()) else { return };
        self.pending.unasked.remove(&id);
        match self.table.told(id) {
            None => self.table.set_advertised(id, Some(now)),
            Some(told) => {
                let change = told.change_to(now);
                // It keeps what it has read until it is made to forget it.
                self.pending.add(id, change);
                if change == Change::Attributes {
                    self.table.set_advertised(id, Some(now));
                }
            }
        }
    }

    /// Notes that a node of the base has a record from now on, or what is left of it has, made of `node` as it is now. What the
    /// kernel has read of another content must not stand beside that.
    pub(in crate::fs) fn note_recorded(&mut self, id: NodeId, node: &LowerNode) {
        if let (Some(told), Some(now)) = (self.table.told(id), of(node)) {
            self.pending.add(id, told.change_to(now));
        }
        self.table.set_advertised(id, None);
    }

    /// Notes that the kernel asked for the attributes of a node, whatever it is.
    pub(in crate::fs) fn note_asked(&mut self, id: NodeId, target: &Target) {
        match target {
            Target::Base(_, _, node) => self.note_advertised(id, node),
            Target::Upper(_) | Target::Orphan(_) => self.pending.let_go(id),
        }
    }

    /// Says that the base has another node, or none, where the kernel sees one: whoever asked walks there again, and finds what is
    /// there now.
    pub(in crate::fs) fn replaced(&self, path: &TreePath) -> FsError {
        if !self.pending.has_kernel {
            return self.lower.drift(path);
        }
        let mut at = path.clone();
        while let Some((above, name)) = at.split() {
            if let Some(dir) = self.dir_seen_at(&above) {
                self.pending.names.lock().insert((dir, name));
                break;
            }
            // That directory was replaced itself.
            at = above;
        }
        FsError::Stale
    }

    /// A directory that somebody moved in the base comes to light at its new path. The kernel would move what it has of it there, with
    /// all that is below it; as in a switch no live dentry moves, and who stands in it stands in none.
    pub(in crate::fs) fn cut_off_if_moved(&mut self, ino: Ino, path: &TreePath) {
        let Some(id) = self.table.id_of(ino).filter(|_| self.tree.node(ino).is_none()) else {
            return;
        };
        let was = match self.table.get(id).map(|held| &held.place) {
            Some(Place::Live { base: Some(was) }) if was != path && self.pending.has_kernel => {
                was.clone()
            }
            _ => return,
        };
        let stale = self.replaced(&was);
        log::info!("somebody moved directory '{was}' of the base: {stale}");
        self.cut_climb_marks(&BTreeSet::from([id]));
        self.table.orphan(id);
        self.listings.remove(&id);
    }

    /// The directory that the kernel sees at a path of the base, if it is the one that is there.
    fn dir_seen_at(&self, path: &TreePath) -> Option<NodeId> {
        let (ino, _) = self.lower.lookup(path).ok()??;
        let id = self.table.id_of(ino)?;
        let seen = match self.tree.node(ino).map(|node| &node.body) {
            Some(Body::Dir { base }) => base.as_ref(),
            Some(_) => None,
            None => match &self.table.get(id)?.place {
                Place::Live { base } => base.as_ref(),
                Place::Orphan => None,
            },
        };
        (seen == Some(path)).then_some(id)
    }

    /// The node behind a descriptor, whose content is to be read or changed. That is not walked to again.
    ///
    /// # Errors
    /// As [`Core::target`] and [`Core::check_advertised`]; [`FsError::Drift`] if the base has another one in its place.
    pub(in crate::fs) fn content_target(&mut self, id: NodeId) -> FsResult<Target> {
        let target = match (self.target(id), self.table.get(id).map(|held| &held.place)) {
            (Err(FsError::Stale), Some(Place::Live { base: Some(path) })) => {
                self.lower.note(path, CHANGED);
                return Err(FsError::Drift(path.clone()));
            }
            (target, _) => target?,
        };
        self.check_advertised(id, &target)?;
        Ok(target)
    }

    /// Refuses what a program does with the content of a file if the kernel showed it another one.
    ///
    /// # Errors
    /// [`FsError::Drift`].
    pub(in crate::fs) fn check_advertised(&mut self, id: NodeId, target: &Target) -> FsResult<()> {
        if let Target::Base(_, _, node) = target
            && !self.pending.unasked.contains(&id)
        {
            self.note_advertised(id, node);
        }
        if !self.pending.is_refused(id) {
            return Ok(());
        }
        let path = match target {
            Target::Base(_, path, _) => Some(TreePath::clone(path)),
            Target::Upper(ino) => self.tree.path(*ino),
            Target::Orphan(_) => None,
        };
        let path = path.unwrap_or_else(TreePath::root);
        self.lower.note(&path, CHANGED);
        Err(FsError::Drift(path))
    }
}

impl Fs {
    /// Says that a kernel asks from now on, which remembers what it is told; and if it collects writes, goes by its own size and times of
    /// files.
    pub fn attach_kernel(&self, collects_writes: bool) {
        let mut core = self.core();
        core.pending.has_kernel = true;
        core.pending.writeback = collects_writes;
    }

    /// Says that the kernel was told of these names. Others may be told it meanwhile.
    pub fn names_were_invalidated(&self, names: &BTreeSet<(NodeId, Name)>) {
        let mut names = names.iter().peekable();
        while names.peek().is_some() {
            // Not all under one lock.
            let mut core = self.core();
            if core.names_to_invalidate.is_empty() {
                return;
            }
            names.by_ref().take(NAMES_AT_ONCE).for_each(|name| {
                core.names_to_invalidate.remove(name);
            });
        }
    }

    /// The nodes of which the kernel must forget everything because the base was changed, each once, and the names. [`Fs::node_was_invalidated`]
    /// is called when that is done for a node; until then its content cannot be read.
    pub fn take_invalidations(&self) -> (Vec<NodeId>, BTreeSet<(NodeId, Name)>) {
        let mut core = self.core();
        let names = std::mem::take(core.pending.names.get_mut());
        let names_to_invalidate =
            core.pending.nodes.iter_mut().filter(|(_, known)| !known.is_advertised);
        let tell = |(id, known): (&NodeId, &mut Forgetting)| {
            known.is_advertised = true;
            *id
        };
        (names_to_invalidate.map(tell).collect(), names)
    }

    /// Whether the kernel must forget a node before it is told anything of it.
    pub fn needs_invalidation(&self, id: NodeId) -> bool {
        self.core().pending.nodes.contains_key(&id)
    }

    /// Refuses to append to a file of the base at another place than its end: the kernel chose it by a former size. It asks for
    /// the size when the file is opened or looked at again.
    ///
    /// # Errors
    /// [`FsError::Drift`].
    pub fn check_append(&self, id: NodeId, offset: u64) -> FsResult<()> {
        let mut core = self.core();
        let Target::Base(_, path, node) = core.content_target(id)? else { return Ok(()) };
        if of(&node).is_none_or(|now| now.size == offset) {
            return Ok(());
        }
        core.pending.add(id, Change::Content);
        core.lower.note(&path, CHANGED);
        Err(FsError::Drift(path))
    }

    /// Says that the kernel has forgotten what it knew of a node.
    pub fn node_was_invalidated(&self, id: NodeId) {
        let mut core = self.core();
        let is_refused = core.pending.nodes.remove(&id).is_some_and(|known| known.refused);
        if is_refused && core.table.get(id).is_some() {
            core.pending.unasked.insert(id);
            core.table.set_advertised(id, None);
        }
    }
}
