//! `jailfs run`.
//!
//! Messages of jailfs go to standard error: standard output belongs to the command.

use std::ffi::OsString;
use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{FlushArg, tcflush};
use nix::unistd::Pid;

use super::apply;
use super::confine::Confine;
use super::host::{self, Within};
use super::mount::directory;
use super::target::wrong_answer;
use super::{Global, options, out, protected, show, store_path};
use crate::control::Listener;
use crate::daemon;
use crate::daemon::{Choice, Serving, Snapdir};
use crate::error::{Attempt, Error, Kind, Result};
use crate::run::{
    End, Group, NotStarted, Program, Share, Spec, Started, Waited, block_signals, hidden_inside,
    unblock_signals,
};
use crate::sandbox::{Applied, Changes, Consent, Detail, Reply, Request, Rev};
use crate::sandbox::{Sandbox, Savepoint, StoreOptions};

/// The exit code if jailfs failed and not the command.
pub(super) const FAILED: u8 = 125;
/// The exit code after a timeout, as of timeout(1).
const TIMED_OUT: u8 = 124;
/// The maximum length of the list of discarded paths, in bytes.
const LISTED: usize = 1 << 20;
/// How long the command may take to end after its time is over.
const GRACE: Duration = Duration::from_secs(5);

/// Run a command in a sandbox of the current directory
///
/// The command sees the directory at its own path and can change all of it. It sees the rest of the
/// host read-only and without secrets. When the command has ended, its changes are listed, and
/// applied, kept or discarded. Kept changes are visible to the next run, and to 'jailfs diff',
/// 'apply' and 'discard' in this directory. The exit code is that of the command; 124 after a
/// timeout, 125 if jailfs failed, 126 if the command cannot be executed, 127 if it was not found.
#[derive(Args)]
pub(super) struct Run {
    /// Apply the changes if the command exits with 0, otherwise keep them
    #[arg(long, group = "end")]
    apply: bool,
    /// Also apply protected paths, which programs outside the sandbox run by themselves
    #[arg(long)]
    protected: bool,
    /// Also apply set-id bits and file capabilities
    #[arg(long)]
    privileges: bool,
    /// Keep the changes in the store (the default, unless on a terminal)
    #[arg(long, group = "end")]
    keep: bool,
    /// Discard the changes of the command
    #[arg(long, group = "end")]
    discard: bool,
    /// Ask what to do (the default on a terminal)
    #[arg(long, group = "end")]
    ask: bool,
    /// End the command and all its children after T: seconds, or a number with s, m, h or d
    #[arg(long, value_name = "T", value_parser = duration)]
    timeout: Option<Duration>,
    /// Run the command up to N times, each time from the same state, until it exits with 0
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,
    /// Limit the content that the sandbox stores to N bytes (or with K, M, G, T); then its disk is
    /// full
    #[arg(long, value_name = "N", value_parser = options::size)]
    max_bytes: Option<u64>,
    /// Limit the sandbox to N new or changed files
    #[arg(long, value_name = "N", value_parser = options::count)]
    max_files: Option<u64>,
    /// Keep the newest N checkpoints, and those that are held; older ones from before the command
    /// go when it has ended
    #[arg(long, value_name = "N", value_parser = options::count)]
    keep_checkpoints: Option<u64>,
    /// Drop the oldest checkpoints when the store takes more than SIZE (bytes, or with K, M, G, T)
    #[arg(long, value_name = "SIZE", value_parser = options::size)]
    max_store: Option<u64>,
    /// Limit the memory of the command and its children to N bytes
    #[arg(long, value_name = "N", value_parser = options::size)]
    memory: Option<u64>,
    /// Limit the command to N processes and threads
    #[arg(long, value_name = "N", value_parser = options::count)]
    processes: Option<u64>,
    /// How the sandbox shows its checkpoints: hidden (in a directory that its root does not list),
    /// visible or off
    #[arg(long, value_name = "HOW", default_value = "hidden", value_parser = options::snapdir_text)]
    snapdir: Snapdir,
    /// The name of that directory
    #[arg(long, value_name = "NAME", default_value = ".jailfs", value_parser = options::snapname_text)]
    snapname: String,
    #[command(flatten)]
    confine: Confine,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    pub(super) command: Vec<OsString>,
}

