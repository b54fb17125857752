//! A store in another place.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use jailfs::sandbox::Sandbox;

use crate::harness::{Live, assert_same, shell, snapshot};
use crate::states::{check, states};
use crate::{jailfs, refused, said, text};

const BASE: &str = "mkdir d; seq 9000 > d/big; echo one > one; ln one two; ln -s one link; \
    setfattr -n user.k -v v one";

/// Every kind of content in a pool: holes, punched blocks, large and small files.
fn worked() -> Live {
    let mut live = Live::new(BASE);
    live.sh("echo x >> d/big; truncate -s 3M sparse; seq 100 | dd of=sparse bs=1k seek=2000 \
        conv=notrunc status=none");
    live.sh(
        "head -c 300000 /dev/urandom > gone; head -c 70000 /dev/urandom > kept; mkdir -p a/b; \
         mv one a/b/",
    );
    live.checkpoint("first");
    live.sh("rm gone; head -c 5000 /dev/zero > zeros; echo y >> two; chmod 600 kept");
    live.checkpoint("second");
    live.sh("echo unsealed > unsealed");
    live.umount();
    // This creates checksums and an index.
    Sandbox::open(&live.store).unwrap().compact().unwrap();
    live
}

#[test]
fn a_store_opens_wherever_and_however_it_was_copied() {
    let live = worked();
    let before = states(&live.store);
    let place = live.outside().to_owned();
    for (at, copy) in [
        ("cp", "cp -a store cp"),
        ("rsync", "rsync -a store/ rsync"),
        ("rsync-sparse", "rsync -aS store/ rsync-sparse"),
        ("tar", "mkdir tar; tar cf - -C store . | tar xf - -C tar"),
        // Every hole was filled with zeros.
        ("full", "cp -a --sparse=never store full"),
        ("moved", "cp -a store other; mv other moved"),
    ] {
        shell(&place, copy);
        let copied = place.join(at);
        check(&copied, at);
        assert_eq!(states(&copied), before, "{at}");
        check(&copied, &format!("{at}, opened"));
        // The copy is used.
        said(&place, &["--store", at, "checkpoint", "third"]);
        said(&place, &["--store", at, "restore", "first"]);
        said(&place, &["--store", at, "gc", "--operations", "0"]);
        check(&copied, &format!("{at}, worked with"));
        assert_eq!(states(&copied)["@"], before["1"], "{at}: restored");
    }
    assert_eq!(states(&live.store), before, "the first one knows nothing of it");
}

#[test]
fn two_copies_of_a_store_do_not_overwrite_each_other() {
    let mut live = worked();
    let place = live.outside().to_owned();
    shell(&place, "cp -a store copy; mkdir other");
    live.mount();
    said(&place, &["mount", text(&live.base), "other", "--store", "copy"]);
    let other = place.join("other");
    assert_same(&live.snapshot(), &snapshot(&other, false), "the copy");
    live.sh("echo mine > mine; echo mine >> one-more");
    shell(&other, "echo theirs > theirs; echo theirs >> one-more; rm -r d");
    assert!(!live.exists("theirs") && live.exists("d/big") && live.read("one-more") == "mine\n");
    // Both apply; the second one gets the changes of the first as conflicts.
    live.applied = true;
    live.jailfs(&["apply"]);
    let output = refused(&other, &["apply"], 3);
    assert!(output.contains("one-more"), "{output}");
    assert_eq!(std::fs::read_to_string(live.base.join("one-more")).unwrap(), "mine\n");
    said(&other, &["restore", "second"]);
    said(&place, &["umount", "other"]);
}

#[test]
fn a_store_that_is_moved_while_mounted_stays_whole() {
    let mut live = worked();
    live.mount();
    let place = live.outside().to_owned();
    let mut holder = live.puppet("");
    holder.run("f = open('kept', 'r+b')");
    shell(&place, "mv store elsewhere");
    live.sh("echo late > late");
    // An orphan of a restore writes to a scratch file in the store.
    said(&place, &["--store", "elsewhere", "restore", "first"]);
    holder.run("f.write(b'mine'); f.flush()");
    holder.gives("f.seek(0) or f.read(4)", "b'mine'");
    holder.end();
    said(&place, &["--store", "elsewhere", "op", "restore", "3"]);
    said(&place, &["--store", "elsewhere", "checkpoint", "late"]);
    shell(&place, "mv elsewhere store");
    live.remount();
    assert!(live.jailfs(&["log"]).contains("late"));
}

