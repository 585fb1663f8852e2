//! The JSON output of `kvcachepool-sidecar check` and `kvcachepool-sidecar purge`, which `kubectl kvcachepool` reads from a pod's log.
//! Fields are only ever added. Readers ignore unknown fields, and absent fields take their default.

use serde::{Deserialize, Serialize};

/// The result of a check of every lower tier.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Every tier can be used.
    pub ready: bool,
    /// The lower tiers, the fastest first.
    pub tiers: Vec<Tier>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Tier {
    /// `disk`, `redis`, `filesystem` or `s3`.
    pub tier: String,
    /// Address of the tier, without secrets.
    pub place: String,
    /// The tier can be used.
    pub ready: bool,
    /// Name of the error. Empty if the tier is ready.
    pub reason: String,
    /// What is wrong and what to do.
    pub message: String,
}

impl Report {
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
