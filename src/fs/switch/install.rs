//! Installs another state in place, while the kernel holds nodes of the present one.
//!
//! [`SwitchPlan`] works out from the diff of the two trees which held nodes are affected. A node
//! that neither tree has can be affected only through a directory above it. So all held nodes are
//! compared only if a directory did not keep its place, or if the base is in another epoch.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::kernel::cached_attrs::CachedAttrs;
use crate::fs::kernel::nodes::{Held, NodeState};
use crate::fs::merged::answers;
use crate::fs::merged::lower::{Extents, LowerNode};
use crate::fs::switch::Invalidations;
use crate::fs::switch::compare::{
    Comparison, Fate, attrs_differ, names_that_differ, unless_denied,
};
use crate::fs::{Attr, Core, Found, State};
use crate::sys::lock::allow_waits;
use crate::tree::{Dentry, Node, Tree};
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

/// A held node, where it was, and what becomes of it.
struct NodeFate {
    id: NodeId,
    ino: Ino,
    old: Found,
    fate: Fate,
}

/// A held node that becomes an orphan.
struct NewOrphan {
    id: NodeId,
    ino: Ino,
    /// Its record and extents; none if the base lost them.
    record: Option<(Arc<Node>, Extents)>,
}

/// The changes that a switch makes to the held nodes and to the kernel's caches.
#[derive(Default)]
struct SwitchPlan {
    orphans: Vec<NewOrphan>,
    /// Nodes that the state after has a record of, or that become orphans with one.
    recorded: Vec<(NodeId, LowerNode)>,
    /// Nodes that only the base has in the state after, their path there, and the attributes that
    /// the kernel goes on caching.
    left_to_base: Vec<(NodeId, TreePath, Option<CachedAttrs>)>,
    /// Names by which the kernel knows a node and the tree after does not.
    aliases: Vec<(Ino, Vec<(Ino, Name)>)>,
    names: Vec<(Ino, Name)>,
    attrs: Vec<NodeId>,
    within: BTreeSet<NodeId>,
    listings: Vec<NodeId>,
}

/// The two states, and which names in directories need a comparison.
struct Switch<'a> {
    before: &'a State,
    after: &'a State,
    /// Whether the two trees do not tell all names that differ.
    compare_listings: bool,
    /// Directories that become orphans.
    orphaned_dirs: BTreeSet<Ino>,
}

impl Core {
    /// Replaces the state, and calls `record` when nothing else can fail any more. Returns what the
    /// kernel must invalidate, and the result of `record`. `same_content` says that every file has
    /// the same content in `after`, wherever that is stored.
    ///
    /// # Errors
    /// Those of the base and of `record`; then nothing has changed.
    pub(in crate::fs) fn install<T>(
        &mut self,
        after: State,
        same_content: bool,
        record: impl FnOnce(&mut Core) -> FsResult<T>,
    ) -> FsResult<(Invalidations, T)> {
        let before = self.state.clone();
        // Nothing may change between the comparison and the exchange.
        let allowed = allow_waits();
        let plan = answers::at_once(|| self.plan_switch(&before, &after, same_content))?;
        drop(allowed);
        let recorded = record(self)?;
        Ok((self.carry_out(plan, &before, after), recorded))
    }

    /// Works out what a switch changes, without changing anything.
    fn plan_switch(
        &self,
        before: &State,
        after: &State,
        same_content: bool,
    ) -> FsResult<SwitchPlan> {
        let diff = before.tree.diff(&after.tree);
        let same_epoch = before.lower.epoch() == after.lower.epoch()
            && before.lower.history().len() == after.lower.history().len();
        let base_after = if same_content { self.unseen_names(after)? } else { HashMap::new() };
        let how = (same_content, self.coherence.is_writeback());
        let mut compare = Comparison::new((before, after), &diff.contents, how, base_after);
        let mut names = diff.names;
        if !same_epoch {
            names.extend(compare.applied_names()?);
        }
        let mut affected: BTreeSet<Ino> = diff.nodes.union(&diff.contents).copied().collect();
        affected.insert(Ino::ROOT);
        let mut plan = SwitchPlan::default();
        for (dir, name) in names {
            let (old, new) = compare.nodes_of(dir, &name)?;
            affected.extend(old.iter().chain(&new));
            if old != new {
                plan.names.push((dir, name));
            }
        }
        let all_are_affected = !same_epoch || compare.some_dir_moved(&affected)?;
        let fates = self.fates(&mut compare, (!all_are_affected).then_some(&affected))?;
        let is_orphan = |fate: &&NodeFate| matches!(fate.fate, Fate::Orphan);
        let orphaned_dirs = fates.iter().filter(is_orphan).map(|fate| fate.ino).collect();
        let compare_listings = !same_epoch && !same_content;
        let switch = Switch { before, after, compare_listings, orphaned_dirs };
        for NodeFate { id, ino, old, fate } in fates {
            match fate {
                Fate::Kept(new) => self.plan_kept(&mut plan, &switch, (id, ino), (old, new))?,
                Fate::Orphan => self.plan_orphan(&mut plan, before, (id, ino), old)?,
            }
        }
        Ok(plan)
    }

