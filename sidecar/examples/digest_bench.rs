//! Speed of digests of the arena on one core, beside the same bytes copied out and digested by the library: `cargo run --example digest_bench`.
//!
//! One JSON line per row. `gb_s` and `copied_gb_s` (1e9 bytes a second) are medians of steps that take turns, so that both see the same
//! machine; `ratio` is one over the other. `cached` digests the same MiB over and over, `cold` nothing that was touched before 1 GiB of
//! other bytes was.

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

use kvcachepool_memory::mapping::Mapping;
use serde_json::json;
use std::hint::black_box;
use std::time::Instant;
use xxhash_rust::xxh3::Xxh3;

const MIB: u64 = 1 << 20;
const ARENA: u64 = 1 << 30;
/// Bytes that are copied out at a time.
const COPY: usize = 16 << 10;
const STEPS: u64 = 2_048;

fn copied(arena: &Mapping, offset: u64, length: u64) -> [u8; 16] {
    let (mut hash, mut copy) = (Xxh3::new(), [0; COPY]);
    for at in (offset..offset + length).step_by(COPY) {
        assert!(arena.read(at, &mut copy));
        hash.update(&copy);
    }
    hash.digest128().to_le_bytes()
}

/// GB/s of one step.
fn rate(bytes: u64, step: impl FnOnce() -> [u8; 16]) -> f64 {
    let start = Instant::now();
    black_box(step());
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_unstable_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// Steps through sections of the arena that two ways take in turns.
fn row(name: &str, arena: &Mapping, bytes: u64, section: impl Fn(u64) -> u64) {
    let (mut own, mut other) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let at = section(2 * step) * bytes;
        own.push(rate(bytes, || arena.xxh3_128(at, bytes).unwrap()));
        let at = section(2 * step + 1) * bytes;
        other.push(rate(bytes, || copied(arena, at, bytes)));
    }
    let (own, other) = (median(own), median(other));
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    let line = json!({
        "row": name, "bytes": bytes, "gb_s": rounded(own), "copied_gb_s": rounded(other), "ratio": rounded(own / other),
    });
    println!("{line}");
}

fn main() {
    let arena = Mapping::private("digest-bench", ARENA).unwrap();
    let bytes: Vec<u8> = (0..MIB).map(|i| (i ^ i >> 7) as u8).collect();
    for at in (0..ARENA).step_by(bytes.len()) {
        assert!(arena.write(at, &bytes));
    }
    row("cached", &arena, MIB, |_| 0);
    // Sections as long as a block of 16 tokens of a large model, in an order that no prefetcher knows.
    let sections = ARENA / (2 * MIB);
    row("cold", &arena, 2 * MIB, |i| (i * 181 + 97) % sections);
}