#[test]
fn a_second_mount_of_a_head_is_refused_and_names_the_first() {
    let live = Live::new("echo x > f");
    let place = live.outside().to_owned();
    std::fs::create_dir(place.join("other")).unwrap();
    let output = refused(&place, &["mount", text(&live.base), "other", "--store", "store"], 11);
    let pid = live.json(&["status"])[0]["pid"].to_string();
    for part in [text(&live.mnt), &format!("process {pid}"), "jailfs umount", "--store DIR"] {
        assert!(output.contains(part), "{part}: {output}");
    }
}

#[test]
fn commands_on_an_unmounted_store_work_and_lock_it() {
    let live = worked();
    let place = live.outside().to_owned();
    for words in [&["status"][..], &["log"], &["op", "log"], &["check", "--read-data"]] {
        said(&place, &[&["--store", "store"], words].concat());
    }
    let held = Sandbox::open(&live.store).unwrap();
    for words in [
        &["status"][..],
        &["checkpoint"],
        &["restore", "first"],
        &["gc"],
        &["apply"],
        &["check", "--repair"],
    ] {
        let output = refused(&place, &[&["--store", "store"], words].concat(), 11);
        assert!(
            output.contains("another jailfs has it open") && output.contains("hint: "),
            "{words:?}: {output}"
        );
        // The process that holds it.
        assert!(output.contains(&format!("process {}", std::process::id())), "{words:?}: {output}");
    }
    drop(held);
    said(&place, &["--store", "store", "status"]);
}

#[test]
fn the_lock_of_a_killed_daemon_blocks_nothing() {
    let mut live = Live::new("echo x > f");
    live.sh("echo y >> f");
    live.kill_and_mount();
    assert_eq!(live.read("f"), "x\ny\n");
    live.umount();
    assert!(live.store.join("lock").exists());
    // The lock's content and the socket of a dead process block nothing either.
    std::fs::write(live.store.join("lock"), "999999999\n").unwrap();
    std::os::unix::net::UnixListener::bind(live.store.join("control")).map(drop).unwrap();
    said(live.outside(), &["--store", "store", "status"]);
}

/// A store of another user, or one that others can write, is refused: `apply` would write its
/// content into the base.
#[test]
fn a_store_that_others_can_write_is_refused() {
    let live = worked();
    let place = live.outside().to_owned();
    let words = ["--store", "store", "status"];
    for mode in ["770", "707", "777", "720", "702"] {
        shell(&place, &format!("chmod {mode} store"));
        let output = refused(&place, &words, 1);
        assert!(
            output.contains("others can write") && output.contains("chmod 700"),
            "{mode}: {output}"
        );
    }
    for mode in ["700", "750", "755"] {
        shell(&place, &format!("chmod {mode} store"));
        said(&place, &words);
    }
    shell(&place, "chmod 700 store; chown 4242 store");
    let output = refused(&place, &words, 1);
    assert!(output.contains("user 4242") && output.contains("hint: "), "{output}");
    shell(&place, "chown 0 store");
    assert_eq!(std::fs::metadata(&live.store).unwrap().uid(), 0);
    said(&place, &words);
}

/// A directory that is not a store keeps its content and mode: other programs may use it.
#[test]
fn a_directory_with_other_files_is_refused_and_unchanged() {
    let live = Live::new("echo base > base");
    let other = live.outside().join("other");
    shell(live.outside(), "mkdir -m 1777 other; echo theirs > other/file; mkdir base2 mnt2");
    let output = refused(live.outside(), &["mount", "base2", "mnt2", "--store", "other"], 1);
    assert!(output.contains("the directory holds 'file'"), "{output}");
    assert_eq!(std::fs::metadata(&other).unwrap().mode() & 0o7777, 0o1777);
}

/// The hint says what to do about a store of a newer jailfs.
#[test]
fn a_newer_format_is_refused_with_a_hint() {
    let live = worked();
    let place = live.outside().to_owned();
    let format = live.store.join("format");
    let known = std::fs::read_to_string(&format).unwrap();
    std::fs::write(&format, "jailfs-store 2\n").unwrap();
    let mount = ["mount", text(&live.base), "mnt", "--store", "store"];
    for words in [&["--store", "store", "status"][..], &["--store", "store", "check"], &mount] {
        let output = refused(&place, words, 1);
        assert!(output.contains("has format 2, this jailfs knows format 1"), "{output}");
        assert!(output.contains("hint: use the newer jailfs"), "{output}");
    }
    // Nothing was changed.
    std::fs::write(&format, known).unwrap();
    check(&live.store, "refused");
    // A format that is not a number is damage.
    std::fs::write(&format, "something else\n").unwrap();
    refused(&place, &["--store", "store", "status"], 4);
    std::fs::remove_file(&format).unwrap();
    refused(&place, &["--store", "store", "status"], 10);
    assert!(
        jailfs(Path::new("/"), &["--store", "/nonexistent", "status"]).status.code() == Some(10)
    );
}
