//! Reads directories.
//!
//! A listing is made when a directory is read from its beginning, and the kernel then reads it in
//! parts. [`Listing`] keeps the cookies stable while names come and go. The base is asked for some
//! names at a time, without the core lock.

use std::sync::Arc;

use crate::base::DirLookup;
use crate::error::{FsError, FsResult};
use crate::fs::kernel::listing::{FIRST_COOKIE, Listed, Listing};
use crate::fs::kernel::nodes::NodeState;
use crate::fs::merged::answers::{self, Answers, Question};
use crate::fs::merged::lower::{Lower, LowerNode};
use crate::fs::merged::state::Dir;
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

/// Takes the names of a directory.
pub trait NameSink {
    /// Whether a name of this kind should come with its node.
    fn wants_node(&self, kind: FileKind) -> bool;

    /// Whether it has no name yet.
    fn is_empty(&self) -> bool;

    /// Whether the base may be asked for one more node. It is called once for each.
    fn has_time(&mut self) -> bool;

    /// Takes a name. Returns false if there is no room for it, and then no name follows.
    fn take(&mut self, entry: DirEntry, hand_out: &mut HandOut<'_>) -> bool;
}

/// Takes names without nodes.
struct NamesOnly<F>(F);

impl<F: FnMut(DirEntry) -> bool> NameSink for NamesOnly<F> {
    fn wants_node(&self, _: FileKind) -> bool {
        false
    }

    fn is_empty(&self) -> bool {
        false
    }

    fn has_time(&mut self) -> bool {
        true
    }

    fn take(&mut self, entry: DirEntry, _: &mut HandOut<'_>) -> bool {
        (self.0)(entry)
    }
}

/// The most names for which the base is asked between two looks at the tree.
const NAMES_PER_BATCH: usize = 8;
/// The most names among which these are looked for.
const MOST_LISTED: usize = 64;

/// Names to ask the base for, of a directory there.
struct Batch {
    lower: Arc<Lower>,
    dir: TreePath,
    names: Vec<Name>,
}

/// How far the names of a listing were passed on.
enum Passed {
    All,
    /// The sink takes no more.
    Full,
    /// Up to this cookie. The base must be asked for the next name.
    To(u64),
}

impl Fs {
    /// Passes the names of a directory after the cookie `after` to `take`, until it returns false.
    ///
    /// # Errors
    /// ENOENT for a directory that is gone; ENOTDIR; those of the base.
    pub fn readdir(
        &self,
        id: NodeId,
        after: u64,
        take: impl FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        self.readdir_plus(id, after, &mut NamesOnly(take))
    }

    /// As [`Fs::readdir`], with a function that hands out the node of each name, as [`Fs::lookup`]
    /// does. The reply must tell the kernel of every node that was handed out.
    ///
    /// # Errors
    /// As [`Fs::readdir`].
    pub fn readdir_plus(&self, id: NodeId, after: u64, sink: &mut impl NameSink) -> FsResult<()> {
        if id.is_in_snapdir() {
            return self.snapdir_readdir(id, after, &mut |entry| sink.take(entry, &mut || None));
        }
        let past = self.snapdir_entry(id).filter(|entry| entry.cookie > after);
        // After the last name the kernel asks once more, to learn that it was the last.
        if after != 0
            && past.is_none()
            && self.core().held.listing(id).is_some_and(|known| known.is_end(after))
        {
            return Ok(());
        }
        let (dots, opened) = self.with_dir(id, |core| core.begin_listing(id, after))?;
        for entry in dots {
            if entry.cookie > after && !sink.take(entry, &mut || None) {
                return Ok(());
            }
        }
        let is_complete = self.pass_listing(id, (after, opened), sink)?;
        if let Some(entry) = past.filter(|_| is_complete) {
            sink.take(entry, &mut || None);
        }
        Ok(())
    }

