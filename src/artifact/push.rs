//! Pushes a state: the chunks that the packs of the repository lack become new packs.
//!
//! * The packs of the parent are known by their indexes. A chunk that they have is not sent.
//! * Packs are written in the order of the description, so the same state and the same parent give
//!   the same packs. A push that is repeated after a cut finds those that arrived.
//! * Above [`MANY_PACKS`] packs, the chunks of the smallest ones are packed anew. So their number
//!   does not grow with the number of pushes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Builder;

use parking_lot::Mutex;
use tempfile::{NamedTempFile, TempPath};

use super::cache::Cache;
use super::manifest::{About, Artifact, MANIFEST, PackBlob};
use super::packs;
use super::pull::{artifact, no_such};
use crate::error::{Attempt, Error, Kind, Result};
use crate::registry::{
    Descriptor, Digest as BlobDigest, Hasher, Meter, Pushed, Repository, Version,
};
use crate::store::archive::edits::Edits;
use crate::store::archive::history::History;
use crate::store::archive::tree_blob::TreeBlob;
use crate::store::archive::writer::{HEAD, PackWriter};
use crate::store::archive::{Chunk, Digest, Flaw};
use crate::types::ByteRange;

/// With more packs than this, the smallest are packed anew.
const MANY_PACKS: usize = 64;
/// So many are left as they are then.
const FEW_PACKS: usize = 32;

/// The packs that are uploaded at once: while the registry syncs one, it receives another.
const UPLOADS: usize = 3;
/// The most packs that wait for the upload, so that a slow registry does not fill the disk.
const WAITING_PACKS: usize = 1;

/// A push that has found its parent.
pub struct Push<'a> {
    repository: &'a Repository,
    cache: &'a Cache,
    tag: String,
    /// The packs of the repository, and the one that has a chunk.
    packs: Vec<PackBlob>,
    known: HashMap<Digest, u32>,
    /// The artifact that the tag names now, and its manifest.
    at_tag: Option<(Artifact, BlobDigest)>,
    parent: Option<Artifact>,
}

/// The outcome of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushOutcome {
    /// The checkpoint.
    pub artifact: Artifact,
    /// The digest of its manifest.
    pub manifest: BlobDigest,
    /// The blobs that were uploaded, and their bytes.
    pub blobs: u64,
    /// Bytes of these blobs.
    pub bytes: u64,
    /// Whether the tag named the same artifact before.
    pub was_there: bool,
}

/// A pack that is ready to be uploaded.
struct Ready {
    /// Its place among the new packs.
    number: usize,
    file: TempPath,
    pack: PackBlob,
    index: Vec<u8>,
}

