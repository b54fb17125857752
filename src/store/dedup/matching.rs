//! Finding content of a sealed layer that is there already.
//!
//! The content is cut into chunks where the content itself says so (FastCDC), so the same bytes are cut alike wherever they
//! lie. The hash of a chunk proposes where it may be; the bytes decide. What is equal is then followed byte by byte in
//! both directions, over the ends of chunks and files, and the whole blocks within it can be given up. So one chunk that is found
//! is enough to find all that is equal around it, and what stays is about the blocks in which something differs.
//!
//! Always true: everything here reads and compares by addresses, through the maps, and what it gives is a map that
//! leads to disks. Addresses behind the one at which the search stands are decided and do not change: content may be equal to what lies
//! before it in the same pool, and that is where it is then.

use std::collections::{HashMap, VecDeque};

use fastcdc::v2020::FastCDC;

use crate::error::{Attempt, Result};
use crate::store::Store;
use crate::store::content::pool::{BLOCK, block_ceil, block_floor};
use crate::store::content::remap::{Map, Place, Run};
use crate::store::dedup::chunks::{Chunk, Chunks, tag_of};
use crate::types::{ByteRange, LayerId};

/// Bytes of a chunk: at least (but at the end of a file), on the average, at most.
const CHUNK: (usize, usize, usize) = (1 << 10, 4 << 10, 32 << 10);
/// Bytes that are read at once.
const STEP: usize = 1 << 20;
/// Bytes that are compared at once.
const COMPARED: usize = 64 << 10;
/// Bytes that are followed at once; then it is asked whether to go on.
const FOLLOWED: u64 = 8 << 20;
/// Places that are looked at for one chunk.
const MOST_PLACES: usize = 8;
/// Chunks of a layer that are known in memory before they go into the table.
const MOST_FRESH: usize = 1 << 16;

/// A part of a file whose content may be found elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// At which addresses of the layer's pool it is.
    pub range: ByteRange,
    /// Where the content was that it took the place of: a guess.
    pub before: Option<(LayerId, u64)>,
}

/// What was found of a layer.
#[derive(Default)]
pub struct Found {
    /// What is elsewhere.
    pub map: Map,
    /// Blocks that hold only zeros, as a hole would.
    pub zeros: Vec<ByteRange>,
    /// Chunks that are nowhere else and not in the table yet.
    chunks: Vec<Chunk>,
}

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// Equal content, and chunks for those who come later.
    Everything,
    /// Only chunks: a layer to which others lead, or with a map, stays as it is.
    Chunks,
}

/// Looks through the content of one layer.
pub struct Finder<'a> {
    store: &'a Store,
    table: &'a mut Chunks,
    layer: LayerId,
    search: Search,
    /// Bytes of the pool from `window_at` on.
    window: Vec<u8>,
    window_at: u64,
    /// Where the pool ends.
    end: u64,
    /// Everything before is decided.
    floor: u64,
    /// Chunks behind the floor that were found nowhere.
    loose: VecDeque<(ByteRange, u64)>,
    /// Decided chunks of this layer that are nowhere else, by their tags.
    fresh: HashMap<u64, u64>,
    /// Where the content was that the part took the place of, and where that before was found: how far its address is from ours.
    guesses: [Option<(LayerId, i64)>; 2],
    /// Bytes that were read since it was asked whether to go on.
    worked: usize,
    /// For comparing.
    buffers: (Vec<u8>, Vec<u8>),
    found: Found,
}

/// Bytes from `start` on that are equal to those at an address.
struct Equal {
    range: ByteRange,
    layer: LayerId,
    offset: u64,
}

