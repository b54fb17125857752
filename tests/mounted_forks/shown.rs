//! `.jailfs/forks` in real mounts: the kernel's caches, several mounts that look at each other, and
//! mkdir.

use std::process::Command;

use crate::harness::{Live, assert_same, text};
use crate::{Forked, read, seen, sh, until, write};

const BASE: &str = "mkdir -p dir/deep; echo 1 > dir/1; echo 2 > dir/2; ln dir/2 dir/hard; \
    ln -s ../1 dir/deep/link; ln -s /dir/1 dir/absolute; mkfifo fifo; chmod 600 dir/2; \
    setfattr -n user.note -v text dir/1; truncate -s 1M sparse";

/// Everything that can be seen of a tree except inode numbers. A listing can have those of earlier
/// versions of files.
fn without_numbers(lines: Vec<String>) -> Vec<String> {
    let strip = |line: String| match (line.find(" ino="), line.find(" rdev=")) {
        (Some(from), Some(to)) => format!("{}{}", &line[..from], &line[to..]),
        _ => line,
    };
    let has_number = |line: &String| line.contains(" is listed as ");
    lines.into_iter().filter(|line| !has_number(line)).map(strip).collect()
}

#[test]
fn the_other_heads_are_shown_with_every_attribute_except_inode_numbers() {
    let mut forked = Forked::new(BASE);
    let main = forked.live.mnt.clone();
    let tried = forked.fork("try");
    let shown = main.join(".jailfs/forks/try");
    let check = |when: &str| {
        assert_same(&without_numbers(seen(&tried)), &without_numbers(seen(&shown)), when);
    };
    check("at once");
    // Each change is seen by the next look, whatever was cached before.
    let changes = [
        "echo changed > dir/1",
        "echo more >> dir/1",
        "printf 3 | dd of=dir/1 conv=notrunc status=none",
        "mv dir/1 dir/one; mkdir dir/1; echo new > dir/1/new",
        "rm -r dir/1; mv dir moved",
        "mv moved/deep deep; chmod 700 deep; chown 7:7 deep/link -h",
        "touch -r deep stamp; touch deep/x; touch -r stamp deep",
        "rm deep/x; touch -r stamp deep",
        "truncate -s 3 sparse; truncate -s 9 sparse; setfattr -x user.note moved/one",
        "rm -r moved; mkdir moved; echo 5 > moved/2",
    ];
    for change in changes {
        sh(&tried, change);
        check(change);
    }
    forked.run_in(&tried, &["restore", "base"]);
    check("after a restore");
    sh(&tried, "echo tried > dir/2; rm fifo");
    forked.run_in(&main, &["restore", "base"]);
    write(main.join("dir/1"), "of main\n");
    check("after a restore and a change of the own head");
    forked.run_in(&main, &["apply"]);
    forked.live.applied = true;
    check("after an apply of the own head");
    let last = without_numbers(seen(&tried));
    forked.umount(&tried);
    assert_same(&last, &without_numbers(seen(&shown)), "when it is not mounted");
    let again = forked.mount("try");
    sh(&again, "echo again > dir/2");
    assert_eq!(read(shown.join("dir/2")), "again\n");
    forked.umount(&again);
    assert_eq!(read(shown.join("dir/2")), "again\n");
    assert_eq!(sh(&main, "ls .jailfs/forks"), "try\n");
    forked.run_in(&main, &["fork", "--drop", "try"]);
    assert_eq!(sh(&main, "ls .jailfs/forks"), "");
    assert!(!shown.exists());
}

#[test]
fn nothing_of_another_head_can_be_changed_and_programs_read_it() {
    let forked = Forked::new(BASE);
    let main = forked.live.mnt.clone();
    let tried = forked.fork("try");
    let before = seen(&tried);
    let said = sh(
        &main,
        "cd .jailfs/forks
        for change in 'echo x > try/dir/1' 'echo x >> try/new' 'rm try/dir/1' 'mkdir try/new' \
            'chmod 777 try/dir' 'touch try/dir/1' 'mv try/dir/1 try/dir/9' 'mv try other' \
            'ln try/dir/1 9' 'ln -s x try/x' 'rmdir try' 'rmdir missing' 'touch x' \
            'setfattr -n user.x -v y try/dir/1' 'truncate -s 0 try/dir/1' 'mv try/dir/1 ../../9'
        do sh -c \"$change\" 2> /dev/null && echo \"done: $change\"
        done
        rmdir try 2>&1 | grep -o 'Operation not permitted'
        cp -a try ../../copy && rm ../../copy/fifo
        diff -r --no-dereference --exclude fifo try ../../copy && echo copied
        cat try/dir/deep/link
        cd try/dir; ls; cd deep; cat ../1; cd ../../..; pwd -P | grep -o '/.jailfs.*'
        tar cf - try | tar tf - | wc -l; find try -type f | wc -l",
    );
    assert_eq!(
        said,
        "Operation not permitted\ncopied\n1\n1\n2\nabsolute\ndeep\nhard\n1\n/.jailfs/forks\n10\n\
         4\n"
    );
    assert_same(&before, &seen(&tried), "the other head");
}

