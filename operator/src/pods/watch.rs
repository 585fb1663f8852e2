//! The watch of labelled pods, with streaming lists where the API server has them.

use super::index::{Index, PoolRef};
use super::wire::WirePod;
use crate::metrics::Metrics;
use crate::names;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Api, Client};
use std::sync::Arc;
use tracing::{info, warn};

/// Pods in one page of a list, where lists do not stream: a pod can have a megabyte.
const PAGE: u32 = 100;

/// Keeps `index` up to date and yields the pools whose pods changed; when a list is complete, every pool that a pod names.
/// Never ends. Broken watches begin anew with growing waits.
pub fn watch_pods(
    client: Client,
    index: Arc<Index>,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = PoolRef> {
    let api: Api<WirePod> = Api::all(client);
    pods(api, metrics).flat_map(move |event| {
        let listed = matches!(event, Event::InitDone);
        let mut touched = index.apply(event);
        if listed {
            touched.extend(index.pools());
        }
        futures::stream::iter(touched)
    })
}

type Events = BoxStream<'static, watcher::Result<Event<WirePod>>>;

fn pods(api: Api<WirePod>, metrics: Arc<Metrics>) -> impl Stream<Item = Event<WirePod>> {
    let config = Config::default().labels(names::POOL);
    let streaming: Events = watcher(api.clone(), config.clone().streaming_lists())
        .default_backoff()
        .boxed();
    futures::stream::unfold((streaming, true), move |(mut events, mut streams)| {
        let (api, config, metrics) = (api.clone(), config.clone(), metrics.clone());
        async move {
            loop {
                match events.next().await? {
                    Ok(event) => return Some((event, (events, streams))),
                    Err(e) if streams && refuses_to_stream(&e) => {
                        info!("the API server does not stream lists; pods are listed in pages");
                        streams = false;
                        events = watcher(api.clone(), config.clone().page_size(PAGE))
                            .default_backoff()
                            .boxed();
                    }
                    Err(e) => {
                        metrics.add("watch_errors_total", &["Pod"], 1);
                        warn!(error = %e, "watch of pods broke; it begins anew");
                    }
                }
            }
        }
    })
}

/// Kubernetes 1.33 has the feature switched off by default and says that the parameter is not valid. An API server whose etcd is too old
/// for it says so inside of the watch, as an internal error.
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
