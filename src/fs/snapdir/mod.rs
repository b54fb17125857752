//! What `.jailfs` in the root of a mount shows: the checkpoints as trees, the versions of files, and texts that tell how the
//! sandbox stands.
//!
//! Always true:
//! * Nothing in it can be changed. Its ids are a range of their own; every operation that changes something looks for its
//!   node among the live ones and finds, for an id of this range, that it is read-only ([`super::Core::target`]).
//! * A node of a checkpoint is known by the checkpoint and its number there. Nothing of a state is kept for a node: what the
//!   kernel holds costs some bytes each, and a few trees are kept, those that were used last.
//! * What is told of a checkpoint is what it was. Nothing is given back to the disk while an operation is under way
//!   ([`Fs::read_guard`]), and a checkpoint whose space has been given back is ESTALE. An apply changes the base below an older
//!   checkpoint: whatever was found out while the base was exchanged is found out again ([`Fs::in_past`]).
//! * A link of a checkpoint is judged as if the checkpoint's root were the root of the mount, so it leads neither out nor
//!   into the live tree.
//!
//! Loading a cold checkpoint, and everything while space is given back, may take long: [`Fs::past_is_at_hand`] says when it does
//! not, for the thread that answers the kernel.

mod history;
mod links;
mod table;
mod top;
mod tree;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, RwLockReadGuard};

use crate::error::{Error, FsError, FsResult, Kind, Result};
use crate::fs::merged::lower::Lower;
use crate::fs::{Attr, Entry, Fs, State};
use crate::store::layer::LayerInfo;
use crate::sys::clock;
use crate::tree::{Body, Tree};
use crate::types::{FileKind, Ino, LayerId, Name, NodeId, Timestamp, TreePath, digits};

pub use links::Origin;
use table::{Node, Table, What};

/// Trees that are kept, those that were used last.
const TREES: usize = 8;

/// How the past is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapdirView {
    /// The name in the root of the mount.
    pub name: Name,
    /// Whether the root lists it. It can be entered in any case.
    pub listed: bool,
    /// Whether mkdir(2) in `checkpoints` makes one.
    pub makes: bool,
}

/// A text that is made anew for whoever looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Text {
    /// How the sandbox stands.
    Status,
    /// The checkpoints.
    Log,
}

/// Who knows the past: the rank above.
pub trait Archive: Send + Sync {
    /// The tree of a sealed layer.
    ///
    /// # Errors
    /// Damage; [`Kind::NoStore`] for one that is gone.
    fn tree(&self, layer: LayerId) -> Result<Tree>;

    /// Makes a checkpoint. Called from a thread that serves no request.
    ///
    /// # Errors
    /// A name that cannot be one ([`Kind::Usage`]), or what the store answers.
    fn checkpoint(&self, name: String) -> Result<LayerId>;

    /// A text. Called from a thread that serves no request.
    ///
    /// # Errors
    /// What the sandbox answers.
    fn text(&self, which: Text) -> Result<String>;

    /// The layer at or below `from` that last changed a node; none if no layer did.
    ///
    /// # Errors
    /// As [`Archive::tree`].
    fn last_change(&self, ino: Ino, from: Option<LayerId>) -> Result<Option<LayerId>>;

    /// The layer right below the one that is written to.
    fn parent(&self) -> Option<LayerId>;
}

/// A tree that is kept.
struct Kept {
    layer: LayerId,
    tree: Tree,
    /// The base in its epoch, as it was found when the tree was last used.
    below: Option<Below>,
}

/// The base in an epoch, and what the live tree lay over when that was made.
struct Below {
    lower: Arc<Lower>,
    live: Arc<Lower>,
}

/// The past of a head.
#[derive(Default)]
pub(super) struct Snapdir {
    archive: Mutex<Option<Arc<dyn Archive>>>,
    view: Mutex<Option<(SnapdirView, Timestamp)>>,
    table: Mutex<Table>,
    trees: Mutex<VecDeque<Kept>>,
    listing: Mutex<Option<(NodeId, Arc<tree::Names>)>>,
    shown: Mutex<Option<history::Listing>>,
}

