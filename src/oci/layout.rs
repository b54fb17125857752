//! A layout on the host.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use nix::libc;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use super::blob::{self, LayerWriter, Verified, blob_name};
use super::documents::{
    CONFIG, Config, Descriptor, Index, LAYER_GZIP, MANIFEST, Manifest, Marker, NewConfig,
};
use crate::error::{Attempt, Error, Kind, Result};
use crate::types::quoted;

const MARKER: &str = "oci-layout";
const INDEX_FILE: &str = "index.json";
const BLOBS: &str = "blobs/sha256";
/// The largest document that is read, in bytes.
const MAX_DOCUMENT: u64 = 8 << 20;
/// How deep indexes may nest.
const MAX_DEPTH: u32 = 4;
/// The most layers of an image.
const MAX_LAYERS: usize = 10_000;
const BUFFER: usize = 256 << 10;

/// A directory that is a layout.
pub struct Layout {
    dir: PathBuf,
}

/// A layer that was written.
pub struct NewLayer {
    descriptor: Descriptor,
    /// The digest of its bytes without compression.
    diff_id: String,
    /// A description for people.
    text: String,
}

/// The layers of an image, lowest first, each with the digest of its bytes without compression.
pub struct Image {
    /// The layers.
    pub layers: Vec<(Descriptor, Option<String>)>,
}

impl Layout {
    /// Opens a layout.
    ///
    /// # Errors
    /// The directory is not a layout, or of another version.
    pub fn open(dir: &Path) -> Result<Layout> {
        let layout = Layout { dir: dir.to_owned() };
        let marker: Marker = layout.document(MARKER).map_err(|error| {
            let why = format!("it is not an OCI image layout: {}: {}", error.attempt, error.reason);
            Error { errno: error.errno, ..Error::new(Kind::Failed, layout.attempt("open"), why) }
        })?;
        match marker.version.strip_prefix("1.") {
            Some(_) => Ok(layout),
            None => {
                let why = format!("version '{}' is not known", quoted(marker.version.as_bytes()));
                Err(Error::new(Kind::Failed, layout.attempt("open"), why))
            }
        }
    }

