//! Descriptors that the command of `jailfs run` inherits: they change no object of the host, and
//! data passes through them completely and in order.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};

use crate::confine::{ACCOUNTS, Account, at_srv, place};
use crate::place::Place;

/// Tries to change the objects behind the standard descriptors in every way that needs no path. As
/// root, the command has all rights over files of its user namespace.
const ATTACK: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for fd in range(int(sys.argv[1]), int(sys.argv[2])):
    for attack in [
        lambda: os.fchmod(fd, 0o4755),
        lambda: os.fchown(fd, 7, 7),
        lambda: os.utime(fd, (1, 1)),
        lambda: os.setxattr(fd, "user.attacked", b"1"),
        lambda: os.ftruncate(fd, 1),
        lambda: os.chmod(f"/proc/self/fd/{fd}", 0o4755),
        lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC),
        lambda: libc.linkat(fd, b"", -100, f"/srv/base/linked{fd}".encode(), 0x1000),
        lambda: os.open("shadow", os.O_RDONLY, dir_fd=fd),
    ]:
        try:
            attack()
        except OSError:
            pass
"#;

/// The parts of a file that an attack could change. If the command may write a file, it changes its
/// times.
fn state(place: &Place, name: &str) -> String {
    let said = place.sh(
        "",
        &format!(
            "stat -c '%f %u %g %h %s' {name}; getfattr -d --absolute-names {name}; \
             cat {name} | cksum"
        ),
    );
    assert_eq!(said.code, 0, "{said:?}");
    said.out
}

