//! Removes names: those that no archive has, and those that an opaque whiteout hides.

use super::builder::{Builder, Dir};
use crate::error::FsResult;

/// Removes all names that no archive has.
pub(super) fn unseen(builder: &mut Builder<'_>) -> FsResult<()> {
    let mut dirs: Vec<Dir> = vec![builder.state.root()];
    while let Some(dir) = dirs.pop() {
        for name in builder.state.merged_names(dir.0, dir.1.as_ref())?.into_keys() {
            let found = builder.find(&dir, &name)?;
            if !found.ino().is_some_and(|ino| builder.is_seen(ino)) {
                builder.detach(&dir, &name)?;
            } else if let Some(below) = builder.state.as_dir(&found) {
                dirs.push(below);
            }
        }
    }
    Ok(())
}

/// Removes the names below a directory that earlier archives made, or that were there before. A
/// directory that this archive has as well stays, without those names in it.
pub(super) fn opaque(builder: &mut Builder<'_>, dir: &Dir) -> FsResult<()> {
    let mut dirs = vec![dir.clone()];
    while let Some(dir) = dirs.pop() {
        for name in builder.state.merged_names(dir.0, dir.1.as_ref())?.into_keys() {
            let found = builder.find(&dir, &name)?;
            if !found.ino().is_some_and(|ino| builder.is_of_this_archive(ino)) {
                builder.detach(&dir, &name)?;
            } else if let Some(below) = builder.state.as_dir(&found) {
                dirs.push(below);
            }
        }
    }
    Ok(())
}
