//! The first wall: a mount namespace that shows the host read-only, with things laid over it.
//!
//! The root of the namespace is a copy of the host's mounts (`namespace`). All mounts are made read-only, `nosuid` and `nodev`
//! first; then the steps of the [`layout`] are taken, each by mounting. What is shown in spite of being covered is opened
//! before anything is covered.
//!
//! Who is inside cannot take any of this away: the command has no CAP_SYS_ADMIN over these mounts, and in a user namespace of
//! its own it gets copies of them that are locked together (mount_namespaces(7)). Landlock refuses mounting altogether.

use std::collections::HashMap;
use std::ffi::OsString;
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

use super::layout::{Layout, Step, layout};
use super::talk::Spec;
use super::terminal;
use crate::control;
use crate::error::{Attempt, Error, Kind, Result};
use crate::sys;
use crate::sys::view::{Flags, remount, remount_listed, set_flags};

/// What a command finds in `/dev`, beside the terminal and what is made there.
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];
/// Links in `/dev`.
const LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];
/// Our own directory in the view: `/dev` is the one directory that every view has made anew.
const OWN: &str = "/dev/jailfs";
/// Where the command can read about where it is.
pub const README: &str = "/dev/jailfs/README";
/// What covers hidden files: an empty file.
const NOTHING: &str = "/dev/jailfs/nothing";
/// Below these, /proc is the kernel's and the machine's and not the processes'. It can be read and not written.
const MACHINE: &[&str] =
    &["acpi", "asound", "bus", "driver", "fs", "irq", "scsi", "sys", "sysrq-trigger", "tty"];
