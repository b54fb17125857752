//! The heads of an open store: one [`Sandbox`] each.

use std::collections::{BTreeMap, BTreeSet};
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
use crate::sandbox::early::EarlyCheckpoint;
use crate::sandbox::housekeeper::KeeperSlot;
use crate::sandbox::{Fork, Policy, Rev, Sandbox, reclaimer, snapdir};
use crate::store::Store;
use crate::timeline::forks::HeadInfo;
use crate::timeline::{Common, Timeline};
use crate::types::LayerId;

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
    /// The heads of the races that are not over.
    racing: Mutex<BTreeSet<String>>,
    /// Held while a race begins.
    pub(super) beginning: Mutex<()>,
}

/// Opens one head of a store.
pub(super) fn open(store: Store, base: Base, head: &str) -> Result<Arc<Sandbox>> {
    let shared = Arc::new(Shared {
        store_path: store.dir().path().to_owned(),
        base_path: PathBuf::from(OsStr::from_bytes(base.path())),
        terms: Arc::default(),
        keeper: Arc::default(),
        heads: Mutex::default(),
        racing: Mutex::default(),
        beginning: Mutex::default(),
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
        made: Mutex::default(),
        early: EarlyCheckpoint::default(),
    });
    sandbox.fs().set_archive(Arc::new(snapdir::Records::of(&sandbox)));
    heads.retain(|_, sandbox| sandbox.strong_count() > 0);
    heads.insert(head.to_owned(), Arc::downgrade(&sandbox));
    Ok(sandbox)
}

impl Sandbox {
    /// Waits until the checkpoints of all open heads that were reported early are on the disk.
    ///
    /// # Errors
    /// Why one is not.
    pub(super) fn wait_for_early_checkpoints(&self) -> Result<()> {
        let open: Vec<_> = self.shared.heads.lock().values().filter_map(Weak::upgrade).collect();
        open.iter().try_for_each(|sandbox| sandbox.early.wait())
    }

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

    /// The other heads that this one sees, each with the first layer that it could write. If only
    /// some states are seen, these are the forks that came from this head.
    pub(super) fn heads_seen(&self) -> BTreeMap<String, LayerId> {
        let points = self.timeline.store().fork_points();
        let since = |name: &str| {
            let point = points.get(name)?;
            Some(point.as_ref().map_or(LayerId(0), |point| point.since))
        };
        let own = self.head_name();
        let is_walled = self.fs().fence().is_some();
        // A head came from another one if that is older, as its name may be in use again.
        let comes_from_here = |name: &str| {
            let mut at = name;
            while let Some(Some(point)) = points.get(at) {
                if since(&point.head).is_none_or(|parent| parent >= point.since) {
                    return false;
                }
                if point.head == own {
                    return true;
                }
                at = &point.head;
            }
            false
        };
        let names = points.keys().filter(|name| *name != own);
        let seen = names.filter(|name| !is_walled || comes_from_here(name));
        seen.filter_map(|name| Some((name.clone(), since(name)?))).collect()
    }

    /// Notes that a program in the mount has made a fork.
    pub(super) fn note_made(&self, name: String) {
        if let Some(since) = self.heads_seen().get(&name) {
            self.made.lock().insert(name, *since);
        }
    }

    /// The forks that programs in the mount have made, by mkdir(2).
    pub fn made_forks(&self) -> Vec<String> {
        let seen = self.heads_seen();
        let made = self.made.lock();
        let are_there = made.iter().filter(|(name, since)| seen.get(*name) == Some(*since));
        are_there.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a program in the mount has made a fork, by mkdir(2).
    pub fn has_made(&self, name: &str) -> bool {
        self.made_forks().iter().any(|made| made == name)
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
        self.forget_race_heads(|head| names.contains(head));
        Ok(made.into_iter().map(|info| self.fork_of(info)).collect())
    }

    /// The heads, by name.
    pub(super) fn forks(&self) -> Result<Vec<Fork>> {
        let heads = self.timeline.head_list()?.into_iter();
        let mut heads: Vec<Fork> = heads.map(|info| self.fork_of(info)).collect();
        let mut abandoned = self.abandoned();
        // The forks that a command has made in an attempt go with the fork of the attempt.
        loop {
            let is_of = |head: &&mut Fork| {
                let is_in = |name: &String| abandoned.contains(name);
                !head.is_abandoned && (is_in(&head.name) || head.parent.as_ref().is_some_and(is_in))
            };
            let Some(head) = heads.iter_mut().find(is_of) else { return Ok(heads) };
            head.is_abandoned = true;
            abandoned.insert(head.name.clone());
        }
    }

    /// Marks heads as those of a race, before they are made. They are abandoned if this process is
    /// killed.
    ///
    /// # Errors
    /// A failure of the store.
    pub(super) fn mark_race(&self, names: &[String]) -> Result<()> {
        let store = self.timeline.store();
        let known = store.head_names();
        let mut racing = self.shared.racing.lock();
        let mut heads = store.race_heads();
        heads.retain(|head| known.contains(head) || racing.contains(head));
        heads.extend(names.iter().cloned());
        store.set_race_heads(heads)?;
        racing.extend(names.iter().cloned());
        Ok(())
    }

    /// Removes the marks of a race that is over. If it is abandoned, its heads are listed as such.
    pub(super) fn unmark_race(&self, names: &[String], is_abandoned: bool) {
        let store = self.timeline.store();
        let known = store.head_names();
        let mut racing = self.shared.racing.lock();
        let mut heads = store.race_heads();
        heads.retain(|head| !names.contains(head) || is_abandoned && known.contains(head));
        racing.retain(|head| !names.contains(head));
        if let Err(error) = store.set_race_heads(heads) {
            log::warn!("forks of a race may be listed as abandoned: {error}");
        }
    }

    /// The heads of races that were killed.
    fn abandoned(&self) -> BTreeSet<String> {
        let mut heads = self.timeline.store().race_heads();
        let racing = self.shared.racing.lock();
        heads.retain(|head| !racing.contains(head));
        heads
    }

    /// Removes the marks of heads that are no more, or are others now.
    fn forget_race_heads(&self, is_gone: impl Fn(&String) -> bool) {
        let store = self.timeline.store();
        let racing = self.shared.racing.lock();
        let mut heads = store.race_heads();
        let before = heads.len();
        heads.retain(|head| racing.contains(head) || !is_gone(head));
        if heads.len() < before
            && let Err(error) = store.set_race_heads(heads)
        {
            log::warn!("a head may be listed as abandoned: {error}");
        }
    }

    /// Drops another head. Waits for the readers of states.
    pub(super) fn drop_fork(&self, name: &str) -> Result<()> {
        let fs = Arc::clone(self.fs());
        let _exclusive = fs.exclusive();
        self.timeline.drop_head(name)?;
        self.made.lock().remove(name);
        self.forget_race_heads(|head| head == name);
        Ok(())
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
            is_abandoned: false,
            mount_point: mount.map(|path| path.into_os_string().into_vec()),
        }
    }
}
