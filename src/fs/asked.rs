//! Asks the base for a node or a name before the core lock is taken. So a lookup in a slow base
//! delays only the requests that need it. A listing, a copy-up and a link that is followed ask for
//! more, and do so under the lock.
//!
//! Always true: an answer counts only while the head shows the same epoch of the base. An apply in
//! between may have written the node, and the base is asked again, under the lock.

use std::sync::Arc;

use crate::base::{BaseStat, DirLookup};
use crate::error::FsResult;
use crate::fs::merged::lower::{Lower, LowerNode};
use crate::fs::{Core, Fs};
use crate::sys::lock::RankedGuard;
use crate::tree::Body;
use crate::types::{Ino, Name, NodeId, TreePath};

/// The answers of the base.
#[derive(Default)]
pub(in crate::fs) struct Asked(Option<Answers>);

struct Answers {
    lower: Arc<Lower>,
    nodes: Vec<(TreePath, FsResult<BaseStat>)>,
    dir: Option<DirLookup>,
}

/// A question to the base.
enum Question {
    Node(TreePath),
    /// A name in a directory, and the directory itself if the flag is set.
    Name(TreePath, bool, Name),
    /// A directory whose names are asked for next.
    Dir(TreePath),
}

impl Asked {
    fn of(lower: Arc<Lower>, questions: Vec<Question>) -> Asked {
        let mut answers = Answers { lower, nodes: Vec::with_capacity(2), dir: None };
        for question in questions {
            answers.ask(question);
        }
        Asked(Some(answers))
    }

    /// As [`Lower::lookup`], by the answer if there is one for this path.
    pub(in crate::fs) fn lookup(
        &self,
        lower: &Arc<Lower>,
        path: &TreePath,
    ) -> FsResult<Option<(Ino, LowerNode)>> {
        let answers = self.0.iter().filter(|answers| Arc::ptr_eq(&answers.lower, lower));
        let answer = answers.flat_map(|a| &a.nodes).find(|(asked, _)| asked == path);
        match answer {
            Some((_, stat)) => lower.lookup_by(path, || stat.clone()),
            None => lower.lookup(path),
        }
    }

    /// The directory that was asked for, open for its names.
    pub(in crate::fs) fn into_dir(self, lower: &Arc<Lower>) -> Option<DirLookup> {
        self.0.filter(|answers| Arc::ptr_eq(&answers.lower, lower))?.dir
    }
}

impl Answers {
    fn ask(&mut self, question: Question) {
        let base = self.lower.base();
        match question {
            Question::Node(path) => {
                let stat = base.stat(&path);
                self.nodes.push((path, stat));
            }
            Question::Name(dir, asks_dir, name) => {
                let opened = base.lookup_in(&dir);
                let path = dir.join(&name);
                if asks_dir {
                    self.nodes.push((dir, opened.stat_dir()));
                }
                self.nodes.push((path, opened.stat(&name)));
            }
            Question::Dir(dir) => {
                let opened = base.lookup_in(&dir);
                self.nodes.push((dir, opened.stat_dir()));
                self.dir = Some(opened);
            }
        }
    }
}

impl Fs {
    /// Takes the core lock, after the base was asked for a node that only the base has.
    pub(in crate::fs) fn core_for_node(&self, id: NodeId) -> (RankedGuard<'_, Core>, Asked) {
        self.core_after(|core, ask| ask.extend(core.place_in_base(id).cloned().map(Question::Node)))
    }

    /// As [`Fs::core_for_node`], for a directory whose names are asked for next.
    pub(in crate::fs) fn core_for_dir(&self, id: NodeId) -> (RankedGuard<'_, Core>, Asked) {
        self.core_after(|core, ask| ask.extend(core.place_in_base(id).cloned().map(Question::Dir)))
    }

    /// Takes the core lock, after the base was asked for names that the tree does not have.
    pub(in crate::fs) fn core_for_names(
        &self,
        names: &[(NodeId, &Name)],
    ) -> (RankedGuard<'_, Core>, Asked) {
        self.core_after(|core, ask| {
            ask.extend(names.iter().filter_map(|(dir, name)| core.question(*dir, name)));
        })
    }

    /// Takes the core lock, after the base was asked for a node and for a name.
    pub(in crate::fs) fn core_for_node_and_name(
        &self,
        id: NodeId,
        (dir, name): (NodeId, &Name),
    ) -> (RankedGuard<'_, Core>, Asked) {
        self.core_after(|core, ask| {
            ask.extend(core.place_in_base(id).cloned().map(Question::Node));
            ask.extend(core.question(dir, name));
        })
    }

    fn core_after(
        &self,
        ask: impl FnOnce(&Core, &mut Vec<Question>),
    ) -> (RankedGuard<'_, Core>, Asked) {
        let core = self.core();
        let mut questions = Vec::new();
        ask(&core, &mut questions);
        if questions.is_empty() {
            return (core, Asked::default());
        }
        let lower = Arc::clone(&core.lower);
        drop(core);
        let asked = Asked::of(lower, questions);
        (self.core(), asked)
    }
}

impl Core {
    /// The question that a lookup of a name needs; `None` if the tree alone can tell.
    fn question(&self, parent: NodeId, name: &Name) -> Option<Question> {
        if let Some(dir) = self.place_in_base(parent) {
            return Some(Question::Name(dir.clone(), true, name.clone()));
        }
        let held = self.held.get(parent).filter(|held| held.is_live())?;
        match &self.tree.node(held.ino)?.body {
            Body::Dir { base: Some(dir) } if self.tree.dentry(held.ino, name).is_none() => {
                Some(Question::Name(dir.clone(), false, name.clone()))
            }
            _ => None,
        }
    }
}
