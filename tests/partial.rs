//! Restores of single files and directories, without a mount: named paths are as they were, all
//! others stay.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeMap;
use std::fs as host;
use std::path::Path;
use std::sync::Arc;

use jailfs::internals::fs::{Caller, Fs, RenameMode, SetAttr, SetXattr};
use jailfs::sandbox::{Reply, Request, Restored, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{FileKind, Name, NodeId, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };

struct Place {
    dir: tempfile::TempDir,
    sandbox: Option<Arc<Sandbox>>,
}

impl Place {
    /// A sandbox over a base with files, directories and links.
    fn new() -> Place {
        Place::over(|_| ())
    }

    /// The same over a base with more in it.
    fn over(more: impl FnOnce(&Path)) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        for path in ["d/e", "src/deep", "empty"] {
            host::create_dir_all(base.join(path)).unwrap();
        }
        for path in ["a", "b", "d/f", "d/g", "d/e/h", "src/x", "src/deep/y"] {
            host::write(base.join(path), format!("{path} of the base\n")).unwrap();
        }
        host::hard_link(base.join("a"), base.join("src/a-too")).unwrap();
        std::os::unix::fs::symlink("x", base.join("src/link")).unwrap();
        more(&base);
        let mut place = Place { dir, sandbox: None };
        place.reopen();
        place
    }

    fn reopen(&mut self) {
        self.sandbox = None;
        let (base, store) = (self.dir.path().join("base"), self.dir.path().join("store"));
        self.sandbox =
            Some(Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap());
    }

    fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().unwrap()
    }

    fn fs(&self) -> &Fs {
        self.sandbox().fs()
    }

    fn find(&self, path: &str) -> Option<NodeId> {
        path.split('/').filter(|part| !part.is_empty()).try_fold(NodeId::ROOT, |dir, part| {
            self.fs().lookup(dir, &name(part)).ok().map(|entry| entry.id)
        })
    }

    fn id(&self, path: &str) -> NodeId {
        self.find(path).unwrap_or_else(|| panic!("there is no {path}"))
    }

    fn dir_of<'p>(&self, path: &'p str) -> (NodeId, &'p str) {
        let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
        (self.id(dir), last)
    }

    fn put(&self, path: &str, text: &str) {
        let (dir, last) = self.dir_of(path);
        let file = self
            .find(path)
            .unwrap_or_else(|| self.fs().mknod(dir, &name(last), 0o100_644, 0, 0, ME).unwrap().id);
        self.fs().truncate(file, 0, false).unwrap();
        self.fs().write(file, 0, text.as_bytes(), false).unwrap();
    }

    fn get(&self, path: &str) -> String {
        let bytes =
            self.fs().read(self.id(path), 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
        String::from_utf8(bytes).unwrap()
    }

    fn ino(&self, path: &str) -> u64 {
        self.fs().getattr(self.id(path)).unwrap().ino.0
    }

    fn links(&self, path: &str) -> u32 {
        self.fs().getattr(self.id(path)).unwrap().meta.nlink
    }

    fn rename(&self, from: &str, to: &str) {
        let ((a, from), (b, to)) = (self.dir_of(from), self.dir_of(to));
        self.fs().rename(a, &name(from), b, &name(to), RenameMode::Replace, 0).unwrap();
    }

    fn rm(&self, path: &str) {
        let (dir, last) = self.dir_of(path);
        self.fs().unlink(dir, &name(last)).unwrap();
    }

    fn rm_tree(&self, path: &str) {
        let id = self.id(path);
        for child in self.fs().names(id).unwrap() {
            let path = format!("{path}/{child}");
            match self.fs().getattr(self.id(&path)).unwrap().kind {
                FileKind::Dir => self.rm_tree(&path),
                _ => self.rm(&path),
            }
        }
        let (dir, last) = self.dir_of(path);
        self.fs().rmdir(dir, &name(last)).unwrap();
    }

    fn checkpoint(&self, name: &str) {
        let name = Some(name.to_owned());
        self.sandbox().handle(Request::Checkpoint { name, message: String::new() }).unwrap();
    }

    fn ask(&self, to: &str, paths: &[&str], dry_run: bool) -> jailfs::error::Result<Restored> {
        let paths = paths.iter().map(|path| TreePath::parse(path.as_bytes()).unwrap()).collect();
        match self.sandbox().handle(Request::Restore {
            detach_mounts: false,
            to: Rev::parse(to),
            paths,
            dry_run,
        })? {
            Reply::Restored(restored) => Ok(restored),
            other => panic!("{other:?}"),
        }
    }

    fn restore(&self, to: &str, paths: &[&str]) -> Vec<String> {
        let restored = self.ask(to, paths, false).unwrap();
        self.fs().state().tree.verify().unwrap();
        restored
            .changes
            .to_vec()
            .unwrap()
            .iter()
            .map(|change| format!("{:?} {}", change.kind, change.path))
            .collect()
    }

    fn operations(&self) -> Vec<jailfs::sandbox::Operation> {
        match self.sandbox().handle(Request::OpLog).unwrap() {
            Reply::OpLog(log) => log,
            other => panic!("{other:?}"),
        }
    }

    /// Everything visible of each node, by path. In directories above restored paths, the names,
    /// times and links may differ: `mask`.
    fn picture(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        self.look("", &mut all);
        all
    }

    fn look(&self, path: &str, all: &mut BTreeMap<String, String>) {
        let id = self.id(path);
        let attr = self.fs().getattr(id).unwrap();
        let mut xattrs = Vec::new();
        for name in self.fs().listxattr(id).unwrap().split(|b| *b == 0).filter(|n| !n.is_empty()) {
            xattrs.push((name.to_vec(), self.fs().getxattr(id, name).unwrap()));
        }
        let content = match attr.kind {
            FileKind::File => self.get(path),
            FileKind::Symlink => String::from_utf8(self.fs().link_text(id).unwrap()).unwrap(),
            _ => String::new(),
        };
        let meta = attr.meta;
        let seen = format!(
            "{:o} {} {} {:?} {xattrs:?} {content:?}",
            meta.mode, meta.uid, meta.gid, meta.mtime
        );
        all.insert(path.to_owned(), seen);
        if attr.kind == FileKind::Dir {
            for child in self.fs().names(id).unwrap() {
                self.look(
                    &if path.is_empty() { child.to_string() } else { format!("{path}/{child}") },
                    all,
                );
            }
        }
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn is_below(path: &str, of: &str) -> bool {
    path == of || path.starts_with(&format!("{of}/"))
}

/// Every file counts as often as it has names.
fn check_links(place: &Place, when: &str) {
    let mut seen: BTreeMap<u64, (u32, Vec<String>)> = BTreeMap::new();
    for path in place.picture().into_keys() {
        let attr = place.fs().getattr(place.id(&path)).unwrap();
        if attr.kind == FileKind::Dir {
            let is_subdir = |name: &Name| {
                let child = place.fs().lookup(place.id(&path), name).unwrap();
                child.attr.kind == FileKind::Dir
            };
            let names = place.fs().names(place.id(&path)).unwrap();
            let subdirs = names.iter().filter(|name| is_subdir(name)).count();
            // A filesystem that does not count subdirectories shows 1.
            let links = attr.meta.nlink as usize;
            assert!(links == 1 || links == 2 + subdirs, "{when}: {path:?} has {links} links");
        } else {
            let counted = seen.entry(attr.ino.0).or_insert((attr.meta.nlink, Vec::new()));
            assert_eq!(counted.0, attr.meta.nlink, "{when}: {path}");
            counted.1.push(path);
        }
    }
    let state = place.fs().state();
    let mut copied_up = BTreeMap::new();
    for (ino, node) in state.tree.nodes() {
        if let jailfs::internals::tree::Body::Dir { base: Some(path) } = &node.body {
            let other = copied_up.insert(path.clone(), ino);
            assert_eq!(other, None, "{when}: two directories have '{path}'");
        }
    }
    for (links, names) in seen.values() {
        assert_eq!(*links as usize, names.len(), "{when}: {names:?}");
    }
}

/// Compares a tree with its expected content: at the paths as `then`, elsewhere as `before`.
fn check(
    now: &BTreeMap<String, String>,
    then: &BTreeMap<String, String>,
    before: &BTreeMap<String, String>,
    paths: &[&str],
) {
    let inside = |path: &String| paths.iter().any(|of| is_below(path, of));
    let leads = |path: &String| paths.iter().any(|of| path.is_empty() || is_below(of, path));
    for path in now.keys().chain(then.keys()).chain(before.keys()) {
        if inside(path) {
            assert_eq!(now.get(path), then.get(path), "{path} of {paths:?}");
        } else if !leads(path) {
            assert_eq!(now.get(path), before.get(path), "{path}, not in {paths:?}");
        } else {
            assert!(
                now.contains_key(path) || !before.contains_key(path),
                "{path} leads to one of {paths:?}"
            );
        }
    }
}

#[test]
fn a_restore_of_paths_leaves_the_rest_of_the_tree_alone() {
    let place = Place::new();
    place.put("d/f", "one\n");
    place.put("b", "one\n");
    place.checkpoint("one");
    let ino = place.ino("d/f");
    place.put("d/f", "two\n");
    place.put("d/new", "two\n");
    place.put("b", "two\n");
    place.rm("d/g");
    let changes = place.restore("one", &["d"]);
    assert_eq!(changes, ["Modified d/f", "Added d/g", "Deleted d/new"]);
    assert_eq!((place.get("d/f").as_str(), place.ino("d/f")), ("one\n", ino));
    assert_eq!((place.get("d/g"), place.get("b")), ("d/g of the base\n".into(), "two\n".into()));
    assert!(place.find("d/new").is_none());
    // A path that no longer exists, with the directories that lead to it.
    place.rm_tree("src");
    place.restore("one", &["src/deep/y"]);
    assert_eq!(place.fs().names(place.id("src")).unwrap(), [name("deep")]);
    assert_eq!(place.get("src/deep/y"), "src/deep/y of the base\n");
    // A path that the checkpoint does not have is removed.
    place.put("later", "x");
    assert_eq!(place.restore("one", &["later"]), ["Deleted later"]);
    assert!(place.find("later").is_none());
}

#[test]
fn a_restore_of_paths_can_be_undone_and_redone_by_op_restore() {
    let mut place = Place::new();
    place.put("d/f", "one\n");
    place.checkpoint("one");
    place.put("d/f", "two\n");
    place.put("b", "two\n");
    let before = place.picture();
    let restored = place.ask("one", &["d/f"], false).unwrap();
    let after = place.picture();
    assert_ne!(before, after);
    let log = place.operations();
    assert_eq!(
        (log[0].verb.as_str(), log[0].description.as_str()),
        ("restore", "'d/f' of checkpoint 1 'one'")
    );
    let seal = log.iter().find(|op| op.tree == restored.before).unwrap();
    let (redo, undo) = (log[0].op, seal.op);
    place.reopen();
    assert_eq!(place.picture(), after);
    for (op, wanted) in [(undo, &before), (redo, &after), (undo, &before)] {
        place.sandbox().handle(Request::OpRestore { detach_mounts: false, op }).unwrap();
        assert_eq!(&place.picture(), wanted, "operation {op}");
    }
}

#[test]
fn a_moved_file_stays_and_comes_back_as_another_file() {
    let place = Place::new();
    place.put("b", "one\n");
    place.checkpoint("one");
    let ino = place.ino("b");
    place.rename("b", "moved");
    place.rename("d", "dir");
    place.put("dir/f", "two\n");
    place.restore("one", &["b", "d"]);
    assert_eq!((place.ino("moved"), place.links("moved")), (ino, 1));
    assert_ne!(place.ino("b"), ino);
    place.put("b", "changed\n");
    assert_eq!(place.get("moved"), "one\n");
    assert_eq!(
        (place.get("dir/f").as_str(), place.get("d/f").as_str()),
        ("two\n", "d/f of the base\n")
    );
    place.put("d/e/h", "changed\n");
    assert_eq!(place.get("dir/e/h"), "d/e/h of the base\n");
}

#[test]
fn a_hard_link_outside_the_paths_is_cut_or_joined_and_never_changed() {
    let place = Place::new();
    assert_eq!(place.ino("a"), place.ino("src/a-too"));
    place.checkpoint("one");
    place.put("a", "both\n");
    place.restore("one", &["src"]);
    assert_eq!(
        (place.get("a").as_str(), place.get("src/a-too").as_str()),
        ("both\n", "a of the base\n")
    );
    assert_eq!((place.links("a"), place.links("src/a-too")), (1, 1));
    // Removed, and the other link is as it was: they are one file again.
    place.restore("one", &["a", "src/a-too"]);
    assert_eq!(place.ino("a"), place.ino("src/a-too"));
    place.checkpoint("two");
    place.rm("src/a-too");
    place.restore("two", &["src/a-too"]);
    assert_eq!((place.ino("a"), place.links("a")), (place.ino("src/a-too"), 2));
}

#[test]
fn a_restore_of_paths_that_fails_says_why_and_changes_nothing() {
    let place = Place::new();
    place.checkpoint("one");
    place.rm_tree("d");
    place.put("d", "a file now");
    let before = place.picture();
    let error = place.ask("one", &["nowhere"], false).unwrap_err();
    assert!(error.to_string().contains("neither the checkpoint nor the tree has it"), "{error}");
    let error = place.ask("one", &["d/f"], false).unwrap_err();
    assert!(error.to_string().to_lowercase().contains("not a directory"), "{error}");
    assert_eq!(place.picture(), before);
    let planned = place.ask("one", &["d"], true).unwrap();
    assert!(!planned.changes.is_empty());
    assert_eq!(place.picture(), before);
    place.restore("one", &["d"]);
    assert_eq!(place.get("d/e/h"), "d/e/h of the base\n");
}

#[test]
fn base_files_that_an_apply_changed_are_restored() {
    let mut place = Place::new();
    place.checkpoint("one");
    let then = place.picture();
    place.put("b", "two\n");
    place.put("src/deep/y", "two\n");
    place.put("a", "two\n");
    place.rm_tree("d");
    place
        .sandbox()
        .handle(Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: jailfs::sandbox::Consent::ALL,
        })
        .unwrap();
    let before = place.picture();
    place.restore("one", &["b", "src", "d"]);
    check(&place.picture(), &then, &before, &["b", "src", "d"]);
    place.reopen();
    check(&place.picture(), &then, &before, &["b", "src", "d"]);
    // And towards the newer one.
    place.checkpoint("two");
    let two = place.picture();
    place
        .sandbox()
        .handle(Request::Restore {
            detach_mounts: false,
            to: Rev::parse("one"),
            paths: Vec::new(),
            dry_run: false,
        })
        .unwrap();
    let before = place.picture();
    place.put("b", "three\n");
    place.restore("two", &["b", "a"]);
    check(&place.picture(), &two, &before, &["b", "a"]);
}

/// Directories of the base that are deeper than the one that was removed.
#[test]
fn a_removed_directory_is_restored_with_everything_below_it_as_it_was() {
    let base = |base: &Path| {
        host::create_dir_all(base.join("w/p/d/e")).unwrap();
        host::write(base.join("w/p/d/f"), "f of the base\n").unwrap();
        host::write(base.join("w/p/d/e/h"), "h of the base\n").unwrap();
        host::hard_link(base.join("w/p/d/f"), base.join("w/same")).unwrap();
    };
    let place = Place::over(base);
    place.checkpoint("one");
    let then = place.picture();
    place.rm_tree("w/p");
    place.restore("one", &["w"]);
    assert_eq!((place.links("w/same"), place.links("w/p/d/f")), (2, 2));
    check_links(&place, "two links");
    assert_eq!(place.picture(), then);

    // A file that is elsewhere now stays there with its content.
    let place = Place::over(base);
    place.checkpoint("one");
    let (then, number) = (place.picture(), place.ino("w/p/d/e/h"));
    place.rm("w/same");
    place.rename("w/p/d/f", "empty/f");
    place.rename("w/p/d/e/h", "empty/h");
    place.put("empty/f", "precious\n");
    place.rm_tree("w/p");
    let before = place.picture();
    place.restore("one", &["w"]);
    check_links(&place, "elsewhere");
    check(&place.picture(), &then, &before, &["w"]);
    // A restore of the whole tree gives the file its own number back.
    place.ask("one", &[], false).unwrap();
    assert_eq!(place.ino("w/p/d/e/h"), number);

    // A name that a later apply added goes.
    let place = Place::over(base);
    place.checkpoint("one");
    let then = place.picture();
    place.put("w/p/d/e/added", "later\n");
    let consent = jailfs::sandbox::Consent::ALL;
    let apply = Request::Apply { paths: Vec::new(), dry_run: false, undo: false, consent };
    place.sandbox().handle(apply).unwrap();
    place.rm_tree("w/p");
    let before = place.picture();
    place.restore("one", &["w"]);
    check(&place.picture(), &then, &before, &["w"]);
}

/// Numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len())].clone()
    }
}

