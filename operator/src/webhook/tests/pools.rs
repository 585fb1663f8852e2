//! The pool of a pod: from the cache, from the API server, or none, with the reason.

use super::*;
use crate::api::KVCachePool;
use crate::defaults::Defaults;
use crate::inject::Reason;
use crate::names::{CANARY_POOL, CONTAINER, POOL};
use crate::scope::Scope;
use crate::webhook::decide::Decider;
use crate::webhook::pools::{Found, Pools, READS_MAX, Requester, Stored};
use axum::Json;
use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::routing::get;
use kube::core::DeserializeGuard;
use kube::runtime::reflector;
use kube::runtime::watcher::Event;

fn stored(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "kvcachepool.io/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": name, "namespace": "serving", "generation": 1},
        "spec": spec,
    })
}

fn plain() -> Value {
    json!({"local": {"memory": {"perPod": "1Gi"}}})
}

/// An API server that has one pool, `late`, forbids another and is slow for a third.
async fn api_server() -> kube::Client {
    let path = "/apis/kvcachepool.io/v1alpha1/namespaces/{namespace}/kvcachepools/{name}";
    let say = |code: u16, reason: &str| {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason});
        (StatusCode::from_u16(code).unwrap(), Json(status))
    };
    let pool = move |Path((_, name)): Path<(String, String)>| async move {
        match name.as_str() {
            "late" => (StatusCode::OK, Json(stored("late", plain()))),
            "forbidden" => say(403, "Forbidden"),
            "slow" => std::future::pending().await,
            _ => say(404, "NotFound"),
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (phase, shutdown) = Shutdown::new();
    let port = Port {
        name: "api",
        bounds: Bounds::default(),
        tls: None,
        router: Router::new().route(path, get(pool)),
        metrics: Arc::new(metrics::registry()),
    };
    tokio::spawn(async move {
        let _kept = phase;
        serve(listener, port, shutdown).await;
    });
    kube::Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap()
}

async fn pools(cached: &[Value]) -> (Pools, Arc<Metrics>) {
    // The client needs a provider, although this API server does not use TLS.
    let _set = default_provider().install_default();
    let (store, mut writer) = reflector::store();
    for pool in cached {
        let pool: Stored = serde_json::from_value(pool.clone()).unwrap();
        writer.apply_watcher_event(&Event::Apply(pool));
    }
    let defaults = Arc::new(Defaults {
        image: "ghcr.io/kvcachepool/kvcachepool:1".into(),
        version: "1".into(),
        namespace: "kvcachepool-system".into(),
        ..crate::desired::tests::defaults()
    });
    let metrics = Arc::new(metrics::registry());
    (
        Pools::new(
            store,
            api_server().await,
            Scope::default(),
            defaults,
            metrics.clone(),
        ),
        metrics,
    )
}

const POD: Requester<'static> = Requester {
    dry_run: false,
    injected: false,
    owners: &[""],
};
const DRY_RUN: Requester<'static> = Requester {
    dry_run: true,
    injected: false,
    owners: &[""],
};

/// The pod with the patch of a response applied.
fn patched(response: &Value, mut pod: Value) -> Value {
    let patch: json_patch::Patch = serde_json::from_value(patch(response)).unwrap();
    json_patch::patch(&mut pod, &patch).unwrap();
    pod
}

