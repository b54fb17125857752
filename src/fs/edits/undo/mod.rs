//! Undo and redo of the edits of one file, in place.
//!
//! An undo is an edit itself: the file before it is kept, so the undo can be undone. It is
//! installed like a restore: a process that has the file open keeps the content that it had.
//! Repeated undos go further back until the file is edited. Redo goes forward, at most to the file
//! before the first undo.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::content::{push_extent, same_bytes, state_of};
use super::path_history::{Entry, PathHistory};
use super::{Clock, EditHistory, LogMark, pinned_ranges};
use crate::error::{FsError, FsResult};
use crate::fs::merged::answers;
use crate::fs::writing::Writing;
use crate::fs::{Core, DataRanges, Found, Fs, Invalidations, Need, State};
use crate::store::edits_log::{Bounds, Content, DueSync, EditsLogRecord, How};
use crate::store::record::Record;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Hides, Meta, Node, Source};
use crate::types::{ByteRange, Epoch, FileKind, Ino, LayerId, Name, Timestamp, TreePath};

/// An edit of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EditInfo {
    /// Its number, from 1.
    pub number: u32,
    /// When it began.
    pub time: Timestamp,
    /// How it began.
    pub how: How,
    /// Size in bytes and attributes of the file before it; `None` if there was no file.
    pub file: Option<(u64, Meta)>,
    /// Whether an undo made this the current content, and no edit followed.
    pub is_current: bool,
}

/// A direction and a number of edits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Undo so many edits.
    Undo(u32),
    /// Redo so many edits.
    Redo(u32),
}

/// The result of a step.
pub struct Stepped {
    /// The invalidations to send to the kernel.
    pub invalidations: Invalidations,
    /// The file is now as before this edit; `None` if it is as before the first undo.
    pub number: Option<u32>,
    /// Sizes before and now in bytes, `None` without a file.
    pub sizes: (Option<u64>, Option<u64>),
}

/// Why a step is not possible.
#[derive(Debug, PartialEq, Eq)]
pub enum StepError {
    /// The path has only so many edits in this direction.
    Only(u32),
    /// The path is not a regular file.
    NotAFile(FileKind),
    /// A file operation failed.
    Failed(FsError),
}

impl From<FsError> for StepError {
    fn from(error: FsError) -> StepError {
        StepError::Failed(error)
    }
}

impl Fs {
    /// The edits of a path, newest first.
    pub fn history(&self, path: &TreePath) -> Vec<EditInfo> {
        let mut core = self.writing();
        let Some(history) = &mut core.edits else { return Vec::new() };
        history.claim_pending(path);
        let Some(list) = history.by_path.get(path) else { return Vec::new() };
        let info = |entry: &Entry| EditInfo {
            number: entry.number,
            time: entry.edit.time,
            how: entry.edit.how,
            file: entry
                .edit
                .content
                .as_ref()
                .map(|content| (content.node.size(), content.node.meta)),
            is_current: list.undone_to == Some(entry.number),
        };
        list.entries.iter().rev().map(info).collect()
    }

    /// The file before an edit: a state with this single file, and the file in it. `None` if there
    /// is no such edit, or there was no file before it. To read it, hold [`Fs::read_guard`] from
    /// before this call.
    pub fn before_edit(&self, path: &TreePath, number: u32) -> Option<(State, Found)> {
        let content = {
            let core = self.core();
            let list = core.edits.as_ref()?.by_path.get(path)?;
            list.entries.iter().find(|entry| entry.number == number)?.edit.content.clone()?
        };
        Some(state_of(self, &content))
    }

    /// Sets how much is kept. With 0 edits, all histories are dropped at once. Otherwise a new
    /// bound on their number takes effect with the next edit of a path, and one on bytes with the
    /// next maintenance.
    pub fn set_edit_bounds(&self, bounds: Bounds) {
        let mut core = self.writing();
        let Some(history) = &mut core.edits else { return };
        if history.bounds != bounds {
            history.append(EditsLogRecord::Bounds(bounds));
        }
        if !history.is_on() {
            core.drop_all_pending();
        }
    }

