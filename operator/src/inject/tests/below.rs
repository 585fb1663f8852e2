//! What lower tiers add to a pod: only for the sidecar, and nothing that could block or evict the pod.

use super::*;

pub const GOLDEN: [&str; 4] = [
    "disk-node",
    "disk-ephemeral",
    "shared-file-system",
    "shared-tiers",
];

const STORAGE: &str = "ephemeral-storage";

pub fn with_disk(disk: Disk) -> Settings {
    let mut settings = settings();
    settings.config.disk.path = Some(names::DISK_PATH.into());
    settings.config.disk.size = kvcachepool_protocol::config::ByteSize(128 * GI);
    settings.disk = Some(disk);
    settings
}

/// The pod, with an ephemeral-storage limit on each of the user's containers.
fn limited(name: &str) -> Value {
    let mut pod = pod(name);
    for container in json::list_mut(&mut pod["spec"], "containers") {
        container["resources"]["limits"][STORAGE] = "800Gi".into();
    }
    pod
}

fn sidecar(pod: &Value) -> &Value {
    resources::found_sidecar(&pod["spec"]).unwrap()
}

#[test]
fn a_disk_is_mounted_only_into_the_sidecar() {
    let disks = [Disk::NodeDirectory, Disk::Ephemeral("nvme".to_string())];
    for (disk, golden) in disks.into_iter().zip(["disk-node", "disk-ephemeral"]) {
        let (before, settings) = (pod("guaranteed"), with_disk(disk));
        let Outcome::Inject { patch, .. } = inject(&before, &settings) else {
            panic!("not injected");
        };
        assert_golden(golden, &patch);
        let after = patched(&before, &patch);
        assert_sound(&before, &after, "vllm");
        assert_eq!(qos::class(&after["spec"], |_| true), Qos::Guaranteed);
        assert_eq!(inject(&after, &settings), Outcome::Unchanged);
        let mounts = |one: &&Value| {
            let mounts = json::list(one, "volumeMounts").iter();
            mounts
                .map(json::name)
                .any(|name| name == names::DISK_VOLUME)
        };
        let mounting: Vec<_> = json::all_containers(&after["spec"])
            .filter(mounts)
            .collect();
        assert_eq!(mounting, [sidecar(&after)]);
        assert_eq!(after.pointer("/spec/securityContext/fsGroup"), None);
    }
}

#[test]
fn node_disk_is_requested_and_limited_only_if_the_user_does() {
    let settings = with_disk(Disk::NodeDirectory);
    let needed = Quantity::bytes(settings.config.disk_volume_bytes());
    let after = injected(&pod("plain"), &settings);
    let amounts = |pod: &Value, kind| qos::amounts(sidecar(pod), kind).get(STORAGE).copied();
    assert_eq!(amounts(&after, "requests"), Some(needed));
    assert_eq!(
        amounts(&after, "limits"),
        None,
        "it would be a limit of what vLLM writes"
    );
    let after = injected(&limited("plain"), &settings);
    assert_eq!(amounts(&after, "requests"), Some(needed));
    assert_eq!(
        amounts(&after, "limits"),
        Some(needed),
        "the kubelet compares the sum of limits with all that the pod wrote"
    );
    let volume = json::position(json::list(&after["spec"], "volumes"), names::DISK_VOLUME);
    let volume = &after["spec"]["volumes"][volume.unwrap()];
    assert_eq!(volume["emptyDir"]["sizeLimit"], needed.to_string());
    let ephemeral = with_disk(Disk::Ephemeral("nvme".to_string()));
    let after = injected(&limited("plain"), &ephemeral);
    assert_eq!(amounts(&after, "requests"), None, "it is not the node's");
}

#[test]
fn a_disk_on_the_node_does_not_block_scale_down() {
    const SAFE: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes";
    let annotated = |given: Option<&str>, disk: Disk| {
        let mut pod = pod("plain");
        if let Some(given) = given {
            pod["metadata"]["annotations"][SAFE] = given.into();
        }
        let after = injected(&pod, &with_disk(disk));
        json::annotation(&after, SAFE).map(str::to_string)
    };
    let node = || Disk::NodeDirectory;
    assert_eq!(annotated(None, node()).as_deref(), Some("kvcachepool-disk"));
    assert_eq!(
        annotated(Some("tmp, shm"), node()).as_deref(),
        Some("tmp,shm,kvcachepool-disk")
    );
    let existing = Some("kvcachepool-disk,tmp");
    assert_eq!(annotated(existing, node()).as_deref(), existing);
    assert_eq!(annotated(None, Disk::Ephemeral("a".to_string())), None);
}

#[test]
fn a_disk_of_another_kind_replaces_the_first() {
    let after = injected(&pod("plain"), &with_disk(Disk::NodeDirectory));
    let after = injected(&after, &with_disk(Disk::Ephemeral("nvme".to_string())));
    let volumes = json::list(&after["spec"], "volumes");
    let volume = &volumes[json::position(volumes, names::DISK_VOLUME).unwrap()];
    assert_eq!(volume.get("emptyDir"), None);
    assert!(volume.get("ephemeral").is_some());
}

pub fn with_claim() -> Settings {
    let mut settings = settings();
    settings.config.file_system.path = Some(names::FILE_SYSTEM_PATH.into());
    settings.claim = Some("kv-cache".to_string());
    settings
}

