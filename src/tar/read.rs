//! Reads archives that are not trusted.

use std::io::{self, Read};

use super::header::{self, Header};
use super::pax::{self, Records};
use super::{BLOCK, Entry, Kind, MAX_RANGES, MAX_RECORDS, sparse};
use crate::error::{Error, Kind as ErrorKind, Result};
use crate::types::{ByteRange, Timestamp, quoted};

/// The key under which the pairs of records of sparse version 0.0 are collected.
const MAP: &[u8] = b"GNU.sparse.map";

/// Reads entries one after another.
pub struct Reader<R: Read> {
    from: R,
    /// The path of the current entry, for errors.
    path: Vec<u8>,
    /// Stored bytes of the current entry that were not read yet.
    left: u64,
    /// Bytes behind them up to the next block.
    padding: u64,
    /// Records for all entries.
    global: Records,
}

/// The descriptions before the header of an entry.
#[derive(Default)]
struct Before {
    records: Option<Records>,
    /// GNU long names.
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

/// Why an entry cannot be read.
struct Bad(String, Option<i32>);

impl From<&'static str> for Bad {
    fn from(why: &'static str) -> Bad {
        Bad(why.to_owned(), None)
    }
}

impl From<io::Error> for Bad {
    fn from(error: io::Error) -> Bad {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Bad("the archive ends in the middle".to_owned(), None),
            _ => {
                let error = Error::io("", &error);
                Bad(error.reason, error.errno)
            }
        }
    }
}

impl<R: Read> Reader<R> {
    /// An archive that is read from `from`.
    pub fn new(from: R) -> Reader<R> {
        Reader { from, path: Vec::new(), left: 0, padding: 0, global: Records::new() }
    }

