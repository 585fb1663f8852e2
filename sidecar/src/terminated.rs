//! The end of a process that has nothing to do at its end but to return.

use tokio::signal::unix::{SignalKind, signal};

/// Returns at SIGTERM or SIGINT.
pub async fn terminated() -> std::io::Result<()> {
    let (mut term, mut int) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}
