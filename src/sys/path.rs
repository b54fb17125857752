//! Paths that a person typed.

use std::io;
use std::path::{Path, PathBuf};

/// Resolves what a person typed to an absolute path without links (realpath(3)). Never for a path that came out of
/// a base or a mount: it follows links wherever they lead.
///
/// # Errors
/// Those of realpath(3).
#[expect(clippy::disallowed_methods, reason = "this is the one place for paths that a person typed")]
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    std::fs::canonicalize(path)
}
