//! A list of changes of any length, in bounded memory.
//!
//! Always true:
//! * A list that is longer than `IN_MEMORY` is kept in an unnamed temporary file, or in memory if that
//!   cannot be written.
//! * A path is stored without the bytes that it shares with the path before it. A tree of deeply
//!   nested directories has a list that is about as long as its names.
//! * The list does not change after it was finished. It holds no lock and no state of the tree, so a
//!   slow reader delays no other request.
//!
//! A record is a length (u32, little-endian) and as many bytes: a `Record` in the encoding of the
//! store. The control socket carries the same bytes.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tempfile::SpooledTempFile;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::io::codec;
use crate::types::{FileKind, Ino, TreePath};

/// How a path differs between two states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChangeKind {
    /// Only the newer state has it.
    Added,
    /// Only the older state has it.
    Deleted,
    /// The content differs, and perhaps attributes.
    Modified,
    /// Only attributes (mode, owner, times, xattrs, links) differ.
    Attributes,
    /// It is another kind of file now.
    TypeChanged,
    /// The same file stands at another path.
    Renamed,
}

/// One changed path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The path in the newer state; in the older one if it was deleted.
    pub path: TreePath,
    /// How it differs.
    pub kind: ChangeKind,
    /// Where it was before a rename.
    pub old_path: Option<TreePath>,
    /// What kind of file it is (was, if deleted).
    pub file: FileKind,
    /// The text of a link in the newer state.
    pub target: Option<Vec<u8>>,
    /// What it would do outside the sandbox once it is applied, for people; none if nothing special.
    pub danger: Option<String>,
    /// Its inode number.
    pub ino: Ino,
    /// Size before, in bytes, for regular files.
    pub old_size: Option<u64>,
    /// Size after, in bytes, for regular files.
    pub new_size: Option<u64>,
    /// Lines added and removed; none if not asked for or binary.
    pub lines: Option<(u64, u64)>,
    /// The content is not text.
    pub binary: bool,
    /// The patch of this path, if asked for.
    pub patch: Option<Vec<u8>>,
}

/// Bytes of a list that are kept in memory.
const IN_MEMORY: usize = 1 << 20;
/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;

/// Changes, sorted by path.
#[derive(Clone, Default)]
pub struct Changes(Arc<List>);

#[derive(Default)]
struct List {
    count: u64,
    len: u64,
    /// Reading moves its position, so each reader seeks first.
    file: Mutex<Option<SpooledTempFile>>,
}

/// A change as it is stored.
#[derive(Serialize, Deserialize)]
struct Record {
    /// Bytes at the start of the path that are those of the path before.
    shared: u32,
    rest: Vec<u8>,
    /// The change; its path is empty.
    change: Change,
}

/// Bytes that are written once, to memory and then to an unnamed file.
struct Spool {
    file: SpooledTempFile,
    len: u64,
}

impl Spool {
    fn new(dir: &Path) -> Spool {
        Spool { file: tempfile::spooled_tempfile_in(IN_MEMORY, dir), len: 0 }
    }

    /// Adds bytes. Where the file cannot be written, as on a full disk, all of it is kept in memory: a
    /// restore that was done still lists what it did.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = self.file.write_all(bytes) {
            log::warn!("a list of changes is kept in memory, not in a temporary file: {error}");
            let mut whole = Vec::new();
            self.file.seek(SeekFrom::Start(0))?;
            (&mut self.file).take(self.len).read_to_end(&mut whole)?;
            self.file = tempfile::spooled_tempfile(usize::MAX);
            self.file.write_all(&whole)?;
            self.file.write_all(bytes)?;
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn finish(self, count: u64) -> Changes {
        Changes(Arc::new(List { count, len: self.len, file: Mutex::new(Some(self.file)) }))
    }
}

/// Writes a list.
pub struct Writer {
    spool: Spool,
    count: u64,
    last: TreePath,
}

impl Writer {
    /// Begins a list. If it becomes long it goes to an unnamed file in `dir`.
    pub fn new(dir: &Path) -> Writer {
        Writer { spool: Spool::new(dir), count: 0, last: TreePath::root() }
    }

    /// Adds a change.
    ///
    /// # Errors
    /// The temporary file cannot be written, or the patch of this one path is too long.
    pub fn push(&mut self, mut change: Change) -> Result<()> {
        let path = std::mem::take(&mut change.path);
        let shared = shared_bytes(path.as_bytes(), self.last.as_bytes());
        let record = Record {
            shared: u32::try_from(shared).unwrap_or(0),
            rest: path.as_bytes().get(shared..).unwrap_or_default().to_vec(),
            change,
        };
        let too_long = |why: String| Error::new(Kind::Failed, format!("list '{path}'"), why);
        let bytes = codec::encode(&record).map_err(too_long)?;
        let len = u32::try_from(bytes.len()).map_err(|error| too_long(error.to_string()))?;
        let record = [&len.to_le_bytes(), bytes.as_slice()].concat();
        self.spool.append(&record).attempt(|| "list what changed")?;
        self.count += 1;
        self.last = path;
        Ok(())
    }

