use super::*;
use crate::sys::file::{Rename, pread_full};
use crate::sys::xattr;
use crate::types::{Fingerprint, PERM_BITS, Timestamp};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{UtimensatFlags, lstat, utimensat};
use nix::sys::time::TimeSpec;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const ALL: [Means; 4] = [
    Means { openat2: true, view: true },
    Means { openat2: true, view: false },
    Means { openat2: false, view: true },
    Means { openat2: false, view: false },
];

/// A directory with `base` in it, and `outside` beside it that nobody may reach through it.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::create_dir(dir.path().join("base")).unwrap();
        std::fs::create_dir(dir.path().join("outside")).unwrap();
        std::fs::write(dir.path().join("outside/f"), b"outside").unwrap();
        Place { dir }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("base").join(path)
    }

    fn file(&self, path: &str, bytes: &[u8]) -> &Place {
        std::fs::write(self.at(path), bytes).unwrap();
        self
    }

    fn dir(&self, path: &str) -> &Place {
        std::fs::create_dir_all(self.at(path)).unwrap();
        self
    }

    fn link(&self, path: &str, target: &str) -> &Place {
        symlink(target, self.at(path)).unwrap();
        self
    }

    fn outside(&self) -> String {
        self.dir.path().join("outside").to_str().unwrap().to_owned()
    }

    fn open(&self, means: Means) -> Base {
        let base = Base::open_with(&self.at(""), means).unwrap();
        assert_eq!(base.has_private_view(), means.view, "these tests run as root");
        base
    }

    /// Runs `test` on every way of reading the base.
    fn on_all(&self, test: impl Fn(&Base)) {
        for means in ALL {
            test(&self.open(means));
        }
    }
}

fn path(text: impl AsRef<[u8]>) -> TreePath {
    TreePath::parse(text.as_ref()).unwrap()
}

fn name(text: impl AsRef<[u8]>) -> Name {
    Name::new(text.as_ref()).unwrap()
}

fn read(base: &Base, at: impl AsRef<[u8]>) -> FsResult<Vec<u8>> {
    let file = base.open_file(&path(at))?;
    let mut bytes = vec![0; 4096];
    let filled = pread_full(&file, &mut bytes, 0)?;
    bytes.truncate(filled);
    Ok(bytes)
}

fn names(base: &Base, at: &str) -> FsResult<BTreeMap<Vec<u8>, Option<FileKind>>> {
    Ok(base.list(&path(at))?.into_iter().map(|e| (e.name.as_bytes().to_vec(), e.kind)).collect())
}

/// Holds what is said of the names of a directory at once against what is said of their paths. How many were said at once.
fn near_agrees(base: &Base, dir: &str) -> usize {
    let dir = path(dir);
    let near = base.near(&dir);
    let listed = base.list(&dir).unwrap_or_default().into_iter().map(|entry| entry.name);
    let mut at_once = 0;
    for name in listed.chain([name("none"), name("x".repeat(255)), name("f")]) {
        let expected = base.stat(&dir.join(&name));
        assert_eq!(near.stat(&name), expected, "{name:?}");
        if let Some(said) = near.at_once(&name) {
            assert_eq!(said, expected, "{name:?}");
            at_once += usize::from(said.is_ok());
        }
    }
    assert_eq!(near.stat_dir(), base.stat(&dir));
    at_once
}

