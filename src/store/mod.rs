//! The store: everything that jailfs keeps on disk, and the only module that knows its layout
//! (docs/FORMAT.md).
//!
//! ```text
//! README                           a text for people
//! format  base                     what this is: "jailfs-store 1"; the path of the base
//! lock                             locked by the one process that has the store open
//! heads/NAME                       the layer on top of a head
//! holds                            the layers that neither drop nor gc removes
//! volatile                         there if the store is written without syncs
//! heads.log                        the operations
//! identities                       inode numbers that are not the host's
//! ledger                           what the other files must have at least
//! layers/00000007/{journal,pool}   a layer
//! archive/{root,DIGEST}            older layers: their records and their content
//! history/NAME                     the edit history of single files
//! chunks                           hashes of content: a cache
//! reserve                          space to release when the disk is full
//! tmp/                             unlinked scratch files of the running process
//! ```
//!
//! Always true:
//! * One process holds the lock.
//! * A layer number is never used twice.
//! * Each file except the logs and pools is published by rename, so a reader finds the old file or
//!   the new one.

pub mod archive;
pub mod archived;
mod catalog;
pub mod checkpoint_names;
pub mod content;
pub mod dedup;
pub mod edits_log;
mod format;
pub mod fsck_read;
#[cfg(test)]
mod golden;
mod heads;
pub mod identities;
mod indexed_catalog;
pub mod io;
pub mod layer;
mod ledger;
mod lineage;
mod lock;
mod op_log;
mod open;
pub mod placement;
pub mod record;
mod removal;
mod reserve;
mod sealed;
mod space;
pub mod volatile;

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use nix::fcntl::Flock;
use parking_lot::RwLock;
use serde::Serialize;

use crate::error::Result;
use crate::store::catalog::State;
use crate::store::content::read_epochs::ReadEpochs;
use crate::store::heads::HeadRecords;
use crate::store::identities::{Identities, KnownNumbers};
use crate::store::io::dir::StoreDir;
use crate::store::io::log::Log;
use crate::store::io::writer::{FailedSyncs, Writer};
use crate::store::layer::Trust;
use crate::store::layer::files::Layers;
use crate::store::ledger::Ledger;
use crate::store::op_log::OpLog;
use crate::store::reserve::Reserve;
use crate::sys::lock::RankedMutex;
use crate::types::LayerId;

pub use catalog::ContentVersion;
pub use content::read_epochs::ReadGuard;
pub use format::{BaseRecord, base_of, exists, mark_of};
pub use indexed_catalog::Unsettled;

/// How long [`Store::wait_for_read_epochs`] waits.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a store is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreOptions {
    /// Never sync: a power cut may lose the store. For throw-away sandboxes.
    pub volatile: bool,
    /// Accept a base that is another directory than the one that the store was made for.
    pub other_base: bool,
}

/// An open store.
pub struct Store {
    dir: StoreDir,
    layers: Layers,
    heads: StoreDir,
    /// The content of the files in `heads`.
    head_records: RankedMutex<HeadRecords>,
    tmp: StoreDir,
    base: BaseRecord,
    durable: bool,
    was_volatile: bool,
    takes_other_base: bool,
    trust: Trust,
    failed_syncs: FailedSyncs,
    state: RankedMutex<State>,
    identities: RankedMutex<Identities>,
    known_numbers: Arc<RwLock<KnownNumbers>>,
    holds: RankedMutex<BTreeSet<LayerId>>,
    ops: RankedMutex<OpLog>,
    ledger: RankedMutex<Ledger>,
    readers: ReadEpochs,
    /// Held by readers of states, and exclusively by those who free space.
    states: RwLock<()>,
    /// How often content was about to be freed.
    sweeps: AtomicU64,
    /// How often files became smaller or were removed.
    frees: AtomicU64,
    reserve: RankedMutex<Reserve>,
    // Last, so that everything above is closed before the lock is released.
    _lock: Flock<File>,
}

impl Store {
    /// The directory of the store.
    pub fn dir(&self) -> &StoreDir {
        &self.dir
    }

    /// The directory for scratch files.
    pub fn tmp(&self) -> &StoreDir {
        &self.tmp
    }

    /// Whether the base may be another directory than the one that the store was made for.
    pub fn takes_other_base(&self) -> bool {
        self.takes_other_base
    }

    /// Whether the store syncs.
    pub fn durable(&self) -> bool {
        self.durable
    }

    /// Whether the store was written without syncs until this process opened it. More of it is
    /// synced than its marks say.
    pub fn was_volatile(&self) -> bool {
        self.was_volatile
    }

    /// This process as a writer.
    pub fn writer(&self) -> Writer {
        self.trust.writer
    }

    /// The inode numbers of base nodes.
    pub fn identities(&self) -> &RankedMutex<Identities> {
        &self.identities
    }

    /// The lock that keeps readers of states and those who free space apart.
    pub fn states(&self) -> &RwLock<()> {
        &self.states
    }

    /// Begins to read content. The caller takes the guard before it looks up where bytes are
    /// stored; those places stay valid while the guard lives.
    pub fn reading(&self) -> ReadGuard {
        self.readers.enter()
    }

    /// Waits for all readers that may use an old place of content. Returns false if one of them is
    /// still reading after [`PATIENCE`].
    pub fn wait_for_read_epochs(&self) -> bool {
        self.readers.wait_for_all(PATIENCE)
    }

    /// Replaces a log of the store by these records, the first with the number `first`.
    ///
    /// # Errors
    /// As [`Log::publish`].
    fn publish_log<'r, T: Serialize + 'r>(
        &self,
        name: &str,
        first: u64,
        records: impl Iterator<Item = &'r T>,
    ) -> Result<Log<T>> {
        Log::publish(&self.dir, name, first, records, self.durable)
    }
}
