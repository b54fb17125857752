//! Merges of random trees are what the model says.

mod bases;
mod beside;
mod epochs;
mod model;
mod rules;

use std::cell::RefCell;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::{Conflict, Rules, with_plan};
use crate::base::Base;
use crate::fs::merged::lower::Lower;
use crate::fs::{Caller, Fs, RenameMode, SetAttr, SetXattr, State};
use crate::jail::{Jail, Policy};
use crate::store::layer::Upper;
use crate::store::record::LayerKind;
use crate::store::{Store, StoreOptions};
use crate::tree::Tree;
use crate::types::{Epoch, FileKind, Ino, Name, NodeId, TreePath};
use model::Snap;

const CALLER: Caller = Caller { uid: 0, gid: 0 };
/// Each new case makes layers, so a world is used for so many.
const CASES_OF_WORLD: u32 = 100;

/// Makes the directory with which all cases begin.
fn make_base(base: &Path) {
    std::fs::create_dir_all(base.join("a/s")).unwrap();
    std::fs::create_dir_all(base.join("b")).unwrap();
    for file in ["a/f", "a/s/g", "b/h", "l1", "top"] {
        std::fs::write(base.join(file), "1\n2\n3\n4\n5\n6\n").unwrap();
    }
    std::fs::hard_link(base.join("l1"), base.join("b/l2")).unwrap();
    std::os::unix::fs::symlink("top", base.join("k")).unwrap();
}

/// A base and a store, in which heads are made.
pub(super) struct World {
    _dir: tempfile::TempDir,
    base: Arc<Base>,
    store: Arc<Store>,
    path: Vec<u8>,
}

impl World {
    pub(super) fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let (base, store) = (dir.path().join("base"), dir.path().join("store"));
        make_base(&base);
        let path = base.as_os_str().as_bytes().to_vec();
        let base = Arc::new(Base::open(&base).unwrap());
        let options = StoreOptions { volatile: true, ..StoreOptions::default() };
        let store = Arc::new(Store::create(&store, &path, base.root_id(), options).unwrap());
        World { _dir: dir, base, store, path }
    }

    /// A head that begins with the tree of a state.
    pub(super) fn head(&self, tree: &Tree) -> Fs {
        let upper = self.layer();
        let lower =
            Lower::new(Arc::clone(&self.base), Arc::clone(&self.store), Epoch(0), Vec::new());
        let jail = Jail {
            policy: Policy::Deny,
            mount_point: b"/mnt".to_vec(),
            base_path: self.path.clone(),
            allowed_targets: Vec::new(),
        };
        Fs::new(Arc::clone(&self.store), tree.clone(), lower, upper, jail)
    }

    fn layer(&self) -> Upper {
        self.store.create_layer(None, "main", Epoch(0), LayerKind::Continues).unwrap()
    }

    /// The tree that a merge makes of `ours`, or its conflicts.
    pub(super) fn merge(
        &self,
        states: (&State, &State, &State),
        rules: &Rules,
    ) -> Result<State, Vec<Conflict>> {
        let mut next = self.layer();
        let merged = with_plan(states, rules, |plan| {
            if !plan.conflicts().is_empty() {
                return Ok(Err(plan.conflicts().to_vec()));
            }
            let mut state = states.1.clone();
            let (edits, _) = plan.edits(&mut next.pool)?;
            state.tree.validate(&edits).unwrap();
            for edit in &edits {
                state.tree.apply(edit).unwrap();
            }
            Ok(Ok(state))
        });
        let merged = merged.unwrap();
        if let Ok(state) = &merged {
            state.tree.verify().unwrap();
        }
        merged
    }
}

/// An operation, by numbers that shrink.
type Op = (u8, u8, u8, u8);

pub(super) fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

pub(super) fn path(text: &str) -> TreePath {
    TreePath::parse(text.as_bytes()).unwrap()
}

/// Programs of a head.
pub(super) struct Program<'a>(pub(super) &'a Fs);

