//! The canary: a pod that is created by dry run and never stored. It shows whether the API server can call the webhook. `pod` builds the
//! pod and checks the result, `run` repeats the check. Reconciliation acts on the result.

pub mod pod;
pub mod run;

pub use run::{Canary, CanaryResult, run};
