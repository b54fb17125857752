//! Formats changes, sizes and messages for people.

use std::fmt;

use crate::error::Result;
use crate::sandbox::{Change, ChangeKind, Changes, Checkpoint, EditKind};
use crate::types::{FileKind, is_unprintable};

/// The maximum number of `+` and `-` in a line of `--stat`.
const GRAPH_WIDTH: u64 = 40;

/// The letter of `--name-status`: git's, and `m` if only attributes differ.
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

/// The kind of an edit in a word.
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
    let target = target.map_or_else(String::new, |text| {
        format!(" -> {}", one_line(&String::from_utf8_lossy(text)))
    });
    match &change.old_path {
        Some(old) => {
            format!("{letter}\t{old}{slash}\t{}{slash}{target}{}", change.path, danger(change))
        }
        None => format!("{letter}\t{}{slash}{target}{}", change.path, danger(change)),
    }
}

/// The maximum width of the column of names in `--stat`.
const MAX_NAME_WIDTH: usize = 100;

/// Prints the lines of `--stat`, the summary last.
///
/// # Errors
/// The list of changes cannot be read.
pub(super) fn stat(changes: &Changes, mut line: impl FnMut(&str)) -> Result<()> {
    let (mut tally, mut width, mut most) = (Tally::default(), 0, 0);
    let (mut added, mut removed) = (0_u64, 0_u64);
    for change in changes {
        let change = change?;
        tally.count(&change);
        width = width.max(stat_name(&change).chars().count());
        if let Some((a, r)) = change.lines {
            most = most.max(a.saturating_add(r));
            (added, removed) = (added.saturating_add(a), removed.saturating_add(r));
        }
    }
    let width = width.min(MAX_NAME_WIDTH);
    for change in changes {
        let change = change?;
        line(&format!(
            " {:width$} | {}{}",
            stat_name(&change),
            stat_column(&change, most),
            danger(&change)
        ));
    }
    line(&format!(" {tally}; {added} lines added, {removed} removed"));
    Ok(())
}

/// ` [protected]`, ` [gains the setuid bit]`, or nothing.
pub(super) fn danger(change: &Change) -> String {
    change.danger.as_ref().map_or_else(String::new, |danger| format!(" [{danger}]"))
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
            format!(
                "{what}{} -> {} bytes",
                change.old_size.unwrap_or(0),
                change.new_size.unwrap_or(0)
            )
        }
        (None, ChangeKind::Added) => "added".to_owned(),
        (None, ChangeKind::Deleted) => "deleted".to_owned(),
        (None, ChangeKind::Modified | ChangeKind::TypeChanged) => "changed".to_owned(),
    }
}

/// The length of a bar: one character per line while all fit, otherwise in proportion, and at least
/// one for any change.
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

/// Counts changes by kind.
#[derive(Default)]
pub(super) struct Tally([usize; KINDS.len()]);

/// The kinds of changes, and their words in a summary.
const KINDS: [(ChangeKind, &str); 6] = [
    (ChangeKind::Added, "added"),
    (ChangeKind::Modified, "modified"),
    (ChangeKind::Renamed, "renamed"),
    (ChangeKind::TypeChanged, "of another type"),
    (ChangeKind::Attributes, "with other attributes only"),
    (ChangeKind::Deleted, "deleted"),
];

impl Tally {
    /// The number of changes of a kind.
    pub(super) fn of(&self, wanted: ChangeKind) -> usize {
        let kinds = self.0.iter().zip(&KINDS);
        kinds.filter(|(_, (kind, _))| *kind == wanted).map(|(count, _)| count).sum()
    }

    /// The number of all changes.
    pub(super) fn total(&self) -> usize {
        self.0.iter().sum()
    }

    fn count(&mut self, change: &Change) {
        for (count, (kind, _)) in self.0.iter_mut().zip(&KINDS) {
            *count += usize::from(change.kind == *kind);
        }
    }
}

/// `2 added, 1 modified, 3 deleted`, or `nothing changed`.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = self.0.iter().zip(&KINDS).filter(|(count, _)| **count > 0);
        let counted: Vec<String> =
            counted.map(|(count, (_, word))| format!("{count} {word}")).collect();
        f.write_str(if counted.is_empty() { "nothing changed" } else { "" })?;
        f.write_str(&counted.join(", "))
    }
}

