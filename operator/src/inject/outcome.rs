//! The result of injection, and the annotation that records it.

use super::{Reason, Shortfall, ShortfallDetail};
use crate::names;
use json_patch::Patch;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The result for a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Nothing to do: the pod is complete, or cannot be changed.
    Unchanged,
    /// The pod gets its sidecar, or a repair.
    Inject {
        /// The changes; never empty.
        patch: Patch,
        /// The content of the annotation.
        report: Report,
        /// What the injected pod lacks.
        shortfall: Option<Shortfall>,
    },
    /// The pod starts without a sidecar.
    Refuse {
        reason: Reason,
        /// The reason in this pod.
        message: String,
        /// Writes the annotation; empty if it is already correct.
        patch: Patch,
    },
}

/// Whether the pod was injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The pod has the sidecar.
    Injected,
    /// The pod starts without a sidecar.
    Refused,
}

/// The annotation `kvcachepool.io/injection`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub result: Verdict,
    /// Name of the [`Reason`] of a refusal, or of the [`Shortfall`] of an injected pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What the reason means for this pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Version of the operator that decided.
    pub version: String,
    /// [`Settings::hash`](super::Settings::hash) of the injected settings.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hash: String,
}

/// Longest message in an annotation, limited by Kubernetes Events.
const MESSAGE_BYTES: usize = 1000;

impl Report {
    /// The pod has the sidecar with settings of this hash, and this shortfall.
    pub(super) fn injected(hash: String, shortfall: Option<&ShortfallDetail>) -> Self {
        let [reason, message] = shortfall.map_or(["", ""], |shortfall| {
            [shortfall.reason.name(), &shortfall.message]
        });
        Self {
            result: Verdict::Injected,
            reason: reason.to_string(),
            message: cut(message),
            version: env!("CARGO_PKG_VERSION").to_string(),
            hash,
        }
    }

    /// The pod starts without a sidecar.
    pub fn refused(reason: Reason, message: &str) -> Self {
        Self {
            result: Verdict::Refused,
            reason: reason.name().to_string(),
            message: cut(message),
            version: env!("CARGO_PKG_VERSION").to_string(),
            hash: String::new(),
        }
    }

    /// Parses the annotation of a pod. `None` if it is missing or invalid.
    pub fn of(pod: &Value) -> Option<Self> {
        let text = pod
            .pointer("/metadata/annotations")?
            .get(names::INJECTION)?
            .as_str()?;
        serde_json::from_str(text).ok()
    }

    pub fn text(&self) -> String {
        json!(self).to_string()
    }
}

fn cut(message: &str) -> String {
    message[..message.floor_char_boundary(MESSAGE_BYTES)].to_string()
}
