//! What packing costs and gains: one line of JSON for memcpy, one per codec. One thread; every figure is of the fastest of the rounds, over
//! 64 MiB, which no cache holds. Each round copies, packs and unpacks everything once, so that what else a machine does meets all alike.
//!
//! `cargo run -p kvcachepool-kernels --example codec_bench -- [ROUNDS]`
//!
//! The bytes are made to look like the KV cache of 32 layers with 8 heads of 128: bf16, `[layer][K, V][512 tokens][1024 channels]`. A
//! channel's values are normal, each token's with 0.8 of the one before in it. Channels of K have log-normal scales (sigma 0.5) and means,
//! and one in 32 is eight times as large, as rotary embeddings leave them; those of V have log-normal scales (sigma 0.25), no means and no
//! outliers. Real caches differ: ratios of real ones are to be measured on them.

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

use kvcachepool_kernels::codec::{Codec, Element, Shape, decode, encode};
use std::hint::black_box;
use std::time::{Duration, Instant};

const SHAPE: Shape = Shape {
    element: Element::Bf16,
    layers: 32,
    halves: 2,
    tokens: 512,
    channels: 1_024,
};

const CODECS: [(&str, Codec); 5] = [
    ("lossless", Codec::Lossless),
    ("fp8", Codec::Fp8 { group: 128 }),
    ("int8", Codec::Int8 { group: 128 }),
    ("int4", Codec::Int4 { group: 64 }),
    ("cachegen", Codec::CacheGen),
];

fn main() {
    let rounds = match std::env::args().nth(1) {
        Some(rounds) => rounds.parse().unwrap(),
        None => 5,
    };
    let raw = cache();
    let mut back = raw.clone();
    let mut memcpy = Duration::MAX;
    let mut rows = CODECS.map(|(name, codec)| Row::new(name, codec, raw.len()));
    for _ in 0..=rounds {
        fastest(&mut memcpy, || back.copy_from_slice(black_box(&raw)));
        for row in &mut rows {
            row.round(&raw, &mut back);
        }
    }
    let gbps = |time: Duration| raw.len() as f64 / time.as_nanos() as f64;
    println!(
        r#"{{"row":"cpu_memcpy","raw_mib":{},"gbps":{:.2}}}"#,
        raw.len() >> 20,
        gbps(memcpy)
    );
    for row in rows {
        let (encode, decode, memcpy) = (gbps(row.encode), gbps(row.decode), gbps(memcpy));
        println!(
            r#"{{"row":"cpu_{}_vs_memcpy","encode_vs_memcpy":{:.3},"decode_vs_memcpy":{:.3},"encode_gbps":{encode:.3},"decode_gbps":{decode:.3},"ratio":{:.3},"rms_relative":{:.2e},"max_abs":{:.2e}}}"#,
            row.name,
            encode / memcpy,
            decode / memcpy,
            raw.len() as f64 / row.stored.len() as f64,
            row.rms,
            row.max,
        );
    }
}

/// What is known of a codec.
struct Row {
    name: &'static str,
    codec: Codec,
    stored: Vec<u8>,
    encode: Duration,
    decode: Duration,
    rms: f64,
    max: f64,
}

impl Row {
    fn new(name: &'static str, codec: Codec, raw: usize) -> Self {
        Self {
            name,
            codec,
            stored: Vec::with_capacity(raw + 4_096),
            encode: Duration::MAX,
            decode: Duration::MAX,
            rms: f64::NAN,
            max: f64::NAN,
        }
    }

    fn round(&mut self, raw: &[u8], back: &mut [u8]) {
        let (codec, stored) = (self.codec, &mut self.stored);
        fastest(&mut self.encode, || {
            stored.clear();
            encode(codec, &SHAPE, black_box(raw), stored).unwrap();
        });
        fastest(&mut self.decode, || {
            decode(codec, &SHAPE, black_box(stored), back).unwrap();
        });
        if self.rms.is_nan() {
            (self.rms, self.max) = errors(raw, back);
        }
        assert!(!codec.is_lossless() || raw == back);
    }
}

/// Does the work, and keeps the time if it is the shortest.
fn fastest(shortest: &mut Duration, work: impl FnOnce()) {
    let begun = Instant::now();
    work();
    *shortest = begun.elapsed().min(*shortest);
}

/// Root of mean squares of errors by that of numbers, and the largest error.
fn errors(raw: &[u8], back: &[u8]) -> (f64, f64) {
    let (mut squares, mut wrong, mut max) = (0.0, 0.0, 0f64);
    for (raw, back) in raw.as_chunks().0.iter().zip(back.as_chunks().0) {
        let error = value(*raw) - value(*back);
        squares += value(*raw).powi(2);
        wrong += error.powi(2);
        max = max.max(error.abs());
    }
    ((wrong / squares).sqrt(), max)
}

fn value(bytes: [u8; 2]) -> f64 {
    f64::from(f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
}

/// Bytes as the head of this file describes them.
fn cache() -> Vec<u8> {
    let mut normal = Normal { state: 1 };
    let channels = SHAPE.channels as usize;
    let mut raw = Vec::new();
    for half in 0..SHAPE.layers * SHAPE.halves {
        let keys = half % 2 == 0;
        let spread = if keys { 0.5 } else { 0.25 };
        let scales: Vec<f32> = (0..channels)
            .map(|channel| {
                let outlier = if keys && channel % 32 == 7 { 8.0 } else { 1.0 };
                (normal.next() * spread).exp() * outlier
            })
            .collect();
        let means: Vec<f32> = scales
            .iter()
            .map(|scale| if keys { normal.next() * scale } else { 0.0 })
            .collect();
        let mut last: Vec<f32> = (0..channels).map(|_| normal.next()).collect();
        for _ in 0..SHAPE.tokens {
            for channel in 0..channels {
                last[channel] = 0.8 * last[channel] + 0.6 * normal.next();
                let value = means[channel] + scales[channel] * last[channel];
                let bits = value.to_bits();
                let rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
                raw.extend((rounded as u16).to_le_bytes());
            }
        }
    }
    raw
}

/// Numbers of the normal distribution, by Box and Muller, from a splitmix64 of a fixed seed.
struct Normal {
    state: u64,
}

impl Normal {
    fn next(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        let radius = ((bits >> 40) + 1) as f32 / (1u32 << 24) as f32;
        let angle = (bits & 0xff_ffff) as f32 / (1u32 << 24) as f32;
        (-2.0 * radius.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
    }
}
