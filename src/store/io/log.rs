//! An append-only file of framed records. Journals, `heads.log` and `identities` are such files.
//!
//! ```text
//! frame = len u32 | crc u32 | seq u64 | payload (len bytes, bincode)        integers little-endian
//! crc   = CRC-32C over len, seq and payload
//! ```
//!
//! Always true:
//! * Frames follow each other without a gap, and `seq` counts from 0. In `heads.log`, whose first
//!   records can be trimmed, it counts from any number.
//! * A frame that a crash tore is the last one, and can be cut off. A bad frame with a good one
//!   behind it is damage, and is never skipped.
//! * After a failed append the log ends where it ended before.
//! * Behind the last frame the file can have zeros ([`Log::begin_write_ahead`]). Zeros are no
//!   frame, so they read as the end of the log.

use std::fs::File;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::io::dir::StoreDir;
use crate::store::io::fsync_probe::{FsyncProbe, Unsynced};
use crate::store::io::{codec, disk};

/// Bytes before the payload of a frame.
pub const FRAME_HEAD: usize = 16;

/// The check whether a record hides a frame computes checksums of at most this many times its
/// bytes, plus [`codec::MAX_LEN`].
const MOST_SUMMED: usize = 64;

/// The hint of an error that is no damage, but a record of a later format.
const OF_NEWER: &str = "a newer jailfs may have written it; use that one";

/// Zeros are written ahead of a log from this sync of it on.
const SYNCS_BEFORE_ZEROS: u32 = 3;

/// The least and the most bytes of zeros that are written at once.
const ZEROS: (u64, u64) = (64 << 10, 1 << 20);

const SYNC_FAILED: &str = "an earlier sync failed; what was not synced before may be lost";

/// A log open for appending.
pub struct Log<T> {
    file: Arc<File>,
    probe: Arc<FsyncProbe>,
    what: String,
    end: u64,
    /// Where the zeros behind `end` end; at most `end` if there are none.
    zeros_to: u64,
    /// The number of calls of [`Log::begin_write_ahead`].
    syncs: u32,
    seq: u64,
    /// Why nothing can be appended any more.
    broken: Option<&'static str>,
    buffer: Vec<u8>,
    records: PhantomData<fn(&T)>,
}

/// One frame, or zeros, to be written at the end of a log. To write them needs no lock. Nothing
/// else is appended before [`Log::end_append`] or [`Log::end_write_ahead`].
pub struct LogWrite {
    file: Arc<File>,
    bytes: Vec<u8>,
    at: u64,
    is_zeros: bool,
    written: std::io::Result<()>,
    /// The result of undoing a failed write.
    undone: std::io::Result<()>,
}

impl LogWrite {
    fn new(file: &Arc<File>, bytes: Vec<u8>, at: u64, is_zeros: bool) -> LogWrite {
        LogWrite { file: Arc::clone(file), bytes, at, is_zeros, written: Ok(()), undone: Ok(()) }
    }

    /// Writes the bytes (pwrite(2)). If that fails, undoes what it wrote.
    pub fn write(&mut self) {
        self.written = disk::write_at(&self.file, &self.bytes, self.at);
        if self.written.is_err() {
            self.undone = self.undo();
        }
    }

    /// Cuts off the bytes that a failed write left, or replaces a frame by zeros. If it left
    /// nothing of a frame, the file is not touched. On btrfs a full quota can refuse to cut a file,
    /// but does not refuse to overwrite bytes that were just written.
    fn undo(&self) -> std::io::Result<()> {
        if self.is_zeros {
            // They take space that something else may need.
            return cut_behind(&self.file, self.at);
        }
        let mut left = vec![0; self.bytes.len()];
        let len = disk::read_at(&self.file, &mut left, self.at)?;
        left.truncate(len);
        if left.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        cut_behind(&self.file, self.at).or_else(|_| {
            left.fill(0);
            disk::write_at(&self.file, &left, self.at)
        })
    }
}

/// Cuts off what a file has behind `end`.
fn cut_behind(file: &File, end: u64) -> std::io::Result<()> {
    if file.metadata()?.len() > end { disk::cut(file, end) } else { Ok(()) }
}

/// The records of a log.
pub struct Contents<T> {
    /// Each record, with the offset at which its frame ends.
    pub records: Vec<(T, u64)>,
    /// The offset at which the good frames end.
    pub end: u64,
    /// The number of bytes behind the good frames.
    pub torn: u64,
}

