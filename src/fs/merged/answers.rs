//! Answers of the base and the store to an operation that holds the core lock.
//!
//! The base may be a slow disk or a file server, so no request may wait for it under the lock of
//! its head. An operation under that lock is *served*: a table has the answers that the base gave
//! before. A question that the table lacks fails with [`FsError::MustWait`]. The caller then
//! releases its locks, asks the base, and runs the operation again (`fs/asked.rs`). The store is
//! asked in the same way for the content of a sealed layer, whose files must be opened.
//!
//! Always true:
//! * A served operation that failed so has committed nothing but copy-ups, which no program can
//!   see, and perhaps the beginning of one edit, which the next run does not repeat.
//! * The answers are those of the present thread, and only of the operation that it serves. A
//!   thread that serves none asks the base at once.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

#[cfg(all(test, feature = "shuttle"))]
use shuttle::thread_local;

use crate::error::{FsError, FsResult};
use crate::store::ContentVersion;
use crate::types::{Fingerprint, Ino, LayerId, TreePath};

/// A question to the base, to the log of inode numbers that belongs to it, or to the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::fs) enum Question {
    /// The metadata of the node.
    Stat(TreePath),
    /// The names of the directory.
    Names(TreePath),
    /// The text of the symlink.
    Text(TreePath),
    /// The extended attributes of the node.
    Xattrs(TreePath),
    /// The file, opened, as a lookup has found it.
    Opened(TreePath),
    /// The file, opened, to which a copied-up node refers, by the fingerprint that it should have.
    Origin(TreePath, Fingerprint),
    /// Where the file has data.
    DataRuns(TreePath),
    /// The inode number of the node with this device and host number. It has none yet, so the log
    /// must record one.
    Number(u64, u64),
    /// An inode number for the node other than this one, which a node of the tree has.
    OtherNumber(u64, u64, Ino),
    /// This version of the content of a layer, loaded from the files of the store.
    LayerContent(LayerId, ContentVersion),
}

type Answer = Box<dyn Any>;

/// A question that has no answer yet, and how to get it.
struct Missing {
    question: Question,
    ask: Box<dyn FnOnce() -> Answer>,
}

/// The number of answers up to which a list is faster than a map.
const FEW: usize = 8;

/// Answers by their questions. Most operations have one or two, a few have thousands.
#[derive(Default)]
struct Table {
    few: Vec<(Question, Answer)>,
    more: HashMap<Question, Answer>,
}

impl Table {
    fn get(&self, question: &Question) -> Option<&Answer> {
        let found = self.few.iter().find(|(known, _)| known == question).map(|(_, answer)| answer);
        if self.more.is_empty() { found } else { found.or_else(|| self.more.get(question)) }
    }

    fn add(&mut self, question: Question, answer: Answer) {
        if self.few.len() < FEW {
            self.few.push((question, answer));
        } else {
            self.more.insert(question, answer);
        }
    }

    fn clear(&mut self) {
        self.few.clear();
        self.more.clear();
    }
}

/// The answers that an operation got so far.
#[derive(Default)]
pub(in crate::fs) struct Answers {
    known: Table,
    missing: Vec<Missing>,
    /// The questions of `missing`. There may be thousands.
    lacked: HashSet<Question>,
    /// The file of which the operation has begun an edit.
    begun_edit: Option<Ino>,
    /// The operation has something else to wait for than the base.
    must_wait: bool,
    /// The operation has committed a change, so it must not run again.
    is_committed: bool,
}

thread_local! {
    static SERVED: RefCell<Option<Answers>> = const { RefCell::new(None) };
}

