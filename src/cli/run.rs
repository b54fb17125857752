//! `jailfs run`.
//!
//! All that jailfs itself says here goes to the standard error: the standard output is the command's.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use super::apply;
use super::host::{self, Within};
use super::mount::directory;
use super::target::wrong_answer;
use super::{Global, out, place, show};
use crate::daemon::{self, Serving};
use crate::error::{Attempt, Error, Kind, Result};
use crate::run::{End, Program, block_signals, let_signals_through};
use crate::sandbox::verbs::{Applied, Change, Detail, Reply, Request, Rev};
use crate::sandbox::{Sandbox, StoreOptions};

/// The exit code when jailfs failed and not the command.
pub(super) const FAILED: u8 = 125;

/// Run a command in a sandbox of the current directory
///
/// The command sees the directory at its own path; nothing else sees the sandbox. When it has ended, what changed is
/// listed, and applied, kept or discarded. What is kept is there in the next run, and for 'jailfs diff', 'apply' and
/// 'discard' in this directory. The exit code is the command's; 125 if jailfs failed, 126 if the command cannot be
/// executed, 127 if it was not found.
#[derive(Args)]
pub(super) struct Run {
    /// Apply the changes if the command ends with 0; keep them if not
    #[arg(long, group = "end")]
    apply: bool,
    /// Keep the changes in the store (the default, unless on a terminal)
    #[arg(long, group = "end")]
    keep: bool,
    /// Throw away what the command changed
    #[arg(long, group = "end")]
    discard: bool,
    /// Ask what to do (the default on a terminal)
    #[arg(long, group = "end")]
    ask: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub(super) command: Vec<OsString>,
}

/// What to do with the changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Apply,
    Keep,
    Discard,
    Ask,
}

impl Run {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let (base, store) = places(global)?;
        let program = Program { words: self.command.clone() };
        // Before any thread: see `crate::run`.
        block_signals()?;
        daemon::exit_on_panic();
        let sandbox = Sandbox::create_or_open(&base, &store, &StoreOptions::default())?;
        let mut sandboxed = Sandboxed::begin(sandbox, &program)?;
        let end = sandboxed.serve(&base, &program)?;
        sandboxed.finish(self.fate(end), end)?;
        Ok(end.code())
    }

    fn fate(&self, end: End) -> Fate {
        let wanted = match (self.apply, self.discard, self.keep, self.ask) {
            (true, ..) => Fate::Apply,
            (_, true, ..) => Fate::Discard,
            (_, _, true, _) => Fate::Keep,
            (.., true) => Fate::Ask,
            _ if io::stdin().is_terminal() && io::stderr().is_terminal() => Fate::Ask,
            _ => Fate::Keep,
        };
        if wanted == Fate::Apply && end != End::Exited(0) {
            out::note("the command has failed: its changes are kept and not applied");
            return Fate::Keep;
        }
        wanted
    }
}

fn places(global: &Global) -> Result<(PathBuf, PathBuf)> {
    let dir = global.dir()?;
    if host::is_dead(&dir) {
        let point = host::mount_around(&dir)?.unwrap_or_else(|| dir.clone());
        return Err(host::dead_mount("run a command in a sandbox", &point));
    }
    let base = directory(&dir)?;
    let named = global.store.as_ref().map(|store| global.at(store)).transpose()?;
    if named.is_none()
        && let Within::Mount { store } = host::within(&base)?
    {
        let attempt = format!("run a command in a sandbox of '{}'", base.display());
        return Err(Error::new(
            Kind::InUse,
            attempt,
            format!("it lies in the sandbox of '{}'", store.display()),
        )
        .hint(
            "run the command as it is, or name another store with --store DIR for a sandbox in the sandbox",
        ));
    }
    let store = place::store_for(&base, named.as_deref())?;
    place::check(&base, &base, &store)?;
    place::check_free(&store, &format!("run a command in a sandbox of '{}'", base.display()))?;
    Ok((base, store))
}

fn os_str(bytes: &[u8]) -> &OsStr {
    std::os::unix::ffi::OsStrExt::from_bytes(bytes)
}

/// A sandbox from before the command to what becomes of its changes.
struct Sandboxed {
    sandbox: Arc<Sandbox>,
    /// The tree as it was before: the last checkpoint, or the base.
    start: Rev,
}

