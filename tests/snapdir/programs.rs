//! How people and programs use checkpoints in the mount.

use crate::harness::{Live, Shell, assert_same, shell, snapshot};

/// A base with every kind of node, and attributes of every kind.
const BASE: &str = r#"
    mkdir -p src/deep empty 'odd  name'
    echo 'fn main() {}' > src/main.rs; seq 1 2000 > src/deep/numbers; echo secret > src/private
    printf 'a\nb\n' > 'odd  name/new
line'
    ln src/main.rs src/deep/hard; ln -s main.rs src/link; ln -s ../src/deep src/up
    mkfifo pipe; truncate -s 1M sparse
    printf x | dd of=sparse bs=1 seek=500000 conv=notrunc 2> dev-null; rm dev-null
    chmod 600 src/private; chmod 4755 src/main.rs; chown 1234:4321 src/deep/numbers
    setfattr -n user.note -v hello src/main.rs
    setfacl -m u:1000:r src/private 2> no-acl || true; rm -f no-acl
    touch -d 2001-02-03T04:05:06.789 src/link -h; touch -d 1999-01-01 src/deep
"#;

/// A tree as it is seen, without inode numbers; directories above it have other numbers.
pub fn without_numbers(lines: Vec<String>) -> Vec<String> {
    let strip = |line: String| match (line.find(" ino="), line.find(" rdev=")) {
        (Some(from), Some(to)) => format!("{}{}", &line[..from], &line[to..]),
        _ => line,
    };
    lines.into_iter().map(strip).collect()
}

fn past(live: &Live, checkpoint: &str) -> std::path::PathBuf {
    live.mnt.join(".jailfs/checkpoints").join(checkpoint)
}

#[test]
fn a_checkpoint_in_the_mount_has_every_attribute_except_inode_numbers() {
    let mut live = Live::new(BASE);
    live.sh("echo more >> src/deep/numbers; mv src/private src/moved; rm -r empty; mkdir new; \
        echo n > new/n; ln new/n new/m");
    let one = without_numbers(live.snapshot());
    live.checkpoint("one");
    let check = |live: &Live, when: &str| {
        assert_same(&one, &without_numbers(snapshot(&past(live, "one"), false)), when);
    };
    check(&live, "at once");
    live.sh("rm -r src 'odd  name' sparse; echo other > src; mkdir empty");
    let two = without_numbers(live.snapshot());
    live.checkpoint("two");
    check(&live, "after everything was changed");
    live.jailfs(&["apply"]);
    live.applied = true;
    check(&live, "after an apply");
    assert_same(
        &two,
        &without_numbers(snapshot(&past(&live, "two"), false)),
        "the other one after an apply",
    );
    live.restore("one");
    check(&live, "after a restore");
    live.jailfs(&["apply", "--undo"]);
    check(&live, "after the apply was undone");
    live.remount();
    check(&live, "after a remount");
    live.kill_and_mount();
    check(&live, "after a kill");
    assert_same(
        &two,
        &without_numbers(snapshot(&past(&live, "two"), false)),
        "the other one at the end",
    );
}

