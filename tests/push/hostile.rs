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
pub(super) struct Forged {
    pack: Vec<u8>,
    index: (u64, usize),
    pack_name: Digest,
    blob: Vec<u8>,
    entries: u64,
    /// The edits, and their number.
    edits: Option<(Vec<u8>, u64)>,
    /// The history, and the number of its checkpoints.
    pub(super) history: Option<(Vec<u8>, u64)>,
}

/// The attributes of a node: mode 0644 or 0755, owner 0, and three times.
fn attributes(out: &mut Vec<u8>) {
    put_number(out, 0o755);
    out.extend([0; 2 + 6 + 1]);
}

pub(super) fn file(out: &mut Vec<u8>, name: &[u8], size: u64) {
    out.push(2);
    put_bytes(out, name);
    attributes(out);
    put_number(out, size);
}

/// A stream with these bytes in the root directory.
pub(super) fn stream(entries: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = b"jailfs-tree   1\n".to_vec();
    out.push(1);
    put_bytes(&mut out, b"");
    attributes(&mut out);
    entries(&mut out);
    out.push(0);
    out
}

/// The tree blob of a stream.
pub(super) fn blob_of(stream: &[u8], entries: u64) -> Vec<u8> {
    let mut blob = b"jailfs-state  1\n".to_vec();
    put_number(&mut blob, entries);
    put_number(&mut blob, 1);
    put_number(&mut blob, stream.len() as u64);
    blob.extend(Digest::of(stream).0);
    blob
}

fn forge(stream: &[u8], entries: u64) -> Forged {
    forge_with(&[stream], entries)
}

/// An artifact whose state is the first stream, with the chunks of all of them.
pub(super) fn forge_with(streams: &[&[u8]], entries: u64) -> Forged {
    let mut pack = PackWriter::new(Vec::new()).unwrap();
    for bytes in streams.iter().chain([&&b"content"[..]]) {
        pack.add(Chunk::new(bytes).unwrap()).unwrap();
    }
    let (pack, pack_name, index) = pack.finish().unwrap();
    let blob = blob_of(streams[0], entries);
    let index = (HEAD + index.stored(), index.encode().len());
    Forged { pack, index, pack_name, blob, entries, edits: None, history: None }
}

/// An artifact with an empty file, edits of these files, and this list of them.
fn forge_edits(files: &[u8], entries: u64, list: impl FnOnce(&mut Vec<u8>)) -> Forged {
    let state = stream(|out| file(out, b"empty", 0));
    let mut edits = b"jailfs-edits  1\n".to_vec();
    put_bytes(&mut edits, &blob_of(files, entries));
    list(&mut edits);
    Forged { edits: Some((edits, 1)), ..forge_with(&[&state, files], 2) }
}

/// An edit: number, seconds, nanoseconds, kind, files before it.
type Edit = (u64, u64, u64, u64, u64);

/// The edits of a path in a list of edits.
fn path(out: &mut Vec<u8>, path: &[u8], (next, undone_to): (u64, u64), edits: &[Edit]) {
    put_bytes(out, path);
    put_number(out, next);
    put_number(out, undone_to);
    put_number(out, edits.len() as u64);
    for (number, secs, nanos, kind, files) in edits {
        for value in [number, secs, nanos, kind, files] {
            put_number(out, *value);
        }
    }
}

impl Forged {
    pub(super) fn manifest(&self) -> String {
        let (pack, blob) = (BlobDigest::of(&self.pack), BlobDigest::of(&self.blob));
        let (start, len) = self.index;
        let edits = self.edits.iter().map(|(bytes, count)| {
            format!(
                r#"{{"mediaType":"application/vnd.jailfs.edits.v1","digest":"{}","size":{},
                "annotations":{{"vnd.jailfs.edits":"{count}"}}}},"#,
                BlobDigest::of(bytes),
                bytes.len(),
            )
        });
        let edits: String = edits.collect();
        let history = self.history.iter().map(|(bytes, count)| {
            format!(
                r#"{{"mediaType":"application/vnd.jailfs.history.v1","digest":"{}","size":{},
                "annotations":{{"vnd.jailfs.checkpoints":"{count}"}}}},"#,
                BlobDigest::of(bytes),
                bytes.len(),
            )
        });
        let history: String = history.collect();
        format!(
            r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}",
            "artifactType":"application/vnd.jailfs.checkpoint.v1",
            "config":{{"mediaType":"application/vnd.jailfs.tree.v1","digest":"{blob}","size":{}}},
            "layers":[{history}{edits}{{
            "mediaType":"application/vnd.jailfs.pack.v1","digest":"{pack}","size":{},"annotations":
                {{"vnd.jailfs.pack":"{}","vnd.jailfs.index":"{start}+{len}"}}}}],
            "annotations":{{"vnd.jailfs.entries":"{}","vnd.jailfs.tree":"{}"}}}}"#,
            self.blob.len(),
            self.pack.len(),
            self.pack_name,
            self.entries,
            Digest::of(&self.blob),
        )
    }
}

