//! Where an edit begins: what a path loses is kept before it is lost.

use std::sync::Arc;

use super::{EditHistory, Going, MANY_EDITS, MOST_PIECES};
use crate::error::FsResult;
use crate::fs::{Core, Extents, Found, Fs, State};
use crate::store::edits_log::{Content, EditsLogRecord, How, Version};
use crate::tree::Node;
use crate::types::{ByteRange, FileKind, Ino, LayerId, Name, Timestamp, TreePath};

/// Names of a file with several under which a version is kept.
const MOST_NAMES: usize = 8;

/// What is about to be done to the content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) enum Touch {
    /// Bytes are written, or room is made.
    Write,
    /// It gets this size.
    Resize(u64),
}

/// A file as content to be kept; none of what is no file, or in too many pieces.
fn content_of(state: &State, ino: Ino, node: &Node, extents: Extents) -> Option<Arc<Content>> {
    if node.kind() != FileKind::File || extents.len() > MOST_PIECES {
        return None;
    }
    Some(Arc::new(Content { ino, node: node.clone(), epoch: state.lower.epoch(), extents }))
}

impl State {
    /// The content of a file, to be kept as a version; none of what is no file, or in too many pieces.
    ///
    /// # Errors
    /// What the base answers.
    pub fn content(&self, found: &Found) -> FsResult<Option<Arc<Content>>> {
        let is_file = self.attr(found).is_some_and(|attr| attr.kind == FileKind::File);
        let Some(ino) = found.ino().filter(|_| is_file) else { return Ok(None) };
        let (node, extents) = self.record(found)?;
        Ok(content_of(self, ino, &node, extents))
    }
}

impl EditHistory {
    /// The time by the clock of the edits.
    pub(super) fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Whether a change of a file of this size is the beginning of an edit.
    fn begins(&mut self, ino: Ino, touch: Touch, size: u64) -> Option<How> {
        let now = self.now();
        let going = self.going.get(&ino).filter(|going| going.goes_on(now));
        let (goes_on, is_new) = (going.is_some(), going.is_some_and(|going| going.is_new));
        let how = match touch {
            // Nothing is lost by it, and what is written then is the edit.
            Touch::Resize(0) if size == 0 => return None,
            // What empties a file writes it anew.
            Touch::Resize(0) => Some(How::Truncated),
            Touch::Resize(to) if to < size && !goes_on => Some(How::Truncated),
            Touch::Resize(_) | Touch::Write => (!goes_on).then_some(How::Written),
        };
        self.set_going(ino, now, is_new && how.is_none());
        how
    }

    fn set_going(&mut self, ino: Ino, now: Timestamp, is_new: bool) {
        self.going.insert(ino, Going { last: now, is_new });
        if self.going.len() >= self.many_going {
            self.going.retain(|_, going| going.goes_on(now));
            // As many again come before it is looked at all of them again.
            self.many_going = MANY_EDITS.max(2 * self.going.len());
        }
    }

    /// Ends the edit of a file: the next change begins another.
    pub(super) fn end_edit(&mut self, ino: Ino) {
        self.going.remove(&ino);
    }

    /// Notes that edits began: what these paths had.
    pub(super) fn keep(&mut self, paths: Vec<TreePath>, how: How, content: Option<Arc<Content>>) {
        let version = Version { time: self.now(), how, content };
        self.note(&EditsLogRecord::Kept(
            paths.into_iter().map(|path| (path, version.clone())).collect(),
        ));
        self.last_edit = version.time;
        if let Some(notice) = &self.notice {
            notice();
        }
    }
}

impl Core {
    /// To be called before the content of a live file of the tree changes.
    pub(in crate::fs) fn before_change(&mut self, ino: Ino, touch: Touch) {
        let size = self.tree.size(ino);
        let Some(versions) = self.edits.as_mut().filter(|versions| versions.is_on()) else {
            return;
        };
        let Some(how) = versions.begins(ino, touch, size) else { return };
        let Some(node) = self.tree.node(ino).cloned() else { return };
        let extents = self.tree.extents(ino).map(|(s, e)| (ByteRange::at(s, e.len), e.source));
        let Some(content) =
            content_of(&self.state, ino, &node, extents.take(MOST_PIECES + 1).collect())
        else {
            return;
        };
        let links = self.tree.links(ino).take(MOST_NAMES);
        let mut paths: Vec<TreePath> =
            links.filter_map(|(dir, name)| self.tree.path_in(dir, name)).collect();
        if paths.is_empty() {
            paths.extend(self.path_of(ino));
        }
        self.keep_content(paths, how, content);
    }

    fn keep_content(&mut self, paths: Vec<TreePath>, how: How, content: Arc<Content>) {
        self.freeze(&content);
        if let Some(versions) = self.edits.as_mut().filter(|_| !paths.is_empty()) {
            versions.keep(paths, how, Some(content));
        }
    }