#[test]
fn what_is_there_is_shown() {
    let place = Place::new();
    let long = "x".repeat(255);
    place.dir("d/e").file("d/e/f", b"bytes").link("l", "d/e/f").file(&long, b"long");
    let odd = OsStr::from_bytes(b"new\nline\xff");
    std::fs::write(place.at("").join(odd), b"odd").unwrap();
    nix::unistd::mkfifo(&place.at("p"), Mode::S_IRUSR).unwrap();
    place.on_all(|base| {
        let root = base.stat(&TreePath::root()).unwrap();
        assert_eq!((root.dev, root.ino), base.root_id());
        assert_eq!(
            base.path(),
            crate::sys::path::resolve(&place.at("")).unwrap().as_os_str().as_bytes()
        );
        let stat = base.stat(&path("d/e/f")).unwrap();
        let host = std::fs::metadata(place.at("d/e/f")).unwrap();
        assert_eq!((stat.dev, stat.ino, stat.mode), (host.dev(), host.ino(), host.mode()));
        assert_eq!((stat.kind, stat.size, stat.nlink, stat.foreign), (FileKind::File, 5, 1, false));
        assert_eq!(
            (stat.mtime.secs, i64::from(stat.mtime.nanos)),
            (host.mtime(), host.mtime_nsec())
        );
        assert_eq!(read(base, "d/e/f").unwrap(), b"bytes");
        assert_eq!(read(base, b"new\nline\xff").unwrap(), b"odd");
        assert_eq!(read(base, &long).unwrap(), b"long");
        assert_eq!(base.readlink(&path("l")).unwrap(), b"d/e/f");
        assert_eq!(base.stat(&path("l")).unwrap().kind, FileKind::Symlink);
        assert_eq!(base.stat(&path("p")).unwrap().kind, FileKind::Fifo);
        let listed = names(base, "").unwrap();
        assert_eq!(listed.len(), 5);
        assert_eq!(listed[&b"new\nline\xff"[..]], Some(FileKind::File));
        assert_eq!(listed[&b"l"[..]], Some(FileKind::Symlink));
        assert_eq!(listed[&b"d"[..]], Some(FileKind::Dir));
        assert_eq!(listed[&b"p"[..]], Some(FileKind::Fifo));
        assert_eq!(base.stat(&path("none")).unwrap_err(), FsError::NotFound);
        let near = ["", "d/e", "none", "l"].map(|dir| near_agrees(base, dir));
        // Each of the five and the long one once more, "f" twice, nothing, and a link is not followed. On an overlay files may be on other
        // devices than directories.
        let is_whole = base.answers_at_once && base.stat(&path("d/e/f")).unwrap().dev == root.dev;
        assert!(!is_whole || near == [6, 2, 0, 0], "{near:?}");
        assert_eq!(base.stat(&path("d/e/f/g")).unwrap_err(), FsError::NotFound);
        assert_eq!(base.list(&path("d/e/f")).unwrap_err(), FsError::NotADirectory);
        assert_eq!(base.open_file(&path("d")).unwrap_err(), FsError::IsADirectory);
        assert_eq!(base.readlink(&path("d")).unwrap_err(), FsError::Invalid);
        assert!(base.statvfs().unwrap().blocks() > 0);
    });
}

