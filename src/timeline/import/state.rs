//! Puts a whole state into the tree.
//!
//! ```text
//! state        0 | stream; or 1 | name | message | seconds signed | nanoseconds | stream
//! edits        2 | document, with its length | stream
//! after a File 0: the bytes of each chunk follow its name | 1: the content is that of the file
//!              which stands at the path before, and no bytes follow
//! ```
//!
//! A state with 1 is a checkpoint. An empty file has no byte after it. Edits come last
//! (`store/archive/edits.rs`).
//!
//! The reader of the stream checks its rules: names without a path, in order, and links to earlier
//! entries only. So an entry lies in the directory that began last, and the stream reaches nothing
//! else.

use std::collections::HashMap;
use std::io::{BufReader, Read};
use std::sync::Arc;

use super::bad;
use super::builder::{Builder, Dir};
use super::content::{Content, Old, Receiving};
use super::place::{self, Placed, Wanted, of_fs};
use crate::error::{self, Attempt, Error, FsError, Result};
use crate::fs::{Extents, Found, MAX_FILE_SIZE, State};
use crate::store::archive::bytes::{self, Input, cut_off};
use crate::store::archive::edits::{Edits, MAX_EDITS};
use crate::store::archive::tree_blob::{Attributes, ContentDigest, Event, Piece, TreeReader};
use crate::store::archive::{Chunk, Digest, Flaw};
use crate::store::record::Seal;
use crate::timeline::archive::{PieceSink, base_path, cut, record_digest};
use crate::tree::{Body, Meta, Tree};
use crate::types::{ByteRange, FileKind, Ino, Name, Timestamp, TreePath};

/// Bytes that are read at once.
const BUFFER: usize = 256 << 10;

/// Bytes that arrive.
pub(super) struct Arriving<R>(BufReader<R>);

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

pub(super) type Stream<R> = TreeReader<Arriving<R>>;

/// The most bytes of the name and of the message of a checkpoint.
const MAX_NAME: usize = 255;
const MAX_MESSAGE: usize = 4 << 20;
/// The most files of the base that a refusal names.
const MAX_NAMED: usize = 100;

/// A state that arrives.
pub(super) struct Incoming<R>(Stream<R>);

/// The kind of a stream.
pub(super) enum Kind {
    /// The last state.
    Last,
    /// A checkpoint.
    Checkpoint(Seal),
    /// The files before edits.
    Edits(Edits),
}

impl<R: Read> Incoming<R> {
    /// Reads what stands before the stream.
    ///
    /// # Errors
    /// It is malformed; those of the sender.
    pub(super) fn begin(from: R) -> Result<(Incoming<R>, Kind)> {
        let mut input = Arriving(BufReader::with_capacity(BUFFER, from));
        let kind = take_kind(&mut input);
        let kind = kind.map_err(|flaw| Error::damage("read the state", flaw.0))?;
        Ok((Incoming(TreeReader::new(input, "the state")), kind))
    }

    pub(super) fn stream(&mut self) -> &mut Stream<R> {
        &mut self.0
    }
}

fn take_kind(input: &mut dyn Input) -> std::result::Result<Kind, Flaw> {
    match input.byte()? {
        0 => Ok(Kind::Last),
        1 => take_seal(input).map(Kind::Checkpoint),
        2 => {
            let document = bytes::bytes(input, MAX_EDITS, "the length of the edits")?;
            Edits::parse(&document).map(Kind::Edits)
        }
        _ => Err(Flaw::new("neither a state nor edits")),
    }
}

fn take_seal(input: &mut dyn Input) -> std::result::Result<Seal, Flaw> {
    let mut text = |most: usize, what: &str| {
        let text = String::from_utf8(bytes::bytes(input, most, what)?);
        text.map_err(|_| Flaw::new("a text that is not UTF-8"))
    };
    let name = text(MAX_NAME, "the length of a name")?;
    let message = text(MAX_MESSAGE, "the length of a message")?;
    let secs = bytes::signed(input)?;
    let nanos = bytes::at_most(input, 999_999_999, "the nanoseconds of a time")? as u32;
    let name = Some(name).filter(|name| !name.is_empty());
    Ok(Seal { name, message, time: Timestamp { secs, nanos }, automatic: false })
}

/// The way from the root to the present entry, and the nodes so far.
struct Walk<'a, 'b> {
    builder: &'a mut Builder<'b>,
    dirs: Vec<(Dir, TreePath)>,
    /// The node of each entry.
    nodes: Vec<Ino>,
    /// Where the files are that stay as the base has them: they have no record.
    unrecorded: HashMap<Ino, TreePath>,
    /// The base alone, for a thin description.
    base: State,
    relied: &'a mut Relied,
    /// The first files of the base that are others than the description relies on, and their
    /// number.
    unlike: Vec<String>,
    unlike_count: u64,
}

