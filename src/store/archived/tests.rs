//! Tests of the archived layers.

use std::path::PathBuf;

use super::*;
use crate::store::archive::{Chunk, ChunkSink};
use crate::store::io::log;
use crate::store::layer::LayerInfo;
use crate::store::layer::compact::compact_records;
use crate::store::layer::files::Layers;
use crate::store::layer::journal::archived_info;
use crate::store::record::{Header, LayerKind, Seal};
use crate::types::{Epoch, Timestamp};

fn archived(layer: u32, fill: u8) -> ArchivedLayer {
    let time = Timestamp::default();
    let (head, kind) = ("main".to_owned(), LayerKind::Continues);
    let header = Header { layer: LayerId(layer), parent: None, head, epoch: Epoch(0), kind, time };
    let seal = Seal { name: None, message: String::new(), time, automatic: true };
    let journal = log::frames(compact_records(&header, &seal, std::iter::empty())).unwrap();
    ArchivedLayer {
        layer: LayerId(layer),
        end: u64::from(fill),
        journal,
        map: Some(vec![fill; 5000]),
        content: StoredContent::default(),
    }
}

fn store() -> (tempfile::TempDir, StoreDir) {
    let dir = tempfile::tempdir().unwrap();
    let store = StoreDir::open(dir.path()).unwrap();
    store.make_dir("layers").unwrap();
    (dir, store)
}

fn publish(layers: &ArchivedLayers, store: &StoreDir, changes: &[Change]) {
    let mut writer = layers.made(store, false).unwrap().writer();
    let mut published = layers.publish(&mut writer, changes, 1000).unwrap();
    published.synced.clone().unwrap();
    layers.adopt(&mut published);
}

fn open(store: &StoreDir) -> (BTreeMap<LayerId, ArchivedLayer>, ArchivedLayers) {
    let mut found = BTreeMap::new();
    let layers =
        ArchivedLayers::open(store, false, &mut |one| drop(found.insert(one.layer, one))).unwrap();
    (found, layers)
}

fn packs(dir: &tempfile::TempDir) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir.path().join(ARCHIVE)).unwrap();
    let files = files.map(|file| file.unwrap().path());
    files.filter(|path| path.file_name().is_some_and(|name| name != ROOT)).collect()
}

#[test]
fn a_layer_is_what_the_last_root_says() {
    let (dir, store) = store();
    let (_, layers) = open(&store);
    let (mut model, mut seed) = (BTreeMap::new(), 7u64);
    for step in 0..200u32 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let layer = ((seed >> 33) % 40) as u32 + 1;
        let change = if step % 3 == 2 {
            model.remove(&LayerId(layer));
            Change::Gone(LayerId(layer))
        } else {
            let new = archived(layer, step as u8);
            model.insert(LayerId(layer), new.clone());
            Change::Put(new)
        };
        publish(&layers, &store, &[change]);
        for layer in (1..=40).map(LayerId) {
            let found = layers.get(layer).unwrap();
            assert_eq!(found.as_ref(), model.get(&layer), "step {step}, layer {layer}");
        }
        if step % 20 == 0 {
            while !matches!(layers.tidy(1000).unwrap(), Tidied::Unchanged) {}
            let (again, mut opened) = open(&store);
            assert!(opened.damaged().is_empty(), "{:?}", opened.damaged());
            assert_eq!(again, model, "step {step}");
            assert_eq!(opened.layers(), model.keys().copied().collect::<Vec<_>>());
            assert_eq!((opened.next_layer(), opened.number()), (1000, layers.number()));
        }
    }
    while !matches!(layers.tidy(1000).unwrap(), Tidied::Unchanged) {}
    let (count, bytes) = layers.space();
    assert!(count < 4 && bytes < 40_000, "{count} packs of {bytes} bytes");
    assert_eq!(packs(&dir).len(), count);
}

