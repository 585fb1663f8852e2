//! A faulty tier for tests: errors before and after the operation, delays, hangs, wrong and missing bytes, and writes after the caller
//! stopped waiting. The faults follow from the seed and the order of the calls.

use fastrand::Rng;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::object::{Object, ObjectName};
use kvcachepool_tiers::{
    Cause, Get, Operation, Page, Place, Put, Removal, Span, Stored, Tier, TierError, TierInfo,
    Usage,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Probability of each fault, per thousand operations.
#[derive(Debug, Clone)]
pub struct Faults {
    /// Seed of all random choices.
    pub seed: u64,
    /// Fails before the operation.
    pub before: u32,
    /// Fails after the operation.
    pub after: u32,
    /// Causes of these errors.
    pub causes: Vec<Cause>,
    /// Adds a delay.
    pub delayed: u32,
    /// Longest delay.
    pub delay_max: Duration,
    /// Never ends.
    pub hung: u32,
    /// Flips a bit of the bytes of a get or a put, and returns Ok.
    pub wrong: u32,
    /// A get does not write the end of a section, and returns Ok.
    pub truncated: u32,
    /// A get fails at once, and its bytes arrive later.
    pub late: u32,
}

impl Faults {
    /// No faults.
    pub fn none(seed: u64) -> Self {
        Self {
            seed,
            before: 0,
            after: 0,
            causes: vec![Cause::Unreachable],
            delayed: 0,
            delay_max: Duration::from_millis(5),
            hung: 0,
            wrong: 0,
            truncated: 0,
            late: 0,
        }
    }
}

/// A faulty layer around a tier.
#[derive(Debug)]
pub struct Chaos {
    inner: Arc<dyn Tier>,
    faults: Mutex<Faults>,
    rng: Mutex<Rng>,
    done: Mutex<BTreeMap<&'static str, u64>>,
}

/// Faults of one operation.
#[derive(Debug, Default)]
struct Plan {
    before: Option<Cause>,
    after: Option<Cause>,
    delay: Duration,
    hung: bool,
    wrong: bool,
    truncated: bool,
    late: bool,
    chance: u64,
}

impl Chaos {
    pub fn new(inner: Arc<dyn Tier>, faults: Faults) -> Self {
        Self {
            inner,
            rng: Mutex::new(Rng::with_seed(faults.seed)),
            faults: Mutex::new(faults),
            done: Mutex::default(),
        }
    }

    /// Stops all faults.
    pub fn heal(&self) {
        let mut faults = self.faults.lock();
        *faults = Faults::none(faults.seed);
    }

    /// How often each fault occurred.
    pub fn done(&self) -> BTreeMap<&'static str, u64> {
        self.done.lock().clone()
    }

    fn plan(&self) -> Plan {
        let (mut rng, faults) = (self.rng.lock(), self.faults.lock());
        let cause = rng.choice(&faults.causes);
        let cause = cause.copied().unwrap_or(Cause::Unreachable);
        let mut happens = |permille: u32| rng.u32(..1000) < permille;
        let delayed = happens(faults.delayed);
        let [before, after, hung, wrong, truncated, late] = [
            faults.before,
            faults.after,
            faults.hung,
            faults.wrong,
            faults.truncated,
            faults.late,
        ]
        .map(happens);
        let longest_us = faults.delay_max.as_micros() as u64;
        let delay = Duration::from_micros(rng.u64(..=longest_us));
        Plan {
            before: before.then_some(cause),
            after: after.then_some(cause),
            delay: if delayed { delay } else { Duration::ZERO },
            hung,
            wrong,
            truncated,
            late,
            chance: rng.u64(..),
        }
    }

    fn did(&self, what: &'static str) {
        *self.done.lock().entry(what).or_default() += 1;
    }

    fn fails(&self, what: &'static str, cause: Option<Cause>) -> Result<(), TierError> {
        let Some(cause) = cause else { return Ok(()) };
        self.did(what);
        Err(TierError::new(self.inner.info().kind, cause, "chaos"))
    }

    async fn begins(&self, plan: &Plan) -> Result<(), TierError> {
        if !plan.delay.is_zero() {
            self.did("delayed");
            tokio::time::sleep(plan.delay).await;
        }
        if plan.hung {
            self.did("hung");
            std::future::pending::<()>().await;
        }
        self.fails("before", plan.before)
    }

    fn run<'a, T: Send + 'a>(
        &'a self,
        inner: impl FnOnce() -> Operation<'a, T> + Send + 'a,
    ) -> Operation<'a, T> {
        Box::pin(async move {
            let plan = self.plan();
            self.begins(&plan).await?;
            let answer = inner().await?;
            self.fails("after", plan.after)?;
            Ok(answer)
        })
    }

    /// Runs the get without a waiting caller.
    fn later(&self, get: Get, plan: &Plan) -> TierError {
        self.did("late");
        let (inner, delay) = (self.inner.clone(), plan.delay);
        tokio::spawn(async move {
            tokio::time::sleep(delay + Duration::from_millis(1)).await;
            let _ = inner.get(get).await;
        });
        TierError::new(self.inner.info().kind, Cause::Timeout, "chaos")
    }
}

