//! Mounts and their daemons, from the start to every kind of end.

use std::fs;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::place::{JAILFS, Place, lives, said, signal, until};

#[test]
fn the_mount_exists_when_the_command_returns_and_is_gone_when_umount_does() {
    let place = Place::new();
    place.mount();
    assert!(place.is_mounted("mnt"));
    assert_eq!(place.read("mnt/a"), "one\n");
    let daemon = place.daemon();
    let command = fs::read(format!("/proc/{daemon}/cmdline")).unwrap();
    assert!(
        command.starts_with(b"jailfs\0__daemon\0"),
        "its name in a list of processes identifies it"
    );
    assert_eq!(fs::read_link(format!("/proc/{daemon}/cwd")).unwrap().to_str(), Some("/"));
    let again = place.fails("", "mount base mnt", 11);
    assert!(again.contains("a sandbox is mounted there already\nhint: use it as it is"), "{again}");
    fs::create_dir(place.at("mnt2")).unwrap();
    let second = place.fails("", "mount base mnt2", 11);
    assert!(
        second.contains("its sandbox is mounted at") && second.contains("--store DIR"),
        "{second}"
    );
    place.ok("", "mount base mnt2 --store home/second");
    place.write("mnt2/only-here", "x");
    assert!(!place.exists("mnt/only-here"));
    place.ok("", "umount mnt2");
    place.umount();
    // The store is free, and the process has ended.
    assert!(!place.is_mounted("mnt"));
    assert_eq!(place.ok("base", "diff"), "");
    until("the daemon ends", || !lives(daemon));
    let nothing = place.fails("", "umount mnt", 10);
    assert!(nothing.contains("no sandbox is mounted there"), "{nothing}");
    place.fails("", "umount nowhere", 10);
}

#[test]
fn a_daemon_raises_its_file_limit_and_a_command_keeps_that_of_its_caller() {
    let place = Place::new();
    place.sh("", "ulimit -Sn 200; ulimit -Hn 3000; $JAILFS mount base mnt");
    let limits = place.read(format!("/proc/{}/limits", place.daemon()));
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(files.split_whitespace().collect::<Vec<_>>()[3..5], ["3000", "3000"], "{files}");
    place.umount();
    // The process that starts the second attempt has served the first.
    let said = place.sh(
        "base",
        "ulimit -Sn 200; ulimit -Hn 3000; $JAILFS run --attempts 2 --discard -- sh -c 'ulimit -Sn; \
         ulimit -Hn; exit 1'",
    );
    assert_eq!(said.out, "200\n3000\n".repeat(2), "{}", said.err);
}

#[test]
fn a_refused_mount_says_why() {
    let place = Place::new();
    place.write("file", "x");
    fs::create_dir(place.at("base/inside")).unwrap();
    fs::create_dir_all(place.at("outer/base")).unwrap();
    fs::create_dir(place.at("other")).unwrap();
    place.mount();
    place.umount();
    let store = place.sh("home", "echo .local/state/jailfs/*").out.trim().to_owned();
    for (line, words) in [
        ("mount missing mnt", "find 'missing': No such file or directory"),
        (
            "mount base missing",
            "find 'missing': No such file or directory\nhint: create the mount point first",
        ),
        ("mount base file", "find 'file': it is not a directory"),
        ("mount file mnt", "find 'file': it is not a directory"),
        (
            "mount base base/inside",
            "the mount would contain itself\nhint: mount it beside the base",
        ),
        ("mount outer/base outer", "the mount would hide it"),
        (
            "mount base mnt --store base/s",
            "is inside the base\nhint: name another directory with --store DIR",
        ),
        ("mount outer/base mnt --store outer", "the base is inside the store"),
        ("mount base mnt --store mnt/s", "the mount would hide the store"),
    ] {
        let said = place.fails("", line, 12);
        assert!(said.contains(words), "jailfs {line}: {said}");
    }
    let other = place.fails("", &format!("mount other mnt --store home/{store}"), 1);
    assert!(
        other.contains("it belongs to the base") && other.contains("hint: name another store"),
        "{other}"
    );
    fs::write(place.at(format!("home/{store}/format")), "jailfs-store 999\n").unwrap();
    for line in ["mount base mnt", "-C base log"] {
        let newer = place.say("", line);
        assert_eq!(newer.code, 1, "{newer:?}");
        assert!(newer.err.contains("999") && newer.err.contains("\nhint: "), "{newer:?}");
    }
    assert!(!place.is_mounted("mnt"));
}

