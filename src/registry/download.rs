//! Downloads blobs.
//!
//! * A blob has exactly the bytes that its descriptor says: never more are passed on, and a wrong
//!   digest is an error at the end.
//! * After a cut, the transfer goes on at the next byte by a range. If the registry ignores the
//!   range, the bytes that are known are skipped.

use std::io::Write;

use super::Repository;
use super::auth::Scopes;
use super::digest::{Descriptor, Digest, Hasher};
use super::fault::Fault;
use super::http::{Answer, Call, Verb};
use super::limits::BUFFER;
use super::progress::{Meter, Pace};
use super::retry::{Retry, repeated};
use crate::error::{Error, Result};
use crate::types::ByteRange;

/// A transfer of a range of a blob.
struct Transfer<'t, 'm> {
    blob: &'t Descriptor,
    /// The next byte.
    at: u64,
    end: u64,
    take: &'t mut dyn FnMut(&[u8]) -> std::io::Result<()>,
    meter: &'t Meter<'m>,
}

impl Repository {
    /// The size of a blob, if the repository has it.
    ///
    /// # Errors
    /// The registry does not answer, or refuses.
    pub fn blob_size(&self, digest: &Digest) -> Result<Option<u64>> {
        let found = repeated(&self.limits, || self.find_blob(digest, &Scopes::pull(&self.name)))?;
        Ok(found)
    }

    pub(super) fn find_blob(
        &self,
        digest: &Digest,
        scopes: &Scopes,
    ) -> std::result::Result<Option<u64>, Fault> {
        let mut call = Call::new(Verb::HEAD, self.url(&format!("blobs/{digest}")));
        let answer = self.exchange(&mut call, scopes)?;
        if answer.status == 404 {
            return Ok(None);
        }
        let answer = answer.expect(&[200])?;
        let missing = || Fault::last(&answer.request, "the answer has no length");
        answer.length().ok_or_else(missing).map(Some)
    }

    /// Downloads a blob into `sink`. On an error, `sink` has a part of it that must not be used.
    ///
    /// # Errors
    /// The registry does not have the blob, sends something else, or is cut too often; or writing
    /// to `sink` fails.
    pub fn fetch_blob(
        &self,
        blob: &Descriptor,
        sink: &mut dyn Write,
        meter: &Meter<'_>,
    ) -> Result<()> {
        let mut hasher = Hasher::default();
        let mut take = |bytes: &[u8]| {
            hasher.update(bytes);
            sink.write_all(bytes)
        };
        let mut transfer = Transfer { blob, at: 0, end: blob.size, take: &mut take, meter };
        self.transfer(&mut transfer)?;
        let found = hasher.finish();
        if found == blob.digest {
            return Ok(());
        }
        let request = Call::new(Verb::GET, self.url(&format!("blobs/{}", blob.digest))).request();
        let reason = format!("the registry sends other bytes, with the digest {found}");
        Err(Error::from(Fault::last(&request, reason)))
    }

    /// Downloads a range of a blob into `sink`. The caller verifies the bytes.
    ///
    /// # Errors
    /// As [`Repository::fetch_blob`], without the verification.
    pub fn fetch_range(
        &self,
        blob: &Descriptor,
        range: ByteRange,
        sink: &mut dyn Write,
        meter: &Meter<'_>,
    ) -> Result<()> {
        let end = range.end.min(blob.size);
        let mut take = |bytes: &[u8]| sink.write_all(bytes);
        let mut transfer = Transfer { blob, at: range.start, end, take: &mut take, meter };
        self.transfer(&mut transfer)?;
        Ok(())
    }

    fn transfer(&self, transfer: &mut Transfer<'_, '_>) -> std::result::Result<(), Fault> {
        let mut retry = Retry::new(&self.limits);
        while transfer.at < transfer.end {
            let before = transfer.at;
            let result = self.transfer_once(transfer);
            if transfer.at - before >= BUFFER as u64 {
                retry.moved_on();
            }
            if let Err(fault) = result {
                retry.pause(fault)?;
            }
        }
        Ok(())
    }

