//! `jailfs pull`.
//!
//! This process fetches and verifies everything before the sandbox hears of it. The sandbox then
//! takes the state from a pipe, as it takes that of an import.

use std::io::{self, PipeWriter};

use clap::Args;

use super::Global;
use super::described::{self, Got};
use super::import;
use super::out::Out;
use super::remote::{self, Line, Reach, What};
use super::target::{Target, wrong_answer};
use crate::artifact::Pull as Download;
use crate::error::{Attempt, Error, Kind, Result};
use crate::registry::Reference;
use crate::sandbox::transfer::{FrameWriter, Stream};
use crate::sandbox::{Checkpoint, DescribeTerms, ImportTerms, Imported, Reply, Request, Rev};
use crate::store::archive::history::{Facts, Past};
use crate::store::archive::tree_blob::TreeBlob;
use crate::types::LayerId;

/// Replace the tree by a state from an OCI registry, in place
///
/// The output says how to undo it. Only content that this machine lacks is fetched, and every byte
/// is verified. If the pull is interrupted, nothing has changed, and the next pull goes on.
#[derive(Args)]
pub(super) struct Pull {
    /// The state: HOST[:PORT]/NAME[:TAG] or HOST[:PORT]/NAME@DIGEST
    #[arg(value_name = "REF")]
    reference: String,
    /// The head whose tree is replaced. A new one is made if there is none of this name
    #[arg(long, value_name = "HEAD")]
    into: Option<String>,
    /// Take along at most this many of the checkpoints that were pushed with it; the default is all
    #[arg(long, value_name = "N")]
    history: Option<u64>,
    /// Replace the edit history of each file that was pushed with one. The state must have been
    /// pushed with --edits
    #[arg(long)]
    edits: bool,
    /// Detach mounts on directories that disappear, instead of refusing
    #[arg(long)]
    detach_mounts: bool,
    #[command(flatten)]
    reach: Reach,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Pull {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let reference = Reference::parse(&self.reference)?;
        let mut target = Target::find(global)?;
        let repository = self.reach.open(&reference)?;
        let cache = remote::cache()?;
        let (download, after, bytes) = remote::with_progress("pulling", |meter| {
            let wanted = (&reference.version(), self.history, self.edits);
            let mut download = Download::begin(&repository, &cache, wanted, meter)?;
            let after = self.find_present(&mut target, &mut download)?;
            self.offer_present(&mut target, &mut download)?;
            download.fetch(meter)?;
            Ok((download, after, meter.received()))
        })?;
        let imported = self.hand_over(&mut target, (&reference, after), &download)?;
        let (artifact, manifest) = download.finish(&remote::key(&target, &reference));
        import::tell(&imported, "pulled", self.json)?;
        if self.json {
            let mut out = Out::new();
            let what = What::new(&reference, &manifest, &artifact);
            out.line(&Line::Pulled { what, bytes }.text()?);
            out.finish()?;
        }
        Ok(0)
    }

    /// Offers what the tree has now, so that it is not fetched.
    fn offer_present(&self, target: &mut Target, download: &mut Download<'_>) -> Result<()> {
        let Reply::Forks(heads) = target.call(Request::Forks)? else { return Err(wrong_answer()) };
        let state = match &self.into {
            Some(into) if heads.iter().any(|head| head.name == *into) => {
                Rev::Head { head: into.clone(), back: 0 }
            }
            _ => Rev::Now,
        };
        offer(target, state, download).map(drop)
    }

    /// Finds the newest checkpoint of the history that the sandbox has: with the same time, name
    /// and message, and the same tree.
    fn find_present(
        &self,
        target: &mut Target,
        download: &mut Download<'_>,
    ) -> Result<Option<LayerId>> {
        if download.history().is_empty() {
            return Ok(None);
        }
        let Reply::Log(log) = target.call(Request::Log)? else { return Err(wrong_answer()) };
        let is_same = |past: &Past, one: &Checkpoint| {
            let Facts { name, message, time, .. } = &past.facts;
            !one.automatic && (&one.time, &one.message) == (time, message) && one.name == *name
        };
        let pasts = download.history().iter().enumerate().rev();
        let mut found = pasts.filter_map(|(number, past)| {
            let one = log.iter().find(|one| is_same(past, one))?;
            Some((number, past.tree, one.id))
        });
        let Some((number, tree, id)) = found.next() else { return Ok(None) };
        if offer(target, Rev::Id(id), download)?.digest() != tree {
            return Ok(None);
        }
        download.continue_after(number);
        Ok(Some(id))
    }

    /// Hands the state over to the sandbox.
    fn hand_over(
        &self,
        target: &mut Target,
        (reference, after): (&Reference, Option<LayerId>),
        download: &Download<'_>,
    ) -> Result<Imported> {
        let (reader, writer) = io::pipe().attempt(|| "make a pipe")?;
        let terms = ImportTerms {
            name: reference.to_string(),
            into: self.into.clone(),
            onto: None,
            is_layers: false,
            is_state: true,
            after,
            detach_mounts: self.detach_mounts,
            stream: Stream::new(reader),
        };
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| target.call(Request::Import(terms)));
            let mut pipe_failed = false;
            let sent = send(writer, download, &mut pipe_failed);
            let reply = asking.join().map_err(|_| wrong_answer())?;
            match (reply, sent) {
                (Err(error), Err(_)) if pipe_failed => Err(error),
                (_, Err(error)) => Err(error),
                (reply, Ok(())) => match reply? {
                    Reply::Imported(imported) => Ok(imported),
                    _ => Err(wrong_answer()),
                },
            }
        })
    }
}

/// Offers all chunks of a state of the sandbox. Returns its tree blob.
fn offer(target: &mut Target, state: Rev, download: &mut Download<'_>) -> Result<TreeBlob> {
    let (is_thin, stream) = (download.is_thin(), Stream::default());
    let terms = DescribeTerms { state, history: 0, is_thin, has_edits: false, stream };
    let (_, blob) = described::describe(target, terms, |source| {
        let mut last = None;
        source.receive(&mut |got| match got {
            Got::Chunk(bytes) => download.offer(bytes),
            Got::Edits(_) => Err(wrong_answer()),
            Got::State(blob) => {
                last = Some(blob);
                Ok(())
            }
        })?;
        last.ok_or_else(wrong_answer)
    })?;
    Ok(blob)
}

/// Sends the state to the sandbox. Sets `pipe_failed` if the pipe was closed early.
fn send(to: PipeWriter, download: &Download<'_>, pipe_failed: &mut bool) -> Result<()> {
    let mut to = FrameWriter::new(to);
    let mut noted = |written: io::Result<()>| {
        *pipe_failed |= written.is_err();
        written
    };
    download.write(&mut |bytes| match bytes {
        Some(bytes) => noted(to.bytes(bytes)),
        None => noted(to.end_archive()),
    })?;
    noted(to.commit()).map_err(|error| Error::io("send the state", &error).kind(Kind::Failed))
}
