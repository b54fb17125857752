//! The manifest of an artifact, as JSON.
//!
//! A manifest that was read is checked as a whole: what is made of it later needs no further check
//! of its numbers.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::registry::{Descriptor, Digest as BlobDigest};
use crate::store::archive::edits::MAX_EDITS;
use crate::store::archive::history::MAX_HISTORY;
use crate::store::archive::tree_blob::MAX_BLOB;
use crate::store::archive::writer::{FOOT, HEAD};
use crate::store::archive::{Digest, MAX_INDEX};
use crate::types::ByteRange;

/// The media type of the manifest.
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The type of the artifact.
const ARTIFACT: &str = "application/vnd.jailfs.checkpoint.v1";
const TREE: &str = "application/vnd.jailfs.tree.v1";
const PACK: &str = "application/vnd.jailfs.pack.v1";
const HISTORY: &str = "application/vnd.jailfs.history.v1";
const EDITS: &str = "application/vnd.jailfs.edits.v1";
/// The most packs of an artifact.
const MAX_PACKS: usize = 8192;

const CREATED: &str = "org.opencontainers.image.created";
const HEAD_NAME: &str = "vnd.jailfs.head";
const NAME: &str = "vnd.jailfs.name";
const MESSAGE: &str = "vnd.jailfs.message";
const ENTRIES: &str = "vnd.jailfs.entries";
const TREE_NAME: &str = "vnd.jailfs.tree";
const PARENT: &str = "vnd.jailfs.parent";
const PACK_NAME: &str = "vnd.jailfs.pack";
const INDEX: &str = "vnd.jailfs.index";
const CHECKPOINTS: &str = "vnd.jailfs.checkpoints";
const EDITS_COUNT: &str = "vnd.jailfs.edits";
const THIN: &str = "vnd.jailfs.thin";

/// The facts about a checkpoint that people want to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// When it was made, in RFC 3339.
    pub created: String,
    /// The head in which it was made.
    pub head: String,
    /// Its name.
    pub name: Option<String>,
    /// Its message.
    pub message: String,
    /// The tree that the push began with.
    pub parent: Option<Digest>,
}

/// A pack in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackBlob {
    pub(super) blob: Descriptor,
    /// The digest of its index.
    pub(super) name: Digest,
    /// Where the index is.
    pub(super) index: ByteRange,
}

/// A checkpoint in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// The facts about it.
    pub about: About,
    /// The number of entries of the tree.
    pub entries: u64,
    /// The name of the tree.
    pub tree: Digest,
    /// Whether it relies on files of the base.
    pub is_thin: bool,
    /// The tree blob.
    pub(super) tree_blob: Descriptor,
    /// The history, and the number of checkpoints in it.
    pub(super) history: Option<(Descriptor, u64)>,
    /// The edit history of its head, and the number of edits in it.
    pub(super) edits: Option<(Descriptor, u64)>,
    /// The packs that have its chunks.
    pub(super) packs: Vec<PackBlob>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    schema_version: u32,
    media_type: Option<String>,
    #[serde(default)]
    artifact_type: Option<String>,
    config: Part,
    layers: Vec<Part>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Part {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl Artifact {
    /// The number of checkpoints that come along.
    pub fn checkpoints(&self) -> u64 {
        self.history.as_ref().map_or(0, |(_, count)| *count)
    }

    /// The number of edits that can come along.
    pub fn edits(&self) -> u64 {
        self.edits.as_ref().map_or(0, |(_, count)| *count)
    }

    /// The bytes of the manifest. The same artifact gives the same bytes.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let part = |media_type: &str, blob: &Descriptor, annotations| Part {
            media_type: media_type.to_owned(),
            digest: blob.digest.to_string(),
            size: blob.size,
            annotations,
        };
        let pack = |pack: &PackBlob| {
            let PackBlob { blob, name, index } = pack;
            let index = format!("{}+{}", index.start, index.len());
            let names = [(PACK_NAME, name.to_string()), (INDEX, index)];
            part(PACK, blob, names.map(|(key, value)| (key.to_owned(), value)).into())
        };
        let counted = |media_type: &str, name: &str, (blob, count): &(Descriptor, u64)| {
            part(media_type, blob, [(name.to_owned(), count.to_string())].into())
        };
        let history = self.history.iter().map(|it| counted(HISTORY, CHECKPOINTS, it));
        let edits = self.edits.iter().map(|it| counted(EDITS, EDITS_COUNT, it));
        let About { created, head, name, message, parent } = &self.about;
        let annotations = [
            (CREATED, Some(created.clone())),
            (HEAD_NAME, Some(head.clone())),
            (NAME, name.clone()),
            (MESSAGE, Some(message.clone()).filter(|text| !text.is_empty())),
            (ENTRIES, Some(self.entries.to_string())),
            (TREE_NAME, Some(self.tree.to_string())),
            (PARENT, parent.map(|parent| parent.to_string())),
            (THIN, self.is_thin.then(|| "true".to_owned())),
        ];
        let annotations = annotations.into_iter();
        let document = Document {
            schema_version: 2,
            media_type: Some(MANIFEST.to_owned()),
            artifact_type: Some(ARTIFACT.to_owned()),
            config: part(TREE, &self.tree_blob, BTreeMap::new()),
            layers: history.chain(edits).chain(self.packs.iter().map(pack)).collect(),
            annotations: annotations
                .filter_map(|(key, value)| Some((key.to_owned(), value?)))
                .collect(),
        };
        serde_json::to_vec(&document)
            .map_err(|error| Error::new(Kind::Failed, "write the manifest", error.to_string()))
    }

    /// Reads a manifest. `None` if it is another artifact, or an image.
    ///
    /// # Errors
    /// It is a checkpoint, but malformed. `what` names it.
    pub(super) fn parse(bytes: &[u8], what: &str) -> Result<Option<Artifact>> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Type {
            artifact_type: Option<String>,
        }
        let kind: Option<Type> = serde_json::from_slice(bytes).ok();
        if kind.and_then(|kind| kind.artifact_type).as_deref() != Some(ARTIFACT) {
            return Ok(None);
        }
        parse(bytes).map(Some).map_err(|why| Error::damage(format!("read {what}"), why))
    }
}

