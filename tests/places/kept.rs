//! Metadata that the base's filesystem cannot store when an apply writes it.

use serde_json::Value;

use crate::device::on_image;
use crate::harness::{Live, shell};

const FILL: &str = "for f in late early exact linked; do echo $f > $f; done; ln linked other; \
    mkdir d; echo x > d/x";
/// The year 3000 is too late for any ext4, and 1850 too early; one second in 2020 has a fraction.
const TOUCH: &str = "touch -d '3000-01-01 00:00:00.123456789Z' late d/x; \
    touch -d 1850-01-01Z early linked
    touch -d '2020-02-02 02:02:02.123456789Z' exact; echo new > d/new
    touch -d 3000-05-05Z d/new d";

/// The paths in the lines of one type.
fn paths(lines: &[Value], of: &str) -> Vec<String> {
    let found = lines.iter().filter(|line| line["type"] == of);
    found.map(|line| line["path"].as_str().unwrap().to_owned()).collect()
}

/// The number of changes of an apply.
fn changes(lines: &[Value]) -> u64 {
    lines.last().unwrap()["changes"].as_u64().unwrap()
}

fn times(live: &Live) -> String {
    shell(&live.base, "stat -c '%n %y' late early exact linked d/x d")
}

fn on_ext4(inode: u32, more: &str) -> (Live, crate::device::Below) {
    let make = format!("truncate -s 16M ../image; mkfs.ext4 -q -I {inode} ../image 2> /dev/null");
    let (live, below, _) = on_image(&make, &format!("{FILL}; {more}"));
    (live, below)
}

#[test]
fn times_that_the_base_cannot_store_are_reported_and_are_no_difference_afterwards() {
    // Inodes of 128 bytes store seconds until 2038; those of 256 bytes store fractions until 2446.
    for (inode, last) in [(128, "2038-01-19 03:14:07"), (256, "2446-05-10 22:38:55")] {
        let (mut live, _below) = on_ext4(inode, "");
        let before = times(&live);
        live.sh(TOUCH);
        live.checkpoint("touched");
        let seen = live.snapshot();
        let part = live.json(&["apply", "late", "early", "exact", "d"]);
        assert_eq!(
            paths(&part, "not_kept"),
            ["d", "d/new", "d/x", "early", "late"],
            "{inode}: {part:?}"
        );
        let output =
            part.iter().find(|line| line["type"] == "not_kept").unwrap()["reason"].to_string();
        assert!(output.contains("3000-05-05") && output.contains(last), "{output}");
        let applied = times(&live);
        assert!(applied.contains(&format!("late {last}.000000000")), "{applied}");
        assert!(applied.contains("early 1901-12-13 20:45:52"), "{applied}");
        crate::harness::assert_same(&seen, &live.snapshot(), "the tree after an apply of a part");
        // Only the other file remains to be applied, also for a new daemon.
        for _ in 0..2 {
            let left = live.json(&["diff", "base"]);
            assert_eq!(paths(&left, "change"), ["linked", "other"], "{inode}: {left:?}");
            assert_eq!(live.json(&["status"])[0]["to_apply"], 2);
            live.remount();
        }
        let again = live.json(&["apply", "late", "early", "exact", "d"]);
        assert_eq!(
            (changes(&again), paths(&again, "not_kept").len()),
            (0, 0),
            "{inode}: {again:?}"
        );
        live.jailfs(&["apply", "--undo"]);
        assert_eq!(times(&live), before);
        // All of it; then an older state, which the base already equals.
        let whole = live.json(&["apply"]);
        assert_eq!(whole.last().unwrap()["not_kept"], 7, "{inode}: {whole:?}");
        let applied = times(&live);
        live.restore("touched");
        crate::harness::assert_same(&seen, &live.snapshot(), "the tree of the checkpoint");
        assert_eq!(live.jailfs(&["diff", "base"]), "", "{inode}");
        assert_eq!(changes(&live.json(&["apply"])), 0, "{inode}");
        // A change of content counts nevertheless.
        live.sh("echo more >> late; touch -d 3000-01-01Z late");
        assert_eq!(paths(&live.json(&["apply"]), "change"), ["late"], "{inode}");
        live.jailfs(&["apply", "--undo"]);
        assert_eq!(times(&live), applied, "{inode}");
        live.umount();
        crate::states::check(&live.store, "after times that the base cannot hold");
    }
}

#[test]
fn a_long_list_of_times_that_the_base_cannot_store_is_cut() {
    let (mut live, _below) = on_ext4(256, "");
    live.sh("for n in $(seq 100 150); do echo $n > n$n; done; touch -d 3000-01-01Z n*");
    let output = live.try_jailfs(&["apply"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && message.contains("warning: 'n100': "), "{message}");
    assert_eq!(message.lines().count(), 21, "{message}");
    assert!(
        message.ends_with("warning: and 31 paths more of which the base did not keep everything\n"),
        "{message}"
    );
    live.umount();
}

#[test]
fn an_apply_keeps_the_flags_of_a_replaced_file_and_reports_those_that_are_lost() {
    const FLAGS: &str =
        "chattr +dA late; chattr +A early; chattr +d d; chattr +d linked; chattr -d d/x";
    let (mut live, _below) = on_ext4(256, FLAGS);
    let flags = |files: &str| {
        let said = shell(&live.base, &format!("lsattr -d {files}"));
        let letters = |line: &str| line.split(' ').next().unwrap().replace(['-', 'e'], "");
        said.lines().map(letters).collect::<Vec<String>>()
    };
    live.sh(
        "echo more >> late; echo more >> d/x; echo more >> linked; mv early moved; echo n > d/n; \
         echo n > n",
    );
    let output = live.json(&["apply"]);
    assert_eq!(
        flags("late d d/x d/n linked other moved n"),
        ["dA", "d", "", "d", "d", "d", "", ""]
    );
    assert_eq!(paths(&output, "not_kept"), ["early"], "{output:?}");
    let why = output.iter().find(|line| line["type"] == "not_kept").unwrap()["reason"].to_string();
    assert!(why.contains("'A' of chattr(1)"), "{why}");
    let output = live.json(&["apply", "--undo"]);
    assert_eq!(flags("late d d/x linked early"), ["dA", "d", "", "d", ""], "{output:?}");
    assert_eq!(paths(&output, "not_kept"), [""; 0], "{output:?}");
    live.umount();
}
