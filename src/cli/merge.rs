//! `jailfs merge`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::{self, Out};
use super::target::{Target, wrong_answer};
use crate::error::{Error, Kind, Result};
use crate::sandbox::{MergeTerms, Merged, Reply, Request};

/// Merge another head into this one, in place
///
/// The result has the changes of both heads since they parted. Renames are followed, and text
/// merges by lines. A path that both heads changed differently is a conflict: then nothing is
/// changed, and the exit code is 3. The output says how to undo the merge.
#[derive(Args)]
pub(super) struct Merge {
    /// The head to merge; 'jailfs forks' lists them
    // Not `head`: that is the id of the global option.
    #[arg(value_name = "NAME")]
    other: String,
    /// Only these files and directories
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Only list what would change
    #[arg(long)]
    dry_run: bool,
    /// Merge conflicts as well: text gets both sides, between '<<<<<<<' and '>>>>>>>'; of anything
    /// else this head's side stays, and beside it is the other one as 'PATH~NAME'
    #[arg(long)]
    markers: bool,
    /// Decide conflicts at and below PATH for this head
    #[arg(long, value_name = "PATH")]
    ours: Vec<PathBuf>,
    /// Decide conflicts at and below PATH for the other head
    #[arg(long, value_name = "PATH")]
    theirs: Vec<PathBuf>,
    /// Take what GLOB matches in a directory from one head as a whole, as '.git' always is
    #[arg(long, value_name = "GLOB")]
    unit: Vec<OsString>,
    /// Detach mounts on directories that disappear, instead of refusing
    #[arg(long)]
    detach_mounts: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Merge {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let terms = MergeTerms {
            head: self.other.clone(),
            paths: target.paths(&self.paths)?,
            dry_run: self.dry_run,
            markers: self.markers,
            ours: target.paths(&self.ours)?,
            theirs: target.paths(&self.theirs)?,
            units: self.unit.iter().cloned().map(OsStringExt::into_vec).collect(),
            detach_mounts: self.detach_mounts,
        };
        let Reply::Merged(merged) = target.call(Request::Merge(terms))? else {
            return Err(wrong_answer());
        };
        let mut out = Out::new();
        if self.json {
            self.json(&mut out, &merged)?;
        } else {
            self.text(&mut out, &merged)?;
        }
        out.finish()?;
        if merged.conflicts.is_empty() { Ok(0) } else { Err(self.conflict(&merged)) }
    }

    fn json(&self, out: &mut Out, merged: &Merged) -> Result<()> {
        for change in &merged.changes {
            out.line(&Line::change(&change?).text()?);
        }
        for (path, ours, theirs) in &merged.conflicts {
            out.line(&Line::conflict(path, &both(merged, ours, theirs)).text()?);
        }
        for path in &merged.unresolved {
            out.line(&Line::unresolved(path).text()?);
        }
        out.line(&Line::merged(merged, self.dry_run).text()?);
        Ok(())
    }

    fn text(&self, out: &mut Out, merged: &Merged) -> Result<()> {
        for (path, ours, theirs) in &merged.conflicts {
            let both = both(merged, ours, theirs);
            out::detail(&format!("conflict\t{path}\t{}", format::one_line(&both)));
        }
        if !merged.conflicts.is_empty() {
            return Ok(());
        }
        let done = if self.dry_run { "would merge" } else { "merged" };
        let head = format::one_line(&merged.head);
        out.line(&format!("{done} {head}: {}", format::summary(&merged.changes)?));
        format::list(&merged.changes, !self.dry_run, |line| out.line(line))?;
        for path in &merged.unresolved {
            out.line(&format!("unresolved: {path}"));
        }
        for point in &merged.detached {
            out.line(&format!("detached: the mount at {point}"));
        }
        if let Some(op) = merged.undo {
            out.line(&format!("undo: jailfs op restore {op}"));
        }
        Ok(())
    }

    fn conflict(&self, merged: &Merged) -> Error {
        let paths = format::paths(merged.conflict_count);
        let reason = format!("both heads changed {paths} differently; nothing is changed");
        Error::new(Kind::Conflict, format!("merge '{}'", self.other), reason)
            .hint("decide with --ours PATH or --theirs PATH, or keep both sides with --markers")
    }
}

fn both(merged: &Merged, ours: &str, theirs: &str) -> String {
    format!("{} {ours}; {} {theirs}", merged.into, merged.head)
}
