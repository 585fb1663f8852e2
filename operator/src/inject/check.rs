//! Whether the API server would take the pod, in all that injection can break. A patch that makes an invalid pod is worse than none:
//! the user's pod would be rejected.

use super::json;
use super::ours;
use super::qos::{self, Qos};
use super::quantity::Quantity;
use crate::forms;
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
        if ours::is_ours(container) {
            check_ours(container)
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

/// What a pool puts into our containers. The rules of pools keep all of this out; here it costs the pod its cache and not its life.
pub(super) fn check_ours(container: &Value) -> Result<(), String> {
    let image = json::text(container, "image").unwrap_or_default();
    if image.is_empty() || image.trim() != image {
        return Err(format!("{image:?} is no image"));
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
    let mut claims = json::list(resources, "claims").iter().map(json::name);
    match claims.find(|name| json::position(declared, name).is_none()) {
        Some(name) => Err(format!("uses the claim {name:?}, which the pod has not")),
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
        return Err("has no name that a variable can have");
    }
    let Some(from) = variable.get("valueFrom").filter(|from| !from.is_null()) else {
        return Ok(());
    };
    let sources = from.as_object().into_iter().flatten();
    let sources = sources.filter(|(_, source)| !source.is_null()).count();
    let value = json::text(variable, "value").unwrap_or_default();
    if sources != 1 || !value.is_empty() {
        return Err("has none or several values");
    }
    match from.pointer("/fieldRef/fieldPath").and_then(Value::as_str) {
        Some(path) if !forms::is_field_path(path) => Err("is of a field that no variable can have"),
        _ => Ok(()),
    }
}

fn check_amount(container: &Value, name: &str, value: &Value) -> Result<(), &'static str> {
    let paged = name.starts_with("hugepages-");
    let plain = ["cpu", "memory", "ephemeral-storage"].contains(&name);
    if !plain && !paged && !forms::is_extended_resource(name) {
        return Err("is of no resource that a container can have");
    }
    let amount = Quantity::of(value).filter(|amount| *amount >= Quantity::default());
    let Some(amount) = amount else {
        return Err("is no amount");
    };
    // What is handed out whole is requested as much of as the limit says.
    let limit = qos::amounts(container, "limits").get(name).copied();
    let request = qos::requests(container).get(name).copied();
    if !plain && (limit != Some(amount) || request != Some(amount)) {
        return Err("is not both request and limit");
    }
    if !plain && !amount.is_whole() {
        return Err("is no whole number");
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
