//! Lists the checkpoints of a repository.

use super::manifest::Artifact;
use super::pull::{artifact, no_such};
use crate::error::Result;
use crate::registry::{Digest, Repository, Version};

/// A tag that names a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The tag.
    pub tag: String,
    /// The digest of the manifest.
    pub manifest: Digest,
    /// The checkpoint.
    pub artifact: Artifact,
}

/// The checkpoints that tags name, newest first; or that one tag names. Also the number of tags
/// that name something else.
///
/// # Errors
/// There is no such tag; the registry does not answer or refuses; a manifest is malformed.
pub fn list(repository: &Repository, only: Option<&str>) -> Result<(Vec<Listed>, u64)> {
    let (mut listed, mut others) = (Vec::new(), 0);
    if let Some(tag) = only {
        let version = Version::Tag(tag.to_owned());
        let (artifact, manifest) =
            artifact(repository, &version)?.ok_or_else(|| no_such(&version))?;
        return Ok((vec![Listed { tag: tag.to_owned(), manifest, artifact }], 0));
    }
    for tag in repository.tags()? {
        // A tag can vanish meanwhile.
        let Some(found) = repository.manifest(&Version::Tag(tag.clone()))? else { continue };
        match Artifact::parse(&found.bytes, &format!("the manifest of '{tag}'"))? {
            Some(artifact) => listed.push(Listed { tag, manifest: found.digest, artifact }),
            None => others += 1,
        }
    }
    listed.sort_by(|a, b| b.artifact.about.created.cmp(&a.artifact.about.created));
    Ok((listed, others))
}
