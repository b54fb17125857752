//! The component of [`crate::fs::Core`] that keeps symlinks inside the mount after their text was
//! served.
//!
//! READLINK names a node, not the directory in which the kernel found it, and the kernel walks the
//! text after the reply. So three things are followed for as long as the kernel holds a link:
//!
//! * the directories through which the link was advertised. Its text is served only if it stays
//!   inside from each of them;
//! * the walks that may be under way ([`ClimbGuard`]). No directory of such a walk may move nearer
//!   to the root than the text climbs;
//! * the renames in flight. Until the kernel has the reply, it sees the moved directory where it
//!   was. Only one rename of a directory into another one is in flight at a time, because the
//!   kernel holds `s_vfs_rename_mutex`.
//!
//! Refused links are counted, and the last distinct refusals are kept for `status`.

use std::collections::{BTreeSet, HashMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::error::{FsError, FsResult};
use crate::fs::kernel::nodes::{Held, NodeTable};
use crate::fs::merged::answers;
use crate::jail::{ClimbGuard, Jail};
use crate::types::{Name, NodeId, TreePath};

/// The number of refusals that are kept for `status`.
const MAX_REFUSALS: usize = 100;

/// The reply to READLINK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkReply {
    /// The text of the link.
    Text(Vec<u8>),
    /// The reply depends on a rename that the kernel has not completed: wait for it and ask again.
    Wait(Move),
}

/// The move of a directory into another one. The kernel may still see it at its old place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The new parent. The kernel holds its lock until the rename is complete.
    pub into: NodeId,
    /// The new name.
    pub name: Name,
    dir: NodeId,
    /// The number of levels below the root at the old place.
    depth: usize,
    number: u64,
}

impl Move {
    /// The directory that moves, by the id for which the move was checked.
    pub(super) fn dir(&self) -> NodeId {
        self.dir
    }
}

/// An operation that the jail refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The link, or the directory that was not moved.
    pub path: TreePath,
    /// The operation.
    pub what: Refused,
    /// The thread that asked; 0 if it is not visible.
    pub pid: u32,
    /// The name of its program (`comm`); empty if it is not visible.
    pub process: Vec<u8>,
}

/// The kind of operation that the jail refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refused {
    /// To follow or read a link with this text.
    Link(Vec<u8>),
    /// To move a directory to this path, from where links below it would lead out.
    Rename(TreePath),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Refusal { path, what, pid, process } = self;
        match what {
            Refused::Link(text) => {
                write!(f, "refused the link '{path}', which leads to '{}'", text.escape_ascii())?
            }
            Refused::Rename(to) => {
                write!(f, "refused to move '{path}' to '{to}', from where its links lead out")?
            }
        }
        write!(f, ", for process {pid} ({})", process.escape_ascii())
    }
}

/// Whether a text stays inside from a directory in which the kernel may have found its link.
enum Verdict {
    Inside,
    /// It does after this rename.
    InsideAfter(Move),
    /// It leads out, or the directory is an orphan, where no process can find the link.
    Outside,
}

/// The links that the kernel holds: where each was advertised, the renames that a path walk may
/// still meet, and the refusals.
#[derive(Default)]
pub(super) struct Links {
    /// The directories through which each held link was advertised.
    advertised_in: HashMap<NodeId, BTreeSet<NodeId>>,
    climb_guard: ClimbGuard<NodeId, NodeId>,
    /// Whether a move was checked and is not committed yet. The check counts only while no text
    /// that climbs is served.
    is_moving: bool,
    /// The moves of the last rename; an exchange moves two directories.
    moves_in_flight: Vec<Move>,
    move_count: u64,
    refusals: VecDeque<Refusal>,
    refusal_count: u64,
}

impl Links {
    /// The kernel no longer holds a node.
    pub(super) fn forget(&mut self, id: NodeId) {
        self.advertised_in.remove(&id);
        self.climb_guard.forget_link(id);
        self.climb_guard.forget_dir(id);
    }

    /// A held link was advertised through a directory.
    pub(super) fn note_advertised(&mut self, link: NodeId, dir: NodeId) {
        self.advertised_in.entry(link).or_default().insert(dir);
    }

