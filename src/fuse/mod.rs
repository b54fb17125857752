//! The kernel's door: one mount of one [`Fs`].
//!
//! We mount by ourselves and own the descriptor of the session, because fuser does not know every message that a restore
//! needs. One thread takes the requests and answers the quick ones itself; more threads were slower (measured). The
//! kernel's first message (INIT) is answered before [`mount`] returns, and nothing may look into the mount before that: it
//! would wait for ourselves.
//!
//! A mount can also be made for us in another mount namespace ([`adopt`]): then we hold its session and its root, and
//! cannot unmount it, only end it.

mod answer;
mod awake;
mod counters;
mod door;
mod dropped;
mod errno;
mod gate;
mod handshake;
mod homeward;
mod kernel;
mod labels;
mod lookers;
mod past;
mod plus;
mod privileges;
mod settle;
mod translate;
mod workers;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use fuser::{Config, Session, SessionACL};
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
pub use plus::is_expected;

use awake::Awake;
use door::Door;
use gate::Gate;
use kernel::{Channel, Mount, Root};

/// How long the end of an aborted session is waited for. It comes at once; what it waits for is a request that is
/// being served.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long an unmount is tried again while the mount is busy. A program that is being started has copies of its parent's
/// descriptors until its exec, so a mount that nobody uses can be busy for a moment.
const BUSY_LIMIT: Duration = Duration::from_secs(2);
/// How long a session may go on that was unmounted.
const COPIES_LIMIT: Duration = Duration::from_secs(1);
/// So many of those who keep a mount busy are told.
const MOST_TOLD: usize = 5;

/// How a head is mounted. By default writable, for our own user (for all, if that is root), without device nodes and
/// setuid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// The kernel refuses changes.
    pub read_only: bool,
    /// Whether other users may enter, as far as modes allow; if nothing is said, for root yes, for a user no.
    pub allow_other: Option<bool>,
    /// The kernel collects writes. Many small writes become cheaper, most other things dearer.
    pub writeback: bool,
    /// For how long after a request a CPU is kept awake, once many come one after the other. None: 500 microseconds where that pays, in a virtual
    /// machine with several CPUs and no quota of their time; and not at all elsewhere.
    pub spin: Option<Duration>,
    /// No program may be run from the mount.
    pub noexec: bool,
    /// setuid and setgid count. Only root may ask for it.
    pub suid: bool,
    /// Device nodes work. Only root may ask for it.
    pub dev: bool,
    /// What `mount` and `df` show as the source; the path of the base if empty.
    pub source: Vec<u8>,
    /// Options of every filesystem, by the names of [`sys::mount::VFS_OPTIONS`]. With `sync` and
    /// `dirsync` a change of names or attributes is on the disk when it is answered.
    pub vfs: Vec<String>,
}

/// A live mount. Dropping it ends the mount at once, unless it was waited for: when that returns, nothing that processes
/// still do in it changes the tree, they get ENOTCONN.
pub struct Mounted {
    unmounter: Unmounter,
    gate: Arc<Gate>,
    kernel: Arc<Mount>,
    counters: Arc<Counters>,
    /// None where the kernel does not let us see it. Opened while the mount certainly is ours: its number goes to the next
    /// mount as soon as it is gone, and by number we would end that one.
    connection: Option<Connection>,
    /// None once it was waited for.
    session: Option<JoinHandle<io::Result<()>>>,
    told: Mutex<Receiver<Told>>,
}

/// Ends a mount, from any thread.
#[derive(Clone, Debug)]
pub struct Unmounter {
    mount_point: Arc<Path>,
    dev: u64,
    /// It is mounted in another mount namespace.
    is_elsewhere: bool,
    /// Where it is told that it was unmounted and everybody is to go.
    told: Sender<Told>,
}

/// What the one who waits for the end of a mount is told.
#[derive(Debug)]
enum Told {
    /// Its session has ended.
    Ended,
    /// It was unmounted, where we are, by us.
    Unmounted,
}

