//! Applies without a mount: older states, changes to the base by other programs, and open files
//! survive them.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeSet;
use std::fs as host;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use jailfs::error::Error;
use jailfs::internals::fs::{Caller, SetAttr, SetXattr};
use jailfs::internals::sys::{clock, failpoint};
use jailfs::sandbox::{Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId, Timestamp, TreePath};

mod common;
use common::Stop;

const ME: Caller = Caller { uid: 0, gid: 0 };

/// A base, its store, and the sandbox of both.
struct Place {
    dir: tempfile::TempDir,
    sandbox: Option<Arc<Sandbox>>,
}

impl Place {
    /// Over a base with these files.
    fn new(files: &[(&str, &str)]) -> Place {
        Place::with_links(files, &[])
    }

    /// Over a base with these files and more hard links to them, also outside of it.
    fn with_links(files: &[(&str, &str)], links: &[(&str, &str)]) -> Place {
        let mut place = Place { dir: tempfile::tempdir().unwrap(), sandbox: None };
        host::create_dir(place.base("")).unwrap();
        for (path, text) in files {
            host::create_dir_all(place.base(path).parent().unwrap()).unwrap();
            host::write(place.base(path), text).unwrap();
        }
        for (path, link) in links {
            host::hard_link(place.base(path), place.base(link)).unwrap();
        }
        place.reopen();
        place
    }

    /// Over a base in which the file `a` has the second name `b`.
    fn of_links(text: &str) -> Place {
        let mut place = Place::new(&[("a", text)]);
        host::hard_link(place.base("a"), place.base("b")).unwrap();
        place.reopen();
        place
    }

    fn reopen(&mut self) {
        self.sandbox = None;
        let (base, store) = (self.base(""), self.dir.path().join("store"));
        self.sandbox =
            Some(Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap());
    }

    fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().unwrap()
    }

    fn base(&self, path: &str) -> std::path::PathBuf {
        self.dir.path().join("base").join(path)
    }

    fn in_base(&self, path: &str) -> Option<String> {
        host::read_to_string(self.base(path)).ok()
    }

    fn find(&self, path: &str) -> Option<NodeId> {
        path.split('/').filter(|part| !part.is_empty()).try_fold(NodeId::ROOT, |dir, part| {
            self.sandbox().fs().lookup(dir, &name(part)).ok().map(|entry| entry.id)
        })
    }

    fn dir_of<'p>(&self, path: &'p str) -> (NodeId, &'p str) {
        let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
        (self.find(dir).unwrap(), last)
    }

    fn put(&self, path: &str, text: &str) {
        let (dir, last) = self.dir_of(path);
        let fs = self.sandbox().fs();
        let file = self
            .find(path)
            .unwrap_or_else(|| fs.mknod(dir, &name(last), 0o100_644, 0, 0, ME).unwrap().id);
        fs.truncate(file, 0, false).unwrap();
        fs.write(file, 0, text.as_bytes(), false).unwrap();
    }

    fn chmod(&self, path: &str, mode: u32) {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        self.sandbox().fs().setattr(self.find(path).unwrap(), set, false).unwrap();
    }

    fn read(&self, id: NodeId) -> String {
        let plan = self.sandbox().fs().read(id, 0, u64::MAX).unwrap();
        String::from_utf8(plan.read(false).unwrap().unwrap()).unwrap()
    }

    fn get(&self, path: &str) -> Option<String> {
        self.find(path).map(|id| self.read(id))
    }

    fn rm(&self, path: &str) {
        let (dir, last) = self.dir_of(path);
        self.sandbox().fs().unlink(dir, &name(last)).unwrap();
    }

    /// Removes a directory with one file.
    fn rm_dir_of(&self, path: &str) {
        self.rm(path);
        let (dir, last) = self.dir_of(path.rsplit_once('/').unwrap().0);
        self.sandbox().fs().rmdir(dir, &name(last)).unwrap();
    }

    fn ask(&self, request: Request) -> Reply {
        self.sandbox().handle(request).unwrap()
    }

    fn checkpoint(&self, name: &str) -> Result<Reply, Error> {
        self.sandbox()
            .handle(Request::Checkpoint { name: Some(name.to_owned()), message: String::new() })
    }

    fn restore(&self, to: &str) -> Result<Reply, Error> {
        self.sandbox().handle(Request::Restore {
            detach_mounts: false,
            to: Rev::parse(to),
            paths: Vec::new(),
            dry_run: false,
        })
    }

    fn apply(&self, paths: &[&str]) -> Result<Vec<String>, Error> {
        let paths = paths.iter().map(|p| TreePath::parse(p.as_bytes()).unwrap()).collect();
        match self.sandbox().handle(Request::Apply {
            paths,
            dry_run: false,
            undo: false,
            consent: jailfs::sandbox::Consent::ALL,
        })? {
            Reply::Applied(done) => {
                Ok(done.conflicts.iter().map(|(path, _)| path.to_string()).collect())
            }
            other => panic!("{other:?}"),
        }
    }

    /// Returns the number of changes.
    fn applies(&self) -> u32 {
        match self.ask(Request::Status) {
            Reply::Status(status) => status.epoch.0,
            other => panic!("{other:?}"),
        }
    }

    fn gc(&self) {
        self.ask(Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false });
    }

    /// Waits until changes of the base get a later time than all earlier ones.
    fn wait_for_later(&self) {
        let (now, probe) = (clock::now(), self.dir.path().join("probe"));
        loop {
            host::write(&probe, "x").unwrap();
            let about = host::metadata(&probe).unwrap();
            let changed = Timestamp {
                secs: about.ctime(),
                nanos: u32::try_from(about.ctime_nsec()).unwrap(),
            };
            if changed > now {
                break;
            }
        }
    }

    /// Appends to a file of the base, as another program does.
    fn somebody_appends(&self, path: &str) {
        self.wait_for_later();
        let text = format!("{}theirs", self.in_base(path).unwrap());
        host::write(self.base(path), text).unwrap();
        self.wait_for_later();
    }

    /// The store passes the full consistency check.
    fn check(&self, when: &str) {
        match self.ask(Request::Check { read_data: true }) {
            Reply::Checked(checked) => {
                assert!(checked.problems.is_empty(), "{when}: {:#?}", checked.problems)
            }
            other => panic!("{other:?}"),
        }
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

#[test]
fn an_apply_of_one_hard_link_leaves_older_checkpoints_as_they_were() {
    for (applied, other) in [("a", "b"), ("b", "a")] {
        for text in ["new!", "n", "longer than before"] {
            let when = format!("{applied}: {text}");
            let mut place = Place::of_links("old!");
            place.checkpoint("start").unwrap();
            place.put(applied, text);
            assert_eq!(place.apply(&[applied]).unwrap(), Vec::<String>::new(), "{when}");
            assert_eq!(place.in_base(other).as_deref(), Some(text), "{when}: they stay links");
            for _ in 0..2 {
                assert_eq!(place.get(other).as_deref(), Some(text), "{when}");
                place.restore("start").unwrap();
                for path in [applied, other] {
                    assert_eq!(place.get(path).as_deref(), Some("old!"), "{when}: {path}");
                }
                place.check(&when);
                place.restore("@-1").unwrap();
                place.restore("start").unwrap();
                place.reopen();
                assert_eq!(place.get(other).as_deref(), Some("old!"), "{when}: after a start");
                place.put(applied, text);
            }
            place.ask(Request::Apply {
                paths: Vec::new(),
                dry_run: false,
                undo: true,
                consent: jailfs::sandbox::Consent::ALL,
            });
            assert_eq!(place.in_base(applied).as_deref(), Some("old!"), "{when}: undone");
            assert_eq!(place.in_base(other).as_deref(), Some("old!"), "{when}: undone");
        }
    }
}

/// In the tree the other name is another file. The base gets that when the other name is applied,
/// and not before.
#[test]
fn an_apply_of_one_hard_link_takes_nothing_from_the_file_that_replaced_the_other() {
    for is_dir in [false, true] {
        let place = Place::of_links("old!");
        place.checkpoint("start").unwrap();
        place.put("a", "new!");
        place.rm("b");
        if is_dir {
            place.sandbox().fs().mkdir(NodeId::ROOT, &name("b"), 0o700, 0, ME).unwrap();
        } else {
            place.put("b", "another");
            place.chmod("b", 0o600);
        }
        assert_eq!(place.apply(&["a"]).unwrap(), Vec::<String>::new());
        assert_eq!(place.in_base("a").as_deref(), Some("new!"));
        assert_eq!(host::metadata(place.base("a")).unwrap().mode() & 0o777, 0o644);
        assert_eq!(place.get("a").as_deref(), Some("new!"));
        assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new());
        assert_eq!(place.in_base("a").as_deref(), Some("new!"));
        assert_eq!(place.in_base("b").as_deref(), (!is_dir).then_some("another"));
        assert_eq!(host::metadata(place.base("b")).unwrap().is_dir(), is_dir);
        let number =
            |path: &str| place.sandbox().fs().getattr(place.find(path).unwrap()).unwrap().ino;
        assert_ne!(number("a"), number("b"));
        place.restore("start").unwrap();
        assert_eq!(
            (place.get("a").as_deref(), place.get("b").as_deref()),
            (Some("old!"), Some("old!"))
        );
        assert_eq!(number("a"), number("b"));
    }
}

