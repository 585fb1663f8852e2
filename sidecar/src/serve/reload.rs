//! Taking in changed config files: what can change does, what needs a restart is named, what is wrong is reported and left out.

use super::daemon::Daemon;
use crate::config_file::{ConfigFileError, Loaded};
use crate::log;
use kvcachepool_engine::config::Config as CoreConfig;
use kvcachepool_protocol::config::Config;
use kvcachepool_tiers::Kind;
use std::time::Duration;
use tracing::{info, warn};

/// How often the files' content is looked at. A SIGHUP looks at once.
pub const POLL: Duration = Duration::from_secs(1);

/// Looks at the files for ever; `again` = SIGHUP.
pub async fn watch(daemon: &Daemon, mut again: tokio::signal::unix::Signal) {
    let files = &daemon.config_files;
    let mut seen = files.fingerprint();
    loop {
        let asked = tokio::select! {
            () = tokio::time::sleep(POLL) => false,
            _ = again.recv() => true,
        };
        let now = files.fingerprint();
        // A file that is gone for a moment (a mount being swapped) changes nothing.
        if asked || (now.is_some() && now != seen) {
            seen = now;
            take(daemon);
        }
    }
}

/// Waits until the pod's file can be used; for a process that started with one that could not.
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
        shell.with_core(|core, _, _| core.configure(CoreConfig::from(&effective)));
        // All of it that a tier takes over while it is open.
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

/// The changed config cannot be used: what runs goes on.
fn refused(daemon: &Daemon, e: &ConfigFileError) {
    warn!(error = %e, "the changed config is not used");
    daemon.metrics.add("config_reloads_total", &["invalid"], 1);
    daemon.degrade(e.code(), e.to_string());
    daemon.change_config(|state| state.error = e.to_string());
}

/// Says whether the pool's file could be used; the pod's counts alone where it could not. Behind [`in_effect`], which takes all
/// earlier errors back.
pub fn pool_file(daemon: &Daemon, loaded: &Loaded) {
    if let Some(e) = &loaded.pool_refused {
        refused(daemon, e);
    }
}

/// Notes what runs from now on, and which keys of the files wait for a restart.
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

/// Keys that this version does not know: a warning and a metric, since only a managed file comes this far with any.
pub fn unknown_keys(daemon: &Daemon, loaded: &Loaded) {
    daemon.metrics.clear("config_unknown_keys");
    for key in &loaded.unknown {
        warn!(key = %key, "the config has a key that this version does not know");
        daemon.metrics.set("config_unknown_keys", &[&key.path], 1.0);
    }
}
