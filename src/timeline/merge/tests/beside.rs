//! With markers each merge is carried out: texts get markers, and of anything else our side stays
//! and the other one is beside it.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::model::{self, Snap};
use super::{Program, World, check, name, path, three};
use crate::fs::State;
use crate::timeline::merge::{Glob, Rules, with_plan};
use crate::types::{FileKind, TreePath};

/// The merged tree, the files with markers and the copies.
struct Marked {
    /// Has the base, which the tree refers to.
    _world: Option<World>,
    state: State,
    marked: Vec<String>,
    beside: Vec<String>,
}

fn rules() -> Rules {
    Rules { markers: Some(("main".into(), "try".into())), ..Rules::default() }
}

fn merge(world: &World, states: (&State, &State, &State), rules: &Rules) -> Marked {
    let text = |paths: &[TreePath]| paths.iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut next = world.layer();
    let (edits, marked, beside) = with_plan(states, rules, |plan| {
        assert_eq!(plan.conflicts(), []);
        let (edits, beside) = plan.edits(&mut next.pool)?;
        Ok((edits, text(plan.marked()), text(&beside)))
    })
    .unwrap();
    let mut state = states.1.clone();
    state.tree.validate(&edits).unwrap();
    edits.iter().for_each(|edit| state.tree.apply(edit).unwrap());
    state.tree.verify().unwrap();
    Marked { _world: None, state, marked, beside }
}