#[test]
fn a_symlink_in_the_place_of_the_other_links_directory_does_not_hinder_an_apply() {
    let place =
        Place::with_links(&[("e/a", "old!"), ("c/y", "")], &[("e/a", "e/b"), ("e/a", "c/x")]);
    place.put("e/a", "new!");
    place.rm("c/x");
    place.rm_dir_of("c/y");
    place.sandbox().fs().symlink(NodeId::ROOT, &name("c"), b"/", ME).unwrap();
    assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new());
    assert_eq!(
        (place.in_base("e/a"), place.in_base("e/b")),
        (Some("new!".into()), Some("new!".into()))
    );
    assert_eq!(host::read_link(place.base("c")).unwrap().as_os_str(), "/");
}

#[test]
fn a_change_of_the_base_is_a_conflict_also_after_a_partial_apply() {
    let place = Place::new(&[("dir/f", "base "), ("y", "base ")]);
    place.rm_dir_of("dir/f");
    place.put("y", "mine");
    place.somebody_appends("dir/f");
    assert_eq!(place.apply(&[]).unwrap(), ["dir/f"]);
    assert_eq!(place.apply(&["y"]).unwrap(), Vec::<String>::new());
    assert_eq!(place.apply(&[]).unwrap(), ["dir/f"], "it is still one node");
    assert_eq!(place.in_base("dir/f").as_deref(), Some("base theirs"));
}

#[test]
fn a_change_of_the_base_is_a_conflict_also_after_a_gc() {
    let mut place = Place::new(&[("dir/f", "base ")]);
    place.rm_dir_of("dir/f");
    place.somebody_appends("dir/f");
    for made in ["one", "two", "three"] {
        place.checkpoint(made).unwrap();
        place.wait_for_later();
    }
    for dropped in ["one", "two"] {
        place.ask(Request::Drop { rev: Rev::parse(dropped) });
        place.gc();
        assert_eq!(place.apply(&[]).unwrap(), ["dir/f"], "without {dropped}");
    }
    place.reopen();
    assert_eq!(place.apply(&[]).unwrap(), ["dir/f"]);
    assert_eq!(place.in_base("dir/f").as_deref(), Some("base theirs"));
}

/// An apply changes the ctime of all hard links of a file. That is no change by another program.
#[test]
fn the_effect_of_an_apply_on_other_hard_links_is_no_conflict() {
    for is_removed_first in [false, true] {
        let place = Place::of_links("old!");
        place.chmod("a", 0o640);
        if is_removed_first {
            place.rm("b");
        }
        place.wait_for_later();
        assert_eq!(place.apply(&["a"]).unwrap(), Vec::<String>::new());
        if !is_removed_first {
            place.rm("b");
        }
        assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new());
        assert_eq!((place.in_base("a").as_deref(), place.in_base("b")), (Some("old!"), None));
    }
}