/// The files of the base that a pull has read, by the digest of the record. A file that another
/// program has changed meanwhile has another record, so it is read again.
#[derive(Default)]
pub(super) struct Relied(HashMap<Digest, ReliedFile>);

/// A file of the base that was read.
struct ReliedFile {
    /// The digest of its content.
    digest: Digest,
    /// Where the pull has stored all of its content, if it has.
    stored: Option<Extents>,
}

/// Computes the digest of a file of the base, and stores the same bytes on the way.
struct ReadOnce<'r, 'a, 'b> {
    digest: ContentDigest,
    to: Option<&'r mut Receiving<'a, 'b>>,
    at: u64,
}

/// A file that gets its content: its place, the file there before, and its node.
struct NewFile<'p> {
    placed: Placed<'p>,
    old: Option<Old>,
    ino: Ino,
    is_reused: bool,
}

/// Puts the entries of a state into the tree. `relied` has the files of the base that the pull has
/// read for the states before.
///
/// # Errors
/// The stream is malformed, a chunk has other bytes than its name says, or a limit is exceeded;
/// those of the sender, the store and the base. They name the entry.
pub(super) fn add_all<R: Read>(
    builder: &mut Builder<'_>,
    incoming: Incoming<R>,
    relied: &mut Relied,
) -> Result<()> {
    let Incoming(mut stream) = incoming;
    let base = State { tree: Tree::new(), lower: Arc::clone(&builder.state.lower) };
    let mut walk = Walk {
        builder,
        dirs: Vec::new(),
        nodes: Vec::new(),
        unrecorded: HashMap::new(),
        base,
        relied,
        unlike: Vec::new(),
        unlike_count: 0,
    };
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
            Event::BaseFile { name, attributes, size, path, digest } => {
                walk.base_file(name, &attributes, size, (&path, digest))?;
            }
            // Its file takes each of them.
            Event::Piece(_) => {}
        }
    }
    walk.check_base()
}

