//! Configuration of engine and sessions, in plain units.

use crate::tier::Kind;
use kvcachepool_protocol::message::{Save, Settings};
use kvcachepool_protocol::object::Fidelity;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// S3-FIFO: a small probation queue before the main one, with a record of what was evicted from it.
    #[default]
    S3Fifo,
    Lru,
    /// Least frequently used, with ageing.
    Lfu,
    Fifo,
}

/// When the bytes of a hit are compared with their digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// Before the answer, by a check begun after the PROBE arrived. Chunks that the engine holds locally are not checked.
    #[default]
    Always,
    /// Beside the answer, if the last check is older than `verify_age_ms`.
    Background,
}

/// Which process moves bytes between a worker's KV blocks and the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transfer {
    /// The mode known to be better on this machine. Without measurements, this is the worker.
    #[default]
    Auto,
    Engine,
    /// The sidecar, between the arena and a window that the worker fills and empties.
    CudaWindow,
}

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
    /// Percent of the arena that admin pins may hold.
    pub admin_pin_percent_max: u32,
    /// Events kept for EVENTS.
    pub events_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions_max: 256,
            requests_max: 16_384,
            granted_bytes_max: 0,
            index_entries_max: 4 << 20,
            soft_pin_percent_max: 50,
            admin_pin_percent_max: 25,
            events_max: 65_536,
        }
    }
}

/// Which readable chunks are written to a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// Every chunk, soon after it becomes readable.
    #[default]
    WriteThrough,
    /// Every chunk, after `put_wait_ms`. The oldest are written earlier if the waiting chunks exceed half of `put_queue_bytes_max` or a
    /// sixteenth of the arena. A chunk evicted from memory before its write is lost.
    WriteBack,
    None,
}

/// Which of the chunks selected by the write policy are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Admission {
    #[default]
    All,
    /// Chunks that are requested again: the store is the first use, the first load the second.
    Reused,
}

/// Whether chunks in tiers are fetched when prefill is expected to be quicker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadOrRecompute {
    /// The quicker one, once both speeds are known.
    #[default]
    Auto,
    AlwaysLoad,
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
        Self {
            kind,
            write: WritePolicy::default(),
            admission: Admission::default(),
            lookups_max: 256,
            fetches_max: 32,
            fetch_bytes_max: 256 << 20,
            fetch_queue_max: 16_384,
            puts_max: 8,
            put_bytes_max: 64 << 20,
            put_queue_bytes_max: 1 << 30,
            put_wait_ms: 60_000,
            put_age_ms_max: 60_000,
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
    pub policy: PolicyKind,
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
    pub transfer: Transfer,
    /// Default and largest size of a worker's window. Bytes.
    pub window_bytes: u64,
    /// Tiers below memory, nearest first. A different set needs a restart. A tier is down until the shell reports it up.
    pub tiers: Vec<TierConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            settings: Settings {
                chunk_tokens: 256,
                save: Save::Prompt,
                min_load_tokens: 512,
                load_timeout_ms: 2_000,
                first_poll_wait_us: 1_000,
                step_wait_us: 2_000,
                grant_timeout_ms: 1_000,
                store_bytes_in_flight: 256 << 20,
            },
            arena_bytes: 4 << 30,
            policy: PolicyKind::default(),
            verify: Verify::default(),
            verify_age_ms: 60_000,
            sweep_in_flight_max: 32,
            limits: Limits::default(),
            soft_pin_ms: 30_000,
            quarantine_ms: 30_000,
            incomplete_ms: 30_000,
            fetch_outlives_engine: false,
            read_bytes_per_s: 0,
            write_bytes_per_s: 0,
            load_or_recompute: LoadOrRecompute::Auto,
            fidelity: Fidelity::Exact,
            transfer: Transfer::Auto,
            window_bytes: 128 << 20,
            tiers: Vec::new(),
        }
    }
}