impl Sandboxed {
    /// Notes the state of the tree, with a checkpoint if it is none yet.
    fn begin(sandbox: Arc<Sandbox>, program: &Program) -> Result<Sandboxed> {
        let Reply::Status(status) = sandbox.handle(Request::Status)? else { return Err(wrong_answer()) };
        if status.changed > 0 {
            out::note(&format!("kept from before, and in the sandbox: {}", show::paths(status.changed)));
            let message = format!("before run: {}", program.line());
            let request = Request::Checkpoint { name: None, message };
            let Reply::Checkpoint(checkpoint) = sandbox.handle(request)? else { return Err(wrong_answer()) };
            return Ok(Sandboxed { sandbox, start: Rev::Id(checkpoint.id) });
        }
        let start = status.checkpoint.map_or(Rev::Base, |checkpoint| Rev::Id(checkpoint.id));
        Ok(Sandboxed { sandbox, start })
    }

    /// Runs the command in the sandbox, mounted over its base in a mount namespace of the command's own.
    fn serve(&mut self, base: &Path, program: &Program) -> Result<End> {
        let store = self.sandbox.store_path().to_owned();
        let env = [("JAILFS_ROOT", base.as_os_str()), ("JAILFS_SANDBOX", store.as_os_str())];
        let (mut started, handed) = program.start(base, &env)?;
        let serving = Serving::adopt(Arc::clone(&self.sandbox), handed, base, gate)?;
        started.go()?;
        let end = started.wait();
        let left = remaining(started.namespace());
        if !left.is_empty() {
            let left = left.join(", ");
            out::note(&format!("processes remain in the sandbox and are cut off from it: {left}"));
        }
        drop(serving.into_sandbox());
        end
    }

    fn finish(&self, fate: Fate, end: End) -> Result<()> {
        let changes = self.diff(self.start.clone())?;
        if changes.is_empty() {
            out::note("the command has changed nothing");
        } else {
            changes.iter().for_each(|change| out::detail(&show::name_status(change)));
            out::note(&format!("in the sandbox: {}", show::summary(&changes)));
        }
        // What earlier runs have left is applied with the rest, so it counts.
        let waiting = if self.start == Rev::Base { changes.len() } else { self.diff(Rev::Base)?.len() };
        if waiting == 0 && changes.is_empty() {
            return Ok(());
        }
        if waiting != changes.len() {
            out::note(&format!(
                "with what was kept before, in all that differs from the base: {}",
                show::paths(waiting as u64)
            ));
        }
        let fate = if fate == Fate::Ask { self.ask(changes.is_empty())? } else { fate };
        match fate {
            Fate::Apply => self.apply(),
            Fate::Discard => self.discard(&changes),
            Fate::Keep | Fate::Ask => {
                let left = if end == End::Exited(0) { "kept" } else { "kept, not applied" };
                out::note(&format!(
                    "{left}; 'jailfs diff base', 'jailfs apply' and 'jailfs discard' in this directory go on from here"
                ));
                Ok(())
            }
        }
    }

    fn diff(&self, from: Rev) -> Result<Vec<Change>> {
        let request = Request::Diff { from, to: Rev::Now, paths: Vec::new(), detail: Detail::NameStatus };
        match self.sandbox.handle(request)? {
            Reply::Diff(changes) => Ok(changes),
            _ => Err(wrong_answer()),
        }
    }

    /// Asks until there is an answer. An interrupt, or the end of the input, keeps.
    fn ask(&self, nothing_new: bool) -> Result<Fate> {
        let_signals_through()?;
        let mut answer = String::new();
        loop {
            out::question(if nothing_new {
                "[a]pply or [k]eep?"
            } else {
                "[a]pply, [k]eep, [d]iscard, or show the [p]atch?"
            });
            answer.clear();
            if io::stdin().lock().read_line(&mut answer).attempt(|| "read the answer")? == 0 {
                return Ok(Fate::Keep);
            }
            match (answer.trim(), nothing_new) {
                ("a" | "apply", _) => break,
                ("k" | "keep", _) => return Ok(Fate::Keep),
                ("d" | "discard", false) => {
                    block_signals()?;
                    return Ok(Fate::Discard);
                }
                ("p" | "patch", false) => self.show_patch()?,
                _ => {}
            }
        }
        block_signals()?;
        Ok(Fate::Apply)
    }

    fn show_patch(&self) -> Result<()> {
        let (from, to) = (self.start.clone(), Rev::Now);
        let request = Request::Diff { from, to, paths: Vec::new(), detail: Detail::Patch };
        let Reply::Diff(changes) = self.sandbox.handle(request)? else { return Err(wrong_answer()) };
        let mut terminal = out::Out::new();
        changes.iter().filter_map(|change| change.patch.as_ref()).for_each(|patch| terminal.bytes(patch));
        terminal.finish()
    }