    /// Passes the names of a listing on, and asks the base in between. Returns whether the sink
    /// took all of them.
    fn pass_listing(
        &self,
        id: NodeId,
        (mut at, mut opened): (u64, Option<DirLookup>),
        sink: &mut impl NameSink,
    ) -> FsResult<bool> {
        // Those of the round before, if it lacked some.
        let (mut answers, mut asked): (Answers, Option<Arc<Lower>>) = Default::default();
        loop {
            let batch = self.core().next_batch(id, at, sink)?;
            let mut is_late = false;
            if let Some(Batch { lower, dir, names }) = &batch {
                if asked.as_ref().is_some_and(|asked| !Arc::ptr_eq(asked, lower)) {
                    answers.clear();
                }
                asked = Some(Arc::clone(lower));
                let opened = opened.get_or_insert_with(|| lower.base().lookup_in(dir));
                if opened.path() != dir {
                    *opened = lower.base().lookup_in(dir);
                }
                for name in names {
                    let question = Question::Stat(dir.join(name));
                    if answers.knows(&question) {
                        continue;
                    }
                    is_late = !sink.has_time();
                    if is_late {
                        break;
                    }
                    answers.add(question, opened.stat(name));
                }
            }
            let mut core = self.core();
            if asked.as_ref().is_some_and(|asked| !Arc::ptr_eq(asked, &core.lower)) {
                answers.clear();
            }
            let passed = answers.serve(|| core.pass_names(id, at, sink))?;
            asked = Some(Arc::clone(&core.lower));
            drop(core);
            if !answers.ask_missing() {
                (answers, asked) = (Answers::default(), None);
            }
            match passed {
                // An empty reply would say that the directory ends.
                Passed::To(cookie) if !is_late || sink.is_empty() => at = cookie,
                Passed::To(_) | Passed::Full => return Ok(false),
                Passed::All => return Ok(true),
            }
        }
    }

    /// The names of a directory, sorted, for callers without a mount.
    ///
    /// # Errors
    /// As [`Fs::readdir`].
    pub fn names(&self, id: NodeId) -> FsResult<Vec<Name>> {
        self.with_node(id, |core| {
            let (dir, lower, _) = core.live_dir(id)?;
            core.check_dir(lower.as_ref())?;
            Ok(core.merged_names(dir, lower.as_ref())?.into_keys().collect())
        })
    }
}

impl Core {
    /// Makes the listing of a directory, if it is read from its beginning. Returns `.` and `..`,
    /// unless `after` is behind them.
    fn begin_listing(&mut self, id: NodeId, after: u64) -> FsResult<Vec<DirEntry>> {
        let (dir, lower, seen) = self.live_dir(id)?;
        self.check_dir(lower.as_ref())?;
        let mut dots = Vec::new();
        if after < FIRST_COOKIE - 1 {
            let parent = self.parent_ino(id, (dir, lower.as_ref()))?;
            let names = [(1, &b"."[..], dir), (2, &b".."[..], parent)];
            dots.extend(names.map(|(cookie, name, ino)| DirEntry {
                ino,
                cookie,
                kind: FileKind::Dir,
                name: name.to_vec(),
            }));
        }
        if after == 0 || self.held.listing(id).is_none() {
            self.refresh_listing(id, dir, (lower.as_ref(), seen.as_ref()))?;
        }
        Ok(dots)
    }

    /// A live directory whose listing is being read: its number, and the base path that it merges
    /// with.
    fn listed_dir(&self, id: NodeId) -> FsResult<Dir> {
        let held = self.held.get(id).filter(|held| held.is_live()).ok_or(FsError::NotFound)?;
        match self.tree.node(held.ino) {
            Some(_) => Ok((held.ino, self.lower_path(held.ino)?)),
            None => Ok((held.ino, self.held.base_path(id).cloned())),
        }
    }

    /// The next names after a cookie for which the base must be asked; none if the tree and the
    /// listing can tell the next names.
    fn next_batch(&self, id: NodeId, after: u64, sink: &impl NameSink) -> FsResult<Option<Batch>> {
        let (dir, Some(lower)) = self.listed_dir(id)? else { return Ok(None) };
        let listing = self.held.listing(id).ok_or(FsError::NotFound)?;
        let names: Vec<Name> = listing
            .after(after)
            .take(MOST_LISTED)
            .filter(|listed| self.needs_base(dir, listing, listed, sink))
            .take(NAMES_PER_BATCH)
            .map(|listed| listed.name.clone())
            .collect();
        let batch = Batch { lower: Arc::clone(&self.lower), dir: lower, names };
        Ok((!batch.names.is_empty()).then_some(batch))
    }

