//! The canary: a pod that is never stored, created by dry run, which shows whether the path from the API server to the webhook works.
//! `pod` is the pod and what must have become of it, `run` the round.
//! What follows from the result is reconcile's.

pub mod pod;
pub mod run;

pub use run::{Canary, Seen, run};
