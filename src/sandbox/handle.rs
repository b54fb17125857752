//! Handles a request: dispatch, and a retry after making room if the disk is full.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::errno::Errno;

use crate::error::{Error, Kind, Result};
use crate::fs::{MOST_TRIES, Need, Step};
use crate::sandbox::{Reply, Request, Sandbox};
use crate::timeline::gc::Keep;
use crate::timeline::mounts::Mounts;

impl Sandbox {
    /// Does what a request asks. [`Request::Unmount`] is an error here: only the daemon that serves
    /// the mount handles it.
    ///
    /// If the disk is full, it makes room and tries again, except for an apply, and for a stream,
    /// which passes only once.
    ///
    /// # Errors
    /// [`Kind`] classifies them. If [`Error::is_done`] is set, the main work was done.
    pub fn handle(&self, request: Request) -> Result<Reply> {
        // The status must work while a disk hangs.
        if !matches!(request, Request::Status) {
            self.wait_for_early_checkpoints()?;
        }
        self.handle_now(request)
    }

    /// As [`Sandbox::handle`], without the wait for checkpoints that were reported early. A thread
    /// that serves the mount must not wait for them, because they may wait for the mount.
    pub(super) fn handle_now(&self, request: Request) -> Result<Reply> {
        if matches!(
            request,
            Request::Checkpoint { .. } | Request::CheckpointEarly { .. } | Request::Import(_)
        ) {
            self.check_quota()?;
        }
        let mut reply = self.handle_once(request.clone());
        for _ in 0..MOST_TRIES {
            let is_full = reply.as_ref().is_err_and(|error| error.is_full() && !error.is_done)
                && request.stream().is_none()
                && !matches!(request, Request::Apply { .. });
            if !is_full || !self.fs().make_room(Need::Less) {
                break;
            }
            reply = self.handle_once(request.clone());
            self.timeline.store().keep_reserve();
        }
        if let Some(housekeeper) = &*self.housekeeper.lock() {
            housekeeper.wake();
        }
        let is_done = reply.as_ref().is_err_and(|error| error.is_done);
        if is_done
            || matches!(reply, Ok(Reply::Checkpoint(_) | Reply::Collected(_) | Reply::Imported(_)))
        {
            self.timeline.checkpoint_names_changed();
        }
        reply
    }

    /// Refuses a checkpoint if the sandbox is at its storage limit. It does not make room, because
    /// that would free older states to keep a new one.
    fn check_quota(&self) -> Result<()> {
        self.fs().need_checkpoint().map_err(|error| {
            let reason = format!("{error}: the sandbox is at its storage limit");
            let full = Error::new(Kind::Failed, "make a checkpoint", reason);
            Error { errno: Some(Errno::ENOSPC as i32), ..full }.hint(
                "free space with 'jailfs drop' and 'jailfs gc', or raise --max-bytes or \
                 --max-files",
            )
        })
    }

    fn handle_once(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Drop { rev } => self.drop_checkpoint(&rev).map(Reply::Checkpoint),
            // Its own thread reads states, and makes one.
            Request::CheckpointEarly { name, message } => {
                self.checkpoint_early(name, message).map(Reply::Checkpoint)
            }
            Request::Hold { rev, held } => self.hold(&rev, held).map(Reply::Checkpoint),
            Request::Gc { operations, keep, max_store, dry_run } => {
                let spared = BTreeSet::new();
                let keep = Keep { operations, checkpoints: keep, store_bytes: max_store, spared };
                self.gc(&keep, dry_run).map(Reply::Collected)
            }
            Request::Check { read_data } => self.check(read_data).map(Reply::Checked),
            Request::Info => self.info().map(Reply::Info),
            Request::Forks => self.forks().map(Reply::Forks),
            Request::DropFork { name } => self.drop_fork(&name).map(|()| Reply::Done),
            request => self.handle_states(request),
        }
    }

    /// Handles the requests that read or make states. Garbage collection waits meanwhile.
    fn handle_states(&self, request: Request) -> Result<Reply> {
        // Taken before the wait, so that an interrupt during the wait counts.
        let interrupts = self.interrupts.load(Ordering::SeqCst);
        let fs = Arc::clone(self.fs());
        let _guard = fs.read_guard();
        match request {
            Request::Status => self.status().map(Reply::Status),
            Request::Log => Ok(Reply::Log(self.checkpoints())),
            Request::Find { rev } => self.find(&rev).map(Reply::Checkpoint),
            Request::OpLog => Ok(Reply::OpLog(self.operations())),
            Request::Checkpoint { name, message } => {
                self.checkpoint(name, message).map(Reply::Checkpoint)
            }
            Request::Diff { from, to, paths, detail } => {
                let go = || self.interrupts.load(Ordering::SeqCst) == interrupts;
                self.diff(&from, &to, &paths, detail, &go).map(Reply::Diff)
            }
            Request::Restore { to, paths, dry_run, detach_mounts } => {
                self.restore(&to, &paths, dry_run, mounts(detach_mounts)).map(Reply::Restored)
            }
            Request::Discard { detach_mounts } => {
                self.discard(mounts(detach_mounts)).map(Reply::Restored)
            }
            Request::OpRestore { op, detach_mounts } => {
                self.restore_operation(op, mounts(detach_mounts)).map(Reply::Restored)
            }
            Request::Show { rev, path, offset } => self.show(&rev, &path, offset).map(Reply::Shown),
            Request::History { path } => self.edit_history(&path).map(Reply::History),
            Request::FileDiff { from, to, detail } => {
                self.file_diff(&from, &to, detail).map(Reply::Diff)
            }
            Request::Undo { path, steps } => {
                self.step(&path, Step::Undo(steps)).map(Reply::Stepped)
            }
            Request::Redo { path, steps } => {
                self.step(&path, Step::Redo(steps)).map(Reply::Stepped)
            }
            Request::Fork { names, from } => self.fork(&names, from.as_ref()).map(Reply::Forked),
            Request::Merge(terms) => self.merge(&terms).map(Reply::Merged),
            Request::Export(terms) => self.export(&terms, interrupts).map(Reply::Exported),
            Request::Describe(terms) => {
                self.describe_to_pipe(&terms, interrupts).map(Reply::Described)
            }
            Request::Import(terms) => self.import(&terms, interrupts).map(Reply::Imported),
            Request::Apply { paths, dry_run, undo, consent } => {
                self.apply(&paths, dry_run, undo, consent).map(Reply::Applied)
            }
            Request::Drop { .. }
            | Request::Hold { .. }
            | Request::Gc { .. }
            | Request::Info
            | Request::Check { .. }
            | Request::Forks
            | Request::DropFork { .. }
            | Request::CheckpointEarly { .. }
            | Request::Unmount => {
                Err(Error::new(Kind::Failed, "unmount", "the sandbox is not mounted"))
            }
        }
    }
}

/// How a restore treats mounts on directories that it removes.
fn mounts(detach: bool) -> Mounts {
    if detach { Mounts::Detach } else { Mounts::Refuse }
}
