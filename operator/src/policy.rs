//! The cluster's policy: what the administrators of the operator allow every pool.

use crate::api::{GpuAccess, KVCachePool, Problem, Reason, Size};
use crate::desired::{job, redis};
use crate::inject;
use crate::names;
use kube::ResourceExt;
use kvcachepool_protocol::config::ByteSize;

/// Limits of all pools. By default everything is allowed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Largest memory tier of a pod.
    pub max_memory: Option<ByteSize>,
    /// Allowed images of sidecars, managed servers and their exporters, besides the defaults. A `*` at the end matches any rest. Empty = all.
    pub images: Vec<String>,
    /// Allowed values of `sidecar.gpuAccess`, besides `None`. Empty = all.
    pub gpu_access: Vec<GpuAccess>,
    /// Allowed service accounts of the Job that purges a pool's objects, besides `default`. Empty = all.
    pub service_accounts: Vec<String>,
}

impl Policy {
    /// The violations of a pool.
    pub fn violations(&self, pool: &KVCachePool) -> Vec<Problem> {
        let servers = redis::managed(pool);
        let exporter = servers.and_then(|servers| servers.exporter.as_ref());
        let problems = [
            self.memory(pool),
            self.image("spec.sidecar.image", &pool.spec.sidecar.image),
            servers
                .and_then(|servers| self.image("spec.shared.redis.managed.image", &servers.image)),
            exporter.and_then(|exporter| {
                self.image("spec.shared.redis.managed.exporter.image", &exporter.image)
            }),
            self.gpu(pool),
            self.gpu_variable(pool),
            self.account(pool),
        ];
        problems.into_iter().flatten().collect()
    }

    fn memory(&self, pool: &KVCachePool) -> Option<Problem> {
        let most = self.max_memory?;
        let memory = &pool.spec.local.memory.per_pod;
        let beyond = memory.bytes().is_ok_and(|bytes| bytes.0 > most.0);
        let most = Size::from(most);
        beyond.then(|| {
            violation(
                "spec.local.memory.perPod",
                format!("{memory} is more than {most}, the most that the cluster's policy allows (maxMemoryPerPod)"),
            )
        })
    }

    fn image(&self, field: &str, image: &str) -> Option<Problem> {
        let matches = |allowed: &String| match allowed.strip_suffix('*') {
            Some(start) => image.starts_with(start),
            None => image == allowed,
        };
        let allowed = self.images.is_empty() || image.is_empty() || self.images.iter().any(matches);
        (!allowed).then(|| {
            let images = self.images.join(", ");
            violation(
                field,
                format!("the cluster's policy does not allow {image} (images); remove the field, or use one of {images}"),
            )
        })
    }

    fn gpu(&self, pool: &KVCachePool) -> Option<Problem> {
        let access = pool.spec.sidecar.gpu_access;
        let allowed = self.gpu_access.is_empty()
            || access == GpuAccess::None
            || self.gpu_access.contains(&access);
        (!allowed).then(|| {
            violation(
                "spec.sidecar.gpuAccess",
                format!("the cluster's policy does not allow {access:?} (gpuAccess)"),
            )
        })
    }

    /// The variable does what `gpuAccess: VisibleDevices` does.
    fn gpu_variable(&self, pool: &KVCachePool) -> Option<Problem> {
        let allowed = self.gpu_access.is_empty()
            || self.gpu_access.contains(&GpuAccess::VisibleDevices)
            || !inject::names_gpus(&pool.spec.sidecar.env);
        (!allowed).then(|| {
            violation(
                "spec.sidecar.env",
                "the cluster's policy does not allow NVIDIA_VISIBLE_DEVICES (gpuAccess)".to_owned(),
            )
        })
    }

    fn account(&self, pool: &KVCachePool) -> Option<Problem> {
        let account = pool.annotations().get(names::PURGE_ACCOUNT)?;
        let allowed = self.service_accounts.is_empty()
            || !job::purges(pool)
            || account == "default"
            || self.service_accounts.contains(account);
        (!allowed).then(|| {
            violation(
                "metadata.annotations",
                format!(
                    "the cluster's policy does not allow the service account {account} of {} (serviceAccounts)",
                    names::PURGE_ACCOUNT
                ),
            )
        })
    }
}