impl Walk<'_, '_> {
    /// Refuses a base in which files differ.
    fn check_base(self) -> Result<()> {
        if self.unlike.is_empty() {
            return Ok(());
        }
        let more = self.unlike_count - self.unlike.len() as u64;
        let mut why = format!("the base differs: {}", self.unlike.join(", "));
        if more > 0 {
            why = format!("{why}, and {more} more");
        }
        Err(Error::new(error::Kind::Conflict, "pull a thin state", why)
            .hint("pull it on the base that it was pushed from, or push it without --thin"))
    }

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
        let file = self.begin_file((&path, name), attributes, size)?;
        let content = receive((self.builder, file.ino), file.old.as_ref(), size, stream)
            .map_err(|error| error.during(format!("import entry '{path}'")))?;
        self.end_file(&path, file, (size, content))
    }

    /// Finds the place of a file, and its node.
    fn begin_file<'p>(
        &mut self,
        (path, name): (&'p TreePath, Name),
        attributes: &Attributes,
        size: u64,
    ) -> Result<NewFile<'p>> {
        let during = |error: FsError| of_fs(path.as_bytes(), error);
        check_size(path, size)?;
        let placed = self.placed((path, name), attributes, (FileKind::File, 0))?;
        let reused =
            place::reusable(self.builder, &placed.found, FileKind::File).map_err(during)?;
        let old = Old::of(&self.builder.state, &placed.found).map_err(during)?;
        let ino = match &reused {
            Some((ino, _)) => *ino,
            None => self.builder.fresh()?,
        };
        Ok(NewFile { placed, old, ino, is_reused: reused.is_some() })
    }

    /// Puts a file whose content is there.
    fn end_file(
        &mut self,
        path: &TreePath,
        file: NewFile<'_>,
        content: (u64, Content),
    ) -> Result<()> {
        let NewFile { placed, old, ino, is_reused } = file;
        place::file(self.builder, &placed, (ino, is_reused), old, content)
            .map_err(|error| of_fs(path.as_bytes(), error))?;
        self.note(ino, path.clone());
        Ok(())
    }

    /// Puts a file whose content is that of a file of the base, if that has the digest.
    fn base_file(
        &mut self,
        name: Name,
        attributes: &Attributes,
        size: u64,
        (base, digest): (&TreePath, Digest),
    ) -> Result<()> {
        let path = self.path(&name);
        let file = self.begin_file((&path, name), attributes, size)?;
        let there = self.base.resolve(base).map_err(|error| of_fs(path.as_bytes(), error))?;
        let (content, unlike) = match self.base.kind_and_size(&there) {
            None => (Content::default(), Some("is missing")),
            Some((FileKind::File, found)) if found == size => {
                let (content, found) = self
                    .rely(&file, (base, &there), size)
                    .map_err(|error| error.during(format!("import entry '{path}'")))?;
                (content, (found != digest).then_some("has other content"))
            }
            Some((FileKind::File, _)) => (Content::default(), Some("has another size")),
            Some(_) => (Content::default(), Some("is no file")),
        };
        if let Some(why) = unlike {
            self.unlike_count += 1;
            if self.unlike.len() < MAX_NAMED {
                self.unlike.push(format!("'{base}' {why}"));
            }
        }
        self.end_file(&path, file, (size, content))
    }

    /// Takes the content of the file `there` of the base, and returns its digest, which is that of
    /// the bytes that are stored. The caller refuses the state if it is another one.
    fn rely(
        &mut self,
        file: &NewFile<'_>,
        (base, there): (&TreePath, &Found),
        size: u64,
    ) -> Result<(Content, Digest)> {
        let attempt = || "read the base";
        let record = record_digest(&self.base, there).attempt(attempt)?;
        let relies_on = match &file.old {
            Some(old) => base_path(&self.builder.state, &old.found).attempt(attempt)?,
            None => None,
        };
        let mut receiving = Receiving::new(self.builder, file.ino, file.old.as_ref(), size);
        let stands = relies_on.as_ref() == Some(base) && receiving.keep(size);
        // After a difference, only the names of the rest count.
        let copies = !stands && self.unlike.is_empty();
        if let Some(known) = self.relied.0.get(&record)
            && (!copies || known.stored.is_some())
        {
            known.stored.iter().filter(|_| copies).for_each(|stored| receiving.take(stored));
            return Ok((receiving.finish()?, known.digest));
        }
        let to = copies.then_some(&mut receiving);
        let mut once = ReadOnce { digest: ContentDigest::default(), to, at: 0 };
        cut(&self.base, there, size, base, &mut once)?;
        let (digest, content) = (once.digest.finish(), receiving.finish()?);
        // Extents of a base file belong to the file that stands there.
        let is_stored = copies && !content.extents.iter().any(|(_, source)| source.is_base());
        let stored = is_stored.then(|| content.extents.clone());
        self.relied.0.insert(record, ReliedFile { digest, stored });
        Ok((content, digest))
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

pub(super) fn check_size(path: &TreePath, size: u64) -> Result<()> {
    if size <= MAX_FILE_SIZE {
        return Ok(());
    }
    let why = format!("it has {size} bytes, and a file has at most {MAX_FILE_SIZE}");
    Err(bad(path.as_bytes(), why))
}

impl PieceSink for ReadOnce<'_, '_, '_> {
    fn piece(&mut self, piece: Piece, chunk: Option<Chunk<'_>>) -> Result<()> {
        self.digest.add(&piece);
        let at = self.at;
        self.at += piece.len();
        match (&mut self.to, chunk) {
            (None, _) => Ok(()),
            (Some(to), Some(chunk)) => to.piece(at, chunk.bytes()),
            (Some(to), None) => {
                to.hole(ByteRange::at(at, piece.len())).attempt(|| "compare the content")
            }
        }
    }
}

/// Receives the content of a file for the node `ino`. `old` stands there now.
pub(super) fn receive<R: Read>(
    (builder, ino): (&mut Builder<'_>, Ino),
    old: Option<&Old>,
    size: u64,
    stream: &mut Stream<R>,
) -> Result<Content> {
    let damage = |why: String| Error::damage("read the state", why);
    let has_bytes = match size {
        0 => true,
        _ => match stream.input().byte().map_err(|flaw| damage(flaw.0))? {
            0 => true,
            1 => false,
            _ => return Err(damage("a file with neither bytes nor the content before".into())),
        },
    };
    let mut receiving = Receiving::new(builder, ino, old, size);
    if !has_bytes && !receiving.keep(size) {
        return Err(damage("no file of this size stands there".to_owned()));
    }
    let mut at = 0;
    let mut bytes = Vec::new();
    while at < size {
        let Some(Event::Piece(piece)) = stream.next_event()? else {
            return Err(damage("the content of a file is missing".to_owned()));
        };
        match piece {
            _ if !has_bytes => {}
            Piece::Hole(len) => {
                let compared = receiving.hole(ByteRange::at(at, len));
                compared.attempt(|| "compare the content")?;
            }
            Piece::Chunk(chunk) => {
                bytes.resize(chunk.len as usize, 0);
                let filled = stream.input().fill(&mut bytes);
                filled.map_err(|flaw| damage(flaw.0))?;
                if Digest::of(&bytes) != chunk.digest {
                    return Err(damage(format!("the bytes of chunk {} are others", chunk.digest)));
                }
                receiving.piece(at, &bytes)?;
            }
        }
        at += piece.len();
    }
    receiving.finish()
}
