//! Bounds the journal of the upper layer, so that the time and memory of a mount depend on what
//! differs from the base and not on how often programs changed it.
//!
//! * The journal is at most [`MAX_RATIO`] times as long as its shortest form plus [`SLACK`] bytes,
//!   plus the records that arrive during a check or a rewrite.
//!
//! A look computes the length of the shortest form, which costs as much as what differs. So the
//! next look comes only when the journal is too long even for an unchanged shortest form, or when
//! the tree has lost an eighth of its entries.

use crate::error::{Attempt, Result};
use crate::fs::{NextCheck, OpenJournal, SMALL_JOURNAL};
use crate::store::layer::compact::compact_len;
use crate::sys::memory;
use crate::timeline::{Effort, Timeline};
use crate::tree::Tree;

/// How many times longer than its shortest form the journal may be.
const MAX_RATIO: u64 = 3;
/// Bytes that the journal may have in addition.
const SLACK: u64 = SMALL_JOURNAL;
/// Bytes of new records between two looks, at least.
const LOOK_INTERVAL: u64 = 4 << 20;
/// The next look comes when the tree has lost this fraction (one in so many) of the edits in the
/// shortest form,
const LOST_PART: u64 = 8;
/// but at least so many.
const MIN_LOST: u64 = 1 << 14;

/// Bytes of a rewritten journal that are not edits, at most.
const OVERHEAD: u64 = 256;

impl Timeline {
    /// Rewrites the journal of the upper layer if it is several times longer than its shortest
    /// form; with [`Effort::Everything`], if it is longer at all.
    ///
    /// # Errors
    /// The store failed. The journal then stays as it is, and the next look comes when it has
    /// grown.
    pub fn shorten_journal(&self, effort: Effort) -> Result<()> {
        let _compacting = self.compacting.lock();
        let open = self.fs.open_journal();
        if open.end.bytes() < SMALL_JOURNAL && effort == Effort::WhereItPays {
            self.fs.set_next_journal_check(NextCheck::first(open.end.layer));
            return Ok(());
        }
        let shortened = self.shorten(&open, effort);
        let next = shortened.as_ref().copied().unwrap_or_else(|_| later(&open));
        drop(open);
        self.fs.set_next_journal_check(next);
        memory::trim();
        shortened.map(drop)
    }

    /// Looks at the journal, rewrites it if it is long, and returns when the next look is due.
    fn shorten(&self, open: &OpenJournal, effort: Effort) -> Result<NextCheck> {
        let layer = open.end.layer;
        let parent = self.store.layer(layer).and_then(|info| info.header.parent);
        let is_open = |parent| self.store.layer(parent).is_none_or(|info| info.seal.is_none());
        if parent.is_some_and(is_open) {
            // The parent's seal failed, for example on a full disk.
            return Ok(later(open));
        }
        let below =
            parent.map_or_else(|| Ok(Tree::new()), |parent| self.trees.lock().load(parent))?;
        let (shortest, edits) = compact_len(below.edits_to(&open.tree))?;
        let most = shortest.saturating_mul(MAX_RATIO).saturating_add(SLACK);
        let is_long = match effort {
            Effort::WhereItPays => open.end.bytes() > most,
            Effort::Everything => open.end.bytes() > shortest.saturating_add(OVERHEAD),
        };
        if is_long {
            let rewritten = self.fs.rewrite_journal(open, &below);
            rewritten.attempt(|| format!("rewrite the journal of layer {layer}"))?;
            log::debug!("the journal of layer {layer}: {} bytes of {shortest}", open.end.bytes());
        }
        let bytes =
            if is_long { most } else { most.max(open.end.bytes().saturating_add(LOOK_INTERVAL)) };
        let lost = usize::try_from((edits / LOST_PART).max(MIN_LOST)).unwrap_or(usize::MAX);
        Ok(NextCheck { layer, bytes, entries: open.tree.entries().saturating_sub(lost) })
    }
}

