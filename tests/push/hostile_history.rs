//! Histories that no honest program pushes. Each one is refused with the entry in the error, or has
//! extreme values that are shown.

use jailfs::internals::store::archive::Digest;
use jailfs::internals::store::archive::bytes::{put_bytes, put_number, put_signed};

use super::Machine;
use super::harness::{Live, text};
use super::hostile::{Forged, World, blob_of, file, forge_with, stream};
use super::partner::Partner;

const MAGIC: &[u8] = b"jailfs-history1\n";
const MIB: usize = 1 << 20;

/// A checkpoint of a history.
#[derive(Clone)]
struct Past {
    name: Vec<u8>,
    message: Vec<u8>,
    head: Vec<u8>,
    secs: i64,
    nanos: u64,
    tree: Digest,
    /// The length of each chunk of the tree blob, and the chunk.
    chunks: Vec<(u64, Digest)>,
}

impl Past {
    /// A checkpoint with a tree blob of one chunk.
    fn new(name: &[u8], blob: &[u8]) -> Past {
        let (name, message, head) = (name.to_vec(), b"message".to_vec(), b"main".to_vec());
        let chunks = vec![(blob.len() as u64, Digest::of(blob))];
        Past { name, message, head, secs: 7, nanos: 0, tree: Digest::of(blob), chunks }
    }

    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(out, &self.name);
        put_bytes(out, &self.message);
        put_bytes(out, &self.head);
        put_signed(out, self.secs);
        put_number(out, self.nanos);
        out.extend(self.tree.0);
        put_number(out, self.chunks.len() as u64);
        for (len, digest) in &self.chunks {
            put_number(out, *len);
            out.extend(digest.0);
        }
    }
}

/// A history of these checkpoints.
fn document(pasts: &[Past]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    put_number(&mut out, pasts.len() as u64);
    pasts.iter().for_each(|past| past.put(&mut out));
    out
}

/// The stream of the old state, which a checkpoint has.
fn old_stream() -> Vec<u8> {
    stream(|out| file(out, b"old", 0))
}

/// Streams whose state a checkpoint must not have.
fn bad_streams() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let lost = |out: &mut Vec<u8>| {
        file(out, b"a", 3);
        put_number(out, 3 << 1 | 1);
        out.extend(Digest::of(b"abc").0);
    };
    vec![
        ("a state with a climbing name", "'..' is not a name", stream(|out| file(out, b"..", 0))),
        ("a state with a path", "is not a name", stream(|out| file(out, b"../../x", 0))),
        ("a state whose content is nowhere", "no pack of the artifact has it", stream(lost)),
        ("a state that is cut", "its end is missing", old_stream()[..29].to_vec()),
    ]
}

/// An artifact with this history.
fn forge(history: Vec<u8>, count: u64) -> Forged {
    let (state, old) = (stream(|out| file(out, b"empty", 0)), old_stream());
    let (blob, garbage) = (blob_of(&old, 2), b"garbage".to_vec());
    let bad: Vec<Vec<u8>> = bad_streams().into_iter().map(|(.., stream)| stream).collect();
    let bad_blobs: Vec<Vec<u8>> = bad.iter().map(|stream| blob_of(stream, 2)).collect();
    let own = [&state, &old, &blob, &garbage];
    let all = own.into_iter().chain(&bad).chain(&bad_blobs);
    let all: Vec<&[u8]> = all.map(Vec::as_slice).collect();
    let mut forged = forge_with(&all, 2);
    forged.history = Some((history, count));
    forged
}

/// A pull fails with this text. No checkpoint came along, and no file
/// was made elsewhere.
fn refuses(world: &World, what: &str, part: &str, (history, count): (Vec<u8>, u64)) {
    let outside = world.live.sh("ls -a .. /");
    let forged = forge(history, count);
    world.push(&forged, &forged.manifest());
    world.refuses(what, part);
    assert_eq!(world.live.jailfs(&["log"]), "", "{what}");
    assert_eq!(world.live.sh("ls .jailfs/checkpoints; ls -a .. /"), outside, "{what}");
}

#[test]
fn hostile_histories_are_refused_by_entry_and_change_nothing() {
    let live = Live::new("mkdir d; echo a > d/a; echo b > b");
    let before = live.snapshot();
    let world = World { registry: Partner::start(None, None), live, before };
    facts(&world);
    trees(&world);
    lengths(&world);
    let good = document(&[Past::new(b"good", &blob_of(&old_stream(), 2))]);
    refuses(&world, "a flaw after a good one", "after the last", ([&good[..], &[0]].concat(), 1));
    for count in [0, 2, u64::MAX] {
        refuses(&world, "another number", "checkpoints of the manifest", (good.clone(), count));
    }
    let forged = forge(good.clone(), 1);
    let size = format!("\"size\":{},\n                \"annotations\"", good.len());
    let manifest = forged.manifest();
    assert!(manifest.contains(&size), "{manifest}");
    let gigantic = "\"size\":1000000000000,\"annotations\"";
    world.push(&forged, &manifest.replace(&size, gigantic));
    world.refuses("a gigantic history", "more than 64 MiB");
    // Without a flaw, the history comes along.
    world.push(&forged, &manifest);
    let reference = format!("{}/repo:x", world.registry.address);
    Machine::new().run(&world.live, &["pull", &reference, "--plain-http"]);
    assert_eq!(world.live.sh("ls; ls .jailfs/checkpoints/good"), "empty\nold\n");
}

