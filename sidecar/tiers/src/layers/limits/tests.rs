use super::*;
use crate::layers::scripted::{Scripted, name, unguarded};
use crate::layers::{self, Guarded};
use crate::testing::suite::{Memory, Sample};
use crate::{Operation, Stored, Tier};
use std::time::Duration;
use tokio::task::JoinSet;

const ONE: Budget = Budget {
    operations: 1,
    bytes: 10_000,
    waiting: 10_000,
};

/// Current use of a budget.
#[derive(Debug, PartialEq, Eq, Default)]
pub(in crate::layers) struct Load {
    operations: usize,
    bytes: u64,
    waiting: usize,
}

impl Limits {
    pub(in crate::layers) fn reads(&self) -> Load {
        self.reads.load()
    }

    pub(in crate::layers) fn writes(&self) -> Load {
        self.writes.load()
    }

    pub(in crate::layers) fn questions(&self) -> Load {
        self.questions.load()
    }
}

impl Gate {
    fn load(&self) -> Load {
        let now = self.now.lock();
        Load {
            operations: now.operations,
            bytes: now.bytes,
            waiting: now.waiting.len(),
        }
    }
}

struct Rig {
    scripted: Arc<Scripted>,
    tier: Arc<Guarded>,
    memory: Memory,
}

impl Rig {
    fn new(budget: Budget) -> Self {
        let options = layers::Options {
            limits: Options {
                reads: budget,
                writes: budget,
                questions: budget,
            },
            ..unguarded()
        };
        let scripted = Scripted::new();
        Self {
            tier: Arc::new(Guarded::new(scripted.clone(), &options)),
            scripted,
            memory: Memory::new(64 << 20),
        }
    }

    /// A put of as many bytes that takes a second.
    fn put_takes_a_second(&self, bytes: u64) -> Operation<'_, Stored> {
        self.scripted.after(Duration::from_secs(1));
        self.tier.put(Sample::new(1, 0, &[bytes]).put(&self.memory))
    }
}

/// Polls it once.
async fn begun<T>(operation: &mut Operation<'_, T>) {
    let polled =
        std::future::poll_fn(|cx| std::task::Poll::Ready(operation.as_mut().poll(cx).is_ready()));
    assert!(!polled.await, "it takes a while");
}

#[tokio::test(start_paused = true)]
async fn one_permit_and_a_thousand_operations_end() {
    let rig = Rig::new(ONE);
    let mut tasks = JoinSet::new();
    for number in 0..1_000 {
        rig.scripted.after(Duration::from_millis(1));
        let tier = rig.tier.clone();
        let put = Sample::new(1, number, &[100 + number * 10]).put(&rig.memory);
        tasks.spawn(async move {
            if number % 2 == 0 {
                tier.put(put).await.is_ok()
            } else {
                tier.head(&name(0)).await.is_ok()
            }
        });
    }
    assert!(tasks.join_all().await.into_iter().all(|ended| ended));
    assert_eq!(rig.tier.limits.writes(), Load::default());
    assert_eq!(rig.tier.limits.questions(), Load::default());
}

