//! The operations of users: checkpoints, restores, applies, remounts, kills and diffs; and the
//! checks after each.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use jailfs::internals::fs::{Attr, Invalidations};
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{
    Applied, Change, ChangeKind, Checkpoint, Detail, Operation, Reply, Request, Rev,
};
use jailfs::types::{NodeId, TreePath};
use parking_lot::Mutex;

use crate::host;
use crate::tree::{Body, Bytes, Id, ROOT, Times, Tree, below, is_below, parent, show};
use crate::world::{Behind, World};

thread_local! {
    /// Whether this thread runs an apply.
    static IS_APPLYING: Cell<bool> = const { Cell::new(false) };
}

/// The seal message for changes that were made during an apply.
const DURING: &str = "during apply";

/// How often an apply rebased the head onto the new base while programs wrote, and how often it did
/// not.
pub static REBASED: AtomicU64 = AtomicU64::new(0);
pub static LEFT: AtomicU64 = AtomicU64::new(0);

/// The fates that the holders of an unwritten file may have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Untouched {
    /// They keep the node.
    Kept,
    /// Below the newest epoch of the base, different records may describe the same bytes.
    MayBeCut,
}

impl World {
    /// One operation of a user.
    pub fn turn(&mut self) {
        match self.rng.below(24) {
            0..=4 => self.checkpoint(),
            5..=8 => self.restore(),
            9 => self.op_restore(),
            10 => self.discard(),
            11 | 12 => self.remount(),
            13 => self.kill(),
            14 if self.rng.one_in(2) => self.apply(),
            14 => self.apply_meanwhile(),
            15 => self.apply_path(),
            16 => self.undo_apply(),
            17 => self.drop_checkpoint(),
            18 | 19 => self.gc(),
            20 => self.compact(),
            _ => self.diff(),
        }
        if self.rng.one_in(3) {
            self.check_store();
        }
    }

    /// The store passes the full consistency check.
    fn check_store(&self) {
        let Reply::Checked(checked) = self.ask(Request::Check { read_data: true }) else {
            panic!("not a check")
        };
        assert!(checked.problems.is_empty(), "{:#?}", checked.problems);
        assert!(checked.warnings.is_empty(), "{:#?}", checked.warnings);
        assert!(checked.layers > 0 && checked.records > 0);
    }

    fn seals(&self) -> Vec<Checkpoint> {
        let Reply::Log(all) = self.ask(Request::Log) else { panic!("not a log") };
        all
    }

    fn checkpoint(&mut self) {
        let name = self.rng.one_in(2).then(|| format!("name{}", self.checkpoints.len()));
        self.say(format!("checkpoint {name:?}"));
        let before = self.tree.clone();
        let request = Request::Checkpoint { name, message: String::new() };
        let Reply::Checkpoint(made) = self.ask(request) else { panic!("not a checkpoint") };
        self.checkpoints.insert(made.id, self.tree.clone());
        assert_eq!(self.note_operations(&before), ["checkpoint"]);
        self.check(Times::All);
    }

    /// Runs an operation that replaces the state, and checks what the holders of nodes see.
    fn switch(&mut self, request: Request, to: &Tree, times: Times, untouched: Untouched) {
        let before = self.tree.clone();
        let attrs = self.attrs();
        self.invalidated.take();
        let Reply::Restored(done) = self.ask(request) else { panic!("not a restore") };
        if let Some(layer) = done.before {
            self.checkpoints.insert(layer, before.clone());
        }
        self.tree = to.clone();
        let invalidated = self.invalidated.take();
        let changes = done.changes.to_vec().unwrap();
        self.say_changes(&changes);
        check_diff(&before, &self.tree, &changes, Modified::Written);
        self.after_switch(&before, &attrs, &invalidated, untouched);
        self.check(times);
        self.check_host();
        self.note_operations(&before);
        let undo = done.undo.unwrap_or_else(|| panic!("no operation can be undone"));
        if let Some(how) = self.operations[&undo].differs(&before, true, Times::NoChange) {
            panic!("undoing operation {undo} gives another tree: {how}");
        }
    }

    fn epoch(&self) -> usize {
        self.fs().state().lower.epoch().0 as usize
    }

    fn untouched(&self, to: usize) -> Untouched {
        let newest = self.epochs.len() - 1;
        if to == newest && self.epoch() == newest { Untouched::Kept } else { Untouched::MayBeCut }
    }

