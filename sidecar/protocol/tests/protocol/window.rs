//! The flag page: what a worker writes is read, and no bytes at all lead out of arena or stage.

use kvcachepool_protocol::window::*;
use proptest::prelude::*;

const ARENA: u64 = 4 << 20;
const STAGE: u64 = 1 << 20;

fn filled(sequence: u64) -> Word {
    Word {
        state: State::Filled,
        reason: Reason::None,
        sequence,
    }
}

fn run(slot: u32, offset: u32, bytes: u32) -> Run {
    Run {
        slot,
        generation: 3,
        offset,
        bytes,
    }
}

#[test]
fn a_written_record_is_read_with_the_places_of_its_runs() {
    let runs = [run(0, 0, 300), run(3, 4096, 1), run(63, 0, 65_536)];
    let order = decode(filled(5), &encode(&runs), ARENA, STAGE).unwrap();
    assert_eq!((order.direction, order.sequence), (Direction::Store, 5));
    let places: Vec<u64> = order.runs.iter().map(|(at, _)| *at).collect();
    assert_eq!(places, [0, 512, 768]);
    assert_eq!(order.runs.iter().map(|(_, r)| *r).collect::<Vec<_>>(), runs);
}

#[test]
fn what_leads_out_of_arena_or_stage_is_refused_by_name() {
    let refused = |runs: &[Run]| decode(filled(1), &encode(runs), ARENA, STAGE).unwrap_err();
    assert_eq!(refused(&[]), BadRecord::Runs(0));
    assert_eq!(refused(&[run(0, 0, 0)]), BadRecord::OutsideArena(0));
    assert_eq!(refused(&[run(63, 1, 65_536)]), BadRecord::OutsideArena(0));
    assert_eq!(
        refused(&[run(u32::MAX, u32::MAX, u32::MAX)]),
        BadRecord::OutsideArena(0)
    );
    let half = run(0, 0, STAGE as u32 / 2 + 1);
    assert_eq!(refused(&[half, half]), BadRecord::OutsideStage(1));
    let mut cut = encode(&[run(0, 0, 1)]);
    cut.pop();
    assert_eq!(
        decode(filled(1), &cut, ARENA, STAGE),
        Err(BadRecord::Runs(1))
    );
    let moved = Word {
        state: State::Moved,
        ..filled(1)
    };
    let record = encode(&[run(0, 0, 1)]);
    assert_eq!(
        decode(moved, &record, ARENA, STAGE),
        Err(BadRecord::NotHandedOver)
    );
    let most = vec![run(0, 0, 1); RUNS_MAX as usize];
    assert!(decode(filled(1), &encode(&most), ARENA, STAGE).is_ok());
    assert_eq!(encode(&most).len() as u64, RECORD_BYTES);
}

proptest! {
    #[test]
    fn any_bytes_give_runs_within_bounds_and_apart_or_an_error(
        word in any::<u64>(),
        mut record in proptest::collection::vec(any::<u8>(), 0..512),
        count in 0u32..40,
        small in any::<bool>(),
    ) {
        if let Some(field) = record.get_mut(8..12) {
            field.copy_from_slice(&count.to_le_bytes());
        }
        if small {
            // numbers that fit now and then: the upper bytes of every field are zero
            for field in record.iter_mut().skip(RUNS_AT).collect::<Vec<_>>().chunks_mut(4) {
                for byte in field.iter_mut().skip(2) {
                    **byte = 0;
                }
            }
        }
        let Some(word) = Word::decode(word & !0xff | 1) else { return Ok(()) };
        prop_assert_eq!(Word::decode(word.encode()), Some(word));
        if let Ok(order) = decode(word, &record, ARENA, STAGE) {
            let mut end = 0;
            for (at, run) in &order.runs {
                prop_assert!(*at >= end && at % RUN_ALIGN == 0);
                end = at + u64::from(run.bytes);
                prop_assert!(run.bytes > 0 && end <= STAGE);
                prop_assert!(run.arena_offset() + u64::from(run.bytes) <= ARENA);
            }
        }
    }
}
