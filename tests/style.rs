//! Checks the text of the repository against CONTRIBUTING.md: the length of lines, functions and
//! files; words that name no actor; and the files and functions that the documents name.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 100;
const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 60;
/// Functions of integration tests may have long tables and scripts.
const TEST_LINES: usize = 100;

/// Folders whose text is checked.
const FOLDERS: &[&str] = &["src", "tests", "examples", "fuzz", "docs"];

/// Endings of text files. Other files, such as fixtures, are data.
const TEXT: &[&str] = &["rs", "py", "sh", "c", "md", "toml", "txt", "gaps"];

/// Words that stand for a program without naming it.
const VAGUE: &[&str] = &[
    concat!("some", "body"),
    concat!("no", "body"),
    concat!("every", "body"),
    concat!("any", "body"),
    concat!("who", "ever"),
];

/// Openings of sentences whose subject is a clause.
const OPENINGS: &[&str] = &["Who", "What", concat!("Who", "ever"), "Whatever"];

#[test]
fn no_line_is_longer_than_100_columns() {
    let mut long = Vec::new();
    for (path, text) in texts() {
        let is_markdown = has_ending(&path, "md");
        for (number, line) in text.lines().enumerate() {
            let may_be_long = is_markdown && (line.starts_with('|') || line.contains("://"));
            if line.chars().count() > COLUMNS && !may_be_long {
                long.push(format!("{}:{}", path.display(), number + 1));
            }
        }
    }
    assert!(long.is_empty(), "lines of more than {COLUMNS} columns:\n{}", long.join("\n"));
}

#[test]
fn no_source_file_has_more_than_600_lines_of_code() {
    let mut long = Vec::new();
    for (path, text) in texts().into_iter().filter(|(path, _)| path.starts_with("src")) {
        let count = code_lines(text.lines());
        if count > FILE_LINES {
            long.push(format!("{}: {count}", path.display()));
        }
    }
    assert!(long.is_empty(), "files of more than {FILE_LINES} lines:\n{}", long.join("\n"));
}

#[test]
fn functions_have_at_most_60_lines_of_code_and_integration_tests_100() {
    let mut long = Vec::new();
    let mut count = 0;
    for (path, text) in texts().into_iter().filter(|(path, _)| has_ending(path, "rs")) {
        let most = if path.starts_with("tests") { TEST_LINES } else { FUNCTION_LINES };
        for (line, name, length) in functions(&text) {
            count += 1;
            if length > most {
                long.push(format!("{}:{line}: {name}: {length}", path.display()));
            }
        }
    }
    assert!(count > 3000, "the test reads the sources: {count} functions");
    assert!(long.is_empty(), "functions that are too long:\n{}", long.join("\n"));
}

#[test]
fn sentences_name_their_actor() {
    let mut found = Vec::new();
    for (path, text) in texts() {
        let is_markdown = has_ending(&path, "md");
        for (number, line) in text.lines().enumerate() {
            let vague = words(line).find(|word| VAGUE.contains(&word.to_lowercase().as_str()));
            let prose = if is_markdown { Some(line) } else { comment(line) };
            let opening = prose
                .and_then(|prose| prose.split([' ', '*']).find(|word| OPENINGS.contains(word)));
            if let Some(word) = vague.or(opening) {
                found.push(format!("{}:{}: {word}", path.display(), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "name the actor instead:\n{}", found.join("\n"));
}

#[test]
fn the_documents_name_files_and_functions_that_exist() {
    let sources: Vec<_> = texts().into_iter().filter(|(path, _)| has_ending(path, "rs")).collect();
    let defined = definitions(&sources);
    let mut missing = Vec::new();
    let mut checked = 0;
    for document in ["docs/ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let walks = text.split('`').skip(1).step_by(2).filter(|code| !code.contains('\n'));
        for code in walks {
            let exists = match code.split_once("::") {
                _ if is_path(code) => path_exists(code, &sources),
                Some((owner, name)) if is_function(owner, name) => {
                    defined.contains(&(owner.to_owned(), name.to_owned()))
                }
                _ => continue,
            };
            checked += 1;
            if !exists {
                missing.push(format!("{document}: {code}"));
            }
        }
    }
    assert!(checked > 80, "the test reads the documents: {checked} names");
    assert!(missing.is_empty(), "the documents name what does not exist:\n{}", missing.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text files of the checked folders, by their path in the repository.
fn texts() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    FOLDERS.iter().for_each(|folder| collect(&root().join(folder), &mut found));
    assert!(found.len() > 500, "the test reads the repository: {} files", found.len());
    found
}

fn collect(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, found);
        } else if TEXT.iter().any(|ending| has_ending(&path, ending)) {
            let text = fs::read_to_string(&path).unwrap();
            found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
        }
    }
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|found| found == ending)
}

/// The lines that are neither empty nor only a comment.
fn code_lines<'t>(lines: impl Iterator<Item = &'t str>) -> usize {
    lines.map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

/// The functions of a formatted file: the line, the name, and the lines of code. Raw strings do not
/// contain the beginning of a function.
fn functions(text: &str) -> Vec<(usize, String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        let indent = &line[..line.len() - line.trim_start().len()];
        let end = format!("{indent}}}");
        let is_end = |line: &&str| **line == end;
        let is_whole = line.ends_with('}') || line.ends_with(';');
        let Some(more) = lines[at..].iter().position(is_end).filter(|_| !is_whole) else {
            continue;
        };
        found.push((at + 1, name.to_owned(), code_lines(lines[at..=at + more].iter().copied())));
    }
    found
}

