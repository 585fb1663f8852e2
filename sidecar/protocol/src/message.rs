//! Bodies of all messages: msgpack maps with the field names below. Unknown fields are ignored, and absent fields take their default,
//! because versions may differ by one during an upgrade. `Option` fields are absent or nil. Times are in milliseconds.

use crate::domain::Refused;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;

/// A body could not be decoded as the message of its opcode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("body is not a valid {message}: {reason}")]
pub struct BadBody {
    pub message: &'static str,
    /// The decoder's error.
    pub reason: String,
}

/// Encodes a body as a msgpack map.
pub fn encode<T: Serialize>(body: &T) -> Result<Vec<u8>, BadBody> {
    rmp_serde::to_vec_named(body).map_err(|e| BadBody {
        message: name::<T>(),
        reason: e.to_string(),
    })
}

/// Decodes a body. Total: any bytes give a message or [`BadBody`].
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, BadBody> {
    rmp_serde::from_slice(body).map_err(|e| BadBody {
        message: name::<T>(),
        reason: e.to_string(),
    })
}

fn name<T>() -> &'static str {
    let path = std::any::type_name::<T>();
    path.rsplit("::").next().unwrap_or(path)
}

/// The error codes of the protocol. Logs, metrics and the connector show the name (`Debug` form).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorCode {
    /// The protocol version of the frame or of HELLO is not supported.
    WrongVersion,
    /// The opcode is unknown to this version.
    UnknownOpcode,
    /// The opcode is known, but this build does not serve it.
    NotServed,
    /// The body is not a valid message.
    BadBody,
    /// Hashes are not packed 32-byte values, or counts do not match.
    BadHashes,
    /// The first frame of a connection was not HELLO.
    HelloFirst,
    /// HELLO's number is not higher than the last one of this process and role.
    StaleHello,
    /// HELLO had no pollable pidfd, and the kernel does not provide one.
    NoProofOfDeath,
    /// HELLO names a lock that F_GETLK does not confirm.
    LockNotHeld,
    /// A passed descriptor has the wrong kind, is not sealed, or was not issued by an earlier boot.
    BadDescriptor,
    /// Too many connections, sessions, requests, pins or granted bytes. The message names the limit.
    LimitReached,
    /// The role may not use this opcode.
    WrongRole,
    /// Another rank of this instance registered another model or layout.
    DescriptorMismatch,
    /// A section does not fit into a segment of the arena.
    SectionTooLarge,
    /// TP or PP over several pods.
    MultiNodeUnsupported,
    /// The engine's hash algorithm is not collision resistant.
    HashAlgorithmRefused,
    /// The memory tier is unavailable. The message says why.
    NoArena,
    /// Not all ranks of the instance have registered yet.
    NotRegistered,
    /// There is no window. The message begins with the name of the reason ([`crate::window::Unavailable`]).
    WindowUnavailable,
    /// The admin token is missing or wrong.
    Unauthorized,
    /// The named object does not exist.
    NotFound,
    /// A bug of the sidecar. The connection continues.
    Internal,
}

/// Body of a reply with `FLAG_ERROR`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub code: ErrorCode,
    /// What happened and what to do.
    pub message: String,
    /// The same request may succeed later.
    pub retryable: bool,
}

impl ErrorBody {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            retryable: false,
        }
    }

    /// The same request may succeed later.
    pub fn later(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            retryable: true,
            ..Self::new(code, message)
        }
    }
}

impl From<BadBody> for ErrorBody {
    fn from(bad: BadBody) -> Self {
        Self::new(ErrorCode::BadBody, bad.to_string())
    }
}

impl From<Refused> for ErrorBody {
    fn from(refused: Refused) -> Self {
        Self::new(refused.code(), refused.to_string())
    }
}

