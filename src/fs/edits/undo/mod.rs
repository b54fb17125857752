//! Going back to a version of one file, and forward again, in place.
//!
//! An undo is an edit: what stood there is kept, so it can be undone, and it is shown by the rules of a restore: whoever holds
//! the file keeps the content that he had. Repeated undos walk further back, until the file is edited; redo walks forward
//! as far as to what was before the first undo.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{EditHistory, List};
use crate::error::{FsError, FsResult};
use crate::fs::edits::pinned_ranges;
use crate::fs::edits::sharing::push;
use crate::fs::{Core, DataRanges, Found, Fs, Invalidations, Need, State};
use crate::store::edits_log::{Bounds, Content, EditsLogRecord, How};
use crate::store::record::Record;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Meta, Node, Source, Tree};
use crate::types::{FileKind, Ino, Name, Timestamp, TreePath};

/// A version of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionInfo {
    /// Its number: versions count from 1, and no number is given twice.
    pub number: u32,
    /// When the edit began that replaced it.
    pub time: Timestamp,
    /// How that began.
    pub how: How,
    /// Bytes, and attributes; none if there was no file.
    pub file: Option<(u64, Meta)>,
    /// Whether it is what an undo put there, and nothing was edited since.
    pub is_shown: bool,
}

/// Which way, and how far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Back, by so many versions.
    Undo(u32),
    /// Forward, by so many.
    Redo(u32),
}

/// What a step did.
pub struct Stepped {
    /// What the kernel must forget.
    pub invalidations: Invalidations,
    /// The version that is shown now; none if it is what was before the first undo.
    pub number: Option<u32>,
    /// What stood at the path, and what stands there now: bytes, if there is a file.
    pub sizes: (Option<u64>, Option<u64>),
}

/// Why a step could not be made.
#[derive(Debug, PartialEq, Eq)]
pub enum NoStep {
    /// The path has no versions, or only so many in this direction.
    Only(u32),
    /// What stands there is not a regular file.
    NotAFile(FileKind),
    /// The file system answers so.
    Failed(FsError),
}

impl From<FsError> for NoStep {
    fn from(error: FsError) -> NoStep {
        NoStep::Failed(error)
    }
}

/// A version as a state of one file.
pub(in crate::fs) fn state_of(fs: &Fs, content: &Content) -> (State, Found) {
    let current = fs.state().lower;
    let lower = if current.epoch() == content.epoch {
        current
    } else {
        Arc::new(current.in_epoch(content.epoch))
    };
    let mut tree = Tree::new();
    let ino = content.ino;
    // Neither edit needs anything to be there before.
    let put = tree.apply(&Edit::Put { ino, node: Box::new(content.node.clone()) });
    let maps = content.extents.iter().map(|(range, source)| Edit::Map {
        ino,
        range: *range,
        to: Some(*source),
    });
    for result in std::iter::once(put).chain(maps.map(|edit| tree.apply(&edit)).collect::<Vec<_>>())
    {
        if let Err(error) = result {
            log::error!("a version does not fit an empty tree: {}", error.0);
        }
    }
    (State { tree, lower }, Found::Upper(ino, None))
}

impl Fs {
    /// The versions of a path, newest first.
    pub fn versions(&self, path: &TreePath) -> Vec<VersionInfo> {
        let mut core = self.core();
        let Some(versions) = &mut core.edits else { return Vec::new() };
        versions.claim(path);
        let Some(list) = versions.lists.get(path) else { return Vec::new() };
        let info = |entry: &super::Entry| VersionInfo {
            number: entry.number,
            time: entry.version.time,
            how: entry.version.how,
            file: entry
                .version
                .content
                .as_ref()
                .map(|content| (content.node.size(), content.node.meta)),
            is_shown: list.at == Some(entry.number),
        };
        list.entries.iter().rev().map(info).collect()
    }

    /// A version of a path as a state in which there is only its file, and the file in it; none if there is no such version,
    /// or it is that there was no file. Whoever reads it holds [`Fs::read_guard`] from before.
    pub fn version(&self, path: &TreePath, number: u32) -> Option<(State, Found)> {
        let content = {
            let core = self.core();
            let list = core.edits.as_ref()?.lists.get(path)?;
            list.entries.iter().find(|entry| entry.number == number)?.version.content.clone()?
        };
        Some(state_of(self, &content))
    }

    /// Keeps versions from now on, or no more than before. What is beyond the bounds goes with the next edit.
    pub fn set_history(&self, bounds: Bounds) {
        let mut core = self.core();
        let Some(versions) = &mut core.edits else { return };
        if versions.bounds != bounds {
            versions.note(&EditsLogRecord::Bounds(bounds));
        }
        if !versions.is_on() {
            core.give_up_away();
        }
    }

