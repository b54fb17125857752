//! Reading directories while they change, and their link counts.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use jailfs::internals::fs::Caller;
use jailfs::types::{Name, NodeId};

use crate::both::same;
use crate::common::Bench;
use crate::space::Small;

/// A directory as readdir(3) reads it.
struct Reader(*mut libc::DIR);

impl Reader {
    fn open(dir: &Path) -> Reader {
        let path = CString::new(dir.as_os_str().as_bytes()).unwrap();
        // SAFETY: opendir(3) reads the path, which ends with NUL.
        let dir = unsafe { libc::opendir(path.as_ptr()) };
        assert!(!dir.is_null(), "{}", std::io::Error::last_os_error());
        Reader(dir)
    }

    fn next(&mut self) -> Option<String> {
        // SAFETY: readdir(3) of an open stream; its entry is valid until the next call, and its
        // name ends with NUL.
        let name = unsafe {
            let entry = libc::readdir(self.0);
            if entry.is_null() {
                return None;
            }
            CStr::from_ptr((*entry).d_name.as_ptr())
        };
        Some(name.to_str().unwrap().to_owned())
    }

    fn rest(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.next()).collect()
    }

    fn tell(&mut self) -> libc::c_long {
        // SAFETY: telldir(3) of an open stream.
        unsafe { libc::telldir(self.0) }
    }

    fn seek(&mut self, to: libc::c_long) {
        // SAFETY: seekdir(3) of an open stream, to where telldir(3) was.
        unsafe { libc::seekdir(self.0, to) }
    }

    fn rewind(&mut self) {
        // SAFETY: rewinddir(3) of an open stream.
        unsafe { libc::rewinddir(self.0) }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // SAFETY: closedir(3) of a stream that is not used again.
        unsafe { libc::closedir(self.0) };
    }
}

/// Names of the base, and as many that were made in the mount or the plain directory.
fn filled(dir: &Path, from: u32, to: u32) {
    for n in from..to {
        fs::write(dir.join(format!("name-{n:05}")), "").unwrap();
    }
}

fn names(from: u32, to: u32) -> Vec<String> {
    (from..to).map(|n| format!("name-{n:05}")).collect()
}

/// So many names that they do not fit into one buffer.
const MANY: u32 = 4000;

/// POSIX leaves open whether a name that is added or removed meanwhile is read. Every other name is
/// read exactly once.
#[test]
fn names_that_stay_are_read_once_while_others_come_and_go() {
    same(
        |dir| filled(dir, 0, MANY),
        |side| {
            filled(&side.at(""), MANY, 2 * MANY);
            let mut reader = Reader::open(&side.at(""));
            let mut seen: BTreeMap<String, u32> = BTreeMap::new();
            let mut n = 0;
            while let Some(name) = reader.next() {
                *seen.entry(name).or_default() += 1;
                n += 1;
                // Of every four names one is removed, and others are added before and after the
                // reader's position.
                if n % 4 == 0 && n < 6000 {
                    let gone = side.at(&format!("name-{:05}", (n * 7) % (2 * MANY) / 4 * 4));
                    drop(fs::remove_file(gone));
                    fs::write(side.at(&format!("new-{n}")), "").unwrap();
                }
            }
            let stay = names(0, 2 * MANY)
                .into_iter()
                .filter(|name| !name.ends_with(['0', '4', '8', '2', '6']));
            let once = stay.clone().filter(|name| seen.get(name) == Some(&1)).count();
            side.note("names that stay, and were read once", (stay.count(), once));
            side.note("read twice", seen.values().filter(|times| **times > 1).count());
            reader.rewind();
            let mut again = reader.rest();
            again.sort();
            let mut there: Vec<String> = vec![".".into(), "..".into()];
            there.extend(
                fs::read_dir(side.at(""))
                    .unwrap()
                    .map(|e| e.unwrap().file_name().into_string().unwrap()),
            );
            there.sort();
            side.note("after rewinddir all that is there", again == there);
        },
    );
}

#[test]
fn a_position_in_a_directory_stays_valid() {
    same(
        |dir| filled(dir, 0, MANY),
        |side| {
            let mut reader = Reader::open(&side.at(""));
            let mut places = Vec::new();
            loop {
                let place = reader.tell();
                let Some(name) = reader.next() else { break };
                places.push((place, name));
            }
            side.note("names", places.len());
            // Backwards, while names before and after are removed.
            let right = |reader: &mut Reader, at: usize| {
                reader.seek(places[at].0);
                reader.next().as_ref() == Some(&places[at].1)
            };
            side.note(
                "each place",
                (0..places.len()).rev().step_by(97).all(|at| right(&mut reader, at)),
            );
            for (_, name) in places.iter().step_by(2).filter(|(_, name)| name.starts_with("name")) {
                fs::remove_file(side.at(name)).unwrap();
            }
            filled(&side.at(""), MANY, MANY + 500);
            let kept: Vec<usize> =
                (0..places.len()).filter(|at| side.at(&places[*at].1).exists()).collect();
            side.note("kept", kept.len());
            // A reader continues after its last name, even if that name was removed meanwhile.
            let middle = kept[kept.len() / 2];
            reader.seek(places[middle].0);
            let rest = reader.rest();
            let wanted: Vec<&String> =
                kept.iter().filter(|at| **at >= middle).map(|at| &places[*at].1).collect();
            side.note("all that is behind", wanted.iter().all(|name| rest.contains(name)));
            let before: Vec<&String> =
                kept.iter().filter(|at| **at < middle).map(|at| &places[*at].1).collect();
            side.note("nothing from before", before.iter().any(|name| rest.contains(name)));
        },
    );
}

