//! `jailfs mount`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;

use super::Global;
use super::attach;
use super::host;
use super::options::Options;
use super::out;
use super::{protected, store_path};
use crate::daemon;
use crate::daemon::{MountChoice, Plan};
use crate::error::{Error, Kind, Result};

/// Mount BASE at MNT, to work in it without changing it
///
/// Returns when the mount is ready; a daemon serves it, and all other mounts of the same store. MNT
/// may be BASE itself, which the mount then hides. A mount with a dead daemon is replaced. '--head
/// NAME' mounts a fork.
#[derive(Args)]
pub(super) struct Mount {
    /// The directory to show; not written before 'apply'
    base: PathBuf,
    /// The mount point; must exist
    #[arg(value_name = "MNT")]
    mount_point: PathBuf,
    /// Serve in the foreground, until unmounted or interrupted
    #[arg(short, long)]
    foreground: bool,
    /// Make fsync do nothing, for sandboxes that need not survive a power cut
    #[arg(long)]
    volatile: bool,
    /// Accept a BASE that is not the directory of the store: a copy of it, or its replacement.
    /// Files that were changed in part and differ in BASE cannot be read, and 'apply' reports them
    /// as conflicts
    #[arg(long)]
    other_base: bool,
    /// Options, separated by commas: ro, allow_other, noexec, suid, dev, sync, dirsync, noatime,
    /// fsname=NAME, writeback, wake=auto|off|latency|spin, threads=N, parallel=N, volatile,
    /// links=show|deny|rewrite|literal, allow-target=PATH, max-bytes=N, max-files=N, keep=N,
    /// max-store=SIZE, operations=N, gc=on|off, history=N, history-bytes=N,
    /// snapdir=hidden|visible|off, snapname=NAME, nosnapmkdir, store=DIR
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<OsString>,
}

impl Mount {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let plan = self.plan(global)?;
        if self.foreground {
            let (base, point) = (plan.base.display(), plan.mount_point.display());
            store_path::check_free(&plan.store, &format!("mount '{base}' at '{point}'"))?;
            daemon::foreground(&plan, || {
                out::note(&format!("mounted at '{}'", plan.mount_point.display()))
            })?;
        } else {
            attach::mount(&plan, &MountChoice::Chosen(Box::new(plan.choice.clone())))?;
        }
        Ok(0)
    }

    fn plan(&self, global: &Global) -> Result<Plan> {
        let options = Options::parse(&self.options)?;
        // Resolve the mount point first: a dead mount over the base hides the base.
        let mount_point = free_mount_point(&global.at(&self.mount_point)?)?;
        let base = directory(&global.at(&self.base)?)?;
        let named = global.store.as_deref().or(options.store.as_deref());
        let named = named.map(|store| global.at(store)).transpose()?;
        let store = store_path::store_for(&base, named.as_deref())?;
        store_path::check(&base, &mount_point, &store)?;
        let mut choice = options.choice;
        choice.volatile |= self.volatile;
        choice.other_base = self.other_base;
        choice.protected = protected::protected()?;
        let head = store_path::head_in(&store, global.head.as_deref())?;
        Ok(Plan { base, mount_point, store, head, choice })
    }
}

/// The resolved path of a directory.
///
/// # Errors
/// `CannotMount`: it does not exist, or is not a directory.
pub(super) fn directory(path: &Path) -> Result<PathBuf> {
    let resolved = host::resolve(path).map_err(|error| error.kind(Kind::CannotMount))?;
    if resolved.is_dir() {
        return Ok(resolved);
    }
    Err(Error::new(
        Kind::CannotMount,
        format!("find '{}'", path.display()),
        "it is not a directory",
    ))
}

/// The resolved path of a directory without a sandbox mounted on it. Detaches dead mounts there.
///
/// # Errors
/// `CannotMount`: it is not a directory. `InUse`: a sandbox is mounted there.
pub(super) fn free_mount_point(path: &Path) -> Result<PathBuf> {
    while host::is_dead(path) {
        let point = host::resolve_mount_point(path)?;
        if host::mount_around(&point)?.as_ref() != Some(&point) {
            let attempt = format!("mount at '{}'", path.display());
            return Err(Error::new(
                Kind::CannotMount,
                attempt,
                "a dead mount of another filesystem is in the way",
            ));
        }
        host::unmount(&point, true)?;
        log::warn!("the dead mount at '{}' is detached", point.display());
    }
    let point = directory(path).map_err(|error| match error.errno {
        Some(nix::libc::ENOENT) => error.hint("create the mount point first: an empty directory"),
        _ => error,
    })?;
    if host::mount_around(&point)?.as_ref() == Some(&point) {
        let attempt = format!("mount at '{}'", point.display());
        return Err(Error::new(Kind::InUse, attempt, "a sandbox is mounted there already")
            .hint(format!("use it as it is, or end it with 'jailfs umount {}'", point.display())));
    }
    Ok(point)
}
