//! What injection adds to a pod: two containers, and three or four volumes. Everything except the pool's settings is static.

use super::{Files, Reason, Refusal, Settings, disk, json, resources};
use crate::names;
use kvcachepool_protocol::config::{Config, FILE_NAME};
use kvcachepool_protocol::env_reference::{self, EnvReference};
use serde_json::{Value, json};

pub const PROGRAM: &str = "kvcachepool-sidecar";
/// User of the added containers if the pod runs as root, which `runAsNonRoot` forbids.
const USER: u32 = 65532;
/// Size of the volume with socket, lock file and connector. The memory tier is not a file.
const SHARED_SIZE: &str = "64Mi";
const TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Whether this is a container that injection added.
pub(super) fn is_added(container: &Value) -> bool {
    [names::SIDECAR_CONTAINER, names::INIT_CONTAINER].contains(&json::name(container))
        && json::list(container, "command")
            .first()
            .and_then(Value::as_str)
            == Some(PROGRAM)
}

/// Whether an earlier call added the containers.
pub(super) fn are_present(pod: &Value) -> bool {
    pod.get("spec")
        .is_some_and(|spec| json::list(spec, "initContainers").iter().any(is_added))
}

/// Refuses pods with foreign objects that have the names of injection. `target` is the index of vLLM's container.
pub(super) fn names_are_free(spec: &Value, target: usize) -> Result<(), Refusal> {
    let refuse = |what: String| {
        Err(Refusal::new(
            Reason::AlreadyInjectedByOther,
            format!("{what} was not added by this operator; rename it, or remove the label"),
        ))
    };
    let added_names = [names::SIDECAR_CONTAINER, names::INIT_CONTAINER];
    let init_containers = json::list(spec, "initContainers");
    let foreign = init_containers
        .iter()
        .filter(|container| !is_added(container))
        .chain(json::list(spec, "containers"))
        .find(|container| added_names.contains(&json::name(container)));
    if let Some(container) = foreign {
        return refuse(format!("container {}", json::name(container)));
    }
    let present = init_containers.iter().any(is_added);
    let added_volumes: [(_, &[&str]); 5] = [
        (names::SHARED_VOLUME, &["emptyDir"]),
        (names::CONFIG_VOLUME, &["projected"]),
        (names::NO_TOKEN_VOLUME, &["emptyDir"]),
        (names::DISK_VOLUME, &["emptyDir", "ephemeral"]),
        (names::FILE_SYSTEM_VOLUME, &["persistentVolumeClaim"]),
    ];
    for volume in json::list(spec, "volumes") {
        let reserved = added_volumes
            .iter()
            .find(|(name, _)| *name == json::name(volume));
        if let Some((name, kinds)) = reserved
            && (!present || kinds.iter().all(|kind| volume.get(kind).is_none()))
        {
            return refuse(format!("volume {name}"));
        }
    }
    let taken = json::list(spec, "containers").get(target).and_then(mounted);
    match taken {
        Some((path, name)) => refuse(format!("what is mounted at {path} ({name})")),
        None => Ok(()),
    }
}

/// A foreign mount at or below the shared folder's path, as path and name.
fn mounted(container: &Value) -> Option<(&str, &str)> {
    let places = [
        ("volumeMounts", "mountPath"),
        ("volumeDevices", "devicePath"),
    ];
    places
        .iter()
        .flat_map(|(list, path)| {
            let mounts = json::list(container, list).iter();
            mounts.map(move |mount| {
                (
                    json::text(mount, path).unwrap_or_default(),
                    json::name(mount),
                )
            })
        })
        .find(|(path, name)| is_within_shared_path(path) && *name != names::SHARED_VOLUME)
}

fn is_within_shared_path(path: &str) -> bool {
    let mut parts = path.split('/').filter(|part| !["", "."].contains(part));
    parts.next() == names::SHARED_PATH.strip_prefix('/')
}

/// The native sidecar. It has no probes: a failing probe would block or restart a pod that works without a cache.
pub(super) fn sidecar(spec: &Value, settings: &Settings, config: &Config) -> Value {
    let mut container = base(spec, settings, names::SIDECAR_CONTAINER);
    let file = |folder: &str| format!("{}/{folder}/{FILE_NAME}", names::CONFIG_PATH);
    let own = json!({
        "restartPolicy": "Always",
        "command": [PROGRAM, "run", "--config", file("pod"), "--pool-config", file("pool")],
        "ports": [{
            "name": names::ADMIN_PORT_NAME,
            "containerPort": config.admin.listen.port(),
            "protocol": "TCP",
        }],
        "lifecycle": {"preStop": {"exec": {"command": [PROGRAM, "flush"]}}},
        "resources": resources::sidecar(spec, settings, config),
    });
    merge(&mut container, own);
    json::list_mut(&mut container, "volumeMounts").push(config_mount());
    if settings.disk.is_some() {
        json::list_mut(&mut container, "volumeMounts").push(disk::mount());
    }
    json::list_mut(&mut container, "volumeMounts").extend(claim_mount(settings));
    if !settings.env.is_empty() {
        json::object(&mut container).insert("env".to_string(), environment(settings).into());
    }
    container
}

