//! Pulls an artifact: first the description, then the chunks that are missing here.

use super::cache::Cache;
use super::manifest::Artifact;
use super::packs::{Packs, Wanted};
use super::sending::{Sending, Take};
use super::spool::Spool;
use crate::error::{Error, Kind, Result};
use crate::registry::{Descriptor, Digest as BlobDigest, Meter, Repository, Version};
use crate::store::archive::edits::{Edits, FileCheck};
use crate::store::archive::history::{History, Past};
use crate::store::archive::tree_blob::{Event, Piece, TreeBlob, load};
use crate::store::archive::{Chunk, ChunkRef, Flaw};

/// A pull in progress.
pub struct Pull<'a> {
    repository: &'a Repository,
    cache: &'a Cache,
    artifact: Artifact,
    manifest: BlobDigest,
    blob: TreeBlob,
    history: History,
    edits: Option<Edits>,
    /// The number of the newest checkpoint of the history that the sandbox has.
    present: Option<usize>,
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

fn without_edits(version: &Version) -> Error {
    let why = "it was pushed without --edits";
    Error::new(Kind::NoStore, format!("find the edit history of '{version}'"), why)
        .hint("pull without --edits")
}

/// Fetches the history of an artifact, whose manifest says its number of checkpoints.
fn read_history(
    repository: &Repository,
    (blob, count): &(Descriptor, u64),
    meter: &Meter<'_>,
) -> Result<History> {
    meter.expect(blob.size);
    let mut bytes = Vec::new();
    repository.fetch_blob(blob, &mut bytes, meter)?;
    let damage = |why: String| Error::damage("read the history", why);
    let history = History::parse(&bytes).map_err(|flaw| damage(flaw.0))?;
    match history.checkpoints.len() as u64 == *count {
        true => Ok(history),
        false => Err(damage(format!("it does not have the {count} checkpoints of the manifest"))),
    }
}

/// Fetches the edits of an artifact, whose manifest says their number.
fn read_edits(
    repository: &Repository,
    (blob, count): &(Descriptor, u64),
    meter: &Meter<'_>,
) -> Result<Edits> {
    meter.expect(blob.size);
    let mut bytes = Vec::new();
    repository.fetch_blob(blob, &mut bytes, meter)?;
    let damage = |why: String| Error::damage("read the edit history", why);
    let edits = Edits::parse(&bytes).map_err(|flaw| damage(flaw.0))?;
    match edits.count() == *count {
        true => Ok(edits),
        false => Err(damage(format!("it does not have the {count} edits of the manifest"))),
    }
}