#[test]
fn mount_options_have_their_effect() {
    let place = Place::new();
    let options = || {
        let all = jailfs::internals::sys::mountinfo::read().unwrap();
        let wanted = place.at("mnt");
        let entry = all
            .into_iter()
            .find(|entry| entry.mount_point == wanted.as_os_str().as_encoded_bytes())
            .unwrap();
        (String::from_utf8(entry.fs_type).unwrap(), String::from_utf8(entry.options).unwrap())
    };
    place.mount();
    let (kind, plain) = options();
    assert_eq!(kind, "fuse.jailfs");
    assert!(plain.contains("rw") && plain.contains("nosuid") && plain.contains("nodev"), "{plain}");
    place.umount();
    place.ok("", "mount base mnt -o ro,noexec,defaults,x-note=1 -o nofail");
    let (_, read_only) = options();
    assert!(read_only.contains("ro,") && read_only.contains("noexec"), "{read_only}");
    assert_eq!(
        fs::write(place.at("mnt/a"), "x").unwrap_err().raw_os_error(),
        Some(nix::libc::EROFS)
    );
    place.umount();
    place.ok("", "mount base mnt -o suid,dev,volatile,writeback,links=rewrite,allow-target=/etc");
    let (_, open) = options();
    assert!(!open.contains("nosuid") && !open.contains("nodev"), "{open}");
    place.umount();
    place.ok("", "mount base mnt -o store=home/named");
    assert!(place.exists("home/named/format"));
    place.umount();
    for wrong in ["oops", "links=maybe", "store=", "allow-target=relative"] {
        let said = place.fails("", &format!("mount base mnt -o {wrong}"), 2);
        assert!(said.contains(wrong.split('=').next().unwrap()), "{said}");
    }
}

#[test]
fn mount_helpers_call_it_in_their_own_form() {
    let place = Place::new();
    let (base, mnt) = (place.at("base"), place.at("mnt"));
    // As mount(8) calls /sbin/mount.fuse.jailfs.
    let mut command = Command::new(JAILFS);
    place.environment(&mut command);
    let helper = said(command.arg0("/sbin/mount.fuse.jailfs").args([&base, &mnt]).args([
        "-sv",
        "-o",
        "rw,noexec",
    ]));
    assert_eq!(helper.code, 0, "{helper:?}");
    assert!(place.is_mounted("mnt"));
    // umount(8), without waiting for the daemon.
    let daemon = place.daemon();
    until("umount(8) unmounts", || said(Command::new("umount").arg(&mnt)).code == 0);
    until("the daemon ends", || !lives(daemon));
    // As mount.fuse3 calls it, with the defaults of mount(8).
    let helper = said(place.command("", JAILFS).args([&base, &mnt]).args(["-o", "rw,dev,suid"]));
    assert_eq!(helper.code, 0, "{helper:?}");
    let entry = jailfs::internals::sys::mountinfo::read()
        .unwrap()
        .into_iter()
        .find(|e| e.mount_point == mnt.as_os_str().as_encoded_bytes());
    assert!(!entry.unwrap().has_option("nosuid"));
    place.umount();
    // A dry run.
    let helper = said(place.command("", JAILFS).args([&base, &mnt]).arg("-f"));
    assert_eq!((helper.code, place.is_mounted("mnt")), (0, false), "{helper:?}");
    let mut command = Command::new(JAILFS);
    place.environment(&mut command);
    assert_eq!(said(command.arg0("mount.fuse.jailfs").args([&base, &mnt]).arg("-x")).code, 2);
}

#[test]
fn a_signal_unmounts_and_closes_the_store() {
    for end in [Signal::SIGTERM, Signal::SIGINT] {
        let place = Place::new();
        place.mount();
        place.write("mnt/kept", "x");
        let daemon = place.daemon();
        signal(daemon, Signal::SIGHUP);
        assert_eq!(place.read("mnt/kept"), "x", "a hangup does not end a daemon");
        signal(daemon, end);
        until("the daemon ends", || !lives(daemon));
        assert!(!place.is_mounted("mnt"));
        assert_eq!(place.ok("base", "diff"), "A\tkept\n");
    }
}

