//! `jailfs drop`, `jailfs hold` and `jailfs release`: the lifetime of checkpoints.

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::{Reply, Request, Rev};

/// Drop a checkpoint
///
/// 'jailfs gc' frees its space once no recent operation needs it. Until then 'jailfs op restore'
/// can go back to it.
#[derive(Args)]
pub(super) struct Drop {
    #[command(flatten)]
    which: Which,
}

/// Protect a checkpoint from being dropped, also by 'jailfs gc'
#[derive(Args)]
pub(super) struct Hold {
    #[command(flatten)]
    which: Which,
}

/// Allow a held checkpoint to be dropped again
#[derive(Args)]
pub(super) struct Release {
    #[command(flatten)]
    which: Which,
}

#[derive(Args)]
struct Which {
    /// The checkpoint: its number or name, or '@-N' for the N-th last
    #[arg(value_name = "ID|NAME")]
    checkpoint: String,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

impl Drop {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        self.which.call(global, "dropped", |rev| Request::Drop { rev })
    }
}

impl Hold {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        self.which.call(global, "held", |rev| Request::Hold { rev, held: true })
    }
}

impl Release {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        self.which.call(global, "released", |rev| Request::Hold { rev, held: false })
    }
}

impl Which {
    fn call(&self, global: &Global, done: &str, request: impl Fn(Rev) -> Request) -> Result<u8> {
        let reply = Target::find(global)?.call(request(Rev::parse(&self.checkpoint)))?;
        let Reply::Checkpoint(checkpoint) = reply else { return Err(wrong_answer()) };
        let mut out = Out::new();
        out.line(&match self.json {
            true => Line::checkpoint(&checkpoint).text()?,
            false => format!("{done} {}", format::checkpoint(&checkpoint)),
        });
        out.finish()?;
        Ok(0)
    }
}
