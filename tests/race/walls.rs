//! The walls between attempts.

use crate::place::Place;
use crate::{pick, race};

#[test]
fn an_attempt_cannot_see_or_change_another() {
    let place = Place::new();
    place.make_out();
    // The first one makes its marks and waits; the second one looks for them.
    let script = r#"
        if [ $JAILFS_ATTEMPT = 1 ]; then
            echo secret > mark; echo secret > /tmp/mark; echo secret > /dev/shm/mark
            $JAILFS checkpoint theirs > /dev/null; echo later >> a; sleep 60.777 &
            touch ../out/ready; while [ ! -e ../out/done ]; do sleep 0.02; done
            cat a mark; ls; exit 1
        fi
        while [ ! -e ../out/ready ]; do sleep 0.02; done
        rm a; echo mine > mark
        for path in /tmp/mark /dev/shm/mark .jailfs/checkpoints/theirs; do
            [ ! -e $path ] || echo "sees $path"
        done
        cat .jailfs/log; ls .jailfs/checkpoints; ls .jailfs/forks
        pgrep -x sleep > /dev/null && echo "sees its processes"
        other=$($JAILFS forks | grep -o 'run-[0-9]*-1')
        for rev in theirs $other@ $other@-1 $(seq 1 30); do
            $JAILFS show $rev:mark 2> /dev/null | grep secret && echo "reads $rev"
            $JAILFS restore $rev mark > /dev/null 2>&1 && grep -s secret mark &&
                echo "restores $rev"
        done
        for head in $other main; do
            [ ! -e .jailfs/forks/$head ] || echo "sees head $head"
            cat .jailfs/forks/$head/mark .jailfs/forks/$head/a 2> /dev/null
            mkdir .jailfs/forks/$head 2> /dev/null && echo "makes $head"
        done
        mkdir .jailfs/forks/own-$JAILFS_ATTEMPT && cat .jailfs/forks/own-2/mark | grep -v mine
        $JAILFS fork --drop own-2 > /dev/null 2>&1 || echo "does not drop its own fork"
        $JAILFS --head $other checkpoint 2> /dev/null && echo "uses it"
        $JAILFS fork --drop $other 2> /dev/null && echo "drops it"
        $JAILFS merge $other --theirs . > /dev/null 2>&1; grep -s secret mark && echo "merges it"
        $JAILFS fork mine --from $other@ > /dev/null 2>&1 && echo "forks it"
        $JAILFS log | grep theirs && echo "lists it"
        for op in $(seq 1 20); do
            $JAILFS op restore $op > /dev/null 2>&1 && grep -s secret mark && echo "goes to $op"
        done
        $JAILFS status > /dev/null || echo "has no status"
        touch ../out/done; exit 1
    "#;
    let said = pick(&place, "--forks 2 --jobs 2 --bind-rw ../out", "keep", script);
    let (attempts, _) = race(&said);
    assert!(attempts.iter().all(|one| one["exit"] == 1), "{said:?}");
    let second: Vec<&str> = said.err.lines().filter(|line| line.starts_with("[2] ")).collect();
    assert!(second.is_empty(), "{second:#?}\n{said:?}");
    let first: Vec<&str> = said.err.lines().filter(|line| line.starts_with("[1] ")).collect();
    assert_eq!(
        first,
        ["one", "later", "secret", "a", "del", "mark", "sub"].map(|line| format!("[1] {line}")),
        "{said:?}"
    );
}

#[test]
fn an_attempt_has_no_terminal_and_no_input_and_inherits_nothing() {
    let place = Place::new();
    let script = "exec 3< a; $JAILFS run --forks 1 --keep -- sh -c 'cat; ls /proc/self/fd | wc -l; \
        (: > /dev/tty) 2> /dev/null || echo no terminal' 2>&1 | grep '^\\[1\\]'";
    let said = place.sh("base", script);
    // 0, 1, 2, and the one with which `ls` reads the directory.
    assert_eq!(said.out, "[1] 4\n[1] no terminal\n", "{said:?}");
}

#[test]
fn attempts_have_limits_of_their_own() {
    let place = Place::new();
    let script = "touch small; for n in 1 2 3; do touch $n || exit 1; done 2>/dev/null
        [ $JAILFS_ATTEMPT = 2 ] && { rm 1 2 3; exit 0; }
        for n in $(seq 30); do touch more$n || exit 1; done 2>/dev/null";
    let said = place.run("--forks 2 --jobs 1 --max-files 10 --keep", script);
    assert_eq!(said.code, 0, "{said:?}");
    let (attempts, last) = race(&said);
    assert_eq!((&attempts[0]["exit"], &last["winner"]), (&1.into(), &2.into()), "{said:?}");
    assert_eq!(place.ok("base", "diff base"), "A\tsmall\n");
}
