//! Open files across a restore: descriptors of unchanged files go on, all others become orphans.

use crate::harness::{Live, Shell, assert_same};

const BASE: &str = "
    mkdir dir; echo same > same; echo before > changed; echo removed > removed
    echo replaced > replaced
    echo base > dir/untouched
";

/// A checkpoint of a tree in which each file was copied up, and a process that has them all open.
fn opened() -> (Live, crate::harness::Puppet, Vec<String>) {
    let live = Live::new(BASE);
    live.sh("for f in same changed removed replaced; do echo line >> $f; done");
    live.checkpoint("start");
    let start = live.snapshot();
    let mut puppet = live.puppet("");
    puppet.run("same, untouched = os.open('same', os.O_RDWR), os.open('dir/untouched', os.O_RDWR)");
    puppet.run("changed, removed = os.open('changed', os.O_RDWR), os.open('removed', os.O_RDWR)");
    puppet.run("replaced = os.open('replaced', os.O_RDWR)");
    puppet.run("write('added', b'added'); added = os.open('added', os.O_RDWR)");
    puppet.run("os.pwrite(changed, b'AFTER!', 0); os.unlink('removed')");
    puppet.run(
        "write('n', b'new'); os.rename('n', 'replaced'); newer = os.open('replaced', os.O_RDWR)",
    );
    live.restore("start");
    assert_same(&start, &live.snapshot(), "the tree");
    (live, puppet, start)
}

/// The files that become orphans, and what their holders see.
const CUT: [(&str, &str); 5] = [
    ("changed", "b'AFTER!\\nline\\n'"),
    ("removed", "b'removed\\nline\\n'"),
    ("replaced", "b'replaced\\nline\\n'"),
    ("added", "b'added'"),
    ("newer", "b'new'"),
];

#[test]
fn a_write_through_an_open_unchanged_file_is_an_ordinary_write() {
    let (live, mut puppet, _) = opened();
    puppet.run("os.pwrite(same, b'SAME', 0); os.pwrite(untouched, b'BASE', 0)");
    assert_eq!(live.read("same"), "SAME\nline\n");
    assert_eq!(live.read("dir/untouched"), "BASE\n");
    puppet.gives("os.fstat(same).st_ino == os.stat('same').st_ino", "True");
    live.restore("start");
    assert_eq!(live.read("same"), "same\nline\n");
}

#[test]
fn the_holder_of_an_orphaned_file_reads_on_and_writes_for_itself() {
    let (live, mut puppet, start) = opened();
    for (fd, content) in CUT {
        puppet.gives(&format!("os.fstat({fd}).st_nlink"), "0");
        puppet.gives(&format!("os.pread({fd}, 100, 0)"), content);
        puppet.run(&format!("os.pwrite({fd}, b'late', 1); os.ftruncate({fd}, 50); os.fsync({fd})"));
        puppet.gives(&format!("os.pread({fd}, 5, 0)[1:]"), "b'late'");
        puppet.run(&format!(
            "os.posix_fallocate({fd}, 0, 8192); os.fchmod({fd}, 0o600); os.utime({fd}, (1, 1))"
        ));
        puppet.gives(&format!("os.fstat({fd}).st_size"), "8192");
        puppet.gives(&format!("os.fstat({fd}).st_nlink"), "0");
        assert_same(&start, &live.snapshot(), &format!("the tree after late writes to {fd}"));
    }
    live.sh("sync");
    assert_same(&start, &live.snapshot(), "the tree after a sync");
    live.jailfs(&["checkpoint", "again"]);
    live.restore("again");
    assert_same(&start, &live.snapshot(), "a checkpoint with late writers");
    for (fd, _) in CUT {
        puppet.gives(&format!("os.pread({fd}, 5, 0)[1:]"), "b'late'");
    }
}

#[test]
fn an_orphaned_file_cannot_be_linked_into_the_tree() {
    let (live, mut puppet, start) = opened();
    for (fd, content) in CUT {
        let again = format!("again = os.open(f'/proc/self/fd/{{{fd}}}', os.O_RDWR)");
        puppet.run(&again);
        puppet.gives("os.pread(again, 100, 0)", content);
        puppet.run(&format!("again = os.open(f'/proc/self/fd/{{{fd}}}', os.O_RDWR | os.O_TRUNC)"));
        puppet.run("os.write(again, b'late'); os.close(again)");
        puppet.gives(&format!("os.pread({fd}, 100, 0)"), "b'late'");
        assert_eq!(puppet.fail(&format!("linkat(f'/proc/self/fd/{{{fd}}}', 'linked')")), "ENOENT");
        puppet.run(&format!("os.chmod(f'/proc/self/fd/{{{fd}}}', 0o777)"));
        puppet.run(&format!("os.setxattr({fd}, 'user.late', b'1')"));
        assert_same(&start, &live.snapshot(), &format!("the tree after opening {fd} again"));
    }
    puppet.run("linkat(f'/proc/self/fd/{same}', 'linked')");
    assert_eq!(live.read("linked"), "same\nline\n");
}

