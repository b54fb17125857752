//! Parses `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
//!
//! ```text
//! 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue
//! id parent dev root point options optional ...       - type source super options
//! ```
//! Space, tab, newline and backslash are written as `\040` and so on. Lines of another form are
//! skipped.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The id of the mount, as [`super::file::mount_id`] returns it.
    pub id: u64,
    /// The id of its parent mount.
    pub parent: u64,
    /// `st_dev` of its files.
    pub dev: u64,
    /// The directory of the filesystem that is the root of the mount.
    pub root: Vec<u8>,
    /// The mount point, as the reading process sees it.
    pub mount_point: Vec<u8>,
    /// The type of the filesystem, with its subtype: `fuse.jailfs`.
    pub fs_type: Vec<u8>,
    /// The mount source; its meaning depends on the filesystem.
    pub source: Vec<u8>,
    /// The options of the mount: `rw,nosuid,nodev`.
    pub options: Vec<u8>,
    /// The options of the filesystem: `rw,user_id=0`.
    pub super_options: Vec<u8>,
}

impl Entry {
    /// Whether the mount has this option.
    pub fn has_option(&self, option: &str) -> bool {
        self.options.split(|&byte| byte == b',').any(|have| have == option.as_bytes())
    }
}

/// The mounts that this thread sees, in the kernel's order: a later mount covers an earlier one at
/// the same point.
///
/// # Errors
/// When `/proc/thread-self/mountinfo` cannot be read.
pub fn read() -> io::Result<Vec<Entry>> {
    // Not /proc/self, which is the first thread: a thread may have its own mount namespace.
    let text = std::fs::read("/proc/thread-self/mountinfo")
        .or_else(|_| std::fs::read("/proc/self/mountinfo"))?;
    Ok(parse(&text))
}

/// The paths, in the filesystem `dev`, at which other filesystems are mounted. Covers the mount
/// namespace of this thread.
///
/// # Errors
/// Those of [`read`].
pub fn points_inside(dev: u64) -> io::Result<Vec<PathBuf>> {
    Ok(points(&read()?, dev))
}

fn points(entries: &[Entry], dev: u64) -> Vec<PathBuf> {
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    let inside = entries.iter().filter_map(|entry| {
        let on = entries.iter().find(|other| other.id == entry.parent && other.dev == dev)?;
        let below = path(&entry.mount_point).strip_prefix(path(&on.mount_point)).ok()?.to_owned();
        // A mount over the root of the filesystem hides it, and is at no path in it.
        (!below.as_os_str().is_empty()).then(|| path(&on.root).join(below))
    });
    inside.collect()
}

/// Whether a filesystem is mounted inside the filesystem `dev`, in any mount namespace that `/proc`
/// shows.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn is_mounted_upon(dev: u64) -> io::Result<bool> {
    let mut namespaces = std::collections::HashSet::new();
    for process in std::fs::read_dir("/proc")? {
        let Ok(process) = process else { continue };
        if !process.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // If the namespace is hidden, its mounts may be visible all the same. They are then read
        // more than once.
        if let Ok(namespace) = std::fs::read_link(process.path().join("ns/mnt"))
            && !namespaces.insert(namespace)
        {
            continue;
        }
        // A process that has ended meanwhile sees no mounts.
        let Ok(text) = std::fs::read(process.path().join("mountinfo")) else { continue };
        if has_mount_upon(&parse(&text), dev) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn has_mount_upon(entries: &[Entry], dev: u64) -> bool {
    let ours: std::collections::HashSet<u64> =
        entries.iter().filter(|e| e.dev == dev).map(|e| e.id).collect();
    entries.iter().any(|entry| ours.contains(&entry.parent))
}

/// All other paths of a path, where another mount shows the same part of its filesystem.
pub fn other_paths_of(path: &Path, mounts: &[Entry]) -> Vec<PathBuf> {
    let bytes = |of: &[u8]| PathBuf::from(OsStr::from_bytes(of));
    let around = mounts.iter().filter(|mount| path.starts_with(bytes(&mount.mount_point)));
    // Of several mounts at one point, the last is on top.
    let Some(own) = around.max_by_key(|mount| mount.mount_point.len()) else { return Vec::new() };
    let Ok(below) = path.strip_prefix(bytes(&own.mount_point)) else { return Vec::new() };
    let within = bytes(&own.root).join(below);
    let same =
        mounts.iter().filter(|mount| mount.dev == own.dev && mount.mount_point != own.mount_point);
    same.filter_map(|mount| {
        let below = within.strip_prefix(bytes(&mount.root)).ok()?;
        let point = bytes(&mount.mount_point);
        Some(if below.as_os_str().is_empty() { point } else { point.join(below) })
    })
    .collect()
}

/// Parses the text of a mountinfo file.
pub fn parse(text: &[u8]) -> Vec<Entry> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Entry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let dev = fields.next()?;
    let colon = dev.iter().position(|&byte| byte == b':')?;
    let dev = nix::sys::stat::makedev(number(dev.get(..colon)?)?, number(dev.get(colon + 1..)?)?);
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let options = fields.next()?.to_vec();
    fields.find(|field| *field == b"-")?;
    let fs_type = unescape(fields.next()?);
    let source = unescape(fields.next()?);
    let super_options = unescape(fields.next().unwrap_or_default());
    Some(Entry { id, parent, dev, root, mount_point, fs_type, source, options, super_options })
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Turns `\040` into a space, and so on. A backslash without three octal digits stays as it is.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = if first == b'\\' { tail.first_chunk::<3>().and_then(octal) } else { None };
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { tail.get(3..).unwrap_or_default() } else { tail };
    }
    bytes
}

