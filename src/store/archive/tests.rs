//! Packs and tree blobs are read as they were written, and nothing else is read at all.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::chunker::{Chunker, MIN_CHUNK};
use super::compress::{Method, compress, decompress};
use super::index::Index;
use super::reader::Pack;
use super::tree_blob::{Attributes, Event, Piece, TreeBlob, TreeReader, TreeWriter, load};
use super::writer::{FOOT, HEAD, PackWriter};
use super::*;
use crate::error::{Error, Kind};
use crate::types::{FileKind, Name, Timestamp};

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
    contents.extend((1..6).map(|seed| noise(60_000, seed)));
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
    let bomb: Vec<(u64, Digest)> = zeros
        .chunks(1000)
        .map(|part| (part.len() as u64, Digest::of(part)))
        .collect();
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
    let read = |stored: &[u8], index: &[u8]| {
        open(forged(stored, index)).and_then(|pack| pack.chunk(&ab))
    };
    assert_eq!(read(b"ab", &frame_of(0, b"ab", &[(2, ab)])).unwrap(), Some(b"ab".to_vec()));
    // The frame is right, and the chunk is not the one that it is called.
    assert!(is_damage(&read(b"xy", &frame_of(0, b"xy", &[(2, ab)])).unwrap_err()));
    assert!(is_damage(&read(b"xy", &frame_of(0, b"ab", &[(2, ab)])).unwrap_err()));
    // A bomb: much more than the index promises, or less, or no compressed bytes.
    let bomb = compress(&vec![0; 100_000]).1;
    let chunks: Vec<(u64, Digest)> = (1..9)
        .map(|n| (60 << 10, Digest([n; 32])))
        .chain([(2, ab)])
        .collect();
    for count in [1, 2, 4] {
        let chunks = &chunks[chunks.len() - count..];
        assert!(is_damage(&read(&bomb, &frame_of(1, &bomb, chunks)).unwrap_err()), "{count}");
    }
    let noise = noise(100, 1);
    let index = frame_of(1, &noise, &[(200, Digest::of(b"")), (2, ab)]);
    assert!(is_damage(&read(&noise, &index).unwrap_err()));
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

