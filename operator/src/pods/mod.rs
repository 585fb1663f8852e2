//! Labelled pods as the operator sees them: a slim type, an index by pool fed by one watch, what their sidecars say over HTTP, and
//! the small state machines that judge them (breaker, missed, update). Nothing here knows conditions or writes a pool's status.
//! A full `Pod` is never kept: ten thousand of them shall cost some megabytes.

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
