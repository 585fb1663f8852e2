//! Retries transient failures a few times with growing pauses, never beyond the deadline. When a later attempt is refused before it
//! reaches the tier, the error is that of the attempt before.
//! Bytes of different attempts never mix: a get is retried only when nothing writes for the last attempt any more.

use super::chance::Chance;
use super::deadline;
use crate::{
    Cause, Get, Operation, Page, Place, Put, Removal, Span, Status, Stored, Tier, TierInfo, Usage,
};
use kvcachepool_protocol::object::{Object, ObjectName};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

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
    inner: Arc<dyn Tier>,
    options: Options,
    chance: Chance,
    retried: Arc<AtomicU64>,
}

/// An attempt, and a receiver that ends when nothing can write for it any more.
type Attempt<'a, T> = (Operation<'a, T>, Option<oneshot::Receiver<()>>);

impl Retry {
    pub fn new(inner: Arc<dyn Tier>, options: Options) -> Self {
        Self {
            inner,
            options,
            chance: Chance::new(options.seed),
            retried: Arc::default(),
        }
    }

    /// Counter of attempts after the first.
    pub fn retried(&self) -> Arc<AtomicU64> {
        self.retried.clone()
    }

    fn repeat<'a, T: Send + 'a>(
        &'a self,
        attempt: impl Fn() -> Attempt<'a, T> + Send + 'a,
    ) -> Operation<'a, T> {
        Box::pin(async move {
            let mut made = 1;
            let mut tried = None;
            loop {
                let (operation, written) = attempt();
                let error = match operation.await {
                    Ok(answer) => return Ok(answer),
                    // The error of the attempt before is the actual reason.
                    Err(e) if refused_here(e.cause) => return Err(tried.unwrap_or(e)),
                    Err(e) => e,
                };
                if made >= self.options.attempts_max || !worth_it(error.cause) {
                    return Err(error);
                }
                if !self.wait(made, written).await {
                    return Err(error);
                }
                tried = Some(error);
                made += 1;
                self.retried.fetch_add(1, Relaxed);
            }
        })
    }

    /// Waits for the next attempt; false: the deadline leaves no time for one.
    async fn wait(&self, made: u32, written: Option<oneshot::Receiver<()>>) -> bool {
        let doubled = self.options.pause.saturating_mul(1 << (made - 1).min(20));
        let pause = self.chance.jittered(doubled.min(self.options.pause_max));
        let until = deadline::until();
        if until.is_some_and(|until| Instant::now() + pause >= until) {
            return false;
        }
        sleep(pause).await;
        // Nothing is sent: the sender is dropped with the last writer.
        if let Some(written) = written {
            let _ = written.await;
        }
        true
    }
}

/// Whether the tier was not even reached.
fn refused_here(cause: Cause) -> bool {
    matches!(cause, Cause::Busy | Cause::BreakerOpen)
}

fn worth_it(cause: Cause) -> bool {
    cause.status() == Status::Temporary && !refused_here(cause)
}

/// Holds the spans of one attempt, and signals its own drop.
#[derive(Debug)]
struct Hold {
    _spans: Vec<Span>,
    _gone: oneshot::Sender<()>,
}

/// The same get with an additional hold around its spans.
fn held(get: &Get) -> (Get, Option<oneshot::Receiver<()>>) {
    let (gone, written) = oneshot::channel();
    let spans = get.places.iter().map(|place| place.span.clone()).collect();
    let hold = Arc::new(Hold {
        _spans: spans,
        _gone: gone,
    });
    let within = |place: &Place| {
        let span = &place.span;
        let (arena, hold) = (span.arena.clone(), hold.clone());
        match Span::new(arena, span.offset, span.length, hold) {
            Some(span) => Place { span, ..*place },
            // A span is in its arena, and so is the same span with another hold.
            None => place.clone(),
        }
    };
    let places = get.places.iter().map(within).collect();
    let name = get.name.clone();
    (Get { name, places }, Some(written))
}

impl Tier for Retry {
    fn info(&self) -> &TierInfo {
        self.inner.info()
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        self.repeat(|| (self.inner.lookup(names), None))
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        self.repeat(|| (self.inner.head(name), None))
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        self.repeat(move || {
            let (get, written) = held(&get);
            (self.inner.get(get), written)
        })
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        self.repeat(move || (self.inner.put(put.clone()), None))
    }

    /// Returns the count of the last attempt: an earlier one may have removed more and failed to report it.
    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        self.repeat(move || (self.inner.remove(removal), None))
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.repeat(|| (self.inner.usage(), None))
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        self.repeat(move || (self.inner.list(from, limit), None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::around::{Layer, Op};
    use crate::layers::deadline::{self, Deadline};
    use crate::layers::scripted::{Scripted, name};
    use crate::testing::suite::{Memory, Sample};

    fn options() -> Options {
        Options {
            attempts_max: 4,
            pause: Duration::from_millis(100),
            pause_max: Duration::from_millis(250),
            seed: Some(1),
        }
    }

    fn retry(scripted: &Arc<Scripted>) -> Retry {
        Retry::new(scripted.clone(), options())
    }

    #[tokio::test(start_paused = true)]
    async fn what_fails_for_a_while_is_tried_again_after_pauses_that_grow() {
        let scripted = Scripted::new();
        let tier = retry(&scripted);
        scripted.fail(Cause::Unreachable);
        scripted.fail(Cause::Throttled);
        scripted.fail(Cause::Timeout);
        assert!(tier.head(&name(1)).await.is_ok());
        assert_eq!(scripted.calls(), [Op::Head; 4]);
        assert_eq!(tier.retried().load(Relaxed), 3);
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
        let around = Deadline::new(deadline::Options {
            question: Duration::from_millis(40),
            ..Default::default()
        });
        let tier = Layer::new(Arc::new(around), Arc::new(retry(&scripted)));
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
    async fn a_put_is_tried_again_with_all_of_its_spans() {
        let scripted = Scripted::new();
        let (tier, memory) = (retry(&scripted), Memory::new(1 << 20));
        scripted.fail(Cause::Unreachable);
        let put = Sample::new(1, 0, &[5_000, 6_000]).put(&memory);
        assert_eq!(tier.put(put).await, Ok(Stored::New));
        assert_eq!(scripted.calls(), [Op::Put; 2]);
    }
}
