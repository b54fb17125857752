//! A history: the checkpoints that lead to a state, oldest first, as one document.
//!
//! ```text
//! magic, 16 bytes | number of checkpoints, then each: name | message | head | seconds signed |
//! nanoseconds | digest of its tree blob | number of chunks of the blob, then each: length, digest
//! ```
//!
//! Each checkpoint is the parent of the next one. The tree blobs are cut into chunks like content,
//! so a thousand checkpoints that differ little need little more than one.

use crate::store::archive::bytes::{self, Input};
use crate::store::archive::chunker::Chunker;
use crate::store::archive::tree_blob::{MAX_BLOB, TreeBlob};
use crate::store::archive::{Chunk, ChunkRef, ChunkSource, Digest, Flaw, MAX_CHUNK};
use crate::types::Timestamp;

const MAGIC: &[u8; 16] = b"jailfs-history1\n";
/// The most bytes of a history.
pub const MAX_HISTORY: usize = 64 << 20;
/// The most checkpoints of a history.
pub const MAX_CHECKPOINTS: usize = 100_000;
/// The most bytes of a name, of a head's name and of a message.
const MAX_NAME: usize = 255;
const MAX_MESSAGE: usize = 4 << 20;
/// The fewest bytes of a checkpoint.
const LEAST: usize = 6 + 32;
/// The fewest bytes of a chunk.
const LEAST_CHUNK: usize = 1 + 32;

/// The facts about a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Its name.
    pub name: Option<String>,
    /// Its message.
    pub message: String,
    /// The head in which it was made.
    pub head: String,
    /// When it was made.
    pub time: Timestamp,
}

/// A checkpoint of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Past {
    /// The facts about it.
    pub facts: Facts,
    /// The name of its state.
    pub tree: Digest,
    /// The chunks of its tree blob, in order.
    blob: Vec<ChunkRef>,
}

impl Past {
    /// A checkpoint with this state. The chunks of its blob go to `take`.
    ///
    /// # Errors
    /// Those of `take`.
    pub fn new<E>(
        facts: Facts,
        blob: &TreeBlob,
        take: &mut dyn FnMut(Chunk<'_>) -> Result<(), E>,
    ) -> Result<Past, E> {
        let encoded = blob.encode();
        let (mut chunker, mut chunks) = (Chunker::default(), Vec::new());
        let mut each = |chunk: Chunk<'_>| {
            chunks.push(chunk.reference());
            take(chunk)
        };
        chunker.push(&encoded, &mut each)?;
        chunker.finish(&mut each)?;
        Ok(Past { facts, tree: Digest::of(&encoded), blob: chunks })
    }

    /// The chunks of the tree blob.
    pub fn blob_chunks(&self) -> &[ChunkRef] {
        &self.blob
    }

    /// The tree blob, whose chunks `source` has.
    ///
    /// # Errors
    /// A chunk is missing, or the blob is malformed or another one.
    pub fn blob(&self, source: &dyn ChunkSource) -> crate::error::Result<TreeBlob> {
        let mut encoded = Vec::new();
        for chunk in &self.blob {
            let bytes = source.get(chunk).map_err(|error| error.during(self.label()))?;
            encoded.extend_from_slice(&bytes);
        }
        let damage = |why: String| {
            crate::error::Error::damage(format!("read the tree blob of {}", self.label()), why)
        };
        if Digest::of(&encoded) != self.tree {
            return Err(damage("it is not the one that the history names".to_owned()));
        }
        TreeBlob::parse(&encoded).map_err(|flaw| damage(flaw.0))
    }

    /// The checkpoint for people.
    pub fn label(&self) -> String {
        match &self.facts.name {
            Some(name) => format!("checkpoint '{}'", name.escape_debug()),
            None => format!("the checkpoint with tree {}", self.tree),
        }
    }
}

/// The checkpoints that lead to a state, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Each is the parent of the next one.
    pub checkpoints: Vec<Past>,
}