/// The role of a session's client.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// vLLM's scheduler side of the connector.
    Scheduler,
    /// vLLM's worker side, one per rank.
    Worker,
    /// A client that stores opaque objects under its own keys. It looks up, leases and writes them itself.
    Opaque,
    /// A command-line tool.
    Admin,
    /// The plugin hook, which only reports `off`.
    #[default]
    Plugin,
}

/// HELLO. The frame's descriptors, in the order of `fds`: `pidfd`, and `arena` and `table` if the process maps them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Protocol version, equal to the frame's.
    pub version: u8,
    pub role: Role,
    /// Name of the engine: `vllm`.
    #[serde(default)]
    pub engine: String,
    /// Version of the engine, for example `0.32.0`.
    #[serde(default)]
    pub engine_version: String,
    /// One per EngineCore: vLLM's `engine_id`.
    #[serde(default)]
    pub instance: String,
    /// 16 random bytes per process. Scheduler and worker sides in one process share them.
    #[serde(with = "serde_bytes")]
    pub incarnation: Vec<u8>,
    /// Increases per process and role.
    pub number: u64,
    /// Rank of a worker, 0 for others.
    #[serde(default)]
    pub rank: u32,
    /// Names of the descriptors on this frame, in order: `pidfd`, `arena`, `table`.
    #[serde(default)]
    pub fds: Vec<String>,
    /// Number of the lock-file byte that this process holds. Absent = none yet.
    #[serde(default)]
    pub lock: Option<u32>,
    /// Region that this process maps. Absent = none. `arena` and `table` are passed whenever it maps a region.
    #[serde(default)]
    pub region: Option<u64>,
    /// Worker: packed [`crate::refs::SectionRef`] of all granted slots that it still holds. All other slots of the worker are freed.
    #[serde(default, with = "serde_bytes")]
    pub grants: Vec<u8>,
    /// Scheduler: ids of requests whose pins and leases continue. All others of the session end.
    #[serde(default)]
    pub requests: Vec<String>,
    /// This process drops its page locks when [`crate::table::Header::shrinks`] changes. The arena is never made smaller while a process
    /// maps it that does not say so.
    #[serde(default)]
    pub watches_shrinks: bool,
    /// The cache is off in this vLLM, for this named reason. HELLO has no other effect.
    #[serde(default)]
    pub off: Option<String>,
}

/// Name in `HelloReply::features`: the sidecar serves clients of the role [`Role::Opaque`].
pub const FEATURE_OBJECTS: &str = "objects";

/// The state of shared memory in HELLO's reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// The reply has `lock` and its descriptor. Lock the byte, then send HELLO again.
    LockFirst,
    /// The reply has the `arena` and `table` descriptors. Map them.
    Sent,
    /// The process maps the live arena.
    Held,
    /// The mapped arena cannot be used. Fail its jobs, unmap, and send HELLO again.
    Unmap,
    /// There is no memory tier now (`reason`). Send HELLO again after `retry_ms`.
    None,
}

/// Reply to HELLO. Descriptors in the order of `fds`: `lock`, or `arena` and `table`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloReply {
    /// Protocol version of the sidecar.
    pub version: u8,
    /// Version of the sidecar's binary.
    pub sidecar_version: String,
    /// Session id of this role of this process.
    pub session: u64,
    /// New at every start of the engine process.
    pub boot: u64,
    /// Optional features, by name.
    #[serde(default)]
    pub features: Vec<String>,
    /// Connector settings from the sidecar's config.
    pub settings: Settings,
    /// What to do about shared memory.
    pub memory: Memory,
    /// Why `memory` is `none` or `unmap`.
    #[serde(default)]
    pub reason: String,
    /// With `memory: none`: wait before the next HELLO.
    #[serde(default)]
    pub retry_ms: u64,
    /// With `lock_first`: the byte to lock is at [`crate::lockfile::lock_offset`].
    #[serde(default)]
    pub lock: Option<u32>,
    #[serde(default)]
    pub region: Option<u64>,
    #[serde(default)]
    pub arena_bytes: u64,
    #[serde(default)]
    pub table_bytes: u64,
    /// Names of the descriptors on this frame, in order.
    #[serde(default)]
    pub fds: Vec<String>,
}

