//! Reads and writes manifests.
//!
//! A manifest is the bytes that its digest names. This module verifies them, and leaves their
//! meaning to its caller.

use super::Repository;
use super::auth::Scopes;
use super::digest::{Descriptor, Digest};
use super::fault::Fault;
use super::http::{Answer, Call, Payload, Verb};
use super::limits::MANIFEST;
use super::reference::Version;
use super::retry::repeated;
use super::upload::check_digest;
use crate::error::{Error, Kind, Result};

/// The types of manifests that are asked for.
const ACCEPTED: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";

/// A manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Its media type.
    pub media_type: String,
    /// The digest of its bytes.
    pub digest: Digest,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl Repository {
    /// The manifest of a tag or digest, if there is one.
    ///
    /// # Errors
    /// The registry refuses, or sends bytes that do not fit the digest or are more than 4 MiB.
    pub fn manifest(&self, version: &Version) -> Result<Option<Manifest>> {
        Ok(repeated(&self.limits, || self.get_manifest(version))?)
    }

    /// The digest and size of the manifest of a tag or digest, if there is one.
    ///
    /// # Errors
    /// As [`Repository::manifest`].
    pub fn find_manifest(&self, version: &Version) -> Result<Option<Descriptor>> {
        Ok(repeated(&self.limits, || self.head_manifest(version))?)
    }

    /// Writes a manifest under a tag or its digest. A tag names the old or the new manifest at any
    /// time. All blobs that it names must have been pushed.
    ///
    /// # Errors
    /// The manifest is too large, or the registry refuses it or is cut too often.
    pub fn push_manifest(
        &self,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest> {
        let digest = Digest::of(bytes);
        let attempt = || format!("push the manifest {version}");
        if bytes.len() > MANIFEST {
            return Err(Error::new(Kind::Failed, attempt(), "it is larger than 4 MiB"));
        }
        if matches!(version, Version::Digest(named) if *named != digest) {
            return Err(Error::new(Kind::Failed, attempt(), "it has another digest"));
        }
        repeated(&self.limits, || {
            let call = Call::new(Verb::PUT, self.manifest_url(version));
            let mut call =
                Call { payload: Payload::Bytes(bytes), ..call }.header("content-type", media_type);
            let answer = self.exchange(&mut call, &Scopes::push(&self.name))?;
            let answer = answer.expect(&[201, 200, 202])?;
            check_digest(&answer, &digest)?;
            answer.finish();
            Ok(())
        })?;
        Ok(digest)
    }

    fn manifest_url(&self, version: &Version) -> super::Url {
        self.url(&format!("manifests/{version}"))
    }

    fn ask_manifest(
        &self,
        verb: Verb,
        version: &Version,
    ) -> std::result::Result<Option<Answer>, Fault> {
        let mut call = Call::new(verb, self.manifest_url(version)).header("accept", ACCEPTED);
        let answer = self.exchange(&mut call, &Scopes::pull(&self.name))?;
        if answer.status == 404 {
            answer.finish();
            return Ok(None);
        }
        answer.expect(&[200]).map(Some)
    }

    fn get_manifest(&self, version: &Version) -> std::result::Result<Option<Manifest>, Fault> {
        let Some(mut answer) = self.ask_manifest(Verb::GET, version)? else { return Ok(None) };
        let bytes = answer.bytes(MANIFEST)?;
        let digest = Digest::of(&bytes);
        let announced = announced_digest(&answer, version)?;
        if announced.is_some_and(|announced| announced != digest) {
            let reason = format!("the registry sends other bytes, with the digest {digest}");
            return Err(Fault::last(&answer.request, reason));
        }
        let media_type = answer.header("content-type").unwrap_or("");
        let media_type = media_type.split(';').next().unwrap_or("").trim().to_owned();
        Ok(Some(Manifest { media_type, digest, bytes }))
    }

    fn head_manifest(&self, version: &Version) -> std::result::Result<Option<Descriptor>, Fault> {
        let Some(answer) = self.ask_manifest(Verb::HEAD, version)? else { return Ok(None) };
        let (announced, size) = (announced_digest(&answer, version)?, answer.length());
        if let (Some(digest), Some(size)) = (announced, size) {
            if size > MANIFEST as u64 {
                return Err(Fault::last(&answer.request, "the manifest is larger than 4 MiB"));
            }
            return Ok(Some(Descriptor { digest, size }));
        }
        // The registry does not say it, so it is computed.
        let found = self.get_manifest(version)?;
        Ok(found.map(|found| Descriptor { digest: found.digest, size: found.bytes.len() as u64 }))
    }
}

/// The digest that the answer must have: the one that was asked for, and the announced one.
fn announced_digest(
    answer: &Answer,
    version: &Version,
) -> std::result::Result<Option<Digest>, Fault> {
    let announced = answer.header("docker-content-digest").map(Digest::parse).transpose();
    let bad = |reason: &str| Fault::last(&answer.request, format!("its digest: {reason}"));
    let announced = announced.map_err(bad)?;
    match (version, announced) {
        (Version::Digest(asked), Some(found)) if *asked != found => {
            Err(Fault::last(&answer.request, format!("the registry answers with {found}")))
        }
        (Version::Digest(asked), _) => Ok(Some(*asked)),
        (Version::Tag(_), announced) => Ok(announced),
    }
}
