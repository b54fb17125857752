//! `.jailfs/history`: the entries of the edit history as files.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use jailfs::error::FsError;
use jailfs::internals::fs::{RenameMode, SnapdirView};
use jailfs::sandbox::Bounds;
use jailfs::sandbox::{Reply, Request};
use jailfs::types::{FileKind, Name, NodeId, TreePath};

use crate::common::{Bench, Stop};
use crate::harness::{Live, shell};
use crate::library::{ME, Place, name};

#[test]
fn history_entries_are_files_that_cat_diff_cp_and_grep_read() {
    let live = Live::new(
        "mkdir src other; printf 'one\\n' > src/main.rs; chmod 640 src/main.rs; \
         chown 1234:4321 src/main.rs
        setfattr -n user.note -v kept src/main.rs; touch -d 2001-02-03T04:05:06.789 src/main.rs
        echo same > other/same",
    );
    live.sh("echo two > src/main.rs; printf 'three\\nlines\\n' > src/main.rs; \
        seq 1 50000 > src/gone; rm src/gone");
    assert_eq!(
        live.sh("ls .jailfs; ls .jailfs/history"),
        "checkpoints\nforks\nhistory\nlog\nstatus\nsrc\n"
    );
    assert_eq!(
        live.sh("ls .jailfs/history/src; ls .jailfs/history/src/*"),
        "\
gone\nmain.rs\n.jailfs/history/src/gone:\n1\n\n.jailfs/history/src/main.rs:\n1\n2\n"
    );
    let numbers: Vec<u64> = live
        .json(&["history", "src/main.rs"])
        .iter()
        .map(|line| line["number"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [2, 1], "the numbers that the command prints");
    assert_eq!(live.sh("cd .jailfs/history/src/main.rs; cat 1 2"), "one\ntwo\n");
    assert_eq!(
        live.sh("diff .jailfs/history/src/main.rs/2 src/main.rs || true"),
        "1c1,2\n< two\n---\n> three\n> lines\n"
    );
    assert_eq!(live.sh("grep -rl two .jailfs/history"), ".jailfs/history/src/main.rs/2\n");
    assert_eq!(live.sh("seq 1 50000 | cmp - .jailfs/history/src/gone/1"), "");
    // With its attributes, and as a file of its own.
    let about = "%f %u %g %s %h %Y.%y";
    assert_eq!(
        live.sh(&format!("stat -c '{about}' .jailfs/history/src/main.rs/1")),
        live.sh(&format!("cd {}; stat -c '{about}' src/main.rs", live.base.display()))
    );
    assert_eq!(
        live.sh("getfattr --only-values -n user.note .jailfs/history/src/main.rs/1"),
        "kept"
    );
    let numbers =
        live.sh("stat -c %i .jailfs/history/src/main.rs/* src/main.rs .jailfs/history/src");
    let numbers: std::collections::BTreeSet<&str> = numbers.lines().collect();
    assert_eq!(numbers.len(), 4, "each has its own number");
    // cp -a restores a deleted file and a former content.
    live.sh(
        "cp .jailfs/history/src/gone/1 src/gone; cp -a .jailfs/history/src/main.rs/1 src/main.rs",
    );
    assert_eq!(
        live.sh("seq 1 50000 | cmp - src/gone; cat src/main.rs; stat -c %u src/main.rs"),
        "one\n1234\n"
    );
    assert_eq!(live.sh("cat .jailfs/history/src/main.rs/3"), "three\nlines\n", "that was an edit");
    assert_eq!(
        live.sh("tar -C .jailfs -cf - history | tar -tf - | sort | head -4"),
        "\
history/\nhistory/src/\nhistory/src/gone/\nhistory/src/gone/1\n"
    );
    assert!(!live.exists(".jailfs/history/other") && !live.exists(".jailfs/history/src/main.rs/7"));
}

#[test]
fn a_lookup_after_an_edit_finds_its_entry() {
    let live = Live::new("mkdir d; echo 0 > d/f; echo 0 > d/g");
    let mut looker = live.puppet("");
    looker.run("held = os.open('.jailfs', os.O_RDONLY)");
    assert_eq!(looker.fail("os.listdir('.jailfs/history/d')"), "ENOENT");
    looker.gives("os.listdir('.jailfs/history')", "[]");
    live.sh("echo 1 > d/f");
    looker
        .gives("os.listdir('.jailfs/history'), os.listdir('.jailfs/history/d')", "(['d'], ['f'])");
    looker.run("os.chdir('.jailfs/history/d'); held = os.open('f', os.O_RDONLY)");
    for round in 1..6 {
        let all: Vec<String> = (1..=round).map(|number| format!("'{number}'")).collect();
        let all = format!("[{}]", all.join(", "));
        // By path, by an open descriptor, and from the working directory.
        looker.gives("sorted(os.listdir('f'))", &all);
        looker.gives("sorted(os.listdir(held))", &all);
        looker.gives("'g' in os.listdir('.')", if round > 3 { "True" } else { "False" });
        let next = round + 1;
        assert_eq!(looker.fail(&format!("os.stat('f/{next}')")), "ENOENT");
        live.sh(&format!("echo {next} > d/f"));
        looker.gives(&format!("open('f/{next}').read()"), &format!("'{round}\\n'"));
        if round == 3 {
            live.sh("rm d/g");
        }
    }
    // A restore is an edit, an undo too, and a rename takes the history along.
    live.sh("mv d e");
    looker.gives("os.listdir('.'), sorted(os.listdir('..'))", "([], ['e'])");
    looker.run("os.chdir('../e')");
    looker.gives("sorted(os.listdir('.')), len(os.listdir('f'))", "(['f', 'g'], 6)");
    live.jailfs(&["undo", "e/f"]);
    looker.gives("len(os.listdir('f')), open('f/7').read()", "(7, '6\\n')");
}

#[test]
fn a_path_that_was_a_file_and_is_a_directory_shows_both() {
    let live = Live::new("echo file > a");
    live.sh("echo more > a; rm a; mkdir a; echo x > a/1; echo y > a/1; echo x > a/b; rm a/b; \
        echo z > a/@2; rm a/@2");
    // Names in the directory stay; an entry with the same name is shown beside.
    assert_eq!(
        live.sh("cd .jailfs/history/a; ls; cat @1 2 1/1 b/1 @2/1"),
        "1\n2\n@1\n@2\nb\nfile\nmore\nx\nx\nz\n"
    );
    live.sh("mkdir a/2; echo v > a/2/deep; rm a/2/deep");
    assert_eq!(
        live.sh("cd .jailfs/history/a; ls; cat @1 @@2 2/deep/1"),
        "1\n2\n@1\n@2\n@@2\nb\nfile\nmore\nv\n"
    );
    for absent in ["@@1", "01", "+2", "@", "@@@2", "3", "4294967297"] {
        assert!(!live.exists(&format!(".jailfs/history/a/{absent}")), "{absent}");
    }
    live.sh("rm -r a; echo again > a");
    assert_eq!(
        live.sh("cat .jailfs/history/a/@1 .jailfs/history/a/2/deep/1 a"),
        "file\nv\nagain\n"
    );
}

#[test]
fn an_entry_that_is_dropped_while_it_is_read_is_stale_and_never_wrong() {
    let live = Live::with_options("mkdir d", &["-o", "history=2"]);
    let fill = |letter: &str| format!("head -c 3000000 /dev/zero | tr '\\0' {letter} > d/f");
    live.sh(&fill("a"));
    live.sh(&fill("b"));
    let mut reader = live.puppet(".jailfs/history/d");
    reader.run("f = os.open('f/1', os.O_RDONLY)");
    reader.gives("os.pread(f, 5, 0)", "b'aaaaa'");
    for letter in ["c", "d", "e", "f"] {
        live.sh(&fill(letter));
    }
    live.jailfs(&["gc"]);
    std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    assert_eq!(reader.fail("os.pread(f, 5, 2000000)"), "ESTALE");
    assert_eq!(reader.fail("os.pread(f, 5, 0)"), "ESTALE");
    reader.gives("sorted(os.listdir('f'))", "['4', '5']");
    // Another file at the path, whose entries have the same numbers.
    live.sh("mv d e; mkdir d; echo other > d/f; echo now > d/f");
    assert_eq!(reader.fail("os.pread(f, 5, 0)"), "ESTALE");
    reader.gives("open('../d/f/1').read(), open('../e/f/5').read(3)", "('other\\n', 'eee')");
}

#[test]
fn the_history_is_as_private_as_the_directory_of_the_file() {
    let live = Live::with_options(
        "mkdir open closed dead; chown 1234 dead; for d in open closed dead; do echo $d > $d/f; \
         done; echo p > open/private
        chmod 600 open/private; chmod 700 closed; mkdir shared; setfacl -m u:65534:--- shared
        echo s > shared/f",
        &["-o", "allow_other"],
    );
    live.sh("for f in open/f open/private closed/f dead/f shared/f; do echo more > $f; done; \
        rm -r dead");
    std::fs::set_permissions(live.outside(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    assert_eq!(live.sh("cat .jailfs/history/*/f/1"), "closed\ndead\nopen\ns\n");
    let mut other = live.puppet(".jailfs/history");
    other.run("os.setgid(65534)");
    other.run("os.setuid(65534)");
    other.gives(
        "sorted(os.listdir('.')), open('open/f/1').read()",
        "(['closed', 'dead', 'open', 'shared'], 'open\\n')",
    );
    for kept in ["open/private/1", "closed/f/1", "dead/f/1", "shared/f/1"] {
        assert_eq!(other.fail(&format!("open('{kept}').read()")), "EACCES", "{kept}");
    }
    assert_eq!(other.fail("os.listdir('closed')"), "EACCES");
    // The present directory decides.
    live.sh("chmod 755 closed; chmod 700 open");
    other.gives("open('closed/f/1').read()", "'closed\\n'");
    assert_eq!(other.fail("open('open/f/1').read()"), "EACCES");
    assert_eq!(
        live.sh("stat -c '%a %u' .jailfs/history/dead .jailfs/history/open .jailfs/history/open/f"),
        "\
700 0\n700 0\n555 0\n"
    );
}

#[test]
fn history_entries_survive_applies_restores_remounts_and_kills_unchanged() {
    let mut live = Live::new("mkdir d; echo base > d/f; seq 1 9999 > d/large");
    live.sh("echo two > d/f; sed -i s/7/x/ d/large; ln -s f d/link; rm d/link");
    let all = "cd .jailfs/history; find . -type f | sort; find . -type f -exec md5sum {} + | sort; \
        stat -c '%n %i %s %Y' d/*/*";
    let before = live.sh(all);
    assert_eq!(before.lines().next(), Some("./d/f/1"), "a link has no edits");
    live.checkpoint("x");
    live.jailfs(&["apply"]);
    live.applied = true;
    assert_eq!(live.sh(all), before);
    live.remount();
    assert_eq!(live.sh(all), before);
    live.kill_and_mount();
    assert_eq!(live.sh(all), before);
    live.sh("echo three > d/f");
    live.restore("x");
    assert_eq!(live.sh("cat .jailfs/history/d/f/*; cat d/f"), "base\ntwo\nthree\ntwo\n");
    assert_eq!(live.jailfs(&["show", "@:d/f"]), "two\n");
}

#[test]
fn with_the_history_or_the_snapshot_directory_off_there_is_none() {
    for (option, entered) in [("history=0", true), ("snapdir=off", false)] {
        let live = Live::with_options("echo one > f", &["-o", option]);
        live.sh("echo two > f; rm f");
        assert!(!live.exists(".jailfs/history") && live.exists(".jailfs") == entered, "{option}");
        if entered {
            let said = live.sh("ls .jailfs; stat -c %h .jailfs");
            assert_eq!(said, "checkpoints\nforks\nlog\nstatus\n4\n");
        }
    }
    // Under another name, and listed by the root.
    let live = Live::with_options("echo one > f", &["-o", "snapdir=visible,snapname=.was"]);
    live.sh("echo two > f");
    assert_eq!(live.sh("cat .was/history/f/1; ls -A"), "one\n.was\nf\n");
}

#[test]
fn a_command_under_run_finds_the_history_too() {
    let dir = tempfile::tempdir().unwrap();
    shell(dir.path(), "mkdir base; echo one > base/f");
    let script = "echo two > f; rm f; ls .jailfs/history; cat .jailfs/history/f/*";
    let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
    command.args(["run", "--discard", "--store", "../store", "--", "sh", "-c", script]);
    let output = command.current_dir(dir.path().join("base")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "f\none\ntwo\n", "{output:?}");
}

fn path(text: &str) -> TreePath {
    TreePath::parse(text.as_bytes()).unwrap()
}

#[test]
fn the_first_read_of_an_entry_costs_requests_and_cached_reads_cost_none() {
    let bench = Bench::over(|base| {
        std::fs::create_dir(base.join("src")).unwrap();
        std::fs::write(base.join("src/f"), "one").unwrap();
    });
    bench.fs.open_edits("main");
    bench
        .fs
        .show_snapdir(Some(SnapdirView { name: name(".jailfs"), listed: false, makes: false }))
        .unwrap();
    std::fs::write(bench.at("src/f"), "two").unwrap();
    let edit = bench.at(".jailfs/history/src/f/1");
    let messages = || {
        let all = ["lookup", "getattr", "read", "readdirplus", "open", "opendir"];
        all.map(|operation| bench.count(operation))
    };
    let cost = |what: &mut dyn FnMut()| {
        let before = messages();
        what();
        let after = messages();
        [0, 1, 2, 3, 4, 5].map(|at| after[at] - before[at])
    };
    assert_eq!(std::fs::read_to_string(&edit).unwrap(), "one");
    assert_eq!(std::fs::read_dir(edit.parent().unwrap()).unwrap().count(), 1);
    // The names are requested each time; attributes and content of an entry only once.
    let again = cost(&mut || assert_eq!(std::fs::read_to_string(&edit).unwrap(), "one"));
    eprintln!("reading an edit again: lookup, getattr, read, readdir, open, opendir: {again:?}");
    assert_eq!((again[0], &again[2..]), (3, &[0, 0, 0, 0][..]), "{again:?}");
    assert!(again[1] <= 4, "{again:?}");
    let listed =
        cost(&mut || assert_eq!(std::fs::read_dir(edit.parent().unwrap()).unwrap().count(), 1));
    eprintln!("listing the edits again: {listed:?}");
    assert_eq!(
        (listed[0], &listed[2..]),
        (2, &[0, 0, 0, 0][..]),
        "the listing is remembered: {listed:?}"
    );
    std::fs::write(bench.at("src/f"), "three").unwrap();
    let listed =
        cost(&mut || assert_eq!(std::fs::read_dir(edit.parent().unwrap()).unwrap().count(), 2));
    assert!(listed[3] > 0, "after an edit it is asked for: {listed:?}");
    // The live tree costs what it cost before.
    assert_eq!(std::fs::metadata(bench.at("src/f")).unwrap().len(), 5);
    let live =
        cost(&mut || assert_eq!(std::fs::read_to_string(bench.at("src/f")).unwrap(), "three"));
    assert_eq!(live[0], 0, "{live:?}");
    assert!(std::fs::metadata(&edit).unwrap().ino() > 1 << 52);
}

#[test]
fn the_kernel_drops_history_nodes_and_the_daemon_keeps_nothing_for_them() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    for number in 0..20 {
        place.put(&format!("d/f{number}"), "new");
    }
    let dir = place.find(".jailfs/history/d").unwrap();
    let mut held = vec![dir.id];
    for number in 0..20 {
        let of = place.find(&format!(".jailfs/history/d/f{number}")).unwrap();
        let edit = fs.lookup(of.id, &name("1")).unwrap();
        assert_eq!(
            (of.attr.kind, edit.attr.kind, edit.attr.size),
            (FileKind::Dir, FileKind::File, of_len(number))
        );
        assert_eq!(place.find(&format!(".jailfs/history/d/f{number}/1")).unwrap().id, edit.id);
        held.extend([of.id, edit.id]);
    }
    assert!(held.iter().all(|id| id.is_in_snapdir() && id.is_in_history()));
    assert_eq!(held.iter().collect::<std::collections::BTreeSet<_>>().len(), 41);
    assert_eq!(fs.held_snapdir(), 41);
    let before = fs.getattr(held[2]).unwrap();
    held.iter().for_each(|id| fs.forget(*id, 1000));
    assert_eq!(fs.held_snapdir(), 0);
    assert_eq!(fs.getattr(held[2]).unwrap_err(), FsError::NotFound);
    assert_eq!(
        place.find(".jailfs/history/d/f0/1").unwrap().attr,
        before,
        "it has the same number again"
    );
    assert_eq!(place.read(".jailfs/history/d/f13/1"), "13\n");
}

fn of_len(number: u64) -> u64 {
    number.to_string().len() as u64 + 1
}

#[test]
fn a_listing_of_the_history_misses_and_repeats_nothing_while_files_are_edited() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    let dir = place.find("d").unwrap().id;
    for number in 0..600 {
        fs.mknod(dir, &name(&format!("n{number}")), 0o100_644, 0, 0, ME).unwrap();
        place.put(&format!("d/n{number}"), "x");
        place.put(&format!("d/n{number}"), "y");
    }
    let history = place.find(".jailfs/history/d").unwrap().id;
    let (mut names, mut after, mut edited) = (Vec::new(), 0, 0);
    loop {
        let mut taken = 0;
        fs.readdir(history, after, |entry| {
            after = entry.cookie;
            names.push(entry.name);
            taken += 1;
            taken < 7
        })
        .unwrap();
        if taken < 7 {
            break;
        }
        // Entries come and go meanwhile.
        fs.mknod(dir, &name(&format!("later{edited}")), 0o100_644, 0, 0, ME).unwrap();
        place.put(&format!("d/later{edited}"), "x");
        fs.unlink(dir, &name(&format!("later{edited}"))).unwrap();
        edited += 1;
    }
    let distinct: std::collections::BTreeSet<&Vec<u8>> = names.iter().collect();
    assert_eq!(distinct.len(), names.len(), "none twice");
    for number in 0..600 {
        assert!(distinct.contains(&format!("n{number}").into_bytes()), "n{number}");
    }
    assert!(after <= i64::MAX as u64 && edited > 80);
}

#[test]
fn names_with_a_history_are_found_in_every_directory() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    let make = |path: &str| {
        let mut at = NodeId::ROOT;
        let parts: Vec<&str> = path.split('/').collect();
        for part in &parts[..parts.len() - 1] {
            at = match fs.lookup(at, &name(part)) {
                Ok(found) => found.id,
                Err(_) => fs.mkdir(at, &name(part), 0o755, 0, ME).unwrap().id,
            };
        }
        fs.mknod(at, &name(parts[parts.len() - 1]), 0o100_644, 0, 0, ME).unwrap();
        place.put(path, "x");
        fs.unlink(at, &name(parts[parts.len() - 1])).unwrap();
    };
    // '-' and '.' sort before '/', '0' after it.
    let long = "l".repeat(255);
    let paths = [
        "a/b",
        "a-b",
        "a.c",
        "a0",
        "a/b-c/d",
        "a/b/c",
        "a00",
        "z",
        &long,
        &format!("{long}/{long}/x"),
    ];
    let mut done: Vec<&str> = Vec::new();
    for path in paths {
        make(path);
        done.push(path);
        for dir in ["", "a", "a/b", "a-b", "a/b-c", "nothing", &long] {
            let mut wanted = std::collections::BTreeMap::new();
            for path in &done {
                let rest = if dir.is_empty() {
                    Some(*path)
                } else {
                    path.strip_prefix(&format!("{dir}/"))
                };
                let Some(rest) = rest else { continue };
                let (first, below) =
                    rest.split_once('/').map_or((rest, false), |(first, _)| (first, true));
                let found: &mut (bool, bool) = wanted.entry(name(first)).or_default();
                if below { found.1 = true } else { found.0 = true }
            }
            assert_eq!(fs.names_with_edits(&self::path(dir)), wanted, "in '{dir}' after {path}");
        }
    }
}

