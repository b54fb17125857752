//! Former leaks of `jailfs run`: ways for a command to learn or change more than it is shown.

use std::fs;

use crate::confine::{ACCOUNTS, Account, at_srv, place, without_namespaces};
use crate::place::Place;

/// The start of every script: `silent COMMAND` must not print the secret, and `no COMMAND` must
/// fail.
const WORDS: &str = r#"
no() { if "$@" >/dev/null 2>&1; then echo "it went well: $*" >&2; exit 99; fi; }
silent() { if "$@" 2>/dev/null | grep -aq SECRET; then echo "revealed by: $*" >&2; exit 99; fi; }
"#;

/// A place whose home, the base of these tests, has secrets in files and directories, and one that
/// was changed in a mount.
fn home() -> Place {
    let place = place();
    fs::create_dir_all(place.at("home/.config/git")).unwrap();
    place.write("home/.config/git/credentials", "SECRET\n");
    // Another name than the base of other tests, which check for leftovers in /tmp.
    fs::create_dir_all(place.at("repo")).unwrap();
    place
}

/// The attempts of a command whose sandbox is the home.
const TRY_EVERYTHING: &str = r#"
$JAILFS checkpoint x >/dev/null
for way in . .jailfs/checkpoints/x .jailfs/checkpoints/1 .jailfs/history; do
    silent grep -rs SECRET $way
    for file in .ssh/id .netrc .config/gcloud/token .config/git/credentials; do
        silent cat $way/$file; silent cat $way/$file/1
        silent dd if=$way/$file bs=3 skip=1
        silent python3 -c "print(open('$way/$file').read())"
    done
done
for state in base @ x 1; do
    for file in .ssh/id .netrc .config/gcloud/token .config/git/credentials
    do silent $JAILFS show $state:$file; done
    no $JAILFS show $state:.ssh; no $JAILFS show $state:.ssh/id
    silent $JAILFS diff -p $state
done
[ "$(cat .config/plain)" = plain ]; [ "$(cat .jailfs/checkpoints/x/src/file)" = source ]
[ -z "$(ls -A .jailfs/checkpoints/x/.ssh 2>/dev/null)" ]; no stat .jailfs/checkpoints/x/.ssh/id

# Wherever it is moved to, and under whatever name.
mv .config .moved
silent grep -rs SECRET .moved; silent cat .moved/gcloud/token; silent cat .moved/git/credentials
no ls .moved/gcloud/token
[ "$(cat .moved/plain)" = plain ]
cp -r .moved copied 2>/dev/null || true; silent grep -rs SECRET copied
no sh -c 'ls .moved/gcloud | grep token'; no mkdir .moved/gcloud/new; no rmdir .moved/gcloud
if mv .moved/git/credentials plain; then
    silent cat plain; ln plain linked; silent cat linked; no sh -c 'echo x >> plain'
    no truncate -s 3 plain
    silent $JAILFS diff -p; silent $JAILFS diff -p base
    rm plain linked; $JAILFS undo plain >/dev/null; silent cat plain
    silent cat .jailfs/history/plain/1; silent $JAILFS diff -p plain@1 plain
fi
silent $JAILFS diff -p; silent $JAILFS diff -p base; silent $JAILFS apply --dry-run
[ -z "$($JAILFS diff base | grep token)" ]; [ -z "$($JAILFS apply --dry-run | grep token)" ]

# And when it has come back.
$JAILFS restore x >/dev/null
silent grep -rs SECRET .; silent cat .config/gcloud/token; silent cat .config/git/credentials
mv .config .moved; $JAILFS restore x .config >/dev/null; silent grep -rs SECRET .
silent grep -rs SECRET .jailfs
$JAILFS restore x >/dev/null; mv .config .moved
"#;

#[test]
fn hidden_files_in_the_sandbox_do_not_leak() {
    for account in ACCOUNTS {
        let place = home();
        place.write("inside", format!("{WORDS}{TRY_EVERYTHING}"));
        let script = r#"
            export XDG_STATE_HOME=/srv/out; cd /srv/home
            $JAILFS run --keep -- sh -euc "$(cat /srv/inside)"
            # The next one, over what the first one has moved.
            $JAILFS run --keep -- sh -c '! grep -rs SECRET . && ! cat .moved/git/credentials &&
            ! ls .moved/gcloud/token && ! grep -rs SECRET .jailfs/checkpoints/x'
            # Outside the sandbox nothing is hidden.
            $JAILFS diff base | grep -q "R	.config/	.moved/"
            $JAILFS show x:.ssh/id | grep -q SECRET
            $JAILFS run --discard --show .config/gcloud -- sh -euc '
                grep -q SECRET .moved/gcloud/token; ! grep -rs SECRET .ssh .netrc'
            $JAILFS apply --protected | grep -q renamed || true
            grep -q SECRET .moved/gcloud/token; grep -q SECRET .moved/git/credentials
            grep -q SECRET .ssh/id; grep -q SECRET .netrc
        "#;
        let said = at_srv(&place, account, script);
        assert_eq!(said.code, 0, "{account:?}: {}\n{}", said.out, said.err);
    }
}

