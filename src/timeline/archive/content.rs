//! Cuts the content of one file into the pieces of its description.
//!
//! A hole is a run of blocks of 4 KiB that are all zero, wherever their bytes are. Holes on the
//! host and holes of a layer depend on how the file was written, so they do not count.

use crate::error::Result;
use crate::store::archive::chunker::Chunker;
use crate::store::archive::tree_blob::{HOLE_BLOCK, Piece};
use crate::store::archive::{Chunk, ChunkSink};

const BLOCK: usize = HOLE_BLOCK as usize;

/// Takes the pieces of a file, and its chunks.
pub(in crate::timeline) trait PieceSink {
    /// Takes the next piece, and the bytes of a chunk.
    fn piece(&mut self, piece: Piece, chunk: Option<Chunk<'_>>) -> Result<()>;
}

/// Cuts the content of one file, which is given in order.
pub(super) struct Cutter<'a> {
    to: &'a mut dyn PieceSink,
    chunker: Chunker,
    /// Whether the chunker has bytes.
    has_data: bool,
    /// Bytes of the block that is not complete.
    block: Vec<u8>,
    /// Length of the hole before that block.
    hole: u64,
}

impl<'a> Cutter<'a> {
    pub(super) fn new(to: &'a mut dyn PieceSink) -> Cutter<'a> {
        let (chunker, block) = (Chunker::default(), Vec::new());
        Cutter { to, chunker, has_data: false, block, hole: 0 }
    }

    /// The next bytes.
    pub(super) fn bytes(&mut self, mut bytes: &[u8]) -> Result<()> {
        if !self.block.is_empty() {
            let (now, later) = bytes.split_at((BLOCK - self.block.len()).min(bytes.len()));
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() < BLOCK {
                return Ok(());
            }
            let block = std::mem::take(&mut self.block);
            self.block_or_hole(&block)?;
        }
        while let Some((block, rest)) = bytes.split_at_checked(BLOCK) {
            self.block_or_hole(block)?;
            bytes = rest;
        }
        self.block.extend_from_slice(bytes);
        Ok(())
    }

    /// The next `len` bytes are zeros.
    pub(super) fn zeros(&mut self, len: u64) -> Result<()> {
        const ZEROS: [u8; BLOCK] = [0; BLOCK];
        let first = match self.block.len() {
            0 => 0,
            there => len.min((BLOCK - there) as u64),
        };
        self.bytes(ZEROS.get(..first as usize).unwrap_or_default())?;
        let rest = len - first;
        if rest >= HOLE_BLOCK {
            self.hole(rest - rest % HOLE_BLOCK)?;
        }
        self.bytes(ZEROS.get(..(rest % HOLE_BLOCK) as usize).unwrap_or_default())
    }

    /// The file ends.
    pub(super) fn finish(mut self) -> Result<()> {
        let block = std::mem::take(&mut self.block);
        if !block.is_empty() {
            self.block_or_hole(&block)?;
        }
        self.end_data()?;
        self.end_hole()
    }

    fn block_or_hole(&mut self, block: &[u8]) -> Result<()> {
        if block.iter().all(|byte| *byte == 0) {
            return self.hole(block.len() as u64);
        }
        self.end_hole()?;
        self.has_data = true;
        let to = &mut *self.to;
        self.chunker.push(block, &mut |chunk| put(to, chunk))
    }

    fn hole(&mut self, len: u64) -> Result<()> {
        self.end_data()?;
        self.hole += len;
        Ok(())
    }

    fn end_data(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.has_data) {
            return Ok(());
        }
        let to = &mut *self.to;
        self.chunker.finish(&mut |chunk| put(to, chunk))
    }

    fn end_hole(&mut self) -> Result<()> {
        match std::mem::take(&mut self.hole) {
            0 => Ok(()),
            len => self.to.piece(Piece::Hole(len), None),
        }
    }
}

fn put(to: &mut dyn PieceSink, chunk: Chunk<'_>) -> Result<()> {
    to.piece(Piece::Chunk(chunk.reference()), Some(chunk))
}

/// Writes pieces to a tree stream, and chunks to a sink.
pub(super) struct ToStream<'a> {
    pub(super) tree: &'a mut crate::store::archive::tree_blob::TreeWriter,
    pub(super) sink: &'a mut dyn ChunkSink,
    /// Takes the pieces as well.
    pub(super) noted: Option<&'a mut Vec<Piece>>,
}

impl PieceSink for ToStream<'_> {
    fn piece(&mut self, piece: Piece, chunk: Option<Chunk<'_>>) -> Result<()> {
        use crate::store::archive::tree_blob::Event;
        if let Some(chunk) = chunk {
            self.sink.put(chunk)?;
        }
        if let Some(noted) = &mut self.noted {
            noted.push(piece);
        }
        self.tree.write(&Event::Piece(piece), self.sink)
    }
}
