//! Resolves symlinks inside the merged tree, for the jail.
//!
//! The jail asks the merged tree alone, from the directory of the link that is nearest to the root,
//! through other links.

use std::cell::RefCell;

use crate::error::{FsError, FsResult};
use crate::fs::merged::state::{Dir, Found, State};
use crate::jail::{Answer, Jail, NameTarget, Policy, Walk};
use crate::tree::Body;
use crate::types::{FileKind, Name};

/// Where a link leads.
pub(in crate::fs) enum Resolved {
    /// Inside, by this text, from every directory.
    Inside(Vec<u8>),
    /// Inside, by this text, from every directory in which the link has a name. The text climbs, so
    /// from another directory it could lead out.
    Climbs(Vec<u8>),
    /// Out, or possibly out: an unseen name of the link may stand in the root, from where every
    /// text that climbs leads out.
    Escapes,
}

/// Resolves a link with a text.
///
/// # Errors
/// ENOENT if the link has no name, and those of the base.
pub(in crate::fs) fn resolve(
    jail: &Jail,
    state: &State,
    link: &Found,
    text: &[u8],
) -> FsResult<Resolved> {
    let dir = shallowest_dir(state, link)?.ok_or(FsError::NotFound)?;
    let merged = MergedWalk { state, met: RefCell::new(Vec::new()) };
    let handle = merged.handle(dir);
    Ok(match jail.resolve(&merged, handle, text)? {
        Answer::Text(text) if jail.policy == Policy::Literal || Jail::climb(&text) == 0 => {
            Resolved::Inside(text)
        }
        Answer::Text(text) if !has_unseen_names(state, link) => Resolved::Climbs(text),
        Answer::Text(_) | Answer::Escapes { .. } => Resolved::Escapes,
    })
}

/// The directory nearest to the root in which a link has a name. From there it can climb least.
fn shallowest_dir(state: &State, link: &Found) -> FsResult<Option<Dir>> {
    let mut dirs: Vec<Dir> = Vec::new();
    match link {
        Found::Upper(ino, _) => {
            for (dir, _) in state.tree.links(*ino) {
                dirs.push((dir, state.lower_path(dir)?));
            }
        }
        Found::Base(_, path, _) => {
            let Some((above, _)) = path.split() else { return Ok(None) };
            let Some((ino, _)) = state.lower.lookup(&above)? else { return Ok(None) };
            dirs.push((ino, Some(above)));
        }
        Found::Nothing(_) => {}
    }
    let mut best: Option<(usize, Dir)> = None;
    for dir in dirs {
        let depth = state.depth_of(dir.0, dir.1.as_ref())?;
        if best.as_ref().is_none_or(|(least, _)| depth < *least) {
            best = Some((depth, dir));
        }
    }
    Ok(best.map(|(_, dir)| dir))
}

/// Whether a node has names in the base that the tree does not know.
fn has_unseen_names(state: &State, link: &Found) -> bool {
    match link {
        Found::Upper(ino, _) => state
            .tree
            .node(*ino)
            .is_some_and(|n| n.meta.nlink as usize > state.tree.links(*ino).count()),
        Found::Base(_, _, node) => node.nlink() > 1,
        Found::Nothing(_) => false,
    }
}

/// The merged tree, as the resolver of the jail walks it. The resolver uses small handles, so each
/// directory gets a number when it is first met.
struct MergedWalk<'a> {
    state: &'a State,
    met: RefCell<Vec<Dir>>,
}

impl MergedWalk<'_> {
    fn handle(&self, dir: Dir) -> usize {
        let mut met = self.met.borrow_mut();
        if let Some(known) = met.iter().position(|m| m.0 == dir.0) {
            return known;
        }
        met.push(dir);
        met.len() - 1
    }

    fn dir(&self, handle: usize) -> FsResult<Dir> {
        self.met.borrow().get(handle).cloned().ok_or(FsError::NotFound)
    }
}

impl Walk for MergedWalk<'_> {
    type Dir = usize;

    fn root(&self) -> usize {
        self.handle(self.state.root())
    }

    fn parent(&self, dir: usize) -> Option<usize> {
        let dir = self.dir(dir).ok()?;
        let up = self.state.parent_of(dir.0, dir.1.as_ref()).ok()??;
        Some(self.handle(up))
    }

    fn lookup(&self, dir: usize, name: &Name) -> FsResult<Option<NameTarget<usize>>> {
        let dir = self.dir(dir)?;
        let found = self.state.find(dir.0, dir.1.as_ref(), name)?;
        if let Some(dir) = self.state.as_dir(&found) {
            return Ok(Some(NameTarget::Dir(self.handle(dir))));
        }
        Ok(match &found {
            Found::Nothing(_) => None,
            Found::Upper(ino, _) => match self.state.tree.node(*ino).map(|n| &n.body) {
                Some(Body::Symlink { target }) => Some(NameTarget::Symlink(target.clone())),
                Some(_) => Some(NameTarget::Other),
                None => None,
            },
            Found::Base(_, path, node) => Some(match node.kind() {
                FileKind::Symlink => NameTarget::Symlink(self.state.lower.readlink(path, node)?),
                _ => NameTarget::Other,
            }),
        })
    }
}
