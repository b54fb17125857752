//! Compares two states path by path.
//!
//! Always true:
//! * The walk enters only directories in which the trees differ, and looks only at names at which
//!   they differ. So it costs what differs, not what is there.
//! * It has a stack of its own and yields one change at a time, so that a deep or large tree uses
//!   neither the stack of the thread nor memory for a list.
//! * Two files are equal if their records are. If the records differ, [`compare`] and [`changes`]
//!   compare the bytes; [`compare_records`] and [`changes_at`] take the file as changed.

pub(in crate::timeline) mod binary;
mod changed_names;
mod content;
pub mod patch;
mod renames;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::error::{FsError, FsResult};
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::tree::Node;
use crate::types::{FileKind, Ino, Name, TreePath};
use changed_names::{ChangedNames, by_directory, unseen_links};
pub use content::same_content;
use content::{same_attributes, same_record};
use renames::{Renames, Trial};

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
    /// The node there in the older state.
    pub old: Found,
    /// The node there in the newer state.
    pub new: Found,
}

/// Lists what differs from `old` to `new`, sorted by path. No node moves: a rename is a deletion
/// and an addition. A path also differs if another node stands there that looks the same, as
/// `apply` needs it.
///
/// # Errors
/// Those of reading the base.
pub fn changes(old: &State, new: &State) -> FsResult<Vec<PathChange>> {
    compare_for_apply(old, new)?.collect()
}

/// The same, one change at a time.
///
/// # Errors
/// Those of reading the base.
pub fn compare_for_apply<'a>(old: &'a State, new: &'a State) -> FsResult<Comparison<'a>> {
    Ok(compare_paths(old, new)?.with_base())
}

/// Walks what differs from `old` to `new`, with renames, and compares bytes where only they can
/// tell.
///
/// # Errors
/// Those of reading the base.
pub fn compare<'a>(old: &'a State, new: &'a State) -> FsResult<Comparison<'a>> {
    Comparison::new(old, new, true, Look::Everywhere, &read_names)
}

/// Walks what differs from `old` to `new` path by path: no node moves, and a path also differs if
/// another node stands there that looks the same.
///
/// # Errors
/// Those of reading the base.
pub fn compare_paths<'a>(old: &'a State, new: &'a State) -> FsResult<Comparison<'a>> {
    Comparison::new(old, new, false, Look::Everywhere, &read_names)
}

/// The same as [`compare`], as far as the records tell: a file that was written differs, also if
/// its bytes are equal. No content is read.
///
/// # Errors
/// Those of reading the base.
pub fn compare_records<'a>(old: &'a State, new: &'a State) -> FsResult<Comparison<'a>> {
    Comparison::new(old, new, true, Look::AtRecords, &read_names)
}

/// Where the walk looks, and at what.
#[derive(Clone, Copy)]
enum Look<'a> {
    /// Everywhere, and at bytes where only they can tell.
    Everywhere,
    /// Everywhere, at the records alone.
    AtRecords,
    /// At and below some paths, at the records alone.
    At(&'a [TreePath]),
}

/// Finds the base paths at which some nodes of a state stand. This can mean a scan of the base.
pub(super) type NamesOf<'a> =
    &'a dyn Fn(&State, &HashSet<Ino>) -> FsResult<BTreeMap<TreePath, Ino>>;

fn read_names(state: &State, wanted: &HashSet<Ino>) -> FsResult<BTreeMap<TreePath, Ino>> {
    state.lower.names_of(wanted)
}

/// Lists what differs at and below some paths, and the directories that lead to them and only the
/// newer state has. No content is read.
///
/// # Errors
/// Those of reading the base.
pub fn changes_at(old: &State, new: &State, paths: &[TreePath]) -> FsResult<Vec<PathChange>> {
    changes_by(old, new, paths, &read_names)
}

/// The same, with a caller's own `names_of`.
///
/// # Errors
/// As [`changes_at`], and those of `names_of`.
pub(super) fn changes_by(
    old: &State,
    new: &State,
    paths: &[TreePath],
    names_of: NamesOf<'_>,
) -> FsResult<Vec<PathChange>> {
    Comparison::new(old, new, false, Look::At(paths), names_of)?.collect()
}

/// A directory of a state: its number, and its path in the base if it merges one.
type Dir = (Ino, Option<TreePath>);

/// A directory that the walk is in, in the older state, in the newer one, or in both.
struct Frame {
    /// Its name; none for the root.
    name: Option<Name>,
    old: Option<Dir>,
    new: Option<Dir>,
    tells: Tells,
    /// Names to look at, and directories to enter behind them. The key of a directory ends with a
    /// slash, so that the paths come in the order of their bytes.
    todo: BTreeMap<Vec<u8>, Todo>,
}

enum Todo {
    Look(Name),
    Enter(Name, Below),
}

