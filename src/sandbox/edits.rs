//! The history of single files: what they were, how that differs, and going back to it.

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{Found, State, Step, VersionInfo};
use crate::sandbox::{Changes, Detail, EditKind, FileRev, FileVersion, Stepped};
use crate::sandbox::{Sandbox, change_of};
use crate::store::edits_log::How;
use crate::timeline::diff::{PathChange, What, same_content};
use crate::types::TreePath;

impl Sandbox {
    /// The versions of a path, newest first.
    pub(super) fn file_history(&self, path: &TreePath) -> Result<Vec<FileVersion>> {
        self.fs()
            .state()
            .lower
            .check_not_hidden(path)
            .attempt(|| format!("list the versions of '{path}'"))?;
        Ok(self.fs().versions(path).into_iter().map(told).collect())
    }

    /// Goes back or forward by versions.
    pub(super) fn step(&self, path: &TreePath, step: Step) -> Result<Stepped> {
        self.fs().state().lower.check_not_hidden(path).attempt(|| format!("change '{path}'"))?;
        let stepped = self.timeline.step(path, step)?;
        Ok(Stepped {
            path: path.clone(),
            number: stepped.number,
            old_size: stepped.sizes.0,
            new_size: stepped.sizes.1,
        })
    }

    /// What differs between two versions of files, or between one and a file as it is.
    pub(super) fn file_diff(
        &self,
        from: &FileRev,
        to: &FileRev,
        detail: Detail,
    ) -> Result<Changes> {
        let ((old_state, old), (new_state, new)) = (self.file_state(from)?, self.file_state(to)?);
        let attempt = || format!("compare {from} with {to}");
        let what = match (old.ino(), new.ino()) {
            (None, None) => return Ok(Changes::default()),
            (None, Some(_)) => What::Added,
            (Some(_), None) => What::Deleted,
            (Some(_), Some(_)) => {
                let kind = |state: &State, found| state.attr(found).map(|attr| attr.kind);
                if kind(&old_state, &old) != kind(&new_state, &new) {
                    What::Type
                } else if same_content(&old_state, &old, &new_state, &new).attempt(attempt)? {
                    return Ok(Changes::default());
                } else {
                    What::Content
                }
            }
        };
        let old_path = (from.path != to.path).then(|| from.path.clone());
        let change = PathChange { path: to.path.clone(), old_path, what, old, new };
        let mut list = self.lister(detail).writer;
        list.push(change_of(&old_state, &new_state, &change, detail).attempt(attempt)?)?;
        Ok(list.finish())
    }

    fn file_state(&self, rev: &FileRev) -> Result<(State, Found)> {
        let attempt = || format!("find {rev}");
        let Some(number) = rev.version else {
            self.timeline.flush()?;
            let state = self.fs().state();
            let found = state.resolve_visible(&rev.path).attempt(attempt)?;
            return Ok((state, found));
        };
        self.fs().state().lower.check_not_hidden(&rev.path).attempt(attempt)?;
        if let Some(version) = self.fs().version(&rev.path, number) {
            return Ok(version);
        }
        let known =
            self.fs().versions(&rev.path).into_iter().any(|version| version.number == number);
        // A version of it is that there was no file.
        if known {
            return Ok((self.fs().state(), Found::Nothing(None)));
        }
        Err(Error::new(Kind::NoStore, attempt(), "there is no such version")
            .hint(format!("'jailfs history {}' lists them", rev.path)))
    }
}

fn told(version: VersionInfo) -> FileVersion {
    FileVersion {
        number: version.number,
        time: version.time,
        edit: match version.how {
            How::Written => EditKind::Write,
            How::Truncated => EditKind::Truncate,
            How::Replaced => EditKind::Replace,
            How::Removed => EditKind::Remove,
            How::Moved => EditKind::Move,
            How::Restored => EditKind::Restore,
            How::Undone => EditKind::Undo,
        },
        size: version.file.map(|(size, _)| size),
        mode: version.file.map(|(_, meta)| meta.mode),
        mtime: version.file.map(|(_, meta)| meta.mtime),
        shown: version.is_shown,
    }
}