    /// Serves a text that climbs, if it stays inside from every directory in which the kernel may
    /// have found the link.
    ///
    /// # Errors
    /// ESTALE if it does not. The next lookup of the link returns another id, so the kernel walks
    /// its path again, and finds no link where it has none any more. [`FsError::MustWait`] while a
    /// move is under way.
    pub(super) fn serve(
        &mut self,
        nodes: &mut NodeTable,
        link: NodeId,
        text: Vec<u8>,
    ) -> FsResult<LinkReply> {
        if self.is_moving {
            return Err(answers::must_wait());
        }
        let up = Jail::climb(&text);
        let mut dirs = self.advertised_in.get(&link).cloned().unwrap_or_default();
        dirs.retain(|dir| nodes.get(*dir).is_some());
        for dir in &dirs {
            match self.judge(nodes, *dir, up) {
                Verdict::Inside => {}
                Verdict::InsideAfter(rename) => return Ok(LinkReply::Wait(rename)),
                Verdict::Outside => {
                    nodes.retire(link);
                    self.advertised_in.remove(&link);
                    return Err(FsError::Stale);
                }
            }
        }
        for dir in &dirs {
            self.climb_guard.serve(link, *dir, up);
        }
        self.advertised_in.insert(link, dirs);
        Ok(LinkReply::Text(text))
    }

    /// Judges a text that climbs `up` levels from a directory.
    fn judge(&self, nodes: &NodeTable, dir: NodeId, up: usize) -> Verdict {
        if !nodes.get(dir).is_some_and(Held::is_live) {
            return Verdict::Outside;
        }
        let Some(depth) = nodes.depth(dir) else { return Verdict::Outside };
        if up > depth {
            return Verdict::Outside;
        }
        // From the old place the walk would lead out, or reach a directory that is not marked while
        // it has more than one step to go.
        let matters = |rename: &&Move| {
            let levels = nodes.levels_below(dir, rename.dir);
            levels.is_some_and(|levels| up > rename.depth + levels || up > levels + 2)
        };
        self.moves_in_flight
            .iter()
            .find(matters)
            .map_or(Verdict::Inside, |rename| Verdict::InsideAfter(rename.clone()))
    }

    /// A directory is about to leave `from`. Returns its move.
    ///
    /// # Errors
    /// [`FsError::LeavesJail`] if a walk that may be under way would lead out from the new place.
    pub(super) fn begin_move(
        &mut self,
        nodes: &NodeTable,
        (dir, from): (NodeId, NodeId),
        (into, name): (NodeId, &Name),
    ) -> FsResult<Move> {
        // Without a depth the kernel sent FORGET for a directory above one that it still names.
        // That should not happen, and must not open a way out.
        let [before, after] = [from, into].map(|above| nodes.depth(above).map(|depth| depth + 1));
        let rises = before.is_none() || after < before;
        let below = |marked| nodes.levels_below(marked, dir);
        if rises && !self.climb_guard.may_stand_at(after.unwrap_or(0), below) {
            return Err(FsError::LeavesJail);
        }
        self.climb_guard.leave(from, below);
        self.move_count += 1;
        let (name, depth) = (name.clone(), before.unwrap_or(0));
        Ok(Move { into, name, dir, depth, number: self.move_count })
    }

    /// Notes that a move was checked and is not committed yet, or that it has ended.
    pub(super) fn set_moving(&mut self, is_moving: bool) {
        self.is_moving = is_moving;
    }

    /// The moves of a rename were committed.
    pub(super) fn add_moves(&mut self, moves: impl IntoIterator<Item = Move>) {
        self.moves_in_flight.extend(moves);
    }

    /// Another rename between directories began, so the kernel has completed the one before.
    pub(super) fn finish_moves(&mut self) {
        self.moves_in_flight.clear();
    }

    /// The kernel has completed a rename.
    pub(super) fn finish_move(&mut self, rename: &Move) {
        self.moves_in_flight.retain(|other| other.number != rename.number);
    }

    /// A held directory was removed from `parent`.
    pub(super) fn dir_removed(&mut self, dir: NodeId, parent: NodeId) {
        self.climb_guard.remove(dir, parent);
    }

    /// Directories become orphans in a switch. A walk that may be under way in one of them is
    /// marked at the directory above instead.
    pub(super) fn cut_off(&mut self, nodes: &NodeTable, cut: &BTreeSet<NodeId>) {
        let mut marked: Vec<NodeId> =
            self.climb_guard.dirs().filter(|dir| cut.contains(dir)).collect();
        // The directory above gets the marks, and may be cut off as well. Everything below a
        // directory that is cut off is cut off.
        while let Some(dir) = marked.pop() {
            let Some(above) = nodes.get(dir).and_then(|held| held.within) else { continue };
            self.climb_guard.remove(dir, above);
            if cut.contains(&above) {
                marked.push(above);
            }
        }
    }