/// An apply fails half way, and so does its rollback. Older states are exact until the store is
/// opened again.
#[test]
fn while_an_apply_is_half_done_older_states_are_exact() {
    let files: Vec<String> = (0..20).map(|n| format!("f{n}")).collect();
    let mut place = Place::new(&files.iter().map(|f| (f.as_str(), "base")).collect::<Vec<_>>());
    place.checkpoint("start").unwrap();
    files.iter().for_each(|file| place.put(file, "mine"));
    place.checkpoint("mine").unwrap();
    failpoint::with("fail:base.rename:8+:EIO", || place.apply(&[])).unwrap_err();
    let in_base = |place: &Place| {
        files.iter().filter(|file| place.in_base(file).as_deref() == Some("mine")).count()
    };
    let halves = in_base(&place);
    assert!((1..20).contains(&halves), "{halves} of 20");
    let shows = |place: &Place, what: &str, when: &str| {
        files
            .iter()
            .for_each(|file| assert_eq!(place.get(file).as_deref(), Some(what), "{file}, {when}"));
    };
    for (to, what) in [("start", "base"), ("mine", "mine"), ("start", "base")] {
        place.restore(to).unwrap();
        shows(&place, what, "stuck");
    }
    place.apply(&[]).unwrap_err();
    place.reopen();
    assert_eq!(in_base(&place), 0);
    shows(&place, "base", "opened anew");
    place.restore("mine").unwrap();
    shows(&place, "mine", "opened anew");
    place.check("after all");
}

/// A sync of an apply fails. The next start must not roll back a later apply with it.
#[test]
fn an_apply_that_failed_before_it_began_is_not_rolled_back_after_a_later_one() {
    // Its leftovers can be removed; if not, no other apply may run before the next start.
    for also in ["", ",fail:store.remove:1+:EIO"] {
        let (mut failed, mut went_on, mut refused) = (0, 0, 0);
        for at in 1..100 {
            let mut place = Place::new(&[("gone", "base"), ("kept", "base")]);
            place.rm("gone");
            place.put("kept", "mine");
            // The seal of the tree before it does not matter here.
            place.checkpoint("start").unwrap();
            let rules = format!("fail:store.sync:{at}:EIO{also}");
            let first = failpoint::with(&rules, || place.apply(&[]));
            if first.is_ok() {
                break;
            }
            failed += 1;
            let is_untouched = place.in_base("gone").is_some();
            let again = place.apply(&[]);
            if let Ok(conflicts) = &again {
                assert_eq!(conflicts, &Vec::<String>::new(), "{rules}");
                went_on += u32::from(is_untouched);
            } else {
                refused += 1;
            }
            place.reopen();
            let now = (place.in_base("gone"), place.in_base("kept"));
            let (base, mine) =
                ((Some("base".into()), Some("base".into())), (None, Some("mine".into())));
            // If the sync of the seal failed, the apply is done or rolled back.
            assert!(
                now == mine || again.is_err() && now == base,
                "{rules}: after a start: {now:?}"
            );
            assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new(), "{rules}");
            assert_eq!(place.in_base("gone"), None, "{rules}");
            place.check(&rules);
        }
        assert!(failed >= 5, "{failed} syncs failed");
        let is_distinguished = if also.is_empty() { went_on >= 2 } else { refused >= 2 };
        assert!(
            is_distinguished,
            "{also}: of {failed} syncs, {went_on} were ignored and {refused} reported"
        );
    }
}

/// A process holds an unlinked file, and reads on.
#[test]
fn an_open_file_of_an_older_base_keeps_its_bytes_through_a_gc() {
    let place = Place::new(&[("held", "bytes of the base"), ("other", "base")]);
    let held = place.find("held").unwrap();
    place.rm("held");
    assert_eq!(place.read(held), "bytes of the base");
    for text in ["one", "two", "three"] {
        place.put("other", text);
        assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new());
    }
    place.gc();
    assert_eq!(place.read(held), "bytes of the base");
    // When it is closed, its content is freed.
    place.sandbox().fs().forget(held, u64::MAX);
    place.gc();
    place.check("at the end");
}

