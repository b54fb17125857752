//! A list of changes of any length, in bounded memory.
//!
//! * A list that is longer than `MEMORY_LIMIT` is kept in an unnamed temporary file, or in memory
//!   if the file cannot be written.
//! * A path is stored without the bytes that it shares with the path before it. So the list of a
//!   tree of deeply nested directories is about as long as its names.
//! * A finished list does not change. It holds no lock and no state of the tree, so a slow reader
//!   delays no other request.
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
    /// Only attributes (mode, owner, times, extended attributes, links) differ.
    Attributes,
    /// The file type differs.
    TypeChanged,
    /// The same file is at another path.
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
    /// The file type; the old one for a deleted path.
    pub file: FileKind,
    /// The target of a symbolic link in the newer state.
    pub target: Option<Vec<u8>>,
    /// Why an apply of it is dangerous, for people; `None` if it is not.
    pub danger: Option<String>,
    /// Its inode number.
    pub ino: Ino,
    /// Size before, in bytes, for regular files.
    pub old_size: Option<u64>,
    /// Size after, in bytes, for regular files.
    pub new_size: Option<u64>,
    /// Numbers of added and removed lines; `None` if not requested, or binary.
    pub lines: Option<(u64, u64)>,
    /// Whether the content is not text.
    pub binary: bool,
    /// The patch of this path, if requested.
    pub patch: Option<Vec<u8>>,
}

/// The most bytes of a list that are kept in memory.
const MEMORY_LIMIT: usize = 1 << 20;
/// The size of one read, in bytes.
const CHUNK: usize = 64 << 10;

/// A finished list of changes, sorted by path. Clones share it.
#[derive(Clone, Default)]
pub struct Changes(Arc<List>);

#[derive(Default)]
struct List {
    count: u64,
    len: u64,
    /// All readers share its position, so each read seeks first.
    file: Mutex<Option<SpooledTempFile>>,
}

/// A change as it is stored.
#[derive(Serialize, Deserialize)]
struct Record {
    /// How many bytes at the start of the path are equal to those of the path before.
    shared: u32,
    rest: Vec<u8>,
    /// The change; its path is empty.
    change: Change,
}

/// Appends bytes, to memory first and then to an unnamed file.
struct Spool {
    file: SpooledTempFile,
    len: u64,
}

impl Spool {
    fn new(dir: &Path) -> Spool {
        Spool { file: tempfile::spooled_tempfile_in(MEMORY_LIMIT, dir), len: 0 }
    }

    /// Appends bytes. If the file cannot be written, as on a full disk, the list is kept in memory:
    /// a completed restore must still list what it did.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = self.file.write_all(bytes) {
            log::warn!("a list of changes stays in memory: write a temporary file: {error}");
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
    /// Begins a list. A long one goes to an unnamed file in `dir`.
    pub fn new(dir: &Path) -> Writer {
        Writer { spool: Spool::new(dir), count: 0, last: TreePath::root() }
    }

    /// Adds a change.
    ///
    /// # Errors
    /// The list cannot be written, or the patch of this path is longer than 4 GiB.
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
        self.spool.append(&record).attempt(|| "list the changes")?;
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
    /// The number of changes.
    pub fn len(&self) -> usize {
        usize::try_from(self.0.count).unwrap_or(usize::MAX)
    }

    /// Whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.0.count == 0
    }

    /// Iterates over the changes. The iterator ends after the first error.
    pub fn iter(&self) -> Iter<'_> {
        Iter { list: &self.0, at: 0, count: 0, buffer: Vec::new(), used: 0, last: TreePath::root() }
    }

    /// Reads all changes into memory.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn to_vec(&self) -> Result<Vec<Change>> {
        self.iter().collect()
    }

    /// Calls `take` with the bytes of the list, chunk by chunk.
    ///
    /// # Errors
    /// The list cannot be read, or `take` failed.
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

    /// Receives the bytes of the list from `next`, which returns an empty chunk at the end.
    ///
    /// # Errors
    /// The list cannot be written, or `next` failed.
    pub(crate) fn receive(
        &mut self,
        dir: &Path,
        mut next: impl FnMut() -> Result<Vec<u8>>,
    ) -> Result<()> {
        let mut spool = Spool::new(dir);
        loop {
            let chunk = next()?;
            if chunk.is_empty() {
                break;
            }
            spool.append(&chunk).attempt(|| "receive a list of changes")?;
        }
        *self = spool.finish(self.0.count);
        Ok(())
    }
}

impl List {
    /// Reads `most` bytes at `at`; fewer only at the end.
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

/// The length of the common prefix of `a` and `b`.
fn shared_bytes(a: &[u8], b: &[u8]) -> usize {
    const BLOCK: usize = 256;
    let blocks = a.chunks(BLOCK).zip(b.chunks(BLOCK)).take_while(|(a, b)| a == b);
    let whole = blocks.map(|(block, _)| block.len()).sum::<usize>();
    let rest = a.iter().zip(b).skip(whole);
    whole + rest.take_while(|(a, b)| a == b).count()
}

/// Iterates over a list.
pub struct Iter<'a> {
    list: &'a List,
    /// The offset in the list of the bytes after the buffer.
    at: u64,
    count: u64,
    buffer: Vec<u8>,
    /// How many bytes of the buffer are consumed.
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
        let shared = shared.ok_or_else(|| malformed("a path continues no earlier one"))?;
        let path = TreePath::parse(&[shared, &record.rest].concat())
            .map_err(|_| malformed("a path is invalid"))?;
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

/// Serializes only the number of changes. The control socket sends the bytes after the reply.
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
    fn a_list_that_cannot_be_written_is_kept_in_memory() {
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
    fn a_list_is_sent_and_received_in_chunks() {
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
    fn a_truncated_list_is_an_error_and_a_changed_one_never_panics() {
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
            // It is an error or another list, with at most the announced number of changes.
            assert!(received(bad).iter().count() <= 2);
        }
    }
}
