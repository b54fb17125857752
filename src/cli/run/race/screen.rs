//! Prints the output of the attempts, and the table.
//!
//! On a terminal the table is at the bottom of the output, and is drawn again when something has
//! changed. Messages meanwhile go above it. Otherwise standard output gets one JSON object
//! for each finished attempt and one at the end. The output of the attempts goes to standard error,
//! and each line begins with the number of its attempt.
//!
//! The table uses the sequences of ECMA-48 that every terminal knows: move up, erase below, and
//! turn wrapping off and on, so that a line of the table is a line of the screen.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::result::{Finished, How};
use crate::cli::format;
use crate::cli::json::Line;
use crate::error::Result;
use crate::sandbox::ChangeKind;

/// The most attempts in the live table. The last table has all.
const ROWS: usize = 20;

/// The phase of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Waiting,
    Running(Instant),
    Scoring,
    Done,
}

/// Where a race is shown.
pub(super) struct Screen {
    /// Whether the results are for people, on a terminal.
    is_live: bool,
    /// Whether what goes to standard error can act on a terminal.
    escapes: bool,
    table: Mutex<Table>,
}

struct Table {
    rows: Vec<Row>,
    /// How many lines of it are on the screen.
    drawn: usize,
}

struct Row {
    number: u32,
    phase: Phase,
    text: Option<RowText>,
}

/// The columns of a finished attempt.
struct RowText {
    state: String,
    time: Duration,
    score: String,
    changes: String,
}

impl Screen {
    pub(super) fn new(forks: u32) -> Screen {
        let row = |number| Row { number, phase: Phase::Waiting, text: None };
        Screen {
            is_live: io::stdout().is_terminal(),
            escapes: io::stderr().is_terminal(),
            table: Mutex::new(Table { rows: (1..=forks).map(row).collect(), drawn: 0 }),
        }
    }

    /// Prints a message of jailfs.
    pub(super) fn note(&self, text: &str) {
        self.above(format::harmless(format!("jailfs: {text}\n").as_bytes()).as_bytes());
    }

    /// Prints a message of jailfs about an attempt.
    pub(super) fn note_of(&self, number: u32, text: &str) {
        self.note(&format!("attempt {number}: {text}"));
    }

    /// Prints a line that an attempt has written.
    pub(super) fn output(&self, number: u32, line: &[u8]) {
        let mut text = format!("[{number}] ").into_bytes();
        if self.escapes {
            text.extend_from_slice(format::harmless(line).as_bytes());
        } else {
            text.extend_from_slice(line);
        }
        text.push(b'\n');
        self.above(&text);
    }

    /// Writes to standard error, above the table.
    fn above(&self, text: &[u8]) {
        let mut table = self.table.lock();
        table.erase();
        // A failure to write to standard error cannot be reported anywhere.
        drop(io::stderr().lock().write_all(text));
        if self.is_live {
            table.draw();
        }
    }

    /// Sets what an attempt does.
    pub(super) fn set(&self, number: u32, phase: Phase) {
        if let Some(row) = self.table.lock().row(number) {
            row.phase = phase;
        }
    }

    /// Draws the table again, so that its times go on.
    pub(super) fn tick(&self) {
        if self.is_live {
            let mut table = self.table.lock();
            table.erase();
            table.draw();
        }
    }

    /// Shows a finished attempt.
    ///
    /// # Errors
    /// The line cannot be encoded.
    pub(super) fn finished(&self, one: &Finished) -> Result<()> {
        let mut table = self.table.lock();
        if let Some(row) = table.row(one.number) {
            row.phase = Phase::Done;
            row.text = Some(RowText::of(one));
        }
        if self.is_live {
            table.erase();
            table.draw();
            return Ok(());
        }
        print(&record(one).text()?);
        Ok(())
    }

    /// Ends the live table, and prints the last one with a mark at the winner.
    pub(super) fn end(&self, winner: Option<u32>) {
        if !self.is_live {
            return;
        }
        let mut table = self.table.lock();
        table.erase();
        let lines: Vec<String> = table.rows.iter().map(|row| row.line(winner)).collect();
        print(&format!("{HEADING}\n{}", lines.join("\n")));
    }

    /// Prints the last line of JSON.
    ///
    /// # Errors
    /// The line cannot be encoded.
    pub(super) fn result(&self, line: &Line) -> Result<()> {
        if !self.is_live {
            print(&line.text()?);
        }
        Ok(())
    }
}

const HEADING: &str = "  attempt  result            time       score  changes";

impl Table {
    fn row(&mut self, number: u32) -> Option<&mut Row> {
        self.rows.iter_mut().find(|row| row.number == number)
    }

    fn erase(&mut self) {
        if self.drawn > 0 {
            put(format!("\x1b[{}A\r\x1b[J", self.drawn).as_bytes());
            self.drawn = 0;
        }
    }