/// Something fails after the base was written: the apply was done, says so, and is in the log.
#[test]
fn an_apply_that_fails_after_it_was_done_says_so() {
    let (mut before, mut after) = (0, 0);
    for what in ["store.mkdir", "store.rename", "store.sync-dir", "base.sync"] {
        for at in 1..100 {
            let mut place = Place::new(&[("gone", "base"), ("kept", "base")]);
            place.rm("gone");
            place.put("kept", "mine");
            let rules = format!("fail:{what}:{at}:EIO");
            let Err(error) = failpoint::with(&rules, || place.apply(&[])) else { break };
            let is_made = place.applies() == 1 && place.in_base("gone").is_none();
            let log = match place.ask(Request::OpLog) {
                Reply::OpLog(log) => log,
                other => panic!("{other:?}"),
            };
            assert_eq!(log.iter().any(|op| op.verb == "apply"), is_made, "{rules}: {error}");
            assert_eq!(
                error.to_string().contains("the base was written, but then"),
                is_made,
                "{rules}: {error}"
            );
            let then = place.in_base("kept");
            place.reopen();
            assert_eq!(place.in_base("kept"), then, "{rules}");
            assert_eq!(place.get("kept").as_deref(), Some("mine"), "{rules}");
            assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new(), "{rules}");
            assert_eq!(place.in_base("gone"), None, "{rules}");
            place.check(&rules);
            if is_made { after += 1 } else { before += 1 }
        }
    }
    assert!(before > 2 && after > 2, "{before} before, {after} after");
}

/// The failpoints at which a full disk is reported once.
const FULL: [&str; 4] = ["store.write", "store.rename", "store.open", "store.mkdir"];

/// Runs something on a disk that is full at one failpoint, once for each failpoint.
fn with_a_full_disk(
    prepare: impl Fn() -> Place,
    verb: impl Fn(&Place),
    check: impl Fn(&Place, &str),
) {
    for what in FULL {
        for at in 1.. {
            assert!(at < 100, "{what}: the operation never ends");
            let place = prepare();
            let steps = place.dir.path().join("steps");
            let rules = format!("log:{},fail:{what}:{at}:ENOSPC", steps.display());
            failpoint::with(&rules, || verb(&place));
            check(&place, &rules);
            let steps = host::read_to_string(steps).unwrap_or_default();
            if steps.lines().filter(|step| *step == what).count() < at {
                break;
            }
        }
    }
}

#[test]
fn on_a_full_disk_a_checkpoint_is_made_once() {
    let prepare = || {
        let place = Place::new(&[("f", "base")]);
        place.put("f", "mine");
        place
    };
    with_a_full_disk(
        prepare,
        |place| drop(place.checkpoint("green").unwrap()),
        |place, when| {
            let (Reply::Log(log), Reply::OpLog(ops)) =
                (place.ask(Request::Log), place.ask(Request::OpLog))
            else {
                panic!("{when}");
            };
            assert_eq!(
                log.iter().filter(|c| c.name.as_deref() == Some("green")).count(),
                1,
                "{when}: {log:?}"
            );
            assert_eq!(
                ops.iter().filter(|op| op.verb == "checkpoint").count(),
                1,
                "{when}: {ops:?}"
            );
            place.check(when);
        },
    );
}

#[test]
fn on_a_full_disk_an_undo_goes_one_step() {
    let prepare = || {
        let place = Place::new(&[]);
        for text in ["one", "two", "three", "four"] {
            place.put("f", text);
            // Each is an edit of its own.
            place.checkpoint(text).unwrap();
        }
        // Its number is not synced yet.
        place.put("new", "new");
        place
    };
    let path = TreePath::parse(b"f").unwrap();
    let undo = |place: &Place| drop(place.ask(Request::Undo { path: path.clone(), steps: 1 }));
    let once = prepare();
    undo(&once);
    let wanted = once.get("f");
    with_a_full_disk(prepare, undo, |place, when| assert_eq!(place.get("f"), wanted, "{when}"));
}

#[test]
fn on_a_full_disk_a_restore_goes_to_the_named_state() {
    let prepare = || {
        let place = Place::new(&[]);
        for text in ["one", "two", "three", "four"] {
            place.put("f", text);
            place.checkpoint(text).unwrap();
        }
        place
    };
    with_a_full_disk(
        prepare,
        |place| drop(place.restore("@-2").unwrap()),
        |place, when| assert_eq!(place.get("f").as_deref(), Some("three"), "{when}"),
    );
}

