//! Uploads blobs.
//!
//! * An upload is a session at a URL that the registry gives: POST begins it, PATCH appends a
//!   chunk, PUT appends the rest and names the digest. The registry verifies the digest.
//! * After a cut, GET at the session tells how much the registry has, and the upload goes on there.
//!   A registry that lost the session, or cannot tell, gets the blob from its start.
//! * Before a new session begins, HEAD finds out whether the blob arrived after all.
//! * The URL of a session belongs to the registry. Another host gets no byte.

use std::io::{self, Read, Seek, SeekFrom};

use super::Repository;
use super::auth::Scopes;
use super::digest::{Descriptor, Digest};
use super::fault::{Class, Fault, shown};
use super::http::{Answer, Call, Payload, Url, Verb};
use super::limits::BUFFER;
use super::progress::{Meter, Pace};
use super::retry::Retry;
use crate::error::{Error, Result};

/// How a blob came into the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// It was there.
    Existed,
    /// The registry took it from another repository.
    Mounted,
    /// Its bytes were sent.
    Uploaded,
}

/// An upload in progress.
#[derive(Clone)]
struct Session {
    url: Url,
    /// The bytes that the registry has.
    at: u64,
    /// The least bytes of a chunk, except the last one.
    least: u64,
}

/// The next step of an upload.
enum Stage {
    Begin,
    Ask(Session),
    Send(Session),
    Done(Pushed),
}

/// A blob that is uploaded.
struct Upload<'u, 'm> {
    blob: &'u Descriptor,
    source: &'u mut dyn Source,
    from: Option<&'u str>,
    scopes: Scopes,
    meter: &'u Meter<'m>,
    /// The bytes of the blob that the meter has counted.
    counted: u64,
}

impl Upload<'_, '_> {
    /// The transfer resumes at offset `at`.
    fn resume(&mut self, at: u64) {
        self.meter.resume(self.counted, at);
        self.counted = at;
    }
}

trait Source: Read + Seek {}
impl<S: Read + Seek> Source for S {}

impl Repository {
    /// Uploads a blob, unless the repository has it. If `from` names a repository of the same
    /// registry that has it, the registry may take it from there.
    ///
    /// # Errors
    /// The registry refuses or is cut too often, or reading `source` fails.
    pub fn push_blob(
        &self,
        blob: &Descriptor,
        source: &mut (impl Read + Seek),
        from: Option<&str>,
        meter: &Meter<'_>,
    ) -> Result<Pushed> {
        let mut scopes = Scopes::push(&self.name);
        if let Some(from) = from {
            scopes = scopes.and_pull(from);
        }
        let mut upload = Upload { blob, source, from, scopes, meter, counted: 0 };
        let pushed = self.push(&mut upload)?;
        upload.resume(0);
        meter.skip(blob.size);
        Ok(pushed)
    }

    fn push(&self, upload: &mut Upload<'_, '_>) -> std::result::Result<Pushed, Fault> {
        let mut retry = Retry::new(&self.limits);
        let mut stage = Stage::Begin;
        loop {
            let session = match &stage {
                Stage::Done(pushed) => return Ok(*pushed),
                Stage::Begin => None,
                Stage::Ask(session) | Stage::Send(session) => Some(session.clone()),
            };
            let at = session.as_ref().map_or(0, |session| session.at);
            match self.step(stage, upload) {
                Ok(next) => {
                    if matches!(&next, Stage::Send(next) if next.at >= at + BUFFER as u64) {
                        retry.moved_on();
                    }
                    stage = next;
                }
                // The session is gone, or the registry cannot resume it.
                Err(fault) if session.is_some() && is_lost(&fault) => {
                    retry.pause(Fault { class: Class::Cut, ..fault })?;
                    session.into_iter().for_each(|session| self.cancel(session, upload));
                    stage = Stage::Begin;
                }
                Err(fault) => {
                    retry.pause(fault)?;
                    stage = session.map_or(Stage::Begin, Stage::Ask);
                }
            }
        }
    }

