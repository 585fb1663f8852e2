//! Waits between retries.

use std::time::{Duration, Instant};

/// First wait after the second failure in a row; doubles.
const FIRST: Duration = Duration::from_millis(10);
/// Longest wait between two attempts.
const MAX: Duration = Duration::from_secs(5);

/// When the next attempt is due: at once after the first failure, later after each further one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    failures: u32,
    due: Instant,
}

impl Backoff {
    /// No failures yet.
    pub fn new(now: Instant) -> Self {
        Self {
            failures: 0,
            due: now,
        }
    }

    pub fn due(&self) -> Instant {
        self.due
    }

    /// Forgets earlier failures; the due time of the next attempt stays.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Makes the next attempt due now; earlier failures still count.
    pub fn at_once(&mut self, now: Instant) {
        self.due = now;
    }

    /// Records one more failure.
    pub fn failed(&mut self, now: Instant) {
        let wait = match self.failures {
            0 => Duration::ZERO,
            n => FIRST.saturating_mul(1u32 << (n - 1).min(16)).min(MAX),
        };
        self.failures = self.failures.saturating_add(1);
        self.due = now + wait;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_tried_again_at_once_and_later_ones_wait_up_to_the_longest() {
        let now = Instant::now();
        let mut backoff = Backoff::new(now);
        let mut wait = || {
            backoff.failed(now);
            (backoff.due() - now).as_millis()
        };
        assert_eq!([wait(), wait(), wait(), wait()], [0, 10, 20, 40]);
        for _ in 0..100 {
            assert!(wait() <= MAX.as_millis());
        }
        assert_eq!(wait(), MAX.as_millis());
        backoff.at_once(now);
        assert_eq!(backoff.due(), now);
        backoff.failed(now);
        assert_eq!(backoff.due(), now + MAX);
        backoff.reset();
        backoff.failed(now);
        assert_eq!(backoff.due(), now);
    }
}
