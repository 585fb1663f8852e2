//! The disk tier's volume. It belongs to the sidecar alone, and must neither keep a node from being removed nor cause an eviction of vLLM.

use super::json;
use super::quantity::Quantity;
use crate::names;
use kvcachepool_protocol::config::Config;
use serde_json::{Value, json};

/// Location of the disk tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disk {
    /// A folder on the node's own disk.
    NodeDirectory,
    /// A volume that is created with the pod, of this storage class.
    Ephemeral(String),
}

/// Annotation for the cluster autoscaler: volumes that do not keep a node.
const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes";

impl Disk {
    /// The volume. Its size limits the tier's files.
    pub(super) fn volume(&self, config: &Config) -> Value {
        let size = Quantity::bytes(config.disk_volume_bytes()).to_string();
        let source = match self {
            Self::NodeDirectory => json!({"emptyDir": {"sizeLimit": size}}),
            Self::Ephemeral(class) => {
                json!({"ephemeral": {"volumeClaimTemplate": {"spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "storageClassName": class,
                    "resources": {"requests": {"storage": size}},
                }}}})
            }
        };
        let mut volume = json!({"name": names::DISK_VOLUME});
        json::object(&mut volume).extend(source.as_object().cloned().unwrap_or_default());
        volume
    }

    /// Bytes of the node's disk that the sidecar requests.
    pub(super) fn node_bytes(&self, config: &Config) -> Option<u64> {
        (*self == Self::NodeDirectory).then(|| config.disk_volume_bytes())
    }

    /// Without this annotation the cluster autoscaler would never remove a node with such a pod, because it treats every local volume as
    /// data to keep.
    pub(super) fn allow_scale_down(&self, pod: &mut Value) {
        if *self != Self::NodeDirectory {
            return;
        }
        let given = json::annotation(pod, SAFE_TO_EVICT).unwrap_or_default();
        let mut names: Vec<&str> = given
            .split(',')
            .map(str::trim)
            .filter(|n| !n.is_empty())
            .collect();
        if names.contains(&names::DISK_VOLUME) {
            return;
        }
        names.push(names::DISK_VOLUME);
        let names = names.join(",");
        let annotations = json::entry(json::entry(pod, "metadata"), "annotations");
        json::set_text(annotations, SAFE_TO_EVICT, &names);
    }
}

/// The sidecar's mount of the volume.
pub(super) fn mount() -> Value {
    json!({"name": names::DISK_VOLUME, "mountPath": names::DISK_PATH})
}
