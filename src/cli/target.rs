//! Which sandbox a command means, and how it is reached.
//!
//! In this order: `--store`; the mount that the directory (`-C`, or the current one) lies in; a store in the default
//! place of the directory or of one above it, so that a base knows what was kept of it; without `-C`, the sandbox of
//! the `jailfs run` that we are in (JAILFS_SANDBOX). The variable comes last: it can outlive its command, in a terminal
//! multiplexer for one, and must not lead a command in another base astray.
//! If a daemon holds the store the request travels to it, else this process takes the lock and does the work itself.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::Global;
use super::host::{self, Within};
use super::place::{self, Env};
use crate::control::{self, Client};
use crate::error::{Error, Kind, Result};
use crate::sandbox::verbs::{Checked, Reply, Request};
use crate::sandbox::{Sandbox, StoreOptions};
use crate::store;
use crate::types::TreePath;

/// A sandbox that can be asked.
pub(super) struct Target {
    door: Door,
    /// Where the tree is seen: its mount point, or its base.
    root: PathBuf,
    /// The directory that relative paths begin at.
    dir: PathBuf,
}

enum Door {
    Daemon(Client),
    Local(Arc<Sandbox>),
}

impl Target {
    /// Finds the sandbox that the command line means.
    ///
    /// # Errors
    /// `NoStore`: there is none. Or it cannot be reached, or opened.
    pub(super) fn find(global: &Global) -> Result<Target> {
        let dir = global.dir()?;
        let (store, base) = find_store(global, &dir)?;
        if let Some(client) = control::connect(&store)? {
            let root: PathBuf = OsString::from_vec(client.greeting().mount.clone()).into();
            // Who stands in the base of a tree that is mounted elsewhere means the same place in the tree; and so does who stands in
            // a copy of the mount, or of a part of it, at another place.
            let in_tree = match base {
                Some(base) => dir.strip_prefix(base).ok().map(Path::to_owned),
                None if global.store.is_none() && !dir.starts_with(&root) => host::seen_at(&dir)?,
                None => None,
            };
            let dir = in_tree.map_or(dir, |inside| root.join(inside));
            return Ok(Target { door: Door::Daemon(client), root, dir });
        }
        // Found by its base, the store may be that of a base which was moved here.
        let sandbox = match &base {
            Some(base) if store::exists(&store) => {
                Sandbox::create_or_open(base, &store, &StoreOptions::default())?
            }
            Some(_) | None => Sandbox::open(&store)?,
        };
        sandbox.set_protected(place::protected()?);
        let root = sandbox.base_path().to_owned();
        Ok(Target { door: Door::Local(sandbox), root, dir })
    }

    /// Checks the store that the command line means, also one that cannot be opened.
    ///
    /// # Errors
    /// `NoStore`: there is none. `InUse`: it is to be repaired, and somebody has it open.
    pub(super) fn check(global: &Global, read_data: bool, repair: bool) -> Result<Checked> {
        let (store, _) = find_store(global, &global.dir()?)?;
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

    /// Asks.
    ///
    /// # Errors
    /// As the sandbox says.
    pub(super) fn call(&mut self, request: Request) -> Result<Reply> {
        match &mut self.door {
            Door::Daemon(client) => client.call(&request),
            Door::Local(sandbox) => sandbox.handle(request),
        }
    }

    /// The paths in the tree that a person means by `paths`.
    ///
    /// # Errors
    /// `LeavesJail`: one leads out of the tree.
    pub(super) fn paths(&self, paths: &[PathBuf]) -> Result<Vec<TreePath>> {
        paths.iter().map(|path| tree_path(&self.root, &self.dir, path)).collect()
    }

    /// The path on the host that a person means by a relative path.
    pub(super) fn on_host(&self, path: &Path) -> PathBuf {
        self.dir.join(path)
    }
}

/// The store, and the base if it was by the base that it was found.
fn find_store(global: &Global, dir: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    if let Some(store) = &global.store {
        let store = host::resolve(&global.at(store)?).map_err(|error| match error.errno {
            Some(nix::libc::ENOENT) => error.kind(Kind::NoStore),
            _ => error,
        })?;
        return Ok((store, None));
    }
    match host::within(dir)? {
        Within::Mount { store } => return Ok((store, None)),
        Within::DeadMount(point) => return Err(host::dead_mount("find the sandbox", &point)),
        Within::Host => {}
    }
    let env = Env::get();
    let default = |dir: &Path| Some((place::existing_default(&env, dir)?, Some(dir.to_owned())));
    if let Some(found) = dir.ancestors().find_map(default) {
        return Ok(found);
    }
    match std::env::var_os("JAILFS_SANDBOX") {
        Some(store) if global.dir.is_none() => Ok((store.into(), None)),
        _ => Err(Error::new(
            Kind::NoStore,
            format!("find the sandbox of '{}'", dir.display()),
            "there is none",
        )
        .hint("go into a mount or a base that has one, or name it with -C DIR or --store DIR")),
    }
}

/// The path in the tree at `root` of what a person standing in `dir` calls `path`. Decided on the names alone: links
/// in the tree are the tree's own business, and what was deleted has a path too.
fn tree_path(root: &Path, dir: &Path, path: &Path) -> Result<TreePath> {
    let attempt = || format!("find '{}' in the tree", path.display());
    // Someone who stands elsewhere, and names the sandbox with --store, counts from its root.
    let from = if dir.starts_with(root) { dir } else { root };
    let outside = || Error::new(Kind::LeavesJail, attempt(), format!("it is not below '{}'", root.display()));
    let full = plain(&from.join(path)).ok_or_else(outside)?;
    let inside = full.strip_prefix(root).map_err(|_| outside())?;
    TreePath::parse(inside.as_os_str().as_bytes())
        .map_err(|_| Error::new(Kind::Usage, attempt(), "it is not a path that a tree can have"))
}

/// Takes `.` and `..` out of an absolute path; none if it climbs above `/`.
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

/// The error for an answer that does not belong to the question.
pub(super) fn wrong_answer() -> Error {
    Error::new(Kind::Failed, "read the answer", "it belongs to another question")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(root: &str, dir: &str, path: &str) -> Result<TreePath> {
        tree_path(root.as_ref(), dir.as_ref(), path.as_ref())
    }

    #[test]
    fn a_path_is_taken_from_where_the_person_stands() {
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
            assert_eq!(of(root, dir, path).unwrap().as_bytes(), expected.as_bytes(), "{dir} {path}");
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
