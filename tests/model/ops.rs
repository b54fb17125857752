//! The operations of programs: each on the filesystem, and in the simplest way on the model.

use std::collections::BTreeSet;

use jailfs::error::FsError;
use jailfs::internals::fs::{Caller, RenameMode, SeekTo, SetAttr, SetTime, SetXattr};
use jailfs::types::{FileKind, Name, NodeId};

use crate::host;
use crate::tree::{Body, Bytes, Id, Node, bytes_differ, show};
use crate::world::{Behind, Reader, World};

const LARGEST: u64 = 300 << 10;

fn named(name: &[u8]) -> Name {
    Name::new(name).unwrap()
}

impl World {
    /// Any held node.
    fn any(&mut self) -> NodeId {
        let ids = self.handed_out();
        *self.rng.pick(&ids)
    }

    /// A held node, mostly a live directory.
    fn any_dir(&mut self) -> NodeId {
        if self.rng.one_in(12) {
            return self.any();
        }
        let dirs: Vec<NodeId> =
            self.handed_out().into_iter().filter(|id| self.as_dir(*id).is_ok()).collect();
        *self.rng.pick(&dirs)
    }

    /// A held node, mostly a file, live or orphaned.
    fn any_file(&mut self) -> NodeId {
        let file = |w: &World, id| w.node(id).is_some_and(|n| n.bytes().is_some());
        let files: Vec<NodeId> =
            self.handed_out().into_iter().filter(|id| file(self, *id)).collect();
        if files.is_empty() || self.rng.one_in(20) { self.any() } else { *self.rng.pick(&files) }
    }

    /// A name, mostly one that exists in the directory.
    fn name_in(&mut self, dir: NodeId) -> Bytes {
        let names: Vec<Bytes> = match self.as_dir(dir) {
            Ok(ino) => self.tree.node(ino).names().keys().cloned().collect(),
            Err(_) => Vec::new(),
        };
        if names.is_empty() || self.rng.one_in(4) {
            host::name(&mut self.rng)
        } else {
            self.rng.pick(&names).clone()
        }
    }

    fn child(&self, dir: NodeId, name: &[u8]) -> Result<Option<Id>, FsError> {
        self.as_dir(dir).map(|ino| self.tree.child(ino, name))
    }

    /// One operation of a program.
    pub fn step(&mut self) {
        let crowded = self.tree.nodes.len() > 90;
        match self.rng.below(100) {
            0..=14 => self.walk(),
            15..=24 if !crowded => self.create(),
            25..=28 if !crowded => self.link(),
            15..=33 => self.unlink(),
            34..=37 => self.rmdir(),
            38..=47 => self.rename(),
            48..=59 => self.write(),
            60..=63 => self.truncate(),
            64..=68 => self.fallocate(),
            69..=73 => self.setattr(),
            74..=77 => self.xattr(),
            78..=82 => self.read(),
            83..=87 => self.read_directory(),
            88..=90 => self.copy_range(),
            91..=94 => self.seek(),
            95 => self.readlink(),
            _ => {
                let id = self.any();
                let all = !self.rng.one_in(3);
                self.say(format!("forget {id:?} {all}"));
                self.forget(id, all);
            }
        }
        self.update_readers();
    }

    /// Looks names up, downwards from the root or a held directory.
    fn walk(&mut self) {
        let mut dir = if self.rng.one_in(2) { NodeId::ROOT } else { self.any_dir() };
        for _ in 0..1 + self.rng.below(4) {
            let name = self.name_in(dir);
            self.say(format!("lookup {dir:?} {}", show(&name)));
            let wanted = self.child(dir, &name).and_then(|c| c.ok_or(FsError::NotFound));
            let got = self.fs().lookup(dir, &named(&name));
            let Some(entry) = self.expect(got, wanted.clone().map(drop)) else { return };
            self.take(&entry, wanted.unwrap(), (dir, &name));
            if !self.tree.node(entry.attr.ino.0).is_dir() {
                return;
            }
            dir = entry.id;
        }
    }

