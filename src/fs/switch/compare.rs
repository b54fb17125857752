//! Compares two states of the filesystem for a switch: which held nodes keep their id.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::fingerprint;
use crate::fs::merged::state::Dir;
use crate::fs::{Attr, Found, State};
use crate::tree::{Body, Dentry, Origin, Source, Tree};
use crate::types::{FileKind, Ino, Name, TreePath};

/// The fate of a held node in a switch.
pub(super) enum Fate {
    /// It keeps its id; where it is in the state after.
    Kept(Found),
    /// It becomes an orphan.
    Orphan,
}

/// Facts about one of the two states that were found out so far.
#[derive(Default)]
struct Known {
    /// The base paths of nodes that the tree does not have.
    base: HashMap<Ino, TreePath>,
    /// The base paths of shown directories in which an apply changed a name.
    touched: HashMap<Ino, TreePath>,
}

/// The two states of a switch, and what was found out about them so far.
pub(super) struct Comparison<'a> {
    before: &'a State,
    after: &'a State,
    /// Whether every file has the same content in both, wherever that is stored.
    same_content: bool,
    /// Whether the kernel keeps its own times of files.
    writeback: bool,
    /// The files whose extents differ in the two trees.
    contents: BTreeSet<Ino>,
    known_before: Known,
    known_after: Known,
    kept_dirs: HashMap<Ino, bool>,
    /// Which directory of the state after merges with a directory of the base.
    merged_after: HashMap<TreePath, Option<Ino>>,
}

