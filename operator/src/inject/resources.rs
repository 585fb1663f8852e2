//! Resources of the added containers, and the increase of pod-level resources.

use super::Settings;
use super::json;
use super::qos::{self, Amounts, Qos};
use super::quantity::Quantity;
use crate::names;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as GivenQuantity;
use kvcachepool_protocol::config::Config;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Default cpu request of the sidecar: it computes digests and serves the socket, but copies no bytes.
const CPU_MILLIS: u32 = 500;
const STORAGE: &str = "ephemeral-storage";
/// For copying the connector.
const INIT_CPU_MILLIS: u32 = 100;
const INIT_MEMORY_BYTES: u64 = 64 << 20;

/// Resources of the sidecar in this pod.
pub(super) fn sidecar(spec: &Value, settings: &Settings, config: &Config) -> Value {
    let mut requests = pool_amounts(settings.resources.requests.as_ref());
    let mut limits = pool_amounts(settings.resources.limits.as_ref());
    // Memory is computed and cannot be set: with less the sidecar would be killed, and more would be unused.
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
        // A pod-level limit covers all containers; a container limit could only exceed it.
        limits.remove("cpu");
    } else if users_class(spec) == Qos::Guaranteed {
        limits.insert("cpu".to_string(), cpu);
    } else if users_limit_cpu(spec) {
        // The limit equals the request: a quota or a limit range could refuse more. The pool can raise it.
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

/// The sidecar's CPU limit in this pod, if it is the default request and the pool chose neither.
pub(super) fn default_cpu_limit(settings: &Settings, sidecar: &Value) -> Option<Quantity> {
    let given = |amounts: Option<&BTreeMap<_, _>>| {
        let cpu = pool_amounts(amounts).get("cpu").copied();
        cpu.is_some_and(Quantity::is_positive)
    };
    let (requests, limits) = (&settings.resources.requests, &settings.resources.limits);
    if given(requests.as_ref()) || given(limits.as_ref()) {
        return None;
    }
    qos::amounts(sidecar, "limits").get("cpu").copied()
}

/// Resources of the init container. A pod with pod-level resources needs none, and they could exceed the pod's.
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

/// Whether a user's container has an ephemeral-storage limit. Then the kubelet evicts the pod if it writes more than the sum of all limits,
/// including the sidecar's files, so the sidecar's limit must be part of the sum. Without such a limit there is no sum, and a limit on the
/// sidecar alone would apply to what vLLM writes.
fn users_limit_storage(spec: &Value) -> bool {
    json::all_containers(spec)
        .filter(|container| !super::additions::is_added(container))
        .any(|container| qos::amounts(container, "limits").contains_key(STORAGE))
}

/// Whether every user's container has a cpu limit. Then the sidecar needs one too: a `limits.cpu` quota rejects pods with a container
/// without a limit. This includes every Guaranteed pod.
fn users_limit_cpu(spec: &Value) -> bool {
    json::all_containers(spec)
        .filter(|container| !super::additions::is_added(container))
        .all(|container| qos::amounts(container, "limits").contains_key("cpu"))
}

/// The QoS class from the user's own containers, independent of the added ones.
fn users_class(spec: &Value) -> Qos {
    qos::class(spec, |container| !super::additions::is_added(container))
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

/// Raises pod-level resources by what the sidecar needs and an earlier call has not added. `before` is the sidecar as found, `wanted` its
/// resources now.
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

/// Raises limits below the requests. A LimitRange may have added such a default limit between two calls, and the API server would reject
/// the pod.
pub(super) fn lift_limits(container: &mut Value) {
    let requests = qos::amounts(container, "requests");
    for (name, limit) in qos::amounts(container, "limits") {
        if let Some(request) = requests.get(&name).filter(|request| **request > limit) {
            let limits = json::entry(json::entry(container, "resources"), "limits");
            json::set_text(limits, &name, &request.to_string());
        }
    }
}

/// The pod with this memory of the sidecar's container, or why its `resize` subresource cannot set it.
pub fn with_memory(pod: &Value, request: Quantity, limit: Quantity) -> Result<Value, &'static str> {
    let mut after = pod.clone();
    let spec = json::entry(&mut after, "spec");
    if qos::has_pod_resources(spec) {
        return Err("it has pod-level resources, which would have to change too");
    }
    let class = qos::class(spec, |_| true);
    let list = json::list_mut(spec, "initContainers");
    let place = json::position(list, names::SIDECAR_CONTAINER).ok_or("it has no sidecar")?;
    let resources = json::entry(&mut list[place], "resources");
    for (kind, amount) in [("requests", request), ("limits", limit)] {
        json::set_text(json::entry(resources, kind), "memory", &amount.to_string());
    }
    if qos::class(spec, |_| true) != class {
        return Err("its QoS class would change");
    }
    Ok(after)
}

/// The sidecar from an earlier call, with the resources it had then.
pub(super) fn found_sidecar(spec: &Value) -> Option<&Value> {
    let list = json::list(spec, "initContainers");
    Some(&list[json::position(list, names::SIDECAR_CONTAINER)?])
}
