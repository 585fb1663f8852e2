use super::*;
use crate::layers::scripted::{Scripted, name, unguarded};
use crate::layers::{self, Guarded};
use crate::testing::suite::{Memory, Sample};
use crate::{Removal, Tier};
use futures::future::join_all;
use std::sync::Arc;
use tokio::time::{advance, timeout};

const OPTIONS: Options = Options {
    failures: 3,
    pause: Duration::from_secs(1),
    pause_max: Duration::from_secs(6),
    seed: Some(1),
};

struct Rig {
    scripted: Arc<Scripted>,
    tier: Guarded,
}

impl Rig {
    fn new() -> Self {
        Self::with(layers::LimitOptions::default())
    }

    /// At most one get runs, and one of the operations without sections.
    fn one_at_a_time() -> Self {
        let mut limits = layers::LimitOptions::default();
        limits.reads.operations = 1;
        limits.questions.operations = 1;
        Self::with(limits)
    }

    fn with(limits: layers::LimitOptions) -> Self {
        let scripted = Scripted::new();
        let options = layers::Options {
            breaker: OPTIONS,
            deadline: layers::DeadlineOptions::default(),
            limits,
            ..unguarded()
        };
        Self {
            tier: Guarded::new(scripted.clone(), &options),
            scripted,
        }
    }

    /// The name of what is wrong with a read.
    async fn read(&self) -> Option<Cause> {
        self.tier.head(&name(0)).await.err().map(|e| e.cause)
    }

    async fn fails(&self, times: usize, cause: Cause) {
        for _ in 0..times {
            self.scripted.fail(cause);
            assert_eq!(self.read().await, Some(cause));
        }
    }

    fn state(&self) -> State {
        self.tier.breaker.reads().state
    }

    fn calls(&self) -> usize {
        self.scripted.calls().len()
    }

