//! Runs operations under the locks of a head, and asks the base in between, without them.
//!
//! So a slow base delays only the requests that need it. An operation is served by the answers that
//! it got so far (`fs/merged/answers.rs`). It runs again with each answer that it lacked. For nodes
//! and names, which nearly every request needs, the base is asked before the first run. The store
//! is asked for the content of sealed layers in the same way.
//!
//! Always true: an answer counts only while the head shows the same epoch of the base. An apply in
//! between may have written the node, and the base is asked again.

use std::ops::Deref;
use std::sync::Arc;

use crate::base::DirLookup;
use crate::error::FsResult;
use crate::fs::merged::answers::{Answers, Question};
#[cfg(test)]
use crate::fs::merged::lower::LOOKUPS;
use crate::fs::merged::lower::{Lower, LowerNode};
use crate::fs::writing::Writing;
#[cfg(test)]
use crate::fs::writing::hook;
use crate::fs::{Core, Fs};
use crate::sys::lock::RankedGuard;
use crate::tree::Body;
use crate::types::{Name, NodeId, TreePath};

/// A question that the base is asked before the first run.
enum First {
    Node(TreePath),
    /// A file that is read next.
    Content(TreePath),
    /// A node whose extended attributes are read next.
    Xattrs(TreePath),
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
            First::Xattrs(path) => {
                let stat = base.stat(&path);
                if let Ok(seen) = &stat {
                    let xattrs = lower.xattrs(&path, &LowerNode::Base(Box::new(*seen)));
                    answers.add(Question::Xattrs(path.clone()), xattrs);
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
    /// Runs an operation that only reads, under the core lock.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_core<T, E>(
        &self,
        operation: impl FnMut(&mut Core) -> Result<T, E>,
    ) -> Result<T, E> {
        self.look(|_| [None, None], operation)
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
        self.look(node(id), operation)
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
        let first = |core: &Core| [core.place_in_base(id).cloned().map(First::Content), None];
        self.look(first, operation)
    }

    /// As [`Fs::with_core`], for an operation that reads the extended attributes of a node.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_xattrs<T>(
        &self,
        id: NodeId,
        operation: impl FnMut(&mut Core) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core| [core.place_in_base(id).cloned().map(First::Xattrs), None];
        self.look(first, operation)
    }

