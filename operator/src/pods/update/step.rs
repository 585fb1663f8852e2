//! What an update aims at, its steps, and what keeps it from its aim.

use crate::pods::Pod;
use crate::pods::away::Trouble;
use std::sync::Arc;

/// What the pods of a pool shall have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goal<'a> {
    /// Image of the sidecar.
    pub image: &'a str,
    /// Generation of the pool, which its config carries.
    pub generation: u64,
    /// Sidecars that work are exchanged too (`updateStrategy: InPlace`).
    pub in_place: bool,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Rest,
    /// Give these pods the pool's config.
    Config(Vec<Arc<Pod>>),
    /// Give these pods the image.
    Image(Vec<Arc<Pod>>),
    /// Ask this pod's new sidecar for its status.
    Ask(Arc<Pod>),
    /// Give this pod the image that it had; its sidecar did not come up, or did not stay.
    Back(Arc<Pod>, Was),
}

/// What a pod had before its image was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Was {
    /// Image of the sidecar.
    pub image: Box<str>,
    /// Hash of its settings; empty when unknown.
    pub hash: Box<str>,
    /// Why it shall have it again.
    pub(super) trouble: Trouble,
}

/// Why pods are not as they shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setback {
    /// The operator may not patch pods.
    NotAllowed(String),
    /// The API server did not take a patch.
    Refused(String),
    /// A sidecar did not work with the image; no more are exchanged until the pool changes.
    RolledBack(String),
}
