//! The signals that end a daemon.

use std::io;
use std::sync::Arc;
use std::thread;

use nix::sys::signal::{SigSet, Signal};

use super::heads::Heads;
use crate::error::{Attempt, Result};

/// The signals that end a daemon, and SIGHUP.
fn signals() -> SigSet {
    SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])
}

/// Blocks the signals in this thread and its later children, threads and programs.
pub(super) fn block_signals() -> Result<()> {
    signals().thread_block().map_err(io::Error::from).attempt(|| "block signals")
}

/// Starts the thread that waits for signals. The first unmounts all heads, the second ends the
/// process at once.
pub(super) fn end_on_signals(heads: Arc<Heads>, hangup_ends: bool) -> Result<()> {
    let wait = move || {
        let mut asked = false;
        loop {
            match signals().wait() {
                Ok(Signal::SIGHUP) if !hangup_ends => {}
                Ok(_) if asked => std::process::exit(1),
                Ok(signal) => {
                    asked = true;
                    start_to_unmount(signal, &heads);
                }
                Err(error) => log::error!("wait for signals: {error}"),
            }
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)
        .attempt(|| "start the signal thread")
        .map(drop)
}

/// Unmounts all heads from another thread, so that a second signal is noticed meanwhile.
fn start_to_unmount(signal: Signal, heads: &Arc<Heads>) {
    let of_thread = Arc::clone(heads);
    let unmount = move || of_thread.unmount_on(signal);
    if let Err(error) = thread::Builder::new().name("unmount".to_owned()).spawn(unmount) {
        log::debug!("start a thread that unmounts: {error}");
        heads.unmount_on(signal);
    }
}
