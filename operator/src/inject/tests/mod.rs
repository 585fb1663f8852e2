//! Whole pods: every launch shape as its stack creates it, with the golden patch of each, and invariants for all of them. `GOLDEN=write
//! cargo test` rewrites the golden files.

mod below;
mod containers;
mod gpu;
mod properties;
mod refusals;
mod sglang;
mod tier;

use super::qos::{self, Qos};
use super::*;
use crate::api::{ExistingConnector, GpuAccess};
use serde_json::json;
use std::path::PathBuf;

pub(super) const GI: u64 = 1 << 30;

pub(super) fn settings() -> Settings {
    let mut settings = Settings::new("llama", "serving", "example.com/kvcachepool:0.1.0", 16 * GI);
    settings.image_pull_policy = Some("IfNotPresent".to_string());
    settings.image_pull_secrets = vec!["regcred".to_string()];
    settings.memory_max_bytes = Some(64 * GI);
    settings
}

pub(super) fn compose() -> Settings {
    Settings {
        existing_connector: ExistingConnector::Compose,
        ..settings()
    }
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(name)
}

pub(super) fn pod(name: &str) -> Value {
    let text = std::fs::read_to_string(folder("pods").join(format!("{name}.yaml"))).unwrap();
    serde_yaml::from_str(&text).unwrap()
}

pub(super) fn patched(pod: &Value, patch: &Patch) -> Value {
    let mut after = pod.clone();
    json_patch::patch(&mut after, patch).unwrap();
    after
}

/// The pod after one call that must inject it.
pub(super) fn injected(pod: &Value, settings: &Settings) -> Value {
    match inject(pod, settings) {
        Outcome::Inject { patch, .. } => patched(pod, &patch),
        other => panic!("not injected: {other:?}"),
    }
}

fn refused(pod: &Value, settings: &Settings) -> (Reason, Patch) {
    match inject(pod, settings) {
        Outcome::Refuse { reason, patch, .. } => (reason, patch),
        other => panic!("not refused: {other:?}"),
    }
}

/// Invariants of every injected pod.
pub(super) fn assert_sound(before: &Value, after: &Value, target: &str) {
    check::check(after).unwrap();
    let (old, new) = (&before["spec"], &after["spec"]);
    let user = |container: &&Value| !additions::is_added(container);
    let olds: Vec<_> = json::all_containers(old).filter(user).collect();
    let news: Vec<_> = json::all_containers(new).filter(user).collect();
    assert_eq!(olds.len(), news.len());
    for (old, new) in olds.into_iter().zip(news) {
        assert_eq!(old["command"], new["command"]);
        assert_eq!(old["args"], new["args"]);
        let bare = |container: &Value| {
            let mut container = container.clone();
            for key in ["env", "volumeMounts"] {
                json::object(&mut container).remove(key);
            }
            container
        };
        if json::name(old) == target {
            assert_eq!(bare(old), bare(new));
            let listed =
                |value: &Value| value["name"] == "PYTHONPATH" || value["name"] == "VLLM_PLUGINS";
            for variable in json::list(old, "env").iter().filter(|one| !listed(one)) {
                assert!(json::list(new, "env").contains(variable), "{variable}");
            }
            for mount in json::list(old, "volumeMounts") {
                let there = json::list(new, "volumeMounts");
                assert!(there.contains(mount) || json::name(mount) == names::SHARED_VOLUME);
            }
        } else {
            assert_eq!(old, new);
        }
    }
    let class = |spec| qos::class(spec, |_| true);
    assert!(
        class(new) >= class(old),
        "{:?} -> {:?}",
        class(old),
        class(new)
    );
    assert_ne!(
        class(new),
        Qos::BestEffort,
        "cpu and memory are always requested"
    );
    for volume in json::list(old, "volumes") {
        assert!(json::list(new, "volumes").contains(volume));
    }
    for key in [
        "terminationGracePeriodSeconds",
        "securityContext",
        "hostNetwork",
        "restartPolicy",
    ] {
        assert_eq!(old[key], new[key], "{key}");
    }
}

