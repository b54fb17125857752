//! Which versions go when all of them are counted as more bytes than are to be kept.
//!
//! The one that has most gives first: from the root down, of the directories and files at each level the one whose versions are
//! counted as most bytes, and of the file that is come to the oldest version. So what a build writes again and again below
//! `target` or `node_modules` gives its versions up before a source file beside it does, however many files the build
//! writes, because it is the directory that is compared; and a large file before the small ones beside it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{EditHistory, List};
use crate::store::edits_log::EditsLogRecord;
use crate::types::{Name, TreePath};

/// What the versions of a path are counted as, oldest first: number and bytes.
pub(super) type Costs = (TreePath, VecDeque<(u32, u64)>);

/// A directory or a file, and what the versions at and below it are counted as.
#[derive(Default)]
struct Place {
    above: usize,
    total: u64,
    /// The places below, the one with most last.
    below: BTreeSet<(u64, usize)>,
    /// The path whose versions these are, as a number of the list.
    path: Option<usize>,
}

/// Chooses what is given up so that so many bytes go: up to which number, by path.
pub(super) fn choose(mut costs: Vec<Costs>, bytes: u64) -> BTreeMap<TreePath, u32> {
    let mut places = plant(&costs);
    let mut chosen = BTreeMap::new();
    let mut gone = 0;
    while gone < bytes {
        let mut at = 0;
        while let Some((_, next)) = places.get(at).and_then(|place| place.below.last().copied()) {
            at = next;
        }
        let path = places.get(at).and_then(|place| place.path);
        let Some((path, versions)) = path.and_then(|path| costs.get_mut(path)) else { break };
        let Some((number, cost)) = versions.pop_front() else { break };
        chosen.insert(path.clone(), number);
        gone += cost;
        let is_empty = versions.is_empty();
        take_off(&mut places, at, cost, is_empty);
    }
    chosen
}

/// The tree of places; the first one is the root.
fn plant(costs: &[Costs]) -> Vec<Place> {
    let mut places = vec![Place::default()];
    let mut known: BTreeMap<(usize, Name), usize> = BTreeMap::new();
    for (number, (path, versions)) in costs.iter().enumerate() {
        let mut at = 0;
        for name in path.names() {
            let next = places.len();
            at = *known.entry((at, name)).or_insert_with(|| {
                places.push(Place { above: at, ..Place::default() });
                next
            });
        }
        // A leaf of its own: at the same path there may be a directory now.
        places.push(Place { above: at, path: Some(number), ..Place::default() });
        let total = versions.iter().map(|(_, cost)| cost).sum::<u64>();
        let mut at = places.len() - 1;
        while let Some(place) = places.get_mut(at) {
            place.total += total;
            if at == 0 {
                break;
            }
            at = place.above;
        }
    }
    for at in 1..places.len() {
        let Some((above, total)) = places.get(at).map(|place| (place.above, place.total)) else {
            continue;
        };
        if let Some(above) = places.get_mut(above) {
            above.below.insert((total, at));
        }
    }
    places
}

/// Counts a version off a leaf and everything above it; an empty leaf goes.
fn take_off(places: &mut [Place], leaf: usize, cost: u64, mut goes: bool) {
    let mut at = leaf;
    while at != 0 {
        let Some(place) = places.get_mut(at) else { return };
        let before = place.total;
        place.total = before.saturating_sub(cost);
        let (after, above) = (place.total, place.above);
        let Some(above_place) = places.get_mut(above) else { return };
        above_place.below.remove(&(before, at));
        if !goes {
            above_place.below.insert((after, at));
        }
        goes = goes && above_place.below.is_empty();
        at = above;
    }
}

impl EditHistory {
    /// What every version is counted as.
    pub(super) fn costs(&self) -> Vec<Costs> {
        let of =
            |list: &List| list.entries.iter().map(|entry| (entry.number, entry.cost)).collect();
        self.lists.iter().map(|(path, list)| (path.clone(), of(list))).collect()
    }

    /// How many bytes are to go so that a tenth of the budget is free again; none if it is not used up.
    pub(super) fn excess(&self) -> Option<u64> {
        let most = self.bounds.bytes;
        (self.cost > most).then(|| self.cost - (most - most / 10))
    }

    /// Gives up what was chosen.
    pub(super) fn give_up(&mut self, chosen: BTreeMap<TreePath, u32>) {
        for (path, upto) in chosen {
            self.note(&EditsLogRecord::Dropped { path, upto });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(rows: &[(&str, &[u64])]) -> Vec<Costs> {
        let of = |(path, versions): &(&str, &[u64])| {
            let numbered = versions.iter().enumerate().map(|(at, cost)| (at as u32 + 1, *cost));
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
    fn the_oldest_version_of_the_largest_goes_first() {
        let rows: &[(&str, &[u64])] = &[("a", &[10, 10, 10]), ("b", &[50, 1]), ("c", &[5])];
        assert_eq!(chosen(rows, 1), [("b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 51), [("a".to_owned(), 1), ("b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 1000).len(), 3, "all there is, and no more");
    }

    #[test]
    fn many_small_files_of_a_build_go_before_the_sources_beside_it() {
        let paths: Vec<String> = (0..100).map(|n| format!("target/debug/o{n}")).collect();
        let mut rows: Vec<(&str, &[u64])> =
            paths.iter().map(|path| (path.as_str(), &[6u64, 6][..])).collect();
        rows.push(("src/main.rs", &[30, 30, 30, 30]));
        rows.push(("src/deep/er.rs", &[40]));
        let gone = chosen(&rows, 900);
        assert!(gone.iter().all(|(path, _)| path.starts_with("target/")), "{gone:?}");
        assert_eq!(gone.iter().map(|(_, upto)| u64::from(*upto) * 6).sum::<u64>(), 900);
        // Each of the many gives its oldest before one gives its last.
        let oldest = chosen(&rows, 300);
        assert!(oldest.iter().all(|(_, upto)| *upto == 1) && oldest.len() == 50);
    }

    #[test]
    fn a_path_that_became_a_directory_counts_by_itself() {
        let rows: &[(&str, &[u64])] = &[("a", &[3]), ("a/b", &[2, 2])];
        assert_eq!(chosen(rows, 2), [("a/b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 4), [("a".to_owned(), 1), ("a/b".to_owned(), 1)]);
        assert_eq!(chosen(rows, 7), [("a".to_owned(), 1), ("a/b".to_owned(), 2)]);
    }
}
