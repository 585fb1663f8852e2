//! The config file of the sidecar, `config.v1.yaml`: one YAML document, one Rust type, every value with its unit. `keys.rs` has the keys,
//! their descriptions and ranges; the `Default` impls here have the defaults. This module reads no files and does not know the machine: the
//! caller checks limits of the container. Only Redis URLs may contain secrets.

mod footprint;
mod keys;
mod parse;
mod s3;
mod units;

pub use footprint::{
    CHUNK_BYTES, CONTEXT_BYTES, PACKING_BYTES, PAGE_BYTES, UNPACKING_BYTES, beside_arena,
    disk_objects_max,
};
pub use keys::{Changes, Reload, range};
pub use parse::{ConfigError, Problem, UnknownKey};
pub use s3::{AddressingStyle, Checksums, HttpVersion, S3};
pub use units::{BadUnit, ByteSize, Duration, Percent};

use crate::message::{Save, Settings};
use crate::object;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// Name of the file, including its format version.
pub const FILE_NAME: &str = "config.v1.yaml";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Path of the Unix socket. Its folder also holds the lock file, `settings.json` and the exported connector.
    pub socket: PathBuf,
    pub admin: Admin,
    /// The pool that this sidecar belongs to.
    pub pool: Pool,
    /// What is cached, and when a hit is used.
    pub cache: Cache,
    pub memory: Memory,
    pub disk: Disk,
    pub redis: Redis,
    /// What is written to the lower tiers, and when.
    pub write: Write,
    pub s3: S3,
    /// Bandwidth limits of the lower tiers.
    pub pacing: Pacing,
    /// Memory that GPUs cost the sidecar.
    pub gpu: Gpu,
    /// Which process copies between vLLM and the memory tier.
    pub transfer: Transfer,
    /// Limits for everything that a peer can make grow.
    pub limits: Limits,
    pub log: Log,
    /// The file was written by the operator: unknown keys are warnings, not errors.
    pub managed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admin {
    pub listen: SocketAddr,
    /// File with the bearer token of `/v1/config` and `/v1/objects`. `None` disables both.
    pub token_file: Option<PathBuf>,
}

/// Identifies the pool in logs, metrics and status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pool {
    /// Name of the pool; empty outside Kubernetes.
    pub name: String,
    /// Kubernetes namespace of the pool.
    pub namespace: String,
    /// Generation of the pool's spec. Of two files, the one with the higher number is in effect.
    pub generation: u64,
}

/// What is cached, and when a hit is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    /// Minimum tokens per chunk.
    pub chunk_tokens: u32,
    /// What is stored of a request.
    pub save: Save,
    /// Hits shorter than this many tokens are recomputed.
    pub min_load_tokens: u32,
    /// Longest wait of a request for a load.
    pub load_timeout: Duration,
    /// Whether chunks in lower tiers are fetched only if that is expected to be faster than computing them.
    pub load_or_recompute: LoadOrRecompute,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    /// Size of the arena.
    pub size: ByteSize,
    /// Page size of the arena.
    pub huge_pages: HugePages,
    /// Order of eviction.
    pub eviction_policy: EvictionPolicy,
    /// When the bytes of a hit are compared with their digest.
    pub verify: Verify,
    /// With `Background`: age of the last check after which a hit is checked again.
    pub verify_age: Duration,
    /// Threads that compute and check digests.
    pub verify_threads: u32,
    /// Bytes per second that background checks may read, all together.
    pub verify_bytes_per_second: ByteSize,
    /// Threads that populate the arena.
    pub populate_threads: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Folder that only this tier uses. `None` disables the tier.
    pub path: Option<PathBuf>,
    /// Bytes of the files with objects.
    pub size: ByteSize,
}

/// The Redis tier. Its `Debug` form hides the URLs, because they may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Redis {
    /// Servers, each an independent shard. Empty: no Redis tier.
    pub urls: Vec<String>,
    /// Folder with the files `password` and `username`. `None`: the credentials in the URLs.
    pub auth: Option<PathBuf>,
    /// PEM file of the trusted authorities for TLS. `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// Objects expire after this time without a read or a write. 0 disables expiry.
    pub ttl: Duration,
}

