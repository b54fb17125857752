//! How a winner is found, and what becomes of it and of the others.

use crate::place::Place;
use crate::{heads, pick, race};

#[test]
fn the_first_that_succeeds_wins_and_the_others_are_ended() {
    let place = Place::new();
    let script = "echo $JAILFS_ATTEMPT > n; echo try $JAILFS_TRY
        case $JAILFS_ATTEMPT in 2) rm del; exit 0;; 3) exit 3;; esac; sleep 60; echo > late";
    let said = place.run("--forks 4 --jobs 4 --keep", script);
    assert_eq!(said.code, 0, "{said:?}");
    let (attempts, last) = race(&said);
    assert_eq!(attempts.len(), 4);
    assert_eq!((&attempts[1]["result"], &attempts[1]["exit"]), (&"exited".into(), &0.into()));
    assert_eq!(attempts[1]["changes"], 2, "{said:?}");
    assert_eq!((&attempts[1]["added"], &attempts[1]["deleted"]), (&1.into(), &1.into()));
    assert_eq!(
        (&attempts[0]["result"], &attempts[3]["result"]),
        (&"stopped".into(), &"stopped".into())
    );
    assert_eq!((&last["winner"], &last["pick"]), (&2.into(), &"first".into()));
    assert!(said.err.contains("[2] try 1\n"), "{said:?}");
    assert!(said.err.contains("jailfs: attempt 2 has won"), "{said:?}");
    // The caller's head is the winner, and the forks are gone.
    assert_eq!(place.ok("base", "diff base"), "D\tdel\nA\tn\n");
    assert_eq!(place.ok("base", "show @:n"), "2\n");
    assert_eq!(heads(&place), ["main"]);
    assert!(place.exists("base/del"), "the base is not changed before an apply");
    // Only the winner's checkpoint is left.
    assert_eq!(place.json("base", "log").iter().filter(|one| one["automatic"] == false).count(), 1);
    place.ok("base", &format!("op restore {}", last["undo"]));
    assert_eq!(place.ok("base", "diff base"), "");
    assert!(!place.ok("base", "check --read-data").is_empty());
}

#[test]
fn the_highest_number_wins_and_what_the_scoring_command_writes_does_not_count() {
    let place = Place::new();
    let script = "echo $JAILFS_ATTEMPT > n; exit 4";
    let score = "echo counting; echo junk > scored; case $(cat n) in 1) echo 1.5;; 2|4) echo 30;; \
        3) echo 99; exit 1;; 5) echo much;; esac";
    let said = pick(&place, "--forks 5 --jobs 3 --keep", score, script);
    assert_eq!(said.code, 0, "{said:?}");
    let (attempts, last) = race(&said);
    let scores: Vec<_> = attempts.iter().map(|one| one["score"].as_f64()).collect();
    assert_eq!(scores, [Some(1.5), Some(30.0), None, Some(30.0), None]);
    assert_eq!(last["winner"], 2, "of equals the lowest number wins");
    assert!(said.err.contains("attempt 3: the command of --pick has failed (1)"), "{said:?}");
    assert!(
        said.err.contains("attempt 5: the command of --pick has printed no number"),
        "{said:?}"
    );
    assert_eq!(place.ok("base", "diff base"), "A\tn\n");
    assert_eq!(place.ok("base", "show @:n"), "2\n");
}

#[test]
fn without_a_winner_the_sandbox_is_as_before() {
    let place = Place::new();
    place.run("--keep", "echo kept >> a");
    let said = place.run("--forks 2 --keep", "echo $JAILFS_ATTEMPT >> a; exit 7");
    assert_eq!(said.code, 1, "{said:?}");
    let (attempts, last) = race(&said);
    assert!(attempts.iter().all(|one| one["exit"] == 7), "{said:?}");
    assert!(last["winner"].is_null() && said.err.contains("no attempt has won"), "{said:?}");
    assert_eq!(place.ok("base", "show @:a"), "one\nkept\n");
    assert_eq!(heads(&place), ["main"]);
    let mut log = place.json("base", "log");
    log.retain(|one| one["automatic"] == false);
    assert_eq!(log.len(), 1, "the checkpoints of the losers are dropped: {log:?}");
    let no_score = pick(&place, "--forks 2 --keep", "false", "true");
    assert_eq!(no_score.code, 1, "{no_score:?}");
}