    /// Ends the list.
    pub fn finish(self) -> Changes {
        self.spool.finish(self.count)
    }
}

impl Changes {
    /// How many there are.
    pub fn len(&self) -> usize {
        usize::try_from(self.0.count).unwrap_or(usize::MAX)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.count == 0
    }

    /// The changes, one after the other.
    pub fn iter(&self) -> Iter<'_> {
        Iter { list: &self.0, at: 0, count: 0, buffer: Vec::new(), used: 0, last: TreePath::root() }
    }

    /// All of them, in memory.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn to_vec(&self) -> Result<Vec<Change>> {
        self.iter().collect()
    }

    /// Calls `take` with the bytes of the list, piece by piece.
    ///
    /// # Errors
    /// The list cannot be read, or an error of `take`.
    pub(crate) fn for_each_chunk(
        &self,
        mut take: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut at = 0;
        while at < self.0.len {
            let chunk = self.0.read(at, CHUNK)?;
            take(&chunk)?;
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Reads the bytes of a list from `next`, which gives an empty piece at the end.
    ///
    /// # Errors
    /// The temporary file cannot be written, or an error of `next`.
    pub(crate) fn receive(
        &mut self,
        dir: &Path,
        mut next: impl FnMut() -> Result<Vec<u8>>,
    ) -> Result<()> {
        let mut spool = Spool::new(dir);
        loop {
            let piece = next()?;
            if piece.is_empty() {
                break;
            }
            spool.append(&piece).attempt(|| "keep a list of changes")?;
        }
        *self = spool.finish(self.0.count);
        Ok(())
    }
}

impl List {
    /// Reads up to `most` bytes at `at`, and at least one.
    fn read(&self, at: u64, most: usize) -> io::Result<Vec<u8>> {
        let left = usize::try_from(self.len.saturating_sub(at)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; most.min(left)];
        let mut file = self.file.lock();
        let file = file.as_mut().ok_or(io::ErrorKind::UnexpectedEof)?;
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// How many bytes at the start of `a` and `b` are equal.
fn shared_bytes(a: &[u8], b: &[u8]) -> usize {
    const BLOCK: usize = 256;
    let blocks = a.chunks(BLOCK).zip(b.chunks(BLOCK)).take_while(|(a, b)| a == b);
    let whole = blocks.map(|(block, _)| block.len()).sum::<usize>();
    let rest = a.iter().zip(b).skip(whole);
    whole + rest.take_while(|(a, b)| a == b).count()
}

/// Reads a list.
pub struct Iter<'a> {
    list: &'a List,
    /// Where the bytes behind the buffer are.
    at: u64,
    count: u64,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were read.
    used: usize,
    last: TreePath,
}

impl Iter<'_> {
    fn bytes(&mut self, len: usize) -> Result<&[u8]> {
        let missing = len.saturating_sub(self.buffer.len() - self.used);
        if missing > 0 {
            let more =
                self.list.read(self.at, missing.max(CHUNK)).attempt(|| "read a list of changes")?;
            self.at += more.len() as u64;
            self.buffer.drain(..self.used);
            self.used = 0;
            self.buffer.extend(more);
        }
        let from = self.used;
        self.used += len;
        self.buffer.get(from..self.used).ok_or_else(|| malformed("it ends within a change"))
    }

    fn read(&mut self) -> Result<Change> {
        let len = self.bytes(4)?.try_into().map_err(|_| malformed("it ends within a change"))?;
        let len = usize::try_from(u32::from_le_bytes(len))
            .map_err(|error| malformed(&error.to_string()))?;
        let record: Record = codec::decode(self.bytes(len)?).map_err(|error| malformed(&error))?;
        let shared =
            usize::try_from(record.shared).ok().and_then(|len| self.last.as_bytes().get(..len));
        let shared = shared.ok_or_else(|| malformed("a path continues none"))?;
        let path = TreePath::parse(&[shared, &record.rest].concat())
            .map_err(|_| malformed("a bad path"))?;
        self.last = path.clone();
        Ok(Change { path, ..record.change })
    }
}

fn malformed(why: &str) -> Error {
    Error::new(Kind::Failed, "read a list of changes", why)
}

impl Iterator for Iter<'_> {
    type Item = Result<Change>;

    fn next(&mut self) -> Option<Result<Change>> {
        if self.count >= self.list.count {
            return None;
        }
        let change = self.read();
        self.count = if change.is_ok() { self.count + 1 } else { self.list.count };
        Some(change)
    }
}