    fn draw(&mut self) {
        let mut lines = vec![HEADING.to_owned()];
        let (shown, hidden) = self.shown();
        lines.extend(shown.iter().map(|row| row.line(None)));
        if hidden > 0 {
            lines.push(format!("           and {hidden} more"));
        }
        put(format!("\x1b[?7l{}\n\x1b[?7h", lines.join("\n")).as_bytes());
        self.drawn = lines.len();
    }

    /// The rows that fit: those that run, and then the others. And how many are left out.
    fn shown(&self) -> (Vec<&Row>, usize) {
        let busy = |row: &&Row| matches!(row.phase, Phase::Running(_) | Phase::Scoring);
        let mut shown: Vec<&Row> = self.rows.iter().filter(busy).take(ROWS).collect();
        let others = self.rows.iter().filter(|row| !busy(row));
        shown.extend(others.take(ROWS - shown.len()));
        shown.sort_by_key(|row| row.number);
        let hidden = self.rows.len() - shown.len();
        (shown, hidden)
    }
}

impl Row {
    fn line(&self, winner: Option<u32>) -> String {
        let mark = if winner == Some(self.number) { '*' } else { ' ' };
        let number = self.number;
        let (state, time, score, changes) = match (&self.text, self.phase) {
            (Some(text), _) => {
                (text.state.as_str(), Some(text.time), text.score.as_str(), text.changes.as_str())
            }
            (None, Phase::Running(since)) => ("running", Some(since.elapsed()), "", ""),
            (None, Phase::Scoring) => ("scoring", None, "", ""),
            (None, Phase::Waiting | Phase::Done) => ("waiting", None, "", ""),
        };
        let time = time.map_or_else(String::new, |time| format!("{:.1} s", time.as_secs_f64()));
        let line = format!("{mark} {number:>7}  {state:<11} {time:>10}  {score:>10}  {changes}");
        line.trim_end().to_owned()
    }
}

impl RowText {
    fn of(one: &Finished) -> RowText {
        RowText {
            state: one.how.text(),
            time: one.time,
            score: one.score.map_or_else(|| "-".to_owned(), |score| score.to_string()),
            changes: match (&one.changes, &one.how) {
                (Some(tally), _) => tally.to_string(),
                (None, How::Failed(error)) => format::one_line(&error.to_string()),
                (None, How::Ran(_) | How::NotRun) => String::new(),
            },
        }
    }
}

/// An attempt in JSON.
fn record(one: &Finished) -> Line {
    let count = |kind| one.changes.as_ref().map(|tally| tally.of(kind));
    Line::Attempt {
        attempt: one.number,
        head: one.head.clone(),
        result: one.how.word(),
        exit: one.how.exit_code(),
        signal: one.how.signal(),
        seconds: (one.time.as_secs_f64() * 1000.0).round() / 1000.0,
        score: one.score,
        checkpoint: one.state.map(|state| state.0),
        changes: one.changes.as_ref().map(format::Tally::total),
        added: count(ChangeKind::Added),
        modified: count(ChangeKind::Modified),
        deleted: count(ChangeKind::Deleted),
        error: match &one.how {
            How::Failed(error) => Some(error.to_string()),
            How::Ran(_) | How::NotRun => None,
        },
    }
}

fn print(line: &str) {
    put(format!("{line}\n").as_bytes());
}

/// Writes to standard output. Nothing waits for its reader: it may have closed it.
fn put(bytes: &[u8]) {
    let mut out = io::stdout().lock();
    if let Err(error) = out.write_all(bytes).and_then(|()| out.flush()) {
        log::debug!("write the results: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::run::outcome::Outcome;

    fn row(number: u32, phase: Phase) -> Row {
        Row { number, phase, text: None }
    }

    #[test]
    fn the_live_table_shows_those_that_run_first_and_stays_short() {
        let mut rows: Vec<Row> = (1..=100).map(|number| row(number, Phase::Waiting)).collect();
        rows[98].phase = Phase::Running(Instant::now());
        let table = Table { rows, drawn: 0 };
        let (shown, hidden) = table.shown();
        assert_eq!((shown.len(), hidden), (ROWS, 80));
        assert_eq!(shown.last().unwrap().number, 99);
    }

    #[test]
    fn a_row_says_how_an_attempt_ended_and_marks_the_winner() {
        let one = Finished {
            number: 3,
            head: "run-1-3".to_owned(),
            how: How::Ran(Outcome::SUCCESS),
            time: Duration::from_millis(1250),
            state: None,
            changes: Some(format::Tally::default()),
            score: Some(7.5),
        };
        let done = Row { text: Some(RowText::of(&one)), ..row(3, Phase::Done) };
        assert_eq!(
            done.line(Some(3)),
            "*       3  exit 0           1.2 s         7.5  nothing changed"
        );
        assert_eq!(row(1, Phase::Waiting).line(Some(3)), "        1  waiting");
    }
}
