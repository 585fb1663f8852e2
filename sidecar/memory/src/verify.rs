//! A small thread pool for digests: urgent jobs first, others at a limited rate. Reads the arena and writes nothing. The core interprets
//! the results.

use crate::mapping::Mapping;
use kvcachepool_engine::DigestJob;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A background job that has been due for this long precedes urgent ones, so that a constant stream of stores cannot starve checks.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Number of threads. If there are several, one is reserved for urgent jobs.
    pub threads: usize,
    /// Limit on reads by all background jobs. Bytes per second.
    pub background_bytes_per_s: u64,
}

#[derive(Debug)]
pub struct Job {
    pub bytes: Arc<Mapping>,
    /// Offset in the arena.
    pub offset: u64,
    pub work: DigestJob,
}

struct Queues {
    urgent: VecDeque<Job>,
    background: VecDeque<Job>,
    /// Earliest start of the first background job.
    background_at: Instant,
    background_running: usize,
    pace: Pace,
    ended: bool,
}

/// The next step of a thread.
#[derive(Debug)]
enum Next {
    Do(Job),
    /// Wait until this time, or until a job is pushed.
    WaitUntil(Instant),
    Wait,
}

struct Shared {
    queues: Mutex<Queues>,
    wake: Condvar,
}

/// The thread pool. Dropping it ends the threads after their current jobs.
pub struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// Starts the threads. They call `done` with each job and its digest.
    pub fn start(
        pace: Pace,
        done: impl Fn(&Job, Option<[u8; 16]>) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::new(Queues::new(pace, Instant::now())),
            wake: Condvar::new(),
        });
        let done = Arc::new(done);
        for index in 0..pace.threads.max(1) {
            let (shared, done) = (shared.clone(), done.clone());
            std::thread::Builder::new()
                .name(format!("verify-{index}"))
                .spawn(move || {
                    while let Some(job) = shared.next() {
                        let digest = job.bytes.xxh3_128(job.offset, job.work.length);
                        done(&job, digest);
                        if !job.work.urgent {
                            shared.queues.lock().background_running -= 1;
                        }
                    }
                })?;
        }
        Ok(Self { shared })
    }

    /// Queues a job. The queue is bounded by the core's limit on jobs in flight.
    pub fn push(&self, job: Job) {
        self.shared.queues.lock().push(job, Instant::now());
        self.shared.wake.notify_one();
    }

    /// Number of waiting jobs: urgent, background.
    pub fn waiting(&self) -> (usize, usize) {
        let queues = self.shared.queues.lock();
        (queues.urgent.len(), queues.background.len())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.queues.lock().ended = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    /// Waits for the next job that may start. None: the pool has ended.
    fn next(&self) -> Option<Job> {
        let mut queues = self.queues.lock();
        while !queues.ended {
            match queues.next(Instant::now()) {
                Next::Do(job) => return Some(job),
                Next::Wait => self.wake.wait(&mut queues),
                Next::WaitUntil(at) => {
                    self.wake.wait_until(&mut queues, at);
                }
            }
        }
        None
    }
}

impl Queues {
    fn new(pace: Pace, now: Instant) -> Self {
        Self {
            urgent: VecDeque::new(),
            background: VecDeque::new(),
            background_at: now,
            background_running: 0,
            pace,
            ended: false,
        }
    }

    fn push(&mut self, job: Job, now: Instant) {
        if job.work.urgent {
            self.urgent.push_back(job);
            return;
        }
        if self.background.is_empty() {
            self.background_at = self.background_at.max(now);
        }
        self.background.push_back(job);
    }

