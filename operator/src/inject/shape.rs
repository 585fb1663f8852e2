//! Checks the structure of a pod as far as injection reads it. The API server sends only well-formed pods; others are refused here, so that
//! the rest of the code can rely on the structure.

use super::json;
use serde_json::Value;

/// Maximum containers of a pod. Some checks compare all containers with each other.
const CONTAINERS_MAX: usize = 256;

/// Returns the first structural problem of a pod.
pub(super) fn check(pod: &Value) -> Result<(), String> {
    check_metadata(pod)?;
    let spec = pod.get("spec").ok_or("the pod has no spec")?;
    if !spec.is_object() {
        return Err("spec is not an object".to_string());
    }
    resources(spec).map_err(|problem| format!("spec.{problem}"))?;
    for key in [
        "containers",
        "initContainers",
        "volumes",
        "imagePullSecrets",
        "resourceClaims",
    ] {
        named(spec, key).map_err(|problem| format!("spec.{problem}"))?;
    }
    if json::list(spec, "containers").is_empty() {
        return Err("the pod has no containers".to_string());
    }
    if json::all_containers(spec).count() > CONTAINERS_MAX {
        return Err(format!("the pod has more than {CONTAINERS_MAX} containers"));
    }
    for container in json::all_containers(spec) {
        for key in ["env", "volumeMounts"] {
            named(container, key).map_err(|problem| within(container, &problem))?;
        }
        for key in ["command", "args"] {
            list(container, key, Value::is_string)
                .map_err(|problem| within(container, &problem))?;
        }
        list(container, "ports", Value::is_object)
            .map_err(|problem| within(container, &problem))?;
        resources(container).map_err(|problem| within(container, &problem))?;
    }
    Ok(())
}

/// Checks only labels and annotations.
pub(super) fn check_metadata(pod: &Value) -> Result<(), String> {
    let metadata = pod.get("metadata").ok_or("the pod has no metadata")?;
    for key in ["labels", "annotations"] {
        let texts = metadata.get(key).is_none_or(|map| {
            map.is_null()
                || map
                    .as_object()
                    .is_some_and(|map| map.values().all(Value::is_string))
        });
        if !metadata.is_object() || !texts {
            return Err(format!("metadata.{key} is not a map of strings"));
        }
    }
    Ok(())
}

fn within(container: &Value, problem: &str) -> String {
    format!("container {}: {problem}", json::name(container))
}

fn list(value: &Value, key: &str, right: impl Fn(&Value) -> bool) -> Result<(), String> {
    match value.get(key) {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(list)) if list.iter().all(right) => Ok(()),
        Some(_) => Err(format!("{key} is not a list of the expected type")),
    }
}

fn named(value: &Value, key: &str) -> Result<(), String> {
    list(value, key, |one| json::text(one, "name").is_some())
}

fn resources(holder: &Value) -> Result<(), String> {
    let object_or_nothing =
        |value: Option<&Value>| value.is_none_or(|v| v.is_null() || v.is_object());
    let resources = holder.get("resources");
    let right = object_or_nothing(resources)
        && ["requests", "limits"]
            .iter()
            .all(|kind| object_or_nothing(resources.and_then(|r| r.get(kind))));
    if right {
        Ok(())
    } else {
        Err("resources is not an object".to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_of_hundreds_of_containers_is_refused() {
        let pod = |count| {
            let containers: Vec<Value> = (0..count)
                .map(|i| json!({"name": format!("c{i}")}))
                .collect();
            json!({"metadata": {}, "spec": {"containers": [containers[0]], "initContainers": containers[1..]}})
        };
        assert_eq!(check(&pod(CONTAINERS_MAX)), Ok(()));
        assert!(check(&pod(CONTAINERS_MAX + 1)).is_err());
    }
}
