//! Removes files, and lets the FORGET of the kernel come after a write has found no space.

use std::sync::Arc;

use super::{CALLER, Place, name};
use crate::error::FsError;
use crate::fs::Limits;
use crate::types::NodeId;

/// Both files together are larger.
const LIMIT: u64 = 8 << 20;
static REMOVED: [u8; 6 << 20] = [7; 6 << 20];
static NEW: [u8; 4 << 20] = [8; 4 << 20];

/// A place with a limit, and a removed file that the kernel holds and that takes most of it.
fn place(writes_after_removal: bool) -> (Place, NodeId) {
    let place = Place::new();
    let fs = &place.fs;
    let removed = fs.mknod(place.dir, &name("removed"), 0o644, 0, 0, CALLER).unwrap().id;
    let write = || fs.write(removed, 0, &REMOVED, false).unwrap();
    if !writes_after_removal {
        write();
    }
    fs.unlink(place.dir, &name("removed")).unwrap();
    if writes_after_removal {
        write();
    }
    fs.set_limits(Limits { bytes: Some(LIMIT), files: None });
    (place, removed)
}

/// Writes to a new file. At the time of the FORGET, the write has found no space.
fn write(place: &Place, forgets: Option<NodeId>) -> Result<(), FsError> {
    let fs = Arc::downgrade(&place.fs);
    place.fs.set_reclaimer(Arc::new(move || {
        if let Some(id) = forgets {
            fs.upgrade().unwrap().forget(id, 1);
        }
        Some(0)
    }));
    let new = place.fs.mknod(place.dir, &name("new"), 0o644, 0, 0, CALLER).unwrap().id;
    place.fs.write(new, 0, &NEW, false)
}

#[test]
fn a_write_gets_the_space_of_a_removed_file_that_is_forgotten_late() {
    for writes_after_removal in [false, true] {
        let (place, removed) = place(writes_after_removal);
        assert_eq!(write(&place, Some(removed)), Ok(()), "{writes_after_removal}");
    }
}

#[test]
fn a_write_does_not_get_the_space_of_a_removed_file_that_is_open() {
    for writes_after_removal in [false, true] {
        let (place, _) = place(writes_after_removal);
        assert_eq!(write(&place, None), Err(FsError::NoSpace), "{writes_after_removal}");
    }
}
