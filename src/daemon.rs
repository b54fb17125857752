//! The process that serves a mount, in the foreground or in the background.
//!
//! In the background it is this program again (`/proc/self/exe __daemon`): it gets its [`Plan`] on its standard
//! input and reports on its standard output, once, that the mount stands or why it does not; the command that
//! started it waits for that. No fork without exec, so no thread or lock is ever half there.
//!
//! Always true:
//! * The signals that end the process are blocked in all threads, and one thread waits for them.
//! * The store is closed before the control socket: who waits for the end of the daemon finds the store free.
//! * A daemon that panics exits and leaves a dead mount (ENOTCONN). It does not unmount: what runs in the mount would
//!   go on in the directory below, which may be the base itself.

pub mod guard;

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::statvfs::statvfs;
use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::control::{Greeting, Listener, Server};
use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{Fs, Kernel, Limits, PastView};
use crate::fuse::{self, Handed, Mounted, Unmounter};
use crate::jail::Policy;
use crate::sandbox::verbs::{Detail, Protected, Reply, Request};
use crate::sandbox::{Bounds, KeepPolicy, Sandbox, StoreOptions, View};
use crate::store::codec;
use crate::sys;
use crate::types::Name;

/// The hidden verb by which the program starts itself in the background.
pub const VERB: &str = "__daemon";
/// The name of the log in the store's directory.
pub const LOG: &str = "daemon.log";
/// A log longer than this, in bytes, is emptied.
const LOG_LIMIT: u64 = 8 << 20;
/// How long the end waits for a comparison that nobody wants any more.
const LONG_LIMIT: Duration = Duration::from_secs(2);
/// The longest report, in bytes.
const MAX_REPORT: u64 = 1 << 20;

/// What to mount where, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The base; absolute.
    #[serde(with = "path_bytes")]
    pub base: PathBuf,
    /// The mount point; absolute.
    #[serde(with = "path_bytes")]
    pub mount_point: PathBuf,
    /// The store; absolute.
    #[serde(with = "path_bytes")]
    pub store: PathBuf,
    /// How to mount it.
    pub choice: Choice,
}

/// What a person may choose about a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Nothing can be written.
    pub read_only: bool,
    /// Whether other users may look in; none for the default of the rank below.
    pub allow_other: Option<bool>,
    /// Whether the kernel collects writes.
    pub writeback: bool,
    /// For how many microseconds after a request a CPU is kept awake; none for the default.
    pub spin: Option<u32>,
    /// Whether setuid bits count.
    pub suid: bool,
    /// Whether device nodes work.
    pub dev: bool,
    /// Whether no program can be started.
    pub noexec: bool,
    /// Other flags of mount(2), by their names.
    pub vfs: Vec<String>,
    /// The source that `mount` and `df` show; the path of the base if empty.
    pub source: Vec<u8>,
    /// What readlink answers.
    pub links: Links,
    /// Prefixes outside the mount that links may lead to.
    pub allowed_targets: Vec<Vec<u8>>,
    /// Whether fsync does nothing.
    pub volatile: bool,
    /// Whether the base may be another directory than the one that the store was made for.
    pub other_base: bool,
    /// Whether content that is there already is stored again all the same.
    pub no_dedup: bool,
    /// How many bytes may be stored; none for no limit.
    pub max_bytes: Option<u64>,
    /// How many nodes may be made or changed; none for no limit.
    pub max_files: Option<u64>,
    /// Whether space is given back only when somebody asks for it.
    pub no_gc: bool,
    /// How many checkpoints are kept, the newest; none for all.
    pub keep: Option<u64>,
    /// How many bytes the store may take before the oldest checkpoints go; none for any.
    pub max_store: Option<u64>,
    /// What how many of the last operations can go back to stays; none for the default.
    pub operations: Option<u64>,
    /// How many versions are kept of each file; none for the default.
    pub history: Option<u32>,
    /// How many bytes versions may take; none for the default.
    pub history_bytes: Option<u64>,
    /// How the checkpoints are shown in the root.
    pub snapdir: Snapdir,
    /// Under which name; the usual one if empty.
    pub snapname: Vec<u8>,
    /// Whether mkdir(2) among them makes none.
    pub no_snapmkdir: bool,
    /// Paths that an apply writes only with consent.
    pub protected: Protected,
}

