//! Files without a name: O_TMPFILE of open(2), and linkat(2), which gives them one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::linkat;

use crate::both::{Side, same, same_also_with_writeback};
use crate::harness::Live;

fn nameless(dir: &Path, flags: i32, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE | flags).mode(mode).open(dir)
}

fn give_name(file: &File, path: &Path) -> io::Result<()> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(AT_FDCWD, &*link, AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)?)
}

fn content(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Notes what stat(2) and read(2) say of an open file.
fn note(side: &mut Side, what: &str, file: &File) {
    let about = file.metadata().unwrap();
    side.note(what, (about.nlink(), about.mode(), about.size()));
    let bytes = content(file);
    let sum = bytes.iter().fold(0_u64, |sum, byte| sum.wrapping_mul(31) + u64::from(*byte));
    side.note(what, (bytes.len(), sum));
}

#[test]
fn a_file_without_a_name_is_used_and_gets_names_as_on_the_host() {
    same_also_with_writeback(
        |dir| fs::create_dir(dir.join("base")).unwrap(),
        |side| {
            fs::create_dir(side.at("new")).unwrap();
            for dir in ["", "base", "new"] {
                let mut file = nameless(&side.at(dir), 0, 0o640).unwrap();
                side.note("names", fs::read_dir(side.at(dir)).unwrap().count());
                file.write_all(&b"0123456789".repeat(300_000)).unwrap();
                file.write_all_at(b"behind a hole", 8 << 20).unwrap();
                note(side, "without a name", &file);
                file.set_len(2_500_001).unwrap();
                file.write_all_at(b"xyz", 1_000_000).unwrap();
                note(side, "shorter", &file);
                let path = side.at(dir).join("name");
                side.tried("name", give_name(&file, &path));
                note(side, "named", &file);
                note(side, "by name", &File::open(&path).unwrap());
                file.write_all_at(b"written by the descriptor", 2_000_000).unwrap();
                fs::hard_link(&path, side.at(dir).join("other")).unwrap();
                note(side, "twice", &File::open(side.at(dir).join("other")).unwrap());
                side.tried("a name that exists", give_name(&file, &path));
                fs::remove_file(&path).unwrap();
                fs::remove_file(side.at(dir).join("other")).unwrap();
                note(side, "without names again", &file);
                side.tried("once more", give_name(&file, &path));
            }
            side.sh("find . | sort");
        },
    );
}

#[test]
fn with_o_excl_a_file_never_gets_a_name() {
    same(
        |_| (),
        |side| {
            let file = nameless(&side.at(""), libc::O_EXCL, 0o600).unwrap();
            side.tried("name", give_name(&file, &side.at("name")));
            side.tried("in a file", nameless(Path::new("/dev/null"), 0, 0o600).map(drop));
            side.tried("nowhere", nameless(&side.at("nothing"), 0, 0o600).map(drop));
        },
    );
}

#[test]
fn a_file_without_a_name_takes_group_acl_and_umask_as_one_with_a_name() {
    same(
        |_| (),
        |side| {
            side.sh(
                "mkdir setgid acl closed; chgrp 1234 setgid; chmod 2777 setgid; chmod 755 closed
                 setfacl -d -m u:1000:r,g::rx,o::- acl",
            );
            for dir in ["setgid", "acl"] {
                let file = nameless(&side.at(dir), 0, 0o666).unwrap();
                let about = file.metadata().unwrap();
                side.note(dir, (about.mode(), about.uid(), about.gid()));
                give_name(&file, &side.at(dir).join("name")).unwrap();
                side.sh(&format!("getfacl -n {dir}/name; stat -c '%a %u %g %h' {dir}/name"));
            }
            let open = "import os\nos.open(\"closed\", os.O_TMPFILE | os.O_RDWR)";
            side.as_user(1000, &format!("python3 -c '{open}' 2>&1 | tail -1"));
        },
    );
}

/// The name is in the journal together with the content.
#[test]
fn a_file_that_got_a_name_survives_a_kill_and_one_without_a_name_is_in_no_state() {
    let mut live = Live::new("mkdir dir");
    let dir = live.mnt.join("dir");
    let named = nameless(&dir, 0, 0o644).unwrap();
    let never = nameless(&dir, 0, 0o644).unwrap();
    named.write_all_at(&[7; 100_000], 0).unwrap();
    never.write_all_at(&[8; 100_000], 0).unwrap();
    live.checkpoint("before");
    give_name(&named, &dir.join("name")).unwrap();
    named.write_all_at(b"more", 100_000).unwrap();
    named.sync_all().unwrap();
    live.checkpoint("after");
    live.restore("before");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    assert_eq!(named.metadata().unwrap().nlink(), 0, "the restore took its name");
    let refused = give_name(&named, &dir.join("again")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::ENOENT as i32));
    assert_eq!(content(&never), [8; 100_000], "no restore concerns it");
    give_name(&never, &dir.join("late")).unwrap();
    live.restore("after");
    let wanted = [&[7; 100_000][..], b"more"].concat();
    assert_eq!(fs::read(dir.join("name")).unwrap(), wanted);
    assert!(!dir.join("late").exists());
    drop((named, never));
    live.kill_and_mount();
    assert_eq!(fs::read(dir.join("name")).unwrap(), wanted);
    let checked = live.jailfs(&["check", "--read-data"]);
    assert!(checked.starts_with("checked"), "{checked}");
}
