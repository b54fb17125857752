//! Expected files and directories, and random operations on them. Each operation is one system
//! call.

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use crate::rng::Rng;

const BLOCK: usize = 4096;
const ATTR: &[u8] = b"user.k";

/// One system call. The bytes come from a stamp, so no two calls write the same.
#[derive(Clone, Debug)]
pub enum Op {
    /// With the inode number of the file, once it is known.
    Create(String, u64),
    Write {
        path: String,
        at: u64,
        len: usize,
        stamp: u64,
    },
    Append {
        path: String,
        len: usize,
        stamp: u64,
    },
    Truncate(String, u64),
    Remove(String),
    Rename(String, String),
    Mkdir(String),
    Rmdir(String),
    Link(String, String),
    Symlink(String, String),
    Chmod(String, u32),
    Attr(String, u64),
}

/// The kind of operations that a writer prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// Creates, writes, renames and removes small files.
    Small,
    /// Writes and appends to large files.
    Big,
    /// Moves directories.
    Dirs,
}

#[derive(Clone, Debug, PartialEq)]
enum Entry {
    Dir,
    File(u64),
    Link(String),
}

#[derive(Clone, Debug)]
struct Content {
    bytes: Arc<Vec<u8>>,
    mode: u32,
    attr: Option<u64>,
    /// The inode number; 0 if it is not known.
    ino: u64,
    /// The number of names that `stat` reported; 0 if it is not known.
    links: u64,
}

/// The files and directories. In a tree that was read, the key of a file is its inode number.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    names: BTreeMap<String, Entry>,
    files: BTreeMap<u64, Content>,
    next: u64,
}