impl<'a> IntoIterator for &'a Changes {
    type Item = Result<Change>;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl PartialEq for Changes {
    fn eq(&self, other: &Changes) -> bool {
        self.0.count == other.0.count && self.iter().eq(other.iter())
    }
}

impl Eq for Changes {}

/// Only the number: the bytes travel beside the reply.
impl Serialize for Changes {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.0.count.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Changes {
    fn deserialize<D: Deserializer<'de>>(
        deserializer: D,
    ) -> std::result::Result<Changes, D::Error> {
        let count = u64::deserialize(deserializer)?;
        Ok(Changes(Arc::new(List { count, ..List::default() })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(path: &str, patch: Option<Vec<u8>>) -> Change {
        Change {
            path: TreePath::parse(path.as_bytes()).unwrap(),
            kind: ChangeKind::Added,
            old_path: Some(TreePath::parse(b"old/place").unwrap()),
            file: FileKind::File,
            target: None,
            danger: None,
            ino: Ino(9),
            old_size: None,
            new_size: Some(1),
            binary: true,
            lines: None,
            patch,
        }
    }

    fn list(changes: &[Change]) -> Changes {
        let mut writer = Writer::new(&std::env::temp_dir());
        changes.iter().for_each(|change| writer.push(change.clone()).unwrap());
        writer.finish()
    }

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let all = ["", "a", "a/b", "a/bc", "b", "a", "b/long/er"].map(|path| change(path, None));
        let all =
            [all.to_vec(), vec![change("x", Some(vec![7; 3 << 20])), change("xy", None)]].concat();
        let changes = list(&all);
        assert_eq!((changes.len(), changes.to_vec().unwrap()), (all.len(), all));
        assert!(list(&[]).is_empty() && Changes::default().to_vec().unwrap().is_empty());
    }

    #[test]
    fn a_list_without_room_for_a_file_is_kept_in_memory() {
        let mut writer = Writer::new(Path::new("/nonexistent"));
        let all: Vec<Change> =
            (0..40).map(|n| change(&format!("f{n:02}"), Some(vec![n; 100_000]))).collect();
        all.iter().for_each(|change| writer.push(change.clone()).unwrap());
        assert_eq!(writer.finish().to_vec().unwrap(), all);
    }

    #[test]
    fn a_list_of_nested_directories_is_as_long_as_their_names() {
        let mut path = TreePath::root();
        let name = crate::types::Name::new(&[b'n'; 250]).unwrap();
        let mut writer = Writer::new(&std::env::temp_dir());
        for _ in 0..2000 {
            path = path.join(&name);
            writer.push(Change { path: path.clone(), ..change("", None) }).unwrap();
        }
        let changes = writer.finish();
        assert!(changes.0.len < 2000 * 400, "{} bytes", changes.0.len);
        assert_eq!(changes.iter().last().unwrap().unwrap().path, path);
    }

    #[test]
    fn a_list_arrives_in_pieces() {
        let sent = list(&[change("a", Some(vec![1; 200_000])), change("a/b", None)]);
        let mut pieces = Vec::new();
        sent.for_each_chunk(|piece| {
            pieces.push(piece.to_vec());
            Ok(())
        })
        .unwrap();
        assert!(pieces.len() > 2);
        let mut got: Changes = codec::decode(&codec::encode(&sent).unwrap()).unwrap();
        let mut pieces = pieces.into_iter();
        got.receive(&std::env::temp_dir(), || Ok(pieces.next().unwrap_or_default())).unwrap();
        assert_eq!(got, sent);
    }

    #[test]
    fn a_list_that_was_cut_or_changed_is_an_error() {
        let sent = list(&[change("a", None), change("a/b", None)]);
        let bytes = sent.0.read(0, CHUNK).unwrap();
        let received = |bytes: Vec<u8>| {
            let mut got: Changes = codec::decode(&codec::encode(&sent).unwrap()).unwrap();
            let mut pieces = [bytes].into_iter();
            got.receive(&std::env::temp_dir(), || Ok(pieces.next().unwrap_or_default())).unwrap();
            got
        };
        assert_eq!(received(bytes.clone()), sent);
        for len in 0..bytes.len() {
            assert!(received(bytes[..len].to_vec()).to_vec().is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x80;
            // It is an error or another list; it never panics, and never has more changes than said.
            assert!(received(bad).iter().count() <= 2);
        }
    }
}
