//! Sizes of slots: the class of an object, and the number of slots in a container of a class.
//!
//! The rule: sizes are rounded up to 4 KiB, then to one of 16 sizes per doubling (every size up to 128 KiB, every second one up to
//! 256 KiB, and so on). An object wastes less than 4 KiB + 1/16 of its slot, and there are at most some 400 classes between 4 KiB and
//! 1 TiB. Finer classes would waste less in a slot, but more in containers that no other class can use: nearly all objects of a pool have
//! the same size, but tails of prompts have any.

use kvcachepool_protocol::object::ALIGN;

/// Slots are multiples of this, so direct I/O of any section stays within its slot.
pub const UNIT: u64 = ALIGN;
/// log2 of the sizes per doubling.
const FINE_BITS: u32 = 4;
/// Most bytes of a container with several slots: large enough to have few containers, small enough to fill and empty one soon.
const CONTAINER_BYTES_MAX: u64 = 256 << 20;
/// Containers that a folder should at least have room for, so that classes can share it.
const CONTAINERS_MIN: u64 = 64;
pub const SLOTS_MAX: u32 = 1 << 16;

/// Units of the slot for an object of `bytes`; `None` if no object is that long.
pub fn slot_units(bytes: u64) -> Option<u32> {
    let units = u32::try_from(bytes.div_ceil(UNIT).max(1)).ok()?;
    let step = 1u32 << units.ilog2().saturating_sub(FINE_BITS);
    units.checked_next_multiple_of(step)
}

pub fn slot_bytes(units: u32) -> u64 {
    u64::from(units) * UNIT
}

/// Slots of a container of this class in a folder of this capacity.
pub fn slots(units: u32, capacity_bytes: u64) -> u32 {
    let target = (capacity_bytes / CONTAINERS_MIN).min(CONTAINER_BYTES_MAX);
    let slots = target / slot_bytes(units).max(1);
    u32::try_from(slots)
        .unwrap_or(SLOTS_MAX)
        .clamp(1, SLOTS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn small_sizes_have_a_class_each() {
        for units in 1..=32u32 {
            assert_eq!(slot_units(u64::from(units) * UNIT), Some(units));
        }
        assert_eq!(slot_units(0), Some(1));
        assert_eq!(slot_units(1), Some(1));
        assert_eq!(slot_units(33 * UNIT), Some(34));
        assert_eq!(slot_units(u64::MAX), None);
    }

    #[test]
    fn there_are_few_classes() {
        let classes: BTreeSet<u32> = (0..28)
            .flat_map(|bit| (0..64u64).map(move |i| (1u64 << bit) + (i << bit) / 64))
            .filter_map(|units| slot_units(units * UNIT))
            .collect();
        assert!(classes.len() <= 450, "{}", classes.len());
    }

    proptest! {
        #[test]
        fn a_slot_holds_its_object_and_wastes_little(bytes in 1u64..1 << 40) {
            let slot = slot_bytes(slot_units(bytes).unwrap());
            prop_assert!(slot >= bytes);
            prop_assert!(slot - bytes < UNIT + slot / 16, "{bytes} in {slot}");
            prop_assert_eq!(slot_units(slot), slot_units(bytes), "a slot is of its own class");
        }

        #[test]
        fn a_container_is_within_its_bounds(bytes in 1u64..1 << 34, capacity in 1u64..1 << 44) {
            let units = slot_units(bytes).unwrap();
            let count = slots(units, capacity);
            prop_assert!((1..=SLOTS_MAX).contains(&count));
            let whole = u64::from(count) * slot_bytes(units);
            prop_assert!(count == 1 || whole <= CONTAINER_BYTES_MAX.min(capacity));
        }
    }
}