/// The fate of the changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Apply,
    Keep,
    Discard,
    Ask,
}

/// The result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The command has ended.
    Ended(End),
    /// The command was ended because its time was over.
    TimedOut,
    /// The command could not be started; the code to exit with.
    NotStarted(u8),
}

impl Outcome {
    const SUCCESS: Outcome = Outcome::Ended(End::Exited(0));

    fn code(self) -> u8 {
        match self {
            Outcome::Ended(end) => end.code(),
            Outcome::TimedOut => TIMED_OUT,
            Outcome::NotStarted(code) => code,
        }
    }
}

/// Parses a time as timeout(1) does.
fn duration(text: &str) -> std::result::Result<Duration, String> {
    let (number, unit) = match text.strip_suffix(['s', 'm', 'h', 'd']) {
        Some(number) => (number, text.get(number.len()..).unwrap_or_default()),
        None => (text, "s"),
    };
    let seconds = match unit {
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => 1.0,
    };
    let number: f64 =
        number.parse().map_err(|_| "a time is a number, or a number followed by s, m, h or d")?;
    match Duration::try_from_secs_f64(number * seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("the time must be more than 0".to_owned()),
    }
}

impl Run {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let (base, store) = base_and_store(global)?;
        // Before any thread starts: see `crate::run`.
        block_signals()?;
        daemon::exit_on_panic();
        let sandbox = Sandbox::create_or_open(&base, &store, &StoreOptions::default())?;
        sandbox.set_protected(protected::protected()?);
        let spec = self.confine.spec(global, &base, &store)?;
        let consent = Consent { protected: self.protected, privileges: self.privileges };
        let mut sandboxed = Sandboxed::begin(sandbox, &self.program(&spec, 1), consent)?;
        // However many checkpoints the command makes, no earlier state is dropped while it runs:
        // the caller may go back to it.
        sandboxed.sandbox.pin_states();
        let outcome = self.attempts(&mut sandboxed, &spec)?;
        sandboxed.finish(self.fate(outcome), outcome)?;
        match sandboxed.sandbox.unpin_states() {
            Ok(gone) => {
                gone.iter().for_each(|one| {
                    out::note(&format!("given up: checkpoint {}", show::checkpoint(one)))
                });
            }
            Err(error) => log::warn!("unused space was not freed: {error}"),
        }
        drop(sandboxed);
        if outcome == Outcome::Ended(End::Killed(Signal::SIGINT as u8)) {
            // A shell loop or script continues after a command that exits with 130. It stops if the
            // command dies of the signal.
            end_by_interrupt()?;
        }
        Ok(outcome.code())
    }

    fn choice(&self) -> Choice {
        Choice {
            max_bytes: self.max_bytes,
            max_files: self.max_files,
            keep: self.keep_checkpoints,
            max_store: self.max_store,
            snapdir: self.snapdir,
            snapname: self.snapname.clone().into_bytes(),
            ..Choice::default()
        }
    }

    fn program(&self, spec: &Spec, attempt: u32) -> Program {
        Program { words: self.command.clone(), env: self.confine.environment(spec, attempt) }
    }

    /// Runs the command until an attempt succeeds or none is left.
    fn attempts(&self, sandboxed: &mut Sandboxed, spec: &Spec) -> Result<Outcome> {
        let mut attempt = 1;
        loop {
            let (outcome, interrupted) = sandboxed.serve(self, spec, attempt)?;
            let is_over = outcome == Outcome::SUCCESS || matches!(outcome, Outcome::NotStarted(_));
            if is_over || interrupted || attempt >= self.attempts {
                return Ok(outcome);
            }
            let how = match outcome {
                Outcome::TimedOut => "ran out of time".to_owned(),
                other => format!("failed ({})", other.code()),
            };
            sandboxed.roll_back()?;
            sandboxed.sandbox.rewind_to(&sandboxed.moment)?;
            out::note(&format!(
                "attempt {attempt} of {} {how}, and was rolled back",
                self.attempts
            ));
            attempt += 1;
        }
    }

    fn fate(&self, outcome: Outcome) -> Fate {
        let wanted = match (self.apply, self.discard, self.keep, self.ask) {
            (true, ..) => Fate::Apply,
            (_, true, ..) => Fate::Discard,
            (_, _, true, _) => Fate::Keep,
            (.., true) => Fate::Ask,
            _ if io::stdin().is_terminal() && io::stderr().is_terminal() => Fate::Ask,
            _ => Fate::Keep,
        };
        if wanted == Fate::Apply && outcome != Outcome::SUCCESS {
            out::note("the command has failed: its changes are kept and not applied");
            return Fate::Keep;
        }
        wanted
    }
}

