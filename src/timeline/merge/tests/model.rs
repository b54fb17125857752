//! A reference model: merges two trees that are written down in full, without any shortcut.

use std::collections::{BTreeMap, BTreeSet};

use crate::fs::State;
use crate::timeline::merge::lines;
use crate::types::{FileKind, Ino, Name, Timestamp};

/// A node of the model: all that a merge preserves, but times and link counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Thing {
    pub(super) kind: FileKind,
    pub(super) data: Vec<u8>,
    pub(super) mode: u32,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) mtime: Timestamp,
}

/// A tree of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Snap {
    pub(super) names: BTreeMap<(Ino, Name), Ino>,
    pub(super) nodes: BTreeMap<Ino, Thing>,
}

impl Snap {
    /// Reads all of a state.
    pub(super) fn of(state: &State) -> Snap {
        let mut snap = Snap::default();
        let mut dirs = vec![state.root()];
        let root = state.resolve(&crate::types::TreePath::root()).unwrap();
        snap.add(state, Ino::ROOT, &root);
        while let Some((dir, lower)) = dirs.pop() {
            for name in state.merged_names(dir, lower.as_ref()).unwrap().into_keys() {
                let found = state.find(dir, lower.as_ref(), &name).unwrap();
                let ino = found.ino().unwrap();
                snap.names.insert((dir, name), ino);
                snap.add(state, ino, &found);
                dirs.extend(state.as_dir(&found));
            }
        }
        snap
    }

    fn add(&mut self, state: &State, ino: Ino, found: &crate::fs::Found) {
        let node = state.node(found).unwrap();
        let data = match node.kind() {
            FileKind::File => state.read_all(found).unwrap(),
            _ => match &node.body {
                crate::tree::Body::Symlink { target } => target.clone(),
                _ => Vec::new(),
            },
        };
        let xattrs = node.xattrs.as_deref().cloned().unwrap_or_default();
        let (kind, mode, mtime) = (node.kind(), node.meta.mode, node.meta.mtime);
        self.nodes.insert(ino, Thing { kind, data, mode, xattrs, mtime });
    }

    /// Each path with the file that it shows, and the other paths of the same file.
    pub(super) fn paths(&self) -> BTreeMap<String, (FileKind, Vec<u8>, u32, Vec<String>)> {
        let mut of_node: BTreeMap<Ino, BTreeSet<String>> = BTreeMap::new();
        let mut dirs = vec![(Ino::ROOT, String::new())];
        while let Some((dir, path)) = dirs.pop() {
            for ((_, name), ino) in self.names.iter().filter(|((at, _), _)| *at == dir) {
                let path = format!("{path}/{name}");
                of_node.entry(*ino).or_default().insert(path.clone());
                if self.nodes[ino].kind == FileKind::Dir {
                    dirs.push((*ino, path));
                }
            }
        }
        let mut shown = BTreeMap::new();
        for (ino, paths) in &of_node {
            let thing = &self.nodes[ino];
            let data = [thing.data.clone(), format!("{:?}", thing.xattrs).into_bytes()].concat();
            for path in paths {
                let links = paths.iter().cloned().collect();
                shown.insert(path.clone(), (thing.kind, data.clone(), thing.mode, links));
            }
        }
        shown
    }

    /// The same tree with other numbers.
    fn renumbered(&self, numbers: &BTreeMap<Ino, Ino>) -> Snap {
        let of = |ino: &Ino| numbers.get(ino).copied().unwrap_or(*ino);
        Snap {
            names: self.names.iter().map(|((d, n), i)| ((of(d), n.clone()), of(i))).collect(),
            nodes: self.nodes.iter().map(|(ino, thing)| (of(ino), thing.clone())).collect(),
        }
    }

    /// This tree, with the numbers of `base` for nodes that replace those.
    fn with_replaced(mut self, base: &Snap) -> Snap {
        loop {
            let (mut numbers, mut taken) = (BTreeMap::new(), BTreeSet::new());
            for (key, old) in &base.names {
                let Some(new) = self.names.get(key) else { continue };
                if old != new
                    && !base.nodes.contains_key(new)
                    && !self.nodes.contains_key(old)
                    && base.nodes[old].kind == self.nodes[new].kind
                    && !taken.contains(old)
                    && !taken.contains(new)
                {
                    numbers.insert(*new, *old);
                    taken.extend([*new, *old]);
                }
            }
            if numbers.is_empty() {
                return self;
            }
            self = self.renumbered(&numbers);
        }
    }

    /// `theirs` with the numbers that this tree gives to new nodes at the same names.
    fn pair(&self, base: &Snap, theirs: &Snap) -> Option<Snap> {
        let (mut numbers, mut taken) = (BTreeMap::new(), BTreeSet::new());
        for (key, ours) in &self.names {
            let Some(new) = theirs.names.get(key) else { continue };
            if ours != new
                && !base.nodes.contains_key(ours)
                && !base.nodes.contains_key(new)
                && !theirs.nodes.contains_key(ours)
                && self.nodes[ours].kind == theirs.nodes[new].kind
                && !taken.contains(new)
                && !taken.contains(ours)
            {
                numbers.insert(*new, *ours);
                taken.extend([*new, *ours]);
            }
        }
        (!numbers.is_empty()).then(|| theirs.renumbered(&numbers))
    }
}

