//! What a writer may have left: a state, and the operations since, some of which were acknowledged.

use std::collections::BTreeSet;

use crate::files::{self, Tree};

/// What is there of one writer.
#[derive(Clone, Debug)]
pub enum State {
    /// Files and directories.
    Tree(Tree),
    /// Numbers, of which each operation adds the next.
    Numbers(BTreeSet<u64>),
    /// Lines, of which each operation adds one.
    Lines(Vec<String>),
}

/// One acknowledged step.
#[derive(Clone, Debug)]
pub enum Op {
    File(files::Op),
    Number(u64),
    Line(String),
}

/// Of the lines of a table only the last are kept, so many.
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

    /// Why `found` is not this.
    pub fn differs(&self, found: &State) -> Option<String> {
        match (self, found) {
            (State::Tree(tree), State::Tree(found)) => tree.differs(found),
            (State::Numbers(numbers), State::Numbers(found)) => (numbers != found).then(|| {
                let missing: Vec<_> = numbers.difference(found).collect();
                let extra: Vec<_> = found.difference(numbers).collect();
                format!("numbers are missing: {missing:?}, or too many: {extra:?}")
            }),
            (State::Lines(lines), State::Lines(found)) => {
                let of = |lines: &[String]| lines[lines.len().saturating_sub(found.len())..].to_vec();
                let all_there = found.len() == lines.len() || (found.len() >= LINES && lines.len() > LINES);
                (!all_there || of(lines) != *found).then(|| {
                    let last = |lines: &[String]| lines[lines.len().saturating_sub(4)..].join(" | ");
                    let (was, is) = (last(lines), last(found));
                    format!("{} lines, last {was}; found {}, last {is}", lines.len(), found.len())
                })
            }
            (state, found) => panic!("{found:?} is no {state:?}"),
        }
    }
}

/// A state, what was done since, and how much of that was surely done.
#[derive(Clone, Debug)]
pub struct Span {
    pub start: State,
    pub ops: Vec<Op>,
    /// So many of the operations must be there.
    pub from: usize,
}

impl Span {
    /// Nothing is open.
    pub fn exactly(start: State) -> Span {
        Span { start, ops: Vec::new(), from: 0 }
    }

    /// The state that is there, if it is one of those that can be.
    pub fn settle(&self, found: &State) -> Result<State, String> {
        let mut state = self.start.clone();
        let mut why = Vec::new();
        for done in 0..=self.ops.len() {
            if done > 0 {
                state.apply(&self.ops[done - 1]);
            }
            if done < self.from {
                continue;
            }
            match state.differs(found) {
                None => return Ok(self.settled(state, found)),
                Some(difference) => why.push(format!("  after {done} operations: {difference}")),
            }
        }
        if let (Some(Op::File(last)), State::Tree(found_tree)) = (self.ops.last(), found)
            && self.from < self.ops.len()
            && self.torn(last, found_tree)
        {
            return Ok(found.clone());
        }
        let (count, last) = (self.ops.len(), &self.ops[self.ops.len().saturating_sub(3)..]);
        why.truncate(6);
        Err(format!("{} to {count} operations, last {last:?}, cannot have left this:\n{}", self.from, why.join("\n")))
    }

    /// What was found, with what cannot be found.
    fn settled(&self, state: State, found: &State) -> State {
        match found {
            State::Lines(_) => state,
            found => found.clone(),
        }
    }

    /// Whether a write over a file's own blocks was cut off in its middle: each block is the old or the new one.
    fn torn(&self, last: &files::Op, found: &Tree) -> bool {
        let State::Tree(mut tree) = self.start.clone() else { return false };
        for op in &self.ops[..self.ops.len() - 1] {
            let Op::File(op) = op else { return false };
            tree.apply(op);
        }
        tree.is_torn_by(last, found)
    }
}
