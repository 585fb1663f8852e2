//! What a reconcile pass does: pure functions from the snapshot of a pool, and from what the leader remembers of it, to steps.
//! A pass plans twice. The first steps are those that later ones depend on: the pool's objects, which its status reports, and the Job
//! of a purge.

mod deletion;
mod objects;
mod pods;
mod restore;
#[cfg(test)]
mod tests;
mod write;

pub use deletion::held;

use super::memory::Memory;
use super::observe::{Observed, Pool};
use super::step::Step;
use crate::status;
use kube::Resource;

/// The next steps of a pass.
pub fn plan(observed: &Observed<'_>, memory: &mut Memory) -> Vec<Step> {
    match (&observed.pool, &observed.outcome) {
        (Pool::Active(active), None) => objects::plan(observed, active, memory),
        (Pool::Active(active), Some(outcome)) => pods::plan(observed, active, outcome, memory),
        (Pool::Malformed(error), None) => malformed(observed, error, memory),
        (Pool::Malformed(_), Some(_)) => Vec::new(),
        (Pool::Deleted(purge), _) => deletion::plan(observed, purge, memory),
    }
}

fn malformed(observed: &Observed<'_>, error: &str, memory: &Memory) -> Vec<Step> {
    let generation = observed.stored.meta().generation;
    let before = memory.written.clone().map(|(s, _)| s).unwrap_or_default();
    let next = status::malformed(error, generation, &before, observed.now);
    let write = write::write(observed, &before, next, memory);
    // A write that has to wait is left to the next pass, whenever that is.
    let writes = |step: &Step| matches!(step, Step::Status(..));
    write.filter(writes).into_iter().collect()
}
