//! Retries transient failures a few times with growing pauses, never beyond the deadline. When a later attempt is refused before it
//! reaches the tier, the error is that of the attempt before.
//! Bytes of different attempts never mix: a get is retried only when nothing writes for the last attempt any more.

use super::chance::Chance;
use crate::{Cause, Get, Place, Span, Status};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Most attempts, including the first.
    pub attempts_max: u32,
    /// Longest pause after the first attempt; each later one may be twice as long.
    pub pause: Duration,
    /// Upper limit of all pauses.
    pub pause_max: Duration,
    /// Seed of the pauses' jitter; `None`: a random one per process.
    pub seed: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            attempts_max: 3,
            pause: Duration::from_millis(50),
            pause_max: Duration::from_secs(2),
            seed: None,
        }
    }
}

#[derive(Debug)]
pub struct Retry {
    options: Options,
    chance: Chance,
    /// Attempts after the first.
    pub retried: AtomicU64,
}

impl Retry {
    pub fn new(options: Options) -> Self {
        Self {
            options,
            chance: Chance::new(options.seed),
            retried: AtomicU64::default(),
        }
    }

    /// The pause after attempt `made`, counted from 1, which failed for this cause. `None`: another one is not worth it, or the deadline
    /// leaves no time for it.
    pub fn pause(&self, made: u32, cause: Cause, until: Instant) -> Option<Duration> {
        if made >= self.options.attempts_max || !worth_it(cause) {
            return None;
        }
        let doubled = self.options.pause.saturating_mul(1 << (made - 1).min(20));
        let pause = self.chance.jittered(doubled.min(self.options.pause_max));
        (Instant::now() + pause < until).then_some(pause)
    }
}

/// Whether the tier was not even reached.
pub fn refused_here(cause: Cause) -> bool {
    matches!(cause, Cause::Busy | Cause::BreakerOpen)
}

fn worth_it(cause: Cause) -> bool {
    cause.status() == Status::Temporary && !refused_here(cause)
}

/// Held by everything that may still write for one attempt.
#[derive(Debug, Clone)]
pub struct Writer {
    _gone: Arc<oneshot::Sender<()>>,
}

impl Writer {
    /// With a future that ends when the last clone is dropped.
    pub fn new() -> (Self, impl Future<Output = ()>) {
        let (gone, written) = oneshot::channel();
        let writer = Self {
            _gone: Arc::new(gone),
        };
        // Nothing is sent.
        (writer, async { drop(written.await) })
    }
}