fn blob_of(part: &Part) -> std::result::Result<Descriptor, String> {
    Ok(Descriptor { digest: BlobDigest::parse(&part.digest)?, size: part.size })
}

/// A document that goes along with the state.
struct Companion {
    media_type: &'static str,
    /// The annotation with the number of its elements.
    count: &'static str,
    most: usize,
    what: &'static str,
}

const WITH_HISTORY: Companion =
    Companion { media_type: HISTORY, count: CHECKPOINTS, most: MAX_HISTORY, what: "a history" };
const WITH_EDITS: Companion =
    Companion { media_type: EDITS, count: EDITS_COUNT, most: MAX_EDITS, what: "an edit history" };

impl Companion {
    /// Takes the document from the front of the layers, if it is there, and the number of its
    /// elements.
    fn take(&self, layers: &mut &[Part]) -> std::result::Result<Option<(Descriptor, u64)>, String> {
        let Some((part, rest)) = layers.split_first() else { return Ok(None) };
        if part.media_type != self.media_type {
            return Ok(None);
        }
        *layers = rest;
        let (blob, what, most) = (blob_of(part)?, self.what, self.most >> 20);
        if blob.size > self.most as u64 {
            return Err(format!("it has {what} of {} bytes, more than {most} MiB", blob.size));
        }
        let count = part.annotations.get(self.count).and_then(|text| text.parse().ok());
        let count = count.ok_or_else(|| format!("it has {what} without a number"))?;
        Ok(Some((blob, count)))
    }
}

fn parse(bytes: &[u8]) -> std::result::Result<Artifact, String> {
    let mut document: Document =
        serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if document.schema_version != 2 || document.config.media_type != TREE {
        return Err("it is no checkpoint of a version that this program knows".to_owned());
    }
    let tree_blob = blob_of(&document.config)?;
    if tree_blob.size > MAX_BLOB as u64 {
        return Err(format!("its tree blob has {} bytes, more than 64 MiB", tree_blob.size));
    }
    let mut layers = document.layers.as_slice();
    let history = WITH_HISTORY.take(&mut layers)?;
    let edits = WITH_EDITS.take(&mut layers)?;
    if layers.len() > MAX_PACKS {
        return Err(format!("it has more than {MAX_PACKS} packs"));
    }
    let mut names = BTreeSet::new();
    let mut packs = Vec::new();
    for part in layers {
        if part.media_type != PACK {
            return Err("it has a layer that is no pack".to_owned());
        }
        let blob = blob_of(part)?;
        let pack = pack_of(part, blob).ok_or("it has a pack without a place of its index")?;
        if !names.insert(pack.name) {
            return Err("it has a pack twice".to_owned());
        }
        packs.push(pack);
    }
    let mut take = |key: &str| document.annotations.remove(key);
    let number = take(ENTRIES).and_then(|text| text.parse().ok());
    let digest = |text: String| Digest::parse(&text).ok_or("a malformed digest of a tree");
    Ok(Artifact {
        about: About {
            created: take(CREATED).unwrap_or_default(),
            head: take(HEAD_NAME).unwrap_or_default(),
            name: take(NAME),
            message: take(MESSAGE).unwrap_or_default(),
            parent: take(PARENT).map(digest).transpose()?,
        },
        entries: number.ok_or("it has no number of entries")?,
        tree: digest(take(TREE_NAME).unwrap_or_default())?,
        is_thin: take(THIN).is_some_and(|text| text == "true"),
        tree_blob,
        history,
        edits,
        packs,
    })
}

