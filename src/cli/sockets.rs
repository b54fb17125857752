//! Finds the sockets of the host that have a path. `run` covers them, because a read-only mount
//! does not prevent connections to them.
//!
//! The kernel lists sockets by network namespace, with the text by which they were bound. That text
//! may not be an absolute path of the host: it can be relative or go through `/proc/self`. Then it
//! is resolved as seen by the process that holds the socket.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Directories that are covered with all their sockets.
const COVERED: &[&str] = &["/run", "/var/run", "/tmp", "/var/tmp", "/dev"];

/// A line of the kernel's list.
#[derive(Debug, PartialEq, Eq)]
struct Bound {
    inode: u64,
    name: PathBuf,
}

/// The paths of bound sockets in all network namespaces that are visible here.
pub(super) fn all() -> HashSet<PathBuf> {
    let mut bound = listed(Path::new("/proc/self"));
    let mut namespaces: HashSet<PathBuf> = fs::read_link("/proc/self/ns/net").into_iter().collect();
    for process in processes() {
        let Ok(namespace) = fs::read_link(process.join("ns/net")) else { continue };
        if namespaces.insert(namespace) {
            bound.extend(listed(&process));
        }
    }
    let (plain, unresolved): (Vec<Bound>, Vec<Bound>) = bound
        .into_iter()
        .partition(|bound| bound.name.is_absolute() && !bound.name.starts_with("/proc"));
    let mut paths: HashSet<PathBuf> = plain.into_iter().map(|bound| bound.name).collect();
    if !unresolved.is_empty() {
        let holders = holders(&unresolved.iter().map(|bound| bound.inode).collect());
        let named = unresolved.iter().flat_map(|bound| {
            let processes = holders.get(&bound.inode).into_iter().flatten();
            processes.filter_map(|process| as_named_by(process, &bound.name))
        });
        paths.extend(named);
    }
    paths.retain(|path| !COVERED.iter().any(|copied_up| path.starts_with(copied_up)));
    paths.retain(|path| path.symlink_metadata().is_ok_and(|about| about.file_type().is_socket()));
    paths
}

/// The directories of processes in `/proc`.
fn processes() -> impl Iterator<Item = PathBuf> {
    let listed = fs::read_dir("/proc").into_iter().flatten().flatten();
    let named = listed.filter(|entry| entry.file_name().as_bytes().iter().all(u8::is_ascii_digit));
    named.map(|entry| entry.path())
}

/// The sockets bound in the network namespace of a process (proc_net(5)).
fn listed(process: &Path) -> Vec<Bound> {
    let text = fs::read(process.join("net/unix")).unwrap_or_default();
    text.split(|byte| *byte == b'\n').filter_map(parse).collect()
}

/// Parses the seventh field of a line and the eighth, which may contain spaces. None if the eighth
/// is missing or an abstract name.
fn parse(line: &[u8]) -> Option<Bound> {
    let mut rest = line;
    let mut inode = None;
    for _ in 0..7 {
        rest = rest.trim_ascii_start();
        let end = rest.iter().position(|byte| *byte == b' ')?;
        let (field, behind) = rest.split_at_checked(end)?;
        inode = std::str::from_utf8(field).ok().and_then(|digits| digits.parse().ok());
        rest = behind;
    }
    let name =
        rest.strip_prefix(b" ").filter(|name| !name.is_empty() && !name.starts_with(b"@"))?;
    Some(Bound { inode: inode?, name: OsStr::from_bytes(name).into() })
}

/// The processes that hold these sockets, by inode.
fn holders(wanted: &HashSet<u64>) -> HashMap<u64, Vec<PathBuf>> {
    let mut holders: HashMap<u64, Vec<PathBuf>> = HashMap::new();
    for process in processes() {
        for file in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(file.path()) else { continue };
            let number =
                target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']'));
            if let Some(number) =
                number.and_then(|digits| digits.parse().ok()).filter(|n| wanted.contains(n))
            {
                holders.entry(number).or_default().push(process.clone());
            }
        }
    }
    holders
}

/// The path on the host of a socket name as the process sees it: relative to its current directory
/// or to one of its descriptors.
fn as_named_by(process: &Path, name: &Path) -> Option<PathBuf> {
    for own in ["/proc/self/fd", "/proc/thread-self/fd"] {
        if let Ok(below) = name.strip_prefix(own) {
            let mut parts = below.components();
            let dir = fs::read_link(process.join("fd").join(parts.next()?)).ok()?;
            return Some(dir.join(parts.as_path()));
        }
    }
    name.is_relative()
        .then(|| fs::read_link(process.join("cwd")).ok())
        .flatten()
        .map(|dir| dir.join(name))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    use nix::fcntl::OFlag;
    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn bound_sockets_are_found_by_number_and_name() {
        let bound = |inode, name: &str| Some(Bound { inode, name: name.into() });
        assert_eq!(
            parse(b"ffff: 00000002 00000000 00010000 0001 01 1234 /srv/a b.sock"),
            bound(1234, "/srv/a b.sock")
        );
        assert_eq!(
            parse(b"ffff: 00000002 00000000 00010000 0001 01   99 a.sock"),
            bound(99, "a.sock")
        );
        for none in [
            &b"ffff: 00000002 00000000 00010000 0001 01 1234 @abstract"[..],
            b"ffff: 00000003 00000000 00000000 0001 03  1568",
            b"Num       RefCount Protocol Flags    Type St Inode Path",
            b"",
        ] {
            assert_eq!(parse(none), None, "{none:?}");
        }
    }

    #[test]
    fn a_socket_name_is_resolved_by_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let held = nix::fcntl::open(dir.path(), OFlag::O_PATH, Mode::empty()).unwrap();
        let name = PathBuf::from(format!("/proc/self/fd/{}/x", held.as_raw_fd()));
        let _listener = UnixListener::bind(&name).unwrap();
        let listed = listed(Path::new("/proc/self"));
        let bound = listed.iter().find(|bound| bound.name == name).unwrap();
        let own = PathBuf::from(format!("/proc/{}", std::process::id()));
        assert!(holders(&HashSet::from([bound.inode]))[&bound.inode].contains(&own));
        assert_eq!(as_named_by(&own, &name), Some(dir.path().join("x")));
        let here = std::env::current_dir().unwrap();
        assert_eq!(as_named_by(&own, Path::new("a/b")), Some(here.join("a/b")));
        assert_eq!(as_named_by(&own, Path::new("/srv/x")), None);
    }
}
