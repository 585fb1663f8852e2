use super::facts::{Facts, RIGHTS};
use super::judge::judge;
use super::judge_pools::supported;
use super::{Diagnosis, Level};
use crate::api::crd;
use crate::plugin::read::Pools;
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const NOW: &str = "2026-11-28T00:00:00Z";

fn read<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A self-signed certificate that ends on this day.
fn certificate(year: i32, month: u8, day: u8) -> String {
    let mut params = rcgen::CertificateParams::new(vec!["a".to_owned()]).unwrap();
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(year, month, day);
    let key = rcgen::KeyPair::generate().unwrap();
    params.self_signed(&key).unwrap().pem()
}

fn webhook(pem: &str) -> Value {
    let bundle = k8s_openapi::ByteString(pem.as_bytes().to_vec());
    let service = json!({"namespace": "kvcachepool-system", "name": "kvcachepool-webhook"});
    json!({"metadata": {"name": "kvcachepool-injector"}, "webhooks": [{
        "name": "label.kvcachepool.io", "sideEffects": "None", "admissionReviewVersions": ["v1"], "failurePolicy": "Ignore",
        "clientConfig": {"service": service, "caBundle": bundle},
    }]})
}

fn replica(name: &str, ready: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"app.kubernetes.io/version": env!("CARGO_PKG_VERSION")}},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    })
}

fn pool(status: Value) -> Value {
    json!({
        "apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": "demo", "namespace": "n"},
        "spec": {"local": {"memory": {"perPod": "64Gi"}}}, "status": status,
    })
}

fn condition(type_: &str, status: &str, reason: &str) -> Value {
    json!({"type": type_, "status": status, "reason": reason, "message": "m", "lastTransitionTime": NOW})
}

/// An installation without a problem.
fn healthy() -> Facts {
    let with = |name: &str| json!({"name": name});
    let sidecar = [with("kvcachepool"), with("kvcachepool-init")];
    let ready = condition("Ready", "True", "Ready");
    Facts {
        now: NOW.parse::<Timestamp>().unwrap(),
        kubernetes: Ok(36),
        crd: Ok(Some(crd())),
        webhook: Ok(read(webhook(&certificate(2030, 1, 1)))),
        namespace: "kvcachepool-system".to_owned(),
        operator: Ok(vec![read(replica("a", "True")), read(replica("b", "True"))]),
        lease: Ok(read(json!({"spec": {
            "holderIdentity": "a_01", "leaseDurationSeconds": 15, "renewTime": "2026-11-27T23:59:58.000000Z",
        }}))),
        canary: Ok(read(
            json!({"spec": {"containers": [], "initContainers": sidecar}}),
        )),
        rights: RIGHTS.iter().map(|right| (*right, Ok(true))).collect(),
        pools: Ok(Pools {
            pools: vec![read(pool(json!({"pods": {}, "conditions": [ready]})))],
            broken: Vec::new(),
            pods: None,
        }),
    }
}

/// Level and message of the worst finding of a check.
fn worst(facts: &Facts, check: &str) -> (Level, String) {
    let findings = judge(facts);
    let of = findings.into_iter().filter(|f| f.check == check);
    let worst = of.max_by_key(|f| f.level).unwrap();
    (worst.level, worst.message)
}

#[test]
fn a_healthy_installation_is_ok_in_every_check() {
    let findings = judge(&healthy());
    for found in &findings {
        assert_eq!(found.level, Level::Ok, "{found:?}");
    }
    let checks: Vec<_> = findings.iter().map(|f| f.check).collect();
    assert_eq!(
        checks,
        [
            "kubernetes",
            "crd",
            "operator",
            "leader",
            "webhook",
            "certificate",
            "injection",
            "rights",
            "versions",
            "pools"
        ]
    );
    assert!(!Diagnosis { findings }.failed());
}

#[test]
fn each_broken_part_fails_its_own_check_and_says_what_to_do() {
    type Break = fn(&mut Facts);
    let cases: [(&str, &str, Break); 13] = [
        ("kubernetes", "upgrade the cluster", |f| {
            f.kubernetes = Ok(32)
        }),
        ("kubernetes", "does not answer", |f| {
            f.kubernetes = Err("refused".to_owned())
        }),
        ("crd", "install the chart", |f| f.crd = Ok(None)),
        ("crd", "such as v1alpha1.spec.cache", |f| {
            let stored = f.crd.as_mut().unwrap().as_mut().unwrap();
            let schema = stored.spec.versions[0].schema.as_mut().unwrap();
            let root = schema.open_api_v3_schema.as_mut().unwrap();
            let spec = root.properties.as_mut().unwrap().get_mut("spec").unwrap();
            spec.properties.as_mut().unwrap().remove("cache");
        }),
        ("operator", "--operator-namespace", |f| {
            f.operator = Ok(Vec::new())
        }),
        ("operator", "logs --operator", |f| {
            f.operator = Ok(vec![read(replica("a", "False"))])
        }),
        ("leader", "has no holder", |f| f.lease = Ok(None)),
        ("leader", "has not renewed", |f| {
            let spec = f
                .lease
                .as_mut()
                .unwrap()
                .as_mut()
                .unwrap()
                .spec
                .as_mut()
                .unwrap();
            spec.renew_time = Some(read(json!("2026-11-27T23:59:00.000000Z")));
        }),
        ("webhook", "install the chart with its webhook", |f| {
            f.webhook = Ok(None)
        }),
        ("certificate", "has no certificate", |f| {
            f.webhook = Ok(read(webhook("")))
        }),
        ("certificate", "has expired", |f| {
            f.webhook = Ok(read(webhook(&certificate(2026, 11, 27))))
        }),
        ("injection", "does not reach the webhook", |f| {
            f.canary = Ok(read(json!({"spec": {"containers": []}})))
        }),
        ("pools", "no operator reconciles it", |f| {
            f.pools.as_mut().unwrap().pools = vec![read(pool(Value::Null))];
        }),
    ];
    for (check, text, break_it) in cases {
        let mut facts = healthy();
        break_it(&mut facts);
        let (level, message) = worst(&facts, check);
        assert_eq!(level, Level::Fail, "{check}: {message}");
        assert!(message.contains(text), "{check}: {message}");
        let failed: Vec<_> = judge(&facts)
            .into_iter()
            .filter(|f| f.level == Level::Fail)
            .collect();
        assert_eq!(failed.len(), 1, "{failed:?}");
    }
}

