//! Resources of the added containers, and invalid pool settings that must not reach a pod.

use super::*;

/// The pod, with these resources on each container.
fn with_resources(name: &str, resources: Value) -> Value {
    let mut pod = pod(name);
    for list in ["containers", "initContainers"] {
        for container in json::list_mut(&mut pod["spec"], list) {
            container["resources"] = resources.clone();
        }
    }
    pod
}

fn added(pod: &Value) -> [&Value; 2] {
    let [.., sidecar, init] = json::list(&pod["spec"], "initContainers") else {
        panic!("not injected: {pod}");
    };
    [sidecar, init]
}

#[test]
fn added_containers_have_cpu_limits_if_all_others_have() {
    let both =
        json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "2Gi"}});
    for name in ["plain", "istio", "llm-d-guide"] {
        let before = with_resources(name, both.clone());
        let settings = Settings {
            container: Some(json::name(&before["spec"]["containers"][0]).to_string()),
            ..settings()
        };
        let after = injected(&before, &settings);
        for container in json::all_containers(&after["spec"]) {
            for resource in ["cpu", "memory"] {
                assert!(
                    qos::amounts(container, "limits").contains_key(resource),
                    "a quota of limits.{resource}: {container}"
                );
            }
        }
        for container in added(&after) {
            let amounts = |kind| qos::amounts(container, kind)["cpu"];
            assert_eq!(amounts("limits"), amounts("requests"), "{name}");
        }
        assert_eq!(qos::class(&after["spec"], |_| true), Qos::Burstable);
        assert_eq!(inject(&after, &settings), Outcome::Unchanged);
    }
}

#[test]
fn a_cpu_limit_is_set_where_it_is_needed_and_raised_by_the_pool() {
    let after = injected(&pod("plain"), &settings());
    for container in added(&after) {
        assert!(!qos::amounts(container, "limits").contains_key("cpu"));
    }
    let mut more = settings();
    more.resources =
        serde_json::from_value(json!({"limits": {"cpu": "3"}, "requests": {"cpu": "1"}})).unwrap();
    let limited = json!({"requests": {"cpu": "1"}, "limits": {"cpu": "4"}});
    let after = injected(&with_resources("plain", limited), &more);
    assert_eq!(added(&after)[0]["resources"]["limits"]["cpu"], "3");
    assert_eq!(added(&after)[0]["resources"]["requests"]["cpu"], "1");
}

#[test]
fn invalid_added_containers_cost_the_cache_and_not_the_pod() {
    let from = |source: Value| json!({"env": [{"name": "A", "valueFrom": source}]});
    let path = |path: &str| json!({"fieldRef": {"fieldPath": path}});
    let bad = [
        json!({"image": ""}),
        json!({"image": " example.com/kvcachepool"}),
        json!({"env": [{"name": ""}]}),
        json!({"env": [{"name": "A=B", "value": "1"}]}),
        json!({"env": [{"name": "é", "value": "1"}]}),
        json!({"env": [{"name": "A", "value": "1", "valueFrom": path("metadata.name")}]}),
        from(json!({})),
        from(
            json!({"fieldRef": {"fieldPath": "metadata.name"}, "secretKeyRef": {"name": "s", "key": "k"}}),
        ),
        from(path("metadata.nam")),
        json!({"resources": {"requests": {"cpus": "1"}}}),
        json!({"resources": {"limits": {"gpu": "1"}}}),
        json!({"resources": {"requests": {"example.com/device": "1"}}}),
        json!({"resources": {"requests": {"example.com/device": "1"}, "limits": {"example.com/device": "2"}}}),
        json!({"resources": {"limits": {"example.com/device": "500m"}}}),
        json!({"resources": {"limits": {"ephemeral-storage": "-1Gi"}}}),
    ];
    let good = [
        from(path("metadata.labels['app']")),
        json!({"env": [{"name": "a b", "value": "="}]}),
        json!({"resources": {"limits": {"example.com/device": "1"}}}),
    ];
    let with = |fields: &Value| {
        let mut settings = settings();
        if let Some(image) = fields.get("image") {
            settings.image = image.as_str().unwrap().to_string();
        }
        if let Some(env) = fields.get("env") {
            settings.env = serde_json::from_value(env.clone()).unwrap();
        }
        if let Some(resources) = fields.get("resources") {
            settings.resources = serde_json::from_value(resources.clone()).unwrap();
        }
        settings
    };
    for fields in &bad {
        let (reason, _) = refused(&pod("plain"), &with(fields));
        assert_eq!(reason, Reason::InjectionBroken, "{fields}");
    }
    for fields in &good {
        injected(&pod("plain"), &with(fields));
    }
}

#[test]
fn an_unparsable_amount_is_ignored() {
    let mut container = added(&injected(&pod("plain"), &settings()))[0].clone();
    check::check_added(&container).unwrap();
    container["resources"]["requests"]["cpu"] = "2 cores".into();
    assert!(
        check::check_added(&container)
            .unwrap_err()
            .contains("2 cores")
    );
}

#[test]
fn a_mesh_excludes_the_port_only_while_it_still_listens() {
    const PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";
    let after = injected(&pod("istio"), &settings());
    assert_eq!(
        json::annotation(&after, PORTS),
        None,
        "istio-init has its rules"
    );
    let mut cni = pod("istio");
    cni["spec"]["initContainers"][0]["name"] = "istio-validation".into();
    let after = injected(&cni, &settings());
    assert_eq!(json::annotation(&after, PORTS), Some("9797"));
}

#[test]
fn linkerd_skips_the_port_if_the_pod_requests_linkerd() {
    const PORTS: &str = "config.linkerd.io/skip-inbound-ports";
    let with = |annotations: Value| {
        let mut meshed = pod("plain");
        meshed["metadata"]["annotations"] = annotations;
        let after = injected(&meshed, &settings());
        json::annotation(&after, PORTS).map(str::to_owned)
    };
    assert_eq!(with(json!({})), None);
    assert_eq!(with(json!({"linkerd.io/inject": "disabled"})), None);
    let requested = with(json!({"linkerd.io/inject": "enabled"}));
    assert_eq!(requested.as_deref(), Some("9797"));
    let both = with(json!({"linkerd.io/inject": "ingress", PORTS: "4190,25"}));
    assert_eq!(both.as_deref(), Some("4190,25,9797"));
    let mut late = pod("plain");
    late["spec"]["initContainers"] = json!([{"name": "linkerd-init"}]);
    late["metadata"]["annotations"] = json!({"linkerd.io/inject": "enabled"});
    let after = injected(&late, &settings());
    assert_eq!(json::annotation(&after, PORTS), None, "its rules are fixed");
}

#[test]
fn a_sidecar_whose_cpu_is_limited_by_default_says_so() {
    let shortfall = |name: &str, resources: Value| {
        let mut settings = settings();
        settings.resources = serde_json::from_value(resources).unwrap();
        match inject(&pod(name), &settings) {
            Outcome::Inject { shortfall, .. } => shortfall,
            other => panic!("not injected: {other:?}"),
        }
    };
    let none = || json!({});
    let limited = Some(Shortfall::CpuLimited);
    assert_eq!(shortfall("guaranteed", none()), limited);
    assert_eq!(shortfall("plain", none()), None, "it has no limit");
    let chosen = json!({"requests": {"cpu": "2"}});
    assert_eq!(shortfall("guaranteed", chosen), None);
}
