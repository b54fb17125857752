//! A restore gives the tree of the checkpoint: every name, byte, mode, owner, time, inode number,
//! link and attribute.

use crate::harness::{Live, assert_same};

/// One of everything, with links in pairs, and directories that are deep enough to be moved.
const BASE: &str = "
    mkdir -p dir/sub/deep/deeper other/inner empty src/a src/b
    echo one > one; echo two > dir/two; echo three > dir/sub/three; echo four > dir/sub/deep/four
    echo five > dir/sub/deep/deeper/five; echo six > other/six; echo seven > other/inner/seven
    for i in 1 2 3 4 5; do echo \"a $i\" > src/a/$i; echo \"b $i\" > src/b/$i; done
    head -c 300000 /dev/urandom > large; : > nothing; truncate -s 1M sparse; echo x >> sparse
    echo pair > pair1; ln pair1 pair2; ln pair1 dir/pair3; echo couple > other/c1
    ln other/c1 dir/sub/c2
    ln -s one link; ln -s ../other/six dir/link; ln -s nowhere dangling; ln -s dir dirlink
    mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'
    if [ $(id -u) = 0 ]; then mknod chr c 1 3; mknod blk b 7 0; chown 1234:4321 other/six; fi
    setfattr -n user.kept -v before one; setfattr -n user.dir -v d dir/sub
    chmod 640 dir/two; chmod 4755 src/a/1; chmod 1777 empty; chmod 444 src/a/2
    touch -d '2001-02-03 04:05:06.123456789' one dir/two dir/sub other
    touch -h -d '1999-01-01' link
";

/// Compares each way back to a checkpoint with the tree at that checkpoint.
fn exact(change: &str) {
    // Power cuts do not matter here, and the disk would be the slowest part.
    let mut live = Live::with_options(BASE, &["--volatile"]);
    let start = live.snapshot();
    live.checkpoint("start");
    live.sh(change);
    assert_ne!(start, live.snapshot(), "the change can be seen");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "restore, of nodes that the kernel had seen");

    live.sh(change);
    let changed = live.snapshot();
    live.checkpoint("changed");
    let at_changed = live.json(&["op", "log"])[0]["op"].to_string();
    live.restore("base");
    assert_same(&start, &live.snapshot(), "restore to the base");
    live.restore("changed");
    assert_same(&changed, &live.snapshot(), "restore forward");
    live.sh("echo late > late; rm -rf one; mkdir -p late-dir/x");
    let late = live.snapshot();
    live.restore("start");
    let before_restore = live.json(&["log", "--all"])[0]["id"].to_string();
    assert_same(&start, &live.snapshot(), "restore of a state in which late names are negative");
    live.jailfs(&["op", "restore", &at_changed]);
    assert_same(&changed, &live.snapshot(), "op restore");
    live.restore(&before_restore);
    assert_same(&late, &live.snapshot(), "the state that a restore replaced");

    live.remount();
    assert_same(&late, &live.snapshot(), "remount");
    live.restore("changed");
    live.restore("changed");
    assert_same(&changed, &live.snapshot(), "restore after a remount, twice");
    live.restore("start");
    live.sh(change);
    let again = live.snapshot();
    live.kill_and_mount();
    assert_same(&again, &live.snapshot(), "kill -9 and mount");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "restore of what changed before kill -9");
}

