//! Whether a base is the directory that its store was made for, and what is done if it is not.
//!
//! The numbers of nodes are those of the directory that they were first seen in. In another one, a copy for instance, the host gave
//! others: all that was known of numbers is forgotten, and the directories that some state covers are made known again by their paths, so
//! that a node of the base is found in them wherever they are shown.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::Base;
use crate::error::{Attempt, Error, FsError, FsResult, Kind, Result};
use crate::fs::lower::{Lower, LowerNode, PreHistory};
use crate::history::Roots;
use crate::store::Store;
use crate::tree::{Body, Tree};
use crate::types::{Epoch, FileKind, Ino};

/// Whether a base is the directory that its store was made for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Recognised {
    /// It is.
    Same,
    /// Another one took its place.
    Other,
    /// The store does not know, or the filesystem does not say.
    Unknown,
}

pub(super) fn recognise(store: &Store, base: &Base) -> Recognised {
    match (store.identities().lock().mark(), base.mark()) {
        (Some(known), Some(mark)) if known == mark => Recognised::Same,
        (Some(_), Some(_)) => Recognised::Other,
        (None, _) | (_, None) => Recognised::Unknown,
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
    recognised: Recognised,
    roots: &mut Roots,
    shown: (&Tree, Epoch),
    applies: &PreHistory,
) -> Result<()> {
    let Some(mark) = base.mark() else { return Ok(()) };
    let during = |e: Error| e.during("remember the base");
    if recognised != Recognised::Other {
        return store.identities().lock().set_mark(mark).map_err(during);
    }
    log::warn!(
        "the base is another directory than before: what older states show of it may not be what it was"
    );
    let mut known = Known::default();
    let attempt = || "recognise the directories of the base";
    for info in
        store.catalog().into_iter().filter(|info| info.seal.is_some() && info.header.kind.is_of_head())
    {
        let tree = roots.load(info.header.layer)?;
        let epoch = info.header.epoch;
        let lower = Lower::new(Arc::clone(base), Arc::clone(store), epoch, applies.clone());
        known.add(&tree, &lower).attempt(attempt)?;
    }
    let lower = Lower::new(Arc::clone(base), Arc::clone(store), shown.1, applies.clone());
    known.add(shown.0, &lower).attempt(attempt)?;
    store.begin_identities(mark, &known.directories, known.covered).map_err(during)
}

/// What is known of numbers over another base.
#[derive(Default)]
struct Known {
    /// Where directories that are covered are: device, and number in the host.
    directories: BTreeMap<Ino, (u64, u64)>,
    /// All that is covered: nothing in the base has such a number for its own.
    covered: BTreeSet<Ino>,
}

impl Known {
    fn add(&mut self, tree: &Tree, lower: &Lower) -> FsResult<()> {
        for (ino, node) in tree.nodes().filter(|(ino, _)| *ino != Ino::ROOT) {
            self.covered.insert(ino);
            let Body::Dir { base: Some(path) } = &node.body else { continue };
            // A state has most in common with the one before it.
            if self.directories.contains_key(&ino) {
                continue;
            }
            match lower.lookup(path) {
                Ok(Some((_, LowerNode::Base(stat)))) if stat.kind == FileKind::Dir => {
                    self.directories.insert(ino, (stat.dev, stat.ino));
                }
                // It is not there, or what it was is kept; and what is closed to us is shown to nobody.
                Ok(_) | Err(FsError::AccessDenied) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
