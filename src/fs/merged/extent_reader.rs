//! Runs of file content on the host: reads them, and finds the holes in them.

use std::fs::File;
use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::answers;
use crate::fs::merged::answers::Question;
use crate::fs::merged::base_problems::BaseProblems;
use crate::store::Store;
use crate::store::content::remap::PoolRange;
use crate::store::content::{Bytes, Content, ReadOutcome};
use crate::sys::failpoint;
use crate::sys::failpoint::Failpoint;
use crate::sys::file as sysfile;
use crate::sys::lock::{Rank, check_not_held};
use crate::types::{ByteRange, Fingerprint, LayerId, Timestamp, TreePath};

/// How many bytes of a file are searched for data or holes first. Each further window is twice as
/// long, so neither a long hole nor many extents make a search slow.
pub(in crate::fs) const FIRST_WINDOW: u64 = 1 << 20;

/// The target of lseek(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTo {
    /// The first byte of data: SEEK_DATA.
    Data,
    /// The first byte of a hole, or the end: SEEK_HOLE.
    Hole,
}

/// Where bytes are stored.
#[derive(Clone, Debug)]
pub enum Storage {
    /// Nowhere: the bytes are zeros.
    Hole,
    /// In a file, starting at this offset.
    File(Arc<File>, u64),
    /// In the pool of a layer, starting at this address.
    Pool(Arc<Content>, u64),
}

/// A run of bytes of a file, and where the host stores them.
#[derive(Clone, Debug)]
pub struct HostExtent {
    /// Length in bytes.
    pub len: u64,
    /// Where the first byte is.
    pub storage: Storage,
    /// Of bytes in the base, the path to report when the file has changed.
    base_path: Option<TreePath>,
    /// Of bytes in the base, the size and times that the file must still have after a read.
    expected: Option<(u64, Timestamp, Timestamp)>,
}

impl HostExtent {
    /// An extent outside of the base.
    pub fn new(len: u64, storage: Storage) -> HostExtent {
        HostExtent { len, storage, base_path: None, expected: None }
    }

    /// A hole of `len` bytes.
    pub fn hole(len: u64) -> HostExtent {
        HostExtent::new(len, Storage::Hole)
    }

    /// Bytes of a base file.
    pub fn in_base(len: u64, file: Arc<File>, offset: u64, path: &TreePath) -> HostExtent {
        let base_path = Some(path.clone());
        HostExtent { base_path, ..HostExtent::new(len, Storage::File(file, offset)) }
    }

    /// The same extent, which is read only if the file's size and times still match `print` after
    /// the read.
    #[must_use]
    pub fn expecting(mut self, print: &Fingerprint) -> HostExtent {
        self.expected = Some((print.size, print.mtime, print.ctime));
        self
    }

    /// The extents behind `len` bytes at an address of a layer's pool, which may have been remapped
    /// to other pools. The caller holds a [`crate::store::ReadGuard`].
    ///
    /// # Errors
    /// As open(2), and damage of a map; [`FsError::MustWait`] if a served operation must wait for
    /// files of the store.
    pub fn in_pool(
        len: u64,
        store: &Arc<Store>,
        layer: LayerId,
        offset: u64,
    ) -> FsResult<Vec<HostExtent>> {
        let content = content_of(store, layer)?;
        let extent = |content: Arc<Content>, offset: u64, len: u64| {
            HostExtent::new(len, Storage::Pool(content, offset))
        };
        if content.remap.is_none() {
            return Ok(vec![extent(content, offset, len)]);
        }
        let places = content.locate(layer, ByteRange::at(offset, len));
        let at = |place: PoolRange| {
            if place.layer == layer {
                return Ok(extent(Arc::clone(&content), place.offset, place.len));
            }
            Ok(extent(content_of(store, place.layer)?, place.offset, place.len))
        };
        let mut found = FoundExtents::default();
        places.into_iter().try_for_each(|place| found.add(at(place).map(Some)))?;
        found.all()
    }

    /// Fills `bytes` from the extent. With `nowait`, returns false if that would wait for a disk;
    /// then the content of `bytes` is undefined.
    ///
    /// # Errors
    /// Those of the host; [`FsError::Drift`], recorded in `problems`, if a base file changed.
    pub(super) fn read(
        &self,
        bytes: &mut [u8],
        problems: &BaseProblems,
        nowait: bool,
    ) -> FsResult<bool> {
        match &self.storage {
            Storage::Hole => {
                bytes.fill(0);
                Ok(true)
            }
            Storage::Pool(content, offset) => read_pool(content, *offset, bytes, nowait),
            Storage::File(file, offset) => self.read_file(file, *offset, bytes, problems, nowait),
        }
    }

