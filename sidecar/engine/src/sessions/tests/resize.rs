//! The arena follows the size in the config while it is in use.

use super::peer::*;
use crate::config::Config;
use crate::sessions::Output;
use crate::table::{FREE, ROW_BYTES, Table};
use kvcachepool_protocol::message::*;

const MI: u64 = 1 << 20;
/// Rows of a segment of 4 MiB.
const SEGMENT: u32 = 64;

/// A config that limits grants by the arena alone.
fn config(bytes: u64) -> Config {
    let mut config = World::config();
    config.arena_bytes = bytes;
    config.limits.granted_bytes_max = 32 * MI;
    config
}

/// A world with 8 MiB that can have 32 MiB.
fn growable() -> World {
    let pod = Pod {
        most_bytes: 32 * MI,
        ..Pod::default()
    };
    let mut w = World::with(config(8 * MI), pod, None);
    w.populate();
    w
}

fn ask_for(w: &mut World, bytes: u64) -> Vec<&'static str> {
    let restart = w.core.configure(config(bytes));
    w.pass(1_000);
    restart
}

/// A chunk without a parent.
fn alone(n: u8) -> GrantChunk {
    GrantChunk {
        hash: hash(n).0.to_vec(),
        ..chunk(1)
    }
}

fn capacity(w: &World) -> u64 {
    w.core.engine().unwrap().capacity_bytes()
}

fn waits(w: &World) -> String {
    w.core.status(w.now).memory.resize_waits
}

#[test]
fn it_grows_when_the_container_may_use_more_and_says_what_it_waits_for() {
    let mut w = growable();
    w.core.host_mut().limit_bytes = Some(8 * MI);
    assert!(ask_for(&mut w, 16 * MI).is_empty());
    assert_eq!(
        (capacity(&w), waits(&w)),
        (8 * MI, "16777216 bytes exceed the limit".to_owned())
    );
    assert_eq!(w.core.status(w.now).memory.target_bytes, 16 * MI);
    w.core.host_mut().limit_bytes = Some(16 * MI);
    w.pass(1_000);
    assert_eq!((capacity(&w), waits(&w)), (16 * MI, String::new()));
    let grown = 2 * SEGMENT..4 * SEGMENT;
    assert_eq!(
        w.core.host_mut().grown.as_slice(),
        std::slice::from_ref(&grown)
    );
    // Slots there are granted once they have pages.
    let (scheduler, _) = w.instance();
    let chunks: Vec<_> = (1..=130).map(chunk).collect();
    let (_, before) = w.grant(scheduler, &chunks[..127]);
    assert!(before.results.iter().all(|r| *r == GRANT_GRANTED));
    let (_, full) = w.grant(scheduler, &chunks[127..129]);
    assert_eq!(full.results, [GRANT_GRANTED, GRANT_NOT_READY]);
    w.populate();
    let (_, after) = w.grant(scheduler, &chunks[128..]);
    assert_eq!(after.results, [GRANT_GRANTED; 2]);
}

#[test]
fn a_size_beyond_the_reserved_file_waits_for_a_restart() {
    let mut w = growable();
    assert_eq!(ask_for(&mut w, 64 * MI), ["memory.size"]);
    assert_eq!((capacity(&w), waits(&w)), (8 * MI, String::new()));
    assert_eq!(ask_for(&mut w, 32 * MI), [""; 0]);
    assert_eq!(capacity(&w), 32 * MI);
}

#[test]
fn it_shrinks_from_its_end_and_what_lies_there_is_evicted() {
    let mut w = growable();
    let (scheduler, worker) = w.instance();
    let chunks: Vec<_> = (1..=100).map(chunk).collect();
    let refs = w.store(scheduler, worker, &chunks);
    let shared = |w: &World, row| w.core.engine().unwrap().table().row(row);
    let generation = |w: &World| shared(w, SEGMENT).generation;
    let before = generation(&w);
    assert!(refs.iter().any(|r| r.slot.get() == SEGMENT));
    assert!(ask_for(&mut w, 4 * MI).is_empty());
    w.pass(100);
    assert_eq!((capacity(&w), waits(&w)), (4 * MI, String::new()));
    let at_end = SEGMENT..2 * SEGMENT;
    let released = &w.core.host_mut().released;
    assert_eq!(released.as_slice(), std::slice::from_ref(&at_end));
    assert!(at_end.clone().all(|row| shared(&w, row).state == FREE));
    // A load that copies such a slot now must fail: its pages are gone.
    assert!(generation(&w) > before);
    let kept = w.core.engine().unwrap().usage().chunks;
    assert_eq!(kept, u64::from(SEGMENT));
    // The same rows serve again.
    ask_for(&mut w, 8 * MI);
    w.populate();
    let again = w.store(scheduler, worker, &[chunk(kept as u8 + 1)]);
    assert!(again[0].slot.get() >= SEGMENT);
}

#[test]
fn a_slot_in_use_holds_the_end_back_and_nothing_new_is_stored_behind_it() {
    let mut w = growable();
    let (scheduler, worker) = w.instance();
    let chunks: Vec<_> = (1..=100).map(chunk).collect();
    let (_, granted) = w.grant(scheduler, &chunks);
    ask_for(&mut w, 4 * MI);
    assert_eq!(capacity(&w), 8 * MI);
    assert!(waits(&w).contains("being written"), "{}", waits(&w));
    assert!(w.core.host_mut().released.is_empty());
    let (_, more) = w.grant(scheduler, &[chunk(101)]);
    assert_eq!(more.results, [GRANT_NO_ROOM]);
    w.commit(worker, granted.region, &granted.refs);
    w.digest_all();
    w.pass(1_000);
    assert_eq!((capacity(&w), waits(&w)), (4 * MI, String::new()));
}