/// What of /proc shows the machine's memory, keys or timers.
const MACHINE_SECRETS: &[&str] =
    &["kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "timer_list", "sched_debug"];

/// How much each private directory for temporary files holds, of the machine's memory, and how many files. There are
/// three, so together they take less than the memory, which the default of the kernel does not hold.
const TMP_SIZE: &str = "20%";
const TMP_INODES: u32 = 1_000_000;
/// The same for directories that are shown empty: they hold mount points and one text.
const EMPTY_SIZE: &str = "4m";
const EMPTY_INODES: u32 = 10_000;

const READ_ONLY: Flags = Flags { read_only: true, ..Flags::NONE };
const NO_DEVICES: Flags = Flags { nodev: true, ..Flags::NONE };

/// Makes the view in the mount namespace of this process, up to the point where the sandbox is to be mounted. What has to be
/// hidden in the sandbox itself is returned.
///
/// # Errors
/// What cannot be mounted, and why. EPERM where the host does not let this namespace mount.
pub(super) fn make(spec: &Spec) -> Result<Layout> {
    std::env::set_current_dir("/").attempt(|| "leave the current directory")?;
    let plan = layout(spec, |path| sys::path::resolve(path).ok().filter(|path| path.is_dir()));
    let view = View { sources: sources(&plan)?, sealed: Vec::new(), tmp: private_options(spec) };
    seal_host()?;
    view.lay(spec, &plan)?;
    Ok(plan)
}

/// Makes every mount read-only, without setuid programs and devices; but /proc stays writable as it is, so that a new one may
/// be (the kernel gives nobody a /proc with more rights than the one that is to be seen).
fn seal_host() -> Result<()> {
    let attempt = || "make the host read-only";
    let writable_proc = statvfs("/proc").is_ok_and(|stat| !stat.flags().contains(FsFlags::ST_RDONLY));
    match set_flags(Path::new("/"), Flags::ALL, Flags::NONE, true) {
        Err(error) if is_missing_call(&error) => seal_one_by_one(),
        other => other,
    }
    .attempt(attempt)?;
    if writable_proc {
        change(Path::new("/proc"), Flags::NONE, READ_ONLY).attempt(attempt)?;
    }
    Ok(())
}

/// As one recursive call, where there is none.
fn seal_one_by_one() -> io::Result<()> {
    for entry in sys::mountinfo::read()? {
        match remount_listed(&entry, Flags::ALL, Flags::NONE) {
            Ok(()) => {}
            // Covered by a later mount, so nobody gets there either.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL | libc::EACCES)) => {}
            // Its process is dead: nothing can be written to it, nor read.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED | libc::EIO)) => {}
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

/// Something of the host, held while it is covered.
struct Source {
    held: OwnedFd,
    is_dir: bool,
    is_device: bool,
    /// It could be written before the host was made read-only.
    was_writable: bool,
}

impl Source {
    fn open(path: &Path) -> io::Result<Source> {
        let held = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        let kind = fs::metadata(by_number(&held))?.file_type();
        let was_writable = !statvfs(path)?.flags().contains(FsFlags::ST_RDONLY);
        let is_device = kind.is_char_device() || kind.is_block_device();
        Ok(Source { held, is_dir: kind.is_dir(), is_device, was_writable })
    }

    /// Mounts it, with what is mounted below it, at a path that must be there.
    fn bind(&self, to: &Path) -> io::Result<()> {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(&by_number(&self.held)), to, None::<&str>, flags, None::<&str>)?;
        Ok(())
    }
}

fn by_number<Fd: AsFd>(fd: &Fd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

/// Opens all that is to be seen although it lies in what gets covered.
fn sources(plan: &Layout) -> Result<HashMap<PathBuf, Source>> {
    let mut sources = HashMap::new();
    for (path, step) in &plan.steps {
        let wanted = match step {
            Step::Shown | Step::Writable => path.clone(),
            Step::Store => path.join(control::SOCKET),
            _ => continue,
        };
        let source = Source::open(&wanted).attempt(|| format!("open '{}'", wanted.display()))?;
        sources.insert(wanted, source);
    }
    for name in DEVICES {
        let path = Path::new("/dev").join(name);
        // What this host does not have, the command does not miss.
        if let Ok(source) = Source::open(&path) {
            sources.insert(path, source);
        }
    }
    if let Some(terminal) = terminal::path() {
        sources.insert("/dev/console".into(), Source::open(&terminal).attempt(|| "open the terminal")?);
    }
    Ok(sources)
}

struct View {
    sources: HashMap<PathBuf, Source>,
    /// Directories that were put in place empty, to be made read-only when all is in them.
    sealed: Vec<PathBuf>,
    /// Options of the private directories for temporary files.
    tmp: String,
}

impl View {
    fn lay(mut self, spec: &Spec, plan: &Layout) -> Result<()> {
        for (path, step) in &plan.steps {
            self.take(path, *step).map_err(|error| {
                let error =
                    Error::io(format!("put '{}' into the view of the command", path.display()), &error);
                error.kind(Kind::CannotMount)
            })?;
        }
        let attempt = || "finish the view of the command";
        fs::write(README, &spec.readme).attempt(attempt)?;
        for path in &self.sealed {
            change(path, READ_ONLY, Flags::NONE).attempt(attempt)?;
        }
        Ok(())
    }

    fn take(&mut self, path: &Path, step: Step) -> io::Result<()> {
        match step {
            Step::Private => {
                make_dir(path)?;
                mount_tmpfs(path, &self.tmp)
            }
            Step::Empty => {
                // A link is only a name: some hosts find all of their programs through /run/current-system.
                let links = links_in(path);
                self.sealed.push(path.to_owned());
                empty(path, 0o755)?;
                links.iter().try_for_each(|(name, target)| symlink(target, path.join(name)))
            }
            Step::Devices => {
                self.sealed.push(path.to_owned());
                empty(path, 0o755)?;
                self.devices()
            }
            Step::Hidden => self.hide(path),
            Step::Store => self.store(path),
            Step::Shown => self.show(path),
            Step::Writable => self.bind(path, true),
            Step::Tree => make_dir(path),
        }
    }

    fn devices(&self) -> io::Result<()> {
        let dev = Path::new("/dev");
        DirBuilder::new().mode(0o755).create(OWN)?;
        fs::write(NOTHING, "")?;
        fs::set_permissions(NOTHING, Permissions::from_mode(0o444))?;
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
        // Terminals belong to the group tty (5) where that has a number in our user namespace.
        match mount(Some("devpts"), &pts, Some("devpts"), flags, Some(format!("{options},gid=5").as_str())) {
            Err(Errno::EINVAL) => mount(Some("devpts"), &pts, Some("devpts"), flags, Some(options))?,
            other => other?,
        }
        Ok(())
    }

    /// Covers what is there, if anything is.
    fn hide(&mut self, path: &Path) -> io::Result<()> {
        if hide(path)? {
            self.sealed.push(path.to_owned());
        }
        Ok(())
    }

    fn store(&mut self, path: &Path) -> io::Result<()> {
        make_dir(path)?;
        empty(path, 0o700)?;
        self.sealed.push(path.to_owned());
        self.bind(&path.join(control::SOCKET), false)
    }

    /// Shows what may be covered; what is to be seen anyhow and cannot be written stays as it is.
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
        let clear = Flags { read_only: source.was_writable, nodev: source.is_device, nosuid: false };
        change(path, Flags::NONE, clear)
    }
}

/// Covers a path with nothing, if it exists; whether what covers it is a directory, which can still be written.
fn hide(path: &Path) -> io::Result<bool> {
    let about = match fs::metadata(path) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES)) => {
            return Ok(false);
        }
        other => other?,
    };
    if about.is_dir() {
        empty(path, 0o755)?;
        return Ok(true);
    }
    let flags = MsFlags::MS_BIND;
    mount(Some(NOTHING), path, None::<&str>, flags, None::<&str>)?;
    change(path, READ_ONLY, Flags::NONE)?;
    Ok(false)
}

