//! Deduplication: equal content is stored once, and only the space on disk shows it.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking, and prints its figures"
)]

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use jailfs::internals::fs::{Caller, Fs, Need, RenameMode};
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{Bounds, Sandbox, StoreOptions};
use jailfs::sandbox::{Reply, Request, Rev};
use jailfs::types::{LayerId, Name, NodeId, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };
const BLOCK: u64 = 4096;

/// Numbers that are the same at every run (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
}

type Files = BTreeMap<String, Vec<u8>>;

/// The content of the edit history, by path and number; `None` if there was no file.
type EditContents = BTreeMap<(String, u32), Option<Vec<u8>>>;

struct Place {
    dir: tempfile::TempDir,
    store: PathBuf,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("base")).unwrap();
        let store = dir.path().join("store");
        Place { dir, store }
    }

    /// Without an edit history, so that only states need space.
    fn open(&self) -> Work {
        let work = self.open_with_history(&self.store, &StoreOptions::default());
        work.0.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
        work
    }

    fn open_with_history(&self, store: &Path, options: &StoreOptions) -> Work {
        Work(Sandbox::create_or_open(&self.dir.path().join("base"), store, options).unwrap())
    }

    /// Bytes of content on disk, with the records that lie among archived content.
    fn pools(&self) -> u64 {
        let pools = layers(&self.store).map(|layer| layer.join("pool"));
        let archive = std::fs::read_dir(self.store.join("archive")).into_iter().flatten();
        let packs = archive.map(|file| file.unwrap().path());
        let packs = packs.filter(|path| path.file_name().is_some_and(|name| name != "root"));
        pools.chain(packs).filter_map(|file| Some(file.metadata().ok()?.blocks() * 512)).sum()
    }

    #[track_caller]
    fn check(&self) {
        let checked = Sandbox::check_store(&self.store, true).unwrap();
        assert!(checked.problems.is_empty(), "{:#?}", checked.problems);
    }
}

fn layers(store: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(store.join("layers")).unwrap().map(|entry| entry.unwrap().path())
}

struct Work(Arc<Sandbox>);

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

