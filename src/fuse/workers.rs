//! A small pool of threads for what waits for a disk, so that the thread that answers the kernel never does.
//!
//! Threads start when there is work that nobody is free for, and stay. A job must not wait for another job, nor for a
//! lock that is held while the kernel is being notified.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use parking_lot::{Condvar, Mutex};

/// Enough to keep a disk busy; more would only queue there.
const MOST_THREADS: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// The pool. Dropping it ends the threads once the jobs are done.
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
    /// Runs a job in a worker; in this thread if the host gives us none.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.shared.queue.lock();
        queue.jobs.push_back(Box::new(job));
        let someone_is_free = queue.idle >= queue.jobs.len();
        drop(queue);
        self.shared.work.notify_one();
        if !someone_is_free && !self.start_thread() {
            self.shared.help_once();
        }
    }

    /// Starts a thread unless there are enough. Whether there is any.
    fn start_thread(&self) -> bool {
        let mut threads = self.threads.lock();
        if threads.len() < MOST_THREADS {
            let shared = Arc::clone(&self.shared);
            match Builder::new().name("jailfs-worker".into()).spawn(move || shared.serve()) {
                Ok(thread) => threads.push(thread),
                Err(error) => log::warn!("no thread for slow requests: {error}"),
            }
        }
        !threads.is_empty()
    }

    /// Ends the threads once the jobs are done.
    pub(super) fn finish(&self) {
        self.shared.queue.lock().closing = true;
        self.shared.work.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a worker ended by a panic");
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

/// A job that panics must not take its thread with it: the reply it held answers EIO when it is dropped.
fn perform(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        log::error!("a slow request ended by a panic");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn every_job_is_done_before_the_pool_ends() {
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
    fn a_slow_job_holds_up_no_other() {
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
    fn threads_are_few_and_start_only_for_work() {
        let workers = Workers::default();
        assert_eq!(workers.threads.lock().len(), 0);
        for _ in 0..50 {
            workers.run(|| ());
        }
        assert!((1..=MOST_THREADS).contains(&workers.threads.lock().len()));
    }
}