    fn create(&mut self) {
        let (dir, name) = (self.any_dir(), host::name(&mut self.rng));
        let who = Caller { uid: self.owner(), gid: self.owner() };
        let umask = *self.rng.pick(&[0, 0o022, 0o077]);
        let perm = host::perm(&mut self.rng, self.root) | 0o700;
        let wanted = match self.child(dir, &name) {
            Ok(Some(_)) => Err(FsError::Exists),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        let what =
            *self.rng.pick(&["file", "file", "file", "dir", "dir", "link", "fifo", "socket"]);
        self.say(format!("make {what} {dir:?} {} {perm:o} {umask:o}", show(&name)));
        let fs = self.fs();
        let n = named(&name);
        let target = host::name(&mut self.rng);
        let (got, mut mode, body) = match what {
            "dir" => {
                let got = fs.mkdir(dir, &n, perm, umask, who);
                (got, 0o040_000 | (perm & !umask), Body::Dir(Default::default()))
            }
            "link" => (fs.symlink(dir, &n, &target, who), 0o120_777, Body::Link(target)),
            _ => {
                let kind = match what {
                    "file" => 0o100_000,
                    "fifo" => 0o010_000,
                    _ => 0o140_000,
                };
                let body =
                    if what == "file" { Body::File(Default::default()) } else { Body::Special };
                (fs.mknod(dir, &n, kind | perm, 0, umask, who), kind | (perm & !umask), body)
            }
        };
        let Some(entry) = self.expect(got, wanted) else { return };
        let up = self.as_dir(dir).unwrap();
        let ino = entry.attr.ino.0;
        assert!(self.numbers.insert(ino), "number {ino} was used before");
        let (above, mut gid) = (self.tree.node(up), who.gid);
        if above.mode & 0o2000 != 0 {
            gid = above.gid;
            if what == "dir" {
                mode |= 0o2000;
            }
        }
        let t = entry.attr.meta.mtime;
        let node = Node {
            mode,
            uid: who.uid,
            gid,
            atime: t,
            mtime: t,
            ctime: t,
            xattrs: Default::default(),
            body,
        };
        self.tree.nodes.insert(ino, node);
        self.tree.node_mut(up).names_mut().insert(name.clone(), ino);
        self.touched_node(up, true);
        self.take(&entry, ino, (dir, &name));
    }

    fn owner(&mut self) -> u32 {
        if self.root { self.rng.below(3) as u32 } else { nix::unistd::geteuid().as_raw() }
    }

    fn link(&mut self) {
        let (id, dir, name) = (self.any(), self.any_dir(), host::name(&mut self.rng));
        // A symlink nearer to the root may need another answer, and then another id. Other tests
        // cover that.
        if let (Some(ino), Ok(up)) = (self.live(id), self.as_dir(dir))
            && matches!(self.tree.node(ino).body, Body::Link(_))
            && self.tree.places(ino).iter().all(|(above, _)| *above != up)
        {
            return;
        }
        self.say(format!("link {id:?} {dir:?} {}", show(&name)));
        let wanted = match (self.child(dir, &name), &self.held[&id].behind) {
            (Err(error), _) => Err(error),
            (Ok(Some(_)), _) => Err(FsError::Exists),
            (_, Behind::DeadDir) => Err(FsError::NotPermitted),
            (_, Behind::Orphan(_)) => Err(FsError::NotFound),
            (_, Behind::Live(ino)) if self.tree.node(*ino).is_dir() => Err(FsError::NotPermitted),
            (_, Behind::Live(_)) => Ok(()),
        };
        let got = self.fs().link(id, dir, &named(&name));
        let Some(entry) = self.expect(got, wanted) else { return };
        let (ino, up) = (self.live(id).unwrap(), self.as_dir(dir).unwrap());
        assert_eq!(entry.id, id, "link gives the same node");
        self.tree.node_mut(up).names_mut().insert(name.clone(), ino);
        self.touched_node(ino, false);
        self.touched_node(up, true);
        self.take(&entry, ino, (dir, &name));
    }

    fn unlink(&mut self) {
        let dir = self.any_dir();
        let name = self.name_in(dir);
        self.say(format!("unlink {dir:?} {}", show(&name)));
        let wanted = match self.child(dir, &name) {
            Err(error) => Err(error),
            Ok(None) => Err(FsError::NotFound),
            Ok(Some(ino)) if self.tree.node(ino).is_dir() => Err(FsError::IsADirectory),
            Ok(Some(_)) => Ok(()),
        };
        let got = self.fs().unlink(dir, &named(&name));
        if self.expect(got, wanted).is_some() {
            self.lose(dir, &name);
            self.touched(dir, true);
        }
    }

    fn rmdir(&mut self) {
        let dir = self.any_dir();
        let name = self.name_in(dir);
        self.say(format!("rmdir {dir:?} {}", show(&name)));
        let wanted = match self.child(dir, &name) {
            Err(error) => Err(error),
            Ok(None) => Err(FsError::NotFound),
            Ok(Some(ino)) if !self.tree.node(ino).is_dir() => Err(FsError::NotADirectory),
            Ok(Some(ino)) if !self.tree.node(ino).names().is_empty() => Err(FsError::NotEmpty),
            Ok(Some(_)) => Ok(()),
        };
        let got = self.fs().rmdir(dir, &named(&name));
        if self.expect(got, wanted).is_some() {
            self.lose(dir, &name);
            self.touched(dir, true);
        }
    }

    /// Removes a name, and the node with its last name.
    fn lose(&mut self, dir: NodeId, name: &[u8]) {
        let up = self.as_dir(dir).unwrap();
        let node = self.tree.node(self.tree.child(up, name).unwrap()).clone();
        let ino = self.tree.remove_name(up, name);
        self.dentries.remove(&(dir, name.to_vec()));
        if self.tree.get(ino).is_none() {
            self.orphaned(ino, node);
        } else {
            self.touched_node(ino, false);
        }
    }

    fn rename(&mut self) {
        let (from_dir, to_dir) = (self.any_dir(), self.any_dir());
        let (from, to) = (self.name_in(from_dir), self.name_in(to_dir));
        let mode = *self.rng.pick(&[
            RenameMode::Replace,
            RenameMode::Replace,
            RenameMode::NoReplace,
            RenameMode::Exchange,
        ]);
        self.say(format!("rename {from_dir:?} {} {to_dir:?} {} {mode:?}", show(&from), show(&to)));
        let wanted = self.may_rename((from_dir, &from), (to_dir, &to), mode);
        let got = self.fs().rename(from_dir, &named(&from), to_dir, &named(&to), mode, 0);
        // A symlink that was followed would lead out from the new place. Other tests cover that.
        if got == Err(FsError::LeavesJail) && wanted.is_ok() {
            return;
        }
        if self.expect(got, wanted).is_none() {
            return;
        }
        let (up, to_up) = (self.as_dir(from_dir).unwrap(), self.as_dir(to_dir).unwrap());
        let moved = self.tree.child(up, &from).unwrap();
        let over = self.tree.child(to_up, &to);
        if over == Some(moved) {
            return;
        }
        let (was, is) = ((from_dir, from.clone()), (to_dir, to.clone()));
        if let (RenameMode::Exchange, Some(other)) = (mode, over) {
            self.tree.node_mut(up).names_mut().insert(from, other);
            self.tree.node_mut(to_up).names_mut().insert(to, moved);
            let (a, b) = (self.dentries.remove(&was), self.dentries.remove(&is));
            self.dentries.extend(a.map(|id| (is.clone(), id)));
            self.dentries.extend(b.map(|id| (was, id)));
            self.touched_node(other, false);
        } else {
            if over.is_some() {
                self.lose(to_dir, &to);
            }
            self.tree.node_mut(up).names_mut().remove(&from);
            self.tree.node_mut(to_up).names_mut().insert(to, moved);
            let dentry = self.dentries.remove(&was);
            self.dentries.extend(dentry.map(|id| (is, id)));
        }
        self.touched_node(moved, false);
        self.touched_node(up, true);
        self.touched_node(to_up, true);
    }

    fn may_rename(
        &self,
        from: (NodeId, &[u8]),
        to: (NodeId, &[u8]),
        mode: RenameMode,
    ) -> Result<(), FsError> {
        let source = self.child(from.0, from.1)?;
        let target = self.child(to.0, to.1)?;
        let moved = source.ok_or(FsError::NotFound)?;
        let (up, to_up) = (self.as_dir(from.0)?, self.as_dir(to.0)?);
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(FsError::Exists),
            (RenameMode::Exchange, None) => return Err(FsError::NotFound),
            (_, Some(over)) if over == moved => return Ok(()),
            _ => {}
        }
        let is_dir = |ino: Id| self.tree.node(ino).is_dir();
        if is_dir(moved) && self.tree.is_below(to_up, moved) {
            return Err(FsError::Invalid);
        }
        let Some(over) = target else { return Ok(()) };
        if mode == RenameMode::Exchange {
            let below = is_dir(over) && self.tree.is_below(up, over);
            return if below { Err(FsError::Invalid) } else { Ok(()) };
        }
        match (is_dir(moved), is_dir(over)) {
            (true, false) => Err(FsError::NotADirectory),
            (false, true) => Err(FsError::IsADirectory),
            (true, true) if !self.tree.node(over).names().is_empty() => Err(FsError::NotEmpty),
            _ => Ok(()),
        }
    }

