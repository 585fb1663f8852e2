//! GPU access of the sidecar, with and without GPUs in the pod.

use super::*;
use kvcachepool_protocol::config::{ByteSize, CONTEXT_BYTES, Config, TransferMode};

pub const GOLDEN: [&str; 2] = ["gpu-visible-devices", "gpu-resource-claim"];

const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

pub fn with_access(gpu_access: GpuAccess) -> Settings {
    Settings {
        gpu_access,
        container: Some("vllm".to_string()),
        // Without it, the default limit would be a shortfall of Guaranteed pods.
        resources: serde_json::from_value(json!({"requests": {"cpu": "500m"}})).unwrap(),
        ..settings()
    }
}

fn sidecar(pod: &Value) -> &Value {
    resources::found_sidecar(&pod["spec"]).unwrap()
}

fn variable<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    let list = json::list(sidecar(pod), "env");
    json::text(&list[json::position(list, name)?], "value")
}

/// The shortfall in the pod's annotation, and that the sidecar has no GPU settings.
fn lacks(before: &Value, settings: &Settings) -> String {
    let Outcome::Inject {
        patch,
        report,
        shortfall,
    } = inject(before, settings)
    else {
        panic!("not injected: {:?}", inject(before, settings));
    };
    let after = patched(before, &patch);
    assert_sound(before, &after, "vllm");
    assert_eq!(inject(&after, settings), Outcome::Unchanged);
    assert_eq!(Report::of(&after), Some(report.clone()));
    assert_eq!(report.result, Verdict::Injected);
    assert_eq!(report.reason, shortfall.map_or("", Shortfall::name));
    assert_eq!(report.message.is_empty(), shortfall.is_none());
    let given =
        variable(&after, DEVICES).is_some() || sidecar(&after)["resources"].get("claims").is_some();
    let room = own_config(&after).gpu.context_memory;
    assert_eq!(room, ByteSize(if given { CONTEXT_BYTES } else { 0 }));
    assert_eq!(given, shortfall.is_none());
    report.reason
}

fn own_config(pod: &Value) -> Config {
    let text = json::annotation(pod, names::CONFIG).unwrap();
    Config::parse(text, false).unwrap().0
}

/// The pod with these resources on vLLM's container.
fn asking(resources: Value) -> Value {
    let mut pod = pod("plain");
    pod["spec"]["containers"][0]["resources"] = resources;
    pod
}

fn assert_golden_of(name: &str, before: &Value, settings: &Settings) -> Value {
    let Outcome::Inject { patch, .. } = inject(before, settings) else {
        panic!("not injected");
    };
    assert_golden(name, &patch);
    patched(before, &patch)
}

#[test]
fn a_pod_with_a_device_plugin_gets_variables_and_no_second_gpu() {
    let settings = with_access(GpuAccess::VisibleDevices);
    let before = pod("guaranteed");
    assert_eq!(lacks(&before, &settings), "");
    let after = assert_golden_of("gpu-visible-devices", &before, &settings);
    assert_eq!(variable(&after, DEVICES), Some("all"));
    assert_eq!(variable(&after, CAPABILITIES), Some("compute,utility"));
    let asked = sidecar(&after)["resources"].to_string();
    assert!(!asked.contains("nvidia.com"), "{asked}");
    assert_eq!(qos::class(&after["spec"], |_| true), Qos::Guaranteed);
    let mut own_users = before.clone();
    own_users["spec"]["hostUsers"] = false.into();
    assert_eq!(lacks(&own_users, &settings), "");
    for name in ["nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared"] {
        let before = asking(json!({"limits": {name: 1}}));
        assert_eq!(lacks(&before, &settings), "", "{name}");
    }
}

#[test]
fn a_pod_with_claims_shares_only_those_of_vllm() {
    let settings = with_access(GpuAccess::ResourceClaim);
    let before = pod("resource-claims");
    assert_eq!(lacks(&before, &settings), "");
    let after = assert_golden_of("gpu-resource-claim", &before, &settings);
    assert_eq!(
        sidecar(&after)["resources"]["claims"],
        json!([{"name": "gpus", "request": "compute"}, {"name": "nic"}])
    );
    assert_eq!(
        after["spec"]["resourceClaims"],
        before["spec"]["resourceClaims"]
    );
    assert_eq!(qos::class(&after["spec"], |_| true), Qos::Guaranteed);
}

