//! Finds the sandbox that a command means, and reaches it.
//!
//! The first that exists is taken, in this order:
//!
//! 1. The store of `--store`.
//! 2. The mount in which the directory (`-C` or the current one) lies.
//! 3. A default store of the directory or of one above it, so that a command in a base finds its
//!    sandbox.
//! 4. Without `-C`, the sandbox of the surrounding `jailfs run` (JAILFS_SANDBOX). The variable
//!    comes last because it can outlive its command, for example in a terminal multiplexer, and
//!    must not redirect a command in another base.
//!
//! The head is that of `--head`, else that of the mount in which the directory lies. Without both
//! it is `main`, or the only mounted one.
//!
//! If a daemon holds the store, it handles the request. Otherwise this process takes the lock and
//! handles it. A daemon that ends closes the connection without an answer; then this process waits
//! until it has closed the store.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::Global;
use super::host::{self, Within};
use super::protected;
use super::store_path::{self, Env};
use crate::control;
use crate::control::{Client, ENDING_LIMIT, PAUSE};
use crate::error::{Error, Kind, Result};
use crate::sandbox::{Checked, Reply, Request};
use crate::sandbox::{FIRST_HEAD, Sandbox, StoreOptions};
use crate::store;
use crate::types::TreePath;

/// A sandbox that handles requests.
pub(super) struct Target {
    connection: Connection,
    store: PathBuf,
    /// The name of the head.
    head: String,
    /// The visible root of the tree: its mount point, or its base.
    root: PathBuf,
    /// The directory at which relative paths start.
    dir: PathBuf,
}

enum Connection {
    Daemon(Client),
    Local(Arc<Sandbox>),
}

impl Target {
    /// Finds the sandbox that the command line means.
    ///
    /// # Errors
    /// `NoStore`: there is none. Other kinds: it cannot be reached or opened.
    pub(super) fn find(global: &Global) -> Result<Target> {
        let dir = global.dir()?;
        let found = find_store(global, &dir)?;
        let (end, mut is_ending) = (Instant::now() + ENDING_LIMIT, false);
        loop {
            let target = match control::connect(&found.store) {
                // A daemon that ends accepts no more connections.
                Err(_) if is_ending && Instant::now() < end => {
                    thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error),
                Ok(Some(client)) => Target::of_daemon(global, client, &found, &dir),
                Ok(None) => Target::local(global, &found, &dir),
            };
            match target {
                Err(error)
                    if Instant::now() < end
                        && (control::is_lost(&error) || is_ending && error.kind == Kind::InUse) =>
                {
                    is_ending = true;
                    thread::sleep(PAUSE);
                }
                target => return target,
            }
        }
    }

    fn local(global: &Global, found: &Found, dir: &Path) -> Result<Target> {
        let Found { store, base, head } = found;
        let head = global.head.as_deref().or(head.as_deref()).unwrap_or(FIRST_HEAD);
        // A store that was found by its base may belong to a base that was moved.
        let sandbox = match base {
            Some(base) if store::exists(store) => {
                Sandbox::create_or_open_head(base, store, &StoreOptions::default(), head)?
            }
            Some(_) | None => Sandbox::open_head(store, head)?,
        };
        sandbox.set_protected(protected::protected()?);
        let (root, head) = (sandbox.base_path().to_owned(), head.to_owned());
        let (store, dir) = (store.clone(), dir.to_owned());
        Ok(Target { connection: Connection::Local(sandbox), store, head, root, dir })
    }

    fn of_daemon(
        global: &Global,
        mut client: Client,
        Found { store, base, head }: &Found,
        dir: &Path,
    ) -> Result<Target> {
        client.set_head(global.head.clone().or_else(|| head.clone()));
        let mounts = client.mounts()?;
        let root: PathBuf = match mounts.mount_point(&mounts.meant) {
            Some(point) => OsString::from_vec(point.to_vec()).into(),
            None => OsString::from_vec(store::base_of(store)?.path).into(),
        };
        let head = mounts.meant;
        client.set_head(Some(head.clone()));
        // A directory in the base of a tree that is mounted elsewhere means the same directory of
        // the tree. So does a directory in a bind mount of the tree, or in the mount of another
        // head.
        let in_tree = match base {
            Some(base) => dir.strip_prefix(base).ok().map(Path::to_owned),
            None if global.store.is_none() && !dir.starts_with(&root) => host::seen_at(dir)?,
            None => None,
        };
        let dir = in_tree.map_or_else(|| dir.to_owned(), |inside| root.join(inside));
        let store = store.clone();
        Ok(Target { connection: Connection::Daemon(client), store, head, root, dir })
    }

    /// Checks the store that the command line means, also one that cannot be opened.
    ///
    /// # Errors
    /// `NoStore`: there is none. `InUse`: another process has the store open, and a repair was
    /// asked for.
    pub(super) fn check(global: &Global, read_data: bool, repair: bool) -> Result<Checked> {
        let store = find_store(global, &global.dir()?)?.store;
        if repair {
            return Sandbox::repair_store(&store, read_data);
        }
        let Some(mut client) = control::connect(&store)? else {
            return Sandbox::check_store(&store, read_data);
        };
        match client.call(&Request::Check { read_data })? {
            Reply::Checked(checked) => Ok(checked),
            _ => Err(wrong_answer()),
        }
    }

    /// Handles a request.
    ///
    /// # Errors
    /// Those of the sandbox.
    pub(super) fn call(&mut self, request: Request) -> Result<Reply> {
        match &mut self.connection {
            Connection::Daemon(client) => client.call(&request),
            Connection::Local(sandbox) => sandbox.handle(request),
        }
    }

