//! Executes the core's orders for lower tiers, on threads beside the one of the sockets. The result of each order is posted.

use super::complaints::Complaints;
use super::host::Live;
use super::shell::Posted;
use super::slow::Slow;
use super::tier_state::TierState;
use crate::admin::metrics::Metrics;
use futures::{StreamExt, TryStreamExt, stream};
use kvcachepool_engine::{
    ClearJob, Completion, Domains, Effect, FetchId, FetchJob, Landed, Target, WriteJob,
};
use kvcachepool_protocol::config::{Config, TierMode};
use kvcachepool_protocol::object::{Object, ObjectName};
use kvcachepool_protocol::status;
use kvcachepool_protocol::table::ROW_BYTES;
use kvcachepool_tiers::layers::{Converter, Layered, State, layered};
use kvcachepool_tiers::{
    Cause, Kind, Opening, Place, Put, Removal, Span, Stored, Tier, TierError, Whose, clear,
    configured,
};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tracing::{info, warn};

/// Retry interval for a tier that cannot be opened.
const RETRY: Duration = Duration::from_secs(5);
/// Interval of the usage check of a tier.
const USAGE_EVERY: Duration = Duration::from_secs(2);
/// This many checks in a row may end in an overload error before the tier counts as down.
const DOUBTED: u32 = 3;
/// Lookups in flight of names that are no prefix.
const LOOKUPS: usize = 16;
/// Threads for digests and sockets of tiers.
const THREADS: usize = 2;

/// Keeps an operation on the arena from ending.
type Hold = Arc<oneshot::Sender<()>>;

/// The lower tiers of this sidecar.
pub struct Tiers {
    runtime: Runtime,
    shared: Arc<Shared>,
    openings: Vec<Arc<Opening>>,
}

struct Shared {
    live: Arc<Live>,
    post: UnboundedSender<Posted>,
    /// Id of this process, written into object headers.
    writer: [u8; 16],
    states: Mutex<BTreeMap<Kind, TierState>>,
    complaints: Complaints,
    /// Cancels a fetch that no request waits for any more.
    fetches: Mutex<HashMap<FetchId, oneshot::Sender<()>>>,
}

