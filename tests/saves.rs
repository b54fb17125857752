//! Edits, with the programs that people save files with, in a mount; and undo while the kernel has
//! the file cached.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::process::Command;

use harness::Live;

const TEXT: &str = "one\ntwo\nthree\n";

/// How a program saves: its name, and a script that changes the file `f`.
const SAVES: &[(&str, &str)] = &[
    ("a redirection", "printf 'new\\n' > f"),
    ("an appending redirection", "printf 'four\\n' >> f"),
    ("several appends at once", "for n in 4 5 6; do echo $n >> f; done"),
    ("tee", "printf 'new\\n' | tee f > /dev/null"),
    ("cp over it", "printf 'new\\n' > ../aside; cp ../aside f"),
    ("mv over it", "printf 'new\\n' > f.new; mv f.new f"),
    (
        "vim, which renames",
        "vim -u NONE -es -c 'set backupcopy=no backup' -c '%s/two/zwei/' -c 'wq' f",
    ),
    (
        "vim, in place",
        "vim -u NONE -es -c 'set backupcopy=yes nobackup' -c '%s/two/zwei/' -c 'wq' f",
    ),
    ("vim without a backup", "vim -u NONE -es -c 'set nowritebackup' -c '1d' -c 'wq' f"),
    ("sed -i", "sed -i s/two/zwei/ f"),
    ("perl -i", "perl -pi -e s/two/zwei/ f"),
    (
        "patch",
        "printf -- '--- f\\n+++ f\\n@@ -1,3 +1,3 @@\\n one\\n-two\\n+zwei\\n three\\n' | patch -s \
         f",
    ),
    ("python open('w')", "python3 -c \"open('f', 'w').write('new')\""),
    ("python open('a')", "python3 -c \"open('f', 'a').write('new')\""),
    (
        "python open('r+') and a new end",
        "python3 -c \"f = open('f', 'r+'); t = f.read(); f.seek(0); f.write(t[4:]); f.truncate(); \
         f.write('x')\"",
    ),
    (
        "python, written aside and renamed",
        "python3 -c \"import os, tempfile; n, p = tempfile.mkstemp(dir='.'); os.write(n, b'new'); \
         os.close(n); os.replace(p, 'f')\"",
    ),
    ("dd in the middle", "printf X | dd of=f bs=1 seek=5 conv=notrunc status=none"),
    (
        "a shared mapping",
        "python3 -c \"import mmap; f = open('f', 'r+b'); m = mmap.mmap(f.fileno(), 0); \
         m[0:3] = b'eno'; m.flush()\"",
    ),
    ("truncate", "truncate -s 4 f"),
    ("git checkout", "git checkout -q HEAD~1 -- f"),
    ("rm", "rm f"),
];

#[test]
fn each_way_to_save_a_file_is_one_edit() {
    let base = format!(
        "git init -q; git config user.email a@b; git config user.name n; printf 'first\\n' > f; \
         git add f;
         git commit -qm 1; printf '{}' > f; git commit -qam 2; for n in $(seq 0 {})
         do git clone -q . d$n; done",
        TEXT.replace('\n', "\\n"),
        SAVES.len() - 1
    );
    let live = Live::new(&base);
    for (at, (way, script)) in SAVES.iter().enumerate() {
        // A separate base file for each.
        let dir = format!("d{at}");
        live.sh(&format!("cd {dir} && {{ {script}; }}"));
        let path = format!("{dir}/f");
        let changed = live.exists(&path).then(|| live.read(&path));
        assert_ne!(changed.as_deref(), Some(TEXT), "{way}: it changes nothing");
        let history = live.json(&["history", &path]);
        assert_eq!(history.len(), 1, "{way}: {history:?}");
        assert_eq!(history[0]["number"], 1, "{way}");
        live.jailfs(&["undo", &path]);
        assert_eq!(live.read(&path), TEXT, "{way}: undone");
        live.jailfs(&["redo", &path]);
        assert_eq!(live.exists(&path).then(|| live.read(&path)), changed, "{way}: done again");
    }
}

#[test]
fn history_undo_redo_and_diff_are_as_documented() {
    let mut live = Live::new("mkdir src; printf 'fn main() {}\\n' > src/main.rs");
    live.sh("echo two > src/main.rs; echo three > src/main.rs");
    let said = live.jailfs(&["history", "src/main.rs"]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.len() == 2 && lines[0].trim_start().starts_with("2  "), "{said}");
    assert!(lines[0].ends_with("4 bytes  before it was truncated"), "{said}");
    let line = &live.json(&["history", "src/main.rs"])[1];
    assert_eq!(
        (&line["type"], &line["number"], &line["size"]),
        (&"version".into(), &1.into(), &13.into())
    );
    assert_eq!((&line["edit"], &line["path"]), (&"truncate".into(), &"src/main.rs".into()));
    let patch = live.jailfs(&["diff", "-p", "src/main.rs@2", "src/main.rs"]);
    assert!(patch.contains("-two\n+three\n"), "{patch}");
    assert!(live.jailfs(&["diff", "-p", "src/main.rs@1"]).contains("-fn main() {}\n+three\n"));
    assert_eq!(live.jailfs(&["diff", "src/main.rs@1", "src/main.rs@2"]), "M\tsrc/main.rs\n");
    assert_eq!(
        live.jailfs(&["undo", "src/main.rs"]),
        "undo: src/main.rs is version 2 now (4 bytes)\n"
    );
    assert_eq!(
        live.jailfs(&["undo", "src/main.rs"]),
        "undo: src/main.rs is version 1 now (13 bytes)\n"
    );
    let stepped = &live.json(&["redo", "src/main.rs", "-n", "2"])[0];
    assert_eq!((&stepped["type"], &stepped["verb"]), (&"stepped".into(), &"redo".into()));
    assert_eq!((&stepped["number"], &stepped["new_size"]), (&serde_json::Value::Null, &6.into()));
    for (words, code) in [
        (vec!["undo", "src/main.rs", "-n", "9"], 10),
        (vec!["redo", "src/main.rs"], 10),
        (vec!["undo", "src"], 1),
        (vec!["diff", "src/main.rs@9", "src/main.rs"], 10),
        (vec!["diff", "src/main.rs@1", "a", "b"], 2),
    ] {
        let output = live.try_jailfs(&words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("hint: "),
            "{words:?}: {output:?}"
        );
    }
    // After a remount and a kill, and in a store that is not mounted.
    live.kill_and_mount();
    assert_eq!(live.json(&["history", "src/main.rs"]).len(), 2);
    live.sh("rm -r src");
    live.umount();
    let offline = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let output =
            command.arg("--store").arg(&live.store).args(words).current_dir("/").output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(offline(&["history", "src/main.rs"]).contains("before it was removed"));
    offline(&["undo", "src/main.rs"]);
    live.mount();
    assert_eq!(live.read("src/main.rs"), "three\n");
    assert_eq!(live.sh("stat -c %a src src/main.rs"), "755\n644\n");
}