/// What is written to the lower tiers, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    pub policy: WritePolicy,
    /// With `WriteBack`: wait before a chunk is written.
    pub back_after: Duration,
    /// Which chunks are written.
    pub admission: Admission,
    /// How chunks are packed in lower tiers.
    pub codec: Codec,
}

/// Bandwidth limits of the lower tiers, all together, in bytes per second; 0 = no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pacing {
    /// From lower tiers into memory.
    pub read_bytes_per_second: ByteSize,
    /// From memory to lower tiers, including background checks.
    pub write_bytes_per_second: ByteSize,
}

/// Memory that GPUs cost the sidecar; 0 without a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Container memory that is reserved for CUDA contexts.
    pub context_memory: ByteSize,
}

/// Which process copies between vLLM and the memory tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    pub mode: TransferMode,
    /// Size of each worker's window.
    pub window_size: ByteSize,
}

/// Limits for everything that a peer can make grow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Open connections on the socket.
    pub connections: u32,
    /// Sessions: one per role of a process.
    pub sessions: u32,
    /// Requests with an open probe, pin or lease, per scheduler.
    pub requests: u32,
    /// Share of the arena that soft pins may hold. Beyond it the oldest pin ends.
    pub pinned_share: Percent,
    /// Bytes of the arena that are granted and not committed, all workers together.
    pub granted_bytes: ByteSize,
    /// Chunks in the index. Each takes 1 KiB of the slot table once used.
    pub index_entries: u32,
    /// Longest frame body. The protocol's own limit is 8Mi.
    pub frame_bytes: ByteSize,
    /// Bytes of replies that may wait for one slow reader. Beyond it the connection is closed.
    pub send_bytes: ByteSize,
    /// A connection without a HELLO is closed after this.
    pub hello_timeout: Duration,
    /// Events kept for EVENTS. A reader that is further behind learns that it lost some.
    pub events: u32,
    /// Limits of each lower tier.
    pub tiers: TierLimits,
}

/// Limits of each lower tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierLimits {
    pub lookups: u32,
    pub fetches: u32,
    /// Bytes of fetches in flight, or a quarter of `granted_bytes` if that is less. One chunk is always allowed.
    pub fetch_bytes: ByteSize,
    /// Chunks that wait to be fetched.
    pub fetch_queue: u32,
    pub writes: u32,
    /// Bytes of writes in flight, or a quarter of `granted_bytes` if that is less. One chunk is always allowed.
    pub write_bytes: ByteSize,
    /// Bytes of chunks that wait to be written.
    pub write_queue_bytes: ByteSize,
    /// A chunk that could not be written for this time is dropped.
    pub write_queue_age: Duration,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    /// Minimum level of log lines.
    pub level: LogLevel,
    /// One JSON object per line, or text.
    pub format: LogFormat,
}

/// An enum whose values have fixed names.
pub(crate) trait Choice {
    fn names(&self) -> &'static [&'static str];
    fn name(&self) -> &'static str;
    fn choose(&mut self, name: &str) -> bool;
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }
        choice!(@impl $name { $($variant = $text),+ });
    };
    (@impl $name:ident { $($variant:ident = $text:literal),+ }) => {
        impl Choice for $name {
            fn names(&self) -> &'static [&'static str] { &[$($text),+] }
            fn name(&self) -> &'static str { match self { $(Self::$variant => $text),+ } }
            fn choose(&mut self, name: &str) -> bool {
                match name { $($text => *self = Self::$variant,)+ _ => return false }
                true
            }
        }
    };
}

use choice;

