//! Bodies of all messages: msgpack maps with the field names below. Unknown fields are ignored, absent ones take their
//! default: versions differ by one during an upgrade. `Option` fields are absent or nil. Times are milliseconds.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;

/// A body could not be read as the message its opcode names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("body is no valid {message}: {reason}")]
pub struct BadBody {
    /// Name of the message type.
    pub message: &'static str,
    /// What the decoder said.
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

/// Every named refusal on the wire. The name (`Debug` form) is what logs, metrics and the connector show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorCode {
    /// The frame's or HELLO's protocol version is not served.
    WrongVersion,
    /// Opcode unknown to this version.
    UnknownOpcode,
    /// Opcode known but not served by this build.
    NotServed,
    /// The body is not a valid message.
    BadBody,
    /// Hashes are not packed 32-byte values, or counts do not agree.
    BadHashes,
    /// The first frame of a connection was not HELLO.
    HelloFirst,
    /// HELLO's number is not newer than the last one read for this process and role.
    StaleHello,
    /// No pollable pidfd came with HELLO and the kernel offers none.
    NoProofOfDeath,
    /// HELLO names a lock that F_GETLK does not confirm.
    LockNotHeld,
    /// A passed descriptor is of the wrong kind, unsealed, or not what an earlier boot handed out.
    BadDescriptor,
    /// Too many connections, sessions, requests, pins or granted bytes: the message names the limit.
    LimitReached,
    /// The role may not use this opcode.
    WrongRole,
    /// Another rank of this instance registered another model or layout.
    DescriptorMismatch,
    /// A section does not fit into a segment of the arena.
    SectionTooLarge,
    /// TP/PP over pods.
    MultiNodeUnsupported,
    /// The engine's hash algorithm is not collision resistant.
    HashAlgorithmRefused,
    /// No memory tier at the moment; the message says why.
    NoArena,
    /// Not all ranks of the instance are registered yet.
    NotRegistered,
    /// There is no window; the message begins with the reason's name ([`crate::window::Unavailable`]).
    WindowUnavailable,
    /// The admin token is missing or wrong.
    Unauthorized,
    /// Nothing of that name is there.
    NotFound,
    /// A bug of ours; the connection goes on.
    Internal,
}

/// Body of an answer with `FLAG_ERROR`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Which refusal.
    pub code: ErrorCode,
    /// For people: what happened and what to do.
    pub message: String,
    /// The same question may succeed later.
    pub retryable: bool,
}

/// Who speaks on a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// vLLM's scheduler side of the connector.
    Scheduler,
    /// vLLM's worker side, one per rank.
    Worker,
    /// A foreign plugin that stores under its own keys (not served yet).
    Opaque,
    /// A tool.
    Admin,
    /// The plugin hook, only to say `off`.
    Plugin,
}

/// HELLO. Descriptors on the frame, in the order of `fds`: `pidfd`, and `arena`, `table` when the process maps any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Protocol version, equal to the frame's.
    pub version: u8,
    /// Who speaks.
    pub role: Role,
    /// `vllm`.
    #[serde(default)]
    pub engine: String,
    /// e.g. `0.32.0`.
    #[serde(default)]
    pub engine_version: String,
    /// One per EngineCore: vLLM's `engine_id`.
    #[serde(default)]
    pub instance: String,
    /// 16 random bytes per process; scheduler and worker parts in one process share them.
    #[serde(with = "serde_bytes")]
    pub incarnation: Vec<u8>,
    /// Counts up per process and role.
    pub number: u64,
    /// Rank of a worker, 0 for others.
    #[serde(default)]
    pub rank: u32,
    /// Names of the descriptors on this frame, in order: `pidfd`, `arena`, `table`.
    #[serde(default)]
    pub fds: Vec<String>,
    /// Number of the lock-file byte that this process holds; absent = none yet.
    #[serde(default)]
    pub lock: Option<u32>,
    /// Region that this process maps; absent = none. `arena` and `table` come along whenever it maps any.
    #[serde(default)]
    pub region: Option<u64>,
    /// Worker: packed [`crate::refs::SectionRef`] of all slots that it was granted and still holds. What it does not name comes back.
    #[serde(default, with = "serde_bytes")]
    pub grants: Vec<u8>,
    /// Scheduler: ids of requests whose pins and leases go on. All others of the session end.
    #[serde(default)]
    pub requests: Vec<String>,
    /// The cache is off in this vLLM, by this name. Nothing else is done.
    #[serde(default)]
    pub off: Option<String>,
}

