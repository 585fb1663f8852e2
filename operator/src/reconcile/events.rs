//! Events on pools and on the controllers of pods. A persistent warning is published once an hour, not in every pass.

use crate::names;
use crate::pods::{Owner, Pod};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event as KubeEvent, EventType, Recorder, Reporter};
use parking_lot::Mutex;
use std::collections::HashMap;
use tracing::warn;

/// The API server allows 1024 bytes.
const NOTE_BYTES_MAX: usize = 1000;
/// Minimum time between two publications of the same persistent warning.
const REPEAT_AFTER: SignedDuration = SignedDuration::from_hours(1);
/// Maximum number of remembered warnings.
const PUBLISHED_MAX: usize = 10_000;

/// Type of an event, and how often it is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Normal,
    Warning,
    /// A warning that may persist: published at most once an hour for the same object and reason.
    WarningHourly,
}

/// An event to publish.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub about: ObjectReference,
    pub severity: Severity,
    pub action: &'static str,
    pub reason: String,
    pub note: String,
}

impl Event {
    pub fn new(
        about: &ObjectReference,
        severity: Severity,
        action: &'static str,
        reason: &str,
        note: impl Into<String>,
    ) -> Self {
        Self {
            about: about.clone(),
            severity,
            action,
            reason: reason.to_owned(),
            note: note.into(),
        }
    }
}

pub struct Events {
    recorder: Recorder,
    published: Published,
}

/// Time of the last publication of a warning, by uid of the object and reason.
#[derive(Default)]
struct Published(Mutex<HashMap<(String, String), Timestamp>>);

impl Events {
    pub fn new(client: Client, instance: String) -> Self {
        let reporter = Reporter {
            controller: names::FIELD_MANAGER.to_owned(),
            instance: Some(instance),
        };
        Self {
            recorder: Recorder::new(client, reporter),
            published: Published::default(),
        }
    }

    /// Publishes an event. A failure is only logged, because no work depends on events.
    pub async fn publish(&self, event: &Event) {
        let Event { about, reason, .. } = event;
        if event.severity == Severity::WarningHourly {
            let uid = about.uid.clone().unwrap_or_default();
            if !self
                .published
                .should_publish((uid, reason.clone()), Timestamp::now())
            {
                return;
            }
        }
        let written = KubeEvent {
            type_: match event.severity {
                Severity::Normal => EventType::Normal,
                Severity::Warning | Severity::WarningHourly => EventType::Warning,
            },
            reason: truncate(reason, 128),
            note: Some(truncate(&event.note, NOTE_BYTES_MAX)),
            action: event.action.to_owned(),
            secondary: None,
        };
        if let Err(e) = self.recorder.publish(&written, about).await {
            warn!(reason = %e, event = reason, object = ?about.name, "event could not be written");
        }
    }
}

impl Published {
    fn should_publish(&self, key: (String, String), now: Timestamp) -> bool {
        let mut published = self.0.lock();
        if published
            .get(&key)
            .is_some_and(|at| now.duration_since(*at) < REPEAT_AFTER)
        {
            return false;
        }
        if published.len() >= PUBLISHED_MAX {
            published.retain(|_, at| now.duration_since(*at) < REPEAT_AFTER);
        }
        // If it is still full, publishing twice is better than unbounded memory.
        if published.len() < PUBLISHED_MAX {
            published.insert(key, now);
        }
        true
    }
}

/// The object of an event about a pod: its controller, which outlives the pod, or the pod itself if it has none.
pub fn owner(pod: &Pod) -> ObjectReference {
    match &pod.owner {
        Some(owner) => owner_reference(owner, &pod.namespace),
        None => ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.to_string()),
            uid: Some(pod.uid.to_string()),
            namespace: Some(pod.namespace.to_string()),
            ..ObjectReference::default()
        },
    }
}

pub fn owner_reference(owner: &Owner, namespace: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(owner.api_version.to_string()),
        kind: Some(owner.kind.to_string()),
        name: Some(owner.name.to_string()),
        uid: Some(owner.uid.to_string()),
        namespace: Some(namespace.to_owned()),
        ..ObjectReference::default()
    }
}

fn truncate(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::tests::{at, pod};

    #[test]
    fn the_same_warning_is_published_once_an_hour() {
        let published = Published::default();
        let key = |reason: &str| ("uid".to_owned(), reason.to_owned());
        assert!(published.should_publish(key("A"), at(0)));
        assert!(!published.should_publish(key("A"), at(3599)));
        assert!(published.should_publish(key("B"), at(1)));
        assert!(published.should_publish(key("A"), at(3600)));
    }

    #[test]
    fn remembered_warnings_are_bounded() {
        let published = Published::default();
        for i in 0..PUBLISHED_MAX + 5 {
            assert!(published.should_publish((i.to_string(), "A".to_owned()), at(0)));
        }
        assert_eq!(published.0.lock().len(), PUBLISHED_MAX);
        assert!(published.should_publish(("later".to_owned(), "A".to_owned()), at(4000)));
        assert_eq!(published.0.lock().len(), 1);
    }

    #[test]
    fn events_of_a_pod_are_attached_to_its_controller() {
        let mut pod = pod("a");
        assert_eq!(owner(&pod).kind.as_deref(), Some("ReplicaSet"));
        pod.owner = None;
        assert_eq!(owner(&pod).kind.as_deref(), Some("Pod"));
    }

    #[test]
    fn a_note_is_truncated_at_a_character_boundary() {
        assert_eq!(truncate("aää", 2), "a");
        assert_eq!(truncate(&"ä".repeat(900), NOTE_BYTES_MAX).len(), 1000);
    }
}
