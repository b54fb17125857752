//! Tests that no access leaves the base, by either method of resolving paths.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use super::*;

#[test]
fn no_symlink_is_followed() {
    let fixture = Fixture::new();
    let outside = fixture.outside();
    fixture
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
    nix::unistd::mkfifo(&fixture.at("fifo"), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
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
    fixture.on_all(|base| {
        beyond.iter().for_each(|at| assert_unreachable(base, &path(at)));
        links.iter().for_each(|at| assert_not_followed(base, &path(at)));
        let begun = Instant::now();
        assert_eq!(base.open_file(&path("fifo")).unwrap_err(), FsError::Invalid);
        assert!(begun.elapsed() < Duration::from_secs(1), "a fifo does not block");
    });
}

/// Checks that no call reaches a path behind a link.
fn assert_unreachable(base: &Base, at: &TreePath) {
    assert_eq!(base.stat(at).unwrap_err(), FsError::NotFound, "{at}");
    assert_eq!(base.list(at).unwrap_err(), FsError::NotFound, "{at}");
    assert_eq!(base.open_file(at).unwrap_err(), FsError::NotFound, "{at}");
    assert_eq!(base.readlink(at).unwrap_err(), FsError::NotFound, "{at}");
    assert_eq!(base.xattrs(at).unwrap_err(), FsError::NotFound, "{at}");
    let (parent, _) = at.split().unwrap();
    let expected =
        if parent == path("fifo") { FsError::NotADirectory } else { FsError::LeavesJail };
    assert_eq!(base.writer().dir(&parent).err(), Some(expected), "{parent}");
}

/// Checks that each call returns the link itself, or fails.
fn assert_not_followed(base: &Base, at: &TreePath) {
    assert_eq!(base.stat(at).unwrap().kind, FileKind::Symlink, "{at}");
    assert_eq!(base.list(at).unwrap_err(), FsError::NotADirectory, "{at}");
    assert_eq!(base.open_file(at).unwrap_err(), FsError::Invalid, "{at}");
    assert!(base.readlink(at).is_ok(), "{at}");
}

#[test]
fn openat2_and_the_walk_fail_with_the_same_errno() {
    let fixture = Fixture::new();
    fixture.dir("d").file("d/f", b"").link("d/l", "f").link("l", "d");
    let root = Root::new(open_directory(&fixture.at("")).unwrap());
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
                // A symlink that must be a directory: either errno is right.
                (Err(Errno::ENOTDIR | Errno::ELOOP), Err(Errno::ENOTDIR | Errno::ELOOP)) => true,
                (call, walk) => call == walk,
            };
            assert!(same, "{at:?} {flags:?}: {call:?} {walk:?}");
        }
    }
}

#[test]
fn a_refused_openat2_is_replaced_by_the_walk() {
    let fixture = Fixture::new();
    fixture.dir("d").file("d/f", b"bytes").link("l", &fixture.outside());
    for errno in [Errno::ENOSYS, Errno::EPERM] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let early = fixture.open(ALL[0]);
                assert_eq!(read(&early, "d/f").unwrap(), b"bytes");
                crate::sys::testing::refuse_call(libc::SYS_openat2, errno);
                for base in [early, fixture.open(ALL[0])] {
                    // A new resolver whose first call is not with O_PATH.
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
fn a_base_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Base>();
    shared::<WriteDir<'_>>();
}

#[test]
fn dots_and_absolute_paths_are_refused() {
    let fixture = Fixture::new();
    let root = Root::new(open_directory(&fixture.at("")).unwrap());
    for openat2 in [true, false] {
        let resolver = Resolver::new(openat2);
        assert!(resolver.open(&root, b"..", O_PATH).is_err());
        assert!(resolver.open(&root, b"../outside", O_PATH).is_err());
        assert!(resolver.open(&root, b"/etc", O_PATH).is_err());
    }
}

/// A thread that swaps `a` and `b` in the base until this is dropped.
struct Swapper {
    stop: Arc<AtomicBool>,
    swaps: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
    begun: Instant,
}

impl Swapper {
    fn start(a: PathBuf, b: PathBuf) -> Swapper {
        let (stop, swaps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (is_over, count) = (Arc::clone(&stop), Arc::clone(&swaps));
        let thread = std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                renameat2(AT_FDCWD, &a, AT_FDCWD, &b, RenameFlags::RENAME_EXCHANGE).unwrap();
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Swapper { stop, swaps, thread: Some(thread), begun: Instant::now() }
    }

    /// Whether the test goes on: it needs 300 ms, 100 swaps, and each outcome at least once.
    fn needs_more(&self, outcomes: &[u64]) -> bool {
        let swaps = self.swaps.load(Ordering::Relaxed);
        let has_all = swaps > 100 && outcomes.iter().all(|count| *count > 0);
        let elapsed = self.begun.elapsed();
        assert!(has_all || elapsed < Duration::from_secs(60), "{swaps} swaps, {outcomes:?}");
        !has_all || elapsed < Duration::from_millis(300)
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))), "the swaps failed");
    }
}

