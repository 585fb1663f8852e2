//! Labelled pods as the operator sees them: a slim type, an index by pool fed by one watch, the status of their sidecars over HTTP, and the
//! small state machines that judge them (breaker, missed, update). This module does not know conditions and does not write a pool's status.
//! Full `Pod` objects are never kept, so that ten thousand pods take a few megabytes.

mod away;
mod breaker;
mod evict;
mod evidence;
mod faults;
mod fetch;
mod hold;
mod index;
mod pod;
mod refused;
mod template;
mod unschedulable;
mod update;
mod usage;
mod watch;
mod window;
mod wire;

pub use breaker::{Breaker, Kept, Look, OWNERS_MAX, Pause, Position, Turn};
pub use evict::{Alone, Evictions, Missed, missed};
pub use evidence::{Cause, Kind};
pub use faults::Faults;
pub use fetch::{FetchError, fetch};
pub use index::{Index, PoolRef};
pub use pod::{Exchange, Fault, Injection, Owner, Phase, Pod, Sidecar, SidecarState};
pub use refused::{Refusals, Refused, watch_refusals};
pub use template::template_pool;
pub use update::{Goal, Setback, Step, Update, Was};
pub use usage::{ASKED_MAX, PoolUsage, SHARED, Summary, TierUse, Trouble};
pub use watch::watch_pods;
pub use window::{HitRate, MINUTES as WINDOW_MINUTES};

#[cfg(test)]
pub(crate) mod tests;