    /// The next entry; `None` at the end mark of the archive. Bytes of the entry before that were
    /// not read are skipped.
    ///
    /// # Errors
    /// The archive is malformed or cut, or cannot be read. The error names the entry.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        self.read_entry().map_err(|bad| self.error(bad))
    }

    /// Reads stored bytes of the current entry. 0 at their end.
    ///
    /// # Errors
    /// The archive is cut, or cannot be read. The error names the entry.
    pub fn data(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.read_data(buffer).map_err(|error| self.error(error.into()))
    }

    fn error(&self, Bad(why, errno): Bad) -> Error {
        let attempt = match self.path.is_empty() {
            true => "read the archive".to_owned(),
            false => format!("read entry '{}'", quoted(&self.path)),
        };
        Error { errno, ..Error::new(ErrorKind::Failed, attempt, why) }
    }

    fn read_data(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let got = loop {
            match self.from.read(buffer.get_mut(..most).unwrap_or_default()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                other => break other?,
            }
        };
        self.left -= got as u64;
        Ok(got)
    }

    /// Skips the rest of the current entry.
    fn skip(&mut self) -> io::Result<()> {
        let rest = self.left.saturating_add(self.padding);
        (self.left, self.padding) = (0, 0);
        let skipped = io::copy(&mut (&mut self.from).take(rest), &mut io::sink())?;
        if skipped < rest { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    fn block(&mut self) -> io::Result<header::Block> {
        let mut block = [0; BLOCK];
        self.from.read_exact(&mut block)?;
        Ok(block)
    }

    /// Begins an entry with so many stored bytes.
    fn begin(&mut self, size: u64) {
        self.left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    /// The content of an entry that describes the next one.
    fn content(&mut self, head: &Header) -> std::result::Result<Vec<u8>, Bad> {
        let size = head.number(header::SIZE).ok_or("its size is malformed")?;
        if size > MAX_RECORDS {
            return Err("its records are too large".into());
        }
        self.begin(size);
        let mut bytes = Vec::new();
        (&mut self.from).take(size).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < size {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.left = 0;
        self.skip()?;
        Ok(bytes)
    }

    fn read_entry(&mut self) -> std::result::Result<Option<Entry>, Bad> {
        self.skip()?;
        let mut before = Before::default();
        loop {
            let head = match self.block() {
                Ok(block) => Header(block),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err("the archive ends without its end mark".into());
                }
                Err(error) => return Err(error.into()),
            };
            if head.is_end() {
                return Ok(None);
            }
            self.path = head.path();
            if !head.has_valid_sum() {
                return Err("the checksum of its header is wrong".into());
            }
            match head.type_flag() {
                b'x' => before.records = Some(records_of(&self.content(&head)?)?),
                b'g' => {
                    let mut all = std::mem::take(&mut self.global);
                    all.extend(records_of(&self.content(&head)?)?);
                    let size: usize = all.iter().map(|(key, value)| key.len() + value.len()).sum();
                    if size as u64 > MAX_RECORDS {
                        return Err("its records are too large".into());
                    }
                    self.global = all;
                }
                b'L' => before.path = Some(until_nul(self.content(&head)?)),
                b'K' => before.link = Some(until_nul(self.content(&head)?)),
                // The label of a volume.
                b'V' => {
                    self.content(&head)?;
                }
                _ => return self.described(&head, before).map(Some),
            }
        }
    }

    /// The entry of a header, with what stood before it.
    fn described(&mut self, head: &Header, before: Before) -> std::result::Result<Entry, Bad> {
        let mut records = self.global.clone();
        records.extend(before.records.unwrap_or_default());
        // An empty value means that the header counts.
        records.retain(|key, value| !value.is_empty() || key.starts_with(pax::XATTR));
        let name = records.get(&b"GNU.sparse.name"[..]).or_else(|| records.get(&b"path"[..]));
        if let Some(path) = name.cloned().or(before.path) {
            self.path = path;
        }
        let number = |key: &[u8], field| match sparse::record(&records, key)? {
            Some(value) => Ok(value),
            None => head.number(field).ok_or("a number in its header is malformed"),
        };
        let id = |key, field| -> std::result::Result<u32, &'static str> {
            u32::try_from(number(key, field)?).map_err(|_| "its owner is too large a number")
        };
        let size = number(b"size", header::SIZE)?;
        let (uid, gid) = (id(b"uid", header::UID)?, id(b"gid", header::GID)?);
        let mode = head.number(header::MODE).ok_or("its mode is malformed")?;
        let secs = head.seconds();
        let mtime = match records.get(&b"mtime"[..]) {
            Some(text) => pax::time(text),
            None => secs.map(|secs| Timestamp { secs, nanos: 0 }),
        };
        let mtime = mtime.ok_or("its time is malformed")?;
        let link = records.get(&b"linkpath"[..]).cloned().or(before.link);
        let link = link.unwrap_or_else(|| head.link());
        let kind = self.kind(head, &records, link, size)?;
        Ok(Entry {
            path: self.path.clone(),
            kind,
            mode: u32::try_from(mode & 0o7777).unwrap_or(0),
            uid,
            gid,
            mtime,
            xattrs: xattrs_of(records),
        })
    }

    fn kind(
        &mut self,
        head: &Header,
        records: &Records,
        target: Vec<u8>,
        size: u64,
    ) -> std::result::Result<Kind, Bad> {
        let device = |field| {
            let number = head.number(field).and_then(|number| u32::try_from(number).ok());
            number.ok_or("its device number is malformed")
        };
        let ends_as_dir = self.path.ends_with(b"/");
        self.begin(0);
        Ok(match head.type_flag() {
            b'1' => Kind::Link { target },
            b'2' => Kind::Symlink { target },
            b'3' => Kind::Char { major: device(header::MAJOR)?, minor: device(header::MINOR)? },
            b'4' => Kind::Block { major: device(header::MAJOR)?, minor: device(header::MINOR)? },
            b'5' => Kind::Dir,
            b'6' => Kind::Fifo,
            // Before POSIX, a slash at the end made a directory.
            b'0' | 0 if ends_as_dir => Kind::Dir,
            b'0' | 0 | b'7' | b'S' => {
                self.begin(size);
                self.file(head, records, size)?
            }
            b'M' | b'D' => return Err("multi-volume and incremental archives are not read".into()),
            other => {
                let flag = quoted(&[other]);
                return Err(Bad(format!("an entry of type '{flag}' is not known"), None));
            }
        })
    }

    /// A file, whose map of holes is read if it has one.
    fn file(
        &mut self,
        head: &Header,
        records: &Records,
        stored: u64,
    ) -> std::result::Result<Kind, Bad> {
        let real = match sparse::record(records, b"GNU.sparse.realsize")? {
            None => sparse::record(records, b"GNU.sparse.size")?,
            found => found,
        };
        let major = sparse::record(records, b"GNU.sparse.major")?;
        let (data, size) = if head.type_flag() == b'S' {
            let real = head.number(header::REAL_SIZE).ok_or("its size is malformed")?;
            (self.old_map(head)?, real)
        } else if major == Some(1) {
            let before = self.left;
            let mut blocks = 0;
            let data = sparse::read_map(|| {
                blocks += BLOCK as u64;
                if blocks > before {
                    return Err(Bad::from("its map of holes is malformed"));
                }
                Ok(self.block()?)
            })?;
            self.left = before - blocks;
            (data, real.ok_or("its size is malformed")?)
        } else if let Some(list) = records.get(MAP) {
            (sparse::of_list(list)?, real.ok_or("its size is malformed")?)
        } else {
            return Ok(Kind::File { size: stored, data: None });
        };
        let data = sparse::checked(data, size, self.left)?;
        Ok(Kind::File { size, data: Some(data) })
    }

    fn old_map(&mut self, head: &Header) -> std::result::Result<Vec<ByteRange>, Bad> {
        let (mut data, mut has_more) = sparse::of_header(head)?;
        while has_more {
            if data.len() > MAX_RANGES {
                return Err("it has too many holes".into());
            }
            let block = self.block()?;
            let before = data.len();
            sparse::old_ranges(block.get(..504).unwrap_or_default(), &mut data)?;
            // A block without a range could be repeated for ever.
            has_more = block[504] != 0 && data.len() > before;
        }
        Ok(data)
    }
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

/// The records in the content of an entry. The pairs of sparse version 0.0 become a list as in
/// version 0.1.
fn records_of(mut bytes: &[u8]) -> std::result::Result<Records, Bad> {
    let mut records = Records::new();
    let mut pairs: Option<Vec<u8>> = None;
    while !bytes.is_empty() {
        let ((key, value), rest) = pax::take(bytes).ok_or("its records are malformed")?;
        bytes = rest;
        if matches!(key, b"GNU.sparse.offset" | b"GNU.sparse.numbytes") {
            let list = pairs.get_or_insert_default();
            if !list.is_empty() {
                list.push(b',');
            }
            list.extend_from_slice(value);
            continue;
        }
        records.insert(key.to_vec(), value.to_vec());
    }
    if let Some(pairs) = pairs {
        records.insert(MAP.to_vec(), pairs);
    }
    Ok(records)
}

fn xattrs_of(records: Records) -> Records {
    let mut xattrs = Records::new();
    for (key, value) in records {
        if let Some(name) = key.strip_prefix(pax::XATTR) {
            xattrs.insert(pax::xattr_name(name), value);
        } else if key == b"RHT.security.selinux" {
            xattrs.insert(b"security.selinux".to_vec(), value);
        }
    }
    xattrs
}
