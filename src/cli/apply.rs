//! `jailfs apply`.

use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::{self, Out};
use super::target::{Target, wrong_answer};
use crate::error::{Error, Kind, Result};
use crate::sandbox::{Applied, Consent, Reply, Request};

/// Write the tree into the base
///
/// If a path that would be written has also changed in the base, nothing is written, and the exit
/// code is 3. The same applies if an unnamed protected path would be written, such as '.git/hooks',
/// or if a file would gain a set-id bit or capabilities.
#[derive(Args)]
pub(super) struct Apply {
    /// Only at or below these paths
    #[arg(value_name = "PATH", conflicts_with = "undo")]
    paths: Vec<PathBuf>,
    /// Only list what would be written
    #[arg(long)]
    dry_run: bool,
    /// Undo the last apply
    #[arg(long)]
    undo: bool,
    /// Also write protected paths, which programs outside the sandbox run by themselves
    #[arg(long, conflicts_with = "undo")]
    protected: bool,
    /// Also write set-id bits and file capabilities
    #[arg(long, conflicts_with = "undo")]
    privileges: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Apply {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let paths = target.paths(&self.paths)?;
        let consent = Consent { protected: self.protected, privileges: self.privileges };
        let request = Request::Apply { paths, dry_run: self.dry_run, undo: self.undo, consent };
        let Reply::Applied(applied) = target.call(request)? else { return Err(wrong_answer()) };
        let mut out = Out::new();
        if self.json {
            self.json(&mut out, &applied)?
        } else {
            self.text(&mut out, &applied)?
        }
        out.finish()?;
        why_not_written(&applied).map_or(Ok(0), Err)
    }

    fn json(&self, out: &mut Out, applied: &Applied) -> Result<()> {
        for change in &applied.changes {
            out.line(&Line::change(&change?).text()?);
        }
        for (path, reason) in &applied.conflicts {
            out.line(&Line::conflict(path, reason).text()?);
        }
        for (path, reason) in &applied.refused {
            out.line(&Line::refused(path, reason).text()?);
        }
        for (path, reason) in &applied.not_kept {
            out.line(&Line::not_kept(path, reason).text()?);
        }
        out.line(&Line::applied(applied, self.dry_run, self.undo).text()?);
        Ok(())
    }

    fn text(&self, out: &mut Out, applied: &Applied) -> Result<()> {
        tell_conflicts(applied);
        if why_not_written(applied).is_some() && !self.dry_run {
            return Ok(());
        }
        let done = match (self.dry_run, self.undo) {
            (_, true) if applied.is_rollback && applied.changes.is_empty() => {
                out.line(
                    "the last apply was not finished, and the base is rolled back to what it was \
                     before it",
                );
                return Ok(());
            }
            (false, false) => "applied",
            (false, true) => "undid the last apply",
            (true, false) => "would apply",
            (true, true) => "would undo the last apply",
        };
        out.line(&format!("{done}: {}", format::summary(&applied.changes)?));
        format::list(&applied.changes, !self.dry_run, |line| out.line(line))?;
        if !self.dry_run && !self.undo && !applied.changes.is_empty() {
            out.line("undo: jailfs apply --undo");
        }
        tell_not_kept(applied);
        Ok(())
    }
}

/// Warns on the standard error of what the base did not keep.
pub(super) fn tell_not_kept(applied: &Applied) {
    for (path, reason) in &applied.not_kept {
        out::note(&format!("warning: '{path}': {}", format::one_line(reason)));
    }
    let more = applied.not_kept_count.saturating_sub(applied.not_kept.len() as u64);
    if more > 0 {
        out::note(&format!(
            "warning: and {} more of which the base did not keep everything",
            format::paths(more)
        ));
    }
}

/// Prints the conflicts, and the paths that need consent, to standard error.
pub(super) fn tell_conflicts(applied: &Applied) {
    for (path, reason) in &applied.refused {
        out::detail(&format!("refused\t{path}\t{}", format::one_line(reason)));
    }
    for (path, reason) in &applied.conflicts {
        out::detail(&format!("conflict\t{path}\t{}", format::one_line(reason)));
    }
}

/// The error of an apply that wrote nothing. None if it wrote everything.
pub(super) fn why_not_written(applied: &Applied) -> Option<Error> {
    match (applied.conflicts.is_empty(), applied.refused.is_empty()) {
        (true, true) => None,
        (false, _) => Some(conflict(applied)),
        (true, false) => Some(refused(applied)),
    }
}

fn refused(applied: &Applied) -> Error {
    let paths = format::paths(applied.refused.len() as u64);
    Error::new(
        Kind::Conflict,
        "apply",
        format!("{paths} would run code or give power outside the sandbox; nothing is written"),
    )
    .hint(
        "look at them with 'jailfs diff -p base'; then 'jailfs apply' writes them with --protected \
         or --privileges, or if protected paths are named",
    )
}

fn conflict(applied: &Applied) -> Error {
    let paths = format::paths(applied.conflicts.len() as u64);
    Error::new(
        Kind::Conflict,
        "apply",
        format!("the base has changed meanwhile at {paths}; nothing is written"),
    )
    .hint("look at these paths in the base; apply the others by naming them")
}
