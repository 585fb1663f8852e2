//! Random pods, with random changes by another webhook between two calls.

use super::*;
use proptest::prelude::*;
use proptest::sample::{Index, select};

fn amounts() -> impl Strategy<Value = Value> {
    let cpu = select(vec!["0", "100m", "1", "1.5", "4"]);
    let memory = select(vec!["64Mi", "1Gi", "1500M", "8Gi"]);
    prop::option::of((
        prop::option::of(cpu),
        prop::option::of(memory),
        any::<bool>(),
    ))
    .prop_map(|some| {
        let Some((cpu, memory, gpu)) = some else {
            return json!({});
        };
        let mut amounts = json!({});
        for (name, amount) in [
            ("cpu", cpu),
            ("memory", memory),
            ("ephemeral-storage", memory.filter(|_| gpu)),
            ("nvidia.com/gpu", gpu.then_some("1")),
        ] {
            if let Some(amount) = amount {
                amounts[name] = amount.into();
            }
        }
        amounts
    })
}

/// Requests, limits, or both and equal: valid without comparing.
fn resources() -> impl Strategy<Value = Value> {
    (amounts(), 0..4u8).prop_map(|(amounts, kind)| match kind {
        0 => json!({"requests": amounts}),
        1 => json!({"limits": amounts}),
        2 => json!({"limits": amounts, "requests": amounts}),
        _ => Value::Null,
    })
}

