//! Records what the base has at each path that an apply will touch.
//!
//! * Content that the apply would remove is copied into the pool of the pre-image layer. Other
//!   content stays in the base, and its pre-image refers to it there.
//! * All names of one file share one copy, also those under which the file is left in place: it is
//!   the same file that is rewritten.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::error::FsResult;
use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::fs::merged::lower::LowerNode;
use crate::fs::merged::pre_images::PreImages;
use crate::fs::{Found, State};
use crate::store::layer::Upper;
use crate::store::record::{PreImage, PreNode, Record};
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Origin, Source};
use crate::types::{FileKind, Fingerprint, Ino, TreePath};

/// The node of the base at each touched path; none where it has nothing.
pub(in crate::timeline) type Images = Vec<(TreePath, Option<PreNode>)>;

/// Where the bytes of a touched file are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::timeline) enum Keep {
    /// The apply would destroy them, so they are copied.
    Copy,
    /// They stay in the base.
    InPlace,
}

/// The paths that an apply touches.
pub(in crate::timeline) type TouchedPaths = BTreeMap<TreePath, Keep>;

/// The changes in the form in which a [`crate::fs::merged::lower::Lower`] reads through them.
/// `left` is what the apply left at each path, once that is known.
pub(in crate::timeline) fn collect(
    images: &Images,
    left: &[(TreePath, Option<Fingerprint>)],
) -> PreImages {
    let mut all = PreImages::default();
    for (path, node) in images {
        all.insert(path, node.clone().map(Arc::new));
    }
    for (path, print) in left {
        all.set_left(path.clone(), *print);
    }
    all
}

/// Whether a change adds, removes or replaces the name itself, rather than attributes of its node.
pub(in crate::timeline) fn replaces_name(change: &PathChange) -> bool {
    !matches!(change.what, What::Attributes | What::DirTimes)
}

/// The paths that the changes touch: their own, and the directories in which names come and go.
pub(in crate::timeline) fn touched_paths(changes: &[PathChange]) -> TouchedPaths {
    let mut touched = BTreeMap::new();
    for change in changes {
        let keep = if replaces_name(change) { Keep::Copy } else { Keep::InPlace };
        if keep == Keep::Copy
            && let Some((dir, _)) = change.path.split()
        {
            touched.entry(dir).or_insert(Keep::InPlace);
        }
        touched.insert(change.path.clone(), keep);
    }
    touched
}

/// All names in the base of the changed files that have several.
pub(in crate::timeline) fn linked_names(
    from: &State,
    to: &State,
    changes: &[PathChange],
) -> FsResult<BTreeMap<TreePath, Ino>> {
    let with_links = |state: &State, found: &Found| {
        state.attr(found).filter(|a| a.kind != FileKind::Dir && a.meta.nlink > 1).map(|a| a.ino)
    };
    let wanted = changes
        .iter()
        .flat_map(|c| [with_links(from, &c.old), with_links(to, &c.new)])
        .flatten()
        .collect();
    from.lower.names_of(&wanted)
}

/// Whether a node belongs to another filesystem that is mounted over the base.
pub(in crate::timeline) fn is_mounted(found: &Found) -> bool {
    matches!(found, Found::Base(_, _, LowerNode::Base(stat)) if stat.foreign)
}

/// Appends the pre-images of the touched paths to `layer`, and their content to its pool.
///
/// # Errors
/// Those of reading the base and of writing the store.
pub(in crate::timeline) fn record(
    layer: &mut Upper,
    from: &State,
    touched: Vec<(&TreePath, Found, Keep)>,
) -> FsResult<Images> {
    let copied: HashSet<Ino> = touched
        .iter()
        .filter(|(.., keep)| *keep == Keep::Copy)
        .filter_map(|(_, found, _)| found.ino())
        .collect();
    let mut copies: HashMap<Ino, PreNode> = HashMap::new();
    let mut images = Images::new();
    for (path, found, keep) in touched {
        let node = match (&found, found.ino()) {
            (Found::Nothing(_), _) | (_, None) => None,
            (_, Some(ino)) => Some(match copies.get(&ino) {
                Some(copy) => copy.clone(),
                None if copied.contains(&ino) => {
                    let copy = image_of(layer, from, &found, ino, Keep::Copy)?;
                    copies.insert(ino, copy.clone());
                    copy
                }
                None => image_of(layer, from, &found, ino, keep)?,
            }),
        };
        layer.record(&Record::PreImage(PreImage { path: path.clone(), node: node.clone() }))?;
        images.push((path.clone(), node));
    }
    Ok(images)
}

fn image_of(
    layer: &mut Upper,
    from: &State,
    found: &Found,
    ino: Ino,
    keep: Keep,
) -> FsResult<PreNode> {
    let (node, extents) = from.record(found)?;
    let mut node = Arc::unwrap_or_clone(node);
    let host = match found {
        Found::Base(_, _, LowerNode::Base(stat)) => stat.ino,
        Found::Base(..) | Found::Upper(..) | Found::Nothing(_) => 0,
    };
    let Body::File { origin, .. } = &mut node.body else {
        return Ok(PreNode { ino, host, node, extents });
    };
    if keep == Keep::InPlace {
        // The apply may give the file other attributes and links, which changes its change time.
        if let Some(origin) = origin {
            let print = Fingerprint { ctime: ANY_TIMES, ..origin.print };
            *origin = Arc::new(Origin { path: origin.path.clone(), print });
        }
        return Ok(PreNode { ino, host, node, extents });
    }
    *origin = None;
    let mut copied = Vec::new();
    for range in from.data(found) {
        let range = range?;
        let bytes = from.read_range(found, range)?;
        if bytes.iter().any(|b| *b != 0) {
            let offset = layer.pool.allocate(ino, range, true);
            layer.pool.write(offset, &bytes)?;
            copied.push((range, Source::Pool { layer: layer.layer(), offset }));
        }
    }
    Ok(PreNode { ino, host, node, extents: copied })
}
