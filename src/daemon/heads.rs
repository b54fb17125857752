//! The mounted heads of a store.
//!
//! * A head has at most one mount. Its name is taken before the mount is made, so that two clients
//!   cannot mount it at the same time.
//! * Each mount has a thread that waits for its end. It then closes the head. Other heads do not
//!   notice, whether the mount was unmounted or has died.
//! * The store is open as long as a head is mounted. When the last one has ended, nothing more can
//!   be mounted.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use parking_lot::{Condvar, Mutex};

use super::guard::Guard;
use super::head::ServedHead;
use crate::control::{ENDING_LIMIT, Mounts, Waiting};
use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::{Mounted, Unmounter};
use crate::sandbox::{Detail, Reply, Request, Sandbox};

/// The head that a command means by default.
pub(super) const MAIN: &str = "main";
/// How long the end of a head waits for a comparison in progress.
const COMPARISON_LIMIT: Duration = Duration::from_secs(2);
/// How long a client that mounts a head waits for the end of a mount of it that is not visible any
/// more, but still in use.
const GONE_LIMIT: Duration = Duration::from_secs(2);
/// How often it looks whether that mount is visible.
const GONE_POLL: Duration = Duration::from_millis(20);

/// The mounted heads.
pub(super) struct Heads {
    table: Mutex<Table>,
    /// Notified when a head is mounted, and when one has ended.
    changed: Condvar,
    /// Comparisons run one at a time, because each takes a processor and memory.
    comparison: Mutex<()>,
    /// The sandbox of the comparison in progress.
    compared: Mutex<Weak<Sandbox>>,
    /// Started for the first mount; `None` before, or if it cannot be started.
    guard: Mutex<Option<Guard>>,
}

struct Table {
    heads: BTreeMap<String, Entry>,
    /// Keeps the store open while no head is mounted.
    root: Option<Arc<Sandbox>>,
    /// The heads whose races are not over. They keep the store open too.
    racing: Vec<Arc<Sandbox>>,
    /// Nothing more is mounted.
    is_ending: bool,
    /// Whether a signal has asked for the end.
    is_ended_by_signal: bool,
    /// The clients that have unmounted the last head. They wait until the store is closed.
    waiting: Vec<Arc<Waiting>>,
}

enum Entry {
    /// A mount is being made.
    Mounting,
    Mounted(Arc<ServedHead>),
}

impl Heads {
    /// No heads of a store. With `root`, the store stays open while no head is mounted.
    pub(super) fn new(root: Option<Arc<Sandbox>>) -> Heads {
        let table = Table {
            heads: BTreeMap::new(),
            root,
            racing: Vec::new(),
            is_ending: false,
            is_ended_by_signal: false,
            waiting: Vec::new(),
        };
        Heads {
            table: Mutex::new(table),
            changed: Condvar::new(),
            comparison: Mutex::new(()),
            compared: Mutex::default(),
            guard: Mutex::new(None),
        }
    }

    /// Makes a mount of the head `name` by `mount`. False if nothing more can be mounted.
    ///
    /// # Errors
    /// `InUse`: the head is mounted already. Others are those of `mount`.
    pub(super) fn mount(
        self: &Arc<Heads>,
        name: &str,
        mount: impl FnOnce() -> Result<(ServedHead, Mounted)>,
    ) -> Result<bool> {
        let Some(taken) = self.take_name(name)? else { return Ok(false) };
        let (head, mounted) = mount()?;
        let head = Arc::new(head);
        let guarded = self.have_guarded(&mounted);
        let mounted = head.have_it_answer(mounted).inspect_err(|_| self.end_guard(guarded))?;
        taken.set(Arc::clone(&head));
        let (heads, served) = (Arc::clone(self), Arc::clone(&head));
        let wait = move || {
            if let Err(error) = mounted.wait() {
                log::error!("head '{}': {error}", served.name());
            }
            heads.close(&served, guarded);
        };
        // If the thread is refused, the mount ends with the closure.
        let thread = thread::Builder::new().name("head".to_owned()).spawn(wait);
        let thread = thread.attempt(|| format!("wait for the end of head '{name}'"));
        thread.inspect_err(|_| self.close(&head, guarded))?;
        Ok(true)
    }

