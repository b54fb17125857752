//! Reading directories.
//!
//! A cookie is a number that a name of a listing keeps while the listing is in use: it is never an index and never
//! given to another name. So a reader that goes on after a cookie neither misses nor repeats names, whatever came and
//! went meanwhile. A listing is made when a directory is read from its beginning; names that are new then get new
//! cookies behind the others.

use std::sync::Arc;

use crate::base::DirLookup;
use crate::error::{FsError, FsResult};
use crate::fs::kernel::listing::{FIRST_COOKIE, Listed, Listing};
use crate::fs::kernel::nodes::NodeState;
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Core, Entry, Found, Fs};
use crate::tree::{Body, Dentry};
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

/// A name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The number of the node.
    pub ino: Ino,
    /// Where a reader goes on after this name.
    pub cookie: u64,
    /// What kind of node it is.
    pub kind: FileKind,
    /// The name; `.` and `..` are given as such.
    pub name: Vec<u8>,
}

/// Hands out the node of the name that is being given, if the kernel does not hold it. None also where that cannot be done: the kernel
/// then asks for the name when it needs it.
pub type HandOut<'a> = dyn FnMut() -> Option<Entry> + 'a;

impl Fs {
    /// Gives names of a directory to `take`, from behind the cookie `after` on, until it says that it is full.
    ///
    /// # Errors
    /// ENOENT for a directory that is gone, ENOTDIR, or what the base answers.
    pub fn readdir(
        &self,
        id: NodeId,
        after: u64,
        mut take: impl FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        self.readdir_plus(id, after, |entry, _| take(entry))
    }

    /// The same for who may want nodes together with their names: `take` is given what hands the node of a name out, as
    /// [`Fs::lookup`] does. What it handed out must come to the kernel.
    ///
    /// # Errors
    /// As [`Fs::readdir`].
    pub fn readdir_plus(
        &self,
        id: NodeId,
        after: u64,
        mut take: impl FnMut(DirEntry, &mut HandOut<'_>) -> bool,
    ) -> FsResult<()> {
        if id.is_in_snapdir() {
            return self.snapdir_readdir(id, after, &mut |entry| take(entry, &mut || None));
        }
        let past = self.snapdir_entry(id).filter(|entry| entry.cookie > after);
        let mut core = self.core();
        // Who is told all asks once more, and so learns that it was all.
        if after != 0
            && past.is_none()
            && core.held.listing(id).is_some_and(|known| known.is_end(after))
        {
            return Ok(());
        }
        let (at, base) = (core.place_in_base(id).cloned(), Arc::clone(core.lower.base()));
        let near = at.as_ref().map(|path| base.lookup_in(path));
        let (dir, lower, seen) = core.live_dir(id, near.as_ref())?;
        let near = near.or_else(|| lower.as_ref().map(|path| base.lookup_in(path)));
        core.check_dir(lower.as_ref())?;
        if after == 0 || core.held.listing(id).is_none() {
            core.list_anew(id, dir, (lower.as_ref(), seen.as_ref()))?;
        }
        if after < FIRST_COOKIE - 1 {
            let up = core.above(id, (dir, lower.as_ref()))?;
            for (cookie, name, ino) in [(1, &b"."[..], dir), (2, &b".."[..], up)] {
                let entry = DirEntry { ino, cookie, kind: FileKind::Dir, name: name.to_vec() };
                if cookie > after && !take(entry, &mut || None) {
                    return Ok(());
                }
            }
        }
        let listing = core.held.take_listing(id).ok_or(FsError::NotFound)?;
        let is_given =
            core.give(id, (dir, lower.as_ref(), near.as_ref()), &listing, after, &mut take);
        core.held.set_listing(id, listing);
        if is_given? && let Some(entry) = past {
            take(entry, &mut || None);
        }
        Ok(())
    }

    /// The names of a directory, sorted, for callers without a mount.
    ///
    /// # Errors
    /// As [`Fs::readdir`].
    pub fn names(&self, id: NodeId) -> FsResult<Vec<Name>> {
        let core = self.core();
        let (dir, lower, _) = core.live_dir(id, None)?;
        core.check_dir(lower.as_ref())?;
        Ok(core.merged_names(dir, lower.as_ref())?.into_keys().collect())
    }
}

impl Core {
    /// The number of the directory above a live one; of the root, its own.
    fn above(&self, id: NodeId, (dir, lower): (Ino, Option<&TreePath>)) -> FsResult<Ino> {
        match self.seen_above(id, lower).filter(|_| self.tree.node(dir).is_none()) {
            Some(above) => Ok(above),
            None => Ok(self.parent_of(dir, lower)?.map_or(dir, |(ino, _)| ino)),
        }
    }

