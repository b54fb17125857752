//! Units: paths that a merge takes from one side as a whole.
//!
//! A pattern without a slash matches a name in any directory, as in `.gitignore`; another one
//! matches a path from the root. `*` and `?` match within a name, `**` any number of names. All
//! matches in one directory are one unit, with all below them. So `app.db*` holds a SQLite file
//! and its log together, and `.git` each repository on its own.

use serde::{Deserialize, Serialize};

use crate::types::{Name, TreePath};

/// A pattern of paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Glob(Vec<Vec<u8>>);

impl Glob {
    /// The unit of each merge: a git directory.
    pub fn git() -> Glob {
        Glob(vec![b"**".to_vec(), b".git".to_vec()])
    }

    /// Parses a pattern; `None` if it has no name, or a name `..`.
    pub fn parse(text: &[u8]) -> Option<Glob> {
        let names: Vec<Vec<u8>> = text
            .split(|byte| *byte == b'/')
            .filter(|part| !part.is_empty() && *part != b".")
            .map(<[u8]>::to_vec)
            .collect();
        if names.is_empty() || names.iter().any(|part| part == b"..") {
            return None;
        }
        let anywhere = names.len() == 1 && !text.contains(&b'/');
        Some(Glob(if anywhere { [vec![b"**".to_vec()], names].concat() } else { names }))
    }

    /// The uppermost part of a path that the pattern matches, and the directory that it is in.
    pub(super) fn unit_of(&self, path: &TreePath) -> Option<(TreePath, TreePath)> {
        let names: Vec<Name> = path.names().collect();
        let found = (1..=names.len())
            .find(|count| names.get(..*count).is_some_and(|names| matches(&self.0, names)))?;
        let upto = |count| TreePath::of_names(names.iter().take(count));
        Some((upto(found), upto(found - 1)))
    }
}

fn matches(pattern: &[Vec<u8>], names: &[Name]) -> bool {
    match (pattern.split_first(), names.split_first()) {
        (None, names) => names.is_none(),
        (Some((first, rest)), _) if first == b"**" => {
            (0..=names.len()).any(|skip| names.get(skip..).is_some_and(|n| matches(rest, n)))
        }
        (Some((first, rest)), Some((name, names))) => {
            matches_name(first, name.as_bytes()) && matches(rest, names)
        }
        (Some(_), None) => false,
    }
}

/// Without recursion: the last `*` takes one byte more each time the rest does not fit.
fn matches_name(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n, mut retry) = (0, 0, None);
    loop {
        match (pattern.get(p), name.get(n)) {
            (None, None) => return true,
            (Some(b'*'), _) => {
                retry = Some((p + 1, n));
                p += 1;
            }
            (Some(wanted), Some(byte)) if *wanted == b'?' || wanted == byte => {
                p += 1;
                n += 1;
            }
            _ => match retry {
                Some((after, from)) if from < name.len() => {
                    retry = Some((after, from + 1));
                    (p, n) = (after, from + 1);
                }
                _ => return false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(pattern: &str, path: &str) -> Option<String> {
        let path = TreePath::parse(path.as_bytes()).unwrap();
        let dir = Glob::parse(pattern.as_bytes()).unwrap().unit_of(&path)?.1;
        Some(String::from_utf8(dir.as_bytes().to_vec()).unwrap())
    }

    #[test]
    fn a_unit_is_what_a_pattern_matches_in_one_directory() {
        for (pattern, path, dir) in [
            (".git", ".git/index", Some("")),
            (".git", "a/.git/refs/x", Some("a")),
            (".git", "a/.gitignore", None),
            ("app.db*", "data/app.db-wal", Some("data")),
            ("data/*.db", "data/a.db", Some("data")),
            ("data/*.db", "x/data/a.db", None),
            ("/top", "top/x", Some("")),
            ("/top", "a/top", None),
            ("a/**/z", "a/z", Some("a")),
            ("a/**/z", "a/b/c/z/y", Some("a/b/c")),
            ("?x*y", "axbyy", Some("")),
            ("?x*y", "xby", None),
        ] {
            assert_eq!(unit(pattern, path).as_deref(), dir, "{pattern} {path}");
        }
        assert_eq!(Glob::parse(b"/"), None);
        assert_eq!(Glob::parse(b"../x"), None);
    }
}
