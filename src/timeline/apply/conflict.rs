//! Where the base is not as the tree knows it: somebody changed it behind our back.
//!
//! What the tree covers of the base, it covers with a print of what was there. A name that it never looked at has none; then the
//! change time must not be later than the first look at the base in this epoch. That is known by the layers that were begun in it:
//! when gc puts one in the place of those below it, it takes over when they were begun.

use crate::base::BaseStat;
use crate::error::{Attempt, FsResult, Result};
use crate::fs::State;
use crate::store::record::LayerKind;
use crate::timeline::Timeline;
use crate::timeline::apply::found;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Dentry};
use crate::types::{Epoch, FileKind, Fingerprint, Timestamp, TreePath};

impl Timeline {
    /// Paths that an apply would write, at which the base is not as the tree knows it, and why.
    pub(in crate::timeline) fn conflicts(
        &self,
        to: &State,
        changes: &[PathChange],
    ) -> FsResult<Vec<(TreePath, String)>> {
        let since = self.epoch_began(to.lower.epoch());
        let mut conflicts = Vec::new();
        for change in changes {
            let why = self.conflict_at(to, &change.path, change.what == What::Deleted, since)?;
            conflicts.extend(why.map(|why| (change.path.clone(), why.to_owned())));
        }
        Ok(conflicts)
    }

    /// Paths at which the tree covers or hides something of the base that is not there any more as it was, and why; so many at most.
    ///
    /// # Errors
    /// What the base answers.
    pub fn changed_in_base(&self, most: usize) -> Result<Vec<(TreePath, String)>> {
        let state = self.fs().state();
        let since = self.epoch_began(state.lower.epoch());
        let mut found = Vec::new();
        for (dir, node) in state.tree.nodes() {
            let Body::Dir { base: Some(base) } = &node.body else { continue };
            for (name, _) in state.tree.dentries(dir) {
                let path = base.join(name);
                let why = self
                    .conflict_at(&state, &path, false, since)
                    .attempt(|| format!("look at '{path}' in the base"))?;
                found.extend(why.map(|why| (path, why.to_owned())));
                if found.len() >= most {
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }

    /// Why the base is not as the tree knows it at a path; none if it is.
    fn conflict_at(
        &self,
        to: &State,
        path: &TreePath,
        is_to_go: bool,
        since: Timestamp,
    ) -> FsResult<Option<&'static str>> {
        if to.lower.is_half_applied(path) {
            return Ok(None);
        }
        let there = found(self.base().stat(path))?;
        let is_dir = |stat: &BaseStat| stat.kind == FileKind::Dir;
        Ok(match (expectation(to, path)?, &there) {
            (Expected::Nothing | Expected::Unknown, None) => None,
            (Expected::Nothing, Some(_)) => Some("somebody else made it in the base"),
            (Expected::Print(_), None) => Some("somebody else removed it from the base"),
            // Names in a directory come and go; it is enough that it is the same one, unless it is to go.
            (Expected::Print(print), Some(stat)) if is_dir(stat) && !is_to_go => {
                let is_same = print.ino == stat.ino || !self.base().has_stable_inodes();
                (!is_same).then_some("somebody else replaced it in the base")
            }
            (Expected::Print(print), Some(stat)) => (!to.lower.is_as(&print, &stat.fingerprint()))
                .then_some("somebody else changed it in the base"),
            (Expected::Unknown, Some(stat)) => (!is_dir(stat) && stat.ctime > since)
                .then_some("somebody else changed it in the base"),
        })
    }

    /// When the base came to be as an epoch shows it. Later applies do not count, although they changed the base: what they
    /// touched is known by what they left there, and at all other paths it was somebody else.
    fn epoch_began(&self, epoch: Epoch) -> Timestamp {
        let mut all = self.store().catalog();
        all.retain(|layer| layer.header.epoch == epoch);
        let (applies, begun): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|layer| layer.header.kind == LayerKind::PreImage);
        // Of the apply that began it; a clock that was set back does not make it earlier.
        let applied =
            applies.into_iter().filter_map(|layer| layer.seal).map(|seal| seal.time).max();
        let first = begun.into_iter().map(|layer| layer.header.time).min();
        applied.into_iter().chain(first).max().unwrap_or_default()
    }
}

/// What the tree expects of the base at a path.
enum Expected {
    /// No such name.
    Nothing,
    /// A node that looks like this.
    Print(Fingerprint),
    /// The tree never looked at it.
    Unknown,
}

fn expectation(to: &State, path: &TreePath) -> FsResult<Expected> {
    if let Some(left) = to.lower.left_since(path) {
        return Ok(left.map_or(Expected::Nothing, Expected::Print));
    }
    let Some((dir, name)) = path.split() else { return Ok(Expected::Unknown) };
    // Names are hidden in the directory that covers the directory of the base, wherever it stands in the tree now.
    let Some((ino, _)) = to.lower.lookup(&dir)? else { return Ok(Expected::Nothing) };
    let covers = matches!(to.tree.node(ino).map(|n| &n.body), Some(Body::Dir { base: Some(base) }) if *base == dir);
    Ok(match to.tree.dentry(ino, &name).filter(|_| covers) {
        Some(Dentry::Child { hides: Some(print), .. } | Dentry::Whiteout(print)) => {
            Expected::Print(**print)
        }
        Some(Dentry::Child { hides: None, .. }) => Expected::Nothing,
        None => Expected::Unknown,
    })
}
