//! The front door of the library: a base, its store, and what can be asked of them.
//!
//! With or without a mount it is the same [`Sandbox`]: the daemon holds one and serves it, a command without a daemon
//! opens one for itself, and a program that embeds jailfs works on it directly.

mod base_location;
pub(crate) mod changes;
mod collector;
pub(crate) mod date;
mod edits;
mod reply;
mod request;
mod show;
mod snapdir;
mod upkeep;

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use parking_lot::Mutex;

use crate::base::Base;
use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::{Found, Fs, Kernel, MOST_TRIES, Need, Reclaimer, SnapdirView, State, Step};
use crate::jail::{Jail, Policy};
use crate::sandbox::collector::Terms;
use crate::sandbox::upkeep::Housekeeper;
use crate::store;
use crate::store::Store;
use crate::store::layer::LayerInfo;
use crate::store::record::{Body, OpVerb};
use crate::sys::flags;
use crate::timeline::apply::protected;
use crate::timeline::diff;
use crate::timeline::diff::patch;
use crate::timeline::diff::patch::Wanted;
use crate::timeline::diff::{PathChange, What};
use crate::timeline::gc::Keep;
use crate::timeline::mounts::Mounts;
use crate::timeline::restore::RestoreOutcome;
use crate::timeline::{Target, Timeline, apply, verb_text};
use crate::types::{FileKind, Ino, LayerId, TreePath};

pub use crate::store::StoreOptions;
pub use crate::store::edits_log::Bounds;
pub use crate::timeline::apply::protected::{Consent, Protected};
pub use crate::timeline::{Policy as KeepPolicy, Savepoint};
pub use base_location::is_base_of;
pub use changes::{Change, ChangeKind, Changes};
pub use reply::{
    Applied, Checked, Checkpoint, Collected, EditKind, FileVersion, Info, LayerSpace, MOST_TOLD,
    Node, Operation, Reply, Restored, Shown, Status, Stepped,
};
pub use request::{Detail, FileRev, Request, Rev};

/// What is said of a path of the base at which something else is mounted.
const MOUNTED_UPON: &str = "something else is mounted there; it is shown empty";
/// Problems with the base that `status` tells.
const PROBLEMS: usize = 100;
/// The one head of a store.
const HEAD: &str = "main";

/// A base with its store.
pub struct Sandbox {
    timeline: Arc<Timeline>,
    store_path: PathBuf,
    base_path: PathBuf,
    mounted: Mutex<Option<PathBuf>>,
    /// Tidies up while it is mounted.
    housekeeper: Mutex<Option<Housekeeper>>,
    /// By what space is given back without being asked for.
    terms: Arc<Mutex<Terms>>,
    /// How many times what was under way was cut off.
    interrupts: AtomicU64,
}

/// How the mount is seen: what its links may do, and where it is.
pub struct View {
    /// Absolute path of the mount point.
    pub mount_point: PathBuf,
    /// How links are answered.
    pub policy: Policy,
    /// Prefixes outside the mount that links may lead to.
    pub allowed_targets: Vec<Vec<u8>>,
    /// How the checkpoints are shown in it; none: not at all.
    pub past: Option<SnapdirView>,
}

/// As long as it lives, something of the base is told to nobody.
pub struct Hiding(Arc<Sandbox>);

impl Drop for Hiding {
    fn drop(&mut self) {
        self.0.fs().state().lower.base().hide(Vec::new());
    }
}

impl Sandbox {
    /// Opens the store for a base, or makes it. Holds the store's lock until it is dropped.
    ///
    /// # Errors
    /// [`Kind::InUse`] for a store that another process holds, a store of another base, damage, or what the host answers.
    pub fn create_or_open(
        base: &Path,
        store: &Path,
        options: &StoreOptions,
    ) -> Result<Arc<Sandbox>> {
        let base = Base::open(base)?;
        let store = if store::exists(store) {
            let moved = base_location::is_elsewhere(store, &base, options)?;
            let mut store = Store::open(store, base.root_id(), *options)?;
            if moved {
                store.set_base(base.path())?;
            }
            store
        } else {
            Store::create(store, base.path(), base.root_id(), *options)?
        };
        Sandbox::new(store, base)
    }

