//! The heads of an open store: one [`Sandbox`] each.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::base::Base;
use crate::error::{Error, Kind, Result};
use crate::jail::Jail;
use crate::sandbox::collector::CollectionTerms;
use crate::sandbox::{Fork, Policy, Rev, Sandbox, reclaimer, snapdir};
use crate::store::Store;
use crate::timeline::{Common, Timeline};

/// What the sandboxes of one open store share.
pub(super) struct Shared {
    pub(super) store_path: PathBuf,
    pub(super) base_path: PathBuf,
    /// The rules of the background collection.
    pub(super) terms: Arc<Mutex<CollectionTerms>>,
    /// The sandboxes, by head.
    heads: Mutex<BTreeMap<String, Weak<Sandbox>>>,
}

/// Opens one head of a store.
pub(super) fn open(store: Store, base: Base, head: &str) -> Result<Arc<Sandbox>> {
    let shared = Arc::new(Shared {
        store_path: store.dir().path().to_owned(),
        base_path: PathBuf::from(OsStr::from_bytes(base.path())),
        terms: Arc::default(),
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
    /// [`Kind::NoStore`] if there is no such head; damage; a failure of the store.
    pub fn head(&self, name: &str) -> Result<Arc<Sandbox>> {
        open_head(self.timeline.common(), &self.shared, name)
    }

    /// Makes heads.
    pub(super) fn fork(&self, names: &[String], _from: Option<&Rev>) -> Result<Vec<Fork>> {
        let attempt = format!("fork '{}'", names.join("', '"));
        Err(Error::new(Kind::Failed, attempt, "this version cannot fork yet"))
    }

    /// The heads.
    pub(super) fn forks(&self) -> Result<Vec<Fork>> {
        Err(Error::new(Kind::Failed, "list the forks", "this version cannot fork yet"))
    }

    /// Removes a head.
    pub(super) fn drop_fork(&self, name: &str) -> Result<()> {
        let attempt = format!("drop fork '{name}'");
        Err(Error::new(Kind::Failed, attempt, "this version cannot fork yet"))
    }
}
