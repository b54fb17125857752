//! Runs operations under the core lock, and asks the base in between, without the lock.
//!
//! So a slow base delays only the requests that need it. An operation is served by the answers that
//! it got so far (`fs/merged/answers.rs`). It runs again with each answer that it lacked. For nodes
//! and names, which nearly every request needs, the base is asked before the first run.
//!
//! Always true: an answer counts only while the head shows the same epoch of the base. An apply in
//! between may have written the node, and the base is asked again.

use std::sync::Arc;

use crate::error::FsResult;
use crate::fs::merged::answers::{Answers, Question};
#[cfg(test)]
use crate::fs::merged::lower::LOOKUPS;
use crate::fs::merged::lower::Lower;
use crate::fs::{Core, Fs};
use crate::tree::Body;
use crate::types::{Name, NodeId, TreePath};

/// A question that the base is asked before the first run.
enum First {
    Node(TreePath),
    /// A file that is read next.
    Content(TreePath),
    /// A name in a directory, and the directory itself if the flag is set.
    Name(TreePath, bool, Name),
}

impl First {
    /// How many base nodes it looks up.
    #[cfg(test)]
    fn lookups(&self) -> u64 {
        if matches!(self, First::Name(_, true, _)) { 2 } else { 1 }
    }

    fn ask(self, lower: &Lower, answers: &mut Answers) {
        let base = lower.base();
        #[cfg(test)]
        LOOKUPS.set(LOOKUPS.get() + self.lookups());
        match self {
            First::Node(path) => {
                let stat = base.stat(&path);
                answers.add(Question::Stat(path), stat);
            }
            First::Content(path) => {
                let stat = base.stat(&path);
                let opened = stat.as_ref().ok().and_then(|seen| lower.open_ahead(&path, seen));
                if let Some(opened) = opened {
                    answers.add(Question::Opened(path.clone()), opened);
                }
                answers.add(Question::Stat(path), stat);
            }
            First::Name(dir, asks_dir, name) => {
                let opened = base.lookup_in(&dir);
                let path = dir.join(&name);
                if asks_dir {
                    answers.add(Question::Stat(dir), opened.stat_dir());
                }
                answers.add(Question::Stat(path), opened.stat(&name));
            }
        }
    }
}

impl Fs {
    /// Runs an operation under the core lock.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_core<T, E>(
        &self,
        operation: impl FnMut(&mut Core) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run(|_, _| {}, operation)
    }

    /// As [`Fs::with_core`], for an operation on a node.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_node<T>(
        &self,
        id: NodeId,
        operation: impl FnMut(&mut Core) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core, first: &mut Vec<First>| {
            first.extend(core.place_in_base(id).cloned().map(First::Node));
        };
        self.run(first, operation)
    }

    /// As [`Fs::with_core`], for an operation that reads the content of a node.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_content<T>(
        &self,
        id: NodeId,
        operation: impl FnMut(&mut Core) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core, first: &mut Vec<First>| {
            first.extend(core.place_in_base(id).cloned().map(First::Content));
        };
        self.run(first, operation)
    }

    /// As [`Fs::with_core`], for an operation on names in directories.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_names<T>(
        &self,
        names: &[(NodeId, &Name)],
        operation: impl FnMut(&mut Core) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core, first: &mut Vec<First>| {
            first.extend(names.iter().filter_map(|(dir, name)| core.name_in_base(*dir, name)));
        };
        self.run(first, operation)
    }

    /// As [`Fs::with_core`], for an operation on a node and a name.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_node_and_name<T>(
        &self,
        id: NodeId,
        (dir, name): (NodeId, &Name),
        operation: impl FnMut(&mut Core) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core, first: &mut Vec<First>| {
            first.extend(core.place_in_base(id).cloned().map(First::Node));
            first.extend(core.name_in_base(dir, name));
        };
        self.run(first, operation)
    }

    fn run<T, E>(
        &self,
        first: impl FnOnce(&Core, &mut Vec<First>),
        mut operation: impl FnMut(&mut Core) -> Result<T, E>,
    ) -> Result<T, E> {
        let (mut answers, mut questions) = (Answers::default(), Vec::new());
        let mut core = self.core();
        first(&core, &mut questions);
        let mut lower = None;
        if !questions.is_empty() {
            let asked = lower.insert(Arc::clone(&core.lower));
            drop(core);
            questions.into_iter().for_each(|question| question.ask(asked, &mut answers));
            core = self.core();
        }
        loop {
            if lower.as_ref().is_some_and(|asked| !Arc::ptr_eq(asked, &core.lower)) {
                answers.clear();
            }
            let result = answers.serve(|| operation(&mut core));
            if !answers.is_missing() {
                return result;
            }
            lower = Some(Arc::clone(&core.lower));
            drop(core);
            answers.ask_missing();
            core = self.core();
        }
    }
}

impl Core {
    /// The question that a lookup of a name needs; `None` if the tree alone can tell.
    fn name_in_base(&self, parent: NodeId, name: &Name) -> Option<First> {
        if let Some(dir) = self.place_in_base(parent) {
            return Some(First::Name(dir.clone(), true, name.clone()));
        }
        let held = self.held.get(parent).filter(|held| held.is_live())?;
        match &self.tree.node(held.ino)?.body {
            Body::Dir { base: Some(dir) } if self.tree.dentry(held.ino, name).is_none() => {
                Some(First::Name(dir.clone(), false, name.clone()))
            }
            _ => None,
        }
    }
}