#[test]
fn no_link_is_followed() {
    let place = Place::new();
    let outside = place.outside();
    place
        .dir("d")
        .file("d/f", b"inside")
        .link("out", &outside)
        .link("up", "..")
        .link("up-out", "../outside")
        .link("root", "/")
        .link("magic", "/proc/self/root")
        .link("magic-cwd", "/proc/self/cwd")
        .link("in", "d")
        .link("file", "d/f")
        .link("file-out", &format!("{outside}/f"))
        .link("loop", "loop")
        .link("d/mid", "../out");
    nix::unistd::mkfifo(&place.at("fifo"), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let escape = outside.trim_start_matches('/');
    let beyond = [
        "out/f".to_owned(),
        "up/outside/f".to_owned(),
        "up-out/f".to_owned(),
        format!("root/{escape}/f"),
        format!("magic/{escape}/f"),
        "magic-cwd/Cargo.toml".to_owned(),
        "in/f".to_owned(),
        "loop/f".to_owned(),
        "d/mid/f".to_owned(),
        "fifo/f".to_owned(),
    ];
    let links = [
        "out",
        "up",
        "up-out",
        "root",
        "magic",
        "magic-cwd",
        "in",
        "file",
        "file-out",
        "loop",
        "d/mid",
    ];
    place.on_all(|base| {
        for at in &beyond {
            let at = path(at);
            assert_eq!(base.stat(&at).unwrap_err(), FsError::NotFound, "{at}");
            assert_eq!(base.list(&at).unwrap_err(), FsError::NotFound, "{at}");
            assert_eq!(base.open_file(&at).unwrap_err(), FsError::NotFound, "{at}");
            assert_eq!(base.readlink(&at).unwrap_err(), FsError::NotFound, "{at}");
            assert_eq!(base.xattrs(&at).unwrap_err(), FsError::NotFound, "{at}");
            let (parent, _) = at.split().unwrap();
            let expected =
                if parent == path("fifo") { FsError::NotADirectory } else { FsError::LeavesJail };
            assert_eq!(base.writer().dir(&parent).err(), Some(expected), "{parent}");
        }
        for at in links {
            let at = path(at);
            assert_eq!(base.stat(&at).unwrap().kind, FileKind::Symlink, "{at}");
            assert_eq!(base.list(&at).unwrap_err(), FsError::NotADirectory, "{at}");
            assert_eq!(base.open_file(&at).unwrap_err(), FsError::Invalid, "{at}");
            assert!(base.readlink(&at).is_ok(), "{at}");
        }
        let begun = Instant::now();
        assert_eq!(base.open_file(&path("fifo")).unwrap_err(), FsError::Invalid);
        assert!(begun.elapsed() < Duration::from_secs(1), "a fifo does not block");
    });
}

#[test]
fn the_two_ways_agree_on_every_errno() {
    let place = Place::new();
    place.dir("d").file("d/f", b"").link("d/l", "f").link("l", "d");
    let root = Root::new(open_directory(&place.at("")).unwrap());
    let cases = ["", "d", "d/f", "d/l", "l", "l/f", "d/f/x", "d/none", "none/x", "d/l/x"];
    let modes = [
        O_PATH,
        O_PATH | OFlag::O_DIRECTORY,
        OFlag::O_RDONLY,
        OFlag::O_RDONLY | OFlag::O_DIRECTORY,
        OFlag::O_RDWR,
    ];
    for at in cases {
        for flags in modes {
            let [call, walk] = [true, false].map(|openat2| {
                let resolver = Resolver::new(openat2);
                resolver
                    .open(&root, at.as_bytes(), flags)
                    .map(|fd| nix::sys::stat::fstat(fd).unwrap().st_ino)
            });
            let same = match (call, walk) {
                // A link that must be a directory: both are refused, the kernel does not say which comes first.
                (Err(Errno::ENOTDIR | Errno::ELOOP), Err(Errno::ENOTDIR | Errno::ELOOP)) => true,
                (call, walk) => call == walk,
            };
            assert!(same, "{at:?} {flags:?}: {call:?} {walk:?}");
        }
    }
}

#[test]
fn a_refused_openat2_is_replaced_by_the_walk() {
    let place = Place::new();
    place.dir("d").file("d/f", b"bytes").link("l", &place.outside());
    for errno in [Errno::ENOSYS, Errno::EPERM] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let early = place.open(ALL[0]);
                assert_eq!(read(&early, "d/f").unwrap(), b"bytes");
                crate::sys::testing::refuse_call(libc::SYS_openat2, errno);
                for base in [early, place.open(ALL[0])] {
                    // A fresh resolver whose first call opens rather than looks.
                    let fresh = Resolver::new(true);
                    assert!(fresh.open(&base.plain, b"d/f", OFlag::O_RDONLY).is_ok());
                    assert_eq!(read(&base, "d/f").unwrap(), b"bytes");
                    assert_eq!(names(&base, "d").unwrap().len(), 1);
                    assert_eq!(base.stat(&path("l/f")).unwrap_err(), FsError::NotFound);
                    assert_eq!(base.writer().dir(&path("l")).err(), Some(FsError::LeavesJail));
                }
            });
        });
    }
}

#[test]
fn a_base_is_for_all_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Base>();
    shared::<WriteDir<'_>>();
}

#[test]
fn a_walk_takes_no_dots() {
    let place = Place::new();
    let root = Root::new(open_directory(&place.at("")).unwrap());
    for openat2 in [true, false] {
        let resolver = Resolver::new(openat2);
        assert!(resolver.open(&root, b"..", O_PATH).is_err());
        assert!(resolver.open(&root, b"../outside", O_PATH).is_err());
        assert!(resolver.open(&root, b"/etc", O_PATH).is_err());
    }
}