    fn step(&self, stage: Stage, upload: &mut Upload<'_, '_>) -> std::result::Result<Stage, Fault> {
        match stage {
            Stage::Begin => self.begin(upload),
            Stage::Ask(session) => self.ask(session, upload),
            Stage::Send(session) => self.send(session, upload),
            done @ Stage::Done(_) => Ok(done),
        }
    }

    /// Looks for the blob, and begins a session if it is missing.
    fn begin(&self, upload: &mut Upload<'_, '_>) -> std::result::Result<Stage, Fault> {
        let digest = upload.blob.digest;
        if let Some(size) = self.find_blob(&digest, &upload.scopes)? {
            if size != upload.blob.size {
                let request = Call::new(Verb::HEAD, self.url(&format!("blobs/{digest}"))).request();
                let reason = format!("the registry says {size} bytes, not {}", upload.blob.size);
                return Err(Fault::last(&request, reason));
            }
            return Ok(Stage::Done(Pushed::Existed));
        }
        let mut url = self.url("blobs/uploads/");
        if let Some(from) = upload.from {
            url = url.with("mount", &digest.to_string()).with("from", from);
        }
        let call = Call::new(Verb::POST, url);
        let mut call = Call { payload: Payload::Bytes(&[]), ..call };
        let answer = self.exchange(&mut call, &upload.scopes)?.expect(&[201, 202])?;
        if answer.status == 201 {
            check_digest(&answer, &digest)?;
            answer.finish();
            return Ok(Stage::Done(Pushed::Mounted));
        }
        let least = answer.header("oci-chunk-min-length").and_then(|text| text.parse().ok());
        let url = self.location(&answer)?;
        answer.finish();
        upload.resume(0);
        Ok(Stage::Send(Session { url, at: 0, least: least.unwrap_or(0) }))
    }

    /// Asks the registry how much it has.
    fn ask(
        &self,
        session: Session,
        upload: &mut Upload<'_, '_>,
    ) -> std::result::Result<Stage, Fault> {
        let mut call = Call::new(Verb::GET, session.url.clone());
        let answer = self.exchange(&mut call, &upload.scopes)?.expect(&[204, 202])?;
        let at = kept_bytes(&answer, upload.blob.size)?;
        let has_location = answer.header("location").is_some();
        let url = if has_location { self.location(&answer)? } else { session.url };
        answer.finish();
        upload.resume(at);
        Ok(Stage::Send(Session { url, at, ..session }))
    }

    /// Sends the next chunk, or the last one with the digest.
    fn send(
        &self,
        session: Session,
        upload: &mut Upload<'_, '_>,
    ) -> std::result::Result<Stage, Fault> {
        let (digest, left) = (upload.blob.digest, upload.blob.size - session.at);
        let chunk = self.limits.chunk.max(session.least).max(1);
        let (is_last, length) = (left <= chunk, left.min(chunk));
        let (verb, url) = if is_last {
            (Verb::PUT, session.url.clone().with("digest", &digest.to_string()))
        } else {
            (Verb::PATCH, session.url.clone())
        };
        let mut call = Call::new(verb, url).header("content-type", "application/octet-stream");
        if (session.at > 0 || !is_last) && length > 0 {
            let range = format!("{}-{}", session.at, session.at + length - 1);
            call = call.header("content-range", range);
        }
        let request = call.request();
        upload
            .source
            .seek(SeekFrom::Start(session.at))
            .map_err(|error| unread(&request, &error))?;
        let mut chunk = Chunk {
            source: &mut *upload.source,
            meter: upload.meter,
            counted: &mut upload.counted,
            left: length,
            pace: Pace::new(&self.limits),
            failed: None,
        };
        let mut call = Call { payload: Payload::Stream(&mut chunk, length), ..call };
        let result = self.exchange(&mut call, &upload.scopes);
        if let Some(error) = &chunk.failed {
            return Err(unread(&request, error));
        }
        if is_last {
            let answer = result?.expect(&[201, 204])?;
            check_digest(&answer, &digest)?;
            answer.finish();
            return Ok(Stage::Done(Pushed::Uploaded));
        }
        let answer = result?.expect(&[202, 204])?;
        let at = match answer.header("range") {
            Some(_) => kept_bytes(&answer, upload.blob.size)?,
            None => session.at + length,
        };
        if at > session.at + length {
            let reason = "the registry says that it has more bytes than were sent";
            return Err(Fault::last(&answer.request, reason));
        }
        let url = self.location(&answer)?;
        answer.finish();
        Ok(Stage::Send(Session { url, at, ..session }))
    }

