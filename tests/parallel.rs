//! How many threads take the requests of a mount at the same time.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::time::{Duration, Instant};

use harness::Live;

/// Where the threads of a daemon wait in the kernel.
fn waits(live: &Live) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{}/task", live.pid())).unwrap().flatten();
    threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("wchan")).ok()).collect()
}

fn count(waits: &[String]) -> usize {
    waits.iter().filter(|place| place.starts_with("fuse_dev_do_read")).count()
}

#[test]
fn as_many_threads_take_requests_as_the_user_asks_for() {
    let cases =
        [("threads=16,parallel=1", 1), ("threads=16,parallel=4", 4), ("threads=2,parallel=2", 2)];
    for (options, wanted) in cases {
        let live = Live::with_limit("true", &["-o", options], Duration::from_secs(100));
        let limit = Instant::now() + Duration::from_secs(30);
        loop {
            let waits = waits(&live);
            if count(&waits) == wanted {
                break;
            }
            assert!(Instant::now() < limit, "{options}: {waits:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Each name is new, so each is a request. All threads had the time to wait for one.
        live.sh("for a in 1 2 3 4; do for n in $(seq 100); do ls $a-$n; done & done 2>&1; wait");
        let most = (0..50).map(|_| {
            std::thread::sleep(Duration::from_millis(5));
            count(&waits(&live))
        });
        assert_eq!(most.max(), Some(wanted), "{options}");
    }
}
