//! The watches of labelled pods and of managed servers with their managers, with streaming lists if the API server supports them.

use super::index::{Index, Member, PoolRef};
use super::server::Server;
use super::wire::WirePod;
use crate::metrics::Metrics;
use crate::names;
use crate::scope::Scope;
use futures::{Stream, StreamExt};
use kube::Client;
use kube::runtime::watcher::{self, Config, Event};
use std::sync::Arc;
use tracing::{info, warn};

/// Pods per page of a list without streaming. A pod can have a megabyte.
const PAGE: u32 = 100;

/// Updates `index` and yields the pools whose pods changed; at the end of a list, every pool that a pod names. Never ends. Failed watches
/// are restarted with growing waits.
pub fn watch_pods(
    client: Client,
    scope: Scope,
    index: Arc<Index>,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = PoolRef> {
    watch(client, scope, names::POOL, index, metrics)
}

/// As `watch_pods`, for the pods of managed servers and of their managers.
pub fn watch_servers(
    client: Client,
    scope: Scope,
    index: Arc<Index<Server>>,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = PoolRef> {
    let labels = format!("{} in ({},{})", names::NAME, names::SERVERS, names::MANAGER);
    watch(client, scope, &labels, index, metrics)
}

fn watch<T: Member>(
    client: Client,
    scope: Scope,
    labels: &str,
    index: Arc<Index<T>>,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = PoolRef> + use<T> {
    pods(client, scope, labels, metrics).flat_map(move |event| {
        let listed = matches!(event, Event::InitDone);
        let mut touched = index.apply(event);
        if listed {
            touched.extend(index.pools());
        }
        futures::stream::iter(touched)
    })
}

fn pods(
    client: Client,
    scope: Scope,
    labels: &str,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = Event<WirePod>> + use<> {
    let config = Config::default().labels(labels);
    let streaming = scope.watch(&client, &config.clone().streaming_lists());
    futures::stream::unfold((streaming, true), move |(mut events, mut streams)| {
        let (client, scope, config) = (client.clone(), scope.clone(), config.clone());
        let metrics = metrics.clone();
        async move {
            loop {
                match events.next().await? {
                    Ok(event) => return Some((event, (events, streams))),
                    Err(e) if streams && refuses_to_stream(&e) => {
                        info!("API server does not support streaming lists; listing pods in pages");
                        streams = false;
                        events = scope.watch(&client, &config.clone().page_size(PAGE));
                    }
                    Err(e) => {
                        metrics.add("watch_errors_total", &["Pod"], 1);
                        warn!(reason = %e, "watch of pods failed; restarting it");
                    }
                }
            }
        }
    })
}

/// Kubernetes 1.33 disables the feature by default and reports an invalid parameter. An API server whose etcd is too old reports an
/// internal error inside the watch.
fn refuses_to_stream(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
            matches!(status.code, 400 | 422)
        }
        watcher::Error::WatchError(status) => {
            status.code == 500 || status.reason == "InternalError"
        }
        _ => false,
    }
}