    /// A state that can be named: its revision, its tree and its epoch.
    fn any_rev(&mut self) -> (Rev, Tree, usize, Times) {
        let seals = self.seals();
        if seals.is_empty() || self.rng.one_in(6) {
            let epoch = self.epochs.len() - 1;
            return (Rev::Base, self.epochs[epoch].clone(), epoch, Times::NoChange);
        }
        let seal = self.rng.pick(&seals).clone();
        let tree = self.checkpoints[&seal.id].clone();
        let rev = match seal.name {
            Some(name) if self.rng.one_in(2) => Rev::Name(name),
            _ => Rev::Id(seal.id),
        };
        (rev, tree, seal.epoch.0 as usize, Times::All)
    }

    fn restore(&mut self) {
        let (to, tree, epoch, times) = self.any_rev();
        self.say(format!("restore {to}"));
        let untouched = self.untouched(epoch);
        self.switch(
            Request::Restore { detach_mounts: false, to, paths: Vec::new(), dry_run: false },
            &tree,
            times,
            untouched,
        );
    }

    fn op_restore(&mut self) {
        let Reply::OpLog(all) = self.ask(Request::OpLog) else { panic!("not a log") };
        // A state that gc freed cannot be restored.
        let all: Vec<_> = all.into_iter().filter(|op| !self.collected.contains(&op.op)).collect();
        let Some(op) = (!all.is_empty()).then(|| self.rng.pick(&all).clone()) else { return };
        self.say(format!("op restore {} ({} to {:?})", op.op, op.verb, op.tree));
        let tree = self.operations[&op.op].clone();
        let times = if op.tree.is_none() { Times::NoChange } else { Times::All };
        let untouched = self.untouched(op.epoch.0 as usize);
        self.switch(
            Request::OpRestore { detach_mounts: false, op: op.op },
            &tree,
            times,
            untouched,
        );
    }

    fn discard(&mut self) {
        self.say("discard".to_owned());
        let epoch = self.epochs.len() - 1;
        let (tree, untouched) = (self.epochs[epoch].clone(), self.untouched(epoch));
        self.switch(Request::Discard { detach_mounts: false }, &tree, Times::NoChange, untouched);
    }

    fn drop_checkpoint(&mut self) {
        let seals: Vec<Checkpoint> =
            self.seals().into_iter().filter(|seal| !seal.automatic).collect();
        if seals.is_empty() {
            return;
        }
        let seal = self.rng.pick(&seals).clone();
        self.say(format!("drop {}", seal.id));
        self.ask(Request::Drop { rev: Rev::Id(seal.id) });
        assert!(self.seals().iter().all(|left| left.id != seal.id || left.automatic));
    }

    fn gc(&mut self) {
        let operations = u64::from(self.rng.below(6) as u32);
        let keep = self.rng.one_in(3).then(|| u64::from(self.rng.below(4) as u32));
        self.say(format!("gc, keeping {operations} operations and {keep:?} checkpoints"));
        let Reply::OpLog(all) = self.ask(Request::OpLog) else { panic!("not a log") };
        let request = |dry_run| Request::Gc { operations, keep, max_store: None, dry_run };
        let Reply::Collected(planned) = self.ask(request(true)) else { panic!("not a gc") };
        let Reply::Collected(done) = self.ask(request(false)) else { panic!("not a gc") };
        assert_eq!((planned.dropped.len(), &planned.layers), (done.dropped.len(), &done.layers));
        let old = all.iter().skip(operations as usize).map(|op| op.op);
        self.collected.extend(old);
        // If gc drops a checkpoint, operations can no longer go back to it either.
        let dropped =
            |op: &Operation| op.tree.is_some_and(|tree| done.dropped.iter().any(|c| c.id == tree));
        self.collected.extend(all.iter().filter(|op| dropped(op)).map(|op| op.op));
        self.check(Times::All);
    }

    fn compact(&mut self) {
        self.say("compact".to_owned());
        self.sandbox().compact().unwrap();
        self.check(Times::All);
    }

    fn remount(&mut self) {
        self.say("remount".to_owned());
        self.close();
        self.open();
        self.check(Times::All);
    }

