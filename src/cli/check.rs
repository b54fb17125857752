//! `jailfs check`.

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::{self, Out};
use super::target::Target;
use crate::error::{Kind, Result};

/// Verify the consistency of the store
///
/// Reads every record, rebuilds every tree and follows every extent. Changes nothing. Works on a
/// mounted store, and on one that is too damaged to be mounted. Exit code 4 if something is wrong.
/// Damage in the edit history of single files is a warning: the store is sound without it.
#[derive(Args)]
pub(super) struct Check {
    /// Also read all content and verify it against its checksums
    #[arg(long)]
    read_data: bool,
    /// Remove unreadable indexes and checksums, which are made again; loses no data
    #[arg(long)]
    repair: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Check {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let checked = Target::check(global, self.read_data, self.repair)?;
        let mut out = Out::new();
        if self.json {
            for problem in &checked.problems {
                out.line(&Line::problem(problem).text()?);
            }
            for warning in &checked.warnings {
                out.line(&Line::warning(warning).text()?);
            }
            for done in &checked.repaired {
                out.line(&Line::repaired(done).text()?);
            }
            out.line(&Line::checked(&checked).text()?);
        } else {
            checked.repaired.iter().for_each(|done| out.line(&format::one_line(done)));
            checked.problems.iter().for_each(|problem| out.line(&format::one_line(problem)));
            for warning in &checked.warnings {
                out.line(&format!("warning: {}", format::one_line(warning)));
            }
            let (layers, records, extents) = (checked.layers, checked.records, checked.extents);
            let mut text = format!("checked {layers} layers, {records} records, {extents} extents");
            text += &format!(", {} versions of files", checked.edits);
            if self.read_data {
                let (read, without) =
                    (format::size(checked.bytes_read), format::size(checked.bytes_without_sum));
                text += &format!(", {read} of content; {without} have no checksums yet");
            }
            out.line(&text);
        }
        out.finish()?;
        match checked.problems.len() {
            0 => Ok(0),
            number => {
                let changed = if checked.repaired.is_empty() { "nothing" } else { "nothing else" };
                out::note(&format!("{number} problems; the check has changed {changed}"));
                Ok(Kind::Damage.exit_code())
            }
        }
    }
}
