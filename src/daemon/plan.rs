//! The plan of a mount: its paths, and the options that its user can choose.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::fs::SnapdirView;
use crate::fuse;
use crate::jail::Policy;
use crate::sandbox::Protected;
use crate::sandbox::{Bounds, KeepPolicy, StoreOptions, View};
use crate::types::Name;

/// The paths of a mount, and its options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The base; absolute.
    #[serde(with = "path_bytes")]
    pub base: PathBuf,
    /// The mount point; absolute.
    #[serde(with = "path_bytes")]
    pub mount_point: PathBuf,
    /// The store; absolute.
    #[serde(with = "path_bytes")]
    pub store: PathBuf,
    /// The head.
    pub head: String,
    /// The options.
    pub choice: Choice,
}

/// A mount that a client asks a running daemon for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MountPlan {
    /// The mount point; absolute.
    #[serde(with = "path_bytes")]
    pub(super) mount_point: PathBuf,
    /// The options.
    pub(super) options: MountChoice,
}

/// The options of a mount that a client asks a running daemon for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountChoice {
    /// These.
    Chosen(Box<Choice>),
    /// Those of the mount of another head, or the default if it is not mounted.
    AsHead(String),
}

/// The options of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Refuse all writes.
    pub read_only: bool,
    /// Let other users enter. None is the default of `fuse`.
    pub allow_other: Option<bool>,
    /// Let the kernel cache writes (FUSE writeback cache).
    pub writeback: bool,
    /// How wake-ups are made cheap while requests follow each other.
    pub wake: fuse::Wake,
    /// How many threads serve requests; `None`: the default.
    pub threads: Option<u8>,
    /// How many of them may take requests at the same time; `None`: one.
    pub parallel: Option<u8>,
    /// Honour setuid bits.
    pub suid: bool,
    /// Let device nodes work.
    pub dev: bool,
    /// Refuse to start programs.
    pub noexec: bool,
    /// Other flags of mount(2), by their names.
    pub vfs: Vec<String>,
    /// The source that `mount` and `df` show. Empty for the path of the base.
    pub source: Vec<u8>,
    /// How READLINK is answered.
    pub links: Links,
    /// Prefixes of paths outside the mount to which symlinks may lead.
    pub allowed_targets: Vec<Vec<u8>>,
    /// Make fsync do nothing.
    pub volatile: bool,
    /// Accept a base that is not the directory for which the store was made.
    pub other_base: bool,
    /// Do not deduplicate content.
    pub no_dedup: bool,
    /// The maximum number of stored bytes. None for no limit.
    pub max_bytes: Option<u64>,
    /// The maximum number of new or changed nodes. None for no limit.
    pub max_files: Option<u64>,
    /// Run garbage collection on request only.
    pub no_gc: bool,
    /// The number of newest checkpoints that are kept. None for all.
    pub keep: Option<u64>,
    /// The size of the store, in bytes, above which the oldest checkpoints are dropped. None for no
    /// limit.
    pub max_store: Option<u64>,
    /// The number of last operations whose states are kept. None is the default.
    pub operations: Option<u64>,
    /// The number of edits that are kept of each file. None is the default.
    pub history: Option<u32>,
    /// The maximum number of bytes of content that only edits need. None is the default.
    pub history_bytes: Option<u64>,
    /// How the root shows the checkpoints.
    pub snapdir: Snapdir,
    /// The name of the directory that shows them. Empty for the default.
    pub snapname: Vec<u8>,
    /// Refuse to make checkpoints by mkdir(2) in that directory.
    pub no_snapmkdir: bool,
    /// Paths that an apply writes only with consent.
    pub protected: Protected,
}

/// The default name of the directory that shows the checkpoints.
const SNAPNAME: &[u8] = b".jailfs";

/// How the checkpoints are shown in the root of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Snapdir {
    /// Under a name that the root does not list.
    #[default]
    Hidden,
    /// The root lists it.
    Visible,
    /// Not at all.
    Off,
}