/// Golden files exclude what differs between builds: the version, hashes, and the config, which has its own tests.
fn golden_text(patch: &Patch) -> String {
    let mut value = json!(patch);
    scrub(&mut value);
    serde_json::to_string_pretty(&value).unwrap() + "\n"
}

fn scrub(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(scrub),
        Value::Object(map) => {
            let path = map
                .get("path")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_string();
            for (key, value) in map.iter_mut() {
                let key = if key == "value" {
                    path.as_str()
                } else {
                    key.as_str()
                };
                if key.ends_with("kvcachepool.io/config") || key.ends_with("kvcachepool.io~1config")
                {
                    *value = "<config>".into();
                } else if key.ends_with("kvcachepool.io/injection")
                    || key.ends_with("kvcachepool.io~1injection")
                {
                    let mut report: Value = serde_json::from_str(value.as_str().unwrap()).unwrap();
                    report["version"] = "<version>".into();
                    if report.get("hash").is_some() {
                        report["hash"] = "<hash>".into();
                    }
                    *value = report;
                } else {
                    scrub(value);
                }
            }
        }
        _ => {}
    }
}

fn assert_golden(name: &str, patch: &Patch) {
    let path = folder("golden").join(format!("{name}.json"));
    let text = golden_text(patch);
    if std::env::var("GOLDEN").as_deref() == Ok("write") {
        std::fs::write(&path, &text).unwrap();
    }
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap_or_default())
        .unwrap_or_else(|_| panic!("{} is missing: GOLDEN=write makes it", path.display()));
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found, golden, "{name}");
}

/// Injected pods, and the name of the engine's container in each.
const INJECTED: [(&str, &str); 24] = [
    ("plain", "vllm"),
    ("no-args", "vllm"),
    ("production-stack-helm", "vllm"),
    ("production-stack-operator", "vllm"),
    ("kserve-llmisvc", "main"),
    ("kserve-huggingface", "kserve-container"),
    ("kserve-vllm", "kserve-container"),
    ("llm-d-modelservice", "vllm"),
    ("llm-d-guide", "modelserver"),
    ("lws-data-parallel", "vllm"),
    ("lws-nodes", "vllm"),
    ("aibrix", "vllm-openai"),
    ("aibrix-disaggregated", "prefill"),
    ("dynamo", "main"),
    ("ray-serve", "ray-worker"),
    ("istio", "vllm"),
    ("statefulset", "vllm"),
    ("pod-resources", "vllm"),
    ("guaranteed", "vllm"),
    ("best-effort", "engine"),
    ("env-value-from", "vllm"),
    ("image-python-path", "server"),
    ("resource-claims", "vllm"),
    ("sglang", "sglang"),
];

/// The injected pods with a connector of their own.
const COMPOSED: [&str; 2] = ["llm-d-modelservice", "aibrix-disaggregated"];

const REFUSED: [(&str, Reason); 9] = [
    ("production-stack-lmcache", Reason::OtherCachePresent),
    ("production-stack-ray", Reason::MultiNodeUnsupported),
    ("kserve-multinode", Reason::MultiNodeUnsupported),
    ("lws", Reason::MultiNodeUnsupported),
    ("dynamo-lmcache", Reason::OtherCachePresent),
    ("llm-d-modelservice", Reason::ConnectorPresent),
    ("aibrix-disaggregated", Reason::ConnectorPresent),
    ("several-gpus", Reason::ContainerAmbiguous),
    ("host-network", Reason::HostNetworkConflict),
];

#[test]
fn every_shape_gets_its_golden_patch_and_nothing_else() {
    for (name, target) in INJECTED {
        let before = pod(name);
        let settings = if COMPOSED.contains(&name) {
            compose()
        } else {
            settings()
        };
        let Outcome::Inject { patch, report, .. } = inject(&before, &settings) else {
            panic!("{name}: {:?}", inject(&before, &settings));
        };
        let after = patched(&before, &patch);
        assert_sound(&before, &after, target);
        assert_eq!(
            inject(&after, &settings),
            Outcome::Unchanged,
            "{name}: a second call"
        );
        assert_eq!(Report::of(&after), Some(report), "{name}");
        assert_eq!(json::label(&after, names::POOL), Some("llama"), "{name}");
        assert_golden(name, &patch);
    }
}

