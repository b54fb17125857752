//! Reads a tree stream, event by event.

use crate::error::{Error, Result};
use crate::store::archive::Flaw;
use crate::store::archive::bytes::Input;
use crate::store::archive::tree_blob::layout::{Event, MAGIC, take_piece};
use crate::store::archive::tree_blob::rules::Rules;

/// Reads a tree stream from `I`.
pub struct TreeReader<I> {
    input: I,
    rules: Rules,
    has_begun: bool,
    /// Names the stream in errors.
    what: String,
}

impl<I: Input> TreeReader<I> {
    /// Reads from the start of a stream. `what` names it in errors.
    pub fn new(input: I, what: impl Into<String>) -> TreeReader<I> {
        TreeReader { input, rules: Rules::default(), has_begun: false, what: what.into() }
    }

    /// Where the stream comes from, for what follows the event that was read last.
    pub fn input(&mut self) -> &mut I {
        &mut self.input
    }

    /// Entries so far.
    pub fn entries(&self) -> u64 {
        self.rules.entries()
    }

    /// The next event. `None` at the end of a complete stream.
    ///
    /// # Errors
    /// Damage, with the path of the entry, and a failed read.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        self.take().map_err(|flaw| Error::damage(format!("read {}", self.what), flaw.0))
    }

    fn take(&mut self) -> std::result::Result<Option<Event>, Flaw> {
        if !self.has_begun {
            let mut magic = [0; MAGIC.len()];
            self.input.fill(&mut magic)?;
            if magic != *MAGIC {
                return Err(Flaw::new("it is not a tree of a version that this program knows"));
            }
            self.has_begun = true;
        }
        if self.rules.is_over() {
            return match self.input.is_at_end()? {
                true => Ok(None),
                false => Err(Flaw::new("bytes after the end of the root")),
            };
        }
        let taken = match self.rules.wants_piece() {
            true => take_piece(&mut self.input).map(Event::Piece),
            false => Event::take(&mut self.input),
        };
        let event = taken
            .map_err(|flaw| Flaw::new(format!("at or after '{}': {flaw}", self.rules.path())))?;
        self.rules.check(&event)?;
        Ok(Some(event))
    }
}