/// What is stored of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Save {
    /// Chunks of the prompt.
    #[default]
    Prompt,
    /// Chunks of the prompt and of the generated tokens.
    PromptAndDecode,
    /// Nothing. Requests load.
    None,
}

/// The connector's settings, which the sidecar passes on from its config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Minimum tokens per chunk. The effective chunk is the smallest multiple of the scheduler block that is at least this.
    pub chunk_tokens: u32,
    pub save: Save,
    /// Shorter hits are not used.
    pub min_load_tokens: u32,
    /// Longest wait of a request for a load, from its first poll to the end of the copy.
    pub load_timeout_ms: u64,
    /// Longest wait at a request's first poll.
    pub first_poll_wait_us: u32,
    /// Longest wait per `schedule()`, all requests together.
    pub step_wait_us: u32,
    /// An unanswered GRANT is abandoned after this time.
    pub grant_timeout_ms: u64,
    /// Bytes in flight for stores: `max(this, 2 x max_num_batched_tokens x bytes per token)`.
    pub store_bytes_in_flight: u64,
    /// The last tokens of every prompt are not stored, and neither are generated tokens if this is not 0.
    #[serde(default)]
    pub skip_last_tokens: u32,
}

/// REGISTER. A worker sets `world`..`groups`, the scheduler `world` and `hashing`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// Ranks of the instance in this pod. Each pod of an engine over several pods is an instance for itself.
    pub world: u32,
    /// The same number. A connector that registers ranks of other pods, as older ones do, is refused.
    #[serde(default)]
    pub local_world: u32,
    /// Worker: canonical JSON of the model descriptor (`domain.rs`), without the hashing part.
    #[serde(default)]
    pub model: String,
    /// Worker: canonical JSON of the layout descriptor.
    #[serde(default)]
    pub layout: String,
    /// Worker: `cpu` or `cuda`.
    #[serde(default)]
    pub device: String,
    /// Worker: UUID of the device, empty for `cpu`.
    #[serde(default)]
    pub device_uuid: String,
    /// Worker: supported transfer modes (`engine`, `cuda_window`).
    #[serde(default)]
    pub transfer_modes: Vec<String>,
    /// Worker: its KV groups, in vLLM's order.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// Tokens of a scheduler block (LCM over the groups).
    #[serde(default)]
    pub scheduler_block_tokens: u32,
    /// Effective tokens of a chunk.
    #[serde(default)]
    pub chunk_tokens: u32,
    /// Scheduler: how blocks are hashed.
    #[serde(default)]
    pub hashing: Option<Hashing>,
}

/// How the engine hashes blocks. Part of the model identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashing {
    /// `sha256` or `sha256_cbor`. For the pickle-based `sha256` the connector appends the Python minor version (`sha256/py3.11`).
    pub algorithm: String,
    /// Hex of the root hash (`NONE_HASH`).
    pub root: String,
    /// The root is random: no other process can share the chunks (`NotShareable/RandomHashSeed`).
    #[serde(default)]
    pub random_root: bool,
    /// Tokens of a hash block.
    pub block_tokens: u32,
}

/// One KV group of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// `full`, `window`.
    pub kind: String,
    /// Tokens of a block of this group.
    pub block_tokens: u32,
    /// Bytes of one block over all layers of the group on this rank.
    pub block_bytes: u64,
    /// Number of shards of the group over all ranks.
    pub shards: u32,
    /// Shard of this rank.
    pub shard: u32,
    /// Whether this rank writes the shard (first replica). All replicas read it.
    pub writer: bool,
    /// Tokens that the window spans, 0 for `full`.
    #[serde(default)]
    pub window_tokens: u32,
}

