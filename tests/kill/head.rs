//! One head: its mount, and a writer for each directory in it.
//!
//! All heads have the same directories. Each head has directories of its own, in which its writers
//! work. The others are fixed: they change only when the whole tree does, in a fork, a restore or a
//! merge. So no two heads change the same files, and the result of a merge is known.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::files::Habit;
use crate::harness::shell;
use crate::programs::REPOSITORY;
use crate::span::{Span, State};
use crate::world::Saved;
use crate::writer::{Kind, Writer};

/// The directories of `main`, and then two of each fork.
const DIRS: [(&str, Kind); 11] = [
    ("small", Kind::Files(Habit::Small)),
    ("big", Kind::Files(Habit::Big)),
    ("dirs", Kind::Files(Habit::Dirs)),
    ("stream", Kind::Stream),
    ("git", Kind::Git),
    ("wal", Kind::Sqlite { mode: "WAL", synchronous: "NORMAL" }),
    ("roll", Kind::Sqlite { mode: "DELETE", synchronous: "FULL" }),
    ("one", Kind::Files(Habit::Small)),
    ("one-links", Kind::Stream),
    ("two", Kind::Files(Habit::Small)),
    ("two-links", Kind::Stream),
];
/// The slots of mounted forks. The names of a fork and of its mount point begin with that of its
/// slot.
pub const SLOTS: [&str; 2] = ["one", "two"];

/// The directories of the fork in a slot.
pub fn dirs_of(slot: usize) -> Range<usize> {
    7 + 2 * slot..9 + 2 * slot
}

pub struct Head {
    pub name: String,
    pub mnt: PathBuf,
    /// One for each directory.
    pub writers: Vec<Arc<Writer>>,
}

impl Head {
    /// `main`, or the fork of a slot.
    pub fn new(name: String, mnt: PathBuf, slot: Option<usize>, seed: u64) -> Head {
        let own = slot.map_or(0..7, dirs_of);
        let writer = |(at, (name, kind)): (usize, &(&'static str, Kind))| {
            let seed = seed.wrapping_mul(31).wrapping_add(at as u64);
            Arc::new(Writer::new(name, *kind, !own.contains(&at), seed))
        };
        let writers = DIRS.iter().enumerate().map(writer).collect();
        Head { name, mnt, writers }
    }

    /// The data in the mount.
    pub fn read(&self) -> Vec<State> {
        self.read_some(&(0..self.writers.len()).collect::<Vec<_>>(), None)
    }

    /// The data in some directories. Programs read it from a copy, if there is a place for it.
    fn read_some(&self, which: &[usize], scratch: Option<&Path>) -> Vec<State> {
        let read = |writer: &Writer| {
            let scratch = scratch.filter(|_| writer.kind.is_of_program());
            let found = writer.read(&self.mnt, scratch);
            found.unwrap_or_else(|error| panic!("{} in {}: {error}", writer.name, self.name))
        };
        // The programs are slow, so they run in parallel.
        std::thread::scope(|scope| {
            let read = &read;
            let begin = |at: &usize| {
                let writer = &self.writers[*at];
                scope.spawn(move || read(writer))
            };
            let readers: Vec<_> = which.iter().map(begin).collect();
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

    /// The possible data now.
    pub fn now(&self) -> Saved {
        self.since(&self.marks())
    }

    /// The states of a saved one that are there.
    pub fn settle(&self, saved: &Saved, found: &[State]) -> Result<Vec<State>, String> {
        self.settle_some(saved, &(0..saved.len()).collect::<Vec<_>>(), found)
    }

    fn settle_some(
        &self,
        saved: &Saved,
        which: &[usize],
        found: &[State],
    ) -> Result<Vec<State>, String> {
        let settle = |(at, found): (&usize, &State)| {
            saved[*at].settle(found).map_err(|why| format!("{}: {why}", self.writers[*at].name))
        };
        which.iter().zip(found).map(settle).collect()
    }

    /// Continues from the found data.
    pub fn go_on(&self, states: Vec<State>) {
        for (writer, state) in self.writers.iter().zip(states) {
            writer.set(state);
        }
    }

    /// Continues from a saved state, of which it is not known yet what is there.
    pub fn hold(&self, saved: &Saved) {
        for (writer, span) in self.writers.iter().zip(saved) {
            writer.hold(span.clone());
        }
    }

    /// Finds out which of some states the mount shows in the directories that `wanted` selects, and
    /// continues from it. The directories of programs are read if that is asked for, or if more
    /// than one state is possible without them. Returns the number of the state.
    pub fn adopt(
        &self,
        options: &[Saved],
        (scratch, reads_programs): (&Path, bool),
        wanted: impl Fn(&Writer) -> bool,
    ) -> Result<usize, String> {
        let all = (0..self.writers.len()).filter(|at| wanted(&self.writers[*at]));
        let (slow, quick): (Vec<usize>, Vec<usize>) =
            all.partition(|at| self.writers[*at].kind.is_of_program());
        let (mut left, mut why) = (Vec::new(), Vec::new());
        let found = self.read_some(&quick, None);
        for (number, option) in options.iter().enumerate() {
            match self.settle_some(option, &quick, &found) {
                Ok(states) => left.push((number, states, Vec::new())),
                Err(error) => why.push(error),
            }
        }
        if left.len() > 1 || reads_programs {
            let found = self.read_some(&slow, Some(scratch));
            left.retain_mut(|(number, _, of_programs)| {
                let settled = self.settle_some(&options[*number], &slow, &found);
                settled.map(|states| *of_programs = states).map_err(|error| why.push(error)).is_ok()
            });
        }
        let Some((number, states, of_programs)) = left.into_iter().next() else {
            return Err(format!("head {}: {}", self.name, why.join("\nnor: ")));
        };
        for at in &slow {
            self.writers[*at].hold(options[number][*at].clone());
        }
        let known = quick.iter().zip(states).chain(slow.iter().zip(of_programs));
        known.for_each(|(at, state)| self.writers[*at].set(state));
        Ok(number)
    }

    /// Keeps the directories of the writers from growing for ever.
    pub fn begin_anew_what_is_long(&self) {
        for writer in self.writers.iter().filter(|writer| !writer.is_fixed) {
            let dir = self.mnt.join(writer.name);
            match (writer.kind, writer.span(0).start) {
                (Kind::Stream, State::Numbers(numbers)) if numbers.len() > 600 => {
                    numbers.iter().for_each(|number| {
                        std::fs::remove_file(dir.join(number.to_string())).unwrap()
                    });
                    writer.set(State::Numbers(Default::default()));
                }
                (Kind::Git, State::Lines(lines)) if lines.len() > 60 => {
                    shell(&dir, "rm -rf .git *");
                    shell(&dir, REPOSITORY);
                    writer.set(State::Lines(vec!["first".to_owned()]));
                }
                _ => {}
            }
        }
    }
}

/// The parts of a saved state in another head, in which files have other inode numbers.
pub fn without_numbers(saved: &[Span]) -> Saved {
    saved.iter().cloned().map(Span::without_numbers).collect()
}
