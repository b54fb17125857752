//! One test for each rule.

use super::{Program, World, path};
use crate::fs::{Fs, State};
use crate::timeline::merge::conflict::Did;
use crate::timeline::merge::{Conflict, Glob, Rules};
use crate::tree::Tree;
use crate::types::FileKind;

/// Merges what two programs do.
fn merge(
    before: impl Fn(&Program<'_>),
    ours: impl Fn(&Program<'_>),
    theirs: impl Fn(&Program<'_>),
    rules: &Rules,
) -> (World, Result<State, Vec<Conflict>>) {
    let world = World::new();
    let base = world.head(&Tree::new());
    before(&Program(&base));
    let head = |run: &dyn Fn(&Program<'_>)| -> Fs {
        let fs = world.head(&base.state().tree);
        run(&Program(&fs));
        fs
    };
    let (ours, theirs) = (head(&ours), head(&theirs));
    let lower = base.state().lower;
    let with = |fs: &Fs| State { tree: fs.state().tree, lower: lower.clone() };
    let merged = world.merge((&with(&base), &with(&ours), &with(&theirs)), rules);
    (world, merged)
}

fn nothing(_: &Program<'_>) {}

fn read(state: &State, at: &str) -> Option<String> {
    let found = state.resolve(&path(at)).unwrap();
    found.ino()?;
    Some(String::from_utf8(state.read_all(&found).unwrap()).unwrap())
}

const TEXT: &str = "1\n2\n3\n4\n5\n6\n";

#[test]
fn a_rename_here_and_an_edit_there_merge() {
    for replace in [false, true] {
        let (_world, merged) = merge(
            nothing,
            |p| p.rename(&path("a/f"), &path("b/moved")),
            |p| p.write(&path("a/f"), b"edited\n", replace),
            &Rules::default(),
        );
        let merged = merged.unwrap();
        assert_eq!(read(&merged, "b/moved").as_deref(), Some("edited\n"));
        assert_eq!(read(&merged, "a/f"), None);
    }
}

#[test]
fn a_renamed_directory_takes_the_changes_inside_along() {
    let (_world, merged) = merge(
        nothing,
        |p| p.rename(&path("a"), &path("z")),
        |p| {
            p.write(&path("a/s/new"), b"new\n", false);
            p.write(&path("a/f"), b"edited\n", false);
            p.remove(&path("a/s/g"));
        },
        &Rules::default(),
    );
    let merged = merged.unwrap();
    assert_eq!(read(&merged, "z/s/new").as_deref(), Some("new\n"));
    assert_eq!(read(&merged, "z/f").as_deref(), Some("edited\n"));
    assert_eq!((read(&merged, "z/s/g"), read(&merged, "a/f")), (None, None));
}

#[test]
fn lines_merge_and_touching_lines_conflict() {
    let edit = |line: &'static str| {
        move |p: &Program<'_>| {
            let text = TEXT.replace(&format!("{line}\n"), &format!("{line} edited\n"));
            p.write(&path("a/f"), text.as_bytes(), false);
        }
    };
    let (_world, merged) = merge(nothing, edit("1"), edit("5"), &Rules::default());
    let text = read(&merged.unwrap(), "a/f");
    assert_eq!(text.as_deref(), Some("1 edited\n2\n3\n4\n5 edited\n6\n"));
    let (_world, merged) = merge(nothing, edit("1"), edit("2"), &Rules::default());
    let conflicts = merged.err().unwrap();
    let paths: Vec<_> = conflicts.iter().map(|c| c.path.clone()).collect();
    assert_eq!(paths, [path("a/f")]);
    assert!(matches!(&conflicts[0].ours, Did::Changed(diff) if diff.content));
    let markers = Some(("main".to_owned(), "try".to_owned()));
    let (_world, merged) =
        merge(nothing, edit("1"), edit("2"), &Rules { markers, ..Rules::default() });
    let text = read(&merged.unwrap(), "a/f").unwrap();
    assert!(text.starts_with("<<<<<<< main\n1 edited\n2\n=======\n1\n2 edited\n>>>>>>> try\n3\n"));
}

#[test]
fn each_head_can_be_chosen_for_a_path() {
    let ours = |p: &Program<'_>| p.write(&path("a/f"), b"ours\n", false);
    let theirs = |p: &Program<'_>| p.remove(&path("a"));
    for (rules, text) in [
        (Rules { ours: vec![path("a")], ..Rules::default() }, Some("ours\n")),
        (Rules { theirs: vec![path("a")], ..Rules::default() }, None),
    ] {
        let (_world, merged) = merge(nothing, ours, theirs, &rules);
        let merged = merged.unwrap();
        assert_eq!(read(&merged, "a/f").as_deref(), text);
        assert_eq!(read(&merged, "a/s/g"), None, "the removal does not conflict");
    }
    let (_world, merged) = merge(nothing, ours, theirs, &Rules::default());
    let conflicts = merged.err().unwrap();
    assert_eq!(conflicts[0].path, path("a/f"));
    assert_eq!(conflicts[0].theirs, Did::Removed);
}

/// The changes of either head at other paths do not matter.
#[test]
fn paths_that_are_not_merged_do_not_conflict() {
    type Run = fn(&Program<'_>);
    let edit: Run = |p| p.write(&path("a/f"), b"edited\n", false);
    let others: [Run; 5] = [
        |p| p.remove(&path("a/f")),
        |p| p.rename(&path("a/f"), &path("b/moved")),
        |p| p.rename(&path("a/f"), &path("a/s/moved")),
        |p| p.remove(&path("a")),
        |p| p.chmod(&path("a/f"), 0o600),
    ];
    for other in others {
        for (ours, theirs) in [(edit, other), (other, edit), (other, others[1])] {
            let rules = Rules { paths: vec![path("top")], ..Rules::default() };
            let with_top = |p: &Program<'_>| {
                p.write(&path("top"), b"top\n", false);
                theirs(p);
            };
            let (_world, merged) = merge(nothing, ours, with_top, &rules);
            let merged = merged.unwrap();
            assert_eq!(read(&merged, "top").as_deref(), Some("top\n"));
            let (_world, alone) = merge(nothing, ours, nothing, &Rules::default());
            let alone = alone.unwrap();
            for at in ["a/f", "b/moved", "a/s/moved", "a/s/g"] {
                assert_eq!(read(&merged, at), read(&alone, at), "{at}");
            }
        }
    }
}

/// `l1` and `b/l2` are names of one file.
#[test]
fn an_edited_file_of_which_each_head_removed_another_name_conflicts() {
    let edit = |p: &Program<'_>, text: &str| p.write(&path("l1"), text.as_bytes(), false);
    type Edits = [Option<&'static str>; 2];
    let cases: [(Edits, &[&str]); 4] = [
        ([None, None], &[]),
        ([Some("ours\n"), None], &["l1"]),
        ([None, Some("theirs\n")], &["b/l2"]),
        ([Some("ours\n"), Some("theirs\n")], &["b/l2", "l1"]),
    ];
    for (edits, expected) in cases {
        let run = |rules: &Rules| {
            merge(
                nothing,
                |p| {
                    edits[0].iter().for_each(|text| edit(p, text));
                    p.remove(&path("b/l2"));
                },
                |p| {
                    edits[1].iter().for_each(|text| edit(p, text));
                    p.remove(&path("l1"));
                },
                rules,
            )
        };
        let (_world, merged) = run(&Rules::default());
        let Err(conflicts) = merged else {
            let merged = merged.unwrap();
            assert_eq!(expected, &[] as &[&str]);
            assert_eq!((read(&merged, "l1"), read(&merged, "b/l2")), (None, None));
            continue;
        };
        let paths: Vec<String> = conflicts.iter().map(|c| c.path.to_string()).collect();
        assert_eq!(paths, expected);
        for conflict in conflicts {
            let (editor, remover) = match conflict.path == path("l1") {
                true => (conflict.ours, conflict.theirs),
                false => (conflict.theirs, conflict.ours),
            };
            assert!(matches!(editor, Did::Changed(diff) if diff.content));
            assert_eq!(remover, Did::Removed);
        }
        // A choice for any of its names decides for the file.
        for name in ["l1", "b/l2"] {
            let (_world, merged) = run(&Rules { ours: vec![path(name)], ..Rules::default() });
            let merged = merged.unwrap();
            let text = edits[0].or(edits[1]);
            assert_eq!((read(&merged, "l1").as_deref(), read(&merged, "b/l2")), (text, None));
        }
    }
}

/// `l1` and `b/l2` are names of one file.
#[test]
fn a_choice_for_one_name_decides_for_the_file() {
    let edit =
        |text: &'static str| move |p: &Program<'_>| p.write(&path("l1"), text.as_bytes(), false);
    let both = |state: &State| [read(state, "l1"), read(state, "b/l2")].map(Option::unwrap);
    for name in ["l1", "b/l2", "b"] {
        let rules = Rules { theirs: vec![path(name)], ..Rules::default() };
        let (_world, merged) = merge(nothing, edit("ours\n"), edit("theirs\n"), &rules);
        assert_eq!(both(&merged.unwrap()), ["theirs\n", "theirs\n"]);
    }
    // The caller wrote the name, and 'b' stands for whatever is in it.
    let rules = Rules { theirs: vec![path("l1")], ours: vec![path("b")], ..Rules::default() };
    let (_world, merged) = merge(nothing, edit("ours\n"), edit("theirs\n"), &rules);
    assert_eq!(both(&merged.unwrap()), ["theirs\n", "theirs\n"]);
    let rules = Rules { theirs: vec![path("l1")], ours: vec![path("b/l2")], ..Rules::default() };
    let (_world, merged) = merge(nothing, edit("ours\n"), edit("theirs\n"), &rules);
    assert_eq!(merged.err().unwrap().len(), 1, "the choices contradict each other");
    // A file that one head removed gets all its names back.
    let remove = |p: &Program<'_>| {
        p.remove(&path("l1"));
        p.remove(&path("b/l2"));
    };
    let rules = Rules { theirs: vec![path("l1")], ..Rules::default() };
    let (_world, merged) = merge(nothing, remove, edit("theirs\n"), &rules);
    assert_eq!(both(&merged.unwrap()), ["theirs\n", "theirs\n"]);
}

/// `l1` and `b/l2` are names of one file.
#[test]
fn a_choice_for_a_name_leaves_other_names_of_the_displaced_file() {
    let ours = |p: &Program<'_>| p.write(&path("n"), b"ours\n", false);
    let theirs = |p: &Program<'_>| {
        p.write(&path("l1"), b"new\n", true);
        p.link(&path("b/l2"), &path("n"));
    };
    let rules = Rules { ours: vec![path("n")], ..Rules::default() };
    let (_world, merged) = merge(nothing, ours, theirs, &rules);
    let merged = merged.unwrap();
    assert_eq!(read(&merged, "n").as_deref(), Some("ours\n"));
    assert_eq!(read(&merged, "l1").as_deref(), Some("new\n"));
    assert_eq!(read(&merged, "b/l2").as_deref(), Some(TEXT));
}

/// `l1` and `b/l2` are names of one file, which one head edits. The other head removes it, and
/// makes something else at a name that the caller did not write down.
#[test]
fn a_choice_for_a_file_does_not_drop_new_nodes_at_its_other_names() {
    let edit = |p: &Program<'_>| p.write(&path("l1"), b"edited\n", false);
    let make_dir = |p: &Program<'_>| {
        p.remove(&path("l1"));
        p.remove(&path("b/l2"));
        p.mkdir(&path("b/l2"));
        p.write(&path("b/l2/new"), b"new\n", false);
    };
    let make_link = |p: &Program<'_>| {
        p.remove(&path("l1"));
        p.remove(&path("b/l2"));
        p.symlink(&path("b/l2"), "a/f");
    };
    type Run<'a> = &'a dyn Fn(&Program<'_>);
    for make in [&make_dir as Run<'_>, &make_link] {
        for theirs in [false, true] {
            let choose = |wanted: &[&str]| {
                let paths = wanted.iter().map(|wanted| path(wanted)).collect();
                match theirs {
                    true => Rules { theirs: paths, ..Rules::default() },
                    false => Rules { ours: paths, ..Rules::default() },
                }
            };
            let run = |rules: &Rules| match theirs {
                true => merge(nothing, make, edit, rules),
                false => merge(nothing, edit, make, rules),
            };
            let conflicts = run(&choose(&["l1"])).1.err().expect("a conflict");
            let at: Vec<String> = conflicts.iter().map(|one| one.path.to_string()).collect();
            assert_eq!(at, ["b/l2"], "{conflicts:?}");
            for wanted in [&["l1", "b/l2"][..], &["b/l2"], &["l1", "b"], &[""]] {
                let (_world, merged) = run(&choose(wanted));
                let merged = merged.expect("decided");
                assert_eq!(read(&merged, "l1").as_deref(), Some("edited\n"), "{wanted:?}");
                assert_eq!(read(&merged, "b/l2").as_deref(), Some("edited\n"), "{wanted:?}");
            }
        }
    }
}