/// A mount that was made for us in another mount namespace.
#[derive(Debug)]
pub struct Handed {
    /// The descriptor of the session.
    pub device: OwnedFd,
    /// The root of the mount (O_PATH).
    pub root: OwnedFd,
    /// `st_dev` of its files.
    pub dev: u64,
    /// Whether other users than ours may enter.
    pub all_users: bool,
}

/// Mounts a filesystem. `store_path` is what the attribute `user.jailfs.store` tells.
///
/// # Errors
/// [`Kind::CannotMount`], with a hint where there is one.
pub fn mount(fs: Arc<Fs>, mount_point: &Path, store_path: &Path, options: &MountOptions) -> Result<Mounted> {
    let cannot = |e: Error| e.kind(Kind::CannotMount);
    let attempt = || format!("mount '{}'", mount_point.display());
    let mount_point =
        sys::path::resolve(mount_point).attempt(attempt).map_err(|e| explain_point(cannot(e)))?;
    let all_users = options.allow_other.unwrap_or_else(|| nix::unistd::geteuid().is_root());
    let device = mount_fuse(&mount_point, &fuse_options(options, fs.state().lower.base().path(), all_users))
        .map_err(|e| explain(attempt(), &e))?;
    // From here on the mount exists; whatever fails, this takes it away.
    let mut guard = Detach(Some(mount_point.clone()));
    let dev = dev_at(&mount_point).map_err(cannot)?;
    let (tell, told) = mpsc::channel();
    let unmounter = Unmounter { mount_point: Arc::from(&*mount_point), dev, is_elsewhere: false, told: tell };
    let root = Root::At(mount_point.clone());
    let syncs = options.vfs.iter().any(|option| option == "sync" || option == "dirsync");
    let door = Door::new(Arc::clone(&fs), store_path, options.writeback, syncs);
    let mounted = start(fs, door, device, root, (unmounter, told), (options, all_users)).map_err(cannot)?;
    guard.0 = None;
    Ok(mounted)
}

/// Opens the kernel's device, for [`hand_out`] in the same user namespace.
///
/// # Errors
/// [`Kind::CannotMount`], with a hint where there is one.
pub fn open_device() -> Result<OwnedFd> {
    sys::mount::open_device().map_err(|e| explain("mount a sandbox".to_owned(), &e))
}

/// Makes a mount for another process to [`adopt`]: this one is in a mount namespace of its own and will not serve it.
/// Nothing may look into it before that. All users may enter if `all_users`.
///
/// # Errors
/// [`Kind::CannotMount`], with a hint where there is one.
pub fn hand_out(device: OwnedFd, mount_point: &Path, all_users: bool) -> Result<Handed> {
    let attempt = || format!("mount '{}'", mount_point.display());
    let cannot = |e: Error| e.kind(Kind::CannotMount);
    let options = fuse_options(&MountOptions::default(), mount_point.as_os_str().as_bytes(), all_users);
    let device = sys::mount::mount_device(device, mount_point, &options);
    let device = device.map_err(|e| explain(attempt(), &e))?;
    let dev = dev_at(mount_point).map_err(cannot)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let root = open(mount_point, flags, Mode::empty()).map_err(io::Error::from).attempt(attempt);
    Ok(Handed { device, root: root.map_err(cannot)?, dev, all_users })
}

/// Serves a mount that was made for us in another mount namespace, where it is seen at `mount_point`.
///
/// # Errors
/// [`Kind::CannotMount`].
pub fn adopt(fs: Arc<Fs>, handed: Handed, mount_point: &Path, store_path: &Path) -> Result<Mounted> {
    let Handed { device, root, dev, all_users } = handed;
    let (tell, told) = mpsc::channel();
    let unmounter = Unmounter { mount_point: Arc::from(mount_point), dev, is_elsewhere: true, told: tell };
    let door = Door::new(Arc::clone(&fs), store_path, false, false);
    start(fs, door, device, Root::Held(root), (unmounter, told), (&MountOptions::default(), all_users))
        .map_err(|e| e.kind(Kind::CannotMount))
}

