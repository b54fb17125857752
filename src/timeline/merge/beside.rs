//! Puts the other head's side of conflicts beside ours, so that a merge can go on and nothing of
//! either side is lost.
//!
//! * The copy of `NAME` is `NAME~HEAD`, as git names it, where HEAD is the other head. If that name
//!   is taken, it is `NAME~HEAD_0`, and so on.
//! * A directory is copied with all below it, unless only its attributes conflict. Content is not
//!   copied: the copy refers to the same bytes.
//! * If our head lacks the directory that `NAME` is in, the copy is in a directory `DIR~HEAD`.
//! * If the other head has nothing there, the copy is a file with one line that says so.

use std::collections::{BTreeMap, BTreeSet};

use super::conflict::Did;
use super::content::{hidden, record_of_theirs, write};
use super::three::{Head, Side, Three};
use crate::error::{FsError, FsResult};
use crate::fs::{Found, State};
use crate::store::content::pool::PoolWriter;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Meta, Misfit, Node};
use crate::types::{FileKind, Ino, NAME_MAX, Name, TreePath};

/// A conflict in which our side is kept.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// The path of the conflict.
    pub(super) path: TreePath,
    /// The node of the other head; none if it has none there.
    pub(super) theirs: Option<Found>,
    /// The change of the other head.
    pub(super) did: Did,
    /// Whether nothing below a directory conflicts.
    pub(super) only_attributes: bool,
}

impl Kept {
    /// Sorts whole directories first, so that what is below one is not copied again.
    fn rank(&self) -> (bool, &TreePath, bool) {
        (self.only_attributes, &self.path, self.theirs.is_none())
    }
}

/// A directory of the merged tree, and the base path that it merges with.
type Dir = (Ino, Option<TreePath>);

/// The copies while they are made.
struct Beside<'a> {
    theirs: &'a Head<'a>,
    /// `~HEAD`.
    suffix: Vec<u8>,
    /// The merged tree with the edits so far.
    state: State,
    edits: Vec<Edit>,
    /// The numbers of the copies, by those of the nodes in the other head.
    copies: BTreeMap<Ino, Ino>,
    /// The directories that stand for those that our head lacks.
    made: BTreeMap<TreePath, Ino>,
    /// The paths of the copies.
    paths: BTreeSet<TreePath>,
}

/// Computes the edits that put copies into the merged tree, and the paths of the copies. Bytes are
/// written to `pool`.
///
/// # Errors
/// Those of reading the base and of writing the pool.
pub(super) fn copies(
    three: &Three<'_>,
    (kept, head): (&[Kept], &str),
    merged: State,
    pool: &mut PoolWriter,
) -> FsResult<(Vec<Edit>, Vec<TreePath>)> {
    let mut beside = Beside {
        theirs: three.head(Side::Theirs),
        suffix: format!("~{head}").into_bytes(),
        state: merged,
        edits: Vec::new(),
        copies: BTreeMap::new(),
        made: BTreeMap::new(),
        paths: BTreeSet::new(),
    };
    let mut kept: Vec<&Kept> = kept.iter().collect();
    kept.sort_by(|a, b| a.rank().cmp(&b.rank()));
    let mut last: Option<&TreePath> = None;
    for conflict in kept {
        match &conflict.theirs {
            Some(found) => beside.copy(conflict, found, pool)?,
            None if last == Some(&conflict.path) => {}
            None => beside.tell(conflict, head, pool)?,
        }
        last = Some(&conflict.path);
    }
    Ok((beside.edits, beside.paths.into_iter().collect()))
}

