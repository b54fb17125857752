//! Tests of the base: the fixture that they share.

mod read;
mod resolve;
mod write;

use super::*;
use crate::sys::file::{Rename, pread_full};
use crate::sys::xattr;
use crate::types::{Fingerprint, PERM_BITS, Timestamp};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{UtimensatFlags, lstat, utimensat};
use nix::sys::time::TimeSpec;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const ALL: [Features; 4] = [
    Features { openat2: true, view: true },
    Features { openat2: true, view: false },
    Features { openat2: false, view: true },
    Features { openat2: false, view: false },
];

/// A temporary directory with `base` and `outside` in it. No access through the base may reach
/// `outside`.
struct Fixture {
    dir: TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::create_dir(dir.path().join("base")).unwrap();
        std::fs::create_dir(dir.path().join("outside")).unwrap();
        std::fs::write(dir.path().join("outside/f"), b"outside").unwrap();
        Fixture { dir }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("base").join(path)
    }

    fn file(&self, path: &str, bytes: &[u8]) -> &Fixture {
        std::fs::write(self.at(path), bytes).unwrap();
        self
    }

    fn dir(&self, path: &str) -> &Fixture {
        std::fs::create_dir_all(self.at(path)).unwrap();
        self
    }

    fn link(&self, path: &str, target: &str) -> &Fixture {
        symlink(target, self.at(path)).unwrap();
        self
    }

    fn outside(&self) -> String {
        self.dir.path().join("outside").to_str().unwrap().to_owned()
    }

    fn open(&self, features: Features) -> Base {
        let base = Base::open_with(&self.at(""), features).unwrap();
        assert_eq!(base.has_private_view(), features.view, "these tests run as root");
        base
    }

    /// Runs `test` with each set of features.
    fn on_all(&self, test: impl Fn(&Arc<Base>)) {
        for features in ALL {
            test(&Arc::new(self.open(features)));
        }
    }
}

fn path(text: impl AsRef<[u8]>) -> TreePath {
    TreePath::parse(text.as_ref()).unwrap()
}

fn name(text: impl AsRef<[u8]>) -> Name {
    Name::new(text.as_ref()).unwrap()
}

fn read(base: &Base, at: impl AsRef<[u8]>) -> FsResult<Vec<u8>> {
    let file = base.open_file(&path(at))?;
    let mut bytes = vec![0; 4096];
    let filled = pread_full(&file, &mut bytes, 0)?;
    bytes.truncate(filled);
    Ok(bytes)
}

fn names(base: &Base, at: &str) -> FsResult<BTreeMap<Vec<u8>, Option<FileKind>>> {
    Ok(base.list(&path(at))?.into_iter().map(|e| (e.name.as_bytes().to_vec(), e.kind)).collect())
}

/// Access, modification and change time of a node on the host.
fn times(at: &Path) -> [(i64, i64); 3] {
    let stat = lstat(at).unwrap();
    [
        (stat.st_atime, stat.st_atime_nsec),
        (stat.st_mtime, stat.st_mtime_nsec),
        (stat.st_ctime, stat.st_ctime_nsec),
    ]
}

/// An ACL: owner rw-, user 1000 r--, group r--, mask r--, others ---.
const ACL: &[u8] = b"\x02\0\0\0\
    \x01\0\x06\0\xff\xff\xff\xff\
    \x02\0\x04\0\xe8\x03\0\0\
    \x04\0\x04\0\xff\xff\xff\xff\
    \x10\0\x04\0\xff\xff\xff\xff\
    \x20\0\0\0\xff\xff\xff\xff";
/// A capability: cap_net_raw, permitted and effective, version 2.
const CAP: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

fn pairs(list: &[(&[u8], &[u8])]) -> Vec<(Vec<u8>, Vec<u8>)> {
    list.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect()
}
