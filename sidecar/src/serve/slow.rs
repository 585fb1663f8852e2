//! Slow tiers: those that answer only after the requests have stopped waiting.

use kvcachepool_tiers::{Cause, Kind, TierError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// This many late fetches in a row make a tier slow.
const FETCHES: u32 = 3;
/// A tier without a late fetch for this long is no longer slow.
const FORGET: Duration = Duration::from_secs(60);
/// A request that stops waiting sooner than this has another reason.
const PATIENCE: Duration = Duration::from_secs(1);

/// Late fetches in a row by tier, and the time of the last one.
#[derive(Debug, Default)]
pub struct Slow(Mutex<BTreeMap<Kind, (u32, Instant)>>);

impl Slow {
    /// Records a fetch that ended or was given up after `time`. Returns a description when it was late.
    pub fn took<T>(
        &self,
        kind: Kind,
        time: Duration,
        landed: &Result<T, Cause>,
    ) -> Option<TierError> {
        let mut all = self.0.lock();
        match landed {
            Ok(_) => drop(all.remove(&kind)),
            Err(Cause::Timeout) if time >= PATIENCE => {
                let before = all.get(&kind).map_or(0, |(fetches, _)| *fetches);
                all.insert(kind, (before + 1, Instant::now()));
                let detail = format!("a fetch did not end within {:.1} s", time.as_secs_f64());
                return Some(TierError::new(kind, Cause::Timeout, detail));
            }
            Err(_) => {}
        }
        None
    }

    /// A tier is up again: earlier fetches say nothing about it.
    pub fn up_again(&self, kind: Kind) {
        self.0.lock().remove(&kind);
    }

    /// The reason why a tier is slow, for status; `None` when it is not.
    pub fn of(&self, kind: &str) -> Option<TierError> {
        let all = self.0.lock();
        let (kind, (fetches, last)) = all.iter().find(|(k, _)| k.name() == kind)?;
        let slow = *fetches >= FETCHES && last.elapsed() < FORGET;
        let detail =
            format!("the last {fetches} fetches did not end while a request waited for them");
        slow.then(|| TierError::new(*kind, Cause::Timeout, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_is_slow_when_several_fetches_in_a_row_were_late_until_one_is_not() {
        let slow = Slow::default();
        let failed = Err::<(), Cause>;
        let took = |landed, ms| {
            slow.took(Kind::S3, Duration::from_millis(ms), &landed);
            slow.of("s3").map(|e| e.cause)
        };
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 999), None, "somebody left");
        assert_eq!(took(failed(Cause::Missing), 2_000), None);
        let late = Some(Cause::Timeout);
        assert_eq!(took(failed(Cause::Timeout), 1_000), late);
        assert_eq!(took(failed(Cause::Missing), 1_000), late);
        assert_eq!(slow.of("disk"), None);
        slow.up_again(Kind::Redis);
        assert_eq!(took(failed(Cause::Missing), 1_000), late);
        slow.up_again(Kind::S3);
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 2_000), late);
        assert_eq!(took(Ok(()), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
    }
}
