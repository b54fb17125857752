//! Restoring single files and directories: a state that is as another one at some paths, and as it was everywhere else.
//!
//! The difference between the two states at the paths is applied to the present tree, so the cost is what differs. What
//! must be decided is which node a name gets, because a node has one content for all its names:
//!
//! * The node that it was, with its number, if nothing outside of the paths is that node now.
//! * If something is (the file was moved away, or it is a hard link of a name outside), the name gets a node of its own, with a
//!   fresh number: the rest of the tree stays as it is. A hard link is joined again only if both its ends are what they were.
//!
//! Names of the base that need no record are shown again by taking away what hides them.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::error::{Attempt, Error, FsError, FsResult, Kind, Result};
use crate::fs::{Extents, Found, State};
use crate::store::content::pool::PoolWriter;
use crate::store::record::{HeadRecord, LayerKind, OpVerb, Seal};
use crate::sys::clock;
use crate::timeline::diff;
use crate::timeline::diff::{PathChange, What};
use crate::timeline::mounts::Mounts;
use crate::timeline::restore::base_paths::{BasePaths, places};
use crate::timeline::restore::{ChangeSink, RestoreOutcome};
use crate::timeline::{Target, Timeline, verb_text};
use crate::tree::{Body, Dentry, Edit, Hides, Meta, Misfit, Node, Source};
use crate::types::{Epoch, FileKind, Ino, Name, TreePath};

/// How often a restore of single paths is begun anew because the tree has changed meanwhile.
const COPY_TRIES: u32 = 8;

