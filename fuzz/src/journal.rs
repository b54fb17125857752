//! Fuzz target: the bytes of a journal, from the frames to the tree.
//!
//! * No bytes make the reader panic, and the frames that it calls good encode to the same bytes.
//! * Payloads with a valid checksum are read as they are, or refused as damage.
//! * Edits that pass the validation can be applied to the tree.

use jailfs::internals::store::io::log;
use jailfs::internals::store::record::Record;
use jailfs::internals::tree::Tree;
use serde::ser::{Serialize, SerializeTuple, Serializer};

/// Reads `data` as a journal, and then the payloads that it describes, in valid frames.
pub fn run(data: &[u8]) {
    if let Ok(torn) = log::read_torn::<Record>(data, "journal") {
        let records = torn.contents.records.iter().map(|(record, _)| record);
        let encoded = log::frames(records).expect("a record that was read can be written");
        assert_eq!(
            data.get(..encoded.len()),
            Some(&encoded[..]),
            "good frames encode as they were"
        );
    }
    let payloads = payloads(data);
    let framed = log::frames(payloads.iter().map(|payload| Raw(payload))).expect("they are short");
    let Ok(contents) = log::read::<Record>(&framed, "journal") else { return };
    assert_eq!(contents.records.len(), payloads.len(), "every frame is good");
    replay(contents.records.iter().map(|(record, _)| record));
}

/// Cuts the data into payloads: a byte gives the length of the next one.
fn payloads(mut data: &[u8]) -> Vec<&[u8]> {
    let mut payloads = Vec::new();
    while let Some((&len, rest)) = data.split_first() {
        let (payload, rest) = rest.split_at(usize::from(len).min(rest.len()));
        if !payload.is_empty() {
            payloads.push(payload);
        }
        data = rest;
    }
    payloads
}

fn replay<'r>(records: impl Iterator<Item = &'r Record>) {
    let mut tree = Tree::new();
    for record in records {
        let Record::Edits(edits) = record else { continue };
        if tree.validate(edits).is_ok() {
            for edit in edits {
                tree.apply(edit).expect("a valid edit can be applied");
            }
        }
    }
}

/// A payload that encodes as its own bytes, without a length.
struct Raw<'d>(&'d [u8]);

impl Serialize for Raw<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(self.0.len())?;
        for byte in self.0 {
            tuple.serialize_element(byte)?;
        }
        tuple.end()
    }
}
