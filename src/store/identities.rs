//! The inode numbers of base nodes: the log `identities`.
//!
//! A base node is identified by its device and host inode number. Its [`Ino`] is the host's number
//! unless the log says otherwise. The exceptions are:
//! * a node on another device than the base's root;
//! * a node whose host number lies in our own range;
//! * a file that `apply` wrote: it keeps the number that it had in the mount.
//!
//! Numbers of our own range are reserved in steps, so none is given out twice, even after a crash.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::RwLock;

use crate::error::Result;
use crate::store::Store;
use crate::store::io::dir::StoreDir;
use crate::store::io::log;
use crate::store::io::log::{Log, Torn};
use crate::store::ledger::LedgerRecord;
use crate::store::record::IdentityRecord;
use crate::types::{BaseMark, Ino};

/// The file of the log.
pub(super) const IDENTITIES: &str = "identities";
/// Numbers that are reserved at a time.
const RESERVE: u64 = 1 << 16;
/// A log with fewer records than this is not compacted.
const FEW: u64 = 4096;

/// The numbers of base nodes that need no new record. They have a lock of their own, so that a
/// lookup does not wait for the disk that takes a record.
#[derive(Default)]
pub struct KnownNumbers {
    /// (device, host number) of the base's root.
    root: (u64, u64),
    /// The exceptions: the number of a node by (device, host number).
    named: HashMap<(u64, u64), Ino>,
    /// Host numbers that no other base node may get.
    taken: HashSet<Ino>,
}

impl KnownNumbers {
    /// The number of a base node; `None` if it needs one of our own.
    fn of(&self, dev: u64, host: u64) -> Option<Ino> {
        if (dev, host) == self.root {
            return Some(Ino::ROOT);
        }
        let dev = self.device(dev);
        if let Some(ino) = self.named.get(&(dev, host)) {
            return Some(*ino);
        }
        let natural = Ino(host);
        let is_natural = dev == 0 && host > Ino::ROOT.0 && natural < Ino::OWN_RANGE;
        (is_natural && !self.taken.contains(&natural)).then_some(natural)
    }

    /// The device as it is recorded: 0 for the device of the base's root, whose number may change
    /// at a reboot.
    fn device(&self, dev: u64) -> u64 {
        if dev == self.root.0 { 0 } else { dev }
    }

    /// Keeps other base nodes from getting a host number. Numbers of our own range need no such
    /// entry, because each is given out once.
    fn take(&mut self, ino: Ino) {
        if ino < Ino::OWN_RANGE {
            self.taken.insert(ino);
        }
    }

    fn note(&mut self, record: &IdentityRecord) {
        match record {
            IdentityRecord::Named { dev, host, ino } => {
                self.take(*ino);
                self.named.insert((*dev, *host), *ino);
            }
            IdentityRecord::Taken(ino) => self.take(*ino),
            IdentityRecord::Reserved(_) | IdentityRecord::Synced | IdentityRecord::Root(_) => {}
        }
    }
}

/// The inode numbers of a store.
pub struct Identities {
    log: Log<IdentityRecord>,
    known: Arc<RwLock<KnownNumbers>>,
    next: u64,
    reserved: u64,
    /// Number of records that survive a power cut; 0 until the first sync of this process.
    synced: u64,
    /// Whether the last mark may not be synced.
    in_doubt: bool,
    /// The mark of the base.
    mark: Option<BaseMark>,
}

/// Opens the log, and reads its records.
///
/// Records are appended without a sync, so a power cut may tear the log anywhere behind the last
/// sync. The operations that needed those records are lost as well. `was_cut_off` says whether
/// there may have been a power cut.
///
/// # Errors
/// As open(2), and damage.
pub(super) fn open_log(
    dir: &StoreDir,
    was_cut_off: impl Fn() -> Result<bool>,
) -> Result<(Log<IdentityRecord>, Vec<IdentityRecord>)> {
    let (bytes, what) = (dir.read(IDENTITIES)?.unwrap_or_default(), dir.show(IDENTITIES));
    let Torn { contents, behind } = log::read_torn::<IdentityRecord>(&bytes, &what)?;
    let syncs = behind.iter().filter(|record| **record == IdentityRecord::Synced).count();
    if !behind.is_empty() && (syncs > 1 || !was_cut_off()?) {
        return Err(log::damage_at(&what, contents.end));
    }
    let count = contents.records.len() as u64;
    let log = Log::append_to(Arc::new(dir.file(IDENTITIES, true)?), what, contents.end, count)?;
    Ok((log, contents.records.into_iter().map(|r| r.0).collect()))
}