    /// Counts a refusal and keeps it. Returns whether it differs from all that are kept.
    pub(super) fn add_refusal(&mut self, refusal: Refusal) -> bool {
        self.refusal_count += 1;
        let same = self.refusals.iter().position(|old| {
            (&old.path, &old.what, &old.process) == (&refusal.path, &refusal.what, &refusal.process)
        });
        if let Some(at) = same {
            self.refusals.remove(at);
        }
        if self.refusals.len() >= MAX_REFUSALS {
            self.refusals.pop_front();
        }
        self.refusals.push_back(refusal);
        same.is_none()
    }

    /// The last distinct refusals, and how many there were in all.
    pub(super) fn refusals(&self) -> (Vec<Refusal>, u64) {
        (self.refusals.iter().cloned().collect(), self.refusal_count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Ino;

    const LINK: NodeId = NodeId(99);

    fn name() -> Name {
        Name::new(b"x").unwrap()
    }

    /// A table with the directories a, a/b, c and c/d, with the ids 10 to 13.
    fn dirs() -> (NodeTable, [NodeId; 4]) {
        let mut nodes = NodeTable::new();
        let [a, b, c, d] = [10, 11, 12, 13].map(|ino| nodes.hold(Ino(ino), None));
        for (dir, above) in [(a, NodeId::ROOT), (b, a), (c, NodeId::ROOT), (d, c)] {
            nodes.set_within(dir, above);
        }
        nodes.hold(Ino(LINK.0), None);
        (nodes, [a, b, c, d])
    }

    fn serve(links: &mut Links, nodes: &mut NodeTable, text: &[u8]) -> FsResult<LinkReply> {
        links.serve(nodes, LINK, text.to_vec())
    }

    #[test]
    fn a_text_is_stale_if_it_leads_out_from_one_directory_of_its_link() {
        let (mut nodes, [a, b, ..]) = dirs();
        let mut links = Links::default();
        links.note_advertised(LINK, b);
        let text = LinkReply::Text(b"../../f".to_vec());
        assert_eq!(serve(&mut links, &mut nodes, b"../../f"), Ok(text));
        links.note_advertised(LINK, a);
        assert_eq!(serve(&mut links, &mut nodes, b"../../f"), Err(FsError::Stale));
        assert_eq!(nodes.id_of(Ino(LINK.0)), None, "the next lookup returns another id");
    }

    #[test]
    fn a_directory_does_not_rise_above_a_text_that_was_served_in_it() {
        let (mut nodes, [a, b, c, _]) = dirs();
        let mut links = Links::default();
        links.note_advertised(LINK, b);
        serve(&mut links, &mut nodes, b"../../f").unwrap();
        let up = links.begin_move(&nodes, (b, a), (NodeId::ROOT, &name()));
        assert_eq!(up, Err(FsError::LeavesJail));
        assert!(links.begin_move(&nodes, (b, a), (c, &name())).is_ok(), "at the same depth");
        links.forget(LINK);
        assert!(links.begin_move(&nodes, (b, a), (NodeId::ROOT, &name())).is_ok());
    }

    #[test]
    fn a_text_waits_for_the_rename_on_which_it_depends() {
        let (mut nodes, [a, b, _, d]) = dirs();
        let mut links = Links::default();
        links.note_advertised(LINK, b);
        let rename = links.begin_move(&nodes, (b, a), (d, &name())).unwrap();
        links.add_moves([rename.clone()]);
        nodes.set_within(b, d);
        let near = LinkReply::Text(b"../f".to_vec());
        assert_eq!(serve(&mut links, &mut nodes, b"../f"), Ok(near), "inside from both places");
        let wait = LinkReply::Wait(rename.clone());
        assert_eq!(serve(&mut links, &mut nodes, b"../../../f"), Ok(wait));
        links.finish_move(&rename);
        let far = LinkReply::Text(b"../../../f".to_vec());
        assert_eq!(serve(&mut links, &mut nodes, b"../../../f"), Ok(far));
    }

    #[test]
    fn a_repeated_refusal_is_counted_and_kept_once() {
        let mut links = Links::default();
        let refusal = |text: &[u8], pid| Refusal {
            path: TreePath::root(),
            what: Refused::Link(text.to_vec()),
            pid,
            process: b"cat".to_vec(),
        };
        assert!(links.add_refusal(refusal(b"../out", 1)));
        assert!(!links.add_refusal(refusal(b"../out", 2)));
        assert!(links.add_refusal(refusal(b"../other", 2)));
        let (kept, count) = links.refusals();
        assert_eq!((kept.len(), count), (2, 3));
    }
}
