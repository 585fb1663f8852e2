//! Digests in a small pool of threads: what somebody waits for first, the rest at a bounded pace. Reads the arena, writes nothing;
//! what a digest means is decided by the core.

use crate::shm::mapping::Mapping;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes per second that all background checks together may read: a fraction of a core and of the memory's bandwidth.
const BACKGROUND_BYTES_PER_S: u64 = 1 << 30;

/// Bytes to hash.
#[derive(Debug)]
pub struct Job {
    /// The arena.
    pub bytes: Arc<Mapping>,
    /// Its region.
    pub region: u64,
    /// First row of the slot.
    pub slot: u32,
    /// To be said back.
    pub generation: u32,
    /// Offset in the arena.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Somebody waits.
    pub urgent: bool,
}

#[derive(Default)]
struct Queues {
    urgent: VecDeque<Job>,
    background: VecDeque<Job>,
    /// When the next background job may begin.
    background_at: Option<Instant>,
    ended: bool,
}

struct Shared {
    queues: Mutex<Queues>,
    wake: Condvar,
}

/// The pool. Dropping it ends the threads after their current job.
pub struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// Starts `threads` threads; `done` is called on them with each job and its digest.
    pub fn start(
        threads: usize,
        done: impl Fn(&Job, Option<[u8; 16]>) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            wake: Condvar::new(),
        });
        let done = Arc::new(done);
        for index in 0..threads.max(1) {
            let (shared, done) = (shared.clone(), done.clone());
            std::thread::Builder::new()
                .name(format!("verify-{index}"))
                .spawn(move || {
                    while let Some(job) = shared.next() {
                        let digest = job.bytes.xxh3_128(job.offset, job.length);
                        done(&job, digest);
                    }
                })?;
        }
        Ok(Self { shared })
    }

    /// Queues a job. The queue is bounded by what the core has under way at once.
    pub fn push(&self, job: Job) {
        let mut queues = self.shared.queues.lock();
        if job.urgent {
            queues.urgent.push_back(job);
        } else {
            queues.background.push_back(job);
        }
        self.shared.wake.notify_one();
    }

    /// Jobs that wait: urgent, background.
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
    fn next(&self) -> Option<Job> {
        let mut queues = self.queues.lock();
        loop {
            if queues.ended {
                return None;
            }
            if let Some(job) = queues.urgent.pop_front() {
                return Some(job);
            }
            if queues.background.is_empty() {
                self.wake.wait(&mut queues);
                continue;
            }
            let now = Instant::now();
            match queues.background_at {
                Some(at) if at > now => {
                    self.wake.wait_until(&mut queues, at);
                }
                _ => {
                    let job = queues.background.pop_front()?;
                    let cost = job.length.saturating_mul(1_000_000_000) / BACKGROUND_BYTES_PER_S;
                    let from = queues.background_at.unwrap_or(now).max(now);
                    queues.background_at = Some(from + Duration::from_nanos(cost));
                    return Some(job);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::memfd::{Pages, sealed};
    use rustix::fd::AsFd;
    use std::sync::mpsc;

    fn job(bytes: &Arc<Mapping>, slot: u32, length: u64, urgent: bool) -> Job {
        Job {
            bytes: bytes.clone(),
            region: 1,
            slot,
            generation: slot,
            offset: 0,
            length,
            urgent,
        }
    }

    #[test]
    fn urgent_digests_overtake_the_sweep_and_the_sweep_is_paced() {
        let fd = sealed("verify-test", 64 << 20, Pages::Base).unwrap();
        let bytes = Arc::new(Mapping::new(fd.as_fd(), 64 << 20).unwrap());
        bytes.write(0, b"bytes");
        let (tx, rx) = mpsc::channel();
        let pool = Pool::start(1, move |job, digest| {
            tx.send((job.slot, digest)).unwrap();
        })
        .unwrap();
        let began = Instant::now();
        for slot in 0..5 {
            pool.push(job(&bytes, slot, 64 << 20, false));
        }
        pool.push(job(&bytes, 100, 5, true));
        let order: Vec<_> = (0..6)
            .map(|_| rx.recv_timeout(Duration::from_secs(30)).unwrap())
            .collect();
        let urgent = order.iter().position(|(slot, _)| *slot == 100).unwrap();
        assert!(urgent <= 1, "the urgent one waits for one job at most");
        let expected = xxhash_rust::xxh3::xxh3_128(b"bytes").to_le_bytes();
        assert_eq!(order[urgent].1, Some(expected));
        // Five jobs of 1/16 s each at the pace; the first begins at once.
        assert!(began.elapsed() >= Duration::from_millis(240));
        assert_eq!(pool.waiting(), (0, 0));
    }

    #[test]
    fn a_range_outside_the_arena_has_no_digest() {
        let fd = sealed("verify-test", 4096, Pages::Base).unwrap();
        let bytes = Arc::new(Mapping::new(fd.as_fd(), 4096).unwrap());
        let (tx, rx) = mpsc::channel();
        let pool = Pool::start(1, move |_, digest| tx.send(digest).unwrap()).unwrap();
        pool.push(job(&bytes, 0, 4097, true));
        assert_eq!(rx.recv_timeout(Duration::from_secs(30)).unwrap(), None);
    }
}
