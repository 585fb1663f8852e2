//! Pods by their owner.

use super::super::pod::{Owner, Pod};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

pub(super) fn by_owner(pods: &[Arc<Pod>]) -> BTreeMap<&str, Vec<&Arc<Pod>>> {
    let mut groups: BTreeMap<&str, Vec<&Arc<Pod>>> = BTreeMap::new();
    for pod in pods {
        groups.entry(owner_uid(pod)).or_default().push(pod);
    }
    groups
}

/// The youngest pod of each owner. Of finished pods only the youngest shows the current state.
pub(super) fn newest(pods: &[Arc<Pod>]) -> HashSet<Box<str>> {
    let mut newest: HashMap<&str, &Arc<Pod>> = HashMap::new();
    for pod in pods.iter().filter(|p| !owner_uid(p).is_empty()) {
        let known = newest.entry(owner_uid(pod)).or_insert(pod);
        if pod.created > known.created {
            *known = pod;
        }
    }
    newest.values().map(|p| p.uid.clone()).collect()
}

/// Whose pods are paused together: all groups of a LeaderWorkerSet, otherwise those of a controller.
pub(super) fn owner(pod: &Pod) -> Option<&Owner> {
    pod.group.as_deref().or(pod.owner.as_ref())
}

pub(super) fn owner_uid(pod: &Pod) -> &str {
    owner(pod).map_or("", |o| &o.uid)
}
