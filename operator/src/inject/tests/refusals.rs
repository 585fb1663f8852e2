//! Refusals that no launch shape covers, and calls without changes.

use super::*;

fn with(name: &str, edit: impl Fn(&mut Value)) -> Value {
    let mut pod = pod(name);
    edit(&mut pod);
    pod
}

fn annotated(key: &str, value: &str) -> Value {
    with("plain", |pod| {
        pod["metadata"]["annotations"] = json!({key: value})
    })
}

#[test]
fn invalid_annotations_are_refused_by_name() {
    let reason = |pod: &Value| refused(pod, &settings()).0;
    for memory in ["", "64", "lots", "-1Gi", "1Mi", "17Ti", "1e30"] {
        assert_eq!(
            reason(&annotated(names::MEMORY, memory)),
            Reason::AnnotationInvalid,
            "{memory}"
        );
    }
    assert_eq!(
        reason(&annotated(names::MEMORY, "65Gi")),
        Reason::ResourcesExceeded
    );
    injected(&annotated(names::MEMORY, "64Gi"), &settings());
    assert_eq!(
        reason(&annotated(names::HOOK, "arg")),
        Reason::AnnotationInvalid
    );
    for path in ["", "/a\n/b"] {
        assert_eq!(
            reason(&annotated(names::PYTHON_PATH, path)),
            Reason::AnnotationInvalid
        );
    }
    assert_eq!(
        reason(&annotated(names::CONTAINER, "other")),
        Reason::ContainerNotFound
    );
    let mut long = settings();
    long.pool = "p".repeat(64);
    let (reason, patch) = refused(&annotated(names::POOL, &long.pool), &long);
    assert_eq!(reason, Reason::AnnotationInvalid);
    assert!(
        !json!(patch).to_string().contains("labels"),
        "no label that the API server refuses"
    );
}

#[test]
fn foreign_objects_are_not_changed() {
    let reason = |pod: &Value| refused(pod, &settings()).0;
    let foreign = [
        with("plain", |pod| {
            pod["spec"]["initContainers"] = json!([{"name": "kvcachepool", "image": "x"}])
        }),
        with("plain", |pod| {
            pod["spec"]["containers"][0]["name"] = "kvcachepool".into()
        }),
        with("plain", |pod| {
            pod["spec"]["volumes"][0] = json!({"name": "kvcachepool", "emptyDir": {}})
        }),
        with("plain", |pod| {
            pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] = "/kvcachepool/".into()
        }),
        with("plain", |pod| {
            pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] =
                "/./kvcachepool//models".into()
        }),
        with("plain", |pod| {
            pod["spec"]["containers"][0]["volumeDevices"] =
                json!([{"name": "raw", "devicePath": "/kvcachepool/raw"}])
        }),
    ];
    for pod in foreign {
        assert_eq!(reason(&pod), Reason::AlreadyInjectedByOther);
    }
    let beside = with("plain", |pod| {
        pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] = "/kvcachepools/x".into()
    });
    injected(&beside, &settings());
    let taken = with("plain", |pod| {
        pod["spec"]["containers"][0]["ports"][0]["containerPort"] = 9797.into()
    });
    assert_eq!(reason(&taken), Reason::PortTaken);
    let mut moved = settings();
    moved.config.admin.listen.set_port(9798);
    injected(&taken, &moved);
    let windows = with("plain", |pod| {
        pod["spec"]["os"] = json!({"name": "windows"})
    });
    assert_eq!(reason(&windows), Reason::OsUnsupported);
    let mirror = annotated("kubernetes.io/config.mirror", "x");
    assert_eq!(inject(&mirror, &settings()), Outcome::Unchanged);
}

