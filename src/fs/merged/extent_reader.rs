//! Where a run of bytes of a file is on the host, how it is read, and where in it holes are.

use std::fs::File;
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::lower::Lower;
use crate::fs::ops::data::SeekTo;
use crate::store::Store;
use crate::store::content::Content;
use crate::store::content::cells::ReadOutcome;
use crate::store::content::remap::PoolRange;
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::file as sysfile;
use crate::types::{ByteRange, Fingerprint, LayerId, Timestamp, TreePath};

/// Bytes of a file of which the pieces are found first, when it is searched for data or holes. What follows
/// is twice as long each time: so neither a long hole nor many pieces cost much.
pub(in crate::fs) const FIRST_WINDOW: u64 = 1 << 20;

/// Where bytes are.
#[derive(Clone, Debug)]
pub enum Stored {
    /// Nowhere: they are zeros.
    Zeros,
    /// In a file, from this offset on.
    File(Arc<File>, u64),
    /// In the pool of a layer, from this address on.
    Pool(Arc<Content>, u64),
}

/// A run of bytes.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Bytes.
    pub len: u64,
    /// Where the first of them is.
    pub stored: Stored,
    /// The base path that is to be reported if the file is shorter than that, or is not the same any more when it was read.
    drift: Option<TreePath>,
    /// Of a file of the base, its size and times when it was looked at.
    looked: Option<(u64, Timestamp, Timestamp)>,
}

impl Piece {
    /// So many bytes that are there.
    pub fn new(len: u64, stored: Stored) -> Piece {
        Piece { len, stored, drift: None, looked: None }
    }

    /// So many zeros.
    pub fn zeros(len: u64) -> Piece {
        Piece::new(len, Stored::Zeros)
    }

    /// Bytes of a file of the base.
    pub fn of_base(len: u64, file: Arc<File>, offset: u64, path: &TreePath) -> Piece {
        Piece { drift: Some(path.clone()), ..Piece::new(len, Stored::File(file, offset)) }
    }

    /// The same piece, of a file that was looked at: what is read counts only if it is still like this then.
    #[must_use]
    pub fn looked_at(mut self, print: &Fingerprint) -> Piece {
        self.looked = Some((print.size, print.mtime, print.ctime));
        self
    }

    /// Bytes at addresses of the pool of a layer, wherever they are now. Take a [`crate::store::ReadGuard`] before.
    ///
    /// # Errors
    /// As open(2), and damage of a map.
    pub fn of_pool(len: u64, store: &Store, layer: LayerId, offset: u64) -> FsResult<Vec<Piece>> {
        let content = store.content(layer)?;
        let piece =
            |of: Arc<Content>, offset: u64, len: u64| Piece::new(len, Stored::Pool(of, offset));
        if content.remap.is_none() {
            return Ok(vec![piece(content, offset, len)]);
        }
        let places = content.locate(layer, ByteRange::at(offset, len));
        let at = |place: PoolRange| match place.layer == layer {
            true => Ok(piece(Arc::clone(&content), place.offset, place.len)),
            false => {
                let home = store.content(place.layer)?;
                // Content is found equal where it is stored, and maps are changed before a pool goes.
                match home.pool {
                    Some(_) => Ok(piece(home, place.offset, place.len)),
                    None => Err(FsError::Damage("a map leads to a pool that is gone")),
                }
            }
        };
        places.into_iter().map(at).collect()
    }

    /// Reads its bytes; `lower` is told if the base changed behind our back. With `nowait`, gives false, and anything, if that would wait for a
    /// disk.
    ///
    /// # Errors
    /// What the host answers; [`FsError::Drift`] if a file of the base is not what it was.
    pub fn read(&self, bytes: &mut [u8], lower: &Lower, nowait: bool) -> FsResult<bool> {
        match &self.stored {
            Stored::Zeros => {
                bytes.fill(0);
                Ok(true)
            }
            Stored::Pool(content, offset) => match content.read(*offset, bytes, nowait)? {
                ReadOutcome::Bytes(got) if got == bytes.len() => Ok(true),
                ReadOutcome::Bytes(_) => {
                    Err(FsError::Damage("a pool is shorter than the records say"))
                }
                ReadOutcome::WouldBlock => Ok(false),
                ReadOutcome::Damaged(block) => {
                    log::error!(
                        "content fails its checksum at offset {block} of a pool; 'jailfs check --read-data' tells where"
                    );
                    Err(FsError::Damage("content that fails its checksum"))
                }
            },
            Stored::File(file, offset) => {
                if self.drift.is_some() {
                    failpoint::hit(Failpoint::BaseRead)?;
                }
                let got = match nowait {
                    true => match sysfile::pread_nowait(&**file, bytes, *offset)? {
                        // A short answer may mean that the rest is not in memory.
                        Some(got) if got == bytes.len() => got,
                        _ => return Ok(false),
                    },
                    false => sysfile::pread_full(file, bytes, *offset)?,
                };
                match &self.drift {
                    Some(path) if got < bytes.len() || !self.is_unchanged(file)? => {
                        Err(lower.drift(path))
                    }
                    None if got < bytes.len() => {
                        Err(FsError::Damage("a file is shorter than it was"))
                    }
                    _ => Ok(true),
                }
            }
        }
    }

