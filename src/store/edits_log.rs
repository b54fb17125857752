//! The edit history of single files on disk: the log `history/HEAD`.
//!
//! ```text
//! history/main      log of EditsLogRecord: the content of each path before each edit, as
//!                   references into pools and the base
//! history/main.bad  a log that could not be read
//! ```
//!
//! The edit history is a convenience, so nothing here makes an operation fail. A log that cannot be
//! read is renamed, with one warning. If the log cannot be written, jailfs warns once, and writes
//! it anew when that works again.
//!
//! Once the head is open, [`EditsLog`] does not touch the disk. It begins and ends writes
//! ([`EditsWrite`]), rewrites ([`LogRewrite`]) and syncs ([`LogSync`]), which need no lock.
//!
//! Always true:
//! * After a power cut, an edit is valid only if a later [`EditsLogRecord::SyncedTo`] covers its
//!   record. Its bytes are then in a pool, or come back to it from the journal of the layer before
//!   any edit is read ([`crate::store::layer::redo`]).
//! * Before content of an edit is freed, the log records, synced, that the edit no longer
//!   refers to it, or is dropped ([`EditsLog::due_sync`]). So an edit that is read refers to its
//!   own bytes.

mod record;
mod write;

use std::sync::{Arc, Weak};

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::frames::{self, Frames, LogBytes};
use crate::store::io::log::{self, FRAME_HEAD, Log};
use crate::store::layer::Trust;
use crate::tree::Source;
use crate::types::ByteRange;
pub use record::{Bounds, Content, EditsLogRecord, How, LoggedEdit};
pub use write::{DueSync, EditsWrite, LogRewrite, LogSync, NewLog, WrittenEdits};
use write::{Outcome, ToSync, Work};

const DIR: &str = "history";
/// How the name of a new log ends that takes the place of the old one at once.
const NEW: &str = ".new";
/// How the name of a new log ends that is written while records are appended to the old one. No
/// head has a name that ends with `.new`, so two heads never write to the same file.
const NEXT: &str = ".new.new";
/// How the names of the files of a head end: the log, new ones, and one that could not be read.
const ENDS: [&str; 4] = ["", NEW, NEXT, ".bad"];
/// After so many new logs in a row that were dropped, a write rewrites the log.
const MOST_REFUSED: u32 = 3;
/// A log of fewer bytes is never rewritten.
const SMALL_LOG: u64 = 128 << 10;

/// Takes the records of a log while it is read, so that no record is decoded twice, and the records
/// of a long log are not in memory together.
pub trait Replay: Default {
    /// Takes the next record, and its number.
    fn replay(&mut self, record: EditsLogRecord, number: u64);
}

/// A log that was read.
#[derive(Default)]
pub struct Recorded<R> {
    /// The result of the replay of all records.
    pub replayed: R,
    frames: Option<Frames<EditsLogRecord>>,
    /// The content of an edit is valid if its record is among this many first ones.
    pub valid: u64,
    /// The end of the good frames.
    end: u64,
    /// Whether a power cut or a failed sync may have lost some of it.
    cut_off: bool,
    rewritten: Rewritten,
}

/// The log at its last rewrite.
#[derive(Clone, Copy, Default)]
struct Rewritten {
    /// Bytes.
    len: u64,
    /// The number of edits.
    edits: u64,
    /// Whether records that came later follow.
    has_ended: bool,
}

impl Rewritten {
    /// Takes the next record of the log, which ends at this offset.
    fn take(&mut self, record: &EditsLogRecord, end: u64) {
        self.has_ended |= match record {
            EditsLogRecord::Opened { .. } => self.len > 0,
            EditsLogRecord::Bounds(_) | EditsLogRecord::Compared { .. } => false,
            EditsLogRecord::List { .. } => false,
            EditsLogRecord::Kept(_)
            | EditsLogRecord::Copied { .. }
            | EditsLogRecord::Moved { .. }
            | EditsLogRecord::Exchanged { .. }
            | EditsLogRecord::At { .. }
            | EditsLogRecord::Remapped { .. }
            | EditsLogRecord::Dropped { .. }
            | EditsLogRecord::SyncedTo(_)
            | EditsLogRecord::SyncFailed => true,
        };
        if self.has_ended {
            return;
        }
        self.len = end;
        self.edits += record.edits();
    }
}