/// The usual name of the directory that shows the checkpoints.
const SNAPNAME: &[u8] = b".jailfs";

/// How the checkpoints are shown in the root of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Snapdir {
    /// Whoever knows the name can enter it; the root does not list it.
    #[default]
    Hidden,
    /// The root lists it.
    Visible,
    /// Not at all.
    Off,
}

/// How a mount answers READLINK (`-o links=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Links {
    /// Following a link that leads out is refused. readlink(2) returns the stored text.
    #[default]
    Show,
    /// Following and reading a link that leads out are both refused.
    Deny,
    /// As `Deny`, and every other link is answered in relative canonical form.
    Rewrite,
    /// Every link is answered as stored. Something around the mount must be the jail.
    Literal,
}

impl Choice {
    fn store_options(&self) -> StoreOptions {
        StoreOptions { volatile: self.volatile, other_base: self.other_base }
    }

    fn history(&self) -> Bounds {
        let default = Bounds::default();
        Bounds {
            versions: self.history.unwrap_or(default.versions),
            bytes: self.history_bytes.unwrap_or(default.bytes),
        }
    }

    /// What goes by itself; nothing of a store that is only read.
    fn policy(&self) -> Option<KeepPolicy> {
        let operations = self.operations.unwrap_or(KeepPolicy::OPERATIONS);
        let policy = KeepPolicy { operations, checkpoints: self.keep, store_bytes: self.max_store };
        (!self.no_gc && !self.read_only).then_some(policy)
    }

    fn mount_options(&self) -> fuse::MountOptions {
        fuse::MountOptions {
            read_only: self.read_only,
            allow_other: self.allow_other,
            writeback: self.writeback,
            spin: self.spin.map(|us| Duration::from_micros(us.into())),
            suid: self.suid,
            dev: self.dev,
            noexec: self.noexec,
            source: self.source.clone(),
            vfs: self.vfs.clone(),
        }
    }

    fn view(&self, mount_point: &Path) -> Result<View> {
        Ok(View {
            mount_point: mount_point.to_owned(),
            policy: match self.links {
                Links::Deny => Policy::Deny,
                Links::Rewrite => Policy::Rewrite,
                Links::Literal => Policy::Literal,
                Links::Show => Policy::Show,
            },
            allowed_targets: self.allowed_targets.clone(),
            past: self.past()?,
        })
    }

    fn past(&self) -> Result<Option<PastView>> {
        if self.snapdir == Snapdir::Off {
            return Ok(None);
        }
        let name = if self.snapname.is_empty() { SNAPNAME } else { &self.snapname };
        let name = Name::new(name).map_err(|_| {
            let name = String::from_utf8_lossy(name);
            Error::new(Kind::Usage, format!("show the checkpoints as '{name}'"), "it is not a name")
        })?;
        let listed = self.snapdir == Snapdir::Visible;
        Ok(Some(PastView { name, listed, makes: !self.no_snapmkdir && !self.read_only }))
    }
}

/// Paths are bytes on the wire; serde itself takes only UTF-8.
mod path_bytes {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        Ok(OsString::from_vec(Vec::deserialize(deserializer)?).into())
    }
}

/// Whether a request is refused before the sandbox sees it.
pub type Gate = fn(&Request) -> Result<()>;

/// Lets every request through.
///
/// # Errors
/// None.
pub fn open_gate(_: &Request) -> Result<()> {
    Ok(())
}

/// A sandbox that is mounted and answers on its control socket.
pub struct Serving {
    /// None once it was waited for.
    mounted: Option<Mounted>,
    unmounter: Unmounter,
    server: Server,
    sandbox: Arc<Shared>,
}

/// What the threads that answer share.
struct Shared {
    /// The sandbox while it is served; none when it has been closed. A request holds the lock as long as it works, but for one that takes
    /// long and changes nothing.
    sandbox: RwLock<Option<Arc<Sandbox>>>,
    /// Requests that take long are answered one at a time: each takes a processor and memory.
    long: Mutex<()>,
}

