//! `.jailfs/forks`: the trees of the other heads as they are now, read-only.
//!
//! * Each request is answered from the state that the other head has at that moment. A mounted head
//!   is asked for its state, which takes its lock for as long as a pointer is copied. Nothing waits
//!   for its kernel, so bytes that only a mapping there has are not shown before they are written
//!   back. The tree of a head that is not open is read from the store.
//! * The kernel asks again for each name and all attributes. It may keep pages and listings, so a
//!   file has another id after each change (see [`super::table`]).
//! * A file that is open keeps its size. Each of its pages is as it was at some moment since then.
//! * A node that is gone in the other head, or was replaced there, answers ESTALE.
//! * Directories move here while the kernel walks through them. So a link whose text climbs higher
//!   than the root of the mount is from the root of the head is refused, wherever it leads.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::error::{Error, FsError, FsResult, Kind};
use crate::fs::merged::lower::Lower;
use crate::fs::snapdir::links::{Judged, judge, text_of};
use crate::fs::snapdir::table::{ForkNode, OtherHead, Stamp, fork_id};
use crate::fs::snapdir::{Archive, dir_entry};
use crate::fs::{Attr, DirEntry, Entry, Found, Fs, LinkReply, ReadPlan, State};
use crate::jail::Jail;
use crate::tree::{Dentry, Tree, within};
use crate::types::{ByteRange, Epoch, FileKind, Ino, Name, NodeId, Timestamp, TreePath};

/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;
/// Cookies of names are below this limit, because the kernel treats them as signed offsets.
const COOKIES: u64 = 1 << 62;
/// How many levels the root of a head is below the root of the mount.
const DEPTH: usize = 3;

/// The tree of another head.
pub enum HeadTree {
    /// It is open, and its filesystem has the tree.
    Open(Arc<Fs>),
    /// It is not open.
    Closed(Tree, Epoch),
}

/// The other heads that a mount shows.
pub struct OtherHeads {
    /// Sorted by name.
    pub heads: Vec<OtherHead>,
    /// When a head was last made or dropped, while the store is open.
    pub changed: Timestamp,
}

/// The base in the epoch of a head that is not open. It is valid as long as the live tree has the
/// same `live` below it.
pub(super) struct ClosedLower {
    live: Arc<Lower>,
    lower: Arc<Lower>,
}

/// The last listing of a directory, for the parts that follow the first.
pub(super) type Listing = (NodeId, Arc<Vec<DirEntry>>);

impl ForkNode {
    /// The node in the present state of its head.
    fn find(&self, state: &State) -> FsResult<Found> {
        if let Some(node) = state.tree.node(self.ino) {
            return if node.kind() == self.kind {
                Ok(Found::Upper(self.ino, None))
            } else {
                Err(FsError::Stale)
            };
        }
        let path = self.base.as_ref().ok_or(FsError::Stale)?;
        match state.lower.lookup(path)? {
            Some((ino, node)) if ino == self.ino && node.kind() == self.kind => {
                check_not_removed(state, path)?;
                Ok(Found::Base(ino, path.clone(), node))
            }
            _ => Err(FsError::Stale),
        }
    }
}

/// Refuses a base node of which the tree has removed the name, or that of a directory above it.
fn check_not_removed(state: &State, path: &TreePath) -> FsResult<()> {
    let mut at = path.clone();
    while let Some((above, name)) = at.split() {
        let known = state.lower.lookup(&above)?.map(|(ino, _)| ino);
        let known = known.filter(|ino| state.tree.node(*ino).is_some());
        match known {
            // A directory that was copied up is in the tree as long as it exists.
            Some(dir) => {
                let shows = state.lower_path(dir).ok().flatten().as_ref() == Some(&above);
                let is_whole = match state.tree.dentry(dir, &name) {
                    None => shows,
                    Some(Dentry::Child { .. } | Dentry::Whiteout(_)) => false,
                };
                return if is_whole { Ok(()) } else { Err(FsError::Stale) };
            }
            None => at = above,
        }
    }
    Ok(())
}

impl Fs {
    /// Calls `look` with the present state of another head. Calls it again if an apply replaced the
    /// base meanwhile.
    fn in_head<T>(&self, head: &OtherHead, look: impl Fn(&State) -> FsResult<T>) -> FsResult<T> {
        let archive = self.archive()?;
        let _guard = self.read_again();
        loop {
            match head_tree(&*archive, head)? {
                HeadTree::Open(fs) => {
                    let state = fs.state();
                    let result = look(&state);
                    if Arc::ptr_eq(&state.lower, &fs.core().state.lower) {
                        return result;
                    }
                }
                HeadTree::Closed(tree, epoch) => {
                    let live = Arc::clone(&self.core().state.lower);
                    let state = State { tree, lower: self.lower_of_closed(&live, epoch) };
                    let result = look(&state);
                    if Arc::ptr_eq(&live, &self.core().state.lower) {
                        return result;
                    }
                }
            }
        }
    }