#[test]
fn hidden_files_in_the_sandbox_do_not_leak_without_namespaces_either() {
    let place = home();
    place.write("inside", format!("{WORDS}{TRY_EVERYTHING}"));
    let script = r#"
        export XDG_STATE_HOME=/srv/out; cd /srv/home
        exec $JAILFS run --walls=landlock --keep -- sh -euc "$(cat /srv/inside)"
    "#;
    let said = without_namespaces(&place, Account::User, script);
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    assert!(said.err.contains("no namespaces"), "{}", said.err);
}

#[test]
fn earlier_changes_of_a_hidden_file_are_hidden_with_it() {
    let place = home();
    fs::create_dir_all(place.at("mnt")).unwrap();
    let script = r#"
        export XDG_STATE_HOME=/srv/out
        $JAILFS mount /srv/home /srv/mnt; echo more >> /srv/mnt/.netrc; echo key > /srv/mnt/.ssh/new
        $JAILFS -C /srv/mnt checkpoint changed; $JAILFS umount /srv/mnt; cd /srv/home
        $JAILFS run --keep -- sh -c '
            ! grep -rs "SECRET\|more\|key" . .jailfs/checkpoints/changed .jailfs/history &&
            ! $JAILFS diff -p base | grep "SECRET\|more\|key\|new" && $JAILFS status'
        $JAILFS diff -p base | grep -q "^+.*more"
    "#;
    let said = at_srv(&place, Account::Root, script);
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
}

#[test]
fn a_bind_shows_nothing_that_is_hidden_in_it() {
    let hidden = r#"
        [ "$(cat $HOME/src/file)" = source ] || [ -z "$(ls -A $HOME/src)" ]
        [ "$(cat $HOME/.config/plain)" = plain ]
        silent cat $HOME/.ssh/id; silent cat $HOME/.netrc; silent grep -rs SECRET $HOME
    "#;
    let bound = format!("{WORDS}{hidden}");
    let withheld = format!("{WORDS}{hidden} no cat $HOME/src/file; no cat /srv/out/own/file");
    let named =
        format!("{WORDS}grep -q SECRET $HOME/.config/gcloud/token; silent cat $HOME/.ssh/id");
    let shown = format!(
        "{WORDS}grep -q SECRET $HOME/.ssh/id; no cat $HOME/.local/state/jailfs/other-1/format; \
         silent cat $HOME/.netrc"
    );
    for (options, script) in [
        ("--bind-ro /srv/home", &bound),
        ("--bind-rw /srv/home", &bound),
        (
            "--bind-ro /srv/home --hide /srv/home/src --bind-rw /srv/out --hide /srv/out/own",
            &withheld,
        ),
        (
            "--bind-ro /srv/home/src --hide /srv/home/src --bind-rw /srv/out/own --hide \
             /srv/out/own",
            &withheld,
        ),
        ("--bind-ro /srv/home --bind-ro /srv/home/.config/gcloud", &named),
        ("--show /srv/home --hide /srv/home/.netrc", &shown),
    ] {
        for with_namespaces in [true, false] {
            let place = home();
            fs::create_dir_all(place.at("out/own")).unwrap();
            place.write("out/own/file", "withheld");
            place.write("inside", script);
            let walls = if with_namespaces { "all" } else { "landlock" };
            let line = format!(
                "cd ../repo; exec $JAILFS run --walls={walls} {options} -- sh -euc \"$(cat \
                 ../inside)\""
            );
            let start = if with_namespaces { at_srv } else { without_namespaces };
            let said = start(&place, Account::User, &line);
            assert_eq!(said.code, 0, "{options} {walls}: {}\n{}", said.out, said.err);
        }
    }
    let place = home();
    for option in ["--show", "--bind-ro", "--bind-rw"] {
        let line = format!("exec $JAILFS run {option} /srv/home/.local/state/jailfs/other-1 true");
        let said = at_srv(&place, Account::Root, &line);
        assert!(
            said.code == 125 && said.err.contains("stores are never shown"),
            "{option}: {said:?}"
        );
        // Nor the store of the sandbox itself, wherever it is, and where it is mounted once more.
        let run = "$JAILFS --store /srv/kept run";
        for path in ["/srv/kept", "/srv/again/layers"] {
            let line = format!(
                "{run} true >/dev/null; mkdir -p /srv/again; mount --bind /srv/kept /srv/again; \
                 exec {run} {option} {path} true"
            );
            let own = at_srv(&place, Account::Root, &line);
            let is_refused = own.code == 125 && own.err.contains("stores are never shown");
            assert!(is_refused, "{option} {path}: {own:?}");
        }
    }
}

