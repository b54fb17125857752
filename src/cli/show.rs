//! Changes, in words and columns for people.

use crate::sandbox::verbs::{Change, ChangeKind, Checkpoint, EditKind};
use crate::types::{FileKind, is_unprintable};

/// How many `+` and `-` a line of `--stat` has at most.
const GRAPH_WIDTH: u64 = 40;

/// The letter of `--name-status`: as git's, and `m` where only attributes differ.
pub(super) fn letter(kind: ChangeKind) -> char {
    match kind {
        ChangeKind::Added => 'A',
        ChangeKind::Deleted => 'D',
        ChangeKind::Modified => 'M',
        ChangeKind::Attributes => 'm',
        ChangeKind::TypeChanged => 'T',
        ChangeKind::Renamed => 'R',
    }
}

/// How an edit began, in a word.
pub(super) fn edit(kind: EditKind) -> &'static str {
    match kind {
        EditKind::Write => "write",
        EditKind::Truncate => "truncate",
        EditKind::Replace => "replace",
        EditKind::Remove => "remove",
        EditKind::Move => "move",
        EditKind::Restore => "restore",
        EditKind::Undo => "undo",
    }
}

/// `M<tab>path`, `R<tab>old<tab>new`; directories end in `/`.
pub(super) fn name_status(change: &Change) -> String {
    let letter = letter(change.kind);
    let slash = if change.file == FileKind::Dir { "/" } else { "" };
    let target = change.target.as_ref().filter(|_| change.kind != ChangeKind::Deleted);
    let target =
        target.map_or_else(String::new, |text| format!(" -> {}", one_line(&String::from_utf8_lossy(text))));
    match &change.old_path {
        Some(old) => format!("{letter}\t{old}{slash}\t{}{slash}{target}", change.path),
        None => format!("{letter}\t{}{slash}{target}", change.path),
    }
}

/// The lines of `--stat`, the summary last.
pub(super) fn stat(changes: &[Change]) -> Vec<String> {
    let names: Vec<String> = changes.iter().map(stat_name).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let most = changes.iter().filter_map(|c| c.lines).map(|(a, r)| a.saturating_add(r)).max().unwrap_or(0);
    let mut lines: Vec<String> = changes
        .iter()
        .zip(&names)
        .map(|(change, name)| format!(" {name:width$} | {}", stat_column(change, most)))
        .collect();
    let (added, removed) = changes
        .iter()
        .filter_map(|c| c.lines)
        .fold((0u64, 0u64), |(added, removed), (a, r)| (added.saturating_add(a), removed.saturating_add(r)));
    lines.push(format!(" {}; {added} lines added, {removed} removed", summary(changes)));
    lines
}

fn stat_name(change: &Change) -> String {
    let slash = if change.file == FileKind::Dir { "/" } else { "" };
    match &change.old_path {
        Some(old) => format!("{old}{slash} => {}{slash}", change.path),
        None => format!("{}{slash}", change.path),
    }
}

fn stat_column(change: &Change, most: u64) -> String {
    match (change.lines, change.kind) {
        (_, ChangeKind::Attributes) => "attributes only".to_owned(),
        (None | Some((0, 0)), ChangeKind::Renamed) => "renamed".to_owned(),
        (Some((added, removed)), _) => {
            let (plus, minus) = (scale(added, most), scale(removed, most));
            let bar = "+".repeat(plus) + &"-".repeat(minus);
            format!("{:>5} {bar}", added.saturating_add(removed)).trim_end().to_owned()
        }
        (None, _) if change.file == FileKind::File => {
            let what = if change.binary { "Bin " } else { "" };
            format!("{what}{} -> {} bytes", change.old_size.unwrap_or(0), change.new_size.unwrap_or(0))
        }
        (None, ChangeKind::Added) => "added".to_owned(),
        (None, ChangeKind::Deleted) => "deleted".to_owned(),
        (None, ChangeKind::Modified | ChangeKind::TypeChanged) => "changed".to_owned(),
    }
}

/// The length of a bar: one per line while all fit, else in proportion, and at least one for what is not zero.
fn scale(lines: u64, most: u64) -> usize {
    let scaled = if most <= GRAPH_WIDTH {
        lines
    } else {
        let exact = u128::from(lines) * u128::from(GRAPH_WIDTH) / u128::from(most);
        u64::try_from(exact).unwrap_or(GRAPH_WIDTH).max(u64::from(lines > 0))
    };
    usize::try_from(scaled).unwrap_or(0)
}

/// `1 path`, `2 paths`.
pub(super) fn paths(number: u64) -> String {
    if number == 1 { "1 path".to_owned() } else { format!("{number} paths") }
}

/// `once`, `2 times`.
pub(super) fn times(number: u64) -> String {
    if number == 1 { "once".to_owned() } else { format!("{number} times") }
}