fn some_change(place: &Place, dice: &mut Dice, step: usize) {
    let all: Vec<String> = place.picture().into_keys().filter(|path| !path.is_empty()).collect();
    let dirs: Vec<String> = place
        .picture()
        .into_keys()
        .filter(|path| place.fs().getattr(place.id(path)).unwrap().kind == FileKind::Dir)
        .collect();
    if all.len() < 4 {
        return place.put(&format!("more{step}"), "more\n");
    }
    let (path, dir) = (dice.pick(&all), dice.pick(&dirs));
    let kind = place.fs().getattr(place.id(&path)).unwrap().kind;
    let new = format!("{dir}/n{}", dice.roll(6));
    let new = new.trim_start_matches('/').to_owned();
    println!("{step}: {path} {new}");
    match dice.roll(8) {
        0 | 1 if kind == FileKind::File => place.put(&path, &format!("step {step}\n")),
        2 if kind == FileKind::Dir => place.rm_tree(&path),
        2 => place.rm(&path),
        3 | 4 if place.find(&new).is_none() && !is_below(&dir, &path) => place.rename(&path, &new),
        5 if kind != FileKind::Dir && place.find(&new).is_none() => {
            let (dir, last) = place.dir_of(&new);
            place.fs().link(place.id(&path), dir, &name(last)).unwrap();
        }
        6 => {
            let set = SetAttr { mode: Some(0o700 + dice.roll(64) as u32), ..SetAttr::default() };
            if kind != FileKind::Symlink {
                place.fs().setattr(place.id(&path), set, false).unwrap();
                place
                    .fs()
                    .setxattr(place.id(&path), b"user.step", b"x", SetXattr::default())
                    .unwrap();
            }
        }
        7 if place.find(&new).is_none() => {
            let (dir, last) = place.dir_of(&new);
            place.fs().mkdir(dir, &name(last), 0o755, 0, ME).unwrap();
            place.put(&format!("{new}/in"), "in a new directory\n");
        }
        _ if place.find(&new).is_none() => place.put(&new, &format!("new {step}\n")),
        _ => {}
    }
}

