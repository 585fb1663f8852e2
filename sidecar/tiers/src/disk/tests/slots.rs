//! What index and slots know together, without any file.

use super::super::files::{ID_MAX, Name};
use super::super::name::NameKey;
use super::super::record::{Record, What};
use super::super::space::At;
use super::super::state::{Bounds, Plan, State};
use super::rig::object;

const UNITS: u32 = 2;

fn state(slots: u32) -> State {
    let capacity = u64::from(slots) * 8192;
    let mut state = State::new(Bounds {
        capacity,
        high: capacity,
        low: capacity,
        objects: usize::MAX,
    });
    state.space.add(0, UNITS, slots, None);
    state
}

fn record(what: What, i: u32, container: u32, slot: u32) -> Record {
    Record {
        what,
        name: NameKey::of(&object(i, &[1]).name()).unwrap(),
        at: At { container, slot },
        bytes: 8000,
        written_unix_s: 1_800_000_000,
    }
}

fn put(state: &mut State, i: u32) -> Record {
    let At { container, slot } = state.space.take(UNITS).unwrap();
    let record = record(What::Put, i, container, slot);
    assert!(state.publish(&record));
    record
}

/// Slot of an object.
fn slot_of(state: &State, i: u32) -> Option<At> {
    let name = record(What::Put, i, 0, 0).name;
    let number = state.index.find(&name)?;
    state.index.entry(number).map(|entry| entry.at)
}

#[test]
fn the_slot_of_what_was_taken_out_is_nobodys_until_that_is_durable() {
    let mut state = state(1);
    let a = put(&mut state, 1);
    let removed = state.take_out(&a.name).unwrap();
    assert_eq!(
        removed,
        Record {
            what: What::Remove,
            ..a
        }
    );
    assert_eq!(slot_of(&state, 1), None);
    assert_eq!(state.space.take(UNITS), None, "its record is not durable");
    assert_eq!(
        state.plan(UNITS, false),
        Plan::Full,
        "nor is its container given up"
    );
    state.release(a.at);
    assert_eq!(state.space.take(UNITS), Some(a.at));
}

#[test]
fn the_slot_of_what_is_read_is_nobodys_until_the_last_reader_ends() {
    let mut state = state(1);
    let a = put(&mut state, 1);
    let pins = [(); 2].map(|()| state.pin(&a.name).unwrap());
    assert_eq!(state.plan(UNITS, false), Plan::Full);
    state.take_out(&a.name).unwrap();
    state.release(a.at);
    for pin in pins {
        assert_eq!(state.space.take(UNITS), None);
        state.unpin(pin.at);
    }
    assert_eq!(state.space.take(UNITS), Some(a.at));
}

#[test]
fn more_objects_than_their_bound_go_oldest_first_however_small_they_are() {
    let mut state = State::new(Bounds {
        capacity: 1 << 30,
        high: 1 << 30,
        low: 1 << 30,
        objects: 2,
    });
    state.space.add(0, UNITS, 8, None);
    let [_, second, _, _] = [1, 2, 3, 4].map(|i| put(&mut state, i));
    assert!(state.pin(&second.name).is_some(), "used last now");
    let gone: Vec<_> = state.over_high().iter().map(|r| r.name).collect();
    assert_eq!(gone, [1, 3].map(|i| record(What::Put, i, 0, 0).name));
    assert_eq!(state.over_high(), []);
}

#[test]
fn the_last_record_of_a_slot_and_of_a_name_counts() {
    let mut state = state(3);
    for (what, i, slot) in [
        (What::Put, 1, 0),
        // Another object in its slot: the removal between them was lost.
        (What::Put, 2, 0),
        (What::Put, 3, 1),
        // The same object elsewhere.
        (What::Put, 3, 2),
        // It is not there any more.
        (What::Remove, 3, 1),
    ] {
        state.replay(&record(what, i, 0, slot));
    }
    state.settle();
    let at = |slot| Some(At { container: 0, slot });
    assert_eq!(slot_of(&state, 1), None);
    assert_eq!((slot_of(&state, 2), slot_of(&state, 3)), (at(0), at(2)));
    assert_eq!(state.bytes(), 2 * 8192);
    assert_eq!(state.space.take(UNITS), at(1), "the only free one");
    assert_eq!(state.space.take(UNITS), None);
}

#[test]
fn a_record_of_what_is_not_there_ends_what_its_name_meant() {
    let mut state = state(1);
    state.replay(&record(What::Put, 1, 0, 0));
    state.replay(&record(What::Put, 1, 7, 0));
    // No such slot; longer than its slot.
    state.replay(&record(What::Put, 2, 0, 9));
    let long = record(What::Put, 3, 0, 0);
    state.replay(&Record {
        bytes: 8193,
        ..long
    });
    state.settle();
    assert_eq!([1, 2, 3].map(|i| slot_of(&state, i)), [None; 3]);
    assert_eq!(state.counts.stray_records, 3);
    assert_eq!(
        state.space.next_id(),
        Some(8),
        "a number that a record names is not given again"
    );
}

#[test]
fn no_container_is_made_whose_file_the_next_open_would_not_know() {
    let mut state = state(1);
    state.space.take(UNITS).unwrap();
    state.space.remove(0);
    state.space.saw_id(ID_MAX - 1);
    let Plan::Make(last) = state.plan(UNITS, false) else {
        panic!("there is room for it");
    };
    assert_eq!(Name::read(&last.name()), Name::Container(last));
    assert_eq!(state.plan(UNITS, false), Plan::Full);
    assert_eq!(state.plan(UNITS, false), Plan::Full);
}
