//! What edits replaced: the log of the versions of files, `STORE/history/HEAD`.
//!
//! ```text
//! history/main      log of EditsLogRecord: which content each path had before each edit, as references into pools and the base
//! history/main.bad  one that could not be read, set aside
//! ```
//!
//! It is a convenience, unlike everything else in a store: nothing here makes an operation fail. A log that cannot be read is set
//! aside with one warning, one that cannot be written is told once and written anew when that works again.
//!
//! Always true:
//! * a version is believed after a power cut only if a later [`EditsLogRecord::SyncedTo`] covers its record;
//! * before content goes to which a version referred, the log says durably that it does not any more, or is gone
//!   ([`EditsLog::begin_secure`]). So a version that is read refers to the bytes that it was made of.

use std::fs::File;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::disk;
use crate::store::io::frames::{self, Frames, LogBytes};
use crate::store::io::log::{self, Log};
use crate::store::io::writer::Writer;
use crate::store::layer::Trust;
use crate::tree::{Node, Source};
use crate::types::{ByteRange, Epoch, Ino, Timestamp, TreePath};

const DIR: &str = "history";
/// A log of fewer bytes is never written anew.
const SMALL_LOG: u64 = 1 << 20;

/// How the edit began that replaced a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// By a write.
    Written,
    /// By a truncation.
    Truncated,
    /// Another file was renamed over it.
    Replaced,
    /// Its name was removed.
    Removed,
    /// It was renamed to another name.
    Moved,
    /// By a restore, a discard or an op restore.
    Restored,
    /// By an undo or a redo.
    Undone,
}

/// The content that a path had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// The number of the file.
    pub ino: Ino,
    /// Its record.
    pub node: Node,
    /// The epoch of the base to which its extents refer.
    pub epoch: Epoch,
    /// Where its bytes are, in order; what is between them reads as zeros.
    pub extents: Vec<(ByteRange, Source)>,
}

/// What a path was before an edit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// When the edit began.
    pub time: Timestamp,
    /// How.
    pub how: How,
    /// The content; none if there was no file.
    pub content: Option<Arc<Content>>,
}

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Versions of each path; 0 keeps nothing.
    pub versions: u32,
    /// Bytes of content that only versions need, over all paths.
    pub bytes: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { versions: 10, bytes: 256 << 20 }
    }
}

/// A version with its number and whether its bytes were synced.
pub type Numbered = (u32, Version, bool);

/// A record of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EditsLogRecord {
    /// A process began to write.
    Opened {
        /// Under which boot, and in which mount.
        writer: Writer,
    },
    /// How much is kept from here on.
    Bounds(Bounds),
    /// Edits began: what these paths had until then.
    Kept(Vec<(TreePath, Version)>),
    /// A file was moved: its versions are those of its new path, too, if that has none.
    Copied {
        /// The old path.
        from: TreePath,
        /// The new one.
        to: TreePath,
    },
    /// A directory was moved: all below it has another path.
    Moved {
        /// The old path.
        from: TreePath,
        /// The new one.
        to: TreePath,
    },
    /// Two directories changed places.
    Exchanged {
        /// The path of one.
        a: TreePath,
        /// The path of the other.
        b: TreePath,
    },
    /// An undo or a redo went to a version of a path, or back to what was before the first undo.
    At {
        /// The path.
        path: TreePath,
        /// The number of the version; none when it is back.
        number: Option<u32>,
    },
    /// The same bytes are kept at another place from now on.
    Remapped {
        /// The path.
        path: TreePath,
        /// Which version.
        number: u32,
        /// Where its bytes are.
        extents: Vec<(ByteRange, Source)>,
    },
    /// The versions of a path up to this number were given up.
    Dropped {
        /// The path.
        path: TreePath,
        /// The newest of them.
        upto: u32,
    },
    /// The pool bytes of the first so many records are synced.
    SyncedTo(u64),
    /// All versions of a path, in a log that was written anew.
    List {
        /// The path.
        path: TreePath,
        /// The number of its next version.
        next: u32,
        /// To which version an undo went.
        at: Option<u32>,
        /// The versions, oldest first.
        versions: Vec<Numbered>,
    },
    /// Something could not be synced: what is not covered by a `SyncedTo` is not believed, as after a power cut.
    SyncFailed,
}

