//! Changes of a running pod: pure functions from the live pod to a JSON patch. Each patch first tests the pod's uid and the names of the
//! containers, so that it fails for another pod of the same name and after a reordering of containers.

use crate::inject::{Outcome, Quantity, Report, Settings, inject, with_memory};
use crate::names;
use crate::pods::{Amounts, ImageChange, Lowered, Memory};
use jiff::Timestamp;
use json_patch::jsonptr::PointerBuf;
use json_patch::{
    AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation, TestOperation,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kvcachepool_protocol::config::{ByteSize, Config};
use serde_json::Value;

/// Sets the pool's config, except for settings that are fixed when a pod is created (its memory). `None` if the pod has that config.
pub fn config(pod: &Value, settings: &Settings) -> Option<Patch> {
    let (own, _) = Config::parse(annotation(pod, names::CONFIG)?, true).ok()?;
    let generation = own.pool.generation;
    let newer = own.or_newer(settings.config.clone());
    (newer.pool.generation > generation).then(|| {
        let text = newer.to_yaml();
        Patch(vec![this_pod(pod), annotate(names::CONFIG, text)])
    })
}

/// Sets the pool's image in the added containers. If nothing else differs from a new pod, the patch also updates the injection annotation.
/// With `at`, the time of the change, an annotation records the previous image for a rollback. `None` if the pod has the image.
pub fn image(pod: &Value, settings: &Settings, at: Option<Timestamp>) -> Option<Patch> {
    let mut patch = images(pod, &settings.image)?;
    if let Some(at) = at {
        patch.0.push(previous_image(pod, at)?);
    }
    let mut after = pod.clone();
    json_patch::patch(&mut after, &patch).ok()?;
    patch.0.extend(if_current(&after, settings));
    Some(patch)
}

/// Sets the size of the memory tier in the pod's config, and records what its container is lowered to. If nothing else differs from a new
/// pod, the patch also updates the injection annotation. `None` if the pod has that size.
pub fn size(pod: &Value, memory: &Memory, settings: &Settings) -> Option<Patch> {
    let (mut own, _) = Config::parse(annotation(pod, names::CONFIG)?, true).ok()?;
    let size = settings.memory_bytes;
    if own.memory.size.0 == size {
        return None;
    }
    own.memory.size = ByteSize(size);
    let mut patch = Patch(vec![this_pod(pod), annotate(names::CONFIG, own.to_yaml())]);
    patch.0.extend(record(pod, memory.lowered_for(size)));
    let mut after = pod.clone();
    json_patch::patch(&mut after, &patch).ok()?;
    // The container follows.
    let needed = Quantity::bytes(own.container_memory_bytes());
    if let Ok(resized) = with_memory(&after, needed, needed) {
        patch.0.extend(if_current(&resized, settings));
    }
    Some(patch)
}

/// Records what the container is lowered to, or removes the record. `None` if there is nothing to change.
pub fn lowered(pod: &Value, lowered: Option<Lowered>) -> Option<Patch> {
    let record = record(pod, lowered)?;
    Some(Patch(vec![this_pod(pod), record]))
}

fn record(pod: &Value, lowered: Option<Lowered>) -> Option<PatchOperation> {
    let path = PointerBuf::from_tokens(["metadata", "annotations", names::LOWERED]);
    match lowered {
        Some(lowered) => {
            let value = serde_json::to_string(&lowered).ok()?.into();
            Some(PatchOperation::Add(AddOperation { path, value }))
        }
        None => annotation(pod, names::LOWERED)
            .map(|_| PatchOperation::Remove(RemoveOperation { path })),
    }
}

/// For the `resize` subresource: sets the memory of the sidecar's container. Fails with the reason if the pod cannot be resized.
pub fn resources(pod: &Value, to: Amounts) -> Result<Patch, &'static str> {
    let (request, limit) = (Quantity::bytes(to.request), Quantity::bytes(to.limit));
    with_memory(pod, request, limit)?;
    let containers = pod
        .pointer("/spec/initContainers")
        .and_then(Value::as_array);
    let mut containers = containers.into_iter().flatten();
    let place = containers.position(|c| c["name"] == names::SIDECAR_CONTAINER);
    let place = place.ok_or("it has no sidecar")?.to_string();
    let container = ["spec", "initContainers", &*place];
    let path = |fields: &[&str]| PointerBuf::from_tokens(container.iter().chain(fields).copied());
    Ok(Patch(vec![
        this_pod(pod),
        test(path(&["name"]), names::SIDECAR_CONTAINER.into()),
        replace(
            path(&["resources", "requests", "memory"]),
            request.to_string().into(),
        ),
        replace(
            path(&["resources", "limits", "memory"]),
            limit.to_string().into(),
        ),
    ]))
}

