//! Background population: pages exist and are charged to the sidecar before a slot on them is granted. vLLM is never charged for them and
//! never gets a SIGBUS.

use super::mapping::Mapping;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes that a thread populates before it reports progress and checks for a failure of another one.
pub const STEP_BYTES: u64 = 32 << 20;

/// State shared by the threads of a population.
struct Work {
    mapping: Arc<Mapping>,
    next: AtomicU64,
    end: u64,
    stop: AtomicBool,
    done: parking_lot::Mutex<Done>,
}

/// Completed steps, reported as one growing front.
struct Done {
    front: u64,
    ahead: BTreeSet<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All bytes below this offset are populated.
    UpTo(u64),
    /// The kernel refused at this offset.
    Failed(u64, Errno),
}

/// A population that was started.
#[derive(Default)]
pub struct Population(Option<Arc<Work>>);

impl Population {
    /// True until its last thread has ended.
    pub fn is_running(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|work| Arc::strong_count(work) > 1)
    }
}

/// Populates a range of bytes of the mapping with `threads` threads, each pinned to one CPU of this process's set. A page is allocated
/// on the memory node of the CPU that first touches it; without CAP_SYS_NICE, this is the only way to select the node. The threads call
/// `say`.
pub fn start(
    mapping: Arc<Mapping>,
    bytes: Range<u64>,
    threads: usize,
    say: impl Fn(Progress) + Send + Sync + 'static,
) -> Population {
    let Range { start, end } = bytes;
    let work = Arc::new(Work {
        mapping,
        next: AtomicU64::new(start),
        end,
        stop: AtomicBool::new(false),
        done: parking_lot::Mutex::new(Done {
            front: start,
            ahead: BTreeSet::new(),
        }),
    });
    let say = Arc::new(say);
    for index in 0..threads.max(1) {
        let (work, say) = (work.clone(), say.clone());
        let spawned = std::thread::Builder::new()
            .name(format!("populate-{index}"))
            .spawn({
                let say = say.clone();
                move || {
                    pin(index);
                    run(&work, say.as_ref());
                }
            });
        if spawned.is_err() && index == 0 {
            say(Progress::Failed(start, Errno::AGAIN));
        }
    }
    Population(Some(work))
}

fn run(work: &Work, say: &(impl Fn(Progress) + ?Sized)) {
    while !work.stop.load(Ordering::Relaxed) {
        let at = work.next.fetch_add(STEP_BYTES, Ordering::Relaxed);
        if at >= work.end {
            return;
        }
        let bytes = STEP_BYTES.min(work.end - at);
        if let Err(e) = work.mapping.populate(at, bytes) {
            work.stop.store(true, Ordering::Relaxed);
            say(Progress::Failed(at, e));
            return;
        }
        let mut done = work.done.lock();
        done.ahead.insert(at);
        let before = done.front;
        while done.ahead.first() == Some(&done.front) {
            done.ahead.pop_first();
            done.front = (done.front + STEP_BYTES).min(work.end);
        }
        if done.front > before {
            // Called under the lock, so that reports stay in order.
            say(Progress::UpTo(done.front));
        }
    }
}

/// Pins the calling thread to the `index`-th CPU that it may use. A refusal only costs speed.
fn pin(index: usize) {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| allowed.is_set(*cpu))
        .collect();
    if cpus.is_empty() {
        return;
    }
    // Spread over the set, so that each memory node gets a share.
    let cpu = cpus[(index * cpus.len() / 4 + index) % cpus.len()];
    let mut one = CpuSet::new();
    one.set(cpu);
    let _ = sched_setaffinity(None, &one);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd::{Pages, sealed};
    use rustix::fd::AsFd;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn population_is_announced_in_order_and_reaches_the_end() {
        let bytes = 3 * STEP_BYTES + (64 << 10);
        let fd = sealed("populate-test", bytes, Pages::Base).unwrap();
        let mapping = Arc::new(Mapping::new(fd.as_fd(), bytes).unwrap());
        let (tx, rx) = mpsc::channel();
        let population = start(mapping, 0..bytes, 3, move |p| {
            tx.send(p).unwrap();
        });
        let mut front = 0;
        while front < bytes {
            match rx.recv_timeout(Duration::from_secs(30)).unwrap() {
                Progress::UpTo(to) => {
                    assert!(to > front);
                    front = to;
                }
                Progress::Failed(at, e) => panic!("refused at {at}: {e}"),
            }
        }
        assert_eq!(front, bytes);
        while population.is_running() {
            std::thread::yield_now();
        }
        assert!(!Population::default().is_running());
        let blocks = rustix::fs::fstat(&fd).unwrap().st_blocks as u64;
        assert!(blocks * 512 >= bytes, "every page is there");
    }
}
