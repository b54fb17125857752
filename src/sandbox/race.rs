//! A race: forks of one head for attempts side by side.
//!
//! Always true:
//! * The store lists the forks of a race from before they are made until it is over. If the process
//!   that runs the race, or has the store open, is killed before, they count as abandoned. They are
//!   not dropped, because one may have the only copy of an attempt's work.
//! * The state that the attempts begin with, and those that they end with, stay until the race is
//!   over, whatever the policy of the collection.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, Kind, Result};
use crate::sandbox::{Fork, Reply, Request, Rev, Sandbox};
use crate::types::LayerId;

/// The names of the forks are `run-RACE-ATTEMPT`.
const PREFIX: &str = "run-";

/// The forks of one race. Dropped before [`Race::finish`], it leaves them as abandoned.
pub struct Race {
    caller: Arc<Sandbox>,
    names: Vec<String>,
    start: Rev,
    /// The states that the collection keeps for this race.
    kept: Mutex<Vec<LayerId>>,
    is_over: AtomicBool,
}

impl Sandbox {
    /// Makes `attempts` forks of the tree as it is now, for a race.
    ///
    /// # Errors
    /// As for [`Request::Fork`]. No fork is left then.
    pub fn begin_race(self: &Arc<Sandbox>, attempts: u32) -> Result<Race> {
        // Two races that begin at the same time have different names.
        let _one = self.shared.beginning.lock();
        let last = self.operations().first().map(|last| last.op);
        let earlier = self.forks()?.iter().filter_map(|fork| race_of(&fork.name)).max();
        // The number of the operation that makes the forks, so that a race has its own names.
        let number = 1 + earlier.max(last).unwrap_or(0);
        let names: Vec<String> = (1..=attempts).map(|n| format!("{PREFIX}{number}-{n}")).collect();
        self.mark_race(&names)?;
        let kept = Mutex::default();
        let (caller, is_over) = (Arc::clone(self), AtomicBool::new(false));
        let mut race = Race { caller, names, start: Rev::Base, kept, is_over };
        let forks = race.fork(race.names.clone(), None)?;
        if let Some(start) = forks.first().and_then(|fork| fork.forked_at) {
            race.keep(start);
            race.start = Rev::Id(start);
        }
        Ok(race)
    }
}

impl Race {
    /// The head whose forks these are.
    pub fn caller(&self) -> &Arc<Sandbox> {
        &self.caller
    }

    /// The names of the forks.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The state that all of them begin with.
    pub fn start(&self) -> &Rev {
        &self.start
    }

    /// Has the collection keep a state until the race is over.
    pub fn keep(&self, state: LayerId) {
        self.kept.lock().push(state);
        self.caller.shared.terms.lock().kept_by_races.push(state);
    }

    /// Ends the race. The forks that are left stay, as any others.
    pub fn finish(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.caller.unmark_race(&self.names, false);
    }

    /// Makes a fork begin again with the first state. No process uses it.
    ///
    /// # Errors
    /// Those of the store. The fork may be gone then.
    pub fn replace(&self, head: &str) -> Result<()> {
        self.drop_forks(&[head.to_owned()])?;
        self.fork(vec![head.to_owned()], Some(self.start.clone())).map(drop)
    }

    fn fork(&self, names: Vec<String>, from: Option<Rev>) -> Result<Vec<Fork>> {
        match self.caller.handle(Request::Fork { names, from })? {
            Reply::Forked(forks) => Ok(forks),
            _ => Err(Error::new(Kind::Failed, "make forks", "the reply is about something else")),
        }
    }

    /// Drops forks of the race, the forks that their commands made of them, and the checkpoints of
    /// all these. Those that are gone already do no harm.
    ///
    /// # Errors
    /// The first error. The others are dropped all the same.
    pub fn drop_forks(&self, heads: &[String]) -> Result<()> {
        let mut dropped: BTreeSet<String> = heads.iter().cloned().collect();
        dropped.retain(|name| self.names.contains(name));
        let forks = self.caller.forks()?;
        // A fork of a fork has a parent that is in the set already, or comes into it in a later
        // round.
        loop {
            let is_of = |fork: &&Fork| fork.parent.as_ref().is_some_and(|of| dropped.contains(of));
            let of: Vec<String> =
                forks.iter().filter(is_of).map(|fork| fork.name.clone()).collect();
            let before = dropped.len();
            dropped.extend(of);
            if dropped.len() == before {
                break;
            }
        }
        let mut first = self.drop_checkpoints(&dropped).err();
        for name in dropped.into_iter().filter(|name| forks.iter().any(|fork| fork.name == *name)) {
            if let Err(error) = self.caller.handle(Request::DropFork { name }) {
                log::debug!("{error}");
                first = first.or(Some(error));
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Drops the checkpoints that were made of these heads, with their names and holds.
    fn drop_checkpoints(&self, heads: &BTreeSet<String>) -> Result<()> {
        let mut first = None;
        let made = self.caller.checkpoints();
        for made in made.iter().filter(|made| !made.automatic && heads.contains(&made.head)) {
            let rev = Rev::Id(made.id);
            let dropped = self
                .caller
                .handle(Request::Hold { rev: rev.clone(), held: false })
                .and_then(|_| self.caller.handle(Request::Drop { rev }));
            if let Err(error) = dropped {
                first = first.or(Some(error));
            }
        }
        first.map_or(Ok(()), Err)
    }
}

impl Drop for Race {
    fn drop(&mut self) {
        if !self.is_over.load(Ordering::SeqCst) {
            self.caller.unmark_race(&self.names, true);
        }
        let kept = &mut self.caller.shared.terms.lock().kept_by_races;
        for state in &*self.kept.lock() {
            if let Some(at) = kept.iter().position(|one| one == state) {
                kept.swap_remove(at);
            }
        }
    }
}

/// The number of the race that a fork is of.
fn race_of(name: &str) -> Option<u64> {
    let (race, attempt) = name.strip_prefix(PREFIX)?.split_once('-')?;
    attempt.parse::<u32>().ok()?;
    race.parse().ok()
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
