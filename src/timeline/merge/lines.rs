//! Merges two versions of a text by lines, as diff3 and git do.
//!
//! * Changes of different lines are both taken. Changes that overlap or touch conflict, unless they
//!   are equal.
//! * Lines at the beginning and end of a conflict that both versions have are outside of it.

use std::ops::Range;

use imara_diff::{Algorithm, Diff, InternedInput};

/// The larger one of two versions may have so many bytes.
pub(super) const LARGEST: u64 = 64 << 20;
const MARK: usize = 7;

/// A part of a merged text.
#[derive(Debug, PartialEq, Eq)]
enum Part<'a> {
    Merged(Vec<&'a [u8]>),
    Conflict(Vec<&'a [u8]>, Vec<&'a [u8]>),
}

/// A merged text.
#[derive(Debug)]
pub(super) struct Merged<'a>(Vec<Part<'a>>);

/// Whether a content is text: git's rule, but for all of it, because a marker in a binary file
/// destroys it.
pub(super) fn is_text(content: &[u8]) -> bool {
    !content.contains(&0)
}

/// Merges two versions of `base`.
pub(super) fn merge<'a>(base: &'a [u8], ours: &'a [u8], theirs: &'a [u8]) -> Merged<'a> {
    let (a, b) = (hunks(base, ours), hunks(base, theirs));
    let base = lines(base);
    let sides = [(lines(ours), a), (lines(theirs), b)];
    let mut parts = Vec::new();
    let (mut at, mut next) = (0, [0, 0]);
    while let Some(region) = region(&sides, next) {
        parts.push(Part::Merged(slice(&base, at..region.start)));
        let mut versions = [None, None];
        for ((text, hunks), (next, version)) in
            sides.iter().zip(next.iter_mut().zip(versions.iter_mut()))
        {
            let of_region = hunks.get(*next..).unwrap_or_default();
            let count = of_region.iter().take_while(|h| h.0.start <= region.end).count();
            if let (Some(first), Some(last)) =
                (of_region.first(), count.checked_sub(1).and_then(|last| of_region.get(last)))
            {
                let start = first.1.start - (first.0.start - region.start);
                let end = last.1.end + (region.end - last.0.end);
                *version = Some(slice(text, start..end));
            }
            *next += count;
        }
        match versions {
            [Some(ours), Some(theirs)] if ours != theirs => conflict(ours, theirs, &mut parts),
            [Some(version), _] | [None, Some(version)] => parts.push(Part::Merged(version)),
            [None, None] => break,
        }
        at = region.end;
    }
    parts.push(Part::Merged(slice(&base, at..base.len())));
    Merged(parts)
}

impl Merged<'_> {
    /// The text, if there is no conflict.
    pub(super) fn clean(&self) -> Option<Vec<u8>> {
        let mut text = Vec::new();
        for part in &self.0 {
            match part {
                Part::Merged(lines) => text.extend(lines.concat()),
                Part::Conflict(..) => return None,
            }
        }
        Some(text)
    }

    /// The text, with a marker at each conflict.
    pub(super) fn marked(&self, (ours, theirs): (&str, &str)) -> Vec<u8> {
        let mut text = Vec::new();
        let mark = |sign: char, label: &str, text: &mut Vec<u8>| {
            if text.last().is_some_and(|last| *last != b'\n') {
                text.push(b'\n');
            }
            text.extend(std::iter::repeat_n(sign as u8, MARK));
            if !label.is_empty() {
                text.push(b' ');
                text.extend_from_slice(label.as_bytes());
            }
            text.push(b'\n');
        };
        for part in &self.0 {
            match part {
                Part::Merged(lines) => text.extend(lines.concat()),
                Part::Conflict(a, b) => {
                    mark('<', ours, &mut text);
                    text.extend(a.concat());
                    mark('=', "", &mut text);
                    text.extend(b.concat());
                    mark('>', theirs, &mut text);
                }
            }
        }
        text
    }
}

/// Whether a text still has the markers of a conflict.
pub(super) fn has_markers(content: &[u8]) -> bool {
    let begins = |sign: u8| {
        move |line: &&[u8]| {
            line.len() > MARK
                && line.iter().take(MARK).all(|byte| *byte == sign)
                && line.get(MARK).is_some_and(|byte| matches!(byte, b' ' | b'\n' | b'\r'))
        }
    };
    let lines = lines(content);
    lines.iter().any(|line| begins(b'<')(line)) && lines.iter().any(|line| begins(b'>')(line))
}

/// A changed range of lines before and after.
type Hunk = (Range<usize>, Range<usize>);

fn hunks(before: &[u8], after: &[u8]) -> Vec<Hunk> {
    let input = InternedInput::new(lines_of(before), lines_of(after));
    let mut diff = Diff::compute(Algorithm::Histogram, &input);
    diff.postprocess_lines(&input);
    let wide = |range: Range<u32>| range.start as usize..range.end as usize;
    diff.hunks().map(|hunk| (wide(hunk.before), wide(hunk.after))).collect()
}