#[test]
fn inode_numbers_in_a_checkpoint_are_its_own_and_equal_for_hard_links() {
    let live = Live::new(BASE);
    live.checkpoint("one");
    live.checkpoint("two");
    let said = live.sh("stat -c %i src/main.rs src/deep/hard
        for c in one two
        do (cd .jailfs/checkpoints/$c/src; stat -c %i main.rs deep/hard); done");
    let numbers: Vec<&str> = said.lines().collect();
    assert!(
        numbers[0] == numbers[1] && numbers[2] == numbers[3] && numbers[4] == numbers[5],
        "{said}"
    );
    assert!(
        numbers[0] != numbers[2] && numbers[2] != numbers[4] && numbers[0] != numbers[4],
        "{said}"
    );
    // They stay, also after the kernel has dropped all nodes.
    let of = |live: &Live| {
        live.sh("stat -c '%i %n' .jailfs/checkpoints/one/src/*; ls -i .jailfs/checkpoints/one/src")
    };
    let before = of(&live);
    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    assert_eq!(of(&live), before);
}

#[test]
fn diff_cp_rsync_tar_and_grep_work_on_a_checkpoint() {
    let live = Live::new(BASE);
    live.checkpoint("green");
    live.sh("echo 'fn main() { broken }' > src/main.rs; rm src/deep/numbers; echo new > src/new");
    let out = live.outside().display().to_string();
    let green = "mnt/.jailfs/checkpoints/green";
    let said = live.sh("diff -rq --no-dereference .jailfs/checkpoints/green/src src || true");
    for line in
        ["Files .jailfs/checkpoints/green/src/main.rs and src/main.rs differ", "Only in src: new"]
    {
        assert!(said.contains(line), "{line}: {said}");
    }
    assert_eq!(
        live.sh("grep -rl 'fn main() {}' .jailfs/checkpoints/green | sort"),
        "\
.jailfs/checkpoints/green/src/deep/hard\n.jailfs/checkpoints/green/src/main.rs\n"
    );
    let script = format!(
        "cd {out}; cp -a {green} copied; rsync -aHAX --modify-window=-1 {green}/ synced; \
         mkdir untarred
        tar --acls --xattrs -C {green} -cf t.tar . 2> /dev/null
        tar --acls --xattrs -C untarred -xpf t.tar"
    );
    live.sh(&script);
    let wanted: Vec<String> = without_numbers(snapshot(&past(&live, "green"), true));
    let plain = |lines: Vec<String>| -> Vec<String> {
        // Without the change time, which no program can set, and without blocks and access times,
        // which these do not keep.
        let cut = |line: String| line.split(" ctime=").next().unwrap_or_default().to_owned();
        without_numbers(lines).into_iter().map(cut).collect()
    };
    let wanted = plain(wanted);
    for copy in ["copied", "synced", "untarred"] {
        assert_same(&wanted, &plain(sized(snapshot(&live.outside().join(copy), true))), copy);
    }
    // cp restores a file.
    live.sh("cp -a .jailfs/checkpoints/green/src/main.rs src/main.rs");
    assert_eq!(live.read("src/main.rs"), "fn main() {}\n");
    shell(live.outside(), "rm -rf copied synced untarred t.tar");
}

/// On the host a directory with few names may have another size than 4,096.
fn sized(lines: Vec<String>) -> Vec<String> {
    lines
        .into_iter()
        .map(|line| {
            match (
                line.split(' ').any(|word| word.starts_with("40") || word.starts_with("41")),
                line.find(" size="),
            ) {
                (true, Some(at)) => {
                    let rest = line[at + 6..].find(' ').map_or("", |end| &line[at + 6 + end..]);
                    format!("{} size=4096{rest}", &line[..at])
                }
                _ => line,
            }
        })
        .collect()
}

#[test]
fn git_compares_its_work_tree_with_a_checkpoint_and_never_finds_the_snapshot_directory() {
    let live = Live::new(
        "git init -q .; echo one > f; mkdir d; echo two > d/g; git add -A; \
         git -c user.name=a -c user.email=b commit -qm x",
    );
    live.checkpoint("clean");
    live.sh("echo changed >> f; ls .jailfs/checkpoints > /dev/null");
    assert_eq!(live.sh("git status --porcelain"), " M f\n");
    assert_eq!(live.sh("git --work-tree=.jailfs/checkpoints/clean status --porcelain"), "");
    assert_eq!(live.sh("git --work-tree=.jailfs/checkpoints/clean diff --stat"), "");
    assert!(live.sh("git clean -ndx").is_empty());
    live.sh("git add -A; git -c user.name=a -c user.email=b commit -qm y; git stash -q || true");
    assert_eq!(live.sh("git ls-files"), "d/g\nf\n");
}

#[test]
fn a_walk_of_the_tree_does_not_find_the_snapshot_directory_unless_it_is_visible() {
    let mut live = Live::new("mkdir d; echo a > d/a; echo b > .hidden");
    live.checkpoint("one");
    live.sh("cat .jailfs/checkpoints/one/d/a > /dev/null");
    assert_eq!(live.sh("ls -A"), ".hidden\nd\n");
    assert_eq!(live.sh("find . | sort"), ".\n./.hidden\n./d\n./d/a\n");
    assert_eq!(live.sh("tar -cf - . | tar -tf - | sort"), "./\n./.hidden\n./d/\n./d/a\n");
    assert_eq!(live.sh("grep -rl . | sort"), ".hidden\nd/a\n");
    assert_eq!(live.sh("du -a | wc -l"), "4\n");
    assert_eq!(live.sh("stat -c %h ."), "3\n");
    live.sh("rm -rf * .[!.]*; rm -rf ./*");
    assert_eq!(
        live.sh("ls -A; ls .jailfs/checkpoints; cat .jailfs/checkpoints/one/d/a"),
        "one\na\n"
    );
    live.restore("one");
    live.umount();
    for (option, listed, entered) in
        [("snapdir=visible", true, true), ("snapdir=off", false, false)]
    {
        let place = live.outside().to_owned();
        let command =
            format!("{} mount base mnt --store store -o {option}", env!("CARGO_BIN_EXE_jailfs"));
        shell(&place, &command);
        assert_eq!(live.sh("ls -A").contains(".jailfs"), listed, "{option}");
        assert_eq!(live.exists(".jailfs/checkpoints/one"), entered, "{option}");
        let links = live.sh("stat -c %h .");
        assert_eq!(links, if listed { "4\n" } else { "3\n" }, "{option}");
        shell(&place, &format!("{} umount mnt", env!("CARGO_BIN_EXE_jailfs")));
    }
    live.mount();
}

#[test]
fn mkdir_makes_a_checkpoint_with_all_earlier_writes() {
    let live = Live::new("echo one > f; mkdir d");
    let mut writer = live.puppet("");
    writer.run("m = mapped('f')");
    writer.run("m.__setitem__(slice(0, 3), b'two')");
    live.sh("mkdir .jailfs/checkpoints/by-mkdir");
    assert_eq!(
        live.sh("cat .jailfs/checkpoints/by-mkdir/f; ls .jailfs/checkpoints"),
        "two\nby-mkdir\n"
    );
    let log = live.json(&["log"]);
    assert_eq!((log.len(), &log[0]["name"]), (1, &"by-mkdir".into()));
    // Its number leads to it as well, and the listing has the checkpoints that other commands made
    // and dropped.
    let id = log[0]["id"].to_string();
    assert_eq!(
        live.sh(&format!("readlink .jailfs/checkpoints/{id}; cat .jailfs/checkpoints/{id}/f")),
        "by-mkdir\ntwo\n"
    );
    live.jailfs(&["checkpoint"]);
    live.checkpoint("third");
    let unnamed = live.json(&["log"])[1]["id"].to_string();
    assert_eq!(live.sh("ls .jailfs/checkpoints"), format!("{unnamed}\nby-mkdir\nthird\n"));
    live.jailfs(&["drop", "third"]);
    assert_eq!(live.sh("ls .jailfs/checkpoints"), format!("{unnamed}\nby-mkdir\n"));
    assert!(!live.exists(".jailfs/checkpoints/third"));
    for (name, error) in [
        ("by-mkdir", "EEXIST"),
        ("base", "EINVAL"),
        ("@x", "EINVAL"),
        ("77", "EINVAL"),
        (&unnamed, "EEXIST"),
    ] {
        let said = writer.fail(&format!("os.mkdir('.jailfs/checkpoints/{name}')"));
        assert_eq!(said, error, "{name}");
    }
    assert_eq!(writer.fail("os.mkdir(b'.jailfs/checkpoints/\\xff')"), "EINVAL");
    assert_eq!(writer.fail("os.mkdir('.jailfs/checkpoints/' + 'x' * 256)"), "ENAMETOOLONG");
    writer.run("os.mkdir('.jailfs/checkpoints/odd name\\n')");
    writer.gives("'odd name\\n' in os.listdir('.jailfs/checkpoints')", "True");
    assert_eq!(writer.fail("os.rmdir('.jailfs/checkpoints/by-mkdir')"), "EPERM");
    assert_eq!(live.sh("cat .jailfs/checkpoints/by-mkdir/f"), "two\n");
}

#[test]
fn making_checkpoints_by_mkdir_can_be_switched_off() {
    let live = Live::with_options("echo one > f", &["-o", "nosnapmkdir"]);
    live.checkpoint("one");
    let mut shell = live.puppet("");
    assert_eq!(shell.fail("os.mkdir('.jailfs/checkpoints/two')"), "EROFS");
    shell.gives("os.listdir('.jailfs/checkpoints')", "['one']");
}

#[test]
fn the_text_files_are_current_at_every_read() {
    let live = Live::new("echo one > f");
    assert!(live.read(".jailfs/status").contains("checkpoint  none\n"));
    assert_eq!(live.read(".jailfs/log"), "");
    live.sh("echo two > g");
    live.jailfs(&["checkpoint", "green", "-m", "all tests\tpass"]);
    live.sh("echo three > h");
    let status = live.read(".jailfs/status");
    assert!(
        status.contains("'green', ")
            && status.contains("changed     1 path since the checkpoint\n"),
        "{status}"
    );
    let log = live.read(".jailfs/log");
    let fields: Vec<&str> = log.trim_end().split('\t').collect();
    assert_eq!((fields.len(), fields[1], fields[3]), (4, "green", "all tests\\tpass"), "{log}");
    // The size is right for a program that stats before it reads, and an open file keeps its
    // content.
    assert_eq!(
        live.sh("stat -c %s .jailfs/status; cat .jailfs/status | wc -c")
            .lines()
            .collect::<Vec<_>>()
            .len(),
        2
    );
    let sizes = live.sh("stat -c %s .jailfs/log; wc -c < .jailfs/log");
    let sizes: Vec<&str> = sizes.lines().collect();
    assert_eq!(sizes[0], sizes[1]);
    let mut reader = live.puppet("");
    reader.run("held = open('.jailfs/log')");
    live.checkpoint("later");
    reader.gives("'later' in held.read()", "False");
    reader.gives("'later' in open('.jailfs/log').read()", "True");
    assert_eq!(live.sh("ls -A .jailfs"), "checkpoints\nforks\nhistory\nlog\nstatus\n");
}

#[test]
fn the_xattr_of_the_last_change_is_shown_and_not_copied() {
    let live = Live::new("echo a > a; echo b > b; echo c > c; mkdir d; echo e > d/e");
    let origin =
        |path: &str| live.sh(&format!("getfattr --only-values -n user.jailfs.origin {path}"));
    live.sh("echo changed > a; chmod 600 b; touch d/new");
    assert_eq!(
        [origin("a"), origin("b"), origin("c"), origin("d/e")],
        ["upper", "upper", "base", "base"]
    );
    live.checkpoint("one");
    let one = live.json(&["log"])[0]["id"].to_string();
    live.sh("echo again > b");
    assert_eq!([origin("a"), origin("b")], [format!("layer {one}"), "upper".to_owned()]);
    live.checkpoint("two");
    let two = live.json(&["log"])[0]["id"].to_string();
    assert_eq!(
        [origin("a"), origin("b"), origin("d")],
        [format!("layer {one}"), format!("layer {two}"), format!("layer {one}")]
    );
    assert_eq!(origin(".jailfs/checkpoints/two/a"), format!("layer {one}"));
    assert_eq!(origin(".jailfs/checkpoints/two/c"), "base");
    // A file that was only copied up because its neighbours were is still the base's.
    live.sh("ln c c-too; rm c-too");
    assert_ne!(origin("c"), "base", "its change time is another");
    assert_eq!(live.sh("getfattr -d -m - a"), "");
    let mut setter = live.puppet("");
    assert_eq!(setter.fail("os.setxattr('a', 'user.jailfs.origin', b'x')"), "EPERM");
    assert_eq!(setter.fail("os.removexattr('a', 'user.jailfs.origin')"), "EPERM");
    let out = live.outside().display().to_string();
    live.sh(&format!("cp -a a {out}/copy"));
    assert_eq!(shell(live.outside(), "getfattr -d -m - copy; rm copy"), "");
}

#[test]
fn a_shell_in_a_checkpoint_works_on_through_restores_and_gets_errors_once_gc_frees_it() {
    let live = Live::new("mkdir -p src/deep; echo one > src/f; echo deep > src/deep/g");
    live.sh("echo two > src/f; seq 1 100000 > src/large");
    live.checkpoint("x");
    live.sh("rm -r src; echo none > src");
    live.checkpoint("y");
    let mut shell = Shell::start(&live.mnt.join(".jailfs/checkpoints/x/src"));
    shell.gives("cat f deep/g", "two\ndeep");
    for _ in 0..3 {
        live.restore("x");
        shell.gives("cat f; cd deep; cat g; cd ..", "two\ndeep");
        live.restore("y");
        shell.gives("ls; cat ../src/f", "deep\nf\nlarge\ntwo");
    }
    // The checkpoint is dropped and freed, with all operations that led to it: reads give an error,
    // and never wrong bytes. Data that was not read before cannot come from the page cache.
    live.jailfs(&["drop", "x"]);
    shell.gives("cat f", "two");
    live.jailfs(&["gc", "--operations", "0"]);
    let said = shell.run("head -c 20 large");
    assert!(said.contains("Stale file handle") || said.contains("Input/output error"), "{said}");
    let said = shell.run("ls deep/new-name");
    assert!(said.contains("status 2"), "{said}");
    shell.gives("cd ../../../..; cat src", "none");
}

#[test]
fn holders_of_files_restored_by_path_become_orphans_and_others_go_on() {
    let live = Live::new("mkdir d e; echo one > d/f; echo one > e/g; echo same > d/same");
    live.sh("echo two > d/f; echo two > e/g");
    live.checkpoint("two");
    live.sh("echo three > d/f; echo three > e/g; echo new > d/new");
    let mut holder = live.puppet("d");
    holder.run("f, g, same = open('f', 'r+'), open('../e/g', 'r+'), open('same', 'a+')");
    holder.run("f.read(), g.read()");
    let output = live.jailfs(&["restore", "two", "d"]);
    assert!(
        output.contains("D\td/new\n") && output.contains("undo: jailfs op restore "),
        "{output}"
    );
    assert_eq!(
        (live.read("d/f"), live.read("e/g"), live.exists("d/new")),
        ("two\n".into(), "three\n".into(), false)
    );
    // The holder of the restored file writes to an orphan. The others go on, and so does the file's
    // directory.
    holder.run(
        "f.write('lost'), f.flush(), g.write('kept'), g.flush(), same.write('kept'), same.flush()",
    );
    holder.gives("os.fstat(f.fileno()).st_nlink, sorted(os.listdir('.'))", "(0, ['f', 'same'])");
    assert_eq!(
        (live.read("d/f"), live.read("e/g"), live.read("d/same")),
        ("two\n".into(), "three\nkept".into(), "same\nkept".into())
    );
    holder.run("write('made', b'here')");
    assert_eq!(live.read("d/made"), "here");
    holder.end();
    // And from the command line in a directory of the mount.
    live.sh(&format!("cd e; {} restore two g ../d/f; cat g", env!("CARGO_BIN_EXE_jailfs")));
    assert_eq!(live.jailfs(&["show", "two:e/g"]), "two\n");
    assert_eq!(live.jailfs(&["show", "two:"]), "d/\ne/\n");
    assert_eq!(live.json(&["show", "@:d"]).len(), 3);
    let bytes = "import os; os.write(1, bytes(range(256)) * 40000)";
    live.sh(&format!("python3 -c '{bytes}' > binary"));
    live.checkpoint("three");
    live.sh("rm binary");
    let output = live.try_jailfs(&["show", "three:binary"]);
    assert_eq!(output.stdout, (0..=255).cycle().take(256 * 40_000).collect::<Vec<u8>>());
    for (what, code) in [("three:nothing", 10), ("nothing:binary", 10), ("three", 2)] {
        assert_eq!(live.try_jailfs(&["show", what]).status.code(), Some(code), "{what}");
    }
}
