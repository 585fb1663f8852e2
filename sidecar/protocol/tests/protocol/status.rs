//! The status JSON: readers and writers of different versions understand each other.

use kvcachepool_protocol::message::Role;
use kvcachepool_protocol::status::*;
use proptest::prelude::*;
use serde_json::json;

#[test]
fn the_names_on_the_wire_are_what_they_were() {
    let status = Status {
        state: State::Degraded,
        reasons: vec![Reason {
            code: "ArenaTooLarge".into(),
            message: "write a smaller memory.size".into(),
        }],
        tiers: vec![Tier {
            name: "memory".into(),
            ..Tier::default()
        }],
        ..Status::default()
    };
    let text = serde_json::to_value(&status).unwrap();
    assert_eq!(text["state"], "degraded");
    assert_eq!(text["reasons"][0]["code"], "ArenaTooLarge");
    assert_eq!(text["tiers"][0]["state"], "starting");
    assert_eq!(text["memory"]["slots"]["quarantined"], 0);
    assert_eq!(text["memory"]["region"], json!(null));
    assert_eq!(text["counters"]["requested_tokens"], 0);
}

#[test]
fn absent_fields_take_their_default_and_unknown_ones_are_ignored() {
    assert_eq!(
        serde_json::from_str::<Status>("{}").unwrap(),
        Status::default()
    );
    let later = json!({
        "version": "9.0.0",
        "invented_later": [1],
        "sessions": [{"id": 1, "role": "worker", "invented_later": {}}],
    });
    let status: Status = serde_json::from_value(later).unwrap();
    assert_eq!(status.version, "9.0.0");
    assert_eq!(status.sessions[0].role, Role::Worker);
    assert!(!status.sessions[0].ready);
}

proptest! {
    #[test]
    fn any_status_reads_back(boot: u64, lock: Option<u32>, region: Option<u64>, instance in "\\PC{0,20}", tokens: u64) {
        let session = json!({"id": boot, "role": "scheduler", "lock": lock, "instance": instance});
        let mut status = Status { boot, sessions: vec![serde_json::from_value(session).unwrap()], ..Status::default() };
        status.memory.region = region;
        status.counters.hit_tokens.insert(instance, tokens);
        let text = serde_json::to_string(&status).unwrap();
        prop_assert_eq!(serde_json::from_str::<Status>(&text).unwrap(), status);
    }

    #[test]
    fn any_text_is_a_status_or_an_error(text in "\\PC{0,100}") {
        let _ = serde_json::from_str::<Status>(&text);
    }
}