impl Work {
    /// Does something with a file, which is created if it does not exist, and forgets it.
    fn with<T>(&self, file: &str, work: impl FnOnce(&Fs, NodeId) -> T) -> T {
        let fs = self.0.fs();
        let entry = fs.lookup(NodeId::ROOT, &name(file));
        let entry =
            entry.or_else(|_| fs.mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME)).unwrap();
        let done = work(fs, entry.id);
        fs.forget(entry.id, 1);
        done
    }

    fn put(&self, file: &str, bytes: &[u8]) {
        self.with(file, |fs, id| {
            fs.truncate(id, 0, false).unwrap();
            let mut at = 0;
            for part in bytes.chunks(128 << 10) {
                fs.write(id, at, part, false).unwrap();
                at += part.len() as u64;
            }
        });
    }

    fn save(&self, file: &str, bytes: &[u8]) {
        self.put("staged", bytes);
        let (root, from, to) = (NodeId::ROOT, name("staged"), name(file));
        self.0.fs().rename(root, &from, root, &to, RenameMode::Replace, 1).unwrap();
    }

    fn remove(&self, file: &str) {
        self.0.fs().unlink(NodeId::ROOT, &name(file)).unwrap();
    }

    fn get(&self, file: &str) -> Vec<u8> {
        self.with(file, |fs, id| fs.read(id, 0, u64::MAX).unwrap().read(false).unwrap().unwrap())
    }

    /// Bytes of all layers that are stored in other layers.
    fn shared(&self) -> u64 {
        let Reply::Info(info) = self.0.handle(Request::Info).unwrap() else { panic!("no info") };
        info.layers.iter().map(|layer| layer.shared).sum()
    }

    fn files(&self) -> Files {
        let names = self.0.fs().names(NodeId::ROOT).unwrap();
        names
            .iter()
            .map(|n| n.to_string().trim_matches('\'').to_owned())
            .map(|n| (n.clone(), self.get(&n)))
            .collect()
    }

    fn checkpoint(&self, label: &str) {
        let request = Request::Checkpoint { name: Some(label.to_owned()), message: String::new() };
        self.0.handle(request).unwrap();
    }

    fn restore(&self, label: &str) {
        self.0
            .handle(Request::Restore {
                detach_mounts: false,
                to: Rev::Name(label.to_owned()),
                paths: Vec::new(),
                dry_run: false,
            })
            .unwrap();
    }

    fn gc(&self, keep: Option<u64>) -> Vec<String> {
        let request = Request::Gc { operations: 0, keep, max_store: None, dry_run: false };
        let Reply::Collected(collected) = self.0.handle(request).unwrap() else {
            panic!("not a gc")
        };
        collected.dropped.into_iter().map(|c| c.name.unwrap()).collect()
    }

    fn drop_checkpoint(&self, label: &str) {
        self.0.handle(Request::Drop { rev: Rev::Name(label.to_owned()) }).unwrap();
    }

    /// The former contents of files.
    fn edit_contents(&self) -> EditContents {
        let mut contents = EditContents::new();
        let fs = self.0.fs();
        for file in (0..6).map(|n| format!("f{n}")).chain([
            "g".to_owned(),
            "f".to_owned(),
            "staged".to_owned(),
        ]) {
            let path = TreePath::parse(file.as_bytes()).unwrap();
            for edit in fs.history(&path) {
                let content = fs.before_edit(&path, edit.number);
                let bytes = content.map(|(state, found)| state.read_all(&found).unwrap());
                contents.insert((file.clone(), edit.number), bytes);
            }
        }
        contents
    }

    /// Compares the rest of the edit history with the recorded contents.
    #[track_caller]
    fn check_edit_contents(&self, before: &EditContents, context: &str) {
        for ((file, number), bytes) in self.edit_contents() {
            let was = before.get(&(file.clone(), number));
            assert!(was == Some(&bytes), "{context}: edit {number} of {file} has other content");
        }
    }

    /// Restores every checkpoint, and goes back.
    #[track_caller]
    fn holds(&self, checkpoints: &BTreeMap<String, Files>, context: &str) {
        for (label, files) in checkpoints {
            self.restore(label);
            let found = self.files();
            assert!(found.keys().eq(files.keys()), "{context}: {label} has other names");
            for (file, bytes) in &found {
                assert!(*bytes == files[file], "{context}: {file} of {label} has other content");
            }
        }
    }
}

#[test]
fn moved_content_is_stored_once() {
    let place = Place::new();
    let mut random = Random(1);
    let mut content = random.bytes(4 << 20);
    let mut all = BTreeMap::new();
    let work = place.open();
    for step in 0..8 {
        work.put("f", &content);
        work.checkpoint(&format!("c{step}"));
        all.insert(format!("c{step}"), Files::from([("f".to_owned(), content.clone())]));
        content.splice(0..0, random.bytes(10));
    }
    assert!(place.pools() > 8 * (4 << 20));
    work.0.compact().unwrap();
    let pools = place.pools();
    assert!(pools <= (4 << 20) + 8 * 2 * BLOCK, "the pools take {pools} bytes");
    work.holds(&all, "after it");
    drop(work);
    place.check();
    place.open().holds(&all, "opened again");
}

#[test]
fn accumulating_small_changes_cost_a_block_or_two_each() {
    for how in [Work::put, Work::save] {
        let place = Place::new();
        let mut random = Random(2);
        let mut content = random.bytes(400_000);
        let mut all = BTreeMap::new();
        let work = place.open();
        for step in 0..40 {
            how(&work, "f", &content);
            work.checkpoint(&format!("c{step:02}"));
            all.insert(format!("c{step:02}"), Files::from([("f".to_owned(), content.clone())]));
            work.0.compact().unwrap();
            let (at, more) = (random.below(content.len()), random.below(30));
            let end = (at + random.below(30)).min(content.len());
            content.splice(at..end, random.bytes(more));
        }
        let pools = place.pools();
        assert!(pools <= 400_000 + BLOCK + 40 * 2 * BLOCK, "the pools take {pools} bytes");
        work.holds(&all, "after it");
        drop(work);
        place.check();
    }
}