fn violation(field: &str, message: String) -> Problem {
    Problem {
        reason: Reason::PolicyViolated,
        field: field.to_owned(),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::pool;
    use serde_json::{Value, json};

    fn fields(policy: &Policy, spec: Value) -> Vec<String> {
        let problems = policy.violations(&pool(spec));
        problems.into_iter().map(|p| p.field).collect()
    }

    #[test]
    fn everything_is_allowed_by_default() {
        let spec = json!({"sidecar": {"image": "any", "gpuAccess": "VisibleDevices"}});
        assert_eq!(fields(&Policy::default(), spec), [""; 0]);
    }

    #[test]
    fn memory_is_limited_inclusively() {
        let policy = Policy {
            max_memory: Some(ByteSize(64 << 30)),
            ..Policy::default()
        };
        assert_eq!(fields(&policy, json!({})), [""; 0], "64Gi");
        let more = json!({"local": {"memory": {"perPod": "65Gi"}}});
        assert_eq!(fields(&policy, more), ["spec.local.memory.perPod"]);
    }

    #[test]
    fn access_to_gpus_by_a_variable_is_limited_too() {
        let of = |gpu_access, value| {
            let policy = Policy {
                gpu_access,
                ..Policy::default()
            };
            let variable = json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": value});
            fields(&policy, json!({"sidecar": {"env": [variable]}}))
        };
        assert_eq!(of(vec![], "all"), [""; 0]);
        assert_eq!(of(vec![GpuAccess::VisibleDevices], "all"), [""; 0]);
        assert_eq!(of(vec![GpuAccess::ResourceClaim], "void"), [""; 0]);
        assert_eq!(
            of(vec![GpuAccess::ResourceClaim], "all"),
            ["spec.sidecar.env"]
        );
    }

    #[test]
    fn images_are_allowed_by_name_or_by_prefix() {
        let policy = Policy {
            images: vec!["registry.corp/*".to_owned(), "exact:1".to_owned()],
            ..Policy::default()
        };
        let sidecar = |image: &str| fields(&policy, json!({"sidecar": {"image": image}}));
        for image in ["", "registry.corp/a/b@sha256:00", "exact:1"] {
            assert_eq!(sidecar(image), [""; 0], "{image}");
        }
        for image in [
            "exact:12",
            "registry.corp.evil/a",
            "docker.io/registry.corp/a",
        ] {
            assert_eq!(sidecar(image), ["spec.sidecar.image"], "{image}");
        }
        let managed =
            json!({"memoryPerShard": "1Gi", "image": "other", "exporter": {"image": "other"}});
        assert_eq!(
            fields(&policy, json!({"shared": {"redis": {"managed": managed}}})),
            [
                "spec.shared.redis.managed.image",
                "spec.shared.redis.managed.exporter.image"
            ]
        );
    }

    #[test]
    fn gpu_access_and_service_accounts_are_limited_to_the_lists() {
        let policy = Policy {
            gpu_access: vec![GpuAccess::ResourceClaim],
            service_accounts: vec!["cleaner".to_owned()],
            ..Policy::default()
        };
        let access = |access: &str| fields(&policy, json!({"sidecar": {"gpuAccess": access}}));
        assert_eq!(access("None"), [""; 0]);
        assert_eq!(access("ResourceClaim"), [""; 0]);
        assert_eq!(access("VisibleDevices"), ["spec.sidecar.gpuAccess"]);
        let s3 = json!({"deletionPolicy": "Delete", "shared": {"s3": {"bucket": "kv-cache"}}});
        let with = |account: &str, spec: &Value| {
            let mut pool = pool(spec.clone());
            let annotations = pool.annotations_mut();
            annotations.insert(names::PURGE_ACCOUNT.to_owned(), account.to_owned());
            policy.violations(&pool).len()
        };
        for (account, violations) in [("default", 0), ("cleaner", 0), ("admin", 1)] {
            assert_eq!(with(account, &s3), violations, "{account}");
        }
        assert_eq!(with("admin", &json!({})), 0, "no Job runs");
    }
}