fn start(
    fs: Arc<Fs>,
    door: Door,
    device: OwnedFd,
    root: Root,
    (unmounter, told): (Unmounter, Receiver<Told>),
    (options, all_users): (&MountOptions, bool),
) -> Result<Mounted> {
    let attempt = || format!("serve '{}'", unmounter.mount_point.display());
    let raw = device.try_clone().attempt(attempt)?;
    let connection = Connection::open(unmounter.dev)
        .inspect_err(|error| log::debug!("the connection is not to be seen: {error}"))
        .ok();
    let (counters, gate, channel, homeward) = (door.counters(), door.gate(), door.channel(), door.homeward());
    let mut config = Config::default();
    config.n_threads = Some(1);
    let session = Session::from_fd(door, device, SessionACL::All, config).attempt(attempt)?;
    channel.connect(session.notifier(), raw);
    let span = options.spin.unwrap_or_else(awake::default_span);
    if !span.is_zero() {
        gate.keep_awake(Awake::start(span).attempt(attempt)?);
    }
    let closer = CloseAtEnd(Arc::clone(&channel), unmounter.told.clone());
    let thread = Builder::new().name("jailfs-session".into()).spawn(move || {
        let _closer = closer;
        session.run()
    });
    let thread = thread.attempt(attempt)?;
    let (dev, writeback) = (unmounter.dev, options.writeback);
    let kernel = Arc::new(Mount { fs, channel, homeward, root, dev, writeback, all_users });
    Ok(Mounted {
        unmounter,
        gate,
        kernel,
        counters,
        connection,
        session: Some(thread),
        told: Mutex::new(told),
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
    let mut said = Error::new(Kind::CannotMount, attempt, error.to_string());
    said.errno = error.errno();
    match error.hint() {
        Some(hint) => said.hint(hint),
        None => said,
    }
}

fn explain_point(error: Error) -> Error {
    match error.errno {
        Some(code) if code == nix::errno::Errno::ENOENT as i32 => error.hint("make the directory first"),
        Some(code) if code == nix::errno::Errno::ENOTCONN as i32 => {
            error.hint("a mount whose daemon is gone is in the way; 'jailfs umount MNT' takes it away")
        }
        _ => error,
    }
}

/// `st_dev` of what is seen at a mount point.
fn dev_at(mount_point: &Path) -> Result<u64> {
    let attempt = || format!("mount '{}'", mount_point.display());
    let wanted = mount_point.as_os_str().as_bytes();
    let top = mountinfo::read().attempt(attempt)?.into_iter().rfind(|entry| entry.mount_point == wanted);
    top.map(|entry| entry.dev)
        .ok_or_else(|| Error::new(Kind::Failed, attempt(), "the mount is not to be seen"))
}

/// Takes a half-made mount away.
struct Detach(Option<PathBuf>);

impl Drop for Detach {
    fn drop(&mut self) {
        if let Some(point) = self.0.take()
            && let Err(error) = sys::mount::unmount(&point, true)
        {
            log::warn!("could not take the mount '{}' away: {error}", point.display());
        }
    }
}

/// Closes the channel when the session's thread ends, in whatever way, and says so.
struct CloseAtEnd(Arc<Channel>, Sender<Told>);

impl Drop for CloseAtEnd {
    fn drop(&mut self) {
        self.0.close();
        if self.1.send(Told::Ended).is_err() {
            log::debug!("nobody waits for the end of the session");
        }
    }
}

impl Mounted {
    /// What must be told to the kernel around a change of state.
    pub fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::clone(&self.kernel) as Arc<dyn Kernel>
    }

    /// Ends the mount from elsewhere.
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// What ends the connection as soon as anything is written to it, if the kernel lets us.
    pub fn abort_file(&self) -> Option<std::fs::File> {
        self.connection.as_ref()?.abort_file().inspect_err(|error| log::debug!("abort: {error}")).ok()
    }

    /// Where it is mounted: absolute, without links.
    pub fn mount_point(&self) -> &Path {
        &self.unmounter.mount_point
    }

    /// Messages from the kernel so far.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Waits until the mount is gone, that is unmounted and left by everybody. If an [`Unmounter`] has unmounted it and it is still somewhere
    /// else, in a mount namespace that was made with a copy of it, say, it is ended there, too.
    ///
    /// # Errors
    /// When the session ended in another way; the mount then answers ENOTCONN until it is unmounted.
    pub fn wait(mut self) -> Result<()> {
        if matches!(self.told.get_mut().recv(), Ok(Told::Unmounted))
            && matches!(self.told.get_mut().recv_timeout(COPIES_LIMIT), Err(RecvTimeoutError::Timeout))
        {
            log::warn!("the mount is unmounted, and somebody has a copy of it, which is ended");
            return Ok(());
        }
        let Some(session) = self.session.take() else { return Ok(()) };
        let attempt = || format!("serve '{}'", self.unmounter.mount_point.display());
        match session.join() {
            Ok(result) => result.attempt(attempt),
            Err(_) => Err(Error::new(Kind::Failed, attempt(), "the session ended by a panic")),
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
        // Detaching ends nothing while somebody is still inside. So nobody is served any more; and where the kernel lets
        // us say so, it answers them itself and the session ends.
        self.gate.close();
        let is_ended = |connection: &Connection| match connection.abort() {
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
            log::warn!("the session has not ended in time");
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    match session.join() {
        Ok(Ok(())) => {}
        Ok(Err(error)) => log::debug!("the session ended: {error}"),
        Err(_) => log::error!("the session ended by a panic"),
    }
}

/// Who keeps a mount busy, and what to do.
fn hint_of_busy(mount_point: &Path) -> String {
    let advice = "leave the directory and close its files, or detach it with '--lazy'";
    let holders = sys::holders::holders(mount_point).unwrap_or_default();
    let mut said: Vec<String> = holders.iter().take(MOST_TOLD).map(ToString::to_string).collect();
    match holders.len().saturating_sub(MOST_TOLD) {
        _ if holders.is_empty() => return advice.to_owned(),
        0 => {}
        more => said.push(format!("{more} more")),
    }
    format!("in use by {}: {advice}", said.join("; "))
}

impl Unmounter {
    /// Unmounts; `lazy` detaches the mount also while it is in use. One that is gone already is fine.
    ///
    /// # Errors
    /// [`Kind::InUse`] if for two seconds something is open in it or mounted on it, else [`Kind::Failed`].
    pub fn unmount(&self, lazy: bool) -> Result<()> {
        let attempt = || format!("unmount '{}'", self.mount_point.display());
        if self.is_elsewhere {
            return Err(Error::new(Kind::InUse, attempt(), "it is mounted in another mount namespace"));
        }
        let wanted = self.mount_point.as_os_str().as_bytes();
        let here: Vec<_> = mountinfo::read().attempt(attempt)?;
        let here: Vec<_> = here.into_iter().filter(|entry| entry.mount_point == wanted).collect();
        match here.last() {
            Some(top) if top.dev == self.dev => {}
            Some(_) if here.iter().any(|entry| entry.dev == self.dev) => {
                let error = Error::new(Kind::InUse, attempt(), "something else is mounted on top of it");
                return Err(error.hint("unmount that first"));
            }
            Some(_) | None => return Ok(()),
        }
        let end = Instant::now() + BUSY_LIMIT;
        loop {
            let Err(error) = sys::mount::unmount(&self.mount_point, lazy).attempt(attempt) else {
                if !lazy && self.told.send(Told::Unmounted).is_err() {
                    log::debug!("nobody waits for the end of the mount");
                }
                return Ok(());
            };
            let is_busy =
                error.errno == Some(nix::errno::Errno::EBUSY as i32) || error.reason.contains("busy");
            if !is_busy {
                return Err(error);
            }
            if Instant::now() > end {
                return Err(error.kind(Kind::InUse).hint(hint_of_busy(&self.mount_point)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }
}
