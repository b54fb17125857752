//! Finds changes that would run code or give power outside the sandbox. An apply writes them only
//! if its caller consents.
//!
//! * **Protected paths** are files that programs outside the sandbox run by themselves: hooks and
//!   configuration of git, settings of editors and agents, workflows of forges, and what a shell or
//!   a session reads when it starts. A `Makefile` is not protected, because it runs only when a
//!   user calls make.
//! * A directory of any name that git would take for a **git directory** counts as `.git`: a bare
//!   repository, a submodule in `.git/modules`, a worktree in `.git/worktrees`. Git looks for one
//!   in each directory in which it is started.
//! * **Privileges** are the setuid bit, the setgid bit of an executable, and file capabilities, if
//!   the file in the base does not have the same already: with the same owner, group, or
//!   capabilities. The setgid bit of a directory gives no power.

use serde::{Deserialize, Serialize};

use crate::error::FsResult;
use crate::fs::State;
use crate::timeline::diff::{PathChange, What};
use crate::tree::Node;
use crate::types::{FileKind, TreePath};

/// The dangerous changes that the caller of an apply consents to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consent {
    /// Changes at and below protected paths, even if the caller does not name the paths.
    pub protected: bool,
    /// Set-id bits and file capabilities.
    pub privileges: bool,
}

impl Consent {
    /// Consent to everything.
    pub const ALL: Consent = Consent { protected: true, privileges: true };
}

/// The built-in protected paths. They are protected in every directory, and so is everything below
/// them.
pub const PROTECTED: &[&[&str]] = &[
    &[".git", "hooks"],
    &[".git", "config"],
    &[".git", "config.worktree"],
    &[".git", "commondir"],
    &[".git", "info", "attributes"],
    &[".gitmodules"],
    &[".gitattributes"],
    &[".githooks"],
    &[".github", "workflows"],
    &[".github", "actions"],
    &[".gitlab-ci.yml"],
    &[".circleci"],
    &[".husky"],
    &[".pre-commit-config.yaml"],
    &[".envrc"],
    &[".vscode"],
    &[".idea"],
    &[".zed"],
    &[".devcontainer"],
    &[".exrc"],
    &[".nvim.lua"],
    &[".dir-locals.el"],
    &[".claude"],
    &[".cursor"],
    &[".mcp.json"],
    &[".yarnrc.yml"],
    &[".config", "jailfs"],
    // Of a home directory.
    &[".profile"],
    &[".bashrc"],
    &[".bash_profile"],
    &[".bash_login"],
    &[".bash_logout"],
    &[".zshrc"],
    &[".zshenv"],
    &[".zprofile"],
    &[".zlogin"],
    &[".zlogout"],
    &[".config", "fish"],
    &[".xprofile"],
    &[".xsession"],
    &[".xinitrc"],
    &[".config", "autostart"],
    &[".config", "systemd"],
    &[".ssh"],
    &[".gitconfig"],
    &[".config", "git"],
    &[".vimrc"],
    &[".vim"],
    &[".config", "nvim"],
];
/// The names that make a directory a git directory. `commondir` names another directory that has
/// `objects` and `refs`.
const OF_GIT_DIR: [&[u8]; 4] = [b"HEAD", b"objects", b"refs", b"commondir"];

/// The list of protected paths: the built-in ones, with additions and removals of the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protected(Vec<TreePath>);

impl Default for Protected {
    fn default() -> Protected {
        let paths = PROTECTED.iter().map(|parts| TreePath::parse(parts.join("/").as_bytes()));
        Protected(paths.filter_map(Result::ok).collect())
    }
}

impl Protected {
    /// Parses changes of the built-in list: a line `PATH` adds a path, a line `!PATH` removes one.
    /// Empty lines and lines that begin with `#` are ignored.
    ///
    /// # Errors
    /// A message for users that says which line is wrong, and why.
    pub fn parse(text: &[u8]) -> Result<Protected, String> {
        let mut list = Protected::default();
        for (at, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            let wrong = |why: &str| format!("line {}: {why}", at + 1);
            let removed = line.strip_prefix(b"!");
            let path =
                TreePath::parse(removed.unwrap_or(line)).map_err(|_| wrong("it is not a path"))?;
            if path.is_root() {
                return Err(wrong("it is not a path"));
            }
            if removed.is_none() {
                list.0.push(path);
                continue;
            }
            let before = list.0.len();
            list.0.retain(|known| *known != path);
            if list.0.len() == before {
                return Err(wrong("the path that it removes is not in the list"));
            }
        }
        Ok(list)
    }

    /// Whether a path is protected, or lies below one that is.
    pub fn has(&self, path: &TreePath) -> bool {
        let is_listed =
            |suffix: &[u8]| self.0.iter().any(|listed| is_at_or_below(suffix, listed.as_bytes()));
        suffixes(path).any(is_listed)
    }

