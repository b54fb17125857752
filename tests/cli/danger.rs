//! Changes that would run code, or give privileges, outside the sandbox: apply refuses them until
//! the caller consents.

use std::os::unix::fs::PermissionsExt;

use crate::confine::{ACCOUNTS, Account, at_srv, place};
use crate::place::Place;

/// A change by the command of a run, a path of it, and an option that allows it.
const ATTACKS: &[(&str, &str, &str)] = &[
    (
        "mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit",
        ".git/hooks/pre-commit",
        "--protected",
    ),
    ("mkdir -p .git; echo '[core] fsmonitor=evil' > .git/config", ".git/config", "--protected"),
    (
        "mkdir -p sub/lib/.git; echo evil > sub/lib/.git/config",
        "sub/lib/.git/config",
        "--protected",
    ),
    (
        "git init -q --bare .git/modules/lib; echo evil > .git/modules/lib/hooks/x",
        ".git/modules/lib/hooks/x",
        "--protected",
    ),
    ("mkdir .git; echo ../sub > .git/commondir", ".git/commondir", "--protected"),
    (
        "git init -q --bare sub; echo '[core] fsmonitor=evil' > sub/config",
        "sub/config",
        "--protected",
    ),
    ("git init -q --bare .; echo evil > hooks/pre-push", "hooks/pre-push", "--protected"),
    (
        "git init -q --bare sub/x; rm -r sub/x/objects sub/x/refs; echo ../y > sub/x/commondir",
        "sub/x/commondir",
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
    ("mkdir .ssh; echo key > .ssh/authorized_keys", ".ssh/authorized_keys", "--protected"),
    (
        "mkdir -p .github/workflows; echo evil > .github/workflows/ci.yml",
        ".github/workflows/ci.yml",
        "--protected",
    ),
    ("cp /bin/true sh; chmod 4755 sh", "sh", "--privileges"),
    ("cp /bin/true sh; chmod 2755 sh", "sh", "--privileges"),
];

#[test]
fn dangerous_changes_are_refused_until_the_caller_consents() {
    for account in ACCOUNTS {
        let place = place();
        for (attack, path, option) in ATTACKS {
            place.write("attack", attack);
            let script = format!(
                "cd ..; rm -rf base; cp -a fresh base; cd base
                 code=0; $JAILFS run --apply -- sh -c \"$(cat ../attack)\" 2> ../err || code=$?
                 [ $code = 125 ]
                 grep -q '^refused.{path}.' ../err; [ ! -e {path} ] && [ ! -L {path} ]
                 code=0; $JAILFS apply . 2>/dev/null || code=$?; [ $code = 3 ]; [ ! -e {path} ]
                 $JAILFS apply --dry-run --json 2>/dev/null |
                 grep -q '\"type\":\"refused\",\"path\":\"{path}\"'
                 $JAILFS apply {option} > /dev/null; [ -e {path} ]; $JAILFS discard >/dev/null"
            );
            let made = place.sh(
                "",
                "mkdir -p fresh/sub; echo one > fresh/a; chmod -R a+rwX fresh; chmod 777 .; \
                 echo > err; chmod 666 err",
            );
            assert_eq!(made.code, 0, "{made:?}");
            let owner = if account == Account::User { "65534:65534" } else { "0:0" };
            assert_eq!(place.sh("", &format!("chown -R {owner} fresh")).code, 0);
            let said = at_srv(&place, account, &script);
            assert_eq!(
                said.code,
                0,
                "{account:?} {attack}: {}\n{}\n{}",
                said.out,
                said.err,
                place.read("err")
            );
        }
    }
}

#[test]
fn naming_a_protected_path_consents_but_naming_a_directory_above_does_not() {
    let place = Place::new();
    let made =
        "mkdir -p .git/hooks; echo evil > .git/hooks/x; echo fine > .git/index; echo fine > b";
    assert_eq!(place.run("--keep", made).code, 0);
    assert_eq!(place.say("base", "apply .git").code, 3);
    assert!(!place.exists("base/.git/index"), "nothing is written if anything is refused");
    place.ok("base", "apply b .git/index");
    assert!(place.exists("base/.git/index") && !place.exists("base/.git/hooks/x"));
    place.ok("base", "apply .git/hooks");
    assert_eq!(place.read("base/.git/hooks/x"), "evil\n");
    // Changing it again needs the same consent; undoing the apply needs none.
    assert_eq!(place.run("--apply", "echo more >> .git/hooks/x").code, 125);
    place.ok("base", "apply --undo");
    assert!(!place.exists("base/.git/hooks/x"));
}

/// Git runs what is in a bare repository when it is started there. So the change that makes a
/// directory one is refused, also if its configuration is in the base already.
#[test]
fn a_directory_becomes_a_git_directory_only_by_consent() {
    let place = Place::new();
    let made = "mkdir -p lib/objects lib/hooks; echo evil | tee lib/config > lib/hooks/pre-commit";
    assert_eq!(place.run("--apply", made).code, 0, "no git directory yet");
    let said = place.run("--apply", "mkdir lib/refs; echo 'ref: refs/heads/main' > lib/HEAD");
    assert_eq!(said.code, 125, "{said:?}");
    assert!(said.err.contains("refused\tlib/HEAD\tprotected"), "{}", said.err);
    assert!(!place.exists("base/lib/HEAD") && !place.exists("base/lib/refs"));
    assert_eq!(place.say("base", "apply lib").code, 3);
    place.ok("base", "apply lib/HEAD lib/refs");
    assert_eq!(place.run("--apply", "echo more >> lib/config").code, 125);
    place.ok("base", "discard");
    // The tree has no `HEAD` any more. But the base has it, and an apply of one path leaves it.
    let parts = "mkdir -p two/refs; echo evil > two/config; echo 'ref: refs/heads/main' > two/HEAD";
    assert_eq!(place.run("--apply", parts).code, 0);
    assert_eq!(place.run("--keep", "rm two/HEAD; mkdir two/objects; echo > two/objects/x").code, 0);
    assert_eq!(place.say("base", "apply two/objects/x").code, 3);
    place.ok("base", "discard");
    // The base can be a git directory itself.
    assert_eq!(place.sh("", "git init -q --bare base").code, 0);
    let said = place.run("--apply", "echo evil > hooks/pre-push");
    assert!(said.code == 125 && said.err.contains("refused\thooks/pre-push\t"), "{said:?}");
    place.ok("base", "discard");
    // Objects and branches need no consent.
    let fine = "echo > lib/objects/one; mkdir lib/refs/heads; echo > lib/refs/heads/main";
    assert_eq!(place.run("--apply", fine).code, 0);
}

#[test]
fn apply_adds_no_capabilities_or_set_id_bits_and_keeps_those_of_the_base() {
    let place = Place::new();
    place.write("base/su", "old");
    std::fs::set_permissions(place.at("base/su"), PermissionsExt::from_mode(0o4755)).unwrap();
    // Other attributes of a program that has the bit already.
    assert_eq!(place.run("--apply", "chmod 4711 su").code, 0);
    // Other content makes it another program.
    assert_eq!(place.run("--apply", "echo new > x; chmod 4755 x; mv x su").code, 125);
    place.ok("base", "discard");
    let set = "cp /bin/true cap; python3 -c 'import os, struct; \
        os.setxattr(\"cap\", \"security.capability\", struct.pack(\"<5I\", 0x02000001, 1 << 21, 0, \
        0, 0))'";
    let said = place.run("--apply", set);
    assert!(
        said.code == 125 && said.err.contains("refused\tcap\tit would gain file capabilities"),
        "{said:?}"
    );
    assert!(!place.exists("base/cap"));
    // The setgid bit of a directory gives no privileges.
    place.ok("base", "discard");
    assert_eq!(place.run("--apply", "mkdir shared; chmod 2775 shared").code, 0);
}

/// A file that has a privilege already may not get a greater one of the same kind.
#[test]
fn apply_changes_no_owner_or_capabilities_of_a_privileged_program() {
    let place = Place::new();
    let made = place.sh(
        "base",
        "for name in uid gid cap; do cp /bin/true $name; done
        chown 1000 uid; chmod 4750 uid; chgrp 1000 gid; chmod 2755 gid
        setcap cap_net_bind_service=ep cap",
    );
    assert_eq!(made.code, 0, "{made:?}");
    for (attack, gains) in [
        ("chown 0:0 uid; chmod 4755 uid", "uid\tit would gain the setuid bit"),
        ("chmod 4755 uid", "uid\tit would gain the setuid bit"),
        ("chgrp 1000 uid; chmod 4750 uid", "uid\tit would gain the setuid bit"),
        ("chgrp 0 gid; chmod 2755 gid", "gid\tit would gain the setgid bit"),
        ("setcap cap_sys_admin=ep cap", "cap\tit would gain file capabilities"),
    ] {
        let said = place.run("--apply", attack);
        assert!(said.code == 125 && said.err.contains(gains), "{attack}: {said:?}");
        place.ok("base", "discard");
    }
    assert_eq!(place.run("--apply", "touch uid gid cap; chmod 4700 uid").code, 0);
}

#[test]
fn symlinks_are_listed_with_their_targets() {
    let place = Place::new();
    let said = place.run("--keep", "ln -s /root/.ssh out; ln -s \"$(printf 'a\\033[31mb')\" odd");
    assert!(said.err.contains("A\tout -> /root/.ssh\n"), "{}", said.err);
    assert!(!said.err.contains('\u{1b}'), "{:?}", said.err);
    let lines = place.json("base", "diff base");
    assert!(
        lines.iter().any(|line| line["path"] == "out" && line["target"] == "/root/.ssh"),
        "{lines:?}"
    );
}

/// A checkpoint by the command does not hide its changes from the caller.
#[test]
fn a_checkpoint_by_the_command_hides_nothing_from_status() {
    let place = Place::new();
    place.run(
        "--keep",
        "mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit; $JAILFS checkpoint done",
    );
    let status = &place.json("base", "status")[0];
    assert_eq!((&status["changed"], &status["to_apply"]), (&0.into(), &3.into()));
    assert!(place.ok("base", "status").contains("to apply    3 paths\n"));
    let hook = "A\t.git/hooks/pre-commit [protected]\n";
    assert!(place.ok("base", "diff").contains(hook));
    assert!(place.ok("base", "diff --stat").contains("[protected]\n"));
    let patch = place.ok("base", "diff -p");
    assert!(patch.contains("jailfs: .git/hooks/pre-commit [protected]\ndiff --git"), "{patch}");
    place.ok("base", "checkpoint another");
    assert_eq!(place.say("base", "apply").code, 3);
    assert!(!place.exists("base/.git"));
}

/// The checkpoints, names and holds that a command made are removed with its changes.
#[test]
fn a_discard_leaves_nothing_of_the_command() {
    let place = Place::new();
    place.run("--keep", "echo mine > kept");
    place.ok("base", "checkpoint mine");
    place.ok("base", "hold mine");
    let before = (place.ok("base", "log --json"), place.ok("base", "diff base"));
    let attack = "echo x > planted; $JAILFS checkpoint done; $JAILFS hold done; \
        mkdir .jailfs/checkpoints/more; echo y >> planted; \
        mkdir .jailfs/forks/one; $JAILFS fork two; \
        $JAILFS release mine || $JAILFS drop mine || true";
    let said = place.run("--discard", attack);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(
        said.err.contains("A\tplanted") && said.err.contains("discarded: 1 added"),
        "{}",
        said.err
    );
    assert_eq!((place.ok("base", "log --json"), place.ok("base", "diff base")), before);
    assert_eq!(place.json("base", "forks").len(), 1, "its forks are dropped");
    assert_eq!(place.say("base", "drop mine").code, 11, "the caller's hold is back");
    // The next attempt does not see the forks of the one before.
    let script = "ls .jailfs/forks; mkdir .jailfs/forks/left; exit 1";
    let said = place.run("--discard --attempts 2", script);
    assert_eq!((said.code, said.out.as_str()), (1, ""), "{said:?}");
    assert_eq!(place.json("base", "forks").len(), 1);
    place.ok("base", "checkpoint done");
    // A discard by the caller goes back to the base, past all checkpoints.
    place.ok("base", "discard");
    assert_eq!(place.json("base", "status")[0]["to_apply"], 0);
}

/// Nests directories so that the paths are far longer than the names.
const DEEP: &str = "import os
for _ in range(450):
    os.mkdir('d' * 250); os.chdir('d' * 250)
open('planted', 'w').close()";

/// A command creates a tree whose paths take 25 MB. The caller lists and counts it in little
/// memory, is refused an apply, and discards it.
#[test]
fn a_tree_of_endless_paths_is_listed_in_bounded_memory() {
    let place = Place::new();
    let limited = |line: &str| place.sh("base", &format!("ulimit -v 700000; $JAILFS {line}"));
    let said = limited(&format!("run --keep -- python3 -c \"{DEEP}\" 2> /dev/null"));
    assert_eq!(said.code, 0, "{said:?}");
    for (line, expected) in [
        ("status", "451 paths"),
        ("diff | tail -c 9", "/planted\n"),
        ("diff --stat | tail -n 1", "451 added"),
        ("diff -p | head -c 40", "diff --git"),
    ] {
        let said = limited(line);
        assert_eq!(said.code, 0, "{line}: {}", said.err);
        assert!(said.out.contains(expected), "{line}: {}", said.out);
    }
    let refused = limited("apply");
    assert_eq!(refused.code, 3, "{}", refused.err);
    assert!(refused.err.contains("longer than 4095 bytes"), "{}", refused.err);
    assert!(!place.exists(format!("base/{}", "d".repeat(250))));
    let said = limited("discard | head -c 100");
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(place.json("base", "status")[0]["to_apply"], 0);
    // The same through a daemon, with a memory limit for the client.
    place.mount();
    assert_eq!(place.sh("mnt", &format!("python3 -c \"{DEEP}\"")).code, 0);
    let said =
        place.sh("mnt", "ulimit -v 700000; $JAILFS diff | tail -c 9; $JAILFS discard | tail -n 1");
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.out.starts_with("/planted\nundo: jailfs op restore "), "{}", said.out);
}

