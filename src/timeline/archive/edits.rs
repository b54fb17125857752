//! Describes the edit histories of a head, so that they can leave the store.
//!
//! The content of the base is described like any other, because another base may not have it.

use super::content::ToStream;
use super::describe::{attributes, cut};
use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{Fs, PathEdits};
use crate::store::archive::tree_blob::{Attributes, Event, TreeWriter};
use crate::store::archive::{ChunkSink, Flaw, edits};
use crate::store::edits_log::{Content, LoggedEdit};
use crate::types::TreePath;

/// Describes edit histories. The chunks of the content, and those of the description, go to `sink`.
/// Histories of hidden paths are left out. The caller holds [`Fs::read_guard`] since it got them.
///
/// # Errors
/// A file before an edit cannot be read, because the base changed; and those of the sink.
pub fn describe_edits(
    fs: &Fs,
    mut histories: Vec<PathEdits>,
    sink: &mut dyn ChunkSink,
) -> Result<edits::Edits> {
    let lower = fs.state().lower;
    histories.retain(|history| lower.check_not_hidden(&history.path).is_ok());
    let mut tree = TreeWriter::default();
    let (mut paths, mut files) = (Vec::new(), 0);
    tree.write(&Event::Dir { name: None, attributes: Attributes::default() }, sink)?;
    for PathEdits { path, next, undone_to, edits } in histories {
        let mut past = Vec::new();
        for (number, edit) in edits {
            let LoggedEdit { time, how, content } = edit;
            if let Some(content) = &content {
                file(fs, content, (&path, files), (&mut tree, &mut *sink)).map_err(|error| {
                    let hint = "push without --edits";
                    error.during(format!("describe '{path}' before edit {number}")).hint(hint)
                })?;
                files += 1;
            }
            let has_file = content.is_some();
            past.push(edits::PastEdit { number, time, kind: how.code(), has_file });
        }
        paths.push(edits::PathEdits { path, next, undone_to, edits: past });
    }
    tree.write(&Event::End, sink)?;
    Ok(edits::Edits { files: tree.finish(sink)?, paths })
}

/// Describes the file before an edit.
fn file(
    fs: &Fs,
    content: &Content,
    (path, number): (&TreePath, u64),
    (tree, sink): (&mut TreeWriter, &mut dyn ChunkSink),
) -> Result<()> {
    let (state, found) = fs.state_of_edit(content);
    let refused = |Flaw(why): Flaw| Error::new(Kind::Failed, "describe an edit", why);
    let name = edits::file_name(number).map_err(refused)?;
    let node = state.node(&found).attempt(|| "find the file")?;
    let size = content.node.size();
    tree.write(&Event::File { name, attributes: attributes(&found, &node), size }, sink)?;
    cut(&state, &found, size, path, &mut ToStream { tree, sink, noted: None })
}
