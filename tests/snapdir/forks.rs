//! `.jailfs/forks` without a mount: the other heads as they are now.

use std::collections::BTreeSet;
use std::sync::Arc;

use jailfs::error::FsError;
use jailfs::internals::fs::{LinkReply, SetAttr, SetTime, SnapdirView};
use jailfs::internals::jail::Policy;
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{Reply, Request, Sandbox, View};
use jailfs::types::{Ino, NodeId, Timestamp};

use crate::library::{ME, Place, name};

fn fork(sandbox: &Sandbox, head: &str) {
    sandbox.handle(Request::Fork { names: vec![head.to_owned()], from: None }).unwrap();
}

/// A place whose sandbox is another head.
fn beside(place: &Place, head: &str, makes: bool) -> Place {
    let sandbox = place.sandbox.head(head).unwrap();
    let snapdir = Some(SnapdirView { name: name(".jailfs"), listed: false, makes });
    let mount_point = place.dir.path().join(head);
    let view = View { mount_point, policy: Policy::Deny, allowed_targets: Vec::new(), snapdir };
    sandbox.set_view(view).unwrap();
    Place { dir: tempfile::tempdir().unwrap(), sandbox }
}

fn listed(place: &Place, path: &str) -> Vec<(String, Ino)> {
    let dir = place.find(path).unwrap().id;
    let mut names = Vec::new();
    let take = |entry: jailfs::internals::fs::DirEntry| {
        names.push((String::from_utf8(entry.name).unwrap(), entry.ino));
        true
    };
    place.sandbox.fs().readdir(dir, 0, take).unwrap();
    names.retain(|(name, _)| name != "." && name != "..");
    names.sort();
    names
}

fn names(place: &Place, path: &str) -> Vec<String> {
    listed(place, path).into_iter().map(|(name, _)| name).collect()
}

#[test]
fn another_head_is_shown_as_it_is_now_open_or_not() {
    let place = Place::new();
    place.put("d/f0", "main\n");
    fork(&place.sandbox, "try");
    let (shown, file) = (".jailfs/forks/try", ".jailfs/forks/try/d/f0");
    assert_eq!(names(&place, ".jailfs/forks"), ["try"]);
    assert_eq!(place.read(file), "main\n", "a fork that is not open");
    let other = beside(&place, "try", true);
    assert_eq!(names(&other, ".jailfs/forks"), ["main"], "never the own head");
    for round in 0..3 {
        other.put("d/f0", &format!("round {round}\n"));
        assert_eq!(place.read(file), format!("round {round}\n"));
    }
    assert_eq!(other.read(".jailfs/forks/main/d/f0"), "main\n");
    let (fs, dir) = (other.sandbox.fs(), other.find("d").unwrap().id);
    fs.mknod(dir, &name("new"), 0o100_640, 0, 0, ME).unwrap();
    fs.unlink(dir, &name("f1")).unwrap();
    assert!(place.find(&format!("{shown}/d/f1")).is_err() && place.find("d/f1").is_ok());
    let all = names(&place, &format!("{shown}/d"));
    assert!(all.contains(&"new".to_owned()) && !all.contains(&"f1".to_owned()) && all.len() == 20);
    // Every attribute is that of the head, except the number, which is as it is listed.
    for (file, ino) in listed(&place, &format!("{shown}/d")) {
        let (here, there) =
            (place.find(&format!("{shown}/d/{file}")), other.find(&format!("d/{file}")));
        let (here, there) = (here.unwrap().attr, there.unwrap().attr);
        assert_eq!((here.meta, here.size, here.blocks), (there.meta, there.size, there.blocks));
        assert_eq!((here.ino, here.ino == there.ino), (ino, false), "{file}");
    }
    // Closed, opened again, and closed.
    drop(other);
    assert_eq!(place.read(file), "round 2\n");
    assert!(place.find(&format!("{shown}/d/f1")).is_err());
    let other = beside(&place, "try", true);
    other.put("d/f0", "again\n");
    assert_eq!(place.read(file), "again\n");
    drop(other);
    assert_eq!(place.read(file), "again\n");
    // An apply leaves them as they are.
    place.put("d/f2", "applied\n");
    place
        .sandbox
        .handle(Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: Default::default(),
        })
        .unwrap();
    assert_eq!(
        (place.read(&format!("{shown}/d/f2")), place.read(file)),
        ("2\n".into(), "again\n".into())
    );
    place.sandbox.handle(Request::DropFork { name: "try".to_owned() }).unwrap();
    assert_eq!(place.find(shown).unwrap_err(), FsError::NotFound);
    assert!(names(&place, ".jailfs/forks").is_empty());
}

