//! Taking in a changed config file: what can change does, what needs a restart is named, what is wrong is reported and left out.

use super::daemon::Daemon;
use crate::config_file::{self, core_config};
use crate::log;
use kvcachepool_protocol::config::Config;
use std::time::Duration;
use tracing::{info, warn};

/// How often the file's content is looked at. A SIGHUP looks at once.
pub const POLL: Duration = Duration::from_secs(1);

/// Looks at the file for ever; `again` = SIGHUP.
pub async fn watch(daemon: &Daemon, mut again: tokio::signal::unix::Signal) {
    let path = daemon.config_path.as_deref();
    let mut seen = config_file::fingerprint(path);
    loop {
        let asked = tokio::select! {
            () = tokio::time::sleep(POLL) => false,
            _ = again.recv() => true,
        };
        let now = config_file::fingerprint(path);
        // A file that is gone for a moment (a mount being swapped) changes nothing.
        if asked || (now.is_some() && now != seen) {
            seen = now;
            take(daemon);
        }
    }
}

/// Waits until the file can be used; for a process that started with one that could not.
pub async fn usable(daemon: &Daemon) {
    let path = daemon.config_path.as_deref();
    while config_file::load(path).is_err() {
        tokio::time::sleep(POLL).await;
    }
}

fn take(daemon: &Daemon) {
    let loaded = match config_file::load(daemon.config_path.as_deref()) {
        Ok(loaded) => loaded,
        Err(e) => {
            warn!(error = %e, "the changed config is not used");
            daemon.metrics.add("config_reloads_total", &["invalid"], 1);
            daemon.degrade(e.code(), e.to_string());
            daemon.change_config(|state| state.error = e.to_string());
            return;
        }
    };
    daemon.recovered("ConfigInvalid");
    daemon.recovered("ConfigUnreadable");
    let running = daemon.config().effective;
    let changes = running.changes(&loaded.config);
    let effective = running.with_live_from(&loaded.config);
    log::set_level(effective.log.level);
    if let Some(shell) = daemon.shell.get() {
        shell.with_core(|core, _, _| core.configure(core_config(&effective)));
    }
    unknown_keys(daemon, &loaded);
    daemon.metrics.add("config_reloads_total", &["applied"], 1);
    info!(
        applied = changes.live.join(" "),
        restart_needed = changes.restart.join(" "),
        "config changed"
    );
    in_effect(daemon, effective, changes.restart);
}

/// Notes what runs from now on, and which keys of the file wait for a restart.
pub fn in_effect(daemon: &Daemon, effective: Config, waiting: Vec<&'static str>) {
    daemon.metrics.clear("config_restart_needed");
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
pub fn unknown_keys(daemon: &Daemon, loaded: &config_file::Loaded) {
    daemon.metrics.clear("config_unknown_keys");
    for key in &loaded.unknown {
        warn!(key = %key, "the config has a key that this version does not know");
        daemon.metrics.set("config_unknown_keys", &[&key.path], 1.0);
    }
}
