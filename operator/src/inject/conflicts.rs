//! Conflicts that prevent a cache in a pod: other connectors, engines with ranks in several pods that vLLM's connector cannot join, the
//! node's network.

use super::engine::Engine;
use super::launch::{Launch, OFFLOADING};
use super::{Reason, Refusal, json};
use crate::api::ExistingConnector;
use serde_json::Value;

/// Connectors that transfer KV from prefill to decode and do not keep it. The connector's own list decides in vLLM; this list avoids a
/// sidecar that the connector would refuse to use.
pub(super) const TRANSPORTS: [&str; 5] = [
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "MoRIIOConnector",
];
const CONNECTOR: &str = "KVCachePoolConnector";
/// Architectures of the sidecar, by the names of Kubernetes.
const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];

/// Refuses a vLLM whose connector cannot be combined with kvcachepool.
pub(super) fn connector(launch: &Launch<'_>, existing: ExistingConnector) -> Result<(), Refusal> {
    for flag in ["kv-offloading-size", "kv-offloading-backend"] {
        if launch.has_flag(flag) {
            return Err(Refusal::new(
                Reason::OtherCachePresent,
                format!("vLLM is started with --{flag}; remove that argument"),
            ));
        }
    }
    let dynamo = launch.dynamo_connectors();
    if let Some(cache) = dynamo.iter().find(|name| **name != "nixl") {
        return Err(Refusal::new(
            Reason::OtherCachePresent,
            format!("vLLM is started with --connector {cache}; remove that argument"),
        ));
    }
    let configured = launch.connectors();
    let mut names = configured.clone().unwrap_or_default();
    if names.remove(CONNECTOR) {
        return Ok(());
    }
    let own_tier = launch.has_own_tier() && names.remove(OFFLOADING);
    if let Some(cache) = names
        .iter()
        .find(|name| !TRANSPORTS.contains(&name.as_str()))
    {
        return Err(Refusal::new(
            Reason::OtherCachePresent,
            format!(
                "vLLM is started with {cache}, which cannot be combined with another KV cache; remove it from --kv-transfer-config"
            ),
        ));
    }
    if own_tier {
        // vLLM keeps its connectors, and the plugin adds none.
        return Ok(());
    }
    let present = configured.is_some() || !dynamo.is_empty();
    if present && existing == ExistingConnector::Refuse {
        let which = names
            .pop_first()
            .unwrap_or_else(|| "a connector".to_string());
        return Err(Refusal::new(
            Reason::ConnectorPresent,
            format!(
                "vLLM is started with {which}; set injection.existingConnector: Compose in the pool to use both"
            ),
        ));
    }
    Ok(())
}

/// Refuses an engine with ranks in several pods, except for vLLM's own `--nnodes`: there the sidecars of all pods agree on every hit.
pub(super) fn multi_node(pod: &Value, launch: &Launch<'_>) -> Result<(), Refusal> {
    match spread(pod, launch) {
        Some(sign) => Err(Refusal::new(
            Reason::MultiNodeUnsupported,
            format!("{sign}: the ranks of one engine run in several pods"),
        )),
        None => Ok(()),
    }
}

fn spread(pod: &Value, launch: &Launch<'_>) -> Option<String> {
    // Ray Serve starts engines itself, one replica at a time. The sidecar checks them when they register.
    if json::label(pod, "ray.io/serve").is_some() {
        return None;
    }
    if json::label(pod, "ray.io/cluster").is_some() {
        return Some("the label ray.io/cluster makes this a node of a Ray cluster".to_string());
    }
    let joins = joins(launch);
    for (flag, alone) in [("nnodes", "1"), ("node-rank", "0")] {
        let value = launch.flag(flag).into_iter().find(|value| *value != alone);
        if let (Some(value), false) = (value, joins) {
            let engine = launch.engine();
            return Some(format!("{engine} is started with --{flag} {value}"));
        }
    }
    let mut before = "";
    for word in launch.words() {
        let program = before.rsplit('/').next() == Some("ray");
        if program && word == "start" {
            return Some("vLLM is started on a Ray cluster (ray start)".to_string());
        }
        if word.ends_with("multi-node-serving.sh") {
            return Some(format!("vLLM is started by {word}"));
        }
        before = word;
    }
    let data_parallel = launch.words().any(|word| {
        word.starts_with("--data-parallel-")
            || word.starts_with("--data_parallel_")
            || word.starts_with("-dp")
    });
    if data_parallel || joins {
        return None;
    }
    if launch.has_flag("headless") {
        return Some(
            "vLLM is started with --headless, and without --nnodes or data parallelism".to_string(),
        );
    }
    let group_size = json::annotation(pod, "leaderworkerset.sigs.k8s.io/size")
        .or_else(|| group_size_variable(pod))
        .filter(|size| size.trim() != "1")?;
    Some(format!(
        "a LeaderWorkerSet makes groups of {group_size} pods, and the arguments have neither --nnodes nor data parallelism"
    ))
}

