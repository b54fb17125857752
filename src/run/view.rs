//! Builds the first wall: a mount namespace that shows the host read-only, with mounts over it.
//!
//! The root of the namespace is a copy of the host's mounts (`namespace`). First all mounts are
//! made read-only, `nosuid` and `nodev`. Then the mounts of the [`layout`] are made in order. Host
//! paths that must be visible inside covered directories are opened before anything is covered.
//!
//! The command cannot undo any of this. It has no CAP_SYS_ADMIN over these mounts, and a user
//! namespace of its own gets copies of them that are locked together (mount_namespaces(7)).
//! Landlock also refuses mounting altogether.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, fstat};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::layout::{Layout, MountKind, layout};
use super::spec::Spec;
use super::terminal;
use crate::control;
use crate::error::{Attempt, Error, Kind, Result};
use crate::sys;
use crate::sys::view::{Flags, remount, remount_listed, set_flags};

/// The devices in `/dev`, besides the terminal and devpts.
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];
/// The symlinks in `/dev`.
const LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];
/// A directory of jailfs in the view. It is in `/dev` because every view makes `/dev` anew.
const OWN_DIR: &str = "/dev/jailfs";
/// The file that tells the command about its sandbox.
pub const README: &str = "/dev/jailfs/README";
/// The empty file that covers hidden files.
const EMPTY_FILE: &str = "/dev/jailfs/nothing";
/// Entries of /proc that are about the machine and not about processes. They stay readable and
/// become read-only.
const PROC_OF_MACHINE: &[&str] =
    &["acpi", "asound", "bus", "driver", "fs", "irq", "scsi", "sys", "sysrq-trigger", "tty"];
/// Entries of /proc that show the machine's memory, keys or timers. They are hidden.
const PROC_SECRETS: &[&str] = &[
    "kcore",
    "keys",
    "kmsg",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "timer_list",
    "sched_debug",
];

/// The size of each private directory for temporary files, as a share of memory, and its number of
/// inodes. There are three such directories, so together they take less than the memory; with the
/// kernel's default they would not.
const TMP_SIZE: &str = "20%";
const TMP_INODES: u32 = 1_000_000;
/// The same for directories that are shown empty. They hold mount points and one text.
const EMPTY_SIZE: &str = "4m";
const EMPTY_INODES: u32 = 10_000;

const READ_ONLY: Flags = Flags { read_only: true, ..Flags::NONE };
const NO_DEVICES: Flags = Flags { nodev: true, ..Flags::NONE };

/// Makes the view in the mount namespace of this process, except the sandbox and the hidden paths
/// in it. Returns the plan.
///
/// # Errors
/// A mount fails. EPERM: the host does not let this namespace mount.
pub(super) fn make(spec: &Spec) -> Result<Layout> {
    std::env::set_current_dir("/").attempt(|| "leave the current directory")?;
    let plan = layout(spec, |path| sys::path::resolve(path).ok().filter(|path| path.is_dir()));
    let socket = spec.socket.as_deref().unwrap_or(OsStr::new(control::SOCKET));
    let view = View {
        sources: sources(&plan, socket)?,
        read_only_later: Vec::new(),
        tmp: private_options(spec),
    };
    make_host_read_only()?;
    view.build(spec, &plan)?;
    Ok(plan)
}

/// Makes every mount read-only, without setuid programs and devices. /proc stays writable if it
/// was: the kernel refuses a new /proc with more rights than the visible one.
fn make_host_read_only() -> Result<()> {
    let attempt = || "make the host read-only";
    let writable_proc =
        statvfs("/proc").is_ok_and(|stat| !stat.flags().contains(FsFlags::ST_RDONLY));
    match set_flags(Path::new("/"), Flags::ALL, Flags::NONE, true) {
        Err(error) if is_missing_call(&error) => make_each_read_only(),
        other => other,
    }
    .attempt(attempt)?;
    if writable_proc {
        change(Path::new("/proc"), Flags::NONE, READ_ONLY).attempt(attempt)?;
    }
    Ok(())
}

/// The same on kernels without mount_setattr(2), one mount at a time.
fn make_each_read_only() -> io::Result<()> {
    for entry in sys::mountinfo::read()? {
        match remount_listed(&entry, Flags::ALL, Flags::NONE) {
            Ok(()) => {}
            // A later mount covers it, so no process reaches it.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENOENT | libc::EINVAL | libc::EACCES)
                ) => {}
            // The server of this mount is dead, so the mount can be neither read nor written.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENOTCONN | libc::ECONNABORTED | libc::EIO)
                ) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_missing_call(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM))
}

