//! The steps of a reconcile pass: `plan` returns them, `act` carries them out in their order.

use super::applied::Application;
use super::events::Event;
use crate::api::KVCachePoolStatus;
use crate::inject::Settings;
use crate::pods::{self, Pod};
use kube::api::TypeMeta;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// One step.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Give the pool these finalizers.
    Finalizers(Vec<String>),
    /// Give a deleted pool these finalizers, so that it may go, and then publish the event.
    Release(Vec<String>, Option<Event>),
    /// Make sure that the pool's managed servers have a password.
    Password,
    /// Apply an object of the pool.
    Apply(Box<Application>),
    /// Delete an object that the pool does not want any more.
    Delete(TypeMeta, String),
    /// Create the Job that purges the pool's shared tiers.
    CreateJob(Value),
    /// Write the status, and then publish an event for each condition that changed.
    Status(Box<KVCachePoolStatus>, Vec<Event>),
    /// Publish an event.
    Event(Event),
    /// Add one to a counter, under this label.
    Count(&'static str, String),
    /// Evict a pod that hangs.
    Replace(Arc<Pod>),
    /// Evict a pod that the webhook missed.
    Evict(Arc<Pod>),
    /// Update running pods to these settings.
    Update(pods::Step, Box<Settings>),
    /// Start the next pass within this time.
    Requeue(Duration),
}
