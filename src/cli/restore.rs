//! `jailfs restore`, and what is told of everything that makes the tree another.

use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::json::Line;
use super::out::Out;
use super::show;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::verbs::{Operation, Reply, Request, Restored, Rev};

/// Make the tree, or single paths of it, exactly what it was at a checkpoint, in place
///
/// Shells and programs in the mount go on in the restored tree. The restore can be undone: it says how.
#[derive(Args)]
pub(super) struct Restore {
    /// The checkpoint: its number or name, '@-N' for the N-th last, or 'base'
    #[arg(value_name = "ID|NAME")]
    to: String,
    /// Only these files and directories; the rest of the tree stays as it is
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Only list what would change
    #[arg(long)]
    dry_run: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Restore {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let paths = target.paths(&self.paths)?;
        let request = Request::Restore { to: Rev::parse(&self.to), paths, dry_run: self.dry_run };
        let Reply::Restored(restored) = target.call(request)? else { return Err(wrong_answer()) };
        tell(&mut target, &restored, self.dry_run, self.json)?;
        Ok(0)
    }
}

/// Tells what a restore, discard or op restore did, or would do: the deletions in full, and how to undo it.
pub(super) fn tell(target: &mut Target, restored: &Restored, dry_run: bool, json: bool) -> Result<()> {
    let undo = if dry_run { None } else { undo_of(target, restored)? };
    let mut out = Out::new();
    if json {
        for change in &restored.changes {
            out.line(&Line::change(change).text()?);
        }
        out.line(&Line::restored(restored, undo, dry_run).text()?);
    } else {
        let done = if dry_run { "would restore" } else { "restored" };
        out.line(&format!("{done} {}: {}", show::one_line(&restored.to), show::summary(&restored.changes)));
        if dry_run {
            restored.changes.iter().for_each(|change| out.line(&show::name_status(change)));
        } else {
            show::deletions(&restored.changes).for_each(|deletion| out.line(&deletion));
        }
        if let Some(op) = undo {
            out.line(&format!("undo: jailfs op restore {op}"));
        }
    }
    out.finish()
}

fn undo_of(target: &mut Target, restored: &Restored) -> Result<Option<u64>> {
    let Reply::OpLog(log) = target.call(Request::OpLog)? else { return Err(wrong_answer()) };
    Ok(op_before(&log, restored))
}

/// The operation after which the tree was what it was before the restore, which is the newest of `log`.
fn op_before(log: &[Operation], restored: &Restored) -> Option<u64> {
    let mut older = log.iter().skip(1);
    let before = match restored.before {
        Some(seal) => older.find(|operation| operation.tree == Some(seal)),
        None => older.next(),
    };
    before.map(|operation| operation.op)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Epoch, LayerId, Timestamp};

    fn op(op: u64, tree: Option<u32>) -> Operation {
        Operation {
            op,
            time: Timestamp::default(),
            verb: String::new(),
            description: String::new(),
            tree: tree.map(LayerId),
            epoch: Epoch(0),
        }
    }

    #[test]
    fn a_restore_is_undone_by_the_operation_before_it() {
        let log = [op(5, Some(1)), op(4, Some(3)), op(3, Some(2)), op(2, Some(1)), op(1, None)];
        let restored = |before: Option<u32>| Restored {
            to: "1".to_owned(),
            before: before.map(LayerId),
            changes: Vec::new(),
        };
        assert_eq!(op_before(&log, &restored(Some(3))), Some(4));
        assert_eq!(op_before(&log, &restored(None)), Some(4));
        assert_eq!(op_before(&log, &restored(Some(9))), None);
        assert_eq!(op_before(&log[4..], &restored(None)), None);
    }
}
