//! A connector that writes to the slot table, which it may only read.

use super::rig::*;
use crate::config::Config;
use crate::table::{GRANTED, Row, Table};
use kvcachepool_protocol::message::{CHUNK_READY, GRANT_GRANTED};
use kvcachepool_protocol::refs::{SectionRef, unpack};
use proptest::prelude::*;

fn scribble(rig: &mut Rig, row: Row) {
    let shared = rig.engine.memory.slots.shared_mut();
    for number in 0..shared.geometry().rows {
        shared.set_fields(number, &row);
        shared.set_generation(number, row.generation);
        shared.set_state(number, row.state);
    }
    shared.set_populated_rows(row.length as u32);
}

fn rows() -> impl Strategy<Value = Row> {
    let word = || prop_oneof![0u32..6, any::<u32>()];
    (word(), word(), word(), word(), word(), word(), any::<u64>()).prop_map(
        |(state, generation, owner, slot_rows, chunk, section, length)| Row {
            state,
            generation,
            owner,
            slot_rows,
            chunk,
            section,
            length,
            digest: [state as u8; 16],
            key_prefix: [section as u8; 8],
            kind: 1,
            reserved: [0; 7],
        },
    )
}

proptest! {
    #[test]
    fn whatever_a_connector_writes_to_the_rows_references_and_counts_stay_true(row in rows()) {
        let mut rig = Rig::new(4 << 20, Config::default(), plan(2, false, 16 << 10));
        let mut stored: Vec<SectionRef> = Vec::new();
        for path in [&[1][..], &[1, 2]] {
            let (_, refs) = rig.grant(path, CHUNK_TOKENS, 1);
            rig.commit(&refs);
            rig.digest_all();
            stored.extend(refs);
        }
        let (result, granted) = rig.grant(&[3], CHUNK_TOKENS, 1);
        prop_assert_eq!(result, GRANT_GRANTED);
        let usage = rig.engine.memory.usage();

        scribble(&mut rig, row);
        let (_, answer) = rig.probe("r", &[1, 2]);
        prop_assert_eq!(answer.states, [CHUNK_READY; 2]);
        prop_assert_eq!(&unpack(&answer.refs).unwrap(), &stored);
        rig.engine.release(rig.now, 1, "r");
        prop_assert_eq!(rig.engine.memory.usage(), usage);

        rig.commit(&granted);
        rig.digest_all();
        prop_assert!(rig.has(&[3]));
        for path in [&[4][..], &[4, 4], &[5]] {
            prop_assert!(rig.store(path));
        }
        rig.now.mono_ms += 60_001;
        rig.read(&[1, 2]);
        rig.digest_all();
        prop_assert_eq!(rig.engine.stats().corrupt_chunks, 0);
        prop_assert_eq!(rig.engine.check_own(), Ok(()));
        rig.engine.clear();
        prop_assert_eq!(rig.engine.memory.usage().used_bytes, 0);
        prop_assert_eq!(rig.engine.check_own(), Ok(()));
    }
}

#[test]
fn a_slot_that_swallows_a_living_writers_is_not_believed_at_the_start() {
    let mut rig = Rig::new(8 << 20, Config::default(), plan(1, false, 16 << 10));
    rig.store(&[1]);
    let (_, answer) = rig.probe("r", &[1]);
    let outer = unpack(&answer.refs).unwrap()[0].slot.get();
    let (_, granted) = rig.grant(&[2], CHUNK_TOKENS, 1);
    let inner = granted[0].slot.get();
    assert!((outer + 1..outer + 16).contains(&inner));
    let mut table = rig.engine.table().clone();
    let row = table.row(outer);
    let wide = Row {
        slot_rows: 16,
        ..row
    };
    table.set_fields(outer, &wide);

    rig.engine = crate::Engine::new(rig.now, table, Config::default(), false);
    rig.digest_all();
    assert!(!rig.has(&[1]));
    assert_eq!(rig.engine.table().row(inner).state, GRANTED);
    for n in 10..100 {
        let (_, others) = rig.grant(&[n], CHUNK_TOKENS, 1);
        assert!(others.iter().all(|r| r.slot.get() != inner));
    }
    rig.commit(&granted);
    rig.digest_all();
    assert!(rig.has(&[2]));
}