/// Swaps `a` and `b` in the base until dropped.
struct Swapper {
    stop: Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Swapper {
    fn start(a: PathBuf, b: PathBuf) -> Swapper {
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut swaps = 0;
            while !seen.load(std::sync::atomic::Ordering::Relaxed) {
                renameat2(AT_FDCWD, &a, AT_FDCWD, &b, RenameFlags::RENAME_EXCHANGE).unwrap();
                swaps += 1;
            }
            swaps
        });
        Swapper { stop, thread: Some(thread) }
    }

    fn swaps(mut self) -> u64 {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn a_swapped_directory_never_shows_what_is_outside() {
    let place = Place::new();
    place.dir("d").file("d/f", b"inside").link("l", &place.outside());
    place.on_all(|base| {
        let swapper = Swapper::start(place.at("d"), place.at("l"));
        let (mut inside, mut refused) = (0, 0);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(500) {
            match read(base, "d/f") {
                Ok(bytes) => {
                    assert_eq!(bytes, b"inside");
                    inside += 1;
                }
                Err(error) => {
                    assert_eq!(error, FsError::NotFound);
                    refused += 1;
                }
            }
            match base.list(&path("d")) {
                Ok(entries) => assert_eq!(entries[0].name, name("f")),
                Err(error) => {
                    assert!(matches!(error, FsError::NotADirectory | FsError::NotFound), "{error}")
                }
            }
        }
        assert!(swapper.swaps() > 100 && inside > 0 && refused > 0, "{inside} {refused}");
    });
}

#[test]
fn a_swapped_directory_is_never_written_through() {
    let place = Place::new();
    place.dir("d/e").link("l", &place.outside());
    std::fs::create_dir(place.dir.path().join("outside/e")).unwrap();
    place.on_all(|base| {
        let swapper = Swapper::start(place.at("d"), place.at("l"));
        let begun = Instant::now();
        let mut written = 0;
        while begun.elapsed() < Duration::from_millis(300) {
            match base.writer().dir(&path("d/e")) {
                Ok(dir) => {
                    let temp = WriteDir::stage_name().unwrap();
                    dir.create_file(&temp).unwrap();
                    dir.unlink(&temp).unwrap();
                    dir.mkdir(&name("made"), 0o700).unwrap();
                    dir.rmdir(&name("made")).unwrap();
                    written += 1;
                }
                Err(error) => {
                    assert!(
                        matches!(error, FsError::LeavesJail | FsError::NotADirectory),
                        "{error}"
                    );
                }
            }
            assert_eq!(std::fs::read_dir(place.dir.path().join("outside/e")).unwrap().count(), 0);
        }
        assert!(swapper.swaps() > 100 && written > 0);
    });
}

#[test]
fn a_directory_that_becomes_a_link_stays_the_directory() {
    let place = Place::new();
    place.dir("d").link("l", &place.outside());
    place.on_all(|base| {
        let dir = base.writer().dir(&path("d")).unwrap();
        renameat2(AT_FDCWD, &place.at("d"), AT_FDCWD, &place.at("l"), RenameFlags::RENAME_EXCHANGE)
            .unwrap();
        let temp = WriteDir::stage_name().unwrap();
        dir.create_file(&temp).unwrap();
        assert!(place.at("l").join(temp.as_os_str()).exists());
        assert!(!Path::new(&place.outside()).join(temp.as_os_str()).exists());
        dir.unlink(&temp).unwrap();
        assert_eq!(base.writer().dir(&path("d")).err(), Some(FsError::LeavesJail));
        renameat2(AT_FDCWD, &place.at("d"), AT_FDCWD, &place.at("l"), RenameFlags::RENAME_EXCHANGE)
            .unwrap();
    });
}

#[test]
fn a_path_longer_than_one_call_takes_is_found() {
    let place = Place::new();
    let part = "p".repeat(200);
    let mut deep = TreePath::root();
    let mut dir = open_directory(&place.at("")).unwrap();
    for _ in 0..45 {
        nix::sys::stat::mkdirat(&dir, part.as_str(), Mode::S_IRWXU).unwrap();
        dir = nix::fcntl::openat(&dir, part.as_str(), OFlag::O_PATH, Mode::empty()).unwrap();
        deep = deep.join(&name(&part));
    }
    nix::unistd::symlinkat("text", &dir, "l").unwrap();
    let deep = deep.join(&name("l"));
    assert!(deep.as_bytes().len() > 8192);
    place.on_all(|base| assert_eq!(base.readlink(&deep).unwrap(), b"text"));
}

/// What of the times of the host changes when somebody reads or writes.
fn times(at: &Path) -> [(i64, i64); 3] {
    let stat = lstat(at).unwrap();
    [
        (stat.st_atime, stat.st_atime_nsec),
        (stat.st_mtime, stat.st_mtime_nsec),
        (stat.st_ctime, stat.st_ctime_nsec),
    ]
}

#[test]
fn reading_leaves_no_trace() {
    for means in ALL {
        let place = Place::new();
        place.dir("d").file("d/f", b"bytes").link("l", "d");
        let all = ["", "d", "d/f", "l"];
        let old = TimeSpec::new(1000, 0);
        for at in all {
            let at = place.at(at);
            let at = if at.ends_with("base/") { at.parent().unwrap().join("base") } else { at };
            utimensat(AT_FDCWD, &at, &old, &old, UtimensatFlags::NoFollowSymlink).unwrap();
        }
        let before = all.map(|at| times(&place.at(at)));
        let base = place.open(means);
        for at in all.map(path) {
            base.stat(&at).unwrap();
            base.xattrs(&at).unwrap();
        }
        assert_eq!(base.list(&path("")).unwrap().len() + base.list(&path("d")).unwrap().len(), 3);
        assert_eq!(read(&base, "d/f").unwrap(), b"bytes");
        if means.view {
            // Without the view, the kernel notes that the link was read and cannot be told not to.
            assert_eq!(base.readlink(&path("l")).unwrap(), b"d");
        }
        assert_eq!(all.map(|at| times(&place.at(at))), before, "{means:?}");
    }
}

#[test]
fn nothing_can_be_written_through_the_view() {
    let place = Place::new();
    place.file("f", b"bytes");
    let base = place.open(ALL[0]);
    let view = base.view.as_ref().unwrap();
    for flags in [OFlag::O_RDWR, OFlag::O_WRONLY | OFlag::O_TRUNC] {
        assert_eq!(base.resolver.open(view, b"f", flags).unwrap_err(), Errno::EROFS);
    }
    let object = base.resolver.open(view, b"f", O_PATH).unwrap();
    assert_eq!(xattr::set(&object, b"user.x", b"").unwrap_err().raw_os_error(), Some(libc::EROFS));
}

#[test]
fn a_fingerprint_tells_a_change() {
    let place = Place::new();
    place.file("f", b"12345");
    place.on_all(|base| {
        let before = base.stat(&path("f")).unwrap().fingerprint();
        assert_eq!(Fingerprint::of(&base.open_file(&path("f")).unwrap()).unwrap(), before);
        assert_eq!(base.stat(&path("f")).unwrap().fingerprint(), before);
        std::thread::sleep(Duration::from_millis(20));
        place.file("f", b"54321");
        let old = TimeSpec::new(before.mtime.secs, before.mtime.nanos.into());
        utimensat(AT_FDCWD, &place.at("f"), &old, &old, UtimensatFlags::NoFollowSymlink).unwrap();
        let after = base.stat(&path("f")).unwrap().fingerprint();
        assert_eq!((after.size, after.mtime), (before.size, before.mtime));
        assert_ne!(after, before, "the change time cannot be set back");
    });
}

/// An ACL: owner rw-, user 1000 r--, group r--, mask r--, others ---.
const ACL: &[u8] = b"\x02\0\0\0\
    \x01\0\x06\0\xff\xff\xff\xff\
    \x02\0\x04\0\xe8\x03\0\0\
    \x04\0\x04\0\xff\xff\xff\xff\
    \x10\0\x04\0\xff\xff\xff\xff\
    \x20\0\0\0\xff\xff\xff\xff";
/// A capability: cap_net_raw, permitted and effective, version 2.
const CAP: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

fn pairs(list: &[(&[u8], &[u8])]) -> Vec<(Vec<u8>, Vec<u8>)> {
    list.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect()
}

fn host_object(at: &Path) -> OwnedFd {
    open(at, OFlag::O_PATH | OFlag::O_NOFOLLOW, Mode::empty()).unwrap()
}

#[test]
fn extended_attributes_are_shown_sorted_and_of_the_link_itself() {
    let place = Place::new();
    place.dir("d").file("f", b"").link("l", "f").file("plain", b"");
    let file = host_object(&place.at("f"));
    let all = pairs(&[
        (b"security.capability", CAP),
        (b"system.posix_acl_access", ACL),
        (b"trusted.t", b"\0"),
        (b"user.\xff", b""),
        (b"user.a", &[7; 1000]),
    ]);
    for (key, value) in all.iter().rev() {
        xattr::set(&file, key, value).unwrap();
    }
    let mut all = all;
    all.sort();
    xattr::set(host_object(&place.at("l")), b"trusted.link", b"1").unwrap();
    xattr::set(host_object(&place.at("d")), b"system.posix_acl_default", ACL).unwrap();
    place.on_all(|base| {
        assert_eq!(base.xattrs(&path("f")).unwrap(), all);
        assert_eq!(base.xattrs(&path("l")).unwrap(), pairs(&[(b"trusted.link", b"1")]));
        assert_eq!(base.xattrs(&path("d")).unwrap(), pairs(&[(b"system.posix_acl_default", ACL)]));
        assert!(base.xattrs(&path("plain")).unwrap().is_empty());
    });
}

#[test]
fn what_may_not_be_read_is_access_denied() {
    let place = Place::new();
    place.dir("closed/d").file("closed/f", b"").file("f", b"");
    for at in ["closed", "f"] {
        std::fs::set_permissions(place.at(at), PermissionsExt::from_mode(0o000)).unwrap();
    }
    for means in [ALL[1], ALL[3]] {
        let base = place.open(means);
        let error = |result: FsResult<()>| assert_eq!(result, Err(FsError::AccessDenied));
        // The identity by which the kernel judges file access is per thread, and takes the capabilities with it.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                nix::unistd::setfsuid(65534.into());
                error(base.open_file(&path("f")).map(drop));
                error(base.list(&path("closed")).map(drop));
                error(base.stat(&path("closed/f")).map(drop));
                assert!(base.stat(&path("closed")).is_ok() && base.stat(&path("f")).is_ok());
                error(base.writer().dir(&path("closed")).map(drop));
                let refused = Base::open(&place.at("closed")).unwrap_err();
                assert!(refused.hint.is_some() && refused.errno == Some(libc::EACCES), "{refused}");
                // Not the owner, so without O_NOATIME; it works all the same.
                assert!(base.list(&path("")).is_ok());
            });
        });
    }
}

