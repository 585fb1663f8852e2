//! The JSON of `GET /v1/status`, of the ADMIN operation `status` and of `kvcachepool-sidecar status`. Fields are only ever added. Readers
//! ignore unknown fields, and absent fields take their default.

use crate::message::Role;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The state of a sidecar.
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
    /// Starts of the engine process in this container, including the running one.
    pub engine_starts: u64,
    pub state: State,
    /// Named reasons why the state is not `ready`; empty when ready.
    pub reasons: Vec<Reason>,
    pub pool: PoolName,
    /// The tiers, fastest first.
    pub tiers: Vec<Tier>,
    pub memory: MemoryTier,
    /// Sessions, in order of their ids.
    pub sessions: Vec<Session>,
    /// Domains registered since the start.
    pub domains: Vec<Domain>,
    /// Counters since the engine process started.
    pub counters: Counters,
    /// `pool.generation` of the config in effect. Some of its keys may wait for a restart. 0 also from older sidecars, which do not report
    /// it.
    pub config_generation: u64,
    /// Changed keys that wait for a restart.
    pub restart_needed: Vec<String>,
    /// Why the changed config file is not in use; empty if it is.
    pub config_error: String,
}

/// Overall state, or that of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    #[default]
    Starting,
    /// Everything works as configured.
    Ready,
    /// Serves, but not everything that is configured. The reasons say what.
    Degraded,
    /// Serves nothing. The reasons say why.
    Off,
    /// SIGTERM was received.
    Draining,
}

/// A named reason with a message.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Reason {
    /// Name, as in metrics: `ArenaTooLarge`.
    pub code: String,
    /// What happened and what to do.
    pub message: String,
}

/// Reply to the ADMIN operation `flush`: the writes to lower tiers that were started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Flush {
    /// Tiers that are written to. Empty if memory is the only tier, and there is nothing to flush.
    pub tiers: Vec<String>,
    /// Number of chunks that wait to be written.
    pub chunks: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolName {
    pub name: String,
    pub namespace: String,
}

/// Summary of one tier.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Tier {
    /// `memory`, `disk`, `redis`, `filesystem` or `s3`.
    pub name: String,
    pub state: State,
    /// Name of the reason when not ready.
    pub reason: String,
    /// What happened, when not ready; or a remark about a ready tier.
    pub message: String,
    /// Bytes of readable chunks.
    pub used_bytes: u64,
    pub capacity_bytes: u64,
    /// Its servers, if it has several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<TierServer>,
}

/// One of several servers of a tier. While it is off, its objects are misses; the others serve.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TierServer {
    /// Host and port, or the path of its socket.
    pub name: String,
    /// `ready`; `degraded` while it accepts no writes; `off` after a failure, while it is being retried.
    pub state: State,
    /// What happened, when not ready.
    pub message: String,
}

/// Details of the memory tier.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryTier {
    pub state: State,
    /// Name of the reason when not ready.
    pub reason: String,
    /// Region number of the arena; absent without one.
    pub region: Option<u64>,
    /// Bytes of the arena.
    pub capacity_bytes: u64,
    /// Size that the config asks for. 0 from older sidecars.
    pub target_bytes: u64,
    /// Why the arena does not have that size yet; empty if it has.
    pub resize_waits: String,
    /// Bytes whose pages are populated.
    pub populated_bytes: u64,
    /// Bytes that are page-locked for GPU copies.
    pub locked_bytes: u64,
    /// Bytes of slots that are not free.
    pub used_bytes: u64,
    /// Readable chunks.
    pub chunks: u64,
    /// Chunks with missing sections.
    pub incomplete_chunks: u64,
    /// Capacity of the index in chunks.
    pub chunk_capacity: u64,
    pub slots: Slots,
    /// Bytes under read leases.
    pub leased_bytes: u64,
    /// Bytes under soft pins.
    pub pinned_bytes: u64,
    /// Chunks adopted from an earlier boot that are not checked yet.
    pub unchecked_chunks: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Slots {
    /// Unused slots in segments that have a slot size.
    pub free: u64,
    pub granted: u64,
    /// Written; the digest is not computed yet.
    pub committed: u64,
    pub published: u64,
    /// Slots of a dead writer whose transfers may still complete.
    pub quarantined: u64,
}

/// One role of one process.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Session {
    pub id: u64,
    pub role: Role,
    #[serde(default)]
    pub engine: String,
    #[serde(default)]
    pub version: String,
    /// vLLM's `engine_id`.
    #[serde(default)]
    pub instance: String,
    /// Rank of a worker.
    #[serde(default)]
    pub rank: u32,
    /// Process id as seen by the sidecar; 0 if the container hides it.
    #[serde(default)]
    pub pid: u32,
    /// Number of its lock; absent = none yet.
    #[serde(default)]
    pub lock: Option<u32>,
    /// A connection is open.
    #[serde(default)]
    pub connected: bool,
    #[serde(default)]
    pub registered: bool,
    /// PROBE and GRANT are served to its instance.
    #[serde(default)]
    pub ready: bool,
    /// Index into [`Status::domains`]; absent while unknown.
    #[serde(default)]
    pub domain: Option<u32>,
    /// Current transfer mode.
    #[serde(default)]
    pub transfer: String,
    /// Why no better mode is in use.
    #[serde(default)]
    pub transfer_reason: String,
    /// Named reason why the cache is off in this process; empty = on.
    #[serde(default)]
    pub off: String,
    /// Bytes granted to the session and not committed.
    #[serde(default)]
    pub granted_bytes: u64,
}

/// A model identity and a layout identity.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Domain {
    /// ModelId in hex.
    pub model_id: String,
    /// LayoutId in hex: the layout in memory.
    pub layout_id: String,
    /// Layout of the objects in hex. It is in their names.
    pub object_layout: String,
    pub model: serde_json::Value,
    pub layout: serde_json::Value,
    /// Effective tokens per chunk.
    pub chunk_tokens: u32,
    /// Bytes of a full chunk with all sections.
    pub chunk_bytes: u64,
    /// Other processes can share the chunks.
    pub shareable: bool,
    /// Named reason why not (`NotShareable/RandomHashSeed`, `NotShareable/Gguf`).
    pub reason: String,
}

/// Counters since the engine process started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Prompt tokens that vLLM's own cache did not hold. Always the sum of hit and miss tokens.
    pub requested_tokens: u64,
    /// Hit tokens, by tier.
    pub hit_tokens: BTreeMap<String, u64>,
    /// Missed tokens, by reason.
    pub miss_tokens: BTreeMap<String, u64>,
    /// Tokens whose load failed after admission.
    pub load_failed_tokens: u64,
    /// Chunks that became readable.
    pub stored_chunks: u64,
    /// Chunks evicted to make room.
    pub evicted_chunks: u64,
    /// Number of digest mismatches.
    pub corrupt_chunks: u64,
    /// Chunks adopted from an earlier boot.
    pub adopted_chunks: u64,
}