/// Reply to REGISTER.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterReply {
    /// LayoutId, 32 bytes; empty while unknown.
    #[serde(default, with = "serde_bytes")]
    pub layout_id: Vec<u8>,
    /// ModelId, 32 bytes; empty until scheduler and all workers have registered.
    #[serde(default, with = "serde_bytes")]
    pub model_id: Vec<u8>,
    /// Worker: slot bytes per group for a full chunk's section.
    #[serde(default)]
    pub slot_bytes: Vec<u64>,
    /// Transfer mode for the worker: `engine`, or `cuda_window`, which it requests with WINDOW.
    #[serde(default)]
    pub transfer: String,
    /// Why the other transfer mode was not chosen.
    #[serde(default)]
    pub transfer_reason: String,
    /// All ranks and the scheduler have registered with one domain. PROBE and GRANT are served.
    pub ready: bool,
}

/// WINDOW. The first request asks for a window. The second one, with `seen`, reports that the worker has read the pattern through its own
/// mapping and replaced it by its complement.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Window {
    /// UUID of the device whose memory is requested; empty = host memory, for an engine on CPUs.
    #[serde(default)]
    pub device_uuid: String,
    /// Requested bytes of all stages together; 0 = the size in the sidecar's config.
    #[serde(default)]
    pub bytes: u64,
    /// The complement of the pattern has been written.
    #[serde(default)]
    pub seen: bool,
}

/// How a window's memory is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowKind {
    #[default]
    Host,
    /// A descriptor of CUDA's virtual-memory API.
    PosixFd,
    /// A legacy CUDA IPC handle.
    IpcHandle,
}

/// Reply to WINDOW. Descriptors in the order of `fds`: `window` (not with an IPC handle), `page`, `bell`. The bell is one end of a pair of
/// stream sockets. Each side sends a byte, without blocking, after every stage that it hands over. The window ends when the bell is closed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WindowReply {
    /// The sidecar has read the complement: the window is in use from now on. False in the first reply.
    #[serde(default)]
    pub working: bool,
    /// How to map the window.
    #[serde(default)]
    pub kind: WindowKind,
    #[serde(default)]
    pub bytes: u64,
    /// Number of stages. They are contiguous and start at the window's first byte.
    #[serde(default)]
    pub stages: u32,
    #[serde(default)]
    pub stage_bytes: u64,
    /// The pattern at the start of the window.
    #[serde(default, with = "serde_bytes")]
    pub pattern: Vec<u8>,
    /// With `ipc_handle`: the 64 bytes of the handle.
    #[serde(default, with = "serde_bytes")]
    pub handle: Vec<u8>,
    /// Names of the descriptors on this frame, in order.
    #[serde(default)]
    pub fds: Vec<String>,
}

/// PROBE. The hashes are those of the chunks' last blocks, in prefix order from chunk 0. The last may be a tail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    pub request: String,
    /// Namespace id, 32 bytes; empty = default.
    #[serde(default, with = "serde_bytes")]
    pub namespace: Vec<u8>,
    #[serde(with = "serde_bytes")]
    pub hashes: Vec<u8>,
    /// Tokens of the last chunk if it is a tail (shorter than a chunk); 0 = all chunks are full.
    #[serde(default)]
    pub tail_tokens: u32,
    /// Tokens in the engine's own prefix cache. Chunks before them are not checked. Absent = unknown; then nothing is fetched.
    #[serde(default)]
    pub local_tokens: Option<u64>,
    /// Longest wait for checks and lower tiers; 0 = the load timeout. Of vLLM at most the load timeout, of clients of objects at most ten
    /// minutes.
    #[serde(default)]
    pub budget_ms: u64,
    /// vLLM's `max_load_tokens`, if set.
    #[serde(default)]
    pub max_load_tokens: Option<u64>,
    /// Prefill speed of the engine in tokens per second; 0 = not known yet.
    #[serde(default)]
    pub prefill_tokens_per_s: u64,
    /// Opaque objects: each key counts by itself. Otherwise the keys are a prefix, and nothing is fetched after the first missing one.
    #[serde(default)]
    pub independent: bool,
}

