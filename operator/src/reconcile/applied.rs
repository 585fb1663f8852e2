//! Decides which objects of a pool have changed since the operator applied them. Pure.

use super::children::Child;
use kube::ResourceExt;
use kube::api::DynamicObject;
use std::collections::HashMap;

/// Kind and name of an object within the pool's namespace.
pub type Key = (String, String);

/// How an object was left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    pub hash: String,
    pub resource_version: String,
}

/// How the objects of one pool were left.
#[derive(Debug, Default)]
pub struct Applied(HashMap<Key, Left>);

/// An object to apply, and what is known of it before.
#[derive(Debug, Clone, PartialEq)]
pub struct Application {
    pub object: DynamicObject,
    pub hash: String,
    left: Option<Left>,
    live: Option<Child>,
}

/// The result of an application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The object was as it was left.
    Same,
    /// It was applied.
    Applied,
    /// Somebody had changed it, and it was set right.
    SetRight,
}

impl Applied {
    /// What to apply; `None`: the object is as it was left. `live`: the object in the watch's cache, `None` = nobody watches its kind.
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
            && let Some(left) = untouched(child, owner_uid, &hash)
        {
            self.0.insert(key.clone(), left);
        }
        let left = self.0.get(&key).cloned();
        let is_left = |left: &Left| {
            let version = child.map(|child| &child.resource_version);
            left.hash == hash && (live.is_none() || version == Some(&left.resource_version))
        };
        (!left.as_ref().is_some_and(is_left)).then(|| Application {
            object: object.clone(),
            hash,
            left,
            live: child.cloned(),
        })
    }

    /// Records an application. `generation`: of the object now.
    pub fn record(
        &mut self,
        application: Application,
        resource_version: String,
        generation: Option<i64>,
    ) -> Outcome {
        let key = key(&application.object);
        let Application {
            hash, left, live, ..
        } = application;
        let now = Left {
            hash,
            resource_version,
        };
        let outcome = outcome(left.as_ref(), live.as_ref(), &now, generation);
        self.0.insert(key, now);
        outcome
    }

    /// The object is gone, or belongs to another owner.
    pub fn forget(&mut self, kind: &str, name: &str) {
        self.0.remove(&(kind.to_owned(), name.to_owned()));
    }
}

fn key(object: &DynamicObject) -> Key {
    let kind = object.types.as_ref().map(|types| types.kind.clone());
    (kind.unwrap_or_default(), object.name_any())
}

/// How an earlier leader left an object, as far as the object itself proves it: then a new leader has nothing to write.
fn untouched(live: Option<&Child>, owner_uid: &str, hash: &str) -> Option<Left> {
    let live = live.filter(|child| child.owner_uid == owner_uid)?;
    live.applied.as_ref().filter(|applied| *applied == hash)?;
    Some(Left {
        hash: hash.to_owned(),
        resource_version: live.resource_version.clone(),
    })
}

/// What an application did. The watch may be behind: where the object is as it was left, nobody had changed it. `generation`: of the
/// object now.
fn outcome(
    left: Option<&Left>,
    live: Option<&Child>,
    now: &Left,
    generation: Option<i64>,
) -> Outcome {
    // The version also changes with what others say in an object's status, the generation does not.
    let changed = |live: &Child| match (live.generation, generation) {
        (Some(before), Some(after)) => before != after,
        _ => live.resource_version != now.resource_version,
    };
    match left {
        Some(left) if left == now => Outcome::Same,
        Some(left) if left.hash == now.hash && live.is_some_and(changed) => Outcome::SetRight,
        _ => Outcome::Applied,
    }
}

/// Of all that is applied; the same in every build.
fn hash(object: &DynamicObject) -> String {
    let text = serde_json::to_string(object).unwrap_or_default();
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(hash: u64, version: &str) -> Left {
        Left {
            hash: hash.to_string(),
            resource_version: version.to_owned(),
        }
    }

    #[test]
    fn a_new_leader_believes_an_object_that_says_what_was_applied_and_is_the_pools() {
        let child = Child {
            resource_version: "5".into(),
            generation: None,
            owner_uid: "u".into(),
            applied: Some("1".into()),
        };
        assert_eq!(untouched(Some(&child), "u", "1"), Some(left(1, "5")));
        assert_eq!(untouched(Some(&child), "u", "2"), None);
        assert_eq!(untouched(Some(&child), "another", "1"), None);
        let edited = Child {
            applied: None,
            ..child
        };
        assert_eq!(untouched(Some(&edited), "u", "1"), None);
        assert_eq!(untouched(None, "u", "1"), None);
    }

    #[test]
    fn only_a_change_of_somebody_else_is_set_right() {
        let first = left(1, "5");
        let seen = |version: &str, generation| Child {
            resource_version: version.into(),
            generation,
            owner_uid: "u".into(),
            applied: None,
        };
        let look = |live: Option<&str>, now: &Left| {
            let live = live.map(|version| seen(version, None));
            outcome(Some(&first), live.as_ref(), now, None)
        };
        assert_eq!(look(Some("7"), &left(1, "8")), Outcome::SetRight);
        assert_eq!(
            look(Some("4"), &left(1, "5")),
            Outcome::Same,
            "the watch is behind"
        );
        assert_eq!(
            look(Some("7"), &left(1, "7")),
            Outcome::Applied,
            "not our fields"
        );
        assert_eq!(
            look(None, &left(1, "8")),
            Outcome::Applied,
            "it was deleted"
        );
        assert_eq!(
            look(Some("5"), &left(2, "8")),
            Outcome::Applied,
            "ours to change"
        );
        let unknown = outcome(None, Some(&seen("5", None)), &left(1, "5"), None);
        assert_eq!(unknown, Outcome::Applied);
        let status = seen("7", Some(1));
        let look = |after| outcome(Some(&first), Some(&status), &left(1, "8"), Some(after));
        assert_eq!(look(1), Outcome::Applied, "only its status is another");
        assert_eq!(look(2), Outcome::SetRight);
    }
}
