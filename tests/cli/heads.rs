//! Heads under `run`, of ordinary users, and in the eyes of an attacker.

use std::path::Path;

use jailfs::internals::control;
use jailfs::sandbox::{Reply, Request, Rev};

use crate::place::Place;
use crate::user;

/// The messages that a command sends to the control socket to reach another head, as the verbs that
/// send them. Each must fail, and leave the head as it is.
const ATTACKS: &[&str] = &[
    "--head other checkpoint stolen",
    "--head other restore base",
    "--head other discard",
    "--head other undo a",
    "--head other status",
    "--head other log",
    "--head other fork mine",
    "--head other umount .",
    "--head other apply --dry-run",
    "fork --drop other",
    "--head main fork --drop other",
];

/// A command in `run` has the control socket of its store. It means its own head there.
#[test]
fn a_command_reaches_no_head_but_its_own() {
    let place = Place::new();
    assert_eq!(place.run("--keep", "echo main > a").code, 0);
    place.ok("base", "fork other");
    place.ok("base", "--head other checkpoint before");
    // The caller's own head gets a checkpoint before each run.
    let state = |place: &Place| -> Vec<String> {
        let text = place.ok("base", "--head other log") + &place.ok("base", "forks");
        text.lines().filter(|line| !line.contains("before run")).map(str::to_owned).collect()
    };
    let before = state(&place);
    let lines: String = ATTACKS
        .iter()
        .map(|line| format!("$JAILFS {line} >/dev/null 2>>../out/says; echo $?\n"))
        .collect();
    place.make_out();
    // In the sandbox, and outside of its mount, where the variable names the store.
    let script = format!(
        "{lines} cd /; {}",
        lines.replace("../out", &place.at("out").display().to_string())
    );
    let said = place.run("--keep --bind-rw ../out", &script);
    let codes: Vec<&str> = said.out.lines().collect();
    assert_eq!(codes.len(), 2 * ATTACKS.len(), "{said:?}");
    for (code, line) in codes.iter().zip(ATTACKS.iter().cycle()) {
        assert!(!["0", "2"].contains(code), "'{line}' has ended with {code}: {said:?}");
    }
    let says = place.read("out/says");
    assert!(says.contains("a command of 'jailfs run' has its own head, 'main', only"), "{says}");
    assert_eq!(state(&place), before);
    // Outside, the same commands succeed.
    for line in ["--head other checkpoint stolen", "--head other discard", "--head other fork mine"]
    {
        place.ok("base", line);
    }
}

/// The same by a program that speaks the protocol itself, as the command of the test below: this
/// program again. Elsewhere it does nothing.
#[test]
fn a_command_that_speaks_the_protocol() {
    let Some(store) = std::env::var_os("ATTACKED_STORE") else { return };
    let name = Some("stolen".to_owned());
    let requests = [
        Request::Log,
        Request::Checkpoint { name, message: String::new() },
        Request::Discard { detach_mounts: false },
        Request::Fork { names: vec!["mine".to_owned()], from: None },
    ];
    for request in requests {
        let mut client = control::connect(Path::new(&store)).unwrap().unwrap();
        client.set_head(Some("other".to_owned()));
        match client.call(&request) {
            Ok(_) => println!("\nThe attack succeeds: {request:?}"),
            Err(error) => println!("\nIt is refused: {error}"),
        }
    }
}

/// The name of the head in a message does not count. The verbs of `jailfs` would fail without this
/// wall, too: they look into the store, which the command does not have.
#[test]
fn the_name_in_a_message_does_not_open_another_head() {
    let place = Place::new();
    assert_eq!(place.run("--keep", "echo main > a").code, 0);
    place.ok("base", "fork other");
    let store = std::fs::read_dir(place.at("home/.local/state/jailfs")).unwrap();
    let store = store.map(|entry| entry.unwrap().path()).next().unwrap();
    place.make_out();
    // While the command waits, a client outside may name any head.
    let program = std::env::current_exe().unwrap();
    let wait = format!(
        "touch ../out/ready; while [ ! -e ../out/done ]; do sleep 0.01; done
         $JAILFS --head other log >/dev/null 2>&1; echo $?; $JAILFS log >/dev/null; echo $?
         ATTACKED_STORE={} {} --exact heads::a_command_that_speaks_the_protocol --nocapture |
             grep -E '^(The attack|It is)'",
        store.display(),
        program.display(),
    );
    std::thread::scope(|scope| {
        let run = scope.spawn(|| place.run("--keep --bind-rw ../out", &wait));
        crate::place::until("it runs", || place.exists("out/ready"));
        let mut client = control::connect(&store).unwrap().unwrap();
        client.set_head(Some("other".to_owned()));
        assert!(matches!(client.call(&Request::Log), Ok(Reply::Log(_))));
        assert_eq!(client.mounts().unwrap().meant, "other");
        client.set_head(None);
        assert_eq!(client.mounts().unwrap().meant, "main");
        place.write("out/done", "");
        let said = run.join().unwrap();
        let lines: Vec<&str> = said.out.lines().collect();
        assert_eq!((lines.len(), &lines[..2]), (6, &["11", "0"][..]), "{said:?}");
        let refused = "It is refused: use head 'other': a command of 'jailfs run' has its own head";
        assert!(lines[2..].iter().all(|line| line.starts_with(refused)), "{said:?}");
    });
    assert!(!place.ok("base", "--head other log").contains("stolen"));
}

