//! Whether the API server would accept the pod, as far as injection can break it. A patch that makes a pod invalid is worse than none: the
//! API server would reject the user's pod.

use super::additions;
use super::json;
use super::qos::{self, Qos};
use super::quantity::Quantity;
use crate::forms;
use crate::names;
use serde_json::Value;
use std::collections::HashSet;

/// Maximum bytes of keys and values of all annotations.
const ANNOTATION_BYTES: usize = 256 << 10;

/// Returns the first problem of `pod`.
pub(super) fn check(pod: &Value) -> Result<(), String> {
    let spec = pod.get("spec").ok_or("the pod has no spec")?;
    let volumes = unique(json::list(spec, "volumes").iter(), "volume")?;
    unique(json::all_containers(spec), "container")?;
    for container in json::all_containers(spec) {
        check_container(container, &volumes)
            .map_err(|problem| format!("container {}: {problem}", json::name(container)))?;
        if additions::is_added(container) {
            check_added(container)
                .and_then(|()| check_claims(container, spec))
                .map_err(|problem| format!("container {}: {problem}", json::name(container)))?;
        }
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
            return Err(format!(
                "mounts the volume {volume}, which the pod does not have"
            ));
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

/// Checks what a pool adds to the operator's containers. The rules of pools refuse invalid values earlier; a value that passes them costs
/// the pod only its cache.
pub(super) fn check_added(container: &Value) -> Result<(), String> {
    let image = json::text(container, "image").unwrap_or_default();
    if image.is_empty() || image.trim() != image {
        return Err(format!("{image:?} is not an image name"));
    }
    for variable in json::list(container, "env") {
        check_variable(variable)
            .map_err(|problem| format!("variable {:?} {problem}", json::name(variable)))?;
    }
    for kind in ["requests", "limits"] {
        let given = container.pointer(&format!("/resources/{kind}"));
        for (name, value) in given.and_then(Value::as_object).into_iter().flatten() {
            check_amount(container, name, value)
                .map_err(|problem| format!("{kind}: {value} of {name} {problem}"))?;
        }
    }
    Ok(())
}

fn check_claims(container: &Value, spec: &Value) -> Result<(), String> {
    let declared = json::list(spec, "resourceClaims");
    let resources = container.get("resources").unwrap_or(&Value::Null);
    let declared: HashSet<&str> = declared.iter().map(json::name).collect();
    let mut claims = json::list(resources, "claims").iter().map(json::name);
    match claims.find(|name| !declared.contains(name)) {
        Some(name) => Err(format!(
            "uses the claim {name:?}, which the pod does not have"
        )),
        None => Ok(()),
    }
}

fn check_variable(variable: &Value) -> Result<(), &'static str> {
    let name = json::name(variable);
    if name.is_empty()
        || !name
            .bytes()
            .all(|b| (b' '..=b'~').contains(&b) && b != b'=')
    {
        return Err("has an invalid name");
    }
    let Some(from) = variable.get("valueFrom").filter(|from| !from.is_null()) else {
        return Ok(());
    };
    let sources = from.as_object().into_iter().flatten();
    let sources = sources.filter(|(_, source)| !source.is_null()).count();
    let value = json::text(variable, "value").unwrap_or_default();
    if sources != 1 || !value.is_empty() {
        return Err("does not have exactly one value");
    }
    match from.pointer("/fieldRef/fieldPath").and_then(Value::as_str) {
        Some(path) if !forms::is_field_path(path) => {
            Err("refers to a field that a variable cannot use")
        }
        _ => Ok(()),
    }
}

fn check_amount(container: &Value, name: &str, value: &Value) -> Result<(), &'static str> {
    let paged = name.starts_with("hugepages-");
    let plain = ["cpu", "memory", "ephemeral-storage"].contains(&name);
    if !plain && !paged && !forms::is_extended_resource(name) {
        return Err("is not a resource of a container");
    }
    let amount = Quantity::of(value).filter(|amount| *amount >= Quantity::default());
    let Some(amount) = amount else {
        return Err("is not an amount");
    };
    // The request of an extended resource or huge pages must equal its limit.
    let limit = qos::amounts(container, "limits").get(name).copied();
    let request = qos::requests(container).get(name).copied();
    if !plain && (limit != Some(amount) || request != Some(amount)) {
        return Err("differs between request and limit");
    }
    if !plain && !amount.is_whole() {
        return Err("is not a whole number");
    }
    Ok(())
}

/// The operator's two containers must be last, and the first of them must be a native sidecar.
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
    }
    for container in json::all_containers(spec) {
        for (name, own) in qos::amounts(container, "limits") {
            if let Some(limit) = limits.get(&name).filter(|limit| own > **limit) {
                return Err(format!(
                    "container {} has a limit of {own} of {name} above the pod's {limit}",
                    json::name(container)
                ));
            }
        }
    }
    Ok(())
}

/// Checks the total size of all annotations.
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

/// Checks that the QoS class does not fall, and that Guaranteed stays Guaranteed.
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
