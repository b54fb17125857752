//! Undo and redo of single files, and the entries that a restore adds to the edit history.

use crate::error::{Attempt, Error, FsError, Kind, Result};
use crate::fs::{PathEdits, State, Step, StepError, Stepped, Tended};
use crate::timeline::Timeline;
use crate::timeline::diff;
use crate::timeline::diff::What;
use crate::timeline::restore::ChangeSink;
use crate::types::TreePath;

/// A restore that replaces more files adds nothing to the edit history; `jailfs op restore` undoes
/// it.
const MAX_RESTORED: usize = 10_000;

impl Timeline {
    /// Undoes or redoes edits of one file, in place.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if the history has fewer edits, [`Kind::InUse`] if something is mounted on
    /// the file, or a failure of the store. An error before the switch changes nothing; a later one
    /// says that the step was done.
    pub fn step(&self, path: &TreePath, step: Step) -> Result<Stepped> {
        let _operation = self.lock_operation();
        self.flush()?;
        if self.kernel().mounts_inside()?.contains(path) {
            let why = "something is mounted on it";
            return Err(Error::new(Kind::InUse, attempt(path, step), why).hint("unmount it first"));
        }
        let stepped = self.fs.step(path, step).map_err(|no| refusal(path, step, no))?;
        let invalidated = self.kernel().invalidate(&stepped.invalidations);
        let synced = self.with_reserve(|| self.fs.sync().attempt(|| "sync the store"));
        let done = |error: Error| error.after(format!("{} was done", attempt(path, step)));
        synced.and(invalidated).map_err(done)?;
        Ok(stepped)
    }

    /// Replaces the edit histories of paths by those that came with a state, which the head shows.
    /// Returns the number of edits.
    ///
    /// # Errors
    /// The sync failed: a power cut may then take them.
    pub fn adopt_edits(&self, edits: Vec<PathEdits>) -> Result<u64> {
        let _operation = self.lock_operation();
        let count = self.fs.adopt_edits(edits);
        self.with_reserve(|| self.fs.secure_edits())?;
        Ok(count)
    }

    /// Shrinks the edit history, until `is_ending` returns true. While files are being edited it
    /// does only what cannot wait, unless `at_once`.
    pub fn maintain_edit_history(&self, at_once: bool, is_ending: &dyn Fn() -> bool) -> Tended {
        self.fs.maintain_edits(at_once, &|| is_ending() || self.is_stopping())
    }

    /// Lists the changes of a restore, and adds the files that it replaced to the edit history,
    /// unless there are more than [`MAX_RESTORED`].
    pub(super) fn list_restored(
        &self,
        from: &State,
        to: &State,
        list: ChangeSink<'_>,
    ) -> Result<()> {
        let attempt = || "list what changed";
        let (mut kept, mut count) = (Vec::new(), 0);
        for change in diff::compare_records(from, to).attempt(attempt)? {
            let change = change.attempt(attempt)?;
            if is_lost(change.what) {
                count += 1;
                if count > MAX_RESTORED {
                    kept = Vec::new();
                } else if let Some(content) = from.content(&change.old).ok().flatten() {
                    kept.push((change.old_path.as_ref().unwrap_or(&change.path).clone(), content));
                }
            }
            list(from, to, change)?;
        }
        self.fs.record_restored_edits(kept);
        Ok(())
    }
}

/// Whether a change replaced or removed the file at the path.
fn is_lost(what: What) -> bool {
    match what {
        What::Deleted | What::Content | What::Type | What::Renamed | What::Links => true,
        What::Added | What::Attributes | What::DirTimes => false,
    }
}

fn attempt(path: &TreePath, step: Step) -> String {
    match step {
        Step::Undo(_) => format!("undo '{path}'"),
        Step::Redo(_) => format!("redo '{path}'"),
    }
}

fn refusal(path: &TreePath, step: Step, no: StepError) -> Error {
    let lists = format!("'jailfs history {path}' lists what there is");
    match (no, step) {
        (StepError::Only(0), Step::Undo(_)) => {
            Error::new(Kind::NoStore, attempt(path, step), "there is no earlier version")
                .hint(lists)
        }
        (StepError::Only(0), Step::Redo(_)) => Error::new(
            Kind::NoStore,
            attempt(path, step),
            "nothing was undone since it was last edited",
        )
        .hint(lists),
        (StepError::Only(count), _) => Error::new(
            Kind::NoStore,
            attempt(path, step),
            format!("there are only {count} steps to go"),
        )
        .hint(lists),
        (StepError::NotAFile(_), _) => {
            Error::new(Kind::Failed, attempt(path, step), "the path is not a regular file now")
                .hint("move it away first")
        }
        (StepError::Failed(FsError::NotADirectory), _) => {
            Error::new(Kind::Failed, attempt(path, step), "a path above it is not a directory now")
                .hint("move it away first")
        }
        (StepError::Failed(error), _) => {
            match Err::<(), FsError>(error).attempt(|| attempt(path, step)) {
                Err(error) => error,
                Ok(()) => Error::damage(attempt(path, step), "no reason"),
            }
        }
    }
}
