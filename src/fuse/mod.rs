//! Serves one FUSE mount of one [`Fs`].
//!
//! * This module mounts by itself and owns the session's descriptor. fuser begins the session;
//!   [`wire`] has the rest of the protocol.
//! * One thread takes the requests and answers quick ones itself. Another one takes over while it
//!   waits for a disk ([`turns`]).
//! * INIT is answered before [`mount`] returns. No thread may enter the mount earlier, because it
//!   would wait for the server that it is about to start.
//! * Another process may make the mount in its own mount namespace and hand it over ([`adopt`]).
//!   This process then holds the session and the root. It can end the mount but not unmount it.

mod attr_ops;
mod burst;
mod counters;
mod data_ops;
mod discarded_writes;
mod dispatch;
mod errno;
mod flush;
mod flush_waiters;
mod gate;
mod handed;
mod init;
mod latency;
mod mount;
mod notify;
mod privileges;
mod readdirplus;
mod readdirplus_policy;
mod recent_writeback;
mod rename_barrier;
mod reply;
mod selinux;
mod server;
mod session;
mod snapdir;
mod spin;
mod turns;
mod wake;
mod wire;
mod workers;
mod xattr_ops;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvError, RecvTimeoutError, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use parking_lot::Mutex;

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{Fs, Kernel};
use crate::sys;
use crate::sys::fusectl::Connection;
use crate::sys::mount::{FuseMountOptions, MountError, mount_fuse};
use crate::sys::mountinfo;

pub use counters::Counters;
pub use handed::Handed;
pub use wake::Wake;

use gate::Gate;
use mount::{Mount, Root};
use notify::Channel;
use server::Server;
use session::Session;
use wake::Waker;
use wire::Device;

/// The first head of a store.
const FIRST_HEAD: &str = "main";
/// How long to wait for the end of an aborted session. Only a request in progress delays it.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long to retry an unmount of a busy mount. A process inherits descriptors from its parent
/// until exec, so that an unused mount can be busy for a moment.
const BUSY_LIMIT: Duration = Duration::from_secs(2);
/// How long a session may outlive its unmount before it counts as copied to another namespace.
const COPIES_LIMIT: Duration = Duration::from_secs(1);
/// How many of the processes that keep a mount busy are listed.
const MAX_HOLDERS_LISTED: usize = 5;

/// How to mount a head. The default is writable, without device nodes and setuid, and open to the
/// daemon's user only, or to all users if that is root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// The kernel refuses every change.
    pub read_only: bool,
    /// Whether other users may enter, as far as modes permit. `None`: yes for root, no for a user.
    pub allow_other: Option<bool>,
    /// Enables the kernel's writeback cache. Many small writes get cheaper, most other work dearer.
    pub writeback: bool,
    /// How wake-ups are made cheap while requests follow each other.
    pub wake: Wake,
    /// How many threads serve requests at most; `None`: 16.
    pub threads: Option<u8>,
    /// How many of them may take requests at the same time; `None`: 1.
    pub parallel: Option<u8>,
    /// No program can be executed from the mount.
    pub noexec: bool,
    /// Set-user-ID and set-group-ID bits take effect. Only root may ask for this.
    pub suid: bool,
    /// Device nodes work. Only root may ask for this.
    pub dev: bool,
    /// The source that `mount` and `df` show; empty means the path of the base.
    pub source: Vec<u8>,
    /// The name of the head, which the attribute `user.jailfs.head` shows; empty means `main`.
    pub head: String,
    /// Generic mount options, by the names in `sys::mount::VFS_OPTIONS`. With `sync` and
    /// `dirsync`, a change of names or attributes is durable before the server replies.
    pub vfs: Vec<String>,
}

