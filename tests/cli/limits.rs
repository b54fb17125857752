//! The limits of a sandbox's store, and of a command's use of the machine.

use std::fs;

use crate::place::Place;

#[test]
fn a_sandbox_at_its_limit_has_a_full_disk() {
    let place = Place::new();
    place.write("base/large", vec![7; 3 << 20]);
    let script = r#"
        [ "$(df --output=size -B1M . | tail -n 1 | tr -d ' ')" = 4 ]
        ! dd if=/dev/urandom of=f bs=64k count=100 2> ../out/error
        grep -q 'No space left on device' ../out/error
        [ $(stat -c %s f) -ge 3000000 ]; [ $(stat -c %s f) -le 4194304 ]
        [ "$(df --output=avail -B64K . | tail -n 1 | tr -d ' ')" -le 1 ]
        ! dd if=/dev/zero of=large conv=notrunc bs=64k count=10 2>/dev/null
        mv large moved; rm f a; chmod 600 del; : > sub/b; rm -r sub; ls
    "#;
    place.make_out();
    let said = place.run("--max-bytes 4M --keep --bind-rw ../out", script);
    assert_eq!(
        (said.code, said.out.as_str()),
        (0, "del\nmoved\n"),
        "{}\n{}",
        said.err,
        place.read("out/error")
    );
    assert_eq!(fs::read(place.at("base/large")).unwrap(), vec![7; 3 << 20]);
    // Content that was removed before a checkpoint is freed by a compaction; nothing else is in the
    // way.
    let next =
        place.run("--keep", "dd if=/dev/urandom of=f bs=64k count=100 2>/dev/null; stat -c %s f");
    assert_eq!((next.code, next.out.as_str()), (0, "6553600\n"), "{}", next.err);
}

/// Records of metadata count, too: a command that renames for ever cannot grow the journal without
/// end.
#[test]
fn renames_and_attributes_stop_a_little_beyond_the_limit() {
    let place = Place::new();
    let attack = "import os, sys
names = ['n' * 250 + str(n) for n in range(2)]
open(names[0], 'w').close()
def forever(act):
    try:
        for n in range(15000):
            act(n)
    except OSError as error:
        return error.errno
print(forever(lambda n: os.rename(names[n % 2], names[1 - n % 2])),
      forever(lambda n: os.chmod('a', 0o600 + n % 2)))";
    place.write("base/attack.py", attack);
    let said = place.run("--max-bytes 4M --keep", "python3 attack.py; rm n*; rm a; : > del; ls");
    assert_eq!((said.code, said.out.as_str()), (0, "28 28\nattack.py\ndel\nsub\n"), "{}", said.err);
    let bytes = place.json("base", "status")[0]["store_bytes"].as_u64().unwrap();
    assert!(bytes < 7 << 20, "{bytes} bytes with a limit of 4 MiB");
    place.ok("base", "checkpoint full");
    place.ok("base", "discard");
    // Without a limit the same does not fail.
    let said = place.run("--keep", "touch a; python3 attack.py");
    assert_eq!((said.code, said.out.as_str()), (0, "None None\n"), "{}", said.err);
}

/// Connections that a command holds do not lock its caller out.
#[test]
fn a_command_that_holds_connections_leaves_some_to_its_caller() {
    let place = Place::new();
    place.make_out();
    let hold = "import os, socket, time
held = []
for _ in range(64):
    one = socket.socket(socket.AF_UNIX); one.connect(os.environ['JAILFS_SANDBOX'] + '/control')
    held.append(one)
time.sleep(0.5); open(os.environ['OUT'] + '/ready', 'w').close(); time.sleep(30)";
    place.write("base/hold.py", hold);
    let script = "export OUT=$(realpath ../out)
                  $JAILFS run --keep --bind-rw ../out -- python3 hold.py &
                  while [ ! -e ../out/ready ]; do sleep 0.05; done
                  $JAILFS status >/dev/null && echo answered; kill $!; wait $! || true";
    let said = place.sh("base", script);
    assert_eq!(said.out, "answered\n", "{}", said.err);
}

#[test]
fn a_sandbox_makes_no_more_files_than_its_limit() {
    let place = Place::new();
    let script = r#"
        i=0; while touch n$i 2>/dev/null; do i=$((i+1)); done
        ! mkdir d 2>/dev/null; ! ln -s a l 2>/dev/null; ! mkfifo p 2>/dev/null
        [ "$(df -i --output=itotal,iavail . | tail -n 1 | tr -s ' ')" = ' 20 0' ]
        ls | grep -c ^n; rm n1 n2; mkdir d; touch d/e; ! touch d/f 2>/dev/null
    "#;
    let said = place.run("--max-files 20 --keep", script);
    // The root is one of the changed files.
    assert_eq!((said.code, said.out.as_str()), (0, "19\n"), "{}", said.err);
    assert_eq!(place.ok("base", "diff base").lines().count(), 19);
}

