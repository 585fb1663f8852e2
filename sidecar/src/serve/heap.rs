//! Memory that was freed goes back to the node. The allocator keeps what lies between blocks that are still in use: over hours of load
//! that grows, though no more is in use than before.
#![allow(unsafe_code)]

use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// How often. It takes a millisecond or less, and for that long who allocates waits; what is kept in between grows back within some seconds.
const EVERY: Duration = Duration::from_secs(10);

/// Gives it back for ever.
pub async fn trims() {
    let mut every = interval(EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        // A panic ends the process, and so does the runtime.
        let _ = tokio::task::spawn_blocking(trim).await;
    }
}

/// Gives back now all whole pages that no block lies in.
#[cfg(target_env = "gnu")]
fn trim() {
    // SAFETY: it takes the allocator's own locks and moves nothing.
    unsafe { libc::malloc_trim(0) };
}

/// Other allocators have no such call.
#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use super::*;

    fn rss_anon_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1));
        kib.unwrap().parse().unwrap()
    }

    #[test]
    fn what_lies_free_between_blocks_in_use_goes_back() {
        let mut blocks: Vec<_> = (0..128 << 10).map(|n| Some(vec![n as u8; 1000])).collect();
        for (n, block) in blocks.iter_mut().enumerate() {
            if !n.is_multiple_of(64) {
                *block = None;
            }
        }
        let kept = rss_anon_kib();
        trim();
        let left = rss_anon_kib();
        assert!(left + (64 << 10) < kept, "{kept} KiB, then {left}");
        assert_eq!(blocks.iter().flatten().count(), 2 << 10);
    }
}
