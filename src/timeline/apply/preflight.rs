//! Checks, before an apply writes, what would stop it half way.
//!
//! * It only reads, and an apply that it refuses has written nothing.
//! * It refuses nothing that the host would allow, but for room: that is counted with a margin.
//! * What passes can still fail, because the base changes meanwhile. Then the apply is rolled back.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::{Base, Obstacle};
use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::timeline::apply::Plan;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Node};
use crate::types::{FileKind, Ino, TreePath};

/// Paths that one error names.
const NAMED: usize = 10;
/// Of the bytes that are written, what part is added for what the filesystem needs beside them.
const MARGIN_PART: u64 = 64;
/// Blocks that are added whatever is written.
const MARGIN_BLOCKS: u64 = 16;

/// Checks that the host would allow each change of a plan, and that there is room for all of them.
///
/// # Errors
/// What is in the way, with the paths; those of looking at the base.
pub(in crate::timeline) fn check(base: &Base, plan: &Plan) -> Result<()> {
    let attempt = || "apply: look at the base";
    let refused = |why: String, errno: Option<i32>| {
        Err(Error {
            errno,
            ..Error::new(Kind::Failed, "apply", format!("{why}; nothing is written"))
        })
    };
    if let Some(obstacle) = base.obstacle().attempt(attempt)? {
        let path = String::from_utf8_lossy(base.path()).into_owned();
        return refused(format!("{obstacle}: '{path}'"), Some(libc::EROFS));
    }
    let obstacles = obstacles(base, plan).attempt(attempt)?;
    if !obstacles.is_empty() {
        return refused(told(&obstacles), None);
    }
    match Quota::of(base).attempt(attempt)? {
        Some(room) => room
            .check(plan)
            .attempt(attempt)?
            .map_or(Ok(()), |why| refused(why, Some(libc::ENOSPC))),
        None => Ok(()),
    }
}

