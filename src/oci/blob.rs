//! Writes and reads blobs with their digests.

use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::error::{Attempt, Error, Kind, Result};

/// A file beside its final name, with the mode that the user's umask allows.
pub(super) fn new_file(dir: &Path) -> io::Result<NamedTempFile> {
    let mode = std::fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(".jailfs-").permissions(mode).tempfile_in(dir)
}

/// Writes, and counts and hashes what it writes.
pub(super) struct Hashing<W> {
    to: W,
    hash: Sha256,
    len: u64,
}

impl<W: Write> Hashing<W> {
    pub(super) fn new(to: W) -> Hashing<W> {
        Hashing { to, hash: Sha256::new(), len: 0 }
    }

    pub(super) fn finish(self) -> (W, String, u64) {
        (self.to, digest_text(self.hash), self.len)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hash.update(bytes.get(..written).unwrap_or_default());
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

pub(super) fn digest_text(hash: Sha256) -> String {
    let digits = hash.finalize();
    digits.iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// The name of the blob with a digest.
///
/// # Errors
/// It is not `sha256:` with 64 digits.
pub(super) fn blob_name(digest: &str) -> Result<&str> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let name = digest.strip_prefix("sha256:");
    name.filter(|name| name.len() == 64 && name.bytes().all(is_digit)).ok_or_else(|| {
        let why = format!("'{}' is not a sha256 digest", crate::types::quoted(digest.as_bytes()));
        Error::new(Kind::Failed, "read the layout", why)
    })
}

/// A layer that is being written: hashed, compressed, and hashed again.
pub struct LayerWriter {
    pub(super) to: Hashing<GzEncoder<Hashing<NamedTempFile>>>,
    pub(super) dir: PathBuf,
}

impl LayerWriter {
    /// A layer in the directory of blobs.
    pub(super) fn new(dir: &Path) -> io::Result<LayerWriter> {
        let file = Hashing::new(new_file(dir)?);
        let gzip = GzEncoder::new(file, Compression::default());
        Ok(LayerWriter { to: Hashing::new(gzip), dir: dir.to_owned() })
    }
}

impl Write for LayerWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Makes a file with this digest visible under its name. A blob that is there already has the same
/// bytes.
pub(super) fn publish(file: NamedTempFile, dir: &Path, digest: &str) -> Result<()> {
    let path = dir.join(blob_name(digest)?);
    let attempt = || format!("write '{}'", path.display());
    if path.symlink_metadata().is_ok_and(|there| there.is_file()) {
        return Ok(());
    }
    file.as_file().sync_all().attempt(attempt)?;
    file.persist(&path).map(drop).map_err(|error| error.error).attempt(attempt)
}

/// Reads bytes, and checks size and digest at their end.
pub struct Verified<R> {
    from: R,
    hash: Sha256,
    /// Bytes that must follow, if their number is known.
    left: Option<u64>,
    /// The expected digest, and whether it was checked.
    digest: String,
    is_checked: bool,
}

impl<R: Read> Verified<R> {
    pub(super) fn new(from: R, digest: &str, size: u64) -> Verified<R> {
        let (hash, digest) = (Sha256::new(), digest.to_owned());
        Verified { from, hash, left: Some(size), digest, is_checked: false }
    }

    /// The same, for bytes of which only the digest is known.
    pub(super) fn of_any_size(mut self) -> Verified<R> {
        self.left = None;
        self
    }

    fn bad(&self, why: &str) -> io::Error {
        let digest = crate::types::quoted(self.digest.as_bytes());
        io::Error::new(io::ErrorKind::InvalidData, format!("blob {digest} {why}"))
    }
}

impl<R: Read> Read for Verified<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.is_checked || buffer.is_empty() {
            return Ok(0);
        }
        let got = self.from.read(buffer)?;
        if got == 0 {
            if self.left.is_some_and(|left| left > 0) {
                return Err(self.bad("is shorter than its descriptor says"));
            }
            if digest_text(std::mem::take(&mut self.hash)) != self.digest {
                return Err(self.bad("has another digest than its name says"));
            }
            self.is_checked = true;
            return Ok(0);
        }
        if let Some(left) = self.left {
            let left = left.checked_sub(got as u64);
            self.left = Some(left.ok_or_else(|| self.bad("is longer than its descriptor says"))?);
        }
        self.hash.update(buffer.get(..got).unwrap_or_default());
        Ok(got)
    }
}
