//! A mount in the test's own process, with its base, store and filesystem.
//!
//! Always true: no mount outlives its test. It is unmounted when the [`Bench`] is dropped, also by
//! a panic. If a test hangs, a watchdog unmounts everything and ends the process. Tests are never
//! skipped: on a host that cannot mount they fail.

#![allow(dead_code, reason = "each test file uses a part of this")]
#![expect(clippy::print_stderr, reason = "leftovers must be printed")]

pub mod raw;

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jailfs::internals::base::Base;
use jailfs::internals::fs::Fs;
use jailfs::internals::fs::merged::lower::Lower;
use jailfs::internals::fuse::{MountOptions, Mounted, mount};
use jailfs::internals::jail::{Jail, Policy};
use jailfs::internals::store::record::LayerKind;
use jailfs::internals::store::{Store, StoreOptions};
use jailfs::internals::tree::Tree;
use jailfs::types::Epoch;

/// A test that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// The mounts of this process that still exist.
static MOUNTS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has a mount of the test's own taken away if the test hangs.
pub fn take_away_if_hanging(mount: &Path) {
    MOUNTS.lock().expect("the list of mounts").push(mount.to_owned());
}

/// A base, a store, and a mount of both.
pub struct Bench {
    dir: Option<tempfile::TempDir>,
    mounted: Option<Mounted>,
    /// The filesystem that is mounted.
    pub fs: Arc<Fs>,
    done: Arc<AtomicBool>,
}

impl Bench {
    /// A mount over an empty base.
    pub fn new() -> Bench {
        Bench::over(|_| ())
    }

    /// A mount over a base that `fill` creates.
    pub fn over(fill: impl FnOnce(&Path)) -> Bench {
        Bench::with(&MountOptions::default(), fill)
    }

    /// A mount with options.
    pub fn with(options: &MountOptions, fill: impl FnOnce(&Path)) -> Bench {
        let dir = tempfile::tempdir().expect("a directory for the test");
        // Some tests run as an ordinary user, who must be able to enter.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755))
            .expect("open the directory");
        let (base, store, mnt) = places(dir.path());
        std::fs::create_dir(&base).expect("make the base");
        std::fs::create_dir(&mnt).expect("make the mount point");
        fill(&base);
        let fs = open_new(&base, &store, &mnt);
        let done = Arc::new(AtomicBool::new(false));
        watch(Arc::clone(&done));
        MOUNTS.lock().expect("the list of mounts").push(mnt.clone());
        let mounted = mount(Arc::clone(&fs), &mnt, &store, options)
            .expect("mounting needs /dev/fuse and root or fusermount3");
        Bench { dir: Some(dir), mounted: Some(mounted), fs, done }
    }

    fn root(&self) -> &Path {
        self.dir.as_ref().expect("the directory exists as long as the bench").path()
    }

    /// A path in the base.
    pub fn base(&self, path: &str) -> PathBuf {
        places(self.root()).0.join(path)
    }

    /// The directory of the store.
    pub fn store(&self) -> PathBuf {
        places(self.root()).1
    }

    /// A path in the mount.
    pub fn at(&self, path: &str) -> PathBuf {
        let mnt = places(self.root()).2;
        if path.is_empty() { mnt } else { mnt.join(path) }
    }

    /// The mount.
    pub fn mounted(&self) -> &Mounted {
        self.mounted.as_ref().expect("is mounted until it is unmounted")
    }

    /// The number of requests of one kind from the kernel.
    pub fn count(&self, operation: &str) -> u64 {
        let counts = self.mounted().counters().snapshot();
        counts
            .into_iter()
            .find(|(name, _)| *name == operation)
            .map(|(_, n)| n)
            .expect("a known operation")
    }

    /// Unmounts as a user does, and waits for the end of the session.
    pub fn unmount(&mut self) {
        let mounted = self.mounted.take().expect("is mounted until it is unmounted");
        mounted.unmounter().unmount(false).expect("unmount");
        mounted.wait().expect("the session ends well");
    }

    /// Bytes of the upper layer's pool on disk.
    pub fn pool_bytes(&self) -> u64 {
        let layer = format!("layers/{:08}/pool", self.fs.upper_layer().0);
        std::fs::metadata(self.store().join(layer)).expect("the pool").blocks() * 512
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.mounted = None;
        self.done.store(true, Ordering::SeqCst);
        let Some(dir) = self.dir.take() else { return };
        let mnt = places(dir.path()).2;
        let gone = !is_mounted(&mnt);
        if let Ok(mut mounts) = MOUNTS.lock() {
            mounts.retain(|m| *m != mnt);
        }
        if !gone {
            // The directory cannot be removed while it is mounted: that would remove the content of
            // the mount.
            let kept = dir.keep();
            eprintln!("a mount is left at {}", kept.display());
        }
    }
}

/// The base, the store and the mount point.
pub fn places(dir: &Path) -> (PathBuf, PathBuf, PathBuf) {
    (dir.join("base"), dir.join("store"), dir.join("mnt"))
}

