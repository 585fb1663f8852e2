//! Tracks failing sidecars without flapping: a crashing one runs for a few seconds in between, and one that is being updated is down for a
//! moment.

use super::breaker::{STEADY, may_fall_back};
use super::pod::{Fault, Pod};
use jiff::{SignedDuration, Timestamp};
use std::collections::HashMap;
use std::sync::Arc;

/// Faults by uid of the pod, each kept until its sidecar has run for a while.
#[derive(Debug, Default)]
pub struct Faults(HashMap<Box<str>, StoredFault>);

#[derive(Debug)]
struct StoredFault {
    reason: Box<str>,
    message: Box<str>,
}

impl Faults {
    /// Checks the pool's pods, except those that are being updated. Returns the wait until the next check if nothing changes before.
    pub fn update(
        &mut self,
        pods: &[Arc<Pod>],
        updating: impl Fn(&Pod) -> bool,
        now: Timestamp,
    ) -> Option<SignedDuration> {
        let mut before = std::mem::take(&mut self.0);
        let mut again: Option<SignedDuration> = None;
        for pod in pods.iter().filter(|p| p.is_active() && !updating(p)) {
            let stored = before.remove(&pod.uid);
            let stored = match pod.fault() {
                Some(Fault { reason, message }) => Some(StoredFault {
                    reason: reason.into(),
                    message: message.into(),
                }),
                None => stored.filter(|_| may_fall_back(pod, now)),
            };
            let Some(stored) = stored else { continue };
            if let Some(since) = pod.sidecar.as_ref().and_then(|s| s.state.since()) {
                let wait = STEADY - now.duration_since(since);
                again = again.into_iter().chain([wait]).min();
            }
            self.0.insert(pod.uid.clone(), stored);
        }
        again.filter(|wait| wait.is_positive())
    }

    /// Why this pod's sidecar fails, if it does.
    #[must_use]
    pub fn of(&self, pod: &Pod) -> Option<Fault<'_>> {
        self.0.get(&pod.uid).map(|stored| Fault {
            reason: &stored.reason,
            message: &stored.message,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::SidecarState;
    use crate::pods::tests::{at, injected, waiting};

    fn running(since: i64) -> Vec<Arc<Pod>> {
        vec![Arc::new(injected(
            "a",
            SidecarState::Running { since: at(since) },
        ))]
    }

    fn crashed() -> Vec<Arc<Pod>> {
        vec![Arc::new(waiting("a", "CrashLoopBackOff"))]
    }

    #[test]
    fn a_crash_loop_is_one_fault_until_the_sidecar_has_run_for_half_a_minute() {
        let mut faults = Faults::default();
        let none = |_: &Pod| false;
        faults.update(&running(0), none, at(1));
        assert_eq!(faults.of(&running(0)[0]), None);
        faults.update(&crashed(), none, at(5));
        let wait = faults.update(&running(20), none, at(22));
        assert_eq!(
            faults.of(&running(0)[0]).unwrap().reason,
            "CrashLoopBackOff"
        );
        assert_eq!(wait, Some(SignedDuration::from_secs(28)));
        faults.update(&running(20), none, at(50));
        assert_eq!(faults.of(&running(0)[0]), None);
    }

    #[test]
    fn a_sidecar_that_is_being_updated_has_no_fault() {
        let mut faults = Faults::default();
        faults.update(&crashed(), |_| true, at(5));
        assert_eq!(faults.of(&crashed()[0]), None);
        faults.update(&crashed(), |_| false, at(65));
        assert!(faults.of(&crashed()[0]).is_some());
    }
}
