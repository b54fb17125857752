//! Describes a state as a tree blob: walks the merged tree once, in order of names.

use std::collections::HashMap;
use std::collections::btree_map::IntoIter;
use std::sync::Arc;

use crate::error::{Attempt, Error, FsError, Kind, Result};
use crate::fs::merged::lower::{Extents, LowerNode};
use crate::fs::{Found, State};
use crate::store::archive::tree_blob::{
    Attributes, ContentDigest, Event, Piece, TreeBlob, TreeWriter,
};
use crate::store::archive::{Chunk, ChunkSink, Digest};
use crate::store::io::codec;
use crate::timeline::archive::content::{Cutter, PieceSink, ToStream};
use crate::tree::{Body, Node, Source};
use crate::types::{FileKind, Ino, Name, PERM_BITS, TreePath};

/// The most pieces that are remembered of earlier states.
const MAX_KNOWN: usize = 4 << 20;

/// Describes states, one after the other.
pub struct Describer {
    /// Whether files of the base are named by their digest instead of their content.
    is_thin: bool,
    /// The pieces of the content that earlier states had, by the digest of its record; `None` for a
    /// single state. Their chunks went to the sink before.
    known: Option<HashMap<Digest, Arc<Vec<Piece>>>>,
    known_pieces: usize,
    /// The digests of the base files that earlier states relied on, by the digest of the record.
    base: HashMap<Digest, Digest>,
}

/// A directory on the way from the root to the present entry.
struct Level {
    /// Its number, and the base path that it merges with.
    dir: (Ino, Option<TreePath>),
    path: TreePath,
    names: IntoIter<Name, (Ino, Option<FileKind>)>,
}

struct Walk<'a> {
    describer: &'a mut Describer,
    state: &'a State,
    sink: &'a mut dyn ChunkSink,
    tree: TreeWriter,
    /// The entries of nodes that may have further names.
    linked: HashMap<Ino, u64>,
}

impl Describer {
    /// A describer of one state, or of several that have most of their content in common.
    pub fn new(is_thin: bool, has_several: bool) -> Describer {
        let known = has_several.then(HashMap::new);
        Describer { is_thin, known, known_pieces: 0, base: HashMap::new() }
    }

    /// Describes a state. The chunks of its content, and those of the description, go to `sink`: a
    /// chunk as often as it occurs, except the content that an earlier state had.
    ///
    /// # Errors
    /// A node cannot be read, because the base changed or the path is hidden; and those of the
    /// sink.
    pub fn describe(&mut self, state: &State, sink: &mut dyn ChunkSink) -> Result<TreeBlob> {
        let (tree, linked) = (TreeWriter::default(), HashMap::new());
        let mut walk = Walk { describer: self, state, sink, tree, linked };
        let attempt = || "describe the root";
        let root = state.resolve(&TreePath::root()).attempt(attempt)?;
        let node = state.node(&root).attempt(attempt)?;
        let mut levels = vec![walk.enter(&root, &node, TreePath::root(), None)?];
        while let Some(level) = levels.last_mut() {
            let Some((name, _)) = level.names.next() else {
                walk.write(&Event::End)?;
                levels.pop();
                continue;
            };
            let path = level.path.join(&name);
            let attempt = || format!("describe '{path}'");
            let (dir, lower) = &level.dir;
            let found = state.find(*dir, lower.as_ref(), &name).attempt(attempt)?;
            let node = match state.node(&found) {
                Err(FsError::NotFound) => return Err(gone(attempt())),
                node => node.attempt(attempt)?,
            };
            match node.kind() {
                FileKind::Dir => {
                    levels.push(walk.enter(&found, &node, path.clone(), Some(name))?)
                }
                _ => walk.leaf(&found, &node, name, &path)?,
            }
        }
        walk.tree.finish(walk.sink)
    }

    fn remember(&mut self, record: Digest, pieces: Vec<Piece>) {
        if let Some(known) = &mut self.known
            && self.known_pieces + pieces.len() < MAX_KNOWN
        {
            self.known_pieces += pieces.len() + 1;
            known.insert(record, Arc::new(pieces));
        }
    }
}

