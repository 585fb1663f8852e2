//! Tiers below memory: lookups, fetches and writes.
//! This module only decides. The shell moves bytes: it carries out each `Effect` and returns its `Completion`. Without a configured tier,
//! none of this code runs.

mod answer;
mod ask;
mod check;
mod claims;
mod clearing;
mod fetches;
mod flush;
mod head;
mod known;
mod landing;
mod objects;
mod puts;
mod removals;
mod speed;
mod stats;
mod worth;

pub use flush::Unwritten;
pub use removals::TooManyRemovals;
pub use speed::Estimate;
pub use stats::{LoadStats, TierStats, TierView};

pub(crate) use ask::TierLookup;

use super::config::{TierConfig, WritePolicy};
use super::memory::Handle;
use super::name::{FastMap, Name};
use super::table::Table;
use super::{Engine, Time};
use crate::effect::Domains;
use crate::tier::{Cause, Kind};
use ask::Lookup;
use claims::Claims;
use clearing::Clearing;
use fetches::{FetchInFlight, PendingFetch};
use flush::Walk;
use head::Origin;
use known::Known;
use kvcachepool_protocol::domain::Domain;
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, ModelId, NamespaceId};
use kvcachepool_protocol::object::{Fidelity, ObjectName};
use puts::{Offer, Put, Writes};
use removals::Removal;
use speed::Speed;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Limit on tiers. Further ones are ignored.
pub const TIERS_MAX: usize = 4;

/// Data that a PROBE must provide for lookups in lower tiers.
#[derive(Debug, Clone)]
pub struct Reach {
    pub kind: KeyKind,
    /// Tokens that the engine holds locally; none = an early PROBE, which fetches nothing.
    pub local_tokens: Option<u64>,
    /// Limit on tokens that the request loads after the local ones.
    pub max_load_tokens: Option<u64>,
    /// Prefill speed of the engine, in tokens per second; 0 = unknown.
    pub prefill_tokens_per_s: u64,
    pub domain: Arc<Domain>,
    pub namespace: NamespaceId,
    /// Engine hash of the last block of each key's chunk.
    pub hashes: Vec<EngineHash>,
}

impl Reach {
    /// Object name of a chunk, the same in every tier.
    pub(crate) fn object(&self, key: ChunkKey) -> ObjectName {
        object_of(&self.domain, key)
    }
}

fn object_of(domain: &Domain, key: ChunkKey) -> ObjectName {
    ObjectName {
        model: domain.model_id.hex16(),
        layout: domain.object_layout.hex16(),
        key,
        fidelity: Fidelity::Exact,
    }
}

/// Number of a tier in `ProbeReply::tiers`; memory is 1.
pub(crate) fn number(kind: Kind) -> u8 {
    match kind {
        Kind::Disk => 2,
        Kind::Redis => 3,
        Kind::S3 => 4,
        Kind::FileSystem => 5,
    }
}

#[derive(Debug)]
pub(crate) struct Tier {
    pub config: TierConfig,
    /// Reason why the tier is down; none = up.
    pub down: Option<String>,
    /// Progress of a clear; none = no clear is in progress.
    pub clearing: Option<Clearing>,
    /// Cause of the last failed removal.
    pub clear_failed: Option<Cause>,
    /// No removal of opaque objects has succeeded since this time.
    pub removals_fail_since_ms: Option<u64>,
    /// Names in the next order to remove objects.
    pub removal_names_max: usize,
    pub lookups: u32,
    /// Chunks that wait to be fetched, with the number of their `PendingFetch`. Entries of ended ones stay until they are popped.
    pub queue: VecDeque<(Name, u64)>,
    /// Opaque objects whose heads must be read before that, in the same form.
    pub heads: VecDeque<(Name, u64)>,
    pub queued: u32,
    pub fetches: u32,
    pub fetch_bytes: u64,
    pub writes: Writes,
    /// Progress of a flush; none = no flush is running.
    pub walk: Option<Walk>,
    /// A flush starts once the tier is up.
    pub walk_due: bool,
    /// Moving average of lookup time. Milliseconds.
    pub lookup_ms: u64,
    /// Moving average of fetch time. Milliseconds.
    pub fetch_ms: u64,
    /// Fetch time by bytes.
    pub speed: Speed,
    pub stats: TierStats,
}

