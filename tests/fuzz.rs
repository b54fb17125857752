//! Runs the fuzz targets on the stable toolchain, for half a minute each: bytes from a seed, and
//! mutations of bytes that did something.
//!
//! `JAILFS_FUZZ_SECONDS=N` runs each target that long, and `JAILFS_FUZZ_SEED=N` chooses the bytes.
//! A failure prints the seed and the input. With a nightly toolchain, `cargo +nightly fuzz run
//! journal` covers more.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking, and prints its figures"
)]

#[path = "../fuzz/src/archive.rs"]
mod archive;
#[path = "../fuzz/src/journal.rs"]
mod journal;
#[path = "../fuzz/src/links.rs"]
mod links;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "model/rng.rs"]
mod rng;
#[path = "../fuzz/src/tar.rs"]
mod tar;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use jailfs::error::Result;
use jailfs::internals::store::archive::edits::{Edits, PastEdit, PathEdits, file_name};
use jailfs::internals::store::archive::history::{Facts, History, Past};
use jailfs::internals::store::archive::tree_blob::{Attributes, Event, Piece, TreeWriter};
use jailfs::internals::store::archive::writer::PackWriter;
use jailfs::internals::store::archive::{Chunk, ChunkRef, ChunkSink, Digest};
use jailfs::internals::store::io::{codec, log};
use jailfs::internals::store::record::Record;
use jailfs::internals::tar::{Entry, Kind, Writer};
use jailfs::internals::tree::{Body, Dentry, Edit, Meta, Node, Source};
use jailfs::types::{ByteRange, FileKind, Ino, LayerId, Name, Timestamp, TreePath};
use rng::Rng;

/// Inputs that are kept as material for mutations.
const POOL: usize = 256;
/// The longest input, in bytes.
const LONGEST: usize = 4096;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Runs a target on mutations of `seeds` until the time is over.
fn fuzz(name: &str, seeds: Vec<Vec<u8>>, run: fn(&[u8])) {
    let seed = number("JAILFS_FUZZ_SEED", 1);
    let until = Instant::now() + Duration::from_secs(number("JAILFS_FUZZ_SECONDS", 30));
    let mut rng = Rng::new(seed);
    let mut pool = seeds;
    let mut inputs = 0u64;
    while Instant::now() < until {
        let input = mutated(&mut rng, &pool);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&input))) {
            eprintln!("{name}: JAILFS_FUZZ_SEED={seed}, input {inputs}: {input:02x?}");
            resume_unwind(panic);
        }
        inputs += 1;
        // Without a measure of coverage, a walk through the inputs is as good as any.
        if rng.one_in(8) {
            match pool.len() < POOL {
                true => pool.push(input),
                false => {
                    let at = rng.below(POOL as u64) as usize;
                    pool[at] = input;
                }
            }
        }
    }
    eprintln!("{name}: {inputs} inputs");
    assert!(inputs > 1000, "only {inputs} inputs");
}

/// One of the pool, changed at one to eight places.
fn mutated(rng: &mut Rng, pool: &[Vec<u8>]) -> Vec<u8> {
    let pick = |rng: &mut Rng| pool[rng.below(pool.len() as u64) as usize].clone();
    let mut bytes = pick(rng);
    for _ in 0..=rng.below(8) {
        let at = rng.below(bytes.len() as u64 + 1) as usize;
        match rng.below(7) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, rng.below(256) as u8),
            2 => bytes.extend((0..rng.below(32)).map(|_| rng.below(256) as u8)),
            3 => {
                let other = pick(rng);
                let from = rng.below(other.len() as u64 + 1) as usize;
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            4 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            5 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xfb, 0xfd, 0xff][at % 7],
            _ if at < bytes.len() => bytes[at] = rng.below(256) as u8,
            _ => {}
        }
    }
    bytes.truncate(LONGEST);
    bytes
}

