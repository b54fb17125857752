//! `jailfs push`.
//!
//! The sandbox describes the state into a pipe. This process packs what the registry lacks and
//! sends it, with the logins of the caller.

use std::io::{self, BufReader, PipeReader};

use clap::Args;

use super::Global;
use super::date;
use super::format;
use super::out::Out;
use super::remote::{self, Line, Reach, What};
use super::target::{Target, wrong_answer};
use crate::artifact::{About, Push as Upload, PushOutcome};
use crate::error::{Attempt, Error, Kind, Result};
use crate::registry::{Meter, Reference, Version};
use crate::sandbox::transfer::{FrameReader, Part, Stream};
use crate::sandbox::{DescribeTerms, Described, Reply, Request, Rev};
use crate::store::archive::tree_blob::TreeBlob;

/// Push a state to a tag of an OCI registry
///
/// Only content that the registry lacks is sent. Logins are those of podman and docker. If the
/// push is interrupted, the tag names what it named before, and the next push goes on.
#[derive(Args)]
pub(super) struct Push {
    /// The tag: HOST[:PORT]/NAME[:TAG]
    #[arg(value_name = "REF")]
    reference: String,
    /// The state: '@' for now, the number or name of a checkpoint, '@-N', 'base', 'HEAD@'
    #[arg(value_name = "STATE", default_value = "@")]
    state: String,
    /// The pushed state whose content is not sent again; the default is the one that was pushed or
    /// pulled last, or what the tag names
    #[arg(long, value_name = "REF")]
    parent: Option<String>,
    #[command(flatten)]
    reach: Reach,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// Why the description of a state could not be received.
enum Failed {
    /// The sandbox has closed the pipe, and its reply says why.
    Pipe(Error),
    /// Another reason.
    Here(Error),
}

impl Push {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let reference = Reference::parse(&self.reference)?;
        let Version::Tag(tag) = reference.version() else {
            let attempt = format!("push to '{reference}'");
            return Err(Error::new(Kind::Usage, attempt, "a digest cannot be chosen")
                .hint("name a tag: HOST[:PORT]/NAME:TAG"));
        };
        let parent = self.parent(&reference)?;
        let mut target = Target::find(global)?;
        let repository = self.reach.open(&reference)?;
        let cache = remote::cache()?;
        let key = remote::key(&target, &reference);
        let outcome = remote::with_progress("pushing", |meter| {
            let both = (&repository, &cache);
            let upload = Upload::begin(both, &tag, parent.as_ref(), &key, meter)?;
            self.push(&mut target, upload, &key, meter)
        })?;
        self.tell(&reference, &outcome)?;
        Ok(0)
    }

    /// The version of `--parent`, which is in the same repository.
    fn parent(&self, reference: &Reference) -> Result<Option<Version>> {
        let Some(text) = &self.parent else { return Ok(None) };
        let parent = Reference::parse(text)?;
        if (&parent.registry, &parent.name) != (&reference.registry, &reference.name) {
            let attempt = format!("use '{parent}' as the parent");
            let why = format!("it is in another repository than '{reference}'");
            return Err(Error::new(Kind::Usage, attempt, why));
        }
        Ok(Some(parent.version()))
    }

    fn push(
        &self,
        target: &mut Target,
        upload: Upload<'_>,
        key: &str,
        meter: &mut Meter<'_>,
    ) -> Result<PushOutcome> {
        let (reader, writer) = io::pipe().attempt(|| "make a pipe")?;
        let terms = DescribeTerms { state: Rev::parse(&self.state), stream: Stream::new(writer) };
        let (described, blob, pushing) = std::thread::scope(|scope| {
            let asking = scope.spawn(|| target.call(Request::Describe(terms)));
            let mut pipe_failed = false;
            let uploaded = upload.upload(meter, |take| {
                receive(reader, take).map_err(|failed| match failed {
                    Failed::Pipe(error) => {
                        pipe_failed = true;
                        error
                    }
                    Failed::Here(error) => error,
                })
            });
            let reply = asking.join().map_err(|_| wrong_answer())?;
            match (reply, uploaded) {
                (Err(error), Err(_)) if pipe_failed => Err(error),
                (_, Err(error)) => Err(error),
                (reply, Ok((blob, pushing))) => match reply? {
                    Reply::Described(described) => Ok((described, blob, pushing)),
                    _ => Err(wrong_answer()),
                },
            }
        })?;
        upload.finish(pushing, &blob, about(described), key, meter)
    }

    fn tell(&self, reference: &Reference, outcome: &PushOutcome) -> Result<()> {
        let PushOutcome { artifact, manifest, blobs, bytes, was_there } = outcome;
        let mut out = Out::new();
        if self.json {
            let what = What::new(reference, manifest, artifact);
            let (blobs, bytes, was_there) = (*blobs, *bytes, *was_there);
            out.line(&Line::Pushed { what, blobs, bytes, was_there }.text()?);
            return out.finish();
        }
        let state = format::one_line(&self.state);
        let entries = artifact.entries;
        if *was_there {
            out.line(&format!("{reference} has {state} already: {entries} entries"));
        } else {
            let sent = match blobs {
                0 => "nothing was sent".to_owned(),
                1 => format!("1 blob sent, {}", format::size(*bytes)),
                _ => format!("{blobs} blobs sent, {}", format::size(*bytes)),
            };
            out.line(&format!("pushed {state} to {reference}: {entries} entries, {sent}"));
        }
        out.line(&format!("digest: {manifest}"));
        out.finish()
    }
}

/// Receives the chunks of a state, and then its tree blob.
fn receive(
    from: PipeReader,
    take: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> std::result::Result<TreeBlob, Failed> {
    let mut frames = FrameReader::new(BufReader::with_capacity(256 << 10, from));
    let (mut bytes, mut blob) = (Vec::new(), Vec::new());
    let mut is_blob = false;
    loop {
        let part = frames.next(&mut bytes);
        match part.attempt(|| "read the state").map_err(Failed::Pipe)? {
            Part::Bytes if is_blob => blob.extend_from_slice(&bytes),
            Part::Bytes => take(&bytes).map_err(Failed::Here)?,
            Part::End => is_blob = true,
            Part::Commit => break,
        }
    }
    TreeBlob::parse(&blob)
        .map_err(|flaw| Failed::Here(Error::new(Kind::Failed, "read the state", flaw.0)))
}

fn about(described: Described) -> About {
    let Described { head, checkpoint, .. } = described;
    let Some(checkpoint) = checkpoint else {
        let name = Some("base".to_owned());
        return About { head, name, ..About::default() };
    };
    let message = if checkpoint.automatic { String::new() } else { checkpoint.message };
    About {
        created: date::utc(checkpoint.time).replace(' ', "T"),
        head,
        name: checkpoint.name,
        message,
        parent: None,
    }
}
