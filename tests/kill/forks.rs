//! The verbs of many heads, and the heads after a kill.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use crate::harness::{text, threads};
use crate::head::{Fork, Head};
use crate::span::{Span, State};
use crate::verbs::Pending;
use crate::world::{World, writers};
use crate::writer::{Control, Kind, Working, stamp};

/// There are at least so many forks when a load begins.
const LEAST: usize = 2;

impl World {
    /// Makes forks until there are enough for a load.
    pub fn make_enough_forks(&mut self) {
        let control = Control::default();
        while self.heads.len() <= LEAST {
            self.make_fork(&control);
            control.check();
        }
        self.read_new_forks(&control);
    }

    /// Forks the first head, unless each directory for a fork is in use.
    pub fn make_fork(&mut self, control: &Control) -> Pending {
        let is_free = |at: &usize| {
            let mut forks = self.heads.iter().filter_map(|head| head.fork.as_ref());
            self.heads[0].writers[*at].is_for_forks && forks.all(|fork| fork.own != *at)
        };
        let Some(own) = (0..self.heads[0].writers.len()).find(is_free) else {
            return Pending::Nothing;
        };
        let made = stamp();
        let name = format!("f{made}");
        let at = self.live.outside().join("forks").join(&name);
        let marks = self.heads[0].marks();
        let point = at.to_str().unwrap().to_owned();
        let answer = self.ask(0, &["fork", &name, &point], control);
        let fork = Fork {
            own,
            is_wild: self.rng.one_in(3),
            is_mounted: answer.is_some(),
            unread: Some(self.heads[0].since(&marks)),
            base: None,
            since: made,
        };
        let head = Head { name, at, writers: writers(made), fork: Some(fork) };
        if answer.is_none() {
            return Pending::Fork(Box::new(head));
        }
        self.heads.push(head);
        self.count("forks");
        Pending::Nothing
    }

    /// Reads with which of the possible states the new forks began.
    pub fn read_new_forks(&mut self, control: &Control) {
        let _undisturbed = control.undisturbed.lock().unwrap();
        for at in 1..self.heads.len() {
            let is_new = self.fork(at).is_mounted && self.fork(at).unread.is_some();
            if is_new && !control.is_killed() {
                self.hold_tree_against(at, &Pending::Nothing);
            }
        }
    }

    /// A fork that programs can work in.
    fn some_fork(&mut self, is_it: impl Fn(&Fork) -> bool) -> Option<usize> {
        let is_it = |head: &Head| head.is_ready() && head.fork.as_ref().is_some_and(&is_it);
        let all: Vec<usize> = (1..self.heads.len()).filter(|at| is_it(&self.heads[*at])).collect();
        (!all.is_empty()).then(|| *self.rng.pick(&all))
    }

    pub fn checkpoint_fork(&mut self, control: &Control) -> Pending {
        self.some_fork(|_| true).map_or(Pending::Nothing, |at| self.checkpoint(at, control))
    }

    /// Unmounts and drops a fork, first one that cannot be merged.
    pub fn drop_fork(&mut self, control: &Control) -> Pending {
        let useless = self.some_fork(|fork| fork.base.is_none());
        let Some(at) = useless.or_else(|| self.some_fork(|_| true)) else {
            return Pending::Nothing;
        };
        let (name, point) = (self.heads[at].name.clone(), self.heads[at].at.clone());
        if self.ask(0, &["umount", point.to_str().unwrap()], control).is_none() {
            return Pending::Nothing;
        }
        self.heads[at].fork.as_mut().unwrap().is_mounted = false;
        if self.ask(0, &["fork", "--drop", &name], control).is_none() {
            return Pending::DropFork(name);
        }
        self.heads.remove(at);
        self.count("dropped forks");
        Pending::Nothing
    }