impl<'a> Finder<'a> {
    /// Begins with a sealed layer.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn new(
        store: &'a Store,
        table: &'a mut Chunks,
        layer: LayerId,
        search: Search,
    ) -> Result<Finder<'a>> {
        let end = store.pool_end(layer)?;
        Ok(Finder {
            store,
            table,
            layer,
            search,
            window: Vec::new(),
            window_at: 0,
            end,
            floor: 0,
            loose: VecDeque::new(),
            fresh: HashMap::new(),
            guesses: [None; 2],
            worked: 0,
            buffers: (vec![0; COMPARED], vec![0; COMPARED]),
            found: Found::default(),
        })
    }

    /// What was found. Its chunks are in the table: the table only proposes, so it does not matter what becomes of the rest.
    ///
    /// # Errors
    /// As [`Store::add_chunks`].
    pub fn finish(mut self) -> Result<Found> {
        self.settle(u64::MAX);
        self.list_chunks()?;
        Ok(self.found)
    }

    fn list_chunks(&mut self) -> Result<()> {
        self.fresh.clear();
        self.store.add_chunks(self.table, std::mem::take(&mut self.found.chunks))
    }

    /// Looks for a part, which begins behind all parts before. `go` is asked now and then whether to go on; false if it said no.
    ///
    /// # Errors
    /// As pread(2), and damage of maps.
    pub fn look_at(&mut self, part: &Part, go: &dyn Fn() -> bool) -> Result<bool> {
        let mut at = part.range.start.max(self.floor);
        let shift = |offset: u64| offset.wrapping_sub(part.range.start).cast_signed();
        self.guesses = [part.before.map(|(layer, offset)| (layer, shift(offset))), None];
        while at < part.range.end {
            if self.worked >= STEP {
                self.worked = 0;
                if !go() {
                    return Ok(false);
                }
            }
            if let Some(next) = self.guess(at)? {
                at = next;
                continue;
            }
            if self.window_ends(at, part.range.end) {
                self.move_window(at)?;
                if self.found.chunks.len() > MOST_FRESH {
                    self.list_chunks()?;
                }
            }
            at = self.step(at, part.range.end)?;
        }
        self.settle(part.range.end);
        Ok(true)
    }

    /// Tries whether it goes on as the content did that was there before, or as what was found last: then no hash is needed, and
    /// where chunks end does not matter. Where the search goes on, if so.
    fn guess(&mut self, at: u64) -> Result<Option<u64>> {
        if self.search == Search::Chunks {
            return Ok(None);
        }
        for (layer, shift) in self.guesses.into_iter().flatten() {
            let Some(offset) = at.checked_add_signed(shift) else { continue };
            let equal = self.follow(at, 0, (layer, offset))?;
            if let Some(next) = self.take(&equal, at)? {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }

    /// Looks at one chunk; gives where the next one begins.
    fn step(&mut self, at: u64, end: u64) -> Result<u64> {
        let chunk = self.chunk(at, end);
        let next = at + chunk.len().max(1) as u64;
        if self.search == Search::Everything && chunk.iter().all(|byte| *byte == 0) {
            let blocks = ByteRange { start: block_ceil(at), end: block_floor(next) };
            if !blocks.is_empty() {
                self.found.zeros.push(blocks);
            }
            self.settle(next);
            return Ok(next);
        }
        let tag = tag_of(&blake3::hash(chunk));
        if self.search == Search::Everything
            && let Some(equal) = self.find(tag, ByteRange { start: at, end: next })?
        {
            return Ok(self.take(&equal, at)?.unwrap_or(next));
        }
        self.loose.push_back((ByteRange { start: at, end: next }, tag));
        // Equal content is followed backwards no further than this.
        self.settle(at.saturating_sub(2 * CHUNK.2 as u64));
        Ok(next)
    }

    fn window_ends(&self, at: u64, end: u64) -> bool {
        let wanted = end.min(at + CHUNK.2 as u64);
        at < self.window_at || wanted > self.window_at + self.window.len() as u64
    }

    fn move_window(&mut self, at: u64) -> Result<()> {
        let mut window = std::mem::take(&mut self.window);
        window.resize(STEP, 0);
        self.worked += STEP;
        let got = self.store.read_at(self.layer, at, &mut window)?;
        // Behind the end of a pool a file reads zeros, should it say that it has something there.
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

    /// Where else the bytes of a chunk are, followed in both directions.
    fn find(&mut self, tag: u64, chunk: ByteRange) -> Result<Option<Equal>> {
        let known = self.fresh.get(&tag).map(|offset| (self.layer, *offset));
        let listed = self.table.find(tag).attempt(|| "look for equal content")?;
        // The newest first: there the content around it is most likely to be equal, too.
        for (layer, offset) in known.into_iter().chain(listed.into_iter().rev()).take(MOST_PLACES) {
            if layer != self.layer && !self.is_sealed(layer) {
                continue;
            }
            let equal = self.follow(chunk.start, chunk.len(), (layer, offset))?;
            if equal.range.end >= chunk.end {
                return Ok(Some(equal));
            }
        }
        Ok(None)
    }

    fn is_sealed(&self, layer: LayerId) -> bool {
        self.store.layer(layer).is_some_and(|info| info.seal.is_some() && info.summed)
    }

    /// What is equal around `at` and an address elsewhere. Backwards only if `least` bytes are equal forwards.
    fn follow(&mut self, at: u64, least: u64, to: (LayerId, u64)) -> Result<Equal> {
        let (layer, offset) = to;
        // In its own pool, content can be where it is decided already that it stays, or where it is then.
        let room = if layer == self.layer { self.floor.saturating_sub(offset) } else { u64::MAX };
        let most = room.min(self.end.saturating_sub(at)).min(FOLLOWED);
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
            return Ok(Equal { range: ByteRange::at(at, 0), layer, offset });
        }
        let back = self.follow_back(at, (layer, offset))?;
        range.start -= back;
        Ok(Equal { range, layer, offset: offset - back })
    }

    /// How many bytes of the two are equal from the first on.
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

    /// How many bytes before `at` are equal to those before an address elsewhere; not beyond the floor.
    fn follow_back(&self, at: u64, to: (LayerId, u64)) -> Result<u64> {
        let most = at.saturating_sub(self.floor).min(to.1).min(2 * CHUNK.2 as u64);
        let len = usize::try_from(most).unwrap_or(0);
        let (mut ours, mut theirs) = (vec![0; len], vec![0; len]);
        let whole = self.store.read_at(self.layer, at - most, &mut ours)? == len
            && self.store.read_at(to.0, to.1 - most, &mut theirs)? == len;
        let equal = ours.iter().rev().zip(theirs.iter().rev()).take_while(|(a, b)| a == b).count();
        Ok(if whole { equal as u64 } else { 0 })
    }

    /// Gives up the blocks of what is equal; where the search goes on, if that is behind `at_least`.
    fn take(&mut self, equal: &Equal, at_least: u64) -> Result<Option<u64>> {
        let start = block_ceil(equal.range.start);
        let end = self.end_of_blocks(equal.range.end)?;
        if start >= end {
            return Ok(None);
        }
        let from = equal.offset + (start - equal.range.start);
        let wanted = ByteRange::at(from, end - start);
        let places = if equal.layer == self.layer {
            self.found.map.places(self.layer, wanted)
        } else {
            self.store.content(equal.layer)?.places(equal.layer, wanted)
        };
        let end = match start + self.stored(&places)? {
            whole if whole == end => end,
            part => block_floor(part),
        };
        if start >= end {
            return Ok(None);
        }
        let mut at = start;
        for place in places {
            let run_end = end.min(at + place.len);
            if run_end > at {
                self.found.map.push(Run {
                    start: at,
                    end: run_end,
                    layer: place.layer,
                    offset: place.offset,
                });
            }
            at = run_end;
        }
        // What was loose before it stays; what is within it is elsewhere.
        while self.loose.back().is_some_and(|(chunk, _)| chunk.start >= equal.range.start) {
            self.loose.pop_back();
        }
        self.settle(end);
        // Zeros, where it goes on equal to a hole: they are found to be zeros.
        let next = if end < block_floor(equal.range.end) { end } else { equal.range.end };
        let shift = equal.offset.wrapping_sub(equal.range.start).cast_signed();
        let [before, _] = self.guesses;
        self.guesses = [before, Some((equal.layer, shift)).filter(|last| before != Some(*last))];
        Ok(Some(next).filter(|next| *next > at_least))
    }

    /// How many bytes from the first on are stored at these places. A hole in a pool reads as zeros, but may be what was given back of something
    /// else; nobody is to refer to it again.
    fn stored(&self, places: &[Place]) -> Result<u64> {
        let mut len = 0;
        for place in places {
            let range = ByteRange::at(place.offset, place.len);
            let attempt = || format!("read the pool of layer {}", place.layer);
            let stored = self.store.content(place.layer)?.stored(range).attempt(attempt)?;
            len += stored;
            if stored < place.len {
                break;
            }
        }
        Ok(len)
    }

    /// The end of what can be given up: behind it, a block has to hold nothing but zeros, or stays.
    fn end_of_blocks(&self, end: u64) -> Result<u64> {
        let mut rest = vec![0; usize::try_from(block_ceil(end) - end).unwrap_or(0)];
        let got = self.store.read_at(self.layer, end, &mut rest)?;
        let is_free = rest.iter().take(got).all(|byte| *byte == 0);
        Ok(if is_free { end } else { block_floor(end) })
    }

    /// Everything before `floor` is decided.
    fn settle(&mut self, floor: u64) {
        while let Some((chunk, tag)) =
            self.loose.front().copied().filter(|(chunk, _)| chunk.end <= floor)
        {
            self.loose.pop_front();
            self.found.chunks.push(Chunk { tag, layer: self.layer, offset: chunk.start });
            self.fresh.insert(tag, chunk.start);
        }
        self.floor = self.floor.max(floor);
    }
}
