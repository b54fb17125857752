//! A head of the store with its writers, and where it is mounted.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use crate::span::{Op, Span, State};
use crate::writer::{Kind, Writer};

/// One state of all writers of a head. Each may be anywhere in its span.
pub type Saved = Vec<Span>;

pub struct Head {
    pub name: String,
    /// The mount point.
    pub at: PathBuf,
    /// All heads have the same writers in the same order. Not all of them write.
    pub writers: Vec<Arc<Writer>>,
    /// `None` for the first head.
    pub fork: Option<Fork>,
}

pub struct Fork {
    /// The writer of the directory into which no other head writes.
    pub own: usize,
    /// Whether it also writes into the directories of the first head.
    pub is_wild: bool,
    pub is_mounted: bool,
    /// The state that it was made with, until the test has read which one of the possible states
    /// that is.
    pub unread: Option<Saved>,
    /// The state that it last had in common with the first head: the merge base. Not known after a
    /// restore to a state that does not come from it.
    pub base: Option<Vec<State>>,
    /// When the two heads last had that state in common.
    pub since: u64,
}

impl Head {
    /// Runs `jailfs -C MNT` with these arguments, whether or not it succeeds.
    pub fn jailfs(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("-C").arg(&self.at).args(words).current_dir("/").output().unwrap()
    }

    /// Whether programs can work in it, and the test knows from which state on.
    pub fn is_ready(&self) -> bool {
        self.fork.as_ref().is_none_or(|fork| fork.is_mounted && fork.unread.is_none())
    }

    /// Whether a writer writes in this head. The programs would change their directories even when
    /// they only read, so they run in one head.
    pub fn has_running(&self, at: usize) -> bool {
        match (&self.fork, self.writers[at].kind) {
            (_, Kind::Stream) => true,
            (None, _) => !self.writers[at].is_for_forks,
            (Some(fork), Kind::Files(_)) => {
                fork.own == at || (fork.is_wild && !self.writers[at].is_for_forks)
            }
            (Some(_), Kind::Git | Kind::Sqlite { .. }) => false,
        }
    }

    /// The data in the mount. In a fork, the programs read a copy, or only if `all` is set: they do
    /// not write there.
    pub fn read(&self, scratch: &Path, all: bool) -> Vec<State> {
        let scratch = self.fork.is_some().then(|| scratch.join(&self.name));
        let read = |writer: &Writer| {
            let is_program = !matches!(writer.kind, Kind::Files(_) | Kind::Stream);
            if is_program && !all {
                return writer.now();
            }
            let scratch = scratch.as_deref().filter(|_| is_program);
            let found = writer.read(&self.at, scratch);
            found.unwrap_or_else(|error| panic!("{} in '{}': {error}", writer.name, self.name))
        };
        // The programs are slow, so they run in parallel.
        std::thread::scope(|scope| {
            let readers: Vec<_> =
                self.writers.iter().map(|writer| scope.spawn(move || read(writer))).collect();
            readers.into_iter().map(|reader| reader.join().unwrap()).collect()
        })
    }

    /// The position of each writer.
    pub fn marks(&self) -> Vec<usize> {
        self.writers.iter().map(|writer| writer.acked()).collect()
    }

    /// The possible data since `marks` were taken.
    pub fn since(&self, marks: &[usize]) -> Saved {
        self.writers.iter().zip(marks).map(|(writer, from)| writer.span(*from)).collect()
    }

    /// The data after everything that was begun.
    pub fn now(&self) -> Vec<State> {
        self.writers.iter().map(|writer| writer.now()).collect()
    }

    /// The states of a saved one that are there.
    pub fn settle(&self, saved: &Saved, found: &[State]) -> Result<Vec<State>, String> {
        let settle = |at: usize| {
            let settled = saved[at].settle(&found[at]);
            settled.map_err(|why| format!("{} in '{}': {why}", self.writers[at].name, self.name))
        };
        (0..saved.len()).map(settle).collect()
    }

    /// The state after a restore, during which links from the number `first_new` on were made.
    /// Links that were begun after `answered` must be there.
    pub fn settle_restored(
        &self,
        to: &Saved,
        found: &[State],
        first_new: u64,
        answered: Option<u64>,
    ) -> Result<Vec<State>, String> {
        let settle = |at: usize| {
            let (writer, span, found) = (&self.writers[at], &to[at], &found[at]);
            let settled = match found {
                State::Numbers(numbers) if writer.kind == Kind::Stream => {
                    let old = State::Numbers(numbers.range(..first_new).copied().collect());
                    let new: Vec<u64> = numbers.range(first_new..).copied().collect();
                    let is_right = check_new_links(writer, &new, first_new, answered);
                    span.settle(&old).and_then(|_| is_right.map(|()| found.clone()))
                }
                found => span.settle(found),
            };
            settled.map_err(|why| format!("{} in '{}': {why}", writer.name, self.name))
        };
        (0..to.len()).map(settle).collect()
    }

    /// Continues from the found data.
    pub fn go_on(&self, states: Vec<State>) {
        for (writer, state) in self.writers.iter().zip(states) {
            writer.set(state);
        }
    }

    pub fn umount(&mut self) {
        let Some(fork) = self.fork.as_mut().filter(|fork| fork.is_mounted) else { return };
        let mut command = Command::new("umount");
        let done = command.arg("-l").arg(&self.at).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        fork.is_mounted = false;
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        self.umount();
    }
}

/// Of the links made since the restore began, a suffix is there, with all that were made since its
/// answer. The last link is optional if it was not acknowledged.
fn check_new_links(
    writer: &Writer,
    is: &[u64],
    first: u64,
    answered: Option<u64>,
) -> Result<(), String> {
    let number = |op: &Op| match op {
        Op::Number(number) => *number,
        Op::File(_) | Op::Line(_) => 0,
    };
    let span = writer.span(writer.acked());
    let begun: Vec<u64> = span.ops.iter().map(number).filter(|number| *number >= first).collect();
    let done: Vec<u64> =
        span.ops[..span.from].iter().map(number).filter(|number| *number >= first).collect();
    let lost: Vec<_> = done
        .iter()
        .filter(|n| answered.is_some_and(|since| **n > since) && !is.contains(n))
        .collect();
    if lost.is_empty() && (begun.ends_with(is) || done.ends_with(is)) {
        return Ok(());
    }
    Err(format!("of the links {begun:?} there are {is:?}; {lost:?} should be"))
}
