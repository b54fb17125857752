//! Runs the command once, while the tree is served to it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::gate::gate;
use super::outcome::Outcome;
use super::{Run, Sandboxed};
use crate::cli::target::wrong_answer;
use crate::cli::{format, host, out};
use crate::control::Listener;
use crate::daemon::{Access, Serving};
use crate::error::{Attempt, Error, Kind, Result};
use crate::run::{Group, NotStarted, Share, Spec, Started, Waited, hidden_inside};

/// How long the command may take to end after its time is over.
const GRACE: Duration = Duration::from_secs(5);

impl Sandboxed {
    /// Runs the command once. Also returns whether a signal has asked for an end.
    pub(super) fn serve(
        &mut self,
        run: &Run,
        spec: &Spec,
        attempt: u32,
    ) -> Result<(Outcome, bool)> {
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
                    self.access(),
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

    /// The requests that the command and other clients may make while it runs.
    fn access(&self) -> Access {
        let (head, forked) = (self.sandbox.head_name().to_owned(), Arc::clone(&self.forked));
        Access::OfRun { gate, head, forked }
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
        let sandbox = Arc::clone(&self.sandbox);
        let serving = Serving::start(sandbox, &point, &run.choice(), self.access())?;
        let spec = Spec { elsewhere: Some((point.into(), scratch.into())), ..spec.clone() };
        match run.program(&spec, attempt).start(spec, |process| group.join(process)) {
            Ok((started, _)) => run_served(started, serving, run),
            Err(NotStarted::Failed(error) | NotStarted::Refused(error)) => Err(error),
        }
    }
}

/// Runs a command whose tree is served, until its last process has ended.
fn run_served(mut started: Started, serving: Serving, run: &Run) -> Result<(Outcome, bool)> {
    let walls = started.served(Arc::new(|text| out::note(&format::one_line(text))))?;
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
        let left = format::one_line(&left.join(", "));
        out::note(&format!("processes remain in the sandbox and are ended: {left}"));
    }
    serving.close();
    Ok((outcome?, interrupted))
}

/// The error if neither namespaces nor a mount are possible.
fn mount_error(refused: &Error, error: Error) -> Error {
    if error.kind != Kind::CannotMount {
        return error;
    }
    Error::new(Kind::CannotMount, "run a command in a sandbox", format!("{refused}; and {error}"))
        .hint(
            "this host allows neither namespaces nor mounts; \
             docs/CONTAINERS.md says what is needed",
        )
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
