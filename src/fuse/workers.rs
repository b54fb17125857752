//! A small pool of threads for jobs that wait for a disk, so that the serving thread never does.
//!
//! A thread starts when a job finds no idle thread, and stays. A job must not wait for another job,
//! nor for a lock that some thread holds while it sends a notification to the kernel.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use parking_lot::{Condvar, Mutex};

/// Enough to keep a disk busy; more jobs would only queue there.
const MAX_THREADS: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// The pool. Dropping it completes the jobs and ends the threads.
#[derive(Default)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    closing: bool,
}

impl Workers {
    /// Runs a job in a worker, or in this thread if the host refuses to start one.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.shared.queue.lock();
        queue.jobs.push_back(Box::new(job));
        let has_idle = queue.idle >= queue.jobs.len();
        drop(queue);
        self.shared.work.notify_one();
        if !has_idle && !self.start_thread() {
            self.shared.help_once();
        }
    }

    /// Starts a thread unless the pool is full. Returns whether the pool has any.
    fn start_thread(&self) -> bool {
        let mut threads = self.threads.lock();
        if threads.len() < MAX_THREADS {
            let shared = Arc::clone(&self.shared);
            match Builder::new().name("jailfs-worker".into()).spawn(move || shared.serve()) {
                Ok(thread) => threads.push(thread),
                Err(error) => log::warn!("cannot start a worker thread: {error}"),
            }
        }
        !threads.is_empty()
    }

    /// Completes the jobs, then ends the threads.
    pub(super) fn finish(&self) {
        self.shared.queue.lock().closing = true;
        self.shared.work.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a worker thread panicked");
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Shared {
    fn serve(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                perform(job);
                queue = self.queue.lock();
            } else if queue.closing {
                return;
            } else {
                queue.idle += 1;
                self.work.wait(&mut queue);
                queue.idle -= 1;
            }
        }
    }

    fn help_once(&self) {
        let job = self.queue.lock().jobs.pop_front();
        if let Some(job) = job {
            perform(job);
        }
    }
}

/// Catches a panic of a job, so that the worker survives. The dropped reply answers EIO.
fn perform(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        log::error!("a request panicked in a worker");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn every_job_completes_before_the_pool_ends() {
        let done = Arc::new(AtomicUsize::new(0));
        let workers = Workers::default();
        for _ in 0..100 {
            let done = Arc::clone(&done);
            workers.run(move || {
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        workers.finish();
        assert_eq!(done.load(Ordering::SeqCst), 100);
    }

    #[test]
    fn a_slow_job_delays_no_other() {
        let workers = Workers::default();
        let (release, wait) = mpsc::channel::<()>();
        workers.run(move || assert!(wait.recv().is_ok()));
        let (said, heard) = mpsc::channel();
        for at in 0..10 {
            let said = said.clone();
            workers.run(move || said.send(at).unwrap());
        }
        let mut got: Vec<i32> = (0..10).map(|_| heard.recv().unwrap()).collect();
        got.sort_unstable();
        assert_eq!(got, (0..10).collect::<Vec<_>>());
        release.send(()).unwrap();
    }

    #[test]
    fn threads_are_bounded_and_start_only_for_a_job() {
        let workers = Workers::default();
        assert_eq!(workers.threads.lock().len(), 0);
        for _ in 0..50 {
            workers.run(|| ());
        }
        assert!((1..=MAX_THREADS).contains(&workers.threads.lock().len()));
    }
}
