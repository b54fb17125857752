//! Finds the daemon of a sandbox that is mounted, for a race, and the walls of its attempts.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::caller::{Daemon, Places};
use crate::cli::confine::Confine;
use crate::cli::host::{self, Within};
use crate::cli::mount::directory;
use crate::cli::{Global, store_path};
use crate::control;
use crate::error::{Attempt, Error, Kind, Result};
use crate::run::{Spec, hidden};
use crate::store;
use crate::sys::mountinfo;

/// The daemon of the sandbox that the command line means. `None` if no daemon has it open, or one
/// that serves a `run` or mounts that are not visible here.
///
/// # Errors
/// The directory does not exist, or the daemon does not answer.
pub(super) fn find(global: &Global) -> Result<Option<Daemon>> {
    let dir = global.dir()?;
    if host::is_dead(&dir) {
        return Ok(None);
    }
    let dir = directory(&dir)?;
    let named = global.store.as_ref().map(|store| global.at(store)).transpose()?;
    let named = named.map(|store| store_path::store_for(&dir, Some(&store))).transpose()?;
    let place = match host::within(&dir)? {
        Within::Mount(place) if named.as_ref().is_none_or(|store| *store == place.store) => {
            Some(place)
        }
        Within::Mount(_) | Within::Host | Within::DeadMount(_) => None,
    };
    let store = match (&place, named) {
        (Some(place), _) => place.store.clone(),
        (None, Some(named)) => named,
        (None, None) => store_path::store_for(&dir, None)?,
    };
    if store_path::mount_that_stays(&store)?.is_none() {
        return Ok(None);
    }
    let Some(mut client) = control::connect(&store)? else { return Ok(None) };
    let stands_in = place.and_then(|place| place.head);
    client.set_head(global.head.clone().or_else(|| stands_in.clone()));
    let mounts = client.mounts()?;
    let points: Vec<PathBuf> = mounts
        .heads
        .iter()
        .map(|one| PathBuf::from(OsString::from_vec(one.mount_point.clone())))
        .filter(|point| is_here(point))
        .collect();
    if !mounts.can_race || points.is_empty() {
        return Ok(None);
    }
    let stands_at = stands_in.as_deref().and_then(|head| mounts.mount_point(head));
    let tree = stands_at.map_or(dir, |point| OsString::from_vec(point.to_vec()).into());
    let base = OsString::from_vec(store::base_of(&store)?.path).into();
    let places = Places { store, base, tree, mount_points: points };
    Ok(Some(Daemon::new(client, mounts.meant, places)))
}

fn is_here(point: &Path) -> bool {
    host::mount_around(point).is_ok_and(|found| found.as_deref() == Some(point))
}

/// Refuses the options that belong to the mount.
///
/// # Errors
/// `Usage`.
pub(super) fn check_options(has_policy: bool) -> Result<()> {
    if !has_policy {
        return Ok(());
    }
    let why = "the sandbox is mounted, and its mount decides which checkpoints are kept";
    Err(Error::new(Kind::Usage, "run attempts side by side", why)
        .hint("mount it with '-o keep=N' or '-o max-store=SIZE'"))
}

/// The walls around the attempts of a mounted sandbox. They do not see the mounts of its heads.
///
/// # Errors
/// As for [`Confine::spec`]. `InUse`: a path in the sandbox is to be hidden, which would hide it
/// from the programs in the mount, too.
pub(super) fn spec(confine: &Confine, global: &Global, daemon: &Daemon) -> Result<Spec> {
    let Places { store, base, tree, mount_points } = &daemon.places;
    let mut spec = confine.spec(global, tree, store)?;
    let attempt = || format!("run attempts in the mounted sandbox of '{}'", base.display());
    let is_inside = |path: &&PathBuf| path.starts_with(tree) || path.starts_with(base);
    if let Some(path) = hidden(&spec).iter().find(is_inside) {
        let why = format!("'{}' is hidden from commands, and lies in it", path.display());
        return Err(Error::new(Kind::InUse, attempt(), why)
            .hint("unmount the sandbox first: then only the attempts do not see the path"));
    }
    let mounts = mountinfo::read().attempt(attempt)?;
    let at =
        |entry: &mountinfo::Entry| PathBuf::from(OsString::from_vec(entry.mount_point.clone()));
    let is_of_head = |entry: &&mountinfo::Entry| mount_points.contains(&at(entry));
    let devices: BTreeSet<u64> = mounts.iter().filter(is_of_head).map(|entry| entry.dev).collect();
    let seen = mounts.iter().filter(|entry| devices.contains(&entry.dev));
    let others = seen.map(at).filter(|point| point != tree);
    spec.withheld.extend(others.map(PathBuf::into_os_string));
    spec.withheld.sort_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
    spec.withheld.dedup();
    Ok(spec)
}