impl Beside<'_> {
    fn edit(&mut self, edit: Edit) -> FsResult<()> {
        self.state.tree.apply(&edit).map_err(|Misfit(what)| FsError::Damage(what))?;
        self.edits.push(edit);
        Ok(())
    }

    fn fresh(&self) -> FsResult<Ino> {
        Ok(self.state.lower.store().identities().lock().fresh()?)
    }

    /// Copies the node of the other head, unless it was copied already.
    fn copy(&mut self, conflict: &Kept, found: &Found, pool: &mut PoolWriter) -> FsResult<()> {
        if found.ino().is_some_and(|ino| self.copies.contains_key(&ino)) {
            return Ok(());
        }
        let (dir, name) = self.spot(&conflict.path)?;
        let state = self.theirs.state();
        let mut todo = vec![(found.clone(), dir, name)];
        while let Some((found, dir, name)) = todo.pop() {
            let is_known = found.ino().is_some_and(|ino| self.copies.contains_key(&ino));
            // A directory has one name. If heads moved directories into each other, a copy of one
            // of them can have been made before that of the directory that it is in.
            if is_known && state.kind(&found) == Some(FileKind::Dir) {
                continue;
            }
            let ino = self.put(&found, pool)?;
            self.attach(dir, &name, ino)?;
            let is_open = !conflict.only_attributes && !state.is_hidden(&found);
            let Some((their, lower)) = state.as_dir(&found).filter(|_| is_open) else { continue };
            for name in state.merged_names(their, lower.as_ref())?.into_keys() {
                todo.push((state.find(their, lower.as_ref(), &name)?, ino, name));
            }
        }
        Ok(())
    }

    /// Puts the copy of a node, or finds it. It has no name yet.
    fn put(&mut self, found: &Found, pool: &mut PoolWriter) -> FsResult<Ino> {
        let their = found.ino().ok_or(FsError::NotFound)?;
        if let Some(ino) = self.copies.get(&their) {
            return Ok(*ino);
        }
        let epoch = self.state.lower.epoch();
        let (mut node, extents) = record_of_theirs((self.theirs.state(), found), epoch, pool)?;
        node.meta.nlink = 0;
        if let Body::Dir { base } = &mut node.body {
            *base = None;
            node.meta.nlink = 2;
        }
        let ino = self.fresh()?;
        self.edit(Edit::Put { ino, node: Box::new(node) })?;
        for (range, source) in extents {
            self.edit(Edit::Map { ino, range, to: Some(source) })?;
        }
        self.copies.insert(their, ino);
        Ok(ino)
    }

    /// Gives a copy a name, and counts it.
    fn attach(&mut self, dir: Ino, name: &Name, ino: Ino) -> FsResult<()> {
        let hides = hidden(&self.state, dir, name)?;
        let meta = |state: &State, ino: Ino| -> FsResult<(FileKind, Meta)> {
            let node = state.tree.node(ino).ok_or(FsError::NotFound)?;
            Ok((node.kind(), node.meta))
        };
        let (kind, copied) = meta(&self.state, ino)?;
        let counted = match kind {
            FileKind::Dir => {
                let (_, above) = meta(&self.state, dir)?;
                (dir, Meta { nlink: above.nlink.saturating_add(1), ..above })
            }
            _ => (ino, Meta { nlink: copied.nlink.saturating_add(1), ..copied }),
        };
        self.edit(Edit::Meta { ino: counted.0, meta: counted.1 })?;
        let to = Some(Dentry::Child { ino, hides });
        self.edit(Edit::Dentry { dir, name: name.clone(), to })
    }

    /// Puts a file that says what the other head did.
    fn tell(&mut self, conflict: &Kept, head: &str, pool: &mut PoolWriter) -> FsResult<()> {
        let (dir, name) = self.spot(&conflict.path)?;
        let text = format!("'{head}': {}\n", conflict.did).into_bytes();
        let ino = self.fresh()?;
        let body = Body::File { size: text.len() as u64, origin: None };
        let mode = libc::S_IFREG | 0o644;
        let node = Node { meta: self.new_meta(dir, mode)?, xattrs: None, body };
        self.edit(Edit::Put { ino, node: Box::new(node) })?;
        for (range, source) in write(ino, &text, pool)? {
            self.edit(Edit::Map { ino, range, to: Some(source) })?;
        }
        self.attach(dir, &name, ino)
    }

    /// The attributes of a new node, which belongs to the owner of the directory.
    fn new_meta(&self, dir: Ino, mode: u32) -> FsResult<Meta> {
        let of = self.state.tree.node(dir).ok_or(FsError::NotFound)?.meta;
        let (uid, gid, now) = (of.uid, of.gid, clock::now());
        let nlink = 0;
        Ok(Meta { mode, uid, gid, nlink, rdev: 0, atime: now, mtime: now, ctime: now })
    }

    /// The directory and the name for the copy of a path.
    fn spot(&mut self, path: &TreePath) -> FsResult<(Ino, Name)> {
        let mut names: Vec<Name> = path.names().collect();
        let last = names.pop();
        let (mut at, mut known) = (self.state.root(), TreePath::root());
        self.copy_up_root()?;
        let mut is_made = false;
        for name in names {
            known = known.join(&name);
            if let Some(made) = self.made.get(&known) {
                (at, is_made) = ((*made, None), true);
                continue;
            }
            let found = self.state.find(at.0, at.1.as_ref(), &name)?;
            at = match self.state.as_dir(&found) {
                Some(dir) => {
                    if let Found::Base(ino, path, node) = &found {
                        for edit in self.state.copy_up_edits(*ino, path, node)? {
                            self.edit(edit)?;
                        }
                    }
                    dir
                }
                None => {
                    let made = self.make_dir(&at, &name, &known, is_made)?;
                    is_made = true;
                    (made, None)
                }
            };
        }
        self.touch(at.0)?;
        let name = self.free_name(&at, last.as_ref(), is_made)?;
        if !is_made {
            self.note(at.0, &name);
        }
        Ok((at.0, name))
    }

    /// Puts the root into the tree, if only the base has it.
    fn copy_up_root(&mut self) -> FsResult<()> {
        if let Found::Base(ino, path, node) = self.state.resolve(&TreePath::root())? {
            for edit in self.state.copy_up_edits(ino, &path, &node)? {
                self.edit(edit)?;
            }
        }
        Ok(())
    }

    /// Makes a directory in the place of one that our head lacks.
    fn make_dir(&mut self, at: &Dir, name: &Name, path: &TreePath, is_made: bool) -> FsResult<Ino> {
        self.touch(at.0)?;
        let name = self.free_name(at, Some(name), is_made)?;
        let ino = self.fresh()?;
        let mode = libc::S_IFDIR | 0o755;
        let meta = Meta { nlink: 2, ..self.new_meta(at.0, mode)? };
        let node = Node { meta, xattrs: None, body: Body::Dir { base: None } };
        self.edit(Edit::Put { ino, node: Box::new(node) })?;
        self.attach(at.0, &name, ino)?;
        self.made.insert(path.clone(), ino);
        if !is_made {
            self.note(at.0, &name);
        }
        Ok(ino)
    }

    /// Notes the path of a copy.
    fn note(&mut self, dir: Ino, name: &Name) {
        self.paths.extend(self.state.tree.path(dir).map(|dir| dir.join(name)));
    }

    fn touch(&mut self, ino: Ino) -> FsResult<()> {
        let now = clock::now();
        let meta = self.state.tree.node(ino).ok_or(FsError::NotFound)?.meta;
        self.edit(Edit::Meta { ino, meta: Meta { mtime: now, ctime: now, ..meta } })
    }

    /// The first name for a copy that is free. In a directory that was made for copies, that can be
    /// the name itself. The root has no name.
    fn free_name(&self, at: &Dir, name: Option<&Name>, is_made: bool) -> FsResult<Name> {
        let name = name.map_or(&b""[..], Name::as_bytes);
        let plain = is_made.then(|| name.to_vec()).into_iter();
        let first = std::iter::once(with_suffix(name, &self.suffix));
        let more = (0u32..).map(|number| {
            let number = format!("_{number}").into_bytes();
            with_suffix(name, &[self.suffix.as_slice(), &number].concat())
        });
        for bytes in plain.chain(first).chain(more) {
            let name = Name::new(&bytes).map_err(|_| FsError::NameTooLong)?;
            if self.state.find(at.0, at.1.as_ref(), &name)?.ino().is_none() {
                return Ok(name);
            }
        }
        Err(FsError::Exists)
    }
}

/// A name with a suffix, cut so that it is not too long for a file.
fn with_suffix(name: &[u8], suffix: &[u8]) -> Vec<u8> {
    let mut keep = name.len().min(NAME_MAX.saturating_sub(suffix.len()));
    // Not in the middle of a character of UTF-8.
    while keep < name.len() && keep > 0 && name.get(keep).is_some_and(|b| b & 0xc0 == 0x80) {
        keep -= 1;
    }
    [name.get(..keep).unwrap_or_default(), suffix].concat()
}