#[test]
fn mounts_have_limits_too() {
    let place = Place::new();
    place.ok("", "mount base mnt -o max-bytes=2M,max-files=10");
    let said = place.sh(
        "mnt",
        "! dd if=/dev/urandom of=f bs=64k count=100 2>/dev/null; rm f; \
         for i in 1 2 3 4 5 6 7 8 9 10; do touch n$i; done",
    );
    assert_ne!(said.code, 0, "{said:?}");
    assert!(said.err.contains("No space left on device"), "{said:?}");
    assert_eq!(
        place.sh("mnt", "ls | grep -c ^n; df --output=size -B1M . | tail -n 1 | tr -d ' '").out,
        "9\n2\n"
    );
    place.umount();
    assert!(
        place
            .fails("", "mount base mnt -o max-bytes=many", 2)
            .contains("a size is a number of bytes")
    );
}

#[test]
fn space_of_unlinked_files_is_freed() {
    let place = Place::new();
    place.ok("", "mount base mnt -o max-bytes=8M");
    // One that stays, so that not everything is freed at once in the end.
    let said = place.sh(
        "mnt",
        "exec 8> stays; rm stays; echo stays >&8
         for n in 1 2 3 4 5 6; do exec 7> t; rm t
         dd if=/dev/urandom bs=64k count=64 >&7 2>/dev/null; exec 7>&-; done
         cat /proc/self/fd/8; dd if=/dev/urandom of=f bs=64k count=64 2>/dev/null",
    );
    assert_eq!((said.code, said.out.as_str()), (0, "stays\n"), "{said:?}");
    place.umount();
}

#[test]
fn memory_and_processes_have_limits_if_there_are_control_groups() {
    let place = Place::new();
    let groups = || {
        let listed = fs::read_dir("/sys/fs/cgroup/pids")
            .or_else(|_| fs::read_dir("/sys/fs/cgroup"))
            .unwrap();
        listed
            .flatten()
            .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"jailfs-"))
            .count()
    };
    place.write(
        "base/fork.py",
        r#"
import os, signal
children = []
try:
    for _ in range(100):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError:
    print("refused before the 20th:", len(children) < 20)
for child in children:
    os.kill(child, signal.SIGKILL)
"#,
    );
    let script = "python3 fork.py; python3 -c 'x = bytearray(400 << 20); \
        print(1)' 2>/dev/null || echo ended";
    let said = place.run("--processes 20 --memory 200M", script);
    if said.code == 125 {
        // Where control groups cannot be created, the message says so, and what to do.
        assert!(
            said.err.contains("limit memory or processes") && said.err.contains("hint: "),
            "{said:?}"
        );
        return;
    }
    assert_eq!(
        (said.code, said.out.as_str()),
        (0, "refused before the 20th: True\nended\n"),
        "{}",
        said.err
    );
    assert_eq!(groups(), 0, "the groups are removed");
}

#[test]
fn a_command_can_drop_its_own_checkpoints_and_never_those_of_its_caller() {
    let place = Place::new();
    let made = place.run("--keep", "echo 0 > n; $JAILFS checkpoint mine > /dev/null");
    assert_eq!(made.code, 0, "{}", made.err);
    let script = r#"
        for n in 1 2 3 4; do echo $n > n; $JAILFS checkpoint c$n > /dev/null; done
        i=0; while [ "$($JAILFS log | wc -l)" -gt 3 ] && [ $i -lt 60 ]; do sleep 0.6; i=$((i + 1))
        done
        $JAILFS log | grep -o 'c[0-9]\|mine' | tr '\n' ' '
    "#;
    let said = place.run("--keep --keep-checkpoints 2", script);
    assert_eq!((said.code, said.out.as_str()), (0, "c4 c3 mine "), "{}", said.err);
    assert!(said.err.contains("jailfs: dropped: checkpoint 1 'mine'\n"), "{}", said.err);
    let log = place.ok("base", "log");
    assert!(log.lines().count() == 2 && log.contains("c4") && log.contains("c3"), "{log}");
}

#[test]
fn checkpoints_count_with_their_size_on_disk() {
    let script = r#"
        i=0; while [ $i -lt 200 ] && mkdir .jailfs/checkpoints/c$i 2> ../out/error; do i=$((i+1))
        done
        grep -q 'No space left on device' ../out/error || exit 20
        [ $i -ge 5 ] || exit 21
        # The store may have turned out to take less than was thought.
        while $JAILFS checkpoint > /dev/null 2> ../out/error; do i=$((i+1))
        [ $i -lt 200 ] || exit 22; done
        grep -q 'the sandbox is at its storage limit' ../out/error &&
        grep -q '^hint: ' ../out/error || exit 23
        rm del; $JAILFS restore c1 > /dev/null; cat del; echo $i
    "#;
    for (limit, most) in [("--max-bytes 256K", 256 << 10), ("--max-files 28", 28 * 4096)] {
        let place = Place::new();
        place.make_out();
        let said = place.run(&format!("{limit} --keep --bind-rw ../out"), script);
        assert!(said.code == 0 && said.out.starts_with("del\n"), "{limit}: {said:?}");
        let taken = place.sh("home", "du -sB1 .local/state/jailfs/*/layers | cut -f1").out;
        // The directories of the layers are not counted.
        assert!(
            taken.trim().parse::<u64>().unwrap() < most * 3 / 2 + (64 << 10),
            "{limit}: {taken}"
        );
    }
}