/// The two sides of a directory that is entered; at least one is there.
struct Below {
    old: Option<Dir>,
    new: Option<Dir>,
    tells: Tells,
}

/// Which changes in a directory are listed. A renamed directory is entered twice: at its old path
/// for what was deleted in it, at its new one for the rest.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tells {
    All,
    Deletions,
    Others,
}

/// The differences between two states, one change at a time, sorted by path.
///
/// Always true: it holds the directories from the root to where it stands, and one path. So its
/// memory grows with the size of those directories and the number of renames, not with the number
/// or the depth of the changes.
pub struct Comparison<'a> {
    old: &'a State,
    new: &'a State,
    look: Look<'a>,
    /// Another node at a path counts as a change.
    is_of_apply: bool,
    /// One of the states is the base. Times that its filesystem cannot hold do not differ from what
    /// it made of them.
    is_with_base: bool,
    changed: ChangedNames,
    /// Files of which the extents differ in the two trees.
    contents: BTreeSet<Ino>,
    /// Names in directories of the base that are looked at although no tree mentions them.
    touched: HashMap<TreePath, BTreeSet<Name>>,
    renames: Renames,
    frames: Vec<Frame>,
    /// The path of the last frame, once it was asked for.
    path: Option<TreePath>,
    /// Only the number of changes is asked for: their paths are left empty.
    only_counts: bool,
    ready: Option<PathChange>,
}

impl Iterator for Comparison<'_> {
    type Item = FsResult<PathChange>;

    fn next(&mut self) -> Option<FsResult<PathChange>> {
        while self.ready.is_none() {
            match self.step() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.frames.clear();
                    return Some(Err(error));
                }
            }
        }
        self.ready.take().map(Ok)
    }
}