    /// The base in the epoch of a head that is not open.
    fn lower_of_closed(&self, live: &Arc<Lower>, epoch: Epoch) -> Arc<Lower> {
        if live.epoch() == epoch {
            return Arc::clone(live);
        }
        let mut last = self.snapdir.closed_lower.lock();
        if let Some(known) = &*last
            && Arc::ptr_eq(&known.live, live)
            && known.lower.epoch() == epoch
        {
            return Arc::clone(&known.lower);
        }
        let lower = Arc::new(live.in_epoch(epoch));
        *last = Some(ClosedLower { live: Arc::clone(live), lower: Arc::clone(&lower) });
        lower
    }

    /// Calls `look` with the present state of a node.
    pub(super) fn in_fork<T>(
        &self,
        node: &ForkNode,
        look: impl Fn(&State, &Found) -> FsResult<T>,
    ) -> FsResult<T> {
        self.in_head(&node.head, |state| look(state, &node.find(state)?))
    }

    /// The attributes of `.jailfs/forks`, except its inode number and mode.
    pub(super) fn other_heads(&self) -> FsResult<OtherHeads> {
        Ok(self.archive()?.heads()?)
    }

    /// Looks up a name in `.jailfs/forks`.
    pub(super) fn lookup_fork(&self, name: &Name) -> FsResult<Entry> {
        let heads = self.other_heads()?.heads;
        let head = heads.into_iter().find(|head| head.name == *name).ok_or(FsError::NotFound)?;
        let gone = |error| if error == FsError::Stale { FsError::NotFound } else { error };
        let attr = self.in_head(&head, |state| {
            state.attr(&state.resolve(&TreePath::root())?).ok_or(FsError::NotFound)
        });
        Ok(self.hold_fork(head, attr.map_err(gone)?, Some(TreePath::root())))
    }

    fn hold_fork(&self, head: OtherHead, attr: Attr, base: Option<TreePath>) -> Entry {
        let (ino, kind, stamp) = (attr.ino, attr.kind, Stamp::of(&attr));
        let node = ForkNode { head, ino, kind, base, stamp };
        let id = self.snapdir.table.lock().hold_fork(node);
        Entry { id, attr: self.snapdir_attr(id, attr) }
    }

    pub(super) fn lookup_in_fork(&self, dir: &ForkNode, name: &Name) -> FsResult<Entry> {
        let (found, attr) = self.in_fork(dir, |state, found| {
            let (ino, lower) = state.as_dir(found).ok_or(FsError::NotADirectory)?;
            state.check_dir(lower.as_ref())?;
            let found = state.find(ino, lower.as_ref(), name)?;
            let attr = state.attr(&found).ok_or(FsError::NotFound)?;
            Ok((found, attr))
        })?;
        let base = match found {
            Found::Base(_, path, _) => Some(path),
            Found::Upper(..) | Found::Nothing(_) => None,
        };
        Ok(self.hold_fork(dir.head.clone(), attr, base))
    }

    pub(super) fn attr_in_fork(&self, id: NodeId, node: &ForkNode) -> FsResult<Attr> {
        let mut attr =
            self.in_fork(node, |state, found| state.attr(found).ok_or(FsError::Stale))?;
        match node.kind {
            FileKind::Dir => self.snapdir.table.lock().note_told(id, Stamp::of(&attr)),
            FileKind::File => attr.size = node.stamp.size,
            _ => {}
        }
        Ok(self.snapdir_attr(id, attr))
    }

    /// Lists a directory of another head, as [`Fs::readdir`] does. The cookie of a name is its
    /// hash, so that a name that exists all the time is listed once.
    pub(super) fn readdir_in_fork(
        &self,
        id: NodeId,
        node: &ForkNode,
        after: u64,
        take: &mut dyn FnMut(DirEntry) -> bool,
    ) -> FsResult<()> {
        let known = self.snapdir.fork_listing.lock().clone();
        let known = known.filter(|(of, _)| *of == id && after > 0);
        let (names, up, stamp) = self.in_fork(node, |state, found| {
            let (dir, lower) = state.as_dir(found).ok_or(FsError::NotADirectory)?;
            state.check_dir(lower.as_ref())?;
            let up = state.parent_of(dir, lower.as_ref())?.map(|(ino, _)| ino);
            let stamp = Stamp::of(&state.attr(found).ok_or(FsError::Stale)?);
            let names = match &known {
                Some((_, names)) => Arc::clone(names),
                None => Arc::new(entries(&node.head, state, (dir, lower.as_ref()))?),
            };
            Ok((names, up, stamp))
        })?;
        self.snapdir.table.lock().note_listed(id, stamp, after == 0);
        *self.snapdir.fork_listing.lock() = Some((id, Arc::clone(&names)));
        let up = up.map_or(NodeId::FORKS, |ino| fork_id(&node.head, ino, None));
        for (cookie, name, ino) in [(1, &b"."[..], id), (2, &b".."[..], up)] {
            if cookie > after && !take(dir_entry(ino, cookie, FileKind::Dir, name)) {
                return Ok(());
            }
        }
        let from = names.partition_point(|entry| entry.cookie <= after);
        for entry in names.iter().skip(from) {
            if !take(entry.clone()) {
                break;
            }
        }
        Ok(())
    }

