//! Checks, before an apply writes, whether the host allows all of it and has space for it.
//!
//! * The check only reads, so an apply that it refuses has written nothing.
//! * It refuses nothing that the host would allow. Only the free space is compared with a margin.
//! * An apply that passes can still fail, because the base can change meanwhile. Then it is rolled
//!   back.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::Base;
use crate::error::{Attempt, Error, FsResult, Kind, Result, if_exists};
use crate::fs::merged::lower::LowerNode;
use crate::fs::{Found, State};
use crate::timeline::apply::plan::Plan;
use crate::timeline::apply::pre_images::replaces_name;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Node};
use crate::types::{FileKind, Ino, TreePath};

/// The number of paths that one error names.
const NAMED_PATHS: usize = 10;
/// The filesystem needs space for its own metadata: one byte for so many bytes of content.
const MARGIN_DIVISOR: u64 = 64;
/// Blocks that are added to that.
const MARGIN_BLOCKS: u64 = 16;

/// Checks that the host allows each change of a plan, and that there is space for all of them.
///
/// # Errors
/// The obstacles, with their paths; ENOSPC if there is too little space; those of looking at the
/// base.
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
        return refused(describe(&obstacles), None);
    }
    let Some(space) = FreeSpace::of(base).attempt(attempt)? else { return Ok(()) };
    match space.shortage(plan).attempt(attempt)? {
        Some(why) => refused(why, Some(libc::ENOSPC)),
        None => Ok(()),
    }
}

fn describe(obstacles: &BTreeMap<TreePath, String>) -> String {
    let named: Vec<String> = obstacles
        .iter()
        .take(NAMED_PATHS)
        .map(|(path, why)| format!("'{path}' cannot be written: {why}"))
        .collect();
    match obstacles.len().saturating_sub(NAMED_PATHS) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// The obstacles, by path: directories in which names cannot be changed, and nodes that cannot be
/// removed, changed or made.
fn obstacles(base: &Base, plan: &Plan) -> FsResult<BTreeMap<TreePath, String>> {
    let (mut found, mut dirs) = (BTreeMap::new(), BTreeSet::new());
    let removed: BTreeSet<&TreePath> = removals(plan).map(|change| &change.path).collect();
    for change in &plan.changes {
        let path = &change.path;
        let is_new_name = replaces_name(change);
        if let (true, Some((dir, _))) = (is_new_name, path.split())
            && dirs.insert(dir.clone())
        {
            // A directory that the plan makes does not exist yet.
            let mut obstacle = if_exists(base.obstacle_in(&dir))?.flatten();
            // The times of a directory that stays are set as well, which only its owner may do.
            if obstacle.is_none() && !removed.contains(&dir) {
                obstacle = if_exists(base.obstacle_to_set(&dir))?.flatten();
            }
            found.extend(obstacle.map(|why| (dir, why.to_string())));
        }
        if let Found::Base(..) = change.old {
            let obstacle = if is_new_name {
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

/// The changes that remove a node.
fn removals(plan: &Plan) -> impl Iterator<Item = &PathChange> {
    plan.changes.iter().filter(|change| matches!(change.what, What::Deleted | What::Type))
}

/// Why we cannot make the node of a change: only root can make it.
fn obstacle_to_make(to: &State, change: &PathChange) -> Option<String> {
    let me = nix::unistd::geteuid();
    let attr = to.attr(&change.new).filter(|_| !me.is_root())?;
    if attr.meta.uid != me.as_raw() {
        return Some(format!("only root can give it to user {}", attr.meta.uid));
    }
    let is_device = matches!(attr.kind, FileKind::Char | FileKind::Block);
    (is_device && change.what != What::Attributes).then(|| "only root can make a device".to_owned())
}

/// The free space of the filesystem of the base.
struct FreeSpace {
    /// The size of a block in bytes.
    block: u64,
    /// Bytes that we can still write.
    bytes: u64,
    /// Inodes that we can still make; none if the filesystem has no such limit.
    inodes: Option<u64>,
    /// Whether removing a file frees its space before the next file is written.
    frees_at_once: bool,
}

/// How much of a resource an apply uses at one moment, and its highest use.
#[derive(Default)]
struct Usage {
    now: i64,
    peak: i64,
}

impl Usage {
    fn take(&mut self, amount: u64) {
        self.now = self.now.saturating_add_unsigned(amount);
        self.peak = self.peak.max(self.now);
    }

    fn free(&mut self, amount: u64) {
        self.now = self.now.saturating_sub_unsigned(amount);
    }

    fn peak(&self) -> u64 {
        self.peak.unsigned_abs()
    }
}

impl FreeSpace {
    /// The free space; none if the filesystem does not report it.
    fn of(base: &Base) -> FsResult<Option<FreeSpace>> {
        let fs = base.statvfs()?;
        let frees_at_once = base.frees_at_once();
        // Root can use the reserved blocks. On btrfs, `blocks_free` also counts blocks that no file
        // can use.
        let uses_reserve = nix::unistd::geteuid().is_root() && frees_at_once;
        let blocks = if uses_reserve { fs.blocks_free() } else { fs.blocks_available() };
        let inodes = if uses_reserve { fs.files_free() } else { fs.files_available() };
        let block = fs.fragment_size().max(1);
        let space = FreeSpace {
            block,
            bytes: blocks.saturating_mul(block),
            inodes: (fs.files() > 0).then_some(inodes),
            frees_at_once,
        };
        Ok((fs.blocks() > 0).then_some(space))
    }

    /// Why there is too little space for a plan; none if there is enough.
    fn shortage(&self, plan: &Plan) -> FsResult<Option<String>> {
        let (bytes, inodes) = self.peak_usage(plan)?;
        if bytes == 0 && inodes == 0 {
            return Ok(None);
        }
        let margin = bytes / MARGIN_DIVISOR + MARGIN_BLOCKS * self.block;
        let needed = bytes.saturating_add(margin);
        if needed > self.bytes {
            let room = self.bytes;
            return Ok(Some(format!(
                "the filesystem of the base has room for {room} bytes, and {needed} are needed"
            )));
        }
        Ok(match self.inodes {
            Some(room) if inodes > room => Some(format!(
                "the filesystem of the base has room for {room} files, and {inodes} are needed"
            )),
            _ => None,
        })
    }

    /// The bytes and inodes that a plan uses at its peak. First all removed nodes go, then each
    /// file is written next to the one that it replaces.
    fn peak_usage(&self, plan: &Plan) -> FsResult<(u64, u64)> {
        let (mut bytes, mut inodes) = (Usage::default(), Usage::default());
        let free = |bytes: &mut Usage, inodes: &mut Usage, old: &Found| {
            if let Found::Base(_, _, LowerNode::Base(stat)) = old
                && self.frees_at_once
                && (stat.nlink <= 1 || stat.kind == FileKind::Dir)
            {
                bytes.free(stat.blocks.saturating_mul(512));
                inodes.free(1);
            }
        };
        for change in removals(plan) {
            free(&mut bytes, &mut inodes, &change.old);
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
            inodes.take(1);
            if matches!(change.what, What::Content | What::Links) {
                free(&mut bytes, &mut inodes, &change.old);
            }
        }
        Ok((bytes.peak(), inodes.peak()))
    }

    /// The bytes that a node needs on disk, approximately.
    fn size(&self, node: &Node, content: u64) -> u64 {
        match &node.body {
            Body::File { .. } => content.div_ceil(self.block).saturating_mul(self.block),
            Body::Dir { .. } | Body::Symlink { .. } => self.block,
            Body::Special => 0,
        }
    }
}
