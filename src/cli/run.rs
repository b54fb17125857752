//! `jailfs run`.
//!
//! All that jailfs itself says here goes to the standard error: the standard output is the command's.

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
use super::{Global, options, out, place, show};
use crate::control::Listener;
use crate::daemon::{self, Choice, Serving, Snapdir};
use crate::error::{Attempt, Error, Kind, Result};
use crate::run::{
    End, Group, NotStarted, Program, Share, Spec, Started, Waited, block_signals, hidden_inside,
    unblock_signals,
};
use crate::sandbox::verbs::{Applied, Changes, Consent, Detail, Reply, Request, Rev};
use crate::sandbox::{Moment, Sandbox, StoreOptions};

/// The exit code when jailfs failed and not the command.
pub(super) const FAILED: u8 = 125;
/// The exit code when the time was over, as of timeout(1).
const TIMED_OUT: u8 = 124;
/// Bytes of paths that are listed of what was discarded, at most.
const LISTED: usize = 1 << 20;
/// How long a command that was told to end because its time is over may take for that.
const GRACE: Duration = Duration::from_secs(5);

/// Run a command in a sandbox of the current directory
///
/// The command sees the directory at its own path and can change all of it; the rest of the host it sees read-only and
/// without secrets. When it has ended, what changed is listed, and applied, kept or discarded. What is kept is there in the
/// next run, and for 'jailfs diff', 'apply' and 'discard' in this directory. The exit code is the command's; 124 if its time
/// was over, 125 if jailfs failed, 126 if the command cannot be executed, 127 if it was not found.
#[derive(Args)]
pub(super) struct Run {
    /// Apply the changes if the command ends with 0; keep them if not
    #[arg(long, group = "end")]
    apply: bool,
    /// Apply protected paths, too, which programs outside the sandbox run by themselves
    #[arg(long)]
    protected: bool,
    /// Apply set-id bits and file capabilities, too
    #[arg(long)]
    privileges: bool,
    /// Keep the changes in the store (the default, unless on a terminal)
    #[arg(long, group = "end")]
    keep: bool,
    /// Throw away what the command changed
    #[arg(long, group = "end")]
    discard: bool,
    /// Ask what to do (the default on a terminal)
    #[arg(long, group = "end")]
    ask: bool,
    /// End the command, with all that it started, after T: seconds, or with s, m, h or d behind it
    #[arg(long, value_name = "T", value_parser = duration)]
    timeout: Option<Duration>,
    /// Run the command up to N times, each time from the same state, until it ends with 0
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,
    /// Let the sandbox store at most N bytes (K, M, G and T count in 1024); then its disk is full
    #[arg(long, value_name = "N", value_parser = options::size)]
    max_bytes: Option<u64>,
    /// Let the sandbox make or change at most N files
    #[arg(long, value_name = "N", value_parser = options::count)]
    max_files: Option<u64>,
    /// Keep the newest N checkpoints, and those that are held; of those from before the command, the others go when it has ended
    #[arg(long, value_name = "N", value_parser = options::count)]
    keep_checkpoints: Option<u64>,
    /// Give up the oldest checkpoints when the store takes more than SIZE (bytes, or with K, M, G, T)
    #[arg(long, value_name = "SIZE", value_parser = options::size)]
    max_store: Option<u64>,
    /// Let the command have at most N bytes of memory, with all that it starts
    #[arg(long, value_name = "N", value_parser = options::size)]
    memory: Option<u64>,
    /// Let the command have at most N processes and threads
    #[arg(long, value_name = "N", value_parser = options::count)]
    processes: Option<u64>,
    /// How the sandbox shows its checkpoints: hidden (in a directory that its root does not list), visible or off
    #[arg(long, value_name = "HOW", default_value = "hidden", value_parser = options::snapdir_text)]
    snapdir: Snapdir,
    /// The name of that directory
    #[arg(long, value_name = "NAME", default_value = ".jailfs", value_parser = options::snapname_text)]
    snapname: String,
    #[command(flatten)]
    confine: Confine,
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

/// How an attempt went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The command has ended.
    Ended(End),
    /// It was ended, because its time was over.
    TimedOut,
    /// There was no command to run; the code to exit with.
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

/// Reads a time as timeout(1) does.
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
    let number: f64 = number.parse().map_err(|_| "a time is a number, or one with s, m, h or d behind it")?;
    match Duration::try_from_secs_f64(number * seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("a time is more than nothing".to_owned()),
    }
}

