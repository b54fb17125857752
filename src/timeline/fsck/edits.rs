//! Checks the edit history: its logs, and the content that its entries refer to.
//!
//! It reads the logs as a mount does. Dropped entries are not checked, nor are those that a power
//! cut may have lost.

use std::collections::BTreeMap;
use std::fmt;

use super::Checker;
use crate::error::Error;
use crate::fs::EditHistories;
use crate::store::edits_log::{Content, Recorded};
use crate::store::layer::POOL;
use crate::store::record::LayerKind;
use crate::tree::{Body, Source};
use crate::types::{ByteRange, Epoch, FileKind, LayerId, TreePath};

/// A fault in the edit history. The next mount starts the log anew, or skips the entry.
///
/// Each variant states a rule that must hold, and a value of it says where the rule is broken.
#[derive(Debug)]
pub enum Warning {
    /// Every frame of a log is whole, has its checksum and its number, and holds a record of this
    /// format.
    Log(Error),
    /// The content of an entry is there.
    Entry(EntryPlace, String),
    /// The content of an entry is as it was when its layer was sealed.
    Content(EntryPlace, String, u64),
}

/// The place of an entry in a log.
#[derive(Clone, Debug)]
pub struct EntryPlace {
    /// The file of the log.
    file: String,
    /// The offset of the record.
    offset: u64,
    /// The path whose history it is.
    path: TreePath,
    /// The number of the entry.
    number: u32,
}

impl fmt::Display for EntryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EntryPlace { file, offset, path, number } = self;
        write!(f, "{file} at offset {offset}: version {number} of '{path}'")
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::Log(error) => {
                write!(f, "{error}; the next mount starts a new edit history")
            }
            Warning::Entry(place, why) => write!(f, "{place} {why}"),
            Warning::Content(place, file, offset) => {
                write!(f, "{place}: {file} at offset {offset}: content fails its checksum")
            }
        }
    }
}

/// Ranges of each pool, with the index of the place that refers to it.
type Referred = BTreeMap<LayerId, Vec<(ByteRange, usize)>>;

impl Checker {
    pub(super) fn check_versions(&mut self, read_data: bool) {
        let histories = match self.store.histories() {
            Ok(histories) => histories,
            Err(error) => return self.report.warnings.push(Warning::Log(error)),
        };
        for (file, read) in histories {
            match read {
                Ok(recorded) => self.check_log(&file, recorded, read_data),
                Err(error) => self.report.warnings.push(Warning::Log(error)),
            }
        }
    }

    fn check_log(&mut self, file: &str, mut log: Recorded<EditHistories>, read_data: bool) {
        let known = EditHistories::of(&mut log);
        let mut pools: BTreeMap<LayerId, Option<u64>> = BTreeMap::new();
        let (mut places, mut referred) = (Vec::new(), Referred::new());
        for (path, number, record, edit) in known.all() {
            self.report.edits += 1;
            let Some(content) = &edit.content else { continue };
            let offset = log.start_of(record);
            let place = EntryPlace { file: file.to_owned(), offset, path: path.clone(), number };
            for layer in content.extents.iter().filter_map(|(_, source)| layer_of(*source)) {
                pools.entry(layer).or_insert_with(|| self.pool_end(layer));
            }
            if let Some(why) = self.fault_of(content, &pools) {
                self.report.warnings.push(Warning::Entry(place, why));
                continue;
            }
            for (range, source) in &content.extents {
                if let Source::Pool { layer, offset } = *source {
                    for at in self.places_of(layer, ByteRange::at(offset, range.len())) {
                        let range = ByteRange::at(at.offset, at.len);
                        referred.entry(at.layer).or_default().push((range, places.len()));
                    }
                }
            }
            places.push(place);
        }
        if read_data {
            self.check_content_of_versions(&places, &referred);
        }
    }

    /// The fault of an entry, if it has one.
    fn fault_of(
        &self,
        content: &Content,
        pools: &BTreeMap<LayerId, Option<u64>>,
    ) -> Option<String> {
        let Body::File { origin, .. } = &content.node.body else {
            return Some("is not a regular file".to_owned());
        };
        debug_assert_eq!(content.node.kind(), FileKind::File);
        if content.epoch > self.epoch() {
            return Some(format!("refers to base epoch {}, which does not exist", content.epoch));
        }
        let mut end = 0;
        for (range, source) in &content.extents {
            let len = range.len();
            if range.start < end || range.is_empty() {
                return Some(format!("has bytes at offset {} that are not in order", range.start));
            }
            end = range.end;
            let is_there = match *source {
                Source::Base { .. } => origin.is_some(),
                Source::Pool { layer, offset } => {
                    let pool_end = pools.get(&layer).copied().flatten();
                    pool_end
                        .is_some_and(|end| offset.checked_add(len).is_some_and(|last| last <= end))
                }
            };
            if !is_there {
                let place = match *source {
                    Source::Base { offset } => format!("offset {offset} of a file of the base"),
                    Source::Pool { layer, offset } => {
                        format!("offset {offset} of the pool of layer {layer}")
                    }
                };
                return Some(format!("refers to {len} bytes at {place}, which do not exist"));
            }
        }
        None
    }

    /// The present epoch of the base.
    fn epoch(&self) -> Epoch {
        let applies = self.layers.values().filter(|layer| {
            layer.info.header.kind == LayerKind::PreImage && layer.info.seal.is_some()
        });
        let last = applies.map(|layer| layer.info.header.epoch).max();
        last.unwrap_or_default()
    }

    fn check_content_of_versions(&mut self, places: &[EntryPlace], referred: &Referred) {
        for (layer, ranges) in referred {
            // The check of the states reported unreadable checksums already.
            let Ok(Some(found)) = self.store.verify(*layer, &joined(ranges)) else { continue };
            let pool = self.store.show(*layer, POOL);
            for block in found.damaged {
                let meets = |range: &ByteRange| range.start < block.end && block.start < range.end;
                let of = ranges
                    .iter()
                    .find(|(range, _)| meets(range))
                    .and_then(|(_, of)| places.get(*of));
                if let Some(place) = of {
                    self.report.warnings.push(Warning::Content(
                        place.clone(),
                        pool.clone(),
                        block.start,
                    ));
                }
            }
        }
    }
}

/// The ranges, sorted and merged: entries of the history share most of their content.
fn joined(ranges: &[(ByteRange, usize)]) -> Vec<ByteRange> {
    let mut all: Vec<ByteRange> = ranges.iter().map(|(range, _)| *range).collect();
    all.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<ByteRange> = Vec::new();
    for range in all {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

fn layer_of(source: Source) -> Option<LayerId> {
    match source {
        Source::Pool { layer, .. } => Some(layer),
        Source::Base { .. } => None,
    }
}
