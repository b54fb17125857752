//! Makes and opens stores.
//!
//! Opening a store reads what every file says and compares it: with the ledger, with the heads, and
//! with each other. A store that has lost anything is refused with the name of the file, so that no
//! command works on less than there was.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use nix::fcntl::Flock;
use parking_lot::RwLock;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::archived::ArchivedLayer;
use crate::store::catalog::State;
use crate::store::content::read_epochs::ReadEpochs;
use crate::store::dedup::chunks::CHUNKS;
use crate::store::format::{self, BaseRecord};
use crate::store::heads::{self, HEADS, HOLDS};
use crate::store::identities::{self, IDENTITIES, Identities};
use crate::store::io::dir::StoreDir;
use crate::store::io::writer::{FailedSyncs, Writer};
use crate::store::layer::files::Layers;
use crate::store::layer::lost_seals::Evidence;
use crate::store::layer::{JOURNAL, LayerInfo, Trust, journal};
use crate::store::ledger::{self, Known, LEDGER};
use crate::store::lock::{LOCK, check_private, make_private, take_lock};
use crate::store::op_log::{HEADS_LOG, OpLog};
use crate::store::volatile::{self, VOLATILE};
use crate::store::{Ledger, Reserve, Store, StoreOptions};
use crate::sys::lock::{Rank, RankedMutex};
use crate::types::LayerId;

/// A text for people who find the store.
const README: &str = "\
This directory is a jailfs store: checkpoints and changes of a sandboxed directory (see 'base').
Do not edit it. 'jailfs log --store DIR' lists what is in it.
";
/// Files and directories that a directory may hold before it becomes a store.
const IGNORED: [&str; 5] = [".", "..", LOCK, "daemon.log", "lost+found"];
/// Files that an interrupted `create` can leave behind.
const UNFINISHED: [&str; 11] = [
    "README", "base", HEADS, "layers", "tmp", HEADS_LOG, IDENTITIES, HOLDS, CHUNKS, LEDGER,
    VOLATILE,
];

/// The device and the inode number of the base's root.
type Root = (u64, u64);

impl Store {
    /// Makes a store at `path` for the base at `base_path`. `root` is (device, inode number) of the
    /// base's root.
    ///
    /// # Errors
    /// If the directory is not empty; as mkdir(2), open(2), pwrite(2) and fsync(2).
    pub fn create(
        path: &Path,
        base_path: &[u8],
        root: (u64, u64),
        options: StoreOptions,
    ) -> Result<Store> {
        let attempt = || format!("create store '{}'", path.display());
        std::fs::DirBuilder::new().recursive(true).create(path).attempt(attempt)?;
        let dir = StoreDir::open(path)?;
        let found = dir.list(|name| (!IGNORED.contains(&name)).then(|| name.to_owned()))?;
        let is_ours =
            |name: &&String| UNFINISHED.contains(&name.as_str()) || name.ends_with(".new");
        if let Some(name) = found.iter().find(|name| !is_ours(name)) {
            let why = format!("the directory holds '{name}'");
            return Err(Error::new(Kind::Failed, attempt(), why)
                .hint("name an empty or new directory with --store"));
        }
        // Only now: a directory that does not become a store keeps its permissions.
        make_private(&dir).attempt(attempt)?;
        check_private(&dir)?;
        let lock = take_lock(&dir)?;
        let durable = !options.volatile;
        if dir.size(VOLATILE)?.is_some() {
            // An interrupted `create` left it. Everything that it wrote is written again.
            dir.remove(VOLATILE)?;
        }
        dir.publish("README", README.as_bytes(), durable)?;
        let base = BaseRecord { path: base_path.to_owned() };
        format::publish_base(&dir, &base, durable)?;
        for name in ["layers", HEADS, "tmp"] {
            dir.make_dir(name)?;
        }
        // Last: a directory without it is no store, and `create` can be repeated.
        format::publish_format(&dir, durable)?;
        // Another store may have been in this directory before.
        FailedSyncs::of(&dir, Writer::of(&dir)?)?.forget_all();
        Store::load(dir, lock, root, options)
    }

