//! Undo and redo of single files, and what a restore leaves for them.

use crate::error::{Attempt, Error, FsError, Kind, Result};
use crate::fs::{NoStep, State, Step, Stepped, Tended};
use crate::timeline::Timeline;
use crate::timeline::diff;
use crate::timeline::diff::What;
use crate::timeline::restore::ChangeSink;
use crate::types::TreePath;

/// A restore that changes more files is no edit of each of them: `op restore` takes it back.
const MOST_RESTORED: usize = 10_000;

impl Timeline {
    /// Makes a file what it was, by versions, in place.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if there are not so many versions, or what the store answers. Before the version is shown, an error
    /// changes nothing.
    pub fn step(&self, path: &TreePath, step: Step) -> Result<Stepped> {
        let _turn = self.turn();
        self.flush()?;
        if self.kernel().mounts_inside()?.contains(path) {
            let why = "something is mounted on it";
            return Err(Error::new(Kind::InUse, attempt(path, step), why).hint("unmount it first"));
        }
        let stepped = self.fs.step(path, step).map_err(|no| refusal(path, step, no))?;
        let told = self.kernel().invalidate(&stepped.invalidations);
        let synced = self.with_reserve(|| self.fs.sync().attempt(|| "sync the store"));
        let done = |error: Error| error.after(format!("{} was done", attempt(path, step)));
        synced.and(told).map_err(done)?;
        Ok(stepped)
    }

    /// Keeps the versions of files small. While files are being edited only what cannot wait is done, unless `at_once`.
    pub fn tend_versions(&self, at_once: bool) -> Tended {
        self.fs.tend_versions(at_once, &|| self.is_stopping())
    }

    /// Lists what a restore changed, and keeps in the edit history what it replaced, unless that is
    /// more than [`MOST_RESTORED`] files.
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
                if count > MOST_RESTORED {
                    kept = Vec::new();
                } else if let Some(content) = from.content(&change.old).ok().flatten() {
                    kept.push((change.old_path.as_ref().unwrap_or(&change.path).clone(), content));
                }
            }
            list(from, to, change)?;
        }
        self.fs.keep_restored(kept);
        Ok(())
    }
}

/// Whether a change replaced what stood at the path.
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

fn refusal(path: &TreePath, step: Step, no: NoStep) -> Error {
    let lists = format!("'jailfs history {path}' lists what there is");
    match (no, step) {
        (NoStep::Only(0), Step::Undo(_)) => {
            Error::new(Kind::NoStore, attempt(path, step), "there is no earlier version")
                .hint(lists)
        }
        (NoStep::Only(0), Step::Redo(_)) => Error::new(
            Kind::NoStore,
            attempt(path, step),
            "nothing was undone since it was last edited",
        )
        .hint(lists),
        (NoStep::Only(count), _) => Error::new(
            Kind::NoStore,
            attempt(path, step),
            format!("there are only {count} steps to go"),
        )
        .hint(lists),
        (NoStep::NotAFile(_), _) => Error::new(
            Kind::Failed,
            attempt(path, step),
            "what stands there now is not a regular file",
        )
        .hint("move it away first"),
        (NoStep::Failed(FsError::NotADirectory), _) => Error::new(
            Kind::Failed,
            attempt(path, step),
            "what stands above it now is not a directory",
        )
        .hint("move it away first"),
        (NoStep::Failed(error), _) => {
            match Err::<(), FsError>(error).attempt(|| attempt(path, step)) {
                Err(error) => error,
                Ok(()) => Error::damage(attempt(path, step), "no reason"),
            }
        }
    }
}