impl Timeline {
    /// Makes the tree what `to` is at some paths; the rest of it stays.
    ///
    /// # Errors
    /// A path that is in neither tree, or below what is no directory now; else as [`Timeline::restore`].
    pub fn restore_paths(
        &self,
        verb: OpVerb,
        to: Target,
        paths: &[TreePath],
        what: String,
        (mounts, list): (Mounts, ChangeSink<'_>),
    ) -> Result<RestoreOutcome> {
        let _operation = self.lock_operation();
        let attempt = || format!("{} {what}", verb_text(verb));
        self.flush()?;
        let then = self.state_of(to)?;
        let automatic = |message| Seal { name: None, message, time: clock::now(), automatic: true };
        for tries in 1.. {
            let now = self.fs.state();
            check_paths(&now, &then, paths).map_err(|e| e.during(attempt()))?;
            let detached = self.detached_mounts((&now, &then), paths, mounts)?;
            let epoch = self.epoch();
            let below = Some(self.fs.upper_layer());
            let mut next =
                self.store.create_layer(below, &self.head, epoch, LayerKind::Continues)?;
            let above = next.layer();
            let copies = Copies::make(&now, &then, paths, &mut next.pool).attempt(attempt)?;
            let sought = BasePaths::of(&now, &then, paths).attempt(attempt)?;
            let mut fresh = || Ok(self.store.identities().lock().fresh()?);
            let before = format!("before {}", attempt());
            let changed = self.fs.seal_and_change(next, automatic(before.clone()), |now| {
                mix(now, &then, paths, (&copies, &sought), &mut fresh)
            })?;
            // First of all, and whatever fails then.
            let told = changed
                .to
                .as_ref()
                .map_or(Ok(()), |(_, invalidations)| self.kernel().invalidate(invalidations));
            let is_shown = changed.to.is_ok();
            let during = |error: Error| match is_shown {
                true => error.after(format!("{} was done", attempt())),
                false => error,
            };
            let secured = changed.sealed.and_then(|()| {
                self.with_reserve(|| {
                    self.store.set_head(&self.head, &HeadRecord { layer: above })
                })?;
                self.trees.lock().keep(changed.layer, changed.from.tree.clone());
                self.log_operation(
                    OpVerb::Seal,
                    before,
                    Target { layer: Some(changed.layer), epoch },
                )
                .map(drop)
            });
            let shown = match changed.to {
                // Content of an older base is needed that was not there to be seen when it was copied, or the base must be read.
                Err(FsError::Stale) if tries < COPY_TRIES => {
                    secured?;
                    continue;
                }
                // All that changes is one record, so that a kill leaves all of it or nothing.
                Err(FsError::Store(error)) if error.errno == Some(libc::EFBIG) => {
                    return Err(error
                        .during(attempt())
                        .hint("restore fewer paths at once, or the whole tree"));
                }
                shown => shown.attempt(attempt)?.0,
            };
            let listed = self.list_restored(&changed.from, &shown, list);
            secured.map_err(during)?;
            let after = self.with_reserve(|| self.seal(automatic(attempt()))).map_err(during)?;
            let op = self
                .log_operation(verb, what.clone(), Target { layer: Some(after), epoch })
                .map_err(during)?;
            told.map_err(during)?;
            let before = Some(changed.layer);
            let undo = self.operation_before(op, before);
            listed.map_err(during)?;
            return Ok(RestoreOutcome { before, undo, detached });
        }
        Err(Error::damage(attempt(), "the loop has no end"))
    }
}

/// Refuses paths that are in neither state.
fn check_paths(now: &State, then: &State, paths: &[TreePath]) -> Result<()> {
    for path in paths {
        let found = |state: &State| state.resolve(path).attempt(|| format!("find '{path}'"));
        if found(now)?.ino().is_none() && found(then)?.ino().is_none() {
            let why = "neither the checkpoint nor the tree has it";
            return Err(Error::new(Kind::NoStore, format!("find '{path}'"), why)
                .hint("'jailfs show ID:PATH' lists what a checkpoint has"));
        }
    }
    Ok(())
}

/// Gives numbers that no node has.
type Fresh<'a> = &'a mut dyn FnMut() -> FsResult<Ino>;

/// Content of files of the base that only the epoch of the other state shows, written anew.
#[derive(Default)]
struct Copies(HashMap<TreePath, Extents>);

impl Copies {
    /// Copies what will be needed into a pool.
    fn make(
        now: &State,
        then: &State,
        paths: &[TreePath],
        pool: &mut PoolWriter,
    ) -> FsResult<Copies> {
        let mut copies = Copies::default();
        if now.lower.epoch() == then.lower.epoch() {
            return Ok(copies);
        }
        let foreign = Foreign::between(now, then);
        for change in diff::changes_at(now, then, paths)? {
            if let Some(size) = foreign.needs_copy(then, &change.new)? {
                let extents = copy(then, &change.new, size, pool)?;
                copies.0.insert(change.path, extents);
            }
        }
        Ok(copies)
    }
}

fn copy(state: &State, found: &Found, size: u64, pool: &mut PoolWriter) -> FsResult<Extents> {
    let ino = found.ino().ok_or(FsError::NotFound)?;
    let mut extents = Extents::new();
    for range in state.data(found) {
        let range = range?;
        let bytes = state.read_range(found, range)?;
        if bytes.len() as u64 != range.len() {
            return Err(FsError::Damage("a file is shorter than its record says"));
        }
        if bytes.iter().any(|byte| *byte != 0) {
            let offset = pool.allocate(ino, range, range.end == size);
            pool.write(offset, &bytes)?;
            extents.push((range, Source::Pool { layer: pool.layer(), offset }));
        }
    }
    Ok(extents)
}

/// The paths of the base that are not the same in the epochs of two states.
pub(in crate::timeline) struct Foreign {
    same_epoch: bool,
    touched: BTreeSet<TreePath>,
}

impl Foreign {
    pub(in crate::timeline) fn between(now: &State, then: &State) -> Foreign {
        let same_epoch = now.lower.epoch() == then.lower.epoch();
        let mut touched = BTreeSet::new();
        if !same_epoch {
            touched.extend(now.lower.touched_since());
            touched.extend(then.lower.touched_since());
        }
        Foreign { same_epoch, touched }
    }

    fn is_same(&self, path: &TreePath) -> bool {
        self.same_epoch || !self.touched.contains(path)
    }

    /// Nodes that the present base may have at paths that no record tells. The other state may not have seen them in the base
    /// at all, if an apply came between; and the record of a node without content does not tell where it was.
    pub(in crate::timeline) fn unseen(
        &self,
        now: &State,
        then: &State,
        changes: &[PathChange],
    ) -> HashSet<Ino> {
        let has_no_path = |ino: Ino| {
            then.tree.node(ino).is_some_and(|node| match &node.body {
                Body::File { origin, .. } => origin.is_none(),
                Body::Symlink { .. } | Body::Special => true,
                Body::Dir { base } => base.is_none(),
            })
        };
        // A number of our own is in the base only if an apply brought it there.
        let may_be_there = |ino: Ino| ino < Ino::OWN_RANGE || now.lower.epoch() > Epoch(0);
        let is_unseen = |ino: Ino| {
            now.tree.node(ino).is_none()
                && may_be_there(ino)
                && (!self.same_epoch || has_no_path(ino))
        };
        changes.iter().filter_map(|change| change.new.ino()).filter(|ino| is_unseen(*ino)).collect()
    }

