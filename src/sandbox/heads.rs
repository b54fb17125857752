//! The heads of an open store: one [`Sandbox`] each.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::base::Base;
use crate::error::Result;
use crate::jail::Jail;
use crate::sandbox::collector::CollectionTerms;
use crate::sandbox::housekeeper::KeeperSlot;
use crate::sandbox::{Fork, Policy, Rev, Sandbox, reclaimer, snapdir};
use crate::store::Store;
use crate::timeline::forks::HeadInfo;
use crate::timeline::{Common, Timeline};

/// The parts that the sandboxes of one open store share.
pub(super) struct Shared {
    pub(super) store_path: PathBuf,
    pub(super) base_path: PathBuf,
    /// The rules of the background collection.
    pub(super) terms: Arc<Mutex<CollectionTerms>>,
    /// The background threads of the store.
    pub(super) keeper: Arc<KeeperSlot>,
    /// The sandboxes, by head.
    heads: Mutex<BTreeMap<String, Weak<Sandbox>>>,
}

/// Opens one head of a store.
pub(super) fn open(store: Store, base: Base, head: &str) -> Result<Arc<Sandbox>> {
    let shared = Arc::new(Shared {
        store_path: store.dir().path().to_owned(),
        base_path: PathBuf::from(OsStr::from_bytes(base.path())),
        terms: Arc::default(),
        keeper: Arc::default(),
        heads: Mutex::default(),
    });
    open_head(&Common::open(Arc::new(store), Arc::new(base))?, &shared, head)
}

/// The sandbox of a head: the one that is open, or a new one.
fn open_head(common: &Arc<Common>, shared: &Arc<Shared>, head: &str) -> Result<Arc<Sandbox>> {
    let base = common.base().path();
    let jail = Jail {
        policy: Policy::Deny,
        mount_point: base.to_owned(),
        base_path: base.to_owned(),
        allowed_targets: Vec::new(),
    };
    let timeline = Timeline::open(common, head, jail)?;
    let mut heads = shared.heads.lock();
    if let Some(open) = heads.get(head).and_then(Weak::upgrade) {
        return Ok(open);
    }
    timeline.fs().set_reclaimer(reclaimer(&timeline, None));
    let sandbox = Arc::new(Sandbox {
        timeline,
        shared: Arc::clone(shared),
        mount_point: Mutex::new(None),
        housekeeper: Mutex::new(None),
        interrupts: AtomicU64::new(0),
    });
    sandbox.fs().set_archive(Arc::new(snapdir::Records::of(&sandbox)));
    heads.retain(|_, sandbox| sandbox.strong_count() > 0);
    heads.insert(head.to_owned(), Arc::downgrade(&sandbox));
    Ok(sandbox)
}

impl Sandbox {
    /// The name of the head.
    pub fn head_name(&self) -> &str {
        self.timeline.head()
    }

    /// The sandbox of another head of the same open store. While one is open, it is that one.
    ///
    /// Waits for the operation that is running.
    ///
    /// # Errors
    /// [`Kind::NoStore`](crate::error::Kind::NoStore) if there is no such head; damage; a failure
    /// of the store.
    pub fn head(&self, name: &str) -> Result<Arc<Sandbox>> {
        open_head(self.timeline.common(), &self.shared, name)
    }

    /// The sandbox of another head, for a request to this one that reads it.
    ///
    /// # Errors
    /// As [`Sandbox::head`], and [`Kind::InUse`] if only some states are seen from here.
    pub(super) fn seen_head(&self, name: &str) -> Result<Arc<Sandbox>> {
        self.check_seen(name)?;
        self.head(name)
    }

    /// Makes heads.
    pub(super) fn fork(&self, names: &[String], from: Option<&Rev>) -> Result<Vec<Fork>> {
        let made = match from {
            None | Some(Rev::Now) => self.timeline.fork(names, None)?,
            // The other head is sealed as it is now.
            Some(Rev::Head { head, back: 0 }) if head != self.head_name() => {
                self.seen_head(head)?.timeline.fork(names, None)?
            }
            Some(Rev::Head { back: 0, .. }) => self.timeline.fork(names, None)?,
            Some(rev) => self.timeline.fork(names, Some(self.target(rev)?))?,
        };
        Ok(made.into_iter().map(|info| self.fork_of(info)).collect())
    }

    /// The heads, by name.
    pub(super) fn forks(&self) -> Result<Vec<Fork>> {
        Ok(self.timeline.head_list()?.into_iter().map(|info| self.fork_of(info)).collect())
    }

    /// Drops another head. Waits for the readers of states.
    pub(super) fn drop_fork(&self, name: &str) -> Result<()> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        self.timeline.drop_head(name)
    }

    fn fork_of(&self, info: HeadInfo) -> Fork {
        let open = self.shared.heads.lock().get(&info.name).and_then(Weak::upgrade);
        let mount = open.and_then(|sandbox| sandbox.mount_point.lock().clone());
        let (parent, forked_at) =
            info.forked_from.map_or((None, None), |from| (Some(from.head), Some(from.layer)));
        Fork {
            name: info.name,
            parent,
            forked_at,
            time: info.time,
            top: info.top,
            mount_point: mount.map(|path| path.into_os_string().into_vec()),
        }
    }
}
