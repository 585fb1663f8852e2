//! Files that the sidecar reads besides its config: credentials and certificates of shared tiers, from objects in the pod's namespace. The
//! pool determines which tier needs which file.

use serde_json::{Value, json};

/// Kind of the object with the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    Secret,
    ConfigMap,
}

/// Keys of one object that become files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Kind of the object.
    pub holder: Holder,
    /// Name of the object.
    pub name: String,
    /// Each key, and the path of its file below [`CONFIG_PATH`](crate::names::CONFIG_PATH).
    pub keys: Vec<(String, String)>,
}

impl Files {
    /// The source of a projected volume. It is optional: without the object or a key the pod starts, and the sidecar reports what is
    /// missing. The files appear when the object exists.
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
