//! The options of `jailfs run` that limit what its command may see and do.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use clap::Args;

use super::{Global, host, options, sockets, store_path};
use crate::error::{Attempt, Error, Kind, Result};
use crate::run::{Accept, Allow, Net, README, Spec, keeps_variable, readme, secrets};
use crate::sys;

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Confinement")]
pub(super) struct Confine {
    /// Hide PATH, whatever the other options say
    #[arg(long, value_name = "PATH")]
    hide: Vec<PathBuf>,
    /// Show PATH, read-only, including everything in it that is hidden by default
    #[arg(long, value_name = "PATH")]
    show: Vec<PathBuf>,
    /// Show PATH of the host, read-only, also inside /tmp, /run or a hidden directory; hidden paths
    /// in it stay hidden
    #[arg(long, value_name = "PATH")]
    bind_ro: Vec<PathBuf>,
    /// Let the command write to PATH of the host, outside the sandbox
    #[arg(long, value_name = "PATH")]
    bind_rw: Vec<PathBuf>,
    /// The network of the command: host, none (a loopback), or allow:HOST[:PORT],... (a loopback,
    /// and a proxy to these hosts; *.HOST for the names below HOST; without PORT, 80 and 443)
    #[arg(long, value_name = "NET", default_value = "host", value_parser = Net::parse)]
    net: Net,
    /// The same as --net none
    #[arg(long, conflicts_with = "net")]
    no_net: bool,
    /// Keep only HOME, LANG, LC_*, LOGNAME, PATH, SHELL, TERM, TZ and USER of the environment
    #[arg(long)]
    env_clear: bool,
    /// The walls without which 'run' refuses: all (namespaces, Landlock, the filter on system
    /// calls), view (Landlock may be missing), or landlock (namespaces may be missing; not as root)
    #[arg(long, value_name = "WALLS", default_value = "all", value_parser = walls)]
    walls: Accept,
    /// Allow the command what the filter on system calls denies: nested-sandbox, keyrings, bpf,
    /// perf, userfaultfd, io-uring, sockets
    #[arg(long, value_name = "OPTION", value_delimiter = ',', value_parser = allow)]
    allow: Vec<Allow>,
    /// The size of each of /tmp, /var/tmp and /dev/shm inside, in bytes or with K, M, G, T
    /// (default: 20 percent of memory)
    #[arg(long, value_name = "SIZE", value_parser = options::size)]
    tmp_size: Option<u64>,
}

fn walls(text: &str) -> std::result::Result<Accept, String> {
    match text {
        "all" => Ok(Accept::All),
        "view" => Ok(Accept::View),
        "landlock" => Ok(Accept::Landlock),
        _ => Err("the value is all, view or landlock".to_owned()),
    }
}

fn allow(text: &str) -> std::result::Result<Allow, String> {
    let found = Allow::ALL.iter().find(|(word, _)| *word == text).map(|(_, allow)| *allow);
    found.ok_or_else(|| {
        let words: Vec<&str> = Allow::ALL.iter().map(|(word, _)| *word).collect();
        format!("it is one of {}", words.join(", "))
    })
}

impl Confine {
    /// The walls for a sandbox of `base` with its store at `store`.
    ///
    /// # Errors
    /// `Usage`: a path that does not exist, or lies in the sandbox.
    pub(super) fn spec(&self, global: &Global, base: &Path, store: &Path) -> Result<Spec> {
        refuse_base(base)?;
        let homes = homes();
        let mut hidden: Vec<PathBuf> = secrets::hidden(&homes).iter().filter_map(real).collect();
        hidden.extend(sockets::all().iter().filter_map(real));
        let mut stores: Vec<PathBuf> = secrets::stores(&homes).iter().filter_map(real).collect();
        stores.extend(store_path::Env::get().stores().and_then(real));
        stores.extend(host::mounted_stores().iter().filter_map(real));
        stores.extend(real(store));
        let mounts = sys::mountinfo::read().unwrap_or_default();
        add_other_paths(&mut stores, &mounts);
        let asked = Asked { global, base, stores: &stores };
        let writable = asked.outside("--bind-rw", &self.bind_rw)?;
        let shown = asked.shown(&self.show, &hidden)?;
        let mut bound = asked.outside("--bind-ro", &self.bind_ro)?;
        // Names are resolved with this file, which often lies in /run.
        bound.extend(real("/etc/resolv.conf").filter(|path| !path.starts_with(base)));
        let hide = self.hide.iter().map(|path| resolved(global, "--hide", path));
        let mut withheld = hide.collect::<Result<Vec<_>>>()?;
        // A path that is mounted elsewhere too is hidden at all its places.
        add_other_paths(&mut hidden, &mounts);
        add_other_paths(&mut withheld, &mounts);
        for paths in [&mut hidden, &mut withheld, &mut stores] {
            // If the base itself is hidden by default, the caller wants the command to work in it.
            paths.retain(|path| path != base);
            paths.sort();
            paths.dedup();
        }
        let spec = Spec {
            base: base.into(),
            store: store.into(),
            hidden: words(hidden),
            withheld: words(withheld),
            shown: words(shown),
            bound: words(bound),
            writable: words(writable.clone()),
            program: real("/proc/self/exe").unwrap_or_default().into(),
            net: self.net(),
            accept: self.walls,
            allow: self.allow.clone(),
            tmp_size: self.tmp_size,
            ..Spec::default()
        };
        let readme = readme(base, &writable, &crate::run::hidden(&spec), &spec.net);
        Ok(Spec { readme, stores: words(stores), ..spec })
    }

