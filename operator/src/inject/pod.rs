//! Builds the injected pod in one idempotent pass that merges the additions into the existing pod.

use super::gpu::Gpu;
use super::launch::Launch;
use super::overlay::{overlay, overlay_named};
use super::quantity::Quantity;
use super::{
    Reason, Refusal, Report, Settings, Shortfall, ShortfallDetail, additions, engine, env, hook,
    json, resources,
};
use crate::names;
use kvcachepool_protocol::config::{ByteSize, Config};
use serde_json::{Value, json};

/// Overrides in a pod's annotations.
pub(super) struct Overrides {
    memory_bytes: u64,
    python_path: Option<String>,
    by_args: bool,
}

/// Range of the sidecar's `memory.size`.
const MEMORY_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=16 << 40;
/// Longest text of a path list.
const PYTHON_PATH_BYTES: usize = 4096;

impl Overrides {
    pub(super) fn of(pod: &Value, settings: &Settings) -> Result<Self, Refusal> {
        let python_path = json::annotation(pod, names::PYTHON_PATH);
        if let Some(path) = python_path
            && (path.is_empty()
                || path.len() > PYTHON_PATH_BYTES
                || path.contains(char::is_control))
        {
            return Err(Refusal::new(
                Reason::AnnotationInvalid,
                format!(
                    "annotation {}: write the PYTHONPATH that the image sets with ENV, such as /app:/lib",
                    names::PYTHON_PATH
                ),
            ));
        }
        Ok(Self {
            memory_bytes: memory_bytes(pod, settings)?,
            python_path: python_path.map(str::to_string),
            by_args: hook::by_args(pod)?,
        })
    }
}

fn memory_bytes(pod: &Value, settings: &Settings) -> Result<u64, Refusal> {
    let Some(text) = json::annotation(pod, names::MEMORY) else {
        return Ok(settings.memory_bytes);
    };
    let bytes = Quantity::parse(text)
        .and_then(Quantity::units)
        .filter(|bytes| MEMORY_BYTES.contains(bytes))
        .ok_or_else(|| {
            let shown: String = text.chars().take(40).collect();
            Refusal::new(
                Reason::AnnotationInvalid,
                format!(
                    "annotation {}: {shown:?}; write a size from 64Mi to 16Ti, such as 64Gi",
                    names::MEMORY
                ),
            )
        })?;
    match settings.memory_max_bytes {
        Some(most) if bytes > most => Err(Refusal::new(
            Reason::ResourcesExceeded,
            format!(
                "annotation {} requests {text}, but at most {} is allowed (injection.memoryMax of the pool, or the cluster's policy)",
                names::MEMORY,
                Quantity::bytes(most)
            ),
        )),
        _ => Ok(bytes),
    }
}

/// The complete pod and its shortfall. `target` is the index of the engine's container.
pub(super) fn injected(
    pod: &Value,
    settings: &Settings,
    target: usize,
    overrides: &Overrides,
) -> Result<(Value, Option<ShortfallDetail>), Refusal> {
    let mut after = pod.clone();
    let spec = json::entry(&mut after, "spec");
    let gpu = Gpu::of(spec, target, settings);
    let mut config = config(settings, overrides);
    gpu.reserve_memory(&mut config);
    containers(spec, settings, &config, &gpu);
    for volume in additions::volumes(settings, &config) {
        overlay_named(json::list_mut(spec, "volumes"), volume);
    }
    for secret in &settings.image_pull_secrets {
        overlay_named(
            json::list_mut(spec, "imagePullSecrets"),
            json!({"name": secret}),
        );
    }
    // An engine without a cache lacks more than one without a window.
    let mut shortfall = gpu.shortfall().cloned();
    if let Some(engine) = json::list_mut(spec, "containers").get_mut(target) {
        mount(engine);
        let kind = Launch::of(engine).engine();
        env::complete(engine, kind, overrides.python_path.as_deref());
        if overrides.by_args {
            hook::add(engine)?;
        }
        shortfall = engine::shortfall(&Launch::of(engine), json::name(engine)).or(shortfall);
    }
    shortfall = shortfall.or_else(|| cpu_limited(spec, settings));
    for mesh in &MESHES {
        exclude_from_mesh(&mut after, config.admin.listen.port(), mesh);
    }
    if let Some(disk) = &settings.disk {
        disk.allow_scale_down(&mut after);
    }
    let metadata = json::entry(&mut after, "metadata");
    let annotations = json::entry(metadata, "annotations");
    json::set_text(annotations, names::CONFIG, &config.to_yaml());
    json::set_text(
        annotations,
        names::INJECTION,
        &Report::injected(settings.hash(), shortfall.as_ref()).text(),
    );
    json::set_text(json::entry(metadata, "labels"), names::POOL, &settings.pool);
    Ok((after, shortfall))
}

