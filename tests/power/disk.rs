//! A disk that is made up from what was done to it: up to some moment everything that was synced, and of the rest whatever the host
//! happened to have written, page by page and in any order.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use jailfs::internals::sys::failpoint::Change;

const PAGE: u64 = 4096;

/// Numbers that are the same at every run (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// A file as the host has it, and what of it might be lost.
#[derive(Clone, Default)]
struct HostFile {
    bytes: Vec<u8>,
    /// Since the last sync: pages that were written, each as it became, and lengths.
    pending: Vec<Pending>,
}

#[derive(Clone)]
enum Pending {
    Page { at: u64, bytes: Vec<u8> },
    Length(u64),
}

/// A directory entry that is not on the disk for certain.
#[derive(Clone)]
enum Entry {
    Link(u64, String, u64),
    Unlink(u64, String),
    Rename(u64, String, String),
}

/// The files of a directory, as the host has them and as it shows them.
#[derive(Clone, Default)]
pub struct Disk {
    files: HashMap<u64, HostFile>,
    /// Directory and name of everything that is on the disk for certain.
    names: BTreeMap<(u64, String), u64>,
    /// The same with what is pending.
    seen: BTreeMap<(u64, String), u64>,
    pending: Vec<Entry>,
    dirs: BTreeSet<u64>,
    /// The host gives the number of a file that is gone to another: what each number stands for now.
    stands_for: HashMap<u64, u64>,
    made: u64,
}

impl Disk {
    /// A directory of the host as it is, all of it certain, and what its number is.
    pub fn of_dir(dir: &Path) -> (Disk, u64) {
        let mut disk = Disk::default();
        let root = dir.metadata().unwrap().ino();
        disk.take_in(dir, root);
        disk.seen = disk.names.clone();
        (disk, root)
    }

