//! What is counted per tier. Parts add up: see `audit`.

use super::speed::Estimate;
use crate::tier::Kind;
use std::collections::BTreeMap;

/// A tier, as status and metrics show it.
#[derive(Debug, Clone, Copy)]
pub struct TierView<'a> {
    pub kind: Kind,
    /// Why it is down, or why a clear cannot remove its objects; none = neither.
    pub down: Option<&'a str>,
    /// Its objects are being removed, by a clear.
    pub clears: bool,
    pub stats: &'a TierStats,
    /// How long a lookup, and a fetch, is expected to take, in ms.
    pub expected_ms: [u64; 2],
    /// How long fetches take by their bytes; none = too few were seen, or none for long.
    pub estimate: Option<Estimate>,
    /// Chunks that wait to be fetched.
    pub fetches_waiting: u32,
    /// Bytes of the chunks that are being fetched, cancelled or not.
    pub fetch_bytes: u64,
    /// Chunks that wait to be written.
    pub writes_waiting: usize,
    pub waiting_bytes: u64,
    /// Bytes of the chunks that are being written.
    pub write_bytes: u64,
}

/// Counters of one tier since the engine's start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierStats {
    /// Chunks that were looked up.
    pub asked_chunks: u64,
    /// Of them, by how that ended: `present`, `absent`, `cancelled`, or why it failed.
    pub lookups: BTreeMap<&'static str, u64>,
    /// Chunks that were wanted from it.
    pub wanted_chunks: u64,
    /// Of them, by how that ended: `landed`, `cancelled`, or why it failed.
    pub fetches: BTreeMap<&'static str, u64>,
    /// Bytes of those that landed.
    pub fetched_bytes: u64,
    /// Chunks that were to be written to it.
    pub offered_chunks: u64,
    /// Of them, by how that ended: `stored`, `already`, why it was not begun, or why it failed.
    pub puts: BTreeMap<&'static str, u64>,
    /// Bytes of those that were stored.
    pub put_bytes: u64,
    /// Clears by how they ended: `cleared`, or why one failed, to be tried again.
    pub clears: BTreeMap<&'static str, u64>,
    /// Objects that went by them.
    pub cleared_objects: u64,
}

/// What was chosen for PROBEs whose chunks lower tiers have, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadStats {
    /// PROBEs by what was chosen: `load`, `always`, `unknown` (there was nothing to go by), or why something was left where it is.
    pub choices: BTreeMap<&'static str, u64>,
    /// Loads that were chosen and ended, by what became of them: `quicker` or `slower` than computing, `unknown`, `failed`.
    pub outcomes: BTreeMap<&'static str, u64>,
    /// How long they were expected to take, where anything was, in µs.
    pub expected_us: u64,
    /// How long these took, in µs.
    pub took_us: u64,
}

/// One more of a name.
pub(crate) fn count(map: &mut BTreeMap<&'static str, u64>, name: &'static str, n: u64) {
    if n > 0 {
        *map.entry(name).or_default() += n;
    }
}
