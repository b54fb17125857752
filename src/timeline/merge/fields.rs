//! The changes of one head to a node, apart from its names.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::FsResult;
use crate::fs::{Found, State};
use crate::timeline::diff::same_content;
use crate::tree::Xattrs;
use crate::types::FileKind;

/// The parts of a node that differ between two states. Times are not among them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldDiff {
    /// The bytes of a file, the target of a symlink, the number of a device.
    pub content: bool,
    /// The permission bits.
    pub mode: bool,
    /// The user or the group.
    pub owner: bool,
    /// The names of extended attributes; ACLs are among them.
    pub xattrs: BTreeSet<Vec<u8>>,
}

impl FieldDiff {
    /// Compares two nodes of the same kind.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(super) fn between(
        (old_state, old): (&State, &Found),
        (new_state, new): (&State, &Found),
    ) -> FsResult<FieldDiff> {
        let (was, is) = (old_state.node(old)?, new_state.node(new)?);
        Ok(FieldDiff {
            // After an apply, a directory that a head made merges with one of the base.
            content: was.kind() != FileKind::Dir && !same_content(old_state, old, new_state, new)?,
            mode: was.meta.mode != is.meta.mode,
            owner: (was.meta.uid, was.meta.gid) != (is.meta.uid, is.meta.gid),
            xattrs: differing(&was.xattrs, &is.xattrs),
        })
    }

    /// Whether anything differs.
    pub fn is_edit(&self) -> bool {
        self.content || self.mode || self.owner || !self.xattrs.is_empty()
    }
}

/// The names of attributes with different values.
fn differing(a: &Xattrs, b: &Xattrs) -> BTreeSet<Vec<u8>> {
    if a == b {
        return BTreeSet::new();
    }
    let none = BTreeMap::new();
    let (a, b) = (a.as_deref().unwrap_or(&none), b.as_deref().unwrap_or(&none));
    a.keys().chain(b.keys()).filter(|name| a.get(*name) != b.get(*name)).cloned().collect()
}
