//! Power cuts while a program overwrites small parts of a file in place and syncs them. Most of
//! these syncs copy the bytes into the journal and do not sync the pool. After a cut, and after a
//! second one while the store is opened, each part has the bytes that it had at the last sync, or
//! later ones.

use super::*;

const SEEDS: u64 = 3;
const OPERATIONS: usize = 150;
/// Power cuts of one seed.
const CUTS: usize = 40;
/// A part has its number of the write eight times. No part lies on two pages.
const PART: usize = 64;
const PARTS: usize = 400;

/// A file that is overwritten in parts.
struct Overwritten {
    base: PathBuf,
    store: PathBuf,
    sandbox: Option<Arc<Sandbox>>,
    random: Random,
    record: Arc<Mutex<Vec<Change>>>,
    written: u64,
    /// Of each part: after how many changes each write began, and its number.
    writes: Vec<Vec<(usize, u64)>>,
    /// After how many changes each sync was acknowledged, and the numbers that it covers.
    synced: Vec<(usize, Vec<u64>)>,
}

impl Overwritten {
    fn at(&self) -> usize {
        self.record.lock().unwrap().len()
    }

    fn sandbox(&mut self) -> &Sandbox {
        let (base, store) = (&self.base, &self.store);
        self.sandbox.get_or_insert_with(|| {
            Sandbox::create_or_open(base, store, &StoreOptions::default()).unwrap()
        })
    }

    fn id(&mut self, file: &str) -> NodeId {
        let fs = self.sandbox().fs();
        match fs.lookup(NodeId::ROOT, &name(file)) {
            Ok(entry) => entry.id,
            Err(_) => fs.mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME).unwrap().id,
        }
    }

    /// Overwrites parts that follow each other.
    fn write(&mut self, parts: std::ops::Range<usize>) {
        let begun = self.at();
        self.written += 1;
        let number = self.written;
        let file = self.id("f");
        let bytes = number.to_le_bytes().repeat(PART / 8 * parts.len());
        self.sandbox().fs().write(file, (parts.start * PART) as u64, &bytes, false).unwrap();
        self.writes[parts].iter_mut().for_each(|writes| writes.push((begun, number)));
    }

    fn sync(&mut self) {
        self.sandbox().fs().sync().unwrap();
        self.note_synced();
    }

    fn note_synced(&mut self) {
        let numbers = self.writes.iter().map(|writes| writes.last().unwrap().1).collect();
        self.synced.push((self.at(), numbers));
    }

    fn operation(&mut self) {
        match self.random.below(40) {
            0..18 => {
                let first = self.random.below(PARTS as u64 - 4) as usize;
                let parts = 1 + self.random.below(4) as usize;
                self.write(first..first + parts);
            }
            18..32 => self.sync(),
            // More than one sync copies.
            32 => {
                let (file, bytes) = (self.id("large"), vec![7; 100_000]);
                self.sandbox().fs().write(file, 0, &bytes, false).unwrap();
            }
            // The addresses are not needed any more.
            33 | 34 => {
                let file = self.id("short");
                let fs = self.sandbox().fs();
                fs.truncate(file, 0, false).unwrap();
                fs.write(file, 0, &[9; 5000], false).unwrap();
            }
            35 => {
                let label = Some(format!("c{}", self.at()));
                let request = Request::Checkpoint { name: label, message: String::new() };
                self.sandbox().handle(request).unwrap();
                self.note_synced();
            }
            36 => self.sandbox().compact().unwrap(),
            37 => {
                let file = self.id("allocated");
                let fs = self.sandbox().fs();
                let size = fs.getattr(file).unwrap().size;
                fs.fallocate(file, 0, size, 20_000, false).unwrap();
                fs.write(file, size, &[5; 9000], false).unwrap();
            }
            _ => {
                // As after a kill: nothing is synced, and the machine goes on.
                self.sandbox = None;
                self.sandbox();
            }
        }
    }
}