/// The records of a log that a power cut may have torn anywhere.
pub struct Torn<T> {
    /// The good frames at the beginning.
    pub contents: Contents<T>,
    /// The records of good frames behind a bad one.
    pub behind: Vec<T>,
}

/// Reads all records of a log. `what` names the file in errors.
///
/// # Errors
/// Damage, with file and offset: a bad frame with good ones behind it, or a good frame whose
/// payload is not a record of this format.
pub fn read<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<Contents<T>> {
    read_whole(bytes, what, 0)
}

/// Reads a log whose first records may have been trimmed. Returns the number of its first frame,
/// too.
///
/// # Errors
/// As [`read`].
pub fn read_numbered<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<(Contents<T>, u64)> {
    let first = any_frame_at(bytes, 0).map_or(0, |(_, seq, _)| seq);
    Ok((read_whole(bytes, what, first)?, first))
}

fn read_whole<T: DeserializeOwned>(bytes: &[u8], what: &str, first: u64) -> Result<Contents<T>> {
    let contents = read_good(bytes, what, first)?;
    let next = first + contents.records.len() as u64;
    match next_good(bytes, usize::try_from(contents.end).unwrap_or(usize::MAX), next) {
        None => Ok(contents),
        Some(_) => Err(damage_at(what, contents.end)),
    }
}

/// Reads a log that a power cut may have torn. Of the pages that were not synced, the disk may have
/// a later one and lack an earlier one. The caller decides by the records behind a bad frame
/// whether a power cut can have caused it.
///
/// # Errors
/// Damage: a good frame whose payload is not a record of this format.
pub fn read_torn<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<Torn<T>> {
    let contents = read_good(bytes, what, 0)?;
    let rest =
        usize::try_from(contents.end).ok().and_then(|end| bytes.get(end..)).unwrap_or_default();
    let behind = read_behind(rest, contents.end, contents.records.len(), what)?;
    Ok(Torn { contents, behind })
}

/// The records of good frames in `bytes`, which begin with a bad frame. That frame is at `end` in
/// its log, and should have the number `count`.
pub(in crate::store) fn read_behind<T: DeserializeOwned>(
    bytes: &[u8],
    end: u64,
    count: usize,
    what: &str,
) -> Result<Vec<T>> {
    let mut behind = Vec::new();
    let (mut at, mut seq) = (0, count as u64);
    while let Some((payload, found, next)) = next_good(bytes, at, seq) {
        behind.push(decode(payload, what, end + at as u64)?);
        (at, seq) = (next.saturating_sub(1), found);
    }
    Ok(behind)
}

/// The error for a bad frame where a good one must be.
pub(in crate::store) fn damage_in(what: &str, offset: u64) -> Error {
    Error::damage(format!("read {what} at offset {offset}"), "bad frame")
}

/// The error for a bad frame with good ones behind it.
pub fn damage_at(what: &str, offset: u64) -> Error {
    Error::damage(format!("read {what} at offset {offset}"), "bad frame with good frames behind it")
        .hint("'jailfs check' tells what else is damaged")
}

pub(in crate::store) fn decode<T: DeserializeOwned>(
    payload: &[u8],
    what: &str,
    at: u64,
) -> Result<T> {
    codec::decode(payload).map_err(|why| {
        Error::damage(
            format!("read {what} at offset {at}"),
            format!("not a record of this format: {why}"),
        )
        .hint(OF_NEWER)
    })
}

/// Whether an error means damage. Otherwise the file could not be read now, or holds a record of a
/// later format.
pub fn is_damage(error: &Error) -> bool {
    error.kind == Kind::Damage && error.hint.as_deref() != Some(OF_NEWER)
}

fn read_good<T: DeserializeOwned>(bytes: &[u8], what: &str, first: u64) -> Result<Contents<T>> {
    let mut records = Vec::new();
    let mut at = 0;
    while let Some((payload, next)) = frame_at(bytes, at, first + records.len() as u64) {
        let record = decode(payload, what, at as u64)?;
        records.push((record, next as u64));
        at = next;
    }
    Ok(Contents { records, end: at as u64, torn: (bytes.len() - at) as u64 })
}

/// The payload of the frame at `at` and the offset of the next frame, if the frame is whole and its
/// checksum and number are right.
pub(in crate::store) fn frame_at(bytes: &[u8], at: usize, seq: u64) -> Option<(&[u8], usize)> {
    let (payload, found_seq, next) = any_frame_at(bytes, at)?;
    (found_seq == seq).then_some((payload, next))
}

