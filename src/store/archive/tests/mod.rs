//! Packs are read as they were written, and nothing else is read at all.

mod packs;
mod trees;

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::chunker::{Chunker, MIN_CHUNK};
use super::compress::{Method, compress, decompress};
use super::index::Index;
use super::reader::Pack;
use super::writer::{FOOT, HEAD, PackWriter};
use super::*;
use crate::error::{Error, Kind};

/// Chunks in memory.
#[derive(Default)]
struct Chunks(BTreeMap<Digest, Vec<u8>>);

impl ChunkSink for Chunks {
    fn put(&mut self, chunk: Chunk<'_>) -> Result<()> {
        self.0.insert(chunk.digest(), chunk.bytes().to_vec());
        Ok(())
    }
}

impl ChunkSource for Chunks {
    fn get(&self, chunk: &ChunkRef) -> Result<Vec<u8>> {
        let missing = || Error::new(Kind::NoStore, "read a chunk", "it is missing");
        self.0.get(&chunk.digest).cloned().ok_or_else(missing)
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut random = seed | 1;
    let next = |_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 56) as u8
    };
    (0..len).map(next).collect()
}

fn pack_of(contents: &[Vec<u8>]) -> (Vec<u8>, Digest, Index) {
    let mut writer = PackWriter::new(Vec::new()).unwrap();
    for bytes in contents {
        writer.add(Chunk::new(bytes).unwrap()).unwrap();
    }
    writer.finish().unwrap()
}

/// Some text, some noise, and a chunk of one byte.
fn contents() -> Vec<Vec<u8>> {
    let text = |n: usize| format!("line {n}\n").repeat(3000).into_bytes();
    let mut contents: Vec<Vec<u8>> = (0..12).map(text).collect();
    contents.extend((0..5).map(|seed| noise(60_000, 2 * seed)));
    contents.push(vec![7]);
    contents
}

fn open(bytes: Vec<u8>) -> Result<Pack<Vec<u8>>> {
    Pack::open(bytes, "a pack")
}

fn is_damage(error: &Error) -> bool {
    error.kind == Kind::Damage && error.attempt.contains("a pack")
}

#[test]
fn a_pack_gives_back_every_chunk() {
    let contents = contents();
    let (bytes, name, index) = pack_of(&contents);
    let pack = open(bytes.clone()).unwrap();
    assert_eq!((pack.name(), pack.index()), (name, &index));
    assert!(index.frames().len() > 2, "several frames");
    assert!(index.frames().iter().any(|frame| frame.method == Method::Deflate));
    assert!(index.frames().iter().any(|frame| frame.method == Method::Stored));
    assert_eq!(index.chunks().len(), contents.len());
    for content in &contents {
        assert_eq!(pack.chunk(&Digest::of(content)).unwrap().as_ref(), Some(content));
    }
    assert_eq!(pack.chunk(&Digest::of(b"other")).unwrap(), None);
    pack.verify().unwrap();
    // The same chunks again make no pack longer.
    let twice: Vec<Vec<u8>> = contents.iter().chain(&contents).cloned().collect();
    assert_eq!(pack_of(&twice).0, bytes);
}

#[test]
fn the_bytes_of_a_pack_are_those_of_the_format() {
    let (bytes, name, _) = pack_of(&[b"ab".to_vec(), b"c".to_vec()]);
    let mut index = vec![1, 0, 3];
    index.extend(Digest::of(b"abc").0);
    index.push(2);
    for chunk in [&b"ab"[..], b"c"] {
        index.push(chunk.len() as u8);
        index.extend(Digest::of(chunk).0);
    }
    assert_eq!(name, Digest::of(&index));
    let magic = b"jailfs-pack   1\n";
    let len = (index.len() as u64).to_le_bytes();
    assert_eq!(bytes, [magic, &b"abc"[..], &index, &len, &name.0, magic].concat());
}

#[test]
fn an_empty_pack_is_a_pack() {
    let (bytes, _, _) = pack_of(&[]);
    assert_eq!(bytes.len() as u64, HEAD + 1 + FOOT);
    assert!(open(bytes).unwrap().index().chunks().is_empty());
}