    /// The fates of the held nodes among `affected`, or of all held nodes.
    fn fates(
        &self,
        compare: &mut Comparison<'_>,
        affected: Option<&BTreeSet<Ino>>,
    ) -> FsResult<Vec<NodeFate>> {
        let mut fates = Vec::new();
        let mut add = |id: NodeId, held: &Held| -> FsResult<()> {
            if let NodeState::Live { base } = &held.state {
                let (old, fate) = compare.fate(held.ino, base.as_ref())?;
                fates.push(NodeFate { id, ino: held.ino, old, fate });
            }
            Ok(())
        };
        match affected {
            // The kernel may hold many more nodes, so the cost is that of the difference.
            Some(affected) => {
                let ids = affected.iter().flat_map(|ino| self.held.ids_of(*ino));
                ids.filter_map(|id| Some((id, self.held.get(id)?)))
                    .try_for_each(|(id, held)| add(id, held))?;
            }
            None => self.held.iter().try_for_each(|(id, held)| add(id, held))?,
        }
        Ok(fates)
    }

    /// Plans for a node that keeps its id.
    fn plan_kept(
        &self,
        plan: &mut SwitchPlan,
        switch: &Switch<'_>,
        (id, ino): (NodeId, Ino),
        (old, new): (Found, Found),
    ) -> FsResult<()> {
        let Switch { before, after, .. } = switch;
        let names = self.known_names(before, ino, &old)?;
        if let (Found::Base(_, _, node), Found::Upper(..)) = (&old, &new) {
            plan.recorded.push((id, node.clone()));
        }
        if attrs_differ((before, &old), (after, &new)) {
            plan.attrs.push(id);
            plan.within.extend(names.iter().filter_map(|(dir, _)| self.held.id_of(*dir)));
        }
        if switch.compare_listings {
            let differing = names_that_differ((before, &old), (after, &new))?;
            plan.names.extend(differing.into_iter().map(|name| (ino, name)));
        }
        // The kernel still knows it by names that the tree after does not have. Of a node that only
        // the base has, and under one name, the base path says enough.
        let unknown = names_without(&before.tree, &after.tree, ino);
        let has_one_name = |attr: Attr| attr.kind == FileKind::Dir || attr.meta.nlink <= 1;
        if !unknown.is_empty()
            && (after.tree.node(ino).is_some() || !before.attr(&old).is_none_or(has_one_name))
        {
            plan.aliases.push((ino, unknown));
        }
        if let Found::Base(_, path, node) = new {
            let cached = CachedAttrs::after_switch((before, &old), after, (&path, &node));
            plan.left_to_base.push((id, path, cached));
        }
        // The kernel drops the dentries of a removed directory, except those in use. By such a
        // dentry a process in the orphaned directory would still reach a file that was kept.
        let is_orphaned = |(dir, _): &(Ino, Name)| switch.orphaned_dirs.contains(dir);
        plan.names.extend(names.into_iter().filter(is_orphaned));
        Ok(())
    }

    /// Plans for a node that becomes an orphan.
    fn plan_orphan(
        &self,
        plan: &mut SwitchPlan,
        before: &State,
        (id, ino): (NodeId, Ino),
        old: Found,
    ) -> FsResult<()> {
        plan.names.extend(self.known_names(before, ino, &old)?);
        if let Found::Base(_, _, node) = &old {
            plan.recorded.push((id, node.clone()));
        }
        // Its holders see that it has no link any more, and that a directory is empty.
        plan.attrs.push(id);
        if before.kind(&old).is_none_or(|kind| kind == FileKind::Dir) {
            plan.listings.push(id);
        }
        // If the base lost it, its holders get the error that they would have got anyway.
        let lost = |error: FsError| {
            log::warn!("restore: cannot keep node {} for its holders: {error}", ino.0);
        };
        let record = answers::known_or(before.record(&old), lost)?;
        plan.orphans.push(NewOrphan { id, ino, record });
        Ok(())
    }