#[test]
fn equal_small_files_are_stored_once_and_zeros_not_at_all() {
    let place = Place::new();
    let mut random = Random(3);
    let contents: Vec<Vec<u8>> = (0..50).map(|n| random.bytes(100 + n * 300)).collect();
    let work = place.open();
    for (n, content) in contents.iter().enumerate() {
        work.put(&format!("a{n}"), content);
        work.put(&format!("b{n}"), content);
    }
    work.put("zeros", &vec![0; 1 << 20]);
    work.checkpoint("one");
    for (n, content) in contents.iter().enumerate().rev() {
        work.remove(&format!("a{n}"));
        work.save(&format!("c{n}"), content);
    }
    work.checkpoint("two");
    work.0.compact().unwrap();
    let once: u64 = contents.iter().map(|c| (c.len() as u64).next_multiple_of(BLOCK)).sum();
    // In the archive, the rest of the last block of each file takes no space.
    let least: u64 = contents.iter().map(|content| content.len() as u64).sum();
    let pools = place.pools();
    assert!(
        (least..=once).contains(&pools),
        "the content takes {pools} bytes instead of {least} to {once}"
    );
    for (n, content) in contents.iter().enumerate() {
        assert!(
            work.get(&format!("b{n}")) == *content && work.get(&format!("c{n}")) == *content,
            "{n}"
        );
    }
    assert!(work.get("zeros") == vec![0; 1 << 20]);
}

#[test]
fn shared_content_stays_when_its_checkpoint_is_dropped() {
    let place = Place::new();
    let mut random = Random(4);
    let (first, second) = (random.bytes(300_000), random.bytes(200_000));
    let work = place.open();
    work.put("f", &first);
    work.put("g", &second);
    work.checkpoint("one");
    // A copy, so that only equal content refers to the first layer.
    work.save("f", &first);
    work.remove("g");
    work.checkpoint("two");
    work.0.compact().unwrap();
    assert!(place.pools() < 520_000);
    work.drop_checkpoint("one");
    work.gc(None);
    assert!(place.pools() < 320_000, "unneeded content is freed");
    assert!(work.get("f") == first);
    place.check();
    drop(work);
    let work = place.open();
    assert!(work.get("f") == first);
    // Once more equal to the rest; then that is dropped, too.
    work.save("f", &first);
    work.checkpoint("three");
    work.0.compact().unwrap();
    work.drop_checkpoint("two");
    work.gc(None);
    assert!(work.get("f") == first && place.pools() < 320_000);
    work.remove("f");
    work.checkpoint("four");
    work.drop_checkpoint("three");
    work.gc(None);
    assert!(place.pools() < 4 * BLOCK, "unreferenced content is freed");
    place.check();
}

#[test]
fn switched_off_it_does_nothing_and_shared_content_stays_shared() {
    let place = Place::new();
    let content = Random(5).bytes(100_000);
    let work = place.open();
    work.put("f", &content);
    work.checkpoint("one");
    work.save("f", &content);
    work.checkpoint("two");
    work.0.set_dedup(false);
    work.0.compact().unwrap();
    assert_eq!(work.shared(), 0);
    work.0.set_dedup(true);
    work.0.compact().unwrap();
    assert!(work.shared() >= 100_000 && place.pools() < 120_000, "{}", place.pools());
    work.0.set_dedup(false);
    work.gc(None);
    assert!(work.get("f") == content && place.pools() < 120_000 && work.shared() >= 100_000);
}