#[test]
fn a_shared_file_system_is_mounted_only_into_the_sidecar() {
    let (before, settings) = (pod("guaranteed"), with_claim());
    let Outcome::Inject { patch, .. } = inject(&before, &settings) else {
        panic!("not injected");
    };
    assert_golden("shared-file-system", &patch);
    let after = patched(&before, &patch);
    assert_sound(&before, &after, "vllm");
    assert_eq!(qos::class(&after["spec"], |_| true), Qos::Guaranteed);
    assert_eq!(inject(&after, &settings), Outcome::Unchanged);
    let mounts = |one: &&Value| {
        let mounts = json::list(one, "volumeMounts").iter();
        mounts
            .map(json::name)
            .any(|name| name == names::FILE_SYSTEM_VOLUME)
    };
    let mounting: Vec<_> = json::all_containers(&after["spec"])
        .filter(mounts)
        .collect();
    assert_eq!(mounting, [sidecar(&after)]);
    assert_ne!(settings.hash(), super::settings().hash());
    let other = Settings {
        claim: Some("other".to_string()),
        ..settings.clone()
    };
    assert_ne!(settings.hash(), other.hash(), "a pod keeps its volumes");
}

pub fn with_files() -> Settings {
    let files = |holder, name: &str, keys: &[(&str, &str)]| Files {
        holder,
        name: name.to_string(),
        keys: keys
            .iter()
            .map(|(key, path)| (key.to_string(), path.to_string()))
            .collect(),
    };
    Settings {
        files: vec![
            files(
                Holder::Secret,
                "redis",
                &[
                    ("username", "redis/username"),
                    ("password", "redis/password"),
                ],
            ),
            files(Holder::ConfigMap, "bundle", &[("ca.crt", "s3-ca.crt")]),
        ],
        ..settings()
    }
}

#[test]
fn credentials_are_optional_files_of_the_sidecar_only() {
    let (before, settings) = (pod("plain"), with_files());
    let Outcome::Inject { patch, .. } = inject(&before, &settings) else {
        panic!("not injected");
    };
    assert_golden("shared-tiers", &patch);
    let after = patched(&before, &patch);
    assert_sound(&before, &after, "vllm");
    assert_eq!(inject(&after, &settings), Outcome::Unchanged);
    let volumes = json::list(&after["spec"], "volumes");
    let config = &volumes[json::position(volumes, names::CONFIG_VOLUME).unwrap()];
    let sources = json::list(&config["projected"], "sources");
    assert_eq!(sources.len(), 4);
    for source in &sources[1..] {
        let held = source.get("secret").or(source.get("configMap")).unwrap();
        assert_eq!(held["optional"], true, "no missing object holds up a pod");
    }
    let vllm = after["spec"]["containers"][0].to_string();
    assert!(!vllm.contains(names::CONFIG_VOLUME));
    assert_ne!(
        settings.hash(),
        super::settings().hash(),
        "older pods shortfall the files"
    );
}

#[test]
fn the_token_is_kept_only_for_a_pool_that_authenticates_with_it() {
    let covered = |own_identity: bool, file: &str| {
        let mut settings = settings();
        settings.own_identity = own_identity;
        settings.env =
            serde_json::from_value(json!([{"name": "AWS_WEB_IDENTITY_TOKEN_FILE", "value": file}]))
                .unwrap();
        let after = injected(&pod("plain"), &settings);
        assert_eq!(inject(&after, &settings), Outcome::Unchanged);
        let mounts = json::list(sidecar(&after), "volumeMounts");
        json::position(mounts, names::NO_TOKEN_VOLUME).is_some()
    };
    let own = "/var/run/secrets/kubernetes.io/serviceaccount/token";
    assert!(!covered(true, own));
    assert!(covered(false, own), "the bucket has keys of its own");
    let cloud = "/var/run/secrets/eks.amazonaws.com/serviceaccount/token";
    assert!(
        covered(true, cloud),
        "a webhook of the cloud mounts that one"
    );
}

#[test]
fn a_missing_object_of_the_sidecars_environment_does_not_block_the_pod() {
    let mut settings = settings();
    settings.env = serde_json::from_value(json!([
        {"name": "A", "value": "a"},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": false}}},
        {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "E", "valueFrom": {"secretKeyRef": {"name": "s", "key": "e", "optional": true}}},
    ]))
    .unwrap();
    let hash = settings.hash();
    let after = injected(&pod("plain"), &settings);
    let optional: Vec<_> = json::list(sidecar(&after), "env")
        .iter()
        .filter_map(|v| v.get("valueFrom")?.as_object()?.values().next())
        .map(|source| source.get("optional").cloned())
        .collect();
    assert_eq!(
        optional,
        [
            Some(true.into()),
            Some(true.into()),
            None,
            Some(true.into())
        ]
    );
    let listed = json::list(sidecar(&after), "env")
        .iter()
        .find(|v| json::name(v) == "KVCACHEPOOL_ENV_REFERENCES");
    assert_eq!(
        listed.unwrap()["value"],
        "Secret/s/k=B\nConfigMap/c/k=C",
        "the sidecar names those that the pool does not call optional"
    );
    assert_eq!(settings.hash(), hash, "no pod is outdated by it");
}