impl<R: Replay> Recorded<R> {
    /// The offset of a record in the file.
    pub fn start_of(&self, record: u64) -> u64 {
        let record = usize::try_from(record).unwrap_or(usize::MAX);
        self.frames.as_ref().map_or(0, |frames| frames.start_of(record))
    }

    fn count(&self) -> u64 {
        self.frames.as_ref().map_or(0, |frames| frames.count() as u64)
    }
}

/// The path of the log of a head, for messages.
pub(super) fn show(dir: &StoreDir, head: &str) -> String {
    dir.show(&format!("{DIR}/{head}"))
}

/// Reads the log of a head, if there is one.
///
/// # Errors
/// As open(2) and read(2), and damage.
pub(super) fn read<R: Replay>(
    dir: &StoreDir,
    head: &str,
    trust: &Trust,
) -> Result<Option<Recorded<R>>> {
    if dir.list(|name| (name == DIR).then_some(()))?.is_empty() {
        return Ok(None);
    }
    let Some(bytes) = dir.dir(DIR)?.read(head)? else { return Ok(None) };
    let what = show(dir, head);
    let is_empty = bytes.is_empty();
    let (mut last, mut sync_failed, mut synced) = (None, !trust.failed.lock().is_empty(), 0);
    let (mut replayed, mut rewritten) = (R::default(), Rewritten::default());
    let see = |number, payload: &[u8], at| {
        let record: EditsLogRecord = log::decode(payload, &what, at)?;
        match &record {
            EditsLogRecord::Opened { writer } => last = Some(*writer),
            EditsLogRecord::SyncFailed => sync_failed = true,
            EditsLogRecord::SyncedTo(count) => synced = synced.max(*count),
            _ => {}
        }
        rewritten.take(&record, at + (FRAME_HEAD + payload.len()) as u64);
        replayed.replay(record, number as u64);
        Ok(())
    };
    let (frames, behind) =
        frames::scan_torn::<EditsLogRecord>(LogBytes::Memory(bytes), &what, see)?;
    let (end, count) = (frames.end(), frames.count() as u64);
    let cut_off = sync_failed || last.is_some_and(|last| last != trust.writer);
    if !cut_off && (!behind.is_empty() || (count == 0 && !is_empty)) {
        return Err(log::damage_at(&what, end));
    }
    let valid = if cut_off { synced } else { count };
    Ok(Some(Recorded { replayed, frames: Some(frames), valid, end, cut_off, rewritten }))
}

/// Where the bytes of all edits in the records of a log are.
#[derive(Default)]
struct AllContent(Vec<(ByteRange, Source)>);

impl Replay for AllContent {
    fn replay(&mut self, record: EditsLogRecord, _: u64) {
        let mut add = |edit: LoggedEdit| {
            let extents = edit.content.into_iter().map(|content| content.extents.clone());
            self.0.extend(extents.flatten());
        };
        match record {
            EditsLogRecord::Kept(kept) => kept.into_iter().for_each(|(_, edit)| add(edit)),
            EditsLogRecord::List { edits, .. } => {
                edits.into_iter().for_each(|(_, edit, _)| add(edit));
            }
            // The same bytes, stored elsewhere.
            EditsLogRecord::Remapped { extents, .. } => self.0.extend(extents),
            _ => {}
        }
    }
}

impl Store {
    /// The content that any record of the log of a head refers to: also that of edits which
    /// later records drop, because a power cut can take those records. Empty if the log cannot be
    /// read; opening the head then begins a new one.
    pub fn edited_content(&self, head: &str) -> Vec<(ByteRange, Source)> {
        let recorded: Result<Option<Recorded<AllContent>>> = read(&self.dir, head, &self.trust);
        match recorded {
            Ok(recorded) => recorded.unwrap_or_default().replayed.0,
            Err(error) => {
                ::log::warn!("{error}");
                Vec::new()
            }
        }
    }