#[test]
fn a_changed_file_of_another_head_is_another_node_and_an_open_one_keeps_its_size() {
    let place = Place::new();
    fork(&place.sandbox, "try");
    let (other, fs) = (beside(&place, "try", true), place.sandbox.fs());
    other.put("d/f0", "first\n");
    let find = |path: &str| place.find(&format!(".jailfs/forks/try/{path}")).unwrap().id;
    let (dir, first) = (find("d"), find("d/f0"));
    assert_eq!(find("d/f0"), first, "the same while it does not change");
    other.put("d/f0", "longer than before\n");
    let second = find("d/f0");
    assert!(first != second && find("d") == dir);
    // The one that was open has its size, and shows what is there now.
    assert_eq!(fs.getattr(first).unwrap().size, 6);
    let read = |id| fs.read(id, 0, 100).map(|plan| plan.read(false).unwrap().unwrap());
    assert_eq!(read(first).unwrap(), b"longer");
    assert_eq!(read(second).unwrap(), b"longer than before\n");
    other.put("d/f0", "s\n");
    assert_eq!(read(first).err(), Some(FsError::Stale), "it would have to show too little");
    // Gone, or replaced.
    let (of_base, base_dir) = (find("d/f3"), find("d"));
    let dir_there = other.find("d").unwrap().id;
    other.sandbox.fs().unlink(dir_there, &name("f0")).unwrap();
    other.sandbox.fs().unlink(dir_there, &name("f3")).unwrap();
    assert_eq!(read(second).err(), Some(FsError::Stale));
    assert_eq!(fs.getattr(of_base).err(), Some(FsError::Stale));
    for number in (1..20).filter(|number| *number != 3) {
        other.sandbox.fs().unlink(dir_there, &name(&format!("f{number}"))).unwrap();
    }
    other.sandbox.fs().rmdir(NodeId::ROOT, &name("d")).unwrap();
    assert_eq!(fs.getattr(base_dir).err(), Some(FsError::Stale));
    assert!(fs.readdir(base_dir, 0, |_| true).is_err());
    assert!(place.find("d/f3").is_ok(), "the own head has it");
    // Nodes that the kernel dropped cost nothing.
    for id in [dir, first, second, of_base, find("")] {
        fs.forget(id, 1000);
    }
    assert_eq!(fs.held_snapdir(), 0);
}

#[test]
fn a_version_that_comes_back_does_not_get_the_pages_of_another_one() {
    let place = Place::new();
    fork(&place.sandbox, "try");
    let other = beside(&place, "try", true);
    let fs = place.sandbox.fs();
    other.put("d/f0", "one\n");
    let checkpoint = Request::Checkpoint { name: Some("one".into()), message: String::new() };
    other.sandbox.handle(checkpoint).unwrap();
    let file = || place.find(".jailfs/forks/try/d/f0").unwrap().id;
    let restore = || {
        let to = jailfs::sandbox::Rev::parse("one");
        let request =
            Request::Restore { to, paths: Vec::new(), dry_run: false, detach_mounts: false };
        other.sandbox.handle(request).unwrap();
    };
    let first = file();
    other.put("d/f0", "two\n");
    restore();
    assert_eq!(file(), first, "nothing was read meanwhile");
    other.put("d/f0", "two\n");
    assert_eq!(fs.read(first, 0, 9).unwrap().read(false).unwrap().unwrap(), b"two\n");
    restore();
    let again = file();
    assert_ne!(again, first, "the kernel has other pages for that one");
    assert_eq!(fs.read(again, 0, 9).unwrap().read(false).unwrap().unwrap(), b"one\n");
}

