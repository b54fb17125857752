//! `jailfs umount`.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::Global;
use super::host::{self, Within};
use super::out;
use crate::control;
use crate::control::Client;
use crate::error::{Error, Kind, Result};
use crate::sandbox::Request;

/// How long a daemon may take to close its store after the mount is gone.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Unmount MNT; its daemon ends with its last mount
///
/// Returns when the daemon has closed the head, and the store if it was the last one. The changes
/// stay in the store, and the next mount shows them again. A mount with a dead daemon is detached.
#[derive(Args)]
pub(super) struct Umount {
    /// The mount point
    #[arg(value_name = "MNT")]
    mount_point: PathBuf,
    /// Detach the mount while it is in use; the daemon ends with its last user
    #[arg(short, long)]
    lazy: bool,
}

impl Umount {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let point =
            host::resolve_mount_point(&global.at(&self.mount_point)?).map_err(
                |error| match error.errno {
                    Some(nix::libc::ENOENT | nix::libc::ENOTDIR) => error.kind(Kind::NoStore),
                    _ => error,
                },
            )?;
        let attempt = format!("unmount '{}'", point.display());
        if host::is_dead(&point) {
            // The list of mounts says whether it is a jailfs mount. Others are left alone.
            is_mounted_at(&point, &attempt)?;
            host::unmount(&point, true)?;
            out::note(&format!(
                "the daemon of '{}' was dead; the mount is detached",
                point.display()
            ));
            return Ok(0);
        }
        is_mounted_at(&point, &attempt)?;
        if self.lazy {
            host::unmount(&point, true)?;
            return Ok(0);
        }
        match daemon_of(&point)? {
            Some(client) => end(client, &point, &attempt)?,
            // No daemon answers, so the kernel unmounts.
            None => host::unmount(&point, false)?,
        }
        Ok(0)
    }
}

fn is_mounted_at(point: &Path, attempt: &str) -> Result<()> {
    match host::mount_around(point)? {
        Some(mounted) if mounted == point => Ok(()),
        Some(mounted) => {
            Err(Error::new(Kind::NoStore, attempt, "it is inside a mount, but not its mount point")
                .hint(format!("jailfs umount {}", mounted.display())))
        }
        None => Err(Error::new(Kind::NoStore, attempt, "no sandbox is mounted there")),
    }
}

/// The daemon that serves the mount at `point`.
fn daemon_of(point: &Path) -> Result<Option<Client>> {
    let Within::Mount(place) = host::within(point)? else { return Ok(None) };
    let Some(mut client) = control::connect(&place.store)? else { return Ok(None) };
    client.set_head(place.head);
    let mounts = client.mounts()?;
    let is_here = mounts.mount_point(&mounts.meant) == Some(point.as_os_str().as_bytes());
    client.set_head(Some(mounts.meant));
    Ok(is_here.then_some(client))
}

fn end(mut client: Client, point: &Path, attempt: &str) -> Result<()> {
    let pid = client.greeting().pid;
    client.call(&Request::Unmount).map_err(|error| match error.kind {
        Kind::InUse => host::busy_mount(error, point),
        _ => error,
    })?;
    if client.wait_for_end(END_LIMIT) {
        return Ok(());
    }
    let reason =
        format!("the mount is gone, but its daemon (process {pid}) has not closed its head yet");
    Err(Error::new(Kind::Failed, attempt, reason).hint("STORE/daemon.log may say why it waits"))
}