#[test]
fn a_dropped_entry_is_never_taken_for_a_later_one() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    fs.set_edit_bounds(Bounds { edits: 1, ..Bounds::default() });
    place.put("d/f0", "one");
    let first = place.find(".jailfs/history/d/f0/1").unwrap();
    place.put("d/f0", "two");
    assert_eq!(fs.snapdir_read(first.id, 0, 9, false).unwrap_err(), FsError::Stale);
    assert_eq!(fs.getattr(first.id).unwrap_err(), FsError::Stale);
    let second = place.find(".jailfs/history/d/f0/2").unwrap();
    // Everything is dropped, and numbers start again.
    fs.set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    assert_eq!(place.find(".jailfs/history").unwrap_err(), FsError::NotFound);
    assert_eq!(fs.snapdir_read(second.id, 0, 9, false).unwrap_err(), FsError::Stale);
    fs.set_edit_bounds(Bounds::default());
    place.put("d/f0", "three");
    let again = place.find(".jailfs/history/d/f0/1").unwrap();
    assert_ne!(again.id, first.id);
    assert_eq!(fs.snapdir_read(again.id, 0, 9, false).unwrap().unwrap(), b"two");
    assert_eq!(fs.snapdir_read(first.id, 0, 9, false).unwrap_err(), FsError::Stale);
    // After a directory has moved, its history entries are other nodes.
    let dir = place.find("d").unwrap().id;
    assert!(fs.getattr(dir).is_ok());
    fs.rename(NodeId::ROOT, &name("d"), NodeId::ROOT, &name("e"), RenameMode::Replace, 0).unwrap();
    assert_eq!(fs.snapdir_read(again.id, 0, 9, false).unwrap_err(), FsError::Stale);
    assert_eq!(place.read(".jailfs/history/e/f0/1"), "two");
    let Reply::History(edits) =
        place.sandbox.handle(Request::History { path: path("e/f0") }).unwrap()
    else {
        panic!("no history")
    };
    assert_eq!(edits.len(), 1);
}

