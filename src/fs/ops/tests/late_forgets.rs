//! Removes files, and lets the FORGET of the kernel come after an operation has found no space.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use super::{CALLER, Place, name};
use crate::error::{FsError, FsResult};
use crate::fs::space::enospc::MOST_TRIES;
use crate::fs::{Fs, Limits, Need};
use crate::store::record::LayerKind;
use crate::types::{Epoch, LayerId, NodeId};

const MIB: usize = 1 << 20;
const LIMIT: Limits = Limits { bytes: Some(8 * MIB as u64), files: None };
/// The content of the removed file. It is larger than the limit together with the part of it that
/// goes into the new file.
static BYTES: [u8; 6 * MIB] = [7; 6 * MIB];

fn create(fs: &Fs, dir: NodeId, file: &str) -> FsResult<NodeId> {
    fs.mknod(dir, &name(file), 0o644, 0, 0, CALLER).map(|made| made.id)
}

/// A place with a limit, and a removed file that the kernel holds. The file takes most of the
/// limit.
fn place(writes_after_removal: bool) -> (Place, NodeId) {
    let place = Place::new();
    let fs = &place.fs;
    let removed = create(fs, place.dir, "removed").unwrap();
    let write = || fs.write(removed, 0, &BYTES, false).unwrap();
    if !writes_after_removal {
        write();
    }
    fs.unlink(place.dir, &name("removed")).unwrap();
    if writes_after_removal {
        write();
    }
    fs.set_limits(LIMIT);
    (place, removed)
}

/// Creates a file and writes to it.
fn write(place: &Place) -> FsResult<()> {
    let new = create(&place.fs, place.dir, "new")?;
    place.fs.write(new, 0, &BYTES[..4 * MIB], false)
}

/// Calls `other` each time that an operation has found nothing to reclaim in the upper layer.
/// Nothing else is reclaimed.
fn set_reclaimer(place: &Place, other: impl Fn(&Fs) + Send + Sync + 'static) {
    let fs = Arc::downgrade(&place.fs);
    place.fs.set_reclaimer(Arc::new(move || {
        other(&fs.upgrade().unwrap());
        Some(0)
    }));
}

/// Runs an operation, and forgets a node as soon as it waits.
fn forget_while_it_waits<T: Send>(
    fs: &Fs,
    id: NodeId,
    operation: impl FnOnce() -> FsResult<T> + Send,
) -> FsResult<T> {
    std::thread::scope(|scope| {
        let operation = scope.spawn(operation);
        while !fs.reclaim.has_waiting() && !operation.is_finished() {
            std::thread::yield_now();
        }
        fs.forget(id, 1);
        operation.join().unwrap()
    })
}

/// Whether an attempt succeeds. On a busy machine, a FORGET can come too late.
fn succeeds(attempt: impl Fn() -> bool) -> bool {
    (0..20).any(|_| attempt())
}

#[test]
fn a_write_gets_the_space_of_a_removed_file_that_is_forgotten_late() {
    for writes_after_removal in [false, true] {
        assert!(
            succeeds(|| {
                let (place, removed) = place(writes_after_removal);
                forget_while_it_waits(&place.fs, removed, || write(&place)).is_ok()
            }),
            "{writes_after_removal}"
        );
    }
}

#[test]
fn a_new_file_takes_the_place_of_a_removed_one_that_is_forgotten_late() {
    assert!(succeeds(|| {
        let place = Place::new();
        let fs = &place.fs;
        let removed = create(fs, place.dir, "removed").unwrap();
        fs.unlink(place.dir, &name("removed")).unwrap();
        fs.set_limits(Limits { bytes: None, files: Some(1000) });
        let stored = 1000 - fs.statfs().unwrap().files_free;
        fs.set_limits(Limits { bytes: None, files: Some(stored) });
        forget_while_it_waits(fs, removed, || create(fs, place.dir, "new")).is_ok()
    }));
}

#[test]
fn a_write_does_not_get_the_space_of_a_removed_file_that_is_open() {
    for writes_after_removal in [false, true] {
        let (place, _) = place(writes_after_removal);
        assert_eq!(write(&place), Err(FsError::NoSpace), "{writes_after_removal}");
    }
}

#[test]
fn a_write_gets_space_that_was_freed_while_a_state_is_read() {
    let (place, removed) = place(true);
    set_reclaimer(&place, move |fs| fs.forget(removed, 1));
    let _reader = place.fs.read_guard();
    assert_eq!(write(&place), Ok(()));
}

