//! Answers requests about the edit history of single files: list, compare, undo and redo.

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{EditInfo, Found, State, Step};
use crate::sandbox::changes::Writer;
use crate::sandbox::diff::change_of;
use crate::sandbox::{Changes, Detail, EditKind, FileEdit, FileRev, Sandbox, Stepped};
use crate::store::edits_log::How;
use crate::timeline::diff::{PathChange, What, same_content};
use crate::types::TreePath;

impl Sandbox {
    /// The edits of a path, newest first.
    pub(super) fn edit_history(&self, path: &TreePath) -> Result<Vec<FileEdit>> {
        self.fs()
            .state()
            .lower
            .check_not_hidden(path)
            .attempt(|| format!("list the edits of '{path}'"))?;
        Ok(self.fs().history(path).into_iter().map(file_edit).collect())
    }

    /// Undoes or redoes edits of a path.
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

    /// Compares a file before an edit with the file as it is, before another edit, or with another
    /// file.
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
        let mut list = Writer::new(self.store_path());
        list.push(change_of(&old_state, &new_state, &change, detail).attempt(attempt)?)?;
        Ok(list.finish())
    }

    /// The state in which to read a file, and the file in it.
    fn file_state(&self, rev: &FileRev) -> Result<(State, Found)> {
        let attempt = || format!("find {rev}");
        let Some(number) = rev.edit else {
            self.timeline.flush()?;
            let state = self.fs().state();
            let found = state.resolve_visible(&rev.path).attempt(attempt)?;
            return Ok((state, found));
        };
        self.fs().state().lower.check_not_hidden(&rev.path).attempt(attempt)?;
        if let Some(before) = self.fs().before_edit(&rev.path, number) {
            return Ok(before);
        }
        // Before an edit there may have been no file.
        if self.fs().history(&rev.path).into_iter().any(|edit| edit.number == number) {
            return Ok((self.fs().state(), Found::Nothing(None)));
        }
        Err(Error::new(Kind::NoStore, attempt(), "there is no such edit")
            .hint(format!("'jailfs history {}' lists them", rev.path)))
    }
}

fn file_edit(info: EditInfo) -> FileEdit {
    FileEdit {
        number: info.number,
        time: info.time,
        kind: match info.how {
            How::Written => EditKind::Write,
            How::Truncated => EditKind::Truncate,
            How::Replaced => EditKind::Replace,
            How::Removed => EditKind::Remove,
            How::Moved => EditKind::Move,
            How::Restored => EditKind::Restore,
            How::Undone => EditKind::Undo,
        },
        size: info.file.map(|(size, _)| size),
        mode: info.file.map(|(_, meta)| meta.mode),
        mtime: info.file.map(|(_, meta)| meta.mtime),
        is_current: info.is_current,
    }
}
