//! Compares the base in the epochs of two states: which paths an apply touched in between, and what
//! a restore can therefore not take over by reference.

use std::collections::{BTreeSet, HashSet};

use crate::error::FsResult;
use crate::fs::{Found, State};
use crate::timeline::diff::PathChange;
use crate::tree::{Body, Source};
use crate::types::{Epoch, Ino, TreePath};

/// The paths of the base that can differ between the epochs of two states.
pub(in crate::timeline) struct EpochDiff {
    /// Whether both states lie over the same epoch, so that no path differs.
    pub(super) is_same_epoch: bool,
    touched: BTreeSet<TreePath>,
}

impl EpochDiff {
    pub(in crate::timeline) fn between(now: &State, then: &State) -> EpochDiff {
        let is_same_epoch = now.lower.epoch() == then.lower.epoch();
        let mut touched = BTreeSet::new();
        if !is_same_epoch {
            touched.extend(now.lower.touched_since());
            touched.extend(then.lower.touched_since());
        }
        EpochDiff { is_same_epoch, touched }
    }

    /// Whether a path of the base is the same in both epochs.
    pub(super) fn is_same(&self, path: &TreePath) -> bool {
        self.is_same_epoch || !self.touched.contains(path)
    }

    /// The changed nodes that the present base may have at paths that no record names. If an apply
    /// came between the states, `then` may not have seen the node in the base at all. And the
    /// record of a node without content does not say where it was.
    pub(in crate::timeline) fn without_known_path(
        &self,
        now: &State,
        then: &State,
        changes: &[PathChange],
    ) -> HashSet<Ino> {
        let has_no_path = |ino: Ino| {
            then.tree.node(ino).is_some_and(|node| match &node.body {
                Body::File { origin, .. } => origin.is_none(),
                Body::Symlink { .. } | Body::Special => true,
                Body::Dir { base } => base.is_none(),
            })
        };
        // A number that jailfs gave to a new node is in the base only if an apply wrote the node.
        let may_be_in_base = |ino: Ino| ino < Ino::OWN_RANGE || now.lower.epoch() > Epoch(0);
        let is_without_path = |ino: Ino| {
            now.tree.node(ino).is_none()
                && may_be_in_base(ino)
                && (!self.is_same_epoch || has_no_path(ino))
        };
        changes
            .iter()
            .filter_map(|change| change.new.ino())
            .filter(|ino| is_without_path(*ino))
            .collect()
    }

    /// The size of a file of `then` whose content must be copied, because the present base does not
    /// have it. None if the content can be referred to.
    pub(super) fn needs_copy(&self, then: &State, found: &Found) -> FsResult<Option<u64>> {
        if self.is_same_epoch || found.ino().is_none() {
            return Ok(None);
        }
        let (node, extents) = then.record(found)?;
        let Body::File { size, origin } = &node.body else { return Ok(None) };
        let in_base = extents.iter().any(|(_, source)| matches!(source, Source::Base { .. }));
        let is_same =
            origin.as_ref().is_some_and(|o| self.is_same(&o.path)) && node.meta.nlink == 1;
        Ok((in_base && !is_same).then_some(*size))
    }
}
