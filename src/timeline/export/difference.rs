//! The difference to an older state, as a layer.
//!
//! * All names of a file with hard links are in the layer if one of them is: programs that apply a
//!   layer look for the target of a link in the layer alone.
//! * A removed directory is one whiteout, and the names below it are not mentioned.

use std::io::Write;

use super::entry::Entries;
use crate::error::{Attempt, Result};
use crate::fs::State;
use crate::timeline::diff::{self, What};
use crate::types::{FileKind, TreePath};

/// The directories that were written last, from the root down. Paths come in the order of their
/// bytes, so a directory is complete when the first path outside of it comes. Only a name such as
/// `a.b` comes between `a` and `a/b`; then `a` is found among those that were written before it.
#[derive(Default)]
struct Above {
    written: Vec<TreePath>,
}

impl Above {
    /// Writes the directories above a path that the archive does not have yet.
    fn write<W: Write>(&mut self, out: &mut Entries<'_, W>, path: &TreePath) -> Result<()> {
        let mut missing = Vec::new();
        for dir in path.upwards().skip(1) {
            if self.written.contains(&dir) {
                break;
            }
            missing.push(dir);
        }
        for dir in missing.into_iter().rev() {
            let found = out.state.resolve(&dir).attempt(|| format!("look at '{dir}'"))?;
            out.node(&dir, &found)?;
            self.note(dir);
        }
        Ok(())
    }

    /// Notes a directory that was written.
    fn note(&mut self, dir: TreePath) {
        self.written.retain(|other| dir.starts_with(other) || begins_like(&dir, other));
        self.written.push(dir);
    }
}

/// Whether paths in `other` can still come after `dir`: the name of one is the beginning of that
/// of the other.
fn begins_like(dir: &TreePath, other: &TreePath) -> bool {
    dir.as_bytes().starts_with(other.as_bytes())
}

/// Writes the difference.
pub(super) fn write<W: Write>(
    out: &mut Entries<'_, W>,
    since: &State,
    since_base: bool,
) -> Result<()> {
    let attempt = || "compare the states";
    let state = out.state;
    let walk = diff::compare_paths(since, state).attempt(attempt)?;
    let walk = if since_base { walk.with_base() } else { walk };
    let mut above = Above::default();
    let mut gone: Option<TreePath> = None;
    for change in walk {
        let change = change.attempt(attempt)?;
        let path = change.path;
        if change.what == What::Deleted {
            if gone.as_ref().is_some_and(|dir| path.starts_with(dir)) || is_replaced(state, &path)?
            {
                continue;
            }
            above.write(out, &path)?;
            out.whiteout(&path)?;
            gone = Some(path);
            continue;
        }
        if above.written.contains(&path) {
            continue;
        }
        above.write(out, &path)?;
        out.node(&path, &change.new)?;
        if state.kind(&change.new) == Some(FileKind::Dir) {
            above.note(path);
        }
    }
    for (path, ino) in out.unfinished().attempt(attempt)? {
        let found = state.resolve(&path).attempt(attempt)?;
        if out.has_begun(ino) && found.ino() == Some(ino) {
            above.write(out, &path)?;
            out.node(&path, &found)?;
        }
    }
    Ok(())
}

/// Whether a path is below one that is no directory any more. The entry of that one replaces it.
fn is_replaced(state: &State, path: &TreePath) -> Result<bool> {
    let Some((dir, _)) = path.split() else { return Ok(false) };
    let found = state.resolve(&dir).attempt(|| format!("look at '{dir}'"))?;
    Ok(state.kind(&found) != Some(FileKind::Dir))
}
