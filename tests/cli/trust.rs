//! Data from a command is neither trusted nor printed unescaped: names that act on a terminal, and
//! attributes that name another store.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::place::{Place, Said};

/// A name that would colour, retitle and reorder the text around it.
const HOSTILE: &str = "a\u{1b}[31m\u{1b}]0;x\u{7}\u{202e}gnp\u{2066}\u{200b}\u{85}\u{9b}2J\rb";

fn check(said: &Said, what: &str) {
    let acts = |c: char| jailfs::types::is_unprintable(c) && !matches!(c, '\n' | '\t');
    for (stream, text) in [("output", &said.out), ("error", &said.err)] {
        let found: Vec<char> = text.chars().filter(|c| acts(*c)).collect();
        assert_eq!(found, [' '; 0], "{what}: the standard {stream} has {found:?}: {text:?}");
    }
}

#[test]
fn nothing_that_is_printed_acts_on_a_terminal() {
    let place = Place::new();
    place.mount();
    let tree = place.at("mnt");
    std::fs::create_dir(tree.join(HOSTILE)).unwrap();
    std::fs::write(tree.join(HOSTILE).join("file"), "one\n").unwrap();
    std::os::unix::fs::symlink(format!("/etc/{HOSTILE}"), tree.join("link")).unwrap();
    std::fs::read(tree.join("link")).unwrap_err();
    check(&place.call("mnt", ["checkpoint", "-m", HOSTILE, HOSTILE]), "checkpoint");
    std::fs::write(tree.join(HOSTILE).join("file"), "two\n").unwrap();
    std::fs::rename(tree.join("a"), tree.join(format!("{HOSTILE}2"))).unwrap();
    for line in [
        "status",
        "status --json",
        "diff",
        "diff --stat",
        "diff --json",
        "diff base",
        "log",
        "log --json",
        "op log",
        "op log --json",
        "apply --dry-run",
        "apply --dry-run --json",
        "info",
        "restore --dry-run @-1",
        "discard",
        "gc",
        "undo link",
    ] {
        check(&place.say("mnt", line), line);
    }
    let file = format!("{HOSTILE}/file");
    for words in [
        vec!["show", HOSTILE],
        vec!["show", "--json", &file],
        vec!["history", &file],
        vec!["undo", &file],
        vec!["restore", "1", &file],
        vec!["diff", HOSTILE, "b"],
        vec!["drop", HOSTILE],
        vec!["hold", HOSTILE],
        vec!["apply", HOSTILE],
        vec!["restore", "missing\u{1b}[0m"],
        vec!["-C", HOSTILE, "status"],
        vec!["--store", HOSTILE, "log"],
    ] {
        check(&place.call("mnt", &words), &format!("{words:?}"));
    }
    // For a busy mount point the message names the path and the processes.
    place.umount();
    let point = place.at(format!("p{HOSTILE}"));
    std::fs::create_dir(&point).unwrap();
    check(&place.call("", ["mount", "base", point.to_str().unwrap()]), "mount");
    let held = std::fs::read_dir(&point).unwrap();
    let busy = place.call("", ["umount", point.to_str().unwrap()]);
    assert_ne!(busy.code, 0, "{busy:?}");
    check(&busy, "umount of what is busy");
    drop(held);
    check(&place.call("", ["umount", point.to_str().unwrap()]), "umount");
    // The list at the end of a run.
    let script = format!(
        "mkdir -p '{HOSTILE}/x'; ln -s '{HOSTILE}' l2; sleep 30 & exec -a '{HOSTILE}' true"
    );
    check(&place.call("base", ["run", "--keep", "--", "bash", "-c", &script]), "run");
    check(
        &place.call("base", ["run", "--discard", "--", HOSTILE]),
        "run of a command that is not there",
    );
}

/// Any user can set the attribute on a directory of an ordinary filesystem. Root's client must not
/// connect to a socket of that user.
#[test]
fn the_store_attribute_is_trusted_on_our_own_mounts_only() {
    let place = Place::new();
    for dir in ["planted", "fake"] {
        std::fs::create_dir(place.at(dir)).unwrap();
        std::fs::set_permissions(place.at(dir), PermissionsExt::from_mode(0o777)).unwrap();
    }
    place.write("fake/format", "jailfs-store 1\n");
    let listener = UnixListener::bind(place.at("fake/control")).unwrap();
    let asked = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            counted.fetch_add(1, Ordering::SeqCst);
            drop((&stream).read(&mut [0]));
        }
    });
    let set = "setfattr -n user.jailfs.store -v \"$PWD/fake\" planted; \
        setfattr -n user.jailfs.store -v \"$PWD/fake\" base";
    let said = place.sh("", set);
    assert_eq!(said.code, 0, "{said:?}");
    for line in ["status", "diff", "log", "checkpoint x", "discard", "apply", "umount ."] {
        let said = place.say("planted", line);
        assert_ne!(said.code, 0, "{line}: {said:?}");
    }
    assert_eq!(
        place.run("--keep", "echo x > y").code,
        0,
        "a base with the attribute is an ordinary directory"
    );
    assert_eq!(asked.load(Ordering::SeqCst), 0, "the socket of another user was asked");
    // On our own mount it is trusted.
    place.mount();
    place.ok("mnt", "status");
}
