//! Works out what a switch changes: what becomes of each node that the kernel holds, and what the
//! kernel must invalidate.
//!
//! A node that neither tree has can be affected only through a directory above it. So all held
//! nodes are compared only if a directory did not keep its place, or if the base is in another
//! epoch.
//!
//! A plan asks the base, and can take long, so it is made without the core lock
//! (`fs/switch/install.rs`). Programs look nodes up and forget them meanwhile. The node table notes
//! these, and [`SwitchPlan::take_unplanned`] returns those that must be added.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::kernel::cached_attrs::CachedAttrs;
use crate::fs::kernel::nodes::{Held, NodeState};
use crate::fs::kernel::orphans::OrphanRecords;
use crate::fs::merged::answers;
use crate::fs::merged::lower::{Extents, LowerNode};
use crate::fs::switch::Invalidations;
use crate::fs::switch::compare::{
    Comparison, Fate, attrs_differ, names_that_differ, unless_denied,
};
use crate::fs::writing::Writing;
use crate::fs::{Attr, Core, Found, State};
use crate::tree::{Dentry, Node, Tree};
use crate::types::{Epoch, FileKind, Ino, Name, NodeId, TreePath};

/// After so many nodes, a search in the node table lets waiting requests go first.
const AT_ONCE: usize = if cfg!(test) { 2 } else { 1024 };

/// A live node, as the kernel holds it.
pub(super) struct LiveNode {
    ino: Ino,
    base: Option<TreePath>,
    /// Names by which the kernel knows it and the tree does not.
    aliases: Vec<(Ino, Name)>,
}

impl LiveNode {
    /// None for an orphan.
    fn of(core: &Core, held: &Held) -> Option<LiveNode> {
        let NodeState::Live { base } = &held.state else { return None };
        let aliases = core.coherence.aliases(held.ino).cloned().collect();
        Some(LiveNode { ino: held.ino, base: base.clone(), aliases })
    }
}

/// A held node, and its fate.
struct NodePlan {
    ino: Ino,
    /// The names by which the kernel can know it. One may occur twice.
    names: Vec<(Ino, Name)>,
    /// The base node that the kernel knows, if the state after has a record of it, or if it becomes
    /// an orphan with one.
    recorded: Option<LowerNode>,
    fate: PlannedFate,
}

enum PlannedFate {
    Kept(Kept),
    Orphan(NewOrphan),
}

/// A node that keeps its id.
struct Kept {
    attrs_differ: bool,
    /// Names in this directory that stand for other nodes.
    names_within: Vec<Name>,
    /// Names by which the kernel knows it and the tree after does not.
    aliases: Vec<(Ino, Name)>,
    left_to_base: Option<LeftToBase>,
}

/// A node that only the base has in the state after.
pub(super) struct LeftToBase {
    pub(super) path: TreePath,
    /// The attributes that the kernel goes on caching.
    pub(super) cached: Option<CachedAttrs>,
}

/// A node that becomes an orphan.
struct NewOrphan {
    /// Its record and extents; none if the base lost them.
    record: Option<(Arc<Node>, Extents)>,
    is_dir: bool,
}

/// The changes to the held nodes and to the kernel's caches.
pub(super) struct Changes {
    pub(super) orphans: BTreeSet<NodeId>,
    /// The records of all orphans, old and new.
    pub(super) orphan_records: OrphanRecords,
    pub(super) recorded: Vec<(NodeId, LowerNode)>,
    pub(super) left_to_base: Vec<(NodeId, LeftToBase)>,
    pub(super) aliases: Vec<(Ino, Vec<(Ino, Name)>)>,
    /// The names of `invalidations`.
    pub(super) switched_names: BTreeSet<(NodeId, Name)>,
    pub(super) invalidations: Invalidations,
}

/// The plan of a switch from one state to another.
pub(super) struct SwitchPlan<'a> {
    before: &'a State,
    after: &'a State,
    compare: Comparison<'a>,
    /// Whether every file has the same content in both states.
    same_content: bool,
    /// Whether the two trees do not tell all names that differ.
    compare_listings: bool,
    /// The names that stand for other nodes.
    names: Vec<(Ino, Name)>,
    /// The nodes that can be affected; none if all can.
    affected: Option<BTreeSet<Ino>>,
    /// The held nodes that changed since the switch began. They are compared even if `affected`
    /// lacks them, because the comparison of the states could not see them.
    changed: BTreeSet<NodeId>,
    /// Files whose base paths in the state after were searched.
    searched: HashSet<Ino>,
    /// In the order of ids, in which a large number of orphans is stored twice as fast.
    nodes: BTreeMap<NodeId, NodePlan>,
}