    /// Whether a path in a git directory, relative to that directory, would be protected in `.git`.
    fn has_in_git_dir(&self, below: &[u8]) -> bool {
        let listed = self.0.iter().filter_map(|listed| listed.as_bytes().strip_prefix(b".git/"));
        listed.into_iter().any(|listed| is_at_or_below(below, listed))
    }

    /// Whether a path has the name of a directory that can hold protected paths, such as `.git`.
    fn can_hold(&self, path: &TreePath) -> bool {
        let Some(last) = path.as_bytes().rsplit(|byte| *byte == b'/').next() else { return false };
        let first = |listed: &TreePath| {
            let end = listed.as_bytes().iter().position(|byte| *byte == b'/');
            end.is_some_and(|end| listed.as_bytes().get(..end) == Some(last))
        };
        self.0.iter().any(first)
    }
}

/// The suffixes of a path that start at a name: `a/b/c`, `b/c`, `c`.
fn suffixes(path: &TreePath) -> impl Iterator<Item = &[u8]> {
    let bytes = path.as_bytes();
    let starts = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at + 1);
    std::iter::once(0).chain(starts).filter_map(move |at| bytes.get(at..))
}

/// Whether a path is `listed`, or lies below it.
fn is_at_or_below(suffix: &[u8], listed: &[u8]) -> bool {
    suffix.strip_prefix(listed).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// Whether a change of this path is a change of what git runs: because the path is listed, or is
/// in a git directory of one of the states. In `.git` everything that git runs is listed. Other
/// directories may have such files without being git directories, so to make one of them a git
/// directory is such a change, too.
fn is_protected(
    protected: &Protected,
    (from, to): (&State, &State),
    path: &TreePath,
) -> FsResult<bool> {
    if protected.has(path) {
        return Ok(true);
    }
    for (dir, below) in dirs_above(path) {
        let (is_listed, makes) = (protected.has_in_git_dir(below), OF_GIT_DIR.contains(&below));
        if !is_listed && !makes {
            continue;
        }
        let (was, is) = (is_git_dir(from, &dir)?, is_git_dir(to, &dir)?);
        let becomes = makes && is && !was && !is_named_git(&dir);
        if is_listed && (was || is) || becomes {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The directories above a path, each with the part of the path below it.
fn dirs_above(path: &TreePath) -> impl Iterator<Item = (TreePath, &[u8])> {
    path.upwards().skip(1).filter_map(|dir| {
        let rest = path.as_bytes().get(dir.as_bytes().len()..)?;
        Some((dir, rest.strip_prefix(b"/").unwrap_or(rest)))
    })
}

fn is_named_git(dir: &TreePath) -> bool {
    dir.split().is_some_and(|(_, name)| name.as_bytes() == b".git")
}

/// Whether git would take a directory for a git directory. Git demands more of what is in `HEAD`,
/// `objects` and `refs`.
fn is_git_dir(state: &State, dir: &TreePath) -> FsResult<bool> {
    let kind = |name: &str| -> FsResult<Option<FileKind>> {
        let path = TreePath::parse(&[dir.as_bytes(), name.as_bytes()].join(&b'/'))?;
        Ok(state.kind(&state.resolve(&path)?))
    };
    if kind("HEAD")?.is_none_or(|kind| kind == FileKind::Dir) {
        return Ok(false);
    }
    Ok(kind("commondir")?.is_some() || kind("objects")?.is_some() && kind("refs")?.is_some())
}

/// Mode bits that give a program the rights of its owner or group.
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;
const CAPABILITY: &[u8] = b"security.capability";

/// The changes that need a consent which the caller does not give, and why.
///
/// # Errors
/// Those of reading the base.
pub(in crate::timeline) fn refused(
    protected: &Protected,
    (from, to): (&State, &State),
    changes: &[PathChange],
    named: &[TreePath],
    consent: Consent,
) -> FsResult<Vec<(TreePath, String)>> {
    let mut refused = Vec::new();
    for change in changes.iter().filter(|change| change.what != What::DirTimes) {
        if !consent.protected && needs_naming(protected, change, (from, to), named)? {
            let why = "protected: programs outside the sandbox run it".to_owned();
            refused.push((change.path.clone(), why));
        }
        if !consent.privileges
            && let Some(gains) = privileges(from, to, change)?
        {
            refused.push((change.path.clone(), format!("it would gain {gains}")));
        }
    }
    Ok(refused)
}

/// Says for users why an apply without any consent refuses a change; none if it does not.
///
/// # Errors
/// Those of reading the base.
pub fn dangers(
    protected: &Protected,
    (from, to): (&State, &State),
    change: &PathChange,
) -> FsResult<Option<String>> {
    let mut dangers = Vec::new();
    if needs_naming(protected, change, (from, to), &[])? {
        dangers.push("protected".to_owned());
    }
    dangers.extend(privileges(from, to, change)?.map(|gains| format!("gains {gains}")));
    Ok((!dangers.is_empty()).then(|| dangers.join(", ")))
}

/// Whether a change is at or below a protected path that the caller has not named, or replaces a
/// directory that can hold protected paths by another kind of node.
fn needs_naming(
    protected: &Protected,
    change: &PathChange,
    (from, to): (&State, &State),
    named: &[TreePath],
) -> FsResult<bool> {
    if is_protected(protected, (from, to), &change.path)? {
        for named in named.iter().filter(|named| change.path.starts_with(named)) {
            if is_protected(protected, (from, to), named)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    // '.git' can be a symlink, or a file that names another directory. The hooks of that directory
    // would run.
    let kinds = [from.kind(&change.old), to.kind(&change.new)];
    let is_replaced = kinds.iter().flatten().any(|kind| *kind != FileKind::Dir);
    Ok(is_replaced && protected.can_hold(&change.path) && !named.contains(&change.path))
}

/// A privilege that a file gives to the program in it.
#[derive(PartialEq, Eq)]
enum Power {
    Setuid(u32),
    Setgid(u32),
    /// The value of the extended attribute.
    Capabilities(Vec<u8>),
}

impl Power {
    fn text(&self) -> &'static str {
        match self {
            Power::Setuid(_) => "the setuid bit",
            Power::Setgid(_) => "the setgid bit",
            Power::Capabilities(_) => "file capabilities",
        }
    }
}

/// The privileges that a change gives a file and that the file in the base does not have.
fn privileges(from: &State, to: &State, change: &PathChange) -> FsResult<Option<String>> {
    if to.kind(&change.new) != Some(FileKind::File) {
        return Ok(None);
    }
    let is = powers_of(to.node(&change.new)?.as_ref());
    // A file whose content changes is another program, so it gains the privileges of the old one.
    let keeps = change.what == What::Attributes && from.kind(&change.old) == Some(FileKind::File);
    let was = if keeps { powers_of(from.node(&change.old)?.as_ref()) } else { Vec::new() };
    let gained = is.iter().filter(|power| !was.contains(power)).map(Power::text);
    let gained: Vec<&str> = gained.collect();
    Ok((!gained.is_empty()).then(|| gained.join(" and ")))
}

fn powers_of(node: &Node) -> Vec<Power> {
    let (mode, mut powers) = (node.meta.mode, Vec::new());
    if mode & SETUID != 0 {
        powers.push(Power::Setuid(node.meta.uid));
    }
    if mode & SETGID != 0 && mode & GROUP_EXECUTE != 0 {
        powers.push(Power::Setgid(node.meta.gid));
    }
    let all = node.xattrs.iter().flat_map(|all| all.iter());
    let capabilities = all.filter(|(name, _)| name.as_slice() == CAPABILITY);
    powers.extend(capabilities.map(|(_, value)| Power::Capabilities(value.to_vec())));
    powers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protected_path_is_protected_at_every_depth() {
        let list = Protected::default();
        let is = |path: &str| list.has(&TreePath::parse(path.as_bytes()).unwrap());
        for path in [
            ".git/hooks/pre-commit",
            ".git/hooks",
            ".git/config",
            "sub/.git/config",
            ".envrc",
            "a/b/.envrc",
            ".vscode/tasks.json",
            ".github/workflows/ci.yml",
            ".git/commondir",
        ] {
            assert!(is(path), "{path}");
        }
        for path in [
            ".git/index",
            ".git/objects/ab/cd",
            ".git/refs/heads/config",
            "hooks/pre-commit",
            "config",
            ".github/CODEOWNERS",
            "Makefile",
            ".git/hooksx",
            "envrc",
        ] {
            assert!(!is(path), "{path}");
        }
    }

    #[test]
    fn a_user_list_adds_and_removes_paths() {
        let list = Protected::parse(b"# comment\n\nscripts/deploy\n  !.husky\r\n").unwrap();
        let has = |path: &str| list.has(&TreePath::parse(path.as_bytes()).unwrap());
        assert!(has("scripts/deploy/now.sh") && has("sub/scripts/deploy") && has(".envrc"));
        assert!(!has(".husky/pre-commit") && !has("scripts/deployed") && !has("scripts"));
        for (text, line) in
            [("a\n../b", "line 2"), ("!nothing", "line 1"), ("/", "line 1"), ("!", "line 1")]
        {
            assert!(Protected::parse(text.as_bytes()).unwrap_err().starts_with(line), "{text}");
        }
    }

    #[test]
    fn every_built_in_path_is_documented() {
        let text = include_str!("../../../docs/CLI.md");
        for parts in PROTECTED {
            assert!(
                text.contains(&format!("`{}`", parts.join("/"))),
                "docs/CLI.md does not list {parts:?}"
            );
        }
    }
}
