//! Counters per tier. `check` makes sure that their parts add up.

use super::speed::Estimate;
use crate::tier::Kind;
use std::collections::BTreeMap;

/// A tier as shown by status and metrics.
#[derive(Debug, Clone, Copy)]
pub struct TierView<'a> {
    pub kind: Kind,
    /// Reason why the tier is down, or why a clear cannot remove its objects; none = neither.
    pub down: Option<&'a str>,
    /// A clear is removing its objects.
    pub clears: bool,
    pub stats: &'a TierStats,
    /// Expected time of a lookup and of a fetch. Milliseconds.
    pub expected_ms: [u64; 2],
    /// Estimated fetch time by bytes; none without enough recent measurements.
    pub estimate: Option<Estimate>,
    pub fetches_waiting: u32,
    /// Bytes of fetches in flight, including cancelled ones.
    pub fetch_bytes: u64,
    pub writes_waiting: usize,
    pub waiting_bytes: u64,
    pub write_bytes: u64,
}

/// Counters of one tier since the engine's start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierStats {
    pub asked_chunks: u64,
    /// Results of lookups: `present`, `absent`, `cancelled`, or the cause of a failure.
    pub lookups: BTreeMap<&'static str, u64>,
    /// Fetches requested, in chunks.
    pub wanted_chunks: u64,
    /// Results of fetches: `landed`, `cancelled`, or the cause of a failure.
    pub fetches: BTreeMap<&'static str, u64>,
    /// Bytes of landed fetches.
    pub fetched_bytes: u64,
    /// Chunks that should be written to the tier.
    pub offered_chunks: u64,
    /// Results of writes: `stored`, `already`, the reason why it did not start, or the cause of a failure.
    pub puts: BTreeMap<&'static str, u64>,
    pub put_bytes: u64,
    /// Results of clears: `cleared`, or the cause of a failure. A failed clear is retried.
    pub clears: BTreeMap<&'static str, u64>,
    pub cleared_objects: u64,
}

/// Load decisions for PROBEs whose chunks are in lower tiers, and their outcomes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadStats {
    /// PROBEs by decision: `load`, `always`, `unknown` (no estimate exists), or the reason for not loading.
    pub choices: BTreeMap<&'static str, u64>,
    /// Outcomes of completed loads: `quicker` or `slower` than prefill, `unknown`, `failed`.
    pub outcomes: BTreeMap<&'static str, u64>,
    /// Total expected time of loads that had an estimate. Microseconds.
    pub expected_us: u64,
    /// Total actual time of the same loads. Microseconds.
    pub took_us: u64,
}

/// Adds `n` to a named counter.
pub(crate) fn count(map: &mut BTreeMap<&'static str, u64>, name: &'static str, n: u64) {
    if n > 0 {
        *map.entry(name).or_default() += n;
    }
}
