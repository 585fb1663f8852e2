//! A pod as the API server sends it, reduced during parsing: managed fields, foreign annotations and other containers are skipped without
//! being stored.

use super::pod::{
    Exit, ImageChange, Injection, Own, Owner, Phase, Pod, Sidecar, SidecarState, Waits, WaitsFor,
};
use super::resize::{Amounts, Memory};
use super::server::Server;
use super::unschedulable;
use crate::inject::{Quantity, Reason};
use crate::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::Resource;
use kvcachepool_protocol::config::Config;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// Labels and annotations that are parsed.
const PARSED_KEYS: [&str; 10] = [
    names::NAME,
    names::INSTANCE,
    names::POOL,
    names::LEADER_WORKER_SET,
    names::INJECTION,
    names::CONFIG,
    names::EXCHANGED,
    names::LOWERED,
    names::MEMORY,
    names::SHAPE,
];
/// Longest annotation of the operator that is parsed, in bytes.
const INJECTION_BYTES_MAX: usize = 4096;
/// Longest kubelet message that is kept, in characters.
const MESSAGE_CHARS_MAX: usize = 200;

/// The parsed part of a pod, before it becomes a [`Pod`].
#[derive(Debug, Clone, Default, Deserialize, Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
pub struct WirePod {
    #[serde(default, deserialize_with = "meta")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: WireSpec,
    #[serde(default)]
    status: WireStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireSpec {
    init_containers: Vec<WireContainer>,
    containers: Vec<WireOwn>,
    volumes: Vec<WireVolume>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireContainer {
    name: String,
    image: String,
    resources: Option<WireResources>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireResources {
    requests: WireMemory,
    limits: WireMemory,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireMemory {
    memory: String,
}

/// A container of the pod's own.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireOwn {
    name: String,
    volume_mounts: Vec<WireName>,
    env: Vec<WireVariable>,
    readiness_probe: Option<IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireName {
    name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireVariable {
    name: String,
    value: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireVolume {
    name: String,
    ephemeral: Option<IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireStatus {
    phase: Phase,
    #[serde(rename = "podIP")]
    pod_ip: String,
    conditions: Vec<WireCondition>,
    nominated_node_name: String,
    init_container_statuses: Vec<WireContainerStatus>,
    container_statuses: Vec<WireContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireCondition {
    r#type: String,
    status: String,
    reason: String,
    message: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireContainerStatus {
    name: String,
    image: String,
    restart_count: u32,
    resources: Option<WireResources>,
    state: WireState,
    last_state: WireState,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireState {
    waiting: Option<WireReason>,
    running: Option<WireRunning>,
    terminated: Option<WireEnd>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireEnd {
    exit_code: i32,
    reason: String,
    message: String,
    started_at: Option<Time>,
    finished_at: Option<Time>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct WireReason {
    reason: String,
    message: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireRunning {
    started_at: Option<Time>,
}

/// The parsed part of the metadata.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMeta {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    #[serde(default, deserialize_with = "parsed_entries")]
    labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "parsed_entries")]
    annotations: BTreeMap<String, String>,
    owner_references: Option<Vec<OwnerReference>>,
}

fn meta<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let wire = WireMeta::deserialize(deserializer)?;
    Ok(ObjectMeta {
        name: wire.name,
        namespace: wire.namespace,
        uid: wire.uid,
        resource_version: wire.resource_version,
        creation_timestamp: wire.creation_timestamp,
        deletion_timestamp: wire.deletion_timestamp,
        labels: Some(wire.labels),
        annotations: Some(wire.annotations),
        owner_references: wire.owner_references,
        ..ObjectMeta::default()
    })
}

/// Keeps the labels that name a pool and the operator's annotations. Other values are not copied.
fn parsed_entries<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    struct ParsedEntries;
    impl<'de> Visitor<'de> for ParsedEntries {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map of strings")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(BTreeMap::new())
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut parsed = BTreeMap::new();
            while let Some(key) = map.next_key::<Cow<'_, str>>()? {
                if PARSED_KEYS.contains(&&*key) {
                    parsed.insert(key.into_owned(), map.next_value()?);
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok(parsed)
        }
    }
    deserializer.deserialize_any(ParsedEntries)
}

impl Pod {
    /// Parses a pod. `None` without a name, a namespace or a pool, by label or by annotation.
    #[must_use]
    pub fn read(mut pod: serde_json::Value) -> Option<Self> {
        let meta = pod.get_mut("metadata")?.as_object_mut()?;
        let annotation = meta.get("annotations").and_then(|a| a.get(names::POOL));
        if let Some(annotation) = annotation.cloned() {
            let labels = meta.entry("labels").or_insert(serde_json::Value::Null);
            if labels.is_null() {
                *labels = serde_json::Map::new().into();
            }
            let label = labels.as_object_mut()?.entry(names::POOL);
            let label = label.or_insert(serde_json::Value::Null);
            if label.is_null() {
                *label = annotation;
            }
        }
        serde_json::from_value::<WirePod>(pod).ok()?.into_pod()
    }
}

impl WirePod {
    /// The slim pod. `None` without a name, a namespace or the pool label.
    #[must_use]
    pub fn into_pod(mut self) -> Option<Pod> {
        let meta = self.metadata;
        let waits = self.status.waits(self.spec.has_claim()).map(Box::new);
        let config = meta
            .annotations
            .as_ref()
            .and_then(|a| Config::parse(a.get(names::CONFIG)?, true).ok())
            .map(|(config, _)| config);
        let memory = config.as_ref().and_then(|config| {
            let lowered = meta.annotations.as_ref()?.get(names::LOWERED);
            let mut memory = memory(config, &self.spec.init_containers, &self.status)?;
            memory.lowered = lowered.and_then(|text| serde_json::from_str(text).ok());
            (!meta.annotations.as_ref()?.contains_key(names::MEMORY)).then(|| Box::new(memory))
        });
        let (init, own) = (self.spec.init_containers, self.spec.containers);
        let init_statuses = std::mem::take(&mut self.status.init_container_statuses);
        let sidecar = sidecar(init, init_statuses);
        let injection: Option<Injection> = meta
            .annotations
            .as_ref()
            .and_then(|a| a.get(names::INJECTION))
            .filter(|text| text.len() <= INJECTION_BYTES_MAX)
            .map(|text| serde_json::from_str(text).unwrap_or_else(|_| Injection::default()));
        let image_change = meta
            .annotations
            .as_ref()
            .and_then(|a| a.get(names::EXCHANGED))
            .filter(|text| text.len() <= INJECTION_BYTES_MAX)
            .and_then(|text| serde_json::from_str::<ImageChange>(text).ok())
            .map(Box::new);
        let paused = injection
            .as_ref()
            .is_some_and(|i| *i.reason == *Reason::InjectionPaused.name());
        let own = own
            .into_iter()
            .filter(|one| paused || (sidecar.is_some() && one.is_engine()))
            .map(|one| one.joined(&mut self.status.container_statuses))
            .collect();
        let mut labels = meta.labels?;
        let group = labels.get(names::LEADER_WORKER_SET);
        let group = group.map(|name| Box::new(Owner::leader_worker_set(name)));
        Some(Pod {
            name: meta.name?.into(),
            namespace: meta.namespace?.into(),
            uid: meta.uid.unwrap_or_default().into(),
            pool: labels.remove(names::POOL)?.into(),
            created: meta.creation_timestamp.map(|t| t.0).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            phase: self.status.phase,
            ready: self.status.is_true("Ready"),
            disrupted: self.status.is_true("DisruptionTarget"),
            ip: self.status.pod_ip.parse().ok(),
            owner: meta
                .owner_references
                .unwrap_or_default()
                .into_iter()
                .find(|o| o.controller == Some(true))
                .map(|o| Owner {
                    api_version: o.api_version.into(),
                    kind: o.kind.into(),
                    name: o.name.into(),
                    uid: o.uid.into(),
                }),
            group,
            injection,
            config_generation: config.map(|config| config.pool.generation),
            memory,
            sidecar,
            image_change,
            waits,
            own,
        })
    }
}

impl WirePod {
    /// The managed server, or the manager. `None` without a name, a namespace or the label that names its pool.
    #[must_use]
    pub fn into_server(self) -> Option<Server> {
        let (meta, status) = (self.metadata, self.status);
        let deleting = meta.deletion_timestamp.is_some();
        let ready = status.is_true("Ready") && !deleting;
        let mut labels = meta.labels?;
        let is_manager = labels.get(names::NAME).is_some_and(|n| n == names::MANAGER);
        let shape = meta.annotations.and_then(|mut a| a.remove(names::SHAPE));
        Some(Server {
            name: meta.name?.into(),
            namespace: meta.namespace?.into(),
            pool: labels.remove(names::INSTANCE)?.into(),
            shape: is_manager.then(|| shape.unwrap_or_default().into()),
            ready,
            trouble: (!ready && !deleting)
                .then(|| status.server_trouble())
                .flatten(),
        })
    }
}

impl WireSpec {
    /// Whether a tier's volume comes from a claim: of the file system tier, or of a disk tier whose claim is created with the pod.
    fn has_claim(&self) -> bool {
        self.volumes.iter().any(|volume| match &*volume.name {
            names::FILE_SYSTEM_VOLUME => true,
            names::DISK_VOLUME => volume.ephemeral.is_some(),
            _ => false,
        })
    }
}

impl WireStatus {
    fn is_true(&self, kind: &str) -> bool {
        let mut conditions = self.conditions.iter();
        conditions.any(|c| c.r#type == kind && c.status == "True")
    }

    /// Reason and message of the kubelet, if it does not apply changed resources.
    fn resize_refused(&self) -> Option<Box<str>> {
        let refused = ["Deferred", "Infeasible", "Error"];
        let mut conditions = self.conditions.iter();
        let condition = conditions.find(|c| {
            c.r#type.starts_with("PodResize")
                && c.status == "True"
                && refused.contains(&c.reason.as_str())
        })?;
        Some(short(&format!(
            "{}: {}",
            condition.reason, condition.message
        )))
    }

    /// Why a container of a server's pod does not run, if there is a lasting reason. A container that exited is in trouble until the pod is
    /// ready, so that a crash loop is one trouble.
    fn server_trouble(self) -> Option<(Box<str>, Box<str>)> {
        if let Some(waits) = self.waits(false).filter(|w| w.what == WaitsFor::Node) {
            return Some(("Unschedulable".into(), waits.message));
        }
        let several = self.container_statuses.len() > 1;
        let trouble = |of: &WireContainerStatus, reason: &str, message: &str| {
            let message = match several {
                true => short(&format!("container {}: {message}", of.name)),
                false => short(message),
            };
            (reason.into(), message)
        };
        let stuck = self.container_statuses.iter().find_map(|status| {
            let state = SidecarState::from(status.state.clone());
            (state.stuck()).map(|fault| trouble(status, fault.reason, fault.message))
        });
        stuck.or_else(|| {
            self.container_statuses.iter().find_map(|status| {
                let last = status.last_state.terminated.as_ref();
                let end = status.state.terminated.as_ref().or(last)?;
                let message = format!("exit code {} {}", end.exit_code, end.message);
                Some(trouble(status, &end.reason, message.trim()))
            })
        })
    }

    fn waits(&self, has_claim: bool) -> Option<Waits> {
        let condition = |kind: &str| self.conditions.iter().find(|c| c.r#type == kind);
        let scheduled = condition("PodScheduled")?;
        if scheduled.reason == "Unschedulable" && self.nominated_node_name.is_empty() {
            return Some(Waits {
                what: WaitsFor::Node,
                maybe_injection: unschedulable::maybe_injection(&scheduled.message, has_claim),
                message: short(&scheduled.message),
            });
        }
        let sandbox = condition("PodReadyToStartContainers")?;
        (scheduled.status == "True" && sandbox.status == "False").then(|| Waits {
            what: WaitsFor::Volumes,
            maybe_injection: has_claim,
            message: "".into(),
        })
    }
}

impl WireOwn {
    /// Whether injection chose this container: it mounts the shared folder.
    fn is_engine(&self) -> bool {
        let mut mounts = self.volume_mounts.iter();
        mounts.any(|mount| mount.name == names::SHARED_VOLUME)
    }

    fn joined(self, statuses: &mut [WireContainerStatus]) -> Own {
        let status = statuses.iter_mut().find(|s| s.name == self.name);
        let status = status.map(std::mem::take).unwrap_or_default();
        let end = status.state.terminated.as_ref();
        let exit = end.or(status.last_state.terminated.as_ref()).map(|end| {
            let at = |time: &Option<Time>| time.as_ref().map(|t| t.0).unwrap_or_default();
            Box::new(Exit {
                code: end.exit_code,
                reason: end.reason.as_str().into(),
                message: short(&end.message),
                ran: at(&end.finished_at).duration_since(at(&end.started_at)),
            })
        });
        Own {
            path_unknown: self
                .env
                .iter()
                .any(|v| v.name == "PYTHONPATH" && v.value.starts_with("$(PYTHONPATH)")),
            name: self.name.into(),
            probed: self.readiness_probe.is_some(),
            restarts: status.restart_count,
            exit,
            state: status.state.into(),
        }
    }
}

fn short(message: &str) -> Box<str> {
    let message = message.chars().take(MESSAGE_CHARS_MAX);
    message.collect::<String>().into()
}

/// The sidecar's memory, if it can change while the sidecar runs.
fn memory(config: &Config, containers: &[WireContainer], status: &WireStatus) -> Option<Memory> {
    let is_sidecar = |name: &str| name == names::SIDECAR_CONTAINER;
    let container = containers.iter().find(|c| is_sidecar(&c.name))?;
    let mut statuses = status.init_container_statuses.iter();
    let in_status = statuses.find(|s| is_sidecar(&s.name));
    config.has_live_size().then_some(Memory {
        size: config.memory.size.0,
        footprint: config.footprint(),
        desired: container.resources.as_ref()?.amounts()?,
        actual: in_status.and_then(|s| s.resources.as_ref()?.amounts()),
        lowered: None,
        refused: status.resize_refused(),
    })
}

impl WireResources {
    fn amounts(&self) -> Option<Amounts> {
        let bytes = |amount: &WireMemory| Quantity::parse(&amount.memory)?.units();
        Some(Amounts {
            request: bytes(&self.requests)?,
            limit: bytes(&self.limits)?,
        })
    }
}

fn sidecar(containers: Vec<WireContainer>, statuses: Vec<WireContainerStatus>) -> Option<Sidecar> {
    let mut containers = containers.into_iter();
    let container = containers.find(|c| c.name == names::SIDECAR_CONTAINER)?;
    let mut sidecar = Sidecar {
        image: container.image.into(),
        image_in_use: "".into(),
        restarts: 0,
        state: SidecarState::Unseen,
        init: None,
    };
    for status in statuses {
        if status.name == names::SIDECAR_CONTAINER {
            sidecar.image_in_use = status.image.into();
            sidecar.restarts = status.restart_count;
            sidecar.state = status.state.into();
        } else if status.name == names::INIT_CONTAINER {
            sidecar.init = Some(Box::new(status.state.into()));
        }
    }
    Some(sidecar)
}

impl From<WireState> for SidecarState {
    fn from(state: WireState) -> Self {
        if let Some(running) = state.running {
            Self::Running {
                since: running.started_at.map(|t| t.0).unwrap_or_default(),
            }
        } else if let Some(terminated) = state.terminated {
            Self::Terminated {
                reason: terminated.reason.into(),
            }
        } else if let Some(waiting) = state.waiting {
            Self::Waiting {
                message: short(&waiting.message),
                reason: waiting.reason.into(),
            }
        } else {
            Self::Unseen
        }
    }
}

#[cfg(test)]
mod tests;
