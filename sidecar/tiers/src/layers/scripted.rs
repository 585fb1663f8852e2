//! A scripted tier, call by call, for tests of single layers.

use super::{BreakerOptions, DeadlineOptions, Op, Options, RetryOptions};
use crate::testing::suite::Sample;
use crate::{
    Cause, Get, Kind, Operation, Page, Put, Removal, Stored, Tier, TierError, TierInfo, Usage,
};
use kvcachepool_protocol::object::{Object, ObjectName};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Behaviour of one call.
#[derive(Debug)]
enum Step {
    Fail(Cause),
    /// Fails as one of several servers.
    FailInPart(Cause),
    /// Fails because of object 0.
    FailAbout(Cause),
    FailAfter(Duration, Cause),
    After(Duration),
    Hang,
    /// Fails, while a task keeps the spans of the get until it is released.
    FailAndKeep(Cause, oneshot::Receiver<()>),
    /// Hangs, while a task keeps the spans of the get until it is released.
    HangAndKeep(oneshot::Receiver<()>),
}

/// The tier. Calls without a script succeed; a head or get returns object 0.
#[derive(Debug)]
pub struct Scripted {
    info: TierInfo,
    steps: Mutex<VecDeque<Step>>,
    calls: Mutex<Vec<(Op, Instant)>>,
    removals: Mutex<Vec<String>>,
}

pub fn name(number: u64) -> ObjectName {
    Sample::new(1, number, &[1]).name()
}

/// Options with which no guard refuses, repeats or ends an operation.
pub fn unguarded() -> Options {
    const DAY: Duration = Duration::from_secs(24 * 3_600);
    Options {
        deadline: DeadlineOptions {
            question: DAY,
            transfer: DAY,
            ..DeadlineOptions::default()
        },
        retry: RetryOptions {
            attempts_max: 1,
            ..RetryOptions::default()
        },
        breaker: BreakerOptions {
            failures: u32::MAX,
            ..BreakerOptions::default()
        },
        ..Options::default()
    }
}

impl Scripted {
    pub fn new() -> Arc<Self> {
        Self::saying(TierInfo::new(Kind::S3))
    }

    /// A tier with this info.
    pub fn saying(info: TierInfo) -> Arc<Self> {
        Arc::new(Self {
            info,
            steps: Mutex::default(),
            calls: Mutex::default(),
            removals: Mutex::default(),
        })
    }

    /// The next call fails.
    pub fn fail(&self, cause: Cause) {
        self.steps.lock().push_back(Step::Fail(cause));
    }

    /// The next call fails as one of several servers.
    pub fn fail_in_part(&self, cause: Cause) {
        self.steps.lock().push_back(Step::FailInPart(cause));
    }

    /// The next call fails because of object 0.
    pub fn fail_about(&self, cause: Cause) {
        self.steps.lock().push_back(Step::FailAbout(cause));
    }

    /// The next `times` calls fail.
    pub fn fail_times(&self, times: usize, cause: Cause) {
        (0..times).for_each(|_| self.fail(cause));
    }

    /// The next call succeeds after a pause.
    pub fn after(&self, pause: Duration) {
        self.steps.lock().push_back(Step::After(pause));
    }

    /// The next call fails after a pause.
    pub fn fail_after(&self, pause: Duration, cause: Cause) {
        self.steps.lock().push_back(Step::FailAfter(pause, cause));
    }

    /// Clears the script.
    pub fn forget(&self) {
        self.steps.lock().clear();
    }

    /// The next call never ends.
    pub fn hang(&self) {
        self.steps.lock().push_back(Step::Hang);
    }

    /// The next call, a get, never ends, and its spans are held until the returned sender is dropped.
    pub fn keep_spans(&self) -> oneshot::Sender<()> {
        let (release, released) = oneshot::channel();
        self.steps.lock().push_back(Step::HangAndKeep(released));
        release
    }

    /// The next call, a get, fails, and its spans are held until the returned sender is dropped.
    pub fn fail_and_keep_spans(&self, cause: Cause) -> oneshot::Sender<()> {
        let (release, released) = oneshot::channel();
        let step = Step::FailAndKeep(cause, released);
        self.steps.lock().push_back(step);
        release
    }

    /// Received calls.
    pub fn calls(&self) -> Vec<Op> {
        self.calls.lock().iter().map(|(op, _)| *op).collect()
    }

    /// Times of the calls.
    pub fn times(&self) -> Vec<Instant> {
        self.calls.lock().iter().map(|(_, at)| *at).collect()
    }

    /// Received removals, as text.
    pub fn removals(&self) -> Vec<String> {
        self.removals.lock().clone()
    }

    fn called<'a, T: Send + 'a>(
        &'a self,
        op: Op,
        with: Option<Get>,
        answer: T,
    ) -> Operation<'a, T> {
        self.calls.lock().push((op, Instant::now()));
        let step = self.steps.lock().pop_front();
        let failed = |cause| Err(TierError::new(Kind::S3, cause, "as the test says"));
        let keep = |released: oneshot::Receiver<()>| {
            tokio::spawn(async move {
                let _ = released.await;
                drop(with);
            })
        };
        match step {
            None => Box::pin(async { Ok(answer) }),
            Some(Step::Fail(cause)) => Box::pin(async move { failed(cause) }),
            Some(Step::FailInPart(cause)) => Box::pin(async move {
                failed(cause).map_err(|e| TierError {
                    of_a_part: true,
                    ..e
                })
            }),
            Some(Step::FailAbout(cause)) => {
                Box::pin(async move { failed(cause).map_err(|e| e.about(name(0).s3(""))) })
            }
            Some(Step::After(pause)) => Box::pin(async move {
                tokio::time::sleep(pause).await;
                Ok(answer)
            }),
            Some(Step::FailAfter(pause, cause)) => Box::pin(async move {
                tokio::time::sleep(pause).await;
                failed(cause)
            }),
            Some(Step::Hang) => Box::pin(std::future::pending()),
            Some(Step::FailAndKeep(cause, released)) => {
                keep(released);
                Box::pin(async move { failed(cause) })
            }
            Some(Step::HangAndKeep(released)) => {
                keep(released);
                Box::pin(std::future::pending())
            }
        }
    }
}

impl Tier for Scripted {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        self.called(Op::Lookup, None, vec![true; names.len()])
    }

    fn head<'a>(&'a self, _: &'a ObjectName) -> Operation<'a, Object> {
        self.called(Op::Head, None, Sample::new(1, 0, &[1]).object)
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        let lengths: Vec<_> = get.places.iter().map(|place| place.span.length).collect();
        let Sample { object, bytes } = Sample::new(1, 0, &lengths);
        for (place, bytes) in get.places.iter().zip(&bytes) {
            place.span.write(0, bytes);
        }
        self.called(Op::Get, Some(get), object)
    }

    fn put(&self, _: Put) -> Operation<'_, Stored> {
        self.called(Op::Put, None, Stored::New)
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        self.removals.lock().push(format!("{removal:?}"));
        self.called(Op::Remove, None, removal.count() as u64)
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.called(Op::Usage, None, Usage::default())
    }

    fn list<'a>(&'a self, _: Option<&'a str>, _: usize) -> Operation<'a, Page> {
        self.called(Op::List, None, Page::default())
    }
}