/// The edits of a small tree: a directory, a file with content in it, a link, and some changes.
fn edits() -> Vec<Edit> {
    let name = |text: &str| Name::new(text.as_bytes()).unwrap();
    let time = Timestamp { secs: 1_700_000_000, nanos: 5 };
    let meta = Meta {
        mode: 0o100_644,
        uid: 1000,
        gid: 1000,
        nlink: 1,
        rdev: 0,
        atime: time,
        mtime: time,
        ctime: time,
    };
    let put =
        |ino, body| Edit::Put { ino: Ino(ino), node: Box::new(Node { meta, xattrs: None, body }) };
    let dentry = |dir, text, ino| Edit::Dentry {
        dir: Ino(dir),
        name: name(text),
        to: Some(Dentry::Child { ino: Ino(ino), hides: None }),
    };
    let file = Ino(12);
    vec![
        put(1, Body::Dir { base: None }),
        put(11, Body::Dir { base: None }),
        dentry(1, "dir", 11),
        put(12, Body::File { size: 9000, origin: None }),
        dentry(11, "file", 12),
        Edit::Map {
            ino: file,
            range: ByteRange::at(0, 9000),
            to: Some(Source::Pool { layer: LayerId(1), offset: 4096 }),
        },
        Edit::Map { ino: file, range: ByteRange::at(4096, 100), to: None },
        Edit::Xattr { ino: file, name: b"user.x".to_vec(), value: Some(b"y".to_vec()) },
        Edit::Resize { ino: file, size: 5000 },
        put(13, Body::Symlink { target: b"../dir/file".to_vec() }),
        dentry(1, "link", 13),
        Edit::Meta { ino: Ino(11), meta },
        Edit::Dentry { dir: Ino(1), name: name("link"), to: None },
        Edit::Remove { ino: Ino(13) },
    ]
}

/// A whole journal, and the same records as payloads, each behind its length.
fn journals() -> Vec<Vec<u8>> {
    let records: Vec<Record> = std::iter::once(Record::Edits(edits()))
        .chain(edits().into_iter().map(|edit| Record::Edits(vec![edit])))
        .chain([Record::Synced, Record::SyncedTo(3), Record::Compact])
        .collect();
    let payload = |record: &Record| {
        let payload = codec::encode(record).unwrap();
        [&[payload.len().min(255) as u8], &payload[..payload.len().min(255)]].concat()
    };
    let payloads: Vec<u8> = records[1..].iter().flat_map(payload).collect();
    vec![log::frames(records.iter()).unwrap(), payloads]
}

/// A small pack, and its frames and its index behind the length of the frames.
fn packs() -> Vec<Vec<u8>> {
    let mut writer = PackWriter::new(Vec::new()).unwrap();
    for bytes in [&b"first"[..], &[7; 300], b"third"] {
        writer.add(Chunk::new(bytes).unwrap()).unwrap();
        writer.end_frame().unwrap();
    }
    let (bytes, _, index) = writer.finish().unwrap();
    let frames = &bytes[16..16 + usize::try_from(index.stored()).unwrap()];
    let parts = [&[frames.len() as u8], frames, &index.encode()].concat();
    vec![bytes, parts]
}

/// Keeps the bytes of all chunks, in order.
struct Stream(Vec<u8>);

impl ChunkSink for Stream {
    fn put(&mut self, chunk: Chunk<'_>) -> Result<()> {
        self.0.extend_from_slice(chunk.bytes());
        Ok(())
    }
}