impl Shared {
    /// Does what is asked of the sandbox.
    fn answer(&self, request: Request) -> Result<Reply> {
        let ending = || Error::new(Kind::Failed, "answer a request", "the daemon is ending");
        if !takes_long(&request) {
            return self.sandbox.read().as_ref().ok_or_else(ending)?.handle(request);
        }
        let _one = self.long.lock();
        let sandbox = self.sandbox.read().clone();
        sandbox.ok_or_else(ending)?.handle(request)
    }

    /// Takes the sandbox away from those who ask. What is being changed is waited for, and who only looks for no longer than a moment.
    fn close(&self) -> Option<Arc<Sandbox>> {
        let sandbox = self.sandbox.write().take();
        if let Some(sandbox) = &sandbox {
            sandbox.interrupt();
            if self.long.try_lock_for(LONG_LIMIT).is_none() {
                log::warn!("a comparison for somebody who has gone is not waited for");
            }
        }
        sandbox
    }
}

/// Whether a request reads much, and changes nothing.
fn takes_long(request: &Request) -> bool {
    match request {
        Request::Diff { detail, .. } | Request::FileDiff { detail, .. } => *detail != Detail::NameStatus,
        _ => false,
    }
}

impl Serving {
    /// Mounts `sandbox` and serves it from threads of this process.
    ///
    /// # Errors
    /// The socket cannot be bound, or the mount cannot be made.
    pub fn start(sandbox: Arc<Sandbox>, mount_point: &Path, choice: &Choice, gate: Gate) -> Result<Serving> {
        let options = choice.mount_options();
        let mount = |fs, store: &Path| fuse::mount(fs, mount_point, store, &options);
        // The socket first: whoever sees the mount finds it.
        let listener = Listener::bind(sandbox.store_path())?;
        Serving::start_with(sandbox, listener, mount_point, choice, gate, mount)
    }

    /// Serves `sandbox` from threads of this process in a mount that was made for it in another mount namespace, where
    /// it is seen at `mount_point`. That is a view of its own, with the control socket in it, so `listener` was there first; and
    /// its links are what they are, because nothing leads out of it.
    ///
    /// # Errors
    /// The mount cannot be served.
    pub fn adopt(
        sandbox: Arc<Sandbox>,
        listener: Listener,
        handed: Handed,
        mount_point: &Path,
        choice: &Choice,
        gate: Gate,
    ) -> Result<Serving> {
        let mount = |fs, store: &Path| fuse::adopt(fs, handed, mount_point, store);
        let choice = Choice { links: Links::Literal, ..choice.clone() };
        Serving::start_with(sandbox, listener, mount_point, &choice, gate, mount)
    }

    fn start_with(
        sandbox: Arc<Sandbox>,
        listener: Listener,
        mount_point: &Path,
        choice: &Choice,
        gate: Gate,
        mount: impl FnOnce(Arc<Fs>, &Path) -> Result<Mounted>,
    ) -> Result<Serving> {
        raise_limits()?;
        sandbox.set_view(choice.view(mount_point)?)?;
        sandbox.set_dedup(!choice.no_dedup);
        sandbox.set_policy(choice.policy(), choice.max_bytes);
        sandbox.fs().set_limits(Limits { bytes: choice.max_bytes, files: choice.max_files });
        if !choice.read_only {
            sandbox.fs().set_history(choice.history());
        }
        let mounted = mount(Arc::clone(sandbox.fs()), sandbox.store_path())?;
        sandbox.attach(mounted.kernel());
        let unmounter = mounted.unmounter();
        // Who asks for the end must not keep the store open.
        let (asked, kernel) = (mounted.unmounter(), Arc::downgrade(&mounted.kernel()));
        let sandbox = Arc::new(Shared { sandbox: RwLock::new(Some(sandbox)), long: Mutex::new(()) });
        let shared = Arc::clone(&sandbox);
        let greeting = Greeting::of_this_process(mount_point.as_os_str().as_bytes());
        let server = listener.serve(greeting, move |request| {
            gate(&request)?;
            answer(request, &shared, (&asked, &kernel))
        })?;
        Ok(Serving { mounted: Some(mounted), unmounter, server, sandbox })
    }

