//! Changes of the memory of a running sidecar, without a restart: its container by the pod's `resize` subresource, and the size in its
//! config. To grow, the container comes first; to shrink, the config comes first, and the container follows once the sidecar has shrunk.
//! All progress is in the pod, so that any leader can continue.

use super::pod::Pod;
use kvcachepool_protocol::config::Footprint;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The memory of a sidecar that can change while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// `memory.size` of the pod's config.
    pub size: u64,
    /// What else determines the container's memory.
    pub footprint: Footprint,
    /// Resources of the container in the spec.
    pub desired: Amounts,
    /// Resources of the container as the kubelet reports them. `None` if it does not.
    pub actual: Option<Amounts>,
    /// What the container is lowered to, while it has or gets more than the size in the config needs.
    pub lowered: Option<Lowered>,
    /// Why the kubelet does not apply the desired resources: reason and message.
    pub refused: Option<Box<str>>,
}

/// Memory of a container in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Amounts {
    pub request: u64,
    pub limit: u64,
}

/// The record in a pod whose memory is being changed: what its container is lowered to when the sidecar does not use more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lowered {
    #[serde(flatten)]
    pub to: Amounts,
    /// The API server's reply if it allows no smaller limit. Nothing is retried then.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub refused: Box<str>,
}

/// The next step of a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeStep {
    /// The pod has the desired memory, or as much of it as it can get.
    Done,
    /// Record what the container has, and raise it.
    Raise(Amounts),
    /// The kubelet has not applied the container's resources.
    AwaitKubelet,
    /// Write the size into the pod's config.
    SetSize,
    /// Lower the container's resources, if the sidecar has shrunk.
    Lower(Amounts),
    /// Remove the record of the lowered resources.
    Finish,
}

impl Amounts {
    fn covers(self, needed: u64) -> bool {
        self.request >= needed && self.limit >= needed
    }

    fn at_least(self, needed: u64) -> Self {
        Self {
            request: self.request.max(needed),
            limit: self.limit.max(needed),
        }
    }
}

impl Memory {
    /// The next step towards this size.
    #[must_use]
    pub fn next(&self, size: u64) -> ResizeStep {
        let needed = self.footprint.container_bytes(size);
        if self.size != size {
            let has_room = match self.actual {
                Some(actual) => actual.covers(needed),
                None => size < self.size,
            };
            let raised = self.actual.unwrap_or_default().at_least(needed);
            return match () {
                // Otherwise the kubelet may be about to lower it.
                () if has_room && self.desired.covers(needed) => ResizeStep::SetSize,
                () if self.desired == raised => ResizeStep::AwaitKubelet,
                () => ResizeStep::Raise(raised),
            };
        }
        match (&self.lowered, self.actual) {
            (Some(lowered), _) if !lowered.refused.is_empty() => ResizeStep::Done,
            (Some(lowered), _) if self.desired != lowered.to => ResizeStep::Lower(lowered.to),
            (Some(lowered), Some(actual)) if actual == lowered.to => ResizeStep::Finish,
            (Some(_), _) => ResizeStep::AwaitKubelet,
            (None, _) => ResizeStep::Done,
        }
    }

    /// What the container is lowered to if it is raised now and its config does not get another size.
    #[must_use]
    pub fn lowered_unless_used(&self) -> Lowered {
        let actual = self.actual.unwrap_or(self.desired);
        Lowered {
            to: self.lowered.as_ref().map_or(actual, |lowered| lowered.to),
            refused: "".into(),
        }
    }

    /// What the container is lowered to after its config got this size: by as much as the sidecar needs less. `None` if it does not have
    /// more than that.
    #[must_use]
    pub fn lowered_for(&self, size: u64) -> Option<Lowered> {
        let actual = self.actual.unwrap_or(self.desired);
        let before = self.footprint.container_bytes(self.size);
        let after = self.footprint.container_bytes(size);
        // Lower tiers that were removed from the config use their memory until the next restart, so this is not the need of the config.
        let had = self.lowered_unless_used().to;
        let to = |bytes: u64| bytes.saturating_add(after).saturating_sub(before);
        let to = Amounts {
            request: to(had.request),
            limit: to(had.limit),
        };
        (to.request < actual.request || to.limit < actual.limit).then(|| Lowered {
            to,
            refused: "".into(),
        })
    }
}

/// The resizes of a pool's pods.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resizes {
    /// Number of pods whose memory is being changed.
    pub running: u32,
    /// Name of one of them.
    pub example: Box<str>,
    /// Why a pod does not get the memory, with its name.
    pub refused: Option<String>,
}

impl Resizes {
    /// The resizes of these pods to this size.
    #[must_use]
    pub fn of(pods: &[Arc<Pod>], size: u64) -> Self {
        let mut resizes = Self::default();
        for pod in pods.iter().filter(|pod| pod.address().is_some()) {
            let Some(memory) = &pod.memory else { continue };
            let step = memory.next(size);
            let refused = refusal(memory, step);
            if let Some(why) = refused {
                let message = || format!("pod {}: {why}", pod.name);
                resizes.refused.get_or_insert_with(message);
            } else if step != ResizeStep::Done {
                resizes.running += 1;
                if resizes.example.is_empty() {
                    resizes.example = pod.name.clone();
                }
            }
        }
        resizes
    }
}

/// Why this step does not complete, if so.
fn refusal(memory: &Memory, step: ResizeStep) -> Option<String> {
    match (step, &memory.refused, &memory.lowered) {
        (ResizeStep::AwaitKubelet, Some(why), _) => Some(format!(
            "the kubelet does not change the memory of the sidecar's container: {why}"
        )),
        (ResizeStep::Done, _, Some(lowered)) if !lowered.refused.is_empty() => Some(format!(
            "the sidecar's container keeps a higher memory limit than it needs until the pod is created again: {}",
            lowered.refused
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
