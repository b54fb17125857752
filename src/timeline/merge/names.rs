//! Merges the names: which node each name gets.
//!
//! * Each name is merged on its own: if one head changed it, it is as in that head.
//! * Then the rules that tie names together are checked. A decision *picks* a head for some names,
//!   and the rules are checked again, until nothing more is picked.
//! * A node that both heads have does not get lost by a decision about another node: if its last
//!   name goes, one head is picked for all its names. A new node does not get lost, either: it is
//!   another conflict.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::beside::Kept;
use super::conflict::{Conflict, Did, at_name, of_node};
use super::rules::Rules;
use super::three::{Side, Three, Values};
use super::view::Slot;
use crate::error::FsResult;
use crate::fs::Found;
use crate::types::{FileKind, Ino, TreePath};

/// The merged names.
pub(super) struct Names<'a> {
    three: &'a Three<'a>,
    rules: &'a Rules,
    picks: BTreeMap<Slot, Side>,
    /// The names that were picked before, because they are not merged.
    scope: BTreeSet<Slot>,
    /// The names that were picked here, in this order.
    picked: Vec<Slot>,
    /// By path, so that each path conflicts once.
    pub(super) conflicts: BTreeMap<TreePath, Conflict>,
    /// Conflicts for which our head is picked, because the other side is put beside it.
    pub(super) kept: Vec<Kept>,
    /// The nodes of `kept`, by their numbers in the other head.
    kept_nodes: BTreeSet<Ino>,
}