#[test]
fn a_full_pack_says_so() {
    let mut writer = PackWriter::new(std::io::sink()).unwrap();
    let mut seed = 0;
    while !writer.is_full() {
        seed += 1;
        writer.add(Chunk::new(&noise(MAX_CHUNK, seed)).unwrap()).unwrap();
    }
    assert!((380..=400).contains(&seed), "{seed} chunks of 64 KiB");
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
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_chunks_come_back(
        sizes in proptest::collection::vec((1usize..3000, any::<u64>(), any::<bool>()), 0..60),
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

mod trees {
    use super::*;

    pub(super) fn name(bytes: &[u8]) -> Name {
        Name::new(bytes).unwrap()
    }

    fn time() -> impl Strategy<Value = Timestamp> {
        (any::<i64>(), 0u32..1_000_000_000).prop_map(|(secs, nanos)| Timestamp { secs, nanos })
    }

    fn attributes() -> impl Strategy<Value = Attributes> {
        let bytes = || proptest::collection::vec(1u8..=255, 1..6);
        let xattrs = proptest::collection::btree_map(bytes(), bytes(), 0..3);
        ((0u32..=0o7777, any::<u32>(), any::<u32>()), (time(), time(), time()), xattrs).prop_map(
            |((perms, uid, gid), (mtime, ctime, atime), xattrs)| Attributes {
                perms,
                uid,
                gid,
                mtime,
                ctime,
                atime,
                xattrs,
            },
        )
    }

    /// A node: its kind, its attributes, and numbers that say the rest.
    type Seed = (u8, Attributes, Vec<(bool, u16)>);

    /// A tree: names with nodes, and below directories more of them.
    #[derive(Clone, Debug)]
    pub(super) enum Node {
        Leaf(Seed),
        Dir(Attributes, BTreeMap<Vec<u8>, Node>),
    }

    pub(super) fn node() -> impl Strategy<Value = Node> {
        let pieces = proptest::collection::vec((any::<bool>(), any::<u16>()), 0..5);
        let leaf = (any::<u8>(), attributes(), pieces).prop_map(Node::Leaf);
        leaf.prop_recursive(4, 40, 6, |inner| {
            let any_name = prop_oneof![
                "[a-c]{1,2}".prop_map(String::into_bytes),
                proptest::collection::vec(128u8..=255, 1..4),
            ];
            (attributes(), proptest::collection::btree_map(any_name, inner, 0..6))
                .prop_map(|(attributes, below)| Node::Dir(attributes, below))
        })
    }

    /// The events of a tree. Links lead to earlier entries, if there are any.
    pub(super) fn events(root: &Node) -> Vec<Event> {
        let mut events = Vec::new();
        let mut entries = Entries::default();
        match root {
            Node::Dir(attributes, below) => dir(None, attributes, below, &mut entries, &mut events),
            Node::Leaf((_, attributes, _)) => {
                dir(None, attributes, &BTreeMap::new(), &mut entries, &mut events);
            }
        }
        events
    }

    #[derive(Default)]
    struct Entries {
        count: u64,
        linkable: Vec<u64>,
    }

    fn dir(
        name: Option<Name>,
        attributes: &Attributes,
        below: &BTreeMap<Vec<u8>, Node>,
        entries: &mut Entries,
        events: &mut Vec<Event>,
    ) {
        entries.count += 1;
        events.push(Event::Dir { name, attributes: attributes.clone() });
        for (name, node) in below {
            let name = trees::name(name);
            match node {
                Node::Dir(attributes, below) => {
                    dir(Some(name), attributes, below, entries, events);
                }
                Node::Leaf(seed) => leaf(name, seed, entries, events),
            }
        }
        events.push(Event::End);
    }

    fn leaf(name: Name, seed: &Seed, entries: &mut Entries, events: &mut Vec<Event>) {
        let (kind, attributes, numbers) = seed;
        let attributes = attributes.clone();
        let number = entries.count;
        entries.count += 1;
        let first = numbers.first().map_or(1, |(_, number)| u64::from(*number) + 1);
        let special = |kind, rdev| Event::Special {
            name: name.clone(),
            attributes: attributes.clone(),
            kind,
            rdev,
        };
        if let (7, Some(of)) = (kind % 8, entries.linkable.last()) {
            events.push(Event::Link { name, of: *of });
            return;
        }
        entries.linkable.push(number);
        match kind % 8 {
            0 => events.push(Event::Symlink { name, attributes, target: vec![1; 9] }),
            1 => events.push(special(FileKind::Fifo, 0)),
            2 => events.push(special(FileKind::Socket, 0)),
            3 => events.push(special(FileKind::Char, first << 40)),
            4 => events.push(special(FileKind::Block, first)),
            _ => {
                let pieces = pieces(numbers);
                let size = pieces.iter().map(Piece::len).sum();
                events.push(Event::File { name, attributes, size });
                events.extend(pieces.into_iter().map(Event::Piece));
            }
        }
    }

    /// Holes of whole blocks between chunks that end at a block; the last chunk is shorter.
    fn pieces(numbers: &[(bool, u16)]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let chunk = |len: u32, seed: u16| {
            Piece::Chunk(ChunkRef { digest: Digest::of(&seed.to_le_bytes()), len })
        };
        for (is_hole, seed) in numbers {
            match pieces.last() {
                Some(Piece::Chunk(_)) | None if *is_hole => {
                    pieces.push(Piece::Hole(4096 * (u64::from(*seed) + 1)));
                }
                _ => pieces.push(chunk(4096 * (u32::from(*seed) % 16 + 1), *seed)),
            }
        }
        pieces.extend(numbers.first().map(|(_, seed)| chunk(u32::from(*seed) % 4000 + 1, *seed)));
        pieces
    }
}

fn written(events: &[Event], chunks: &mut Chunks) -> Result<TreeBlob> {
    let mut writer = TreeWriter::default();
    events.iter().try_for_each(|event| writer.write(event, chunks))?;
    writer.finish(chunks)
}

fn stream(blob: &TreeBlob, chunks: &Chunks) -> Vec<u8> {
    blob.chunks().iter().flat_map(|chunk| chunks.get(chunk).unwrap()).collect()
}

fn read_stream(bytes: &[u8]) -> Result<Vec<Event>> {
    let mut reader = TreeReader::new(bytes, "a tree");
    let mut events = Vec::new();
    while let Some(event) = reader.next_event()? {
        events.push(event);
    }
    Ok(events)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_tree_is_read_as_it_was_written(root in trees::node(), at in any::<prop::sample::Index>()) {
        let events = trees::events(&root);
        let mut chunks = Chunks::default();
        let blob = written(&events, &mut chunks).unwrap();
        prop_assert_eq!(&TreeBlob::parse(&blob.encode()).unwrap(), &blob);
        let mut read = Vec::new();
        load(&blob, &chunks, &mut |event| {
            read.push(event);
            Ok(())
        }).unwrap();
        prop_assert_eq!(&read, &events);
        // Bytes that are read as a tree are the bytes that this tree has.
        let mut bytes = stream(&blob, &chunks);
        let at = at.index(bytes.len());
        bytes[at] = bytes[at].wrapping_add(1);
        if let Ok(others) = read_stream(&bytes) {
            let mut chunks = Chunks::default();
            let again = written(&others, &mut chunks).unwrap();
            prop_assert_eq!(stream(&again, &chunks), bytes);
        }
    }
}

fn root() -> Event {
    Event::Dir { name: None, attributes: Attributes::default() }
}

fn dir(name: &[u8]) -> Event {
    Event::Dir { name: Some(trees::name(name)), attributes: Attributes::default() }
}

fn file(name: &[u8], size: u64) -> Event {
    Event::File { name: trees::name(name), attributes: Attributes::default(), size }
}

fn chunk(len: u32) -> Event {
    Event::Piece(Piece::Chunk(ChunkRef { digest: Digest::of(b""), len }))
}

#[test]
fn entries_against_the_rules_are_refused_with_their_path() {
    let hole = |len| Event::Piece(Piece::Hole(len));
    let link = |name: &[u8], of| Event::Link { name: trees::name(name), of };
    let target = |target: &[u8]| Event::Symlink {
        name: trees::name(b"l"),
        attributes: Attributes::default(),
        target: target.to_vec(),
    };
    for (events, why) in [
        (vec![], "the root directory does not end"),
        (vec![file(b"a", 0)], "the root is missing"),
        (vec![root(), root()], "a directory without a name"),
        (vec![root(), dir(b"b"), Event::End, file(b"a", 0)], "'a': a name that does not ascend"),
        (vec![root(), file(b"a", 0), file(b"a", 0)], "'a': a name that does not ascend"),
        (vec![root(), dir(b"d"), file(b"a", 1), Event::End], "'d/a': a file without all"),
        (vec![root(), file(b"a", 1), chunk(2)], "'a': content beyond the end"),
        (vec![root(), file(b"a", 0), chunk(1)], "'a': content beyond the end"),
        (vec![root(), file(b"a", 9000), hole(4000)], "'a': a hole that does not"),
        (vec![root(), file(b"a", 9000), chunk(1), hole(8192)], "'a': a hole that does not"),
        (vec![root(), file(b"a", 9000), hole(4096), hole(4096)], "'a': a hole that does not"),
        (vec![root(), file(b"a", u64::MAX)], "'a': a file of more than"),
        (vec![root(), link(b"a", 0)], "'a': a hard link to entry 0"),
        (vec![root(), link(b"a", 1)], "'a': a hard link to entry 1"),
        (vec![root(), file(b"a", 0), link(b"b", 1), link(b"c", 2)], "'c': a hard link to entry 2"),
        (vec![root(), target(b"")], "'l': not the text"),
        (vec![root(), target(&[b'x'; 4096])], "'l': not the text"),
        (vec![root(), Event::End, dir(b"a")], "an entry after the end"),
    ] {
        let error = written(&events, &mut Chunks::default()).unwrap_err();
        assert!(error.reason.contains(why), "{why}: {error}");
    }
    let deep: Vec<Event> = std::iter::once(root()).chain((0..4200).map(|_| dir(&[b'x'; 250]))).collect();
    let error = written(&deep, &mut Chunks::default()).unwrap_err();
    assert!(error.reason.contains("more than 1 MiB"), "{}", error.reason.len());
}

#[test]
fn a_tree_that_is_cut_or_continued_is_damaged() {
    let events = [root(), dir(b"d"), file(b"\xff", 5), chunk(5), Event::End, Event::End];
    let mut chunks = Chunks::default();
    let blob = written(&events, &mut chunks).unwrap();
    let bytes = stream(&blob, &chunks);
    assert_eq!(read_stream(&bytes).unwrap(), events);
    for len in 0..bytes.len() {
        assert_eq!(read_stream(&bytes[..len]).unwrap_err().kind, Kind::Damage, "{len}");
    }
    assert!(read_stream(&[&bytes[..], &[0]].concat()).is_err());
    let encoded = blob.encode();
    for len in 0..encoded.len() {
        assert!(TreeBlob::parse(&encoded[..len]).is_err(), "{len}");
    }
    // A blob with a chunk that is missing, and with one that is not its own.
    assert!(load(&blob, &Chunks::default(), &mut |_| Ok(())).is_err());
    let others = [root(), file(b"a", 0), Event::End];
    let other = written(&others, &mut chunks).unwrap();
    let mut wrong = other.encode();
    wrong[16] += 1;
    let wrong = TreeBlob::parse(&wrong).unwrap();
    let error = load(&wrong, &chunks, &mut |_| Ok(())).unwrap_err();
    assert!(error.reason.contains("another number of entries"));
}

#[test]
fn the_bytes_of_a_tree_are_those_of_the_format() {
    let time = |secs, nanos| Timestamp { secs, nanos };
    let attributes = Attributes {
        perms: 0o644,
        uid: 1000,
        gid: 0,
        mtime: time(-1, 5),
        ctime: time(1, 0),
        atime: time(0, 300),
        xattrs: BTreeMap::from([(b"user.a".to_vec(), b"v".to_vec())]),
    };
    let digest = Digest::of(b"hello");
    let events = [
        root(),
        Event::File { name: trees::name(b"f"), attributes, size: 4101 },
        Event::Piece(Piece::Hole(4096)),
        Event::Piece(Piece::Chunk(ChunkRef { digest, len: 5 })),
        Event::Link { name: trees::name(b"g"), of: 1 },
        Event::End,
    ];
    let mut chunks = Chunks::default();
    let blob = written(&events, &mut chunks).unwrap();
    let mut bytes = b"jailfs-tree   1\n".to_vec();
    bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([2, 1, b'f', 0xa4, 3, 0xe8, 7, 0, 1, 5, 2, 0, 0, 0xac, 2]);
    bytes.extend([1, 6]);
    bytes.extend(b"user.a");
    bytes.extend([1, b'v', 0x85, 0x20, 0x80, 0x40, 11]);
    bytes.extend(digest.0);
    bytes.extend([8, 1, b'g', 1, 0]);
    assert_eq!(stream(&blob, &chunks), bytes);
    let head = [&b"jailfs-state  1\n"[..], &[3, 1, bytes.len() as u8]].concat();
    assert_eq!(blob.encode(), [&head[..], &Digest::of(&bytes).0].concat());
    assert_eq!(blob.digest(), Digest::of(&blob.encode()));
}