impl Tiers {
    /// Opens the configured tiers in the background. `None`: no lower tier is configured.
    pub fn start(
        config: &Config,
        boot: u64,
        live: Arc<Live>,
        post: UnboundedSender<Posted>,
    ) -> std::io::Result<Option<Arc<Self>>> {
        let openings = configured(config).into_iter().map(|opening| {
            let mode = mode(config, opening.kind);
            Arc::new(opening.in_mode(mode))
        });
        let openings: Vec<_> = openings.collect();
        if openings.is_empty() {
            return Ok(None);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("tiers")
            .enable_all()
            .build()?;
        let shared = Arc::new(Shared {
            live,
            post,
            writer: (u128::from(boot) << 64 | u128::from(std::process::id())).to_le_bytes(),
            states: Mutex::default(),
            complaints: Complaints::default(),
            fetches: Mutex::default(),
        });
        for opening in &openings {
            runtime.spawn(shared.clone().keep(opening.clone()));
        }
        Ok(Some(Arc::new(Self {
            runtime,
            shared,
            openings,
        })))
    }

    /// Applies a changed config to the tiers. Returns the tiers whose new configuration is invalid; they keep the previous one.
    pub fn change(&self, before: &Config, config: &Config) -> Vec<Kind> {
        let mut unchanged = Vec::new();
        for opening in &self.openings {
            let why = opening.change(before, config).err().map(|e| {
                let (tier, reason) = (e.tier.name(), e.cause.name());
                warn!(tier, reason, error = %e, "invalid tier configuration in the new config; keeping the previous one");
                let detail = format!("keeping the previous configuration: {}", e.detail);
                TierError { detail, ..e }
            });
            if why.is_some() {
                unchanged.push(opening.kind);
            }
            let kind = opening.kind;
            self.shared.with(kind, |state| state.unchanged = why);
        }
        unchanged
    }

    /// Completes the core's status of a lower tier; that of the memory tier is complete.
    pub fn fill(&self, tier: &mut status::Tier) {
        let mut kinds = self.openings.iter().map(|opening| opening.kind);
        if let Some(kind) = kinds.find(|kind| kind.name() == tier.name) {
            let objects = self.shared.complaints.of_objects(kind);
            self.shared
                .with(kind, |state| state.fill(kind, objects, tier));
        }
    }

    /// Reports the metrics of all tiers.
    pub fn metrics(&self, metrics: &Metrics) {
        let put = |name: &str, labels: &[&str], value| metrics.take(name, labels, value);
        for (kind, state) in self.shared.states.lock().iter() {
            let tier = kind.name();
            if let Some(usage) = state.usage {
                put("tier_used_bytes", &[tier], usage.bytes as f64);
                if usage.capacity_bytes > 0 {
                    let capacity = usage.capacity_bytes as f64;
                    put("tier_capacity_bytes", &[tier], capacity);
                }
            }
            let Some(layers) = &state.layers else {
                continue;
            };
            let info = layers.tier.info();
            for server in info.servers.now() {
                let up = f64::from(u8::from(server.up));
                put("tier_server_up", &[tier, &server.name], up);
            }
            for (operations, side) in [
                ("reads", layers.guarded.breaker.reads()),
                ("writes", layers.guarded.breaker.writes()),
            ] {
                let open = f64::from(u8::from(side.state == State::Open));
                put("tier_breaker_open", &[tier, operations], open);
            }
            for (event, count) in info.counters.now() {
                put("tier_events_total", &[tier, event], count as f64);
            }
            for tally in layers.guarded.counts.tally() {
                let operation = tally.op.name();
                for (result, count) in &tally.results {
                    put(
                        "tier_operations_total",
                        &[tier, operation, result],
                        *count as f64,
                    );
                }
                if !tally.results.is_empty() {
                    let labels = [tier, operation];
                    let name = "tier_operation_seconds";
                    metrics.take_seconds(name, &labels, &tally.seconds, tally.took);
                }
                put(
                    "tier_operations_running",
                    &[tier, operation],
                    tally.running as f64,
                );
            }
            for amount in layers.packed.amounts() {
                let (operation, took) = (amount.operation, amount.took.as_secs_f64());
                let bytes = [("raw", amount.raw_bytes), ("stored", amount.stored_bytes)];
                for (which, bytes) in bytes {
                    let labels = [tier, operation, which];
                    put("tier_packed_bytes_total", &labels, bytes as f64);
                }
                put("tier_packing_seconds_total", &[tier, operation], took);
            }
            for (why, objects) in layers.packed.plain() {
                let labels = [tier, why.name()];
                put("tier_plain_objects_total", &labels, objects as f64);
            }
            let error = layers.packed.error();
            put("tier_packing_error_ratio", &[tier], error);
            put(
                "tier_retries_total",
                &[tier],
                layers.guarded.retried() as f64,
            );
            put(
                "tier_corrupt_objects_total",
                &[tier],
                layers.guarded.corrupt() as f64,
            );
            put(
                "tier_scribbled_gets_total",
                &[tier],
                layers.guarded.scribbled() as f64,
            );
        }
    }

    /// Starts to carry out an effect on a tier. Returns at once.
    pub fn carry_out(&self, effect: Effect) {
        let shared = self.shared.clone();
        match effect {
            Effect::Lookup(job) => drop(self.runtime.spawn(async move {
                let present = match shared.tier(job.tier) {
                    Ok(tier) if job.independent => lookup_each(tier, job.names).await,
                    Ok(tier) => tier.lookup(&job.names).await,
                    Err(e) => Err(e),
                };
                let (lookup, present) = (job.lookup, present.map_err(|e| shared.told(&e)));
                shared.complete(Completion::Lookup { lookup, present });
            })),
            Effect::Head(job) => drop(self.runtime.spawn(async move {
                let object = match shared.tier(job.tier) {
                    Ok(tier) => tier.head(&job.name).await,
                    Err(e) => Err(e),
                };
                let object = object.map(Box::new).map_err(|e| shared.told(&e));
                let head = job.head;
                shared.complete(Completion::Head { head, object });
            })),
            Effect::Fetch(job) => {
                let (cancel, cancelled) = oneshot::channel();
                shared.fetches.lock().insert(job.fetch, cancel);
                self.runtime.spawn(async move {
                    let fetch = job.fetch;
                    let landed = shared.fetch(job, cancelled).await;
                    shared.fetches.lock().remove(&fetch);
                    shared.complete(Completion::Fetch { fetch, landed });
                });
            }
            Effect::CancelFetch { fetch } => {
                if let Some(cancel) = shared.fetches.lock().remove(&fetch) {
                    // A fetch that has just ended does not receive it.
                    let _ = cancel.send(());
                }
            }
            Effect::Write(job) => drop(self.runtime.spawn(async move {
                let put = job.put;
                let stored = if job.look_first && shared.has(job.tier, job.object.name()).await {
                    Ok(Stored::Already)
                } else {
                    shared.put(job).await
                };
                let stored = stored.map_err(|e| shared.told(&e));
                shared.complete(Completion::Write { put, stored });
            })),
            Effect::Discard { tier, name } => drop(self.runtime.spawn(async move {
                let discarded = match shared.tier(tier) {
                    Ok(tier) => tier.remove(Removal::Unusable(&name)).await,
                    Err(e) => Err(e),
                };
                if let Err(e) = discarded {
                    shared.told(&e);
                }
            })),
            Effect::Remove(job) => drop(self.runtime.spawn(async move {
                let removed = match shared.tier(job.tier) {
                    Ok(tier) => tier.remove(Removal::Named(&job.names)).await,
                    Err(e) => Err(e),
                };
                let (removal, removed) = (job.removal, removed.map_err(|e| shared.told(&e)));
                shared.complete(Completion::Remove { removal, removed });
            })),
            Effect::Clear(ClearJob { tier, domains }) => drop(self.runtime.spawn(async move {
                let removed = shared.clear(tier, domains).await;
                let removed = removed.map_err(|e| shared.told(&e));
                shared.complete(Completion::Clear { tier, removed });
            })),
            // A lookup has its own deadline, and its completion is ignored. Digests have a pool of their own.
            Effect::CancelLookup { .. } | Effect::Digest(_) => {}
        }
    }
}

impl Shared {
    /// Calls `with` with the state of a tier.
    fn with<T>(&self, kind: Kind, with: impl FnOnce(&mut TierState) -> T) -> T {
        with(self.states.lock().entry(kind).or_default())
    }

