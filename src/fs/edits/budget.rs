//! Chooses which edits to drop when all histories together exceed the budget.
//!
//! The largest subtree gives first: from the root down, the directory or file with the highest
//! cost, and in that file the oldest edit. So a build that rewrites files below `target` loses its
//! edits before a source file beside it, however many files it writes, because directories are
//! compared. A large file loses its edits before the small files beside it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::EditHistory;
use super::by_path::ByPath;
use super::path_history::{Entry, PathHistory};
use crate::store::edits_log::EditsLogRecord;
use crate::types::{Name, TreePath};

/// A path, and the number and cost in bytes of each of its edits, oldest first.
pub(super) type Costs = (TreePath, VecDeque<(u32, u64)>);

/// A directory or a history in the tree of costs.
#[derive(Default)]
struct CostNode {
    parent: usize,
    /// The cost of all edits at and below it.
    total: u64,
    /// The total and index of each child, the largest last.
    children: BTreeSet<(u64, usize)>,
    /// For a leaf, the index of its path in the list of costs.
    path: Option<usize>,
}

/// Chooses edits with a cost of at least `bytes`. Returns by path the last number to drop.
pub(super) fn choose(mut costs: Vec<Costs>, bytes: u64) -> BTreeMap<TreePath, u32> {
    let mut nodes = build_tree(&costs);
    let mut chosen = BTreeMap::new();
    let mut gone = 0;
    while gone < bytes {
        let mut at = 0;
        while let Some((_, next)) = nodes.get(at).and_then(|node| node.children.last().copied()) {
            at = next;
        }
        let path = nodes.get(at).and_then(|node| node.path);
        let Some((path, history)) = path.and_then(|path| costs.get_mut(path)) else { break };
        let Some((number, cost)) = history.pop_front() else { break };
        chosen.insert(path.clone(), number);
        gone += cost;
        let is_empty = history.is_empty();
        subtract(&mut nodes, at, cost, is_empty);
    }
    chosen
}

/// Builds the tree of costs. The first node is the root.
fn build_tree(costs: &[Costs]) -> Vec<CostNode> {
    let mut nodes = vec![CostNode::default()];
    let mut histories: BTreeMap<(usize, Name), usize> = BTreeMap::new();
    for (number, (path, history)) in costs.iter().enumerate() {
        let mut at = 0;
        for name in path.names() {
            let next = nodes.len();
            at = *histories.entry((at, name)).or_insert_with(|| {
                nodes.push(CostNode { parent: at, ..CostNode::default() });
                next
            });
        }
        // A separate leaf, because the path may also be a directory with histories below it.
        nodes.push(CostNode { parent: at, path: Some(number), ..CostNode::default() });
        let total = history.iter().map(|(_, cost)| cost).sum::<u64>();
        let mut at = nodes.len() - 1;
        while let Some(node) = nodes.get_mut(at) {
            node.total += total;
            if at == 0 {
                break;
            }
            at = node.parent;
        }
    }
    for at in 1..nodes.len() {
        let Some((above, total)) = nodes.get(at).map(|node| (node.parent, node.total)) else {
            continue;
        };
        if let Some(above) = nodes.get_mut(above) {
            above.children.insert((total, at));
        }
    }
    nodes
}

/// Subtracts a cost from a leaf and all nodes above it. With `is_empty`, removes the leaf.
fn subtract(nodes: &mut [CostNode], leaf: usize, cost: u64, mut is_empty: bool) {
    let mut at = leaf;
    while at != 0 {
        let Some(node) = nodes.get_mut(at) else { return };
        let before = node.total;
        node.total = before.saturating_sub(cost);
        let (after, parent) = (node.total, node.parent);
        let Some(parent_node) = nodes.get_mut(parent) else { return };
        parent_node.children.remove(&(before, at));
        if !is_empty {
            parent_node.children.insert((after, at));
        }
        is_empty = is_empty && parent_node.children.is_empty();
        at = parent;
    }
}

/// The costs of all edits.
pub(super) fn costs(by_path: &ByPath) -> Vec<Costs> {
    let of =
        |list: &PathHistory| list.entries.iter().map(|entry| (entry.number, entry.cost)).collect();
    by_path.iter().map(|(path, list)| (path.clone(), of(list))).collect()
}

impl EditHistory {
    /// The cost to drop so that a tenth of the budget is free again; `None` within the budget.
    pub(super) fn excess(&self) -> Option<u64> {
        let most = self.bounds.bytes;
        (self.cost > most).then(|| self.cost - (most - most / 10))
    }

    /// Drops edits: by path, all up to a number. The serial is that of the edit with the number. If
    /// another edit has the number by now, the path is left alone.
    pub(super) fn drop_edits(&mut self, chosen: &[(TreePath, u32, u64)]) {
        for (path, upto, serial) in chosen.iter().cloned() {
            let is_it = |entry: &Entry| entry.number == upto && entry.serial == serial;
            if self.by_path.get(&path).is_some_and(|list| list.entries.iter().any(is_it)) {
                self.append(EditsLogRecord::Dropped { path, upto });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(rows: &[(&str, &[u64])]) -> Vec<Costs> {
        let of = |(path, history): &(&str, &[u64])| {
            let numbered = history.iter().enumerate().map(|(at, cost)| (at as u32 + 1, *cost));
            (TreePath::parse(path.as_bytes()).unwrap(), numbered.collect())
        };
        rows.iter().map(of).collect()
    }

    fn chosen(rows: &[(&str, &[u64])], bytes: u64) -> Vec<(String, u32)> {
        choose(costs(rows), bytes)
            .into_iter()
            .map(|(path, upto)| (path.to_string(), upto))
            .collect()
    }

    #[test]
    fn the_oldest_edit_of_the_largest_file_goes_first() {
        let rows: &[(&str, &[u64])] = &[("a", &[10, 10, 10]), ("b", &[50, 1]), ("c", &[5])];
        assert_eq!(chosen(rows, 1), [("b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 51), [("a".to_owned(), 1), ("b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 1000).len(), 3, "all there is, and no more");
    }

    #[test]
    fn edits_of_many_build_files_go_before_those_of_sources_beside_them() {
        let paths: Vec<String> = (0..100).map(|n| format!("target/debug/o{n}")).collect();
        let mut rows: Vec<(&str, &[u64])> =
            paths.iter().map(|path| (path.as_str(), &[6u64, 6][..])).collect();
        rows.push(("src/main.rs", &[30, 30, 30, 30]));
        rows.push(("src/deep/er.rs", &[40]));
        let gone = chosen(&rows, 900);
        assert!(gone.iter().all(|(path, _)| path.starts_with("target/")), "{gone:?}");
        assert_eq!(gone.iter().map(|(_, upto)| u64::from(*upto) * 6).sum::<u64>(), 900);
        // Every file loses its oldest edit before one loses its last.
        let oldest = chosen(&rows, 300);
        assert!(oldest.iter().all(|(_, upto)| *upto == 1) && oldest.len() == 50);
    }

    #[test]
    fn a_path_that_became_a_directory_is_counted_apart() {
        let rows: &[(&str, &[u64])] = &[("a", &[3]), ("a/b", &[2, 2])];
        assert_eq!(chosen(rows, 2), [("a/b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 4), [("a".to_owned(), 1), ("a/b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 7), [("a".to_owned(), 1), ("a/b".to_owned(), 2)]);
    }
}
