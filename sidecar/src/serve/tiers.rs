//! What the core orders from tiers below memory, carried out on threads beside the sockets' one. How each order ended is posted.

use super::complaints::Complaints;
use super::host::Live;
use super::sections::read;
use super::shell::Posted;
use super::slow::Slow;
use kvcachepool_engine::{Domains, FetchId, Landed, Order, Report, Target};
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::object::{Object, ObjectName};
use kvcachepool_protocol::table::ROW_BYTES;
use kvcachepool_tiers::layers::{Layered, State, layered};
use kvcachepool_tiers::{
    Cause, Kind, Opening, Place, Put, Removal, Server, Span, Stored, Tier, TierError, Usage, Whose,
    clear, configured,
};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tracing::{info, warn};

/// A tier that cannot be opened is tried again after this.
const RETRY: Duration = Duration::from_secs(5);
/// How often what a tier holds is asked for.
const USAGE_EVERY: Duration = Duration::from_secs(2);
/// So many looks in a row may end because too much is asked before the tier counts as down.
const DOUBTED: u32 = 3;
/// Threads that digests and sockets of tiers share.
const THREADS: usize = 2;

/// The tiers below memory of this sidecar.
pub struct Tiers {
    runtime: Runtime,
    shared: Arc<Shared>,
    openings: Vec<Arc<Opening>>,
}

struct Shared {
    live: Arc<Live>,
    post: UnboundedSender<Posted>,
    /// Of this process, in the heads of what it writes.
    writer: [u8; 16],
    open: Mutex<BTreeMap<Kind, Layered>>,
    usage: Mutex<BTreeMap<Kind, Usage>>,
    complaints: Complaints,
    /// Why a tier is down, for people.
    down: Mutex<BTreeMap<Kind, String>>,
    /// Why a clear could not remove what a tier holds, for people.
    uncleared: Mutex<BTreeMap<Kind, String>>,
    /// Why a tier goes on by the config before the last one.
    unchanged: Mutex<BTreeMap<Kind, TierError>>,
    slow: Slow,
    /// Tells a fetch that nobody waits for it any more.
    fetches: Mutex<HashMap<FetchId, oneshot::Sender<()>>>,
}

