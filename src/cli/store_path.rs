//! Finds the store of a base, and refuses paths that exclude each other.
//!
//! The path of a base determines its store: `<state>/jailfs/<id>`. The id is the base's name, for
//! people, and a checksum of its whole path. A collision of checksums does no harm: a store records
//! its base and refuses another.

use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::host;
use crate::base::Base;
use crate::control;
use crate::control::{ENDING_LIMIT, PAUSE};
use crate::error::{Attempt, Error, Kind, Result};
use crate::sandbox::{FIRST_HEAD, is_base_of};
use crate::store;

/// The maximum number of bytes of the base's name in the id.
const ID_NAME_MAX: usize = 100;

/// A daemon without a mount here is asked this long after its first greeting whether it has one
/// elsewhere. If its mount has just gone, it needs a moment to notice.
const ASK_AFTER: Duration = Duration::from_secs(2);

/// The inputs of the default directory of stores.
pub(super) struct Env {
    pub(super) xdg_state_home: Option<OsString>,
    pub(super) home: Option<OsString>,
    pub(super) root: bool,
}

impl Env {
    /// Reads the environment of this process.
    pub(super) fn get() -> Env {
        Env {
            xdg_state_home: std::env::var_os("XDG_STATE_HOME"),
            home: std::env::var_os("HOME"),
            root: nix::unistd::geteuid().is_root(),
        }
    }

    /// The directory of stores. A relative path in a variable counts as unset (XDG Base Directory
    /// Specification).
    pub(super) fn stores(&self) -> Option<PathBuf> {
        let absolute = |value: &Option<OsString>| {
            value.as_ref().map(PathBuf::from).filter(|p| p.is_absolute())
        };
        absolute(&self.xdg_state_home)
            .or_else(|| absolute(&self.home).map(|home| home.join(".local/state")))
            .or_else(|| self.root.then(|| PathBuf::from("/var/lib")))
            .map(|state| state.join("jailfs"))
    }

    /// The default store of `base`, which must be absolute and resolved.
    ///
    /// # Errors
    /// `Usage`: neither variable is set.
    pub(super) fn default_store(&self, base: &Path) -> Result<PathBuf> {
        let stores = self.stores().ok_or_else(|| {
            Error::new(
                Kind::Usage,
                "choose a directory for the store",
                "neither XDG_STATE_HOME nor HOME is set",
            )
            .hint("name one with --store DIR")
        })?;
        Ok(stores.join(id(base)))
    }
}

/// The name of the store of `base`: `repo-1f2e3d4c`.
fn id(base: &Path) -> OsString {
    let name = base.file_name().unwrap_or(OsStr::new("root")).as_bytes();
    let mut id = name.get(..ID_NAME_MAX).unwrap_or(name).to_vec();
    id.extend_from_slice(
        format!("-{:08x}", crc32c::crc32c(base.as_os_str().as_bytes())).as_bytes(),
    );
    OsString::from_vec(id)
}

/// An unused default store that was made for `base` when it was at another path.
fn store_from_elsewhere(stores: &Path, base: &Path) -> Option<PathBuf> {
    let all = std::fs::read_dir(stores).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    // A directory that is visible at two paths has a store for each.
    let is_orphan = |store: &PathBuf| {
        let was = store::base_of(store).map(|known| PathBuf::from(OsString::from_vec(known.path)));
        was.is_ok_and(|was| was.symlink_metadata().is_err())
    };
    let orphans: Vec<PathBuf> = all.filter(is_orphan).collect();
    if orphans.is_empty() {
        return None;
    }
    let base = Base::open(base).ok()?;
    orphans.into_iter().find(|store| {
        is_base_of(store, &base).unwrap_or(false) && matches!(control::connect(store), Ok(None))
    })
}

/// The default store of `base`, if it exists. The store of a base that was moved is renamed along.
pub(super) fn existing_default(env: &Env, base: &Path) -> Option<PathBuf> {
    let store = env.default_store(base).ok()?;
    if store.is_dir() {
        return Some(store);
    }
    let found = store_from_elsewhere(&env.stores()?, base)?;
    match std::fs::rename(&found, &store) {
        Ok(()) => Some(store),
        Err(error) => {
            log::warn!("'{}' stays where it is: {error}", found.display());
            Some(found)
        }
    }
}