    /// The piece without its first `skip` bytes, `len` bytes long at most.
    pub(in crate::fs) fn part(&self, skip: u64, len: u64) -> Piece {
        let stored = match &self.stored {
            Stored::Zeros => Stored::Zeros,
            Stored::File(file, offset) => Stored::File(Arc::clone(file), offset + skip),
            Stored::Pool(content, offset) => Stored::Pool(Arc::clone(content), offset + skip),
        };
        Piece { len: self.len.saturating_sub(skip).min(len), stored, ..self.clone() }
    }

    /// Whether two pieces of the same length are the same bytes of the same file on the host, or both holes.
    ///
    /// # Errors
    /// As fstat(2).
    pub(in crate::fs) fn is_same_place(&self, other: &Piece) -> FsResult<bool> {
        Ok(match (&self.stored, &other.stored) {
            (Stored::Zeros, Stored::Zeros) => true,
            (Stored::Pool(a, x), Stored::Pool(b, y)) => x == y && Arc::ptr_eq(a, b),
            (Stored::File(a, x), Stored::File(b, y)) => {
                x == y && (Arc::ptr_eq(a, b) || is_same_file(a, b)?)
            }
            (Stored::Zeros | Stored::File(..) | Stored::Pool(..), _) => false,
        })
    }

    /// The first run of data in the piece at or after `from`, in bytes from the beginning of the piece;
    /// none if the rest is a hole. Only the base is asked where its holes are. All that is in a pool is
    /// data: a read verifies its checksums, so a hole that damage left is an error and not zeros.
    ///
    /// # Errors
    /// What the host answers; [`FsError::Drift`] if a file of the base is not what it was.
    pub(in crate::fs) fn next_data(&self, from: u64, lower: &Lower) -> FsResult<Option<ByteRange>> {
        let rest = ByteRange { start: from, end: self.len };
        if rest.is_empty() || matches!(self.stored, Stored::Zeros) {
            return Ok(None);
        }
        let (Stored::File(file, offset), Some(path)) = (&self.stored, &self.drift) else {
            return Ok(Some(rest));
        };
        let there =
            ByteRange { start: offset.saturating_add(from), end: offset.saturating_add(self.len) };
        let found = sysfile::next_data(&**file, there)?;
        if Fingerprint::of(file)?.size < there.end || !self.is_unchanged(file)? {
            return Err(lower.drift(path));
        }
        Ok(found.map(|found| ByteRange { start: found.start - offset, end: found.end - offset }))
    }

    /// Whether nobody changed the file since it was looked at; asked after it was read.
    fn is_unchanged(&self, file: &File) -> std::io::Result<bool> {
        let Some(looked) = self.looked else { return Ok(true) };
        let now = Fingerprint::of(file)?;
        Ok((now.size, now.mtime, now.ctime) == looked)
    }

    /// How many bytes from its first there are data, or a hole; none if it has none.
    fn seek(&self, to: SeekTo) -> FsResult<Option<u64>> {
        let (file, offset) = match (&self.stored, to) {
            (Stored::Zeros, SeekTo::Hole) => return Ok(Some(0)),
            (Stored::Zeros, SeekTo::Data) => return Ok(None),
            (Stored::File(file, offset), _) => (file, *offset),
            (Stored::Pool(content, offset), _) => match (&content.pool, &content.cells, to) {
                // Where it is deflated, what is a hole says nothing of what is in it.
                (Some(_), Some(_), SeekTo::Data) | (None, _, SeekTo::Hole) => return Ok(Some(0)),
                (Some(_), Some(_), SeekTo::Hole) | (None, _, SeekTo::Data) => return Ok(None),
                (Some(file), None, _) => (file, *offset),
            },
        };
        let found = match to {
            SeekTo::Data => sysfile::seek_data(file, offset)?,
            SeekTo::Hole => sysfile::seek_hole(file, offset)?,
        };
        Ok(found.filter(|found| *found < offset + self.len).map(|found| found - offset))
    }
}

/// Whether two open files are one. The number of an open file is not given to another one.
fn is_same_file(a: &File, b: &File) -> std::io::Result<bool> {
    let (a, b) = (Fingerprint::of(a)?, Fingerprint::of(b)?);
    Ok((a.dev, a.ino) == (b.dev, b.ino))
}

/// Data or a hole in a file from `offset` to its end. `plan` gives the pieces of a range.
///
/// # Errors
/// ENXIO if there is no data any more, as lseek(2), and those of `plan`.
pub(in crate::fs) fn seek(
    mut plan: impl FnMut(ByteRange) -> FsResult<Vec<Piece>>,
    offset: u64,
    size: u64,
    to: SeekTo,
) -> FsResult<u64> {
    let (mut start, mut window) = (offset, FIRST_WINDOW);
    while start < size {
        let end = start.saturating_add(window).min(size);
        let mut at = start;
        // Pieces are cut at extents, so each is data, hole, or a run of a file that is asked in turn.
        for piece in plan(ByteRange { start, end })? {
            if let Some(found) = piece.seek(to)? {
                return Ok(at + found);
            }
            at += piece.len;
        }
        (start, window) = (end, window.saturating_mul(2));
    }
    match to {
        SeekTo::Hole => Ok(size),
        SeekTo::Data => Err(FsError::NoSuchOffset),
    }
}