#[test]
fn two_writes_get_the_space_of_one_removed_file() {
    let (place, removed) = place(false);
    let (fs, both, asked) = (&place.fs, Barrier::new(2), AtomicUsize::new(0));
    set_reclaimer(&place, move |fs| {
        let asked = asked.fetch_add(1, Ordering::Relaxed);
        if asked < 2 {
            both.wait();
        }
        if asked == 0 {
            fs.forget(removed, 1);
        }
        if asked < 2 {
            both.wait();
        }
    });
    let new = ["x", "y"].map(|file| create(fs, place.dir, file).unwrap());
    std::thread::scope(|scope| {
        let writes = new.map(|id| scope.spawn(move || fs.write(id, 0, &BYTES[..3 * MIB], false)));
        writes.into_iter().for_each(|write| assert_eq!(write.join().unwrap(), Ok(())));
    });
}

#[test]
fn a_write_fails_although_other_threads_free_space_all_the_time() {
    let (place, _) = place(false);
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    set_reclaimer(&place, move |fs| {
        count.fetch_add(1, Ordering::Relaxed);
        fs.reclaim.note_freed();
    });
    assert_eq!(write(&place), Err(FsError::NoSpace));
    assert!(asked.load(Ordering::Relaxed) < MOST_TRIES, "it gives up");
}

/// A layer to which nothing refers.
fn unused_layer(fs: &Fs) -> LayerId {
    fs.store.create_layer(None, "main", Epoch(0), LayerKind::Branches).unwrap().layer()
}

/// The quota counts bytes that the store does not take, as after a removal by another head. The
/// upper layer has nothing to reclaim.
fn overcount(fs: &Fs) {
    fs.make_room(Need::More);
    fs.set_limits(LIMIT);
    fs.core().quota.add(6 * MIB as u64);
}

#[test]
fn an_allocation_waits_for_a_change_instead_of_believing_an_old_measurement() {
    let place = Place::new();
    let fs = &place.fs;
    let new = create(fs, place.dir, "new").unwrap();
    overcount(fs);
    fs.core().quota.measure_soon();
    std::thread::scope(|scope| {
        let change = fs.changes.lock();
        let allocation = scope.spawn(|| fs.fallocate(new, 0, 0, 4 * MIB as u64, false));
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(change);
        assert_eq!(allocation.join().unwrap(), Ok(()));
    });
}

#[test]
fn an_operation_runs_again_if_another_thread_measures_the_store_meanwhile() {
    let place = Place::new();
    let (fs, runs) = (&place.fs, AtomicUsize::new(0));
    fs.set_limits(LIMIT);
    let operation = || {
        if runs.fetch_add(1, Ordering::Relaxed) == 0 {
            fs.set_limits(LIMIT);
            return Err(FsError::NoSpace);
        }
        Ok(())
    };
    assert_eq!(fs.retry_measured(operation), Ok(()));
}

#[test]
fn an_operation_measures_the_store_if_it_freed_space_after_another_thread_measured() {
    let place = Place::new();
    let (fs, gone) = (&place.fs, unused_layer(&place.fs));
    let runs = AtomicUsize::new(0);
    fs.set_limits(LIMIT);
    let operation = || {
        if runs.fetch_add(1, Ordering::Relaxed) == 0 {
            overcount(fs);
            fs.store.remove_layer(gone).unwrap();
        }
        fs.core().need_bytes(4 * MIB as u64)
    };
    assert_eq!(fs.retry_measured(operation), Ok(()));
}

/// A garbage collection that ran by itself frees space in this way.
#[test]
fn the_store_is_measured_again_after_it_has_freed_space() {
    let place = Place::new();
    let (fs, gone) = (&place.fs, unused_layer(&place.fs));
    let new = create(fs, place.dir, "new").unwrap();
    overcount(fs);
    fs.store.remove_layer(gone).unwrap();
    assert_eq!(fs.write(new, 0, &BYTES[..4 * MIB], false), Ok(()));
}

#[test]
fn the_store_is_measured_again_after_space_was_reclaimed() {
    let place = Place::new();
    overcount(&place.fs);
    let is_reclaimed = AtomicUsize::new(0);
    place.fs.set_reclaimer(Arc::new(move || {
        Some(if is_reclaimed.fetch_add(1, Ordering::Relaxed) == 0 { MIB as u64 } else { 0 })
    }));
    assert_eq!(write(&place), Ok(()));
}