    /// A killed daemon leaves exactly the present content of the store. Copying takes time, so no
    /// housekeeping runs meanwhile.
    fn kill(&mut self) {
        self.sandbox().detach().unwrap();
        self.stores += 1;
        let copy = self.dir.join(format!("store{}", self.stores));
        self.say(format!("kill, and go on with {}", copy.display()));
        let done = std::process::Command::new("cp")
            .arg("-a")
            .arg(&self.store)
            .arg(&copy)
            .status()
            .unwrap();
        assert!(done.success());
        self.close();
        self.store = copy;
        self.open();
        self.check(Times::All);
    }

    fn applied(&self, paths: Vec<TreePath>, undo: bool) -> Applied {
        match self.ask(Request::Apply {
            paths,
            dry_run: false,
            undo,
            consent: jailfs::sandbox::Consent::ALL,
        }) {
            Reply::Applied(applied) => {
                assert!(applied.conflicts.is_empty(), "conflicts: {:?}", applied.conflicts);
                applied
            }
            other => panic!("{other:?}"),
        }
    }

    /// Records the state that was sealed before an apply.
    fn note_seals(&mut self, before: &Tree) {
        for seal in self.seals() {
            self.checkpoints.entry(seal.id).or_insert_with(|| before.clone());
        }
    }

    fn apply(&mut self) {
        self.say("apply".to_owned());
        let before = self.tree.clone();
        let attrs = self.attrs();
        self.invalidated.take();
        let applied = self.applied(Vec::new(), false);
        self.say_changes(&applied.changes.to_vec().unwrap());
        self.host = host::read(&self.base);
        if let Some(how) = self.tree.differs(&self.host, false, Times::NoChange) {
            panic!("the base is not as the tree after an apply: {how}");
        }
        if applied.epoch.0 as usize == self.epochs.len() {
            self.epochs.push(self.tree.clone());
        }
        assert_eq!(applied.epoch.0 as usize + 1, self.epochs.len());
        let invalidated = self.invalidated.take();
        self.after_switch(&before, &attrs, &invalidated, Untouched::Kept);
        self.check(Times::NoChange);
        self.note_seals(&before);
        self.note_operations(&before);
    }

    /// Programs write at one point of an apply, before or after it sealed the state that it writes
    /// to the base.
    fn apply_meanwhile(&mut self) {
        let moment = self.rng.below(8);
        self.say(format!("apply, and at moment {moment}:"));
        let sealed = self.tree.clone();
        let mut attrs = self.attrs();
        self.invalidated.take();
        let (reached, moments) = mpsc::channel();
        let (go_on, waits) = mpsc::channel::<()>();
        let waits = Mutex::new(waits);
        let changes = AtomicU64::new(0);
        failpoint::set_recorder(Some(Box::new(move |change| {
            let is_moment = matches!(
                change,
                failpoint::Change::Mkdir { .. } | failpoint::Change::Rename { .. }
            );
            if IS_APPLYING.get() && is_moment && changes.fetch_add(1, Ordering::SeqCst) == moment {
                reached.send(()).unwrap();
                waits.lock().recv().unwrap();
            }
        })));
        let sandbox = Arc::clone(self.sandbox());
        let applying = thread::spawn(move || {
            IS_APPLYING.set(true);
            sandbox.handle(Request::Apply {
                paths: Vec::new(),
                dry_run: false,
                undo: false,
                consent: jailfs::sandbox::Consent::ALL,
            })
        });
        loop {
            match moments.recv_timeout(Duration::from_millis(5)) {
                Ok(()) => {
                    for _ in 0..self.rng.below(30) {
                        self.step();
                    }
                    attrs = self.attrs();
                    go_on.send(()).unwrap();
                    break;
                }
                Err(_) if applying.is_finished() => break,
                Err(_) => {}
            }
        }
        let Reply::Applied(applied) = applying.join().unwrap().unwrap() else {
            panic!("not an apply")
        };
        failpoint::set_recorder(None);
        assert!(applied.conflicts.is_empty(), "conflicts: {:?}", applied.conflicts);
        self.host = host::read(&self.base);
        let written = match self.tree.differs(&self.host, false, Times::NoChange) {
            None => self.tree.clone(),
            Some(_) => match sealed.differs(&self.host, false, Times::NoChange) {
                None => sealed,
                Some(how) => {
                    panic!("the base is neither as the tree before an apply nor as after: {how}")
                }
            },
        };
        if applied.epoch.0 as usize == self.epochs.len() {
            self.epochs.push(written.clone());
            let is_rebased = self.fs().state().lower.epoch() == applied.epoch;
            self.say(format!("rebased: {is_rebased}"));
            if is_rebased {
                REBASED.fetch_add(1, Ordering::SeqCst)
            } else {
                LEFT.fetch_add(1, Ordering::SeqCst)
            };
        }
        let before = self.tree.clone();
        let invalidated = self.invalidated.take();
        self.after_switch(&before, &attrs, &invalidated, Untouched::Kept);
        self.check(Times::NoChange);
        // Returns the state with the seal for the changes during the apply, and those of all other
        // operations, with the apply itself.
        for seal in self.seals() {
            let tree = if seal.message == DURING { &before } else { &written };
            self.checkpoints.entry(seal.id).or_insert_with(|| tree.clone());
        }
        self.note_operations_as(|op| if op.description == DURING { &before } else { &written });
    }