#[test]
fn a_pack_that_is_cut_anywhere_is_damaged() {
    let (bytes, ..) = pack_of(&[noise(500, 1), b"x".repeat(900)]);
    for len in 0..bytes.len() {
        let error = open(bytes[..len].to_vec()).err().unwrap();
        assert!(is_damage(&error), "{len}: {error}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(is_damage(&open(longer).err().unwrap()));
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    let (bytes, ..) = pack_of(&[noise(300, 1), b"x".repeat(900), vec![1]]);
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let read = open(flipped).and_then(|pack| pack.verify());
        assert!(is_damage(&read.unwrap_err()), "byte {at}");
    }
}

/// A pack with this index, as its digest says.
fn forged(frames: &[u8], index: &[u8]) -> Vec<u8> {
    let magic = b"jailfs-pack   1\n";
    let len = (index.len() as u64).to_le_bytes();
    [magic, frames, index, &len, &Digest::of(index).0, magic].concat()
}

fn frame_of(method: u8, stored: &[u8], chunks: &[(u64, Digest)]) -> Vec<u8> {
    let mut index = vec![1, method];
    bytes::put_number(&mut index, stored.len() as u64);
    index.extend(Digest::of(stored).0);
    bytes::put_number(&mut index, chunks.len() as u64);
    for (len, digest) in chunks {
        bytes::put_number(&mut index, *len);
        index.extend(digest.0);
    }
    index
}

#[test]
fn a_hostile_index_is_refused_without_much_memory() {
    let ab = Digest::of(b"ab");
    let number = |number: u64| {
        let mut out = Vec::new();
        bytes::put_number(&mut out, number);
        out
    };
    let (zeros, stored) = (vec![0; MAX_FRAME], compress(&vec![0; MAX_FRAME]).1);
    let bomb: Vec<(u64, Digest)> =
        zeros.chunks(1000).map(|part| (part.len() as u64, Digest::of(part))).collect();
    for (what, stored, index) in [
        ("2^64 frames", &b""[..], number(u64::MAX)),
        ("a frame that is not there", b"", vec![1]),
        ("an unknown method", b"ab", frame_of(9, b"ab", &[(2, ab)])),
        ("no chunk", b"ab", frame_of(0, b"ab", &[])),
        ("an empty chunk", b"ab", frame_of(0, b"ab", &[(2, ab), (0, Digest::of(b""))])),
        ("a long chunk", b"ab", frame_of(0, b"ab", &[(1 << 40, ab)])),
        ("a shorter frame", b"a", frame_of(0, b"a", &[(2, ab)])),
        ("a longer frame", b"abc", frame_of(0, b"abc", &[(2, ab)])),
        ("compressed bytes that are longer", b"abc", frame_of(1, b"abc", &[(2, ab)])),
        ("a chunk twice", b"abab", frame_of(0, b"abab", &[(2, ab), (2, ab)])),
        ("zeros that are one chunk twice", &stored, frame_of(1, &stored, &bomb)),
        ("2^64 chunks", b"ab", {
            let mut index = frame_of(0, b"ab", &[]);
            index.pop();
            index.extend(number(u64::MAX));
            index
        }),
        ("a number in a long form", b"", vec![0x80, 0]),
        ("bytes after the end", b"", vec![0, 0]),
    ] {
        let error = open(forged(stored, &index)).err();
        assert!(error.as_ref().is_some_and(is_damage), "{what}: {error:?}");
    }
    // The length of the index leads outside, or is gigantic.
    let (bytes, ..) = pack_of(&[b"ab".to_vec()]);
    for len in [0, 1, u64::MAX, bytes.len() as u64, MAX_INDEX as u64 + 1] {
        let mut wrong = bytes.clone();
        let at = wrong.len() - FOOT as usize;
        wrong[at..at + 8].copy_from_slice(&len.to_le_bytes());
        assert!(is_damage(&open(wrong).err().unwrap()), "{len}");
    }
    // Frames that do not reach the index, or reach beyond its beginning.
    let index = frame_of(0, b"ab", &[(2, ab)]);
    for frames in [&b"abc"[..], b"a", b""] {
        assert!(is_damage(&open(forged(frames, &index)).err().unwrap()));
    }
}

#[test]
fn bytes_that_are_not_those_of_the_index_are_never_returned() {
    let ab = Digest::of(b"ab");
    let read =
        |stored: &[u8], index: &[u8]| open(forged(stored, index)).and_then(|pack| pack.chunk(&ab));
    assert_eq!(read(b"ab", &frame_of(0, b"ab", &[(2, ab)])).unwrap(), Some(b"ab".to_vec()));
    // The frame is right, and the chunk is not the one that it is called.
    assert!(is_damage(&read(b"xy", &frame_of(0, b"xy", &[(2, ab)])).unwrap_err()));
    assert!(is_damage(&read(b"xy", &frame_of(0, b"ab", &[(2, ab)])).unwrap_err()));
    // A bomb: much more than the index promises, or less, or no compressed bytes.
    let bomb = compress(&vec![0; 100_000]).1;
    let chunks: Vec<(u64, Digest)> =
        (1..9).map(|n| (60 << 10, Digest([n; 32]))).chain([(2, ab)]).collect();
    for count in [1, 2, 4] {
        let chunks = &chunks[chunks.len() - count..];
        assert!(is_damage(&read(&bomb, &frame_of(1, &bomb, chunks)).unwrap_err()), "{count}");
    }
    let noise = noise(100, 1);
    let index = frame_of(1, &noise, &[(200, Digest::of(b"")), (2, ab)]);
    assert!(is_damage(&read(&noise, &index).unwrap_err()));
}

#[test]
fn bytes_are_stored_as_they_are_only_if_no_sample_of_them_becomes_shorter() {
    let noise = noise(MAX_FRAME, 1);
    assert_eq!(compress(&noise), (Method::Stored, noise.clone()));
    let mut mixed = noise.clone();
    mixed[..MAX_FRAME / 4].fill(b'a');
    assert_eq!(compress(&mixed).0, Method::Deflate);
    // Values below 64, as in base64, in any order.
    let narrow: Vec<u8> = noise.iter().map(|byte| byte & 63).collect();
    assert_eq!(compress(&narrow).0, Method::Deflate);
    let (bytes, stored) = (vec![0; 1 << 10], compress(&vec![0; 1 << 10]));
    assert_eq!(decompress(stored.0, &stored.1, bytes.len()).unwrap(), bytes);
}

#[test]
fn decompression_stops_at_the_length_that_was_promised() {
    let raw = b"abc".repeat(1000);
    let (method, stored) = compress(&raw);
    assert_eq!(method, Method::Deflate);
    assert_eq!(decompress(method, &stored, raw.len()).unwrap(), raw);
    assert!(decompress(method, &stored, raw.len() - 1).is_err());
    assert!(decompress(method, &stored, raw.len() + 1).is_err());
    assert!(decompress(method, &[&stored[..], &[0]].concat(), raw.len()).is_err());
    assert_eq!(compress(b"x").0, Method::Stored);
}

fn cut(content: &[u8], piece: usize) -> Vec<Vec<u8>> {
    let (mut chunks, mut chunker) = (Vec::new(), Chunker::default());
    let mut each = |chunk: Chunk<'_>| {
        chunks.push(chunk.bytes().to_vec());
        Ok::<(), ()>(())
    };
    content.chunks(piece).for_each(|piece| chunker.push(piece, &mut each).unwrap());
    chunker.finish(&mut each).unwrap();
    chunks
}

