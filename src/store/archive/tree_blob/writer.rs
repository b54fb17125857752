//! Writes a tree stream, cuts it into chunks, and makes the blob.

use crate::error::{Error, Kind, Result};
use crate::store::archive::chunker::Chunker;
use crate::store::archive::tree_blob::blob::TreeBlob;
use crate::store::archive::tree_blob::layout::{Event, MAGIC};
use crate::store::archive::tree_blob::rules::Rules;
use crate::store::archive::{ChunkRef, ChunkSink, Flaw};

/// Writes the entries of a state in order. The chunks of the stream go to a sink; the chunks of the
/// content are the caller's.
pub struct TreeWriter {
    rules: Rules,
    chunker: Chunker,
    /// The bytes of one event.
    event: Vec<u8>,
    len: u64,
    chunks: Vec<ChunkRef>,
}

impl Default for TreeWriter {
    fn default() -> TreeWriter {
        TreeWriter {
            rules: Rules::default(),
            chunker: Chunker::default(),
            event: MAGIC.to_vec(),
            len: 0,
            chunks: Vec::new(),
        }
    }
}

impl TreeWriter {
    /// The number of the next entry; the root has number 0.
    pub fn next_entry(&self) -> u64 {
        self.rules.entries()
    }

    /// Writes an event.
    ///
    /// # Errors
    /// An event that the rules do not allow, with the path of the entry; and those of the sink.
    pub fn write(&mut self, event: &Event, sink: &mut dyn ChunkSink) -> Result<()> {
        self.rules.check(event).map_err(refused)?;
        event.put(&mut self.event).map_err(|flaw| refused(self.rules.flaw(&flaw)))?;
        self.len += self.event.len() as u64;
        let chunks = &mut self.chunks;
        self.chunker.push(&self.event, &mut |chunk| {
            chunks.push(chunk.reference());
            sink.put(chunk)
        })?;
        self.event.clear();
        Ok(())
    }

    /// Ends the stream after the end of the root.
    ///
    /// # Errors
    /// The root did not end; and those of the sink.
    pub fn finish(mut self, sink: &mut dyn ChunkSink) -> Result<TreeBlob> {
        if !self.rules.is_over() {
            return Err(refused(Flaw::new("the root directory does not end")));
        }
        let chunks = &mut self.chunks;
        self.chunker.finish(&mut |chunk| {
            chunks.push(chunk.reference());
            sink.put(chunk)
        })?;
        Ok(TreeBlob::new(self.rules.entries(), self.chunks))
    }
}

fn refused(flaw: Flaw) -> Error {
    Error::new(Kind::Failed, "describe the state", flaw.0)
}

/// Writes the start of a stream in which the bytes of each chunk follow its name.
pub fn put_magic(out: &mut Vec<u8>) {
    out.extend_from_slice(MAGIC);
}

/// Appends the bytes of an event that was read from a stream.
///
/// # Errors
/// The event is none that a reader gives.
pub fn put_event(event: &Event, out: &mut Vec<u8>) -> Result<()> {
    event.put(out).map_err(refused)
}