    /// The size of a file whose content cannot be referred to in the base as it is seen now.
    fn needs_copy(&self, then: &State, found: &Found) -> FsResult<Option<u64>> {
        if self.same_epoch || found.ino().is_none() {
            return Ok(None);
        }
        let (node, extents) = then.record(found)?;
        let Body::File { size, origin } = &node.body else { return Ok(None) };
        let in_base = extents.iter().any(|(_, source)| matches!(source, Source::Base { .. }));
        let is_same =
            origin.as_ref().is_some_and(|o| self.is_same(&o.path)) && node.meta.nlink == 1;
        Ok((in_base && !is_same).then_some(*size))
    }
}

/// The edits that make `now` as `then` at the paths, and what comes of them.
///
/// # Errors
/// ENOTDIR if a directory that leads to a path is something else now; ESTALE if `copies` lacks content, or `sought` the places of
/// a node, because the tree has changed since they were made.
fn mix(
    now: &State,
    then: &State,
    paths: &[TreePath],
    (copies, sought): (&Copies, &BasePaths),
    fresh: Fresh<'_>,
) -> FsResult<(Vec<Edit>, State)> {
    let changes = diff::changes_by(now, then, paths, &|state, wanted| sought.tell(state, wanted))?;
    let foreign = Foreign::between(now, then);
    sought.tell(now, &foreign.unseen(now, then, &changes))?;
    let mut mixer = Mixer {
        now,
        then,
        paths,
        copies,
        sought,
        foreign,
        state: now.clone(),
        edits: Vec::new(),
        placed: HashMap::new(),
        joined: HashSet::new(),
        touched: BTreeMap::new(),
    };
    for change in changes.iter().rev() {
        if matches!(change.what, What::Deleted | What::Type) {
            mixer.remove(change)?;
        }
    }
    for change in &changes {
        mixer.bring(change, fresh)?;
    }
    mixer.finish_dirs(&changes)?;
    Ok((mixer.edits, mixer.state))
}

struct Mixer<'a> {
    now: &'a State,
    then: &'a State,
    paths: &'a [TreePath],
    copies: &'a Copies,
    sought: &'a BasePaths,
    foreign: Foreign,
    /// What has come of it so far.
    state: State,
    edits: Vec<Edit>,
    /// Which node the names of a file get.
    placed: HashMap<Ino, Ino>,
    /// Those that are hard links of a name outside again, and stay what they are.
    joined: HashSet<Ino>,
    /// Directories whose names changed, and by how many subdirectories.
    touched: BTreeMap<TreePath, i32>,
}

