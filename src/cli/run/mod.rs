//! `jailfs run`.
//!
//! Messages of jailfs go to standard error: standard output belongs to the command.

mod arena;
mod attempt;
mod caller;
mod finish;
mod mounted;
mod outcome;
mod race;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::confine::Confine;
use super::host::{self, Within};
use super::mount::directory;
use super::target::wrong_answer;
use super::{Global, format, options, out, protected, store_path};
use crate::daemon;
use crate::daemon::{Choice, MadeForks, Snapdir};
use crate::error::{Attempt, Error, Kind, Result};
use crate::run::{End, Program, Spec, block_signals, hidden_inside, unblock_signals};
use crate::sandbox::{Consent, Reply, Request, Rev};
use crate::sandbox::{Sandbox, Savepoint, StoreOptions};

use attempt::{Alone, Attempt as Try, Ended};
use caller::{Caller, Daemon};
use outcome::{Fate, Outcome};
use race::{Plan, RaceOptions};

/// The exit code if jailfs failed and not the command.
pub(super) const FAILED: u8 = 125;
/// Run a command in a sandbox of the current directory
///
/// The command sees the directory at its own path and can change all of it. It sees the rest of the
/// host read-only and without secrets. When the command has ended, its changes are listed, and
/// applied, kept or discarded. Kept changes are visible to the next run, and to 'jailfs diff',
/// 'apply' and 'discard' in this directory. With --forks the command runs in several forks of the
/// sandbox side by side, and the sandbox continues from the best one. The exit code is that of the
/// command; 124 after a timeout, 125 if jailfs failed, 126 if the command cannot be executed, 127
/// if it was not found.
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
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..))]
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
    #[arg(long, value_name = "NAME", default_value = ".jailfs",
        value_parser = options::snapname_text)]
    snapname: String,
    /// The kernel collects writes, as with 'mount -o writeback': many small writes cost less,
    /// reading many files costs more
    #[arg(long)]
    writeback: bool,
    #[command(flatten)]
    race: RaceOptions,
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
        let race = match self.race.plan(self.apply || self.ask) {
            Ok(race) => race,
            // The command line is wrong, as for an option that is not known.
            Err(error) => {
                out::error(&error);
                return Ok(error.kind.exit_code());
            }
        };
        // Before any thread starts: see `crate::run`.
        block_signals()?;
        daemon::exit_on_panic();
        if race.is_some()
            && let Some(daemon) = mounted::find(global)?
        {
            return self.run_mounted(global, &race, daemon);
        }
        let (base, store) = base_and_store(global)?;
        let head = store_path::head_in(&store, global.head.as_deref())?;
        let options = StoreOptions::default();
        let sandbox = Sandbox::create_or_open_head(&base, &store, &options, &head)?;
        sandbox.set_protected(protected::protected()?);
        let spec = self.confine.spec(global, &base, &store)?;
        let consent = Consent { protected: self.protected, privileges: self.privileges };
        let caller = Caller::Here(Arc::clone(&sandbox));
        let mut sandboxed = Sandboxed::begin(caller, &self.program(&spec, 1), consent)?;
        sandboxed.savepoint = Some(sandbox.savepoint());
        // However many checkpoints the command makes, no earlier state is dropped while it runs:
        // the caller may go back to it.
        sandbox.pin_states();
        let ended = match &race {
            Some(plan) => race::run(self, plan, &mut sandboxed, &spec)?,
            None => {
                let outcome = self.attempts(&sandboxed, &sandbox, &spec)?;
                sandboxed.finish(self.fate(outcome), outcome)?;
                outcome
            }
        };
        match sandbox.unpin_states() {
            Ok(gone) => {
                gone.iter().for_each(|one| {
                    out::note(&format!("dropped: checkpoint {}", format::checkpoint(one)))
                });
            }
            Err(error) => log::warn!("unused space was not freed: {error}"),
        }
        drop((sandboxed, sandbox));
        end_with(ended)
    }

    /// Runs a race of a head that a daemon has mounted.
    fn run_mounted(&self, global: &Global, race: &Option<Plan>, daemon: Daemon) -> Result<u8> {
        let Some(plan) = race else { return Err(wrong_answer()) };
        mounted::check_options(self.keep_checkpoints.is_some() || self.max_store.is_some())?;
        let spec = mounted::spec(&self.confine, global, &daemon)?;
        let consent = Consent { protected: self.protected, privileges: self.privileges };
        let caller = Caller::Mounted(daemon);
        let mut sandboxed = Sandboxed::begin(caller, &self.program(&spec, 1), consent)?;
        let ended = race::run(self, plan, &mut sandboxed, &spec)?;
        drop(sandboxed);
        end_with(ended)
    }

    fn choice(&self) -> Choice {
        Choice {
            max_bytes: self.max_bytes,
            max_files: self.max_files,
            keep: self.keep_checkpoints,
            max_store: self.max_store,
            snapdir: self.snapdir,
            snapname: self.snapname.clone().into_bytes(),
            writeback: self.writeback,
            ..Choice::default()
        }
    }

    fn program(&self, spec: &Spec, attempt: u32) -> Program {
        Program { words: self.command.clone(), env: self.confine.environment(spec, attempt) }
    }

    /// Runs the command until an attempt succeeds or none is left.
    fn attempts(
        &self,
        sandboxed: &Sandboxed,
        sandbox: &Arc<Sandbox>,
        spec: &Spec,
    ) -> Result<Outcome> {
        let mut attempt = 1;
        loop {
            let alone = Alone { sandbox, forked: Arc::clone(&sandboxed.forked) };
            let Ended { outcome, interrupted } = self.attempt(&alone, spec, attempt)?;
            let is_over = outcome == Outcome::SUCCESS || matches!(outcome, Outcome::NotStarted(_));
            if is_over || interrupted || attempt >= self.attempts {
                return Ok(outcome);
            }
            let how = match outcome {
                Outcome::TimedOut => "ran out of time".to_owned(),
                other => format!("failed ({})", other.code()),
            };
            sandbox.reset_to(&sandboxed.start)?;
            sandboxed.rewind(sandbox)?;
            out::note(&format!(
                "attempt {attempt} of {} {how}, and was rolled back",
                self.attempts
            ));
            attempt += 1;
        }
    }

    fn attempt(&self, alone: &Alone<'_>, spec: &Spec, number: u32) -> Result<Ended> {
        // Until the last process of the command has ended.
        let _hiding = alone.sandbox.hide(&hidden_inside(spec));
        let attempt = Try {
            run: self,
            spec,
            program: self.program(spec, number),
            number,
            tell: Arc::new(out::note),
            walls: &|walls| out::note(&walls.line()),
        };
        attempt.run_alone(alone)
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
        && let Within::Mount(place) = host::within(&base)?
    {
        let attempt = format!("run a command in a sandbox of '{}'", base.display());
        return Err(Error::new(
            Kind::InUse,
            attempt,
            format!("it lies in the sandbox of '{}'", place.store.display()),
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
    caller: Caller,
    /// The tree before the command: the last checkpoint, or the base.
    start: Rev,
    /// The checkpoints, names and holds before the command. `None` if the head is mounted: others
    /// make some meanwhile.
    savepoint: Option<Savepoint>,
    /// The dangers that the caller of an apply accepts.
    consent: Consent,
    /// The forks that the command has made.
    forked: MadeForks,
    /// Forks are kept that lie on states since then. A discard keeps these states.
    has_forks: bool,
}

impl Sandboxed {
    /// Records the state of the tree. Makes a checkpoint if the tree differs from the last one.
    fn begin(caller: Caller, program: &Program, consent: Consent) -> Result<Sandboxed> {
        let Reply::Status(status) = caller.call(Request::Status)? else {
            return Err(wrong_answer());
        };
        let mut start = status.checkpoint.map_or(Rev::Base, |checkpoint| Rev::Id(checkpoint.id));
        if status.changed > 0 {
            out::note(&format!(
                "kept from before, and in the sandbox: {}",
                format::paths(status.changed)
            ));
            let message = format!("before run: {}", program.line());
            let request = Request::Checkpoint { name: None, message };
            let Reply::Checkpoint(checkpoint) = caller.call(request)? else {
                return Err(wrong_answer());
            };
            start = Rev::Id(checkpoint.id);
        }
        let (savepoint, forked) = (None, MadeForks::default());
        Ok(Sandboxed { caller, start, savepoint, consent, forked, has_forks: false })
    }

    /// Drops the checkpoints, names, holds and forks of the command.
    fn rewind(&self, sandbox: &Sandbox) -> Result<()> {
        let mut names: BTreeSet<_> = std::mem::take(&mut *self.forked.lock()).into_iter().collect();
        names.extend(sandbox.made_forks());
        let mut first_failure = Ok(());
        for name in names {
            let dropped = sandbox.handle(Request::DropFork { name }).map(drop);
            first_failure = first_failure.and(dropped);
        }
        // Even if a fork stays, nothing else of the command may.
        let rewound = self.savepoint.as_ref().map_or(Ok(()), |before| sandbox.rewind_to(before));
        first_failure.and(rewound)
    }
}

/// The exit code of an end. Ends by SIGINT itself.
fn end_with(ended: Outcome) -> Result<u8> {
    if ended == Outcome::Ended(End::Killed(Signal::SIGINT as u8)) {
        // A shell loop or script continues after a command that exits with 130. It stops if the
        // command dies of the signal.
        end_by_interrupt()?;
    }
    Ok(ended.code())
}

/// Ends this process by SIGINT. If that is ignored, it continues.
fn end_by_interrupt() -> Result<()> {
    let attempt = || "end by the signal that ended the command";
    unblock_signals()?;
    kill(Pid::this(), Signal::SIGINT).map_err(io::Error::from).attempt(attempt)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
