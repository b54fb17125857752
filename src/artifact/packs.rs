//! Reads the indexes of packs in a repository, and chunks of these packs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::cache::Cache;
use super::manifest::PackBlob;
use super::spool::Spool;
use crate::error::{Error, Result};
use crate::registry::{Meter, Repository};
use crate::store::archive::index::{Frame, Index, chunk_in};
use crate::store::archive::writer::HEAD;
use crate::store::archive::{ChunkRef, Digest};
use crate::types::ByteRange;

/// The most bytes of the indexes of one artifact together: those of about 200 GiB of content.
const MAX_INDEXES: u64 = 512 << 20;
/// The most bytes that one request asks for.
const MAX_RANGE: u64 = 8 << 20;

/// Reads the index of a pack, from the cache or by a range.
///
/// # Errors
/// The registry does not answer or refuses, or what it sends is no index of this pack.
pub(super) fn index(
    repository: &Repository,
    cache: &Cache,
    pack: &PackBlob,
    meter: &mut Meter<'_>,
) -> Result<Index> {
    let damage = |why: &str| Error::damage(format!("read pack {}", pack.blob.digest), why);
    let cached = cache.index(&pack.name);
    let is_cached = cached.is_some();
    let bytes = match cached {
        Some(bytes) => bytes,
        None => {
            meter.expect(pack.index.len());
            let mut bytes = Vec::new();
            repository.fetch_range(&pack.blob, pack.index, &mut bytes, meter)?;
            bytes
        }
    };
    if Digest::of(&bytes) != pack.name {
        return Err(damage("its index is not the one that the manifest names"));
    }
    let index = Index::parse(&bytes).map_err(|flaw| damage(&flaw.0))?;
    if HEAD + index.stored() != pack.index.start || bytes.len() as u64 != pack.index.len() {
        return Err(damage("its frames do not end where its index begins"));
    }
    if !is_cached {
        cache.keep_index(&pack.name, &bytes);
    }
    Ok(index)
}

/// Refuses packs with more bytes of indexes than fit in memory.
///
/// # Errors
/// They have more.
pub(super) fn check_size(packs: &[PackBlob]) -> Result<()> {
    let bytes: u64 = packs.iter().map(|pack| pack.index.len()).sum();
    match bytes > MAX_INDEXES {
        false => Ok(()),
        true => Err(Error::damage(
            "read the packs",
            format!("their indexes have {bytes} bytes, more than {} MiB", MAX_INDEXES >> 20),
        )),
    }
}

/// The packs of an artifact with their indexes.
pub(super) struct Packs {
    packs: Vec<(PackBlob, Index)>,
    /// A pack that has the chunk, by the first eight bytes of its digest.
    places: HashMap<u64, u32>,
}

fn prefix(digest: &Digest) -> u64 {
    digest.0.first_chunk::<8>().map_or(0, |first| u64::from_le_bytes(*first))
}

impl Packs {
    /// Reads the indexes of all packs.
    ///
    /// # Errors
    /// As [`index`].
    pub(super) fn open(
        repository: &Repository,
        cache: &Cache,
        packs: &[PackBlob],
        meter: &mut Meter<'_>,
    ) -> Result<Packs> {
        check_size(packs)?;
        let mut all = Packs { packs: Vec::new(), places: HashMap::new() };
        for (number, pack) in (0..).zip(packs) {
            let index = index(repository, cache, pack, meter)?;
            for entry in index.chunks() {
                all.places.entry(prefix(&entry.chunk.digest)).or_insert(number);
            }
            all.packs.push((pack.clone(), index));
        }
        Ok(all)
    }

    /// The pack and the frame of it that have a chunk.
    fn find(&self, digest: &Digest) -> Option<(usize, u32)> {
        let first = *self.places.get(&prefix(digest))? as usize;
        let frame_in = |number: usize| {
            let entry = self.packs.get(number)?.1.find(digest)?;
            Some((number, entry.frame))
        };
        // Two digests with the same beginning: only a search tells where the other one is.
        frame_in(first).or_else(|| (0..self.packs.len()).find_map(frame_in))
    }

