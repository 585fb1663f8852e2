//! Conditions of shared tiers.

use super::*;

/// A scene of a pool with both shared tiers, with these reports of sidecars.
fn sharing(reports: &[(&str, State, &str)]) -> Scene {
    let mut scene = scene([running("a")]);
    scene.pool.spec.shared = serde_json::from_value(json!({
        "redis": {"external": {"url": "redis://a"}}, "s3": {"bucket": "kv-cache"},
    }))
    .unwrap();
    scene.usage.tiers = reports
        .iter()
        .map(|(name, state, reason)| TierUse {
            name: (*name).into(),
            state: *state,
            reason: (*reason).into(),
            message: "may not s3:PutObject".into(),
            example: "a".into(),
            ..TierUse::default()
        })
        .collect();
    scene
}

#[test]
fn shared_tiers_are_ready_when_sidecars_report_it() {
    let (redis, s3) = (("redis", State::Ready, ""), ("s3", State::Ready, ""));
    let face_of =
        |reports: &[(&str, State, &str)]| face(&sharing(reports).status(), SHARED_TIERS_READY);
    let is = |status: &str, reason: &str| (status.to_owned(), reason.to_owned());
    assert_eq!(face_of(&[]), is("Unknown", "NoSidecarYet"));
    assert_eq!(face_of(&[redis]), is("Unknown", "NoSidecarYet"));
    assert_eq!(face_of(&[redis, s3]), is("True", "TiersServe"));
    let opening = ("s3", State::Starting, "Starting");
    assert_eq!(face_of(&[redis, opening]), is("Unknown", "TierStarting"));
    let some = ("s3", State::Degraded, "Denied");
    assert_eq!(face_of(&[redis, some]), is("True", "SomeDegraded"));
    let down = sharing(&[redis, ("s3", State::Off, "Denied")]).status();
    expect(&down, SHARED_TIERS_READY, "False", "SharedTierDown");
    let message = &condition(&down.conditions, SHARED_TIERS_READY)
        .unwrap()
        .message;
    assert_eq!(
        message,
        "tier s3: Denied: may not s3:PutObject (reported by pod a)"
    );
}

#[test]
fn a_configured_tier_is_listed_before_a_sidecar_reports_it() {
    let status = sharing(&[]).status();
    let tiers: Vec<_> = status
        .tiers
        .iter()
        .map(|t| (&*t.name, t.state, &*t.reason))
        .collect();
    let unknown = |name| (name, TierState::Unknown, "NoSidecarYet");
    assert_eq!(tiers[1..], [unknown("redis"), unknown("s3")]);
}

#[test]
fn a_new_leader_keeps_the_reported_shared_tiers_until_it_has_queried_sidecars() {
    let before = sharing(&[("redis", State::Ready, ""), ("s3", State::Off, "Denied")]).status();
    let opening = ("s3", State::Starting, "Starting");
    for reports in [&[][..], &[("redis", State::Ready, ""), opening]] {
        let mut after = sharing(reports);
        after.usage.known = false;
        let after = after.after(&before, at(20));
        assert_eq!(face(&after, SHARED_TIERS_READY).1, "SharedTierDown");
    }
}

/// A scene of a pool with two managed servers, one of which is ready.
fn managing(trouble: Option<(&str, &str)>) -> Scene {
    let mut scene = scene([]);
    let redis = json!({"managed": {"shards": 2, "memoryPerShard": "1Gi"}});
    scene.pool.spec.shared = serde_json::from_value(json!({"redis": redis})).unwrap();
    let server = |name: &str, ready, trouble: Option<(&str, &str)>| {
        Arc::new(Server {
            name: name.into(),
            namespace: "n".into(),
            pool: "p".into(),
            shape: None,
            ready,
            trouble: trouble.map(|(reason, message)| (reason.into(), message.into())),
        })
    };
    scene.servers = vec![server("s-0", true, None), server("s-1", false, trouble)];
    scene
}

