//! Holds the wake-up latency of the CPUs at 0 during bursts of requests.
//!
//! A caller sleeps until its reply, and the daemon sleeps until the next request. A CPU that went
//! into a deep idle state meanwhile takes longer to wake than a request takes to answer. While the
//! daemon holds `/dev/cpu_dma_latency` at 0, the kernel's idle loop polls instead.
//!
//! Always true:
//! * An idle mount holds nothing: the file is closed at most twice [`IDLE`] after the last request,
//!   and isolated requests do not open it. A process that ends closes it, however it ends.
//! * No request waits for the device: a thread of its own opens and closes it.
//! * A request costs one addition while the latency is held, and one look at the clock otherwise.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::{Builder, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::fuse::burst::Burst;
use crate::sys::cpu_latency;

/// Without a request for this long, the latency is released.
const IDLE: Duration = Duration::from_millis(50);
/// Two requests that come within this time belong to one burst.
const SOON: Duration = Duration::from_millis(10);

/// The handle of the thread that holds the latency. The thread ends soon after this is dropped.
pub(super) struct LatencyHolder {
    shared: Arc<Shared>,
    thread: Thread,
    burst: Mutex<Burst>,
}

#[derive(Default)]
struct Shared {
    requests: AtomicU64,
    is_held: AtomicBool,
    ends: AtomicBool,
}

impl LatencyHolder {
    /// Starts the thread.
    ///
    /// # Errors
    /// Those of opening `/dev/cpu_dma_latency`, and when no thread can be started.
    pub(super) fn start() -> io::Result<LatencyHolder> {
        // Opened once to learn whether that is allowed. Without a write it limits nothing.
        drop(cpu_latency::open()?);
        let shared = Arc::new(Shared::default());
        let thread_shared = Arc::clone(&shared);
        let thread = Builder::new().name("latency".to_owned()).spawn(move || {
            while !thread_shared.ends.load(Relaxed) {
                if !thread_shared.is_held.load(Relaxed) {
                    std::thread::park();
                    continue;
                }
                match hold() {
                    Ok(_file) => thread_shared.wait_for_idle(),
                    Err(error) => {
                        log::warn!("hold '{}' at 0: {error}", cpu_latency::DEVICE);
                        return;
                    }
                }
                thread_shared.is_held.store(false, Relaxed);
            }
        })?;
        let burst = Mutex::new(Burst::new(Instant::now()));
        Ok(LatencyHolder { shared, thread: thread.thread().clone(), burst })
    }

    /// Counts a request, and has the latency held if the request completes a burst.
    pub(super) fn note_request(&self) {
        self.shared.requests.fetch_add(1, Relaxed);
        if !self.shared.is_held.load(Relaxed) && self.burst.lock().is_reached(Instant::now(), SOON)
        {
            self.shared.is_held.store(true, Relaxed);
            self.thread.unpark();
        }
    }
}

impl Drop for LatencyHolder {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
        self.thread.unpark();
    }
}

/// Holds the latency at 0 until the returned file is closed.
fn hold() -> io::Result<File> {
    let mut file = cpu_latency::open()?;
    cpu_latency::set(&mut file, 0)?;
    Ok(file)
}

impl Shared {
    /// Returns once there was no request for as long as [`IDLE`].
    fn wait_for_idle(&self) {
        let mut seen = None;
        while !self.ends.load(Relaxed) {
            let requests = self.requests.load(Relaxed);
            if seen == Some(requests) {
                return;
            }
            seen = Some(requests);
            std::thread::park_timeout(IDLE);
        }
    }
}