fn octal(digits: &[u8; 3]) -> Option<u8> {
    digits.iter().try_fold(0u8, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(digit - b'0'),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_with_any_number_of_optional_fields() {
        let text = b"36 35 98:0 /mnt1 /mnt2 rw,noatime - ext3 /dev/root rw,errors=continue\n\
            37 36 0:52 / /a\\040b\\134c\\012 rw,nosuid shared:1 master:2 unbindable - fuse.jailfs \
            base\\040x rw\n";
        let entries = parse(text);
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].id, entries[0].parent), (36, 35));
        assert_eq!(entries[0].dev, nix::sys::stat::makedev(98, 0));
        assert_eq!(entries[0].root, b"/mnt1");
        assert_eq!(entries[0].source, b"/dev/root");
        assert_eq!(entries[0].super_options, b"rw,errors=continue");
        assert!(entries[0].has_option("noatime") && !entries[0].has_option("no"));
        assert_eq!(entries[1].mount_point, b"/a b\\c\n");
        assert_eq!(entries[1].fs_type, b"fuse.jailfs");
        assert_eq!(entries[1].source, b"base x");
    }

    #[test]
    fn invalid_lines_are_skipped_and_invalid_escapes_stay() {
        for odd in [
            &b""[..],
            b"\n\n",
            b"36 35 98 / / rw - a b c",
            b"36 35 9:8 / / rw shared:1",
            b"x 35 9:8 / / rw - a b",
        ] {
            assert!(parse(odd).is_empty(), "{odd:?}");
        }
        assert_eq!(unescape(b"\\04\\400\\"), b"\\04\\400\\");
        assert_eq!(unescape(b"\\377"), b"\xff");
    }

    #[test]
    fn a_mount_inside_a_filesystem_is_seen() {
        let entries = parse(
            b"20 1 0:52 / /m rw - fuse.jailfs jailfs rw\n21 20 0:60 / /m/x rw - tmpfs t rw\n",
        );
        assert!(has_mount_upon(&entries, nix::sys::stat::makedev(0, 52)));
        assert!(!has_mount_upon(&entries, nix::sys::stat::makedev(0, 60)));
        let root = nix::sys::stat::stat("/").unwrap().st_dev;
        assert!(is_mounted_upon(root).unwrap(), "/proc is mounted upon the root");
        assert!(!is_mounted_upon(u64::MAX).unwrap());
    }

    #[test]
    fn mounts_inside_a_filesystem_have_its_paths() {
        let text = b"20 1 0:40 / /mnt rw - fuse.jailfs b rw\n\
            21 20 0:41 / /mnt/a/b rw - tmpfs t rw\n\
            22 1 0:40 /sub /elsewhere rw - fuse.jailfs b rw\n\
            23 22 0:42 / /elsewhere/c rw - tmpfs t rw\n\
            24 20 0:43 / /mnt rw - tmpfs t rw\n25 1 0:44 / /tmp rw - tmpfs t rw\n";
        let entries = parse(text);
        let found = points(&entries, entries[0].dev);
        assert_eq!(found, [PathBuf::from("/a/b"), PathBuf::from("/sub/c")]);
    }

    #[test]
    fn a_path_is_seen_wherever_its_filesystem_is_mounted() {
        let entries = parse(
            b"1 0 8:1 / / rw - ext4 d rw\n2 1 8:1 /data/home /home rw - ext4 d rw\n\
            3 1 8:1 /data/home/u/.ssh /k rw - ext4 d rw\n4 1 8:2 / /other rw - ext4 e rw\n",
        );
        let others = |path: &str| other_paths_of(Path::new(path), &entries);
        assert_eq!(others("/home/u/.ssh"), [Path::new("/data/home/u/.ssh"), Path::new("/k")]);
        assert_eq!(others("/home/u/.aws"), [Path::new("/data/home/u/.aws")]);
        assert_eq!(
            others("/data/home/u/.ssh/id"),
            [Path::new("/home/u/.ssh/id"), Path::new("/k/id")]
        );
        assert!(others("/etc/shadow").is_empty() && others("/other/x").is_empty());
    }

    #[test]
    fn an_empty_source_is_empty() {
        let entries = parse(b"1 0 0:1 / / rw -  tmpfs  rw\n1 0 0:1 / / rw - tmpfs  rw\n");
        assert_eq!(entries[1].source, b"");
        assert_eq!(entries[1].super_options, b"rw");
    }

    #[test]
    fn proc_is_mounted_at_proc() {
        let entries = read().unwrap();
        let proc = entries.iter().rfind(|entry| entry.mount_point == b"/proc").unwrap();
        assert_eq!(proc.fs_type, b"proc");
        let fd =
            nix::fcntl::open("/proc", nix::fcntl::OFlag::O_PATH, nix::sys::stat::Mode::empty())
                .unwrap();
        assert_eq!(Some(proc.id), crate::sys::file::mount_id(&fd));
        assert_eq!(proc.dev, nix::sys::stat::fstat(&fd).unwrap().st_dev);
    }
}