choice!(
    /// Whether chunks in lower tiers are fetched only if that is expected to be faster than computing them.
    LoadOrRecompute {
        /// Fetches or computes, whichever is expected to be faster once both speeds are known.
        #[default]
        Auto = "Auto",
        /// Always fetches.
        AlwaysLoad = "AlwaysLoad",
    }
);
choice!(
    /// Which process copies between vLLM's KV blocks and the memory tier.
    TransferMode {
        /// The better mode for the machine. No measurement exists yet, so it is `Engine`.
        #[default]
        Auto = "Auto",
        /// vLLM's worker.
        Engine = "Engine",
        /// The sidecar, through a window that the worker fills and empties.
        CudaWindow = "CudaWindow",
    }
);
choice!(
    /// Page size of the arena.
    HugePages {
        #[default]
        None = "None",
        /// 2 MiB pages, which the node must have reserved.
        Size2Mi = "2Mi",
        /// 1 GiB pages, which the node must have reserved.
        Size1Gi = "1Gi",
    }
);
choice!(
    /// Order of eviction.
    EvictionPolicy {
        /// S3-FIFO: three FIFO queues. Resists scans.
        #[default]
        S3Fifo = "S3FIFO",
        Lru = "LRU",
        Lfu = "LFU",
        Fifo = "FIFO",
    }
);
choice!(
    /// When the bytes of a hit are compared with their digest.
    Verify {
        /// Before the answer, by a check that began after the request arrived.
        #[default]
        Always = "Always",
        /// Concurrently with the answer, if the last check is older than `verifyAge`.
        Background = "Background",
    }
);
choice!(
    /// When a chunk in memory is written to the lower tiers.
    WritePolicy {
        /// As soon as it is readable.
        #[default]
        WriteThrough = "WriteThrough",
        /// After `backAfter`, or earlier if much waits.
        WriteBack = "WriteBack",
        None = "None",
    }
);
choice!(
    /// Which chunks are written to the lower tiers.
    Admission {
        #[default]
        All = "All",
        /// Chunks that are used a second time.
        Reused = "Reused",
    }
);
choice!(
    /// How chunks are packed in lower tiers.
    Codec {
        /// Not packed.
        #[default]
        None = "None",
        /// Lossless compression.
        Lossless = "Lossless",
        /// FP8 with a scale per 128 numbers. Lossy.
        Fp8 = "FP8",
        /// 8-bit integers with a scale per 128 numbers. Lossy.
        Int8 = "INT8",
        /// 4-bit integers between the smallest and the largest of 64 numbers. Very lossy.
        Int4 = "INT4",
        /// A few quantisation steps per token and layer, then an entropy coder. The smallest objects and the largest loss.
        CacheGen = "CacheGen",
    }
);
impl Codec {
    /// The codec's value in object headers.
    pub fn of_objects(self) -> object::Codec {
        match self {
            Self::None => object::Codec::None,
            Self::Lossless => object::Codec::Lossless,
            Self::Fp8 => object::Codec::Fp8,
            Self::Int8 => object::Codec::Int8,
            Self::Int4 => object::Codec::Int4,
            Self::CacheGen => object::Codec::CacheGen,
        }
    }
}
choice!(
    /// Minimum level of log lines.
    LogLevel {
        Error = "error",
        Warn = "warn",
        /// Also changes of state.
        #[default]
        Info = "info",
        /// Also sessions in detail.
        Debug = "debug",
        /// Also frames.
        Trace = "trace",
    }
);
choice!(
    /// Format of a log line.
    LogFormat {
        /// One JSON object per line.
        #[default]
        Json = "json",
        /// Lines for people.
        Text = "text",
    }
);
choice!(@impl Save { Prompt = "Prompt", PromptAndDecode = "PromptAndDecode" });

macro_rules! shown {
    ($($name:ident),+) => { $(impl std::fmt::Display for $name {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.name()) }
    })+ };
}
shown!(
    LoadOrRecompute,
    HugePages,
    EvictionPolicy,
    Verify,
    WritePolicy,
    Admission,
    Codec,
    LogLevel,
    LogFormat,
    AddressingStyle,
    Checksums,
    HttpVersion
);

