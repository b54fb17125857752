//! The three states of a merge as one table: which node each changed name had, has here and has
//! there.
//!
//! * A node is the same one in two states if it has the same inode number. So renames are followed.
//! * Programs often replace a file instead of writing to it. A new node that stands at the name of
//!   a node of the same kind, of which the head kept no name, is that node: it *replaces* it.
//! * Two new nodes of one kind at one name are one node without a past.
//!
//! So a node has one number in the table, which can differ from its number in a head.
//!
//! Each state reads the base as it was in its epoch. If an apply came between two states, the names
//! and nodes that it touched may differ between them, like those of which the trees differ.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;

use super::fields::FieldDiff;
use super::view::{Places, Slot, View};
use crate::error::FsResult;
use crate::fs::{Found, State};
use crate::types::{FileKind, Ino, TreePath};

/// One of the two heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The head that is merged into.
    Ours,
    /// The head that is merged.
    Theirs,
}

impl Side {
    pub(super) const BOTH: [Side; 2] = [Side::Ours, Side::Theirs];

    pub(super) fn other(self) -> Side {
        match self {
            Side::Ours => Side::Theirs,
            Side::Theirs => Side::Ours,
        }
    }
}

/// A head, and the numbers that the table gives to its nodes.
pub(super) struct Head<'a> {
    view: View<'a>,
    /// The number in the table, by the number in the head, where they differ.
    canon: HashMap<Ino, Ino>,
    real: HashMap<Ino, Ino>,
    /// The names that may differ from the merge base.
    names: BTreeSet<Slot>,
    /// The nodes of which the records differ, by their numbers in the head.
    touched: BTreeSet<Ino>,
}

/// The nodes of a name in the three states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Values {
    pub(super) base: Option<Ino>,
    ours: Option<Ino>,
    theirs: Option<Ino>,
}

impl Values {
    pub(super) fn of(&self, side: Side) -> Option<Ino> {
        match side {
            Side::Ours => self.ours,
            Side::Theirs => self.theirs,
        }
    }

    pub(super) fn is_changed_by(&self, side: Side) -> bool {
        self.of(side) != self.base
    }

    /// The merged value; none if both heads changed it differently.
    pub(super) fn merged(&self) -> Option<Option<Ino>> {
        if !self.is_changed_by(Side::Theirs) || self.ours == self.theirs {
            Some(self.ours)
        } else if self.is_changed_by(Side::Ours) {
            None
        } else {
            Some(self.theirs)
        }
    }
}

/// The table.
pub(super) struct Three<'a> {
    pub(super) base: View<'a>,
    ours: Head<'a>,
    theirs: Head<'a>,
    /// The names that differ in the three states.
    pub(super) slots: BTreeMap<Slot, Values>,
    /// The names of `slots` that have a node in one of the states.
    of_node: HashMap<Ino, BTreeSet<Slot>>,
    diffs: RefCell<HashMap<(Side, Ino), Rc<FieldDiff>>>,
}