/// Counts changes by kind.
///
/// # Errors
/// The list of changes cannot be read.
pub(super) fn summary(changes: &Changes) -> Result<Tally> {
    let mut tally = Tally::default();
    for change in changes {
        tally.count(&change?);
    }
    Ok(tally)
}

/// Prints a line for each change, or for each deletion only. Deletions are always listed in full.
///
/// # Errors
/// The list of changes cannot be read.
pub(super) fn list(
    changes: &Changes,
    only_deletions: bool,
    mut line: impl FnMut(&str),
) -> Result<()> {
    for change in changes {
        let change = change?;
        if !only_deletions || change.kind == ChangeKind::Deleted {
            line(&name_status(&change));
        }
    }
    Ok(())
}

/// `4 'green'`, or `4`.
pub(super) fn checkpoint(checkpoint: &Checkpoint) -> String {
    match &checkpoint.name {
        Some(name) => format!("{} '{}'", checkpoint.id, name.escape_debug()),
        None => checkpoint.id.to_string(),
    }
}

/// A message in one line. Control characters are escaped, so that they do not move the cursor.
pub(super) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unprintable(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

/// Escapes foreign text for a terminal: characters that act on it, except tabs and newlines, and
/// bytes that are not UTF-8.
pub(super) fn harmless(lines: &[u8]) -> String {
    let mut escaped = String::with_capacity(lines.len());
    for chunk in lines.utf8_chunks() {
        for c in chunk.valid().chars() {
            if is_unprintable(c) && !matches!(c, '\n' | '\t') {
                escaped.extend(c.escape_default());
            } else {
                escaped.push(c);
            }
        }
        escaped.extend(chunk.invalid().escape_ascii().map(char::from));
    }
    escaped
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
    if unit == "bytes" {
        format!("{bytes} bytes")
    } else {
        format!("{}.{} {unit}", tenths / 10, tenths % 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Ino, TreePath};

    fn list_of(changes: &[Change]) -> Changes {
        let mut writer = crate::sandbox::changes::Writer::new(&std::env::temp_dir());
        changes.iter().for_each(|change| writer.push(change.clone()).unwrap());
        writer.finish()
    }

    fn change(kind: ChangeKind, path: &str) -> Change {
        Change {
            path: TreePath::parse(path.as_bytes()).unwrap(),
            kind,
            old_path: None,
            file: FileKind::File,
            target: None,
            danger: None,
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
        let changes = list_of(&[
            change(ChangeKind::Deleted, "x"),
            change(ChangeKind::Added, "y"),
            change(ChangeKind::Deleted, "z"),
        ]);
        assert_eq!(summary(&changes).unwrap().to_string(), "1 added, 2 deleted");
        assert_eq!(summary(&Changes::default()).unwrap().to_string(), "nothing changed");
        assert_eq!(
            (paths(1), paths(0), times(1), times(2)),
            ("1 path".into(), "0 paths".into(), "once".into(), "2 times".into())
        );
        let mut lines = Vec::new();
        list(&changes, true, |line| lines.push(line.to_owned())).unwrap();
        assert_eq!(lines, ["D\tx", "D\tz"]);
    }

    #[test]
    fn a_stat_lines_up() {
        let mut long = change(ChangeKind::Modified, "long-name");
        long.lines = Some((1000, 1));
        let mut binary = change(ChangeKind::Modified, "b");
        (binary.binary, binary.old_size, binary.new_size) = (true, Some(1), Some(2));
        let mut attributes = change(ChangeKind::Attributes, "m");
        attributes.danger = Some("gains the setuid bit".to_owned());
        let mut lines = Vec::new();
        stat(&list_of(&[long, binary, attributes]), |line| lines.push(line.to_owned())).unwrap();
        assert_eq!(lines[0], format!(" long-name |  1001 {}-", "+".repeat(39)));
        assert_eq!(lines[1], " b         | Bin 1 -> 2 bytes");
        assert_eq!(lines[2], " m         | attributes only [gains the setuid bit]");
        assert_eq!(
            lines[3],
            " 2 modified, 1 with other attributes only; 1000 lines added, 1 removed"
        );
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
