//! Explanations of made-up pods, and the step that ends each.

use super::*;
use serde_json::json;

const T: &str = "2026-01-02T03:04:05Z";

fn pod(annotation: Option<Value>, state: Option<Value>) -> Value {
    let mut pod = json!({
        "metadata": {
            "name": "web-1", "namespace": "serving", "creationTimestamp": T,
            "labels": {names::POOL: "llama"}, "annotations": {},
        },
        "spec": {"containers": [{"name": "vllm"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    });
    if let Some(annotation) = annotation {
        pod["metadata"]["annotations"][names::INJECTION] = annotation.to_string().into();
    }
    if let Some(state) = state {
        pod["spec"]["initContainers"] = json!([{"name": "kvcachepool", "image": "i"}]);
        pod["status"]["initContainerStatuses"] =
            json!([{"name": "kvcachepool", "image": "i", "restartCount": 2, "state": state}]);
    }
    pod
}

fn ready_pool() -> PoolFound {
    let condition = |type_: &str| json!({"type": type_, "status": "True", "reason": "R", "message": "", "lastTransitionTime": T});
    let pool = json!({
        "apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePool",
        "metadata": {"name": "llama", "namespace": "serving", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"local": {"memory": {"perPod": "1Gi"}}},
        "status": {"conditions": [condition("Accepted"), condition("InjectionReady")]},
    });
    PoolFound::Yes(serde_json::from_value(pool).unwrap())
}

fn evidence(pod: Value, pool: PoolFound, sidecar: Option<Result<Value, &str>>) -> Evidence {
    Evidence {
        pod,
        pool: Some(pool),
        sidecar: sidecar.map(|s| {
            s.map(|v| serde_json::from_value(v).unwrap())
                .map_err(str::to_owned)
        }),
        now: "2026-01-02T03:05:05Z".parse().unwrap(),
    }
}

fn ends(evidence: &Evidence, name: &str, reason: &str) -> Explained {
    let explained = explain(evidence);
    let last = explained.steps.last().unwrap();
    assert_eq!(
        (last.step, last.reason.as_str()),
        (name, reason),
        "{explained:#?}"
    );
    assert_ne!(explained.attached, Some(true));
    explained
}

fn runs() -> Option<Value> {
    Some(json!({"running": {"startedAt": T}}))
}

#[test]
fn an_attached_pod_is_followed_to_its_vllm() {
    let status = json!({
        "state": "ready",
        "sessions": [{"id": 1, "role": "worker", "registered": true, "connected": true}],
        "counters": {"requested_tokens": 100, "hit_tokens": {"memory": 87}},
    });
    let explained = explain(&evidence(pod(None, runs()), ready_pool(), Some(Ok(status))));
    assert_eq!(explained.attached, Some(true));
    assert!(
        explained.steps.iter().all(|s| s.found == Found::Ok),
        "{explained:#?}"
    );
    let text = explained.text();
    assert!(text.starts_with("pod/web-1 in namespace serving: attached\n"));
    assert!(text.contains("87 of 100 requested tokens"));
    assert!(text.contains("has run for 60 s, 2 restarts"));
}

#[test]
fn the_explanation_ends_at_the_failing_step() {
    let refused = json!({"result": "Refused", "reason": "ContainerAmbiguous", "message": "name one of a, b", "version": "0.1.0"});
    ends(
        &evidence(pod(Some(refused), None), ready_pool(), None),
        "injection",
        "ContainerAmbiguous",
    );
    ends(
        &evidence(pod(None, None), ready_pool(), None),
        "injection",
        "Missed",
    );
    ends(
        &evidence(pod(None, None), PoolFound::No, None),
        "pool",
        "PoolNotFound",
    );
    ends(
        &evidence(pod(None, None), PoolFound::Broken("x".into()), None),
        "pool",
        "Malformed",
    );
    let mut unlabelled = evidence(pod(None, None), ready_pool(), None);
    unlabelled.pod["metadata"]["labels"] = json!({});
    ends(&unlabelled, "label", "");
    let pulls = json!({"waiting": {"reason": "ErrImagePull", "message": "no such image"}});
    let explained = ends(
        &evidence(pod(None, Some(pulls)), ready_pool(), None),
        "container",
        "ErrImagePull",
    );
    assert!(
        explained
            .text()
            .contains("NO  container  ErrImagePull: the sidecar does not start: no such image")
    );
    let explained = ends(
        &evidence(pod(None, runs()), ready_pool(), Some(Err("forbidden"))),
        "sidecar",
        "Unreachable",
    );
    assert_eq!(explained.attached, None, "no sidecar was queried");
    assert!(explained.text().contains("unknown whether attached"));
    let off = json!({"state": "off", "reasons": [{"code": "ArenaTooLarge", "message": "m"}]});
    ends(
        &evidence(pod(None, runs()), ready_pool(), Some(Ok(off))),
        "sidecar",
        "ArenaTooLarge",
    );
    ends(
        &evidence(
            pod(None, runs()),
            ready_pool(),
            Some(Ok(json!({"state": "ready"}))),
        ),
        "attached",
        "",
    );
    let session =
        json!({"state": "ready", "sessions": [{"id": 1, "role": "worker", "off": "NotSupported"}]});
    ends(
        &evidence(pod(None, runs()), ready_pool(), Some(Ok(session))),
        "attached",
        "NotSupported",
    );
}

#[test]
fn ended_pods_and_pods_with_only_an_annotation_get_an_explanation() {
    let ended = json!({"terminated": {"reason": "Error"}});
    let mut ended = evidence(pod(None, Some(ended)), ready_pool(), None);
    ended.pod["status"]["phase"] = "Succeeded".into();
    let explained = ends(&ended, "container", "");
    assert!(explained.text().contains("the pod has ended"));
    let mut annotated = evidence(pod(None, None), ready_pool(), None);
    annotated.pod["metadata"]["labels"] = json!({});
    annotated.pod["metadata"]["annotations"][names::POOL] = "llama".into();
    let explained = ends(&annotated, "injection", "Missed");
    assert!(explained.text().contains("only pods with the label"));
}

#[test]
fn a_pod_older_than_its_pool_gets_an_explanation() {
    let mut old = evidence(pod(None, None), ready_pool(), None);
    old.pod["metadata"]["creationTimestamp"] = "2025-12-31T00:00:00Z".into();
    ends(&old, "injection", "PoolNotFound");
}

#[test]
fn an_injected_pod_no_longer_needs_its_pool() {
    let explained = explain(&evidence(
        pod(None, runs()),
        PoolFound::No,
        Some(Err("forbidden")),
    ));
    assert_eq!(explained.steps[1].found, Found::Unclear);
    assert_eq!(explained.steps.last().unwrap().step, "sidecar");
}

#[test]
fn an_sglang_without_arguments_is_explained() {
    let report = json!({"result": "Injected", "reason": "SglangArgumentsMissing", "message": "container sglang lacks --enable-hierarchical-cache", "version": "1"});
    let sglang = |report: Option<Value>| {
        let mut pod = pod(report, runs());
        pod["spec"]["containers"] = json!([{
            "name": "sglang",
            "command": ["python3", "-m", "sglang.launch_server"],
            "volumeMounts": [{"name": names::SHARED_VOLUME, "mountPath": names::SHARED_PATH}],
        }]);
        pod
    };
    let ready = || Some(Ok(json!({"state": "ready"})));
    let lacking = evidence(sglang(Some(report)), ready_pool(), ready());
    let explained = ends(&lacking, "attached", "SglangArgumentsMissing");
    let last = &explained.steps.last().unwrap().message;
    assert_eq!(last, "container sglang lacks --enable-hierarchical-cache");
    let explained = ends(
        &evidence(sglang(None), ready_pool(), ready()),
        "attached",
        "",
    );
    let last = &explained.steps.last().unwrap().message;
    assert!(last.starts_with("SGLang has not contacted"), "{last}");
    let session = json!({"id": 1, "role": "opaque", "registered": true, "connected": true});
    let on = json!({"state": "ready", "sessions": [session]});
    let explained = explain(&evidence(sglang(None), ready_pool(), Some(Ok(on))));
    assert_eq!(explained.attached, Some(true));
    assert!(
        explained
            .text()
            .contains("SGLang is attached with 1 sessions")
    );
}

#[test]
fn a_shortfall_is_explained() {
    let report = json!({"result": "Injected", "reason": "GpuNotRequested", "message": "container vllm asks for none", "version": "1"});
    let pod = pod(Some(report), runs());
    let explained = explain(&evidence(pod, ready_pool(), Some(Err("forbidden"))));
    let injection = explained
        .steps
        .iter()
        .find(|s| s.step == "injection")
        .unwrap();
    assert_eq!(injection.found, Found::Unclear);
    assert_eq!(injection.reason, "GpuNotRequested");
    assert!(
        injection
            .message
            .ends_with("but container vllm asks for none")
    );
    assert_eq!(explained.steps.last().unwrap().step, "sidecar");
}
