//! Picks a head before anything is merged: outside of the paths of the caller, and in units.

use std::collections::{BTreeMap, BTreeSet};

use super::beside::Kept;
use super::conflict::{Conflict, Did};
use super::fields::FieldDiff;
use super::rules::{Rules, Unit};
use super::three::{Side, Three, Values};
use super::view::Slot;
use crate::error::FsResult;
use crate::types::{FileKind, Ino, TreePath};

/// The heads that are picked for names and for records.
#[derive(Default)]
pub(super) struct Scope {
    pub(super) names: BTreeMap<Slot, Side>,
    pub(super) nodes: BTreeMap<Ino, Side>,
    pub(super) conflicts: Vec<Conflict>,
    /// Units of which our side is kept, and the other one is put beside it.
    pub(super) kept: Vec<Kept>,
}

/// The changes of the heads in a unit.
#[derive(Default)]
struct Changes {
    ours: bool,
    theirs: bool,
    /// Whether the heads differ in the unit.
    differ: bool,
    /// The paths that the pattern matches.
    paths: BTreeSet<TreePath>,
    names: Vec<Slot>,
    nodes: Vec<Ino>,
}

impl Scope {
    /// Picks our head for what is not merged, and one head for each unit.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(super) fn of(three: &Three<'_>, rules: &Rules) -> FsResult<Scope> {
        let mut scope = Scope::default();
        if !rules.paths.is_empty() {
            scope.leave_others(three, rules)?;
        }
        scope.pick_units(three, rules)?;
        Ok(scope)
    }

    /// Keeps our head where the other one is not merged.
    fn leave_others(&mut self, three: &Three<'_>, rules: &Rules) -> FsResult<()> {
        let mut inside: BTreeSet<Ino> = BTreeSet::new();
        for ino in three.moved() {
            // A rename is one change: it counts if it leads into the paths or out of them.
            let changed =
                || three.slots_of(ino).filter(|(_, values)| values.is_changed_by(Side::Theirs));
            let left = changed().any(|(_, values)| values.base == Some(ino));
            let arrived = changed().any(|(_, values)| values.of(Side::Theirs) == Some(ino));
            for (slot, _) in changed().filter(|_| left && arrived) {
                if rules.includes(&three.paths(slot)?) {
                    inside.insert(ino);
                }
            }
        }
        // Also the names that only our head changed: the other one may have edited their nodes.
        for (slot, values) in &three.slots {
            let mut nodes = [values.base, values.of(Side::Theirs)].into_iter().flatten();
            if !nodes.any(|ino| inside.contains(&ino))
                && !self.is_merged(three, rules, (slot, values))?
            {
                self.names.insert(slot.clone(), Side::Ours);
            }
        }
        for ino in three.touched() {
            if !inside.contains(&ino) && !rules.includes(&three.node_paths(ino)?) {
                self.nodes.insert(ino, Side::Ours);
            }
        }
        Ok(())
    }

    /// Whether a name is at or below the paths, or is a new directory that leads to one.
    fn is_merged(
        &self,
        three: &Three<'_>,
        rules: &Rules,
        (slot, values): (&Slot, &Values),
    ) -> FsResult<bool> {
        let paths = three.paths(slot)?;
        let (None, None, Some(new)) = (values.base, values.of(Side::Ours), values.of(Side::Theirs))
        else {
            return Ok(rules.includes(&paths));
        };
        let is_dir = three.head(Side::Theirs).kind(new)? == Some(FileKind::Dir);
        Ok(rules.includes(&paths) || is_dir && rules.leads(&paths))
    }

    fn pick_units(&mut self, three: &Three<'_>, rules: &Rules) -> FsResult<()> {
        for changes in units(three, rules, self)?.into_values() {
            if !(changes.ours && changes.theirs && changes.differ) {
                continue;
            }
            let path = changes.paths.first().cloned().unwrap_or_default();
            let choice = rules.choice(std::slice::from_ref(&path));
            if choice.is_none() && rules.markers.is_some() {
                self.keep(three, &changes.paths)?;
            } else if choice.is_none() {
                let (ours, theirs) = (Did::ChangedInside, Did::ChangedInside);
                self.conflicts.push(Conflict { path, ours, theirs });
            }
            let side = choice.unwrap_or(Side::Ours);
            self.names.extend(changes.names.into_iter().map(|slot| (slot, side)));
            self.nodes.extend(changes.nodes.into_iter().map(|ino| (ino, side)));
        }
        Ok(())
    }
}

impl Scope {
    /// Keeps our side of a unit, and notes what the other head has of it.
    fn keep(&mut self, three: &Three<'_>, paths: &BTreeSet<TreePath>) -> FsResult<()> {
        let state = three.head(Side::Theirs).state();
        let before = self.kept.len();
        let kept = |path: &TreePath, theirs| {
            let (path, did) = (path.clone(), Did::ChangedInside);
            Kept { path, theirs, did, only_attributes: false }
        };
        for path in paths {
            let found = state.resolve(path)?;
            if found.ino().is_some() {
                self.kept.push(kept(path, Some(found)));
            }
        }
        if self.kept.len() == before {
            self.kept
                .extend(paths.first().map(|path| Kept { did: Did::Removed, ..kept(path, None) }));
        }
        Ok(())
    }
}

/// The changed units.
fn units(three: &Three<'_>, rules: &Rules, scope: &Scope) -> FsResult<BTreeMap<Unit, Changes>> {
    let mut units: BTreeMap<Unit, Changes> = BTreeMap::new();
    for (slot, values) in &three.slots {
        if scope.names.contains_key(slot) {
            continue;
        }
        let Some((unit, path)) = rules.unit(&three.paths(slot)?) else { continue };
        let changes = units.entry(unit).or_default();
        changes.add(path);
        changes.ours |= values.is_changed_by(Side::Ours);
        changes.theirs |= values.is_changed_by(Side::Theirs);
        changes.differ |= values.of(Side::Ours) != values.of(Side::Theirs);
        changes.names.push(slot.clone());
    }
    for ino in three.touched() {
        if scope.nodes.contains_key(&ino) {
            continue;
        }
        let Some((unit, path)) = rules.unit(&three.node_paths(ino)?) else { continue };
        let changes = units.entry(unit).or_default();
        changes.add(path);
        let edits = |side| -> FsResult<bool> { Ok(three.diff(side, ino)?.is_edit()) };
        let (ours, theirs) = (edits(Side::Ours)?, edits(Side::Theirs)?);
        changes.ours |= ours;
        changes.theirs |= theirs;
        changes.differ |= ours != theirs || differs(three, ino)?;
        changes.nodes.push(ino);
    }
    Ok(units)
}

impl Changes {
    fn add(&mut self, path: TreePath) {
        self.paths.insert(path);
    }
}

/// Whether a node that both heads have differs between them.
fn differs(three: &Three<'_>, ino: Ino) -> FsResult<bool> {
    let [ours, theirs] = Side::BOTH.map(|side| three.head(side));
    let (a, b) = (ours.node(ino)?, theirs.node(ino)?);
    if a.ino().is_none() || b.ino().is_none() {
        return Ok(false);
    }
    Ok(FieldDiff::between((ours.state(), &a), (theirs.state(), &b))?.is_edit())
}
