//! What was packed and unpacked, and what was not.

use kvcachepool_protocol::object::Section;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Why an object is stored as it is by a sidecar that packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plain {
    /// There is less room than packing it takes.
    TooLarge,
    /// The codec has nothing for such bytes: no numbers, not finite ones, or a form that it does not know.
    Unsuited,
    /// It would not get smaller.
    NotSmaller,
}

impl Plain {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::TooLarge, Self::Unsuited, Self::NotSmaller];

    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::TooLarge => "TooLarge",
            Self::Unsuited => "Unsuited",
            Self::NotSmaller => "NotSmaller",
        }
    }
}

/// What was packed and unpacked.
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

/// What went one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amount {
    /// `put` or `get`.
    pub operation: &'static str,
    /// Bytes in memory.
    pub raw_bytes: u64,
    /// The same in the tier.
    pub stored_bytes: u64,
    /// Time of a core that it took.
    pub took: Duration,
}

impl Packed {
    /// Relative error of what was packed last; 0 where nothing is lost.
    pub fn error(&self) -> f64 {
        f64::from_bits(self.error.load(Relaxed))
    }

    /// So much was lost of one.
    pub(super) fn lost(&self, error: f64) {
        self.error.store(error.to_bits(), Relaxed);
    }

    /// Objects that were stored as they are, by why.
    pub fn plain(&self) -> [(Plain, u64); Plain::ALL.len()] {
        Plain::ALL.map(|why| (why, self.plain[why as usize].load(Relaxed)))
    }

    /// An object is stored as it is.
    pub(super) fn left_plain(&self, why: Plain) {
        self.plain[why as usize].fetch_add(1, Relaxed);
    }

    /// Both ways.
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
    /// Sections went this way.
    pub(super) fn went(&self, sections: &[Section], took: Duration) {
        let sum = |bytes: fn(&Section) -> u64| sections.iter().map(bytes).sum();
        self.raw_bytes.fetch_add(sum(|s| s.raw_bytes), Relaxed);
        self.stored_bytes
            .fetch_add(sum(|s| s.stored_bytes), Relaxed);
        self.micros.fetch_add(took.as_micros() as u64, Relaxed);
    }
}
