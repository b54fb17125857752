//! How often a thin pull reads the files that it relies on, and that it compares each of them.

use std::collections::HashMap;
use std::io::PipeReader;
use std::path::Path;
use std::sync::Arc;

use jailfs::error::Error;
use jailfs::internals::store::archive::Digest;
use jailfs::internals::store::archive::bytes::{put_bytes, put_number, put_signed};
use jailfs::internals::store::archive::tree_blob::TreeBlob;
use jailfs::sandbox::transfer::{FrameReader, FrameWriter, Part, Stream};
use jailfs::sandbox::{DescribeTerms, ImportTerms, Reply, Request, Rev, Sandbox, StoreOptions};

use super::harness::shell;

const SIZE: u64 = 3_000_000;
/// Four files of [`SIZE`], each with other content.
const BASE: &str = "for name in kept first late mode; do
                        head -c 3000000 /dev/urandom > $name
                    done; touch -d @5 *";

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { dir: tempfile::tempdir().unwrap() }
    }

    fn open(&self, name: &str) -> Arc<Sandbox> {
        let (base, store) = (self.dir.path().join(name), self.dir.path().join(format!("{name}-s")));
        Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap()
    }

    /// The base `here`, and a copy of it at another path.
    fn bases(&self) {
        shell(self.dir.path(), &format!("mkdir here; cd here; {BASE}; cp -a ../here ../there"));
    }
}

/// The streams of a thin description of the present state and the checkpoints before it.
fn describe(sandbox: &Sandbox) -> Vec<Vec<u8>> {
    let (reader, writer) = std::io::pipe().unwrap();
    let stream = Stream::new(writer);
    let terms = DescribeTerms {
        state: Rev::Now,
        history: 9,
        is_thin: true,
        has_edits: false,
        stream: stream.clone(),
    };
    // A thin description fits into the pipe.
    sandbox.handle(Request::Describe(terms)).unwrap();
    drop(stream);
    streams(FrameReader::new(reader))
}

fn streams(mut frames: FrameReader<PipeReader>) -> Vec<Vec<u8>> {
    let (mut chunks, mut streams) = (HashMap::new(), Vec::new());
    let (mut bytes, mut blob) = (Vec::new(), None::<Vec<u8>>);
    loop {
        match (frames.next(&mut bytes).unwrap(), &mut blob) {
            (Part::Bytes, Some(blob)) => blob.extend_from_slice(&bytes),
            (Part::Bytes, None) => drop(chunks.insert(Digest::of(&bytes), bytes.clone())),
            (Part::End, None) => blob = Some(Vec::new()),
            (Part::End, Some(encoded)) => {
                let tree = TreeBlob::parse(encoded).unwrap();
                let parts = tree.chunks().iter().map(|chunk| &chunks[&chunk.digest][..]);
                streams.push(parts.collect::<Vec<_>>().concat());
                blob = None;
            }
            (Part::Commit, _) => return streams,
        }
    }
}

/// Imports the streams: checkpoints, and the state. Returns how many bytes this thread has read.
fn import(sandbox: &Sandbox, streams: &[Vec<u8>]) -> Result<u64, Error> {
    let (reader, writer) = std::io::pipe().unwrap();
    let stream = Stream::new(reader);
    let mut frames = FrameWriter::new(writer);
    for (number, bytes) in streams.iter().enumerate() {
        let mut head = vec![u8::from(number + 1 < streams.len())];
        if head == [1] {
            put_bytes(&mut head, format!("c{number}").as_bytes());
            put_bytes(&mut head, b"");
            put_signed(&mut head, 7);
            put_number(&mut head, 0);
        }
        frames.bytes(&[&head, &bytes[..]].concat()).unwrap();
        frames.end_archive().unwrap();
    }
    frames.commit().unwrap();
    let terms = ImportTerms {
        name: "it".to_owned(),
        into: None,
        onto: None,
        is_layers: false,
        is_state: true,
        after: None,
        detach_mounts: false,
        stream,
    };
    let before = bytes_read();
    let Reply::Imported(_) = sandbox.handle(Request::Import(terms))? else { panic!("no import") };
    Ok(bytes_read() - before)
}

