//! The content of an archived layer: its addresses stay, and its bytes are in chunks.
//!
//! ```text
//! addresses   ..[  range  ].......[ range ]....
//! chunks      [ chunk ][ chunk  ][ chunk  ]       the bytes of all ranges, one after the other
//! ```
//!
//! * Addresses in no range are zeros.
//! * A chunk is needed as a whole while one of its bytes is needed.
//! * The archive verifies each chunk.

use std::io;
use std::sync::Arc;

use crate::error::Kind;
use crate::store::archive::packs::Archive;
use crate::store::archive::{ChunkRef, Digest};
use crate::store::archived::StoredContent;
use crate::store::content::ReadOutcome;
use crate::types::{ByteRange, LayerId};

/// Consecutive addresses that lie in one chunk.
#[derive(Clone, Copy, Debug)]
struct Piece {
    range: ByteRange,
    /// The number of the chunk.
    chunk: usize,
    /// The offset of its first byte in the chunk.
    offset: u64,
}

/// The content of an archived layer.
#[derive(Debug)]
pub struct ArchivedContent {
    layer: LayerId,
    archive: Arc<Archive>,
    end: u64,
    chunks: Vec<ChunkRef>,
    /// In order of their addresses, which is also the order of the chunks.
    pieces: Vec<Piece>,
}

impl ArchivedContent {
    /// The content of a layer whose addresses end at `end`. `None` if the ranges and the chunks do
    /// not have the same length.
    pub(in crate::store) fn new(
        layer: LayerId,
        archive: Arc<Archive>,
        end: u64,
        stored: StoredContent,
    ) -> Option<ArchivedContent> {
        let mut pieces = Vec::new();
        let (mut at, mut chunk, mut offset) = (0_u64, 0, 0);
        for (gap, len) in stored.ranges {
            at = at.checked_add(gap)?;
            let stop = at.checked_add(len).filter(|stop| *stop <= end && len > 0)?;
            while at < stop {
                let left = u64::from(stored.chunks.get(chunk)?.len).checked_sub(offset)?;
                let range = ByteRange { start: at, end: stop.min(at.checked_add(left)?) };
                if !range.is_empty() {
                    pieces.push(Piece { range, chunk, offset });
                }
                (at, offset) = (range.end, offset + range.len());
                if left == range.len() {
                    (chunk, offset) = (chunk + 1, 0);
                }
            }
        }
        let is_whole = chunk == stored.chunks.len() && offset == 0;
        is_whole.then_some(ArchivedContent { layer, archive, end, chunks: stored.chunks, pieces })
    }

    /// Approximate size in memory, in bytes.
    pub(in crate::store) fn memory(&self) -> usize {
        size_of_val(&*self.chunks) + size_of_val(&*self.pieces)
    }

    /// The end of the addresses.
    pub(in crate::store) fn end(&self) -> u64 {
        self.end
    }

    fn digest_of(&self, piece: &Piece) -> Option<Digest> {
        self.chunks.get(piece.chunk).map(|chunk| chunk.digest)
    }

    /// The pieces at and after an address.
    fn pieces_from(&self, at: u64) -> impl Iterator<Item = &Piece> {
        let first = self.pieces.partition_point(|piece| piece.range.end <= at);
        self.pieces.get(first..).unwrap_or_default().iter()
    }