/// The store for `base`: the named one, or the default one. Creates the parents of the default one.
///
/// # Errors
/// The parent directory does not exist or cannot be created.
pub(super) fn store_for(base: &Path, named: Option<&Path>) -> Result<PathBuf> {
    let store = match named {
        Some(store) => store.to_owned(),
        None => {
            let env = Env::get();
            if let Some(store) = existing_default(&env, base) {
                return resolve_new(&store);
            }
            let store = env.default_store(base)?;
            let parent = store.parent().unwrap_or(Path::new("/"));
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(parent)
                .attempt(|| format!("create '{}'", parent.display()))?;
            store
        }
    };
    resolve_new(&store)
}

/// The resolved absolute path of a file that may not exist yet. Its parent must exist.
pub(super) fn resolve_new(path: &Path) -> Result<PathBuf> {
    if path.symlink_metadata().is_ok() {
        return host::resolve(path);
    }
    let parent =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match path.file_name() {
        Some(name) => Ok(host::resolve(parent)?.join(name)),
        None => host::resolve(path),
    }
}

/// Refuses paths that exclude each other. All are absolute and resolved.
///
/// # Errors
/// `CannotMount`, with a hint.
pub(super) fn check(base: &Path, mount_point: &Path, store: &Path) -> Result<()> {
    let refuse = |reason: &str, hint: &str| {
        let attempt = format!("mount '{}' at '{}'", base.display(), mount_point.display());
        Err(Error::new(Kind::CannotMount, attempt, reason.to_owned()).hint(hint.to_owned()))
    };
    let elsewhere = "name another directory with --store DIR";
    if store.starts_with(base) {
        return refuse(&format!("the store '{}' is inside the base", store.display()), elsewhere);
    }
    if base.starts_with(store) {
        return refuse(&format!("the base is inside the store '{}'", store.display()), elsewhere);
    }
    if store.starts_with(mount_point) {
        return refuse(&format!("the mount would hide the store '{}'", store.display()), elsewhere);
    }
    if mount_point.starts_with(store) {
        return refuse("the mount point is inside the store", "choose another mount point");
    }
    if mount_point != base && mount_point.starts_with(base) {
        return refuse(
            "the mount point is inside the base, so the mount would contain itself",
            "mount it beside the base, or over the base itself",
        );
    }
    if mount_point != base && base.starts_with(mount_point) {
        return refuse(
            "the base is inside the mount point, so the mount would hide it",
            "mount it beside the base, or over the base itself",
        );
    }
    Ok(())
}

/// The head that the command line means, for a command that makes the store if it is missing. A new
/// store has the first head only.
///
/// # Errors
/// `NoStore`: there is no store, and another head is named.
pub(super) fn head_in(store: &Path, named: Option<&str>) -> Result<String> {
    let head = named.unwrap_or(FIRST_HEAD);
    if head == FIRST_HEAD || store::exists(store) {
        return Ok(head.to_owned());
    }
    let attempt = format!("find head '{head}' in '{}'", store.display());
    Err(Error::new(Kind::NoStore, attempt, "there is no store yet")
        .hint("use it without --head first; 'jailfs fork NAME' makes another head"))
}

/// Refuses a store that a daemon holds, and says where it is mounted. Waits for a daemon that is
/// just ending because umount(8) or a signal removed its last mount.
///
/// # Errors
/// `InUse`, with a hint.
pub(super) fn check_free(store: &Path, attempt: &str) -> Result<()> {
    let Some((pid, point)) = mount_that_stays(store)? else { return Ok(()) };
    let mount = point.display();
    let reason = format!("its sandbox is mounted at '{mount}' (process {pid})");
    Err(Error::new(Kind::InUse, attempt, reason).hint(format!(
        "work in it, or end it with 'jailfs umount {mount}'; a second \
                sandbox needs a store of its own: --store DIR"
    )))
}