/// What HELLO's answer says about shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// `lock` and its descriptor come with this answer: lock the byte, then say HELLO again.
    LockFirst,
    /// `arena` and `table` descriptors come with this answer: map them.
    Sent,
    /// What the process maps is the live arena.
    Held,
    /// What the process maps cannot be used: fail its jobs, unmap, say HELLO again.
    Unmap,
    /// No memory tier now (`reason`): say HELLO again after `retry_ms`.
    None,
}

/// Answer to HELLO. Descriptors in the order of `fds`: `lock`, or `arena`, `table`.
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
    /// Optional abilities, by name.
    #[serde(default)]
    pub features: Vec<String>,
    /// Connector settings, from the sidecar's config.
    pub settings: Settings,
    /// What to do about shared memory.
    pub memory: Memory,
    /// Why `memory` is `none` or `unmap`.
    #[serde(default)]
    pub reason: String,
    /// When to say HELLO again, for `memory: none`.
    #[serde(default)]
    pub retry_ms: u64,
    /// With `lock_first`: the byte to lock is at [`crate::lockfile::lock_offset`].
    #[serde(default)]
    pub lock: Option<u32>,
    /// Live region.
    #[serde(default)]
    pub region: Option<u64>,
    /// Bytes of the arena.
    #[serde(default)]
    pub arena_bytes: u64,
    /// Bytes of the slot table.
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
    /// Chunks of the prompt and of what was generated.
    PromptAndDecode,
}

/// Settings that the connector takes from the sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Least tokens of a chunk; the effective chunk is the smallest multiple of the scheduler block that is at least this.
    pub chunk_tokens: u32,
    /// What to store.
    pub save: Save,
    /// Hits shorter than this are not taken.
    pub min_load_tokens: u32,
    /// Longest wait of a request for a load, from its first poll to the end of the copy.
    pub load_timeout_ms: u64,
    /// Longest wait at a request's first poll.
    pub first_poll_wait_us: u32,
    /// Longest waits in one `schedule()` together.
    pub step_wait_us: u32,
    /// An unanswered GRANT is given up after this.
    pub grant_timeout_ms: u64,
    /// Bytes in flight for stores: `max(this, 2 x max_num_batched_tokens x bytes per token)`.
    pub store_bytes_in_flight: u64,
}

/// REGISTER. A worker fills `world`..`groups`, the scheduler `world` and `hashing`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// Ranks of the instance, all in this pod.
    pub world: u32,
    /// Ranks of the instance that run in this pod; differs from `world` only for multi-node launches, which are refused.
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
    /// Worker: transfer modes it can do (`engine`, `cuda_window`).
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

/// How the engine hashes blocks; part of the model identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashing {
    /// `sha256` or `sha256_cbor`; for the pickle-based `sha256` the connector appends the Python minor (`sha256/py3.11`).
    pub algorithm: String,
    /// Hex of the root hash (`NONE_HASH`).
    pub root: String,
    /// The root is random: nothing can be shared with other processes (`NotShareable/RandomHashSeed`).
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
    /// This rank writes the shard (first replica); all replicas read it.
    pub writer: bool,
    /// Tokens a window reaches back, 0 for `full`.
    #[serde(default)]
    pub window_tokens: u32,
}

/// Answer to REGISTER.
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
    /// Transfer mode that the worker shall use: `engine`, or `cuda_window`, for which it asks by WINDOW.
    #[serde(default)]
    pub transfer: String,
    /// Why it is not the other one.
    #[serde(default)]
    pub transfer_reason: String,
    /// All ranks and the scheduler have registered with one domain: PROBE and GRANT are served.
    pub ready: bool,
}

