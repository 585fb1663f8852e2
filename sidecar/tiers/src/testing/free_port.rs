//! Ports for the servers of tests, as in `tests/servers/paths.py`.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Ports below 32768 are never given to a connection that leaves: nothing takes one while its server is down.
/// From 30000 they are those of a cluster's services.
const FIRST: u32 = 12_000;
const COUNT: u32 = 18_000;

static TAKEN: AtomicU32 = AtomicU32::new(0);

/// A port that nobody has now and that this process has not been given before.
pub fn free_port() -> u16 {
    // Processes with neighbouring ids start far from each other.
    let start = std::process::id().wrapping_mul(7_919);
    loop {
        let step = TAKEN.fetch_add(1, Relaxed);
        assert!(step < COUNT, "no port is free");
        let port = (FIRST + start.wrapping_add(step) % COUNT) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
