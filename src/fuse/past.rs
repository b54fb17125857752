//! What the kernel asks of the past, that is of `.jailfs`.
//!
//! It is answered as all else, with two differences. What must wait (for a checkpoint that has to be loaded, for gc, for a
//! checkpoint that is being made) is done by a worker. And the kernel may remember for ever what a checkpoint has, but must ask
//! each time which checkpoints there are, which versions of files, and what the texts say. It remembers the listing of a directory
//! as long as the directory has the same time of change; as its attributes must be asked for each time, whoever opens one that
//! belongs to the history is shown it as it is then.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use fuser::{
    Generation, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyLseek, ReplyWrite, ReplyXattr,
};

use crate::error::{FsError, FsResult};
use crate::fs::{Caller, Entry, Fs, LinkAnswer, SeekTo};
use crate::fuse::answer::Asked;
use crate::fuse::door::{Door, ORIGIN_ATTRIBUTE, OWN_PREFIX, STORE_ATTRIBUTE, name_of};
use crate::fuse::gate::CUT_OFF;
use crate::fuse::handshake;
use crate::fuse::plus::Plus;
use crate::fuse::translate::{FOREVER, file_attr, no_entry};
use crate::sys;
use crate::types::{FileKind, Name, NodeId};

/// How long the kernel may remember a name in a directory of the past.
fn entry_lifetime(parent: NodeId, child: NodeId) -> Duration {
    match parent {
        NodeId::CHECKPOINTS => Duration::ZERO,
        NodeId::PAST if child != NodeId::CHECKPOINTS && child != NodeId::HISTORY => Duration::ZERO,
        parent if parent.is_of_history() => Duration::ZERO,
        _ => FOREVER,
    }
}

/// Whether it may remember that there is no such name.
fn is_absent_for_ever(parent: NodeId) -> bool {
    parent != NodeId::PAST && parent != NodeId::CHECKPOINTS && !parent.is_of_history()
}

/// How long it may remember what `stat` shows of a node.
fn attr_lifetime(id: NodeId, kind: FileKind) -> Duration {
    let changes = id == NodeId::CHECKPOINTS || (id.is_of_history() && kind == FileKind::Dir);
    if changes { Duration::ZERO } else { FOREVER }
}

fn answer_entry(asked: &Asked<'_>, result: FsResult<Entry>, reply: ReplyEntry) {
    let parent = NodeId(asked.node);
    match result {
        Ok(entry) => {
            let attr = file_attr(entry.id.0, &entry.attr);
            let attrs = attr_lifetime(entry.id, entry.attr.kind);
            let names = entry_lifetime(parent, entry.id);
            reply.entry_with_ttls(&attrs, &names, &attr, Generation(0));
        }
        Err(FsError::NotFound) if is_absent_for_ever(parent) => {
            reply.entry(&FOREVER, &no_entry(), Generation(0));
        }
        Err(error) => reply.error(asked.refuse(&error)),
    }
}

impl Door {
    /// Does what needs to wait for nothing at once, else in a worker.
    fn ask_past(&self, id: u64, name: Option<&Name>, job: impl FnOnce(&Fs) + Send + 'static) {
        if let Some(_at_hand) = self.fs.past_is_at_hand(NodeId(id), name) {
            return job(&self.fs);
        }
        let fs = Arc::clone(&self.fs);
        self.past.run(move || job(&fs));
    }

    pub(super) fn lookup_past(&self, asked: Asked<'static>, name: &OsStr, reply: ReplyEntry) {
        match name_of(name) {
            Ok(name) => self.ask_past(asked.node, Some(&name.clone()), move |fs| {
                answer_entry(&asked, fs.lookup(NodeId(asked.node), &name), reply);
            }),
            Err(error) => reply.error(asked.refuse(&error)),
        }
    }

    pub(super) fn getattr_past(&self, asked: Asked<'static>, reply: ReplyAttr) {
        self.ask_past(asked.node, None, move |fs| match fs.getattr(NodeId(asked.node)) {
            Ok(attr) => {
                let lifetime = attr_lifetime(NodeId(asked.node), attr.kind);
                reply.attr(&lifetime, &file_attr(attr.ino.0, &attr));
            }
            Err(error) => reply.error(asked.refuse(&error)),
        });
    }

    pub(super) fn readlink_past(&self, asked: Asked<'static>, reply: ReplyData) {
        self.ask_past(asked.node, None, move |fs| {
            let id = NodeId(asked.node);
            if fs.tells_stored_text_of(id) && sys::proc::is_in_readlink(asked.pid) == Some(true) {
                return asked.answer_data(fs.link_text(id), reply);
            }
            match fs.readlink(id, asked.pid) {
                Ok(LinkAnswer::Text(text)) => reply.data(&text),
                // Nothing in the past moves.
                Ok(LinkAnswer::Wait(_)) => reply.error(asked.refuse(&FsError::Stale)),
                Err(error) => reply.error(asked.refuse(&error)),
            }
        });
    }

