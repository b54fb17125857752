//! One attempt: a program runs once in a head, behind walls of its own, while the tree is served to
//! it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Run;
use super::arena::Mounting;
use super::outcome::Outcome;
use crate::cli::target::wrong_answer;
use crate::cli::{format, host, out};
use crate::control::Listener;
use crate::daemon::{Access, MadeForks, Serving};
use crate::error::{Attempt as _, Error, Kind, Result};
use crate::fuse::Handed;
use crate::run::{
    Apart, Attended, Group, NotStarted, Program, Share, Spec, Started, Waited, Walls,
};
use crate::sandbox::Sandbox;

/// How long the command may take to end after its time is over.
const GRACE: Duration = Duration::from_secs(5);

/// Tells the user something about an attempt.
pub(super) type Tell = Arc<dyn Fn(&str) + Send + Sync>;

/// A program that is to run once.
pub(super) struct Attempt<'a> {
    pub(super) run: &'a Run,
    pub(super) spec: &'a Spec,
    pub(super) program: Program,
    /// Tells the attempts of this process apart, from 1.
    pub(super) number: u32,
    pub(super) tell: Tell,
    /// Gets the walls that stand, before the program runs.
    pub(super) walls: &'a (dyn Fn(&Walls) + Sync),
}

/// How an attempt ended.
pub(super) struct Ended {
    pub(super) outcome: Outcome,
    /// Whether a signal, or the caller, has asked for an end.
    pub(super) interrupted: bool,
}

/// The head of an attempt that runs alone.
pub(super) struct Alone<'a> {
    pub(super) sandbox: &'a Arc<Sandbox>,
    /// Gets the forks that the program makes.
    pub(super) forked: MadeForks,
}

impl Alone<'_> {
    fn adopt(&self, attempt: &Attempt<'_>, listener: Listener, handed: Handed) -> Result<Serving> {
        let base = Path::new(&attempt.spec.base);
        let (sandbox, choice) = (Arc::clone(self.sandbox), attempt.run.choice());
        Serving::adopt(sandbox, listener, handed, base, &choice, self.access())
    }

    /// The requests that the command and other clients may make while it runs.
    fn access(&self) -> Access {
        let (head, forked) = (self.sandbox.head_name().to_owned(), Arc::clone(&self.forked));
        Access::OfRun { head, forked }
    }
}

/// The server of the tree. Dropping it ends the mount.
enum Served<'a> {
    Alone(Serving, &'a str),
    Beside(Mounting<'a>),
}

impl Served<'_> {
    /// Fails if the mount was aborted or unmounted.
    fn check(&self) -> Result<()> {
        match self {
            Served::Alone(serving, head) => serving.check_served(head),
            Served::Beside(mounting) => mounting.check(),
        }
    }

    fn close(self) -> Result<()> {
        match self {
            Served::Alone(serving, _) => {
                serving.close();
                Ok(())
            }
            Served::Beside(mounting) => mounting.end(),
        }
    }
}

