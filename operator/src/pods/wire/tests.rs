//! Pods as API servers send them, including odd ones.

use super::*;
use serde_json::json;

fn pod(value: serde_json::Value) -> Pod {
    serde_json::from_value::<WirePod>(value)
        .unwrap()
        .into_pod()
        .unwrap()
}

#[test]
fn a_pod_of_a_group_has_its_label() {
    let group = |labels: serde_json::Value| {
        pod(json!({"metadata": {"name": "a", "namespace": "n", "labels": labels}, "spec": {}, "status": {}}))
            .group
    };
    let labels = json!({names::POOL: "llama", names::LEADER_WORKER_SET: "web"});
    assert_eq!(*group(labels).unwrap(), Owner::leader_worker_set("web"));
    assert_eq!(group(json!({names::POOL: "llama"})), None);
}

fn injected(state: &serde_json::Value) -> Pod {
    pod(json!({
        "metadata": {
            "name": "web-0", "namespace": "serving", "uid": "u1", "resourceVersion": "7",
            "creationTimestamp": "2026-01-02T03:04:05Z",
            "labels": {"app": "web", names::POOL: "llama"},
            "annotations": {
                "other": "x".repeat(10_000),
                names::INJECTION: r#"{"result":"Injected","reason":"","version":"0.1.0","hash":"abc"}"#,
                names::CONFIG: "pool:\n  generation: 4\n",
            },
            "managedFields": [{"manager": "m", "fieldsV1": {"f:metadata": {}}}],
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "o1"},
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "r1", "controller": true},
            ],
        },
        "spec": {
            "initContainers": [{"name": "user", "image": "a"}, {"name": "kvcachepool", "image": "b:2"}],
            "containers": [{"name": "vllm", "resources": {"limits": {"cpu": 3}}}],
        },
        "status": {
            "phase": "Running", "podIP": "10.0.0.7",
            "conditions": [{"type": "Initialized", "status": "False"}, {"type": "Ready", "status": "True"}],
            "initContainerStatuses": [
                {"name": "user", "image": "a", "state": {}},
                {"name": "kvcachepool", "image": "b:1", "restartCount": 3, "state": state},
            ],
        },
    }))
}

#[test]
fn an_injected_pod_keeps_the_added_containers() {
    let pod = injected(&json!({"running": {"startedAt": "2026-01-02T03:05:00Z"}}));
    assert_eq!(
        (&*pod.name, &*pod.pool, &*pod.uid),
        ("web-0", "llama", "u1")
    );
    assert_eq!(pod.created.to_string(), "2026-01-02T03:04:05Z");
    assert_eq!(pod.ip, Some("10.0.0.7".parse().unwrap()));
    assert_eq!(&*pod.owner.as_ref().unwrap().kind, "ReplicaSet");
    assert_eq!(pod.hash(), "abc");
    assert_eq!(pod.config_generation, Some(4));
    let sidecar = pod.sidecar.as_ref().unwrap();
    assert_eq!(
        (&*sidecar.image, &*sidecar.image_in_use, sidecar.restarts),
        ("b:2", "b:1", 3)
    );
    assert!(sidecar.runs() && pod.ready);
    assert!(pod.address().is_some());
}

#[test]
fn the_sidecar_state_is_parsed_in_every_form() {
    let of = |state| injected(&state).sidecar.unwrap().state;
    assert_eq!(of(json!({})), SidecarState::Unseen);
    assert_eq!(
        of(json!({"waiting": {"reason": "ErrImagePull", "message": "m".repeat(5000)}})),
        SidecarState::Waiting {
            reason: "ErrImagePull".into(),
            message: "m".repeat(200).into()
        }
    );
    assert_eq!(
        of(json!({"terminated": {"reason": "Completed", "exitCode": 0}})),
        SidecarState::Terminated {
            reason: "Completed".into()
        }
    );
}