#[test]
fn a_base_that_is_none_is_said() {
    let place = Place::new();
    place.file("f", b"").dir("d").link("l", "d");
    for (at, errno) in [("none", libc::ENOENT), ("f", libc::ENOTDIR)] {
        let error = Base::open(&place.at(at)).unwrap_err();
        assert_eq!(error.errno, Some(errno));
        assert!(error.hint.is_some() && error.attempt.contains(at), "{error}");
    }
    let by_link = Base::open(&place.at("l")).unwrap();
    assert!(by_link.path().ends_with(b"/base/d"), "a link that a person typed is followed");
}

/// Runs `test` in a thread with a mount namespace of its own.
fn in_private_mounts(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
            .unwrap();
        test();
    });
    thread.join().unwrap();
}

#[test]
fn a_mount_inside_the_base_is_an_empty_directory() {
    in_private_mounts(|| {
        let place = Place::new();
        place
            .dir("tmp/under")
            .dir("bind")
            .file("bound", b"base")
            .file("outer", b"outer")
            .dir("d")
            .file("d/f", b"");
        let under =
            ["tmp", "bind", "bound"].map(|at| std::fs::metadata(place.at(at)).unwrap().ino());
        let attach = |from: &Path, to: &str, kind: &str, flags| {
            mount(Some(from), &place.at(to), Some(kind), flags, None::<&str>).unwrap();
        };
        let before = place.open(ALL[0]);
        attach(Path::new("none"), "tmp", "tmpfs", MsFlags::empty());
        place.file("tmp/secret", b"secret");
        // A bind mount of the same filesystem has the same st_dev.
        attach(&place.at("d"), "bind", "", MsFlags::MS_BIND);
        attach(&place.at("outer"), "bound", "", MsFlags::MS_BIND);
        let check = |base: &Base| {
            for (at, ino) in ["tmp", "bind", "bound"].into_iter().zip(under) {
                let stat = base.stat(&path(at)).unwrap();
                assert!(
                    stat.foreign && stat.ino == ino && stat.dev == base.root_id().0,
                    "{at}: {stat:?}"
                );
                let kind = if at == "bound" { FileKind::File } else { FileKind::Dir };
                assert_eq!(
                    (stat.kind, FileKind::from_mode(stat.mode), stat.size),
                    (kind, Some(kind), 0)
                );
                assert!(base.list(&path(at)).unwrap().is_empty());
                assert!(base.xattrs(&path(at)).unwrap().is_empty());
                assert_eq!(base.open_file(&path(at)).unwrap_err(), FsError::AccessDenied);
                assert_eq!(base.writer().dir(&path(at)).err(), Some(FsError::LeavesJail));
                let root = base.writer().dir(&TreePath::root()).unwrap();
                assert_eq!(root.stat(&name(at)).unwrap_err(), FsError::LeavesJail);
            }
            for at in ["tmp/secret", "tmp/under", "bind/f"] {
                assert_eq!(base.stat(&path(at)).unwrap_err(), FsError::NotFound, "{at}");
                assert_eq!(base.open_file(&path(at)).unwrap_err(), FsError::NotFound, "{at}");
            }
            assert_eq!(names(base, "").unwrap().len(), 5);
            assert!(!base.stat(&path("d")).unwrap().foreign);
            assert!(near_agrees(base, "") <= 2, "what is mounted upon is not looked at");
            assert_eq!([near_agrees(base, "tmp"), near_agrees(base, "bind")], [0, 0]);
        };
        check(&before);
        place.on_all(check);
        let told: Vec<String> =
            before.mounts_inside().unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(told, ["bind", "bound", "tmp"]);
        for at in ["tmp", "bind", "bound"] {
            crate::sys::mount::unmount(&place.at(at), true).unwrap();
        }
    });
}

