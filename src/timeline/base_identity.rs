//! Detects whether the base is the directory that the store was made for, and adopts another one if
//! the user allows that.
//!
//! The store identifies base nodes by the host's inode numbers. In another directory, such as a
//! copy of the base, those numbers mean nothing. So all recorded identities are dropped, and nodes
//! that were copied up are looked up again by path: directories, and files that still have hard
//! links in the base that were not copied up.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::base::Base;
use crate::error::{Error, FsError, Kind, Result};
use crate::fs::merged::lower::Lower;
use crate::fs::merged::pre_images::PreHistory;
use crate::store::Store;
use crate::store::layer::LayerInfo;
use crate::timeline::TreeCache;
use crate::tree::{Body, Tree};
use crate::types::{Epoch, FileKind, Ino, TreePath};

/// Whether a base is the directory that its store was made for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BaseIdentity {
    /// It is the same directory.
    Same,
    /// It is another directory.
    Other,
    /// The store has no mark of its base, or the host filesystem gives none.
    Unknown,
}

/// Compares the mark of the base with the one in the store.
pub(super) fn identify(store: &Store, base: &Base) -> BaseIdentity {
    match (store.identities().lock().mark(), base.mark()) {
        (Some(known), Some(mark)) if known == mark => BaseIdentity::Same,
        (Some(_), Some(_)) => BaseIdentity::Other,
        (None, _) | (_, None) => BaseIdentity::Unknown,
    }
}

/// Fails unless the user allowed another base (`--other-base`): the changes of one directory must
/// not be shown over, or applied to, another one by accident.
pub(super) fn refuse_other(store: &Store, base: &Base) -> Result<()> {
    if store.takes_other_base() {
        return Ok(());
    }
    let path = String::from_utf8_lossy(base.path()).into_owned();
    Err(Error::new(
        Kind::Conflict,
        format!("open base '{path}'"),
        "the store holds the changes of another directory",
    )
    .hint(format!(
        "put that one back; or 'jailfs mount --other-base --store {} {path} MNT' shows the changes \
         over this one; or begin a new store: --store DIR",
        store.dir().path().display()
    )))
}

/// Records the mark of the base. If the base is another directory, also looks up the nodes that
/// were copied up. `shown` are the present states of the heads.
pub(super) fn record_base(
    (store, base): (&Arc<Store>, &Arc<Base>),
    recognised: BaseIdentity,
    trees: &mut TreeCache,
    shown: &[(Tree, Epoch)],
    applies: &PreHistory,
) -> Result<()> {
    let Some(mark) = base.mark() else { return Ok(()) };
    let during = |e: Error| e.during("record the base");
    if recognised != BaseIdentity::Other {
        return store.identities().lock().set_mark(mark).map_err(during);
    }
    log::warn!(
        "the base is another directory than before: older states may show other content of it"
    );
    let mut known = KnownNodes::default();
    known.copied_up.extend(applies.iter().flat_map(|images| images.inos()));
    let lower = |epoch| Lower::new(Arc::clone(base), Arc::clone(store), epoch, applies.clone());
    // The newest states come first and win: the base may have changed since the older ones.
    shown.iter().for_each(|(tree, epoch)| known.add(tree, &lower(*epoch)));
    let states = store.layers_where(LayerInfo::is_sealed_state);
    for info in states.into_iter().rev() {
        match trees.load(info.header.layer) {
            Ok(tree) => known.add(&tree, &lower(info.header.epoch)),
            Err(error) => {
                let layer = info.header.layer;
                log::warn!("the nodes of layer {layer} are not found in the new base: {error}")
            }
        }
    }
    store.begin_identities(mark, &known.nodes, known.copied_up).map_err(during)
}

/// The nodes of some states, looked up in another base.
#[derive(Default)]
struct KnownNodes {
    /// The host's device and inode number of the nodes that were found.
    nodes: BTreeMap<Ino, (u64, u64)>,
    /// The values of `nodes`: no two nodes are found in one place.
    hosts: HashSet<(u64, u64)>,
    looked_at: HashSet<(Ino, TreePath)>,
    /// All nodes that were copied up or that a pre-image holds. No other base node may get one of
    /// these numbers.
    copied_up: BTreeSet<Ino>,
}

impl KnownNodes {
    fn add(&mut self, tree: &Tree, lower: &Lower) {
        for (ino, node) in tree.nodes().filter(|(ino, _)| *ino != Ino::ROOT) {
            self.copied_up.insert(ino);
            let path = match &node.body {
                Body::Dir { base: Some(path) } => path,
                // It has hard links in the base that were not copied up.
                Body::File { origin: Some(origin), .. }
                    if tree.links(ino).count() < node.meta.nlink as usize =>
                {
                    &origin.path
                }
                Body::Dir { .. } | Body::File { .. } | Body::Symlink { .. } | Body::Special => {
                    continue;
                }
            };
            // A path that a later apply changed is answered by the pre-images, not by the base.
            let is_in_pre_image = lower.left_since(path).is_some();
            if is_in_pre_image
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
                Err(error) => log::warn!("'{path}' is not found in the new base: {error}"),
            }
        }
    }
}
