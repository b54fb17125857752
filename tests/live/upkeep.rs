//! Garbage collection while programs work in the mount frees nothing that is needed.

use crate::harness::{Live, assert_same};

/// Bytes of the store on disk, as the host counts them.
fn on_disk(live: &Live) -> u64 {
    let output = std::process::Command::new("du")
        .args(["-s", "--block-size=1"])
        .arg(&live.store)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap().parse().unwrap()
}

const MIB: u64 = 1 << 20;

#[test]
fn unneeded_content_is_freed_while_programs_go_on() {
    // The edit history would keep the content of single files.
    let live = Live::with_options("seq 1000 > base", &["-o", "history=0"]);
    live.sh("mkdir d; head -c 20000000 /dev/urandom > d/large; \
        head -c 3000000 /dev/urandom > kept; seq 500 > d/small");
    live.checkpoint("large");
    live.sh("rm -r d; echo more >> kept");
    live.checkpoint("without");
    // Content that was written and removed between two checkpoints, and a file that stays open
    // after its name is gone.
    live.sh("head -c 20000000 /dev/urandom > passing; rm passing");
    let mut holder = live.puppet("");
    holder.run("f = open('held', 'w+b'); f.write(b'H' * 2000000); f.flush(); os.unlink('held')");
    let mut writer = live.puppet("");
    writer
        .begin("for n in range(300): open('w%d' % (n % 10), 'wb').write(bytes([n % 251]) * 50000)");

    assert!(on_disk(&live) > 40 * MIB);
    live.jailfs(&["drop", "large"]);
    let planned = live.json(&["gc", "--operations", "0", "--dry-run"]);
    let done = live.json(&["gc", "--operations", "0"]);
    writer.answer().unwrap();
    let bytes = |said: &[serde_json::Value]| said.last().unwrap()["bytes"].as_u64().unwrap();
    assert!(bytes(&planned) > 38 * MIB && bytes(&done) > 30 * MIB, "{planned:?} {done:?}");
    // The content that the writer has replaced since.
    live.jailfs(&["gc", "--operations", "0"]);
    // With the reserve of 4 MiB.
    let left = on_disk(&live);
    assert!(left < 12 * MIB, "{left} bytes are left");

    holder.gives("f.seek(0) and None or set(f.read()) == {72}", "True");
    for n in 290..300u32 {
        let path = live.mnt.join(format!("w{}", n % 10));
        assert!(std::fs::read(path).unwrap() == vec![(n % 251) as u8; 50_000], "w{}", n % 10);
    }
    holder.end();
    writer.end();
    let now = live.snapshot();
    assert_eq!(live.json(&["check", "--read-data"]).last().unwrap()["problems"], 0);
    live.restore("without");
    assert_eq!(std::fs::metadata(live.mnt.join("kept")).unwrap().len(), 3_000_005);
    assert!(!live.exists("d") && !live.exists("w1"));
    let Some(op) =
        live.json(&["op", "log"]).iter().find(|op| op["verb"] == "seal").map(|op| op["op"].clone())
    else {
        panic!("the restore sealed nothing")
    };
    live.jailfs(&["op", "restore", &op.to_string()]);
    assert_same(&now, &live.snapshot(), "the tree before the restore");
}

#[test]
fn a_held_checkpoint_stays_and_a_dropped_one_is_freed() {
    let mut live = Live::new("echo base > base");
    for n in 1..=5 {
        live.sh(&format!("echo {n} > f; head -c 100000 /dev/urandom > r"));
        live.checkpoint(&format!("c{n}"));
    }
    live.jailfs(&["hold", "c2"]);
    let refused = live.try_jailfs(&["drop", "c2"]);
    assert_eq!(refused.status.code(), Some(11), "{refused:?}");
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("hint: 'jailfs release 2'"),
        "{refused:?}"
    );
    let said = live.json(&["gc", "--keep", "2", "--operations", "0"]);
    let dropped: Vec<u64> = said.iter().filter_map(|line| line["id"].as_u64()).collect();
    assert_eq!(dropped, [1, 3]);
    for remounted in [false, true] {
        if remounted {
            live.kill_and_mount();
        }
        let names: Vec<String> =
            live.json(&["log"]).iter().map(|c| c["name"].as_str().unwrap().to_owned()).collect();
        assert_eq!(names, ["c5", "c4", "c2"]);
        for n in [2, 4, 5] {
            live.restore(&format!("c{n}"));
            assert_eq!(live.read("f"), format!("{n}\n"));
        }
        assert_eq!(live.try_jailfs(&["restore", "c1"]).status.code(), Some(10));
    }
    live.jailfs(&["release", "c2"]);
    live.jailfs(&["gc", "--max-store", "1", "--operations", "0"]);
    assert!(live.json(&["log"]).is_empty(), "a budget of zero drops every state that may go");
    assert_eq!(live.read("f"), "5\n");
}