impl<'a> Names<'a> {
    /// Merges all names, given those that are picked already.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(super) fn merge(
        three: &'a Three<'a>,
        rules: &'a Rules,
        picks: BTreeMap<Slot, Side>,
    ) -> FsResult<Names<'a>> {
        let (conflicts, picked, kept) = (BTreeMap::new(), Vec::new(), Vec::new());
        let (scope, kept_nodes) = (picks.keys().cloned().collect(), BTreeSet::new());
        let mut names = Names { three, rules, picks, scope, picked, conflicts, kept, kept_nodes };
        loop {
            let before = names.picks.len();
            names.conflicts.clear();
            names.check_names()?;
            names.check_renames()?;
            names.check_deletions()?;
            names.check_replacements()?;
            names.check_losses()?;
            names.check_directories()?;
            names.check_parents()?;
            names.check_additions()?;
            if names.picks.len() == before {
                return Ok(names);
            }
        }
    }

    /// The names that get another node than our head has there.
    pub(super) fn changes(&self) -> Vec<(Slot, Option<Ino>, Option<Ino>)> {
        let changes = self.three.slots.iter().filter_map(|(slot, values)| {
            let (ours, merged) = (values.of(Side::Ours), self.merged(slot, values));
            (ours != merged).then(|| (slot.clone(), ours, merged))
        });
        changes.collect()
    }

    /// Whether a node has a name in the merged tree. Says so of nodes whose names are the same in
    /// both heads, and of those with a name that conflicts.
    pub(super) fn has_name(&self, ino: Ino) -> FsResult<bool> {
        let mut slots = self.three.slots_of(ino).peekable();
        if slots.peek().is_none() {
            return Ok(true);
        }
        let stays = |(slot, values): (&Slot, &Values)| {
            self.is_open(slot, values) || self.merged(slot, values) == Some(ino)
        };
        if slots.any(stays) {
            return Ok(true);
        }
        // A file may have further names that neither head changed.
        let ours = self.three.head(Side::Ours);
        let found = ours.node(ino)?;
        let links = ours.state().attr(&found).map_or(0, |attr| match attr.kind {
            FileKind::Dir => 1,
            _ => attr.meta.nlink,
        });
        let lost = self.three.slots_of(ino).filter(|(_, v)| v.of(Side::Ours) == Some(ino)).count();
        Ok(links as usize > lost)
    }

    /// Whether a name conflicts and is not decided.
    fn is_open(&self, slot: &Slot, values: &Values) -> bool {
        values.merged().is_none() && !self.picks.contains_key(slot)
    }

    fn merged(&self, slot: &Slot, values: &Values) -> Option<Ino> {
        match self.picks.get(slot) {
            Some(side) => values.of(*side),
            None => values.merged().unwrap_or(values.of(Side::Ours)),
        }
    }

    fn pick(&mut self, slot: &Slot, side: Side) {
        if let Entry::Vacant(entry) = self.picks.entry(slot.clone()) {
            entry.insert(side);
            self.picked.push(slot.clone());
        }
    }

    /// Picks a head for all names of a node that differ.
    fn pick_node(&mut self, ino: Ino, side: Side) {
        let three = self.three;
        for (slot, values) in three.slots_of(ino) {
            if values.of(Side::Ours) != values.of(Side::Theirs) {
                self.pick(slot, side);
            }
        }
    }

    fn is_dir(&self, ino: Ino) -> FsResult<bool> {
        let [ours, theirs] = Side::BOTH.map(|side| self.three.head(side).kind(ino));
        Ok(ours? == Some(FileKind::Dir) || theirs? == Some(FileKind::Dir))
    }

    /// Lets the caller's choice for `paths` pick a head, or adds a conflict at the first of them.
    /// If the caller wants the other head's side beside ours, picks our head, and notes its node
    /// `their`.
    fn decide(
        &mut self,
        paths: &[TreePath],
        their: Option<Ino>,
        pick: impl FnOnce(&mut Self, Side),
        did: impl Fn(Side) -> FsResult<Did>,
    ) -> FsResult<()> {
        let path = paths.first().cloned().unwrap_or_default();
        let choice = self.rules.choice(paths);
        if let Some(side) = choice.or_else(|| self.rules.markers.as_ref().map(|_| Side::Ours)) {
            let before = self.picked.len();
            pick(self, side);
            let is_picked = self.picked.len() > before;
            if is_picked && choice.is_none() {
                self.keep(path.clone(), their, did(Side::Theirs)?)?;
                self.keep_replacements(before, their)?;
            }
            if is_picked {
                return Ok(());
            }
        }
        let (ours, theirs) = (did(Side::Ours)?, did(Side::Theirs)?);
        let conflict = Conflict { path: path.clone(), ours, theirs };
        self.conflicts.entry(path).or_insert(conflict);
        Ok(())
    }

    /// Notes that a node of the other head goes beside ours; without a node, that it has none.
    fn keep(&mut self, path: TreePath, their: Option<Ino>, did: Did) -> FsResult<()> {
        let found = their.map(|ino| self.three.head(Side::Theirs).node(ino)).transpose()?;
        let theirs = found.filter(|found| found.ino().is_some());
        if let Some(ino) = theirs.as_ref().and_then(Found::ino)
            && !self.kept_nodes.insert(ino)
        {
            return Ok(());
        }
        self.kept.push(Kept { path, theirs, did, only_attributes: false });
        Ok(())
    }

    /// Our head was picked for all names but the first `before`. At some of them the other head may
    /// have put another node than `their`, or edited one that ours removed. No conflict names it,
    /// so it goes beside ours, too.
    fn keep_replacements(&mut self, before: usize, their: Option<Ino>) -> FsResult<()> {
        let three = self.three;
        for slot in self.picked.get(before..).unwrap_or_default().to_vec() {
            let Some(values) = three.slots.get(&slot) else { continue };
            let Some(theirs) = values.of(Side::Theirs).filter(|ino| Some(*ino) != their) else {
                continue;
            };
            let is_edit =
                three.is_gone(Side::Ours, theirs)? && three.diff(Side::Theirs, theirs)?.is_edit();
            if is_edit || values.is_changed_by(Side::Theirs) {
                let did = at_name(three, Side::Theirs, (values.base, Some(theirs)))?;
                let path = three.paths(&slot)?.into_iter().next().unwrap_or_default();
                self.keep(path, Some(theirs), did)?;
            }
        }
        Ok(())
    }

    /// Whether a head is picked for all names of a node that differ between the heads.
    fn is_node_picked(&self, ino: Ino) -> bool {
        let differs = |(_, v): &(&Slot, &Values)| v.of(Side::Ours) != v.of(Side::Theirs);
        let mut slots = self.three.slots_of(ino).filter(differs);
        slots.all(|(slot, _)| self.picks.contains_key(slot))
    }

    /// Whether it is right that a head is picked for a node: it is not merged, the caller chose it,
    /// or the other side is beside it. Otherwise only a choice for another node picked the head.
    fn is_settled(&self, ino: Ino, paths: &[TreePath]) -> bool {
        self.rules.markers.is_some() || self.is_chosen(ino, paths)
    }

    /// Whether a node is not merged, or the caller chose a head for it.
    fn is_chosen(&self, ino: Ino, paths: &[TreePath]) -> bool {
        let mut slots = self.three.slots_of(ino);
        self.rules.choice(paths).is_some() || slots.any(|(slot, _)| self.scope.contains(slot))
    }

    /// A name that both heads gave to different nodes.
    fn check_names(&mut self) -> FsResult<()> {
        let three = self.three;
        for (slot, values) in &three.slots {
            if !self.is_open(slot, values) {
                continue;
            }
            let did = |side| at_name(three, side, (values.base, values.of(side)));
            let paths = three.paths(slot)?;
            self.decide(
                &paths,
                values.of(Side::Theirs),
                |names, side| names.pick(slot, side),
                did,
            )?;
        }
        Ok(())
    }

    /// A node of which both heads removed one name, and that has different new names.
    fn check_renames(&mut self) -> FsResult<()> {
        let three = self.three;
        for ino in three.moved() {
            let mut both_left = None;
            let mut arrived = Vec::new();
            for (slot, values) in three.slots_of(ino) {
                let is = |side| values.of(side) == Some(ino);
                if values.base == Some(ino) && !is(Side::Ours) && !is(Side::Theirs) {
                    both_left = Some(slot);
                } else if values.base != Some(ino) && is(Side::Ours) != is(Side::Theirs) {
                    arrived.push(slot.clone());
                }
            }
            let Some(left) = both_left else { continue };
            if arrived.is_empty() || arrived.iter().all(|slot| self.picks.contains_key(slot)) {
                continue;
            }
            let mut paths = three.paths(left)?;
            paths.extend(three.node_paths(ino)?);
            let did = |side| at_name(three, side, (Some(ino), None));
            self.decide(&paths, Some(ino), |names, side| names.pick_node(ino, side), did)?;
        }
        Ok(())
    }

    /// A node that one head removed and the other one changed.
    fn check_deletions(&mut self) -> FsResult<()> {
        let three = self.three;
        for ino in three.touched() {
            for side in Side::BOTH {
                if !three.is_gone(side, ino)?
                    || three.is_gone(side.other(), ino)?
                    || !three.diff(side.other(), ino)?.is_edit()
                {
                    continue;
                }
                let paths = three.node_paths(ino)?;
                if self.is_node_picked(ino) && self.is_settled(ino, &paths) {
                    continue;
                }
                let did = |of| match of == side {
                    true => at_name(three, of, (Some(ino), None)),
                    false => of_node(three, of, ino),
                };
                self.decide(&paths, Some(ino), |names, side| names.pick_node(ino, side), did)?;
            }
        }
        Ok(())
    }

    /// A name that one head gave to another node, while the other head changed the node there.
    fn check_replacements(&mut self) -> FsResult<()> {
        let three = self.three;
        for (slot, values) in &three.slots {
            for side in Side::BOTH {
                let (Some(ino), Some(_)) = (values.base, values.of(side)) else { continue };
                if !values.is_changed_by(side)
                    || values.is_changed_by(side.other())
                    || self.picks.contains_key(slot)
                    || three.is_gone(side, ino)?
                    || !three.diff(side.other(), ino)?.is_edit()
                {
                    continue;
                }
                let did = |side| at_name(three, side, (values.base, values.of(side)));
                let paths = three.paths(slot)?;
                self.decide(
                    &paths,
                    values.of(Side::Theirs),
                    |names, side| names.pick(slot, side),
                    did,
                )?;
            }
        }
        Ok(())
    }

    /// A node that both heads have and the merged tree does not. Either a decision about its names
    /// took the last one, or each head removed other hard links. Without an edit, the latter is
    /// what both heads want.
    fn check_losses(&mut self) -> FsResult<()> {
        let three = self.three;
        for ino in three.moved() {
            for side in Side::BOTH {
                let has =
                    |side| -> FsResult<bool> { Ok(three.head(side).node(ino)?.ino().is_some()) };
                if self.has_name(ino)? || !has(Side::Ours)? || !has(Side::Theirs)? {
                    break;
                }
                let is_edit = three.diff(side, ino)?.is_edit();
                if !is_edit && !three.slots_of(ino).any(|(slot, _)| self.picks.contains_key(slot)) {
                    continue;
                }
                let mut paths = three.head(side).paths_of(ino)?;
                paths.extend(three.node_paths(ino)?);
                let did = |of| match of == side {
                    true => of_node(three, of, ino),
                    false => Ok(Did::Removed),
                };
                self.decide(&paths, Some(ino), |names, side| names.pick_node(ino, side), did)?;
            }
        }
        Ok(())
    }

    /// A directory that the merged tree does not have, and in which it has names.
    fn check_directories(&mut self) -> FsResult<()> {
        let three = self.three;
        let mut lost: BTreeMap<Ino, Vec<(&Slot, Ino)>> = BTreeMap::new();
        for (slot, values) in &three.slots {
            if let Some(ino) = self.merged(slot, values)
                && !self.is_open(slot, values)
                && !self.has_name(slot.0)?
            {
                lost.entry(slot.0).or_default().push((slot, ino));
            }
        }
        for (dir, names) in lost {
            let lacks =
                |side| -> FsResult<bool> { Ok(three.head(side).node(dir)?.ino().is_none()) };
            let picked = three.slots_of(dir).find_map(|(slot, _)| self.picks.get(slot)).copied();
            let remover = match picked {
                Some(side) => side,
                None if lacks(Side::Ours)? => Side::Ours,
                None => Side::Theirs,
            };
            let paths = three.node_paths(dir)?;
            let before = self.picked.len();
            if self.is_node_picked(dir) {
                for (slot, ino) in names {
                    self.pick(slot, remover);
                    self.pick_node(ino, remover);
                }
                let is_chosen = self.rules.markers.is_none() || self.rules.choice(&paths).is_some();
                if remover == Side::Ours && !is_chosen {
                    self.keep_replacements(before, Some(dir))?;
                }
            }
            if self.picked.len() > before {
                continue;
            }
            let did = |of| match of == remover {
                true => at_name(three, of, (Some(dir), None)),
                false => of_node(three, of, dir),
            };
            self.decide(&paths, Some(dir), |names, side| names.pick_node(dir, side), did)?;
        }
        Ok(())
    }

    /// A directory that does not lead to the root, because the heads moved directories into each
    /// other; and one with two names.
    fn check_parents(&mut self) -> FsResult<()> {
        let three = self.three;
        let parents = self.merged_parents()?;
        for (dir, above) in &parents {
            let is_cycle = self.is_in_cycle(*dir, &parents)?;
            if above.len() < 2 && !is_cycle {
                continue;
            }
            let paths = three.node_paths(*dir)?;
            let did = |side| -> FsResult<Did> {
                let to = three.head(side).paths_of(*dir)?.into_iter().next();
                Ok(Did::RenamedTo(to.unwrap_or_default()))
            };
            self.decide(&paths, Some(*dir), |names, side| names.pick_node(*dir, side), did)?;
        }
        Ok(())
    }

    /// A node that only one head has, and that lost its last name by a decision about another node.
    fn check_additions(&mut self) -> FsResult<()> {
        let three = self.three;
        for ino in three.moved() {
            let [ours, theirs] = Side::BOTH.map(|side| three.head(side).node(ino));
            let side = match (ours?.ino(), theirs?.ino()) {
                (Some(_), None) => Side::Ours,
                (None, Some(_)) => Side::Theirs,
                (Some(_), Some(_)) | (None, None) => continue,
            };
            if three.is_old(ino)? || self.has_name(ino)? {
                continue;
            }
            let stands = |(_, values): &(&Slot, &Values)| values.of(side) == Some(ino);
            let Some((slot, values)) = three.slots_of(ino).find(stands) else { continue };
            // It went with its directory.
            if !self.has_name(slot.0)? {
                continue;
            }
            let mut paths = three.paths(slot)?;
            paths.extend(three.node_paths(ino)?);
            if self.is_chosen(ino, &paths) {
                continue;
            }
            let did = |of| at_name(three, of, (values.base, values.of(of)));
            let path = paths.first().cloned().unwrap_or_default();
            if side == Side::Theirs && self.rules.markers.is_some() {
                self.keep(path, Some(ino), did(side)?)?;
                continue;
            }
            let conflict =
                Conflict { path: path.clone(), ours: did(Side::Ours)?, theirs: did(Side::Theirs)? };
            self.conflicts.entry(path).or_insert(conflict);
        }
        Ok(())
    }

    /// The directories whose names differ, with the directories above them in the merged tree.
    fn merged_parents(&self) -> FsResult<BTreeMap<Ino, Vec<Ino>>> {
        let mut parents: BTreeMap<Ino, Vec<Ino>> = BTreeMap::new();
        for (slot, values) in &self.three.slots {
            let merged = self.merged(slot, values).filter(|_| !self.is_open(slot, values));
            let Some(ino) = merged else { continue };
            if self.is_dir(ino)? {
                parents.entry(ino).or_default().push(slot.0);
            }
        }
        Ok(parents)
    }

    fn is_in_cycle(&self, dir: Ino, parents: &BTreeMap<Ino, Vec<Ino>>) -> FsResult<bool> {
        let ours = self.three.head(Side::Ours);
        let mut seen = BTreeSet::from([dir]);
        let mut at = dir;
        loop {
            let above = match parents.get(&at) {
                Some(above) => above.first().copied(),
                None if matches!(ours.node(at)?, Found::Nothing(_)) => None,
                None => ours.parent(at)?,
            };
            match above {
                None | Some(Ino::ROOT) => return Ok(false),
                Some(above) if above == dir => return Ok(true),
                // A cycle further up is found from the directories in it.
                Some(above) if !seen.insert(above) => return Ok(false),
                Some(above) => at = above,
            }
        }
    }
}
