//! Artifacts that no honest program pushes. Each one is refused, and nothing has changed.

use std::io::Cursor;

use jailfs::internals::registry::{
    Descriptor, Digest as BlobDigest, Meter, Options, PlainHttp, Reference, Repository, Version,
};
use jailfs::internals::store::archive::bytes::{put_bytes, put_number};
use jailfs::internals::store::archive::writer::{HEAD, PackWriter};
use jailfs::internals::store::archive::{Chunk, Digest};

use super::Machine;
use super::harness::{Live, assert_same};
use super::partner::Partner;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// An artifact as bytes.
struct Forged {
    pack: Vec<u8>,
    index: (u64, usize),
    pack_name: Digest,
    blob: Vec<u8>,
    entries: u64,
}

/// The attributes of a node: mode 0644 or 0755, owner 0, and three times.
fn attributes(out: &mut Vec<u8>) {
    put_number(out, 0o755);
    out.extend([0; 2 + 6 + 1]);
}

fn file(out: &mut Vec<u8>, name: &[u8], size: u64) {
    out.push(2);
    put_bytes(out, name);
    attributes(out);
    put_number(out, size);
}

/// A stream with these bytes in the root directory.
fn stream(entries: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = b"jailfs-tree   1\n".to_vec();
    out.push(1);
    put_bytes(&mut out, b"");
    attributes(&mut out);
    entries(&mut out);
    out.push(0);
    out
}

fn forge(stream: &[u8], entries: u64) -> Forged {
    let mut pack = PackWriter::new(Vec::new()).unwrap();
    let chunk = Chunk::new(stream).unwrap();
    pack.add(chunk).unwrap();
    pack.add(Chunk::new(b"content").unwrap()).unwrap();
    let (pack, pack_name, index) = pack.finish().unwrap();
    let mut blob = b"jailfs-state  1\n".to_vec();
    put_number(&mut blob, entries);
    put_number(&mut blob, 1);
    put_number(&mut blob, stream.len() as u64);
    blob.extend(chunk.digest().0);
    let index = (HEAD + index.stored(), index.encode().len());
    Forged { pack, index, pack_name, blob, entries }
}

impl Forged {
    fn manifest(&self) -> String {
        let (pack, blob) = (BlobDigest::of(&self.pack), BlobDigest::of(&self.blob));
        let (start, len) = self.index;
        format!(
            r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}",
            "artifactType":"application/vnd.jailfs.checkpoint.v1",
            "config":{{"mediaType":"application/vnd.jailfs.tree.v1","digest":"{blob}","size":{}}},
            "layers":[{{"mediaType":"application/vnd.jailfs.pack.v1","digest":"{pack}","size":{},
            "annotations":{{"vnd.jailfs.pack":"{}","vnd.jailfs.index":"{start}+{len}"}}}}],
            "annotations":{{"vnd.jailfs.entries":"{}","vnd.jailfs.tree":"{}"}}}}"#,
            self.blob.len(),
            self.pack.len(),
            self.pack_name,
            self.entries,
            Digest::of(&self.blob),
        )
    }
}

struct World {
    registry: Partner,
    live: Live,
    before: Vec<String>,
}

impl World {
    fn push(&self, forged: &Forged, manifest: &str) {
        let reference = format!("{}/repo:x", self.registry.address);
        let options = Options { plain_http: PlainHttp::Loopback, ..Options::default() };
        let reference = Reference::parse(&reference).unwrap();
        let repository = Repository::open(&reference, &options).unwrap();
        for blob in [&forged.pack, &forged.blob] {
            let mut source = Cursor::new(blob);
            let descriptor = Descriptor::of(blob);
            repository.push_blob(&descriptor, &mut source, None, &Meter::silent()).unwrap();
        }
        let tag = Version::Tag("x".to_owned());
        repository.push_manifest(&tag, MANIFEST, manifest.as_bytes()).unwrap();
    }