#[test]
fn refused_shapes_are_stamped_and_otherwise_untouched() {
    for (name, expected) in REFUSED {
        let before = pod(name);
        let (reason, patch) = refused(&before, &settings());
        assert_eq!(reason, expected, "{name}");
        let after = patched(&before, &patch);
        assert_eq!(after["spec"], before["spec"], "{name}");
        let report = Report::of(&after).unwrap();
        assert_eq!(
            (report.result, report.reason.as_str()),
            (Verdict::Refused, expected.name()),
            "{name}"
        );
        let (again, nothing) = refused(&after, &settings());
        assert_eq!(
            (again, nothing.is_empty()),
            (expected, true),
            "{name}: a second call"
        );
    }
}

#[test]
fn every_pod_file_is_in_a_table() {
    let known = |name: &str| {
        name == "hook-args"
            || INJECTED.iter().any(|(one, _)| *one == name)
            || REFUSED.iter().any(|(one, _)| *one == name)
    };
    for file in std::fs::read_dir(folder("pods")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(known(name), "{name}");
    }
    for file in std::fs::read_dir(folder("golden")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(
            INJECTED.iter().any(|(one, _)| *one == name)
                || name == "hook-args"
                || below::GOLDEN.contains(&name)
                || gpu::GOLDEN.contains(&name),
            "{name}"
        );
    }
}

#[test]
fn the_sidecar_reads_its_config_from_the_pod() {
    let mut settings = settings();
    settings.generation = 7;
    settings.config.socket = "/elsewhere/x.sock".into();
    let after = injected(&pod("guaranteed"), &settings);
    let text = json::annotation(&after, names::CONFIG).unwrap();
    let (config, unknown) = kvcachepool_protocol::config::Config::parse(text, false).unwrap();
    assert!(unknown.is_empty() && config.managed);
    assert_eq!(config.memory.size.0, 2 * GI, "the pod's annotation");
    assert_eq!(
        (config.pool.name.as_str(), config.pool.generation),
        ("llama", 7)
    );
    assert_eq!(
        config.socket,
        std::path::Path::new("/kvcachepool/sidecar.sock")
    );
    let sidecar = resources::found_sidecar(&after["spec"]).unwrap();
    let memory = qos::amounts(sidecar, "limits")["memory"];
    assert_eq!(memory, Quantity::bytes(config.container_memory_bytes()));
    assert_eq!(qos::amounts(sidecar, "requests")["memory"], memory);
}

#[test]
fn the_qos_class_of_the_pod_is_preserved() {
    let class = |pod: &Value| qos::class(&pod["spec"], |_| true);
    let guaranteed = injected(&pod("guaranteed"), &settings());
    assert_eq!(class(&guaranteed), Qos::Guaranteed);
    let whole = injected(&pod("pod-resources"), &settings());
    assert_eq!(class(&whole), Qos::Guaranteed);
    let sidecar = resources::found_sidecar(&whole["spec"]).unwrap();
    for (name, own) in [
        ("cpu", Quantity::millis(8_000)),
        ("memory", Quantity::bytes(64 * GI)),
    ] {
        let share = qos::amounts(sidecar, "requests")[name];
        for kind in ["requests", "limits"] {
            assert_eq!(
                qos::amounts(&whole["spec"], kind)[name],
                own + share,
                "{kind} {name}"
            );
        }
    }
    // Only the missing part is added to larger pod-level resources.
    let mut more = settings();
    more.memory_bytes = 32 * GI;
    let grown = injected(&whole, &more);
    let fresh = injected(&pod("pod-resources"), &more);
    assert_eq!(grown["spec"]["resources"], fresh["spec"]["resources"]);
}

