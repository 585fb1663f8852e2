//! Finds the container that runs the engine, vLLM or SGLang. It never guesses: the container must be named, the only one, or the only one with an accelerator.

use super::{Reason, Refusal, Settings, json};
use crate::names;
use serde_json::Value;

/// Index of vLLM's container in the pod's containers.
pub(super) fn target(pod: &Value, spec: &Value, settings: &Settings) -> Result<usize, Refusal> {
    let containers = json::list(spec, "containers");
    let named = json::annotation(pod, names::CONTAINER)
        .map(|name| (name, "annotation kvcachepool.io/container"))
        .or_else(|| Some((settings.container.as_deref()?, "pool's injection.container")))
        .filter(|(name, _)| !name.is_empty());
    if let Some((name, source)) = named {
        return json::position(containers, name).ok_or_else(|| {
            Refusal::new(
                Reason::ContainerNotFound,
                format!(
                    "the {source} names the container {name}, but the pod has only {}",
                    all_names(containers)
                ),
            )
        });
    }
    let found = only(containers, |_| true)
        // An earlier call chose this container, before others were added.
        .or_else(|| only(containers, mounts_shared_volume))
        .or_else(|| only(containers, has_accelerator));
    found.ok_or_else(|| {
        Refusal::new(
            Reason::ContainerAmbiguous,
            format!(
                "the pod has the containers {}, and not exactly one of them requests an accelerator; name vLLM's container in the annotation kvcachepool.io/container",
                all_names(containers)
            ),
        )
    })
}

fn only(containers: &[Value], is: impl Fn(&Value) -> bool) -> Option<usize> {
    let mut places = containers
        .iter()
        .enumerate()
        .filter_map(|(place, container)| is(container).then_some(place));
    let first = places.next()?;
    places.next().is_none().then_some(first)
}

pub(super) fn mounts_shared_volume(container: &Value) -> bool {
    json::list(container, "volumeMounts")
        .iter()
        .any(|mount| json::name(mount) == names::SHARED_VOLUME)
}

/// Resource names that device plugins use for accelerators. Network cards and other devices are extended resources too.
const ACCELERATORS: [&str; 10] = [
    "gpu", "tpu", "/mig-", "gaudi", "neuron", "npu", "ascend", "mlu", "dcu", "gcu",
];

fn has_accelerator(container: &Value) -> bool {
    let Some(resources) = container.get("resources") else {
        return false;
    };
    let device = |kind: &str| {
        let amounts = resources.get(kind).and_then(Value::as_object);
        amounts.is_some_and(|amounts| {
            amounts.iter().any(|(name, amount)| {
                let name = name.to_ascii_lowercase();
                name.contains('/')
                    && ACCELERATORS.iter().any(|known| name.contains(known))
                    && super::quantity::Quantity::of(amount).is_some_and(|q| q.is_positive())
            })
        })
    };
    device("limits") || device("requests") || !json::list(resources, "claims").is_empty()
}

fn all_names(containers: &[Value]) -> String {
    let shown: Vec<_> = containers.iter().take(10).map(json::name).collect();
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chosen(pod: &Value, settings: &Settings) -> Result<usize, Reason> {
        target(pod, &pod["spec"], settings).map_err(|refusal| refusal.reason)
    }

    #[test]
    fn the_container_with_an_accelerator_is_chosen() {
        let settings = Settings::new("p", "n", "i", 1 << 30);
        let with = |resources: Value| json!({"name": "b", "resources": resources});
        let pod = |b: Value| json!({"metadata": {}, "spec": {"containers": [{"name": "a"}, b, {"name": "c"}]}});
        for device in [
            "nvidia.com/gpu",
            "amd.com/gpu",
            "gpu.intel.com/xe",
            "nvidia.com/mig-1g.5gb",
            "habana.ai/gaudi",
        ] {
            assert_eq!(
                chosen(&pod(with(json!({"limits": {device: "1"}}))), &settings),
                Ok(1),
                "{device}"
            );
            assert_eq!(
                chosen(&pod(with(json!({"limits": {device: 0}}))), &settings),
                Err(Reason::ContainerAmbiguous)
            );
        }
        assert_eq!(
            chosen(&pod(with(json!({"claims": [{"name": "g"}]}))), &settings),
            Ok(1)
        );
        let rdma = pod(with(json!({"limits": {"rdma/ib": 1}})));
        assert_eq!(chosen(&rdma, &settings), Err(Reason::ContainerAmbiguous));
        let mut both = pod(with(json!({"limits": {"nvidia.com/gpu": 1}})));
        both["spec"]["containers"][2]["resources"] = json!({"limits": {"nvidia.com/gpu": 1}});
        assert_eq!(chosen(&both, &settings), Err(Reason::ContainerAmbiguous));

        let mut named = settings.clone();
        named.container = Some("c".to_string());
        assert_eq!(chosen(&both, &named), Ok(2));
        both["metadata"]["annotations"] = json!({names::CONTAINER: "a"});
        assert_eq!(chosen(&both, &named), Ok(0));
        both["metadata"]["annotations"] = json!({names::CONTAINER: "z"});
        assert_eq!(chosen(&both, &named), Err(Reason::ContainerNotFound));
        let one = json!({"spec": {"containers": [{"name": "x"}]}});
        assert_eq!(chosen(&one, &settings), Ok(0));
        assert_eq!(
            chosen(&json!({"spec": {}}), &settings),
            Err(Reason::ContainerAmbiguous)
        );
    }
}
