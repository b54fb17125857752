//! The name of a blob: `sha256:` and 64 hexadecimal digits.
//!
//! The OCI specification also registers sha512. No registry in use names blobs by it by default,
//! so it is refused by name instead of being half supported.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// The SHA-256 of a blob.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    /// The digest in its raw form.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Parses `sha256:HEX`, with lower-case digits.
    ///
    /// # Errors
    /// The text is another algorithm, or malformed.
    pub fn parse(text: &str) -> Result<Digest, &'static str> {
        let (algorithm, digits) = text.split_once(':').ok_or("a digest is sha256:HEX")?;
        if algorithm != "sha256" {
            return Err("only sha256 digests are supported");
        }
        let mut bytes = [0; 32];
        let is_hex = digits.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
        if digits.len() != 64 || !is_hex {
            return Err("a sha256 digest has 64 lower-case hexadecimal digits");
        }
        for (at, byte) in bytes.iter_mut().enumerate() {
            let pair = digits.get(2 * at..2 * at + 2).unwrap_or("00");
            *byte = u8::from_str_radix(pair, 16).unwrap_or(0);
        }
        Ok(Digest(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Computes the digest of bytes that arrive in pieces.
#[derive(Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// A blob as a manifest describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The digest of the content.
    pub digest: Digest,
    /// The size in bytes.
    pub size: u64,
}

impl Descriptor {
    /// Describes `bytes`.
    pub fn of(bytes: &[u8]) -> Descriptor {
        Descriptor { digest: Digest::of(bytes), size: bytes.len() as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_parsed_exactly() {
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::parse(text), Ok(Digest::of(b"")));
        assert_eq!(Digest::of(b"").to_string(), text);
        let bad = ["", "sha256", "sha256:", "sha256:E3", "sha512:00", &text[..70]];
        for bad in bad.into_iter().chain([text.to_uppercase().as_str(), &format!("{text}0")]) {
            assert!(Digest::parse(bad).is_err(), "{bad}");
        }
        assert!(Digest::parse(&format!("sha256:{}", "ä".repeat(32))).is_err());
    }

    #[test]
    fn pieces_give_the_digest_of_the_whole() {
        let mut hasher = Hasher::default();
        hasher.update(b"ab");
        hasher.update(b"c");
        assert_eq!(hasher.finish(), Digest::of(b"abc"));
    }
}
