//! The store: everything jailfs keeps on disk, and the only module that knows its layout (docs/FORMAT.md).
//!
//! ```text
//! README  format  base             what this is; "jailfs-store 1" or 2; the path of the base
//! holds                            which layers are kept whatever happens
//! volatile                         that it was written without syncs
//! lock                             held by the one process that has the store open
//! heads/NAME                       which layer is on top of a head; replaced atomically
//! heads.log  identities            append-only logs
//! layers/00000007/{journal,pool}   a layer
//! packs/00000003                   what older layers have besides content
//! history/NAME                     what edits of single files replaced
//! chunks                           which content there is: a cache
//! ledger                           what the other files must have at least
//! ```
//!
//! Always true: one process holds the lock; a layer number is never used again; everything but the logs and pools is
//! published by rename, so a reader sees the old file or the new one.

pub mod content;
pub mod dedup;
pub mod edits_log;
pub mod fsck_read;
#[cfg(test)]
mod golden;
pub mod identities;
pub mod io;
pub mod layer;
mod ledger;
pub mod pack;
pub mod placement;
pub mod record;
mod reserve;
pub mod volatile;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::content::Content;
use crate::store::content::cells::Cells;
use crate::store::content::checksums::Checksums;
use crate::store::content::read_epochs::ReadEpochs;
pub use crate::store::content::read_epochs::ReadGuard;
use crate::store::identities::Identities;
use crate::store::io::dir::StoreDir;
use crate::store::io::log::Log;
use crate::store::io::lru_cache::LruCache;
use crate::store::io::writer::{FailedSyncs, Writer};
use crate::store::layer::files::{Besides, Layers};
use crate::store::layer::lost_seals::Evidence;
use crate::store::layer::{LayerContents, LayerInfo, Trust, Upper};
use crate::store::ledger::{Known, LEDGER, Ledger, LedgerRecord};
use crate::store::pack::Packs;
use crate::store::record::{HeadRecord, Header, HoldsRecord, IdentityRecord, LayerKind, OpRecord};
use crate::store::reserve::Reserve;
use crate::sys::clock;
use crate::types::{BaseMark, Epoch, Ino, LayerId};

const HOLDS: &str = "holds";
const IDENTITIES: &str = "identities";
const HEADS_LOG: &str = "heads.log";
/// The format of a store without packs: who does not know them can read it.
const FORMAT: u32 = 1;
/// With packs, and nothing deflated but these.
const FORMAT_WITH_PACKS: u32 = 2;
/// With content that is deflated.
const FORMAT_WITH_CELLS: u32 = 3;
/// How long it is waited for readers.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);
/// Pools that are kept open.
const OPEN_POOLS: usize = 128;
const README: &str = "This directory is a jailfs store: checkpoints and changes of a sandboxed directory (see 'base').\n\
Do not edit it. 'jailfs log --store DIR' lists what is in it.\n";

/// How a store is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreOptions {
    /// Nothing is synced: a power cut may lose the store. For throw-away sandboxes.
    pub volatile: bool,
    /// The base may be another directory than the one that the store was made for.
    pub other_base: bool,
}

/// Which directory a store is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseRecord {
    /// Its absolute path.
    pub path: Vec<u8>,
}

/// An open store.
pub struct Store {
    dir: StoreDir,
    layers: Layers,
    heads: StoreDir,
    tmp: StoreDir,
    base: BaseRecord,
    durable: bool,
    was_volatile: bool,
    takes_other_base: bool,
    trust: Trust,
    failed_syncs: FailedSyncs,
    state: Mutex<State>,
    identities: Mutex<Identities>,
    holds: Mutex<BTreeSet<LayerId>>,
    ops: Mutex<Ops>,
    ledger: Mutex<Ledger>,
    readers: ReadEpochs,
    /// Counts the times at which something was given back.
    sweeps: AtomicU64,
    /// The format that the store says it has.
    format: AtomicU32,
    reserve: Mutex<Reserve>,
    // Last, so that everything above is closed when the lock is let go.
    _lock: Flock<File>,
}

/// The log of heads.
struct Ops {
    log: Log<OpRecord>,
    records: Vec<OpRecord>,
    /// How many were given up before the first of them.
    given_up: u64,
}

struct State {
    catalog: BTreeMap<LayerId, LayerInfo>,
    contents: LruCache<LayerId, Content>,
    /// Layers whose pools remaps point to. `None` before the first use.
    remap_targets: Option<BTreeSet<LayerId>>,
    /// Layers of which it is unknown whether the old or the new remap is on disk.
    uncertain_remaps: BTreeSet<LayerId>,
    /// Sources of gathered layers. Readers with earlier remaps may still open their pools.
    retiring: BTreeMap<LayerId, RetiringPool>,
    next_layer: u32,
}

