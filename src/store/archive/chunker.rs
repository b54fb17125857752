//! Cuts content into chunks at places that the content itself defines (FastCDC of 2020). So equal
//! content is cut alike wherever it is, and a change moves only the cuts around it.
//!
//! The sizes are part of the format of tree blobs: with others, the same state would have another
//! digest. On average 16 KiB, so that the index of 20 GiB stays in memory; at most 64 KiB, so that
//! a changed byte costs little.

use fastcdc::v2020::FastCDC;

use crate::store::archive::{Chunk, MAX_CHUNK};

/// The smallest chunk, except at the end of the content.
pub const MIN_CHUNK: usize = 4 << 10;
/// The average chunk.
pub const AVERAGE_CHUNK: usize = 16 << 10;
/// Bytes are cut when so many are there.
const WINDOW: usize = 1 << 20;

/// Cuts one run of content that is pushed piece by piece.
#[derive(Default)]
pub struct Chunker {
    /// Bytes that are in no chunk yet.
    rest: Vec<u8>,
}

impl Chunker {
    /// Appends content, and calls `each` for each chunk that is complete.
    ///
    /// # Errors
    /// The first one of `each`; the chunks after it are lost.
    pub fn push<E>(
        &mut self,
        bytes: &[u8],
        each: &mut dyn FnMut(Chunk<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        for piece in bytes.chunks(WINDOW) {
            self.rest.extend_from_slice(piece);
            if self.rest.len() >= WINDOW {
                self.cut(MAX_CHUNK, each)?;
            }
        }
        Ok(())
    }

    /// Ends the run: the rest becomes chunks, and the next run can begin.
    ///
    /// # Errors
    /// As [`Chunker::push`].
    pub fn finish<E>(&mut self, each: &mut dyn FnMut(Chunk<'_>) -> Result<(), E>) -> Result<(), E> {
        let cut = self.cut(1, each);
        self.rest.clear();
        cut
    }

    /// Cuts as long as at least `least` bytes are left. With [`MAX_CHUNK`] of them, more content
    /// would not change the cut.
    fn cut<E>(
        &mut self,
        least: usize,
        each: &mut dyn FnMut(Chunk<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = 0;
        let cut = loop {
            let rest = self.rest.get(at..).unwrap_or_default();
            if rest.len() < least {
                break Ok(());
            }
            let window = rest.get(..MAX_CHUNK).unwrap_or(rest);
            let len = FastCDC::new(window, MIN_CHUNK, AVERAGE_CHUNK, MAX_CHUNK)
                .next()
                .map_or(window.len(), |chunk| chunk.length);
            let Some(chunk) = window.get(..len).and_then(Chunk::new) else { break Ok(()) };
            at += len;
            if let Err(error) = each(chunk) {
                break Err(error);
            }
        };
        self.rest.drain(..at.min(self.rest.len()));
        cut
    }
}
