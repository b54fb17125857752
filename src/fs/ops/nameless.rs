//! Files without a name (O_TMPFILE of open(2)), and giving them one (linkat(2)).
//!
//! Such a file is an orphan: it is in no checkpoint, and is gone when its last holder closes it. A
//! hard link copies what was written to the pool of the upper layer, and makes the file live under
//! the id that the kernel has.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::state::extents_in;
use crate::fs::ops::namespace::{NewNode, new_node};
use crate::fs::ops::slot::Slot;
use crate::fs::ops::writable::Writable;
use crate::fs::{Caller, Core, Entry, Found, Fs, Need, Target};
use crate::store::Store;
use crate::store::content::pool::BLOCK;
use crate::sys::clock;
use crate::tree::{Body, Dentry, Edit, Node, Source};
use crate::types::{ByteRange, FileKind, Fingerprint, Ino, NodeId, TYPE_BITS};

/// Bytes that are copied at once.
const STEP: u64 = 1 << 20;

impl Fs {
    /// Creates a regular file without a name. `dir` decides on its filesystem, group and ACL.
    ///
    /// # Errors
    /// ENOENT for a directory that is gone, ENOTDIR; those of the base and of the store.
    pub fn tmpfile(&self, dir: NodeId, mode: u32, umask: u32, caller: Caller) -> FsResult<Entry> {
        let mode = (mode & !TYPE_BITS) | FileKind::File.type_bits();
        let body = Body::File { size: 0, origin: None };
        let new = NewNode { mode, rdev: 0, body, umask };
        self.with_room(Need::More, || {
            let (mut core, asked) = self.core_for_node(dir);
            let (_, lower, _) = core.live_dir(dir, &asked)?;
            core.check_dir(lower.as_ref())?;
            let above = core.record_of(&core.target(dir, &asked)?)?;
            core.create_nameless(&self.store, &above, &new, caller)
        })
    }
}

impl Core {
    fn create_nameless(
        &mut self,
        store: &Store,
        above: &Node,
        new: &NewNode,
        caller: Caller,
    ) -> FsResult<Entry> {
        if above.kind() != FileKind::Dir {
            return Err(FsError::NotADirectory);
        }
        self.need_node(store)?;
        let mut node = new_node(above, new, caller)?;
        node.meta.nlink = 0;
        let ino = store.identities().lock().fresh()?;
        let id = self.held.add_nameless(ino, node, self.state.lower.epoch())?;
        Ok(Entry { id, attr: self.attr_of(id, &Target::Orphan(Ino(id.0)))? })
    }

    /// Gives an orphan that never had a name the name of a slot, which hides a base node with the
    /// fingerprint `hides`.
    ///
    /// # Errors
    /// ENOENT for another orphan; those of the store.
    pub(super) fn name_file(
        &mut self,
        store: &Store,
        (id, key): (NodeId, Ino),
        slot: &Slot,
        hides: Option<Arc<Fingerprint>>,
    ) -> FsResult<Entry> {
        if !self.held.orphans().is_nameless(key) {
            return Err(FsError::NotFound);
        }
        let ino = self.held.get(id).ok_or(FsError::NotFound)?.ino;
        let mut node = Node::clone(&*self.record_of(&Target::Orphan(key))?);
        node.meta.nlink = 1;
        node.meta.ctime = clock::now();
        self.upper.check()?;
        self.copy_up_parent(slot)?;
        let mut edits = vec![Edit::Put { ino, node: Box::new(node) }];
        edits.extend(self.copy_from_scratch(store, key, ino)?);
        let to = Some(Dentry::Child { ino, hides: hides.clone() });
        edits.push(Edit::Dentry { dir: slot.dir, name: slot.name.clone(), to });
        edits.push(self.touch_dir(slot.dir, 0)?);
        self.commit(edits)?;
        self.held.name_orphan(id, store.earlier_readers());
        self.file_made(ino, slot.dir(), &slot.name);
        self.hand_out(slot.parent, Found::Upper(ino, hides))
    }

    /// Copies what was written to an orphan to the pool of the upper layer. Returns the edits that
    /// make it the content of `ino`.
    fn copy_from_scratch(&mut self, store: &Store, key: Ino, ino: Ino) -> FsResult<Vec<Edit>> {
        let written = extents_in(self.held.orphans().tree(), key);
        let bytes = written.iter().map(|(range, _)| range.len()).sum::<u64>();
        self.need_bytes(store, bytes.saturating_add(BLOCK))?;
        let orphan = Writable { key, is_orphan: true };
        let layer = self.upper.layer();
        let mut edits = Vec::new();
        for (range, _) in written {
            let mut start = range.start;
            while start < range.end {
                let part = ByteRange { start, end: range.end.min(start + STEP) };
                let bytes = self.current_bytes(orphan, part)?;
                self.quota.add(part.len());
                let at = self.upper.pool.allocate(ino, part, part.end < range.end);
                self.upper.pool.write(at, &bytes)?;
                let to = Some(Source::Pool { layer, offset: at });
                edits.push(Edit::Map { ino, range: part, to });
                start = part.end;
            }
        }
        Ok(edits)
    }
}

#[cfg(test)]
mod tests {
    use crate::fs::ops::tests::{CALLER, Place, name};
    use crate::types::NodeId;

    #[test]
    fn a_read_from_before_the_name_gets_the_bytes_and_they_are_freed_after_it() {
        let Place { fs, .. } = &Place::new();
        let made = |len: usize| {
            let id = fs.tmpfile(NodeId::ROOT, 0o600, 0, CALLER).unwrap().id;
            fs.write(id, 0, &vec![7; len], false).unwrap();
            id
        };
        // The scratch file goes with the last orphan.
        let (_kept, file) = (made(10), made(100_000));
        let usage = || fs.core().held.orphans().scratch_usage();
        let before = usage();
        let plan = fs.read(file, 0, u64::MAX).unwrap();
        fs.link(file, NodeId::ROOT, &name("f")).unwrap();
        fs.forget(made(10), 1);
        assert_eq!(plan.read(false).unwrap().unwrap(), [7; 100_000]);
        drop(plan);
        fs.forget(made(10), 1);
        assert!(usage() + 90_000 < before, "{} of {before} bytes are left", usage());
        let plan = fs.read(file, 0, u64::MAX).unwrap();
        assert_eq!(plan.read(false).unwrap().unwrap(), [7; 100_000]);
    }
}