#[test]
fn a_choice_for_a_renamed_file_does_not_decide_about_an_edit_of_another_one() {
    let ours = |p: &Program<'_>| {
        p.remove(&path("a/f"));
        p.rename(&path("k"), &path("a/f"));
    };
    let theirs = |p: &Program<'_>| {
        p.rename(&path("k"), &path("s"));
        p.write(&path("a/f"), b"edited\n", false);
    };
    let rules = |ours: &[&str]| Rules {
        ours: ours.iter().map(|at| path(at)).collect(),
        ..Rules::default()
    };
    let (_world, merged) = merge(nothing, ours, theirs, &rules(&["k"]));
    let conflicts = merged.err().unwrap();
    assert_eq!((conflicts.len(), &conflicts[0].path), (1, &path("a/f")));
    let (_world, merged) = merge(nothing, ours, theirs, &rules(&["k", "a/f"]));
    assert!(merged.unwrap().resolve(&path("s")).unwrap().ino().is_none());
}

#[test]
fn equal_additions_do_not_conflict_and_others_do() {
    let add = |text: &'static str| {
        move |p: &Program<'_>| {
            p.mkdir(&path("new"));
            p.write(&path("new/x"), text.as_bytes(), false);
        }
    };
    let also = |p: &Program<'_>| {
        add("same\n")(p);
        p.write(&path("new/y"), b"y\n", false);
    };
    let (_world, merged) = merge(nothing, add("same\n"), also, &Rules::default());
    let merged = merged.unwrap();
    assert_eq!(read(&merged, "new/y").as_deref(), Some("y\n"));
    let (_world, merged) = merge(nothing, add("one\n"), add("two\n"), &Rules::default());
    let conflicts = merged.err().unwrap();
    assert_eq!(conflicts[0].path, path("new/x"));
    assert_eq!(conflicts[0].ours, Did::Added(FileKind::File));
}