#[test]
fn an_unlinked_file_is_not_connected_with_the_restored_one() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let start = live.snapshot();
    let mut puppet = live.puppet("");
    puppet.run("base = os.open('removed', os.O_RDWR); os.unlink('removed')");
    puppet.run("write('own', b'own')");
    live.checkpoint("own");
    puppet.run("own = os.open('own', os.O_RDWR); os.unlink('own')");
    live.restore("own");
    assert_eq!(live.read("own"), "own");
    live.restore("start");
    puppet.run("os.write(base, b'late'); os.write(own, b'late')");
    assert_same(&start, &live.snapshot(), "the tree");
    puppet.gives("os.pread(base, 100, 0), os.pread(own, 100, 0)", "(b'lateved\\n', b'late')");
    live.restore("own");
    assert_eq!(live.read("own"), "own");
    puppet.gives("os.stat('own').st_nlink, os.fstat(own).st_nlink", "(1, 0)");
}

#[test]
fn appending_writers_of_changed_files_write_to_orphans() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let start = live.snapshot();
    let mut shell = Shell::start(&live.mnt);
    shell.run("exec 3<>changed 4>>removed 5<same 6>added");
    shell.gives("echo x >&4; echo y >&3; echo z >&6; cat <&5", "same");
    live.restore("start");
    shell.gives("echo late >&3; echo late >&4; echo late >&6; echo $?", "0");
    assert_same(&start, &live.snapshot(), "the tree");
    shell.gives("cat /proc/self/fd/4", "removed\nx\nlate");
    shell.gives("cat /proc/self/fd/6", "z\nlate");
    shell.gives("echo new > added; cat added; rm added", "new");
    shell.gives("exec 4>>removed; echo now >&4; cat removed", "removed\nnow");
}

#[test]
fn an_appending_writer_of_an_unchanged_file_goes_on_at_its_end() {
    let live = Live::new(BASE);
    let mut shell = Shell::start(&live.mnt);
    shell.run("exec 4>>same; echo first >&4");
    live.checkpoint("start");
    live.sh("echo other > changed; touch same; chmod 600 same");
    live.restore("start");
    shell.run("echo second >&4");
    assert_eq!(live.read("same"), "same\nfirst\nsecond\n");
    live.checkpoint("second");
    live.sh("mv same moved; ln moved dir/linked");
    live.restore("second");
    shell.run("echo third >&4");
    assert_eq!(live.read("same"), "same\nfirst\nsecond\nthird\n", "also if its name was moved");
}

#[test]
fn locks_do_not_hang_and_unchanged_files_keep_them() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let (mut a, mut b) = (live.puppet(""), live.puppet(""));
    a.run("same = os.open('same', os.O_RDWR); changed = os.open('changed', os.O_RDWR)");
    a.run(
        "fcntl.flock(same, fcntl.LOCK_EX); fcntl.lockf(changed, fcntl.LOCK_EX); \
         os.write(changed, b'x')",
    );
    b.run("same = os.open('same', os.O_RDWR); changed = os.open('changed', os.O_RDWR)");
    assert_eq!(b.fail("fcntl.flock(same, fcntl.LOCK_EX | fcntl.LOCK_NB)"), "EAGAIN");
    b.begin("fcntl.lockf(changed, fcntl.LOCK_EX)");
    live.restore("start");
    assert_eq!(b_fail_soon(&live, "same"), "EAGAIN", "the lock of an unchanged file is still held");
    // The waiter waits for a lock of the file that both hold; its holder releases it.
    a.run("fcntl.lockf(changed, fcntl.LOCK_UN)");
    assert_eq!(b.answer(), Ok("None".to_owned()));
    b.run("new = os.open('changed', os.O_RDWR); fcntl.lockf(new, fcntl.LOCK_EX | fcntl.LOCK_NB)");
    a.run("fcntl.flock(same, fcntl.LOCK_UN)");
    b.run("fcntl.flock(same, fcntl.LOCK_EX | fcntl.LOCK_NB)");
}

fn b_fail_soon(live: &Live, file: &str) -> String {
    let mut other = live.puppet("");
    other.fail(&format!("fcntl.flock(os.open('{file}', os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"))
}

#[test]
fn a_running_program_goes_on_although_its_file_is_replaced() {
    let live = Live::new("cp /bin/sleep prog; cp /bin/sh shell; echo x > x");
    live.checkpoint("start");
    let start = live.snapshot();
    live.sh("cp prog prog2");
    let spawn = |path: &str| {
        let mut command = std::process::Command::new(live.mnt.join(path));
        command.arg("60").current_dir("/").spawn().unwrap()
    };
    let (mut same, mut added) = (spawn("prog"), spawn("prog2"));
    live.restore("start");
    assert_same(&start, &live.snapshot(), "the tree");
    for child in [&mut same, &mut added] {
        assert_eq!(child.try_wait().unwrap(), None, "it runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