#[test]
fn names_are_made_moved_and_removed() {
    let place = Place::new();
    for means in ALL {
        let base = place.open(means);
        let writer = base.writer();
        let root = writer.dir(&TreePath::root()).unwrap();
        let temp = WriteDir::stage_name().unwrap();
        let file = root.create_file(&temp).unwrap();
        assert_eq!(root.create_file(&temp).unwrap_err(), FsError::Exists);
        assert!(
            WriteDir::is_stage_name(&temp) && !WriteDir::is_stage_name(&name(".jailfs-stage-"))
        );
        assert_eq!(file.metadata().unwrap().mode(), 0o100_600);
        crate::sys::file::pwrite_full(&file, b"new", 0).unwrap();
        root.mkdir(&name("d"), 0o755).unwrap();
        assert_eq!(root.mkdir(&name("d"), 0o755), Err(FsError::Exists));
        let dir = writer.dir(&path("d")).unwrap();
        root.rename(&temp, &dir, &name("f"), Rename::NoReplace).unwrap();
        assert_eq!(read(&base, "d/f").unwrap(), b"new");
        assert_eq!(root.stat(&temp).unwrap(), None);
        for mode in [0o500, 0o755] {
            root.set_mode(&name("d"), mode).unwrap();
            assert_eq!(root.stat(&name("d")).unwrap().unwrap().mode, 0o040_000 | mode);
        }
        root.hard_link_from(&dir, &name("f"), &name("f2")).unwrap();
        assert_eq!(root.stat(&name("f2")).unwrap().unwrap().nlink, 2);
        root.symlink(&name("l"), b"\xff target").unwrap();
        assert_eq!(base.readlink(&path("l")).unwrap(), b"\xff target");
        root.hard_link_from(&root, &name("l"), &name("l2")).unwrap();
        assert_eq!(root.stat(&name("l2")).unwrap().unwrap().kind, FileKind::Symlink);
        let error = root.rename(&name("f2"), &root, &name("l"), Rename::NoReplace);
        assert_eq!(error, Err(FsError::Exists));
        root.rename(&name("f2"), &root, &name("l"), Rename::Exchange).unwrap();
        assert_eq!(root.stat(&name("f2")).unwrap().unwrap().kind, FileKind::Symlink);
        root.mknod(&name("p"), 0o010_600, 0).unwrap();
        root.mknod(&name("c"), 0o020_600, nix::sys::stat::makedev(1, 3)).unwrap();
        let device = root.stat(&name("c")).unwrap().unwrap();
        assert_eq!((device.kind, device.rdev), (FileKind::Char, nix::sys::stat::makedev(1, 3)));
        assert_eq!(root.mknod(&name("x"), 0o040_600, 0), Err(FsError::Invalid));
        assert_eq!(root.rmdir(&name("d")), Err(FsError::NotEmpty));
        assert_eq!(root.unlink(&name("d")), Err(FsError::IsADirectory));
        assert_eq!(root.rmdir(&name("l")), Err(FsError::NotADirectory));
        assert_eq!(root.open_file(&name("p")).unwrap_err(), FsError::Invalid);
        assert_eq!(Fingerprint::of(&root.open_file(&name("l")).unwrap()).unwrap().size, 3);
        dir.fsync().unwrap();
        dir.unlink(&name("f")).unwrap();
        root.rmdir(&name("d")).unwrap();
        assert_eq!(dir.create_file(&temp).unwrap_err(), FsError::NotFound);
        for at in ["l", "l2", "f2", "p", "c"] {
            root.unlink(&name(at)).unwrap();
        }
        assert_eq!(root.unlink(&name("l")), Err(FsError::NotFound));
        root.fsync().unwrap();
        assert!(base.list(&TreePath::root()).unwrap().is_empty());
    }
}

