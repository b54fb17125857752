//! A control group for the command: limits its memory and its number of processes (cgroups(7)).
//!
//! Where the host has a controller in a hierarchy of its own (version 1), the group is made below
//! the group of this process. In the unified hierarchy (version 2) a group with processes in it
//! cannot delegate controllers. There the group is made below the nearest ancestor that can and
//! that this process may write: as root, or in a session with delegated groups.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::unistd::Pid;

use crate::error::{Attempt, Error, Kind, Result};
use crate::sys;
use crate::sys::mountinfo::Entry;

/// Limits for a command and all its descendants together. None means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Bytes of memory, swap included.
    pub memory: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
}

/// The control groups of a command. Dropping it removes those that have no process left.
#[derive(Debug, Default)]
pub struct Group {
    dirs: Vec<PathBuf>,
    /// The name of each.
    name: String,
}

/// One limit: its controller, its file in version 1 and in version 2, and further settings, which
/// are written where their files exist (None repeats the value).
struct Limit {
    controller: &'static str,
    files: [&'static str; 2],
    also: &'static [(&'static str, Option<&'static str>)],
    value: u64,
}

impl Share {
    fn limits(self) -> Vec<Limit> {
        let memory = self.memory.map(|value| Limit {
            controller: "memory",
            files: ["memory.limit_in_bytes", "memory.max"],
            also: &[("memory.memsw.limit_in_bytes", None), ("memory.swap.max", Some("0"))],
            value,
        });
        let processes = self.processes.map(|value| Limit {
            controller: "pids",
            files: ["pids.max", "pids.max"],
            also: &[],
            value,
        });
        memory.into_iter().chain(processes).collect()
    }
}

impl Group {
    /// Makes the groups that limit a command to its share. Makes none if there is no limit.
    /// `number` tells the commands of this process apart.
    ///
    /// # Errors
    /// Fails with a hint if the host has no such controller or this user may make no group.
    pub fn make(share: Share, number: u32) -> Result<Group> {
        let name = format!("jailfs-{}-{number}", std::process::id());
        let mut group = Group { dirs: Vec::new(), name };
        let limits = share.limits();
        if limits.is_empty() {
            return Ok(group);
        }
        let attempt = || "limit memory or processes";
        let mounts = sys::mountinfo::read().attempt(attempt)?;
        let own = fs::read_to_string("/proc/self/cgroup").attempt(attempt)?;
        let mut unified = Vec::new();
        for limit in limits {
            match group_in_v1(&mounts, &own, limit.controller) {
                Some(parent) => group.add(&parent, &[limit], 0).map_err(|error| explain(&error))?,
                None => unified.push(limit),
            }
        }
        if unified.is_empty() {
            return Ok(group);
        }
        let Some((point, parent)) = group_in_v2(&mounts, &own) else {
            let reason = "the host has no controller for it";
            return Err(Error::new(Kind::Failed, attempt(), reason).hint(HINT));
        };
        let mut last = None;
        for candidate in parent.ancestors().take_while(|dir| dir.starts_with(&point)) {
            let mut tried = Group { dirs: Vec::new(), name: group.name.clone() };
            match enable_controllers(candidate, &unified)
                .and_then(|()| tried.add(candidate, &unified, 1))
            {
                Ok(()) => {
                    group.dirs.append(&mut tried.dirs);
                    return Ok(group);
                }
                // Dropping `tried` removes the group.
                Err(error) => last = Some(error),
            }
        }
        Err(explain(&last.unwrap_or(io::ErrorKind::NotFound.into())))
    }