/// A live mount. Dropping it ends the mount at once: afterwards no process can change the tree
/// through it, and requests fail with ENOTCONN. [`Mounted::wait`] waits instead.
pub struct Mounted {
    unmounter: Unmounter,
    gate: Arc<Gate>,
    kernel: Arc<Mount>,
    counters: Arc<Counters>,
    /// `None` where the kernel hides it. Opened while the mount certainly is ours: the kernel
    /// reuses a connection number at once, and aborting by number would end another mount.
    connection: Option<Arc<Connection>>,
    /// `None` once it was waited for.
    session: Option<JoinHandle<io::Result<()>>>,
    events: Mutex<Receiver<SessionEvent>>,
}

/// Ends a mount, from any thread.
#[derive(Clone, Debug)]
pub struct Unmounter {
    mount_point: Arc<Path>,
    dev: u64,
    /// The mount is in another mount namespace.
    is_elsewhere: bool,
    /// Tells [`Mounted::wait`] that the mount was unmounted.
    events: Sender<SessionEvent>,
}

/// An event for [`Mounted::wait`].
#[derive(Debug)]
enum SessionEvent {
    /// The session has ended.
    Ended,
    /// The mount was unmounted in this namespace, by this process.
    Unmounted,
    /// The mount is to end at once.
    Abandoned,
}

/// Mounts a filesystem. `store_path` is the value of the attribute `user.jailfs.store`.
///
/// # Errors
/// [`Kind::CannotMount`], with a hint where there is one.
pub fn mount(
    fs: Arc<Fs>,
    mount_point: &Path,
    store_path: &Path,
    options: &MountOptions,
) -> Result<Mounted> {
    let cannot = |e: Error| e.kind(Kind::CannotMount);
    let attempt = || format!("mount '{}'", mount_point.display());
    let mount_point =
        sys::path::resolve(mount_point).attempt(attempt).map_err(|e| explain_point(cannot(e)))?;
    let all_users = options.allow_other.unwrap_or_else(|| nix::unistd::geteuid().is_root());
    let device =
        mount_fuse(&mount_point, &fuse_options(options, fs.state().lower.base().path(), all_users))
            .map_err(|e| explain(attempt(), &e))?;
    // The mount exists now. If anything fails below, the guard detaches it.
    let mut guard = Detach(Some(mount_point.clone()));
    let dev = dev_at(&mount_point).map_err(cannot)?;
    let (sender, events) = mpsc::channel();
    let unmounter = Unmounter {
        mount_point: Arc::from(&*mount_point),
        dev,
        is_elsewhere: false,
        events: sender,
    };
    let root = Root::At(mount_point.clone());
    let mounted = start(fs, store_path, device, root, (unmounter, events), (options, all_users))
        .map_err(cannot)?;
    guard.0 = None;
    Ok(mounted)
}

/// Opens `/dev/fuse`, for [`hand_out`] in the same user namespace.
///
/// # Errors
/// [`Kind::CannotMount`], with a hint where there is one.
pub fn open_device() -> Result<OwnedFd> {
    sys::mount::open_device().map_err(|e| explain("mount a sandbox".to_owned(), &e))
}

/// Makes a mount that another process will [`adopt`]. This process is in a mount namespace of its
/// own and does not serve the mount. No process may enter it before it is adopted. All users may
/// enter if `all_users`.
///
/// # Errors
/// [`Kind::CannotMount`], with a hint where there is one.
pub fn hand_out(device: OwnedFd, mount_point: &Path, all_users: bool) -> Result<Handed> {
    let attempt = || format!("mount '{}'", mount_point.display());
    let cannot = |e: Error| e.kind(Kind::CannotMount);
    let options =
        fuse_options(&MountOptions::default(), mount_point.as_os_str().as_bytes(), all_users);
    let device = sys::mount::mount_device(device, mount_point, &options);
    let device = device.map_err(|e| explain(attempt(), &e))?;
    let dev = dev_at(mount_point).map_err(cannot)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = open(mount_point, flags, Mode::empty()).map_err(io::Error::from).attempt(attempt);
    Ok(Handed { device, root: root.map_err(cannot)?, dev, all_users })
}

