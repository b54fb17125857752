//! `jailfs ls`.

use clap::Args;

use super::format;
use super::out::{self, Out};
use super::remote::{self, Line, Reach, What};
use crate::artifact::{Listed, list};
use crate::error::{Error, Kind, Result};
use crate::registry::{Reference, Version};

/// Digits of a tree that are printed.
const DIGITS: usize = 12;

/// List the states in a repository of an OCI registry, newest first
#[derive(Args)]
pub(super) struct Ls {
    /// The repository: HOST[:PORT]/NAME; with a tag, only that one
    #[arg(value_name = "REF")]
    reference: String,
    #[command(flatten)]
    reach: Reach,
    /// Print one JSON object per tag
    #[arg(long)]
    json: bool,
}

impl Ls {
    pub(super) fn run(&self) -> Result<u8> {
        let reference = Reference::parse(&self.reference)?;
        let only = match &reference.version {
            None => None,
            Some(Version::Tag(tag)) => Some(tag),
            Some(Version::Digest(_)) => {
                let attempt = format!("list '{reference}'");
                return Err(Error::new(Kind::Usage, attempt, "a digest has no tags"));
            }
        };
        let repository = self.reach.open(&reference)?;
        let (listed, others) =
            remote::with_progress("listing", |_| list(&repository, only.map(String::as_str)))?;
        let mut out = Out::new();
        if self.json {
            for Listed { tag, manifest, artifact } in &listed {
                let version = Some(Version::Tag(tag.clone()));
                let reference = Reference { version, ..reference.clone() };
                let what = What::new(&reference, manifest, artifact);
                out.line(&Line::Listed { tag, what }.text()?);
            }
            out.finish()?;
            return Ok(0);
        }
        let width = |cell: fn(&Listed) -> String| {
            listed.iter().map(|one| cell(one).chars().count()).max().unwrap_or(0)
        };
        let (tags, names) = (width(|one| one.tag.clone()), width(name));
        for one in &listed {
            out.line(&line(one, tags, names));
        }
        out.finish()?;
        if others > 0 {
            out::note(&format!("{others} more tags name images or other artifacts"));
        }
        Ok(0)
    }
}

/// `TAG  TIME  TREE < PARENT  NAME  MESSAGE`.
fn line(one: &Listed, tags: usize, names: usize) -> String {
    let about = &one.artifact.about;
    let short = |text: String| text.get(..DIGITS).unwrap_or(&text).to_owned();
    let tree = short(one.artifact.tree.to_string());
    let parent = about.parent.map_or_else(|| "-".to_owned(), |parent| short(parent.to_string()));
    let time = format::one_line(&about.created.replace('T', " "));
    let (tag, name, message) = (&one.tag, name(one), format::one_line(&about.message));
    format!("{tag:tags$}  {time:20}  {tree} < {parent:DIGITS$}  {name:names$}  {message}")
        .trim_end()
        .to_owned()
}

fn name(one: &Listed) -> String {
    one.artifact.about.name.as_deref().map_or_else(|| "-".to_owned(), format::one_line)
}
