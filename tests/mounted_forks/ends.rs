//! Every kind of end of one mount, and of the daemon that serves all.

use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::statvfs;

use crate::harness::assert_same;
use crate::{Forked, read, seen, until, write};

const BASE: &str = "mkdir dir; echo 1 > dir/1; echo 2 > dir/2";

/// The process that serves a mount.
fn daemon(forked: &Forked, mnt: &Path) -> u64 {
    let status = forked.run_in(mnt, &["status", "--json"]);
    let line: serde_json::Value = serde_json::from_str(status.lines().next().unwrap()).unwrap();
    line["pid"].as_u64().unwrap()
}

fn lives(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z"))
}

#[test]
fn one_daemon_serves_all_heads_and_ends_with_the_last_mount() {
    let mut forked = Forked::new(BASE);
    let one = forked.fork("one");
    let two = forked.fork("two");
    write(one.join("dir/1"), "one\n");
    let main = forked.live.mnt.clone();
    let pid = daemon(&forked, &main);
    assert_eq!([&one, &two].map(|mnt| daemon(&forked, mnt)), [pid, pid]);
    // The first head, with which the daemon has started.
    forked.live.umount();
    assert!(lives(pid) && !forked.is_mounted(&main));
    assert_eq!(read(one.join("dir/1")), "one\n");
    forked.run_in(&two, &["checkpoint", "still"]);
    // An unmounted head answers through the same daemon, and is mounted again by it.
    let store = forked.live.store.to_str().unwrap().to_owned();
    let status = forked.run_in(Path::new("/"), &["--store", &store, "--head", "main", "status"]);
    assert!(status.contains("mount       not mounted\n"), "{status}");
    forked.live.mount();
    assert_eq!(daemon(&forked, &main), pid);
    // An unmount that finds a user changes nothing.
    let mut user = Command::new("sleep").arg("60").current_dir(&one).spawn().unwrap();
    let busy = Command::new(env!("CARGO_BIN_EXE_jailfs")).arg("umount").arg(&one).output().unwrap();
    assert_eq!(busy.status.code(), Some(11));
    user.kill().unwrap();
    user.wait().unwrap();
    forked.umount(&one);
    // umount(8) does not go through the daemon.
    let done = Command::new("umount").arg(&two).status().unwrap();
    assert!(done.success());
    assert_eq!(read(main.join("dir/1")), "1\n");
    forked.live.umount();
    until("the daemon ends", || !lives(pid));
    assert_eq!(
        forked.run_in(Path::new("/"), &["--store", &store, "diff", "one@", "@"]),
        "M\tdir/1\n"
    );
    forked.live.mount();
    forked.mount("one");
    assert_eq!(read(one.join("dir/1")), "one\n");
}

#[test]
fn after_a_kill_each_head_is_mounted_again_as_it_was() {
    let mut forked = Forked::new(BASE);
    let points = ["a", "b", "c"].map(|name| forked.fork(name));
    for (n, point) in points.iter().enumerate() {
        write(point.join("dir/1"), &format!("changed by {n}\n"));
        write(point.join("new"), &n.to_string());
        if n > 0 {
            forked.run_in(point, &["checkpoint"]);
            write(point.join("later"), "not in the checkpoint\n");
        }
    }
    let main = forked.live.mnt.clone();
    write(main.join("dir/2"), "by main\n");
    let (before, all) = (seen(&main), points.each_ref().map(|point| seen(point)));
    kill(forked.live.pid(), Signal::SIGKILL).unwrap();
    forked.live.wait_until_dead();
    for point in &points {
        until("the mount is dead", || statvfs(point) == Err(Errno::ENOTCONN));
    }
    // The first to be mounted again is a fork: it starts the daemon.
    forked.mount("b");
    forked.live.mount();
    forked.mount("a");
    forked.mount("c");
    assert_same(&before, &seen(&main), "main");
    for (point, was) in points.iter().zip(&all) {
        assert_same(was, &seen(point), "a fork");
    }
    let check = forked.run_in(&main, &["check", "--read-data"]);
    assert!(!check.contains("problem"), "{check}");
}

