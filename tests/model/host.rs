//! The base on the host: creates a random one, and reads a whole one.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs as host;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use jailfs::internals::sys::xattr;
use jailfs::types::Timestamp;
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use crate::rng::Rng;
use crate::tree::{Body, Bytes, Id, Node, ROOT, Tree};

/// Names for everything: few, so that they collide, and some odd ones.
pub fn name(rng: &mut Rng) -> Bytes {
    match rng.below(14) {
        0 => b"new\nline".to_vec(),
        1 => b"\xff\xfe".to_vec(),
        2 => vec![b'n'; 255],
        3 => b"@at".to_vec(),
        n => vec![b'a' + n as u8 - 4],
    }
}

/// Bytes that differ at neighbouring offsets and are never zero.
pub fn content(rng: &mut Rng, len: usize) -> Bytes {
    let seed = rng.next();
    (0..len as u64)
        .map(|i| ((i.wrapping_mul(31).wrapping_add(i >> 8).wrapping_add(seed)) % 255) as u8 + 1)
        .collect()
}

pub fn size(rng: &mut Rng) -> usize {
    match rng.below(6) {
        0 => 0,
        1 => rng.below(100) as usize,
        2 => 4096 * rng.below(5) as usize,
        3 => rng.below(200 << 10) as usize,
        _ => rng.below(10_000) as usize,
    }
}

pub fn time(rng: &mut Rng) -> Timestamp {
    let nanos = rng.below(1_000_000_000) as u32;
    match rng.below(4) {
        0 => Timestamp { secs: -(rng.below(2_000_000_000) as i64) - 1, nanos },
        _ => Timestamp { secs: rng.below(2_000_000_000) as i64, nanos },
    }
}

/// Permission bits. Bits that would lock out anyone but root are used only as root.
pub fn perm(rng: &mut Rng, root: bool) -> u32 {
    let bits = rng.below(0o10000) as u32;
    if root { bits } else { bits | 0o700 }
}

/// Fills an empty directory.
pub fn make(base: &Path, rng: &mut Rng, root: bool) {
    let mut dirs = vec![base.to_owned()];
    let mut files: Vec<PathBuf> = Vec::new();
    let mut all = Vec::new();
    for _ in 0..10 + rng.below(30) {
        let dir = dirs[rng.below(dirs.len() as u64) as usize].clone();
        let path = dir.join(OsStr::from_bytes(&name(rng)));
        if path.symlink_metadata().is_ok() {
            continue;
        }
        match rng.below(12) {
            0..=3 => {
                host::create_dir(&path).unwrap();
                dirs.push(path.clone());
            }
            4 => symlink(
                OsStr::from_bytes(
                    [&b"a"[..], b"../b", b"/etc/passwd", b"c/\xff"][rng.below(4) as usize],
                ),
                &path,
            )
            .unwrap(),
            5 => nix::sys::stat::mknod(&path, SFlag::S_IFIFO, Mode::from_bits_truncate(0o644), 0)
                .unwrap(),
            6 | 7 if !files.is_empty() => {
                host::hard_link(&files[rng.below(files.len() as u64) as usize], &path).unwrap()
            }
            _ => {
                let len = size(rng);
                let file =
                    host::OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
                if rng.below(4) == 0 {
                    // Sparse: a hole before and after the data.
                    let at = rng.below(64 << 10);
                    file.write_all_at(&content(rng, len / 4), at).unwrap();
                    file.set_len(at + len as u64).unwrap();
                } else {
                    file.write_all_at(&content(rng, len), 0).unwrap();
                }
                files.push(path.clone());
            }
        }
        all.push(path);
    }
    for path in &all {
        decorate(path, rng, root);
    }
    // Deepest first, because a change in a directory sets its times.
    for path in all.iter().rev() {
        let (secs, nanos) = (time(rng), time(rng));
        let times = |t: Timestamp| TimeSpec::new(t.secs, i64::from(t.nanos));
        utimensat(
            nix::fcntl::AT_FDCWD,
            path,
            &times(secs),
            &times(nanos),
            UtimensatFlags::NoFollowSymlink,
        )
        .unwrap();
    }
}

fn decorate(path: &Path, rng: &mut Rng, root: bool) {
    let kind = path.symlink_metadata().unwrap();
    if root && rng.below(3) == 0 {
        std::os::unix::fs::lchown(path, Some(rng.below(3) as u32), Some(rng.below(3) as u32))
            .unwrap();
    }
    if kind.is_symlink() {
        return;
    }
    if (kind.is_file() || kind.is_dir()) && rng.below(3) == 0 {
        let file = open(path);
        xattr::set(&file, b"user.base", &content(rng, 20)).unwrap();
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(perm(rng, root));
    host::set_permissions(path, mode).unwrap();
}

/// Opens without changing the access time.
fn open(path: &Path) -> host::File {
    host::OpenOptions::new().read(true).custom_flags(libc::O_NOATIME).open(path).unwrap()
}

/// Reads the whole base. Inode numbers are the host's; that of the root is [`ROOT`].
pub fn read(base: &Path) -> Tree {
    let mut tree = Tree::default();
    read_node(base, ROOT, &mut tree);
    tree
}

fn read_node(path: &Path, id: Id, tree: &mut Tree) {
    let stat = path.symlink_metadata().unwrap();
    let mut xattrs = BTreeMap::new();
    let body = if stat.is_dir() {
        let file = open(path);
        take_xattrs(&file, &mut xattrs);
        let mut names = BTreeMap::new();
        for entry in host::read_dir(path).unwrap() {
            let entry = entry.unwrap();
            let child = entry.path().symlink_metadata().unwrap().ino();
            names.insert(entry.file_name().as_bytes().to_vec(), child);
            if !tree.nodes.contains_key(&child) {
                read_node(&entry.path(), child, tree);
            }
        }
        Body::Dir(names)
    } else if stat.is_file() {
        let mut file = open(path);
        take_xattrs(&file, &mut xattrs);
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        Body::File(Rc::new(bytes))
    } else if stat.is_symlink() {
        Body::Link(host::read_link(path).unwrap().as_os_str().as_bytes().to_vec())
    } else {
        Body::Special
    };
    let at = |secs, nanos: i64| Timestamp { secs, nanos: nanos as u32 };
    let node = Node {
        mode: stat.mode(),
        uid: stat.uid(),
        gid: stat.gid(),
        atime: at(stat.atime(), stat.atime_nsec()),
        mtime: at(stat.mtime(), stat.mtime_nsec()),
        ctime: at(stat.ctime(), stat.ctime_nsec()),
        xattrs,
        body,
    };
    tree.nodes.insert(id, node);
}

fn take_xattrs(file: &host::File, into: &mut BTreeMap<Bytes, Bytes>) {
    for name in xattr::list(file).unwrap() {
        if name.starts_with(b"user.") {
            into.insert(name.clone(), xattr::get(file, &name).unwrap());
        }
    }
}