#[tokio::test(start_paused = true)]
async fn no_more_run_at_once_than_there_are_operations_and_bytes_for() {
    let rig = Rig::new(Budget {
        operations: 3,
        ..ONE
    });
    let mut small: Vec<_> = (0..5).map(|_| rig.put_takes_a_second(1_000)).collect();
    for put in &mut small {
        begun(put).await;
    }
    assert_eq!(
        rig.tier.limits.writes(),
        Load {
            operations: 3,
            bytes: 3_000,
            waiting: 2
        }
    );
    assert_eq!(rig.scripted.calls().len(), 3);
    drop(small);
    rig.scripted.forget();
    assert_eq!(rig.tier.limits.writes(), Load::default());
    let mut large: Vec<_> = (0..2).map(|_| rig.put_takes_a_second(6_000)).collect();
    for put in &mut large {
        begun(put).await;
    }
    let load = rig.tier.limits.writes();
    assert_eq!((load.operations, load.waiting), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_operation_larger_than_the_budget_runs_alone() {
    let rig = Rig::new(Budget {
        operations: 3,
        ..ONE
    });
    let mut large = rig.put_takes_a_second(50_000);
    begun(&mut large).await;
    let mut small = rig.put_takes_a_second(1);
    begun(&mut small).await;
    assert_eq!(rig.tier.limits.writes().waiting, 1);
    assert_eq!(large.await, Ok(Stored::New));
    assert_eq!(small.await, Ok(Stored::New));
}

#[tokio::test(start_paused = true)]
async fn a_large_one_is_not_overtaken_for_ever() {
    let rig = Rig::new(Budget {
        operations: 3,
        ..ONE
    });
    let mut first = rig.put_takes_a_second(6_000);
    begun(&mut first).await;
    let mut large = rig.put_takes_a_second(10_000);
    begun(&mut large).await;
    let mut small = rig.put_takes_a_second(1_000);
    begun(&mut small).await;
    assert_eq!(
        rig.tier.limits.writes().operations,
        1,
        "the small one waits too"
    );
    assert!(first.await.is_ok());
    assert_eq!(
        rig.tier.limits.writes().bytes,
        10_000,
        "the large one is next"
    );
    assert!(large.await.is_ok());
    assert!(small.await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn one_that_does_not_fit_makes_way_when_it_is_dropped() {
    let rig = Rig::new(Budget {
        operations: 3,
        ..ONE
    });
    let mut first = rig.put_takes_a_second(6_000);
    begun(&mut first).await;
    let mut large = rig.put_takes_a_second(10_000);
    begun(&mut large).await;
    let mut small = rig.put_takes_a_second(1_000);
    begun(&mut small).await;
    drop(large);
    assert_eq!(rig.tier.limits.writes().operations, 2);
    assert!(small.await.is_ok());
    assert!(first.await.is_ok());
    assert_eq!(rig.tier.limits.writes(), Load::default());
}

#[tokio::test(start_paused = true)]
async fn who_comes_when_too_many_wait_is_refused_at_once() {
    let rig = Rig::new(Budget { waiting: 2, ..ONE });
    let mut waiting: Vec<_> = (0..3).map(|_| rig.put_takes_a_second(10)).collect();
    for put in &mut waiting {
        begun(put).await;
    }
    let refused = rig.put_takes_a_second(10).await.unwrap_err();
    assert_eq!(refused.cause, Cause::Busy);
    drop(waiting.pop());
    let mut next = rig.put_takes_a_second(10);
    begun(&mut next).await;
    assert_eq!(rig.tier.limits.writes().waiting, 2);
}

#[tokio::test(start_paused = true)]
async fn dropped_operations_give_back_what_they_have_whenever_they_are_dropped() {
    let rig = Rig::new(ONE);
    for let_in in [false, true] {
        let mut running = rig.put_takes_a_second(10);
        begun(&mut running).await;
        let mut waiting = rig.put_takes_a_second(10);
        begun(&mut waiting).await;
        if let_in {
            // It is let in and not polled again.
            assert!(running.await.is_ok());
            assert_eq!(rig.tier.limits.writes().operations, 1);
            drop(waiting);
        } else {
            drop(waiting);
            drop(running);
        }
        assert_eq!(rig.tier.limits.writes(), Load::default());
        rig.scripted.forget();
    }
}

#[tokio::test(start_paused = true)]
async fn a_storm_of_puts_does_not_stand_before_gets_and_lookups() {
    let rig = Rig::new(ONE);
    let mut storm: Vec<_> = (0..100).map(|_| rig.put_takes_a_second(10_000)).collect();
    for put in &mut storm {
        begun(put).await;
    }
    rig.scripted.forget();
    assert_eq!(rig.tier.lookup(&[name(1)]).await, Ok(vec![true]));
    let get = Sample::new(1, 0, &[10]).get_all(&rig.memory);
    assert!(rig.tier.get(get).await.is_ok());
    assert_eq!(rig.tier.limits.writes().waiting, 99);
}