#[test]
fn a_busy_mount_is_refused_or_ends_with_its_last_user() {
    let place = Place::new();
    place.mount();
    let daemon = place.daemon();
    let mut user = Command::new("sleep").arg("60").current_dir(place.at("mnt")).spawn().unwrap();
    let busy = place.fails("", "umount mnt", 11);
    assert!(
        busy.contains("busy") && busy.contains("\nhint: ") && busy.contains("--lazy"),
        "{busy}"
    );
    let who = format!("in use by sleep (pid {}), stands in '", user.id());
    assert!(busy.contains(&who), "{busy}");
    assert!(place.is_mounted("mnt"));
    place.ok("", "umount --lazy mnt");
    assert!(!place.is_mounted("mnt") && lives(daemon));
    // The store is still held; a command says so, or asks the daemon.
    assert!(place.fails("", "mount base mnt", 11).contains("hint: "));
    user.kill().unwrap();
    user.wait().unwrap();
    until("the daemon ends", || !lives(daemon));
    place.mount();
    // The same by a signal; a second one ends it at once.
    let daemon = place.daemon();
    let mut user = Command::new("sleep").arg("60").current_dir(place.at("mnt")).spawn().unwrap();
    signal(daemon, Signal::SIGTERM);
    until("the mount is detached", || !place.is_mounted("mnt"));
    assert!(lives(daemon));
    signal(daemon, Signal::SIGTERM);
    until("the daemon ends", || !lives(daemon));
    user.kill().unwrap();
    user.wait().unwrap();
}

#[test]
fn acknowledged_changes_of_a_killed_daemon_are_there_again() {
    let place = Place::new();
    place.mount();
    place.ok("mnt", "checkpoint green");
    place.write("mnt/a", "acknowledged\n");
    fs::create_dir(place.at("mnt/dir")).unwrap();
    let daemon = place.daemon();
    signal(daemon, Signal::SIGKILL);
    until("the daemon is dead", || !lives(daemon));
    let gone = fs::metadata(place.at("mnt/sub/unseen")).unwrap_err().raw_os_error();
    assert!(matches!(gone, Some(nix::libc::ENOTCONN | nix::libc::ECONNABORTED)), "{gone:?}");
    let dead = place.fails("", "-C mnt log", 1);
    assert!(dead.contains("is dead\nhint: 'jailfs umount "), "{dead}");
    // Without the mount, commands read the store themselves, and a mount replaces the dead one.
    assert_eq!(place.ok("base", "diff"), "M\ta\nA\tdir/\n");
    let again = place.say("", "mount base mnt");
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.err.contains("the dead mount at"), "{again:?}");
    assert_eq!((place.read("mnt/a").as_str(), place.exists("mnt/dir")), ("acknowledged\n", true));
    assert_eq!(place.ok("mnt", "log").lines().count(), 1);
    let daemon = place.daemon();
    signal(daemon, Signal::SIGKILL);
    until("the daemon is dead", || !lives(daemon));
    let detached = place.say("", "umount mnt");
    assert!(
        detached.code == 0 && detached.err.contains("was dead; the mount is detached"),
        "{detached:?}"
    );
    assert!(!place.is_mounted("mnt"));
}

#[test]
fn a_mount_over_its_own_base_hides_it() {
    let place = Place::new();
    place.ok("", "mount base base");
    place.write("base/a", "in the sandbox\n");
    let status = place.ok("base", "status");
    assert!(status.contains(&format!("mount       {}", place.at("base").display())), "{status}");
    let pid = place.json("base", "status")[0]["pid"].as_i64().unwrap() as i32;
    signal(pid, Signal::SIGKILL);
    until("the daemon is dead", || !lives(pid));
    place.ok("", "mount base base");
    assert_eq!(place.read("base/a"), "in the sandbox\n");
    // Applied while the mount hides the base.
    assert!(place.ok("base", "apply").starts_with("applied: 1 modified\n"));
    place.write("base/b", "not applied");
    place.ok("", "umount base");
    assert_eq!(
        (place.read("base/a").as_str(), place.exists("base/b")),
        ("in the sandbox\n", false)
    );
}

