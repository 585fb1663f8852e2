//! Tiers below memory: what they are asked for, what is fetched from them and what is written down to them.
//! Here live decisions; bytes move in the shell, which carries out orders and reports how each of them ended.
//! With no tier configured nothing of this is ever reached.

mod answer;
mod ask;
#[cfg(any(test, feature = "simulation"))]
mod audit;
mod claims;
mod clearing;
mod flights;
mod flush;
mod head;
mod known;
mod landing;
mod offers;
mod orders;
mod prefix;
mod puts;
mod speed;
mod stats;
mod worth;

pub use clearing::Domains;
pub use flush::Unwritten;
pub use orders::{Landed, Order, Report, Target};
pub use speed::Estimate;
pub use stats::{LoadStats, TierStats, TierView};

pub(crate) use ask::Asking;

use super::config::{TierConfig, WritePolicy};
use super::index::{FastMap, Name};
use super::table::Table;
use super::{Engine, Time};
use crate::tier::{Cause, Kind};
use ask::Lookup;
use claims::Claims;
use clearing::Clearing;
use flights::{Flight, Want};
use flush::Walk;
use head::Origin;
use known::Known;
use kvcachepool_protocol::domain::Domain;
use kvcachepool_protocol::key::{ChunkKey, EngineHash, ModelId, NamespaceId};
use kvcachepool_protocol::object::{Fidelity, ObjectName};
use offers::Offer;
use puts::{Put, Writes};
use speed::Speed;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Most tiers; others are not used.
pub const TIERS_MAX: usize = 4;

/// What a PROBE has to say where lower tiers are asked, too.
#[derive(Debug, Clone)]
pub struct Reach {
    /// Tokens that the engine holds itself; none = an early PROBE, which fetches nothing.
    pub local_tokens: Option<u64>,
    /// Most tokens behind these that the request will load.
    pub max_load_tokens: Option<u64>,
    /// Tokens that the engine computes in a second; 0 = not known.
    pub prefill_tokens_per_s: u64,
    pub domain: Arc<Domain>,
    pub namespace: NamespaceId,
    /// Engine hash of the last block, per key.
    pub hashes: Vec<EngineHash>,
}

impl Reach {
    /// Name of a chunk in every tier.
    fn object(&self, key: ChunkKey) -> ObjectName {
        ObjectName {
            model: self.domain.model_id.hex16(),
            layout: self.domain.layout_id.hex16(),
            key,
            fidelity: Fidelity::Exact,
        }
    }
}

/// Its number in `ProbeReply::tiers`; memory is 1.
pub(crate) fn number(kind: Kind) -> u8 {
    match kind {
        Kind::Disk => 2,
        Kind::Redis => 3,
        Kind::S3 => 4,
    }
}

/// A tier, as far as the engine has to do with it.
#[derive(Debug)]
pub(crate) struct Tier {
    pub config: TierConfig,
    /// Why it is down; none = it is up.
    pub down: Option<String>,
    /// How far a clear is; none = there is none.
    pub clearing: Option<Clearing>,
    /// Why its objects could not be removed when that was tried last.
    pub clear_failed: Option<Cause>,
    pub lookups: u32,
    /// Chunks that wait to be fetched, with the number of their want: one that is over leaves its place behind.
    pub queue: VecDeque<(Name, u64)>,
    pub queued: u32,
    pub fetches: u32,
    pub fetch_bytes: u64,
    pub writes: Writes,
    /// Where a walk through memory is, that writes down what the tier lacks; none = there is none.
    pub walk: Option<Walk>,
    /// A walk begins when the tier is up.
    pub walk_due: bool,
    /// How long a lookup takes, in ms: a moving average.
    pub lookup_ms: u64,
    /// How long a fetch takes, in ms: a moving average.
    pub fetch_ms: u64,
    /// How long fetches take by their bytes.
    pub speed: Speed,
    pub stats: TierStats,
}

