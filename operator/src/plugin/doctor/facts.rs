//! What `doctor` and `report` read of an installation. Each fact is read on its own, so that a missing right costs only one.

use crate::canary::pod::canary_pod;
use crate::plugin::read::{Cluster, Pools, ReadError, failed};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ListParams, PostParams};

/// Name of the chart's MutatingWebhookConfiguration.
pub const WEBHOOK: &str = "kvcachepool-injector";
/// Name of the operator's Lease.
pub const LEASE: &str = "kvcachepool-operator";
/// Name of the CRD.
pub const CRD: &str = "kvcachepools.kvcachepool.io";
/// Namespace of the operator in the documentation.
const NAMESPACE: &str = "kvcachepool-system";
/// Labels of the operator's pods, if the webhook's Service cannot be read.
const SELECTOR: &str = "app.kubernetes.io/name=kvcachepool,app.kubernetes.io/component=operator";

/// A right, and what needs it.
#[derive(Debug, Clone, Copy)]
pub struct Right {
    pub verb: &'static str,
    pub group: &'static str,
    /// Resource, or resource/subresource.
    pub resource: &'static str,
    /// Commands that need it.
    pub commands: &'static str,
}

const fn right(
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    commands: &'static str,
) -> Right {
    Right {
        verb,
        group,
        resource,
        commands,
    }
}

/// The rights that the plugin's commands need in the namespace of a pool.
pub const RIGHTS: [Right; 9] = [
    right("list", "kvcachepool.io", "kvcachepools", "status, report"),
    right("patch", "kvcachepool.io", "kvcachepools", "pause, resume"),
    right("list", "", "pods", "status, explain, logs, reload, report"),
    right("get", "", "pods/log", "logs, check, purge, report"),
    right("get", "", "pods/proxy", "explain, reload, report"),
    right("patch", "", "pods", "reload"),
    right("list", "", "events", "check, report"),
    right("create", "batch", "jobs", "check, purge"),
    right("delete", "batch", "jobs", "check, purge"),
];

/// A fact, or why it is unknown.
pub type Fact<T> = Result<T, String>;

/// What was read.
pub struct Facts {
    pub now: Timestamp,
    /// Minor version of Kubernetes 1.
    pub kubernetes: Fact<u32>,
    pub crd: Fact<Option<CustomResourceDefinition>>,
    pub webhook: Fact<Option<MutatingWebhookConfiguration>>,
    /// Namespace of the operator.
    pub namespace: String,
    pub operator: Fact<Vec<Pod>>,
    pub lease: Fact<Option<Lease>>,
    /// A labelled pod of a dry run, as the API server returned it.
    pub canary: Fact<Pod>,
    /// Whether the user has each of [`RIGHTS`].
    pub rights: Vec<(Right, Fact<bool>)>,
    pub pools: Fact<Pools>,
}

impl Facts {
    /// Reads an installation, and the pools of the namespace or of all.
    pub async fn read(cluster: &Cluster, operator: Option<&str>, everywhere: bool) -> Self {
        let webhook: Api<MutatingWebhookConfiguration> = Api::all(cluster.client().clone());
        let webhook = webhook.get_opt(WEBHOOK).await;
        let webhook = webhook.map_err(failed(&format!("MutatingWebhookConfiguration {WEBHOOK}")));
        let there = cluster.within(&namespace(webhook.as_ref().ok(), operator));
        let crds: Api<CustomResourceDefinition> = Api::all(cluster.client().clone());
        let crd = crds.get_opt(CRD).await;
        let lease: Api<Lease> = there.api();
        let lease = lease.get_opt(LEASE).await;
        let pods = replicas(&there, webhook.as_ref().ok()).await;
        let mut rights = Vec::new();
        for right in RIGHTS {
            rights.push((right, allowed(cluster, right).await));
        }
        Self {
            now: Timestamp::now(),
            kubernetes: kubernetes(cluster).await,
            crd: text(crd.map_err(failed(&format!("CustomResourceDefinition {CRD}")))),
            lease: text(lease.map_err(failed(&format!("Lease {LEASE}")))),
            operator: text(pods),
            webhook: text(webhook),
            canary: text(canary(&there).await),
            rights,
            pools: text(cluster.pools(None, everywhere).await),
            namespace: there.namespace().to_owned(),
        }
    }
}

