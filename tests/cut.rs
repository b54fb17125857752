//! Dropping a mount ends it at once, also for processes inside.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::Bench;

/// The errors that a program gets without a server: at once, or for a waiting request.
const OVER: [i32; 2] = [libc::ENOTCONN, libc::ECONNABORTED];

#[test]
fn nothing_changes_the_tree_after_its_mount_is_dropped() {
    let bench = Bench::over(|base| fs::write(base.join("f"), "old").unwrap());
    let dir = OpenOptions::new().read(true).open(bench.at("")).unwrap();
    let mut held = OpenOptions::new().append(true).open(bench.at("f")).unwrap();
    held.write_all(b", new").unwrap();
    // A program that writes as fast as the mount allows.
    let written = Arc::new(AtomicU64::new(0));
    let (mut writer, count) = (held.try_clone().unwrap(), Arc::clone(&written));
    let busy = std::thread::spawn(move || {
        loop {
            if let Err(error) = writer.write_all(b".") {
                return error.raw_os_error();
            }
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    while written.load(Ordering::SeqCst) < 100 {
        std::thread::yield_now();
    }
    let sandbox = Arc::clone(&bench.fs);
    drop(bench);
    let size = |fs: &jailfs::internals::fs::Fs| {
        let state = fs.state();
        let found = state.resolve(&jailfs::types::TreePath::parse(b"f").unwrap()).unwrap();
        state.attr(&found).unwrap().size
    };
    let at_the_end = size(&sandbox);
    assert!(OVER.contains(&busy.join().unwrap().unwrap()));
    assert!(at_the_end >= 8 + written.load(Ordering::SeqCst), "the acknowledged data is there");
    assert_eq!(size(&sandbox), at_the_end, "and no later data");
    let write = held.write_all(b"late").unwrap_err().raw_os_error();
    assert!(OVER.contains(&write.unwrap()), "{write:?}");
    let unread = (&held).read(&mut [0; 1]).unwrap_err().raw_os_error();
    assert!(unread.is_some());
    let through = format!("/proc/self/fd/{}/new", std::os::fd::AsRawFd::as_raw_fd(&dir));
    let create = fs::write(through, "late").unwrap_err().raw_os_error();
    assert!(OVER.contains(&create.unwrap()), "{create:?}");
}