impl<'a> SwitchPlan<'a> {
    /// Compares the two states. The plan has no held nodes yet.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn new(
        (before, after): (&'a State, &'a State),
        (same_content, writeback): (bool, bool),
    ) -> FsResult<SwitchPlan<'a>> {
        let diff = before.tree.diff(&after.tree);
        let same_epoch = before.lower.epoch() == after.lower.epoch()
            && before.lower.history().len() == after.lower.history().len();
        let mut affected: BTreeSet<Ino> = diff.nodes.union(&diff.contents).copied().collect();
        affected.insert(Ino::ROOT);
        let mut compare =
            Comparison::new((before, after), diff.contents, (same_content, writeback));
        let mut differing = diff.names;
        if !same_epoch {
            differing.extend(compare.applied_names()?);
        }
        let mut names = Vec::new();
        for (dir, name) in differing {
            let (old, new) = compare.nodes_of(dir, &name)?;
            affected.extend(old.iter().chain(&new));
            if old != new {
                names.push((dir, name));
            }
        }
        let all_are_affected = !same_epoch || compare.some_dir_moved(&affected)?;
        Ok(SwitchPlan {
            before,
            after,
            compare,
            same_content,
            compare_listings: !same_epoch && !same_content,
            names,
            affected: (!all_are_affected).then_some(affected),
            changed: BTreeSet::new(),
            searched: HashSet::new(),
            nodes: BTreeMap::new(),
        })
    }

    /// Drops the nodes that changed from the plan. Returns the live held nodes that it lacks. Lets
    /// requests go first now and then. The next call finds the nodes that they change meanwhile.
    /// After the last call, the caller looks for them itself.
    pub(super) fn take_unplanned(&mut self, core: &mut Writing<'_>) -> Vec<(NodeId, LiveNode)> {
        let changed = core.held.take_changed();
        self.changed.extend(&changed);
        // A directory that is cut off takes those below it along, and the plan does not know which
        // these are.
        let is_orphan = |id: &NodeId| core.held.get(*id).is_some_and(|held| !held.is_live());
        if changed.iter().any(|id| self.nodes.contains_key(id) && is_orphan(id)) {
            self.nodes.clear();
        }
        let ids = if self.nodes.is_empty() {
            self.all_ids(core)
        } else {
            changed.iter().for_each(|id| drop(self.nodes.remove(id)));
            changed.into_iter().collect()
        };
        in_parts(core, ids, |core, id, found| {
            found.extend(core.held.get(id).and_then(|held| Some((id, LiveNode::of(core, held)?))));
        })
    }

    /// The held nodes that the switch can affect. One may occur twice.
    fn all_ids(&self, core: &mut Writing<'_>) -> Vec<NodeId> {
        // The kernel may hold many more nodes, so the cost is that of the difference.
        let Some(affected) = &self.affected else {
            return core.held.iter().map(|(id, _)| id).collect();
        };
        let of = |core: &Core, ino: &Ino, ids: &mut Vec<NodeId>| ids.extend(core.held.ids_of(*ino));
        let mut ids = in_parts(core, affected, of);
        ids.extend(&self.changed);
        ids
    }

    /// Adds held nodes to the plan.
    ///
    /// # Errors
    /// Those of the base.
    pub(super) fn add(&mut self, nodes: Vec<(NodeId, LiveNode)>) -> FsResult<()> {
        self.compare.forget_places();
        if self.same_content {
            let inos = nodes.iter().map(|(_, node)| node.ino);
            let unseen: HashSet<Ino> =
                inos.filter(|ino| self.is_unseen(*ino) && !self.searched.contains(ino)).collect();
            let names = self.after.lower.names_of(&unseen)?;
            self.compare.add_base_after(names.into_iter().map(|(path, ino)| (ino, path)));
            self.searched.extend(unseen);
        }
        for (id, node) in nodes {
            let plan = self.plan(&node)?;
            self.nodes.insert(id, plan);
        }
        Ok(())
    }

    /// Whether a file has more names than the tree before knows.
    fn is_unseen(&self, ino: Ino) -> bool {
        self.before.tree.node(ino).is_some_and(|node| {
            node.kind() != FileKind::Dir
                && node.meta.nlink as usize > self.before.tree.links(ino).count()
        })
    }

    fn plan(&mut self, node: &LiveNode) -> FsResult<NodePlan> {
        let ino = node.ino;
        let (old, fate) = self.compare.fate(ino, node.base.as_ref())?;
        let names = self.known_names(node, &old)?;
        let stays_in_base = matches!(fate, Fate::Kept(Found::Base(..) | Found::Nothing(_)));
        let recorded = match &old {
            Found::Base(_, _, base) if !stays_in_base => Some(base.clone()),
            _ => None,
        };
        let fate = match fate {
            Fate::Kept(new) => PlannedFate::Kept(self.plan_kept(ino, &old, new)?),
            Fate::Orphan => PlannedFate::Orphan(self.plan_orphan(ino, &old)?),
        };
        Ok(NodePlan { ino, names, recorded, fate })
    }

    /// Plans for a node that keeps its id.
    fn plan_kept(&self, ino: Ino, old: &Found, new: Found) -> FsResult<Kept> {
        let (before, after) = (self.before, self.after);
        let attrs_differ = attrs_differ((before, old), (after, &new));
        let names_within = if self.compare_listings {
            names_that_differ((before, old), (after, &new))?
        } else {
            Vec::new()
        };
        // The kernel still knows it by names that the tree after does not have. Of a node that only
        // the base has, and under one name, the base path says enough.
        let mut aliases = names_without(&before.tree, &after.tree, ino);
        let has_one_name = |attr: Attr| attr.kind == FileKind::Dir || attr.meta.nlink <= 1;
        if after.tree.node(ino).is_none() && before.attr(old).is_none_or(has_one_name) {
            aliases.clear();
        }
        let left_to_base = match new {
            Found::Base(_, path, node) => {
                let cached = CachedAttrs::after_switch((before, old), after, (&path, &node));
                Some(LeftToBase { path, cached })
            }
            Found::Upper(..) | Found::Nothing(_) => None,
        };
        Ok(Kept { attrs_differ, names_within, aliases, left_to_base })
    }

    /// Plans for a node that becomes an orphan.
    fn plan_orphan(&self, ino: Ino, old: &Found) -> FsResult<NewOrphan> {
        let is_dir = self.before.kind(old).is_none_or(|kind| kind == FileKind::Dir);
        // If the base lost it, its holders get the error that they would have got anyway.
        let lost = |error: FsError| {
            log::warn!("restore: cannot keep node {} for its holders: {error}", ino.0);
        };
        let record = answers::known_or(self.before.record(old), lost)?;
        Ok(NewOrphan { record, is_dir })
    }

    /// The names by which the kernel can know a node, as (directory, name). One may occur twice.
    fn known_names(&self, node: &LiveNode, found: &Found) -> FsResult<Vec<(Ino, Name)>> {
        let State { tree, lower } = self.before;
        let in_tree = tree.node(node.ino).map(|record| tree.links_of(node.ino, record));
        let mut names: Vec<(Ino, Name)> =
            in_tree.into_iter().flatten().map(|(dir, name)| (dir, name.clone())).collect();
        names.extend(node.aliases.iter().cloned());
        let seen = match found {
            Found::Base(_, path, _) => Some(path),
            Found::Upper(..) => None,
            // Another process replaced it, and the kernel still knows it at its old path.
            Found::Nothing(_) => node.base.as_ref(),
        };
        if let Some((dir, name)) = seen.and_then(TreePath::split)
            && let Some((dir, _)) = unless_denied(lower.lookup(&dir))?.flatten()
        {
            names.push((dir, name));
        }
        Ok(names)
    }

    /// The directories whose ids [`SwitchPlan::into_changes`] needs.
    pub(super) fn dirs(&self) -> BTreeSet<Ino> {
        let of_nodes = self.nodes.values().flat_map(|plan| {
            let itself =
                matches!(&plan.fate, PlannedFate::Kept(kept) if !kept.names_within.is_empty());
            plan.names.iter().map(|(dir, _)| *dir).chain(itself.then_some(plan.ino))
        });
        self.names.iter().map(|(dir, _)| *dir).chain(of_nodes).collect()
    }

    /// The changes of the whole plan. `dirs` has the ids of held directories, `orphan_records` the
    /// records of the present orphans.
    pub(super) fn into_changes(
        self,
        dirs: &BTreeMap<Ino, NodeId>,
        orphan_records: OrphanRecords,
    ) -> Changes {
        let id_of = |ino: Ino| dirs.get(&ino).copied();
        let epoch = self.before.lower.epoch();
        let is_orphan = |plan: &&NodePlan| matches!(plan.fate, PlannedFate::Orphan(_));
        let orphaned: BTreeSet<Ino> =
            self.nodes.values().filter(is_orphan).map(|plan| plan.ino).collect();
        let (mut changes, mut all_names) = (Changes::new(orphan_records), self.names);
        for (id, NodePlan { ino, names, recorded, fate }) in self.nodes {
            changes.recorded.extend(recorded.map(|base| (id, base)));
            match fate {
                PlannedFate::Kept(kept) => {
                    let what = &mut changes.invalidations;
                    if kept.attrs_differ {
                        what.attrs.insert(id);
                        what.within.extend(names.iter().filter_map(|(dir, _)| id_of(*dir)));
                    }
                    all_names.extend(kept.names_within.into_iter().map(|name| (ino, name)));
                    if !kept.aliases.is_empty() {
                        changes.aliases.push((ino, kept.aliases));
                    }
                    changes.left_to_base.extend(kept.left_to_base.map(|left| (id, left)));
                    // The kernel drops the dentries of a removed directory, except those in use. By
                    // such a dentry a process in the orphaned directory would still reach a file
                    // that was kept.
                    let is_cut_off = |(dir, _): &(Ino, Name)| orphaned.contains(dir);
                    all_names.extend(names.into_iter().filter(is_cut_off));
                }
                PlannedFate::Orphan(orphan) => {
                    all_names.extend(names);
                    // Its holders see that it has no link any more, and that a directory is empty.
                    changes.invalidations.attrs.insert(id);
                    if orphan.is_dir {
                        changes.invalidations.listings.insert(id);
                    }
                    changes.add_orphan((id, ino), orphan.record, epoch);
                }
            }
        }
        add_names(&mut changes.invalidations, all_names, id_of);
        changes.switched_names = changes.invalidations.names.clone();
        changes
    }
}

