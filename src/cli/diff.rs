//! `jailfs diff`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::{Error, Kind, Result};
use crate::sandbox::{Changes, Detail, FileRev, Reply, Request, Rev};

/// Show the differences between two states
///
/// The default is from the base to now, which is what 'apply' would write. '@-1' is the last
/// checkpoint. The exit code is 0 whether or not there are differences.
#[derive(Args)]
pub(super) struct Diff {
    /// Up to two states ('@' now, '@-1' the last checkpoint, 'base', a number or a name, 'HEAD@',
    /// 'HEAD@-1' and 'HEAD@NAME' those of another head), then paths; or a version of a file,
    /// PATH@N, and what to compare it with: the file as it is, another version, another file
    #[arg(value_name = "FROM [TO]] [PATH")]
    words: Vec<OsString>,
    /// Paths, also if they look like states
    #[arg(last = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Show a letter and the path (the default): A added, D deleted, M modified, T type changed, R
    /// renamed, m attributes
    #[arg(long, group = "detail")]
    name_status: bool,
    /// Show the number of lines added and removed
    #[arg(long, group = "detail")]
    stat: bool,
    /// A patch that 'git apply' and 'patch' understand
    #[arg(short, long, group = "detail")]
    patch: bool,
    /// Print one JSON object per path
    #[arg(long)]
    json: bool,
}

impl Diff {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        if let Some((from, to)) = self.versions(&target)? {
            let request = Request::FileDiff { from, to, detail: self.detail() };
            let Reply::Diff(changes) = target.call(request)? else { return Err(wrong_answer()) };
            let mut out = Out::new();
            self.print(&mut out, &changes)?;
            out.finish()?;
            return Ok(0);
        }
        let (revs, mut paths) = self.split(&mut target)?;
        paths.extend(self.paths.iter().cloned());
        let mut revs = revs.into_iter();
        let from = revs.next().unwrap_or(Rev::Base);
        let to = revs.next().unwrap_or(Rev::Now);
        let request =
            Request::Diff { from, to, paths: target.paths(&paths)?, detail: self.detail() };
        let Reply::Diff(changes) = target.call(request)? else { return Err(wrong_answer()) };
        let mut out = Out::new();
        self.print(&mut out, &changes)?;
        out.finish()?;
        Ok(0)
    }

    fn detail(&self) -> Detail {
        match (self.patch, self.stat) {
            (true, _) => Detail::Patch,
            (false, true) => Detail::Stat,
            (false, false) => Detail::NameStatus,
        }
    }

    fn print(&self, out: &mut Out, changes: &Changes) -> Result<()> {
        if self.json {
            for change in changes {
                out.line(&Line::change(&change?).text()?);
            }
            return Ok(());
        }
        match self.detail() {
            Detail::NameStatus => format::list(changes, false, |line| out.line(line)),
            Detail::Stat => format::stat(changes, |line| out.line(line)),
            Detail::Patch => out.patches(changes),
        }
    }

    /// The two files to compare, if the first word names a version of a file.
    fn versions(&self, target: &Target) -> Result<Option<(FileRev, FileRev)>> {
        let is_there = |word: &OsString| target.on_host(Path::new(word)).symlink_metadata().is_ok();
        let rev = |word: &OsString| -> Result<FileRev> {
            let (path, version) = match version_of(word) {
                Some((path, number)) if !is_there(word) => (path, Some(number)),
                _ => (PathBuf::from(word), None),
            };
            let path = target.paths(&[path])?.pop().ok_or_else(wrong_answer)?;
            Ok(FileRev { path, edit: version })
        };
        match self.words.as_slice() {
            [first, rest @ ..] if version_of(first).is_some() && !is_there(first) => {
                let from = rev(first)?;
                let to = match rest {
                    [] => FileRev { edit: None, ..from.clone() },
                    [to] if self.paths.is_empty() => rev(to)?,
                    [_, other, ..] => return Err(one_file(other)),
                    [to] => return Err(one_file(to)),
                };
                Ok(Some((from, to)))
            }
            _ => Ok(None),
        }
    }

    /// The states and the paths among the words before `--`.
    fn split(&self, target: &mut Target) -> Result<(Vec<Rev>, Vec<PathBuf>)> {
        if self.words.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let Reply::Log(log) = target.call(Request::Log)? else { return Err(wrong_answer()) };
        let names = log.into_iter().filter_map(|checkpoint| checkpoint.name).collect();
        let exists = |path: &PathBuf| target.on_host(path).symlink_metadata().is_ok();
        split(&self.words, &names, exists)
    }
}

