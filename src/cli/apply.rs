//! `jailfs apply`.

use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::json::Line;
use super::out::{self, Out};
use super::show;
use super::target::{Target, wrong_answer};
use crate::error::{Error, Kind, Result};
use crate::sandbox::verbs::{Applied, Reply, Request};

/// Write the tree into the base
///
/// If the base has changed meanwhile at a path that would be written, nothing is written, and the exit code is 3.
#[derive(Args)]
pub(super) struct Apply {
    /// Only at or below these paths
    #[arg(value_name = "PATH", conflicts_with = "undo")]
    paths: Vec<PathBuf>,
    /// Only list what would be written
    #[arg(long)]
    dry_run: bool,
    /// Take the last apply back out of the base
    #[arg(long)]
    undo: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Apply {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let paths = target.paths(&self.paths)?;
        let request = Request::Apply { paths, dry_run: self.dry_run, undo: self.undo };
        let Reply::Applied(applied) = target.call(request)? else { return Err(wrong_answer()) };
        let mut out = Out::new();
        if self.json {
            self.json(&mut out, &applied)?
        } else {
            self.text(&mut out, &applied)
        }
        out.finish()?;
        if applied.conflicts.is_empty() { Ok(0) } else { Err(conflict(&applied)) }
    }

    fn json(&self, out: &mut Out, applied: &Applied) -> Result<()> {
        for change in &applied.changes {
            out.line(&Line::change(change).text()?);
        }
        for (path, reason) in &applied.conflicts {
            out.line(&Line::conflict(path, reason).text()?);
        }
        out.line(&Line::applied(applied, self.dry_run, self.undo).text()?);
        Ok(())
    }

    fn text(&self, out: &mut Out, applied: &Applied) {
        if !applied.conflicts.is_empty() {
            tell_conflicts(applied);
            return;
        }
        let done = match (self.dry_run, self.undo) {
            (false, false) => "applied",
            (false, true) => "took back the last apply",
            (true, false) => "would apply",
            (true, true) => "would take back the last apply",
        };
        out.line(&format!("{done}: {}", show::summary(&applied.changes)));
        if self.dry_run {
            applied.changes.iter().for_each(|change| out.line(&show::name_status(change)));
        } else {
            show::deletions(&applied.changes).for_each(|deletion| out.line(&deletion));
            if !self.undo && !applied.changes.is_empty() {
                out.line("undo: jailfs apply --undo");
            }
        }
    }
}

/// Lists the conflicts, on the standard error.
pub(super) fn tell_conflicts(applied: &Applied) {
    for (path, reason) in &applied.conflicts {
        out::detail(&format!("conflict\t{path}\t{}", show::one_line(reason)));
    }
}

/// The error of an apply that found conflicts.
pub(super) fn conflict(applied: &Applied) -> Error {
    let paths = show::paths(applied.conflicts.len() as u64);
    Error::new(
        Kind::Conflict,
        "apply",
        format!("the base has changed meanwhile at {paths}; nothing is written"),
    )
    .hint("look at these paths in the base; apply the others by naming them")
}
