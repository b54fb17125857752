//! Which number a node of the base has, and which numbers of our own are taken.
//!
//! A node of the base is known by (device, host number). Its [`Ino`] is the host's number as long as nothing says
//! otherwise; exceptions are recorded in the log `identities`: a node on another device than the base's root, a number
//! in our own range, and every file that an apply made, which keeps the number it had in the mount although the host
//! gave it another. Numbers of our own range are reserved in steps, so that none is given out twice, also after a crash.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::error::Result;
use crate::store::io::log::Log;
use crate::store::record::IdentityRecord;
use crate::types::{BaseMark, Ino};

const RESERVE: u64 = 1 << 16;
/// A log of fewer records is left as it is.
const FEW: u64 = 4096;

/// The numbers of a store.
pub struct Identities {
    log: Log<IdentityRecord>,
    root: (u64, u64),
    named: HashMap<(u64, u64), Ino>,
    taken: HashSet<Ino>,
    next: u64,
    reserved: u64,
    /// Number of records that survive a power cut; 0 as long as that is not known of what a process before wrote.
    synced: u64,
    /// Whether the last mark may not be on the disk.
    in_doubt: bool,
    /// What the base is known by.
    mark: Option<BaseMark>,
}

impl Identities {
    /// Takes the records of `log`. `root` is (device, host number) of the base's root.
    pub fn new(
        log: Log<IdentityRecord>,
        records: Vec<IdentityRecord>,
        root: (u64, u64),
    ) -> Identities {
        let mut new = Identities {
            log,
            root,
            named: HashMap::new(),
            taken: HashSet::new(),
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
        match record {
            IdentityRecord::Reserved(below) => self.reserved = self.reserved.max(below.0),
            IdentityRecord::Named { dev, host, ino } => {
                self.take(ino);
                self.named.insert((dev, host), ino);
            }
            IdentityRecord::Taken(ino) => self.take(ino),
            IdentityRecord::Synced => {}
            IdentityRecord::Root(mark) => self.mark = Some(mark),
        }
    }

    /// What the base is known by, as recorded.
    pub fn mark(&self) -> Option<BaseMark> {
        self.mark
    }

    /// Records what the base is known by from now on.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub fn set_mark(&mut self, mark: BaseMark) -> Result<()> {
        if self.mark == Some(mark) {
            return Ok(());
        }
        self.append(IdentityRecord::Root(mark))?;
        self.sync()
    }