    /// Opens an existing store and the base that it is for.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if there is none, else as [`Sandbox::create_or_open`].
    pub fn open(store: &Path) -> Result<Arc<Sandbox>> {
        let known = store::base_of(store)?;
        let path = Path::new(std::ffi::OsStr::from_bytes(&known.path));
        let base =
            Base::open(path).map_err(|error| base_location::explain_missing(error, store))?;
        Sandbox::new(Store::open(store, base.root_id(), StoreOptions::default())?, base)
    }

    fn new(store: Store, base: Base) -> Result<Arc<Sandbox>> {
        let store_path = store.dir().path().to_owned();
        let base_path = PathBuf::from(std::ffi::OsStr::from_bytes(base.path()));
        let jail = Jail {
            policy: Policy::Deny,
            mount_point: base.path().to_owned(),
            base_path: base.path().to_owned(),
            allowed_targets: Vec::new(),
        };
        let timeline = Timeline::open(Arc::new(store), Arc::new(base), HEAD, jail)?;
        let timeline = Arc::new(timeline);
        timeline.fs().set_reclaimer(more_room(&timeline, None));
        let sandbox = Arc::new(Sandbox {
            timeline,
            store_path,
            base_path,
            mounted: Mutex::new(None),
            housekeeper: Mutex::new(None),
            terms: Arc::default(),
            interrupts: AtomicU64::new(0),
        });
        sandbox.fs().set_archive(Arc::new(snapdir::Records::of(&sandbox)));
        Ok(sandbox)
    }

    /// The directory of the store.
    pub fn store_path(&self) -> &Path {
        &self.store_path
    }

    /// The base.
    pub fn base_path(&self) -> &Path {
        &self.base_path
    }

    /// The files, for a mount or for a program that works on them directly.
    pub fn fs(&self) -> &Arc<Fs> {
        self.timeline.fs()
    }

    /// Says what of the base nobody is told from now on, neither in the mount nor by [`Sandbox::handle`]: what is at and below these
    /// paths of the host, wherever the tree shows it. As long as the answer lives.
    pub fn hide(self: &Arc<Sandbox>, paths: &[PathBuf]) -> Hiding {
        let below = paths.iter().filter_map(|path| path.strip_prefix(&self.base_path).ok());
        let below = below.filter_map(|path| TreePath::parse(path.as_os_str().as_bytes()).ok());
        self.fs().state().lower.base().hide(below.collect());
        Hiding(Arc::clone(self))
    }

    /// Says by which rules links are answered from now on, and how the past is shown. Before the mount is seen by anybody.
    ///
    /// # Errors
    /// [`Kind::CannotMount`]: the past cannot be shown under a name that the tree has.
    pub fn set_view(&self, view: View) -> Result<()> {
        self.fs().show_snapdir(view.past)?;
        self.fs().set_jail(Jail {
            policy: view.policy,
            mount_point: view.mount_point.as_os_str().as_bytes().to_owned(),
            base_path: self.base_path.as_os_str().as_bytes().to_owned(),
            allowed_targets: view.allowed_targets,
        });
        *self.mounted.lock() = Some(view.mount_point);
        Ok(())
    }

    /// Says that a kernel looks at the files from now on.
    pub fn attach(&self, kernel: Arc<dyn Kernel>) {
        self.timeline.set_kernel(Some(kernel));
        match Housekeeper::start(&self.timeline, Arc::clone(&self.terms)) {
            Ok(housekeeper) => {
                self.fs().set_reclaimer(more_room(&self.timeline, Some(housekeeper.collector())));
                *self.housekeeper.lock() = Some(housekeeper);
            }
            Err(error) => log::warn!("nobody tidies the store up: {error}"),
        }
    }