    /// Applies a part of the tree to the base.
    fn apply_path(&mut self) {
        let base = self.epochs[self.epochs.len() - 1].clone();
        let (new, old) = (self.tree.paths(), base.paths());
        let all: BTreeSet<&Bytes> =
            new.keys().chain(old.keys()).filter(|p| !p.is_empty()).collect();
        let all: Vec<Bytes> = all.into_iter().cloned().collect();
        if all.is_empty() {
            return;
        }
        let top = self.rng.pick(&all).clone();
        let Some(wanted) = part_applied(&base, &self.tree, &top) else { return };
        self.say(format!("apply {}", show(&top)));
        let before = self.tree.clone();
        let applied = self.applied(vec![TreePath::parse(&top).unwrap()], false);
        self.host = host::read(&self.base);
        let mut wanted = wanted;
        // Of the directories above, only the names are reported here.
        let mut above = parent(&top);
        let host_paths = self.host.paths();
        let wanted_paths = wanted.paths();
        while let Some(path) = above {
            if let (Some(theirs), Some(ours)) = (host_paths.get(path), wanted_paths.get(path)) {
                let theirs = self.host.node(*theirs).clone();
                let ours = wanted.node_mut(*ours);
                let names = ours.names().clone();
                *ours = theirs;
                *ours.names_mut() = names;
            }
            above = parent(path);
        }
        if let Some(how) = wanted.differs(&self.host, false, Times::NoChange) {
            panic!("the base is not as it should be after a part was applied: {how}");
        }
        if applied.epoch.0 as usize == self.epochs.len() {
            self.epochs.push(wanted);
        }
        assert_eq!(applied.epoch.0 as usize + 1, self.epochs.len());
        self.check(Times::All);
        self.note_seals(&before);
        self.note_operations(&before);
    }

    fn undo_apply(&mut self) {
        let is_undone = self.undone_at == Some(self.epochs.len());
        let Some(back) = self.epochs.len().checked_sub(2).filter(|_| !is_undone) else {
            let undo = Request::Apply {
                paths: Vec::new(),
                dry_run: false,
                undo: true,
                consent: jailfs::sandbox::Consent::ALL,
            };
            assert!(self.sandbox().handle(undo).is_err(), "nothing can be undone");
            return;
        };
        self.say("undo apply".to_owned());
        let before = self.tree.clone();
        let applied = self.applied(Vec::new(), true);
        let wanted = self.epochs[back].clone();
        self.host = host::read(&self.base);
        if let Some(how) = wanted.differs(&self.host, false, Times::NoChange) {
            panic!("the base is not as before the apply: {how}");
        }
        if applied.epoch.0 as usize == self.epochs.len() {
            self.epochs.push(wanted);
            self.undone_at = Some(self.epochs.len());
        }
        self.check(Times::All);
        self.note_seals(&before);
        self.note_operations(&before);
    }

    fn diff(&mut self) {
        let (from, old, _, _) = self.any_rev();
        let (to, new) = if self.rng.one_in(2) {
            (Rev::Now, self.tree.clone())
        } else {
            let (rev, tree, _, _) = self.any_rev();
            (rev, tree)
        };
        let detail = *self.rng.pick(&[Detail::NameStatus, Detail::Stat, Detail::Patch]);
        self.say(format!("diff {from} {to}"));
        let changes_of = |world: &World, from: &Rev, to: &Rev| {
            let request =
                Request::Diff { from: from.clone(), to: to.clone(), paths: Vec::new(), detail };
            match world.ask(request) {
                Reply::Diff(changes) => changes.to_vec().unwrap(),
                other => panic!("{other:?}"),
            }
        };
        let changes = changes_of(self, &from, &to);
        self.say_changes(&changes);
        check_diff(&old, &new, &changes, Modified::Differs);
        let nothing = changes_of(self, &to, &to);
        assert!(nothing.is_empty(), "differs from itself: {nothing:?}");
    }

