//! Many histories on several threads.

use super::counts::Counts;
use super::history::{Outcome, run};
use super::profile::{Profile, Wrong};
use super::rules::{Rule, Violation};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Changes the profile that a seed gave.
pub type Shape<'a> = &'a (dyn Fn(Profile) -> Profile + Sync);

/// What came of many histories.
#[derive(Debug)]
pub struct Summary {
    /// Sums.
    pub counts: Counts,
    /// Broken rules with their seeds, lowest first.
    pub broken: Vec<(u64, Violation)>,
}

/// One history; a panic of the state machine is a broken rule.
pub fn guarded(seed: u64, wrong: Wrong, shape: Shape<'_>, tracing: bool) -> Outcome {
    match catch_unwind(AssertUnwindSafe(|| run(seed, wrong, shape, tracing))) {
        Ok(outcome) => outcome,
        Err(panic) => {
            let what = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_default();
            let violation = Some(Violation {
                rule: Rule::P2,
                what,
            });
            Outcome {
                seed,
                counts: Counts::default(),
                violation,
            }
        }
    }
}

/// Runs the seeds `first..first + count`; ends after `most` broken rules.
pub fn run_many(
    first: u64,
    count: u64,
    threads: usize,
    most: usize,
    wrong: Wrong,
    shape: Shape<'_>,
) -> Summary {
    let next = AtomicU64::new(first);
    let stop = AtomicBool::new(false);
    let all = Mutex::new(Summary {
        counts: Counts::default(),
        broken: Vec::new(),
    });
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut counts = Counts::default();
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        break;
                    }
                    let outcome = guarded(seed, wrong, shape, false);
                    counts.add(&outcome.counts);
                    if let Some(violation) = outcome.violation {
                        let mut all = all.lock().unwrap();
                        all.broken.push((seed, violation));
                        stop.store(all.broken.len() >= most, Ordering::Relaxed);
                    }
                }
                all.lock().unwrap().counts.add(&counts);
            });
        }
    });
    let mut all = all.into_inner().unwrap();
    all.broken.sort_by_key(|(seed, _)| *seed);
    all
}

/// Threads to run on.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
