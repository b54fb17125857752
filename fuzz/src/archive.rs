//! Fuzz targets: packs, and the descriptions of states.
//!
//! * No bytes make a reader panic, or take more memory than the limits allow.
//! * An index or a tree that is read encodes to the same bytes: there is one form.
//! * A forged pack, whose digests are right, still gives no byte that differs from its name.

use jailfs::error::{Error, Kind, Result};
use jailfs::internals::store::archive::edits::Edits;
use jailfs::internals::store::archive::history::History;
use jailfs::internals::store::archive::index::Index;
use jailfs::internals::store::archive::reader::Pack;
use jailfs::internals::store::archive::tree_blob::{TreeBlob, TreeReader, TreeWriter};
use jailfs::internals::store::archive::writer::MAGIC;
use jailfs::internals::store::archive::{Chunk, ChunkSink, Digest};

/// Reads `data` as a pack, and as the frames and the index of a pack whose digests are right.
pub fn pack(data: &[u8]) {
    read(data.to_vec());
    let Some((&len, rest)) = data.split_first() else { return };
    let (frames, index) = rest.split_at(usize::from(len).min(rest.len()));
    if let Ok(parsed) = Index::parse(index) {
        assert_eq!(parsed.encode(), index, "an index has one form");
    }
    read(forged(frames, index));
}

/// A pack of these frames and this index. The digests of the index, and those of frames that lie
/// where it says, are made to be right.
fn forged(frames: &[u8], index: &[u8]) -> Vec<u8> {
    let mut index = index.to_vec();
    if let Ok(parsed) = Index::parse(&index) {
        for frame in parsed.frames() {
            let from = usize::try_from(frame.offset).unwrap_or(usize::MAX);
            let stored = frames.get(from..from.saturating_add(frame.stored as usize));
            let at = index.windows(32).position(|bytes| bytes == frame.digest.0);
            let at = at.and_then(|at| index.get_mut(at..at + 32));
            if let (Some(stored), Some(digest)) = (stored, at) {
                digest.copy_from_slice(&Digest::of(stored).0);
            }
        }
    }
    let len = (index.len() as u64).to_le_bytes();
    [MAGIC, frames, &index, &len, &Digest::of(&index).0, MAGIC].concat()
}

fn read(bytes: Vec<u8>) {
    let Ok(pack) = Pack::open(bytes, "a pack") else { return };
    for entry in pack.index().chunks() {
        if let Ok(chunk) = pack.chunk(&entry.chunk.digest) {
            let chunk = chunk.expect("a chunk of the index is found");
            assert_eq!(Digest::of(&chunk), entry.chunk.digest, "only bytes of this name");
        }
    }
}

/// Keeps the bytes of all chunks, in order.
struct Stream(Vec<u8>);

impl ChunkSink for Stream {
    fn put(&mut self, chunk: Chunk<'_>) -> Result<()> {
        self.0.extend_from_slice(chunk.bytes());
        Ok(())
    }
}

/// Reads `data` as a blob and as a stream. A tree that is read is written again, and is the same.
pub fn tree(data: &[u8]) {
    if let Ok(history) = History::parse(data) {
        assert_eq!(history.encode().expect("a history"), data, "a history has one form");
    }
    if let Ok(edits) = Edits::parse(data) {
        assert_eq!(edits.encode().expect("edits"), data, "edits have one form");
    }
    if let Ok(blob) = TreeBlob::parse(data) {
        assert_eq!(blob.encode(), data, "a blob has one form");
    }
    let mut reader = TreeReader::new(data, "a tree");
    let (mut writer, mut stream) = (TreeWriter::default(), Stream(Vec::new()));
    let outcome: Result<()> = loop {
        match reader.next_event() {
            Ok(Some(event)) => {
                writer.write(&event, &mut stream).expect("what was read can be written");
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    match outcome {
        Ok(()) => {
            writer.finish(&mut stream).expect("a whole tree can be written");
            assert_eq!(stream.0, data, "a tree has one form");
        }
        Err(Error { kind, .. }) => assert_eq!(kind, Kind::Damage),
    }
}