/// `rm -r` as many programs do it: each name is removed when it is read.
#[test]
fn a_directory_is_emptied_in_one_pass() {
    same(
        |dir| filled(dir, 0, MANY),
        |side| {
            filled(&side.at(""), MANY, 2 * MANY);
            let mut reader = Reader::open(&side.at(""));
            while let Some(name) = reader.next() {
                if name.starts_with("name") {
                    fs::remove_file(side.at(&name)).unwrap();
                }
            }
            side.tried("and then removed", fs::read_dir(side.at("")).map(Iterator::count));
        },
    );
}

/// A program that reads for ever costs no memory, and the kernel gets its answers.
#[test]
fn reading_a_gibibyte_of_names_does_not_grow_the_daemon() {
    let bench = Bench::over(|dir| filled(dir, 0, 20_000));
    let mut reader = Reader::open(&bench.at(""));
    let wanted = reader.rest().len();
    assert_eq!(wanted, 20_002);
    let resident = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let (memory, asked) = (resident(), bench.count("readdirplus"));
    let mut bytes = 0_u64;
    while bytes < 1 << 30 {
        reader.rewind();
        let mut count = 0;
        while reader.next().is_some() {
            // linux_dirent64 of a name of 10 bytes.
            bytes += 32;
            count += 1;
        }
        assert_eq!(count, wanted);
    }
    let asked = bench.count("readdirplus") - asked;
    assert!(asked < 1000, "the kernel answers from its cache: {asked}");
    assert!(resident() < memory + 64 * 1024, "{} KiB were {memory}", resident());
    fs::write(bench.at("name-new"), "").unwrap();
    reader.rewind();
    assert_eq!(reader.rest().len(), wanted + 1);
}

#[test]
fn a_buffer_of_a_gibibyte_gets_the_names_that_exist() {
    let bench = Bench::over(|dir| filled(dir, 0, 100));
    let dir = fs::File::open(bench.at("")).unwrap();
    let len = 1_usize << 30;
    // SAFETY: mmap(2) creates a new mapping, which is touched only as far as it is filled.
    let buffer = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0)
    };
    assert_ne!(buffer, libc::MAP_FAILED);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&dir);
    // SAFETY: getdents64(2) writes at most `len` bytes to a buffer of that length.
    let got = unsafe { libc::syscall(libc::SYS_getdents64, fd, buffer, len) };
    // SAFETY: munmap(2) of what was mapped above and is not used again.
    unsafe { libc::munmap(buffer, len) };
    assert!((3000..4000).contains(&got), "{got}");
}

#[test]
fn a_directory_has_two_links_and_one_for_each_subdirectory() {
    same(
        |dir| {
            fs::create_dir_all(dir.join("a/b/c")).unwrap();
            fs::create_dir_all(dir.join("a/d")).unwrap();
            fs::write(dir.join("a/file"), "").unwrap();
            fs::create_dir(dir.join("e")).unwrap();
        },
        |side| {
            for script in [
                "stat -c '%n %h' . a a/b a/b/c a/d e",
                "mkdir e/new a/x a/x/y; stat -c '%n %h' . a a/x e",
                "mv a/b e/moved; stat -c '%n %h' . a e e/moved",
                "rmdir a/d; stat -c '%n %h' a",
                "mv -T a/x e/new; stat -c '%n %h' a e e/new",
                "rm -r e/moved; ln -s nowhere e/link; touch e/file; stat -c '%n %h' e",
                "exec 3< e/new; rm -r e/new; stat -L -c %h /proc/self/fd/3",
            ] {
                side.sh(script);
            }
        },
    );
}

/// As on ext4: from 65,001 links on, a directory reports 1, which means "not counted".
#[test]
fn a_directory_may_have_any_number_of_subdirectories() {
    // On a tmpfs, where creating and removing so many is quick.
    let memory = Small::new("200m");
    let (base, store) = (memory.path().join("base"), memory.path().join("store"));
    fs::create_dir(&base).unwrap();
    (0..64_998).for_each(|n| fs::create_dir(base.join(format!("{n}"))).unwrap());
    let fs = crate::common::open_new(&base, &store, memory.path());
    let links = || fs.getattr(NodeId::ROOT).unwrap().meta.nlink;
    let make = |name: &str| {
        let name = Name::new(name.as_bytes()).unwrap();
        fs.mkdir(NodeId::ROOT, &name, 0o755, 0, Caller { uid: 0, gid: 0 }).unwrap();
    };
    assert_eq!(links(), 65_000);
    make("a");
    assert_eq!(links(), 1);
    make("b");
    assert_eq!(links(), 1);
    for name in ["a", "b", "17", "18", "19"] {
        fs.rmdir(NodeId::ROOT, &Name::new(name.as_bytes()).unwrap()).unwrap();
    }
    assert_eq!(links(), 1, "it stays so");
}