impl<'a> Three<'a> {
    /// Compares two heads with the merge base. They can lie over different epochs of the base.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(super) fn new(
        places: &'a Places,
        base: &'a State,
        ours: &'a State,
        theirs: &'a State,
    ) -> FsResult<Three<'a>> {
        let view = |state| View { state, places };
        let base = view(base);
        let mut three = Three {
            base,
            ours: Head::new(base, view(ours))?,
            theirs: Head::new(base, view(theirs))?,
            slots: BTreeMap::new(),
            of_node: HashMap::new(),
            diffs: RefCell::default(),
        };
        let views = [base, three.ours.view, three.theirs.view];
        let touched = three.ours.touched.iter().chain(&three.theirs.touched);
        let unseen = touched.filter(|ino| views.iter().any(|view| view.has_unseen_names(**ino)));
        let unseen: HashSet<Ino> = unseen.copied().collect();
        let by_epoch = views.map(|view| (view.state.lower.epoch(), view));
        for view in BTreeMap::from(by_epoch).values() {
            view.note_links(&unseen)?;
        }
        // Once a directory is found, the names in it can be compared.
        loop {
            while three.ours.find_replaced(base)? | three.theirs.find_replaced(base)? {}
            if !three.find_pairs()? {
                break;
            }
        }
        for key in three.keys() {
            let values = three.values(&key)?;
            if Side::BOTH.iter().any(|side| values.is_changed_by(*side)) {
                for ino in [values.base, values.ours, values.theirs].into_iter().flatten() {
                    three.of_node.entry(ino).or_default().insert(key.clone());
                }
                three.slots.insert(key, values);
            }
        }
        Ok(three)
    }

    pub(super) fn head(&self, side: Side) -> &Head<'a> {
        match side {
            Side::Ours => &self.ours,
            Side::Theirs => &self.theirs,
        }
    }

    fn keys(&self) -> BTreeSet<Slot> {
        Side::BOTH.iter().flat_map(|side| self.head(*side).keys()).collect()
    }

    fn values(&self, key: &Slot) -> FsResult<Values> {
        let base = self.base.at(key)?.ino();
        Ok(Values { base, ours: self.ours.at(key)?, theirs: self.theirs.at(key)? })
    }

    /// The names at which a node stands in one of the states, if they differ.
    pub(super) fn slots_of(&self, ino: Ino) -> impl Iterator<Item = (&Slot, &Values)> {
        let slots = self.of_node.get(&ino).into_iter().flatten();
        slots.filter_map(|slot| self.slots.get_key_value(slot))
    }

    /// The nodes that have other names in one of the states.
    pub(super) fn moved(&self) -> BTreeSet<Ino> {
        self.of_node.keys().copied().collect()
    }

    /// The nodes of which a head has another record.
    pub(super) fn touched(&self) -> BTreeSet<Ino> {
        let of = |head: &Head<'_>| -> Vec<Ino> {
            let replaced = head.real.keys().copied();
            head.touched.iter().map(|ino| head.canon(*ino)).chain(replaced).collect()
        };
        of(&self.ours).into_iter().chain(of(&self.theirs)).collect()
    }

    /// Whether the base has a node.
    pub(super) fn is_old(&self, ino: Ino) -> FsResult<bool> {
        Ok(self.base.node(ino)?.ino().is_some())
    }

    /// Whether a head has no name any more of a node that the merge base has.
    pub(super) fn is_gone(&self, side: Side, ino: Ino) -> FsResult<bool> {
        Ok(self.is_old(ino)? && self.head(side).node(ino)?.ino().is_none())
    }

    /// The changes of a head to a node that it shares with the merge base.
    pub(super) fn diff(&self, side: Side, ino: Ino) -> FsResult<Rc<FieldDiff>> {
        if let Some(known) = self.diffs.borrow().get(&(side, ino)) {
            return Ok(Rc::clone(known));
        }
        let head = self.head(side);
        let (old, new) = (self.base.node(ino)?, head.node(ino)?);
        let diff = Rc::new(match (old.ino(), new.ino()) {
            (Some(_), Some(_)) if head.is_touched(ino) => {
                FieldDiff::between((self.base.state, &old), (head.state(), &new))?
            }
            _ => FieldDiff::default(),
        });
        self.diffs.borrow_mut().insert((side, ino), Rc::clone(&diff));
        Ok(diff)
    }

    /// The paths of a name: in our head, in the other one and in the merge base, as far as they
    /// have its directory.
    pub(super) fn paths(&self, (dir, name): &Slot) -> FsResult<Vec<TreePath>> {
        let views = [
            (self.ours.view, self.ours.real(*dir)),
            (self.theirs.view, self.theirs.real(*dir)),
            (self.base, *dir),
        ];
        let mut paths = Vec::new();
        for (view, dir) in views {
            if let Some(path) = view.dir_path(dir)?.map(|dir| dir.join(name))
                && !paths.contains(&path)
            {
                paths.push(path);
            }
        }
        Ok(paths)
    }

    /// The paths of a node in our head, in the other one and in the merge base.
    pub(super) fn node_paths(&self, ino: Ino) -> FsResult<Vec<TreePath>> {
        let mut paths = Vec::new();
        let mut add = |view: &View<'_>, real: Ino| -> FsResult<()> {
            for path in view.paths_of(real)? {
                if !paths.contains(&path) {
                    paths.push(path);
                }
            }
            Ok(())
        };
        add(&self.ours.view, self.ours.real(ino))?;
        add(&self.theirs.view, self.theirs.real(ino))?;
        add(&self.base, ino)?;
        Ok(paths)
    }

    /// Finds new nodes of both heads at one name. Returns whether there are any.
    fn find_pairs(&mut self) -> FsResult<bool> {
        let mut pairs: HashMap<Ino, Ino> = HashMap::new();
        let mut taken: BTreeSet<Ino> = BTreeSet::new();
        for key in self.keys() {
            let values = self.values(&key)?;
            let (Some(ours), Some(theirs)) = (values.ours, values.theirs) else { continue };
            if ours == theirs
                || self.is_old(ours)?
                || self.is_old(theirs)?
                || self.ours.kind(ours)? != self.theirs.kind(theirs)?
                || self.theirs.real.contains_key(&ours)
                || self.theirs.real.contains_key(&theirs)
                || pairs.contains_key(&theirs)
                || !taken.insert(ours)
            {
                continue;
            }
            pairs.insert(theirs, ours);
        }
        let found = !pairs.is_empty();
        pairs.into_iter().for_each(|(theirs, ours)| self.theirs.rename(theirs, ours));
        Ok(found)
    }
}

