//! `jailfs op log` and `jailfs op restore`.

use clap::{Args, Subcommand};

use super::Global;
use super::json::Line;
use super::log::{head_cell, head_width};
use super::out::Out;
use super::restore;
use super::target::{Target, wrong_answer};
use super::{date, format};
use crate::error::Result;
use crate::sandbox::{Operation, Reply, Request};

/// List the operations on the tree as a whole, and go back to the state after one
#[derive(Subcommand)]
pub(super) enum Op {
    Log(OpLog),
    Restore(OpRestore),
}

/// List the operations, newest first
#[derive(Args)]
pub(super) struct OpLog {
    /// Print one JSON object per operation
    #[arg(long)]
    json: bool,
}

/// Restore the tree to its state right after an operation
///
/// This is an operation too, so it can be undone in the same way.
#[derive(Args)]
pub(super) struct OpRestore {
    /// The number of the operation
    #[arg(value_name = "N")]
    op: u64,
    /// Detach mounts on directories that disappear, instead of refusing
    #[arg(long)]
    detach_mounts: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Op {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        match self {
            Op::Log(verb) => verb.run(&mut target)?,
            Op::Restore(verb) => verb.run(&mut target)?,
        }
        Ok(0)
    }
}

impl OpLog {
    fn run(&self, target: &mut Target) -> Result<()> {
        let Reply::OpLog(log) = target.call(Request::OpLog)? else { return Err(wrong_answer()) };
        let mut out = Out::new();
        let heads = match self.json {
            true => None,
            false => head_width(target, log.iter().map(|one| one.head.as_str()))?,
        };
        for operation in &log {
            out.line(&match self.json {
                true => Line::operation(operation).text()?,
                false => line(operation, heads),
            });
        }
        out.finish()
    }
}

impl OpRestore {
    fn run(&self, target: &mut Target) -> Result<()> {
        let request = Request::OpRestore { op: self.op, detach_mounts: self.detach_mounts };
        let Reply::Restored(restored) = target.call(request)? else {
            return Err(wrong_answer());
        };
        restore::tell(&restored, false, self.json)
    }
}

/// `  12  main  2026-01-02 03:04:05Z  restore     checkpoint 3 'green'`. The head is printed if
/// `heads` is the width of its column.
fn line(operation: &Operation, heads: Option<usize>) -> String {
    let (op, time, verb) = (operation.op, date::utc(operation.time), &operation.verb);
    let head = head_cell(&operation.head, heads);
    format!("{op:>4}{head}  {time}  {verb:10}  {}", format::one_line(&operation.description))
        .trim_end()
        .to_owned()
}