#[test]
fn equal_remaps_of_consecutive_layers_take_next_to_nothing() {
    let (_dir, store) = store();
    let (_, layers) = open(&store);
    let map: Vec<u8> =
        (0..1500u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let changes: Vec<Change> = (1..=100)
        .map(|n| Change::Put(ArchivedLayer { map: Some(map.clone()), ..archived(n, 0) }))
        .collect();
    publish(&layers, &store, &changes);
    let (_, bytes) = layers.space();
    assert!(bytes < 20 * 6000, "{bytes} bytes for 100 maps of 6,000");
}

/// A layer whose content is two chunks of 5,000 bytes.
fn with_content(layers: &ArchivedLayers, store: &StoreDir) -> ArchivedLayer {
    let bytes: Vec<u8> = (0..10_000u32).map(|n| (n * n / 7) as u8).collect();
    let mut writer = layers.made(store, false).unwrap().writer();
    let mut chunks = Vec::new();
    for chunk in bytes.chunks(5000).filter_map(Chunk::new) {
        writer.put(chunk).unwrap();
        chunks.push(chunk.reference());
    }
    writer.finish().unwrap();
    let content = StoredContent { ranges: vec![(4096, 7000), (1192, 3000)], chunks };
    ArchivedLayer { end: 20_000, content, ..archived(7, 1) }
}

#[test]
fn a_truncated_archive_or_a_flipped_bit_of_a_record_is_reported() {
    let (dir, store) = store();
    let (_, layers) = open(&store);
    publish(&layers, &store, &[1, 2, 3].map(|n| Change::Put(archived(n, 1))));
    let pack = packs(&dir).pop().unwrap();
    for path in [pack, dir.path().join("archive/root")] {
        let whole = std::fs::read(&path).unwrap();
        let reported = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let (_, mut opened) = open(&store);
            opened.damaged().pop().map(|error| error.to_string())
        };
        for at in 0..whole.len() {
            let error = reported(&whole[..at]).unwrap();
            assert!(error.contains("archive/"), "cut at {at}: {error}");
            let mut bad = whole.clone();
            bad[at] ^= 1 << (at % 8);
            let error = reported(&bad).unwrap();
            assert!(error.contains("archive/"), "byte {at}: {error}");
        }
        assert_eq!(reported(&whole), None);
    }
}

#[test]
fn a_missing_pack_is_named_once() {
    let (dir, store) = store();
    let (_, layers) = open(&store);
    publish(&layers, &store, &[1, 2, 3].map(|n| Change::Put(archived(n, 1))));
    let pack = packs(&dir).pop().unwrap();
    std::fs::remove_file(&pack).unwrap();
    let (found, mut opened) = open(&store);
    let [error] = opened.damaged().as_slice() else { panic!("{:?}", opened.damaged()) };
    let name = pack.file_name().unwrap().to_str().unwrap().to_owned();
    assert!(error.to_string().contains(&name), "{error}");
    assert!(found.is_empty());
}

#[test]
fn packs_stay_while_their_content_is_needed_and_go_with_it() {
    let (dir, store) = store();
    let (_, layers) = open(&store);
    let layer = with_content(&layers, &store);
    let chunks = layer.content.chunks.clone();
    publish(&layers, &store, &[Change::Put(layer)]);
    while !matches!(layers.tidy(1000).unwrap(), Tidied::Unchanged) {}
    let (found, opened) = open(&store);
    assert_eq!(found[&LayerId(7)].content.chunks, chunks);
    let archive = opened.archive().unwrap();
    assert!(chunks.iter().all(|chunk| archive.get(chunk).is_ok()));
    publish(&layers, &store, &[Change::Gone(LayerId(7))]);
    while !matches!(layers.tidy(1000).unwrap(), Tidied::Unchanged) {}
    assert_eq!((layers.space(), packs(&dir).len()), ((0, 0), 0));
    assert!(open(&store).0.is_empty());
}

#[test]
fn files_of_an_interrupted_move_are_ignored_and_removed() {
    let (dir, store) = store();
    let (_, layers) = open(&store);
    publish(&layers, &store, &[7, 8].map(|n| Change::Put(archived(n, 1))));
    // A pack that no root names, as a crash leaves it.
    let unnamed = with_content(&layers, &store);
    assert_eq!(packs(&dir).len(), 2);
    for layer in ["00000007", "00000008"] {
        let layer = dir.path().join("layers").join(layer);
        std::fs::create_dir(&layer).unwrap();
        for name in ["journal", "map", "pool"] {
            std::fs::write(layer.join(name), "old").unwrap();
        }
    }
    std::fs::write(dir.path().join("layers/00000008/index"), "stays").unwrap();
    let layers = Layers::open(&store, false, &mut |_| ()).unwrap();
    let LayerInfo { archived: Some(1), mapped: true, .. } =
        archived_info(&layers, &archived(7, 1)).unwrap()
    else {
        panic!("not in the archive");
    };
    assert_eq!(layers.read(LayerId(7), "map").unwrap(), Some(vec![1; 5000]));
    layers.remove_leftovers(&layers.directories().unwrap()).unwrap();
    assert!(!dir.path().join("layers/00000007").exists());
    let left = std::fs::read_dir(dir.path().join("layers/00000008")).unwrap();
    assert_eq!(left.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>(), ["index"]);
    assert_eq!(packs(&dir).len(), 1);
    let archive = layers.archived.archive().unwrap();
    assert!(unnamed.content.chunks.iter().all(|chunk| !archive.has(&chunk.digest).unwrap()));
}

