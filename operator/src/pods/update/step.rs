//! The goal of an update, its steps, and its failures.

use crate::pods::Pod;
use crate::pods::rollout::Failure;
use std::sync::Arc;

/// The desired state of a pool's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goal<'a> {
    /// Image of the sidecar.
    pub image: &'a str,
    /// Generation of the pool, which is part of its config.
    pub generation: u64,
    /// Size of the memory tier in bytes.
    pub memory_bytes: u64,
    /// Whether working sidecars are updated too (`updateStrategy: InPlace`).
    pub in_place: bool,
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do.
    Wait,
    /// Give these pods the pool's config.
    Config(Vec<Arc<Pod>>),
    /// Take the next step of the resize of each of these pods.
    Resize(Vec<Arc<Pod>>),
    /// Give these pods the image.
    Image(Vec<Arc<Pod>>),
    /// Query this pod's new sidecar.
    Query(Arc<Pod>),
    /// Restore this pod's old image, because its sidecar did not start or did not keep running.
    RollBack(Arc<Pod>, PreviousSidecar),
}

/// The state of a pod before its image was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviousSidecar {
    /// Image of the sidecar.
    pub image: Box<str>,
    /// Hash of its settings; empty if unknown.
    pub hash: Box<str>,
    /// Why the image must be restored.
    pub(super) failure: Failure,
}

/// Why pods do not have the desired state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UpdateBlocker {
    /// The operator may not patch pods.
    NotAllowed(String),
    /// The API server refused a patch.
    Refused(String),
    /// A pod cannot get the pool's memory while it runs.
    NotResized(String),
    /// A sidecar failed with the image. No more are updated until the pool changes.
    RolledBack(String),
}
