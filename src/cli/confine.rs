//! The options of `jailfs run` that say what its command may see and do, and what becomes of them.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{Global, host, place};
use crate::error::{Error, Kind, Result};
use crate::run::{README, Spec, keeps_variable, readme, secrets};

/// Sockets below these are covered with the directory that they are in; the paths under /proc are of no process but their own.
const COVERED: &[&str] = &["/run", "/var/run", "/tmp", "/var/tmp", "/dev", "/proc"];
/// The kernel's list of sockets in this network namespace (proc_net(5)).
const SOCKETS: &str = "/proc/net/unix";

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Confinement")]
pub(super) struct Confine {
    /// Hide PATH too: it is shown empty
    #[arg(long, value_name = "PATH")]
    hide: Vec<PathBuf>,
    /// Show PATH, read-only, although it is hidden by default
    #[arg(long, value_name = "PATH")]
    show: Vec<PathBuf>,
    /// Show PATH of the host, read-only, although /tmp or /run or what it lies in is replaced
    #[arg(long, value_name = "PATH")]
    bind_ro: Vec<PathBuf>,
    /// Let the command write to PATH of the host, outside the sandbox
    #[arg(long, value_name = "PATH")]
    bind_rw: Vec<PathBuf>,
    /// No network but a loopback
    #[arg(long)]
    no_net: bool,
    /// Only HOME, LANG, LC_*, LOGNAME, PATH, SHELL, TERM, TZ and USER of the environment
    #[arg(long)]
    env_clear: bool,
    /// Fail unless both walls stand: namespaces with a view of their own, and Landlock
    #[arg(long)]
    pub(super) require_confinement: bool,
}

impl Confine {
    /// What is to be put up for a sandbox of `base` with its store at `store`.
    ///
    /// # Errors
    /// `Usage`: a path that does not exist, or lies in the sandbox.
    pub(super) fn spec(&self, global: &Global, base: &Path, store: &Path) -> Result<Spec> {
        refuse_base(base)?;
        let given = |option: &str, paths: &[PathBuf]| -> Result<Vec<PathBuf>> {
            paths.iter().map(|path| named(global, option, path)).collect()
        };
        let outside =
            |option: &str, paths: Vec<PathBuf>| match paths.iter().find(|path| path.starts_with(base)) {
                Some(path) => {
                    Err(wrong(option, path, "it lies in the sandbox, which is writable and nobody else's"))
                }
                None => Ok(paths),
            };
        let writable = outside("--bind-rw", given("--bind-rw", &self.bind_rw)?)?;
        let mut shown = outside("--show", given("--show", &self.show)?)?;
        shown.extend(outside("--bind-ro", given("--bind-ro", &self.bind_ro)?)?);
        // By it names are resolved; it often lies in /run.
        shown.extend(real("/etc/resolv.conf").filter(|path| !path.starts_with(base)));
        let mut hidden = given("--hide", &self.hide)?;
        let homes = homes();
        hidden.extend(secrets::hidden(&homes).iter().filter_map(real));
        hidden.extend(sockets());
        let mut stores: Vec<PathBuf> = secrets::stores(&homes).iter().filter_map(real).collect();
        stores.extend(place::Env::get().stores().and_then(real));
        for paths in [&mut hidden, &mut stores] {
            // Who runs a command in what is hidden by default wants it to work there.
            paths.retain(|path| path != base);
            paths.sort();
            paths.dedup();
        }
        let told: Vec<PathBuf> = hidden
            .iter()
            .filter(|path| !shown.iter().any(|shown| path.starts_with(shown)))
            .cloned()
            .collect();
        Ok(Spec {
            readme: readme(base, &writable, &told),
            base: base.into(),
            store: store.into(),
            stores: words(stores),
            hidden: words(hidden),
            shown: words(shown),
            writable: words(writable),
            program: real("/proc/self/exe").unwrap_or_default().into(),
            no_net: self.no_net,
            elsewhere: None,
        })
    }

    /// The environment of the command, and what tells it where it is.
    pub(super) fn environment(&self, spec: &Spec, attempt: u32) -> Vec<(OsString, OsString)> {
        let paths = |words: &[OsString]| words.iter().map(PathBuf::from).collect::<Vec<_>>();
        let writable = paths(&spec.writable);
        let shown: Vec<PathBuf> = paths(&spec.shown).into_iter().chain(writable.iter().cloned()).collect();
        let mut env: Vec<_> = std::env::vars_os()
            .filter(|(name, value)| keeps_variable(name, value, self.env_clear, &shown))
            .filter(|(name, value)| name != "TMPDIR" || is_scratch(value, spec, &writable))
            .collect();
        let root = match &spec.elsewhere {
            Some((mount, scratch)) => {
                env.retain(|(name, _)| name != "TMPDIR");
                env.push(("TMPDIR".into(), scratch.clone()));
                mount
            }
            None => {
                env.push(("JAILFS_README".into(), README.into()));
                &spec.base
            }
        };
        let told = [("JAILFS_ROOT", root.clone()), ("JAILFS_SANDBOX", spec.store.clone())];
        env.extend(told.map(|(name, value)| (name.into(), value)));
        env.push(("JAILFS_ATTEMPT".into(), attempt.to_string().into()));
        env
    }
}

