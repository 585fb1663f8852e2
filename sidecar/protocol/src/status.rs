//! The JSON of `GET /v1/status`, of the ADMIN operation `status` and of `kvcachepool-sidecar status`. Fields are only ever added;
//! readers ignore what they do not know, and absent fields take their default.

use crate::message::Role;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything a person or an operator asks a sidecar.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Version of the binary.
    pub version: String,
    /// Version of the wire protocol.
    pub protocol: u8,
    /// New at every start of the engine process.
    pub boot: u64,
    /// Seconds since the engine process started.
    pub uptime_s: u64,
    /// Seconds since the container (its supervisor) started.
    pub container_uptime_s: u64,
    /// Starts of the engine process in this container, the running one included.
    pub engine_starts: u64,
    /// Overall state.
    pub state: State,
    /// Why the state is not `ready`, by name; empty when ready.
    pub reasons: Vec<Reason>,
    /// Name of the pool.
    pub pool: PoolName,
    /// The tiers, fastest first.
    pub tiers: Vec<Tier>,
    /// Details of the memory tier.
    pub memory: MemoryTier,
    /// Sessions, in order of their ids.
    pub sessions: Vec<Session>,
    /// Domains that were registered since the start.
    pub domains: Vec<Domain>,
    /// Counters since the engine process started.
    pub counters: Counters,
    /// `pool.generation` of the config in effect; keys of it may still wait for a restart. 0 also from sidecars that do not say it.
    pub config_generation: u64,
    /// Keys of the changed config that wait for a restart.
    pub restart_needed: Vec<String>,
    /// Why the changed config file is not in use; empty = it is.
    pub config_error: String,
}

/// Overall state, or that of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Not yet decided.
    #[default]
    Starting,
    /// As configured.
    Ready,
    /// It serves, but not all that was configured; the reasons say what.
    Degraded,
    /// It serves nothing; the reasons say why.
    Off,
    /// SIGTERM came.
    Draining,
}

/// A named reason with a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Reason {
    /// Name, as in metrics: `ArenaTooLarge`.
    pub code: String,
    /// What happened and what to do.
    pub message: String,
}

/// Answer to the ADMIN operation `flush`: what began to be written to the tiers below the memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Flush {
    /// Tiers that are written to; none = memory is the only one, and there is nothing to flush.
    pub tiers: Vec<String>,
    /// Chunks that wait to be written.
    pub chunks: u64,
}

/// Which pool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolName {
    /// Name.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
}

/// One tier in short.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Tier {
    /// `memory`, later `disk`, `redis`, `s3`.
    pub name: String,
    /// Its state.
    pub state: State,
    /// Name of the reason when not ready.
    pub reason: String,
    /// What happened, for people, when not ready; or what is odd in it.
    pub message: String,
    /// Bytes that readable chunks take.
    pub used_bytes: u64,
    /// Bytes it may take.
    pub capacity_bytes: u64,
    /// Its servers, where it has several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<TierServer>,
}

/// One of several servers of a tier. What it holds is missed while it is off; the others serve.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TierServer {
    /// Host and port, or the path of its socket.
    pub name: String,
    /// `ready`; `degraded` while it takes no writes; `off` after it failed, and tried again all the time.
    pub state: State,
    /// What happened, for people, when not ready.
    pub message: String,
}

/// The memory tier in detail.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryTier {
    /// Its state.
    pub state: State,
    /// Name of the reason when not ready.
    pub reason: String,
    /// Region number of the arena; absent without one.
    pub region: Option<u64>,
    /// Bytes of the arena.
    pub capacity_bytes: u64,
    /// Bytes whose pages are present.
    pub populated_bytes: u64,
    /// Bytes that are page-locked for copies to and from GPUs.
    pub locked_bytes: u64,
    /// Bytes of slots that are not free.
    pub used_bytes: u64,
    /// Chunks that can be read.
    pub chunks: u64,
    /// Chunks that lack sections.
    pub incomplete_chunks: u64,
    /// Chunks that the index can hold.
    pub chunk_capacity: u64,
    /// Slots by state.
    pub slots: Slots,
    /// Bytes under read leases.
    pub leased_bytes: u64,
    /// Bytes under soft pins.
    pub pinned_bytes: u64,
    /// Chunks that were taken over from an earlier boot and are not checked yet.
    pub unchecked_chunks: u64,
}

/// Slots by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Slots {
    /// Slots of a segment with a size, that nobody uses.
    pub free: u64,
    /// Being written.
    pub granted: u64,
    /// Written; digest not taken yet.
    pub committed: u64,
    /// Readable.
    pub published: u64,
    /// Of a dead writer, waiting out its last transfers.
    pub quarantined: u64,
}

/// One role of one process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Session id.
    pub id: u64,
    /// Role.
    pub role: Role,
    /// Engine name.
    #[serde(default)]
    pub engine: String,
    /// Engine version.
    #[serde(default)]
    pub version: String,
    /// vLLM's `engine_id`.
    #[serde(default)]
    pub instance: String,
    /// Rank of a worker.
    #[serde(default)]
    pub rank: u32,
    /// Process id as the kernel showed it; 0 where the container hides it.
    #[serde(default)]
    pub pid: u32,
    /// Number of its lock; absent = none yet.
    #[serde(default)]
    pub lock: Option<u32>,
    /// A connection is open.
    #[serde(default)]
    pub connected: bool,
    /// REGISTER was accepted.
    #[serde(default)]
    pub registered: bool,
    /// PROBE and GRANT are served to its instance.
    #[serde(default)]
    pub ready: bool,
    /// Index into [`Status::domains`]; absent while unknown.
    #[serde(default)]
    pub domain: Option<u32>,
    /// Live transfer mode.
    #[serde(default)]
    pub transfer: String,
    /// Why no better mode is in use.
    #[serde(default)]
    pub transfer_reason: String,
    /// The cache is off in this process, by this name; empty = on.
    #[serde(default)]
    pub off: String,
    /// Bytes granted to it and not committed.
    #[serde(default)]
    pub granted_bytes: u64,
}

/// A model identity and a layout identity.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Domain {
    /// ModelId in hex.
    pub model_id: String,
    /// LayoutId in hex.
    pub layout_id: String,
    /// Canonical model descriptor.
    pub model: serde_json::Value,
    /// Canonical layout descriptor.
    pub layout: serde_json::Value,
    /// Effective tokens of a chunk.
    pub chunk_tokens: u32,
    /// Bytes of a full chunk, all sections.
    pub chunk_bytes: u64,
    /// Other processes can share its chunks.
    pub shareable: bool,
    /// Why not, by name (`NotShareable/RandomHashSeed`, `NotShareable/Gguf`).
    pub reason: String,
}

/// Counters since the engine process started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Prompt tokens that vLLM's own cache did not hold. Always the sum of the next two.
    pub requested_tokens: u64,
    /// Tokens taken, by tier.
    pub hit_tokens: BTreeMap<String, u64>,
    /// Tokens not taken, by reason.
    pub miss_tokens: BTreeMap<String, u64>,
    /// Tokens whose load failed after admission.
    pub load_failed_tokens: u64,
    /// Chunks that became readable.
    pub stored_chunks: u64,
    /// Chunks that went to make room.
    pub evicted_chunks: u64,
    /// Digests that did not match.
    pub corrupt_chunks: u64,
    /// Chunks taken over from an earlier boot.
    pub adopted_chunks: u64,
}