/// Merges two trees; none if there is a conflict.
pub(super) fn merge(base: &Snap, ours: &Snap, theirs: &Snap) -> Option<Snap> {
    let ours = ours.clone().with_replaced(base);
    let mut theirs = theirs.clone().with_replaced(base);
    while let Some(paired) = ours.pair(base, &theirs) {
        theirs = paired.with_replaced(base);
    }
    let keys: BTreeSet<&(Ino, Name)> =
        [base, &ours, &theirs].iter().flat_map(|snap| snap.names.keys()).collect();
    let mut merged = Snap::default();
    for key in keys {
        let (b, o, t) = (base.names.get(key), ours.names.get(key), theirs.names.get(key));
        if let Some(ino) = three_way(b, o, t)? {
            merged.names.insert(key.clone(), *ino);
        }
        // A name that one side replaced hides the edit of the other side.
        for (replaced, other, (replacer, editor)) in
            [(o, t, (&ours, &theirs)), (t, o, (&theirs, &ours))]
        {
            if let (Some(old), Some(_)) = (b, replaced)
                && replaced != b
                && other == b
                && replacer.nodes.contains_key(old)
                && is_edited(base, editor, *old)
            {
                return None;
            }
        }
    }
    for ino in base.nodes.keys() {
        let at = |snap: &Snap| -> BTreeSet<(Ino, Name)> {
            snap.names.iter().filter(|(_, to)| *to == ino).map(|(key, _)| key.clone()).collect()
        };
        let (b, o, t) = (at(base), at(&ours), at(&theirs));
        let both_left = b.iter().any(|key| !o.contains(key) && !t.contains(key));
        let arrived = |x: &BTreeSet<_>| x.difference(&b).cloned().collect::<BTreeSet<_>>();
        if both_left && arrived(&o) != arrived(&t) {
            return None;
        }
        // Each head removed other names of an edited file.
        let is_lost = !b.is_empty() && !merged.names.values().any(|of| of == ino);
        let edited = is_edited(base, &ours, *ino) || is_edited(base, &theirs, *ino);
        if is_lost && edited && !o.is_empty() && !t.is_empty() {
            return None;
        }
        let gone = |snap: &Snap| !snap.nodes.contains_key(ino);
        if gone(&ours) && !gone(&theirs) && is_edited(base, &theirs, *ino)
            || gone(&theirs) && !gone(&ours) && is_edited(base, &ours, *ino)
        {
            return None;
        }
    }
    let named: BTreeSet<Ino> = merged.names.values().copied().chain([Ino::ROOT]).collect();
    for ino in named {
        let of = |snap: &Snap| snap.nodes.get(&ino).cloned();
        merged.nodes.insert(ino, merge_thing(of(base), of(&ours), of(&theirs))?);
    }
    check_shape(&merged).then_some(merged)
}

/// Whether each directory has one name, and all lead to the root.
fn check_shape(snap: &Snap) -> bool {
    let mut reached = BTreeSet::from([Ino::ROOT]);
    let mut todo = vec![Ino::ROOT];
    while let Some(dir) = todo.pop() {
        for (_, ino) in snap.names.iter().filter(|((at, _), _)| *at == dir) {
            if snap.nodes[ino].kind == FileKind::Dir {
                if !reached.insert(*ino) {
                    return false;
                }
                todo.push(*ino);
            }
        }
    }
    snap.names.keys().all(|(dir, _)| reached.contains(dir))
}

fn is_edited(base: &Snap, snap: &Snap, ino: Ino) -> bool {
    let strip = |thing: &Thing| Thing { mtime: Timestamp::default(), ..thing.clone() };
    match (base.nodes.get(&ino), snap.nodes.get(&ino)) {
        (Some(a), Some(b)) => strip(a) != strip(b),
        _ => false,
    }
}

fn three_way<T: PartialEq>(base: T, ours: T, theirs: T) -> Option<T> {
    if theirs == base || ours == theirs {
        Some(ours)
    } else if ours == base {
        Some(theirs)
    } else {
        None
    }
}

fn merge_thing(base: Option<Thing>, ours: Option<Thing>, theirs: Option<Thing>) -> Option<Thing> {
    let (ours, theirs) = match (ours, theirs) {
        (Some(ours), Some(theirs)) => (ours, theirs),
        (only, None) | (None, only) => return only,
    };
    let b = base.as_ref();
    let part = |of: fn(&Thing) -> &Vec<u8>| {
        three_way(b.map(of), Some(of(&ours)), Some(of(&theirs))).flatten().cloned()
    };
    let data = match (part(|thing| &thing.data), b) {
        (Some(data), _) => data,
        (None, Some(base)) if base.kind == FileKind::File => {
            let all = [&base.data, &ours.data, &theirs.data];
            if !all.iter().all(|data| lines::is_text(data)) {
                return None;
            }
            lines::merge(&base.data, &ours.data, &theirs.data).clean()?
        }
        _ => return None,
    };
    let mode = three_way(b.map(|t| t.mode), Some(ours.mode), Some(theirs.mode))??;
    let mut xattrs = BTreeMap::new();
    for name in ours.xattrs.keys().chain(theirs.xattrs.keys()) {
        let of = |thing: &Thing| thing.xattrs.get(name).cloned();
        let was = b.map(of);
        let (ours, theirs) = (of(&ours), of(&theirs));
        if let Some(value) = three_way(was, Some(ours), Some(theirs))?? {
            xattrs.insert(name.clone(), value);
        }
    }
    let mtime = ours.mtime.max(theirs.mtime);
    Some(Thing { kind: ours.kind, data, mode, xattrs, mtime })
}