/// The records of a log, and what of them is to be believed.
#[derive(Default)]
pub struct Recorded {
    frames: Option<Frames<EditsLogRecord>>,
    /// The content of versions is whole whose records are among the first so many.
    pub believed: u64,
    /// Where the good frames end.
    end: u64,
    /// Whether the machine may have lost something of it.
    rebooted: bool,
}

impl Recorded {
    /// The records, in order. Each is decoded when it is looked at: all of a long log at once would
    /// take several times its bytes.
    pub fn records(&self) -> impl Iterator<Item = EditsLogRecord> + '_ {
        // Each was decoded when the log was read, and its bytes are in memory: none fails.
        self.frames.iter().flat_map(|frames| frames.records_from(0)).map_while(Result::ok)
    }

    /// Where a record begins in the file.
    pub fn start_of(&self, record: u64) -> u64 {
        let record = usize::try_from(record).unwrap_or(usize::MAX);
        self.frames.as_ref().map_or(0, |frames| frames.start_of(record))
    }

    fn count(&self) -> u64 {
        self.frames.as_ref().map_or(0, |frames| frames.count() as u64)
    }
}

/// The names of the heads that have a log, in the directory of a store.
pub(super) fn heads(dir: &StoreDir) -> Result<Vec<String>> {
    if dir.list(|name| (name == DIR).then_some(()))?.is_empty() {
        return Ok(Vec::new());
    }
    let is_log =
        |name: &str| !name.starts_with('.') && !name.ends_with(".new") && !name.ends_with(".bad");
    dir.dir(DIR)?.list(|name| is_log(name).then(|| name.to_owned()))
}

/// The path of the log of a head, for messages.
pub(super) fn show(dir: &StoreDir, head: &str) -> String {
    dir.show(&format!("{DIR}/{head}"))
}

/// Reads the log of a head, if there is one, as far as it is to be believed.
pub(super) fn read(dir: &StoreDir, head: &str, trust: &Trust) -> Result<Option<Recorded>> {
    if dir.list(|name| (name == DIR).then_some(()))?.is_empty() {
        return Ok(None);
    }
    let Some(bytes) = dir.dir(DIR)?.read(head)? else { return Ok(None) };
    let what = show(dir, head);
    let is_empty = bytes.is_empty();
    let (mut last, mut sync_failed, mut synced) = (None, !trust.failed.lock().is_empty(), 0);
    let see = |_, payload: &[u8], at| {
        match log::decode(payload, &what, at)? {
            EditsLogRecord::Opened { writer } => last = Some(writer),
            EditsLogRecord::SyncFailed => sync_failed = true,
            EditsLogRecord::SyncedTo(count) => synced = synced.max(count),
            _ => {}
        }
        Ok(())
    };
    let (frames, behind) =
        frames::scan_torn::<EditsLogRecord>(LogBytes::Memory(bytes), &what, see)?;
    let (end, count) = (frames.end(), frames.count() as u64);
    let rebooted = sync_failed || last.is_some_and(|last| last != trust.writer);
    if !rebooted && (!behind.is_empty() || (count == 0 && !is_empty)) {
        return Err(log::damage_at(&what, end));
    }
    let believed = if rebooted { synced } else { count };
    Ok(Some(Recorded { frames: Some(frames), believed, end, rebooted }))
}

/// How the log stands.
enum Standing {
    /// Nothing was appended yet: good frames end at an offset, after so many.
    Untouched(u64, u64),
    /// It is written to.
    Open(Log<EditsLogRecord>),
    /// It is to be written anew, because of what was read.
    Stale,
    /// It could not be written. What is on the disk is old.
    Failed,
}

/// The log of the versions of a head.
pub struct EditsLog {
    store: Arc<Store>,
    head: String,
    standing: Standing,
    /// A log that could not be written is told once.
    told: bool,
    /// Whether everything that was appended is synced.
    synced: bool,
    /// Bytes that it had when it was last written anew; 0 if nobody here did.
    whole: u64,
}

