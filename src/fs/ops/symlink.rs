//! Symlinks: the reply to READLINK, which is where the jail is.
//!
//! Always true:
//! * A text is served only if it stays inside the mount from every directory through which the link
//!   was advertised ([`crate::fs::links`]).
//! * If it leads out from one of them, and the link has no name there any more, the reply is ESTALE
//!   and the link gets another id. The kernel then walks the path again, and a process in the old
//!   directory finds that there is no such link.
//! * A text that depends on a rename in flight is served after the kernel has completed it.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::links::{LinkReply, Move, Refusal, Refused};
use crate::fs::merged::jail_walk::{self, Resolved};
use crate::fs::{Core, Found, Fs, Target};
use crate::jail::Jail;
use crate::sys;
use crate::tree::Body;
use crate::types::{FileKind, Ino, Name, NodeId, TreePath};

impl Fs {
    /// The text of a link, as the kernel may follow it, for the thread `pid`.
    ///
    /// # Errors
    /// EXDEV for a link that leads out, which is noted for `status`; ESTALE if the kernel must look
    /// the link up again; EINVAL for another node.
    pub fn readlink(&self, id: NodeId, pid: u32) -> FsResult<LinkReply> {
        if id.is_in_snapdir() {
            return self.snapdir_readlink(id, pid);
        }
        let jail = Arc::clone(&self.jail.lock());
        match self.with_node(id, |core| core.judge_link(&jail, id))? {
            Judged::Reply(reply) => Ok(reply),
            Judged::Outside { path, text } => {
                self.refuse(path, Refused::Link(text), pid);
                Err(FsError::LeavesJail)
            }
        }
    }

    /// The kernel has completed the rename that moved a directory.
    pub fn move_finished(&self, rename: &Move) {
        self.core().links.finish_move(rename);
    }

    /// The text of a link as it is stored, for callers that do not follow it.
    ///
    /// # Errors
    /// EINVAL for another node, or those of the base.
    pub fn link_text(&self, id: NodeId) -> FsResult<Vec<u8>> {
        if id.is_in_snapdir() {
            return self.snapdir_link_text(id);
        }
        let record = self.with_node(id, |core| core.record_of(&core.target(id)?))?;
        match &record.body {
            Body::Symlink { target } => Ok(target.clone()),
            Body::File { .. } | Body::Dir { .. } | Body::Special => Err(FsError::Invalid),
        }
    }

    /// The last distinct operations that the jail refused, and how many it refused in all.
    pub fn refusals(&self) -> (Vec<Refusal>, u64) {
        self.core().links.refusals()
    }

    /// Notes an operation that the jail refused. The log gets a line only if it differs from those
    /// that are kept, so that a program cannot fill the log by trying again.
    ///
    /// Takes the core lock, after it has asked the host for the name of the program.
    pub(in crate::fs) fn refuse(&self, path: TreePath, what: Refused, pid: u32) {
        let process = sys::proc::program_of(pid).unwrap_or_default();
        let refusal = Refusal { path, what, pid, process };
        if self.core().links.add_refusal(refusal.clone()) {
            log::warn!("{refusal}");
        }
    }
}

/// The answer of the jail about a link.
enum Judged {
    Reply(LinkReply),
    Outside { path: TreePath, text: Vec<u8> },
}

impl Core {
    /// Judges a link by the jail, and serves its text if it stays inside.
    fn judge_link(&mut self, jail: &Jail, id: NodeId) -> FsResult<Judged> {
        if self.held.get(id).is_some_and(|held| held.retired) {
            return Err(FsError::Stale);
        }
        let target = self.target(id)?;
        let node = self.record_of(&target)?;
        let Body::Symlink { target: text } = &node.body else { return Err(FsError::Invalid) };
        let link = match &target {
            Target::Upper(ino) => Found::Upper(*ino, None),
            Target::Base(ino, path, node) => Found::Base(*ino, path.clone(), node.clone()),
            Target::Orphan(_) => Found::Nothing(None),
        };
        match jail_walk::resolve(jail, &self.state, &link, text)? {
            Resolved::Inside(served) => Ok(Judged::Reply(LinkReply::Text(served))),
            Resolved::Climbs(served) => {
                self.links.serve(&mut self.held, id, served).map(Judged::Reply)
            }
            Resolved::Escapes => {
                let (Target::Upper(ino) | Target::Base(ino, ..) | Target::Orphan(ino)) = &target;
                let path = self.path_of(*ino)?.unwrap_or_default();
                Ok(Judged::Outside { path, text: text.clone() })
            }
        }
    }

    /// The kernel sees a node in a directory from now on.
    pub(in crate::fs) fn note_advertised_in(&mut self, dir: NodeId, ino: Ino, kind: FileKind) {
        let Some(id) = self.held.id_of(ino) else { return };
        match kind {
            FileKind::Symlink => self.links.note_advertised(id, dir),
            FileKind::Dir => self.held.set_within(id, dir),
            FileKind::File
            | FileKind::Fifo
            | FileKind::Socket
            | FileKind::Char
            | FileKind::Block => {}
        }
    }

    /// A directory is about to move from `from` to `into`, where it gets `name`. Returns the move,
    /// unless the kernel does not hold the directory or it stays where it is: then no walk can be
    /// affected.
    ///
    /// # Errors
    /// As [`Links::begin_move`](crate::fs::links::Links::begin_move).
    pub(in crate::fs) fn begin_move(
        &mut self,
        moved: Ino,
        from: NodeId,
        (into, name): (NodeId, &Name),
    ) -> FsResult<Option<Move>> {
        let Some(dir) = self.held.id_of(moved).filter(|_| from != into) else { return Ok(None) };
        self.links.begin_move(&self.held, (dir, from), (into, name)).map(Some)
    }
}
