//! What differs between two states, by path.
//!
//! The walk goes down only where the trees say that something differs, and looks only at the names of which they say it, so it
//! costs what differs and not what is there. Two files are the same if their records say so; if those differ, their bytes
//! decide, where somebody wants to know ([`changes`]). For who wants to know what became of a tree, a file that was
//! written is one that changed ([`written`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::error::{FsError, FsResult};
use crate::fs::{Found, State, lower};
use crate::store::record::{Body, Node, Source};
use crate::tree::TreeDiff;
use crate::types::{ByteRange, FileKind, Ino, Name, TreePath};

/// How a path differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Only the newer state has it.
    Added,
    /// Only the older state has it.
    Deleted,
    /// It is another kind of node.
    Type,
    /// The content differs, and perhaps attributes.
    Content,
    /// The same content, and perhaps attributes, in another file: it is a hard link of other names.
    Links,
    /// Mode, owner, times or extended attributes differ.
    Attributes,
    /// A directory of which only the times differ, as they do when a name in it comes or goes.
    DirTimes,
    /// The node stands at another path; what else differs of it is not said.
    Renamed,
}

/// One path that differs.
#[derive(Clone, Debug)]
pub struct PathChange {
    /// The path in the newer state; in the older one if it was deleted.
    pub path: TreePath,
    /// The path in the older state, for a rename.
    pub old_path: Option<TreePath>,
    /// How it differs.
    pub what: What,
    /// What stands there in the older state.
    pub old: Found,
    /// What stands there in the newer state.
    pub new: Found,
}

/// What differs from `old` to `new`, sorted by path. With `renames`, a node that left one path and came to another is
/// one change instead of two; without, as for an apply, it is also told where another node stands that looks the same.
///
/// # Errors
/// What the base answers.
pub fn changes(old: &State, new: &State, renames: bool) -> FsResult<Vec<PathChange>> {
    walk(old, new, renames, Look::Everywhere, &read_names)
}

/// The same with renames, as far as the records tell: a file that was written counts as changed also where it was with the
/// same bytes. No content is read.
///
/// # Errors
/// What the base answers.
pub fn written(old: &State, new: &State) -> FsResult<Vec<PathChange>> {
    walk(old, new, true, Look::AtRecords, &read_names)
}

/// Where is looked, and at what.
#[derive(Clone, Copy)]
enum Look<'a> {
    /// At all that differs, and at bytes where only they can tell.
    Everywhere,
    /// At the records alone.
    AtRecords,
    /// The same, at and below some paths.
    At(&'a [TreePath]),
}

/// Tells at which paths of the base of a state some nodes stand. That may be found out by reading all of the base.
pub(super) type NamesOf<'a> = &'a dyn Fn(&State, &HashSet<Ino>) -> FsResult<BTreeMap<TreePath, Ino>>;

fn read_names(state: &State, wanted: &HashSet<Ino>) -> FsResult<BTreeMap<TreePath, Ino>> {
    state.lower.names_of(wanted)
}

/// What differs at and below some paths, and the directories that lead to them and only the newer state has. Two files are
/// the same if their records say so: no content is read.
///
/// # Errors
/// What the base answers.
pub fn changes_at(old: &State, new: &State, paths: &[TreePath]) -> FsResult<Vec<PathChange>> {
    changes_by(old, new, paths, &read_names)
}

/// The same for who knows where nodes of the base stand.
///
/// # Errors
/// As [`changes_at`], and those of `names_of`.
pub(super) fn changes_by(
    old: &State,
    new: &State,
    paths: &[TreePath],
    names_of: NamesOf<'_>,
) -> FsResult<Vec<PathChange>> {
    walk(old, new, false, Look::At(paths), names_of)
}

