//! The requests that a command under `jailfs run` may not make over the control socket.

use crate::error::{Error, Kind, Result};
use crate::sandbox::Request;

/// Refuses the requests that a command in the sandbox may not make. The caller judges the changes
/// when the command has ended.
pub(super) fn gate(request: &Request) -> Result<()> {
    let (attempt, hint) = match request {
        Request::Apply { dry_run: false, .. } => {
            ("apply", "apply the changes when the command has ended")
        }
        Request::Unmount => ("unmount", "the sandbox is unmounted when the command has ended"),
        // The command must not drop states to which its caller may go back.
        Request::Drop { .. } => {
            ("drop a checkpoint", "drop checkpoints when the command has ended")
        }
        Request::Gc { dry_run: false, .. } => ("gc", "free space when the command has ended"),
        // It reads the whole store, and no other request can read a state meanwhile.
        Request::Check { read_data: true } => {
            ("check", "check the store when the command has ended")
        }
        Request::Hold { held: false, .. } => {
            ("release a checkpoint", "release it when the command has ended")
        }
        // A pipe that its other end does not serve keeps collections waiting.
        Request::Export(_) => ("export", "export when the command has ended"),
        Request::Describe(_) => ("push or pull", "do it when the command has ended"),
        Request::Import(_) => ("import", "import when the command has ended"),
        Request::DropFork { .. } => ("drop a fork", "drop it when the command has ended"),
        // No `_`: each new request must be judged here.
        Request::Info
        | Request::Status
        | Request::Log
        | Request::Find { .. }
        | Request::OpLog
        | Request::Checkpoint { .. }
        | Request::CheckpointEarly { .. }
        | Request::Diff { .. }
        | Request::Show { .. }
        | Request::Restore { .. }
        | Request::Discard { .. }
        | Request::Apply { dry_run: true, .. }
        | Request::OpRestore { .. }
        | Request::History { .. }
        | Request::FileDiff { .. }
        | Request::Undo { .. }
        | Request::Redo { .. }
        | Request::Hold { held: true, .. }
        | Request::Gc { dry_run: true, .. }
        | Request::Fork { .. }
        | Request::Forks
        | Request::Merge(_)
        | Request::Check { read_data: false } => return Ok(()),
    };
    Err(Error::new(Kind::InUse, attempt, "'jailfs run' holds this sandbox").hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::{DescribeTerms, Rev};

    #[test]
    fn a_command_cannot_apply_or_drop_states() {
        let apply = |dry_run| Request::Apply {
            paths: Vec::new(),
            dry_run,
            undo: false,
            consent: Default::default(),
        };
        assert_eq!(gate(&apply(false)).unwrap_err().kind, Kind::InUse);
        assert_eq!(gate(&Request::Unmount).unwrap_err().kind, Kind::InUse);
        let undo = Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: true,
            consent: Default::default(),
        };
        assert!(gate(&undo).is_err());
        let gc = |dry_run| Request::Gc { operations: 0, keep: Some(0), max_store: None, dry_run };
        let hold = |held| Request::Hold { rev: Rev::Back(1), held };
        for refused in [Request::Drop { rev: Rev::Back(1) }, gc(false), hold(false)] {
            assert_eq!(gate(&refused).unwrap_err().kind, Kind::InUse, "{refused:?}");
        }
        let describe = DescribeTerms {
            state: Rev::Now,
            history: 0,
            is_thin: false,
            has_edits: false,
            stream: Default::default(),
        };
        assert_eq!(gate(&Request::Describe(describe)).unwrap_err().attempt, "push or pull");
        for allowed in [
            gc(true),
            hold(true),
            apply(true),
            Request::Status,
            Request::Discard { detach_mounts: false },
            Request::Log,
        ] {
            assert_eq!(gate(&allowed), Ok(()));
        }
    }
}
