//! Writes of any size, at any offset of a file whose content the history shares: every byte is the
//! last one that was written.

use crate::place::{Place, Work};
use crate::rng::Rng;

const SEEDS: u64 = 30;
const STEPS: u64 = 120;
/// A few blocks.
const LARGEST: u64 = 20_000;

/// A file, its expected content, and its content at the end of each edit.
struct Known {
    bytes: Vec<u8>,
    rested: Vec<Vec<u8>>,
}

impl Known {
    fn write(&mut self, work: &Work, offset: u64, bytes: &[u8]) {
        work.write("a", offset, bytes);
        let (from, to) = (offset as usize, offset as usize + bytes.len());
        self.bytes.resize(self.bytes.len().max(to), 0);
        self.bytes[from..to].copy_from_slice(bytes);
    }

    fn truncate(&mut self, work: &Work, size: u64) {
        work.truncate("a", size);
        self.bytes.resize(size as usize, 0);
    }

    fn rest(&mut self, work: &Work) {
        work.rest();
        self.rested.push(self.bytes.clone());
    }

    fn check(&self, work: &Work, what: &str) {
        let found = work.bytes("a");
        let differs = found.iter().zip(&self.bytes).position(|(a, b)| a != b);
        assert!(
            found == self.bytes,
            "{what}: {} bytes for {}, first other at {differs:?}",
            found.len(),
            self.bytes.len()
        );
        for edit in work.history("a") {
            let (state, file) =
                work.sandbox.fs().before_edit(&crate::place::path("a"), edit.number).unwrap();
            let bytes = state.read_all(&file).unwrap();
            assert!(
                self.rested.contains(&bytes),
                "{what}: edit {} was never the content",
                edit.number
            );
        }
    }
}

#[test]
fn a_write_over_shared_and_later_bytes_in_one_block_loses_none() {
    let place = Place::new(&[]);
    let work = place.open();
    work.make("a");
    let mut known = Known { bytes: Vec::new(), rested: Vec::new() };
    known.write(&work, 0, &[b'A'; 100]);
    known.rest(&work);
    known.write(&work, 100, &[b'B'; 100]);
    known.truncate(&work, 150);
    known.write(&work, 0, &[b'D'; 300]);
    known.check(&work, "over the end");
    known.rest(&work);
    known.write(&work, 300, &[b'E'; 100]);
    known.write(&work, 5000, b"F");
    known.write(&work, 0, &[b'G'; 4096]);
    known.check(&work, "over a hole");
}

#[test]
fn after_random_writes_every_byte_is_the_last_written_and_every_entry_a_former_content() {
    for seed in 1..=SEEDS {
        let place = Place::new(&[("a", &"base ".repeat(2000))]);
        let mut work = place.open();
        let mut rng = Rng::new(seed);
        let bytes = work.bytes("a");
        let mut known = Known { rested: vec![bytes.clone()], bytes };
        for step in 0..STEPS {
            let at = rng.below(LARGEST);
            match rng.below(10) {
                0..=4 => {
                    let most = if rng.one_in(3) { 8000 } else { 200 };
                    let len = 1 + rng.below(most);
                    let bytes = vec![b'a' + (step % 26) as u8; len as usize];
                    // Often where the last write ended.
                    let at = if rng.one_in(2) { known.bytes.len() as u64 % LARGEST } else { at };
                    known.write(&work, at, &bytes);
                }
                5 | 6 => known.truncate(&work, 1 + at),
                7 => work.checkpoint(&format!("c{step}")),
                8 if rng.one_in(6) => {
                    drop(work);
                    work = place.open();
                    // The edit clock of the file starts anew.
                    known.rest(&work);
                }
                _ => known.rest(&work),
            }
            known.check(&work, &format!("seed {seed}, step {step}"));
        }
    }
}
