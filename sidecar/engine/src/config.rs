//! What the engine and the sessions need to know from the configuration, in plain units.

use crate::tier::Kind;
use kvcachepool_protocol::message::{Save, Settings};
use kvcachepool_protocol::object::Fidelity;

/// Which chunk goes first when room is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// A small probation queue before the main one, with a memory of what was evicted from it.
    #[default]
    S3Fifo,
    Lru,
    /// Least frequently used, with ageing.
    Lfu,
    Fifo,
}

/// When the bytes of a hit are compared with their digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// Before the answer, by a check that began after the PROBE came. Chunks that the engine holds itself are not checked.
    #[default]
    Always,
    /// Beside the answer, where the last check is older than `verify_age_ms`.
    Background,
}

/// Who moves bytes between a worker's KV blocks and the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transfer {
    /// What is known to be better on this machine; nothing was measured yet, so it is the worker.
    #[default]
    Auto,
    Engine,
    /// The sidecar, between the arena and a window that the worker fills and empties.
    CudaWindow,
}

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

/// Which readable chunks are written down to a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WritePolicy {
    /// Each one, soon after it became readable.
    #[default]
    WriteThrough,
    /// Each one, after it waited for `put_wait_ms`; the oldest sooner, where those that wait hold half of `put_queue_bytes_max`, or a
    /// sixteenth of the arena: what goes from memory before it was written is lost.
    WriteBack,
    None,
}

/// Of what the write policy takes, which chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Admission {
    #[default]
    All,
    /// Those that a request came back for: storing is the first touch, the first load the second.
    Reused,
}

/// Whether what tiers have is fetched where computing it is expected to be quicker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadOrRecompute {
    /// The quicker one, once it is known how quick both are.
    #[default]
    Auto,
    AlwaysLoad,
}

/// One tier below memory. All bounds are the tier's own: one that hangs takes nothing from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierConfig {
    pub kind: Kind,
    pub write: WritePolicy,
    pub admission: Admission,
    pub lookups_max: u32,
    pub fetches_max: u32,
    /// Their bytes; a quarter of what may be granted where that is less. One chunk may always be fetched.
    pub fetch_bytes_max: u64,
    /// Chunks that wait to be fetched.
    pub fetch_queue_max: u32,
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

/// Everything that `sessions::Core` is told at start and at a reload.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What connectors are told in HELLO's answer.
    pub settings: Settings,
    /// Bytes of a new arena. Needs a restart.
    pub arena_bytes: u64,
    /// Needs a restart.
    pub policy: PolicyKind,
    pub verify: Verify,
    /// With `Background`: age of a check after which a hit is checked again, in ms.
    pub verify_age_ms: u64,
    /// Sweep checks under way at once, after a start.
    pub sweep_in_flight_max: u32,
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
    pub transfer: Transfer,
    /// Bytes of a worker's window, and the most that it may ask for.
    pub window_bytes: u64,
    /// Tiers below memory, the nearest first. Which there are needs a restart. Each is down until the shell says that it is up.
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
