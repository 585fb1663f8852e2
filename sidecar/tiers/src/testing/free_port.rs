//! Free ports for test servers, as in `tests/servers/paths.py`.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Ports below 32768 are never used for outgoing connections, so a server's port stays free while it is down. From 30000 on they are
/// node ports of a cluster.
const FIRST: u32 = 12_000;
const COUNT: u32 = 18_000;

static TAKEN: AtomicU32 = AtomicU32::new(0);

/// A port that is free now and that this process has not returned before.
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
