//! Fuzz target: the texts that READLINK serves, in a tree of links that the data describes.
//!
//! * A relative text begins with at most as many `..` as its directory is deep, and has no other.
//! * An absolute text has no `..`, and leads to the mount point or to an allowed target.
//! * No text makes the resolver panic.

use jailfs::error::FsResult;
use jailfs::internals::jail::{Answer, Jail, NameTarget, Policy, Walk};
use jailfs::types::Name;

const MOUNT: &str = "/m/t";
const ALLOWED: &str = "/x";
/// The parts of a text; a byte of the data selects one.
const PARTS: [&str; 16] = [
    "a",
    "b",
    "c",
    "..",
    "..",
    "../..",
    ".",
    "",
    "/",
    "/m/t",
    "/b/s",
    "/x",
    "/m",
    "a/..",
    "gone",
    "/m/t/../t",
];

enum Node {
    Dir(Vec<(u8, usize)>),
    Link(Vec<u8>),
    File,
}

/// A tree whose root is node 0. Each node has its parent.
struct Tree(Vec<(usize, Node)>);

/// Builds a tree from `data`, and asks for the text of every link in it.
pub fn run(data: &[u8]) {
    let mut bytes = data.iter().copied();
    let policy = match bytes.next() {
        Some(byte) if byte % 3 == 0 => Policy::Rewrite,
        Some(byte) if byte % 3 == 1 => Policy::Show,
        _ => Policy::Deny,
    };
    let jail = Jail {
        policy,
        mount_point: MOUNT.into(),
        base_path: b"/b/s".to_vec(),
        allowed_targets: vec![ALLOWED.into()],
    };
    let tree = build(&mut bytes);
    for (parent, node) in &tree.0 {
        let Node::Link(text) = node else { continue };
        if let Ok(Answer::Text(served)) = jail.resolve(&tree, *parent, text) {
            check(&served, tree.depth(*parent));
        }
    }
}

fn build(bytes: &mut impl Iterator<Item = u8>) -> Tree {
    let mut tree = Tree(vec![(0, Node::Dir(Vec::new()))]);
    while let (Some(at), Some(what)) = (bytes.next(), bytes.next()) {
        if tree.0.len() == 48 {
            break;
        }
        let dir = usize::from(at) % tree.0.len();
        let name = what % 3;
        let node = match what / 3 % 4 {
            0 => Node::Dir(Vec::new()),
            1 => Node::File,
            _ => Node::Link(text(bytes)),
        };
        tree.add(dir, name, node);
    }
    tree
}

/// A text of up to eight parts; the first byte says how many.
fn text(bytes: &mut impl Iterator<Item = u8>) -> Vec<u8> {
    let parts = bytes.next().unwrap_or(0) % 8;
    let mut text = Vec::new();
    for byte in bytes.take(usize::from(parts)) {
        if !text.is_empty() {
            text.push(b'/');
        }
        text.extend_from_slice(PARTS[usize::from(byte) % PARTS.len()].as_bytes());
    }
    text
}

fn check(served: &[u8], depth: usize) {
    let parts: Vec<&[u8]> =
        served.split(|&b| b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    let up = parts.iter().take_while(|part| **part == b"..").count();
    let shown = || String::from_utf8_lossy(served).into_owned();
    assert!(!parts[up..].contains(&&b".."[..]), "'{}' has '..' after a name", shown());
    if served.starts_with(b"/") {
        assert_eq!(up, 0, "'{}' is absolute and goes up", shown());
        let leads_to = |prefix: &str| {
            served
                .strip_prefix(prefix.as_bytes())
                .is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
        };
        let normal = parts.join(&b'/');
        let is_below = |prefix: &str| {
            let prefix = &prefix.as_bytes()[1..];
            normal.strip_prefix(prefix).is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
        };
        let is_fine = [MOUNT, ALLOWED].iter().any(|p| leads_to(p) || is_below(p));
        assert!(is_fine, "'{}' leads out", shown());
    } else {
        assert!(up <= depth, "'{}' goes up {up} levels from a depth of {depth}", shown());
    }
}

impl Tree {
    fn add(&mut self, dir: usize, name: u8, node: Node) {
        let new = self.0.len();
        let Some((_, Node::Dir(names))) = self.0.get_mut(dir) else { return };
        if names.iter().all(|(taken, _)| *taken != name) {
            names.push((name, new));
            self.0.push((dir, node));
        }
    }

    fn depth(&self, mut dir: usize) -> usize {
        let mut depth = 0;
        while dir != 0 {
            dir = self.0[dir].0;
            depth += 1;
        }
        depth
    }
}

impl Walk for Tree {
    type Dir = usize;

    fn root(&self) -> usize {
        0
    }

    fn parent(&self, dir: usize) -> Option<usize> {
        (dir != 0).then(|| self.0[dir].0)
    }

    fn lookup(&self, dir: usize, name: &Name) -> FsResult<Option<NameTarget<usize>>> {
        let Node::Dir(names) = &self.0[dir].1 else { return Ok(None) };
        let wanted = match name.as_bytes() {
            b"a" => 0,
            b"b" => 1,
            b"c" => 2,
            _ => return Ok(None),
        };
        let Some((_, child)) = names.iter().find(|(name, _)| *name == wanted) else {
            return Ok(None);
        };
        Ok(Some(match &self.0[*child].1 {
            Node::Dir(_) => NameTarget::Dir(*child),
            Node::Link(text) => NameTarget::Symlink(text.clone()),
            Node::File => NameTarget::Other,
        }))
    }
}
