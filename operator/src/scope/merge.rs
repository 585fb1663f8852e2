//! Merges the watches of several namespaces into one. The result has one first list, which is complete when every namespace is listed. A
//! namespace that may not be listed, for example because it was deleted with the Role in it, counts as empty until it may.

use futures::stream::{SelectAll, select_all};
use futures::{Stream, StreamExt};
use kube::Resource;
use kube::runtime::watcher::{Error, Event, Result};
use std::collections::{HashMap, HashSet, VecDeque};

use super::{Events, is_denied};

/// Denied lists after which a namespace counts as empty. A new Role takes effect with a short delay.
const DENIALS: u32 = 3;

/// Namespace and name.
type Key = (String, String);

pub fn merged<K>(watches: Vec<Events<K>>) -> impl Stream<Item = Result<Event<K>>>
where
    K: Resource + Clone + Send + 'static,
{
    let merge = Merge {
        lists: watches.iter().map(|_| List::default()).collect(),
        queued: VecDeque::from([Event::Init]),
        deleted: HashMap::new(),
        complete: false,
    };
    let numbered = watches.into_iter().enumerate().map(|(number, events)| {
        let events = events.map(move |event| (number, event));
        events.boxed()
    });
    let watches: SelectAll<_> = select_all(numbered);
    futures::stream::unfold((merge, watches), |(mut merge, mut watches)| async move {
        loop {
            if let Some(event) = merge.queued.pop_front() {
                return Some((Ok(event), (merge, watches)));
            }
            match watches.next().await? {
                (number, Err(e)) => {
                    merge.failed(number, &e);
                    return Some((Err(e), (merge, watches)));
                }
                (number, Ok(event)) => merge.apply(number, event),
            }
        }
    })
}

struct Merge<K> {
    lists: Vec<List<K>>,
    /// Events to yield.
    queued: VecDeque<Event<K>>,
    /// Objects that were deleted before every namespace was listed.
    deleted: HashMap<Key, K>,
    /// Every namespace was listed once.
    complete: bool,
}

/// The known objects of one namespace.
struct List<K> {
    objects: HashMap<Key, K>,
    /// Objects of the list in progress.
    listing: HashSet<Key>,
    /// It was complete once, or counts as empty.
    listed: bool,
    /// Denied lists before that.
    denials: u32,
}

impl<K> Default for List<K> {
    fn default() -> Self {
        Self {
            objects: HashMap::new(),
            listing: HashSet::new(),
            listed: false,
            denials: 0,
        }
    }
}

impl<K: Resource + Clone> Merge<K> {
    fn apply(&mut self, number: usize, event: Event<K>) {
        let Some(list) = self.lists.get_mut(number) else {
            return;
        };
        let listed = matches!(event, Event::InitApply(_));
        match event {
            Event::Init => list.listing.clear(),
            Event::InitApply(object) | Event::Apply(object) => {
                let key = key(&object);
                if listed {
                    list.listing.insert(key.clone());
                }
                list.objects.insert(key.clone(), object.clone());
                self.deleted.remove(&key);
                self.queued.push_back(match self.complete {
                    true => Event::Apply(object),
                    false => Event::InitApply(object),
                });
            }
            Event::Delete(object) => {
                list.objects.remove(&key(&object));
                self.delete(object);
            }
            Event::InitDone => {
                list.listed = true;
                let listing = std::mem::take(&mut list.listing);
                let gone: Vec<K> = list
                    .objects
                    .extract_if(|key, _| !listing.contains(key))
                    .map(|(_, object)| object)
                    .collect();
                for object in gone {
                    self.delete(object);
                }
                self.complete_if_listed();
            }
        }
    }

    fn failed(&mut self, number: usize, error: &Error) {
        let Some(list) = self.lists.get_mut(number) else {
            return;
        };
        list.denials += u32::from(is_denied(error));
        list.listed |= list.denials >= DENIALS;
        self.complete_if_listed();
    }

    fn complete_if_listed(&mut self) {
        if !self.complete && self.lists.iter().all(|list| list.listed) {
            self.complete = true;
            self.queued.push_back(Event::InitDone);
            let deleted = std::mem::take(&mut self.deleted);
            self.queued.extend(deleted.into_values().map(Event::Delete));
        }
    }

    /// An object cannot be taken out of a list in progress, so it is deleted at its end.
    fn delete(&mut self, object: K) {
        match self.complete {
            true => self.queued.push_back(Event::Delete(object)),
            false => _ = self.deleted.insert(key(&object), object),
        }
    }
}

