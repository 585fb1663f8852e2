//! Judges the installation: the cluster, the CRD, the operator, the webhook and the user's rights. Pure.

use super::facts::{CRD, Fact, Facts, LEASE, WEBHOOK};
use super::judge_pools;
use super::{Finding, Level};
use crate::api::crd;
use crate::canary::pod::injected;
use crate::pki::last_expiry;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use kube::ResourceExt;
use std::collections::BTreeSet;

/// The oldest supported minor version of Kubernetes 1.
const KUBERNETES_MIN: u32 = 33;
/// An authority that expires within this time is not being renewed.
const EXPIRES_SOON_S: u64 = 7 * 24 * 3600;
/// Fields that a message names.
const NAMED: usize = 5;

/// A finding. The name of its check is in the table of `judge`.
pub fn finding(level: Level, message: impl Into<String>) -> Finding {
    Finding {
        check: "",
        level,
        message: message.into(),
    }
}

pub fn ok(message: impl Into<String>) -> Finding {
    finding(Level::Ok, message)
}

pub fn unknown(message: impl Into<String>) -> Finding {
    finding(Level::Unknown, message)
}

pub fn warn(message: impl Into<String>) -> Finding {
    finding(Level::Warn, message)
}

pub fn fail(message: impl Into<String>) -> Finding {
    finding(Level::Fail, message)
}

/// All findings.
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let checks = [
        ("kubernetes", vec![kubernetes(facts)]),
        ("crd", vec![definition(facts)]),
        ("operator", vec![operator(facts)]),
        ("leader", vec![leader(facts)]),
        ("webhook", vec![webhook(facts)]),
        ("certificate", certificate(facts).into_iter().collect()),
        ("injection", vec![canary(facts)]),
        ("rights", rights(facts)),
        (
            "versions",
            vec![judge_pools::of_versions(facts, operator_version(facts))],
        ),
        ("pools", judge_pools::of_pools(facts)),
    ];
    checks
        .into_iter()
        .flat_map(|(check, found)| found.into_iter().map(move |f| Finding { check, ..f }))
        .collect()
}

fn kubernetes(facts: &Facts) -> Finding {
    match &facts.kubernetes {
        Err(why) => fail(format!("the API server does not answer: {why}")),
        Ok(minor) if *minor < KUBERNETES_MIN => fail(format!(
            "Kubernetes 1.{minor} is too old: injection needs 1.{KUBERNETES_MIN} or newer; upgrade the cluster"
        )),
        Ok(minor) => ok(format!("Kubernetes 1.{minor}")),
    }
}

fn definition(facts: &Facts) -> Finding {
    let stored = match &facts.crd {
        Err(why) => return unknown(why),
        Ok(None) => {
            return fail(format!(
                "there is no CustomResourceDefinition {CRD}: install the chart, or apply the file of the release with CRDs"
            ));
        }
        Ok(Some(stored)) => stored,
    };
    let conditions = stored.status.as_ref().and_then(|s| s.conditions.as_ref());
    let not_established = conditions
        .into_iter()
        .flatten()
        .find(|c| c.type_ == "Established" && c.status != "True");
    if let Some(condition) = not_established {
        let message = condition.message.clone().unwrap_or_default();
        return fail(format!("the API server does not serve it: {message}"));
    }
    let (mine, theirs) = (fields(&crd()), fields(stored));
    let named = |set: BTreeSet<&String>| {
        let names: Vec<_> = set.iter().take(NAMED).map(|s| s.as_str()).collect();
        names.join(", ")
    };
    let missing: BTreeSet<_> = mine.difference(&theirs).collect();
    let new: BTreeSet<_> = theirs.difference(&mine).collect();
    let version = env!("CARGO_PKG_VERSION");
    if !missing.is_empty() {
        // An older operator does not need the fields of a newer plugin.
        let of_operator = operator_version(facts).is_none_or(|v| v == version);
        let level = if of_operator {
            Level::Fail
        } else {
            Level::Warn
        };
        return finding(
            level,
            format!(
                "the CRD is older than version {version} and lacks {} fields, such as {}; helm upgrades it with crds.enabled=true, otherwise apply the CRDs of the release",
                missing.len(),
                named(missing)
            ),
        );
    }
    if !new.is_empty() {
        return warn(format!(
            "the CRD is newer than this plugin ({version}) and has {} fields more, such as {}; install the plugin of the operator's version",
            new.len(),
            named(new)
        ));
    }
    ok(format!("it has the fields of version {version}"))
}