    /// Says that no kernel looks at the files any more, and syncs what was written.
    ///
    /// # Errors
    /// When the sync fails.
    pub fn detach(&self) -> Result<()> {
        self.timeline.set_kernel(None);
        self.fs().set_reclaimer(more_room(&self.timeline, None));
        // It is waited for without its lock.
        let housekeeper = self.housekeeper.lock().take();
        drop(housekeeper);
        *self.mounted.lock() = None;
        self.fs().sync().attempt(|| "sync the store")
    }

    /// Does what is asked. [`Request::Unmount`] is for whoever holds the mount.
    ///
    /// # Errors
    /// Whatever goes wrong, in words; see [`Kind`].
    pub fn handle(&self, request: Request) -> Result<Reply> {
        if matches!(request, Request::Checkpoint { .. }) {
            self.need_checkpoint()?;
        }
        let mut reply = self.once(request.clone());
        // A full disk: what the upper layer does not need is given back, history goes, and the reserve is used.
        for _ in 0..MOST_TRIES {
            let is_full = reply.as_ref().is_err_and(|error| error.is_full() && !error.is_done)
                && !matches!(request, Request::Apply { .. });
            if !is_full || !self.fs().make_room(Need::Less) {
                break;
            }
            reply = self.once(request.clone());
            self.timeline.store().keep_reserve();
        }
        if let Some(housekeeper) = &*self.housekeeper.lock() {
            housekeeper.wake();
        }
        let is_done = reply.as_ref().is_err_and(|error| error.is_done);
        if is_done || matches!(reply, Ok(Reply::Checkpoint(_) | Reply::Collected(_))) {
            self.timeline.checkpoint_names_changed();
        }
        reply
    }

    /// A limit of what may be stored holds for checkpoints, too. No room is made for one: what is below it would have to go.
    fn need_checkpoint(&self) -> Result<()> {
        self.fs().need_checkpoint().map_err(|error| {
            let reason = format!("{error}: the sandbox has stored what it may");
            let full = Error::new(Kind::Failed, "make a checkpoint", reason);
            Error { errno: Some(Errno::ENOSPC as i32), ..full }.hint(
                "'jailfs drop' and 'jailfs gc' give room; --max-bytes and --max-files say how much there is",
            )
        })
    }

    /// Cuts off the comparisons that are under way: nobody waits for them any more. One that is at a file ends behind it.
    pub fn interrupt(&self) {
        self.interrupts.fetch_add(1, Ordering::SeqCst);
    }

