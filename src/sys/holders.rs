//! Finds the processes that keep a mount busy, as fuser(1) does, for errors that say more than
//! "busy".

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::sys::proc;

/// A process that uses a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its id in this pid namespace.
    pub pid: u32,
    /// Its program (`comm`); empty if it has ended meanwhile.
    pub program: Vec<u8>,
    /// How it uses the mount, each with an example path.
    pub holds: BTreeMap<Hold, PathBuf>,
}

/// How a process uses a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    /// As its working directory or its root.
    StandsIn,
    /// By an open file or directory.
    Open,
    /// By a mapped file, or its own executable.
    Mapped,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", String::from_utf8_lossy(&self.program), self.pid)?;
        for (hold, path) in &self.holds {
            let how = match hold {
                Hold::StandsIn => "stands in",
                Hold::Open => "has open",
                Hold::Mapped => "has mapped",
            };
            write!(f, ", {how} '{}'", path.display())?;
        }
        Ok(())
    }
}

/// The processes that use a path at or below `mount_point`, in the order of their ids. Only root
/// sees processes of other users. A process in another mount namespace is found if the mount has
/// the same path there. Compares names from the kernel and sends no request to the mount.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn holders(mount_point: &Path) -> std::io::Result<Vec<Holder>> {
    let mut found = Vec::new();
    for pid in proc::numbered(fs::read_dir("/proc")?) {
        let mut holds = BTreeMap::new();
        // Each thread may have its own file table and working directory.
        for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flat_map(proc::numbered)
        {
            let dir = PathBuf::from(format!("/proc/{pid}/task/{thread}"));
            look(&dir, mount_point, &mut holds);
        }
        if !holds.is_empty() {
            found.push(Holder { pid, program: proc::program_of(pid).unwrap_or_default(), holds });
        }
    }
    found.sort_by_key(|holder| holder.pid);
    Ok(found)
}

/// Adds the uses of one thread.
fn look(thread: &Path, mount_point: &Path, holds: &mut BTreeMap<Hold, PathBuf>) {
    let mut note = |hold: Hold, link: PathBuf| {
        // readlink(2) only reads the kernel's name; following the link would enter the mount.
        if let Ok(path) = fs::read_link(link)
            && path.starts_with(mount_point)
        {
            holds.entry(hold).or_insert(path);
        }
    };
    note(Hold::StandsIn, thread.join("cwd"));
    note(Hold::StandsIn, thread.join("root"));
    for entry in fs::read_dir(thread.join("fd")).into_iter().flatten().flatten() {
        note(Hold::Open, entry.path());
    }
    note(Hold::Mapped, thread.join("exe"));
    let maps = fs::read(thread.join("maps")).unwrap_or_default();
    for line in maps.split(|&byte| byte == b'\n') {
        if let Some(path) = mapped_path(line).filter(|path| path.starts_with(mount_point)) {
            holds.entry(Hold::Mapped).or_insert_with(|| path.to_owned());
        }
    }
}

/// The path at the end of a line of proc_pid_maps(5).
fn mapped_path(line: &[u8]) -> Option<&Path> {
    let at = line.iter().position(|&byte| byte == b'/')?;
    Some(Path::new(std::ffi::OsStr::from_bytes(line.get(at..)?)))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a test makes its own files")]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_its_cwd_and_open_files_in_a_directory_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let place = fs::canonicalize(dir.path()).unwrap();
        fs::write(place.join("a"), "").unwrap();
        fs::create_dir(place.join("d")).unwrap();
        assert_eq!(holders(&place).unwrap(), []);
        let mut child = std::process::Command::new("cat")
            .current_dir(place.join("d"))
            .stdin(std::process::Stdio::piped())
            .stdout(fs::File::create(place.join("a")).unwrap())
            .spawn()
            .unwrap();
        // Until exec, the child's standard output may still be ours.
        let found = holders(&place).unwrap();
        let found = found.iter().find(|holder| holder.pid == child.id()).unwrap();
        assert_eq!(found.holds.get(&Hold::StandsIn), Some(&place.join("d")));
        assert_eq!(found.holds.get(&Hold::Open), Some(&place.join("a")));
        assert!(found.to_string().contains("stands in '"), "{found}");
        assert_eq!(holders(Path::new("/nowhere/at/all")).unwrap(), []);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_path_of_a_mapping_is_read_with_its_spaces() {
        let line = b"7f00-7f01 rw-s 00000000 08:01 42                         /data/with space";
        assert_eq!(mapped_path(line), Some(Path::new("/data/with space")));
        assert_eq!(
            mapped_path(b"7f07-7f08 rw-p 00000000 00:00 0                          [heap]"),
            None
        );
    }
}