    /// Reads the histories of a head, and records edits from now on.
    pub fn open_edits(&self, head: &str) {
        let mut history = EditHistory::open(self.store(), head);
        // From here on, the bytes of dropped edits may be overwritten. After a power cut the log
        // must not name those edits again. So records that a killed process appended are synced
        // first.
        let is_safe = history.log.sync_found().inspect_err(|error| log::warn!("{error}")).is_ok();
        let contents: Vec<Arc<Content>> = history.contents().collect();
        let mut core = self.writing();
        let layer = core.upper.layer();
        if !is_safe {
            history.pinned.fix(layer, core.upper.pool.reserved().1);
        }
        // After an undo two files may refer to the same bytes, and the edit may be gone.
        for range in pinned_ranges::shared(&core.tree, layer) {
            history.pinned.add(layer, Source::Pool { layer, offset: range.start }, range.len());
        }
        core.edits = Some(history);
        for content in contents {
            core.pin(&content);
        }
    }

    /// Sets the clock for the times of edits.
    pub fn set_edit_clock(&self, clock: Clock) {
        if let Some(history) = &mut self.writing().edits {
            history.clock = clock;
        }
    }

    /// Sets a function that is called when an edit begins. It is called under the lock of the head
    /// and must return at once.
    pub fn set_edit_notice(&self, notice: Option<Box<dyn Fn() + Send + Sync>>) {
        if let Some(history) = &mut self.writing().edits {
            history.notice = notice;
        }
    }

    /// Takes the layers with content that dropped edits referred to.
    pub fn layers_with_dropped_edits(&self) -> BTreeSet<LayerId> {
        self.writing()
            .edits
            .as_mut()
            .map(|history| std::mem::take(&mut history.dropped_layers))
            .unwrap_or_default()
    }

    /// Gives back layers that could not be trimmed yet.
    pub fn note_layers_with_dropped_edits(&self, layers: Vec<LayerId>) {
        if let Some(history) = self.writing().edits.as_mut() {
            history.dropped_layers.extend(layers);
        }
    }

    /// Syncs the log before content is freed, so that no dropped edit comes back after a power cut.
    ///
    /// # Errors
    /// The sync failed. Then nothing may be freed.
    pub fn secure_edits(&self) -> crate::error::Result<()> {
        self.secure_edits_to().map(|_| ())
    }

    /// As [`Fs::secure_edits`]. Returns up to where the log is synced, if there is one.
    ///
    /// # Errors
    /// As [`Fs::secure_edits`].
    pub(in crate::fs) fn secure_edits_to(&self) -> crate::error::Result<Option<LogMark>> {
        let mut core = self.writing();
        let Some(history) = &mut core.edits else { return Ok(None) };
        history.log.request_rewrite_if_old();
        core.write_edits();
        let Some(history) = &core.edits else { return Ok(None) };
        let (due, mark) = (history.log.due_sync(), history.log_mark());
        let work = core.released(|| due.map_or(Ok(None), DueSync::open))?;
        drop(core);
        if let Some(work) = work {
            work.sync()?;
            self.writing().edits.iter_mut().for_each(|history| history.log.secured(&work));
        }
        Ok(Some(mark))
    }

    /// Drops the edits that refer to the base before an epoch, because its pre-images were dropped.
    pub fn forget_edits_before(&self, epoch: Epoch) {
        let mut core = self.writing();
        let Some(history) = &mut core.edits else { return };
        for (path, upto) in history.before(epoch) {
            history.append(EditsLogRecord::Dropped { path, upto });
        }
    }

    /// Undoes or redoes edits of a file. The caller sends the returned invalidations to the kernel,
    /// holds [`Fs::read_guard`], and keeps the state from being replaced meanwhile.
    ///
    /// # Errors
    /// `StepError`. Nothing has changed then.
    pub fn step(&self, path: &TreePath, step: Step) -> Result<Stepped, StepError> {
        let wanted = self.change(|core| core.resolve_step(path, step))?;
        let wanted = match wanted.content {
            Some(content) => Wanted {
                content: Some(self.in_current_epoch(path, wanted.number, content)?),
                ..wanted
            },
            None => wanted,
        };
        // Only a failed file operation can be tried again after making room.
        self.with_room(Need::Less, || {
            match self.change(|core| core.install_content(path, &wanted)) {
                Err(StepError::Failed(error)) => Err(error),
                outcome => Ok(outcome),
            }
        })?
    }

