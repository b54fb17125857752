//! Puts a whole state into the tree: a tree stream in which the bytes of a chunk follow its name.
//!
//! The reader of the stream checks its rules: names without a path, in order, and links to earlier
//! entries only. So an entry lies in the directory that began last, and the stream reaches nothing
//! else.

use std::collections::HashMap;
use std::io::{BufReader, Read};

use super::bad;
use super::builder::{Builder, Dir};
use super::content::{Old, Receiving};
use super::place::{self, Placed, Wanted, of_fs};
use crate::error::{Attempt, Error, FsError, Result};
use crate::fs::MAX_FILE_SIZE;
use crate::store::archive::bytes::{Input, cut_off};
use crate::store::archive::tree_blob::{Attributes, Event, Piece, TreeReader};
use crate::store::archive::{Digest, Flaw};
use crate::tree::{Body, Meta};
use crate::types::{ByteRange, FileKind, Ino, Name, TreePath};

/// Bytes that are read at once.
const BUFFER: usize = 256 << 10;

/// Bytes that arrive.
struct Arriving<R>(BufReader<R>);

fn failed(error: std::io::Error) -> Flaw {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => cut_off(),
        _ => Flaw::new(error.to_string()),
    }
}

impl<R: Read> Input for Arriving<R> {
    fn byte(&mut self) -> std::result::Result<u8, Flaw> {
        let mut byte = [0];
        self.fill(&mut byte)?;
        Ok(byte[0])
    }

    fn fill(&mut self, bytes: &mut [u8]) -> std::result::Result<(), Flaw> {
        self.0.read_exact(bytes).map_err(failed)
    }

    fn is_at_end(&mut self) -> std::result::Result<bool, Flaw> {
        use std::io::BufRead;
        self.0.fill_buf().map(<[u8]>::is_empty).map_err(failed)
    }
}

type Stream<R> = TreeReader<Arriving<R>>;

/// The way from the root to the present entry, and the nodes so far.
struct Walk<'a, 'b> {
    builder: &'a mut Builder<'b>,
    dirs: Vec<(Dir, TreePath)>,
    /// The node of each entry.
    nodes: Vec<Ino>,
    /// Where the files are that stay as the base has them: they have no record.
    unrecorded: HashMap<Ino, TreePath>,
}

/// Puts the entries of a state into the tree.
///
/// # Errors
/// The stream is malformed, a chunk has other bytes than its name says, or a limit is exceeded;
/// those of the sender, the store and the base. They name the entry.
pub(super) fn add_all(builder: &mut Builder<'_>, from: &mut dyn Read) -> Result<()> {
    let mut stream = TreeReader::new(Arriving(BufReader::with_capacity(BUFFER, from)), "the state");
    let mut walk =
        Walk { builder, dirs: Vec::new(), nodes: Vec::new(), unrecorded: HashMap::new() };
    while let Some(event) = stream.next_event()? {
        match event {
            Event::End => drop(walk.dirs.pop()),
            Event::Dir { name: None, attributes } => walk.root(&attributes)?,
            Event::Dir { name: Some(name), attributes } => walk.directory(name, &attributes)?,
            Event::File { name, attributes, size } => {
                walk.file(name, &attributes, size, &mut stream)?;
            }
            Event::Symlink { name, attributes, target } => {
                let body = Body::Symlink { target };
                walk.special(name, &attributes, (FileKind::Symlink, 0), body)?;
            }
            Event::Special { name, attributes, kind, rdev } => {
                walk.special(name, &attributes, (kind, rdev), Body::Special)?;
            }
            Event::Link { name, of } => walk.link(name, of)?,
            // Its file takes each of them.
            Event::Piece(_) => {}
        }
    }
    Ok(())
}

impl Walk<'_, '_> {
    fn path(&self, name: &Name) -> TreePath {
        self.dirs.last().map_or_else(TreePath::root, |(_, path)| path.clone()).join(name)
    }