fn base_and_store(global: &Global) -> Result<(PathBuf, PathBuf)> {
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
            "run the command without 'jailfs run', or name another store with --store DIR \
                for a nested sandbox",
        ));
    }
    let store = store_path::store_for(&base, named.as_deref())?;
    store_path::check(&base, &base, &store)?;
    store_path::check_free(&store, &format!("run a command in a sandbox of '{}'", base.display()))?;
    Ok((base, store))
}

/// A sandbox, from before the command until its changes are applied, kept or discarded.
struct Sandboxed {
    sandbox: Arc<Sandbox>,
    /// The tree before the command: the last checkpoint, or the base.
    start: Rev,
    /// The checkpoints, names and holds before the command.
    moment: Savepoint,
    /// The dangers that the caller of an apply accepts.
    consent: Consent,
}

impl Sandboxed {
    /// Records the state of the tree. Makes a checkpoint if the tree differs from the last one.
    fn begin(sandbox: Arc<Sandbox>, program: &Program, consent: Consent) -> Result<Sandboxed> {
        let Reply::Status(status) = sandbox.handle(Request::Status)? else {
            return Err(wrong_answer());
        };
        if status.changed > 0 {
            out::note(&format!(
                "kept from before, and in the sandbox: {}",
                show::paths(status.changed)
            ));
            let message = format!("before run: {}", program.line());
            let request = Request::Checkpoint { name: None, message };
            let Reply::Checkpoint(checkpoint) = sandbox.handle(request)? else {
                return Err(wrong_answer());
            };
            return Ok(Sandboxed {
                start: Rev::Id(checkpoint.id),
                moment: sandbox.savepoint(),
                sandbox,
                consent,
            });
        }
        let start = status.checkpoint.map_or(Rev::Base, |checkpoint| Rev::Id(checkpoint.id));
        Ok(Sandboxed { start, moment: sandbox.savepoint(), sandbox, consent })
    }

    /// Runs the command once. Also returns whether a signal has asked for an end.
    fn serve(&mut self, run: &Run, spec: &Spec, attempt: u32) -> Result<(Outcome, bool)> {
        // Until the last process of the command has ended.
        let _hiding = self.sandbox.hide(&hidden_inside(spec));
        let group = Group::make(Share { memory: run.memory, processes: run.processes })?;
        let listener = Listener::bind(self.sandbox.store_path())?;
        match run.program(spec, attempt).start(spec.clone(), |process| group.join(process)) {
            Ok((started, Some(handed))) => {
                let base = Path::new(&spec.base);
                let serving = Serving::adopt(
                    Arc::clone(&self.sandbox),
                    listener,
                    handed,
                    base,
                    &run.choice(),
                    gate,
                )?;
                run_served(started, serving, run)
            }
            Ok((_, None)) => Err(wrong_answer()),
            Err(NotStarted::Failed(error)) => Err(error),
            Err(NotStarted::Refused(error)) => {
                let error = run.confine.accept_without_namespaces(error)?;
                drop(listener);
                out::note(&format!("warning: this host does not allow namespaces: {error}"));
                self.serve_elsewhere(run, spec, attempt, &group)
                    .map_err(|other| mount_error(&error, other))
            }
        }
    }

