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