impl Tier {
    fn new(config: TierConfig) -> Self {
        // initial guesses, until measurements exist
        let (lookup_ms, fetch_ms) = match config.kind {
            Kind::Disk => (1, 10),
            Kind::Redis => (2, 20),
            Kind::FileSystem => (5, 30),
            Kind::S3 => (40, 150),
        };
        Self {
            config,
            down: Some("Starting".into()),
            clearing: None,
            clear_failed: None,
            removals_fail_since_ms: None,
            removal_names_max: removals::NAMES_MAX,
            lookups: 0,
            queue: VecDeque::new(),
            heads: VecDeque::new(),
            queued: 0,
            fetches: 0,
            fetch_bytes: 0,
            writes: Writes::default(),
            walk: None,
            walk_due: false,
            lookup_ms,
            fetch_ms,
            speed: Speed::default(),
            stats: TierStats::default(),
        }
    }

    /// True if the tier accepts lookups, fetches and writes.
    pub fn up(&self) -> bool {
        self.down.is_none() && !self.clears()
    }

    /// True if the configuration writes to this tier.
    pub fn is_written(&self) -> bool {
        self.config.write != WritePolicy::None
    }

    /// How long a chunk waits before it is written. Milliseconds.
    pub fn put_wait_ms(&self) -> u64 {
        match self.config.write {
            WritePolicy::WriteBack if !self.flushes() => self.config.put_wait_ms,
            _ => 0,
        }
    }

    /// Expected time of a new fetch, in ms, given the age of the oldest fetch in flight.
    fn expected_ms(&self, oldest_ms: u64) -> u64 {
        let rounds = 1 + u64::from(self.queued) / u64::from(self.config.fetches_max.max(1));
        self.fetch_ms.max(oldest_ms).saturating_mul(rounds)
    }
}

fn mean_ms(before: u64, ms: u64) -> u64 {
    (3 * before + ms).div_ceil(4)
}

/// State of all tiers below memory.
#[derive(Debug, Default)]
pub(crate) struct TierPlanner {
    /// Nearest tier first.
    tiers: Vec<Tier>,
    known: Known,
    claims: Claims,
    lookups: BTreeMap<u64, Lookup>,
    next_lookup: u64,
    /// Pending fetches, queued or in flight.
    pending: FastMap<Name, PendingFetch>,
    next_pending: u64,
    /// Heads in flight, with their tiers, by the number of the `PendingFetch` that they are for.
    heads: BTreeMap<u64, (usize, Name)>,
    /// Removals that a tier has not confirmed, by tier.
    removals: FastMap<(usize, Name), Removal>,
    /// Orders of removals in flight, with their tiers.
    ordered: BTreeMap<u64, (usize, Vec<Name>)>,
    next_removal: u64,
    /// Fetches that the shell has not completed, including cancelled ones.
    in_flight: FastMap<u64, FetchInFlight>,
    /// Chunks that may have to be written.
    offers: Vec<Offer>,
    puts: BTreeMap<u64, Put>,
    next_put: u64,
    /// Bit mask of the tiers for which a chunk is queued or being written.
    writing: FastMap<Name, u8>,
    /// Writer's data by the engine's number of the layout.
    origins: FastMap<u32, Origin>,
    /// True if memory holds chunks of an earlier boot.
    adopted: bool,
    /// Models whose chunks other processes can name.
    models: BTreeSet<ModelId>,
    /// Domains whose objects may be in tiers.
    domains: Domains,
    /// Monotonic time of the last call.
    now_ms: u64,
    /// PROBEs whose answers changed since their last update.
    updates: Vec<u64>,
    /// Counters of load choices and their outcomes.
    loads: LoadStats,
}

impl TierPlanner {
    pub fn new(tiers: &[TierConfig]) -> Self {
        Self {
            tiers: tiers
                .iter()
                .take(TIERS_MAX)
                .map(|t| Tier::new(*t))
                .collect(),
            next_lookup: 1,
            next_pending: 1,
            next_put: 1,
            ..Self::default()
        }
    }

    /// Applies changed settings of existing tiers. Returns a bit mask of the tiers whose write policy changed.
    pub fn configure(&mut self, tiers: &[TierConfig]) -> u8 {
        let mut otherwise = 0;
        for (at, tier) in self.tiers.iter_mut().enumerate() {
            if let Some(config) = tiers.iter().find(|c| c.kind == tier.config.kind) {
                let writes = |c: &TierConfig| (c.write, c.admission);
                otherwise |= u8::from(writes(config) != writes(&tier.config)) << at;
                tier.config = *config;
            }
        }
        otherwise
    }