impl Fs {
    /// Says who knows the past.
    pub fn set_archive(&self, archive: Arc<dyn Archive>) {
        *self.snapdir.archive.lock() = Some(archive);
    }

    /// Says how the past is shown from now on; none: not at all. Before the mount is seen by anybody.
    ///
    /// # Errors
    /// [`Kind::CannotMount`] if the root has the name already.
    pub fn show_snapdir(&self, view: Option<SnapdirView>) -> Result<()> {
        let mut core = self.core();
        if let Some(view) = &view {
            let attempt = || format!("show the checkpoints as '{}'", view.name);
            let (root, lower) = core.state.root();
            // Not by a lookup: the base may be a mount of ours, whose own past has this name and is not listed.
            let names = core.state.merged_names(root, lower.as_ref());
            let names = names
                .map_err(|error| Error::new(Kind::CannotMount, attempt(), error.to_string()))?;
            if names.contains_key(&view.name) {
                return Err(Error::new(Kind::CannotMount, attempt(), "the tree has something of this name")
                    .hint("'-o snapname=NAME' ('--snapname NAME' of run) takes another name, 'snapdir=off' ('--snapdir off') none"));
            }
        }
        core.snapdir_name = view.as_ref().map(|view| view.name.clone());
        *self.snapdir.view.lock() = view.map(|view| (view, clock::now()));
        Ok(())
    }

    /// Whether the past is shown at all.
    pub fn shows_snapdir(&self) -> bool {
        self.snapdir.view.lock().is_some()
    }

    pub(super) fn snapdir_view(&self) -> Option<SnapdirView> {
        self.snapdir.view.lock().as_ref().map(|(view, _)| view.clone())
    }

    fn past_since(&self) -> Timestamp {
        self.snapdir.view.lock().as_ref().map(|(_, since)| *since).unwrap_or_default()
    }

    fn archive(&self) -> FsResult<Arc<dyn Archive>> {
        self.snapdir.archive.lock().clone().ok_or(FsError::NotFound)
    }