/// pnpm, uv and nix link equal files of a tree to one in their store.
#[test]
fn an_apply_does_not_write_to_hard_links_outside_of_the_base() {
    for removed in [None, Some("a")] {
        let links = [("a", "b"), ("a", "d/e"), ("a", "../outside")];
        let place = Place::with_links(&[("a", "shared"), ("d/c", "other")], &links);
        let outside = place.base("../outside");
        removed.into_iter().for_each(|path| place.rm(path));
        place.put("b", "mine");
        assert!(place.apply(&[]).unwrap().is_empty());
        assert_eq!(host::read_to_string(&outside).unwrap(), "shared");
        let number = |path: &str| host::metadata(place.base(path)).map(|about| about.ino()).ok();
        for path in ["a", "b", "d/e"].into_iter().filter(|path| Some(*path) != removed) {
            assert_eq!(
                (place.in_base(path).as_deref(), place.get(path).as_deref()),
                (Some("mine"), Some("mine"))
            );
            assert_eq!(number(path), number("b"), "all names still lead to one file");
        }
        place.ask(Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: true,
            consent: jailfs::sandbox::Consent::ALL,
        });
        for path in ["a", "b", "d/e"] {
            assert_eq!(place.in_base(path).as_deref(), Some("shared"), "{path}");
        }
        assert_eq!(host::read_to_string(&outside).unwrap(), "shared");
    }
}

/// An apply that must fail: no host accepts an attribute of this size.
fn spoil(place: &Place) {
    place.put("z", "z");
    let id = place.find("z").unwrap();
    place.sandbox().fs().setxattr(id, b"user.large", &[1; 60_000], SetXattr::default()).unwrap();
}

#[test]
fn files_named_like_staged_content_belong_to_their_owner() {
    let users = ".jailfs-stage-aaaaaaaaaaaaaaaa";
    // One sorts before every name that the apply can choose, and one behind.
    let agents = [".jailfs-stage-0000000000000000", ".jailfs-stage-ffffffffffffffff"];
    let mut place = Place::new(&[("a", "old"), (users, "precious")]);
    let in_the_base = |place: &Place| -> BTreeSet<String> {
        let entries = host::read_dir(place.base("")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    place.put("a", "new");
    for agents in agents {
        let root = NodeId::ROOT;
        place.sandbox().fs().mkdir(root, &name(agents), 0o755, 0, ME).unwrap();
    }
    spoil(&place);
    place.apply(&[]).unwrap_err();
    place.reopen();
    assert_eq!(
        (place.in_base("a").as_deref(), place.in_base(users).as_deref()),
        (Some("old"), Some("precious"))
    );
    assert_eq!(in_the_base(&place), BTreeSet::from(["a", users].map(String::from)));
    place.rm("z");
    assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new());
    assert_eq!(
        (place.in_base("a").as_deref(), place.in_base(users).as_deref()),
        (Some("new"), Some("precious"))
    );
    let all = BTreeSet::from(["a", users, agents[0], agents[1]].map(String::from));
    assert_eq!(in_the_base(&place), all);
}

/// A read that began before an apply of another head returns the bytes that the apply replaced.
#[test]
fn a_read_in_a_fork_during_an_apply_of_another_head_has_its_bytes() {
    let files = [("replaced", "old"), ("rewritten", "old"), ("removed", "old")];
    let place = Place::with_links(&files, &[("rewritten", "other name")]);
    place.ask(Request::Fork { names: vec!["fork".to_owned()], from: None });
    let fork = place.sandbox().head("fork").unwrap();
    let plans: Vec<_> = ["replaced", "rewritten", "removed"]
        .into_iter()
        .map(|path| {
            let id = fork.fs().lookup(NodeId::ROOT, &name(path)).unwrap().id;
            (path, id, fork.fs().read(id, 0, 100).unwrap())
        })
        .collect();
    place.put("replaced", "new and longer");
    place.put("rewritten", "new and longer");
    place.rm("removed");
    assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new());
    for (path, id, plan) in plans {
        assert_eq!(fork.fs().read_by(plan, id, 0, 100).as_deref(), Ok(&b"old"[..]), "{path}");
        assert_eq!(fork.fs().base_problems(), [], "{path}");
    }
}

