//! The settings of a pool that injection needs.

use super::{Disk, Files};
use crate::api::{ExistingConnector, GpuAccess, Mode};
use k8s_openapi::api::core::v1::{EnvVar, ResourceRequirements};
use kvcachepool_protocol::config::Config;

impl ExistingConnector {
    /// Value of `--existing-connector` of `kvcachepool-sidecar init`.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Compose => "compose",
        }
    }
}

/// Everything that injection needs to know of a pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub pool: String,
    /// Namespace of the pool and of its pods.
    pub namespace: String,
    /// `metadata.generation` of the pool.
    pub generation: i64,
    pub mode: Mode,
    pub image: String,
    /// Pull policy of the image. `None`: Kubernetes' default.
    pub image_pull_policy: Option<String>,
    /// Names of the Secrets to pull the image with.
    pub image_pull_secrets: Vec<String>,
    /// Name of vLLM's container, unless the pod names it.
    pub container: Option<String>,
    /// What happens to a pod whose vLLM has a connector already.
    pub existing_connector: ExistingConnector,
    /// Size of the memory tier, unless the pod sets it.
    pub memory_bytes: u64,
    /// Largest size that a pod may request by annotation. `None`: no limit.
    pub memory_max_bytes: Option<u64>,
    /// The sidecar's config. Its memory size and generation are set from the fields here.
    pub config: Config,
    /// Location of the disk tier; its size is in the config. `None`: no disk tier.
    pub disk: Option<Disk>,
    /// Name of the PersistentVolumeClaim with the file system tier. `None`: no such tier.
    pub claim: Option<String>,
    /// Files of the shared tiers. The config has their paths.
    pub files: Vec<Files>,
    /// Whether a shared tier uses the pod's own identity in the cloud.
    pub own_identity: bool,
    /// Resources of the sidecar that the pool sets. Memory is never less than the sidecar needs.
    pub resources: ResourceRequirements,
    /// Additional environment variables of the sidecar.
    pub env: Vec<EnvVar>,
    /// How the sidecar gets access to the GPUs of vLLM's container.
    pub gpu_access: GpuAccess,
}

impl Settings {
    /// A pool with defaults for everything else.
    pub fn new(pool: &str, namespace: &str, image: &str, memory_bytes: u64) -> Self {
        let mut config = Config {
            managed: true,
            ..Config::default()
        };
        config.pool.name = pool.to_string();
        config.pool.namespace = namespace.to_string();
        Self {
            pool: pool.to_string(),
            namespace: namespace.to_string(),
            generation: 1,
            mode: Mode::default(),
            image: image.to_string(),
            image_pull_policy: None,
            image_pull_secrets: Vec::new(),
            container: None,
            existing_connector: ExistingConnector::default(),
            memory_bytes,
            memory_max_bytes: None,
            config,
            disk: None,
            claim: None,
            files: Vec::new(),
            own_identity: false,
            resources: ResourceRequirements::default(),
            env: Vec::new(),
            gpu_access: GpuAccess::default(),
        }
    }

    /// Hash of the settings that a pod gets. Pods with another hash are outdated. Excluded are values that a running sidecar reloads,
    /// values that a pod sets itself (its memory), and the operator's version. Default values are excluded too, because a newer operator
    /// knows more keys.
    pub fn hash(&self) -> String {
        let (defaults, servers) = (Config::default(), &self.config.redis);
        let mut live = defaults.clone();
        // The size is live for a pod whose container is resized, and part of the settings of a pod.
        live.memory.size = self.config.memory.size;
        live.redis.auth.clone_from(&servers.auth);
        live.redis.ca.clone_from(&servers.ca);
        live.redis
            .client_certificate
            .clone_from(&servers.client_certificate);
        if !servers.urls.is_empty() {
            // A sidecar reloads the list of servers, but not whether there are any.
            live.redis.urls = vec!["redis://some".into()];
        }
        let restart = self.config.with_live_from(&live).entries();
        let defaults = defaults.entries();
        let chosen = restart
            .into_iter()
            .filter(|entry| !defaults.contains(entry));
        let mut parts = vec![serde_json::json!([
            self.image,
            self.image_pull_policy,
            self.image_pull_secrets,
            self.existing_connector.flag(),
            self.memory_bytes,
            chosen.collect::<Vec<_>>(),
            self.resources,
            self.env,
            self.disk.as_ref().map(|disk| disk.volume(&self.config)),
            self.files.iter().map(Files::source).collect::<Vec<_>>(),
            self.own_identity,
        ])];
        // Pods of pools that do not set these fields must not become outdated.
        if self.gpu_access != GpuAccess::None {
            parts.push(serde_json::json!(self.gpu_access));
        }
        if let Some(claim) = &self.claim {
            parts.push(serde_json::json!({"claim": claim}));
        }
        let parts: String = parts.iter().map(serde_json::Value::to_string).collect();
        blake3::hash(parts.as_bytes()).to_hex()[..16].to_string()
    }
}
