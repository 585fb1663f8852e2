//! The steps of a reconcile pass. `plan` returns them, and `act` executes them in order.

use super::applied::Application;
use super::events::Event;
use crate::api::KVCachePoolStatus;
use crate::inject::Settings;
use crate::pods::{self, Pod};
use kube::api::TypeMeta;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Set the pool's finalizers.
    Finalizers(Vec<String>),
    /// Set the finalizers of a deleted pool without the operator's own, so that the deletion can finish, and then publish the event.
    Release(Vec<String>, Option<Event>),
    /// Create the password of the pool's managed servers if it does not exist.
    Password,
    /// Apply an object of the pool.
    Apply(Box<Application>),
    /// Apply an object that replaces the pool's managed servers, although nobody changed the pool, when no other pool's are being replaced.
    ApplyInTurn(Box<Application>),
    /// Delete an object that the pool no longer needs.
    Delete(TypeMeta, String),
    /// Create the Job that purges the pool's shared tiers.
    CreateJob(Value),
    /// Write the status, and then publish an event for each condition that changed.
    Status(Box<KVCachePoolStatus>, Vec<Event>),
    Event(Event),
    /// Increment a counter with this label value.
    Count(&'static str, String),
    /// Evict a pod that hangs because of injection.
    Replace(Arc<Pod>),
    /// Evict a pod that the webhook missed.
    Evict(Arc<Pod>),
    /// Update running pods to these settings.
    Update(pods::Step, Box<Settings>),
    /// Start the next pass within this time.
    Requeue(Duration),
}