/// The bytes that a stamp puts at an offset of a file.
fn bytes(stamp: u64, at: u64, len: usize) -> Vec<u8> {
    let word = |n: u64| (stamp ^ (n << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let (first, end) = (at / 8, (at + len as u64).div_ceil(8));
    let all: Vec<u8> = (first..end).flat_map(word).collect();
    let skip = (at % 8) as usize;
    all[skip..skip + len].to_vec()
}

impl Tree {
    fn content(&self, path: &str) -> Option<&Content> {
        match self.names.get(path) {
            Some(Entry::File(id)) => self.files.get(id),
            _ => None,
        }
    }

    fn content_mut(&mut self, path: &str) -> &mut Content {
        let Some(Entry::File(id)) = self.names.get(path) else { panic!("'{path}' is no file") };
        self.files.get_mut(id).unwrap()
    }

    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Create(path, ino) => {
                self.next += 1;
                // A key that no inode number has.
                let id = (1 << 63) | self.next;
                self.names.insert(path.clone(), Entry::File(id));
                let content =
                    Content { bytes: Arc::default(), mode: 0o644, attr: None, ino: *ino, links: 0 };
                self.files.insert(id, content);
            }
            Op::Write { path, at, len, stamp } => self.write(path, *at as usize, *at, *len, *stamp),
            Op::Append { path, len, stamp } => {
                let end = self.content_mut(path).bytes.len();
                self.write(path, end, end as u64, *len, *stamp);
            }
            Op::Truncate(path, len) => {
                Arc::make_mut(&mut self.content_mut(path).bytes).resize(*len as usize, 0);
            }
            Op::Remove(path) | Op::Rmdir(path) => drop(self.names.remove(path)),
            Op::Rename(from, to) => self.rename(from, to),
            Op::Mkdir(path) => drop(self.names.insert(path.clone(), Entry::Dir)),
            Op::Link(from, to) => {
                let entry = self.names[from].clone();
                self.names.insert(to.clone(), entry);
            }
            Op::Symlink(path, text) => {
                drop(self.names.insert(path.clone(), Entry::Link(text.clone())))
            }
            Op::Chmod(path, mode) => self.content_mut(path).mode = *mode,
            Op::Attr(path, value) => self.content_mut(path).attr = Some(*value),
        }
        if matches!(op, Op::Remove(_) | Op::Rename(..)) {
            let named: BTreeSet<u64> = self.names.values().filter_map(file).collect();
            self.files.retain(|id, _| named.contains(id));
        }
    }

    fn write(&mut self, path: &str, start: usize, at: u64, len: usize, stamp: u64) {
        let content = Arc::make_mut(&mut self.content_mut(path).bytes);
        if content.len() < start + len {
            content.resize(start + len, 0);
        }
        content[start..start + len].copy_from_slice(&bytes(stamp, at, len));
    }

    fn rename(&mut self, from: &str, to: &str) {
        let below = format!("{from}/");
        let moved: Vec<String> = self
            .names
            .keys()
            .filter(|name| *name == from || name.starts_with(&below))
            .cloned()
            .collect();
        for name in moved {
            let entry = self.names.remove(&name).unwrap();
            self.names.insert(format!("{to}{}", &name[from.len()..]), entry);
        }
    }

    /// How the tree that was read differs from this one.
    pub fn differs(&self, found: &Tree) -> Vec<String> {
        let missing = self.names.keys().filter(|name| !found.names.contains_key(*name));
        let extra = found.names.keys().filter(|name| !self.names.contains_key(*name));
        let mut why: Vec<String> = missing.map(|name| format!("'{name}' is missing")).collect();
        why.extend(extra.map(|name| format!("'{name}' should not be there")));
        let (mut there, mut back) = (HashMap::new(), HashMap::new());
        for (name, entry) in &self.names {
            match (entry, found.names.get(name)) {
                (_, None) => {}
                (Entry::File(id), Some(Entry::File(other))) => {
                    let is_linked = *there.entry(*id).or_insert(*other) == *other
                        && *back.entry(*other).or_insert(*id) == *id;
                    why.extend((!is_linked).then(|| format!("'{name}' is not linked as it was")));
                    let content = content_differs(&self.files[id], &found.files[other]);
                    why.extend(content.map(|how| format!("'{name}' {how}")));
                }
                (entry, Some(other)) if entry == other => {}
                (entry, Some(other)) => {
                    why.push(format!("'{name}' is {other:?} and was {entry:?}"))
                }
            }
        }
        why
    }

    /// Whether the tree that was read is this one with a write half done: all else is equal, and
    /// each block of the written file begins with new bytes and ends with old ones. The kill can
    /// end the copy into the pool at a page of the pool, which can be any byte of the file.
    pub fn is_torn_by(&self, op: &Op, found: &Tree) -> bool {
        let (Op::Write { path, .. } | Op::Append { path, .. }) = op else { return false };
        let mut after = self.clone();
        after.apply(op);
        let (Some(old), Some(new), Some(is)) =
            (self.content(path), after.content(path), found.content(path))
        else {
            return false;
        };
        let (old, new, is_bytes) = (&old.bytes, &new.bytes, &is.bytes);
        if is_bytes.len() < old.len() || is_bytes.len() > new.len() {
            return false;
        }
        let torn = is_bytes.chunks(BLOCK).enumerate().all(|(at, block)| {
            let of = |bytes: &'_ [u8]| -> Vec<u8> {
                bytes.iter().skip(at * BLOCK).take(block.len()).copied().collect()
            };
            let (old, new) = (of(old), of(new));
            let done = block.iter().zip(&new).take_while(|(is, new)| is == new).count();
            block == new || old.get(done..) == block.get(done..)
        });
        let mut rest = self.clone();
        rest.content_mut(path).bytes = Arc::clone(is_bytes);
        torn && rest.differs(found).is_empty()
    }

    fn paths(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<&String> {
        self.names.iter().filter(|(_, entry)| wanted(entry)).map(|(name, _)| name).collect()
    }

    /// Reads a tree. In a copy, inode numbers are not those of the mount.
    pub fn read(root: &Path) -> Tree {
        let mut tree = Tree::default();
        read_dir(root, "", &mut tree)
            .unwrap_or_else(|error| panic!("read {}: {error}", root.display()));
        tree
    }

    /// The files of a tree that was read which have another number of names than `stat` reported.
    pub fn wrong_links(&self) -> Vec<String> {
        let mut names: BTreeMap<u64, Vec<&String>> = BTreeMap::new();
        for (name, entry) in &self.names {
            if let Some(id) = file(entry) {
                names.entry(id).or_default().push(name);
            }
        }
        let counted = |id: &u64| names.get(id).map_or(&[][..], Vec::as_slice);
        let wrong = self.files.iter().filter(|(id, is)| is.links != counted(id).len() as u64);
        wrong.map(|(id, is)| format!("{:?} has {} links", counted(id), is.links)).collect()
    }

    /// The same without inode numbers.
    pub fn without_numbers(mut self) -> Tree {
        self.files.values_mut().for_each(|content| content.ino = 0);
        self
    }
}

fn file(entry: &Entry) -> Option<u64> {
    match entry {
        Entry::File(id) => Some(*id),
        Entry::Dir | Entry::Link(_) => None,
    }
}

fn content_differs(was: &Content, is: &Content) -> Option<String> {
    if was.bytes != is.bytes {
        let at = was.bytes.iter().zip(is.bytes.iter()).position(|(was, is)| was != is);
        let zeros = at.is_some_and(|at| is.bytes[at..].iter().take(64).all(|byte| *byte == 0));
        let (was, is) = (was.bytes.len(), is.bytes.len());
        return Some(format!(
            "has {is} bytes and had {was}; the first that differs is at {at:?} (zeros: {zeros})"
        ));
    }
    let numbers_differ = was.ino != 0 && is.ino != 0 && was.ino != is.ino;
    (was.mode != is.mode || was.attr != is.attr || numbers_differ).then(|| {
        format!(
            "has mode {:o}, attribute {:?}, number {}; it had {:o}, {:?}, {}",
            is.mode, is.attr, is.ino, was.mode, was.attr, was.ino
        )
    })
}