impl EditsLog {
    /// Finds the log of a head, and what is in it. One that cannot be read is set aside.
    pub fn open(store: &Arc<Store>, head: &str) -> (EditsLog, Recorded) {
        let mut log = EditsLog {
            store: Arc::clone(store),
            head: head.to_owned(),
            standing: Standing::Untouched(0, 0),
            told: false,
            synced: true,
            whole: 0,
        };
        match log.read() {
            Ok(recorded) => (log, recorded),
            Err(error) => {
                ::log::warn!(
                    "{error}; the history of single files begins anew, '{head}.bad' has what was there"
                );
                if let Err(error) = log.set_aside() {
                    ::log::warn!("{error}");
                    log.standing = Standing::Stale;
                }
                (log, Recorded::default())
            }
        }
    }

    fn dir(&self) -> Result<StoreDir> {
        self.store.dir.make_dir(DIR)
    }

    fn read(&mut self) -> Result<Recorded> {
        let Some(recorded) = read(&self.store.dir, &self.head, &self.store.trust)? else {
            return Ok(Recorded::default());
        };
        let (end, count) = (recorded.end, recorded.count());
        self.standing =
            if recorded.rebooted { Standing::Stale } else { Standing::Untouched(end, count) };
        self.synced = count == 0;
        Ok(recorded)
    }

    fn set_aside(&mut self) -> Result<()> {
        let dir = self.dir()?;
        let bad = format!("{}.bad", self.head);
        disk::rename(&dir, &self.head, &bad)
            .attempt(|| format!("set {} aside", dir.show(&self.head)))?;
        self.standing = Standing::Untouched(0, 0);
        Ok(())
    }

    /// Number of records; of one that is to be written anew, 0.
    pub fn count(&self) -> u64 {
        match &self.standing {
            Standing::Untouched(_, count) => *count,
            Standing::Open(log) => log.count(),
            Standing::Stale | Standing::Failed => 0,
        }
    }