type Change = fn(&mut Past);

/// Names, messages and times that no checkpoint has. The flaw is in the second one.
fn facts(world: &World) {
    let table: [(&str, &str, Change); 14] = [
        ("a name that climbs", "'..' is not a name", |past| past.name = b"..".to_vec()),
        ("a name with a path", "'../x' is not a name", |past| past.name = b"../x".to_vec()),
        ("an absolute name", "'/etc/x' is not a name", |past| past.name = b"/etc/x".to_vec()),
        ("a name with a NUL", "'a\\0b' is not a name", |past| past.name = b"a\0b".to_vec()),
        ("a name of the base", "'base' is not a name", |past| past.name = b"base".to_vec()),
        ("a number as a name", "'17' is not a name", |past| past.name = b"17".to_vec()),
        ("a name of a state", "'main@' is not a name", |past| past.name = b"main@".to_vec()),
        ("a name in another encoding", "checkpoint 2: a text that is not UTF-8", |past| {
            past.name = b"\xff\xfe".to_vec();
        }),
        ("a message in another encoding", "checkpoint 2: a text that is not UTF-8", |past| {
            past.message = b"\xc3\x28".to_vec();
        }),
        ("a head in another encoding", "checkpoint 2: a text that is not UTF-8", |past| {
            past.head = b"\xed\xa0\x80".to_vec();
        }),
        ("a long name", "checkpoint 2: the length of a name is 256", |past| {
            past.name = vec![b'n'; 256];
        }),
        ("a long head", "checkpoint 2: the length of a head's name", |past| {
            past.head = vec![b'n'; 256];
        }),
        ("a long message", "checkpoint 2: the length of a message", |past| {
            past.message = vec![b'm'; 4 * MIB + 1];
        }),
        ("too many nanoseconds", "checkpoint 2: the nanoseconds", |past| {
            past.nanos = 1_000_000_000;
        }),
    ];
    let good = Past::new(b"good", &blob_of(&old_stream(), 2));
    for (what, part, change) in table {
        let mut other = Past { name: b"other".to_vec(), ..good.clone() };
        change(&mut other);
        refuses(world, what, part, (document(&[good.clone(), other]), 2));
    }
}

/// A flaw, the text of the error, the tree of a checkpoint, and the chunks of its tree blob.
type Row = (&'static str, &'static str, Digest, Vec<(u64, Digest)>);

/// States of a checkpoint that are missing or malformed. The flaw is in the second one.
fn trees(world: &World) {
    let blob = blob_of(&old_stream(), 2);
    let len = blob.len() as u64;
    let good = Past::new(b"good", &blob);
    let missing = Digest([9; 32]);
    let table: [Row; 8] = [
        (
            "a tree that is nowhere",
            "error: checkpoint 'bad': read chunk",
            missing,
            vec![(9, missing)],
        ),
        ("another tree", "checkpoint 'bad': it is not the one", missing, good.chunks.clone()),
        ("no tree", "checkpoint 'bad': it is not the one", good.tree, vec![]),
        ("a tree twice", "'bad': it is not the one", good.tree, vec![(len, good.tree); 2]),
        (
            "a chunk of another length",
            "checkpoint 'bad': read chunk",
            good.tree,
            vec![(len + 1, good.tree)],
        ),
        ("a tree without bytes", "checkpoint 2: a tree blob with", good.tree, vec![(0, missing)]),
        (
            "a tree of more than 64 MiB",
            "checkpoint 2: a tree blob with an empty chunk, or of more",
            good.tree,
            vec![(64 << 10, missing); 1025],
        ),
        (
            "a tree that is none",
            "checkpoint 'bad': its end is missing",
            Digest::of(b"garbage"),
            vec![(7, Digest::of(b"garbage"))],
        ),
    ];
    for (what, part, tree, chunks) in table {
        let bad = Past { name: b"bad".to_vec(), tree, chunks, ..good.clone() };
        refuses(world, what, part, (document(&[good.clone(), bad]), 2));
    }
    for (what, part, stream) in bad_streams() {
        let bad = Past::new(b"bad", &blob_of(&stream, 2));
        let document = document(&[good.clone(), bad]);
        refuses(world, what, part, (document.clone(), 2));
        refuses(world, what, "error: checkpoint 'bad': ", (document, 2));
    }
}

