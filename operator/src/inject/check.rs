//! Whether the API server would take the pod, in all that injection can break. A patch that makes an invalid pod is worse than none:
//! the user's pod would be rejected.

use super::json;
use super::qos::{self, Qos};
use crate::names;
use serde_json::Value;
use std::collections::HashSet;

/// Most bytes of keys and values of all annotations.
const ANNOTATION_BYTES: usize = 256 << 10;

/// The first thing that is wrong with `pod`.
pub(super) fn check(pod: &Value) -> Result<(), String> {
    let spec = pod.get("spec").ok_or("the pod has no spec")?;
    let volumes = unique(json::list(spec, "volumes").iter(), "volume")?;
    unique(json::all_containers(spec), "container")?;
    for container in json::all_containers(spec) {
        check_container(container, &volumes)
            .map_err(|problem| format!("container {}: {problem}", json::name(container)))?;
    }
    check_order(spec)?;
    check_pod_resources(spec)?;
    check_annotations(pod)
}

fn unique<'a>(
    things: impl Iterator<Item = &'a Value>,
    what: &str,
) -> Result<HashSet<&'a str>, String> {
    let mut names = HashSet::new();
    for thing in things {
        let name = json::name(thing);
        if name.is_empty() || !names.insert(name) {
            return Err(format!("two {what}s with the name {name:?}"));
        }
    }
    Ok(names)
}

fn check_container(container: &Value, volumes: &HashSet<&str>) -> Result<(), String> {
    let mut paths = HashSet::new();
    for mount in json::list(container, "volumeMounts") {
        let volume = json::name(mount);
        if !volumes.contains(volume) {
            return Err(format!("mounts the volume {volume}, which the pod has not"));
        }
        let path = json::text(mount, "mountPath").unwrap_or_default();
        if !paths.insert(path) {
            return Err(format!("mounts two volumes at {path}"));
        }
    }
    let limits = qos::amounts(container, "limits");
    for (name, request) in qos::amounts(container, "requests") {
        if let Some(limit) = limits.get(&name).filter(|limit| **limit < request) {
            return Err(format!(
                "requests {request} of {name} above its limit {limit}"
            ));
        }
    }
    Ok(())
}

/// Our two stand at the end, and the first of them keeps running.
fn check_order(spec: &Value) -> Result<(), String> {
    let list = json::list(spec, "initContainers");
    let right = match list {
        [.., sidecar, init] => {
            json::name(sidecar) == names::SIDECAR_CONTAINER
                && json::text(sidecar, "restartPolicy") == Some("Always")
                && json::name(init) == names::INIT_CONTAINER
                && json::text(init, "restartPolicy").is_none()
        }
        _ => false,
    };
    if right {
        Ok(())
    } else {
        Err("the sidecar and its init container are not the last init containers".to_string())
    }
}

fn check_pod_resources(spec: &Value) -> Result<(), String> {
    let requests = qos::requests(spec);
    let limits = qos::amounts(spec, "limits");
    for (name, needed) in qos::aggregate(spec) {
        let request = requests.get(&name).filter(|_| qos::is_pod_resource(&name));
        if let Some(request) = request.filter(|request| **request < needed) {
            return Err(format!(
                "its containers request {needed} of {name}, the pod only {request}"
            ));
        }
    }
    for (name, limit) in &limits {
        if let Some(request) = requests.get(name).filter(|request| *request > limit) {
            return Err(format!(
                "requests {request} of {name} above its limit {limit}"
            ));
        }
        for container in json::all_containers(spec) {
            if let Some(own) = qos::amounts(container, "limits")
                .get(name)
                .filter(|own| *own > limit)
            {
                return Err(format!(
                    "container {} has a limit of {own} of {name} above the pod's {limit}",
                    json::name(container)
                ));
            }
        }
    }
    Ok(())
}

/// Whether all annotations together are not too long.
pub(super) fn check_annotations(pod: &Value) -> Result<(), String> {
    let annotations = pod
        .pointer("/metadata/annotations")
        .and_then(Value::as_object);
    let bytes: usize = annotations
        .into_iter()
        .flatten()
        .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
        .sum();
    if bytes > ANNOTATION_BYTES {
        return Err(format!(
            "its annotations have {bytes} bytes of at most {ANNOTATION_BYTES}"
        ));
    }
    Ok(())
}

/// The class must not fall, and the highest must stay.
pub(super) fn check_class(before: &Value, after: &Value) -> Result<(), String> {
    let class = |pod: &Value| {
        pod.get("spec")
            .map_or(Qos::BestEffort, |spec| qos::class(spec, |_| true))
    };
    let (old, new) = (class(before), class(after));
    if new < old {
        return Err(format!("its QoS class would fall from {old:?} to {new:?}"));
    }
    Ok(())
}