    /// Opens the store at `path`. `root` is (device, inode number) of the base's root.
    ///
    /// # Errors
    /// `NoStore`, `InUse`, another format, another owner, or damage.
    pub fn open(path: &Path, root: (u64, u64), options: StoreOptions) -> Result<Store> {
        format::base_of(path)?;
        let dir = StoreDir::open(path)?;
        check_private(&dir)?;
        let lock = take_lock(&dir)?;
        Store::load(dir, lock, root, options)
    }

    fn load(dir: StoreDir, lock: Flock<File>, root: Root, options: StoreOptions) -> Result<Store> {
        let trust = heads::read_trust(&dir)?;
        let was_volatile = volatile::begin(&dir, trust.writer, !options.volatile)?;
        let base = format::read_base(&dir)?;
        format::check_format(&dir)?;
        let (layers, archived) = open_layers(&dir, !options.volatile)?;
        let ledger = ledger::read(&dir)?;
        check_archive(ledger.as_ref(), &layers, &dir)?;
        let (id_log, id_records) =
            identities::open_log(&dir, || journal::was_cut_off(&layers, &trust))?;
        let ops = OpLog::open(&dir)?;
        let found = FoundLayers::read(&layers, archived, &trust)?;
        let heads = dir.make_dir(HEADS)?;
        let head_records = heads::read_all(&heads)?;
        let holds = heads::read_holds(&dir)?;
        let named = ops.records().iter().filter_map(|op| op.tree).chain(holds.iter().copied());
        let named = named.chain(heads::sealed(&head_records));
        let sealed = ledger.as_ref().map(|ledger| ledger.known.sealed.clone()).unwrap_or_default();
        found.check(&layers, &heads::tops(&head_records), named.collect(), sealed)?;
        let counts = Known {
            sealed: found.sealed(),
            operations: ops.count(),
            numbers: id_records.len() as u64,
            published: heads::published(&dir, &heads, &layers.archived)?,
            ..Known::default()
        };
        found.check_against(ledger.as_ref(), &counts, &dir)?;
        let next_layer = found.next_layer.max(layers.archived.next_layer());
        let identities = Identities::new(id_log, id_records, root);
        let store = Store {
            heads,
            head_records: RankedMutex::new(Rank::HeadRecords, head_records),
            tmp: dir.make_dir("tmp")?,
            base,
            durable: !options.volatile,
            was_volatile,
            takes_other_base: options.other_base,
            failed_syncs: FailedSyncs::of(&dir, trust.writer)?,
            trust,
            state: RankedMutex::new(Rank::Catalog, State::new(found.catalog, next_layer)),
            known_numbers: identities.known(),
            identities: RankedMutex::new(Rank::Identities, identities),
            holds: RankedMutex::new(Rank::Holds, holds),
            ops: RankedMutex::new(Rank::OperationLog, ops),
            ledger: RankedMutex::new(Rank::Ledger, Ledger::default()),
            readers: ReadEpochs::default(),
            states: RwLock::new(()),
            sweeps: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            reserve: RankedMutex::new(Rank::Reserve, Reserve::default()),
            layers,
            dir,
            _lock: lock,
        };
        store.keep_ledger(ledger, counts);
        store.begin_reserve();
        store.redo(&found.redo)?;
        Ok(store)
    }
}

/// Checks that the root of the archive is the one that the ledger knows, or a newer one.
fn check_archive(ledger: Option<&ledger::Found>, layers: &Layers, dir: &StoreDir) -> Result<()> {
    let missing = ledger.and_then(|ledger| {
        ledger.known.older_archive(layers.archived.number(), &|name| dir.show(name))
    });
    missing.map_or(Ok(()), Err)
}

