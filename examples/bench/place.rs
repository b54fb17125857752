//! Makes the directory of the benchmark, and removes it with all mounts and processes.
//!
//! The first process makes the directory, starts the second as the first of a pid namespace, and
//! only waits. When the second ends (done, by a panic, or because the user pressed Ctrl-C
//! and the first killed it), the kernel kills all processes in its namespace. No other process is
//! in its mount namespace, so the mounts end too. Then the first removes the directory. If
//! the first is killed, so is the second; then only the directory stays.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};

use crate::Res;
use crate::args::Args;
use crate::{runner, workloads};

/// The verb of the second process.
pub const INNER: &str = "__inner";

/// The first process.
pub fn supervise(words: &[OsString]) -> Res<ExitCode> {
    let args = Args::parse(words)?;
    if args.list {
        for workload in workloads::all() {
            println!("{}/{}: {}", workload.group, workload.name, workload.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !nix::unistd::geteuid().is_root() {
        return Err("overlayfs and private mount namespaces need root: run it as root".into());
    }
    let dir = tempfile::Builder::new().prefix("jailfs-bench-").tempdir_in(&args.dir)?;
    let program = std::env::current_exe()?;
    let signals =
        SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD]);
    signals.thread_block()?;
    unshare(CloneFlags::CLONE_NEWPID)?;
    let child = Command::new(program).arg(INNER).arg(dir.path()).args(words).spawn()?;
    let code = wait(child, &signals);
    dir.close()?;
    code
}

/// Waits for the second process; a signal ends it.
fn wait(mut child: Child, signals: &SigSet) -> Res<ExitCode> {
    loop {
        if let Some(status) = child.try_wait()? {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
        }
        let signal = signals.wait()?;
        if signal != Signal::SIGCHLD {
            child.kill()?;
            child.wait()?;
            return Err(format!("{signal}: stopped, and cleaned up").into());
        }
    }
}

/// The second process.
pub fn inner(words: &[OsString]) -> Res<ExitCode> {
    SigSet::empty().thread_set_mask()?;
    set_pdeathsig(Signal::SIGKILL)?;
    let (dir, rest) = words.split_first().ok_or("no directory was given")?;
    let args = Args::parse(rest)?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    // Mount /proc anew, so that it shows the processes of this namespace.
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), none)?;
    let dir = args.disk.make(&PathBuf::from(dir), args.size)?;
    runner::run(&args, &dir)
}