/// A new store and head for a base.
pub fn open_new(base: &Path, store: &Path, mnt: &Path) -> Arc<Fs> {
    let path = base.as_os_str().as_bytes().to_vec();
    let jail = Jail {
        policy: Policy::Deny,
        mount_point: mnt.as_os_str().as_bytes().to_vec(),
        base_path: path.clone(),
        allowed_targets: Vec::new(),
    };
    let base = Arc::new(Base::open(base).expect("open the base"));
    let store =
        Store::create(store, &path, base.root_id(), StoreOptions::default()).expect("make a store");
    let store = Arc::new(store);
    let upper =
        store.create_layer(None, "main", Epoch(0), LayerKind::Continues).expect("make a layer");
    let lower = Lower::new(base, Arc::clone(&store), Epoch(0), Vec::new());
    Arc::new(Fs::new(store, Tree::new(), lower, upper, jail))
}

/// Whether something is mounted at `path`.
pub fn is_mounted(path: &Path) -> bool {
    let wanted = path.as_os_str().as_bytes();
    let all = jailfs::internals::sys::mountinfo::read().expect("/proc is mounted");
    all.iter().any(|entry| entry.mount_point == wanted)
}

/// Ends the process and its mounts if the test does not end in time.
pub fn watch(done: Arc<AtomicBool>) {
    let name = std::thread::current().name().unwrap_or("a test").to_string();
    std::thread::spawn(move || {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if done.load(Ordering::SeqCst) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        eprintln!("{name} hangs: its mounts are taken away");
        for mount in MOUNTS.lock().iter().flat_map(|m| m.iter()) {
            // A forced unmount comes first, so that waiting requests get an error.
            for flag in [nix::mount::MntFlags::MNT_FORCE, nix::mount::MntFlags::MNT_DETACH] {
                let _ended = nix::mount::umount2(mount, flag);
            }
            let _ended = jailfs::internals::sys::mount::unmount(mount, true);
        }
        std::process::abort();
    });
}

/// Tells the threads of a scope that the test is over, also when it fails, because the scope waits
/// for them.
#[derive(Debug, Default)]
pub struct Stop(AtomicBool);

impl Stop {
    /// Whether the test is over.
    pub fn is_said(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the flag when the guard is dropped.
    pub fn at_the_end(&self) -> impl Drop {
        struct Say<'s>(&'s Stop);
        impl Drop for Say<'_> {
            fn drop(&mut self) {
                self.0.0.store(true, Ordering::Relaxed);
            }
        }
        Say(self)
    }
}

/// Everything that `lstat` and reading show of a tree.
#[derive(Clone, PartialEq, Eq)]
pub struct Seen {
    /// The path relative to the root of the tree.
    pub path: PathBuf,
    /// `dev ino mode nlink uid gid rdev size blocks atime mtime ctime`.
    pub stat: Vec<i64>,
    /// The bytes of a file (none for a large one), or the text of a symlink.
    pub bytes: Vec<u8>,
}

impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} ({} bytes)", self.path.display(), self.stat, self.bytes.len())
    }
}

/// Reads a whole tree without changing an access time.
pub fn snapshot(root: &Path) -> Vec<Seen> {
    let mut all = Vec::new();
    look(root, Path::new(""), &mut all);
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all
}

fn look(root: &Path, path: &Path, all: &mut Vec<Seen>) {
    let full = if path.as_os_str().is_empty() { root.to_path_buf() } else { root.join(path) };
    let stat = std::fs::symlink_metadata(&full).expect("lstat");
    let of = |n: u64| i64::try_from(n).expect("a number of stat");
    let mut seen = Seen {
        path: path.to_path_buf(),
        stat: vec![
            of(stat.dev()),
            of(stat.ino()),
            stat.mode().into(),
            of(stat.nlink()),
            stat.uid().into(),
            stat.gid().into(),
            of(stat.rdev()),
            of(stat.size()),
            of(stat.blocks()),
            stat.atime(),
            stat.atime_nsec(),
            stat.mtime(),
            stat.mtime_nsec(),
            stat.ctime(),
            stat.ctime_nsec(),
        ],
        bytes: Vec::new(),
    };
    let mut quiet = std::fs::OpenOptions::new();
    quiet.read(true).custom_flags(libc::O_NOATIME | libc::O_NOFOLLOW);
    if stat.is_file() && stat.len() < 1 << 20 {
        std::io::Read::read_to_end(&mut quiet.open(&full).expect("open"), &mut seen.bytes)
            .expect("read");
    }
    all.push(seen);
    if stat.is_dir() {
        let dir = quiet.open(&full).expect("open");
        let mut names = Vec::new();
        jailfs::internals::sys::dir::for_each(&dir, |name, _, _| names.push(name.to_vec()))
            .expect("list");
        for name in names {
            look(root, &path.join(std::ffi::OsStr::from_bytes(&name)), all);
        }
    }
}