    /// The error that every operation on content gives for a node that is not a file.
    fn as_file(&self, id: NodeId) -> Result<(), FsError> {
        match self.node(id).map(Node::kind) {
            Some(FileKind::File) => Ok(()),
            Some(FileKind::Dir) | None => Err(FsError::IsADirectory),
            Some(_) => Err(FsError::Invalid),
        }
    }

    /// An offset, often at a boundary.
    fn offset(&mut self, id: NodeId) -> u64 {
        let size = self.node(id).and_then(Node::bytes).map_or(0, |b| b.len() as u64);
        let at = match self.rng.below(6) {
            0 => 0,
            1 => size,
            2 => size + self.rng.below(20_000),
            3 => self.rng.below(size / 4096 + 1) * 4096,
            _ => self.rng.below(size + 1),
        };
        at.min(LARGEST)
    }

    fn written(&mut self, id: NodeId, kill: bool) {
        if kill {
            self.node_mut(id).kill_privileges();
        }
        self.touched(id, true);
    }

    fn write(&mut self) {
        let id = self.any_file();
        let (at, len, kill) = (self.offset(id), host::size(&mut self.rng), self.rng.one_in(2));
        let bytes = host::content(&mut self.rng, len);
        self.say(format!("write {id:?} {at} {len}"));
        let wanted = if len == 0 { Ok(()) } else { self.as_file(id) };
        let got = self.fs().write(id, at, &bytes, kill);
        if self.expect(got, wanted).is_some() && len > 0 {
            put(self.node_mut(id).bytes_mut(), at, &bytes);
            self.written(id, kill);
        }
    }