#[test]
fn attributes_become_exactly_what_was_asked() {
    let place = Place::new();
    place.dir("d").file("f", b"x").link("l", "target").file("target", b"");
    nix::unistd::mkfifo(&place.at("p"), Mode::S_IRUSR).unwrap();
    let user = pairs(&[(b"trusted.t", b"1"), (b"user.u", b"2")]);
    let acl = pairs(&[(b"security.capability", CAP), (b"system.posix_acl_access", ACL)]);
    let default = pairs(&[(b"system.posix_acl_default", ACL)]);
    let trusted = pairs(&[(b"trusted.t", b"1")]);
    let (atime, mtime) =
        (Timestamp { secs: 5, nanos: 6 }, Timestamp { secs: -7, nanos: 999_999_999 });
    // Root and an ordinary owner; mode; attributes.
    type Row<'a> = (&'a str, u32, u32, &'a [(Vec<u8>, Vec<u8>)]);
    let rows: &[Row<'_>] = &[
        ("f", 0o4755, 1000, &user),
        ("f", 0o640, 1000, &acl),
        ("f", 0o000, 0, &[]),
        ("f", 0o6555, 1, &trusted),
        ("d", 0o3775, 1000, &default),
        ("d", 0o555, 2, &user),
        ("d", 0o700, 2, &[]),
        ("l", 0o777, 1000, &trusted),
        ("l", 0o777, 0, &[]),
        ("p", 0o622, 1000, &trusted),
        ("p", 0o400, 0, &[]),
    ];
    let untouched = times(&place.at("target"));
    place.on_all(|base| {
        let root = base.writer().dir(&TreePath::root()).unwrap();
        for (at, mode, id, xattrs) in rows {
            let wanted = Attributes {
                mode: *mode,
                uid: *id,
                gid: id + 1,
                atime,
                mtime,
                xattrs,
                or_ours: false,
            };
            for _ in 0..2 {
                root.set_owner_mode_times_xattrs(&name(at), &wanted).unwrap();
                let stat = root.stat(&name(at)).unwrap().unwrap();
                assert_eq!(stat.mode & PERM_BITS, *mode, "{at}");
                assert_eq!(
                    (stat.uid, stat.gid, stat.atime, stat.mtime),
                    (*id, id + 1, atime, mtime),
                    "{at}"
                );
                assert_eq!(base.xattrs(&path(at)).unwrap(), *xattrs, "{at}");
            }
        }
        let dir = base.writer().dir(&path("d")).unwrap();
        dir.mkdir(&name("x"), 0o700).unwrap();
        dir.rmdir(&name("x")).unwrap();
        let wanted = Attributes {
            mode: 0o1777,
            uid: 3,
            gid: 4,
            atime,
            mtime,
            xattrs: &user,
            or_ours: false,
        };
        dir.set_own_attributes(&wanted).unwrap();
        let stat = base.stat(&path("d")).unwrap();
        assert_eq!((stat.mode & PERM_BITS, stat.uid, stat.gid, stat.mtime), (0o1777, 3, 4, mtime));
        assert_eq!(dir.own_stat().unwrap(), stat);
        assert_eq!(base.xattrs(&path("d")).unwrap(), user);
    });
    assert_eq!(times(&place.at("target")), untouched, "nothing went through the link");
}