    fn once(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Drop { rev } => self.drop_checkpoint(&rev).map(Reply::Checkpoint),
            Request::Hold { rev, held } => self.hold(&rev, held).map(Reply::Checkpoint),
            Request::Gc { operations, keep, max_store, dry_run } => {
                let spared = BTreeSet::new();
                let keep = Keep { operations, checkpoints: keep, store_bytes: max_store, spared };
                self.gc(&keep, dry_run).map(Reply::Collected)
            }
            Request::Check { read_data } => self.check(read_data).map(Reply::Checked),
            Request::Info => self.info().map(Reply::Info),
            request => self.handle_states(request),
        }
    }

    /// What looks at states, or makes them.
    fn handle_states(&self, request: Request) -> Result<Reply> {
        let fs = Arc::clone(self.fs());
        let interrupts = self.interrupts.load(Ordering::SeqCst);
        let _guard = fs.read_guard();
        match request {
            Request::Status => self.status().map(Reply::Status),
            Request::Log => Ok(Reply::Log(self.checkpoints())),
            Request::OpLog => Ok(Reply::OpLog(self.operations())),
            Request::Checkpoint { name, message } => {
                let id = self.timeline.checkpoint(name, message)?;
                self.checkpoint_info(id).map(Reply::Checkpoint)
            }
            Request::Diff { from, to, paths, detail } => {
                let go = || self.interrupts.load(Ordering::SeqCst) == interrupts;
                self.diff(&from, &to, &paths, detail, &go).map(Reply::Diff)
            }
            Request::Restore { to, paths, dry_run, detach_mounts } => {
                let mounts = mounts(detach_mounts);
                let target = self.target(&to)?;
                if !paths.is_empty() && !paths.iter().any(TreePath::is_root) {
                    return self
                        .restore_paths(target, &paths, dry_run, mounts)
                        .map(Reply::Restored);
                }
                let description = self.describe(target);
                self.go_to((OpVerb::Restore, mounts), target, description, dry_run)
                    .map(Reply::Restored)
            }
            Request::Show { rev, path, offset } => self.show(&rev, &path, offset).map(Reply::Shown),
            Request::Discard { detach_mounts } => {
                let (target, how) =
                    (self.target(&Rev::Base)?, (OpVerb::Discard, mounts(detach_mounts)));
                self.go_to(how, target, self.describe(target), false).map(Reply::Restored)
            }
            Request::History { path } => self.file_history(&path).map(Reply::History),
            Request::FileDiff { from, to, detail } => {
                self.file_diff(&from, &to, detail).map(Reply::Diff)
            }
            Request::Undo { path, steps } => {
                self.step(&path, Step::Undo(steps)).map(Reply::Stepped)
            }
            Request::Redo { path, steps } => {
                self.step(&path, Step::Redo(steps)).map(Reply::Stepped)
            }
            Request::OpRestore { op, detach_mounts } => {
                self.restore_operation(op, mounts(detach_mounts)).map(Reply::Restored)
            }
            Request::Apply { paths, dry_run, undo, consent } => {
                self.apply(&paths, dry_run, undo, consent).map(Reply::Applied)
            }
            Request::Drop { .. }
            | Request::Hold { .. }
            | Request::Gc { .. }
            | Request::Info
            | Request::Check { .. }
            | Request::Unmount => Err(Error::new(Kind::Failed, "unmount", "it is not mounted")),
        }
    }

    fn status(&self) -> Result<Status> {
        // It is there to tell what is wrong.
        let flushed = self.timeline.flush().map_err(|error| (TreePath::root(), error.to_string()));
        let last = self.last_checkpoint();
        let since = match last {
            Some(id) => self.timeline.state_of(self.sealed_target(id)?)?,
            None => self.timeline.base_state()?,
        };
        let now = self.fs().state();
        let is_advertised = |change: &PathChange| change.what != What::DirTimes;
        let changed =
            compare(last.is_none(), &since, &now).and_then(|walk| walk.count_of(is_advertised));
        let changed = changed.attempt(|| "compare with the last checkpoint")?;
        let to_apply = match last {
            None => changed,
            Some(_) => {
                let base = self.timeline.base_state()?;
                let count =
                    compare(true, &base, &now).and_then(|walk| walk.count_of(is_advertised));
                count.attempt(|| "compare with the base")?
            }
        };
        let (refusals, refused_count) = self.fs().refusals();
        let mount = self.mounted.lock().clone();
        Ok(Status {
            base: self.base_path.as_os_str().as_bytes().to_owned(),
            store: self.store_path.as_os_str().as_bytes().to_owned(),
            pid: mount.as_ref().map(|_| std::process::id()),
            mount: mount.map(|m| m.as_os_str().as_bytes().to_owned()),
            checkpoint: last.map(|id| self.checkpoint_info(id)).transpose()?,
            changed,
            to_apply,
            epoch: self.timeline.base_epoch(),
            store_bytes: self.timeline.store().disk_usage(),
            kernel_nodes: self.fs().held_nodes() as u64 - 1,
            refusals,
            refused_count,
            base_problems: self.base_problems(flushed.err()),
            sync_failed: self.fs().sync_has_failed(),
            rollback: self.timeline.unfinished_rollback(),
        })
    }

    /// What is wrong with the base, and what of it is not shown; behind what else there is to tell.
    fn base_problems(&self, first: Option<(TreePath, String)>) -> Vec<(TreePath, String)> {
        let mut problems: Vec<_> = first.into_iter().chain(self.fs().base_problems()).collect();
        match self.fs().state().lower.base().mounts_inside() {
            Ok(mounts) => {
                problems.extend(mounts.into_iter().map(|path| (path, MOUNTED_UPON.to_owned())))
            }
            Err(error) => {
                problems.push((TreePath::root(), format!("its mounts cannot be listed: {error}")))
            }
        }
        match self.timeline.changed_in_base(PROBLEMS) {
            Ok(changed) => {
                let known: BTreeSet<TreePath> =
                    problems.iter().map(|(path, _)| path.clone()).collect();
                problems.extend(changed.into_iter().filter(|(path, _)| !known.contains(path)));
            }
            Err(error) => problems.push((TreePath::root(), error.to_string())),
        }
        problems.truncate(PROBLEMS);
        problems
    }

    /// All sealed states, newest first.
    fn checkpoints(&self) -> Vec<Checkpoint> {
        let parent = self.timeline.parent();
        self.timeline.sealed().iter().rev().filter_map(|info| checkpoint_of(info, parent)).collect()
    }

    fn checkpoint_info(&self, id: LayerId) -> Result<Checkpoint> {
        let info = self.timeline.store().layer(id);
        info.as_ref()
            .and_then(|info| checkpoint_of(info, self.timeline.parent()))
            .ok_or_else(|| no_checkpoint(&Rev::Id(id)))
    }

    fn operations(&self) -> Vec<Operation> {
        let ops = self.timeline.store().ops();
        let numbered = ops.into_iter().map(|(number, op)| Operation {
            op: number,
            time: op.time,
            verb: verb_text(op.verb).to_owned(),
            description: op.description,
            tree: op.tree,
            epoch: op.epoch,
        });
        let mut operations: Vec<Operation> = numbered.collect();
        operations.reverse();
        operations
    }

    /// The last checkpoint that a person made, below the head.
    fn last_checkpoint(&self) -> Option<LayerId> {
        made_by_people(self.timeline.ancestry()).next()
    }

    fn sealed_target(&self, id: LayerId) -> Result<Target> {
        let info = self.timeline.store().layer(id).filter(|l| l.seal.is_some());
        let info = info.ok_or_else(|| no_checkpoint(&Rev::Id(id)))?;
        Ok(Target { layer: Some(id), epoch: info.header.epoch })
    }

    /// The checkpoint that a rev names.
    fn checkpoint_named(&self, rev: &Rev) -> Result<LayerId> {
        self.target(rev)?.layer.ok_or_else(|| no_checkpoint(rev))
    }

    fn target(&self, rev: &Rev) -> Result<Target> {
        match rev {
            Rev::Base => Ok(Target { layer: None, epoch: self.timeline.base_epoch() }),
            Rev::Id(id) => self.sealed_target(*id),
            Rev::Back(n) => {
                let made = made_by_people(self.timeline.lineage()).nth(*n as usize - 1);
                let id = made.ok_or_else(|| no_checkpoint(rev))?;
                self.sealed_target(id)
            }
            Rev::Name(name) => {
                let named =
                    |l: &LayerInfo| l.seal.as_ref().is_some_and(|s| s.name.as_ref() == Some(name));
                let info = self
                    .timeline
                    .sealed()
                    .into_iter()
                    .find(named)
                    .ok_or_else(|| no_checkpoint(rev))?;
                self.sealed_target(info.header.layer)
            }
            Rev::Now => Err(Error::new(Kind::Usage, "restore '@'", "'@' is the tree as it is now")),
        }
    }

    fn state(&self, rev: &Rev) -> Result<State> {
        match rev {
            Rev::Now => {
                self.timeline.flush()?;
                Ok(self.fs().state())
            }
            Rev::Back(_) | Rev::Base | Rev::Id(_) | Rev::Name(_) => {
                self.timeline.state_of(self.target(rev)?)
            }
        }
    }

    fn describe(&self, target: Target) -> String {
        let Some(id) = target.layer else { return "base".to_owned() };
        let name = self.timeline.store().layer(id).and_then(|l| l.seal).and_then(|s| s.name);
        name.map_or_else(|| format!("checkpoint {id}"), |name| format!("checkpoint {id} '{name}'"))
    }

    fn diff(
        &self,
        from: &Rev,
        to: &Rev,
        paths: &[TreePath],
        detail: Detail,
        go: &dyn Fn() -> bool,
    ) -> Result<Changes> {
        let (old, new) = (self.state(from)?, self.state(to)?);
        let attempt = || format!("compare {from} with {to}");
        let below = |path: &TreePath| paths.is_empty() || paths.iter().any(|p| path.starts_with(p));
        let mut lister = Lister { review: Some(self.timeline.protected()), ..self.lister(detail) };
        let with_base = [from, to].contains(&&Rev::Base);
        for change in compare(with_base, &old, &new).attempt(attempt)? {
            if !go() {
                return Err(Error::new(Kind::Failed, attempt(), "the sandbox is being closed"));
            }
            let change = change.attempt(attempt)?;
            if below(&change.path) || change.old_path.as_ref().is_some_and(below) {
                lister.take(&old, &new, &change).map_err(|error| error.during(attempt()))?;
            }
        }
        Ok(lister.finish())
    }

    /// Lists a comparison, without lines and patches.
    fn list(
        &self,
        old: &State,
        new: &State,
        walk: FsResult<diff::Comparison<'_>>,
        attempt: &str,
    ) -> Result<Changes> {
        let mut lister = self.lister(Detail::NameStatus);
        for change in walk.attempt(|| attempt)? {
            lister.take(old, new, &change.attempt(|| attempt)?)?;
        }
        Ok(lister.finish())
    }

    fn lister(&self, detail: Detail) -> Lister {
        Lister { detail, review: None, writer: changes::Writer::new(&self.store_path) }
    }

    fn go_to(
        &self,
        (verb, mounts): (OpVerb, Mounts),
        target: Target,
        description: String,
        dry_run: bool,
    ) -> Result<Restored> {
        if dry_run {
            self.timeline.flush()?;
            let (now, then) = (self.fs().state(), self.timeline.state_of(target)?);
            let walk = diff::compare_records(&now, &then);
            let changes = self.list(&now, &then, walk, "list what would change")?;
            let detached = self.timeline.detached_mounts((&now, &then), &[], Mounts::Detach)?;
            return Ok(Restored { to: description, before: None, undo: None, detached, changes });
        }
        let mut lister = self.lister(Detail::NameStatus);
        let mut list =
            |from: &State, to: &State, change: PathChange| lister.take(from, to, &change);
        let RestoreOutcome { before, undo, detached } =
            self.timeline.restore(verb, target, description.clone(), (mounts, &mut list))?;
        Ok(Restored { to: description, before, undo, detached, changes: lister.finish() })
    }

    /// Makes the tree what `to` is, whatever is in it now: nothing is compared. Returns what the tree was.
    ///
    /// # Errors
    /// As a restore.
    pub fn go_back(&self, to: &Rev) -> Result<Before> {
        let target = self.target(to)?;
        Ok(Before(self.timeline.discard(target, self.describe(target))?))
    }

    /// Lists how the tree, as it is now, differed in a past state, from the present one to that one.
    ///
    /// # Errors
    /// What the base or the store answers.
    pub fn changes_of(&self, past: &Before) -> Result<Changes> {
        let now = self.fs().state();
        self.list(&now, &past.0, diff::compare(&now, &past.0), "list what was discarded")
    }

    fn restore_paths(
        &self,
        target: Target,
        paths: &[TreePath],
        dry_run: bool,
        mounts: Mounts,
    ) -> Result<Restored> {
        let what = show::description(&self.describe(target), paths);
        if dry_run {
            self.timeline.flush()?;
            let (now, then) = (self.fs().state(), self.timeline.state_of(target)?);
            let listed =
                diff::changes_at(&now, &then, paths).attempt(|| "list what would change")?;
            let mut lister = self.lister(Detail::NameStatus);
            listed.iter().try_for_each(|change| lister.take(&now, &then, change))?;
            let changes = lister.finish();
            let detached = self.timeline.detached_mounts((&now, &then), paths, Mounts::Detach)?;
            return Ok(Restored { to: what, before: None, undo: None, detached, changes });
        }
        let mut lister = self.lister(Detail::NameStatus);
        let mut list =
            |from: &State, to: &State, change: PathChange| lister.take(from, to, &change);
        let RestoreOutcome { before, undo, detached } = self.timeline.restore_paths(
            OpVerb::Restore,
            target,
            paths,
            what.clone(),
            (mounts, &mut list),
        )?;
        Ok(Restored { to: what, before, undo, detached, changes: lister.finish() })
    }

    fn restore_operation(&self, op: u64, mounts: Mounts) -> Result<Restored> {
        let found = self.operations().into_iter().find(|o| o.op == op).ok_or_else(|| {
            Error::new(
                Kind::NoStore,
                format!("restore operation {op}"),
                "there is no such operation",
            )
            .hint("'jailfs op log' lists them")
        })?;
        let target = Target { layer: found.tree, epoch: found.epoch };
        self.go_to((OpVerb::OpRestore, mounts), target, format!("operation {op}"), false)
    }

    fn apply(
        &self,
        paths: &[TreePath],
        dry_run: bool,
        undo: bool,
        consent: Consent,
    ) -> Result<Applied> {
        let plan = match (undo, dry_run) {
            (false, false) => self.timeline.apply(paths, consent)?,
            (false, true) => self.timeline.plan_apply(paths, consent)?,
            (true, false) => self.timeline.undo_apply()?,
            (true, true) => self.timeline.plan_undo()?,
        };
        self.applied(plan, dry_run)
    }

    fn applied(&self, plan: apply::plan::Plan, is_review: bool) -> Result<Applied> {
        let review = is_review.then(|| self.timeline.protected());
        let mut lister = Lister { review, ..self.lister(Detail::NameStatus) };
        plan.changes.iter().try_for_each(|change| lister.take(&plan.from, &plan.to, change))?;
        let (conflicts, refused, is_rollback) = (plan.conflicts, plan.refused, plan.is_rollback);
        let not_kept_count = plan.not_kept.len() as u64;
        let not_kept = plan.not_kept.into_iter().take(MOST_TOLD);
        let not_kept = not_kept.map(|(path, what)| (path, not_kept_text(what))).collect();
        let (changes, epoch) = (lister.finish(), self.timeline.base_epoch());
        Ok(Applied { changes, epoch, conflicts, refused, not_kept, not_kept_count, is_rollback })
    }
}