fn read_dir(root: &Path, path: &str, tree: &mut Tree) -> io::Result<()> {
    for entry in fs::read_dir(root.join(path))? {
        let entry = entry?;
        let name = entry.file_name();
        let name = std::str::from_utf8(name.as_bytes()).unwrap();
        let name = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        let full = root.join(&name);
        let about = fs::symlink_metadata(&full)?;
        if about.is_dir() {
            tree.names.insert(name.clone(), Entry::Dir);
            read_dir(root, &name, tree)?;
        } else if about.is_symlink() {
            let text = fs::read_link(&full)?.to_string_lossy().into_owned();
            tree.names.insert(name, Entry::Link(text));
        } else {
            tree.names.insert(name, Entry::File(about.ino()));
            // Another name of the same file.
            if let MapEntry::Vacant(place) = tree.files.entry(about.ino()) {
                place.insert(read_file(&full, &about)?);
            }
        }
    }
    Ok(())
}

fn read_file(path: &Path, about: &fs::Metadata) -> io::Result<Content> {
    let attr = match jailfs::internals::sys::xattr::get(&File::open(path)?, ATTR) {
        Ok(value) => Some(u64::from_le_bytes(value.try_into().unwrap())),
        Err(error) if error.raw_os_error() == Some(libc::ENODATA) => None,
        Err(error) => return Err(error),
    };
    let mode = about.mode() & 0o7777;
    let bytes = Arc::new(fs::read(path)?);
    Ok(Content { bytes, mode, attr, ino: about.ino(), links: about.nlink() })
}

/// Does one operation. Returns the inode number of a new file.
pub fn perform(root: &Path, op: &Op) -> io::Result<u64> {
    let at = |path: &String| root.join(path);
    let open = |path: &String| OpenOptions::new().write(true).open(root.join(path));
    match op {
        Op::Create(path, _) => {
            let file = OpenOptions::new().write(true).create_new(true).open(at(path))?;
            // The file exists even if reading its number fails.
            Ok(file.metadata().map_or(0, |about| about.ino()))
        }
        Op::Write { path, at, len, stamp } => {
            whole(open(path)?.write_at(&bytes(*stamp, *at, *len), *at)?, *len).map(|()| 0)
        }
        Op::Append { path, len, stamp } => {
            let file = OpenOptions::new().append(true).open(at(path))?;
            let end = file.metadata()?.len();
            whole(io::Write::write(&mut &file, &bytes(*stamp, end, *len))?, *len).map(|()| 0)
        }
        Op::Truncate(path, len) => open(path)?.set_len(*len).map(|()| 0),
        Op::Remove(path) => fs::remove_file(at(path)).map(|()| 0),
        Op::Rename(from, to) => fs::rename(at(from), at(to)).map(|()| 0),
        Op::Mkdir(path) => fs::create_dir(at(path)).map(|()| 0),
        Op::Rmdir(path) => fs::remove_dir(at(path)).map(|()| 0),
        Op::Link(from, to) => link(&at(from), &at(to)).map(|()| 0),
        Op::Symlink(path, text) => std::os::unix::fs::symlink(text, at(path)).map(|()| 0),
        Op::Chmod(path, mode) => {
            fs::set_permissions(at(path), fs::Permissions::from_mode(*mode)).map(|()| 0)
        }
        Op::Attr(path, value) => {
            jailfs::internals::sys::xattr::set(&File::open(at(path))?, ATTR, &value.to_le_bytes())
                .map(|()| 0)
        }
    }
}

/// Makes a hard link. The kernel's count of links can be too low after a stat(2) beside an
/// unlink(2). At zero it answers ENOENT without asking. The next stat(2) gets the right count.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let about = fs::symlink_metadata(from)?;
            if about.nlink() > 0 { fs::hard_link(from, to) } else { Err(error) }
        }
        other => other,
    }
}

