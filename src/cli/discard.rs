//! `jailfs discard`.

use clap::Args;

use super::Global;
use super::restore;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::{Reply, Request};

/// Discard everything that 'apply' would write: the tree equals the base again
///
/// Checkpoints stay. 'jailfs restore @-1' goes back to the last one instead. The output says how to
/// undo a discard.
#[derive(Args)]
pub(super) struct Discard {
    /// Detach mounts on directories that disappear, instead of refusing
    #[arg(long)]
    detach_mounts: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Discard {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let Reply::Restored(restored) =
            target.call(Request::Discard { detach_mounts: self.detach_mounts })?
        else {
            return Err(wrong_answer());
        };
        restore::tell(&restored, false, self.json)?;
        Ok(0)
    }
}
