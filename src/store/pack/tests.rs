//! Tests of packs.

use super::*;
use crate::store::layer::LayerInfo;
use crate::store::layer::files::Layers;
use crate::store::layer::journal::packed_info;
use crate::store::placement::packing::gathered_journal;
use crate::store::record::{Header, LayerKind};
use crate::types::{Epoch, Timestamp};

fn packed(layer: u32, fill: u8) -> PackedLayer {
    let time = Timestamp::default();
    let (head, kind) = ("main".to_owned(), LayerKind::Continues);
    let header = Header { layer: LayerId(layer), parent: None, head, epoch: Epoch(0), kind, time };
    let journal = gathered_journal(LayerId(layer), &header, Vec::new()).unwrap();
    PackedLayer {
        layer: LayerId(layer),
        hole: Some(u64::from(fill)),
        journal,
        map: Some(vec![fill; 5000]),
        sums: None,
    }
}

fn store() -> (tempfile::TempDir, StoreDir) {
    let dir = tempfile::tempdir().unwrap();
    let store = StoreDir::open(dir.path()).unwrap();
    store.make_dir("layers").unwrap();
    (dir, store)
}

fn publish(packs: &Packs, store: &StoreDir, changes: Vec<Change>) -> PublishedPack {
    let mut published = packs
        .publish(store, &changes, PackOptions { next_layer: 1000, durable: false, merge: true })
        .unwrap();
    packs.adopt(&mut published);
    published
}

fn found(store: &StoreDir) -> (BTreeMap<LayerId, PackedLayer>, Packs) {
    let mut found = BTreeMap::new();
    let mut packs =
        Packs::open(store, &mut |packed| drop(found.insert(packed.layer, packed.clone()))).unwrap();
    assert!(packs.damaged().is_empty(), "{:?}", packs.damaged());
    (found, packs)
}

#[test]
fn the_newest_record_of_a_layer_counts_even_if_replaced_packs_come_back() {
    let (_dir, store) = store();
    let packs = Packs::open(&store, &mut |_| ()).unwrap();
    let (mut model, mut seed) = (BTreeMap::new(), 7u64);
    for step in 0..200u32 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let layer = ((seed >> 33) % 40) as u32 + 1;
        let change = if step % 3 == 2 {
            model.remove(&LayerId(layer));
            Change::Gone(LayerId(layer))
        } else {
            let new = packed(layer, step as u8);
            model.insert(LayerId(layer), new.clone());
            Change::Put(new)
        };
        let published = publish(&packs, &store, vec![change]);
        // Now and then, a crash cuts the removal off.
        if step % 5 > 0 {
            packs.remove_replaced(&published);
        }
        for layer in (1..=40).map(LayerId) {
            assert_eq!(
                packs.get(layer).unwrap().as_ref(),
                model.get(&layer),
                "step {step}, layer {layer}"
            );
        }
        if step % 20 == 0 {
            let (again, opened) = found(&store);
            assert_eq!(again, model, "step {step}");
            assert_eq!(opened.layers(), model.keys().copied().collect::<Vec<_>>());
            assert_eq!(opened.next_layer(), 1000);
            opened.remove_old().unwrap();
            assert_eq!(found(&store).0, model);
        }
    }
    let (count, bytes) = packs.space();
    assert!(count < 8 && bytes < 40_000, "{count} packs of {bytes} bytes");
}

#[test]
fn equal_remaps_of_consecutive_layers_take_next_to_nothing() {
    let (_dir, store) = store();
    let packs = Packs::open(&store, &mut |_| ()).unwrap();
    let map: Vec<u8> =
        (0..6000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let layers =
        (1..=100).map(|n| Change::Put(PackedLayer { map: Some(map.clone()), ..packed(n, 0) }));
    publish(&packs, &store, layers.collect());
    let (_, bytes) = packs.space();
    assert!(bytes < 15 * 24_000, "{bytes} bytes for 100 maps of 24,000");
}

#[test]
fn a_truncated_pack_or_a_flipped_bit_is_reported() {
    let (dir, store) = store();
    let packs = Packs::open(&store, &mut |_| ()).unwrap();
    publish(
        &packs,
        &store,
        (1..=3).map(|n| Change::Put(packed(n, 1))).chain([Change::Gone(LayerId(9))]).collect(),
    );
    let path = dir.path().join("packs/00000001");
    let whole = std::fs::read(&path).unwrap();
    let is_reported = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let mut opened = Packs::open(&store, &mut |_| ()).unwrap();
        let error = opened.damaged().pop();
        error.is_some_and(|error| error.to_string().contains("packs/00000001 at offset"))
    };
    (0..whole.len()).for_each(|at| assert!(is_reported(&whole[..at]), "cut at {at}"));
    for at in 0..whole.len() {
        let mut bad = whole.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(is_reported(&bad), "byte {at}");
    }
    assert!(!is_reported(&whole));
}

#[test]
fn leftover_files_of_a_packed_layer_are_ignored_and_removed() {
    let (dir, store) = store();
    let packs = Packs::open(&store, &mut |_| ()).unwrap();
    publish(
        &packs,
        &store,
        vec![Change::Put(packed(7, 1)), Change::Put(PackedLayer { hole: None, ..packed(8, 1) })],
    );
    for layer in ["00000007", "00000008"] {
        let layer = dir.path().join("layers").join(layer);
        std::fs::create_dir(&layer).unwrap();
        ["journal", "map", "pool"]
            .iter()
            .for_each(|name| std::fs::write(layer.join(name), "old").unwrap());
    }
    let layers = Layers::open(&store, &mut |_| ()).unwrap();
    let LayerInfo { packed: true, mapped: true, .. } = packed_info(&layers, &packed(7, 1)).unwrap()
    else {
        panic!("not in a pack");
    };
    assert_eq!(layers.read(LayerId(7), "map").unwrap(), Some(vec![1; 5000]));
    layers.remove_leftovers(&layers.directories().unwrap()).unwrap();
    assert!(!dir.path().join("layers/00000007").exists(), "the layer has no content of its own");
    let left = std::fs::read_dir(dir.path().join("layers/00000008")).unwrap();
    assert_eq!(left.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>(), ["pool"]);
}

#[test]
fn a_missing_pack_below_the_newest_is_named() {
    let (dir, store) = store();
    let packs = Packs::open(&store, &mut |_| ()).unwrap();
    for layer in 1..=3 {
        let options = PackOptions { next_layer: 10, durable: false, merge: false };
        let mut published =
            packs.publish(&store, &[Change::Put(packed(layer, 1))], options).unwrap();
        packs.adopt(&mut published);
    }
    assert_eq!(found(&store).0.len(), 3);
    for number in [1, 2] {
        let path = dir.path().join(PACKS).join(file_name(number));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let told = Packs::open(&store, &mut |_| ()).unwrap().damaged().pop().unwrap().to_string();
        assert!(told.contains(&format!("{PACKS}/{}", file_name(number))), "{told}");
        std::fs::write(&path, bytes).unwrap();
    }
}