impl HugePages {
    /// Bytes per page. The arena is a multiple of it.
    pub fn page_bytes(self) -> u64 {
        match self {
            Self::None => 4 << 10,
            Self::Size2Mi => 2 << 20,
            Self::Size1Gi => 1 << 30,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: "/kvcachepool/sidecar.sock".into(),
            admin: Admin::default(),
            pool: Pool::default(),
            cache: Cache::default(),
            memory: Memory::default(),
            disk: Disk::default(),
            redis: Redis::default(),
            write: Write::default(),
            s3: S3::default(),
            pacing: Pacing::default(),
            gpu: Gpu::default(),
            transfer: Transfer::default(),
            limits: Limits::default(),
            log: Log::default(),
            managed: false,
        }
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 9797)),
            token_file: None,
        }
    }
}

impl Default for Transfer {
    fn default() -> Self {
        Self {
            mode: TransferMode::Auto,
            window_size: ByteSize(128 << 20),
        }
    }
}

impl Default for Cache {
    fn default() -> Self {
        Self {
            chunk_tokens: 256,
            save: Save::Prompt,
            min_load_tokens: 512,
            load_timeout: Duration::from_ms(2_000),
            load_or_recompute: LoadOrRecompute::Auto,
        }
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            size: ByteSize(4 << 30),
            huge_pages: HugePages::None,
            eviction_policy: EvictionPolicy::S3Fifo,
            verify: Verify::Always,
            verify_age: Duration::from_ms(60_000),
            verify_threads: 2,
            verify_bytes_per_second: ByteSize(1 << 30),
            populate_threads: 2,
        }
    }
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            path: None,
            size: ByteSize(16 << 30),
        }
    }
}

impl Default for Redis {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            auth: None,
            ca: None,
            ttl: Duration::from_ms(0),
        }
    }
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redis")
            .field("urls", &self.urls.len())
            .field("auth", &self.auth)
            .field("ca", &self.ca)
            .field("ttl", &self.ttl)
            .finish()
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            sessions: 256,
            requests: 8_192,
            pinned_share: Percent(50),
            granted_bytes: ByteSize(2 << 30),
            index_entries: 65_536,
            frame_bytes: ByteSize(crate::frame::MAX_BODY as u64),
            send_bytes: ByteSize(32 << 20),
            hello_timeout: Duration::from_ms(5_000),
            events: 16_384,
            tiers: TierLimits::default(),
        }
    }
}

impl Default for TierLimits {
    fn default() -> Self {
        Self {
            lookups: 256,
            fetches: 32,
            fetch_bytes: ByteSize(256 << 20),
            fetch_queue: 16_384,
            writes: 8,
            write_bytes: ByteSize(64 << 20),
            write_queue_bytes: ByteSize(1 << 30),
            write_queue_age: Duration::from_ms(60_000),
        }
    }
}

impl Default for Write {
    fn default() -> Self {
        Self {
            policy: WritePolicy::default(),
            back_after: Duration::from_ms(60_000),
            admission: Admission::default(),
            codec: Codec::default(),
        }
    }
}

/// Longest wait of vLLM's scheduler at a request's first poll.
const FIRST_POLL_WAIT_US: u32 = 1_000;
/// Longest wait per step of vLLM's scheduler, all requests together.
const STEP_WAIT_US: u32 = 2_000;
/// After this time the connector gives up on an unanswered GRANT and returns its blocks to vLLM.
const GRANT_TIMEOUT_MS: u64 = 1_000;
/// Minimum bytes that the stores of one instance may have in flight.
const STORE_BYTES_IN_FLIGHT: u64 = 256 << 20;

impl Config {
    /// The settings that HELLO's answer passes to the connector.
    pub fn settings(&self) -> Settings {
        Settings {
            chunk_tokens: self.cache.chunk_tokens,
            save: self.cache.save,
            min_load_tokens: self.cache.min_load_tokens,
            load_timeout_ms: self.cache.load_timeout.ms,
            first_poll_wait_us: FIRST_POLL_WAIT_US,
            step_wait_us: STEP_WAIT_US,
            grant_timeout_ms: GRANT_TIMEOUT_MS,
            store_bytes_in_flight: STORE_BYTES_IN_FLIGHT,
        }
    }
}
