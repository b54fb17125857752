//! Paths that a user typed.

use std::io;
use std::path::{Path, PathBuf};

/// Resolves a path that a user typed to an absolute path without symlinks (realpath(3)). Never use
/// it for a path from a base or a mount: it follows symlinks anywhere.
///
/// # Errors
/// Those of realpath(3).
#[expect(clippy::disallowed_methods, reason = "this is the one place for paths that a user typed")]
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    std::fs::canonicalize(path)
}
