//! Mounts a head through the daemon that has the store open, or starts a daemon.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::host::{self, Within};
use crate::control;
use crate::control::{Client, ENDING_LIMIT, PAUSE};
use crate::daemon;
use crate::daemon::{MountChoice, Plan};
use crate::error::{Error, Kind, Result};

/// How long another daemon may take to listen, after it has opened the store.
const STARTING_LIMIT: Duration = Duration::from_secs(3);

/// Mounts the head of `plan`. A running daemon gets `options`, a new one those of the plan.
///
/// # Errors
/// `InUse`: the head is mounted already. Others are those of the daemon.
pub(super) fn mount(plan: &Plan, options: &MountChoice) -> Result<()> {
    check_outside(&plan.mount_point, &plan.store)?;
    let end = Instant::now() + ENDING_LIMIT;
    let mut first_lost = None;
    loop {
        let is_over = Instant::now() > end;
        match control::connect(&plan.store) {
            Ok(Some(client)) => {
                let pid = client.greeting().pid;
                if mount_by(client, plan, options)? {
                    return Ok(());
                }
                if is_over {
                    return Err(still_ending(plan, pid));
                }
            }
            Ok(None) => match daemon::background(plan) {
                // Another command may have started a daemon first, which does not listen yet.
                Err(error) if error.kind == Kind::InUse => {
                    let lost = *first_lost.get_or_insert_with(Instant::now);
                    if lost.elapsed() > STARTING_LIMIT {
                        return Err(error);
                    }
                }
                done => return done,
            },
            // An ending daemon accepts no more connections.
            Err(error) if is_over => return Err(error),
            Err(_) => {}
        }
        thread::sleep(PAUSE);
    }
}

/// Refuses a mount point in a mount of the same store: it would keep that mount busy, and be a part
/// of its tree.
///
/// # Errors
/// `CannotMount`, with a hint.
pub(super) fn check_outside(point: &Path, store: &Path) -> Result<()> {
    let Some(parent) = point.parent().filter(|parent| !parent.as_os_str().is_empty()) else {
        return Ok(());
    };
    match host::within(parent)? {
        Within::Mount(place) if place.store == store => {
            let attempt = format!("mount at '{}'", point.display());
            let reason = "the mount point is inside a mount of the same sandbox";
            Err(Error::new(Kind::CannotMount, attempt, reason).hint("choose another mount point"))
        }
        _ => Ok(()),
    }
}

/// Mounts through a running daemon. False if it is ending.
fn mount_by(mut client: Client, plan: &Plan, options: &MountChoice) -> Result<bool> {
    let pid = client.greeting().pid;
    let elsewhere = || {
        let attempt = format!("mount head '{}' at '{}'", plan.head, plan.mount_point.display());
        let reason = format!(
            "the daemon of the store (process {pid}) is in another mount namespace, where the \
             mount would not be visible here"
        );
        let hint = format!("mount it there: 'nsenter -m -t {pid} jailfs mount ...'");
        Error::new(Kind::CannotMount, attempt, reason).hint(hint)
    };
    if mount_namespace(pid).is_some_and(|theirs| Some(theirs) != mount_namespace_of_self()) {
        return Err(elsewhere());
    }
    client.set_head(Some(plan.head.clone()));
    if !client.mount(daemon::mount_message(&plan.mount_point, options.clone())?)? {
        return Ok(false);
    }
    match host::mount_around(&plan.mount_point)? {
        Some(point) if point == plan.mount_point => Ok(true),
        _ => Err(elsewhere()),
    }
}

fn mount_namespace(pid: u32) -> Option<std::path::PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok()
}

fn mount_namespace_of_self() -> Option<std::path::PathBuf> {
    mount_namespace(std::process::id())
}

fn still_ending(plan: &Plan, pid: u32) -> Error {
    let attempt = format!("mount head '{}' at '{}'", plan.head, plan.mount_point.display());
    let reason =
        format!("the daemon of the store (process {pid}) is ending, and has not ended yet");
    Error::new(Kind::InUse, attempt, reason)
        .hint("end the programs that use its last mount; a second SIGTERM ends it at once")
}
