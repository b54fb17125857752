//! The process that serves the mounts of a store, in the foreground or in the background.
//!
//! One daemon serves all heads of a store. It starts with one mount; clients ask it for others over
//! the control socket. It ends when its last mount has ended.
//!
//! In the background it is this program again (`/proc/self/exe __daemon`). It reads its [`Plan`]
//! from standard input. Once, it reports on standard output that the mount is ready or why it
//! failed, and the command that started it waits for that. There is no fork without exec, so no
//! thread or lock is ever duplicated halfway.
//!
//! * All threads block the signals that end the process, and one thread waits for them.
//! * The store is closed before the control socket: a client that waits for the end of the daemon
//!   finds the store free.
//! * A mount that is unmounted or dies ends its own head only.
//! * A daemon that panics exits and leaves dead mounts (ENOTCONN). It does not unmount: programs
//!   in a mount would continue in the directory below, which may be the base itself.

mod door;
mod gate;
pub mod guard;
mod head;
mod heads;
mod inherited;
mod logfile;
mod plan;
mod race;
mod serving;
mod signals;

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use nix::unistd::{dup2_stdin, dup2_stdout};

pub use door::{Access, MadeForks};
pub use logfile::{exit_on_panic, limit_log};
pub use plan::{Choice, Links, MountChoice, Plan, Snapdir};
pub use race::{AttemptPlan, ServedRace};
pub use serving::Serving;

use crate::error::{Attempt, Error, Kind, Result};
use crate::sandbox::Sandbox;
use crate::store::io::codec;
use crate::sys;
use logfile::{LOG, log_into};
use plan::MountPlan;
use serving::raise_limits;
use signals::{block_signals, end_on_signals};

/// The hidden verb by which the program starts itself in the background.
pub const VERB: &str = "__daemon";
/// The maximum length of a report, in bytes.
const MAX_REPORT: u64 = 1 << 20;

/// Serves `plan` in this process until its last mount ends. Calls `ready` when it is mounted. Call
/// it before any thread starts.
///
/// # Errors
/// The store cannot be opened, or the mount cannot be made.
pub fn foreground(plan: &Plan, ready: impl FnOnce()) -> Result<()> {
    block_signals()?;
    exit_on_panic();
    let serving = Serving::start(open(plan)?, &plan.mount_point, &plan.choice, Access::Full)?;
    end_on_signals(Arc::clone(serving.heads()), true)?;
    ready();
    serving.wait();
    serving.close();
    Ok(())
}

fn open(plan: &Plan) -> Result<Arc<Sandbox>> {
    let options = plan.choice.store_options();
    let sandbox = Sandbox::create_or_open_head(&plan.base, &plan.store, &options, &plan.head)?;
    sandbox.set_protected(plan.choice.protected.clone());
    Ok(sandbox)
}

/// The message by which a client asks a running daemon to mount a head at `mount_point`.
///
/// # Errors
/// It cannot be encoded.
pub fn mount_message(mount_point: &Path, options: MountChoice) -> Result<Vec<u8>> {
    let plan = MountPlan { mount_point: mount_point.to_owned(), options };
    codec::encode(&plan).map_err(|error| Error::new(Kind::Failed, "ask for a mount", error))
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

/// Runs the process that [`background`] started, until its last mount ends. The exit code is for
/// process supervisors; errors have been reported through the pipe.
pub fn main() -> u8 {
    let started = start_in_background();
    let reported = report(&started.as_ref().map(|_| ()).map_err(Error::clone));
    match started.and_then(|serving| reported.map(|()| serving)) {
        Ok(serving) => {
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
    let sandbox = open(&plan)?;
    log_into(&plan.store)?;
    exit_on_panic();
    let serving = Serving::start(sandbox, &plan.mount_point, &plan.choice, Access::Full)?;
    end_on_signals(Arc::clone(serving.heads()), false)?;
    Ok(serving)
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