/// The number of each part of the file.
fn numbers(sandbox: &Sandbox, context: &str) -> Vec<u64> {
    let file = sandbox.fs().lookup(NodeId::ROOT, &name("f")).unwrap().id;
    let bytes = sandbox.fs().read(file, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
    let number = |part: &[u8]| {
        let number = u64::from_le_bytes(part[..8].try_into().unwrap());
        assert_eq!(part, number.to_le_bytes().repeat(PART / 8), "{context}: part of a write");
        number
    };
    bytes.chunks(PART).map(number).collect()
}

/// The bytes of each pool, by its path.
fn pools(store: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let layers = std::fs::read_dir(store.join("layers")).unwrap().map(Result::unwrap);
    let pools = layers.map(|layer| layer.path().join("pool"));
    pools.filter_map(|pool| Some((pool.clone(), std::fs::read(pool).ok()?))).collect()
}

/// Opens a store after a power cut and compares its file with the record.
fn open(work: &Overwritten, at: usize, store: &Path, context: &str) {
    let checked = Sandbox::check_store(store, true).unwrap();
    assert!(checked.problems.is_empty(), "{context}: {:#?}", checked.problems);
    let sandbox = Sandbox::open(store).unwrap_or_else(|error| panic!("{context}: {error}"));
    let found = numbers(&sandbox, context);
    drop(sandbox);
    let (_, synced) = work.synced.iter().rfind(|(done, _)| *done <= at).unwrap();
    assert_eq!(found.len(), PARTS, "{context}");
    for (part, (found, synced)) in found.iter().zip(synced).enumerate() {
        let later = work.writes[part].iter().any(|(begun, n)| n == found && *begun <= at);
        assert!(later && found >= synced, "{context}: part {part} has {found}, synced {synced}");
    }
    let checked = Sandbox::check_store(store, true).unwrap();
    assert!(checked.problems.is_empty(), "{context}: {:#?}", checked.problems);
}

/// Returns how many openings wrote to a pool.
fn run_overwrites(seed: u64) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let (work, root, _) = begin(seed, dir.path());
    let Work { base, store, sandbox, random, record, .. } = work;
    let (writes, synced) = (vec![Vec::new(); PARTS], Vec::new());
    let mut work = Overwritten { base, store, sandbox, random, record, written: 0, writes, synced };
    if seed.is_multiple_of(2) {
        let (file, len) = (work.id("f"), (PARTS * PART) as u64);
        work.sandbox().fs().fallocate(file, 0, 0, len, false).unwrap();
    }
    work.write(0..PARTS);
    work.sync();
    let made = work.at();
    (0..OPERATIONS).for_each(|_| work.operation());
    failpoint::set_recorder(None);
    work.sandbox = None;
    let changes = work.record.lock().unwrap().clone();
    let mut random = Random(seed);
    let mut restored = 0;
    for cut in 0..CUTS {
        let at = made + random.below((changes.len() - made) as u64 + 1) as usize;
        let context = format!("seed {seed}, cut {cut}, after {at} of {} changes", changes.len());
        let mut disk = Disk::default();
        changes[..at].iter().for_each(|change| disk.apply(change));
        let first = dir.path().join(format!("cut{cut}"));
        disk.cut(&mut random, root, &first);
        let before = pools(&first);
        let (mut disk, root) = Disk::of_dir(&first);
        // The second cut comes while this start works.
        failpoint::set_boot(Some(([2; 16], jailfs::internals::sys::clock::now())));
        let again: Arc<Mutex<Vec<Change>>> = Arc::default();
        let into = Arc::clone(&again);
        failpoint::set_recorder(Some(Box::new(move |change| into.lock().unwrap().push(change))));
        open(&work, at, &first, &context);
        failpoint::set_recorder(None);
        let after = pools(&first);
        let is_other = |(pool, bytes)| after.get(pool).is_some_and(|now| now != bytes);
        restored += usize::from(before.iter().any(is_other));
        let again = again.lock().unwrap();
        let upto = random.below(again.len() as u64 + 1) as usize;
        again[..upto].iter().for_each(|change| disk.apply(change));
        let second = dir.path().join(format!("cut{cut}again"));
        disk.cut(&mut random, root, &second);
        failpoint::set_boot(Some(([3; 16], jailfs::internals::sys::clock::now())));
        let context = format!("{context}, and {upto} of {} of the start", again.len());
        open(&work, at, &second, &context);
    }
    restored
}

#[test]
fn bytes_of_which_only_the_journal_was_synced_survive_two_power_cuts() {
    let _exclusive = RECORDING.lock().unwrap();
    let seeds = std::env::var("JAILFS_POWER_SEEDS").map_or(SEEDS, |text| text.parse().unwrap());
    let restored: usize = (1..=seeds).map(run_overwrites).sum();
    assert!(restored > CUTS / 4, "only {restored} starts restored bytes of a pool");
}