    /// The store.
    pub(super) fn store(&self) -> &Path {
        &self.store
    }

    /// The name of the head.
    pub(super) fn head(&self) -> &str {
        &self.head
    }

    /// The name of the head if the store has more than one.
    ///
    /// # Errors
    /// Those of the sandbox.
    pub(super) fn head_of_many(&mut self) -> Result<Option<String>> {
        let Reply::Forks(forks) = self.call(Request::Forks)? else { return Err(wrong_answer()) };
        Ok((forks.len() > 1).then(|| self.head.clone()))
    }

    /// The paths in the tree of the user's arguments.
    ///
    /// # Errors
    /// `LeavesJail`: a path leads out of the tree.
    pub(super) fn paths(&self, paths: &[PathBuf]) -> Result<Vec<TreePath>> {
        paths.iter().map(|path| tree_path(&self.root, &self.dir, path)).collect()
    }

    /// The path on the host of a user's argument.
    pub(super) fn on_host(&self, path: &Path) -> PathBuf {
        self.dir.join(path)
    }
}

/// Where the sandbox of a command is.
struct Found {
    store: PathBuf,
    /// The base, if the store was found by it.
    base: Option<PathBuf>,
    /// The head of the mount, if the store was found by it.
    head: Option<String>,
}

impl Found {
    fn store(store: PathBuf) -> Found {
        Found { store, base: None, head: None }
    }
}

fn find_store(global: &Global, dir: &Path) -> Result<Found> {
    if let Some(store) = &global.store {
        let store = host::resolve(&global.at(store)?).map_err(|error| match error.errno {
            Some(nix::libc::ENOENT) => error.kind(Kind::NoStore),
            _ => error,
        })?;
        return Ok(Found::store(store));
    }
    match host::within(dir)? {
        Within::Mount(place) => {
            return Ok(Found { head: place.head, ..Found::store(place.store) });
        }
        Within::DeadMount(point) => return Err(host::dead_mount("find the sandbox", &point)),
        Within::Host => {}
    }
    let env = Env::get();
    let default = |dir: &Path| {
        let store = store_path::existing_default(&env, dir)?;
        Some(Found { base: Some(dir.to_owned()), ..Found::store(store) })
    };
    if let Some(found) = dir.ancestors().find_map(default) {
        return Ok(found);
    }
    match std::env::var_os("JAILFS_SANDBOX") {
        Some(store) if global.dir.is_none() => Ok(Found::store(store.into())),
        _ => Err(Error::new(
            Kind::NoStore,
            format!("find the sandbox of '{}'", dir.display()),
            "there is none",
        )
        .hint("go into a mount or a base that has one, or name it with -C DIR or --store DIR")),
    }
}

/// The path in the tree at `root` of the argument `path` in the directory `dir`. Looks at the text
/// alone: a symlink in the tree is resolved by the tree, and a deleted file has a path too.
fn tree_path(root: &Path, dir: &Path, path: &Path) -> Result<TreePath> {
    let attempt = || format!("find '{}' in the tree", path.display());
    // In a directory outside the tree, with --store, paths start at the root of the tree.
    let from = if dir.starts_with(root) { dir } else { root };
    let outside =
        || Error::new(Kind::LeavesJail, attempt(), format!("it is not below '{}'", root.display()));
    let full = plain(&from.join(path)).ok_or_else(outside)?;
    let inside = full.strip_prefix(root).map_err(|_| outside())?;
    TreePath::parse(inside.as_os_str().as_bytes())
        .map_err(|_| Error::new(Kind::Usage, attempt(), "it is not a path that a tree can have"))
}

/// Removes `.` and `..` from an absolute path. None if it climbs above `/`.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut names: Vec<&OsStr> = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name),
            Component::ParentDir => drop(names.pop()?),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Some(Path::new("/").join(names.into_iter().collect::<PathBuf>()))
}

/// The error for a reply of the wrong kind.
pub(super) fn wrong_answer() -> Error {
    Error::new(Kind::Failed, "read the reply", "it does not belong to the request")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(root: &str, dir: &str, path: &str) -> Result<TreePath> {
        tree_path(root.as_ref(), dir.as_ref(), path.as_ref())
    }

    #[test]
    fn a_path_is_relative_to_the_current_directory() {
        let table = [
            ("/m", "/m/src", "a", "src/a"),
            ("/m", "/m/src", ".", "src"),
            ("/m", "/m/src", "../b/./c/", "b/c"),
            ("/m", "/m/src", "..", ""),
            ("/m", "/m/src", "/m/x", "x"),
            ("/m", "/home", "x/y", "x/y"),
            ("/m", "/home", "/m", ""),
            ("/", "/", "a", "a"),
        ];
        for (root, dir, path, expected) in table {
            assert_eq!(
                of(root, dir, path).unwrap().as_bytes(),
                expected.as_bytes(),
                "{dir} {path}"
            );
        }
    }

    #[test]
    fn a_path_outside_is_refused() {
        for (root, dir, path) in
            [("/m", "/m", ".."), ("/m", "/m/a", "../../m2/x"), ("/m", "/m", "/etc/passwd")]
        {
            assert_eq!(of(root, dir, path).unwrap_err().kind, Kind::LeavesJail, "{path}");
        }
        assert_eq!(of("/m", "/m", "../../../x").unwrap_err().kind, Kind::LeavesJail);
    }
}