/// A tree with an entry of each kind, and its blob.
fn trees() -> Vec<Vec<u8>> {
    let name = |text: &str| Name::new(text.as_bytes()).unwrap();
    let mtime = Timestamp { secs: -3, nanos: 5 };
    let xattrs = [(b"user.x".to_vec(), b"y".to_vec())].into();
    let attributes = || Attributes { perms: 0o644, uid: 1000, mtime, ..Attributes::default() };
    let special = |text, kind, rdev| Event::Special {
        name: name(text),
        attributes: attributes(),
        kind,
        rdev,
    };
    let piece = ChunkRef { digest: Digest::of(b"hello"), len: 5 };
    let events = [
        Event::Dir { name: None, attributes: attributes() },
        special("c", FileKind::Char, 5),
        Event::Dir { name: Some(name("d")), attributes: Attributes { xattrs, ..attributes() } },
        Event::File { name: name("f"), attributes: attributes(), size: 4101 },
        Event::Piece(Piece::Hole(4096)),
        Event::Piece(Piece::Chunk(piece)),
        special("g", FileKind::Fifo, 0),
        Event::End,
        Event::Link { name: name("e"), of: 3 },
        Event::Symlink { name: name("s"), attributes: attributes(), target: b"d/f".to_vec() },
        Event::BaseFile {
            name: name("t"),
            attributes: attributes(),
            size: 5,
            path: TreePath::parse(b"d/base").unwrap(),
            digest: Digest::of(b"pieces"),
        },
        Event::End,
    ];
    let (mut writer, mut stream) = (TreeWriter::default(), Stream(Vec::new()));
    events.iter().try_for_each(|event| writer.write(event, &mut stream)).unwrap();
    let blob = writer.finish(&mut stream).unwrap();
    let facts = Facts { name: Some("green".to_owned()), ..Facts::default() };
    let past = Past::new(facts, &blob, &mut |_| Ok::<_, ()>(())).unwrap();
    let history = History { checkpoints: vec![past.clone(), past] };
    vec![
        stream.0,
        blob.encode(),
        history.encode().unwrap(),
        edit_histories(&mut Stream(Vec::new())),
    ]
}

/// A document with two edits of a path.
fn edit_histories(sink: &mut Stream) -> Vec<u8> {
    let mut writer = TreeWriter::default();
    let file =
        Event::File { name: file_name(0).unwrap(), attributes: Attributes::default(), size: 0 };
    let root = Event::Dir { name: None, attributes: Attributes::default() };
    [root, file, Event::End].iter().try_for_each(|event| writer.write(event, sink)).unwrap();
    let edit = |number, has_file| PastEdit {
        number,
        time: Timestamp { secs: 1, nanos: 2 },
        kind: 1,
        has_file,
    };
    let path = TreePath::parse(b"d/f").unwrap();
    let edits = vec![edit(5, true), edit(3, false)];
    let path = PathEdits { path, next: 6, undone_to: Some(3), edits };
    Edits { files: writer.finish(sink).unwrap(), paths: vec![path] }.encode().unwrap()
}

#[test]
fn no_bytes_of_a_pack_do_harm() {
    fuzz("pack", packs(), archive::pack);
}

#[test]
fn no_bytes_of_a_tree_do_harm() {
    fuzz("tree", trees(), archive::tree);
}

#[test]
fn no_bytes_of_a_journal_do_harm() {
    fuzz("journal", journals(), journal::run);
}

/// Archives with entries of all kinds.
fn archives() -> Vec<Vec<u8>> {
    let entry = |kind, path: &[u8]| Entry {
        path: path.to_vec(),
        kind,
        mode: 0o644,
        uid: 1 << 22,
        gid: 5,
        mtime: Timestamp { secs: -2, nanos: 5 },
        xattrs: [(b"user.a=b%".to_vec(), b"v\0".to_vec())].into(),
    };
    let data = Some(vec![ByteRange::at(0, 5), ByteRange::at(700, 3)]);
    let kinds = [
        Kind::Dir,
        Kind::Fifo,
        Kind::Char { major: 1, minor: 3 },
        Kind::Link { target: vec![b'l'; 101] },
        Kind::Symlink { target: b"t".to_vec() },
        Kind::File { size: 10, data: None },
        Kind::File { size: 9000, data },
    ];
    let archive = |kind: &Kind| {
        let entry = entry(kind.clone(), b"n\xff");
        let mut writer = Writer::new(Vec::new());
        writer.entry(&entry).unwrap();
        writer.data(&vec![1; entry.stored() as usize]).unwrap();
        let mut archive = writer.finish().unwrap();
        archive.truncate(LONGEST);
        archive
    };
    kinds.iter().map(archive).collect()
}

#[test]
fn no_bytes_of_an_archive_do_harm() {
    fuzz("tar", archives(), tar::run);
}

#[test]
fn no_text_of_a_link_leads_out() {
    let seeds = (0..16).map(|seed: u8| vec![seed; 64]).collect();
    fuzz("links", seeds, links::run);
}
