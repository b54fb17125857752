//! The directories of an attack test: an outside that must stay untouched, and trees beside it that
//! are attacked.
//!
//! Always true: a mount that a test made is gone when its place is dropped, also by a panic. If a
//! test hangs, a watchdog unmounts everything and ends the process.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};

/// The path of the program.
pub const JAILFS: &str = env!("CARGO_BIN_EXE_jailfs");
/// A PATH for ordinary users.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The message of `jailfs umount` if the mount is gone here and still visible in another namespace.
pub const STILL_SEEN: &str = "the mount is gone, but its daemon";

/// A directory for one test. It is so deep that an escape that is some levels too long still ends
/// in it.
pub struct Place {
    dir: Option<tempfile::TempDir>,
    done: Arc<AtomicBool>,
}

impl Place {
    /// A place for a test with this time limit.
    pub fn new(patience: Duration) -> Place {
        let dir = tempfile::Builder::new().prefix("jailfs-attack-").tempdir().expect("a directory");
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755))
            .expect("open it to all users");
        fs::create_dir_all(dir.path().join("1/2/3")).expect("make directories");
        let place = Place { dir: Some(dir), done: Arc::default() };
        watch(place.root().to_owned(), Arc::clone(&place.done), patience);
        place
    }

    /// The root of the place.
    pub fn root(&self) -> &Path {
        self.dir.as_ref().expect("the directory exists as long as the place").path()
    }

    /// The directory of the attacked trees.
    pub fn top(&self) -> PathBuf {
        self.root().join("1/2/3")
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.top().join(path)
    }

    /// `jailfs` with a store in this place.
    pub fn jailfs(&self, words: &[&str]) -> Output {
        let mut command = Command::new(JAILFS);
        command.args(words).current_dir(self.top()).stdin(Stdio::null());
        self.environment(&mut command);
        command.output().expect("start jailfs")
    }

    /// The same for a command that must succeed. Returns its standard output.
    pub fn ok(&self, words: &[&str]) -> String {
        let output = self.jailfs(words);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "jailfs {words:?}: {err}");
        String::from_utf8(output.stdout).expect("the output is UTF-8")
    }

    /// Unmounts `mnt`. A mount namespace that another test made meanwhile has a copy of the mount,
    /// and its daemon ends with the last copy. This does not wait for that.
    pub fn umount(&self) {
        let output = self.jailfs(&["umount", "mnt"]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() || err.contains(STILL_SEEN), "jailfs umount: {err}");
    }

    pub fn environment(&self, command: &mut Command) {
        command.env("HOME", self.at("home")).env("PATH", PATH).env("JAILFS", JAILFS);
        for name in ["XDG_STATE_HOME", "JAILFS_SANDBOX", "JAILFS_ROOT", "JAILFS_LOG"] {
            command.env_remove(name);
        }
    }

    /// An empty kernel overlayfs at `name`.
    pub fn overlay(&self, name: &str) -> PathBuf {
        // Its upper layer must not be on an overlayfs.
        let below = self.at(&format!("{name}-below"));
        fs::create_dir(&below).expect("make a directory");
        mount(Some("tmpfs"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>)
            .expect("mount a tmpfs");
        for dir in ["lower", "upper", "work"] {
            fs::create_dir(below.join(dir)).expect("make a directory");
        }
        let point = self.at(name);
        fs::create_dir(&point).expect("make a directory");
        let below = below.display();
        let options = format!("lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work");
        mount(Some("overlay"), &point, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .expect("mount an overlayfs");
        point
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
        let Some(dir) = self.dir.take() else { return };
        take_away(dir.path());
        if !mounts_below(dir.path()).is_empty() {
            // The directory cannot be removed while it is mounted: that would remove the content of
            // the mount.
            let kept = dir.keep();
            eprintln!("a mount is left below {}", kept.display());
        }
    }
}

fn mounts_below(path: &Path) -> Vec<PathBuf> {
    let all = jailfs::internals::sys::mountinfo::read().expect("/proc is mounted");
    let points = all.into_iter().map(|entry| PathBuf::from(OsStr::from_bytes(&entry.mount_point)));
    points.filter(|point| point.starts_with(path)).collect()
}

/// Detaches every mount below a directory, the innermost first.
fn take_away(path: &Path) {
    for point in mounts_below(path).iter().rev() {
        if let Err(error) = jailfs::internals::sys::mount::unmount(point, true) {
            eprintln!("unmount {}: {error}", point.display());
        }
    }
}

/// Ends the process, and the mounts of the test, if the test does not end in time.
fn watch(root: PathBuf, done: Arc<AtomicBool>, patience: Duration) {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    std::thread::spawn(move || {
        let start = Instant::now();
        while start.elapsed() < patience {
            if done.load(Ordering::SeqCst) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        eprintln!("{name} hangs: its mounts are taken away");
        take_away(&root);
        std::process::abort();
    });
}
