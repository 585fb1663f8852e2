//! `pause` and `resume`: whether new pods of a pool get a sidecar.

use super::read::{Cluster, failed};
use crate::api::{KVCachePool, Mode};
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::json;

/// Field manager of changes by the plugin.
pub const MANAGER: &str = "kubectl-kvcachepool";

/// Injection of a pool after the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub pool: String,
    pub mode: Mode,
    /// Whether the command changed the mode.
    pub changed: bool,
    /// Owners for which the operator itself has paused injection, as `KIND/NAME: REASON`. Empty if the mode is Disabled.
    pub paused_by_operator: Vec<String>,
}

/// Sets `spec.injection.mode` of a pool.
pub async fn set(
    cluster: &Cluster,
    name: &str,
    mode: Mode,
) -> Result<Report, Box<dyn std::error::Error>> {
    let pool = cluster.one(name).await?;
    let changed = pool.spec.injection.mode != mode;
    if changed {
        let what = format!("KVCachePool {name}: it cannot be patched");
        let api: Api<DeserializeGuard<KVCachePool>> = cluster.api();
        let patch = Patch::Merge(json!({"spec": {"injection": {"mode": mode}}}));
        let params = PatchParams::apply(MANAGER);
        api.patch(name, &params, &patch)
            .await
            .map_err(failed(&what))?;
    }
    Ok(report(&pool, mode, changed))
}

fn report(pool: &KVCachePool, mode: Mode, changed: bool) -> Report {
    let status = pool.status.as_ref();
    let paused = status.and_then(|s| s.injection_paused.as_ref());
    let owners = paused.map(|p| &*p.owners).unwrap_or_default();
    let owners = owners.iter().filter(|_| mode == Mode::Enabled);
    Report {
        pool: pool.name_any(),
        mode,
        changed,
        paused_by_operator: owners
            .map(|o| format!("{}/{}: {}", o.kind, o.name, o.reason))
            .collect(),
    }
}

impl Report {
    /// The report as text.
    pub fn text(&self) -> String {
        let pool = &self.pool;
        let already = if self.changed { "" } else { "already " };
        let mut text = match self.mode {
            Mode::Disabled => format!(
                "injection of pool {pool} is {already}paused: new pods get no sidecar, running sidecars stay\n"
            ),
            Mode::Enabled => format!(
                "injection of pool {pool} is {already}enabled: new pods get a sidecar; pods without one stay as they are until they are created again\n"
            ),
        };
        for owner in &self.paused_by_operator {
            text.push_str(&format!("the operator has paused injection for {owner}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_of_the_operator_is_told_when_injection_resumes() {
        let paused = json!({"since": "2026-11-01T00:00:00Z", "owners": [{"kind": "ReplicaSet", "name": "web", "reason": "PodsRefused"}]});
        let pool: KVCachePool = serde_json::from_value(json!({
            "apiVersion": "kvcachepool.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": "demo"},
            "spec": {"local": {"memory": {"perPod": "64Gi"}}},
            "status": {"pods": {}, "injectionPaused": paused},
        }))
        .unwrap();
        let resumed = report(&pool, Mode::Enabled, true);
        assert_eq!(resumed.paused_by_operator, ["ReplicaSet/web: PodsRefused"]);
        assert!(
            resumed
                .text()
                .starts_with("injection of pool demo is enabled")
        );
        assert!(
            resumed
                .text()
                .ends_with("for ReplicaSet/web: PodsRefused\n")
        );
        let text = report(&pool, Mode::Disabled, false).text();
        assert!(
            text.starts_with("injection of pool demo is already paused"),
            "{text}"
        );
        assert!(!text.contains("ReplicaSet"));
    }
}