#[test]
fn a_pod_without_a_gpu_is_injected_with_a_shortfall() {
    let variables = with_access(GpuAccess::VisibleDevices);
    let claims = with_access(GpuAccess::ResourceClaim);
    let cpu = asking(json!({"requests": {"cpu": "1"}}));
    assert_eq!(lacks(&cpu, &variables), "GpuNotRequested");
    assert_eq!(lacks(&cpu, &claims), "NoResourceClaim");
    // Each mode with the other's pod.
    assert_eq!(
        lacks(&pod("resource-claims"), &variables),
        "GpuNotRequested"
    );
    assert_eq!(lacks(&pod("guaranteed"), &claims), "NoResourceClaim");
    for none in [
        json!({"limits": {"nvidia.com/gpu": 0}}),
        json!({"limits": {"amd.com/gpu": 1}}),
        json!({"limits": {"nvidia.com/rdma": 1}}),
        json!({"claims": [{"name": "not-of-the-pod"}]}),
    ] {
        let before = asking(none);
        assert_eq!(lacks(&before, &variables), "GpuNotRequested", "{before}");
        assert_eq!(lacks(&before, &claims), "NoResourceClaim", "{before}");
    }
    let after = injected(&cpu, &variables);
    let message = Report::of(&after).unwrap().message;
    assert!(
        message.starts_with("container vllm requests no"),
        "{message}"
    );
}

#[test]
fn a_cuda_window_without_gpu_access_is_a_shortfall() {
    let mut settings = with_access(GpuAccess::None);
    let named = |text: &str| {
        let mut pod = asking(json!({}));
        pod["spec"]["containers"][0]["env"] = json!([{"name": DEVICES, "value": text}]);
        pod
    };
    let on_gpus = [pod("guaranteed"), named("all"), pod("resource-claims")];
    let on_cpus = [asking(json!({"requests": {"cpu": "1"}})), named("none")];
    for mode in [TransferMode::Auto, TransferMode::Engine] {
        settings.config.transfer.mode = mode;
        for pod in &on_gpus {
            assert_eq!(reason(pod, &settings), "", "nothing of it needs a GPU");
        }
    }
    settings.config.transfer.mode = TransferMode::CudaWindow;
    for pod in &on_gpus {
        assert_eq!(lacks(pod, &settings), "NoGpuAccess");
    }
    let message = Report::of(&injected(&on_gpus[0], &settings))
        .unwrap()
        .message;
    assert_eq!(
        message,
        "container vllm requests a GPU, which the pool does not let the sidecar use, so the sidecar has no GPU"
    );
    for pod in &on_cpus {
        assert_eq!(reason(pod, &settings), "", "its window is host memory");
    }
    // A user who names devices for the sidecar is responsible for them.
    settings.env = serde_json::from_value(json!([{"name": DEVICES, "value": "0"}])).unwrap();
    assert_eq!(reason(&on_gpus[0], &settings), "");
    for access in [GpuAccess::VisibleDevices, GpuAccess::ResourceClaim] {
        let mut settings = with_access(access);
        settings.config.transfer.mode = TransferMode::CudaWindow;
        let pod = &on_gpus[if access == GpuAccess::ResourceClaim {
            2
        } else {
            0
        }];
        assert_eq!(lacks(pod, &settings), "");
    }
}

/// The shortfall in the pod's annotation.
fn reason(before: &Value, settings: &Settings) -> String {
    Report::of(&injected(before, settings)).unwrap().reason
}

#[test]
fn the_sidecar_gets_the_devices_that_vllm_names() {
    let settings = with_access(GpuAccess::VisibleDevices);
    let named = |text: &str| {
        let mut pod = asking(json!({}));
        pod["spec"]["containers"][0]["env"] = json!([{"name": DEVICES, "value": text}]);
        pod
    };
    for text in ["all", "0,1", "GPU-1"] {
        assert_eq!(lacks(&named(text), &settings), "", "{text}");
        let after = injected(&named(text), &settings);
        assert_eq!(variable(&after, DEVICES), Some(text));
    }
    for text in ["", "void", "none", "$(ELSEWHERE)"] {
        assert_eq!(lacks(&named(text), &settings), "GpuNotRequested", "{text}");
    }
}

#[test]
fn gpu_variables_of_the_pool_take_precedence() {
    let mut settings = with_access(GpuAccess::VisibleDevices);
    settings.env = serde_json::from_value(json!([{"name": DEVICES, "value": "0"}])).unwrap();
    let after = injected(&pod("guaranteed"), &settings);
    assert_eq!(variable(&after, DEVICES), Some("0"));
    assert_eq!(variable(&after, CAPABILITIES), Some("compute,utility"));
    assert_eq!(inject(&after, &settings), Outcome::Unchanged);
    // The variable suffices if nothing else in the pod shows a GPU.
    assert_eq!(lacks(&asking(json!({})), &settings), "");
    let source = json!({"configMapKeyRef": {"name": "gpus", "key": "capabilities"}});
    settings.env =
        serde_json::from_value(json!([{"name": CAPABILITIES, "valueFrom": source}])).unwrap();
    let after = injected(&pod("guaranteed"), &settings);
    assert_eq!(variable(&after, DEVICES), Some("all"));
    let env = json::list(sidecar(&after), "env");
    let kept = &env[json::position(env, CAPABILITIES).unwrap()];
    assert_eq!(
        kept.pointer("/valueFrom/configMapKeyRef/name"),
        Some(&json!("gpus"))
    );
    assert_eq!(kept.get("value"), None);
}