impl<'a> Push<'a> {
    /// Finds the parent and reads the indexes of its packs. It is `parent` if that is given, else
    /// what the store pushed or pulled last in the repository, else what the tag names. `key` names
    /// the store and the repository.
    ///
    /// # Errors
    /// The registry does not answer or refuses; `parent` is missing; the tag names something else
    /// than a checkpoint.
    pub fn begin(
        (repository, cache): (&'a Repository, &'a Cache),
        tag: &str,
        parent: Option<&Version>,
        key: &str,
        meter: &Meter<'_>,
    ) -> Result<Push<'a>> {
        let at_tag = artifact(repository, &Version::Tag(tag.to_owned())).map_err(|error| {
            error.hint("choose another tag, which does not exist or names a checkpoint")
        })?;
        let parent = match (parent, cache.parent(key)) {
            (Some(version), _) => {
                Some(artifact(repository, version)?.ok_or_else(|| no_such(version))?)
            }
            (None, Some(last)) => artifact(repository, &Version::Digest(last))?,
            (None, None) => None,
        };
        let mut packs = Vec::<PackBlob>::new();
        let both = parent.iter().chain(&at_tag);
        for pack in both.flat_map(|(artifact, _)| &artifact.packs) {
            if packs.iter().all(|known| known.name != pack.name) {
                packs.push(pack.clone());
            }
        }
        packs::check_size(&packs)?;
        if packs.len() > MANY_PACKS {
            packs.sort_by_key(|pack| std::cmp::Reverse(pack.blob.size));
            packs.truncate(FEW_PACKS);
        }
        let mut known = HashMap::new();
        for (number, pack) in (0..).zip(&packs) {
            for entry in packs::index(repository, cache, pack, meter)?.chunks() {
                known.entry(entry.chunk.digest).or_insert(number);
            }
        }
        let parent = parent.or_else(|| at_tag.clone()).map(|(artifact, _)| artifact);
        Ok(Push { repository, cache, tag: tag.to_owned(), packs, known, at_tag, parent })
    }

    /// Takes the chunks of a state from `take`, and uploads those that are missing. `take` calls
    /// its argument for each chunk, and runs beside the upload.
    ///
    /// # Errors
    /// Those of `take`, of the cache, and of the registry, whose error counts first.
    pub fn upload<T: Send>(
        &self,
        meter: &Meter<'_>,
        take: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<T> + Send,
    ) -> Result<(T, Pushing)> {
        let (to, ready) = sync_channel(WAITING_PACKS);
        // The last uploader drops the receiver. Then the packer waits no longer.
        let ready = Arc::new(Mutex::new(ready));
        let is_over = AtomicBool::new(false);
        let pushing = Mutex::new(Pushing::default());
        let (taken, used) = std::thread::scope(|scope| {
            let mut uploaders = Vec::new();
            for _ in 0..UPLOADS {
                let (ready, pushing, is_over) = (Arc::clone(&ready), &pushing, &is_over);
                let upload = move || self.upload_packs(&ready, pushing, is_over, meter);
                let thread = Builder::new().name("upload".to_owned()).spawn_scoped(scope, upload);
                uploaders.push(thread.attempt(|| "start a thread that uploads packs")?);
            }
            drop(ready);
            let mut packer = Packer::new(self, to, &is_over);
            let packed = take(&mut |bytes| packer.take(bytes));
            let packed = packed.and_then(|taken| Ok((taken, packer.finish()?)));
            if packed.is_err() {
                is_over.store(true, Ordering::SeqCst);
            }
            let stopped = |_| Error::new(Kind::Failed, "upload the packs", "a thread has stopped");
            let uploaded = uploaders.into_iter().map(|one| one.join().map_err(stopped)?);
            // All are waited for.
            let uploaded: Vec<Result<()>> = uploaded.collect();
            uploaded.into_iter().collect::<Result<()>>().and(packed)
        })?;
        let used = used.into_iter().filter_map(|number| self.packs.get(number as usize));
        let mut pushing = pushing.into_inner();
        pushing.new.sort_by_key(|(number, _)| *number);
        let new = pushing.new.drain(..).map(|(_, pack)| pack);
        pushing.packs = used.cloned().chain(new).collect();
        Ok((taken, pushing))
    }

    /// Uploads packs until there are no more, or an upload fails.
    fn upload_packs(
        &self,
        ready: &Mutex<Receiver<Ready>>,
        pushing: &Mutex<Pushing>,
        is_over: &AtomicBool,
        meter: &Meter<'_>,
    ) -> Result<()> {
        loop {
            let next = ready.lock().recv();
            let Ok(next) = next else { return Ok(()) };
            if is_over.load(Ordering::SeqCst) {
                return Ok(());
            }
            // After an error the packer stops, and no other upload begins. Those under way end.
            self.upload_pack(next, pushing, meter)
                .inspect_err(|_| is_over.store(true, Ordering::SeqCst))?;
        }
    }

    fn upload_bytes(
        &self,
        bytes: Vec<u8>,
        pushing: &mut Pushing,
        meter: &Meter<'_>,
    ) -> Result<Descriptor> {
        let blob = Descriptor::of(&bytes);
        meter.expect(blob.size);
        let mut source = io::Cursor::new(bytes);
        let pushed = self.repository.push_blob(&blob, &mut source, None, meter)?;
        pushing.count(pushed, &blob);
        Ok(blob)
    }

    fn upload_pack(&self, ready: Ready, pushing: &Mutex<Pushing>, meter: &Meter<'_>) -> Result<()> {
        let attempt = || "read a pack that was written";
        let mut file = OpenOptions::new().read(true).open(&ready.file).attempt(attempt)?;
        meter.expect(ready.pack.blob.size);
        let pushed = self.repository.push_blob(&ready.pack.blob, &mut file, None, meter)?;
        self.cache.keep_index(&ready.pack.name, &ready.index);
        let mut pushing = pushing.lock();
        pushing.count(pushed, &ready.pack.blob);
        pushing.new.push((ready.number, ready.pack));
        Ok(())
    }

    /// Uploads the history and the tree blob, and then lets the tag name the artifact. `key` as in
    /// [`Push::begin`].
    ///
    /// # Errors
    /// Those of the registry. Then the tag names what it named before.
    pub fn finish(
        self,
        mut pushing: Pushing,
        state: &Described<'_>,
        about: About,
        key: &str,
        meter: &Meter<'_>,
    ) -> Result<PushOutcome> {
        let Described { blob, history, edits, is_thin } = *state;
        let count = history.checkpoints.len() as u64;
        let encoded = history.encode();
        let encoded = encoded
            .map_err(|flaw| Error::new(Kind::Failed, "push the history", flaw.0))
            .map(|bytes| (count > 0).then_some(bytes))?;
        let history = match encoded {
            Some(bytes) => Some((self.upload_bytes(bytes, &mut pushing, meter)?, count)),
            None => None,
        };
        let edits = match edits {
            Some(edits) => {
                let encoded = edits.encode();
                let refused = |flaw: Flaw| Error::new(Kind::Failed, "push the edits", flaw.0);
                let encoded = encoded.map_err(refused)?;
                Some((self.upload_bytes(encoded, &mut pushing, meter)?, edits.count()))
            }
            None => None,
        };
        let tree_blob = self.upload_bytes(blob.encode(), &mut pushing, meter)?;
        let tree = blob.digest();
        // A state that is pushed again is no parent of itself.
        let parent = self.parent.and_then(|parent| match parent.tree == tree {
            true => parent.about.parent,
            false => Some(parent.tree),
        });
        let about = About { parent, ..about };
        let (entries, packs) = (blob.entries(), pushing.packs);
        let artifact = Artifact { about, entries, tree, is_thin, tree_blob, history, edits, packs };
        let encoded = artifact.encode()?;
        let manifest = BlobDigest::of(&encoded);
        let was_there = self.at_tag.is_some_and(|(_, digest)| digest == manifest);
        if !was_there {
            self.repository.push_manifest(&Version::Tag(self.tag), MANIFEST, &encoded)?;
        }
        self.cache.set_parent(key, &manifest);
        self.cache.prune();
        let Pushing { blobs, bytes, .. } = pushing;
        Ok(PushOutcome { artifact, manifest, blobs, bytes, was_there })
    }
}