    /// Without namespaces: serves the tree at a mount of its own, which all processes of this user
    /// see.
    fn serve_elsewhere(
        &self,
        run: &Run,
        spec: &Spec,
        attempt: u32,
        group: &Group,
    ) -> Result<(Outcome, bool)> {
        let temp_dir = tempfile::Builder::new().prefix("jailfs-run-").tempdir();
        let temp_dir = temp_dir.attempt(|| "create a directory for the mount")?;
        let name = Path::new(&spec.base).file_name().unwrap_or("root".as_ref());
        let (point, scratch) =
            (temp_dir.path().join("mount").join(name), temp_dir.path().join("tmp"));
        for dir in [&point, &scratch] {
            std::fs::create_dir_all(dir).attempt(|| format!("create '{}'", dir.display()))?;
        }
        let point = host::resolve(&point)?;
        let serving = Serving::start(Arc::clone(&self.sandbox), &point, &run.choice(), gate)?;
        let spec = Spec { elsewhere: Some((point.into(), scratch.into())), ..spec.clone() };
        match run.program(&spec, attempt).start(spec, |process| group.join(process)) {
            Ok((started, _)) => run_served(started, serving, run),
            Err(NotStarted::Failed(error) | NotStarted::Refused(error)) => Err(error),
        }
    }

    /// Restores the tree to its state before the command.
    fn roll_back(&self) -> Result<()> {
        self.sandbox.reset_to(&self.start).map(drop)
    }

    fn finish(&self, fate: Fate, outcome: Outcome) -> Result<()> {
        if fate == Fate::Discard {
            return self.discard(false);
        }
        let changes = self.diff(self.start.clone())?;
        if changes.is_empty() {
            out::note("the command has changed nothing");
        } else {
            show::list(&changes, false, out::detail)?;
            out::note(&format!("in the sandbox: {}", show::summary(&changes)?));
        }
        // An apply also writes what earlier runs have kept, so it is counted.
        let waiting =
            if self.start == Rev::Base { changes.len() } else { self.diff(Rev::Base)?.len() };
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
            Fate::Discard => self.discard(true),
            Fate::Keep | Fate::Ask => {
                let left = if outcome == Outcome::SUCCESS { "kept" } else { "kept, not applied" };
                out::note(&format!(
                    "{left}; 'jailfs diff base', 'jailfs apply' and 'jailfs discard' in \
                this directory continue from here"
                ));
                Ok(())
            }
        }
    }

    fn diff(&self, from: Rev) -> Result<Changes> {
        let request =
            Request::Diff { from, to: Rev::Now, paths: Vec::new(), detail: Detail::NameStatus };
        match self.sandbox.handle(request)? {
            Reply::Diff(changes) => Ok(changes),
            _ => Err(wrong_answer()),
        }
    }

    /// Asks until there is a valid answer. An interrupt or the end of the input keeps the changes.
    /// Discards what was typed before the question, because it was meant for the command.
    fn ask(&self, nothing_new: bool) -> Result<Fate> {
        unblock_signals()?;
        let mut answer = String::new();
        loop {
            if let Err(error) = tcflush(io::stdin(), FlushArg::TCIFLUSH) {
                // Not a terminal: an answer in a pipe or a file was written for this question.
                log::debug!("discard typed input: {error}");
            }
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
        let Reply::Diff(changes) = self.sandbox.handle(request)? else {
            return Err(wrong_answer());
        };
        let mut out = out::Out::new();
        show::patches(&changes, &mut out)?;
        out.finish()
    }

    fn apply(&self) -> Result<()> {
        let request = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: self.consent,
        };
        let Reply::Applied(applied) = self.sandbox.handle(request)? else {
            return Err(wrong_answer());
        };
        let Some(error) = apply::why_not_written(&applied) else {
            return print_applied(&applied);
        };
        apply::tell_conflicts(&applied);
        Err(error)
    }

    /// Restores the tree first, whatever the command did to it. Then lists the discarded changes,
    /// if they can be listed, and forgets the checkpoints, names and holds of the command.
    fn discard(&self, is_listed: bool) -> Result<()> {
        let before = self.sandbox.reset_to(&self.start)?;
        let listed = self
            .sandbox
            .changes_to(&before)
            .and_then(|changes| print_discarded(&changes, is_listed));
        if let Err(error) = listed {
            out::note(&format!("discarded; the changes cannot be listed: {error}"));
        }
        drop(before);
        self.sandbox.rewind_to(&self.moment)
    }
}