    fn truncate(&mut self) {
        let id = self.any_file();
        let (size, kill) = (self.offset(id), self.rng.one_in(2));
        self.say(format!("truncate {id:?} {size}"));
        let got = self.fs().truncate(id, size, kill);
        if self.expect(got, self.as_file(id)).is_some() {
            self.node_mut(id).bytes_mut().resize(size as usize, 0);
            self.written(id, kill);
        }
    }

    fn fallocate(&mut self) {
        let id = self.any_file();
        let mode = *self.rng.pick(&[0, 1, 3, 16, 17]);
        let (at, len, kill) = (self.offset(id), 1 + self.rng.below(30_000), self.rng.one_in(2));
        self.say(format!("fallocate {id:?} {mode} {at} {len}"));
        let got = self.fs().fallocate(id, mode, at, len, kill);
        if self.expect(got, self.as_file(id)).is_none() {
            return;
        }
        let bytes = self.node_mut(id).bytes_mut();
        if mode & 1 == 0 && bytes.len() as u64 <= at + len {
            bytes.resize((at + len) as usize, 0);
        }
        if mode & 18 != 0 {
            let (start, end) =
                ((at as usize).min(bytes.len()), ((at + len) as usize).min(bytes.len()));
            bytes[start..end].fill(0);
        }
        self.written(id, kill);
    }

    fn setattr(&mut self) {
        let id = self.any();
        if matches!(self.held[&id].behind, Behind::DeadDir) {
            return;
        }
        let (mut set, kill) = (SetAttr::default(), self.rng.one_in(2));
        if self.rng.one_in(2) && !matches!(self.node(id).unwrap().body, Body::Link(_)) {
            let keep = if self.node(id).unwrap().is_dir() { 0o700 } else { 0 };
            set.mode = Some(host::perm(&mut self.rng, self.root) | keep);
        }
        if self.rng.one_in(3) {
            set.uid = Some(self.owner());
        }
        if self.rng.one_in(3) {
            set.gid = Some(self.owner());
        }
        if self.rng.one_in(2) {
            set.mtime = Some(SetTime::To(host::time(&mut self.rng)));
        }
        if self.rng.one_in(3) {
            set.atime = Some(SetTime::To(host::time(&mut self.rng)));
        }
        self.say(format!("setattr {id:?} {set:?} {kill}"));
        self.fs().setattr(id, set, kill).unwrap();
        let node = self.node_mut(id);
        if (set.uid.is_some() || set.gid.is_some()) && set.mode.is_none() {
            node.kill_privileges();
        }
        node.uid = set.uid.unwrap_or(node.uid);
        node.gid = set.gid.unwrap_or(node.gid);
        node.mode = set.mode.map_or(node.mode, |m| (node.mode & 0o170_000) | m);
        let to = |set| match set {
            Some(SetTime::To(time)) => Some(time),
            _ => None,
        };
        node.mtime = to(set.mtime).unwrap_or(node.mtime);
        node.atime = to(set.atime).unwrap_or(node.atime);
        if set != SetAttr::default() {
            self.touched(id, false);
        }
    }