#[test]
fn an_undo_is_visible_at_once_and_holders_keep_their_content() {
    let live = Live::new("echo one > a; echo one > b");
    live.sh("cat a b; echo two > a; cat a");
    let mut holder = live.puppet("");
    holder.run("f = os.open('a', os.O_RDWR); assert os.read(f, 10) == b'two\\n'");
    holder.run("import mmap; m = mmap.mmap(f, 4)");
    live.jailfs(&["undo", "a"]);
    assert_eq!(live.read("a"), "one\n");
    holder.run("assert os.pread(f, 10, 0) == b'two\\n' and m[:] == b'two\\n'");
    holder.run("assert os.stat('a').st_ino == os.fstat(f).st_ino and os.fstat(f).st_nlink == 0");
    holder.run("m[0:3] = b'own'; m.flush(); os.write(f, b'x')");
    holder.run("assert open('a').read() == 'one\\n'");
    // The undo covers unsynced writes through a mapping, and redo restores them.
    holder.run("g = os.open('b', os.O_RDWR); n = mmap.mmap(g, 4); n[0:3] = b'map'");
    live.jailfs(&["undo", "b"]);
    assert_eq!(live.read("b"), "one\n");
    live.jailfs(&["redo", "b"]);
    assert_eq!(live.read("b"), "map\n");
    // A name that the kernel has as a negative dentry.
    live.sh("mkdir d; echo deep > d/f; rm -r d; ! stat d/f 2>/dev/null; ! stat d 2>/dev/null");
    live.jailfs(&["undo", "d/f"]);
    assert_eq!(live.sh("ls; ls d; cat d/f"), "a\nb\nd\nf\ndeep\n");
    live.jailfs(&["redo", "d/f"]);
    assert!(!live.exists("d/f") && live.exists("d"));
}

#[test]
fn a_recreated_directory_finds_the_history_of_its_files() {
    let live = Live::new("mkdir -p build/deep; echo 1 > build/deep/out");
    live.sh("rm -rf build; mkdir -p build/deep; echo 2 > build/deep/out");
    live.jailfs(&["undo", "build/deep/out"]);
    assert_eq!(live.read("build/deep/out"), "1\n");
    live.sh("mv build other");
    live.jailfs(&["redo", "other/deep/out"]);
    assert_eq!(live.read("other/deep/out"), "2\n");
}

#[test]
fn a_mount_option_sets_how_much_history_is_kept() {
    let mut live = Live::with_options("echo 0 > f", &["-o", "history=2,history-bytes=1M"]);
    live.sh("for n in 1 2 3 4; do echo $n > f; done");
    assert_eq!(live.json(&["history", "f"]).len(), 2);
    live.umount();
    live.options = vec!["-o", "history=0"];
    live.mount();
    live.sh("echo 5 > f");
    assert_eq!(live.jailfs(&["history", "f"]), "");
    assert_eq!(live.try_jailfs(&["undo", "f"]).status.code(), Some(10));
}

/// `JAILFS_REWRITES=873` does as many as the promise names; fewer make the same point.
#[test]
fn a_file_that_is_rewritten_often_has_ten_entries_that_share_content() {
    let rewrites: usize = std::env::var("JAILFS_REWRITES").map_or(60, |n| n.parse().unwrap());
    let live = Live::new("true");
    let before = live.json(&["status"])[0]["store_bytes"].as_u64().unwrap();
    let script = format!(
        "python3 -c \"
import random
r = random.Random(1)
b = bytearray()
for n in range({rewrites}):
    b += r.randbytes(4_100_000 // {rewrites})
    at = r.randrange(len(b))
    b[at:at + 10] = r.randbytes(10 + n % 3)
    open('f', 'wb').write(b)
\""
    );
    live.sh(&script);
    assert_eq!(live.json(&["history", "f"]).len(), 10);
    // In the background, when no file is being edited.
    let most = 8_000_000;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let stored = live.json(&["status"])[0]["store_bytes"].as_u64().unwrap() - before;
        if stored < most {
            eprintln!(
                "{rewrites} rewrites of a file growing to 4.1 MB: {stored} bytes in the store"
            );
            break;
        }
        assert!(std::time::Instant::now() < end, "{stored} bytes are stored");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(live.sh("stat -c %s f").trim().len(), 7);
}
