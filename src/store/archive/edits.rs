//! The edit histories of a head, as one document.
//!
//! ```text
//! magic, 16 bytes | tree blob, with its length | number of paths, then each, ascending:
//! path | number of its next edit | the edit that an undo went back to, or 0 | number of edits,
//! then each, newest first: number | seconds signed | nanoseconds | kind | 1 with a file, or 0
//! ```
//!
//! The tree has the files before the edits, in this order: files of the root with the names of
//! [`file_name`]. So their attributes and content are described, cut into chunks, fetched and
//! verified by the code that does it for a state.
//!
//! A document that was read is checked as a whole: what is made of it later needs no further check
//! of its paths and numbers.

use std::collections::BTreeSet;

use crate::store::archive::Flaw;
use crate::store::archive::bytes::{self, Input};
use crate::store::archive::tree_blob::{Event, MAX_BLOB, TreeBlob};
use crate::types::{Name, Timestamp, TreePath};

const MAGIC: &[u8; 16] = b"jailfs-edits  1\n";
/// The most bytes of a document besides its tree blob.
const MAX_LIST: usize = 64 << 20;
/// The most bytes of a document.
pub const MAX_EDITS: usize = MAX_BLOB + MAX_LIST;
/// The most edits: a store with the default limits has at most a quarter of that. It bounds the
/// memory of a reader.
const MAX_COUNT: usize = 1 << 18;
/// The longest path.
const MAX_PATH: usize = 64 << 10;
/// The greatest number of an edit, so that many more can follow.
const MAX_NUMBER: u64 = 1 << 31;
/// The greatest code of a kind.
const MAX_KIND: u64 = 6;
/// The fewest bytes of a path, and of an edit.
const LEAST_PATH: usize = 5;
const LEAST: usize = 5;

/// An edit of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PastEdit {
    /// Its number.
    pub number: u32,
    /// When it began.
    pub time: Timestamp,
    /// The code of its kind.
    pub kind: u8,
    /// Whether there was a file before it.
    pub has_file: bool,
}

/// The edits of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathEdits {
    /// The path.
    pub path: TreePath,
    /// The number of its next edit.
    pub next: u32,
    /// The edit that an undo went back to.
    pub undone_to: Option<u32>,
    /// Newest first.
    pub edits: Vec<PastEdit>,
}

/// The edits of all paths, and the files before them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edits {
    /// The files before the edits.
    pub files: TreeBlob,
    /// By path, ascending.
    pub paths: Vec<PathEdits>,
}

/// The name of the file with this number.
///
/// # Errors
/// None: each is a name.
pub fn file_name(number: u64) -> Result<Name, Flaw> {
    let name = format!("{number:08x}");
    Name::new(name.as_bytes()).map_err(|_| Flaw::new(format!("'{name}' is not a name")))
}