/// The changes of annotations that make the pod equal to a new one. None if it would differ in more.
fn if_current(pod: &Value, settings: &Settings) -> Vec<PatchOperation> {
    match inject(pod, settings) {
        Outcome::Inject { patch, .. }
            if patch
                .iter()
                .all(|o| o.path().as_str().starts_with("/metadata/")) =>
        {
            patch.0
        }
        _ => Vec::new(),
    }
}

/// Restores an earlier image, and its hash in the injection annotation. `None` if the pod has the image.
pub fn rollback(pod: &Value, image: &str, hash: &str) -> Option<Patch> {
    let mut patch = images(pod, image)?;
    if let Some(report) = Report::of(pod) {
        let hash = hash.to_owned();
        let report = Report { hash, ..report };
        patch.0.push(annotate(names::INJECTION, report.text()));
    }
    if annotation(pod, names::EXCHANGED).is_some() {
        let path = PointerBuf::from_tokens(["metadata", "annotations", names::EXCHANGED]);
        patch
            .0
            .push(PatchOperation::Remove(RemoveOperation { path }));
    }
    Some(patch)
}

/// Records the sidecar's image in an annotation before the change.
fn previous_image(pod: &Value, at: Timestamp) -> Option<PatchOperation> {
    let containers = pod.pointer("/spec/initContainers")?.as_array()?;
    let sidecar = containers
        .iter()
        .find(|c| c["name"] == names::SIDECAR_CONTAINER)?;
    let change = ImageChange {
        image: sidecar["image"].as_str()?.into(),
        hash: Report::of(pod).map(|r| r.hash).unwrap_or_default().into(),
        at: Time(at),
    };
    let path = PointerBuf::from_tokens(["metadata", "annotations", names::EXCHANGED]);
    let value = serde_json::to_string(&change).ok()?.into();
    Some(PatchOperation::Add(AddOperation { path, value }))
}

/// Sets the image of both added containers. The init container has ended in most pods, but not if the image could not be pulled.
fn images(pod: &Value, image: &str) -> Option<Patch> {
    let mut operations = vec![this_pod(pod)];
    let containers = pod.pointer("/spec/initContainers")?.as_array()?;
    for (place, container) in containers.iter().enumerate() {
        let name = container.get("name").and_then(Value::as_str);
        let added = [names::SIDECAR_CONTAINER, names::INIT_CONTAINER];
        if !name.is_some_and(|name| added.contains(&name)) || container["image"] == image {
            continue;
        }
        let path = |field: &str| {
            PointerBuf::from_tokens(["spec", "initContainers", &place.to_string(), field])
        };
        operations.push(test(path("name"), name.into()));
        operations.push(replace(path("image"), image.into()));
    }
    (operations.len() > 1).then_some(Patch(operations))
}

fn annotation<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    pod.pointer("/metadata/annotations")?.get(name)?.as_str()
}

fn annotate(name: &str, text: String) -> PatchOperation {
    let path = PointerBuf::from_tokens(["metadata", "annotations", name]);
    replace(path, text.into())
}