impl Answers {
    /// Adds an answer that the caller got.
    pub(in crate::fs) fn add<T: 'static>(&mut self, question: Question, answer: FsResult<T>) {
        self.known.add(question, Box::new(answer));
    }

    /// Runs an operation by these answers.
    pub(in crate::fs) fn serve<T>(&mut self, operation: impl FnOnce() -> T) -> T {
        /// Ends the serving, also if the operation panics.
        struct Serving<'a>(&'a mut Answers);
        impl Drop for Serving<'_> {
            fn drop(&mut self) {
                *self.0 = SERVED.with(RefCell::take).unwrap_or_default();
            }
        }
        (self.must_wait, self.is_committed) = (false, false);
        let serving = Serving(self);
        SERVED.with(|served| served.replace(Some(std::mem::take(serving.0))));
        let result = operation();
        drop(serving);
        result
    }

    /// Asks the questions that the operation found no answer to. Returns whether there were any.
    pub(in crate::fs) fn ask_missing(&mut self) -> bool {
        self.lacked.clear();
        let missing = std::mem::take(&mut self.missing);
        let had_any = !missing.is_empty();
        for Missing { question, ask } in missing {
            self.known.add(question, ask());
        }
        had_any
    }

    /// Whether the operation must run again: it found no answer to a question, or has something
    /// else to wait for.
    pub(in crate::fs) fn must_run_again(&self) -> bool {
        self.must_wait || !self.missing.is_empty()
    }

    /// Whether the operation must wait for something other than an answer of the base.
    pub(in crate::fs) fn must_wait(&self) -> bool {
        self.must_wait
    }

    /// Whether there is an answer to a question.
    pub(in crate::fs) fn knows(&self, question: &Question) -> bool {
        self.known.get(question).is_some()
    }

    /// Drops all answers, because they may be of another epoch of the base.
    pub(in crate::fs) fn clear(&mut self) {
        self.known.clear();
        self.missing.clear();
        self.lacked.clear();
    }

    fn get<T: Clone + 'static>(&self, question: &Question) -> Option<FsResult<T>> {
        self.known.get(question)?.downcast_ref::<FsResult<T>>().cloned()
    }
}

/// The answer to a question; `ask` gets it from the base or the store.
///
/// # Errors
/// Those of the base; [`FsError::MustWait`] if a served operation must wait for the answer.
pub(in crate::fs) fn answer<T: Clone + 'static>(
    question: Question,
    ask: impl FnOnce() -> FsResult<T> + 'static,
) -> FsResult<T> {
    let ask = SERVED.with(|served| {
        let mut served = served.borrow_mut();
        let Some(answers) = served.as_mut().filter(|answers| !answers.is_committed) else {
            return Err(ask);
        };
        if let Some(known) = answers.get(&question) {
            return Ok(known);
        }
        if answers.lacked.insert(question.clone()) {
            answers.missing.push(Missing { question, ask: Box::new(|| Box::new(ask())) });
        }
        Ok(Err(FsError::MustWait))
    });
    ask.unwrap_or_else(|ask| ask())
}

/// Says that the operation has something else to wait for than the base. Its caller waits for it
/// before the next run.
pub(in crate::fs) fn must_wait() -> FsError {
    SERVED.with(|served| {
        if let Some(answers) = &mut *served.borrow_mut() {
            answers.must_wait = true;
        }
    });
    FsError::MustWait
}

/// Whether this thread serves an operation that has the answer to a question.
pub(in crate::fs) fn is_known(question: &Question) -> bool {
    SERVED.with(|served| served.borrow().as_ref().is_some_and(|answers| answers.knows(question)))
}

/// Whether this thread serves an operation, whose questions must not wait for the base.
pub(in crate::fs) fn is_serving() -> bool {
    SERVED.with(|served| served.borrow().as_ref().is_some_and(|answers| !answers.is_committed))
}

/// Refuses to commit what an operation made without an answer that it needed.
///
/// # Errors
/// [`FsError::MustWait`].
pub(in crate::fs) fn check_complete() -> FsResult<()> {
    let waits = SERVED.with(|served| served.borrow().as_ref().is_some_and(Answers::must_run_again));
    if waits { Err(FsError::MustWait) } else { Ok(()) }
}

/// The operation has committed a change that a program can see, so it does not run again. A
/// question that it still has goes to the base at once.
pub(in crate::fs) fn note_committed() {
    SERVED.with(|served| {
        if let Some(answers) = &mut *served.borrow_mut() {
            answers.is_committed = true;
        }
    });
}

/// The operation has begun an edit of a file, and recorded the content before it.
pub(in crate::fs) fn note_begun_edit(ino: Ino) {
    SERVED.with(|served| {
        if let Some(answers) = &mut *served.borrow_mut() {
            answers.begun_edit = Some(ino);
        }
    });
}

/// Whether an earlier run of the operation has begun an edit of a file.
pub(in crate::fs) fn has_begun_edit(ino: Ino) -> bool {
    let has_begun = |answers: &Answers| answers.begun_edit == Some(ino);
    SERVED.with(|served| served.borrow().as_ref().is_some_and(has_begun))
}

