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
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Checkpoint {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let request =
            Request::Checkpoint { name: self.name.clone(), message: self.message.clone() };
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