#[test]
fn a_directory_that_is_swapped_with_a_symlink_never_shows_the_outside() {
    let fixture = Fixture::new();
    fixture.dir("d").file("d/f", b"inside").link("l", &fixture.outside());
    fixture.on_all(|base| {
        let swapper = Swapper::start(fixture.at("d"), fixture.at("l"));
        let (mut inside, mut refused) = (0, 0);
        while swapper.needs_more(&[inside, refused]) {
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
    });
}

#[test]
fn a_directory_that_is_swapped_with_a_symlink_is_never_written_through() {
    let fixture = Fixture::new();
    fixture.dir("d/e").link("l", &fixture.outside());
    std::fs::create_dir(fixture.dir.path().join("outside/e")).unwrap();
    fixture.on_all(|base| {
        let swapper = Swapper::start(fixture.at("d"), fixture.at("l"));
        let mut written = 0;
        while swapper.needs_more(&[written]) {
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
            assert_eq!(std::fs::read_dir(fixture.dir.path().join("outside/e")).unwrap().count(), 0);
        }
    });
}

#[test]
fn an_open_directory_stays_the_directory_when_a_symlink_takes_its_name() {
    let fixture = Fixture::new();
    fixture.dir("d").link("l", &fixture.outside());
    fixture.on_all(|base| {
        let dir = base.writer().dir(&path("d")).unwrap();
        renameat2(
            AT_FDCWD,
            &fixture.at("d"),
            AT_FDCWD,
            &fixture.at("l"),
            RenameFlags::RENAME_EXCHANGE,
        )
        .unwrap();
        let temp = WriteDir::stage_name().unwrap();
        dir.create_file(&temp).unwrap();
        assert!(fixture.at("l").join(temp.as_os_str()).exists());
        assert!(!Path::new(&fixture.outside()).join(temp.as_os_str()).exists());
        dir.unlink(&temp).unwrap();
        assert_eq!(base.writer().dir(&path("d")).err(), Some(FsError::LeavesJail));
        renameat2(
            AT_FDCWD,
            &fixture.at("d"),
            AT_FDCWD,
            &fixture.at("l"),
            RenameFlags::RENAME_EXCHANGE,
        )
        .unwrap();
    });
}

#[test]
fn a_path_longer_than_path_max_is_found() {
    let fixture = Fixture::new();
    let part = "p".repeat(200);
    let mut deep = TreePath::root();
    let mut dir = open_directory(&fixture.at("")).unwrap();
    for _ in 0..45 {
        nix::sys::stat::mkdirat(&dir, part.as_str(), Mode::S_IRWXU).unwrap();
        dir = nix::fcntl::openat(&dir, part.as_str(), OFlag::O_PATH, Mode::empty()).unwrap();
        deep = deep.join(&name(&part));
    }
    nix::unistd::symlinkat("text", &dir, "l").unwrap();
    let deep = deep.join(&name("l"));
    assert!(deep.as_bytes().len() > 8192);
    fixture.on_all(|base| assert_eq!(base.readlink(&deep).unwrap(), b"text"));
}