#[test]
fn the_init_container_and_an_image_change_are_parsed() {
    let mut value = json!({
        "metadata": {
            "name": "p", "namespace": "n", "labels": {names::POOL: "x"},
            "annotations": {names::EXCHANGED: r#"{"image":"i:1","hash":"h","at":"2026-01-02T03:04:05Z"}"#},
        },
        "spec": {"initContainers": [{"name": "kvcachepool", "image": "i:2"}]},
        "status": {"initContainerStatuses": [
            {"name": "kvcachepool", "state": {"running": {}}},
            {"name": "kvcachepool-init", "state": {"waiting": {"reason": "ErrImageNeverPull"}}},
        ]},
    });
    let read = pod(value.clone());
    let change = read.image_change.as_ref().unwrap();
    assert_eq!((&*change.image, &*change.hash), ("i:1", "h"));
    assert_eq!(read.fault().unwrap().reason, "ErrImageNeverPull");
    value["metadata"]["annotations"][names::EXCHANGED] = "{".into();
    assert_eq!(pod(value).image_change, None);
}

/// An injected pod with 64Mi and these annotations, lines of its config, and status.
fn sized(
    annotations: serde_json::Value,
    config: &str,
    status: serde_json::Value,
) -> Option<Memory> {
    let mut value = json!({
        "metadata": {"name": "p", "namespace": "n", "labels": {names::POOL: "x"}, "annotations": annotations},
        "spec": {"initContainers": [{"name": "kvcachepool", "image": "i:2", "resources": {
            "requests": {"cpu": "500m", "memory": "139460608"}, "limits": {"memory": "133Mi"},
        }}]},
        "status": status,
    });
    value["metadata"]["annotations"][names::CONFIG] =
        format!("memory:\n  size: 64Mi\n{config}").into();
    pod(value).memory.map(|memory| *memory)
}

#[test]
fn the_memory_and_the_resize_of_a_sidecar_are_parsed() {
    let resources = json!({"requests": {"memory": "133Mi"}, "limits": {"memory": "200Mi"}});
    let status = json!({
        "initContainerStatuses": [{"name": "kvcachepool", "resources": resources, "state": {}}],
        "conditions": [
            {"type": "PodResizePending", "status": "True", "reason": "Deferred", "message": "no room"},
        ],
    });
    let annotation = r#"{"request":7,"limit":8,"refused":"no"}"#;
    let read = sized(json!({names::LOWERED: annotation}), "", status).unwrap();
    assert_eq!(read.size, 64 << 20);
    let amounts = |request: u64, limit: u64| Amounts {
        request: request << 20,
        limit: limit << 20,
    };
    assert_eq!(read.desired, amounts(133, 133));
    assert_eq!(read.actual, Some(amounts(133, 200)));
    assert_eq!(read.refused.as_deref(), Some("Deferred: no room"));
    let lowered = read.lowered.unwrap();
    assert_eq!(
        (lowered.to.request, lowered.to.limit, &*lowered.refused),
        (7, 8, "no")
    );
    let progress = json!({"conditions": [{"type": "PodResizeInProgress", "status": "True"}]});
    let read = sized(json!({}), "", progress).unwrap();
    assert_eq!(
        (read.actual, read.lowered, read.refused),
        (None, None, None)
    );
}

#[test]
fn memory_that_cannot_change_while_the_sidecar_runs_is_not_parsed() {
    let with = |annotations, config| sized(annotations, config, json!({}));
    assert!(with(json!({}), "").is_some());
    assert_eq!(with(json!({names::MEMORY: "64Mi"}), ""), None);
    assert_eq!(with(json!({}), "  hugePages: 2Mi\n"), None);
    assert_eq!(with(json!({}), "transfer:\n  mode: CudaWindow\n"), None);
}

#[test]
fn managed_fields_and_foreign_annotations_are_skipped() {
    let wire: WirePod = serde_json::from_value(json!({"metadata": {
        "name": "p", "labels": {"a": "b"}, "annotations": {"c": "d"}, "managedFields": [{"manager": "m"}],
    }})).unwrap();
    assert_eq!(wire.metadata.managed_fields, None);
    assert_eq!(wire.metadata.annotations, Some(BTreeMap::new()));
    assert!(wire.into_pod().is_none(), "no pool label");
}

#[test]
fn nulls_and_unknown_phases_do_not_break_the_watch() {
    let pod = pod(json!({
        "metadata": {"name": "p", "namespace": "n", "labels": {names::POOL: "x"}, "annotations": null},
        "status": {"phase": "Later"},
    }));
    assert_eq!(pod.phase, Phase::Unknown);
    assert_eq!(pod.sidecar, None);
}

#[test]
fn a_malformed_injection_annotation_proves_that_the_webhook_was_called() {
    let pod = pod(json!({"metadata": {
        "name": "p", "namespace": "n", "labels": {names::POOL: "x"}, "annotations": {names::INJECTION: "{"},
    }}));
    assert_eq!(pod.injection, Some(Injection::default()));
    assert_eq!(pod.refusal(), None);
}

#[test]
fn a_pod_with_malformed_labels_is_foreign() {
    let of = |labels: serde_json::Value| {
        let meta = json!({"name": "a", "namespace": "b", "uid": "u", "resourceVersion": "1", "labels": labels,
                          "annotations": {names::POOL: "chat"}});
        Pod::read(json!({"metadata": meta, "spec": {}, "status": {}}))
    };
    let pool = |pod: Option<Pod>| pod.map(|pod| pod.pool.to_string());
    assert_eq!(pool(of(json!("text"))), None);
    assert_eq!(pool(of(json!(["text"]))), None);
    assert_eq!(pool(of(json!(null))), Some("chat".into()));
    assert_eq!(pool(of(json!({}))), Some("chat".into()));
    assert_eq!(pool(of(json!({names::POOL: null}))), Some("chat".into()));
    let other = json!({names::POOL: "other"});
    assert_eq!(pool(of(other)), Some("other".into()));
}

#[test]
fn own_containers_are_parsed_for_injected_and_let_through_pods() {
    let own = |injected: bool| {
        let stamp = match injected {
            true => r#"{"result":"Injected"}"#,
            false => r#"{"result":"Refused","reason":"InjectionPaused"}"#,
        };
        let sidecar = injected.then(|| json!([{"name": "kvcachepool", "image": "i"}]));
        let mounts =
            injected.then(|| json!([{"name": "kvcachepool", "mountPath": "/kvcachepool"}]));
        let ended = json!({"exitCode": 1, "reason": "Error", "message": "m".repeat(5000),
            "startedAt": "2026-01-02T03:05:00Z", "finishedAt": "2026-01-02T03:05:04Z"});
        pod(json!({
            "metadata": {"name": "p", "namespace": "n", "labels": {names::POOL: "x"}, "annotations": {names::INJECTION: stamp}},
            "spec": {"initContainers": sidecar.unwrap_or(json!([])), "containers": [
                {"name": "other"},
                {"name": "vllm", "readinessProbe": {"httpGet": {"port": 1}}, "volumeMounts": mounts.unwrap_or(json!([])),
                 "env": [{"name": "PYTHONPATH", "value": "$(PYTHONPATH):/kvcachepool"}]},
            ]},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "vllm", "restartCount": 1, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}},
                {"name": "other", "state": {"running": {}}},
            ]},
        }))
    };
    let read = own(true);
    let engine = read.engine().unwrap();
    assert_eq!((&*engine.name, engine.restarts), ("vllm", 1));
    assert!(engine.probed && engine.path_unknown && read.has_started());
    let exit = read.crash_loop(engine).unwrap();
    assert_eq!(
        (exit.code, exit.ran.as_secs(), exit.message.len()),
        (1, 4, 200)
    );
    let read = own(false);
    assert_eq!((read.own.len(), read.engine()), (2, None));
    assert!(read.is_let_through() && read.own[0].running_since().is_some());
}

