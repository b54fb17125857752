//! Builds a state from a tree blob the plain way, which an import is compared with: a tree without
//! a base below it, and its content in a layer.

use std::sync::Arc;

use crate::error::{Attempt, Error, Result};
use crate::store::Store;
use crate::store::archive::tree_blob::{Attributes, Event, Piece, TreeBlob, load};
use crate::store::archive::{ChunkRef, ChunkSource};
use crate::store::content::pool::PoolWriter;
use crate::tree::{Body, Dentry, Edit, Meta, Misfit, Node, Source, Tree};
use crate::types::{ByteRange, FileKind, Ino, Name};

/// The file whose content comes.
struct OpenFile {
    ino: Ino,
    at: u64,
    size: u64,
}

struct Builder<'a> {
    store: &'a Store,
    source: &'a dyn ChunkSource,
    pool: &'a mut PoolWriter,
    tree: Tree,
    /// The directories from the root to the present entry.
    dirs: Vec<Ino>,
    /// The node of each entry.
    nodes: Vec<Ino>,
    file: Option<OpenFile>,
}

/// Builds the tree of a state whose chunks `source` has. The content is written to `pool`, whose
/// layer nothing refers to yet; the caller records the tree there.
///
/// # Errors
/// Damage, with the path of the entry; a missing chunk; and those of the store.
pub fn build(
    store: &Store,
    pool: &mut PoolWriter,
    blob: &TreeBlob,
    source: &dyn ChunkSource,
) -> Result<Tree> {
    let mut builder = Builder {
        store,
        source,
        pool,
        tree: Tree::new(),
        dirs: Vec::new(),
        nodes: Vec::new(),
        file: None,
    };
    load(blob, source, &mut |event| builder.take(event))?;
    Ok(builder.tree)
}

impl Builder<'_> {
    fn apply(&mut self, edit: &Edit) -> Result<()> {
        self.tree.apply(edit).map_err(|Misfit(why)| Error::damage("build the state", why))
    }

    fn take(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Dir { name, attributes } => {
                let ino = self.add(
                    name.as_ref(),
                    FileKind::Dir,
                    (attributes, 0),
                    Body::Dir { base: None },
                )?;
                self.dirs.push(ino);
                Ok(())
            }
            Event::End => {
                self.dirs.pop();
                Ok(())
            }
            Event::File { name, attributes, size } => {
                let body = Body::File { size, origin: None };
                let ino = self.add(Some(&name), FileKind::File, (attributes, 0), body)?;
                self.file = Some(OpenFile { ino, at: 0, size });
                Ok(())
            }
            Event::Piece(piece) => self.piece(piece),
            Event::Symlink { name, attributes, target } => {
                let body = Body::Symlink { target };
                self.add(Some(&name), FileKind::Symlink, (attributes, 0), body).map(drop)
            }
            Event::Special { name, attributes, kind, rdev } => {
                self.add(Some(&name), kind, (attributes, rdev), Body::Special).map(drop)
            }
            Event::Link { name, of } => self.link(&name, of),
            Event::BaseFile { .. } => Err(Error::damage("build the state", "it is thin")),
        }
    }

    /// Adds a node under a name; the root without one.
    fn add(
        &mut self,
        name: Option<&Name>,
        kind: FileKind,
        (attributes, rdev): (Attributes, u64),
        body: Body,
    ) -> Result<Ino> {
        let ino = match name {
            None => Ino::ROOT,
            Some(_) => self.store.identities().lock().fresh()?,
        };
        let Attributes { perms, uid, gid, mtime, ctime, atime, xattrs } = attributes;
        let nlink = if kind == FileKind::Dir { 2 } else { 1 };
        let mode = perms | kind.type_bits();
        let meta = Meta { mode, uid, gid, nlink, rdev, atime, mtime, ctime };
        let xattrs = (!xattrs.is_empty()).then(|| Arc::new(xattrs));
        self.apply(&Edit::Put { ino, node: Box::new(Node { meta, xattrs, body }) })?;
        if let Some(name) = name {
            if kind == FileKind::Dir {
                self.count_link(self.parent(), 1)?;
            }
            self.name(name, ino)?;
        }
        self.nodes.push(ino);
        Ok(ino)
    }

    fn parent(&self) -> Ino {
        self.dirs.last().copied().unwrap_or(Ino::ROOT)
    }

    fn name(&mut self, name: &Name, ino: Ino) -> Result<()> {
        let to = Some(Dentry::Child { ino, hides: None });
        self.apply(&Edit::Dentry { dir: self.parent(), name: name.clone(), to })
    }

    fn link(&mut self, name: &Name, of: u64) -> Result<()> {
        let ino = usize::try_from(of).ok().and_then(|of| self.nodes.get(of)).copied();
        let ino = ino.ok_or_else(|| Error::damage("build the state", "a link to no node"))?;
        self.count_link(ino, 1)?;
        self.name(name, ino)?;
        self.nodes.push(ino);
        Ok(())
    }

    fn count_link(&mut self, ino: Ino, by: u32) -> Result<()> {
        let Some(node) = self.tree.node(ino) else { return Ok(()) };
        let meta = Meta { nlink: node.meta.nlink.saturating_add(by), ..node.meta };
        self.apply(&Edit::Meta { ino, meta })
    }

    fn piece(&mut self, piece: Piece) -> Result<()> {
        let Some(OpenFile { ino, at, size }) = self.file else { return Ok(()) };
        let range = ByteRange::at(at, piece.len());
        self.file = Some(OpenFile { ino, at: range.end, size });
        match piece {
            Piece::Hole(_) => Ok(()),
            Piece::Chunk(chunk) => self.chunk(ino, range, &chunk, range.end == size),
        }
    }

    fn chunk(&mut self, ino: Ino, range: ByteRange, chunk: &ChunkRef, is_last: bool) -> Result<()> {
        let bytes = self.source.get(chunk)?;
        if bytes.len() as u64 != range.len() {
            let why = format!("chunk {} has another length", chunk.digest);
            return Err(Error::damage("build the state", why));
        }
        let offset = self.pool.allocate(ino, range, !(is_last && range.start == 0));
        self.pool.write(offset, &bytes).attempt(|| "write the content of the state")?;
        let to = Some(Source::Pool { layer: self.pool.layer(), offset });
        self.apply(&Edit::Map { ino, range, to })
    }
}
