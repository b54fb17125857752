//! Reads the indexes of packs in a repository, and chunks of these packs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::Builder;

use super::cache::Cache;
use super::manifest::PackBlob;
use super::spool::Spool;
use crate::error::{Attempt, Error, Result};
use crate::registry::{Meter, Repository};
use crate::store::archive::index::{Frame, Index, chunk_in};
use crate::store::archive::writer::HEAD;
use crate::store::archive::{ChunkRef, Digest};
use crate::types::ByteRange;

/// The most bytes of the indexes of one artifact together: those of about 200 GiB of content.
const MAX_INDEXES: u64 = 512 << 20;
/// The most bytes that one request asks for.
const MAX_RANGE: u64 = 8 << 20;
/// The most frames that wait for the spool.
const WAITING_FRAMES: usize = 16;

/// Frames that are wanted, by pack.
pub(super) type Wanted = BTreeMap<usize, BTreeSet<u32>>;

/// A frame that was fetched and verified, with the index of its pack.
type Fetched<'a> = (&'a Index, &'a Frame, Vec<u8>);

/// Reads the index of a pack, from the cache or by a range.
///
/// # Errors
/// The registry does not answer or refuses, or what it sends is no index of this pack.
pub(super) fn index(
    repository: &Repository,
    cache: &Cache,
    pack: &PackBlob,
    meter: &Meter<'_>,
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
        meter: &Meter<'_>,
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

    /// Notes the frame of a chunk.
    ///
    /// # Errors
    /// No pack has the chunk.
    pub(super) fn want(&self, chunk: &ChunkRef, wanted: &mut Wanted) -> Result<()> {
        let Some((pack, frame)) = self.find(&chunk.digest) else {
            let attempt = format!("read chunk {}", chunk.digest);
            return Err(Error::damage(attempt, "no pack of the artifact has it"));
        };
        wanted.entry(pack).or_default().insert(frame);
        Ok(())
    }

    /// Fetches frames, with all their chunks.
    ///
    /// # Errors
    /// The registry does not answer or refuses; what it sends is damaged; and those of the spool.
    pub(super) fn fetch(
        &self,
        repository: &Repository,
        wanted: &Wanted,
        spool: &mut Spool,
        meter: &Meter<'_>,
    ) -> Result<()> {
        let frames = |(pack, frames): (&usize, &BTreeSet<u32>)| {
            let index = self.packs.get(*pack).map(|(_, index)| index);
            let stored = |frame: &u32| Some(index?.frames().get(*frame as usize)?.stored);
            frames.iter().filter_map(stored).map(u64::from).sum::<u64>()
        };
        meter.expect(wanted.iter().map(frames).sum());
        std::thread::scope(|scope| {
            let (to, fetched) = sync_channel(WAITING_FRAMES);
            // After an error here, the thread has no receiver, and ends.
            let fetch = move || {
                if let Err(error) = self.fetch_frames(repository, wanted, &to, meter) {
                    drop(to.send(Err(error)));
                }
            };
            let thread = Builder::new().name("fetch".to_owned()).spawn_scoped(scope, fetch);
            thread.attempt(|| "start a thread that fetches packs")?;
            loop {
                let next = match fetched.try_recv() {
                    Ok(next) => next,
                    Err(_) => {
                        // Frames that were fetched are kept before the wait for more.
                        spool.flush()?;
                        let Ok(next) = fetched.recv() else { return Ok(()) };
                        next
                    }
                };
                let (index, frame, raw): Fetched<'_> = next?;
                for entry in index.chunks_of(frame) {
                    // `open_frame` has compared the digest of each chunk.
                    if let Some(chunk) = chunk_in(&raw, entry) {
                        spool.add(entry.chunk.digest, chunk)?;
                    }
                }
            }
        })
    }

    /// Fetches frames, and passes each to `to`, as long as it has a receiver.
    fn fetch_frames<'a>(
        &'a self,
        repository: &Repository,
        wanted: &Wanted,
        to: &SyncSender<Result<Fetched<'a>>>,
        meter: &Meter<'_>,
    ) -> Result<()> {
        for (pack, frames) in wanted {
            let Some((pack, index)) = self.packs.get(*pack) else { continue };
            for run in runs(index, frames) {
                let bytes = fetch_run(repository, pack, run, meter)?;
                for frame in run {
                    let raw = open(pack, (index, frame), run, &bytes)?;
                    if to.send(Ok((index, frame, raw))).is_err() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
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

/// The bytes of a run.
fn fetch_run(
    repository: &Repository,
    pack: &PackBlob,
    run: &[Frame],
    meter: &Meter<'_>,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let (Some(first), Some(last)) = (run.first(), run.last()) {
        let len = last.offset + u64::from(last.stored) - first.offset;
        let range = ByteRange::at(HEAD + first.offset, len);
        repository.fetch_range(&pack.blob, range, &mut bytes, meter)?;
    }
    Ok(bytes)
}

/// Verifies and decompresses a frame of a run with these bytes.
fn open(
    pack: &PackBlob,
    (index, frame): (&Index, &Frame),
    run: &[Frame],
    bytes: &[u8],
) -> Result<Vec<u8>> {
    let begin = run.first().map_or(0, |first| first.offset);
    let at = usize::try_from(frame.offset - begin).unwrap_or(usize::MAX);
    let stored = bytes.get(at..at.saturating_add(frame.stored as usize)).unwrap_or_default();
    index.open_frame(frame, stored).map_err(|flaw| {
        let at = HEAD + frame.offset;
        Error::damage(format!("read pack {} at offset {at}", pack.blob.digest), flaw.0)
    })
}
