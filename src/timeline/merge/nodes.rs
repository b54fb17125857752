//! Merges the records of nodes that both heads have: content, mode, owner, times and extended
//! attributes, each on its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::beside::Kept;
use super::conflict::{Conflict, Did};
use super::fields::FieldDiff;
use super::lines;
use super::rules::Rules;
use super::three::{Side, Three};
use crate::error::FsResult;
use crate::fs::{Found, State};
use crate::timeline::diff::same_content;
use crate::tree::{Meta, Node, Xattrs};
use crate::types::{FileKind, Ino, Timestamp, TreePath};

/// A merged record.
pub(super) struct MergedNode {
    /// The node, by its number in the table.
    pub(super) ino: Ino,
    /// Attributes and extended attributes. The link count is the one that our head has.
    pub(super) meta: Meta,
    pub(super) xattrs: Xattrs,
    pub(super) content: Content,
}

/// Where the content of a merged node is.
pub(super) enum Content {
    /// In our head.
    Ours,
    /// In the other head.
    Theirs,
    /// In neither: these are the bytes.
    Bytes(Vec<u8>),
}

/// The merged records.
#[derive(Default)]
pub(super) struct Nodes {
    pub(super) merged: Vec<MergedNode>,
    pub(super) conflicts: Vec<(Ino, Conflict)>,
    /// Files with markers.
    pub(super) unresolved: Vec<(Ino, TreePath)>,
    /// Conflicts in which our part is kept, and the other head's node is put beside it.
    pub(super) kept: Vec<(Ino, Kept)>,
}

/// A node in a state.
#[derive(Clone)]
struct Version<'a> {
    state: &'a State,
    found: Found,
    node: Arc<Node>,
}

/// A node in all states that have it, and the choice of the caller.
struct Versions<'a> {
    base: Option<Version<'a>>,
    ours: Version<'a>,
    theirs: Version<'a>,
    choice: Option<Side>,
    /// The differences between the heads that are not decided.
    open: FieldDiff,
}

impl Nodes {
    /// Merges the records of all nodes that the other head changed. `picks` are the nodes for which
    /// a head is picked.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(super) fn merge(
        three: &Three<'_>,
        rules: &Rules,
        picks: &BTreeMap<Ino, Side>,
    ) -> FsResult<Nodes> {
        let mut nodes = Nodes::default();
        for ino in three.touched() {
            let pick = picks.get(&ino);
            let is_touched = three.head(Side::Theirs).is_touched(ino);
            if (is_touched || pick == Some(&Side::Theirs))
                && pick != Some(&Side::Ours)
                && let Some(versions) = Versions::of(three, rules, ino)?
            {
                match pick {
                    Some(_) => nodes.merged.push(versions.theirs(ino)),
                    None => nodes.add(three, rules, ino, versions)?,
                }
            }
        }
        Ok(nodes)
    }

    /// Drops what concerns nodes that the merged tree does not have.
    ///
    /// # Errors
    /// Those of reading the base.
    pub(super) fn drop_others(&mut self, is_there: impl Fn(Ino) -> FsResult<bool>) -> FsResult<()> {
        let touched = self.merged.iter().map(|node| node.ino);
        let mut there = BTreeSet::new();
        for ino in touched {
            if is_there(ino)? {
                there.insert(ino);
            }
        }
        self.merged.retain(|node| there.contains(&node.ino));
        self.conflicts.retain(|(ino, _)| there.contains(ino));
        self.unresolved.retain(|(ino, _)| there.contains(ino));
        self.kept.retain(|(ino, _)| there.contains(ino));
        Ok(())
    }

    fn add(
        &mut self,
        three: &Three<'_>,
        rules: &Rules,
        ino: Ino,
        mut versions: Versions<'_>,
    ) -> FsResult<()> {
        let meta = versions.meta();
        let xattrs = versions.xattrs();
        let mut content = versions.content()?;
        let path = three.node_paths(ino)?.into_iter().next().unwrap_or_default();
        let only_content = FieldDiff { content: true, ..FieldDiff::default() };
        if versions.open == only_content
            && let Some((ours, theirs)) = &rules.markers
            && let Some(marked) = versions.marked((ours, theirs))?
        {
            content = Content::Bytes(marked);
            self.unresolved.push((ino, path));
        } else if versions.open.is_edit() {
            let did = |side| -> FsResult<Did> {
                let diff = three.diff(side, ino)?;
                Ok(match three.is_old(ino)? {
                    true => Did::Changed(FieldDiff::clone(&diff)),
                    false => Did::Added(three.head(side).kind(ino)?.unwrap_or(FileKind::File)),
                })
            };
            let (ours, theirs) = (did(Side::Ours)?, did(Side::Theirs)?);
            if rules.markers.is_some() {
                let found = Some(versions.theirs.found.clone());
                let kept = Kept { path, theirs: found, did: theirs, only_attributes: true };
                self.kept.push((ino, kept));
            } else {
                self.conflicts.push((ino, Conflict { path, ours, theirs }));
            }
        }
        self.merged.push(MergedNode { ino, meta, xattrs, content });
        Ok(())
    }
}

