//! Trees are read as they were written, and nothing else is read at all.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::Chunks;
use crate::error::{Kind, Result};
use crate::store::archive::tree_blob::{
    Attributes, Event, Piece, TreeBlob, TreeReader, TreeWriter, load,
};
use crate::store::archive::{ChunkRef, ChunkSource, Digest};
use crate::types::{FileKind, Name, Timestamp};

fn name_of(bytes: &[u8]) -> Name {
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
enum Node {
    Leaf(Seed),
    Dir(Attributes, BTreeMap<Vec<u8>, Node>),
}

fn node() -> impl Strategy<Value = Node> {
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
fn events_of(root: &Node) -> Vec<Event> {
    let mut events = Vec::new();
    let mut entries = Entries::default();
    match root {
        Node::Dir(attributes, below) => put_dir(None, attributes, below, &mut entries, &mut events),
        Node::Leaf((_, attributes, _)) => {
            put_dir(None, attributes, &BTreeMap::new(), &mut entries, &mut events);
        }
    }
    events
}

#[derive(Default)]
struct Entries {
    count: u64,
    linkable: Vec<u64>,
}

fn put_dir(
    name: Option<Name>,
    attributes: &Attributes,
    below: &BTreeMap<Vec<u8>, Node>,
    entries: &mut Entries,
    events: &mut Vec<Event>,
) {
    entries.count += 1;
    events.push(Event::Dir { name, attributes: attributes.clone() });
    for (name, node) in below {
        let name = name_of(name);
        match node {
            Node::Dir(attributes, below) => {
                put_dir(Some(name), attributes, below, entries, events);
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
    fn any_tree_is_read_as_it_was_written(root in node(), at in any::<prop::sample::Index>()) {
        let events = events_of(&root);
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
    Event::Dir { name: Some(name_of(name)), attributes: Attributes::default() }
}

fn file(name: &[u8], size: u64) -> Event {
    Event::File { name: name_of(name), attributes: Attributes::default(), size }
}

fn chunk(len: u32) -> Event {
    Event::Piece(Piece::Chunk(ChunkRef { digest: Digest::of(b""), len }))
}

#[test]
fn entries_against_the_rules_are_refused_with_their_path() {
    let hole = |len| Event::Piece(Piece::Hole(len));
    let link = |name: &[u8], of| Event::Link { name: name_of(name), of };
    let target = |target: &[u8]| Event::Symlink {
        name: name_of(b"l"),
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
    let deep: Vec<Event> =
        std::iter::once(root()).chain((0..4200).map(|_| dir(&[b'x'; 250]))).collect();
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
        Event::File { name: name_of(b"f"), attributes, size: 4101 },
        Event::Piece(Piece::Hole(4096)),
        Event::Piece(Piece::Chunk(ChunkRef { digest, len: 5 })),
        Event::Link { name: name_of(b"g"), of: 1 },
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
