//! Parses the scheduler's message for an unschedulable pod: whether injection can be the cause. The scheduler names, for each node, the
//! first filter that refused the pod. A node that lacks only what the sidecar requests might accept the pod without it.

/// Resources that a sidecar requests.
const RESOURCES: [&str; 4] = ["memory", "cpu", "ephemeral-storage", "hugepages-"];
/// The scheduler's messages about volumes.
const VOLUMES: [&str; 4] = [
    "persistentvolumeclaim",
    "storageclass",
    "volume",
    "free storage",
];

/// Whether some node refuses the pod only for room or volumes that a sidecar adds. `has_claim`: a volume of the sidecar's tiers
/// comes from a claim.
#[must_use]
pub fn maybe_injection(message: &str, has_claim: bool) -> bool {
    let message = message.split("preemption:").next().unwrap_or_default();
    let Some((nodes, reasons)) = message.split_once(" nodes are available: ") else {
        return has_claim && is_volume(message);
    };
    let nodes = nodes.rsplit('/').next().and_then(|n| n.parse().ok());
    let mut left: i64 = nodes.unwrap_or(1);
    let mut from_injection = false;
    for reason in reasons.trim_end_matches([' ', '.']).split(", ") {
        match reason
            .split_once(' ')
            .and_then(|(n, why)| Some((n.parse::<i64>().ok()?, why)))
        {
            Some((_, why)) if is_from_injection(why, has_claim) => from_injection = true,
            Some((count, _)) => left -= count,
            // A reason of the whole pod, or the rest of a reason that contains a comma.
            None => from_injection |= is_from_injection(reason, has_claim),
        }
    }
    from_injection && left > 0
}

fn is_from_injection(why: &str, has_claim: bool) -> bool {
    let lacks = why.strip_prefix("Insufficient ");
    lacks.is_some_and(|what| RESOURCES.iter().any(|r| what.starts_with(r)))
        || (has_claim && is_volume(why))
}

fn is_volume(why: &str) -> bool {
    let why = why.to_ascii_lowercase();
    VOLUMES.iter().any(|word| why.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_node_that_lacks_only_the_sidecars_requests_might_accept_the_pod_without_it() {
        for (message, expected) in [
            ("0/1 nodes are available: 1 Insufficient memory.", true),
            (
                "0/3 nodes are available: 1 Insufficient memory, 2 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod.",
                true,
            ),
            (
                "0/2 nodes are available: 2 Insufficient hugepages-2Mi.",
                true,
            ),
            // The only node with too little memory has no GPU either.
            (
                "0/2 nodes are available: 1 Insufficient memory, 2 Insufficient nvidia.com/gpu.",
                false,
            ),
            (
                "0/2 nodes are available: 2 node(s) had untolerated taint {a: b}.",
                false,
            ),
            (
                "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
                false,
            ),
            ("0/1 nodes are available: 1 Too many pods.", false),
            ("", false),
        ] {
            assert_eq!(maybe_injection(message, false), expected, "{message}");
        }
    }

    #[test]
    fn volume_failures_may_come_from_injection_if_the_sidecar_has_a_claim() {
        for message in [
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.",
            "0/1 nodes are available: waiting for ephemeral volume controller to create the persistentvolumeclaim \"web-0-kvcachepool-disk\".",
            "0/1 nodes are available: 1 node(s) did not have enough free storage.",
            "storageclass.storage.k8s.io \"none\" not found",
        ] {
            assert!(maybe_injection(message, true), "{message}");
            assert!(!maybe_injection(message, false), "{message}");
        }
    }

    proptest! {
        #[test]
        fn any_message_of_the_scheduler_can_be_parsed(message in ".{0,300}", has_claim: bool) {
            let _result = maybe_injection(&message, has_claim);
        }
    }
}
