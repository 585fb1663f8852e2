//! Numbers of pods.

use super::Observation;
use crate::api::{Pods, Skipped, Version};
use crate::pods::{Pod, missed};
use std::collections::BTreeMap;

/// Maximum reasons and versions in a status.
const LISTED_MAX: usize = 10;
/// Longest reason in characters. Anybody can write the annotation of a pod.
const REASON_CHARS_MAX: usize = 63;

/// The counted numbers.
#[derive(Debug, Default)]
pub struct Counts {
    pub pods: Pods,
    pub skipped: Vec<Skipped>,
    pub versions: Vec<Version>,
    /// Injected pods whose sidecar runs.
    pub running: i64,
    /// Injected pods whose sidecar cannot start.
    pub failing: Vec<std::sync::Arc<Pod>>,
}

pub fn count(observed: &Observation<'_>) -> Counts {
    let active = || observed.pods.iter().filter(|p| p.is_active());
    let injected = || active().filter(|p| p.sidecar.is_some());
    let mut skipped: BTreeMap<&str, Skipped> = BTreeMap::new();
    for pod in active() {
        let Some(reason) = pod.refusal() else {
            continue;
        };
        let entry = skipped.entry(reason).or_insert_with(|| Skipped {
            reason: reason.chars().take(REASON_CHARS_MAX).collect(),
            count: 0,
            example_pod: pod.name.to_string(),
        });
        entry.count += 1;
    }
    let mut counts = Counts {
        pods: Pods {
            matched: size(active().count()),
            injected: size(injected().count()),
            attached: i64::from(observed.usage.attached),
            skipped: skipped.values().map(|s| s.count).sum(),
            missed: size(missed_pods(observed)),
            outdated: size(injected().filter(|p| outdated(p, observed.hash)).count()),
        },
        skipped: skipped.into_values().collect(),
        versions: versions(observed),
        running: size(injected().filter(|p| p.address().is_some()).count()),
        failing: injected()
            .filter(|p| observed.faults.of(p).is_some())
            .cloned()
            .collect(),
    };
    counts.skipped.sort_by_key(|s| std::cmp::Reverse(s.count));
    counts.skipped.truncate(LISTED_MAX);
    counts
}

fn missed_pods(observed: &Observation<'_>) -> usize {
    use crate::api::Mode;
    let Some(created) = &observed.pool.metadata.creation_timestamp else {
        return 0;
    };
    match observed.pool.spec.injection.mode {
        Mode::Enabled => missed(observed.pods, created.0).count(),
        Mode::Disabled => 0,
    }
}

fn outdated(pod: &Pod, hash: &str) -> bool {
    !hash.is_empty() && pod.hash() != hash
}

fn versions(observed: &Observation<'_>) -> Vec<Version> {
    let mut versions: Vec<Version> = observed
        .usage
        .versions
        .iter()
        .map(|(version, pods)| Version {
            version: version.chars().take(REASON_CHARS_MAX).collect(),
            pods: i64::from(*pods),
        })
        .collect();
    versions.sort_by_key(|v| std::cmp::Reverse(v.pods));
    versions.truncate(LISTED_MAX);
    versions
}

pub fn size(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
