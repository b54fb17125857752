//! Archives and layouts that want to do harm.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use jailfs::internals::tar::{Entry, Kind, Writer};
use jailfs::types::{ByteRange, Timestamp};

use super::harness::{Live, assert_same, shell};
use super::outside;

fn entry(path: &str, kind: Kind) -> Entry {
    Entry {
        path: path.as_bytes().to_vec(),
        kind,
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: Timestamp { secs: 1, nanos: 0 },
        xattrs: BTreeMap::new(),
    }
}

fn file(path: &str) -> Entry {
    entry(path, Kind::File { size: 0, data: None })
}

fn symlink(path: &str, target: &str) -> Entry {
    entry(path, Kind::Symlink { target: target.into() })
}

fn link(path: &str, target: &str) -> Entry {
    entry(path, Kind::Link { target: target.into() })
}

fn archive(entries: &[Entry]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for entry in entries {
        writer.entry(entry).unwrap();
        for _ in 0..entry.stored() {
            writer.data(b"x").unwrap();
        }
    }
    writer.finish().unwrap()
}

#[test]
fn hostile_archives_are_refused_by_the_name_of_the_entry_and_change_nothing() {
    let live = Live::new("mkdir dir; echo in > dir/file; ln -s /etc out; ln -s .. up");
    let target = live.outside().join("target");
    std::fs::write(&target, "safe").unwrap();
    let before = live.snapshot();
    let stores = || std::fs::read_dir(live.store.join("layers")).unwrap().count();
    live.checkpoint("before");
    let layers = stores();
    let outside_dir = live.outside().display().to_string();
    let long = "n".repeat(256);
    let huge = Kind::File { size: 1 << 60, data: Some(vec![ByteRange { start: 0, end: 1 }]) };
    let mut with_acl = file("acl");
    with_acl.xattrs.insert(b"system.posix_acl_access".to_vec(), b"\x07\0\0\0".to_vec());
    let cut = archive(&[file("whole"), file("cut")])[..1024].to_vec();
    let mut broken = archive(&[file("sum")]);
    broken[0] ^= 1;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (archive(&[file("../target")]), "'../target'"),
        (archive(&[file("dir/../../target")]), "'dir/../../target'"),
        (archive(&[file(&format!("{outside_dir}/target"))]), "is absolute"),
        (archive(&[symlink("l", &outside_dir), file("l/target")]), "'l' above it is not"),
        (archive(&[symlink("a", "."), symlink("a/b", "."), file("a/b/c")]), "'a/b'"),
        (archive(&[file("f"), file("f/g")]), "'f' above it is not a directory"),
        (archive(&[link("h", "../target")]), "'h'"),
        (archive(&[link("h", "/etc/passwd")]), "'h'"),
        (archive(&[link("h", "dir/file")]), "which is no file before it"),
        (archive(&[symlink("s", "/etc"), link("h", "s/passwd")]), "'h'"),
        (archive(&[link("h", "h")]), "'h'"),
        (archive(&[entry("d", Kind::Dir), link("h", "d")]), "'h'"),
        (archive(&[file("d/x"), link("d", "d/x")]), "which it replaces"),
        (archive(&[file(&long)]), "longer than 255 bytes"),
        (archive(&[file("red\u{1b}[31m/../x")]), "red\\u{1b}[31m"),
        (archive(&[entry("huge", huge)]), "'huge'"),
        (archive(&[entry("dev", Kind::Char { major: 1 << 20, minor: 1 })]), "'dev'"),
        (archive(&[with_acl]), "'acl'"),
        (archive(&[entry(".", Kind::Fifo)]), "the root is a directory"),
        (cut, "without its end mark"),
        (broken, "the checksum of its header"),
        (vec![0; 100], "end"),
    ];
    let path = outside(&live, "bad.tar");
    for (bytes, part) in cases {
        std::fs::write(&path, &bytes).unwrap();
        let output = live.try_jailfs(&["import", &path]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{part}: {said}");
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_same(&before, &live.snapshot(), "the tree");
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "safe");
    assert!(stores() <= layers + 2, "a refused import leaves no layer: {layers}, {}", stores());
    live.jailfs(&["check", "--read-data"]);
}

