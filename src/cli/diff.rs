//! `jailfs diff`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::json::Line;
use super::out::Out;
use super::show;
use super::target::{Target, wrong_answer};
use crate::error::{Error, Kind, Result};
use crate::sandbox::verbs::{Change, Detail, Reply, Request, Rev};

/// Show what differs between two states
///
/// From the last checkpoint (or the base, if there is none) to now, unless others are named. The exit code is 0 also
/// if there are differences.
#[derive(Args)]
pub(super) struct Diff {
    /// Up to two states ('@' now, '@-1' the last checkpoint, 'base', a number or a name), then paths
    #[arg(value_name = "FROM [TO]] [PATH")]
    words: Vec<OsString>,
    /// Paths, also such as look like states
    #[arg(last = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// A letter and the path (the default): A added, D deleted, M modified, T another type, R renamed, m attributes
    #[arg(long, group = "detail")]
    name_status: bool,
    /// How many lines were added and removed
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
        let (revs, mut paths) = self.split(&mut target)?;
        paths.extend(self.paths.iter().cloned());
        let mut revs = revs.into_iter();
        let from = match revs.next() {
            Some(from) => from,
            None => last_checkpoint(&mut target)?,
        };
        let to = revs.next().unwrap_or(Rev::Now);
        let request = Request::Diff { from, to, paths: target.paths(&paths)?, detail: self.detail() };
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

    fn print(&self, out: &mut Out, changes: &[Change]) -> Result<()> {
        if self.json {
            for change in changes {
                out.line(&Line::change(change).text()?);
            }
            return Ok(());
        }
        match self.detail() {
            Detail::NameStatus => changes.iter().for_each(|change| out.line(&show::name_status(change))),
            Detail::Stat => show::stat(changes).iter().for_each(|line| out.line(line)),
            Detail::Patch => {
                changes.iter().filter_map(|change| change.patch.as_ref()).for_each(|p| out.bytes(p))
            }
        }
        Ok(())
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

fn last_checkpoint(target: &mut Target) -> Result<Rev> {
    let Reply::Status(status) = target.call(Request::Status)? else { return Err(wrong_answer()) };
    Ok(if status.checkpoint.is_some() { Rev::Back(1) } else { Rev::Base })
}

/// Up to two states, then paths. A word that can be both is refused, as is one that is neither.
fn split(
    words: &[OsString],
    names: &BTreeSet<String>,
    exists: impl Fn(&PathBuf) -> bool,
) -> Result<(Vec<Rev>, Vec<PathBuf>)> {
    let mut revs = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.peek().filter(|_| revs.len() < 2) {
        let rev = word
            .to_str()
            .map(Rev::parse)
            .filter(|rev| !matches!(rev, Rev::Name(name) if !names.contains(name)));
        let Some(rev) = rev else { break };
        let special = matches!(rev, Rev::Now | Rev::Back(_));
        if !special && exists(&PathBuf::from(word)) {
            return Err(unclear(word, "it is a state and a path")
                .hint("put '--' before the paths, './' before this one"));
        }
        revs.push(rev);
        words.next();
    }
    let paths: Vec<PathBuf> = words.map(PathBuf::from).collect();
    match paths.iter().find(|path| !exists(path)) {
        Some(path) => Err(unclear(path.as_os_str(), "it is neither a checkpoint nor a path that exists now")
            .hint("'jailfs log' lists the checkpoints; put '--' before paths that are deleted")),
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
            Ok((vec![Rev::Name("green".to_owned()), Rev::Id(LayerId(7))], vec!["src".into(), "x".into()],))
        );
        assert_eq!(of("./both"), Ok((vec![], vec!["./both".into()])));
    }

    #[test]
    fn what_is_unclear_is_refused() {
        for line in ["both", "nonsense", "green @ green", "src green", "@ typo"] {
            assert_eq!(of(line).unwrap_err().kind, Kind::Usage, "{line}");
        }
    }
}