#[test]
fn a_byte_in_front_changes_few_chunks_and_pieces_change_none() {
    let content = noise(3 << 20, 5);
    let chunks = cut(&content, content.len());
    assert_eq!(chunks.concat(), content);
    assert!(chunks.iter().rev().skip(1).all(|c| (MIN_CHUNK..=MAX_CHUNK).contains(&c.len())));
    for piece in [4096, 100_000, 1 << 20] {
        assert_eq!(cut(&content, piece), chunks, "{piece}");
    }
    let moved = cut(&[&[1], &content[..]].concat(), 1 << 16);
    let new = moved.iter().filter(|chunk| !chunks.contains(chunk)).count();
    assert!(new <= 3, "{new} of {} chunks are new", moved.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_chunks_come_back(
        sizes in proptest::collection::vec((1usize..3000, any::<u64>(), any::<bool>()), 0..30),
    ) {
        let content = |(len, seed, is_noise): &(usize, u64, bool)| match is_noise {
            true => noise(*len, *seed),
            false => vec![*seed as u8; *len],
        };
        let contents: Vec<Vec<u8>> = sizes.iter().map(content).collect();
        let (bytes, _, index) = pack_of(&contents);
        prop_assert_eq!(Index::parse(&index.encode()).unwrap(), index);
        let pack = open(bytes).unwrap();
        pack.verify().unwrap();
        for content in contents {
            prop_assert_eq!(pack.chunk(&Digest::of(&content)).unwrap(), Some(content));
        }
    }

    #[test]
    fn numbers_have_one_form(number in any::<u64>(), signed in any::<i64>()) {
        let mut out = Vec::new();
        bytes::put_number(&mut out, number);
        bytes::put_signed(&mut out, signed);
        let mut input = &out[..];
        prop_assert_eq!(bytes::number(&mut input).unwrap(), number);
        prop_assert_eq!(bytes::signed(&mut input).unwrap(), signed);
        prop_assert!(input.is_empty());
    }
}