/// Compares two states, of which one may be the base as it is.
fn compare<'a>(with_base: bool, old: &'a State, new: &'a State) -> FsResult<diff::Comparison<'a>> {
    let walk = diff::compare(old, new)?;
    Ok(if with_base { walk.with_base() } else { walk })
}

fn not_kept_text(what: apply::plan::NotKept) -> String {
    match what {
        apply::plan::NotKept::Time { wanted, kept } => {
            let (wanted, kept) = (date::utc(wanted), date::utc(kept));
            format!("the filesystem of the base cannot hold its time {wanted}, and has {kept}")
        }
        apply::plan::NotKept::Flags(lost) => {
            format!("its flags '{}' of chattr(1) are lost", flags::letters(lost))
        }
    }
}

/// Who makes room on a full disk: what is not seen by anybody goes first, then what nothing needs.
fn more_room(
    timeline: &Arc<Timeline>,
    collector: Option<Arc<collector::Shared>>,
) -> Arc<Reclaimer> {
    let weak = Arc::downgrade(timeline);
    Arc::new(move || {
        let own = weak.upgrade().map_or(Some(0), |timeline| timeline.make_room());
        match (own, &collector) {
            // Whoever tidies up may yet find something, so that there is nothing is known only if both say so.
            (Some(0) | None, Some(collector)) => {
                collector.ask().filter(|bytes| *bytes > 0 || own.is_some())
            }
            (own, _) => own,
        }
    })
}