/// A power cut can take the seal of a layer that was searched.
#[test]
fn a_layer_that_was_searched_before_it_lost_its_seal_is_searched_again() {
    let place = Place::new();
    let content = Random(8).bytes(100_000);
    let work = place.open();
    work.put("f", &content);
    work.checkpoint("one");
    work.0.compact().unwrap();
    work.save("f", &content);
    let mut table = work.0.fs().store().chunk_table().unwrap();
    table.set_searched_below(LayerId(1000)).unwrap();
    drop((table, work));
    let work = place.open();
    work.checkpoint("two");
    work.0.compact().unwrap();
    assert!(work.get("f") == content && work.shared() >= 100_000, "{}", work.shared());
}

#[test]
fn the_edit_history_shares_content_and_its_space_is_freed() {
    let place = Place::new();
    let mut random = Random(8);
    let work = place.open_with_history(&place.store, &StoreOptions::default());
    let (first, second) = (random.bytes(400_000), random.bytes(300_000));
    work.put("f", &first);
    work.checkpoint("one");
    work.0.compact().unwrap();
    // Content that is in no state, only in the history: some is equal to a state, some is not.
    work.put("g", &first);
    work.put("g", &second);
    work.put("g", b"short");
    work.checkpoint("two");
    // Before the history is compacted.
    let contents = work.edit_contents();
    assert_eq!(contents.values().flatten().map(Vec::len).sum::<usize>(), 700_000);
    work.0.compact().unwrap();
    let pools = place.pools();
    assert!(pools < 720_000, "{pools}");
    work.check_edit_contents(&contents, "shared");
    // Files whose content is shared with an entry of the history only: it stays as long as they do.
    work.put("h", &second);
    work.checkpoint("three");
    work.0.compact().unwrap();
    assert!(place.pools() < pools + 2 * BLOCK, "{}", place.pools());
    work.0.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    assert!(work.edit_contents().is_empty());
    work.0.fs().make_room(Need::Less);
    assert!(work.get("h") == second && work.get("f") == first);
    work.remove("h");
    work.checkpoint("four");
    for label in ["two", "three"] {
        work.drop_checkpoint(label);
    }
    work.gc(None);
    assert!(place.pools() < 420_000, "{}", place.pools());
    assert!(work.get("f") == first);
    drop(work);
    place.check();
}

#[test]
fn a_full_disk_frees_history_content_beside_shared_content() {
    let place = Place::new();
    let mut random = Random(9);
    let work = place.open_with_history(&place.store, &StoreOptions::default());
    let (shared, alone) = (random.bytes(200_000), random.bytes(300_000));
    work.put("g", &alone);
    work.put("g", b"short");
    work.put("f", &shared);
    work.checkpoint("one");
    work.0.compact().unwrap();
    work.put("h", &shared);
    work.checkpoint("two");
    work.0.compact().unwrap();
    let pools = place.pools();
    assert!((500_000..530_000).contains(&pools), "{pools}");
    work.0.fs().set_edit_bounds(Bounds { edits: 0, ..Bounds::default() });
    assert!(work.0.fs().make_room(Need::More), "there is content to free");
    assert!(place.pools() < 230_000, "{}", place.pools());
    assert!(work.get("f") == shared && work.get("h") == shared);
    drop(work);
    place.check();
}

