//! Slow tiers: those that answer only after the requests have stopped waiting.

use kvcachepool_tiers::{Cause, Kind, TierError};
use std::time::{Duration, Instant};

/// This many late fetches in a row make a tier slow.
const FETCHES: u32 = 3;
/// A tier without a late fetch for this long is no longer slow.
const FORGET: Duration = Duration::from_secs(60);
/// A request that stops waiting sooner than this has another reason.
const PATIENCE: Duration = Duration::from_secs(1);

/// Late fetches of a tier in a row, and the time of the last one.
#[derive(Debug, Default)]
pub struct Slow(Option<(u32, Instant)>);

impl Slow {
    /// Records a fetch that ended or was given up after `time`. Returns a description when it was late.
    pub fn took<T>(
        &mut self,
        kind: Kind,
        time: Duration,
        landed: &Result<T, Cause>,
    ) -> Option<TierError> {
        match landed {
            Ok(_) => self.0 = None,
            Err(Cause::Timeout) if time >= PATIENCE => {
                let before = self.0.map_or(0, |(fetches, _)| fetches);
                self.0 = Some((before + 1, Instant::now()));
                let detail = format!("a fetch did not end within {:.1} s", time.as_secs_f64());
                return Some(TierError::new(kind, Cause::Timeout, detail));
            }
            Err(_) => {}
        }
        None
    }

    /// The reason why the tier is slow, for status; `None` when it is not.
    pub fn why(&self, kind: Kind) -> Option<TierError> {
        let (fetches, last) = self.0?;
        let slow = fetches >= FETCHES && last.elapsed() < FORGET;
        let detail =
            format!("the last {fetches} fetches did not end while a request waited for them");
        slow.then(|| TierError::new(kind, Cause::Timeout, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_is_slow_when_several_fetches_in_a_row_were_late_until_one_is_not() {
        let mut slow = Slow::default();
        let failed = Err::<(), Cause>;
        let mut took = |landed, ms| {
            slow.took(Kind::S3, Duration::from_millis(ms), &landed);
            slow.why(Kind::S3).map(|e| e.cause)
        };
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 999), None, "somebody left");
        assert_eq!(took(failed(Cause::Missing), 2_000), None);
        let late = Some(Cause::Timeout);
        assert_eq!(took(failed(Cause::Timeout), 1_000), late);
        assert_eq!(took(failed(Cause::Missing), 1_000), late);
        assert_eq!(took(Ok(()), 2_000), None);
        assert_eq!(took(failed(Cause::Timeout), 2_000), None);
    }
}