    /// Starts a process that ends the mount for everybody in it when this one has died, whatever its threads wait for. Only the program
    /// itself can: it is started again for that.
    pub fn guard(&self) {
        let Some(abort) = self.mounted.as_ref().and_then(Mounted::abort_file) else { return };
        if let Err(error) = guard::start(abort) {
            log::warn!(
                "if this process is killed, the mount may have to be ended by force: start a guard: {error}"
            );
        }
    }

    /// Has the kernel ask once. The session starts the thread that answers by itself, and ends if the host refuses it one.
    ///
    /// # Errors
    /// Why the session ended.
    fn have_it_answer(&mut self, mount_point: &Path) -> Result<()> {
        let Err(errno @ (Errno::ENOTCONN | Errno::ECONNABORTED)) = statvfs(mount_point) else {
            return Ok(());
        };
        let ended = self.mounted.take().map(Mounted::wait);
        if let Err(error) = self.unmounter.unmount(true) {
            log::warn!("{error}");
        }
        let attempt = || format!("serve '{}'", mount_point.display());
        let error = match ended {
            Some(Err(error)) => error,
            Some(Ok(())) | None => Error::io(attempt(), &errno.into()),
        };
        Err(error.kind(Kind::CannotMount).hint("see 'ulimit -u' and 'ulimit -v'"))
    }

    /// What unmounts it, from any thread.
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Waits until it has been unmounted, by whomever.
    pub fn wait(&mut self) {
        if let Some(Err(error)) = self.mounted.take().map(Mounted::wait) {
            log::error!("{error}");
        }
    }

    /// Ends the service and closes the store.
    pub fn close(self) {
        let (server, sandbox) = self.end();
        drop(sandbox);
        server.stop();
    }

    /// Ends the service; the sandbox goes on without a mount.
    pub fn into_sandbox(self) -> Option<Arc<Sandbox>> {
        let (server, sandbox) = self.end();
        server.stop();
        sandbox
    }

    fn end(self) -> (Server, Option<Arc<Sandbox>>) {
        drop(self.mounted);
        let sandbox = self.sandbox.close();
        if let Some(Err(error)) = sandbox.as_ref().map(|s| s.detach()) {
            log::error!("{error}");
        }
        (self.server, sandbox)
    }
}

fn answer(
    request: Request,
    shared: &Shared,
    (unmounter, kernel): (&Unmounter, &Weak<dyn Kernel>),
) -> Result<Reply> {
    if request == Request::Unmount {
        // Where somebody has a copy of the mount, the kernel does not do that by itself.
        if let Some(Err(error)) = kernel.upgrade().map(|kernel| kernel.flush()) {
            log::warn!("{error}");
        }
        unmounter.unmount(false)?;
        return Ok(Reply::Done);
    }
    shared.answer(request)
}

/// Serves `plan` in this process, up to the end of the mount; `ready` is called when it stands. Call it before any
/// thread has been started.
///
/// # Errors
/// The store cannot be opened, or the mount cannot be made.
pub fn foreground(plan: &Plan, ready: impl FnOnce()) -> Result<()> {
    block_signals()?;
    exit_on_panic();
    let sandbox = Sandbox::create_or_open(&plan.base, &plan.store, &plan.choice.store_options())?;
    sandbox.set_protected(plan.choice.protected.clone());
    let mut serving = Serving::start(sandbox, &plan.mount_point, &plan.choice, open_gate)?;
    serving.guard();
    end_on_signals(serving.unmounter(), true)?;
    ready();
    serving.wait();
    serving.close();
    Ok(())
}

