//! Any JSON gives a pod that is injected once and for all, or a refusal; never a panic, and never a patch that does not apply.
#![no_main]
// Injection is pure and is built here by itself: the operator's client and TLS would take minutes to build with sanitizers.
#![allow(dead_code, unused_imports)]

#[path = "../../src/api/choices.rs"]
mod api;
#[path = "../../src/forms.rs"]
mod forms;
#[path = "../../src/inject/mod.rs"]
mod inject;
#[path = "../../src/names.rs"]
mod names;
#[path = "../../src/reasons.rs"]
mod reasons;

use api::ExistingConnector;
use inject::{Outcome, Settings};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fn applied(pod: &Value, patch: &json_patch::Patch) -> Value {
    let mut after = pod.clone();
    json_patch::patch(&mut after, patch).expect("a patch applies");
    after
}

fuzz_target!(|text: &[u8]| {
    let Ok(pod) = serde_json::from_slice::<Value>(text) else {
        return;
    };
    let mut settings = Settings::new("llama", "serving", "i", 1 << 30);
    for existing in [ExistingConnector::Refuse, ExistingConnector::Compose] {
        settings.existing_connector = existing;
        match inject::inject(&pod, &settings) {
            Outcome::Unchanged => {}
            Outcome::Inject { patch, .. } => {
                let after = applied(&pod, &patch);
                assert_eq!(inject::inject(&after, &settings), Outcome::Unchanged);
            }
            Outcome::Refuse { reason, patch, .. } => {
                let after = applied(&pod, &patch);
                assert_eq!(after.get("spec"), pod.get("spec"));
                match inject::inject(&after, &settings) {
                    Outcome::Refuse {
                        reason: again,
                        patch,
                        ..
                    } => {
                        assert_eq!((again, patch.is_empty()), (reason, true));
                    }
                    other => panic!("{reason}, then {other:?}"),
                }
            }
        }
    }
});
