//! The caller's head before and after a race.

use crate::cli::out;
use crate::cli::run::caller::Caller;
use crate::cli::target::wrong_answer;
use crate::error::{Attempt, Error, Kind, Result};
use crate::sandbox::{Detail, Reply, Request, Rev};
use crate::sys::failpoint::{self, Failpoint};

/// Says how many forks are left by races that were killed.
///
/// # Errors
/// Those of the sandbox.
pub(super) fn tell_abandoned(caller: &Caller) -> Result<()> {
    let Reply::Forks(forks) = caller.call(Request::Forks)? else { return Err(wrong_answer()) };
    let left = forks.iter().filter(|fork| fork.is_abandoned).count();
    if left > 0 {
        let are = if left == 1 { "fork is" } else { "forks are" };
        out::note(&format!(
            "{left} {are} left by a race that was killed; 'jailfs forks' lists them, \
             and 'jailfs fork --drop --abandoned' drops them"
        ));
    }
    Ok(())
}

/// Whether a mounted head is no more as it was when the race began.
///
/// # Errors
/// Those of the sandbox.
pub(super) fn has_changed(caller: &Caller, start: &Rev) -> Result<bool> {
    if let Caller::Here(_) = caller {
        return Ok(false);
    }
    let (from, to, detail) = (start.clone(), Rev::Now, Detail::NameStatus);
    match caller.call(Request::Diff { from, to, paths: Vec::new(), detail })? {
        Reply::Diff(changes) => Ok(!changes.is_empty()),
        _ => Err(wrong_answer()),
    }
}

/// Makes the tree of the caller's head equal to a sealed state, in place. Returns the operation by
/// which this can be undone.
///
/// # Errors
/// Those of the sandbox. The tree is then as before.
pub(super) fn take(caller: &Caller, state: Rev) -> Result<Option<u64>> {
    failpoint::hit(Failpoint::RunPick).attempt(|| "continue from the winner")?;
    let request =
        Request::Restore { to: state, paths: Vec::new(), dry_run: false, detach_mounts: false };
    match caller.call(request) {
        Ok(Reply::Restored(restored)) => Ok(restored.undo),
        Ok(_) => Err(wrong_answer()),
        // Only the list of what changed failed.
        Err(error) if error.is_done => Ok(None),
        Err(error) => Err(error.during("continue from the winner")),
    }
}

/// The error if no attempt could be run.
pub(super) fn all_failed(error: &Error) -> Error {
    let reason = format!("all of them failed: {error}");
    let failed = Error::new(Kind::Failed, "run attempts side by side", reason);
    match &error.hint {
        Some(hint) => failed.hint(hint.clone()),
        None => failed,
    }
}