/// Reads every entry of a file in parts. Each entry is one letter repeated. Returns how many could
/// be read.
fn read_all_versions(place: &Place, of: &str) -> usize {
    let fs = place.sandbox.fs();
    let mut whole = 0;
    let mut names = Vec::new();
    let Ok(dir) = place.find(of) else { return 0 };
    fs.readdir(dir.id, 2, |entry| {
        names.push(entry.name);
        true
    })
    .unwrap();
    for text in names {
        let edit = match fs.lookup(dir.id, &Name::new(&text).unwrap()) {
            Ok(edit) => edit,
            Err(error) => {
                assert_eq!(error, FsError::NotFound);
                continue;
            }
        };
        let (mut bytes, mut at) = (Vec::new(), 0);
        while at < edit.attr.size {
            match fs.snapdir_read(edit.id, at, 7000, false) {
                Ok(part) => bytes.extend(part.unwrap()),
                Err(error) => {
                    assert_eq!(error, FsError::Stale);
                    break;
                }
            }
            at += 7000;
        }
        let first = bytes.first().copied();
        assert!(bytes.iter().all(|byte| Some(*byte) == first), "bytes of two edits, or of none");
        assert!(first != Some(0));
        whole += usize::from(bytes.len() as u64 == edit.attr.size);
        fs.forget(edit.id, 1);
    }
    whole
}