fn refused(found: Found) -> (Reason, String) {
    match found {
        Found::Refused(reason, message) => (reason, message),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_pool_that_is_being_deleted_gets_no_new_pods_and_keeps_those_that_it_has() {
    let mut going = stored("p", plain());
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    let (pools, _) = pools(&[going]).await;
    let (reason, message) = refused(pools.find("serving", "p", POD).await);
    assert_eq!(reason, Reason::PoolNotFound);
    assert_eq!(message, "KVCachePool p is being deleted");
    let again = Requester {
        injected: true,
        ..POD
    };
    assert!(matches!(
        pools.find("serving", "p", again).await,
        Found::Pool(_)
    ));
}

#[tokio::test]
async fn only_a_cached_pool_of_the_same_namespace_is_used() {
    let (pools, metrics) = pools(&[stored("p", plain())]).await;
    let Found::Pool(settings) = pools.find("serving", "p", POD).await else {
        panic!("not found");
    };
    assert_eq!(settings.image, "ghcr.io/kvcachepool/kvcachepool:1");
    assert!(!metrics.text().contains("webhook_pool_reads_total{"));
    assert_eq!(
        refused(pools.find("other", "p", POD).await).0,
        Reason::PoolNotFound
    );
}

#[tokio::test]
async fn a_pool_that_the_watch_has_not_reported_yet_is_read() {
    let (pools, metrics) = pools(&[]).await;
    assert!(matches!(
        pools.find("serving", "late", POD).await,
        Found::Pool(_)
    ));
    assert!(
        metrics
            .text()
            .contains(r#"webhook_pool_reads_total{result="found"} 1"#)
    );
    let (reason, message) = refused(pools.find("serving", "missing", POD).await);
    assert_eq!(reason, Reason::PoolNotFound);
    assert!(
        message.contains("no KVCachePool missing in namespace serving"),
        "{message}"
    );
}

#[tokio::test]
async fn a_failing_or_slow_api_server_does_not_delay_pods() {
    let (pools, _) = pools(&[]).await;
    assert!(matches!(
        pools.find("serving", "forbidden", POD).await,
        Found::Unread
    ));
    let began = std::time::Instant::now();
    assert!(matches!(
        pools.find("serving", "slow", POD).await,
        Found::Unread
    ));
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn a_malformed_or_invalid_pool_refuses_only_its_own_pods() {
    let malformed = stored("malformed", json!({"local": 5}));
    let wrong = json!({"local": {"memory": {"perPod": "1Gi"}}, "cache": {"chunkTokens": 0}});
    let (pools, _) = pools(&[malformed, stored("wrong", wrong), stored("p", plain())]).await;
    for name in ["malformed", "wrong"] {
        let (reason, message) = refused(pools.find("serving", name, POD).await);
        assert_eq!(reason, Reason::PoolNotAccepted, "{name}");
        assert!(!message.is_empty());
    }
    assert!(matches!(
        pools.find("serving", "p", POD).await,
        Found::Pool(_)
    ));
}

#[tokio::test]
async fn the_canarys_pool_exists_only_for_dry_runs_in_the_operators_namespace() {
    let (pools, _) = pools(&[]).await;
    assert!(matches!(
        pools.find("kvcachepool-system", CANARY_POOL, DRY_RUN).await,
        Found::Pool(_)
    ));
    for (namespace, requester) in [("kvcachepool-system", POD), ("serving", DRY_RUN)] {
        let found = pools.find(namespace, CANARY_POOL, requester).await;
        assert_eq!(refused(found).0, Reason::PoolNotFound);
    }
}

#[tokio::test]
async fn an_invalid_pool_name_is_not_looked_up() {
    let (pools, metrics) = pools(&[]).await;
    let long = "p".repeat(1 << 16);
    for name in [
        "..",
        "../../../pods",
        "p?watch=true",
        "p/status",
        "P",
        "p.q",
        "",
        &long,
    ] {
        let (reason, message) = refused(pools.find("serving", name, POD).await);
        assert_eq!(reason, Reason::PoolNotFound, "{name}");
        assert!(message.len() < 1_000);
    }
    let found = pools.find("a/kvcachepools/late?x=", "late", POD).await;
    assert_eq!(refused(found).0, Reason::PoolNotFound);
    assert!(!metrics.text().contains("webhook_pool_reads_total{"));
}

#[tokio::test]
async fn a_namespace_that_is_not_watched_is_named_and_not_read() {
    let (mut pools, metrics) = pools(&[]).await;
    pools.scope = Scope::new(vec!["other".to_owned()]);
    let (reason, message) = refused(pools.find("serving", "p", POD).await);
    assert_eq!(reason, Reason::NamespaceNotWatched);
    assert!(message.contains("namespace serving"), "{message}");
    assert!(!metrics.text().contains("webhook_pool_reads_total{"));
}

#[tokio::test]
async fn a_missing_pool_is_not_read_again_at_once() {
    let (pools, metrics) = pools(&[]).await;
    for _ in 0..3 {
        let found = pools.find("serving", "missing", POD).await;
        assert_eq!(refused(found).0, Reason::PoolNotFound);
    }
    let once = r#"webhook_pool_reads_total{result="missing"} 1"#;
    assert!(metrics.text().contains(once));
}

#[tokio::test]
async fn reads_of_unknown_pools_are_bounded_and_do_not_queue() {
    let (pools, _) = pools(&[]).await;
    let all = pools.reads.acquire_many(READS_MAX as u32).await.unwrap();
    let began = std::time::Instant::now();
    let found = pools.find("serving", "late", POD).await;
    assert!(matches!(found, Found::Unread));
    assert!(began.elapsed() < Duration::from_secs(1));
    drop(all);
    let found = pools.find("serving", "late", POD).await;
    assert!(matches!(found, Found::Pool(_)));
}

#[tokio::test]
async fn an_injected_pod_is_repaired_while_the_breaker_is_open() {
    let (pools, _) = pools(&[stored("p", plain())]).await;
    let Found::Pool(settings) = pools.find("serving", "p", POD).await else {
        panic!("not found");
    };
    let hash = settings.hash();
    let rig = start(Decider::new(pools), Limits::default(), Bounds::default()).await;
    let mut injected = patched(&rig.review(INJECT, &review(pod())).await, pod());
    let mut shut = stored("p", plain());
    shut["status"] = json!({"injectionPaused": {
        "hash": hash, "since": "2026-01-01T00:00:00Z", "trial": false, "message": "no such image",
    }});
    let (pools, _) = self::pools(&[shut]).await;
    let rig = start(Decider::new(pools), Limits::default(), Bounds::default()).await;
    let refused = rig.review(INJECT, &review(pod())).await;
    assert!(patch(&refused).to_string().contains("InjectionPaused"));
    let whole = injected.clone();
    let list = injected["spec"]["initContainers"].as_array_mut().unwrap();
    list[0].as_object_mut().unwrap().remove("restartPolicy");
    let response = rig.review(INJECT, &review(injected.clone())).await;
    assert_eq!(patched(&response, injected), whole);
}

#[tokio::test]
async fn a_pod_refused_for_another_reason_does_not_use_up_the_probe() {
    let (pools, _) = pools(&[stored("p", plain())]).await;
    let Found::Pool(settings) = pools.find("serving", "p", POD).await else {
        panic!("not found");
    };
    let mut ajar = stored("p", plain());
    ajar["status"] = json!({"injectionPaused": {
        "hash": settings.hash(), "since": "2026-01-01T00:00:00Z", "trial": true, "message": "no such image",
    }});
    let (pools, _) = self::pools(&[ajar]).await;
    let rig = start(Decider::new(pools), Limits::default(), Bounds::default()).await;
    let mut elsewhere = pod();
    elsewhere["metadata"]["annotations"][CONTAINER] = "none".into();
    let refused = rig.review(INJECT, &review(elsewhere)).await;
    assert!(patch(&refused).to_string().contains("ContainerNotFound"));
    patched(&rig.review(INJECT, &review(pod())).await, pod());
    assert!(rig.counted(r#"injections_total{reason="",result="injected"} 1"#));
    let next = rig.review(INJECT, &review(pod())).await;
    assert!(patch(&next).to_string().contains("InjectionPaused"));
}

#[tokio::test]
async fn a_labelled_pod_is_injected_and_the_canary_detects_it() {
    let (pools, _) = pools(&[stored("p", plain())]).await;
    let rig = start(Decider::new(pools), Limits::default(), Bounds::default()).await;
    let response = rig.review(INJECT, &review(pod())).await;
    let injected = patched(&response, pod());
    assert!(crate::canary::pod::injected(
        &serde_json::from_value(injected).unwrap()
    ));

    let mut missing = pod();
    missing["metadata"]["labels"][POOL] = "missing".into();
    let response = rig.review(INJECT, &review(missing)).await;
    let stamp = patch(&response).to_string();
    assert!(stamp.contains("PoolNotFound"), "{stamp}");
    assert!(rig.counted(r#"injections_total{reason="pool_not_found",result="refused"} 1"#));

    let mut without = pod();
    without["metadata"]["labels"] = json!({});
    assert!(
        rig.review(INJECT, &review(without))
            .await
            .get("patch")
            .is_none()
    );
    assert!(rig.counted(r#"injections_total{reason="no_pool",result="skipped"} 1"#));
}

#[test]
fn the_operator_can_read_the_pools_of_this_test() {
    let DeserializeGuard(pool) = serde_json::from_value::<Stored>(stored("p", plain())).unwrap();
    let _pool: KVCachePool = pool.unwrap();
}