impl Program<'_> {
    pub(super) fn id(&self, path: &TreePath) -> NodeId {
        let step = |id, name| self.0.lookup(id, &name).unwrap().id;
        path.names().filter(|name| !name.as_bytes().is_empty()).fold(NodeId::ROOT, step)
    }

    fn place(&self, path: &TreePath) -> (NodeId, Name) {
        let (dir, name) = path.split().unwrap();
        (self.id(&dir), name)
    }

    pub(super) fn exists(&self, path: &TreePath) -> bool {
        self.0.state().resolve(path).unwrap().ino().is_some()
    }

    pub(super) fn read(&self, path: &TreePath) -> Vec<u8> {
        let state = self.0.state();
        state.read_all(&state.resolve(path).unwrap()).unwrap()
    }

    /// Writes in place, or into a new file that replaces the old one.
    pub(super) fn write(&self, path: &TreePath, bytes: &[u8], replace: bool) {
        let (dir, name) = self.place(path);
        let temp = Name::new(b"temp").unwrap();
        let id = match replace || !self.exists(path) {
            true => self.0.mknod(dir, &temp, 0o644, 0, 0, CALLER).unwrap().id,
            false => self.id(path),
        };
        let size = SetAttr { size: Some(0), ..SetAttr::default() };
        self.0.setattr(id, size, false).unwrap();
        self.0.write(id, 0, bytes, false).unwrap();
        if replace || !self.exists(path) {
            self.0.rename(dir, &temp, dir, &name, RenameMode::Replace, 0).unwrap();
        }
    }

    pub(super) fn rename(&self, from: &TreePath, to: &TreePath) {
        let ((from_dir, from), (to_dir, to)) = (self.place(from), self.place(to));
        self.0.rename(from_dir, &from, to_dir, &to, RenameMode::Replace, 0).unwrap();
    }

    pub(super) fn link(&self, from: &TreePath, to: &TreePath) {
        let (dir, name) = self.place(to);
        self.0.link(self.id(from), dir, &name).unwrap();
    }

    pub(super) fn mkdir(&self, path: &TreePath) {
        let (dir, name) = self.place(path);
        self.0.mkdir(dir, &name, 0o755, 0, CALLER).unwrap();
    }

    pub(super) fn chmod(&self, path: &TreePath, mode: u32) {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        self.0.setattr(self.id(path), set, false).unwrap();
    }

    pub(super) fn xattr(&self, path: &TreePath, name: &str, value: &str) {
        let id = self.id(path);
        self.0.setxattr(id, name.as_bytes(), value.as_bytes(), SetXattr::default()).unwrap();
    }

    pub(super) fn symlink(&self, path: &TreePath, target: &str) {
        let (dir, name) = self.place(path);
        self.0.symlink(dir, &name, target.as_bytes(), CALLER).unwrap();
    }

    pub(super) fn remove(&self, path: &TreePath) {
        let (dir, name) = self.place(path);
        let state = self.0.state();
        let found = state.resolve(path).unwrap();
        let Some((ino, lower)) = state.as_dir(&found) else {
            return self.0.unlink(dir, &name).unwrap();
        };
        for inner in state.merged_names(ino, lower.as_ref()).unwrap().into_keys() {
            self.remove(&path.join(&inner));
        }
        self.0.rmdir(dir, &name).unwrap();
    }

    /// All paths but the root, sorted.
    fn paths(&self) -> Vec<(TreePath, FileKind)> {
        let state = self.0.state();
        let mut paths = Vec::new();
        let mut dirs = vec![(state.root(), TreePath::root())];
        while let Some(((dir, lower), path)) = dirs.pop() {
            for name in state.merged_names(dir, lower.as_ref()).unwrap().into_keys() {
                let found = state.find(dir, lower.as_ref(), &name).unwrap();
                let path = path.join(&name);
                paths.push((path.clone(), state.kind(&found).unwrap()));
                dirs.extend(state.as_dir(&found).map(|dir| (dir, path)));
            }
        }
        paths.sort_by(|a, b| a.0.cmp(&b.0));
        paths
    }

    fn run(&self, (what, a, b, c): Op) {
        let paths = self.paths();
        let pick = |kind: Option<FileKind>, number: u8| {
            let of: Vec<&TreePath> = paths
                .iter()
                .filter(|(_, is)| kind.is_none_or(|kind| kind == *is))
                .map(|(path, _)| path)
                .collect();
            of.get(number as usize % of.len().max(1)).map(|path| (*path).clone())
        };
        let dir = |number: u8| match number % 3 {
            0 => TreePath::root(),
            _ => pick(Some(FileKind::Dir), number / 3).unwrap_or_default(),
        };
        let new = dir(b).join(&name(["n1", "n2", "f", "l1", "s"][c as usize % 5]));
        let (file, any) = (pick(Some(FileKind::File), a), pick(None, a));
        match (what % 12, file, any) {
            (0..=2, Some(file), _) => {
                let mut lines: Vec<String> =
                    String::from_utf8_lossy(&self.read(&file)).lines().map(String::from).collect();
                let at = b as usize % lines.len().max(1);
                lines.splice(at..(at + 1).min(lines.len()), [format!("line {}", c % 4)]);
                let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
                self.write(&file, text.as_bytes(), what % 12 == 2);
            }
            (3, Some(file), _) => self.write(&file, &[0, b % 2], c % 2 == 0),
            (4, ..) if !self.exists(&new) => self.write(&new, &[b'a' + a % 2, b'\n'], false),
            (5, ..) if !self.exists(&new) => self.mkdir(&new),
            (6, _, Some(from)) if !new.starts_with(&from) && !from.starts_with(&new) => {
                if self.exists(&new) {
                    self.remove(&new);
                }
                self.rename(&from, &new);
            }
            (7, Some(file), _) if !self.exists(&new) => self.link(&file, &new),
            (8, _, Some(any)) => self.remove(&any),
            (9, Some(file), _) => self.chmod(&file, 0o600 + u32::from(b % 3)),
            // The kernel lets no program give a symlink an attribute of this kind.
            (10, _, Some(any)) if !paths.contains(&(any.clone(), FileKind::Symlink)) => {
                self.xattr(&any, ["user.x", "user.y"][b as usize % 2], &format!("{}", c % 3));
            }
            (11, ..) if !self.exists(&new) => self.symlink(&new, ["f", "g"][a as usize % 2]),
            _ => {}
        }
    }
}