    /// A content that can be installed over the present base. If an apply replaced its bytes in the
    /// base, they are copied into the upper layer.
    fn in_current_epoch(
        &self,
        path: &TreePath,
        number: Option<u32>,
        content: Arc<Content>,
    ) -> FsResult<Arc<Content>> {
        let epoch = self.state().lower.epoch();
        if content.epoch == epoch || content.extents.iter().all(|(_, source)| !source.is_base()) {
            return Ok(content);
        }
        let (state, found) = state_of(self, &content);
        let (mut extents, mut written_to) = (Vec::new(), BTreeSet::new());
        for (range, source) in &content.extents {
            if !source.is_base() {
                push_extent(&mut extents, *range, *source);
                continue;
            }
            for part in DataRanges::of(&state, &found, *range) {
                let part = part?;
                let bytes = state.read_range(&found, part)?;
                let mut core = self.retry_measured(|| {
                    let core = self.writing();
                    core.need_bytes(part.len()).map(|()| core)
                })?;
                core.quota.add(part.len());
                let layer = core.upper.layer();
                let offset = core.upper.pool.allocate(content.ino, part, false);
                let write = core.upper.pool.begin_write(ByteRange::at(offset, part.len()));
                core.released(|| write.write(offset, &bytes))?;
                written_to.insert(layer);
                push_extent(&mut extents, part, Source::Pool { layer, offset });
            }
        }
        // Perhaps no journal record ever refers to these bytes, and then no other sync includes
        // them.
        written_to.into_iter().try_for_each(|layer| self.store().sync_layer(layer))?;
        let content = Arc::new(Content { extents, epoch, ..Content::clone(&content) });
        let mut core = self.writing();
        core.pin(&content);
        if let (Some(number), Some(history)) = (number, &mut core.edits) {
            let extents = content.extents.clone();
            history.append(EditsLogRecord::Remapped { path: path.clone(), number, extents });
        }
        Ok(content)
    }
}

/// The file after a step.
struct Wanted {
    /// The file when the step was resolved. It is kept as an edit.
    from: Option<Arc<Content>>,
    content: Option<Arc<Content>>,
    /// The edit; `None` for the file before the first undo.
    number: Option<u32>,
}

impl EditHistory {
    /// The contents of all edits and pending backups.
    fn contents(&self) -> impl Iterator<Item = Arc<Content>> {
        let pending = self.pending.iter().filter_map(|(_, edit)| edit.content.clone());
        self.histories.contents().chain(pending)
    }

    /// Returns a function that collects the contents as they are now. It needs no lock.
    pub(in crate::fs) fn contents_later(&self) -> impl FnOnce() -> Vec<Arc<Content>> + use<> {
        let (histories, pending) = (self.histories.snapshot(), self.pending.clone());
        move || {
            let pending = pending.iter().filter_map(|(_, edit)| edit.content.clone());
            histories.contents().chain(pending).collect()
        }
    }

    /// By path, the newest edit that refers to the base before an epoch.
    fn before(&self, epoch: Epoch) -> Vec<(TreePath, u32)> {
        let is_old = |entry: &&Entry| {
            entry.edit.content.as_ref().is_some_and(|content| {
                content.epoch < epoch && content.extents.iter().any(|(_, source)| source.is_base())
            })
        };
        let newest =
            |list: &PathHistory| list.entries.iter().rev().find(is_old).map(|entry| entry.number);
        self.by_path.iter().filter_map(|(path, list)| Some((path.clone(), newest(list)?))).collect()
    }
}

impl Core {
    /// The file at a path and its content; `None` if there is no file.
    fn file_at(&self, path: &TreePath) -> Result<(Found, Option<Arc<Content>>), StepError> {
        let found = self.resolve(path)?;
        let Some(attr) = self.attr(&found) else { return Ok((found, None)) };
        if attr.kind != FileKind::File {
            return Err(StepError::NotAFile(attr.kind));
        }
        let content = self.content_found(&found)?.ok_or(StepError::Failed(FsError::FileTooBig))?;
        Ok((found, Some(content)))
    }

