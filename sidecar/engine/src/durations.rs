//! Histograms of durations.

use std::time::Duration;

/// Upper bounds of the buckets in seconds; longer durations are counted in a last bucket.
pub const SECONDS: [f64; 14] = [
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0,
];

/// Counts by bucket of [`SECONDS`].
pub type Buckets = [u64; SECONDS.len() + 1];

/// The bucket of a duration.
pub fn bucket(took: Duration) -> usize {
    let fits = SECONDS.iter().position(|s| took.as_secs_f64() <= *s);
    fits.unwrap_or(SECONDS.len())
}

/// Durations in milliseconds: shorter ones are in the first bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Durations {
    counts: Buckets,
    total_ms: u64,
}

impl Durations {
    pub(crate) fn add(&mut self, ms: u64) {
        if let Some(count) = self.counts.get_mut(bucket(Duration::from_millis(ms))) {
            *count += 1;
        }
        self.total_ms += ms;
    }

    /// Counts by bucket, and the sum of all durations.
    pub fn totals(&self) -> (&Buckets, Duration) {
        (&self.counts, Duration::from_millis(self.total_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_first_bucket_that_holds_it() {
        assert!(SECONDS.is_sorted());
        let mut durations = Durations::default();
        for ms in [0, 1, 2, 100, 101, 300_001] {
            durations.add(ms);
        }
        let (counts, total) = durations.totals();
        assert_eq!(*counts, [1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(total, Duration::from_millis(300_205));
    }
}