/// Documents that are cut, or announce more than they have.
fn lengths(world: &World) {
    let good = Past::new(b"good", &blob_of(&old_stream(), 2));
    let announced = |count: u64, rest: &[u8]| {
        let mut out = MAGIC.to_vec();
        put_number(&mut out, count);
        [&out[..], rest].concat()
    };
    let endless = |before: &[u64]| {
        let mut rest = Vec::new();
        before.iter().for_each(|number| put_number(&mut rest, *number));
        put_number(&mut rest, u64::MAX);
        announced(1, &[&rest[..], &[0; 99]].concat())
    };
    let mut chunks = Vec::new();
    Past { chunks: Vec::new(), ..good.clone() }.put(&mut chunks);
    chunks.pop();
    put_number(&mut chunks, u64::MAX);
    chunks.extend([0; 99]);
    let whole = document(std::slice::from_ref(&good));
    let table = [
        ("endless checkpoints", "the number of checkpoints", announced(u64::MAX, &[0; 99])),
        ("more checkpoints than bytes", "the number of checkpoints", announced(9, &[0; 99])),
        ("an endless name", "checkpoint 1: the length of a name", endless(&[])),
        ("an endless message", "checkpoint 1: the length of a message", endless(&[0])),
        ("an endless head", "checkpoint 1: the length of a head's name", endless(&[0, 0])),
        ("endless chunks", "checkpoint 1: the number of chunks", announced(1, &chunks)),
        ("a cut document", "checkpoint 1: ", whole[..whole.len() - 1].to_vec()),
        ("another version", "not a history of a version", b"jailfs-history2\n\0".to_vec()),
        ("an empty document", "its end is missing", Vec::new()),
    ];
    for (what, part, document) in table {
        refuses(world, what, part, (document, 1));
    }
}

#[test]
fn a_million_checkpoints_are_refused_in_bounded_memory() {
    let live = Live::new("echo b > b");
    let before = live.snapshot();
    let world = World { registry: Partner::start(None, None), live, before };
    let past = Past { message: vec![b'm'; 560], ..Past::new(b"", &blob_of(&old_stream(), 2)) };
    let mut most = vec![past; 100_000];
    most[99_999].nanos = 1_000_000_000;
    let mut million = MAGIC.to_vec();
    put_number(&mut million, 1_000_000);
    million.resize(million.len() + 40_000_000, 0);
    for (part, document, count) in [
        ("the number of checkpoints is 1000000", million, 1_000_000),
        ("checkpoint 100000: the nanoseconds", document(&most), 100_000),
    ] {
        assert!(document.len() < 64 * MIB && document.len() > 35 * MIB);
        let forged = forge(document, count);
        world.push(&forged, &forged.manifest());
        let reference = format!("{}/repo:x", world.registry.address);
        let machine = Machine::new();
        let command = machine.command(&world.live, &["pull", &reference, "--plain-http"]);
        // The document itself has 64 MiB, and what was made of it as much again.
        let limit = ["-c", "ulimit -v 300000; exec \"$0\" \"$@\""];
        let mut limited = std::process::Command::new("sh");
        limited.args(limit).arg(command.get_program()).args(command.get_args());
        limited.env("XDG_CACHE_HOME", machine.cache.path()).current_dir("/");
        let output = limited.output().unwrap();
        assert!(text(&output).contains(part), "{}", text(&output));
        assert!(matches!(output.status.code(), Some(1..=4)), "{output:?}");
    }
}

#[test]
fn checkpoints_of_a_foreign_artifact_with_extreme_values_are_shown() {
    let live = Live::new("echo b > b");
    let world = World { registry: Partner::start(None, None), live, before: Vec::new() };
    let blob = blob_of(&old_stream(), 2);
    let past = |name: &[u8], secs| Past { secs, nanos: 999_999_999, ..Past::new(name, &blob) };
    // The same state again and again: a checkpoint is the parent of the next one by its place, so
    // there is no cycle. Of two with one name, the older one keeps it.
    let escape = Past { message: b"\x1b[2J\r\n\0".to_vec(), ..past(b"e\x1b[2Jf", 0) };
    let odd = Past { head: b"../../\x1b".to_vec(), ..past("\u{202e}\u{e9}".as_bytes(), -1) };
    let pasts = [past(b"a", i64::MIN), past(b"a", i64::MAX), escape, odd, past(&[b'n'; 255], 1)];
    let forged = forge(document(&pasts), 5);
    world.push(&forged, &forged.manifest());
    let reference = format!("{}/repo:x", world.registry.address);
    let pull = ["pull", &reference, "--plain-http"];
    let machine = Machine::new();
    let said = [machine.run(&world.live, &pull), machine.run(&world.live, &pull)].concat();
    let live = &world.live;
    let log = [live.jailfs(&["log"]), live.jailfs(&["log", "--json"])].concat();
    assert!(!said.contains('\x1b') && !log.contains('\x1b'), "{said}{log}");
    let names: Vec<String> =
        live.json(&["log"]).iter().map(|one| one["name"].to_string()).collect();
    assert_eq!(names.iter().filter(|name| *name == "\"a\"").count(), 1, "{names:?}");
    assert_eq!(live.sh("ls .jailfs/checkpoints/a; ls"), "old\nempty\n");
    live.sh("ls -l --time-style=full-iso .jailfs/checkpoints .jailfs/checkpoints/*");
    live.restore("a");
    assert_eq!(live.sh("ls"), "old\n");
    live.jailfs(&["check", "--read-data"]);
}