fn variables() -> impl Strategy<Value = Value> {
    let one = (
        select(vec!["PYTHONPATH", "VLLM_PLUGINS", "HOME", "X"]),
        0..4u8,
        "[a-z/:,]{0,12}",
    )
        .prop_map(|(name, kind, text)| match kind {
            0 => json!({"name": name}),
            1 => json!({"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}),
            _ => json!({"name": name, "value": text}),
        });
    prop::option::of(prop::collection::vec(one, 0..5)).prop_map(|list| json!(list))
}

fn container(name: String) -> impl Strategy<Value = Value> {
    let words = prop::option::of(prop::collection::vec("[a-z -]{0,10}", 0..3));
    (
        resources(),
        variables(),
        words.clone(),
        words,
        any::<bool>(),
    )
        .prop_map(move |(resources, env, command, args, mounts)| {
            let mut container =
                json!({"name": name, "image": "i", "command": command, "args": args, "env": env});
            if !resources.is_null() {
                container["resources"] = resources;
            }
            if mounts {
                container["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
            }
            container
        })
}

fn pods() -> impl Strategy<Value = Value> {
    let containers = (1..4usize).prop_flat_map(|n| {
        (0..n)
            .map(|i| container(format!("c{i}")))
            .collect::<Vec<_>>()
    });
    let init = (0..4usize).prop_flat_map(|n| {
        (0..n)
            .map(|i| (container(format!("i{i}")), any::<bool>()))
            .collect::<Vec<_>>()
    });
    // At least the sum of all containers.
    let whole = select(vec![
        json!(null),
        json!({"requests": {"cpu": "100", "memory": "1Ti"}, "limits": {"cpu": "100", "memory": "1Ti"}}),
        json!({"limits": {"memory": "1Ti"}}),
    ]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (containers, init, whole, flags).prop_map(
        |(containers, init, whole, (root, by_label, claims))| {
            let init: Vec<Value> = init
                .into_iter()
                .map(|(mut container, sidecar)| {
                    if sidecar {
                        container["restartPolicy"] = "Always".into();
                    }
                    container
                })
                .collect();
            let place = if by_label { "labels" } else { "annotations" };
            let mut pod = json!({
                "metadata": {place: {names::POOL: "llama"}},
                "spec": {"containers": containers, "volumes": [{"name": "data", "emptyDir": {}}]},
            });
            json::entry(json::entry(&mut pod, "metadata"), "annotations");
            if pod["metadata"]["annotations"].is_null() {
                pod["metadata"]["annotations"] = json!({});
            }
            pod["metadata"]["annotations"][names::CONTAINER] = "c0".into();
            if !init.is_empty() {
                pod["spec"]["initContainers"] = init.into();
            }
            if !whole.is_null() {
                pod["spec"]["resources"] = whole;
            }
            if claims {
                pod["spec"]["resourceClaims"] =
                    json!([{"name": "gpus", "resourceClaimName": "gpus"}, {"name": "nic", "resourceClaimName": "nic"}]);
                for container in json::list_mut(&mut pod["spec"], "containers") {
                    json::entry(container, "resources")["claims"] =
                        json!([{"name": "gpus", "request": "one"}, {"name": "gpus", "request": "two"}, {"name": "nic"}]);
                }
            }
            if root {
                pod["spec"]["securityContext"] = json!({"runAsUser": 0});
            }
            pod
        },
    )
}

/// Changes by another webhook, or by the API server's defaults, between two calls.
#[derive(Debug, Clone)]
enum Rude {
    AppendsInitContainer,
    MovesInitContainerToTheEnd(Index),
    StripsRestartPolicies,
    AddsToEveryContainer,
    TakesVolumeMounts(Index),
    TakesVariables(Index),
    TakesAnnotations,
    TakesGpus,
    LimitsCpu,
    FillsInDefaults,
}

fn rudeness() -> impl Strategy<Value = Rude> {
    prop_oneof![
        Just(Rude::AppendsInitContainer),
        any::<Index>().prop_map(Rude::MovesInitContainerToTheEnd),
        Just(Rude::StripsRestartPolicies),
        Just(Rude::AddsToEveryContainer),
        any::<Index>().prop_map(Rude::TakesVolumeMounts),
        any::<Index>().prop_map(Rude::TakesVariables),
        Just(Rude::TakesAnnotations),
        Just(Rude::TakesGpus),
        Just(Rude::LimitsCpu),
        Just(Rude::FillsInDefaults),
    ]
}

impl Rude {
    fn act(&self, pod: &mut Value, times: usize) {
        let spec = json::entry(pod, "spec");
        let init = json::list_mut(spec, "initContainers");
        match self {
            Self::AppendsInitContainer => {
                init.push(json!({"name": format!("late{times}"), "image": "x"}));
            }
            Self::MovesInitContainerToTheEnd(which) => {
                let moved = init.remove(which.index(init.len()));
                init.push(moved);
            }
            Self::StripsRestartPolicies => {
                let added = init
                    .iter_mut()
                    .filter(|container| additions::is_added(container));
                added.for_each(|container| drop(json::object(container).remove("restartPolicy")));
            }
            Self::AddsToEveryContainer => {
                for container in init
                    .iter_mut()
                    .filter(|container| additions::is_added(container))
                {
                    json::list_mut(container, "env")
                        .push(json!({"name": format!("AWS{times}"), "value": "r"}));
                    json::list_mut(container, "volumeMounts")
                        .push(json!({"name": "data", "mountPath": format!("/aws{times}")}));
                }
            }
            Self::TakesVolumeMounts(which) => {
                let place = which.index(init.len());
                json::object(&mut init[place]).remove("volumeMounts");
            }
            Self::TakesVariables(which) => {
                let env = json::list_mut(&mut json::list_mut(spec, "containers")[0], "env");
                if !env.is_empty() {
                    let taken = json::name(&env[which.index(env.len())]).to_string();
                    if taken == "PYTHONPATH" {
                        env.retain(|variable| json::name(variable) != taken);
                    }
                }
            }
            Self::TakesAnnotations => {
                let annotations = json::object(&mut pod["metadata"]["annotations"]);
                annotations.retain(|key, _| key == names::CONTAINER || key == names::POOL);
            }
            Self::TakesGpus => {
                for list in ["containers", "initContainers"] {
                    let all = json::list_mut(spec, list).iter_mut();
                    for container in all.filter(|container| !additions::is_added(container)) {
                        let resources = json::object(json::entry(container, "resources"));
                        resources.remove("claims");
                        for amounts in resources.values_mut().filter_map(Value::as_object_mut) {
                            amounts.remove("nvidia.com/gpu");
                        }
                    }
                }
                json::object(spec).remove("resourceClaims");
            }
            Self::LimitsCpu => {
                for container in init
                    .iter_mut()
                    .filter(|container| additions::is_added(container))
                {
                    if container.pointer("/resources/limits/cpu").is_none()
                        && !qos_is_whole(&container["resources"])
                    {
                        container["resources"]["limits"]["cpu"] = "50m".into();
                    }
                }
            }
            Self::FillsInDefaults => {
                for container in init {
                    container["terminationMessagePath"] = "/dev/termination-log".into();
                }
                for volume in json::list_mut(spec, "volumes") {
                    if volume.get("projected").is_some() {
                        volume["projected"]["defaultMode"] = 420.into();
                        volume["projected"]["sources"][0]["downwardAPI"]["items"][0]["fieldRef"]
                            ["apiVersion"] = "v1".into();
                    }
                }
            }
        }
    }
}

/// Containers without any resources. A limit would add requests to them.
fn qos_is_whole(resources: &Value) -> bool {
    resources.as_object().is_none_or(|map| map.is_empty())
}

fn pools() -> impl Strategy<Value = Settings> {
    select(vec![
        settings(),
        below::with_files(),
        below::with_claim(),
        below::with_disk(Disk::NodeDirectory),
        below::with_disk(Disk::Ephemeral("nvme".to_string())),
        gpu::with_access(GpuAccess::VisibleDevices),
        gpu::with_access(GpuAccess::ResourceClaim),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 400 } else { 2000 }))]

    #[test]
    fn injecting_any_pod_is_sound_and_idempotent(pod in pods(), settings in pools()) {
        match inject(&pod, &settings) {
            Outcome::Inject { patch, .. } => {
                let after = patched(&pod, &patch);
                assert_sound(&pod, &after, "c0");
                if qos::class(&pod["spec"], |_| true) == Qos::Guaranteed {
                    prop_assert_eq!(qos::class(&after["spec"], |_| true), Qos::Guaranteed);
                }
                prop_assert_eq!(inject(&after, &settings), Outcome::Unchanged);
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn the_next_call_repairs_changes_by_others(
        pod in pods(),
        settings in pools(),
        acts in prop::collection::vec(rudeness(), 1..5),
    ) {
        let mut pod = injected(&pod, &settings);
        for (times, rude) in acts.iter().enumerate() {
            rude.act(&mut pod, times);
            if let Outcome::Inject { patch, .. } = inject(&pod, &settings) {
                pod = patched(&pod, &patch);
            }
            check::check(&pod).unwrap();
            prop_assert_eq!(inject(&pod, &settings), Outcome::Unchanged);
            prop_assert!(Report::of(&pod).is_some());
            let sidecar = resources::found_sidecar(&pod["spec"]).unwrap();
            prop_assert!(json::list(sidecar, "volumeMounts").len() >= 3);
            if matches!(rude, Rude::AddsToEveryContainer) {
                let added = format!("AWS{times}");
                prop_assert!(json::position(json::list(sidecar, "env"), &added).is_some(), "what others add stays");
            }
        }
    }
}