#[test]
fn in_the_foreground_it_reports_the_mount_and_ends_with_it() {
    for by_signal in [true, false] {
        let place = Place::new();
        let mut command = Command::new(JAILFS);
        place.environment(&mut command);
        let err = fs::File::options().create_new(true).write(true).open(place.at("err")).unwrap();
        command
            .args(["mount", "-f", "base", "mnt"])
            .current_dir(place.root())
            .stdin(Stdio::null())
            .stderr(err);
        let mut child = command.spawn().unwrap();
        until("it stands", || place.read("err").contains("mounted at '"));
        assert_eq!(place.read("mnt/a"), "one\n");
        if by_signal {
            signal(child.id().cast_signed(), Signal::SIGINT);
        } else {
            place.umount();
        }
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert!(!place.is_mounted("mnt"));
    }
}

#[test]
fn of_two_concurrent_mounts_one_succeeds() {
    let place = Place::new();
    fs::create_dir(place.at("mnt2")).unwrap();
    let said: Vec<_> = std::thread::scope(|scope| {
        let both = ["mnt", "mnt2"].map(|mnt| {
            scope.spawn({
                let place = &place;
                move || place.say("", &format!("mount base {mnt}"))
            })
        });
        both.map(|one| one.join().unwrap()).into_iter().collect()
    });
    let mut codes: Vec<i32> = said.iter().map(|said| said.code).collect();
    codes.sort_unstable();
    assert_eq!(codes, [0, 11], "{said:?}");
}

#[test]
fn a_command_waits_for_another_or_is_refused() {
    let place = Place::new();
    place.mount();
    place.umount();
    // Two commands without a daemon: one holds the lock, the other waits for it or says so.
    let said: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..4)
            .map(|n| {
                scope.spawn({
                    let place = &place;
                    move || place.say("base", &format!("checkpoint c{n}"))
                })
            })
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(said.iter().all(|said| said.code == 0 || said.code == 11), "{said:?}");
    let made = said.iter().filter(|said| said.code == 0).count();
    assert_eq!(place.ok("base", "log").lines().count(), made, "{said:?}");
}

#[test]
fn mount_8_finds_the_helper() {
    let place = Place::new();
    fs::create_dir(place.at("bin")).unwrap();
    fs::copy(JAILFS, place.at("bin/jailfs")).unwrap();
    let fstab =
        format!("{0}/base {0}/mnt fuse.jailfs noauto,noexec,nofail 0 0\n", place.root().display());
    place.write("fstab", fstab);
    // In a mount namespace of its own, so that the system's programs stay unchanged.
    let script = "
        mount --bind bin /usr/local/bin
        mount -t fuse.jailfs $PWD/base $PWD/mnt -o noexec; cat mnt/a; umount mnt
        mount --fstab fstab $PWD/mnt; grep $PWD/mnt /proc/self/mountinfo | cut -d' ' -f 6
        umount mnt
    ";
    let mut command = place.command("", "unshare");
    let output = said(command.args(["-m", "sh", "-euxc", script]));
    assert_eq!((output.code, output.out.as_str()), (0, "one\nrw,noexec,relatime\n"), "{output:?}");
}