/// `sidecar.env` with optional references: the kubelet does not start a container with a missing Secret or ConfigMap, and vLLM would wait
/// for it. The sidecar reports missing ones unless the pool itself makes them optional.
fn environment(settings: &Settings) -> Vec<Value> {
    let mut variables: Vec<Value> = settings.env.iter().map(|v| json!(v)).collect();
    let mut references = Vec::new();
    for variable in &mut variables {
        let name = json::name(variable).to_owned();
        for (kind, source) in [("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")] {
            let Some(reference) = variable.pointer_mut(&format!("/valueFrom/{source}")) else {
                continue;
            };
            let text = |field: &str| reference[field].as_str().unwrap_or_default();
            if reference["optional"] != true {
                let (variable, object, key) = (&name, text("name"), text("key"));
                let listed = EnvReference {
                    variable,
                    kind,
                    object,
                    key,
                };
                references.push(listed.to_string());
            }
            json::object(reference).insert("optional".to_string(), true.into());
        }
    }
    if !references.is_empty() {
        let list = references.join("\n");
        variables.push(json!({"name": env_reference::VARIABLE, "value": list}));
    }
    variables
}

/// The ordinary init container after the sidecar. It must be the last one: only then can a crashed vLLM restart while the sidecar is down.
pub(super) fn init(spec: &Value, settings: &Settings) -> Value {
    let mut container = base(spec, settings, names::INIT_CONTAINER);
    let existing = settings.existing_connector.flag();
    let own = json!({
        "command": [PROGRAM, "init", "--folder", names::SHARED_PATH, "--existing-connector", existing],
        "resources": resources::init(spec),
    });
    merge(&mut container, own);
    container
}

/// The common part of both containers, as Pod Security `restricted` requires it. It keeps the image's user if possible, because some
/// clusters assign users.
pub(super) fn base(spec: &Value, settings: &Settings, name: &str) -> Value {
    let mut container = json!({
        "name": name,
        "image": settings.image,
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
            "runAsNonRoot": true,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": names::SHARED_VOLUME, "mountPath": names::SHARED_PATH},
            // Neither container uses the API server.
            {"name": names::NO_TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": true},
        ],
    });
    if name != names::INIT_CONTAINER && reads_token(settings) {
        json::list_mut(&mut container, "volumeMounts")
            .retain(|m| json::name(m) != names::NO_TOKEN_VOLUME);
    }
    if let Some(policy) = &settings.image_pull_policy {
        json::set_text(&mut container, "imagePullPolicy", policy);
    }
    let pod_user = spec.pointer("/securityContext/runAsUser");
    if pod_user.and_then(Value::as_i64) == Some(0) {
        container["securityContext"]["runAsUser"] = USER.into();
    }
    container
}

/// Whether the service account's token is needed for the pod's identity in the cloud. Cloud webhooks mount their own token elsewhere; only
/// an entry in the sidecar's environment requests this one.
pub(super) fn reads_token(settings: &Settings) -> bool {
    const VARIABLE: &str = "AWS_WEB_IDENTITY_TOKEN_FILE";
    let file = settings.env.iter().find(|v| v.name == VARIABLE);
    let file = file.and_then(|v| v.value.as_deref()).unwrap_or_default();
    settings.own_identity && file.starts_with(TOKEN_PATH)
}

pub(super) fn merge(container: &mut Value, own: Value) {
    if let (Value::Object(container), Value::Object(own)) = (container, own) {
        container.extend(own);
    }
}

/// The volumes. A missing object must not block a pod, and no volume may keep a node from being removed, hence `optional` sources and
/// memory volumes.
pub(super) fn volumes(settings: &Settings, config: &Config) -> Vec<Value> {
    let pool = json!({"configMap": {
        "name": format!("kvcachepool-{}", settings.pool),
        "items": [{"key": FILE_NAME, "path": format!("pool/{FILE_NAME}")}],
        "optional": true,
    }});
    let files = settings.files.iter().map(Files::source);
    let mut volumes = vec![
        json!({"name": names::SHARED_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_SIZE}}),
        config_volume(std::iter::once(pool).chain(files)),
        no_token_volume(),
    ];
    volumes.extend(settings.disk.as_ref().map(|disk| disk.volume(config)));
    volumes.extend(claim_volume(settings));
    volumes
}

/// The volume with the pod's config and these files.
pub(super) fn config_volume(files: impl Iterator<Item = Value>) -> Value {
    let annotation = format!("metadata.annotations['{}']", names::CONFIG);
    let own = json!({"downwardAPI": {"items": [
        {"path": format!("pod/{FILE_NAME}"), "fieldRef": {"fieldPath": annotation}},
    ]}});
    let sources: Vec<Value> = std::iter::once(own).chain(files).collect();
    json!({"name": names::CONFIG_VOLUME, "projected": {"sources": sources}})
}

/// The volume of the file system tier. Unlike the others it can block a pod: Kubernetes has no optional claims.
pub(super) fn claim_volume(settings: &Settings) -> Option<Value> {
    let claim = settings.claim.as_ref()?;
    let source = json!({"claimName": claim});
    Some(json!({"name": names::FILE_SYSTEM_VOLUME, "persistentVolumeClaim": source}))
}

/// The mount of that volume in the sidecar.
pub(super) fn claim_mount(settings: &Settings) -> Option<Value> {
    settings.claim.as_ref()?;
    Some(json!({"name": names::FILE_SYSTEM_VOLUME, "mountPath": names::FILE_SYSTEM_PATH}))
}

/// The mount of the config volume in the added containers.
pub(super) fn config_mount() -> Value {
    json!({"name": names::CONFIG_VOLUME, "mountPath": names::CONFIG_PATH, "readOnly": true})
}

pub(super) fn no_token_volume() -> Value {
    json!({"name": names::NO_TOKEN_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
}

/// The mount in vLLM's container. It is read-only: vLLM connects to a socket and imports Python.
pub(super) fn target_mount() -> Value {
    json!({"name": names::SHARED_VOLUME, "mountPath": names::SHARED_PATH, "readOnly": true})
}
