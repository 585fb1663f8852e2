//! Labelled pods as the operator sees them: a slim type, an index by pool fed by one watch, the status of their sidecars over HTTP, and the
//! small state machines that judge them (breaker, missed, update). This module does not know conditions and does not write a pool's status.
//! Full `Pod` objects are never kept, so that ten thousand pods take a few megabytes.

mod breaker;
mod evict;
mod evidence;
mod faults;
mod fetch;
mod index;
mod pod;
mod pod_backoff;
mod refused;
mod resize;
mod rollout;
mod server;
mod template;
mod unschedulable;
mod update;
mod usage;
mod watch;
mod window;
mod wire;

pub use breaker::{Breaker, BreakerChange, BreakerInput, OWNERS_MAX, Pause, Position, StoredPause};
pub use evict::{EvictionStep, Evictions, SkipReason, missed};
pub use evidence::{Cause, Kind};
pub use faults::Faults;
pub use fetch::{FetchError, STATUS_VALUES_MAX, fetch};
pub use index::{Index, PoolRef};
pub use pod::{Fault, ImageChange, Injection, Owner, Phase, Pod, Sidecar, SidecarState};
pub use refused::{Refusals, Refused, watch_refusals};
pub use resize::{Amounts, Lowered, Memory, ResizeStep, Resizes};
pub use server::Server;
pub use template::{Role, template_pool};
pub use update::{Goal, PreviousSidecar, Step, Update, UpdateBlocker};
pub use usage::{PoolUsage, SHARED, Summary, TierUse, Trouble};
pub use watch::{watch_pods, watch_servers};
pub use window::{HitRate, MINUTES as WINDOW_MINUTES};

#[cfg(test)]
pub(crate) mod tests;
