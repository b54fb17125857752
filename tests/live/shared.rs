//! Deduplication while programs work, who must not notice it.

use std::time::{Duration, Instant};

use crate::harness::{Live, assert_same};

/// Waits until every sealed layer was deduplicated. Returns what the store then reports.
pub(crate) fn looked_through(live: &Live) -> serde_json::Value {
    let end = Instant::now() + Duration::from_secs(100);
    loop {
        let info = live.json(&["info"]).pop().unwrap();
        if info["to_do"] == 0 {
            return info;
        }
        assert!(Instant::now() < end, "it does not come to an end: {info}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn deduplication_changes_only_the_space_on_disk() {
    let mut live = Live::new("echo base > base");
    live.sh("head -c 3000000 /dev/urandom > f; mkdir d; for n in $(seq 30); \
        do head -c 7000 /dev/urandom > d/$n; done");
    live.checkpoint("one");
    let wanted = live.sh("md5sum < f");
    let mut reader = live.puppet("");
    // Bypassing the page cache, as often as possible.
    reader.run("import hashlib");
    reader.run("f = open('f', 'rb', buffering=0)");
    reader.run(
        "sums = lambda n: {(os.posix_fadvise(f.fileno(), 0, 0, 4), f.seek(0), \
         hashlib.md5(f.read()).hexdigest())[2] for _ in range(n)}",
    );
    reader.begin("seen = sums(60)");
    for n in 0..4 {
        live.sh(&format!("(printf 'line {n}\\n'; cat f) > g; cp -r d d{n}; cp f f{n}"));
        live.checkpoint(&format!("more{n}"));
    }
    let info = looked_through(&live);
    reader.answer().unwrap();
    let sum = wanted.split_whitespace().next().unwrap();
    reader.gives(&format!("seen == {{'{sum}'}}"), "True");
    reader.end();
    let bytes = |key: &str| info[key].as_u64().unwrap();
    // Eight files of 3 MB, and four of the directories, are stored already.
    assert!(bytes("shared") > 8 * 2_900_000 + 4 * 30 * 7000, "{info}");
    assert!(bytes("stored") < 4_500_000, "{info}");
    let now = live.snapshot();
    live.kill_and_mount();
    assert_same(&now, &live.snapshot(), "the tree before it was killed");
    for n in 0..4 {
        live.restore(&format!("more{n}"));
        live.sh(&format!("tail -c +8 g | cmp - f; cmp f f{n}; diff -r d d{n}"));
    }
    live.jailfs(&["drop", "one"]);
    live.jailfs(&["gc", "--operations", "0"]);
    live.restore("more3");
    assert_same(&now, &live.snapshot(), "the tree before the shared state was dropped");
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
}
