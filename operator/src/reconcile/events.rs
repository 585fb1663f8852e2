//! Events on pools and on the controllers of pods. A warning that stays true is published once an hour, not in every pass.

use crate::names;
use crate::pods::{Owner, Pod};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event as KubeEvent, EventType, Recorder, Reporter};
use parking_lot::Mutex;
use std::collections::HashMap;
use tracing::warn;

/// The API server takes 1024 bytes of a note.
const NOTE_BYTES_MAX: usize = 1000;
/// A warning is not published again for this long.
const ONCE_IN: SignedDuration = SignedDuration::from_hours(1);
/// Warnings that are remembered as published.
const PUBLISHED_MAX: usize = 10_000;

/// How much an event matters, and how often it is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// As it should be.
    Normal,
    /// Somebody should look.
    Warning,
    /// The same, but at most once an hour for the same object and reason: it may stay true.
    WarningOnce,
}

/// An event to publish.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The object that it is about.
    pub about: ObjectReference,
    pub weight: Weight,
    pub action: &'static str,
    pub reason: String,
    pub note: String,
}

impl Event {
    pub fn new(
        about: &ObjectReference,
        weight: Weight,
        action: &'static str,
        reason: &str,
        note: impl Into<String>,
    ) -> Self {
        Self {
            about: about.clone(),
            weight,
            action,
            reason: reason.to_owned(),
            note: note.into(),
        }
    }
}

/// Publishes events.
pub struct Events {
    recorder: Recorder,
    published: Published,
}

/// When a warning was published, by uid of the object and reason.
#[derive(Default)]
struct Published(Mutex<HashMap<(String, String), Timestamp>>);

impl Events {
    /// In the name of this replica.
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

    /// Publishes an event. One that cannot be written is logged: events are a courtesy, no work waits for them.
    pub async fn publish(&self, event: &Event) {
        let Event { about, reason, .. } = event;
        if event.weight == Weight::WarningOnce {
            let uid = about.uid.clone().unwrap_or_default();
            if !self
                .published
                .is_new((uid, reason.clone()), Timestamp::now())
            {
                return;
            }
        }
        let written = KubeEvent {
            type_: match event.weight {
                Weight::Normal => EventType::Normal,
                Weight::Warning | Weight::WarningOnce => EventType::Warning,
            },
            reason: cut(reason, 128),
            note: Some(cut(&event.note, NOTE_BYTES_MAX)),
            action: event.action.to_owned(),
            secondary: None,
        };
        if let Err(e) = self.recorder.publish(&written, about).await {
            warn!(error = %e, reason, about = ?about.name, "event not written");
        }
    }
}

impl Published {
    fn is_new(&self, key: (String, String), now: Timestamp) -> bool {
        let mut published = self.0.lock();
        if published
            .get(&key)
            .is_some_and(|at| now.duration_since(*at) < ONCE_IN)
        {
            return false;
        }
        if published.len() >= PUBLISHED_MAX {
            published.retain(|_, at| now.duration_since(*at) < ONCE_IN);
        }
        // Still full: rather publish twice than remember without bound.
        if published.len() < PUBLISHED_MAX {
            published.insert(key, now);
        }
        true
    }
}

/// What an event about a pod is attached to: its controller, which outlives it; itself if it has none.
pub fn owner(pod: &Pod) -> ObjectReference {
    match &pod.owner {
        Some(owner) => of_owner(owner, &pod.namespace),
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

/// A controller of pods.
pub fn of_owner(owner: &Owner, namespace: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(owner.api_version.to_string()),
        kind: Some(owner.kind.to_string()),
        name: Some(owner.name.to_string()),
        uid: Some(owner.uid.to_string()),
        namespace: Some(namespace.to_owned()),
        ..ObjectReference::default()
    }
}

fn cut(text: &str, bytes: usize) -> String {
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
        assert!(published.is_new(key("A"), at(0)));
        assert!(!published.is_new(key("A"), at(3599)));
        assert!(published.is_new(key("B"), at(1)));
        assert!(published.is_new(key("A"), at(3600)));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let published = Published::default();
        for i in 0..PUBLISHED_MAX + 5 {
            assert!(published.is_new((i.to_string(), "A".to_owned()), at(0)));
        }
        assert_eq!(published.0.lock().len(), PUBLISHED_MAX);
        assert!(published.is_new(("later".to_owned(), "A".to_owned()), at(4000)));
        assert_eq!(published.0.lock().len(), 1);
    }

    #[test]
    fn events_of_a_pod_go_to_its_controller() {
        let mut pod = pod("a");
        assert_eq!(owner(&pod).kind.as_deref(), Some("ReplicaSet"));
        pod.owner = None;
        assert_eq!(owner(&pod).kind.as_deref(), Some("Pod"));
    }

    #[test]
    fn a_note_is_cut_between_characters() {
        assert_eq!(cut("aää", 2), "a");
        assert_eq!(cut(&"ä".repeat(900), NOTE_BYTES_MAX).len(), 1000);
    }
}