    fn read_file(
        &self,
        file: &File,
        offset: u64,
        bytes: &mut [u8],
        problems: &BaseProblems,
        nowait: bool,
    ) -> FsResult<bool> {
        let Some(path) = &self.base_path else {
            return match fill(file, offset, bytes, nowait)? {
                None => Ok(false),
                Some(got) if got < bytes.len() => {
                    Err(FsError::Damage("a file is shorter than it was"))
                }
                Some(_) => Ok(true),
            };
        };
        match self.read_base(file, offset, bytes, nowait)? {
            BaseRead::Bytes => Ok(true),
            BaseRead::WouldBlock => Ok(false),
            BaseRead::Changed => Err(problems.drift(path)),
        }
    }

    /// Fills `bytes` from a base file.
    fn read_base(
        &self,
        file: &File,
        offset: u64,
        bytes: &mut [u8],
        nowait: bool,
    ) -> FsResult<BaseRead> {
        check_not_held(Rank::Core);
        failpoint::hit(Failpoint::BaseRead)?;
        let Some(got) = fill(file, offset, bytes, nowait)? else { return Ok(BaseRead::WouldBlock) };
        let is_whole = got == bytes.len() && self.is_unchanged(file)?;
        Ok(if is_whole { BaseRead::Bytes } else { BaseRead::Changed })
    }

    /// The extent without its first `skip` bytes, cut to `len` bytes.
    pub(in crate::fs) fn part(&self, skip: u64, len: u64) -> HostExtent {
        let storage = match &self.storage {
            Storage::Hole => Storage::Hole,
            Storage::File(file, offset) => Storage::File(Arc::clone(file), offset + skip),
            Storage::Pool(content, offset) => Storage::Pool(Arc::clone(content), offset + skip),
        };
        HostExtent { len: self.len.saturating_sub(skip).min(len), storage, ..self.clone() }
    }

    /// Whether two extents of the same length are the same bytes on the host, or both holes.
    ///
    /// # Errors
    /// As fstat(2).
    pub(in crate::fs) fn is_same_storage(&self, other: &HostExtent) -> FsResult<bool> {
        Ok(match (&self.storage, &other.storage) {
            (Storage::Hole, Storage::Hole) => true,
            (Storage::Pool(a, x), Storage::Pool(b, y)) => x == y && Arc::ptr_eq(a, b),
            (Storage::File(a, x), Storage::File(b, y)) => {
                x == y && (Arc::ptr_eq(a, b) || is_same_file(a, b)?)
            }
            (Storage::Hole | Storage::File(..) | Storage::Pool(..), _) => false,
        })
    }

    /// The first run of data in the extent at or after `from`, both in bytes from the beginning of
    /// the extent; `None` if the rest is a hole. Only base files are asked for their holes. All of
    /// a pool is data: a hole that damage left there must fail its checksum rather than read as
    /// zeros.
    ///
    /// # Errors
    /// Those of the host; [`FsError::Drift`], recorded in `problems`, if a base file changed.
    pub(super) fn next_data(
        &self,
        from: u64,
        problems: &BaseProblems,
    ) -> FsResult<Option<ByteRange>> {
        let rest = ByteRange { start: from, end: self.len };
        if rest.is_empty() || matches!(self.storage, Storage::Hole) {
            return Ok(None);
        }
        let (Storage::File(file, offset), Some(path)) = (&self.storage, &self.base_path) else {
            return Ok(Some(rest));
        };
        let range =
            ByteRange { start: offset.saturating_add(from), end: offset.saturating_add(self.len) };
        let found = sysfile::next_data(&**file, range)?;
        if Fingerprint::of(file)?.size < range.end || !self.is_unchanged(file)? {
            return Err(problems.drift(path));
        }
        Ok(found.map(|found| ByteRange { start: found.start - offset, end: found.end - offset }))
    }

    /// Whether the file still has the size and times that were expected. Asked after a read.
    fn is_unchanged(&self, file: &File) -> std::io::Result<bool> {
        let Some(expected) = self.expected else { return Ok(true) };
        let now = Fingerprint::of(file)?;
        Ok((now.size, now.mtime, now.ctime) == expected)
    }

