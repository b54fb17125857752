//! The options of a race.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::thread;

use clap::Args;

use crate::error::{Error, Kind, Result};

/// The most forks of a race.
const MOST: i64 = 1000;

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Attempts side by side")]
pub(in crate::cli::run) struct RaceOptions {
    /// Run the command in N forks of the sandbox side by side, and continue from the best one
    #[arg(
        long,
        value_name = "N",
        conflicts_with = "discard",
        value_parser = clap::value_parser!(u32).range(1..=MOST)
    )]
    forks: Option<u32>,
    /// Run at most J of them at once (default: the number of CPUs)
    #[arg(
        long,
        value_name = "J",
        requires = "forks",
        value_parser = clap::value_parser!(u32).range(1..=MOST)
    )]
    jobs: Option<u32>,
    /// Which fork wins: first (that exits with 0, the default; the others are ended), ask, keep
    /// (none: all stay as forks), or a shell command, which is run in each: the highest number that
    /// it prints wins
    #[arg(long, value_name = "HOW", requires = "forks")]
    pick: Option<OsString>,
    /// Keep the forks that did not win
    #[arg(long, requires = "forks")]
    keep_forks: bool,
}

/// How the winner is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Pick {
    /// The first that exits with 0.
    First,
    /// The user decides.
    Ask,
    /// There is none.
    Keep,
    /// The highest number that this shell command prints.
    Score(OsString),
}

impl Pick {
    /// The word for the last line of JSON.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Pick::First => "first",
            Pick::Ask => "ask",
            Pick::Keep => "keep",
            Pick::Score(_) => "score",
        }
    }
}

/// A race, as the options describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli::run) struct Plan {
    pub(super) forks: u32,
    pub(super) jobs: u32,
    pub(super) pick: Pick,
    /// The losers stay.
    pub(super) keep_forks: bool,
}

impl RaceOptions {
    /// The race; `None` without `--forks`. `needs_winner`: another option is about its changes.
    ///
    /// # Errors
    /// `Usage`: the options do not go together.
    pub(in crate::cli::run) fn plan(&self, needs_winner: bool) -> Result<Option<Plan>> {
        let Some(forks) = self.forks else { return Ok(None) };
        let pick = match self.pick.as_deref() {
            None => Pick::First,
            Some(text) if text == "first" => Pick::First,
            Some(text) if text == "ask" => Pick::Ask,
            Some(text) if text == "keep" => Pick::Keep,
            Some(text) => Pick::Score(text.to_owned()),
        };
        let wrong = |reason: &str, hint: &str| {
            Err(Error::new(Kind::Usage, "run attempts side by side", reason).hint(hint))
        };
        if pick == Pick::Keep && needs_winner {
            let reason = "--pick keep has no winner that --apply or --ask could be about";
            return wrong(reason, "leave that option out, or name another way to pick");
        }
        let is_terminal = io::stdin().is_terminal() && io::stderr().is_terminal();
        if pick == Pick::Ask && !is_terminal {
            let reason = "--pick ask needs a terminal";
            return wrong(reason, "--pick CMD decides without one; --pick keep keeps all forks");
        }
        if pick == Pick::Score(OsString::new()) {
            return wrong("--pick has no command", "--pick first is the default");
        }
        let cpus = || thread::available_parallelism().map_or(1, usize::from);
        let jobs = self.jobs.unwrap_or_else(|| u32::try_from(cpus()).unwrap_or(u32::MAX));
        let keep_forks = self.keep_forks || pick == Pick::Keep;
        Ok(Some(Plan { forks, jobs: jobs.min(forks), pick, keep_forks }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(line: &str) -> Result<Option<Plan>> {
        #[derive(clap::Parser)]
        struct Line {
            #[arg(long)]
            discard: bool,
            #[command(flatten)]
            race: RaceOptions,
        }
        let words = std::iter::once("run").chain(line.split_whitespace());
        let parsed = <Line as clap::Parser>::try_parse_from(words);
        let Line { race, discard } =
            parsed.map_err(|error| Error::new(Kind::Usage, "parse", error.to_string()))?;
        race.plan(discard)
    }

    #[test]
    fn a_race_is_described_by_its_options() {
        assert_eq!(plan(""), Ok(None));
        let race = plan("--forks 3 --jobs 8").unwrap().unwrap();
        assert_eq!((race.forks, race.jobs, race.pick, race.keep_forks), (3, 3, Pick::First, false));
        let race = plan("--forks 3 --pick ./score --keep-forks").unwrap().unwrap();
        assert_eq!((race.pick, race.keep_forks), (Pick::Score("./score".into()), true));
        assert!(plan("--forks 3 --pick keep").unwrap().unwrap().keep_forks);
    }

    #[test]
    fn options_that_do_not_go_together_are_refused() {
        for line in [
            "--forks 0",
            "--forks 1001",
            "--jobs 2",
            "--pick first",
            "--keep-forks",
            "--forks 2 --jobs 0",
            "--forks 2 --discard",
        ] {
            assert_eq!(plan(line).unwrap_err().kind, Kind::Usage, "{line}");
        }
        let race = RaceOptions { forks: Some(2), pick: Some("keep".into()), ..Default::default() };
        assert_eq!(race.plan(true).unwrap_err().kind, Kind::Usage);
    }
}