impl<'a> Versions<'a> {
    /// The versions of a node; none unless both heads have it.
    fn of(three: &Three<'a>, rules: &Rules, ino: Ino) -> FsResult<Option<Versions<'a>>> {
        let version = |state: &'a State, found: Found| -> FsResult<Option<Version<'a>>> {
            if found.ino().is_none() {
                return Ok(None);
            }
            let node = state.node(&found)?;
            Ok(Some(Version { state, found, node }))
        };
        let [ours, theirs] = Side::BOTH.map(|side| three.head(side));
        let (Some(ours), Some(theirs)) =
            (version(ours.state(), ours.node(ino)?)?, version(theirs.state(), theirs.node(ino)?)?)
        else {
            return Ok(None);
        };
        let base = version(three.base.state, three.base.node(ino)?)?;
        let choice = rules.choice(&three.node_paths(ino)?);
        Ok(Some(Versions { base, ours, theirs, choice, open: FieldDiff::default() }))
    }

    /// The record as the other head has it.
    fn theirs(&self, ino: Ino) -> MergedNode {
        let nlink = self.ours.node.meta.nlink;
        let Node { meta, xattrs, .. } = Node::clone(&self.theirs.node);
        MergedNode { ino, meta: Meta { nlink, ..meta }, xattrs, content: Content::Theirs }
    }

    /// Merges one part of the node. The second value says whether it conflicts.
    fn pick<T: PartialEq + Clone>(&self, of: impl Fn(&Node) -> T) -> (T, bool) {
        let (ours, theirs) = (of(&self.ours.node), of(&self.theirs.node));
        let base = self.base.as_ref().map(|base| of(&base.node));
        if ours == theirs || base.as_ref() == Some(&theirs) {
            return (ours, false);
        }
        match self.choice {
            _ if base.as_ref() == Some(&ours) => (theirs, false),
            Some(Side::Ours) => (ours, false),
            Some(Side::Theirs) => (theirs, false),
            None => (ours, true),
        }
    }

    /// Times never conflict: if both heads changed one, it is the later one.
    fn time(&self, of: impl Fn(&Meta) -> Timestamp) -> Timestamp {
        let (ours, theirs) = (of(&self.ours.node.meta), of(&self.theirs.node.meta));
        match self.base.as_ref().map(|base| of(&base.node.meta)) {
            Some(base) if base == ours => theirs,
            Some(base) if base == theirs => ours,
            _ => ours.max(theirs),
        }
    }

    fn meta(&mut self) -> Meta {
        let (mode, mode_conflicts) = self.pick(|node| node.meta.mode);
        let ((uid, gid), owner_conflicts) = self.pick_owner();
        self.open.mode |= mode_conflicts;
        self.open.owner |= owner_conflicts;
        Meta {
            mode,
            uid,
            gid,
            atime: self.time(|meta| meta.atime),
            mtime: self.time(|meta| meta.mtime),
            ctime: self.time(|meta| meta.ctime),
            ..self.ours.node.meta
        }
    }

    fn pick_owner(&self) -> ((u32, u32), bool) {
        let (uid, a) = self.pick(|node| node.meta.uid);
        let (gid, b) = self.pick(|node| node.meta.gid);
        ((uid, gid), a || b)
    }

    fn xattrs(&mut self) -> Xattrs {
        let all = |node: &Node| node.xattrs.iter().flat_map(|map| map.keys().cloned()).collect();
        let (ours, theirs): (BTreeSet<Vec<u8>>, BTreeSet<Vec<u8>>) =
            (all(&self.ours.node), all(&self.theirs.node));
        let mut merged = BTreeMap::new();
        for name in ours.union(&theirs) {
            let (value, conflicts) =
                self.pick(|node| node.xattrs.as_ref().and_then(|map| map.get(name).cloned()));
            if let Some(value) = value {
                merged.insert(name.clone(), value);
            }
            if conflicts {
                self.open.xattrs.insert(name.clone());
            }
        }
        (!merged.is_empty()).then(|| Arc::new(merged))
    }

    fn content(&mut self) -> FsResult<Content> {
        let same =
            |a: &Version<'_>, b: &Version<'_>| same_content(a.state, &a.found, b.state, &b.found);
        let (ours, theirs) = (&self.ours, &self.theirs);
        if ours.node.kind() == FileKind::Dir || same(ours, theirs)? {
            return Ok(Content::Ours);
        }
        if let Some(base) = &self.base {
            if same(base, theirs)? {
                return Ok(Content::Ours);
            }
            if same(base, ours)? {
                return Ok(Content::Theirs);
            }
        }
        if let Some(base) = &self.base
            && let Some([base, ours, theirs]) = texts([base, ours, theirs])?
            && let Some(merged) = lines::merge(&base, &ours, &theirs).clean()
        {
            return Ok(Content::Bytes(merged));
        }
        match self.choice {
            Some(Side::Ours) => Ok(Content::Ours),
            Some(Side::Theirs) => Ok(Content::Theirs),
            None => {
                self.open.content = true;
                Ok(Content::Ours)
            }
        }
    }

    /// The content with conflict markers; none if it is not text.
    fn marked(&self, labels: (&str, &str)) -> FsResult<Option<Vec<u8>>> {
        let none = &self.ours;
        let base = self.base.as_ref();
        let read = texts([base.unwrap_or(none), &self.ours, &self.theirs])?;
        Ok(read.map(|[text, ours, theirs]| {
            let text = if base.is_some() { text } else { Vec::new() };
            lines::merge(&text, &ours, &theirs).marked(labels)
        }))
    }
}

/// The contents of three files; none if one of them is not text, too large or hidden.
fn texts(versions: [&Version<'_>; 3]) -> FsResult<Option<[Vec<u8>; 3]>> {
    let is_readable = |version: &Version<'_>| {
        version.node.kind() == FileKind::File
            && version.node.size() <= lines::LARGEST
            && !version.state.is_hidden(&version.found)
    };
    if !versions.iter().all(|version| is_readable(version)) {
        return Ok(None);
    }
    let mut read = [Vec::new(), Vec::new(), Vec::new()];
    for (version, text) in versions.iter().zip(&mut read) {
        *text = version.state.read_all(&version.found)?;
        if !lines::is_text(text) {
            return Ok(None);
        }
    }
    Ok(Some(read))
}