impl Attempt<'_> {
    /// Runs the program with the streams, signals and terminal of this process. No other attempt
    /// runs meanwhile.
    pub(super) fn run_alone(&self, alone: &Alone<'_>) -> Result<Ended> {
        let group = Group::make(self.share(), self.number)?;
        let listener = Listener::bind(alone.sandbox.store_path())?;
        let started =
            self.program.start(self.spec.clone(), Attended::Alone, |process| group.join(process));
        match started {
            Ok((started, Some(handed))) => {
                let serving = alone.adopt(self, listener, handed)?;
                self.run_served(started, Served::Alone(serving, alone.sandbox.head_name()))
            }
            Ok((_, None)) => Err(wrong_answer()),
            Err(NotStarted::Failed(error)) => Err(error),
            Err(NotStarted::Refused(error)) => {
                let error = self.run.confine.accept_without_namespaces(error)?;
                drop(listener);
                (self.tell)(&format!("warning: this host does not allow namespaces: {error}"));
                self.run_elsewhere(alone, &group).map_err(|other| mount_error(&error, other))
            }
        }
    }

    /// Runs the program beside others, in the head that `mounting` serves.
    pub(super) fn run_beside(&self, mounting: Mounting<'_>, apart: Apart) -> Result<Ended> {
        let group = Group::make(self.share(), self.number)?;
        let socket = Some(mounting.prepare()?.into());
        let spec = Spec { socket, ..self.spec.clone() };
        let attended = Attended::OneOfSeveral(apart);
        match self.program.start(spec, attended, |process| group.join(process)) {
            Ok((started, Some(handed))) => {
                mounting.serve(handed, Path::new(&self.spec.base), self.run.choice())?;
                self.run_served(started, Served::Beside(mounting))
            }
            Ok((_, None)) => Err(wrong_answer()),
            Err(NotStarted::Failed(error)) => Err(error),
            Err(NotStarted::Refused(error)) => {
                let why = format!("{}; attempts side by side need namespaces", error.reason);
                Err(Error { reason: why, ..error })
            }
        }
    }

    fn share(&self) -> Share {
        Share { memory: self.run.memory, processes: self.run.processes }
    }

    /// Without namespaces: serves the tree at a mount of its own, which all processes of this user
    /// see.
    fn run_elsewhere(&self, alone: &Alone<'_>, group: &Group) -> Result<Ended> {
        let temp_dir = tempfile::Builder::new().prefix("jailfs-run-").tempdir();
        let temp_dir = temp_dir.attempt(|| "create a directory for the mount")?;
        let name = Path::new(&self.spec.base).file_name().unwrap_or("root".as_ref());
        let (point, scratch) =
            (temp_dir.path().join("mount").join(name), temp_dir.path().join("tmp"));
        for dir in [&point, &scratch] {
            std::fs::create_dir_all(dir).attempt(|| format!("create '{}'", dir.display()))?;
        }
        let point = host::resolve(&point)?;
        let sandbox = Arc::clone(alone.sandbox);
        let serving = Serving::start(sandbox, &point, &self.run.choice(), alone.access())?;
        let elsewhere = Some((point.into(), scratch.into()));
        let spec = Spec { elsewhere, ..self.spec.clone() };
        // Its environment names the mount.
        let program = self.run.program(&spec, self.number);
        match program.start(spec, Attended::Alone, |process| group.join(process)) {
            Ok((started, _)) => {
                self.run_served(started, Served::Alone(serving, alone.sandbox.head_name()))
            }
            Err(NotStarted::Failed(error) | NotStarted::Refused(error)) => Err(error),
        }
    }

    /// Runs a program whose tree is served, until its last process has ended.
    fn run_served(&self, mut started: Started, served: Served<'_>) -> Result<Ended> {
        let tell = Arc::clone(&self.tell);
        let walls = started.served(Arc::new(move |text| tell(&format::one_line(text))))?;
        (self.walls)(&walls);
        let outcome = match started.run()? {
            Some(_) if matches!(served, Served::Beside(_)) => Ok(Outcome::Stopped),
            Some(end) => Ok(Outcome::Ended(end)),
            None => self.wait_for_end(&mut started),
        };
        let interrupted = started.is_interrupted();
        // The mount ends with the last process, so it is checked now.
        let (left, was_served) = match outcome {
            Ok(Outcome::Ended(_)) => (started.remaining(), served.check()),
            _ => (Vec::new(), Ok(())),
        };
        // The tree must still be served: a process that waits for it could not end otherwise.
        // Nothing may be printed before: a process that still runs can suspend the terminal.
        for error in started.end() {
            (self.tell)(&format!("warning: {error}"));
        }
        if matches!(outcome, Ok(Outcome::TimedOut)) {
            (self.tell)("the time is over: the command is ended");
        }
        if !left.is_empty() {
            let left = format::one_line(&left.join(", "));
            (self.tell)(&format!("processes remain in the sandbox and are ended: {left}"));
        }
        let closed = served.close();
        let outcome = outcome?;
        closed.and(was_served)?;
        Ok(Ended { outcome, interrupted })
    }

    fn wait_for_end(&self, started: &mut Started) -> Result<Outcome> {
        let until = self.run.timeout.and_then(|time| Instant::now().checked_add(time));
        let outcome = match started.wait(until)? {
            Waited::Ended(end) => return Ok(Outcome::Ended(end)),
            Waited::NotStarted(error, code) => {
                out::error(&error);
                return Ok(Outcome::NotStarted(code));
            }
            Waited::TimeIsOver => Outcome::TimedOut,
            Waited::IsAsked => Outcome::Stopped,
        };
        started.terminate()?;
        // The outcome is decided, whether or not the command ends by itself now.
        started.wait(Some(Instant::now() + GRACE))?;
        Ok(outcome)
    }
}

/// The error if neither namespaces nor a mount are possible.
fn mount_error(refused: &Error, error: Error) -> Error {
    if error.kind != Kind::CannotMount {
        return error;
    }
    Error::new(Kind::CannotMount, "run a command in a sandbox", format!("{refused}; and {error}"))
        .hint(
            "this host allows neither namespaces nor mounts; docs/CONTAINERS.md says what is \
             needed",
        )
}
