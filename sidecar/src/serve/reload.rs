//! Applies changed config files. Keys that need a restart are reported, and invalid files are reported and not used.

use super::daemon::Daemon;
use crate::config_file::{ConfigFileError, Loaded};
use crate::log;
use kvcachepool_engine::config::Config as CoreConfig;
use kvcachepool_protocol::config::Config;
use kvcachepool_tiers::Kind;
use std::time::Duration;
use tracing::{info, warn};

/// Interval of the check of the files' content. SIGHUP checks at once.
pub const POLL: Duration = Duration::from_secs(1);

const MEMORY_SIZE: &str = "memory.size";

/// Checks the files without end; `again` is SIGHUP.
pub async fn watch(daemon: &Daemon, mut again: tokio::signal::unix::Signal) {
    let files = &daemon.config_files;
    let mut seen = files.fingerprint();
    loop {
        let asked = tokio::select! {
            () = tokio::time::sleep(POLL) => false,
            _ = again.recv() => true,
        };
        let now = files.fingerprint();
        // A file that is missing for a moment (a mount being swapped) changes nothing.
        if asked || (now.is_some() && now != seen) {
            seen = now;
            take(daemon);
        }
    }
}

/// Waits until the pod's file is valid, for a process that started with an invalid one.
pub async fn usable(daemon: &Daemon) {
    while daemon.config_files.load().is_err() {
        tokio::time::sleep(POLL).await;
    }
}

fn take(daemon: &Daemon) {
    let loaded = match daemon.config_files.load() {
        Ok(loaded) => loaded,
        Err(e) => return refused(daemon, &e),
    };
    let running = daemon.config().effective;
    let mut changes = running.changes(&loaded.config);
    let mut effective = running.with_live_from(&loaded.config);
    log::set_level(effective.log.level);
    if let Some(shell) = daemon.shell.get() {
        let refused = shell.with_core(|core, _, _| core.configure(CoreConfig::from(&effective)));
        if refused.contains(&MEMORY_SIZE) {
            effective.memory.size = running.memory.size;
            changes.live.retain(|key| *key != MEMORY_SIZE);
            changes.restart.push(MEMORY_SIZE);
        }
        // Only keys that a tier can change while open are applied.
        if let Some(tiers) = &shell.tiers {
            let unchanged = tiers.change(&running, &effective);
            if unchanged.contains(&Kind::Redis) {
                effective.redis = running.redis;
                changes.live.retain(|key| !key.starts_with("redis."));
            }
        }
    }
    unknown_keys(daemon, &loaded);
    daemon.metrics.add("config_reloads_total", &["applied"], 1);
    info!(
        applied = changes.live.join(" "),
        restart_needed = changes.restart.join(" "),
        "config changed"
    );
    in_effect(daemon, effective, changes.restart);
    pool_file(daemon, &loaded);
}

/// Reports that the changed config is invalid; the effective config is kept.
fn refused(daemon: &Daemon, e: &ConfigFileError) {
    warn!(error = %e, "invalid new config; keeping the previous one");
    daemon.metrics.add("config_reloads_total", &["invalid"], 1);
    daemon.degrade(e.code(), e.to_string());
    daemon.change_config(|state| state.error = e.to_string());
}

/// Reports whether the pool's file is valid; otherwise only the pod's counts. Call after [`in_effect`], which clears all earlier errors.
pub fn pool_file(daemon: &Daemon, loaded: &Loaded) {
    if let Some(e) = &loaded.pool_refused {
        refused(daemon, e);
    }
}

/// Records the effective config, and the changed keys that need a restart.
pub fn in_effect(daemon: &Daemon, effective: Config, waiting: Vec<&'static str>) {
    daemon.recovered("ConfigInvalid");
    daemon.recovered("ConfigUnreadable");
    daemon.metrics.clear("config_restart_needed");
    let generation = effective.pool.generation;
    daemon
        .metrics
        .set("config_generation", &[], generation as f64);
    for key in &waiting {
        daemon.metrics.set("config_restart_needed", &[key], 1.0);
    }
    daemon.change_config(|state| {
        state.effective = effective;
        state.restart_needed = waiting;
        state.error.clear();
    });
}

/// Reports unknown keys with a warning and a metric. Only managed files get here with any.
pub fn unknown_keys(daemon: &Daemon, loaded: &Loaded) {
    daemon.metrics.clear("config_unknown_keys");
    for key in &loaded.unknown {
        warn!(key = %key, "unknown key in the config");
        daemon.metrics.set("config_unknown_keys", &[&key.path], 1.0);
    }
}