#[test]
fn a_command_reads_other_heads_and_drops_only_its_own_forks() {
    let place = Place::new();
    assert_eq!(place.run("--keep", "echo main > a").code, 0);
    place.ok("base", "fork other");
    let said = place.run(
        "--keep",
        "
        echo changed > a
        $JAILFS show other@:a; $JAILFS diff other@ @
        $JAILFS fork mine; $JAILFS forks | grep -c .
        $JAILFS fork --drop other 2>/dev/null; echo $?
        $JAILFS fork --drop mine 2>/dev/null; echo $?
        mkdir .jailfs/forks/made; ls .jailfs/forks; cat .jailfs/forks/*/a
        $JAILFS fork --drop made 2>/dev/null; echo $?
        mkdir /tmp/m; $JAILFS fork third /tmp/m 2>/dev/null || echo refused
        ",
    );
    assert_eq!(
        said.out,
        "main\nM\ta\nfork mine of main\n3\n11\n0\nmade\nother\nchanged\nmain\n0\nrefused\n",
        "{said:?}"
    );
    assert!(place.ok("base", "forks").contains("other"));
    assert_eq!(Rev::parse("other@").to_string(), "other@");
}

/// Forks that a command leaves behind go with its changes, and stay with them.
#[test]
fn discarded_and_failed_attempts_leave_no_forks() {
    let place = Place::new();
    let said = place.run("--discard", "echo x > a; $JAILFS fork mine -n 3 >/dev/null");
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(place.ok("base", "forks").lines().count(), 1);
    let said = place.run("--keep --attempts 2", "$JAILFS fork again$JAILFS_ATTEMPT; exit 1");
    assert_eq!(said.code, 1, "{said:?}");
    let forks = place.ok("base", "forks");
    assert!(forks.contains(" again2 ") && forks.lines().count() == 2, "{forks}");
}

/// A fork is the sandbox of a command, too.
#[test]
fn run_takes_the_head_that_is_named() {
    let place = Place::new();
    assert_eq!(place.run("--keep", "echo main > a").code, 0);
    place.ok("base", "fork try");
    let said = place.sh("base", "$JAILFS --head try run --keep -- sh -c 'cat a; echo tried > a'");
    assert_eq!((said.code, said.out.as_str()), (0, "main\n"), "{said:?}");
    assert_eq!(place.ok("base", "show @:a"), "main\n");
    assert_eq!(place.ok("base", "show try@:a"), "tried\n");
    assert_eq!(
        place.sh("base", "$JAILFS --head missing run --keep -- true || echo $?").out,
        "125\n"
    );
    // A store that is made now has no forks.
    std::fs::create_dir(place.at("fresh")).unwrap();
    let fresh = place.say("", "-C fresh --head try run --keep -- true");
    assert!(fresh.code == 125 && fresh.err.contains("there is no store yet"), "{fresh:?}");
    place.fails("", "--head try mount fresh mnt", 10);
    assert!(!Path::new(&place.at("mnt/a")).exists());
}

/// An ordinary user mounts by fusermount3, also through the running daemon.
#[test]
fn an_ordinary_user_mounts_forks() {
    let place = user::place();
    let said = user::as_nobody(
        &place,
        r#"
        cd ..; $JAILFS mount base mnt; mkdir -p home/forks
        echo two >> mnt/a
        cd mnt; $JAILFS fork try ../home/forks -n 3; cd ..
        [ "$(grep -c ' fuse.jailfs .*user_id=65534' /proc/self/mountinfo)" = 4 ]
        [ "$(tail -n 1 home/forks/try-2/a)" = two ]
        echo three > home/forks/try-2/a; [ "$(tail -n 1 mnt/a)" = two ]
        [ "$($JAILFS -C home/forks/try-2 diff @ try-1@)" = "$(printf 'M\ta')" ]
        $JAILFS umount mnt; [ "$(cat home/forks/try-2/a)" = three ]
        for n in 1 2 3; do $JAILFS umount home/forks/try-$n; done
        $JAILFS --head try-3 mount base mnt; [ "$(tail -n 1 mnt/a)" = two ]
        $JAILFS umount mnt
        "#,
    );
    assert_eq!(said.code, 0, "{said:?}");
}

/// A daemon in another mount namespace would make a mount that is invisible here.
#[test]
fn a_daemon_in_another_mount_namespace_mounts_nothing_here() {
    let place = Place::new();
    std::fs::create_dir(place.at("other")).unwrap();
    place.mount();
    let said = place.sh(
        "",
        "$JAILFS -C mnt fork try
         code=0; unshare -m $JAILFS --head try mount base other 2>says || code=$?; echo $code
         grep -o 'is in another mount namespace' says
        grep -c \"$PWD/other\" /proc/self/mountinfo || true",
    );
    assert_eq!(said.out, "fork try of main\n12\nis in another mount namespace\n0\n", "{said:?}");
}