#[test]
fn it_is_at_least_a_segment_and_says_so() {
    let mut w = growable();
    assert!(ask_for(&mut w, MI).is_empty());
    w.pass(1_000);
    assert_eq!(capacity(&w), 4 * MI);
    assert!(waits(&w).contains("segments of 4194304"), "{}", waits(&w));
}

#[test]
fn it_stays_while_a_process_maps_it_that_does_not_watch_for_it() {
    let mut w = growable();
    let old = Hello {
        watches_shrinks: false,
        ..hello(Role::Worker, 1, 1)
    };
    w.attach_as(old);
    ask_for(&mut w, 4 * MI);
    assert_eq!(capacity(&w), 8 * MI);
    assert!(waits(&w).contains("older connector"), "{}", waits(&w));
    // One of an earlier boot that has not connected yet holds its lock, too.
    w.core.host_mut().locked = [77].into();
    w.pass(1_000);
    assert_eq!(capacity(&w), 8 * MI);
    w.core.host_mut().lock_file_fails = true;
    w.pass(1_000);
    assert_eq!(capacity(&w), 8 * MI);
    w.core.host_mut().lock_file_fails = false;
    w.core.host_mut().locked.clear();
    w.pass(1_000);
    assert_eq!(capacity(&w), 4 * MI);
}

#[test]
fn a_size_that_is_taken_back_leaves_everything_as_it_was() {
    let mut w = growable();
    let (scheduler, _) = w.instance();
    let chunks: Vec<_> = (1..=100).map(chunk).collect();
    w.grant(scheduler, &chunks);
    ask_for(&mut w, 4 * MI);
    ask_for(&mut w, 8 * MI);
    assert_eq!((capacity(&w), waits(&w)), (8 * MI, String::new()));
    let (_, more) = w.grant(scheduler, &[chunk(101)]);
    assert_eq!(more.results, [GRANT_GRANTED]);
    let logged = |o: &Output| {
        matches!(
            o,
            Output::Log {
                event: "ArenaResized",
                ..
            }
        )
    };
    assert!(!w.out.iter().any(logged));
}

#[test]
fn rows_that_another_process_wrote_behind_the_end_are_never_used() {
    let mut w = growable();
    ask_for(&mut w, 4 * MI);
    let mut table = w.core.engine().unwrap().table().clone();
    table.set_state(SEGMENT + 3, crate::table::GRANTED);
    let mut w = World::configured_with(config(8 * MI), table);
    w.pass(1_000);
    w.populate();
    assert_eq!(capacity(&w), 8 * MI);
    let (scheduler, _) = w.instance();
    let chunks: Vec<_> = (1..=100).map(chunk).collect();
    let (_, granted) = w.grant(scheduler, &chunks);
    let count = granted
        .results
        .iter()
        .filter(|r| **r == GRANT_GRANTED)
        .count();
    assert_eq!(count, SEGMENT as usize);
    assert_eq!(
        w.core.engine().unwrap().table().row(SEGMENT + 3).state,
        FREE
    );
    assert_eq!(capacity(&w) / ROW_BYTES, u64::from(2 * SEGMENT));
}

#[test]
fn a_pinned_chunk_at_the_end_keeps_the_chunks_behind_it() {
    let mut w = growable();
    let (scheduler, worker) = w.instance();
    // The first chunk of the prefix gets a slot behind the new end.
    let filler: Vec<_> = (101..=164).map(alone).collect();
    w.store(scheduler, worker, &filler);
    let first = w.store(scheduler, worker, &[chunk(1)])[0];
    assert!(first.slot.get() >= SEGMENT);
    let rest: Vec<_> = (2..=20).map(chunk).collect();
    w.store(scheduler, worker, &rest);
    let chunks = |w: &World| w.core.engine().unwrap().usage().chunks;
    let before = chunks(&w);
    let table = w.core.engine().unwrap().table();
    let key = table.chunk(table.row(first.slot.get()).chunk).key;
    let now = w.now;
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(w.core.pin(now, &[hex], 0), Ok(1));
    ask_for(&mut w, 4 * MI);
    w.pass(5_000);
    assert_eq!((capacity(&w), chunks(&w)), (8 * MI, before));
    assert!(waits(&w).contains("pinned"), "{}", waits(&w));
}

#[test]
fn an_arena_whose_pages_stay_keeps_its_size() {
    let mut w = growable();
    w.core.host_mut().pages_stay = true;
    assert_eq!(ask_for(&mut w, 4 * MI), ["memory.size"]);
    assert_eq!((capacity(&w), waits(&w)), (8 * MI, String::new()));
    // The next engine finds the arena and reads another size.
    let table = w.core.engine().unwrap().table().clone();
    let pod = Pod {
        pages_stay: true,
        ..Pod::default()
    };
    let mut w = World::with(config(4 * MI), pod, Some(table));
    w.populate();
    w.pass(1_000);
    assert_eq!(capacity(&w), 8 * MI);
    assert!(waits(&w).contains("huge pages"), "{}", waits(&w));
}

#[test]
fn a_size_that_the_file_of_an_earlier_boot_cannot_have_is_said() {
    let w = growable();
    let table = w.core.engine().unwrap().table().clone();
    let mut w = World::with(config(64 * MI), Pod::default(), Some(table));
    w.populate();
    w.pass(1_000);
    assert_eq!(capacity(&w), 32 * MI);
    w.pass(1_000);
    assert!(
        waits(&w).contains("33554432 bytes at most"),
        "{}",
        waits(&w)
    );
}
