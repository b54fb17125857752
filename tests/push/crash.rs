//! A pull with the edit history is killed before each disk write. Afterwards the head is the old or
//! the new one, and another pull ends with the complete edit history.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use jailfs::sandbox::Change;
use jailfs::types::Ino;

use super::Machine;
use super::harness::{Live, text};
use super::partner::Partner;
use super::states::{check, states};

/// How many kills before the switch are tried: the last ones. `JAILFS_CRASH_STRIDE=1` tries all.
const BEFORE: u32 = 4;

/// The files with an edit history.
const PATHS: [&str; 4] = ["text", "steps", "gone", "d/there"];

struct World {
    machine: Machine,
    live: Live,
}

impl World {
    fn try_run(&self, store: &Path, words: &[&str], steps: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("--store").arg(store).args(words).current_dir("/");
        command.env("XDG_CACHE_HOME", self.machine.cache.path()).env_remove("REGISTRY_AUTH_FILE");
        command.env("JAILFS_FAILPOINTS", steps).output().unwrap()
    }

    #[track_caller]
    fn run(&self, store: &Path, words: &[&str], when: &str) -> String {
        let output = self.try_run(store, words, "");
        assert!(output.status.success(), "{when}: jailfs {words:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// A copy of the store before the pull.
    fn copy(&self) -> std::path::PathBuf {
        let to = self.live.outside().join("copy");
        let script = "rm -rf \"$1\"; cp -a \"$0\" \"$1\"";
        let mut command = Command::new("sh");
        let done = command.args(["-c", script]).arg(&self.live.store).arg(&to).status();
        assert!(done.unwrap().success());
        to
    }

    /// The edits of all paths, and the file that an undo of each leads to.
    #[track_caller]
    fn edits(&self, store: &Path, head: &str, when: &str) -> Vec<String> {
        let mut all = Vec::new();
        for path in PATHS {
            all.push(self.run(store, &["--head", head, "history", path, "--json"], when));
        }
        for path in PATHS {
            self.run(store, &["--head", head, "undo", path], when);
        }
        all.push(format!("{:?}", heads(store)));
        all
    }
}

/// The tree of each head. A kill leaves out inode numbers, so they do not count.
fn heads(store: &Path) -> BTreeMap<String, Vec<Change>> {
    let mut heads = states(store);
    heads.retain(|name, _| name.ends_with('@'));
    heads.values_mut().flatten().for_each(|change| change.ino = Ino(0));
    heads
}

/// Kills the pull into a head before each write, from the last one back.
fn killed_anywhere(world: &World, head: &str, pull: &[&str]) {
    let store = world.copy();
    let before = heads(&store);
    let log = world.live.outside().join("log");
    let whole = world.try_run(&store, pull, &format!("log:{}", log.display()));
    assert!(whole.status.success(), "{}", text(&whole));
    let steps = std::fs::read_to_string(&log).unwrap().lines().count();
    std::fs::remove_file(&log).unwrap();
    let most = if std::env::var_os("JAILFS_CRASH_STRIDE").is_some() { u32::MAX } else { BEFORE };
    let after = heads(&store);
    assert_ne!(before, after);
    let wanted = world.edits(&store, head, "whole");
    let (mut old, mut new, mut incomplete) = (0, 0, 0);
    for step in (1..=steps).rev() {
        if old == most {
            break;
        }
        let store = world.copy();
        let when = format!("{pull:?}, killed before write {step}");
        let output = world.try_run(&store, pull, &format!("kill:any:{step}"));
        if output.status.success() {
            // This run had fewer writes than the whole one.
            continue;
        }
        assert_eq!(output.status.code(), None, "{when}: {}", text(&output));
        check(&store, &when);
        let found = heads(&store);
        assert!(found == before || found == after, "{when}: the head is another one");
        check(&store, &format!("{when}, opened"));
        (old, new) = (old + u32::from(found == before), new + u32::from(found == after));
        if found == after {
            let has = |path: &&str| world.run(&store, &["--head", head, "history", path], &when);
            let lines: usize = PATHS.iter().map(|path| has(path).lines().count()).sum();
            let all: usize = wanted[..PATHS.len()].iter().map(|edits| edits.lines().count()).sum();
            incomplete += u32::from(lines != all);
        }
        world.run(&store, pull, &when);
        assert_eq!(heads(&store), after, "{when}, and pulled again");
        assert_eq!(world.edits(&store, head, &when), wanted, "{when}, and pulled again");
        check(&store, &format!("{when}, pulled again"));
    }
    eprintln!(
        "{pull:?}: {old} kills before the switch, {new} after it, {incomplete} of them \
        before the edits were recorded"
    );
    assert!(old > 0 && new > incomplete && incomplete > 0, "{old}, {new}, {incomplete}");
}

#[test]
fn a_pull_of_edits_that_was_killed_is_complete_after_another() {
    let registry = Partner::start(None, None);
    let reference = format!("{}/repo:x", registry.address);
    let here = Live::new("seq 900 > text; echo s0 > steps; echo x > gone; mkdir d; echo m > moved");
    here.sh("for n in 1 2 3; do seq $n 1000 > text; done; chmod 600 text; rm gone
        for n in 1 2 3 4; do echo s$n > steps; done; mv moved d/there; echo m2 > d/there");
    here.checkpoint("one");
    here.sh("echo last > text");
    let push = ["push", &reference, "--edits", "--history", "9", "--plain-http"];
    Machine::new().run(&here, &push);
    let base = "seq 9 > text; echo other > steps; echo k > only";
    let mut live = Live::with_limit(base, &[], Duration::from_secs(400));
    live.sh("echo local > text; echo local > steps; echo local > only");
    live.umount();
    let world = World { machine: Machine::new(), live };
    let pull = ["pull", &reference, "--edits", "--plain-http"];
    killed_anywhere(&world, "main", &pull);
    killed_anywhere(&world, "fresh", &[&pull[..], &["--into", "fresh"]].concat());
}
