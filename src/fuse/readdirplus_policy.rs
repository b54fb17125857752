//! Decides whether a directory listing comes with the files' attributes or with bare names.
//!
//! A program that lists a directory and then stats each file (`ls -l`, `du`, `cp -r`) sends a
//! LOOKUP for each, unless the files came with the names. For a program that wants names only
//! (`find -name`), looking up each file in the base would be wasted work. `git status` stats its
//! files before it lists. The first LOOKUP after a listing tells the two apart. Always true:
//! * The decision changes only the cost of a reply, never its meaning.
//! * A thread that stats its files gets bare names now and then, and must prove its interest again.

use std::collections::VecDeque;

/// How many threads are tracked: those that listed or looked up most recently.
const MAX_THREADS: usize = 64;
/// How many directories come with their files after each LOOKUP.
const CREDIT: u8 = 128;

/// A thread that has listed a directory. The kernel reports thread ids, not process ids.
#[derive(Debug)]
struct Lister {
    tid: u32,
    /// How many more directories come with their files.
    credit: u8,
    /// Whether the directory that it reads now comes with its files.
    with_files: bool,
}

/// The threads that listed directories, the most recent first.
#[derive(Debug, Default)]
pub(super) struct ReaddirplusPolicy(VecDeque<Lister>);

impl ReaddirplusPolicy {
    /// A thread reads a directory; `begins` if from the start. Returns whether files should come
    /// with their names.
    pub(super) fn on_readdir(&mut self, tid: u32, begins: bool) -> bool {
        let at = self.0.iter().position(|lister| lister.tid == tid);
        let mut lister = at.and_then(|at| self.0.remove(at)).unwrap_or(Lister {
            tid,
            credit: 0,
            with_files: false,
        });
        if begins {
            lister.with_files = lister.credit > 0;
            lister.credit = lister.credit.saturating_sub(1);
        }
        let with_files = lister.with_files;
        self.0.push_front(lister);
        self.0.truncate(MAX_THREADS);
        with_files
    }

    /// A thread looked up something other than a directory. Directories come with every listing, so
    /// a LOOKUP of one proves nothing.
    pub(super) fn on_lookup(&mut self, tid: u32) {
        if let Some(lister) = self.0.iter_mut().find(|lister| lister.tid == tid) {
            lister.credit = CREDIT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_after_a_listing_earns_files_until_the_credit_is_spent() {
        let mut policy = ReaddirplusPolicy::default();
        policy.on_lookup(7);
        assert!(!policy.on_readdir(7, true), "a lookup without a listing before it earns nothing");
        policy.on_lookup(7);
        assert!(!policy.on_readdir(8, true), "another thread");
        let with_files = (0..1000).take_while(|_| policy.on_readdir(7, true)).count();
        assert_eq!(with_files, usize::from(CREDIT));
        assert!(!policy.on_readdir(7, true), "no lookup since");
        policy.on_lookup(7);
        assert!(!policy.on_readdir(7, false), "in the middle of a directory nothing changes");
        assert!(policy.on_readdir(7, true) && policy.on_readdir(7, false));
    }

    #[test]
    fn the_number_of_tracked_threads_is_bounded() {
        let mut policy = ReaddirplusPolicy::default();
        for tid in 0..1000 {
            policy.on_readdir(tid, true);
            policy.on_lookup(tid);
            assert!(policy.0.len() <= MAX_THREADS);
        }
        assert!(!policy.on_readdir(0, true) && policy.on_readdir(999, true));
    }
}
