//! Pulls an artifact: first the description, then the chunks that are missing here.

use std::collections::HashSet;
use std::io::{self, Write};

use super::cache::Cache;
use super::manifest::Artifact;
use super::packs::Packs;
use super::spool::Spool;
use crate::error::{Attempt, Error, Kind, Result};
use crate::registry::{Digest as BlobDigest, Meter, Repository, Version};
use crate::store::archive::tree_blob::{Event, Piece, TreeBlob, load, put_event, put_magic};
use crate::store::archive::{Chunk, ChunkRef, ChunkSource};

/// Bytes that are sent to the sandbox at once.
const BUFFER: usize = 256 << 10;

/// A pull in progress.
pub struct Pull<'a> {
    repository: &'a Repository,
    cache: &'a Cache,
    artifact: Artifact,
    manifest: BlobDigest,
    blob: TreeBlob,
    packs: Packs,
    spool: Spool,
}

/// The artifact of a tag or digest, with the digest of its manifest.
///
/// # Errors
/// The registry does not answer or refuses; there is something else; or it is malformed.
pub(super) fn artifact(
    repository: &Repository,
    version: &Version,
) -> Result<Option<(Artifact, BlobDigest)>> {
    let Some(found) = repository.manifest(version)? else { return Ok(None) };
    match Artifact::parse(&found.bytes, &format!("the manifest of '{version}'"))? {
        Some(artifact) => Ok(Some((artifact, found.digest))),
        None => Err(Error::new(
            Kind::Failed,
            format!("read the manifest of '{version}'"),
            "it is no checkpoint, but an image or another artifact",
        )),
    }
}

/// The error for a tag or digest that is missing.
pub(super) fn no_such(version: &Version) -> Error {
    Error::new(Kind::NoStore, format!("find '{version}'"), "the repository does not have it")
        .hint("'jailfs ls' lists the tags")
}

impl<'a> Pull<'a> {
    /// Reads the manifest, the tree blob, and the indexes of the packs.
    ///
    /// # Errors
    /// There is no such checkpoint; the registry does not answer or refuses; or what it sends is
    /// malformed or damaged.
    pub fn begin(
        repository: &'a Repository,
        cache: &'a Cache,
        version: &Version,
        meter: &mut Meter<'_>,
    ) -> Result<Pull<'a>> {
        let found = artifact(repository, version)?;
        let (artifact, manifest) = found.ok_or_else(|| no_such(version))?;
        meter.expect(artifact.tree_blob.size);
        let mut bytes = Vec::new();
        repository.fetch_blob(&artifact.tree_blob, &mut bytes, meter)?;
        let damage = |why| Error::damage("read the tree blob", why);
        let blob = TreeBlob::parse(&bytes).map_err(|flaw| damage(flaw.0))?;
        if blob.digest() != artifact.tree || blob.entries() != artifact.entries {
            return Err(damage("it is not the one that the manifest names".to_owned()));
        }
        let packs = Packs::open(repository, cache, &artifact.packs, meter)?;
        let spool = Spool::open(&cache.pull(&artifact.tree))?;
        Ok(Pull { repository, cache, artifact, manifest, blob, packs, spool })
    }

    /// Keeps a chunk of this machine, if the packs have it.
    ///
    /// # Errors
    /// As write(2).
    pub fn offer(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(chunk) = Chunk::new(bytes) else { return Ok(()) };
        match self.packs.has(&chunk.digest()) {
            true => self.spool.add(chunk.digest(), bytes),
            false => Ok(()),
        }
    }

    /// Fetches all chunks that are missing: those of the description, and then those of the files
    /// in it. The order of the entries, and all that names them, is checked on the way.
    ///
    /// # Errors
    /// The registry does not answer or refuses; what it sends is damaged; and those of the cache.
    pub fn fetch(&mut self, meter: &mut Meter<'_>) -> Result<()> {
        let stream = self.blob.chunks().to_vec();
        self.fetch_chunks(stream.into_iter(), meter)?;
        let mut missing = HashSet::<ChunkRef>::new();
        let spool = &self.spool;
        load(&self.blob, spool, &mut |event| {
            if let Event::Piece(Piece::Chunk(chunk)) = event
                && !spool.has(&chunk.digest)
            {
                missing.insert(chunk);
            }
            Ok(())
        })?;
        self.fetch_chunks(missing.into_iter(), meter)
    }

    fn fetch_chunks(
        &mut self,
        wanted: impl Iterator<Item = ChunkRef>,
        meter: &mut Meter<'_>,
    ) -> Result<()> {
        self.packs.fetch(self.repository, wanted, &mut self.spool, meter)
    }

    /// Writes the description, in which the bytes of each chunk follow its name.
    ///
    /// # Errors
    /// Those of `write`, and damage of the cache.
    pub fn write(&self, write: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> Result<()> {
        let mut buffer = Vec::with_capacity(2 * BUFFER);
        put_magic(&mut buffer);
        let mut write = |bytes: &[u8]| write(bytes).attempt(|| "send the state");
        load(&self.blob, &self.spool, &mut |event| {
            put_event(&event, &mut buffer)?;
            if let Event::Piece(Piece::Chunk(chunk)) = event {
                buffer.write_all(&self.spool.get(&chunk)?).attempt(|| "send the state")?;
            }
            if buffer.len() >= BUFFER {
                write(&buffer)?;
                buffer.clear();
            }
            Ok(())
        })?;
        write(&buffer)
    }

    /// Ends the pull after the sandbox has the state. `key` names the store and the repository.
    /// Returns what was pulled, and the digest of its manifest.
    pub fn finish(self, key: &str) -> (Artifact, BlobDigest) {
        self.spool.remove();
        self.cache.set_parent(key, &self.manifest);
        self.cache.prune();
        (self.artifact, self.manifest)
    }
}