#[test]
fn a_layer_is_read_while_its_block_is_replaced_and_packs_are_removed() {
    let (_dir, store) = store();
    let (_, layers) = open(&store);
    let is_done = std::sync::atomic::AtomicBool::new(false);
    publish(&layers, &store, &[Change::Put(archived(7, 0))]);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                layers.blocks.lock().clear();
                assert!(layers.get(LayerId(7)).unwrap().is_some());
            }
        });
        for step in 0..300 {
            publish(&layers, &store, &[Change::Put(archived(7, step as u8))]);
            while !matches!(layers.tidy(1000).unwrap(), Tidied::Unchanged) {}
            if reader.is_finished() {
                break;
            }
        }
        is_done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

mod content {
    use super::*;
    use crate::store::content::ReadOutcome;
    use crate::store::content::archived::ArchivedContent;
    use crate::types::ByteRange;

    fn content() -> (tempfile::TempDir, ArchivedContent) {
        let (dir, store) = store();
        let (_, layers) = open(&store);
        let layer = with_content(&layers, &store);
        let archive = Arc::clone(layers.archive().unwrap());
        (dir, ArchivedContent::new(LayerId(7), archive, layer.end, layer.content).unwrap())
    }

    /// The byte at an address of [`with_content`].
    fn byte(at: u64) -> u8 {
        let of = |n: u64| (n * n / 7) as u8;
        match at {
            4096..11_096 => of(at - 4096),
            12_288..15_288 => of(at - 12_288 + 7000),
            _ => 0,
        }
    }

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange { start, end }
    }

    #[test]
    fn a_read_returns_what_was_stored_wherever_it_begins_and_ends() {
        let (_dir, content) = content();
        for (from, to) in
            [(0, 20_000), (4095, 4097), (9095, 9097), (11_000, 12_300), (15_287, 20_000)]
        {
            let mut bytes = vec![9; (to - from) as usize];
            let got = content.read(from, &mut bytes, false).unwrap();
            assert_eq!(got, ReadOutcome::Bytes(bytes.len()));
            assert!((from..to).zip(&bytes).all(|(at, found)| byte(at) == *found), "{from}..{to}");
        }
        let at_the_end = content.read(19_990, &mut [0; 100], false).unwrap();
        assert_eq!(at_the_end, ReadOutcome::Bytes(10));
    }

    #[test]
    fn a_read_without_waiting_returns_only_frames_that_are_in_memory() {
        let (_dir, content) = content();
        let mut bytes = [0; 100];
        let mut read = |nowait| content.read(5000, &mut bytes, nowait).unwrap();
        assert_eq!(
            (read(true), read(false), read(true)),
            (ReadOutcome::WouldBlock, ReadOutcome::Bytes(100), ReadOutcome::Bytes(100))
        );
    }

    #[test]
    fn data_and_holes_are_where_they_were() {
        let (_dir, content) = content();
        assert_eq!(content.stored(), [range(4096, 11_096), range(12_288, 15_288)]);
        assert_eq!((content.next_data(0), content.next_data(5000)), (Some(4096), Some(5000)));
        assert_eq!((content.next_data(12_000), content.next_data(15_288)), (Some(12_288), None));
        assert_eq!((content.next_hole(0), content.next_hole(4096)), (0, 11_096));
    }

    #[test]
    fn a_chunk_is_needed_while_one_of_its_bytes_is() {
        let (_dir, content) = content();
        assert_eq!(
            content.unused(&[]),
            [range(4096, 9096), range(9096, 11_096), range(12_288, 15_288)]
        );
        assert_eq!(content.unused(&[range(9000, 9001)])[0], range(9096, 11_096));
        assert_eq!(content.unused(&[range(15_000, 15_001)]), [range(4096, 9096)]);
        let first = content.unused(&[range(15_000, 15_001)]);
        let rest = content.without(&first);
        assert_eq!((rest.ranges, rest.chunks.len()), (vec![(9096, 2000), (1192, 3000)], 1));
        let whole = content.without(&[range(5000, 20_000)]);
        assert_eq!((whole.ranges, whole.chunks.len()), (vec![(4096, 5000)], 1));
    }

    #[test]
    fn content_whose_length_is_not_that_of_its_chunks_is_refused() {
        let (_dir, store) = store();
        let (_, layers) = open(&store);
        let layer = with_content(&layers, &store);
        for ranges in [vec![(0, 9999)], vec![(0, 10_001)], vec![(u64::MAX, 1)], vec![(0, 0)]] {
            let archive = Arc::clone(layers.archive().unwrap());
            let content = StoredContent { ranges, ..layer.content.clone() };
            assert!(ArchivedContent::new(LayerId(7), archive, 20_000, content).is_none());
        }
    }
}
