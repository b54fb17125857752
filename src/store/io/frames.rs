//! Reads the frames of a long log one by one, from memory or from its file.
//!
//! * A file is read in pieces of [`PIECE`] bytes, so the memory of a reader does not depend on the
//!   length of the log. Only the bytes behind a bad frame are held as a whole.
//! * A record is decoded each time it is read. All records of a long log at once would take several
//!   times its bytes.

use std::fs::File;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use crate::error::{Attempt, Result};
use crate::store::io::log::FRAME_HEAD;
use crate::store::io::{codec, disk, log};

/// Bytes of a file that are read at a time.
const PIECE: usize = 256 << 10;

/// The bytes of a log.
pub enum LogBytes {
    /// All of them.
    Memory(Vec<u8>),
    /// This many of the first bytes of a file.
    File(Arc<File>, u64),
}

impl LogBytes {
    /// The number of bytes.
    pub fn len(&self) -> u64 {
        self.view().len()
    }

    fn view(&self) -> View<'_> {
        match self {
            LogBytes::Memory(bytes) => View::Memory(bytes),
            LogBytes::File(file, len) => View::File(file, *len),
        }
    }
}

/// The bytes of a log, borrowed.
#[derive(Clone, Copy)]
enum View<'b> {
    Memory(&'b [u8]),
    File(&'b File, u64),
}

impl View<'_> {
    fn len(self) -> u64 {
        match self {
            View::Memory(bytes) => bytes.len() as u64,
            View::File(_, len) => len,
        }
    }
}

/// Reads a log, and keeps the last piece that it read.
struct Reader<'b> {
    bytes: View<'b>,
    what: &'b str,
    piece: Vec<u8>,
    piece_at: u64,
}

impl<'b> Reader<'b> {
    fn new(bytes: View<'b>, what: &'b str) -> Reader<'b> {
        Reader { bytes, what, piece: Vec::new(), piece_at: 0 }
    }

    /// The `len` bytes at `at`; `None` if the log ends before.
    fn get(&mut self, at: u64, len: usize) -> Result<Option<&[u8]>> {
        let Some(end) = at.checked_add(len as u64).filter(|end| *end <= self.bytes.len()) else {
            return Ok(None);
        };
        let start = match self.bytes {
            View::Memory(bytes) => {
                let start = usize::try_from(at).unwrap_or(usize::MAX);
                return Ok(bytes.get(start..).and_then(|rest| rest.get(..len)));
            }
            View::File(file, _) => {
                if at < self.piece_at || end > self.piece_at + self.piece.len() as u64 {
                    self.read_piece(file, at, len.max(PIECE))?;
                }
                usize::try_from(at - self.piece_at).unwrap_or(usize::MAX)
            }
        };
        Ok(self.piece.get(start..).and_then(|rest| rest.get(..len)))
    }

    fn read_piece(&mut self, file: &File, at: u64, len: usize) -> Result<()> {
        let len = usize::try_from(self.bytes.len() - at).map_or(len, |rest| rest.min(len));
        self.piece.resize(len, 0);
        self.piece_at = at;
        let read = disk::read_at(file, &mut self.piece, at);
        let read = read.attempt(|| format!("read {} at offset {at}", self.what))?;
        self.piece.truncate(read);
        Ok(())
    }

    /// The payload of the frame at `at` and the offset of the next frame, if the frame is good and
    /// has this number.
    fn frame(&mut self, at: u64, seq: u64) -> Result<Option<(&[u8], u64)>> {
        let Some(len) = self.get(at, FRAME_HEAD)?.and_then(log::payload_len) else {
            return Ok(None);
        };
        let Some(whole) = len.checked_add(FRAME_HEAD) else { return Ok(None) };
        let Some(bytes) = self.get(at, whole)? else { return Ok(None) };
        Ok(log::frame_at(bytes, 0, seq).map(|(payload, _)| (payload, at + whole as u64)))
    }

    /// All bytes from `at` on.
    fn rest(&mut self, at: u64) -> Result<&[u8]> {
        let len = usize::try_from(self.bytes.len().saturating_sub(at)).unwrap_or(usize::MAX);
        Ok(self.get(at, len)?.unwrap_or_default())
    }
}