#[test]
fn staged_content_is_not_visible_in_the_mount() {
    let place = Place::new(&[("here/f", "old")]);
    let dir = place.find("here").unwrap();
    let stop = Stop::default();
    let seen = std::thread::scope(|scope| {
        let at_the_end = stop.at_the_end();
        let looking = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !stop.is_said() {
                let fs = place.sandbox().fs();
                // From a fresh start each time, so that the base is read again.
                fs.readdir(dir, 0, |entry| {
                    seen.extend(Some(entry.name).filter(|name| name.starts_with(b".jailfs-stage")));
                    true
                })
                .unwrap();
            }
            seen
        });
        for round in 0..4 {
            for n in 0..60 {
                place.put(&format!("here/f{n}"), &format!("{round}"));
            }
            assert!(place.apply(&[]).unwrap().is_empty());
        }
        drop(at_the_end);
        looking.join().unwrap()
    });
    assert!(seen.is_empty(), "{seen:?}");
}

/// The states before an apply come before the present one, also when the head lies on the new base.
#[test]
fn the_last_checkpoint_is_found_also_after_an_apply() {
    let mut place = Place::new(&[("file", "0")]);
    let back = |place: &Place, n: &str| {
        let restored = place.restore(n).map(drop);
        restored.map(|()| place.get("file").unwrap()).map_err(|error| error.reason)
    };
    for n in 1..4 {
        place.put("file", &n.to_string());
        place.checkpoint(&format!("c{n}")).unwrap();
        assert_eq!(place.apply(&[]).unwrap(), Vec::<String>::new());
    }
    place.put("file", "later");
    assert_eq!(place.get("file").as_deref(), Some("later"));
    assert_eq!(back(&place, "@-1").as_deref(), Ok("3"));
    // From there on it is counted from the restored state.
    assert_eq!(back(&place, "@-2").as_deref(), Ok("2"));
    place.reopen();
    assert_eq!(back(&place, "@-2").as_deref(), Ok("1"));
    assert!(back(&place, "@-2").unwrap_err().contains("no such checkpoint"));
}

/// An apply that was interrupted as soon as it had a visible effect.
fn cut_off(make: impl Fn() -> Place, is_reached: impl Fn(&Place) -> bool) -> Place {
    for moment in 1..400 {
        let place = make();
        failpoint::with(&format!("fail:any:{moment}+:EIO"), || place.apply(&[]).map(drop))
            .unwrap_err();
        if is_reached(&place) {
            return place;
        }
    }
    panic!("an apply has no such failpoint")
}

#[test]
fn files_put_into_a_directory_of_an_interrupted_apply_stay() {
    let make = || {
        let place = Place::new(&[("file", "file")]);
        let fs = place.sandbox().fs();
        for dir in ["new", "new/below"] {
            let (parent, last) = place.dir_of(dir);
            fs.mkdir(parent, &name(last), 0o755, 0, ME).unwrap();
        }
        place.put("new/below/ours", "ours");
        place.rm("file");
        let file = NodeId::ROOT;
        fs.mkdir(file, &name("file"), 0o755, 0, ME).unwrap();
        place
    };
    let mut place = cut_off(make, |place| place.base("new/below/ours").exists());
    host::write(place.base("new/theirs"), "theirs").unwrap();
    host::create_dir_all(place.base("file/deep/er")).unwrap();
    host::write(place.base("file/deep/er/theirs"), "theirs").unwrap();
    place.reopen();
    assert_eq!(place.in_base("new/theirs").as_deref(), Some("theirs"));
    assert_eq!(place.in_base("file/deep/er/theirs").as_deref(), Some("theirs"));
    assert!(!place.base("new/below").exists());
    place.check("rolled back");
}

#[test]
fn a_file_removed_while_an_apply_was_interrupted_is_missing_and_nothing_else() {
    let make = || {
        let place = Place::new(&[("f", "text"), ("other", "other")]);
        place.chmod("f", 0o600);
        place.put("other", "new");
        place
    };
    let is_reached = |place: &Place| place.base("f").metadata().unwrap().mode() & 0o777 == 0o600;
    for replace in [false, true] {
        let mut place = cut_off(make, is_reached);
        host::remove_file(place.base("f")).unwrap();
        if replace {
            host::write(place.base("f"), "something longer").unwrap();
        }
        for _ in 0..2 {
            place.reopen();
            assert_eq!(place.in_base("f").as_deref(), replace.then_some("something longer"));
            assert_eq!(place.in_base("other").as_deref(), Some("other"));
            assert_eq!(place.get("other").as_deref(), Some("new"));
        }
        place.check("rolled back");
        let Reply::Applied(applied) = place.ask(Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: jailfs::sandbox::Consent::ALL,
        }) else {
            panic!("no apply")
        };
        assert!(
            applied.conflicts.iter().any(|(path, _)| path.to_string() == "f"),
            "{:?}",
            applied.conflicts
        );
    }
}

