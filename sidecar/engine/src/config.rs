//! What the engine and the sessions need to know from the configuration, in plain units.

use crate::tier::Kind;
use kvcachepool_protocol::config as file;
pub use kvcachepool_protocol::config::{
    Admission, EvictionPolicy, LoadOrRecompute, TransferMode, Verify, WritePolicy,
};
use kvcachepool_protocol::message::Settings;
use kvcachepool_protocol::object::Fidelity;

/// Bounds, all visible in status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sessions: one role of one process each.
    pub sessions_max: u32,
    /// Requests with pins or leases, over all schedulers.
    pub requests_max: u32,
    /// Bytes granted and not yet committed, over all workers; 0 = a quarter of the arena.
    pub granted_bytes_max: u64,
    /// Entries of the index (chunk records of a new arena).
    pub index_entries_max: u32,
    /// Percent of the arena that soft pins may hold.
    pub soft_pin_percent_max: u32,
    /// Percent of the arena that admin pins may hold.
    pub admin_pin_percent_max: u32,
    /// Events kept for EVENTS.
    pub events_max: u32,
}

/// One tier below memory. All bounds are the tier's own: one that hangs takes nothing from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierConfig {
    /// Which.
    pub kind: Kind,
    /// What is written down.
    pub write: WritePolicy,
    /// Of that, which chunks.
    pub admission: Admission,
    /// Lookups under way.
    pub lookups_max: u32,
    /// Chunks being fetched.
    pub fetches_max: u32,
    /// Their bytes; a quarter of what may be granted where that is less. One chunk may always be fetched.
    pub fetch_bytes_max: u64,
    /// Chunks that wait to be fetched.
    pub fetch_queue_max: u32,
    /// Chunks being written.
    pub puts_max: u32,
    /// Their bytes; a quarter of what may be granted where that is less. One chunk may always be written.
    pub put_bytes_max: u64,
    /// Bytes of the chunks that wait to be written; the oldest goes where more come. One chunk may always wait.
    pub put_queue_bytes_max: u64,
    /// With `WriteBack`: so long a chunk waits, in ms.
    pub put_wait_ms: u64,
    /// A chunk that could have been written for so long and was not is not written any more, in ms.
    pub put_age_ms_max: u64,
}

impl TierConfig {
    /// A tier with the default bounds.
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

/// Everything that `sessions::Core` is told at start and at a reload.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What connectors are told in HELLO's answer.
    pub settings: Settings,
    /// Bytes of a new arena. Needs a restart.
    pub arena_bytes: u64,
    /// Needs a restart.
    pub policy: EvictionPolicy,
    /// When hits are checked.
    pub verify: Verify,
    /// With `Background`: age of a check after which a hit is checked again, in ms.
    pub verify_age_ms: u64,
    /// Sweep checks under way at once, after a start.
    pub sweep_in_flight_max: u32,
    /// Bounds.
    pub limits: Limits,
    /// A soft pin that is not renewed ends after this, in ms.
    pub soft_pin_ms: u64,
    /// Slots of a dead GPU writer come back this long after the proof of its death, in ms.
    pub quarantine_ms: u64,
    /// An incomplete chunk that no open grant completes dies after this, in ms.
    pub incomplete_ms: u64,
    /// Reads from lower tiers may outlive the engine process (io_uring into slots).
    pub fetch_outlives_engine: bool,
    /// Bytes per second that may come from lower tiers; 0 = no bound.
    pub read_bytes_per_s: u64,
    /// Bytes per second that may go to lower tiers, with those of checks that nobody waits for; 0 = no bound.
    pub write_bytes_per_s: u64,
    /// Whether lower tiers are left alone where computing is quicker.
    pub load_or_recompute: LoadOrRecompute,
    /// What is lost where tiers below memory pack what they store. Needs a restart.
    pub fidelity: Fidelity,
    /// Who moves bytes between workers and arena; taken at each REGISTER.
    pub transfer: TransferMode,
    /// Bytes of a worker's window, and the most that it may ask for.
    pub window_bytes: u64,
    /// Tiers below memory, the nearest first. Which there are needs a restart. Each is down until the shell says that it is up.
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