    /// Removes the edit history of a head that is not open.
    ///
    /// # Errors
    /// As unlink(2) and fsync(2).
    pub fn remove_edits(&self, head: &str) -> Result<()> {
        let Some(dir) = self.history_dir()? else { return Ok(()) };
        ENDS.iter().try_for_each(|end| dir.remove(&format!("{head}{end}")))?;
        // Also if there was no file: an earlier removal may not be durable yet.
        if self.durable { dir.sync() } else { Ok(()) }
    }

    /// Removes the edit histories that belong to no head: the process that dropped their heads
    /// ended before it removed them. A history that cannot be removed stays, with a warning.
    pub fn remove_edits_of_dropped_heads(&self) {
        let heads = self.head_names();
        let is_of = |head: &String, file: &str| {
            file.strip_prefix(head.as_str()).is_some_and(|end| ENDS.contains(&end))
        };
        let is_left =
            |file: &str| !file.starts_with('.') && !heads.iter().any(|head| is_of(head, file));
        let removed = self.history_dir().and_then(|dir| {
            let Some(dir) = dir else { return Ok(()) };
            let left = dir.list(|file| is_left(file).then(|| file.to_owned()))?;
            left.iter().try_for_each(|file| dir.remove(file))
        });
        if let Err(error) = removed {
            ::log::warn!("{error}");
        }
    }

    /// The directory of the logs, if there is one.
    fn history_dir(&self) -> Result<Option<StoreDir>> {
        let found = !self.dir.list(|name| (name == DIR).then_some(()))?.is_empty();
        if found { self.dir.dir(DIR).map(Some) } else { Ok(None) }
    }
}

/// The state of the log.
enum Standing {
    /// Nothing was appended yet. The good frames end at this offset, and there are this many.
    Untouched(u64, u64),
    /// The log is being appended to.
    Open(Log<EditsLogRecord>),
    /// The log on disk says something wrong, and must be rewritten.
    Stale,
    /// The log could not be written, or a write is under way. The file on disk may be old.
    Failed,
}

/// Returns the current records, without a lock.
pub type CurrentRecords = Box<dyn FnOnce() -> Vec<EditsLogRecord>>;

/// The edit history of a head on disk.
pub struct EditsLog {
    store: Arc<Store>,
    head: String,
    standing: Standing,
    /// The records at the end of the log that are not in the file yet.
    waiting: Vec<EditsLogRecord>,
    /// Whether the next write rewrites the log.
    is_due: bool,
    /// Whether there was a warning that the log cannot be written.
    warned: bool,
    /// Whether all records are synced.
    synced: bool,
    rewritten: Rewritten,
    /// How many times the log was rewritten.
    rewrites: u64,
    /// The rewrite that is under way while records are appended.
    under_way: Weak<()>,
    /// How many such rewrites in a row gave a log that was dropped.
    refused: u32,
}

impl EditsLog {
    /// Reads the log of a head. A log that cannot be read is renamed to `HEAD.bad`.
    pub fn open<R: Replay>(store: &Arc<Store>, head: &str) -> (EditsLog, Recorded<R>) {
        let mut log = EditsLog {
            store: Arc::clone(store),
            head: head.to_owned(),
            standing: Standing::Untouched(0, 0),
            waiting: Vec::new(),
            is_due: false,
            warned: false,
            synced: true,
            rewritten: Rewritten::default(),
            rewrites: 0,
            under_way: Weak::new(),
            refused: 0,
        };
        match log.read() {
            Ok(recorded) => (log, recorded),
            Err(error) => {
                ::log::warn!(
                    "{error}; a new edit history begins, and '{head}.bad' has the old one"
                );
                if let Err(error) = log.move_away() {
                    ::log::warn!("{error}");
                    log.standing = Standing::Stale;
                }
                (log, Recorded::default())
            }
        }
    }

