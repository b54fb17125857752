//! `jailfs run` on a terminal: signals, job control, sizes and full-screen programs work as if the
//! command were run directly.
//!
//! A Python driver creates the terminal and plays the user: it types, and waits for output.

use crate::place::{JAILFS, Place, said};

/// Plays a script of `type`, `keys`, `key`, `see`, `size`, `settle` and `pause` lines to an
/// interactive shell.
const PERSON: &str = include_str!("person.py");

fn play(place: &Place, script: &str) {
    play_to(place, script, &["bash", "--norc", "--noprofile", "-i"]);
}

/// Plays it to a program that has the terminal for itself, like a CI job.
fn play_to(place: &Place, script: &str, program: &[&str]) {
    place.write("person.py", PERSON);
    place.write("play", script);
    let mut command = place.command("base", "python3");
    command.env("PS1", "").env("TERM", "xterm").env("JAILFS", JAILFS);
    let said = said(command.args(["../person.py", "../play"]).args(program));
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

#[test]
fn a_terminal_stops_and_interrupts_the_command_as_a_shell_expects() {
    let place = Place::new();
    place.write("base/catches", "trap 'echo caught' INT; echo ready; sleep 20; echo on");
    play(
        &place,
        r#"
type PS1='OUTSIDE> '
see OUTSIDE>
type $JAILFS run --keep -- cat
see confined by
type hello
see hello
see hello
key ^Z
see Stopped
see OUTSIDE>
type fg
see $JAILFS run
settle
type again
see again
see again
key ^C
see OUTSIDE>
type echo code $?
see code 130
type $JAILFS run --keep -- sh catches
see ready
pause
key ^C
see caught
see on
see OUTSIDE>
type $JAILFS run --keep -- cat &
see confined by
pause
type
see Stopped
type fg
see $JAILFS run
settle
type front
see front
see front
key ^D
see OUTSIDE>
type echo code $?
see code 0
type two() { read a; read b; echo "piped $a $b"; cat > /dev/null; }
type $JAILFS run --keep -- sh -c 'seq 1 3; cat' | two
see piped 1 2
key ^D
see OUTSIDE>
type for i in 1 2 3; do $JAILFS run --keep -- sleep 20; echo next; done
see confined by
key ^C
see OUTSIDE>
type exit
"#,
    );
}

#[test]
fn an_interactive_shell_has_job_control_and_returns_the_terminal() {
    let place = Place::new();
    play(
        &place,
        r#"
type PS1='OUTSIDE> '
see OUTSIDE>
type $JAILFS run --ask -- bash --norc --noprofile -i
see confined by
type PS1='INSIDE> '
see INSIDE>
type sleep 20
settle
key ^C
see INSIDE>
type sleep 20
settle
key ^Z
see Stopped
type kill %1; wait; echo jobs done
see jobs done
size 33 77
type stty size
see 33 77
type tty
see /dev/console
type suspend -f
see Stopped
see OUTSIDE>
type echo outside again; fg
see outside again
type echo inside again
see inside again
type echo new > new; exit 7
see [a]pply, [k]eep, [d]iscard
type d
see discarded: 1 added
see OUTSIDE>
type echo code $?
see code 7
type exit
"#,
    );
}

#[test]
fn a_full_screen_program_works_gets_new_sizes_and_leaves_the_terminal_as_it_was() {
    let place = Place::new();
    // Like an editor, it reads single keys without echo, and redraws when the size changes.
    place.write(
        "base/editor.py",
        r#"
import os, signal, sys, termios, tty
old = termios.tcgetattr(0)
def draw(*_):
    size = os.get_terminal_size(0)
    os.write(1, b'\x1b[2J\x1b[Hsize %d %d\r\n' % (size.lines, size.columns))
signal.signal(signal.SIGWINCH, draw)
def raw():
    tty.setraw(0)
    draw()
raw()
text = b''
while True:
    key = os.read(0, 1)
    if key == b'\x1a':
        termios.tcsetattr(0, termios.TCSADRAIN, old)
        os.kill(0, signal.SIGTSTP)
        raw()
    elif key == b'q':
        break
    elif key == b'K':
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        text += key
        os.write(1, b'<' + key.upper() + b'>')
open('text', 'wb').write(text)
termios.tcsetattr(0, termios.TCSADRAIN, old)
"#,
    );
    play(
        &place,
        r#"
type PS1='OUTSIDE> '
see OUTSIDE>
type $JAILFS run --keep -- python3 editor.py
see size
keys a
see <A>
size 40 90
see size 40 90
key ^Z
see Stopped
see OUTSIDE>
type echo outside; fg
see outside
see size 40 90
keys b
see <B>
keys q
see in the sandbox: 1 added
see OUTSIDE>
type $JAILFS run --ask -- sh -c 'cat text; python3 editor.py'
see ab
see size
keys K
see [a]pply or [k]eep
type k
see kept
see OUTSIDE>
type stty -a | grep -o ' icanon' ; echo code $?
see icanon
see code 0
type exit
"#,
    );
}

#[test]
fn a_command_that_stops_itself_does_not_stop_the_timeout() {
    let place = Place::new();
    let stops =
        "trap '' TERM; kill -STOP $$; echo woken > ../out/woken; while :; do kill -STOP $$; done";
    place.make_out();
    place.write("base/stops", stops);
    place.write("base/stops-all", "kill -STOP 0; kill -STOP $$; sleep 60");
    play(
        &place,
        r#"
type PS1='OUTSIDE> '
see OUTSIDE>
type $JAILFS run --timeout 0.5 --discard -- sh stops-all
see Stopped
see OUTSIDE>
see the time is over
type wait; echo all gone
see all gone
type exit
"#,
    );
    // No process would continue this one.
    let run = [
        JAILFS,
        "run",
        "--timeout",
        "0.5",
        "--discard",
        "--bind-rw",
        "../out",
        "--",
        "sh",
        "stops",
    ];
    play_to(&place, "see confined by\nsee the time is over\nsee nothing\n", &run);
    assert!(place.exists("out/woken"), "the command continues to its end");
}

#[test]
fn a_command_that_holds_the_terminal_is_ended_by_the_timeout_nevertheless() {
    let place = Place::new();
    let holds = r#"
import os, signal, sys, termios, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if os.fork():
    termios.tcflow(2, termios.TCOOFF)
    open('held', 'w')
    time.sleep(60 if 'long' in sys.argv else 0)
else:
    os.setsid()
    signal.pause()
"#;
    place.write("base/holds.py", holds);
    play(
        &place,
        r#"
type PS1='OUTSIDE> '
see OUTSIDE>
type $JAILFS run --timeout 0.5 --attempts 2 --keep -- python3 holds.py long
see attempt 1 of 2 ran out of time
see the time is over
see A	held
see OUTSIDE>
type echo code $?
see code 124
type $JAILFS run --discard -- python3 holds.py
see processes remain
see OUTSIDE>
type exit
"#,
    );
}

#[test]
fn an_answer_counts_only_after_the_question_and_a_patch_cannot_act_on_the_terminal() {
    let place = Place::new();
    // The patch would copy into the user's clipboard, and ring the bell. The command ends when a
    // line was typed, which it does not read.
    place.write(
        "base/evil",
        r#"printf 'x\033]52;c;eA==\007\233y\n' > new; echo ready
        python3 -c 'import select; select.select([0], [], [])'"#,
    );
    play(
        &place,
        r#"
type PS1='OUTSIDE> '
see OUTSIDE>
type $JAILFS run --ask -- sh evil
see ready
type a
see [a]pply, [k]eep, [d]iscard
type p
see +x\u{1b}]52;c;eA==\u{7}\x9by
see [a]pply, [k]eep, [d]iscard
type k
see kept
see OUTSIDE>
type $JAILFS diff base -p
see +x\u{1b}]52;c;eA==\u{7}\x9by
see OUTSIDE>
type $JAILFS diff base -p | grep -c "$(printf '\033]52')"
see 1
see OUTSIDE>
type exit
"#,
    );
    assert!(!place.exists("base/new"), "it was not applied");
}

