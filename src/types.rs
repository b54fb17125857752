//! The basic types of the library.
//!
//! * Different things have different types: an [`Ino`] is the inode number that `stat` shows, a
//!   [`NodeId`] is the number by which file operations and the kernel name a node, and a
//!   [`LayerId`] identifies a layer of the store.
//! * Names and paths are bytes, never text. A [`Name`] is one component of a path and a
//!   [`TreePath`] is a path in the tree. Both are checked when they are created, so no other code
//!   looks for `/`, `.` or `..`.
//! * [`Display`](std::fmt::Display) of a name or path is safe to print on a terminal.
//!
//! # Example
//!
//! ```
//! use jailfs::types::{BadName, Name, TreePath};
//!
//! # fn main() -> Result<(), BadName> {
//! let path = TreePath::parse(b"src//./main.rs")?;
//! assert_eq!(path.as_bytes(), b"src/main.rs");
//! assert_eq!(path, TreePath::parse(b"src")?.join(&Name::new(b"main.rs")?));
//!
//! // A path cannot lead up, and a name is a single component.
//! assert_eq!(TreePath::parse(b"src/../.."), Err(BadName::Invalid));
//! assert_eq!(Name::new(b"src/main.rs"), Err(BadName::Invalid));
//!
//! // Bytes that would act on a terminal are escaped.
//! assert_eq!(Name::new(b"red\x1b[31m\xff")?.to_string(), r"red\u{1b}[31m\xff");
//! # Ok(())
//! # }
//! ```

use std::borrow::Borrow;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An inode number, as `stat` shows it. It stays with a file through copy-up, rename, restore,
/// remount and apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ino(pub u64);

impl Ino {
    /// The root of the merged tree, and nothing else.
    pub const ROOT: Ino = Ino(1);
    /// The first number that jailfs gives to its own files. It is above the numbers that host
    /// filesystems use, and below 2^53, so that programs that store numbers as doubles keep it
    /// exact.
    pub const OWN_RANGE: Ino = Ino(1 << 48);
}

/// The number by which the kernel and [`Fs`](crate::sandbox::Fs) name a node. Programs in the mount
/// never see it. A file that a restore replaced has another id afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The root of the mount, in every state.
    pub const ROOT: NodeId = NodeId(1);
    /// The first id for nodes that a restore renumbered; far above every [`Ino`].
    pub const RENUMBERED: NodeId = NodeId(1 << 56);
    /// The snapshot directory (`.jailfs`). Its nodes have the numbers from here to 2^53, as ids and
    /// as inode numbers. They are above every number that a store assigns.
    pub const SNAPDIR: NodeId = NodeId(1 << 52);
    /// The directory in the snapshot directory that lists the checkpoints.
    pub const CHECKPOINTS: NodeId = NodeId((1 << 52) + 1);
    /// The directory in the snapshot directory with the edit histories of files.
    pub const HISTORY: NodeId = NodeId((1 << 52) + 2);
    /// The directory in the snapshot directory that shows the other heads.
    pub const FORKS: NodeId = NodeId((1 << 52) + 3);
    /// The first id below [`NodeId::FORKS`]; the last of the third quarter's halves is for these.
    pub const OF_FORKS: NodeId = NodeId((1 << 52) + (5 << 49));
    /// The first id below [`NodeId::HISTORY`]; the last quarter of the range is for these.
    pub const OF_HISTORY: NodeId = NodeId((1 << 52) + (3 << 50));

    /// Whether this is the snapshot directory or a node in it.
    pub fn is_in_snapdir(self) -> bool {
        (1 << 52..1 << 53).contains(&self.0)
    }

    /// Whether this is the directory of edit histories or a node in it.
    pub fn is_in_history(self) -> bool {
        self == NodeId::HISTORY || (NodeId::OF_HISTORY.0..1 << 53).contains(&self.0)
    }

    /// Whether this is the directory of the other heads or a node in it.
    pub fn is_in_forks(self) -> bool {
        let of_forks = NodeId::OF_FORKS.0..NodeId::OF_HISTORY.0;
        self == NodeId::FORKS || of_forks.contains(&self.0)
    }
}

