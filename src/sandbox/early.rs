//! Checkpoints that are answered before they are on the disk.
//!
//! The thread that makes such a checkpoint reports it as soon as the tree is fixed: all further
//! changes go to the next layer, and the layer says which seal it is to get. The thread then syncs
//! and seals it, under the locks of any checkpoint. Every later request waits until it has done so,
//! so no request sees a state that is reported and not sealed.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::record::Seal;
use crate::timeline::Timeline;
use crate::types::LayerId;

/// The thread that completes the last reported checkpoint. When this is dropped, it has ended.
#[derive(Default)]
pub(super) struct EarlyCheckpoint(Mutex<Option<JoinHandle<()>>>);

impl EarlyCheckpoint {
    /// Makes a checkpoint. Returns its layer, and the seal that it gets or has.
    ///
    /// # Errors
    /// As [`Timeline::checkpoint`], if it fails before the report. A later failure is logged; the
    /// next sync or checkpoint tries again.
    pub(super) fn make(
        &self,
        timeline: &Arc<Timeline>,
        (name, message): (Option<String>, String),
    ) -> Result<(LayerId, Seal)> {
        let mut last = self.0.lock();
        join(&mut last);
        let (report, reported) = channel();
        let timeline = Arc::clone(timeline);
        let work = move || {
            let _states = timeline.fs().read_guard();
            let mut is_reported = false;
            let made = timeline.checkpoint_and_report(name, message, |layer, seal| {
                is_reported = true;
                // The receiver waits for this.
                let _sent = report.send(Ok((layer, seal)));
            });
            timeline.checkpoint_names_changed();
            match made {
                Err(error) if is_reported => {
                    log::warn!("a checkpoint that was reported is not complete: {error}");
                }
                Err(error) => drop(report.send(Err(error))),
                Ok(_) => {}
            }
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned());
        *last = Some(thread.spawn(work).attempt(|| "start a thread for a checkpoint")?);
        let ended = || Error::new(Kind::Failed, "make a checkpoint", "its thread ended");
        reported.recv().map_err(|_| ended())?
    }

    /// Waits until the last checkpoint is sealed.
    pub(super) fn wait(&self) {
        join(&mut self.0.lock());
    }
}

impl Drop for EarlyCheckpoint {
    fn drop(&mut self) {
        self.wait();
    }
}

fn join(last: &mut Option<JoinHandle<()>>) {
    if last.take().is_some_and(|thread| thread.join().is_err()) {
        log::error!("the thread of a checkpoint has panicked");
    }
}
