//! Merges of heads between which applies came are what the model says, and the base gets the merged
//! tree.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::model::{self, Snap};
use super::{Op, Program, make_base, path};
use crate::base::Base;
use crate::error::Kind;
use crate::jail::{Jail, Policy};
use crate::store::record::OpVerb;
use crate::store::{Store, StoreOptions};
use crate::timeline::apply::protected::Consent;
use crate::timeline::gc::Keep;
use crate::timeline::merge::Rules;
use crate::timeline::mounts::Mounts;
use crate::timeline::{Common, Target, Timeline};
use crate::types::TreePath;

/// Heads of a store: `main`, and forks of it.
pub(super) struct Heads {
    dir: tempfile::TempDir,
    common: Arc<Common>,
    pub(super) main: Arc<Timeline>,
}

/// A step of one of the heads: a change, or an apply.
type Step = (bool, u8, Op);

impl Heads {
    pub(super) fn new() -> Heads {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        make_base(&base);
        let base = Base::open(&base).unwrap();
        let options = StoreOptions { volatile: true, ..StoreOptions::default() };
        let store = Store::create(&store, base.path(), base.root_id(), options).unwrap();
        let common = Common::open(Arc::new(store), Arc::new(base)).unwrap();
        let main = open(&common, dir.path(), "main");
        Heads { dir, common, main }
    }

    fn fork(&self) -> Arc<Timeline> {
        self.fork_of(&self.main, "try")
    }

    pub(super) fn fork_of(&self, head: &Timeline, name: &str) -> Arc<Timeline> {
        head.fork(&[name.to_owned()], None).unwrap();
        open(&self.common, self.dir.path(), name)
    }
}

fn open(common: &Arc<Common>, dir: &Path, head: &str) -> Arc<Timeline> {
    let base_path = dir.join("base").as_os_str().as_bytes().to_vec();
    let jail = Jail {
        policy: Policy::Deny,
        mount_point: b"/mnt".to_vec(),
        base_path,
        allowed_targets: Vec::new(),
    };
    Timeline::open(common, head, jail).unwrap()
}

fn apply(head: &Timeline, paths: &[TreePath]) {
    let plan = head.apply(paths, Consent::ALL).unwrap();
    assert_eq!(plan.conflicts, Vec::new(), "apply {paths:?}");
}

fn step(head: &Timeline, (_, what, op): &Step) {
    match what % 8 {
        0 => apply(head, &[]),
        1 => {
            let paths = Program(head.fs()).paths();
            let top: Vec<TreePath> = paths.into_iter().map(|(path, _)| path).collect();
            if let Some(path) = top.get(op.1 as usize % top.len().max(1)) {
                apply(head, std::slice::from_ref(path));
            }
        }
        2 if op.0 % 4 == 0 => match head.undo_apply() {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind, Kind::NoStore, "{error}"),
        },
        _ => Program(head.fs()).run(*op),
    }
}

/// Applies everything, and collects garbage after two checkpoints. Returns the first of them.
fn apply_and_collect(head: &Timeline) -> Target {
    apply(head, &[]);
    let applied = head.checkpoint(Some("applied".to_owned()), String::new(), None).unwrap();
    Program(head.fs()).chmod(&path("top"), 0o640);
    head.checkpoint(None, String::new(), None).unwrap();
    let keep =
        Keep { operations: 0, checkpoints: None, store_bytes: None, spared: BTreeSet::new() };
    for _ in 0..2 {
        head.common().gc(&keep, false).unwrap();
    }
    let unsealed = head.common().store().catalog().into_iter().filter(|l| l.seal.is_none());
    assert_eq!(unsealed.count(), 2, "the upper layers of the two heads");
    Target { layer: Some(applied), epoch: head.epoch() }
}

fn restore(head: &Timeline, to: Target) {
    let sink = &mut |_: &_, _: &_, _| Ok(());
    head.restore(OpVerb::Restore, to, "there".to_owned(), (Mounts::Refuse, sink)).unwrap();
}

/// Merges `theirs` into `ours`, and compares the result with the model.
fn merged_as_the_model_says(ours: &Timeline, theirs: &Timeline) -> Result<bool, TestCaseError> {
    let common = ours.common_seal(ours.head(), theirs.head()).unwrap();
    let none = Target { layer: None, epoch: ours.epoch().min(theirs.epoch()) };
    let base = Snap::of(&ours.state_of(common.unwrap_or(none)).unwrap());
    let (of_ours, of_theirs) = (Snap::of(&ours.fs().state()), Snap::of(&theirs.fs().state()));
    let expected = model::merge(&base, &of_ours, &of_theirs);
    let sink = &mut |_: &_, _: &_, _| Ok(());
    let outcome = ours.merge(theirs, &Rules::default(), false, (Mounts::Refuse, sink)).unwrap();
    ours.fs().state().tree.verify().unwrap();
    prop_assert_eq!(Snap::of(&theirs.fs().state()).paths(), of_theirs.paths(), "the other head");
    let now = Snap::of(&ours.fs().state());
    match expected {
        Some(expected) => {
            prop_assert_eq!(outcome.conflicts, Vec::new());
            prop_assert_eq!(now.paths(), expected.paths());
            Ok(true)
        }
        None => {
            prop_assert!(!outcome.conflicts.is_empty(), "the model has a conflict");
            prop_assert_eq!(now.paths(), of_ours.paths());
            Ok(false)
        }
    }
}

fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
    let op = (0u8..12, 0u8..40, 0u8..40, 0u8..20);
    proptest::collection::vec((any::<bool>(), 0u8..16, op), 0..most)
}

#[test]
fn heads_over_different_epochs_merge_as_the_model_says() {
    let cases = std::env::var("JAILFS_MERGE_CASES").ok().and_then(|text| text.parse().ok());
    let config = Config { cases: cases.unwrap_or(40), ..Config::default() };
    let all = (super::ops(4), steps(10), any::<bool>(), steps(4));
    let run = TestRunner::new(config).run(&all, |(base, parted, into_main, later)| {
        let heads = Heads::new();
        base.iter().for_each(|op| Program(heads.main.fs()).run(*op));
        let fork = heads.fork();
        let of = |is_main: bool| if is_main { &*heads.main } else { &*fork };
        parted.iter().for_each(|now| step(of(now.0), now));
        if merged_as_the_model_says(of(into_main), of(!into_main))? {
            // The next merge begins with this one.
            later.iter().for_each(|now| step(of(now.0), now));
            merged_as_the_model_says(of(!into_main), of(into_main))?;
        }
        let last = of(into_main);
        apply(last, &[]);
        let base = last.base_state().unwrap();
        prop_assert_eq!(Snap::of(&base).paths(), Snap::of(&last.fs().state()).paths());
        Ok(())
    });
    run.unwrap_or_else(|failure| panic!("{failure}"));
}

/// The apply of one path gives the numbers of the moved nodes to their copies, so the nodes at the
/// old path have other numbers in the two heads.
#[test]
fn a_moved_directory_of_which_one_path_was_applied_merges_both_ways() {
    let heads = Heads::new();
    let fork = heads.fork();
    Program(heads.main.fs()).rename(&path("a"), &path("b/n1"));
    Program(fork.fs()).write(&path("a/s/g"), b"1\ntry\n3\n", false);
    apply(&heads.main, &[path("b/n1")]);
    assert!(merged_as_the_model_says(&heads.main, &fork).unwrap());
    apply(&fork, &[]);
    assert!(merged_as_the_model_says(&fork, &heads.main).unwrap());
    assert_eq!(Program(fork.fs()).read(&path("b/n1/s/g")), b"1\ntry\n3\n");
}

#[test]
fn a_file_that_both_heads_edit_around_an_apply_has_both_edits() {
    let heads = Heads::new();
    let fork = heads.fork();
    let (main, other) = (Program(heads.main.fs()), Program(fork.fs()));
    main.write(&path("a/f"), b"main\n2\n3\n4\n5\n6\n", false);
    other.write(&path("a/f"), b"1\n2\n3\n4\n5\ntry\n", true);
    main.rename(&path("b"), &path("c"));
    other.write(&path("b/h"), b"try\n", false);
    other.chmod(&path("top"), 0o600);
    apply(&heads.main, &[]);
    assert!(merged_as_the_model_says(&heads.main, &fork).unwrap());
    assert_eq!(main.read(&path("a/f")), b"main\n2\n3\n4\n5\ntry\n");
    assert_eq!(main.read(&path("c/h")), b"try\n");
    apply(&heads.main, &[]);
    let in_base = std::fs::read(heads.dir.path().join("base/c/h")).unwrap();
    assert_eq!(in_base, b"try\n");
}

#[test]
fn a_merge_is_the_base_of_the_next_one_after_an_apply_and_gc() {
    let heads = Heads::new();
    let fork = heads.fork();
    let (main, other) = (Program(heads.main.fs()), Program(fork.fs()));
    other.write(&path("of_try"), b"1\n", false);
    assert!(merged_as_the_model_says(&heads.main, &fork).unwrap());
    main.remove(&path("of_try"));
    let applied = apply_and_collect(&heads.main);
    restore(&heads.main, applied);
    other.write(&path("later"), b"2\n", false);
    assert!(merged_as_the_model_says(&heads.main, &fork).unwrap());
    assert!(main.exists(&path("later")));
    assert!(!main.exists(&path("of_try")), "main removed it after the first merge");
}

#[test]
fn an_undone_merge_does_not_count_after_an_apply_and_gc() {
    let heads = Heads::new();
    let begin = heads.main.checkpoint(None, String::new(), None).unwrap();
    let begin = Target { layer: Some(begin), epoch: heads.main.epoch() };
    let fork = heads.fork();
    let (main, other) = (Program(heads.main.fs()), Program(fork.fs()));
    other.write(&path("of_try"), b"1\n", false);
    assert!(merged_as_the_model_says(&heads.main, &fork).unwrap());
    restore(&heads.main, begin);
    main.write(&path("of_main"), b"2\n", false);
    let applied = apply_and_collect(&heads.main);
    restore(&heads.main, applied);
    assert!(merged_as_the_model_says(&heads.main, &fork).unwrap());
    assert!(main.exists(&path("of_try")), "the merge that brought it was undone");
}
