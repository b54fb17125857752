//! The workloads. Each runs on every system in the same way, in its own mount.

mod build;
mod checkpoints;
mod create;
mod data;
mod meta;
mod scale;
mod state;

use std::path::PathBuf;

use crate::Res;
use crate::material::Materials;
use crate::runner::Run;

/// One workload: a base, and steps on it that are measured one by one.
pub struct Workload {
    pub group: &'static str,
    pub name: &'static str,
    pub about: &'static str,
    /// The programs that it needs.
    pub needs: &'static [&'static str],
    /// Whether it changes the base. The bare directory is then a copy.
    pub mutates: bool,
    /// Whether only jailfs can run it.
    pub jailfs_only: bool,
    pub base: fn(&Materials) -> Res<PathBuf>,
    pub run: fn(&mut Run) -> Res<()>,
}

impl Workload {
    const fn new(
        group: &'static str,
        name: &'static str,
        about: &'static str,
        base: fn(&Materials) -> Res<PathBuf>,
        run: fn(&mut Run) -> Res<()>,
    ) -> Workload {
        Workload { group, name, about, needs: &[], mutates: false, jailfs_only: false, base, run }
    }

    const fn needs(self, needs: &'static [&'static str]) -> Workload {
        Workload { needs, ..self }
    }

    const fn mutates(self) -> Workload {
        Workload { mutates: true, ..self }
    }

    const fn jailfs_only(self) -> Workload {
        Workload { jailfs_only: true, ..self }
    }
}

/// All workloads.
pub fn all() -> Vec<Workload> {
    let groups = [
        meta::all(),
        create::all(),
        build::all(),
        data::all(),
        scale::all(),
        state::all(),
        checkpoints::all(),
    ];
    groups.into_iter().flatten().collect()
}