/// Random files that share much, with checkpoints, drops, gc, restores and restarts, compared with
/// their expected content.
fn random_work(seed: u64) {
    let place = Place::new();
    let mut random = Random(seed);
    let options = StoreOptions { volatile: !seed.is_multiple_of(4), ..StoreOptions::default() };
    let mut work = place.open_with_history(&place.store, &options);
    let (mut now, mut all) = (Files::new(), BTreeMap::<String, Files>::new());
    let stock: Vec<Vec<u8>> = (0..4).map(|n| random.bytes(3000 << (2 * n))).collect();
    for step in 0..150 {
        let file = format!("f{}", random.below(6));
        match random.below(16) {
            0..=5 => {
                let mut content = match random.below(3) {
                    0 => now.get(&file).cloned().unwrap_or_default(),
                    1 => now.values().flatten().copied().take(300_000).collect(),
                    _ => stock[random.below(4)].clone(),
                };
                let (at, more) = (random.below(content.len() + 1), random.below(200));
                let end = (at + random.below(200)).min(content.len());
                content.splice(at..end, random.bytes(more));
                if random.below(4) == 0 {
                    content.extend(vec![0; random.below(30_000)]);
                }
                if random.below(2) == 0 {
                    work.put(&file, &content)
                } else {
                    work.save(&file, &content)
                }
                now.insert(file, content);
            }
            6 => {
                if let Some(content) = now.get_mut(&file) {
                    let bytes = random.bytes(100);
                    let at = random.below(content.len() + 1);
                    work.with(&file, |fs, id| fs.write(id, at as u64, &bytes, false).unwrap());
                    content.resize(content.len().max(at + 100), 0);
                    content[at..at + 100].copy_from_slice(&bytes);
                }
            }
            7 => {
                if now.remove(&file).is_some() {
                    work.remove(&file);
                }
            }
            8..=10 => {
                let label = format!("c{step}");
                work.checkpoint(&label);
                all.insert(label, now.clone());
            }
            11 | 12 => {
                let contents = work.edit_contents();
                work.0.compact().unwrap();
                work.check_edit_contents(&contents, &format!("seed {seed}, step {step}, compact"));
            }
            13 => {
                if let Some(label) = all.keys().nth(random.below(all.len() + 1)).cloned() {
                    work.restore(&label);
                    now = all[&label].clone();
                }
            }
            14 => {
                if let Some(label) = all.keys().nth(random.below(all.len() + 1)).cloned() {
                    work.drop_checkpoint(&label);
                    all.remove(&label);
                }
                let keep = (random.below(4) == 0).then(|| random.below(5) as u64);
                let contents = work.edit_contents();
                for label in work.gc(keep) {
                    all.remove(&label);
                }
                work.check_edit_contents(&contents, &format!("seed {seed}, step {step}, gc"));
            }
            _ => {
                let contents = work.edit_contents();
                drop(work);
                place.check();
                if random.below(3) == 0 {
                    std::fs::remove_file(place.store.join("chunks")).unwrap_or_default();
                }
                work = place.open_with_history(&place.store, &options);
                work.check_edit_contents(&contents, &format!("seed {seed}, step {step}, restart"));
            }
        }
        assert!(work.files() == now, "seed {seed}, step {step}");
    }
    work.0.compact().unwrap();
    work.holds(&all, &format!("seed {seed}"));
    drop(work);
    place.check();
}

/// `JAILFS_DEDUP_SEEDS=N` runs N seeds.
#[test]
fn random_operations_change_no_state() {
    let seeds = std::env::var("JAILFS_DEDUP_SEEDS").map_or(2, |seeds| seeds.parse().unwrap());
    (1..=seeds).for_each(random_work);
}

fn copy(from: &Path, to: &Path) {
    let gone = Command::new("rm").arg("-rf").arg(to).status().unwrap();
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(gone.success() && copied.success());
}

/// Runs `verb` on copies of a store. In each run one failpoint fails, or nothing happens from it
/// on, as if the process had been killed there.
fn at_every_step(place: &Place, all: &BTreeMap<String, Files>, verb: fn(&Work) -> bool) {
    let copied = place.dir.path().join("copy");
    let mut steps = 300;
    for (onwards, stride) in [("+", 1), ("", 4)] {
        for step in (1..=steps).step_by(stride) {
            assert!(step < 300, "the operation never ends");
            copy(&place.store, &copied);
            let rule = format!("fail:any:{step}{onwards}:EIO");
            let work = place.open_with_history(&copied, &StoreOptions::default());
            let contents = work.edit_contents();
            let done = failpoint::with(&rule, || verb(&work));
            if onwards.is_empty() {
                // After a failure it goes on, and must not free blocks that may be needed.
                drop(work.0.handle(Request::Gc {
                    operations: 0,
                    keep: None,
                    max_store: None,
                    dry_run: false,
                }));
                assert!(work.files() == all["last"], "{rule}, and later operations");
            }
            drop(work);
            let checked = Sandbox::check_store(&copied, true).unwrap();
            assert!(checked.problems.is_empty(), "{rule}: {:#?}", checked.problems);
            let work = place.open_with_history(&copied, &StoreOptions::default());
            work.check_edit_contents(&contents, &rule);
            work.0.compact().unwrap();
            work.gc(None);
            work.check_edit_contents(&contents, &rule);
            work.holds(all, &rule);
            drop(work);
            let checked = Sandbox::check_store(&copied, true).unwrap();
            assert!(checked.problems.is_empty(), "{rule}, finished: {:#?}", checked.problems);
            if done && onwards == "+" {
                eprintln!("{step} steps");
                steps = step;
                break;
            }
        }
    }
}