/// Three trees: the merge base, and two heads that began with it.
pub(super) fn three(world: &World, ops: &[Vec<Op>; 3]) -> (State, State, State) {
    let base = world.head(&Tree::new());
    let run = |fs: &Fs, ops: &[Op]| ops.iter().for_each(|op| Program(fs).run(*op));
    run(&base, &ops[0]);
    let (ours, theirs) = (world.head(&base.state().tree), world.head(&base.state().tree));
    run(&ours, &ops[1]);
    run(&theirs, &ops[2]);
    let lower = base.state().lower;
    let with = |fs: &Fs| State { tree: fs.state().tree, lower: Arc::clone(&lower) };
    (base.state(), with(&ours), with(&theirs))
}

thread_local! {
    static WORLD: RefCell<Option<(World, u32)>> = const { RefCell::new(None) };
}

fn in_world<T>(run: impl FnOnce(&World) -> T) -> T {
    WORLD.with_borrow_mut(|world| {
        if world.as_ref().is_none_or(|(_, cases)| *cases >= CASES_OF_WORLD) {
            *world = Some((World::new(), 0));
        }
        let (world, cases) = world.as_mut().unwrap();
        *cases += 1;
        run(world)
    })
}

fn ops(most: usize) -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec((0u8..12, 0u8..40, 0u8..40, 0u8..20), 0..most)
}

