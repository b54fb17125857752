//! `jailfs history`, `jailfs undo` and `jailfs redo`: the edits of single files.

use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::date;
use super::format;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::{EditKind, FileEdit, Reply, Request};
use crate::types::TreePath;

/// List the versions of a file before its last edits
///
/// Also for a deleted file. 'jailfs diff PATH@2 PATH' compares version 2 with the file as it is.
#[derive(Args)]
pub(super) struct History {
    /// The file
    path: PathBuf,
    /// Print one JSON object per version
    #[arg(long)]
    json: bool,
}

/// Undo the last edit of a file
///
/// Also for a deleted file. A program that has the file open keeps the content that it has. Each
/// further undo goes back one more edit; 'redo' reverts an undo.
#[derive(Args)]
pub(super) struct Undo {
    #[command(flatten)]
    steps: Steps,
}

/// Revert an undo of a file
///
/// Works until the file is edited again.
#[derive(Args)]
pub(super) struct Redo {
    #[command(flatten)]
    steps: Steps,
}

#[derive(Args)]
struct Steps {
    /// The file
    path: PathBuf,
    /// The number of edits
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

impl History {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let path = one_path(&target, &self.path)?;
        let request = Request::History { path: path.clone() };
        let Reply::History(versions) = target.call(request)? else { return Err(wrong_answer()) };
        let mut out = Out::new();
        for version in &versions {
            out.line(&if self.json {
                Line::version(&path, version).text()?
            } else {
                line(version)
            });
        }
        out.finish()?;
        Ok(0)
    }
}

impl Undo {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        self.steps.run(global, "undo", |path, steps| Request::Undo { path, steps })
    }
}

impl Redo {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        self.steps.run(global, "redo", |path, steps| Request::Redo { path, steps })
    }
}

impl Steps {
    fn run(
        &self,
        global: &Global,
        verb: &'static str,
        request: impl FnOnce(TreePath, u32) -> Request,
    ) -> Result<u8> {
        let mut target = Target::find(global)?;
        let path = one_path(&target, &self.path)?;
        let Reply::Stepped(stepped) = target.call(request(path, self.steps))? else {
            return Err(wrong_answer());
        };
        let mut out = Out::new();
        if self.json {
            out.line(&Line::stepped(verb, &stepped).text()?);
        } else {
            let now = match (stepped.number, stepped.new_size) {
                (_, None) => "is gone again".to_owned(),
                (Some(number), Some(size)) => {
                    format!("is version {number} now ({})", format::size(size))
                }
                (None, Some(size)) => {
                    format!("is what it was before the undo ({})", format::size(size))
                }
            };
            out.line(&format!("{verb}: {} {now}", stepped.path));
        }
        out.finish()?;
        Ok(0)
    }
}

fn one_path(target: &Target, path: &std::path::Path) -> Result<TreePath> {
    target.paths(&[path.to_owned()])?.pop().ok_or_else(wrong_answer)
}

/// `   3  2026-11-22 00:38:36Z    1.2 KiB  before a write`
fn line(version: &FileEdit) -> String {
    let what = match version.kind {
        EditKind::Write => "before a write",
        EditKind::Truncate => "before it was truncated",
        EditKind::Replace => "before another was renamed over it",
        EditKind::Remove => "before it was removed",
        EditKind::Move => "before it was renamed",
        EditKind::Restore => "before a restore",
        EditKind::Undo => "before an undo",
    };
    let size = version.size.map_or_else(|| "no file".to_owned(), format::size);
    let shown = if version.is_current { "  (as it is now)" } else { "" };
    format!("{:>4}  {}  {size:>11}  {what}{shown}", version.number, date::utc(version.time))
}