/// Sets and clears flags of one mount.
fn change(path: &Path, set: Flags, clear: Flags) -> io::Result<()> {
    match set_flags(path, set, clear, false) {
        Err(error) if is_missing_call(&error) => remount(path, set, clear),
        other => other,
    }
}

/// An open file or directory of the host, held while it is covered.
struct Source {
    held: OwnedFd,
    is_dir: bool,
    is_device: bool,
    /// It was writable before the host was made read-only.
    was_writable: bool,
}

impl Source {
    fn open(path: &Path) -> io::Result<Source> {
        let held = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        let kind = fs::metadata(proc_path(&held))?.file_type();
        let was_writable = !statvfs(path)?.flags().contains(FsFlags::ST_RDONLY);
        let is_device = kind.is_char_device() || kind.is_block_device();
        Ok(Source { held, is_dir: kind.is_dir(), is_device, was_writable })
    }

    /// Mounts it, with the mounts below it, at a path that must exist.
    fn bind(&self, to: &Path) -> io::Result<()> {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(&proc_path(&self.held)), to, None::<&str>, flags, None::<&str>)?;
        Ok(())
    }
}

fn proc_path<Fd: AsFd>(fd: &Fd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

/// Opens the host paths that must be visible inside covered directories.
fn sources(plan: &Layout, socket: &OsStr) -> Result<HashMap<PathBuf, Source>> {
    let mut sources = HashMap::new();
    for (path, kind) in &plan.mounts {
        let (wanted, seen_at) = match kind {
            MountKind::Shown | MountKind::Writable => (path.clone(), path.clone()),
            MountKind::Store => (path.join(socket), path.join(control::SOCKET)),
            _ => continue,
        };
        let source = Source::open(&wanted).attempt(|| format!("open '{}'", wanted.display()))?;
        sources.insert(seen_at, source);
    }
    for name in DEVICES {
        let path = Path::new("/dev").join(name);
        // A device that this host lacks is left out.
        if let Ok(source) = Source::open(&path) {
            sources.insert(path, source);
        }
    }
    if let Some(terminal) = terminal::path() {
        sources.insert(
            "/dev/console".into(),
            Source::open(&terminal).attempt(|| "open the terminal")?,
        );
    }
    Ok(sources)
}

struct View {
    sources: HashMap<PathBuf, Source>,
    /// Empty directories, to be made read-only when the view is complete.
    read_only_later: Vec<PathBuf>,
    /// The mount options of private directories for temporary files.
    tmp: String,
}

impl View {
    fn build(mut self, spec: &Spec, plan: &Layout) -> Result<()> {
        for (path, kind) in &plan.mounts {
            self.mount(path, *kind).map_err(|error| {
                let error = Error::io(
                    format!("mount '{}' in the view of the command", path.display()),
                    &error,
                );
                error.kind(Kind::CannotMount)
            })?;
        }
        let attempt = || "finish the view of the command";
        fs::write(README, &spec.readme).attempt(attempt)?;
        for path in &self.read_only_later {
            change(path, READ_ONLY, Flags::NONE).attempt(attempt)?;
        }
        Ok(())
    }

    fn mount(&mut self, path: &Path, kind: MountKind) -> io::Result<()> {
        match kind {
            MountKind::Private => {
                make_dir(path)?;
                mount_tmpfs(path, &self.tmp)
            }
            MountKind::Empty => {
                // Symlinks are kept: some hosts find all their programs through
                // /run/current-system.
                let links = links_in(path);
                self.read_only_later.push(path.to_owned());
                empty(path, 0o755)?;
                links.iter().try_for_each(|(name, target)| symlink(target, path.join(name)))
            }
            MountKind::Devices => {
                self.read_only_later.push(path.to_owned());
                empty(path, 0o755)?;
                self.devices()
            }
            MountKind::Hidden => self.hide(path),
            MountKind::Store => self.store(path),
            MountKind::Shown => self.show(path),
            MountKind::Writable => self.bind(path, true),
            MountKind::Tree => make_dir(path),
        }
    }

    fn devices(&self) -> io::Result<()> {
        let dev = Path::new("/dev");
        DirBuilder::new().mode(0o755).create(OWN_DIR)?;
        fs::write(EMPTY_FILE, "")?;
        fs::set_permissions(EMPTY_FILE, Permissions::from_mode(0o444))?;
        for (name, target) in LINKS {
            symlink(target, dev.join(name))?;
        }
        for name in DEVICES.iter().chain(&["console"]) {
            let path = dev.join(name);
            if let Some(source) = self.sources.get(&path) {
                fs::write(&path, "")?;
                source.bind(&path)?;
                change(&path, Flags::NONE, NO_DEVICES)?;
            }
        }
        let pts = dev.join("pts");
        DirBuilder::new().create(&pts)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        let options = "newinstance,ptmxmode=0666,mode=620";
        // Terminals belong to the group tty (5), if our user namespace maps that id.
        match mount(
            Some("devpts"),
            &pts,
            Some("devpts"),
            flags,
            Some(format!("{options},gid=5").as_str()),
        ) {
            Err(Errno::EINVAL) => {
                mount(Some("devpts"), &pts, Some("devpts"), flags, Some(options))?
            }
            other => other?,
        }
        Ok(())
    }

    /// Covers a path, if it exists.
    fn hide(&mut self, path: &Path) -> io::Result<()> {
        if hide(path)? {
            self.read_only_later.push(path.to_owned());
        }
        Ok(())
    }

    fn store(&mut self, path: &Path) -> io::Result<()> {
        make_dir(path)?;
        empty(path, 0o700)?;
        self.read_only_later.push(path.to_owned());
        self.bind(&path.join(control::SOCKET), false)
    }

    /// Makes a path visible if it may be covered. A path that is still visible and read-only stays
    /// as it is.
    fn show(&self, path: &Path) -> io::Result<()> {
        let same = |source: &Source| {
            let there = fs::metadata(path)?;
            let held = fstat(&source.held)?;
            let read_only = statvfs(path)?.flags().contains(FsFlags::ST_RDONLY);
            io::Result::Ok((there.dev(), there.ino()) == (held.st_dev, held.st_ino) && read_only)
        };
        if self.sources.get(path).is_some_and(|source| same(source).unwrap_or(false)) {
            return Ok(());
        }
        self.bind(path, false)
    }

    fn bind(&self, path: &Path, writable: bool) -> io::Result<()> {
        let source = self.sources.get(path).ok_or(Errno::ENOENT)?;
        if source.is_dir {
            make_dir(path)?
        } else {
            make_file(path)?
        }
        source.bind(path)?;
        if !writable {
            return Ok(());
        }
        let clear =
            Flags { read_only: source.was_writable, nodev: source.is_device, nosuid: false };
        change(path, Flags::NONE, clear)
    }
}

/// Covers a path with an empty directory or file, if it exists. Returns whether the cover is a
/// directory, which is still writable.
fn hide(path: &Path) -> io::Result<bool> {
    let about = match fs::metadata(path) {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES)
            ) =>
        {
            return Ok(false);
        }
        other => other?,
    };
    if about.is_dir() {
        empty(path, 0o755)?;
        return Ok(true);
    }
    let flags = MsFlags::MS_BIND;
    mount(Some(EMPTY_FILE), path, None::<&str>, flags, None::<&str>)?;
    change(path, READ_ONLY, Flags::NONE)?;
    Ok(false)
}

