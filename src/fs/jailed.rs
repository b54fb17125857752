//! Links, as the mount serves them: the answer to READLINK is where the jail is.

use std::cell::RefCell;
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::{Core, Found, Fs, State, Target, lower_kind};
use crate::jail::{Answer, Jail, Step, Walk};
use crate::store::record::Body;
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

impl Fs {
    /// The text of a link, as the kernel may follow it.
    ///
    /// # Errors
    /// EXDEV for a link that leads out, which is noted for `status`; EINVAL for what is not a link.
    pub fn readlink(&self, id: NodeId) -> FsResult<Vec<u8>> {
        let jail = Arc::clone(&self.jail.lock());
        let mut core = self.core();
        let target = core.target(id)?;
        let node = core.record_of(&target)?;
        let Body::Symlink { target: text } = &node.body else { return Err(FsError::Invalid) };
        let Some(dir) = core.shallowest_dir(&target)? else { return Err(FsError::NotFound) };
        let merged = Merged { state: &core.state, met: RefCell::new(Vec::new()) };
        let handle = merged.handle(dir.clone());
        let answer = jail.resolve(&merged, handle, text)?;
        match answer {
            // A link with further names that we do not see is judged as if one of them stood in the root.
            Answer::Text(served) if Jail::climb(&served) == 0 || !core.has_unseen_names(&target) => {
                let climb = Jail::climb(&served);
                if let (Target::Covered(ino) | Target::Base(ino, ..), true) = (&target, climb > 0) {
                    core.served.insert(*ino, climb);
                }
                Ok(served)
            }
            Answer::Text(_) | Answer::Escapes { .. } => {
                let (Target::Covered(ino) | Target::Base(ino, ..) | Target::Orphan(ino)) = &target;
                let path = core.path_of(*ino).unwrap_or_default();
                log::warn!("refused the link '{path}', which leads out");
                core.note_refused(path, text.clone());
                Err(FsError::LeavesJail)
            }
        }
    }

    /// The text of a link as it is stored, for callers that do not follow it.
    ///
    /// # Errors
    /// EINVAL for what is not a link, or what the base answers.
    pub fn link_text(&self, id: NodeId) -> FsResult<Vec<u8>> {
        let core = self.core();
        match &core.record_of(&core.target(id)?)?.body {
            Body::Symlink { target } => Ok(target.clone()),
            Body::File { .. } | Body::Dir { .. } | Body::Special => Err(FsError::Invalid),
        }
    }
}

/// A directory of the merged tree: its number and what it covers of the base.
type Dir = (Ino, Option<TreePath>);

impl Core {
    /// The directory of a link that is nearest to the root: of several names, the one from which it climbs least.
    fn shallowest_dir(&self, target: &Target) -> FsResult<Option<Dir>> {
        let mut dirs: Vec<Dir> = Vec::new();
        match target {
            Target::Covered(ino) => {
                for (dir, _) in self.tree.links(*ino) {
                    dirs.push((dir, self.lower_path(dir)?));
                }
            }
            Target::Base(_, path, _) => {
                let Some((above, _)) = path.split() else { return Ok(None) };
                let Some((ino, _)) = self.lower.lookup(&above)? else { return Ok(None) };
                dirs.push((ino, Some(above)));
            }
            Target::Orphan(_) => {}
        }
        let mut best: Option<(usize, Dir)> = None;
        for dir in dirs {
            let depth = self.depth_of(dir.0, dir.1.as_ref())?;
            if best.as_ref().is_none_or(|(least, _)| depth < *least) {
                best = Some((depth, dir));
            }
        }
        Ok(best.map(|(_, dir)| dir))
    }

    /// Whether the base has names of this node that the tree does not know.
    fn has_unseen_names(&self, target: &Target) -> bool {
        match target {
            Target::Covered(ino) => {
                self.tree.node(*ino).is_some_and(|n| n.meta.nlink as usize > self.tree.links(*ino).count())
            }
            Target::Base(_, _, node) => crate::fs::state::lower_attr(Ino::ROOT, node).meta.nlink > 1,
            Target::Orphan(_) => false,
        }
    }

    /// Refuses to move a directory up by `levels` if a link below it that the kernel was given would climb out.
    pub(super) fn check_served_links(&self, moved: Ino, levels: usize) -> FsResult<()> {
        for (link, climb) in &self.served {
            let target = match self.table.id_of(*link).map(|id| self.target(id)) {
                Some(Ok(target)) => target,
                _ => continue,
            };
            let Some(dir) = self.shallowest_dir(&target)? else { continue };
            let depth = self.depth_of(dir.0, dir.1.as_ref())?;
            if depth.saturating_sub(levels) < *climb && self.lies_below(&dir, moved)? {
                return Err(FsError::LeavesJail);
            }
        }
        Ok(())
    }

    fn lies_below(&self, dir: &Dir, ancestor: Ino) -> FsResult<bool> {
        let mut at = dir.clone();
        loop {
            if at.0 == ancestor {
                return Ok(true);
            }
            match self.parent_of(at.0, at.1.as_ref())? {
                Some(up) => at = up,
                None => return Ok(false),
            }
        }
    }
}

/// The merged tree, as the resolver walks it. The resolver wants small handles, so directories are numbered as they are met.
struct Merged<'a> {
    state: &'a State,
    met: RefCell<Vec<Dir>>,
}

impl Merged<'_> {
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

impl Walk for Merged<'_> {
    type Dir = usize;

    fn root(&self) -> usize {
        self.handle(self.state.root())
    }

    fn parent(&self, dir: usize) -> Option<usize> {
        let dir = self.dir(dir).ok()?;
        let up = self.state.parent_of(dir.0, dir.1.as_ref()).ok()??;
        Some(self.handle(up))
    }

    fn lookup(&self, dir: usize, name: &Name) -> FsResult<Option<Step<usize>>> {
        let dir = self.dir(dir)?;
        let found = self.state.find(dir.0, dir.1.as_ref(), name)?;
        if let Some(dir) = self.state.as_dir(&found) {
            return Ok(Some(Step::Dir(self.handle(dir))));
        }
        Ok(match &found {
            Found::Nothing(_) => None,
            Found::Covered(ino, _) => match self.state.tree.node(*ino).map(|n| &n.body) {
                Some(Body::Symlink { target }) => Some(Step::Symlink(target.clone())),
                Some(_) => Some(Step::Other),
                None => None,
            },
            Found::Base(_, path, node) => Some(match lower_kind(node) {
                FileKind::Symlink => Step::Symlink(self.state.lower.readlink(path, node)?),
                _ => Step::Other,
            }),
        })
    }
}