    /// Whether only the base knows a listed name's kind, or its node, which the sink wants.
    fn needs_base(
        &self,
        dir: Ino,
        listing: &Listing,
        listed: &Listed,
        sink: &impl NameSink,
    ) -> bool {
        if self.tree.dentry(dir, &listed.name).is_some() {
            return false;
        }
        match listed.in_base.filter(|_| listing.epoch == self.lower.epoch()) {
            Some((ino, kind)) => sink.wants_node(kind) && self.held.id_of(ino).is_none(),
            None => true,
        }
    }

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

    /// Passes the names of a listing after a cookie to a sink, up to the first one for which the
    /// base was not asked.
    fn pass_names(&mut self, id: NodeId, after: u64, sink: &mut impl NameSink) -> FsResult<Passed> {
        let (dir, lower) = self.listed_dir(id)?;
        let listing = self.held.take_listing(id).ok_or(FsError::NotFound)?;
        let passed = self.pass_listed(id, (dir, lower.as_ref()), &listing, after, sink);
        self.held.set_listing(id, listing);
        passed
    }

    fn pass_listed(
        &mut self,
        id: NodeId,
        (dir, lower): (Ino, Option<&TreePath>),
        listing: &Listing,
        after: u64,
        sink: &mut impl NameSink,
    ) -> FsResult<Passed> {
        let mut passed = after;
        for listed in listing.after(after) {
            let Listed { cookie, name, in_base } = listed;
            if let Some(lower) = lower
                && self.needs_base(dir, listing, listed, sink)
                && !answers::is_known(&Question::Stat(lower.join(name)))
            {
                return Ok(Passed::To(passed));
            }
            let before = std::mem::replace(&mut passed, *cookie);
            let kind_of = |ino: Ino| self.tree.node(ino).map_or(FileKind::File, |node| node.kind());
            let (ino, kind) = match (self.tree.dentry(dir, name), in_base) {
                (Some(Dentry::Child { ino, .. }), _) => (*ino, kind_of(*ino)),
                (None, Some(known)) if listing.epoch == self.lower.epoch() => *known,
                // Removed since the listing was made.
                (Some(Dentry::Whiteout(_)), _) => continue,
                (None, _) => match self.find(dir, lower, name) {
                    Ok(Found::Upper(ino, _)) => (ino, kind_of(ino)),
                    Ok(Found::Base(ino, _, node)) => (ino, node.kind()),
                    Ok(Found::Nothing(_)) => continue,
                    Err(FsError::MustWait) => return Ok(Passed::To(before)),
                    Err(error) => return Err(error),
                },
            };
            // The tree can have this name from a mount that had another snapshot directory.
            if self.snapdir_name.as_ref() == Some(name) && id == NodeId::ROOT {
                continue;
            }
            let entry = DirEntry { ino, cookie: *cookie, kind, name: name.as_bytes().to_vec() };
            let hand_out = &mut || self.hand_out_listed(id, (dir, lower), (name, ino));
            if !sink.take(entry, hand_out) {
                return Ok(Passed::Full);
            }
        }
        Ok(Passed::All)
    }

    /// Hands out the node of a listed name, unless the kernel holds it: then it most likely has
    /// this name of it.
    fn hand_out_listed(
        &mut self,
        id: NodeId,
        (dir, lower): (Ino, Option<&TreePath>),
        (name, ino): (&Name, Ino),
    ) -> Option<Entry> {
        if self.held.id_of(ino).is_some() {
            return None;
        }
        // An error is reported when the kernel looks the name up. If the name has another node by
        // now, the kernel may hold that one.
        let found = self.find(dir, lower, name).ok().filter(|found| found.ino() == Some(ino))?;
        let entry = self.look_up(id, dir, name, found).ok()?;
        self.coherence.name_looked_up(id, name);
        Some(entry)
    }
}