    /// The number that the next record has at most; none of a log that is to be written anew is synced before it is.
    pub fn next_number(&self) -> u64 {
        match &self.standing {
            // The first one says who writes.
            Standing::Untouched(_, count) => count + 1,
            Standing::Open(log) => log.count(),
            Standing::Stale | Standing::Failed => u64::MAX,
        }
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        match &self.standing {
            Standing::Untouched(end, _) => *end,
            Standing::Open(log) => log.len(),
            Standing::Stale | Standing::Failed => 0,
        }
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it may be much shorter when it is written anew. What is known of each version can be large, so only the log itself
    /// tells how much of it is of use.
    pub fn is_long(&self) -> bool {
        self.len() > self.whole.saturating_mul(2).saturating_add(SMALL_LOG)
    }

    /// Says that the log has records of versions that are not there. It is written anew before the
    /// next record, and before any content is freed.
    pub fn mark_stale(&mut self) {
        self.standing = Standing::Stale;
    }

    /// Whether it could not be written, so that what is on the disk is old.
    pub fn has_failed(&self) -> bool {
        matches!(self.standing, Standing::Failed)
    }

    /// Appends a record, with one write. A log that must be written anew is, from `all`, which says the record, too. Whether the
    /// numbers of records began anew.
    pub fn append(
        &mut self,
        record: &EditsLogRecord,
        all: impl FnOnce() -> Vec<EditsLogRecord>,
    ) -> bool {
        let appended = match &mut self.standing {
            Standing::Failed => return false,
            Standing::Stale => self.try_rewrite(all()).map(|()| true),
            Standing::Open(log) => log.append(record).map(|()| false),
            Standing::Untouched(end, count) => {
                let (end, count) = (*end, *count);
                self.begin(end, count).and_then(|mut log| {
                    log.append(record)?;
                    self.standing = Standing::Open(log);
                    Ok(false)
                })
            }
        };
        self.synced = false;
        appended.unwrap_or_else(|error| {
            self.fail(&error);
            false
        })
    }

    fn begin(&self, end: u64, count: u64) -> Result<Log<EditsLogRecord>> {
        let dir = self.dir()?;
        let file = Arc::new(dir.file(&self.head, true)?);
        let mut log = Log::append_to(file, dir.show(&self.head), end, count)?;
        log.append(&EditsLogRecord::Opened { writer: self.store.trust.writer })?;
        Ok(log)
    }

    fn fail(&mut self, error: &crate::error::Error) {
        if !self.told {
            ::log::warn!(
                "{error}; the history of single files is kept in memory only until that works again"
            );
        }
        self.told = true;
        self.standing = Standing::Failed;
    }

    /// Writes the log anew. Whether that worked; the numbers of records then begin anew.
    pub fn rewrite(&mut self, all: Vec<EditsLogRecord>) -> bool {
        self.synced = false;
        match self.try_rewrite(all) {
            Ok(()) => {
                self.told = false;
                true
            }
            Err(error) => {
                self.fail(&error);
                false
            }
        }
    }

    fn try_rewrite(&mut self, all: Vec<EditsLogRecord>) -> Result<()> {
        let dir = self.dir()?;
        let temp = format!("{}.new", self.head);
        dir.remove(&temp)?;
        let file = Arc::new(dir.file(&temp, true)?);
        let mut log = Log::append_to(file, dir.show(&temp), 0, 0)?;
        log.append(&EditsLogRecord::Opened { writer: self.store.trust.writer })?;
        for record in all {
            log.append(&record)?;
        }
        disk::rename(&dir, &temp, &self.head)
            .attempt(|| format!("publish {}", dir.show(&self.head)))?;
        self.whole = log.len();
        self.standing = Standing::Open(log);
        Ok(())
    }

    /// Begins to make sure that the disk does not know more versions than are known here: what they referred to is about to go.
    /// `all` is what is known. Gives what is to be synced then, without any lock.
    ///
    /// # Errors
    /// When the log can neither be written nor removed: then nothing may go.
    pub fn begin_secure(
        &mut self,
        all: impl FnOnce() -> Vec<EditsLogRecord>,
    ) -> Result<Option<LogSync>> {
        if matches!(self.standing, Standing::Stale | Standing::Failed) && !self.rewrite(all()) {
            // Removing takes no room.
            let dir = self.dir()?;
            dir.remove(&format!("{}.new", self.head))?;
            dir.remove(&self.head)?;
            return Ok(self.store.durable.then_some(LogSync { file: None, dir }));
        }
        if self.synced || !self.store.durable {
            return Ok(None);
        }
        let dir = self.dir()?;
        let file = match &self.standing {
            Standing::Open(log) => log.file(),
            // What somebody wrote who was killed.
            Standing::Untouched(..) => Arc::new(dir.file(&self.head, false)?),
            Standing::Stale | Standing::Failed => return Ok(None),
        };
        self.synced = true;
        Ok(Some(LogSync { file: Some(file), dir }))
    }

    /// Makes what was found in the log survive a power cut, if it was written under this boot of the machine and perhaps never synced.
    ///
    /// # Errors
    /// As fdatasync(2): what the log says may be forgotten again.
    pub fn settle_what_was_found(&mut self) -> Result<()> {
        if self.synced || !self.store.durable || !matches!(self.standing, Standing::Untouched(..)) {
            return Ok(());
        }
        let dir = self.dir()?;
        let file = Some(Arc::new(dir.file(&self.head, false)?));
        LogSync { file, dir }.sync()?;
        self.synced = true;
        Ok(())
    }

    /// Says that what [`EditsLog::begin_secure`] gave could not be synced.
    pub fn not_secured(&mut self) {
        self.synced = false;
    }
}

/// What is to be synced before content goes.
pub struct LogSync {
    /// The log; none if it was removed.
    file: Option<Arc<File>>,
    dir: StoreDir,
}

impl LogSync {
    /// Makes what the log says survive a power cut.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync(&self) -> Result<()> {
        if let Some(file) = &self.file {
            disk::sync(file).attempt(|| "sync the history of single files")?;
        }
        self.dir.sync()
    }
}
