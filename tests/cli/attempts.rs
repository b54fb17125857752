//! `jailfs run --timeout --attempts`: the effects of one attempt on the next.

use std::time::{Duration, Instant};

use crate::place::Place;

#[test]
fn a_failed_attempt_is_rolled_back_and_the_next_starts_from_the_same_state() {
    let place = Place::new();
    place.make_out();
    place.run("--keep", "echo kept >> a");
    let script = r#"
        ls; cat a; echo $JAILFS_ATTEMPT >> ../out/attempts; [ ! -e /tmp/left ] || exit 9
        rm -rf sub del; echo $JAILFS_ATTEMPT > n; echo > /tmp/left; $JAILFS checkpoint >/dev/null
        (setsid sh -c 'trap "" TERM HUP; while :; do echo > ../out/alive; echo > late; sleep 0.01
        done' &)
        while [ ! -e ../out/alive ]; do sleep 0.01; done
        [ $JAILFS_ATTEMPT = 3 ]
    "#;
    let said = place.run("--attempts 5 --keep --bind-rw ../out", script);
    assert_eq!((said.code, said.out), (0, "a\ndel\nsub\none\nkept\n".repeat(3)), "{}", said.err);
    assert_eq!(place.read("out/attempts"), "1\n2\n3\n");
    assert!(said.err.contains("attempt 1 of 5 failed (1), and was rolled back\n"), "{}", said.err);
    let diff = place.ok("base", "diff base");
    assert!(
        diff.contains("M\ta\n") && diff.contains("A\tn\n") && diff.contains("D\tdel\n"),
        "{diff}"
    );
    std::fs::remove_file(place.at("out/alive")).unwrap();
    let all = place.run("--attempts 2 --keep", "echo $JAILFS_ATTEMPT > n; cat n; exit 7");
    assert_eq!((all.code, all.out.as_str()), (7, "1\n2\n"), "{}", all.err);
    assert!(!place.exists("out/alive"), "every process of an attempt is gone");
    // Only the changes of the last attempt are kept.
    assert_eq!(place.run("--keep", "cat n").out, "2\n");
    let missing = place.say("base", "run --attempts 3 no-such-command");
    assert_eq!(
        (missing.code, missing.err.matches("No such file").count()),
        (127, 1),
        "{missing:?}"
    );
    assert_eq!(place.say("base", "run --attempts 0 true").code, 2);
}

#[test]
fn a_command_that_times_out_is_ended_with_all_its_children() {
    let place = Place::new();
    place.make_out();
    let start = Instant::now();
    let said = place.run("--timeout 0.3s --keep", "echo x > n; sleep 20 & sleep 20");
    assert_eq!(said.code, 124, "{said:?}");
    assert!(said.err.contains("jailfs: the time is over: the command is ended\n"), "{said:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(place.ok("base", "diff base"), "A\tn\n");
    // A command that needs time to finish gets some; the outcome is still a timeout.
    let said = place.run(
        "--timeout 0.3 --keep",
        "trap 'echo late > n; exit 0' TERM; while :; do sleep 0.01; done",
    );
    assert_eq!(said.code, 124, "{said:?}");
    assert_eq!(place.run("--keep", "cat n").out, "late\n");
    // A command that ignores the signal is killed, also if it is stopped.
    let stubborn =
        "trap '' TERM; echo x > ../out/alive; while :; do echo x > ../out/alive; sleep 0.01; done";
    let said = place.run("--timeout 0.3 --attempts 1 --discard --bind-rw ../out", stubborn);
    assert_eq!(said.code, 124, "{said:?}");
    std::fs::remove_file(place.at("out/alive")).unwrap();
    let said = place.run("--timeout 0.3 --attempts 2 --discard", "kill -STOP $$");
    assert_eq!(said.code, 124, "{said:?}");
    assert!(said.err.contains("attempt 1 of 2 ran out of time, and was rolled back\n"), "{said:?}");
    assert!(!place.exists("out/alive"), "it lives");
    let quick = place.run("--timeout 1m", "exit 3");
    assert_eq!(quick.code, 3);
    assert_eq!(place.say("base", "run --timeout nothing true").code, 2);
}

#[test]
fn an_attempt_finds_nothing_of_the_one_before_in_the_snapshot_directory_either() {
    let place = Place::new();
    let before = place.run(
        "--keep",
        "echo 1 >> a; $JAILFS checkpoint mine >/dev/null; echo 2 >> a; mkdir d; echo 1 > d/x; \
         echo 2 > d/y; mv d/y d/x",
    );
    assert_eq!(before.code, 0, "{}", before.err);
    let script = r#"
        mkdir .jailfs/checkpoints/c || exit 20
        echo secret$JAILFS_ATTEMPT > new; $JAILFS checkpoint named$JAILFS_ATTEMPT >/dev/null ||
        exit 21
        $JAILFS hold c >/dev/null || exit 22
        ls .jailfs/checkpoints; $JAILFS log | wc -l; $JAILFS op log | wc -l
        $JAILFS history a | wc -l
        $JAILFS history d/x | wc -l; find .jailfs/history | sort
        grep -rhs secret .jailfs/history .jailfs/checkpoints/*/ .jailfs/checkpoints/[0-9]*/ | sort
        for n in $(seq 60); do $JAILFS show $n:new 2>/dev/null; done
        echo $JAILFS_ATTEMPT >> a; rm new; mv d e; echo 3 > e/x; $JAILFS checkpoint >/dev/null
        $JAILFS restore c >/dev/null
        rm -rf d; echo over >> a
        exit $JAILFS_ATTEMPT
    "#;
    let said = place.run("--attempts 3 --keep", script);
    assert_eq!(said.code, 3, "{}", said.err);
    let first: Vec<&str> = said.out.lines().collect();
    let each = first.len() / 3;
    let attempts: Vec<String> = first
        .chunks(each)
        .zip(1..)
        .map(|(lines, n)| {
            lines
                .join("\n")
                .replace(&format!("secret{n}"), "secret")
                .replace(&format!("named{n}"), "named")
        })
        .collect();
    assert!(attempts[0].contains("secret") && attempts[0].contains("d/x"), "{}", said.out);
    assert_eq!(attempts[0], attempts[1], "{}", said.err);
    assert_eq!(attempts[0], attempts[2], "{}", said.err);
    // The caller's checkpoints are there, and those of the last attempt.
    let log = place.ok("base", "log");
    assert!(log.contains("mine") && log.contains("named3") && !log.contains("named2"), "{log}");
    assert_eq!(place.ok("base", "show mine:a"), "one\n1\n");
    let restored = place.say("base", "restore mine");
    assert_eq!(restored.code, 0, "{restored:?}");
    let store = place.ok("base", "check --read-data");
    assert!(!store.is_empty());
}
