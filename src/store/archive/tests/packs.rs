//! The packs of a directory give every chunk, and are written anew without losing one.

use std::collections::BTreeSet;
use std::path::Path;

use super::noise;
use crate::error::{Kind, Result};
use crate::store::archive::packs::{Archive, Rewritten};
use crate::store::archive::{Chunk, ChunkRef, ChunkSink, ChunkSource, Digest};
use crate::store::io::dir::StoreDir;

fn open(dir: &Path) -> Result<Archive> {
    Archive::open(StoreDir::open(dir).unwrap(), true)
}

fn add(archive: &Archive, contents: &[Vec<u8>]) -> Vec<Digest> {
    let mut writer = archive.writer();
    contents.iter().for_each(|bytes| writer.put(Chunk::new(bytes).unwrap()).unwrap());
    writer.finish().unwrap()
}

fn reference(bytes: &[u8]) -> ChunkRef {
    Chunk::new(bytes).unwrap().reference()
}

fn contents(seeds: std::ops::Range<u64>) -> Vec<Vec<u8>> {
    seeds.map(|seed| noise(5000, seed * 2)).collect()
}

fn files(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn every_chunk_is_found_also_after_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (contents(0..30), contents(20..50));
    let archive = open(dir.path()).unwrap();
    assert_eq!(add(&archive, &first).len(), 1);
    assert_eq!(add(&archive, &second).len(), 1);
    assert!(add(&archive, &second).is_empty(), "all chunks are there already");
    let check = |archive: &Archive| {
        for bytes in first.iter().chain(&second) {
            assert_eq!(archive.get(&reference(bytes)).unwrap(), *bytes);
        }
        assert!(!archive.has(&Digest::of(b"other")).unwrap());
        let error = archive.get(&reference(b"other")).unwrap_err();
        assert_eq!(error.kind, Kind::Damage);
    };
    check(&archive);
    let mut part = [0; 100];
    let digest = Digest::of(&first[3]);
    assert!(archive.read_at(&digest, 700, &mut part, true).unwrap(), "its frame is in memory");
    assert_eq!(part, first[3][700..800]);
    assert!(archive.read_at(&digest, 4950, &mut part, false).is_err(), "beyond its end");
    std::fs::write(dir.path().join("7.new"), "left").unwrap();
    let archive = open(dir.path()).unwrap();
    assert!(!archive.read_at(&digest, 0, &mut part, true).unwrap(), "not in memory yet");
    check(&archive);
    assert_eq!(files(dir.path()), 2);
}

#[test]
fn packs_of_which_little_is_live_are_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let archive = open(dir.path()).unwrap();
    let parts = [contents(0..30), contents(30..60), contents(60..90)];
    let names: Vec<Digest> = parts.iter().flat_map(|part| add(&archive, part)).collect();
    // Most of the first, little of the second, nothing of the third.
    let live: Vec<&Vec<u8>> = parts[0].iter().skip(5).chain(parts[1].iter().take(3)).collect();
    let digests: BTreeSet<Digest> = live.iter().map(|bytes| Digest::of(bytes)).collect();
    // A reader goes on with a pack that is removed.
    let reader = archive.by_name(&names[2]).unwrap().unwrap();
    let rewritten = archive.rewrite(&|digest| digests.contains(digest)).unwrap();
    assert_eq!(rewritten, Rewritten { removed: 2, written: 1 });
    assert_eq!(reader.chunk(&Digest::of(&parts[2][0])).unwrap().as_ref(), Some(&parts[2][0]));
    for archive in [&archive, &open(dir.path()).unwrap()] {
        assert!(archive.names().contains(&names[0]) && archive.names().len() == 2);
        for bytes in &live {
            assert_eq!(archive.get(&reference(bytes)).unwrap(), **bytes);
        }
        assert!(!archive.has(&Digest::of(&parts[2][0])).unwrap());
        assert!(!archive.has(&Digest::of(&parts[1][5])).unwrap());
    }
    assert_eq!(files(dir.path()), 2);
    let again = archive.rewrite(&|digest| digests.contains(digest)).unwrap();
    assert_eq!(again, Rewritten::default(), "nothing is left to do");
    assert_eq!(archive.rewrite(&|_| false).unwrap().removed, 2);
    assert_eq!((archive.names().len(), files(dir.path())), (0, 0));
}

#[test]
fn a_writer_that_does_not_finish_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let archive = open(dir.path()).unwrap();
    let mut writer = archive.writer();
    writer.put(Chunk::new(b"some bytes").unwrap()).unwrap();
    assert_eq!(files(dir.path()), 1);
    drop(writer);
    assert_eq!((files(dir.path()), archive.names().len()), (0, 0));
}

#[test]
fn a_pack_under_another_name_and_a_damaged_one_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let archive = open(dir.path()).unwrap();
    let name = add(&archive, &contents(0..3))[0].to_string();
    let other = "ab".repeat(32);
    std::fs::rename(dir.path().join(&name), dir.path().join(&other)).unwrap();
    let error = open(dir.path()).err().unwrap();
    assert!(error.kind == Kind::Damage && error.reason.contains(&name), "{error}");
    std::fs::rename(dir.path().join(&other), dir.path().join(&name)).unwrap();
    // A flipped bit in a frame is found when it is read, and is never written anew.
    let mut bytes = std::fs::read(dir.path().join(&name)).unwrap();
    bytes[20] ^= 1;
    std::fs::write(dir.path().join(&name), bytes).unwrap();
    let archive = open(dir.path()).unwrap();
    let contents = contents(0..3);
    assert_eq!(archive.get(&reference(&contents[0])).unwrap_err().kind, Kind::Damage);
    let first = Digest::of(&contents[0]);
    assert_eq!(archive.rewrite(&|digest| *digest == first).unwrap_err().kind, Kind::Damage);
    assert_eq!(files(dir.path()), 1, "the damaged pack stays, and no other");
}