    /// Whether a pack has a chunk.
    pub(super) fn has(&self, digest: &Digest) -> bool {
        self.find(digest).is_some()
    }

    /// Fetches those of `wanted` that the spool lacks, with all other chunks of their frames.
    ///
    /// # Errors
    /// No pack has a chunk; the registry does not answer or refuses; what it sends is damaged; and
    /// those of the spool.
    pub(super) fn fetch(
        &self,
        repository: &Repository,
        wanted: impl Iterator<Item = ChunkRef>,
        spool: &mut Spool,
        meter: &mut Meter<'_>,
    ) -> Result<()> {
        let mut missing = BTreeMap::<usize, BTreeSet<u32>>::new();
        for chunk in wanted.filter(|chunk| !spool.has(&chunk.digest)) {
            let Some((pack, frame)) = self.find(&chunk.digest) else {
                let attempt = format!("read chunk {}", chunk.digest);
                return Err(Error::damage(attempt, "no pack of the artifact has it"));
            };
            missing.entry(pack).or_default().insert(frame);
        }
        let frames = |(pack, frames): (&usize, &BTreeSet<u32>)| {
            let index = self.packs.get(*pack).map(|(_, index)| index);
            let stored = |frame: &u32| Some(index?.frames().get(*frame as usize)?.stored);
            frames.iter().filter_map(stored).map(u64::from).sum::<u64>()
        };
        meter.expect(missing.iter().map(frames).sum());
        for (pack, frames) in &missing {
            let Some((blob, index)) = self.packs.get(*pack) else { continue };
            for run in runs(index, frames) {
                fetch_run(repository, (blob, index), run, spool, meter)?;
            }
        }
        spool.flush()
    }
}

/// Groups frames that lie back to back into runs of at most [`MAX_RANGE`] bytes.
fn runs<'i>(index: &'i Index, frames: &BTreeSet<u32>) -> Vec<&'i [Frame]> {
    let mut runs = Vec::new();
    let (mut first, mut end, mut bytes) = (0, 0, 0);
    let mut close = |first: usize, end: usize| {
        runs.extend(index.frames().get(first..end).filter(|run| !run.is_empty()));
    };
    for frame in frames {
        let number = *frame as usize;
        let stored = index.frames().get(number).map_or(0, |frame| u64::from(frame.stored));
        if number != end || bytes + stored > MAX_RANGE {
            close(first, end);
            (first, bytes) = (number, 0);
        }
        end = number + 1;
        bytes += stored;
    }
    close(first, end);
    runs
}

fn fetch_run(
    repository: &Repository,
    (pack, index): (&PackBlob, &Index),
    run: &[Frame],
    spool: &mut Spool,
    meter: &mut Meter<'_>,
) -> Result<()> {
    let (Some(first), Some(last)) = (run.first(), run.last()) else { return Ok(()) };
    let len = last.offset + u64::from(last.stored) - first.offset;
    let mut bytes = Vec::new();
    let range = ByteRange::at(HEAD + first.offset, len);
    repository.fetch_range(&pack.blob, range, &mut bytes, meter)?;
    for frame in run {
        let at = usize::try_from(frame.offset - first.offset).unwrap_or(usize::MAX);
        let stored = bytes.get(at..at.saturating_add(frame.stored as usize)).unwrap_or_default();
        let raw = index.open_frame(frame, stored).map_err(|flaw| {
            let at = HEAD + frame.offset;
            Error::damage(format!("read pack {} at offset {at}", pack.blob.digest), flaw.0)
        })?;
        for entry in index.chunks_of(frame) {
            // `open_frame` has compared the digest of each chunk.
            if let Some(chunk) = chunk_in(&raw, entry) {
                spool.add(entry.chunk.digest, chunk)?;
            }
        }
    }
    spool.flush()
}
