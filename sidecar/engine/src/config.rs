//! Configuration of engine and sessions, in plain units.

use crate::tier::Kind;
use kvcachepool_protocol::config as file;
pub use kvcachepool_protocol::config::{
    Admission, EvictionPolicy, LoadOrRecompute, TransferMode, Verify, WritePolicy,
};
use kvcachepool_protocol::message::Settings;
use kvcachepool_protocol::object::Fidelity;

/// Limits, all visible in the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sessions. A session is one role of one process.
    pub sessions_max: u32,
    /// Requests with pins or leases, over all schedulers.
    pub requests_max: u32,
    /// Bytes granted and not committed, over all workers; 0 = a quarter of the arena.
    pub granted_bytes_max: u64,
    /// Entries of the index (chunk records of a new arena).
    pub index_entries_max: u32,
    /// Percent of the arena that soft pins may hold.
    pub soft_pin_percent_max: u32,
    /// Share of the arena that the opaque objects of one namespace may hold.
    pub namespace_percent_max: u32,
    /// Percent of the arena that admin pins may hold.
    pub admin_pin_percent_max: u32,
    /// Events kept for EVENTS.
    pub events_max: u32,
}

/// A tier below memory. All limits are per tier, so a hanging tier does not slow the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierConfig {
    pub kind: Kind,
    pub write: WritePolicy,
    pub admission: Admission,
    pub lookups_max: u32,
    pub fetches_max: u32,
    /// Bytes being fetched, at most a quarter of the limit on granted bytes. A single larger chunk is still fetched.
    pub fetch_bytes_max: u64,
    /// Chunks that wait to be fetched.
    pub fetch_queue_max: u32,
    pub puts_max: u32,
    /// Bytes being written, at most a quarter of the limit on granted bytes. A single larger chunk is still written.
    pub put_bytes_max: u64,
    /// Bytes of chunks that wait to be written. Beyond it, the oldest chunk is dropped. A single larger chunk may wait.
    pub put_queue_bytes_max: u64,
    /// With `WriteBack`: time before a chunk is written. Milliseconds.
    pub put_wait_ms: u64,
    /// A chunk that has been due for this long is dropped. Milliseconds.
    pub put_age_ms_max: u64,
}

impl TierConfig {
    /// A tier with the default limits.
    pub fn new(kind: Kind) -> Self {
        Self::of(kind, &file::Config::default())
    }

    /// The bounds of a config file are those of each tier.
    fn of(kind: Kind, config: &file::Config) -> Self {
        let (write, bounds) = (&config.write, &config.limits.tiers);
        Self {
            kind,
            write: write.policy,
            admission: write.admission,
            lookups_max: bounds.lookups,
            fetches_max: bounds.fetches,
            fetch_bytes_max: bounds.fetch_bytes.0,
            fetch_queue_max: bounds.fetch_queue,
            puts_max: bounds.writes,
            put_bytes_max: bounds.write_bytes.0,
            put_queue_bytes_max: bounds.write_queue_bytes.0,
            put_wait_ms: write.back_after.ms,
            put_age_ms_max: bounds.write_queue_age.ms,
        }
    }
}

/// Parameters of `sessions::Core` at start and at a reload.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Settings that HELLO's reply gives to connectors.
    pub settings: Settings,
    /// Bytes of a new arena. Needs a restart.
    pub arena_bytes: u64,
    /// Needs a restart.
    pub policy: EvictionPolicy,
    pub verify: Verify,
    /// With `Background`: age of a check after which a hit is checked again. Milliseconds.
    pub verify_age_ms: u64,
    /// Checks in flight after a start.
    pub sweep_in_flight_max: u32,
    pub limits: Limits,
    /// Duration of a soft pin. Milliseconds.
    pub soft_pin_ms: u64,
    /// Time from the proof of a GPU writer's death to the release of its slots. Milliseconds.
    pub quarantine_ms: u64,
    /// An incomplete chunk without an open grant is removed after this. Milliseconds.
    pub incomplete_ms: u64,
    /// Reads from lower tiers may outlive the engine process (io_uring into slots).
    pub fetch_outlives_engine: bool,
    /// Limit on reads from lower tiers, in bytes per second; 0 = no limit.
    pub read_bytes_per_s: u64,
    /// Limit on writes to lower tiers and background checks, in bytes per second; 0 = no limit.
    pub write_bytes_per_s: u64,
    /// Whether loads are skipped when prefill is quicker.
    pub load_or_recompute: LoadOrRecompute,
    /// What the codec of lower tiers loses. Needs a restart.
    pub fidelity: Fidelity,
    /// Transfer mode of workers, applied at each REGISTER.
    pub transfer: TransferMode,
    /// Default and largest size of a worker's window. Bytes.
    pub window_bytes: u64,
    /// Tiers below memory, nearest first. A different set needs a restart. A tier is down until the shell reports it up.
    pub tiers: Vec<TierConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self::from(&file::Config::default())
    }
}

impl From<&file::Config> for Config {
    fn from(config: &file::Config) -> Self {
        let limits = &config.limits;
        Self {
            settings: config.settings(),
            arena_bytes: config.memory.size.0,
            policy: config.memory.eviction_policy,
            verify: config.memory.verify,
            verify_age_ms: config.memory.verify_age.ms,
            sweep_in_flight_max: 32,
            limits: Limits {
                sessions_max: limits.sessions,
                requests_max: limits.requests,
                granted_bytes_max: limits.granted_bytes.0,
                index_entries_max: limits.index_entries,
                soft_pin_percent_max: u32::from(limits.pinned_share.0),
                admin_pin_percent_max: 25,
                namespace_percent_max: u32::from(limits.namespace_share.0),
                events_max: limits.events,
            },
            soft_pin_ms: 30_000,
            quarantine_ms: 30_000,
            incomplete_ms: 30_000,
            fetch_outlives_engine: false,
            read_bytes_per_s: config.pacing.read_bytes_per_second.0,
            write_bytes_per_s: config.pacing.write_bytes_per_second.0,
            load_or_recompute: config.cache.load_or_recompute,
            fidelity: config.write.codec.of_objects().fidelity(),
            transfer: config.transfer.mode,
            window_bytes: config.transfer.window_size.0,
            tiers: Kind::configured(config)
                .map(|kind| TierConfig::of(kind, config))
                .collect(),
        }
    }
}
