//! Records what an apply, or a rollback, left in the base at each path that it touched.
//!
//! * The fingerprint of each file that was left shows the next apply whether another program
//!   changed it since.
//! * The inode number of each file that was left is the one that its node has in the tree, so that
//!   every node keeps its number when the head is rebased.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::{Base, BaseStat};
use crate::error::FsResult;
use crate::fs::merged::fingerprint::rounded;
use crate::fs::merged::pre_images::PreImages;
use crate::store::Store;
use crate::store::identities::Identities;
use crate::store::layer::Upper;
use crate::store::record::{Left, PreImage, PreNode, Record};
use crate::timeline::apply::plan::{NotKept, Plan};
use crate::timeline::apply::pre_images::{Images, collect};
use crate::timeline::apply::write::WriteOutcome;
use crate::tree::{Body, Node, Origin};
use crate::types::{FileKind, Fingerprint, Timestamp, TreePath};

/// Times that differ by less than this are not reported: some filesystems (VFAT) keep times to two
/// seconds.
const COARSEST_SECS: u64 = 2;

/// The fingerprint of a file of which nothing is known. No file has it.
const UNKNOWN: Fingerprint = Fingerprint {
    dev: 0,
    ino: 0,
    size: 0,
    mtime: Timestamp { secs: 0, nanos: 0 },
    ctime: Timestamp { secs: 0, nanos: 0 },
};

/// Records the fingerprint and the inode number of what stands at each path of `images` now.
/// `foreign` are paths that hold what another program put there. Returns the images as states of
/// earlier epochs read them from now on.
///
/// # Errors
/// Those of looking at the base and of writing the store.
pub(in crate::timeline) fn record(
    store: &Store,
    base: &Arc<Base>,
    layer: &mut Upper,
    mut images: Images,
    written: &WriteOutcome,
    foreign: &BTreeSet<TreePath>,
) -> FsResult<PreImages> {
    let mut ids = store.identities().lock();
    let lookup = base.lookup_paths();
    let now: Vec<Option<BaseStat>> =
        images.iter().map(|(path, _)| written.stat(&lookup, path)).collect::<FsResult<_>>()?;
    retire_removed(&mut ids, base, &images, &now)?;
    let mut left = Vec::new();
    for ((path, image), stat) in images.iter_mut().zip(now) {
        if let (Some(stat), Some(ino)) = (&stat, written.inos.get(path)) {
            ids.name(stat.dev, stat.ino, *ino)?;
        }
        // A node that another program put there is a conflict of the next apply.
        let is_known =
            !foreign.contains(path) || stat.as_ref().is_some_and(|s| s.kind == FileKind::Dir);
        let print = if is_known { stat.map(|s| s.fingerprint()) } else { Some(UNKNOWN) };
        let rounded = written.rounded.get(path).map(|(wanted, kept)| Some(rounded(*wanted, *kept)));
        for print in rounded.into_iter().chain([print]) {
            left.push((path.clone(), print));
            layer.record(&Record::Left(Left { path: path.clone(), print }))?;
        }
        if let Some(print) = print
            && let Some(image) = image
            && refer_to(image, path, print)
        {
            let node = Some(image.clone());
            layer.record(&Record::PreImage(PreImage { path: path.clone(), node }))?;
        }
    }
    Ok(collect(&images, &left))
}

/// Gives fresh inode numbers to the host inodes of removed files: the host may reuse such an inode
/// for another file, which must not be taken for the removed one.
fn retire_removed(
    ids: &mut Identities,
    base: &Arc<Base>,
    images: &Images,
    now: &[Option<BaseStat>],
) -> FsResult<()> {
    let (dev, _) = base.root_id();
    for ((_, image), stat) in images.iter().zip(now) {
        let Some(image) = image else { continue };
        let had_one_name = image.node.kind() == FileKind::Dir || image.node.meta.nlink <= 1;
        let is_removed = stat.as_ref().is_none_or(|stat| stat.ino != image.host);
        if is_removed && had_one_name && ids.of(dev, image.host)? == image.ino {
            let fresh = ids.fresh()?;
            ids.name(dev, image.host, fresh)?;
        }
    }
    Ok(())
}

/// Makes a pre-image whose bytes stayed in the base refer to them by the fingerprint that the file
/// has from now on. Returns whether it is such a pre-image.
fn refer_to(image: &mut PreNode, path: &TreePath, print: Fingerprint) -> bool {
    let PreNode { node: Node { body: Body::File { origin: Some(origin), .. }, .. }, .. } = image
    else {
        return false;
    };
    *origin = Arc::new(Origin { path: path.clone(), print });
    true
}

/// Removes from the outcome the inode numbers that two files of the base would share. An apply of
/// some paths can write a moved node to its new path, while the file that the node came from still
/// stands at its old path.
///
/// # Errors
/// Those of looking at the base.
pub(in crate::timeline) fn drop_shared_numbers(
    store: &Store,
    base: &Arc<Base>,
    plan: &Plan,
    mut written: WriteOutcome,
) -> FsResult<WriteOutcome> {
    let mut own = BTreeMap::new();
    let mut ids = store.identities().lock();
    let (inos, lookup) = (&written.inos, base.lookup_paths());
    for (path, ino) in inos {
        let mut has_number = |path: &TreePath| -> FsResult<bool> {
            match written.stat(&lookup, path)? {
                Some(stat) => Ok(ids.of(stat.dev, stat.ino)? == *ino),
                None => Ok(false),
            }
        };
        let origin = match plan.to.tree.node(*ino).map(|n| &n.body) {
            Some(Body::File { origin: Some(origin), .. }) => Some(&origin.path),
            Some(Body::Dir { base }) => base.as_ref(),
            _ => None,
        };
        let is_at_origin = match origin.filter(|origin| *origin != path) {
            None => false,
            Some(origin) => match inos.get(origin) {
                Some(now) => now == ino,
                None => has_number(origin)?,
            },
        };
        // A further link of the same file keeps the number.
        let is_same_file = has_number(path)?;
        if !is_at_origin || is_same_file {
            own.insert(path.clone(), *ino);
        }
    }
    written.inos = own;
    Ok(written)
}

/// Lists what the base did not keep of what was written.
pub(in crate::timeline) fn not_kept(written: &WriteOutcome) -> Vec<(TreePath, NotKept)> {
    let differs =
        |wanted: Timestamp, kept: Timestamp| wanted.secs.abs_diff(kept.secs) >= COARSEST_SECS;
    let times = written
        .rounded
        .iter()
        .filter(|(_, (wanted, kept))| differs(*wanted, *kept))
        .map(|(path, (wanted, kept))| (path, NotKept::Time { wanted: *wanted, kept: *kept }));
    let flags = written.lost_flags.iter().map(|(path, lost)| (path, NotKept::Flags(*lost)));
    times.chain(flags).map(|(path, what)| (path.clone(), what)).collect()
}
