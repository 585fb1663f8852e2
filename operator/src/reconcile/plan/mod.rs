//! Plans a reconcile pass: pure functions from a pool's snapshot and `Memory` to steps. A pass plans twice, because later steps depend on
//! the outcome of the first ones: the pool's objects, which the status reports, and the purge Job.

mod deletion;
mod objects;
mod pods;
mod restore;
#[cfg(test)]
mod tests;
mod write;

pub use deletion::has_finalizer;

use super::memory::Memory;
use super::observe::{Observed, Pool};
use super::step::Step;
use crate::status;
use kube::Resource;

/// The next steps of a pass: the first ones if `observed.outcome` is `None`.
pub fn plan(observed: &Observed<'_>, memory: &mut Memory) -> Vec<Step> {
    match (&observed.pool, &observed.outcome) {
        (Pool::Active(active), None) => objects::plan(observed, active, memory),
        (Pool::Active(active), Some(outcome)) => pods::plan(observed, active, outcome, memory),
        (Pool::Malformed(error), None) => malformed(observed, error, memory),
        (Pool::Malformed(_), Some(_)) => Vec::new(),
        (Pool::Deleted(purge), _) => deletion::plan(observed, purge, memory),
    }
}

fn malformed(observed: &Observed<'_>, error: &str, memory: &mut Memory) -> Vec<Step> {
    let generation = observed.stored.meta().generation;
    let before = memory.written.clone().map(|(s, _)| s).unwrap_or_default();
    let next = status::malformed(error, generation, &before, observed.now);
    memory.planned = Some(next.clone());
    let write = write::write(observed, &before, next, memory);
    // A write that has to wait does not cause a pass of its own.
    let writes = |step: &Step| matches!(step, Step::Status(..));
    write.filter(writes).into_iter().collect()
}