impl History {
    /// The bytes of the history.
    ///
    /// # Errors
    /// It is longer than a reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>, Flaw> {
        let mut out = MAGIC.to_vec();
        bytes::put_number(&mut out, self.checkpoints.len() as u64);
        for Past { facts, tree, blob } in &self.checkpoints {
            bytes::put_bytes(&mut out, facts.name.as_deref().unwrap_or_default().as_bytes());
            bytes::put_bytes(&mut out, facts.message.as_bytes());
            bytes::put_bytes(&mut out, facts.head.as_bytes());
            bytes::put_signed(&mut out, facts.time.secs);
            bytes::put_number(&mut out, u64::from(facts.time.nanos));
            out.extend_from_slice(&tree.0);
            bytes::put_number(&mut out, blob.len() as u64);
            for chunk in blob {
                bytes::put_number(&mut out, u64::from(chunk.len));
                out.extend_from_slice(&chunk.digest.0);
            }
        }
        match out.len() > MAX_HISTORY || self.checkpoints.len() > MAX_CHECKPOINTS {
            false => Ok(out),
            true => Err(Flaw::new("a history of more than 100,000 checkpoints or 64 MiB")),
        }
    }

    /// Reads a history. Takes memory in proportion to the bytes that are there.
    ///
    /// # Errors
    /// The first flaw, with the number of the checkpoint.
    pub fn parse(encoded: &[u8]) -> Result<History, Flaw> {
        let mut input = encoded;
        let mut magic = [0; MAGIC.len()];
        input.fill(&mut magic)?;
        if magic != *MAGIC || encoded.len() > MAX_HISTORY {
            return Err(Flaw::new("it is not a history of a version that this program knows"));
        }
        let most = (input.len() / LEAST).min(MAX_CHECKPOINTS) as u64;
        let mut history = History::default();
        for number in 1..=bytes::at_most(&mut input, most, "the number of checkpoints")? {
            let past = take_past(&mut input)
                .map_err(|flaw| Flaw::new(format!("checkpoint {number}: {flaw}")))?;
            history.checkpoints.push(past);
        }
        match input.is_empty() {
            true => Ok(history),
            false => Err(Flaw::new("bytes after the last checkpoint")),
        }
    }
}

fn take_past(input: &mut &[u8]) -> Result<Past, Flaw> {
    let name = Some(take_text(input, MAX_NAME, "the length of a name")?);
    let message = take_text(input, MAX_MESSAGE, "the length of a message")?;
    let head = take_text(input, MAX_NAME, "the length of a head's name")?;
    let secs = bytes::signed(input)?;
    let nanos = bytes::at_most(input, 999_999_999, "the nanoseconds of a time")? as u32;
    let tree = bytes::digest(input)?;
    let most = (input.len() / LEAST_CHUNK) as u64;
    let (mut blob, mut total) = (Vec::new(), 0);
    for _ in 0..bytes::at_most(input, most, "the number of chunks")? {
        let len = bytes::at_most(input, MAX_CHUNK as u64, "the length of a chunk")?;
        total += len;
        if len == 0 || total > MAX_BLOB as u64 {
            return Err(Flaw::new("a tree blob with an empty chunk, or of more than 64 MiB"));
        }
        blob.push(ChunkRef { digest: bytes::digest(input)?, len: len as u32 });
    }
    let time = Timestamp { secs, nanos };
    let name = name.filter(|name| !name.is_empty());
    Ok(Past { facts: Facts { name, message, head, time }, tree, blob })
}

fn take_text(input: &mut &[u8], most: usize, what: &str) -> Result<String, Flaw> {
    let most = most.min(input.len()) as u64;
    let len = bytes::at_most(input, most, what)? as usize;
    let (text, rest) = input.split_at_checked(len).ok_or_else(bytes::cut_off)?;
    *input = rest;
    let text = std::str::from_utf8(text);
    text.map(str::to_owned).map_err(|_| Flaw::new("a text that is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history() -> History {
        let past = |name: Option<&str>, secs| {
            let facts = Facts {
                name: name.map(str::to_owned),
                message: "line\n\u{1b}[2J".to_owned(),
                head: "main".to_owned(),
                time: Timestamp { secs, nanos: 999_999_999 },
            };
            let blob = vec![ChunkRef { digest: Digest([3; 32]), len: 65_536 }];
            Past { facts, tree: Digest([2; 32]), blob }
        };
        History { checkpoints: vec![past(Some("green"), -5), past(None, 1 << 40)] }
    }

    #[test]
    fn a_history_is_read_as_it_was_written() {
        let bytes = history().encode().unwrap();
        assert_eq!(History::parse(&bytes).unwrap(), history());
        let none = History::default();
        assert_eq!(History::parse(&none.encode().unwrap()).unwrap(), none);
    }

    #[test]
    fn each_cut_and_each_other_form_is_refused() {
        let bytes = history().encode().unwrap();
        for len in 0..bytes.len() {
            assert!(History::parse(&bytes[..len]).is_err(), "cut at {len}");
        }
        assert!(History::parse(&[&bytes[..], &[0]].concat()).is_err());
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            History::parse(&bytes).unwrap_err().0
        };
        // The number of checkpoints, the length of a name, a byte of it, and the magic.
        assert!(with(16, 0x7f).contains("the number of checkpoints"));
        assert!(with(17, 0xff).contains("checkpoint 1: "));
        assert!(with(18, 0xff).contains("not UTF-8"));
        assert!(with(0, b'x').contains("version"));
        let mut long = history();
        long.checkpoints[0].blob = vec![ChunkRef { digest: Digest([3; 32]), len: 65_536 }; 1025];
        let refused = History::parse(&long.encode().unwrap()).unwrap_err();
        assert!(refused.0.contains("more than 64 MiB"), "{refused}");
    }
}