/// The chunk does not exist.
pub const CHUNK_ABSENT: u8 = 0;
/// The chunk is readable. The reply has its references.
pub const CHUNK_READY: u8 = 1;
/// The chunk exists, but the reply has no references to it. In a partial reply it is being checked or fetched. In a final reply it is in a
/// lower tier and was not fetched, or is before `local_tokens` and was not checked. Another PROBE may request it.
pub const CHUNK_PENDING: u8 = 2;

/// Reply to PROBE: partial ones (`FLAG_PARTIAL`) while chunks are pending, then a final one. Each replaces the one before.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProbeReply {
    /// One byte per hash: `CHUNK_*`.
    #[serde(with = "serde_bytes")]
    pub states: Vec<u8>,
    /// Packed references: for every ready chunk in order, one [`crate::refs::SectionRef`] per section of the domain (groups in order,
    /// shards within a group). `NO_SLOT` if the chunk lacks the section (window groups). An opaque object has one per piece: a reference
    /// with section 0 begins the next object.
    #[serde(with = "serde_bytes")]
    pub refs: Vec<u8>,
    #[serde(default)]
    pub region: u64,
    /// Longest expected wait for the pending chunks.
    #[serde(default)]
    pub pending_ms: u64,
    /// Tier per chunk, one byte: 1 memory, 2 disk, 3 redis, 4 s3, 5 filesystem; 0 = absent.
    #[serde(default, with = "serde_bytes")]
    pub tiers: Vec<u8>,
    /// Why there was no lookup (for example `NotRegistered`); empty = there was one.
    #[serde(default)]
    pub reason: String,
    /// Why chunks that are pending in the final reply were deliberately left in a tier: `min_load_tokens`, `recompute`. Empty = none were.
    #[serde(default)]
    pub declined: String,
}

/// PIN, one-way: chunks `from..to` of the reply to PROBE `probe` become the read lease of the request. Its other soft pins end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    pub request: String,
    /// Tag of the PROBE whose reply is used.
    pub probe: u64,
    pub from: u32,
    /// End of the range of chunks, exclusive.
    pub to: u32,
}

/// RELEASE, one-way: ends all pins and leases of these requests and cancels their open probes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    pub requests: Vec<String>,
}

/// One chunk to be stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantChunk {
    /// Hash of the chunk's last block, 32 bytes.
    #[serde(with = "serde_bytes")]
    pub hash: Vec<u8>,
    /// Hash of the last block of the preceding chunk, 32 bytes; empty for the first chunk.
    #[serde(default, with = "serde_bytes")]
    pub parent: Vec<u8>,
    /// Position of the chunk's first token.
    pub first_token: u32,
    /// Tokens of the chunk; a tail has fewer than a full chunk.
    pub tokens: u32,
    /// Bitmap of the groups whose sections should be stored (all shards of them).
    pub groups: u32,
    /// Engine hashes of all hash blocks of the chunk, packed, for KV events and lower tiers; may be empty.
    #[serde(default, with = "serde_bytes")]
    pub block_hashes: Vec<u8>,
    /// Opaque objects: length of the object.
    #[serde(default)]
    pub bytes: u64,
}

/// GRANT: requests slots for chunks, for all ranks or none. A chunk never has two open grants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub request: String,
    /// Namespace id, 32 bytes; empty = default.
    #[serde(default, with = "serde_bytes")]
    pub namespace: Vec<u8>,
    /// Chunks, in prefix order.
    pub chunks: Vec<GrantChunk>,
    /// Seconds until the chunks expire; 0 = never.
    #[serde(default)]
    pub ttl_s: u32,
}

