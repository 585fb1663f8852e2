//! Decides about a pod: finds its pool and calls `inject`.

use super::pools::{Found, Pools, Requester};
use super::review::Review;
use super::router::{Decide, Decision};
use crate::inject::{
    Outcome, Reason, Shortfall, inject, is_injected, leader_worker_set, refuse, requested_pool,
};
use crate::names;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tracing::{error, info};

/// Decides with the pools of the cluster.
pub struct Decider {
    pools: Pools,
}

impl Decider {
    pub fn new(pools: Pools) -> Self {
        Self { pools }
    }
}

impl Decide for Decider {
    async fn decide(&self, review: Review) -> Decision {
        let Some(pod) = review.object else {
            return Decision::skipped("NoObject");
        };
        let Some(name) = requested_pool(&pod).map(str::to_owned) else {
            return Decision::skipped("NoPool");
        };
        let group = leader_worker_set(&pod).map(names::group_uid);
        let owners: Vec<&str> = group.as_deref().into_iter().chain([owner(&pod)]).collect();
        let requester = Requester {
            dry_run: review.dry_run,
            injected: is_injected(&pod),
            owners: &owners,
        };
        let outcome = match self.pools.find(&review.namespace, &name, requester).await {
            Found::Pool(settings) => guarded(&pod, || inject(&pod, &settings)),
            Found::Refused(reason, message) => refuse(&pod, reason, &message),
            Found::Unread => return Decision::skipped("PoolUnread"),
        };
        // Refused pods, pods that already have a sidecar, and dry runs are not probes.
        let stored = !review.dry_run && !requester.injected;
        if stored && matches!(outcome, Outcome::Inject { .. }) {
            self.pools
                .injected(&review.namespace, &name, requester.owners);
        }
        decision(outcome)
    }
}

/// Uid of the pod's controller; empty without one.
fn owner(pod: &Value) -> &str {
    let owners = pod.pointer("/metadata/ownerReferences");
    let mut owners = owners.and_then(Value::as_array).into_iter().flatten();
    let controller = owners.find(|o| o.get("controller") == Some(&Value::Bool(true)));
    let uid = controller.and_then(|o| o.get("uid")?.as_str());
    uid.unwrap_or_default()
}

/// A panic in the pure part costs only this pod its cache.
fn guarded(pod: &Value, inject: impl FnOnce() -> Outcome) -> Outcome {
    catch_unwind(AssertUnwindSafe(inject)).unwrap_or_else(|_| {
        error!("injection panicked; the pod starts without a sidecar");
        refuse(
            pod,
            Reason::InjectionBroken,
            "injection panicked; see the operator's log",
        )
    })
}

fn decision(outcome: Outcome) -> Decision {
    match outcome {
        Outcome::Unchanged => Decision {
            result: "Unchanged",
            reason: "",
            patch: None,
        },
        Outcome::Inject {
            patch, shortfall, ..
        } => Decision {
            result: "Injected",
            reason: shortfall.map_or("", Shortfall::name),
            patch: Some(patch),
        },
        Outcome::Refuse {
            reason,
            message,
            patch,
        } => {
            info!(
                reason = reason.name(),
                detail = message,
                "pod starts without a sidecar"
            );
            Decision {
                result: "Refused",
                reason: reason.name(),
                patch: Some(patch),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Owner;
    use serde_json::json;

    #[test]
    fn a_pod_of_a_group_belongs_to_its_leader_worker_set_too() {
        let pod = json!({"metadata": {
            "labels": {names::LEADER_WORKER_SET: "web"},
            "ownerReferences": [{"kind": "Node", "uid": "n"}, {"kind": "StatefulSet", "uid": "s", "controller": true}],
        }});
        let group = |pod| leader_worker_set(pod).map(names::group_uid);
        assert_eq!(owner(&pod), "s");
        assert_eq!(
            group(&pod),
            Some(Owner::leader_worker_set("web").uid.into())
        );
        assert_eq!((owner(&json!({})), group(&json!({}))), ("", None));
    }
}