/// Whether vLLM itself joins the ranks of several pods by `--nnodes`. Other launchers have an argument of that name, too.
fn joins(launch: &Launch<'_>) -> bool {
    let other = |word: &str| {
        ["torchrun", "accelerate", "deepspeed"].contains(&word.rsplit('/').next().unwrap_or(word))
            || word.starts_with("torch.distributed.")
    };
    launch.engine() == Engine::Vllm
        && launch.flag("nnodes").into_iter().any(|nodes| nodes != "1")
        && !launch.words().any(other)
}

/// The group size that LeaderWorkerSet's webhook writes into every container.
fn group_size_variable(pod: &Value) -> Option<&str> {
    json::list(pod.get("spec")?, "containers")
        .iter()
        .flat_map(|container| json::list(container, "env"))
        .find(|variable| json::name(variable) == "LWS_GROUP_SIZE")
        .and_then(|variable| json::text(variable, "value"))
}

/// Refuses an engine whose Python ignores PYTHONPATH, because it finds no connector.
pub(super) fn isolated_python(launch: &Launch<'_>) -> Result<(), Refusal> {
    match launch.isolating_option() {
        Some(option) => Err(Refusal::new(
            Reason::PythonIsolated,
            format!(
                "{} is started by Python with {option}, so it ignores PYTHONPATH and finds no connector; remove that option",
                launch.engine()
            ),
        )),
        None => Ok(()),
    }
}

/// The architecture of the pod's nodes, if the pod selects only nodes without a sidecar for them.
fn foreign_architecture(spec: &Value) -> Option<&str> {
    let selected = spec.pointer("/nodeSelector/kubernetes.io~1arch");
    if let Some(arch) = selected.and_then(Value::as_str).filter(is_foreign) {
        return Some(arch);
    }
    let required = "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
    // A node matches one of the terms.
    let terms = json::list(spec.pointer(required)?, "nodeSelectorTerms").iter();
    let foreign: Option<Vec<&str>> = terms.map(foreign_architecture_of_term).collect();
    foreign?.first().copied()
}

/// As above for one term, of which a node matches all expressions.
fn foreign_architecture_of_term(term: &Value) -> Option<&str> {
    json::list(term, "matchExpressions").iter().find_map(|one| {
        let is_list = json::text(one, "key") == Some("kubernetes.io/arch")
            && json::text(one, "operator") == Some("In");
        let values = json::list(one, "values").iter();
        let values: Vec<&str> = values.filter_map(Value::as_str).collect();
        let foreign = is_list && values.iter().all(is_foreign);
        foreign.then(|| values.first().copied()).flatten()
    })
}

fn is_foreign(arch: &&str) -> bool {
    !ARCHITECTURES.contains(arch)
}

/// Refuses pods where the sidecar cannot have its port, and pods of other operating systems.
pub(super) fn place(spec: &Value, port: u16) -> Result<(), Refusal> {
    let os = spec.pointer("/os/name").and_then(Value::as_str);
    let node_os = spec
        .pointer("/nodeSelector/kubernetes.io~1os")
        .and_then(Value::as_str);
    if let Some(os) = os.or(node_os).filter(|os| *os != "linux") {
        return Err(Refusal::new(
            Reason::OsUnsupported,
            format!("the pod runs on {os}; remove the label"),
        ));
    }
    if let Some(arch) = foreign_architecture(spec) {
        return Err(Refusal::new(
            Reason::ArchUnsupported,
            format!("the pod runs on {arch}, for which there is no sidecar; remove the label"),
        ));
    }
    if spec.get("hostNetwork") == Some(&Value::Bool(true)) {
        return Err(Refusal::new(
            Reason::HostNetworkConflict,
            format!(
                "hostNetwork is true: the sidecar's port {port} would be a port of the node, and a second pod could not use it"
            ),
        ));
    }
    let taken = json::all_containers(spec)
        .filter(|container| !super::additions::is_added(container))
        .find(|container| {
            json::list(container, "ports").iter().any(|one| {
                one.get("containerPort").and_then(Value::as_u64) == Some(u64::from(port))
                    && json::text(one, "protocol").is_none_or(|p| p == "TCP")
            })
        });
    match taken {
        Some(container) => Err(Refusal::new(
            Reason::PortTaken,
            format!(
                "container {} listens on port {port}, which the sidecar needs; give that container another port",
                json::name(container)
            ),
        )),
        None => Ok(()),
    }
}
