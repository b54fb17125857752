//! The snapshot directory, `.jailfs` in the root of a mount: checkpoints and other heads as trees,
//! edit histories of files, and texts about the sandbox.
//!
//! * It is read-only. Its nodes have a range of ids of their own. Operations that change something
//!   look for a live node, and answer an id of this range with EROFS.
//! * A node of a checkpoint is identified by the checkpoint and its inode number there. A held node
//!   costs some bytes. Only a few trees, the last used ones, are kept in memory.
//! * No content is freed while an operation reads it ([`Fs::read_guard`]). A checkpoint that was
//!   freed answers ESTALE. An apply replaces the base below older checkpoints: what an operation
//!   found out meanwhile is discarded, and it starts again ([`Fs::in_checkpoint`]).
//! * A link of a checkpoint is resolved as if the checkpoint's root were the root of the mount. It
//!   leads neither out nor into the live tree.
//!
//! Loading the tree of a checkpoint may take long, and everything waits while space is reclaimed.
//! [`Fs::snapdir_is_ready`] tells the thread that serves the kernel whether an operation would
//! wait.

mod checkpoint;
mod forks;
mod history;
mod links;
mod table;
mod top;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, RwLockReadGuard};

use crate::error::{Error, FsError, FsResult, Kind, Result};
use crate::fs::merged::lower::Lower;
use crate::fs::{Attr, Entry, Fs, State};
use crate::store::checkpoint_names::{CheckpointNames, Named};
use crate::store::layer::LayerInfo;
use crate::sys::clock;
use crate::tree::{Body, Tree};
use crate::types::{FileKind, Ino, LayerId, Name, NodeId, Timestamp, TreePath, digits};

pub use forks::{HeadTree, OtherHeads};
pub use table::OtherHead;
use table::{CheckpointNode, Item, Table};

/// The number of trees that are kept in memory.
const MAX_TREES: usize = 8;

/// How the snapshot directory is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapdirView {
    /// Its name in the root of the mount.
    pub name: Name,
    /// Whether the root lists it. A lookup finds it in any case.
    pub listed: bool,
    /// Whether mkdir(2) in `checkpoints` makes a checkpoint, and in `forks` a fork.
    pub makes: bool,
}

/// A text that is generated at each lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Text {
    /// The status of the sandbox.
    Status,
    /// The list of checkpoints.
    Log,
}

/// Access to what ranks above `fs`: checkpoints, heads and texts.
pub trait Archive: Send + Sync {
    /// The tree of a sealed layer.
    ///
    /// # Errors
    /// The layer is damaged, or was dropped ([`Kind::NoStore`]).
    fn tree(&self, layer: LayerId) -> Result<Tree>;

    /// Makes a checkpoint. Called from a thread that serves no request.
    ///
    /// # Errors
    /// The name is invalid ([`Kind::Usage`]), or the store failed.
    fn checkpoint(&self, name: String) -> Result<LayerId>;

    /// Generates a text. Called from a thread that serves no request.
    ///
    /// # Errors
    /// The sandbox cannot answer.
    fn text(&self, which: Text) -> Result<String>;

    /// The layer at or below `from` that last changed a node; `None` if no layer did.
    ///
    /// # Errors
    /// As [`Archive::tree`].
    fn last_change(&self, ino: Ino, from: Option<LayerId>) -> Result<Option<LayerId>>;

    /// The layer directly below the upper layer.
    fn parent(&self) -> Option<LayerId>;

    /// The other heads that this one may show.
    ///
    /// # Errors
    /// The sandbox is closed.
    fn heads(&self) -> Result<OtherHeads>;

    /// The tree of another head as it is now. Called from a thread that serves no request.
    ///
    /// # Errors
    /// There is no such head, or this one may not show it ([`Kind::NoStore`]); damage.
    fn head_tree(&self, head: &OtherHead) -> Result<HeadTree>;

    /// Whether the store has a head of this name, shown or not.
    fn has_head(&self, name: &str) -> bool;

    /// Makes a fork of this head. Called from a thread that serves no request.
    ///
    /// # Errors
    /// The name is invalid ([`Kind::Usage`]) or in use, or the store failed.
    fn fork(&self, name: String) -> Result<()>;
}

/// Which sealed states a mount and its clients see.
pub struct Fence {
    /// The head whose own states are seen.
    pub head: String,
    /// The other states that are seen.
    pub states: BTreeSet<LayerId>,
}

