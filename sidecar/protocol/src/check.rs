//! The JSON of `kvcachepool-sidecar check` and `kvcachepool-sidecar purge`, which `kubectl kvcachepool` reads out of a pod's log. Fields
//! are only ever added; readers ignore what they do not know, and absent fields take their default.

use serde::{Deserialize, Serialize};

/// What became of a look at every tier below memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// All of them can be used.
    pub ready: bool,
    /// The tiers, the nearest first.
    pub tiers: Vec<Tier>,
}

/// One tier.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Tier {
    /// Its name: `disk`, `redis` or `s3`.
    pub tier: String,
    /// Where it is; without anything that is secret.
    pub place: String,
    /// It can be used.
    pub ready: bool,
    /// Name of the error; empty = there is none.
    pub reason: String,
    /// For people: what is wrong and what to do.
    pub message: String,
}

impl Report {
    /// Of these tiers.
    pub fn of(tiers: Vec<Tier>) -> Self {
        Self {
            ready: tiers.iter().all(|tier| tier.ready),
            tiers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_another_version_is_read_as_far_as_it_is_known() {
        let text = r#"{"ready": false, "later": 1, "tiers": [{"tier": "s3", "reason": "Denied"}]}"#;
        let report: Report = serde_json::from_str(text).unwrap();
        let tier = Tier {
            tier: "s3".into(),
            reason: "Denied".into(),
            ..Tier::default()
        };
        assert_eq!(report, Report::of(vec![tier]));
    }

    #[test]
    fn all_tiers_have_to_be_ready() {
        let tier = |ready| Tier {
            ready,
            ..Tier::default()
        };
        assert!(Report::of(vec![]).ready);
        assert!(Report::of(vec![tier(true), tier(true)]).ready);
        assert!(!Report::of(vec![tier(true), tier(false)]).ready);
    }
}