/// Runs a part of an operation that asks the base at once.
pub(in crate::fs) fn at_once<T>(part: impl FnOnce() -> T) -> T {
    /// Goes on serving, also if the part panics.
    struct Resume(Option<Answers>);
    impl Drop for Resume {
        fn drop(&mut self) {
            SERVED.with(|served| served.replace(self.0.take()));
        }
    }
    let _resume = Resume(SERVED.with(RefCell::take));
    part()
}

/// `None` for an error of the base that does not matter to the caller.
///
/// # Errors
/// [`FsError::MustWait`].
pub(in crate::fs) fn known<T>(result: FsResult<T>) -> FsResult<Option<T>> {
    known_or(result, |_| ())
}

/// As [`known`]; `lost` gets the error that does not matter.
///
/// # Errors
/// As [`known`].
pub(in crate::fs) fn known_or<T>(
    result: FsResult<T>,
    lost: impl FnOnce(FsError),
) -> FsResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(FsError::MustWait) => Err(FsError::MustWait),
        Err(error) => {
            lost(error);
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    /// Asks for the names of `a`, which the base answers with 7, and counts how often it is asked.
    fn ask(asked: &Rc<std::cell::Cell<u32>>) -> FsResult<u32> {
        let asked = Rc::clone(asked);
        answer(Question::Names(TreePath::parse(b"a").unwrap()), move || {
            asked.set(asked.get() + 1);
            Ok(7)
        })
    }

    #[test]
    fn a_served_operation_gets_each_answer_at_its_next_run() {
        let (asked, mut answers) = (Rc::default(), Answers::default());
        let first = answers.serve(|| (ask(&asked), ask(&asked), check_complete()));
        assert_eq!(first, (NOT_ASKED, NOT_ASKED, Err(FsError::MustWait)));
        assert_eq!((asked.get(), answers.must_run_again()), (0, true));
        answers.ask_missing();
        assert_eq!(answers.serve(|| (ask(&asked), check_complete())), (Ok(7), Ok(())));
        assert_eq!(
            (asked.get(), answers.must_run_again()),
            (1, false),
            "each question is put once"
        );
        answers.clear();
        assert_eq!(answers.serve(|| ask(&asked)), NOT_ASKED, "another epoch");
    }

    const NOT_ASKED: FsResult<u32> = Err(FsError::MustWait);

    #[test]
    fn the_base_is_asked_at_once_after_a_commit_and_by_a_thread_that_serves_nothing() {
        let (asked, mut answers) = (Rc::default(), Answers::default());
        assert_eq!(ask(&asked), Ok(7));
        let result = answers.serve(|| {
            note_committed();
            (ask(&asked), is_serving())
        });
        assert_eq!((result, asked.get(), answers.must_run_again()), ((Ok(7), false), 2, false));
        assert_eq!(answers.serve(|| ask(&asked)), NOT_ASKED, "the next operation");
    }

    #[test]
    fn an_error_of_the_base_is_an_answer() {
        let mut answers = Answers::default();
        let ask = || answer::<u32>(Question::Stat(TreePath::root()), || Err(FsError::NotFound));
        assert_eq!(answers.serve(|| known(ask())), Err(FsError::MustWait));
        answers.ask_missing();
        assert_eq!(answers.serve(|| known(ask())), Ok(None));
    }

    #[test]
    fn a_part_that_asks_at_once_interrupts_the_serving() {
        let (asked, mut answers) = (Rc::default(), Answers::default());
        let results = answers.serve(|| (at_once(|| ask(&asked)), ask(&asked)));
        assert_eq!((results, asked.get()), ((Ok(7), NOT_ASKED), 1));
    }

    #[test]
    fn an_edit_that_began_is_known_to_the_next_run() {
        let mut answers = Answers::default();
        assert!(!answers.serve(|| has_begun_edit(Ino(5))));
        answers.serve(|| note_begun_edit(Ino(5)));
        assert!(answers.serve(|| has_begun_edit(Ino(5))) && !has_begun_edit(Ino(5)));
    }

    #[test]
    fn a_panic_ends_the_serving() {
        let panicked = std::panic::catch_unwind(|| {
            Answers::default().serve(|| panic!("an operation of the test"));
        });
        assert!(panicked.is_err() && !is_serving());
    }
}
