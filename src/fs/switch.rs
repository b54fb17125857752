//! Showing another state in place, while the kernel holds nodes of the present one.
//!
//! The rules that make it exact (they serve restore, undo, discard and apply alike):
//!
//! * A file keeps its id only if the same number is reachable in both states and its content is identical (with `-o writeback` its
//!   times, too). Every other held file becomes an orphan: those who hold it go on with their old content, and can never touch the new tree.
//! * A directory keeps its id only if it has the same name in the same kept directory in both states. So no live dentry
//!   of the kernel ever moves, and a process that stands in a directory that moved or vanished gets ENOENT.
//!
//! [`Core::show`] works out from the diff of the two trees which held nodes are affected. Nodes that neither tree
//! mentions are affected only through a directory above them: those are looked at if some directory did not keep its
//! place, or if the base is shown in another epoch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::error::{FsError, FsResult, Result};
use crate::fs::edits::{EditHistory, Mark};
use crate::fs::kernel::coherence;
use crate::fs::kernel::nodes::{Held, Place};
use crate::fs::merged::lower::Lower;
use crate::fs::{Attr, Core, Found, Fs, State, Unfinished};
use crate::store::layer::Upper;
use crate::store::record::{Body, Dentry, Edit, Record, Seal, Source};
use crate::sys::clock;
use crate::tree::Tree;
use crate::types::{FileKind, Ino, LayerId, Name, NodeId, TreePath};

/// What came of the wish to show the same tree over another base.
pub enum Rebasing {
    /// It is shown.
    Rebased(Rebased),
    /// It is not, because more was changed than may be looked at in that moment; the layer that would have been written to.
    Moved(Upper),
}

/// The same tree is shown over another base.
pub struct Rebased {
    /// What the kernel must forget.
    pub invalidations: Invalidations,
    /// The state that was shown up to then.
    pub from: State,
    /// The layer that was written to up to then, if there is anything in it, and whether its seal is there.
    pub sealed: Option<(LayerId, Result<()>)>,
}

/// What the kernel must forget after a switch. Told without any lock held.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Invalidations {
    /// Names that stand for something else now, or for nothing.
    pub names: BTreeSet<(NodeId, Name)>,
    /// Nodes whose attributes differ: kept ones, and those that are gone and have no link any more.
    pub attrs: BTreeSet<NodeId>,
    /// Directories whose names differ, those that are gone among them.
    pub listings: BTreeSet<NodeId>,
    /// Directories in which the kernel may be just about to take in a kept node of `attrs` with the attributes that it had.
    pub within: BTreeSet<NodeId>,
}

/// What a switch left behind.
pub struct Switched {
    /// What the kernel must forget.
    pub invalidations: Invalidations,
    /// The layer that was written to up to it.
    pub layer: Upper,
    /// The state that this layer completes: the one that was shown up to the switch.
    pub state: State,
}

/// What came of a seal with a change behind it.
pub struct Changed {
    /// The layer that is sealed.
    pub layer: LayerId,
    /// The state that it completes.
    pub from: State,
    /// The state since, and what the kernel must forget; or why there is no change.
    pub to: FsResult<(State, Invalidations)>,
    /// Whether the seal is there.
    pub sealed: Result<()>,
}

impl Fs {
    /// Seals the layer written so far; further writes go to `next` at once. Gives the sealed layer and its state. Syncs
    /// wait for it: what they sync lies on top of it.
    ///
    /// # Errors
    /// As [`Upper::seal`]; writes go to `next` all the same, and the layer is sealed before the next sync or seal succeeds.
    pub fn seal(&self, next: Upper, seal: Seal) -> Result<(LayerId, State)> {
        let (id, state, (), sealed) = self.seal_and(next, seal, |_| ())?;
        sealed.map(|()| (id, state))
    }

    /// The same, and changes the state in the same moment: nothing comes between what is sealed and the change. `make` says
    /// what the state becomes, and by which edits. What became of that is told beside the seal, which is made in any case.
    ///
    /// # Errors
    /// As [`Fs::seal`].
    pub fn seal_and_change(
        &self,
        next: Upper,
        seal: Seal,
        make: impl FnOnce(&State) -> FsResult<(Vec<Edit>, State)>,
    ) -> Result<Changed> {
        let (layer, from, to, sealed) = self.seal_and(next, seal, |core| {
            let (edits, after) = make(&core.state)?;
            if edits.is_empty() {
                return Ok((after, Invalidations::default()));
            }
            let record = Record::Edits(edits);
            let invalidations =
                core.show(after.clone(), false, |core| Ok(core.upper.record(&record)?))?;
            Ok((after, invalidations))
        })?;
        Ok(Changed { layer, from, to, sealed })
    }

