//! The process that serves a mount, in the foreground or in the background.
//!
//! In the background it is this program again (`/proc/self/exe __daemon`). It reads its [`Plan`]
//! from standard input. Once, it reports on standard output that the mount is ready or why it
//! failed, and the command that started it waits for that. There is no fork without exec, so no
//! thread or lock is ever duplicated halfway.
//!
//! * All threads block the signals that end the process, and one thread waits for them.
//! * The store is closed before the control socket: a client that waits for the end of the daemon
//!   finds the store free.
//! * A daemon that panics exits and leaves a dead mount (ENOTCONN). It does not unmount: programs
//!   in the mount would continue in the directory below, which may be the base itself.

pub mod guard;
mod inherited;
mod plan;

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
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

pub use plan::{Choice, Links, Plan, Snapdir};

use crate::control::{Greeting, Listener, Server};
use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{Fs, Kernel, Limits};
use crate::fuse;
use crate::fuse::{Handed, Mounted, Unmounter};
use crate::sandbox::Sandbox;
use crate::sandbox::{Detail, Reply, Request};
use crate::store::io::codec;
use crate::sys;

/// The hidden verb by which the program starts itself in the background.
pub const VERB: &str = "__daemon";
/// The name of the log in the store's directory.
pub const LOG: &str = "daemon.log";
/// A log longer than this, in bytes, is truncated to nothing.
const LOG_LIMIT: u64 = 8 << 20;
/// How long the end waits for a comparison in progress.
const LONG_LIMIT: Duration = Duration::from_secs(2);
/// The maximum length of a report, in bytes.
const MAX_REPORT: u64 = 1 << 20;

/// Refuses requests before they reach the sandbox.
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
    /// None after [`Serving::wait`].
    mounted: Option<Mounted>,
    unmounter: Unmounter,
    server: Server,
    sandbox: Arc<Shared>,
}

/// The state shared by the threads that answer.
struct Shared {
    /// The sandbox while it is served. None once it is closed. A request holds the lock while it
    /// runs, except a long one that changes nothing.
    sandbox: RwLock<Option<Arc<Sandbox>>>,
    /// Long requests run one at a time, because each takes a processor and memory.
    long: Mutex<()>,
}

impl Shared {
    /// Handles a request.
    fn answer(&self, request: Request) -> Result<Reply> {
        let ending = || Error::new(Kind::Failed, "answer a request", "the daemon is ending");
        if !is_long(&request) {
            return self.sandbox.read().as_ref().ok_or_else(ending)?.handle(request);
        }
        let _one = self.long.lock();
        let sandbox = self.sandbox.read().clone();
        sandbox.ok_or_else(ending)?.handle(request)
    }

    /// Takes the sandbox away from further requests. Waits for requests that change it, and for a
    /// short time for the others.
    fn close(&self) -> Option<Arc<Sandbox>> {
        let sandbox = self.sandbox.write().take();
        if let Some(sandbox) = &sandbox {
            sandbox.interrupt();
            if self.long.try_lock_for(LONG_LIMIT).is_none() {
                log::warn!("ended without waiting for a comparison in progress");
            }
        }
        sandbox
    }
}

/// Whether a request reads much and changes nothing.
fn is_long(request: &Request) -> bool {
    match request {
        Request::Diff { detail, .. } | Request::FileDiff { detail, .. } => {
            *detail != Detail::NameStatus
        }
        _ => false,
    }
}

impl Serving {
    /// Mounts `sandbox` and serves it from threads of this process.
    ///
    /// # Errors
    /// The socket cannot be bound, or the mount cannot be made.
    pub fn start(
        sandbox: Arc<Sandbox>,
        mount_point: &Path,
        choice: &Choice,
        gate: Gate,
    ) -> Result<Serving> {
        let options = choice.mount_options();
        let mount = |fs, store: &Path| fuse::mount(fs, mount_point, store, &options);
        // Bind the socket first, so that it exists when the mount is visible.
        let listener = Listener::bind(sandbox.store_path())?;
        Serving::start_with(sandbox, listener, mount_point, choice, gate, mount)
    }