impl Tiers {
    /// Opens the tiers that are configured, in the background. None: there is none.
    pub fn start(
        config: &Config,
        boot: u64,
        live: Arc<Live>,
        post: UnboundedSender<Posted>,
    ) -> std::io::Result<Option<Arc<Self>>> {
        let openings: Vec<_> = configured(config).into_iter().map(Arc::new).collect();
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
            open: Mutex::default(),
            usage: Mutex::default(),
            complaints: Complaints::default(),
            down: Mutex::default(),
            uncleared: Mutex::default(),
            unchanged: Mutex::default(),
            slow: Slow::default(),
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

    /// Lets tiers go by what a changed config says of them. Returns those of which it cannot be right: they go on as before.
    pub fn change(&self, before: &Config, config: &Config) -> Vec<Kind> {
        let mut unchanged = self.shared.unchanged.lock();
        unchanged.clear();
        for opening in &self.openings {
            if let Err(e) = opening.change(before, config) {
                let (tier, reason) = (e.tier.name(), e.cause.name());
                warn!(tier, reason, error = %e, "what the changed config says of a tier cannot be right; it goes on as before");
                let detail = format!("it goes on as before: {}", e.detail);
                unchanged.insert(opening.kind, TierError { detail, ..e });
            }
        }
        unchanged.keys().copied().collect()
    }

    /// What a tier held when it was asked last.
    pub fn usage(&self, kind: &str) -> Option<Usage> {
        let usage = self.shared.usage.lock();
        let found = usage.iter().find(|(k, _)| k.name() == kind);
        found.map(|(_, usage)| *usage)
    }

    /// Why a tier is down, or why a clear cannot remove what it holds, for people; empty = neither.
    pub fn why_down(&self, kind: &str) -> String {
        let said = |whys: &Mutex<BTreeMap<Kind, String>>| {
            let whys = whys.lock();
            let found = whys.iter().find(|(k, _)| k.name() == kind);
            found.map(|(_, why)| why.clone())
        };
        let why = said(&self.shared.down).or_else(|| said(&self.shared.uncleared));
        why.unwrap_or_default()
    }

    /// What an open tier says of itself; none = it is not open.
    fn of<T>(&self, kind: &str, says: impl FnOnce(&Layered) -> T) -> Option<T> {
        let open = self.shared.open.lock();
        let found = open.iter().find(|(k, _)| k.name() == kind);
        found.map(|(_, open)| says(open))
    }

    /// Why a tier that is up is not all that it should be: a changed config cannot be right, nothing is written to it, or it is slow;
    /// none = it is.
    pub fn trouble(&self, kind: &str) -> Option<TierError> {
        let unchanged = || {
            let unchanged = self.shared.unchanged.lock();
            let found = unchanged.iter().find(|(k, _)| k.name() == kind);
            found.map(|(_, e)| e.clone())
        };
        let shut = || self.of(kind, |layers| layers.breaker.writes().shut());
        unchanged()
            .or_else(|| shut().flatten())
            .or_else(|| self.shared.slow.of(kind))
    }

    /// What is strange in a tier that serves, for people: names in its folder that are none of the cache's, objects that could not be
    /// used; empty = nothing.
    pub fn remark(&self, kind: &str) -> String {
        let remarks = [self.foreign_files(kind)]
            .into_iter()
            .flatten()
            .chain(self.shared.complaints.of_objects(kind));
        remarks.collect::<Vec<_>>().join("; ")
    }

    fn foreign_files(&self, kind: &str) -> Option<String> {
        let counters = self.of(kind, |layers| layers.tier.info().counters.now());
        let foreign = counters
            .iter()
            .flatten()
            .find(|(event, count)| *event == "ForeignFile" && *count > 0);
        let said = |(event, count): &(&str, u64)| {
            format!("{event}: {count} names in the folder are not the cache's and are left alone")
        };
        foreign.map(said)
    }

    /// The servers of a tier that has several, as they are known to be.
    pub fn servers(&self, kind: &str) -> Vec<Server> {
        self.of(kind, |layers| layers.tier.info().servers.now())
            .unwrap_or_default()
    }

    /// What was asked of each tier, and what became of it.
    pub fn metrics(&self, put: &mut dyn FnMut(&'static str, &[&str], f64)) {
        for (kind, layers) in self.shared.open.lock().iter() {
            let (tier, info) = (kind.name(), layers.tier.info());
            for server in info.servers.now() {
                let up = f64::from(u8::from(server.up));
                put("tier_server_up", &[tier, &server.name], up);
            }
            for (operations, side) in [
                ("reads", layers.breaker.reads()),
                ("writes", layers.breaker.writes()),
            ] {
                let open = f64::from(u8::from(side.state == State::Open));
                put("tier_breaker_open", &[tier, operations], open);
            }
            for (event, count) in info.counters.now() {
                put("tier_events_total", &[tier, event], count as f64);
            }
            for tally in layers.counts.tally() {
                let operation = tally.op.name();
                for (result, count) in &tally.results {
                    put(
                        "tier_operations_total",
                        &[tier, operation, result],
                        *count as f64,
                    );
                }
                let seconds = tally.took.as_secs_f64();
                put("tier_operation_seconds_total", &[tier, operation], seconds);
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
            put("tier_retries_total", &[tier], layers.retried() as f64);
            put(
                "tier_corrupt_objects_total",
                &[tier],
                layers.corrupt() as f64,
            );
            put(
                "tier_scribbled_gets_total",
                &[tier],
                layers.scribbled() as f64,
            );
        }
    }

    /// Does what the core wants. Returns at once.
    pub fn carry_out(&self, order: Order) {
        let shared = self.shared.clone();
        match order {
            Order::Lookup {
                lookup,
                tier,
                names,
            } => {
                let region = shared.region();
                self.runtime.spawn(async move {
                    let present = match shared.tier(tier) {
                        Ok(tier) => tier.lookup(&names).await,
                        Err(e) => Err(e),
                    };
                    let present = present.map_err(|e| shared.told(&e));
                    shared.report(region, Report::LookedUp { lookup, present });
                });
            }
            Order::Fetch {
                fetch,
                tier,
                name,
                sections,
            } => {
                let (cancel, cancelled) = oneshot::channel();
                shared.fetches.lock().insert(fetch, cancel);
                let arena = shared.live.get();
                self.runtime.spawn(async move {
                    let region = arena.as_ref().map(|a| a.geometry.region);
                    let landed = shared.fetch(arena, tier, name, sections, cancelled).await;
                    shared.fetches.lock().remove(&fetch);
                    shared.report(region, Report::Fetched { fetch, landed });
                });
            }
            Order::CancelFetch { fetch } => {
                if let Some(cancel) = shared.fetches.lock().remove(&fetch) {
                    // One that has just ended does not hear it.
                    let _ = cancel.send(());
                }
            }
            Order::Put {
                put,
                tier,
                object,
                sections,
                look_first,
            } => {
                let arena = shared.live.get();
                self.runtime.spawn(async move {
                    let region = arena.as_ref().map(|a| a.geometry.region);
                    let stored = if look_first && shared.has(tier, object.name()).await {
                        Ok(Stored::Already)
                    } else {
                        shared.put(arena, tier, *object, sections).await
                    };
                    let stored = stored.map_err(|e| shared.told(&e));
                    shared.report(region, Report::PutDone { put, stored });
                });
            }
            Order::Discard { tier, name } => {
                self.runtime.spawn(async move {
                    let discarded = match shared.tier(tier) {
                        Ok(tier) => tier.remove(Removal::Unusable(&name)).await,
                        Err(e) => Err(e),
                    };
                    if let Err(e) = discarded {
                        shared.told(&e);
                    }
                });
            }
            Order::Clear { tier, domains } => {
                let region = shared.region();
                self.runtime.spawn(async move {
                    let removed = shared.clear(tier, domains).await;
                    let removed = removed.map_err(|e| shared.told(&e));
                    shared.report(region, Report::Cleared { tier, removed });
                });
            }
            // A lookup has a deadline of its own, and its report is ignored; news are the core's own.
            Order::CancelLookup { .. } | Order::News { .. } => {}
        }
    }
}

impl Shared {
    fn region(&self) -> Option<u64> {
        self.live.get().map(|arena| arena.geometry.region)
    }

    fn report(&self, region: Option<u64>, report: Report) {
        // A closed channel means that the process ends.
        let _ = self.post.send(Posted::Tier { region, report });
    }

    /// Logs what a person has to know of, and keeps the name.
    fn told(&self, e: &TierError) -> Cause {
        self.complaints.heard(e);
        e.cause
    }

    /// Is an object there, and one that can be used? Its head says so; a lookup may go by what was there a while ago. One that cannot be
    /// read is taken to be missing.
    async fn has(&self, kind: Kind, name: ObjectName) -> bool {
        match self.tier(kind) {
            Ok(tier) => tier.head(&name).await.is_ok(),
            Err(_) => false,
        }
    }

    /// Removes objects: of these domains, or all. What keeps it from that is kept for status.
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
        // That nothing is tried for a while says less than why.
        let removed = removed.map_err(|e| self.not_tried_after(e));
        match &removed {
            Ok(removed) => {
                self.uncleared.lock().remove(&kind);
                info!(tier = kind.name(), removed, "cleared");
            }
            Err(e) => drop(self.uncleared.lock().insert(kind, e.detail.clone())),
        }
        removed
    }

    /// The failure after which writes are not tried for a while, where this says no more than that.
    fn not_tried_after(&self, e: TierError) -> TierError {
        let open = self.open.lock();
        let layers = open.get(&e.tier);
        let shut = layers.filter(|_| e.cause == Cause::BreakerOpen);
        shut.and_then(|layers| layers.breaker.writes().reason)
            .unwrap_or(e)
    }

    fn tier(&self, kind: Kind) -> Result<Arc<dyn Tier>, TierError> {
        let open = self.open.lock();
        let tier = open.get(&kind).map(|layers| layers.tier.clone());
        tier.ok_or_else(|| TierError::new(kind, Cause::Gone, "it is not open"))
    }

    /// Lets the core know how a tier is, and status why.
    fn is_now(&self, kind: Kind, down: Option<&TierError>) {
        match down {
            Some(e) => drop(self.down.lock().insert(kind, e.detail.clone())),
            None => drop(self.down.lock().remove(&kind)),
        }
        let down = down.map(|e| e.cause.name().to_owned());
        self.report(None, Report::State { tier: kind, down });
    }

    /// Opens a tier, again and again until that works, and looks what it holds from then on.
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
        let (tier, breaker) = (layers.tier.clone(), layers.breaker.clone());
        info!(
            tier = kind.name(),
            place = opening.place(),
            "a tier is open"
        );
        self.open.lock().insert(kind, layers);
        // Not known before it answered for the first time: some are open without having been asked anything.
        let (mut known, mut doubted) = (None::<Option<TierError>>, 0);
        loop {
            // One that failed is tried again by whatever asks for it: this does, also where nobody else would.
            let now_down = match tier.usage().await {
                Ok(usage) => {
                    self.usage.lock().insert(kind, usage);
                    doubted = 0;
                    None
                }
                Err(e) if too_much(e.cause) && doubted < DOUBTED => {
                    doubted += 1;
                    known.clone().flatten()
                }
                Err(e) => {
                    // that nothing is tried for a while says less than why
                    let shut = e.cause == Cause::BreakerOpen;
                    let e = shut.then(|| breaker.reads().reason).flatten().unwrap_or(e);
                    self.told(&e);
                    Some(e)
                }
            };
            if known.as_ref() != Some(&now_down) {
                if now_down.is_none() {
                    self.complaints.up_again(kind);
                    self.slow.up_again(kind);
                }
                self.is_now(kind, now_down.as_ref());
                known = Some(now_down);
            }
            tokio::time::sleep(USAGE_EVERY).await;
        }
    }

    /// Ends when nothing writes into the slots any more, however long after the answer that is.
    async fn fetch(
        &self,
        arena: Option<Arena>,
        kind: Kind,
        name: ObjectName,
        sections: Vec<Target>,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<Landed, Cause> {
        let (hold, ended) = hold();
        let (told, began) = (|e| self.told(&e), Instant::now());
        let bytes = arena.map(|a| a.bytes);
        let places = places(kind, bytes.as_ref(), &sections, &hold).map_err(told)?;
        let tier = self.tier(kind).map_err(told)?;
        let landed = tokio::select! {
            landed = read(tier.as_ref(), &name, &places) => landed.map_err(told),
            _ = cancelled => Err(Cause::Timeout),
        };
        if let Some(late) = self.slow.took(kind, began.elapsed(), &landed) {
            self.told(&late);
        }
        drop((places, hold));
        // The sender is never used: it goes with the last hold.
        let _ = ended.await;
        landed
    }

    /// Ends when nothing reads the slots any more.
    async fn put(
        &self,
        arena: Option<Arena>,
        kind: Kind,
        object: Object,
        sections: Vec<Target>,
    ) -> Result<Stored, TierError> {
        let (hold, ended) = hold();
        let bytes = arena.map(|a| a.bytes);
        let places = places(kind, bytes.as_ref(), &sections, &hold)?;
        drop(hold);
        let tier = self.tier(kind)?;
        let object = Object {
            writer: self.writer,
            ..object
        };
        let spans = places.into_iter().map(|place| place.span).collect();
        let stored = tier.put(Put { object, spans }).await;
        // The sender is never used: it goes with the last hold.
        let _ = ended.await;
        stored
    }
}

/// It says that a tier is busy, and little of whether it works.
fn too_much(cause: Cause) -> bool {
    matches!(cause, Cause::Throttled | Cause::Timeout | Cause::Busy)
}

/// Whatever is dropped last among its clones ends the receiver's wait.
fn hold() -> (Arc<oneshot::Sender<()>>, oneshot::Receiver<()>) {
    let (sender, receiver) = oneshot::channel();
    (Arc::new(sender), receiver)
}

fn places(
    kind: Kind,
    arena: Option<&Arc<Mapping>>,
    sections: &[Target],
    hold: &Arc<oneshot::Sender<()>>,
) -> Result<Vec<Place>, TierError> {
    let place = |target: &Target| {
        let (offset, length) = range(target);
        Some(Place {
            group: target.group,
            shard: target.shard,
            span: Span::new(arena?.clone(), offset, length, hold.clone())?,
        })
    };
    let places: Option<Vec<_>> = sections.iter().map(place).collect();
    places.ok_or_else(|| {
        TierError::new(
            kind,
            Cause::Gone,
            "the memory that it was meant for is gone",
        )
    })
}

/// Offset in the arena and bytes.
fn range(target: &Target) -> (u64, u64) {
    let section = target.section;
    (
        u64::from(section.slot.get()) * ROW_BYTES,
        u64::from(section.length.get()),
    )
}