    /// Makes one group below `parent` and sets its limits. `version` is the index into `files`.
    fn add(&mut self, parent: &Path, limits: &[Limit], version: usize) -> io::Result<()> {
        let dir = parent.join(&self.name);
        fs::create_dir(&dir)?;
        self.dirs.push(dir.clone());
        for limit in limits {
            let file = limit.files.get(version).copied().unwrap_or_default();
            let value = limit.value.to_string();
            fs::write(dir.join(file), &value)?;
            for (file, fixed) in limit.also {
                let file = dir.join(file);
                if file.exists() {
                    fs::write(file, fixed.unwrap_or(&value))?;
                }
            }
        }
        Ok(())
    }

    /// Moves a process into the groups. Its later children belong to them too.
    ///
    /// # Errors
    /// Those of writing `cgroup.procs`.
    pub fn join(&self, process: Pid) -> Result<()> {
        for dir in &self.dirs {
            let procs = dir.join("cgroup.procs");
            fs::write(&procs, process.to_string())
                .attempt(|| format!("write '{}'", procs.display()))?;
        }
        Ok(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for dir in &self.dirs {
            if let Err(error) = fs::remove_dir(dir) {
                log::warn!("remove the control group '{}': {error}", dir.display());
            }
        }
    }
}

const HINT: &str = "limits need control groups that this user may make: run as root, or in a \
    delegated session ('systemd-run --user --scope -p Delegate=yes ...'), or without --memory and \
    --processes";

fn explain(error: &io::Error) -> Error {
    Error::io("limit memory or processes: make a control group", error).hint(HINT)
}

/// The group of this process in the version 1 hierarchy of a controller.
fn group_in_v1(mounts: &[Entry], own: &str, controller: &str) -> Option<PathBuf> {
    let has = |entry: &&Entry| {
        entry.fs_type == b"cgroup"
            && entry
                .super_options
                .split(|byte| *byte == b',')
                .any(|option| option == controller.as_bytes())
    };
    let mount = mounts.iter().rfind(has)?;
    let path = own.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers.split(',').any(|name| name == controller).then_some(path)
    })?;
    Some(group_dir(mount, path))
}

/// The mount point of the unified hierarchy, and the group of this process in it.
fn group_in_v2(mounts: &[Entry], own: &str) -> Option<(PathBuf, PathBuf)> {
    let mount = mounts.iter().rfind(|entry| entry.fs_type == b"cgroup2")?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some((PathBuf::from(OsStr::from_bytes(&mount.mount_point)), group_dir(mount, path)))
}

/// The directory of a group. A container may have its own group mounted as the root.
fn group_dir(mount: &Entry, path: &str) -> PathBuf {
    let point = Path::new(OsStr::from_bytes(&mount.mount_point));
    let below = Path::new(path).strip_prefix(OsStr::from_bytes(&mount.root));
    below.map_or_else(|_| point.to_owned(), |below| point.join(below))
}

/// Enables the controllers of `limits` for groups below `dir`.
fn enable_controllers(dir: &Path, limits: &[Limit]) -> io::Result<()> {
    let file = dir.join("cgroup.subtree_control");
    let has = fs::read_to_string(&file)?;
    for limit in limits {
        if !has.split_whitespace().any(|name| name == limit.controller) {
            fs::write(&file, format!("+{}", limit.controller))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        36 31 0:33 /me /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn our_own_group_is_found_in_each_hierarchy() {
        let mounts = sys::mountinfo::parse(MOUNTS);
        let own = "8:pids:/me/too\n4:memory:/a/b\n0::/user.slice/x\n";
        assert_eq!(group_in_v1(&mounts, own, "memory"), Some("/sys/fs/cgroup/memory/a/b".into()));
        assert_eq!(group_in_v1(&mounts, own, "pids"), Some("/sys/fs/cgroup/pids/too".into()));
        assert_eq!(group_in_v1(&mounts, own, "cpu"), None);
        let (point, group) = group_in_v2(&mounts, own).unwrap();
        assert_eq!(group, point.join("user.slice/x"));
    }

    #[test]
    fn no_group_is_made_without_a_limit() {
        assert!(Group::make(Share::default(), 1).unwrap().dirs.is_empty());
    }
}
