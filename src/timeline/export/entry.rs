//! Writes one node as an entry.

use std::collections::HashMap;
use std::io::Write;

use nix::sys::stat::{major, minor};

use super::content::{self, Layout};
use super::{ExportOutcome, WHITEOUT};
use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::{Found, State};
use crate::tar::{Entry, Kind as TarKind, Writer};
use crate::tree::{Body, Node};
use crate::types::{FileKind, Ino, Name, Timestamp, TreePath};

/// How many skipped paths are named.
const MOST_NAMED: usize = 20;

/// Writes the nodes of a state.
pub(super) struct Entries<'a, W: Write> {
    pub(super) state: &'a State,
    tar: Writer<W>,
    go: &'a dyn Fn() -> bool,
    /// Files with further hard links: the first path, and how many names are still to come.
    links: HashMap<Ino, (TreePath, u32)>,
    refuses_whiteouts: bool,
    outcome: ExportOutcome,
}

impl<'a, W: Write> Entries<'a, W> {
    pub(super) fn new(state: &'a State, to: W, go: &'a dyn Fn() -> bool) -> Entries<'a, W> {
        Entries {
            state,
            tar: Writer::new(to),
            go,
            links: HashMap::new(),
            refuses_whiteouts: false,
            outcome: ExportOutcome::default(),
        }
    }

    /// Whether a name that means a whiteout is an error.
    pub(super) fn refuse_whiteouts(&mut self, refused: bool) {
        self.refuses_whiteouts = refused;
    }

    pub(super) fn finish(self) -> Result<ExportOutcome> {
        self.tar.finish().attempt(|| "write the archive")?;
        Ok(self.outcome)
    }

    /// Writes a whiteout for a name in a directory.
    pub(super) fn whiteout(&mut self, path: &TreePath) -> Result<()> {
        let Some((dir, name)) = path.split() else { return Ok(()) };
        self.check(path, &name)?;
        let name = [WHITEOUT, name.as_bytes()].concat();
        let dir = dir.as_bytes();
        let path = if dir.is_empty() { name } else { [dir, b"/", &name].concat() };
        let kind = TarKind::File { size: 0, data: None };
        let mtime = Timestamp::default();
        let entry =
            Entry { path, kind, mode: 0, uid: 0, gid: 0, mtime, xattrs: Default::default() };
        self.begin(&entry)
    }

    /// Writes a node. Returns whether the archive has it now.
    pub(super) fn node(&mut self, path: &TreePath, found: &Found) -> Result<bool> {
        let attempt = || format!("export '{path}'");
        if !(self.go)() {
            return Err(Error::new(Kind::Failed, attempt(), "the sandbox is being closed"));
        }
        if let Some((_, name)) = path.split() {
            self.check(path, &name)?;
        }
        let node = self.state.node(found).attempt(attempt)?;
        if node.kind() == FileKind::Socket {
            self.outcome.skipped_count += 1;
            if self.outcome.skipped.len() < MOST_NAMED {
                self.outcome.skipped.push(path.clone());
            }
            return Ok(false);
        }
        if let Some(entry) = self.further_link(path, found, &node) {
            self.begin(&entry)?;
            return Ok(true);
        }
        let (mut entry, size) = (entry_of(path, &node), node.size());
        if let Body::File { .. } = node.body {
            let layout = Layout::of(self.state, found, size).attempt(attempt)?;
            entry.kind = TarKind::File { size, data: layout.holes() };
            self.begin(&entry)?;
            self.outcome.bytes += entry.stored();
            content::copy(self.state, found, layout, self.go, |bytes| self.tar.data(bytes))
                .map_err(|error| error.during(attempt()))?;
        } else {
            self.begin(&entry)?;
        }
        Ok(true)
    }

    /// The entry of a further hard link to a file that the archive has.
    fn further_link(&mut self, path: &TreePath, found: &Found, node: &Node) -> Option<Entry> {
        let (ino, nlink) = (found.ino()?, node.meta.nlink);
        if node.kind() == FileKind::Dir || nlink < 2 {
            return None;
        }
        let Some((first, left)) = self.links.get_mut(&ino) else {
            self.links.insert(ino, (path.clone(), nlink - 1));
            return None;
        };
        *left = left.saturating_sub(1);
        let (target, is_last) = (first.as_bytes().to_vec(), *left == 0);
        if is_last {
            self.links.remove(&ino);
        }
        Some(Entry { kind: TarKind::Link { target }, ..entry_of(path, node).without_xattrs() })
    }

    fn check(&self, path: &TreePath, name: &Name) -> Result<()> {
        if !self.refuses_whiteouts || !name.as_bytes().starts_with(WHITEOUT) {
            return Ok(());
        }
        let why = "in a layer, a name that begins with '.wh.' would remove another file";
        Err(Error::new(Kind::Failed, format!("export '{path}'"), why)
            .hint("rename it, or export the whole state with --tar"))
    }

    fn begin(&mut self, entry: &Entry) -> Result<()> {
        self.outcome.entries += 1;
        self.tar.entry(entry).attempt(|| "write the archive")
    }

    /// The names of the files that were written and have further names, in the tree.
    pub(super) fn unfinished(&self) -> FsResult<Vec<(TreePath, Ino)>> {
        let mut names = Vec::new();
        for (ino, (first, _)) in &self.links {
            for (dir, name) in self.state.tree.links(*ino) {
                let path = self.state.tree.path_in(dir, name);
                names.extend(path.filter(|path| path != first).map(|path| (path, *ino)));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Whether the archive has a file, and further names of it are to come.
    pub(super) fn has_begun(&self, ino: Ino) -> bool {
        self.links.contains_key(&ino)
    }
}

impl Entry {
    fn without_xattrs(mut self) -> Entry {
        self.xattrs.clear();
        self
    }
}

/// The entry of a node; a file is still without content.
fn entry_of(path: &TreePath, node: &Node) -> Entry {
    let mut name = match path.is_root() {
        true => b".".to_vec(),
        false => path.as_bytes().to_vec(),
    };
    let (major, minor) = (number(major(node.meta.rdev)), number(minor(node.meta.rdev)));
    let kind = match node.kind() {
        FileKind::File | FileKind::Socket => TarKind::File { size: 0, data: None },
        FileKind::Dir => {
            name.push(b'/');
            TarKind::Dir
        }
        FileKind::Symlink => match &node.body {
            Body::Symlink { target } => TarKind::Symlink { target: target.clone() },
            Body::File { .. } | Body::Dir { .. } | Body::Special => TarKind::Fifo,
        },
        FileKind::Fifo => TarKind::Fifo,
        FileKind::Char => TarKind::Char { major, minor },
        FileKind::Block => TarKind::Block { major, minor },
    };
    let xattrs = node.xattrs.as_ref().map(|xattrs| (**xattrs).clone()).unwrap_or_default();
    let meta = &node.meta;
    Entry {
        path: name,
        kind,
        mode: meta.mode & crate::types::PERM_BITS,
        uid: meta.uid,
        gid: meta.gid,
        mtime: meta.mtime,
        xattrs,
    }
}

/// The kernel has numbers of 12 and 20 bits.
fn number(part: u64) -> u32 {
    u32::try_from(part).unwrap_or(u32::MAX)
}
