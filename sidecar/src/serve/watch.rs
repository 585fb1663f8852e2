//! Watches processes for their end, and drives the core's timers.

use super::pidfd;
use super::shell::Shell;
use kvcachepool_engine::driver;
use kvcachepool_engine::sessions::ProcessId;
use rustix::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::MissedTickBehavior;
use tracing::error;

/// Interval of the core's timers.
const TICK: Duration = Duration::from_millis(100);

/// Most reads of one connection before a tick; each takes up to 1 MiB, and a socket's buffer is smaller.
const DRAINS_MAX: usize = 8;

/// Reports the end of the process behind a pidfd. Keeps the descriptor until then.
pub fn process(shell: Weak<Shell>, process: ProcessId, fd: OwnedFd) {
    tokio::spawn(async move {
        if let Err(e) = pidfd::ended(fd).await {
            error!(process = process.0, error = %e, "cannot watch a vLLM process for its end");
            return;
        }
        if let Some(shell) = shell.upgrade() {
            driver::died(&mut shell.devices(), process);
        }
    });
}

/// Ticks without end. Before each tick everything readable is read: after a SIGSTOP the sidecar must see queued PINs and COMMITs
/// before its timers run.
pub async fn ticks(shell: Arc<Shell>) {
    let mut every = tokio::time::interval(TICK);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        for connection in shell.connections() {
            // Bounded: a peer that floods the socket must not stop the clock.
            for _ in 0..DRAINS_MAX {
                if shell.read(&connection) {
                    break;
                }
            }
        }
        driver::tick(&mut shell.devices());
    }
}
