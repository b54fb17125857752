//! Encodes and decodes records. This is the one file that knows bincode (version 2, standard
//! configuration: little-endian, variable-length integers).
//!
//! Decoding must use every byte, so that a record of a later format is never half understood.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest encoded value that is accepted, in bytes. It is above the largest record, and below
/// what could exhaust memory.
pub const MAX_LEN: usize = 256 << 20;

/// Encodes `value`.
///
/// # Errors
/// The reason, for a value that serde cannot express. No type of jailfs is one.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, String> {
    bincode::serde::encode_to_vec(value, bincode::config::standard()).map_err(|e| e.to_string())
}

/// Appends the encoding of `value` to `out`.
///
/// # Errors
/// As [`encode`].
pub fn encode_onto<T: Serialize>(value: &T, out: &mut Vec<u8>) -> Result<(), String> {
    bincode::serde::encode_into_std_write(value, out, bincode::config::standard())
        .map(drop)
        .map_err(|e| e.to_string())
}

/// Decodes a value from exactly `bytes`.
///
/// # Errors
/// The reason: the bytes are not a value of this type, or bytes are left over.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let config = bincode::config::standard().with_limit::<MAX_LEN>();
    let (value, used) =
        bincode::serde::decode_from_slice(bytes, config).map_err(|e| e.to_string())?;
    if used == bytes.len() {
        Ok(value)
    } else {
        Err(format!("{} bytes left over", bytes.len() - used))
    }
}

/// The number of the variant at the start of an encoded enum; `None` for a number above 250, which
/// takes several bytes.
pub fn variant(bytes: &[u8]) -> Option<u8> {
    bytes.first().copied().filter(|first| *first <= 250)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::TreePath;

    #[test]
    fn decoding_uses_every_byte() {
        let bytes = encode(&(7u32, "x".to_owned())).unwrap();
        assert_eq!(decode::<(u32, String)>(&bytes).unwrap(), (7, "x".to_owned()));
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(decode::<(u32, String)>(&longer).is_err());
        assert!(decode::<(u32, String)>(&bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn a_length_from_disk_cannot_exhaust_memory() {
        // 0xfd announces a 64-bit length.
        let mut bytes = vec![0xfd];
        bytes.extend_from_slice(&u64::MAX.to_le_bytes());
        assert!(decode::<Vec<u8>>(&bytes).is_err());
    }

    #[test]
    fn only_a_clean_path_is_decoded() {
        for good in [&b""[..], b"a", b"a/b", b".../-/\xff"] {
            let path = TreePath::parse(good).unwrap();
            assert_eq!(encode(&path).unwrap(), encode(&good).unwrap());
            assert_eq!(decode(&encode(&good).unwrap()), Ok(path), "{good:?}");
        }
        for bad in [&b"/"[..], b"/a", b"a/", b"a//b", b".", b"a/./b", b"a/../b", b"..", b"a\0b"] {
            assert!(decode::<TreePath>(&encode(&bad).unwrap()).is_err(), "{bad:?}");
        }
    }
}
