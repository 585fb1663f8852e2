//! The time limit of every operation. After it the result is Timeout and the operation is dropped; the spans stay held while they are used.

use super::Op;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Base time of operations without sections: lookup, head, usage and remove.
    pub question: Duration,
    /// Additional time of a removal per object: some tiers need a request for each.
    pub removal: Duration,
    /// Base time of a get, put or page of a listing.
    pub transfer: Duration,
    /// A get or put gets additional time for its bytes at this rate.
    pub bytes_per_s_min: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            question: Duration::from_secs(2),
            removal: Duration::from_millis(100),
            transfer: Duration::from_secs(5),
            bytes_per_s_min: 16 << 20,
        }
    }
}

impl Options {
    /// Time limit of an operation on this many bytes or names.
    pub fn longest(&self, op: Op, bytes: u64, names: usize) -> Duration {
        match op {
            Op::Lookup | Op::Head | Op::Usage => self.question,
            Op::Remove => {
                let names = u32::try_from(names).unwrap_or(u32::MAX);
                self.question + self.removal.saturating_mul(names)
            }
            Op::List => self.transfer,
            Op::Get | Op::Put => {
                let rate = self.bytes_per_s_min.max(1);
                let ms = bytes.saturating_mul(1_000) / rate;
                self.transfer + Duration::from_millis(ms)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::scripted::{Scripted, name, unguarded};
    use crate::layers::{self, Guarded};
    use crate::testing::suite::{Memory, Sample};
    use crate::{Cause, Get, Kind, Place, Tier};
    use std::sync::Arc;
    use tokio::time::Instant;

    fn options() -> Options {
        Options {
            question: Duration::from_secs(1),
            removal: Duration::from_millis(10),
            transfer: Duration::from_secs(4),
            bytes_per_s_min: 1 << 20,
        }
    }

    fn layer(scripted: &Arc<Scripted>) -> Guarded {
        let options = layers::Options {
            deadline: options(),
            ..unguarded()
        };
        Guarded::new(scripted.clone(), &options)
    }

    #[test]
    fn more_bytes_and_more_removals_have_more_time() {
        let options = options();
        for (op, bytes, names, seconds) in [
            (Op::Lookup, 0, 0, 1.0),
            (Op::Remove, 0, 1, 1.01),
            (Op::Remove, 0, 500, 6.0),
            (Op::List, 0, 0, 4.0),
            (Op::Get, 0, 0, 4.0),
            (Op::Get, 1 << 20, 0, 5.0),
            (Op::Put, 10 << 20, 0, 14.0),
        ] {
            let longest = options.longest(op, bytes, names);
            assert_eq!(longest, Duration::from_secs_f64(seconds), "{op:?}");
        }
        let none = Options {
            bytes_per_s_min: 0,
            ..options
        };
        assert!(none.longest(Op::Get, u64::MAX, 0) > Duration::from_secs(1_000));
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_past_its_deadline_is_answered_by_name() {
        let scripted = Scripted::new();
        let tier = layer(&scripted);
        let began = Instant::now();
        scripted.hang();
        let error = tier.head(&name(1)).await.unwrap_err();
        assert_eq!((error.tier, error.cause), (Kind::S3, Cause::Timeout));
        assert_eq!(error.object, Some(name(1).s3("")));
        assert_eq!(began.elapsed(), Duration::from_secs(1));
        scripted.after(Duration::from_millis(900));
        assert!(tier.usage().await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn spans_are_held_past_the_deadline_by_what_still_writes_them() {
        let scripted = Scripted::new();
        let (tier, memory) = (layer(&scripted), Memory::new(1 << 20));
        let sample = Sample::new(1, 0, &[5_000]);
        let hold = Arc::new(());
        let get = Get {
            name: sample.name(),
            places: vec![Place {
                group: 0,
                shard: 0,
                span: memory.held(5_000, hold.clone()),
            }],
        };
        let release = scripted.keep_spans();
        let error = tier.get(get).await.unwrap_err();
        assert_eq!(error.cause, Cause::Timeout);
        assert_eq!(Arc::strong_count(&hold), 2, "a thread writes on");
        release.send(()).unwrap();
        while Arc::strong_count(&hold) > 1 {
            tokio::task::yield_now().await;
        }
    }
}