#[test]
fn memory_for_cuda_contexts_is_reserved_only_with_a_gpu() {
    let (with, without) = (with_access(GpuAccess::VisibleDevices), settings());
    let memory = |pod: &Value, settings: &Settings| {
        let after = injected(pod, settings);
        let amounts = |kind| qos::amounts(sidecar(&after), kind)["memory"];
        assert_eq!(amounts("limits"), amounts("requests"));
        let config = own_config(&after);
        assert_eq!(
            amounts("limits"),
            Quantity::bytes(config.container_memory_bytes()),
            "the sidecar reckons as the operator does"
        );
        config.container_memory_bytes()
    };
    let gpu = pod("plain");
    assert_eq!(memory(&gpu, &with), memory(&gpu, &without) + CONTEXT_BYTES);
    let cpu = asking(json!({}));
    assert_eq!(memory(&cpu, &with), memory(&cpu, &without));
    let mut chosen = with.clone();
    chosen.config.gpu.context_memory = ByteSize(2 * GI);
    assert_eq!(memory(&gpu, &chosen), memory(&gpu, &without) + 2 * GI);
    assert_eq!(memory(&cpu, &chosen), memory(&cpu, &without));
    // Pod-level resources are raised too.
    let whole = injected(&pod("pod-resources"), &with);
    let before = injected(&pod("pod-resources"), &without);
    let limit = |pod: &Value| qos::amounts(&pod["spec"], "limits")["memory"];
    assert_eq!(
        limit(&whole),
        limit(&before) + Quantity::bytes(CONTEXT_BYTES)
    );
}

#[test]
fn a_later_call_adapts_to_changes_by_other_webhooks() {
    let claims = with_access(GpuAccess::ResourceClaim);
    let mut pod = injected(&super::pod("resource-claims"), &claims);
    let vllm = &mut pod["spec"]["containers"][0]["resources"];
    vllm["claims"] = json!([{"name": "gpus"}]);
    let after = injected(&pod, &claims);
    let shared = |pod: &Value| sidecar(pod)["resources"].get("claims").cloned();
    assert_eq!(shared(&after), Some(json!([{"name": "gpus"}])));
    // The API server rejects a pod whose containers use undeclared claims.
    for list in ["containers", "initContainers"] {
        for container in json::list_mut(&mut pod["spec"], list) {
            if !additions::is_added(container) {
                json::object(&mut container["resources"]).remove("claims");
            }
        }
    }
    json::object(&mut pod["spec"]).remove("resourceClaims");
    let after = injected(&pod, &claims);
    assert_eq!(shared(&after), None);
    assert_eq!(Report::of(&after).unwrap().reason, "NoResourceClaim");
    assert_eq!(inject(&after, &claims), Outcome::Unchanged);

    let variables = with_access(GpuAccess::VisibleDevices);
    let mut pod = injected(&super::pod("guaranteed"), &variables);
    let mut hidden = pod.clone();
    let init = json::list_mut(&mut hidden["spec"], "initContainers");
    let place = json::position(init, names::SIDECAR_CONTAINER).unwrap();
    let env = json::list_mut(&mut init[place], "env");
    let place = json::position(env, DEVICES).unwrap();
    env[place]["value"] = "void".into();
    assert_eq!(
        inject(&hidden, &variables),
        Outcome::Unchanged,
        "a policy of the cluster that hides devices is not undone"
    );
    for kind in ["limits", "requests"] {
        let asked = &mut pod["spec"]["containers"][0]["resources"][kind];
        json::object(asked).remove("nvidia.com/gpu");
    }
    let after = injected(&pod, &variables);
    assert_eq!(variable(&after, DEVICES), None);
    assert_eq!(Report::of(&after).unwrap().reason, "GpuNotRequested");
    assert_eq!(inject(&after, &variables), Outcome::Unchanged);
}

#[test]
fn another_gpu_access_changes_the_hash() {
    let of = |gpu_access| {
        let settings = settings();
        let settings = Settings {
            gpu_access,
            ..settings
        };
        settings.hash()
    };
    assert_eq!(of(GpuAccess::None), settings().hash());
    assert_ne!(of(GpuAccess::VisibleDevices), settings().hash());
    assert_ne!(of(GpuAccess::ResourceClaim), of(GpuAccess::VisibleDevices));
}
