//! The caBundle of the webhook's configuration. Every replica reads it; the leader writes only this field.

use super::authority::blocks;
use super::{PkiError, in_time};
use crate::names::FIELD_MANAGER;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

/// The MutatingWebhookConfiguration.
pub struct Configuration {
    api: Api<MutatingWebhookConfiguration>,
    name: String,
}

/// The trust settings of the configuration.
pub struct Trust {
    webhooks: Vec<String>,
    version: Option<String>,
    /// Certificates that every entry trusts, in the order of the first entry.
    pub bundle: Vec<String>,
    /// Whether all entries have the same caBundle.
    pub equal: bool,
}

impl Configuration {
    /// The configuration with this name.
    pub fn new(api: Api<MutatingWebhookConfiguration>, name: String) -> Self {
        Self { api, name }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn failed(&self, e: kube::Error) -> PkiError {
        PkiError::Configuration {
            name: self.name.clone(),
            source: Box::new(e),
        }
    }

    /// Reads the current state.
    pub async fn read(&self) -> Result<Trust, PkiError> {
        let read = in_time(self.api.get_opt(&self.name)).await;
        let found = read
            .map_err(|e| self.failed(e))?
            .ok_or_else(|| PkiError::NoConfiguration(self.name.clone()))?;
        let version = found.metadata.resource_version;
        let entries = found.webhooks.unwrap_or_default();
        if entries.is_empty() {
            return Err(PkiError::NoConfiguration(self.name.clone()));
        }
        let bundles: Vec<Vec<String>> = entries
            .iter()
            .map(|entry| {
                let bytes = entry.client_config.ca_bundle.as_ref();
                bytes.map_or_else(Vec::new, |b| blocks(&String::from_utf8_lossy(&b.0)))
            })
            .collect();
        let first = bundles.first().cloned().unwrap_or_default();
        Ok(Trust {
            version,
            webhooks: entries.into_iter().map(|entry| entry.name).collect(),
            equal: bundles.iter().all(|bundle| *bundle == first),
            bundle: first
                .into_iter()
                .filter(|c| bundles.iter().all(|bundle| bundle.contains(c)))
                .collect(),
        })
    }

    /// Sets the caBundle of every entry. Returns false if the object changed since it was read.
    pub async fn write(&self, trust: &Trust, bundle: &[String]) -> Result<bool, PkiError> {
        let bundle = ByteString(bundle.concat().into_bytes());
        let entries: Vec<_> = trust
            .webhooks
            .iter()
            .map(|name| json!({"name": name, "clientConfig": {"caBundle": bundle}}))
            .collect();
        let patch = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": self.name, "resourceVersion": trust.version},
            "webhooks": entries,
        });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(&patch);
        match in_time(self.api.patch(&self.name, &params, &patch)).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(e) => Err(self.failed(e)),
        }
    }
}
