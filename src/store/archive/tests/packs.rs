//! The packs of a directory give every chunk, and are written anew without losing one.

use std::collections::BTreeSet;
use std::path::Path;

use super::noise;
use crate::error::{Kind, Result};
use crate::store::archive::packs::Archive;
use crate::store::archive::{Chunk, ChunkRef, ChunkSink, ChunkSource, Digest};
use crate::store::io::dir::StoreDir;

/// Opens all packs of a directory, and removes what is no pack.
fn open(dir: &Path) -> Result<Archive> {
    let dir = StoreDir::open(dir).unwrap();
    let names = dir.list(Digest::parse).unwrap();
    let (archive, mut errors) = Archive::open(dir, &names, true);
    if let Some(error) = errors.pop() {
        return Err(error);
    }
    archive.remove_others("root").map(|()| archive)
}

fn names(archive: &Archive) -> Vec<Digest> {
    archive.writer().names_without(&[])
}

/// Writes anew what is worth it, and removes the packs that this replaces. Returns how many packs
/// were removed and how many written.
fn rewrite(archive: &Archive, is_live: &dyn Fn(&Digest) -> bool) -> (usize, usize) {
    let mut writer = archive.writer();
    let old = writer.rewrite(is_live).unwrap();
    let written = writer.finish().unwrap().len();
    writer.remove(&old).unwrap();
    (old.len(), written)
}

fn add(archive: &Archive, contents: &[Vec<u8>]) -> Vec<Digest> {
    let mut writer = archive.writer();
    contents.iter().for_each(|bytes| writer.put(Chunk::new(bytes).unwrap()).unwrap());
    writer.finish().unwrap().to_vec()
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
    let packs: Vec<Digest> = parts.iter().flat_map(|part| add(&archive, part)).collect();
    // Most of the first, little of the second, nothing of the third.
    let live: Vec<&Vec<u8>> = parts[0].iter().skip(5).chain(parts[1].iter().take(3)).collect();
    let digests: BTreeSet<Digest> = live.iter().map(|bytes| Digest::of(bytes)).collect();
    let is_live = |digest: &Digest| digests.contains(digest);
    assert_eq!(rewrite(&archive, &is_live), (1, 0), "a pack with nothing live costs no space");
    assert_eq!(rewrite(&archive, &is_live), (1, 1));
    for archive in [&archive, &open(dir.path()).unwrap()] {
        assert!(names(archive).contains(&packs[0]));
        assert_eq!(names(archive).len(), 2);
        for bytes in &live {
            assert_eq!(archive.get(&reference(bytes)).unwrap(), **bytes);
        }
        assert!(!archive.has(&Digest::of(&parts[2][0])).unwrap());
        assert!(!archive.has(&Digest::of(&parts[1][5])).unwrap());
    }
    assert_eq!(files(dir.path()), 2);
    assert_eq!(rewrite(&archive, &is_live), (0, 0), "nothing is left to do");
    assert_eq!(rewrite(&archive, &|_| false), (2, 0));
    assert_eq!((archive.space(), files(dir.path())), ((0, 0), 0));
}

#[test]
fn small_packs_become_one_and_large_frames_are_copied_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let archive = open(dir.path()).unwrap();
    let all: Vec<Vec<Vec<u8>>> = (0..9).map(|n| contents(n * 30..n * 30 + 30)).collect();
    for part in &all {
        add(&archive, part);
        while rewrite(&archive, &|_| true).0 > 0 {}
        assert!(archive.space().0 < 4, "{:?}", archive.space());
    }
    for archive in [&archive, &open(dir.path()).unwrap()] {
        for bytes in all.iter().flatten() {
            assert_eq!(archive.get(&reference(bytes)).unwrap(), *bytes);
        }
    }
}

#[test]
fn a_writer_that_does_not_finish_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let archive = open(dir.path()).unwrap();
    let mut writer = archive.writer();
    writer.put(Chunk::new(b"some bytes").unwrap()).unwrap();
    assert_eq!(files(dir.path()), 1);
    drop(writer);
    assert_eq!((files(dir.path()), archive.space().0), (0, 0));
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
    for _ in 0..2 {
        assert_eq!(rewrite(&archive, &|digest| *digest == first), (0, 0));
        assert_eq!(files(dir.path()), 1, "the damaged pack stays, and no other");
    }
}

#[test]
fn a_file_that_is_no_pack_of_the_archive_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let archive = open(dir.path()).unwrap();
    let name = add(&archive, &contents(0..3))[0];
    add(&archive, &contents(3..6));
    std::fs::write(dir.path().join("root"), "stays").unwrap();
    let (archive, errors) = Archive::open(StoreDir::open(dir.path()).unwrap(), &[name], true);
    assert!(errors.is_empty());
    archive.remove_others("root").unwrap();
    assert_eq!(files(dir.path()), 2);
    assert!(archive.has(&Digest::of(&contents(0..1)[0])).unwrap());
    std::fs::remove_file(dir.path().join(name.to_string())).unwrap();
    let (_, errors) = Archive::open(StoreDir::open(dir.path()).unwrap(), &[name], true);
    assert!(errors.len() == 1 && errors[0].to_string().contains(&name.to_string()), "{errors:?}");
}