    fn seal_and<T>(
        &self,
        next: Upper,
        seal: Seal,
        then: impl FnOnce(&mut Core) -> T,
    ) -> Result<(LayerId, State, T, Result<()>)> {
        // Before the exchange: a sync in between would find nothing to do in `next`, and answer too early.
        let mut gate = self.sync_gate.lock();
        self.seal_unfinished(&mut gate)?;
        let (mut layer, state, mark, told) = {
            let mut core = self.core();
            let layer = std::mem::replace(&mut core.upper, next);
            let state = core.state.clone();
            let mark = core.edits.as_ref().map(EditHistory::log_mark);
            (layer, state, mark, then(&mut core))
        };
        let id = layer.layer();
        let sealed = self.seal_one(&mut layer, seal, false);
        let sealed = self.keep_unsealed(&mut gate, layer, mark, sealed);
        Ok((id, state, told, sealed))
    }

    /// Keeps a layer whose seal failed for the next try: what lies above it is worth nothing without it.
    fn keep_unsealed(
        &self,
        unfinished: &mut Unfinished,
        layer: Upper,
        mark: Option<Mark>,
        sealed: Result<()>,
    ) -> Result<()> {
        if sealed.is_err() {
            unfinished.layers.push(layer);
        } else if self.store.durable() {
            self.core().note_edits_synced(mark);
        }
        sealed
    }

    /// Seals a layer. One that `is_below` what the head's record names is synced first: its seal says that all before it was, and a power
    /// cut may leave the seal and tear what is synced with it.
    fn seal_one(&self, layer: &mut Upper, seal: Seal, is_below: bool) -> Result<()> {
        let ready =
            self.sync_identities().and_then(|()| if is_below { layer.sync() } else { Ok(()) });
        let sealed = ready.and_then(|()| self.store.seal_layer(layer, seal));
        if layer.is_failed() {
            // What is above it is worth nothing without it.
            self.core().sync_failed();
        }
        sealed
    }