pub(super) struct World {
    pub(super) registry: Partner,
    pub(super) live: Live,
    pub(super) before: Vec<String>,
}

impl World {
    pub(super) fn push(&self, forged: &Forged, manifest: &str) {
        let reference = format!("{}/repo:x", self.registry.address);
        let options = Options { plain_http: PlainHttp::Loopback, ..Options::default() };
        let reference = Reference::parse(&reference).unwrap();
        let repository = Repository::open(&reference, &options).unwrap();
        let more = forged.edits.iter().chain(&forged.history).map(|(bytes, _)| bytes);
        for blob in [&forged.pack, &forged.blob].into_iter().chain(more) {
            let mut source = Cursor::new(blob);
            let descriptor = Descriptor::of(blob);
            repository.push_blob(&descriptor, &mut source, None, &Meter::silent()).unwrap();
        }
        let tag = Version::Tag("x".to_owned());
        repository.push_manifest(&tag, MANIFEST, manifest.as_bytes()).unwrap();
    }

    /// A pull fails with this text, in time and without a change.
    pub(super) fn refuses(&self, what: &str, part: &str) {
        let reference = format!("{}/repo:x", self.registry.address);
        self.refuses_pull(&["pull", &reference, "--plain-http"], what, part);
    }

    /// The same of a pull with edits.
    fn refuses_edits(&self, what: &str, part: &str) {
        let reference = format!("{}/repo:x", self.registry.address);
        self.refuses_pull(&["pull", &reference, "--edits", "--plain-http"], what, part);
        assert_eq!(self.live.sh("ls .jailfs/history"), "", "{what}");
    }

