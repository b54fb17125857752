//! The values that packs and tree blobs consist of.
//!
//! Numbers are LEB128: seven bits a byte, the lowest first, the top bit set on all but the last
//! byte. Only the shortest form is accepted, so that a value has one encoding. These formats leave
//! the machine, so they do not depend on the codec of the journals.

use crate::store::archive::{Digest, Flaw};

/// Appends a number.
pub fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        // The lowest seven bits.
        out.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Appends a signed number: 0, -1, 1, -2 ... as 0, 1, 2, 3 ...
pub fn put_signed(out: &mut Vec<u8>, number: i64) {
    put_number(out, ((number << 1) ^ (number >> 63)).cast_unsigned());
}

/// Appends bytes with their length before them.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Where bytes are read from, one value after the other.
pub trait Input {
    /// Takes the next byte.
    ///
    /// # Errors
    /// The end, or a failed read.
    fn byte(&mut self) -> Result<u8, Flaw>;

    /// Fills `bytes` with the next bytes.
    ///
    /// # Errors
    /// As [`Input::byte`].
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Flaw>;

    /// Whether there is no further byte.
    ///
    /// # Errors
    /// A failed read.
    fn is_at_end(&mut self) -> Result<bool, Flaw>;
}

/// The flaw of an input that ends too early.
pub fn cut_off() -> Flaw {
    Flaw::new("its end is missing")
}

/// Bytes in memory.
impl Input for &[u8] {
    fn byte(&mut self) -> Result<u8, Flaw> {
        let (first, rest) = self.split_first().ok_or_else(cut_off)?;
        *self = rest;
        Ok(*first)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Flaw> {
        let (now, rest) = self.split_at_checked(bytes.len()).ok_or_else(cut_off)?;
        bytes.copy_from_slice(now);
        *self = rest;
        Ok(())
    }

    fn is_at_end(&mut self) -> Result<bool, Flaw> {
        Ok(self.is_empty())
    }
}

/// Takes a number.
///
/// # Errors
/// The end, a number of more than 64 bits, or a longer form than needed.
pub fn number(input: &mut dyn Input) -> Result<u64, Flaw> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = input.byte()?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return Err(Flaw::new("a number of more than 64 bits"));
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return match byte {
                0 if shift > 0 => Err(Flaw::new("a number in a longer form than it needs")),
                _ => Ok(number),
            };
        }
    }
    Err(Flaw::new("a number of more than 64 bits"))
}

/// Takes a signed number.
///
/// # Errors
/// As [`number`].
pub fn signed(input: &mut dyn Input) -> Result<i64, Flaw> {
    let number = number(input)?;
    Ok((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
}

/// Takes a number of at most `most`. `what` names it in the flaw.
///
/// # Errors
/// As [`number`], and a greater number.
pub fn at_most(input: &mut dyn Input, most: u64, what: &str) -> Result<u64, Flaw> {
    let number = number(input)?;
    if number > most {
        return Err(Flaw::new(format!("{what} is {number}, and at most {most} is allowed")));
    }
    Ok(number)
}

/// Takes bytes with their length before them: at most `most`, because they are read into memory.
///
/// # Errors
/// As [`at_most`].
pub fn bytes(input: &mut dyn Input, most: usize, what: &str) -> Result<Vec<u8>, Flaw> {
    let len = at_most(input, most as u64, what)?;
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    input.fill(&mut bytes)?;
    Ok(bytes)
}

/// Takes a digest.
///
/// # Errors
/// The end.
pub fn digest(input: &mut dyn Input) -> Result<Digest, Flaw> {
    let mut digest = [0; 32];
    input.fill(&mut digest)?;
    Ok(Digest(digest))
}
