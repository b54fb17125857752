//! Checkpoints that are reported before they are on the disk.
//!
//! The thread that makes such a checkpoint reports it as soon as the tree is fixed: all further
//! changes go to the next layer, and the layer says which seal it is to get. The thread then syncs
//! and seals it, under the locks of any checkpoint. The next request to any head of the store waits
//! until it has done so, and fails if that failed.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::record::Seal;
use crate::timeline::Timeline;
use crate::types::LayerId;

/// A checkpoint that gets or has this seal.
type Reported = (LayerId, Seal);

/// The thread that completes the last reported checkpoint of a head. When this is dropped, it has
/// ended.
#[derive(Default)]
pub(super) struct EarlyCheckpoint(Mutex<Option<JoinHandle<Result<()>>>>);

impl EarlyCheckpoint {
    /// Makes a checkpoint.
    ///
    /// # Errors
    /// As [`Timeline::checkpoint`], if it fails before the report.
    pub(super) fn make(
        &self,
        timeline: &Arc<Timeline>,
        (name, message): (Option<String>, String),
    ) -> Result<Reported> {
        let mut last = self.0.lock();
        let (sender, reported) = channel();
        let timeline = Arc::clone(timeline);
        let work = move || complete(&timeline, (name, message), &sender);
        let thread = std::thread::Builder::new().name("checkpoint".to_owned());
        *last = Some(thread.spawn(work).attempt(|| "start a thread for a checkpoint")?);
        let ended = || Error::new(Kind::Failed, "make a checkpoint", "its thread ended");
        reported.recv().map_err(|_| ended())?
    }

    /// Waits until the last checkpoint is on the disk.
    ///
    /// # Errors
    /// Why it is not, once.
    pub(super) fn wait(&self) -> Result<()> {
        let Some(thread) = self.0.lock().take() else { return Ok(()) };
        let panicked = || Error::new(Kind::Failed, "complete a checkpoint", "its thread panicked");
        thread.join().unwrap_or_else(|_| Err(panicked()))
    }
}

impl Drop for EarlyCheckpoint {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            log::warn!("{error}");
        }
    }
}

/// Makes a checkpoint, and sends it or the error. Returns an error that came after the report.
fn complete(
    timeline: &Timeline,
    (name, message): (Option<String>, String),
    sender: &Sender<Result<Reported>>,
) -> Result<()> {
    let mut is_reported = false;
    let made = {
        let _states = timeline.fs().read_guard();
        let report = &mut |layer, seal: &Seal| {
            is_reported = true;
            // The receiver waits for this.
            let _sent = sender.send(Ok((layer, seal.clone())));
        };
        timeline.checkpoint(name, message, Some(report))
    };
    timeline.checkpoint_names_changed();
    match made {
        Ok(_) => Ok(()),
        Err(error) if is_reported => {
            log::warn!("a checkpoint that was reported is not on the disk: {error}");
            Err(error.during("complete a checkpoint that was reported"))
        }
        Err(error) => {
            // The receiver waits for this.
            let _sent = sender.send(Err(error));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::Caller;
    use crate::sandbox::{Request, Sandbox, StoreOptions};
    use crate::sys::failpoint;
    use crate::types::{Name, NodeId};

    fn place() -> (tempfile::TempDir, Arc<Sandbox>) {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        std::fs::create_dir(&base).unwrap();
        let options = StoreOptions::default();
        let sandbox = Sandbox::create_or_open(&base, &dir.path().join("store"), &options).unwrap();
        let (me, name) = (Caller { uid: 0, gid: 0 }, Name::new(b"f").unwrap());
        sandbox.fs().mknod(NodeId::ROOT, &name, 0o644, 0, 0, me).unwrap();
        (dir, sandbox)
    }

    #[test]
    fn a_failure_after_the_report_is_the_error_of_the_next_request() {
        let (mut failed_late, mut failed_before) = (0, 0);
        for step in 1.. {
            let (_dir, sandbox) = place();
            let (sender, reported) = channel();
            let terms = (Some("c".to_owned()), String::new());
            let rule = format!("fail:store.sync:{step}:EIO");
            let done = failpoint::with(&rule, || complete(&sandbox.timeline, terms, &sender));
            match (reported.try_recv().unwrap(), done) {
                (Ok(_), Ok(())) => break,
                (Err(_), Ok(())) => failed_before += 1,
                (Ok(_), Err(error)) => {
                    failed_late += 1;
                    let ended = std::thread::spawn(move || Err(error));
                    *sandbox.early.0.lock() = Some(ended);
                    assert!(sandbox.handle(Request::Status).is_ok(), "it waits for nothing");
                    let error = sandbox.handle(Request::Log).unwrap_err();
                    assert!(error.to_string().contains("that was reported"), "{error}");
                    assert!(sandbox.handle(Request::Log).is_ok(), "it is told once");
                }
                (Err(error), Err(_)) => panic!("both are told: {error}"),
            }
        }
        assert!(failed_before > 0 && failed_late > 0, "{failed_before}, {failed_late}");
    }
}