/// The operator's pods, and the cluster with their namespace.
pub async fn operator_pods(
    cluster: &Cluster,
    asked: Option<&str>,
) -> Result<(Cluster, Vec<Pod>), ReadError> {
    let webhook: Api<MutatingWebhookConfiguration> = Api::all(cluster.client().clone());
    let webhook = webhook.get_opt(WEBHOOK).await.ok();
    let there = cluster.within(&namespace(webhook.as_ref(), asked));
    let pods = replicas(&there, webhook.as_ref()).await?;
    Ok((there, pods))
}

fn text<T>(read: Result<T, ReadError>) -> Fact<T> {
    read.map_err(|e| e.to_string())
}

type Webhook = Option<MutatingWebhookConfiguration>;

/// Namespace and name of the webhook's Service.
fn service(webhook: Option<&Webhook>) -> Option<(String, String)> {
    let webhooks = webhook?.as_ref()?.webhooks.as_ref()?;
    let service = webhooks.first()?.client_config.service.as_ref()?;
    Some((service.namespace.clone(), service.name.clone()))
}

fn namespace(webhook: Option<&Webhook>, asked: Option<&str>) -> String {
    let found = || service(webhook).map(|(namespace, _)| namespace);
    let asked = asked.map(str::to_owned).or_else(found);
    asked.unwrap_or_else(|| NAMESPACE.to_owned())
}

/// The pods that the webhook's Service selects; a chart with another name has other labels.
async fn replicas(there: &Cluster, webhook: Option<&Webhook>) -> Result<Vec<Pod>, ReadError> {
    let services: Api<Service> = there.api();
    let selector = match service(webhook) {
        Some((_, name)) => services.get_opt(&name).await.ok().flatten(),
        None => None,
    };
    let selector = selector.and_then(|s| s.spec?.selector);
    let selector = selector.map_or(SELECTOR.to_owned(), |labels| {
        let labels = labels.iter().map(|(key, value)| format!("{key}={value}"));
        labels.collect::<Vec<_>>().join(",")
    });
    let pods: Api<Pod> = there.api();
    let found = pods.list(&ListParams::default().labels(&selector)).await;
    let what = format!("pods of the operator in namespace {}", there.namespace());
    Ok(found.map_err(failed(&what))?.items)
}

async fn kubernetes(cluster: &Cluster) -> Fact<u32> {
    let version = cluster.client().apiserver_version().await;
    let version = version.map_err(|e| e.to_string())?;
    // Some providers write `33+`.
    let digits: String = version
        .minor
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits
        .parse()
        .map_err(|_| format!("unexpected version {}.{}", version.major, version.minor))
}

async fn canary(there: &Cluster) -> Result<Pod, ReadError> {
    let pod: Pod = serde_json::from_value(canary_pod("kvcachepool-doctor"))?;
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let pods: Api<Pod> = there.api();
    let what = "the reply to a pod that is created by dry run in the operator's namespace";
    pods.create(&params, &pod).await.map_err(failed(what))
}

async fn allowed(cluster: &Cluster, right: Right) -> Fact<bool> {
    let (resource, subresource) = match right.resource.split_once('/') {
        Some((resource, sub)) => (resource, Some(sub.to_owned())),
        None => (right.resource, None),
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                namespace: Some(cluster.namespace().to_owned()),
                verb: Some(right.verb.to_owned()),
                group: Some(right.group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource,
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let api: Api<SelfSubjectAccessReview> = Api::all(cluster.client().clone());
    let review = api.create(&PostParams::default(), &review).await;
    let status = review.map_err(|e| e.to_string())?.status;
    let empty = || "the API server returned no result".to_owned();
    status.map(|s| s.allowed).ok_or_else(empty)
}
