//! Pods for the tests of this folder and of other modules.

use super::pod::Own;
use super::{Amounts, Injection, Memory, Owner, Phase, Pod, Sidecar, SidecarState};
use crate::inject::Verdict;
use jiff::Timestamp;
use kvcachepool_protocol::config::Config;

/// A second on the tests' clock.
pub fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_020 + second).unwrap()
}

/// A ready pod of pool `n/p`, created at second 0, owned by a ReplicaSet, without sidecar and annotation.
pub fn pod(name: &str) -> Pod {
    Pod {
        name: name.into(),
        namespace: "n".into(),
        uid: name.into(),
        pool: "p".into(),
        created: at(0),
        deleting: false,
        phase: Phase::Running,
        ready: true,
        ip: Some([10, 0, 0, 1].into()),
        owner: Some(Owner {
            api_version: "apps/v1".into(),
            kind: "ReplicaSet".into(),
            name: "web".into(),
            uid: "r".into(),
        }),
        group: None,
        injection: None,
        config_generation: None,
        memory: None,
        sidecar: None,
        image_change: None,
        waits: None,
        own: Box::default(),
        disrupted: false,
    }
}

/// vLLM's container in this state, with a readiness probe.
pub fn engine(state: SidecarState) -> Own {
    Own {
        name: "vllm".into(),
        state,
        restarts: 0,
        probed: true,
        path_unknown: false,
        exit: None,
    }
}

/// Such a pod with a sidecar of hash `h` in this state.
pub fn injected(name: &str, state: SidecarState) -> Pod {
    Pod {
        injection: Some(Injection {
            result: Some(Verdict::Injected),
            version: "0.1.0".into(),
            hash: "h".into(),
            ..Injection::default()
        }),
        sidecar: Some(Sidecar {
            image: "i:2".into(),
            image_in_use: "i:2".into(),
            restarts: 0,
            state,
            init: Some(Box::new(SidecarState::Terminated {
                reason: "Completed".into(),
            })),
        }),
        ..pod(name)
    }
}

/// Such a pod with a sidecar that runs since second 1.
pub fn running(name: &str) -> Pod {
    injected(name, SidecarState::Running { since: at(1) })
}

/// Such a pod with a sidecar that waits for this reason.
pub fn waiting(name: &str, reason: &str) -> Pod {
    let state = SidecarState::Waiting {
        reason: reason.into(),
        message: "no such image".into(),
    };
    injected(name, state)
}

/// Such a pod, refused by the webhook for this reason.
pub fn refused(name: &str, reason: &str) -> Pod {
    Pod {
        injection: Some(Injection {
            result: Some(Verdict::Refused),
            reason: reason.into(),
            message: format!("because of {reason}").into(),
            version: "0.1.0".into(),
            hash: "".into(),
        }),
        ..pod(name)
    }
}

/// The memory of a pod that was created with this size in bytes.
pub fn sized(size: u64) -> Memory {
    let footprint = Config::default().footprint();
    let bytes = footprint.container_bytes(size);
    let amounts = Amounts {
        request: bytes,
        limit: bytes,
    };
    Memory {
        size,
        footprint,
        desired: amounts,
        actual: Some(amounts),
        lowered: None,
        refused: None,
    }
}
