//! `jailfs checkpoint`.

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::{Reply, Request};

/// Save the tree as it is now; 'restore' goes back to it
///
/// The time that this takes does not depend on the size of the tree.
#[derive(Args)]
pub(super) struct Checkpoint {
    /// A name for it, new in this head; not a number, not 'base', without '@'
    name: Option<String>,
    /// A message
    #[arg(short, long, value_name = "TEXT", default_value = "")]
    message: String,
    /// Answer before the checkpoint is on the disk: it survives a kill, but a power cut can take it
    #[arg(long)]
    no_sync: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Checkpoint {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let (name, message) = (self.name.clone(), self.message.clone());
        let request = match self.no_sync {
            true => Request::CheckpointEarly { name, message },
            false => Request::Checkpoint { name, message },
        };
        let Reply::Checkpoint(checkpoint) = target.call(request)? else {
            return Err(wrong_answer());
        };
        let mut out = Out::new();
        if self.json {
            out.line(&Line::checkpoint(&checkpoint).text()?);
        } else {
            out.line(&format!("checkpoint {}", format::checkpoint(&checkpoint)));
        }
        out.finish()?;
        Ok(0)
    }
}