#[test]
fn structure_conflicts() {
    type Run = fn(&Program<'_>);
    let cases: [(&str, Run, Run); 7] = [
        ("top", |p| p.remove(&path("top")), |p| p.write(&path("top"), b"x\n", false)),
        ("top", |p| p.rename(&path("top"), &path("x")), |p| p.rename(&path("top"), &path("y"))),
        ("top", |p| p.rename(&path("top"), &path("x")), |p| p.remove(&path("top"))),
        ("n", |p| p.mkdir(&path("n")), |p| p.write(&path("n"), b"n\n", false)),
        ("b", |p| p.rename(&path("top"), &path("b/x")), |p| p.remove(&path("b"))),
        ("a", |p| p.rename(&path("a"), &path("b/a")), |p| p.rename(&path("b"), &path("a/b"))),
        ("top", |p| p.chmod(&path("top"), 0o600), |p| p.chmod(&path("top"), 0o640)),
    ];
    for (number, (at, ours, theirs)) in cases.into_iter().enumerate() {
        for (ours, theirs) in [(ours, theirs), (theirs, ours)] {
            let (_world, merged) = merge(nothing, ours, theirs, &Rules::default());
            let conflicts = merged.err().unwrap_or_else(|| panic!("case {number}"));
            let paths: Vec<String> = conflicts.iter().map(|c| c.path.to_string()).collect();
            assert!(paths.iter().any(|path| path.ends_with(at)), "case {number}: {paths:?}");
        }
    }
}

#[test]
fn attributes_merge_apart() {
    let (_world, merged) = merge(
        nothing,
        |p| {
            p.chmod(&path("top"), 0o600);
            p.xattr(&path("top"), "user.a", "1");
        },
        |p| {
            p.write(&path("top"), b"edited\n", false);
            p.xattr(&path("top"), "user.b", "2");
        },
        &Rules::default(),
    );
    let merged = merged.unwrap();
    assert_eq!(read(&merged, "top").as_deref(), Some("edited\n"));
    let node = merged.node(&merged.resolve(&path("top")).unwrap()).unwrap();
    assert_eq!(node.meta.mode & 0o777, 0o600);
    assert_eq!(node.xattrs.as_ref().unwrap().len(), 2);
}

#[test]
fn a_unit_is_taken_as_a_whole() {
    let git = |text: &'static str, file: &'static str| {
        move |p: &Program<'_>| p.write(&path(file), text.as_bytes(), false)
    };
    let before = |p: &Program<'_>| {
        p.mkdir(&path(".git"));
        p.write(&path(".git/a"), TEXT.as_bytes(), false);
        p.write(&path(".git/b"), TEXT.as_bytes(), false);
    };
    let (ours, theirs) = (git("x\n", ".git/a"), git("y\n", ".git/b"));
    let (_world, merged) = merge(before, ours, theirs, &Rules::default());
    let conflicts = merged.err().unwrap();
    assert_eq!(conflicts.len(), 1);
    assert_eq!(conflicts[0].path, path(".git"));
    let rules = Rules { theirs: vec![path(".git")], ..Rules::default() };
    let (_world, merged) = merge(before, ours, theirs, &rules);
    let merged = merged.unwrap();
    assert_eq!(read(&merged, ".git/a").as_deref(), Some(TEXT));
    assert_eq!(read(&merged, ".git/b").as_deref(), Some("y\n"));
    let (_world, merged) = merge(before, nothing, theirs, &Rules::default());
    assert_eq!(read(&merged.unwrap(), ".git/b").as_deref(), Some("y\n"));
    let units = vec![Glob::parse(b"app.db*").unwrap()];
    let (_world, merged) = merge(
        nothing,
        git("x\n", "app.db"),
        git("y\n", "app.db-wal"),
        &Rules { units, ..Rules::default() },
    );
    assert_eq!(merged.err().unwrap()[0].path, path("app.db"));
}