fn walk(
    old: &State,
    new: &State,
    renames: bool,
    look: Look<'_>,
    names_of: NamesOf<'_>,
) -> FsResult<Vec<PathChange>> {
    let diff = old.tree.diff(&new.tree);
    let mut paths = unseen_links(old, new, &diff, names_of)?;
    if old.lower.epoch() != new.lower.epoch() {
        paths.extend(old.lower.touched_since());
        paths.extend(new.lower.touched_since());
    }
    let touched = by_directory(&paths);
    let mut walk = Walk {
        old,
        new,
        look,
        is_of_apply: !renames && matches!(look, Look::Everywhere),
        hot: Hot::of(old, new, &diff, &touched)?,
        contents: &diff.contents,
        touched,
        moved_to: HashMap::new(),
        moved_from: BTreeMap::new(),
        left: HashSet::new(),
        changes: Vec::new(),
    };
    if renames {
        walk.find_renames(&diff)?;
    }
    let root = TreePath::root();
    let (a, b) = (old.resolve(&root)?, new.resolve(&root)?);
    walk.compare(&root, &a, &root, &b)?;
    while walk.drop_half_renames() {
        walk.compare(&root, &a, &root, &b)?;
    }
    walk.changes.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(walk.changes)
}

/// Paths of the base at which files stand that differ and that the trees know by other names only.
fn unseen_links(
    old: &State,
    new: &State,
    diff: &TreeDiff,
    names_of: NamesOf<'_>,
) -> FsResult<BTreeSet<TreePath>> {
    let is_unseen = |state: &State, ino: Ino| {
        state.tree.node(ino).is_some_and(|node| {
            node.kind() != FileKind::Dir && node.meta.nlink as usize > state.tree.links_of(ino, node).count()
        })
    };
    let changed = diff.nodes.union(&diff.contents).copied();
    let wanted: HashSet<Ino> = changed.filter(|ino| is_unseen(old, *ino) || is_unseen(new, *ino)).collect();
    let mut paths: BTreeSet<TreePath> = names_of(old, &wanted)?.into_keys().collect();
    if old.lower.epoch() != new.lower.epoch() {
        paths.extend(names_of(new, &wanted)?.into_keys());
    }
    Ok(paths)
}

/// Paths of the base, as names by directory.
fn by_directory(paths: &BTreeSet<TreePath>) -> HashMap<TreePath, BTreeSet<Name>> {
    let mut names: HashMap<TreePath, BTreeSet<Name>> = HashMap::new();
    for path in paths {
        // The names that lead to a path are looked at, too.
        let mut at = path.split();
        while let Some((dir, name)) = at {
            at = dir.split();
            if !names.entry(dir).or_default().insert(name) {
                break;
            }
        }
    }
    names
}

/// Where the walk goes: the nodes that differ or lead to such, and the names in each directory by which it comes to them.
#[derive(Default)]
struct Hot {
    nodes: HashSet<Ino>,
    names: HashMap<Ino, Vec<Name>>,
}

impl Hot {
    fn of(
        old: &State,
        new: &State,
        diff: &TreeDiff,
        touched: &HashMap<TreePath, BTreeSet<Name>>,
    ) -> FsResult<Hot> {
        let mut hot = Hot { nodes: HashSet::from([Ino::ROOT]), names: HashMap::new() };
        let mut heaters = [old, new].map(|state| Heater { state, dirs: HashSet::new() });
        for (dir, name) in &diff.names {
            hot.names.entry(*dir).or_default().push(name.clone());
            heaters.iter_mut().for_each(|heater| heater.heat_dir(*dir, &mut hot));
        }
        // What only the newer state has of names is among those: the others are found in the older one.
        let [in_old, _] = &mut heaters;
        diff.nodes.iter().chain(&diff.contents).for_each(|ino| in_old.heat(*ino, &mut hot));
        // A node at a touched path shows its own difference; the directories above it must be entered.
        for (dir, names) in touched {
            for path in std::iter::once(dir.clone()).chain(names.iter().map(|name| dir.join(name))) {
                for heater in &mut heaters {
                    if let Some((ino, _)) = heater.state.lower.lookup(&path)? {
                        heater.heat(ino, &mut hot);
                    }
                }
            }
        }
        Ok(hot)
    }
}

