//! Whether a base is the directory that its store was made for, and what is done if it is not.
//!
//! The numbers of nodes are those of the directory that they were first seen in. In another one, a copy for instance, the host gave
//! others: all that was known of numbers is forgotten, and the directories that some state covers are made known again by their paths, so
//! that a node of the base is found in them wherever they are shown; so are files that are met under names that nothing covers.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::base::Base;
use crate::error::{Error, FsError, Kind, Result};
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::PreHistory;
use crate::store::Store;
use crate::timeline::TreeCache;
use crate::tree::{Body, Tree};
use crate::types::{Epoch, FileKind, Ino, TreePath};

/// Whether a base is the directory that its store was made for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BaseIdentity {
    /// It is.
    Same,
    /// Another one took its place.
    Other,
    /// The store does not know, or the filesystem does not say.
    Unknown,
}

pub(super) fn recognise(store: &Store, base: &Base) -> BaseIdentity {
    match (store.identities().lock().mark(), base.mark()) {
        (Some(known), Some(mark)) if known == mark => BaseIdentity::Same,
        (Some(_), Some(_)) => BaseIdentity::Other,
        (None, _) | (_, None) => BaseIdentity::Unknown,
    }
}

/// Changes of one directory are not shown over another, nor written into it, unless somebody said so.
pub(super) fn refuse_other(store: &Store, base: &Base) -> Result<()> {
    if store.takes_other_base() {
        return Ok(());
    }
    let path = String::from_utf8_lossy(base.path()).into_owned();
    Err(Error::new(
        Kind::Conflict,
        format!("open base '{path}'"),
        "it is another directory than the one whose changes the store holds",
    )
    .hint(format!(
        "put that one back; or 'jailfs mount --other-base --store {} {path} MNT' shows the changes over this one; \
         or begin a new store: --store DIR",
        store.dir().path().display()
    )))
}

/// Records what the base is known by. `shown` is the state of the head.
pub(super) fn remember(
    (store, base): (&Arc<Store>, &Arc<Base>),
    recognised: BaseIdentity,
    roots: &mut TreeCache,
    shown: (&Tree, Epoch),
    applies: &PreHistory,
) -> Result<()> {
    let Some(mark) = base.mark() else { return Ok(()) };
    let during = |e: Error| e.during("remember the base");
    if recognised != BaseIdentity::Other {
        return store.identities().lock().set_mark(mark).map_err(during);
    }
    log::warn!(
        "the base is another directory than before: what older states show of it may not be what it was"
    );
    let mut known = Known::default();
    known.copied_up.extend(applies.iter().flat_map(|images| images.inos()));
    let lower = |epoch| Lower::new(Arc::clone(base), Arc::clone(store), epoch, applies.clone());
    // What the newest states say counts: the base may have been changed since the older ones.
    known.add(shown.0, &lower(shown.1));
    let mut states = store.catalog();
    states.retain(|info| info.seal.is_some() && info.header.kind.is_of_head());
    for info in states.into_iter().rev() {
        match roots.load(info.header.layer) {
            Ok(tree) => known.add(&tree, &lower(info.header.epoch)),
            Err(error) => {
                log::warn!("what layer {} covers is not recognised: {error}", info.header.layer)
            }
        }
    }
    store.begin_identities(mark, &known.nodes, known.copied_up).map_err(during)
}

/// What is known of numbers over another base.
#[derive(Default)]
struct Known {
    /// Where nodes that are covered, and are met under other names, are: device, and number in the host.
    nodes: BTreeMap<Ino, (u64, u64)>,
    hosts: HashSet<(u64, u64)>,
    looked_at: HashSet<(Ino, TreePath)>,
    /// All that is covered or kept: nothing in the base has such a number for its own.
    copied_up: BTreeSet<Ino>,
}

impl Known {
    fn add(&mut self, tree: &Tree, lower: &Lower) {
        for (ino, node) in tree.nodes().filter(|(ino, _)| *ino != Ino::ROOT) {
            self.copied_up.insert(ino);
            let path = match &node.body {
                Body::Dir { base: Some(path) } => path,
                // It has names that nothing covers.
                Body::File { origin: Some(origin), .. }
                    if tree.links(ino).count() < node.meta.nlink as usize =>
                {
                    &origin.path
                }
                Body::Dir { .. } | Body::File { .. } | Body::Symlink { .. } | Body::Special => {
                    continue;
                }
            };
            // What an apply touched since is looked for in what was kept of it.
            let is_kept = lower.left_since(path).is_some();
            if is_kept
                || self.nodes.contains_key(&ino)
                || !self.looked_at.insert((ino, path.clone()))
            {
                continue;
            }
            match lower.base().stat(path) {
                Ok(stat) => {
                    let is_it =
                        stat.kind == node.kind() && (stat.kind == FileKind::Dir || stat.nlink > 1);
                    if is_it && self.hosts.insert((stat.dev, stat.ino)) {
                        self.nodes.insert(ino, (stat.dev, stat.ino));
                    }
                }
                Err(FsError::NotFound | FsError::NotADirectory) => {}
                Err(error) => log::warn!("'{path}' of the base is not recognised: {error}"),
            }
        }
    }
}
