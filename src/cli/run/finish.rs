//! Lists the changes of the command, and applies, keeps or discards them.

use std::io::{self, BufRead};

use nix::sys::termios::{FlushArg, tcflush};

use super::Sandboxed;
use super::caller::Caller;
use super::outcome::{Fate, Outcome};
use crate::cli::target::wrong_answer;
use crate::cli::{apply, format, out};
use crate::error::{Attempt, Result};
use crate::run::{block_signals, unblock_signals};
use crate::sandbox::{Applied, Changes, Detail, Reply, Request, Rev};

/// The address space of a thread that compares trees, in bytes. A comparison recurses as deep as
/// the tree; only the used part becomes memory.
pub(super) const STACK: usize = 256 << 20;
/// The maximum length of the list of discarded paths, in bytes.
const LISTED: usize = 1 << 20;

impl Sandboxed {
    /// Decides about the changes by `fate`, and asks the user if it says so.
    pub(super) fn finish(&self, fate: Fate, outcome: Outcome) -> Result<()> {
        if fate == Fate::Discard {
            return self.discard(false);
        }
        let changes = self.diff(self.start.clone())?;
        if changes.is_empty() {
            out::note("the command has changed nothing");
        } else {
            format::list(&changes, false, out::detail)?;
            out::note(&format!("in the sandbox: {}", format::summary(&changes)?));
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
                format::paths(waiting as u64)
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
        match self.caller.call(request)? {
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
        let Reply::Diff(changes) = self.caller.call(request)? else {
            return Err(wrong_answer());
        };
        let mut out = out::Out::new();
        out.patches(&changes)?;
        out.finish()
    }

    fn apply(&self) -> Result<()> {
        let request = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: self.consent,
        };
        let Reply::Applied(applied) = self.caller.call(request)? else {
            return Err(wrong_answer());
        };
        let Some(error) = apply::why_not_written(&applied) else {
            return print_applied(&applied);
        };
        apply::tell_conflicts(&applied);
        Err(error)
    }

    /// Restores the tree first, whatever the command did to it. Then lists the discarded changes,
    /// if they can be listed, and drops the checkpoints, names, holds and forks of the command.
    fn discard(&self, is_listed: bool) -> Result<()> {
        let sandbox = match &self.caller {
            Caller::Here(sandbox) => sandbox,
            Caller::Mounted(_) => return self.discard_mounted(is_listed),
        };
        let before = sandbox.reset_to(&self.start)?;
        let listed =
            sandbox.changes_to(&before).and_then(|changes| print_discarded(&changes, is_listed));
        if let Err(error) = listed {
            out::note(&format!("discarded; the changes cannot be listed: {error}"));
        }
        drop(before);
        if self.has_forks {
            return Ok(());
        }
        self.rewind(sandbox)
    }

    /// Restores a mounted tree, in place. Its programs may have changed it since then, so nothing
    /// else is taken back.
    fn discard_mounted(&self, is_listed: bool) -> Result<()> {
        let to = self.start.clone();
        let request =
            Request::Restore { to, paths: Vec::new(), dry_run: false, detach_mounts: false };
        match self.caller.call(request) {
            Ok(Reply::Restored(restored)) => print_discarded(&restored.changes, is_listed),
            Ok(_) => Err(wrong_answer()),
            Err(error) if error.is_done => {
                out::note(&format!("discarded; the changes cannot be listed: {error}"));
                Ok(())
            }
            Err(error) => Err(error),
        }
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
        out::note(&format!("in the sandbox: {}", format::summary(changes)?));
    }
    out::note(&format!("discarded: {}", format::summary(changes)?));
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
            let more = format::paths((changes.len() - listed) as u64);
            out::note(&format!("{more} more; the list is too long to print"));
            break;
        }
        listed += 1;
        out::detail(&format::name_status(&change));
    }
    Ok(())
}

fn print_applied(applied: &Applied) -> Result<()> {
    out::note(&format!("applied: {}", format::summary(&applied.changes)?));
    out::note("undo: jailfs apply --undo");
    apply::tell_not_kept(applied);
    Ok(())
}
