//! Receives described states from the sandbox, for `push` and `pull`.

use std::io::{self, BufReader, PipeReader};

use super::target::{Target, wrong_answer};
use crate::error::{Attempt, Error, Kind, Result};
use crate::sandbox::transfer::{FrameReader, Part, Stream};
use crate::sandbox::{DescribeTerms, Described, Reply, Request};
use crate::store::archive::edits::{Edits, is_document};
use crate::store::archive::tree_blob::TreeBlob;

/// One part of a description.
pub(super) enum Got<'b> {
    /// A chunk.
    Chunk(&'b [u8]),
    /// The end of a state, whose chunks came before.
    State(TreeBlob),
    /// The end of the edits, whose chunks came before.
    Edits(Edits),
}

/// Asks the sandbox to describe states, and gives the pipe to `consume` meanwhile. The sandbox
/// fills in the stream of `terms`.
///
/// # Errors
/// Those of the sandbox and of `consume`. If the sandbox closed the pipe early, its error counts.
pub(super) fn describe<T>(
    target: &mut Target,
    terms: DescribeTerms,
    consume: impl FnOnce(Source) -> Result<T>,
) -> Result<(Described, T)> {
    let (reader, writer) = io::pipe().attempt(|| "make a pipe")?;
    let terms = DescribeTerms { stream: Stream::new(writer), ..terms };
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| target.call(Request::Describe(terms)));
        let consumed = consume(Source::new(reader));
        let reply = asking.join().map_err(|_| wrong_answer())?;
        match (reply, consumed) {
            (Err(error), Err(consumed)) if consumed.attempt == CUT => Err(error),
            (_, Err(error)) => Err(error),
            (reply, Ok(consumed)) => match reply? {
                Reply::Described(described) => Ok((described, consumed)),
                _ => Err(wrong_answer()),
            },
        }
    })
}

/// The attempt in the error of a pipe that the sandbox closed early.
const CUT: &str = "receive the state from the sandbox";

/// The pipe from the sandbox.
pub(super) struct Source {
    frames: FrameReader<BufReader<PipeReader>>,
}

impl Source {
    fn new(from: PipeReader) -> Source {
        Source { frames: FrameReader::new(BufReader::with_capacity(256 << 10, from)) }
    }

    /// Receives everything.
    ///
    /// # Errors
    /// The sandbox stopped early or sent something malformed; and those of `take`.
    pub(super) fn receive(mut self, take: &mut dyn FnMut(Got<'_>) -> Result<()>) -> Result<()> {
        let (mut bytes, mut blob) = (Vec::new(), Vec::new());
        let mut is_blob = false;
        loop {
            match self.frames.next(&mut bytes).attempt(|| CUT)? {
                Part::Bytes if is_blob => blob.extend_from_slice(&bytes),
                Part::Bytes => take(Got::Chunk(&bytes))?,
                Part::End if is_blob => {
                    take(parse(&std::mem::take(&mut blob))?)?;
                    is_blob = false;
                }
                Part::End => is_blob = true,
                Part::Commit => return Ok(()),
            }
        }
    }
}

fn parse<'b>(blob: &[u8]) -> Result<Got<'b>> {
    let parsed = match is_document(blob) {
        true => Edits::parse(blob).map(Got::Edits),
        false => TreeBlob::parse(blob).map(Got::State),
    };
    parsed.map_err(|flaw| Error::new(Kind::Failed, "read the state", flaw.0))
}