/// Reads the mark of the base from the log of a store that may be open elsewhere.
///
/// # Errors
/// As open(2), and damage.
pub(super) fn read_mark(dir: &StoreDir) -> Result<Option<BaseMark>> {
    let bytes = dir.read(IDENTITIES)?.unwrap_or_default();
    let records = log::read_torn::<IdentityRecord>(&bytes, &dir.show(IDENTITIES))?.contents.records;
    Ok(records.into_iter().rev().find_map(|(record, _)| match record {
        IdentityRecord::Root(mark) => Some(mark),
        IdentityRecord::Reserved(_) | IdentityRecord::Named { .. } => None,
        IdentityRecord::Synced | IdentityRecord::Taken(_) => None,
    }))
}

impl Identities {
    /// Builds the numbers from the records of `log`. `root` is (device, host number) of the base's
    /// root.
    pub fn new(
        log: Log<IdentityRecord>,
        records: Vec<IdentityRecord>,
        root: (u64, u64),
    ) -> Identities {
        let mut new = Identities {
            log,
            known: Arc::new(RwLock::new(KnownNumbers { root, ..KnownNumbers::default() })),
            next: Ino::OWN_RANGE.0,
            reserved: Ino::OWN_RANGE.0,
            synced: 0,
            in_doubt: true,
            mark: None,
        };
        for record in records {
            new.note(record);
        }
        new.next = new.reserved;
        new
    }

    fn note(&mut self, record: IdentityRecord) {
        self.known.write().note(&record);
        match record {
            IdentityRecord::Reserved(below) => self.reserved = self.reserved.max(below.0),
            IdentityRecord::Root(mark) => self.mark = Some(mark),
            IdentityRecord::Named { .. } | IdentityRecord::Taken(_) | IdentityRecord::Synced => {}
        }
    }

    /// The numbers that need no new record.
    pub(super) fn known(&self) -> Arc<RwLock<KnownNumbers>> {
        Arc::clone(&self.known)
    }

    /// The mark by which the store recognises its base.
    pub fn mark(&self) -> Option<BaseMark> {
        self.mark
    }

    /// Records the mark of the base.
    ///
    /// # Errors
    /// As [`Log::append`] and [`Log::sync`].
    pub fn set_mark(&mut self, mark: BaseMark) -> Result<()> {
        if self.mark == Some(mark) {
            return Ok(());
        }
        self.append(IdentityRecord::Root(mark))?;
        self.sync()
    }

    /// Gives a base node a number of our own, because another node in the sandbox has its host
    /// number: the host reused the number of a file that was deleted.
    ///
    /// # Errors
    /// As [`Log::append`].
    pub fn renumber(&mut self, dev: u64, host: u64) -> Result<Ino> {
        let (ino, dev) = (self.fresh()?, self.known.read().device(dev));
        self.append(IdentityRecord::Named { dev, host, ino })?;
        Ok(ino)
    }

    /// A shorter list of records with the same meaning, if the log is much longer. Each apply adds
    /// records for the files that it wrote, and the host reuses the numbers of files before them.
    pub fn worth_rewriting(&self) -> Option<Vec<IdentityRecord>> {
        let known = self.known.read();
        let needed = (known.named.len() + known.taken.len()) as u64;
        if self.log.count() <= 2 * needed + FEW {
            return None;
        }
        let mut records = vec![IdentityRecord::Reserved(Ino(self.reserved))];
        records.extend(self.mark.map(IdentityRecord::Root));
        let named = known.named.iter();
        records.extend(named.map(|(&(dev, host), &ino)| IdentityRecord::Named { dev, host, ino }));
        let mut free = known.taken.clone();
        for ino in known.named.values() {
            free.remove(ino);
        }
        records.extend(free.into_iter().map(IdentityRecord::Taken));
        Some(records)
    }

