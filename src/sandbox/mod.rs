//! The front door of the library: a [`Sandbox`] is a base directory and the store of its changes.
//!
//! A sandbox shows the **merged tree**: the files of the base with the recorded changes over them.
//! Files are changed through [`Sandbox::fs`], here directly or by the kernel through a mount. All
//! other work is a [`Request`] to [`Sandbox::handle`]: [checkpoint](Request::Checkpoint),
//! [restore](Request::Restore), [diff](Request::Diff), [apply](Request::Apply) and so on. The
//! [`Reply`] is data; the library never prints.
//!
//! # Example
//!
//! A file is written, checkpointed, overwritten, compared and restored. No mount is needed.
//!
//! ```
//! use jailfs::error::FsError;
//! use jailfs::sandbox::{Caller, ChangeKind, Detail, Reply, Request, Rev, Sandbox, StoreOptions};
//! use jailfs::types::{Name, NodeId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The base is any directory; the store is created at its first use.
//! let dir = tempfile::tempdir()?;
//! let (base, store) = (dir.path().join("base"), dir.path().join("store"));
//! std::fs::create_dir(&base)?;
//! std::fs::write(base.join("notes"), "from the base\n")?;
//! let sandbox = Sandbox::create_or_open(&base, &store, &StoreOptions::default())?;
//! let fs = sandbox.fs();
//!
//! // Write a new file. The parameters are those of mknod(2) and write(2).
//! let name = Name::new(b"report").map_err(FsError::from)?;
//! let caller = Caller { uid: 0, gid: 0 };
//! let file = fs.mknod(NodeId::ROOT, &name, 0o100_644, 0, 0o022, caller)?;
//! fs.write(file.id, 0, b"first\n", false)?;
//!
//! // A checkpoint keeps the tree as it is now.
//! let checkpoint = Request::Checkpoint { name: Some("first".into()), message: String::new() };
//! sandbox.handle(checkpoint)?;
//! fs.write(file.id, 0, b"other\n", false)?;
//!
//! // A diff lists the changed paths, here with a patch.
//! let Reply::Diff(changes) = sandbox.handle(Request::Diff {
//!     from: Rev::Name("first".into()),
//!     to: Rev::Now,
//!     paths: Vec::new(),
//!     detail: Detail::Patch,
//! })?
//! else {
//!     unreachable!("a diff is answered with a diff")
//! };
//! let changes = changes.to_vec()?;
//! assert_eq!((changes.len(), changes[0].kind), (1, ChangeKind::Modified));
//! let patch = changes[0].patch.as_deref().unwrap_or_default();
//! assert!(String::from_utf8_lossy(patch).contains("-first\n+other\n"));
//!
//! // A restore makes the tree equal to the checkpoint. The file has a new id: look it up again.
//! sandbox.handle(Request::Restore {
//!     to: Rev::parse("first"),
//!     paths: Vec::new(),
//!     dry_run: false,
//!     detach_mounts: false,
//! })?;
//! let file = fs.lookup(NodeId::ROOT, &name)?;
//! assert_eq!(fs.read(file.id, 0, 100)?.read(false)?.as_deref(), Some(&b"first\n"[..]));
//!
//! // The base changes only by `Request::Apply`.
//! assert!(!base.join("report").exists());
//! sandbox.handle(Request::Apply {
//!     paths: Vec::new(),
//!     dry_run: false,
//!     undo: false,
//!     consent: Default::default(),
//! })?;
//! assert_eq!(std::fs::read_to_string(base.join("report"))?, "first\n");
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//!
//! * The base does not change before an apply.
//! * A [`Sandbox`] holds the lock of its store until it is dropped. Another process, or a second
//!   sandbox over the same store, gets [`Kind::InUse`](crate::error::Kind::InUse).
//! * A completed operation survives the death of the process. [`Fs::sync`] makes it survive a power
//!   cut, unless the store is [volatile](StoreOptions::volatile).
//! * An operation that replaces the tree first seals the tree as it is, so it can be undone with
//!   [`Request::OpRestore`].
//! * A sandbox can be shared between threads. Requests that replace the state run one at a time.
//!
//! # Why requests are data
//!
//! A mounted sandbox is held by its daemon. A command sends it the same [`Request`] over the
//! control socket that it would handle itself without a daemon. So each operation exists once, and
//! the command line, the socket and an embedding program cannot differ.

mod apply;
mod base_location;
pub(crate) mod changes;
mod collector;
pub(crate) mod date;
mod diff;
mod early;
mod edits;
mod export;
mod handle;
mod heads;
mod housekeeper;
mod maintenance;
mod merge;
mod race;
mod reply;
mod request;
mod restore;
mod show;
mod snapdir;
mod states;
mod status;
pub mod transfer;
mod worker;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::base::Base;
use crate::error::{Attempt, Result};
use crate::fs::Reclaimer;
use crate::jail::Jail;
use crate::sandbox::collector::CollectorHandle;
use crate::sandbox::early::EarlyCheckpoint;
use crate::sandbox::heads::Shared;
use crate::sandbox::housekeeper::Housekeeper;
use crate::store;
use crate::store::Store;
use crate::timeline::Timeline;
use crate::types::{LayerId, TreePath};

