//! The verbs, and what each may leave if it is interrupted.

use std::process::Output;
use std::sync::Arc;

use serde_json::Value;

use crate::span::{Op, State};
use crate::world::{Checkpoint, Saved, World};
use crate::writer::{Control, Kind, Working, Writer, stamp};

/// A verb that has not answered.
#[derive(Default)]
pub enum Pending {
    #[default]
    Nothing,
    Checkpoint {
        name: String,
        saved: Saved,
    },
    /// gc may have dropped all other checkpoints.
    Gc {
        kept: Vec<u64>,
    },
    Apply {
        base: Saved,
    },
    Undo,
    /// With the first link that was made meanwhile, and the first after the answer, if there was
    /// one.
    Restore {
        to: Saved,
        first_new: u64,
        answered: Option<u64>,
    },
}

/// The lines of JSON; some verbs print none.
fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

impl World {
    /// Runs a verb. Returns `None` if the kill interrupted it; it must not fail otherwise.
    fn ask(&mut self, words: &[&str], control: &Control) -> Option<Vec<Value>> {
        let output = self.jailfs(words);
        let code = output.status.code();
        self.note(format!(
            "{words:?}: {code:?}{}",
            if control.is_killed() { ", killed" } else { "" }
        ));
        if output.status.success() {
            return Some(lines(&output));
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        self.note(format!("  {}", said.trim()));
        control.failed(format!("jailfs {words:?}: {code:?} {said}"));
        None
    }

    /// A verb that programs in the mount do not notice.
    pub fn busy_verb(&mut self, control: &Control) -> Pending {
        match self.rng.below(20) {
            0..7 => self.checkpoint(control),
            7..9 => self.gc(control),
            9 => self.drop_one(control),
            10..14 => self.apply(control),
            14..16 => self.undo_apply(control),
            16 => self.look(&["status", "--json"], control),
            17 => self.look(&["diff", "--stat", "--json"], control),
            18 => self.look(&["check", "--read-data", "--json"], control),
            _ => self.look(&["op", "log", "--json"], control),
        }
    }

    fn look(&mut self, words: &[&str], control: &Control) -> Pending {
        if let Some(said) = self.ask(words, control) {
            let problems = said.last().and_then(|line| line["problems"].as_u64()).unwrap_or(0);
            assert_eq!(problems, 0, "{said:#?}");
        }
        Pending::Nothing
    }

    fn checkpoint(&mut self, control: &Control) -> Pending {
        let (name, marks) = (format!("c{}", stamp()), self.marks());
        let said = self.ask(&["checkpoint", &name, "--json"], control);
        let saved = self.since(&marks);
        let Some(said) = said else { return Pending::Checkpoint { name, saved } };
        let id = said[0]["id"].as_u64().unwrap();
        self.checkpoints.push(Checkpoint { id, name, saved });
        self.count("checkpoints");
        Pending::Nothing
    }

    fn gc(&mut self, control: &Control) -> Pending {
        let keep = if self.rng.one_in(3) { 1000 } else { 2 + self.rng.below(6) };
        let operations = [0, 5, 100][self.rng.below(3) as usize];
        let all: Vec<u64> = self.checkpoints.iter().map(|checkpoint| checkpoint.id).collect();
        let kept = all[all.len().saturating_sub(keep as usize)..].to_vec();
        // Automatic seals that it frees do not matter.
        self.operations.clear();
        let words =
            ["gc", "--json", "--keep", &keep.to_string(), "--operations", &operations.to_string()];
        if self.ask(&words, control).is_none() {
            return Pending::Gc { kept };
        }
        self.checkpoints.retain(|checkpoint| kept.contains(&checkpoint.id));
        self.count("gcs");
        Pending::Nothing
    }

    fn drop_one(&mut self, control: &Control) -> Pending {
        if self.checkpoints.is_empty() {
            return Pending::Nothing;
        }
        let at = self.rng.below(self.checkpoints.len() as u64) as usize;
        let name = self.checkpoints[at].name.clone();
        let ids = self.checkpoints.iter().map(|checkpoint| checkpoint.id);
        let kept = ids.filter(|id| *id != self.checkpoints[at].id).collect();
        if self.ask(&["drop", &name], control).is_none() {
            return Pending::Gc { kept };
        }
        self.checkpoints.remove(at);
        Pending::Nothing
    }

    fn apply(&mut self, control: &Control) -> Pending {
        let marks = self.marks();
        let only = self.rng.one_in(3).then(|| self.rng.below(self.writers.len() as u64) as usize);
        let mut words = vec!["apply", "--json", "--protected", "--privileges"];
        words.extend(only.map(|at| self.writers[at].name));
        self.base_is_new = true;
        let said = self.ask(&words, control);
        let base = self.applied(&marks, only);
        let Some(said) = said else { return Pending::Apply { base } };
        if said.last().unwrap()["changes"].as_u64() != Some(0) {
            self.before_apply = Some(std::mem::replace(&mut self.base, base));
        }
        self.count("applies");
        Pending::Nothing
    }

    /// The base after an apply that began at these marks.
    fn applied(&self, marks: &[usize], only: Option<usize>) -> Saved {
        let now = self.since(marks);
        match only {
            None => now,
            Some(at) => {
                let mut base = self.base.clone();
                base[at] = now[at].clone();
                base
            }
        }
    }

    fn undo_apply(&mut self, control: &Control) -> Pending {
        let Some(before) = self.before_apply.clone() else { return Pending::Nothing };
        self.base_is_new = true;
        let Some(said) = self.ask(&["apply", "--undo", "--json"], control) else {
            return Pending::Undo;
        };
        if said.last().unwrap()["changes"].as_u64() != Some(0) {
            self.before_apply = Some(std::mem::replace(&mut self.base, before));
        }
        self.count("undone applies");
        Pending::Nothing
    }

    /// A restore or `op restore`. Only the stream of links goes on meanwhile: the files that the
    /// other writers have open would become orphans.
    pub fn quiet_verb(&mut self, control: &Arc<Control>) -> Pending {
        let Some((words, to)) = self.some_state() else { return Pending::Nothing };
        let (marks, first_new) = (self.marks(), stamp());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let stream =
            Working::start(&self.writers, |w| w.kind == Kind::Stream, &self.live.mnt, control);
        let answer = self.ask(&words, control);
        let answered = answer.is_some().then(stamp);
        drop(stream);
        let _undisturbed = control.undisturbed.lock().unwrap();
        let Some(said) = answer.filter(|_| !control.is_killed()) else {
            return Pending::Restore { to, first_new, answered };
        };
        let before = self.since(&marks);
        let found = self.read();
        let states = self.settle_restored(&to, &found, first_new, answered);
        self.go_on(states.unwrap_or_else(|why| panic!("after {words:?}: {why}")));
        let undo = said.last().unwrap()["undo"].as_u64();
        self.operations.extend(undo.map(|undo| (undo, before)));
        self.count("restores");
        Pending::Nothing
    }

    /// Some state to restore, and the arguments for it.
    fn some_state(&mut self) -> Option<(Vec<String>, Saved)> {
        let of = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        if !self.operations.is_empty() && self.rng.one_in(3) {
            let at = self.rng.below(self.operations.len() as u64) as usize;
            let (op, saved) = self.operations.iter().nth(at)?;
            return Some((of(&["op", "restore", &op.to_string(), "--json"]), saved.clone()));
        }
        if self.checkpoints.is_empty() {
            return None;
        }
        let checkpoint = &self.checkpoints[self.rng.below(self.checkpoints.len() as u64) as usize];
        Some((of(&["restore", &checkpoint.name, "--json"]), checkpoint.saved.clone()))
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
            settled.map_err(|why| format!("{}: {why}", writer.name))
        };
        (0..to.len()).map(settle).collect()
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