    /// A pull fails with this text, in time and without a change.
    fn refuses(&self, what: &str, part: &str) {
        let reference = format!("{}/repo:x", self.registry.address);
        let words = ["pull", &reference, "--plain-http"];
        let output = Machine::new().try_run(&self.live, &words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(matches!(output.status.code(), Some(1 | 4)), "{what}: {said}");
        assert!(said.contains(part), "{what}: {said}");
        assert_same(&self.before, &self.live.snapshot(), what);
    }
}

#[test]
fn hostile_artifacts_are_refused_and_change_nothing() {
    let live = Live::new("mkdir d; echo a > d/a; echo b > b");
    let before = live.snapshot();
    let world = World { registry: Partner::start(None, None), live, before };
    streams(&world);
    documents(&world);
    // The forger can also be honest: without a flaw, the artifact is pulled.
    let good = forge(&stream(|out| file(out, b"empty", 0)), 2);
    world.push(&good, &good.manifest());
    let reference = format!("{}/repo:x", world.registry.address);
    Machine::new().run(&world.live, &["pull", &reference, "--plain-http"]);
    assert_eq!(world.live.sh("ls"), "empty\n");
}

/// Descriptions with a flaw.
fn streams(world: &World) {
    let link = |out: &mut Vec<u8>, name: &[u8], of: u64| {
        out.push(8);
        put_bytes(out, name);
        put_number(out, of);
    };
    let chunk = |out: &mut Vec<u8>, bytes: &[u8]| {
        put_number(out, (bytes.len() as u64) << 1 | 1);
        out.extend(Digest::of(bytes).0);
    };
    let table = [
        ("a name that climbs", "'..' is not a name", stream(|out| file(out, b"..", 0)), 2),
        ("a name with a path", "is not a name", stream(|out| file(out, b"../../x", 0)), 2),
        ("an absolute name", "is not a name", stream(|out| file(out, b"/etc/x", 0)), 2),
        (
            "a name twice",
            "does not ascend",
            stream(|out| {
                file(out, b"a", 0);
                file(out, b"a", 0);
            }),
            3,
        ),
        ("a hard link to itself", "a hard link to entry 1", stream(|out| link(out, b"a", 1)), 2),
        ("a hard link to the root", "a hard link to entry 0", stream(|out| link(out, b"a", 0)), 2),
        ("a hole of 2^63", "2^63", stream(|out| file(out, b"a", 1 << 63)), 2),
        (
            "a file larger than any",
            "a file has at most",
            stream(|out| {
                file(out, b"a", (1 << 62) + (1 << 61));
                put_number(out, ((1 << 62) + (1 << 61)) << 1);
            }),
            2,
        ),
        (
            "a chunk that is nowhere",
            "no pack of the artifact has it",
            stream(|out| {
                file(out, b"a", 3);
                chunk(out, b"abc");
            }),
            2,
        ),
        (
            "a chunk of another length",
            "are others",
            stream(|out| {
                file(out, b"a", 3);
                put_number(out, 3 << 1 | 1);
                out.extend(Digest::of(b"content").0);
            }),
            2,
        ),
        ("more entries than there are", "number of entries", stream(|_| {}), 1_000_000),
        ("an unknown kind", "unknown kind 99", stream(|out| out.extend([99, 1, b'a'])), 2),
        ("a file without content", "content beyond", stream(|out| file(out, b"a", 9)), 2),
        ("an end too early", "its end is missing", stream(|_| {})[..29].to_vec(), 1),
        ("bytes after the end", "after the end", [stream(|_| {}), vec![0]].concat(), 1),
    ];
    for (what, part, stream, entries) in table {
        let forged = forge(&stream, entries);
        world.push(&forged, &forged.manifest());
        world.refuses(what, part);
    }
}

/// Manifests, blobs and packs with a flaw.
fn documents(world: &World) {
    let honest = || forge(&stream(|out| file(out, b"a", 0)), 2);
    let good = honest();
    let manifest = good.manifest();
    let name = good.pack_name.to_string();
    let pack_size = format!("\"size\":{}", good.pack.len());
    for (what, part, from, to) in [
        ("an image", "it is no checkpoint", "vnd.jailfs.checkpoint.v1", "vnd.oci.other"),
        ("a tree of another name", "not the one", "\"vnd.jailfs.tree\":\"", "\"x\":\""),
        ("an index of another name", "not the one", name.as_str(), &"0".repeat(64)),
        ("a gigantic pack", "place of its index", &pack_size, "\"size\":1000000000000"),
        ("entries that are no number", "number of entries", "\"2\"", "\"-2\""),
        (
            "a history that is none",
            "not a history",
            "\"layers\":[",
            &format!(
                r#""layers":[{{"mediaType":"application/vnd.jailfs.history.v1","digest":"{}",
                "size":{},"annotations":{{"vnd.jailfs.checkpoints":"1"}}}},"#,
                BlobDigest::of(&good.blob),
                good.blob.len(),
            ),
        ),
    ] {
        assert!(manifest.contains(from), "{what}");
        world.push(&good, &manifest.replace(from, to));
        let part = if what == "a tree of another name" { "malformed digest" } else { part };
        world.refuses(what, part);
    }
    for at in [HEAD as usize, good.index.0 as usize - 1] {
        let mut flipped = honest();
        flipped.pack[at] ^= 1;
        world.push(&flipped, &flipped.manifest());
        world.refuses("a flipped bit in a frame", "not those that the index names");
    }
    let mut flipped = honest();
    flipped.pack[good.index.0 as usize + 3] ^= 1;
    world.push(&flipped, &flipped.manifest());
    world.refuses("a flipped bit in an index", "its index is not the one");
    let mut huge = honest();
    huge.blob = b"jailfs-state  1\n".to_vec();
    put_number(&mut huge.blob, 2);
    put_number(&mut huge.blob, u64::MAX);
    world.push(&huge, &huge.manifest());
    world.refuses("a blob with endless chunks", "the number of chunks");
    let mut other = honest();
    other.blob = b"something else".to_vec();
    world.push(&other, &other.manifest());
    world.refuses("a blob of another form", "its end is missing");
}