    fn xattr(&mut self) {
        let id = self.any();
        // The host supports these attributes for files and directories only (xattr(7)).
        if !self.node(id).is_some_and(|n| n.is_dir() || n.bytes().is_some()) {
            return;
        }
        let name: &[u8] = [&b"user.base"[..], b"user.a", b"user.\xffb"][self.rng.below(3) as usize];
        let exists = self.node(id).unwrap().xattrs.contains_key(name);
        if self.rng.one_in(3) {
            self.say(format!("removexattr {id:?} {}", show(name)));
            let wanted = if exists { Ok(()) } else { Err(FsError::NoAttribute) };
            if self.expect(self.fs().removexattr(id, name), wanted).is_some() {
                self.node_mut(id).xattrs.remove(name);
                self.touched(id, false);
            }
            return;
        }
        let len = self.rng.below(50) as usize;
        let value = host::content(&mut self.rng, len);
        let (create, replace) = *self.rng.pick(&[(false, false), (true, false), (false, true)]);
        self.say(format!("setxattr {id:?} {} {len} {create} {replace}", show(name)));
        let how = SetXattr { create, replace, takes_setgid: false };
        let wanted = match exists {
            true if create => Err(FsError::Exists),
            false if replace => Err(FsError::NoAttribute),
            _ => Ok(()),
        };
        if self.expect(self.fs().setxattr(id, name, &value, how), wanted).is_some() {
            self.node_mut(id).xattrs.insert(name.to_vec(), value);
            self.touched(id, false);
        }
    }

    fn read(&mut self) {
        let id = self.any_file();
        let (at, len) = (self.offset(id), self.rng.below(60_000));
        self.say(format!("read {id:?} {at} {len}"));
        let got = self.fs().read(id, at, len).and_then(|plan| plan.read(false));
        if let Some(got) = self.expect(got, self.as_file(id)) {
            let bytes = self.node(id).unwrap().bytes().unwrap();
            let start = (at as usize).min(bytes.len());
            let wanted = &bytes[start..((at + len) as usize).min(bytes.len())];
            if let Some(how) = bytes_differ(wanted, &got.unwrap()) {
                panic!("read: {how}");
            }
        }
    }

    /// Continues to read a directory, or starts to.
    fn read_directory(&mut self) {
        if self.readers.len() < 3 && self.rng.one_in(2) {
            let dir = self.any_dir();
            let Ok(ino) = self.as_dir(dir) else {
                let wanted = self.as_dir(dir).map(drop);
                self.say(format!("readdir {dir:?}"));
                self.expect(self.fs().readdir(dir, 0, |_| true), wanted);
                return;
            };
            let names: BTreeSet<Bytes> = self.tree.node(ino).names().keys().cloned().collect();
            let (always, ever) = (names.clone(), names);
            self.readers.push(Reader {
                dir,
                cookie: 0,
                seen: Vec::new(),
                always,
                ever,
                again: BTreeSet::new(),
            });
        }
        if self.readers.is_empty() {
            return;
        }
        let at = self.rng.below(self.readers.len() as u64) as usize;
        let (dir, cookie) = (self.readers[at].dir, self.readers[at].cookie);
        let ino = self.as_dir(dir).unwrap();
        let room = 1 + self.rng.below(4) as usize;
        self.say(format!("readdir {dir:?} after {cookie}"));
        let mut got = Vec::new();
        let read = self.fs().readdir(dir, cookie, |entry| {
            if got.len() < room {
                got.push(entry);
                return true;
            }
            false
        });
        read.unwrap();
        let end = got.len() < room;
        for entry in got {
            assert!(entry.cookie > self.readers[at].cookie, "cookies grow");
            self.readers[at].cookie = entry.cookie;
            if entry.name == b"." || entry.name == b".." {
                let up = self.tree.places(ino).first().map_or(ino, |p| p.0);
                let wanted = if entry.name == b"." { ino } else { up };
                assert_eq!(
                    (entry.ino.0, entry.kind),
                    (wanted, FileKind::Dir),
                    "{}",
                    show(&entry.name)
                );
                continue;
            }
            let child = self.tree.child(ino, &entry.name);
            let child = child.unwrap_or_else(|| panic!("{} is listed and gone", show(&entry.name)));
            assert_eq!(
                (entry.ino.0, entry.kind),
                (child, self.tree.node(child).kind()),
                "{}",
                show(&entry.name)
            );
            let reader = &mut self.readers[at];
            let twice = reader.seen.contains(&entry.name) && !reader.again.contains(&entry.name);
            assert!(!twice, "{} is listed twice", show(&entry.name));
            assert!(reader.ever.contains(&entry.name));
            reader.seen.push(entry.name);
        }
        if end {
            let reader = self.readers.remove(at);
            let missed: Vec<_> = reader
                .always
                .iter()
                .filter(|n| !reader.seen.contains(n))
                .map(|n| show(n))
                .collect();
            assert!(missed.is_empty(), "readdir missed {missed:?}");
        }
    }