    /// Reads a file of another head.
    pub(super) fn read_in_fork(
        &self,
        id: NodeId,
        node: &ForkNode,
        range: ByteRange,
    ) -> FsResult<Option<Vec<u8>>> {
        let range = within(range, node.stamp.size);
        let stamp =
            |state: &State, found: &Found| Ok(Stamp::of(&state.attr(found).ok_or(FsError::Stale)?));
        let read = self.in_fork(node, |state, found| {
            let now = stamp(state, found)?;
            if now.size < node.stamp.size {
                return Err(FsError::Stale);
            }
            let reading = state.lower.reading();
            let pieces = state.plan(found, range)?;
            let bytes = ReadPlan::new(pieces, Arc::clone(&state.lower), reading).read(false)?;
            Ok((bytes, now))
        });
        // If the file has changed by now, the kernel caches bytes of a later version.
        let is_same = |now: &Stamp| *now == node.stamp;
        let is_whole = read.as_ref().is_ok_and(|(_, now)| is_same(now))
            && self.in_fork(node, stamp).is_ok_and(|now| is_same(&now));
        if !is_whole {
            self.snapdir.table.lock().retire(id);
        }
        Ok(read?.0)
    }

    /// READLINK in the tree of another head.
    pub(super) fn readlink_in_fork(&self, node: &ForkNode) -> FsResult<LinkReply> {
        let jail = Arc::clone(&self.jail.lock());
        match self.in_fork(node, |state, found| judge(&jail, state, found))? {
            Judged::Text(text) if stays_in_mount(&text) => Ok(LinkReply::Text(text)),
            Judged::Text(_) | Judged::Out { .. } => Err(FsError::LeavesJail),
        }
    }

    pub(super) fn link_text_in_fork(&self, node: &ForkNode) -> FsResult<Vec<u8>> {
        self.in_fork(node, text_of)
    }

    /// Makes a fork of this head for mkdir(2) in `forks`. Called from a thread that serves no
    /// request.
    pub(in crate::fs) fn make_fork(&self, name: &Name) -> FsResult<Entry> {
        if !self.snapdir_view().is_some_and(|view| view.makes) {
            return Err(FsError::ReadOnly);
        }
        let text = std::str::from_utf8(name.as_bytes()).map_err(|_| FsError::Invalid)?;
        let archive = self.archive()?;
        if archive.has_head(text) {
            return Err(FsError::Exists);
        }
        match archive.fork(text.to_owned()) {
            Err(error) if error.kind == Kind::Usage => Err(FsError::Invalid),
            // Another process was faster.
            Err(error) if error.errno.is_none() && archive.has_head(text) => {
                log::debug!("{error}");
                Err(FsError::Exists)
            }
            Err(error) => Err(error.into()),
            Ok(()) => self.lookup_fork(name),
        }
    }
}

fn head_tree(archive: &dyn Archive, head: &OtherHead) -> FsResult<HeadTree> {
    archive.head_tree(head).map_err(|error: Error| match error.kind {
        Kind::NoStore => FsError::Stale,
        _ => error.into(),
    })
}

/// The names of a directory, by cookie.
fn entries(
    head: &OtherHead,
    state: &State,
    (dir, lower): (Ino, Option<&TreePath>),
) -> FsResult<Vec<DirEntry>> {
    let opened = lower.map(|path| state.lower.base().lookup_in(path));
    let mut entries = Vec::new();
    for (name, (ino, kind)) in state.merged_names(dir, lower)? {
        let (kind, version) = match kind {
            Some(kind @ (FileKind::Dir | FileKind::Symlink)) => (kind, None),
            // The id of a file depends on its attributes.
            _ => {
                let found = state.find_in(dir, lower, &name, opened.as_ref())?;
                // Another program removed it from the base meanwhile.
                let Some(attr) = state.attr(&found) else { continue };
                let version = (attr.kind == FileKind::File).then(|| Stamp::of(&attr));
                (attr.kind, version)
            }
        };
        let mut hasher = DefaultHasher::new();
        name.as_bytes().hash(&mut hasher);
        let cookie = FIRST_COOKIE + hasher.finish() % COOKIES;
        entries.push(dir_entry(fork_id(head, ino, version), cookie, kind, name.as_bytes()));
    }
    entries.sort_unstable_by(|a, b| (a.cookie, &a.name).cmp(&(b.cookie, &b.name)));
    let mut next = FIRST_COOKIE;
    for entry in &mut entries {
        entry.cookie = entry.cookie.max(next);
        next = entry.cookie + 1;
    }
    Ok(entries)
}

/// Whether a text leads out of the mount from no directory of any head: it climbs first, not higher
/// than the root of the mount, and then never again.
fn stays_in_mount(text: &[u8]) -> bool {
    let ups = text.split(|byte| *byte == b'/').filter(|part| *part == b"..").count();
    ups == Jail::climb(text) && ups <= DEPTH
}