    fn refuses_pull(&self, words: &[&str], what: &str, part: &str) {
        let output = Machine::new().try_run(&self.live, words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(matches!(output.status.code(), Some(1 | 3 | 4)), "{what}: {said}");
        assert!(said.contains(part), "{what}: {said}");
        assert_same(&self.before, &self.live.snapshot(), what);
    }
}

#[test]
fn hostile_artifacts_are_refused_and_change_nothing() {
    let live = Live::new("mkdir d; echo a > d/a; echo b > b; ln -s /etc link");
    let before = live.snapshot();
    let world = World { registry: Partner::start(None, None), live, before };
    streams(&world);
    thin(&world);
    documents(&world);
    edits(&world);
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

/// Entries that rely on files of the base which they must not reach, or which are others.
fn thin(world: &World) {
    let digest = Digest::of(b"another");
    let table: [(&str, &str, &[u8], u64); 7] = [
        ("a base path that climbs", "'../../etc/passwd'", b"../../etc/passwd", 1),
        ("an absolute base path", "'/etc/passwd'", b"/etc/passwd", 1),
        ("an empty base path", "''", b"", 1),
        ("a base path through a link", "'link/passwd' is missing", b"link/passwd", 1),
        ("a base directory as a file", "'d' is no file", b"d", 1),
        ("a base file that is missing", "'d/none' is missing", b"d/none", 1),
        ("a base file of 2^63 bytes", "2^63", b"b", 1 << 63),
    ];
    for (what, part, base, size) in table {
        let forged = forge(&stream(|out| base_file(out, base, size, digest)), 2);
        let manifest = forged.manifest();
        let is_thin = r#""annotations":{"vnd.jailfs.thin":"true","vnd.jailfs.entries""#;
        let thin = manifest.replace(r#""annotations":{"vnd.jailfs.entries""#, is_thin);
        assert_ne!(thin, manifest);
        // An entry of this kind is refused whether or not the manifest announces it.
        for manifest in [&thin, &manifest] {
            world.push(&forged, manifest);
            world.refuses(what, part);
        }
    }
}

fn base_file(out: &mut Vec<u8>, base: &[u8], size: u64, digest: Digest) {
    out.push(9);
    put_bytes(out, b"a");
    attributes(out);
    put_number(out, size);
    put_bytes(out, base);
    out.extend(digest.0);
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

type List = fn(&mut Vec<u8>);

/// A list of edits with one path.
fn single(out: &mut Vec<u8>, name: &[u8], numbers: (u64, u64), edits: &[Edit]) {
    put_number(out, 1);
    path(out, name, numbers, edits);
}

/// Edit histories with a flaw.
fn edits(world: &World) {
    edit_numbers(world);
    edit_lists(world);
    edit_files(world);
    edit_documents(world);
}

/// Paths and numbers that no store has.
fn edit_numbers(world: &World) {
    const EDIT: Edit = (1, 0, 0, 0, 0);
    type Row<'a> = (&'a str, &'a str, &'a [u8], (u64, u64), &'a [Edit]);
    let table: [Row<'_>; 11] = [
        ("a path that climbs", "'../x' is not a path", b"../x", (2, 0), &[EDIT]),
        ("an absolute path", "'/x' is not a path", b"/x", (2, 0), &[EDIT]),
        ("the root", "is not a path", b"", (2, 0), &[EDIT]),
        ("an edit twice", "'x': edit 1 does not", b"x", (2, 0), &[EDIT; 2]),
        ("no edits", "'x': no edits", b"x", (2, 0), &[]),
        ("an undo to nothing", "'x': an undo", b"x", (9, 5), &[EDIT]),
        ("edit 0", "'x': edit 0", b"x", (2, 0), &[(0, 0, 0, 0, 0)]),
        ("a huge number", "'x': the number", b"x", (1 << 32, 0), &[EDIT]),
        ("too many nanoseconds", "'x': the nano", b"x", (2, 0), &[(1, 0, 1_000_000_000, 0, 0)]),
        ("a kind of no edit", "'x': the kind", b"x", (2, 0), &[(1, 0, 0, 7, 0)]),
        ("no file", "another number of files", b"x", (2, 0), &[(1, 0, 0, 0, 1)]),
    ];
    for (what, part, name, numbers, edits) in table {
        let list = |out: &mut Vec<u8>| single(out, name, numbers, edits);
        let forged = forge_edits(&stream(|_| {}), 1, list);
        world.push(&forged, &forged.manifest());
        world.refuses_edits(what, part);
    }
}

/// Lists that are cut, endless, or in another order.
fn edit_lists(world: &World) {
    let table: [(&str, &str, List); 6] = [
        ("too many paths", "the number of paths is 300000", |out| {
            put_number(out, 300_000);
            out.extend(vec![0; 1_500_000]);
        }),
        ("a path twice", "'x' does not ascend", |out| {
            put_number(out, 2);
            path(out, b"x", (2, 0), &[(1, 0, 0, 0, 0)]);
            path(out, b"x", (2, 0), &[(1, 0, 0, 0, 0)]);
        }),
        ("endless paths", "the number of paths", |out| put_number(out, u64::MAX)),
        ("endless edits", "'x': the number of edits", |out| {
            put_number(out, 1);
            put_bytes(out, b"x");
            [2, 0, u64::MAX, 0, 0, 0].iter().for_each(|value| put_number(out, *value));
        }),
        ("an endless path", "path 1: the length", |out| {
            put_number(out, 1);
            put_number(out, u64::MAX);
            out.extend([0; 64]);
        }),
        ("no list", "its end is missing", |_| {}),
    ];
    for (what, part, list) in table {
        let forged = forge_edits(&stream(|_| {}), 1, list);
        world.push(&forged, &forged.manifest());
        world.refuses_edits(what, part);
    }
}

/// A list with one file.
fn with_file(out: &mut Vec<u8>) {
    single(out, b"x", (2, 0), &[(1, 0, 0, 0, 1)]);
}

/// Files that are none, or have content that is not there.
fn edit_files(world: &World) {
    let chunk = |out: &mut Vec<u8>, len: u64, bytes: &[u8]| {
        put_number(out, len << 1 | 1);
        out.extend(Digest::of(bytes).0);
    };
    let trees = [
        ("a file of another name", "file 0", stream(|out| file(out, b"x", 0)), 2),
        (
            "a link as the file",
            "file 0",
            stream(|out| {
                out.push(3);
                put_bytes(out, b"00000000");
                attributes(out);
                put_bytes(out, b"/etc/passwd");
            }),
            2,
        ),
        (
            "a directory as the file",
            "file 0",
            stream(|out| {
                out.push(1);
                put_bytes(out, b"00000000");
                attributes(out);
                out.push(0);
            }),
            2,
        ),
        ("fewer files than entries", "number of entries", stream(|_| {}), 2),
        (
            "a chunk that is nowhere",
            "no pack of the artifact",
            stream(|out| {
                file(out, b"00000000", 3);
                chunk(out, 3, b"abc");
            }),
            2,
        ),
        (
            "a chunk of another length",
            "are others",
            stream(|out| {
                file(out, b"00000000", 3);
                chunk(out, 3, b"content");
            }),
            2,
        ),
        (
            "a file larger than any",
            "a file has at most",
            stream(|out| {
                file(out, b"00000000", (1 << 62) + (1 << 61));
                put_number(out, ((1 << 62) + (1 << 61)) << 1);
            }),
            2,
        ),
    ];
    for (what, part, files, entries) in trees {
        let forged = forge_edits(&files, entries, with_file);
        world.push(&forged, &forged.manifest());
        world.refuses_edits(what, part);
    }
}

/// Manifests with a flaw in what they say of the edits.
fn edit_documents(world: &World) {
    let files = stream(|out| file(out, b"00000000", 0));
    let good = forge_edits(&files, 2, with_file);
    let manifest = good.manifest();
    let (bytes, _) = good.edits.as_ref().unwrap();
    let size = format!("\"size\":{},\n                \"annotations\"", bytes.len());
    for (what, part, from, to) in [
        (
            "another number of edits",
            "the 2 edits",
            "\"vnd.jailfs.edits\":\"1\"",
            "\"vnd.jailfs.edits\":\"2\"",
        ),
        ("no number of edits", "without a number", "\"vnd.jailfs.edits\"", "\"x\""),
        ("gigantic edits", "more than 128 MiB", &size, "\"size\":1000000000000,\"annotations\""),
    ] {
        assert!(manifest.contains(from), "{what}: {manifest}");
        world.push(&good, &manifest.replace(from, to));
        world.refuses_edits(what, part);
    }
    let state = BlobDigest::of(&good.blob).to_string();
    let from = BlobDigest::of(bytes).to_string();
    let swapped = manifest
        .replace(&from, &state)
        .replace(&size, &format!("\"size\":{},\"annotations\"", good.blob.len()));
    world.push(&good, &swapped);
    world.refuses_edits("edits that are none", "not an edit history");
}

#[test]
fn edits_of_a_foreign_artifact_with_extreme_values_are_shown_and_undone() {
    let live = Live::new("mkdir d; echo b > b");
    let world = World { registry: Partner::start(None, None), live, before: Vec::new() };
    let files = stream(|out| {
        file(out, b"00000000", 1 << 40);
        put_number(out, 1 << 41);
        file(out, b"00000001", 7);
        put_number(out, 7 << 1 | 1);
        out.extend(Digest::of(b"content").0);
    });
    let forged = forge_edits(&files, 3, |out| {
        put_number(out, 3);
        path(out, b"b", (1 << 31, 0), &[((1 << 31) - 1, u64::MAX, 999_999_999, 6, 1)]);
        path(out, b"d", (2, 0), &[(1, u64::MAX - 1, 0, 5, 1)]);
        path(out, b"no/such/path", (2, 0), &[(1, 0, 0, 0, 0)]);
    });
    let forged = Forged { edits: forged.edits.map(|(bytes, _)| (bytes, 3)), ..forged };
    world.push(&forged, &forged.manifest());
    let reference = format!("{}/repo:x", world.registry.address);
    Machine::new().run(&world.live, &["pull", &reference, "--edits", "--plain-http"]);
    assert_eq!(world.live.sh("ls"), "empty\n");
    world.live.sh("cat .jailfs/history/d/1 | grep content; find .jailfs/history -ls");
    for name in ["b", "d", "no/such/path"] {
        let said = world.live.jailfs(&["history", name]);
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    world.live.jailfs(&["undo", "b"]);
    assert_eq!(world.live.sh("stat -c %s b"), format!("{}\n", 1u64 << 40));
    world.live.sh("echo more > b; echo again > b");
    world.live.jailfs(&["undo", "d"]);
    assert_eq!(world.live.read("d"), "content");
    world.live.jailfs(&["check", "--read-data"]);
}