    fn take_in(&mut self, dir: &Path, number: u64) {
        self.dirs.insert(number);
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let (about, name) =
                (entry.metadata().unwrap(), entry.file_name().into_string().unwrap());
            self.names.insert((number, name), about.ino());
            if about.is_dir() {
                self.take_in(&entry.path(), about.ino());
            } else if about.is_file() {
                let file =
                    HostFile { bytes: std::fs::read(entry.path()).unwrap(), pending: Vec::new() };
                self.files.insert(about.ino(), file);
            }
        }
    }

    fn of(&self, number: u64) -> u64 {
        self.stands_for.get(&number).copied().unwrap_or(number)
    }

    /// A name of a directory, and what it stands for: something new, if it was not known to.
    fn name(&mut self, dir: u64, name: &str, number: u64) -> u64 {
        let known = self.seen.get(&(dir, name.to_owned())).copied();
        if let Some(known) = known.filter(|known| *known == self.of(number)) {
            return known;
        }
        self.made += 1;
        let new = (1 << 60) + self.made;
        self.stands_for.insert(number, new);
        self.seen.insert((dir, name.to_owned()), new);
        self.pending.push(Entry::Link(dir, name.to_owned(), new));
        new
    }

    /// Makes a change.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Open { dir, name, ino } => {
                let new = self.name(self.of(*dir), name, *ino);
                self.files.entry(new).or_default();
            }
            Change::Mkdir { dir, name, ino } => {
                let new = self.name(self.of(*dir), name, *ino);
                self.dirs.insert(new);
            }
            Change::Write { ino, offset, bytes } => {
                let file = self
                    .files
                    .entry(self.stands_for.get(ino).copied().unwrap_or(*ino))
                    .or_default();
                let mut at = *offset;
                for chunk in pages(*offset, bytes) {
                    file.pending.push(Pending::Page { at, bytes: chunk.to_vec() });
                    at += chunk.len() as u64;
                }
            }
            Change::Cut { ino, len } => {
                self.files
                    .entry(self.stands_for.get(ino).copied().unwrap_or(*ino))
                    .or_default()
                    .pending
                    .push(Pending::Length(*len));
            }
            Change::Punch { ino, range } => {
                let zeros = vec![0; range.len() as usize];
                let file = self
                    .files
                    .entry(self.stands_for.get(ino).copied().unwrap_or(*ino))
                    .or_default();
                let mut at = range.start;
                for chunk in pages(range.start, &zeros) {
                    file.pending.push(Pending::Page { at, bytes: chunk.to_vec() });
                    at += chunk.len() as u64;
                }
            }
            Change::Sync { ino } => {
                let file = self
                    .files
                    .entry(self.stands_for.get(ino).copied().unwrap_or(*ino))
                    .or_default();
                let pending = std::mem::take(&mut file.pending);
                pending.iter().for_each(|p| put(&mut file.bytes, p));
            }
            Change::Rename { dir, from, to } => {
                let dir = &self.of(*dir);
                let ino = self.seen.remove(&(*dir, from.clone())).unwrap();
                self.seen.insert((*dir, to.clone()), ino);
                self.pending.push(Entry::Rename(*dir, from.clone(), to.clone()));
            }
            Change::Remove { dir, name } => {
                let dir = &self.of(*dir);
                if self.seen.remove(&(*dir, name.clone())).is_some() {
                    self.pending.push(Entry::Unlink(*dir, name.clone()));
                }
            }
            Change::SyncAll {} => {
                for file in self.files.values_mut() {
                    let pending = std::mem::take(&mut file.pending);
                    pending.iter().for_each(|p| put(&mut file.bytes, p));
                }
                let pending = std::mem::take(&mut self.pending);
                pending.iter().for_each(|entry| enter(&mut self.names, entry));
            }
            // A sync of a directory commits the journal of the host, and with it all names so far.
            Change::SyncDir { .. } => {
                let pending = std::mem::take(&mut self.pending);
                pending.iter().for_each(|entry| enter(&mut self.names, entry));
            }
        }
    }

    /// What a power cut leaves: of the names that are not certain a first part, of the pages any.
    pub fn cut(mut self, random: &mut Random, root: u64, to: &Path) {
        let kept = random.below(self.pending.len() as u64 + 1) as usize;
        for entry in &self.pending[..kept] {
            enter(&mut self.names, entry);
        }
        let how = random.below(4);
        for file in self.files.values_mut() {
            let pending = std::mem::take(&mut file.pending);
            let first = random.below(pending.len() as u64 + 1) as usize;
            let mut kept: Vec<bool> = (0..pending.len())
                .map(|at| match how {
                    0 => false,
                    1 => at < first,
                    _ => random.below(2) == 0,
                })
                .collect();
            // The host writes pages: with a part of one goes what was written to it before.
            let mut whole = BTreeSet::new();
            for (at, kept) in kept.iter_mut().enumerate().rev() {
                if let Pending::Page { at: start, .. } = &pending[at] {
                    *kept |= whole.contains(&(start / PAGE));
                    if *kept {
                        whole.insert(start / PAGE);
                    }
                }
            }
            for (p, _) in pending.iter().zip(&kept).filter(|(_, kept)| **kept) {
                put(&mut file.bytes, p);
            }
        }
        self.lay(root, to);
    }

    fn lay(&self, dir: u64, to: &Path) {
        std::fs::DirBuilder::new().mode(0o700).create(to).unwrap();
        for ((_, name), ino) in self.names.range((dir, String::new())..(dir + 1, String::new())) {
            if self.dirs.contains(ino) {
                self.lay(*ino, &to.join(name));
            } else if let Some(file) = self.files.get(ino) {
                std::fs::write(to.join(name), &file.bytes).unwrap();
            }
        }
    }
}

fn pages(offset: u64, bytes: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    let mut rest = bytes;
    let mut at = offset;
    while !rest.is_empty() {
        let len = (PAGE - at % PAGE).min(rest.len() as u64) as usize;
        let (part, behind) = rest.split_at(len);
        parts.push(part);
        at += len as u64;
        rest = behind;
    }
    parts
}

fn put(bytes: &mut Vec<u8>, pending: &Pending) {
    match pending {
        Pending::Page { at, bytes: page } => {
            let (start, end) = (*at as usize, *at as usize + page.len());
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[start..end].copy_from_slice(page);
        }
        Pending::Length(len) => bytes.resize(*len as usize, 0),
    }
}

fn enter(names: &mut BTreeMap<(u64, String), u64>, entry: &Entry) {
    match entry {
        Entry::Link(dir, name, ino) => drop(names.insert((*dir, name.clone()), *ino)),
        Entry::Unlink(dir, name) => drop(names.remove(&(*dir, name.clone()))),
        Entry::Rename(dir, from, to) => {
            if let Some(ino) = names.remove(&(*dir, from.clone())) {
                names.insert((*dir, to.clone()), ino);
            }
        }
    }
}