#[test]
fn the_last_of_several_entries_of_one_name_counts() {
    let live = Live::new("echo old > x");
    let path = outside(&live, "twice.tar");
    let entries = [
        file("x"),
        entry("x", Kind::Dir),
        file("x/in"),
        symlink("x", "in"),
        file("y"),
        link("z", "y"),
        link("z", "y"),
        file("y"),
        entry("x", Kind::Dir),
        link("x/y", "z"),
    ];
    std::fs::write(&path, archive(&entries)).unwrap();
    live.jailfs(&["import", &path]);
    assert_eq!(live.sh("find . | sort | tr '\\n' ' '"), ". ./x ./x/y ./y ./z ");
    assert_eq!(live.sh("stat -c %h x x/y y z | tr '\\n' ' '"), "2 2 1 2 ");
    live.jailfs(&["check"]);
}

#[test]
fn a_bomb_of_zeros_takes_no_space_and_little_memory() {
    let live = Live::new("echo a > a");
    let path = outside(&live, "bomb.tar.gz");
    shell(
        Path::new("/"),
        &format!(
            "python3 -I -c 'import tarfile,io,sys\n\
             t=tarfile.TarInfo(\"zeros\"); t.size=160<<20\n\
             sys.stdout.buffer.write(t.tobuf())\n\
             z=bytes(1<<20)\n\
             [sys.stdout.buffer.write(z) for n in range(160)]\n\
             sys.stdout.buffer.write(bytes(1024))' | gzip -1 > {path}"
        ),
    );
    live.jailfs(&["import", &path]);
    assert_eq!(live.sh("stat -c %s zeros"), format!("{}\n", 160u64 << 20));
    let kib: u64 = shell(&live.store, "du -sk . | cut -f1").trim().parse().unwrap();
    assert!(kib < 10_000, "{kib} KiB in the store");
    let status = std::fs::read_to_string(format!("/proc/{}/status", live.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 128 << 10, "the daemon took {peak} KiB");
}

#[test]
fn a_layout_with_a_wrong_or_cut_blob_is_refused_and_changes_nothing() {
    let live = Live::new("head -c 300000 /dev/urandom > big; echo a > a");
    let image = outside(&live, "image");
    live.jailfs(&["export", "@", "--oci", &format!("{image}:v1")]);
    live.sh("echo changed > a");
    let before = live.snapshot();
    let blobs = Path::new(&image).join("blobs/sha256");
    let names: Vec<_> = std::fs::read_dir(&blobs).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(names.len(), 3, "a layer, a configuration and a manifest");
    for blob in &names {
        let good = std::fs::read(blob).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 1;
        let cut = good[..good.len() - 1].to_vec();
        let longer = [&good[..], b" "].concat();
        for bad in [Some(flipped), Some(cut), Some(longer), None] {
            match &bad {
                Some(bytes) => std::fs::write(blob, bytes).unwrap(),
                None => std::fs::remove_file(blob).unwrap(),
            }
            let output = live.try_jailfs(&["import", &format!("{image}:v1")]);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{}: {said}", blob.display());
            std::fs::write(blob, &good).unwrap();
        }
    }
    for (from, to) in [
        ("sha256:", "sha256:../../../../../../etc/passwd#"),
        ("sha256:", "md5:"),
        ("manifest.v1", "index.v1"),
    ] {
        let index = std::fs::read_to_string(format!("{image}/index.json")).unwrap();
        std::fs::write(format!("{image}/index.json"), index.replace(from, to)).unwrap();
        let output = live.try_jailfs(&["import", &format!("{image}:v1")]);
        assert_eq!(output.status.code(), Some(1), "{to}");
        std::fs::write(format!("{image}/index.json"), index).unwrap();
    }
    assert_same(&before, &live.snapshot(), "the tree");
    live.jailfs(&["import", &format!("{image}:v1")]);
    assert_eq!(live.read("a"), "a\n");
}

#[test]
fn a_sender_that_is_killed_changes_nothing() {
    let live = Live::new("echo a > a");
    let before = live.snapshot();
    let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
    let command = command.arg("-C").arg(&live.mnt).args(["import", "-"]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&archive(&[file("b"), file("c")])[..1100]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The next operation waits for the end of that one.
    live.jailfs(&["checkpoint"]);
    assert_same(&before, &live.snapshot(), "the tree");
}