/// Prints what was discarded. `is_listed`: the paths were printed before.
fn print_discarded(changes: &Changes, is_listed: bool) -> Result<()> {
    if changes.is_empty() {
        out::note("the command has changed nothing");
        return Ok(());
    }
    if !is_listed {
        list_some(changes)?;
        out::note(&format!("in the sandbox: {}", show::summary(changes)?));
    }
    out::note(&format!("discarded: {}", show::summary(changes)?));
    Ok(())
}

/// Lists the discarded changes, up to [`LISTED`] bytes of paths: the command decides how many there
/// are.
fn list_some(changes: &Changes) -> Result<()> {
    let (mut bytes, mut listed) = (0_usize, 0);
    for change in changes {
        let change = change?;
        bytes = bytes.saturating_add(change.path.as_bytes().len());
        if bytes > LISTED {
            let more = show::paths((changes.len() - listed) as u64);
            out::note(&format!("{more} more; the list is too long to print"));
            break;
        }
        listed += 1;
        out::detail(&show::name_status(&change));
    }
    Ok(())
}

/// Runs a command whose tree is served, until its last process has ended.
fn run_served(mut started: Started, serving: Serving, run: &Run) -> Result<(Outcome, bool)> {
    serving.guard();
    let walls = started.served(Arc::new(|text| out::note(&show::one_line(text))))?;
    out::note(&walls.line());
    let outcome = match started.run()? {
        Some(end) => Ok(Outcome::Ended(end)),
        None => wait_for_end(&mut started, run.timeout),
    };
    let interrupted = started.is_interrupted();
    let left = match outcome {
        Ok(Outcome::Ended(_)) => started.remaining(),
        _ => Vec::new(),
    };
    // The tree must still be served: a process that waits for it could not end otherwise. Nothing
    // may be printed before: a process that still runs can suspend the terminal.
    for error in started.end() {
        out::note(&format!("warning: {error}"));
    }
    if matches!(outcome, Ok(Outcome::TimedOut)) {
        out::note("the time is over: the command is ended");
    }
    if !left.is_empty() {
        let left = show::one_line(&left.join(", "));
        out::note(&format!("processes remain in the sandbox and are ended: {left}"));
    }
    drop(serving.into_sandbox());
    Ok((outcome?, interrupted))
}

/// The error if neither namespaces nor a mount are possible.
fn mount_error(refused: &Error, error: Error) -> Error {
    if error.kind != Kind::CannotMount {
        return error;
    }
    Error::new(Kind::CannotMount, "run a command in a sandbox", format!("{refused}; and {error}"))
        .hint("this host allows neither namespaces nor mounts; docs/CONTAINERS.md says what is needed")
}

/// Ends this process by SIGINT. If that is ignored, it continues.
fn end_by_interrupt() -> Result<()> {
    let attempt = || "end by the signal that ended the command";
    unblock_signals()?;
    kill(Pid::this(), Signal::SIGINT).map_err(io::Error::from).attempt(attempt)
}

fn wait_for_end(started: &mut Started, timeout: Option<Duration>) -> Result<Outcome> {
    let until = timeout.and_then(|time| Instant::now().checked_add(time));
    match started.wait(until)? {
        Waited::Ended(end) => Ok(Outcome::Ended(end)),
        Waited::NotStarted(error, code) => {
            out::error(&error);
            Ok(Outcome::NotStarted(code))
        }
        Waited::TimeIsOver => {
            started.terminate()?;
            // The outcome is a timeout, whether or not the command ends by itself now.
            started.wait(Some(Instant::now() + GRACE))?;
            Ok(Outcome::TimedOut)
        }
    }
}

fn print_applied(applied: &Applied) -> Result<()> {
    out::note(&format!("applied: {}", show::summary(&applied.changes)?));
    out::note("undo: jailfs apply --undo");
    apply::tell_not_kept(applied);
    Ok(())
}

