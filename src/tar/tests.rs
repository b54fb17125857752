//! Tests of the format on its own.

use super::{Entry, Kind, Reader, Writer, pax};
use crate::types::{ByteRange, Timestamp};

fn entry(path: &[u8], kind: Kind) -> Entry {
    let mtime = Timestamp { secs: 7, nanos: 0 };
    Entry { path: path.to_vec(), kind, mode: 0o640, uid: 1, gid: 2, mtime, xattrs: [].into() }
}

fn written(entries: &[Entry]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for entry in entries {
        writer.entry(entry).unwrap();
        writer.data(&vec![b'x'; usize::try_from(entry.stored()).unwrap()]).unwrap();
    }
    writer.finish().unwrap()
}

fn read(archive: &[u8]) -> Vec<Entry> {
    let mut reader = Reader::new(archive);
    std::iter::from_fn(|| reader.next_entry().unwrap()).collect()
}

#[test]
fn entries_are_read_as_they_were_written() {
    let ranges = vec![ByteRange::at(4096, 600), ByteRange::at(9 << 30, 1)];
    let mut all = vec![
        entry(b"./", Kind::Dir),
        entry(&[b'd'; 100], Kind::Fifo),
        entry(&[b'\xff'; 101], Kind::Symlink { target: vec![b'\xfe'; 300] }),
        entry(b"hard", Kind::Link { target: b"to".to_vec() }),
        entry(b"char", Kind::Char { major: 10, minor: 200 }),
        entry(b"block", Kind::Block { major: 7, minor: 1 << 19 }),
        entry(b"file", Kind::File { size: 513, data: None }),
        entry(b"sparse", Kind::File { size: 10 << 30, data: Some(ranges) }),
        entry(b"hole", Kind::File { size: 5 << 20, data: Some(Vec::new()) }),
    ];
    all[6].uid = u32::MAX;
    all[6].xattrs.insert(b"user.a=b%3D".to_vec(), b"a\n\0=".to_vec());
    all[6].xattrs.insert(b"user.empty".to_vec(), Vec::new());
    for (at, (secs, nanos)) in [(-1, 1), (-5, 0), (1 << 40, 999_999_999)].into_iter().enumerate() {
        all[at].mtime = Timestamp { secs, nanos };
    }
    let archive = written(&all);
    assert_eq!(archive.len() % 512, 0);
    assert_eq!(read(&archive), all);
    for cut in (0..archive.len() - 1024).step_by(100) {
        let mut reader = Reader::new(&archive[..cut]);
        let error = std::iter::from_fn(|| reader.next_entry().transpose()).find_map(Result::err);
        assert!(error.is_some(), "cut at {cut}");
    }
}

#[test]
fn a_file_beyond_8_gib_has_its_size_in_a_record() {
    let big = entry(b"big", Kind::File { size: 9 << 30, data: None });
    let mut writer = Writer::new(Vec::new());
    writer.entry(&big).unwrap();
    assert!(writer.data(&[0; 10]).is_ok());
    assert!(writer.finish().is_err(), "its bytes are missing");
    let mut writer = Writer::new(Vec::new());
    writer.entry(&entry(b"small", Kind::File { size: 1, data: None })).unwrap();
    assert!(writer.data(&[0; 2]).is_err(), "more bytes than it has");
}

#[test]
fn a_time_is_decimal_with_a_fraction_also_before_1970() {
    for (secs, nanos, text) in [
        (0, 0, "0"),
        (5, 500_000_000, "5.5"),
        (-1, 500_000_000, "-0.5"),
        (-2, 750_000_000, "-1.25"),
        (-3, 0, "-3"),
        (1, 1, "1.000000001"),
    ] {
        let time = Timestamp { secs, nanos };
        assert_eq!(pax::time_text(time), text);
        assert_eq!(pax::time(text.as_bytes()), Some(time), "{text}");
    }
    assert_eq!(pax::time(b"1.0000000019"), Some(Timestamp { secs: 1, nanos: 1 }));
    for bad in ["", "-", ".5", "1e3", "+1", "1.-5", "99999999999999999999", "1.\u{e4}"] {
        assert_eq!(pax::time(bad.as_bytes()), None, "{bad}");
    }
}

#[test]
fn the_length_of_a_record_counts_its_own_digits() {
    for len in (0..200).chain(980..1010) {
        let mut bytes = Vec::new();
        pax::push(&mut bytes, b"key", &vec![b'v'; len]);
        let ((key, value), rest) = pax::take(&bytes).unwrap();
        assert_eq!((key, value.len(), rest.len()), (&b"key"[..], len, 0));
    }
    for bad in ["", "5", "3 a=b\n", "9999 a=b\n", "6 ab\n\n", "-1 a=b\n", "x a=b\n", "6 a=bc"] {
        assert!(pax::take(bad.as_bytes()).is_none(), "{bad:?}");
    }
}
