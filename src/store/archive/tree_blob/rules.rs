//! The rules of a tree stream, which the writer and the reader check alike. So whatever was written
//! can be read.

use crate::store::archive::tree_blob::HOLE_BLOCK;
use crate::store::archive::tree_blob::layout::{Event, MAX_BASE_PATH, MAX_TARGET, Piece};
use crate::store::archive::{Flaw, MAX_CHUNK};
use crate::types::{Name, TreePath};

/// The most bytes of a path. Nothing below it could be named by a system call in one go, but trees
/// that are deeper than `PATH_MAX` exist.
const MAX_PATH: usize = 1 << 20;

/// The file whose pieces follow.
struct OpenFile {
    size: u64,
    at: u64,
    is_after_hole: bool,
}

/// The stream that was read or written so far.
#[derive(Default)]
pub(super) struct Rules {
    /// Of each open directory, the last name in it: so of each but the last, the next one's name.
    last_names: Vec<Option<Name>>,
    path_len: usize,
    file: Option<OpenFile>,
    entries: u64,
    /// One bit for each entry: whether links may name its node.
    linkable: Vec<u64>,
    is_over: bool,
}

impl Rules {
    /// Entries so far.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// Whether the root directory has ended.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether a piece of a file must come next.
    pub(super) fn wants_piece(&self) -> bool {
        self.file.is_some()
    }

    /// The path of the last entry, for messages.
    pub(super) fn path(&self) -> TreePath {
        TreePath::of_names(self.last_names.iter().flatten())
    }

    /// A flaw of the last entry.
    pub(super) fn flaw(&self, flaw: &Flaw) -> Flaw {
        Flaw::new(format!("'{}': {flaw}", self.path()))
    }

    /// Checks an event that follows those before.
    pub(super) fn check(&mut self, event: &Event) -> Result<(), Flaw> {
        self.enter(event).map_err(|flaw| self.flaw(&flaw))
    }

    fn enter(&mut self, event: &Event) -> Result<(), Flaw> {
        if self.is_over {
            return Err(Flaw::new("an entry after the end of the root"));
        }
        match (event, self.file.is_some()) {
            (Event::Piece(piece), true) => return self.check_piece(piece),
            (Event::Piece(_), false) => return Err(Flaw::new("content beyond the end of a file")),
            (_, true) => return Err(Flaw::new("a file without all of its content")),
            (Event::End, false) => return self.end_directory(),
            _ => {}
        }
        self.check_name(event.name())?;
        let number = self.entries;
        self.entries += 1;
        let is_linkable = match event {
            Event::Dir { .. } => {
                self.last_names.push(None);
                false
            }
            Event::Link { of, .. } => {
                if *of >= number || !self.is_linkable(*of) {
                    return Err(Flaw::new(format!("a hard link to entry {of}")));
                }
                false
            }
            Event::File { size, .. } => {
                if i64::try_from(*size).is_err() {
                    return Err(Flaw::new("a file of more than 2^63 - 1 bytes"));
                }
                let file = OpenFile { size: *size, at: 0, is_after_hole: false };
                self.file = (*size > 0).then_some(file);
                true
            }
            Event::Symlink { target, .. } => {
                if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
                    return Err(Flaw::new("not the text of a symbolic link"));
                }
                true
            }
            Event::BaseFile { size, path, .. } => {
                if i64::try_from(*size).is_err() || path.as_bytes().len() > MAX_BASE_PATH {
                    return Err(Flaw::new("a file of more than 2^63 - 1 bytes, or a long path"));
                }
                true
            }
            Event::Special { .. } => true,
            Event::End | Event::Piece(_) => false,
        };
        self.note_linkable(number, is_linkable);
        Ok(())
    }

    /// Only the first entry has no name; the names of a directory ascend.
    fn check_name(&mut self, name: Option<&Name>) -> Result<(), Flaw> {
        match (self.last_names.last_mut(), name) {
            (None, None) => Ok(()),
            (None, Some(_)) => Err(Flaw::new("the root is missing")),
            (Some(_), None) => Err(Flaw::new("a directory without a name")),
            (Some(last), Some(name)) => {
                let is_later = last.as_ref().is_none_or(|last| last < name);
                let before = last.as_ref().map_or(0, |last| last.as_bytes().len() + 1);
                self.path_len = self.path_len + name.as_bytes().len() + 1 - before;
                *last = Some(name.clone());
                if !is_later {
                    return Err(Flaw::new("a name that does not ascend"));
                }
                if self.path_len > MAX_PATH {
                    return Err(Flaw::new("a path of more than 1 MiB"));
                }
                Ok(())
            }
        }
    }

    fn end_directory(&mut self) -> Result<(), Flaw> {
        let Some(last) = self.last_names.pop() else {
            return Err(Flaw::new("the root is missing"));
        };
        self.path_len -= last.map_or(0, |last| last.as_bytes().len() + 1);
        self.is_over = self.last_names.is_empty();
        Ok(())
    }

    fn check_piece(&mut self, piece: &Piece) -> Result<(), Flaw> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let left = file.size - file.at;
        let len = piece.len();
        if piece.is_empty() || len > left {
            return Err(Flaw::new("content beyond the end of a file"));
        }
        match piece {
            Piece::Chunk(_) if len > MAX_CHUNK as u64 => {
                return Err(Flaw::new("a chunk of too many bytes"));
            }
            Piece::Chunk(_) => file.is_after_hole = false,
            Piece::Hole(_) => {
                let is_aligned = |at: u64| at.is_multiple_of(HOLE_BLOCK);
                let is_whole = is_aligned(file.at) && (len == left || is_aligned(len));
                if file.is_after_hole || !is_whole {
                    return Err(Flaw::new("a hole that does not consist of whole blocks"));
                }
                file.is_after_hole = true;
            }
        }
        file.at += len;
        if len == left {
            self.file = None;
        }
        Ok(())
    }

    fn note_linkable(&mut self, number: u64, is_linkable: bool) {
        if number.is_multiple_of(64) {
            self.linkable.push(0);
        }
        if let Some(bits) = self.linkable.last_mut() {
            *bits |= u64::from(is_linkable) << (number % 64);
        }
    }

    fn is_linkable(&self, number: u64) -> bool {
        let bits = usize::try_from(number / 64).ok().and_then(|at| self.linkable.get(at));
        bits.is_some_and(|bits| bits >> (number % 64) & 1 == 1)
    }
}
