//! The door: each request is translated, given to [`Fs`], and answered. Nothing is decided here that a program could
//! see, except what only this protocol has:
//!
//! * **Nothing is open.** OPEN, OPENDIR, CREATE and FLUSH answer ENOSYS once, and the kernel does not ask again: opening,
//!   reading a cached file and closing cost no message, and a restore has no handles to fix.
//! * **The kernel may remember for ever.** Every change comes through it, or it is told by [`super::kernel`].
//! * **A renumbered node** (one that a restore gave a new id) cannot be named by LOOKUP together with its true number:
//!   fuser sends one number as both. Its attributes are then sent as already outdated, so that the kernel asks GETATTR.
//! * `user.jailfs.store` tells which store a mount belongs to, `user.jailfs.origin` who last changed a file. They are not
//!   listed and cannot be set.
//! * What is asked of the past (`.jailfs`) is answered in [`super::past`].
//!
//! What waits for a disk (a sync, a read of what is not in memory, a copy) goes to a worker; all else is answered at once.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use parking_lot::Mutex;

use crate::error::{FsError, FsResult};
use crate::fs::{Attr, Caller, Entry, Fs, LinkAnswer, RenameMode, SeekTo, SetAttr, SetXattr};
use crate::fuse::answer::Asked;
use crate::fuse::counters::{Counters, Op};
use crate::fuse::dropped::Dropped;
use crate::fuse::gate::{CUT_OFF, Gate};
use crate::fuse::handshake;
use crate::fuse::homeward::Homeward;
use crate::fuse::kernel::Channel;
use crate::fuse::labels::Labels;
use crate::fuse::lookers::Lookers;
use crate::fuse::plus::Plus;
use crate::fuse::privileges::By;
use crate::fuse::settle;
use crate::fuse::translate::{FOREVER, decode_device, no_entry, node, set_time};
use crate::fuse::workers::Workers;
use crate::sys;
use crate::types::{FileKind, Name, NodeId};

/// The most that one COPY_FILE_RANGE copies: the answer has 32 bits, and the program asks again.
const MAX_COPY: u64 = 1 << 30;
/// The attribute that names the store of a mount.
pub(super) const STORE_ATTRIBUTE: &[u8] = b"user.jailfs.store";
/// The attribute that tells who last changed a file.
pub(super) const ORIGIN_ATTRIBUTE: &[u8] = b"user.jailfs.origin";
/// The attribute that is the access ACL of a file.
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
/// Attributes that are ours.
pub(super) const OWN_PREFIX: &[u8] = b"user.jailfs.";
/// What serves the requests of one mount.
pub(super) struct Door {
    pub(super) fs: Arc<Fs>,
    pub(super) store_path: Vec<u8>,
    writeback: bool,
    /// Whether changes of names and attributes are durable when they are answered.
    syncs: bool,
    /// Whether the kernel takes ENOSYS to OPEN and OPENDIR for "never ask again".
    open_unasked: bool,
    opendir_unasked: bool,
    workers: Workers,
    /// Links that wait until the kernel has taken a move in, and names that it must forget. Apart from the others, one of which it
    /// may wait for.
    settling: Workers,
    /// What the kernel must forget, and answers that wait for it. Apart from those, which may wait for the lock of a directory that
    /// whoever waits for such an answer holds; and from reads: the kernel waits for the pages that are being read.
    forgetting: Workers,
    /// What is asked of the past and must wait. Apart from the others: while space is given back all of it waits, and whoever
    /// gives it back waits for readers among the others.
    pub(super) past: Workers,
    /// What was written to the past.
    pub(super) dropped: Dropped,
    /// Who looks at the files that it lists.
    lookers: Mutex<Lookers>,
    labels: Labels,
    pub(super) channel: Arc<Channel>,
    homeward: Arc<Homeward>,
    counters: Arc<Counters>,
    pub(super) gate: Arc<Gate>,
}