fn any_frame_at(bytes: &[u8], at: usize) -> Option<(&[u8], u64, usize)> {
    let (len, crc, seq) = head_at(bytes, at)?;
    let next = at.checked_add(FRAME_HEAD)?.checked_add(len as usize)?;
    let payload = bytes.get(at + FRAME_HEAD..next)?;
    let head = crc32c::crc32c_append(crc32c::crc32c(&len.to_le_bytes()), &seq.to_le_bytes());
    (crc32c::crc32c_append(head, payload) == crc).then_some((payload, seq, next))
}

/// The payload length in the head of a frame.
pub(in crate::store) fn payload_len(head: &[u8]) -> Option<usize> {
    head_at(head, 0).map(|(len, ..)| len as usize)
}

/// The length, the checksum and the number in the head at `at`.
fn head_at(bytes: &[u8], at: usize) -> Option<(u32, u32, u64)> {
    let (len, rest) = bytes.get(at..at.checked_add(FRAME_HEAD)?)?.split_first_chunk::<4>()?;
    let (crc, seq) = rest.split_first_chunk::<4>()?;
    let seq = u64::from_le_bytes(seq.try_into().ok()?);
    Some((u32::from_le_bytes(*len), u32::from_le_bytes(*crc), seq))
}

/// The next good frame behind `at` that has a higher number than `seq`, the number that belongs at
/// `at`. Returns payload, number and end.
///
/// Numbers count frames. So the number of a frame of this log is at most `seq` plus the frames that
/// fit in between.
fn next_good(bytes: &[u8], at: usize, seq: u64) -> Option<(&[u8], u64, usize)> {
    let can_be = |start: usize| {
        let most = seq.saturating_add(((start - at) / FRAME_HEAD) as u64 + 1);
        head_at(bytes, start).is_some_and(|(_, _, found)| found > seq && found <= most)
    };
    let starts = at.saturating_add(1)..bytes.len().saturating_sub(FRAME_HEAD - 1);
    // Check the number first: a checksum at every byte would take time in the square of the length.
    starts.filter(|start| can_be(*start)).find_map(|start| any_frame_at(bytes, start))
}

/// Whether the payload of a frame, to be written with the number `seq` at `end`, holds a whole
/// frame that [`next_good`] could return. Also true if so many bytes look like frames that the
/// check would take too long.
fn hides_a_frame(bytes: &[u8], seq: u64, end: u64) -> bool {
    let mut to_sum = bytes.len().saturating_mul(MOST_SUMMED).saturating_add(codec::MAX_LEN);
    for at in 1..bytes.len() {
        let most = seq.saturating_add((end + at as u64) / FRAME_HEAD as u64 + 1);
        let fits = |len: u32| len as usize <= bytes.len().saturating_sub(at + FRAME_HEAD);
        let Some((len, ..)) =
            head_at(bytes, at).filter(|(len, _, found)| (1..=most).contains(found) && fits(*len))
        else {
            continue;
        };
        let Some(left) = to_sum.checked_sub(len as usize) else { return true };
        to_sum = left;
        if any_frame_at(bytes, at).is_some() {
            return true;
        }
    }
    false
}

/// Encodes a record as a frame with the number `seq`.
///
/// # Errors
/// `EFBIG` if it is longer than [`codec::MAX_LEN`]; if it cannot be encoded.
pub fn frame<T: Serialize>(record: &T, seq: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    frame_onto(record, seq, &mut bytes)?;
    Ok(bytes)
}

/// Encodes records as a log, numbered from 0.
///
/// # Errors
/// As [`frame`].
pub fn frames<T: Serialize>(records: impl Iterator<Item = T>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for (seq, record) in records.enumerate() {
        bytes.append(&mut frame(&record, seq as u64)?);
    }
    Ok(bytes)
}

fn frame_onto<T: Serialize>(record: &T, seq: u64, bytes: &mut Vec<u8>) -> Result<()> {
    let too_long = || {
        let why = format!("one change takes more than {} MiB", codec::MAX_LEN >> 20);
        let error = Error::new(Kind::Failed, "encode a record", why);
        Error { errno: Some(nix::errno::Errno::EFBIG as i32), ..error }
    };
    bytes.clear();
    bytes.resize(FRAME_HEAD, 0);
    codec::encode_onto(record, bytes).map_err(|why| Error::damage("encode a record", why))?;
    let len = bytes.len() - FRAME_HEAD;
    if len > codec::MAX_LEN {
        return Err(too_long());
    }
    let len = u32::try_from(len).map_err(|_| too_long())?.to_le_bytes();
    let seq = seq.to_le_bytes();
    let Some((head, payload)) = bytes.split_at_mut_checked(FRAME_HEAD) else {
        return Err(too_long());
    };
    let crc = crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(&len), &seq), payload)
        .to_le_bytes();
    for (to, from) in head.iter_mut().zip(len.iter().chain(&crc).chain(&seq)) {
        *to = *from;
    }
    Ok(())
}