#[test]
fn a_listing_that_its_mtime_does_not_tell_apart_is_of_another_node() {
    let place = Place::new();
    fork(&place.sandbox, "try");
    let other = beside(&place, "try", true);
    let there = other.find("d").unwrap().id;
    let time = Timestamp { secs: 1_000_000_000, nanos: 5 };
    let back = || {
        let set = SetAttr { mtime: Some(SetTime::To(time)), ..SetAttr::default() };
        other.sandbox.fs().setattr(there, set, false).unwrap();
    };
    back();
    let before = place.find(".jailfs/forks/try/d").unwrap();
    assert_eq!(before.attr.meta.mtime, time);
    assert_eq!(names(&place, ".jailfs/forks/try/d").len(), 20);
    assert_eq!(place.find(".jailfs/forks/try/d").unwrap().id, before.id);
    other.sandbox.fs().mknod(there, &name("new"), 0o100_644, 0, 0, ME).unwrap();
    assert_eq!(place.find(".jailfs/forks/try/d").unwrap().id, before.id, "another mtime");
    back();
    let after = place.find(".jailfs/forks/try/d").unwrap();
    assert_eq!((after.attr.meta.mtime, after.id != before.id), (time, true));
    assert_eq!(names(&place, ".jailfs/forks/try/d").len(), 21);
}

#[test]
fn mkdir_makes_a_fork_and_says_why_not() {
    let place = Place::new();
    place.put("d/f0", "now\n");
    let fs = place.sandbox.fs();
    let make = |text: &str| fs.mkdir(NodeId::FORKS, &name(text), 0o755, 0, ME).map(|made| made.id);
    assert_eq!(make("try"), Ok(place.find(".jailfs/forks/try").unwrap().id));
    assert_eq!(place.sandbox.head("try").unwrap().head_name(), "try");
    assert_eq!(place.read(".jailfs/forks/try/d/f0"), "now\n");
    assert!(place.sandbox.has_made("try") && !place.sandbox.has_made("main"));
    for used in ["try", "main"] {
        assert_eq!(make(used), Err(FsError::Exists), "{used}");
    }
    for bad in ["7", "base", "a@b", ".x", "-x", "x.new"] {
        assert_eq!(make(bad), Err(FsError::Invalid), "{bad}");
    }
    for used in ["try", "missing"] {
        assert_eq!(fs.rmdir(NodeId::FORKS, &name(used)), Err(FsError::NotPermitted));
    }
    place.put("d/f0", "later\n");
    let full = failpoint::with("fail:any:1+:ENOSPC", || make("full"));
    let Err(FsError::Store(error)) = full else { panic!("{full:?}") };
    assert!(error.is_full(), "{error}");
    assert_eq!(names(&place, ".jailfs/forks"), ["try"]);
    assert!(make("full").is_ok());
    // The option that switches off checkpoints by mkdir.
    let other = beside(&place, "try", false);
    let refused = other.sandbox.fs().mkdir(NodeId::FORKS, &name("x"), 0o755, 0, ME);
    assert_eq!(refused.err(), Some(FsError::ReadOnly));
    assert_eq!(other.find(".jailfs/forks").unwrap().attr.meta.mode & 0o777, 0o555);
}