impl<'a> Comparison<'a> {
    fn new(
        old: &'a State,
        new: &'a State,
        renames: bool,
        look: Look<'a>,
        names_of: NamesOf<'_>,
    ) -> FsResult<Comparison<'a>> {
        let diff = old.tree.diff(&new.tree);
        let mut paths = unseen_links(old, new, &diff, names_of)?;
        if old.lower.epoch() != new.lower.epoch() {
            paths.extend(old.lower.touched_since());
            paths.extend(new.lower.touched_since());
        }
        let touched = by_directory(&paths);
        let mut comparison = Comparison {
            old,
            new,
            look,
            is_of_apply: !renames && matches!(look, Look::Everywhere),
            is_with_base: false,
            changed: ChangedNames::of(old, new, &diff, &touched)?,
            renames: if renames { Renames::find(old, new, &diff)? } else { Renames::default() },
            contents: diff.contents,
            touched,
            frames: Vec::new(),
            path: None,
            only_counts: false,
            ready: None,
        };
        while !comparison.renames.is_empty() {
            comparison.renames.trial = Some(Trial::default());
            comparison.begin()?;
            while comparison.step()? {}
            if !comparison.renames.drop_half() {
                break;
            }
        }
        comparison.begin()?;
        Ok(comparison)
    }

    /// Looks at the root.
    fn begin(&mut self) -> FsResult<()> {
        let root = TreePath::root();
        let (a, b) = (self.old.resolve(&root)?, self.new.resolve(&root)?);
        if let Some(below) = self.compare(None, &a, &b)? {
            self.enter(None, below)?;
        }
        Ok(())
    }

    /// Takes the next step of the walk; false at its end.
    fn step(&mut self) -> FsResult<bool> {
        let Some(frame) = self.frames.last_mut() else { return Ok(false) };
        match frame.todo.pop_first() {
            None => {
                self.frames.pop();
                self.path = None;
            }
            Some((_, Todo::Look(name))) => {
                let side = |state: &State, dir: &Option<Dir>| match dir {
                    Some((dir, base)) => state.find(*dir, base.as_ref(), &name),
                    None => Ok(Found::Nothing(None)),
                };
                let (old, new) = (side(self.old, &frame.old)?, side(self.new, &frame.new)?);
                if let Some(below) = self.compare(Some(&name), &old, &new)?
                    && let Some(frame) = self.frames.last_mut()
                {
                    let key = [name.as_bytes(), b"/"].concat();
                    frame.todo.insert(key, Todo::Enter(name, below));
                }
            }
            Some((_, Todo::Enter(name, below))) => self.enter(Some(name), below)?,
        }
        Ok(true)
    }

    fn enter(&mut self, name: Option<Name>, Below { old, new, tells }: Below) -> FsResult<()> {
        let names = self.names_below(old.as_ref(), new.as_ref())?;
        let todo =
            names.into_iter().map(|name| (name.as_bytes().to_vec(), Todo::Look(name))).collect();
        self.frames.push(Frame { name, old, new, tells, todo });
        self.path = None;
        Ok(())
    }

    /// The names of a directory at which the states can differ.
    fn names_below(&self, old: Option<&Dir>, new: Option<&Dir>) -> FsResult<BTreeSet<Name>> {
        let all = |state: &State, (dir, base): &Dir| state.merged_names(*dir, base.as_ref());
        match (old, new) {
            (Some(old), Some(new)) => {
                let bases = old.1.iter().chain(&new.1);
                let touched = bases.filter_map(|dir| self.touched.get(dir)).flatten().cloned();
                let mut names: BTreeSet<Name> = touched.collect();
                if old == new {
                    names.extend(self.changed.names.get(&old.0).into_iter().flatten().cloned());
                } else {
                    names.extend(all(self.old, old)?.into_keys());
                    names.extend(all(self.new, new)?.into_keys());
                }
                Ok(names)
            }
            (None, Some(new)) => Ok(all(self.new, new)?.into_keys().collect()),
            (Some(old), None) => match all(self.old, old) {
                // A directory that we may not read cannot have been removed with what is in it, so
                // there is nothing to list.
                Err(FsError::AccessDenied) => Ok(BTreeSet::new()),
                names => Ok(names?.into_keys().collect()),
            },
            (None, None) => Ok(BTreeSet::new()),
        }
    }

    /// The path of a name in the current directory; without a name the root.
    fn path_of(&mut self, name: Option<&Name>) -> TreePath {
        let Some(name) = name else { return TreePath::root() };
        let frames = &self.frames;
        let names = || frames.iter().filter_map(|frame| frame.name.as_ref());
        self.path.get_or_insert_with(|| TreePath::of_names(names())).join(name)
    }

    /// Says that one of the states is the base as it is.
    pub fn with_base(mut self) -> Self {
        self.is_with_base = true;
        self
    }

    /// Counts the changes that `is_counted`, which must not look at their paths.
    ///
    /// # Errors
    /// Those of reading the base.
    pub fn count_of(mut self, is_counted: impl Fn(&PathChange) -> bool) -> FsResult<u64> {
        self.only_counts = true;
        let mut count = 0;
        for change in self {
            count += u64::from(is_counted(&change?));
        }
        Ok(count)
    }

    /// Whether a path is one of those that are looked at, lies below one, or leads to one.
    fn matters(&mut self, name: Option<&Name>) -> bool {
        let Look::At(only) = self.look else { return true };
        let path = self.path_of(name);
        only.iter().any(|p| path.starts_with(p) || p.starts_with(&path))
    }

    fn push(&mut self, name: Option<&Name>, what: What, old: &Found, new: &Found) {
        if self.renames.trial.is_some() {
            return;
        }
        let path = if self.only_counts { TreePath::root() } else { self.path_of(name) };
        let only_leads =
            matches!(self.look, Look::At(only) if !only.iter().any(|p| path.starts_with(p)));
        if only_leads && !matches!(what, What::Added | What::Type) {
            return;
        }
        self.ready =
            Some(PathChange { path, old_path: None, what, old: old.clone(), new: new.clone() });
    }

    /// Compares what stands at a name of the current directory. Returns the directory to enter, if
    /// any.
    fn compare(
        &mut self,
        name: Option<&Name>,
        old: &Found,
        new: &Found,
    ) -> FsResult<Option<Below>> {
        if let (Found::Upper(a, _), Found::Upper(b, _)) = (old, new)
            && a == b
            && !self.changed.nodes.contains(a)
        {
            return Ok(None);
        }
        if !self.matters(name) {
            return Ok(None);
        }
        let tells = self.frames.last().map_or(Tells::All, |frame| frame.tells);
        let below = |old: Option<Dir>, new: Option<Dir>| {
            let (old, new) =
                (old.filter(|_| tells != Tells::Others), new.filter(|_| tells != Tells::Deletions));
            (old.is_some() || new.is_some()).then_some(Below { old, new, tells })
        };
        let (old_dir, new_dir) = (self.old.as_dir(old), self.new.as_dir(new));
        match (self.old.kind(old), self.new.kind(new)) {
            (None, None) => Ok(None),
            (None, Some(_)) if tells == Tells::Deletions => Ok(None),
            (None, Some(_)) => self.added(name, new, new_dir),
            (Some(_), None) if tells == Tells::Others => Ok(None),
            (Some(_), None) => self.deleted(name, old, old_dir),
            (Some(a), Some(b)) if a != b => {
                // A directory that became something else, or the other way round, takes its names
                // along.
                if tells != Tells::Deletions {
                    self.push(name, What::Type, old, new);
                }
                Ok(below(old_dir, new_dir))
            }
            (Some(kind), Some(_)) => {
                if self.renames.trial.is_none() && tells != Tells::Deletions {
                    self.compare_nodes(name, old, new, kind)?;
                }
                Ok(both(old_dir, new_dir, tells))
            }
        }
    }

    fn deleted(
        &mut self,
        name: Option<&Name>,
        old: &Found,
        dir: Option<Dir>,
    ) -> FsResult<Option<Below>> {
        let above = self.frames.last().and_then(|frame| frame.old.as_ref());
        let Some(((above, base), to)) = self.renames.leaves(above, name) else {
            self.push(name, What::Deleted, old, &Found::Nothing(None));
            return Ok(dir.map(|dir| Below { old: Some(dir), new: None, tells: Tells::All }));
        };
        let new = self.new.find(above, base.as_ref(), &to)?;
        Ok(both(dir, self.new.as_dir(&new), Tells::Deletions))
    }

    fn added(
        &mut self,
        name: Option<&Name>,
        new: &Found,
        dir: Option<Dir>,
    ) -> FsResult<Option<Below>> {
        let above = self.frames.last().and_then(|frame| frame.new.as_ref());
        let Some(from) = self.renames.arrives(above, name) else {
            self.push(name, What::Added, &Found::Nothing(None), new);
            return Ok(dir.map(|dir| Below { old: None, new: Some(dir), tells: Tells::All }));
        };
        let (above, base) = &from.0;
        let old = self.old.find(*above, base.as_ref(), &from.1)?;
        self.push(name, What::Renamed, &old, new);
        if let Some(change) = self.ready.as_mut().filter(|_| !self.only_counts) {
            change.old_path = Some(self.old.dir_path(*above, base.as_ref())?.join(&from.1));
        }
        Ok(both(self.old.as_dir(&old), dir, Tells::Others))
    }

    fn compare_nodes(
        &mut self,
        name: Option<&Name>,
        old: &Found,
        new: &Found,
        kind: FileKind,
    ) -> FsResult<()> {
        if let (Found::Base(_, a, _), Found::Base(_, b, _)) = (old, new)
            && a == b
            && self.old.lower.epoch() == self.new.lower.epoch()
        {
            return Ok(());
        }
        let (old_node, new_node) = (self.old.node(old)?, self.new.node(new)?);
        // A path that is another node now, and looks the same, must not keep the number of the one
        // before.
        let is_other = self.is_of_apply && old.ino() != new.ino();
        let same_times = self.same_times((old, &old_node), (new, &new_node));
        let what = if kind == FileKind::Dir {
            match (same_attributes(&old_node, &new_node), same_times) {
                (true, true) if !is_other => return Ok(()),
                (true, _) => What::DirTimes,
                (false, _) => What::Attributes,
            }
        } else if !self.same_content(old, new)? {
            What::Content
        } else if old.ino() != new.ino() && (old_node.meta.nlink > 1 || new_node.meta.nlink > 1) {
            What::Links
        } else if same_attributes(&old_node, &new_node) && same_times && !is_other {
            return Ok(());
        } else {
            What::Attributes
        };
        self.push(name, what, old, new);
        Ok(())
    }

    fn same_times(
        &self,
        (old, old_node): (&Found, &Node),
        (new, new_node): (&Found, &Node),
    ) -> bool {
        let (was, is) = (old_node.meta.mtime, new_node.meta.mtime);
        let is_rounded = || match (old, new) {
            (Found::Base(.., LowerNode::Base(_)), Found::Upper(..)) => {
                self.old.lower.is_rounded(is, was)
            }
            (Found::Upper(..), Found::Base(.., LowerNode::Base(_))) => {
                self.new.lower.is_rounded(was, is)
            }
            _ => false,
        };
        was == is || (self.is_with_base && is_rounded())
    }

    fn same_content(&self, old: &Found, new: &Found) -> FsResult<bool> {
        if let (Found::Upper(a, _), Found::Upper(b, _)) = (old, new)
            && a == b
            && let (Some(was), Some(is)) = (self.old.tree.node(*a), self.new.tree.node(*a))
            && was.body == is.body
            && was.meta.rdev == is.meta.rdev
            && !self.contents.contains(a)
        {
            return Ok(true);
        }
        // Files of one number whose content is stored in different places: only the bytes could
        // tell more.
        let is_written = |found: &Found| {
            matches!(found, Found::Upper(ino, _) if self.contents.contains(ino))
                && old.ino() == new.ino()
        };
        if !matches!(self.look, Look::Everywhere) && is_written(old) && is_written(new) {
            return Ok(false);
        }
        match self.look {
            Look::Everywhere => same_content(self.old, old, self.new, new),
            Look::AtRecords | Look::At(_) => {
                Ok(same_record(self.old, old, self.new, new)? == Some(true))
            }
        }
    }
}

/// A directory that both states have.
fn both(old: Option<Dir>, new: Option<Dir>, tells: Tells) -> Option<Below> {
    old.zip(new).map(|(old, new)| Below { old: Some(old), new: Some(new), tells })
}