    fn parent(&self, path: &TreePath) -> Result<Dir> {
        let parent = self.dirs.last().map(|(dir, _)| dir.clone());
        parent.ok_or_else(|| bad(path.as_bytes(), "it is in no directory"))
    }

    fn count(&mut self, path: &TreePath, attributes: Option<&Attributes>) -> Result<()> {
        let xattrs = attributes.iter().flat_map(|attributes| &attributes.xattrs);
        let bytes: usize = xattrs.map(|(name, value)| name.len() + value.len()).sum();
        // The entry itself, and its number in the list of nodes.
        if self.builder.count((path.as_bytes().len() + bytes) as u64) {
            return Ok(());
        }
        let most = self.builder.limits.metadata >> 20;
        let why = format!("the state has more than {most} MiB of names and attributes");
        Err(bad(path.as_bytes(), why))
    }

    fn wanted<'p>(
        &mut self,
        path: &'p TreePath,
        attributes: &Attributes,
        (kind, rdev): (FileKind, u64),
    ) -> Result<Wanted<'p>> {
        self.count(path, Some(attributes))?;
        let path = path.as_bytes();
        let xattrs = place::xattrs(self.builder, path, kind, attributes.xattrs.iter())?;
        let Attributes { perms, uid, gid, mtime, ctime, atime, .. } = *attributes;
        let mode = kind.type_bits() | perms;
        let meta = Meta { mode, uid, gid, nlink: 1, rdev, atime, mtime, ctime };
        Ok(Wanted { path, meta, xattrs, has_all_times: true })
    }

    fn placed<'p>(
        &mut self,
        (path, name): (&'p TreePath, Name),
        attributes: &Attributes,
        kind: (FileKind, u64),
    ) -> Result<Placed<'p>> {
        let dir = self.parent(path)?;
        let wanted = self.wanted(path, attributes, kind)?;
        let found =
            self.builder.find(&dir, &name).map_err(|error| of_fs(path.as_bytes(), error))?;
        Ok(Placed { wanted, dir, name, found })
    }

    fn root(&mut self, attributes: &Attributes) -> Result<()> {
        let path = TreePath::root();
        let during = |error: FsError| of_fs(b".", error);
        let wanted = self.wanted(&path, attributes, (FileKind::Dir, 0))?;
        let found = self.builder.state.resolve(&path).map_err(during)?;
        let ino = place::set_directory(self.builder, &wanted, &found).map_err(during)?;
        self.nodes.push(ino);
        self.dirs.push((self.builder.state.root(), path));
        Ok(())
    }

    fn directory(&mut self, name: Name, attributes: &Attributes) -> Result<()> {
        let path = self.path(&name);
        let during = |error: FsError| of_fs(path.as_bytes(), error);
        let placed = self.placed((&path, name), attributes, (FileKind::Dir, 0))?;
        let ino = place::directory(self.builder, &placed).map_err(during)?;
        let found = self.builder.find(&placed.dir, &placed.name).map_err(during)?;
        let dir = self.builder.state.as_dir(&found);
        let dir = dir.ok_or_else(|| bad(path.as_bytes(), "it is no directory"))?;
        self.nodes.push(ino);
        self.dirs.push((dir, path));
        Ok(())
    }

    fn file<R: Read>(
        &mut self,
        name: Name,
        attributes: &Attributes,
        size: u64,
        stream: &mut Stream<R>,
    ) -> Result<()> {
        let path = self.path(&name);
        let during = |error: FsError| of_fs(path.as_bytes(), error);
        if size > MAX_FILE_SIZE {
            let why = format!("it has {size} bytes, and a file has at most {MAX_FILE_SIZE}");
            return Err(bad(path.as_bytes(), why));
        }
        let placed = self.placed((&path, name), attributes, (FileKind::File, 0))?;
        let builder = &mut *self.builder;
        let reused = place::reusable(builder, &placed.found, FileKind::File).map_err(during)?;
        let old = Old::of(&builder.state, &placed.found).map_err(during)?;
        let ino = match &reused {
            Some((ino, _)) => *ino,
            None => builder.fresh()?,
        };
        let mut receiving = Receiving::new(builder, ino, old.as_ref(), size);
        receive(&mut receiving, size, stream)
            .map_err(|error| error.during(format!("import entry '{path}'")))?;
        let content = receiving.finish();
        place::file(builder, &placed, (ino, reused.is_some()), old, (size, content))
            .map_err(during)?;
        self.note(ino, path);
        Ok(())
    }

    /// Notes the node of a new entry that can have further names.
    fn note(&mut self, ino: Ino, path: TreePath) {
        self.nodes.push(ino);
        if self.builder.state.tree.node(ino).is_none() {
            self.unrecorded.insert(ino, path);
        }
    }

    fn special(
        &mut self,
        name: Name,
        attributes: &Attributes,
        (kind, rdev): (FileKind, u64),
        body: Body,
    ) -> Result<()> {
        let path = self.path(&name);
        let is_device = matches!(kind, FileKind::Char | FileKind::Block);
        if is_device && !self.builder.limits.devices {
            return Err(bad(path.as_bytes(), "only root makes device nodes"));
        }
        let mut placed = self.placed((&path, name), attributes, (kind, rdev))?;
        let ino = place::special(self.builder, &mut placed, kind, body)
            .map_err(|error| of_fs(path.as_bytes(), error))?;
        self.note(ino, path);
        Ok(())
    }

    /// Gives the node of an earlier entry another name.
    fn link(&mut self, name: Name, of: u64) -> Result<()> {
        let path = self.path(&name);
        let during = |error: FsError| of_fs(path.as_bytes(), error);
        self.count(&path, None)?;
        let ino = usize::try_from(of).ok().and_then(|of| self.nodes.get(of)).copied();
        let ino = ino.ok_or_else(|| bad(path.as_bytes(), format!("a hard link to entry {of}")))?;
        let dir = self.parent(&path)?;
        let found = self.builder.find(&dir, &name).map_err(during)?;
        self.nodes.push(ino);
        if found.ino() == Some(ino) {
            return Ok(());
        }
        self.builder.detach(&dir, &name).map_err(during)?;
        if let Some(there) = self.unrecorded.remove(&ino) {
            let found = self.builder.state.resolve(&there).map_err(during)?;
            self.builder.copy_up(&found).map_err(during)?;
        }
        if !place::count_link(self.builder, ino).map_err(during)? {
            return Err(place::too_many_links(path.as_bytes(), &format!("entry {of}")));
        }
        self.builder.attach(&dir, &name, ino).map_err(during)
    }
}

/// Receives the content of a file: holes, and chunks whose bytes are verified.
fn receive<R: Read>(to: &mut Receiving<'_, '_>, size: u64, stream: &mut Stream<R>) -> Result<()> {
    let mut at = 0;
    let mut bytes = Vec::new();
    while at < size {
        let Some(Event::Piece(piece)) = stream.next_event()? else {
            return Err(Error::damage("read the state", "the content of a file is missing"));
        };
        match piece {
            Piece::Hole(len) => {
                let compared = to.hole(ByteRange::at(at, len));
                compared.attempt(|| "compare the content")?;
            }
            Piece::Chunk(chunk) => {
                bytes.resize(chunk.len as usize, 0);
                let filled = stream.input().fill(&mut bytes);
                filled.map_err(|flaw| Error::damage("read the state", flaw.0))?;
                if Digest::of(&bytes) != chunk.digest {
                    let why = format!("the bytes of chunk {} are others", chunk.digest);
                    return Err(Error::damage("read the state", why));
                }
                to.piece(at, &bytes)?;
            }
        }
        at += piece.len();
    }
    Ok(())
}