    /// True if the tier takes chunks of this namespace. A shared tier takes only namespaces that other processes can name.
    pub fn serves(&self, at: usize, namespace: &NamespaceId) -> bool {
        let kind = self.tiers.get(at).map(|t| t.config.kind);
        kind == Some(Kind::Disk) || !namespace.is_of_one_process()
    }

    /// The time of the call in progress.
    pub fn set_now(&mut self, now: Time) {
        self.now_ms = now.mono_ms;
    }

    /// Memory holds chunks of an earlier boot.
    pub fn adopted(&mut self) {
        self.adopted = true;
    }

    /// The answer to a PROBE changed.
    pub fn changed(&mut self, probe: u64) {
        self.updates.push(probe);
    }

    /// True if EVENTS reports chunks on disk.
    pub fn claims_any(&self) -> bool {
        !self.claims.is_empty()
    }

    /// Chunks that are being written to tiers.
    pub fn being_written(&self) -> impl Iterator<Item = Handle> + '_ {
        self.puts.values().map(|put| put.chunk)
    }

    pub fn any_up(&self) -> bool {
        self.tiers.iter().any(Tier::up)
    }

    pub fn stat(&mut self, tier: usize, count: impl FnOnce(&mut TierStats)) {
        if let Some(t) = self.tiers.get_mut(tier) {
            count(&mut t.stats);
        }
    }
}

impl<T: Table> Engine<T> {
    /// Starts queued work of the tiers for which there is room now.
    pub(crate) fn advance_tiers(&mut self, now: Time) {
        if self.lower.tiers.is_empty() {
            return;
        }
        self.lower.now_ms = now.mono_ms;
        self.advance_clears(now);
        self.verify_claims(now);
        self.begin_heads();
        self.begin_fetches(now);
        self.advance_removals(now);
        self.take_offers(now);
        self.advance_flushes(now);
        self.begin_puts(now);
        self.send_updates(now);
    }

    /// A tier went up, or down with a reason. Requests stop waiting for a tier that is down; its orders end when the shell reports them.
    pub(crate) fn tier_state(&mut self, now: Time, kind: Kind, down: Option<String>) {
        let Some(at) = self.lower.tiers.iter().position(|t| t.config.kind == kind) else {
            return;
        };
        let gone = down.is_some();
        if let Some(tier) = self.lower.tiers.get_mut(at) {
            tier.down = down;
            tier.removals_fail_since_ms = None;
            tier.walk_due |= gone && tier.flushes();
        }
        if gone {
            self.cancel_all_of(now, at);
        } else {
            self.lower.came_up(at);
        }
    }

    /// Cancels everything that waits for a tier.
    fn cancel_all_of(&mut self, now: Time, at: usize) {
        self.lower.known.forget(at);
        self.take_claims_back(at);
        self.end_lookups_of(now, at);
        self.end_pending_of(now, at);
        for flight in self.lower.in_flight.values_mut().filter(|f| f.tier == at) {
            flight.doubtful = true;
        }
        self.end_puts_of(at);
        self.lower.end_walk(at);
    }

    /// True if no tier is asked and nothing waits for one.
    pub fn lower_idle(&self) -> bool {
        self.lower.lookups.is_empty()
            && self.lower.pending.is_empty()
            && self.lower.in_flight.is_empty()
            && self.lower.puts.is_empty()
            && self.lower.removals.is_empty()
            && self.lower.writing.is_empty()
    }

    /// Counters of load choices from lower tiers.
    pub fn loads(&self) -> &LoadStats {
        &self.lower.loads
    }

    /// Tiers below memory, nearest first.
    pub fn tiers(&self) -> impl Iterator<Item = TierView<'_>> {
        self.lower.tiers.iter().map(|t| TierView {
            kind: t.config.kind,
            down: t.down.as_deref().or(t.clear_failed.map(Cause::name)),
            clears: t.clears(),
            stats: &t.stats,
            expected_ms: [t.lookup_ms, t.fetch_ms],
            estimate: t.speed.estimate(self.lower.now_ms),
            fetches_waiting: t.queued,
            fetch_bytes: t.fetch_bytes,
            writes_waiting: t.writes.queue.len(),
            waiting_bytes: t.writes.queue_bytes,
            write_bytes: t.writes.put_bytes,
        })
    }
}

#[cfg(test)]
impl TierPlanner {
    /// Key of the chunk that a write in flight writes.
    pub fn written_key(&self, put: u64) -> ChunkKey {
        self.puts[&put].name.key
    }
}