impl<'a> Pull<'a> {
    /// Reads the manifest, the tree blob, the history, and the indexes of the packs. `count` is the
    /// number of checkpoints that come along; `None` for all that were pushed. With `with_edits`
    /// the edit history comes along.
    ///
    /// # Errors
    /// There is no such checkpoint, or no edit history; the registry does not answer or refuses; or
    /// what it sends is malformed or damaged.
    pub fn begin(
        repository: &'a Repository,
        cache: &'a Cache,
        (version, count, with_edits): (&Version, Option<u64>, bool),
        meter: &Meter<'_>,
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
        let mut history = match &artifact.history {
            Some(known) if count != Some(0) => read_history(repository, known, meter)?,
            _ => History::default(),
        };
        let most = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
        let left_out = history.checkpoints.len().saturating_sub(most);
        history.checkpoints.drain(..left_out);
        let edits = match &artifact.edits {
            _ if !with_edits => None,
            Some(known) => Some(read_edits(repository, known, meter)?),
            None => return Err(without_edits(version)),
        };
        let packs = Packs::open(repository, cache, &artifact.packs, meter)?;
        let spool = Spool::open(&cache.pull(&artifact.tree))?;
        Ok(Pull {
            repository,
            cache,
            artifact,
            manifest,
            blob,
            history,
            edits,
            present: None,
            packs,
            spool,
        })
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

    /// Whether the descriptions rely on files of the base.
    pub fn is_thin(&self) -> bool {
        self.artifact.is_thin
    }

    /// The checkpoints that come along, oldest first.
    pub fn history(&self) -> &[Past] {
        &self.history.checkpoints
    }

    /// Notes that the sandbox has the checkpoint with this number of the history, so that only
    /// those after it come along.
    pub fn continue_after(&mut self, number: usize) {
        self.present = Some(number);
    }

    /// The checkpoints that come along and that the sandbox lacks.
    fn missing(&self) -> &[Past] {
        let from = self.present.map_or(0, |number| number + 1);
        self.history().get(from..).unwrap_or_default()
    }

    /// The tree blob of the checkpoint that the sandbox has, if it has one.
    fn present_blob(&self) -> Result<Option<TreeBlob>> {
        let present = self.present.and_then(|number| self.history().get(number));
        present.map(|past| past.blob(&self.spool)).transpose()
    }

    /// Fetches all chunks that are missing: those of the descriptions, and then those of the files
    /// in them. The order of the entries, and all that names them, is checked on the way.
    ///
    /// # Errors
    /// The registry does not answer or refuses; what it sends is damaged; and those of the cache.
    pub fn fetch(&mut self, meter: &Meter<'_>) -> Result<()> {
        let present = self.present.map_or(0, |number| number);
        let pasts = self.history().get(present..).unwrap_or_default();
        let mut wanted = Wanted::new();
        for past in pasts {
            let noted = self.want(past.blob_chunks(), &mut wanted);
            noted.map_err(|error| error.during(past.label()))?;
        }
        self.packs.fetch(self.repository, &wanted, &mut self.spool, meter)?;
        let mut wanted = Wanted::new();
        for past in self.history().get(present..).unwrap_or_default() {
            let noted = self.want(past.blob(&self.spool)?.chunks(), &mut wanted);
            noted.map_err(|error| error.during(past.label()))?;
        }
        self.want(self.blob.chunks(), &mut wanted)?;
        self.edits.iter().try_for_each(|edits| self.want(edits.files.chunks(), &mut wanted))?;
        self.packs.fetch(self.repository, &wanted, &mut self.spool, meter)?;
        let (spool, packs) = (&self.spool, &self.packs);
        let mut wanted = Wanted::new();
        let mut note = |event| match event {
            Event::Piece(Piece::Chunk(chunk)) if !spool.has(&chunk.digest) => {
                packs.want(&chunk, &mut wanted)
            }
            _ => Ok(()),
        };
        for past in self.missing() {
            load(&past.blob(spool)?, spool, &mut note)
                .map_err(|error| error.during(past.label()))?;
        }
        load(&self.blob, spool, &mut note)?;
        if let Some(edits) = &self.edits {
            let mut check = FileCheck::default();
            let damage = |flaw: Flaw| Error::damage("read the edit history", flaw.0);
            load(&edits.files, spool, &mut |event| {
                check.see(&event).map_err(damage)?;
                note(event)
            })?;
        }
        self.packs.fetch(self.repository, &wanted, &mut self.spool, meter)
    }

    /// Notes the frames of the chunks that are missing.
    fn want(&self, chunks: &[ChunkRef], wanted: &mut Wanted) -> Result<()> {
        let mut missing = chunks.iter().filter(|chunk| !self.spool.has(&chunk.digest));
        missing.try_for_each(|chunk| self.packs.want(chunk, wanted))
    }

    /// Writes the states that the sandbox lacks: the checkpoints, and the pulled state unless it is
    /// the last one of them. The edits follow.
    ///
    /// # Errors
    /// Those of `take`, and damage of the cache.
    pub fn write(&self, take: Take<'_>) -> Result<()> {
        let onto = self.present_blob()?;
        let has_several = !self.missing().is_empty();
        let mut sending = Sending::new(&self.spool, take, has_several, onto.as_ref())?;
        for past in self.missing() {
            sending.state(&past.blob(&self.spool)?, Some(&past.facts))?;
        }
        if self.history().last().is_none_or(|last| last.tree != self.artifact.tree) {
            sending.state(&self.blob, None)?;
        }
        self.edits.as_ref().map_or(Ok(()), |edits| sending.edits(edits))
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