    fn read<R: Replay>(&mut self) -> Result<Recorded<R>> {
        let Some(recorded) = read(&self.store.dir, &self.head, &self.store.trust)? else {
            return Ok(Recorded::default());
        };
        let (end, count) = (recorded.end, recorded.count());
        self.standing =
            if recorded.cut_off { Standing::Stale } else { Standing::Untouched(end, count) };
        self.synced = count == 0;
        self.rewritten = recorded.rewritten;
        Ok(recorded)
    }

    fn move_away(&mut self) -> Result<()> {
        let dir = self.store.dir.make_dir(DIR)?;
        let bad = format!("{}.bad", self.head);
        disk::rename(&dir, &self.head, &bad)
            .attempt(|| format!("rename {} to '{bad}'", dir.show(&self.head)))?;
        self.standing = Standing::Untouched(0, 0);
        Ok(())
    }

    /// Number of records; 0 if the log must be rewritten.
    pub fn count(&self) -> u64 {
        match &self.standing {
            Standing::Untouched(_, count) if self.waiting.is_empty() => *count,
            Standing::Untouched(..) | Standing::Open(_) => self.next_number(),
            Standing::Stale | Standing::Failed => 0,
        }
    }

    /// The highest number that the next record can have; `u64::MAX` if the log must be rewritten.
    pub fn next_number(&self) -> u64 {
        let waiting = self.waiting.len() as u64;
        match &self.standing {
            // `Opened` comes first.
            Standing::Untouched(_, count) => count + 1 + waiting,
            Standing::Open(log) => log.count() + waiting,
            Standing::Stale | Standing::Failed => u64::MAX,
        }
    }

    /// Bytes of the log.
    fn len(&self) -> u64 {
        match &self.standing {
            Standing::Untouched(end, _) => *end,
            Standing::Open(log) => log.len(),
            Standing::Stale | Standing::Failed => 0,
        }
    }

    /// Begins to rewrite the log while records are appended to it. `None` if another such rewrite
    /// is under way.
    pub fn begin_rewrite(&mut self) -> Option<LogRewrite> {
        if self.under_way.upgrade().is_some() {
            return None;
        }
        let under_way = Arc::new(());
        self.under_way = Arc::downgrade(&under_way);
        Some(LogRewrite { under_way, ..self.rewrite_as(NEXT) })
    }

    /// A rewrite by a file whose name ends so.
    fn rewrite_as(&self, end: &str) -> LogRewrite {
        LogRewrite {
            store: Arc::clone(&self.store),
            head: self.head.clone(),
            name: format!("{}{end}", self.head),
            is_beside: end == NEXT,
            len: self.len(),
            rewritten: self.rewritten,
            state: (self.rewrites, self.count()),
            under_way: Arc::default(),
        }
    }

    /// Begins to put a new log in the place of the present one. If a record was appended, or the
    /// log was rewritten, since [`EditsLog::begin_rewrite`], the write drops the new log.
    pub fn begin_publish(&mut self, new: NewLog) -> EditsWrite {
        // Until it is in place.
        self.refused += 1;
        let is_current = new.state == (self.rewrites, self.count());
        self.begin(if is_current { Work::Publish(new) } else { Work::Discard(new) })
    }

    /// Whether the log must be rewritten while no record is appended: it could not be written, or
    /// the last new logs were dropped.
    pub fn must_rewrite(&self) -> bool {
        self.has_failed() || self.refused >= MOST_REFUSED
    }

    /// Notes that the log has edits that do not exist. It is rewritten before the next record,
    /// and before any content is freed.
    pub fn mark_stale(&mut self) {
        self.standing = Standing::Stale;
    }

    /// Makes the next write rewrite the log.
    pub fn request_rewrite(&mut self) {
        self.is_due = true;
    }

    /// Makes the next write rewrite the log if the file on disk is old.
    pub fn request_rewrite_if_old(&mut self) {
        self.is_due |= matches!(self.standing, Standing::Stale | Standing::Failed);
    }

    /// Whether the log could not be written, so that the file on disk is old.
    pub fn has_failed(&self) -> bool {
        matches!(self.standing, Standing::Failed)
    }