/// Describes one state, as [`Describer::describe`].
///
/// # Errors
/// As there.
#[cfg(test)]
pub(super) fn describe(state: &State, sink: &mut dyn ChunkSink) -> Result<TreeBlob> {
    Describer::new(false, false).describe(state, sink)
}

fn gone(attempt: String) -> Error {
    Error::new(Kind::Conflict, attempt, "it vanished from the base meanwhile")
}

impl Walk<'_> {
    fn write(&mut self, event: &Event) -> Result<()> {
        self.tree.write(event, self.sink)
    }

    /// Begins a directory.
    fn enter(
        &mut self,
        found: &Found,
        node: &Node,
        path: TreePath,
        name: Option<Name>,
    ) -> Result<Level> {
        let attempt = || format!("list '{path}'");
        let dir = self.state.as_dir(found).ok_or_else(|| gone(attempt()))?;
        self.state.check_dir(dir.1.as_ref()).attempt(attempt)?;
        let names = self.state.merged_names(dir.0, dir.1.as_ref()).attempt(attempt)?;
        self.write(&Event::Dir { name, attributes: attributes(found, node) })?;
        Ok(Level { dir, path, names: names.into_iter() })
    }

    fn leaf(&mut self, found: &Found, node: &Arc<Node>, name: Name, path: &TreePath) -> Result<()> {
        if let Some(ino) = found.ino().filter(|_| node.meta.nlink > 1) {
            let next = self.tree.next_entry();
            match self.linked.get(&ino) {
                Some(of) => return self.write(&Event::Link { name, of: *of }),
                None => drop(self.linked.insert(ino, next)),
            }
        }
        let attributes = attributes(found, node);
        match &node.body {
            Body::File { size, .. } => self.file(found, *size, (name, attributes), path),
            Body::Symlink { target } => {
                self.write(&Event::Symlink { name, attributes, target: target.clone() })
            }
            Body::Special | Body::Dir { .. } => {
                let kind = node.kind();
                let is_device = matches!(kind, FileKind::Char | FileKind::Block);
                let rdev = if is_device { node.meta.rdev } else { 0 };
                self.write(&Event::Special { name, attributes, kind, rdev })
            }
        }
    }

    fn file(
        &mut self,
        found: &Found,
        size: u64,
        (name, attributes): (Name, Attributes),
        path: &TreePath,
    ) -> Result<()> {
        let attempt = || format!("read '{path}'");
        let record = match self.describer.known {
            Some(_) => Some(record_digest(self.state, found).attempt(attempt)?),
            None => None,
        };
        if self.describer.is_thin
            && let Some(base) = base_path(self.state, found).attempt(attempt)?
        {
            let digest = self.base_digest(record, found, size, path)?;
            return self.write(&Event::BaseFile { name, attributes, size, path: base, digest });
        }
        self.write(&Event::File { name, attributes, size })?;
        let Some(record) = record else { return self.content(found, size, path, None) };
        let known = self.describer.known.as_ref().and_then(|known| known.get(&record)).cloned();
        if let Some(pieces) = known {
            return pieces.iter().try_for_each(|piece| self.write(&Event::Piece(*piece)));
        }
        let mut pieces = Vec::new();
        self.content(found, size, path, Some(&mut pieces))?;
        self.describer.remember(record, pieces);
        Ok(())
    }

    fn content(
        &mut self,
        found: &Found,
        size: u64,
        path: &TreePath,
        noted: Option<&mut Vec<Piece>>,
    ) -> Result<()> {
        let mut to = ToStream { tree: &mut self.tree, sink: self.sink, noted };
        cut(self.state, found, size, path, &mut to)
    }

    /// The digest of the content of a base file. Each is read once.
    fn base_digest(
        &mut self,
        record: Option<Digest>,
        found: &Found,
        size: u64,
        path: &TreePath,
    ) -> Result<Digest> {
        let read = record.and_then(|record| self.describer.base.get(&record));
        if let Some(digest) = read {
            return Ok(*digest);
        }
        let digest = content_digest(self.state, found, size, path)?;
        if let Some(record) = record.filter(|_| self.describer.base.len() < MAX_KNOWN) {
            self.describer.base.insert(record, digest);
        }
        Ok(digest)
    }
}

