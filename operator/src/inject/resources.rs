//! What our containers ask for, and what a pod with resources of its own gets added for it.

use super::Settings;
use super::json;
use super::qos::{self, Amounts, Qos};
use super::quantity::Quantity;
use crate::names;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as GivenQuantity;
use kvcachepool_protocol::config::Config;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Cpu of a sidecar whose pool says nothing: digests and the socket, no copy of bytes.
const CPU_MILLIS: u32 = 500;
/// The node's disk.
const STORAGE: &str = "ephemeral-storage";
/// What copying the connector takes.
const INIT_CPU_MILLIS: u32 = 100;
const INIT_MEMORY_BYTES: u64 = 64 << 20;

/// Resources of the sidecar in this pod.
pub(super) fn sidecar(spec: &Value, settings: &Settings, config: &Config) -> Value {
    let mut requests = pool_amounts(settings.resources.requests.as_ref());
    let mut limits = pool_amounts(settings.resources.limits.as_ref());
    // Memory is reckoned, not chosen: less is a sidecar that is killed, more is nothing that it would use.
    let memory = Quantity::bytes(config.container_memory_bytes());
    requests.insert("memory".to_string(), memory);
    limits.insert("memory".to_string(), memory);
    if let Some((name, bytes)) = huge_pages(config) {
        requests.insert(name.clone(), bytes);
        limits.insert(name, bytes);
    }
    if let Some(bytes) = settings.disk.as_ref().and_then(|d| d.node_bytes(config)) {
        let needed = Quantity::bytes(bytes);
        let request = requests.entry(STORAGE.to_string()).or_insert(needed);
        *request = (*request).max(needed);
        if users_limit_storage(spec) {
            limits.entry(STORAGE.to_string()).or_insert(needed);
        }
    }
    let cpu = requests
        .get("cpu")
        .or_else(|| limits.get("cpu"))
        .copied()
        .filter(|cpu| cpu.is_positive())
        .unwrap_or(Quantity::millis(CPU_MILLIS));
    requests.insert("cpu".to_string(), cpu);
    if qos::amounts(spec, "limits").contains_key("cpu") {
        // The pod's limit holds for all; one of ours beside it could only be above it.
        limits.remove("cpu");
    } else if users_class(spec) == Qos::Guaranteed {
        limits.insert("cpu".to_string(), cpu);
    } else if users_limit_cpu(spec) {
        // No more than the request, as a quota or a limit range could refuse it: more is for the pool to say.
        limits.entry("cpu".to_string()).or_insert(cpu);
    }
    for (name, limit) in &mut limits {
        match requests.get(name) {
            Some(request) => *limit = (*limit).max(*request),
            None => {
                requests.insert(name.clone(), *limit);
            }
        }
    }
    json!({"requests": texts(&requests), "limits": texts(&limits)})
}

/// Resources of the init container. A pod with resources of its own needs none, and they could exceed the pod's.
pub(super) fn init(spec: &Value) -> Value {
    if qos::has_pod_resources(spec) {
        return json!({});
    }
    let requests = json!({
        "cpu": Quantity::millis(INIT_CPU_MILLIS).to_string(),
        "memory": Quantity::bytes(INIT_MEMORY_BYTES).to_string(),
    });
    let mut limits = requests.clone();
    if !users_limit_cpu(spec) {
        json::object(&mut limits).remove("cpu");
    }
    json!({"requests": requests, "limits": limits})
}

/// Whether one of the user's own containers has a limit of the node's disk. Then the kubelet evicts the pod when all that it writes,
/// our files too, is more than all limits together; so ours is among them. Where nobody has one the pod is evicted for no such sum, and
/// a limit of ours alone would be one for what vLLM writes.
fn users_limit_storage(spec: &Value) -> bool {
    json::all_containers(spec)
        .filter(|container| !super::ours::is_ours(container))
        .any(|container| qos::amounts(container, "limits").contains_key(STORAGE))
}

/// Whether each of the user's own containers has a limit of cpu. Then ours must have one: a quota of `limits.cpu` takes no pod in which
/// one container has none. So it is in every Guaranteed pod.
fn users_limit_cpu(spec: &Value) -> bool {
    json::all_containers(spec)
        .filter(|container| !super::ours::is_ours(container))
        .all(|container| qos::amounts(container, "limits").contains_key("cpu"))
}

/// The class that the user's own containers give the pod, whatever became of ours in between.
fn users_class(spec: &Value) -> Qos {
    qos::class(spec, |container| !super::ours::is_ours(container))
}

fn huge_pages(config: &Config) -> Option<(String, Quantity)> {
    let bytes = config.container_huge_page_bytes();
    let name = format!("hugepages-{}", config.memory.huge_pages);
    (bytes > 0).then(|| (name, Quantity::bytes(bytes)))
}

fn pool_amounts(given: Option<&BTreeMap<String, GivenQuantity>>) -> Amounts {
    given
        .into_iter()
        .flatten()
        .filter_map(|(name, quantity)| Some((name.clone(), Quantity::parse(&quantity.0)?)))
        .collect()
}

fn texts(amounts: &Amounts) -> Value {
    amounts
        .iter()
        .map(|(name, amount)| (name.clone(), Value::from(amount.to_string())))
        .collect()
}

/// Raises the resources of the pod as a whole by what the sidecar needs and has not been given by an earlier call.
/// `before`: the sidecar as it was found, `wanted`: its resources now.
pub(super) fn raise_pod(spec: &mut Value, before: Option<&Value>, wanted: &Value) {
    if !qos::has_pod_resources(spec) {
        return;
    }
    let had = before.map(qos::requests).unwrap_or_default();
    let needed = qos::requests(&json!({"resources": wanted}));
    for kind in ["requests", "limits"] {
        for (name, amount) in qos::amounts(spec, kind) {
            let had = had.get(&name).copied().unwrap_or_default();
            let Some(missing) = needed.get(&name).map(|needed| needed.beyond(had)) else {
                continue;
            };
            if missing.is_positive() {
                let held = json::entry(json::entry(spec, "resources"), kind);
                json::set_text(held, &name, &(amount + missing).to_string());
            }
        }
    }
}

/// A default limit that a LimitRange put on one of ours between two calls may lie below what it requests: then the pod would be
/// rejected.
pub(super) fn lift_limits(container: &mut Value) {
    let requests = qos::amounts(container, "requests");
    for (name, limit) in qos::amounts(container, "limits") {
        if let Some(request) = requests.get(&name).filter(|request| **request > limit) {
            let limits = json::entry(json::entry(container, "resources"), "limits");
            json::set_text(limits, &name, &request.to_string());
        }
    }
}

/// Whether this is the sidecar, for what it was given before.
pub(super) fn found_sidecar(spec: &Value) -> Option<&Value> {
    let list = json::list(spec, "initContainers");
    Some(&list[json::position(list, names::SIDECAR_CONTAINER)?])
}
