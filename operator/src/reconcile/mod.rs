//! The leader's work: watches feed a queue, each pool in it is reconciled (objects applied, pods judged, status written), failures
//! wait with growing pauses. Decisions are pure functions elsewhere (`desired`, `status`, `pods`); here they are read for and written.
//! `run` is one term: nothing outlives it, and the next leader needs nothing but the cluster.

mod apply;
mod backoff;
mod children;
mod events;
mod evict;
mod gather;
mod live;
mod password;
mod pool;
mod purge;
mod queue;
mod replace;
mod restore;
mod sample;
mod tell;
mod term;
mod update;

pub use term::{Context, run};