/// The paths of the base at which applies between the epochs of two states changed something.
fn touched_between(a: &State, b: &State) -> BTreeSet<TreePath> {
    let (a, b) = (&a.lower, &b.lower);
    let mut touched = a.touched_until(b.epoch());
    touched.extend(b.touched_until(a.epoch()));
    touched
}

impl<'a> Head<'a> {
    fn new(base: View<'a>, view: View<'a>) -> FsResult<Head<'a>> {
        let diff = base.state.tree.diff(&view.state.tree);
        for ino in diff.names.iter().map(|(dir, _)| dir).chain(&diff.nodes) {
            base.note_dir(*ino);
            view.note_dir(*ino);
        }
        let mut touched: BTreeSet<Ino> = diff.nodes.union(&diff.contents).copied().collect();
        let mut names = BTreeSet::new();
        let mut todo: Vec<Slot> = diff.names.into_iter().collect();
        for path in touched_between(base.state, view.state) {
            for of in [&base, &view] {
                let Some(ino) = of.note_at(&path)? else { continue };
                touched.insert(ino);
            }
            let Some((above, name)) = path.split() else { continue };
            for of in [&base, &view] {
                // After an apply of a moved directory, the tree can have this one under another
                // number.
                if let Some(dir) = of.note_at(&above)?
                    && of.node(dir)?.ino().is_some()
                {
                    todo.push((dir, name.clone()));
                }
            }
        }
        while let Some(slot) = todo.pop() {
            if names.contains(&slot) {
                continue;
            }
            let (was, is) = (base.at(&slot)?.ino(), view.at(&slot)?.ino());
            if was != is {
                // A directory that only one state has takes its names along.
                for (ino, has, lacks) in [(was, &base, &view), (is, &view, &base)] {
                    let Some(ino) = ino else { continue };
                    if lacks.node(ino)?.ino().is_none() {
                        todo.extend(has.names(ino)?.into_iter().map(|name| (ino, name)));
                    }
                }
            }
            names.insert(slot);
        }
        Ok(Head { view, canon: HashMap::new(), real: HashMap::new(), names, touched })
    }

    pub(super) fn state(&self) -> &'a State {
        self.view.state
    }

    pub(super) fn canon(&self, ino: Ino) -> Ino {
        self.canon.get(&ino).copied().unwrap_or(ino)
    }

    pub(super) fn real(&self, ino: Ino) -> Ino {
        self.real.get(&ino).copied().unwrap_or(ino)
    }

    fn rename(&mut self, real: Ino, canon: Ino) {
        self.canon.insert(real, canon);
        self.real.insert(canon, real);
    }

    fn keys(&self) -> impl Iterator<Item = Slot> {
        self.names.iter().map(|(dir, name)| (self.canon(*dir), name.clone()))
    }

    fn at(&self, (dir, name): &Slot) -> FsResult<Option<Ino>> {
        let found = self.view.at(&(self.real(*dir), name.clone()))?;
        Ok(found.ino().map(|ino| self.canon(ino)))
    }

    /// A node of the table in this head.
    pub(super) fn node(&self, ino: Ino) -> FsResult<Found> {
        self.view.node(self.real(ino))
    }

    pub(super) fn kind(&self, ino: Ino) -> FsResult<Option<FileKind>> {
        Ok(self.state().kind(&self.node(ino)?))
    }

    /// The directory above a directory, in numbers of the table.
    pub(super) fn parent(&self, dir: Ino) -> FsResult<Option<Ino>> {
        Ok(self.view.parent(self.real(dir))?.map(|above| self.canon(above)))
    }

    /// The paths of a node.
    pub(super) fn paths_of(&self, ino: Ino) -> FsResult<Vec<TreePath>> {
        self.view.paths_of(self.real(ino))
    }

    /// Whether the record of a node may differ from that of the merge base.
    pub(super) fn is_touched(&self, ino: Ino) -> bool {
        self.real.contains_key(&ino) || self.touched.contains(&ino)
    }

    /// Finds new nodes that replace others. Returns whether there are any.
    fn find_replaced(&mut self, base: View<'_>) -> FsResult<bool> {
        let mut found: Vec<(Ino, Ino)> = Vec::new();
        let mut taken: BTreeSet<Ino> = BTreeSet::new();
        for key in self.keys().collect::<BTreeSet<Slot>>() {
            let was = base.at(&key)?;
            let (Some(old), Some(new)) = (was.ino(), self.at(&key)?) else { continue };
            if old != new
                && !self.real.contains_key(&old)
                && !self.real.contains_key(&new)
                && !taken.contains(&old)
                && !taken.contains(&new)
                && base.node(new)?.ino().is_none()
                && self.view.node(old)?.ino().is_none()
                && base.state.kind(&was) == self.kind(new)?
            {
                taken.extend([old, new]);
                found.push((new, old));
            }
        }
        let is_found = !found.is_empty();
        found.into_iter().for_each(|(new, old)| self.rename(new, old));
        Ok(is_found)
    }
}
