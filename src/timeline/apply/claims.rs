//! Tells what an apply wrote into the base from what another program wrote there.
//!
//! Before each change of the base, an apply appends to its journal the fingerprint that the path is
//! about to get: a *claim*. A node of the base that fits neither its pre-image nor a claim was
//! written by another program, and a rollback must not touch it.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::{Base, BaseStat};
use crate::error::{FsResult, Result, if_exists};
use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::store::io::writer::Writer;
use crate::store::layer::{LayerContents, Upper};
use crate::store::record::{Left, PreNode, Record};
use crate::sys::clock;
use crate::timeline::apply::pre_images::Images;
use crate::timeline::apply::staging::Stages;
use crate::types::{FileKind, Fingerprint, Timestamp, TreePath};

/// The fingerprints that an apply said it would put into the base.
#[derive(Default)]
pub(in crate::timeline) struct Claims {
    /// By host inode, because a file can stand at several paths of the apply.
    prints: BTreeMap<u64, Vec<Fingerprint>>,
    /// Set after a power cut, which may have destroyed the last claims: nodes that were changed
    /// before this time are taken for the apply's.
    lost_before: Option<Timestamp>,
}

/// The paths of an apply that need care in its rollback.
#[derive(Default)]
pub(in crate::timeline) struct DoubtfulPaths {
    /// Another program wrote what stands there.
    pub(in crate::timeline) foreign: BTreeSet<TreePath>,
    /// A power cut destroyed the claim, so it is not known whether the apply wrote what stands
    /// there.
    pub(in crate::timeline) lost: BTreeSet<TreePath>,
}

/// The program that made a node of the base.
#[derive(PartialEq, Eq)]
enum Provenance {
    /// It is the pre-image, or the apply wrote it.
    Known,
    /// A power cut destroyed the claims. It is treated as the apply's.
    Lost,
    /// Another program wrote it.
    Foreign,
}

impl Claims {
    /// The claims in the journal of an interrupted apply.
    pub(in crate::timeline) fn of(contents: &LayerContents, writer: Writer) -> Result<Claims> {
        let mut claims = Claims::default();
        for record in contents.records().chain(contents.unsynced.iter().cloned().map(Ok)) {
            match record? {
                Record::Left(Left { print: Some(print), .. }) => claims.note(print),
                // If the machine did not reboot and only the filesystem was remounted, the time of
                // the loss is not known. Then a doubtful path is left as it is.
                Record::Opened { writer: then } if !then.is_of_same_boot(writer) => {
                    claims.lost_before = Some(clock::booted());
                }
                _ => {}
            }
        }
        Ok(claims)
    }

    fn note(&mut self, print: Fingerprint) {
        self.prints.entry(print.ino).or_default().push(print);
    }

    /// Appends to the journal of an apply the fingerprint that a path is about to get.
    ///
    /// # Errors
    /// Those of writing the store.
    pub(in crate::timeline) fn claim(
        &mut self,
        layer: &mut Upper,
        path: &TreePath,
        print: Fingerprint,
    ) -> FsResult<()> {
        // A rollback that is retried again and again must not make the journal grow.
        if self.prints.get(&print.ino).and_then(|prints| prints.last()) == Some(&print) {
            return Ok(());
        }
        layer.record(&Record::Left(Left { path: path.clone(), print: Some(print) }))?;
        self.note(print);
        Ok(())
    }

    /// Claims what stands at a path whose claim a power cut destroyed, and returns the doubtful
    /// paths. With the new claims they are recognised again if this rollback is interrupted after
    /// it changed their times. Staged content is not looked at: it is removed, whatever it is by
    /// now.
    ///
    /// # Errors
    /// Those of looking at the base and of writing the store.
    pub(in crate::timeline) fn renew_lost(
        &mut self,
        layer: &mut Upper,
        base: &Base,
        images: &Images,
        stages: &Stages,
    ) -> FsResult<DoubtfulPaths> {
        let mut doubtful = DoubtfulPaths::default();
        let stat =
            |path: &TreePath| if stages.has(path) { Ok(None) } else { if_exists(base.stat(path)) };
        for (path, image, now) in standing(base, images, stat)? {
            match self.provenance(image, &now) {
                Provenance::Known => {}
                Provenance::Lost => {
                    doubtful.lost.insert(path.clone());
                    self.claim(layer, path, now.fingerprint())?;
                }
                Provenance::Foreign => {
                    doubtful.foreign.insert(path.clone());
                }
            }
        }
        Ok(doubtful)
    }

    /// The paths at which another program wrote what stands there, by `stat`.
    ///
    /// # Errors
    /// Those of `stat`.
    pub(in crate::timeline) fn foreign_paths(
        &self,
        base: &Base,
        images: &Images,
        stat: impl Fn(&TreePath) -> FsResult<Option<BaseStat>>,
    ) -> FsResult<BTreeSet<TreePath>> {
        let foreign = standing(base, images, stat)?
            .into_iter()
            .filter(|(_, image, now)| self.provenance(*image, now) == Provenance::Foreign);
        Ok(foreign.map(|(path, ..)| path.clone()).collect())
    }

    fn provenance(&self, image: Option<&PreNode>, now: &BaseStat) -> Provenance {
        // A directory is judged by what is in it: a directory that is not empty cannot be removed.
        if now.kind == FileKind::Dir {
            return Provenance::Known;
        }
        // The times of a fifo or a device change when a program uses it.
        let has_content = matches!(now.kind, FileKind::File | FileKind::Symlink);
        let same_content = |size, mtime| !has_content || (size, mtime) == (now.size, now.mtime);
        let is_image = image.is_some_and(|image| {
            let is_node = image.host == now.ino && image.node.kind() == now.kind;
            is_node && same_content(image.node.size(), image.node.meta.mtime)
        });
        let claimed = self.prints.get(&now.ino).map_or(&[][..], Vec::as_slice);
        // The apply was interrupted while it rewrote the file in place.
        let is_half_written = claimed
            .last()
            .is_some_and(|print| print.ctime == ANY_TIMES && [0, print.size].contains(&now.size));
        let is_claimed =
            is_half_written || claimed.iter().any(|print| same_content(print.size, print.mtime));
        if is_image || is_claimed {
            Provenance::Known
        } else if self.lost_before.is_some_and(|boot| now.ctime < boot) {
            Provenance::Lost
        } else {
            Provenance::Foreign
        }
    }
}

/// All that stands at the paths of an apply, with the pre-images. Empty if the filesystem of the
/// base does not keep inode numbers, because files cannot be told apart then.
fn standing<'i>(
    base: &Base,
    images: &'i Images,
    stat: impl Fn(&TreePath) -> FsResult<Option<BaseStat>>,
) -> FsResult<Vec<(&'i TreePath, Option<&'i PreNode>, BaseStat)>> {
    let mut standing = Vec::new();
    for (path, image) in images.iter().filter(|_| base.has_stable_inodes()) {
        if let Some(now) = stat(path)? {
            standing.push((path, image.as_ref(), now));
        }
    }
    Ok(standing)
}