#[test]
fn on_a_terminal_it_asks() {
    let place = Place::new();
    play(
        &place,
        r#"
type PS1='OUTSIDE> '
see OUTSIDE>
type $JAILFS run -- sh -c 'echo two >> a'
see [a]pply, [k]eep, [d]iscard, or show the [p]atch?
type what
see [a]pply, [k]eep, [d]iscard, or show the [p]atch?
type p
see +two
see [a]pply, [k]eep, [d]iscard, or show the [p]atch?
type a
see jailfs: applied: 1 modified
see OUTSIDE>
type $JAILFS run --ask -- sh -c 'echo three >> a'
see [a]pply, [k]eep, [d]iscard
type d
see jailfs: discarded: 1 modified
see OUTSIDE>
type $JAILFS run --ask -- sh -c 'echo four >> a; exit 5'
see [a]pply, [k]eep, [d]iscard
type keep
see jailfs: kept, not applied;
see OUTSIDE>
type echo code $?
see code 5
type $JAILFS run --ask -- true
see [a]pply or [k]eep?
key ^D
see jailfs: kept
see OUTSIDE>
type exit
"#,
    );
    assert_eq!(place.read("base/a"), "one\ntwo\n");
    assert_eq!(place.ok("base", "diff base"), "M\ta\n");
}
