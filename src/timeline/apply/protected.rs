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
//!   capabilities, for the same users. The setgid bit of a directory gives no power.

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
    &[".git", "rebase-merge"],
    &[".git", "rebase-apply"],
    &[".git", "sequencer"],
    &[".git", "info", "attributes"],
    &[".gitmodules"],
    &[".gitattributes"],
    &[".githooks"],
    &[".hg", "hgrc"],
    &[".jj", "repo", "config.toml"],
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
    // Of a home directory, but a link there may lead to a file in any directory.
    &[".profile"],
    &[".bashrc"],
    &[".bash_profile"],
    &[".bash_login"],
    &[".bash_logout"],
    &[".bash_aliases"],
    &[".zshrc"],
    &[".zshenv"],
    &[".zprofile"],
    &[".zlogin"],
    &[".zlogout"],
    &[".config", "fish"],
    &[".xprofile"],
    &[".xsession"],
    &[".xsessionrc"],
    &[".xinitrc"],
    &[".config", "autostart"],
    &[".config", "environment.d"],
    &[".config", "systemd"],
    &[".ssh"],
    &[".gitconfig"],
    &[".config", "git"],
    &[".vimrc"],
    &[".vim"],
    &[".config", "nvim"],
    &[".emacs"],
    &[".emacs.d"],
];
/// The names that make a directory a git directory. `commondir` names another directory that has
/// `objects` and `refs`.
const OF_GIT_DIR: [&[u8]; 4] = [b"HEAD", b"objects", b"refs", b"commondir"];
/// For how many directories above one path it is found out whether they are git directories. A path
/// with more of them that could be, `hooks/hooks/hooks` and so on, counts as protected.
const MOST_GIT_DIRS: usize = 16;

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

/// Whether a path is protected: it is listed, or lies in a git directory and would be listed in
/// `.git`. Also whether a change of it makes a directory a git directory. In `.git` all files that
/// git runs are listed, but another directory may have them already.
fn is_protected(
    protected: &Protected,
    states: (&State, &State),
    path: &TreePath,
) -> FsResult<bool> {
    if protected.has(path) {
        return Ok(true);
    }
    let candidates = dirs_above(path).filter_map(|(dir, below)| {
        let (is_listed, makes) = (protected.has_in_git_dir(below), OF_GIT_DIR.contains(&below));
        (is_listed || makes && !is_named_git(&dir)).then_some((dir, is_listed))
    });
    for (at, (dir, is_listed)) in candidates.enumerate() {
        if at >= MOST_GIT_DIRS {
            return Ok(true);
        }
        // An apply of some paths leaves names of both states.
        let is_git = is_git_dir(&[states.0, states.1], &dir)?;
        if is_git && (is_listed || !is_git_dir(&[states.0], &dir)?) {
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

/// Whether git would take a directory with the names that it has in any of the states for a git
/// directory. Git demands more of what is in `HEAD`, `objects` and `refs`.
fn is_git_dir(states: &[&State], dir: &TreePath) -> FsResult<bool> {
    let has = |name: &str, is_wanted: fn(FileKind) -> bool| -> FsResult<bool> {
        let path = TreePath::parse(&[dir.as_bytes(), name.as_bytes()].join(&b'/'))?;
        for state in states {
            if state.kind(&state.resolve(&path)?).is_some_and(is_wanted) {
                return Ok(true);
            }
        }
        Ok(false)
    };
    Ok(has("HEAD", |kind| kind != FileKind::Dir)?
        && (has("commondir", |_| true)? || has("objects", |_| true)? && has("refs", |_| true)?))
}

/// Mode bits that give a program the rights of its owner or group.
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const OWNER_EXECUTE: u32 = 0o100;
const GROUP_EXECUTE: u32 = 0o010;
const OTHERS_EXECUTE: u32 = 0o001;
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

/// A privilege that a file gives to the program in it, and who may run that program.
struct Power {
    text: &'static str,
    /// The owner, the group, or the value of the extended attribute.
    value: Vec<u8>,
    execute: u32,
    uid: u32,
    gid: u32,
}

impl Power {
    /// Whether it gives all that `other` gives, to all users to whom `other` gives it.
    fn covers(&self, other: &Power) -> bool {
        let is_same = self.text == other.text && self.value == other.value;
        let owner = self.uid == other.uid || other.execute & OWNER_EXECUTE == 0;
        let group = self.gid == other.gid || other.execute & GROUP_EXECUTE == 0;
        is_same && other.execute & !self.execute == 0 && owner && group
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
    let is_new = |power: &&Power| !was.iter().any(|old| old.covers(power));
    let gained: Vec<&str> = is.iter().filter(is_new).map(|power| power.text).collect();
    Ok((!gained.is_empty()).then(|| gained.join(" and ")))
}

fn powers_of(node: &Node) -> Vec<Power> {
    let (mode, uid, gid) = (node.meta.mode, node.meta.uid, node.meta.gid);
    let execute = mode & (OWNER_EXECUTE | GROUP_EXECUTE | OTHERS_EXECUTE);
    let power = |text, value: &[u8]| Power { text, value: value.to_vec(), execute, uid, gid };
    let mut powers = Vec::new();
    if mode & SETUID != 0 {
        powers.push(power("the setuid bit", &uid.to_ne_bytes()));
    }
    if mode & SETGID != 0 && mode & GROUP_EXECUTE != 0 {
        powers.push(power("the setgid bit", &gid.to_ne_bytes()));
    }
    let all = node.xattrs.iter().flat_map(|all| all.iter());
    let capabilities = all.filter(|(name, _)| name.as_slice() == CAPABILITY);
    powers.extend(capabilities.map(|(_, value)| power("file capabilities", value)));
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
