//! Exponential backoff with jitter for failed reconcile passes, per pool, and the jitter of periodic work.

use crate::pods::PoolRef;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Duration;

const DELAY_MIN: Duration = Duration::from_secs(1);
const DELAY_MAX: Duration = Duration::from_secs(300);

/// Number of consecutive failures of each pool.
#[derive(Debug, Default)]
pub struct Backoff(Mutex<HashMap<PoolRef, u32>>);

impl Backoff {
    /// Records a failure. Returns the delay of the retry.
    pub fn record_failure(&self, pool: &PoolRef) -> Duration {
        let mut failures = self.0.lock();
        let count = failures.entry(pool.clone()).or_default();
        let delay = DELAY_MIN
            .saturating_mul(1 << (*count).min(16))
            .min(DELAY_MAX);
        *count += 1;
        jitter(delay)
    }

    /// Discards the failures of a pool after a success, or after its deletion.
    pub fn clear(&self, pool: &PoolRef) {
        self.0.lock().remove(pool);
    }
}

/// A random time from half of `time` to all of it, so that work that started together does not stay in step.
pub fn jitter(time: Duration) -> Duration {
    let half = time / 2;
    let part = u64::try_from(half.as_millis()).unwrap_or(u64::MAX).max(1);
    half + Duration::from_millis(fastrand::u64(..part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_five_minutes_and_reset_after_a_success() {
        let backoff = Backoff::default();
        let (a, b) = (PoolRef::new("n", "a"), PoolRef::new("n", "b"));
        let mut most = DELAY_MIN;
        for _ in 0..40 {
            let delay = backoff.record_failure(&a);
            assert!(delay >= most / 2 && delay <= most, "{delay:?} of {most:?}");
            most = (most * 2).min(DELAY_MAX);
        }
        assert!(
            backoff.record_failure(&b) <= DELAY_MIN,
            "delays are per pool"
        );
        backoff.clear(&a);
        assert!(backoff.record_failure(&a) <= DELAY_MIN);
    }

    #[test]
    fn jitter_spreads_times() {
        let times: std::collections::HashSet<Duration> =
            (0..100).map(|_| jitter(Duration::from_secs(600))).collect();
        assert!(times.len() > 50);
    }
}