/// The good frames at the beginning of a log.
pub struct Frames<T> {
    bytes: LogBytes,
    what: String,
    /// The offset at which each frame ends.
    ends: Vec<u64>,
    records: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Frames<T> {
    /// The number of frames.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// The offset at which the last frame ends.
    pub fn end(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The offset at which a frame begins.
    pub fn start_of(&self, number: usize) -> u64 {
        number.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0)
    }

    /// Keeps the first `len` frames.
    pub fn truncate(&mut self, len: usize) {
        self.ends.truncate(len);
    }

    /// The records, from number `first` on.
    ///
    /// # Errors
    /// Damage, with file and offset: a good frame whose payload is not a record of this format. As
    /// pread(2), if the log is in a file.
    pub fn records_from(&self, first: usize) -> impl Iterator<Item = Result<T>> + '_ {
        let mut reader = Reader::new(self.bytes.view(), &self.what);
        let mut at = self.start_of(first);
        (first..self.ends.len()).map(move |number| {
            let begin = at;
            at = self.ends.get(number).copied().unwrap_or(at);
            match reader.frame(begin, number as u64)? {
                Some((payload, _)) => log::decode(payload, &self.what, begin),
                // It was good when the log was opened.
                None => Err(log::damage_in(&self.what, begin)),
            }
        })
    }
}

/// Scans a log that a power cut may have torn, as [`log::read_torn`] does. Returns its good frames,
/// and the records of good frames behind a bad one. Calls `see` with the number, the payload and
/// the offset of each good frame.
///
/// # Errors
/// As pread(2) and `see`, and damage: a good frame behind a bad one whose payload is not a
/// record of this format.
pub fn scan_torn<T: DeserializeOwned>(
    bytes: LogBytes,
    what: &str,
    mut see: impl FnMut(usize, &[u8], u64) -> Result<()>,
) -> Result<(Frames<T>, Vec<T>)> {
    let mut ends = Vec::new();
    let mut reader = Reader::new(bytes.view(), what);
    let mut at = 0;
    let behind = loop {
        while let Some((payload, next)) = reader.frame(at, ends.len() as u64)? {
            see(ends.len(), payload, at)?;
            ends.push(next);
            at = next;
        }
        let behind = log::read_behind(reader.rest(at)?, at, ends.len(), what)?;
        // The process that writes the log may have replaced zeros since they were read.
        if behind.is_empty() || reader.frame(at, ends.len() as u64)?.is_none() {
            break behind;
        }
    };
    Ok((Frames { bytes, what: what.to_owned(), ends, records: PhantomData }, behind))
}

/// The first, the second and the last record of a log.
pub type Outline<T> = (T, T, T);

/// Reads the outline of a log without decoding the records between. `None` if the log is not whole
/// to its last byte, or has fewer than two records.
///
/// # Errors
/// As pread(2).
pub fn outline<T: DeserializeOwned>(bytes: &LogBytes, what: &str) -> Result<Option<Outline<T>>> {
    outline_in(&mut Reader::new(bytes.view(), what))
}

/// Reads the outline of a log in memory.
///
/// # Errors
/// None.
pub fn outline_of<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<Outline<T>>> {
    outline_in(&mut Reader::new(View::Memory(bytes), "a log"))
}

fn outline_in<T: DeserializeOwned>(reader: &mut Reader<'_>) -> Result<Option<Outline<T>>> {
    let (mut first, mut second, mut last) = (None, None, None);
    let (mut at, mut count) = (0, 0);
    let end = reader.bytes.len();
    while let Some((payload, next)) = reader.frame(at, count)? {
        match count {
            0 => first = codec::decode(payload).ok(),
            1 => second = codec::decode(payload).ok(),
            _ => {}
        }
        if next == end {
            last = codec::decode(payload).ok();
        }
        (at, count) = (next, count + 1);
    }
    Ok(match (at == end, first, second, last) {
        (true, Some(first), Some(second), Some(last)) => Some((first, second, last)),
        _ => None,
    })
}

