//! Carries the edits of a merge over to a tree that programs changed after the merge was planned.
//!
//! That works if programs changed other nodes and names. A directory in which they made or removed
//! other names differs only in its times and link count, and those add up. A copy-up of a directory
//! leaves it where it is, so it counts as a move only if another name leads to it afterwards.

use std::collections::BTreeMap;

use crate::fs::State;
use crate::tree::{Body, Dentry, Edit, Meta, Node, TreeDiff};
use crate::types::{Ino, Name, TreePath};

/// The edits for `now`, given those for `planned`. None if the merge must be planned again.
pub(super) fn onto(planned: &State, now: &State, edits: &[Edit]) -> Option<Vec<Edit>> {
    let late = planned.tree.diff(&now.tree);
    if late.is_empty() {
        return Some(edits.to_vec());
    }
    // Two moves of directories that are harmless each could make a cycle together.
    let copied_up: BTreeMap<Ino, &TreePath> = edits.iter().filter_map(copied_up_dir).collect();
    let moves_dir = edits.iter().any(|edit| match edit {
        Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, .. }) } => {
            let lower = || copied_up.get(dir).copied().or_else(|| base_of(planned, *dir));
            is_dir(planned, *ino)
                || copied_up
                    .get(ino)
                    .is_some_and(|base| !shows_base(planned, (*dir, name), lower(), base))
        }
        _ => false,
    });
    let late_move = late.names.iter().any(|(dir, name)| match now.tree.dentry(*dir, name) {
        Some(Dentry::Child { ino, .. }) => {
            let lower = || base_of(now, *dir);
            is_dir(planned, *ino)
                || base_of(now, *ino)
                    .is_some_and(|base| !shows_base(planned, (*dir, name), lower(), base))
        }
        Some(Dentry::Whiteout(_)) | None => false,
    });
    if moves_dir && late_move {
        return None;
    }
    edits.iter().map(|edit| edit_onto(planned, now, &late, edit)).collect()
}

fn edit_onto(planned: &State, now: &State, late: &TreeDiff, edit: &Edit) -> Option<Edit> {
    let is_late = |ino: Ino| late.nodes.contains(&ino) || late.contents.contains(&ino);
    match edit {
        Edit::Put { ino, node } if is_late(*ino) => {
            let meta = dir_meta(planned, now, *ino, node.meta)?;
            Some(Edit::Put { ino: *ino, node: Box::new(Node { meta, ..Node::clone(node) }) })
        }
        Edit::Meta { ino, meta } if is_late(*ino) => {
            Some(Edit::Meta { ino: *ino, meta: dir_meta(planned, now, *ino, *meta)? })
        }
        Edit::Put { ino, .. }
        | Edit::Meta { ino, .. }
        | Edit::Xattr { ino, .. }
        | Edit::Resize { ino, .. }
        | Edit::Map { ino, .. }
        | Edit::Remove { ino } => (!is_late(*ino)).then(|| edit.clone()),
        Edit::Dentry { dir, name, to } => {
            let child = match to {
                Some(Dentry::Child { ino, .. }) => is_late(*ino) && !only_names(planned, now, *ino),
                Some(Dentry::Whiteout(_)) | None => false,
            };
            let dir_stays = !is_late(*dir) || is_dir(now, *dir);
            let is_other = !late.names.contains(&(*dir, name.clone()));
            (!child && dir_stays && is_other).then(|| edit.clone())
        }
    }
}

/// The directory that an edit copies up, and its path in the base.
fn copied_up_dir(edit: &Edit) -> Option<(Ino, &TreePath)> {
    match edit {
        Edit::Put { ino, node } => Some((*ino, base_path(node)?)),
        _ => None,
    }
}

/// The path in the base that a directory of the tree merges with.
fn base_of(state: &State, dir: Ino) -> Option<&TreePath> {
    base_path(state.tree.node(dir)?)
}

fn base_path(node: &Node) -> Option<&TreePath> {
    match &node.body {
        Body::Dir { base } => base.as_ref(),
        _ => None,
    }
}

/// Whether a name showed the directory `base` of the base before that was copied up. Its parent
/// merges with `lower`. Then the copy-up is no move.
fn shows_base(
    planned: &State,
    (dir, name): (Ino, &Name),
    lower: Option<&TreePath>,
    base: &TreePath,
) -> bool {
    planned.tree.dentry(dir, name).is_none() && lower.is_some_and(|dir| dir.join(name) == *base)
}

fn is_dir(state: &State, ino: Ino) -> bool {
    state.tree.node(ino).is_some_and(|node| matches!(node.body, Body::Dir { .. }))
}

/// Whether a node is a directory in both states, and only names in it changed.
fn only_names(planned: &State, now: &State, ino: Ino) -> bool {
    let (Some(was), Some(is)) = (planned.tree.node(ino), now.tree.node(ino)) else { return false };
    let Meta { nlink, atime, mtime, ctime, .. } = is.meta;
    is_dir(planned, ino)
        && was.body == is.body
        && was.xattrs == is.xattrs
        && Meta { nlink, atime, mtime, ctime, ..was.meta } == is.meta
}

/// The planned attributes of a directory with its late times and subdirectories. None for another
/// node, and for a directory of which more than that changed.
fn dir_meta(planned: &State, now: &State, ino: Ino, meta: Meta) -> Option<Meta> {
    if !only_names(planned, now, ino) {
        return None;
    }
    let (was, is) = (planned.tree.node(ino)?.meta, now.tree.node(ino)?.meta);
    let nlink = i64::from(meta.nlink) + i64::from(is.nlink) - i64::from(was.nlink);
    Some(Meta {
        nlink: u32::try_from(nlink).ok()?,
        atime: meta.atime.max(is.atime),
        mtime: meta.mtime.max(is.mtime),
        ctime: meta.ctime.max(is.ctime),
        ..meta
    })
}
