//! The merge base is the newest state from which both heads came, whatever was restored and merged
//! before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::epochs::Heads;
use super::{Program, path};
use crate::store::record::OpVerb;
use crate::timeline::gc::{Keep, is_checkpoint};
use crate::timeline::merge::Rules;
use crate::timeline::mounts::Mounts;
use crate::timeline::{Target, Timeline};
use crate::types::LayerId;

/// Merges without conflicts. Returns whether that changed our tree.
fn merge(ours: &Timeline, theirs: &Timeline) -> bool {
    let sink = &mut |_: &_, _: &_, _| Ok(());
    let outcome = ours.merge(theirs, &Rules::default(), false, (Mounts::Refuse, sink)).unwrap();
    assert_eq!(outcome.conflicts, Vec::new());
    outcome.before.is_some()
}

fn checkpoint(head: &Timeline) -> LayerId {
    head.checkpoint(None, String::new(), None).unwrap()
}

fn restore(head: &Timeline, layer: LayerId) {
    let to = Target { layer: Some(layer), epoch: head.epoch() };
    let sink = &mut |_: &_, _: &_, _| Ok(());
    head.restore(OpVerb::Restore, to, String::new(), (Mounts::Refuse, sink)).unwrap();
}

fn base(a: &Timeline, b: &Timeline) -> Option<LayerId> {
    a.common_seal(a.head(), b.head()).unwrap().and_then(|target| target.layer)
}

fn write(head: &Timeline, file: &str) {
    Program(head.fs()).write(&path(file), file.as_bytes(), false);
}

fn has(head: &Timeline, file: &str) -> bool {
    Program(head.fs()).exists(&path(file))
}

fn collect(head: &Timeline) {
    let keep =
        Keep { operations: 0, checkpoints: None, store_bytes: None, spared: BTreeSet::new() };
    head.gc(&keep, false).unwrap();
}

#[test]
fn a_restore_of_the_merged_head_does_not_take_its_merge_back_in_the_other() {
    let heads = Heads::new();
    let fork = heads.fork_of(&heads.main, "try");
    let begin = base(&heads.main, &fork);
    let first = checkpoint(&fork);
    write(&fork, "one");
    checkpoint(&fork);
    merge(&heads.main, &fork);
    restore(&fork, first);
    write(&fork, "two");
    assert!(base(&heads.main, &fork) >= begin);
    merge(&heads.main, &fork);
    assert!(has(&heads.main, "one"), "only the fork took it back");
    assert!(has(&heads.main, "two"));
    merge(&fork, &heads.main);
    assert!(has(&fork, "one") && has(&fork, "two"));
}

#[test]
fn a_restore_takes_back_only_the_merges_after_that_state() {
    let heads = Heads::new();
    let main = &heads.main;
    let fork = heads.fork_of(main, "try");
    write(&fork, "one");
    merge(main, &fork);
    Program(main.fs()).remove(&path("one"));
    let between = checkpoint(main);
    write(&fork, "two");
    merge(main, &fork);
    restore(main, between);
    for _ in 0..2 {
        assert!(!has(main, "two"));
        merge(main, &fork);
        assert!(has(main, "two"), "the merge was taken back");
        assert!(!has(main, "one"), "main removed it after an earlier merge");
        restore(main, between);
        collect(main);
    }
}

#[test]
fn a_merge_base_survives_gc() {
    let heads = Heads::new();
    let fork = heads.fork_of(&heads.main, "try");
    for round in 0..4 {
        let one = format!("one{round}");
        write(&fork, &one);
        merge(&heads.main, &fork);
        let known = base(&heads.main, &fork);
        Program(heads.main.fs()).remove(&path(&one));
        write(&heads.main, &format!("later{round}"));
        checkpoint(&heads.main);
        collect(&heads.main);
        assert_eq!(base(&heads.main, &fork), known);
        write(&fork, &format!("more{round}"));
        merge(&heads.main, &fork);
        assert!(!has(&heads.main, &one), "it was removed after the merge");
    }
}

/// An endless loop of merges must not keep a state for each of them.
#[test]
fn superseded_merges_keep_no_states() {
    let heads = Heads::new();
    let fork = heads.fork_of(&heads.main, "try");
    let mut counts = Vec::new();
    for round in 0..6 {
        write(&fork, &format!("f{round}"));
        merge(&heads.main, &fork);
        write(&heads.main, &format!("m{round}"));
        merge(&fork, &heads.main);
        let other = heads.fork_of(&heads.main, &format!("race{round}"));
        write(&other, &format!("r{round}"));
        merge(&heads.main, &other);
        drop(other);
        heads.main.drop_head(&format!("race{round}")).unwrap();
        collect(&heads.main);
        counts.push(heads.main.sealed().len());
    }
    assert_eq!(counts[2], counts[5], "{counts:?}");
    let record = heads.main.store().head("main").unwrap().unwrap();
    assert!(record.merged.len() < 6, "{:?}", record.merged);
}

