//! Compares states and lists the changed paths.
//!
//! * A change of nothing but a directory's times is not listed.
//! * A path below a [hidden](Sandbox::hide) one is not listed.

use crate::error::{Attempt, Error, FsResult, Kind, Result};
use crate::fs::State;
use crate::sandbox::changes::{Change, ChangeKind, Changes, Writer};
use crate::sandbox::{Detail, Protected, Rev, Sandbox};
use crate::timeline::apply::protected;
use crate::timeline::diff;
use crate::timeline::diff::patch;
use crate::timeline::diff::patch::Wanted;
use crate::timeline::diff::{PathChange, What};
use crate::tree::Body;
use crate::types::{FileKind, Ino, TreePath};

impl Sandbox {
    /// Lists what differs between two states, at and below `paths`. Ends with an error when `go`
    /// becomes false.
    pub(super) fn diff(
        &self,
        from: &Rev,
        to: &Rev,
        paths: &[TreePath],
        detail: Detail,
        go: &dyn Fn() -> bool,
    ) -> Result<Changes> {
        let (old, new) = (self.state(from)?, self.state(to)?);
        let attempt = || format!("compare {from} with {to}");
        let below = |path: &TreePath| paths.is_empty() || paths.iter().any(|p| path.starts_with(p));
        let mut lister = self.lister_for_review(detail);
        let with_base = [from, to].contains(&&Rev::Base);
        for change in compare(with_base, &old, &new).attempt(attempt)? {
            if !go() {
                return Err(Error::new(Kind::Failed, attempt(), "the sandbox is being closed"));
            }
            let change = change.attempt(attempt)?;
            if below(&change.path) || change.old_path.as_ref().is_some_and(below) {
                lister.add(&old, &new, &change).map_err(|error| error.during(attempt()))?;
            }
        }
        Ok(lister.finish())
    }

    /// Lists a comparison without lines and patches.
    pub(super) fn list(
        &self,
        old: &State,
        new: &State,
        walk: FsResult<diff::Comparison<'_>>,
        attempt: &str,
    ) -> Result<Changes> {
        let mut lister = self.lister(Detail::NameStatus);
        for change in walk.attempt(|| attempt)? {
            lister.add(old, new, &change.attempt(|| attempt)?)?;
        }
        Ok(lister.finish())
    }

    pub(super) fn lister(&self, detail: Detail) -> Lister {
        Lister { detail, protected: None, writer: Writer::new(self.store_path()) }
    }

    /// A lister for a list that is reviewed before an apply: it marks dangerous changes.
    pub(super) fn lister_for_review(&self, detail: Detail) -> Lister {
        Lister { protected: Some(self.timeline.protected()), ..self.lister(detail) }
    }
}

/// Compares two states. `with_base` says that one of them is the base as it is now.
pub(super) fn compare<'a>(
    with_base: bool,
    old: &'a State,
    new: &'a State,
) -> FsResult<diff::Comparison<'a>> {
    let walk = diff::compare(old, new)?;
    Ok(if with_base { walk.with_base() } else { walk })
}

/// Writes a list of changes.
pub(super) struct Lister {
    detail: Detail,
    /// The protected paths, if dangerous changes are marked.
    protected: Option<Protected>,
    writer: Writer,
}

impl Lister {
    /// Adds a change, unless it is one that is not listed.
    pub(super) fn add(&mut self, old: &State, new: &State, change: &PathChange) -> Result<()> {
        if !is_listed(old, new, change) {
            return Ok(());
        }
        let attempt = || format!("list '{}'", change.path);
        let mut listed = change_of(old, new, change, self.detail).attempt(attempt)?;
        if let Some(protected) = &self.protected {
            listed.danger = protected::dangers(protected, (old, new), change).attempt(attempt)?;
        }
        self.writer.push(listed)
    }

    pub(super) fn finish(self) -> Changes {
        self.writer.finish()
    }
}

fn is_listed(old: &State, new: &State, change: &PathChange) -> bool {
    change.what != What::DirTimes
        && !old.is_in_hidden(&change.old)
        && !new.is_in_hidden(&change.new)
}

/// Describes a change, with as much detail as asked for.
pub(super) fn change_of(
    old: &State,
    new: &State,
    change: &PathChange,
    detail: Detail,
) -> FsResult<Change> {
    let (before, after) = (old.kind_and_size(&change.old), new.kind_and_size(&change.new));
    let size =
        |of: Option<(FileKind, u64)>| of.filter(|(kind, _)| *kind == FileKind::File).map(|of| of.1);
    let text = match detail {
        Detail::NameStatus => None,
        Detail::Stat => patch::text_of(old, new, change, Wanted::Lines)?,
        Detail::Patch => patch::text_of(old, new, change, Wanted::Patch)?,
    };
    let is_symlink = after.is_some_and(|(kind, _)| kind == FileKind::Symlink);
    Ok(Change {
        target: if is_symlink { link_target(new, change) } else { None },
        danger: None,
        path: change.path.clone(),
        kind: match change.what {
            What::Added => ChangeKind::Added,
            What::Deleted => ChangeKind::Deleted,
            What::Type => ChangeKind::TypeChanged,
            What::Content => ChangeKind::Modified,
            What::Links | What::Attributes | What::DirTimes => ChangeKind::Attributes,
            What::Renamed => ChangeKind::Renamed,
        },
        old_path: change.old_path.clone(),
        file: after.or(before).map_or(FileKind::File, |of| of.0),
        ino: change.new.ino().or(change.old.ino()).unwrap_or(Ino(0)),
        old_size: size(before),
        new_size: size(after),
        binary: text.as_ref().is_some_and(|t| t.lines.is_none()),
        lines: text.as_ref().and_then(|t| t.lines),
        patch: text.filter(|_| detail == Detail::Patch).map(|t| t.patch),
    })
}

/// The target of a link in the newer state. It is missing if the node cannot be read: after an
/// apply, a link that only the base has may be at another path by now.
fn link_target(new: &State, change: &PathChange) -> Option<Vec<u8>> {
    match &new.node(&change.new).ok()?.body {
        Body::Symlink { target } => Some(target.clone()),
        Body::File { .. } | Body::Dir { .. } | Body::Special => None,
    }
}
