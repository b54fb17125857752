//! The content of a file as a list of extents: how to read, compare, count and copy it.

use std::sync::Arc;

use crate::fs::{Found, Fs, State};
use crate::store::edits_log::{Content, LoggedEdit};
use crate::tree::{Body, Edit, Node, Source, Tree};
use crate::types::{ByteRange, LayerId};

/// The least cost of an edit, in bytes. It bounds the number of edits.
const MIN_COST: u64 = 4096;
/// The cost of an extent, in bytes: its size in the log. It takes more in memory.
const EXTENT_COST: u64 = 32;

/// The content as a state with a single file, and the file in it.
pub(in crate::fs) fn state_of(fs: &Fs, content: &Content) -> (State, Found) {
    let current = fs.state().lower;
    let lower = if current.epoch() == content.epoch {
        current
    } else {
        Arc::new(current.in_epoch(content.epoch))
    };
    let mut tree = Tree::new();
    let ino = content.ino;
    let put = Edit::Put { ino, node: Box::new(content.node.clone()) };
    let maps = content.extents.iter().map(|(range, source)| Edit::Map {
        ino,
        range: *range,
        to: Some(*source),
    });
    for edit in std::iter::once(put).chain(maps) {
        if let Err(error) = tree.apply(&edit) {
            log::error!("the content of an edit does not fit into an empty tree: {}", error.0);
        }
    }
    (State { tree, lower }, Found::Upper(ino, None))
}

fn same_origin(a: &Node, b: &Node) -> bool {
    match (&a.body, &b.body) {
        (Body::File { origin: a, .. }, Body::File { origin: b, .. }) => a == b,
        _ => false,
    }
}

/// Whether two contents are equal by their records. Nothing is read.
pub(super) fn same_bytes(a: Option<&Arc<Content>>, b: Option<&Arc<Content>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => {
            let in_base =
                |content: &Content| content.extents.iter().any(|(_, source)| source.is_base());
            a.node.size() == b.node.size()
                && a.extents == b.extents
                && (a.epoch == b.epoch && same_origin(&a.node, &b.node) || !in_base(a))
        }
        (None, None) => true,
        _ => false,
    }
}

/// How many bytes of pools a content refers to.
pub(super) fn pool_bytes(content: &Content) -> u64 {
    content.extents.iter().filter(|(_, s)| !s.is_base()).map(|(range, _)| range.len()).sum()
}

/// The cost of an edit of which `own` bytes are not shared: these bytes and its extents.
pub(super) fn cost_with(content: &Content, own: u64) -> u64 {
    own.saturating_add(EXTENT_COST.saturating_mul(content.extents.len() as u64)).max(MIN_COST)
}

/// The cost of an edit if no other edit shares its bytes.
pub(super) fn cost_of(edit: &LoggedEdit) -> u64 {
    edit.content.as_ref().map_or(MIN_COST, |content| cost_with(content, pool_bytes(content)))
}

/// How many bytes of pools `old` refers to and `new` does not.
pub(super) fn unshared_bytes(old: &Content, new: Option<&Arc<Content>>) -> u64 {
    let mut shared: Vec<(LayerId, ByteRange)> =
        new.map_or_else(Vec::new, |new| in_pools(new).collect());
    shared.sort_unstable_by_key(|(layer, range)| (*layer, range.start));
    let own = in_pools(old).map(|(layer, range)| {
        let first = shared.partition_point(|(other, r)| (*other, r.end) <= (layer, range.start));
        let near = shared
            .iter()
            .skip(first)
            .take_while(|(other, r)| *other == layer && r.start < range.end);
        let common: u64 =
            near.map(|(_, r)| r.end.min(range.end).saturating_sub(r.start.max(range.start))).sum();
        range.len().saturating_sub(common)
    });
    own.sum()
}

fn in_pools(content: &Content) -> impl Iterator<Item = (LayerId, ByteRange)> {
    content.extents.iter().filter_map(|(range, source)| match source {
        Source::Pool { layer, offset } => Some((*layer, ByteRange::at(*offset, range.len()))),
        Source::Base { .. } => None,
    })
}

/// Appends an extent, merged with the last one if they are contiguous.
pub(super) fn push_extent(
    extents: &mut Vec<(ByteRange, Source)>,
    range: ByteRange,
    source: Source,
) {
    match extents.last_mut() {
        Some((last, from)) if last.end == range.start && from.advanced(last.len()) == source => {
            last.end = range.end;
        }
        _ => extents.push((range, source)),
    }
}