    /// The network that the options select.
    fn net(&self) -> Net {
        if self.no_net { Net::None } else { self.net.clone() }
    }

    /// Decides whether the command may run without namespaces. Returns the refusal if it may, as a
    /// warning.
    ///
    /// # Errors
    /// The refusal, with the option that accepts less. That option does not help root, who owns the
    /// files of the host: Landlock does not control modes and owners. It does not help with a
    /// network other than the host's either, which needs a namespace.
    pub(super) fn accept_without_namespaces(&self, refused: Error) -> Result<Error> {
        let is_root = nix::unistd::geteuid().is_root();
        if self.walls == Accept::Landlock && self.net().is_own() {
            let why = format!("{}; --net none and --net allow need namespaces", refused.reason);
            return Err(Error { reason: why, ..refused });
        }
        match (self.walls, is_root) {
            (Accept::Landlock, false) => Ok(refused),
            (Accept::Landlock, true) => {
                let why = format!("{}; Landlock alone does not confine root", refused.reason);
                Err(Error { reason: why, ..refused })
            }
            (_, true) => Err(refused),
            (_, false) => {
                let less = "--walls=landlock runs the command without namespaces; \
             docs/CONTAINERS.md says what that leaves open";
                let hint = refused
                    .hint
                    .as_deref()
                    .map_or_else(|| less.to_owned(), |hint| format!("{hint}; {less}"));
                Err(refused.hint(hint))
            }
        }
    }

    /// The environment of the command, with the variables that describe the sandbox.
    pub(super) fn environment(&self, spec: &Spec, attempt: u32) -> Vec<(OsString, OsString)> {
        let paths = |words: &[OsString]| words.iter().map(PathBuf::from).collect::<Vec<_>>();
        let writable = paths(&spec.writable);
        let named = spec.shown.iter().chain(&spec.bound).chain(&spec.writable);
        let shown: Vec<PathBuf> = named.map(PathBuf::from).collect();
        let mut env: Vec<_> = std::env::vars_os()
            .filter(|(name, value)| keeps_variable(name, value, self.env_clear, &shown))
            .filter(|(name, value)| name != "TMPDIR" || is_scratch(value, spec, &writable))
            .filter(|(name, _)| !spec.net.drops_variable(name.to_str().unwrap_or_default()))
            .collect();
        env.extend(
            spec.net.variables().into_iter().map(|(name, value)| (name.into(), value.into())),
        );
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
        let described = [("JAILFS_ROOT", root.clone()), ("JAILFS_SANDBOX", spec.store.clone())];
        env.extend(described.map(|(name, value)| (name.into(), value)));
        env.push(("JAILFS_ATTEMPT".into(), attempt.to_string().into()));
        env
    }
}

/// The context in which the paths of options are checked.
struct Asked<'a> {
    global: &'a Global,
    base: &'a Path,
    stores: &'a [PathBuf],
}

impl Asked<'_> {
    fn paths(&self, option: &str, paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
        paths.iter().map(|path| named(self.global, option, path)).collect()
    }

    /// Resolves paths that must lie neither in the sandbox nor in a store.
    fn outside(&self, option: &str, paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let paths = self.paths(option, paths)?;
        for path in &paths {
            self.check_store(option, path)?;
            self.check_sandbox(option, path)?;
        }
        Ok(paths)
    }

    /// Resolves the paths of --show. A path in the sandbox is refused unless something in it is
    /// hidden.
    fn shown(&self, paths: &[PathBuf], hidden: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let option = "--show";
        let paths = self.paths(option, paths)?;
        for path in &paths {
            self.check_store(option, path)?;
            if !hidden.iter().any(|hidden| hidden.starts_with(path)) {
                self.check_sandbox(option, path)?;
            }
        }
        Ok(paths)
    }

    fn check_store(&self, option: &str, path: &Path) -> Result<()> {
        if self.stores.iter().any(|store| path.starts_with(store)) {
            return Err(wrong(option, path, "stores are never shown to a command"));
        }
        Ok(())
    }

    fn check_sandbox(&self, option: &str, path: &Path) -> Result<()> {
        if path.starts_with(self.base) {
            return Err(wrong(
                option,
                path,
                "it lies in the sandbox, which the command can write anyway",
            ));
        }
        Ok(())
    }
}