/// Identifies a layer of a store, from 1. A checkpoint has the number of the layer that it sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LayerId(pub u32);

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Counts the applies of a store: the base as first mounted is epoch 0, after the first apply it is
/// epoch 1.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u32);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Seconds and nanoseconds since 1970. `nanos` counts forward, also before 1970.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Timestamp {
    /// Whole seconds, rounded down.
    pub secs: i64,
    /// Nanoseconds after `secs`, 0 to 999,999,999.
    pub nanos: u32,
}

/// Detects changes of a base node: values that change with the node, as they were at copy-up. ctime
/// cannot be set, so a rewrite that keeps size and mtime is detected too, unless it falls within
/// the timestamp granularity of the filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprint {
    /// `st_dev`.
    pub dev: u64,
    /// `st_ino`.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of content or attributes.
    pub ctime: Timestamp,
}

/// Identifies a base directory after it was moved or its device was renumbered. Only valid where
/// the filesystem keeps its inode numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BaseMark {
    /// `st_ino`.
    pub host: u64,
    /// Creation time (`stx_btime` of statx(2)), if the filesystem has it: inode numbers are reused.
    pub born: Option<Timestamp>,
}

/// The half-open range of bytes `[start, end)` of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ByteRange {
    /// First byte.
    pub start: u64,
    /// First byte after the range.
    pub end: u64,
}

impl ByteRange {
    /// The range of `len` bytes from `start`. Saturates at the largest offset.
    pub fn at(start: u64, len: u64) -> ByteRange {
        ByteRange { start, end: start.saturating_add(len) }
    }

    /// Length in bytes; 0 for an empty or inverted range.
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }
}

/// The type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A Unix domain socket.
    Socket,
    /// A character device.
    Char,
    /// A block device.
    Block,
}

/// The bits of `st_mode` that hold the type of a file (`S_IFMT`).
pub const TYPE_BITS: u32 = 0o170_000;
/// The bits of `st_mode` that chmod sets.
pub const PERM_BITS: u32 = 0o7777;

impl FileKind {
    /// The type bits of `st_mode` (inode(7)).
    pub fn type_bits(self) -> u32 {
        match self {
            FileKind::Fifo => 0o010_000,
            FileKind::Char => 0o020_000,
            FileKind::Dir => 0o040_000,
            FileKind::Block => 0o060_000,
            FileKind::File => 0o100_000,
            FileKind::Symlink => 0o120_000,
            FileKind::Socket => 0o140_000,
        }
    }

    /// The kind for the type bits of `mode`, or `None` if these are invalid.
    pub fn from_mode(mode: u32) -> Option<FileKind> {
        Some(match mode & TYPE_BITS {
            0o010_000 => FileKind::Fifo,
            0o020_000 => FileKind::Char,
            0o040_000 => FileKind::Dir,
            0o060_000 => FileKind::Block,
            0o100_000 => FileKind::File,
            0o120_000 => FileKind::Symlink,
            0o140_000 => FileKind::Socket,
            _ => return None,
        })
    }
}

/// The longest name, in bytes (`NAME_MAX`).
pub const NAME_MAX: usize = 255;

/// How many bytes [`quoted`] shows.
const MOST_QUOTED: usize = 4096;

/// One component of a path: 1 to 255 bytes, without `/` and NUL, and neither `.` nor `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<[u8]>);

/// Why bytes are not a valid [`Name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadName {
    /// Longer than [`NAME_MAX`] bytes: ENAMETOOLONG.
    TooLong,
    /// Empty, `.`, `..`, or containing `/` or NUL: EINVAL.
    Invalid,
}

impl Name {
    /// Checks that `bytes` are a valid name.
    ///
    /// # Errors
    /// [`BadName`] gives the reason.
    pub fn new(bytes: &[u8]) -> Result<Name, BadName> {
        Name::check(bytes)?;
        Ok(Name(bytes.into()))
    }

    fn check(bytes: &[u8]) -> Result<(), BadName> {
        if bytes.len() > NAME_MAX {
            return Err(BadName::TooLong);
        }
        if bytes.is_empty()
            || bytes == b"."
            || bytes == b".."
            || bytes.iter().any(|&b| b == b'/' || b == 0)
        {
            return Err(BadName::Invalid);
        }
        Ok(())
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The name as an operating-system string.
    pub fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// A key that sorts before every name; only for bounds of ranges.
    pub(crate) fn before_all() -> Name {
        static BEFORE_ALL: LazyLock<Name> = LazyLock::new(|| Name(Arc::from(&b""[..])));
        BEFORE_ALL.clone()
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        quote_bytes(&self.0, f)
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        Name::new(bytes).map_err(|_| serde::de::Error::custom("not the name of a file"))
    }
}

/// A path from a root: names joined by `/`, without a leading `/`; empty for the root itself.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreePath(Arc<[u8]>);

impl TreePath {
    /// The root.
    pub fn root() -> TreePath {
        TreePath::default()
    }