/// Flips one bit, or restores the former end of a place.
fn spoil(places: &[Place], before: &[u8], plan: &Plan) {
    let Some(span) = places.first().map(|place| &place.span) else {
        return;
    };
    if plan.truncated || plan.wrong {
        // The bytes change, not the digest that was recorded for them.
        span.saw(None);
    }
    if plan.truncated {
        let at = plan.chance % span.length.max(1);
        span.write(at, before.get(at as usize..).unwrap_or_default());
    }
    if plan.wrong {
        flip(span, plan.chance);
    }
}

fn flip(span: &Span, chance: u64) {
    let (at, mut byte) = (chance % span.length.max(1), [0]);
    span.read(at, &mut byte);
    span.write(at, &[byte[0] ^ 1 << (chance >> 61)]);
}

fn bytes(span: &Span) -> Vec<u8> {
    let mut bytes = vec![0; span.length as usize];
    span.read(0, &mut bytes);
    bytes
}

/// The same put from private memory, with one bit flipped. `None`: no memory.
fn spoiled(put: &Put, chance: u64) -> Option<Put> {
    let length = put.spans.iter().map(|s| s.length.next_multiple_of(4096));
    let length = length.sum::<u64>();
    let arena = Arc::new(Mapping::private("chaos", length).ok()?);
    let (mut spans, mut at) = (Vec::new(), 0);
    for from in &put.spans {
        let span = Span::new(arena.clone(), at, from.length, Arc::new(()))?;
        span.write(0, &bytes(from));
        at += from.length.next_multiple_of(4096);
        spans.push(span);
    }
    flip(spans.last()?, chance);
    let object = put.object.clone();
    Some(Put { object, spans })
}

impl Tier for Chaos {
    fn info(&self) -> &TierInfo {
        self.inner.info()
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        self.run(|| self.inner.lookup(names))
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        self.run(|| self.inner.head(name))
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        Box::pin(async move {
            let plan = self.plan();
            self.begins(&plan).await?;
            if plan.late {
                return Err(self.later(get, &plan));
            }
            let places = get.places.clone();
            let before = places.first().map(|place| bytes(&place.span));
            let head = self.inner.get(get).await?;
            if plan.wrong {
                self.did("wrong");
            }
            if plan.truncated {
                self.did("truncated");
            }
            spoil(&places, &before.unwrap_or_default(), &plan);
            self.fails("after", plan.after)?;
            Ok(head)
        })
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(async move {
            let plan = self.plan();
            self.begins(&plan).await?;
            let spoiled = plan.wrong.then(|| spoiled(&put, plan.chance)).flatten();
            if spoiled.is_some() {
                self.did("wrong at rest");
            }
            let stored = self.inner.put(spoiled.unwrap_or(put)).await?;
            self.fails("after", plan.after)?;
            Ok(stored)
        })
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        self.run(move || self.inner.remove(removal))
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.run(|| self.inner.usage())
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        self.run(move || self.inner.list(from, limit))
    }
}