/// One state, as a push has described it.
#[derive(Clone, Copy)]
pub struct Described<'a> {
    /// The state.
    pub blob: &'a TreeBlob,
    /// The checkpoints that lead to it.
    pub history: &'a History,
    /// The edits of its head.
    pub edits: Option<&'a Edits>,
    /// Whether the descriptions rely on files of the base.
    pub is_thin: bool,
}

/// The blobs that were uploaded so far.
#[derive(Default)]
pub struct Pushing {
    /// The packs that were uploaded, with their places.
    new: Vec<(usize, PackBlob)>,
    /// All packs of the state, when all are uploaded.
    packs: Vec<PackBlob>,
    blobs: u64,
    bytes: u64,
}

impl Pushing {
    fn count(&mut self, pushed: Pushed, blob: &Descriptor) {
        if pushed == Pushed::Uploaded {
            self.blobs += 1;
            self.bytes += blob.size;
        }
    }
}

/// Writes a file, and computes the digest of its bytes.
struct Hashed {
    file: NamedTempFile<File>,
    buffer: Vec<u8>,
    hasher: Hasher,
    len: u64,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        if self.buffer.len() >= 1 << 20 {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

/// Packs the chunks that the repository lacks.
struct Packer<'p> {
    push: &'p Push<'p>,
    to: SyncSender<Ready>,
    open: Option<PackWriter<Hashed>>,
    /// The number of packs that were written.
    written: usize,
    /// The chunks of the new packs.
    new: HashSet<Digest>,
    /// The packs of the repository that the state needs.
    used: BTreeSet<u32>,
    /// Whether the upload has ended.
    is_over: &'p AtomicBool,
}

fn ended() -> Error {
    Error::new(Kind::Failed, "write the packs", "the upload has ended")
}

fn writing() -> &'static str {
    "write a pack in the cache directory"
}

impl<'p> Packer<'p> {
    fn new(push: &'p Push<'p>, to: SyncSender<Ready>, is_over: &'p AtomicBool) -> Packer<'p> {
        let (new, used) = (HashSet::new(), BTreeSet::new());
        Packer { push, to, open: None, written: 0, new, used, is_over }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<()> {
        if self.is_over.load(Ordering::SeqCst) {
            return Err(ended());
        }
        let chunk = Chunk::new(bytes);
        let chunk = chunk.ok_or_else(|| Error::damage("read the state", "a malformed chunk"))?;
        if let Some(pack) = self.push.known.get(&chunk.digest()) {
            self.used.insert(*pack);
            return Ok(());
        }
        if !self.new.insert(chunk.digest()) {
            return Ok(());
        }
        let pack = match &mut self.open {
            Some(pack) => pack,
            none => none.insert(PackWriter::new(self.push.cache.new_pack()?).attempt(writing)?),
        };
        pack.add(chunk).attempt(writing)?;
        if pack.is_full() { self.end_pack() } else { Ok(()) }
    }

    fn end_pack(&mut self) -> Result<()> {
        let Some(pack) = self.open.take() else { return Ok(()) };
        let (out, name, index) = pack.finish().attempt(writing)?;
        let bytes = index.encode();
        let blob = Descriptor { digest: out.hasher.finish(), size: out.len };
        let index = ByteRange::at(HEAD + index.stored(), bytes.len() as u64);
        let pack = PackBlob { blob, name, index };
        let file = out.file.into_temp_path();
        let ready = Ready { number: self.written, file, pack, index: bytes };
        self.written += 1;
        self.to.send(ready).map_err(|_| ended())
    }

    fn finish(mut self) -> Result<BTreeSet<u32>> {
        self.end_pack()?;
        Ok(self.used)
    }
}

impl Cache {
    fn new_pack(&self) -> Result<Hashed> {
        let file = self.new_file().attempt(writing)?;
        Ok(Hashed { file, buffer: Vec::new(), hasher: Hasher::default(), len: 0 })
    }
}