#[test]
fn the_reason_for_waiting_is_parsed_from_conditions() {
    let waits = |disk: serde_json::Value, conditions: serde_json::Value, nominated: &str| {
        let read = pod(json!({
            "metadata": {"name": "p", "namespace": "n", "labels": {names::POOL: "x"}},
            "spec": {"volumes": [{"name": "a", "ephemeral": {}}, disk]},
            "status": {"conditions": conditions, "nominatedNodeName": nominated},
        }));
        read.waits.map(|w| (w.what, w.maybe_injection))
    };
    let unscheduled = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient memory."}]);
    let none = || json!({"name": "kvcachepool"});
    assert_eq!(
        waits(none(), unscheduled.clone(), ""),
        Some((WaitsFor::Node, true))
    );
    assert_eq!(waits(none(), unscheduled, "n1"), None, "room is being made");
    let gated = json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]);
    assert_eq!(waits(none(), gated, ""), None);
    let sandbox = |ready: &str| json!([{"type": "PodScheduled", "status": "True"}, {"type": "PodReadyToStartContainers", "status": ready}]);
    let disk = || json!({"name": "kvcachepool-disk", "ephemeral": {"volumeClaimTemplate": {}}});
    assert_eq!(
        waits(disk(), sandbox("False"), ""),
        Some((WaitsFor::Volumes, true))
    );
    assert_eq!(
        waits(none(), sandbox("False"), ""),
        Some((WaitsFor::Volumes, false))
    );
    assert_eq!(waits(disk(), sandbox("True"), ""), None);
    let shared = || json!({"name": "kvcachepool-filesystem", "persistentVolumeClaim": {"claimName": "kv-cache"}});
    assert_eq!(
        waits(shared(), sandbox("False"), ""),
        Some((WaitsFor::Volumes, true))
    );
    let absent = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: persistentvolumeclaim \"kv-cache\" not found. preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."}]);
    assert_eq!(
        waits(shared(), absent.clone(), ""),
        Some((WaitsFor::Node, true))
    );
    let foreign = json!({"name": "models", "persistentVolumeClaim": {"claimName": "models"}});
    assert_eq!(waits(foreign, absent, ""), Some((WaitsFor::Node, false)));
}