/// A tree in memory.
struct CachedTree {
    layer: LayerId,
    tree: Tree,
    /// The base in its epoch, from the last use of the tree.
    below: Option<LowerInEpoch>,
}

/// The base in an epoch. It is valid as long as the live tree has the same `live` below it.
struct LowerInEpoch {
    lower: Arc<Lower>,
    live: Arc<Lower>,
}

/// The snapshot directory of a head.
#[derive(Default)]
pub(super) struct Snapdir {
    archive: Mutex<Option<Arc<dyn Archive>>>,
    view: Mutex<Option<(SnapdirView, Timestamp)>>,
    /// `None` if all states are seen.
    fence: Mutex<Option<Arc<Fence>>>,
    table: Mutex<Table>,
    trees: Mutex<VecDeque<CachedTree>>,
    listing: Mutex<Option<(NodeId, Arc<checkpoint::Names>)>>,
    history_listing: Mutex<Option<history::Listing>>,
    fork_listing: Mutex<Option<forks::Listing>>,
    closed_lower: Mutex<Option<forks::ClosedLower>>,
}

impl Fs {
    /// Sets the access to checkpoints and texts.
    pub fn set_archive(&self, archive: Arc<dyn Archive>) {
        *self.snapdir.archive.lock() = Some(archive);
    }

    /// Hides the other states of the store. Call it before the mount is visible.
    pub fn set_fence(&self, fence: Fence) {
        *self.snapdir.fence.lock() = Some(Arc::new(fence));
    }

    /// The fence, if some states are not seen.
    pub fn fence(&self) -> Option<Arc<Fence>> {
        self.snapdir.fence.lock().clone()
    }

    /// Whether a sealed state is seen through this head.
    pub fn sees(&self, info: &LayerInfo) -> bool {
        (self.visibility())(info)
    }

    /// Returns a predicate that answers as [`Fs::sees`] does now. It takes no lock, so the store
    /// may call it under the lock of the catalog.
    pub fn visibility(&self) -> impl Fn(&LayerInfo) -> bool + use<> {
        let fence = self.fence();
        move |info| {
            fence.as_ref().is_none_or(|fence| {
                info.header.head == fence.head || fence.states.contains(&info.header.layer)
            })
        }
    }

    /// Sets how the snapshot directory is shown; `None` hides it completely. Call it before the
    /// mount is visible.
    ///
    /// # Errors
    /// [`Kind::CannotMount`] if the root already has the name.
    pub fn show_snapdir(&self, view: Option<SnapdirView>) -> Result<()> {
        if let Some(view) = &view {
            let attempt = || format!("show the checkpoints as '{}'", view.name);
            let state = self.state();
            let (root, lower) = state.root();
            // A listing, not a lookup: the base may be a mount of jailfs, whose own snapshot
            // directory answers a lookup without being listed.
            let names = state.merged_names(root, lower.as_ref());
            let names = names
                .map_err(|error| Error::new(Kind::CannotMount, attempt(), error.to_string()))?;
            if names.contains_key(&view.name) {
                let reason = "the tree has an entry with this name";
                return Err(Error::new(Kind::CannotMount, attempt(), reason).hint(
                    "choose another name with '-o snapname=NAME' ('--snapname NAME' of run), or \
                     hide it with 'snapdir=off' ('--snapdir off')",
                ));
            }
        }
        self.core().snapdir_name = view.as_ref().map(|view| view.name.clone());
        *self.snapdir.view.lock() = view.map(|view| (view, clock::now()));
        Ok(())
    }

    /// Whether the snapshot directory is visible.
    pub fn shows_snapdir(&self) -> bool {
        self.snapdir.view.lock().is_some()
    }

    pub(super) fn snapdir_view(&self) -> Option<SnapdirView> {
        self.snapdir.view.lock().as_ref().map(|(view, _)| view.clone())
    }

    fn snapdir_since(&self) -> Timestamp {
        self.snapdir.view.lock().as_ref().map(|(_, since)| *since).unwrap_or_default()
    }

    fn archive(&self) -> FsResult<Arc<dyn Archive>> {
        self.snapdir.archive.lock().clone().ok_or(FsError::NotFound)
    }