impl<'a> Comparison<'a> {
    pub(super) fn new(
        (before, after): (&'a State, &'a State),
        contents: BTreeSet<Ino>,
        (same_content, writeback): (bool, bool),
    ) -> Comparison<'a> {
        Comparison {
            before,
            after,
            same_content,
            writeback,
            contents,
            known_before: Known::default(),
            known_after: Known::default(),
            kept_dirs: HashMap::new(),
            merged_after: HashMap::new(),
        }
    }

    /// Adds base paths of nodes in the state after.
    pub(super) fn add_base_after(&mut self, known: impl Iterator<Item = (Ino, TreePath)>) {
        for (ino, path) in known {
            self.known_after.base.entry(ino).or_insert(path);
        }
    }

    /// Forgets which directories stay where they are. That depends on where the kernel holds them,
    /// and where the base has them.
    pub(super) fn forget_places(&mut self) {
        self.kept_dirs.clear();
        self.merged_after.clear();
    }

    /// The names in shown directories that applies between the two states changed in the base.
    pub(super) fn applied_names(&mut self) -> FsResult<Vec<(Ino, Name)>> {
        let mut names = Vec::new();
        let (mut merged_before, mut merged_after) = (HashMap::new(), HashMap::new());
        for (dir, changed) in touched_names(self.before, self.after) {
            for (state, known, merged) in [
                (self.before, &mut self.known_before, &mut merged_before),
                (self.after, &mut self.known_after, &mut merged_after),
            ] {
                // A hidden directory shows no names; a node that left it may be elsewhere.
                if let Some(ino) = merged_dir(state, &dir, merged)? {
                    known.touched.insert(ino, dir.clone());
                    names.extend(changed.iter().map(|name| (ino, name.clone())));
                }
            }
        }
        Ok(names)
    }

    /// The nodes under a name in a directory, before and after. Remembers where those of the base
    /// are.
    pub(super) fn nodes_of(
        &mut self,
        dir: Ino,
        name: &Name,
    ) -> FsResult<(Option<Ino>, Option<Ino>)> {
        Ok((self.node_of(dir, name, true)?, self.node_of(dir, name, false)?))
    }

    fn node_of(&mut self, dir: Ino, name: &Name, is_before: bool) -> FsResult<Option<Ino>> {
        let state = if is_before { self.before } else { self.after };
        let lower = match state.tree.node(dir).map(|node| &node.body) {
            Some(Body::Dir { base }) => base.clone(),
            Some(_) => return Ok(None),
            // The directory is as in the base, where the other state may know it to be.
            None => match self.base_path_of(dir, is_before)? {
                Some(path) => Some(path),
                None => return Ok(None),
            },
        };
        let Some(found) = unless_denied(state.find(dir, lower.as_ref(), name))? else {
            return Ok(None);
        };
        if let Found::Base(ino, path, _) = &found {
            let known = if is_before { &mut self.known_before } else { &mut self.known_after };
            known.base.insert(*ino, path.clone());
        }
        Ok(found.ino())
    }

    /// The base path of a directory that one state's tree does not have, if that state shows it.
    fn base_path_of(&self, dir: Ino, is_before: bool) -> FsResult<Option<TreePath>> {
        let (state, other, known) = if is_before {
            (self.before, self.after, &self.known_before)
        } else {
            (self.after, self.before, &self.known_after)
        };
        let Some(Body::Dir { base: Some(path) }) = other.tree.node(dir).map(|node| &node.body)
        else {
            // Neither tree has it: it matters only if an apply changed a name in it.
            return Ok(match dir {
                Ino::ROOT => Some(TreePath::root()),
                _ => known.touched.get(&dir).cloned(),
            });
        };
        let is_shown = path.is_root() || merged_dir(state, path, &mut HashMap::new())? == Some(dir);
        Ok(is_shown.then(|| path.clone()))
    }

    /// Whether one of these nodes is a directory that is not where it was. Then the nodes below it
    /// are affected as well.
    pub(super) fn some_dir_moved(&mut self, inos: &BTreeSet<Ino>) -> FsResult<bool> {
        for ino in inos {
            let is_dir = |state: &State, known: &Known| -> FsResult<bool> {
                let found = found_of(state, *ino, None, &known.base)?;
                Ok(state.kind(&found) == Some(FileKind::Dir))
            };
            let was = is_dir(self.before, &self.known_before)?;
            let is = is_dir(self.after, &self.known_after)?;
            if (was || is) && !self.dir_kept(*ino, None)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Where a held, live node was, and what the switch makes of it. `held` is the base path where
    /// the kernel found it.
    pub(super) fn fate(&mut self, ino: Ino, held: Option<&TreePath>) -> FsResult<(Found, Fate)> {
        let old = found_of(self.before, ino, held, &self.known_before.base)?;
        let new = self.after_of(ino, held, &old)?;
        let fate = if self.keeps(ino, held, &old, &new)? { Fate::Kept(new) } else { Fate::Orphan };
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
            FileKind::Dir => {
                // Another process has moved it in the base, and the kernel sees it where it was
                // then.
                let is_elsewhere =
                    matches!((old, held), (Found::Base(_, path, _), Some(held)) if path != held);
                Ok(!is_elsewhere && self.dir_kept(ino, held)?)
            }
            // An apply changes the change time of every file that it wrote. Its holders keep it all
            // the same.
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
            | FileKind::Block => Ok(self.same_content || self.same_bytes(old, new)?),
        }
    }

    /// The node in the state after, if a path leads to it there.
    fn after_of(&mut self, ino: Ino, held: Option<&TreePath>, old: &Found) -> FsResult<Found> {
        if self.after.tree.node(ino).is_some() {
            return Ok(Found::Upper(ino, None));
        }
        if ino == Ino::ROOT {
            return self.after.resolve(&TreePath::root());
        }
        let known = self.known_after.base.get(&ino).cloned();
        for path in [known, self.origin_of(old), held.cloned()].into_iter().flatten() {
            let Some((found, node)) = unless_denied(self.after.lower.lookup(&path))?.flatten()
            else {
                continue;
            };
            if found == ino && self.after_shows(&path)? {
                return Ok(Found::Base(ino, path, node));
            }
        }
        // In another epoch the base may have it elsewhere: where an apply put it, which is where
        // the state before shows it.
        if self.same_content || self.before.lower.epoch() != self.after.lower.epoch() {
            for path in paths_in(self.before, old)? {
                match unless_denied(self.after.resolve(&path))? {
                    Some(found) if found.ino() == Some(ino) => return Ok(found),
                    Some(_) | None => {}
                }
            }
        }
        Ok(Found::Nothing(None))
    }

    /// The base path that a node of the state before has or was copied up from.
    fn origin_of(&self, old: &Found) -> Option<TreePath> {
        match old {
            Found::Upper(ino, _) => match &self.before.tree.node(*ino)?.body {
                Body::File { origin, .. } => origin.as_ref().map(|origin| origin.path.clone()),
                Body::Dir { base } => base.clone(),
                Body::Symlink { .. } | Body::Special => None,
            },
            Found::Base(_, path, _) => Some(path.clone()),
            Found::Nothing(_) => None,
        }
    }

    /// Whether the state after shows the base node at `path`.
    fn after_shows(&mut self, path: &TreePath) -> FsResult<bool> {
        let Some((above, name)) = path.split() else { return Ok(true) };
        let Some(dir) = merged_dir(self.after, &above, &mut self.merged_after)? else {
            return Ok(false);
        };
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
        // Damaged records could hold a loop of directories. It ends here, and none of it is kept.
        self.kept_dirs.insert(ino, false);
        let old = found_of(self.before, ino, held, &self.known_before.base)?;
        if matches!(old, Found::Nothing(_)) {
            // Another call may know the base path where the kernel found it.
            self.kept_dirs.remove(&ino);
            return Ok(false);
        }
        let new = self.after_of(ino, held, &old)?;
        let was = parent_in(self.before, &old)?;
        let is = parent_in(self.after, &new)?;
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

    fn same_times(&self, old: &Found, new: &Found) -> bool {
        let times = |attr: Option<Attr>| attr.map(|attr| (attr.meta.mtime, attr.meta.ctime));
        times(self.before.attr(old)) == times(self.after.attr(new))
    }

    /// Whether the content of a file, the text of a link or the number of a device is the same, as
    /// far as the records say.
    fn same_bytes(&self, old: &Found, new: &Found) -> FsResult<bool> {
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

/// The names that applies changed between two states, by base path of their directory.
fn touched_names(before: &State, after: &State) -> BTreeMap<TreePath, BTreeSet<Name>> {
    let mut names: BTreeMap<TreePath, BTreeSet<Name>> = BTreeMap::new();
    for path in before.lower.touched_since().into_iter().chain(after.lower.touched_since()) {
        if let Some((dir, name)) = path.split() {
            names.entry(dir).or_default().insert(name);
        }
    }
    names
}

/// The node `ino` in a state: in the tree, or in the base at one of the paths where it may be.
fn found_of(
    state: &State,
    ino: Ino,
    held: Option<&TreePath>,
    known: &HashMap<Ino, TreePath>,
) -> FsResult<Found> {
    if state.tree.node(ino).is_some() {
        return Ok(Found::Upper(ino, None));
    }
    for path in known.get(&ino).into_iter().chain(held) {
        if let Some((found, node)) = unless_denied(state.lower.lookup(path))?.flatten()
            && found == ino
        {
            return Ok(Found::Base(ino, path.clone(), node));
        }
    }
    Ok(Found::Nothing(None))
}

/// Whether the attributes that the kernel caches of a node differ. It caches ACLs as well.
pub(super) fn attrs_differ(
    (before, old): (&State, &Found),
    (after, new): (&State, &Found),
) -> bool {
    if before.attr(old) != after.attr(new) {
        return true;
    }
    match (old, new) {
        (Found::Base(..), Found::Base(..)) => false,
        (Found::Upper(a, _), Found::Upper(b, _)) => {
            before.tree.node(*a).map(|n| &n.xattrs) != after.tree.node(*b).map(|n| &n.xattrs)
        }
        _ => true,
    }
}

/// Whether the extents of two files in the base mean the same bytes: the same file of the base,
/// with the same fingerprint.
fn same_origin(a: Option<&Arc<Origin>>, b: Option<&Arc<Origin>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => {
            fingerprint::matches(&a.print, &b.print) || fingerprint::matches(&b.print, &a.print)
        }
        _ => false,
    }
}

/// The names that stand for other nodes in two states of a directory; none for another node.
pub(super) fn names_that_differ(
    (before, old): (&State, &Found),
    (after, new): (&State, &Found),
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

/// The known paths at which a state shows a node.
fn paths_in(state: &State, found: &Found) -> FsResult<Vec<TreePath>> {
    Ok(match found {
        Found::Upper(ino, _) => {
            state.tree.links(*ino).filter_map(|(dir, name)| state.tree.path_in(dir, name)).collect()
        }
        Found::Base(_, path, _) => match path.split() {
            Some((above, name)) => match unless_denied(state.lower.lookup(&above))?.flatten() {
                Some((dir, _)) => vec![state.dir_path(dir, Some(&above))?.join(&name)],
                None => Vec::new(),
            },
            None => Vec::new(),
        },
        Found::Nothing(_) => Vec::new(),
    })
}

/// The answer of the base, or none if it denies access to a directory on the path. Then no process
/// finds the node by its name, and its holders keep what they hold.
pub(super) fn unless_denied<T>(found: FsResult<T>) -> FsResult<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(FsError::AccessDenied) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The parent of a directory, its name there, and the parent's base path if only the base has it.
fn parent_in(state: &State, found: &Found) -> FsResult<Option<(Ino, Name, Option<TreePath>)>> {
    Ok(match found {
        Found::Upper(ino, _) => {
            state.tree.parent(*ino).map(|(dir, name)| (dir, name.clone(), None))
        }
        Found::Base(_, path, _) => match path.split() {
            Some((above, name)) => unless_denied(state.lower.lookup(&above))?
                .flatten()
                .map(|(dir, _)| (dir, name, Some(above))),
            None => None,
        },
        Found::Nothing(_) => None,
    })
}

/// The directory of a state that merges with the base directory at `path`; none if that is hidden.
fn merged_dir(
    state: &State,
    path: &TreePath,
    known: &mut HashMap<TreePath, Option<Ino>>,
) -> FsResult<Option<Ino>> {
    let Some((above, name)) = path.split() else { return Ok(Some(Ino::ROOT)) };
    if let Some(known) = known.get(path) {
        return Ok(*known);
    }
    let merged = match unless_denied(state.lower.lookup(path))?.flatten() {
        None => None,
        Some((ino, _)) => match record_of(&state.tree, ino) {
            Some((_, base)) => (base.as_ref() == Some(path)).then_some(ino),
            None => match merged_dir(state, &above, known)? {
                Some(dir) => match state.tree.dentry(dir, &name) {
                    None => Some(ino),
                    Some(Dentry::Child { .. } | Dentry::Whiteout(_)) => None,
                },
                None => None,
            },
        },
    };
    known.insert(path.clone(), merged);
    Ok(merged)
}

/// A node of the tree, and the base path with which it merges if it is a directory.
fn record_of(tree: &Tree, ino: Ino) -> Option<Dir> {
    tree.node(ino).map(|node| match &node.body {
        Body::Dir { base } => (ino, base.clone()),
        Body::File { .. } | Body::Symlink { .. } | Body::Special => (ino, None),
    })
}
