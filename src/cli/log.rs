//! `jailfs log`.

use clap::Args;

use super::Global;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use super::{date, format};
use crate::error::Result;
use crate::sandbox::{Checkpoint, Reply, Request};

/// List the checkpoints, newest first
#[derive(Args)]
pub(super) struct Log {
    /// Include the automatic ones, made before a restore, discard or apply
    #[arg(long)]
    all: bool,
    /// Print one JSON object per checkpoint
    #[arg(long)]
    json: bool,
}

impl Log {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let Reply::Log(mut checkpoints) = target.call(Request::Log)? else {
            return Err(wrong_answer());
        };
        checkpoints.retain(|checkpoint| self.all || !checkpoint.automatic);
        let mut out = Out::new();
        if self.json {
            for checkpoint in &checkpoints {
                out.line(&Line::checkpoint(checkpoint).text()?);
            }
        } else {
            let width = checkpoints
                .iter()
                .map(|checkpoint| name(checkpoint).chars().count())
                .max()
                .unwrap_or(0);
            let heads = head_width(&mut target, checkpoints.iter().map(|one| one.head.as_str()))?;
            for checkpoint in &checkpoints {
                out.line(&line(checkpoint, width, heads));
            }
        }
        out.finish()?;
        Ok(0)
    }
}

/// The width of the column of heads; `None` if the store has one head only.
pub(super) fn head_width<'a>(
    target: &mut Target,
    heads: impl Iterator<Item = &'a str>,
) -> Result<Option<usize>> {
    let width = heads.map(|head| head.chars().count()).max().unwrap_or(0);
    Ok(target.head_of_many()?.map(|_| width))
}

/// A cell of the column of heads, if there is one.
pub(super) fn head_cell(head: &str, width: Option<usize>) -> String {
    width.map_or_else(String::new, |width| format!("  {:width$}", format::one_line(head)))
}

/// `*    4  main  green  2026-01-02 03:04:05Z  all tests pass`. The mark is at the current
/// checkpoint. The head is printed if `heads` is the width of its column.
fn line(checkpoint: &Checkpoint, width: usize, heads: Option<usize>) -> String {
    let mark = if checkpoint.current { '*' } else { ' ' };
    let (id, name, time) = (checkpoint.id.0, name(checkpoint), date::utc(checkpoint.time));
    let (head, message) =
        (head_cell(&checkpoint.head, heads), format::one_line(&checkpoint.message));
    format!("{mark} {id:>4}{head}  {name:width$}  {time}  {message}").trim_end().to_owned()
}

fn name(checkpoint: &Checkpoint) -> String {
    match &checkpoint.name {
        Some(name) => format::one_line(name),
        None if checkpoint.automatic => "(automatic)".to_owned(),
        None => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Epoch, LayerId, Timestamp};

    #[test]
    fn the_current_checkpoint_is_marked() {
        let mut checkpoint = Checkpoint {
            id: LayerId(4),
            head: "main".to_owned(),
            name: Some("green".to_owned()),
            message: "two\nlines".to_owned(),
            time: Timestamp { secs: 1_767_323_045, nanos: 0 },
            parent: None,
            epoch: Epoch(0),
            automatic: false,
            current: true,
        };
        assert_eq!(
            line(&checkpoint, 7, None),
            "*    4  green    2026-01-02 03:04:05Z  two\\nlines"
        );
        let with_head = "*    4  main   green    2026-01-02 03:04:05Z  two\\nlines";
        assert_eq!(line(&checkpoint, 7, Some(5)), with_head);
        (checkpoint.name, checkpoint.current, checkpoint.automatic) = (None, false, true);
        checkpoint.message.clear();
        assert_eq!(line(&checkpoint, 0, None), "     4  (automatic)  2026-01-02 03:04:05Z");
    }
}