/// How a pool is stored whose content was gathered. No file says it any more, but readers with an
/// earlier remap still need it.
struct RetiringPool {
    checksums: Arc<Checksums>,
    cells: Option<Arc<Cells>>,
}

/// Whether there is a store at `path`.
pub fn exists(path: &Path) -> bool {
    path.join("format").is_file()
}

/// The base that the store at `path` is for.
///
/// # Errors
/// When there is no store, or it is of another format.
pub fn base_of(path: &Path) -> Result<BaseRecord> {
    let dir = StoreDir::open(path)
        .map_err(|e| e.kind(Kind::NoStore).hint("'jailfs mount BASE MNT' makes a store"))?;
    check_format(&dir)?;
    read_base(&dir)
}

/// By what the store at `path` knows its base, if it does. Somebody may be writing to it.
///
/// # Errors
/// As [`base_of`], or damage.
pub fn mark_of(path: &Path) -> Result<Option<BaseMark>> {
    let dir = StoreDir::open(path)?;
    check_format(&dir)?;
    let bytes = dir.read(IDENTITIES)?.unwrap_or_default();
    let records =
        io::log::read_torn::<IdentityRecord>(&bytes, &dir.show(IDENTITIES))?.contents.records;
    Ok(records.into_iter().rev().find_map(|(record, _)| match record {
        IdentityRecord::Root(mark) => Some(mark),
        IdentityRecord::Reserved(_) | IdentityRecord::Named { .. } => None,
        IdentityRecord::Synced | IdentityRecord::Taken(_) => None,
    }))
}

/// What stands in `format`.
fn format_text(format: u32) -> String {
    format!("jailfs-store {format}\n")
}

/// The format of a store.
fn check_format(dir: &StoreDir) -> Result<u32> {
    let attempt = || format!("open store '{}'", dir.path().display());
    let Some(text) = dir.read("format")? else {
        return Err(Error::new(Kind::NoStore, attempt(), "this directory is not a jailfs store"));
    };
    if let Some(known) =
        (FORMAT..=FORMAT_WITH_CELLS).find(|known| text == format_text(*known).as_bytes())
    {
        return Ok(known);
    }
    let number = text
        .strip_prefix(b"jailfs-store ")
        .and_then(|rest| std::str::from_utf8(rest).ok()?.trim().parse::<u64>().ok());
    Err(match number {
        Some(number) if number > u64::from(FORMAT_WITH_CELLS) => Error::new(
            Kind::Failed,
            attempt(),
            format!(
                "the store has format {number}, this jailfs knows formats 1 to {FORMAT_WITH_CELLS}"
            ),
        )
        .hint("use the newer jailfs that wrote it"),
        _ => Error::damage(attempt(), "the file 'format' does not name a format"),
    })
}

fn read_base(dir: &StoreDir) -> Result<BaseRecord> {
    let missing = || Error::damage(format!("read {}", dir.show("base")), "the file is missing");
    read_one(dir, "base")?.ok_or_else(missing)
}

/// What a power cut may have done to the store, from its heads. A head that cannot be read is told when it is asked for.
fn read_trust(dir: &StoreDir) -> Result<Trust> {
    let writer = Writer::of(dir)?;
    let failed = Mutex::new(FailedSyncs::of(dir, writer)?.read());
    let torn_from = tops(&dir.make_dir("heads")?)?.first().copied().unwrap_or(LayerId(0));
    Ok(Trust { writer, failed, torn_from })
}

/// The names of the heads.
fn head_names(heads: &StoreDir) -> Result<Vec<String>> {
    heads.list(|name| (!name.starts_with('.') && !name.ends_with(".new")).then(|| name.to_owned()))
}

/// The layers that the heads name, as far as these can be read.
fn tops(heads: &StoreDir) -> Result<BTreeSet<LayerId>> {
    let names = head_names(heads)?;
    let records =
        names.iter().filter_map(|name| read_one::<HeadRecord>(heads, name).ok().flatten());
    Ok(records.map(|head| head.layer).collect())
}

/// Reads a file of one record; none if there is no such file.
fn read_one<T: serde::de::DeserializeOwned>(dir: &StoreDir, name: &str) -> Result<Option<T>> {
    Ok(read_numbered(dir, name)?.map(|(record, _)| record))
}