#[test]
fn a_managed_server_that_cannot_run_is_named_with_its_reason() {
    let scene = managing(Some(("ImagePullBackOff", "no such image")));
    let status = scene.status();
    expect(&status, SHARED_TIERS_READY, "False", "ServersFailing");
    let message = &condition(&status.conditions, SHARED_TIERS_READY).unwrap();
    assert_eq!(
        message.message,
        "1 of 2 managed servers are ready; pod s-1: ImagePullBackOff: no such image"
    );
    let servers = status.managed_servers.unwrap();
    assert_eq!((servers.desired, servers.ready), (2, 1));
}

#[test]
fn a_server_or_manager_that_the_api_server_refuses_is_failing_while_it_is_missing() {
    for (mut scene, kind, waits) in [
        (managing(None), "StatefulSet", "ServersStarting"),
        (clustered(false, None), "ReplicaSet", "ServersJoining"),
    ] {
        scene.refused_servers = vec![Refused {
            owner: Owner {
                kind: kind.into(),
                ..pod("a").owner.unwrap()
            },
            message: "exceeded quota: q".into(),
            at: at(1),
        }];
        expect(&scene.status(), SHARED_TIERS_READY, "Unknown", waits);
        scene.servers.pop();
        let status = scene.status();
        expect(&status, SHARED_TIERS_READY, "False", "ServersFailing");
        let message = &condition(&status.conditions, SHARED_TIERS_READY).unwrap();
        let refusal = format!("managed servers are ready; {kind} web: exceeded quota: q");
        assert!(message.message.ends_with(&refusal), "{}", message.message);
    }
}

/// A scene of a pool with a cluster whose servers are ready, and whose manager is ready or in trouble.
fn clustered(ready: bool, trouble: Option<(&str, &str)>) -> Scene {
    let mut scene = managing(None);
    let redis = json!({"managed": {"mode": "Cluster", "shards": 3, "memoryPerShard": "1Gi"}});
    scene.pool.spec.shared = serde_json::from_value(json!({"redis": redis})).unwrap();
    let server = &scene.servers[0];
    let manager = Arc::new(Server {
        name: "m".into(),
        shape: Some("3x1".into()),
        ready,
        trouble: trouble.map(|(reason, message)| (reason.into(), message.into())),
        ..(**server).clone()
    });
    scene.servers = vec![server.clone(), server.clone(), server.clone(), manager];
    scene
}

#[test]
fn servers_that_do_not_form_a_cluster_yet_name_the_manager() {
    let status = clustered(false, None).status();
    expect(&status, SHARED_TIERS_READY, "Unknown", "ServersJoining");
    let condition = condition(&status.conditions, SHARED_TIERS_READY).unwrap();
    assert_eq!(
        condition.message,
        "3 of 3 managed servers are ready; the log of Deployment kvcachepool-p-cluster has the steps that form the cluster"
    );
    let servers = status.managed_servers.unwrap();
    assert_eq!((servers.desired, servers.ready), (3, 3), "no manager");
    let status = clustered(true, None).status();
    expect(&status, SHARED_TIERS_READY, "Unknown", "NoSidecarYet");
    let status = clustered(false, Some(("ErrImagePull", "no such image"))).status();
    expect(&status, SHARED_TIERS_READY, "False", "ServersFailing");
}

#[test]
fn a_cluster_that_serves_is_ready_while_its_manager_works_or_fails() {
    for trouble in [None, Some(("ErrImagePull", "no such image"))] {
        let mut scene = clustered(false, trouble);
        scene.usage.tiers = vec![TierUse {
            name: "redis".into(),
            state: State::Ready,
            ..TierUse::default()
        }];
        expect(&scene.status(), SHARED_TIERS_READY, "True", "TiersServe");
    }
}

#[test]
fn managed_servers_that_start_are_no_failure() {
    let mut scene = managing(None);
    let status = scene.status();
    expect(&status, SHARED_TIERS_READY, "Unknown", "ServersStarting");
    scene.servers = [&scene.servers[0], &scene.servers[0], &scene.servers[0]]
        .map(Arc::clone)
        .to_vec();
    let status = scene.status();
    expect(&status, SHARED_TIERS_READY, "Unknown", "NoSidecarYet");
    assert_eq!(status.managed_servers.unwrap().ready, 2, "of two shards");
    scene.pool.spec.shared = Default::default();
    assert_eq!(scene.status().managed_servers, None);
}