macro_rules! rows {
    ($($name:ident: $change:expr;)*) => { $(#[test] fn $name() { exact($change) })* };
}

rows! {
    restore_takes_added_names_away: "
        echo new > new; echo new > dir/sub/new; mkdir -p added/tree/deep
        echo x > added/tree/deep/x; mkfifo dir/p
        ln -s one newlink; if [ $(id -u) = 0 ]; then mknod c2 c 1 5; fi";
    restore_brings_deleted_names_back: "
        rm one dir/two link pipe sock nothing dangling other/inner/seven; rmdir other/inner empty
        rm -f chr blk";
    restore_brings_content_back: "
        echo changed > one; echo more >> dir/two; truncate -s 1000 large
        truncate -s 5M dir/sub/three
        printf X | dd of=sparse bs=1 seek=4096 conv=notrunc status=none; echo text > nothing
        echo p >> pair2
        fallocate -p -o 0 -l 4096 src/b/1 || true
        dd if=/dev/zero of=src/b/2 bs=64k count=3 status=none";
    restore_brings_modes_and_owners_back: "
        chmod 600 one; chmod 700 dir/sub; chmod 777 pipe; chmod u-s src/a/1; chmod 0 nothing
        chmod 755 empty
        if [ $(id -u) = 0 ]; then chown -h 7:8 one link dir other/inner; fi; chmod 644 src/a/2";
    restore_brings_times_back: "
        touch one dir/sub; touch -a dir/two; touch -d 2020-02-02 large; touch -h link
        touch -m other/inner pipe";
    restore_brings_renamed_files_back: "
        mv one uno; mv dir/two other/two; mv other/six dir/sub/six; mv link dir/link2
        mv src/a/1 src/a/2
        mv src/b/1 src/b/x; mv src/b/2 src/b/1; mv src/b/x src/b/2; mv pipe sock";
    restore_brings_a_renamed_directory_back: "
        mv dir moved; echo x > moved/x; rm moved/two; mv moved/sub/deep moved/sub/deep2";
    restore_brings_nested_renames_back: "
        mv dir/sub/deep lifted; mv dir other/dir; mv other src/other
        mv src/other/dir/sub/three src/a/three
        mv lifted src/other/dir/lifted; mkdir dir; echo new > dir/two";
    restore_brings_exchanged_directories_back: "
        python3 - <<'E'
import ctypes
x = lambda a, b: ctypes.CDLL(None).renameat2(-100, a, -100, b, 2) and 1/0
x(b'dir', b'other'); x(b'src/a', b'src/b'); x(b'one', b'dir/inner')
x(b'other/sub', b'dir/one') if 0 else None
x(b'other/two', b'src')
E";
    restore_brings_a_directory_back_where_a_file_is: "
        rm -rf dir; echo file > dir; rm one; mkdir one; echo x > one/x; rm link; mkdir link
        rm pipe; ln -s x pipe
        rm -rf src/a; ln -s b src/a";
    restore_takes_added_links_away: "
        ln one one2; ln dir/sub/three three2; ln pair2 pair4; ln other/c1 src/c3; ln link link3
        ln pipe pipe2";
    restore_brings_removed_links_back: "
        rm pair1; rm dir/sub/c2 dir/pair3";
    restore_pairs_links_that_a_rename_broke: "
        echo new > n; mv n pair1; cp -p pair2 m; mv m pair2; mv other/c1 dir/sub/c1
        sed -i s/couple/other/ dir/sub/c2";
    restore_brings_all_links_of_a_file_back: "rm pair1 pair2 dir/pair3; rm other/c1 dir/sub/c2; \
        echo y > pair1";
    restore_brings_attributes_back: "
        setfattr -n user.kept -v after one; setfattr -x user.dir dir/sub
        setfattr -n user.new -v 1 dir large
        setfattr -n user.new -v 2 src/b/3";
    restore_brings_deep_trees_back: "rm -rf dir other src empty";
    restore_brings_a_whole_tree_back: "find . -mindepth 1 -delete; mkdir dir; echo x > dir/two";
    restore_brings_a_remade_tree_back: "
        cp -a dir copy; rm -rf dir; mv copy dir; cp -a src src2; mv src gone; mv src2 src
        rm -rf gone";
    restore_undoes_a_long_mixture: "
        mv dir d2; mkdir dir; mv d2/sub dir/sub; rm -rf dir/sub/deep; mkdir -p dir/sub/deep
        echo a > dir/sub/deep/four
        ln dir/sub/deep/four dir/l; mv other/inner d2/inner; chmod 500 d2/inner; mv d2 other/d2
        rm large; mkdir large
        ln pair1 large/p; rm pair1; truncate -s 7 pair2; mv src/a src/b/a; rm -rf src/b/4 src/b/a/3
        mv src/b empty/";
}

/// The kernel's caches hold nothing, or everything, or only nodes of the changed state.
#[test]
fn a_restore_is_exact_whatever_the_kernel_has_cached() {
    let mut live = Live::new(BASE);
    let start = live.snapshot();
    live.checkpoint("start");
    live.remount();
    live.sh("mv dir moved; rm -rf src; echo x > one; ln other/six six");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "restore for a kernel that saw only the changes");
    live.sh("mv dir moved; rm -rf src; echo x > one; ln other/six six");
    live.remount();
    live.restore("start");
    assert_same(&start, &live.snapshot(), "restore for a kernel that saw nothing");
    live.sh("mv dir moved; rm -rf src; echo x > one; ln other/six six");
    std::fs::write("/proc/sys/vm/drop_caches", "2\n").unwrap_or_default();
    live.restore("start");
    assert_same(&start, &live.snapshot(), "restore for a kernel that forgot unused nodes");
}

/// The kernel has cached names, attributes and listings of everything. None of it may be visible
/// after the restore.
#[test]
fn nothing_that_the_kernel_cached_outlives_a_restore() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let look = "ls -lR . > /dev/null; find . -type f -exec cat {} + > /dev/null; \
        ls absent new 2>/dev/null || true";
    live.sh(look);
    live.sh("rm one; echo longer content > dir/two; chmod 600 dir/two; echo x > new; rm -rf src; \
        mkdir src");
    live.sh(look);
    live.sh("ls one src/a 2>/dev/null && exit 1; true");
    live.restore("start");
    assert_eq!(live.read("one"), "one\n", "a name that was absent a moment ago");
    assert_eq!(live.read("src/a/3"), "a 3\n");
    assert_eq!(live.sh("stat -c '%s %a' dir/two; cat dir/two"), "4 640\ntwo\n");
    assert_eq!(
        live.sh("ls src src/b | tr '\\n' ' '"),
        "src:\na\nb\n\nsrc/b:\n1\n2\n3\n4\n5\n".replace('\n', " ")
    );
    assert!(!live.exists("new"));
    live.sh("ls | grep -x new && exit 1; true");
}

/// With several checkpoints, a restore of any one gives that one, in any order.
#[test]
fn every_checkpoint_can_be_restored_from_every_other() {
    let mut live = Live::new(BASE);
    let steps = [
        "echo 1 > one; mv dir d1",
        "rm -rf src; mkdir -p src/a; mv d1 src/a/d1",
        "mv src/a/d1 dir; ln dir/two two; mv other o2; chmod 711 o2",
        "rm -rf dir; mv o2 dir; echo z > dir/z",
    ];
    let mut states = vec![live.snapshot()];
    live.checkpoint("c0");
    for (at, step) in steps.iter().enumerate() {
        live.sh(step);
        states.push(live.snapshot());
        live.checkpoint(&format!("c{}", at + 1));
    }
    for (round, order) in [[4, 0, 3, 1, 2, 0], [2, 4, 1, 3, 0, 4]].into_iter().enumerate() {
        for at in order {
            live.restore(&format!("c{at}"));
            assert_same(
                &states[at],
                &live.snapshot(),
                &format!("checkpoint {at} in round {round}"),
            );
        }
        live.kill_and_mount();
        assert_same(states[order[5]].as_slice(), &live.snapshot(), "kill -9 and mount");
    }
}