    /// Carries a plan out. Nothing can fail any more.
    fn carry_out(&mut self, mut plan: SwitchPlan, before: &State, after: State) -> Invalidations {
        for (ino, names) in std::mem::take(&mut plan.aliases) {
            self.coherence.add_aliases(ino, names);
        }
        let (orphans, recorded) =
            (std::mem::take(&mut plan.orphans), std::mem::take(&mut plan.recorded));
        let left_to_base = std::mem::take(&mut plan.left_to_base);
        let invalidations = plan.into_invalidations(|ino| self.held.id_of(ino));
        self.coherence.note_switched_names(&invalidations.names);
        self.links.cut_off(&self.held, &orphans.iter().map(|orphan| orphan.id).collect());
        self.state = after;
        for NewOrphan { id, ino, record } in orphans {
            let kept = record.map(|record| {
                self.held.make_orphan(id, record, before.lower.epoch(), |meta| meta.nlink = 0)
            });
            // The state is installed, so there is no way back.
            if let Some(Err(error)) = &kept {
                log::error!("cannot keep node {} for its holders: {error}", ino.0);
            }
            if !matches!(kept, Some(Ok(()))) {
                self.held.make_orphan_without_record(id);
            }
        }
        for (id, node) in recorded {
            self.coherence.note_recorded(&mut self.held, id, &node);
        }
        for (id, path, cached) in left_to_base {
            self.held.set_base_path(id, Some(path));
            if let Some(cached) = cached {
                self.coherence.note_left_to_base(&mut self.held, id, cached);
            }
        }
        invalidations
    }

    /// The base paths in `after` of held files that have more names than the present tree knows.
    fn unseen_names(&self, after: &State) -> FsResult<HashMap<Ino, TreePath>> {
        let live = self.held.iter().filter(|(_, held)| held.is_live()).map(|(_, held)| held.ino);
        let unseen = live.filter(|ino| {
            self.tree.node(*ino).is_some_and(|node| {
                node.kind() != FileKind::Dir
                    && node.meta.nlink as usize > self.tree.links(*ino).count()
            })
        });
        let names = after.lower.names_of(&unseen.collect())?;
        Ok(names.into_iter().map(|(path, ino)| (ino, path)).collect())
    }

    /// The names by which the kernel can know a node, as (directory, name). One may occur twice.
    fn known_names(&self, state: &State, ino: Ino, found: &Found) -> FsResult<Vec<(Ino, Name)>> {
        let in_tree = state.tree.node(ino).map(|node| state.tree.links_of(ino, node));
        let mut names: Vec<(Ino, Name)> =
            in_tree.into_iter().flatten().map(|(dir, name)| (dir, name.clone())).collect();
        names.extend(self.coherence.aliases(ino).cloned());
        if let Found::Base(_, path, _) = found
            && let Some((dir, name)) = path.split()
            && let Some((dir, _)) = unless_denied(state.lower.lookup(&dir))?.flatten()
        {
            names.push((dir, name));
        }
        Ok(names)
    }
}

impl SwitchPlan {
    /// The cached names, attributes and pages that the kernel must invalidate. `id_of` gives the id
    /// of a held directory.
    fn into_invalidations(mut self, id_of: impl Fn(Ino) -> Option<NodeId>) -> Invalidations {
        self.names.sort_unstable();
        let dirs: BTreeMap<Ino, NodeId> = self
            .names
            .chunk_by(|a, b| a.0 == b.0)
            .filter_map(|names| names.first())
            .filter_map(|(dir, _)| Some((*dir, id_of(*dir)?)))
            .collect();
        self.listings.extend(dirs.values());
        let held = |(dir, name): (Ino, Name)| Some((*dirs.get(&dir)?, name));
        Invalidations {
            // Collected rather than inserted one by one: a sorted set is built faster.
            names: self.names.into_iter().filter_map(held).collect(),
            attrs: self.attrs.into_iter().collect(),
            listings: self.listings.into_iter().collect(),
            within: self.within,
        }
    }
}

/// The names of a node that the tree before has and the tree after does not.
fn names_without(before: &Tree, after: &Tree, ino: Ino) -> Vec<(Ino, Name)> {
    let stays = |dir: Ino, name: &Name| match after.dentry(dir, name) {
        Some(Dentry::Child { ino: child, .. }) => *child == ino,
        Some(Dentry::Whiteout(_)) | None => false,
    };
    let gone = before.links(ino).filter(|(dir, name)| !stays(*dir, name));
    gone.map(|(dir, name)| (dir, name.clone())).collect()
}