    /// Serves `sandbox` from threads of this process, in a mount that was made for it in another
    /// mount namespace. There it is visible at `mount_point`. That is a view of its own with the
    /// control socket in it, so `listener` existed before. Symlinks keep their text, because none
    /// leads out of the view.
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
            sandbox.fs().set_edit_bounds(choice.history());
        }
        let mounted = mount(Arc::clone(sandbox.fs()), sandbox.store_path())?;
        sandbox.attach(mounted.kernel());
        let unmounter = mounted.unmounter();
        // The handlers must not keep the store open.
        let (asked, kernel) = (mounted.unmounter(), Arc::downgrade(&mounted.kernel()));
        let sandbox =
            Arc::new(Shared { sandbox: RwLock::new(Some(sandbox)), long: Mutex::new(()) });
        let shared = Arc::clone(&sandbox);
        let greeting = Greeting::of_this_process(mount_point.as_os_str().as_bytes());
        let server = listener.serve(greeting, move |request| {
            gate(&request)?;
            answer(request, &shared, (&asked, &kernel))
        })?;
        Ok(Serving { mounted: Some(mounted), unmounter, server, sandbox })
    }

    /// Starts a process that aborts the FUSE connection when this process has died, whatever its
    /// threads wait for. This process must be this program, which is started again as the guard.
    pub fn guard(&self) {
        let Some(abort) = self.mounted.as_ref().and_then(Mounted::abort_file) else { return };
        if let Err(error) = guard::start(abort) {
            log::warn!(
                "start a guard: {error}; if this process is killed, the mount may \
                need an abort by hand"
            );
        }
    }

    /// Has the kernel ask once. The session starts the thread that answers by itself, and ends if
    /// the host refuses it one.
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

    /// Unmounts it from any thread.
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Waits until it is unmounted.
    pub fn wait(&mut self) {
        if let Some(Err(error)) = self.mounted.take().map(Mounted::wait) {
            log::error!("{error}");
        }
    }

    /// Stops serving and closes the store.
    pub fn close(self) {
        let (server, sandbox) = self.end();
        drop(sandbox);
        server.stop();
    }

    /// Stops serving. The sandbox lives on without a mount.
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
        // With a bind mount of the tree left, the kernel does not flush its dirty pages by itself.
        if let Some(Err(error)) = kernel.upgrade().map(|kernel| kernel.flush()) {
            log::warn!("{error}");
        }
        unmounter.unmount(false)?;
        return Ok(Reply::Done);
    }
    shared.answer(request)
}

/// Serves `plan` in this process until the mount ends. Calls `ready` when it is mounted. Call it
/// before any thread starts.
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

/// Starts a daemon that serves `plan`, and returns when it is mounted.
///
/// # Errors
/// The daemon's own error, or its exit status.
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
        // The daemon died before it read its plan. Its report or its status says more than this
        // error.
        log::debug!("send the plan to the daemon: {error}");
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

/// Reads the one frame that a daemon reports. None if it ends before the frame is complete.
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

/// Runs the process that [`background`] started, until the mount ends. The exit code is for process
/// supervisors; errors have been reported through the pipe.
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
    inherited::close()?;
    let mut plan = Vec::new();
    io::stdin().lock().read_to_end(&mut plan).attempt(|| "read the plan")?;
    let plan: Plan =
        codec::decode(&plan).map_err(|error| Error::new(Kind::Usage, "read the plan", error))?;
    dup2_stdin(&dev_null()?).map_err(io::Error::from).attempt(|| "close the standard input")?;
    // Without a terminal there is no SIGINT from it, and no SIGHUP when it closes.
    sys::process::new_session().attempt(|| "start a session of its own")?;
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

/// Raises the resource limits of this process to the required values, before it writes to a store.
///
/// # Errors
/// `CannotMount`: a limit is too low, and this user may not raise it.
fn raise_limits() -> Result<()> {
    sys::limits::raise().map_err(|too_low| {
        Error::new(Kind::CannotMount, "serve a sandbox", too_low.to_string())
            .hint("raise the hard limit of this user, in /etc/security/limits.conf for example")
    })
}

/// Reports the result to the waiting command, and closes the pipe.
fn report(result: &Result<()>) -> Result<()> {
    let bytes = codec::encode(result)
        .map_err(|error| Error::new(Kind::Failed, "report to the command", error))?;
    let mut stdout = io::stdout().lock();
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
    // The command may have been killed. The mount is ready all the same.
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

/// Truncates the log of a daemon to nothing if it is longer than `LOG_LIMIT`: a command in the
/// sandbox can cause log lines.
pub fn limit_log() {
    let log = io::stderr();
    let is_too_long = nix::sys::stat::fstat(&log).is_ok_and(|stat| {
        let is_file = stat.st_mode & nix::libc::S_IFMT == nix::libc::S_IFREG;
        is_file && u64::try_from(stat.st_size).is_ok_and(|len| len > LOG_LIMIT)
    });
    // The file is open for appending, so the next line becomes its first.
    if is_too_long && nix::unistd::ftruncate(&log, 0).is_ok() {
        log::warn!("the log was longer than {LOG_LIMIT} bytes and was emptied");
    }
}

/// Redirects standard error, and with it the log, to the file in the store.
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

/// Blocks the signals in this thread and its later children, threads and programs.
fn block_signals() -> Result<()> {
    signals().thread_block().map_err(io::Error::from).attempt(|| "block signals")
}

/// Starts the thread that waits for signals. The first unmounts, the second ends the process at
/// once.
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

/// Unmounts. If the mount is in use, detaches it, and the process ends with its last user.
fn unmount_on(signal: Signal, unmounter: &Unmounter) {
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

/// Makes a panic of any thread log itself and end the process with status 101.
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
    fn an_incomplete_report_is_none() {
        assert_eq!(
            read_report(&b"\x02\0\0\0ok, and more"[..]).unwrap().as_deref(),
            Some(&b"ok"[..])
        );
        for cut in [&b""[..], b"\x02", b"\x02\0\0\0", b"\x02\0\0\0o", b"\xff\xff\xff\xffo"] {
            assert_eq!(read_report(cut).unwrap(), None);
        }
    }
}