/// The chunk was granted. The reply has references for its missing sections.
pub const GRANT_GRANTED: u8 = 1;
/// The chunk exists with all sections, or another GRANT is storing it.
pub const GRANT_EXISTS: u8 = 2;
/// No room now (all slots are leased, granted or pinned). May be retried.
pub const GRANT_NO_ROOM: u8 = 3;
/// Not all ranks registered, no arena, or a limit. May be retried.
pub const GRANT_NOT_READY: u8 = 4;
/// The chunk's parent is not in the index, so the chunk could never be read.
pub const GRANT_NO_PARENT: u8 = 5;
/// The chunk is malformed (lengths, groups). Must not be retried.
pub const GRANT_INVALID: u8 = 6;
/// The object's namespace has used up its quota, and its other objects are in use. May be retried.
pub const GRANT_QUOTA: u8 = 7;
/// The object is longer than this sidecar's memory can hold. Must not be retried.
pub const GRANT_TOO_LARGE: u8 = 8;

/// Reply to GRANT.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GrantReply {
    /// One byte per chunk: `GRANT_*`.
    #[serde(with = "serde_bytes")]
    pub results: Vec<u8>,
    /// Packed references: for every granted chunk in order, one per section of the domain; `NO_SLOT` = nothing to write.
    #[serde(with = "serde_bytes")]
    pub refs: Vec<u8>,
    #[serde(default)]
    pub region: u64,
}

/// COMMIT and a worker's ABORT: sections that were written, or will not be. One-way, except that a worker with a window gets a reply to its
/// ABORT ([`AbortReply`]) when no copy into the sections is running any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sections {
    pub region: u64,
    /// Packed references from the GRANT.
    #[serde(with = "serde_bytes")]
    pub refs: Vec<u8>,
}

/// A scheduler's ABORT: chunks of one GRANT that were not sent to workers, or whose GRANT was not answered. Repeated until the sidecar
/// replies with [`AbortReply`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    pub grant: u64,
    /// Hashes of the chunks, packed; empty = all chunks of the GRANT.
    #[serde(default, with = "serde_bytes")]
    pub hashes: Vec<u8>,
}

/// Reply to a scheduler's ABORT, and to that of a worker with a window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortReply {
    /// Number of freed slots.
    pub freed: u32,
}

/// OBJECTS: an operation on opaque objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Objects {
    pub op: ObjectsOp,
    /// Namespace id, 32 bytes; empty = default.
    #[serde(default, with = "serde_bytes")]
    pub namespace: Vec<u8>,
    /// SHA-256 of the keys, packed.
    #[serde(with = "serde_bytes")]
    pub hashes: Vec<u8>,
    /// Duration of a pin in seconds; 0 = until unpinned.
    #[serde(default)]
    pub ttl_s: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectsOp {
    /// Remove from memory and from the lower tiers.
    Remove,
    /// Count as used, which delays eviction.
    Touch,
    /// Keep in memory. Pins of all clients together have a limited share of the arena.
    Pin,
    Unpin,
    /// Report size and pin of objects in memory.
    Stat,
}

/// Reply to OBJECTS.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ObjectsReply {
    /// Keys for which the operation had an effect, or that exist.
    pub count: u32,
    /// One byte per key: 1 = counted in `count`.
    #[serde(default, with = "serde_bytes")]
    pub states: Vec<u8>,
    /// STAT: length of each object; 0 = not in memory.
    #[serde(default)]
    pub bytes: Vec<u64>,
    /// STAT: one byte per key, 1 = pinned.
    #[serde(default, with = "serde_bytes")]
    pub pinned: Vec<u8>,
}

/// EVENTS: a long poll. The reply is sent when there are events after `cursor`, or after `wait_ms`. With `snapshot` the reply is an
/// immediate page of the resident chunks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Events {
    /// Cursor of the last reply; 0 = start with new events.
    pub cursor: u64,
    /// Longest wait.
    pub wait_ms: u64,
    /// Boot of `cursor`, from the last reply; 0 = unknown. The reply to a cursor of another boot is `lost`.
    #[serde(default)]
    pub boot: u64,
    /// Requests a page of the resident chunks: 0, then `next` of the previous reply.
    #[serde(default)]
    pub snapshot: Option<u32>,
}