    /// Parses a path. Empty components and `.` are dropped; `..` and invalid names are errors.
    ///
    /// # Errors
    /// [`BadName`] for the first invalid component.
    pub fn parse(bytes: &[u8]) -> Result<TreePath, BadName> {
        let mut clean: Vec<u8> = Vec::with_capacity(bytes.len());
        for part in bytes.split(|&b| b == b'/').filter(|p| !p.is_empty() && *p != b".") {
            Name::check(part)?;
            if !clean.is_empty() {
                clean.push(b'/');
            }
            clean.extend_from_slice(part);
        }
        Ok(TreePath(clean.into()))
    }

    /// The path that consists of these names.
    pub fn of_names<'a>(names: impl Iterator<Item = &'a Name>) -> TreePath {
        let names: Vec<&[u8]> = names.map(Name::as_bytes).collect();
        TreePath(names.join(&b'/').into())
    }

    /// The path of `name` in this directory.
    pub fn join(&self, name: &Name) -> TreePath {
        let mut bytes = Vec::with_capacity(self.0.len() + 1 + name.as_bytes().len());
        bytes.extend_from_slice(&self.0);
        if !bytes.is_empty() {
            bytes.push(b'/');
        }
        bytes.extend_from_slice(name.as_bytes());
        TreePath(bytes.into())
    }

    /// The parent directory and the last name, or `None` for the root.
    pub fn split(&self) -> Option<(TreePath, Name)> {
        let (dir, name) = match self.0.iter().rposition(|&b| b == b'/') {
            Some(slash) => (self.0.get(..slash)?, self.0.get(slash + 1..)?),
            None if self.is_root() => return None,
            None => (&b""[..], &self.0[..]),
        };
        Some((TreePath(dir.into()), Name::new(name).ok()?))
    }

    /// The path itself and all paths above it, up to the root.
    pub fn upwards(&self) -> impl Iterator<Item = TreePath> {
        std::iter::successors(Some(self.clone()), |path| path.split().map(|(above, _)| above))
    }

    /// The names of the path, from the root down.
    pub fn names(&self) -> impl Iterator<Item = Name> + '_ {
        self.0.split(|&b| b == b'/').filter_map(|part| Name::new(part).ok())
    }

    /// Whether this is the root.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `self` is `ancestor` or lies below it.
    pub fn starts_with(&self, ancestor: &TreePath) -> bool {
        ancestor.is_root()
            || match self.0.strip_prefix(&ancestor.0[..]) {
                Some(rest) => rest.is_empty() || rest.starts_with(b"/"),
                None => false,
            }
    }

    /// This path after the directory `from` has moved to `to`; `None` if this path is not in
    /// `from`.
    pub fn moved(&self, from: &TreePath, to: &TreePath) -> Option<TreePath> {
        let rest = self.0.strip_prefix(&from.0[..]).filter(|_| self.starts_with(from))?;
        let rest = rest.strip_prefix(b"/").unwrap_or(rest);
        let parts: Vec<&[u8]> =
            [&to.0[..], rest].into_iter().filter(|part| !part.is_empty()).collect();
        Some(TreePath(parts.join(&b'/').into()))
    }

    /// The bytes of the path.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The path as an operating-system string, relative to a directory; `.` for the root.
    pub fn as_os_str(&self) -> &OsStr {
        if self.is_root() { OsStr::new(".") } else { OsStr::from_bytes(&self.0) }
    }
}

impl fmt::Debug for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_root() { f.write_str(".") } else { quote_bytes(&self.0, f) }
    }
}

impl Serialize for TreePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for TreePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TreePath, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        let is_clean =
            bytes.is_empty() || bytes.split(|&b| b == b'/').all(|part| Name::check(part).is_ok());
        if is_clean {
            Ok(TreePath(bytes.into()))
        } else {
            Err(serde::de::Error::custom("not a clean path in a tree"))
        }
    }
}