impl Mixer<'_> {
    fn is_inside(&self, path: &TreePath) -> bool {
        self.paths.iter().any(|p| path.starts_with(p))
    }

    fn edit(&mut self, edit: Edit) -> FsResult<()> {
        self.state.tree.apply(&edit).map_err(|Misfit(what)| FsError::Damage(what))?;
        self.edits.push(edit);
        Ok(())
    }

    /// Covers a node of the base and the directories above it.
    fn copy_up(&mut self, path: &TreePath) -> FsResult<Ino> {
        let (ino, node) =
            self.state.lower.lookup(path)?.ok_or_else(|| self.state.lower.drift(path))?;
        for edit in self.state.copy_up_edits(ino, path, &node)? {
            self.edit(edit)?;
        }
        Ok(ino)
    }

    /// The directory that holds a path, covered, and the name in it.
    fn dir_of(&mut self, path: &TreePath) -> FsResult<(Ino, Option<TreePath>, Name)> {
        let (above, name) = path.split().ok_or(FsError::NotPermitted)?;
        let found = self.state.resolve(&above)?;
        let (ino, lower) = self.state.as_dir(&found).ok_or(FsError::NotADirectory)?;
        if let Found::Base(_, path, _) = &found {
            self.copy_up(path)?;
        }
        Ok((ino, lower, name))
    }

    fn touch(&mut self, path: &TreePath, subdirs: i32) {
        if let Some((above, _)) = path.split() {
            *self.touched.entry(above).or_default() += subdirs;
        }
    }

    /// Takes a name away, and its node if it was the last.
    fn remove(&mut self, change: &PathChange) -> FsResult<()> {
        match self.then.attr(&change.new).map(|attr| attr.kind) {
            _ if self.is_inside(&change.path) => self.take_name_off(&change.path),
            // What leads to a path is a directory there, and must be one here.
            Some(FileKind::Dir) => Err(FsError::NotADirectory),
            // It is one here only: what is below it goes by its own changes.
            _ => Ok(()),
        }
    }

    fn take_name_off(&mut self, path: &TreePath) -> FsResult<()> {
        let (dir, lower, name) = self.dir_of(path)?;
        let mut found = self.state.find(dir, lower.as_ref(), &name)?;
        let attr = self.state.attr(&found).ok_or(FsError::NotFound)?;
        let is_dir = attr.kind == FileKind::Dir;
        if let Found::Base(_, base, _) = &found
            && !is_dir
            && attr.meta.nlink > 1
        {
            // The names that stay must keep count of themselves in the tree.
            let base = base.clone();
            self.copy_up(&base)?;
            found = self.state.find(dir, lower.as_ref(), &name)?;
        }
        let remains = match &found {
            Found::Upper(_, hides) | Found::Nothing(hides) => hides.clone(),
            Found::Base(ino, _, node) => Some(node.fingerprint(*ino)),
        };
        self.edit(Edit::Dentry { dir, name, to: remains.map(Dentry::Whiteout) })?;
        self.touch(path, -i32::from(is_dir));
        let Found::Upper(ino, _) = found else { return Ok(()) };
        if is_dir || attr.meta.nlink <= 1 {
            return self.edit(Edit::Remove { ino });
        }
        let meta = Meta { nlink: attr.meta.nlink - 1, ctime: clock::now(), ..attr.meta };
        self.edit(Edit::Meta { ino, meta })
    }

    fn bring(&mut self, change: &PathChange, fresh: Fresh<'_>) -> FsResult<()> {
        let Some(attr) = self.then.attr(&change.new) else { return Ok(()) };
        if attr.kind == FileKind::Dir {
            return self.bring_dir(change, fresh);
        }
        if !self.is_inside(&change.path) {
            return Ok(());
        }
        let wanted = change.new.ino().ok_or(FsError::NotFound)?;
        let ino = self.node_for(change, wanted, fresh)?;
        let shown = self.state.resolve(&change.path)?;
        if shown.ino() == Some(ino) {
            return self.put_file(change, ino, None);
        }
        if shown.ino().is_some() {
            self.take_name_off(&change.path)?;
        }
        let (dir, lower, name) = self.dir_of(&change.path)?;
        self.touch(&change.path, 0);
        if ino == wanted
            && !self.joined.contains(&ino)
            && self.shows_through(&change.new, lower.as_ref(), &name, attr.meta.nlink)
        {
            return self.edit(Edit::Dentry { dir, name, to: None });
        }
        self.cover_shown(&change.new, ino)?;
        let hides = self.hidden(dir, lower.as_ref(), &name)?;
        let links = self.state.tree.node(ino).map_or(0, |node| node.meta.nlink);
        self.put_file(change, ino, Some(links + 1))?;
        self.edit(Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, hides }) })
    }

    /// What of the base a name in a directory hides, or would.
    fn hidden(&self, dir: Ino, lower: Option<&TreePath>, name: &Name) -> FsResult<Hides> {
        Ok(match self.state.find(dir, lower, name)? {
            Found::Upper(_, hides) | Found::Nothing(hides) => hides,
            Found::Base(ino, _, node) => Some(node.fingerprint(ino)),
        })
    }

    /// Whether a node of the base is seen again as soon as nothing hides it.
    fn shows_through(
        &self,
        found: &Found,
        lower: Option<&TreePath>,
        name: &Name,
        nlink: u32,
    ) -> bool {
        let Found::Base(ino, path, node) = found else { return false };
        let is_dir = node.kind() == FileKind::Dir;
        (is_dir || nlink == 1)
            && lower.is_some_and(|dir| dir.join(name) == *path)
            && self.state.tree.node(*ino).is_none()
            && self.foreign.is_same(path)
    }

    /// The node that a name of a file gets.
    fn node_for(&mut self, change: &PathChange, wanted: Ino, fresh: Fresh<'_>) -> FsResult<Ino> {
        if let Some(placed) = self.placed.get(&wanted) {
            return Ok(*placed);
        }
        let outside = self.names_outside(&change.new, wanted)?;
        let ino = if outside.is_empty() {
            wanted
        } else if self.is_unchanged_link(change, wanted, &outside)? {
            self.joined.insert(wanted);
            wanted
        } else {
            fresh()?
        };
        self.placed.insert(wanted, ino);
        Ok(ino)
    }

    /// Whether a file was a hard link of a name outside, and is there what it was.
    fn is_unchanged_link(
        &self,
        change: &PathChange,
        wanted: Ino,
        outside: &[TreePath],
    ) -> FsResult<bool> {
        for path in outside {
            let (old, new) = (self.now.resolve(path)?, self.then.resolve(path)?);
            if new.ino() != Some(wanted) {
                continue;
            }
            let (a, a_extents) = self.now.record(&old)?;
            let (b, b_extents) = self.then.record(&change.new)?;
            let same =
                |meta: Meta| Meta { nlink: 0, ctime: crate::types::Timestamp::default(), ..meta };
            return Ok(a.body == b.body
                && a_extents == b_extents
                && a.xattrs == b.xattrs
                && same(a.meta) == same(b.meta)
                && self.foreign.same_epoch);
        }
        Ok(false)
    }

    /// Where the present state shows a node outside of the paths.
    fn names_outside(&self, found: &Found, ino: Ino) -> FsResult<Vec<TreePath>> {
        let tree = &self.now.tree;
        let mut names: BTreeSet<TreePath> =
            tree.links(ino).filter_map(|(dir, name)| tree.path_in(dir, name)).collect();
        for path in self.places_in_base(found, ino)? {
            names.extend(shown_as(self.now, &path)?);
        }
        let mut outside = Vec::new();
        for path in names.into_iter().filter(|path| !self.is_inside(path)) {
            if self.now.resolve(&path)?.ino() == Some(ino) {
                outside.push(path);
            }
        }
        Ok(outside)
    }

    /// Where the base, as it is seen now, has a node.
    fn places_in_base(&self, found: &Found, ino: Ino) -> FsResult<BTreeSet<TreePath>> {
        let (places, is_all) = places(self.now, self.then, found, ino, self.sought.at_hand(ino))?;
        if !is_all {
            self.sought.tell(self.now, &HashSet::from([ino]))?;
        }
        Ok(places)
    }

    /// Covers a node that is to get another name, if the base shows it by one: its links are counted in the tree from here on.
    fn cover_shown(&mut self, found: &Found, ino: Ino) -> FsResult<()> {
        if self.state.tree.node(ino).is_some() {
            return Ok(());
        }
        for path in self.places_in_base(found, ino)? {
            if let Some(shown) = shown_as(&self.state, &path)?
                && self.state.resolve(&shown)?.ino() == Some(ino)
            {
                return self.copy_up(&path).map(drop);
            }
        }
        Ok(())
    }

    /// Gives a node the record and the content that the other state has at a path; its links are counted here.
    fn put_file(&mut self, change: &PathChange, ino: Ino, links: Option<u32>) -> FsResult<()> {
        if self.joined.contains(&ino) {
            let Some(node) = self.state.tree.node(ino) else {
                return Err(FsError::Damage("a link outside of a restore is not in the tree"));
            };
            let meta =
                Meta { nlink: links.unwrap_or(node.meta.nlink), ctime: clock::now(), ..node.meta };
            return self.edit(Edit::Meta { ino, meta });
        }
        let shown = self.state.resolve(&change.path)?;
        let nlink = match links {
            Some(links) => links,
            None => self.state.attr(&shown).map_or(1, |attr| attr.meta.nlink),
        };
        if links.is_none()
            && let Found::Base(_, path, _) = &shown
        {
            let path = path.clone();
            self.copy_up(&path)?;
        }
        let (node, extents) = self.then.record(&change.new)?;
        let mut node = Node::clone(&node);
        node.meta.nlink = nlink;
        let extents = if self.foreign.needs_copy(self.then, &change.new)?.is_some() {
            if let Body::File { origin, .. } = &mut node.body {
                *origin = None;
            }
            self.copies.0.get(&change.path).cloned().ok_or(FsError::Stale)?
        } else {
            extents
        };
        if matches!(self.state.tree.node(ino).map(|n| &n.body), Some(Body::File { .. })) {
            self.edit(Edit::Resize { ino, size: 0 })?;
        }
        self.edit(Edit::Put { ino, node: Box::new(node) })?;
        for (range, source) in extents {
            self.edit(Edit::Map { ino, range, to: Some(source) })?;
        }
        Ok(())
    }

    /// Makes a directory, if there is none: what is in it comes by its own changes.
    fn bring_dir(&mut self, change: &PathChange, fresh: Fresh<'_>) -> FsResult<()> {
        let shown = self.state.resolve(&change.path)?;
        if shown.ino().is_some() {
            self.touched.entry(change.path.clone()).or_default();
            return Ok(());
        }
        let wanted = change.new.ino().ok_or(FsError::NotFound)?;
        let (dir, lower, name) = self.dir_of(&change.path)?;
        let is_free = self.state.tree.node(wanted).is_none()
            && self.names_outside(&change.new, wanted)?.is_empty();
        let ino = if is_free { wanted } else { fresh()? };
        self.touch(&change.path, 1);
        let mut node = Node::clone(&self.then.record(&change.new)?.0);
        let covers = match &node.body {
            Body::Dir { base: Some(path) } => is_free && self.foreign.is_same(path),
            _ => true,
        };
        if !covers || !self.is_inside(&change.path) {
            node.body = Body::Dir { base: None };
        }
        let hides = self.hidden(dir, lower.as_ref(), &name)?;
        let is_whole = matches!(&node.body, Body::Dir { base: Some(_) });
        self.edit(Edit::Put { ino, node: Box::new(node) })?;
        self.edit(Edit::Dentry { dir, name, to: Some(Dentry::Child { ino, hides }) })?;
        self.touched.entry(change.path.clone()).or_default();
        if is_whole { self.hide_strangers(ino, wanted) } else { Ok(()) }
    }

    /// Hides in a directory what the base shows there and the other state does not: what was deleted in that, what only a
    /// later apply brought, and what stands elsewhere now. Some of it gets nodes by its own changes.
    fn hide_strangers(&mut self, dir: Ino, wanted: Ino) -> FsResult<()> {
        let Some(lower) = self.state.lower_path(dir)? else { return Ok(()) };
        for (name, (ino, _)) in self.state.lower.list(&lower)? {
            let found = self.then.find(wanted, Some(&lower), &name)?;
            let links = self.then.attr(&found).map_or(0, |attr| attr.meta.nlink);
            if found.ino() == Some(ino) && self.shows_through(&found, Some(&lower), &name, links) {
                continue;
            }
            let hides = match self.then.tree.dentry(wanted, &name) {
                // As it was when it was hidden: what somebody does to the base since is a conflict of an apply.
                Some(Dentry::Whiteout(print)) if self.foreign.same_epoch => Some(Arc::clone(print)),
                _ => self.hidden(dir, Some(&lower), &name)?,
            };
            self.edit(Edit::Dentry { dir, name, to: hides.map(Dentry::Whiteout) })?;
        }
        Ok(())
    }

    /// Directories at and below the paths get the attributes that they had; those above them are as after any change of
    /// their names.
    fn finish_dirs(&mut self, changes: &[PathChange]) -> FsResult<()> {
        let listed = changes.iter().filter(|change| self.is_inside(&change.path));
        let mut dirs: BTreeSet<TreePath> = listed.map(|change| change.path.clone()).collect();
        dirs.extend(self.touched.keys().cloned());
        for path in dirs {
            let found = self.state.resolve(&path)?;
            if self.state.as_dir(&found).is_none() {
                continue;
            }
            if let Found::Base(_, base, _) = &found {
                let base = base.clone();
                self.copy_up(&base)?;
            }
            let ino = found.ino().ok_or(FsError::NotFound)?;
            let node = self.state.tree.node(ino).cloned().ok_or(FsError::NotFound)?;
            let mut node = Node::clone(&node);
            if self.is_inside(&path) {
                let known = self.then.resolve(&path)?;
                let (then, _) = self.then.record(&known)?;
                node = Node { body: node.body, ..Node::clone(&then) };
            } else {
                node.meta.mtime = clock::now();
                node.meta.ctime = node.meta.mtime;
                let subdirs = self.touched.get(&path).copied().unwrap_or(0);
                if node.meta.nlink >= 2 {
                    node.meta.nlink = node.meta.nlink.saturating_add_signed(subdirs).max(2);
                }
            }
            if self.state.tree.node(ino).is_none_or(|now| **now != node) {
                self.edit(Edit::Put { ino, node: Box::new(node) })?;
            }
        }
        Ok(())
    }
}

/// Where a state shows a path of the base, unless something hides it there.
fn shown_as(state: &State, path: &TreePath) -> FsResult<Option<TreePath>> {
    let Some((above, name)) = path.split() else { return Ok(None) };
    let Some((dir, _)) = state.lower.lookup(&above)? else { return Ok(None) };
    match state.dir_path(dir, Some(&above)) {
        Ok(dir) => Ok(Some(dir.join(&name))),
        Err(FsError::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}
