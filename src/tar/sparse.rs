//! The maps of files with holes.
//!
//! A map of version 1.0 stands before the bytes, in whole blocks: the number of ranges, then offset
//! and length of each, one decimal number per line.

use super::header::{self, Header, number};
use super::pax::Records;
use super::{BLOCK, MAX_RANGES};
use crate::types::ByteRange;

/// A map of version 1.0. A hole at the end is followed by an empty range, without which GNU tar
/// makes the file too short.
pub(super) fn map(data: &[ByteRange], size: u64) -> Vec<u8> {
    let has_end = data.last().is_some_and(|range| range.end == size);
    let end = (!has_end).then_some(ByteRange::at(size, 0));
    let mut text = format!("{}\n", data.len() + end.iter().len());
    for range in data.iter().chain(&end) {
        text.push_str(&format!("{}\n{}\n", range.start, range.len()));
    }
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

/// Reads a map of version 1.0 from the blocks that `next` returns.
pub(super) fn read_map<E: From<&'static str>>(
    mut next: impl FnMut() -> Result<header::Block, E>,
) -> Result<Vec<ByteRange>, E> {
    let mut numbers = Decimals::default();
    let count = loop {
        match numbers.take()? {
            Some(count) => break count,
            None => numbers.block = next()?.to_vec(),
        }
    };
    if count > MAX_RANGES as u64 {
        return Err(TOO_MANY.into());
    }
    let mut data = Vec::new();
    let mut start = None;
    while (data.len() as u64) < count {
        let Some(number) = numbers.take()? else {
            numbers.block = next()?.to_vec();
            continue;
        };
        match start.take() {
            None => start = Some(number),
            Some(start) => data.push(range(start, number)?),
        }
    }
    Ok(data)
}

const TOO_MANY: &str = "it has too many holes";
const BAD: &str = "its map of holes is malformed";

fn range(start: u64, len: u64) -> Result<ByteRange, &'static str> {
    Ok(ByteRange { start, end: start.checked_add(len).ok_or(BAD)? })
}

/// Takes lines with decimal numbers from blocks.
#[derive(Default)]
struct Decimals {
    block: Vec<u8>,
    at: usize,
    number: Option<u64>,
}

impl Decimals {
    /// The next number; `None` if the block ended first.
    fn take(&mut self) -> Result<Option<u64>, &'static str> {
        while let Some(byte) = self.block.get(self.at) {
            self.at += 1;
            match byte {
                b'\n' => return self.number.take().map(Some).ok_or(BAD),
                b'0'..=b'9' => {
                    let shifted = self.number.unwrap_or(0).checked_mul(10);
                    let sum = shifted.and_then(|sum| sum.checked_add(u64::from(byte - b'0')));
                    self.number = Some(sum.ok_or(BAD)?);
                }
                _ => return Err(BAD),
            }
        }
        self.at = 0;
        self.block.clear();
        Ok(None)
    }
}

/// The ranges in an old GNU header or a block behind it: pairs of numbers, ended by an empty one.
pub(super) fn old_ranges(bytes: &[u8], data: &mut Vec<ByteRange>) -> Result<(), &'static str> {
    for pair in bytes.chunks_exact(24) {
        let (offset, len) = pair.split_at(12);
        if offset.iter().all(|byte| *byte == 0) {
            break;
        }
        if data.len() >= MAX_RANGES {
            return Err(TOO_MANY);
        }
        data.push(range(number(offset).ok_or(BAD)?, number(len).ok_or(BAD)?)?);
    }
    Ok(())
}

/// The ranges in an old GNU header, and whether more follow in another block.
pub(super) fn of_header(head: &Header) -> Result<(Vec<ByteRange>, bool), &'static str> {
    let mut data = Vec::new();
    old_ranges(header::field(&head.0, header::SPARSE), &mut data)?;
    Ok((data, head.0[header::SPARSE_MORE] != 0))
}

/// The ranges in records of version 0.1: `offset,length,offset,length...`.
pub(super) fn of_list(text: &[u8]) -> Result<Vec<ByteRange>, &'static str> {
    let mut data = Vec::new();
    if text.is_empty() {
        return Ok(data);
    }
    let mut numbers = text.split(|byte| *byte == b',').map(decimal);
    while let Some(start) = numbers.next() {
        if data.len() >= MAX_RANGES {
            return Err(TOO_MANY);
        }
        let len = numbers.next().flatten().ok_or(BAD)?;
        data.push(range(start.ok_or(BAD)?, len)?);
    }
    Ok(data)
}

/// A decimal number.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The number in a record; `None` if there is no such record.
pub(super) fn record(records: &Records, key: &[u8]) -> Result<Option<u64>, &'static str> {
    let value = records.get(key);
    value.map(|text| decimal(text).ok_or("a number in its records is malformed")).transpose()
}

/// Checks that ranges are in order, within the size, and have as many bytes as are stored.
/// Returns those with bytes.
pub(super) fn checked(
    data: Vec<ByteRange>,
    size: u64,
    stored: u64,
) -> Result<Vec<ByteRange>, &'static str> {
    let mut end = 0;
    let mut sum = 0u64;
    for range in &data {
        if range.start < end || range.end > size {
            return Err(BAD);
        }
        end = range.end;
        sum = sum.checked_add(range.len()).ok_or(BAD)?;
    }
    if sum != stored {
        return Err(BAD);
    }
    Ok(data.into_iter().filter(|range| !range.is_empty()).collect())
}