#[test]
fn mounts_that_look_at_each_other_see_no_old_and_no_torn_file_and_never_wait() {
    let forked = Forked::new("mkdir dir; echo 0 > dir/n; ln -s n dir/l");
    let main = forked.live.mnt.clone();
    let tried = forked.fork("try");
    // Each of the two replaces a file, rewrites one in place, and reads those of the other, while a
    // third process makes checkpoints and forks.
    let script = r#"
        last=0
        for i in $(seq 150); do
            echo $i > dir/new; mv dir/new dir/n; yes $i | head -c 9000 > dir/big; mkdir -p d$i
            now=$(cat .jailfs/forks/$1/dir/l 2>&1) || {
                # It was replaced between open(2) and read(2).
                case $now in *"Stale file handle") ;; *) echo "$now" ;; esac; continue; }
            [ $now -ge $last ] || echo "$now after $last"
            last=$now
            ls .jailfs/forks/$1 > /dev/null; cat .jailfs/forks/$1/dir/big > /dev/null 2>&1
        done; echo done"#;
    let spawn = |dir: &std::path::Path, other: &str| {
        let mut command = Command::new("timeout");
        let command = command.args(["90", "sh", "-c", script, "sh", other]).current_dir(dir);
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let (one, two) = (spawn(&main, "try"), spawn(&tried, "main"));
    for number in 0..10 {
        forked.run_in(&main, &["checkpoint"]);
        forked.run_in(&tried, &["checkpoint"]);
        forked.run_in(&tried, &["fork", &format!("f{number}")]);
        assert!(sh(&main, "ls .jailfs/forks").contains(&format!("f{number}\n")));
    }
    for running in [one, two] {
        let output = running.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{}", text(&output));
    }
    for (here, other) in [(&main, "try"), (&tried, "main")] {
        let shown = here.join(".jailfs/forks").join(other);
        assert_eq!(read(shown.join("dir/n")), "150\n");
        assert_eq!(read(shown.join("dir/big")), "150\n".repeat(2250));
    }
    // A mount that ends while it is looked at ends, and can be dropped.
    let mut looks = Command::new("sh");
    looks.args(["-c", "while ls -R .jailfs/forks/try; do :; done > /dev/null 2>&1"]);
    let mut looks = looks.current_dir(&main).spawn().unwrap();
    for _ in 0..5 {
        forked.umount(&tried);
        forked.mount("try");
    }
    forked.umount(&tried);
    forked.run_in(&main, &["fork", "--drop", "try"]);
    looks.wait().unwrap();
}

#[test]
fn mkdir_in_the_mount_makes_a_fork_with_all_earlier_writes() {
    let forked = Forked::new(BASE);
    let main = forked.live.mnt.clone();
    let said = sh(
        &main,
        "echo now > dir/1; mkdir .jailfs/forks/made; echo later > dir/1; cat \
         .jailfs/forks/made/dir/1
        for name in made main 7 a@b; do mkdir .jailfs/forks/$name 2>&1 | grep -o '[^:]*$'; done",
    );
    let wanted = "now\n File exists\n File exists\n Invalid argument\n Invalid argument\n";
    assert_eq!(said, wanted);
    assert!(forked.run_in(&main, &["forks"]).contains("  made "));
    std::fs::create_dir(forked.at("made")).unwrap();
    let made = forked.mount("made");
    assert_eq!(read(made.join("dir/1")), "now\n");
    assert_eq!(sh(&made, "cat .jailfs/forks/main/dir/1; ls .jailfs/forks"), "later\nmain\n");
    // A shell stands in the tree of a head that changes.
    let mut puppet = forked.live.puppet(".jailfs/forks/made/dir");
    puppet.gives("sorted(os.listdir('.'))", "['1', '2', 'absolute', 'deep', 'hard']");
    sh(&made, "rm dir/hard; echo x > dir/x");
    puppet.gives("sorted(os.listdir('.'))", "['1', '2', 'absolute', 'deep', 'x']");
    puppet.gives("open('x').read()", "'x\\n'");
    puppet.run("os.chdir('..')");
    puppet.gives("open('dir/x').read()", "'x\\n'");
}

#[test]
fn forks_by_mkdir_can_be_switched_off() {
    let live = Live::with_options("echo one > f", &["-o", "nosnapmkdir"]);
    let mut shell = live.puppet("");
    assert_eq!(shell.fail("os.mkdir('.jailfs/forks/two')"), "EROFS");
    shell.gives("os.listdir('.jailfs/forks')", "[]");
}