    /// Seals the layers whose seal failed: what lies above them is worth nothing without them. And
    /// syncs the last exchange of the journal.
    pub(super) fn seal_unfinished(&self, unfinished: &mut Unfinished) -> Result<()> {
        self.finish_exchange(unfinished)?;
        while let Some(mut layer) = unfinished.layers.pop() {
            let seal = Seal {
                name: None,
                message: "cut off".to_owned(),
                time: clock::now(),
                automatic: true,
            };
            if let Err(error) = self.seal_one(&mut layer, seal, true) {
                unfinished.layers.push(layer);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Shows another state; further writes go to `upper`. Gives what was shown before.
    ///
    /// # Errors
    /// What the base answers; then nothing has changed.
    pub fn switch(&self, state: State, upper: Upper) -> FsResult<Switched> {
        // A sync that is under way is of the layer that was written to when it began.
        let mut gate = self.sync_gate.lock();
        self.finish_exchange(&mut gate)?;
        let mut core = self.core();
        let before = core.state.clone();
        let mut layer = upper;
        let invalidations = core.show(state, false, |core| {
            std::mem::swap(&mut core.upper, &mut layer);
            Ok(())
        })?;
        Ok(Switched { invalidations, layer, state: before })
    }

    /// Shows the same tree over another base. `twin` gives what the present state is there, or none if that would take too long:
    /// nothing is answered meanwhile. Every file has the same content there, although it is kept in another place.
    ///
    /// The layer that is written to from then on begins with all that the twin has, if anything was written to the one before: so
    /// what was written is in one of the two, whenever the process ends.
    ///
    /// # Errors
    /// What the base answers; then nothing has changed.
    pub fn land(
        &self,
        next: Upper,
        seal: Seal,
        twin: impl FnOnce(&State) -> FsResult<Option<State>>,
    ) -> FsResult<Rebasing> {
        let mut gate = self.sync_gate.lock();
        self.seal_unfinished(&mut gate)?;
        let mut core = self.core();
        let Some(state) = twin(&core.state)? else { return Ok(Rebasing::Moved(next)) };
        let from = core.state.clone();
        let is_changed = core.upper.is_changed();
        let edits = is_changed.then(|| Record::Edits(Tree::new().edits_to(&state.tree).collect()));
        let mut layer = next;
        let invalidations = core.show(state, true, |core| {
            if let Some(edits) = &edits {
                layer.record(edits)?;
            }
            std::mem::swap(&mut core.upper, &mut layer);
            Ok(())
        })?;
        let mark = core.edits.as_ref().map(EditHistory::log_mark);
        drop(core);
        let sealed = is_changed.then(|| {
            let (id, sealed) = (layer.layer(), self.seal_one(&mut layer, seal, true));
            (id, self.keep_unsealed(&mut gate, layer, mark, sealed))
        });
        Ok(Rebasing::Rebased(Rebased { invalidations, from, sealed }))
    }

    /// Looks at the base in another way from now on: with the pre-images of an apply that is about to change it, or without.
    pub fn set_lower(&self, lower: Lower) {
        self.core().state.lower = Arc::new(lower);
    }
}

/// What becomes of a held node.
enum Fate {
    Kept(Found),
    Cut,
}

/// A held node, where it was, and what becomes of it.
struct Plan {
    id: NodeId,
    ino: Ino,
    old: Found,
    fate: Fate,
}

/// The two states of a switch, and what was found out about directories so far.
struct Comparison<'a> {
    before: &'a State,
    after: &'a State,
    same_content: bool,
    /// Whether the kernel never takes the times of a file from us again.
    writeback: bool,
    /// Files of which the extents differ in the two trees.
    contents: &'a BTreeSet<Ino>,
    kept_dirs: HashMap<Ino, bool>,
    /// Which directory shows a directory of the base, in the state after.
    shown: HashMap<TreePath, Option<Ino>>,
    /// Nodes of the base that came to light or were hidden, by state.
    base_before: HashMap<Ino, TreePath>,
    base_after: HashMap<Ino, TreePath>,
    /// Directories of the base in which an apply touched a name, by state.
    touched_before: HashMap<Ino, TreePath>,
    touched_after: HashMap<Ino, TreePath>,
}

impl Core {
    /// Where the base of `after` has held files that the present tree knows by fewer names than they have.
    fn unseen_names(&self, after: &State) -> FsResult<HashMap<Ino, TreePath>> {
        let held = self.table.iter().filter(|(_, h)| h.place != Place::Orphan).map(|(_, h)| h.ino);
        let unseen = held.filter(|ino| {
            self.tree.node(*ino).is_some_and(|node| {
                node.kind() != FileKind::Dir
                    && node.meta.nlink as usize > self.tree.links(*ino).count()
            })
        });
        let names = after.lower.names_of(&unseen.collect())?;
        Ok(names.into_iter().map(|(path, ino)| (ino, path)).collect())
    }

    /// Shows another state. Calls `at_last` when nothing of the base can fail any more; if that fails, nothing has changed.
    pub(super) fn show(
        &mut self,
        after: State,
        same_content: bool,
        at_last: impl FnOnce(&mut Core) -> FsResult<()>,
    ) -> FsResult<Invalidations> {
        let before = self.state.clone();
        let mut diff = before.tree.diff(&after.tree);
        let same_epoch = before.lower.epoch() == after.lower.epoch()
            && before.lower.history().len() == after.lower.history().len();
        let mut names = std::mem::take(&mut diff.names);
        let mut touched_before = HashMap::new();
        let mut touched_after = HashMap::new();
        if !same_epoch {
            let (mut shown_before, mut shown_after) = (HashMap::new(), HashMap::new());
            for (dir, touched) in touched_names(&before, &after) {
                for (state, dirs, shown) in [
                    (&before, &mut touched_before, &mut shown_before),
                    (&after, &mut touched_after, &mut shown_after),
                ] {
                    // What is hidden there tells nothing, and something of it may stand elsewhere.
                    if let Some(ino) = shown_at(state, &dir, shown)? {
                        dirs.insert(ino, dir.clone());
                        names.extend(touched.iter().map(|name| (ino, name.clone())));
                    }
                }
            }
        }
        let mut compare = Comparison {
            touched_before,
            touched_after,
            before: &before,
            after: &after,
            same_content,
            writeback: self.pending.writeback,
            contents: &diff.contents,
            kept_dirs: HashMap::new(),
            shown: HashMap::new(),
            base_before: HashMap::new(),
            base_after: if same_content { self.unseen_names(&after)? } else { HashMap::new() },
        };
        let mut affected: BTreeSet<Ino> = diff.nodes.union(&diff.contents).copied().collect();
        affected.insert(Ino::ROOT);
        let mut changed_names = Vec::new();
        for (dir, name) in names {
            let old = compare.note(&before, dir, &name, true)?;
            let new = compare.note(&after, dir, &name, false)?;
            affected.extend(old.iter().chain(&new));
            if old != new {
                changed_names.push((dir, name));
            }
        }
        let all_are_affected = !same_epoch || compare.some_dir_moved(&affected)?;
        let plans = self.fates(&mut compare, (!all_are_affected).then_some(&affected))?;
        let mut invalidations = Invalidations::default();
        let compare_listings = !same_epoch && !same_content;
        let mut kept_bases = Vec::new();
        let mut recorded = Vec::new();
        let mut cut = Vec::new();
        let is_cut = |plan: &&Plan| matches!(plan.fate, Fate::Cut);
        let dead_dirs: BTreeSet<Ino> = plans.iter().filter(is_cut).map(|plan| plan.ino).collect();
        let (mut attrs, mut within, mut listings) = (Vec::new(), BTreeSet::new(), Vec::new());
        for Plan { id, ino, old, fate } in plans {
            let names = self.known_names(&before, ino, &old)?;
            match fate {
                Fate::Kept(new) => {
                    if let (Found::Base(_, _, node), Found::Upper(..)) = (&old, &new) {
                        recorded.push((id, node.clone()));
                    }
                    if attrs_differ(&before, &old, &after, &new)? {
                        attrs.push(id);
                        within.extend(names.iter().filter_map(|(dir, _)| self.table.id_of(*dir)));
                    }
                    // The records of two epochs speak of different directories of the base: the names decide.
                    if compare_listings {
                        let differing = names_that_differ(&before, &old, &after, &new)?;
                        changed_names.extend(differing.into_iter().map(|name| (ino, name)));
                    }
                    // The kernel goes on knowing it by names that no tree will tell from now on. Only what the base has under one
                    // name is found where it is held to be.
                    let names_to_invalidate = names_untold(&before.tree, &after.tree, ino);
                    let has_one = |attr: Attr| attr.kind == FileKind::Dir || attr.meta.nlink <= 1;
                    if !names_to_invalidate.is_empty()
                        && (after.tree.node(ino).is_some()
                            || !before.attr(&old).is_none_or(has_one))
                    {
                        self.aliases.entry(ino).or_default().extend(names_to_invalidate);
                    }
                    if let Found::Base(_, path, node) = new {
                        let told = coherence::left_to_base((&before, &old), &after, (&path, &node));
                        kept_bases.push((id, path, told));
                    }
                    // The kernel drops a directory's names with it, but not those in use: through such a one a process in
                    // a directory that is gone would still reach a file that is not.
                    changed_names
                        .extend(names.into_iter().filter(|(dir, _)| dead_dirs.contains(dir)));
                }
                Fate::Cut => {
                    changed_names.extend(names);
                    if let Found::Base(_, _, node) = &old {
                        recorded.push((id, node.clone()));
                    }
                    // Its holders see that it has no name any more, and in a directory that there is nothing.
                    attrs.push(id);
                    if before.kind(&old).is_none_or(|kind| kind == FileKind::Dir) {
                        listings.push(id);
                    }
                    let record = match before.record(&old) {
                        Ok(record) => Some(record),
                        // The base lost it behind our back: those who hold it get what they would have got anyway.
                        Err(error) => {
                            log::warn!(
                                "restore: cannot keep node {} for its holders: {error}",
                                ino.0
                            );
                            None
                        }
                    };
                    cut.push((id, ino, record));
                }
            }
        }
        changed_names.sort_unstable();
        let dirs: BTreeMap<Ino, NodeId> = changed_names
            .chunk_by(|a, b| a.0 == b.0)
            .filter_map(|names| names.first())
            .filter_map(|(dir, _)| Some((*dir, self.table.id_of(*dir)?)))
            .collect();
        listings.extend(dirs.values());
        let held = |(dir, name): (Ino, Name)| Some((*dirs.get(&dir)?, name));
        // Collected, not inserted: what is almost in order is put in place at once.
        invalidations.names = changed_names.into_iter().filter_map(held).collect();
        (invalidations.attrs, invalidations.within) = (attrs.into_iter().collect(), within);
        invalidations.listings = listings.into_iter().collect();
        at_last(self)?;
        self.note_names_to_invalidate(&invalidations.names);
        self.cut_climb_marks(&cut.iter().map(|(id, ..)| *id).collect());
        self.state = after;
        for (id, ino, record) in cut {
            match record {
                // It is shown already, so there is no way back.
                Some(record) => {
                    let kept =
                        self.make_orphan(id, record, before.lower.epoch(), |meta| meta.nlink = 0);
                    if let Err(error) = kept {
                        log::error!("cannot keep node {} for its holders: {error}", ino.0);
                        self.table.orphan(id);
                    }
                }
                None => self.table.orphan(id),
            }
        }
        for (id, node) in recorded {
            self.note_recorded(id, &node);
        }
        for (id, path, told) in kept_bases {
            self.table.set_base(id, Some(path));
            if let Some(told) = told {
                self.note_left(id, told);
            }
        }
        Ok(invalidations)
    }

    /// What becomes of the nodes that the kernel holds: of those that are affected, or of all.
    fn fates(
        &self,
        compare: &mut Comparison<'_>,
        affected: Option<&BTreeSet<Ino>>,
    ) -> FsResult<Vec<Plan>> {
        let mut plans = Vec::new();
        let mut plan = |id: NodeId, held: &Held| -> FsResult<()> {
            if let Place::Live { base } = &held.place {
                let (old, fate) = compare.fate(held.ino, base.as_ref())?;
                plans.push(Plan { id, ino: held.ino, old, fate });
            }
            Ok(())
        };
        match affected {
            // The kernel may hold many more: what it costs is what differs.
            Some(affected) => {
                let held = affected.iter().flat_map(|ino| self.table.ids_of(*ino));
                held.filter_map(|id| Some((id, self.table.get(id)?)))
                    .try_for_each(|(id, held)| plan(id, held))?;
            }
            None => self.table.iter().try_for_each(|(id, held)| plan(id, held))?,
        }
        Ok(plans)
    }

    /// The names under which the kernel can hold a node, as (directory, name). One may be told twice.
    fn known_names(&self, state: &State, ino: Ino, found: &Found) -> FsResult<Vec<(Ino, Name)>> {
        let in_tree = state.tree.node(ino).map(|node| state.tree.links_of(ino, node));
        let mut names: Vec<(Ino, Name)> =
            in_tree.into_iter().flatten().map(|(dir, name)| (dir, name.clone())).collect();
        names.extend(self.aliases.get(&ino).into_iter().flatten().cloned());
        if let Found::Base(_, path, _) = found
            && let Some((dir, name)) = path.split()
            && let Some((dir, _)) = unless_closed(state.lower.lookup(&dir))?.flatten()
        {
            names.push((dir, name));
        }
        Ok(names)
    }
}

/// The names of a node that the tree before tells, and the one after does not.
fn names_untold(before: &Tree, after: &Tree, ino: Ino) -> Vec<(Ino, Name)> {
    let tells = |dir: Ino, name: &Name| matches!(after.dentry(dir, name), Some(Dentry::Child { ino: told, .. }) if *told == ino);
    let names_to_invalidate = before.links(ino).filter(|(dir, name)| !tells(*dir, name));
    names_to_invalidate.map(|(dir, name)| (dir, name.clone())).collect()
}

/// The names at which the two states see another base, by the path of their directory in the base.
fn touched_names(before: &State, after: &State) -> BTreeMap<TreePath, BTreeSet<Name>> {
    let mut names: BTreeMap<TreePath, BTreeSet<Name>> = BTreeMap::new();
    for path in before.lower.touched_since().into_iter().chain(after.lower.touched_since()) {
        if let Some((dir, name)) = path.split() {
            names.entry(dir).or_default().insert(name);
        }
    }
    names
}

/// The node `ino` in a state: in the tree, or in the base at the path where it is known to be.
fn found_of(
    state: &State,
    ino: Ino,
    held: Option<&TreePath>,
    noted: &HashMap<Ino, TreePath>,
) -> FsResult<Found> {
    if state.tree.node(ino).is_some() {
        return Ok(Found::Upper(ino, None));
    }
    for path in noted.get(&ino).into_iter().chain(held) {
        if let Some((found, node)) = unless_closed(state.lower.lookup(path))?.flatten()
            && found == ino
        {
            return Ok(Found::Base(ino, path.clone(), node));
        }
    }
    Ok(Found::Nothing(None))
}

fn attrs_differ(before: &State, old: &Found, after: &State, new: &Found) -> FsResult<bool> {
    if before.attr(old) != after.attr(new) {
        return Ok(true);
    }
    // ACLs are cached by the kernel with the attributes.
    match (old, new) {
        (Found::Base(..), Found::Base(..)) => Ok(false),
        (Found::Upper(a, _), Found::Upper(b, _)) => {
            Ok(before.tree.node(*a).map(|n| &n.xattrs) != after.tree.node(*b).map(|n| &n.xattrs))
        }
        _ => Ok(true),
    }
}

impl Comparison<'_> {
    /// What a name stands for in a state, if the directory is in it; remembers where nodes of the base are.
    fn note(
        &mut self,
        state: &State,
        dir: Ino,
        name: &Name,
        is_before: bool,
    ) -> FsResult<Option<Ino>> {
        let lower = match state.tree.node(dir).map(|n| &n.body) {
            Some(Body::Dir { base }) => base.clone(),
            Some(_) => return Ok(None),
            // A directory that this state does not mention is as in the base, where the other state knows it to be.
            None => match self.base_path_of(dir, is_before)? {
                Some(path) => Some(path),
                None => return Ok(None),
            },
        };
        let Some(found) = unless_closed(state.find(dir, lower.as_ref(), name))? else {
            return Ok(None);
        };
        if let Found::Base(ino, path, _) = &found {
            let noted = if is_before { &mut self.base_before } else { &mut self.base_after };
            noted.insert(*ino, path.clone());
        }
        Ok(found.ino())
    }

    /// The base path of a directory that one state does not mention and the other does, if it is seen there.
    fn base_path_of(&mut self, dir: Ino, in_before: bool) -> FsResult<Option<TreePath>> {
        let (state, other) =
            if in_before { (self.before, self.after) } else { (self.after, self.before) };
        let Some(Body::Dir { base: Some(path) }) = other.tree.node(dir).map(|n| &n.body) else {
            // Neither tree mentions it: then it matters only for what an apply touched.
            let touched = if in_before { &self.touched_before } else { &self.touched_after };
            return Ok(if dir == Ino::ROOT {
                Some(TreePath::root())
            } else {
                touched.get(&dir).cloned()
            });
        };
        let path = path.clone();
        if path.is_root() {
            return Ok(Some(path));
        }
        Ok((shown_at(state, &path, &mut HashMap::new())? == Some(dir)).then_some(path))
    }

    /// Whether a directory among the affected nodes is not where it was, so that nodes below it are affected, too.
    fn some_dir_moved(&mut self, affected: &BTreeSet<Ino>) -> FsResult<bool> {
        for ino in affected {
            let is_dir = |state: &State, noted: &HashMap<Ino, TreePath>| -> FsResult<bool> {
                Ok(state.kind(&found_of(state, *ino, None, noted)?) == Some(FileKind::Dir))
            };
            let was = is_dir(self.before, &self.base_before)?;
            let is = is_dir(self.after, &self.base_after)?;
            if (was || is) && !self.dir_kept(*ino, None)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What becomes of a live node that is held, and where it was; `held` is where it was last seen in the base.
    fn fate(&mut self, ino: Ino, held: Option<&TreePath>) -> FsResult<(Found, Fate)> {
        let old = found_of(self.before, ino, held, &self.base_before)?;
        let new = self.after_of(ino, held, &old)?;
        let fate = if self.keeps(ino, held, &old, &new)? { Fate::Kept(new) } else { Fate::Cut };
        Ok((old, fate))
    }

    fn keeps(
        &mut self,
        ino: Ino,
        held: Option<&TreePath>,
        old: &Found,
        new: &Found,
    ) -> FsResult<bool> {
        let Some(kind) = self.before.kind(old).filter(|kind| self.after.kind(new) == Some(*kind))
        else {
            return Ok(false);
        };
        match kind {
            FileKind::Dir => self.dir_kept(ino, held),
            // An apply gives every file that it replaced another change time, and goes on with it all the same.
            FileKind::File
                if self.writeback && !self.same_content && !self.same_times(old, new) =>
            {
                Ok(false)
            }
            FileKind::File
            | FileKind::Symlink
            | FileKind::Fifo
            | FileKind::Socket
            | FileKind::Char
            | FileKind::Block => Ok(self.same_content || self.content_identical(old, new)?),
        }
    }

    /// The node in the state after, if it is reachable there.
    fn after_of(&mut self, ino: Ino, held: Option<&TreePath>, old: &Found) -> FsResult<Found> {
        if self.after.tree.node(ino).is_some() {
            return Ok(Found::Upper(ino, None));
        }
        if ino == Ino::ROOT {
            return self.after.resolve(&TreePath::root());
        }
        let origin = match old {
            Found::Upper(ino, _) => self.before.tree.node(*ino).and_then(|n| match &n.body {
                Body::File { origin, .. } => origin.as_ref().map(|o| o.path.clone()),
                Body::Dir { base } => base.clone(),
                Body::Symlink { .. } | Body::Special => None,
            }),
            Found::Base(_, path, _) => Some(path.clone()),
            Found::Nothing(_) => None,
        };
        let candidates = [self.base_after.get(&ino).cloned(), origin, held.cloned()];
        for path in candidates.into_iter().flatten() {
            let Some((found, node)) = unless_closed(self.after.lower.lookup(&path))?.flatten()
            else {
                continue;
            };
            if found == ino && self.seen_in_after(&path)? {
                return Ok(Found::Base(ino, path, node));
            }
        }
        // In another epoch the base may have it elsewhere: after an apply, where the mount showed it before.
        if self.same_content || self.before.lower.epoch() != self.after.lower.epoch() {
            for path in paths_in(self.before, old)? {
                match unless_closed(self.after.resolve(&path))? {
                    Some(found) if found.ino() == Some(ino) => return Ok(found),
                    Some(_) | None => {}
                }
            }
        }
        Ok(Found::Nothing(None))
    }

    /// Whether the state after shows the node of the base at `path`.
    fn seen_in_after(&mut self, path: &TreePath) -> FsResult<bool> {
        let Some((above, name)) = path.split() else { return Ok(true) };
        let Some(dir) = shown_at(self.after, &above, &mut self.shown)? else { return Ok(false) };
        Ok(self.after.tree.dentry(dir, &name).is_none())
    }

    /// Whether a directory has the same name in the same kept directory in both states.
    fn dir_kept(&mut self, ino: Ino, held: Option<&TreePath>) -> FsResult<bool> {
        if ino == Ino::ROOT {
            return Ok(true);
        }
        if let Some(known) = self.kept_dirs.get(&ino) {
            return Ok(*known);
        }
        // A loop of directories cannot be; should the records hold one, it ends here and its members are not kept.
        self.kept_dirs.insert(ino, false);
        let old = found_of(self.before, ino, held, &self.base_before)?;
        if matches!(old, Found::Nothing(_)) {
            // Unknown without the path at which it is held; who knows that asks again.
            self.kept_dirs.remove(&ino);
            return Ok(false);
        }
        let new = self.after_of(ino, held, &old)?;
        let was = place_in(self.before, &old)?;
        let is = place_in(self.after, &new)?;
        let kept = match (was, is) {
            (Some((was_dir, was_name, above)), Some((is_dir, is_name, _)))
                if was_dir == is_dir && was_name == is_name =>
            {
                let both_dirs = [(self.before, &old), (self.after, &new)]
                    .iter()
                    .all(|(state, found)| state.kind(found) == Some(FileKind::Dir));
                both_dirs && self.dir_kept(was_dir, above.as_ref())?
            }
            _ => false,
        };
        self.kept_dirs.insert(ino, kept);
        Ok(kept)
    }

    /// Whether a file has the same times.
    fn same_times(&self, old: &Found, new: &Found) -> bool {
        let times = |attr: Option<Attr>| attr.map(|attr| (attr.meta.mtime, attr.meta.ctime));
        times(self.before.attr(old)) == times(self.after.attr(new))
    }

    /// Whether the bytes of a file (the text of a link, the number of a device) are the same, by what the records say.
    fn content_identical(&self, old: &Found, new: &Found) -> FsResult<bool> {
        if let (Found::Base(_, a, _), Found::Base(_, b, _)) = (old, new)
            && self.before.lower.epoch() == self.after.lower.epoch()
        {
            return Ok(a == b || self.before.record(old)?.0.body == self.after.record(new)?.0.body);
        }
        if let (Found::Upper(a, _), Found::Upper(b, _)) = (old, new)
            && a == b
            && let (Some(was), Some(is)) = (self.before.tree.node(*a), self.after.tree.node(*a))
            && (was.body == is.body || self.contents.contains(a))
        {
            return Ok(was.meta.rdev == is.meta.rdev && !self.contents.contains(a));
        }
        let (old_node, old_extents) = self.before.record(old)?;
        let (new_node, new_extents) = self.after.record(new)?;
        if old_node.meta.rdev != new_node.meta.rdev {
            return Ok(false);
        }
        let in_base =
            |extents: &[(_, Source)]| extents.iter().any(|(_, s)| matches!(s, Source::Base { .. }));
        Ok(match (&old_node.body, &new_node.body) {
            (Body::File { size: a, origin: from_a }, Body::File { size: b, origin: from_b }) => {
                a == b
                    && old_extents == new_extents
                    && (!in_base(&old_extents) || same_origin(from_a.as_ref(), from_b.as_ref()))
            }
            (a, b) => a == b,
        })
    }
}

/// Whether two extents into the base mean the same bytes: the same file of the base, in the same condition.
fn same_origin(
    a: Option<&Arc<crate::store::record::Origin>>,
    b: Option<&Arc<crate::store::record::Origin>>,
) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => {
            crate::fs::merged::fingerprint::matches(&a.print, &b.print)
                || crate::fs::merged::fingerprint::matches(&b.print, &a.print)
        }
        _ => false,
    }
}

/// The names that stand for other nodes in two states of a directory; none for what is no directory.
fn names_that_differ(
    before: &State,
    old: &Found,
    after: &State,
    new: &Found,
) -> FsResult<Vec<Name>> {
    let (Some((a, a_base)), Some((b, b_base))) = (before.as_dir(old), after.as_dir(new)) else {
        return Ok(Vec::new());
    };
    let was = before.merged_names(a, a_base.as_ref())?;
    let is = after.merged_names(b, b_base.as_ref())?;
    let number = |found: Option<&(Ino, Option<FileKind>)>| found.map(|f| f.0);
    let names: BTreeSet<&Name> = was.keys().chain(is.keys()).collect();
    Ok(names.into_iter().filter(|n| number(was.get(*n)) != number(is.get(*n))).cloned().collect())
}

/// The paths at which a state shows a node, as far as they are known.
fn paths_in(state: &State, found: &Found) -> FsResult<Vec<TreePath>> {
    Ok(match found {
        Found::Upper(ino, _) => {
            state.tree.links(*ino).filter_map(|(dir, name)| state.tree.path_in(dir, name)).collect()
        }
        Found::Base(_, path, _) => match path.split() {
            Some((above, name)) => match unless_closed(state.lower.lookup(&above))?.flatten() {
                Some((dir, _)) => vec![state.dir_path(dir, Some(&above))?.join(&name)],
                None => Vec::new(),
            },
            None => Vec::new(),
        },
        Found::Nothing(_) => Vec::new(),
    })
}

/// What was found, or none if it lies behind a directory of the base that is closed to us: nobody finds it by its name then, and who holds
/// it keeps what he holds.
fn unless_closed<T>(found: FsResult<T>) -> FsResult<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(FsError::AccessDenied) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The directory that holds a directory, its name there, and the path of the former in the base if it is not covered.
fn place_in(state: &State, found: &Found) -> FsResult<Option<(Ino, Name, Option<TreePath>)>> {
    Ok(match found {
        Found::Upper(ino, _) => {
            state.tree.parent(*ino).map(|(dir, name)| (dir, name.clone(), None))
        }
        Found::Base(_, path, _) => match path.split() {
            Some((above, name)) => unless_closed(state.lower.lookup(&above))?
                .flatten()
                .map(|(dir, _)| (dir, name, Some(above))),
            None => None,
        },
        Found::Nothing(_) => None,
    })
}

/// Which live directory of a state shows the directory of the base at `path`; none if it is hidden.
fn shown_at(
    state: &State,
    path: &TreePath,
    known: &mut HashMap<TreePath, Option<Ino>>,
) -> FsResult<Option<Ino>> {
    let Some((above, name)) = path.split() else { return Ok(Some(Ino::ROOT)) };
    if let Some(known) = known.get(path) {
        return Ok(*known);
    }
    let shown = match unless_closed(state.lower.lookup(path))?.flatten() {
        None => None,
        Some((ino, _)) => match covers(&state.tree, ino) {
            Some(copied_up) => (copied_up.as_ref() == Some(path)).then_some(ino),
            None => match shown_at(state, &above, known)? {
                Some(dir) => match state.tree.dentry(dir, &name) {
                    None => Some(ino),
                    Some(Dentry::Child { .. } | Dentry::Whiteout(_)) => None,
                },
                None => None,
            },
        },
    };
    known.insert(path.clone(), shown);
    Ok(shown)
}

/// What a directory of the tree covers of the base; none if the tree does not mention it.
fn covers(tree: &Tree, ino: Ino) -> Option<Option<TreePath>> {
    match tree.node(ino).map(|n| &n.body) {
        Some(Body::Dir { base }) => Some(base.clone()),
        Some(_) => Some(None),
        None => None,
    }
}
