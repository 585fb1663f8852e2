//! All layers at once: over a tier that works, and over one that goes wrong in every way.

mod handed_on;
mod on_disk;

use super::limits::tests::Load;
use super::*;
use crate::testing::chaos::{Chaos, Faults};
use crate::testing::shelf::Shelf;
use crate::testing::suite::{Memory, Opening, Sample, Subject, passes_the_suite};
use crate::{Cause, Get, Kind, Place, Removal};
use fastrand::Rng;
use parking_lot::Mutex;
use std::time::Duration;
use tokio::task::JoinSet;

/// Layers over a shelf, opened again over the same shelf.
struct Stack {
    shelf: Mutex<Option<Shelf>>,
    options: Options,
    faults: Faults,
}

impl Stack {
    fn new(options: Options, faults: Faults) -> Self {
        Self {
            shelf: Mutex::default(),
            options,
            faults,
        }
    }

    fn open(&self, shelf: Shelf) -> Opening<'_> {
        let chaos = Chaos::new(Arc::new(shelf), self.faults.clone());
        let tier = layered(Arc::new(chaos), &self.options).tier;
        Box::pin(async { tier })
    }
}

impl Subject for Stack {
    fn empty(&self) -> Opening<'_> {
        let shelf = Shelf::new(Kind::Disk, 0);
        *self.shelf.lock() = Some(shelf.clone());
        self.open(shelf)
    }

    fn again(&self) -> Option<Opening<'_>> {
        let shelf = self.shelf.lock().clone()?;
        Some(self.open(shelf))
    }
}

/// Tried often and soon: of one operation in ten that fails, none fails as often in a row.
fn stubborn() -> Options {
    let mut options = Options::default();
    options.retry.attempts_max = 12;
    options.retry.pause = Duration::from_micros(100);
    options.breaker.failures = 50;
    options
}

mod over_a_tier_that_works {
    use super::*;
    passes_the_suite!(Stack::new(Options::default(), Faults::none(1)));
}

/// Failures that go away.
fn sometimes() -> Faults {
    Faults {
        before: 100,
        causes: vec![Cause::Unreachable, Cause::Throttled, Cause::Timeout],
        delayed: 100,
        late: 50,
        ..Faults::none(2)
    }
}

mod over_a_tier_that_fails_now_and_then {
    use super::*;
    passes_the_suite!(Stack::new(stubborn(), sometimes()));
}

mod with_one_operation_at_a_time {
    use super::*;
    fn options() -> Options {
        let one = Budget {
            operations: 1,
            bytes: 1 << 20,
            waiting: 1_000,
        };
        let mut options = Options::default();
        (options.limits.reads, options.limits.writes) = (one, one);
        options.limits.questions = one;
        options
    }

    // All but the one where gets are begun and never end.
    passes_the_suite!(Stack::new(options(), Faults::none(1));
        what_is_put_comes_back_whatever_its_length,
        what_is_removed_is_gone_and_can_be_put_again,
        a_lookup_answers_every_name_in_order,
        sixty_four_puts_and_gets_run_at_once,
        puts_of_one_name_at_once_leave_one_whole_object,
        a_get_beside_puts_and_removes_is_right_or_missing,
        a_get_that_is_dropped_writes_nothing_after_its_hold_is_gone,
        a_put_that_is_dropped_leaves_a_whole_object_or_none,
    );
}

/// One history: writers and readers over a few objects, while everything goes wrong. Ok means right bytes, whatever else happens.
struct History {
    layered: Layered,
    chaos: Arc<Chaos>,
    samples: Vec<Sample>,
}

impl History {
    fn new(seed: u64) -> Self {
        let faults = Faults {
            before: 60,
            after: 60,
            causes: Cause::ALL.to_vec(),
            delayed: 200,
            delay_max: Duration::from_millis(40),
            hung: 10,
            wrong: 60,
            truncated: 60,
            late: 60,
            ..Faults::none(seed)
        };
        let shelf = Arc::new(Shelf::new(Kind::S3, 200_000));
        let chaos = Arc::new(Chaos::new(shelf, faults));
        let mut options = Options::default();
        options.deadline.question = Duration::from_millis(500);
        options.deadline.transfer = Duration::from_secs(1);
        options.retry.seed = Some(seed);
        options.breaker.seed = Some(seed);
        options.breaker.failures = 2;
        options.breaker.pause = Duration::from_millis(20);
        options.breaker.pause_max = Duration::from_millis(100);
        options.limits.reads = Budget {
            operations: 4,
            bytes: 40_000,
            waiting: 6,
        };
        let lengths: [&[u64]; 4] = [&[9_000], &[5_000, 1], &[1, 2, 3], &[20_001, 4_096]];
        let samples = (0..12).map(|n| Sample::new(seed, n, lengths[n as usize % 4]));
        Self {
            layered: layered(chaos.clone(), &options),
            chaos,
            samples: samples.collect(),
        }
    }

