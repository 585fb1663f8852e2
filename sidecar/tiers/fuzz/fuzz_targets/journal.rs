//! Any records of a journal, also with right checksums, give a state in which every object has a slot of its own, that a snapshot brings
//! back, and that finds room for more.
#![no_main]
// What the disk tier knows is pure and is built here by itself: the sidecar's clients and TLS would take minutes to build with sanitizers.
#![allow(dead_code)]

#[path = "../../src/disk/classes.rs"]
mod classes;
#[path = "../../src/disk/files.rs"]
mod files;
#[path = "../../src/disk/index.rs"]
mod index;
#[path = "../../src/disk/name.rs"]
mod name;
#[path = "../../src/disk/record.rs"]
mod record;
#[path = "../../src/disk/space.rs"]
mod space;
#[path = "../../src/disk/state.rs"]
mod state;

use classes::slot_bytes;
use files::{ContainerFile, Name};
use libfuzzer_sys::fuzz_target;
use name::NameKey;
use record::{RECORD_BYTES, Record};
use space::At;
use state::{Bounds, Plan, State};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_64;

const BOUNDS: Bounds = Bounds {
    capacity: 1 << 20,
    high: 1 << 19,
    low: 1 << 18,
    objects: 8,
};

// Up to four containers of three bytes each, how many slots are wanted then, and records.
fuzz_target!(|bytes: &[u8]| {
    let Some(([count, wanted], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let Some((containers, records)) = rest.split_at_checked(usize::from(count % 5) * 3) else {
        return;
    };
    let containers: BTreeMap<u32, _> = containers.as_chunks().0.iter().map(container).collect();
    let mut state = opened(&containers);
    for bytes in records.chunks(RECORD_BYTES) {
        let raw = Record::read(bytes);
        let record = raw.or_else(|| Record::read(&sealed(*bytes.first_chunk()?)));
        record.iter().for_each(|record| state.replay(record));
    }
    state.settle();
    check(&state);

    let mut used: Vec<_> = state.used(0, u32::MAX).collect();
    used.sort_unstable();
    let mut again = opened(&containers);
    for record in used
        .iter()
        .filter_map(|(_, number)| state.snapshot(*number))
    {
        let mut bytes = Vec::new();
        record.write(&mut bytes);
        assert_eq!(Record::read(&bytes), Some(record));
        again.replay(&record);
    }
    again.settle();
    check(&again);
    assert!(objects(&again) == objects(&state));

    for record in state.over_high() {
        state.release(record.at);
    }
    for _ in 0..wanted % 32 {
        make_room(&mut state, u32::from(wanted / 32) + 1);
        check(&state);
    }
});

fn container([id, units, slots]: &[u8; 3]) -> (u32, ContainerFile) {
    let file = ContainerFile {
        id: (*id).into(),
        units: u32::from(units % 8) + 1,
        slots: u32::from(slots % 16) + 1,
    };
    (file.id, file)
}

fn opened(containers: &BTreeMap<u32, ContainerFile>) -> State {
    let mut state = State::new(BOUNDS);
    for file in containers.values() {
        state.space.add(file.id, file.units, file.slots, None);
    }
    state
}

/// The same bytes as a record whose length, kind and checksum are right.
fn sealed(mut bytes: [u8; RECORD_BYTES]) -> [u8; RECORD_BYTES] {
    bytes[..2].copy_from_slice(&(RECORD_BYTES as u16).to_le_bytes());
    bytes[2] = bytes[2].wrapping_sub(1) % 2 + 1;
    bytes[76..80].fill(0);
    let checksum = xxh3_64(&bytes[..80]);
    bytes[80..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Objects in the order of their use.
fn objects(state: &State) -> Vec<(NameKey, At, u64, u32)> {
    let entries = state.index.oldest_first();
    entries
        .map(|entry| (entry.name, entry.at, entry.bytes, entry.written_unix_s))
        .collect()
}

/// Every object lies in a slot of its own that is long enough, and sums are right.
fn check(state: &State) {
    let (objects, mut bytes) = (objects(state), 0);
    for (name, at, length, _) in &objects {
        assert_eq!(state.lies_at(*at), Some(*name));
        let slot = state
            .space
            .container(at.container)
            .map(|c| slot_bytes(c.units));
        assert!(slot.is_some_and(|slot| *length <= slot));
        bytes += slot.unwrap_or_default();
    }
    assert_eq!((objects.len(), bytes), (state.index.len(), state.bytes()));
}

/// Follows a plan for a slot.
fn make_room(state: &mut State, units: u32) {
    match state.plan(units, false) {
        Plan::Slot(at) => {
            assert_eq!(state.lies_at(at), None);
            let container = state.space.container(at.container);
            assert!(container.is_some_and(|c| c.units == units && at.slot < c.slots()));
        }
        Plan::Make(file) => {
            assert!(state.space.container(file.id).is_none());
            assert_eq!(Name::read(&file.name()), Name::Container(file));
            state.space.add(file.id, file.units, file.slots, None);
            assert!(state.space.bytes() <= BOUNDS.capacity);
        }
        Plan::Unlink(file) => assert!(state.space.container(file.id).is_none()),
        Plan::Evict(records) => {
            assert!(!records.is_empty());
            records.iter().for_each(|record| state.release(record.at));
        }
        Plan::Full => {}
    }
}
