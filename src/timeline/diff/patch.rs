//! Changes as text: the number of lines, and patches that `git apply` and `patch` accept.

use imara_diff::{Algorithm, Diff, InternedInput, Token};

use crate::error::FsResult;
use crate::fs::{Found, State};
use crate::timeline::diff::binary;
use crate::timeline::diff::{PathChange, What};
use crate::tree::{Body, Node};
use crate::types::{ByteRange, FileKind, TreePath};

/// The patch of a larger file says only that the file differs. Larger patches are useless.
const LARGEST_TEXT: u64 = 64 << 20;
/// Lines around a change.
const CONTEXT: usize = 3;
/// As git: a NUL in the first bytes makes a file binary.
const LOOKED_AT: u64 = 8000;

/// The parts of a change that the caller wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The number of lines.
    Lines,
    /// The patch, too.
    Patch,
}

/// A change as text.
pub struct Text {
    /// Lines added and removed; none for a binary file.
    pub lines: Option<(u64, u64)>,
    /// The patch; empty if it is not wanted.
    pub patch: Vec<u8>,
}

/// One side of a change.
struct Side {
    exists: bool,
    mode: u32,
    content: Vec<u8>,
    binary: bool,
    is_too_large: bool,
}

impl Side {
    fn if_exists(&self) -> Option<&[u8]> {
        self.exists.then_some(&self.content)
    }

    fn nothing() -> Side {
        Side { exists: false, mode: 0, content: Vec::new(), binary: false, is_too_large: false }
    }
}

/// The patch of one change; none for a change that a patch cannot express (a directory, a fifo,
/// times).
///
/// # Errors
/// Fails if the base cannot be read.
pub fn text_of(
    old_state: &State,
    new_state: &State,
    change: &PathChange,
    wanted: Wanted,
) -> FsResult<Option<Text>> {
    let old = side(old_state, &change.old, wanted)?;
    let new = side(new_state, &change.new, wanted)?;
    if !old.exists && !new.exists || matches!(change.what, What::DirTimes) {
        return Ok(None);
    }
    let old_path = change.old_path.as_ref().unwrap_or(&change.path);
    if old.exists && new.exists && old.mode & 0o170_000 != new.mode & 0o170_000 {
        // git tells a change of type as a deletion and a creation.
        let mut text = compose(old_path, &old, &change.path, &Side::nothing(), wanted);
        let second = compose(old_path, &Side::nothing(), &change.path, &new, wanted);
        text.lines = text.lines.zip(second.lines).map(|(a, b)| (a.0 + b.0, a.1 + b.1));
        text.patch.extend(second.patch);
        return Ok(Some(text));
    }
    if change.what == What::Attributes && old.mode == new.mode {
        return Ok(None);
    }
    Ok(Some(compose(old_path, &old, &change.path, &new, wanted)))
}

fn side(state: &State, found: &Found, wanted: Wanted) -> FsResult<Side> {
    let Some(attr) = state.attr(found) else { return Ok(Side::nothing()) };
    let node: std::sync::Arc<Node> = state.record(found)?.0;
    Ok(match attr.kind {
        FileKind::File => {
            let mode = if attr.meta.mode & 0o100 == 0 { 0o100_644 } else { 0o100_755 };
            // A hidden file is reported like one that is too large: it differs.
            if attr.size > LARGEST_TEXT || state.is_hidden(found) {
                Side { exists: true, mode, binary: true, is_too_large: true, ..Side::nothing() }
            } else {
                let first = state.read_range(found, ByteRange::at(0, attr.size.min(LOOKED_AT)))?;
                let binary = first.contains(&0);
                // Lines of a binary file are not counted.
                let is_read = wanted == Wanted::Patch || !binary;
                let content = if is_read { state.read_all(found)? } else { Vec::new() };
                Side { exists: true, mode, content, binary, is_too_large: false }
            }
        }
        FileKind::Symlink => {
            let content = match &node.body {
                Body::Symlink { target } => target.clone(),
                Body::File { .. } | Body::Dir { .. } | Body::Special => Vec::new(),
            };
            Side { exists: true, mode: 0o120_000, content, ..Side::nothing() }
        }
        FileKind::Dir | FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block => {
            Side::nothing()
        }
    })
}

