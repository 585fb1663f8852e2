//! Whether the API server calls the webhook for the pods of a namespace, according to the webhook's selectors.

use super::executor::Executor;
use crate::pods::Pod;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Namespace;
use kube::core::{Selector, SelectorExt};
use kube::{Api, ResourceExt};
use std::collections::BTreeMap;

impl Executor<'_> {
    /// Why a replacement of the pod would not be injected: the webhook excludes its namespace, or that cannot be read.
    pub(super) async fn namespace_objection(&self, pod: &Pod) -> Option<String> {
        let client = &self.context.client;
        let configurations: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
        let name = &self.context.webhook_configuration;
        let configuration = match configurations.get(name).await {
            Ok(configuration) => configuration,
            Err(e) => {
                return Some(format!(
                    "MutatingWebhookConfiguration {name} cannot be read: {e}"
                ));
            }
        };
        let namespaces: Api<Namespace> = Api::all(client.clone());
        match namespaces.get(&pod.namespace).await {
            Ok(namespace) if excludes(&configuration, namespace.labels()) => Some(
                "the webhook excludes its namespace, so a replacement would have no sidecar either"
                    .to_owned(),
            ),
            Ok(_) => None,
            Err(e) => Some(format!("namespace {} cannot be read: {e}", pod.namespace)),
        }
    }
}

/// Whether no webhook of the configuration selects a namespace with these labels.
fn excludes(
    configuration: &MutatingWebhookConfiguration,
    labels: &BTreeMap<String, String>,
) -> bool {
    let webhooks = configuration.webhooks.iter().flatten();
    let mut selectors = webhooks.map(|webhook| webhook.namespace_selector.clone());
    !selectors.any(
        |selector| match Selector::try_from(selector.unwrap_or_default()) {
            Ok(selector) => selector.matches(labels),
            // The API server does not store such a selector.
            Err(_) => false,
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_namespace_is_excluded_by_name_or_by_label() {
        let configuration = |selector: Value| -> MutatingWebhookConfiguration {
            let webhook = json!({
                "name": "label.kvcachepool.io", "admissionReviewVersions": ["v1"], "clientConfig": {},
                "sideEffects": "None", "namespaceSelector": selector,
            });
            serde_json::from_value(json!({"webhooks": [webhook]})).unwrap()
        };
        let ours = configuration(json!({"matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]},
            {"key": "kvcachepool.io/injection", "operator": "NotIn", "values": ["disabled"]},
        ]}));
        let labels = |pairs: &[(&str, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            pairs.collect::<BTreeMap<_, _>>()
        };
        let name = "kubernetes.io/metadata.name";
        assert!(!excludes(&ours, &labels(&[(name, "serving")])));
        assert!(excludes(&ours, &labels(&[(name, "kube-system")])));
        let disabled = [(name, "serving"), ("kvcachepool.io/injection", "disabled")];
        assert!(excludes(&ours, &labels(&disabled)));
        assert!(!excludes(&configuration(json!({})), &labels(&[])));
        assert!(excludes(
            &MutatingWebhookConfiguration::default(),
            &labels(&[])
        ));
    }
}