/// The shortfall of a sidecar whose CPU nobody has chosen.
fn cpu_limited(spec: &Value, settings: &Settings) -> Option<ShortfallDetail> {
    let limit = resources::default_cpu_limit(settings, resources::found_sidecar(spec)?)?;
    Some(ShortfallDetail {
        reason: Shortfall::CpuLimited,
        message: format!(
            "each container of the pod has a CPU limit, so the sidecar has the limit {limit}; set sidecar.resources in the pool to choose it"
        ),
    })
}

/// The sidecar's config in this pod. A pool cannot set values that must match vLLM's container.
fn config(settings: &Settings, overrides: &Overrides) -> Config {
    let mut config = settings.config.clone();
    config.managed = true;
    config.socket = std::path::Path::new(names::SHARED_PATH).join("sidecar.sock");
    config.memory.size = ByteSize(overrides.memory_bytes);
    config.pool.generation = u64::try_from(settings.generation).unwrap_or(0);
    config
}

/// Appends the two containers.
fn containers(spec: &mut Value, settings: &Settings, config: &Config, gpu: &Gpu) {
    let wanted = [
        additions::sidecar(spec, settings, config),
        additions::init(spec, settings),
    ];
    let found = resources::found_sidecar(spec).cloned();
    resources::raise_pod(spec, found.as_ref(), &wanted[0]["resources"]);
    let list = json::list_mut(spec, "initContainers");
    for wanted in wanted {
        let mut container = match json::position(list, json::name(&wanted)) {
            Some(place) => list.remove(place),
            None => json!({}),
        };
        if wanted.get("restartPolicy").is_none() {
            json::object(&mut container).remove("restartPolicy");
        }
        overlay(&mut container, &wanted);
        if json::name(&wanted) == names::SIDECAR_CONTAINER {
            gpu.put(&mut container, settings);
        }
        resources::lift_limits(&mut container);
        list.push(container);
    }
}

fn mount(engine: &mut Value) {
    let wanted = additions::target_mount();
    let mounts = json::list_mut(engine, "volumeMounts");
    match mounts
        .iter_mut()
        .find(|one| json::name(one) == names::SHARED_VOLUME)
    {
        Some(existing) => overlay(existing, &wanted),
        None => mounts.push(wanted),
    }
}

/// A service mesh whose proxy takes over the pod's ports.
struct Mesh {
    /// Annotation with the ports that it leaves alone.
    ports: &'static str,
    /// Label or annotation by which a pod requests the mesh, and its values.
    request: (&'static str, &'static [&'static str]),
    proxy: &'static str,
    /// Container that fixes the list of ports when the pod starts.
    init: &'static str,
}

const MESHES: [Mesh; 2] = [
    Mesh {
        ports: "traffic.sidecar.istio.io/excludeInboundPorts",
        request: ("sidecar.istio.io/inject", &["true"]),
        proxy: "istio-proxy",
        init: "istio-init",
    },
    Mesh {
        ports: "config.linkerd.io/skip-inbound-ports",
        request: ("linkerd.io/inject", &["enabled", "ingress"]),
        proxy: "linkerd-proxy",
        init: "linkerd-init",
    },
];

/// A mesh with strict mTLS would block the operator and monitoring from the sidecar's port. If the mesh's init container is already in the
/// pod, its rules are fixed and the annotation would be wrong.
fn exclude_from_mesh(pod: &mut Value, port: u16, mesh: &Mesh) {
    let spec = json::entry(pod, "spec");
    let has = |name: &str| json::all_containers(spec).any(|one| json::name(one) == name);
    if has(mesh.init) {
        return;
    }
    let proxy = has(mesh.proxy);
    let (key, values) = mesh.request;
    let requested = [json::label(pod, key), json::annotation(pod, key)]
        .iter()
        .any(|value| value.is_some_and(|value| values.contains(&value)));
    let given = json::annotation(pod, mesh.ports).map(str::to_string);
    if !proxy && !requested && given.is_none() {
        return;
    }
    let given = given.unwrap_or_default();
    let port = port.to_string();
    if given
        .split(',')
        .any(|one| [port.as_str(), "*"].contains(&one.trim()))
    {
        return;
    }
    let ports = if given.trim().is_empty() {
        port
    } else {
        format!("{given},{port}")
    };
    let annotations = json::entry(json::entry(pod, "metadata"), "annotations");
    json::set_text(annotations, mesh.ports, &ports);
}
