//! Whether the API server calls the webhook for a pod, according to the webhook's selectors.

use super::executor::Executor;
use crate::pods::Pod;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration};
use k8s_openapi::api::core::v1::{Namespace, Pod as FullPod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::ListParams;
use kube::core::{Selector, SelectorExt};
use kube::{Api, ResourceExt};
use std::collections::BTreeMap;

type Labels = BTreeMap<String, String>;

impl Executor<'_> {
    /// Why a replacement of the pod would not be injected: the webhook excludes its namespace or its labels, or these cannot be read.
    pub(super) async fn selector_objection(&self, pod: &Pod) -> Option<String> {
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
        let namespace = match namespaces.get(&pod.namespace).await {
            Ok(namespace) => namespace,
            Err(e) => return Some(format!("namespace {} cannot be read: {e}", pod.namespace)),
        };
        let pods: Api<FullPod> = Api::namespaced(client.clone(), &pod.namespace);
        // The operator may list pods, and not get one.
        let this = ListParams::default().fields(&format!("metadata.name={}", pod.name));
        let found = match pods.list_metadata(&this).await {
            Ok(found) => found.items.into_iter().next(),
            Err(e) => return Some(format!("the pod cannot be read: {e}")),
        };
        // Without the pod there is nothing to evict.
        objection(&configuration, namespace.labels(), found?.labels())
    }
}

/// Why no webhook of the configuration selects a pod with these labels in a namespace with those.
fn objection(
    configuration: &MutatingWebhookConfiguration,
    namespace: &Labels,
    pod: &Labels,
) -> Option<String> {
    let webhooks = configuration.webhooks.iter().flatten();
    let here: Vec<&MutatingWebhook> = webhooks
        .filter(|webhook| selects(webhook.namespace_selector.as_ref(), namespace))
        .collect();
    let excluded = match here.is_empty() {
        true => "namespace",
        false => "labels",
    };
    let selected = |webhook: &&MutatingWebhook| selects(webhook.object_selector.as_ref(), pod);
    (!here.iter().any(selected)).then(|| {
        format!(
            "the webhook excludes its {excluded}, so a replacement would have no sidecar either"
        )
    })
}

fn selects(selector: Option<&LabelSelector>, labels: &Labels) -> bool {
    // The API server does not store a selector that is not valid.
    Selector::try_from(selector.cloned().unwrap_or_default())
        .is_ok_and(|selector| selector.matches(labels))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const NAME: &str = "kubernetes.io/metadata.name";

    fn configuration(selectors: &[(Value, Value)]) -> MutatingWebhookConfiguration {
        let webhook = |(namespaces, pods): &(Value, Value)| {
            json!({
                "name": "label.kvcachepool.io", "admissionReviewVersions": ["v1"], "clientConfig": {}, "sideEffects": "None",
                "namespaceSelector": namespaces, "objectSelector": pods,
            })
        };
        let webhooks: Vec<Value> = selectors.iter().map(webhook).collect();
        serde_json::from_value(json!({"webhooks": webhooks})).unwrap()
    }

    fn excluded(
        configuration: &MutatingWebhookConfiguration,
        namespace: &[(&str, &str)],
        pod: &[(&str, &str)],
    ) -> Option<&'static str> {
        let labels = |pairs: &[(&str, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            pairs.collect::<Labels>()
        };
        let why = objection(configuration, &labels(namespace), &labels(pod))?;
        let parts = ["namespace", "labels"];
        let part = parts
            .into_iter()
            .find(|part| why.contains(&format!("its {part},")));
        Some(part.unwrap())
    }

    #[test]
    fn a_namespace_is_excluded_by_name_or_by_label() {
        let namespaces = json!({"matchExpressions": [
            {"key": NAME, "operator": "NotIn", "values": ["kube-system"]},
            {"key": "kvcachepool.io/injection", "operator": "NotIn", "values": ["disabled"]},
        ]});
        let ours = configuration(&[(namespaces, json!({}))]);
        assert_eq!(excluded(&ours, &[(NAME, "serving")], &[]), None);
        assert_eq!(
            excluded(&ours, &[(NAME, "kube-system")], &[]),
            Some("namespace")
        );
        let disabled = [(NAME, "serving"), ("kvcachepool.io/injection", "disabled")];
        assert_eq!(excluded(&ours, &disabled, &[]), Some("namespace"));
        assert_eq!(
            excluded(&configuration(&[(json!({}), json!({}))]), &[], &[]),
            None
        );
        let none = MutatingWebhookConfiguration::default();
        assert_eq!(excluded(&none, &[], &[]), Some("namespace"));
    }

    #[test]
    fn a_pod_is_excluded_by_labels_that_the_chart_asks_for() {
        let pods = json!({"matchLabels": {"team": "search"}});
        let canary = json!({"matchLabels": {"kvcachepool.io/pool": "kvcachepool-canary"}});
        let system = json!({"matchLabels": {NAME: "kvcachepool-system"}});
        let ours = configuration(&[(json!({}), pods), (system, canary)]);
        let pool = ("kvcachepool.io/pool", "llama");
        assert_eq!(excluded(&ours, &[], &[pool, ("team", "search")]), None);
        assert_eq!(excluded(&ours, &[], &[pool]), Some("labels"));
        let in_system = [(NAME, "kvcachepool-system")];
        assert_eq!(excluded(&ours, &in_system, &[pool]), Some("labels"));
    }
}