    /// The records of a log for another base. The nodes in `known` keep their numbers, and no other
    /// node gets a number of `taken`.
    fn over_another_base(
        &self,
        mark: BaseMark,
        known: &BTreeMap<Ino, (u64, u64)>,
        taken: BTreeSet<Ino>,
    ) -> Vec<IdentityRecord> {
        let present = self.known.read();
        let mut records =
            vec![IdentityRecord::Reserved(Ino(self.reserved)), IdentityRecord::Root(mark)];
        let named = |(&ino, &(dev, host)): (&Ino, &(u64, u64))| IdentityRecord::Named {
            dev: present.device(dev),
            host,
            ino,
        };
        records.extend(known.iter().map(named));
        let taken: BTreeSet<Ino> = taken.into_iter().chain(present.taken.iter().copied()).collect();
        let free =
            taken.into_iter().filter(|ino| *ino < Ino::OWN_RANGE && !known.contains_key(ino));
        records.extend(free.map(IdentityRecord::Taken));
        records
    }

    /// Goes on in a new, synced log for another base, with the records of
    /// [`Identities::over_another_base`].
    fn begin_anew(&mut self, log: Log<IdentityRecord>, records: Vec<IdentityRecord>) {
        {
            let mut known = self.known.write();
            *known = KnownNumbers { root: known.root, ..KnownNumbers::default() };
        }
        for record in records {
            self.note(record);
        }
        self.go_on_in(log);
    }

    /// Goes on in a synced log with the records of [`Identities::worth_rewriting`].
    fn go_on_in(&mut self, log: Log<IdentityRecord>) {
        self.synced = log.count();
        self.in_doubt = false;
        self.log = log;
    }

    /// The number of a base node. If it is not the host's own, it is recorded first.
    ///
    /// # Errors
    /// As [`Log::append`].
    pub fn of(&mut self, dev: u64, host: u64) -> Result<Ino> {
        let known = self.known.read().of(dev, host);
        known.map_or_else(|| self.renumber(dev, host), Ok)
    }

    /// As [`Identities::of`], but another number than `taken`.
    ///
    /// # Errors
    /// As [`Log::append`] and [`Identities::fresh`].
    pub fn other_than(&mut self, taken: Ino, dev: u64, host: u64) -> Result<Ino> {
        // Another thread may have renumbered it since the caller looked.
        let known = self.known.read().of(dev, host).filter(|known| *known != taken);
        known.map_or_else(|| self.renumber(dev, host), Ok)
    }

    /// Records that a base node has the number of a node in the mount.
    ///
    /// # Errors
    /// As [`Log::append`].
    pub fn name(&mut self, dev: u64, host: u64, ino: Ino) -> Result<()> {
        let dev = {
            let known = self.known.read();
            let dev = known.device(dev);
            if known.named.get(&(dev, host)) == Some(&ino) {
                return Ok(());
            }
            dev
        };
        self.append(IdentityRecord::Named { dev, host, ino })
    }

    /// A number that was never given out.
    ///
    /// # Errors
    /// As [`Log::append`] and [`Log::sync`], when the next numbers are reserved.
    pub fn fresh(&mut self) -> Result<Ino> {
        if self.next >= self.reserved {
            self.append(IdentityRecord::Reserved(Ino(self.next + RESERVE)))?;
            self.sync()?;
        }
        let ino = Ino(self.next);
        self.next += 1;
        Ok(ino)
    }

    fn append(&mut self, record: IdentityRecord) -> Result<()> {
        self.log.append(&record)?;
        self.note(record);
        Ok(())
    }

    /// Whether all records are known to survive a power cut.
    pub fn is_synced(&self) -> bool {
        self.synced >= self.log.count()
    }

    /// How many records are known to survive a power cut.
    pub fn synced_count(&self) -> u64 {
        self.synced
    }

    /// Whether nothing can be recorded any more, because a sync failed or a failed write could not
    /// be undone.
    pub fn is_broken(&self) -> bool {
        self.log.is_broken()
    }

    /// Makes all records survive a power cut.
    ///
    /// # Errors
    /// As [`Log::append`] and [`Log::sync`].
    pub fn sync(&mut self) -> Result<()> {
        if !self.is_synced() {
            if self.in_doubt {
                // The last process may have been killed during a sync, or a sync found no space. A
                // second mark proves that everything before the first one is on disk, so the first
                // one is synced now.
                self.log.sync()?;
                self.in_doubt = false;
            }
            self.log.append(&IdentityRecord::Synced)?;
            self.in_doubt = true;
            self.log.sync()?;
            self.in_doubt = false;
            self.synced = self.log.count();
        }
        Ok(())
    }
}