/// Starts a daemon that serves `plan`, and returns when the mount stands.
///
/// # Errors
/// The daemon's own error, or how it died.
pub fn background(plan: &Plan) -> Result<()> {
    let attempt = || format!("mount '{}'", plan.mount_point.display());
    let failed = |reason: String| Error::new(Kind::CannotMount, attempt(), reason);
    let plan_bytes = codec::encode(plan).map_err(failed)?;
    let mut daemon = Command::new("/proc/self/exe")
        .arg0("jailfs")
        .args([VERB.as_ref(), plan.base.as_os_str(), plan.mount_point.as_os_str()])
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .attempt(|| "start the daemon")?;
    if let Some(mut stdin) = daemon.stdin.take()
        && let Err(error) = stdin.write_all(&plan_bytes)
    {
        // It died before it read its plan; what it reports, or its status, says more than this error.
        log::debug!("hand the daemon its plan: {error}");
    }
    let report = daemon.stdout.take().map(read_report).transpose();
    match report {
        Ok(Some(Some(report))) => codec::decode::<Result<()>>(&report).map_err(failed)?,
        Ok(_) => {
            let status = daemon.wait().attempt(|| "wait for the daemon")?;
            Err(failed(format!("the daemon died ({status})"))
                .hint(format!("see '{}'", plan.store.join(LOG).display())))
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Reads the one frame that a daemon reports; none if it ends before it is complete.
fn read_report(mut from: impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0u8; 4];
    let mut report = Vec::new();
    if let Err(error) = from.read_exact(&mut len) {
        return if error.kind() == io::ErrorKind::UnexpectedEof { Ok(None) } else { Err(error) };
    }
    let len = u64::from(u32::from_le_bytes(len));
    from.take(len.min(MAX_REPORT)).read_to_end(&mut report)?;
    Ok((report.len() as u64 == len).then_some(report))
}

/// The life of the process that [`background`] started: up to the end of the mount. The exit code is for whoever
/// watches processes; what went wrong has been reported through the pipe.
pub fn main() -> u8 {
    let started = start_in_background();
    let reported = report(&started.as_ref().map(|_| ()).map_err(Error::clone));
    match started.and_then(|serving| reported.map(|()| serving)) {
        Ok(mut serving) => {
            serving.wait();
            serving.close();
            0
        }
        Err(error) => error.kind.exit_code(),
    }
}

fn start_in_background() -> Result<Serving> {
    close_inherited()?;
    let mut plan = Vec::new();
    io::stdin().lock().read_to_end(&mut plan).attempt(|| "read the plan")?;
    let plan: Plan = codec::decode(&plan).map_err(|error| Error::new(Kind::Usage, "read the plan", error))?;
    dup2_stdin(&dev_null()?).map_err(io::Error::from).attempt(|| "close the standard input")?;
    // Without a terminal there is no SIGINT from it, and no SIGHUP when it closes.
    sys::process::new_session().attempt(|| "leave the terminal")?;
    block_signals()?;
    raise_limits()?;
    let sandbox = Sandbox::create_or_open(&plan.base, &plan.store, &plan.choice.store_options())?;
    sandbox.set_protected(plan.choice.protected.clone());
    log_into(&plan.store)?;
    exit_on_panic();
    let mut serving = Serving::start(sandbox, &plan.mount_point, &plan.choice, open_gate)?;
    serving.guard();
    serving.have_it_answer(&plan.mount_point)?;
    end_on_signals(serving.unmounter(), false)?;
    Ok(serving)
}

/// Raises the resource limits of this process to what it needs, before it writes to a store.
///
/// # Errors
/// `CannotMount`: one is too low, and this user may not raise it.
fn raise_limits() -> Result<()> {
    sys::limits::raise().map_err(|too_low| {
        Error::new(Kind::CannotMount, "serve a sandbox", too_low.to_string())
            .hint("raise the hard limit of this user, in /etc/security/limits.conf for example")
    })
}

/// Closes every descriptor but the standard three. A daemon that keeps what a shell left open holds the pipe that
/// somebody reads to its end, or the lock of a script. Nothing in this process has been opened before it.
fn close_inherited() -> Result<()> {
    let listed = std::fs::read_dir("/proc/self/fd").attempt(|| "list the open files")?;
    // Collected first: the directory that is read has a descriptor too, and it is closed by its owner.
    let numbers: Vec<i32> = listed
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2)
        .collect();
    for number in numbers {
        match nix::unistd::close(number) {
            Ok(()) | Err(nix::Error::EBADF) => {}
            Err(error) => log::debug!("close the inherited descriptor {number}: {error}"),
        }
    }
    Ok(())
}

/// Tells the command that waits how it went, and lets go of its pipe.
fn report(result: &Result<()>) -> Result<()> {
    let bytes =
        codec::encode(result).map_err(|error| Error::new(Kind::Failed, "report to the command", error))?;
    let mut stdout = io::stdout().lock();
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
    // The command may have been killed; the mount stands all the same.
    if let Err(error) =
        stdout.write_all(&len).and_then(|()| stdout.write_all(&bytes)).and_then(|()| stdout.flush())
    {
        log::warn!("report to the command: {error}");
    }
    dup2_stdout(&dev_null()?).map_err(io::Error::from).attempt(|| "close the standard output")
}

fn dev_null() -> Result<std::fs::File> {
    OpenOptions::new().read(true).write(true).open("/dev/null").attempt(|| "open '/dev/null'")
}

/// Empties the log of a daemon if it is longer than `LOG_LIMIT`. A command in the sandbox can cause
/// lines of it.
pub fn limit_log() {
    let log = io::stderr();
    let is_too_long = nix::sys::stat::fstat(&log).is_ok_and(|stat| {
        let is_file = stat.st_mode & nix::libc::S_IFMT == nix::libc::S_IFREG;
        is_file && u64::try_from(stat.st_size).is_ok_and(|len| len > LOG_LIMIT)
    });
    // The file is open for appending, so the next line is its first.
    if is_too_long && nix::unistd::ftruncate(&log, 0).is_ok() {
        log::warn!("the log was longer than {LOG_LIMIT} bytes and was emptied");
    }
}

/// Sends the standard error, and with it the log, to the file in the store.
fn log_into(store: &Path) -> Result<()> {
    let path = store.join(LOG);
    let attempt = || format!("open '{}'", path.display());
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(&path)
        .attempt(attempt)?;
    dup2_stderr(file.as_fd()).map_err(io::Error::from).attempt(|| "redirect the standard error")?;
    limit_log();
    Ok(())
}

/// The signals that end a daemon, and SIGHUP.
fn signals() -> SigSet {
    SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])
}