    pub(super) fn read_past(&self, asked: Asked<'static>, offset: u64, size: u32, reply: ReplyData) {
        let (id, len) = (NodeId(asked.node), size.min(handshake::MAX_REQUEST).into());
        if let Some(_at_hand) = self.fs.past_is_at_hand(id, None) {
            match self.fs.past_read(id, offset, len, true) {
                Ok(Some(bytes)) => return reply.data(&bytes),
                Ok(None) => {}
                Err(error) => return reply.error(asked.refuse(&error)),
            }
        }
        let fs = Arc::clone(&self.fs);
        self.past.run(move || {
            asked.answer_data(fs.past_read(id, offset, len, false).map(Option::unwrap_or_default), reply);
        });
    }

    pub(super) fn readdir_past(&self, asked: Asked<'static>, offset: u64, reply: ReplyDirectory) {
        self.ask_past(asked.node, None, move |fs| {
            asked.answer_listing(fs, offset, reply);
        });
    }

    pub(super) fn readdirplus_past(&self, asked: Asked<'static>, offset: u64, plus: Plus) {
        let channel = Arc::clone(&self.channel);
        self.ask_past(asked.node, None, move |fs| {
            plus.answer(&asked, fs, &channel, offset);
        });
    }

    /// GETXATTR of a node of the past, or of the origin of any node.
    pub(super) fn getxattr_past(&self, asked: Asked<'static>, name: &OsStr, room: u32, reply: ReplyXattr) {
        let name = name.as_bytes().to_vec();
        let store = self.store_path.clone();
        let answer = move |fs: &Fs| {
            let id = NodeId(asked.node);
            let value = match &name[..] {
                STORE_ATTRIBUTE => Ok(store),
                ORIGIN_ATTRIBUTE => fs.origin(id).map(|origin| origin.to_string().into_bytes()),
                other if other.starts_with(OWN_PREFIX) => Err(FsError::NoAttribute),
                other => fs.getxattr(id, other),
            };
            asked.answer_sized(value, room, reply);
        };
        // Who last changed something is read from the records of many layers.
        let fs = Arc::clone(&self.fs);
        self.past.run(move || answer(&fs));
    }

    pub(super) fn listxattr_past(&self, asked: Asked<'static>, room: u32, reply: ReplyXattr) {
        self.ask_past(asked.node, None, move |fs| {
            asked.answer_sized(fs.listxattr(NodeId(asked.node)), room, reply);
        });
    }

    pub(super) fn lseek_past(
        &self,
        asked: Asked<'static>,
        target: FsResult<(u64, SeekTo)>,
        reply: ReplyLseek,
    ) {
        self.ask_past(asked.node, None, move |fs| {
            let found = target.and_then(|(offset, to)| fs.seek(NodeId(asked.node), offset, to));
            match found.map(i64::try_from) {
                Ok(Ok(found)) => reply.offset(found),
                Ok(Err(_)) => reply.error(asked.refuse(&FsError::FileTooBig)),
                Err(error) => reply.error(asked.refuse(&error)),
            }
        });
    }

    /// MKDIR among the checkpoints. Never in this thread: a checkpoint brings dirty pages home, through our own mount.
    pub(super) fn make_checkpoint(&self, asked: Asked<'static>, name: &OsStr, reply: ReplyEntry) {
        let name = match name_of(name) {
            Ok(name) => name,
            Err(error) => return reply.error(asked.refuse(&error)),
        };
        let (fs, gate) = (Arc::clone(&self.fs), Arc::clone(&self.gate));
        self.past.run(move || {
            let Some(_pass) = gate.pass_again() else { return reply.error(CUT_OFF) };
            let nobody = Caller { uid: 0, gid: 0 };
            answer_entry(&asked, fs.mkdir(NodeId::CHECKPOINTS, &name, 0, 0, nobody), reply);
        });
    }

    /// WRITE to a file of the past. Opening asks nothing, so a program can have come to it. One by write(2) is refused. What a program
    /// wrote into a mapping is dropped, and the kernel must forget it, so that nobody else reads it: an error would be told to
    /// everybody who syncs the mount, and checkpoints are among them.
    pub(super) fn drop_write(&self, asked: &Asked<'_>, len: usize, from_cache: bool, reply: ReplyWrite) {
        let id = NodeId(asked.node);
        if from_cache {
            if self.dropped.is_news(id) {
                log::warn!("what process {} writes into a mapping of the past is dropped", asked.pid);
            }
            reply.written(u32::try_from(len).unwrap_or(u32::MAX));
        } else {
            reply.error(asked.refuse(&FsError::ReadOnly));
        }
        self.dropped.forget(id, &self.channel);
    }
}
