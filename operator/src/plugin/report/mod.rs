//! `report`: an archive for a bug report. What cannot be read is noted, and the rest is written. Every object and log passes `redact`.

mod bundle;
mod redact;

use super::args::Report as Args;
use super::doctor::facts::{CRD, LEASE, WEBHOOK, operator_pods};
use super::doctor::{self, facts::Fact};
use super::explain::explain;
use super::logs::OPERATOR_CONTAINER;
use super::read::{Cluster, Pools, ReadError, failed};
use crate::names;
use bundle::Bundle;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, LogParams};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

/// Longest log of a container.
const LOG_BYTES_MAX: i64 = 16 << 20;
/// Maximum objects of a kind in a list, such as events of a namespace.
const OBJECTS_MAX: u32 = 5_000;
/// Kinds of objects that the operator creates for pools.
const CHILDREN: [(&str, &str, &str); 5] = [
    ("", "v1", "ConfigMap"),
    ("", "v1", "Service"),
    ("apps", "v1", "StatefulSet"),
    ("policy", "v1", "PodDisruptionBudget"),
    ("networking.k8s.io", "v1", "NetworkPolicy"),
];

/// A written archive.
pub struct Written {
    pub path: PathBuf,
    pub files: usize,
    /// What could not be read.
    pub errors: Vec<String>,
}

/// Writes the archive.
pub async fn report(cluster: &Cluster, args: &Args) -> Result<Written, Box<dyn std::error::Error>> {
    // Before anything is written: without an API server there is nothing to report.
    let pools = match &args.pool {
        Some(name) => cluster.pools(Some(name), false).await?,
        None => cluster.pools(None, args.all_namespaces).await?,
    };
    let now = Timestamp::now();
    let root = format!("kvcachepool-report-{}", now.strftime("%Y%m%d-%H%M%S"));
    let path = args.file.clone();
    let path = path.unwrap_or_else(|| PathBuf::from(format!("{root}.tar.gz")));
    let bundle = Bundle::create(&path, &root, now);
    let bundle = bundle.map_err(|e| format!("cannot create {}: {e}", path.display()))?;
    let mut report = Report {
        cluster,
        args,
        bundle,
    };
    report.installation().await?;
    report.operator().await?;
    report.pools(&pools).await?;
    let (files, errors) = report.bundle.finish()?;
    Ok(Written {
        path,
        files,
        errors,
    })
}

struct Report<'a> {
    cluster: &'a Cluster,
    args: &'a Args,
    bundle: Bundle,
}