    fn say_changes(&mut self, changes: &[Change]) {
        for change in changes {
            let from = change.old_path.as_ref().map(|p| format!("from {}", show(p.as_bytes())));
            self.say(format!(
                "    {:?} {} {}",
                change.kind,
                show(change.path.as_bytes()),
                from.unwrap_or_default()
            ));
        }
    }

    /// The invalidations that the kernel got for the nodes that it holds.
    fn attrs(&self) -> BTreeMap<NodeId, Attr> {
        let live = self.held.keys().copied().filter(|id| self.live(*id).is_some());
        live.map(|id| (id, self.fs().getattr(id).unwrap())).collect()
    }

    /// Checks held nodes and invalidations against the promises of a restore.
    fn after_switch(
        &mut self,
        before: &Tree,
        attrs: &BTreeMap<NodeId, Attr>,
        invalidated: &Invalidations,
        untouched: Untouched,
    ) {
        let fs = self.fs();
        let held: Vec<(NodeId, Id)> =
            self.held.keys().filter_map(|id| self.live(*id).map(|ino| (*id, ino))).collect();
        for (id, ino) in held {
            let now =
                fs.getattr(id).unwrap_or_else(|e| panic!("getattr of {id:?} after a switch: {e}"));
            assert_eq!(now.ino.0, ino);
            let cut = now.meta.nlink == 0;
            if let Some(wanted) = fate(before, &self.tree, ino, untouched) {
                let at = |tree: &Tree| -> Vec<String> {
                    tree.paths().into_iter().filter(|p| p.1 == ino).map(|p| show(&p.0)).collect()
                };
                let (was, is) = (at(before), at(&self.tree));
                assert_eq!(
                    cut, wanted,
                    "whether {id:?} ({ino}), from {was:?} to {is:?}, is cut off"
                );
            }
            if cut {
                let node = before.node(ino).clone();
                let dead =
                    if node.is_dir() { Behind::DeadDir } else { Behind::Orphan(Box::new(node)) };
                self.held.get_mut(&id).unwrap().behind = dead;
            } else if without_access_time(attrs[&id]) != without_access_time(now) {
                assert!(
                    invalidated.attrs.contains(&id),
                    "the kernel has old attributes of {id:?} ({ino}): {:?} and now {now:?}",
                    attrs[&id]
                );
            }
        }
        self.check_invalidated_names(before, invalidated);
        let alive: BTreeSet<NodeId> =
            self.held.keys().copied().filter(|id| self.live(*id).is_some()).collect();
        self.dentries.retain(|(dir, _), _| alive.contains(dir));
        self.update_readers();
    }

    /// Every name that now leads to another node must have been invalidated.
    fn check_invalidated_names(&mut self, before: &Tree, invalidated: &Invalidations) {
        let dirs: Vec<(NodeId, Id)> =
            self.held.keys().filter_map(|id| Some((*id, self.live(*id)?))).collect();
        for (id, ino) in dirs.into_iter().filter(|(_, ino)| self.tree.node(*ino).is_dir()) {
            let (old, new) = (before.node(ino).names(), self.tree.node(ino).names());
            if old != new {
                assert!(
                    invalidated.listings.contains(&id),
                    "the kernel has an old listing of {id:?} ({ino})"
                );
            }
            let names: BTreeSet<&Bytes> = old.keys().chain(new.keys()).collect();
            for name in names {
                let is_advertised = invalidated
                    .names
                    .iter()
                    .any(|(dir, n)| *dir == id && n.as_bytes() == &name[..]);
                let known = self.dentries.get(&(id, name.clone())).copied();
                let stale = match (old.get(name), new.get(name)) {
                    (None, Some(_)) => true,
                    (Some(_), None) => known.is_some(),
                    (Some(a), Some(b)) if a != b => known.is_some(),
                    _ => known.is_some_and(|child| self.live(child).is_none()),
                };
                assert!(
                    !stale || is_advertised,
                    "the kernel has an old dentry of {} in {id:?} ({ino})",
                    show(name)
                );
                if is_advertised {
                    self.dentries.remove(&(id, name.clone()));
                }
            }
        }
    }
}