#[test]
fn a_rollback_does_not_remove_the_last_hard_link_of_content() {
    let make = || {
        let place = Place::new(&[("a", "the only copy")]);
        let file = place.find("a").unwrap();
        place.sandbox().fs().link(file, NodeId::ROOT, &name("c")).unwrap();
        place
    };
    let mut place = cut_off(make, |place| place.base("c").exists());
    host::remove_file(place.base("a")).unwrap();
    for _ in 0..2 {
        place.reopen();
        assert_eq!(place.in_base("c").as_deref(), Some("the only copy"));
    }
}

#[test]
fn a_hard_link_with_the_reused_number_of_a_removed_file_is_another_file() {
    use std::os::unix::fs::symlink;
    let number = std::cell::Cell::new(0);
    let make = || {
        let mut place = Place::new(&[]);
        symlink("before", place.base("link")).unwrap();
        number.set(place.base("link").symlink_metadata().unwrap().ino());
        place.reopen();
        place.rm("link");
        place
    };
    let mut place = cut_off(make, |place| place.base("link").symlink_metadata().is_err());
    // The host uses the number again, sooner or later.
    for number_of in 0..500 {
        let new = place.base(&format!("new{number_of}"));
        symlink("theirs", &new).unwrap();
        host::rename(&new, place.base("link")).unwrap();
        if place.base("link").symlink_metadata().unwrap().ino() == number.get() {
            break;
        }
        // Kept open, so that the next one has another number.
        host::rename(place.base("link"), new).unwrap();
    }
    if place.base("link").symlink_metadata().is_err() {
        symlink("theirs", place.base("link")).unwrap();
    }
    place.reopen();
    assert_eq!(place.base("link").read_link().unwrap().to_str(), Some("theirs"));
}

#[test]
fn writes_during_a_rollback_keep_their_bytes_and_mode() {
    let make = || {
        let place = Place::new(&[("a", "a"), ("b", "b"), ("f", "before")]);
        for (path, text) in [("a", "new a"), ("b", "new b"), ("f", "applied")] {
            place.put(path, text);
        }
        place.chmod("f", 0o640);
        place
    };
    let mut theirs = 0;
    for moment in (1..).step_by(2) {
        let mut place = cut_off(make, |place| place.in_base("f").as_deref() == Some("applied"));
        let (f, aside, me) =
            (place.base("f"), place.dir.path().join("aside"), std::thread::current().id());
        host::write(&aside, "theirs, and longer").unwrap();
        host::set_permissions(&aside, std::os::unix::fs::PermissionsExt::from_mode(0o604)).unwrap();
        let seen = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let counted = Arc::clone(&seen);
        failpoint::set_recorder(Some(Box::new(move |_| {
            if std::thread::current().id() == me
                && counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1 == moment
            {
                host::rename(&aside, &f).unwrap();
            }
        })));
        place.reopen();
        failpoint::set_recorder(None);
        if seen.load(std::sync::atomic::Ordering::SeqCst) < moment {
            break;
        }
        for _ in 0..2 {
            let (text, mode) =
                (place.in_base("f").unwrap(), place.base("f").metadata().unwrap().mode() & 0o777);
            let is_theirs = text == "theirs, and longer";
            assert!(
                is_theirs && mode == 0o604 || text == "before" && mode == 0o644,
                "{moment}: {text} {mode:o}"
            );
            theirs += u32::from(is_theirs);
            place.reopen();
        }
        assert_eq!(
            (place.in_base("a").as_deref(), place.in_base("b").as_deref()),
            (Some("a"), Some("b"))
        );
    }
    assert!(theirs > 0);
}
