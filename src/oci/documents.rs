//! The JSON documents of a layout, as far as they are used here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub(super) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(super) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub(super) const LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// The annotation of a descriptor that has its tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The time of everything: an image says what it holds, and not when it was made.
const NO_TIME: &str = "1970-01-01T00:00:00Z";

/// Names a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    pub(super) media_type: String,
    pub(super) digest: String,
    pub(super) size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<String, String>,
    #[serde(flatten)]
    other: BTreeMap<String, serde_json::Value>,
}

impl Descriptor {
    pub(super) fn new(media_type: &str, digest: String, size: u64) -> Descriptor {
        let media_type = media_type.to_owned();
        let (annotations, other) = (BTreeMap::new(), BTreeMap::new());
        Descriptor { media_type, digest, size, annotations, other }
    }

    /// The digest, as `sha256:` and 64 digits.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    pub(super) fn tag(&self) -> Option<&str> {
        self.annotations.get(REF_NAME).map(String::as_str)
    }

    pub(super) fn tagged(mut self, tag: &str) -> Descriptor {
        self.annotations.insert(REF_NAME.to_owned(), tag.to_owned());
        self
    }

    pub(super) fn is_index(&self) -> bool {
        matches!(self.media_type.as_str(), INDEX | DOCKER_LIST)
    }

    pub(super) fn is_manifest(&self) -> bool {
        matches!(self.media_type.as_str(), MANIFEST | DOCKER_MANIFEST)
    }

    /// Whether the image is for this machine, or for none in particular.
    pub(super) fn is_for_this_machine(&self) -> bool {
        let Some(platform) = self.other.get("platform") else { return true };
        let is = |key: &str, wanted: &str| {
            platform.get(key).is_none_or(|value| value.as_str() == Some(wanted))
        };
        is("os", "linux") && is("architecture", architecture())
    }
}

/// The file `oci-layout`.
#[derive(Serialize, Deserialize)]
pub(super) struct Marker {
    #[serde(rename = "imageLayoutVersion")]
    pub(super) version: String,
}

/// The file `index.json`, and blobs of the same form.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Index {
    pub(super) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) media_type: Option<String>,
    pub(super) manifests: Vec<Descriptor>,
    #[serde(flatten)]
    other: BTreeMap<String, serde_json::Value>,
}

impl Index {
    pub(super) fn new() -> Index {
        let media_type = Some(INDEX.to_owned());
        Index { schema_version: 2, media_type, manifests: Vec::new(), other: BTreeMap::new() }
    }
}

/// An image: its configuration and its layers, lowest first.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    pub(super) schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) media_type: Option<String>,
    pub(super) config: Descriptor,
    pub(super) layers: Vec<Descriptor>,
}

/// The configuration of an image, as it is read.
#[derive(Deserialize)]
pub(super) struct Config {
    #[serde(default)]
    pub(super) rootfs: RootFs,
}

/// The layers of a configuration.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct RootFs {
    #[serde(rename = "type", default)]
    kind: String,
    /// The digests of the layers as they are without compression.
    #[serde(default)]
    pub(super) diff_ids: Vec<String>,
}

/// The configuration of an image, as it is written.
#[derive(Serialize)]
pub(super) struct NewConfig {
    created: &'static str,
    architecture: &'static str,
    os: &'static str,
    config: BTreeMap<String, String>,
    rootfs: RootFs,
    history: Vec<NewHistory>,
}

#[derive(Serialize)]
struct NewHistory {
    created: &'static str,
    created_by: String,
}

impl NewConfig {
    /// The configuration of layers with these digests and descriptions.
    pub(super) fn new(layers: Vec<(String, String)>) -> NewConfig {
        let (diff_ids, texts): (Vec<String>, Vec<String>) = layers.into_iter().unzip();
        let history = |created_by| NewHistory { created: NO_TIME, created_by };
        NewConfig {
            created: NO_TIME,
            architecture: architecture(),
            os: "linux",
            config: BTreeMap::new(),
            rootfs: RootFs { kind: "layers".to_owned(), diff_ids },
            history: texts.into_iter().map(history).collect(),
        }
    }
}

/// The name that images have for the architecture of this machine.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        "loongarch64" => "loong64",
        other => other,
    }
}

/// Whether an image can have this tag.
pub fn is_tag(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let begins_well = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    begins_well && text.len() <= 128 && text.chars().all(is_plain)
}
