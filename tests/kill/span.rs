//! The states that a writer may have left: a known state, and the operations since, of which some
//! were acknowledged.

use std::collections::BTreeSet;

use crate::files::{self, Tree};

/// The data of one writer.
#[derive(Clone, Debug)]
pub enum State {
    /// Files and directories.
    Tree(Tree),
    /// Numbers; each operation adds the next one.
    Numbers(BTreeSet<u64>),
    /// Lines; each operation adds one.
    Lines(Vec<String>),
}

/// One operation.
#[derive(Clone, Debug)]
pub enum Op {
    File(files::Op),
    Number(u64),
    Line(String),
}

/// Only so many of the last lines of a table are compared.
pub const LINES: usize = 60;

impl State {
    pub fn apply(&mut self, op: &Op) {
        match (self, op) {
            (State::Tree(tree), Op::File(op)) => tree.apply(op),
            (State::Numbers(numbers), Op::Number(number)) => drop(numbers.insert(*number)),
            (State::Lines(lines), Op::Line(line)) => lines.push(line.clone()),
            (state, op) => panic!("{op:?} in {state:?}"),
        }
    }

    /// How `found` differs from this.
    pub fn differs(&self, found: &State) -> Vec<String> {
        match (self, found) {
            (State::Tree(tree), State::Tree(found)) => tree.differs(found),
            (State::Numbers(numbers), State::Numbers(found)) => {
                let missing =
                    numbers.difference(found).map(|number| format!("{number} is missing"));
                let extra =
                    found.difference(numbers).map(|number| format!("{number} should not be there"));
                missing.chain(extra).collect()
            }
            (State::Lines(lines), State::Lines(found)) => {
                let of =
                    |lines: &[String]| lines[lines.len().saturating_sub(found.len())..].to_vec();
                let all_there =
                    found.len() == lines.len() || (found.len() >= LINES && lines.len() > LINES);
                if all_there && of(lines) == *found {
                    return Vec::new();
                }
                let last = |lines: &[String]| lines[lines.len().saturating_sub(4)..].join(" | ");
                let (was, is) = (last(lines), last(found));
                vec![format!("{} lines, last {was}; found {}, last {is}", lines.len(), found.len())]
            }
            (state, found) => panic!("{found:?} is no {state:?}"),
        }
    }
}

/// A known state, the operations since, and how many of them were acknowledged.
#[derive(Clone, Debug)]
pub struct Span {
    pub start: State,
    pub ops: Vec<Op>,
    /// At least so many of the operations must be there.
    pub from: usize,
}

impl Span {
    /// No operation is in flight.
    pub fn exactly(start: State) -> Span {
        Span { start, ops: Vec::new(), from: 0 }
    }

    /// The possible state that equals the found one, if there is one.
    pub fn settle(&self, found: &State) -> Result<State, String> {
        let mut state = self.start.clone();
        let mut nearest: Option<(usize, Vec<String>)> = None;
        for done in 0..=self.ops.len() {
            if done > 0 {
                state.apply(&self.ops[done - 1]);
            }
            if done < self.from {
                continue;
            }
            let differs = state.differs(found);
            if differs.is_empty() {
                return Ok(self.settled(state, found));
            }
            if nearest.as_ref().is_none_or(|(_, other)| differs.len() <= other.len()) {
                nearest = Some((done, differs));
            }
        }
        if self.is_torn(found) {
            return Ok(found.clone());
        }
        let (done, mut differs) = nearest.unwrap_or_default();
        let (count, around) =
            (self.ops.len(), &self.ops[done.saturating_sub(3)..self.ops.len().min(done + 2)]);
        let many = differs.len();
        differs.truncate(12);
        Err(format!(
            "{} to {count} operations cannot have left this; \
             it is nearest to {done}, with {many} differences: {differs:#?}\n\
             around it: {around:#?}",
            self.from
        ))
    }

    /// Reduces a possible state to the parts that the found one can show.
    fn settled(&self, state: State, found: &State) -> State {
        match found {
            // One more than expected, to notice if there are too many.
            State::Lines(there) => match state {
                State::Lines(lines) => State::Lines(
                    lines[lines.len().saturating_sub(there.len().max(LINES) + 1)..].to_vec(),
                ),
                other => other,
            },
            found => found.clone(),
        }
    }

    /// Whether one of the last operations is a write that was interrupted. The kernel sends writes
    /// that are not whole pages in several messages, and the kill or the seal may come between two
    /// of them.
    fn is_torn(&self, found: &State) -> bool {
        let (State::Tree(mut tree), State::Tree(found)) = (self.start.clone(), found) else {
            return false;
        };
        for (done, op) in self.ops.iter().enumerate() {
            let Op::File(op) = op else { return false };
            if done >= self.from && tree.is_torn_by(op, found) {
                return true;
            }
            tree.apply(op);
        }
        false
    }
}