/// The name of the function that begins in a line.
fn function_name(line: &str) -> Option<&str> {
    let (before, rest) = line.split_once("fn ")?;
    let is_start = before.split_whitespace().all(|word| {
        word.starts_with("pub")
            || ["const", "unsafe", "extern", "\"C\"", "in", "async"].contains(&word)
            || word.starts_with("crate")
            || word.starts_with("super")
    });
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    (is_start && end > 0).then_some(&rest[..end])
}

/// The words of a line, without code in backticks and without the user name in quotes.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let prose = line.split('`').step_by(2);
    let is_quoted = |part: &&str| !part.contains("\", \"nogroup\"");
    prose.filter(is_quoted).flat_map(|part| {
        part.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
    })
}

/// The comment of a line of code.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let marks = ["///", "//!", "//", "# ", "\"\"\"", "/*", " *"];
    let starts = marks.iter().find_map(|mark| line.strip_prefix(mark));
    starts.or_else(|| line.split_once(" // ").map(|(_, comment)| comment))
}

/// Whether a code span is the path of a file, relative to the repository or to `src`. Names in
/// capitals, such as `src/cli/VERB.rs`, are placeholders.
fn is_path(code: &str) -> bool {
    let is_plain = code.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    let is_file = [".rs", ".md", ".sh"].iter().any(|end| code.ends_with(end));
    let first = code.split('/').next().unwrap_or(code);
    let is_folder = code.contains('/') && path_exists(first, &[]);
    is_plain && (is_file || is_folder) && !code.contains("VERB")
}

fn path_exists(code: &str, sources: &[(PathBuf, String)]) -> bool {
    let is_named = |(path, _): &(PathBuf, String)| path.ends_with(code);
    root().join(code).exists()
        || root().join("src").join(code).exists()
        || root().join("docs").join(code).exists()
        || !code.contains('/') && sources.iter().any(is_named)
}

/// Whether `owner::name` is a function or constant of a type, and not a path of modules.
fn is_function(owner: &str, name: &str) -> bool {
    let is_word = |word: &str| word.chars().all(|c| c.is_alphanumeric() || c == '_');
    let name = name.trim_end_matches("()");
    owner.starts_with(char::is_uppercase) && is_word(owner) && is_word(name)
}

/// The functions and variants of all types: (type, name).
fn definitions(sources: &[(PathBuf, String)]) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for (_, text) in sources {
        let mut owner = None;
        for line in text.lines() {
            if let Some(next) = owner_of(line) {
                owner = Some(next);
            } else if line == "}" {
                owner = None;
            }
            let Some(owner) = &owner else { continue };
            let variant = line.trim().split(|c: char| !c.is_alphanumeric()).next().unwrap_or("");
            let name = function_name(line).unwrap_or(variant);
            found.insert((owner.clone(), name.to_owned()));
        }
    }
    found
}

/// The type whose block begins in a line.
fn owner_of(line: &str) -> Option<String> {
    if line.starts_with(' ') || !line.ends_with('{') {
        return None;
    }
    let (_, rest) = ["impl", "enum ", "trait ", "struct "]
        .iter()
        .find_map(|keyword| line.split_once(keyword))
        .filter(|(before, _)| before.is_empty() || before.starts_with("pub"))?;

    let rest = rest.split_once(" for ").map_or(rest, |(_, rest)| rest);
    let rest = rest.trim_start_matches(['<', '\'', ' ']);
    let last = rest.split([' ', '<', '{']).find(|word| word.starts_with(char::is_uppercase))?;
    Some(last.rsplit("::").next().unwrap_or(last).to_owned())
}
