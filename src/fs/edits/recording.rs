//! Detects the beginning of an edit and keeps the file before it.
//!
//! The operations of `fs` call the `before_*` methods under the lock of the head, before they
//! change the tree.

use std::sync::Arc;

use super::{ActiveEdit, EditHistory, MAX_EXTENTS, PRUNE_ACTIVE};
use crate::error::{FsError, FsResult};
use crate::fs::merged::answers;
use crate::fs::{Core, Extents, Found, Fs, State};
use crate::store::edits_log::{Content, EditsLogRecord, How, LoggedEdit};
use crate::tree::{Node, Source};
use crate::types::{ByteRange, FileKind, Ino, LayerId, Name, Timestamp, TreePath};

/// An edit of a file with several names is kept for at most this many of them.
const MAX_NAMES: usize = 8;

/// A change of content that is about to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) enum Touch {
    /// A write or an allocation.
    Write,
    /// A write of the kernel's page cache.
    WriteBack,
    /// A change of the size, in bytes.
    Resize(u64),
}

/// The content of a file, to be kept; `None` for other nodes, and for a file with too many extents.
fn content_of(state: &State, ino: Ino, node: &Node, extents: Extents) -> Option<Arc<Content>> {
    if node.kind() != FileKind::File || extents.len() > MAX_EXTENTS {
        return None;
    }
    Some(Arc::new(Content { ino, node: node.clone(), epoch: state.lower.epoch(), extents }))
}

impl State {
    /// The content of a file, to be kept as an edit; `None` for other nodes, and for a file with
    /// too many extents.
    ///
    /// # Errors
    /// The base cannot be read.
    pub fn content(&self, found: &Found) -> FsResult<Option<Arc<Content>>> {
        let is_file = self.attr(found).is_some_and(|attr| attr.kind == FileKind::File);
        let Some(ino) = found.ino().filter(|_| is_file) else { return Ok(None) };
        let (node, extents) = self.record(found)?;
        Ok(content_of(self, ino, &node, extents))
    }
}

impl EditHistory {
    /// The present time of the clock of edits.
    pub(super) fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Whether a change of a file of this size begins an edit, and which kind.
    fn edit_begins(&mut self, ino: Ino, touch: Touch, size: u64) -> Option<How> {
        let now = self.now();
        let active = self.active.get(&ino).filter(|active| active.is_active(now));
        let (is_active, is_new) = (active.is_some(), active.is_some_and(|active| active.is_new));
        let how = match touch {
            // Truncating an empty file loses nothing. The write that follows begins the edit.
            Touch::Resize(0) if size == 0 => return None,
            // A program that empties a file rewrites it, so this is an edit of its own.
            Touch::Resize(0) => Some(How::Truncated),
            Touch::Resize(to) if to < size && !is_active => Some(How::Truncated),
            Touch::Resize(_) | Touch::Write | Touch::WriteBack => {
                (!is_active).then_some(How::Written)
            }
        };
        self.set_active(ino, now, is_new && how.is_none());
        how
    }

    fn set_active(&mut self, ino: Ino, now: Timestamp, is_new: bool) {
        self.active.insert(ino, ActiveEdit { last: now, is_new });
        if self.active.len() >= self.prune_active_at {
            self.active.retain(|_, active| active.is_active(now));
            // Doubled, so that a full table does not scan itself for each new edit.
            self.prune_active_at = PRUNE_ACTIVE.max(2 * self.active.len());
        }
    }

    /// Ends the edit of a file: the next change begins a new one.
    pub(super) fn end_edit(&mut self, ino: Ino) {
        self.active.remove(&ino);
    }

    /// Records the beginning of an edit of these paths, with the file before it.
    pub(super) fn record_edit(
        &mut self,
        paths: Vec<TreePath>,
        how: How,
        content: Option<Arc<Content>>,
    ) {
        let edit = LoggedEdit { time: self.now(), how, content };
        self.append(EditsLogRecord::Kept(
            paths.into_iter().map(|path| (path, edit.clone())).collect(),
        ));
        self.last_edit = edit.time;
        if let Some(notice) = &self.notice {
            notice();
        }
    }
}