/// Finds the names that lead to nodes in one state.
struct Heater<'a> {
    state: &'a State,
    /// The directories whose own names were found.
    dirs: HashSet<Ino>,
}

impl Heater<'_> {
    fn heat(&mut self, ino: Ino, hot: &mut Hot) {
        hot.nodes.insert(ino);
        let Some(node) = self.state.tree.node(ino) else { return };
        for (dir, name) in self.state.tree.links_of(ino, node) {
            hot.names.entry(dir).or_default().push(name.clone());
            self.heat_dir(dir, hot);
        }
    }

    fn heat_dir(&mut self, mut dir: Ino, hot: &mut Hot) {
        while self.dirs.insert(dir) {
            hot.nodes.insert(dir);
            let Some((above, name)) = self.state.tree.parent(dir) else { return };
            hot.names.entry(above).or_default().push(name.clone());
            dir = above;
        }
    }
}

struct Walk<'a> {
    old: &'a State,
    new: &'a State,
    look: Look<'a>,
    /// Which node stands at a path counts, too.
    is_of_apply: bool,
    hot: Hot,
    /// Files of which the extents differ in the two trees.
    contents: &'a BTreeSet<Ino>,
    /// Names in directories of the base that are looked at although no tree mentions them.
    touched: HashMap<TreePath, BTreeSet<Name>>,
    /// Old path of each rename, by new path, and the other way round.
    moved_to: HashMap<TreePath, TreePath>,
    moved_from: BTreeMap<TreePath, TreePath>,
    /// Old paths of renames at which the walk found nothing any more.
    left: HashSet<TreePath>,
    changes: Vec<PathChange>,
}