    /// Sends one request for the missing bytes.
    fn transfer_once(&self, transfer: &mut Transfer<'_, '_>) -> std::result::Result<(), Fault> {
        let url = self.url(&format!("blobs/{}", transfer.blob.digest));
        let mut call = Call::new(Verb::GET, url);
        if transfer.at > 0 || transfer.end < transfer.blob.size {
            let range = format!("bytes={}-{}", transfer.at, transfer.end - 1);
            call = call.header("range", range);
        }
        let answer = self.exchange(&mut call, &Scopes::pull(&self.name))?;
        let mut answer = answer.expect(&[200, 206])?;
        let body = body_range(&answer, transfer)?;
        let mut pace = Pace::new(&self.limits);
        let mut buffer = vec![0; BUFFER];
        let mut at = body.start;
        while at < body.end {
            let read = answer.read(&mut buffer)? as u64;
            if read == 0 {
                let missing = body.end - at;
                let reason = format!("the connection was cut {missing} bytes before the end");
                return Err(Fault::cut(&answer.request, reason));
            }
            if read > body.end - at {
                return Err(too_many(&answer, transfer.blob));
            }
            if !pace.is_kept(read) {
                return Err(Fault::cut(&answer.request, "the registry sends too slowly"));
            }
            pass_on(transfer, &answer, at, buffer.get(..read as usize).unwrap_or_default())?;
            at += read;
            if transfer.at == transfer.end && body.end > transfer.end {
                // The rest of an answer that ignored the range. The connection is closed.
                return Ok(());
            }
        }
        if answer.read(&mut buffer)? > 0 {
            return Err(too_many(&answer, transfer.blob));
        }
        Ok(())
    }
}

/// Passes on the bytes that are new; they begin at `at` of the blob.
fn pass_on(
    transfer: &mut Transfer<'_, '_>,
    answer: &Answer,
    at: u64,
    bytes: &[u8],
) -> std::result::Result<(), Fault> {
    let known = transfer.at.saturating_sub(at).min(bytes.len() as u64) as usize;
    let fresh = bytes.get(known..).unwrap_or_default();
    let wanted = (transfer.end - transfer.at).min(fresh.len() as u64) as usize;
    let fresh = fresh.get(..wanted).unwrap_or_default();
    (transfer.take)(fresh).map_err(|error| {
        let error = Error::io(String::new(), &error);
        Fault::last(&answer.request, format!("cannot write the blob: {}", error.reason))
    })?;
    transfer.at += fresh.len() as u64;
    transfer.meter.add(fresh.len() as u64);
    Ok(())
}

/// The range of the blob that the body of an answer holds.
fn body_range(
    answer: &Answer,
    transfer: &Transfer<'_, '_>,
) -> std::result::Result<ByteRange, Fault> {
    let size = transfer.blob.size;
    let bad = |reason: String| Fault::last(&answer.request, reason);
    if answer.header("content-encoding").is_some_and(|encoding| encoding != "identity") {
        return Err(bad("the registry encodes the blob, which was not asked for".into()));
    }
    let range = if answer.status == 200 {
        ByteRange { start: 0, end: size }
    } else {
        let text = answer.header("content-range").unwrap_or("");
        let range = content_range(text, size)
            .ok_or_else(|| bad(format!("the range '{text}' of the answer is malformed")))?;
        if range.start != transfer.at || range.end > transfer.end {
            let asked = format!("{}-{}", transfer.at, transfer.end - 1);
            return Err(bad(format!("the registry sends the range '{text}' instead of {asked}")));
        }
        range
    };
    if let Some(length) = answer.length()
        && length != range.len()
    {
        let expected = range.len();
        return Err(bad(format!("the registry announces {length} bytes instead of {expected}")));
    }
    Ok(range)
}

/// Parses `bytes FIRST-LAST/SIZE`. `*` is an unknown size.
fn content_range(text: &str, size: u64) -> Option<ByteRange> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    let is_right = first <= last && last < size && (total == "*" || total.parse() == Ok(size));
    is_right.then(|| ByteRange { start: first, end: last + 1 })
}

fn too_many(answer: &Answer, blob: &Descriptor) -> Fault {
    let reason = format!("the registry sends more than the {} bytes of the blob", blob.size);
    Fault::last(&answer.request, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_parsed_only_if_it_fits_the_blob() {
        assert_eq!(content_range("bytes 2-9/10", 10), Some(ByteRange { start: 2, end: 10 }));
        assert_eq!(content_range("bytes 0-0/*", 10), Some(ByteRange { start: 0, end: 1 }));
        for bad in ["", "bytes 2-9", "bytes 9-2/10", "bytes 2-10/10", "bytes 2-9/11", "2-9/10"] {
            assert_eq!(content_range(bad, 10), None, "{bad}");
        }
        assert_eq!(content_range("bytes 0-18446744073709551615/*", 10), None);
    }
}
