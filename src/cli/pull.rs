//! `jailfs pull`.
//!
//! This process fetches and verifies everything before the sandbox hears of it. The sandbox then
//! takes the state from a pipe, as it takes that of an import.

use std::io::{self, BufReader, PipeWriter};

use clap::Args;

use super::Global;
use super::import;
use super::out::Out;
use super::remote::{self, Line, Reach, What};
use super::target::{Target, wrong_answer};
use crate::artifact::Pull as Download;
use crate::error::{Attempt, Error, Kind, Result};
use crate::registry::Reference;
use crate::sandbox::transfer::{FrameReader, FrameWriter, Part, Stream};
use crate::sandbox::{DescribeTerms, ImportTerms, Imported, Reply, Request, Rev};

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
        let (download, bytes) = remote::with_progress("pulling", |meter| {
            let version = reference.version();
            let mut download = Download::begin(&repository, &cache, &version, meter)?;
            self.offer_present(&mut target, &mut download)?;
            download.fetch(meter)?;
            Ok((download, meter.received()))
        })?;
        let imported = self.hand_over(&mut target, &reference, &download)?;
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
        let (reader, writer) = io::pipe().attempt(|| "make a pipe")?;
        let terms = DescribeTerms { state, stream: Stream::new(writer) };
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| target.call(Request::Describe(terms)));
            let mut frames = FrameReader::new(BufReader::with_capacity(256 << 10, reader));
            let mut bytes = Vec::new();
            let offered = loop {
                match frames.next(&mut bytes) {
                    Ok(Part::Bytes) => match download.offer(&bytes) {
                        Ok(()) => {}
                        Err(error) => break Err(error),
                    },
                    // The tree blob is not needed: the reply says whether it came.
                    Ok(Part::End | Part::Commit) | Err(_) => break Ok(()),
                }
            };
            // The rest is read, so that the sandbox does not meet a closed pipe.
            while offered.is_ok() && matches!(frames.next(&mut bytes), Ok(Part::Bytes)) {}
            drop(frames);
            let reply = asking.join().map_err(|_| wrong_answer())?;
            offered?;
            match reply? {
                Reply::Described(_) => Ok(()),
                _ => Err(wrong_answer()),
            }
        })
    }

    /// Hands the state over to the sandbox.
    fn hand_over(
        &self,
        target: &mut Target,
        reference: &Reference,
        download: &Download<'_>,
    ) -> Result<Imported> {
        let (reader, writer) = io::pipe().attempt(|| "make a pipe")?;
        let terms = ImportTerms {
            name: reference.to_string(),
            into: self.into.clone(),
            onto: None,
            is_layers: false,
            is_state: true,
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

/// Sends the state to the sandbox. Sets `pipe_failed` if the pipe was closed early.
fn send(to: PipeWriter, download: &Download<'_>, pipe_failed: &mut bool) -> Result<()> {
    let mut to = FrameWriter::new(to);
    let mut noted = |written: io::Result<()>| {
        *pipe_failed |= written.is_err();
        written
    };
    download.write(&mut |bytes| noted(to.bytes(bytes)))?;
    let ended = noted(to.end_archive()).and_then(|()| noted(to.commit()));
    ended.map_err(|error| Error::io("send the state", &error).kind(Kind::Failed))
}