    fn complete(&self, completion: Completion) {
        // A closed channel means that the process ends.
        let _ = self.post.send(Posted::Completed(completion));
    }

    /// Logs an error if it is worth a line, and returns its cause.
    fn told(&self, e: &TierError) -> Cause {
        self.complaints.heard(e);
        e.cause
    }

    /// Whether an object exists and can be used, according to its header. A lookup may rely on an older answer. An unreadable object
    /// counts as missing.
    async fn has(&self, kind: Kind, name: ObjectName) -> bool {
        match self.tier(kind) {
            Ok(tier) => tier.head(&name).await.is_ok(),
            Err(_) => false,
        }
    }

    /// Removes objects: of these domains, or all. A failure is kept for status.
    async fn clear(&self, kind: Kind, domains: Option<Domains>) -> Result<u64, TierError> {
        let names = |domains: Domains| -> Vec<Whose> {
            let named = domains.iter().map(|(m, l)| (m.hex16(), l.hex16()));
            named.collect()
        };
        let domains = domains.map(names);
        let removed = match self.tier(kind) {
            Ok(tier) => clear(tier.as_ref(), domains.as_deref()).await,
            Err(e) => Err(e),
        };
        // The breaker's error says less than the failure that opened it.
        let removed = removed.map_err(|e| self.not_tried_after(e));
        let why = removed.as_ref().err().map(|e| e.detail.clone());
        self.with(kind, |state| state.uncleared = why);
        if let Ok(removed) = &removed {
            info!(tier = kind.name(), removed, "tier cleared");
        }
        removed
    }

    /// The failure that opened the breaker, when `e` is the breaker's own error.
    fn not_tried_after(&self, e: TierError) -> TierError {
        if e.cause != Cause::BreakerOpen {
            return e;
        }
        let reason = |layers: &Layered| layers.guarded.breaker.writes().reason;
        self.open(e.tier, reason).ok().flatten().unwrap_or(e)
    }

    /// Calls `of` with an open tier.
    fn open<T>(&self, kind: Kind, of: impl FnOnce(&Layered) -> T) -> Result<T, TierError> {
        let found = self.with(kind, |state| state.layers.as_ref().map(of));
        found.ok_or_else(|| TierError::new(kind, Cause::Gone, "the tier is not open"))
    }

    fn tier(&self, kind: Kind) -> Result<Arc<dyn Tier>, TierError> {
        self.open(kind, |layers| layers.tier.clone())
    }

    /// Reads and writes chunks of a tier.
    fn converter(&self, kind: Kind) -> Result<Converter, TierError> {
        self.open(kind, |layers| layers.converter.clone())
    }

    /// Reports a tier's state to the core, and its reason to status.
    fn is_now(&self, kind: Kind, down: Option<&TierError>) {
        let why = down.map(|e| e.detail.clone());
        self.with(kind, |state| state.down = why);
        let down = down.map(|e| e.cause.name().to_owned());
        self.complete(Completion::Tier { tier: kind, down });
    }

