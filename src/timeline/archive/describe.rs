//! Describes a state as a tree blob: walks the merged tree once, in order of names.

use std::collections::HashMap;
use std::collections::btree_map::IntoIter;
use std::sync::Arc;

use crate::error::{Attempt, Error, FsError, Kind, Result};
use crate::fs::{Found, State};
use crate::store::archive::ChunkSink;
use crate::store::archive::tree_blob::{Attributes, Event, TreeBlob, TreeWriter};
use crate::timeline::archive::content::{Cutter, ToStream};
use crate::tree::{Body, Node};
use crate::types::{FileKind, Ino, Name, PERM_BITS, TreePath};

/// A directory on the way from the root to the present entry.
struct Level {
    /// Its number, and the base path that it merges with.
    dir: (Ino, Option<TreePath>),
    path: TreePath,
    names: IntoIter<Name, (Ino, Option<FileKind>)>,
}

struct Walk<'a> {
    state: &'a State,
    sink: &'a mut dyn ChunkSink,
    tree: TreeWriter,
    /// The entries of nodes that may have further names.
    linked: HashMap<Ino, u64>,
}

/// Describes a state. The chunks of its content, and those of the description, go to `sink`: a
/// chunk as often as it occurs.
///
/// # Errors
/// A node cannot be read, because the base changed or the path is hidden; and those of the sink.
pub fn describe(state: &State, sink: &mut dyn ChunkSink) -> Result<TreeBlob> {
    let mut walk = Walk { state, sink, tree: TreeWriter::default(), linked: HashMap::new() };
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
            FileKind::Dir => levels.push(walk.enter(&found, &node, path.clone(), Some(name))?),
            _ => walk.leaf(&found, &node, name, &path)?,
        }
    }
    walk.tree.finish(walk.sink)
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
            Body::File { size, .. } => {
                self.write(&Event::File { name, attributes, size: *size })?;
                self.content(found, *size, path)
            }
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

    fn content(&mut self, found: &Found, size: u64, path: &TreePath) -> Result<()> {
        let attempt = || format!("read '{path}'");
        let mut to = ToStream { tree: &mut self.tree, sink: self.sink };
        let mut cutter = Cutter::new(&mut to);
        let mut at = 0;
        for range in self.state.data(found) {
            let range = range.attempt(attempt)?;
            cutter.zeros(range.start - at)?;
            let bytes = self.state.read_range(found, range).attempt(attempt)?;
            if bytes.len() as u64 != range.len() {
                return Err(Error::new(Kind::Conflict, attempt(), "its length changed meanwhile"));
            }
            cutter.bytes(&bytes)?;
            at = range.end;
        }
        cutter.zeros(size - at)?;
        cutter.finish()
    }
}

/// The attributes of a node. Reading changes the time of access of a base node behind the sandbox,
/// so there the time of the last change stands for it: a state has one description.
fn attributes(found: &Found, node: &Node) -> Attributes {
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