/// Serves a mount that another process made in its own mount namespace, where it is at
/// `mount_point`. Uses only `head`, `writeback`, `wake`, `threads`, and `sync` and `dirsync` of the
/// options: the other process passed the flags of the mount to the kernel when it made the mount.
///
/// # Errors
/// [`Kind::CannotMount`].
pub fn adopt(
    fs: Arc<Fs>,
    handed: Handed,
    mount_point: &Path,
    store_path: &Path,
    options: &MountOptions,
) -> Result<Mounted> {
    let Handed { device, root, dev, all_users } = handed;
    let (sender, events) = mpsc::channel();
    let unmounter =
        Unmounter { mount_point: Arc::from(mount_point), dev, is_elsewhere: true, events: sender };
    let root = Root::Held(root);
    start(fs, store_path, device, root, (unmounter, events), (options, all_users))
        .map_err(|e| e.kind(Kind::CannotMount))
}

fn start(
    fs: Arc<Fs>,
    store_path: &Path,
    device: OwnedFd,
    root: Root,
    (unmounter, events): (Unmounter, Receiver<SessionEvent>),
    (options, all_users): (&MountOptions, bool),
) -> Result<Mounted> {
    let attempt = || format!("serve '{}'", unmounter.mount_point.display());
    let connection = Connection::open(unmounter.dev)
        .inspect_err(|error| log::debug!("no access to the connection's control files: {error}"))
        .ok()
        .map(Arc::new);
    let syncs = options.vfs.iter().any(|option| option == "sync" || option == "dirsync");
    let head = if options.head.is_empty() { FIRST_HEAD } else { &options.head };
    let mut server = Server::new(Arc::clone(&fs), (store_path, head), options.writeback, syncs);
    let (counters, gate) = (server.counters(), server.gate());
    let (channel, recent_writeback) = (server.channel(), server.recent_writeback());
    let flush_waiters = server.flush_waiters();
    let (agreed, notifier) =
        init::begin(device.try_clone().attempt(attempt)?, options.writeback).attempt(attempt)?;
    server.agree(&agreed);
    let device = Arc::new(Device::new(device));
    channel.connect(notifier, Arc::clone(&device));
    let parallel = options.parallel.unwrap_or(1);
    let threads = options.threads.unwrap_or(session::THREADS.max(parallel));
    let session = Session::new((device, connection.clone()), server, (threads, parallel));
    if let Some(waker) = Waker::start(options.wake)? {
        gate.set_waker(waker);
    }
    let closer = CloseAtEnd(Arc::clone(&channel), unmounter.events.clone());
    let thread = Builder::new().name("jailfs-session".into()).spawn(move || {
        let _closer = closer;
        session.run()
    });
    let thread = thread.attempt(attempt)?;
    let (dev, writeback) = (unmounter.dev, options.writeback);
    let kernel = Arc::new(Mount {
        fs,
        channel,
        recent_writeback,
        flush_waiters,
        root,
        dev,
        writeback,
        all_users,
    });
    Ok(Mounted {
        unmounter,
        gate,
        kernel,
        counters,
        connection,
        session: Some(thread),
        events: Mutex::new(events),
    })
}

fn fuse_options(options: &MountOptions, base: &[u8], allow_other: bool) -> FuseMountOptions {
    let source = if options.source.is_empty() { base } else { &options.source };
    FuseMountOptions {
        source: source.to_vec(),
        vfs: options.vfs.clone(),
        allow_other,
        read_only: options.read_only,
        suid: options.suid,
        dev: options.dev,
        noexec: options.noexec,
        max_read: None,
    }
}

fn explain(attempt: String, error: &MountError) -> Error {
    let mut explained = Error::new(Kind::CannotMount, attempt, error.to_string());
    explained.errno = error.errno();
    match error.hint() {
        Some(hint) => explained.hint(hint),
        None => explained,
    }
}