#[test]
fn a_missing_right_is_unknown_or_a_warning_and_never_a_failure() {
    let mut facts = healthy();
    let why = || "forbidden".to_owned();
    facts.crd = Err(why());
    facts.webhook = Err(why());
    facts.operator = Err(why());
    facts.lease = Err(why());
    facts.canary = Err(why());
    facts.pools = Err(why());
    facts.rights[4].1 = Ok(false);
    let findings = judge(&facts);
    assert!(
        findings.iter().all(|f| f.level != Level::Fail),
        "{findings:?}"
    );
    for check in [
        "crd",
        "webhook",
        "operator",
        "leader",
        "injection",
        "versions",
        "pools",
    ] {
        assert_eq!(worst(&facts, check).0, Level::Unknown, "{check}");
    }
    let (level, message) = worst(&facts, "rights");
    assert_eq!(level, Level::Warn);
    assert!(
        message.contains("get pods/proxy") && message.contains("reload"),
        "{message}"
    );
}

#[test]
fn a_certificate_that_is_not_renewed_in_time_is_a_warning() {
    let mut facts = healthy();
    facts.webhook = Ok(read(webhook(&certificate(2026, 12, 1))));
    assert_eq!(worst(&facts, "certificate").0, Level::Warn);
    // While an authority is replaced, the bundle has both.
    let both = certificate(2026, 11, 1) + &certificate(2030, 1, 1);
    facts.webhook = Ok(read(webhook(&both)));
    let (level, message) = worst(&facts, "certificate");
    assert_eq!(level, Level::Ok);
    assert!(message.contains("2 certificates"), "{message}");
}

#[test]
fn versions_of_sidecars_are_compared_with_the_operator() {
    assert!(supported("0.4.1", "0.4.0") && supported("0.4.1", "0.3.9"));
    assert!(!supported("0.4.1", "0.2.9") && !supported("0.4.1", "0.5.0"));
    assert!(!supported("1.0.0", "0.9.0") && supported("dev", "0.1.0"));
    let mut facts = healthy();
    let with = |version: &str| {
        let ready = condition("Ready", "True", "Ready");
        let status = json!({"pods": {}, "conditions": [ready], "versions": [{"version": version, "pods": 3}]});
        vec![read(pool(status))]
    };
    facts.pools.as_mut().unwrap().pools = with("0.0.9");
    let (level, message) = worst(&facts, "versions");
    assert_eq!(level, Level::Warn, "{message}");
    facts.pools.as_mut().unwrap().pools = with("7.0.0");
    let (level, message) = worst(&facts, "versions");
    assert_eq!(level, Level::Fail);
    assert!(
        message.contains("7.0.0 (3 pods); restart these pods"),
        "{message}"
    );
}

#[test]
fn a_pool_is_judged_by_the_cause_and_not_by_ready_which_repeats_it() {
    let mut facts = healthy();
    let status = json!({
        "pods": {"missed": 2},
        "skipped": [{"reason": "ContainerAmbiguous", "count": 1, "examplePod": "web"}],
        "conditions": [
            condition("Ready", "False", "SidecarsFailing"),
            condition("SidecarsReady", "False", "SidecarsFailing"),
            condition("SharedTiersReady", "True", "TiersServe"),
        ],
    });
    facts.pools.as_mut().unwrap().pools = vec![read(pool(status))];
    let messages: Vec<_> = judge(&facts)
        .into_iter()
        .filter(|f| f.check == "pools")
        .collect();
    assert_eq!(messages.len(), 3, "{messages:?}");
    assert_eq!(
        messages[0].message,
        "pool n/demo: SidecarsReady is False, SidecarsFailing: m"
    );
    assert!(
        messages[1]
            .message
            .contains("2 pods were created while the webhook was not called")
    );
    assert!(messages[2].message.contains("explain pod/web -n n"));
    // Injection that the user disabled does not make the pool unready.
    let status = json!({"pods": {}, "conditions": [
        condition("Ready", "True", "Ready"), condition("InjectionReady", "False", "InjectionDisabled"),
    ]});
    facts.pools.as_mut().unwrap().pools = vec![read(pool(status))];
    assert_eq!(worst(&facts, "pools").0, Level::Ok);
}
