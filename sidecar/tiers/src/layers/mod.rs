//! The two layers around every tier: packing outside, and the guards inside. Neither decides what is fetched or kept.

mod breaker;
mod chance;
mod converting;
mod counts;
mod deadline;
mod guarded;
mod limits;
mod op;
mod packing;
mod retry;
mod scratch;
#[cfg(test)]
pub(crate) mod scripted;
mod verify;

pub use breaker::{Breaker, Options as BreakerOptions, Side, State};
pub use converting::{Converter, Rooms};
pub use counts::{Counts, Tally};
pub use deadline::Options as DeadlineOptions;
pub use guarded::Guarded;
pub use limits::{Budget, Limits, Options as LimitOptions};
pub use op::Op;
pub use packing::{Amount, Packed, PackingOptions};
pub use retry::Options as RetryOptions;

use super::Tier;
use packing::Packing;
use std::sync::Arc;

/// Settings of all layers.
#[derive(Debug, Clone)]
pub struct Options {
    pub deadline: DeadlineOptions,
    pub retry: RetryOptions,
    pub breaker: BreakerOptions,
    pub limits: LimitOptions,
    pub packing: PackingOptions,
    /// Memory for objects that are converted.
    pub converting: Rooms,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deadline: Default::default(),
            retry: Default::default(),
            breaker: Default::default(),
            limits: Default::default(),
            packing: Default::default(),
            converting: Rooms::of_tiers(1),
        }
    }
}

/// A tier with its layers, and the parts that status reads.
#[derive(Debug, Clone)]
pub struct Layered {
    pub tier: Arc<dyn Tier>,
    /// Reads and writes chunks.
    pub converter: Converter,
    pub guarded: Arc<Guarded>,
    pub packed: Arc<Packed>,
}

/// Puts all layers around a tier. The order matters: the guards count, limit and compare packed bytes; the deadline covers all attempts
/// and waiting times; each attempt passes the breaker; nothing is held of the limits during a pause; digests are computed within the
/// limits.
pub fn layered(tier: Arc<dyn Tier>, options: &Options) -> Layered {
    let guarded = Arc::new(Guarded::new(tier, options));
    let packing = Packing::new(
        guarded.clone(),
        options.packing.clone(),
        options.deadline,
        guarded.verify.corrupt.clone(),
    );
    let packed = packing.packed();
    let tier: Arc<dyn Tier> = Arc::new(packing);
    Layered {
        converter: Converter::new(tier.clone(), options.converting.clone(), options.deadline),
        tier,
        packed,
        guarded,
    }
}

#[cfg(test)]
mod tests;