    /// Restores a fork to a checkpoint of any head.
    pub fn restore_fork(&mut self, control: &Arc<Control>) -> Pending {
        let Some(at) = self.some_fork(|_| true) else { return Pending::Nothing };
        if self.checkpoints.is_empty() {
            return Pending::Nothing;
        }
        let one = &self.checkpoints[self.rng.below(self.checkpoints.len() as u64) as usize];
        let (name, saved) = (one.name.clone(), one.saved.clone());
        let (head, made) = (one.head.clone(), one.made);
        let comes_from = head == self.heads[at].name && made > self.fork(at).since;
        if !comes_from {
            self.heads[at].fork.as_mut().unwrap().base = None;
        }
        self.restore(at, &["restore", &name, "--json"], saved, control)
    }

    fn fork(&self, at: usize) -> &Fork {
        self.heads[at].fork.as_ref().unwrap()
    }

    /// The first head is about to be restored; to a checkpoint, if there is one. Forgets the merge
    /// bases that the state does not come from.
    pub fn forget_bases(&mut self, to: Option<(&str, u64)>) {
        for fork in self.heads.iter_mut().filter_map(|head| head.fork.as_mut()) {
            let comes_from = to.is_some_and(|(head, made)| head == "main" && made > fork.since);
            if !comes_from {
                fork.base = None;
            }
        }
    }

    /// Merges a fork into the first head, or the first head into a fork. Links are made in the head
    /// that changes meanwhile.
    pub fn merge(&mut self, control: &Arc<Control>) -> Pending {
        let Some(fork) = self.some_fork(|fork| fork.base.is_some()) else {
            return Pending::Nothing;
        };
        let (ours, theirs) = if self.rng.one_in(3) { (fork, 0) } else { (0, fork) };
        let began = stamp();
        let base = self.fork(fork).base.clone().unwrap();
        let (mine, other) = (self.heads[ours].now(), self.heads[theirs].now());
        // A program that was killed can leave other bytes without new lines, in a wild fork in both
        // heads. Then nothing here tells whether its directory conflicts.
        let is_wild = self.fork(fork).is_wild;
        let is_known = |at: &usize| !(is_wild && matches!(base[*at], State::Lines(_)));
        let merge_at = |at: usize| three_way(&base[at], &mine[at], &other[at]);
        let merged: Vec<Option<State>> =
            (0..base.len()).map(|at| Some(at).filter(is_known).and_then(merge_at)).collect();
        let mut words = vec!["merge".to_owned(), self.heads[theirs].name.clone()];
        words.push("--json".to_owned());
        // A directory that both heads changed, or may have changed, is left out.
        let is_whole = merged.iter().all(Option::is_some);
        let names = self.heads[0].writers.iter().zip(&merged);
        if !is_whole {
            words.extend(names.filter(|(_, m)| m.is_some()).map(|(w, _)| w.name.to_owned()));
        }
        let merged: Vec<State> = merged
            .into_iter()
            .zip(&mine)
            .map(|(m, mine)| m.unwrap_or_else(|| mine.clone()))
            .collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        // From here on, the journals have only what is done during the merge.
        self.heads[ours].go_on(mine.clone());
        let head = [&self.heads[ours]];
        let stream = Working::start(head, |h, at| h.writers[at].kind == Kind::Stream, control);
        let answer = self.ask(ours, &words, control);
        drop(stream);
        let _undisturbed = control.undisturbed.lock().unwrap();
        let is_done = answer.is_some();
        let Some(said) = answer.filter(|_| !control.is_killed()) else {
            self.heads[fork].fork.as_mut().unwrap().base = None;
            return Pending::Merge { head: ours, merged, is_done };
        };
        let before = self.heads[ours].since(&vec![0; mine.len()]);
        let found = self.read(ours, true);
        let states = self.heads[ours].settle(&self.merged(ours, &merged), &found);
        let states = states.unwrap_or_else(|why| panic!("after {words:?}: {why}"));
        self.heads[ours].go_on(states);
        let said = said.last().unwrap();
        if is_whole {
            let of = self.heads[fork].fork.as_mut().unwrap();
            of.base = Some(other);
            of.since = began;
        }
        if let (0, Some(undo)) = (ours, said["undo"].as_u64()) {
            self.operations.insert(undo, before);
        }
        self.count(if is_whole { "merges" } else { "merges of some paths" });
        Pending::Nothing
    }

