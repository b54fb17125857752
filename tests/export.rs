//! Export and import: against umoci, skopeo, GNU tar and git, and with hostile archives.
//!
//! The partners are Debian packages. A missing one fails the tests. Unpacked trees are compared
//! with the mount name by name (`tests/export/tree.py`).

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failure is what a test is for"
)]

#[expect(dead_code, reason = "each test file uses another part of this")]
#[path = "common/live.rs"]
mod harness;
#[path = "export/hostile.rs"]
mod hostile;
#[path = "export/partners.rs"]
mod partners;
#[path = "export/round_trip.rs"]
mod round_trip;

use std::path::{Path, PathBuf};
use std::process::Command;

use harness::{Live, text};

/// A program that prints what an archive carries of a tree.
const TREE: &str = include_str!("export/tree.py");

/// A base with all kinds of nodes, names and attributes.
const BASE: &str = r#"
    mkdir -p dir/sub gone/deep "sp ace"
    echo one > dir/file; echo two > dir/sub/two; echo gone > gone/deep/file
    ln dir/file dir/again; ln dir/file twin
    ln -s ../dir/file dir/sub/link; ln -s /etc/passwd out
    mkfifo pipe; mknod null c 1 3; mknod disk b 7 200
    printf 'x%.0s' $(seq 300) > long; printf 'bytes' > "$(printf 'n\377\n')"
    d=$(printf 'd%.0s' $(seq 90)); mkdir -p $d/$d/$d; echo deep > $d/$d/$d/file
    ln $d/$d/$d/file deep-twin; ln -s $d/$d/$d/file deep-link
    truncate -s 3M holes; printf start | dd of=holes conv=notrunc status=none
    printf end | dd of=holes bs=1M seek=2 conv=notrunc status=none
    head -c 1500000 /dev/urandom > big; truncate -s 40M huge; echo far >> huge
    setfattr -n user.a -v value dir; setfattr -n user.b -v 0x00ff dir/sub/two
    setfattr -n trusted.t -v 0x000102ff dir/sub
    setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 long
    setfacl -m u:1234:r-x,m::rwx dir; setfacl -d -m g:77:rw- dir/sub
    chown 1234:4321 dir/sub/two; chmod 4751 long; chmod 1777 "sp ace"; chown 3000000:5 big
    touch -d '1961-02-03 04:05:06.789012345 UTC' dir/file; touch -d @-0.5 pipe
    touch -d '2200-01-01 00:00:00.000000001 UTC' big; touch -h -d '2001-01-01 UTC' out
    touch -d '1999-12-31 23:59:59.5 UTC' dir
"#;

/// Changes of all kinds in a mount over [`BASE`].
const CHANGES: &str = r#"
    echo more >> dir/sub/two; rm -r gone; mv "sp ace" moved; ln big big-twin
    rm out; mkdir out; echo in > out/in; rm -r dir/sub/link; echo file > dir/sub/link
    chmod 600 long; setfattr -x user.a dir; setfattr -n user.new -v 1 dir/file
    printf middle | dd of=holes bs=1M seek=1 conv=notrunc status=none
    rm pipe; mkfifo pipe2; mkdir fresh; touch -d @7.25 fresh
"#;

/// Returns the parts of a tree that an archive carries.
fn tree(root: &Path) -> Vec<String> {
    tree_with(root, "")
}

/// The same; with `seconds`, times are rounded to seconds.
fn tree_with(root: &Path, how: &str) -> Vec<String> {
    let mut command = Command::new("python3");
    let output = command.args(["-I", "-S", "-c", TREE]).arg(root).arg(how).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// A path outside of the mount, as text.
fn outside(live: &Live, name: &str) -> String {
    live.outside().join(name).display().to_string()
}

/// Runs a program, which must succeed.
fn run(words: &[&str]) -> String {
    let output = Command::new(words[0]).args(&words[1..]).current_dir("/").output();
    let output = output.unwrap_or_else(|error| panic!("{words:?}: {error}"));
    assert!(output.status.success(), "{words:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Unpacks an image, and returns the directory with its tree.
fn unpacked(image: &str, bundle: &str) -> PathBuf {
    run(&["umoci", "unpack", "--image", image, bundle]);
    Path::new(bundle).join("rootfs")
}