/// The pack of a layer, if its index lies where the form of a pack has it.
fn pack_of(part: &Part, blob: Descriptor) -> Option<PackBlob> {
    let name = Digest::parse(part.annotations.get(PACK_NAME)?)?;
    let (start, len) = part.annotations.get(INDEX)?.split_once('+')?;
    let (start, len): (u64, u64) = (start.parse().ok()?, len.parse().ok()?);
    let is_right = start > HEAD
        && (1..=MAX_INDEX as u64).contains(&len)
        && start.checked_add(len)?.checked_add(FOOT)? == blob.size;
    is_right.then(|| PackBlob { blob, name, index: ByteRange::at(start, len) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact() -> Artifact {
        let blob = Descriptor { size: 1000, ..Descriptor::of(b"pack") };
        let index = ByteRange { start: 900, end: 1000 - FOOT };
        Artifact {
            about: About {
                created: "2026-01-02T03:04:05Z".to_owned(),
                head: "main".to_owned(),
                name: Some("green".to_owned()),
                message: "all \"tests\" pass\n\u{1b}[2J".to_owned(),
                parent: Some(Digest([7; 32])),
            },
            entries: 3,
            tree: Digest([1; 32]),
            is_thin: true,
            tree_blob: Descriptor::of(b"tree"),
            history: Some((Descriptor { size: 777, ..Descriptor::of(b"history") }, 5)),
            edits: Some((Descriptor { size: 778, ..Descriptor::of(b"edits") }, 6)),
            packs: vec![PackBlob { blob, name: Digest([2; 32]), index }],
        }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let bytes = artifact().encode().unwrap();
        assert_eq!(Artifact::parse(&bytes, "it").unwrap(), Some(artifact()));
        let none = About { name: None, message: String::new(), parent: None, ..artifact().about };
        let bare = Artifact { packs: Vec::new(), history: None, edits: None, ..artifact() };
        let bare = Artifact { about: none, is_thin: false, ..bare };
        assert_eq!(Artifact::parse(&bare.encode().unwrap(), "it").unwrap(), Some(bare));
    }

    #[test]
    fn another_artifact_is_none_and_a_malformed_one_is_refused() {
        for other in ["", "{}", "[]", "{\"artifactType\":1}", "{\"artifactType\":\"x\"}"] {
            assert_eq!(Artifact::parse(other.as_bytes(), "it").unwrap(), None, "{other}");
        }
        let text = String::from_utf8(artifact().encode().unwrap()).unwrap();
        let table = [
            ("\"schemaVersion\":2", "\"schemaVersion\":3"),
            ("\"size\":4", "\"size\":67108865"),
            ("\"size\":4", "\"size\":-1"),
            ("\"size\":1000", "\"size\":999"),
            ("\"size\":1000", "\"size\":18446744073709551615"),
            ("900+", "901+"),
            ("900+", "18446744073709551615+"),
            ("900+", "16+"),
            ("900+", "-1+"),
            (&"02".repeat(32), "../../../etc/passwd"),
            (&"02".repeat(32), ""),
            (&"01".repeat(32), "01"),
            (&"07".repeat(32), "07"),
            ("sha256:", "sha512:"),
            ("\"size\":777", "\"size\":67108865"),
            ("\"vnd.jailfs.checkpoints\":\"5\"", "\"vnd.jailfs.checkpoints\":\"-5\""),
            ("\"vnd.jailfs.checkpoints\"", "\"x\""),
            ("\"size\":778", "\"size\":134217729"),
            ("\"vnd.jailfs.edits\":\"6\"", "\"vnd.jailfs.edits\":\"x\""),
            (EDITS, HISTORY),
            (EDITS, "application/octet-stream"),
            (HISTORY, "application/octet-stream"),
            (PACK, HISTORY),
            (PACK, "application/octet-stream"),
            (TREE, "application/vnd.oci.image.config.v1+json"),
            ("\"vnd.jailfs.entries\":\"3\"", "\"vnd.jailfs.entries\":\"-3\""),
        ];
        for (from, to) in table {
            assert!(text.contains(from), "{from}");
            let error = Artifact::parse(text.replace(from, to).as_bytes(), "it").unwrap_err();
            assert_eq!(error.kind, Kind::Damage, "{from} -> {to}: {error}");
        }
        let layers = text.find(&format!("{{\"mediaType\":\"{PACK}")).unwrap();
        let pack = &text[layers..text.find("],\"annotations\"").unwrap()];
        let twice = text.replace(pack, &format!("{pack},{pack}"));
        assert!(Artifact::parse(twice.as_bytes(), "it").unwrap_err().reason.contains("twice"));
        let many = text.replace(pack, &vec![pack; MAX_PACKS + 1].join(","));
        assert!(Artifact::parse(many.as_bytes(), "it").unwrap_err().reason.contains("8192"));
    }
}
