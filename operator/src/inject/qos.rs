//! QoS classes and sums of resources, by Kubernetes' rules: init containers count, and pod-level resources come first.

use super::json;
use super::quantity::Quantity;
use serde_json::Value;
use std::collections::BTreeMap;

/// Ordered by eviction: the first is evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Qos {
    BestEffort,
    Burstable,
    Guaranteed,
}

/// Amounts by name of the resource.
pub(super) type Amounts = BTreeMap<String, Quantity>;

const COMPUTE: [&str; 2] = ["cpu", "memory"];

/// `requests` or `limits` of a container or a pod. Invalid quantities are skipped.
pub(super) fn amounts(holder: &Value, kind: &str) -> Amounts {
    let found = holder.get("resources").and_then(|r| r.get(kind));
    found
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.clone(), Quantity::of(value)?)))
        .collect()
}

/// The effective requests: a limit without a request is the request.
pub(super) fn requests(holder: &Value) -> Amounts {
    let mut all = amounts(holder, "limits");
    all.extend(amounts(holder, "requests"));
    all
}

/// The class of a pod, counting only containers that satisfy `counts`.
pub(super) fn class(spec: &Value, counts: impl Fn(&Value) -> bool) -> Qos {
    if has_pod_resources(spec) {
        return class_of([spec].into_iter());
    }
    class_of(json::all_containers(spec).filter(|container| counts(container)))
}

fn class_of<'a>(holders: impl Iterator<Item = &'a Value>) -> Qos {
    let positive =
        |amounts: &Amounts, name: &str| amounts.get(name).copied().filter(|q| q.is_positive());
    let mut guaranteed = true;
    let mut any = false;
    let mut sums = [Amounts::new(), Amounts::new()];
    for holder in holders {
        let kinds = [requests(holder), amounts(holder, "limits")];
        for (kind, sum) in kinds.iter().zip(&mut sums) {
            for name in COMPUTE {
                if let Some(amount) = positive(kind, name) {
                    any = true;
                    let total = sum.entry(name.to_string()).or_default();
                    *total = *total + amount;
                }
            }
        }
        guaranteed &= COMPUTE
            .iter()
            .all(|name| positive(&kinds[1], name).is_some());
    }
    match (any, guaranteed && sums[0] == sums[1]) {
        (false, _) => Qos::BestEffort,
        (true, true) => Qos::Guaranteed,
        (true, false) => Qos::Burstable,
    }
}

/// Resources that can be set at pod level.
pub(super) fn is_pod_resource(name: &str) -> bool {
    COMPUTE.contains(&name) || name.starts_with("hugepages-")
}

/// Whether the pod has pod-level resources.
pub(super) fn has_pod_resources(spec: &Value) -> bool {
    ["requests", "limits"]
        .iter()
        .any(|kind| amounts(spec, kind).keys().any(|name| is_pod_resource(name)))
}

/// The most that containers request at the same time. A pod-level request must cover it.
pub(super) fn aggregate(spec: &Value) -> Amounts {
    let (mut running, mut peak) = (Amounts::new(), Amounts::new());
    for container in json::list(spec, "initContainers") {
        let is_sidecar = json::text(container, "restartPolicy") == Some("Always");
        for (name, own) in requests(container) {
            let with_sidecars = running.get(&name).copied().unwrap_or_default() + own;
            let most = peak.entry(name.clone()).or_default();
            *most = (*most).max(with_sidecars);
            if is_sidecar {
                running.insert(name, with_sidecars);
            }
        }
    }
    for container in json::list(spec, "containers") {
        for (name, own) in requests(container) {
            let total = running.entry(name).or_default();
            *total = *total + own;
        }
    }
    for (name, total) in running {
        let most = peak.entry(name).or_default();
        *most = (*most).max(total);
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(spec: Value) -> Qos {
        class(&spec, |_| true)
    }

    #[test]
    fn classes_are_those_of_kubernetes() {
        let full = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}});
        let container = |resources: &Value| json!({"resources": resources});
        let pod = |resources: &Value| json!({"containers": [container(resources)]});
        assert_eq!(of(pod(&json!({}))), Qos::BestEffort);
        assert_eq!(
            of(pod(&json!({"limits": {"nvidia.com/gpu": 1}}))),
            Qos::BestEffort
        );
        assert_eq!(of(pod(&json!({"requests": {"cpu": 0}}))), Qos::BestEffort);
        assert_eq!(of(pod(&full)), Qos::Guaranteed);
        assert_eq!(of(pod(&json!({"limits": full["limits"]}))), Qos::Guaranteed);
        assert_eq!(of(pod(&json!({"requests": {"cpu": "1"}}))), Qos::Burstable);
        assert_eq!(
            of(pod(
                &json!({"limits": full["limits"], "requests": {"cpu": "0.5"}})
            )),
            Qos::Burstable
        );
        assert_eq!(
            of(
                json!({"containers": [container(&full)], "initContainers": [container(&json!({}))]})
            ),
            Qos::Burstable
        );
        assert_eq!(
            of(json!({"containers": [container(&full)], "initContainers": [container(&full)]})),
            Qos::Guaranteed
        );
        assert_eq!(
            of(json!({"resources": full, "containers": [container(&json!({}))]})),
            Qos::Guaranteed
        );
        assert_eq!(
            of(json!({"resources": {"requests": {"cpu": 1}}, "containers": [container(&full)]})),
            Qos::Burstable
        );
    }

    #[test]
    fn sidecars_add_up_and_init_containers_do_not() {
        let cpu = |n: u8| json!({"requests": {"cpu": n}});
        let spec = json!({
            "initContainers": [
                {"resources": cpu(5)},
                {"resources": cpu(1), "restartPolicy": "Always"},
                {"resources": cpu(2)},
            ],
            "containers": [{"resources": cpu(1)}, {"resources": cpu(1)}],
        });
        assert_eq!(aggregate(&spec)["cpu"].to_string(), "5");
        let mut more = spec.clone();
        more["containers"][0]["resources"] = cpu(9);
        assert_eq!(aggregate(&more)["cpu"].to_string(), "11");
    }
}