fn this_pod(pod: &Value) -> PatchOperation {
    let uid = pod.pointer("/metadata/uid").cloned().unwrap_or_default();
    test(PointerBuf::from_tokens(["metadata", "uid"]), uid)
}

fn test(path: PointerBuf, value: Value) -> PatchOperation {
    PatchOperation::Test(TestOperation { path, value })
}

fn replace(path: PointerBuf, value: Value) -> PatchOperation {
    PatchOperation::Replace(ReplaceOperation { path, value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::GpuAccess;
    use crate::pods::ResizeStep;
    use kvcachepool_protocol::config::ByteSize;
    use serde_json::json;

    const GI: u64 = 1 << 30;

    fn settings() -> Settings {
        let mut settings = Settings::new("llama", "serving", "kvcachepool:1", GI);
        settings.config.pool.generation = 1;
        settings
    }

    /// The same pool after one edit.
    fn edited(change: impl FnOnce(&mut Settings)) -> Settings {
        let mut settings = settings();
        settings.generation = 2;
        settings.config.pool.generation = 2;
        change(&mut settings);
        settings
    }

    fn patched(pod: &Value, patch: &Patch) -> Value {
        let mut after = pod.clone();
        json_patch::patch(&mut after, patch).unwrap();
        after
    }

    /// A running pod that was injected with `settings()`.
    fn live() -> Value {
        let requested = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "namespace": "serving", "labels": {names::POOL: "llama"}},
            "spec": {
                "initContainers": [{"name": "user", "image": "a"}],
                "containers": [{"name": "vllm", "image": "vllm", "command": ["vllm", "serve", "m"]}],
            },
        });
        let Outcome::Inject { patch, .. } = inject(&requested, &settings()) else {
            panic!("not injected");
        };
        let mut pod = patched(&requested, &patch);
        pod["metadata"]["uid"] = "u1".into();
        pod["spec"]["nodeName"] = "node".into();
        pod["status"] = json!({"phase": "Running"});
        pod
    }

    fn own_config(pod: &Value) -> Config {
        let text = annotation(pod, names::CONFIG).unwrap();
        Config::parse(text, true).unwrap().0
    }

    fn hash(pod: &Value) -> String {
        Report::of(pod).unwrap().hash
    }

    #[test]
    fn a_newer_config_keeps_the_memory_of_the_pod() {
        let pod = live();
        assert_eq!(config(&pod, &settings()), None, "unchanged");
        let pool = edited(|s| {
            s.config.cache.min_load_tokens = 7;
            s.config.memory.size = ByteSize(8 * GI);
        });
        let after = patched(&pod, &config(&pod, &pool).unwrap());
        let own = own_config(&after);
        assert_eq!((own.pool.generation, own.cache.min_load_tokens), (2, 7));
        assert_eq!(own.memory.size, ByteSize(GI), "the size of its container");
        assert_eq!(own.socket, own_config(&pod).socket);
        assert_eq!(config(&after, &pool), None);
        assert_eq!(hash(&after), pool_hash_but_for_memory());
    }

    fn pool_hash_but_for_memory() -> String {
        edited(|s| s.config.cache.min_load_tokens = 7).hash()
    }

    #[test]
    fn a_new_image_is_set_in_the_added_containers_and_in_the_annotations() {
        let pod = live();
        assert_eq!(image(&pod, &settings(), None), None, "unchanged");
        let pool = edited(|s| s.image = "kvcachepool:2".to_owned());
        let at = Timestamp::from_second(1_000_000).unwrap();
        let after = patched(&pod, &image(&pod, &pool, Some(at)).unwrap());
        let annotated = annotation(&after, names::EXCHANGED).unwrap();
        let change: ImageChange = serde_json::from_str(annotated).unwrap();
        let previous = (&*change.image, &*change.hash, change.at.0);
        assert_eq!(previous, ("kvcachepool:1", &*hash(&pod), at));
        let images = |pod: &Value| -> Vec<String> {
            let all = pod["spec"]["initContainers"].as_array().unwrap().iter();
            all.map(|c| c["image"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(images(&after), ["a", "kvcachepool:2", "kvcachepool:2"]);
        assert_eq!(hash(&after), pool.hash(), "not outdated");
        assert_eq!(image(&after, &pool, None), None);
        let before = patched(
            &after,
            &rollback(&after, "kvcachepool:1", &hash(&pod)).unwrap(),
        );
        assert_eq!(images(&before), images(&pod));
        assert_eq!(hash(&before), settings().hash());
        assert_eq!(annotation(&before, names::EXCHANGED), None);
        let hung = patched(&pod, &image(&pod, &pool, None).unwrap());
        assert_eq!(annotation(&hung, names::EXCHANGED), None);
    }

    #[test]
    fn a_pod_that_differs_in_more_than_the_image_stays_outdated() {
        let pod = live();
        let pool = edited(|s| {
            s.image = "kvcachepool:2".to_owned();
            s.memory_bytes = 8 * GI;
            s.config.memory.size = ByteSize(8 * GI);
        });
        let after = patched(&pod, &image(&pod, &pool, None).unwrap());
        assert_eq!(hash(&after), settings().hash());
        assert_eq!(own_config(&after).memory.size, ByteSize(GI));
        assert_eq!(after["spec"]["initContainers"][1]["image"], "kvcachepool:2");
    }

    #[test]
    fn a_pod_with_a_gpu_stays_outdated_after_a_change_of_gpu_access() {
        let access = |pod: &Value| {
            let pool = edited(|s| {
                s.image = "kvcachepool:2".to_owned();
                s.gpu_access = GpuAccess::VisibleDevices;
            });
            let after = patched(pod, &image(pod, &pool, None).unwrap());
            let reason = Report::of(&after).unwrap().reason;
            (hash(&after) == pool.hash(), reason)
        };
        assert_eq!(access(&live()), (true, "GpuNotRequested".to_owned()));
        let mut with_gpu = live();
        with_gpu["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": 1}});
        assert_eq!(access(&with_gpu), (false, String::new()));
    }

    fn resized(pod: &Value, size: u64, actual: &Value) -> Memory {
        let mut pod = pod.clone();
        pod["status"]["initContainerStatuses"] = json!([
            {"name": names::SIDECAR_CONTAINER, "resources": actual, "state": {"running": {}}},
        ]);
        let memory = *crate::pods::Pod::read(pod).unwrap().memory.unwrap();
        assert_eq!(memory.size, size);
        memory
    }

    fn sidecar_resources(pod: &Value) -> Value {
        pod["spec"]["initContainers"][1]["resources"].clone()
    }

    fn of_size(size: u64) -> Settings {
        edited(|s| {
            s.memory_bytes = size;
            s.config.memory.size = ByteSize(size);
        })
    }

    #[test]
    fn a_grown_pod_equals_a_new_one() {
        let pod = live();
        let pool = of_size(8 * GI);
        let memory = resized(&pod, GI, &sidecar_resources(&pod));
        let ResizeStep::Raise(to) = memory.next(8 * GI) else {
            panic!("{memory:?}");
        };
        let record = lowered(&pod, Some(memory.lowered_unless_used())).unwrap();
        let mut after = patched(&pod, &resources(&pod, to).unwrap());
        after = patched(&after, &record);
        let resources = sidecar_resources(&after);
        assert_eq!(
            resources["limits"]["memory"],
            resources["requests"]["memory"]
        );
        assert_eq!(resources["requests"]["cpu"], "500m");
        let memory = resized(&after, GI, &resources);
        assert_eq!(memory.next(8 * GI), ResizeStep::SetSize);
        after = patched(&after, &size(&after, &memory, &pool).unwrap());
        assert_eq!(own_config(&after).memory.size, ByteSize(8 * GI));
        assert_eq!(hash(&after), pool.hash(), "not outdated");
        assert_eq!(annotation(&after, names::LOWERED), None);
        assert_eq!(inject(&after, &pool), Outcome::Unchanged);
        assert_eq!(size(&after, &memory, &pool), None);
    }

    #[test]
    fn a_shrinking_pod_records_what_its_container_is_lowered_to() {
        let pool = of_size(GI / 2);
        let pod = live();
        let memory = resized(&pod, GI, &sidecar_resources(&pod));
        let mut after = patched(&pod, &size(&pod, &memory, &pool).unwrap());
        assert_eq!(own_config(&after).memory.size, ByteSize(GI / 2));
        assert_eq!(sidecar_resources(&after), sidecar_resources(&pod));
        assert_eq!(hash(&after), pool.hash(), "the container follows");
        let memory = resized(&after, GI / 2, &sidecar_resources(&after));
        let ResizeStep::Lower(to) = memory.next(GI / 2) else {
            panic!("{memory:?}");
        };
        let refused = Some(Lowered {
            to,
            refused: "cannot be decreased".into(),
        });
        let kept = patched(&after, &lowered(&after, refused).unwrap());
        let memory = resized(&kept, GI / 2, &sidecar_resources(&kept));
        assert_eq!(memory.next(GI / 2), ResizeStep::Done);
        after = patched(&after, &resources(&after, to).unwrap());
        after = patched(&after, &lowered(&after, None).unwrap());
        assert_eq!(annotation(&after, names::LOWERED), None);
        assert_eq!(lowered(&after, None), None);
        assert_eq!(inject(&after, &pool), Outcome::Unchanged);
    }

    #[test]
    fn a_resized_pod_that_differs_in_more_stays_outdated() {
        let pod = live();
        let mut pool = of_size(GI / 2);
        pool.image = "kvcachepool:2".to_owned();
        let memory = resized(&pod, GI, &sidecar_resources(&pod));
        let after = patched(&pod, &size(&pod, &memory, &pool).unwrap());
        assert_eq!(own_config(&after).memory.size, ByteSize(GI / 2));
        assert_eq!(hash(&after), settings().hash());
    }

    #[test]
    fn pod_level_resources_and_another_qos_class_are_no_resize() {
        let to = Amounts {
            request: GI,
            limit: 2 * GI,
        };
        let mut pod = live();
        assert!(resources(&pod, to).is_ok());
        pod["spec"]["resources"] = json!({"requests": {"memory": "8Gi"}});
        assert!(resources(&pod, to).unwrap_err().contains("pod-level"));
        let all = json!({"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}});
        let mut pod = live();
        for list in ["initContainers", "containers"] {
            for container in pod["spec"][list].as_array_mut().unwrap() {
                container["resources"] = all.clone();
            }
        }
        assert!(resources(&pod, to).unwrap_err().contains("QoS"));
    }

    #[test]
    fn a_patch_fails_for_another_pod_and_another_order_of_containers() {
        let pod = live();
        let pool = edited(|s| s.image = "kvcachepool:2".to_owned());
        let patch = image(&pod, &pool, None).unwrap();
        let mut other = pod.clone();
        other["metadata"]["uid"] = "u2".into();
        assert!(json_patch::patch(&mut other, &patch).is_err());
        let mut moved = pod.clone();
        moved["spec"]["initContainers"]
            .as_array_mut()
            .unwrap()
            .rotate_left(1);
        assert!(json_patch::patch(&mut moved, &patch).is_err());
        let patch = image(&reordered(&pod), &pool, None).unwrap();
        let after = patched(&reordered(&pod), &patch);
        assert_eq!(after["spec"]["initContainers"][2]["image"], "a");
    }

    /// The pod with the user's init container behind the added ones.
    fn reordered(pod: &Value) -> Value {
        let mut moved = pod.clone();
        moved["spec"]["initContainers"]
            .as_array_mut()
            .unwrap()
            .rotate_left(1);
        moved
    }
}
