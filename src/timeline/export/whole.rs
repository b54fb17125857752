//! A whole state: all paths in the order of their names, a directory before what is in it.

use std::io::Write;

use super::entry::Entries;
use crate::error::{Attempt, Result};
use crate::fs::State;
use crate::types::{Ino, Name, TreePath};

/// A directory that the walk is in.
struct Frame {
    path: TreePath,
    dir: Ino,
    lower: Option<TreePath>,
    names: std::vec::IntoIter<Name>,
}

impl Frame {
    fn of(state: &State, path: TreePath, (dir, lower): (Ino, Option<TreePath>)) -> Result<Frame> {
        let names = state.merged_names(dir, lower.as_ref());
        let names = names.attempt(|| format!("list '{path}'"))?;
        let names: Vec<Name> = names.into_keys().collect();
        Ok(Frame { path, dir, lower, names: names.into_iter() })
    }
}

/// Writes a state.
pub(super) fn write<W: Write>(out: &mut Entries<'_, W>) -> Result<()> {
    let state = out.state;
    let root = TreePath::root();
    out.node(&root, &state.resolve(&root).attempt(|| "look at the root")?)?;
    let mut frames = vec![Frame::of(state, root, state.root())?];
    while let Some(frame) = frames.last_mut() {
        let Some(name) = frame.names.next() else {
            frames.pop();
            continue;
        };
        let path = frame.path.join(&name);
        let found = state.find(frame.dir, frame.lower.as_ref(), &name);
        let found = found.attempt(|| format!("look at '{path}'"))?;
        if state.kind(&found).is_none() {
            continue;
        }
        out.node(&path, &found)?;
        if let Some(dir) = state.as_dir(&found) {
            frames.push(Frame::of(state, path, dir)?);
        }
    }
    Ok(())
}
