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
        let Reply::Log(mut checkpoints) = Target::find(global)?.call(Request::Log)? else {
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
            for checkpoint in &checkpoints {
                out.line(&line(checkpoint, width));
            }
        }
        out.finish()?;
        Ok(0)
    }
}

/// `*    4  green  2026-01-02 03:04:05Z  all tests pass`. The mark is at the current checkpoint.
fn line(checkpoint: &Checkpoint, width: usize) -> String {
    let mark = if checkpoint.current { '*' } else { ' ' };
    let (id, name, time) = (checkpoint.id.0, name(checkpoint), date::utc(checkpoint.time));
    let message = format::one_line(&checkpoint.message);
    format!("{mark} {id:>4}  {name:width$}  {time}  {message}").trim_end().to_owned()
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
            head: "main".to_owned(),
            id: LayerId(4),
            name: Some("green".to_owned()),
            message: "two\nlines".to_owned(),
            time: Timestamp { secs: 1_767_323_045, nanos: 0 },
            parent: None,
            epoch: Epoch(0),
            automatic: false,
            current: true,
        };
        assert_eq!(line(&checkpoint, 7), "*    4  green    2026-01-02 03:04:05Z  two\\nlines");
        (checkpoint.name, checkpoint.current, checkpoint.automatic) = (None, false, true);
        checkpoint.message.clear();
        assert_eq!(line(&checkpoint, 0), "     4  (automatic)  2026-01-02 03:04:05Z");
    }
}