#[test]
fn multi_pod_engines_and_other_caches_are_detected_in_every_form() {
    let shell = |text: &str| {
        with("best-effort", |pod| {
            pod["spec"]["containers"][0]["command"] = json!(["sh", "-c", text])
        })
    };
    for text in [
        "vllm serve m --node-rank 1 --headless",
        "vllm serve m --nnodes 1 --headless",
        "/opt/bin/torchrun --nnodes=2 --nproc-per-node=8 rollout.py",
        "python3 -m torch.distributed.run --nnodes 2 rollout.py",
        "vllm serve m --headless",
        "/opt/venv/bin/ray start --head; vllm serve m",
        "bash ./multi-node-serving.sh worker",
    ] {
        assert_eq!(
            refused(&shell(text), &settings()).0,
            Reason::MultiNodeUnsupported,
            "{text}"
        );
    }
    for text in [
        "vllm serve m --nnodes 1 --node-rank 0",
        "vllm serve m --nnodes 2 --node-rank 0",
        "vllm serve m --nnodes=$(LWS_GROUP_SIZE) --node-rank $(LWS_WORKER_INDEX) --headless",
        "vllm serve m --headless --data-parallel-size 4 --data-parallel-start-rank 2",
        "vllm serve m --data-parallel-size 2",
        "echo ray; vllm serve m",
    ] {
        injected(&shell(text), &settings());
    }
    let group = |size: &str| {
        with("best-effort", |pod| {
            pod["spec"]["containers"][0]["env"] =
                json!([{"name": "LWS_GROUP_SIZE", "value": size}]);
        })
    };
    assert_eq!(
        refused(&group("2"), &settings()).0,
        Reason::MultiNodeUnsupported
    );
    injected(&group("1"), &settings());
    for text in [
        "vllm serve m --kv-offloading-size 10",
        "vllm serve m --kv_offloading_size=10",
        "vllm serve m --kv-transfer-config '{\"kv_connector\": \"OffloadingConnector\"}'",
        "python3 -m dynamo.vllm --connector nixl kvbm",
    ] {
        for settings in [settings(), compose()] {
            assert_eq!(
                refused(&shell(text), &settings).0,
                Reason::OtherCachePresent,
                "{text}"
            );
        }
    }
    let unreadable = shell("vllm serve m --kv-transfer-config \"$CONFIG\"");
    assert_eq!(
        refused(&unreadable, &settings()).0,
        Reason::ConnectorPresent
    );
    injected(&unreadable, &compose());
    injected(
        &shell("vllm serve m --kv-transfer-config '{\"kv_connector\": \"KVCachePoolConnector\"}'"),
        &settings(),
    );
}

#[test]
fn a_disabled_or_missing_pool_does_not_change_injected_pods() {
    let mut off = settings();
    off.mode = Mode::Disabled;
    assert_eq!(refused(&pod("plain"), &off).0, Reason::PoolDisabled);
    let after = injected(&pod("plain"), &settings());
    assert_eq!(inject(&after, &off), Outcome::Unchanged);
    let mut stripped = after.clone();
    let list = json::list_mut(&mut stripped["spec"], "initContainers");
    list.iter_mut()
        .for_each(|one| drop(json::object(one).remove("restartPolicy")));
    assert_eq!(
        injected(&stripped, &off),
        after,
        "what others broke is put right still"
    );
    assert_eq!(
        refuse(&after, Reason::PoolNotFound, "gone"),
        Outcome::Unchanged
    );
    let Outcome::Refuse { patch, .. } =
        refuse(&pod("llm-d-guide"), Reason::PoolNotFound, &"é".repeat(2000))
    else {
        panic!("not refused");
    };
    let stamped = patched(&pod("llm-d-guide"), &patch);
    assert_eq!(
        json::label(&stamped, names::POOL),
        Some("llama"),
        "found by label from now on"
    );
    assert_eq!(Report::of(&stamped).unwrap().message.len(), 1000);
}

