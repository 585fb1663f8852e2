//! Waiting for a condition.

use std::time::{Duration, Instant};

pub const DEADLINE: Duration = Duration::from_secs(30);

/// Waits for a condition; whoever runs out of time says what it waited for.
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < until, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