impl Store {
    /// The number of a base node. If it is not the host's own, it is recorded first; only then the
    /// caller waits for the disk.
    ///
    /// # Errors
    /// As [`Identities::of`].
    pub fn number_of(&self, dev: u64, host: u64) -> Result<Ino> {
        self.known_number(dev, host).map_or_else(|| self.identities.lock().of(dev, host), Ok)
    }

    /// The number of a base node, if it needs no new record.
    pub fn known_number(&self, dev: u64, host: u64) -> Option<Ino> {
        self.known_numbers.read().of(dev, host)
    }

    /// Compacts the log, if that makes it much shorter.
    ///
    /// # Errors
    /// As [`Log::publish`]; the log is then unchanged.
    pub fn compact_identities(&self) -> Result<()> {
        let mut identities = self.identities.lock();
        let Some(records) = identities.worth_rewriting() else { return Ok(()) };
        self.lower_ledger(&LedgerRecord::Numbers(0))?;
        let log = self
            .publish_log(IDENTITIES, 0, records.iter())
            .map_err(|e| e.during("compact the log of inode numbers"))?;
        identities.go_on_in(log);
        Ok(())
    }

    /// Begins a log for another base. The nodes in `known` get the given numbers, and no other node
    /// gets a number of `taken`.
    ///
    /// # Errors
    /// As [`Log::publish`]; the log is then unchanged.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(records: Vec<IdentityRecord>) -> Identities {
        let log =
            Log::append_to(Arc::new(tempfile::tempfile().unwrap()), "t".into(), 0, 0).unwrap();
        Identities::new(log, records, (5, 100))
    }

    #[test]
    fn records_of_an_earlier_process_are_synced_before_the_next_mark() {
        let mut ids = new(vec![]);
        ids.name(5, 8, Ino(9)).unwrap();
        let count = ids.log.count();
        crate::sys::failpoint::with("fail:store.sync:1:EIO", || ids.sync()).unwrap_err();
        assert_eq!(ids.log.count(), count, "there is no mark");
    }

    #[test]
    fn a_base_node_keeps_its_host_number_if_that_is_free() {
        let mut ids = new(vec![]);
        assert_eq!(ids.of(5, 100).unwrap(), Ino::ROOT);
        assert_eq!(ids.of(5, 7).unwrap(), Ino(7));
        let odd = ids.of(6, 7).unwrap();
        assert!(odd >= Ino::OWN_RANGE);
        assert_eq!(ids.of(6, 7).unwrap(), odd, "and keeps it");
        assert!(ids.of(5, 1).unwrap() >= Ino::OWN_RANGE, "1 is the root only");
        assert!(ids.of(5, Ino::OWN_RANGE.0 + 3).unwrap() >= Ino::OWN_RANGE);
    }

    #[test]
    fn the_inode_number_of_an_applied_file_goes_to_no_other_base_node() {
        let mut ids = new(vec![]);
        ids.name(5, 2000, Ino(7)).unwrap();
        assert_eq!(ids.of(5, 2000).unwrap(), Ino(7));
        assert_ne!(ids.of(5, 7).unwrap(), Ino(7), "the host has given 7 to another file since");
    }

    #[test]
    fn a_compacted_log_gives_the_same_numbers() {
        let mut ids = new(vec![]);
        let ours = ids.fresh().unwrap();
        for round in 0..2 * FEW {
            // The host gives the same two numbers again and again.
            ids.name(5, 2000 + round % 2, Ino(7 + round % 3)).unwrap();
            ids.name(6, 50, ours).unwrap();
        }
        let before: Vec<Ino> =
            [(5, 2000), (5, 2001), (6, 50)].map(|(d, h)| ids.of(d, h).unwrap()).into();
        let mut again = new(ids.worth_rewriting().unwrap());
        assert!(again.worth_rewriting().is_none());
        assert_eq!(before, [(5, 2000), (5, 2001), (6, 50)].map(|(d, h)| again.of(d, h).unwrap()));
        for host in [7, 8, 9] {
            assert_ne!(again.of(5, host).unwrap(), Ino(host), "another file had it once");
        }
        assert!(again.fresh().unwrap() > ours);
    }

    #[test]
    fn own_numbers_are_never_given_out_twice_even_after_a_crash() {
        let mut first = new(vec![]);
        let given = first.fresh().unwrap();
        let mut second = new(vec![IdentityRecord::Reserved(Ino(Ino::OWN_RANGE.0 + RESERVE))]);
        assert!(second.fresh().unwrap() > given);
    }
}