/// Blocks the signals in this thread and in all that it starts. A program started from it inherits the mask.
fn block_signals() -> Result<()> {
    signals().thread_block().map_err(io::Error::from).attempt(|| "block signals")
}

/// Starts the thread that waits for signals: the first unmounts, the second ends the process at once.
fn end_on_signals(unmounter: Unmounter, hangup_ends: bool) -> Result<()> {
    let wait = move || {
        let mut asked = false;
        loop {
            match signals().wait() {
                Ok(Signal::SIGHUP) if !hangup_ends => {}
                Ok(_) if asked => std::process::exit(1),
                Ok(signal) => {
                    asked = true;
                    unmount_on(signal, &unmounter);
                }
                Err(error) => log::error!("wait for signals: {error}"),
            }
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)
        .attempt(|| "start the signal thread")
        .map(drop)
}

/// Unmounts; a mount in use is detached, and the process ends with its last user.
fn unmount_on(signal: Signal, unmounter: &Unmounter) {
    let mut result = unmounter.unmount(false);
    if result.as_ref().is_err_and(|error| error.kind == Kind::InUse) {
        log::warn!(
            "{signal}: the mount is in use: it is detached, and ends with its last user or a second signal"
        );
        result = unmounter.unmount(true);
    }
    if let Err(error) = result {
        log::error!("{signal}: {error}; a second signal ends the daemon at once");
    }
}

/// Makes a panic of any thread the end of the process, with status 101, after it has been logged.
pub(crate) fn exit_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        log::error!("{info}\n{}", std::backtrace::Backtrace::force_capture());
        std::process::exit(101);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_keeps_every_byte_of_its_paths() {
        let path = |bytes: &[u8]| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
        let plan = Plan {
            base: path(b"/b\xff\n"),
            mount_point: path(b"/m, x"),
            store: path(b"/s"),
            choice: Choice {
                links: Links::Rewrite,
                allowed_targets: vec![b"/usr/bin".to_vec()],
                allow_other: Some(false),
                ..Choice::default()
            },
        };
        assert_eq!(codec::decode::<Plan>(&codec::encode(&plan).unwrap()), Ok(plan));
    }

    #[test]
    fn a_report_is_whole_or_none() {
        assert_eq!(read_report(&b"\x02\0\0\0ok, and more"[..]).unwrap().as_deref(), Some(&b"ok"[..]));
        for cut in [&b""[..], b"\x02", b"\x02\0\0\0", b"\x02\0\0\0o", b"\xff\xff\xff\xffo"] {
            assert_eq!(read_report(cut).unwrap(), None);
        }
    }
}