/// WINDOW. The first asks for a window; the second says, with `seen`, that the worker read the pattern through its own mapping and wrote
/// its complement in its place.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Window {
    /// UUID of the device whose memory is wanted; empty = host memory, for an engine on CPUs.
    #[serde(default)]
    pub device_uuid: String,
    /// Wanted bytes of all stages together; 0 = as many as the sidecar is configured to give.
    #[serde(default)]
    pub bytes: u64,
    /// The complement of the pattern is in place.
    #[serde(default)]
    pub seen: bool,
}

/// How a window's memory is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowKind {
    /// A memfd.
    #[default]
    Host,
    /// A descriptor of CUDA's virtual-memory API.
    PosixFd,
    /// A legacy CUDA IPC handle.
    IpcHandle,
}

/// Answer to WINDOW. Descriptors in the order of `fds`: `window` (not with an IPC handle), `page`, `bell`. The bell is one end of a pair of
/// stream sockets: each side sends a byte, without blocking, behind every stage that it hands over; its end is the end of the window.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WindowReply {
    /// The sidecar read the complement: the window is in use from now on. False in the first answer.
    #[serde(default)]
    pub working: bool,
    /// How to map it.
    #[serde(default)]
    pub kind: WindowKind,
    /// Bytes of the window.
    #[serde(default)]
    pub bytes: u64,
    /// Stages, one behind another from the window's begin on.
    #[serde(default)]
    pub stages: u32,
    /// Bytes of a stage.
    #[serde(default)]
    pub stage_bytes: u64,
    /// What stands at the window's begin.
    #[serde(default, with = "serde_bytes")]
    pub pattern: Vec<u8>,
    /// With `ipc_handle`: the 64 bytes.
    #[serde(default, with = "serde_bytes")]
    pub handle: Vec<u8>,
    /// Names of the descriptors on this frame, in order.
    #[serde(default)]
    pub fds: Vec<String>,
}

/// PROBE. Hashes are those of the chunks' last blocks, in prefix order from chunk 0; the last may be a tail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// Request id.
    pub request: String,
    /// Namespace id, 32 bytes; empty = default.
    #[serde(default, with = "serde_bytes")]
    pub namespace: Vec<u8>,
    /// Packed 32-byte hashes.
    #[serde(with = "serde_bytes")]
    pub hashes: Vec<u8>,
    /// Tokens of the last chunk where it is a tail (shorter than a chunk); 0 = all full.
    #[serde(default)]
    pub tail_tokens: u32,
    /// Tokens the engine holds itself: chunks before them are not checked. Absent = unknown; then nothing is fetched.
    #[serde(default)]
    pub local_tokens: Option<u64>,
    /// What is left of the load timeout.
    #[serde(default)]
    pub budget_ms: u64,
    /// vLLM's `max_load_tokens`, if given.
    #[serde(default)]
    pub max_load_tokens: Option<u64>,
    /// Tokens that the engine computes in a second while it prefills; 0 = not known yet.
    #[serde(default)]
    pub prefill_tokens_per_s: u64,
}

/// A chunk is not there.
pub const CHUNK_ABSENT: u8 = 0;
/// A chunk can be read now: it has references.
pub const CHUNK_READY: u8 = 1;
/// A chunk is there, and cannot be read by this answer. In a partial answer it is being checked or fetched. In a final one it is in a
/// tier below memory and was not fetched, or it lies before `local_tokens` and was not checked; another PROBE may ask for it.
pub const CHUNK_PENDING: u8 = 2;

/// Answer to PROBE; partial ones (`FLAG_PARTIAL`) while chunks are pending, then one final. Each replaces the one before.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProbeReply {
    /// One byte per hash: `CHUNK_*`.
    #[serde(with = "serde_bytes")]
    pub states: Vec<u8>,
    /// Packed references: for every ready chunk in order, one [`crate::refs::SectionRef`] per section of the domain
    /// (groups in order, shards within a group); `NO_SLOT` where the chunk lacks the section (window groups).
    #[serde(with = "serde_bytes")]
    pub refs: Vec<u8>,
    /// Region of all references.
    #[serde(default)]
    pub region: u64,
    /// Longest expected wait for the pending ones.
    #[serde(default)]
    pub pending_ms: u64,
    /// Tier per chunk, one byte: 1 memory, 2 disk, 3 redis, 4 s3; 0 = absent.
    #[serde(default, with = "serde_bytes")]
    pub tiers: Vec<u8>,
    /// Why nothing was looked up (e.g. `NotRegistered`); empty = looked up.
    #[serde(default)]
    pub reason: String,
    /// Why chunks that the final answer calls pending are in a tier and are not fetched: `minLoadTokens`, `recompute`; empty = none of
    /// them was left there on purpose.
    #[serde(default)]
    pub declined: String,
}