fn one_file(other: &std::ffi::OsStr) -> Error {
    unclear(other, "a version is compared with one file").hint("'jailfs diff PATH@2 PATH'")
}

/// The path and the number of `PATH@N`.
fn version_of(word: &OsString) -> Option<(PathBuf, u32)> {
    let bytes = word.as_bytes();
    let at = bytes.iter().rposition(|byte| *byte == b'@').filter(|at| *at > 0)?;
    let number = std::str::from_utf8(bytes.get(at + 1..)?).ok()?;
    let is_number = number.bytes().all(|digit| digit.is_ascii_digit());
    let number = number.parse().ok().filter(|number| is_number && *number > 0)?;
    Some((PathBuf::from(std::ffi::OsStr::from_bytes(bytes.get(..at)?)), number))
}

/// Splits words into up to two states, then paths. Refuses a word that is both, and one that is
/// neither.
fn split(
    words: &[OsString],
    names: &BTreeSet<String>,
    exists: impl Fn(&PathBuf) -> bool,
) -> Result<(Vec<Rev>, Vec<PathBuf>)> {
    let mut revs = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.peek().filter(|_| revs.len() < 2) {
        let rev = word.to_str().map(Rev::parse).filter(|rev| match rev {
            Rev::Name(name) | Rev::Of { name, .. } => names.contains(name),
            Rev::Now | Rev::Back(_) | Rev::Base | Rev::Id(_) | Rev::Head { .. } => true,
        });
        let Some(rev) = rev else { break };
        let special = matches!(rev, Rev::Now | Rev::Back(_) | Rev::Head { .. });
        if !special && exists(&PathBuf::from(word)) {
            return Err(unclear(word, "it is a state and a path")
                .hint("put '--' before the paths, './' before this one"));
        }
        revs.push(rev);
        words.next();
    }
    let paths: Vec<PathBuf> = words.map(PathBuf::from).collect();
    match paths.iter().find(|path| !exists(path)) {
        Some(path) => {
            Err(unclear(path.as_os_str(), "it is neither a checkpoint nor a path that exists now")
                .hint("'jailfs log' lists the checkpoints; put '--' before paths that are deleted"))
        }
        None => Ok((revs, paths)),
    }
}

fn unclear(word: &std::ffi::OsStr, reason: &str) -> Error {
    Error::new(Kind::Usage, format!("understand '{}'", word.display()), reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::LayerId;

    fn of(line: &str) -> Result<(Vec<Rev>, Vec<PathBuf>)> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let names = BTreeSet::from(["green".to_owned(), "both".to_owned()]);
        split(&words, &names, |path| ["src", "both", "x"].iter().any(|name| path.ends_with(name)))
    }

    #[test]
    fn states_come_first_and_paths_after() {
        let src = || vec![PathBuf::from("src")];
        assert_eq!(of(""), Ok((vec![], vec![])));
        assert_eq!(of("src"), Ok((vec![], src())));
        assert_eq!(of("@-2 src"), Ok((vec![Rev::Back(2)], src())));
        assert_eq!(of("base @"), Ok((vec![Rev::Base, Rev::Now], vec![])));
        assert_eq!(
            of("green 7 src x"),
            Ok((
                vec![Rev::Name("green".to_owned()), Rev::Id(LayerId(7))],
                vec!["src".into(), "x".into()],
            ))
        );
        let head = |back| Rev::Head { head: "try-1".to_owned(), back };
        assert_eq!(of("try-1@-2 try-1@ src"), Ok((vec![head(2), head(0)], src())));
        assert_eq!(of("./both"), Ok((vec![], vec!["./both".into()])));
    }

    #[test]
    fn a_version_is_a_path_and_a_number() {
        let of = |word: &str| {
            version_of(&OsString::from(word)).map(|(path, n)| (path.display().to_string(), n))
        };
        assert_eq!(of("src/main.rs@2"), Some(("src/main.rs".to_owned(), 2)));
        assert_eq!(of("a@b@12"), Some(("a@b".to_owned(), 12)));
        for word in ["@", "@2", "@-1", "x", "x@", "x@0", "x@+1", "x@y", "x@-1"] {
            assert_eq!(of(word), None, "{word}");
        }
    }

    #[test]
    fn ambiguous_and_unknown_words_are_refused() {
        for line in ["both", "nonsense", "green @ green", "src green", "@ typo"] {
            assert_eq!(of(line).unwrap_err().kind, Kind::Usage, "{line}");
        }
    }
}
