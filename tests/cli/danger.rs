//! What a command made that would run code, or give power, outside the sandbox: it is refused until the caller consents.

use std::os::unix::fs::PermissionsExt;

use crate::confine::{EVERYBODY, Who, at_srv, place};
use crate::place::Place;

/// What the command of a run does, a path of it, and an option that lets it through.
const ATTACKS: &[(&str, &str, &str)] = &[
    ("mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit", ".git/hooks/pre-commit", "--protected"),
    ("mkdir -p .git; echo '[core] fsmonitor=evil' > .git/config", ".git/config", "--protected"),
    ("mkdir -p sub/lib/.git; echo evil > sub/lib/.git/config", "sub/lib/.git/config", "--protected"),
    (
        "mkdir -p .git/modules/lib/hooks; echo evil > .git/modules/lib/hooks/x",
        ".git/modules/lib/hooks/x",
        "--protected",
    ),
    ("mkdir -p evil/hooks; ln -s evil .git", ".git", "--protected"),
    ("echo 'gitdir: evil' > sub/.git", "sub/.git", "--protected"),
    (
        "echo evil > hooks; mkdir -p .git; ln hooks .git/config; echo more >> hooks",
        ".git/config",
        "--protected",
    ),
    ("mkdir x; echo evil > x/tasks.json; mv x .vscode", ".vscode/tasks.json", "--protected"),
    ("echo evil > .envrc", ".envrc", "--protected"),
    (
        "mkdir -p .github/workflows; echo evil > .github/workflows/ci.yml",
        ".github/workflows/ci.yml",
        "--protected",
    ),
    ("cp /bin/true sh; chmod 4755 sh", "sh", "--privileges"),
    ("cp /bin/true sh; chmod 2755 sh", "sh", "--privileges"),
];

#[test]
fn what_would_run_outside_is_refused_until_the_caller_consents() {
    for who in EVERYBODY {
        let place = place();
        for (attack, path, option) in ATTACKS {
            place.write("attack", attack);
            let script = format!(
                "cd ..; rm -rf base; cp -a fresh base; cd base
                 code=0; $JAILFS run --apply -- sh -c \"$(cat ../attack)\" 2> ../err || code=$?; [ $code = 125 ]
                 grep -q '^refused.{path}.' ../err; [ ! -e {path} ] && [ ! -L {path} ]
                 code=0; $JAILFS apply . 2>/dev/null || code=$?; [ $code = 3 ]; [ ! -e {path} ]
                 $JAILFS apply --dry-run --json 2>/dev/null | grep -q '\"type\":\"refused\",\"path\":\"{path}\"'
                 $JAILFS apply {option} > /dev/null; [ -e {path} ]; $JAILFS discard >/dev/null"
            );
            let made = place.sh("", "mkdir -p fresh/sub; echo one > fresh/a; chmod -R a+rwX fresh; chmod 777 .; echo > err; chmod 666 err");
            assert_eq!(made.code, 0, "{made:?}");
            let owner = if who == Who::Nobody { "65534:65534" } else { "0:0" };
            assert_eq!(place.sh("", &format!("chown -R {owner} fresh")).code, 0);
            let said = at_srv(&place, who, &script);
            assert_eq!(said.code, 0, "{who:?} {attack}: {}\n{}\n{}", said.out, said.err, place.read("err"));
        }
    }
}

#[test]
fn a_protected_path_that_is_named_is_written_and_a_directory_above_does_not_name_it() {
    let place = Place::new();
    let made = "mkdir -p .git/hooks; echo evil > .git/hooks/x; echo fine > .git/index; echo fine > b";
    assert_eq!(place.run("--keep", made).code, 0);
    assert_eq!(place.say("base", "apply .git").code, 3);
    assert!(!place.exists("base/.git/index"), "nothing is written if anything is refused");
    place.ok("base", "apply b .git/index");
    assert!(place.exists("base/.git/index") && !place.exists("base/.git/hooks/x"));
    place.ok("base", "apply .git/hooks");
    assert_eq!(place.read("base/.git/hooks/x"), "evil\n");
    // It takes the same consent to change it again, and none to take the apply back.
    assert_eq!(place.run("--apply", "echo more >> .git/hooks/x").code, 125);
    place.ok("base", "apply --undo");
    assert!(!place.exists("base/.git/hooks/x"));
}