impl<T: Serialize> Log<T> {
    /// Opens a log for appending. Its good frames end at `end`, and the next one gets the number
    /// `count`. Bytes behind `end` are cut off.
    ///
    /// # Errors
    /// As fstat(2) and ftruncate(2).
    pub fn append_to(file: Arc<File>, what: String, end: u64, count: u64) -> Result<Log<T>> {
        let len = file.metadata().attempt(|| format!("stat {what}"))?.len();
        if len > end {
            disk::cut(&file, end).attempt(|| format!("cut torn bytes off {what}"))?;
        }
        let probe = Arc::new(FsyncProbe::of(&file));
        Ok(Log {
            file,
            probe,
            what,
            end,
            zeros_to: 0,
            syncs: 0,
            seq: count,
            broken: None,
            buffer: Vec::new(),
            records: PhantomData,
        })
    }

    /// Replaces the log `name` of a directory by these records, the first with the number `first`,
    /// and opens the new log for appending.
    ///
    /// # Errors
    /// As open(2), pwrite(2), fdatasync(2) and rename(2); the old log then stays.
    pub(in crate::store) fn publish<'r>(
        dir: &StoreDir,
        name: &str,
        first: u64,
        records: impl Iterator<Item = &'r T>,
        durable: bool,
    ) -> Result<Log<T>>
    where
        T: 'r,
    {
        let temp = format!("{name}.new");
        dir.remove(&temp)?;
        let mut log = Log::append_to(Arc::new(dir.file(&temp, true)?), dir.show(name), 0, first)?;
        for record in records {
            log.append(record)?;
        }
        if durable {
            log.sync()?;
        }
        disk::rename(dir, &temp, name).attempt(|| format!("publish {}", dir.show(name)))?;
        // From here on this is the log, whatever fails. No reader would see a record that went to
        // the old one.
        if durable && let Err(error) = dir.sync() {
            ::log::warn!("{error}");
            log.mark_sync_failed();
        }
        Ok(log)
    }

    /// Appends one record with one write. The record survives the end of this process; a power cut
    /// only after [`Log::sync`].
    ///
    /// # Errors
    /// As pwrite(2); the log then ends where it ended before.
    pub fn append(&mut self, record: &T) -> Result<()> {
        let mut frame = self.begin_append(record)?;
        frame.write();
        self.end_append(frame)
    }

    /// Appends one record that holds bytes chosen by a user or a program.
    ///
    /// A record with a whole frame in it is refused. If a power cut tore the record, that frame
    /// would read as a later record of the log.
    ///
    /// # Errors
    /// As [`Log::append`], and EINVAL.
    pub fn append_untrusted(&mut self, record: &T) -> Result<()> {
        let mut frame = self.begin_append_untrusted(record)?;
        frame.write();
        self.end_append(frame)
    }

    /// As [`Log::append`], in steps: the caller writes the frame, and then calls
    /// [`Log::end_append`].
    ///
    /// # Errors
    /// If nothing can be appended, or the record cannot be encoded.
    pub fn begin_append(&mut self, record: &T) -> Result<LogWrite> {
        self.check()?;
        frame_onto(record, self.seq, &mut self.buffer).map_err(|e| e.during(&self.what))?;
        Ok(self.begin_write())
    }

    /// As [`Log::append_untrusted`], in the steps of [`Log::begin_append`].
    ///
    /// # Errors
    /// As [`Log::begin_append`], and EINVAL.
    pub fn begin_append_untrusted(&mut self, record: &T) -> Result<LogWrite> {
        self.check()?;
        frame_onto(record, self.seq, &mut self.buffer).map_err(|e| e.during(&self.what))?;
        if hides_a_frame(&self.buffer, self.seq, self.end) {
            let refused = Error::new(
                Kind::Failed,
                format!("write {}", self.what),
                "it contains a frame of a store's log",
            );
            return Err(Error { errno: Some(nix::errno::Errno::EINVAL as i32), ..refused });
        }
        Ok(self.begin_write())
    }

    fn begin_write(&mut self) -> LogWrite {
        LogWrite::new(&self.file, std::mem::take(&mut self.buffer), self.end, false)
    }

    /// Counts a frame that was written.
    ///
    /// # Errors
    /// As pwrite(2); the log then ends where it ended before.
    pub fn end_append(&mut self, frame: LogWrite) -> Result<()> {
        self.buffer = frame.bytes;
        if let Err(error) = frame.written {
            self.zeros_to = self.zeros_to.min(self.end);
            if frame.undone.is_err() {
                self.broken = Some("an earlier write failed and could not be undone");
            }
            return Err(Error::io(format!("write {}", self.what), &error));
        }
        self.end += self.buffer.len() as u64;
        self.seq += 1;
        Ok(())
    }

    /// Prepares for a sync that follows, and for those after it. A log that is synced again and
    /// again gets zeros behind its last frame, as many as it has bytes, between 64 KiB and 1 MiB.
    /// Frames then replace zeros, and a sync of them commits neither a new length nor new blocks.
    ///
    /// Returns the zeros, if they are due. The caller writes them, and then calls
    /// [`Log::end_write_ahead`].
    pub fn begin_write_ahead(&mut self) -> Option<LogWrite> {
        self.syncs = self.syncs.saturating_add(1);
        if self.syncs < SYNCS_BEFORE_ZEROS || self.end < self.zeros_to || self.broken.is_some() {
            return None;
        }
        let len = self.end.clamp(ZEROS.0, ZEROS.1);
        let zeros = vec![0; usize::try_from(len).unwrap_or(0)];
        Some(LogWrite::new(&self.file, zeros, self.end, true))
    }

    /// Counts zeros that were written. A failure is no error: the log just goes on without zeros.
    pub fn end_write_ahead(&mut self, zeros: LogWrite) {
        match zeros.written {
            Ok(()) => self.zeros_to = zeros.at + zeros.bytes.len() as u64,
            Err(error) => {
                log::debug!("{} gets no zeros: {error}", self.what);
                self.zeros_to = self.end;
                if let Err(error) = zeros.undone {
                    log::debug!("cut zeros off {}: {error}", self.what);
                }
            }
        }
    }

    /// Cuts off what is behind the last frame.
    ///
    /// # Errors
    /// As fstat(2) and ftruncate(2).
    pub fn cut_zeros(&mut self) -> Result<()> {
        cut_behind(&self.file, self.end).attempt(|| format!("cut zeros off {}", self.what))?;
        self.zeros_to = self.end;
        Ok(())
    }

    /// The probe that tells what a failed sync of the file lost.
    pub fn probe(&self) -> Arc<FsyncProbe> {
        Arc::clone(&self.probe)
    }

    /// The file, to sync it without borrowing the log.
    pub fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// Makes all records survive a power cut.
    ///
    /// # Errors
    /// As fdatasync(2). If the disk was full, the caller can try again. After any other error
    /// nothing can be appended any more: the kernel may have dropped what was not synced, and would
    /// report success to the next sync.
    pub fn sync(&mut self) -> Result<()> {
        let synced = self.probe.sync(&self.file);
        if matches!(synced, Err(Unsynced::Lost(_))) {
            self.broken = Some(SYNC_FAILED);
        }
        synced.map_err(Unsynced::into_error).attempt(|| format!("sync {}", self.what))
    }

    /// Fails if nothing can be appended any more.
    ///
    /// # Errors
    /// EIO, with the reason.
    pub fn check(&self) -> Result<()> {
        if let Some(why) = self.broken {
            return Err(Error {
                errno: Some(nix::errno::Errno::EIO as i32),
                ..Error::new(Kind::Failed, format!("write {}", self.what), why)
            });
        }
        Ok(())
    }

    /// Whether nothing can be appended any more.
    pub fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Closes the log for appending after a failed sync, with `last` as its last record if that can
    /// be written.
    pub fn end_with(&mut self, last: &T) {
        if let Some(mut frame) = self.begin_close(last) {
            frame.write();
            self.end_close(frame);
        }
    }

    /// As [`Log::end_with`], in steps: closes the log, and returns the frame of `last`, if it can
    /// be written. The caller writes it, and then calls [`Log::end_close`].
    pub fn begin_close(&mut self, last: &T) -> Option<LogWrite> {
        let warn = |error: &Error| log::warn!("{error}");
        let can_append = !self.is_broken();
        let frame = can_append.then(|| self.begin_append(last).inspect_err(warn).ok()).flatten();
        self.broken = Some(SYNC_FAILED);
        frame
    }

    /// Counts the frame of the last record.
    pub fn end_close(&mut self, frame: LogWrite) {
        if let Err(error) = self.end_append(frame) {
            log::warn!("{error}");
        }
        self.broken = Some(SYNC_FAILED);
    }

    /// Closes the log for appending after a failed sync.
    pub fn mark_sync_failed(&mut self) {
        self.broken = Some(SYNC_FAILED);
    }

    /// Number of records, with those that were trimmed.
    pub fn count(&self) -> u64 {
        self.seq
    }

    /// Bytes of all frames.
    pub fn len(&self) -> u64 {
        self.end
    }

    /// Whether there is no frame.
    pub fn is_empty(&self) -> bool {
        self.end == 0
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn log_of(records: &[String]) -> Vec<u8> {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let mut log = Log::append_to(Arc::clone(&file), "test".into(), 0, 0).unwrap();
        for record in records {
            log.append(record).unwrap();
        }
        let mut bytes = vec![0; log.len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn texts(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("record {n} {}", "x".repeat(n * 7))).collect()
    }

    #[test]
    fn bytes_that_look_like_too_many_frames_are_refused() {
        let numbers: Vec<u8> = (0..8192_u64).flat_map(|_| 30_000_u64.to_le_bytes()).collect();
        assert!(!hides_a_frame(&numbers, 100_000, 1 << 20), "an attribute full of numbers");
        let head = [&(1_u32 << 20).to_le_bytes()[..], &[0; 4], &1_u64.to_le_bytes()].concat();
        assert!(!hides_a_frame(&head.repeat(4096), 5, 100), "too short for what they say");
        assert!(hides_a_frame(&head.repeat(1 << 17), 5, 100));
    }

    #[test]
    fn a_log_cut_at_any_byte_gives_the_whole_records_before_the_cut() {
        let records = texts(6);
        let bytes = log_of(&records);
        let ends: Vec<u64> =
            read::<String>(&bytes, "t").unwrap().records.iter().map(|r| r.1).collect();
        for cut in 0..=bytes.len() {
            let got = read::<String>(&bytes[..cut], "t").unwrap();
            let whole = ends.iter().filter(|end| **end <= cut as u64).count();
            assert_eq!(got.records.len(), whole, "cut at {cut}");
            assert_eq!(got.end + got.torn, cut as u64);
        }
    }

    #[test]
    fn a_flipped_bit_never_reads_as_a_wrong_record() {
        let records = texts(4);
        let bytes = log_of(&records);
        let last = read::<String>(&bytes, "t").unwrap().records[2].1 as usize;
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                match read::<String>(&bad, "t") {
                    Ok(got) => {
                        assert!(
                            at >= last,
                            "a bad frame with good ones behind it is damage: byte {at}"
                        );
                        assert_eq!(
                            got.records.iter().map(|r| r.0.clone()).collect::<Vec<_>>(),
                            records[..3]
                        );
                    }
                    Err(error) => {
                        assert_eq!(error.kind, crate::error::Kind::Damage);
                        assert!(error.attempt.contains("offset"), "{error}");
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_are_the_end_of_a_log() {
        let records = texts(6);
        let bytes = log_of(&records);
        for zeros in [1, FRAME_HEAD - 1, FRAME_HEAD, 100, 1 << 16] {
            let got = read::<String>(&[&bytes[..], &vec![0; zeros]].concat(), "t").unwrap();
            assert_eq!((got.records.len(), got.end), (6, bytes.len() as u64));
            assert!(read::<String>(&vec![0; zeros], "t").unwrap().records.is_empty());
        }
    }

    #[test]
    fn appending_goes_on_after_a_torn_tail() {
        let records = texts(3);
        let bytes = log_of(&records);
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.write_all_at(&bytes[..bytes.len() - 3], 0).unwrap();
        let got = read::<String>(&bytes[..bytes.len() - 3], "t").unwrap();
        let mut log = Log::append_to(Arc::clone(&file), "t".into(), got.end, 2).unwrap();
        log.append(&"new".to_owned()).unwrap();
        let mut all = vec![0; log.len() as usize];
        file.read_exact_at(&mut all, 0).unwrap();
        let again: Vec<String> =
            read(&all, "t").unwrap().records.into_iter().map(|r| r.0).collect();
        assert_eq!(again, [records[0].clone(), records[1].clone(), "new".into()]);
    }
}