    /// Takes the name of a head for a mount. `None` if nothing more can be mounted.
    fn take_name(self: &Arc<Heads>, name: &str) -> Result<Option<Taken<'_>>> {
        let start = Instant::now();
        let mut table = self.table.lock();
        loop {
            if table.is_ending {
                return Ok(None);
            }
            let mounted = match table.heads.get(name) {
                None => break,
                Some(Entry::Mounting) => None,
                Some(Entry::Mounted(head)) => Some(Arc::clone(head)),
            };
            // umount(8) or a signal may just have removed the mount.
            if let Some(head) = mounted {
                let limit = if head.is_connected() { GONE_LIMIT } else { ENDING_LIMIT };
                if head.is_visible() || start.elapsed() >= limit {
                    return Err(head.in_use(name));
                }
            }
            self.changed.wait_for(&mut table, GONE_POLL);
        }
        table.heads.insert(name.to_owned(), Entry::Mounting);
        Ok(Some(Taken { heads: self, name: name.to_owned() }))
    }

    /// Has the guard abort the mount if this process dies.
    fn have_guarded(&self, mounted: &Mounted) -> Option<u64> {
        let abort = mounted.abort_file()?;
        let mut guard = self.guard.lock();
        if guard.is_none() {
            *guard = Guard::start().inspect_err(cannot_guard).ok();
        }
        guard.as_mut()?.watch(abort).inspect_err(cannot_guard).ok()
    }

    /// Tells the guard that a mount has ended.
    fn end_guard(&self, guarded: Option<u64>) {
        if let (Some(guard), Some(number)) = (&*self.guard.lock(), guarded) {
            guard.forget(number);
        }
    }

    /// Closes a head whose mount has ended.
    fn close(&self, head: &Arc<ServedHead>, guarded: Option<u64>) {
        self.end_guard(guarded);
        let sandbox = head.close();
        if let Some(sandbox) = &sandbox {
            self.interrupt(sandbox);
            if let Err(error) = sandbox.detach() {
                log::error!("head '{}': {error}", head.name());
            }
        }
        // With the last head, this closes the store.
        drop(sandbox);
        self.remove(head);
    }

    /// Ends the comparison in progress in `sandbox`, and waits a short time for it.
    fn interrupt(&self, sandbox: &Arc<Sandbox>) {
        sandbox.interrupt();
        let is_compared = || std::ptr::eq(self.compared.lock().as_ptr(), Arc::as_ptr(sandbox));
        if is_compared()
            && self.comparison.try_lock_for(COMPARISON_LIMIT).is_none()
            && is_compared()
        {
            log::warn!("ended without waiting for a comparison in progress");
        }
    }

    fn remove(&self, head: &Arc<ServedHead>) {
        let mut table = self.table.lock();
        table.heads.remove(head.name());
        if table.heads.is_empty() && table.root.is_none() && table.racing.is_empty() {
            table.is_ending = true;
            table.waiting.push(Arc::clone(head.waiting()));
        } else {
            head.waiting().end();
        }
        drop(table);
        self.changed.notify_all();
    }

    /// The mounted head of this name.
    pub(super) fn get(&self, name: &str) -> Option<Arc<ServedHead>> {
        match self.table.lock().heads.get(name) {
            Some(Entry::Mounted(head)) => Some(Arc::clone(head)),
            Some(Entry::Mounting) | None => None,
        }
    }

    /// Fails if the mount of a head was aborted or unmounted. Then the changes of the programs in
    /// it may be incomplete.
    ///
    /// # Errors
    /// `Failed`.
    pub(super) fn check_served(&self, name: &str) -> Result<()> {
        if self.get(name).is_some_and(|head| head.is_connected() && !head.is_detached()) {
            return Ok(());
        }
        let attempt = format!("serve head '{name}' until its command ended");
        Err(Error::new(Kind::Failed, attempt, "its mount was aborted or unmounted before"))
    }

    /// All mounted heads, by name.
    pub(super) fn mounted(&self) -> Vec<Arc<ServedHead>> {
        let table = self.table.lock();
        let mounted = table.heads.values().filter_map(|entry| match entry {
            Entry::Mounted(head) => Some(Arc::clone(head)),
            Entry::Mounting => None,
        });
        mounted.collect()
    }

    /// The mounted heads, for a client that means the head `meant`.
    pub(super) fn list(&self, meant: String, can_race: bool) -> Mounts {
        let heads = self.mounted().iter().map(|head| head.listed()).collect();
        Mounts { meant, heads, can_race }
    }

    /// The head that a client means if it names none: `main`, or the only mounted one.
    pub(super) fn default_head(&self) -> String {
        match &self.mounted()[..] {
            [only] => only.name().to_owned(),
            [] | [_, ..] => MAIN.to_owned(),
        }
    }

    /// The sandbox of a head, mounted or not. `None` if the store is closed.
    ///
    /// # Errors
    /// `NoStore`: there is no such head. Others: it cannot be opened.
    pub(super) fn sandbox(&self, name: &str) -> Result<Option<Arc<Sandbox>>> {
        let mounted = self.get(name).and_then(|head| head.sandbox().clone());
        match mounted.or_else(|| self.any_sandbox()) {
            Some(sandbox) if sandbox.head_name() == name => Ok(Some(sandbox)),
            Some(other) => other.head(name).map(Some),
            None => Ok(None),
        }
    }

    /// Whether a program in the mount of a head has made the fork `name`, by mkdir(2).
    pub(super) fn has_made(&self, head: &str, name: &str) -> bool {
        let mounted = self.get(head);
        mounted.is_some_and(|head| head.sandbox().as_ref().is_some_and(|open| open.has_made(name)))
    }

    /// The sandbox of any head. Waits for a mount that is being made, because the store is open
    /// then. `None` if the store is closed.
    fn any_sandbox(&self) -> Option<Arc<Sandbox>> {
        let mut table = self.table.lock();
        loop {
            let open = table.heads.values().find_map(|entry| match entry {
                Entry::Mounted(head) => head.open_sandbox(),
                Entry::Mounting => None,
            });
            let is_mounting = table.heads.values().any(|entry| matches!(entry, Entry::Mounting));
            let open = open.or_else(|| table.root.clone());
            let open = open.or_else(|| table.racing.first().cloned());
            if open.is_some() || !is_mounting {
                return open;
            }
            self.changed.wait(&mut table);
        }
    }

    /// Handles a request in the sandbox of a head, mounted or not.
    ///
    /// # Errors
    /// Those of the sandbox, and `NoStore` if there is no such head.
    pub(super) fn handle(&self, name: &str, request: Request) -> Result<Reply> {
        let ending = || Error::new(Kind::Failed, "answer a request", "the daemon is ending");
        if is_comparison(&request) {
            let _one = self.comparison.lock();
            let sandbox = self.sandbox(name)?.ok_or_else(ending)?;
            *self.compared.lock() = Arc::downgrade(&sandbox);
            let _done = Compared(&self.compared);
            return sandbox.handle(request);
        }
        if let Some(head) = self.get(name) {
            // The guard keeps the head from being closed before the reply.
            let open = head.sandbox();
            if let Some(sandbox) = &*open {
                return sandbox.handle(request);
            }
        }
        self.sandbox(name)?.ok_or_else(ending)?.handle(request)
    }

    /// Unmounts all heads because of a signal, and mounts nothing more. A mount in use is detached,
    /// and ends with its last user.
    pub(super) fn unmount_on(&self, signal: Signal) {
        {
            let mut table = self.table.lock();
            (table.is_ending, table.is_ended_by_signal) = (true, true);
        }
        let mounted = self.mounted();
        // A mount in use takes a while.
        thread::scope(|scope| {
            for head in &mounted {
                let unmount = move || unmount_on(signal, head.unmounter());
                let thread = thread::Builder::new().spawn_scoped(scope, unmount);
                if let Err(error) = thread {
                    log::debug!("start a thread that unmounts: {error}");
                    unmount_on(signal, head.unmounter());
                }
            }
        });
    }

    /// Whether a signal has asked for the end. Then the mounts of attempts end at once.
    pub(super) fn is_ended_by_signal(&self) -> bool {
        self.table.lock().is_ended_by_signal
    }

    /// Keeps the store open until the race of a head is over.
    pub(super) fn hold(heads: &Arc<Heads>, caller: Arc<Sandbox>) -> Held {
        heads.table.lock().racing.push(Arc::clone(&caller));
        Held { heads: Arc::clone(heads), caller: Some(caller) }
    }

    /// Waits until no head is mounted. Waits for races, too, unless a signal has asked for the end.
    pub(super) fn wait(&self) {
        let mut table = self.table.lock();
        while !table.heads.is_empty() || !(table.racing.is_empty() || table.is_ending) {
            self.changed.wait(&mut table);
        }
    }

    /// Whether the store stays open while no head is mounted.
    pub(super) fn is_kept_open(&self) -> bool {
        self.table.lock().root.is_some()
    }

    /// Ends the mount of one head at once, and waits until it is closed.
    pub(super) fn end_one(&self, name: &str) {
        let mut table = self.table.lock();
        while let Some(entry) = table.heads.get(name) {
            if let Entry::Mounted(head) = entry {
                head.unmounter().abandon();
            }
            self.changed.wait(&mut table);
        }
    }

    /// Ends all mounts at once, and closes the store. Returns the clients that wait for that.
    pub(super) fn end(&self) -> Vec<Arc<Waiting>> {
        let mut table = self.table.lock();
        table.is_ending = true;
        while !table.heads.is_empty() {
            for entry in table.heads.values() {
                if let Entry::Mounted(head) = entry {
                    head.unmounter().abandon();
                }
            }
            self.changed.wait(&mut table);
        }
        table.root = None;
        table.racing.clear();
        std::mem::take(&mut table.waiting)
    }
}

