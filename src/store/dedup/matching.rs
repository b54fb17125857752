//! Finds content of one sealed layer that the store already has.
//!
//! Content is cut into chunks at boundaries that depend on the content itself (FastCDC). So equal
//! bytes are cut alike wherever they are. The hash of a chunk proposes an address, and a comparison
//! of bytes decides. A match is then extended byte by byte in both directions, across the ends of
//! chunks and files. One chunk that is found is enough to find all equal bytes around it. The whole
//! blocks within a match can be freed.
//!
//! * The search reads by address, through the remaps. Its result is a remap that points to stored
//!   bytes.
//! * Addresses below the floor of the search are decided and do not change. So content may match
//!   earlier content of the same pool.

use std::collections::{HashMap, VecDeque};

use fastcdc::v2020::FastCDC;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::content::pool::{BLOCK, block_ceil, block_floor};
use crate::store::content::remap::{PoolRange, Remap, Run};
use crate::store::dedup::chunks::{Chunk, ChunkTable, tag_of};
use crate::types::{ByteRange, LayerId};

/// Length of a chunk in bytes: minimum (except at the end of a file), average, and maximum.
const CHUNK: (usize, usize, usize) = (1 << 10, 4 << 10, 32 << 10);
/// Bytes that are read into the window at once.
const WINDOW: usize = 1 << 20;
/// Bytes that are compared at once.
const COMPARED: usize = 64 << 10;
/// A match is extended forwards by this many bytes at a time, so that the caller can stop the
/// search.
const MOST_EXTENDED: u64 = 8 << 20;
/// A match is extended backwards by at most this many bytes.
const MOST_BACK: u64 = 2 * CHUNK.2 as u64;
/// How many candidates are compared for one chunk.
const MOST_CANDIDATES: usize = 8;
/// How many new chunks of a layer are kept in memory before they go into the table.
const MOST_UNLISTED: usize = 1 << 16;

/// A part of a file to search for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its addresses.
    pub range: ByteRange,
    /// The source of the content that it replaced: a hint where equal bytes may be.
    pub before: Option<(LayerId, u64)>,
}

/// The result of a search.
#[derive(Default)]
pub struct Matches {
    /// Where equal bytes are stored.
    pub remap: Remap,
    /// Blocks of zeros. A hole would read the same.
    pub zeros: Vec<ByteRange>,
    /// Chunks without a match that are not in the table yet.
    chunks: Vec<Chunk>,
}

/// The content to search for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// Find matches, and add chunks to the table for later searches.
    Matches,
    /// Only add chunks to the table. A layer that has a remap, or that remaps point to, keeps its
    /// content.
    IndexOnly,
}

/// Searches the content of one layer.
pub struct Matcher<'a> {
    store: &'a Store,
    table: &'a mut ChunkTable,
    layer: LayerId,
    search: Search,
    /// Bytes of the layer from address `window_at` on.
    window: Vec<u8>,
    window_at: u64,
    /// The end of the addresses of the layer.
    end: u64,
    /// Every address below is decided.
    floor: u64,
    /// Chunks above the floor that have no match so far.
    pending: VecDeque<(ByteRange, u64)>,
    /// Addresses of decided chunks of this layer without a match, by tag. They are not all in the
    /// table yet.
    unlisted: HashMap<u64, u64>,
    /// Where the search expects the content to continue: after the content that the part replaced,
    /// and after the last match. Each is a layer and the distance from our address to the address
    /// there.
    guesses: [Option<(LayerId, i64)>; 2],
    /// Bytes that were read since `keep_going` was last called.
    worked: usize,
    buffers: (Vec<u8>, Vec<u8>),
    found: Matches,
}

/// A range of our addresses whose bytes equal those at an address of `layer`.
struct Match {
    range: ByteRange,
    layer: LayerId,
    offset: u64,
}