impl Changes {
    fn new(orphan_records: OrphanRecords) -> Changes {
        Changes {
            orphans: BTreeSet::new(),
            orphan_records,
            recorded: Vec::new(),
            left_to_base: Vec::new(),
            aliases: Vec::new(),
            switched_names: BTreeSet::new(),
            invalidations: Invalidations::default(),
        }
    }

    /// Adds a node that becomes an orphan. `content` is where its bytes were in a state of `epoch`.
    fn add_orphan(
        &mut self,
        (id, ino): (NodeId, Ino),
        content: Option<(Arc<Node>, Extents)>,
        epoch: Epoch,
    ) {
        self.orphans.insert(id);
        let Some((mut node, extents)) = content else { return };
        Arc::make_mut(&mut node).meta.nlink = 0;
        // The others do not depend on it.
        if let Err(error) = self.orphan_records.add(id, (node, extents), epoch) {
            log::error!("cannot keep node {} for its holders: {error}", ino.0);
            self.orphan_records.remove(id);
        }
    }
}

/// Calls `each` for many ids or numbers. Lets the requests that wait for the core lock go first now
/// and then.
fn in_parts<T, F>(
    core: &mut Writing<'_>,
    all: impl IntoIterator<Item = T>,
    mut each: impl FnMut(&Core, T, &mut Vec<F>),
) -> Vec<F> {
    let mut found = Vec::new();
    for (at, one) in all.into_iter().enumerate() {
        if at % AT_ONCE == AT_ONCE - 1 {
            core.yield_to_waiting();
        }
        each(core, one, &mut found);
    }
    found
}

/// Adds names, and the listings of their directories. `id_of` gives the id of a held directory.
fn add_names(
    what: &mut Invalidations,
    mut names: Vec<(Ino, Name)>,
    id_of: impl Fn(Ino) -> Option<NodeId>,
) {
    names.sort_unstable();
    let dirs: BTreeMap<Ino, NodeId> = names
        .chunk_by(|a, b| a.0 == b.0)
        .filter_map(|names| names.first())
        .filter_map(|(dir, _)| Some((*dir, id_of(*dir)?)))
        .collect();
    what.listings.extend(dirs.values());
    let held = |(dir, name): (Ino, Name)| Some((*dirs.get(&dir)?, name));
    // Collected rather than inserted one by one: a sorted set is built faster.
    what.names = names.into_iter().filter_map(held).collect();
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