fn explain_point(error: Error) -> Error {
    match error.errno {
        Some(code) if code == nix::errno::Errno::ENOENT as i32 => {
            error.hint("make the directory first")
        }
        Some(code) if code == nix::errno::Errno::ENOTCONN as i32 => {
            error.hint("a mount without a daemon is in the way; remove it with 'jailfs umount MNT'")
        }
        _ => error,
    }
}

/// `st_dev` of the topmost mount at a path.
fn dev_at(mount_point: &Path) -> Result<u64> {
    let attempt = || format!("mount '{}'", mount_point.display());
    let wanted = mount_point.as_os_str().as_bytes();
    let top =
        mountinfo::read().attempt(attempt)?.into_iter().rfind(|entry| entry.mount_point == wanted);
    top.map(|entry| entry.dev)
        .ok_or_else(|| Error::new(Kind::Failed, attempt(), "the mount is not listed in mountinfo"))
}

/// Detaches a mount that was not completed.
struct Detach(Option<PathBuf>);

impl Drop for Detach {
    fn drop(&mut self) {
        if let Some(point) = self.0.take()
            && let Err(error) = sys::mount::unmount(&point, true)
        {
            log::warn!("could not detach the mount '{}': {error}", point.display());
        }
    }
}

/// Closes the channel when the session's thread ends, also by a panic, and reports the end.
struct CloseAtEnd(Arc<Channel>, Sender<SessionEvent>);

impl Drop for CloseAtEnd {
    fn drop(&mut self) {
        self.0.close();
        if self.1.send(SessionEvent::Ended).is_err() {
            log::debug!("no thread waits for the end of the session");
        }
    }
}