impl Door {
    /// The door of a filesystem; `store_path` is what `user.jailfs.store` tells.
    pub(super) fn new(fs: Arc<Fs>, store_path: &Path, writeback: bool, syncs: bool) -> Door {
        fs.kernel_remembers(writeback);
        Door {
            fs,
            store_path: store_path.as_os_str().as_bytes().to_vec(),
            writeback,
            syncs,
            open_unasked: true,
            opendir_unasked: true,
            workers: Workers::default(),
            settling: Workers::default(),
            forgetting: Workers::default(),
            past: Workers::default(),
            dropped: Dropped::default(),
            lookers: Mutex::default(),
            labels: Labels::new(),
            channel: Arc::default(),
            homeward: Arc::default(),
            counters: Arc::default(),
            gate: Arc::default(),
        }
    }

    /// What ends the service for everybody.
    pub(super) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// The session, as others use it; it is connected when there is one.
    pub(super) fn channel(&self) -> Arc<Channel> {
        Arc::clone(&self.channel)
    }

    /// Which files the kernel has just written back.
    pub(super) fn homeward(&self) -> Arc<Homeward> {
        Arc::clone(&self.homeward)
    }

    /// What was asked for so far.
    pub(super) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    fn asked<'a>(&self, op: Op, request: &Request, node: INodeNo, name: Option<&'a OsStr>) -> Asked<'a> {
        self.counters.count(op);
        Asked { op, node: node.0, pid: request.pid(), name }
    }

    /// Makes the kernel forget files of the base that somebody changed: after whatever looks at files of the base, or gives them
    /// records.
    fn forget_outdated(&self) {
        let (nodes, names) = self.fs.outdated();
        for id in nodes {
            let (fs, channel) = (Arc::clone(&self.fs), Arc::clone(&self.channel));
            self.forgetting.run(move || {
                channel.forget_content(id);
                fs.is_forgotten(id);
            });
        }
        for (dir, name) in names {
            let channel = Arc::clone(&self.channel);
            self.settling.run(move || channel.forget_name(dir, &name));
        }
    }

    /// Answers with the attributes of a node, of which the kernel first forgets what it has read: it must not take those bytes for
    /// some of the new size.
    fn answer_when_forgotten(&self, id: NodeId, answer: impl FnOnce(FsResult<Attr>) + Send + 'static) {
        let (fs, channel) = (Arc::clone(&self.fs), Arc::clone(&self.channel));
        self.forgetting.run(move || {
            channel.forget_content(id);
            fs.is_forgotten(id);
            answer(fs.getattr(id));
        });
    }

    /// The same for a name that was found or made.
    fn answer_entry(&self, asked: Asked<'_>, result: FsResult<Entry>, reply: ReplyEntry) {
        match result {
            Ok(entry) if self.fs.is_outdated(entry.id) => {
                let asked: Asked<'static> = Asked { name: None, ..asked };
                self.answer_when_forgotten(entry.id, move |attr| {
                    // The name was handed out, and is answered in any case.
                    let attr = attr.unwrap_or(entry.attr);
                    asked.answer_entry(Ok(Entry { attr, ..entry }), reply);
                });
            }
            result => asked.answer_entry(result, reply),
        }
        self.forget_outdated();
    }

    /// With `sync` or `dirsync`, makes a change that was made durable before it is answered.
    fn kept<T>(&self, result: FsResult<T>) -> FsResult<T> {
        if self.syncs && result.is_ok() {
            self.fs.sync()?;
        }
        result
    }

    fn sync(&self, asked: Asked<'static>, reply: ReplyEmpty) {
        if !self.fs.store().durable() {
            // The kernel then does not ask again.
            return reply.error(Errno::ENOSYS);
        }
        let fs = Arc::clone(&self.fs);
        self.workers.run(move || asked.answer_empty(fs.sync(), reply));
    }
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
}

pub(super) fn name_of(name: &OsStr) -> FsResult<Name> {
    Ok(Name::new(name.as_bytes())?)
}