/// Refuses the requests that a command in the sandbox may not make. The caller judges the changes
/// when the command has ended.
fn gate(request: &Request) -> Result<()> {
    let (attempt, hint) = match request {
        Request::Apply { dry_run: false, .. } => {
            ("apply", "apply the changes when the command has ended")
        }
        Request::Unmount => ("unmount", "the sandbox is unmounted when the command has ended"),
        // The command must not drop states to which its caller may go back.
        Request::Drop { .. } => {
            ("drop a checkpoint", "drop checkpoints when the command has ended")
        }
        Request::Gc { dry_run: false, .. } => ("gc", "free space when the command has ended"),
        // It reads the whole store, and no other request can read a state meanwhile.
        Request::Check { read_data: true } => {
            ("check", "check the store when the command has ended")
        }
        Request::Hold { held: false, .. } => {
            ("release a checkpoint", "release it when the command has ended")
        }
        // No `_`: each new request must be judged here.
        Request::Info
        | Request::Status
        | Request::Log
        | Request::OpLog
        | Request::Checkpoint { .. }
        | Request::Diff { .. }
        | Request::Show { .. }
        | Request::Restore { .. }
        | Request::Discard { .. }
        | Request::Apply { dry_run: true, .. }
        | Request::OpRestore { .. }
        | Request::History { .. }
        | Request::FileDiff { .. }
        | Request::Undo { .. }
        | Request::Redo { .. }
        | Request::Hold { held: true, .. }
        | Request::Gc { dry_run: true, .. }
        | Request::Check { read_data: false } => return Ok(()),
    };
    Err(Error::new(Kind::InUse, attempt, "'jailfs run' holds this sandbox").hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_cannot_apply_or_drop_states() {
        let apply = |dry_run| Request::Apply {
            paths: Vec::new(),
            dry_run,
            undo: false,
            consent: Default::default(),
        };
        assert_eq!(gate(&apply(false)).unwrap_err().kind, Kind::InUse);
        assert_eq!(gate(&Request::Unmount).unwrap_err().kind, Kind::InUse);
        let undo = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: true,
            consent: Default::default(),
        };
        assert!(gate(&undo).is_err());
        let gc = |dry_run| Request::Gc { operations: 0, keep: Some(0), max_store: None, dry_run };
        let hold = |held| Request::Hold { rev: Rev::Back(1), held };
        for refused in [Request::Drop { rev: Rev::Back(1) }, gc(false), hold(false)] {
            assert_eq!(gate(&refused).unwrap_err().kind, Kind::InUse, "{refused:?}");
        }
        for allowed in [
            gc(true),
            hold(true),
            apply(true),
            Request::Status,
            Request::Discard { detach_mounts: false },
            Request::Log,
        ] {
            assert_eq!(gate(&allowed), Ok(()));
        }
    }

    fn parse(line: &str) -> Run {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            run: Run,
        }
        <Line as clap::Parser>::parse_from(format!("run {line} x").split_whitespace()).run
    }

    #[test]
    fn a_failed_command_is_not_applied() {
        let fate = |line: &str, outcome| parse(line).fate(outcome);
        let failed = Outcome::Ended(End::Exited(1));
        assert_eq!(fate("--apply", Outcome::SUCCESS), Fate::Apply);
        assert_eq!(fate("--apply", failed), Fate::Keep);
        assert_eq!(fate("--apply", Outcome::Ended(End::Killed(9))), Fate::Keep);
        assert_eq!(fate("--apply", Outcome::TimedOut), Fate::Keep);
        assert_eq!(fate("--keep", Outcome::SUCCESS), Fate::Keep);
        assert_eq!(fate("--discard", failed), Fate::Discard);
    }

    #[test]
    fn a_time_is_parsed_as_by_timeout() {
        assert_eq!(duration("3"), Ok(Duration::from_secs(3)));
        assert_eq!(duration("0.5s"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("1h"), Ok(Duration::from_secs(3600)));
        assert_eq!(duration("1d"), Ok(Duration::from_secs(86400)));
        for wrong in ["", "s", "0", "-1", "1x", "nan", "inf", "m5"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_outcome_has_the_exit_code_of_env_and_timeout() {
        assert_eq!(Outcome::Ended(End::Exited(3)).code(), 3);
        assert_eq!(Outcome::Ended(End::Killed(15)).code(), 143);
        assert_eq!((Outcome::TimedOut.code(), Outcome::NotStarted(127).code()), (124, 127));
    }
}