/// A managed server with these fields of its status.
fn server(status: serde_json::Value) -> Server {
    let pod = json!({
        "metadata": {
            "name": "kvcachepool-llama-0", "namespace": "serving",
            "labels": {"app.kubernetes.io/name": "kvcachepool-redis", "app.kubernetes.io/instance": "llama"},
        },
        "status": status,
    });
    let pod: WirePod = serde_json::from_value(pod).unwrap();
    pod.into_server().unwrap()
}

#[test]
fn a_managed_server_belongs_to_the_pool_of_its_label() {
    let server = server(json!({"conditions": [{"type": "Ready", "status": "True"}]}));
    assert_eq!(
        (&*server.pool, &*server.name),
        ("llama", "kvcachepool-llama-0")
    );
    assert!(server.ready && server.trouble.is_none());
}

#[test]
fn the_manager_of_servers_names_the_shape_of_their_cluster() {
    let pod = json!({"metadata": {
        "name": "kvcachepool-llama-cluster-1", "namespace": "serving",
        "labels": {"app.kubernetes.io/name": "kvcachepool-redis-cluster", "app.kubernetes.io/instance": "llama"},
        "annotations": {"kvcachepool.io/shape": "3x2"},
    }});
    let pod: WirePod = serde_json::from_value(pod).unwrap();
    let manager = pod.into_server().unwrap();
    assert_eq!(manager.shape.as_deref(), Some("3x2"));
    assert_eq!(server(json!({})).shape, None);
}

#[test]
fn the_trouble_of_a_managed_server_is_its_image_its_node_or_its_last_exit() {
    let of = |status: serde_json::Value| {
        let trouble = server(status).trouble;
        trouble.map(|(reason, message)| (reason.into_string(), message.into_string()))
    };
    let is = |reason: &str, message: &str| Some((reason.to_owned(), message.to_owned()));
    let container = |state: serde_json::Value, last: serde_json::Value| {
        of(json!({"containerStatuses": [{"name": "redis", "state": state, "lastState": last}]}))
    };
    let exit = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
    let back_off = json!({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}});
    let (none, running) = (json!({}), json!({"running": {}}));
    assert_eq!(
        container(back_off, none.clone()),
        is("ImagePullBackOff", "not found")
    );
    assert_eq!(
        container(running.clone(), exit),
        is("OOMKilled", "exit code 137")
    );
    assert_eq!(container(running, none), None);
    let creating = json!({"waiting": {"reason": "ContainerCreating"}});
    assert_eq!(container(creating, json!({})), None);
    // A server that ran again after an exit is not what is wrong.
    let exporter = json!({"name": "exporter", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}});
    let last = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
    let redis = json!({"name": "redis", "state": {"running": {}}, "lastState": last});
    assert_eq!(
        of(json!({"containerStatuses": [exporter, redis]})),
        is("ErrImagePull", "container exporter: not found")
    );
    let message = "0/3 nodes are available: 3 Insufficient memory.";
    assert_eq!(
        of(
            json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]})
        ),
        is("Unschedulable", message)
    );
}