/// The discard of a run does not need the list of changes.
#[test]
fn a_discard_does_not_depend_on_the_list_of_changes() {
    let place = Place::new();
    let said = place.run("--discard", &format!("python3 -c \"{DEEP}\""));
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

/// The user's configuration file adds to the list of protected paths and removes from it: in a run,
/// in a mount and without a daemon.
#[test]
fn the_list_of_protected_paths_can_be_changed() {
    let place = Place::new();
    std::fs::create_dir_all(place.at("home/.config/jailfs")).unwrap();
    place.write("home/.config/jailfs/protected", "# ours\nscripts/deploy\n!.envrc\n");
    let make = "mkdir -p scripts; echo x > scripts/deploy; echo y > .envrc";
    let said = place.run("--apply", make);
    assert_eq!(said.code, 125, "{said:?}");
    assert!(
        said.err.contains("refused\tscripts/deploy") && !said.err.contains("refused\t.envrc"),
        "{}",
        said.err
    );
    assert_eq!(place.say("base", "apply").code, 3);
    place.mount();
    assert!(place.ok("mnt", "diff").contains("A\tscripts/deploy [protected]\n"));
    assert_eq!(place.say("mnt", "apply").code, 3);
    place.ok("mnt", "apply .envrc");
    place.umount();
    place.write("home/.config/jailfs/protected", "!no-such-path\n");
    for line in ["apply", "status", "run -- true", "mount . ../mnt"] {
        let said = place.say("base", line);
        assert!(
            said.code != 0
                && said.err.contains("line 1: the path that it removes is not in the list"),
            "{said:?}"
        );
    }
}
