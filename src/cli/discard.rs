//! `jailfs discard`.

use clap::Args;

use super::Global;
use super::restore;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::verbs::{Reply, Request};

/// Throw away everything that 'apply' would write: the tree is again what the base is
///
/// Checkpoints stay. 'jailfs restore @-1' goes back to the last one instead. A discard can be undone:
/// it says how.
#[derive(Args)]
pub(super) struct Discard {
    /// Detach what is mounted on directories that do not stay
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
