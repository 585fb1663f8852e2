//! State of the engine process that all its parts share: config, reasons for a degraded state, and the shell once it exists.

use super::shell::Shell;
use crate::admin::metrics::{self, Metrics};
use crate::config_file::Files;
use crate::supervisor::messages::Boot;
use kvcachepool_engine::Found;
use kvcachepool_engine::sessions::AdminError;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::status::{PoolName, Reason, State, Status};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The config in effect compared with the config files.
#[derive(Debug, Clone, Default)]
pub struct ConfigState {
    pub effective: Config,
    /// Changed keys that take effect only after a restart.
    pub restart_needed: Vec<&'static str>,
    /// Why the changed files are not in use; empty when they are.
    pub error: String,
}

/// One per engine process.
pub struct Daemon {
    /// Paths of the config files.
    pub config_files: Files,
    pub metrics: Arc<Metrics>,
    /// The supervisor's boot message.
    pub boot: Boot,
    pub started: Instant,
    /// A random number per boot.
    pub boot_token: u64,
    /// The socket server, once it runs.
    pub shell: OnceLock<Arc<Shell>>,
    /// Boots without health before this one.
    pub unhealthy_boots: OnceLock<u32>,
    config: Mutex<ConfigState>,
    reasons: Mutex<BTreeMap<&'static str, String>>,
    draining: AtomicBool,
}

impl Daemon {
    pub fn new(config_files: Files, config: Config, boot: Boot, started: Instant) -> Self {
        let metrics = Arc::new(metrics::registry());
        metrics.set("build_info", &[VERSION, &PROTOCOL_VERSION.to_string()], 1.0);
        metrics.add("engine_starts_total", &[], boot.starts);
        Self {
            config_files,
            metrics,
            boot,
            started,
            boot_token: random_token(),
            shell: OnceLock::new(),
            unhealthy_boots: OnceLock::new(),
            config: Mutex::new(ConfigState {
                effective: config,
                ..ConfigState::default()
            }),
            reasons: Mutex::default(),
            draining: AtomicBool::new(false),
        }
    }

    pub fn config(&self) -> ConfigState {
        self.config.lock().clone()
    }

    pub fn change_config(&self, change: impl FnOnce(&mut ConfigState)) {
        change(&mut self.config.lock());
    }

    /// Reports a reason why less is served than configured.
    pub fn degrade(&self, code: &'static str, message: String) {
        tracing::error!(reason = code, error = %message, "degraded");
        self.reasons.lock().insert(code, message);
    }

    pub fn recovered(&self, code: &'static str) {
        if self.reasons.lock().remove(code).is_some() {
            tracing::info!(reason = code, "no longer degraded");
        }
    }

    /// Marks the process as draining, after SIGTERM.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Updates the metrics whose values are kept elsewhere.
    pub fn collect_metrics(&self) {
        let (state, reasons) = self.health();
        let metrics = &self.metrics;
        metrics.set("engine_up", &[], 1.0);
        let uptime_s = self.started.elapsed().as_secs();
        metrics.set("engine_uptime_seconds", &[], uptime_s as f64);
        metrics.set("ready", &[], f64::from(u8::from(serves(state))));
        metrics.clear("degraded");
        for reason in &reasons {
            metrics.set("degraded", &[&reason.code], 1.0);
        }
        if let Some(before) = self.unhealthy_boots.get() {
            metrics.set("boots_without_health", &[], f64::from(*before));
        }
        if let Some(shell) = self.shell.get() {
            metrics.clear("slots");
            metrics.clear("sessions");
            metrics.clear("worker_transfer");
            metrics.clear("tier_down");
            metrics.clear("tier_degraded");
            metrics.clear("tier_server_up");
            shell.with_core(|core, _, _| {
                core.metrics(&mut |name, labels, value| metrics.take(name, labels, value));
                core.histograms(&mut |name, durations| {
                    let (counts, total) = durations.totals();
                    metrics.take_seconds(name, &[], counts, total);
                });
            });
            if let Some(tiers) = &shell.tiers {
                tiers.metrics(metrics);
                let known: Vec<_> = shell.with_core(|core, _, _| core.lower_tiers().collect());
                for mut tier in known {
                    tiers.fill(&mut tier);
                    if tier.state == State::Degraded {
                        metrics.set("tier_degraded", &[&tier.name, &tier.reason], 1.0);
                    }
                }
            }
            metrics.set("connections", &[], shell.connection_count() as f64);
            let (urgent, background) = shell.digests_waiting();
            metrics.set(
                "memory_locked_bytes",
                &[],
                kvcachepool_gpu::cuda::locked_bytes() as f64,
            );
            metrics.set("digests_waiting", &["urgent"], urgent as f64);
            metrics.set("digests_waiting", &["background"], background as f64);
        }
    }