/// The name of a head that is being mounted. Dropping it gives the name back.
struct Taken<'a> {
    heads: &'a Arc<Heads>,
    name: String,
}

impl Taken<'_> {
    /// Enters the mounted head in the table.
    fn set(self, head: Arc<ServedHead>) {
        self.heads.table.lock().heads.insert(self.name.clone(), Entry::Mounted(head));
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut table = self.heads.table.lock();
        if matches!(table.heads.get(&self.name), Some(Entry::Mounting)) {
            table.heads.remove(&self.name);
        }
        drop(table);
        self.heads.changed.notify_all();
    }
}

/// Keeps a store open for a race.
pub(super) struct Held {
    heads: Arc<Heads>,
    /// `None` when it is being dropped.
    caller: Option<Arc<Sandbox>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = self.heads.table.lock();
        let caller = self.caller.take();
        let is_it = |one: &Arc<Sandbox>| caller.as_ref().is_some_and(|it| Arc::ptr_eq(it, one));
        let at = table.racing.iter().position(is_it);
        let gone = at.map(|at| table.racing.swap_remove(at));
        if table.heads.is_empty() && table.root.is_none() && table.racing.is_empty() {
            table.is_ending = true;
        }
        drop(table);
        // This may close the store, which takes a while.
        drop((caller, gone));
        self.heads.changed.notify_all();
    }
}

