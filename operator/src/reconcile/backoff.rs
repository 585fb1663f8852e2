//! Pauses after failures, per pool, growing and spread; and the spread that everything periodic has.

use crate::pods::PoolRef;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Duration;

/// The first pause.
const FIRST: Duration = Duration::from_secs(1);
/// The longest one.
const LONGEST: Duration = Duration::from_secs(300);

/// Consecutive failures of each pool.
#[derive(Debug, Default)]
pub struct Backoff(Mutex<HashMap<PoolRef, u32>>);

impl Backoff {
    /// One more failure: how long to wait.
    pub fn failed(&self, pool: &PoolRef) -> Duration {
        let mut failures = self.0.lock();
        let count = failures.entry(pool.clone()).or_default();
        let pause = FIRST.saturating_mul(1 << (*count).min(16)).min(LONGEST);
        *count += 1;
        spread(pause)
    }

    /// It worked, or the pool is gone.
    pub fn clear(&self, pool: &PoolRef) {
        self.0.lock().remove(pool);
    }
}

/// A random time between half of this one and all of it, so that what began together does not stay together.
pub fn spread(time: Duration) -> Duration {
    let half = time / 2;
    let part = u64::try_from(half.as_millis()).unwrap_or(u64::MAX).max(1);
    half + Duration::from_millis(fastrand::u64(..part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_five_minutes_and_begin_anew_after_a_success() {
        let backoff = Backoff::default();
        let (a, b) = (PoolRef::new("n", "a"), PoolRef::new("n", "b"));
        let mut most = FIRST;
        for _ in 0..40 {
            let pause = backoff.failed(&a);
            assert!(pause >= most / 2 && pause <= most, "{pause:?} of {most:?}");
            most = (most * 2).min(LONGEST);
        }
        assert!(backoff.failed(&b) <= FIRST, "each pool has its own");
        backoff.clear(&a);
        assert!(backoff.failed(&a) <= FIRST);
    }

    #[test]
    fn times_are_spread() {
        let times: std::collections::HashSet<Duration> =
            (0..100).map(|_| spread(Duration::from_secs(600))).collect();
        assert!(times.len() > 50);
    }
}