#[test]
fn pods_at_size_limits_start_without_a_sidecar() {
    let huge = |bytes: usize| {
        with("plain", |pod| {
            let value = "x".repeat(bytes);
            pod["spec"]["containers"][0]["env"]
                .as_array_mut()
                .unwrap()
                .push(json!({"name": "BIG", "value": value}));
        })
    };
    let before = huge(1 << 20);
    let after = injected(&before, &settings());
    assert_sound(&before, &after, "vllm");
    assert_eq!(inject(&after, &settings()), Outcome::Unchanged);
    assert_eq!(refused(&huge(3 << 19), &settings()).0, Reason::PodTooLarge);
    let full = annotated("notes", &"n".repeat((256 << 10) - 100));
    let (reason, patch) = refused(&full, &settings());
    assert_eq!(reason, Reason::InjectionBroken);
    assert!(patch.is_empty(), "there is no room for a stamp either");
}

#[test]
fn a_value_that_is_no_pod_is_refused_without_a_patch() {
    for value in [
        json!(null),
        json!([]),
        json!({"metadata": 3}),
        json!({"metadata": {"annotations": []}}),
    ] {
        let (reason, patch) = refused(&value, &settings());
        assert_eq!(
            (reason, patch.is_empty()),
            (Reason::InjectionBroken, true),
            "{value}"
        );
    }
    let (reason, patch) = refused(
        &json!({"metadata": {}, "spec": {"containers": []}}),
        &settings(),
    );
    assert_eq!((reason, patch.is_empty()), (Reason::InjectionBroken, false));
}

#[test]
fn reasons_have_unique_names_and_sentences() {
    let names: std::collections::HashSet<_> =
        Reason::ALL.iter().map(|reason| reason.name()).collect();
    assert_eq!(names.len(), Reason::ALL.len());
    for reason in Reason::ALL {
        assert!(reason.sentence().ends_with('.'), "{reason}");
    }
}

#[test]
fn transports_are_those_that_the_connector_package_knows() {
    let python = include_str!("../../../../sidecar/connector/kvcachepool/preflight.py");
    let (_, rest) = python.split_once("TRANSPORTS = frozenset(").unwrap();
    let (listed, _) = rest.split_once(')').unwrap();
    let known: Vec<&str> = listed.split('"').skip(1).step_by(2).collect();
    assert_eq!(known, crate::inject::conflicts::TRANSPORTS);
}

#[test]
fn an_engine_whose_python_ignores_the_path_is_refused() {
    let pod = with("plain", |pod| {
        pod["spec"]["containers"][0]["command"] =
            json!(["python3", "-I", "-m", "vllm.entrypoints.openai.api_server"]);
    });
    assert_eq!(refused(&pod, &settings()).0, Reason::PythonIsolated);
}

#[test]
fn a_pod_for_nodes_of_another_architecture_is_refused() {
    let selecting = |arch: &str| {
        with("plain", |pod| {
            pod["spec"]["nodeSelector"] = json!({"kubernetes.io/arch": arch});
        })
    };
    injected(&selecting("arm64"), &settings());
    let (reason, _) = refused(&selecting("ppc64le"), &settings());
    assert_eq!(reason, Reason::ArchUnsupported);
    let term = |operator: &str, values: &[&str]| {
        json!({"matchExpressions": [
            {"key": "gpu", "operator": "Exists"},
            {"key": "kubernetes.io/arch", "operator": operator, "values": values},
        ]})
    };
    let requiring = |terms: &[Value]| {
        with("plain", |pod| {
            let required = json!({"nodeSelectorTerms": terms});
            pod["spec"]["affinity"]["nodeAffinity"] =
                json!({"requiredDuringSchedulingIgnoredDuringExecution": required});
        })
    };
    let power = term("In", &["ppc64le", "s390x"]);
    let (reason, _) = refused(&requiring(std::slice::from_ref(&power)), &settings());
    assert_eq!(reason, Reason::ArchUnsupported);
    for other in [
        term("In", &["ppc64le", "arm64"]),
        term("NotIn", &["s390x"]),
        json!({"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}),
    ] {
        injected(&requiring(&[power.clone(), other]), &settings());
    }
}