    /// Reads the versions of a head, and keeps what edits replace from now on.
    pub fn open_history(&self, head: &str) {
        let mut versions = EditHistory::open(self.store(), head);
        // Bytes of versions that were given up are written again from here on. After a power cut the log must not tell of these
        // versions any more, so what somebody wrote into it who was killed is brought to the disk first.
        let is_safe =
            versions.log.settle_what_was_found().inspect_err(|error| log::warn!("{error}")).is_ok();
        let contents: Vec<Arc<Content>> = versions.contents().collect();
        let mut core = self.core();
        let layer = core.upper.layer();
        if !is_safe {
            versions.frozen.add(
                layer,
                Source::Pool { layer, offset: 0 },
                core.upper.pool.reserved().1,
            );
        }
        // What an undo brought back may be in two files, and the version may be gone.
        for range in pinned_ranges::shared(&core.tree, layer) {
            versions.frozen.add(layer, Source::Pool { layer, offset: range.start }, range.len());
        }
        core.edits = Some(versions);
        for content in contents {
            core.freeze(&content);
        }
    }

    /// Tells the time of edits by another clock.
    pub fn set_edit_clock(&self, clock: super::Clock) {
        if let Some(versions) = &mut self.core().edits {
            versions.clock = clock;
        }
    }

    /// Says who is told when an edit begins. Called with the lock of the head: it only takes notice.
    pub fn set_edit_notice(&self, notice: Option<Box<dyn Fn() + Send + Sync>>) {
        if let Some(versions) = &mut self.core().edits {
            versions.notice = notice;
        }
    }

    /// The layers of whose content versions were given up since this was last asked.
    pub fn layers_given_up(&self) -> std::collections::BTreeSet<crate::types::LayerId> {
        self.core()
            .edits
            .as_mut()
            .map(|versions| std::mem::take(&mut versions.given_up))
            .unwrap_or_default()
    }

    /// Says that these are to be looked at again.
    pub fn note_layers_given_up(&self, layers: Vec<crate::types::LayerId>) {
        if let Some(versions) = self.core().edits.as_mut() {
            versions.given_up.extend(layers);
        }
    }

    /// Makes sure that the disk knows no version that is not known here, before content goes.
    ///
    /// # Errors
    /// When that cannot be made sure; then nothing may go.
    pub fn secure_versions(&self) -> crate::error::Result<()> {
        let Some(work) =
            self.core().edits.as_mut().map(EditHistory::begin_secure).transpose()?.flatten()
        else {
            return Ok(());
        };
        work.sync().inspect_err(|_| {
            if let Some(versions) = &mut self.core().edits {
                versions.log.not_secured();
            }
        })
    }

    /// Forgets the versions that refer to the base before an epoch: what it was then was given up.
    pub fn forget_versions_before(&self, epoch: crate::types::Epoch) {
        let mut core = self.core();
        let Some(versions) = &mut core.edits else { return };
        for (path, upto) in versions.before(epoch) {
            versions.note(&EditsLogRecord::Dropped { path, upto });
        }
    }

    /// Makes a file what it was, by versions. Without the mount being told: what the kernel must forget is given back. No state is
    /// replaced meanwhile, and the caller holds [`Fs::read_guard`].
    ///
    /// # Errors
    /// [`NoStep`]; then nothing has changed.
    pub fn step(&self, path: &TreePath, step: Step) -> Result<Stepped, NoStep> {
        let wanted = self.core().destination(path, step)?;
        let wanted = match wanted.content {
            Some(content) => Wanted {
                content: Some(self.in_this_epoch(path, wanted.number, content)?),
                ..wanted
            },
            None => wanted,
        };
        // What has nothing to do with room is an outcome, not to be tried again.
        self.with_room(Need::Less, || match self.core().place_version(path, &wanted) {
            Err(NoStep::Failed(error)) => Err(error),
            outcome => Ok(outcome),
        })?
    }

    /// A version whose bytes in the base were replaced by an apply, with these bytes in the upper layer.
    fn in_this_epoch(
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
                push(&mut extents, *range, *source);
                continue;
            }
            for part in DataRanges::of(&state, &found, *range) {
                let part = part?;
                let bytes = state.read_range(&found, part)?;
                let mut core = self.core();
                core.need_bytes(self.store(), part.len())?;
                core.quota.add(part.len());
                let layer = core.upper.layer();
                let offset = core.upper.pool.allocate(content.ino, part, false);
                core.upper.pool.write(offset, &bytes)?;
                written_to.insert(layer);
                push(&mut extents, part, Source::Pool { layer, offset });
            }
        }
        // No edit may ever speak of these bytes, so that nobody else would sync them for the record of the version.
        written_to.into_iter().try_for_each(|layer| self.store().sync_layer(layer))?;
        let content = Arc::new(Content { extents, epoch, ..Content::clone(&content) });
        let mut core = self.core();
        core.freeze(&content);
        if let (Some(number), Some(versions)) = (number, &mut core.edits) {
            let extents = content.extents.clone();
            versions.note(&EditsLogRecord::Remapped { path: path.clone(), number, extents });
        }
        Ok(content)
    }
}