/// The same get for one attempt: its spans are watched, and hold the writer.
pub fn writable(get: &Get, writer: &Writer) -> Get {
    let held = |place: &Place| {
        let span = &place.span;
        let hold = Arc::new((span.clone(), writer.clone()));
        let held = Span::new(span.arena.clone(), span.offset, span.length, hold);
        // A span is in its arena, and so is the same span with another hold.
        let span = held.as_ref().unwrap_or(span).watched();
        Place { span, ..*place }
    };
    Get {
        name: get.name.clone(),
        places: get.places.iter().map(held).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::limits::tests::Load;
    use crate::layers::scripted::{Scripted, name, unguarded};
    use crate::layers::{self, Guarded, Op};
    use crate::testing::suite::{Memory, Sample};
    use crate::{Stored, Tier};

    fn options() -> Options {
        Options {
            attempts_max: 4,
            pause: Duration::from_millis(100),
            pause_max: Duration::from_millis(250),
            seed: Some(1),
        }
    }

    fn retry(scripted: &Arc<Scripted>) -> Guarded {
        let options = layers::Options {
            retry: options(),
            ..unguarded()
        };
        Guarded::new(scripted.clone(), &options)
    }

    #[tokio::test(start_paused = true)]
    async fn what_fails_for_a_while_is_tried_again_after_pauses_that_grow() {
        let scripted = Scripted::new();
        let tier = retry(&scripted);
        scripted.fail(Cause::Unreachable);
        scripted.fail(Cause::Throttled);
        scripted.fail(Cause::Timeout);
        assert!(tier.head(&name(0)).await.is_ok());
        assert_eq!(scripted.calls(), [Op::Head; 4]);
        assert_eq!(tier.retried(), 3);
        let times = scripted.times();
        for (pair, longest_ms) in times.windows(2).zip([100, 200, 250]) {
            let longest = Duration::from_millis(longest_ms);
            let pause = pair[1] - pair[0];
            // The clock counts in milliseconds.
            let bound = longest + Duration::from_millis(1);
            assert!((longest / 2..=bound).contains(&pause), "{pause:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_bounded_and_the_last_error_is_the_answer() {
        let scripted = Scripted::new();
        let tier = retry(&scripted);
        scripted.fail_times(3, Cause::Unreachable);
        scripted.fail(Cause::Throttled);
        let error = tier.usage().await.unwrap_err();
        assert_eq!(error.cause, Cause::Throttled);
        assert_eq!(scripted.calls().len(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_tried_says_why_it_failed_where_the_next_attempt_is_refused_here() {
        for refused in [Cause::BreakerOpen, Cause::Busy] {
            let scripted = Scripted::new();
            scripted.fail(Cause::Unreachable);
            scripted.fail(refused);
            let error = retry(&scripted).usage().await.unwrap_err();
            assert_eq!(error.cause, Cause::Unreachable);
            assert_eq!(scripted.calls().len(), 2);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_else_is_tried_twice() {
        for cause in Cause::ALL {
            let again = matches!(
                cause,
                Cause::Throttled | Cause::Unreachable | Cause::Timeout
            );
            let scripted = Scripted::new();
            scripted.fail(cause);
            let ended = retry(&scripted).lookup(&[name(1)]).await;
            assert_eq!(ended.is_ok(), again, "{cause:?}");
            assert_eq!(scripted.calls().len(), 1 + usize::from(again), "{cause:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_attempt_begins_that_its_deadline_would_cut_in_its_pause() {
        let scripted = Scripted::new();
        let mut options = layers::Options {
            retry: options(),
            ..unguarded()
        };
        options.deadline.question = Duration::from_millis(40);
        let tier = Guarded::new(scripted.clone(), &options);
        scripted.fail(Cause::Unreachable);
        let error = tier.usage().await.unwrap_err();
        assert_eq!(error.cause, Cause::Unreachable, "the reason, not the clock");
        assert_eq!(scripted.calls().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_get_is_tried_again_only_when_nobody_writes_for_the_last_attempt() {
        let scripted = Scripted::new();
        let (tier, memory) = (retry(&scripted), Memory::new(1 << 20));
        let get = Sample::new(1, 0, &[5_000, 6_000]).get_all(&memory);
        let release = scripted.fail_and_keep_spans(Cause::Timeout);
        let mut waiting = tier.get(get);
        let early = tokio::time::timeout(Duration::from_secs(60), &mut waiting).await;
        assert!(early.is_err(), "it waits for the writer");
        assert_eq!(scripted.calls().len(), 1);
        release.send(()).unwrap();
        assert!(waiting.await.is_ok());
        assert_eq!(scripted.calls().len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_holds_no_share_of_the_limits_and_its_drop_gives_the_spans_back() {
        let scripted = Scripted::new();
        let (tier, memory) = (retry(&scripted), Memory::new(1 << 20));
        let hold = Arc::new(());
        let mut get = Sample::new(1, 0, &[5_000]).get_all(&memory);
        get.places[0].span = memory.held(5_000, hold.clone());
        scripted.fail(Cause::Unreachable);
        let early = tokio::time::timeout(Duration::from_millis(10), async {
            let mut paused = tier.get(get);
            let _ = tokio::time::timeout(Duration::from_millis(5), &mut paused).await;
            assert_eq!(scripted.calls(), [Op::Get]);
            assert_eq!(tier.limits.reads(), Load::default());
            paused.await
        });
        assert!(early.await.is_err(), "dropped in its pause");
        assert_eq!(Arc::strong_count(&hold), 1);
        let tally = tier.counts.tally().swap_remove(Op::Get as usize);
        assert_eq!((tally.running, tally.results), (0, vec![("Dropped", 1)]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_put_is_tried_again_with_all_of_its_spans() {
        let scripted = Scripted::new();
        let (tier, memory) = (retry(&scripted), Memory::new(1 << 20));
        scripted.fail(Cause::Unreachable);
        let put = Sample::new(1, 0, &[5_000, 6_000]).put(&memory);
        assert_eq!(tier.put(put).await, Ok(Stored::New));
        assert_eq!(scripted.calls(), [Op::Put; 2]);
    }
}