/// Paths of all fields of all versions.
fn fields(crd: &CustomResourceDefinition) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for version in &crd.spec.versions {
        let schema = version.schema.as_ref();
        if let Some(root) = schema.and_then(|s| s.open_api_v3_schema.as_ref()) {
            collect(&version.name, root, &mut paths);
        }
    }
    paths
}

fn collect(at: &str, node: &JSONSchemaProps, paths: &mut BTreeSet<String>) {
    for (name, child) in node.properties.iter().flatten() {
        let path = format!("{at}.{name}");
        collect(&path, child, paths);
        paths.insert(path);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &node.items {
        collect(&format!("{at}[]"), items, paths);
    }
}

/// Whether all containers of the pod are ready, or why not.
fn readiness(pod: &Pod) -> Result<(), String> {
    let status = pod.status.clone().unwrap_or_default();
    let mut conditions = status.conditions.into_iter().flatten();
    if conditions.any(|c| c.type_ == "Ready" && c.status == "True") {
        return Ok(());
    }
    let states = status.container_statuses.into_iter().flatten();
    let waiting = states
        .filter_map(|c| c.state?.waiting?.reason)
        .next()
        .or(status.reason)
        .unwrap_or_else(|| "its readiness probe fails; GET /readyz names the reason".to_owned());
    Err(waiting)
}

fn operator(facts: &Facts) -> Finding {
    let namespace = &facts.namespace;
    let pods = match &facts.operator {
        Err(why) => return unknown(why),
        Ok(pods) => pods,
    };
    let bad: Vec<_> = pods
        .iter()
        .filter_map(|pod| Some(format!("{} ({})", pod.name_any(), readiness(pod).err()?)))
        .collect();
    let ready = pods.len() - bad.len();
    let logs = "see: kubectl kvcachepool logs --operator";
    match (ready, bad.is_empty()) {
        (0, true) => fail(format!(
            "there is no pod of the operator in namespace {namespace}; install the chart, or name its namespace with --operator-namespace"
        )),
        (0, false) => fail(format!(
            "no pod of the operator is ready: {}; {logs}",
            bad.join(", ")
        )),
        (_, false) => warn(format!(
            "{ready} of {} pods of the operator are ready, not {}; {logs}",
            pods.len(),
            bad.join(", ")
        )),
        (_, true) => ok(format!("{ready} pods are ready in namespace {namespace}")),
    }
}

fn leader(facts: &Facts) -> Finding {
    let spec = match &facts.lease {
        Err(why) => return unknown(why),
        Ok(lease) => lease.as_ref().and_then(|l| l.spec.clone()),
    };
    let spec = spec.unwrap_or_default();
    let holder = spec.holder_identity.unwrap_or_default();
    let name = holder.split('_').next().unwrap_or_default();
    let lasts = i64::from(spec.lease_duration_seconds.unwrap_or(0));
    let age = spec
        .renew_time
        .map_or(i64::MAX, |t| facts.now.duration_since(t.0).as_secs());
    let none = "no replica reconciles pools: their objects and statuses do not change";
    if holder.is_empty() {
        return fail(format!(
            "Lease {LEASE} has no holder, so {none}; check the operator's pods"
        ));
    }
    if age > lasts.saturating_mul(2) {
        return fail(format!(
            "{name} has not renewed Lease {LEASE} for {age} s, so {none}; check the operator's pods and their connection to the API server"
        ));
    }
    ok(format!("{name} leads"))
}

fn webhook(facts: &Facts) -> Finding {
    let found = match &facts.webhook {
        Err(why) => return unknown(why),
        Ok(found) => found,
    };
    let entries = found.as_ref().and_then(|f| f.webhooks.as_ref());
    let Some(entries) = entries.filter(|entries| !entries.is_empty()) else {
        return fail(format!(
            "there is no MutatingWebhookConfiguration {WEBHOOK} with entries, so no pod gets a sidecar; install the chart with its webhook"
        ));
    };
    let blocking: Vec<_> = entries
        .iter()
        .filter(|e| e.failure_policy.as_deref() == Some("Fail"))
        .map(|e| e.name.as_str())
        .collect();
    match blocking.is_empty() {
        true => ok(format!("{WEBHOOK} has {} entries", entries.len())),
        false => warn(format!(
            "{} has failurePolicy Fail: no labelled pod starts while the operator is down; restore Ignore",
            blocking.join(", ")
        )),
    }
}

/// The worst of all entries. `None` if there are none.
fn certificate(facts: &Facts) -> Option<Finding> {
    let found = facts.webhook.as_ref().ok()?.as_ref()?;
    let entries = found.webhooks.iter().flatten();
    let bundles = entries.map(|entry| {
        let bundle = entry.client_config.ca_bundle.as_ref();
        let pem = bundle.map(|b| String::from_utf8_lossy(&b.0).into_owned());
        bundle_finding(&entry.name, pem.as_deref().unwrap_or_default(), facts)
    });
    bundles.max_by_key(|f| f.level)
}

fn bundle_finding(entry: &str, pem: &str, facts: &Facts) -> Finding {
    let advice = "check the operator's log, or cert-manager's if it owns the certificate";
    let Some((count, ends)) = last_expiry(pem) else {
        return fail(format!(
            "the caBundle of {entry} has no certificate, so the API server does not call the webhook; {advice}"
        ));
    };
    let now = facts.now.as_second().unsigned_abs();
    let days = ends.saturating_sub(now) / 86_400;
    match ends {
        _ if ends <= now => fail(format!(
            "the caBundle of {entry} has expired, so the API server does not call the webhook; {advice}"
        )),
        _ if ends - now < EXPIRES_SOON_S => warn(format!(
            "the caBundle of {entry} expires in {days} days and was not renewed; {advice}"
        )),
        _ => ok(format!(
            "the caBundle has {count} certificates and is valid for {days} days"
        )),
    }
}

fn canary(facts: &Facts) -> Finding {
    match &facts.canary {
        Err(why) => unknown(why),
        Ok(pod) if injected(pod) => ok("a labelled pod that was created by dry run got a sidecar"),
        Ok(_) => fail(format!(
            "a labelled pod that was created by dry run in namespace {} got no sidecar: the API server does not reach the webhook or does not trust its certificate; check the endpoints of its Service and firewalls to port 10250 of the nodes",
            facts.namespace
        )),
    }
}

fn rights(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (right, allowed) in &facts.rights {
        let group = match right.group {
            "" => String::new(),
            group => format!(".{group}"),
        };
        let what = format!("{} {}{group}", right.verb, right.resource);
        match allowed {
            Ok(true) => {}
            Ok(false) => findings.push(warn(format!(
                "you may not {what} in this namespace, which these commands need: {}",
                right.commands
            ))),
            Err(why) => findings.push(unknown(format!("{what}: {why}"))),
        }
    }
    if findings.is_empty() {
        let message = "you have the rights that all commands need in this namespace";
        findings.push(ok(message));
    }
    findings
}

/// Version of the operator's pods. `None` if unknown, or several.
pub fn operator_version(facts: &Facts) -> Option<&str> {
    let mut versions = versions(&facts.operator).into_iter();
    let first = versions.next()?;
    versions.next().is_none().then_some(first)
}

/// Versions of the operator's pods.
pub fn versions(pods: &Fact<Vec<Pod>>) -> BTreeSet<&str> {
    let pods = pods.as_ref().map(|pods| &**pods).unwrap_or_default();
    let label = |pod| {
        let pod: &Pod = pod;
        pod.labels().get("app.kubernetes.io/version")
    };
    pods.iter().filter_map(label).map(String::as_str).collect()
}
