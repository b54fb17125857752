//! Merges another head into ours, three-way: what each head changed since their merge base is in
//! the result.
//!
//! * Names and records merge apart: rename here and edit there give a renamed, edited file. Nodes
//!   are followed by inode number.
//! * A path that both heads changed differently is a conflict, and then nothing is changed, unless
//!   the caller decides it, or wants markers: then a text gets both sides, and of anything else our
//!   side stays and [`beside`] it is the other one.
//! * Equal changes never conflict: bytes are compared where records differ.
//! * A merge with an unchanged head gives the other one.
//!
//! [`three`] tells what the heads changed, [`names`] and [`nodes`] decide, [`install`] makes the
//! edits. The cost is that of the changes of the heads.

mod beside;
mod conflict;
mod content;
mod fields;
mod glob;
mod install;
mod late;
mod lines;
mod names;
mod nodes;
mod perform;
mod rules;
mod scope;
#[cfg(test)]
mod tests;
mod three;
mod view;

use std::collections::BTreeMap;

use crate::error::{FsError, FsResult};
use crate::fs::State;
use crate::store::content::pool::PoolWriter;
use crate::tree::{Edit, Misfit};
use crate::types::{FileKind, TreePath};

use beside::Kept;
pub use conflict::{Conflict, Did};
pub use fields::FieldDiff;
pub use glob::Glob;
use install::NameChange;
use names::Names;
use nodes::{MergedNode, Nodes};
pub use perform::MergeOutcome;
pub use rules::Rules;
use scope::Scope;
use three::{Side, Three};
use view::Places;

/// The changes that a merge will make.
pub(in crate::timeline) struct Plan<'a> {
    three: &'a Three<'a>,
    names: Vec<NameChange>,
    nodes: Vec<MergedNode>,
    /// The paths that neither head wins, sorted. With any of them, the plan must not be carried
    /// out.
    conflicts: Vec<Conflict>,
    /// The files with markers.
    marked: Vec<TreePath>,
    /// The conflicts in which our side is kept, and the other side is put beside it.
    kept: Vec<Kept>,
    /// The name of the other head, for what is put beside.
    label: &'a str,
}

/// Computes what a merge does, and passes it to `then`.
///
/// # Errors
/// Those of reading the base, and of `then`.
pub(in crate::timeline) fn with_plan<T>(
    (base, ours, theirs): (&State, &State, &State),
    rules: &Rules,
    then: impl FnOnce(&Plan<'_>) -> FsResult<T>,
) -> FsResult<T> {
    let places = Places::default();
    let three = Three::new(&places, base, ours, theirs)?;
    let scope = Scope::of(&three, rules)?;
    let mut nodes = Nodes::merge(&three, rules, &scope.nodes)?;
    let names = Names::merge(&three, rules, scope.names)?;
    let mut conflicts: BTreeMap<TreePath, Conflict> = names.conflicts.clone();
    nodes.drop_others(|ino| names.has_name(ino))?;
    let of_nodes = nodes.conflicts.into_iter().map(|(_, conflict)| conflict);
    for conflict in of_nodes.chain(scope.conflicts) {
        conflicts.entry(conflict.path.clone()).or_insert(conflict);
    }
    let kept_nodes = nodes.kept.into_iter().map(|(_, kept)| kept);
    let kept = names.kept.iter().cloned().chain(kept_nodes).chain(scope.kept).collect();
    then(&Plan {
        three: &three,
        names: names.changes(),
        nodes: nodes.merged,
        conflicts: conflicts.into_values().collect(),
        marked: nodes.unresolved.into_iter().map(|(_, path)| path).collect(),
        kept,
        label: rules.markers.as_ref().map_or("", |(_, theirs)| theirs),
    })
}

/// Whether a file still has conflict markers. False for a path that is no file, and for a file that
/// is too large to have been merged by lines.
///
/// # Errors
/// Those of reading the file.
pub(in crate::timeline) fn has_markers(state: &State, path: &TreePath) -> FsResult<bool> {
    let found = state.resolve(path)?;
    match state.kind_and_size(&found) {
        Some((FileKind::File, size)) if size <= lines::LARGEST && !state.is_hidden(&found) => {
            Ok(lines::has_markers(&state.read_all(&found)?))
        }
        _ => Ok(false),
    }
}

impl Plan<'_> {
    pub(in crate::timeline) fn conflicts(&self) -> &[Conflict] {
        &self.conflicts
    }

    /// The files with markers.
    pub(in crate::timeline) fn marked(&self) -> &[TreePath] {
        &self.marked
    }

    /// The edits that turn our head into the merged tree, and the paths at which they put the other
    /// side of a conflict beside ours. Merged bytes are written to `pool`.
    ///
    /// # Errors
    /// Those of reading the base and of writing the pool.
    pub(in crate::timeline) fn edits(
        &self,
        pool: &mut PoolWriter,
    ) -> FsResult<(Vec<Edit>, Vec<TreePath>)> {
        let mut edits = install::edits(self.three, &self.names, &self.nodes, pool)?;
        let mut merged = self.three.head(Side::Ours).state().clone();
        for edit in &edits {
            merged.tree.apply(edit).map_err(|Misfit(what)| FsError::Damage(what))?;
        }
        let kept = (self.kept.as_slice(), self.label);
        let (copies, paths) = beside::copies(self.three, kept, merged, pool)?;
        edits.extend(copies);
        Ok((edits, paths))
    }
}