fn told(obstacles: &BTreeMap<TreePath, String>) -> String {
    let named = obstacles
        .iter()
        .take(NAMED)
        .map(|(path, why)| format!("'{path}' cannot be written: {why}"));
    let named: Vec<String> = named.collect();
    match obstacles.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// What is in the way, by path: of a directory that its names cannot be changed, and of what is in
/// it.
fn obstacles(base: &Base, plan: &Plan) -> FsResult<BTreeMap<TreePath, String>> {
    let (mut found, mut dirs) = (BTreeMap::new(), BTreeSet::new());
    let goes = plan.changes.iter().filter(|c| matches!(c.what, What::Deleted | What::Type));
    let goes: BTreeSet<&TreePath> = goes.map(|change| &change.path).collect();
    for change in &plan.changes {
        let path = &change.path;
        let names_change = !matches!(change.what, What::Attributes | What::DirTimes);
        if let (true, Some((dir, _))) = (names_change, path.split())
            && dirs.insert(dir.clone())
        {
            let mut obstacle = base.obstacle_in(&dir).or_else(none_there)?;
            // The times of one that stays are set as well, which only its owner may do.
            if obstacle.is_none() && !goes.contains(&dir) {
                obstacle = base.obstacle_to_set(&dir).or_else(none_there)?;
            }
            found.extend(obstacle.map(|why| (dir, why.to_string())));
        }
        if let Found::Base(..) = change.old {
            let obstacle = if names_change {
                base.obstacle_to_remove(path)?
            } else {
                base.obstacle_to_set(path)?
            };
            found.extend(obstacle.map(|why| (path.clone(), why.to_string())));
        }
        found.extend(obstacle_to_make(&plan.to, change).map(|why| (path.clone(), why)));
    }
    Ok(found)
}

/// A directory that the plan makes is not there yet.
fn none_there(error: crate::error::FsError) -> FsResult<Option<Obstacle>> {
    use crate::error::FsError::{NotADirectory, NotFound};
    if matches!(error, NotFound | NotADirectory) { Ok(None) } else { Err(error) }
}

/// What only root can make.
fn obstacle_to_make(to: &State, change: &PathChange) -> Option<String> {
    let me = nix::unistd::geteuid();
    let attr = to.attr(&change.new).filter(|_| !me.is_root())?;
    if attr.meta.uid != me.as_raw() {
        return Some(format!("only root can give it to user {}", attr.meta.uid));
    }
    let is_device = matches!(attr.kind, FileKind::Char | FileKind::Block);
    (is_device && change.what != What::Attributes).then(|| "only root can make a device".to_owned())
}

/// The room of the filesystem of the base.
struct Quota {
    block: u64,
    /// Bytes that we may still write.
    bytes: u64,
    /// Nodes that we may still make; none where the filesystem has no such limit.
    nodes: Option<u64>,
    /// Whether what is removed makes room for the next.
    frees_at_once: bool,
}

/// What an apply takes at a moment, and took at most.
#[derive(Default)]
struct Taken {
    now: i64,
    most: i64,
}

impl Taken {
    fn take(&mut self, amount: u64) {
        self.now = self.now.saturating_add_unsigned(amount);
        self.most = self.most.max(self.now);
    }

    fn free(&mut self, amount: u64) {
        self.now = self.now.saturating_sub_unsigned(amount);
    }

    fn most(&self) -> u64 {
        self.most.unsigned_abs()
    }
}

impl Quota {
    /// None where the filesystem does not say.
    fn of(base: &Base) -> FsResult<Option<Quota>> {
        let fs = base.statvfs()?;
        let frees_at_once = base.frees_at_once();
        // What is reserved for root; but of btrfs also what no file can have.
        let has_all = nix::unistd::geteuid().is_root() && frees_at_once;
        let blocks = if has_all { fs.blocks_free() } else { fs.blocks_available() };
        let nodes = if has_all { fs.files_free() } else { fs.files_available() };
        let block = fs.fragment_size().max(1);
        let room = Quota {
            block,
            bytes: blocks.saturating_mul(block),
            nodes: (fs.files() > 0).then_some(nodes),
            frees_at_once,
        };
        Ok((fs.blocks() > 0).then_some(room))
    }

    /// Why there is too little; none if there is enough.
    fn check(&self, plan: &Plan) -> FsResult<Option<String>> {
        let (bytes, nodes) = self.needs(plan)?;
        if bytes == 0 && nodes == 0 {
            return Ok(None);
        }
        let margin = bytes / MARGIN_PART + MARGIN_BLOCKS * self.block;
        let needed = bytes.saturating_add(margin);
        if needed > self.bytes {
            let room = self.bytes;
            return Ok(Some(format!(
                "the filesystem of the base has room for {room} bytes, and {needed} are needed"
            )));
        }
        Ok(match self.nodes {
            Some(room) if nodes > room => Some(format!(
                "the filesystem of the base has room for {room} files, and {nodes} are needed"
            )),
            _ => None,
        })
    }

    /// The most bytes and nodes that are taken at once: first all that goes is removed, then each
    /// file is written next to the one whose place it takes.
    fn needs(&self, plan: &Plan) -> FsResult<(u64, u64)> {
        let (mut bytes, mut nodes) = (Taken::default(), Taken::default());
        let free = |bytes: &mut Taken, nodes: &mut Taken, old: &Found| {
            if let Found::Base(_, _, LowerNode::Base(stat)) = old
                && self.frees_at_once
                && (stat.nlink <= 1 || stat.kind == FileKind::Dir)
            {
                bytes.free(stat.blocks.saturating_mul(512));
                nodes.free(1);
            }
        };
        for change in plan.changes.iter().filter(|c| matches!(c.what, What::Deleted | What::Type)) {
            free(&mut bytes, &mut nodes, &change.old);
        }
        let mut made: BTreeSet<Ino> = BTreeSet::new();
        for change in &plan.changes {
            let is_made =
                matches!(change.what, What::Added | What::Type | What::Content | What::Links);
            if !is_made || !change.new.ino().is_some_and(|ino| made.insert(ino)) {
                continue;
            }
            let (node, extents) = plan.to.record(&change.new)?;
            bytes.take(self.size(&node, extents.iter().map(|(range, _)| range.len()).sum()));
            nodes.take(1);
            if matches!(change.what, What::Content | What::Links) {
                free(&mut bytes, &mut nodes, &change.old);
            }
        }
        Ok((bytes.most(), nodes.most()))
    }

    /// What a node takes on disk, about.
    fn size(&self, node: &Node, content: u64) -> u64 {
        match &node.body {
            Body::File { .. } => content.div_ceil(self.block).saturating_mul(self.block),
            Body::Dir { .. } | Body::Symlink { .. } => self.block,
            Body::Special => 0,
        }
    }
}
