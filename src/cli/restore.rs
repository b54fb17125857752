//! `jailfs restore`, and the report of every verb that switches the tree to another state.

use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::{Reply, Request, Restored, Rev};

/// Restore the tree, or single paths, to a checkpoint, exactly and in place
///
/// Shells and programs in the mount continue in the restored tree. The output says how to undo the
/// restore.
#[derive(Args)]
pub(super) struct Restore {
    /// The checkpoint: its number or name, '@-N' for the N-th last, or 'base'
    #[arg(value_name = "ID|NAME")]
    to: String,
    /// Only these files and directories; the rest of the tree stays unchanged
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Only list what would change
    #[arg(long)]
    dry_run: bool,
    /// Detach mounts on directories that disappear, instead of refusing
    #[arg(long)]
    detach_mounts: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Restore {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let paths = target.paths(&self.paths)?;
        let (to, detach_mounts) = (Rev::parse(&self.to), self.detach_mounts);
        let request = Request::Restore { to, paths, dry_run: self.dry_run, detach_mounts };
        let Reply::Restored(restored) = target.call(request)? else { return Err(wrong_answer()) };
        tell(&restored, self.dry_run, self.json)?;
        Ok(0)
    }
}

/// Prints what a restore, discard or op restore did or would do: every deletion, and how to undo
/// it.
pub(super) fn tell(restored: &Restored, dry_run: bool, json: bool) -> Result<()> {
    let mut out = Out::new();
    if json {
        for change in &restored.changes {
            out.line(&Line::change(&change?).text()?);
        }
        out.line(&Line::restored(restored, dry_run).text()?);
    } else {
        let done = if dry_run { "would restore" } else { "restored" };
        out.line(&format!(
            "{done} {}: {}",
            format::one_line(&restored.to),
            format::summary(&restored.changes)?
        ));
        format::list(&restored.changes, !dry_run, |line| out.line(line))?;
        for point in &restored.detached {
            let what = if dry_run { "in the way: a mount at" } else { "detached: the mount at" };
            out.line(&format!("{what} {point}"));
        }
        if let Some(op) = restored.undo {
            out.line(&format!("undo: jailfs op restore {op}"));
        }
    }
    out.finish()
}
