//! Writes states as tar archives.
//!
//! * The same state gives the same bytes: names are sorted, and no access or change time, no inode
//!   number and no place of the content is written. Which parts of a file are holes depends on its
//!   bytes alone.
//! * A directory stands before the names in it, and a file before the further hard links to it.
//! * Memory grows with the directories from the root to where the walk stands, and with the files
//!   that have further hard links, and not with the content.
//! * The difference to an older state is an OCI layer: removed names are whiteouts, and each
//!   directory above a change stands before it, so that it keeps its attributes.

mod content;
mod difference;
mod entry;
mod whole;

use std::io::Write;

use crate::error::Result;
use crate::fs::State;
use crate::types::TreePath;

/// The beginning of the names of whiteouts.
pub(in crate::timeline) const WHITEOUT: &[u8] = b".wh.";

/// The state to export, and the older one if only the difference is wanted.
pub struct Exported<'a> {
    /// The state.
    pub state: &'a State,
    /// The older state.
    pub since: Option<&'a State>,
    /// Whether the older state is the base as it is now.
    pub since_base: bool,
    /// Whether the archive becomes a layer, so that the names of whiteouts have a meaning.
    pub is_layer: bool,
}

/// The result of an export.
#[derive(Default)]
pub struct ExportOutcome {
    /// The number of entries.
    pub entries: u64,
    /// Bytes of content, without holes.
    pub bytes: u64,
    /// Sockets, which no archive can hold; at most 20.
    pub skipped: Vec<TreePath>,
    /// The number of all of them.
    pub skipped_count: u64,
}

/// Writes an archive to `to`. Ends with an error when `go` becomes false.
///
/// # Errors
/// Those of writing, and of reading the state. They name the path.
pub fn export(what: &Exported<'_>, to: impl Write, go: &dyn Fn() -> bool) -> Result<ExportOutcome> {
    let mut out = entry::Entries::new(what.state, to, go);
    out.refuse_whiteouts(what.is_layer || what.since.is_some());
    match what.since {
        None => whole::write(&mut out)?,
        Some(since) => difference::write(&mut out, since, what.since_base)?,
    }
    out.finish()
}
