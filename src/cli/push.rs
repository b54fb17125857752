//! `jailfs push`.
//!
//! The sandbox describes the state into a pipe. This process packs what the registry lacks and
//! sends it, with the logins of the caller.

use clap::Args;

use super::Global;
use super::date;
use super::described::{self, Got, Source};
use super::format;
use super::out::Out;
use super::remote::{self, Line, Reach, What};
use super::target::{Target, wrong_answer};
use crate::artifact::{About, Described as Pushed, Push as Upload, PushOutcome};
use crate::error::{Error, Kind, Result};
use crate::registry::{Meter, Reference, Version};
use crate::sandbox::transfer::Stream;
use crate::sandbox::{Checkpoint, DescribeTerms, Described, Rev};
use crate::store::archive::Chunk;
use crate::store::archive::edits::Edits;
use crate::store::archive::history::{Facts, History, Past};
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
    /// The state: '@' for now, the number or name of a checkpoint, '@-N', 'base', 'HEAD@',
    /// 'HEAD@NAME'
    #[arg(value_name = "STATE", default_value = "@")]
    state: String,
    /// The pushed state whose content is not sent again; the default is the one that was pushed or
    /// pulled last, or what the tag names
    #[arg(long, value_name = "REF")]
    parent: Option<String>,
    /// Push this many of the checkpoints that lead to the state as well, with names and messages
    #[arg(long, value_name = "N", default_value_t = 0)]
    history: u64,
    /// Push the edit history of single files as well. The state must be '@'
    #[arg(long)]
    edits: bool,
    /// Name files of the base by their digests instead of sending their content. Such a state can
    /// be pulled only onto a base with the same files
    #[arg(long)]
    thin: bool,
    #[command(flatten)]
    reach: Reach,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

impl Push {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let reference = Reference::parse(&self.reference)?;
        let Version::Tag(tag) = reference.version() else {
            let attempt = format!("push to '{reference}'");
            return Err(Error::new(Kind::Usage, attempt, "a digest cannot be chosen")
                .hint("name a tag: HOST[:PORT]/NAME:TAG"));
        };
        if self.edits && self.state != "@" {
            let why = "only the tree as it is now has an edit history";
            return Err(Error::new(
                Kind::Usage,
                format!("push the edits of '{}'", self.state),
                why,
            )
            .hint("push '@', or leave out --edits"));
        }
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
        meter: &Meter<'_>,
    ) -> Result<PushOutcome> {
        let terms = DescribeTerms {
            state: Rev::parse(&self.state),
            history: self.history,
            is_thin: self.thin,
            has_edits: self.edits,
            stream: Stream::default(),
        };
        let (described, (received, pushing)) = described::describe(target, terms, |source| {
            upload.upload(meter, |take| receive(source, take))
        })?;
        let Received { blob, pasts, edits } = received;
        let checkpoints = pasts.into_iter().zip(&described.history);
        let checkpoints = checkpoints.map(|(mut past, one)| {
            past.facts = facts(one);
            past
        });
        let history = History { checkpoints: checkpoints.collect() };
        let state =
            Pushed { blob: &blob, history: &history, edits: edits.as_ref(), is_thin: self.thin };
        upload.finish(pushing, &state, about(described), key, meter)
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
            let checkpoints = along(artifact.checkpoints(), "checkpoint");
            let along = checkpoints + &along(artifact.edits(), "edit");
            out.line(&format!("pushed {state} to {reference}: {entries} entries{along}, {sent}"));
        }
        out.line(&format!("digest: {manifest}"));
        out.finish()
    }
}

/// A count of things that go along with a state, for people.
fn along(count: u64, what: &str) -> String {
    match count {
        0 => String::new(),
        1 => format!(", 1 {what}"),
        count => format!(", {count} {what}s"),
    }
}

/// A description that the sandbox sent.
struct Received {
    /// The last state.
    blob: TreeBlob,
    /// The checkpoints, without the facts about them.
    pasts: Vec<Past>,
    edits: Option<Edits>,
}

/// Receives the chunks of the states, and passes on those of the tree blobs of the checkpoints.
fn receive(source: Source, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<Received> {
    let (mut last, mut pasts, mut edits) = (None::<TreeBlob>, Vec::new(), None);
    source.receive(&mut |got| match got {
        Got::Chunk(bytes) => take(bytes),
        Got::Edits(document) => {
            edits = Some(document);
            Ok(())
        }
        Got::State(blob) => {
            if let Some(past) = last.replace(blob) {
                let each = &mut |chunk: Chunk<'_>| take(chunk.bytes());
                pasts.push(Past::new(Facts::default(), &past, each)?);
            }
            Ok(())
        }
    })?;
    Ok(Received { blob: last.ok_or_else(wrong_answer)?, pasts, edits })
}

fn facts(checkpoint: &Checkpoint) -> Facts {
    let Checkpoint { name, message, head, time, .. } = checkpoint.clone();
    Facts { name, message, head, time }
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