#[test]
fn no_object_of_the_host_can_be_changed_through_a_descriptor() {
    for account in ACCOUNTS {
        let place = place();
        place.write("attack.py", ATTACK);
        for file in ["out/input", "out/output", "out/append", "out/both", "out/third"] {
            place.write(file, "as it was");
        }
        let run = "$JAILFS run --discard -- python3 -c \"$(cat ../attack.py)\" 0 12";
        let script = format!(
            "chmod 644 ../out/*; cd ../base; mkfifo ../out/fifo; null=$(stat -c '%a %u' /dev/null)
             {run} < ../out/input > ../out/made 2>/dev/null
             {run} 0<> ../out/both >> ../out/append 2>&1 3< ../out/third 4<> ../out/third 5< / \
                6>> ../out/third
             {run} < /etc > /dev/null 2>&1
             sleep 5 > ../out/fifo & {run} < ../out/fifo > /dev/zero
             [ \"$(stat -c '%a %u' /dev/null)\" = \"$null\" ]
             [ \"$(stat -c %a ../out/fifo)\" = 644 ]
             [ \"$(stat -c %a ../out/made)\" = 644 ]
             [ \"$(stat -c %a:%u ../out/append)\" = \"644:$(id -u)\" ]; [ ! -e linked0 ]"
        );
        let said = at_srv(&place, account, &script);
        assert_eq!(said.code, 0, "{account:?}: {}\n{}", said.out, said.err);
        for file in ["out/input", "out/both", "out/third"] {
            let owner = if account == Account::User { "65534 65534" } else { "0 0" };
            let now = state(&place, file);
            assert!(now.starts_with(&format!("81a4 {owner} 1 9\n")), "{account:?} {file}: {now}");
            assert!(!now.contains("attacked"), "{account:?} {file}: {now}");
            assert_eq!(place.read(file), "as it was", "{account:?} {file}");
        }
        assert!(fs::symlink_metadata(place.at("out/fifo")).unwrap().file_type().is_fifo());
    }
}

#[test]
fn the_attack_on_descriptors_succeeds_without_run() {
    let place = place();
    place.write("attack.py", ATTACK);
    place.write("out/input", "as it was");
    let said = at_srv(&place, Account::Root, "python3 ../attack.py 0 1 < ../out/input");
    assert_eq!(said.code, 0, "{said:?}");
    let mode = fs::metadata(place.at("out/input")).unwrap().permissions().mode();
    assert!(mode & 0o7777 == 0o4755 && place.read("out/input").is_empty(), "{mode:o}");
}

#[test]
fn output_of_a_command_is_in_its_files_in_order() {
    let place = Place::new();
    place.make_out();
    // One file for both streams, which are written alternately; its earlier content stays.
    let turns = "for n in $(seq 500); do echo out$n; echo err$n >&2; done";
    place.write("out/log", "before\n");
    let said =
        place.sh("base", &format!("$JAILFS run --discard -- sh -c '{turns}' >> ../out/log 2>&1"));
    assert_eq!(said.code, 0, "{said:?}");
    let log = place.read("out/log");
    let lines: Vec<&str> = log.lines().filter(|line| !line.starts_with("jailfs: ")).collect();
    let expected = (1..=500).flat_map(|n| [format!("out{n}"), format!("err{n}")]);
    assert!(
        lines
            .iter()
            .copied()
            .eq(std::iter::once("before".to_owned()).chain(expected).collect::<Vec<_>>()),
        "{log}"
    );
    let last = log.lines().last().unwrap();
    assert!(last.starts_with("jailfs: "), "the last line is from jailfs: {log}");
    // Many bytes, a command that is killed, and one that times out.
    let many = "head -c 50000000 /dev/zero | tr '\\0' x";
    let script = format!(
        "$JAILFS run --discard -- sh -c \"{many}\" > ../out/many 2>/dev/null; \
         [ $(wc -c < ../out/many) = 50000000 ]
         $JAILFS run --discard -- sh -c 'seq 100000; kill -9 $$' > ../out/killed 2>/dev/null ||
         [ $? = 137 ]
         [ $(tail -n1 ../out/killed) = 100000 ]
         $JAILFS run --discard --timeout 1 -- sh -c 'seq 100000
         sleep 60' > ../out/late 2>/dev/null || [ $? = 124 ]
         [ $(tail -n1 ../out/late) = 100000 ]
         $JAILFS run --discard -- sh -c '(sleep 60
         echo never) & echo now' > ../out/left 2>/dev/null; [ $(cat ../out/left) = now ]"
    );
    let said = place.sh("base", &script);
    assert_eq!(said.code, 0, "{said:?}");
}

#[test]
fn input_that_a_command_did_not_read_stays_readable() {
    let place = Place::new();
    place.make_out();
    place.write("out/in", "abcdefghij");
    place.write("out/long", "x".repeat(3_000_000) + "end");
    let script = "($JAILFS run --discard -- head -c 3; cat) < ../out/in 2>/dev/null; echo
                  ($JAILFS run --discard -- true; wc -c) < ../out/long 2>/dev/null
                  ($JAILFS run --discard -- cat; cat) < ../out/long 2>/dev/null | wc -c
                  $JAILFS run --discard -- cat < /dev/null 2>/dev/null
                  $JAILFS run --attempts 2 --discard -- sh -c 'cat; false' < ../out/in 2>/dev/null";
    let said = place.sh("base", script);
    assert_eq!(said.out, "abcdefghij\n3000003\n3000003\nabcdefghij", "{}", said.err);
}

#[test]
fn a_full_disk_behind_the_output_ends_the_command_and_is_reported() {
    let place = Place::new();
    place.make_out();
    let script = "mount -t tmpfs -o size=64k t ../out; code=0
                  $JAILFS run --discard -- sh -c 'yes' > ../out/log 2> ../err || code=$?
                  echo $code; wc -c < ../out/log";
    let mut command = place.command("base", "unshare");
    let said = crate::place::said(command.args(["-m", "sh", "-ec", script]));
    assert_eq!(said.out, "141\n65536\n", "{}", said.err);
    let err = place.read("err");
    assert!(
        err.contains("copy the standard output of the command: No space left on device"),
        "{err}"
    );
}

#[test]
fn a_terminal_stays_a_terminal_whose_mode_the_command_cannot_change() {
    let place = Place::new();
    place.write(
        "drive.py",
        "import os, pty, sys\nstatus = pty.spawn([sys.argv[1], 'run', '--discard', '--', 'sh', \
         '-c', sys.argv[2]])\nsys.exit(os.waitstatus_to_exitcode(status))",
    );
    let inside = "test -t 0 && test -t 1 && test -t 2 && tty && stty size && \
        chmod 777 /proc/self/fd/0; chown 7 /proc/self/fd/0; stat -Lc %a:%u /proc/self/fd/0; \
        : > /dev/tty && echo has-tty";
    let mut command = place.command("base", "python3");
    let said = crate::place::said(command.arg("../drive.py").arg(crate::place::JAILFS).arg(inside));
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.out.contains("/dev/console") && said.out.contains("has-tty"), "{}", said.out);
    assert!(!said.out.contains("777:") && !said.out.contains(":7\r"), "{}", said.out);
}
