//! Pax records: `LENGTH KEY=VALUE\n`, where the length is that of the whole record, in decimal.

use std::collections::BTreeMap;

use crate::types::Timestamp;

/// The beginning of the key of an extended attribute.
pub(super) const XATTR: &[u8] = b"SCHILY.xattr.";

const NANOS: u32 = 1_000_000_000;

/// Records by key.
pub(super) type Records = BTreeMap<Vec<u8>, Vec<u8>>;

/// Appends a record.
pub(super) fn push(to: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut len = rest;
    // The length counts its own digits.
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    to.extend_from_slice(len.to_string().as_bytes());
    to.push(b' ');
    to.extend_from_slice(key);
    to.push(b'=');
    to.extend_from_slice(value);
    to.push(b'\n');
}

/// The key and the value of a record.
type Record<'a> = (&'a [u8], &'a [u8]);

/// Takes the first record. `None` if the bytes do not begin with one.
pub(super) fn take(bytes: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let len: usize = std::str::from_utf8(bytes.get(..space)?).ok()?.parse().ok()?;
    let record = bytes.get(space + 1..len)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    let (key, value) = (record.get(..equals)?, record.get(equals + 1..)?);
    Some(((key, value), bytes.get(len..)?))
}

/// A time as decimal text.
pub(super) fn time_text(time: Timestamp) -> String {
    let (secs, nanos) = (i128::from(time.secs), time.nanos.min(NANOS - 1));
    if nanos == 0 {
        return secs.to_string();
    }
    // -1.5 is stored as 2 seconds before 1970, and half a second after that.
    let (sign, secs, nanos) =
        if secs < 0 { ("-", -(secs + 1), NANOS - nanos) } else { ("", secs, nanos) };
    let text = format!("{sign}{secs}.{nanos:09}");
    text.trim_end_matches('0').to_owned()
}

/// The time of a decimal text. More than nine digits behind the point are dropped.
pub(super) fn time(text: &[u8]) -> Option<Timestamp> {
    let text = std::str::from_utf8(text).ok()?;
    let (is_negative, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let secs: i64 = whole.parse().ok()?;
    let nanos: u32 = format!("{:0<9}", fraction.get(..9.min(fraction.len()))?).parse().ok()?;
    Some(match (is_negative, nanos) {
        (false, _) => Timestamp { secs, nanos },
        (true, 0) => Timestamp { secs: -secs, nanos: 0 },
        (true, _) => Timestamp { secs: -secs - 1, nanos: NANOS - nanos },
    })
}

/// The key of an extended attribute. A key has no `=`, so that is written as GNU tar writes it.
pub(super) fn xattr_key(name: &[u8]) -> Vec<u8> {
    let mut key = XATTR.to_vec();
    for byte in name {
        match byte {
            b'=' => key.extend_from_slice(b"%3D"),
            b'%' => key.extend_from_slice(b"%25"),
            other => key.push(*other),
        }
    }
    key
}

/// The name of the extended attribute of a key.
pub(super) fn xattr_name(key: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(key.len());
    let mut rest = key;
    while let Some((byte, behind)) = rest.split_first() {
        match behind.get(..2) {
            Some(b"3D") if *byte == b'%' => name.push(b'='),
            Some(b"25") if *byte == b'%' => name.push(b'%'),
            _ => {
                name.push(*byte);
                rest = behind;
                continue;
            }
        }
        rest = behind.get(2..).unwrap_or_default();
    }
    name
}
