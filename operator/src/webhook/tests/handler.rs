//! Answers to reviews.

use super::*;

#[tokio::test]
async fn a_pod_is_answered_with_its_patch_and_counted() {
    let rig = labels().await;
    let response = rig.review(INJECT, &review(pod())).await;
    assert_eq!(patch(&response)[0]["value"]["seen"], "yes");
    assert!(rig.counted(r#"injections_total{reason="",result="injected"} 1"#));
    assert!(rig.counted("injection_seconds_count 1"));
}

#[tokio::test]
async fn a_pod_of_a_megabyte_is_answered() {
    let rig = labels().await;
    let mut large = pod();
    // Quotes are escaped in JSON, so the review is twice the size of the pod.
    large["metadata"]["annotations"] = json!({"large": "\"".repeat(1 << 20)});
    let response = rig.review(INJECT, &review(large)).await;
    assert_eq!(patch(&response)[0]["value"]["seen"], "yes");
}

#[tokio::test]
async fn reviews_without_a_pod_to_create_are_allowed_and_counted() {
    let rig = labels().await;
    let with = |path: &str, value: Value| {
        let mut review = review(pod());
        *review.pointer_mut(path).unwrap() = value;
        review
    };
    let without_object = {
        let mut review = review(pod());
        review["request"].as_object_mut().unwrap().remove("object");
        review
    };
    let eviction = {
        let mut review = review(pod());
        review["request"]["subResource"] = "eviction".into();
        review
    };
    for (review, reason, count) in [
        (with("/request/object", Value::Null), "no_object", 1),
        (without_object, "no_object", 2),
        (
            with("/request/kind/kind", "Deployment".into()),
            "other_kind",
            1,
        ),
        (
            with("/request/kind/group", "example.com".into()),
            "other_kind",
            2,
        ),
        (eviction, "other_kind", 3),
        (
            with("/request/operation", "UPDATE".into()),
            "other_operation",
            1,
        ),
        (
            with("/request/operation", Value::Null),
            "other_operation",
            2,
        ),
    ] {
        let response = rig.review(INJECT, &review).await;
        assert_eq!(
            response.as_object().unwrap().len(),
            2,
            "{reason}: {response}"
        );
        let line = format!(r#"injections_total{{reason="{reason}",result="skipped"}} {count}"#);
        assert!(rig.counted(&line), "{line}\n{}", rig.metrics.text());
    }
}

#[tokio::test]
async fn every_path_answers_a_review_but_only_one_injects() {
    let rig = labels().await;
    for path in ["/", "/mutate", "/inject/", "/healthz?timeout=3s"] {
        let response = rig.review(path, &review(pod())).await;
        assert!(response.get("patch").is_none(), "{path}");
    }
    assert!(rig.counted(r#"injections_total{reason="unknown_path",result="skipped"} 4"#));
    // API servers add their own timeout.
    let response = rig.review("/inject?timeout=3s", &review(pod())).await;
    assert!(response.get("patch").is_some());
}

#[tokio::test]
async fn an_invalid_review_gets_400_and_is_counted() {
    let rig = labels().await;
    for (body, reason) in [
        (&b"\xff\xfe garbage"[..], "not_json"),
        (b"", "not_json"),
        (b"{\"kind\":\"AdmissionReview\"}", "no_uid"),
        (b"[1, 2", "not_json"),
    ] {
        let (status, reply) = rig.post(INJECT, body).await;
        assert_eq!(status, 400);
        let reply = String::from_utf8(reply).unwrap();
        assert!(reply.contains("POST an AdmissionReview"), "{reply}");
        assert!(rig.metrics.text().contains(&format!(
            r#"kvcachepool_webhook_unreadable_total{{reason="{reason}"}}"#
        )));
    }
}

#[tokio::test]
async fn a_body_over_the_bound_is_refused_before_it_is_read() {
    let rig = labels().await;
    let mut stream = rig.connect().await;
    stream
        .write_all(head(INJECT, (4 << 20) + 1).as_bytes())
        .await
        .unwrap();
    let (status, _, _) = answer(&mut stream).await.unwrap();
    assert_eq!(status, 413);
    assert!(rig.counted(r#"webhook_unreadable_total{reason="too_large"} 1"#));
}

#[tokio::test]
async fn a_dry_run_gets_the_same_answer_and_is_not_counted() {
    let rig = labels().await;
    let mut dry = review(pod());
    dry["request"]["dryRun"] = true.into();
    let response = rig.review(INJECT, &dry).await;
    assert_eq!(patch(&response)[0]["value"]["seen"], "yes");
    assert!(!rig.metrics.text().contains("kvcachepool_injections_total{"));
}

#[tokio::test]
async fn a_decision_that_times_out_admits_the_pod_without_a_sidecar() {
    let limits = Limits {
        decision_time_max: Duration::from_millis(50),
        ..Limits::default()
    };
    let rig = start(Labels::default(), limits, Bounds::default()).await;
    let mut slow = pod();
    slow["metadata"]["annotations"] = json!({"wait": 60_000});
    let response = rig.review(INJECT, &review(slow)).await;
    assert!(response.get("patch").is_none());
    assert!(rig.counted(r#"injections_total{reason="too_slow",result="skipped"} 1"#));
}
