//! What injection needs to know of a pool.

use super::{Disk, Files, GpuAccess};
use k8s_openapi::api::core::v1::{EnvVar, ResourceRequirements};
use kvcachepool_protocol::config::Config;

/// Whether pods are injected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// They are.
    #[default]
    Enabled,
    /// They are refused by name.
    Disabled,
}

/// What becomes of a pod whose vLLM has a connector between prefill and decode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ExistingConnector {
    /// It is refused by name.
    #[default]
    Refuse,
    /// Ours goes beside it.
    Compose,
}

impl ExistingConnector {
    /// As `kvcachepool-sidecar init` takes it.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Compose => "compose",
        }
    }
}

/// A pool as injection sees it: nothing in here has to be looked up.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Name of the pool.
    pub pool: String,
    /// Namespace of the pool and of its pods.
    pub namespace: String,
    /// `metadata.generation` of the pool.
    pub generation: i64,
    /// Whether pods are injected.
    pub mode: Mode,
    /// Image of the sidecar.
    pub image: String,
    /// When the image is pulled; `None`: Kubernetes' own rule.
    pub image_pull_policy: Option<String>,
    /// Names of Secrets with which it is pulled.
    pub image_pull_secrets: Vec<String>,
    /// Name of vLLM's container, where the pod does not say it.
    pub container: Option<String>,
    /// What becomes of a pod whose vLLM has a connector already.
    pub existing_connector: ExistingConnector,
    /// Bytes of the memory tier, where the pod does not say it.
    pub memory_bytes: u64,
    /// Most bytes that a pod may ask for by annotation; `None`: no bound.
    pub memory_max_bytes: Option<u64>,
    /// The sidecar's config. Its memory size and generation are set from the fields here.
    pub config: Config,
    /// Where the disk tier lies; `None`: there is no such tier. Its size stands in the config.
    pub disk: Option<Disk>,
    /// Files of the tiers that pods share; the config says where they are.
    pub files: Vec<Files>,
    /// A shared tier goes by the pod's own identity in the cloud.
    pub own_identity: bool,
    /// Resources of the sidecar that the pool sets. Memory is never less than the sidecar needs.
    pub resources: ResourceRequirements,
    /// Further environment of the sidecar.
    pub env: Vec<EnvVar>,
    /// How it sees the GPUs of vLLM's container.
    pub gpu_access: GpuAccess,
}

impl Settings {
    /// A pool that says nothing but this.
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
            files: Vec::new(),
            own_identity: false,
            resources: ResourceRequirements::default(),
            env: Vec::new(),
            gpu_access: GpuAccess::default(),
        }
    }

    /// Short name of what a pod of this pool is given: pods that carry another one are outdated. What a running sidecar takes over
    /// by itself, and what a pod says itself (its memory), is not part of it; nor is the operator's version, which pods outlive. So keys
    /// that are as they are anyway are left out: a newer operator knows more of them.
    pub fn hash(&self) -> String {
        let (defaults, servers) = (Config::default(), &self.config.redis);
        let mut live = defaults.clone();
        live.redis.auth.clone_from(&servers.auth);
        live.redis.ca.clone_from(&servers.ca);
        if !servers.urls.is_empty() {
            // Which there are is taken over; that there are some is not.
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
        // Pods of pools that never said anything of it are not outdated by its being known.
        if self.gpu_access != GpuAccess::None {
            parts.push(self.gpu_access.name().into());
        }
        let parts: String = parts.iter().map(serde_json::Value::to_string).collect();
        blake3::hash(parts.as_bytes()).to_hex()[..16].to_string()
    }
}
