//! One attempt of a race in its own fork: the command, perhaps several times, and then the command
//! that scores it.
//!
//! * Each try begins with a new fork of the same sealed state. So nothing of the try before is
//!   left, whatever it did.
//! * The tree is sealed when the command has ended. It has nothing that the
//!   scoring command writes.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::output::{Reader, To};
use super::result::{Finished, How, score_of};
use super::screen::{Phase, Screen};
use crate::cli::format;
use crate::cli::run::Run;
use crate::cli::run::arena::{Arena, Mounting};
use crate::cli::run::attempt::{Attempt, Ended};
use crate::cli::run::outcome::Outcome;
use crate::cli::target::wrong_answer;
use crate::error::Result;
use crate::run::{Apart, Program, Spec, Stop, Walls};
use crate::sandbox::{Detail, Reply, Request, Rev};
use crate::types::LayerId;

/// The state that the attempts of a race share.
pub(super) struct Track<'a> {
    pub(super) run: &'a Run,
    pub(super) spec: &'a Spec,
    pub(super) arena: &'a Arena<'a>,
    /// Asks all attempts to end.
    pub(super) stop: Stop,
    /// The shell command that scores them.
    pub(super) score: Option<&'a OsStr>,
    pub(super) screen: Arc<Screen>,
    /// Whether the walls were named. They are the same for all.
    pub(super) has_named_walls: AtomicBool,
}

impl Track<'_> {
    /// Runs attempt `number` in its head, to its end.
    pub(super) fn run(&self, number: u32, head: String) -> Finished {
        let began = Instant::now();
        let mut finished = Finished {
            number,
            head,
            how: How::NotRun,
            time: Duration::ZERO,
            state: None,
            changes: None,
            score: None,
        };
        if self.stop.is_asked() {
            return finished;
        }
        self.screen.set(number, Phase::Running(began));
        let ended = self.tries(number, &finished.head);
        finished.time = began.elapsed();
        let judged = ended.and_then(|ended| {
            finished.how = How::Ran(ended.outcome);
            self.judge(ended.outcome, &mut finished)
        });
        if let Err(error) = judged {
            self.screen.note_of(number, &format!("error: {error}"));
            (finished.how, finished.state) = (How::Failed(error), None);
        }
        finished
    }

    /// Runs the command until a try succeeds or none is left. Returns how the last one ended.
    fn tries(&self, number: u32, head: &str) -> Result<Ended> {
        let mut tried = 1;
        loop {
            let mut program = self.run.program(self.spec, number);
            program.env.push(("JAILFS_TRY".into(), tried.to_string().into()));
            let ended = self.perform(head, program, number, To::Screen)?.0;
            let is_last = ended.outcome == Outcome::SUCCESS
                || matches!(ended.outcome, Outcome::NotStarted(_) | Outcome::Stopped)
                || ended.interrupted
                || tried >= self.run.attempts;
            if is_last {
                return Ok(ended);
            }
            self.arena.replace(head)?;
            let how = match ended.outcome {
                Outcome::TimedOut => "ran out of time".to_owned(),
                other => format!("failed ({})", other.code()),
            };
            let tries = self.run.attempts;
            self.screen
                .note_of(number, &format!("try {tried} of {tries} {how}, and was rolled back"));
            tried += 1;
        }
    }

    /// Runs a program in a head. Also returns the end of its output, if that goes to memory.
    fn perform(
        &self,
        head: &str,
        program: Program,
        number: u32,
        to: To,
    ) -> Result<(Ended, Vec<u8>)> {
        let (reader, output) = Reader::start(&self.screen, number, to)?;
        let (errors_reader, errors) = Reader::start(&self.screen, number, To::Screen)?;
        let screen = Arc::clone(&self.screen);
        let attempt = Attempt {
            run: self.run,
            spec: self.spec,
            program,
            number,
            tell: Arc::new(move |text| screen.note_of(number, text)),
            walls: &|walls| self.name_walls(walls),
        };
        let apart = Apart { output, errors, stop: self.stop.clone() };
        let ended = attempt.run_beside(Mounting { arena: self.arena, head }, apart);
        let kept = reader.finish();
        errors_reader.finish();
        Ok((ended?, kept))
    }

    fn name_walls(&self, walls: &Walls) {
        if !self.has_named_walls.swap(true, Ordering::Relaxed) {
            self.screen.note(&walls.line());
        }
    }

    /// Seals the tree, counts what differs from the start, and scores it.
    fn judge(&self, outcome: Outcome, finished: &mut Finished) -> Result<()> {
        let is_candidate = matches!(outcome, Outcome::Ended(_) | Outcome::TimedOut);
        if is_candidate {
            finished.state = Some(self.seal(&finished.head, finished.number)?);
        }
        let to = finished.state.map_or(Rev::Now, Rev::Id);
        let request = Request::Diff {
            from: self.arena.start().clone(),
            to,
            paths: Vec::new(),
            detail: Detail::NameStatus,
        };
        let reply = self.arena.call(&finished.head, request)?;
        let Reply::Diff(changes) = reply else { return Err(wrong_answer()) };
        finished.changes = Some(format::summary(&changes)?);
        let Some((score, state)) = self.score.zip(finished.state) else { return Ok(()) };
        if matches!(outcome, Outcome::Ended(_)) && !self.stop.is_asked() {
            self.screen.set(finished.number, Phase::Scoring);
            finished.score = self.score(&finished.head, score, finished.number)?;
            self.arena.reset(&finished.head, state)?;
        }
        Ok(())
    }

    /// Makes a checkpoint of the tree, also of one that was at a limit: the limits ended with the
    /// mount.
    fn seal(&self, head: &str, number: u32) -> Result<LayerId> {
        let line = self.run.program(self.spec, number).line();
        let message = format!("attempt {number} of run: {line}");
        match self.arena.call(head, Request::Checkpoint { name: None, message })? {
            Reply::Checkpoint(checkpoint) => Ok(checkpoint.id),
            _ => Err(wrong_answer()),
        }
    }

    /// The number that the scoring command prints. `None` if it fails or prints none.
    fn score(&self, head: &str, command: &OsStr, number: u32) -> Result<Option<f64>> {
        let words = [OsString::from("sh"), "-c".into(), command.to_owned()];
        let program = Program { words: words.into(), ..self.run.program(self.spec, number) };
        let (ended, output) = self.perform(head, program, number, To::Memory)?;
        match ended.outcome {
            Outcome::SUCCESS => {
                let score = score_of(&output);
                if score.is_none() {
                    self.screen.note_of(number, "the command of --pick has printed no number");
                }
                Ok(score)
            }
            Outcome::Stopped => Ok(None),
            other => {
                let code = other.code();
                self.screen.note_of(number, &format!("the command of --pick has failed ({code})"));
                Ok(None)
            }
        }
    }
}