impl<'a> Matcher<'a> {
    /// Begins the search of a sealed layer.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn new(
        store: &'a Store,
        table: &'a mut ChunkTable,
        layer: LayerId,
        search: Search,
    ) -> Result<Matcher<'a>> {
        let end = store.pool_end(layer)?;
        Ok(Matcher {
            store,
            table,
            layer,
            search,
            window: Vec::new(),
            window_at: 0,
            end,
            floor: 0,
            pending: VecDeque::new(),
            unlisted: HashMap::new(),
            guesses: [None; 2],
            worked: 0,
            buffers: (vec![0; COMPARED], vec![0; COMPARED]),
            found: Matches::default(),
        })
    }

    /// Ends the search and adds its chunks to the table. The caller may drop the result: the table
    /// only proposes.
    ///
    /// # Errors
    /// As [`Store::add_chunks`].
    pub fn finish(mut self) -> Result<Matches> {
        self.raise_floor(u64::MAX);
        self.list_chunks()?;
        Ok(self.found)
    }

    fn list_chunks(&mut self) -> Result<()> {
        self.unlisted.clear();
        self.store.add_chunks(self.table, std::mem::take(&mut self.found.chunks))
    }

    /// Searches for a part. Parts come in order of their addresses. Calls `keep_going` after each
    /// MiB or so of work, and returns false if it says no.
    ///
    /// # Errors
    /// As pread(2), and damage of remaps.
    pub fn search_part(&mut self, part: &Part, keep_going: &dyn Fn() -> bool) -> Result<bool> {
        let mut at = part.range.start.max(self.floor);
        let shift = |offset: u64| offset.wrapping_sub(part.range.start).cast_signed();
        self.guesses = [part.before.map(|(layer, offset)| (layer, shift(offset))), None];
        while at < part.range.end {
            if self.worked >= WINDOW {
                self.worked = 0;
                if !keep_going() {
                    return Ok(false);
                }
            }
            if let Some(next) = self.try_guesses(at)? {
                at = next;
                continue;
            }
            if self.is_outside_window(at, part.range.end) {
                self.move_window(at)?;
                if self.found.chunks.len() > MOST_UNLISTED {
                    self.list_chunks()?;
                }
            }
            at = self.search_chunk(at, part.range.end)?;
        }
        self.raise_floor(part.range.end);
        Ok(true)
    }

    /// Compares with the guesses, which needs no hash and no chunk boundary. Returns the address
    /// where the search goes on, if one of them matches.
    fn try_guesses(&mut self, at: u64) -> Result<Option<u64>> {
        if self.search == Search::IndexOnly {
            return Ok(None);
        }
        for (layer, shift) in self.guesses.into_iter().flatten() {
            let Some(offset) = at.checked_add_signed(shift) else { continue };
            let found = self.extend(at, 0, (layer, offset))?;
            if let Some(next) = self.accept(&found, at)? {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }

    /// Handles the chunk at an address. Returns the address where the search goes on.
    fn search_chunk(&mut self, at: u64, end: u64) -> Result<u64> {
        let chunk = self.chunk(at, end);
        let next = at + chunk.len().max(1) as u64;
        if self.search == Search::Matches && chunk.iter().all(|byte| *byte == 0) {
            let blocks = ByteRange { start: block_ceil(at), end: block_floor(next) };
            if !blocks.is_empty() {
                self.found.zeros.push(blocks);
            }
            self.raise_floor(next);
            return Ok(next);
        }
        let tag = tag_of(&blake3::hash(chunk));
        if self.search == Search::Matches
            && let Some(found) = self.find(tag, ByteRange { start: at, end: next })?
        {
            return Ok(self.accept(&found, at)?.unwrap_or(next));
        }
        self.pending.push_back((ByteRange { start: at, end: next }, tag));
        // No later match is extended back beyond this.
        self.raise_floor(at.saturating_sub(MOST_BACK));
        Ok(next)
    }

    /// Whether the window lacks bytes of the next chunk.
    fn is_outside_window(&self, at: u64, end: u64) -> bool {
        let wanted = end.min(at + CHUNK.2 as u64);
        at < self.window_at || wanted > self.window_at + self.window.len() as u64
    }

    fn move_window(&mut self, at: u64) -> Result<()> {
        let mut window = std::mem::take(&mut self.window);
        window.resize(WINDOW, 0);
        self.worked += WINDOW;
        let got = self.store.read_at(self.layer, at, &mut window)?;
        // An extent beyond the end of the pool reads as zeros.
        if let Some(rest) = window.get_mut(got..) {
            rest.fill(0);
        }
        (self.window, self.window_at) = (window, at);
        Ok(())
    }

    /// The chunk that begins at an address of the window.
    fn chunk(&self, at: u64, end: u64) -> &[u8] {
        let from = usize::try_from(at - self.window_at).unwrap_or(usize::MAX);
        let most = usize::try_from(end - at).unwrap_or(usize::MAX).min(CHUNK.2);
        let bytes = self.window.get(from..).unwrap_or_default();
        let bytes = bytes.get(..most).unwrap_or(bytes);
        let len =
            FastCDC::new(bytes, CHUNK.0, CHUNK.1, CHUNK.2).next().map_or(bytes.len(), |c| c.length);
        bytes.get(..len).unwrap_or(bytes)
    }

    /// Finds a match for a chunk, and extends it.
    fn find(&mut self, tag: u64, chunk: ByteRange) -> Result<Option<Match>> {
        let unlisted = self.unlisted.get(&tag).map(|offset| (self.layer, *offset));
        let listed = self.table.find(tag).attempt(|| "look for equal content")?;
        // The newest first: the content around it is most likely to match, too.
        let candidates = unlisted.into_iter().chain(listed.into_iter().rev());
        for (layer, offset) in candidates.take(MOST_CANDIDATES) {
            if layer != self.layer && !self.is_sealed(layer) {
                continue;
            }
            let found = self.extend(chunk.start, chunk.len(), (layer, offset))?;
            if found.range.end >= chunk.end {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn is_sealed(&self, layer: LayerId) -> bool {
        self.store.layer(layer).is_some_and(|info| info.seal.is_some() && info.summed)
    }

    /// The largest match around the address `at` and an address elsewhere. It is empty if fewer
    /// than `least` bytes match forwards.
    fn extend(&mut self, at: u64, least: u64, to: (LayerId, u64)) -> Result<Match> {
        let (layer, offset) = to;
        // In its own pool, only addresses below the floor have a final location.
        let room = if layer == self.layer { self.floor.saturating_sub(offset) } else { u64::MAX };
        let most = room.min(self.end.saturating_sub(at)).min(MOST_EXTENDED);
        let mut len = 0;
        let mut step = if least == 0 { BLOCK as usize } else { CHUNK.2 };
        while len < most {
            let wanted = usize::try_from(most - len).unwrap_or(usize::MAX).min(step);
            let equal = self.compare(at + len, (layer, offset + len), wanted)?;
            len += equal as u64;
            if equal < wanted {
                break;
            }
            step = COMPARED;
        }
        let mut range = ByteRange::at(at, len);
        if len == 0 || len < least {
            return Ok(Match { range: ByteRange::at(at, 0), layer, offset });
        }
        let back = self.equal_before(at, (layer, offset))?;
        range.start -= back;
        Ok(Match { range, layer, offset: offset - back })
    }

    /// How many of `wanted` bytes are equal from the first on.
    fn compare(&mut self, at: u64, to: (LayerId, u64), wanted: usize) -> Result<usize> {
        let (ours, theirs) = &mut self.buffers;
        let (Some(ours), Some(theirs)) = (ours.get_mut(..wanted), theirs.get_mut(..wanted)) else {
            return Ok(0);
        };
        self.worked += wanted;
        let ours_len = self.store.read_at(self.layer, at, ours)?;
        let theirs_len = self.store.read_at(to.0, to.1, theirs)?;
        let len = ours_len.min(theirs_len);
        if len == wanted && ours == theirs {
            return Ok(len);
        }
        Ok(ours.iter().zip(theirs.iter()).take(len).take_while(|(a, b)| a == b).count())
    }

    /// How many bytes before `at` equal those before an address elsewhere; not beyond the floor.
    fn equal_before(&self, at: u64, to: (LayerId, u64)) -> Result<u64> {
        let most = at.saturating_sub(self.floor).min(to.1).min(MOST_BACK);
        let len = usize::try_from(most).unwrap_or(0);
        let (mut ours, mut theirs) = (vec![0; len], vec![0; len]);
        let is_whole = self.store.read_at(self.layer, at - most, &mut ours)? == len
            && self.store.read_at(to.0, to.1 - most, &mut theirs)? == len;
        let equal = ours.iter().rev().zip(theirs.iter().rev()).take_while(|(a, b)| a == b).count();
        Ok(if is_whole { equal as u64 } else { 0 })
    }

    /// Adds the whole blocks of a match to the remap. Returns the address where the search goes on,
    /// or `None` if no block can be freed or that address is not after `at_least`.
    fn accept(&mut self, found: &Match, at_least: u64) -> Result<Option<u64>> {
        let start = block_ceil(found.range.start);
        let end = self.end_of_blocks(found.range.end)?;
        if start >= end {
            return Ok(None);
        }
        let from = found.offset + (start - found.range.start);
        let wanted = ByteRange::at(from, end - start);
        let located = if found.layer == self.layer {
            self.found.remap.locate(self.layer, wanted)
        } else {
            self.store.content(found.layer)?.locate(found.layer, wanted)
        };
        let end = match start + self.stored_len(&located)? {
            whole if whole == end => end,
            part => block_floor(part),
        };
        if start >= end {
            return Ok(None);
        }
        let mut at = start;
        for range in located {
            let run_end = end.min(at + range.len);
            if run_end > at {
                self.found.remap.push(Run {
                    start: at,
                    end: run_end,
                    layer: range.layer,
                    offset: range.offset,
                });
            }
            at = run_end;
        }
        // Chunks within the match are remapped; those before it stay.
        while self.pending.back().is_some_and(|(chunk, _)| chunk.start >= found.range.start) {
            self.pending.pop_back();
        }
        self.raise_floor(end);
        // If the match goes on over a hole, its zeros are searched again and found to be zeros.
        let next = if end < block_floor(found.range.end) { end } else { found.range.end };
        let shift = found.offset.wrapping_sub(found.range.start).cast_signed();
        let [before, _] = self.guesses;
        self.guesses = [before, Some((found.layer, shift)).filter(|last| before != Some(*last))];
        Ok(Some(next).filter(|next| *next > at_least))
    }

    /// How many bytes from the first on are stored, not holes. A hole reads as zeros, but may be
    /// space that was punched; no new reference may point to it.
    fn stored_len(&self, located: &[PoolRange]) -> Result<u64> {
        let mut len = 0;
        for part in located {
            let range = ByteRange::at(part.offset, part.len);
            let attempt = || format!("read the pool of layer {}", part.layer);
            let stored = self.store.content(part.layer)?.stored_len(range).attempt(attempt)?;
            len += stored;
            if stored < part.len {
                break;
            }
        }
        Ok(len)
    }

    /// The end of the part of a match that can be freed. If it ends inside a block, the rest of
    /// that block must be zeros, or the block stays.
    fn end_of_blocks(&self, end: u64) -> Result<u64> {
        let mut rest = vec![0; usize::try_from(block_ceil(end) - end).unwrap_or(0)];
        let got = self.store.read_at(self.layer, end, &mut rest)?;
        let is_free = rest.iter().take(got).all(|byte| *byte == 0);
        Ok(if is_free { end } else { block_floor(end) })
    }

    /// Decides every address below `floor`: pending chunks there stay, and are indexed.
    fn raise_floor(&mut self, floor: u64) {
        while let Some((chunk, tag)) =
            self.pending.front().copied().filter(|(chunk, _)| chunk.end <= floor)
        {
            self.pending.pop_front();
            self.found.chunks.push(Chunk { tag, layer: self.layer, offset: chunk.start });
            self.unlisted.insert(tag, chunk.start);
        }
        self.floor = self.floor.max(floor);
    }
}