/// Runs a property on random trees: 100 times, or as often as `JAILFS_MERGE_CASES` says.
fn check(property: impl Fn(&World, [&State; 3]) -> Result<(), TestCaseError>) {
    let cases = std::env::var("JAILFS_MERGE_CASES").ok().and_then(|text| text.parse().ok());
    let config = Config { cases: cases.unwrap_or(100), ..Config::default() };
    let trees = (ops(4), ops(6), ops(6));
    let run = TestRunner::new(config).run(&trees, |(base, ours, theirs)| {
        in_world(|world| {
            let (base, ours, theirs) = three(world, &[base, ours, theirs]);
            property(world, [&base, &ours, &theirs])
        })
    });
    run.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_merge_is_what_the_model_says() {
    check(|world, [base, ours, theirs]| {
        let merged = world.merge((base, ours, theirs), &Rules::default());
        let expected = model::merge(&Snap::of(base), &Snap::of(ours), &Snap::of(theirs));
        match (&merged, &expected) {
            (Ok(merged), Some(expected)) => {
                prop_assert_eq!(Snap::of(merged).paths(), expected.paths());
            }
            (Err(_), None) => {}
            (Ok(_), None) => prop_assert!(false, "the model has a conflict"),
            (Err(conflicts), Some(_)) => prop_assert!(false, "a conflict: {conflicts:?}"),
        }
        Ok(())
    });
}

#[test]
fn a_merge_with_an_unchanged_or_equal_head_is_the_other_one() {
    check(|world, [base, ours, theirs]| {
        let same = |a: &State, b: &State| Snap::of(a).paths() == Snap::of(b).paths();
        let merge = |states| world.merge(states, &Rules::default()).unwrap();
        prop_assert!(ours.tree.diff(&merge((base, ours, base)).tree).is_empty());
        prop_assert!(ours.tree.diff(&merge((base, ours, ours)).tree).is_empty());
        prop_assert!(same(theirs, &merge((base, base, theirs))));
        Ok(())
    });
}

#[test]
fn the_order_of_the_heads_does_not_matter() {
    check(|world, [base, ours, theirs]| {
        let one = world.merge((base, ours, theirs), &Rules::default());
        let other = world.merge((base, theirs, ours), &Rules::default());
        match (one, other) {
            (Ok(a), Ok(b)) => prop_assert_eq!(Snap::of(&a).paths(), Snap::of(&b).paths()),
            // A conflict of a hard link has the path of one of its names, which can be another one.
            (Err(_), Err(_)) => {}
            (a, b) => prop_assert!(false, "{:?} {:?}", a.err(), b.err()),
        }
        Ok(())
    });
}

#[test]
fn a_head_that_wins_everywhere_leaves_no_conflict() {
    check(|world, [base, ours, theirs]| {
        let everywhere = vec![TreePath::root()];
        for rules in [
            Rules { ours: everywhere.clone(), ..Rules::default() },
            Rules { theirs: everywhere, ..Rules::default() },
        ] {
            let merged = world.merge((base, ours, theirs), &rules);
            prop_assert!(merged.is_ok(), "{:?}", merged.err());
        }
        Ok(())
    });
}

/// Link counts are part of what a merge makes.
#[test]
fn files_count_their_names() {
    check(|world, [base, ours, theirs]| {
        let Ok(merged) = world.merge((base, ours, theirs), &Rules::default()) else {
            return Ok(());
        };
        let snap = Snap::of(&merged);
        for (ino, thing) in snap.nodes.iter().filter(|(_, t)| t.kind != FileKind::Dir) {
            let names = snap.names.values().filter(|of| *of == ino).count();
            if let Some(node) = merged.tree.node(*ino) {
                prop_assert_eq!(node.meta.nlink as usize, names, "{:?}", thing);
            }
        }
        for (ino, _) in snap.nodes.iter().filter(|(_, t)| t.kind == FileKind::Dir) {
            let is_dir = |of: &Ino| snap.nodes[of].kind == FileKind::Dir;
            let subdirs = snap.names.iter().filter(|((at, _), of)| at == ino && is_dir(of)).count();
            if let Some(node) = merged.tree.node(*ino).filter(|node| node.meta.nlink >= 2) {
                prop_assert_eq!(node.meta.nlink as usize, 2 + subdirs);
            }
        }
        Ok(())
    });
}