    fn apply(&self) -> Result<()> {
        let request = |dry_run| Request::Apply { paths: Vec::new(), dry_run, undo: false };
        let Reply::Applied(applied) = self.sandbox.handle(request(false))? else {
            return Err(wrong_answer());
        };
        if applied.conflicts.is_empty() {
            tell_applied(&applied);
            return Ok(());
        }
        apply::tell_conflicts(&applied);
        Err(apply::conflict(&applied))
    }

    fn discard(&self, changes: &[Change]) -> Result<()> {
        // A command can make checkpoints of its own, so "since the last one" is not enough.
        let Reply::Status(status) = self.sandbox.handle(Request::Status)? else { return Err(wrong_answer()) };
        let last = status.checkpoint.map_or(Rev::Base, |checkpoint| Rev::Id(checkpoint.id));
        let request = if last == self.start {
            Request::Discard
        } else {
            Request::Restore { to: self.start.clone(), dry_run: false }
        };
        let Reply::Restored(_) = self.sandbox.handle(request)? else { return Err(wrong_answer()) };
        out::note(&format!("discarded: {}", show::summary(changes)));
        Ok(())
    }
}

fn tell_applied(applied: &Applied) {
    out::note(&format!("applied: {}", show::summary(&applied.changes)));
    out::note("undo: jailfs apply --undo");
}

/// What a command in the sandbox may not ask of it: the changes are judged when it has ended, by whoever ran it.
fn gate(request: &Request) -> Result<()> {
    let (attempt, hint) = match request {
        Request::Apply { dry_run: false, .. } => {
            ("apply", "end the command; then the changes can be applied")
        }
        Request::Unmount => ("unmount", "end the command; then the sandbox is unmounted"),
        _ => return Ok(()),
    };
    Err(Error::new(Kind::InUse, attempt, "'jailfs run' holds this sandbox").hint(hint))
}

/// The processes that the command has left behind, as `number (name)`. Those that are just ending are waited for.
fn remaining(namespace: &Path) -> Vec<String> {
    for _ in 0..10 {
        if inside(namespace).is_empty() {
            return Vec::new();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    inside(namespace)
}

/// The processes in a mount namespace. It is that of the command, so they came from it.
fn inside(namespace: &Path) -> Vec<String> {
    let listed = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = listed.filter_map(|entry| entry.file_name().into_string().ok());
    numbers
        .filter(|pid| pid.parse::<u32>().is_ok())
        .filter(|pid| {
            std::fs::read_link(format!("/proc/{pid}/ns/mnt")).is_ok_and(|theirs| theirs == namespace)
        })
        .map(|pid| {
            let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{pid} ({})", show::one_line(os_str(name.trim_ascii()).display().to_string().as_str()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_cannot_let_itself_out() {
        let apply = |dry_run| Request::Apply { paths: Vec::new(), dry_run, undo: false };
        assert_eq!(gate(&apply(false)).unwrap_err().kind, Kind::InUse);
        assert_eq!(gate(&Request::Unmount).unwrap_err().kind, Kind::InUse);
        let undo = Request::Apply { paths: Vec::new(), dry_run: false, undo: true };
        assert!(gate(&undo).is_err());
        for allowed in [apply(true), Request::Status, Request::Discard, Request::Log] {
            assert_eq!(gate(&allowed), Ok(()));
        }
    }

    #[test]
    fn a_failed_command_is_not_applied() {
        let run = |apply, keep, discard| Run { apply, keep, discard, ask: false, command: Vec::new() };
        assert_eq!(run(true, false, false).fate(End::Exited(0)), Fate::Apply);
        assert_eq!(run(true, false, false).fate(End::Exited(1)), Fate::Keep);
        assert_eq!(run(true, false, false).fate(End::Killed(9)), Fate::Keep);
        assert_eq!(run(false, true, false).fate(End::Exited(0)), Fate::Keep);
        assert_eq!(run(false, false, true).fate(End::Exited(1)), Fate::Discard);
    }

    #[test]
    fn who_is_in_a_namespace_is_listed() {
        let own = std::fs::read_link("/proc/self/ns/mnt").unwrap();
        let us = format!("{} (", std::process::id());
        assert!(inside(&own).iter().any(|process| process.starts_with(&us)));
        assert_eq!(remaining(Path::new("mnt:[0]")), Vec::<String>::new());
    }
}
