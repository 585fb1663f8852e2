//! A tier with all guards around every operation, in the order of [`Guarded::run`]. Each guard has its state and its rules in a file of its
//! own. A dropped operation releases what it holds of each of them.

use super::breaker::Breaker;
use super::counts::Counts;
use super::limits::Limits;
use super::retry::{Retry, Writer, refused_here, writable};
use super::verify::Verify;
use super::{DeadlineOptions, Op, Options};
use crate::{Cause, Get, Operation, Page, Put, Removal, Stored, Tier, TierError, TierInfo, Usage};
use kvcachepool_protocol::object::{Object, ObjectName};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::{Duration, Instant, sleep, timeout_at};

#[derive(Debug)]
pub struct Guarded {
    inner: Arc<dyn Tier>,
    pub counts: Counts,
    deadline: DeadlineOptions,
    retry: Retry,
    pub breaker: Breaker,
    pub limits: Limits,
    pub(super) verify: Verify,
}

/// Facts about an operation that the guards need.
struct Asked {
    op: Op,
    /// Bytes of sections that move between tier and arena.
    bytes: u64,
    /// Number of names to remove.
    names: usize,
    /// The object, if the operation concerns exactly one.
    object: Option<ObjectName>,
}

impl Asked {
    fn new(op: Op) -> Self {
        Self {
            op,
            bytes: 0,
            names: 0,
            object: None,
        }
    }
}

impl Guarded {
    pub fn new(inner: Arc<dyn Tier>, options: &Options) -> Self {
        Self {
            counts: Counts::default(),
            deadline: options.deadline,
            retry: Retry::new(options.retry),
            breaker: Breaker::new(options.breaker),
            limits: Limits::new(options.limits),
            verify: Verify::new(inner.clone(), options.packing.room()),
            inner,
        }
    }

    /// Attempts of operations after their first.
    pub fn retried(&self) -> u64 {
        self.retry.retried.load(Relaxed)
    }

    /// Corrupt objects found in the tier and deleted from it.
    pub fn corrupt(&self) -> u64 {
        self.verify.corrupt.load(Relaxed)
    }

    /// Gets whose bytes another process overwrote before their digests were compared.
    pub fn scribbled(&self) -> u64 {
        self.verify.scribbled.load(Relaxed)
    }

    /// Counts and times the operation, and ends it at its deadline. The tier gets no request before the operation is first polled.
    async fn run<'a, T>(
        &'a self,
        asked: Asked,
        operation: impl Fn(Writer) -> Operation<'a, T>,
    ) -> Result<T, TierError> {
        let running = self.counts.begin(asked.op);
        let longest = self.deadline.longest(asked.op, asked.bytes, asked.names);
        let until = Instant::now() + longest;
        let answer = timeout_at(until, self.attempts(&asked, until, operation)).await;
        let answer = answer.unwrap_or_else(|_| Err(self.late(&asked, longest)));
        running.ended(answer.as_ref().err());
        answer
    }

    /// Repeats attempts that fail for a while.
    async fn attempts<'a, T>(
        &'a self,
        asked: &Asked,
        until: Instant,
        operation: impl Fn(Writer) -> Operation<'a, T>,
    ) -> Result<T, TierError> {
        let (mut made, mut tried) = (1, None);
        loop {
            let (writer, written) = Writer::new();
            let attempt = self.attempt(asked, until, || operation(writer));
            let error = match attempt.await {
                Ok(answer) => return Ok(answer),
                // The error of the attempt before is the actual reason.
                Err(e) if refused_here(e.cause) => return Err(tried.unwrap_or(e)),
                Err(e) => e,
            };
            let Some(pause) = self.retry.pause(made, error.cause, until) else {
                return Err(error);
            };
            sleep(pause).await;
            written.await;
            tried = Some(error);
            made += 1;
            self.retry.retried.fetch_add(1, Relaxed);
        }
    }

    /// Waits for its share of the limits, and then passes the breaker: a wait here says nothing about the tier.
    async fn attempt<'a, T>(
        &'a self,
        asked: &Asked,
        until: Instant,
        operation: impl FnOnce() -> Operation<'a, T>,
    ) -> Result<T, TierError> {
        let tier = self.info().kind;
        self.breaker.check(tier, asked.op)?;
        let _permit = self.limits.enter(tier, asked.op, asked.bytes).await?;
        let pass = self.breaker.enter(tier, asked.op, until)?;
        let answer = operation().await;
        pass.leave(answer.as_ref().err());
        answer
    }

    fn late(&self, asked: &Asked, longest: Duration) -> TierError {
        let (op, seconds) = (asked.op.name(), longest.as_secs_f64());
        let detail = format!("{op} did not end within {seconds:.1} s");
        let error = TierError::new(self.info().kind, Cause::Timeout, detail);
        match &asked.object {
            Some(name) => error.about(name.s3("")),
            None => error,
        }
    }
}

impl Tier for Guarded {
    fn info(&self) -> &TierInfo {
        self.inner.info()
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(self.run(Asked::new(Op::Lookup), |_| self.inner.lookup(names)))
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        let asked = Asked {
            object: Some(name.clone()),
            ..Asked::new(Op::Head)
        };
        Box::pin(self.run(asked, move |_| {
            Box::pin(async move {
                let head = self.inner.head(name).await;
                self.verify.check_get(name, &[], head).await
            })
        }))
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        let bytes = get.places.iter().map(|place| place.span.length).sum();
        let asked = Asked {
            bytes,
            object: Some(get.name.clone()),
            ..Asked::new(Op::Get)
        };
        Box::pin(self.run(asked, move |writer| {
            let get = writable(&get, &writer);
            Box::pin(async move {
                let (name, places) = (get.name.clone(), get.places.clone());
                let got = self.inner.get(get).await;
                self.verify.check_get(&name, &places, got).await
            })
        }))
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        let bytes = put.spans.iter().map(|span| span.length).sum();
        let asked = Asked {
            bytes,
            object: Some(put.object.name()),
            ..Asked::new(Op::Put)
        };
        Box::pin(self.run(asked, move |_| {
            let put = put.clone();
            Box::pin(async move {
                self.verify.check_put(&put).await?;
                self.inner.put(put).await
            })
        }))
    }

    /// Returns the count of the last attempt: an earlier one may have removed more and failed to report it.
    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        let asked = Asked {
            names: removal.count(),
            object: match removal {
                Removal::Unusable(name) => Some(name.clone()),
                Removal::Named(_) | Removal::Listed(_) => None,
            },
            ..Asked::new(Op::Remove)
        };
        Box::pin(self.run(asked, move |_| self.inner.remove(removal)))
    }

    fn usage(&self) -> Operation<'_, Usage> {
        Box::pin(self.run(Asked::new(Op::Usage), |_| self.inner.usage()))
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        Box::pin(self.run(Asked::new(Op::List), move |_| self.inner.list(from, limit)))
    }
}