    fn next(&mut self, now: Instant) -> Next {
        // A thread that ends a background job checks again, so no other thread needs to wait for that.
        let room = self.background_running < self.pace.threads.saturating_sub(1).max(1);
        let waits = !self.background.is_empty() && room;
        let forgotten = waits && now >= self.background_at + PATIENCE;
        if !forgotten && let Some(job) = self.urgent.pop_front() {
            return Next::Do(job);
        }
        if !waits {
            return Next::Wait;
        }
        if now < self.background_at {
            return Next::WaitUntil(self.background_at);
        }
        let Some(job) = self.background.pop_front() else {
            return Next::Wait;
        };
        let nanos =
            job.work.length.saturating_mul(1_000_000_000) / self.pace.background_bytes_per_s.max(1);
        self.background_at = now + Duration::from_nanos(nanos);
        self.background_running += 1;
        Next::Do(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd::{Pages, sealed};
    use rustix::fd::AsFd;
    use std::sync::mpsc;

    fn job(bytes: &Arc<Mapping>, slot: u32, length: u64, urgent: bool) -> Job {
        Job {
            bytes: bytes.clone(),
            offset: 0,
            work: DigestJob {
                slot,
                generation: slot,
                check: 0,
                length,
                urgent,
            },
        }
    }

    /// Background jobs at one byte per nanosecond.
    fn pace(threads: usize) -> Pace {
        Pace {
            threads,
            background_bytes_per_s: 1_000_000_000,
        }
    }

    fn arena(length: u64) -> Arc<Mapping> {
        let fd = sealed("verify-test", length, Pages::Base).unwrap();
        Arc::new(Mapping::new(fd.as_fd(), length).unwrap())
    }

    /// Queues of a pool of `threads` with a manual clock. Jobs are pushed as (slot, bytes, urgent).
    struct Rig {
        queues: Queues,
        bytes: Arc<Mapping>,
        now: Instant,
    }

    impl Rig {
        fn new(threads: usize) -> Self {
            let now = Instant::now();
            Self {
                queues: Queues::new(pace(threads), now),
                bytes: arena(4096),
                now,
            }
        }

        fn push(&mut self, slot: u32, length: u64, urgent: bool) {
            let job = job(&self.bytes, slot, length, urgent);
            self.queues.push(job, self.now);
        }

        /// The slot of the next job, or the wait before it; `None` = until a push.
        fn next(&mut self) -> Result<u32, Option<Duration>> {
            match self.queues.next(self.now) {
                Next::Do(job) => Ok(job.work.slot),
                Next::WaitUntil(at) => Err(Some(at - self.now)),
                Next::Wait => Err(None),
            }
        }

        fn background_ends(&mut self) {
            self.queues.background_running -= 1;
        }
    }

    #[test]
    fn urgent_jobs_go_first_and_background_ones_at_their_pace() {
        let mut rig = Rig::new(1);
        rig.push(1, 1_000_000, false);
        rig.push(2, 1_000_000, false);
        rig.push(100, 1, true);
        rig.push(101, 1, true);
        assert_eq!((rig.next(), rig.next()), (Ok(100), Ok(101)));
        assert_eq!(rig.next(), Ok(1));
        rig.background_ends();
        assert_eq!(rig.next(), Err(Some(Duration::from_millis(1))));
        rig.push(102, 1, true);
        assert_eq!(rig.next(), Ok(102), "its turn does not wait for the pace");
        rig.now += Duration::from_millis(1);
        assert_eq!(rig.next(), Ok(2));
        rig.background_ends();
        assert_eq!(rig.next(), Err(None));
    }

    #[test]
    fn time_without_background_jobs_earns_no_burst() {
        let mut rig = Rig::new(1);
        rig.now += Duration::from_secs(3600);
        rig.push(1, 1_000_000, false);
        rig.push(2, 1_000_000, false);
        rig.push(100, 1, true);
        assert_eq!(rig.next(), Ok(100), "nobody waited for an hour");
        assert_eq!(rig.next(), Ok(1));
        rig.background_ends();
        assert_eq!(rig.next(), Err(Some(Duration::from_millis(1))));
    }

    #[test]
    fn a_stream_of_urgent_jobs_does_not_starve_the_background() {
        let mut rig = Rig::new(1);
        for slot in 0..3 {
            rig.push(slot, 1_000_000, false);
        }
        let mut checked = Vec::new();
        for turn in 0..4_000 {
            rig.push(100 + turn, 1, true);
            rig.now += Duration::from_millis(1);
            let slot = rig.next().unwrap();
            if slot < 100 {
                checked.push((slot, turn));
                rig.background_ends();
            }
        }
        assert_eq!(checked, [(0, 999), (1, 2_000), (2, 3_001)]);
    }

    #[test]
    fn one_thread_of_several_is_left_to_urgent_jobs() {
        let mut rig = Rig::new(3);
        for slot in 0..4 {
            rig.push(slot, 0, false);
        }
        assert_eq!((rig.next(), rig.next()), (Ok(0), Ok(1)));
        rig.now += PATIENCE;
        assert_eq!(rig.next(), Err(None));
        rig.push(100, 1, true);
        assert_eq!(rig.next(), Ok(100));
        rig.background_ends();
        assert_eq!(rig.next(), Ok(2));
    }

    #[test]
    fn threads_take_what_is_pushed_and_what_its_time_came_for() {
        let bytes = arena(1 << 20);
        bytes.write(0, b"bytes");
        let (tx, rx) = mpsc::channel();
        let pool = Pool::start(pace(2), move |job, digest| {
            tx.send((job.work.slot, digest)).unwrap();
        })
        .unwrap();
        for slot in 0..5 {
            pool.push(job(&bytes, slot, 1 << 20, false));
        }
        pool.push(job(&bytes, 100, 5, true));
        let mut done: Vec<_> = (0..6)
            .map(|_| rx.recv_timeout(Duration::from_secs(30)).unwrap())
            .collect();
        done.sort_unstable();
        let slots: Vec<u32> = done.iter().map(|(slot, _)| *slot).collect();
        assert_eq!(slots, [0, 1, 2, 3, 4, 100]);
        let expected = xxhash_rust::xxh3::xxh3_128(b"bytes").to_le_bytes();
        assert_eq!(done[5].1, Some(expected));
        assert_eq!(pool.waiting(), (0, 0));
    }

    #[test]
    fn a_range_outside_the_arena_has_no_digest() {
        let bytes = arena(4096);
        let (tx, rx) = mpsc::channel();
        let pool = Pool::start(pace(1), move |_, digest| tx.send(digest).unwrap()).unwrap();
        pool.push(job(&bytes, 0, 4097, true));
        assert_eq!(rx.recv_timeout(Duration::from_secs(30)).unwrap(), None);
    }
}
