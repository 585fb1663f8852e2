//! What injection answers, and the annotation by which a pod tells it to everybody.

use super::{Lack, Reason, Shortfall};
use crate::names;
use json_patch::Patch;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What becomes of a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Nothing to do: it has all it needs, or is none that can be changed.
    Unchanged,
    /// It gets its sidecar, or what another webhook took from it.
    Inject {
        /// What to change; never empty.
        patch: Patch,
        /// As the annotation says it.
        report: Report,
        /// What it lacks all the same.
        shortfall: Option<Shortfall>,
    },
    /// It starts without us.
    Refuse {
        /// Why.
        reason: Reason,
        /// Why, for this pod.
        message: String,
        /// Stamps the annotation; empty where it says so already.
        patch: Patch,
    },
}

/// Injected or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The sidecar is in the pod.
    Injected,
    /// The pod starts without it.
    Refused,
}

/// The annotation `kvcachepool.io/injection`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Injected or not.
    pub result: Verdict,
    /// Name of the [`Reason`] of a refusal, or of the [`Shortfall`] of a pod that has its sidecar.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What that means for this pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Version of the operator that decided.
    pub version: String,
    /// [`Settings::hash`](super::Settings::hash) of what was injected.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hash: String,
}

/// Longest message in an annotation: what a Kubernetes Event takes.
const MESSAGE_BYTES: usize = 1000;

impl Report {
    /// The sidecar is in the pod, made by settings of this hash, and lacks this.
    pub(super) fn injected(hash: String, lack: Option<&Lack>) -> Self {
        let [reason, message] = lack.map_or(["", ""], |lack| [lack.reason.name(), &lack.message]);
        Self {
            result: Verdict::Injected,
            reason: reason.to_string(),
            message: cut(message),
            version: env!("CARGO_PKG_VERSION").to_string(),
            hash,
        }
    }

    /// The pod starts without us.
    pub fn refused(reason: Reason, message: &str) -> Self {
        Self {
            result: Verdict::Refused,
            reason: reason.name().to_string(),
            message: cut(message),
            version: env!("CARGO_PKG_VERSION").to_string(),
            hash: String::new(),
        }
    }

    /// Reads the annotation of a pod; `None` where there is none that can be read.
    pub fn of(pod: &Value) -> Option<Self> {
        let text = pod
            .pointer("/metadata/annotations")?
            .get(names::INJECTION)?
            .as_str()?;
        serde_json::from_str(text).ok()
    }

    /// The annotation's text.
    pub fn text(&self) -> String {
        json!(self).to_string()
    }
}

fn cut(message: &str) -> String {
    message[..message.floor_char_boundary(MESSAGE_BYTES)].to_string()
}