    fn copy_range(&mut self) {
        let (from, to) = (self.any_file(), self.any_file());
        let (at, into, len) = (self.offset(from), self.offset(to), self.rng.below(50_000));
        if from == to || self.as_file(from).is_err() || self.as_file(to).is_err() {
            return;
        }
        self.say(format!("copy_range {from:?} {at} {to:?} {into} {len}"));
        let done = self.fs().copy_range(from, at, to, into, len, true).unwrap();
        let bytes = self.node(from).unwrap().bytes().unwrap();
        let start = (at as usize).min(bytes.len());
        let bytes = bytes[start..((at + len) as usize).min(bytes.len())].to_vec();
        assert_eq!(done, bytes.len() as u64);
        if done > 0 {
            put(self.node_mut(to).bytes_mut(), into, &bytes);
            self.written(to, true);
        }
    }

    fn seek(&mut self) {
        let id = self.any_file();
        let at = self.offset(id);
        let Some(bytes) = self.node(id).and_then(Node::bytes).cloned() else { return };
        self.say(format!("seek {id:?} {at}"));
        let fs = self.fs();
        let zeros = |from: u64, to: u64| bytes[from as usize..to as usize].iter().all(|b| *b == 0);
        let size = bytes.len() as u64;
        let (data, hole) = (fs.seek(id, at, SeekTo::Data), fs.seek(id, at, SeekTo::Hole));
        if at >= size {
            assert_eq!((data, hole), (Err(FsError::NoSuchOffset), Err(FsError::NoSuchOffset)));
            return;
        }
        match data {
            Ok(data) => assert!(data >= at && data < size && zeros(at, data), "data at {data}"),
            Err(error) => {
                assert!(error == FsError::NoSuchOffset && zeros(at, size), "no data: {error}")
            }
        }
        let hole = hole.unwrap();
        assert!(hole >= at && hole <= size, "a hole at {hole}");
        if hole < size {
            let end = fs.seek(id, hole, SeekTo::Data).unwrap_or(size);
            assert!(end > hole && zeros(hole, end), "the hole at {hole} is none");
        }
    }

    fn readlink(&mut self) {
        let id = self.any();
        self.say(format!("readlink {id:?}"));
        let wanted = match (&self.held[&id].behind, self.node(id).map(|n| &n.body)) {
            (Behind::Live(_), Some(Body::Link(_))) => match self.fs().readlink(id, 0) {
                // Stale: the link moved from a place where it would lead out, and is looked up
                // again.
                Ok(_) | Err(FsError::LeavesJail | FsError::Stale) => return,
                Err(error) => panic!("readlink: {error}"),
            },
            (Behind::Orphan(_), Some(Body::Link(_))) => FsError::NotFound,
            _ => FsError::Invalid,
        };
        assert_eq!(self.fs().readlink(id, 0), Err(wanted));
    }
}

/// The effect of pwrite(2).
fn put(file: &mut Bytes, at: u64, bytes: &[u8]) {
    let end = at as usize + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[at as usize..end].copy_from_slice(bytes);
}