/// `JAILFS_PARTIAL_SEEDS` runs more histories than the default, `JAILFS_PARTIAL_FIRST` others.
#[test]
fn after_random_histories_a_restore_of_paths_is_exact_and_changes_nothing_else() {
    let seeds =
        std::env::var("JAILFS_PARTIAL_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    let first =
        std::env::var("JAILFS_PARTIAL_FIRST").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..first + seeds {
        let mut dice = Dice(seed);
        println!("seed {seed}");
        let mut place = Place::over(|base| {
            host::create_dir_all(base.join("src/deep/er/still")).unwrap();
            host::write(base.join("src/deep/er/still/z"), "z of the base\n").unwrap();
            host::hard_link(base.join("src/deep/er/still/z"), base.join("d/z-too")).unwrap();
            host::hard_link(base.join("d/e/h"), base.join("d/h-too")).unwrap();
        });
        let mut known: Vec<(String, BTreeMap<String, String>)> = Vec::new();
        for step in 0..40 {
            some_change(&place, &mut dice, step);
            check_links(&place, &format!("seed {seed}, change {step}"));
            if dice.roll(6) == 0 {
                let name = format!("c{step}");
                place.checkpoint(&name);
                known.push((name, place.picture()));
            }
            if dice.roll(12) == 0 {
                println!("apply at {step}");
                place
                    .sandbox()
                    .handle(Request::Apply {
                        paths: Vec::new(),
                        dry_run: false,
                        undo: false,
                        consent: jailfs::sandbox::Consent::ALL,
                    })
                    .unwrap();
                check_links(&place, &format!("seed {seed}, apply {step}"));
            }
            if dice.roll(5) != 0 || known.is_empty() {
                continue;
            }
            let (checkpoint, then) = dice.pick(&known);
            check_links(&place, &format!("seed {seed}, before step {step}"));
            let before = place.picture();
            println!("step {step}: some paths of {checkpoint}");
            let all: Vec<String> =
                before.keys().chain(then.keys()).filter(|path| !path.is_empty()).cloned().collect();
            let paths: Vec<String> = (0..=dice.roll(2)).map(|_| dice.pick(&all)).collect();
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            match place.ask(&checkpoint, &paths, false) {
                Ok(_) => {
                    place
                        .fs()
                        .state()
                        .tree
                        .verify()
                        .unwrap_or_else(|e| panic!("seed {seed}, step {step}: {e}"));
                    let now = place.picture();
                    check_links(
                        &place,
                        &format!("seed {seed}, step {step}, {paths:?} of {checkpoint}"),
                    );
                    check(&now, &then, &before, &paths);
                    if dice.roll(3) == 0 {
                        place.reopen();
                        assert_eq!(
                            place.picture(),
                            now,
                            "seed {seed}, step {step}: after a remount"
                        );
                    }
                }
                Err(error) => {
                    assert!(
                        error.to_string().contains("ot a directory"),
                        "seed {seed}, step {step}: {error}"
                    );
                    assert_eq!(place.picture(), before, "seed {seed}, step {step}");
                }
            }
        }
    }
}

#[test]
fn a_restored_file_beside_its_moved_self_is_another_file_also_after_an_apply() {
    let place = Place::new();
    place.checkpoint("one");
    place.rename("b", "moved");
    place.rename("d", "dir");
    place.restore("one", &["b", "d"]);
    let numbers = || ["b", "moved", "d", "dir", "d/f", "dir/f"].map(|path| place.ino(path));
    let before = numbers();
    place
        .sandbox()
        .handle(Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: jailfs::sandbox::Consent::ALL,
        })
        .unwrap();
    assert_eq!(numbers(), before);
    check_links(&place, "after the apply");
    place.put("moved", "changed\n");
    place.put("dir/f", "changed\n");
    assert_eq!([place.get("b"), place.get("d/f")], ["b of the base\n", "d/f of the base\n"]);
}