/// A program writes a block of zeros over the same zeros. A deduplication that would lead one to
/// the other is interrupted. Then gc frees the older block, so the next deduplication frees the
/// newer one because it holds zeros.
#[test]
fn zeros_are_readable_after_a_remap_was_not_published() {
    let (place, mut random) = (Place::new(), Random(8));
    let zeros = vec![0; BLOCK as usize];
    let (first, last) = (random.bytes(12 * zeros.len()), random.bytes(12 * zeros.len()));
    let content = [&first[..], &zeros, &last].concat();
    let work = place.open();
    work.put("a", &content);
    work.checkpoint("one");
    work.with("a", |fs, id| fs.write(id, first.len() as u64, &zeros, false).unwrap());
    // So much that the layer does not move into the archive.
    work.put("large", &random.bytes(1200 << 10));
    work.checkpoint("two");
    drop(work);
    let copied = place.dir.path().join("copy");
    let has_map = |path: &Path| layers(path).any(|layer| layer.join("map").exists());
    let mut between = 0;
    for step in 1.. {
        copy(&place.store, &copied);
        let work = place.open_with_history(&copied, &StoreOptions::default());
        let rule = format!("fail:any:{step}+:EIO");
        let done = failpoint::with(&rule, || work.0.compact().is_ok());
        drop(work);
        between += usize::from(!has_map(&copied) && !done);
        let work = place.open_with_history(&copied, &StoreOptions::default());
        work.drop_checkpoint("one");
        work.gc(None);
        work.0.compact().unwrap();
        assert!(work.get("a") == content, "{rule}");
        drop(work);
        let checked = Sandbox::check_store(&copied, true).unwrap();
        assert!(checked.problems.is_empty(), "{rule}: {:#?}", checked.problems);
        if done {
            break;
        }
    }
    assert!(between > 3, "{between} interruptions came before the remap");
}

fn prepared(random: &mut Random) -> (Place, BTreeMap<String, Files>) {
    let place = Place::new();
    let work = place.open_with_history(&place.store, &StoreOptions::default());
    let mut all = BTreeMap::new();
    let mut content = random.bytes(60_000);
    for label in ["first", "last"] {
        let small = content[..5000].to_vec();
        work.put("f", &content);
        work.save("g", &small);
        work.checkpoint(label);
        let files = [("f".to_owned(), content.clone()), ("g".to_owned(), small)];
        all.insert(label.to_owned(), Files::from(files));
        content.splice(20_000..20_000, random.bytes(7));
    }
    (place, all)
}

#[test]
fn an_interrupted_deduplication_changes_no_state() {
    let (place, all) = prepared(&mut Random(6));
    at_every_step(&place, &all, |work| work.0.compact().is_ok());
}

#[test]
fn an_interrupted_gc_over_shared_content_loses_nothing() {
    let (place, mut all) = prepared(&mut Random(7));
    let work = place.open_with_history(&place.store, &StoreOptions::default());
    work.0.compact().unwrap();
    work.drop_checkpoint("first");
    drop(work);
    all.remove("first");
    at_every_step(&place, &all, |work| {
        work.0
            .handle(Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false })
            .is_ok()
    });
}