    /// Finds the content that a step leads to. First keeps the present file, if no edit has it.
    fn resolve_step(&mut self, path: &TreePath, step: Step) -> Result<Wanted, StepError> {
        let (_, live) = self.file_at(path)?;
        let Some(history) = self.edits.as_mut() else { return Err(StepError::Only(0)) };
        history.claim_pending(path);
        let Some(list) = history.by_path.get(path) else { return Err(StepError::Only(0)) };
        let place = |number: u32| list.entries.iter().position(|entry| entry.number == number);
        let shown = list.undone_to.and_then(place).filter(|at| {
            let shown = list.entries.get(*at).and_then(|entry| entry.edit.content.as_ref());
            same_bytes(shown, live.as_ref())
        });
        let count = list.entries.len();
        let last = list.entries.back().and_then(|entry| entry.edit.content.as_ref());
        let is_last = list.undone_to.is_none() && same_bytes(last, live.as_ref());
        let (at, goal) = match step {
            Step::Undo(by) => {
                let at = shown.unwrap_or(if is_last { count.saturating_sub(1) } else { count });
                (at, at.checked_sub(by as usize))
            }
            Step::Redo(by) => {
                let Some(at) = shown else { return Err(StepError::Only(0)) };
                (at, Some(at + by as usize).filter(|goal| *goal < count))
            }
        };
        let Some(goal) = goal else {
            let most =
                if matches!(step, Step::Undo(_)) { at } else { count.saturating_sub(at + 1) };
            return Err(StepError::Only(u32::try_from(most).unwrap_or(u32::MAX)));
        };
        let Some(entry) = list.entries.get(goal) else { return Err(StepError::Only(0)) };
        let is_top = shown.is_some() && goal + 1 == count;
        let number = (!is_top).then_some(entry.number);
        let wanted = Wanted { from: live.clone(), content: entry.edit.content.clone(), number };
        if shown.is_none() {
            self.save_top(path, live);
        }
        Ok(wanted)
    }

    /// Keeps the file before the first undo.
    fn save_top(&mut self, path: &TreePath, live: Option<Arc<Content>>) {
        if let Some(content) = &live {
            self.pin(content);
        }
        let Some(history) = &mut self.edits else { return };
        let edited = history.by_path.get(path).is_some_and(|list| list.undone_to.is_some());
        // The file was edited since the undo, by another of its names.
        let how = if edited { How::Written } else { How::Undone };
        history.record_edit(vec![path.clone()], how, live);
    }

    /// The wanted content with its present extents, which [`super::sharing`] may have changed since
    /// the step was resolved.
    fn current_content(&self, path: &TreePath, wanted: &Wanted) -> Option<Arc<Content>> {
        let content = wanted.content.as_ref()?;
        let entries = self.edits.as_ref().and_then(|history| history.by_path.get(path));
        let mut entries = entries.into_iter().flat_map(|list| &list.entries);
        let entry = entries.find(|entry| Some(entry.number) == wanted.number);
        let is_it = |now: &&Arc<Content>| now.node == content.node;
        let now = entry.and_then(|entry| entry.edit.content.as_ref()).filter(is_it);
        Some(Arc::clone(now.unwrap_or(content)))
    }
}