impl Core {
    /// Called before the content of a live file in the tree changes.
    ///
    /// # Errors
    /// [`FsError::MustWait`].
    pub(in crate::fs) fn before_change(&mut self, ino: Ino, touch: Touch) -> FsResult<()> {
        let size = self.tree.size(ino);
        let Some(history) = self.edits.as_mut().filter(|history| history.is_on()) else {
            return Ok(());
        };
        if answers::has_begun_edit(ino) {
            return Ok(());
        }
        let Some(how) = history.edit_begins(ino, touch, size) else { return Ok(()) };
        let Some(node) = self.tree.node(ino).cloned() else { return Ok(()) };
        let extents = self.tree.extents(ino).map(|(s, e)| (ByteRange::at(s, e.len), e.source));
        let Some(content) =
            content_of(&self.state, ino, &node, extents.take(MAX_EXTENTS + 1).collect())
        else {
            return Ok(());
        };
        let Some(content) = self.without_unwritten(content) else { return Ok(()) };
        let links = self.tree.links(ino).take(MAX_NAMES);
        let mut paths: Vec<TreePath> =
            links.filter_map(|(dir, name)| self.tree.path_in(dir, name)).collect();
        if paths.is_empty() {
            let path = self.path_of(ino).inspect_err(|_| {
                // The operation runs again, and then begins the edit.
                self.edits.iter_mut().for_each(|history| history.end_edit(ino));
            })?;
            paths.extend(path);
        }
        self.save(paths, how, content);
        answers::note_begun_edit(ino);
        Ok(())
    }

    fn save(&mut self, paths: Vec<TreePath>, how: How, content: Arc<Content>) {
        self.pin(&content);
        if let Some(history) = self.edits.as_mut().filter(|_| !paths.is_empty()) {
            history.record_edit(paths, how, Some(content));
        }
    }

    /// Pins the bytes that a content refers to: they are not overwritten in place.
    pub(super) fn pin(&mut self, content: &Content) {
        let upper = self.upper.layer();
        let Some(history) = &mut self.edits else { return };
        for (range, source) in &content.extents {
            history.pinned.add(upper, *source, range.len());
        }
    }

    /// The first part of a range of a pool that must not be overwritten.
    pub(in crate::fs) fn first_pinned(&self, layer: LayerId, part: ByteRange) -> Option<ByteRange> {
        self.edits.as_ref()?.pinned.first(layer, part)
    }

    /// How many times ranges were unpinned. A write may change the bytes of such a range in place.
    pub(in crate::fs) fn unpinned(&self) -> u64 {
        self.edits.as_ref().map_or(0, |history| history.pinned.unpinned())
    }

    /// Whether edits are recorded.
    pub(in crate::fs) fn records_edits(&self) -> bool {
        self.edits.as_ref().is_some_and(|history| history.is_on())
    }

    /// The content of a found node, to be kept. Another error of the base only loses this edit.
    ///
    /// # Errors
    /// [`FsError::MustWait`].
    pub(super) fn content_found(&self, found: &Found) -> FsResult<Option<Arc<Content>>> {
        let lost = |error: FsError| log::debug!("keep the file before an edit: {error}");
        let content = answers::known_or(self.state.content(found), lost)?.flatten();
        Ok(content.and_then(|content| self.without_unwritten(content)))
    }

    /// The content with holes where its pool was allocated and never written. Otherwise an edit
    /// would pin these addresses, and a write to them would need fresh ones.
    ///
    /// None if that has too many extents.
    fn without_unwritten(&self, content: Arc<Content>) -> Option<Arc<Content>> {
        if !self.upper.pool.has_unwritten() {
            return Some(content);
        }
        let upper = self.upper.layer();
        let written = |(range, source): &(ByteRange, Source)| match *source {
            Source::Pool { layer, offset } if layer == upper => {
                let parts = self.upper.pool.written_in(ByteRange::at(offset, range.len()));
                let in_file = |part: ByteRange| {
                    let skip = part.start - offset;
                    let range = ByteRange::at(range.start + skip, part.len());
                    (range, source.advanced(skip))
                };
                parts.into_iter().map(in_file).collect()
            }
            _ => vec![(*range, *source)],
        };
        let parts = content.extents.iter().flat_map(written);
        let extents: Extents = parts.take(MAX_EXTENTS + 1).collect();
        if extents == content.extents {
            return Some(content);
        }
        let is_short = extents.len() <= MAX_EXTENTS;
        is_short.then(|| Arc::new(Content { extents, ..Content::clone(&content) }))
    }