/// Whether a directory for temporary files can be written in the sandbox.
fn is_scratch(value: &OsStr, spec: &Spec, writable: &[PathBuf]) -> bool {
    let path = Path::new(value);
    let private = ["/tmp", "/var/tmp", "/dev/shm"].iter().any(|known| path == Path::new(known));
    private || path.starts_with(&spec.base) || writable.iter().any(|known| path.starts_with(known))
}

/// A base whose place in the view belongs to the kernel cannot be one.
fn refuse_base(base: &Path) -> Result<()> {
    let is_kernels = ["/proc", "/sys"].iter().any(|known| base.starts_with(known));
    let is_device =
        base.starts_with("/dev") && !(base.starts_with("/dev/shm") && base != Path::new("/dev/shm"));
    if is_kernels || is_device {
        let attempt = format!("run a command in a sandbox of '{}'", base.display());
        return Err(Error::new(Kind::Usage, attempt, "it is the kernel's"));
    }
    Ok(())
}

fn named(global: &Global, option: &str, path: &Path) -> Result<PathBuf> {
    let path = global.at(path)?;
    host::resolve(&path).map_err(|error| wrong(option, &path, &error.reason))
}

fn wrong(option: &str, path: &Path, reason: &str) -> Error {
    Error::new(Kind::Usage, format!("{option} '{}'", path.display()), reason)
}

fn words(paths: Vec<PathBuf>) -> Vec<OsString> {
    paths.into_iter().map(PathBuf::into_os_string).collect()
}

/// The path without links of what is there.
fn real(path: impl AsRef<Path>) -> Option<PathBuf> {
    host::resolve(path.as_ref()).ok()
}

fn homes() -> Vec<PathBuf> {
    let known = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.dir);
    let told = std::env::var_os("HOME").map(PathBuf::from);
    secrets::homes(known.into_iter().chain(told))
}

/// The sockets that somebody listens on at a path: a read-only mount keeps nobody from connecting to them.
fn sockets() -> Vec<PathBuf> {
    let text = std::fs::read(SOCKETS).unwrap_or_default();
    let paths = text.split(|byte| *byte == b'\n').filter_map(socket_path);
    let open = paths.filter(|path| !COVERED.iter().any(|covered| path.starts_with(covered)));
    open.filter(|path| path.symlink_metadata().is_ok_and(|about| about.file_type().is_socket()))
        .filter_map(real)
        .collect()
}

/// The path in a line of the kernel's list: the eighth field, if there is one that is absolute.
fn socket_path(line: &[u8]) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let at = line.windows(2).position(|two| two == b" /")?;
    Some(OsStr::from_bytes(line.get(at + 1..)?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_sockets_are_found_by_their_path() {
        let line = b"ffff: 00000002 00000000 00010000 0001 01 1234 /srv/a b.sock";
        assert_eq!(socket_path(line), Some("/srv/a b.sock".into()));
        assert_eq!(socket_path(b"ffff: 00000002 00000000 00010000 0001 01 1234 @abstract"), None);
        assert_eq!(socket_path(b"Num RefCount Protocol Flags Type St Inode Path"), None);
    }

    #[test]
    fn what_is_the_kernels_is_no_base() {
        for base in ["/proc", "/proc/self", "/sys/fs", "/dev", "/dev/shm", "/dev/pts"] {
            assert_eq!(refuse_base(Path::new(base)).unwrap_err().kind, Kind::Usage, "{base}");
        }
        for base in ["/", "/dev/shm/x", "/process", "/tmp"] {
            refuse_base(Path::new(base)).unwrap();
        }
    }

    #[test]
    fn a_place_for_temporary_files_must_be_writable_inside() {
        let spec = Spec { base: "/repo".into(), ..Spec::default() };
        let ok = |path: &str| is_scratch(OsStr::new(path), &spec, &["/w".into()]);
        assert!(ok("/tmp") && ok("/repo/tmp") && ok("/w/x"));
        assert!(!ok("/var/folders/x") && !ok("/tmp/only-on-the-host"));
    }
}