/// The number of the FUSE connection of a mount.
fn connection(point: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    nix::sys::stat::minor(std::fs::metadata(point).unwrap().dev())
}

#[test]
fn a_mount_that_dies_does_not_touch_the_others() {
    let forked = Forked::new(BASE);
    let (one, two) = (forked.fork("one"), forked.fork("two"));
    write(one.join("dir/1"), "kept\n");
    let pid = daemon(&forked, &two);
    let script = format!(
        "mountpoint -q /sys/fs/fuse/connections || mount -t fusectl fusectl /sys/fs/fuse/connections
         echo 1 > /sys/fs/fuse/connections/{}/abort",
        connection(&one)
    );
    let done = Command::new("unshare").args(["-m", "sh", "-ec", &script]).status().unwrap();
    assert!(done.success());
    until("the mount is dead", || statvfs(&one) == Err(Errno::ENOTCONN));
    assert_eq!(read(two.join("dir/1")), "1\n");
    forked.run_in(&two, &["checkpoint"]);
    write(forked.live.mnt.join("dir/1"), "main\n");
    until("the head is free", || {
        let forks = forked.run_in(&two, &["forks"]);
        forks.lines().any(|line| line.contains(" one ") && line.contains("not mounted"))
    });
    // Its mount is replaced, by the same daemon.
    forked.mount("one");
    assert_eq!((read(one.join("dir/1")), daemon(&forked, &one)), ("kept\n".to_owned(), pid));
}

#[test]
fn a_signal_unmounts_all_heads() {
    let mut forked = Forked::new(BASE);
    let points = ["a", "b"].map(|name| forked.fork(name));
    points.iter().for_each(|point| write(point.join("new"), "kept\n"));
    let pid = daemon(&forked, &points[0]);
    // One of them is in use: it is detached, and the daemon ends with its user.
    let mut user = Command::new("sleep").arg("60").current_dir(&points[1]).spawn().unwrap();
    kill(forked.live.pid(), Signal::SIGTERM).unwrap();
    let main = forked.live.mnt.clone();
    until("all are unmounted", || {
        ![&main, &points[0], &points[1]].map(|p| forked.is_mounted(p)).contains(&true)
    });
    assert!(lives(pid), "the last user is still there");
    user.kill().unwrap();
    user.wait().unwrap();
    until("the daemon ends", || !lives(pid));
    forked.live.mount();
    points.iter().zip(["a", "b"]).for_each(|(point, name)| {
        forked.mount(name);
        assert_eq!(read(point.join("new")), "kept\n");
    });
}

/// A mount that comes while the daemon ends gets a daemon of its own.
#[test]
fn mounts_and_ends_of_heads_meet() {
    let forked = Forked::new(BASE);
    forked.live.jailfs(&["fork", "x", "-n", "3"]);
    std::thread::scope(|scope| {
        for n in 1..=3 {
            let forked = &forked;
            scope.spawn(move || {
                let point = forked.at(&format!("x-{n}"));
                std::fs::create_dir(&point).unwrap();
                for round in 0..6 {
                    forked.mount(&format!("x-{n}"));
                    write(point.join("round"), &round.to_string());
                    forked.umount(&point);
                }
            });
        }
    });
    for n in 1..=3 {
        assert_eq!(read(forked.mount(&format!("x-{n}")).join("round")), "5");
    }
}

#[test]
fn mounts_without_another_head_meet_too() {
    let mut forked = Forked::new(BASE);
    forked.live.jailfs(&["fork", "x", "-n", "3"]);
    forked.live.umount();
    std::thread::scope(|scope| {
        for n in 1..=3 {
            let forked = &forked;
            scope.spawn(move || {
                let point = forked.at(&format!("x-{n}"));
                std::fs::create_dir(&point).unwrap();
                for _ in 0..4 {
                    forked.mount(&format!("x-{n}"));
                    forked.umount(&point);
                }
            });
        }
    });
    forked.live.mount();
}
