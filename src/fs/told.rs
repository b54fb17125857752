//! What the kernel was told of files that only the base has.
//!
//! It remembers their size, and what was read of them, for ever. If somebody changes such a file in the base, its new bytes
//! must not be read into what is left of the old ones, nor cut at the old size, nor must a program write to a place that it chose by
//! the old content. So a read or a write that meets the change is refused (EIO, and a line in `status`), and the kernel is made
//! to forget the file: what is asked then is answered by the file as it now is.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{FsError, FsResult};
use crate::fs::lower::LowerNode;
use crate::fs::{Core, Fs, Target};
use crate::types::{FileKind, NodeId, Timestamp, TreePath};

/// What changes when the content of a file does: its size, and when that was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    size: u64,
    mtime: Timestamp,
}

/// What `status` says of such a file.
const CHANGED: &str =
    "changed in the base while the mount remembered it: what was read or written then failed";

fn of(node: &LowerNode) -> Option<Told> {
    match node {
        LowerNode::Base(stat) if stat.kind == FileKind::File => {
            Some(Told { size: stat.size, mtime: stat.mtime })
        }
        // A pre-image is in the store, and nobody changes it.
        LowerNode::Base(_) | LowerNode::Pre(..) => None,
    }
}

/// Which files the kernel remembers as they are not any more.
#[derive(Default)]
pub(crate) struct Outdated {
    /// Whether there is a kernel that remembers anything.
    pub(super) kernel_remembers: bool,
    /// Whether somebody is telling the kernel already.
    nodes: BTreeMap<NodeId, bool>,
    /// Nodes that it has forgotten and not asked for since. Who began to read before it forgot has former bytes already.
    unasked: BTreeSet<NodeId>,
}

impl Outdated {
    /// The kernel holds a node no longer.
    pub(super) fn let_go(&mut self, id: NodeId) {
        self.unasked.remove(&id);
    }
}

impl Core {
    /// Notes what the kernel is told of a node.
    pub(super) fn note_told(&mut self, id: NodeId, node: &LowerNode) {
        if !self.outdated.kernel_remembers {
            return;
        }
        let Some(now) = of(node).filter(|_| self.table.get(id).is_some()) else { return };
        self.outdated.unasked.remove(&id);
        match self.table.told(id) {
            None => self.table.set_told(id, Some(now)),
            Some(told) if told == now => {}
            // It keeps what it has read until it is made to forget it.
            Some(_) => drop(self.outdated.nodes.entry(id).or_insert(false)),
        }
    }

    /// Refuses what a program does with the content of a file if the kernel showed it another one.
    ///
    /// # Errors
    /// [`FsError::Drift`].
    pub(super) fn check_told(&mut self, id: NodeId, target: &Target) -> FsResult<()> {
        let Target::Base(_, path, node) = target else { return Ok(()) };
        let is_asked = !self.outdated.unasked.contains(&id);
        if is_asked {
            self.note_told(id, node);
        }
        if is_asked && !self.outdated.nodes.contains_key(&id) {
            return Ok(());
        }
        self.lower.note(path, CHANGED);
        Err(FsError::Drift(TreePath::clone(path)))
    }
}

impl Fs {
    /// Says that a kernel asks from now on, which remembers what it is told.
    pub fn kernel_remembers(&self) {
        self.core().outdated.kernel_remembers = true;
    }

    /// The nodes of which the kernel must forget everything because the base was changed, each once. [`Fs::is_forgotten`]
    /// is called when that is done; until then their content cannot be read.
    pub fn outdated(&self) -> Vec<NodeId> {
        let mut core = self.core();
        let nodes = core.outdated.nodes.iter_mut();
        nodes.filter_map(|(id, is_told)| (!std::mem::replace(is_told, true)).then_some(*id)).collect()
    }

    /// Whether the kernel must forget a node before it is told anything of it.
    pub fn is_outdated(&self, id: NodeId) -> bool {
        self.core().outdated.nodes.contains_key(&id)
    }

    /// Refuses to append to a file of the base at another place than its end: the kernel chose it by a former size. It asks for
    /// the size when the file is opened or looked at again.
    ///
    /// # Errors
    /// [`FsError::Drift`].
    pub fn check_append(&self, id: NodeId, offset: u64) -> FsResult<()> {
        let mut core = self.core();
        let Target::Base(_, path, node) = core.target(id)? else { return Ok(()) };
        if of(&node).is_none_or(|now| now.size == offset) {
            return Ok(());
        }
        core.outdated.nodes.entry(id).or_insert(false);
        core.lower.note(&path, CHANGED);
        Err(FsError::Drift(path))
    }

    /// Says that the kernel has forgotten what it knew of a node.
    pub fn is_forgotten(&self, id: NodeId) {
        let mut core = self.core();
        core.outdated.nodes.remove(&id);
        core.outdated.unasked.insert(id);
        core.table.set_told(id, None);
    }
}
