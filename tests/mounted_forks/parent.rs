//! Programs in one head notice nothing of the others.

use crate::harness::{Shell, assert_same};
use crate::{Forked, read, seen, sh, write};

const BASE: &str = "mkdir -p dir/sub; for n in 1 2 3; do echo $n > dir/$n; done
    head -c 16384 /dev/zero | tr '\\0' - > mapped; ln dir/1 linked; ln -s dir/2 link
    echo t > dir/sub/t";

/// A shell, an open file and a mapping in the parent notice nothing while 20 forks write,
/// checkpoint and restore.
#[test]
fn a_parent_notices_nothing_of_twenty_forks() {
    let forked = Forked::new(BASE);
    let live = &forked.live;
    live.sh("echo changed > dir/1; echo new > dir/new; mv dir/3 dir/moved");
    let mut shell = Shell::start(&live.mnt.join("dir"));
    let mut puppet = live.puppet("dir");
    puppet.run("f = os.open('new', os.O_RDWR); m = mapped('../mapped'); m[0] = 65; m.flush()");
    let before = seen(&live.mnt);
    live.jailfs(&["fork", "try", forked.dir.to_str().unwrap(), "-n", "20"]);
    let names: Vec<String> = (1..=20).map(|n| format!("try-{n}")).collect();
    for name in &names {
        assert_same(&before, &seen(&forked.at(name)), "a new fork");
    }
    std::thread::scope(|scope| {
        let forked = &forked;
        let works: Vec<_> =
            names.iter().map(|name| scope.spawn(move || work(forked, name))).collect();
        let mut rounds = 0;
        while rounds < 20 || works.iter().any(|work| !work.is_finished()) {
            shell.gives("cat 1 new sub/t moved", "changed\nnew\nt\n3");
            puppet.gives("os.pread(f, 9, 0), m[0], m[4096]", "(b'new\\n', 65, 45)");
            puppet.gives("os.getcwd().endswith('mnt/dir'), os.fstat(f).st_nlink", "(True, 1)");
            rounds += 1;
        }
    });
    // The writes of the parent go to the parent alone.
    puppet.run("os.pwrite(f, b'own', 0); m[0] = 66; m.flush()");
    shell.gives("cat new; head -c 1 ../mapped", "own\nB");
    for name in &names {
        assert_eq!(read(forked.at(name).join("dir/new")), "new\n", "{name}");
        assert!(read(forked.at(name).join("mapped")).starts_with("A-"), "{name}");
    }
    puppet.run("os.pwrite(f, b'new', 0); m[0] = 65; m.flush()");
    puppet.end();
    drop(shell);
    let times = |lines: Vec<String>| -> Vec<String> {
        lines
            .into_iter()
            .filter(|line| !line.contains("dir/new") && !line.contains("mapped"))
            .collect()
    };
    assert_same(&times(before), &times(seen(&live.mnt)), "the parent");
}

/// The work of a program in a fork: writes, a checkpoint, more writes, a restore.
fn work(forked: &Forked, name: &str) {
    let mnt = forked.at(name);
    for round in 0..2 {
        sh(&mnt, &format!("echo {name} > dir/1; rm -r dir/sub; mkdir {name}-{round}; mv link l"));
        forked.run_in(&mnt, &["checkpoint", &format!("{name}-{round}")]);
        let there = seen(&mnt);
        sh(&mnt, "rm -r dir; echo x > dir; rm linked; echo later > later");
        assert!(!mnt.join("linked").exists());
        forked.run_in(&mnt, &["restore", "@-1"]);
        assert_same(&there, &seen(&mnt), name);
        forked.run_in(&mnt, &["restore", "base"]);
        assert_eq!(read(mnt.join("dir/1")), "1\n");
        forked.run_in(&mnt, &["op", "log"]);
        // Back to the beginning of the fork.
        forked.run_in(&mnt, &["restore", &format!("{name}-{round}")]);
        forked.run_in(&mnt, &["restore", "main@"]);
    }
}

#[test]
fn dirty_pages_of_mappings_are_in_a_fork() {
    let forked = Forked::new(BASE);
    let live = &forked.live;
    let mut puppet = live.puppet("");
    puppet.run("m = mapped('mapped'); n = mapped('dir/1')");
    puppet.run("m[0] = 65; m[8192] = 66; n[0] = 67");
    let mnt = forked.fork("try");
    puppet.run("m[0] = 90; n[0] = 90");
    let mapped = read(mnt.join("mapped"));
    assert_eq!((&mapped[..1], &mapped[8192..8193]), ("A", "B"));
    assert_eq!(read(mnt.join("dir/1")), "C\n");
    assert_eq!(read(mnt.join("linked")), "C\n", "a hard link");
    // And in a fork of a fork, by a mapping in the fork.
    let mut inner = live.puppet("../forks/try");
    inner.run("m = mapped('mapped'); m[1] = 68");
    let point = forked.at("inner");
    forked.run_in(&mnt, &["fork", "inner", point.to_str().unwrap()]);
    inner.run("m[1] = 90");
    assert!(read(point.join("mapped")).starts_with("AD-"));
    assert!(read(live.mnt.join("mapped")).starts_with("Z-"));
    inner.end();
    puppet.end();
}

/// A fork shows the base as it was when it was forked, whatever other heads apply.
#[test]
fn an_apply_from_one_head_leaves_the_other_mounts_exact() {
    let mut forked = Forked::new(BASE);
    forked.live.applied = true;
    let live = &forked.live;
    live.sh("echo before > dir/1");
    let first = forked.fork("first");
    let second = forked.fork("second");
    sh(&second, "echo second > dir/2; rm dir/3");
    let (one, two) = (seen(&first), seen(&second));
    let mut holder = live.puppet("../forks/first");
    holder.run("f = os.open('dir/1', os.O_RDONLY); g = os.open('dir/3', os.O_RDONLY)");
    live.sh("echo main > dir/1; echo main > dir/2; rm dir/3; mkdir made; mv mapped made");
    live.jailfs(&["apply"]);
    assert_eq!(read(live.base.join("dir/1")), "main\n");
    assert_same(&one, &seen(&first), "the first fork");
    assert_same(&two, &seen(&second), "the second fork");
    holder.gives("os.pread(f, 9, 0), os.pread(g, 9, 0)", "(b'before\\n', b'3\\n')");
    holder.end();
    // Also after another mount, and for a fork that is made now.
    forked.umount(&second);
    forked.mount("second");
    assert_same(&two, &seen(&second), "the second fork, mounted again");
    let third = forked.fork("third");
    assert_same(&seen(&live.mnt), &seen(&third), "a fork of the applied tree");
    live.jailfs(&["apply", "--undo"]);
    assert_same(&one, &seen(&first), "the first fork after the undo");
    assert_same(&two, &seen(&second), "the second fork after the undo");
    assert_eq!(read(live.base.join("dir/3")), "3\n");
}

/// An apply from a fork is an apply of its tree, and `main` stays what it was.
#[test]
fn a_fork_can_be_applied() {
    let mut forked = Forked::new(BASE);
    forked.live.applied = true;
    let live = &forked.live;
    let try_it = forked.fork("try");
    write(try_it.join("dir/2"), "tried\n");
    let main = seen(&live.mnt);
    assert!(forked.run_in(&try_it, &["apply"]).starts_with("applied: 1 modified\n"));
    assert_eq!(read(live.base.join("dir/2")), "tried\n");
    assert_same(&main, &seen(&live.mnt), "the parent");
    assert_eq!(forked.run_in(&live.mnt, &["diff", "@", "try@"]), "M\tdir/2\n");
}
