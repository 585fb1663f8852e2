//! The namespaces that the operator works in, and watches over all of them.

mod merge;

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Config, DefaultBackoff, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;

pub type Events<K> = BoxStream<'static, watcher::Result<Event<K>>>;

/// The namespaces whose pools the operator reconciles.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    /// Empty = all.
    namespaces: Vec<String>,
}

impl Scope {
    /// These namespaces, or all if there are none.
    pub fn new(mut namespaces: Vec<String>) -> Self {
        namespaces.sort();
        namespaces.dedup();
        Self { namespaces }
    }

    pub fn contains(&self, namespace: &str) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|one| one == namespace)
    }

    /// The API of a kind in each of these namespaces, or of all.
    pub fn apis<K>(&self, client: &Client) -> Vec<Api<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        match &*self.namespaces {
            [] => vec![Api::all(client.clone())],
            some => some
                .iter()
                .map(|namespace| Api::namespaced(client.clone(), namespace))
                .collect(),
        }
    }

    /// These namespaces, or `None` for all.
    pub fn namespaces(&self) -> Vec<Option<String>> {
        match &*self.namespaces {
            [] => vec![None],
            some => some.iter().cloned().map(Some).collect(),
        }
    }

    /// Watches a kind in these namespaces.
    pub fn watch<K>(&self, client: &Client, config: &Config) -> Events<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let mut watches: Vec<_> = self
            .apis(client)
            .into_iter()
            .map(|api| watch(api, config))
            .collect();
        match watches.len() {
            1 => watches.remove(0),
            _ => merge::merged(watches).boxed(),
        }
    }
}

/// Watches a kind. A failed watch restarts with growing waits.
pub fn watch<K>(api: Api<K>, config: &Config) -> Events<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let events = watcher(api, config.clone());
    events.backoff(Restarts::default()).boxed()
}

/// Whether the cluster does not have a kind, or does not permit to list it. Both last until somebody changes the cluster.
pub fn is_denied(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
            matches!(status.code, 403 | 404)
        }
        _ => false,
    }
}

/// kube's default waits. Its own are reset by every event, and each attempt to list begins with one (`Init`): a list that fails would be
/// repeated every second. These are only reset by time without a failure.
#[derive(Default)]
struct Restarts(DefaultBackoff);

impl Iterator for Restarts {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

impl Backoff for Restarts {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_without_namespaces_contains_all() {
        assert!(Scope::default().contains("any"));
        let some = Scope::new(vec!["b".to_owned(), "a".to_owned(), "b".to_owned()]);
        assert_eq!(some.namespaces, ["a", "b"]);
        assert!(some.contains("a") && !some.contains("c"));
    }

    #[test]
    fn only_a_missing_kind_or_permission_is_denied() {
        let error = |code: u16| {
            watcher::Error::InitialListFailed(kube::Error::Api(Box::new(kube::core::Status {
                code,
                ..kube::core::Status::default()
            })))
        };
        assert!(is_denied(&error(403)) && is_denied(&error(404)));
        assert!(!is_denied(&error(429)) && !is_denied(&error(500)));
        assert!(!is_denied(&watcher::Error::NoResourceVersion));
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_keeps_failing_is_repeated_ever_more_rarely() {
        let attempt = || [Ok(()), Err(())];
        let attempts = futures::stream::iter((0..12).flat_map(|_| attempt()));
        let started = tokio::time::Instant::now();
        let events: Vec<_> = attempts.backoff(Restarts::default()).collect().await;
        assert_eq!(events.len(), 24);
        assert!(started.elapsed() > Duration::from_secs(120));
    }
}
