//! Around every tier the same layers, one file each, from the outside in: packing, counts, deadline, retry, breaker, limits, verification. Each
//! knows nothing of the others but what the trait says. No layer decides what is fetched or kept.

mod around;
mod breaker;
mod chance;
mod counts;
mod deadline;
mod limits;
mod packing;
mod retry;
mod scratch;
#[cfg(test)]
pub(crate) mod scripted;
mod verify;

pub use around::Op;
pub use breaker::{Breaker, Options as BreakerOptions, Side, State};
pub use counts::{Counts, SECONDS, Tally};
pub use deadline::Options as DeadlineOptions;
pub use limits::{Budget, Limits, Load, Options as LimitOptions};
pub use packing::{Amount, Packed, PackingOptions};
pub use retry::Options as RetryOptions;

use super::Tier;
use around::Layer;
use deadline::Deadline;
use packing::Packing;
use retry::Retry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use verify::Verify;

/// Settings of all layers.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How long operations may take.
    pub deadline: DeadlineOptions,
    /// What is tried again, and when.
    pub retry: RetryOptions,
    /// When the tier is not asked any more.
    pub breaker: BreakerOptions,
    /// What may be under way at once.
    pub limits: LimitOptions,
    /// How objects are packed.
    pub packing: PackingOptions,
}

/// A tier with its layers, and what status shows of them.
#[derive(Debug, Clone)]
pub struct Layered {
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// Operations by what became of them.
    pub counts: Arc<Counts>,
    /// Is the tier asked at all?
    pub breaker: Arc<Breaker>,
    /// What is under way.
    pub limits: Arc<Limits>,
    /// What was packed and unpacked.
    pub packed: Arc<Packed>,
    retried: Arc<AtomicU64>,
    corrupt: Arc<AtomicU64>,
    scribbled: Arc<AtomicU64>,
}

impl Layered {
    /// Retries of operations on a lower tier.
    pub fn retried(&self) -> u64 {
        self.retried.load(Relaxed)
    }

    /// Objects that were found corrupt in the tier and removed from it.
    pub fn corrupt(&self) -> u64 {
        self.corrupt.load(Relaxed)
    }

    /// Gets whose bytes another process wrote to before they were compared.
    pub fn scribbled(&self) -> u64 {
        self.scribbled.load(Relaxed)
    }
}

/// Puts all layers around a tier. The order is part of what each means: a deadline is that of all attempts and of the time that they
/// wait; each attempt passes the breaker; nothing is held of the limits in a pause; digests are made within the limits.
pub fn layered(tier: Arc<dyn Tier>, options: &Options) -> Layered {
    let counts = Arc::new(Counts::default());
    let breaker = Arc::new(Breaker::new(options.breaker));
    let limits = Arc::new(Limits::new(options.limits));
    let verify = Verify::new(tier, options.packing.room());
    let (corrupt, scribbled) = (verify.corrupt(), verify.scribbled());
    let limited = Layer::new(limits.clone(), Arc::new(verify));
    let broken = Layer::new(breaker.clone(), Arc::new(limited));
    let retry = Retry::new(Arc::new(broken), options.retry);
    let retried = retry.retried();
    let deadline = Arc::new(Deadline::new(options.deadline));
    let timed = Layer::new(deadline, Arc::new(retry));
    let counted = Arc::new(Layer::new(counts.clone(), Arc::new(timed)));
    let packing = Packing::new(
        counted,
        options.packing.clone(),
        options.deadline,
        corrupt.clone(),
    );
    let packed = packing.packed();
    Layered {
        tier: Arc::new(packing),
        counts,
        breaker,
        limits,
        packed,
        retried,
        corrupt,
        scribbled,
    }
}

#[cfg(test)]
mod tests;
