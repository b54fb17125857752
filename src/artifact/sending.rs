//! Writes states for the sandbox: tree streams in which the bytes of a chunk follow its name.
//!
//! Several states are sent one after the other. The content of a file that the state before has at
//! the same path is not sent again. `timeline/import/state.rs` describes the form.

use std::collections::HashMap;
use std::io;

use super::spool::Spool;
use crate::error::{Attempt, Error, Result};
use crate::store::archive::bytes::{put_bytes, put_number, put_signed};
use crate::store::archive::edits::Edits;
use crate::store::archive::history::Facts;
use crate::store::archive::tree_blob::{
    ContentDigest, Event, Piece, TreeBlob, load, put_event, put_magic,
};
use crate::store::archive::{ChunkSource, Digest};
use crate::types::Name;

/// Bytes that are sent to the sandbox at once.
const BUFFER: usize = 256 << 10;

/// Takes what is written; `None` is the end of a state.
pub type Take<'a> = &'a mut dyn FnMut(Option<&[u8]>) -> io::Result<()>;

/// The contents of the files of a state, by the digests of their paths.
type Contents = HashMap<Digest, Digest>;

/// Sends states.
pub(super) struct Sending<'a> {
    spool: &'a Spool,
    take: Take<'a>,
    buffer: Vec<u8>,
    /// The contents that the sandbox has at present; `None` if only one state is sent.
    before: Option<Contents>,
}

/// The file whose pieces come.
struct OpenFile {
    left: u64,
    path: Digest,
    pieces: Vec<Piece>,
}

/// The files of a state while it is read.
#[derive(Default)]
struct Walk {
    names: Vec<Name>,
    file: Option<OpenFile>,
    contents: Contents,
}

impl<'a> Sending<'a> {
    /// Sends one state, or several of which the first one continues `onto` if that is given.
    ///
    /// # Errors
    /// A description is damaged.
    pub(super) fn new(
        spool: &'a Spool,
        take: Take<'a>,
        has_several: bool,
        onto: Option<&TreeBlob>,
    ) -> Result<Sending<'a>> {
        let before = match onto {
            Some(blob) => Some(contents_of(blob, spool)?),
            None => has_several.then(Contents::new),
        };
        Ok(Sending { spool, take, buffer: Vec::with_capacity(2 * BUFFER), before })
    }

    /// Sends a state, which is a checkpoint if it has `facts`.
    ///
    /// # Errors
    /// Those of the receiver, and damage of the cache.
    pub(super) fn state(&mut self, blob: &TreeBlob, facts: Option<&Facts>) -> Result<()> {
        self.buffer.push(u8::from(facts.is_some()));
        if let Some(Facts { name, message, time, .. }) = facts {
            put_bytes(&mut self.buffer, name.as_deref().unwrap_or_default().as_bytes());
            put_bytes(&mut self.buffer, message.as_bytes());
            put_signed(&mut self.buffer, time.secs);
            put_number(&mut self.buffer, u64::from(time.nanos));
        }
        put_magic(&mut self.buffer);
        let mut walk = Walk::default();
        load(blob, self.spool, &mut |event| match self.before.is_some() {
            false => self.event(&event),
            true => self.event_or_known(event, &mut walk),
        })?;
        self.send(0)?;
        (self.take)(None).attempt(|| "send the state")?;
        self.before = self.before.take().map(|_| walk.contents);
        Ok(())
    }

    /// Sends edits, with all of their content.
    ///
    /// # Errors
    /// As [`Sending::state`].
    pub(super) fn edits(&mut self, edits: &Edits) -> Result<()> {
        let encoded = edits.encode();
        let encoded = encoded.map_err(|flaw| Error::damage("send the edits", flaw.0))?;
        self.buffer.push(2);
        put_bytes(&mut self.buffer, &encoded);
        put_magic(&mut self.buffer);
        load(&edits.files, self.spool, &mut |event| self.event(&event))?;
        self.send(0)?;
        (self.take)(None).attempt(|| "send the edits")
    }

    /// Sends an event of the only state, or of edits.
    fn event(&mut self, event: &Event) -> Result<()> {
        put_event(event, &mut self.buffer)?;
        match event {
            Event::File { size: 1.., .. } => self.buffer.push(0),
            Event::Piece(Piece::Chunk(chunk)) => {
                self.spool.append_unverified(chunk, &mut self.buffer)?;
            }
            _ => {}
        }
        self.send(BUFFER)
    }

    /// Sends an event. The pieces of a file wait for its end, because the content may be known.
    fn event_or_known(&mut self, event: Event, walk: &mut Walk) -> Result<()> {
        let Some(content) = walk.see(&event) else {
            if !matches!(event, Event::Piece(_)) {
                put_event(&event, &mut self.buffer)?;
            }
            return self.send(BUFFER);
        };
        let OpenFile { path, pieces, .. } = content;
        let digest = digest_of(&pieces);
        let is_known = self.before.as_ref().is_some_and(|it| it.get(&path) == Some(&digest));
        walk.contents.insert(path, digest);
        self.buffer.push(u8::from(is_known));
        for piece in pieces {
            put_event(&Event::Piece(piece), &mut self.buffer)?;
            if let (Piece::Chunk(chunk), false) = (piece, is_known) {
                self.spool.append_unverified(&chunk, &mut self.buffer)?;
            }
            self.send(BUFFER)?;
        }
        Ok(())
    }

    /// Sends the buffer if it has at least so many bytes.
    fn send(&mut self, least: usize) -> Result<()> {
        if self.buffer.len() >= least.max(1) {
            (self.take)(Some(&self.buffer)).attempt(|| "send the state")?;
            self.buffer.clear();
        }
        Ok(())
    }
}

impl Walk {
    /// Notes an event. Returns a file whose last piece it is.
    fn see(&mut self, event: &Event) -> Option<OpenFile> {
        match event {
            Event::Dir { name, .. } => self.names.extend(name.clone()),
            Event::End => drop(self.names.pop()),
            Event::File { name, size: left @ 1.., .. } => {
                let path = self.path(name);
                self.file = Some(OpenFile { left: *left, path, pieces: Vec::new() });
            }
            Event::Piece(piece) => {
                let file = self.file.as_mut()?;
                file.pieces.push(*piece);
                file.left = file.left.saturating_sub(piece.len());
                if file.left == 0 {
                    return self.file.take();
                }
            }
            _ => {}
        }
        None
    }

    fn path(&self, name: &Name) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for name in self.names.iter().chain([name]) {
            hasher.update(name.as_bytes()).update(b"/");
        }
        Digest(*hasher.finalize().as_bytes())
    }
}

fn digest_of(pieces: &[Piece]) -> Digest {
    let mut digest = ContentDigest::default();
    pieces.iter().for_each(|piece| digest.add(piece));
    digest.finish()
}

/// The contents of the files of a state.
fn contents_of(blob: &TreeBlob, source: &dyn ChunkSource) -> Result<Contents> {
    let mut walk = Walk::default();
    load(blob, source, &mut |event| {
        if let Some(OpenFile { path, pieces, .. }) = walk.see(&event) {
            walk.contents.insert(path, digest_of(&pieces));
        }
        Ok(())
    })?;
    Ok(walk.contents)
}
