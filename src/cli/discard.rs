//! `jailfs discard`.

use clap::Args;

use super::Global;
use super::restore;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::verbs::{Reply, Request};

/// Throw away all changes since the last checkpoint, or since the base if there is none
#[derive(Args)]
pub(super) struct Discard {
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Discard {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let Reply::Restored(restored) = target.call(Request::Discard)? else { return Err(wrong_answer()) };
        restore::tell(&restored, false, self.json)?;
        Ok(0)
    }
}