impl Writing<'_> {
    /// Commits tree edits that the kernel did not request, and returns what it must invalidate.
    /// `before` is called when the base has answered all questions.
    fn commit_in_place(
        &mut self,
        edits: Vec<Edit>,
        before: impl FnOnce(&mut Core),
    ) -> FsResult<Invalidations> {
        if edits.is_empty() {
            answers::check_complete()?;
            before(self);
            return Ok(Invalidations::default());
        }
        let mut after = self.state.clone();
        for edit in &edits {
            after.tree.apply(edit).map_err(|misfit| FsError::Damage(misfit.0))?;
        }
        let record = Record::Edits(edits);
        let invalidations = self.install(&after, false, |core| {
            answers::check_complete()?;
            before(core);
            core.append(&record)
        })?;
        self.check_journal();
        answers::note_committed();
        Ok(invalidations)
    }

    /// Installs the wanted content at its path.
    fn install_content(&mut self, path: &TreePath, wanted: &Wanted) -> Result<Stepped, StepError> {
        let (found, live) = self.file_at(path)?;
        let content = self.current_content(path, wanted);
        let sizes = (live.as_ref().map(|c| c.node.size()), content.as_ref().map(|c| c.node.size()));
        let edits = match (&found, &content) {
            (Found::Nothing(_), None) => Vec::new(),
            (Found::Nothing(hides), Some(content)) => {
                self.recreate_file(path, hides.clone(), content)?
            }
            (found, Some(content)) => {
                let ino = match found {
                    Found::Base(ino, base, node) => self.copy_up_without_walk(*ino, base, node)?,
                    Found::Upper(ino, _) => *ino,
                    Found::Nothing(_) => return Err(FsError::NotFound.into()),
                };
                let mut node =
                    self.tree.node(ino).map(|node| Node::clone(node)).ok_or(FsError::NotFound)?;
                node.body = content.node.body.clone();
                node.meta.mtime = clock::now();
                node.meta.ctime = node.meta.mtime;
                std::iter::once(Edit::Resize { ino, size: 0 })
                    .chain(put_file(ino, node, content))
                    .collect()
            }
            (found, None) => self.stage_unlink(path, found)?,
        };
        let ino = found.ino();
        let invalidations = self.commit_in_place(edits, |core| {
            // The lock was released since the step was resolved, so the file may have changed.
            if !same_bytes(live.as_ref(), wanted.from.as_ref()) {
                core.save_top(path, live);
            }
        })?;
        if let Some(history) = &mut self.edits {
            if let Some(ino) = ino {
                history.end_edit(ino);
            }
            history.append(EditsLogRecord::At { path: path.clone(), number: wanted.number });
        }
        Ok(Stepped { invalidations, number: wanted.number, sizes })
    }

    /// The tree edits that create a removed file again, with the removed directories above it.
    fn recreate_file(
        &mut self,
        path: &TreePath,
        mut hides: Hides,
        content: &Content,
    ) -> FsResult<Vec<Edit>> {
        let (above, name) = path.split().ok_or(FsError::IsADirectory)?;
        let now = clock::now();
        let mut dir = self.state.resolve(&TreePath::root())?;
        let mut missing: Vec<Name> = Vec::new();
        let mut at = TreePath::root();
        for part in above.names() {
            at = at.join(&part);
            if !missing.is_empty() {
                missing.push(part);
                continue;
            }
            let found = self.state.resolve(&at)?;
            match &found {
                Found::Nothing(of) => {
                    hides = of.clone();
                    missing.push(part);
                }
                found if self.as_dir(found).is_none() => return Err(FsError::NotADirectory),
                _ => dir = found,
            }
        }
        let mut dir = match dir {
            Found::Base(ino, base, node) => self.copy_up_without_walk(ino, &base, &node)?,
            Found::Upper(ino, _) if self.tree.node(ino).is_some() => ino,
            Found::Upper(..) | Found::Nothing(_) => return Err(FsError::NotFound),
        };
        let mut parent = self.meta(dir)?;
        let mut edits = vec![self.touch_dir(dir, i32::from(!missing.is_empty()))?];
        let store = Arc::clone(self.lower.store());
        let count = missing.len();
        for (depth, name) in missing.into_iter().enumerate() {
            let ino = self.released(|| store.identities().lock().fresh())?;
            let nlink = if depth + 1 < count { 3 } else { 2 };
            parent = Meta { nlink, atime: now, mtime: now, ctime: now, ..parent };
            let node = Node { meta: parent, xattrs: None, body: Body::Dir { base: None } };
            edits.push(Edit::Put { ino, node: Box::new(node) });
            edits.push(Edit::Dentry {
                dir,
                name,
                to: Some(Dentry::Child { ino, hides: hides.take() }),
            });
            dir = ino;
        }
        let ino = self.released(|| store.identities().lock().fresh())?;
        let mut node = content.node.clone();
        node.meta = Meta { nlink: 1, mtime: now, ctime: now, ..node.meta };
        edits.extend(put_file(ino, node, content));
        edits.push(Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, hides }) });
        Ok(edits)
    }
}

/// The tree edits that set the record and content of a file.
fn put_file(ino: Ino, node: Node, content: &Content) -> impl Iterator<Item = Edit> {
    let maps = content.extents.iter().map(move |(range, source)| Edit::Map {
        ino,
        range: *range,
        to: Some(*source),
    });
    std::iter::once(Edit::Put { ino, node: Box::new(node) }).chain(maps)
}