#[test]
fn a_merge_that_changes_nothing_counts() {
    let heads = Heads::new();
    let main = &heads.main;
    let fork = heads.fork_of(main, "try");
    write(&fork, "one");
    write(main, "one");
    assert!(!merge(main, &fork));
    Program(main.fs()).remove(&path("one"));
    write(&fork, "two");
    merge(main, &fork);
    assert!(has(main, "two") && !has(main, "one"));
}

#[test]
fn a_merge_reaches_a_third_head() {
    let heads = Heads::new();
    let [a, b] = ["a", "b"].map(|name| heads.fork_of(&heads.main, name));
    write(&a, "one");
    merge(&b, &a);
    write(&b, "two");
    merge(&heads.main, &b);
    Program(heads.main.fs()).remove(&path("one"));
    let late = heads.fork_of(&heads.main, "late");
    write(&a, "three");
    for head in [&heads.main, &late] {
        merge(head, &a);
        assert!(has(head, "three") && !has(head, "one"), "{}", head.head());
    }
}

#[test]
fn what_a_dropped_head_came_from_stays_merged() {
    let heads = Heads::new();
    let main = &heads.main;
    let other = heads.fork_of(main, "other");
    write(main, "one");
    let short = heads.fork_of(main, "short");
    write(&short, "more");
    merge(&other, &short);
    drop(short);
    main.drop_head("short").unwrap();
    collect(main);
    Program(other.fs()).remove(&path("one"));
    write(main, "two");
    merge(&other, main);
    assert!(has(&other, "two") && !has(&other, "one"));
}

#[test]
fn what_a_dropped_head_had_merged_stays_merged() {
    let heads = Heads::new();
    let main = &heads.main;
    let [a, b, between] = ["a", "b", "between"].map(|name| heads.fork_of(main, name));
    write(&a, "one");
    merge(&between, &a);
    merge(&b, &between);
    drop(between);
    main.drop_head("between").unwrap();
    collect(main);
    Program(b.fs()).remove(&path("one"));
    write(&a, "two");
    merge(&b, &a);
    assert!(has(&b, "two") && !has(&b, "one"));
}

#[test]
fn a_dropped_head_that_two_heads_have_merged_is_a_merge_base() {
    let heads = Heads::new();
    let main = &heads.main;
    let [a, b, short] = ["a", "b", "short"].map(|name| heads.fork_of(main, name));
    write(&short, "one");
    merge(&a, &short);
    write(&short, "more");
    merge(&b, &short);
    drop(short);
    main.drop_head("short").unwrap();
    collect(main);
    Program(b.fs()).remove(&path("one"));
    write(&a, "two");
    merge(&b, &a);
    assert!(has(&b, "two") && !has(&b, "one"));
}

/// A number for the step, and the heads or states that it uses.
type Step = (u8, u8, u8);

/// A change of a head: it adds a file, or removes one.
type Change = (bool, u32);

/// A state in a dumb model.
#[derive(Clone, Default)]
struct Known {
    /// The changes that led to it. A merge makes the union.
    changes: BTreeSet<Change>,
    /// The states that it came from.
    origins: BTreeSet<LayerId>,
}

#[derive(Default)]
struct Model {
    of_heads: BTreeMap<String, Known>,
    of_states: BTreeMap<LayerId, Known>,
    next: u32,
}

impl Model {
    fn of(&mut self, head: &Timeline) -> &mut Known {
        self.of_heads.entry(head.head().to_owned()).or_default()
    }

    fn seal(&mut self, head: &Timeline) {
        let layer = checkpoint(head);
        self.sealed(head, layer);
    }

    fn sealed(&mut self, head: &Timeline, layer: LayerId) {
        self.of(head).origins.insert(layer);
        let known = self.of(head).clone();
        self.of_states.insert(layer, known);
    }

    fn files(&self, head: &str) -> BTreeSet<u32> {
        let all = &self.of_heads[head].changes;
        let added = all.iter().filter(|(is_new, _)| *is_new).map(|(_, file)| *file);
        added.filter(|file| !all.contains(&(false, *file))).collect()
    }