fn later(open: &OpenJournal) -> NextCheck {
    let bytes = open.end.bytes().saturating_add(LOOK_INTERVAL);
    NextCheck { layer: open.end.layer, bytes, entries: 0 }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::base::Base;
    use crate::fs::{Caller, RenameMode, SetXattr};
    use crate::jail::{Jail, Policy};
    use crate::store::{Store, StoreOptions};
    use crate::sys::failpoint;
    use crate::timeline::Common;
    use crate::types::{Name, NodeId};

    const ME: Caller = Caller { uid: 0, gid: 0 };

    fn timeline(dir: &Path) -> Arc<Timeline> {
        let base = dir.join("base");
        std::fs::create_dir_all(&base).unwrap();
        let base = Base::open(&base).unwrap();
        let path = base.path().to_owned();
        let (root, options, at) = (base.root_id(), StoreOptions::default(), dir.join("store"));
        let store = match crate::store::exists(&at) {
            true => Store::open(&at, root, options).unwrap(),
            false => Store::create(&at, &path, root, options).unwrap(),
        };
        let (policy, allowed_targets) = (Policy::Deny, Vec::new());
        let jail = Jail { policy, mount_point: path.clone(), base_path: path, allowed_targets };
        Timeline::open(&Common::open(Arc::new(store), Arc::new(base)).unwrap(), "main", jail)
            .unwrap()
    }

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    fn make(timeline: &Timeline, file: &str) -> NodeId {
        timeline.fs.mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME).unwrap().id
    }

    fn rename(timeline: &Timeline, from: &str, to: &str) {
        let (from, to) = (name(from), name(to));
        timeline.fs.rename(NodeId::ROOT, &from, NodeId::ROOT, &to, RenameMode::Replace, 1).unwrap();
    }

    fn read(timeline: &Timeline, file: &str) -> Vec<u8> {
        let id = timeline.fs.lookup(NodeId::ROOT, &name(file)).unwrap().id;
        timeline.fs.read(id, 0, u64::MAX).unwrap().read(false).unwrap().unwrap()
    }

    fn journal_len(timeline: &Timeline) -> u64 {
        timeline.fs.open_journal().end.bytes()
    }

    /// Overwrites one file and renames another, repeatedly.
    fn work(timeline: &Timeline, file: NodeId, rounds: u8) {
        for round in 0..rounds {
            timeline.fs.write(file, u64::from(round % 3) * 5000, &[round; 700], false).unwrap();
            rename(timeline, "a", "b");
            rename(timeline, "b", "a");
        }
    }

    fn is_same(one: &Tree, other: &Tree) -> bool {
        one.diff(other).is_empty()
    }

    #[test]
    fn a_rewritten_journal_is_short_and_rebuilds_the_same_tree() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        let file = make(&first, "file");
        make(&first, "a");
        work(&first, file, 40);
        first.checkpoint(None, String::new(), None).unwrap();
        for round in 0..2 {
            work(&first, file, 60);
            let before = journal_len(&first);
            first.shorten_journal(Effort::Everything).unwrap();
            let after = journal_len(&first);
            assert!(after * 8 < before, "round {round}: {before} bytes, then {after}");
            first.fs.sync().unwrap();
        }
        work(&first, file, 3);
        let (tree, bytes) = (first.fs.state().tree, read(&first, "file"));
        drop(first);
        let again = timeline(dir.path());
        assert!(is_same(&tree, &again.fs.state().tree) && read(&again, "file") == bytes);
        assert_eq!(again.store.catalog().len(), 2, "it is the same layer");
    }

    #[test]
    fn a_rewrite_that_comes_after_a_seal_leaves_the_journal_of_the_new_upper_layer() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        let file = make(&first, "file");
        make(&first, "a");
        work(&first, file, 40);
        let open = first.fs.open_journal();
        first.checkpoint(None, String::new(), None).unwrap();
        let after = make(&first, "after");
        first.fs.sync().unwrap();
        let before = journal_len(&first);
        first.fs.rewrite_journal(&open, &Tree::new()).unwrap();
        assert_eq!(journal_len(&first), before);
        first.fs.write(after, 0, b"goes on", false).unwrap();
        first.fs.sync().unwrap();
        drop((first, open));
        assert_eq!(read(&timeline(dir.path()), "after"), b"goes on");
    }

    /// Recovery after an apply depends on this mark.
    #[test]
    fn a_layer_stays_marked_as_changed_when_its_changes_cancel_out() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        make(&first, "a");
        first.checkpoint(None, String::new(), None).unwrap();
        let made = make(&first, "b");
        first.fs.unlink(NodeId::ROOT, &name("b")).unwrap();
        first.fs.forget(made, 1);
        first.shorten_journal(Effort::Everything).unwrap();
        drop(first);
        let again = timeline(dir.path());
        let contents = again.store.read_layer(again.fs.upper_layer()).unwrap();
        assert!(contents.is_changed);
    }

    #[test]
    fn changes_during_a_rewrite_are_in_the_new_journal() {
        let dir = tempfile::tempdir().unwrap();
        let first = Arc::new(timeline(dir.path()));
        let file = make(&first, "file");
        make(&first, "a");
        work(&first, file, 200);
        let rounds = std::thread::scope(|scope| {
            let rewriting = scope.spawn(|| {
                (0..20).for_each(|_| first.shorten_journal(Effort::Everything).unwrap());
            });
            let mut rounds = 0;
            while !rewriting.is_finished() {
                work(&first, file, 5);
                first.fs.write(file, 20_000 + rounds * 8, &rounds.to_le_bytes(), false).unwrap();
                if rounds % 3 == 0 {
                    first.fs.sync().unwrap();
                }
                rounds += 1;
            }
            rewriting.join().unwrap();
            rounds
        });
        assert!(rounds > 0);
        let (tree, bytes) = (first.fs.state().tree, read(&first, "file"));
        drop(first);
        let again = timeline(dir.path());
        assert!(is_same(&tree, &again.fs.state().tree) && read(&again, "file") == bytes);
    }

    /// Each store call of a rewrite fails once. The sandbox goes on with the state that it had; if
    /// a failed sync means that data may be lost, it refuses all further changes.
    #[test]
    fn a_rewrite_that_fails_at_any_failpoint_loses_nothing() {
        for rule in ["fail:any:#:EIO", "fail:any:#:ENOSPC", "fail:any:#+:ENOSPC"] {
            let (mut failed, mut stopped) = (0, 0);
            for number in 1..=30 {
                let dir = tempfile::tempdir().unwrap();
                let first = timeline(dir.path());
                let file = make(&first, "file");
                make(&first, "a");
                work(&first, file, 10);
                first.fs.sync().unwrap();
                let synced = first.fs.state().tree;
                work(&first, file, 10);
                let tree = first.fs.state().tree;
                let when = rule.replace('#', &number.to_string());
                let shortened =
                    failpoint::with(&when, || first.shorten_journal(Effort::Everything));
                failed += u32::from(shortened.is_err());
                assert!(is_same(&tree, &first.fs.state().tree), "{when}");
                let is_stopped = first.fs.sync_has_failed();
                stopped += u32::from(is_stopped);
                let is_written = first.fs.write(file, 0, b"more", false).is_ok();
                let is_synced = first.fs.sync().is_ok();
                assert_eq!(
                    (is_written, is_synced),
                    (!is_stopped, !is_stopped),
                    "{when}: {shortened:?}"
                );
                assert!(!is_stopped || shortened.is_err(), "{when}");
                let now = first.fs.state().tree;
                let left = dir.path().join("store/layers/00000001/journal.new");
                assert!(!left.exists() || shortened.is_err(), "{when}");
                drop(first);
                let found = timeline(dir.path()).fs.state().tree;
                let possible = if is_stopped { [&synced, &tree] } else { [&now, &now] };
                assert!(possible.iter().any(|tree| is_same(&found, tree)), "{when}");
                assert!(!left.exists(), "{when}");
            }
            assert!(failed >= 8, "{rule}: it failed {failed} times");
            assert!(rule.ends_with("EIO") || stopped == 0, "{rule}: it stopped {stopped} times");
        }
    }

    /// The rename of the new journal may not be on disk.
    #[test]
    fn no_sync_succeeds_after_the_sync_of_an_exchanged_journal_failed() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        make(&first, "a");
        work(&first, make(&first, "file"), 10);
        let failed = failpoint::with("fail:store.sync-dir:1:EIO", || {
            first.shorten_journal(Effort::Everything)
        });
        assert!(failed.is_err() && first.fs.sync_has_failed());
        assert!(first.fs.sync().is_err());
    }

    /// If there is no space to sync the rename, no other sync succeeds before that one did.
    #[test]
    fn an_exchanged_journal_on_a_full_disk_is_synced_later() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        make(&first, "a");
        let file = make(&first, "file");
        work(&first, file, 10);
        let full = "fail:store.sync-dir:1+:ENOSPC";
        let shortened = failpoint::with(full, || first.shorten_journal(Effort::Everything));
        assert!(shortened.is_err_and(|error| error.is_full()) && !first.fs.sync_has_failed());
        assert!(failpoint::with(full, || first.fs.sync()).is_err());
        assert!(failpoint::with(full, || first.checkpoint(None, String::new(), None)).is_err());
        work(&first, file, 1);
        first.fs.sync().unwrap();
        assert!(failpoint::with(full, || first.fs.sync()).is_ok(), "it is synced once");
        let tree = first.fs.state().tree;
        drop(first);
        assert!(is_same(&tree, &timeline(dir.path()).fs.state().tree));
    }

    /// As the housekeeper does it: each notice that the journal is long leads to a look.
    #[test]
    fn a_long_journal_gives_notice_and_stays_within_its_bound() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        let file = make(&first, "file");
        let (tell, notice) = std::sync::mpsc::channel();
        first.fs.set_journal_notice(Some(Box::new(move || tell.send(()).unwrap())));
        let value = vec![7; 60_000];
        let how = SetXattr { create: false, replace: false, takes_setgid: false };
        let (mut longest, mut shortened) = (0, 0);
        for _ in 0..600 {
            first.fs.setxattr(file, b"user.x", &value, how).unwrap();
            let before = journal_len(&first);
            longest = longest.max(before);
            if notice.try_recv().is_ok() {
                assert!(notice.try_recv().is_err(), "one notice");
                first.shorten_journal(Effort::WhereItPays).unwrap();
                shortened += u32::from(journal_len(&first) < before);
            }
        }
        assert!(longest <= 4 * 60_000 + (16 << 20), "{longest} bytes");
        assert!(shortened >= 2, "{shortened} times");
    }

    /// A small sync copies the bytes that it covers into the journal.
    #[test]
    fn syncs_do_not_make_the_journal_long() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        let file = make(&first, "file");
        let (tell, notice) = std::sync::mpsc::channel();
        first.fs.set_journal_notice(Some(Box::new(move || tell.send(()).unwrap())));
        let (mut longest, mut shortened) = (0, 0);
        for round in 0..500_u64 {
            first.fs.write(file, 0, &vec![round as u8; 60_000], false).unwrap();
            first.fs.sync().unwrap();
            longest = longest.max(journal_len(&first));
            if notice.try_recv().is_ok() {
                first.shorten_journal(Effort::WhereItPays).unwrap();
                shortened += 1;
            }
        }
        assert!(longest > SMALL_JOURNAL && longest < 2 * SMALL_JOURNAL, "{longest} bytes");
        assert!(shortened >= 2, "{shortened} times");
        drop(first);
        assert_eq!(read(&timeline(dir.path()), "file"), vec![243; 60_000]);
    }

    /// The look comes although the journal has not grown.
    #[test]
    fn a_tree_that_lost_many_entries_gives_notice() {
        let dir = tempfile::tempdir().unwrap();
        let first = timeline(dir.path());
        let file = make(&first, "file");
        // Every second block, so that no two extents merge.
        for block in 0..120_000_u64 {
            first.fs.write(file, block * 8192, b"x", false).unwrap();
        }
        first.shorten_journal(Effort::WhereItPays).unwrap();
        let (tell, notice) = std::sync::mpsc::channel();
        first.fs.set_journal_notice(Some(Box::new(move || tell.send(()).unwrap())));
        let before = journal_len(&first);
        assert!(before > SMALL_JOURNAL && notice.try_recv().is_err(), "{before} bytes");
        first.fs.truncate(file, 0, false).unwrap();
        assert!(notice.try_recv().is_ok());
    }
}
