//! What is compared, and for whom.

use super::rig::*;
use crate::engine::config::{Config, Verify};
use crate::engine::{Action, Engine};
use kvcachepool_protocol::message::{CHUNK_PENDING, CHUNK_READY};

/// One chunk of one section, stored some time ago; every question waits for a check.
fn stored() -> Rig {
    let config = Config {
        verify: Verify::Always,
        ..Config::default()
    };
    let mut rig = Rig::new(4 << 20, config, plan(1, false, 16 << 10));
    assert!(rig.store(&[1]));
    rig.now.mono_ms += 100;
    rig
}

/// Asks for the chunk, which must be checked first.
fn ask(rig: &mut Rig, request: &str) {
    assert_eq!(rig.probe(request, &[1]).1.states, [CHUNK_PENDING]);
}

/// Digests that are asked for, and how many questions were answered; each of them must find the chunk.
fn actions(rig: &mut Rig) -> (Vec<Action>, usize) {
    let (digests, answers): (Vec<_>, Vec<_>) = rig
        .engine
        .take_actions()
        .into_iter()
        .partition(|action| matches!(action, Action::Digest { .. }));
    for answer in &answers {
        if let Action::ProbeDone { probe } = answer {
            let (_, _, answer) = rig.engine.final_answer(rig.now, *probe).unwrap();
            assert_eq!(answer.states, [CHUNK_READY]);
        }
    }
    rig.audit();
    (digests, answers.len())
}

#[test]
fn who_asks_while_a_check_is_under_way_waits_for_one_that_began_later() {
    let mut rig = stored();
    ask(&mut rig, "first");
    let (checks, _) = actions(&mut rig);
    rig.now.mono_ms += 10;
    ask(&mut rig, "second");
    assert_eq!(actions(&mut rig), (vec![], 0), "one at a time");
    rig.now.mono_ms += 10;
    rig.end_digest(checks[0]);
    let (again, answered) = actions(&mut rig);
    assert_eq!((again.len(), answered), (1, 1));
    ask(&mut rig, "third");
    rig.now.mono_ms += 10;
    rig.end_digest(again[0]);
    assert_eq!(actions(&mut rig), (vec![], 2));
}

#[test]
fn a_digest_of_an_earlier_check_ends_no_later_one() {
    let mut rig = stored();
    let (table, config) = (rig.engine.table().clone(), rig.engine.config.clone());
    rig.engine = Engine::new(rig.now, table, config, false);
    let (swept, _) = actions(&mut rig);
    ask(&mut rig, "first");
    let (urgent, _) = actions(&mut rig);
    assert_eq!(
        (swept.len(), urgent.len()),
        (1, 1),
        "two digests of one slot"
    );
    rig.end_digest(swept[0]);
    assert_eq!(actions(&mut rig), (vec![], 1));
    rig.now.mono_ms += 10;
    ask(&mut rig, "second");
    let (later, _) = actions(&mut rig);
    rig.end_digest(urgent[0]);
    assert_eq!(actions(&mut rig), (vec![], 0));
    rig.end_digest(later[0]);
    assert_eq!(actions(&mut rig), (vec![], 1));
}