#[test]
fn file_capabilities_and_set_id_bits_stay_out_of_the_base_and_those_that_it_has_stay_in_it() {
    let place = Place::new();
    place.write("base/su", "old");
    std::fs::set_permissions(place.at("base/su"), PermissionsExt::from_mode(0o4755)).unwrap();
    // Other attributes of a program that has the bit already.
    assert_eq!(place.run("--apply", "chmod 4711 su").code, 0);
    // Other content is another program.
    assert_eq!(place.run("--apply", "echo new > x; chmod 4755 x; mv x su").code, 125);
    place.ok("base", "discard");
    let set = "cp /bin/true cap; python3 -c 'import os, struct; os.setxattr(\"cap\", \"security.capability\", struct.pack(\"<5I\", 0x02000001, 1 << 21, 0, 0, 0))'";
    let said = place.run("--apply", set);
    assert!(
        said.code == 125 && said.err.contains("refused\tcap\tit would gain file capabilities"),
        "{said:?}"
    );
    assert!(!place.exists("base/cap"));
    // The setgid bit of a directory gives no power.
    place.ok("base", "discard");
    assert_eq!(place.run("--apply", "mkdir shared; chmod 2775 shared").code, 0);
}

#[test]
fn links_are_listed_with_their_targets() {
    let place = Place::new();
    let said = place.run("--keep", "ln -s /root/.ssh out; ln -s \"$(printf 'a\\033[31mb')\" odd");
    assert!(said.err.contains("A\tout -> /root/.ssh\n"), "{}", said.err);
    assert!(!said.err.contains('\u{1b}'), "{:?}", said.err);
    let lines = place.json("base", "diff base");
    assert!(lines.iter().any(|line| line["path"] == "out" && line["target"] == "/root/.ssh"), "{lines:?}");
}

/// A checkpoint of the command does not hide what it made from its caller.
#[test]
fn a_checkpoint_of_the_command_hides_nothing_from_the_status() {
    let place = Place::new();
    place.run("--keep", "mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit; $JAILFS checkpoint done");
    let status = &place.json("base", "status")[0];
    assert_eq!((&status["changed"], &status["to_apply"]), (&0.into(), &3.into()));
    assert!(place.ok("base", "status").contains("to apply    3 paths\n"));
    assert_eq!(place.say("base", "apply").code, 3);
    assert!(!place.exists("base/.git"));
}

/// The checkpoints, names and holds that a command made are gone with its changes.
#[test]
fn a_discard_leaves_nothing_of_the_command() {
    let place = Place::new();
    place.run("--keep", "echo mine > kept");
    place.ok("base", "checkpoint mine");
    place.ok("base", "hold mine");
    let before = (place.ok("base", "log --json"), place.ok("base", "diff base"));
    let attack = "echo x > planted; $JAILFS checkpoint done; $JAILFS hold done; mkdir .jailfs/checkpoints/more; echo y >> planted; $JAILFS release mine || $JAILFS drop mine || true";
    let said = place.run("--discard", attack);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("A\tplanted") && said.err.contains("discarded: 1 added"), "{}", said.err);
    assert_eq!((place.ok("base", "log --json"), place.ok("base", "diff base")), before);
    assert_eq!(place.say("base", "drop mine").code, 11, "the caller's hold is back");
    place.ok("base", "checkpoint done");
}

/// A command makes a tree whose paths are longer than any answer. The discard does not need to list it.
#[test]
fn a_discard_does_not_depend_on_the_list_of_changes() {
    let place = Place::new();
    let deep = "import os\nfor _ in range(2000):\n    os.mkdir('d' * 250); os.chdir('d' * 250)\nopen('planted', 'w').close()";
    let said = place.run("--discard", &format!("python3 -c \"{deep}\""));
    assert_eq!(said.code, 0, "{}", &said.err[said.err.len().saturating_sub(2000)..]);
    assert!(
        said.err.contains("the list is too long to print") && said.err.contains("discarded"),
        "{}",
        &said.err[said.err.len().saturating_sub(2000)..]
    );
    let next = place.run("--keep", "ls");
    assert_eq!((next.code, next.out.as_str()), (0, "a\ndel\nsub\n"), "{}", next.err);
    assert_eq!(place.json("base", "status")[0]["changed"], 0);
}
