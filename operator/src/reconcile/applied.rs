//! Decides which objects of a pool have changed since the operator last applied them. Pure.

use super::children::Child;
use kube::ResourceExt;
use kube::api::DynamicObject;
use std::collections::HashMap;

/// Kind and name of an object within the pool's namespace.
pub type Key = (String, String);

/// The state of an object after the operator last applied it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastApplied {
    /// Hash of the applied fields.
    pub hash: String,
    pub resource_version: String,
}

/// The last applied state of the objects of one pool.
#[derive(Debug, Default)]
pub struct Applied(HashMap<Key, LastApplied>);

/// An object to apply, and its state before.
#[derive(Debug, Clone, PartialEq)]
pub struct Application {
    pub object: DynamicObject,
    pub hash: String,
    last: Option<LastApplied>,
    live: Option<Child>,
}

/// The result of an application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The object did not change.
    Unchanged,
    Applied,
    /// Another writer had changed the object, and the change was reverted.
    Reverted,
}

impl Application {
    /// Whether other fields are applied than the last time, or it is unknown.
    pub fn changes_fields(&self) -> bool {
        self.last.as_ref().is_none_or(|last| last.hash != self.hash)
    }
}

impl Applied {
    /// Returns what to apply, or `None` if the object has not changed since it was last applied. `live` is the object in the watch's
    /// cache; `None` if its kind is not watched.
    pub fn application(
        &mut self,
        object: &DynamicObject,
        live: Option<&Option<Child>>,
        owner_uid: &str,
    ) -> Option<Application> {
        let key = key(object);
        let hash = hash(object);
        let child = live.and_then(Option::as_ref);
        if !self.0.contains_key(&key)
            && let Some(last) = applied_by_earlier_leader(child, owner_uid, &hash)
        {
            self.0.insert(key.clone(), last);
        }
        let last = self.0.get(&key).cloned();
        let is_current = |last: &LastApplied| {
            let version = child.map(|child| &child.resource_version);
            last.hash == hash && (live.is_none() || version == Some(&last.resource_version))
        };
        (!last.as_ref().is_some_and(is_current)).then(|| Application {
            object: object.clone(),
            hash,
            last,
            live: child.cloned(),
        })
    }

    /// Records that an object was applied. `resource_version` and `generation` are those of the response.
    pub fn record(
        &mut self,
        application: Application,
        resource_version: String,
        generation: Option<i64>,
    ) -> Outcome {
        let key = key(&application.object);
        let Application {
            hash, last, live, ..
        } = application;
        let now = LastApplied {
            hash,
            resource_version,
        };
        let outcome = outcome(last.as_ref(), live.as_ref(), &now, generation);
        self.0.insert(key, now);
        outcome
    }

    /// Records that the object was deleted, or belongs to another owner.
    pub fn forget(&mut self, kind: &str, name: &str) {
        self.0.remove(&(kind.to_owned(), name.to_owned()));
    }
}

fn key(object: &DynamicObject) -> Key {
    let kind = object.types.as_ref().map(|types| types.kind.clone());
    (kind.unwrap_or_default(), object.name_any())
}

/// The state in which an earlier leader applied an object, if the object's annotation proves it. A new leader then writes nothing.
fn applied_by_earlier_leader(
    live: Option<&Child>,
    owner_uid: &str,
    hash: &str,
) -> Option<LastApplied> {
    let live = live.filter(|child| child.owner_uid == owner_uid)?;
    live.applied.as_ref().filter(|applied| *applied == hash)?;
    Some(LastApplied {
        hash: hash.to_owned(),
        resource_version: live.resource_version.clone(),
    })
}

/// The result of applying an object. The watch may lag: if the response equals the last applied state, no other writer changed the
/// object. `generation` is that of the response.
fn outcome(
    last: Option<&LastApplied>,
    live: Option<&Child>,
    now: &LastApplied,
    generation: Option<i64>,
) -> Outcome {
    // Writes of the status change the resource version, but not the generation.
    let changed = |live: &Child| match (live.generation, generation) {
        (Some(before), Some(after)) => before != after,
        _ => live.resource_version != now.resource_version,
    };
    match last {
        Some(last) if last == now => Outcome::Unchanged,
        Some(last) if last.hash == now.hash && live.is_some_and(changed) => Outcome::Reverted,
        _ => Outcome::Applied,
    }
}

/// Hash of all applied fields. It does not depend on the build.
fn hash(object: &DynamicObject) -> String {
    let text = serde_json::to_string(object).unwrap_or_default();
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(hash: u64, version: &str) -> LastApplied {
        LastApplied {
            hash: hash.to_string(),
            resource_version: version.to_owned(),
        }
    }

    #[test]
    fn a_new_leader_trusts_the_annotation_of_an_object_that_belongs_to_the_pool() {
        let child = Child {
            resource_version: "5".into(),
            generation: None,
            owner_uid: "u".into(),
            applied: Some("1".into()),
            servers: None,
        };
        assert_eq!(
            applied_by_earlier_leader(Some(&child), "u", "1"),
            Some(applied(1, "5"))
        );
        assert_eq!(applied_by_earlier_leader(Some(&child), "u", "2"), None);
        assert_eq!(
            applied_by_earlier_leader(Some(&child), "another", "1"),
            None
        );
        let edited = Child {
            applied: None,
            ..child
        };
        assert_eq!(applied_by_earlier_leader(Some(&edited), "u", "1"), None);
        assert_eq!(applied_by_earlier_leader(None, "u", "1"), None);
    }

    #[test]
    fn only_changes_by_other_writers_are_reverted() {
        let first = applied(1, "5");
        let seen = |version: &str, generation| Child {
            resource_version: version.into(),
            generation,
            owner_uid: "u".into(),
            applied: None,
            servers: None,
        };
        let outcome_of = |live: Option<&str>, now: &LastApplied| {
            let live = live.map(|version| seen(version, None));
            outcome(Some(&first), live.as_ref(), now, None)
        };
        assert_eq!(outcome_of(Some("7"), &applied(1, "8")), Outcome::Reverted);
        assert_eq!(
            outcome_of(Some("4"), &applied(1, "5")),
            Outcome::Unchanged,
            "the watch lags"
        );
        assert_eq!(
            outcome_of(Some("7"), &applied(1, "7")),
            Outcome::Applied,
            "fields of other managers"
        );
        assert_eq!(
            outcome_of(None, &applied(1, "8")),
            Outcome::Applied,
            "it was deleted"
        );
        assert_eq!(
            outcome_of(Some("5"), &applied(2, "8")),
            Outcome::Applied,
            "the operator applies other fields"
        );
        let unknown = outcome(None, Some(&seen("5", None)), &applied(1, "5"), None);
        assert_eq!(unknown, Outcome::Applied);
        let status = seen("7", Some(1));
        let outcome_after =
            |after| outcome(Some(&first), Some(&status), &applied(1, "8"), Some(after));
        assert_eq!(
            outcome_after(1),
            Outcome::Applied,
            "only its status changed"
        );
        assert_eq!(outcome_after(2), Outcome::Reverted);
    }
}