    fn change(&mut self, head: &Timeline, number: u8) {
        let there: Vec<u32> = self.files(head.head()).into_iter().collect();
        let change = if number.is_multiple_of(3) && !there.is_empty() {
            let file = there[usize::from(number) % there.len()];
            Program(head.fs()).remove(&path(&format!("f{file}")));
            (false, file)
        } else {
            self.next += 1;
            write(head, &format!("f{}", self.next));
            (true, self.next)
        };
        self.of(head).changes.insert(change);
    }

    /// Runs gc, which drops most checkpoints if `drops`. The merge bases stay.
    fn collect(&mut self, all: &[Arc<Timeline>], drops: bool) {
        let bases = || [(0, 1), (0, 2), (1, 2)].map(|(a, b)| base(&all[a], &all[b]));
        let before = bases();
        let checkpoints = drops.then_some(1);
        let keep = Keep { checkpoints, operations: 0, store_bytes: None, spared: BTreeSet::new() };
        all[0].gc(&keep, false).unwrap();
        assert_eq!(bases(), before);
    }

    fn restore(&mut self, head: &Timeline, number: u8) {
        let is_there =
            |layer: &LayerId| head.store().layer(*layer).is_some_and(|info| is_checkpoint(&info));
        let states: Vec<LayerId> = self.of_states.keys().copied().filter(is_there).collect();
        if states.is_empty() {
            return;
        }
        let layer = states[usize::from(number) % states.len()];
        restore(head, layer);
        *self.of(head) = self.of_states[&layer].clone();
    }

    /// Merges, and compares. Returns false if there is not one best state in common. Then the merge
    /// base misses changes that both heads have.
    fn merge(&mut self, ours: &Timeline, theirs: &Timeline) -> Result<bool, TestCaseError> {
        self.seal(ours);
        self.seal(theirs);
        let (a, b) = (self.of(ours).clone(), self.of(theirs).clone());
        let common: BTreeSet<LayerId> = a.origins.intersection(&b.origins).copied().collect();
        let is_older = |layer: &LayerId| {
            let mut others = common.iter().filter(|other| *other != layer);
            others.any(|other| self.of_states[other].origins.contains(layer))
        };
        let best: Vec<LayerId> = common.iter().filter(|layer| !is_older(layer)).copied().collect();
        let found = base(ours, theirs);
        let is_best = found.is_some_and(|layer| best.contains(&layer));
        prop_assert!(is_best, "{:?} is not in {:?}", found, best);
        merge(ours, theirs);
        let now = self.of(ours);
        now.changes.extend(b.changes);
        now.origins.extend(b.origins);
        if best.len() > 1 {
            return Ok(false);
        }
        let listed = self.files(ours.head());
        for file in 1..=self.next {
            let is_there = has(ours, &format!("f{file}"));
            prop_assert_eq!(is_there, listed.contains(&file), "f{}", file);
        }
        self.seal(ours);
        Ok(true)
    }
}

#[test]
fn merge_bases_of_random_histories_are_those_of_the_model() {
    let cases = std::env::var("JAILFS_MERGE_CASES").ok().and_then(|text| text.parse().ok());
    let config = Config { cases: cases.unwrap_or(40), ..Config::default() };
    let steps = proptest::collection::vec((0u8..13, 0u8..40, 0u8..40), 1..24);
    let run = TestRunner::new(config).run(&steps, |steps: Vec<Step>| {
        let heads = Heads::new();
        let mut model = Model::default();
        let mut all: Vec<Arc<Timeline>> = vec![Arc::clone(&heads.main)];
        // gc keeps checkpoints, so every state of the model exists.
        let first = checkpoint(&heads.main);
        all.extend(["a", "b"].map(|name| heads.fork_of(&heads.main, name)));
        all.iter().for_each(|head| model.sealed(head, first));
        for (what, which, other) in steps {
            if what == 12 {
                let at = 1 + usize::from(which) % 2;
                let name = all.remove(at).head().to_owned();
                heads.main.drop_head(&name).unwrap();
                model.seal(&heads.main);
                all.insert(at, heads.fork_of(&heads.main, &name));
                model.of_heads.insert(name, model.of_heads["main"].clone());
                continue;
            }
            let head = &all[usize::from(which) % 3];
            let theirs = &all[(usize::from(which) + 1 + usize::from(other) % 2) % 3];
            match what {
                0..5 => model.change(head, other),
                5..7 => model.seal(head),
                7..9 => model.restore(head, other),
                9 if other.is_multiple_of(4) => model.collect(&all, other.is_multiple_of(8)),
                _ if model.merge(head, theirs)? => {}
                _ => break,
            }
        }
        Ok(())
    });
    run.unwrap_or_else(|failure| panic!("{failure}"));
}