    /// The same for one of the base alone, if it is where the kernel sees it: then the base needs not be asked.
    fn seen_above(&self, id: NodeId, lower: Option<&TreePath>) -> Option<Ino> {
        let (above, _) = lower?.split()?;
        let held = self.held.get(self.held.get(id)?.within?)?;
        let base = match (self.tree.node(held.ino).map(|node| &node.body), &held.state) {
            (Some(Body::Dir { base }), _) | (None, NodeState::Live { base }) => base.as_ref(),
            _ => None,
        };
        (base == Some(&above)).then_some(held.ino)
    }

    /// Takes in the names that a directory has now. `lower` is where it is in the base, and what was seen there, if it was looked at just now.
    fn list_anew(
        &mut self,
        id: NodeId,
        dir: Ino,
        (lower, seen): (Option<&TreePath>, Option<&LowerNode>),
    ) -> FsResult<()> {
        let in_base = lower.map(|path| match seen {
            Some(seen) => self.lower.list_seen(path, seen),
            None => self.lower.list(path),
        });
        let known = self.merge_names(dir, in_base.transpose()?);
        let mut listing = self.held.take_listing(id).unwrap_or_default();
        let names = known.into_iter().map(|(name, (ino, kind))| {
            let is_of_base = self.tree.dentry(dir, &name).is_none();
            (name, kind.filter(|_| is_of_base).map(|kind| (ino, kind)))
        });
        listing.refresh(names, self.lower.epoch());
        self.held.set_listing(id, listing);
        Ok(())
    }

    /// Gives the names of a listing from behind a cookie on. Whether that were all.
    fn give(
        &mut self,
        id: NodeId,
        (dir, lower, near): (Ino, Option<&TreePath>, Option<&DirLookup<'_>>),
        listing: &Listing,
        after: u64,
        take: &mut impl FnMut(DirEntry, &mut HandOut<'_>) -> bool,
    ) -> FsResult<bool> {
        let is_of_this_base = listing.epoch == self.lower.epoch();
        for Listed { cookie, name, in_base } in listing.after(after) {
            let said = self.tree.dentry(dir, name);
            let kind_of = |ino: Ino| self.tree.node(ino).map_or(FileKind::File, |node| node.kind());
            let (ino, kind) = match (said, in_base) {
                (Some(Dentry::Child { ino, .. }), _) => (*ino, kind_of(*ino)),
                (None, Some(known)) if is_of_this_base => *known,
                // Removed since the listing was made.
                (Some(Dentry::Whiteout(_)), _) => continue,
                (None, _) => match self.find(dir, lower, name)? {
                    Found::Upper(ino, _) => (ino, kind_of(ino)),
                    Found::Base(ino, _, node) => (ino, node.kind()),
                    Found::Nothing(_) => continue,
                },
            };
            // A tree of another mount may have had something of the name under which the past is seen here.
            if self.snapdir_name.as_ref() == Some(name) && id == NodeId::ROOT {
                continue;
            }
            let entry = DirEntry { ino, cookie: *cookie, kind, name: name.as_bytes().to_vec() };
            let hand_out = &mut || self.hand_out_listed(id, (dir, lower), near, (name, ino));
            if !take(entry, hand_out) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Hands out the node of a listed name, unless the kernel holds it, most likely under this name.
    fn hand_out_listed(
        &mut self,
        id: NodeId,
        (dir, lower): (Ino, Option<&TreePath>),
        near: Option<&DirLookup<'_>>,
        (name, ino): (&Name, Ino),
    ) -> Option<Entry> {
        if self.held.id_of(ino).is_some() {
            return None;
        }
        let found = self.find_in(dir, lower, name, near);
        // Whoever looks the name up is told why not. And of another node than the one that was listed the kernel may hold something.
        let found = found.ok().filter(|found| found.ino() == Some(ino))?;
        self.note_alias(dir, name, &found);
        let entry = self.hand_out(id, found).ok()?;
        self.coherence.name_looked_up(id, name);
        Some(entry)
    }
}