    /// Returns a guard if an operation on a node of the snapshot directory (with a name in it)
    /// would not wait. This stays true while the guard lives.
    pub fn snapdir_is_ready(
        &self,
        id: NodeId,
        name: Option<&Name>,
    ) -> Option<RwLockReadGuard<'_, ()>> {
        let layer = match (self.snapdir.table.lock().get(id)?, name) {
            (Item::Node(node), _) => Some(node.layer),
            (Item::Checkpoints, Some(name)) => {
                self.checkpoint_named(&self.checkpoint_names(), name).map(|info| info.header.layer)
            }
            (Item::Top, Some(name))
                if [top::CHECKPOINTS, top::HISTORY].contains(&name.as_bytes()) =>
            {
                None
            }
            (Item::Top, Some(_)) => return None,
            // Another head may be busy, or has to be read.
            (Item::Forks | Item::Fork(_), _) => return None,
            (Item::Top | Item::Checkpoints | Item::Text(..) | Item::Alias(..), _) => None,
            (Item::History(_) | Item::Edit(_), _) => None,
        };
        let guard = self.try_read()?;
        let is_kept = |layer| self.snapdir.trees.lock().iter().any(|kept| kept.layer == layer);
        layer.is_none_or(is_kept).then_some(guard)
    }

    /// Number of nodes of the snapshot directory that the kernel holds.
    pub fn held_snapdir(&self) -> usize {
        self.snapdir.table.lock().count()
    }

    /// The checkpoints of which the kernel holds nodes: a process uses them, or did recently.
    pub fn layers_in_use(&self) -> BTreeSet<LayerId> {
        self.snapdir.table.lock().layers()
    }

    /// The dentries of a checkpoint that the kernel may hold; empty if it holds more than `most`
    /// nodes.
    ///
    /// # Errors
    /// The checkpoint was dropped, or the store cannot be read.
    pub fn names_in_use(&self, layer: LayerId, most: usize) -> FsResult<BTreeSet<(NodeId, Name)>> {
        let held = self.snapdir.table.lock().of_layer(layer);
        if held.len() > most {
            return Ok(BTreeSet::new());
        }
        self.in_checkpoint(layer, |state| {
            let by_ino: HashMap<Ino, NodeId> =
                held.iter().map(|(id, node)| (node.ino, *id)).collect();
            let in_base =
                |node: &CheckpointNode| match state.tree.node(node.ino).map(|known| &known.body) {
                    Some(Body::Dir { base }) => base.clone(),
                    _ => node.base.clone(),
                };
            let by_path: HashMap<TreePath, NodeId> =
                held.iter().filter_map(|(id, node)| Some((in_base(node)?, *id))).collect();
            let mut names = BTreeSet::new();
            for (_, node) in &held {
                let links = state.tree.links(node.ino);
                names.extend(
                    links.filter_map(|(dir, name)| Some((*by_ino.get(&dir)?, name.clone()))),
                );
                let split = node.base.as_ref().and_then(TreePath::split);
                names.extend(split.and_then(|(dir, name)| Some((*by_path.get(&dir)?, name))));
            }
            Ok(names)
        })
    }

    pub(super) fn snapdir_forget(&self, id: NodeId, count: u64) {
        self.snapdir.table.lock().forget(id, count);
    }

    fn snapdir_node(&self, id: NodeId) -> FsResult<Item> {
        if self.snapdir.view.lock().is_none() {
            return Err(FsError::NotFound);
        }
        self.snapdir.table.lock().get(id).ok_or(FsError::NotFound)
    }

    /// Calls `look` with the state of a checkpoint. Calls it again if an apply replaced the base
    /// meanwhile.
    fn in_checkpoint<T>(
        &self,
        layer: LayerId,
        look: impl Fn(&State) -> FsResult<T>,
    ) -> FsResult<T> {
        // Recursive, because the caller may hold the guard of `snapdir_is_ready`.
        let _guard = self.read_again();
        loop {
            let (state, live) = self.checkpoint_state(layer)?;
            let result = look(&state);
            if Arc::ptr_eq(&live, &self.core().state.lower) {
                return result;
            }
        }
    }

    /// The state of a checkpoint, and the present lower of the live tree. The caller holds the read
    /// guard.
    fn checkpoint_state(&self, layer: LayerId) -> FsResult<(State, Arc<Lower>)> {
        let info = self.store.layer(layer).filter(|info| self.is_seen(info));
        let info = info.ok_or(FsError::Stale)?;
        let live = Arc::clone(&self.core().state.lower);
        let epoch = info.header.epoch;
        let since = usize::try_from(epoch.0).unwrap_or(usize::MAX);
        if live.history().iter().skip(since).any(|images| images.is_collected()) {
            return Err(FsError::Stale);
        }
        let known = {
            let mut trees = self.snapdir.trees.lock();
            // Drop lowers from before an apply: they keep files open and are not used again.
            let is_outdated = |below: &mut LowerInEpoch| !Arc::ptr_eq(&below.live, &live);
            trees.iter_mut().for_each(|kept| drop(kept.below.take_if(is_outdated)));
            let at = trees.iter().position(|kept| kept.layer == layer);
            at.and_then(|at| trees.remove(at))
        };
        let (tree, below) = match known {
            Some(kept) => (kept.tree, kept.below),
            None => {
                let tree = self.archive()?.tree(layer).map_err(|error| match error.kind {
                    Kind::NoStore => FsError::Stale,
                    _ => error.into(),
                })?;
                (tree, None)
            }
        };
        let lower = match below {
            Some(below) => below.lower,
            None if live.epoch() == epoch => Arc::clone(&live),
            None => Arc::new(live.in_epoch(epoch)),
        };
        let state = State { tree: tree.clone(), lower: Arc::clone(&lower) };
        let mut trees = self.snapdir.trees.lock();
        trees.push_front(CachedTree {
            layer,
            tree,
            below: Some(LowerInEpoch { lower, live: Arc::clone(&live) }),
        });
        trees.truncate(MAX_TREES);
        Ok((state, live))
    }

    /// The checkpoint for a name in `checkpoints`: the name of one of this head, `HEAD@NAME`, or
    /// the number of any sealed state.
    fn checkpoint_named(&self, names: &CheckpointNames<'_>, name: &Name) -> Option<LayerInfo> {
        let text = std::str::from_utf8(name.as_bytes()).ok()?;
        if let Some(number) = digits(text) {
            let info = self.store.layer(LayerId(number)).filter(|info| self.is_seen(info))?;
            return (info.header.layer.to_string() == text).then_some(info);
        }
        let layer = match text.split_once('@') {
            None => names.own(text),
            Some((head, name)) => match names.find_of(head, name) {
                Named::One(layer) => Some(layer),
                Named::Nothing | Named::Several(_) => None,
            },
        };
        self.store.layer(layer?).filter(|info| self.is_seen(info))
    }

    /// The names of checkpoints, as this head uses them.
    fn checkpoint_names(&self) -> CheckpointNames<'_> {
        let upper = self.store.layer(self.upper_layer());
        let head = upper.map(|info| info.header.head.clone()).unwrap_or_default();
        let sees = self.visibility();
        self.store.checkpoint_names(&head, move |info| info.is_sealed_state() && sees(info))
    }

    /// The names of the directories of checkpoints. Their other names are links to these.
    pub fn checkpoint_entries(&self, checkpoints: &[LayerInfo]) -> Vec<Name> {
        let names = self.checkpoint_names();
        let labels = checkpoints.iter().map(|info| names.label(info));
        labels.filter_map(|label| Name::new(label.as_bytes()).ok()).collect()
    }

    /// Whether a layer is the seal of a state that the mount shows.
    fn is_seen(&self, info: &LayerInfo) -> bool {
        info.is_sealed_state() && self.sees(info)
    }

    /// The attributes of a node with its id as inode number.
    fn snapdir_attr(&self, id: NodeId, attr: Attr) -> Attr {
        Attr { ino: Ino(id.0), ..attr }
    }

    /// Advertises the root of a checkpoint to the kernel.
    fn hold_root(&self, layer: LayerId) -> FsResult<Entry> {
        let attr = self.in_checkpoint(layer, |state| {
            let found = state.resolve(&TreePath::root())?;
            state.attr(&found).ok_or(FsError::NotFound)
        })?;
        let node = CheckpointNode { layer, ino: Ino::ROOT, base: Some(TreePath::root()) };
        let id = self.snapdir.table.lock().hold(node);
        Ok(Entry { id, attr: self.snapdir_attr(id, attr) })
    }
}

/// A directory entry for the node with this id.
fn dir_entry(ino: NodeId, cookie: u64, kind: FileKind, name: &[u8]) -> crate::fs::DirEntry {
    crate::fs::DirEntry { ino: Ino(ino.0), cookie, kind, name: name.to_vec() }
}
