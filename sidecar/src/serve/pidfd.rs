//! Waiting for the end of the process behind a pidfd.
#![allow(unsafe_code)]

use rustix::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Returns when the process has ended. Keeps the descriptor until then. An error means that the process cannot be watched.
pub async fn ended(pidfd: OwnedFd) -> std::io::Result<()> {
    // SAFETY: the OwnedFd moves into the AsyncFd, its only owner, so the descriptor stays open and unchanged while it is registered.
    let watched = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }
        .map_err(std::io::Error::from)?;
    watched.readable().await.map(drop)
}