/// Opens the layers, and reads those that are in the archive.
fn open_layers(dir: &StoreDir, durable: bool) -> Result<(Layers, Vec<ArchivedLayer>)> {
    let mut archived = Vec::new();
    let mut layers = Layers::open(dir, durable, &mut |found| archived.push(found))?;
    match layers.archived.damaged().pop() {
        Some(error) => Err(error.hint("'jailfs check' tells what else is damaged")),
        None => Ok((layers, archived)),
    }
}

/// The layers that a start finds.
struct FoundLayers {
    catalog: BTreeMap<LayerId, LayerInfo>,
    /// Layers without a whole header, and the error of reading each.
    incomplete: Vec<(LayerId, Error)>,
    /// Layers whose pools may lack bytes that their journals have.
    redo: Vec<LayerId>,
    /// One more than the highest number in use.
    next_layer: u32,
}

impl FoundLayers {
    /// Reads all layers, and removes what an interrupted move into the archive left.
    fn read(layers: &Layers, archived: Vec<ArchivedLayer>, trust: &Trust) -> Result<FoundLayers> {
        let mut catalog = BTreeMap::new();
        for archived in archived {
            catalog.insert(archived.layer, journal::archived_info(layers, &archived)?);
        }
        let ids = layers.directories()?;
        layers.remove_leftovers(&ids)?;
        let (mut incomplete, mut redo) = (Vec::new(), Vec::new());
        for id in ids.iter().copied().filter(|id| !layers.archived.has(*id)) {
            match journal::read_info(layers, id, trust) {
                Ok((info, has_redo)) => {
                    catalog.insert(id, info);
                    redo.extend(has_redo.then_some(id));
                }
                Err(error) if error.kind == Kind::Damage && journal::is_incomplete(layers, id)? => {
                    incomplete.push((id, error));
                }
                Err(error) => return Err(error),
            }
        }
        let last = ids.last().max(catalog.keys().last()).map_or(0, |id| id.0);
        Ok(FoundLayers { catalog, incomplete, redo, next_layer: last + 1 })
    }

    fn sealed(&self) -> BTreeSet<LayerId> {
        let sealed = self.catalog.values().filter(|info| info.seal.is_some());
        sealed.map(|info| info.header.layer).collect()
    }

    /// Checks that no layer has lost its journal or its seal. `tops` are the layers on top of
    /// heads, `named` those that operations and holds name, `sealed` those that the ledger has as
    /// sealed.
    fn check(
        &self,
        layers: &Layers,
        tops: &BTreeSet<LayerId>,
        named: BTreeSet<LayerId>,
        sealed: BTreeSet<LayerId>,
    ) -> Result<()> {
        for (id, error) in &self.incomplete {
            // A layer whose creation was interrupted has no header, and nothing refers to it. Its
            // number stays used.
            let is_parent = self.catalog.values().any(|info| info.header.parent == Some(*id));
            // A layer that gc removed can still be named. Its journal is then missing, not empty.
            let is_emptied = named.contains(id) && layers.dir_of(*id)?.size(JOURNAL)?.is_some();
            if is_parent || tops.contains(id) || is_emptied || sealed.contains(id) {
                return Err(error.clone());
            }
        }
        let named = named.into_iter().chain(sealed).collect();
        Evidence { tops, named }.check(&self.catalog, |layer| layers.show(layer, JOURNAL))
    }

    /// Checks that the store has everything that the ledger says, if there is one. `counts` is what
    /// it has.
    fn check_against(
        &self,
        ledger: Option<&ledger::Found>,
        counts: &Known,
        dir: &StoreDir,
    ) -> Result<()> {
        let Some(ledger::Found { known, .. }) = ledger else { return Ok(()) };
        let show = |name: &str| dir.show(name);
        let older = self
            .catalog
            .values()
            .filter_map(|info| known.is_older(&info.header, info.seal.as_deref(), &show));
        match known.missing(counts, &show).into_iter().chain(older).next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