/// How many bytes this thread has read by read(2) and pread(2) so far.
fn bytes_read() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let count = text.lines().find_map(|line| line.strip_prefix("rchar: "));
    count.unwrap().parse().unwrap()
}

/// The number of reads of a whole file, in tenths.
fn tenths(bytes: u64) -> u64 {
    bytes * 10 / SIZE
}

fn checkpoint(sandbox: &Sandbox, name: &str) {
    let made = Request::Checkpoint { name: Some(name.to_owned()), message: String::new() };
    sandbox.handle(made).unwrap();
}

fn same_content(sandbox: &Sandbox, path: &str, base: &Path) {
    let path = jailfs::types::TreePath::parse(path.as_bytes()).unwrap();
    let (mut bytes, wanted) = (Vec::new(), std::fs::read(base).unwrap());
    while bytes.len() < wanted.len() {
        let (rev, offset) = (Rev::Now, bytes.len() as u64);
        let shown = sandbox.handle(Request::Show { rev, path: path.clone(), offset }).unwrap();
        let Reply::Shown(shown) = shown else { panic!("nothing is shown") };
        assert!(!shown.bytes.is_empty(), "{path:?} is too short");
        bytes.extend(shown.bytes);
    }
    assert!(bytes == wanted, "{path:?}");
}

/// The state that the tests push: three checkpoints, and a rename after them.
fn pushed(place: &Place) -> Vec<Vec<u8>> {
    use jailfs::internals::fs::{RenameMode, SetAttr};
    use jailfs::types::{Name, NodeId};
    let here = place.open("here");
    let rename = |from: &str, to: &str| {
        let [from, to] = [from, to].map(|text| Name::new(text.as_bytes()).unwrap());
        let (root, mode) = (NodeId::ROOT, RenameMode::Replace);
        here.fs().rename(root, &from, root, &to, mode, 0).unwrap();
    };
    rename("first", "first-1");
    checkpoint(&here, "one");
    let mode = here.fs().lookup(NodeId::ROOT, &Name::new(b"mode").unwrap()).unwrap().id;
    here.fs().setattr(mode, SetAttr { mode: Some(0o600), ..SetAttr::default() }, false).unwrap();
    checkpoint(&here, "two");
    rename("first-1", "first-2");
    checkpoint(&here, "three");
    rename("late", "late-1");
    describe(&here)
}

#[test]
fn a_thin_pull_reads_each_file_once_whatever_the_number_of_states() {
    let place = Place::new();
    place.bases();
    let streams = pushed(&place);
    assert_eq!(streams.len(), 4);
    let last = import(&place.open("there"), &streams[3..]).unwrap();
    assert_eq!(tenths(last), 40, "{last} bytes were read of four files");
    let there = place.dir.path().join("there");
    for (path, base) in [("kept", "kept"), ("first-2", "first"), ("late-1", "late")] {
        same_content(&place.open("there"), path, &there.join(base));
    }
    shell(place.dir.path(), "rm -r there-s");
    // The last state copies the file that the states before have found in its place.
    let all = import(&place.open("there"), &streams).unwrap();
    assert_eq!(tenths(all), 50, "{all} bytes were read of four files, one of which moves");
    for (path, base) in [("kept", "kept"), ("first-2", "first"), ("late-1", "late")] {
        same_content(&place.open("there"), path, &there.join(base));
    }
    let checked = Sandbox::check_store(&place.dir.path().join("there-s"), true).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
}

#[test]
fn a_thin_pull_compares_a_file_that_it_has_read_with_each_state() {
    for (name, path) in [("kept", &b"kept"[..]), ("first", b"first"), ("late", b"late")] {
        for state in 0..4 {
            let place = Place::new();
            place.bases();
            let mut streams = pushed(&place);
            let stream = &mut streams[state];
            let at = stream.windows(path.len()).rposition(|bytes| bytes == path).unwrap();
            // The digest follows the path in the base.
            stream[at + path.len()] ^= 1;
            let error = import(&place.open("there"), &streams).unwrap_err();
            let wanted = format!("'{name}' has other content");
            assert!(error.to_string().contains(&wanted), "state {state}: {error}");
        }
    }
}
