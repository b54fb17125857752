//! The loop of a coding agent, without the agent: checkpoint, let it work, run the tests, restore
//! on red.
//!
//! ```sh
//! cargo run --example agent_loop -- REPOSITORY 'TEST COMMAND' 'STEP COMMAND'...
//! ```
//!
//! Every step is a shell command that changes the repository; it runs in a mount over a private
//! directory, so the repository itself stays as it is. If the tests fail after
//! a step, the checkpoint before it is restored in place. The diff that remains is printed at the
//! end. It is written into the repository only if `JAILFS_APPLY=1`.

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use jailfs::error::{Attempt, Error, Kind, Result};
use jailfs::sandbox::{Policy, Reply, Request, Rev, Sandbox, StoreOptions, View};
use jailfs::{MountOptions, Mounted};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [repository, test, steps @ ..] = words.as_slice() else {
        println!("usage: agent_loop REPOSITORY 'TEST COMMAND' 'STEP COMMAND'...");
        return ExitCode::from(2);
    };
    match work(Path::new(repository), test, steps) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("agent_loop: error: {error}");
            ExitCode::from(error.kind.exit_code())
        }
    }
}

fn work(repository: &Path, test: &str, steps: &[String]) -> Result<()> {
    let place = tempfile::tempdir().attempt(|| "make a directory for the mount")?;
    let (store, mount_point) = (place.path().join("store"), place.path().join("mnt"));
    std::fs::create_dir(&mount_point).attempt(|| "make the mount point")?;
    let sandbox = Sandbox::create_or_open(
        repository,
        &store,
        &StoreOptions { volatile: true, ..StoreOptions::default() },
    )?;
    let mounted = mount(&sandbox, &store, &mount_point)?;
    let outcome =
        steps.iter().try_for_each(|step| attempt_step(&sandbox, &mount_point, test, step));
    let finished = outcome.and_then(|()| finish(&sandbox));
    mounted.unmounter().unmount(true)?;
    mounted.wait()?;
    finished
}

fn mount(sandbox: &Arc<Sandbox>, store: &Path, mount_point: &Path) -> Result<Mounted> {
    let view = View {
        mount_point: mount_point.to_owned(),
        policy: Policy::Deny,
        allowed_targets: vec![b"/usr".to_vec()],
        snapdir: None,
    };
    sandbox.set_view(view)?;
    let mounted =
        jailfs::mount(Arc::clone(sandbox.fs()), mount_point, store, &MountOptions::default())?;
    sandbox.attach(mounted.kernel());
    Ok(mounted)
}

/// One step. If the tests fail after it, the tree is restored.
fn attempt_step(sandbox: &Sandbox, mount_point: &Path, test: &str, step: &str) -> Result<()> {
    let Reply::Checkpoint(before) =
        sandbox.handle(Request::Checkpoint { name: None, message: format!("before: {step}") })?
    else {
        return Err(Error::new(Kind::Failed, "checkpoint", "an answer to something else"));
    };
    let worked = shell(mount_point, step)? && shell(mount_point, test)?;
    if worked {
        println!("green   {step}");
        return Ok(());
    }
    sandbox.handle(Request::Restore {
        detach_mounts: false,
        to: Rev::Id(before.id),
        paths: Vec::new(),
        dry_run: false,
    })?;
    println!("red     {step}   (restored checkpoint {})", before.id);
    Ok(())
}

fn shell(mount_point: &Path, command: &str) -> Result<bool> {
    let directory: PathBuf = mount_point.to_owned();
    let status = Command::new("sh").args(["-c", command]).current_dir(directory).status();
    Ok(status.attempt(|| format!("run '{command}'"))?.success())
}

fn finish(sandbox: &Sandbox) -> Result<()> {
    let dry_run = std::env::var_os("JAILFS_APPLY").is_none_or(|value| value != "1");
    let Reply::Applied(applied) = sandbox.handle(Request::Apply {
        paths: Vec::new(),
        dry_run,
        undo: false,
        consent: Default::default(),
    })?
    else {
        return Err(Error::new(Kind::Failed, "apply", "an answer to something else"));
    };
    for change in &applied.changes {
        let change = change?;
        println!("{:<8} {}", if dry_run { "would" } else { "applied" }, change.path);
    }
    for (path, why) in &applied.conflicts {
        println!("conflict {path}: {why}");
    }
    Ok(())
}