/// Whether a character affects a terminal or the text around it, or cannot be told from nothing or
/// from a space: control characters, bidirectional marks, overrides and isolates, line separators,
/// all spaces but U+0020, and what Unicode lets programs show as nothing (Default_Ignorable).
pub fn is_unprintable(c: char) -> bool {
    let is_space = c.is_whitespace() && c != ' ' || c == '\u{2800}';
    let is_invisible = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{13430}'..='\u{1343f}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}');
    c.is_control() || is_space || is_invisible
}

/// Writes a name for people: printable text as it is, other bytes as `\n`, `\xff` and so on.
fn quote_bytes(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if is_unprintable(c) || c == '\\' {
                write!(f, "{}", c.escape_default())?
            } else {
                write!(f, "{c}")?
            }
        }
        for byte in chunk.invalid() {
            write!(f, "\\x{byte:02x}")?;
        }
    }
    Ok(())
}

/// Bytes for people, as the [`Display`](fmt::Display) of a [`Name`]: without a character that acts
/// on a terminal. Of long ones only the beginning.
pub fn quoted(bytes: &[u8]) -> String {
    struct Quoted<'a>(&'a [u8]);
    impl fmt::Display for Quoted<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            quote_bytes(self.0, f)
        }
    }
    match bytes.get(..MOST_QUOTED) {
        Some(begin) => format!("{}...", Quoted(begin)),
        None => Quoted(bytes).to_string(),
    }
}

/// Parses a number that consists of digits only. `+1` is not a number but a name.
pub fn digits(text: &str) -> Option<u32> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_affect_a_terminal_or_nearby_text_are_escaped() {
        let path =
            TreePath::parse("a\u{1b}[31m\u{202e}gpj.\u{2066}\u{200b}\u{85}ä".as_bytes()).unwrap();
        assert_eq!(path.to_string(), "a\\u{1b}[31m\\u{202e}gpj.\\u{2066}\\u{200b}\\u{85}ä");
        for c in ['\u{ad}', '\u{a0}', '\u{3164}', '\u{fe0f}', '\u{e0041}', '\u{3000}'] {
            assert!(is_unprintable(c), "{}", c.escape_unicode());
        }
        assert!(!is_unprintable(' ') && !is_unprintable('日'));
    }

    #[test]
    fn a_name_is_one_component() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b"] {
            assert_eq!(Name::new(bad), Err(BadName::Invalid), "{bad:?}");
        }
        assert_eq!(Name::new(&[b'x'; 256]), Err(BadName::TooLong));
        for good in [&b"a"[..], b"...", b"-@", b"\xff\xfe", b"new\nline", &[b'x'; 255]] {
            assert_eq!(Name::new(good).unwrap().as_bytes(), good);
        }
    }

    #[test]
    fn a_path_never_leads_up() {
        assert_eq!(TreePath::parse(b"//a/./b/").unwrap().as_bytes(), b"a/b");
        assert!(TreePath::parse(b"a/../b").is_err());
        let path = TreePath::parse(b"a/b/c").unwrap();
        let (dir, name) = path.split().unwrap();
        assert_eq!((dir.as_bytes(), name.as_bytes()), (&b"a/b"[..], &b"c"[..]));
        assert_eq!(dir.join(&name), path);
        assert!(TreePath::root().split().is_none());
        assert!(
            path.starts_with(&dir)
                && path.starts_with(&TreePath::root())
                && path.starts_with(&path)
        );
        assert!(!TreePath::parse(b"a/bc").unwrap().starts_with(&TreePath::parse(b"a/b").unwrap()));
    }

    #[test]
    fn a_path_moves_with_its_directory() {
        let path = |text: &str| TreePath::parse(text.as_bytes()).unwrap();
        for (at, from, to, moved) in [
            ("a/b/c", "a", "x/y", Some("x/y/b/c")),
            ("a", "a", "b", Some("b")),
            ("ab/c", "a", "x", None),
            ("a/b", "a", "", Some("b")),
            ("a/b", "", "x", Some("x/a/b")),
        ] {
            assert_eq!(
                path(at).moved(&path(from), &path(to)),
                moved.map(path),
                "{at} from {from} to {to}"
            );
        }
    }

    #[test]
    fn unprintable_bytes_are_escaped_without_loss() {
        assert_eq!(Name::new(b"a\nb\xff\\").unwrap().to_string(), "a\\nb\\xff\\\\");
    }
}