fn lines_of(text: &[u8]) -> imara_diff::sources::ByteLines<'_> {
    imara_diff::sources::byte_lines(text)
}

fn lines(text: &[u8]) -> Vec<&[u8]> {
    text.split_inclusive(|byte| *byte == b'\n').collect()
}

fn slice<'a>(lines: &[&'a [u8]], range: Range<usize>) -> Vec<&'a [u8]> {
    lines.get(range).unwrap_or_default().to_vec()
}

/// The next lines of the base that either version changed, joined with all changes that touch them.
fn region(sides: &[(Vec<&[u8]>, Vec<Hunk>); 2], next: [usize; 2]) -> Option<Range<usize>> {
    let heads = sides.iter().zip(next).filter_map(|((_, hunks), next)| hunks.get(next));
    let mut region = heads.map(|hunk| hunk.0.clone()).min_by_key(|range| range.start)?;
    loop {
        let touching = sides.iter().zip(next).flat_map(|((_, hunks), next)| {
            hunks.get(next..).unwrap_or_default().iter().take_while(|h| h.0.start <= region.end)
        });
        let end = touching.map(|hunk| hunk.0.end).max().unwrap_or(region.end);
        if end <= region.end {
            return Some(region);
        }
        region.end = end;
    }
}

/// Appends a conflict without the lines that both versions begin and end with.
fn conflict<'a>(mut ours: Vec<&'a [u8]>, mut theirs: Vec<&'a [u8]>, parts: &mut Vec<Part<'a>>) {
    let same = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
    parts.push(Part::Merged(ours.drain(..same).collect()));
    theirs.drain(..same);
    let same = ours.iter().rev().zip(theirs.iter().rev()).take_while(|(a, b)| a == b).count();
    let end = ours.split_off(ours.len() - same);
    theirs.truncate(theirs.len() - same);
    parts.push(Part::Conflict(ours, theirs));
    parts.push(Part::Merged(end));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn clean(base: &str, ours: &str, theirs: &str) -> Option<String> {
        let merged = merge(base.as_bytes(), ours.as_bytes(), theirs.as_bytes()).clean();
        merged.map(|text| String::from_utf8(text).unwrap())
    }

    #[test]
    fn changes_of_different_lines_are_both_taken() {
        let base = "1\n2\n3\n4\n5\n";
        assert_eq!(
            clean(base, "one\n2\n3\n4\n5\n", "1\n2\n3\n4\nfive\n").as_deref(),
            Some("one\n2\n3\n4\nfive\n")
        );
        assert_eq!(clean(base, base, "1\n5\n").as_deref(), Some("1\n5\n"));
        assert_eq!(clean(base, "", base).as_deref(), Some(""));
        assert_eq!(clean(base, "1\nx\n", "1\nx\n").as_deref(), Some("1\nx\n"));
    }

    #[test]
    fn changes_that_touch_conflict_as_in_git() {
        let base = b"1\n2\n3\n4\n";
        let merged = merge(base, b"1\nA\n3\n4\n", b"1\n2\nB\n4\n");
        assert_eq!(merged.clean(), None);
        assert_eq!(
            String::from_utf8(merged.marked(("main", "try"))).unwrap(),
            "1\n<<<<<<< main\nA\n3\n=======\n2\nB\n>>>>>>> try\n4\n"
        );
    }

    #[test]
    fn a_conflict_is_as_short_as_it_can_be_and_ends_its_lines() {
        let merged = merge(b"", b"a\nx\nc", b"a\ny\nc");
        let text = String::from_utf8(merged.marked(("main", "try"))).unwrap();
        assert_eq!(text, "a\n<<<<<<< main\nx\n=======\ny\n>>>>>>> try\nc");
        let merged = merge(b"1", b"2", b"3");
        let text = merged.marked(("main", "try"));
        assert_eq!(text, b"<<<<<<< main\n2\n=======\n3\n>>>>>>> try\n");
        assert!(has_markers(&text) && !has_markers(b"<<<<<<< main\n2\n"));
    }

    fn text() -> impl Strategy<Value = String> {
        proptest::collection::vec(0u8..5, 0..12)
            .prop_map(|lines| lines.iter().map(|line| format!("{line}\n")).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn a_merge_with_an_unchanged_or_equal_version_is_the_other_one(
            base in text(), other in text()
        ) {
            prop_assert_eq!(clean(&base, &base, &other), Some(other.clone()));
            prop_assert_eq!(clean(&base, &other, &base), Some(other.clone()));
            prop_assert_eq!(clean(&base, &other, &other), Some(other));
        }

        #[test]
        fn the_order_of_the_versions_does_not_matter(
            base in text(), ours in text(), theirs in text()
        ) {
            prop_assert_eq!(clean(&base, &ours, &theirs), clean(&base, &theirs, &ours));
            let merged = merge(base.as_bytes(), ours.as_bytes(), theirs.as_bytes());
            prop_assert_eq!(merged.clean().is_none(), has_markers(&merged.marked(("a", "b"))));
        }
    }
}