#[test]
fn only_the_given_paths_are_merged() {
    let theirs = |p: &Program<'_>| {
        p.mkdir(&path("new"));
        p.write(&path("new/x"), b"x\n", false);
        p.write(&path("new/y"), b"y\n", false);
        p.write(&path("a/f"), b"edited\n", false);
        p.remove(&path("top"));
    };
    let ours = |p: &Program<'_>| p.write(&path("top"), b"edited\n", false);
    let rules = Rules { paths: vec![path("new/x"), path("a")], ..Rules::default() };
    let (_world, merged) = merge(nothing, ours, theirs, &rules);
    let merged = merged.unwrap();
    assert_eq!(read(&merged, "new/x").as_deref(), Some("x\n"));
    assert_eq!(read(&merged, "new/y"), None);
    assert_eq!(read(&merged, "a/f").as_deref(), Some("edited\n"));
    assert_eq!(read(&merged, "top").as_deref(), Some("edited\n"));
}

#[test]
fn content_of_the_other_head_is_not_copied() {
    let (_world, merged) = merge(
        nothing,
        |p| p.write(&path("b/h"), b"ours\n", false),
        |p| p.write(&path("top"), &[b'x'; 100_000], false),
        &Rules::default(),
    );
    let merged = merged.unwrap();
    let ino = merged.resolve(&path("top")).unwrap().ino().unwrap();
    let layers: Vec<_> = merged.tree.extents(ino).map(|(_, extent)| extent.source).collect();
    let theirs = merged.tree.node(ino).unwrap();
    assert_eq!(theirs.size(), 100_000);
    assert!(
        layers.iter().all(|source| matches!(
        source, crate::tree::Source::Pool { layer, .. } if layer.0 == 3)),
        "{layers:?}"
    );
}