fn compose(
    old_path: &TreePath,
    old: &Side,
    new_path: &TreePath,
    new: &Side,
    wanted: Wanted,
) -> Text {
    if wanted == Wanted::Lines {
        let is_text = ![old, new].into_iter().any(|side| side.binary || side.is_too_large);
        let lines = is_text.then(|| Lines::of(&old.content, &new.content).count());
        return Text { lines, patch: Vec::new() };
    }
    let mut patch = Vec::new();
    let (a, b) = (quoted("a/", old_path), quoted("b/", new_path));
    let mut head = format!("diff --git {a} {b}\n");
    let mut say = |line: String| head.push_str(&line);
    match (old.exists, new.exists) {
        (false, _) => say(format!("new file mode {:06o}\n", new.mode)),
        (_, false) => say(format!("deleted file mode {:06o}\n", old.mode)),
        _ => {
            if old.mode != new.mode {
                say(format!("old mode {:06o}\nnew mode {:06o}\n", old.mode, new.mode));
            }
            if old_path != new_path {
                say(format!(
                    "rename from {}\nrename to {}\n",
                    quoted("", old_path),
                    quoted("", new_path)
                ));
            }
        }
    }
    patch.extend_from_slice(head.as_bytes());
    if old.content == new.content && !(old.binary || new.binary) {
        // Without hunks only this line tells patch(1) which side is no file and which an empty one.
        match (old.exists, new.exists) {
            (false, _) => patch.extend_from_slice(b"index 0000000..e69de29\n"),
            (_, false) => patch.extend_from_slice(b"index e69de29..0000000\n"),
            _ => {}
        }
        return Text { lines: Some((0, 0)), patch };
    }
    let from = if old.exists { a } else { "/dev/null".to_owned() };
    let to = if new.exists { b } else { "/dev/null".to_owned() };
    if old.is_too_large || new.is_too_large {
        patch.extend_from_slice(format!("Binary files {from} and {to} differ\n").as_bytes());
        return Text { lines: None, patch };
    }
    if old.binary || new.binary {
        let mode =
            if old.exists && new.exists && old.mode == new.mode { Some(new.mode) } else { None };
        binary::write(old.if_exists(), new.if_exists(), mode, &mut patch);
        return Text { lines: None, patch };
    }
    let (from, to) = (ended(from), ended(to));
    patch.extend_from_slice(format!("--- {from}\n+++ {to}\n").as_bytes());
    let lines = Lines::of(&old.content, &new.content);
    lines.hunks(&mut patch);
    Text { lines: Some(lines.count()), patch }
}

/// A name as the last thing of its line: a tab after one with spaces, or patch(1) takes the first
/// word for the name.
fn ended(mut name: String) -> String {
    if name.contains(' ') && !name.starts_with('"') {
        name.push('\t');
    }
    name
}

/// How the lines of two contents differ.
struct Lines<'a> {
    input: InternedInput<&'a [u8]>,
    diff: Diff,
}

impl<'a> Lines<'a> {
    fn of(old: &'a [u8], new: &'a [u8]) -> Lines<'a> {
        let input = InternedInput::new(
            imara_diff::sources::byte_lines(old),
            imara_diff::sources::byte_lines(new),
        );
        let mut diff = Diff::compute(Algorithm::Histogram, &input);
        diff.postprocess_lines(&input);
        Lines { input, diff }
    }

    /// Lines added and removed.
    fn count(&self) -> (u64, u64) {
        (u64::from(self.diff.count_additions()), u64::from(self.diff.count_removals()))
    }

    /// Appends the hunks of a unified diff.
    fn hunks(&self, out: &mut Vec<u8>) {
        let all: Vec<_> = self.diff.hunks().collect();
        let mut at = 0;
        while at < all.len() {
            // Hunks whose context would touch are one.
            let mut last = at;
            while let (Some(this), Some(next)) = (all.get(last), all.get(last + 1)) {
                if (next.before.start as usize) > this.before.end as usize + 2 * CONTEXT {
                    break;
                }
                last += 1;
            }
            let group = all.get(at..=last).unwrap_or_default();
            print_group(&self.input, group, out);
            at = last + 1;
        }
    }
}