    /// Bytes to which a version refers are not written again.
    pub(super) fn freeze(&mut self, content: &Content) {
        let upper = self.upper.layer();
        let Some(versions) = &mut self.edits else { return };
        for (range, source) in &content.extents {
            versions.frozen.add(upper, *source, range.len());
        }
    }

    /// The first part of a range of a pool that is not written again, because a version refers to it.
    pub(in crate::fs) fn first_frozen(&self, layer: LayerId, part: ByteRange) -> Option<ByteRange> {
        self.edits.as_ref()?.frozen.first(layer, part)
    }

    /// Whether edits are kept.
    pub(in crate::fs) fn keeps_versions(&self) -> bool {
        self.edits.as_ref().is_some_and(|versions| versions.is_on())
    }

    /// What was found at a place, as content to be kept.
    pub(super) fn content_found(&self, found: &Found) -> Option<Arc<Content>> {
        self.state.content(found).unwrap_or_else(|error| {
            log::debug!("what an edit replaces cannot be kept: {error}");
            None
        })
    }

    /// To be called before a name loses its file.
    pub(in crate::fs) fn before_loss(
        &mut self,
        (dir, lower): (Ino, Option<&TreePath>),
        name: &Name,
        found: &Found,
        how: How,
    ) {
        if !self.keeps_versions() {
            return;
        }
        let Some(content) = self.content_found(found) else { return };
        if let Ok(dir) = self.dir_path(dir, lower) {
            self.keep_content(vec![dir.join(name)], how, content);
        }
    }

    /// To be called before a file is renamed to a path, over another or not.
    pub(in crate::fs) fn before_move(
        &mut self,
        from: &TreePath,
        found: &Found,
        to: &TreePath,
        is_over: bool,
    ) {
        let (Some(ino), Some(versions)) = (found.ino(), self.edits.as_mut()) else { return };
        let now = versions.now();
        let is_new =
            versions.going.get(&ino).is_some_and(|going| going.is_new && going.goes_on(now));
        let is_known = versions.lists.contains_key(from);
        versions.claim(to);
        let has_history = versions.lists.contains_key(to);
        if is_known && !has_history {
            versions.note(&EditsLogRecord::Copied { from: from.clone(), to: to.clone() });
        }
        // What a program writes aside and renames over a file is a way to save that file, and leaves nothing aside.
        if is_new && !is_known && (is_over || has_history) {
            return;
        }
        let Some(content) = self.content_found(found) else { return };
        if is_known || !is_new {
            self.keep_content(vec![from.clone()], How::Moved, content);
            return;
        }
        // Nor if there was none yet. It may be a backup of what it is about to write, though: then somebody comes to the old
        // name.
        self.freeze(&content);
        let Some(versions) = &mut self.edits else { return };
        let version = Version { time: now, how: How::Moved, content: Some(content) };
        versions.leave(from.clone(), version);
        self.let_go_of_pending();
    }

    /// To be called when a directory was renamed.
    pub(in crate::fs) fn dir_moved(&mut self, from: TreePath, to: TreePath) {
        let Some(versions) =
            self.edits.as_mut().filter(|v| v.is_on() && !v.below(&from).is_empty())
        else {
            return;
        };
        versions.note(&EditsLogRecord::Moved { from, to });
    }

    /// To be called when two nodes changed places of which one is a directory.
    pub(in crate::fs) fn dirs_exchanged(&mut self, a: TreePath, b: TreePath) {
        let knows =
            |v: &EditHistory| v.is_on() && !(v.below(&a).is_empty() && v.below(&b).is_empty());
        if let Some(versions) = self.edits.as_mut().filter(|versions| knows(versions)) {
            versions.note(&EditsLogRecord::Exchanged { a, b });
        }
    }

    /// To be called when a file was made.
    pub(in crate::fs) fn file_made(
        &mut self,
        ino: Ino,
        (dir, lower): (Ino, Option<&TreePath>),
        name: &Name,
    ) {
        let Some(versions) = self.edits.as_mut().filter(|versions| versions.is_on()) else {
            return;
        };
        let now = versions.now();
        versions.set_going(ino, now, true);
        if versions.away.is_empty() {
            return;
        }
        if let Ok(dir) = self.state.dir_path(dir, lower)
            && let Some(versions) = &mut self.edits
        {
            versions.claim(&dir.join(name));
        }
    }
}

impl Fs {
    /// Keeps what paths had that a restore replaced.
    pub fn keep_restored(&self, kept: Vec<(TreePath, Arc<Content>)>) {
        let mut core = self.core();
        for (_, content) in &kept {
            core.freeze(content);
        }
        let Some(versions) = core.edits.as_mut().filter(|v| v.is_on() && !kept.is_empty()) else {
            return;
        };
        let time = versions.now();
        let of =
            |(path, content)| (path, Version { time, how: How::Restored, content: Some(content) });
        let kept: Vec<(TreePath, Version)> = kept.into_iter().map(of).collect();
        versions.note(&EditsLogRecord::Kept(kept));
        versions.last_edit = time;
        if let Some(notice) = &versions.notice {
            notice();
        }
    }
}