/// What to do with mounts inside that would be detached.
fn mounts(detach: bool) -> Mounts {
    if detach { Mounts::Detach } else { Mounts::Refuse }
}

/// Those of some states that somebody asked for.
fn made_by_people(states: Vec<LayerInfo>) -> impl Iterator<Item = LayerId> {
    let is_made = |l: &LayerInfo| l.seal.as_ref().is_some_and(|seal| !seal.automatic);
    states.into_iter().filter(is_made).map(|l| l.header.layer)
}

fn no_checkpoint(rev: &Rev) -> Error {
    Error::new(Kind::NoStore, format!("find checkpoint '{rev}'"), "there is no such checkpoint")
        .hint("'jailfs log' lists them")
}

fn checkpoint_of(info: &LayerInfo, parent: Option<LayerId>) -> Option<Checkpoint> {
    let seal = info.seal.as_ref()?;
    Some(Checkpoint {
        id: info.header.layer,
        name: seal.name.clone(),
        message: seal.message.clone(),
        time: seal.time,
        parent: info.header.parent,
        epoch: info.header.epoch,
        automatic: seal.automatic,
        current: parent == Some(info.header.layer),
    })
}

/// A state that the tree had. It is a value: nothing that happens to the tree changes it.
pub struct Before(State);

/// Writes the list of the changes that people are told of.
struct Lister {
    detail: Detail,
    /// For a list that is read before an apply: the protected paths, because it says what is
    /// dangerous.
    review: Option<Protected>,
    writer: changes::Writer,
}