    /// Appends a record. The next write writes it to the file. A log that could not be written
    /// takes no record, because only a rewrite can follow, which has all records.
    pub fn append(&mut self, record: EditsLogRecord) {
        match &self.standing {
            Standing::Failed => return,
            Standing::Stale => self.is_due = true,
            Standing::Open(_) | Standing::Untouched(..) => self.waiting.push(record),
        }
        self.synced = false;
    }

    /// Begins to write the records that are not in the file, or, if the log must be rewritten, the
    /// current records, which `all` returns. `None` if nothing is to be written. The caller calls
    /// no other method before [`EditsLog::end_write`].
    pub fn begin_write(&mut self, all: impl FnOnce() -> CurrentRecords) -> Option<EditsWrite> {
        let waiting = std::mem::take(&mut self.waiting);
        if std::mem::take(&mut self.is_due) {
            self.synced = false;
            let rewrite = self.rewrite_as(NEW);
            return Some(self.begin(Work::Rewrite(rewrite, all())));
        }
        (!waiting.is_empty()).then(|| self.begin(Work::Append(waiting)))
    }

    fn begin(&mut self, work: Work) -> EditsWrite {
        let standing = std::mem::replace(&mut self.standing, Standing::Failed);
        EditsWrite { store: Arc::clone(&self.store), head: self.head.clone(), standing, work }
    }

    /// Ends a write, with the result of [`EditsWrite::write`]. Returns whether the log was
    /// replaced; its records then have new numbers.
    pub fn end_write(&mut self, written: WrittenEdits) -> bool {
        match written.0 {
            Ok(Outcome::Replaced(new)) => {
                self.rewritten = new.rewritten;
                self.rewrites += 1;
                self.refused = 0;
                self.synced = false;
                self.warned = false;
                self.waiting.clear();
                self.standing = Standing::Open(new.log);
                true
            }
            Ok(Outcome::Kept(standing)) => {
                self.standing = standing;
                false
            }
            Err(error) => {
                self.fail(&error);
                false
            }
        }
    }

    fn fail(&mut self, error: &crate::error::Error) {
        if !self.warned {
            ::log::warn!(
                "{error}; until that works again, the edit history is kept in memory only"
            );
        }
        self.warned = true;
        self.standing = Standing::Failed;
    }

    /// The sync that is due before content of dropped edits is freed, so that no power cut brings
    /// these edits back. `None` if the log is synced. The caller has called
    /// [`EditsLog::request_rewrite_if_old`] and done the write. If that failed, the log is removed
    /// instead.
    pub fn due_sync(&self) -> Option<DueSync> {
        let log = match &self.standing {
            Standing::Stale | Standing::Failed => ToSync::Old,
            _ if self.synced || !self.store.durable => return None,
            Standing::Open(log) => ToSync::Open(log.file()),
            Standing::Untouched(..) => ToSync::Untouched,
        };
        let (store, head) = (Arc::clone(&self.store), self.head.clone());
        Some(DueSync { store, head, log, state: (self.rewrites, self.count()) })
    }

    /// Syncs the log that an earlier process wrote under this boot, and may never have synced.
    ///
    /// # Errors
    /// As fdatasync(2): a power cut may then take some of the log.
    pub fn sync_found(&mut self) -> Result<()> {
        let is_untouched = matches!(self.standing, Standing::Untouched(..));
        let due = self.due_sync().filter(|_| is_untouched);
        if let Some(work) = due.map_or(Ok(None), DueSync::open)? {
            work.sync()?;
            self.secured(&work);
        }
        Ok(())
    }