#[test]
fn a_head_that_is_not_mounted_keeps_no_descriptor_in_the_daemon() {
    let forked = Forked::new(BASE);
    let daemon = forked.live.pid().to_string();
    let open = || {
        let listed = std::fs::read_dir(format!("/proc/{daemon}/fd")).unwrap().flatten();
        let mut open: Vec<String> = listed
            .filter_map(|one| Some(std::fs::read_link(one.path()).ok()?.display().to_string()))
            .filter(|path| !path.contains("socket:"))
            // All heads share this layer, and its pool can stay open for the next read.
            .filter(|path| !path.ends_with("/layers/00000001/pool"))
            .collect();
        open.sort();
        open
    };
    let visit = |name: &str| {
        let point = forked.fork(name);
        sh(&point, "echo x > dir/x; echo y >> dir/2; rm -r dir/deep; cat sparse dir/1 > /dev/null");
        forked.umount(&point);
    };
    // The first one raises the format of the store, and starts threads.
    visit("first");
    let before = open();
    for number in 0..5 {
        visit(&format!("f{number}"));
    }
    until(&format!("{before:#?} again, but {:#?}", open()), || open().len() <= before.len());
}

#[test]
fn checkpoints_of_other_heads_are_named_by_their_head() {
    let forked = Forked::new("echo base > f");
    let main = forked.live.mnt.clone();
    sh(&main, "echo early > f; mkdir .jailfs/checkpoints/early");
    let (one, two) = (forked.fork("one"), forked.fork("two"));
    for (name, head) in [("main", &main), ("one", &one), ("two", &two)] {
        sh(head, &format!("echo {name} > f; mkdir .jailfs/checkpoints/green"));
    }
    let all = |head: &std::path::Path| sh(head, "LC_ALL=C ls .jailfs/checkpoints");
    assert_eq!(all(&main), "early\ngreen\none@green\ntwo@green\n");
    assert_eq!(all(&one), "early\ngreen\nmain@green\ntwo@green\n");
    let cat = "cd .jailfs/checkpoints; cat green/f one@green/f two@green/f main@early/f early/f";
    assert_eq!(sh(&main, cat), "main\none\ntwo\nearly\nearly\n");
    // Each has one directory. Other names are links.
    let links =
        "cd .jailfs/checkpoints; readlink two@green two@early main@green || echo; cd green; pwd -P";
    let at = two.join(".jailfs/checkpoints/green");
    assert_eq!(sh(&two, links), format!("green\nearly\n\n{}\n", at.display()));
    assert!(read(main.join(".jailfs/log")).contains("\ttwo@green\t"));
    for (bad, error) in [("green", "exists"), ("a@b", "Invalid"), ("one@green", "exists")] {
        let made = sh(&main, &format!("mkdir .jailfs/checkpoints/{bad} 2>&1 || :"));
        assert!(made.contains(error), "{bad}: {made}");
    }
    // All verbs take the name with the head.
    assert_eq!(forked.run_in(&main, &["show", "one@green:f"]), "one\n");
    assert_eq!(forked.run_in(&main, &["diff", "one@green", "main@green"]), "M\tf\n");
    forked.run_in(&main, &["restore", "two@green", "f"]);
    assert_eq!(read(main.join("f")), "two\n");
    forked.run_in(&main, &["hold", "two@green"]);
    forked.fails_in(&main, &["drop", "two@green"], 11);
    forked.run_in(&main, &["release", "two@green"]);
    let image = forked.live.mnt.parent().unwrap().join("image");
    let image = image.to_str().unwrap();
    forked.run_in(&main, &["export", "two@green", "--oci", image, "--layers"]);
    let image = format!("{image}:own");
    let said = forked.run_in(&main, &["export", "green", "--oci", &image, "--layers"]);
    assert!(said.contains("exported green"), "{said}");
    forked.run_in(&main, &["fork", "late", "--from", "base"]);
    std::fs::create_dir(forked.at("late")).unwrap();
    let late = forked.mount("late");
    for words in [["show", "green:f"], ["restore", "green"], ["drop", "green"]].map(|w| w.to_vec())
    {
        let said = forked.fails_in(&late, &words, 2);
        assert!(said.contains("main@green, one@green, two@green"), "{said}");
    }
    forked.run_in(&late, &["drop", "one@green"]);
    forked.run_in(&late, &["drop", "main@green"]);
    assert_eq!(forked.run_in(&late, &["show", "green:f"]), "two\n", "the only one");
    assert!(forked.run_in(&late, &["restore", "green"]).contains("green"));
    assert_eq!(all(&late), "early\ngreen\n", "they are in the lineage now");
    // A file whose name looks like such a name is a file.
    sh(&late, "echo > someone@host");
    assert_eq!(forked.run_in(&late, &["diff", "someone@host"]), "A\tsomeone@host\n");
}