/// Hides paths in the sandbox, which is served by now. A mount covers a name and changes nothing in
/// the tree.
///
/// # Errors
/// A path cannot be covered.
pub(super) fn hide_inside(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        let attempt = || format!("hide '{}'", path.display());
        if hide(path).attempt(attempt)? {
            change(path, READ_ONLY, Flags::NONE).attempt(attempt)?;
        }
    }
    Ok(())
}

/// Mounts a /proc that shows only the processes of this pid namespace. In any case makes the
/// machine's part of /proc read-only and hides its secrets. Returns whether the new /proc could be
/// mounted: the kernel refuses it in a container that hides parts of its own /proc.
///
/// # Errors
/// An entry cannot be covered.
pub(super) fn mount_proc() -> Result<bool> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let is_new = mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>).is_ok();
    let proc = Path::new("/proc");
    for path in PROC_OF_MACHINE.iter().map(|name| proc.join(name)).filter(|path| path.exists()) {
        let attempt = || format!("make '{}' read-only", path.display());
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(&path), &path, None::<&str>, flags, None::<&str>)
            .map_err(io::Error::from)
            .attempt(attempt)?;
        change(&path, READ_ONLY, Flags::NONE).attempt(attempt)?;
    }
    for path in PROC_SECRETS.iter().map(|name| proc.join(name)) {
        hide(&path).attempt(|| format!("hide '{}'", path.display()))?;
    }
    Ok(is_new)
}