/// Reply to EVENTS. Events are those of the session's own model and layout.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EventsReply {
    /// Cursor for the next request. In a snapshot: where the events after its first page begin.
    pub cursor: u64,
    /// Events were dropped between the cursors. Take a snapshot.
    #[serde(default)]
    pub lost: bool,
    /// In order of occurrence.
    pub events: Vec<Event>,
    /// Boot of the sidecar that `cursor` belongs to.
    #[serde(default)]
    pub boot: u64,
    /// In a snapshot: the next page to request; absent = this is the last one.
    #[serde(default)]
    pub next: Option<u32>,
}

/// One change of the pool's content, or a chunk of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Event {
    /// `stored`, `removed`, or `cleared`: everything reported of the tier is gone.
    pub kind: String,
    /// `memory` or `disk`.
    #[serde(default)]
    pub tier: String,
    /// Packed engine block hashes from GRANT; empty if the sidecar does not keep them.
    #[serde(default, with = "serde_bytes")]
    pub block_hashes: Vec<u8>,
    /// Engine hash of the block before the first, 32 bytes; empty for the first chunk, or if the preceding chunk is unknown.
    #[serde(default, with = "serde_bytes")]
    pub parent: Vec<u8>,
    /// Tokens of the chunk.
    #[serde(default)]
    pub tokens: u32,
    /// Engine hash of the chunk's last block, 32 bytes. Together with `namespace` it identifies the chunk.
    #[serde(default, with = "serde_bytes")]
    pub hash: Vec<u8>,
    /// Namespace id, 32 bytes; empty = default.
    #[serde(default, with = "serde_bytes")]
    pub namespace: Vec<u8>,
    /// Position of the chunk's first token.
    #[serde(default)]
    pub first_token: u32,
}

/// ADMIN: one operation. The HTTP API offers the read-only ones; `clear`, `pin`, `unpin` and `flush` exist only on the socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admin {
    /// `status`, `health`, `flush`, `lookup`, `clear`, `pin`, `unpin`.
    pub op: String,
    /// Chunk keys in hex, for `lookup`, `pin`, `unpin`.
    #[serde(default)]
    pub keys: Vec<String>,
    /// Duration of a pin in seconds; 0 = until unpinned.
    #[serde(default)]
    pub ttl_s: u64,
    /// Bearer token, if one is configured.
    #[serde(default)]
    pub token: String,
}

/// REPORT, one-way: the connector's counters since its last REPORT. All values are increments.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Report {
    /// Prompt tokens of admitted requests that vLLM's own prefix cache did not hold.
    #[serde(default)]
    pub requested_tokens: u64,
    /// Hit tokens, by tier name.
    #[serde(default)]
    pub hit_tokens: BTreeMap<String, u64>,
    /// Missed tokens, by reason (`absent`, `min_load_tokens`, `off`, ...). Always: requested = sum(hit) + sum(miss).
    #[serde(default)]
    pub miss_tokens: BTreeMap<String, u64>,
    /// Tokens whose load failed after admission. They stay counted under their tier.
    #[serde(default)]
    pub load_failed_tokens: u64,
    /// Counters of skips, drops and refusals by name (`kvcachepool_connector_events_total{event}`).
    #[serde(default)]
    pub events: BTreeMap<String, u64>,
    /// Bytes copied by workers, by direction (`store`, `load`).
    #[serde(default)]
    pub copied_bytes: BTreeMap<String, u64>,
    /// Seconds spent copying, by direction.
    #[serde(default)]
    pub copied_seconds: BTreeMap<String, f64>,
    /// Age of the oldest unfinished copy job in milliseconds, a gauge.
    #[serde(default)]
    pub oldest_job_ms: u64,
}