/// What a step leads to.
struct Wanted {
    /// What stood there, and is kept, when this was found out.
    from: Option<Arc<Content>>,
    content: Option<Arc<Content>>,
    /// The version; none for what was before the first undo.
    number: Option<u32>,
}

impl EditHistory {
    fn begin_secure(&mut self) -> crate::error::Result<Option<crate::store::edits_log::LogSync>> {
        let EditHistory { log, known: super::Known { lists, bounds, synced, .. }, .. } = self;
        let was_whole = log.next_number() != u64::MAX;
        let work = log.begin_secure(|| super::all_records(lists, *bounds, *synced))?;
        if !was_whole && self.log.next_number() != u64::MAX {
            self.numbers_anew();
        }
        Ok(work)
    }

    /// The content of all versions, and of what may become one.
    pub(in crate::fs) fn contents(&self) -> impl Iterator<Item = Arc<Content>> {
        let away = self.away.iter().filter_map(|(_, version)| version.content.clone());
        self.known.contents().chain(away)
    }

    /// The versions that refer to the base before an epoch: up to which number, by path.
    fn before(&self, epoch: crate::types::Epoch) -> Vec<(TreePath, u32)> {
        let is_old = |entry: &&super::Entry| {
            entry.version.content.as_ref().is_some_and(|content| {
                content.epoch < epoch && content.extents.iter().any(|(_, source)| source.is_base())
            })
        };
        let newest = |list: &List| list.entries.iter().rev().find(is_old).map(|entry| entry.number);
        self.lists.iter().filter_map(|(path, list)| Some((path.clone(), newest(list)?))).collect()
    }
}

fn same_origin(a: &Node, b: &Node) -> bool {
    match (&a.body, &b.body) {
        (Body::File { origin: a, .. }, Body::File { origin: b, .. }) => a == b,
        _ => false,
    }
}

/// Whether two contents are the same by what the records say.
pub(super) fn same_bytes(a: Option<&Arc<Content>>, b: Option<&Arc<Content>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => {
            let in_base =
                |content: &Content| content.extents.iter().any(|(_, source)| source.is_base());
            a.node.size() == b.node.size()
                && a.extents == b.extents
                && (a.epoch == b.epoch && same_origin(&a.node, &b.node) || !in_base(a))
        }
        (None, None) => true,
        _ => false,
    }
}

impl Core {
    /// What stands at a path, as content: none if nothing does.
    fn file_at(&self, path: &TreePath) -> Result<(Found, Option<Arc<Content>>), NoStep> {
        let found = self.resolve(path)?;
        let Some(attr) = self.attr(&found) else { return Ok((found, None)) };
        if attr.kind != FileKind::File {
            return Err(NoStep::NotAFile(attr.kind));
        }
        let content = self.content_found(&found).ok_or(NoStep::Failed(FsError::FileTooBig))?;
        Ok((found, Some(content)))
    }

    /// Where a step leads. What stands there is kept first, if it is not a version already.
    fn destination(&mut self, path: &TreePath, step: Step) -> Result<Wanted, NoStep> {
        let (_, live) = self.file_at(path)?;
        let Some(versions) = self.edits.as_mut() else { return Err(NoStep::Only(0)) };
        versions.claim(path);
        let Some(list) = versions.lists.get(path) else { return Err(NoStep::Only(0)) };
        let place = |number: u32| list.entries.iter().position(|entry| entry.number == number);
        let shown = list.at.and_then(place).filter(|at| {
            let shown = list.entries.get(*at).and_then(|entry| entry.version.content.as_ref());
            same_bytes(shown, live.as_ref())
        });
        let count = list.entries.len();
        let last = list.entries.back().and_then(|entry| entry.version.content.as_ref());
        let is_last = list.at.is_none() && same_bytes(last, live.as_ref());
        let (at, goal) = match step {
            Step::Undo(by) => {
                let at = shown.unwrap_or(if is_last { count.saturating_sub(1) } else { count });
                (at, at.checked_sub(by as usize))
            }
            Step::Redo(by) => {
                let Some(at) = shown else { return Err(NoStep::Only(0)) };
                (at, Some(at + by as usize).filter(|goal| *goal < count))
            }
        };
        let Some(goal) = goal else {
            let most =
                if matches!(step, Step::Undo(_)) { at } else { count.saturating_sub(at + 1) };
            return Err(NoStep::Only(u32::try_from(most).unwrap_or(u32::MAX)));
        };
        let Some(entry) = list.entries.get(goal) else { return Err(NoStep::Only(0)) };
        let is_top = shown.is_some() && goal + 1 == count;
        let number = (!is_top).then_some(entry.number);
        let wanted = Wanted { from: live.clone(), content: entry.version.content.clone(), number };
        if shown.is_none() {
            self.keep_top(path, live);
        }
        Ok(wanted)
    }