    /// Called before a name loses its file.
    ///
    /// # Errors
    /// [`FsError::MustWait`]; then nothing was recorded.
    pub(in crate::fs) fn before_loss(
        &mut self,
        (dir, lower): (Ino, Option<&TreePath>),
        name: &Name,
        found: &Found,
        how: How,
    ) -> FsResult<()> {
        if !self.records_edits() {
            return Ok(());
        }
        let Some(content) = self.content_found(found)? else { return Ok(()) };
        if let Some(dir) = answers::known(self.dir_path(dir, lower))? {
            self.save(vec![dir.join(name)], how, content);
        }
        Ok(())
    }

    /// Called before a file is renamed, over another one (`is_over`) or not.
    ///
    /// # Errors
    /// [`FsError::MustWait`]. The caller has copied the file up, so the base has answered.
    pub(in crate::fs) fn before_move(
        &mut self,
        from: &TreePath,
        found: &Found,
        to: &TreePath,
        is_over: bool,
    ) -> FsResult<()> {
        let (Some(ino), Some(history)) = (found.ino(), self.edits.as_mut()) else { return Ok(()) };
        let now = history.now();
        let is_new =
            history.active.get(&ino).is_some_and(|active| active.is_new && active.is_active(now));
        let is_known = history.by_path.contains(from);
        history.claim_pending(to);
        let has_history = history.by_path.contains(to);
        if is_known && !has_history {
            history.append(EditsLogRecord::Copied { from: from.clone(), to: to.clone() });
        }
        // A program that writes a new file and renames it over another one saves that one. The
        // temporary name gets no history.
        if is_new && !is_known && (is_over || has_history) {
            return Ok(());
        }
        let Some(content) = self.content_found(found)? else { return Ok(()) };
        if is_known || !is_new {
            self.save(vec![from.clone()], How::Moved, content);
            return Ok(());
        }
        // A new file that is renamed to a free name may be a backup: then the program writes the
        // old name again soon.
        self.pin(&content);
        let Some(history) = &mut self.edits else { return Ok(()) };
        let edit = LoggedEdit { time: now, how: How::Moved, content: Some(content) };
        history.add_pending(from.clone(), edit);
        self.drop_expired_pending();
        Ok(())
    }

    /// Called after a directory was renamed.
    pub(in crate::fs) fn dir_moved(&mut self, from: TreePath, to: TreePath) {
        let Some(history) = self.edits.as_mut().filter(|v| v.is_on() && !v.below(&from).is_empty())
        else {
            return;
        };
        history.append(EditsLogRecord::Moved { from, to });
    }

    /// Called after two nodes were exchanged of which at least one is a directory.
    pub(in crate::fs) fn dirs_exchanged(&mut self, a: TreePath, b: TreePath) {
        let knows =
            |v: &EditHistory| v.is_on() && !(v.below(&a).is_empty() && v.below(&b).is_empty());
        if let Some(history) = self.edits.as_mut().filter(|history| knows(history)) {
            history.append(EditsLogRecord::Exchanged { a, b });
        }
    }

    /// Called after a file was created.
    pub(in crate::fs) fn file_made(
        &mut self,
        ino: Ino,
        (dir, lower): (Ino, Option<&TreePath>),
        name: &Name,
    ) {
        let Some(history) = self.edits.as_mut().filter(|history| history.is_on()) else {
            return;
        };
        let now = history.now();
        history.set_active(ino, now, true);
        if history.pending.is_empty() {
            return;
        }
        if let Ok(dir) = self.state.dir_path(dir, lower)
            && let Some(history) = &mut self.edits
        {
            history.claim_pending(&dir.join(name));
        }
    }
}

impl Fs {
    /// Keeps the files that a restore replaced, as edits of their paths.
    pub fn record_restored_edits(&self, saved: Vec<(TreePath, Arc<Content>)>) {
        let mut core = self.writing();
        for (_, content) in &saved {
            core.pin(content);
        }
        let Some(history) = core.edits.as_mut().filter(|v| v.is_on() && !saved.is_empty()) else {
            return;
        };
        let time = history.now();
        let of = |(path, content)| {
            (path, LoggedEdit { time, how: How::Restored, content: Some(content) })
        };
        let saved: Vec<(TreePath, LoggedEdit)> = saved.into_iter().map(of).collect();
        history.append(EditsLogRecord::Kept(saved));
        history.last_edit = time;
        if let Some(notice) = &history.notice {
            notice();
        }
    }
}
