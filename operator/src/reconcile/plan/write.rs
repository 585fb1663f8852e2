//! Plans the write of a status, and the next pass.

use crate::api::KVCachePoolStatus;
use crate::reconcile::memory::Memory;
use crate::reconcile::observe::Observed;
use crate::reconcile::report;
use crate::reconcile::step::Step;
use crate::status::{self, Write};
use jiff::SignedDuration;
use std::time::Duration;

/// Writes the status, or requires another pass at the time when it may be written. `None` if nothing relevant changed.
pub fn write(
    observed: &Observed<'_>,
    before: &KVCachePoolStatus,
    next: KVCachePoolStatus,
    memory: &Memory,
) -> Option<Step> {
    let every = observed.status_interval;
    match status::due(before, &next, &memory.writes, every, observed.now) {
        Write::No => None,
        Write::In(time) => requeue(Some(time)),
        Write::Now => {
            let events = report::conditions(&observed.about, before, &next);
            Some(Step::Status(Box::new(next), events))
        }
    }
}

/// Requires the next pass within this time.
pub fn requeue(within: Option<SignedDuration>) -> Option<Step> {
    Duration::try_from(within?).ok().map(Step::Requeue)
}