    /// Notes that a sync succeeded. Before that the log must not count as synced, because another
    /// thread may be about to free content.
    pub fn secured(&mut self, work: &LogSync) {
        self.synced |= work.file.is_some() && work.state == (self.rewrites, self.count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;
    use crate::types::TreePath;

    /// The records of a log.
    #[derive(Default)]
    struct All(Vec<EditsLogRecord>);

    impl Replay for All {
        fn replay(&mut self, record: EditsLogRecord, _: u64) {
            if !matches!(record, EditsLogRecord::Opened { .. }) {
                self.0.push(record);
            }
        }
    }

    fn dropped(upto: u32) -> EditsLogRecord {
        EditsLogRecord::Dropped { path: TreePath::parse(b"a").unwrap(), upto }
    }

    /// Writes what is due. `all` are the current records. Returns whether the log was replaced.
    fn write(log: &mut EditsLog, all: Vec<EditsLogRecord>) -> bool {
        let write = log.begin_write(|| Box::new(move || all));
        write.is_some_and(|write| log.end_write(write.write()))
    }

    fn append(log: &mut EditsLog, upto: u32) {
        log.append(dropped(upto));
        assert!(!write(log, Vec::new()));
    }

    fn rewrite(log: &mut EditsLog, all: Vec<EditsLogRecord>) {
        log.request_rewrite();
        assert!(write(log, all));
    }

    fn publish(log: &mut EditsLog, new: NewLog) -> bool {
        let write = log.begin_publish(new);
        log.end_write(write.write())
    }

    /// A log with the records 1 and 2.
    fn log() -> (tempfile::TempDir, Arc<Store>, EditsLog) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(&dir.path().join("s"), b"/base", (1, 2), StoreOptions::default());
        let store = Arc::new(store.unwrap());
        let (mut log, _) = EditsLog::open::<All>(&store, "main");
        append(&mut log, 1);
        append(&mut log, 2);
        (dir, store, log)
    }

    fn recorded(store: &Arc<Store>) -> Vec<EditsLogRecord> {
        EditsLog::open::<All>(store, "main").1.replayed.0
    }

    fn is_left(store: &Store) -> bool {
        !store
            .dir
            .dir(DIR)
            .unwrap()
            .list(|name| name.ends_with(".new").then_some(()))
            .unwrap()
            .is_empty()
    }

    #[test]
    fn a_new_log_takes_the_place_of_the_old_one_if_no_record_was_appended_since() {
        let (_dir, store, mut log) = log();
        let rewrite = log.begin_rewrite().unwrap();
        assert!(log.begin_rewrite().is_none(), "one at a time");
        let new = rewrite.write(vec![dropped(2)]).unwrap();
        assert_eq!(recorded(&store), [dropped(1), dropped(2)], "the old one is still there");
        assert!(publish(&mut log, new));
        assert_eq!(log.count(), 2, "Opened is the first");
        append(&mut log, 3);
        assert_eq!(recorded(&store), [dropped(2), dropped(3)]);
        assert!(!is_left(&store));
        assert!(log.begin_rewrite().is_some());
    }

    #[test]
    fn a_new_log_is_dropped_if_a_record_was_appended_since_or_another_was_written_at_once() {
        let (_dir, store, mut log) = log();
        let new = log.begin_rewrite().unwrap().write(vec![dropped(2)]).unwrap();
        append(&mut log, 3);
        assert!(!publish(&mut log, new));
        assert_eq!(recorded(&store), [dropped(1), dropped(2), dropped(3)]);
        let new = log.begin_rewrite().unwrap().write(vec![dropped(3)]).unwrap();
        // It has as many records as the log before.
        rewrite(&mut log, vec![dropped(4), dropped(5), dropped(6)]);
        assert!(!publish(&mut log, new));
        append(&mut log, 7);
        assert_eq!(recorded(&store), [4, 5, 6, 7].map(dropped));
        assert!(!is_left(&store));
        rewrite(&mut log, [4, 5, 6, 7].map(dropped).into());
        for upto in 8..8 + MOST_REFUSED {
            assert!(!log.must_rewrite());
            let new = log.begin_rewrite().unwrap().write(Vec::new()).unwrap();
            append(&mut log, upto);
            assert!(!publish(&mut log, new));
        }
        assert!(log.must_rewrite(), "a program appends all the time");
        rewrite(&mut log, vec![dropped(9)]);
        assert!(!log.must_rewrite());
    }
}