/// Reading a directory changes its access time on the host.
fn without_access_time(mut attr: Attr) -> Attr {
    attr.meta.atime = jailfs::types::Timestamp::default();
    attr
}

/// Whether the holders of a node must be detached from it; `None` if both are allowed.
fn fate(before: &Tree, after: &Tree, ino: Id, untouched: Untouched) -> Option<bool> {
    let old = before.node(ino);
    let Some(new) = after.get(ino) else { return Some(true) };
    match (&old.body, &new.body) {
        (Body::Dir(_), Body::Dir(_)) => Some(!dir_stays(before, after, ino)),
        (Body::File(a), Body::File(b)) if **a != **b => Some(true),
        (Body::File(a), Body::File(b)) => {
            (std::rc::Rc::ptr_eq(a, b) && untouched == Untouched::Kept).then_some(false)
        }
        _ => (untouched == Untouched::Kept).then_some(false),
    }
}

fn dir_stays(before: &Tree, after: &Tree, dir: Id) -> bool {
    if dir == ROOT {
        return true;
    }
    let (a, b) = (before.places(dir), after.places(dir));
    a == b && dir_stays(before, after, a[0].0)
}

/// The base after the part of the tree at and below `top` was applied. `None` if that part shares
/// nodes with the rest, because the result is then not defined.
fn part_applied(base: &Tree, tree: &Tree, top: &[u8]) -> Option<Tree> {
    let (old, new) = (base.paths(), tree.paths());
    let inside: BTreeSet<Id> = below(&old, top).chain(below(&new, top)).map(|(_, id)| id).collect();
    let shared = |(path, id): (&Bytes, &Id)| !is_below(path, top) && inside.contains(id);
    if old.iter().any(shared) || new.iter().any(shared) {
        return link_applied(base, tree, top);
    }
    let exists = new.contains_key(top);
    let mut wanted = base.clone();
    let mut missing = Vec::new();
    let mut above = parent(top);
    while let Some(path) = above {
        match (old.get(path), new.get(path)) {
            (Some(a), Some(b)) if a == b => {}
            (None, Some(b)) if base.get(*b).is_none() && exists => missing.push(path.to_vec()),
            (Some(a), None) if !exists && base.node(*a).is_dir() => {}
            _ => return None,
        }
        above = parent(path);
    }
    if old.contains_key(top) {
        let dir = old[parent(top)?];
        wanted.node_mut(dir).names_mut().remove(name_of(top));
        below(&old, top).for_each(|(_, id)| drop(wanted.nodes.remove(&id)));
    }
    if !exists {
        return Some(wanted);
    }
    for path in missing.iter().rev() {
        let id = new[path];
        let mut node = tree.node(id).clone();
        node.names_mut().clear();
        wanted.nodes.insert(id, node);
        let up = new[parent(path)?];
        wanted.node_mut(up).names_mut().insert(name_of(path).to_vec(), id);
    }
    for (_, id) in below(&new, top) {
        wanted.nodes.insert(id, tree.node(id).clone());
    }
    let up = new[parent(top)?];
    wanted.node_mut(up).names_mut().insert(name_of(top).to_vec(), new[top]);
    Some(wanted)
}

/// The same for one name of a file with several: the file is written in place, for all its names in
/// the base.
fn link_applied(base: &Tree, tree: &Tree, top: &[u8]) -> Option<Tree> {
    let (old, new) = (base.paths(), tree.paths());
    let mut at = Some(top);
    while let Some(path) = at {
        if !old.contains_key(path) || old.get(path) != new.get(path) {
            return None;
        }
        at = parent(path);
    }
    let id = old[top];
    let mut wanted = base.clone();
    *wanted.node_mut(id) = tree.node(id).clone();
    (!base.node(id).is_dir()).then_some(wanted)
}

fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}

/// The node at a path, without the parts that a diff leaves out.
fn seen(
    tree: &Tree,
    id: Id,
) -> (u32, u32, u32, Option<jailfs::types::Timestamp>, BTreeMap<Bytes, Bytes>, Bytes) {
    let node = tree.node(id);
    let content = match &node.body {
        Body::File(bytes) => bytes.to_vec(),
        Body::Link(text) => text.clone(),
        Body::Dir(_) | Body::Special => Vec::new(),
    };
    let mtime = (!node.is_dir()).then_some(node.mtime);
    (node.mode, node.uid, node.gid, mtime, node.xattrs.clone(), content)
}