    /// Gives a node of the base a number of our own, because another node has the host's in this store: the host gave a
    /// number that it had given before.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub fn renumber(&mut self, dev: u64, host: u64) -> Result<Ino> {
        let ino = self.fresh()?;
        self.append(IdentityRecord::Named { dev: self.device(dev), host, ino })?;
        Ok(ino)
    }

    /// Keeps the number of a host from being taken for its own by another node. Numbers of our own range are given out once.
    fn take(&mut self, ino: Ino) {
        if ino < Ino::OWN_RANGE {
            self.taken.insert(ino);
        }
    }

    /// The records that say the same as the log, if that is much longer: every apply names the files that it wrote, and the
    /// host gives the numbers of those before it to others.
    pub fn worth_rewriting(&self) -> Option<Vec<IdentityRecord>> {
        let needed = (self.named.len() + self.taken.len()) as u64;
        if self.log.count() <= 2 * needed + FEW {
            return None;
        }
        let mut records = vec![IdentityRecord::Reserved(Ino(self.reserved))];
        records.extend(self.mark.map(IdentityRecord::Root));
        let named = self.named.iter();
        records.extend(named.map(|(&(dev, host), &ino)| IdentityRecord::Named { dev, host, ino }));
        let mut free = self.taken.clone();
        for ino in self.named.values() {
            free.remove(ino);
        }
        records.extend(free.into_iter().map(IdentityRecord::Taken));
        Some(records)
    }

    /// The records of a log for another base: of its nodes, `known` have these numbers, and no other has one of `taken`.
    pub fn over_another_base(
        &self,
        mark: BaseMark,
        known: &BTreeMap<Ino, (u64, u64)>,
        taken: BTreeSet<Ino>,
    ) -> Vec<IdentityRecord> {
        let mut records =
            vec![IdentityRecord::Reserved(Ino(self.reserved)), IdentityRecord::Root(mark)];
        let named = |(&ino, &(dev, host)): (&Ino, &(u64, u64))| IdentityRecord::Named {
            dev: self.device(dev),
            host,
            ino,
        };
        records.extend(known.iter().map(named));
        let taken: BTreeSet<Ino> = taken.into_iter().chain(self.taken.iter().copied()).collect();
        let free =
            taken.into_iter().filter(|ino| *ino < Ino::OWN_RANGE && !known.contains_key(ino));
        records.extend(free.map(IdentityRecord::Taken));
        records
    }

    /// Goes on in a log that holds what [`Identities::over_another_base`] gave, and was synced.
    pub fn begin_anew(&mut self, log: Log<IdentityRecord>, records: Vec<IdentityRecord>) {
        (self.named, self.taken) = (HashMap::new(), HashSet::new());
        for record in records {
            self.note(record);
        }
        self.go_on_in(log);
    }

    /// Goes on in a log that holds what [`Identities::worth_rewriting`] gave, and was synced.
    pub fn go_on_in(&mut self, log: Log<IdentityRecord>) {
        self.synced = log.count();
        self.in_doubt = false;
        self.log = log;
    }

    /// The number of a base node; recorded first if it is not the host's own.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub fn of(&mut self, dev: u64, host: u64) -> Result<Ino> {
        if (dev, host) == self.root {
            return Ok(Ino::ROOT);
        }
        let dev = self.device(dev);
        if let Some(ino) = self.named.get(&(dev, host)) {
            return Ok(*ino);
        }
        let natural = Ino(host);
        if dev == 0
            && host > Ino::ROOT.0
            && natural < Ino::OWN_RANGE
            && !self.taken.contains(&natural)
        {
            return Ok(natural);
        }
        let ino = self.fresh()?;
        self.append(IdentityRecord::Named { dev, host, ino })?;
        Ok(ino)
    }

    /// The device as recorded: that of the base's root is 0.
    fn device(&self, dev: u64) -> u64 {
        if dev == self.root.0 { 0 } else { dev }
    }

    /// Records that a base node has the number of a node in the mount.
    ///
    /// # Errors
    /// When it cannot be recorded.
    pub fn name(&mut self, dev: u64, host: u64, ino: Ino) -> Result<()> {
        let dev = self.device(dev);
        if self.named.get(&(dev, host)) == Some(&ino) {
            return Ok(());
        }
        self.append(IdentityRecord::Named { dev, host, ino })
    }

    /// A number that was never given out.
    ///
    /// # Errors
    /// When more numbers cannot be reserved.
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

    /// How many records are known to survive a power cut.
    pub fn synced_count(&self) -> u64 {
        self.synced
    }

    /// Whether a sync of them failed, or a write that could not be taken back.
    pub fn is_broken(&self) -> bool {
        self.log.is_broken()
    }

    /// Makes all that was recorded survive a power cut.
    ///
    /// # Errors
    /// As fdatasync(2).
    pub fn sync(&mut self) -> Result<()> {
        if self.synced < self.log.count() {
            if self.in_doubt {
                // The process before may have been killed in the middle of a sync, or one found no room: of two marks the first
                // proves that everything before it is on the disk.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn new(records: Vec<IdentityRecord>) -> Identities {
        let log =
            Log::append_to(Arc::new(tempfile::tempfile().unwrap()), "t".into(), 0, 0).unwrap();
        Identities::new(log, records, (5, 100))
    }

    #[test]
    fn what_a_process_before_wrote_is_synced_before_another_mark_is_set() {
        let mut ids = new(vec![]);
        ids.name(5, 8, Ino(9)).unwrap();
        let count = ids.log.count();
        crate::sys::failpoint::with("fail:store.sync:1:EIO", || ids.sync()).unwrap_err();
        assert_eq!(ids.log.count(), count, "there is no mark");
    }

    #[test]
    fn a_base_node_has_the_number_of_the_host_where_that_is_free() {
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
    fn a_number_that_an_apply_moved_is_not_given_to_its_former_file() {
        let mut ids = new(vec![]);
        ids.name(5, 2000, Ino(7)).unwrap();
        assert_eq!(ids.of(5, 2000).unwrap(), Ino(7));
        assert_ne!(ids.of(5, 7).unwrap(), Ino(7), "the host gave 7 to another file since");
    }

    #[test]
    fn a_log_that_is_rewritten_says_the_same() {
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
            assert_ne!(again.of(5, host).unwrap(), Ino(host), "it was another file's once");
        }
        assert!(again.fresh().unwrap() > ours);
    }

    #[test]
    fn own_numbers_are_never_given_twice_also_after_a_crash() {
        let mut first = new(vec![]);
        let given = first.fresh().unwrap();
        let mut second = new(vec![IdentityRecord::Reserved(Ino(Ino::OWN_RANGE.0 + RESERVE))]);
        assert!(second.fresh().unwrap() > given);
    }
}
