//! Limits of memory and threads, set by the shell that mounts (`ulimit -v`, `-d`, `-u`) or while
//! the daemon runs. The daemon raises what it can, reports what is too low, and loses nothing.

use std::fs;

use crate::place::Place;
use crate::user;

/// The daemon raises soft limits of the shell, and a command gets them back.
#[test]
fn soft_limits_of_memory_and_processes_are_raised() {
    let place = Place::new();
    let limits = "ulimit -S -v 600000; ulimit -S -d 500000; ulimit -S -p 300";
    let said = place.sh("", &format!("{limits}; exec $JAILFS mount base mnt"));
    assert_eq!(said.code, 0, "{said:?}");
    let of_daemon = fs::read_to_string(format!("/proc/{}/limits", place.daemon())).unwrap();
    for limit in ["Max address space", "Max data size", "Max processes"] {
        let line = of_daemon.lines().find(|line| line.starts_with(limit)).unwrap();
        let mut limits = line[limit.len()..].split_whitespace();
        let (soft, hard) = (limits.next().unwrap(), limits.next().unwrap());
        assert_eq!(soft, hard, "{line}");
    }
    // The thread of a connection reserves 256 MiB of address space for its stack.
    let script = "
        for n in 1 2 3 4 5 6 7 8 9 10; do $JAILFS diff > /dev/null & all=\"$all $!\"; done
        for one in $all; do wait $one || exit 8; done; echo x > x; $JAILFS checkpoint > /dev/null";
    let mut command = place.command("mnt", "bash");
    let output =
        crate::place::said(command.env("JAILFS", crate::place::JAILFS).args(["-c", script]));
    assert_eq!(output.code, 0, "{output:?}");
    place.umount();
    let said = place.sh(
        "base",
        &format!("{limits}; $JAILFS run --discard -- sh -c 'ulimit -v; ulimit -d; ulimit -p'"),
    );
    assert_eq!((said.code, said.out.as_str()), (0, "600000\n500000\n300\n"), "{said:?}");
}

/// An ordinary user cannot raise hard limits. If they are too low for a daemon, it says so before
/// it mounts. At any limit of threads, the daemon serves, or reports the thread that it could not
/// start.
#[test]
fn hard_limits_that_are_too_low_are_reported() {
    let place = user::place();
    let said = user::as_nobody(
        &place,
        r#"
        cd ..; mkdir -p home/kept
        for limit in '-v 300000 address space (ulimit -v)' '-d 300000 data (ulimit -d)'; do
            set -- $limit; code=0
            (ulimit $1 $2; exec $JAILFS mount base mnt) 2> home/err || code=$?
            cat home/err >&2; [ $code = 12 ]; grep -q "bytes of ${limit#* * }" home/err
            grep -q '^hint: ' home/err
        done
        refused=0; served=0
        for most in 1 2 4 6 8 9 10 11 12 14 16 18 20 25 30 100 300; do
            code=0; prlimit --nproc=$most $JAILFS mount base mnt 2> home/err || code=$?
            if [ $code = 0 ]; then
                served=$((served+1)); echo $most > mnt/kept$most; [ "$(cat mnt/a)" = one ]
                $JAILFS umount mnt 2> home/err ||
                { grep -q 'Resource temporarily unavailable' home/err; fusermount3 -u mnt; }
            else
                refused=$((refused+1)); cat home/err >&2
                grep -q 'Resource temporarily unavailable' home/err
            fi
            if grep -i panicked home/err; then exit 9; fi
            # Without a process for fusermount3 a mount may stay that answers ENOTCONN. The next
            # mount replaces it.
            ls mnt > home/list 2> home/err || grep -q 'connect' home/err
            [ ! -s home/list ] || grep -q '^a$' home/list
        done
        [ $refused -ge 2 ]; [ $served -ge 2 ]; [ ! -e base/kept300 ]
        $JAILFS mount base mnt; [ "$(cat mnt/kept300)" = 300 ]; $JAILFS umount mnt
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

/// While no thread can be started, programs go on, and a jailfs command prints why it gets no
/// answer. It works again once threads can be started.
#[test]
fn a_daemon_without_threads_goes_on_and_says_so() {
    let place = user::place();
    let said = user::as_nobody(
        &place,
        r#"
        cd ..; $JAILFS mount base mnt; cd mnt; $JAILFS checkpoint green
        daemon=$($JAILFS status --json | sed 's/.*"pid":\([0-9]*\).*/\1/')
        prlimit --pid $daemon --nproc=1:
        echo two >> a; sync a; mkdir n; mv a n/a; rm del
        [ "$(cat n/a | tr '\n' ' ')" = 'one two ' ]; find . > /dev/null
        for n in 1 2 3; do
            code=0; $JAILFS log 2> ../home/err || code=$?; cat ../home/err >&2; [ $code = 1 ]
            grep -q 'start a thread of the daemon: Resource temporarily unavailable' ../home/err
            grep -q '^hint: .*ulimit -u' ../home/err
        done
        mkdir .jailfs/checkpoints/other || true; echo three >> n/a
        prlimit --pid $daemon --nproc=500:
        $JAILFS checkpoint later; $JAILFS restore green; [ "$(cat a)" = one ]; [ -e del ]
        $JAILFS restore later; [ "$(cat n/a | tr '\n' ' ')" = 'one two three ' ]
        kill $daemon; cd ..; while grep -q " $PWD/mnt " /proc/self/mountinfo ||
        [ -e /proc/$daemon/exe ]; do sleep 0.1; done
        $JAILFS mount base mnt; [ "$(cat mnt/n/a | tr '\n' ' ')" = 'one two three ' ]
        if grep -i panicked home/.local/state/jailfs/*/daemon.log; then exit 9; fi
        $JAILFS umount mnt; $JAILFS check --store $(echo home/.local/state/jailfs/*)
        "#,
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}