/// Mounts an empty directory, just large enough for the entries of the view.
fn empty(path: &Path, mode: u32) -> io::Result<()> {
    mount_tmpfs(path, &format!("mode={mode:o},size={EMPTY_SIZE},nr_inodes={EMPTY_INODES}"))
}

/// The mount options of a private directory for temporary files (tmpfs(5)).
fn private_options(spec: &Spec) -> String {
    let size = spec.tmp_size.map_or_else(|| TMP_SIZE.to_owned(), |bytes| bytes.to_string());
    format!("mode=1777,size={size},nr_inodes={TMP_INODES}")
}

fn mount_tmpfs(path: &Path, options: &str) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("jailfs-empty"), path, Some("tmpfs"), flags, Some(options))?;
    Ok(())
}

/// The names and targets of the symlinks in a directory.
fn links_in(dir: &Path) -> Vec<(OsString, PathBuf)> {
    let listed = fs::read_dir(dir).into_iter().flatten().flatten();
    listed
        .filter_map(|entry| Some((entry.file_name(), fs::read_link(entry.path()).ok()?)))
        .collect()
}

/// Makes a directory and its missing ancestors. They can be missing only in an empty directory of
/// the view.
fn make_dir(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

fn make_file(path: &Path) -> io::Result<()> {
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), make_dir)?;
    fs::write(path, "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::namespace;

    /// Runs `test` in a mount namespace of its own, with a spec over a temporary directory.
    fn in_a_view(test: impl FnOnce(&Path, Spec) + Send + 'static) {
        std::thread::spawn(|| {
            let dir = tempfile::tempdir().unwrap();
            let root = sys::path::resolve(dir.path()).unwrap();
            namespace::private_mounts_of_this_thread();
            for made in ["base", "store", "home/.ssh", "home/.config"] {
                fs::create_dir_all(root.join(made)).unwrap();
            }
            let _socket =
                std::os::unix::net::UnixListener::bind(root.join("store/control")).unwrap();
            for (file, text) in
                [("store/format", "1"), ("home/.ssh/id", "key"), ("home/.netrc", "password")]
            {
                fs::write(root.join(file), text).unwrap();
            }
            let spec = Spec {
                base: root.join("base").into(),
                store: root.join("store").into(),
                program: std::env::current_exe().unwrap().into(),
                hidden: [".ssh", ".netrc", ".missing"]
                    .map(|name| root.join("home").join(name).into())
                    .to_vec(),
                writable: vec![root.join("home").into()],
                readme: "here".to_owned(),
                ..Spec::default()
            };
            test(&root, spec);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_host_is_read_only_and_hidden_paths_are_empty() {
        in_a_view(|root, spec| {
            make(&spec).unwrap();
            let refused = |path: &str| fs::write(path, "x").unwrap_err().raw_os_error();
            for path in ["/etc/x", "/usr/x", "/dev/x", "/run/x", "/sys/x", "/x"] {
                assert_eq!(refused(path), Some(libc::EROFS), "{path}");
            }
            for path in ["/tmp/x", "/dev/shm/x", "/var/tmp/x"] {
                fs::write(path, "x").unwrap();
            }
            assert_eq!(fs::read_to_string(README).unwrap(), "here");
            let names = |path: &Path| {
                fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>()
            };
            assert_eq!(names(&root.join("home/.ssh")), [""; 0]);
            assert_eq!(fs::read_to_string(root.join("home/.netrc")).unwrap(), "");
            fs::write(root.join("home/.config/x"), "as on the host").unwrap();
            assert!(fs::write(root.join("home/.ssh/x"), "").is_err());
            assert_eq!(names(&root.join("store")), ["control"]);
            std::os::unix::net::UnixStream::connect(root.join("store/control")).unwrap();
            assert!(!root.join("home/.missing").exists() && root.join("base").is_dir());
            fs::write("/dev/null", "x").unwrap();
            assert_eq!(names(Path::new("/dev/pts")), ["ptmx"]);
        });
    }

    #[test]
    fn without_mount_setattr_mounts_become_read_only_one_by_one() {
        in_a_view(|_, spec| {
            sys::testing::refuse_call(libc::SYS_mount_setattr, Errno::EPERM);
            make(&spec).unwrap();
            assert_eq!(fs::write("/etc/x", "x").unwrap_err().raw_os_error(), Some(libc::EROFS));
            assert_eq!(fs::write("/dev/x", "x").unwrap_err().raw_os_error(), Some(libc::EROFS));
            fs::write("/tmp/x", "x").unwrap();
            fs::write("/dev/null", "x").unwrap();
        });
    }
}