    /// Reports which of these chunk keys (hex) exist.
    pub fn lookup(&self, keys: &[String]) -> Result<Vec<serde_json::Value>, AdminError> {
        let found = match self.shell.get() {
            Some(shell) => shell.with_core(|core, _, _| core.lookup(keys))?,
            None => {
                return Err(AdminError::NoArena(
                    "the sidecar does not serve yet; its status has the reason".into(),
                ));
            }
        };
        Ok(found.iter().map(object).collect())
    }

    /// Overall state, and the reasons if it is not ready.
    pub fn health(&self) -> (State, Vec<Reason>) {
        let core = match self.shell.get() {
            Some(shell) => shell.with_core(|core, _, _| core.health()),
            None => (State::Off, Vec::new()),
        };
        self.health_with(core)
    }

    /// Adds the reasons that only this process knows to those of the core.
    fn health_with(&self, (mut state, mut reasons): (State, Vec<Reason>)) -> (State, Vec<Reason>) {
        let own = self.reasons.lock();
        reasons.extend(own.iter().map(|(code, message)| Reason {
            code: (*code).into(),
            message: message.clone(),
        }));
        if !own.is_empty() && state == State::Ready {
            state = State::Degraded;
        }
        if self.draining.load(Ordering::Relaxed) {
            state = State::Draining;
        }
        (state, reasons)
    }

    /// Whether /readyz returns 200.
    pub fn is_ready(&self) -> bool {
        serves(self.health().0)
    }

    pub fn status(&self) -> Status {
        let mut status = match self.shell.get() {
            Some(shell) => shell.with_core(|core, now, _| core.status(now)),
            None => Status {
                state: State::Off,
                ..Status::default()
            },
        };
        if let Some(tiers) = self.shell.get().and_then(|shell| shell.tiers.as_ref()) {
            status.tiers.iter_mut().for_each(|tier| tiers.fill(tier));
        }
        status.memory.locked_bytes = kvcachepool_gpu::cuda::locked_bytes();
        let config = self.config();
        status.version = VERSION.into();
        status.protocol = PROTOCOL_VERSION;
        status.boot = self.boot_token;
        status.uptime_s = self.started.elapsed().as_secs();
        status.container_uptime_s = self.boot.container_uptime_s + status.uptime_s;
        status.engine_starts = self.boot.starts;
        status.pool = PoolName {
            name: config.effective.pool.name,
            namespace: config.effective.pool.namespace,
        };
        status.config_generation = config.effective.pool.generation;
        status.restart_needed = config.restart_needed.iter().map(|k| (*k).into()).collect();
        status.config_error = config.error;
        (status.state, status.reasons) = self.health_with((status.state, status.reasons));
        status
    }
}

/// Description of one chunk in the `lookup` reply.
fn object(found: &Found) -> serde_json::Value {
    serde_json::json!({
        "key": found.key.hex(),
        "first_token": found.first_token,
        "tokens": found.tokens,
        "readable": found.readable,
        "bytes": found.bytes,
        "readers": found.readers,
        "pinned": found.pinned,
        "expires_unix_s": found.expires_unix_s,
    })
}

/// Whether connectors are served in this state, possibly in degraded form.
pub fn serves(state: State) -> bool {
    matches!(state, State::Ready | State::Degraded)
}

/// A number that differs from that of any other boot.
fn random_token() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}