    /// Opens a layout for writing, or makes one in a directory that is new or empty.
    ///
    /// # Errors
    /// The directory holds something else, or cannot be written.
    pub fn create_or_open(dir: &Path) -> Result<Layout> {
        let layout = Layout { dir: dir.to_owned() };
        let attempt = || layout.attempt("make");
        let is_empty = match std::fs::read_dir(dir) {
            Ok(mut names) => names.next().is_none(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => return Err(Error::io(attempt(), &error)),
        };
        if !is_empty && !dir.join(MARKER).exists() {
            let why = "the directory is not empty, and not an OCI image layout";
            return Err(Error::new(Kind::Failed, attempt(), why).hint("name a new directory"));
        }
        std::fs::create_dir_all(dir.join(BLOBS)).attempt(attempt)?;
        if is_empty {
            layout.write(INDEX_FILE, &Index::new())?;
            layout.write(MARKER, &Marker { version: "1.0.0".to_owned() })?;
        }
        Layout::open(dir)
    }

    fn attempt(&self, verb: &str) -> String {
        format!("{verb} layout '{}'", self.dir.display())
    }

    /// Whether the layout has an image of this tag.
    ///
    /// # Errors
    /// The index cannot be read.
    pub fn has_tag(&self, tag: &str) -> Result<bool> {
        let index: Index = self.document(INDEX_FILE)?;
        Ok(index.manifests.iter().any(|image| image.tag() == Some(tag)))
    }

    /// Begins a layer.
    ///
    /// # Errors
    /// Its file cannot be made.
    pub fn new_layer(&self) -> Result<LayerWriter> {
        LayerWriter::new(&self.dir.join(BLOBS)).attempt(|| self.attempt("write"))
    }

    /// Ends a layer and publishes its blob.
    ///
    /// # Errors
    /// Those of writing.
    pub fn finish_layer(&self, layer: LayerWriter, text: String) -> Result<NewLayer> {
        let attempt = || self.attempt("write");
        let LayerWriter { to, dir } = layer;
        let (gzip, diff_id, _) = to.finish();
        let (file, digest, size) = gzip.finish().attempt(attempt)?.finish();
        blob::publish(file, &dir, &digest)?;
        Ok(NewLayer { descriptor: Descriptor::new(LAYER_GZIP, digest, size), diff_id, text })
    }

    /// Publishes an image of these layers, lowest first, under a tag. Returns the digest of its
    /// manifest.
    ///
    /// # Errors
    /// Those of writing. The tag then names what it named before.
    pub fn tag(&self, tag: &str, layers: Vec<NewLayer>) -> Result<String> {
        let described = layers.iter().map(|layer| (layer.diff_id.clone(), layer.text.clone()));
        let config = self.put(CONFIG, &NewConfig::new(described.collect()))?;
        let manifest = self.put(
            MANIFEST,
            &Manifest {
                schema_version: 2,
                media_type: Some(MANIFEST.to_owned()),
                config,
                layers: layers.into_iter().map(|layer| layer.descriptor).collect(),
            },
        )?;
        let digest = manifest.digest.clone();
        let mut index: Index = self.document(INDEX_FILE)?;
        index.manifests.retain(|image| image.tag() != Some(tag));
        index.manifests.push(manifest.tagged(tag));
        index.manifests.sort_by(|a, b| a.tag().cmp(&b.tag()));
        self.write(INDEX_FILE, &index)?;
        Ok(digest)
    }

    /// Writes a document as a blob.
    fn put(&self, media_type: &str, document: &impl Serialize) -> Result<Descriptor> {
        let attempt = || self.attempt("write");
        let bytes = serde_json::to_vec(document).map_err(io::Error::from).attempt(attempt)?;
        let dir = self.dir.join(BLOBS);
        let mut file = blob::new_file(&dir).attempt(attempt)?;
        file.write_all(&bytes).attempt(attempt)?;
        let digest = blob::digest_text(Sha256::new_with_prefix(&bytes));
        blob::publish(file, &dir, &digest)?;
        Ok(Descriptor::new(media_type, digest, bytes.len() as u64))
    }

    /// Writes a file of the layout beside its name, and renames it.
    fn write(&self, name: &str, document: &impl Serialize) -> Result<()> {
        let attempt = || format!("write '{}'", self.dir.join(name).display());
        let bytes = serde_json::to_vec(document).map_err(io::Error::from).attempt(attempt)?;
        let mut file = blob::new_file(&self.dir).attempt(attempt)?;
        file.write_all(&bytes).attempt(attempt)?;
        file.as_file().sync_all().attempt(attempt)?;
        let renamed = file.persist(self.dir.join(name));
        renamed.map(drop).map_err(|error| error.error).attempt(attempt)
    }

    /// Opens a file of the layout; not through a link, and nothing but a regular file.
    fn open_file(&self, path: &Path) -> io::Result<File> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is not a regular file")),
        }
    }

    /// Reads a file of the layout.
    fn document<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let path = self.dir.join(name);
        let attempt = || format!("read '{}'", path.display());
        let file = self.open_file(&path).attempt(attempt)?;
        let mut bytes = Vec::new();
        file.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes).attempt(attempt)?;
        parsed(&bytes, &attempt())
    }

    /// Reads a blob that is a document.
    fn document_blob<T: DeserializeOwned>(&self, blob: &Descriptor) -> Result<T> {
        let attempt = format!("read blob {}", quoted(blob.digest.as_bytes()));
        if blob.size > MAX_DOCUMENT {
            return Err(Error::new(Kind::Failed, attempt, "it is too large for a document"));
        }
        let mut bytes = Vec::new();
        self.blob(blob)?.read_to_end(&mut bytes).attempt(|| attempt.as_str())?;
        parsed(&bytes, &attempt)
    }

    /// The bytes of a blob, which are checked while they are read.
    ///
    /// # Errors
    /// The blob is missing, or its digest is malformed.
    pub fn blob(&self, blob: &Descriptor) -> Result<Verified<File>> {
        let path = self.dir.join(BLOBS).join(blob_name(&blob.digest)?);
        let file = self.open_file(&path).attempt(|| format!("open '{}'", path.display()))?;
        Ok(Verified::new(file, &blob.digest, blob.size))
    }

    /// The bytes of a layer without compression, which are checked while they are read.
    ///
    /// # Errors
    /// As [`Layout::blob`]; a compression that is not known.
    pub fn layer(&self, layer: &Descriptor, diff_id: Option<&str>) -> Result<Box<dyn Read>> {
        let attempt = || format!("read layer {}", quoted(layer.digest.as_bytes()));
        let plain = decompressed(self.blob(layer)?, &attempt())?;
        Ok(match diff_id {
            Some(diff_id) => Box::new(Verified::new(plain, diff_id, 0).of_any_size()),
            None => plain,
        })
    }

    /// The image of a tag; without one the only image.
    ///
    /// # Errors
    /// [`Kind::NoStore`] for a tag that the layout does not have. A document is malformed, missing
    /// or too large.
    pub fn image(&self, tag: Option<&str>) -> Result<Image> {
        let index: Index = self.document(INDEX_FILE)?;
        let attempt = || self.attempt("read");
        let tags = || {
            let tags = index.manifests.iter().filter_map(|image| image.tag());
            let tags: Vec<String> = tags.map(|tag| quoted(tag.as_bytes())).collect();
            format!("it has: {}", tags.join(", "))
        };
        let found = match tag {
            Some(tag) => index.manifests.iter().find(|image| image.tag() == Some(tag)),
            None => index.manifests.first().filter(|_| index.manifests.len() == 1),
        };
        let Some(found) = found else {
            let why = match tag {
                Some(tag) => format!("it has no tag '{}'", quoted(tag.as_bytes())),
                None => format!("it has {} images", index.manifests.len()),
            };
            return Err(Error::new(Kind::NoStore, attempt(), why).hint(tags()));
        };
        let manifest: Manifest = self.document_blob(&self.manifest(found.clone())?)?;
        if manifest.layers.len() > MAX_LAYERS {
            return Err(Error::new(Kind::Failed, attempt(), "the image has too many layers"));
        }
        let config: Config = self.document_blob(&manifest.config)?;
        let diff_ids = config.rootfs.diff_ids;
        if !diff_ids.is_empty() && diff_ids.len() != manifest.layers.len() {
            let why = "its manifest and its configuration have different numbers of layers";
            return Err(Error::new(Kind::Failed, attempt(), why));
        }
        let diff_ids = diff_ids.into_iter().map(Some).chain(std::iter::repeat(None));
        Ok(Image { layers: manifest.layers.into_iter().zip(diff_ids).collect() })
    }

    /// The manifest that a descriptor leads to, through indexes of images for several machines.
    fn manifest(&self, mut at: Descriptor) -> Result<Descriptor> {
        let fail = |why: String| Err(Error::new(Kind::Failed, self.attempt("read"), why));
        for _ in 0..MAX_DEPTH {
            if at.is_manifest() {
                return Ok(at);
            }
            if !at.is_index() {
                let kind = quoted(at.media_type.as_bytes());
                return fail(format!("a blob of type '{kind}' is not an image"));
            }
            let index: Index = self.document_blob(&at)?;
            match index.manifests.into_iter().find(Descriptor::is_for_this_machine) {
                Some(image) => at = image,
                None => return fail("it has no image for this machine".to_owned()),
            }
        }
        fail("its indexes nest too deep".to_owned())
    }
}

