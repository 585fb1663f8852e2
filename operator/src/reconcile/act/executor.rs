//! The executor of one reconcile pass.

use crate::reconcile::context::Context;
use crate::reconcile::events::{Event, Events};
use crate::reconcile::observe::Observed;
use crate::reconcile::upgrades::Upgrades;

/// Executes the steps of one reconcile pass.
pub struct Executor<'a> {
    pub context: &'a Context,
    pub events: &'a Events,
    pub observed: &'a Observed<'a>,
    pub upgrades: &'a Upgrades,
}

impl Executor<'_> {
    pub(super) async fn publish(&self, events: &[Event]) {
        for event in events {
            self.events.publish(event).await;
        }
    }
}