/// `2 added, 1 modified, 3 deleted`, or `nothing changed`.
pub(super) fn summary(changes: &[Change]) -> String {
    let words = [
        (ChangeKind::Added, "added"),
        (ChangeKind::Modified, "modified"),
        (ChangeKind::Renamed, "renamed"),
        (ChangeKind::TypeChanged, "of another type"),
        (ChangeKind::Attributes, "with other attributes only"),
        (ChangeKind::Deleted, "deleted"),
    ];
    let counted: Vec<String> = words
        .iter()
        .map(|(kind, word)| (changes.iter().filter(|change| change.kind == *kind).count(), word))
        .filter(|(count, _)| *count > 0)
        .map(|(count, word)| format!("{count} {word}"))
        .collect();
    if counted.is_empty() { "nothing changed".to_owned() } else { counted.join(", ") }
}

/// Every deletion: they are never cut short.
pub(super) fn deletions(changes: &[Change]) -> impl Iterator<Item = String> {
    changes.iter().filter(|change| change.kind == ChangeKind::Deleted).map(name_status)
}

/// `4 'green'`, or `4`.
pub(super) fn checkpoint(checkpoint: &Checkpoint) -> String {
    match &checkpoint.name {
        Some(name) => format!("{} '{}'", checkpoint.id, name.escape_debug()),
        None => checkpoint.id.to_string(),
    }
}

/// A message in one line, control characters escaped: it must not move the cursor of whoever reads it.
pub(super) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unprintable(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

/// Lines of foreign text as they can be printed: characters that act on a terminal are escaped, but for tabs and the ends of
/// lines, and so are bytes that are no text.
pub(super) fn harmless(lines: &[u8]) -> String {
    let mut told = String::with_capacity(lines.len());
    for chunk in lines.utf8_chunks() {
        for c in chunk.valid().chars() {
            if is_unprintable(c) && !matches!(c, '\n' | '\t') {
                told.extend(c.escape_default());
            } else {
                told.push(c);
            }
        }
        told.extend(chunk.invalid().escape_ascii().map(char::from));
    }
    told
}

/// `1.5 MiB`.
pub(super) fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut tenths = u128::from(bytes) * 10;
    let mut unit = "bytes";
    for larger in units {
        if tenths < 10_240 {
            break;
        }
        tenths /= 1024;
        unit = larger;
    }
    if unit == "bytes" { format!("{bytes} bytes") } else { format!("{}.{} {unit}", tenths / 10, tenths % 10) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Ino, TreePath};

    fn change(kind: ChangeKind, path: &str) -> Change {
        Change {
            path: TreePath::parse(path.as_bytes()).unwrap(),
            kind,
            old_path: None,
            file: FileKind::File,
            target: None,
            ino: Ino(2),
            old_size: None,
            new_size: None,
            lines: None,
            binary: false,
            patch: None,
        }
    }

    #[test]
    fn a_change_is_a_letter_and_its_paths() {
        assert_eq!(name_status(&change(ChangeKind::Attributes, "a\nb")), "m\ta\\nb");
        let mut renamed = change(ChangeKind::Renamed, "new");
        renamed.old_path = Some(TreePath::parse(b"old").unwrap());
        renamed.file = FileKind::Dir;
        assert_eq!(name_status(&renamed), "R\told/\tnew/");
    }

    #[test]
    fn a_summary_counts_every_kind() {
        let changes = [
            change(ChangeKind::Deleted, "x"),
            change(ChangeKind::Added, "y"),
            change(ChangeKind::Deleted, "z"),
        ];
        assert_eq!(summary(&changes), "1 added, 2 deleted");
        assert_eq!(summary(&[]), "nothing changed");
        assert_eq!(
            (paths(1), paths(0), times(1), times(2)),
            ("1 path".into(), "0 paths".into(), "once".into(), "2 times".into())
        );
        assert_eq!(deletions(&changes).collect::<Vec<_>>(), ["D\tx", "D\tz"]);
    }

    #[test]
    fn a_stat_lines_up() {
        let mut long = change(ChangeKind::Modified, "long-name");
        long.lines = Some((1000, 1));
        let mut binary = change(ChangeKind::Modified, "b");
        (binary.binary, binary.old_size, binary.new_size) = (true, Some(1), Some(2));
        let lines = stat(&[long, binary, change(ChangeKind::Attributes, "m")]);
        assert_eq!(lines[0], format!(" long-name |  1001 {}-", "+".repeat(39)));
        assert_eq!(lines[1], " b         | Bin 1 -> 2 bytes");
        assert_eq!(lines[2], " m         | attributes only");
        assert_eq!(lines[3], " 2 modified, 1 with other attributes only; 1000 lines added, 1 removed");
    }

    #[test]
    fn a_message_cannot_move_the_cursor() {
        assert_eq!(one_line("a\n\u{1b}[2Jä"), "a\\n\\u{1b}[2Jä");
    }

    #[test]
    fn lines_of_files_cannot_act_on_a_terminal() {
        let lines = b"+a\tb\r\n+\x1b]52;c;eA==\x07\xff\xc2\x9b2J\n \xc3\xa4\n";
        assert_eq!(harmless(lines), "+a\tb\\r\n+\\u{1b}]52;c;eA==\\u{7}\\xff\\u{9b}2J\n \u{e4}\n");
    }

    #[test]
    fn sizes_are_rounded_down() {
        assert_eq!((size(0), size(1023)), ("0 bytes".to_owned(), "1023 bytes".to_owned()));
        assert_eq!((size(1536), size(u64::MAX)), ("1.5 KiB".to_owned(), "15.9 EiB".to_owned()));
    }
}
