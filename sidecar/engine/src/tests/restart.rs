//! What a boot makes of what an earlier one had granted.

use super::rig::*;
use crate::Engine;
use crate::config::Config;
use kvcachepool_protocol::message::GRANT_GRANTED;

/// Groups as GRANT maps them: both, and the window's alone.
const BOTH: u32 = 3;
const WINDOW: u32 = 2;

#[test]
fn a_chunk_that_has_all_it_needs_does_not_wait_for_a_slot_of_a_grant_that_was_void() {
    let mut rig = Rig::new(4 << 20, Config::default(), plan(2, true, 64 << 10));
    let (_, first) = rig.grant(&[1], CHUNK_TOKENS, BOTH);
    rig.commit(&first[..1]);
    rig.digest_all();
    // void from here on; the second section's writer has not ended its part
    rig.engine.memory.abort(OWNERS[0], first[2]);
    let (result, second) = rig.grant(&[1], CHUNK_TOKENS, WINDOW);
    assert_eq!((result, second.len()), (GRANT_GRANTED, 1));
    let (table, config) = (rig.engine.table().clone(), rig.engine.memory.config.clone());
    rig.engine = Engine::new(rig.now, table, config, true);
    rig.check();
    assert!(!rig.has(&[1]));
    rig.commit(&second);
    rig.digest_all();
    rig.check();
    assert!(rig.has(&[1]), "and the policy knows it");
    assert_eq!(rig.engine.memory.usage().granted_slots, 1);
    rig.engine.memory.abort(OWNERS[1], first[1]);
    rig.check();
    assert_eq!(rig.engine.memory.usage().granted_slots, 0);
    assert!(rig.has(&[1]));
}
