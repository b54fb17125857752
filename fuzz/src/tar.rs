//! Fuzz target: archives, from the headers to the content.
//!
//! * No bytes make the reader panic, or give an entry more content than the archive has.
//! * An entry that was read is written to the same entry.
//!
//! A mutated header would nearly always have a wrong checksum. So the data is read as it is, and
//! once more with the right checksum in each block that looks like a header.

use jailfs::internals::tar::{Entry, Kind, Reader, Writer};

/// Where a header has its checksum.
const SUM: std::ops::Range<usize> = 148..156;
/// Entries with more content than this are not written again, in bytes.
const MOST: u64 = 1 << 20;

/// Reads `data` as an archive.
pub fn run(data: &[u8]) {
    read(data);
    let mut fixed = data.to_vec();
    for block in fixed.chunks_exact_mut(512) {
        if block[257..262] == *b"ustar" {
            block[SUM].fill(b' ');
            let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
            block[SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
    read(&fixed);
}

fn read(data: &[u8]) {
    let mut reader = Reader::new(data);
    let mut total = 0;
    while let Ok(Some(entry)) = reader.next_entry() {
        let mut buffer = [0; 1000];
        let mut got = 0;
        let is_whole = loop {
            match reader.data(&mut buffer) {
                Ok(0) => break true,
                Ok(len) => got += len as u64,
                Err(_) => break false,
            }
        };
        total += got;
        assert!(total <= data.len() as u64, "more content than the archive has");
        if is_whole {
            assert_eq!(got, entry.stored(), "all content of an entry");
            write(&entry);
        }
    }
}

/// Writes an entry with zeros for content, and reads it again.
fn write(entry: &Entry) {
    if entry.stored() > MOST {
        return;
    }
    let mut writer = Writer::new(Vec::new());
    writer.entry(entry).expect("memory can be written");
    writer.data(&vec![0; entry.stored() as usize]).expect("memory can be written");
    let archive = writer.finish().expect("memory can be written");
    let mut reader = Reader::new(&archive[..]);
    let again = reader.next_entry().expect("a written archive is good");
    let again = again.expect("the entry");
    assert!(can_differ(entry) || again == *entry, "{again:?} is not {entry:?}");
    assert!(reader.next_entry().expect("a written archive is good").is_none());
}

/// Whether a header cannot say all of the entry: an empty name, a NUL in a short one, or a name
/// that makes a file a directory.
fn can_differ(entry: &Entry) -> bool {
    let target = match &entry.kind {
        Kind::Link { target } | Kind::Symlink { target } => target.as_slice(),
        _ => b"x",
    };
    let odd = |name: &[u8]| name.is_empty() || name.contains(&0);
    let large = match entry.kind {
        Kind::Char { major, minor } | Kind::Block { major, minor } => {
            major > 0o7777777 || minor > 0o7777777
        }
        _ => false,
    };
    let is_file = matches!(entry.kind, Kind::File { .. });
    odd(&entry.path) || odd(target) || large || (is_file && entry.path.ends_with(b"/"))
}
