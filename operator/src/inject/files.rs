//! Files that the sidecar reads beside its config: credentials and certificates for the tiers that pods share, out of objects of the
//! pod's namespace. Which tier needs which is the pool's to say.

use serde_json::{Value, json};

/// What holds the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// A Secret.
    Secret,
    /// A ConfigMap.
    ConfigMap,
}

/// Keys of one object that become files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// What holds them.
    pub holder: Holder,
    /// Name of the object.
    pub name: String,
    /// Each key, and the path of its file below [`CONFIG_PATH`](crate::names::CONFIG_PATH).
    pub keys: Vec<(String, String)>,
}

impl Files {
    /// The source of a projected volume. Optional: without the object, or a key of it, the pod starts, and the sidecar names what it
    /// lacks. Later it appears.
    pub(super) fn source(&self) -> Value {
        let items: Vec<Value> = self
            .keys
            .iter()
            .map(|(key, path)| json!({"key": key, "path": path}))
            .collect();
        let kind = match self.holder {
            Holder::Secret => "secret",
            Holder::ConfigMap => "configMap",
        };
        json!({kind: {"name": self.name, "items": items, "optional": true}})
    }
}
