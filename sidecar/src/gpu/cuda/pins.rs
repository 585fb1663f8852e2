//! Page locks of the arena: unit by unit, when a copy touches one first, once for all windows and devices of this process.
#![allow(unsafe_code)]

use super::api::{ALREADY_REGISTERED, Api};
use crate::shm::mapping::Mapping;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;

/// Bytes that are locked at once: a large lock holds up the driver's calls of the whole node.
const UNIT: u64 = 64 << 20;
/// `CU_MEMHOSTREGISTER_PORTABLE`: for all contexts of this process.
const PORTABLE: u32 = 1;

/// What is locked. Mappings are kept for ever: their pages must stay where the driver has them, and the arena lives as long as the process.
#[derive(Default)]
struct Pins {
    arenas: Vec<Arc<Mapping>>,
    units: HashSet<(usize, u64)>,
    /// The driver refused once: copies go through its own buffers.
    refused: bool,
}

static PINS: Mutex<Option<Pins>> = Mutex::new(None);

/// Locks the units of a range, unless they are. A refusal only makes copies slower. The context is current.
pub fn lock(api: &Api, arena: &Arc<Mapping>, offset: u64, bytes: u64) {
    let mut pins = PINS.lock();
    let pins = pins.get_or_insert_with(Pins::default);
    if !pins.arenas.iter().any(|known| Arc::ptr_eq(known, arena)) {
        pins.arenas.push(arena.clone());
    }
    let first = offset / UNIT;
    let last = (offset + bytes.max(1) - 1) / UNIT;
    for unit in first..=last {
        let name = (Arc::as_ptr(arena) as usize, unit);
        if pins.refused || pins.units.contains(&name) {
            continue;
        }
        let begin = unit * UNIT;
        let length = UNIT.min(arena.length() - begin);
        let Some(start) = arena.address(begin, length) else {
            return;
        };
        // SAFETY: the range lies in a mapping that is kept for ever.
        match unsafe { (api.register)(start.as_ptr().cast(), length as usize, PORTABLE) } {
            0 | ALREADY_REGISTERED => {
                pins.units.insert(name);
            }
            result => {
                pins.refused = true;
                tracing::warn!(result, "the arena cannot be page-locked: copies are slower");
            }
        }
    }
}
