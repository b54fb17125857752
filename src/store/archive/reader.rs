//! Reads packs. Everything in a pack is unverified until its digest was compared.

use std::fs::File;
use std::io;

use crate::error::{Attempt, Error, Result};
#[cfg(any(test, feature = "crash-points"))]
use crate::store::archive::index::chunk_in;
use crate::store::archive::index::{Frame, Index};
use crate::store::archive::writer::{FOOT, HEAD, MAGIC};
use crate::store::archive::{Digest, Flaw, MAX_INDEX};
use crate::store::io::disk;

/// Where the bytes of a pack are.
pub trait PackSource {
    /// The number of bytes.
    ///
    /// # Errors
    /// As fstat(2).
    fn size(&self) -> io::Result<u64>;

    /// Reads bytes at an offset; fewer than asked for only at the end.
    ///
    /// # Errors
    /// As pread(2).
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl PackSource for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        disk::read_at(self, bytes, offset)
    }
}

impl PackSource for Vec<u8> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|from| self.get(from..));
        let rest = rest.unwrap_or_default();
        let len = rest.len().min(bytes.len());
        bytes.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        Ok(len)
    }
}

/// An open pack.
pub struct Pack<S> {
    source: S,
    /// Names the pack in errors.
    what: String,
    name: Digest,
    index: Index,
    bytes: u64,
}

impl<S: PackSource> Pack<S> {
    /// Opens a pack and reads its index. `what` names it in errors.
    ///
    /// # Errors
    /// As pread(2), and damage.
    pub fn open(source: S, what: impl Into<String>) -> Result<Pack<S>> {
        let what = what.into();
        let damage = |flaw: Flaw| Error::damage(format!("read {what}"), flaw.0);
        let len = source.size().attempt(|| format!("read {what}"))?;
        let Some(foot_at) = len.checked_sub(FOOT).filter(|at| *at >= HEAD) else {
            return Err(damage(Flaw::new("it is too short for a pack")));
        };
        let read = |offset: u64, len: usize| read_exact(&source, &what, offset, len);
        let (head, foot) = (read(0, MAGIC.len())?, read(foot_at, FOOT as usize)?);
        let (index_len, name) = parse_foot(&head, &foot).map_err(damage)?;
        // The index ends where the footer begins, and begins behind the head.
        let index_at = foot_at
            .checked_sub(index_len)
            .filter(|at| *at >= HEAD && index_len <= MAX_INDEX as u64)
            .ok_or_else(|| damage(Flaw::new("the length of its index is wrong")))?;
        let encoded = read(index_at, usize::try_from(index_len).unwrap_or(0))?;
        if Digest::of(&encoded) != name {
            return Err(damage(Flaw::new("its index is not the one that it names")));
        }
        let index = Index::parse(&encoded).map_err(damage)?;
        if HEAD + index.stored() != index_at {
            return Err(damage(Flaw::new("its frames do not end where its index begins")));
        }
        Ok(Pack { source, what, name, index, bytes: len })
    }

    /// The name of the pack: the digest of its index.
    pub fn name(&self) -> Digest {
        self.name
    }

    /// The bytes of the whole pack.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Reads and verifies the bytes of a frame as they are stored.
    ///
    /// # Errors
    /// As pread(2), and damage with the offset of the frame.
    pub fn stored_frame(&self, frame: &Frame) -> Result<Vec<u8>> {
        let at = HEAD + frame.offset;
        let stored = read_exact(&self.source, &self.what, at, frame.stored as usize)?;
        match Digest::of(&stored) == frame.digest {
            true => Ok(stored),
            false => {
                let why = "the bytes of a frame are not those that the index names";
                Err(Error::damage(format!("read {} at offset {at}", self.what), why))
            }
        }
    }

    /// Reads, decompresses and verifies a frame.
    ///
    /// # Errors
    /// As pread(2), and damage with the offset of the frame.
    pub fn frame(&self, frame: &Frame) -> Result<Vec<u8>> {
        let at = HEAD + frame.offset;
        let stored = read_exact(&self.source, &self.what, at, frame.stored as usize)?;
        self.index
            .open_frame(frame, &stored)
            .map_err(|flaw| Error::damage(format!("read {} at offset {at}", self.what), flaw.0))
    }

    /// Reads a chunk. `None` if the pack does not have it.
    ///
    /// # Errors
    /// As [`Pack::frame`].
    #[cfg(any(test, feature = "crash-points"))]
    pub fn chunk(&self, digest: &Digest) -> Result<Option<Vec<u8>>> {
        let Some(entry) = self.index.find(digest) else { return Ok(None) };
        let Some(frame) = self.index.frames().get(entry.frame as usize) else { return Ok(None) };
        let raw = self.frame(frame)?;
        Ok(chunk_in(&raw, &entry).map(<[u8]>::to_vec))
    }

    /// Verifies every byte.
    ///
    /// # Errors
    /// As [`Pack::frame`], for the first frame that is damaged.
    #[cfg(test)]
    pub fn verify(&self) -> Result<()> {
        self.index.frames().iter().try_for_each(|frame| self.frame(frame).map(drop))
    }
}

/// The length and the digest of the index.
fn parse_foot(head: &[u8], foot: &[u8]) -> std::result::Result<(u64, Digest), Flaw> {
    let (len, rest) = foot.split_first_chunk::<8>().ok_or_else(|| Flaw::new("no footer"))?;
    let (name, magic) = rest.split_first_chunk::<32>().ok_or_else(|| Flaw::new("no footer"))?;
    if head != MAGIC || magic != MAGIC {
        return Err(Flaw::new("it is not a pack of a version that this program knows"));
    }
    Ok((u64::from_le_bytes(*len), Digest(*name)))
}

fn read_exact(source: &impl PackSource, what: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let got = source.read_at(&mut bytes, offset).attempt(|| format!("read {what}"))?;
    if got < len {
        return Err(Error::damage(format!("read {what} at offset {offset}"), "it is cut off"));
    }
    Ok(bytes)
}