type Run = fn(&Program<'_>);

/// Merges what two programs did.
fn run(ours: Run, theirs: Run, rules: &Rules) -> Marked {
    let world = World::new();
    let begin = world.head(&crate::tree::Tree::new());
    let heads = [world.head(&begin.state().tree), world.head(&begin.state().tree)];
    ours(&Program(&heads[0]));
    theirs(&Program(&heads[1]));
    let merged = merge(&world, (&begin.state(), &heads[0].state(), &heads[1].state()), rules);
    Marked { _world: Some(world), ..merged }
}

fn read(state: &State, at: &str) -> Option<String> {
    let found = state.resolve(&path(at)).unwrap();
    let is_file = state.kind(&found) == Some(FileKind::File);
    is_file.then(|| String::from_utf8(state.read_all(&found).unwrap()).unwrap())
}

fn mode(state: &State, at: &str) -> u32 {
    state.node(&state.resolve(&path(at)).unwrap()).unwrap().meta.mode & 0o777
}

#[test]
fn a_binary_file_of_each_side_stays() {
    let ours: Run = |p| p.write(&path("top"), b"\0ours", false);
    let merged = run(ours, |p| p.write(&path("top"), b"\0theirs", true), &rules());
    assert_eq!(merged.beside, ["top~try"]);
    assert_eq!(read(&merged.state, "top").unwrap(), "\0ours");
    assert_eq!(read(&merged.state, "top~try").unwrap(), "\0theirs");
}

#[test]
fn a_file_that_one_side_removed_and_the_other_edited_stays() {
    let (edit, remove): (Run, Run) =
        (|p| p.write(&path("a/f"), b"edited\n", false), |p| p.remove(&path("a/f")));
    let merged = run(remove, edit, &rules());
    assert_eq!(merged.beside, ["a/f~try"]);
    assert_eq!(read(&merged.state, "a/f"), None);
    assert_eq!(read(&merged.state, "a/f~try").unwrap(), "edited\n");
    let merged = run(edit, remove, &rules());
    assert_eq!(merged.beside, ["a/f~try"]);
    assert_eq!(read(&merged.state, "a/f").unwrap(), "edited\n");
    assert_eq!(read(&merged.state, "a/f~try").unwrap(), "'try': removed\n");
}

#[test]
fn an_edit_in_a_removed_directory_stays_in_a_directory_beside() {
    let edit: Run = |p| {
        p.write(&path("a/s/g"), b"edited\n", false);
        p.write(&path("a/f"), b"edited too\n", false);
    };
    let merged = run(|p| p.remove(&path("a")), edit, &rules());
    assert_eq!(merged.beside, ["a~try"]);
    assert_eq!(read(&merged.state, "a~try/s/g").unwrap(), "edited\n");
    assert_eq!(read(&merged.state, "a~try/f").unwrap(), "edited too\n");
    // A directory that got another name is copied with all that is in it.
    let add: Run = |p| p.write(&path("a/s/new"), b"new\n", false);
    let merged = run(|p| p.remove(&path("a")), add, &rules());
    assert_eq!(merged.beside, ["a~try"]);
    assert_eq!(read(&merged.state, "a~try/s/new").unwrap(), "new\n");
    assert_eq!(read(&merged.state, "a").as_deref(), None);
}

#[test]
fn a_file_and_a_directory_of_one_name_stay() {
    let (file, dir): (Run, Run) = (
        |p| p.write(&path("n"), b"file\n", false),
        |p| {
            p.mkdir(&path("n"));
            p.write(&path("n/x"), b"x\n", false);
            p.link(&path("n/x"), &path("n/y"));
        },
    );
    let merged = run(file, dir, &rules());
    assert_eq!(merged.beside, ["n~try"]);
    assert_eq!(read(&merged.state, "n").unwrap(), "file\n");
    assert_eq!(read(&merged.state, "n~try/x").unwrap(), "x\n");
    let x = merged.state.resolve(&path("n~try/x")).unwrap();
    assert_eq!(x.ino(), merged.state.resolve(&path("n~try/y")).unwrap().ino());
    assert_eq!(merged.state.node(&x).unwrap().meta.nlink, 2);
    let merged = run(dir, file, &rules());
    assert_eq!(read(&merged.state, "n/y").unwrap(), "x\n");
    assert_eq!(read(&merged.state, "n~try").unwrap(), "file\n");
}

#[test]
fn symlinks_modes_and_attributes_stay() {
    let link: [Run; 2] =
        [|p| p.symlink(&path("new"), "here"), |p| p.symlink(&path("new"), "there")];
    let merged = run(link[0], link[1], &rules());
    assert_eq!(merged.beside, ["new~try"]);
    let target = |at: &str| {
        let node = merged.state.node(&merged.state.resolve(&path(at)).unwrap()).unwrap();
        format!("{:?}", node.body)
    };
    assert_ne!(target("new"), target("new~try"));
    let merged = run(|p| p.chmod(&path("top"), 0o600), |p| p.chmod(&path("top"), 0o640), &rules());
    assert_eq!((mode(&merged.state, "top"), mode(&merged.state, "top~try")), (0o600, 0o640));
    // Only the attributes of the directory conflict, so it is copied without what is in it.
    let merged = run(|p| p.chmod(&path("a"), 0o700), |p| p.chmod(&path("a"), 0o711), &rules());
    assert_eq!((mode(&merged.state, "a"), mode(&merged.state, "a~try")), (0o700, 0o711));
    assert_eq!(read(&merged.state, "a~try/f"), None);
    // The root has no name.
    let root = TreePath::root;
    let set: [Run; 2] = [
        |p| p.xattr(&TreePath::root(), "user.x", "1"),
        |p| p.xattr(&TreePath::root(), "user.x", "2"),
    ];
    let merged = run(set[0], set[1], &rules());
    assert_eq!(merged.beside, ["~try"]);
    assert!(merged.state.node(&merged.state.resolve(&root()).unwrap()).unwrap().xattrs.is_some());
}

#[test]
fn renames_and_moves_that_exclude_each_other_stay() {
    let to: [Run; 2] =
        [|p| p.rename(&path("top"), &path("x")), |p| p.rename(&path("top"), &path("y"))];
    let merged = run(to[0], to[1], &rules());
    assert_eq!(merged.beside, ["top~try"]);
    assert!(read(&merged.state, "x").is_some() && read(&merged.state, "top~try").is_some());
    let into: [Run; 2] =
        [|p| p.rename(&path("a"), &path("b/a")), |p| p.rename(&path("b"), &path("a/b"))];
    let merged = run(into[0], into[1], &rules());
    assert!(read(&merged.state, "b/a/f").is_some());
    assert!(!merged.beside.is_empty());
}

/// Our head adds a file in a directory, which the other head replaces by a directory in which our
/// head also changed a file.
#[test]
fn a_directory_that_was_moved_onto_a_conflicting_name_stays() {
    let world = World::new();
    let ops = [vec![(5, 0, 7, 8)], vec![(5, 0, 10, 0), (3, 13, 0, 0)], vec![(6, 22, 31, 3)]];
    let (base, ours, theirs) = three(&world, &ops);
    nothing_is_lost(&world, [&base, &ours, &theirs]).unwrap();
    let merged = merge(&world, (&base, &ours, &theirs), &rules());
    assert_eq!(merged.beside, ["b/l1~try"]);
    assert_eq!(read(&merged.state, "a/s/g").unwrap(), "\0\0");
    assert!(read(&merged.state, "b/l1~try/s/g").is_some());
    assert!(merged.state.resolve(&path("b/l1/n1")).unwrap().ino().is_some());
}

#[test]
fn an_edited_file_of_which_each_side_removed_another_name_stays() {
    let ours: Run = |p| {
        p.write(&path("l1"), b"ours\n", false);
        p.remove(&path("b/l2"));
    };
    let theirs: Run = |p| {
        p.write(&path("l1"), b"theirs\n", false);
        p.remove(&path("l1"));
    };
    let merged = run(ours, theirs, &rules());
    assert_eq!((merged.marked, merged.beside), (vec!["l1".to_owned()], vec!["l1~try".to_owned()]));
    let text = read(&merged.state, "l1").unwrap();
    assert!(text.contains("\nours\n=======\n"), "{text}");
    assert_eq!(read(&merged.state, "l1~try").unwrap(), "theirs\n");
    assert_eq!(read(&merged.state, "b/l2"), None);
}

#[test]
fn a_file_that_took_the_name_of_a_conflicting_one_stays() {
    let ours: Run = |p| p.write(&path("n"), b"\0ours\n", false);
    let theirs: Run = |p| {
        p.write(&path("l1"), b"edited\n", true);
        p.link(&path("b/l2"), &path("n"));
    };
    let merged = run(ours, theirs, &rules());
    assert_eq!(merged.beside, ["n~try"]);
    assert_eq!(read(&merged.state, "n").unwrap(), "\0ours\n");
    assert_eq!(read(&merged.state, "l1").unwrap(), "edited\n");
    assert_eq!(read(&merged.state, "n~try"), read(&merged.state, "b/l2"));
}

/// Both heads renamed `k`, ours onto a file that the other head edited.
#[test]
fn an_edited_file_that_a_conflicting_rename_replaced_stays() {
    let ours: Run = |p| {
        p.remove(&path("a/f"));
        p.rename(&path("k"), &path("a/f"));
    };
    let theirs: Run = |p| {
        p.rename(&path("k"), &path("s"));
        p.write(&path("a/f"), b"edited\n", false);
    };
    let merged = run(ours, theirs, &rules());
    assert_eq!(merged.beside, ["a/f~try", "k~try"]);
    assert_eq!(read(&merged.state, "a/f~try").unwrap(), "edited\n");
}

#[test]
fn a_new_node_at_another_name_of_a_chosen_file_stays() {
    let rules = Rules { ours: vec![path("l1")], ..rules() };
    let merged = run(
        |p| p.write(&path("l1"), b"ours\n", false),
        |p| {
            p.remove(&path("l1"));
            p.remove(&path("b/l2"));
            p.mkdir(&path("b/l2"));
            p.write(&path("b/l2/new"), b"new\n", false);
        },
        &rules,
    );
    assert_eq!(read(&merged.state, "b/l2").as_deref(), Some("ours\n"));
    assert_eq!(read(&merged.state, "b/l2~try/new").as_deref(), Some("new\n"));
    assert_eq!(merged.beside, ["b/l2~try"]);
    let merged = run(
        |p| p.write(&path("l1"), b"ours\n", false),
        |p| {
            p.remove(&path("l1"));
            p.remove(&path("b/l2"));
            p.symlink(&path("b/l2"), "a/f");
        },
        &rules,
    );
    assert_eq!(read(&merged.state, "b/l2").as_deref(), Some("ours\n"));
    assert_eq!(merged.beside, ["b/l2~try"]);
}

#[test]
fn a_unit_of_each_side_stays() {
    let git: [Run; 2] = [
        |p| {
            p.mkdir(&path(".git"));
            p.write(&path(".git/a"), b"ours\n", false);
        },
        |p| {
            p.mkdir(&path(".git"));
            p.write(&path(".git/a"), b"theirs\n", false);
        },
    ];
    let merged = run(git[0], git[1], &rules());
    assert_eq!(merged.beside, [".git~try"]);
    assert_eq!(read(&merged.state, ".git/a").unwrap(), "ours\n");
    assert_eq!(read(&merged.state, ".git~try/a").unwrap(), "theirs\n");
    let units = vec![Glob::parse(b"app.db*").unwrap()];
    let files: [Run; 2] = [
        |p| p.write(&path("app.db"), b"ours\n", false),
        |p| {
            p.write(&path("app.db"), b"theirs\n", false);
            p.write(&path("app.db-wal"), b"theirs\n", false);
        },
    ];
    let merged = run(files[0], files[1], &Rules { units, ..rules() });
    assert_eq!(merged.beside, ["app.db-wal~try", "app.db~try"]);
    assert_eq!(read(&merged.state, "app.db-wal"), None);
}

#[test]
fn a_text_gets_markers_and_a_taken_name_is_not_overwritten() {
    let ours: Run = |p| {
        p.write(&path("top"), b"ours\n", false);
        p.write(&path("n"), b"\0ours\n", false);
        p.write(&path("n~try"), b"mine\n", false);
    };
    let theirs: Run = |p| {
        p.write(&path("top"), b"theirs\n", false);
        p.write(&path("n"), b"\0theirs\n", false);
    };
    let merged = run(ours, theirs, &rules());
    assert_eq!(merged.marked, ["top"]);
    assert_eq!(merged.beside, ["n~try_0"]);
    assert_eq!(read(&merged.state, "n~try").unwrap(), "mine\n");
    assert_eq!(read(&merged.state, "n~try_0").unwrap(), "\0theirs\n");
}

#[test]
fn a_name_that_is_too_long_with_the_suffix_is_cut() {
    let long = "ä".repeat(127);
    let world = World::new();
    let begin = world.head(&crate::tree::Tree::new());
    let heads = [world.head(&begin.state().tree), world.head(&begin.state().tree)];
    for (head, text) in heads.iter().zip([b"\0ours", b"\0them"]) {
        Program(head).write(&TreePath::root().join(&name(&long)), text, false);
    }
    let states = (&begin.state(), &heads[0].state(), &heads[1].state());
    let merged = merge(&world, states, &rules());
    assert_eq!(merged.beside, [format!("{}~try", "ä".repeat(125))]);
}

/// The lines of all files that no file of the merge base has.
fn new_lines(base: &Snap, snap: &Snap) -> BTreeSet<Vec<u8>> {
    let old = lines(base);
    lines(snap).into_iter().filter(|line| !old.contains(line)).collect()
}

fn lines(snap: &Snap) -> BTreeSet<Vec<u8>> {
    let files = snap.nodes.values().filter(|thing| thing.kind == FileKind::File);
    files.flat_map(|thing| thing.data.split(|b| *b == b'\n').map(<[u8]>::to_vec)).collect()
}

/// Checks a merge with markers of three trees.
fn nothing_is_lost(world: &World, [base, ours, theirs]: [&State; 3]) -> Result<(), TestCaseError> {
    let merged = merge(world, (base, ours, theirs), &rules());
    let snaps = [base, ours, theirs].map(Snap::of);
    let shown = Snap::of(&merged.state);
    let expected = model::merge(&snaps[0], &snaps[1], &snaps[2]);
    if let Some(expected) = expected {
        prop_assert_eq!(shown.paths(), expected.paths());
        prop_assert_eq!(merged.beside.len() + merged.marked.len(), 0);
        return Ok(());
    }
    prop_assert!(!merged.beside.is_empty() || !merged.marked.is_empty());
    let there = lines(&shown);
    for side in &snaps[1..] {
        for line in new_lines(&snaps[0], side) {
            prop_assert!(there.contains(&line), "{:?}", String::from_utf8_lossy(&line));
        }
    }
    Ok(())
}

#[test]
fn nothing_that_either_side_wrote_is_lost() {
    check(nothing_is_lost);
}