fn print_group(input: &InternedInput<&[u8]>, group: &[imara_diff::Hunk], out: &mut Vec<u8>) {
    let (Some(first), Some(last)) = (group.first(), group.last()) else { return };
    let lead = (first.before.start as usize).min(CONTEXT);
    let old_from = first.before.start as usize - lead;
    let old_to = (last.before.end as usize + CONTEXT).min(input.before.len());
    let new_from = first.after.start as usize - lead;
    let new_to = last.after.end as usize + (old_to - last.before.end as usize);
    let position = |from: usize, to: usize| match to - from {
        0 => format!("{from},0"),
        1 => format!("{}", from + 1),
        len => format!("{},{len}", from + 1),
    };
    let head = format!("@@ -{} +{} @@\n", position(old_from, old_to), position(new_from, new_to));
    out.extend_from_slice(head.as_bytes());
    let mut line = |sign: u8, token: &Token| {
        let text: &[u8] = input.interner[*token];
        out.push(sign);
        out.extend_from_slice(text);
        if !text.ends_with(b"\n") {
            out.extend_from_slice(b"\n\\ No newline at end of file\n");
        }
    };
    let mut at = old_from;
    for hunk in group {
        for token in input.before.get(at..hunk.before.start as usize).unwrap_or_default() {
            line(b' ', token);
        }
        for token in input
            .before
            .get(hunk.before.start as usize..hunk.before.end as usize)
            .unwrap_or_default()
        {
            line(b'-', token);
        }
        for token in
            input.after.get(hunk.after.start as usize..hunk.after.end as usize).unwrap_or_default()
        {
            line(b'+', token);
        }
        at = hunk.before.end as usize;
    }
    for token in input.before.get(at..old_to).unwrap_or_default() {
        line(b' ', token);
    }
}

/// A path as git writes it: in quotes, with escapes, if it has bytes that need them.
fn quoted(prefix: &str, path: &TreePath) -> String {
    let bytes = path.as_bytes();
    let plain = bytes.iter().all(|b| (0x20..0x7f).contains(b) && *b != b'"' && *b != b'\\');
    let mut text = String::from(prefix);
    for &byte in bytes {
        match byte {
            b'\n' if !plain => text.push_str("\\n"),
            b'\t' if !plain => text.push_str("\\t"),
            b'"' | b'\\' if !plain => {
                text.push('\\');
                text.push(char::from(byte));
            }
            0x20..0x7f => text.push(char::from(byte)),
            other => text.push_str(&format!("\\{other:03o}")),
        }
    }
    if plain { text } else { format!("\"{text}\"") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff(old: &str, new: &str) -> String {
        let mut out = Vec::new();
        Lines::of(old.as_bytes(), new.as_bytes()).hunks(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn hunks_are_those_of_a_unified_diff() {
        assert_eq!(diff("a\nb\nc\n", "a\nX\nc\n"), "@@ -1,3 +1,3 @@\n a\n-b\n+X\n c\n");
        assert_eq!(diff("", "a\n"), "@@ -0,0 +1 @@\n+a\n");
        assert_eq!(
            diff("a", "b"),
            "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
        );
    }

    #[test]
    fn hunks_far_apart_stay_apart() {
        let old: String = (0..40).map(|n| format!("{n}\n")).collect();
        let new = old.replace("\n5\n", "\nfive\n").replace("\n30\n", "\nthirty\n");
        let text = diff(&old, &new);
        assert_eq!(text.matches("@@ -").count(), 2, "{text}");
        assert!(text.contains("@@ -28,7 +28,7 @@"), "{text}");
    }

    #[test]
    fn a_caller_that_wants_only_line_counts_gets_no_patch() {
        let path = TreePath::parse(b"a").unwrap();
        let side = |content: &[u8]| {
            let binary = content.contains(&0);
            Side {
                exists: true,
                mode: 0o100_644,
                content: content.to_vec(),
                binary,
                ..Side::nothing()
            }
        };
        for (old, new) in
            [(&b"a\nb\n"[..], &b"a\nc\nd\n"[..]), (b"\0one", b"\0two"), (b"same", b"same")]
        {
            let text = |wanted| compose(&path, &side(old), &path, &side(new), wanted);
            let (lines, whole) = (text(Wanted::Lines), text(Wanted::Patch));
            assert_eq!(lines.lines, whole.lines);
            assert!(lines.patch.is_empty() && !whole.patch.is_empty());
        }
    }

    #[test]
    fn odd_names_are_quoted_as_git_does() {
        assert_eq!(quoted("a/", &TreePath::parse(b"x y").unwrap()), "a/x y");
        assert_eq!(quoted("a/", &TreePath::parse(b"n\n\xff").unwrap()), "\"a/n\\n\\377\"");
    }
}