/// How a mount answers READLINK (`-o links=`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Links {
    /// Following a link that leads out is refused. readlink(2) returns the stored text.
    #[default]
    Show,
    /// Following and reading a link that leads out are both refused.
    Deny,
    /// As `Deny`, and every other link is answered in relative canonical form.
    Rewrite,
    /// Every link is answered as stored. Something around the mount must be the jail.
    Literal,
}

impl Choice {
    pub(super) fn store_options(&self) -> StoreOptions {
        StoreOptions { volatile: self.volatile, other_base: self.other_base }
    }

    pub(super) fn history(&self) -> Bounds {
        let default = Bounds::default();
        Bounds {
            edits: self.history.unwrap_or(default.edits),
            bytes: self.history_bytes.unwrap_or(default.bytes),
        }
    }

    /// The policy of automatic garbage collection. None if it is off or the mount is read-only.
    pub(super) fn policy(&self) -> Option<KeepPolicy> {
        let operations = self.operations.unwrap_or(KeepPolicy::OPERATIONS);
        let policy = KeepPolicy { operations, checkpoints: self.keep, store_bytes: self.max_store };
        (!self.no_gc && !self.read_only).then_some(policy)
    }

    pub(super) fn mount_options(&self, head: &str) -> fuse::MountOptions {
        fuse::MountOptions {
            head: head.to_owned(),
            read_only: self.read_only,
            allow_other: self.allow_other,
            writeback: self.writeback,
            wake: self.wake,
            threads: self.threads,
            parallel: self.parallel,
            suid: self.suid,
            dev: self.dev,
            noexec: self.noexec,
            source: self.source.clone(),
            vfs: self.vfs.clone(),
        }
    }

    pub(super) fn view(&self, mount_point: &Path) -> Result<View> {
        Ok(View {
            mount_point: mount_point.to_owned(),
            policy: match self.links {
                Links::Deny => Policy::Deny,
                Links::Rewrite => Policy::Rewrite,
                Links::Literal => Policy::Literal,
                Links::Show => Policy::Show,
            },
            allowed_targets: self.allowed_targets.clone(),
            snapdir: self.past()?,
        })
    }

    fn past(&self) -> Result<Option<SnapdirView>> {
        if self.snapdir == Snapdir::Off {
            return Ok(None);
        }
        let name = if self.snapname.is_empty() { SNAPNAME } else { &self.snapname };
        let name = Name::new(name).map_err(|_| {
            let name = String::from_utf8_lossy(name);
            Error::new(Kind::Usage, format!("show the checkpoints as '{name}'"), "it is not a name")
        })?;
        let listed = self.snapdir == Snapdir::Visible;
        Ok(Some(SnapdirView { name, listed, makes: !self.no_snapmkdir && !self.read_only }))
    }
}

/// Serialises paths as bytes, because serde's own form takes only UTF-8.
pub(super) mod path_bytes {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in crate::daemon) fn serialize<S: Serializer>(
        path: &Path,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(serializer)
    }

    pub(in crate::daemon) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<PathBuf, D::Error> {
        Ok(OsString::from_vec(Vec::deserialize(deserializer)?).into())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use crate::store::io::codec;

    #[test]
    fn a_plan_keeps_every_byte_of_its_paths() {
        let path = |bytes: &[u8]| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
        let plan = Plan {
            base: path(b"/b\xff\n"),
            mount_point: path(b"/m, x"),
            store: path(b"/s"),
            head: "main".to_owned(),
            choice: Choice {
                links: Links::Rewrite,
                allowed_targets: vec![b"/usr/bin".to_vec()],
                allow_other: Some(false),
                ..Choice::default()
            },
        };
        assert_eq!(codec::decode::<Plan>(&codec::encode(&plan).unwrap()), Ok(plan));
    }
}