#[test]
fn an_owner_sets_attributes_of_a_file_it_may_not_write() {
    let place = Place::new();
    place.file("f", b"");
    std::fs::set_permissions(place.at("f"), PermissionsExt::from_mode(0o444)).unwrap();
    for at in ["f", "."] {
        nix::unistd::chown(&place.at(at), Some(65534.into()), Some(65534.into())).unwrap();
    }
    for means in [ALL[1], ALL[3]] {
        let base = place.open(means);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                nix::unistd::setfsgid(65534.into());
                nix::unistd::setfsuid(65534.into());
                let root = base.writer().dir(&TreePath::root()).unwrap();
                for xattrs in [pairs(&[(b"user.u", b"1")]), Vec::new()] {
                    let (atime, mtime) =
                        (Timestamp { secs: 1, nanos: 2 }, Timestamp { secs: 3, nanos: 4 });
                    let wanted = Attributes {
                        mode: 0o444,
                        uid: 65534,
                        gid: 65534,
                        atime,
                        mtime,
                        xattrs: &xattrs,
                        or_ours: false,
                    };
                    root.set_owner_mode_times_xattrs(&name("f"), &wanted).unwrap();
                    assert_eq!(base.xattrs(&path("f")).unwrap(), xattrs);
                    assert_eq!(base.stat(&path("f")).unwrap().mode, 0o100_444);
                }
                let given = Attributes {
                    mode: 0o444,
                    uid: 0,
                    gid: 65534,
                    atime: Timestamp::default(),
                    mtime: Timestamp::default(),
                    xattrs: &[],
                    or_ours: false,
                };
                let refused = root.set_owner_mode_times_xattrs(&name("f"), &given);
                assert_eq!(refused, Err(FsError::NotPermitted));
                let given = Attributes { mode: 0o6444, or_ours: true, ..given };
                let is = root.set_owner_mode_times_xattrs(&name("f"), &given).unwrap();
                assert_eq!((is.uid, is.mode), (65534, 0o100_444));
                let (mut file, opened) = root.open_to_rewrite(&name("f")).unwrap();
                assert_eq!(opened.ino, is.ino);
                std::io::Write::write_all(&mut file, b"its owner writes").unwrap();
            });
        });
    }
}