fn rename_mode(flags: RenameFlags) -> FsResult<RenameMode> {
    if flags.is_empty() {
        Ok(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Ok(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Ok(RenameMode::Exchange)
    } else {
        // RENAME_WHITEOUT is for filesystems below an overlayfs.
        Err(FsError::Invalid)
    }
}

fn seek_target(offset: i64, whence: i32) -> FsResult<(u64, SeekTo)> {
    const SEEK_DATA: i32 = 3;
    const SEEK_HOLE: i32 = 4;
    let to = match whence {
        SEEK_DATA => SeekTo::Data,
        SEEK_HOLE => SeekTo::Hole,
        _ => return Err(FsError::Invalid),
    };
    Ok((u64::try_from(offset).map_err(|_| FsError::NoSuchOffset)?, to))
}

impl Filesystem for Door {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let agreed = handshake::agree(config, self.writeback);
        // With a writeback cache write(2) is answered by the kernel, so the past can only be kept from writers when it is opened.
        self.open_unasked = agreed.open_unasked && !(self.writeback && self.fs.shows_past());
        self.opendir_unasked = agreed.opendir_unasked;
        self.channel.agreed(agreed.lets_names_expire);
        Ok(())
    }

    fn destroy(&mut self) {
        self.workers.finish();
        self.settling.finish();
        self.forgetting.finish();
        self.past.finish();
        self.dropped.finish();
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        if node(parent).is_past() {
            return self.lookup_past(self.asked(Op::Lookup, request, parent, None), name, reply);
        }
        let asked = self.asked(Op::Lookup, request, parent, Some(name));
        match name_of(name).and_then(|name| self.fs.lookup(node(parent), &name)) {
            Err(FsError::NotFound) => reply.entry(&FOREVER, &no_entry(), Generation(0)),
            result => {
                if result.as_ref().is_ok_and(|entry| entry.attr.kind != FileKind::Dir) {
                    self.lookers.lock().looks(asked.pid);
                }
                self.answer_entry(asked, result, reply);
            }
        }
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        self.counters.count(Op::Forget);
        self.fs.forget(node(ino), nlookup);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        if node(ino).is_past() {
            return self.getattr_past(self.asked(Op::Getattr, request, ino, None), reply);
        }
        let asked = self.asked(Op::Getattr, request, ino, None);
        let answer = self.fs.getattr(node(ino));
        if answer.is_err() || !self.fs.is_outdated(node(ino)) {
            asked.answer_attr(answer, reply);
            return self.forget_outdated();
        }
        let asked: Asked<'static> = Asked { name: None, ..asked };
        self.answer_when_forgotten(node(ino), move |attr| asked.answer_attr(attr, reply));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Setattr, request, ino, None);
        if node(ino).is_past() {
            return reply.error(asked.refuse(&FsError::ReadOnly));
        }
        let changes_privileges = size.is_some() || uid.is_some() || gid.is_some();
        let set = SetAttr {
            mode,
            uid,
            gid,
            size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
            kill: changes_privileges && By::of(request).kills_privileges(&self.fs, node(ino)),
        };
        let mut result = self.kept(self.fs.setattr(node(ino), set));
        if changes_privileges && result.is_ok() && By::of(request).leave(&self.fs, &asked, node(ino)) {
            result = self.fs.getattr(node(ino));
        }
        if size.is_some() {
            self.homeward.note(node(ino));
        }
        // Not when the size was set: until that is answered, the kernel keeps back what it must write home before it forgets.
        if result.is_ok() && size.is_none() && self.fs.is_outdated(node(ino)) {
            let asked: Asked<'static> = Asked { name: None, ..asked };
            self.answer_when_forgotten(node(ino), move |attr| asked.answer_attr(attr, reply));
        } else {
            asked.answer_attr(result, reply);
        }
        self.forget_outdated();
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked: Asked<'static> = self.asked(Op::Readlink, request, ino, None);
        if node(ino).is_past() {
            return self.readlink_past(asked, reply);
        }
        // Whoever only reads the text may see it; the kernel waits for us in the very call that says so.
        if self.fs.tells_stored_text_of(node(ino)) && sys::proc::is_in_readlink(request.pid()) == Some(true) {
            return asked.answer_data(self.fs.link_text(node(ino)), reply);
        }
        match self.fs.readlink(node(ino), request.pid()) {
            Ok(LinkAnswer::Text(text)) => reply.data(&text),
            Err(error) => reply.error(asked.refuse(&error)),
            Ok(LinkAnswer::Wait(first)) => {
                let (fs, channel) = (Arc::clone(&self.fs), Arc::clone(&self.channel));
                self.settling.run(move || {
                    asked
                        .answer_data(settle::read_settled(&fs, &channel, node(ino), asked.pid, first), reply);
                });
            }
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Mknod, request, parent, Some(name));
        let result = name_of(name).and_then(|name| {
            self.fs.mknod(node(parent), &name, mode, decode_device(rdev), umask, caller(request))
        });
        asked.answer_entry(self.kept(result), reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        if node(parent) == NodeId::CHECKPOINTS {
            return self.make_checkpoint(self.asked(Op::Mkdir, request, parent, None), name, reply);
        }
        let asked = self.asked(Op::Mkdir, request, parent, Some(name));
        let result =
            name_of(name).and_then(|name| self.fs.mkdir(node(parent), &name, mode, umask, caller(request)));
        asked.answer_entry(self.kept(result), reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Unlink, request, parent, Some(name));
        let result = name_of(name).and_then(|name| self.fs.unlink(node(parent), &name));
        asked.answer_empty(self.kept(result), reply);
        self.forget_outdated();
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Rmdir, request, parent, Some(name));
        let result = name_of(name).and_then(|name| self.fs.rmdir(node(parent), &name));
        asked.answer_empty(self.kept(result), reply);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Symlink, request, parent, Some(link_name));
        let text = target.as_os_str().as_bytes();
        let result =
            name_of(link_name).and_then(|name| self.fs.symlink(node(parent), &name, text, caller(request)));
        asked.answer_entry(self.kept(result), reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Rename, request, parent, Some(name));
        let result = || {
            let (from, to, mode) = (name_of(name)?, name_of(newname)?, rename_mode(flags)?);
            self.fs.rename(node(parent), &from, node(newparent), &to, mode, request.pid())
        };
        asked.answer_empty(self.kept(result()), reply);
        self.forget_outdated();
    }

    fn link(&self, request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Link, request, newparent, Some(newname));
        let result = name_of(newname).and_then(|name| self.fs.link(node(ino), node(newparent), &name));
        self.answer_entry(asked, self.kept(result), reply);
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.counters.count(Op::Open);
        if self.open_unasked {
            reply.error(Errno::ENOSYS);
        } else if node(ino).is_past() && flags.acc_mode() != OpenAccMode::O_RDONLY {
            reply.error(Errno::EROFS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
        }
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked: Asked<'static> = self.asked(Op::Read, request, ino, None);
        if node(ino).is_past() {
            return self.read_past(asked, offset, size, reply);
        }
        // Never more than we said the kernel may ask for: the answer is made in memory.
        let plan = match self.fs.read(node(ino), offset, size.min(handshake::MAX_REQUEST).into()) {
            Ok(plan) => plan,
            Err(error) => {
                reply.error(asked.refuse(&error));
                return self.forget_outdated();
            }
        };
        match plan.read(true) {
            Ok(Some(bytes)) => reply.data(&bytes),
            Err(error) => reply.error(asked.refuse(&error)),
            Ok(None) => self.workers.run(move || {
                asked.answer_data(plan.read(false).map(Option::unwrap_or_default), reply);
            }),
        }
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Write, request, ino, None);
        if node(ino).is_past() {
            let from_cache = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
            return self.drop_write(&asked, data.len(), from_cache, reply);
        }
        let kill = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let from_cache = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let appends = flags.0 & nix::libc::O_APPEND != 0 && !from_cache;
        let may = if appends { self.fs.check_append(node(ino), offset) } else { Ok(()) };
        let result = may.and_then(|()| self.fs.write(node(ino), offset, data, kill));
        if from_cache {
            self.homeward.note(node(ino));
        }
        match result {
            Ok(()) => {
                if kill {
                    By::of(request).leave(&self.fs, &asked, node(ino));
                }
                reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX));
            }
            Err(error) => {
                reply.error(asked.refuse(&error));
                self.forget_outdated();
            }
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Flush);
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Release);
        reply.ok();
    }

    fn fsync(&self, request: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        self.sync(self.asked(Op::Fsync, request, ino, None), reply);
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.counters.count(Op::Opendir);
        if self.opendir_unasked {
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR);
        }
    }

    fn readdir(&self, request: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        if node(ino).is_past() {
            return self.readdir_past(self.asked(Op::Readdir, request, ino, None), offset, reply);
        }
        let asked = self.asked(Op::Readdir, request, ino, None);
        if !asked.answer_listing(&self.fs, offset, reply) {
            self.forget_outdated();
        }
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked: Asked<'static> = self.asked(Op::Readdirplus, request, ino, None);
        let mut plus = Plus { unique: request.unique().0, reply, with_files: false };
        if node(ino).is_past() {
            return self.readdirplus_past(asked, offset, plus);
        }
        plus.with_files = self.lookers.lock().lists(asked.pid, offset == 0);
        if !plus.answer(&asked, &self.fs, &self.channel, offset) {
            self.forget_outdated();
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Releasedir);
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        self.sync(self.asked(Op::Fsyncdir, request, ino, None), reply);
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Statfs, request, ino, None);
        match self.fs.statfs() {
            Ok(space) => reply.statfs(
                space.blocks,
                space.free,
                space.available,
                space.files,
                space.files_free,
                space.block_size,
                255,
                space.block_size,
            ),
            Err(error) => reply.error(asked.refuse(&error)),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        const XATTR_CREATE: i32 = 1;
        const XATTR_REPLACE: i32 = 2;
        let asked = self.asked(Op::Setxattr, request, ino, Some(name));
        let name = name.as_bytes();
        let result = if node(ino).is_past() {
            Err(FsError::ReadOnly)
        } else if name.starts_with(OWN_PREFIX) {
            Err(FsError::NotPermitted)
        } else {
            let how = SetXattr {
                create: flags & XATTR_CREATE != 0,
                replace: flags & XATTR_REPLACE != 0,
                takes_setgid: name == ACCESS_ACL && By::of(request).takes_setgid(&self.fs, node(ino)),
            };
            self.fs.setxattr(node(ino), name, value, how)
        };
        self.labels.note(name, result.is_ok());
        asked.answer_empty(self.kept(result), reply);
        self.forget_outdated();
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        if node(ino).is_past() || name.as_bytes() == ORIGIN_ATTRIBUTE {
            return self.getxattr_past(self.asked(Op::Getxattr, request, ino, None), name, size, reply);
        }
        let asked = self.asked(Op::Getxattr, request, ino, Some(name));
        let name = name.as_bytes();
        let result = if name == STORE_ATTRIBUTE {
            Ok(self.store_path.clone())
        } else if name.starts_with(OWN_PREFIX) {
            Err(FsError::NoAttribute)
        } else {
            self.labels.answer(name, self.fs.getxattr(node(ino), name))
        };
        asked.answer_sized(result, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        if node(ino).is_past() {
            return self.listxattr_past(self.asked(Op::Listxattr, request, ino, None), size, reply);
        }
        let asked = self.asked(Op::Listxattr, request, ino, None);
        asked.answer_sized(self.fs.listxattr(node(ino)), size, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Removexattr, request, ino, Some(name));
        let name = name.as_bytes();
        let result = if node(ino).is_past() {
            Err(FsError::ReadOnly)
        } else if name.starts_with(OWN_PREFIX) {
            Err(FsError::NotPermitted)
        } else {
            self.fs.removexattr(node(ino), name)
        };
        asked.answer_empty(self.kept(result), reply);
        self.forget_outdated();
    }

    // The kernel checks permissions itself (`default_permissions`).
    fn access(&self, _request: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        self.counters.count(Op::Access);
        reply.error(Errno::ENOSYS);
    }

    // The kernel then makes the node by MKNOD, which needs no handle.
    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        self.counters.count(Op::Create);
        reply.error(Errno::ENOSYS);
    }

    // The kernel locks by itself, without messages.
    fn getlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        _start: u64,
        _end: u64,
        _typ: i32,
        _pid: u32,
        reply: ReplyLock,
    ) {
        self.counters.count(Op::Locks);
        reply.error(Errno::ENOSYS);
    }

    fn setlk(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        _start: u64,
        _end: u64,
        _typ: i32,
        _pid: u32,
        _sleep: bool,
        reply: ReplyEmpty,
    ) {
        self.counters.count(Op::Locks);
        reply.error(Errno::ENOSYS);
    }

    fn bmap(&self, _request: &Request, _ino: INodeNo, _blocksize: u32, _idx: u64, reply: ReplyBmap) {
        self.counters.count(Op::Bmap);
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        self.counters.count(Op::Ioctl);
        reply.error(Errno::ENOTTY);
    }

    fn poll(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _ph: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        self.counters.count(Op::Poll);
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Fallocate, request, ino, None);
        if node(ino).is_past() {
            return reply.error(asked.refuse(&FsError::ReadOnly));
        }
        let kill = By::of(request).kills_privileges(&self.fs, node(ino));
        let result = self.fs.fallocate(node(ino), mode, offset, length, kill);
        if kill && result.is_ok() {
            By::of(request).leave(&self.fs, &asked, node(ino));
        }
        asked.answer_empty(result, reply);
        self.forget_outdated();
    }

    fn lseek(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked = self.asked(Op::Lseek, request, ino, None);
        if self.writeback {
            // What the kernel has not sent yet would be told as a hole, and left out by whoever copies the file. It does not ask
            // again, and takes the whole file for data.
            return reply.error(Errno::ENOSYS);
        }
        if node(ino).is_past() {
            return self.lseek_past(asked, seek_target(offset, whence), reply);
        }
        let found = seek_target(offset, whence).and_then(|(offset, to)| self.fs.seek(node(ino), offset, to));
        match found.map(i64::try_from) {
            Ok(Ok(found)) => reply.offset(found),
            Ok(Err(_)) => reply.error(asked.refuse(&FsError::FileTooBig)),
            Err(error) => reply.error(asked.refuse(&error)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        ino_in: INodeNo,
        _fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let Some(_pass) = self.gate.pass() else { return reply.error(CUT_OFF) };
        let asked: Asked<'static> = self.asked(Op::CopyFileRange, request, ino_out, None);
        if !flags.is_empty() {
            return reply.error(asked.refuse(&FsError::Invalid));
        }
        if node(ino_out).is_past() {
            return reply.error(asked.refuse(&FsError::ReadOnly));
        }
        // Those that the copy before this one met: a worker for reads must not wait for what the kernel reads.
        self.forget_outdated();
        let by = By::of(request);
        let kill = by.kills_privileges(&self.fs, node(ino_out));
        let (fs, gate) = (Arc::clone(&self.fs), Arc::clone(&self.gate));
        let workers = if node(ino_in).is_past() { &self.past } else { &self.workers };
        workers.run(move || {
            // The pass above ends with this function.
            let Some(_pass) = gate.pass_again() else { return reply.error(CUT_OFF) };
            match fs.copy_range(node(ino_in), offset_in, node(ino_out), offset_out, len.min(MAX_COPY), kill) {
                Ok(copied) => {
                    if kill {
                        by.leave(&fs, &asked, node(ino_out));
                    }
                    reply.written(u32::try_from(copied).unwrap_or(u32::MAX));
                }
                Err(error) => reply.error(asked.refuse(&error)),
            }
        });
    }
}
