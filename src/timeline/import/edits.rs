//! Receives edit histories that were described elsewhere.
//!
//! The files before the edits go to the pool of a layer whose tree they do not change. A file is
//! compared with the next newer one of its path, and the newest with the file that the state has
//! there, so what they have in common is stored once.

use std::io::Read;
use std::sync::Arc;

use super::builder::Builder;
use super::content::Old;
use super::state::{Incoming, check_size, receive};
use super::{bad, place};
use crate::error::{Error, Result};
use crate::fs::{Found, PathEdits};
use crate::store::archive::edits::{Edits, FileCheck, PastEdit};
use crate::store::archive::tree_blob::{Attributes, Event};
use crate::store::edits_log::{Content, How, LoggedEdit};
use crate::tree::{Body, Edit, Meta, Node};
use crate::types::{FileKind, Ino, TreePath};

/// The histories that arrive.
struct Receiver<'a, 'b, R> {
    builder: &'a mut Builder<'b>,
    incoming: Incoming<R>,
    check: FileCheck,
}

/// Receives the edit histories of `document`, with the files before the edits.
///
/// # Errors
/// The stream is malformed or is not that of the document, a chunk has other bytes than its name
/// says, or a limit is exceeded; those of the sender, the store and the base. They name the path.
pub(super) fn receive_edits<R: Read>(
    builder: &mut Builder<'_>,
    document: Edits,
    incoming: Incoming<R>,
) -> Result<Vec<PathEdits>> {
    let mut receiver = Receiver { builder, incoming, check: FileCheck::default() };
    // The root.
    receiver.next_event()?;
    let paths = document.paths.into_iter();
    let received = paths.map(|one| {
        let path = one.path.clone();
        receiver.path(one).map_err(|error| error.during(format!("import the edits of '{path}'")))
    });
    let received = received.collect::<Result<Vec<PathEdits>>>()?;
    // The end of the root, and that of the stream.
    match (receiver.next_event()?, receiver.next_event()?) {
        (Some(Event::End), None) => Ok(received),
        _ => Err(other("more files than edits".to_owned())),
    }
}

fn other(why: String) -> Error {
    Error::damage("read the edits", why)
}

impl<R: Read> Receiver<'_, '_, R> {
    fn next_event(&mut self) -> Result<Option<Event>> {
        let event = self.incoming.stream().next_event()?;
        if let Some(event) = &event {
            self.check.see(event).map_err(|flaw| other(flaw.0))?;
        }
        Ok(event)
    }

    /// Receives the edits of a path.
    fn path(&mut self, one: crate::store::archive::edits::PathEdits) -> Result<PathEdits> {
        let crate::store::archive::edits::PathEdits { path, next, undone_to, edits } = one;
        let live = self.live(&path);
        let (mut received, mut newer, mut is_cut) = (Vec::new(), None::<(Ino, Old)>, false);
        for PastEdit { number, time, kind, has_file } in edits {
            let how = How::of_code(kind).ok_or_else(|| other(format!("kind {kind}")))?;
            if !has_file {
                if !is_cut {
                    received.push((number, LoggedEdit { time, how, content: None }));
                }
                continue;
            }
            // An undo has made the content of this edit that of the file, so they are compared.
            let is_live = undone_to == Some(number);
            let before = newer.as_ref().map(|(_, old)| old).filter(|_| !is_live);
            let content = self.file(&path, before.or(live.as_ref()))?;
            let found = Found::Upper(content.ino, None);
            let old = Old::of(&self.builder.state, &found).ok().flatten();
            if let Some((ino, _)) = std::mem::replace(&mut newer, old.map(|old| (content.ino, old)))
            {
                self.forget(&path, ino)?;
            }
            // A store keeps no file with more extents. The edits before would then be out of order.
            is_cut |= content.extents.len() > crate::fs::MAX_EXTENTS;
            if !is_cut {
                let content = Some(Arc::new(content));
                received.push((number, LoggedEdit { time, how, content }));
            }
        }
        if let Some((ino, _)) = newer {
            self.forget(&path, ino)?;
        }
        let undone_to = undone_to.filter(|at| received.iter().any(|(number, _)| number == at));
        Ok(PathEdits { path, next, undone_to, edits: received })
    }

    fn forget(&mut self, path: &TreePath, ino: Ino) -> Result<()> {
        let removed = self.builder.edit(&Edit::Remove { ino });
        removed.map_err(|error| place::of_fs(path.as_bytes(), error))
    }

    /// The file that the state has at a path.
    fn live(&self, path: &TreePath) -> Option<Old> {
        let found = self.builder.state.resolve(path).ok()?;
        Old::of(&self.builder.state, &found).ok().flatten()
    }

    /// Receives the file before an edit. It is a node without a name in the tree of the builder.
    fn file(&mut self, path: &TreePath, old: Option<&Old>) -> Result<Content> {
        let Some(Event::File { attributes, size, .. }) = self.next_event()? else {
            return Err(other("a file is missing".to_owned()));
        };
        check_size(path, size)?;
        let meta = self.meta(path, &attributes)?;
        let kind = FileKind::File;
        let xattrs = attributes.xattrs.iter();
        let xattrs = place::xattrs(self.builder, path.as_bytes(), kind, xattrs)?;
        let ino = self.builder.fresh()?;
        let content = receive((&mut *self.builder, ino), old, size, self.incoming.stream())?;
        let origin = match old.map(|old| &old.node.body) {
            Some(Body::File { origin, .. }) => origin.clone(),
            _ => None,
        };
        let extents = content.extents;
        let origin = origin.filter(|_| extents.iter().any(|(_, source)| source.is_base()));
        let node = Node { meta, xattrs, body: Body::File { size, origin } };
        let put = Edit::Put { ino, node: Box::new(node.clone()) };
        let map = |(range, source): &(_, _)| Edit::Map { ino, range: *range, to: Some(*source) };
        for edit in std::iter::once(put).chain(extents.iter().map(map)) {
            self.builder.edit(&edit).map_err(|error| place::of_fs(path.as_bytes(), error))?;
        }
        let epoch = self.builder.state.lower.epoch();
        Ok(Content { ino, node, epoch, extents })
    }

    fn meta(&mut self, path: &TreePath, attributes: &Attributes) -> Result<Meta> {
        let Attributes { perms, uid, gid, mtime, ctime, atime, xattrs } = attributes;
        let bytes: usize = xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        if !self.builder.count((path.as_bytes().len() + bytes) as u64) {
            let most = self.builder.limits.metadata >> 20;
            let why = format!("the edits have more than {most} MiB of names and attributes");
            return Err(bad(path.as_bytes(), why));
        }
        let (mode, nlink, rdev) = (FileKind::File.type_bits() | perms, 1, 0);
        let (uid, gid, mtime, ctime, atime) = (*uid, *gid, *mtime, *ctime, *atime);
        Ok(Meta { mode, uid, gid, nlink, rdev, atime, mtime, ctime })
    }
}