#[test]
fn pools_choose_cpu_environment_and_huge_pages_but_not_memory() {
    let mut settings = settings();
    settings.resources = serde_json::from_value(json!({
        "requests": {"cpu": "2", "memory": "1Mi"},
        "limits": {"cpu": "1", "ephemeral-storage": "1024Mi"},
    }))
    .unwrap();
    settings.env =
        serde_json::from_value(json!([{"name": "RUST_BACKTRACE", "value": "1"}])).unwrap();
    settings.config.memory.huge_pages = kvcachepool_protocol::config::HugePages::Size2Mi;
    let before = pod("plain");
    let after = injected(&before, &settings);
    assert_sound(&before, &after, "vllm");
    assert_eq!(inject(&after, &settings), Outcome::Unchanged);
    let sidecar = resources::found_sidecar(&after["spec"]).unwrap();
    let resources = &sidecar["resources"];
    assert_eq!(resources["requests"]["cpu"], "2");
    assert_eq!(
        resources["limits"]["cpu"], "2",
        "no limit below the request"
    );
    assert_eq!(resources["requests"]["ephemeral-storage"], "1Gi");
    assert_eq!(resources["limits"]["hugepages-2Mi"], "16Gi");
    assert_eq!(resources["requests"]["hugepages-2Mi"], "16Gi");
    assert!(qos::amounts(sidecar, "requests")["memory"] > Quantity::bytes(64 << 20));
    assert_eq!(
        sidecar["env"],
        json!([{"name": "RUST_BACKTRACE", "value": "1"}])
    );
}

#[test]
fn a_root_pod_gets_another_user_only_for_the_added_containers() {
    let after = injected(&pod("best-effort"), &settings());
    for container in json::list(&after["spec"], "initContainers") {
        assert_eq!(container["securityContext"]["runAsUser"], 65532);
        assert_eq!(container["securityContext"]["runAsNonRoot"], true);
    }
    let after = injected(&pod("plain"), &settings());
    for container in json::list(&after["spec"], "initContainers") {
        assert_eq!(container["securityContext"].get("runAsUser"), None);
    }
    assert_eq!(after.pointer("/spec/securityContext/fsGroup"), None);
}

#[test]
fn the_args_hook_adds_one_argument() {
    let before = pod("hook-args");
    let Outcome::Inject { patch, .. } = inject(&before, &settings()) else {
        panic!("not injected");
    };
    assert_golden("hook-args", &patch);
    let after = patched(&before, &patch);
    let args = json::list(&after["spec"]["containers"][0], "args");
    assert_eq!(args[2], "--kv-transfer-config");
    assert!(
        args[3]
            .as_str()
            .unwrap()
            .contains("\"kv_load_failure_policy\":\"recompute\"")
    );
    assert_eq!(inject(&after, &settings()), Outcome::Unchanged);
    for name in ["kserve-llmisvc", "no-args", "production-stack-helm"] {
        let mut shell = pod(name);
        shell["metadata"]["annotations"][names::HOOK] = "args".into();
        assert_eq!(
            refused(&shell, &settings()).0,
            Reason::HookUnsupported,
            "{name}"
        );
    }
}

#[test]
fn new_config_keys_with_defaults_do_not_change_the_hash() {
    assert_eq!(settings().hash(), "e39e1d321a3422a1");
}

#[test]
fn a_hash_covers_only_settings_that_a_sidecar_cannot_reload() {
    let settings = settings();
    let mut live = settings.clone();
    live.generation += 1;
    live.config.cache.min_load_tokens += 1;
    live.memory_max_bytes = None;
    assert_eq!(live.hash(), settings.hash());
    let mut image = settings.clone();
    image.image.push('x');
    let mut chunk = settings.clone();
    chunk.config.cache.chunk_tokens += 256;
    let mut memory = settings.clone();
    memory.memory_bytes += GI;
    for other in [image, chunk, memory] {
        assert_ne!(other.hash(), settings.hash());
    }
    let with_redis = |count: usize| {
        let mut with_redis = settings.clone();
        let urls = (0..count).map(|shard| format!("redis://kv-{shard}.kv"));
        with_redis.config.redis.urls = urls.collect();
        with_redis
    };
    // The number of servers is reloaded; whether there are any, and their files, is not.
    assert_eq!(with_redis(1).hash(), with_redis(3).hash());
    assert_ne!(with_redis(1).hash(), settings.hash());
    let mut files = with_redis(1);
    files.config.redis.auth = Some("/auth".into());
    assert_ne!(files.hash(), with_redis(1).hash());
}