/// The daemon of a store and one of its mount points, unless it ends soon.
///
/// # Errors
/// It does not answer, or has no mount and does not end.
pub(super) fn mount_that_stays(store: &Path) -> Result<Option<(u32, PathBuf)>> {
    let start = Instant::now();
    let (mut greeted, end) = (None, start + ENDING_LIMIT);
    loop {
        let asked = match control::connect(store) {
            Ok(None) => return Ok(None),
            Ok(Some(mut daemon)) => {
                daemon.mounts().map(|mounts| (daemon.greeting().pid, mounts.heads))
            }
            Err(error) => Err(error),
        };
        let (pid, heads) = match asked {
            Ok(asked) => asked,
            // An ending daemon accepts no more connections.
            Err(_) if Instant::now() < end => {
                thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(error),
        };
        let points =
            heads.into_iter().map(|one| PathBuf::from(OsString::from_vec(one.mount_point)));
        let points: Vec<PathBuf> = points.collect();
        let is_here = |point: &&PathBuf| {
            host::mount_around(point).is_ok_and(|found| found.as_ref() == Some(point))
        };
        let now = Instant::now();
        let ask = *greeted.get_or_insert(now) + ASK_AFTER;
        // A mount may be in another mount namespace, as that of a `run`.
        let elsewhere = points.first().filter(|_| now > ask);
        if let Some(point) = points.iter().find(is_here).or(elsewhere) {
            return Ok(Some((pid, point.clone())));
        }
        if now > end {
            let attempt = format!("wait for the end of process {pid}, which has the store open");
            return Err(Error::new(Kind::InUse, attempt, "it has no mount, and does not end"));
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(xdg: Option<&str>, home: Option<&str>, root: bool) -> Env {
        Env { xdg_state_home: xdg.map(Into::into), home: home.map(Into::into), root }
    }

    #[test]
    fn the_default_store_follows_the_environment() {
        let at = |env: Env| env.default_store(Path::new("/src/repo"));
        let id = id(Path::new("/src/repo")).into_string().unwrap();
        assert!(id.starts_with("repo-") && id.len() == "repo-".len() + 8, "{id}");
        let table = [
            (env(Some("/x"), Some("/h"), false), format!("/x/jailfs/{id}")),
            (env(Some("x"), Some("/h"), false), format!("/h/.local/state/jailfs/{id}")),
            (env(Some(""), Some("/h"), true), format!("/h/.local/state/jailfs/{id}")),
            (env(None, None, true), format!("/var/lib/jailfs/{id}")),
        ];
        for (env, store) in table {
            assert_eq!(at(env).unwrap(), PathBuf::from(store));
        }
        assert_eq!(at(env(None, Some("h"), false)).unwrap_err().kind, Kind::Usage);
    }

    #[test]
    fn the_id_of_a_base_is_unique_and_stable() {
        assert_eq!(id(Path::new("/")), format!("root-{:08x}", crc32c::crc32c(b"/")).as_str());
        assert_ne!(id(Path::new("/a/repo")), id(Path::new("/b/repo")));
        // CRC-32C of "123456789" is a published check value.
        assert_eq!(id(Path::new("123456789")), "123456789-e3069283");
        let long = PathBuf::from(format!("/{}", "x".repeat(255)));
        assert!(id(&long).len() <= 255);
        assert!(id(Path::new(OsStr::from_bytes(b"/\xff"))).as_bytes().starts_with(b"\xff-"));
    }

    #[test]
    fn paths_that_exclude_each_other_are_refused() {
        let ok = |base: &str, mnt: &str, store: &str| {
            check(base.as_ref(), mnt.as_ref(), store.as_ref()).is_ok()
        };
        let table = [
            ("/r", "/m", "/s", true),
            ("/r", "/r", "/s", true),
            ("/r", "/r2", "/rs", true),
            ("/r", "/m", "/r/s", false),
            ("/r", "/m", "/r", false),
            ("/s/r", "/m", "/s", false),
            ("/r", "/m", "/m/s", false),
            ("/r", "/m", "/m", false),
            ("/r", "/s/m", "/s", false),
            ("/r", "/r/m", "/s", false),
            ("/m/r", "/m", "/s", false),
            ("/", "/m", "/s", false),
        ];
        for (base, mnt, store, allowed) in table {
            assert_eq!(
                ok(base, mnt, store),
                allowed,
                "base {base}, mount point {mnt}, store {store}"
            );
        }
        let error = check("/r".as_ref(), "/m".as_ref(), "/r/s".as_ref()).unwrap_err();
        assert!(error.kind == Kind::CannotMount && error.hint.is_some());
    }

    #[test]
    fn a_store_need_not_exist_but_its_parent_must() {
        let dir = tempfile::tempdir().unwrap();
        let real = host::resolve(dir.path()).unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).unwrap();
        assert_eq!(resolve_new(&dir.path().join("link/new")).unwrap(), real.join("new"));
        assert_eq!(resolve_new(&dir.path().join("link")).unwrap(), real);
        assert!(resolve_new(&dir.path().join("missing/new")).is_err());
    }
}