/// Changes that are reported as modified.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Modified {
    /// A file whose bytes differ.
    Differs,
    /// A file that was written to, also with the same bytes, as a restore reports it.
    Written,
}

/// Replays the changes on the older state: the result must be the newer state, and every change
/// must have an effect.
fn check_diff(old: &Tree, new: &Tree, changes: &[Change], modified: Modified) {
    assert!(changes.is_sorted_by(|a, b| a.path <= b.path), "the changes are sorted by path");
    let (was, is) = (old.paths(), new.paths());
    let mut left: BTreeMap<Bytes, Id> = was.clone();
    let path = |p: &TreePath| p.as_bytes().to_vec();
    for change in changes.iter().filter(|c| c.kind == ChangeKind::Deleted) {
        assert!(
            left.remove(&path(&change.path)).is_some(),
            "{} was not there to be deleted",
            change.path
        );
    }
    let mut renames: Vec<(Bytes, Bytes)> = Vec::new();
    for change in changes.iter().filter(|c| c.kind == ChangeKind::Renamed) {
        let (from, to) = (path(change.old_path.as_ref().unwrap()), path(&change.path));
        assert_eq!(
            was.get(&from),
            is.get(&to),
            "{} is another node than before the rename",
            change.path
        );
        assert_ne!(is.get(&from), is.get(&to), "{} did not leave its path", change.path);
        assert!(!was.contains_key(&to) || was[&to] != is[&to], "{} was there before", change.path);
        renames.push((from, to));
    }
    renames.sort_by_key(|r| std::cmp::Reverse(r.0.len()));
    let mut moved: Vec<(Bytes, BTreeMap<Bytes, Id>)> = Vec::new();
    for (from, to) in renames {
        let part: BTreeMap<Bytes, Id> =
            below(&left, &from).map(|(p, id)| (p[from.len()..].to_vec(), id)).collect();
        left.retain(|p, _| !is_below(p, &from));
        moved.push((to, part));
    }
    moved.sort_by_key(|m| m.0.len());
    for (to, part) in moved {
        for (rest, id) in part {
            assert!(left.insert([&to[..], &rest].concat(), id).is_none(), "{} is taken", show(&to));
        }
    }
    let mut named: BTreeSet<Bytes> = BTreeSet::new();
    for change in changes.iter().filter(|c| c.kind != ChangeKind::Deleted) {
        let at = path(&change.path);
        let id = is.get(&at).unwrap_or_else(|| panic!("{} is not there", change.path));
        let relinked = left.get(&at).is_some_and(|was| was != id);
        let before = left.get(&at).map(|id| seen(old, *id));
        let after = seen(new, *id);
        let content = |s: &(u32, u32, u32, _, _, Bytes)| s.5.clone();
        let right = match (change.kind, &before) {
            (ChangeKind::Added, before) => before.is_none(),
            (ChangeKind::Renamed, before) => before.is_some(),
            (ChangeKind::Modified, Some(b)) if content(b) == after.5 => {
                let is_file = |mode: u32| mode & 0o170_000 == 0o100_000;
                modified == Modified::Written && is_file(b.0) && is_file(after.0)
            }
            (ChangeKind::Modified, Some(_)) => true,
            (ChangeKind::Attributes, Some(b)) => (*b != after || relinked) && content(b) == after.5,
            (ChangeKind::TypeChanged, Some(b)) => b.0 & 0o170_000 != after.0 & 0o170_000,
            _ => false,
        };
        assert!(right, "{}: {:?} is not the kind of the change", change.path, change.kind);
        assert!(named.insert(at.clone()), "{} is listed twice", change.path);
        left.insert(at, *id);
    }
    for (path, id) in &is {
        let Some(before) = left.get(path) else {
            panic!("{} was added and is not listed", show(path))
        };
        if !named.contains(path) && !path.is_empty() {
            assert!(
                seen(old, *before) == seen(new, *id),
                "{} changed and is not listed",
                show(path)
            );
        }
    }
    if let Some(path) = left.keys().find(|p| !is.contains_key(*p)) {
        panic!("{} is gone and is not listed", show(path));
    }
}
