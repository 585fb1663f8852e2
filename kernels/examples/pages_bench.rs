//! Speed of the page kernels and of the digest on one core beside a memcpy of as many bytes, all with cold caches: `cargo run --example pages_bench`.
//!
//! One JSON line per row. `gb_s` (1e9 bytes of a section per second) and `memcpy_gb_s` are medians of alternating steps, so that both
//! see the same machine; `ratio` is one over the other. Takes 3 GiB of memory: nothing is touched again before 2 GiB of other bytes were,
//! more than any cache holds.

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

use kvcachepool_kernels::pages::{BlockShape, Dtype, HeadMajor, Keys, PageMap, Style, Turn};
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, Layout, LayoutTable};
use kvcachepool_protocol::object::digest;
use serde_json::{Value, json};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes of a section: a block of 16 tokens of a model with 32 layers, 8 KV heads of 128 and bfloat16.
const SECTION: usize = 2 << 20;
/// Sections of each of the three regions; a power of two.
const SECTIONS: usize = 512;
const STEPS: usize = 512;

/// Memory that the rows share.
struct Memory {
    plain: Vec<u8>,
    cache: Vec<u8>,
    ring: Vec<u8>,
    next: usize,
}

impl Memory {
    fn new() -> Self {
        let region = |seed: u8| {
            (0..SECTIONS * SECTION)
                .map(|i| (i >> 7) as u8 ^ seed)
                .collect()
        };
        Self {
            plain: region(1),
            cache: region(2),
            ring: region(3),
            next: 0,
        }
    }

    /// Runs `step` (number of the step, cache, a section of the ring), alternating with a memcpy, and prints the row.
    fn row(&mut self, named: Value, mut step: impl FnMut(usize, &mut [u8], &mut [u8])) {
        let (mut copies, mut steps) = (Vec::new(), Vec::new());
        for i in 0..STEPS {
            let from = shuffled(i) * SECTION;
            let to = self.slot();
            let (plain, ring) = (
                &self.plain[from..from + SECTION],
                &mut self.ring[to..to + SECTION],
            );
            copies.push(timed(|| ring.copy_from_slice(plain)));
            let to = self.slot();
            let ring = &mut self.ring[to..to + SECTION];
            steps.push(timed(|| step(i, &mut self.cache, ring)));
        }
        let (memcpy, own) = (rate(copies), rate(steps));
        let mut line = named;
        line["bytes"] = json!(SECTION);
        line["gb_s"] = rounded(own);
        line["memcpy_gb_s"] = rounded(memcpy);
        line["ratio"] = rounded(own / memcpy);
        println!("{line}");
    }

    fn slot(&mut self) -> usize {
        self.next = (self.next + 1) % SECTIONS;
        self.next * SECTION
    }
}

/// The numbers below `SECTIONS` in an order that no prefetcher knows.
fn shuffled(i: usize) -> usize {
    i.wrapping_mul(181).wrapping_add(97) % SECTIONS
}

fn timed(what: impl FnOnce()) -> Duration {
    let start = Instant::now();
    what();
    start.elapsed()
}

/// GB/s of the median.
fn rate(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    SECTION as f64 / times[times.len() / 2].as_secs_f64() / 1e9
}

fn rounded(value: f64) -> Value {
    json!((value * 1000.0).round() / 1000.0)
}

fn shape(state_bytes: usize) -> BlockShape {
    BlockShape {
        layers: 32,
        heads: 8,
        kernel_blocks: 1,
        tokens: 16,
        state_bytes,
    }
}

fn transfers(memory: &mut Memory, layout: &Layout, state_bytes: usize) {
    let shape = shape(state_bytes);
    let blocks = SECTIONS * SECTION / shape.block_bytes().unwrap();
    let map = PageMap::dense(layout, &shape, blocks as u32).unwrap();
    let each = SECTION / map.block_bytes();
    let ids = |step: usize| -> Vec<u32> {
        // Blocks of one section lie far from each other, as after some hours of serving.
        let block = |part| part * SECTIONS + shuffled(step + 31 * part);
        (0..each).map(|part| block(part) as u32).collect()
    };
    let named = |kernel: &str| json!({"kernel": kernel, "layout": layout.name, "piece_bytes": map.planes()[0].bytes});
    memory.row(named("gather"), |step, cache, section| {
        map.gather(&[cache], &ids(step), section).unwrap();
    });
    memory.row(named("scatter"), |step, cache, section| {
        map.scatter(section, &ids(step), &mut [cache]).unwrap();
    });
}

fn changes(memory: &mut Memory, layout: &Layout) {
    let change = HeadMajor::new(layout, &shape(256), 2).unwrap();
    let part = |step| shuffled(step) * SECTION..(shuffled(step) + 1) * SECTION;
    let named = |kernel: &str| json!({"kernel": kernel, "layout": layout.name});
    memory.row(named("to_canonical"), |step, cache, section| {
        change.to_canonical(&cache[part(step)], section).unwrap();
    });
    memory.row(named("to_verbatim"), |step, cache, section| {
        change.to_verbatim(&cache[part(step)], section).unwrap();
    });
}

fn rotations(memory: &mut Memory, dtype: Dtype, style: Style) {
    let keys = Keys {
        state_bytes: 256 * dtype.bytes(),
        offset: 0,
        rotary: 128,
        dtype,
        style,
    };
    let turn = Turn::by_base(500_000.0, 128, 1000).unwrap();
    let named =
        json!({"kernel": "rope", "dtype": format!("{dtype:?}"), "style": format!("{style:?}")});
    memory.row(named, |_, _, section| keys.turn(section, &turn).unwrap());
}

fn digests(memory: &mut Memory) {
    memory.row(json!({"kernel": "digest"}), |step, cache, _| {
        let from = shuffled(step) * SECTION;
        black_box(digest(&cache[from..from + SECTION]));
    });
}

fn main() {
    let table = LayoutTable::parse(LAYOUTS_JSON).unwrap();
    let mut memory = Memory::new();
    for (name, state_bytes) in [
        ("LBHNC", 512),
        ("LBHNC", 256),
        ("LHBNC", 512),
        ("LHBNC", 256),
        ("BLHNC", 512),
    ] {
        transfers(&mut memory, table.layout(name).unwrap(), state_bytes);
    }
    for name in ["LBHNC", "LBNHC", "BHLNC"] {
        changes(&mut memory, table.layout(name).unwrap());
    }
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        rotations(&mut memory, dtype, Style::NeoX);
        rotations(&mut memory, dtype, Style::GptJ);
    }
    digests(&mut memory);
}
