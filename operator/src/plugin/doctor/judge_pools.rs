//! Judges versions and pools. Pure.

use super::facts::Facts;
use super::judge::{fail, finding, ok, unknown, versions, warn};
use super::{Finding, Level};
use crate::api::KVCachePool;
use crate::status::{ACCEPTED, READY, condition};
use kube::ResourceExt;
use std::collections::BTreeMap;

/// Conditions besides Ready and Accepted say more about the same cause.
const UNKNOWN: &str = "Unknown";

pub fn of_pools(facts: &Facts) -> Vec<Finding> {
    let pools = match &facts.pools {
        Err(why) => return vec![unknown(why)],
        Ok(pools) => pools,
    };
    let unreadable = pools.broken.iter();
    let unreadable = unreadable.map(|(name, error)| {
        fail(format!(
            "pool {name} cannot be read by this plugin: {error}"
        ))
    });
    let mut findings: Vec<_> = unreadable
        .chain(pools.pools.iter().flat_map(of_pool))
        .collect();
    if findings.is_empty() {
        findings.push(ok("there are no pools; -A checks those of all namespaces"));
    }
    findings
}

pub fn of_versions(facts: &Facts, operator: Option<&str>) -> Finding {
    let plugin = env!("CARGO_PKG_VERSION");
    let Some(operator) = operator else {
        let all: Vec<_> = versions(&facts.operator).into_iter().collect();
        return match all.is_empty() {
            true => unknown(
                "the version of the operator is unknown: its pods cannot be read, or have no label app.kubernetes.io/version",
            ),
            false => warn(format!(
                "the operator runs in versions {}: wait for its rollout, or see why it does not proceed",
                all.join(" and ")
            )),
        };
    };
    let mut sidecars: BTreeMap<&str, i64> = BTreeMap::new();
    let pools = facts.pools.as_ref().map(|p| &*p.pools).unwrap_or_default();
    for version in pools.iter().filter_map(|p| p.status.as_ref()) {
        for version in &version.versions {
            *sidecars.entry(&version.version).or_default() += version.pods;
        }
    }
    let unsupported: Vec<_> = sidecars
        .iter()
        .filter(|(version, _)| !supported(operator, version))
        .map(|(version, pods)| format!("{version} ({pods} pods)"))
        .collect();
    if !unsupported.is_empty() {
        return fail(format!(
            "operator {operator} supports sidecars of its own and the previous minor version, not {}; restart these pods",
            unsupported.join(", ")
        ));
    }
    let older: Vec<_> = sidecars
        .iter()
        .filter(|(version, _)| **version != operator)
        .map(|(version, pods)| format!("{version} ({pods} pods)"))
        .collect();
    if !older.is_empty() {
        return warn(format!(
            "operator {operator}, and sidecars of version {}: they are updated when their pods restart, or by updateStrategy InPlace",
            older.join(", ")
        ));
    }
    match operator == plugin {
        true => ok(format!(
            "operator, sidecars and plugin have version {plugin}"
        )),
        false => warn(format!(
            "operator {operator}, plugin {plugin}: install the plugin of the operator's version"
        )),
    }
}

/// Whether an operator supports a sidecar: those of its own and the previous minor version.
pub fn supported(operator: &str, sidecar: &str) -> bool {
    let minor = |version: &str| {
        let mut parts = version.split('.');
        let major: u64 = parts.next()?.parse().ok()?;
        let minor: u64 = parts.next()?.parse().ok()?;
        Some((major, minor))
    };
    match (minor(operator), minor(sidecar)) {
        (Some(o), Some(s)) => o.0 == s.0 && (s.1 == o.1 || s.1 + 1 == o.1),
        // Builds without a number cannot be compared.
        _ => true,
    }
}

fn of_pool(pool: &KVCachePool) -> Vec<Finding> {
    let name = format!(
        "{}/{}",
        pool.namespace().unwrap_or_default(),
        pool.name_any()
    );
    let Some(status) = &pool.status else {
        return vec![fail(format!(
            "pool {name} has no status: no operator reconciles it; check that one runs and watches this namespace"
        ))];
    };
    let mut findings = Vec::new();
    let conditions = &status.conditions;
    let of = |type_| condition(conditions, type_);
    let why = of(ACCEPTED).filter(|c| c.status == "False");
    // The cause, instead of Ready, which only repeats it.
    let causes: Vec<_> = match why {
        Some(accepted) => vec![accepted],
        None => conditions
            .iter()
            .filter(|c| c.type_ != READY && c.status == "False")
            .collect(),
    };
    let ready = of(READY).map_or(UNKNOWN, |c| &c.status);
    for cause in &causes {
        // InjectionDisabled is what the user asked for, and does not make a pool unready.
        let level = match ready {
            "True" => Level::Ok,
            _ => Level::Fail,
        };
        findings.push(finding(
            level,
            format!(
                "pool {name}: {} is False, {}: {}",
                cause.type_, cause.reason, cause.message
            ),
        ));
    }
    if causes.is_empty() {
        findings.push(match of(READY) {
            Some(c) if c.status == "True" => ok(format!("pool {name} is ready")),
            Some(c) => warn(format!(
                "pool {name}: Ready is {}, {}: {}",
                c.status, c.reason, c.message
            )),
            None => warn(format!("pool {name} has no condition Ready yet")),
        });
    }
    if status.pods.missed > 0 {
        findings.push(warn(format!(
            "pool {name}: {} pods were created while the webhook was not called and have no cache; create them again, or set injection.onMissed: Evict",
            status.pods.missed
        )));
    }
    for skipped in &status.skipped {
        findings.push(warn(format!(
            "pool {name}: {} pods have no sidecar, {}; see: kubectl kvcachepool explain pod/{} -n {}",
            skipped.count,
            skipped.reason,
            skipped.example_pod,
            pool.namespace().unwrap_or_default()
        )));
    }
    findings
}
