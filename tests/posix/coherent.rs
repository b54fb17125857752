//! Coherence: a reader sees the writes of all other processes, whenever the file was opened.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::both::same_also_with_writeback;

fn content(file: &mut File) -> String {
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

/// overlayfs copies the file up at the first write, and an older descriptor goes on reading the
/// lower file.
#[test]
fn a_descriptor_opened_for_reading_sees_later_writes_of_others() {
    let lines = same_also_with_writeback(
        |dir| fs::write(dir.join("file"), "of the base").unwrap(),
        |side| {
            let mut first = File::open(side.at("file")).unwrap();
            let before = content(&mut first);
            side.note("before", before);
            let mut second = OpenOptions::new().write(true).open(side.at("file")).unwrap();
            second.write_all(b"OF").unwrap();
            let seen = content(&mut first);
            side.note("after a write", seen);
            let appended = OpenOptions::new()
                .append(true)
                .open(side.at("file"))
                .unwrap()
                .write_all(b" and more");
            side.tried("append", appended);
            let seen = content(&mut first);
            side.note("after an append", seen);
            second.set_len(4).unwrap();
            let seen = content(&mut first);
            side.note("after it was cut", seen);
            fs::rename(side.at("file"), side.at("elsewhere")).unwrap();
            fs::write(side.at("elsewhere"), "written under another name").unwrap();
            let seen = content(&mut first);
            side.note("after a rename", seen);
            let (a, b) = (first.metadata().unwrap(), second.metadata().unwrap());
            side.note("one inode", (a.ino() == b.ino(), a.dev() == b.dev(), a.len(), a.nlink()));
            fs::remove_file(side.at("elsewhere")).unwrap();
            second.write_all_at(b"WRITTEN", 0).unwrap();
            let seen = content(&mut first);
            side.note("after it was removed", seen);
            side.note("names", first.metadata().unwrap().nlink());
        },
    );
    assert!(lines.contains(&r#"after a write: "OF the base""#.to_string()), "{lines:?}");
}

#[test]
fn all_hard_links_of_a_file_show_the_same_content() {
    same_also_with_writeback(
        |dir| {
            fs::create_dir(dir.join("d")).unwrap();
            fs::write(dir.join("a"), "one").unwrap();
            fs::hard_link(dir.join("a"), dir.join("d/b")).unwrap();
        },
        |side| {
            let mut through_a = File::open(side.at("a")).unwrap();
            fs::write(side.at("d/b"), "two, longer").unwrap();
            let seen = content(&mut through_a);
            side.note("through a", seen);
            fs::hard_link(side.at("d/b"), side.at("c")).unwrap();
            fs::remove_file(side.at("a")).unwrap();
            fs::write(side.at("c"), "three").unwrap();
            let seen = content(&mut through_a);
            side.note("through a that has another name now", seen);
            side.note("by the last name of the base", fs::read_to_string(side.at("d/b")).unwrap());
            let (b, c) =
                (fs::metadata(side.at("d/b")).unwrap(), fs::metadata(side.at("c")).unwrap());
            side.note("one", (b.ino() == c.ino(), b.nlink(), c.nlink()));
        },
    );
}