impl Report<'_> {
    /// The findings of `doctor`, versions, the CRD and the webhook.
    async fn installation(&mut self) -> io::Result<()> {
        let operator = self.args.operator.operator_namespace.as_deref();
        let found = doctor::doctor(self.cluster, operator, self.args.all_namespaces).await;
        self.bundle.add("doctor.txt", &found.text())?;
        let server = self.cluster.client().apiserver_version().await;
        let versions =
            server.map(|server| json!({"plugin": env!("CARGO_PKG_VERSION"), "kubernetes": server}));
        self.bundle
            .add_read("versions.yaml", versions.map(|v| yaml(&v)))?;
        let kinds = [
            ("apiextensions.k8s.io", "CustomResourceDefinition", CRD),
            (
                "admissionregistration.k8s.io",
                "MutatingWebhookConfiguration",
                WEBHOOK,
            ),
        ];
        for (group, kind, name) in kinds {
            let api = self.api(group, "v1", kind, None);
            let found = object(&api, name).await;
            self.bundle
                .add_read(&format!("cluster/{name}.yaml"), found)?;
        }
        Ok(())
    }

    /// The operator's pods with logs and metrics, its Lease, Deployments and events.
    async fn operator(&mut self) -> io::Result<()> {
        let asked = self.args.operator.operator_namespace.as_deref();
        let (there, pods) = match operator_pods(self.cluster, asked).await {
            Ok(found) => found,
            Err(e) => {
                self.bundle.note("operator", e);
                return Ok(());
            }
        };
        let namespace = there.namespace().to_owned();
        let lease = self.api("coordination.k8s.io", "v1", "Lease", Some(&namespace));
        let lease = object(&lease, LEASE).await;
        self.bundle.add_read("operator/lease.yaml", lease)?;
        self.list(
            "operator/deployments.yaml",
            ("apps", "v1", "Deployment"),
            &namespace,
            "",
        )
        .await?;
        self.events("operator/events.yaml", &namespace, |_| true)
            .await?;
        for pod in &pods {
            let Some(name) = pod.metadata.name.clone() else {
                continue;
            };
            let folder = format!("operator/{name}");
            self.pod(&folder, serde_json::to_value(pod).unwrap_or_default())?;
            self.logs(&folder, &there, &name, &[OPERATOR_CONTAINER], restarts(pod))
                .await?;
            let port = port(pod, "admin").unwrap_or(8080);
            for (path, file) in [("metrics", "metrics.txt"), ("readyz", "readyz.txt")] {
                let read = there.proxied(&name, port, path).await;
                self.bundle.add_read(&format!("{folder}/{file}"), read)?;
            }
        }
        Ok(())
    }

    async fn pools(&mut self, pools: &Pools) -> io::Result<()> {
        let mut namespaces: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for pool in &pools.pools {
            let meta = &pool.metadata;
            let namespace = meta.namespace.clone().unwrap_or_default();
            let name = meta.name.as_deref().unwrap_or_default();
            namespaces.entry(namespace).or_default().push(name);
        }
        for (name, error) in &pools.broken {
            self.bundle.note(&format!("pool {name}"), error);
        }
        for (namespace, pools) in namespaces {
            let there = self.cluster.within(&namespace);
            let folder = format!("namespaces/{namespace}");
            let mut pods = BTreeSet::new();
            for pool in &pools {
                let api = self.api(names::GROUP, "v1alpha1", "KVCachePool", Some(&namespace));
                let found = object(&api, pool).await;
                self.bundle
                    .add_read(&format!("{folder}/pools/{pool}.yaml"), found)?;
                pods.extend(self.pods_of(&folder, &there, pool).await?);
                pods.extend(self.servers(&folder, &there, pool).await?);
            }
            for (group, version, kind) in CHILDREN {
                let selector = format!("app.kubernetes.io/managed-by={}", names::FIELD_MANAGER);
                let path = format!("{folder}/{}s.yaml", kind.to_lowercase());
                self.list(&path, (group, version, kind), &namespace, &selector)
                    .await?;
            }
            let pools: BTreeSet<&str> = pools.into_iter().collect();
            let concerns = |event: &Value| {
                let name = event["regarding"]["name"].as_str().unwrap_or_default();
                let ours = event["reportingController"] == names::FIELD_MANAGER;
                ours || pools.contains(name) || pods.iter().any(|pod| pod.starts_with(name))
            };
            self.events(&format!("{folder}/events.yaml"), &namespace, concerns)
                .await?;
        }
        Ok(())
    }

    /// The pods of a pool. Returns their names.
    async fn pods_of(
        &mut self,
        folder: &str,
        there: &Cluster,
        pool: &str,
    ) -> io::Result<Vec<String>> {
        let folder = format!("{folder}/pods");
        let Some(pods) = self
            .some_pods(&folder, there, &format!("{}={pool}", names::POOL))
            .await
        else {
            return Ok(Vec::new());
        };
        let mut listed = Vec::new();
        for value in pods {
            let Ok(pod) = serde_json::from_value::<Pod>(value.clone()) else {
                continue;
            };
            let Some(name) = pod.metadata.name.clone() else {
                continue;
            };
            let folder = format!("{folder}/{name}");
            self.pod(&folder, value)?;
            let containers = [names::SIDECAR_CONTAINER, names::INIT_CONTAINER];
            let spec = pod.spec.as_ref();
            let init = spec.and_then(|s| s.init_containers.as_ref());
            let injected = init.into_iter().flatten().any(|c| c.name == containers[0]);
            if injected {
                self.logs(&folder, there, &name, &containers, restarts(&pod))
                    .await?;
                for (path, file) in [("v1/status", "status.json"), ("metrics", "metrics.txt")] {
                    let read = there.proxied(&name, names::ADMIN_PORT, path).await;
                    self.bundle.add_read(&format!("{folder}/{file}"), read)?;
                }
            }
            let explained = there.evidence(&name).await.map(|e| explain(&e).text());
            self.bundle
                .add_read(&format!("{folder}/explain.txt"), explained)?;
            listed.push(name);
        }
        Ok(listed)
    }

    /// The managed servers of a pool and their manager. Returns the names of their pods.
    async fn servers(
        &mut self,
        folder: &str,
        there: &Cluster,
        pool: &str,
    ) -> io::Result<Vec<String>> {
        let folder = format!("{folder}/servers");
        let selector = format!(
            "{} in ({},{}),{}={pool}",
            names::NAME,
            names::SERVERS,
            names::MANAGER,
            names::INSTANCE
        );
        let Some(pods) = self.some_pods(&folder, there, &selector).await else {
            return Ok(Vec::new());
        };
        let mut listed = Vec::new();
        for value in pods {
            let Some(name) = value["metadata"]["name"].as_str().map(str::to_owned) else {
                continue;
            };
            let folder = format!("{folder}/{name}");
            let container = value["spec"]["containers"][0]["name"].as_str();
            let container = container.unwrap_or_default().to_owned();
            let again = serde_json::from_value(value.clone()).is_ok_and(|pod| restarts(&pod));
            self.pod(&folder, value)?;
            self.logs(&folder, there, &name, &[&container], again)
                .await?;
            listed.push(name);
        }
        Ok(listed)
    }

    /// Pods by their labels, at most `--max-pods`, those that are not ready first.
    async fn some_pods(
        &mut self,
        folder: &str,
        there: &Cluster,
        selector: &str,
    ) -> Option<Vec<Value>> {
        let mut pods = match there.raw_pods(selector).await {
            Ok(pods) => pods,
            Err(e) => {
                self.bundle.note(folder, e);
                return None;
            }
        };
        pods.sort_by_key(is_ready);
        let most = usize::from(self.args.max_pods);
        if pods.len() > most {
            let left = pods.len() - most;
            let why = format!("{left} pods with {selector} are left out; raise --max-pods");
            self.bundle.note(folder, why);
            pods.truncate(most);
        }
        Some(pods)
    }

    fn pod(&mut self, folder: &str, mut pod: Value) -> io::Result<()> {
        redact::object(&mut pod);
        self.bundle.add(&format!("{folder}/pod.yaml"), &yaml(&pod))
    }

    /// Logs of containers, and those before their last restart.
    async fn logs(
        &mut self,
        folder: &str,
        there: &Cluster,
        pod: &str,
        containers: &[&str],
        restarted: bool,
    ) -> io::Result<()> {
        let api: Api<Pod> = there.api();
        for &container in containers {
            for previous in [false, true] {
                if previous && !restarted {
                    continue;
                }
                let params = LogParams {
                    container: Some(container.to_owned()),
                    previous,
                    since_seconds: i64::try_from(self.args.since.as_secs().max(1)).ok(),
                    tail_lines: Some(self.args.tail.into()),
                    limit_bytes: Some(LOG_BYTES_MAX),
                    ..LogParams::default()
                };
                let name = if previous { ".previous.log" } else { ".log" };
                let path = format!("{folder}/{container}{name}");
                let log = api.logs(pod, &params).await.map(|log| redact::log(&log));
                self.bundle.add_read(&path, log)?;
            }
        }
        Ok(())
    }

    /// Objects of a kind in a namespace; no file without objects.
    async fn list(
        &mut self,
        path: &str,
        (group, version, kind): (&str, &str, &str),
        namespace: &str,
        selector: &str,
    ) -> io::Result<()> {
        let api = self.api(group, version, kind, Some(namespace));
        let params = ListParams::default().labels(selector).limit(OBJECTS_MAX);
        match api.list(&params).await.map_err(failed(kind)) {
            Ok(found) if found.items.is_empty() => Ok(()),
            Ok(found) => {
                let objects = found.items.into_iter().map(plain).collect::<Vec<_>>();
                self.bundle.add(path, &yaml(&objects))
            }
            Err(e) => {
                self.bundle.note(path, e);
                Ok(())
            }
        }
    }

    /// Events of a namespace for which `concerns` returns true.
    async fn events(
        &mut self,
        path: &str,
        namespace: &str,
        concerns: impl Fn(&Value) -> bool,
    ) -> io::Result<()> {
        let api = self.api("events.k8s.io", "v1", "Event", Some(namespace));
        let found = api.list(&ListParams::default().limit(OBJECTS_MAX)).await;
        let found = found.map_err(failed("events")).map(|found| {
            let events = found.items.into_iter().map(plain);
            yaml(&events.filter(|event| concerns(event)).collect::<Vec<_>>())
        });
        self.bundle.add_read(path, found)
    }

    fn api(
        &self,
        group: &str,
        version: &str,
        kind: &str,
        namespace: Option<&str>,
    ) -> Api<DynamicObject> {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let client = self.cluster.client().clone();
        match namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &kind),
            None => Api::all_with(client, &kind),
        }
    }
}