fn parsed<T: DeserializeOwned>(bytes: &[u8], attempt: &str) -> Result<T> {
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(Error::new(Kind::Failed, attempt, "it is too large for a document"));
    }
    serde_json::from_slice(bytes)
        .map_err(|error| Error::new(Kind::Failed, attempt, format!("it is malformed: {error}")))
}

/// The bytes of an archive without compression.
fn decompressed<R: Read + 'static>(from: R, attempt: &str) -> Result<Box<dyn Read>> {
    let mut from = BufReader::with_capacity(BUFFER, from);
    let begin = from.fill_buf().attempt(|| attempt)?;
    match begin {
        [0x1f, 0x8b, ..] => Ok(Box::new(MultiGzDecoder::new(from))),
        // A frame, or a skippable one.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => unzstd(from, attempt),
        [0xfd, b'7', b'z', b'X', b'Z', ..] => Err(other_compression(attempt, "xz")),
        [b'B', b'Z', b'h', ..] => Err(other_compression(attempt, "bzip2")),
        _ => Ok(Box::new(from)),
    }
}

fn other_compression(attempt: &str, name: &str) -> Error {
    let why = format!("it is compressed by {name}; only gzip and zstd are read");
    Error::new(Kind::Failed, attempt, why)
}

#[cfg(feature = "zstd")]
#[expect(clippy::unnecessary_wraps, reason = "it fails without the feature zstd")]
fn unzstd<R: BufRead + 'static>(from: R, _attempt: &str) -> Result<Box<dyn Read>> {
    Ok(Box::new(super::zstd::Decoder::new(from)))
}

#[cfg(not(feature = "zstd"))]
fn unzstd<R: BufRead>(_from: R, attempt: &str) -> Result<Box<dyn Read>> {
    let why = "it is compressed by zstd, and this jailfs was built without the feature zstd";
    Err(Error::new(Kind::Failed, attempt, why))
}

/// The bytes of an archive in a file, which may be compressed by gzip or zstd.
///
/// # Errors
/// The file cannot be read, or is compressed in another way.
pub fn open_tar(from: File, name: &str) -> Result<Box<dyn Read>> {
    decompressed(from, &format!("read '{name}'"))
}