    /// As [`Fs::with_core`], for an operation on a name in a directory.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_name<T>(
        &self,
        (dir, name): (NodeId, &Name),
        operation: impl FnMut(&mut Core) -> FsResult<T>,
    ) -> FsResult<T> {
        self.look(|core| [core.name_in_base(dir, name), None], operation)
    }

    /// As [`Fs::with_core`], for an operation on a directory whose names are looked up next. Also
    /// returns the directory of the base, if only the base has it.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn with_dir<T>(
        &self,
        id: NodeId,
        mut operation: impl FnMut(&mut Core) -> FsResult<T>,
    ) -> FsResult<(T, Option<DirLookup>)> {
        let operation = |core: &mut RankedGuard<'_, Core>| operation(core);
        let core = self.core();
        let Some(path) = core.place_in_base(id).cloned() else {
            let known = (Answers::default(), None);
            let result = repeat(|| self.core(), core, known, operation, || self.wait_for_change());
            return Ok((result?, None));
        };
        let lower = Arc::clone(&core.lower);
        drop(core);
        let (mut answers, opened) = (Answers::default(), lower.base().lookup_in(&path));
        #[cfg(test)]
        LOOKUPS.set(LOOKUPS.get() + 1);
        answers.add(Question::Stat(path), opened.stat_dir());
        let known = (answers, Some(lower));
        let wait = || self.wait_for_change();
        Ok((repeat(|| self.core(), self.core(), known, operation, wait)?, Some(opened)))
    }

    /// Runs an operation that changes something.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn change<T, E>(
        &self,
        operation: impl FnMut(&mut Writing<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        run(|| self.writing(), |_| [None, None], operation, || ())
    }

    /// As [`Fs::change`], for an operation on a node.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn change_node<T>(
        &self,
        id: NodeId,
        operation: impl FnMut(&mut Writing<'_>) -> FsResult<T>,
    ) -> FsResult<T> {
        run(|| self.writing(), node(id), operation, || ())
    }

    /// As [`Fs::change_node`], for an operation that can also wait for something other than an
    /// answer of the base. `wait` then waits for that; the thread holds no lock.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn change_node_and_wait<T>(
        &self,
        id: NodeId,
        operation: impl FnMut(&mut Writing<'_>) -> FsResult<T>,
        wait: impl FnMut(),
    ) -> FsResult<T> {
        run(|| self.writing(), node(id), operation, wait)
    }

    /// As [`Fs::change`], for an operation on a name in a directory.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn change_name<T>(
        &self,
        (dir, name): (NodeId, &Name),
        operation: impl FnMut(&mut Writing<'_>) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core| [core.name_in_base(dir, name), None];
        run(|| self.writing(), first, operation, || ())
    }

    /// As [`Fs::change`], for an operation on two names in directories.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn change_names<T>(
        &self,
        names: [(NodeId, &Name); 2],
        operation: impl FnMut(&mut Writing<'_>) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core| names.map(|(dir, name)| core.name_in_base(dir, name));
        run(|| self.writing(), first, operation, || ())
    }

    /// As [`Fs::change`], for an operation on a node and a name.
    ///
    /// # Errors
    /// Those of the operation.
    pub(in crate::fs) fn change_node_and_name<T>(
        &self,
        id: NodeId,
        (dir, name): (NodeId, &Name),
        operation: impl FnMut(&mut Writing<'_>) -> FsResult<T>,
    ) -> FsResult<T> {
        let first = |core: &Core| {
            [core.place_in_base(id).cloned().map(First::Node), core.name_in_base(dir, name)]
        };
        run(|| self.writing(), first, operation, || ())
    }

    fn look<T, E>(
        &self,
        first: impl FnOnce(&Core) -> [Option<First>; 2],
        mut operation: impl FnMut(&mut Core) -> Result<T, E>,
    ) -> Result<T, E> {
        let operation = |core: &mut RankedGuard<'_, Core>| operation(core);
        run(|| self.core(), first, operation, || self.wait_for_change())
    }
}

/// The first question of an operation on a node.
fn node(id: NodeId) -> impl FnOnce(&Core) -> [Option<First>; 2] {
    move |core| [core.place_in_base(id).cloned().map(First::Node), None]
}

/// Runs an operation under the locks that `lock` takes.
fn run<G: Deref<Target = Core>, T, E>(
    lock: impl Fn() -> G,
    first: impl FnOnce(&Core) -> [Option<First>; 2],
    operation: impl FnMut(&mut G) -> Result<T, E>,
    wait: impl FnMut(),
) -> Result<T, E> {
    let mut answers = Answers::default();
    let mut core = lock();
    let questions = first(&core);
    let mut lower = None;
    if questions.iter().any(Option::is_some) {
        let asked = lower.insert(Arc::clone(&core.lower));
        drop(core);
        questions.into_iter().flatten().for_each(|first| first.ask(asked, &mut answers));
        core = lock();
    }
    repeat(lock, core, (answers, lower), operation, wait)
}

/// Runs an operation, again with each answer that it lacks. Calls `wait` if the operation must wait
/// for something other than an answer of the base. `lower` is the base that gave the answers, if
/// there are any.
fn repeat<G: Deref<Target = Core>, T, E>(
    lock: impl Fn() -> G,
    mut core: G,
    (mut answers, mut lower): (Answers, Option<Arc<Lower>>),
    mut operation: impl FnMut(&mut G) -> Result<T, E>,
    mut wait: impl FnMut(),
) -> Result<T, E> {
    loop {
        if lower.as_ref().is_some_and(|asked| !Arc::ptr_eq(asked, &core.lower)) {
            answers.clear();
        }
        let result = answers.serve(|| operation(&mut core));
        if !answers.must_run_again() {
            return result;
        }
        lower = Some(Arc::clone(&core.lower));
        drop(core);
        answers.ask_missing();
        #[cfg(test)]
        hook::call();
        if answers.must_wait() {
            wait();
        }
        core = lock();
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