impl Walk<'_> {
    /// Finds nodes that left one path and came to another.
    fn find_renames(&mut self, diff: &TreeDiff) -> FsResult<()> {
        for (dir, name) in &diff.names {
            let Some(crate::tree::Dentry::Child { ino, .. }) = self.new.tree.dentry(*dir, name) else {
                continue;
            };
            let Some(new_path) = self.new.tree.path_in(*dir, name) else { continue };
            for old_path in self.old_paths(*ino)? {
                // Where something else stands, that is told as changed: a rename on top would tell the path twice, or not
                // at all.
                let left = self.new.resolve(&old_path)?.ino().is_none();
                let came = self.old.resolve(&new_path)?.ino().is_none();
                // A node that only went along with a directory above it is told by the rename of that directory.
                if left
                    && came
                    && !self.moved_from.contains_key(&old_path)
                    && !self.went_along(&old_path, &new_path)
                {
                    self.moved_from.insert(old_path.clone(), new_path.clone());
                    self.moved_to.insert(new_path, old_path);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Forgets renames of which the walk met only one end, and what it found. Below a renamed directory both ends have
    /// other paths than the trees say, and something else may stand there.
    fn drop_half_renames(&mut self) -> bool {
        let told: HashSet<&TreePath> = self.changes.iter().filter_map(|c| c.old_path.as_ref()).collect();
        let whole = |old: &TreePath| self.left.contains(old) && told.contains(old);
        let half: Vec<TreePath> = self.moved_from.keys().filter(|old| !whole(old)).cloned().collect();
        for old in &half {
            if let Some(new) = self.moved_from.remove(old) {
                self.moved_to.remove(&new);
            }
        }
        if !half.is_empty() {
            self.changes.clear();
            self.left.clear();
        }
        !half.is_empty()
    }

    fn went_along(&self, old_path: &TreePath, new_path: &TreePath) -> bool {
        match (old_path.split(), new_path.split()) {
            (Some((old_dir, old_name)), Some((new_dir, new_name))) => {
                old_name == new_name && old_dir != new_dir && self.moved_from.get(&old_dir) == Some(&new_dir)
            }
            _ => false,
        }
    }

    /// The paths of a node in the older state, as far as the records tell.
    fn old_paths(&self, ino: Ino) -> FsResult<Vec<TreePath>> {
        if self.old.tree.node(ino).is_some() {
            return Ok(self
                .old
                .tree
                .links(ino)
                .filter_map(|(dir, name)| self.old.tree.path_in(dir, name))
                .collect());
        }
        let base = self.new.tree.node(ino).and_then(|node| match &node.body {
            Body::Dir { base } => base.clone(),
            Body::File { origin, .. } => origin.as_ref().map(|o| o.path.clone()),
            Body::Symlink { .. } | Body::Special => None,
        });
        let Some((above, name)) = base.as_ref().and_then(TreePath::split) else { return Ok(Vec::new()) };
        let Some((dir, _)) = self.old.lower.lookup(&above)? else { return Ok(Vec::new()) };
        match self.old.dir_path(dir, Some(&above)) {
            Ok(dir) => {
                let path = dir.join(&name);
                Ok((self.old.resolve(&path)?.ino() == Some(ino)).then_some(path).into_iter().collect())
            }
            Err(FsError::NotFound) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Whether a path is one of those that are looked at, lies below one, or leads to one.
    fn matters(&self, path: &TreePath) -> bool {
        let Look::At(only) = self.look else { return true };
        only.iter().any(|p| path.starts_with(p) || p.starts_with(path))
    }

    fn push(&mut self, path: &TreePath, what: What, old: &Found, new: &Found) {
        let only_leads = matches!(self.look, Look::At(only) if !only.iter().any(|p| path.starts_with(p)));
        if only_leads && !matches!(what, What::Added | What::Type) {
            return;
        }
        let change =
            PathChange { path: path.clone(), old_path: None, what, old: old.clone(), new: new.clone() };
        self.changes.push(change);
    }

    /// Compares what stood at one path with what stands at another; below a directory that was renamed the paths differ.
    fn compare(&mut self, old_path: &TreePath, old: &Found, path: &TreePath, new: &Found) -> FsResult<()> {
        if let (Found::Covered(a, _), Found::Covered(b, _)) = (old, new)
            && a == b
            && !self.hot.nodes.contains(a)
        {
            return Ok(());
        }
        if !self.matters(path) {
            return Ok(());
        }
        match (self.old.kind(old), self.new.kind(new)) {
            (None, None) => Ok(()),
            (None, Some(_)) => self.added(path, new),
            (Some(_), None) => self.deleted(old_path, old),
            (Some(a), Some(b)) if a != b => {
                // A directory that became something else, or the other way round, takes its names along.
                self.children_of_gone(old_path, old, a)?;
                self.push(path, What::Type, old, new);
                self.children_of_come(path, new, b)
            }
            (Some(kind), Some(_)) => {
                self.compare_nodes(path, old, new, kind)?;
                if kind == FileKind::Dir { self.compare_names(old_path, old, path, new) } else { Ok(()) }
            }
        }
    }

    fn compare_nodes(&mut self, path: &TreePath, old: &Found, new: &Found, kind: FileKind) -> FsResult<()> {
        if let (Found::Base(_, a, _), Found::Base(_, b, _)) = (old, new)
            && a == b
            && self.old.lower.epoch() == self.new.lower.epoch()
        {
            return Ok(());
        }
        let (old_node, new_node) = (self.old.node(old)?, self.new.node(new)?);
        // A path that is another node now, and looks the same, must not keep the number of the one before.
        let is_other = self.is_of_apply && old.ino() != new.ino();
        let what = if kind == FileKind::Dir {
            match (same_attributes(&old_node, &new_node), same_times(&old_node, &new_node)) {
                (true, true) if !is_other => return Ok(()),
                (true, _) => What::DirTimes,
                (false, _) => What::Attributes,
            }
        } else if !self.same_content(old, new)? {
            What::Content
        } else if old.ino() != new.ino() && (old_node.meta.nlink > 1 || new_node.meta.nlink > 1) {
            What::Links
        } else if same_attributes(&old_node, &new_node) && same_times(&old_node, &new_node) && !is_other {
            return Ok(());
        } else {
            What::Attributes
        };
        self.push(path, what, old, new);
        Ok(())
    }

    fn same_content(&self, old: &Found, new: &Found) -> FsResult<bool> {
        if let (Found::Covered(a, _), Found::Covered(b, _)) = (old, new)
            && a == b
            && let (Some(was), Some(is)) = (self.old.tree.node(*a), self.new.tree.node(*a))
            && was.body == is.body
            && was.meta.rdev == is.meta.rdev
            && !self.contents.contains(a)
        {
            return Ok(true);
        }
        // Files of one number that are kept in different places: only their bytes could tell more.
        let is_written = |found: &Found| {
            matches!(found, Found::Covered(ino, _) if self.contents.contains(ino)) && old.ino() == new.ino()
        };
        if !matches!(self.look, Look::Everywhere) && is_written(old) && is_written(new) {
            return Ok(false);
        }
        match self.look {
            Look::Everywhere => same_content(self.old, old, self.new, new),
            Look::AtRecords | Look::At(_) => Ok(same_record(self.old, old, self.new, new)? == Some(true)),
        }
    }

    /// Compares the names of two directories, where they can differ.
    fn compare_names(
        &mut self,
        old_path: &TreePath,
        old: &Found,
        path: &TreePath,
        new: &Found,
    ) -> FsResult<()> {
        let (Some((a, a_base)), Some((b, b_base))) = (self.old.as_dir(old), self.new.as_dir(new)) else {
            return Ok(());
        };
        let alike = a == b && a_base == b_base;
        let touched = a_base.iter().chain(&b_base).filter_map(|dir| self.touched.get(dir)).flatten().cloned();
        let mut names: BTreeSet<Name> = touched.collect();
        if alike {
            names.extend(self.hot.names.get(&a).into_iter().flatten().cloned());
        } else {
            names.extend(self.old.merged_names(a, a_base.as_ref())?.into_keys());
            names.extend(self.new.merged_names(b, b_base.as_ref())?.into_keys());
        }
        for name in names {
            let (x, y) =
                (self.old.find(a, a_base.as_ref(), &name)?, self.new.find(b, b_base.as_ref(), &name)?);
            self.compare(&old_path.join(&name), &x, &path.join(&name), &y)?;
        }
        Ok(())
    }

    fn added(&mut self, path: &TreePath, new: &Found) -> FsResult<()> {
        if let Some(old_path) = self.moved_to.get(path).cloned() {
            let old = self.old.resolve(&old_path)?;
            let change = PathChange {
                path: path.clone(),
                old_path: Some(old_path.clone()),
                what: What::Renamed,
                old: old.clone(),
                new: new.clone(),
            };
            self.changes.push(change);
            return self.compare_names(&old_path, &old, path, new);
        }
        self.push(path, What::Added, &Found::Nothing(None), new);
        let kind = self.new.kind(new).unwrap_or(FileKind::File);
        self.children_of_come(path, new, kind)
    }

    fn deleted(&mut self, path: &TreePath, old: &Found) -> FsResult<()> {
        if self.moved_from.contains_key(path) {
            self.left.insert(path.clone());
            return Ok(());
        }
        self.push(path, What::Deleted, old, &Found::Nothing(None));
        let kind = self.old.kind(old).unwrap_or(FileKind::File);
        self.children_of_gone(path, old, kind)
    }

    fn children_of_come(&mut self, path: &TreePath, new: &Found, kind: FileKind) -> FsResult<()> {
        let Some((dir, base)) = self.new.as_dir(new).filter(|_| kind == FileKind::Dir) else { return Ok(()) };
        for name in self.new.merged_names(dir, base.as_ref())?.into_keys() {
            let found = self.new.find(dir, base.as_ref(), &name)?;
            let path = path.join(&name);
            self.compare(&path, &Found::Nothing(None), &path, &found)?;
        }
        Ok(())
    }

    fn children_of_gone(&mut self, path: &TreePath, old: &Found, kind: FileKind) -> FsResult<()> {
        let Some((dir, base)) = self.old.as_dir(old).filter(|_| kind == FileKind::Dir) else { return Ok(()) };
        let names = match self.old.merged_names(dir, base.as_ref()) {
            // Nobody can remove what is in a directory that we may not read; and while it is there, the directory cannot be, either.
            Err(FsError::AccessDenied) => return Ok(()),
            names => names?,
        };
        for name in names.into_keys() {
            let found = self.old.find(dir, base.as_ref(), &name)?;
            let path = path.join(&name);
            self.compare(&path, &found, &path, &Found::Nothing(None))?;
        }
        Ok(())
    }
}

/// Whether two nodes of the same kind have the same content: bytes, text of a link, number of a device.
///
/// # Errors
/// What the base answers.
pub fn same_content(old_state: &State, old: &Found, new_state: &State, new: &Found) -> FsResult<bool> {
    if let Some(told) = same_record(old_state, old, new_state, new)? {
        return Ok(told);
    }
    // Nobody may find out by trying what is in a hidden file.
    if old_state.is_hidden(old) || new_state.is_hidden(new) {
        return Ok(false);
    }
    let size = new_state.attr(new).map_or(0, |attr| attr.size);
    match same_bytes(old_state, old, new_state, new, size) {
        // Bytes that are gone, or that we may not read, are not the same: or one such file would hide all that differs otherwise.
        Err(FsError::Drift(_) | FsError::AccessDenied) => Ok(false),
        told => told,
    }
}

/// The same, as far as the records tell; none if only the bytes can.
fn same_record(old_state: &State, old: &Found, new_state: &State, new: &Found) -> FsResult<Option<bool>> {
    let (a, a_extents) = old_state.record(old)?;
    let (b, b_extents) = new_state.record(new)?;
    Ok(match (&a.body, &b.body) {
        (Body::File { size: x, origin: from_x }, Body::File { size: y, origin: from_y }) => {
            if x != y {
                return Ok(Some(false));
            }
            let in_base = a_extents.iter().any(|(_, s)| matches!(s, Source::Base { .. }));
            // The number of the device does not count: it may be another at each boot.
            let same_origin = match (from_x, from_y) {
                (Some(x), Some(y)) => {
                    x.path == y.path && (lower::fits(&x.print, &y.print) || lower::fits(&y.print, &x.print))
                }
                (x, y) => x.is_none() && y.is_none(),
            };
            (a_extents == b_extents && (!in_base || same_origin)).then_some(true)
        }
        (Body::Special, Body::Special) => Some(a.meta.rdev == b.meta.rdev),
        (x, y) => Some(x == y),
    })
}

fn same_bytes(old_state: &State, old: &Found, new_state: &State, new: &Found, size: u64) -> FsResult<bool> {
    const STEP: u64 = 1 << 20;
    let mut at = 0;
    while at < size {
        let range = ByteRange { start: at, end: (at + STEP).min(size) };
        if old_state.read_range(old, range)? != new_state.read_range(new, range)? {
            return Ok(false);
        }
        at = range.end;
    }
    Ok(true)
}

fn same_attributes(a: &Node, b: &Node) -> bool {
    a.meta.mode == b.meta.mode && a.meta.uid == b.meta.uid && a.meta.gid == b.meta.gid && a.xattrs == b.xattrs
}

fn same_times(a: &Node, b: &Node) -> bool {
    a.meta.mtime == b.meta.mtime
}
