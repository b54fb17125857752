//! Who looks at the files that it lists.
//!
//! A program that lists a directory and then looks at each file (`ls -l`, `du`, `cp -r`, `grep -r`) asks for each by a message, unless
//! the files came with the names. For one that wants the names alone (`find -name`, or `git status`, which has looked before it
//! lists) that would be work for nothing, as each file is looked at in the base. Which of the two it is shows: who wants more asks for it. Always true:
//! * what is remembered changes only what an answer costs, never what it says;
//! * who is taken for somebody who looks is put to the test now and then: it gets names alone, and must ask again.

use std::collections::VecDeque;

/// So many threads are remembered, those that listed or looked last.
const MOST: usize = 64;
/// So many directories come with their files after each look.
const TRUST: u8 = 128;

/// A thread that has listed a directory. The kernel tells threads, not processes.
#[derive(Debug)]
struct Lister {
    tid: u32,
    /// How many more directories come to it with their files.
    trust: u8,
    /// Whether the one does that it is reading.
    looks: bool,
}

/// The threads that listed directories.
#[derive(Debug, Default)]
pub(super) struct Lookers(VecDeque<Lister>);

impl Lookers {
    /// A thread lists a directory, from its beginning or further on. Whether the files should come with the names.
    pub(super) fn lists(&mut self, tid: u32, begins: bool) -> bool {
        let at = self.0.iter().position(|lister| lister.tid == tid);
        let mut lister =
            at.and_then(|at| self.0.remove(at)).unwrap_or(Lister { tid, trust: 0, looks: false });
        if begins {
            lister.looks = lister.trust > 0;
            lister.trust = lister.trust.saturating_sub(1);
        }
        let looks = lister.looks;
        self.0.push_front(lister);
        self.0.truncate(MOST);
        looks
    }

    /// A thread asked for something by its name, and it is no directory: those come with the names for everybody.
    pub(super) fn looks(&mut self, tid: u32) {
        if let Some(lister) = self.0.iter_mut().find(|lister| lister.tid == tid) {
            lister.trust = TRUST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looked_at_what_it_listed_gets_files_until_it_is_put_to_the_test() {
        let mut lookers = Lookers::default();
        lookers.looks(7);
        assert!(!lookers.lists(7, true), "who has listed nothing looks for reasons of its own");
        lookers.looks(7);
        assert!(!lookers.lists(8, true), "somebody else");
        let came = (0..1000).take_while(|_| lookers.lists(7, true)).count();
        assert_eq!(came, usize::from(TRUST));
        assert!(!lookers.lists(7, true), "it has not looked since");
        lookers.looks(7);
        assert!(!lookers.lists(7, false), "in the middle of a directory nothing changes");
        assert!(lookers.lists(7, true) && lookers.lists(7, false));
    }

    #[test]
    fn few_threads_are_remembered() {
        let mut lookers = Lookers::default();
        for tid in 0..1000 {
            lookers.lists(tid, true);
            lookers.looks(tid);
            assert!(lookers.0.len() <= MOST);
        }
        assert!(!lookers.lists(0, true) && lookers.lists(999, true));
    }
}