    /// Ends a session that is of no more use, as far as the registry is there.
    fn cancel(&self, session: Session, upload: &Upload<'_, '_>) {
        let mut call = Call::new(Verb::DELETE, session.url);
        if let Ok(answer) = self.exchange(&mut call, &upload.scopes) {
            answer.finish();
        }
    }

    /// The URL of the session, which must belong to the registry.
    fn location(&self, answer: &Answer) -> std::result::Result<Url, Fault> {
        let missing = || Fault::last(&answer.request, "the answer has no location");
        let location = answer.header("location").ok_or_else(missing)?;
        let place = shown(location.split('?').next().unwrap_or(""));
        let url = answer.url.join(location).map_err(|bad| {
            Fault::last(&answer.request, format!("the location '{place}' cannot be used: {bad}"))
        })?;
        if url.origin == self.origin {
            return Ok(url);
        }
        let reason = format!("the location '{place}' is not at the registry {}", self.origin);
        Err(Fault::last(&answer.request, reason))
    }
}

/// Whether the registry does not know the session, or where it is.
fn is_lost(fault: &Fault) -> bool {
    matches!(fault.status(), Some(400 | 404 | 405 | 410 | 416))
}

fn unread(request: &str, error: &io::Error) -> Fault {
    let reason = Error::io(String::new(), error).reason;
    Fault::last(request, format!("cannot read the blob: {reason}"))
}

/// The bytes that the registry has, by `Range: 0-LAST`. An empty session is `0-0` in
/// docker-registry, and so is one with one byte, which is sent once more.
fn kept_bytes(answer: &Answer, size: u64) -> std::result::Result<u64, Fault> {
    let text = answer.header("range").unwrap_or("0-0");
    let range = text.strip_prefix("bytes=").unwrap_or(text);
    let last = range.strip_prefix("0-").and_then(|last| last.trim().parse::<u64>().ok());
    match last {
        Some(0) => Ok(0),
        Some(last) if last < size => Ok(last + 1),
        _ => {
            let reason = format!("the range '{}' of the upload makes no sense", shown(text));
            Err(Fault::last(&answer.request, reason))
        }
    }
}

/// Checks the digest that the registry says it stored.
pub(super) fn check_digest(answer: &Answer, digest: &Digest) -> std::result::Result<(), Fault> {
    match answer.header("docker-content-digest") {
        Some(found) if found != digest.to_string() => {
            let reason = format!("the registry stored '{}' instead of {digest}", shown(found));
            Err(Fault::last(&answer.request, reason))
        }
        _ => Ok(()),
    }
}

/// The bytes of one request, with a minimum rate.
struct Chunk<'c, 'm> {
    source: &'c mut dyn Source,
    meter: &'c Meter<'m>,
    counted: &'c mut u64,
    left: u64,
    pace: Pace,
    /// Why the source cannot be read.
    failed: Option<io::Error>,
}

impl Read for Chunk<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = self.left.min(buffer.len() as u64) as usize;
        let Some(buffer) = buffer.get_mut(..most).filter(|buffer| !buffer.is_empty()) else {
            return Ok(0);
        };
        let read = match self.source.read(buffer) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the blob is too short")),
            other => other,
        };
        match read {
            Ok(read) => {
                self.left -= read as u64;
                self.meter.add(read as u64);
                *self.counted += read as u64;
                if self.pace.is_kept(read as u64) {
                    return Ok(read);
                }
                Err(io::Error::new(io::ErrorKind::TimedOut, "the registry reads too slowly"))
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                let kind = error.kind();
                self.failed = Some(error);
                Err(kind.into())
            }
        }
    }
}