/// Whether the command can write a directory for temporary files.
fn is_scratch(value: &OsStr, spec: &Spec, writable: &[PathBuf]) -> bool {
    let path = Path::new(value);
    let private = ["/tmp", "/var/tmp", "/dev/shm"].iter().any(|known| path == Path::new(known));
    private || path.starts_with(&spec.base) || writable.iter().any(|known| path.starts_with(known))
}

/// Refuses a base that the view replaces or that belongs to the kernel.
fn refuse_base(base: &Path) -> Result<()> {
    let belongs_to_kernel = ["/proc", "/sys"].iter().any(|known| base.starts_with(known));
    let is_device = base.starts_with("/dev")
        && !(base.starts_with("/dev/shm") && base != Path::new("/dev/shm"));
    if belongs_to_kernel || is_device {
        let attempt = format!("run a command in a sandbox of '{}'", base.display());
        return Err(Error::new(Kind::Usage, attempt, "it belongs to the kernel"));
    }
    Ok(())
}

/// Resolves the path of an option. Refuses symlinks: an earlier command may have planted one in a
/// directory that it could write, so that the next command gets the symlink's target.
fn named(global: &Global, option: &str, path: &Path) -> Result<PathBuf> {
    let resolved = resolved(global, option, path)?;
    let path = std::path::absolute(global.at(path)?).attempt(|| format!("read {option}"))?;
    if plain(&path) == resolved {
        return Ok(resolved);
    }
    let why = format!("it leads through a symlink to '{}'", resolved.display());
    Err(wrong(option, &path, &why).hint(format!("name '{}' if you mean it", resolved.display())))
}

fn resolved(global: &Global, option: &str, path: &Path) -> Result<PathBuf> {
    let path = global.at(path)?;
    host::resolve(&path).map_err(|error| wrong(option, &path, &error.reason))
}

/// The path without `.` and `..`, by its text alone.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
        plain
    })
}

fn wrong(option: &str, path: &Path, reason: &str) -> Error {
    Error::new(Kind::Usage, format!("{option} '{}'", path.display()), reason)
}

fn words(paths: Vec<PathBuf>) -> Vec<OsString> {
    paths.into_iter().map(PathBuf::into_os_string).collect()
}

/// The resolved path, if it exists.
fn real(path: impl AsRef<Path>) -> Option<PathBuf> {
    host::resolve(path.as_ref()).ok()
}

/// Adds the other places at which these paths are mounted.
fn add_other_paths(paths: &mut Vec<PathBuf>, mounts: &[sys::mountinfo::Entry]) {
    let elsewhere = paths.iter().flat_map(|path| sys::mountinfo::other_paths_of(path, mounts));
    let elsewhere: Vec<PathBuf> = elsewhere.filter_map(real).collect();
    paths.extend(elsewhere);
}

fn homes() -> Vec<PathBuf> {
    let known =
        nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.dir);
    let from_env = std::env::var_os("HOME").map(PathBuf::from);
    secrets::homes(known.into_iter().chain(from_env))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_the_kernel_is_not_a_base() {
        for base in ["/proc", "/proc/self", "/sys/fs", "/dev", "/dev/shm", "/dev/pts"] {
            assert_eq!(refuse_base(Path::new(base)).unwrap_err().kind, Kind::Usage, "{base}");
        }
        for base in ["/", "/dev/shm/x", "/process", "/tmp"] {
            refuse_base(Path::new(base)).unwrap();
        }
    }

    #[test]
    fn a_directory_for_temporary_files_must_be_writable_inside() {
        let spec = Spec { base: "/repo".into(), ..Spec::default() };
        let ok = |path: &str| is_scratch(OsStr::new(path), &spec, &["/w".into()]);
        assert!(ok("/tmp") && ok("/repo/tmp") && ok("/w/x"));
        assert!(!ok("/var/folders/x") && !ok("/tmp/only-on-the-host"));
    }
}
