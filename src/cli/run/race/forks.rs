//! Makes and drops the forks of a race.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::cli::out;
use crate::cli::target::wrong_answer;
use crate::error::{Attempt, Error, Kind, Result};
use crate::sandbox::{Fork, RaceMark, Reply, Request, Rev, Sandbox};
use crate::sys::failpoint::{self, Failpoint};

/// The forks of one race. Their names are `run-RACE-ATTEMPT`.
const PREFIX: &str = "run-";

/// The forks of a race.
pub(super) struct Made {
    pub(super) names: Vec<String>,
    /// The state that all of them begin with.
    pub(super) start: Rev,
    /// They are abandoned if this process is killed before this is dropped.
    pub(super) mark: RaceMark,
}

/// Makes `number` forks of the tree as it is now.
///
/// # Errors
/// Those of the sandbox.
pub(super) fn make(caller: &Arc<Sandbox>, number: u32) -> Result<Made> {
    let Reply::OpLog(log) = caller.handle(Request::OpLog)? else { return Err(wrong_answer()) };
    let forks = list(caller)?;
    let left = forks.iter().filter(|fork| fork.is_abandoned).count();
    if left > 0 {
        let are = if left == 1 { "fork is" } else { "forks are" };
        out::note(&format!(
            "{left} {are} left by a race that was killed; 'jailfs forks' lists them, \
             and 'jailfs fork --drop --abandoned' drops them"
        ));
    }
    let earlier = forks.iter().filter_map(|fork| race_of(&fork.name));
    // The number of the operation that makes the forks, so that a race has its own names.
    let race = 1 + earlier.chain(log.first().map(|last| last.op)).max().unwrap_or(0);
    let names: Vec<String> = (1..=number).map(|n| format!("{PREFIX}{race}-{n}")).collect();
    let mark = caller.begin_race(&names)?;
    let forks = fork(caller, names.clone(), None)?;
    let start = forks.first().and_then(|fork| fork.forked_at).map_or(Rev::Base, Rev::Id);
    Ok(Made { names, start, mark })
}

/// The number of the race that a fork is of.
fn race_of(name: &str) -> Option<u64> {
    let (race, attempt) = name.strip_prefix(PREFIX)?.split_once('-')?;
    attempt.parse::<u32>().ok()?;
    race.parse().ok()
}

/// Makes a fork begin again with the state `start`. No process uses it.
///
/// # Errors
/// Those of the sandbox. The fork may be gone then.
pub(super) fn replace(caller: &Arc<Sandbox>, head: &str, start: &Rev) -> Result<()> {
    drop_all(caller, &[head.to_owned()])?;
    fork(caller, vec![head.to_owned()], Some(start.clone())).map(drop)
}

fn fork(caller: &Arc<Sandbox>, names: Vec<String>, from: Option<Rev>) -> Result<Vec<Fork>> {
    match caller.handle(Request::Fork { names, from })? {
        Reply::Forked(forks) => Ok(forks),
        _ => Err(wrong_answer()),
    }
}

fn list(caller: &Arc<Sandbox>) -> Result<Vec<Fork>> {
    match caller.handle(Request::Forks)? {
        Reply::Forks(forks) => Ok(forks),
        _ => Err(wrong_answer()),
    }
}

/// Drops forks, the forks that their commands made of them, and the checkpoints of all these.
///
/// # Errors
/// The first error. The others are dropped all the same.
pub(super) fn drop_all(caller: &Arc<Sandbox>, heads: &[String]) -> Result<()> {
    let mut dropped: BTreeSet<String> = heads.iter().cloned().collect();
    let forks = list(caller)?;
    // A fork of a fork has a parent that is in the set already, or comes into it in a later round.
    loop {
        let is_of = |fork: &&Fork| fork.parent.as_ref().is_some_and(|of| dropped.contains(of));
        let of: Vec<String> = forks.iter().filter(is_of).map(|fork| fork.name.clone()).collect();
        let before = dropped.len();
        dropped.extend(of);
        if dropped.len() == before {
            break;
        }
    }
    let mut first = drop_checkpoints(caller, &dropped).err();
    for name in dropped.into_iter().filter(|name| forks.iter().any(|fork| fork.name == *name)) {
        if let Err(error) = caller.handle(Request::DropFork { name }) {
            log::debug!("{error}");
            first = first.or(Some(error));
        }
    }
    first.map_or(Ok(()), Err)
}

/// Drops the checkpoints that were made of these heads, with their names and holds.
fn drop_checkpoints(caller: &Arc<Sandbox>, heads: &BTreeSet<String>) -> Result<()> {
    let Reply::Log(log) = caller.handle(Request::Log)? else { return Err(wrong_answer()) };
    let mut first = None;
    for made in log.iter().filter(|made| !made.automatic && heads.contains(&made.head)) {
        let rev = Rev::Id(made.id);
        let dropped = caller
            .handle(Request::Hold { rev: rev.clone(), held: false })
            .and_then(|_| caller.handle(Request::Drop { rev }));
        if let Err(error) = dropped {
            first = first.or(Some(error));
        }
    }
    first.map_or(Ok(()), Err)
}

/// Makes the tree of the caller's head equal to a sealed state, in place. Returns the operation by
/// which this can be undone.
///
/// # Errors
/// Those of the sandbox. The tree is then as before.
pub(super) fn take(caller: &Arc<Sandbox>, state: Rev) -> Result<Option<u64>> {
    failpoint::hit(Failpoint::RunPick).attempt(|| "continue from the winner")?;
    let request =
        Request::Restore { to: state, paths: Vec::new(), dry_run: false, detach_mounts: false };
    match caller.handle(request) {
        Ok(Reply::Restored(restored)) => Ok(restored.undo),
        Ok(_) => Err(wrong_answer()),
        // Only the list of what changed failed.
        Err(error) if error.is_done => Ok(None),
        Err(error) => Err(error.during("continue from the winner")),
    }
}

/// The error if no attempt could be run.
pub(super) fn all_failed(error: &Error) -> Error {
    let reason = format!("all of them failed: {error}");
    let failed = Error::new(Kind::Failed, "run attempts side by side", reason);
    match &error.hint {
        Some(hint) => failed.hint(hint.clone()),
        None => failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_of_a_race_is_known_by_its_name() {
        assert_eq!(race_of("run-12-3"), Some(12));
        for other in ["run-12", "run-x-3", "run-1-y", "main", "rerun-1-1", "run-1-2-3"] {
            assert_eq!(race_of(other), None, "{other}");
        }
    }
}