pub use crate::fs::{
    Attr, Caller, Entry, Fs, Kernel, ReadPlan, Refusal, RenameMode, SeekTo, SetAttr, SetTime,
    SetXattr, SnapdirView,
};
pub use crate::jail::Policy;
pub use crate::store::StoreOptions;
pub use crate::store::edits_log::Bounds;
pub use crate::timeline::apply::protected::{Consent, Protected};
pub use crate::timeline::{Policy as KeepPolicy, Savepoint};
pub(crate) use base_location::is_base_of;
pub use changes::{Change, ChangeKind, Changes};
pub use race::Race;
pub use reply::{
    Applied, Checked, Checkpoint, Collected, Described, EditKind, Exported, FileEdit, Fork,
    Imported, Info, LayerSpace, MAX_NOT_KEPT, Merged, Node, Operation, Reply, Restored, Shown,
    Status, Stepped,
};
pub use request::{
    DescribeTerms, Detail, ExportTerms, FileRev, ImportTerms, MergeTerms, Request, Rev,
};
pub use restore::ReplacedState;

/// The name of the first head of a store.
pub const FIRST_HEAD: &str = "main";

/// A head of a store, over the base. The [module](self) has an example.
pub struct Sandbox {
    timeline: Arc<Timeline>,
    shared: Arc<Shared>,
    /// The mount point, while it is mounted.
    mount_point: Mutex<Option<PathBuf>>,
    /// The background threads, while it is mounted.
    housekeeper: Mutex<Option<Housekeeper>>,
    /// Counts the calls of [`Sandbox::interrupt`]. A comparison ends when the count changes.
    interrupts: AtomicU64,
    /// The forks that programs in the mount have made by mkdir(2), each with the first layer that
    /// it could write.
    made: Mutex<BTreeMap<String, LayerId>>,
    /// The last checkpoint that was answered before it was on the disk.
    early: EarlyCheckpoint,
}

/// How a mount presents the tree.
pub struct View {
    /// Absolute path of the mount point.
    pub mount_point: PathBuf,
    /// How symbolic links that lead out of the mount are answered.
    pub policy: Policy,
    /// Absolute prefixes outside the mount that links may lead to.
    pub allowed_targets: Vec<Vec<u8>>,
    /// How the snapshot directory (`.jailfs`) is shown; `None` hides it completely.
    pub snapdir: Option<SnapdirView>,
}

/// Keeps paths of the base hidden until it is dropped; made by [`Sandbox::hide`].
pub struct Hiding(Arc<Sandbox>);

impl Drop for Hiding {
    fn drop(&mut self) {
        self.0.fs().state().lower.base().hide(Vec::new());
    }
}

impl Sandbox {
    /// Opens the store of a base, or creates it. Holds the store's lock until the sandbox is
    /// dropped.
    ///
    /// # Errors
    /// [`Kind::InUse`](crate::error::Kind::InUse) if another process has the store open. The store
    /// belongs to another base, or is damaged, or the host reports an error.
    pub fn create_or_open(
        base: &Path,
        store: &Path,
        options: &StoreOptions,
    ) -> Result<Arc<Sandbox>> {
        Sandbox::create_or_open_head(base, store, options, FIRST_HEAD)
    }

    /// As [`Sandbox::create_or_open`], for another head of the store. A new store gets it as its
    /// first one.
    ///
    /// # Errors
    /// [`Kind::NoStore`](crate::error::Kind::NoStore) if the store has no such head. Others as for
    /// [`Sandbox::create_or_open`].
    pub fn create_or_open_head(
        base: &Path,
        store: &Path,
        options: &StoreOptions,
        head: &str,
    ) -> Result<Arc<Sandbox>> {
        let base = Base::open(base)?;
        let store = if store::exists(store) {
            let has_moved = base_location::has_moved(store, &base, options)?;
            let mut store = Store::open(store, base.root_id(), *options)?;
            if has_moved {
                store.set_base(base.path())?;
            }
            store
        } else {
            Store::create(store, base.path(), base.root_id(), *options)?
        };
        heads::open(store, base, head)
    }

    /// Opens the first head of an existing store, and the base that it was created for.
    ///
    /// # Errors
    /// [`Kind::NoStore`](crate::error::Kind::NoStore) if there is no store at this path. Others as
    /// for [`Sandbox::create_or_open`].
    pub fn open(store: &Path) -> Result<Arc<Sandbox>> {
        Sandbox::open_head(store, FIRST_HEAD)
    }