impl Tier {
    fn new(config: TierConfig) -> Self {
        // guesses, until something was seen
        let (lookup_ms, fetch_ms) = match config.kind {
            Kind::Disk => (1, 10),
            Kind::Redis => (2, 20),
            Kind::S3 => (40, 150),
        };
        Self {
            config,
            down: Some("Starting".into()),
            clearing: None,
            clear_failed: None,
            lookups: 0,
            queue: VecDeque::new(),
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

    /// It may be asked, and written to.
    pub fn up(&self) -> bool {
        self.down.is_none() && !self.clears()
    }

    /// Is anything ever written to it?
    pub fn is_written(&self) -> bool {
        self.config.write != WritePolicy::None
    }

    /// How long a chunk waits until it is written, in ms.
    pub fn put_wait_ms(&self) -> u64 {
        match self.config.write {
            WritePolicy::WriteBack if !self.flushes() => self.config.put_wait_ms,
            _ => 0,
        }
    }

    /// How long a chunk that is wanted now will take, in ms, where the oldest fetch under way is so old.
    fn expected_ms(&self, oldest_ms: u64) -> u64 {
        let rounds = 1 + u64::from(self.queued) / u64::from(self.config.fetches_max.max(1));
        self.fetch_ms.max(oldest_ms).saturating_mul(rounds)
    }
}

/// A new mean of a duration.
fn mean_ms(before: u64, ms: u64) -> u64 {
    (3 * before + ms).div_ceil(4)
}

/// Everything that has to do with tiers below memory.
#[derive(Debug, Default)]
pub(crate) struct Lower {
    /// The nearest first.
    pub tiers: Vec<Tier>,
    pub known: Known,
    pub claims: Claims,
    pub lookups: BTreeMap<u64, Lookup>,
    pub next_lookup: u64,
    /// Chunks that somebody waits for, queued or under way.
    pub wants: FastMap<Name, Want>,
    pub next_want: u64,
    /// Fetches that the shell has not ended, cancelled ones too.
    pub flights: FastMap<u64, Flight>,
    /// Chunks that may have to be written down.
    pub offers: Vec<Offer>,
    pub puts: BTreeMap<u64, Put>,
    pub next_put: u64,
    /// A bit per tier that a chunk waits for or is written to.
    pub writing: FastMap<Name, u8>,
    /// By layout.
    pub origins: FastMap<u32, Origin>,
    /// Memory holds chunks of an earlier boot.
    pub adopted: bool,
    /// Models whose chunks other processes can name.
    pub models: BTreeSet<ModelId>,
    /// Domains whose objects may lie in tiers.
    pub domains: Domains,
    pub orders: Vec<Order>,
    /// The time, when the engine was called last.
    pub now_ms: u64,
    /// PROBEs whose answer changed since their last one.
    pub news: Vec<u64>,
    /// What was chosen, and what became of it.
    pub loads: LoadStats,
}

impl Lower {
    pub fn new(tiers: &[TierConfig]) -> Self {
        Self {
            tiers: tiers
                .iter()
                .take(TIERS_MAX)
                .map(|t| Tier::new(*t))
                .collect(),
            next_lookup: 1,
            next_want: 1,
            next_put: 1,
            ..Self::default()
        }
    }

    /// Takes changed settings of the tiers that there are. A bit for each that shall be written to otherwise than before.
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

    /// Is the tier for chunks of this namespace? What other processes read has none that they cannot name.
    pub fn serves(&self, at: usize, namespace: &NamespaceId) -> bool {
        let kind = self.tiers.get(at).map(|t| t.config.kind);
        kind == Some(Kind::Disk) || !namespace.is_of_one_process()
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
    /// Orders for the shell since this was called last. What waited for room goes out now.
    pub fn take_orders(&mut self, now: Time) -> Vec<Order> {
        if self.lower.tiers.is_empty() {
            return Vec::new();
        }
        self.lower.now_ms = now.mono_ms;
        self.go_on_clearing(now);
        self.verify_claims(now);
        self.begin_fetches(now);
        self.take_offers(now);
        self.walk_on(now);
        self.begin_puts(now);
        self.tell_news(now);
        std::mem::take(&mut self.lower.orders)
    }

    pub fn reported(&mut self, now: Time, report: Report) {
        match report {
            Report::State { tier, down } => self.tier_state(now, tier, down),
            Report::LookedUp { lookup, present } => self.looked_up(now, lookup, present),
            Report::Fetched { fetch, landed } => self.landed(now, fetch, landed),
            Report::PutDone { put, stored } => self.put_done(now, put, stored),
            Report::Cleared { tier, removed } => self.cleared(now, tier, removed),
        }
    }

    /// A tier is up, or down and why. What is under way with one that went down ends when the shell says so; nothing waits for it.
    fn tier_state(&mut self, now: Time, kind: Kind, down: Option<String>) {
        let Some(at) = self.lower.tiers.iter().position(|t| t.config.kind == kind) else {
            return;
        };
        let gone = down.is_some();
        if let Some(tier) = self.lower.tiers.get_mut(at) {
            tier.down = down;
            tier.walk_due |= gone && tier.flushes();
        }
        if gone {
            self.let_go_of(now, at);
        } else {
            self.came_up(at);
        }
    }

    /// Nothing is asked of a tier any more, and nothing waits for it.
    fn let_go_of(&mut self, now: Time, at: usize) {
        self.lower.known.forget(at);
        self.take_claims_back(at);
        self.end_lookups_of(now, at);
        self.end_wants_of(now, at);
        for flight in self.lower.flights.values_mut().filter(|f| f.tier == at) {
            flight.doubtful = true;
        }
        self.end_puts_of(at);
        self.end_walk(at);
    }

    /// Nothing is asked of tiers, and nobody waits for one.
    #[cfg(any(test, feature = "simulation"))]
    pub fn lower_idle(&self) -> bool {
        self.lower.lookups.is_empty()
            && self.lower.wants.is_empty()
            && self.lower.flights.is_empty()
            && self.lower.puts.is_empty()
            && self.lower.writing.is_empty()
    }

    /// What was chosen for loads from tiers below memory.
    pub fn loads(&self) -> &LoadStats {
        &self.lower.loads
    }

    /// Tiers below memory, the nearest first.
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