impl Run {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let (base, store) = places(global)?;
        // Before any thread: see `crate::run`.
        block_signals()?;
        daemon::exit_on_panic();
        let sandbox = Sandbox::create_or_open(&base, &store, &StoreOptions::default())?;
        sandbox.set_protected(place::protected()?);
        let spec = self.confine.spec(global, &base, &store)?;
        let consent = Consent { protected: self.protected, privileges: self.privileges };
        let mut sandboxed = Sandboxed::begin(sandbox, &self.program(&spec, 1), consent)?;
        // What is there is what the caller goes back to: the command gives up nothing of it, however many checkpoints it makes.
        sandboxed.sandbox.spare_all_states();
        let outcome = self.attempts(&mut sandboxed, &spec)?;
        sandboxed.finish(self.fate(outcome), outcome)?;
        match sandboxed.sandbox.spare_nothing() {
            Ok(gone) => {
                gone.iter()
                    .for_each(|one| out::note(&format!("given up: checkpoint {}", show::checkpoint(one))));
            }
            Err(error) => log::warn!("space that nothing needs is not given back: {error}"),
        }
        drop(sandboxed);
        if outcome == Outcome::Ended(End::Killed(Signal::SIGINT as u8)) {
            // A shell goes on with its loop or script after a command that only says it was interrupted.
            die_of_interrupt()?;
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

    /// Runs the command until an attempt succeeds, or the last one is over.
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
            sandboxed.sandbox.forget_since(&sandboxed.moment)?;
            out::note(&format!("attempt {attempt} of {} {how}, and was rolled back", self.attempts));
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

/// A sandbox from before the command to what becomes of its changes.
struct Sandboxed {
    sandbox: Arc<Sandbox>,
    /// The tree as it was before: the last checkpoint, or the base.
    start: Rev,
    /// What else there was.
    moment: Moment,
    /// Which dangers the caller of an apply takes.
    consent: Consent,
}

impl Sandboxed {
    /// Notes the state of the tree, with a checkpoint if it is none yet.
    fn begin(sandbox: Arc<Sandbox>, program: &Program, consent: Consent) -> Result<Sandboxed> {
        let Reply::Status(status) = sandbox.handle(Request::Status)? else { return Err(wrong_answer()) };
        if status.changed > 0 {
            out::note(&format!("kept from before, and in the sandbox: {}", show::paths(status.changed)));
            let message = format!("before run: {}", program.line());
            let request = Request::Checkpoint { name: None, message };
            let Reply::Checkpoint(checkpoint) = sandbox.handle(request)? else { return Err(wrong_answer()) };
            return Ok(Sandboxed {
                start: Rev::Id(checkpoint.id),
                moment: sandbox.moment(),
                sandbox,
                consent,
            });
        }
        let start = status.checkpoint.map_or(Rev::Base, |checkpoint| Rev::Id(checkpoint.id));
        Ok(Sandboxed { start, moment: sandbox.moment(), sandbox, consent })
    }

    /// Runs the command once. Whether somebody has asked for an end meanwhile.
    fn serve(&mut self, run: &Run, spec: &Spec, attempt: u32) -> Result<(Outcome, bool)> {
        // Up to the end of all that it has started.
        let _hiding = self.sandbox.hide(&hidden_inside(spec));
        let group = Group::make(Share { memory: run.memory, processes: run.processes })?;
        let listener = Listener::bind(self.sandbox.store_path())?;
        match run.program(spec, attempt).start(spec.clone(), |process| group.join(process)) {
            Ok((started, Some(handed))) => {
                let base = Path::new(&spec.base);
                let serving =
                    Serving::adopt(Arc::clone(&self.sandbox), listener, handed, base, &run.choice(), gate)?;
                run_served(started, serving, run)
            }
            Ok((_, None)) => Err(wrong_answer()),
            Err(NotStarted::Failed(error)) => Err(error),
            Err(NotStarted::Refused(error)) => {
                let error = run.confine.accept_without_namespaces(error)?;
                drop(listener);
                out::note(&format!("warning: no namespaces are to be had here: {error}"));
                self.serve_elsewhere(run, spec, attempt, &group)
                    .map_err(|other| unless_mounted(&error, other))
            }
        }
    }

    /// Without namespaces: in a mount of its own, which all processes of this user see.
    fn serve_elsewhere(
        &self,
        run: &Run,
        spec: &Spec,
        attempt: u32,
        group: &Group,
    ) -> Result<(Outcome, bool)> {
        let place = tempfile::Builder::new().prefix("jailfs-run-").tempdir();
        let place = place.attempt(|| "make a place for the mount")?;
        let name = Path::new(&spec.base).file_name().unwrap_or("root".as_ref());
        let (point, scratch) = (place.path().join("mount").join(name), place.path().join("tmp"));
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

    /// Makes the tree what it was before the command.
    fn roll_back(&self) -> Result<()> {
        self.sandbox.go_back(&self.start).map(drop)
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
            Fate::Discard => self.discard(true),
            Fate::Keep | Fate::Ask => {
                let left = if outcome == Outcome::SUCCESS { "kept" } else { "kept, not applied" };
                out::note(&format!(
                    "{left}; 'jailfs diff base', 'jailfs apply' and 'jailfs discard' in this directory go on from here"
                ));
                Ok(())
            }
        }
    }

    fn diff(&self, from: Rev) -> Result<Changes> {
        let request = Request::Diff { from, to: Rev::Now, paths: Vec::new(), detail: Detail::NameStatus };
        match self.sandbox.handle(request)? {
            Reply::Diff(changes) => Ok(changes),
            _ => Err(wrong_answer()),
        }
    }

    /// Asks until there is an answer. An interrupt, or the end of the input, keeps. What was typed before it was asked was meant for
    /// somebody else, and is no answer.
    fn ask(&self, nothing_new: bool) -> Result<Fate> {
        unblock_signals()?;
        let mut answer = String::new();
        loop {
            if let Err(error) = tcflush(io::stdin(), FlushArg::TCIFLUSH) {
                // No terminal: whoever wrote the answer into a pipe or a file knows what is asked.
                log::debug!("forget what was typed: {error}");
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
        let Reply::Diff(changes) = self.sandbox.handle(request)? else { return Err(wrong_answer()) };
        let mut out = out::Out::new();
        show::patches(&changes, &mut out)?;
        out.finish()
    }

    fn apply(&self) -> Result<()> {
        let request =
            Request::Apply { paths: Vec::new(), dry_run: false, undo: false, consent: self.consent };
        let Reply::Applied(applied) = self.sandbox.handle(request)? else {
            return Err(wrong_answer());
        };
        let Some(error) = apply::why_not_written(&applied) else {
            return tell_applied(&applied);
        };
        apply::tell_conflicts(&applied);
        Err(error)
    }

    /// Takes the tree back first, whatever the command made of it; then lists what that was, as far as it can be listed; and
    /// forgets the checkpoints, names and holds of the command.
    fn discard(&self, is_listed: bool) -> Result<()> {
        let before = self.sandbox.go_back(&self.start)?;
        let listed = self.sandbox.changes_of(&before).and_then(|changes| tell_discarded(&changes, is_listed));
        if let Err(error) = listed {
            out::note(&format!("discarded; the changes cannot be listed: {error}"));
        }
        drop(before);
        self.sandbox.forget_since(&self.moment)
    }
}

/// Tells what was discarded. If `is_listed`, the paths were told before.
fn tell_discarded(changes: &Changes, is_listed: bool) -> Result<()> {
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

/// Lists what was discarded, up to [`LISTED`] bytes of paths: the command decides how much there is.
fn list_some(changes: &Changes) -> Result<()> {
    let (mut bytes, mut listed) = (0_usize, 0);
    for change in changes {
        let change = change?;
        bytes = bytes.saturating_add(change.path.as_bytes().len());
        if bytes > LISTED {
            let more = show::paths((changes.len() - listed) as u64);
            out::note(&format!("{more} more: the list is too long to print"));
            break;
        }
        listed += 1;
        out::detail(&show::name_status(&change));
    }
    Ok(())
}

/// Runs a command whose tree is served, up to the end of the last process that came from it.
fn run_served(mut started: Started, serving: Serving, run: &Run) -> Result<(Outcome, bool)> {
    serving.guard();
    let walls = started.served(Arc::new(|text| out::note(&show::one_line(text))))?;
    out::note(&walls.line());
    let outcome = match started.run()? {
        Some(end) => Ok(Outcome::Ended(end)),
        None => until_it_ends(&mut started, run.timeout),
    };
    let interrupted = started.is_interrupted();
    let left = match outcome {
        Ok(Outcome::Ended(_)) => started.remaining(),
        _ => Vec::new(),
    };
    // While it is served: a process that waits for the tree could not end otherwise. And before anything is told: what still runs
    // can hold the terminal back.
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

/// The error where neither way leads to a sandbox.
fn unless_mounted(refused: &Error, error: Error) -> Error {
    if error.kind != Kind::CannotMount {
        return error;
    }
    Error::new(Kind::CannotMount, "run a command in a sandbox", format!("{refused}; and {error}")).hint(
        "neither namespaces nor mounts are to be had here; docs/CONTAINERS.md says what each place needs",
    )
}

/// Ends this process by SIGINT. If that is ignored, it goes on.
fn die_of_interrupt() -> Result<()> {
    let attempt = || "end as the command ended";
    unblock_signals()?;
    kill(Pid::this(), Signal::SIGINT).map_err(io::Error::from).attempt(attempt)
}

fn until_it_ends(started: &mut Started, timeout: Option<Duration>) -> Result<Outcome> {
    let until = timeout.and_then(|time| Instant::now().checked_add(time));
    match started.wait(until)? {
        Waited::Ended(end) => Ok(Outcome::Ended(end)),
        Waited::NotStarted(error, code) => {
            out::error(&error);
            Ok(Outcome::NotStarted(code))
        }
        Waited::TimeIsOver => {
            started.terminate()?;
            // Whether it ends by itself or not, its time was over.
            started.wait(Some(Instant::now() + GRACE))?;
            Ok(Outcome::TimedOut)
        }
    }
}

fn tell_applied(applied: &Applied) -> Result<()> {
    out::note(&format!("applied: {}", show::summary(&applied.changes)?));
    out::note("undo: jailfs apply --undo");
    Ok(())
}

/// What a command in the sandbox may not ask of it: the changes are judged when it has ended, by whoever ran it.
fn gate(request: &Request) -> Result<()> {
    let (attempt, hint) = match request {
        Request::Apply { dry_run: false, .. } => {
            ("apply", "end the command; then the changes can be applied")
        }
        Request::Unmount => ("unmount", "end the command; then the sandbox is unmounted"),
        // What a command could give up is what its caller goes back to.
        Request::Drop { .. } => ("drop a checkpoint", "end the command; then checkpoints can be dropped"),
        Request::Gc { dry_run: false, .. } => ("gc", "end the command; then space can be given back"),
        // It reads all of the store, and nobody else looks at it meanwhile.
        Request::Check { read_data: true } => ("check", "end the command; then the store can be checked"),
        Request::Hold { held: false, .. } => {
            ("release a checkpoint", "end the command; then it can be released")
        }
        // No `_`: whether a command may ask for something new is to be decided here.
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
    fn a_command_cannot_let_itself_out() {
        let apply =
            |dry_run| Request::Apply { paths: Vec::new(), dry_run, undo: false, consent: Default::default() };
        assert_eq!(gate(&apply(false)).unwrap_err().kind, Kind::InUse);
        assert_eq!(gate(&Request::Unmount).unwrap_err().kind, Kind::InUse);
        let undo =
            Request::Apply { paths: Vec::new(), dry_run: false, undo: true, consent: Default::default() };
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
    fn a_time_is_read_as_timeout_reads_it() {
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
    fn an_outcome_has_the_code_of_env_and_timeout() {
        assert_eq!(Outcome::Ended(End::Exited(3)).code(), 3);
        assert_eq!(Outcome::Ended(End::Killed(15)).code(), 143);
        assert_eq!((Outcome::TimedOut.code(), Outcome::NotStarted(127).code()), (124, 127));
    }
}
