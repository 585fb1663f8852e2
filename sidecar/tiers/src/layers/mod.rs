//! The layers around every tier, one file each, from the outside in: packing, counts, deadline, retry, breaker, limits, verification. A
//! layer knows the others only through the trait. No layer decides what is fetched or kept.

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
    pub deadline: DeadlineOptions,
    pub retry: RetryOptions,
    pub breaker: BreakerOptions,
    pub limits: LimitOptions,
    pub packing: PackingOptions,
}

/// A tier with its layers, and the parts that status reads.
#[derive(Debug, Clone)]
pub struct Layered {
    pub tier: Arc<dyn Tier>,
    pub counts: Arc<Counts>,
    pub breaker: Arc<Breaker>,
    pub limits: Arc<Limits>,
    pub packed: Arc<Packed>,
    retried: Arc<AtomicU64>,
    corrupt: Arc<AtomicU64>,
    scribbled: Arc<AtomicU64>,
}

impl Layered {
    /// Retries of operations.
    pub fn retried(&self) -> u64 {
        self.retried.load(Relaxed)
    }

    /// Corrupt objects found in the tier and deleted from it.
    pub fn corrupt(&self) -> u64 {
        self.corrupt.load(Relaxed)
    }

    /// Gets whose bytes another process overwrote before their digests were compared.
    pub fn scribbled(&self) -> u64 {
        self.scribbled.load(Relaxed)
    }
}

/// Puts all layers around a tier. The order matters: the deadline covers all attempts and waiting times; each attempt passes the
/// breaker; nothing is held of the limits during a pause; digests are computed within the limits.
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
