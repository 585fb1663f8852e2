//! Counters of packing and unpacking.

use kvcachepool_protocol::object::Section;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

kvcachepool_engine::named! {
    /// Why an object is stored unpacked although a codec is set.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Plain {
        /// Packing needs more room than its limit.
        TooLarge,
        /// The codec does not support the bytes: not numbers, not finite, or an unknown form.
        Unsuited,
        /// Packing would not make it smaller.
        NotSmaller,
    }
}

#[derive(Debug, Default)]
pub struct Packed {
    pub(super) put: Way,
    pub(super) get: Way,
    /// Bits of an f64.
    error: AtomicU64,
    plain: [AtomicU64; Plain::ALL.len()],
}

#[derive(Debug, Default)]
pub(super) struct Way {
    raw_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    micros: AtomicU64,
}

/// Counters of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amount {
    /// `put` or `get`.
    pub operation: &'static str,
    pub raw_bytes: u64,
    /// Bytes in the tier.
    pub stored_bytes: u64,
    /// CPU time.
    pub took: Duration,
}

impl Packed {
    /// Relative error of the object packed last; 0 for a lossless codec.
    pub fn error(&self) -> f64 {
        f64::from_bits(self.error.load(Relaxed))
    }

    /// Records the relative error of an object.
    pub(super) fn lost(&self, error: f64) {
        self.error.store(error.to_bits(), Relaxed);
    }

    /// Objects that were stored unpacked, by reason.
    pub fn plain(&self) -> [(Plain, u64); Plain::ALL.len()] {
        Plain::ALL.map(|why| (why, self.plain[why as usize].load(Relaxed)))
    }

    /// Counts an object that is stored unpacked.
    pub(super) fn left_plain(&self, why: Plain) {
        self.plain[why as usize].fetch_add(1, Relaxed);
    }

    /// Counters of both directions.
    pub fn amounts(&self) -> [Amount; 2] {
        [("put", &self.put), ("get", &self.get)].map(|(operation, way)| Amount {
            operation,
            raw_bytes: way.raw_bytes.load(Relaxed),
            stored_bytes: way.stored_bytes.load(Relaxed),
            took: Duration::from_micros(way.micros.load(Relaxed)),
        })
    }
}

impl Way {
    /// Counts sections of one direction.
    pub(super) fn went(&self, sections: &[Section], took: Duration) {
        let sum = |bytes: fn(&Section) -> u64| sections.iter().map(bytes).sum();
        self.raw_bytes.fetch_add(sum(|s| s.raw_bytes), Relaxed);
        self.stored_bytes
            .fetch_add(sum(|s| s.stored_bytes), Relaxed);
        self.micros.fetch_add(took.as_micros() as u64, Relaxed);
    }
}