    /// The possible data of a head after a merge: what it led to, and what was written meanwhile.
    pub fn merged(&self, head: usize, merged: &[State]) -> Vec<Span> {
        let head = &self.heads[head];
        let since = head.since(&head.marks()).into_iter().zip(merged);
        since.map(|(span, start)| Span { start: start.clone(), ..span }).collect()
    }

    /// Compares the list of heads, and the data in each fork, with the acknowledged operations.
    /// Leaves some forks unmounted.
    pub fn hold_forks_against(&mut self, pending: &mut Pending) {
        let listed: BTreeMap<String, bool> = self
            .live
            .json(&["forks"])
            .iter()
            .map(|line| (line["name"].as_str().unwrap().to_owned(), !line["mount"].is_null()))
            .collect();
        match std::mem::take(pending) {
            Pending::Fork(head) => {
                self.count("forks that were cut off");
                if listed.contains_key(&head.name) {
                    self.count("of them there");
                    self.heads.push(*head);
                }
            }
            Pending::DropFork(name) => {
                self.count("drops of forks that were cut off");
                if !listed.contains_key(&name) {
                    self.count("of them done");
                    self.heads.retain(|head| head.name != name);
                }
            }
            other => *pending = other,
        }
        let mut names: Vec<&String> = self.heads.iter().map(|head| &head.name).collect();
        names.sort();
        assert!(names.iter().copied().eq(listed.keys()), "{names:?}, but there are {listed:?}");
        for at in 1..self.heads.len() {
            let (name, point) = (self.heads[at].name.clone(), self.heads[at].at.clone());
            let mut is_mounted = listed[&name];
            let is_needed = pending.is_about(at) || self.fork(at).unread.is_some();
            if !is_mounted && (is_needed || !self.rng.one_in(4)) {
                self.mount_fork(&name, &point);
                is_mounted = true;
            }
            self.heads[at].fork.as_mut().unwrap().is_mounted = is_mounted;
            match is_mounted {
                true => self.hold_tree_against(at, pending),
                false => detach(&point),
            }
        }
    }

    fn mount_fork(&self, name: &str, point: &Path) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.args(["mount", "--head", name]).args([&self.live.base, point]).args(threads());
        let output =
            command.arg("--store").arg(&self.live.store).current_dir("/").output().unwrap();
        assert!(output.status.success(), "mount {name}: {}", text(&output));
    }
}

/// Detaches what a killed daemon left at a mount point.
fn detach(point: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    if mounts.lines().any(|line| line.split(' ').nth(1) == point.to_str()) {
        let done = Command::new("umount").arg("-l").arg(point).output().unwrap();
        assert!(done.status.success(), "{}", text(&done));
    }
}

/// The data of one writer after a merge; `None` if no rule of this test says it.
fn three_way(base: &State, ours: &State, theirs: &State) -> Option<State> {
    let is_same = |a: &State, b: &State| a.differs(b).is_empty();
    if is_same(base, theirs) || is_same(ours, theirs) {
        return Some(ours.clone());
    }
    if is_same(base, ours) {
        // A new file in the place of one that is gone counts as an edit, and keeps that number.
        return Some(match theirs.clone() {
            State::Tree(tree) => State::Tree(tree.without_numbers()),
            other => other,
        });
    }
    let (State::Numbers(base), State::Numbers(ours), State::Numbers(theirs)) = (base, ours, theirs)
    else {
        return None;
    };
    // A number is there if both heads have it, or if one of them added it.
    let is_kept = |number: &&u64| {
        (ours.contains(number) && theirs.contains(number)) || !base.contains(number)
    };
    Some(State::Numbers(ours.union(theirs).filter(is_kept).copied().collect()))
}