    /// Whether an operation on a node of the past (with a name in it) needs to wait for nothing. As long as the guard lives
    /// that stays so.
    pub fn past_is_at_hand(
        &self,
        id: NodeId,
        name: Option<&Name>,
    ) -> Option<RwLockReadGuard<'_, ()>> {
        let layer = match (self.snapdir.table.lock().get(id)?, name) {
            (What::Node(node), _) => Some(node.layer),
            (What::Checkpoints, Some(name)) => {
                self.checkpoint_called(name).map(|info| info.header.layer)
            }
            (What::Top, Some(name))
                if [top::CHECKPOINTS, top::HISTORY].contains(&name.as_bytes()) =>
            {
                None
            }
            (What::Top, Some(_)) => return None,
            (What::Top | What::Checkpoints | What::Text(..) | What::Alias(..), _) => None,
            (What::Path(_) | What::Version(_), _) => None,
        };
        let guard = self.reclaim.try_read()?;
        let is_kept = |layer| self.snapdir.trees.lock().iter().any(|kept| kept.layer == layer);
        layer.is_none_or(is_kept).then_some(guard)
    }

    /// Number of nodes of the past that the kernel holds.
    pub fn held_snapdir(&self) -> usize {
        self.snapdir.table.lock().count()
    }

    /// The states of which the kernel holds nodes: somebody looks into them, or did lately.
    pub fn layers_looked_into(&self) -> BTreeSet<LayerId> {
        self.snapdir.table.lock().layers()
    }

    /// The names by which the kernel knows the nodes that it holds of a state; none if it holds more than `most`.
    ///
    /// # Errors
    /// A state that is gone, or what the store answers.
    pub fn names_looked_into(
        &self,
        layer: LayerId,
        most: usize,
    ) -> FsResult<BTreeSet<(NodeId, Name)>> {
        let held = self.snapdir.table.lock().of_layer(layer);
        if held.len() > most {
            return Ok(BTreeSet::new());
        }
        self.in_past(layer, |state| {
            let by_ino: HashMap<Ino, NodeId> =
                held.iter().map(|(id, node)| (node.ino, *id)).collect();
            let in_base = |node: &Node| match state.tree.node(node.ino).map(|known| &known.body) {
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

    pub(super) fn past_forget(&self, id: NodeId, count: u64) {
        self.snapdir.table.lock().forget(id, count);
    }

    fn past_node(&self, id: NodeId) -> FsResult<What> {
        if self.snapdir.view.lock().is_none() {
            return Err(FsError::NotFound);
        }
        self.snapdir.table.lock().get(id).ok_or(FsError::NotFound)
    }

    /// Finds something out about a checkpoint. What was found out while the base below was exchanged does not count.
    fn in_past<T>(&self, layer: LayerId, look: impl Fn(&State) -> FsResult<T>) -> FsResult<T> {
        // Recursively, because the caller may hold it already to know that nothing must be waited for.
        let _guard = self.reclaim.read_again();
        loop {
            let (state, live) = self.past_state(layer)?;
            let told = look(&state);
            if Arc::ptr_eq(&live, &self.core().state.lower) {
                return told;
            }
        }
    }

    /// The state of a checkpoint, and what the live tree lies over at this moment. While space is not given back.
    fn past_state(&self, layer: LayerId) -> FsResult<(State, Arc<Lower>)> {
        let info = self.store.layer(layer).filter(is_state).ok_or(FsError::Stale)?;
        let live = Arc::clone(&self.core().state.lower);
        let epoch = info.header.epoch;
        let since = usize::try_from(epoch.0).unwrap_or(usize::MAX);
        if live.history().iter().skip(since).any(|images| images.is_collected()) {
            return Err(FsError::Stale);
        }
        let known = {
            let mut trees = self.snapdir.trees.lock();
            // Whatever lay below the live tree before keeps files open, and nobody looks at it again.
            let is_pending = |below: &mut Below| !Arc::ptr_eq(&below.live, &live);
            trees.iter_mut().for_each(|kept| drop(kept.below.take_if(is_pending)));
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
        trees.push_front(Kept {
            layer,
            tree,
            below: Some(Below { lower, live: Arc::clone(&live) }),
        });
        trees.truncate(TREES);
        Ok((state, live))
    }

    /// The checkpoint that a name in `checkpoints` means: its name, or the number of any sealed state.
    fn checkpoint_called(&self, name: &Name) -> Option<LayerInfo> {
        let text = std::str::from_utf8(name.as_bytes()).ok()?;
        if let Some(number) = digits(text) {
            let info = self.store.layer(LayerId(number)).filter(is_state)?;
            return (info.header.layer.to_string() == text).then_some(info);
        }
        let mut all = self.store.catalog();
        all.retain(|info| is_state(info) && name_of(info) == Some(text));
        all.pop()
    }

    /// What `stat` shows of a node of a checkpoint.
    fn past_attr(&self, id: NodeId, attr: Attr) -> Attr {
        Attr { ino: Ino(id.0), ..attr }
    }

    /// Hands out the root of a checkpoint.
    fn hold_root(&self, layer: LayerId) -> FsResult<Entry> {
        let attr = self.in_past(layer, |state| {
            let found = state.resolve(&TreePath::root())?;
            state.attr(&found).ok_or(FsError::NotFound)
        })?;
        let node = Node { layer, ino: Ino::ROOT, base: Some(TreePath::root()) };
        let id = self.snapdir.table.lock().hold(node);
        Ok(Entry { id, attr: self.past_attr(id, attr) })
    }
}

/// Whether a layer completes a state that can be shown.
fn is_state(info: &LayerInfo) -> bool {
    info.seal.is_some() && info.header.kind.is_of_head()
}

/// The name of a checkpoint.
fn name_of(info: &LayerInfo) -> Option<&str> {
    info.seal.as_ref()?.name.as_deref()
}

/// The number that `..` has in the listing of a directory.
fn dir_entry(ino: NodeId, cookie: u64, kind: FileKind, name: &[u8]) -> crate::fs::DirEntry {
    crate::fs::DirEntry { ino: Ino(ino.0), cookie, kind, name: name.to_vec() }
}