    /// How many bytes from its beginning the extent has data, or a hole; `None` if it has none.
    fn seek(&self, to: SeekTo) -> FsResult<Option<u64>> {
        let (file, offset) = match (&self.storage, to) {
            (Storage::Hole, SeekTo::Hole) => return Ok(Some(0)),
            (Storage::Hole, SeekTo::Data) => return Ok(None),
            (Storage::File(file, offset), _) => (file, *offset),
            (Storage::Pool(content, offset), _) => match &content.bytes {
                Bytes::Pool(file) => (file, *offset),
                Bytes::Archive(archived) => {
                    let found = match to {
                        SeekTo::Data => archived.next_data(*offset),
                        SeekTo::Hole => Some(archived.next_hole(*offset)),
                    };
                    return Ok(found.filter(|at| *at < offset + self.len).map(|at| at - offset));
                }
            },
        };
        let found = match to {
            SeekTo::Data => sysfile::seek_data(file, offset)?,
            SeekTo::Hole => sysfile::seek_hole(file, offset)?,
        };
        Ok(found.filter(|found| *found < offset + self.len).map(|found| found - offset))
    }
}

/// Extents, found one after the other. An answer that is missing for one does not keep the caller
/// from looking for the others, so that all of them are asked for at once.
#[derive(Default)]
pub(super) struct FoundExtents {
    extents: Vec<HostExtent>,
    must_wait: bool,
}

impl FoundExtents {
    /// Adds the next extents.
    ///
    /// # Errors
    /// The error of `found`, except [`FsError::MustWait`].
    pub(super) fn add(
        &mut self,
        found: FsResult<impl IntoIterator<Item = HostExtent>>,
    ) -> FsResult<()> {
        match found {
            Ok(found) => self.extents.extend(found),
            Err(FsError::MustWait) => self.must_wait = true,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// All extents.
    ///
    /// # Errors
    /// [`FsError::MustWait`].
    pub(super) fn all(self) -> FsResult<Vec<HostExtent>> {
        if self.must_wait { Err(FsError::MustWait) } else { Ok(self.extents) }
    }
}

/// The content of a layer. A served operation releases its locks while the content is loaded.
fn content_of(store: &Arc<Store>, layer: LayerId) -> FsResult<Arc<Content>> {
    store.cached_content(layer).or_else(|version| {
        let store = Arc::clone(store);
        answers::answer(Question::LayerContent(layer, version), move || Ok(store.content(layer)?))
    })
}

/// The result of reading a base file.
#[derive(Clone, Copy)]
enum BaseRead {
    Bytes,
    /// The bytes are not in memory.
    WouldBlock,
    /// The file is not what it was.
    Changed,
}

/// Fills `bytes` from a file, and returns how many there were. With `nowait`, `None` says that this
/// would wait for a disk.
fn fill(file: &File, offset: u64, bytes: &mut [u8], nowait: bool) -> FsResult<Option<usize>> {
    if !nowait {
        return Ok(Some(sysfile::pread_full(file, bytes, offset)?));
    }
    // A short result may mean that the rest is not in memory.
    Ok(sysfile::pread_nowait(file, bytes, offset)?.filter(|got| *got == bytes.len()))
}

fn read_pool(content: &Content, offset: u64, bytes: &mut [u8], nowait: bool) -> FsResult<bool> {
    match content.read(offset, bytes, nowait)? {
        ReadOutcome::Bytes(got) if got == bytes.len() => Ok(true),
        ReadOutcome::Bytes(_) => Err(FsError::Damage("a pool is shorter than the records say")),
        ReadOutcome::WouldBlock => Ok(false),
        ReadOutcome::Damaged(block) => {
            log::error!(
                "content fails its checksum at offset {block} of a pool; \
                 'jailfs check --read-data' finds the files"
            );
            Err(FsError::Damage("content that fails its checksum"))
        }
    }
}

/// Whether two open files are the same file. The host does not reuse the inode number of an open
/// file.
fn is_same_file(a: &File, b: &File) -> std::io::Result<bool> {
    let (a, b) = (Fingerprint::of(a)?, Fingerprint::of(b)?);
    Ok((a.dev, a.ino) == (b.dev, b.ino))
}

/// Finds data or a hole between `offset` and the end of a file; `plan` returns the extents of a
/// range.
///
/// # Errors
/// ENXIO if there is no more data, as lseek(2); those of `plan`.
pub(in crate::fs) fn seek(
    mut plan: impl FnMut(ByteRange) -> FsResult<Vec<HostExtent>>,
    offset: u64,
    size: u64,
    to: SeekTo,
) -> FsResult<u64> {
    let (mut start, mut window) = (offset, FIRST_WINDOW);
    while start < size {
        let end = start.saturating_add(window).min(size);
        let mut at = start;
        for extent in plan(ByteRange { start, end })? {
            if let Some(found) = extent.seek(to)? {
                return Ok(at + found);
            }
            at += extent.len;
        }
        (start, window) = (end, window.saturating_mul(2));
    }
    match to {
        SeekTo::Hole => Ok(size),
        SeekTo::Data => Err(FsError::NoSuchOffset),
    }
}
