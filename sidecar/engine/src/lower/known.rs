//! A bounded cache of sightings: which objects were seen in which tier. An entry may be out of date; then a fetch misses, or a write finds
//! the object present.

use super::super::name::{FastMap, Name};
use super::TIERS_MAX;
use std::collections::VecDeque;

/// Limit on remembered objects, about 200 bytes each.
const NAMES_MAX: usize = 1 << 16;
/// How long a sighting counts as present, in ms. A server may evict the object at any time.
const PRESENT_MS: u64 = 60_000;
/// How long an object counts as missing, in ms: covers a request's early PROBE to its first poll.
const ABSENT_MS: u64 = 1_000;
/// How long an unusable object is not requested again, in ms, unless it is seen to be rewritten.
const UNUSABLE_MS: u64 = 600_000;

/// Sightings of one object, per index of the tier.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// Bit mask of tiers whose object was unusable.
    unusable: u8,
    present_until_ms: [u64; TIERS_MAX],
    absent_until_ms: [u64; TIERS_MAX],
}

impl Seen {
    fn put(&mut self, tier: usize, present_until_ms: u64, absent_until_ms: u64) {
        self.unusable &= !(1 << tier);
        if let Some(until) = self.present_until_ms.get_mut(tier) {
            *until = present_until_ms;
        }
        if let Some(until) = self.absent_until_ms.get_mut(tier) {
            *until = absent_until_ms;
        }
    }
}

/// Objects seen, or found missing, in a tier.
#[derive(Debug, Default)]
pub(crate) struct Known {
    of: FastMap<Name, Seen>,
    /// Insertion order. The oldest entry is evicted first.
    order: VecDeque<Name>,
}

impl Known {
    /// Records that an object exists under the name. An earlier finding that it is unusable stays.
    pub fn present(&mut self, name: Name, tier: usize, now_ms: u64) {
        let unusable = |s: &Seen| s.unusable >> tier & 1 == 1;
        if !self.of.get(&name).is_some_and(unusable) {
            self.usable(name, tier, now_ms);
        }
    }

    /// Records that the object was read or rewritten.
    pub fn usable(&mut self, name: Name, tier: usize, now_ms: u64) {
        self.entry(name).put(tier, now_ms + PRESENT_MS, 0);
    }

    /// Records that the object is missing.
    pub fn absent(&mut self, name: Name, tier: usize, now_ms: u64) {
        self.entry(name).put(tier, 0, now_ms + ABSENT_MS);
    }

    /// Forgets that the object was seen.
    pub fn gone(&mut self, name: &Name, tier: usize) {
        if let Some(seen) = self.of.get_mut(name) {
            seen.put(tier, 0, 0);
        }
    }

    /// Records that the object exists but is unusable.
    pub fn unusable(&mut self, name: Name, tier: usize, now_ms: u64) {
        let seen = self.entry(name);
        seen.put(tier, 0, now_ms + UNUSABLE_MS);
        seen.unusable |= 1 << tier;
    }

    /// Records that the result of a read is unknown, because it was cancelled.
    pub fn doubted(&mut self, name: &Name, tier: usize) {
        let seen = self.of.get_mut(name);
        if let Some(until) = seen.and_then(|s| s.present_until_ms.get_mut(tier)) {
            *until = 0;
        }
    }

    /// True if the object was seen recently.
    pub fn has(&self, name: &Name, tier: usize, now_ms: u64) -> bool {
        let seen = self.of.get(name);
        seen.and_then(|s| s.present_until_ms.get(tier))
            .is_some_and(|until| now_ms < *until)
    }

    /// True if the last check found the object, whatever its age.
    pub fn had(&self, name: &Name, tier: usize) -> bool {
        let seen = self.of.get(name);
        seen.and_then(|s| s.present_until_ms.get(tier))
            .is_some_and(|until| *until > 0)
    }

    /// True if the object was found missing recently.
    pub fn lacks(&self, name: &Name, tier: usize, now_ms: u64) -> bool {
        let seen = self.of.get(name);
        seen.and_then(|s| s.absent_until_ms.get(tier))
            .is_some_and(|until| now_ms < *until)
    }

    /// Forgets a tier that went down, because it may have lost objects.
    pub fn forget(&mut self, tier: usize) {
        for seen in self.of.values_mut() {
            seen.put(tier, 0, 0);
        }
    }

    fn entry(&mut self, name: Name) -> &mut Seen {
        if !self.of.contains_key(&name) {
            if self.order.len() >= NAMES_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.of.remove(&oldest);
            }
            self.order.push_back(name);
        }
        self.of.entry(name).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_protocol::key::ChunkKey;

    fn name(n: u32) -> Name {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&n.to_le_bytes());
        Name {
            layout: 0,
            key: ChunkKey(key),
        }
    }

    #[test]
    fn what_was_there_is_remembered_for_long_and_what_was_not_for_a_moment() {
        let mut known = Known::default();
        known.present(name(1), 0, 10);
        known.absent(name(1), 1, 10);
        assert!(known.has(&name(1), 0, 10 + PRESENT_MS - 1) && !known.has(&name(1), 1, 10));
        assert!(!known.has(&name(1), 0, 10 + PRESENT_MS) && known.had(&name(1), 0));
        assert!(known.lacks(&name(1), 1, 10 + ABSENT_MS - 1));
        assert!(!known.lacks(&name(1), 1, 10 + ABSENT_MS));
        assert!(!known.lacks(&name(1), 0, 10));
        known.absent(name(1), 0, 20);
        assert!(!known.has(&name(1), 0, 20));
        known.present(name(1), 0, 20);
        assert!(!known.lacks(&name(1), 0, 20));
        known.unusable(name(1), 0, 20);
        assert!(!known.has(&name(1), 0, 20));
        assert!(known.lacks(&name(1), 0, 20 + UNUSABLE_MS - 1));
        known.present(name(1), 0, 20);
        assert!(
            !known.has(&name(1), 0, 20),
            "the stored object is still the same"
        );
        known.usable(name(1), 0, 20);
        assert!(known.has(&name(1), 0, 20));
        known.doubted(&name(1), 0);
        assert!(!known.had(&name(1), 0) && !known.lacks(&name(1), 0, 20));
        known.unusable(name(1), 0, 20);
        known.present(name(1), 1, 20);
        known.forget(0);
        assert!(!known.lacks(&name(1), 0, 20));
        assert!(!known.has(&name(1), 0, 20) && known.has(&name(1), 1, 20));
    }

    #[test]
    fn the_memory_is_bounded() {
        let mut known = Known::default();
        for n in 0..NAMES_MAX as u32 + 10 {
            known.present(name(n), 0, 20);
        }
        assert_eq!(known.of.len(), NAMES_MAX);
        assert_eq!(known.order.len(), NAMES_MAX);
        assert!(!known.has(&name(9), 0, 20) && known.has(&name(10), 0, 20));
    }
}