    /// Keeps what is before the first undo.
    fn keep_top(&mut self, path: &TreePath, live: Option<Arc<Content>>) {
        if let Some(content) = &live {
            self.freeze(content);
        }
        let Some(versions) = &mut self.edits else { return };
        let edited = versions.lists.get(path).is_some_and(|list| list.at.is_some());
        // Edited since an undo, behind the back of this path.
        let how = if edited { How::Written } else { How::Undone };
        versions.keep(vec![path.clone()], how, live);
    }

    /// The content of a version that is wanted. Its bytes may be in another place by now, which
    /// [`crate::fs::edits::sharing`] has found.
    fn present_content(&self, path: &TreePath, wanted: &Wanted) -> Option<Arc<Content>> {
        let content = wanted.content.as_ref()?;
        let entries = self.edits.as_ref().and_then(|versions| versions.lists.get(path));
        let mut entries = entries.into_iter().flat_map(|list| &list.entries);
        let entry = entries.find(|entry| Some(entry.number) == wanted.number);
        let is_it = |now: &&Arc<Content>| now.node == content.node;
        let now = entry.and_then(|entry| entry.version.content.as_ref()).filter(is_it);
        Some(Arc::clone(now.unwrap_or(content)))
    }

    /// Puts a version where it is to be.
    fn place_version(&mut self, path: &TreePath, wanted: &Wanted) -> Result<Stepped, NoStep> {
        let (found, live) = self.file_at(path)?;
        // It may take long from there to here, and nobody is kept from writing meanwhile.
        if !same_bytes(live.as_ref(), wanted.from.as_ref()) {
            self.keep_top(path, live.clone());
        }
        let content = self.present_content(path, wanted);
        let sizes = (live.as_ref().map(|c| c.node.size()), content.as_ref().map(|c| c.node.size()));
        let edits = match (&found, &content) {
            (Found::Nothing(_), None) => Vec::new(),
            (Found::Nothing(hides), Some(content)) => {
                self.bring_back(path, hides.clone(), content)?
            }
            (found, Some(content)) => {
                let ino = match found {
                    Found::Base(ino, base, node) => self.copy_up_base(*ino, base, node)?,
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
        let invalidations = self.commit_in_place(edits)?;
        if let Some(versions) = &mut self.edits {
            if let Some(ino) = ino {
                versions.end_edit(ino);
            }
            versions.note(&EditsLogRecord::At { path: path.clone(), number: wanted.number });
        }
        Ok(Stepped { invalidations, number: wanted.number, sizes })
    }

    /// The edits that make a file anew which is gone, and the directories that are gone above it.
    fn bring_back(
        &mut self,
        path: &TreePath,
        mut hides: crate::tree::Hides,
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
            Found::Base(ino, base, node) => self.copy_up_base(ino, &base, &node)?,
            Found::Upper(ino, _) if self.tree.node(ino).is_some() => ino,
            Found::Upper(..) | Found::Nothing(_) => return Err(FsError::NotFound),
        };
        let mut parent = self.meta(dir)?;
        let mut edits = vec![self.touch_dir(dir, i32::from(!missing.is_empty()))?];
        let store = Arc::clone(self.lower.store());
        let count = missing.len();
        for (depth, name) in missing.into_iter().enumerate() {
            let ino = store.identities().lock().fresh()?;
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
        let ino = store.identities().lock().fresh()?;
        let mut node = content.node.clone();
        node.meta = Meta { nlink: 1, mtime: now, ctime: now, ..node.meta };
        edits.extend(put_file(ino, node, content));
        edits.push(Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, hides }) });
        Ok(edits)
    }

    /// Records edits that the kernel did not ask for, and shows what comes of them.
    fn commit_in_place(&mut self, edits: Vec<Edit>) -> FsResult<Invalidations> {
        if edits.is_empty() {
            return Ok(Invalidations::default());
        }
        let mut after = self.state.clone();
        for edit in &edits {
            after.tree.apply(edit).map_err(|misfit| FsError::Damage(misfit.0))?;
        }
        let record = Record::Edits(edits);
        Ok(self.install(after, false, |core| core.append(&record))?.0)
    }
}

/// The edits that give a file a record and content.
fn put_file(ino: Ino, node: Node, content: &Content) -> impl Iterator<Item = Edit> {
    let maps = content.extents.iter().map(move |(range, source)| Edit::Map {
        ino,
        range: *range,
        to: Some(*source),
    });
    std::iter::once(Edit::Put { ino, node: Box::new(node) }).chain(maps)
}