#[test]
fn readers_of_the_history_meet_no_wrong_byte_while_files_are_edited_and_space_is_freed() {
    let place = Place::new();
    place.sandbox.fs().set_edit_bounds(Bounds { edits: 3, ..Bounds::default() });
    let dir = place.find("d").unwrap().id;
    place.sandbox.fs().mknod(dir, &name("new"), 0o100_644, 0, 0, ME).unwrap();
    let over = Stop::default();
    let read = std::thread::scope(|scope| {
        let at_the_end = over.at_the_end();
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut read = 0;
                    while !over.is_said() {
                        read += read_all_versions(&place, ".jailfs/history/d/new");
                    }
                    read
                })
            })
            .collect();
        for round in 0..120_u8 {
            let letter = char::from(b'a' + round % 26);
            place.put("d/new", &letter.to_string().repeat(20_000 + usize::from(round) * 100));
            match round % 12 {
                3 => place.checkpoint(&format!("c{round}")),
                6 => place.sandbox.compact().unwrap(),
                9 => {
                    let gc = Request::Gc {
                        operations: 0,
                        keep: Some(1),
                        max_store: None,
                        dry_run: false,
                    };
                    place.sandbox.handle(gc).unwrap();
                }
                _ => {}
            }
        }
        drop(at_the_end);
        readers.into_iter().map(|reader| reader.join().unwrap()).sum::<usize>()
    });
    assert!(read + read_all_versions(&place, ".jailfs/history/d/new") > 2, "{read}");
}
