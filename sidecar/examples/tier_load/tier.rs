//! Puts and gets through a tier with all its layers.

use super::Load;
use super::measure::{Part, Phase, Turns, rss_peak_mib};
use super::objects::Slots;
use super::raw;
use kvcachepool_protocol::config::{ByteSize, Config};
use kvcachepool_protocol::domain::{Portable, PortableGroup};
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, LayoutTable};
use kvcachepool_tiers::layers::{Converter, layered};
use kvcachepool_tiers::{Cause, Opening, Removal, Tier, configured};
use rustix::process::{Signal, getpid, kill_process};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// As many as the sidecar has for this.
const THREADS: usize = 2;
/// Names of one call that takes objects away.
const REMOVED: usize = 256;

/// Chunks of one rank with 16 layers and 8 heads of 512 bytes, in blocks of 16 tokens: 1 MiB each.
fn portable(layout: &str) -> Arc<Portable> {
    let table = LayoutTable::parse(LAYOUTS_JSON).unwrap();
    Arc::new(Portable {
        layout: table.layout(layout).expect("a layout of vLLM").clone(),
        groups: vec![PortableGroup {
            layers: 16,
            kernel_blocks: 1,
            heads: 8,
            tokens: 16,
            state_bytes: 512,
            parts: 1,
        }],
    })
}

/// Puts and gets, with a line for each; then the same by a bare loop of direct I/O on a file in `raw`. With a `layout` of memory, objects
/// are converted.
pub fn run(config: &Path, raw: Option<&Path>, layout: Option<&str>, load: Load) {
    let opening = opening(config);
    let portable = layout.map(portable);
    runtime().block_on(async {
        let tier = opening.open().await.unwrap_or_else(|e| panic!("{e}"));
        let layers = layered(tier, &opening.layers);
        let (tier, chunks) = (layers.tier, (layers.converter, portable));
        let slots = Arc::new(Slots::new(load.in_flight, load.size.0));
        warm_up(&tier, &slots, load).await;
        let put = phase(&chunks, &slots, load, Part::Put, load.operations()).await;
        phase(&chunks, &slots, load, Part::Get, put).await;
        let names: Vec<_> = (0..put).map(|n| slots.get(0, n).name).collect();
        for part in names.chunks(REMOVED) {
            tier.remove(Removal::Named(part))
                .await
                .unwrap_or_else(|e| panic!("{e}"));
        }
        if let Some(folder) = raw {
            raw::run(folder, &slots, load);
        }
    });
}

/// Makes connections, by asking for objects that are not there. The first one of TLS gathers random numbers for 60 ms, once in a process.
async fn warm_up(tier: &Arc<dyn Tier>, slots: &Slots, load: Load) {
    let absent = (0..load.in_flight).map(|slot| {
        let get = slots.get(slot, load.operations() + slot as u64);
        async move { tier.get(get).await.unwrap_err() }
    });
    for error in futures::future::join_all(absent).await {
        assert_eq!(error.cause, Cause::Missing, "{error}");
    }
}

/// Puts objects of one page each, and dies.
pub fn fill(config: &Path, objects: u64) {
    let opening = opening(config);
    runtime().block_on(async {
        let tier = opening.open().await.unwrap_or_else(|e| panic!("{e}"));
        let load = Load {
            size: ByteSize(4096),
            in_flight: 64,
            seconds: 3600.0,
            most: ByteSize(4096 * objects),
        };
        let slots = Arc::new(Slots::new(load.in_flight, load.size.0));
        let chunks = (layered(tier, &opening.layers).converter, None);
        phase(&chunks, &slots, load, Part::Put, objects).await;
        kill_process(getpid(), Signal::KILL).unwrap();
    });
}

/// Opens it.
pub fn open(config: &Path) {
    let opening = opening(config);
    runtime().block_on(async {
        let begun = Instant::now();
        let tier = opening.open().await.unwrap_or_else(|e| panic!("{e}"));
        let seconds = begun.elapsed().as_secs_f64();
        let usage = tier.usage().await.unwrap_or_else(|e| panic!("{e}"));
        println!(
            "{}",
            serde_json::json!({"seconds": seconds, "objects": usage.objects, "rss_peak_mib": rss_peak_mib()})
        );
    });
}

fn opening(config: &Path) -> Opening {
    let text = std::fs::read_to_string(config).expect("a config file");
    let (config, _) = Config::parse(&text, false).unwrap_or_else(|e| panic!("{e}"));
    let [opening] = <[_; 1]>::try_from(configured(&config)).expect("a config with one tier");
    opening
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .unwrap()
}

/// Operations on objects 0..`count`, `in_flight` at a time. Returns how many were done.
async fn phase(
    chunks: &(Converter, Option<Arc<Portable>>),
    slots: &Arc<Slots>,
    load: Load,
    part: Part,
    count: u64,
) -> u64 {
    let phase = Phase::begin("tier");
    let turns = Arc::new(Turns::begin(part, count, load));
    let workers: Vec<_> = (0..load.in_flight)
        .map(|slot| {
            let ((converter, portable), slots, turns) =
                (chunks.clone(), slots.clone(), turns.clone());
            tokio::spawn(async move {
                let mut times: Vec<Duration> = Vec::new();
                while let Some(number) = turns.next() {
                    let begun = Instant::now();
                    let done = match part {
                        Part::Put => {
                            let put = slots.put(slot, number);
                            converter.write(put, portable.clone()).await.map(drop)
                        }
                        Part::Get => {
                            let get = slots.get(slot, number);
                            let read = converter.read(&get.name, get.places, portable.clone());
                            read.await.map(drop)
                        }
                    };
                    done.unwrap_or_else(|e| panic!("{e}"));
                    times.push(begun.elapsed());
                }
                times
            })
        })
        .collect();
    let mut times = Vec::new();
    for worker in workers {
        times.extend(worker.await.unwrap());
    }
    let done = times.len() as u64;
    phase.end(part, load, times);
    done
}
