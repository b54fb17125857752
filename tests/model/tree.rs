//! The simple model: a tree of plain nodes. A snapshot is a full copy.

use std::collections::BTreeMap;
use std::rc::Rc;

use jailfs::types::{FileKind, Timestamp};

/// The identity of a node. In the mount, its inode number, which never changes.
pub type Id = u64;
pub const ROOT: Id = 1;

pub type Bytes = Vec<u8>;

#[derive(Clone, PartialEq)]
pub enum Body {
    /// If two states share an `Rc`, the file was not written to between them.
    File(Rc<Bytes>),
    Dir(BTreeMap<Bytes, Id>),
    Link(Bytes),
    Special,
}

#[derive(Clone, PartialEq)]
pub struct Node {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Only for files: reading a directory or symlink on the host changes its access time.
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub xattrs: BTreeMap<Bytes, Bytes>,
    pub body: Body,
}

impl Node {
    pub fn kind(&self) -> FileKind {
        FileKind::from_mode(self.mode).unwrap()
    }

    pub fn is_dir(&self) -> bool {
        matches!(self.body, Body::Dir(_))
    }

    pub fn bytes(&self) -> Option<&Rc<Bytes>> {
        match &self.body {
            Body::File(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The content, for changes.
    pub fn bytes_mut(&mut self) -> &mut Bytes {
        match &mut self.body {
            Body::File(bytes) => Rc::make_mut(bytes),
            _ => panic!("not a file"),
        }
    }

    pub fn names(&self) -> &BTreeMap<Bytes, Id> {
        match &self.body {
            Body::Dir(names) => names,
            _ => panic!("not a directory"),
        }
    }

    pub fn names_mut(&mut self) -> &mut BTreeMap<Bytes, Id> {
        match &mut self.body {
            Body::Dir(names) => names,
            _ => panic!("not a directory"),
        }
    }

    /// The bits that a write without CAP_FSETID clears.
    pub fn kill_privileges(&mut self) {
        if !self.is_dir() {
            self.mode &= !0o4000;
            if self.mode & 0o010 != 0 {
                self.mode &= !0o2000;
            }
        }
    }
}

/// The times that two trees must have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Times {
    All,
    /// The host sets change times, and an access time alone is not applied.
    NoChange,
}

#[derive(Clone, Default)]
pub struct Tree {
    pub nodes: BTreeMap<Id, Node>,
}

impl Tree {
    pub fn get(&self, id: Id) -> Option<&Node> {
        self.nodes.get(&id)
    }

    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[&id]
    }

    pub fn node_mut(&mut self, id: Id) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    pub fn child(&self, dir: Id, name: &[u8]) -> Option<Id> {
        self.node(dir).names().get(name).copied()
    }

    /// Every name of every node: (directory, name).
    pub fn places(&self, id: Id) -> Vec<(Id, Bytes)> {
        let dirs = self.nodes.iter().filter(|(_, n)| n.is_dir());
        dirs.flat_map(|(dir, n)| {
            n.names().iter().filter(|(_, c)| **c == id).map(|(name, _)| (*dir, name.clone()))
        })
        .collect()
    }

    pub fn nlink(&self, id: Id) -> u32 {
        let node = self.node(id);
        if node.is_dir() {
            return 2 + node.names().values().filter(|c| self.node(**c).is_dir()).count() as u32;
        }
        self.places(id).len() as u32
    }

    /// Whether `dir` is `ancestor` or is below it.
    pub fn is_below(&self, dir: Id, ancestor: Id) -> bool {
        let mut at = dir;
        while at != ancestor {
            match self.places(at).first() {
                Some((up, _)) => at = *up,
                None => return false,
            }
        }
        true
    }

    /// All paths and their nodes; the root is the empty path.
    pub fn paths(&self) -> BTreeMap<Bytes, Id> {
        let mut all = BTreeMap::from([(Vec::new(), ROOT)]);
        self.paths_below(ROOT, &[], &mut all);
        all
    }

    fn paths_below(&self, dir: Id, path: &[u8], all: &mut BTreeMap<Bytes, Id>) {
        for (name, child) in self.node(dir).names() {
            let path = join(path, name);
            if self.node(*child).is_dir() {
                self.paths_below(*child, &path, all);
            }
            all.insert(path, *child);
        }
    }

    /// Removes a name, and the node with its last name.
    pub fn remove_name(&mut self, dir: Id, name: &[u8]) -> Id {
        let id = self.node_mut(dir).names_mut().remove(name).unwrap();
        if self.places(id).is_empty() {
            self.nodes.remove(&id);
        }
        id
    }

    /// The first difference between this tree and another. With `same_ids` every node must have the
    /// same number. Otherwise numbers may differ, but both sides must have the same hard links.
    pub fn differs(&self, other: &Tree, same_ids: bool, times: Times) -> Option<String> {
        let (a, b) = (self.paths(), other.paths());
        if let Some(path) = a.keys().find(|p| !b.contains_key(*p)) {
            return Some(format!("{} is missing", show(path)));
        }
        if let Some(path) = b.keys().find(|p| !a.contains_key(*p)) {
            return Some(format!("{} should not be there", show(path)));
        }
        let (mut there, mut back) = (BTreeMap::new(), BTreeMap::new());
        for (path, x) in &a {
            let y = &b[path];
            if same_ids && x != y {
                return Some(format!("{}: number {y} instead of {x}", show(path)));
            }
            if *there.entry(*x).or_insert(*y) != *y || *back.entry(*y).or_insert(*x) != *x {
                let group = |paths: &BTreeMap<Bytes, Id>, id: Id| {
                    paths
                        .iter()
                        .filter(|p| *p.1 == id)
                        .map(|p| show(p.0))
                        .collect::<Vec<_>>()
                        .join(" ")
                };
                let (a, b) = (group(&a, *x), group(&b, *y));
                return Some(format!("{}: names of one file are {b} instead of {a}", show(path)));
            }
            if let Some(how) = node_differs(self.node(*x), other.node(*y), times) {
                return Some(format!("{} ({x}): {how}", show(path)));
            }
        }
        None
    }
}

fn node_differs(a: &Node, b: &Node, times: Times) -> Option<String> {
    if a.mode != b.mode {
        return Some(format!("mode {:o} instead of {:o}", b.mode, a.mode));
    }
    if (a.uid, a.gid) != (b.uid, b.gid) {
        return Some(format!("owner {}:{} instead of {}:{}", b.uid, b.gid, a.uid, a.gid));
    }
    if a.mtime != b.mtime {
        return Some(format!("mtime {:?} instead of {:?}", b.mtime, a.mtime));
    }
    if times == Times::All && a.bytes().is_some() && a.atime != b.atime {
        return Some(format!("atime {:?} instead of {:?}", b.atime, a.atime));
    }
    if times == Times::All && a.ctime != b.ctime {
        return Some(format!("ctime {:?} instead of {:?}", b.ctime, a.ctime));
    }
    if a.xattrs != b.xattrs {
        return Some(format!("xattrs {:?} instead of {:?}", b.xattrs, a.xattrs));
    }
    match (&a.body, &b.body) {
        (Body::File(x), Body::File(y)) => bytes_differ(x, y),
        (Body::Link(x), Body::Link(y)) if x != y => {
            Some(format!("leads to {} instead of {}", show(y), show(x)))
        }
        _ => None,
    }
}

pub fn bytes_differ(wanted: &[u8], got: &[u8]) -> Option<String> {
    if wanted == got {
        return None;
    }
    if wanted.len() != got.len() {
        return Some(format!("{} bytes instead of {}", got.len(), wanted.len()));
    }
    let wrong: Vec<usize> = (0..wanted.len()).filter(|i| wanted[*i] != got[*i]).collect();
    let (first, last) = (wrong[0], wrong[wrong.len() - 1]);
    Some(format!(
        "{} wrong bytes in {first}..={last}; the first is {} instead of {}",
        wrong.len(),
        got[first],
        wanted[first]
    ))
}

pub fn join(path: &[u8], name: &[u8]) -> Bytes {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}

/// A path for people.
pub fn show(bytes: &[u8]) -> String {
    let text = bytes.escape_ascii().to_string();
    if text.len() > 60 { format!("{}..{}", &text[..20], text.len()) } else { format!("'{text}'") }
}

/// The nodes at and below a path.
pub fn below<'t>(
    paths: &'t BTreeMap<Bytes, Id>,
    top: &'t [u8],
) -> impl Iterator<Item = (&'t Bytes, Id)> {
    paths.iter().filter(move |(p, _)| is_below(p, top)).map(|(p, id)| (p, *id))
}

pub fn is_below(path: &[u8], top: &[u8]) -> bool {
    top.is_empty()
        || path == top
        || path.strip_prefix(top).is_some_and(|rest| rest.starts_with(b"/"))
}

pub fn parent(path: &[u8]) -> Option<&[u8]> {
    if path.is_empty() {
        return None;
    }
    Some(path.iter().rposition(|b| *b == b'/').map_or(&b""[..], |at| &path[..at]))
}
