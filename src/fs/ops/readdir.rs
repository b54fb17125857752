//! Reads directories.
//!
//! A listing is made when a directory is read from its beginning, and the kernel then reads it in
//! parts. [`Listing`] keeps the cookies stable while names come and go.

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
    /// The inode number of the node.
    pub ino: Ino,
    /// The position after this name.
    pub cookie: u64,
    /// The type of the node.
    pub kind: FileKind,
    /// The name, `.` and `..` included.
    pub name: Vec<u8>,
}

/// Looks up the node of the current name, and counts that lookup. Returns `None` if the kernel
/// holds the node already or the lookup fails. Then the kernel looks the name up when it needs it.
pub type HandOut<'a> = dyn FnMut() -> Option<Entry> + 'a;

impl Fs {
    /// Passes the names of a directory after the cookie `after` to `take`, until it returns false.
    ///
    /// # Errors
    /// ENOENT for a directory that is gone; ENOTDIR; those of the base.
    pub fn readdir(
        &self,
        id: NodeId,
        after: u64,
        mut take: impl FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        self.readdir_plus(id, after, |entry, _| take(entry))
    }

    /// As [`Fs::readdir`], with a function that hands out the node of each name, as [`Fs::lookup`]
    /// does. The reply must tell the kernel of every node that was handed out.
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
        // After the last name the kernel asks once more, to learn that it was the last.
        if after != 0
            && past.is_none()
            && self.core().held.listing(id).is_some_and(|known| known.is_end(after))
        {
            return Ok(());
        }
        let (mut core, asked) = self.core_for_dir(id);
        let (dir, lower, seen) = core.live_dir(id, &asked)?;
        let opened =
            asked.into_dir(&core.lower).filter(|opened| Some(opened.path()) == lower.as_ref());
        let opened =
            opened.or_else(|| lower.as_ref().map(|path| core.lower.base().lookup_in(path)));
        core.check_dir(lower.as_ref())?;
        if after == 0 || core.held.listing(id).is_none() {
            core.refresh_listing(id, dir, (lower.as_ref(), seen.as_ref()))?;
        }
        if after < FIRST_COOKIE - 1 {
            let parent = core.parent_ino(id, (dir, lower.as_ref()))?;
            for (cookie, name, ino) in [(1, &b"."[..], dir), (2, &b".."[..], parent)] {
                let entry = DirEntry { ino, cookie, kind: FileKind::Dir, name: name.to_vec() };
                if cookie > after && !take(entry, &mut || None) {
                    return Ok(());
                }
            }
        }
        let listing = core.held.take_listing(id).ok_or(FsError::NotFound)?;
        let is_complete =
            core.pass_names(id, (dir, lower.as_ref(), opened.as_ref()), &listing, after, &mut take);
        core.held.set_listing(id, listing);
        if is_complete? && let Some(entry) = past {
            take(entry, &mut || None);
        }
        Ok(())
    }

    /// The names of a directory, sorted, for callers without a mount.
    ///
    /// # Errors
    /// As [`Fs::readdir`].
    pub fn names(&self, id: NodeId) -> FsResult<Vec<Name>> {
        let (core, asked) = self.core_for_node(id);
        let (dir, lower, _) = core.live_dir(id, &asked)?;
        core.check_dir(lower.as_ref())?;
        Ok(core.merged_names(dir, lower.as_ref())?.into_keys().collect())
    }
}

impl Core {
    /// The inode number of a live directory's parent; the root's is its own.
    fn parent_ino(&self, id: NodeId, (dir, lower): (Ino, Option<&TreePath>)) -> FsResult<Ino> {
        match self.held_parent(id, lower).filter(|_| self.tree.node(dir).is_none()) {
            Some(parent) => Ok(parent),
            None => Ok(self.parent_of(dir, lower)?.map_or(dir, |(ino, _)| ino)),
        }
    }

    /// The parent in which the kernel sees a base directory, if the directory is still there. This
    /// saves a lookup in the base.
    fn held_parent(&self, id: NodeId, lower: Option<&TreePath>) -> Option<Ino> {
        let (above, _) = lower?.split()?;
        let held = self.held.get(self.held.get(id)?.within?)?;
        let base = match (self.tree.node(held.ino).map(|node| &node.body), &held.state) {
            (Some(Body::Dir { base }), _) | (None, NodeState::Live { base }) => base.as_ref(),
            _ => None,
        };
        (base == Some(&above)).then_some(held.ino)
    }

    /// Replaces the listing of a directory by the names that it has now. `seen` is its base node,
    /// if a lookup has just found it.
    fn refresh_listing(
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

    /// Passes the names of a listing after a cookie to `take`. Returns whether it took all of them.
    fn pass_names(
        &mut self,
        id: NodeId,
        (dir, lower, opened): (Ino, Option<&TreePath>, Option<&DirLookup>),
        listing: &Listing,
        after: u64,
        take: &mut impl FnMut(DirEntry, &mut HandOut<'_>) -> bool,
    ) -> FsResult<bool> {
        let is_of_this_base = listing.epoch == self.lower.epoch();
        for Listed { cookie, name, in_base } in listing.after(after) {
            let dentry = self.tree.dentry(dir, name);
            let kind_of = |ino: Ino| self.tree.node(ino).map_or(FileKind::File, |node| node.kind());
            let (ino, kind) = match (dentry, in_base) {
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
            // The tree can have this name from a mount that had another snapshot directory.
            if self.snapdir_name.as_ref() == Some(name) && id == NodeId::ROOT {
                continue;
            }
            let entry = DirEntry { ino, cookie: *cookie, kind, name: name.as_bytes().to_vec() };
            let hand_out = &mut || self.hand_out_listed(id, (dir, lower), opened, (name, ino));
            if !take(entry, hand_out) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Hands out the node of a listed name, unless the kernel holds it: then it most likely has
    /// this name of it.
    fn hand_out_listed(
        &mut self,
        id: NodeId,
        (dir, lower): (Ino, Option<&TreePath>),
        opened: Option<&DirLookup>,
        (name, ino): (&Name, Ino),
    ) -> Option<Entry> {
        if self.held.id_of(ino).is_some() {
            return None;
        }
        let found = self.find_in(dir, lower, name, opened);
        // An error is reported when the kernel looks the name up. If the name has another node by
        // now, the kernel may hold that one.
        let found = found.ok().filter(|found| found.ino() == Some(ino))?;
        self.note_alias(dir, name, &found);
        let entry = self.hand_out(id, found).ok()?;
        self.coherence.name_looked_up(id, name);
        Some(entry)
    }
}