    /// Opens a tier, with retries until it succeeds, then checks its usage periodically.
    async fn keep(self: Arc<Self>, opening: Arc<Opening>) {
        let kind = opening.kind;
        let opened = loop {
            match opening.open().await {
                Ok(tier) => break tier,
                Err(e) => {
                    self.told(&e);
                    self.is_now(kind, Some(&e));
                }
            }
            tokio::time::sleep(RETRY).await;
        };
        let layers = layered(opened, &opening.layers);
        let (tier, guarded) = (layers.tier.clone(), layers.guarded.clone());
        info!(tier = kind.name(), place = opening.place(), "tier open");
        self.with(kind, |state| state.layers = Some(layers));
        // Unknown until its first answer: some tiers open without contacting a server.
        let (mut known, mut doubted) = (None::<Option<TierError>>, 0);
        loop {
            // A failed tier is retried by its next operation: this check is one, even without other traffic.
            let now_down = match tier.usage().await {
                Ok(usage) => {
                    self.with(kind, |state| state.usage = Some(usage));
                    doubted = 0;
                    None
                }
                Err(e) if too_much(e.cause) && doubted < DOUBTED => {
                    doubted += 1;
                    known.clone().flatten()
                }
                Err(e) => {
                    // The breaker's error says less than the failure that opened it.
                    let shut = e.cause == Cause::BreakerOpen;
                    let reason = shut.then(|| guarded.breaker.reads().reason).flatten();
                    let e = reason.unwrap_or(e);
                    self.told(&e);
                    Some(e)
                }
            };
            if known.as_ref() != Some(&now_down) {
                if now_down.is_none() {
                    self.complaints.up_again(kind);
                    // Earlier fetches say nothing about it.
                    self.with(kind, |state| state.slow = Slow::default());
                }
                self.is_now(kind, now_down.as_ref());
                known = Some(now_down);
            }
            tokio::time::sleep(USAGE_EVERY).await;
        }
    }

    /// Ends when nothing writes into the slots any more, which can be long after the reply.
    async fn fetch(
        &self,
        job: FetchJob,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<Landed, Cause> {
        let kind = job.tier;
        let (hold, ended) = hold();
        let (told, began) = (|e| self.told(&e), Instant::now());
        let places = self.places(kind, &job.sections, &hold).map_err(told)?;
        let converter = self.converter(kind).map_err(told)?;
        let landed = tokio::select! {
            landed = converter.read(&job.name, places, job.portable) => landed.map_err(told),
            _ = cancelled => Err(Cause::Timeout),
        };
        let time = began.elapsed();
        if let Some(late) = self.with(kind, |state| state.slow.took(kind, time, &landed)) {
            self.told(&late);
        }
        drop(hold);
        // Nothing is sent: the sender is dropped with the last hold.
        let _ = ended.await;
        landed
    }

    /// Ends when nothing reads the slots any more.
    async fn put(&self, job: WriteJob) -> Result<Stored, TierError> {
        let (hold, ended) = hold();
        let places = self.places(job.tier, &job.sections, &hold)?;
        drop(hold);
        let converter = self.converter(job.tier)?;
        let object = Object {
            writer: self.writer,
            ..*job.object
        };
        let spans = places.into_iter().map(|place| place.span).collect();
        let put = Put { object, spans };
        let stored = converter.write(put, job.portable).await;
        // Nothing is sent: the sender is dropped with the last hold.
        let _ = ended.await;
        stored
    }

    fn places(
        &self,
        kind: Kind,
        sections: &[Target],
        hold: &Hold,
    ) -> Result<Vec<Place>, TierError> {
        let arena = self.live.get();
        let place = |target: &Target| {
            let section = target.section;
            let offset = u64::from(section.slot.get()) * ROW_BYTES;
            let bytes = arena.as_ref()?.bytes.clone();
            Some(Place {
                group: target.group,
                shard: target.shard,
                span: Span::new(bytes, offset, section.length.get().into(), hold.clone())?,
            })
        };
        let places: Option<Vec<_>> = sections.iter().map(place).collect();
        places.ok_or_else(|| TierError::new(kind, Cause::Gone, "the slots are outside the arena"))
    }
}

/// Looks up names that are no prefix.
async fn lookup_each(tier: Arc<dyn Tier>, names: Vec<ObjectName>) -> Result<Vec<bool>, TierError> {
    let each = names.into_iter().map(|name| {
        let tier = tier.clone();
        async move {
            let found = tier.lookup(&[name]).await?;
            Ok(found.first() == Some(&true))
        }
    });
    stream::iter(each).buffered(LOOKUPS).try_collect().await
}

/// Such an error means that a tier is busy, and hardly that it is broken.
fn too_much(cause: Cause) -> bool {
    matches!(cause, Cause::Throttled | Cause::Timeout | Cause::Busy)
}

/// The drop of the last clone of the sender ends the receiver's wait.
fn hold() -> (Hold, oneshot::Receiver<()>) {
    let (sender, receiver) = oneshot::channel();
    (Arc::new(sender), receiver)
}

fn mode(config: &Config, kind: Kind) -> TierMode {
    match kind {
        Kind::Disk => config.disk.mode,
        Kind::Redis => config.redis.mode,
        Kind::FileSystem => config.file_system.mode,
        Kind::S3 => config.s3.mode,
    }
}