/// Every program in a mount namespace of its own has a copy of the mount.
#[test]
fn a_copy_of_the_mount_in_another_namespace_does_not_keep_the_daemon() {
    let place = Place::new();
    place.mount();
    let daemon = place.daemon();
    let mut command = place.command("", "unshare");
    let script = "echo there; cat mnt/a; read line; cat mnt/a || echo gone";
    let mut other = command
        .args(["-m", "sh", "-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = std::io::BufReader::new(other.stdout.take().unwrap());
    let mut line = || {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        line
    };
    assert_eq!((line(), line()), ("there\n".to_owned(), "one\n".to_owned()));
    let start = std::time::Instant::now();
    place.umount();
    assert!(start.elapsed() < std::time::Duration::from_secs(20), "the unmount waits for them");
    until("the daemon ends", || !lives(daemon));
    place.mount();
    other.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(line(), "gone\n", "another user's mount is shown there");
    assert!(other.wait().unwrap().success());
}

/// A bind mount shows the same tree at another place.
#[test]
fn in_a_bind_mount_a_command_finds_the_sandbox() {
    let place = Place::new();
    place.mount();
    place.sh(
        "mnt",
        "mkdir -p in/deep other; echo 1 > x; echo 1 > in/x; echo 1 > in/deep/x; echo 1 > other/x",
    );
    place.ok("mnt", "checkpoint");
    let script = "
        mkdir copy; mount --bind mnt/in copy
        echo 2 | tee mnt/x mnt/in/x mnt/in/deep/x mnt/other/x
        cd copy; $JAILFS restore @-1 x; cat ../mnt/x x deep/x ../mnt/other/x
        cd deep; $JAILFS show @:x; $JAILFS restore @-1 .; cat ../../mnt/x x ../../mnt/other/x
        cd ../..; umount copy
    ";
    let mut command = place.command("", "unshare");
    let output = said(command.env("JAILFS", JAILFS).args(["-m", "sh", "-uc", script]));
    let numbers: String = output.out.lines().filter(|line| line.len() == 1).collect();
    assert_eq!(numbers, format!("2{}{}{}", "2122", "2", "212"), "{output:?}");
}

#[test]
fn a_held_and_a_damaged_store_have_their_own_exit_codes() {
    let place = Place::new();
    place.mount();
    place.write("mnt/x", "some content\n");
    place.ok("mnt", "checkpoint");
    place.write("mnt/y", "more of it\n");
    let store = place.json("mnt", "status")[0]["store"].as_str().unwrap().to_owned();
    place.umount();
    // Another program has the lock and does not listen.
    let held = place.sh("", &format!("flock {store}/lock $JAILFS -C base log || echo code $?"));
    assert!(held.out == "code 11\n" && held.err.contains("hint: "), "{held:?}");
    let held = place.sh("", &format!("flock {store}/lock $JAILFS mount base mnt || echo code $?"));
    assert!(held.out == "code 11\n" && held.err.contains("another jailfs has it open"), "{held:?}");
    let journal = format!("{store}/layers/00000001/journal");
    let mut bytes = fs::read(&journal).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(&journal, bytes).unwrap();
    for line in ["-C base log", "mount base mnt", "-C base status --json"] {
        let damaged = place.fails("", line, 4);
        assert!(damaged.contains("layers/00000001/journal at offset "), "{damaged}");
    }
    assert_eq!(place.run_code("true"), 125);
    assert!(!place.is_mounted("mnt"));
}

/// A command can cause log lines for as long as it likes.
#[test]
fn the_log_of_a_daemon_has_a_limit() {
    let place = Place::new();
    let mounted = place.sh("", "JAILFS_LOG=trace $JAILFS mount base mnt --store store");
    assert_eq!(mounted.code, 0, "{mounted:?}");
    let long = place.sh(
        "",
        "head -c 9000000 /dev/zero >> store/daemon.log; for i in $(seq 700); do : > mnt/x; \
         rm mnt/x; done",
    );
    assert_eq!(long.code, 0, "{long:?}");
    let len = std::fs::metadata(place.at("store/daemon.log")).unwrap().len();
    assert!(len < 8 << 20, "{len} bytes");
    assert!(place.read("store/daemon.log").contains("was emptied"));
}

/// Limits of the shell that mounts: the daemon raises soft ones, and reports a hard one that is too
/// low.
#[test]
fn limits_of_the_shell_do_not_end_the_daemon() {
    let place = Place::new();
    for n in 0..300 {
        place.write(format!("base/sub/f{n}"), "x");
    }
    let said = place.sh(
        "",
        "ulimit -S -f 16; ulimit -S -n 64; $JAILFS mount base mnt
         [ $(cat mnt/sub/f* | wc -c) = 300 ]
         $JAILFS -C mnt status > /dev/null",
    );
    assert_eq!(said.code, 0, "{said:?}");
    // Another shell, without these limits, writes more than they allow.
    let said = place.sh(
        "mnt",
        "head -c 3000000 /dev/zero > large; sync large; wc -c < large; $JAILFS checkpoint",
    );
    assert_eq!((said.code, said.out.lines().next()), (0, Some("3000000")), "{said:?}");
    place.umount();
    // The command of a run has the limits of its caller.
    let said = place.sh(
        "base",
        "ulimit -S -f 16; ulimit -S -n 100; $JAILFS run --discard -- sh -c 'ulimit -f; ulimit -n'",
    );
    assert_eq!((said.code, said.out.as_str()), (0, "16\n100\n"), "{said:?}");
    let place = crate::confine::place();
    for (limit, says) in
        [("-n 64", "allows 64 open files (ulimit -n)"), ("-f 16", "allows files of 8192 bytes")]
    {
        let script = format!("ulimit {limit}; exec $JAILFS run --discard -- true");
        let said = crate::confine::at_srv(&place, crate::confine::Account::User, &script);
        assert_eq!(said.code, 125, "{said:?}");
        assert!(said.err.contains(says), "{}", said.err);
    }
}

/// Options that mount(8) passes to every filesystem, the source in `df`, and set-id programs and
/// devices by the defaults of mount(8).
#[test]
fn the_conventions_of_mount_are_kept() {
    let place = Place::new();
    fs::create_dir(place.at("bin")).unwrap();
    fs::copy(JAILFS, place.at("bin/jailfs")).unwrap();
    let fstab = |options: &str| {
        format!("{0}/base {0}/mnt fuse.jailfs {options} 0 0\n", place.root().display())
    };
    place.write("fstab", fstab("noauto,noatime,nodiratime,lazytime,sync,dirsync"));
    place.write("fstab2", fstab("noauto,nosuid,nodev,relatime,async,fsname=a\\040name"));
    place.write(
        "script",
        "
        no() { if \"$@\" 2>/dev/null; then echo it went well: $*; exit 9; fi; }
        mount --bind bin /usr/local/bin
        trap 'umount -l mnt 2>/dev/null || true' EXIT
        mount --fstab fstab $PWD/mnt; grep \" $PWD/mnt \" /proc/self/mountinfo | cut -d' ' -f 6
        [ \"$(df --output=source mnt | tail -n 1)\" = \"$PWD/base\" ]
        cp $(command -v id) mnt/id; chown 1234 mnt/id; chmod 4755 mnt/id; mknod mnt/null c 1 3
        [ $(setpriv --reuid 4321 --clear-groups mnt/id -u) = 1234 ]; echo x > mnt/null
        umount mnt; mount --fstab fstab2 $PWD/mnt
        [ $(setpriv --reuid 4321 --clear-groups mnt/id -u) = 4321 ]; no sh -c 'echo x > mnt/null'
        [ \"$(df --output=source mnt | tail -n 1)\" = 'a name' ]; touch mnt/before
        mount -o remount,ro $PWD/mnt; no touch mnt/after; [ -e mnt/before ]
        grep -q \"$PWD/mnt ro,nosuid,nodev\" /proc/self/mountinfo
        mount -o remount,rw,noexec $PWD/mnt; touch mnt/after; no mnt/id -u
        no mount -o remount,sync $PWD/mnt; no mount -o remount,keep=3 $PWD/mnt; umount mnt
        ",
    );
    let mut command = place.command("", "unshare");
    let output = said(command.args(["-m", "sh", "-eux", "script"]));
    let options = output.out.lines().next().unwrap_or_default().to_owned();
    assert_eq!(output.code, 0, "{output:?}");
    assert!(
        options.starts_with("rw") && options.contains("noatime") && options.contains("nodiratime"),
        "{options}"
    );
}

/// Runs a script in a mount namespace of its own. Other tests make mount namespaces too, and each
/// would hold a copy of a mount that umount(8) removes here. This one holds none of theirs.
fn in_namespace(place: &Place, script: &str) {
    place.write("script", script);
    let mut command = place.command("", "unshare");
    let said = said(command.args(["-m", "--propagation", "slave", "sh", "-eu", "script"]));
    assert_eq!((said.code, said.out.as_str()), (0, "kept\n"), "{said:?}");
}

/// After umount(8) the daemon may need some time. The next mount waits for it.
#[test]
fn a_mount_waits_for_a_daemon_that_ends_slowly() {
    in_namespace(
        &Place::new(),
        "
        $JAILFS mount base mnt; echo kept > mnt/x; trap 'umount mnt' EXIT
        daemon=$($JAILFS status -C mnt --json | sed -n 's/.*\"pid\":\\([0-9]*\\).*/\\1/p')
        kill -STOP $daemon; umount mnt; (sleep 2; kill -CONT $daemon) &
        $JAILFS mount base mnt; cat mnt/x
        ",
    );
}

/// The kernel gives the number of a device to the next filesystem when the mount is gone. A head is
/// not closed before the failpoint could write its name, which it can when the FIFO has a reader.
#[test]
fn a_mount_waits_although_another_filesystem_has_the_number_of_the_device() {
    in_namespace(
        &Place::new(),
        "
        JAILFS_FAILPOINTS=log:$PWD/steps $JAILFS mount base mnt
        cd base; $JAILFS fork other ../other > ../forked; cd ..
        echo kept > mnt/x; number=$(stat -c %d mnt)
        read_steps() { if [ -p steps ]; then exec 3<>steps; rm steps; fi; }
        trap 'read_steps; umount mnt other' EXIT
        mkfifo fifo; mv fifo steps; umount mnt
        for one in 1 2 3 4 5 6 7 8; do
            mkdir -p held/$one; mount -t tmpfs tmpfs held/$one
            if [ $(stat -c %d held/$one) = $number ]; then break; fi
        done
        (sleep 3; read_steps; sleep 1) & $JAILFS mount base mnt; cat mnt/x
        ",
    );
}

/// Takes the name of the control socket. The first connection gets the greeting of the daemon, and
/// is closed then, as a daemon does that ends. After that the daemon has its name again.
const ENDS_ONCE: &str = "
import os, socket
os.rename('control', 'real')
real = socket.socket(socket.AF_UNIX)
real.connect('real')
stream = real.makefile('rb')
length = stream.read(4)
greeting = length + stream.read(int.from_bytes(length, 'little'))
ends = socket.socket(socket.AF_UNIX)
ends.bind('control')
ends.listen()
print('ready', flush=True)
taken, _ = ends.accept()
taken.sendall(greeting)
os.rename('real', 'control')
taken.close()
print('closed', flush=True)
";

#[test]
fn a_command_whose_daemon_ends_before_it_answers_asks_the_next_one() {
    let place = Place::new();
    place.ok("", "mount base mnt --store store");
    let mut python = Command::new("python3");
    python.args(["-c", ENDS_ONCE]).current_dir(place.at("store")).stdout(Stdio::piped());
    let mut ending = python.spawn().unwrap();
    let mut lines = std::io::BufReader::new(ending.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    place.ok("", "checkpoint one --store store");
    assert_eq!(lines.next().unwrap().unwrap(), "closed");
    assert!(ending.wait().unwrap().success());
    assert_eq!(place.ok("", "log --store store").lines().count(), 1, "it was made once");
    place.umount();
}

/// With `dirsync` and `sync`, each change of names and attributes is synced before the answer.
#[test]
fn a_change_of_names_is_synced_if_the_mount_asks_for_it() {
    for (option, is_synced) in [("async", false), ("dirsync", true), ("sync", true)] {
        let place = Place::new();
        let mount = format!(
            "JAILFS_FAILPOINTS=log:$PWD/steps $JAILFS mount base mnt -o gc=off,history=0,{option}"
        );
        assert_eq!(place.sh("", &mount).code, 0);
        let syncs = || place.read("steps").matches("store.sync").count();
        let changes = [
            "mkdir d",
            "mkfifo p",
            "ln -s a l",
            "ln a h",
            "mv h i",
            "chmod 600 i",
            "setfattr -n user.x -v 1 i",
            "setfattr -x user.x i",
            "rm i",
            "rmdir d",
        ];
        let synced = changes.iter().filter(|change| {
            let before = syncs();
            let said = place.sh("mnt", change);
            assert_eq!(said.code, 0, "{change}: {said:?}");
            syncs() > before
        });
        let synced: Vec<_> = synced.collect();
        // Without the option the daemon syncs now and then by itself.
        assert_eq!(synced.len() == changes.len(), is_synced, "{option}: {synced:?}");
        place.umount();
    }
}
