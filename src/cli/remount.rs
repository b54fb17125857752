//! `mount -o remount`, for which mount(8) calls its helper.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::host::{self, FS_TYPE};
use crate::error::{Attempt, Error, Kind, Result};
use crate::sys;
use crate::sys::mount::MountFlags;

/// The flags that a remount can change, for people.
const CHANGEABLE: &str = "these can: ro, exec, suid, dev, noatime, nodiratime, relatime, \
                          strictatime, lazytime, and their opposites";

/// Change the flags of a mount, for 'mount -o remount'
#[derive(Args)]
pub(super) struct Remount {
    /// Options, separated by commas
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// The mount point, optionally preceded by the source
    #[arg(value_name = "PATH", num_args = 1..=2)]
    places: Vec<PathBuf>,
}

impl Remount {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let Some(point) = self.places.last() else {
            return Err(Error::new(Kind::Usage, "remount", "no mount point is named"));
        };
        let point = host::resolve(&global.at(point)?)?;
        let attempt = || format!("remount '{}'", point.display());
        let mounts = sys::mountinfo::read().attempt(attempt)?;
        let here =
            mounts.into_iter().rfind(|mount| mount.mount_point == point.as_os_str().as_bytes());
        let Some(mount) = here.filter(|mount| mount.fs_type == FS_TYPE) else {
            return Err(Error::new(Kind::NoStore, attempt(), "no sandbox is mounted there"));
        };
        let mut flags = MountFlags::default();
        for options in [&mount.super_options, &mount.options] {
            // The other options belong to the filesystem, and a remount does not change them.
            for option in options.split(|byte| *byte == b',') {
                flags.take(option);
            }
        }
        let before = flags;
        let asked =
            self.options.iter().flat_map(|text| text.as_bytes().split(|byte| *byte == b','));
        for option in asked.filter(|option| !matches!(*option, b"" | b"remount" | b"defaults")) {
            // mount(8) repeats the options that the filesystem already has.
            let is_there =
                mount.super_options.split(|byte| *byte == b',').any(|have| have == option);
            if !(flags.take(option) || is_there) || flags.syncs() != before.syncs() {
                let option = OsStr::from_bytes(option).display().to_string();
                let why = format!("'{option}' cannot be changed while it is mounted");
                return Err(Error::new(Kind::Usage, attempt(), why).hint(CHANGEABLE));
            }
        }
        sys::mount::remount(&point, &flags).attempt(attempt)?;
        Ok(0)
    }
}
