//! The verbs of one head, and what each may leave if it is interrupted.

use std::process::Output;
use std::sync::Arc;

use serde_json::Value;

use crate::head::{Head, Saved};
use crate::span::State;
use crate::world::{Checkpoint, World};
use crate::writer::{Control, Kind, Working, stamp};

/// A verb that has not answered.
#[derive(Default)]
pub enum Pending {
    #[default]
    Nothing,
    Checkpoint(Box<Checkpoint>),
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
        head: usize,
        to: Saved,
        first_new: u64,
        answered: Option<u64>,
    },
    /// A new head.
    Fork(Box<Head>),
    DropFork(String),
    /// With what the head would have after it, and whether there was an answer.
    Merge {
        head: usize,
        merged: Vec<State>,
        is_done: bool,
    },
}

impl Pending {
    /// Whether it changes the tree of a head.
    pub fn is_about(&self, at: usize) -> bool {
        match self {
            Pending::Restore { head, .. } | Pending::Merge { head, .. } => *head == at,
            _ => false,
        }
    }
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
    /// Runs a verb in the mount of a head. Returns `None` if the kill interrupted it; it must not
    /// fail otherwise.
    pub fn ask(&mut self, head: usize, words: &[&str], control: &Control) -> Option<Vec<Value>> {
        let output = self.heads[head].jailfs(words);
        let code = output.status.code();
        self.note(format!(
            "{}: {words:?}: {code:?}{}",
            self.heads[head].name,
            if control.is_killed() { ", killed" } else { "" }
        ));
        if output.status.success() {
            return Some(lines(&output));
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        self.note(format!("  {}{}", String::from_utf8_lossy(&output.stdout), said.trim()));
        control.failed(format!("jailfs {words:?}: {code:?} {said}"));
        None
    }

    /// A verb that programs in the mount do not notice.
    pub fn busy_verb(&mut self, control: &Control) -> Pending {
        match self.rng.below(26) {
            0..7 => self.checkpoint(0, control),
            7..9 => self.gc(control),
            9 => self.drop_one(control),
            10..14 => self.apply(control),
            14..16 => self.undo_apply(control),
            16 => self.look(&["status", "--json"], control),
            17 => self.look(&["diff", "--stat", "--json"], control),
            18 => self.look(&["check", "--read-data", "--json"], control),
            19..23 => self.checkpoint_fork(control),
            23..25 => self.make_fork(control),
            _ => self.look(&["op", "log", "--json"], control),
        }
    }

    fn look(&mut self, words: &[&str], control: &Control) -> Pending {
        if let Some(said) = self.ask(0, words, control) {
            let problems = said.last().and_then(|line| line["problems"].as_u64()).unwrap_or(0);
            assert_eq!(problems, 0, "{said:#?}");
        }
        Pending::Nothing
    }

    pub fn checkpoint(&mut self, at: usize, control: &Control) -> Pending {
        let (made, marks) = (stamp(), self.heads[at].marks());
        let name = format!("c{made}");
        let when = if self.rng.below(3) == 0 { &["--no-sync"][..] } else { &[] };
        let words = [&["checkpoint", &name, "--json"], when].concat();
        let said = self.ask(at, &words, control);
        let (head, saved) = (self.heads[at].name.clone(), self.heads[at].since(&marks));
        let checkpoint = Checkpoint { id: 0, head, made, name, saved };
        let Some(said) = said else { return Pending::Checkpoint(Box::new(checkpoint)) };
        let id = said[0]["id"].as_u64().unwrap();
        self.checkpoints.push(Checkpoint { id, ..checkpoint });
        self.count("checkpoints");
        Pending::Nothing
    }

    fn gc(&mut self, control: &Control) -> Pending {
        let keep = if self.rng.one_in(3) { 1000 } else { 2 + self.rng.below(6) };
        let operations = [0, 5, 100][self.rng.below(3) as usize];
        let kept = self.newest_of_each_head(keep as usize);
        // Automatic seals that it frees do not matter.
        self.operations.clear();
        let words =
            ["gc", "--json", "--keep", &keep.to_string(), "--operations", &operations.to_string()];
        if self.ask(0, &words, control).is_none() {
            return Pending::Gc { kept };
        }
        self.checkpoints.retain(|checkpoint| kept.contains(&checkpoint.id));
        self.count("gcs");
        Pending::Nothing
    }

    /// The numbers of the checkpoints that `gc --keep` keeps. Those of dropped heads count
    /// together.
    fn newest_of_each_head(&self, keep: usize) -> Vec<u64> {
        let heads = self.heads.iter().map(|head| Some(head.name.as_str()));
        let mut kept = Vec::new();
        for head in heads.chain([None]) {
            let is_of = |checkpoint: &&Checkpoint| match head {
                Some(name) => checkpoint.head == name,
                None => !self.heads.iter().any(|head| head.name == checkpoint.head),
            };
            let mut ids: Vec<u64> = self.checkpoints.iter().filter(is_of).map(|c| c.id).collect();
            ids.sort();
            kept.extend(ids.iter().rev().take(keep));
        }
        kept
    }

    fn drop_one(&mut self, control: &Control) -> Pending {
        if self.checkpoints.is_empty() {
            return Pending::Nothing;
        }
        let at = self.rng.below(self.checkpoints.len() as u64) as usize;
        let name = self.checkpoints[at].name.clone();
        let ids = self.checkpoints.iter().map(|checkpoint| checkpoint.id);
        let kept = ids.filter(|id| *id != self.checkpoints[at].id).collect();
        if self.ask(0, &["drop", &name], control).is_none() {
            return Pending::Gc { kept };
        }
        self.checkpoints.remove(at);
        Pending::Nothing
    }

    fn apply(&mut self, control: &Control) -> Pending {
        let (marks, writers) = (self.heads[0].marks(), self.heads[0].writers.len() as u64);
        let only = self.rng.one_in(3).then(|| self.rng.below(writers) as usize);
        let mut words = vec!["apply", "--json", "--protected", "--privileges"];
        words.extend(only.map(|at| self.heads[0].writers[at].name));
        self.base_is_new = true;
        let said = self.ask(0, &words, control);
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
        let now = self.heads[0].since(marks);
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
        let Some(said) = self.ask(0, &["apply", "--undo", "--json"], control) else {
            return Pending::Undo;
        };
        // An apply is undone once.
        if said.last().unwrap()["changes"].as_u64() != Some(0) {
            (self.base, self.before_apply) = (before, None);
        }
        self.count("undone applies");
        Pending::Nothing
    }

    /// A verb that changes the tree of a head. Only links are made meanwhile, in that head: the
    /// files that the other writers have open would become orphans.
    pub fn quiet_verb(&mut self, control: &Arc<Control>) -> Pending {
        match self.rng.below(10) {
            0..4 => self.restore_main(control),
            4..6 => self.restore_fork(control),
            6..9 => self.merge(control),
            _ => self.drop_fork(control),
        }
    }

    /// A restore or `op restore` of the first head.
    fn restore_main(&mut self, control: &Arc<Control>) -> Pending {
        if !self.operations.is_empty() && self.rng.one_in(3) {
            let at = self.rng.below(self.operations.len() as u64) as usize;
            let (op, saved) = self.operations.iter().nth(at).unwrap();
            let (op, saved) = (op.to_string(), saved.clone());
            self.forget_bases(None);
            return self.restore(0, &["op", "restore", &op, "--json"], saved, control);
        }
        if self.checkpoints.is_empty() {
            return Pending::Nothing;
        }
        let one = &self.checkpoints[self.rng.below(self.checkpoints.len() as u64) as usize];
        let (name, saved) = (one.name.clone(), one.saved.clone());
        let (head, made) = (one.head.clone(), one.made);
        self.forget_bases(Some((&head, made)));
        self.restore(0, &["restore", &name, "--json"], saved, control)
    }

    /// Runs a verb that restores a head.
    pub fn restore(
        &mut self,
        at: usize,
        words: &[&str],
        to: Saved,
        control: &Arc<Control>,
    ) -> Pending {
        let (marks, first_new) = (self.heads[at].marks(), stamp());
        let head = [&self.heads[at]];
        let stream = Working::start(head, |h, w| h.writers[w].kind == Kind::Stream, control);
        let answer = self.ask(at, words, control);
        let answered = answer.is_some().then(stamp);
        drop(stream);
        let _undisturbed = control.undisturbed.lock().unwrap();
        let Some(said) = answer.filter(|_| !control.is_killed()) else {
            return Pending::Restore { head: at, to, first_new, answered };
        };
        let before = self.heads[at].since(&marks);
        let found = self.read(at, true);
        let states = self.heads[at].settle_restored(&to, &found, first_new, answered);
        self.heads[at].go_on(states.unwrap_or_else(|why| panic!("after {words:?}: {why}")));
        let undo = said.last().unwrap()["undo"].as_u64().filter(|_| at == 0);
        self.operations.extend(undo.map(|undo| (undo, before)));
        self.count(if at == 0 { "restores" } else { "restores of forks" });
        Pending::Nothing
    }
}