    /// Reads bytes at an address.
    pub(in crate::store) fn read(
        &self,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> io::Result<ReadOutcome> {
        let most = usize::try_from(self.end.saturating_sub(offset)).unwrap_or(usize::MAX);
        let len = most.min(bytes.len());
        let wanted = ByteRange::at(offset, len as u64);
        let Some(bytes) = bytes.get_mut(..len) else { return Ok(ReadOutcome::Bytes(0)) };
        bytes.fill(0);
        for piece in self.pieces_from(offset).take_while(|piece| piece.range.start < wanted.end) {
            let part = piece.range.start.max(offset)..piece.range.end.min(wanted.end);
            let to = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            let Some(to) = bytes.get_mut(to(part.start)..to(part.end)) else { continue };
            let from = piece.offset + (part.start - piece.range.start);
            match self.read_piece(piece, from, to, nowait)? {
                ReadOutcome::Bytes(_) => {}
                other => return Ok(other),
            }
        }
        Ok(ReadOutcome::Bytes(len))
    }

    fn read_piece(
        &self,
        piece: &Piece,
        from: u64,
        to: &mut [u8],
        nowait: bool,
    ) -> io::Result<ReadOutcome> {
        let damaged = Ok(ReadOutcome::Damaged(piece.range.start));
        let Some(digest) = self.digest_of(piece) else { return damaged };
        match self.archive.read_at(&digest, from, to, nowait) {
            Ok(true) => Ok(ReadOutcome::Bytes(to.len())),
            Ok(false) if nowait => Ok(ReadOutcome::WouldBlock),
            Ok(false) => {
                ::log::error!("layer {}: no pack of the archive has chunk {digest}", self.layer);
                damaged
            }
            Err(error) if error.kind == Kind::Damage => {
                ::log::error!("layer {}: {error}", self.layer);
                damaged
            }
            Err(error) => Err(error
                .errno
                .map_or_else(|| io::Error::other(error), io::Error::from_raw_os_error)),
        }
    }

    /// The first address at or after `from` that is stored.
    pub fn next_data(&self, from: u64) -> Option<u64> {
        self.pieces_from(from).next().map(|piece| piece.range.start.max(from))
    }

    /// The first address at or after `from` that is not stored.
    pub fn next_hole(&self, from: u64) -> u64 {
        let mut at = from;
        for piece in self.pieces_from(from) {
            if piece.range.start > at {
                break;
            }
            at = piece.range.end;
        }
        at
    }

    /// The addresses that are stored, in order.
    pub fn stored(&self) -> Vec<ByteRange> {
        let mut stored: Vec<ByteRange> = Vec::new();
        for piece in &self.pieces {
            match stored.last_mut() {
                Some(last) if last.end == piece.range.start => last.end = piece.range.end,
                _ => stored.push(piece.range),
            }
        }
        stored
    }

    /// The addresses of the chunks of which no byte is in `live`, which is sorted and merged.
    pub(in crate::store) fn unused(&self, live: &[ByteRange]) -> Vec<ByteRange> {
        let is_live = |range: &ByteRange| {
            let next = live.partition_point(|known| known.end <= range.start);
            live.get(next).is_some_and(|known| known.start < range.end)
        };
        let unused = |chunk: &&[Piece]| !chunk.iter().any(|piece| is_live(&piece.range));
        let chunks = self.pieces.chunk_by(|a, b| a.chunk == b.chunk).filter(unused);
        chunks.flatten().map(|piece| piece.range).collect()
    }

    /// The content without the chunks that lie in `ranges` as a whole. `ranges` is sorted.
    pub(in crate::store) fn without(&self, ranges: &[ByteRange]) -> StoredContent {
        let is_in = |piece: &Piece| {
            let next = ranges.partition_point(|range| range.end < piece.range.end);
            ranges.get(next).is_some_and(|range| range.start <= piece.range.start)
        };
        let (mut kept, mut chunks) = (Vec::new(), Vec::new());
        for pieces in self.pieces.chunk_by(|a, b| a.chunk == b.chunk) {
            if !pieces.iter().all(is_in) {
                kept.extend(pieces.iter().map(|piece| piece.range));
                chunks.extend(pieces.first().and_then(|piece| self.chunks.get(piece.chunk)));
            }
        }
        StoredContent::new(&kept, chunks)
    }

    /// The stored addresses in `ranges` whose chunks are damaged or missing.
    ///
    /// # Errors
    /// As pread(2).
    pub(in crate::store) fn damaged(&self, ranges: &[ByteRange]) -> io::Result<Vec<ByteRange>> {
        let mut damaged: Vec<ByteRange> = Vec::new();
        let mut byte = [0];
        for range in ranges {
            let pieces = self.pieces_from(range.start);
            for piece in pieces.take_while(|piece| piece.range.start < range.end) {
                let read = self.read_piece(piece, piece.offset, &mut byte, false)?;
                if !matches!(read, ReadOutcome::Damaged(_)) {
                    continue;
                }
                match damaged.last_mut() {
                    Some(last) if last.end >= piece.range.start => last.end = piece.range.end,
                    _ => damaged.push(piece.range),
                }
            }
        }
        Ok(damaged)
    }
}