fn key<K: Resource>(object: &K) -> Key {
    let meta = object.meta();
    (
        meta.namespace.clone().unwrap_or_default(),
        meta.name.clone().unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::runtime::watcher;

    fn object(name: &str) -> ConfigMap {
        let (namespace, name) = name.split_once('/').unwrap();
        let mut object = ConfigMap::default();
        object.metadata.namespace = Some(namespace.to_owned());
        object.metadata.name = Some(name.to_owned());
        object
    }

    fn text(event: &Event<ConfigMap>) -> String {
        let name = |object: &ConfigMap| {
            let (namespace, name) = key(object);
            format!("{namespace}/{name}")
        };
        match event {
            Event::Init => "init".to_owned(),
            Event::InitApply(object) => format!("list {}", name(object)),
            Event::InitDone => "done".to_owned(),
            Event::Apply(object) => format!("apply {}", name(object)),
            Event::Delete(object) => format!("delete {}", name(object)),
        }
    }

    /// What the merged watch yields for these events, each with the number of its namespace.
    async fn yields(events: Vec<(usize, Event<ConfigMap>)>) -> Vec<String> {
        let events = events
            .into_iter()
            .map(|(number, event)| (number, Ok(event)));
        yields_with_errors(events.collect()).await
    }

    async fn yields_with_errors(
        events: Vec<(usize, watcher::Result<Event<ConfigMap>>)>,
    ) -> Vec<String> {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..2)
            .map(|_| futures::channel::mpsc::unbounded::<watcher::Result<Event<ConfigMap>>>())
            .unzip();
        let watches = receivers.into_iter().map(|events| events.boxed()).collect();
        let mut merged = std::pin::pin!(merged(watches));
        let mut all = Vec::new();
        for (number, event) in events {
            senders[number].unbounded_send(event).unwrap();
            while let Some(Some(event)) = futures::FutureExt::now_or_never(merged.next()) {
                all.push(event.map_or_else(|_| "error".to_owned(), |event| text(&event)));
            }
        }
        all
    }

    #[tokio::test]
    async fn the_first_list_is_complete_when_every_namespace_is_listed() {
        let events = vec![
            (0, Event::Init),
            (0, Event::InitApply(object("a/x"))),
            (0, Event::InitApply(object("a/y"))),
            (1, Event::Init),
            (0, Event::InitDone),
            (0, Event::Apply(object("a/z"))),
            (0, Event::Delete(object("a/y"))),
            (1, Event::InitApply(object("b/x"))),
            (1, Event::InitDone),
            (1, Event::Delete(object("b/x"))),
        ];
        assert_eq!(
            yields(events).await,
            [
                "init",
                "list a/x",
                "list a/y",
                "list a/z",
                "list b/x",
                "done",
                "delete a/y",
                "delete b/x",
            ]
        );
    }

    #[tokio::test]
    async fn a_namespace_that_may_not_be_listed_counts_as_empty_until_it_may() {
        let failed = |code| {
            let status = kube::core::Status::failure("no", "no").with_code(code);
            Err(watcher::Error::InitialListFailed(kube::Error::Api(
                Box::new(status),
            )))
        };
        let events = vec![
            (0, Ok(Event::Init)),
            (0, Ok(Event::InitApply(object("a/x")))),
            (0, Ok(Event::InitDone)),
            (1, failed(500)),
            (1, failed(403)),
            (1, failed(500)),
            (1, Ok(Event::Init)),
            (1, failed(403)),
            (1, failed(403)),
            (0, Ok(Event::Apply(object("a/y")))),
            (1, failed(403)),
            (1, Ok(Event::Init)),
            (1, Ok(Event::InitApply(object("b/x")))),
            (1, Ok(Event::InitDone)),
        ];
        assert_eq!(
            yields_with_errors(events).await,
            [
                "init",
                "list a/x",
                "error",
                "error",
                "error",
                "error",
                "error",
                "done",
                "apply a/y",
                "error",
                "apply b/x",
            ]
        );
    }

    #[tokio::test]
    async fn a_new_list_of_one_namespace_deletes_only_its_missing_objects() {
        let list = |number, names: &[&str]| {
            let objects = names
                .iter()
                .map(move |name| (number, Event::InitApply(object(name))));
            let init = [(number, Event::Init)].into_iter();
            init.chain(objects)
                .chain([(number, Event::InitDone)])
                .collect::<Vec<_>>()
        };
        let events = [
            list(0, &["a/x", "a/y"]),
            list(1, &["b/x"]),
            list(0, &["a/x"]),
        ];
        assert_eq!(
            yields(events.concat()).await,
            [
                "init",
                "list a/x",
                "list a/y",
                "list b/x",
                "done",
                "apply a/x",
                "delete a/y",
            ]
        );
    }
}
