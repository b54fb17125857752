//! `push`, `pull` and `ls` against a real registry: Debian's docker-registry on the loopback, with
//! and without logins and TLS, behind a proxy that cuts connections, and with hostile artifacts.
//!
//! `JAILFS_PUSH_MIB=N`: the large file has N MiB.

#![cfg(feature = "registry")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failure is what a test is for"
)]

#[path = "push/crash.rs"]
mod crash;
#[path = "push/cuts.rs"]
mod cuts;
#[expect(dead_code, reason = "each test file uses another part of this")]
#[path = "registry/cutter.rs"]
mod cutter;
#[path = "push/edits.rs"]
mod edits;
#[expect(dead_code, reason = "each test file uses another part of this")]
#[path = "common/live.rs"]
mod harness;
#[path = "push/history.rs"]
mod history;
#[path = "push/hostile.rs"]
mod hostile;
#[path = "push/hostile_history.rs"]
mod hostile_history;
#[path = "registry/partner.rs"]
mod partner;
#[path = "push/round_trip.rs"]
mod round_trip;
#[path = "common/states.rs"]
mod states;
#[path = "push/thin.rs"]
mod thin;

use std::path::Path;
use std::process::{Command, Output};

use harness::{Live, text};
use tempfile::TempDir;

/// A machine: a cache directory, and more variables for the commands.
struct Machine {
    cache: TempDir,
    variables: Vec<(&'static str, String)>,
}

impl Machine {
    fn new() -> Machine {
        Machine { cache: tempfile::tempdir().unwrap(), variables: Vec::new() }
    }

    fn command(&self, live: &Live, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("-C").arg(&live.mnt).args(words).current_dir("/");
        command.env("XDG_CACHE_HOME", self.cache.path()).env_remove("REGISTRY_AUTH_FILE");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    fn try_run(&self, live: &Live, words: &[&str]) -> Output {
        self.command(live, words).output().unwrap()
    }

    fn run(&self, live: &Live, words: &[&str]) -> String {
        let output = self.try_run(live, words);
        assert!(output.status.success(), "jailfs {words:?}: {}", text(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The last object that a command prints with `--json`.
    fn json(&self, live: &Live, words: &[&str]) -> serde_json::Value {
        let said = self.run(live, &[words, &["--json"]].concat());
        serde_json::from_str(said.lines().last().unwrap()).unwrap()
    }

    /// A command that must fail with this code and this text.
    fn fail(&self, live: &Live, words: &[&str], code: i32, part: &str) {
        let output = self.try_run(live, words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(part), "{words:?}: {said}");
    }
}

/// Whether the cache has the chunks of an interrupted pull.
fn has_spool(cache: &Path) -> bool {
    std::fs::read_dir(cache.join("jailfs/pulls")).unwrap().count() > 0
}
