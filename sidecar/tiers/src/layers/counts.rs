//! Counts operations and their results as callers see them. Every operation that began has one result or is still
//! running.

use super::Op;
use crate::{Cause, TierError};
use kvcachepool_engine::{Buckets, SECONDS, bucket};
use std::array::from_fn;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;

const CAUSES: usize = Cause::ALL.len();
/// One per cause, one for success, one for operations that were dropped.
const RESULTS: usize = CAUSES + 2;
const OK: usize = CAUSES;
const DROPPED: usize = CAUSES + 1;

fn result_name(result: usize) -> &'static str {
    match result {
        OK => "Ok",
        DROPPED => "Dropped",
        cause => Cause::ALL.get(cause).map_or("", |cause| cause.name()),
    }
}

#[derive(Debug)]
pub struct Counts {
    operations: [Counted; Op::ALL.len()],
}

#[derive(Debug)]
struct Counted {
    began: AtomicU64,
    results: [AtomicU64; RESULTS],
    seconds: [AtomicU64; SECONDS.len() + 1],
    nanos: AtomicU64,
}

/// Counts of one kind of operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally {
    pub op: Op,
    /// Number of operations per result: `Ok`, the name of a [`Cause`], or `Dropped`. Results that never occurred are missing.
    pub results: Vec<(&'static str, u64)>,
    pub running: u64,
    /// Finished operations by duration.
    pub seconds: Buckets,
    /// Total time of finished operations.
    pub took: Duration,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            operations: from_fn(|_| Counted {
                began: AtomicU64::new(0),
                results: from_fn(|_| AtomicU64::new(0)),
                seconds: from_fn(|_| AtomicU64::new(0)),
                nanos: AtomicU64::new(0),
            }),
        }
    }
}

impl Counts {
    pub fn begin(&self, op: Op) -> Running<'_> {
        let counted = &self.operations[op as usize];
        counted.began.fetch_add(1, Relaxed);
        Running {
            counted,
            began: Instant::now(),
            result: DROPPED,
        }
    }

    /// Current counts, one entry per operation.
    pub fn tally(&self) -> Vec<Tally> {
        let of = |(op, counted): (Op, &Counted)| counted.tally(op);
        Op::ALL.into_iter().zip(&self.operations).map(of).collect()
    }
}

impl Counted {
    fn tally(&self, op: Op) -> Tally {
        let results = self.results.iter().map(|count| count.load(Relaxed));
        let results: Vec<_> = (0..).map(result_name).zip(results).collect();
        let ended: u64 = results.iter().map(|(_, count)| count).sum();
        Tally {
            op,
            // Read after the results, so that an operation that ends in between is not counted as running.
            running: self.began.load(Relaxed).saturating_sub(ended),
            results: results.into_iter().filter(|(_, n)| *n > 0).collect(),
            seconds: from_fn(|i| self.seconds.get(i).map_or(0, |count| count.load(Relaxed))),
            took: Duration::from_nanos(self.nanos.load(Relaxed)),
        }
    }

    fn ended(&self, result: usize, took: Duration) {
        for counter in [self.results.get(result), self.seconds.get(bucket(took))] {
            counter.map(|count| count.fetch_add(1, Relaxed));
        }
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Relaxed);
    }
}

/// A running operation; its drop counts as `Dropped`.
#[derive(Debug)]
pub struct Running<'a> {
    counted: &'a Counted,
    began: Instant,
    result: usize,
}

impl Running<'_> {
    pub fn ended(mut self, error: Option<&TierError>) {
        self.result = error.map_or(OK, |e| e.cause as usize);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.counted.ended(self.result, self.began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tier;
    use crate::layers::Guarded;
    use crate::layers::scripted::{Scripted, name, unguarded};

    fn of(counts: &Counts, op: Op) -> Tally {
        counts.tally().swap_remove(op as usize)
    }

    #[test]
    fn operations_and_causes_stand_where_their_number_says() {
        for (index, op) in Op::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, index);
        }
        for (index, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, index);
            assert_eq!(result_name(index), cause.name());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_operation_is_counted_by_what_became_of_it() {
        let scripted = Scripted::new();
        let tier = Guarded::new(scripted.clone(), &unguarded());
        let counts = &tier.counts;
        scripted.after(Duration::from_secs(2));
        tier.head(&name(0)).await.unwrap();
        scripted.fail(Cause::Missing);
        scripted.fail(Cause::Missing);
        scripted.fail_after(Duration::from_secs(1_000), Cause::Timeout);
        for _ in 0..3 {
            assert!(tier.head(&name(0)).await.is_err());
        }
        scripted.hang();
        let head_name = name(0);
        let mut head = tier.head(&head_name);
        let waited = tokio::time::timeout(Duration::from_millis(50), &mut head).await;
        assert!(waited.is_err());
        assert_eq!(of(counts, Op::Head).running, 1);
        drop(head);
        let tally = of(counts, Op::Head);
        let results = [("Missing", 2), ("Timeout", 1), ("Ok", 1), ("Dropped", 1)];
        assert_eq!(tally.results, results);
        assert_eq!(tally.running, 0);
        let mut seconds = [0; SECONDS.len() + 1];
        (seconds[0], seconds[9], seconds[14]) = (2, 1, 1);
        seconds[SECONDS.iter().position(|s| *s == 0.1).unwrap()] = 1;
        assert_eq!(tally.seconds, seconds);
        assert!(tally.took >= Duration::from_secs(1_002));
        assert!(
            counts
                .tally()
                .iter()
                .all(|t| t.op == Op::Head || t.results.is_empty())
        );
    }
}