/// Cuts the content of a file into pieces. `path` names it in errors.
pub(in crate::timeline) fn cut(
    state: &State,
    found: &Found,
    size: u64,
    path: &TreePath,
    to: &mut dyn PieceSink,
) -> Result<()> {
    let attempt = || format!("read '{path}'");
    let mut cutter = Cutter::new(to);
    let mut at = 0;
    for range in state.data(found) {
        let range = range.attempt(attempt)?;
        cutter.zeros(range.start - at)?;
        let bytes = state.read_range(found, range).attempt(attempt)?;
        if bytes.len() as u64 != range.len() {
            return Err(Error::new(Kind::Conflict, attempt(), "its length changed meanwhile"));
        }
        cutter.bytes(&bytes)?;
        at = range.end;
    }
    cutter.zeros(size - at)?;
    cutter.finish()
}

impl PieceSink for ContentDigest {
    fn piece(&mut self, piece: Piece, _: Option<Chunk<'_>>) -> Result<()> {
        self.add(&piece);
        Ok(())
    }
}

/// The digest of the content of a file, as a thin description has it. `path` names it in errors.
///
/// # Errors
/// The file cannot be read.
fn content_digest(state: &State, found: &Found, size: u64, path: &TreePath) -> Result<Digest> {
    let mut digest = ContentDigest::default();
    cut(state, found, size, path, &mut digest)?;
    Ok(digest.finish())
}

/// The digest of what says where the content of a file is. Two files with the same one have the
/// same content.
pub(in crate::timeline) fn record_digest(
    state: &State,
    found: &Found,
) -> std::result::Result<Digest, FsError> {
    let (node, extents) = state.record(found)?;
    let Body::File { size, origin } = &node.body else { return Err(FsError::Invalid) };
    let epoch = extents.iter().any(|(_, source)| source.is_base()).then(|| state.lower.epoch());
    let encoded = codec::encode(&(size, &extents, origin, epoch));
    encoded.map(|bytes| Digest::of(&bytes)).map_err(|_| FsError::Damage("a record of a file"))
}

/// The path of the file in the base that has all of the content of a file, and nothing else.
pub(in crate::timeline) fn base_path(
    state: &State,
    found: &Found,
) -> std::result::Result<Option<TreePath>, FsError> {
    let (node, extents) = match found {
        Found::Base(_, path, LowerNode::Base(_)) => return Ok(Some(path.clone())),
        Found::Upper(..) => state.record(found)?,
        Found::Base(..) | Found::Nothing(_) => return Ok(None),
    };
    let Body::File { origin: Some(origin), size } = &node.body else { return Ok(None) };
    if !extents.iter().all(|(range, source)| *source == Source::Base { offset: range.start }) {
        return Ok(None);
    }
    let Some((_, there @ LowerNode::Base(_))) = state.lower.lookup(&origin.path)? else {
        return Ok(None);
    };
    let (base, in_base): (Node, Extents) = state.lower.record(&origin.path, &there)?;
    let is_whole = matches!(&base.body, Body::File { origin: Some(now), size: now_size }
        if now_size == size && now.print == origin.print);
    Ok((is_whole && in_base == extents).then(|| origin.path.clone()))
}

/// The attributes of a node. Reading changes the time of access of a base node behind the sandbox,
/// so there the time of the last change stands for it: a state has one description.
pub(super) fn attributes(found: &Found, node: &Node) -> Attributes {
    let meta = node.meta;
    let is_lower = matches!(found, Found::Base(..));
    Attributes {
        perms: meta.mode & PERM_BITS,
        uid: meta.uid,
        gid: meta.gid,
        mtime: meta.mtime,
        ctime: meta.ctime,
        atime: if is_lower { meta.mtime } else { meta.atime },
        xattrs: node.xattrs.as_deref().cloned().unwrap_or_default(),
    }
}