/// Whether bytes begin as a document does.
pub fn is_document(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

impl Edits {
    /// The number of edits.
    pub fn count(&self) -> u64 {
        self.paths.iter().map(|path| path.edits.len() as u64).sum()
    }

    /// The bytes of the document.
    ///
    /// # Errors
    /// It has what a reader refuses.
    pub fn encode(&self) -> Result<Vec<u8>, Flaw> {
        let mut out = MAGIC.to_vec();
        bytes::put_bytes(&mut out, &self.files.encode());
        bytes::put_number(&mut out, self.paths.len() as u64);
        for PathEdits { path, next, undone_to, edits } in &self.paths {
            bytes::put_bytes(&mut out, path.as_bytes());
            bytes::put_number(&mut out, u64::from(*next));
            bytes::put_number(&mut out, u64::from(undone_to.unwrap_or(0)));
            bytes::put_number(&mut out, edits.len() as u64);
            for PastEdit { number, time, kind, has_file } in edits {
                bytes::put_number(&mut out, u64::from(*number));
                bytes::put_signed(&mut out, time.secs);
                bytes::put_number(&mut out, u64::from(time.nanos));
                out.push(*kind);
                out.push(u8::from(*has_file));
            }
        }
        Edits::parse(&out)?;
        Ok(out)
    }

    /// Reads a document. Takes memory in proportion to the bytes that are there.
    ///
    /// # Errors
    /// The first flaw, with the path.
    pub fn parse(encoded: &[u8]) -> Result<Edits, Flaw> {
        let mut input = encoded;
        let mut magic = [0; MAGIC.len()];
        input.fill(&mut magic)?;
        if magic != *MAGIC || encoded.len() > MAX_EDITS {
            return Err(Flaw::new(
                "it is not an edit history of a version that this program knows",
            ));
        }
        let files = TreeBlob::parse(take_bytes(&mut input, MAX_BLOB, "the length of a blob")?)?;
        if input.len() > MAX_LIST {
            return Err(Flaw::new("a list of more than 64 MiB"));
        }
        let most = (input.len() / LEAST_PATH).min(MAX_COUNT) as u64;
        let mut left = MAX_COUNT;
        let mut paths = Vec::<PathEdits>::new();
        for number in 1..=bytes::at_most(&mut input, most, "the number of paths")? {
            let path = take_path(&mut input)
                .map_err(|flaw| Flaw::new(format!("path {number}: {flaw}")))?;
            if paths.last().is_some_and(|last| last.path >= path) {
                return Err(Flaw::new(format!("'{path}' does not ascend")));
            }
            let edits = take_edits(&mut input, path.clone(), left);
            let edits = edits.map_err(|flaw| Flaw::new(format!("'{path}': {flaw}")))?;
            left -= edits.edits.len();
            paths.push(edits);
        }
        if !input.is_empty() {
            return Err(Flaw::new("bytes after the last path"));
        }
        let with_file = paths.iter().flat_map(|path| &path.edits).filter(|edit| edit.has_file);
        match files.entries() == with_file.count() as u64 + 1 {
            true => Ok(Edits { files, paths }),
            false => Err(Flaw::new("its tree has another number of files")),
        }
    }
}

/// Checks that the tree of a document has the files that it must have.
#[derive(Default)]
pub struct FileCheck {
    files: u64,
    has_root: bool,
}

impl FileCheck {
    /// Sees the next event of the tree.
    ///
    /// # Errors
    /// Something else than the next file.
    pub fn see(&mut self, event: &Event) -> Result<(), Flaw> {
        match event {
            Event::Dir { name: None, .. } if !self.has_root => self.has_root = true,
            Event::File { name, .. } if *name == file_name(self.files)? => self.files += 1,
            Event::Piece(_) | Event::End => {}
            _ => return Err(Flaw::new(format!("file {} is another entry", self.files))),
        }
        Ok(())
    }
}

fn take_path(input: &mut &[u8]) -> Result<TreePath, Flaw> {
    let bytes = take_bytes(input, MAX_PATH, "the length of a path")?;
    let path = TreePath::parse(bytes).ok();
    let path = path.filter(|path| path.as_bytes() == bytes && !path.is_root());
    path.ok_or_else(|| Flaw::new(format!("'{}' is not a path", crate::types::quoted(bytes))))
}

fn take_edits(input: &mut &[u8], path: TreePath, left: usize) -> Result<PathEdits, Flaw> {
    let next = bytes::at_most(input, MAX_NUMBER, "the number of the next edit")?;
    let undone_to = bytes::at_most(input, MAX_NUMBER, "the number of an edit")? as u32;
    let most = (input.len() / LEAST).min(left) as u64;
    let count = bytes::at_most(input, most, "the number of edits")?;
    let (mut edits, mut before) = (Vec::new(), next);
    for _ in 0..count {
        let number = bytes::at_most(input, MAX_NUMBER, "the number of an edit")?;
        if number >= before || number == 0 {
            return Err(Flaw::new(format!("edit {number} does not descend")));
        }
        before = number;
        let secs = bytes::signed(input)?;
        let nanos = bytes::at_most(input, 999_999_999, "the nanoseconds of a time")? as u32;
        let kind = bytes::at_most(input, MAX_KIND, "the kind of an edit")? as u8;
        let has_file = bytes::at_most(input, 1, "the number of files before an edit")? == 1;
        let time = Timestamp { secs, nanos };
        edits.push(PastEdit { number: number as u32, time, kind, has_file });
    }
    let numbers: BTreeSet<u32> = edits.iter().map(|edit| edit.number).collect();
    if edits.is_empty() {
        return Err(Flaw::new("no edits"));
    }
    let undone_to = Some(undone_to).filter(|number| *number != 0);
    if undone_to.is_some_and(|number| !numbers.contains(&number)) {
        return Err(Flaw::new("an undo to an edit that is missing"));
    }
    // The newest is the file before the first undo.
    if undone_to.is_some() && undone_to == edits.first().map(|edit| edit.number) {
        return Err(Flaw::new("an undo to the newest edit"));
    }
    Ok(PathEdits { path, next: next as u32, undone_to, edits })
}

fn take_bytes<'b>(input: &mut &'b [u8], most: usize, what: &str) -> Result<&'b [u8], Flaw> {
    let most = most.min(input.len()) as u64;
    let len = bytes::at_most(input, most, what)? as usize;
    let (taken, rest) = input.split_at_checked(len).ok_or_else(bytes::cut_off)?;
    *input = rest;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::archive::tree_blob::{Attributes, TreeWriter};
    use crate::store::archive::{Chunk, ChunkSink};

    struct Nowhere;

    impl ChunkSink for Nowhere {
        fn put(&mut self, _: Chunk<'_>) -> crate::error::Result<()> {
            Ok(())
        }
    }

    fn edits() -> Edits {
        let mut tree = TreeWriter::default();
        let attributes = Attributes::default();
        let root = Event::Dir { name: None, attributes: attributes.clone() };
        let file = |number| Event::File {
            name: file_name(number).unwrap(),
            attributes: attributes.clone(),
            size: 0,
        };
        for event in [root, file(0), file(1), Event::End] {
            tree.write(&event, &mut Nowhere).unwrap();
        }
        let edit = |number, has_file| PastEdit {
            number,
            time: Timestamp { secs: i64::MIN, nanos: 999_999_999 },
            kind: 6,
            has_file,
        };
        let path = |path: &str, undone_to, edits| PathEdits {
            path: TreePath::parse(path.as_bytes()).unwrap(),
            next: 9,
            undone_to,
            edits,
        };
        Edits {
            files: tree.finish(&mut Nowhere).unwrap(),
            paths: vec![
                path("a", Some(7), vec![edit(8, true), edit(7, false)]),
                path("a/b", None, vec![edit(1, true)]),
            ],
        }
    }

    #[test]
    fn edits_are_read_as_they_were_written() {
        let bytes = edits().encode().unwrap();
        assert_eq!(Edits::parse(&bytes).unwrap(), edits());
        assert_eq!(edits().count(), 3);
        for len in 0..bytes.len() {
            assert!(Edits::parse(&bytes[..len]).is_err(), "cut at {len}");
        }
        assert!(Edits::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn edits_that_no_store_has_are_refused() {
        type Change = fn(&mut Edits);
        let table: [(&str, Change); 11] = [
            ("does not ascend", |edits| edits.paths.swap(0, 1)),
            ("does not ascend", |edits| edits.paths[1].path = edits.paths[0].path.clone()),
            ("is not a path", |edits| edits.paths[0].path = TreePath::root()),
            ("edit 8 does not descend", |edits| edits.paths[0].next = 8),
            ("edit 0 does not descend", |edits| edits.paths[1].edits[0].number = 0),
            ("edit 8 does not descend", |edits| edits.paths[0].edits[1].number = 8),
            ("an undo to an edit that is missing", |edits| edits.paths[1].undone_to = Some(2)),
            ("an undo to the newest edit", |edits| edits.paths[1].undone_to = Some(1)),
            ("no edits", |edits| edits.paths[1].edits.clear()),
            ("the kind of an edit is 7", |edits| edits.paths[1].edits[0].kind = 7),
            ("another number of files", |edits| edits.paths[1].edits[0].has_file = false),
        ];
        for (part, change) in table {
            let mut edits = edits();
            change(&mut edits);
            let flaw = edits.encode().unwrap_err();
            assert!(flaw.0.contains(part), "{part}: {flaw}");
        }
        let bytes = edits().encode().unwrap();
        let at = bytes.windows(3).rposition(|bytes| bytes == b"a/b").unwrap();
        for (path, part) in [(b"../", "'../'"), (b"/ab", "is not a path"), (b"a//", "not a path")] {
            let mut forged = bytes.clone();
            forged[at..at + 3].copy_from_slice(path);
            let flaw = Edits::parse(&forged).unwrap_err();
            assert!(flaw.0.starts_with("path 2: ") && flaw.0.contains(part), "{flaw}");
        }
        let many = |count: u32| {
            let mut many = edits();
            let first = many.paths[0].edits[0];
            let edit = |number| PastEdit { number, has_file: false, ..first };
            many.paths[1].edits.extend((2..=count).rev().map(edit));
            many.paths[1].edits.rotate_left(1);
            many.paths[1].next = count + 1;
            many.encode()
        };
        assert!(many(MAX_COUNT as u32 - 2).is_ok());
        let flaw = many(MAX_COUNT as u32 - 1).unwrap_err();
        assert!(flaw.0.starts_with("'a/b': the number of edits"), "{flaw}");
        let mut huge = bytes.clone();
        huge[at + 5] = 0x7f;
        assert!(Edits::parse(&huge).unwrap_err().0.starts_with("'a/b': "));
    }
}