/// An object without secrets, as YAML.
async fn object(api: &Api<DynamicObject>, name: &str) -> Fact<String> {
    let found = api.get_opt(name).await.map_err(failed(name));
    let found = found.map_err(|e| e.to_string())?;
    let found = found.ok_or_else(|| ReadError::NotFound(name.to_owned()).to_string())?;
    Ok(yaml(&plain(found)))
}

/// An object without secrets.
fn plain(object: DynamicObject) -> Value {
    let mut value = serde_json::to_value(object).unwrap_or_default();
    redact::object(&mut value);
    value
}

fn yaml(value: &impl Serialize) -> String {
    serde_yaml::to_string(value).unwrap_or_else(|e| format!("# cannot be written as YAML: {e}\n"))
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut ready = conditions.filter(|c| c["type"] == "Ready");
    ready.any(|c| c["status"] == "True")
}

/// Whether a container of the pod has restarted.
fn restarts(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    let lists = [&status.init_container_statuses, &status.container_statuses];
    let mut all = lists.into_iter().flatten().flatten();
    all.any(|container| container.restart_count > 0)
}

fn port(pod: &Pod, name: &str) -> Option<u16> {
    let containers = &pod.spec.as_ref()?.containers;
    let mut ports = containers.iter().flat_map(|c| c.ports.iter().flatten());
    let port = ports.find(|port| port.name.as_deref() == Some(name))?;
    u16::try_from(port.container_port).ok()
}
