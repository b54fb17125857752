//! The header of an entry: one block.
//!
//! ```text
//!   0 name 100 | 100 mode 8 | 108 uid 8 | 116 gid 8 | 124 size 12 | 136 mtime 12 | 148 checksum 8
//! 156 type 1   | 157 link name 100      | 257 magic 6 | 263 version 2 | 265 user 32
//! 297 group 32 | 329 major 8 | 337 minor 8 | 345 prefix 155 (GNU: 386 sparse 96, 482 more 1,
//! 483 real size 12)
//! ```
//!
//! Numbers are octal text. A number that does not fit is base 256 with the first bit set (GNU).

use super::BLOCK;

/// One block.
pub(super) type Block = [u8; BLOCK];

/// A field: where it begins, and its length.
pub(super) type Field = (usize, usize);

pub(super) const NAME: Field = (0, 100);
pub(super) const MODE: Field = (100, 8);
pub(super) const UID: Field = (108, 8);
pub(super) const GID: Field = (116, 8);
pub(super) const SIZE: Field = (124, 12);
pub(super) const MTIME: Field = (136, 12);
const CHECKSUM: Field = (148, 8);
const TYPE: usize = 156;
pub(super) const LINK: Field = (157, 100);
const MAGIC: Field = (257, 8);
pub(super) const MAJOR: Field = (329, 8);
pub(super) const MINOR: Field = (337, 8);
const PREFIX: Field = (345, 155);
/// Ranges of an old GNU sparse file in its header.
pub(super) const SPARSE: Field = (386, 96);
/// Whether a block with more ranges follows the header.
pub(super) const SPARSE_MORE: usize = 482;
pub(super) const REAL_SIZE: Field = (483, 12);

/// The bytes of a field; empty if the block is too short.
pub(super) fn field(block: &[u8], (at, len): Field) -> &[u8] {
    block.get(at..at + len).unwrap_or_default()
}

/// The bytes of a field up to the first NUL.
fn text(block: &[u8], at: Field) -> &[u8] {
    let bytes = field(block, at);
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// The largest number that a field of octal text holds, with a NUL behind it.
pub(super) fn octal_limit((_, len): Field) -> u64 {
    1u64.checked_shl(3 * (len as u32 - 1)).map_or(u64::MAX, |limit| limit - 1)
}

/// A header that is being written.
pub(super) struct NewHeader(Block);

impl NewHeader {
    pub(super) fn new(type_flag: u8) -> NewHeader {
        let mut header = NewHeader([0; BLOCK]);
        header.put(MAGIC, b"ustar\x0000");
        header.0[TYPE] = type_flag;
        header
    }

    /// Puts bytes into a field, cut at its length.
    pub(super) fn put(&mut self, (at, len): Field, bytes: &[u8]) {
        for (to, byte) in self.0.iter_mut().skip(at).take(len).zip(bytes) {
            *to = *byte;
        }
    }

    /// Puts a number into a field; the largest that fits, if it is larger.
    pub(super) fn number(&mut self, at: Field, value: u64) {
        let width = at.1 - 1;
        let text = format!("{:0width$o}", value.min(octal_limit(at)));
        self.put(at, text.as_bytes());
    }

    pub(super) fn finish(mut self) -> Block {
        let sum = sums(&self.0).0;
        self.put(CHECKSUM, format!("{sum:06o}\0 ").as_bytes());
        self.0
    }
}

/// The sums of the bytes of a header as unsigned and as signed numbers, with spaces for the
/// checksum itself. Old programs wrote the second one.
fn sums(block: &Block) -> (u64, i64) {
    let is_sum = |at: &usize| (CHECKSUM.0..CHECKSUM.0 + CHECKSUM.1).contains(at);
    let bytes = block.iter().enumerate().map(|(at, byte)| if is_sum(&at) { b' ' } else { *byte });
    bytes.fold((0, 0), |(unsigned, signed), byte| {
        (unsigned + u64::from(byte), signed + i64::from(byte.cast_signed()))
    })
}

/// A header that was read.
pub(super) struct Header(pub(super) Block);

impl Header {
    pub(super) fn is_end(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }

    pub(super) fn has_valid_sum(&self) -> bool {
        let (unsigned, signed) = sums(&self.0);
        let wanted = self.number(CHECKSUM);
        wanted == Some(unsigned) || wanted.and_then(|sum| i64::try_from(sum).ok()) == Some(signed)
    }

    pub(super) fn type_flag(&self) -> u8 {
        self.0[TYPE]
    }

    /// A number; `None` if the field has none, or one below 0 or above 2^64.
    pub(super) fn number(&self, at: Field) -> Option<u64> {
        number(field(&self.0, at))
    }

    /// A number of seconds, which can be negative.
    pub(super) fn seconds(&self) -> Option<i64> {
        let bytes = field(&self.0, MTIME);
        match bytes.first() {
            Some(0xff) => {
                let tail = bytes.last_chunk::<8>()?;
                let is_small = bytes.iter().take(bytes.len() - 8).all(|byte| *byte == 0xff);
                Some(i64::from_be_bytes(*tail)).filter(|secs| is_small && *secs < 0)
            }
            _ => i64::try_from(number(bytes)?).ok(),
        }
    }

    /// The path: with the prefix of POSIX, unless the magic is that of old GNU.
    pub(super) fn path(&self) -> Vec<u8> {
        let (name, prefix) = (text(&self.0, NAME), text(&self.0, PREFIX));
        let is_posix = field(&self.0, MAGIC) == b"ustar\x0000";
        if is_posix && !prefix.is_empty() { [prefix, b"/", name].concat() } else { name.to_vec() }
    }

    pub(super) fn link(&self) -> Vec<u8> {
        text(&self.0, LINK).to_vec()
    }
}

/// A number of a field: octal text between spaces and NULs, or base 256.
pub(super) fn number(bytes: &[u8]) -> Option<u64> {
    if let Some((first @ 0x80..0xc0, rest)) = bytes.split_first() {
        let mut bytes = std::iter::once(first & 0x3f).chain(rest.iter().copied());
        return bytes.try_fold(0u64, |sum, byte| Some(sum.checked_mul(256)? | u64::from(byte)));
    }
    let is_blank = |byte: &u8| matches!(byte, b' ' | 0);
    let digits = bytes.iter().copied().skip_while(is_blank).take_while(|byte| !is_blank(byte));
    digits.clone().try_fold(0u64, |sum, digit| match digit {
        b'0'..=b'7' => sum.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}