/// The same, with the number of the frame.
fn read_numbered<T: serde::de::DeserializeOwned>(
    dir: &StoreDir,
    name: &str,
) -> Result<Option<(T, u64)>> {
    let Some(bytes) = dir.read(name)? else { return Ok(None) };
    let damage = |why| Error::damage(format!("read {}", dir.show(name)), why);
    let (contents, number) = io::log::read_numbered::<T>(&bytes, &dir.show(name))?;
    let (record, _) =
        contents.records.into_iter().next().ok_or_else(|| damage("no whole record"))?;
    if contents.torn > 0 {
        return Err(damage("something stands behind its record"));
    }
    Ok(Some((record, number)))
}

/// One record as the bytes of a log, for files that hold just one.
fn framed<T: Serialize>(record: &T, what: &str) -> Result<Vec<u8>> {
    framed_with(record, 0, what)
}

/// The same with a number, by which an older copy of the file is known.
fn framed_with<T: Serialize>(record: &T, number: u64, what: &str) -> Result<Vec<u8>> {
    io::log::frame(record, number).map_err(|error| error.during(format!("write {what}")))
}

/// The numbers of the files that are published with one. Such as cannot be read are told by who asks for them.
fn published(dir: &StoreDir, heads: &StoreDir, packs: &Packs) -> Result<BTreeMap<String, u64>> {
    let number_of = |found: Result<Option<u64>>| found.unwrap_or(Some(u64::MAX));
    let mut numbers = BTreeMap::new();
    for name in head_names(heads)? {
        let found = read_numbered::<HeadRecord>(heads, &name);
        if let Some(number) = number_of(found.map(|found| found.map(|(_, number)| number))) {
            numbers.insert(head_file(&name), number);
        }
    }
    let found = read_numbered::<HoldsRecord>(dir, HOLDS);
    if let Some(number) = number_of(found.map(|found| found.map(|(_, number)| number))) {
        numbers.insert(HOLDS.to_owned(), number);
    }
    numbers.extend(packs.newest().map(|number| (ledger::PACKS.to_owned(), u64::from(number))));
    Ok(numbers)
}

/// The name of the file of a head in the store.
fn head_file(name: &str) -> String {
    format!("heads/{name}")
}

fn take_lock(dir: &StoreDir) -> Result<Flock<File>> {
    let file = dir.file("lock", true)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((file, nix::errno::Errno::EWOULDBLOCK)) => {
            let holder = crate::sys::proc::flock_holder(&file).ok().flatten();
            let told = holder.map(|pid| format!(" (process {pid})")).unwrap_or_default();
            Err(Error::new(
                Kind::InUse,
                format!("lock store '{}'", dir.path().display()),
                format!("another jailfs has it open{told}"),
            )
            .hint("wait for it to end; if it serves a mount, 'jailfs status' there says more, and 'jailfs umount MNT' ends it"))
        }
        Err((_, errno)) => {
            Err(std::io::Error::from(errno)).attempt(|| format!("lock {}", dir.show("lock")))
        }
    }
}

/// Refuses a directory that others could have written: what is in a store is written into the base by an apply, and shown as
/// what somebody made in the mount. As ssh does it: it belongs to us or to root, and nobody else may write.
fn check_private(dir: &StoreDir) -> Result<()> {
    let attempt = || format!("open store '{}'", dir.path().display());
    let stat = nix::sys::stat::fstat(dir).map_err(std::io::Error::from).attempt(attempt)?;
    let us = nix::unistd::geteuid().as_raw();
    if stat.st_uid != us && stat.st_uid != 0 {
        let why = format!("it belongs to user {}, and we are user {us}", stat.st_uid);
        return Err(Error::new(Kind::Failed, attempt(), why).hint(
            "do it as that user, or give the store to this one with 'chown -R' if you trust what is in it",
        ));
    }
    if stat.st_mode & 0o022 != 0 {
        let path = dir.path().display();
        return Err(Error::new(Kind::Failed, attempt(), "others can write to it")
            .hint(format!("if you trust what is in it: chmod 700 '{path}'")));
    }
    Ok(())
}

/// Keeps everybody else out of a directory that is ours.
fn make_private(dir: &StoreDir) -> std::io::Result<()> {
    let is_ours = nix::sys::stat::fstat(dir)?.st_uid == nix::unistd::geteuid().as_raw();
    if is_ours {
        nix::sys::stat::fchmod(dir, nix::sys::stat::Mode::S_IRWXU)?;
    }
    Ok(())
}

/// Opens the log of heads and reads what is in it.
fn open_ops(dir: &StoreDir) -> Result<Ops> {
    let bytes = dir.read(HEADS_LOG)?.unwrap_or_default();
    let (contents, given_up) = io::log::read_numbered::<OpRecord>(&bytes, &dir.show(HEADS_LOG))?;
    let records: Vec<OpRecord> = contents.records.into_iter().map(|r| r.0).collect();
    let file = Arc::new(dir.file(HEADS_LOG, true)?);
    let log =
        Log::append_to(file, dir.show(HEADS_LOG), contents.end, given_up + records.len() as u64)?;
    Ok(Ops { log, records, given_up })
}