#[test]
fn forks_can_be_kept() {
    let place = Place::new();
    let said = pick(&place, "--forks 2", "keep", "echo $JAILFS_ATTEMPT > n; exit $JAILFS_ATTEMPT");
    assert_eq!(said.code, 0, "{said:?}");
    let (_, last) = race(&said);
    let kept: Vec<String> = serde_json::from_value(last["kept"].clone()).expect("names");
    assert_eq!((kept.len(), place.ok("base", "diff base").as_str()), (2, ""));
    assert_eq!(place.ok("base", &format!("show {}@:n", kept[1])), "2\n");
    assert_eq!(heads(&place).len(), 3);
    // The losers of another race.
    let said = place.run(
        "--forks 2 --jobs 1 --keep --keep-forks",
        "echo $JAILFS_ATTEMPT > n; [ $JAILFS_ATTEMPT = 2 ]",
    );
    let (_, last) = race(&said);
    assert_eq!((said.code, &last["winner"]), (0, &2.into()), "{said:?}");
    let kept: Vec<String> = serde_json::from_value(last["kept"].clone()).expect("names");
    assert_eq!(kept.len(), 1, "{said:?}");
    assert_eq!(place.ok("base", &format!("show {}@:n", kept[0])), "1\n");
    assert_eq!(place.ok("base", "show @:n"), "2\n");
    for fork in heads(&place).iter().filter(|name| *name != "main") {
        place.ok("base", &format!("fork --drop {fork}"));
    }
}

#[test]
fn the_winner_is_applied_if_the_caller_asks_for_it() {
    let place = Place::new();
    let said = place
        .run("--forks 3 --apply", "echo $JAILFS_ATTEMPT > n; [ $JAILFS_ATTEMPT = 3 ] || exit 1");
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(place.read("base/n"), "3\n");
    let none = place.run("--forks 2 --apply", "echo x > m; exit 1");
    assert_eq!((none.code, place.exists("base/m")), (1, false), "{none:?}");
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let place = Place::new();
    for line in [
        "run --forks 2 --discard true",
        "run --forks 0 true",
        "run --jobs 2 true",
        "run --keep-forks true",
        "run --forks 2 --pick keep --apply true",
        "run --forks 2 --pick ask true",
    ] {
        let said = place.say("base", line);
        assert_eq!(said.code, 2, "{line}: {said:?}");
    }
    assert!(place.say("base", "run --forks 2 --pick ask true").err.contains("needs a terminal"));
}

#[test]
fn the_user_is_asked_on_a_terminal_and_picks_one_or_none() {
    let place = Place::new();
    place.write("person.py", include_str!("../cli/person.py"));
    let script = "echo $JAILFS_ATTEMPT > n; [ $JAILFS_ATTEMPT != 3 ] || exit 5";
    place.write("base/attempt", script);
    let play = |answers: &str| {
        let script = format!(
            "type PS1='OUTSIDE> '\nsee OUTSIDE>\n\
             type $JAILFS run --forks 3 --keep --pick ask -- sh attempt\n{answers}\
             see OUTSIDE>\ntype echo code $?\nsee code CODE\ntype exit\n"
        );
        let (script, code) = script.rsplit_once("code CODE").expect("it is there");
        let wanted = if answers.contains("type n") { "code 1" } else { "code 0" };
        place.write("play", format!("{script}{wanted}{code}"));
        let mut command = place.command("base", "python3");
        command.env("PS1", "").env("TERM", "xterm").env("JAILFS", crate::place::JAILFS);
        let shell = ["../person.py", "../play", "bash", "--norc", "--noprofile", "-i"];
        let said = crate::place::said(command.args(shell));
        assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    };
    let asked = "see continue from which attempt? its number, or [n]one\npause\n";
    // An answer that is none is asked for again.
    play(&format!("{asked}type 9\n{asked}type what\n{asked}type 2\nsee attempt 2 has won\n"));
    assert_eq!(place.ok("base", "show @:n"), "2\n");
    assert_eq!(heads(&place), ["main"]);
    play(&format!("{asked}type n\nsee no attempt has won\n"));
    assert_eq!(place.ok("base", "show @:n"), "2\n", "the sandbox is as before");
    // An attempt that failed can be chosen, too.
    play(&format!("{asked}type 3\nsee attempt 3 has won\n"));
    assert_eq!(place.ok("base", "show @:n"), "3\n");
    assert_eq!(heads(&place), ["main"]);
}

#[test]
fn attempts_use_one_name_and_the_winner_brings_its_checkpoints() {
    let place = Place::new();
    let script = "echo $JAILFS_ATTEMPT > n; $JAILFS checkpoint mine > /dev/null || exit 9
        grep -q $JAILFS_ATTEMPT .jailfs/checkpoints/mine/n";
    let said = pick(&place, "--forks 2 --jobs 2", "keep", script);
    let (attempts, last) = race(&said);
    assert!(attempts.iter().all(|one| one["exit"] == 0), "{said:?}");
    let kept = |at: usize| last["kept"][at].as_str().expect("a name").to_owned();
    assert_eq!(place.ok("base", &format!("show {}@mine:n", kept(0))), "1\n");
    assert_eq!(place.ok("base", &format!("show {}@mine:n", kept(1))), "2\n");
    place.ok("base", &format!("fork --drop {} {}", kept(0), kept(1)));
    assert_eq!(place.say("base", "show mine:n").code, 2, "it could be either");
    // The tree comes from the checkpoint of the winner then.
    assert_eq!(place.run("--forks 2 --jobs 1 --keep", script).code, 0);
    assert_eq!(place.ok("base", "show mine:n"), "1\n");
    assert_eq!(place.say("base", "checkpoint mine").code, 1, "the name is in use here");
}
