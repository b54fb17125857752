//! Finds bytes of an old content that moved in a new one, as rsync does.
//!
//! The blocks of the old content are known by a hash that can be rolled over the new content byte
//! by byte. A window with the hash of a block is then compared with it.

use std::collections::HashMap;

use crate::store::content::pool::BLOCK;

/// Bytes of a block.
const WINDOW: usize = BLOCK as usize;
/// The multiplier of the hash: an odd number without a pattern (the golden ratio in 64 bits).
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// A run of equal bytes: its offset in the old content and in the new bytes, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) old: u64,
    pub(super) new: u64,
    pub(super) len: u64,
}

/// The upper 16 bits of the hashes of the blocks. Most windows are not among them, and then need no
/// look into the table.
struct Prefixes(Vec<bool>);

impl Prefixes {
    fn of<'a>(hashes: impl Iterator<Item = &'a u64>) -> Prefixes {
        let mut prefixes = Prefixes(vec![false; 1 << 16]);
        for hash in hashes {
            if let Some(known) = prefixes.0.get_mut(Prefixes::at(*hash)) {
                *known = true;
            }
        }
        prefixes
    }

    fn at(hash: u64) -> usize {
        (hash >> 48) as usize
    }

    fn may_have(&self, hash: u64) -> bool {
        self.0.get(Prefixes::at(hash)).is_some_and(|known| *known)
    }
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |hash, byte| hash.wrapping_mul(FACTOR).wrapping_add(u64::from(*byte)))
}

/// Finds bytes of `parts` in `new`. A part has its offset in the old content. The runs are in the
/// order of `new`, and overlap neither in `parts` nor in `new`.
pub(super) fn find(parts: &[(u64, Vec<u8>)], new: &[u8]) -> Vec<Run> {
    let mut blocks: HashMap<u64, (usize, usize)> = HashMap::new();
    for (number, (_, bytes)) in parts.iter().enumerate() {
        for (at, block) in bytes.chunks_exact(WINDOW).enumerate() {
            // The first of equal blocks gives the longest run.
            blocks.entry(hash(block)).or_insert((number, at * WINDOW));
        }
    }
    let prefixes = Prefixes::of(blocks.keys());
    let out = (1..WINDOW).fold(FACTOR, |power, _| power.wrapping_mul(FACTOR));
    // How far each part was found. Bytes before are not searched again.
    let mut done = vec![0; parts.len()];
    let mut runs = Vec::new();
    let mut at = 0;
    let mut rolled = new.get(..WINDOW).map(hash);
    while let (Some(found), Some(window)) = (rolled, new.get(at..at + WINDOW)) {
        let known = prefixes.may_have(found).then(|| blocks.get(&found)).flatten();
        let block = known.and_then(|(number, start)| {
            let (offset, bytes) = parts.get(*number)?;
            let rest = bytes.get(*start..)?;
            let is_free = done.get(*number).is_some_and(|done| start >= done);
            (is_free && rest.starts_with(window)).then_some((*number, *start, offset, rest))
        });
        if let Some((number, start, offset, rest)) = block {
            let there = new.get(at..).unwrap_or_default();
            let len = rest.iter().zip(there).take_while(|(a, b)| a == b).count();
            runs.push(Run { old: offset + start as u64, new: at as u64, len: len as u64 });
            if let Some(done) = done.get_mut(number) {
                *done = start + len;
            }
            at += len;
            rolled = new.get(at..at + WINDOW).map(hash);
            continue;
        }
        let (Some(first), next) = (new.get(at), new.get(at + WINDOW)) else { break };
        rolled = next.map(|next| {
            let without =
                found.wrapping_mul(FACTOR).wrapping_sub(u64::from(*first).wrapping_mul(out));
            without.wrapping_add(u64::from(*next))
        });
        at += 1;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn moved_bytes_are_found_and_changed_ones_are_not() {
        let old = noise(1, 100_000);
        let mut new = old.clone();
        new.splice(20_000..20_000, noise(2, 7));
        new.splice(60_000..60_100, noise(3, 300));
        new.extend(noise(4, 500));
        let runs = find(&[(1000, old.clone())], &new);
        let mut found = 0;
        for Run { old: from, new: at, len } in &runs {
            let (from, at, len) = ((from - 1000) as usize, *at as usize, *len as usize);
            assert_eq!(old[from..from + len], new[at..at + len]);
            found += len;
        }
        assert!(found > 100_000 - 100 - 3 * WINDOW, "{found} of 100000 in {runs:?}");
        assert!(find(&[(0, noise(5, 50_000))], &new).is_empty());
    }

    #[test]
    fn short_and_repeated_contents_give_correct_runs() {
        assert!(find(&[], &noise(1, 10_000)).is_empty());
        assert!(find(&[(0, noise(1, 100))], &noise(1, 100)).is_empty());
        let zeros = vec![0; 5 * WINDOW];
        let runs = find(&[(0, zeros.clone()), (90_000, zeros.clone())], &vec![0; 7 * WINDOW + 5]);
        assert_eq!(runs.iter().map(|run| run.len as usize).sum::<usize>(), 5 * WINDOW, "{runs:?}");
    }
}
