//! Stores of every format must open for ever: `tests/fixtures/format-N.tar.gz` holds one with its
//! base, and `format-N.txt` the content of each of its states.
//!
//! Wherever it is unpacked, the base is a copy, with other inode numbers and change times. So no
//! file that was copied up has bytes in the base: all content is in the store, or in base files
//! that were not copied up.
//!
//! Until the last format is released, `cargo test --test fixture -- --ignored --exact
//! make_the_fixture_anew` creates its fixture again; afterwards never again.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;

use std::path::{Path, PathBuf};

use harness::{Live, shell};
use jailfs::sandbox::{Sandbox, StoreOptions};

/// The released formats. The last is the one that this program writes.
const FORMATS: [u32; 1] = [1];
/// Enough checkpoints to be archived.
const MANY: u32 = 40;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Everything visible in a tree, except inode numbers and change times.
const LIST: &str = "LC_ALL=C; export LC_ALL
    find . -printf '%p %y %m %U %G %T@ %s %n %l\\n' | sort | cat -v
    find . -type f -print0 | sort -z | xargs -0 md5sum | cat -v
    getfattr -R -h -d -m '^user' . 2>/dev/null | cat -v";

/// The checkpoints of a mounted store of a format, and its present tree, as one text.
fn all_states(live: &Live) -> String {
    let mut all = format!("== @\n{}", live.sh(LIST));
    let archived = ["small-1", "small-20", "small-39"];
    for name in ["one", "two", "three", "four", "other@"].into_iter().chain(archived) {
        live.restore(name);
        all += &format!("== {name}\n{}", live.sh(LIST));
    }
    all
}

const FIRST: &str = r#"
    mkdir -p dir/deep "$(printf 'not \377 text')"; echo content > "$(printf 'not \377 text/f\200')"
    echo new > README
    seq 5000 > dir/big; ln dir/big dir/deep/link; ln -s ../README dir/symlink
    mkfifo -m 640 dir/fifo
    setfattr -n user.colour -v green dir/big; setfattr -n user.d -v x dir
    setfacl -m u:7:rx dir/deep; chmod 4711 README; chown 12:34 dir/big
    truncate -s 5M sparse; echo middle | dd of=sparse bs=1 seek=3000000 conv=notrunc status=none
    echo space > 'a name with  spaces'; touch -d '1969-12-31 23:59:58.123456789 UTC' old
    touch -d '2300-01-01 UTC' future
    mknod null c 1 3; for n in 1 2 3 4 5 6 7 8 9; do echo $n > dir/n$n; done
"#;
const SECOND: &str = "rm dir/n1 dir/n2; mv dir/deep moved; echo more >> dir/big; rm -r not*; \
    truncate -s 100 sparse; setfattr -x user.d dir";
const THIRD: &str =
    "echo branch > branch; rm dir/fifo; mkdir -p x/y/z; echo z > x/y/z/z; chmod 700 x";
const FOURTH: &str = "echo after > after-apply; rm branch; echo all > dir/n3; mkdir x/empty";
const LAST: &str = "echo unsealed > unsealed; mv unsealed renamed; rm 'a name with  spaces'";

/// Small changes, some of which are reverted later, so that layers have content that is shared,
/// replaced and removed.
fn small_checkpoints(live: &Live) {
    for n in 0..MANY {
        live.sh(&format!(
            "echo {n} > dir/counter; echo {n} >> dir/log; mkdir -p s; seq {n} 1000 > s/{}",
            n % 7
        ));
        live.checkpoint(&format!("small-{n}"));
    }
}

fn compact_store(store: &Path) {
    Sandbox::open(store).unwrap().compact().unwrap();
}

fn format_of(store: &Path) -> u32 {
    let text = std::fs::read_to_string(store.join("format")).unwrap();
    text.trim().rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
#[ignore = "writes the fixture; only for a format that is not released"]
fn make_the_fixture_anew() {
    let mut live = Live::new(
        "echo base > README; mkdir below; echo untouched > below/plain; \
         touch -d 2020-01-01 below/plain",
    );
    live.applied = true;
    live.sh(FIRST);
    live.checkpoint("one");
    live.sh(SECOND);
    live.jailfs(&["checkpoint", "two", "-m", "a message"]);
    live.umount();
    compact_store(&live.store);
    live.mount();
    live.restore("one");
    live.sh(THIRD);
    live.checkpoint("three");
    live.jailfs(&["hold", "two"]);
    live.jailfs(&["apply", "--privileges"]);
    live.sh(FOURTH);
    live.checkpoint("four");
    small_checkpoints(&live);
    live.jailfs(&["fork", "other", "--from", "two"]);
    live.umount();
    compact_store(&live.store);
    live.mount();
    live.sh(LAST);
    live.umount();
    let format = format_of(&live.store);
    assert_eq!(Some(&format), FORMATS.last());
    let script = format!(
        "rm -f store/control store/daemon.log store/lock store/reserve; mkdir kept; \
         cp -a store base kept
        tar --format=posix --sort=name --xattrs --acls -S -czf \
            {}/format-{format}.tar.gz -C kept store base",
        fixtures().display()
    );
    shell(live.outside(), &script);
    live.mount();
    std::fs::write(fixtures().join(format!("format-{format}.txt")), all_states(&live)).unwrap();
}

#[test]
fn a_store_of_each_format_opens() {
    FORMATS.into_iter().for_each(opens);
}

fn opens(format: u32) {
    let mut live = Live::new("");
    live.applied = true;
    live.umount();
    let archive = fixtures().join(format!("format-{format}.tar.gz"));
    let unpack = format!(
        "rm -r store base; tar --xattrs --acls -xzpf {}; chmod 700 store",
        archive.display()
    );
    shell(live.outside(), &unpack);
    assert_eq!(format_of(&live.store), format);
    let checked = Sandbox::check_store(&live.store, true).unwrap();
    assert!(checked.problems.is_empty(), "{:#?}", checked.problems);
    // The user must accept once that the copy stands for the base.
    let options = StoreOptions { other_base: true, ..StoreOptions::default() };
    drop(Sandbox::create_or_open(&live.base, &live.store, &options).unwrap());
    live.mount();
    let log = live.jailfs(&["log", "--all"]);
    for part in ["one", "two", "three", "four", "a message"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    let ops = live.jailfs(&["op", "log"]);
    assert!(ops.contains("apply") && ops.contains("restore"), "{ops}");
    let expected =
        std::fs::read_to_string(fixtures().join(format!("format-{format}.txt"))).unwrap();
    let found = all_states(&live);
    let differing = expected.lines().zip(found.lines()).find(|(a, b)| a != b);
    assert!(expected == found, "first difference: {differing:?}");
    // Work goes on: it is written to, compacted and collected.
    live.sh("echo go on > go-on");
    live.checkpoint("five");
    live.jailfs(&["release", "two"]);
    live.jailfs(&["gc", "--operations", "0"]);
    live.umount();
    compact_store(&live.store);
    let checked = Sandbox::check_store(&live.store, true).unwrap();
    assert!(checked.problems.is_empty(), "{:#?}", checked.problems);
    eprintln!(
        "{} states of format {format}",
        expected.lines().filter(|line| line.starts_with("== ")).count()
    );
}