/// PIN, one-way: chunks `from..to` of the answer to PROBE `probe` become the read lease of the request; its other soft pins end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Request id.
    pub request: String,
    /// Tag of the PROBE whose answer is used.
    pub probe: u64,
    /// First chunk.
    pub from: u32,
    /// One past the last chunk.
    pub to: u32,
}

/// RELEASE, one-way: all pins and leases of these requests end, open probes of them are cancelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Request ids.
    pub requests: Vec<String>,
}

/// One chunk to be stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantChunk {
    /// Hash of the chunk's last block, 32 bytes.
    #[serde(with = "serde_bytes")]
    pub hash: Vec<u8>,
    /// Hash of the last block of the chunk before it, 32 bytes; empty for the first.
    #[serde(default, with = "serde_bytes")]
    pub parent: Vec<u8>,
    /// Position of the chunk's first token.
    pub first_token: u32,
    /// Tokens of the chunk; less than a chunk for a tail.
    pub tokens: u32,
    /// Bit per group whose sections are to be stored (all shards of it).
    pub groups: u32,
    /// Engine hashes of all hash blocks of the chunk, packed, for KV events and lower tiers; may be empty.
    #[serde(default, with = "serde_bytes")]
    pub block_hashes: Vec<u8>,
}

/// GRANT: slots for chunks. All ranks or none; never two open grants for one chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Request id.
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

/// A chunk was granted: it has references for what it lacks.
pub const GRANT_GRANTED: u8 = 1;
/// The chunk is there in full, or another GRANT is storing it.
pub const GRANT_EXISTS: u8 = 2;
/// No room now (all slots leased, granted or pinned): may be asked again.
pub const GRANT_NO_ROOM: u8 = 3;
/// Not all ranks registered, no arena, or a limit: may be asked again.
pub const GRANT_NOT_READY: u8 = 4;
/// The chunk's parent is not in the index, so it could never be read.
pub const GRANT_NO_PARENT: u8 = 5;
/// The chunk is malformed (lengths, groups): do not ask again.
pub const GRANT_INVALID: u8 = 6;

/// Answer to GRANT.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GrantReply {
    /// One byte per chunk: `GRANT_*`.
    #[serde(with = "serde_bytes")]
    pub results: Vec<u8>,
    /// Packed references: for every granted chunk in order, one per section of the domain; `NO_SLOT` = nothing to write.
    #[serde(with = "serde_bytes")]
    pub refs: Vec<u8>,
    /// Region of all references.
    #[serde(default)]
    pub region: u64,
}

/// COMMIT and a worker's ABORT: sections that were written, or will not be. One-way, but that an ABORT of a worker with a window is
/// answered ([`AbortReply`]) once no copy into the sections runs any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sections {
    /// Region of all references.
    pub region: u64,
    /// Packed references as GRANTed.
    #[serde(with = "serde_bytes")]
    pub refs: Vec<u8>,
}

/// A scheduler's ABORT: unshipped or unanswered chunks of one GRANT. Answered with [`AbortReply`], repeated until it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    /// Tag of the GRANT.
    pub grant: u64,
    /// Hashes of the chunks, packed; empty = all of the GRANT.
    #[serde(default, with = "serde_bytes")]
    pub hashes: Vec<u8>,
}

/// Answer to a scheduler's ABORT, and to that of a worker with a window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortReply {
    /// Slots that came back.
    pub freed: u32,
}