/// Hides paths in the sandbox itself, which is served by now. A mount in it covers a name and changes nothing in it.
///
/// # Errors
/// What cannot be covered, and why.
pub(super) fn hide_inside(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        let attempt = || format!("hide '{}'", path.display());
        if hide(path).attempt(attempt)? {
            change(path, READ_ONLY, Flags::NONE).attempt(attempt)?;
        }
    }
    Ok(())
}

/// Mounts a /proc that shows the processes of this pid namespace only, and in any case keeps the machine's part of /proc from
/// being written and its secrets from being read. Whether the new one could be had: in a container that hides parts of its
/// own /proc the kernel refuses.
///
/// # Errors
/// What cannot be covered, and why.
pub(super) fn mount_proc() -> Result<bool> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let is_new = mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>).is_ok();
    let proc = Path::new("/proc");
    for path in MACHINE.iter().map(|name| proc.join(name)).filter(|path| path.exists()) {
        let attempt = || format!("make '{}' read-only", path.display());
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(&path), &path, None::<&str>, flags, None::<&str>)
            .map_err(io::Error::from)
            .attempt(attempt)?;
        change(&path, READ_ONLY, Flags::NONE).attempt(attempt)?;
    }
    for path in MACHINE_SECRETS.iter().map(|name| proc.join(name)) {
        hide(&path).attempt(|| format!("hide '{}'", path.display()))?;
    }
    Ok(is_new)
}

/// Mounts an empty directory, which holds no more than the view puts there.
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

/// The names and texts of the links in a directory.
fn links_in(dir: &Path) -> Vec<(OsString, PathBuf)> {
    let listed = fs::read_dir(dir).into_iter().flatten().flatten();
    listed.filter_map(|entry| Some((entry.file_name(), fs::read_link(entry.path()).ok()?))).collect()
}

/// Makes a directory, and those above it, where they are not there: that can only be in what was put there empty.
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

    /// Runs `test` in a mount namespace, with a spec whose base, store and program lie in a directory of its own.
    fn in_a_view(test: impl FnOnce(&Path, Spec) + Send + 'static) {
        std::thread::spawn(|| {
            let dir = tempfile::tempdir().unwrap();
            let root = sys::path::resolve(dir.path()).unwrap();
            namespace::private_mounts_of_this_thread();
            for made in ["base", "store", "home/.ssh", "home/.config"] {
                fs::create_dir_all(root.join(made)).unwrap();
            }
            let _socket = std::os::unix::net::UnixListener::bind(root.join("store/control")).unwrap();
            for (file, text) in [("store/format", "1"), ("home/.ssh/id", "key"), ("home/.netrc", "password")]
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
    fn the_host_is_read_only_and_what_is_hidden_is_empty() {
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
            let names =
                |path: &Path| fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
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
    fn without_the_new_call_mounts_are_sealed_one_by_one() {
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