/// Opens the log of numbers. Its records are appended without a sync, so a power cut may tear it anywhere behind the last
/// that came to its end; what lies there is of operations that the power cut took, too.
fn open_identities(
    dir: &StoreDir,
    was_cut_off: impl Fn() -> Result<bool>,
) -> Result<(Log<IdentityRecord>, Vec<IdentityRecord>)> {
    let (bytes, what) = (dir.read(IDENTITIES)?.unwrap_or_default(), dir.show(IDENTITIES));
    let io::log::Torn { contents, behind } = io::log::read_torn::<IdentityRecord>(&bytes, &what)?;
    let syncs = behind.iter().filter(|record| **record == IdentityRecord::Synced).count();
    if !behind.is_empty() && (syncs > 1 || !was_cut_off()?) {
        return Err(io::log::damage_at(&what, contents.end));
    }
    let count = contents.records.len() as u64;
    let log = Log::append_to(Arc::new(dir.file(IDENTITIES, true)?), what, contents.end, count)?;
    Ok((log, contents.records.into_iter().map(|r| r.0).collect()))
}

impl Store {
    /// Makes a store at `path` for the base at `base_path`.
    ///
    /// # Errors
    /// When the directory is not empty, or as the calls it is made of.
    pub fn create(
        path: &Path,
        base_path: &[u8],
        root: (u64, u64),
        options: StoreOptions,
    ) -> Result<Store> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .create(path)
            .attempt(|| format!("create store '{}'", path.display()))?;
        let dir = StoreDir::open(path)?;
        let foreign = dir.list(|n| {
            (!matches!(n, "." | ".." | "lock" | "daemon.log" | "lost+found")).then(|| n.to_owned())
        })?;
        let ours = |n: &String| {
            matches!(
                n.as_str(),
                "README"
                    | "base"
                    | "heads"
                    | "layers"
                    | "tmp"
                    | "heads.log"
                    | "identities"
                    | "holds"
                    | "chunks"
                    | LEDGER
                    | volatile::VOLATILE
            ) || n.ends_with(".new")
        };
        if let Some(name) = foreign.iter().find(|n| !ours(n)) {
            return Err(Error::new(
                Kind::Failed,
                format!("create store '{}'", path.display()),
                format!("the directory holds '{name}'"),
            )
            .hint("name an empty or new directory with --store"));
        }
        // Not before it is sure that it is to be one: others may work in what is none.
        make_private(&dir).attempt(|| format!("create store '{}'", path.display()))?;
        check_private(&dir)?;
        let lock = take_lock(&dir)?;
        let durable = !options.volatile;
        if dir.size(volatile::VOLATILE)?.is_some() {
            // There is no store yet: what was lost of its making is made anew.
            dir.remove(volatile::VOLATILE)?;
        }
        dir.publish("README", README.as_bytes(), durable)?;
        let base = BaseRecord { path: base_path.to_owned() };
        dir.publish("base", &framed(&base, "base")?, durable)?;
        for name in ["layers", "heads", "tmp"] {
            dir.make_dir(name)?;
        }
        // Last: a directory without it is not a store, and making it may begin again.
        dir.publish("format", format_text(FORMAT).as_bytes(), durable)?;
        // Another store may have been in this directory before.
        FailedSyncs::of(&dir, Writer::of(&dir)?)?.forget_all();
        Store::open_locked(dir, lock, root, options)
    }

    /// Opens the store at `path`; `root` is (device, number) of the base's root.
    ///
    /// # Errors
    /// No store, another format, in use, damage.
    pub fn open(path: &Path, root: (u64, u64), options: StoreOptions) -> Result<Store> {
        base_of(path)?;
        let dir = StoreDir::open(path)?;
        check_private(&dir)?;
        let lock = take_lock(&dir)?;
        Store::open_locked(dir, lock, root, options)
    }

    fn open_locked(
        dir: StoreDir,
        lock: Flock<File>,
        root: (u64, u64),
        options: StoreOptions,
    ) -> Result<Store> {
        let trust = read_trust(&dir)?;
        let was_volatile = volatile::begin(&dir, trust.writer, !options.volatile)?;
        let base = read_base(&dir)?;
        let format = check_format(&dir)?;
        let mut packed = Vec::new();
        let mut layers = Layers::open(&dir, &mut |found| packed.push(found.clone()))?;
        if let Some(error) = layers.packs.damaged().pop() {
            return Err(error.hint("'jailfs check' tells what else is damaged"));
        }
        let ledger = ledger::read(&dir)?;
        let newest = layers.packs.newest();
        let lost = ledger
            .as_ref()
            .and_then(|(known, ..)| known.missing_pack(newest, &|name| dir.show(name)));
        if let Some(error) = lost {
            return Err(error);
        }
        let (id_log, id_records) = open_identities(&dir, || layer::was_cut_off(&layers, &trust))?;
        let ops = open_ops(&dir)?;
        let must_be: BTreeSet<LayerId> =
            ledger.as_ref().map_or_else(BTreeSet::new, |(known, ..)| known.sealed.clone());
        let mut catalog = BTreeMap::new();
        for packed in packed {
            catalog.insert(packed.layer, layer::packed_info(&layers, &packed)?);
        }
        let ids = layers.directories()?;
        layers.remove_left(&ids)?;
        let mut newborn = Vec::new();
        for id in ids.iter().copied().filter(|id| !layers.packs.has(*id)) {
            match layer::read_info(&layers, id, &trust) {
                Ok(info) => drop(catalog.insert(id, info)),
                Err(error) if error.kind == Kind::Damage && layer_is_newborn(&layers, id)? => {
                    newborn.push((id, error));
                }
                Err(error) => return Err(error),
            }
        }
        let last = ids.last().max(catalog.keys().last()).map_or(0, |id| id.0);
        let next_layer = (last + 1).max(layers.packs.next_layer());
        // A layer whose making was cut off has no header yet, and nothing refers to it; its number stays used.
        let tops = tops(&dir.make_dir("heads")?)?;
        let holds = read_one::<HoldsRecord>(&dir, HOLDS)?
            .map_or_else(BTreeSet::new, |record| record.layers);
        let named: BTreeSet<LayerId> =
            ops.records.iter().filter_map(|op| op.tree).chain(holds.iter().copied()).collect();
        for (id, error) in newborn {
            let is_parent = catalog.values().any(|info| info.header.parent == Some(id));
            // What gc took stays named, and its journal is removed; it is never empty.
            let is_emptied =
                named.contains(&id) && layers.dir_of(id)?.size(layer::JOURNAL)?.is_some();
            if is_parent || tops.contains(&id) || is_emptied || must_be.contains(&id) {
                return Err(error);
            }
        }
        let named = named.into_iter().chain(must_be).collect();
        Evidence { tops: &tops, named }
            .check(&catalog, |layer| layers.show(layer, layer::JOURNAL))?;
        let heads = dir.dir("heads")?;
        let found = Known {
            sealed: catalog
                .values()
                .filter(|info| info.seal.is_some())
                .map(|info| info.header.layer)
                .collect(),
            operations: ops.given_up + ops.records.len() as u64,
            numbers: id_records.len() as u64,
            published: published(&dir, &heads, &layers.packs)?,
            ..Known::default()
        };
        if let Some((known, ..)) = &ledger {
            let show = |name: &str| dir.show(name);
            let older = catalog.values().filter_map(|info| known.is_older(info, &show));
            if let Some(error) = known.missing(&found, &show).into_iter().chain(older).next() {
                return Err(error);
            }
        }
        let store = Store {
            heads,
            tmp: dir.make_dir("tmp")?,
            base,
            durable: !options.volatile,
            was_volatile,
            takes_other_base: options.other_base,
            failed_syncs: FailedSyncs::of(&dir, trust.writer)?,
            trust,
            state: Mutex::new(State {
                catalog,
                contents: LruCache::new(OPEN_POOLS),
                remap_targets: None,
                uncertain_remaps: BTreeSet::new(),
                retiring: BTreeMap::new(),
                next_layer,
            }),
            identities: Mutex::new(Identities::new(id_log, id_records, root)),
            holds: Mutex::new(holds),
            ops: Mutex::new(ops),
            ledger: Mutex::default(),
            readers: ReadEpochs::default(),
            sweeps: AtomicU64::new(0),
            format: AtomicU32::new(format),
            reserve: Mutex::default(),
            layers,
            dir,
            _lock: lock,
        };
        store.keep_ledger(ledger, found);
        store.begin_reserve();
        Ok(store)
    }

    /// The directory of the store.
    pub fn dir(&self) -> &StoreDir {
        &self.dir
    }

    /// Where temporary files go.
    pub fn tmp(&self) -> &StoreDir {
        &self.tmp
    }

    /// The base that it is for.
    pub fn base(&self) -> &BaseRecord {
        &self.base
    }

    /// Says that the base is at another path now.
    ///
    /// # Errors
    /// As the calls it is made of; the path then stays.
    pub fn set_base(&mut self, path: &[u8]) -> Result<()> {
        let base = BaseRecord { path: path.to_owned() };
        self.dir.publish("base", &framed(&base, "base")?, self.durable)?;
        self.base = base;
        Ok(())
    }

    /// Whether the base may be another directory than the one that the store was made for.
    pub fn takes_other_base(&self) -> bool {
        self.takes_other_base
    }

    /// Whether syncs are done.
    pub fn durable(&self) -> bool {
        self.durable
    }

    /// Whether it was written without syncs until it was opened: its marks say less than is synced.
    pub fn was_volatile(&self) -> bool {
        self.was_volatile
    }

    /// Which writer this process is.
    pub fn writer(&self) -> Writer {
        self.trust.writer
    }

    /// The numbers of nodes.
    pub fn identities(&self) -> &Mutex<Identities> {
        &self.identities
    }

    /// What is known of a layer.
    pub fn layer(&self, id: LayerId) -> Option<LayerInfo> {
        self.state.lock().catalog.get(&id).cloned()
    }

    /// All layers, oldest first.
    pub fn catalog(&self) -> Vec<LayerInfo> {
        self.state.lock().catalog.values().cloned().collect()
    }

    /// Reads a layer.
    ///
    /// # Errors
    /// Damage, with file and offset.
    pub fn read_layer(&self, id: LayerId) -> Result<LayerContents> {
        layer::read(&self.layers, id, &self.trust)
    }

    /// Makes a new layer.
    ///
    /// # Errors
    /// As the calls it is made of; the number stays used.
    pub fn create_layer(
        &self,
        parent: Option<LayerId>,
        head: &str,
        epoch: Epoch,
        kind: LayerKind,
    ) -> Result<Upper> {
        let layer = {
            let mut state = self.state.lock();
            let id = state.next_layer;
            state.next_layer += 1;
            LayerId(id)
        };
        let header =
            Header { layer, parent, head: head.to_owned(), epoch, kind, time: clock::now() };
        let upper =
            Upper::create(&self.layers.dir, header.clone(), &self.failed_syncs, self.durable)
                .map_err(|e| e.during(format!("create layer {layer}")))?;
        let mut state = self.state.lock();
        let bytes = upper.journal_len();
        let besides =
            Besides { summed: false, mapped: false, index: None, packed: false, hole: None };
        state.catalog.insert(layer, LayerInfo::new(header, None, false, bytes, besides));
        state.contents.insert(layer, Arc::new(Content::of_upper(Arc::clone(upper.pool.file()))));
        Ok(upper)
    }

    /// Goes on writing to a layer that was read.
    ///
    /// # Errors
    /// As the calls it is made of.
    pub fn reopen_layer(&self, contents: &LayerContents) -> Result<Upper> {
        let upper = Upper::reopen(&self.layers.dir, contents, &self.failed_syncs, self.durable)?;
        self.trust.failed.lock().remove(&upper.layer());
        let content = Content::of_upper(Arc::clone(upper.pool.file()));
        self.state.lock().contents.insert(upper.layer(), Arc::new(content));
        Ok(upper)
    }

    /// Makes what is recorded of a layer survive a power cut.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync_layer(&self, layer: LayerId) -> Result<()> {
        // What is in a pack was synced before.
        if !self.durable || self.layers.packs.has(layer) {
            return Ok(());
        }
        let dir = self.layers.dir_of(layer)?;
        for name in [layer::POOL, layer::JOURNAL] {
            io::disk::sync(&dir.file(name, false)?)
                .attempt(|| format!("sync {}", dir.show(name)))?;
        }
        Ok(())
    }

    /// Seals a layer and notes it in the catalog.
    ///
    /// # Errors
    /// As [`Upper::seal`].
    pub fn seal_layer(&self, upper: &mut Upper, seal: record::Seal) -> Result<()> {
        let layer = upper.layer();
        let bytes = upper.seal(seal.clone(), &|| self.release_reserve());
        self.keep_reserve();
        let bytes = bytes?;
        if let Some(info) = self.state.lock().catalog.get_mut(&layer) {
            info.seal = Some(seal);
            info.bytes = bytes;
        }
        self.note_sealed(vec![layer]);
        Ok(())
    }

    /// Says that it is about to be found out where bytes are, to read them. As long as it lives, that stays true.
    pub fn reading(&self) -> ReadGuard {
        self.readers.enter()
    }

    /// Waits for everybody who is reading what may be out of date; false if somebody does not come to an end.
    pub fn wait_for_read_epochs(&self) -> bool {
        self.readers.wait_for_all(PATIENCE)
    }

    /// Which layer is on top of a head.
    ///
    /// # Errors
    /// Damage.
    pub fn head(&self, name: &str) -> Result<Option<HeadRecord>> {
        read_one(&self.heads, name)
    }

    /// The layers that are kept whatever happens.
    pub fn holds(&self) -> BTreeSet<LayerId> {
        self.holds.lock().clone()
    }

    /// Says which layers are kept whatever happens.
    ///
    /// # Errors
    /// As the calls it is made of; nothing has changed then.
    pub fn set_holds(&self, layers: &BTreeSet<LayerId>) -> Result<()> {
        let record = HoldsRecord { layers: layers.clone() };
        let number = self.next_number_of(HOLDS);
        self.dir.publish(HOLDS, &framed_with(&record, number, HOLDS)?, self.durable)?;
        self.note_in_ledger(&LedgerRecord::Published(HOLDS.to_owned(), number));
        *self.holds.lock() = record.layers;
        Ok(())
    }

    /// Puts a layer on top of a head.
    ///
    /// # Errors
    /// As the calls it is made of; the head then stays as it was.
    pub fn set_head(&self, name: &str, head: &HeadRecord) -> Result<()> {
        let file = head_file(name);
        let number = self.next_number_of(&file);
        self.heads.publish(name, &framed_with(head, number, name)?, self.durable)?;
        self.note_in_ledger(&LedgerRecord::Published(file, number));
        Ok(())
    }

    /// The layers that this head wrote on top of `top` although the head was not yet published: a crash came between.
    pub fn continued(&self, head: &str, top: LayerId) -> Option<LayerId> {
        let state = self.state.lock();
        let mut above = state.catalog.values().filter(|l| {
            l.header.parent == Some(top)
                && l.header.head == head
                && l.header.kind == LayerKind::Continues
        });
        above.next_back().map(|l| l.header.layer)
    }

    /// Appends to the log of heads.
    ///
    /// # Errors
    /// When it cannot be written or synced.
    pub fn append_op(&self, op: OpRecord) -> Result<u64> {
        let mut ops = self.ops.lock();
        ops.log.append(&op)?;
        if self.durable
            && let Err(error) = ops.log.sync()
        {
            // It is there, and not to be appended once more: the sync alone is tried again.
            let synced = match error.is_full() && self.release_reserve() {
                true => ops.log.sync(),
                false => Err(error),
            };
            self.keep_reserve();
            if synced.is_err() {
                ops.log.sync_has_failed();
            }
            synced?;
        }
        ops.records.push(op);
        let count = ops.log.count();
        self.note_in_ledger(&LedgerRecord::Operations(count));
        drop(ops);
        self.note_numbers();
        Ok(count)
    }

    /// The log of heads, oldest first, each with its number.
    pub fn ops(&self) -> Vec<(u64, OpRecord)> {
        let ops = self.ops.lock();
        ops.records
            .iter()
            .enumerate()
            .map(|(at, op)| (ops.given_up + at as u64 + 1, op.clone()))
            .collect()
    }

    /// Gives up all but the last records of the log of heads, if there are so many that it pays. The others keep their numbers.
    ///
    /// # Errors
    /// As the calls it is made of; the log then stays as it was.
    pub fn trim_ops(&self, kept: usize) -> Result<()> {
        let mut ops = self.ops.lock();
        let excess = ops.records.len().saturating_sub(kept);
        if excess <= kept {
            return Ok(());
        }
        let given_up = ops.given_up + excess as u64;
        let rest = ops.records.split_off(excess);
        match self.publish_log(HEADS_LOG, given_up, rest.iter()) {
            Ok(log) => {
                *ops = Ops { log, records: rest, given_up };
                Ok(())
            }
            Err(error) => {
                ops.records.extend(rest);
                Err(error.during("shorten the log of heads"))
            }
        }
    }

    /// Gives up the records of the log of heads behind the one with this number; but for the very last, if that one is no longer there.
    ///
    /// # Errors
    /// As the calls it is made of; the log then stays as it was.
    pub fn cut_ops(&self, last: u64) -> Result<()> {
        let mut ops = self.ops.lock();
        let count = ops.records.len();
        let kept = usize::try_from(last.saturating_sub(ops.given_up)).unwrap_or(usize::MAX);
        if kept >= count {
            return Ok(());
        }
        // An empty log would not tell by which number it goes on.
        let (from, to) = if kept == 0 { (count - 1, count) } else { (0, kept) };
        let records: Vec<OpRecord> =
            ops.records.iter().skip(from).take(to - from).cloned().collect();
        let given_up = ops.given_up + from as u64;
        self.lower_ledger(&LedgerRecord::Operations(given_up + records.len() as u64))?;
        let log = self
            .publish_log(HEADS_LOG, given_up, records.iter())
            .map_err(|error| error.during("cut the log of heads"))?;
        *ops = Ops { log, records, given_up };
        Ok(())
    }

    /// Rewrites the log of numbers as what came of it, if it is much longer than that.
    ///
    /// # Errors
    /// As the calls it is made of; the log then stays as it was.
    pub fn compact_identities(&self) -> Result<()> {
        let mut identities = self.identities.lock();
        let Some(records) = identities.worth_rewriting() else { return Ok(()) };
        self.lower_ledger(&LedgerRecord::Numbers(0))?;
        let log = self
            .publish_log(IDENTITIES, 0, records.iter())
            .map_err(|e| e.during("shorten the log of numbers"))?;
        identities.go_on_in(log);
        Ok(())
    }

    /// Forgets what the nodes of the base are called, because it is another one from now on. Of the new one `known` have the numbers that they
    /// are given here, and no other node has one of `taken`.
    ///
    /// # Errors
    /// What the disk answers; then nothing is forgotten.
    pub fn begin_identities(
        &self,
        mark: BaseMark,
        known: &BTreeMap<Ino, (u64, u64)>,
        taken: BTreeSet<Ino>,
    ) -> Result<()> {
        let mut identities = self.identities.lock();
        let records = identities.over_another_base(mark, known, taken);
        self.lower_ledger(&LedgerRecord::Numbers(0))?;
        let log = self.publish_log(IDENTITIES, 0, records.iter())?;
        identities.begin_anew(log, records);
        Ok(())
    }

    /// Puts a log in the place of another, whole and synced, and opens it for appending.
    fn publish_log<'r, T: Serialize + 'r>(
        &self,
        name: &str,
        first: u64,
        records: impl Iterator<Item = &'r T>,
    ) -> Result<Log<T>> {
        let temp = format!("{name}.new");
        self.dir.remove(&temp)?;
        let mut log =
            Log::append_to(Arc::new(self.dir.file(&temp, true)?), self.dir.show(name), 0, first)?;
        for record in records {
            log.append(record)?;
        }
        if self.durable {
            log.sync()?;
        }
        io::disk::rename(&self.dir, &temp, name)
            .attempt(|| format!("publish {}", self.dir.show(name)))?;
        // From here on it is the log, whatever fails: what is appended to the other one nobody will read.
        if self.durable
            && let Err(error) = self.dir.sync()
        {
            ::log::warn!("{error}");
            log.sync_has_failed();
        }
        Ok(log)
    }

    /// Bytes that the store takes on disk.
    pub fn disk_usage(&self) -> u64 {
        let chunks = self
            .dir
            .file(dedup::chunks::CHUNKS, false)
            .and_then(|f| f.metadata().attempt(String::new));
        let (_, packs) = self.layers.packs.space();
        // Nobody who reads waits for it.
        let layers: u64 =
            self.with_directories().into_iter().map(|layer| self.layer_usage(layer)).sum();
        layers + packs + chunks.map_or(0, |about| about.blocks() * 512)
    }

    /// The layers that have directories.
    fn with_directories(&self) -> Vec<LayerId> {
        let state = self.state.lock();
        let has_dir = |info: &&LayerInfo| {
            // What is only there for those who still read from it is gone in a moment.
            let lingers = state.retiring.contains_key(&info.header.layer);
            !lingers && (info.hole.is_none() || info.index.is_some())
        };
        state.catalog.values().filter(has_dir).map(|info| info.header.layer).collect()
    }

    /// The oldest layer on top of a head, as their records say it.
    ///
    /// # Errors
    /// As readdir(3).
    pub fn oldest_top(&self) -> Result<Option<LayerId>> {
        Ok(tops(&self.heads)?.first().copied())
    }

    /// Bytes that a layer takes on disk.
    pub fn layer_usage(&self, layer: LayerId) -> u64 {
        let Ok(dir) = self.layers.dir_of(layer) else { return 0 };
        [layer::POOL, layer::JOURNAL, layer::INDEX, layer::SUMS, layer::MAP]
            .iter()
            .filter_map(|name| Some(dir.file(name, false).ok()?.metadata().ok()?.blocks() * 512))
            .sum()
    }
}

/// Whether the making of a layer was cut off inside its first record.
fn layer_is_newborn(layers: &Layers, id: LayerId) -> Result<bool> {
    let bytes = layers.read(id, layer::JOURNAL)?.unwrap_or_default();
    Ok(io::log::read::<record::Record>(&bytes, "").is_ok_and(|c| c.records.is_empty()))
}