/// EVENTS: answered when events after `cursor` are there, or after `wait_ms`. With `snapshot`, a page of what is resident now, at once.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Events {
    /// Last cursor seen; 0 = from now on.
    pub cursor: u64,
    /// Longest wait.
    pub wait_ms: u64,
    /// Boot that `cursor` is of, from the last answer; 0 = unknown. The answer to a cursor of another boot is `lost`.
    #[serde(default)]
    pub boot: u64,
    /// Asks for a page of what is resident: 0, then `next` of the answer before.
    #[serde(default)]
    pub snapshot: Option<u32>,
}

/// Answer to EVENTS. Events are those of the session's own model and layout.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EventsReply {
    /// Cursor to ask with next. Of a snapshot: where the events that follow its first page begin.
    pub cursor: u64,
    /// Events were dropped between the cursors: take a snapshot.
    #[serde(default)]
    pub lost: bool,
    /// In order.
    pub events: Vec<Event>,
    /// Boot of the sidecar that `cursor` is of.
    #[serde(default)]
    pub boot: u64,
    /// To a snapshot: the page to ask for next; absent = this was the last one.
    #[serde(default)]
    pub next: Option<u32>,
}

/// One change of what the pool holds, or in a snapshot a chunk that it holds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Event {
    /// `stored` or `removed`; `cleared`: all that was told of the tier is gone.
    pub kind: String,
    /// `memory` or `disk`.
    #[serde(default)]
    pub tier: String,
    /// Packed engine block hashes, as given in GRANT; empty where the sidecar does not keep them.
    #[serde(default, with = "serde_bytes")]
    pub block_hashes: Vec<u8>,
    /// Engine hash of the block before the first, 32 bytes; empty for the first chunk, and where the chunk before is not known.
    #[serde(default, with = "serde_bytes")]
    pub parent: Vec<u8>,
    /// Tokens of the chunk.
    #[serde(default)]
    pub tokens: u32,
    /// Engine hash of the chunk's last block, 32 bytes. With `namespace` it names the chunk.
    #[serde(default, with = "serde_bytes")]
    pub hash: Vec<u8>,
    /// Namespace id, 32 bytes; empty = default.
    #[serde(default, with = "serde_bytes")]
    pub namespace: Vec<u8>,
    /// Position of the chunk's first token.
    #[serde(default)]
    pub first_token: u32,
}

/// ADMIN: one operation. The HTTP API offers those that read; `clear`, `pin`, `unpin` and `flush` are the socket's alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admin {
    /// `status`, `health`, `flush`, `lookup`, `clear`, `pin`, `unpin`.
    pub op: String,
    /// Chunk keys in hex, for `lookup`, `pin`, `unpin`.
    #[serde(default)]
    pub keys: Vec<String>,
    /// Seconds a pin lasts; 0 = until unpinned.
    #[serde(default)]
    pub ttl_s: u64,
    /// Bearer token, where one is configured.
    #[serde(default)]
    pub token: String,
}

/// REPORT, one-way: what the connector counted since its last REPORT. All values are increments.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Report {
    /// Prompt tokens of admitted requests that vLLM's own prefix cache did not hold.
    #[serde(default)]
    pub requested_tokens: u64,
    /// Of them: taken from a tier, by tier name.
    #[serde(default)]
    pub hit_tokens: BTreeMap<String, u64>,
    /// Of them: not taken, by reason (`absent`, `minLoadTokens`, `off`, ...). requested = sum(hit) + sum(miss), always.
    #[serde(default)]
    pub miss_tokens: BTreeMap<String, u64>,
    /// Tokens whose load failed after admission (they stay counted under their tier).
    #[serde(default)]
    pub load_failed_tokens: u64,
    /// Named counters of skips, drops and refusals (`kvcachepool_connector_events_total{event}`).
    #[serde(default)]
    pub events: BTreeMap<String, u64>,
    /// Bytes copied by workers, by direction (`store`, `load`).
    #[serde(default)]
    pub copied_bytes: BTreeMap<String, u64>,
    /// Seconds spent copying, by direction.
    #[serde(default)]
    pub copied_seconds: BTreeMap<String, f64>,
    /// Age of the oldest unfinished copy job, a gauge, in milliseconds.
    #[serde(default)]
    pub oldest_job_ms: u64,
}