impl Mounted {
    /// Flushes and invalidates the kernel's caches around a switch.
    pub fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::clone(&self.kernel) as Arc<dyn Kernel>
    }

    /// A handle that ends the mount from another thread.
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// The control file that aborts the connection at any write to it, if this process may open it.
    pub fn abort_file(&self) -> Option<std::fs::File> {
        self.connection
            .as_ref()?
            .abort_file()
            .inspect_err(|error| log::debug!("abort: {error}"))
            .ok()
    }

    /// The mount point: absolute, without symlinks.
    pub fn mount_point(&self) -> &Path {
        &self.unmounter.mount_point
    }

    /// Counts the messages from the kernel so far.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Waits until the mount is unmounted and no process uses it any more, or [abandoned]. A mount
    /// namespace that was created meanwhile may hold a copy of the mount. One second after an
    /// [`Unmounter`] has unmounted it, such a copy is ended too.
    ///
    /// [abandoned]: Unmounter::abandon
    ///
    /// # Errors
    /// When the session failed. The mount then returns ENOTCONN until it is unmounted.
    pub fn wait(mut self) -> Result<()> {
        let events = self.events.get_mut();
        let mut event = events.recv();
        if matches!(event, Ok(SessionEvent::Unmounted)) {
            event = match events.recv_timeout(COPIES_LIMIT) {
                Ok(event) => Ok(event),
                Err(RecvTimeoutError::Disconnected) => Err(RecvError),
                Err(RecvTimeoutError::Timeout) => {
                    log::warn!("ending a copy of the mount in another mount namespace");
                    return Ok(());
                }
            };
        }
        // Dropping `self` ends the mount.
        if matches!(event, Ok(SessionEvent::Abandoned)) {
            return Ok(());
        }
        let Some(session) = self.session.take() else { return Ok(()) };
        let attempt = || format!("serve '{}'", self.unmounter.mount_point.display());
        match session.join() {
            Ok(result) => result.attempt(attempt),
            Err(_) => Err(Error::new(Kind::Failed, attempt(), "the session's thread panicked")),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        if !self.unmounter.is_elsewhere
            && let Err(error) = self.unmounter.unmount(true)
        {
            log::warn!("{error}");
        }
        // A lazy unmount does not end the session while a process is inside. So the gate refuses
        // all requests. An abort, where permitted, makes the kernel refuse them and ends the
        // session.
        self.gate.close();
        let is_ended = |connection: &Arc<Connection>| match connection.abort() {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if session.is_finished() || self.connection.as_ref().is_some_and(is_ended) {
            end_in_time(session);
        }
    }
}

fn end_in_time(session: JoinHandle<io::Result<()>>) {
    let end = Instant::now() + END_LIMIT;
    while !session.is_finished() {
        if Instant::now() > end {
            log::warn!("the session did not end within {} seconds", END_LIMIT.as_secs());
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    match session.join() {
        Ok(Ok(())) => {}
        Ok(Err(error)) => log::debug!("the session ended: {error}"),
        Err(_) => log::error!("the session's thread panicked"),
    }
}

/// A hint that lists the processes that keep a mount busy.
fn hint_of_busy(mount_point: &Path) -> String {
    let advice = "leave the directory and close its files, or detach it with '--lazy'";
    let holders = sys::holders::holders(mount_point).unwrap_or_default();
    let mut listed: Vec<String> =
        holders.iter().take(MAX_HOLDERS_LISTED).map(ToString::to_string).collect();
    match holders.len().saturating_sub(MAX_HOLDERS_LISTED) {
        _ if holders.is_empty() => return advice.to_owned(),
        0 => {}
        more => listed.push(format!("{more} more")),
    }
    format!("in use by {}: {advice}", listed.join("; "))
}

impl Unmounter {
    /// Unmounts. `lazy` detaches the mount even while it is in use. Succeeds if it is gone already.
    ///
    /// # Errors
    /// [`Kind::InUse`] if a file stays open in it or a filesystem mounted on it for two seconds,
    /// else [`Kind::Failed`].
    pub fn unmount(&self, lazy: bool) -> Result<()> {
        let attempt = || format!("unmount '{}'", self.mount_point.display());
        if self.is_elsewhere {
            return Err(Error::new(
                Kind::InUse,
                attempt(),
                "it is mounted in another mount namespace",
            ));
        }
        let wanted = self.mount_point.as_os_str().as_bytes();
        let here: Vec<_> = mountinfo::read().attempt(attempt)?;
        let here: Vec<_> = here.into_iter().filter(|entry| entry.mount_point == wanted).collect();
        match here.last() {
            Some(top) if top.dev == self.dev => {}
            Some(_) if here.iter().any(|entry| entry.dev == self.dev) => {
                let error =
                    Error::new(Kind::InUse, attempt(), "something else is mounted on top of it");
                return Err(error.hint("unmount that first"));
            }
            Some(_) | None => return Ok(()),
        }
        let end = Instant::now() + BUSY_LIMIT;
        loop {
            let Err(error) = sys::mount::unmount(&self.mount_point, lazy).attempt(attempt) else {
                if !lazy && self.events.send(SessionEvent::Unmounted).is_err() {
                    log::debug!("no thread waits for the end of the mount");
                }
                return Ok(());
            };
            let is_busy = error.errno == Some(nix::errno::Errno::EBUSY as i32)
                || error.reason.contains("busy");
            if !is_busy {
                return Err(error);
            }
            if Instant::now() > end {
                return Err(error.kind(Kind::InUse).hint(hint_of_busy(&self.mount_point)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Has the thread in [`Mounted::wait`] end the mount at once, even if it is in use.
    pub fn abandon(&self) {
        if self.events.send(SessionEvent::Abandoned).is_err() {
            log::debug!("the mount has ended already");
        }
    }

    /// The mount point.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Whether the mount is in another mount namespace.
    pub fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }

    /// `st_dev` of the files in the mount.
    pub fn dev(&self) -> u64 {
        self.dev
    }
}
