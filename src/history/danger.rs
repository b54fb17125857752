//! What an apply must not write unless its caller consents: it would run code, or give power, outside the sandbox.
//!
//! * **Protected paths** are files that programs outside run by themselves: hooks and configuration of git, settings of
//!   editors and agents, workflows of forges. A `Makefile` is none: somebody has to ask for it.
//! * **Privileges** are the setuid bit, the setgid bit of an executable, and file capabilities that the base does not have.
//!   The setgid bit of a directory gives no power, so it passes.

use serde::{Deserialize, Serialize};

use crate::error::FsResult;
use crate::fs::State;
use crate::history::diff::{PathChange, What};
use crate::store::record::Node;
use crate::types::{FileKind, Name, TreePath};

/// Which dangers the caller of an apply takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consent {
    /// Protected paths, also those that are not named.
    pub protected: bool,
    /// Set-id bits and file capabilities.
    pub privileges: bool,
}

impl Consent {
    /// All dangers are taken.
    pub const ALL: Consent = Consent { protected: true, privileges: true };
}

/// The protected paths, in whatever directory they lie. All below them is protected, too.
pub const PROTECTED: &[&[&str]] = &[
    &[".git", "hooks"],
    &[".git", "config"],
    &[".git", "config.worktree"],
    &[".git", "info", "attributes"],
    &[".gitmodules"],
    &[".gitattributes"],
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
];
/// Below `.git/modules` each submodule has its own.
const OF_A_SUBMODULE: &[&str] = &["hooks", "config", "config.worktree"];

/// The bits that give a program the rights of its owner or group.
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const GROUP_RUNS: u32 = 0o010;
const CAPABILITY: &[u8] = b"security.capability";

/// The changes that need a consent which the caller does not give, and why.
pub(super) fn refused(
    (from, to): (&State, &State),
    changes: &[PathChange],
    named: &[TreePath],
    consent: Consent,
) -> FsResult<Vec<(TreePath, String)>> {
    let mut refused = Vec::new();
    for change in changes.iter().filter(|change| change.what != What::DirTimes) {
        if !consent.protected && needs_naming(change, from, to, named) {
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

/// Whether a change is at or below a protected path that the caller has not named, or puts something else in the place of a
/// directory that can hold one.
fn needs_naming(change: &PathChange, from: &State, to: &State, named: &[TreePath]) -> bool {
    let consents = |named: &TreePath| change.path.starts_with(named) && is_protected(named);
    if is_protected(&change.path) {
        return !named.iter().any(consents);
    }
    // '.git' can be a link, or a file that names a directory elsewhere, whose hooks then run.
    let kinds = [from.kind(&change.old), to.kind(&change.new)];
    let is_replaced = kinds.iter().flatten().any(|kind| *kind != FileKind::Dir);
    is_replaced && holds_protected(&change.path) && !named.contains(&change.path)
}

/// Whether a path is protected, or lies below one that is.
pub fn is_protected(path: &TreePath) -> bool {
    let names: Vec<Name> = path.names().collect();
    let begins = |at: usize, parts: &[&str]| {
        let there = names.get(at..at + parts.len()).unwrap_or_default();
        there.len() == parts.len()
            && there.iter().zip(parts).all(|(name, part)| name.as_bytes() == part.as_bytes())
    };
    let is_of_submodule = |at: usize| {
        let below = names.get(at + 2..).unwrap_or_default();
        begins(at, &[".git", "modules"])
            && below.iter().any(|name| OF_A_SUBMODULE.iter().any(|part| name.as_bytes() == part.as_bytes()))
    };
    (0..names.len()).any(|at| PROTECTED.iter().any(|parts| begins(at, parts)) || is_of_submodule(at))
}

/// Whether a path can be a directory with protected paths in it.
fn holds_protected(path: &TreePath) -> bool {
    let Some((_, last)) = path.split() else { return false };
    let mut dirs = PROTECTED.iter().filter(|parts| parts.len() > 1).filter_map(|parts| parts.first());
    dirs.any(|dir| last.as_bytes() == dir.as_bytes())
}

/// What power a change gives a file that the base's did not have.
fn privileges(from: &State, to: &State, change: &PathChange) -> FsResult<Option<String>> {
    if to.kind(&change.new) != Some(FileKind::File) {
        return Ok(None);
    }
    let is = gives(to.node(&change.new)?.as_ref());
    // A file whose content changes is another program with the same power.
    let keeps = change.what == What::Attributes && from.kind(&change.old) == Some(FileKind::File);
    let was = if keeps { gives(from.node(&change.old)?.as_ref()) } else { Vec::new() };
    let gained: Vec<&str> = is.into_iter().filter(|power| !was.contains(power)).collect();
    Ok((!gained.is_empty()).then(|| gained.join(" and ")))
}

fn gives(node: &Node) -> Vec<&'static str> {
    let mode = node.meta.mode;
    let has_capability =
        node.xattrs.as_ref().is_some_and(|all| all.iter().any(|(name, _)| name.as_slice() == CAPABILITY));
    let powers = [
        (mode & SETUID != 0, "the setuid bit"),
        (mode & SETGID != 0 && mode & GROUP_RUNS != 0, "the setgid bit"),
        (has_capability, "file capabilities"),
    ];
    powers.into_iter().filter(|(has, _)| *has).map(|(_, power)| power).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protected_paths_are_known_at_every_depth() {
        let is = |path: &str| is_protected(&TreePath::parse(path.as_bytes()).unwrap());
        for path in [
            ".git/hooks/pre-commit",
            ".git/hooks",
            ".git/config",
            "sub/.git/config",
            ".envrc",
            "a/b/.envrc",
            ".vscode/tasks.json",
            ".github/workflows/ci.yml",
            ".git/modules/lib/hooks/post-checkout",
            ".git/modules/a/b/config",
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
    fn the_list_is_what_is_documented() {
        let text = include_str!("../../docs/CLI.md");
        for parts in PROTECTED {
            assert!(text.contains(&format!("`{}`", parts.join("/"))), "docs/CLI.md does not list {parts:?}");
        }
    }
}