/// Describes the file of an operation that failed, and does the operation again.
pub fn describe(root: &Path, op: &Op) -> String {
    let (Op::Create(path, _)
    | Op::Write { path, .. }
    | Op::Append { path, .. }
    | Op::Truncate(path, _)
    | Op::Remove(path)
    | Op::Rename(path, _)
    | Op::Mkdir(path)
    | Op::Rmdir(path)
    | Op::Link(path, _)
    | Op::Symlink(path, _)
    | Op::Chmod(path, _)
    | Op::Attr(path, _)) = op;
    let full = root.join(path);
    let show = |path: &Path| match fs::symlink_metadata(path) {
        Ok(about) => format!("inode {} with {} links", about.ino(), about.nlink()),
        Err(error) => error.to_string(),
    };
    let (file, dir) = (show(&full), full.parent().map(show));
    format!("there is {file} in {dir:?}; again: {:?}", perform(root, op))
}

fn whole(written: usize, wanted: usize) -> io::Result<()> {
    if written == wanted {
        Ok(())
    } else {
        Err(io::Error::other(format!("{written} of {wanted} bytes written")))
    }
}

/// Syncs the file or directory of an operation, if it still exists.
pub fn sync(root: &Path, op: &Op) -> io::Result<()> {
    match op {
        Op::Write { path, .. } | Op::Append { path, .. } | Op::Create(path, _) => {
            File::open(root.join(path))?.sync_data()
        }
        _ => File::open(root)?.sync_all(),
    }
}

impl Habit {
    fn most_files(self) -> usize {
        match self {
            Habit::Small => 90,
            Habit::Big => 5,
            Habit::Dirs => 30,
        }
    }

    /// Chooses the next operation, which must succeed in this tree.
    pub fn choose(self, rng: &mut Rng, tree: &Tree, stamp: u64) -> Op {
        let files = tree.paths(|entry| matches!(entry, Entry::File(_)));
        let dirs = tree.paths(|entry| *entry == Entry::Dir);
        let fresh = |rng: &mut Rng| match dirs.is_empty() || rng.one_in(4) {
            true => format!("n{stamp}"),
            false => format!("{}/n{stamp}", rng.pick(&dirs)),
        };
        if files.len() > self.most_files() {
            return Op::Remove((*rng.pick(&files)).clone());
        }
        if files.len() < self.most_files() / 2 || rng.one_in(8) {
            return Op::Create(fresh(rng), 0);
        }
        let path = (*rng.pick(&files)).clone();
        if self == Habit::Dirs
            && let Some(op) = choose_dir(rng, tree, &dirs, stamp)
        {
            return op;
        }
        let size = tree.content(&path).map_or(0, |content| content.bytes.len() as u64);
        let longest = if self == Habit::Big { 120_000 } else { 9_000 };
        let len = 1 + rng.below(longest) as usize;
        match rng.below(if self == Habit::Big { 12 } else { 20 }) {
            0..4 => Op::Write { at: rng.below(size + 1), path, len, stamp },
            4..9 if size < 40 * longest / 2 => Op::Append { path, len, stamp },
            4..10 => Op::Truncate(path, rng.below(size + 1)),
            10 => Op::Attr(path, stamp),
            11 => Op::Chmod(path, [0o644, 0o600, 0o755][rng.below(3) as usize]),
            12 => Op::Link(path, fresh(rng)),
            13 => Op::Symlink(fresh(rng), format!("n{stamp}-text")),
            14 => Op::Remove(path),
            15..17 if files.len() > 1 => {
                let to = (*rng.pick(&files)).clone();
                // Renaming one hard link of a file to another does nothing.
                if tree.names[&to] == tree.names[&path] {
                    Op::Rename(path, fresh(rng))
                } else {
                    Op::Rename(path, to)
                }
            }
            _ => Op::Rename(path, fresh(rng)),
        }
    }
}

fn choose_dir(rng: &mut Rng, tree: &Tree, dirs: &[&String], stamp: u64) -> Option<Op> {
    let links = tree.paths(|entry| matches!(entry, Entry::Link(_)));
    if links.len() > 20 {
        return Some(Op::Remove((*rng.pick(&links)).clone()));
    }
    if dirs.len() < 4 || (dirs.len() < 16 && rng.one_in(5)) {
        let name = match dirs.is_empty() || rng.one_in(3) {
            true => format!("d{stamp}"),
            false => format!("{}/d{stamp}", rng.pick(dirs)),
        };
        return Some(Op::Mkdir(name));
    }
    let from = (*rng.pick(dirs)).clone();
    let below = format!("{from}/");
    match rng.below(10) {
        0..6 => {
            let into: Vec<_> =
                dirs.iter().filter(|dir| ***dir != from && !dir.starts_with(&below)).collect();
            let to = match into.is_empty() || rng.one_in(3) {
                true => format!("d{stamp}"),
                false => format!("{}/d{stamp}", rng.pick(&into)),
            };
            Some(Op::Rename(from, to))
        }
        6 if !tree.names.keys().any(|name| name.starts_with(&below)) => Some(Op::Rmdir(from)),
        _ => None,
    }
}