    /// One client's operations; returns how many gets were right.
    async fn client(&self, seed: u64, memory: &Memory, hold: &Arc<()>) -> u64 {
        let (mut rng, tier, mut right) = (Rng::with_seed(seed), &self.layered.tier, 0);
        for _ in 0..150 {
            let sample = &self.samples[rng.usize(..self.samples.len())];
            let name = sample.name();
            match rng.u8(..10) {
                0..5 => {
                    let held = |section: &kvcachepool_protocol::object::Section| Place {
                        group: section.group,
                        shard: section.shard,
                        span: memory.held(section.stored_bytes, hold.clone()),
                    };
                    let places: Vec<_> = sample.object.sections.iter().map(held).collect();
                    let get = Get {
                        name,
                        places: places.clone(),
                    };
                    let patience = Duration::from_millis(rng.u64(..=400));
                    // A caller that loses its patience is no reason for wrong bytes either.
                    let got = tokio::time::timeout(patience, tier.get(get)).await;
                    if matches!(got, Ok(Ok(_))) {
                        assert!(sample.lies_in(&places), "seed {seed}");
                        right += 1;
                    }
                }
                5..8 => {
                    let _ = tier.put(sample.put(memory)).await;
                }
                8 => {
                    let _ = tier.remove(Removal::Named(&[name])).await;
                }
                _ => {
                    let _ = tier.lookup(&[name]).await;
                }
            }
        }
        right
    }
}

#[tokio::test(start_paused = true)]
async fn whatever_goes_wrong_bytes_that_are_answered_are_right_and_everything_is_given_back() {
    let mut right = 0;
    for seed in 0..8 {
        let history = Arc::new(History::new(seed));
        let (memory, hold) = (Arc::new(Memory::new(256 << 20)), Arc::new(()));
        let mut clients = JoinSet::new();
        for client in 0..8 {
            let (history, memory, hold) = (history.clone(), memory.clone(), hold.clone());
            clients.spawn(async move { history.client(seed * 100 + client, &memory, &hold).await });
        }
        right += clients.join_all().await.into_iter().sum::<u64>();
        // Late writers end, and with them the last hold.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(Arc::strong_count(&hold), 1, "seed {seed}");
        let guarded = &history.layered.guarded;
        let limits = &guarded.limits;
        assert_eq!(limits.reads(), Load::default(), "seed {seed}");
        assert_eq!(limits.writes(), Load::default(), "seed {seed}");
        assert_eq!(limits.questions(), Load::default(), "seed {seed}");
        for tally in guarded.counts.tally() {
            assert_eq!(tally.running, 0, "seed {seed}: {tally:?}");
        }
        let done = history.chaos.done();
        assert_eq!(done.len(), 8, "every fault happens: {done:?}");
        assert!(guarded.corrupt() > 0 && guarded.retried() > 0);
        assert!(guarded.breaker.reads().reason.is_some());
    }
    assert!(right > 500, "{right} gets brought bytes");
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_is_given_up_and_found_again() {
    let shelf = Arc::new(Shelf::new(Kind::Redis, 0));
    let hung = Faults {
        hung: 1_000,
        ..Faults::none(1)
    };
    let chaos = Arc::new(Chaos::new(shelf, hung));
    let stack = layered(chaos.clone(), &Options::default());
    let name = Sample::new(1, 0, &[1]).name();
    for _ in 0..5 {
        let error = stack.tier.head(&name).await.unwrap_err();
        assert_eq!(error.cause, Cause::Timeout);
    }
    assert_eq!(stack.guarded.breaker.reads().state, State::Open);
    let began = tokio::time::Instant::now();
    let error = stack.tier.head(&name).await.unwrap_err();
    assert_eq!(error.cause, Cause::BreakerOpen);
    assert_eq!(began.elapsed(), Duration::ZERO, "nobody waits for it");
    chaos.heal();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let error = stack.tier.head(&name).await.unwrap_err();
    assert_eq!(error.cause, Cause::Missing);
    assert_eq!(stack.guarded.breaker.reads().state, State::Closed);
}
