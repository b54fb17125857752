//! A tree in memory for the tests. A removed node keeps its parent, as a dentry of the kernel does,
//! but [`Walk::parent`] returns `None` for it.

use std::collections::BTreeMap;

use super::{FsResult, Name, NameTarget, Walk};

#[derive(Clone, Debug)]
pub enum Kind {
    Dir(BTreeMap<Vec<u8>, usize>),
    Link(Vec<u8>),
    File,
}

#[derive(Clone, Debug)]
pub struct Node {
    pub kind: Kind,
    pub parent: usize,
    pub gone: bool,
}

#[derive(Clone, Debug)]
pub struct MemoryTree {
    pub nodes: Vec<Node>,
}

pub const ROOT: usize = 0;

impl MemoryTree {
    pub fn new() -> MemoryTree {
        MemoryTree {
            nodes: vec![Node { kind: Kind::Dir(BTreeMap::new()), parent: ROOT, gone: false }],
        }
    }

    /// Parses `dir/;file;link>text`, separated by `;`. Parent directories are created.
    pub fn parse(spec: &[u8]) -> MemoryTree {
        let mut tree = MemoryTree::new();
        for entry in
            spec.split(|&b| b == b';').map(<[u8]>::trim_ascii).filter(|entry| !entry.is_empty())
        {
            let (path, kind) = match entry.iter().position(|&b| b == b'>') {
                Some(at) => (&entry[..at], Kind::Link(entry[at + 1..].to_vec())),
                None if entry.ends_with(b"/") => (entry, Kind::Dir(BTreeMap::new())),
                None => (entry, Kind::File),
            };
            let mut parts: Vec<&[u8]> =
                path.split(|&b| b == b'/').filter(|part| !part.is_empty()).collect();
            let last = parts.pop().unwrap();
            let mut dir = ROOT;
            for part in parts {
                dir = tree
                    .child(dir, part)
                    .unwrap_or_else(|| tree.add(dir, part, Kind::Dir(BTreeMap::new())));
            }
            tree.add(dir, last, kind);
        }
        tree
    }

    pub fn child(&self, dir: usize, name: &[u8]) -> Option<usize> {
        match &self.nodes[dir].kind {
            Kind::Dir(names) => names.get(name).copied(),
            _ => None,
        }
    }

    pub fn is_dir(&self, node: usize) -> bool {
        matches!(self.nodes[node].kind, Kind::Dir(_))
    }

    /// Adds a node, and removes the one that had the name before.
    pub fn add(&mut self, dir: usize, name: &[u8], kind: Kind) -> usize {
        self.nodes.push(Node { kind, parent: dir, gone: false });
        let node = self.nodes.len() - 1;
        self.put(dir, name, node);
        node
    }

    /// Gives a node a name in `dir`, and removes the one that had the name before.
    pub fn put(&mut self, dir: usize, name: &[u8], node: usize) {
        self.nodes[node].parent = dir;
        self.nodes[node].gone = false;
        let Kind::Dir(names) = &mut self.nodes[dir].kind else { panic!("not a directory") };
        if let Some(old) = names.insert(name.to_vec(), node) {
            self.nodes[old].gone = true;
        }
    }

    /// Removes a node's name.
    pub fn take(&mut self, node: usize) {
        let parent = self.nodes[node].parent;
        if let Kind::Dir(names) = &mut self.nodes[parent].kind {
            names.retain(|_, child| *child != node);
        }
        self.nodes[node].gone = true;
    }

    /// The directory at a path of names.
    pub fn dir(&self, path: &[u8]) -> usize {
        path.split(|&b| b == b'/')
            .filter(|part| !part.is_empty())
            .fold(ROOT, |dir, part| self.child(dir, part).unwrap())
    }

    pub fn depth(&self, mut node: usize) -> usize {
        let mut depth = 0;
        while node != ROOT {
            node = self.nodes[node].parent;
            depth += 1;
        }
        depth
    }

    pub fn is_within(&self, mut node: usize, top: usize) -> bool {
        while node != top {
            if node == ROOT {
                return false;
            }
            node = self.nodes[node].parent;
        }
        true
    }
}

impl Walk for MemoryTree {
    type Dir = usize;

    fn root(&self) -> usize {
        ROOT
    }

    fn parent(&self, dir: usize) -> Option<usize> {
        (dir != ROOT && !self.nodes[dir].gone).then_some(self.nodes[dir].parent)
    }

    fn lookup(&self, dir: usize, name: &Name) -> FsResult<Option<NameTarget<usize>>> {
        Ok(self.child(dir, name.as_bytes()).map(|child| match &self.nodes[child].kind {
            Kind::Dir(_) => NameTarget::Dir(child),
            Kind::Link(text) => NameTarget::Symlink(text.clone()),
            Kind::File => NameTarget::Other,
        }))
    }
}