    /// How long until a read is let through, in steps of 10 ms.
    async fn open_for(&self) -> Duration {
        let (began, calls) = (Instant::now(), self.calls());
        loop {
            advance(Duration::from_millis(10)).await;
            self.scripted.fail(Cause::Unreachable);
            let _ = self.read().await;
            if self.calls() > calls {
                return began.elapsed();
            }
            self.scripted.forget();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn it_opens_after_failures_in_a_row_and_says_why() {
    let rig = Rig::new();
    rig.fails(2, Cause::Unreachable).await;
    assert_eq!(rig.read().await, None);
    rig.fails(2, Cause::Unreachable).await;
    assert_eq!(rig.state(), State::Closed, "a success lies between");
    rig.fails(1, Cause::Unauthenticated).await;
    assert_eq!(rig.state(), State::Open);
    let error = rig.tier.usage().await.unwrap_err();
    assert_eq!(error.cause, Cause::BreakerOpen);
    assert!(error.detail.contains("Unauthenticated"), "{error}");
    assert_eq!(rig.calls(), 6, "it was not even tried");
    let side = rig.tier.breaker.reads();
    assert_eq!(side.shut().unwrap().cause, Cause::Unauthenticated);
}

#[tokio::test(start_paused = true)]
async fn only_failures_of_the_tier_count_and_answers_about_an_object_are_answers() {
    for cause in Cause::ALL {
        let rig = Rig::new();
        rig.fails(2, Cause::Io).await;
        rig.fails(1, cause).await;
        if cause.of_the_tier() {
            assert_eq!(rig.state(), State::Open, "{cause:?}");
            continue;
        }
        assert_eq!(rig.state(), State::Closed, "{cause:?}");
        rig.fails(1, Cause::Io).await;
        // What was refused before it came to the tier is no answer of it.
        let refused = matches!(cause, Cause::Busy | Cause::BreakerOpen);
        let expected = if refused { State::Open } else { State::Closed };
        assert_eq!(rig.state(), expected, "{cause:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_operation_is_tried_at_a_time_and_its_success_closes() {
    let rig = Rig::new();
    rig.fails(3, Cause::Unreachable).await;
    advance(OPTIONS.pause).await;
    rig.scripted.after(Duration::from_millis(500));
    let probe_name = name(0);
    let mut probe = rig.tier.head(&probe_name);
    assert!(
        timeout(Duration::from_millis(100), &mut probe)
            .await
            .is_err()
    );
    assert_eq!(rig.state(), State::HalfOpen);
    for _ in 0..10 {
        assert_eq!(rig.read().await, Some(Cause::BreakerOpen));
    }
    assert_eq!(rig.calls(), 4);
    assert!(probe.await.is_ok());
    assert_eq!(rig.state(), State::Closed);
    assert_eq!(rig.read().await, None);
}

#[tokio::test(start_paused = true)]
async fn the_pause_grows_to_a_bound_and_begins_anew_after_a_success() {
    let rig = Rig::new();
    rig.fails(3, Cause::Unreachable).await;
    for longest_s in [1, 2, 4, 6, 6] {
        let longest = Duration::from_secs(longest_s);
        let took = rig.open_for().await;
        let bound = longest + Duration::from_millis(20);
        assert!((longest / 2..=bound).contains(&took), "{took:?}");
    }
    advance(OPTIONS.pause_max).await;
    assert_eq!(rig.read().await, None);
    rig.fails(3, Cause::Unreachable).await;
    assert!(rig.open_for().await <= OPTIONS.pause + Duration::from_millis(20));
}

#[tokio::test(start_paused = true)]
async fn what_began_before_it_opened_neither_closes_it_nor_keeps_it_open() {
    let rig = Rig::new();
    let early = name(0);
    rig.scripted.after(Duration::from_millis(200));
    let mut success = rig.tier.head(&early);
    let mut failure = rig.tier.head(&early);
    let _ = timeout(Duration::from_millis(1), &mut success).await;
    rig.scripted
        .fail_after(Duration::from_millis(10), Cause::Io);
    let _ = timeout(Duration::from_millis(1), &mut failure).await;
    rig.fails(3, Cause::Unreachable).await;
    let opened = rig.tier.breaker.reads();
    assert!(failure.await.is_err());
    assert!(success.await.is_ok());
    assert_eq!(rig.tier.breaker.reads(), opened);
    assert_eq!(rig.state(), State::Open);
}

#[tokio::test(start_paused = true)]
async fn operations_that_their_deadline_cut_are_failures_and_others_that_were_dropped_are_not() {
    let rig = Rig::new();
    let tier = &rig.tier;
    for _ in 0..20 {
        rig.scripted.hang();
        let early = timeout(Duration::from_millis(10), tier.usage()).await;
        assert!(early.is_err());
    }
    assert_eq!(rig.state(), State::Closed, "nobody waited for these");
    for _ in 0..3 {
        rig.scripted.hang();
        assert_eq!(tier.usage().await.unwrap_err().cause, Cause::Timeout);
    }
    assert_eq!(rig.state(), State::Open);
    // A probe that is dropped leaves the next one to be tried at once.
    advance(OPTIONS.pause).await;
    rig.scripted.hang();
    let early = timeout(Duration::from_millis(10), tier.usage()).await;
    assert!(early.is_err());
    assert!(tier.usage().await.is_ok());
    assert_eq!(rig.state(), State::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_takes_no_more_still_gives() {
    let rig = Rig::new();
    for _ in 0..3 {
        rig.scripted.fail(Cause::Full);
        let removed = rig.tier.remove(Removal::Named(&[name(0)])).await;
        assert_eq!(removed.unwrap_err().cause, Cause::Full);
    }
    assert_eq!(rig.tier.breaker.writes().state, State::Open);
    assert_eq!(rig.read().await, None);
    let refused = rig.tier.remove(Removal::Named(&[name(0)])).await;
    assert_eq!(refused.unwrap_err().cause, Cause::BreakerOpen);
}

#[tokio::test(start_paused = true)]
async fn what_one_of_several_servers_does_is_neither_a_failure_nor_an_answer() {
    let rig = Rig::new();
    for _ in 0..10 {
        rig.scripted.fail_in_part(Cause::Unreachable);
        assert_eq!(rig.read().await, Some(Cause::Unreachable));
    }
    assert_eq!(rig.state(), State::Closed);
    rig.fails(2, Cause::Unreachable).await;
    rig.scripted.fail_in_part(Cause::Timeout);
    assert_eq!(rig.read().await, Some(Cause::Timeout));
    rig.fails(1, Cause::Unreachable).await;
    assert_eq!(rig.state(), State::Open, "it was no success in between");
    // The one that is tried tells nothing about the others: the next one is tried, too.
    advance(OPTIONS.pause).await;
    rig.scripted.fail_in_part(Cause::Unreachable);
    assert_eq!(rig.read().await, Some(Cause::Unreachable));
    assert_eq!(rig.read().await, None);
    assert_eq!(rig.state(), State::Closed);
}

#[tokio::test(start_paused = true)]
async fn who_waits_behind_a_slow_success_until_its_deadline_says_nothing_about_the_tier() {
    let rig = Rig::one_at_a_time();
    rig.scripted.after(Duration::from_secs(4));
    let mut slow = rig.tier.list(None, 1);
    assert!(timeout(Duration::ZERO, &mut slow).await.is_err());
    let waiting = join_all((0..5).map(|_| rig.read()));
    assert_eq!(waiting.await, [Some(Cause::Timeout); 5]);
    assert_eq!(rig.calls(), 1, "none of them reached the tier");
    assert!(slow.await.is_ok());
    assert_eq!(rig.state(), State::Closed);
}

#[tokio::test(start_paused = true)]
async fn nothing_waits_for_its_turn_at_a_tier_whose_breaker_is_open() {
    let (rig, memory) = (Rig::one_at_a_time(), Memory::new(1 << 20));
    let get = || rig.tier.get(Sample::new(1, 0, &[10]).get_all(&memory));
    rig.scripted.after(Duration::from_secs(4));
    let (mut slow, mut next) = (get(), get());
    assert!(timeout(Duration::ZERO, &mut slow).await.is_err());
    assert!(timeout(Duration::ZERO, &mut next).await.is_err());
    rig.fails(3, Cause::Unreachable).await;
    let began = Instant::now();
    assert_eq!(get().await.unwrap_err().cause, Cause::BreakerOpen);
    assert_eq!(began.elapsed(), Duration::ZERO);
    // One that waited before it opened is refused when its turn comes.
    advance(Duration::from_millis(10)).await;
    drop(slow);
    assert_eq!(next.await.unwrap_err().cause, Cause::BreakerOpen);
    assert_eq!(rig.calls(), 4);
}
