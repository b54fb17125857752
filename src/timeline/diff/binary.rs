//! Binary patches as git writes and applies them (`Documentation/gitformat`, `diff.c` and `apply.c`
//! of git are the source):
//!
//! ```text
//! index OLD..NEW[ MODE]        the full names of both blobs, or git refuses the patch
//! GIT binary patch
//! literal SIZE                 of the new content, not deflated
//! LINES                        a length (A-Z for 1-26, a-z for 27-52) and up to 52 deflated bytes,
//!                              in base 85
//!                              an empty line
//! literal SIZE                 the old content in the same way, to reverse the patch
//! LINES
//!                              an empty line
//! ```

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use sha1::{Digest, Sha1};

/// Bytes of a line before they are encoded.
const LINE: usize = 52;
/// The digits of git's base 85.
const DIGITS: &[u8; 85] =
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";
/// The name of no blob.
const NO_BLOB: &str = "0000000000000000000000000000000000000000";

/// Appends a binary patch; `mode` is that of both sides, if they have the same one.
pub(in crate::timeline) fn write(
    old: Option<&[u8]>,
    new: Option<&[u8]>,
    mode: Option<u32>,
    out: &mut Vec<u8>,
) {
    let mode = mode.map(|mode| format!(" {mode:06o}")).unwrap_or_default();
    let name = |content: Option<&[u8]>| content.map_or_else(|| NO_BLOB.to_owned(), blob_name);
    out.extend_from_slice(
        format!("index {}..{}{mode}\nGIT binary patch\n", name(old), name(new)).as_bytes(),
    );
    for content in [new, old] {
        literal(content.unwrap_or_default(), out);
    }
}

fn blob_name(content: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", content.len()).as_bytes());
    hash.update(content);
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn literal(content: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(format!("literal {}\n", content.len()).as_bytes());
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    // Writing into memory does not fail; if it ever did, git would refuse the patch by its size.
    let deflated = encoder.write_all(content).and_then(|()| encoder.finish()).unwrap_or_default();
    for line in deflated.chunks(LINE) {
        out.push(length_letter(line.len()));
        for word in line.chunks(4) {
            encode(word, out);
        }
        out.push(b'\n');
    }
    out.push(b'\n');
}

fn length_letter(len: usize) -> u8 {
    let len = u8::try_from(len).unwrap_or_default();
    if len <= 26 { b'A' + len - 1 } else { b'a' + len - 27 }
}

/// Four bytes, the missing ones of the last word zero, as five digits.
fn encode(word: &[u8], out: &mut Vec<u8>) {
    let mut value = word
        .iter()
        .chain(&[0; 4])
        .take(4)
        .fold(0_u32, |value, byte| (value << 8) | u32::from(*byte));
    let mut digits = [0; 5];
    for digit in digits.iter_mut().rev() {
        *digit = DIGITS.get((value % 85) as usize).copied().unwrap_or_default();
        value /= 85;
    }
    out.extend_from_slice(&digits);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_has_the_name_that_git_gives_it() {
        assert_eq!(blob_name(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(blob_name(b"what is up, doc?"), "bd9dbf5aae1a3862dd1526723246b20206e5fc37");
    }

    #[test]
    fn digits_and_lengths_are_those_of_git() {
        let mut out = Vec::new();
        encode(&[0xff; 4], &mut out);
        encode(&[0], &mut out);
        assert_eq!(out, b"|NsC000000");
        assert_eq!([1, 26, 27, 52].map(length_letter), *b"AZaz");
    }
}