#[test]
fn a_command_can_do_nothing_through_the_daemon_of_another_sandbox() {
    let cases = [(Account::Root, "all"), (Account::User, "all"), (Account::User, "landlock")];
    for (account, walls) in cases {
        let place = home();
        for dir in ["other", "mnt", "third"] {
            fs::create_dir_all(place.at(dir)).unwrap();
        }
        place.write("other/file", "one\n");
        let given = if account == Account::User { "65534:65534" } else { "0:0" };
        let own = place.sh("", &format!("chown -R {given} other mnt third repo && chmod 777 ."));
        assert_eq!(own.code, 0, "{own:?}");
        let inside = format!(
            r#"{WORDS}
            for store in /srv/store2 /srv/store3; do
                for verb in status 'show @:file' 'apply' discard 'checkpoint inside' 'undo file' \
                    'umount /srv/mnt'; do no $JAILFS --store $store $verb; done
            done
            $JAILFS status >/dev/null; $JAILFS checkpoint >/dev/null
            (setsid $JAILFS status >/dev/null)"#
        );
        place.write("inside", inside);
        // One that is mounted, and one of another run.
        let script = format!(
            r#"
            $JAILFS --store /srv/store2 mount /srv/other /srv/mnt; echo two > /srv/mnt/file
            cd ../repo; mkfifo ../begin ../end
            (cd /srv/third
            exec $JAILFS --store /srv/store3 run --walls={walls} --bind-rw /srv --keep -- sh -c '
                echo three > file; echo > /srv/begin; read line < /srv/end') &
            trap "kill $! 2>/dev/null" EXIT; read line < ../begin
            $JAILFS run --walls={walls} --keep -- sh -euc "$(cat ../inside)"
            $JAILFS run --walls={walls} --bind-rw /srv --keep -- sh -euc "$(cat ../inside)"
            $JAILFS --store /srv/store2 status >/dev/null
            $JAILFS --store /srv/store3 status >/dev/null
            echo > ../end; wait $!; trap - EXIT; [ "$(cat /srv/third/file 2>/dev/null)" = "" ]
            [ "$($JAILFS --store /srv/store3 show @:file)" = three ]
            [ "$(cat /srv/mnt/file)" = two ]; [ "$(cat /srv/other/file)" = one ]
            $JAILFS --store /srv/store2 umount /srv/mnt
            "#
        );
        let start = if walls == "all" { at_srv } else { without_namespaces };
        let said = start(&place, account, &script);
        assert_eq!(said.code, 0, "{account:?} {walls}: {}\n{}", said.out, said.err);
    }
}

#[test]
fn no_standard_stream_can_be_a_directory_of_the_host() {
    let place = home();
    let inside = "for fd in 0 1 2; do ls /proc/self/fd/$fd/etc /proc/self/fd/$fd/srv \
        >/srv/out/answer 2>/dev/null && cat /srv/out/answer >>/srv/out/leak; done; true";
    let script = format!(
        "chmod 777 /srv/out; $JAILFS run --bind-rw /srv/out --keep -- sh -c '{inside}' < /
         $JAILFS run --bind-rw /srv/out --keep -- sh -c '{inside}' 1< /
         $JAILFS run --bind-rw /srv/out --keep -- sh -c '{inside}' 2< / || true
         [ ! -e /srv/out/leak ]; $JAILFS run --keep -- cat < /srv/host-file"
    );
    let said = at_srv(&place, Account::Root, &script);
    assert_eq!((said.code, said.out.as_str()), (0, "host"), "{}", said.err);
}

#[test]
fn sockets_are_unreachable_however_they_were_bound() {
    let place = home();
    let listen = "import os, socket, sys\nlistener = socket.socket(socket.AF_UNIX)\n\
        listener.bind(sys.argv[1])\nlistener.listen()\n\
        print('bound', flush=True)\nlistener.accept()";
    let connect = "import socket\nfor name in ['relative', 'held', 'elsewhere']:\n    \
        try:\n        socket.socket(socket.AF_UNIX).connect('/srv/out/' + name)\n        \
        print('connected', name)\n    except OSError:\n        print('refused', name)";
    place.write("listen.py", listen);
    place.write("base/connect.py", connect);
    let script = r#"
        mkfifo ../said; exec 3<>../said
        (cd /srv/out; exec python3 ../listen.py relative >&3 3>&-) & first=$!
        (cd /; exec 9</srv/out
        exec python3 /srv/listen.py /proc/self/fd/9/held >&3 3>&-) & second=$!
        (exec unshare -n python3 ../listen.py /srv/out/elsewhere >&3 3>&-) & third=$!
        for each in 1 2 3; do read line <&3; done
        $JAILFS run --keep -- python3 connect.py
        python3 connect.py; wait $first $second $third
    "#;
    let said = at_srv(&place, Account::Root, script);
    let expected = ["refused", "connected"].map(|how| {
        ["relative", "held", "elsewhere"].map(|name| format!("{how} {name}\n")).concat()
    });
    assert_eq!((said.code, said.out), (0, expected.concat()), "{}", said.err);
}