/// Marks the end of a comparison.
struct Compared<'a>(&'a Mutex<Weak<Sandbox>>);

impl Drop for Compared<'_> {
    fn drop(&mut self) {
        *self.0.lock() = Weak::new();
    }
}

/// Whether a request reads much and changes nothing.
fn is_comparison(request: &Request) -> bool {
    match request {
        Request::Diff { detail, .. } | Request::FileDiff { detail, .. } => {
            *detail != Detail::NameStatus
        }
        _ => false,
    }
}

fn cannot_guard(error: &std::io::Error) {
    log::warn!(
        "start a guard: {error}; if this process is killed, the mount may need an abort by hand"
    );
}

/// Unmounts. If the mount is in use, detaches it, and it ends with its last user.
fn unmount_on(signal: Signal, unmounter: &Unmounter) {
    if unmounter.is_elsewhere() {
        // An attempt of a race: the end of its mount is the end of its commands.
        return unmounter.abandon();
    }
    let mut result = unmounter.unmount(false);
    if result.as_ref().is_err_and(|error| error.kind == Kind::InUse) {
        log::warn!(
            "{signal}: the mount is in use: it is detached, \
                and ends with its last user or a second signal"
        );
        result = unmounter.unmount(true);
    }
    if let Err(error) = result {
        log::error!("{signal}: {error}; a second signal ends the daemon at once");
    }
}