    /// As [`Sandbox::open`], for another head.
    ///
    /// # Errors
    /// [`Kind::NoStore`](crate::error::Kind::NoStore) if the store has no such head. Others as for
    /// [`Sandbox::open`].
    pub fn open_head(store: &Path, head: &str) -> Result<Arc<Sandbox>> {
        let known = store::base_of(store)?;
        let path = Path::new(OsStr::from_bytes(&known.path));
        let base =
            Base::open(path).map_err(|error| base_location::explain_missing(error, store))?;
        let store = Store::open(store, base.root_id(), StoreOptions::default())?;
        heads::open(store, base, head)
    }

    /// The directory of the store.
    pub fn store_path(&self) -> &Path {
        &self.shared.store_path
    }

    /// The base directory.
    pub fn base_path(&self) -> &Path {
        &self.shared.base_path
    }

    /// The merged tree as a filesystem, for a mount or for direct use.
    pub fn fs(&self) -> &Arc<Fs> {
        self.timeline.fs()
    }

    /// Hides these host paths, and all below them, wherever the tree would show them from the base:
    /// in the mount and in replies. Paths outside the base are ignored. The paths are visible again
    /// when the returned guard is dropped; a second guard replaces the paths of the first.
    pub fn hide(self: &Arc<Sandbox>, paths: &[PathBuf]) -> Hiding {
        let below = paths.iter().filter_map(|path| path.strip_prefix(&self.shared.base_path).ok());
        let below = below.filter_map(|path| TreePath::parse(path.as_os_str().as_bytes()).ok());
        self.fs().state().lower.base().hide(below.collect());
        Hiding(Arc::clone(self))
    }

    /// Sets the rules for links and the snapshot directory. Call it before the mount is visible.
    ///
    /// # Errors
    /// [`Kind::CannotMount`](crate::error::Kind::CannotMount) if the tree already has the name of
    /// the snapshot directory.
    pub fn set_view(&self, view: View) -> Result<()> {
        self.fs().show_snapdir(view.snapdir)?;
        self.fs().set_jail(Jail {
            policy: view.policy,
            mount_point: view.mount_point.as_os_str().as_bytes().to_owned(),
            base_path: self.shared.base_path.as_os_str().as_bytes().to_owned(),
            allowed_targets: view.allowed_targets,
        });
        *self.mount_point.lock() = Some(view.mount_point);
        Ok(())
    }

    /// Connects the kernel of a mount, which must be notified of each change that it did not make.
    /// Starts the background threads.
    pub fn attach(&self, kernel: Arc<dyn Kernel>) {
        self.timeline.set_kernel(Some(kernel));
        match Housekeeper::start(&self.timeline, &self.shared.terms, &self.shared.keeper) {
            Ok(housekeeper) => {
                self.fs().set_reclaimer(reclaimer(&self.timeline, housekeeper.collector()));
                *self.housekeeper.lock() = Some(housekeeper);
            }
            Err(error) => log::warn!("start the background threads of the store: {error}"),
        }
    }

    /// Disconnects the kernel, ends the background threads, and syncs the store.
    ///
    /// # Errors
    /// The sync failed.
    pub fn detach(&self) -> Result<()> {
        self.timeline.set_kernel(None);
        self.fs().set_reclaimer(reclaimer(&self.timeline, None));
        // Dropping waits for the threads. The lock must be free by then.
        let housekeeper = self.housekeeper.lock().take();
        drop(housekeeper);
        *self.mount_point.lock() = None;
        self.fs().sync().attempt(|| "sync the store")
    }

    /// Reverts a part of [`Sandbox::set_view`], if the mount could not be made.
    pub fn set_unmounted(&self) {
        *self.mount_point.lock() = None;
    }

    /// Ends the comparisons in progress with an error, because no client waits for them any more. A
    /// comparison first finishes its current file.
    pub fn interrupt(&self) {
        self.interrupts.fetch_add(1, Ordering::SeqCst);
    }
}

/// Makes room on a full disk: first by trimming sealed layers, then by a garbage collection.
fn reclaimer(timeline: &Arc<Timeline>, collector: Option<Arc<CollectorHandle>>) -> Arc<Reclaimer> {
    let weak = Arc::downgrade(timeline);
    Arc::new(move || {
        let trimmed = weak.upgrade().map_or(Some(0), |timeline| timeline.reclaim_now());
        match (trimmed, &collector) {
            // `None` means unknown, because compaction is in progress and may free more. So the
            // answer is "nothing" only if both sides are sure of it.
            (Some(0) | None, Some(collector)) => {
                collector.ask().filter(|bytes| *bytes > 0 || trimmed.is_some())
            }
            (trimmed, _) => trimmed,
        }
    })
}