#[test]
fn a_walled_head_sees_only_the_forks_that_came_from_it() {
    let place = Place::new();
    for head in ["one", "two"] {
        fork(&place.sandbox, head);
    }
    let one = beside(&place, "one", true);
    one.sandbox.show_only(BTreeSet::new());
    assert!(names(&one, ".jailfs/forks").is_empty());
    for head in ["main", "two"] {
        assert!(one.find(&format!(".jailfs/forks/{head}")).is_err(), "{head}");
    }
    one.sandbox.fs().mkdir(NodeId::FORKS, &name("mine"), 0o755, 0, ME).unwrap();
    fork(&place.sandbox.head("mine").unwrap(), "of-mine");
    fork(&place.sandbox.head("two").unwrap(), "of-two");
    assert_eq!(names(&one, ".jailfs/forks"), ["mine", "of-mine"]);
    // A later head of the same name is another one.
    let handle = |request| place.sandbox.handle(request).unwrap();
    handle(Request::DropFork { name: "mine".to_owned() });
    fork(&place.sandbox, "mine");
    assert!(names(&one, ".jailfs/forks").is_empty());
    assert!(!one.sandbox.has_made("mine"), "it has made the one that is dropped");
    assert_eq!(names(&place, ".jailfs/forks"), ["mine", "of-mine", "of-two", "one", "two"]);
}

#[test]
fn a_link_of_another_head_leads_into_its_tree_or_nowhere() {
    let place = Place::new();
    fork(&place.sandbox, "try");
    let other = beside(&place, "try", true);
    let there = other.sandbox.fs();
    let mut deep = NodeId::ROOT;
    for part in ["1", "2", "3", "4"] {
        deep = there.mkdir(deep, &name(part), 0o755, 0, ME).unwrap().id;
    }
    let of_base = place.dir.path().join("base/d/f0").display().to_string();
    let links = [
        (NodeId::ROOT, "near", "d/f0"),
        (other.find("1/2/3").unwrap().id, "up", "../../../d/f0"),
        (NodeId::ROOT, "absolute", &of_base),
        (deep, "high", "../../../../d/f0"),
        (NodeId::ROOT, "out", "../etc"),
        (deep, "far", "../../../../../../../../../etc"),
    ];
    for (dir, called, text) in links {
        there.symlink(dir, &name(called), text.as_bytes(), ME).unwrap();
    }
    let follow = |path: &str| {
        let id = place.find(&format!(".jailfs/forks/try/{path}")).unwrap().id;
        match place.sandbox.fs().readlink(id, 0) {
            Ok(LinkReply::Text(text)) => String::from_utf8(text).unwrap(),
            Ok(LinkReply::Wait(_)) => panic!("it waits"),
            Err(error) => error.to_string(),
        }
    };
    let refused = FsError::LeavesJail.to_string();
    assert_eq!(follow("near"), "d/f0");
    assert_eq!(follow("1/2/3/up"), "../../../d/f0");
    assert_eq!(follow("absolute"), "d/f0");
    // Its directory could have moved up to the root of the head by now.
    assert_eq!(follow("1/2/3/4/high"), refused);
    for path in ["out", "1/2/3/4/far"] {
        assert_eq!(follow(path), refused, "{path}");
    }
    let id = place.find(".jailfs/forks/try/1/2/3/4/high").unwrap().id;
    assert_eq!(place.sandbox.fs().link_text(id).unwrap(), b"../../../../d/f0");
}

#[test]
fn a_dry_run_of_a_restore_from_another_head_changes_nothing() {
    let place = Place::new();
    fork(&place.sandbox, "try");
    let other: Arc<Sandbox> = place.sandbox.head("try").unwrap();
    let there = beside(&place, "try", true);
    there.put("d/f0", "tried\n");
    let states = place.sandbox.states();
    for paths in [Vec::new(), vec![jailfs::types::TreePath::parse(b"d").unwrap()]] {
        let to = jailfs::sandbox::Rev::parse("try@");
        let request = Request::Restore { to, paths, dry_run: true, detach_mounts: false };
        let Reply::Restored(would) = place.sandbox.handle(request).unwrap() else { panic!() };
        assert_eq!(would.changes.to_vec().unwrap().len(), 1);
        assert!(would.to.contains("head 'try' as it is now"), "{}", would.to);
        assert_eq!(place.sandbox.states(), states, "no head is sealed");
    }
    assert_eq!(place.read("d/f0"), "0\n");
    drop((other, there));
    assert_eq!(place.sandbox.states(), states);
}
