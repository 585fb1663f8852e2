//! A bounded number of threads for blocking calls, with a bounded queue.

use super::fault::{busy, closed};
use crate::{Kind, TierError};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::sync::oneshot;

pub type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    ended: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    limit: usize,
}

/// The threads. Dropping it ends them after their current jobs; queued jobs are dropped.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Pool {
    /// Starts threads with this name; at most `limit` jobs wait.
    pub fn start(name: &str, threads: usize, limit: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wake: Condvar::new(),
            limit,
        });
        let pool = Self {
            shared,
            threads: Mutex::default(),
        };
        for index in 0..threads.max(1) {
            let shared = pool.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || {
                    while let Some(job) = shared.next() {
                        job();
                    }
                })?;
            pool.threads.lock().push(thread);
        }
        Ok(pool)
    }

    /// Runs `f` on a thread. It runs even when the caller stops waiting.
    pub async fn run<T: Send + 'static>(
        &self,
        kind: Kind,
        f: impl FnOnce() -> Result<T, TierError> + Send + 'static,
    ) -> Result<T, TierError> {
        let (answer, answered) = oneshot::channel();
        let job = Box::new(move || {
            let _ = answer.send(f());
        });
        if !self.push(job) {
            return Err(busy(kind));
        }
        answered.await.unwrap_or_else(|_| Err(closed(kind)))
    }

    /// Queues a job. False: the queue is full and the job was dropped.
    pub fn push(&self, job: Job) -> bool {
        let mut queue = self.shared.queue.lock();
        if queue.ended || queue.jobs.len() >= self.shared.limit {
            // The drop of a job may take other locks: not under this one.
            drop(queue);
            drop(job);
            return false;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.wake.notify_one();
        true
    }

    /// Ends the threads and waits for them.
    pub fn end(&self) {
        self.stop();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }

    fn stop(&self) {
        let left = {
            let mut queue = self.shared.queue.lock();
            queue.ended = true;
            std::mem::take(&mut queue.jobs)
        };
        self.shared.wake.notify_all();
        drop(left);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        while !queue.ended {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            self.wake.wait(&mut queue);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn jobs_beyond_the_limit_are_dropped_and_an_end_waits_for_what_runs() {
        let pool = Pool::start("test", 1, 2).unwrap();
        let (started, starts) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        let (done, dones) = mpsc::channel();
        let running = done.clone();
        assert!(pool.push(Box::new(move || {
            started.send(()).unwrap();
            gate.recv().unwrap();
            running.send(0).unwrap();
        })));
        starts.recv().unwrap();
        for i in 1..=3 {
            let done = done.clone();
            let pushed = pool.push(Box::new(move || done.send(i).unwrap()));
            assert_eq!(pushed, i < 3);
        }
        go.send(()).unwrap();
        drop(done);
        assert_eq!(dones.recv(), Ok(0));
        pool.end();
        assert!(dones.iter().count() <= 2, "what waited was done or dropped");
    }
}