impl Lister {
    fn take(&mut self, old: &State, new: &State, change: &PathChange) -> Result<()> {
        if !is_advertised(old, new, change) {
            return Ok(());
        }
        let attempt = || format!("list '{}'", change.path);
        let mut told = change_of(old, new, change, self.detail).attempt(attempt)?;
        if let Some(protected) = &self.review {
            told.danger = protected::dangers(protected, (old, new), change).attempt(attempt)?;
        }
        self.writer.push(told)
    }

    fn finish(self) -> Changes {
        self.writer.finish()
    }
}

/// Whether a change is one that people are told of.
fn is_advertised(old: &State, new: &State, change: &PathChange) -> bool {
    change.what != What::DirTimes
        && !old.is_in_hidden(&change.old)
        && !new.is_in_hidden(&change.new)
}

fn change_of(
    old: &State,
    new: &State,
    change: &PathChange,
    detail: Detail,
) -> crate::error::FsResult<Change> {
    let (before, after) = (old.kind_and_size(&change.old), new.kind_and_size(&change.new));
    let size =
        |of: Option<(FileKind, u64)>| of.filter(|(kind, _)| *kind == FileKind::File).map(|of| of.1);
    let text = match detail {
        Detail::NameStatus => None,
        Detail::Stat => patch::text_of(old, new, change, Wanted::Lines)?,
        Detail::Patch => patch::text_of(old, new, change, Wanted::Patch)?,
    };
    let number = |found: &Found| found.ino();
    let target = match (&change.new, &after) {
        // After an apply a link that only the base has may stand elsewhere by now: it is listed without its target then.
        (found, Some((FileKind::Symlink, _))) => {
            new.node(found).ok().and_then(|node| match &node.body {
                Body::Symlink { target } => Some(target.clone()),
                Body::File { .. } | Body::Dir { .. } | Body::Special => None,
            })
        }
        _ => None,
    };
    Ok(Change {
        target,
        danger: None,
        path: change.path.clone(),
        kind: match change.what {
            What::Added => ChangeKind::Added,
            What::Deleted => ChangeKind::Deleted,
            What::Type => ChangeKind::TypeChanged,
            What::Content => ChangeKind::Modified,
            What::Links | What::Attributes | What::DirTimes => ChangeKind::Attributes,
            What::Renamed => ChangeKind::Renamed,
        },
        old_path: change.old_path.clone(),
        file: after.or(before).map_or(FileKind::File, |of| of.0),
        ino: number(&change.new).or(number(&change.old)).unwrap_or(Ino(0)),
        old_size: size(before),
        new_size: size(after),
        binary: text.as_ref().is_some_and(|t| t.lines.is_none()),
        lines: text.as_ref().and_then(|t| t.lines),
        patch: text.filter(|_| detail == Detail::Patch).map(|t| t.patch),
    })
}