/// Calls `see` with the payload and the offset of each frame from `at` on. The first one has the
/// number `seq`.
///
/// # Errors
/// As pread(2) and `see`, and damage if the bytes do not end with a whole frame.
pub fn each_from(
    bytes: &LogBytes,
    what: &str,
    (mut at, mut seq): (u64, u64),
    mut see: impl FnMut(&[u8], u64) -> Result<()>,
) -> Result<()> {
    let mut reader = Reader::new(bytes.view(), what);
    while at < reader.bytes.len() {
        let Some((payload, next)) = reader.frame(at, seq)? else {
            return Err(log::damage_in(what, at));
        };
        see(payload, at)?;
        (at, seq) = (next, seq + 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::store::io::log::{Torn, read_torn};

    fn in_file(bytes: &[u8]) -> LogBytes {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        LogBytes::File(Arc::new(file), bytes.len() as u64)
    }

    /// Some records are longer than a piece, and some begin in one piece and end in another.
    fn texts() -> Vec<String> {
        let lens = [3, PIECE / 2, PIECE - 40, 10, 2 * PIECE + 7, 0, PIECE, 90];
        lens.iter().map(|len| "x".repeat(*len)).collect()
    }

    fn compare(bytes: &[u8]) {
        let Torn { contents, behind } = read_torn::<String>(bytes, "t").unwrap();
        let texts: Vec<String> = contents.records.iter().map(|r| r.0.clone()).collect();
        for source in [LogBytes::Memory(bytes.to_vec()), in_file(bytes)] {
            let mut seen = Vec::new();
            let see = |number, payload: &[u8], _| {
                seen.push((number, codec::decode::<String>(payload).unwrap()));
                Ok(())
            };
            let (mut frames, later) = scan_torn::<String>(source, "t", see).unwrap();
            assert_eq!(
                (frames.count(), frames.end(), &later),
                (texts.len(), contents.end, &behind)
            );
            assert_eq!(seen, texts.iter().cloned().enumerate().collect::<Vec<_>>());
            for from in 0..=texts.len() + 1 {
                let found: Vec<String> = frames.records_from(from).collect::<Result<_>>().unwrap();
                assert_eq!(found, texts.get(from..).unwrap_or_default());
            }
            frames.truncate(2);
            assert_eq!(
                frames.end(),
                contents.records.iter().take(2).next_back().map_or(0, |r| r.1)
            );
            assert_eq!(frames.records_from(0).count(), texts.len().min(2));
        }
    }

    #[test]
    fn records_decoded_one_by_one_equal_those_read_at_once() {
        let short: Vec<String> = (0..6).map(|n| "x".repeat(n * 7)).collect();
        let bytes = log::frames(short.iter()).unwrap();
        (0..=bytes.len()).for_each(|at| compare(&bytes[..at]));
        (0..bytes.len()).for_each(|at| {
            compare(&[&bytes[..at], &[bytes[at] ^ 0x10][..], &bytes[at + 1..]].concat())
        });
    }

    #[test]
    fn records_longer_than_a_piece_are_read_whole() {
        let bytes = log::frames(texts().iter()).unwrap();
        compare(&bytes);
        compare(&bytes[..bytes.len() - 1]);
        let first_bad = [&bytes[..40], &[bytes[40] ^ 1][..], &bytes[41..]].concat();
        compare(&first_bad);
        let found = outline::<String>(&in_file(&bytes), "t").unwrap().unwrap();
        assert_eq!(found, outline_of::<String>(&bytes).unwrap().unwrap());
        assert_eq!((found.0.len(), found.1.len(), found.2.len()), (3, PIECE / 2, 90));
        assert!(outline::<String>(&in_file(&bytes[..bytes.len() - 1]), "t").unwrap().is_none());
    }
}
