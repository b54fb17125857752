//! Writes archives.

use std::io::{self, Write};

use super::header::{self, NewHeader, octal_limit};
use super::{BLOCK, Entry, Kind, pax, sparse};

/// Bytes of zeros behind the last entry.
const END: usize = 2 * BLOCK;

/// Writes entries one after another.
pub struct Writer<W: Write> {
    to: W,
    /// Bytes of the current entry that were not written yet.
    left: u64,
    /// Bytes behind them up to the next block.
    padding: usize,
}

impl<W: Write> Writer<W> {
    /// An archive that is written to `to`.
    pub fn new(to: W) -> Writer<W> {
        Writer { to, left: 0, padding: 0 }
    }

    /// Begins an entry. Its bytes follow by [`Writer::data`], as many as [`Entry::stored`] says.
    ///
    /// # Errors
    /// Those of writing; `InvalidInput` if bytes of the entry before are missing.
    pub fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        self.end_entry()?;
        let map = match &entry.kind {
            Kind::File { size, data: Some(data) } => sparse::map(data, *size),
            _ => Vec::new(),
        };
        let stored = entry.stored() + map.len() as u64;
        let records = records(entry, stored);
        if !records.is_empty() {
            let mut head = NewHeader::new(b'x');
            let name = [b"PaxHeaders/", entry.path.as_slice()].concat();
            head.put(header::NAME, &name);
            head.number(header::MODE, 0o644);
            head.number(header::UID, 0);
            head.number(header::GID, 0);
            head.number(header::SIZE, records.len() as u64);
            head.number(header::MTIME, 0);
            self.to.write_all(&head.finish())?;
            self.to.write_all(&records)?;
            self.to.write_all(zeros(padding(records.len() as u64)))?;
        }
        self.to.write_all(&ustar(entry, stored))?;
        self.to.write_all(&map)?;
        (self.left, self.padding) = (entry.stored(), padding(stored));
        Ok(())
    }

    /// Writes bytes of the current entry.
    ///
    /// # Errors
    /// Those of writing; `InvalidInput` for more bytes than the entry has.
    pub fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        let left = self.left.checked_sub(bytes.len() as u64);
        self.left = left.ok_or(io::ErrorKind::InvalidInput)?;
        self.to.write_all(bytes)
    }

    fn end_entry(&mut self) -> io::Result<()> {
        if self.left > 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let padding = std::mem::take(&mut self.padding);
        self.to.write_all(zeros(padding))
    }

    /// Ends the archive, and returns what it was written to.
    ///
    /// # Errors
    /// Those of writing; `InvalidInput` if bytes of the last entry are missing.
    pub fn finish(mut self) -> io::Result<W> {
        self.end_entry()?;
        self.to.write_all(&[0; END])?;
        self.to.flush()?;
        Ok(self.to)
    }
}

static ZEROS: [u8; BLOCK] = [0; BLOCK];

fn zeros(len: usize) -> &'static [u8] {
    ZEROS.get(..len).unwrap_or_default()
}

fn padding(len: u64) -> usize {
    let used = usize::try_from(len % BLOCK as u64).unwrap_or_default();
    if used == 0 { 0 } else { BLOCK - used }
}

/// The name that the header of an entry has. That of a file with holes is another one, so that a
/// program that does not know them does not take the map for the content.
fn header_path(entry: &Entry) -> Vec<u8> {
    match &entry.kind {
        Kind::File { data: Some(_), .. } => [b"GNUSparseFile.0/", entry.path.as_slice()].concat(),
        _ => entry.path.clone(),
    }
}

fn link_target(entry: &Entry) -> &[u8] {
    match &entry.kind {
        Kind::Link { target } | Kind::Symlink { target } => target,
        _ => b"",
    }
}

/// The records for what the header cannot hold, in a fixed order.
fn records(entry: &Entry, stored: u64) -> Vec<u8> {
    let mut records = Vec::new();
    let (path, target) = (header_path(entry), link_target(entry));
    let has_path = path.len() > header::NAME.1;
    let has_target = target.len() > header::LINK.1;
    let sparse = match &entry.kind {
        Kind::File { size, data: Some(_) } => Some(*size),
        _ => None,
    };
    let is_text = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok();
    let names_path = has_path || sparse.is_some();
    if (names_path && !is_text(&entry.path)) || (has_target && !is_text(target)) {
        pax::push(&mut records, b"hdrcharset", b"BINARY");
    }
    if has_path {
        pax::push(&mut records, b"path", &path);
    }
    if has_target {
        pax::push(&mut records, b"linkpath", target);
    }
    let mut number = |key: &[u8], value: u64, field| {
        if value > octal_limit(field) {
            pax::push(&mut records, key, value.to_string().as_bytes());
        }
    };
    number(b"size", stored, header::SIZE);
    number(b"uid", u64::from(entry.uid), header::UID);
    number(b"gid", u64::from(entry.gid), header::GID);
    let secs = u64::try_from(entry.mtime.secs);
    let is_plain = secs.is_ok_and(|secs| secs <= octal_limit(header::MTIME));
    if !is_plain || entry.mtime.nanos != 0 {
        pax::push(&mut records, b"mtime", pax::time_text(entry.mtime).as_bytes());
    }
    if let Some(size) = sparse {
        pax::push(&mut records, b"GNU.sparse.major", b"1");
        pax::push(&mut records, b"GNU.sparse.minor", b"0");
        pax::push(&mut records, b"GNU.sparse.name", &entry.path);
        pax::push(&mut records, b"GNU.sparse.realsize", size.to_string().as_bytes());
    }
    for (name, value) in &entry.xattrs {
        pax::push(&mut records, &pax::xattr_key(name), value);
    }
    records
}

fn ustar(entry: &Entry, stored: u64) -> header::Block {
    let (type_flag, device) = match &entry.kind {
        Kind::File { .. } => (b'0', None),
        Kind::Link { .. } => (b'1', None),
        Kind::Symlink { .. } => (b'2', None),
        Kind::Char { major, minor } => (b'3', Some((*major, *minor))),
        Kind::Block { major, minor } => (b'4', Some((*major, *minor))),
        Kind::Dir => (b'5', None),
        Kind::Fifo => (b'6', None),
    };
    let mut head = NewHeader::new(type_flag);
    head.put(header::NAME, &header_path(entry));
    head.put(header::LINK, link_target(entry));
    head.number(header::MODE, u64::from(entry.mode));
    head.number(header::UID, u64::from(entry.uid));
    head.number(header::GID, u64::from(entry.gid));
    head.number(header::SIZE, stored);
    head.number(header::MTIME, u64::try_from(entry.mtime.secs).unwrap_or(0));
    if let Some((major, minor)) = device {
        head.number(header::MAJOR, u64::from(major));
        head.number(header::MINOR, u64::from(minor));
    }
    head.finish()
}
