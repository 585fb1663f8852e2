//! The list of all keys: path, meaning, range, and whether a change needs a restart. Parsing, printing and comparing all walk it.

use super::{Choice, Config, s3, units::*};
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

/// How a changed value takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// At once.
    Live,
    /// At once where there were Redis servers before and still are, spoken to with the same files; else as [`Reload::Restart`].
    Servers,
    /// When the sidecar starts the next time.
    Restart,
}

/// Keys whose values differ between two configs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Paths that take effect at once.
    pub live: Vec<&'static str>,
    /// Paths that wait for a restart.
    pub restart: Vec<&'static str>,
}

/// One key of a config, open for reading and writing.
pub(super) struct Key<'a> {
    pub path: &'static str,
    pub about: &'static str,
    pub reload: Reload,
    pub slot: Slot<'a>,
}

/// The value of a key with what it may be.
pub(super) enum Slot<'a> {
    Size(&'a mut ByteSize, RangeInclusive<u64>),
    Time(&'a mut Duration, RangeInclusive<u64>),
    Share(&'a mut Percent, RangeInclusive<u8>),
    Count(&'a mut u32, RangeInclusive<u32>),
    Number(&'a mut u64, RangeInclusive<u64>),
    Flag(&'a mut bool),
    Name(&'a mut String),
    /// Any text that its rule takes; the rule says what to write.
    Text(&'a mut String, fn(&str) -> Result<(), &'static str>),
    Listen(&'a mut SocketAddr),
    Socket(&'a mut PathBuf),
    File(&'a mut Option<PathBuf>),
    Urls(&'a mut Vec<String>),
    Choice(&'a mut dyn Choice),
}

/// Longest path of a Unix socket that the kernel takes (`sun_path` with its end).
const SOCKET_PATH_BYTES: usize = 107;
/// Most URLs of a list.
const URLS: usize = 256;
/// Longest URL.
const URL_BYTES: usize = 1024;
/// Longest name of a Kubernetes object.
const NAME_BYTES: usize = 253;

const KI: u64 = 1 << 10;
const MI: u64 = 1 << 20;
const TI: u64 = 1 << 40;
const HOUR_MS: u64 = 3_600_000;

/// All keys in the order of the printed file; keys of a section stand together.
pub(super) fn keys(c: &mut Config) -> Vec<Key<'_>> {
    use Reload::{Live, Restart, Servers};
    let key = |path, reload, slot, about| Key {
        path,
        about,
        reload,
        slot,
    };
    vec![
        key(
            "socket",
            Restart,
            Slot::Socket(&mut c.socket),
            "Unix socket that vLLM's connector speaks to; the lock file and the exported connector lie beside it.",
        ),
        key(
            "managed",
            Live,
            Slot::Flag(&mut c.managed),
            "Set by the operator: unknown keys are warnings, so that an old sidecar starts under a newer operator.",
        ),
        key(
            "admin.listen",
            Restart,
            Slot::Listen(&mut c.admin.listen),
            "Address of /healthz, /readyz, /metrics and /v1/status.",
        ),
        key(
            "admin.tokenFile",
            Live,
            Slot::File(&mut c.admin.token_file),
            "File with the bearer token of /v1/config and /v1/objects; without it they are off.",
        ),
        key(
            "pool.name",
            Restart,
            Slot::Name(&mut c.pool.name),
            "Name of the pool, shown in status and logs.",
        ),
        key(
            "pool.namespace",
            Restart,
            Slot::Name(&mut c.pool.namespace),
            "Kubernetes namespace of the pool.",
        ),
        key(
            "pool.generation",
            Live,
            Slot::Number(&mut c.pool.generation, 0..=i64::MAX as u64),
            "Counts the changes of the pool. Of the pod's file and the pool's, the one with the higher number is in effect.",
        ),
        key(
            "cache.chunkTokens",
            Restart,
            Slot::Count(&mut c.cache.chunk_tokens, 1..=65_536),
            "Least tokens of a chunk; rounded up to whole blocks of the engine. Another value is another domain: it starts cold.",
        ),
        key(
            "cache.save",
            Live,
            Slot::Choice(&mut c.cache.save),
            "What of a request is stored: its prompt, or also what was generated.",
        ),
        key(
            "cache.minLoadTokens",
            Live,
            Slot::Count(&mut c.cache.min_load_tokens, 0..=u32::MAX),
            "Hits shorter than this many tokens are recomputed instead of loaded; and tiers below memory are left alone where they could add fewer to what memory holds.",
        ),
        key(
            "cache.loadTimeout",
            Live,
            Slot::Time(&mut c.cache.load_timeout, 1..=HOUR_MS),
            "Longest wait of a request for a load; after it the prompt is computed.",
        ),
        key(
            "cache.loadOrRecompute",
            Live,
            Slot::Choice(&mut c.cache.load_or_recompute),
            "What tiers below memory have is fetched where that is expected to be quicker than to compute it, or always.",
        ),
        key(
            "memory.size",
            Restart,
            Slot::Size(&mut c.memory.size, 64 * MI..=16 * TI),
            "Bytes of the memory tier. Must fit into the container's memory limit with 256Mi to spare.",
        ),
        key(
            "memory.hugePages",
            Restart,
            Slot::Choice(&mut c.memory.huge_pages),
            "Page size of the memory tier; the node must have reserved the pages.",
        ),
        key(
            "memory.evictionPolicy",
            Restart,
            Slot::Choice(&mut c.memory.eviction_policy),
            "What goes first when room is needed.",
        ),
        key(
            "memory.verify",
            Live,
            Slot::Choice(&mut c.memory.verify),
            "When the bytes of a hit are compared with their digest. Always: before the answer, by a check that began after the request \
             came. Background: beside the answer, where the last check is older than verifyAge; bytes that changed in memory may be \
             served until then.",
        ),
        key(
            "memory.verifyAge",
            Live,
            Slot::Time(&mut c.memory.verify_age, 0..=720 * HOUR_MS),
            "With Background: a hit is checked again when its last check is older than this.",
        ),
        key(
            "memory.verifyThreads",
            Restart,
            Slot::Count(&mut c.memory.verify_threads, 1..=64),
            "Threads that take and check digests.",
        ),
        key(
            "memory.verifyBytesPerSecond",
            Restart,
            Slot::Size(&mut c.memory.verify_bytes_per_second, MI..=TI),
            "Bytes that checks which nobody waits for may read in a second, all together.",
        ),
        key(
            "memory.populateThreads",
            Restart,
            Slot::Count(&mut c.memory.populate_threads, 1..=64),
            "Threads that make the memory tier's pages present before they are used.",
        ),
        key(
            "disk.path",
            Restart,
            Slot::File(&mut c.disk.path),
            "Folder of the disk tier, its alone: what is stored is written there, too, and found again after memory is gone. Without it there is no such tier.",
        ),
        key(
            "disk.size",
            Restart,
            Slot::Size(&mut c.disk.size, 64 * MI..=16 * TI),
            "Bytes of the disk tier's files; the least recently used goes first.",
        ),
        key(
            "redis.urls",
            Servers,
            Slot::Urls(&mut c.redis.urls),
            "Redis or Valkey servers, each an independent shard: redis://, rediss:// or redis+unix://; or one redis-sentinel:// or redis-cluster://. Without any there is no such tier.",
        ),
        key(
            "redis.auth",
            Restart,
            Slot::File(&mut c.redis.auth),
            "Folder with a file password and, for an ACL user, a file username; read again for every new connection.",
        ),
        key(
            "redis.ca",
            Restart,
            Slot::File(&mut c.redis.ca),
            "PEM file of the authorities that TLS servers are trusted by; without it those of the system.",
        ),
        key(
            "redis.ttl",
            Live,
            Slot::Time(&mut c.redis.ttl, 0..=8_784 * HOUR_MS),
            "An object goes when it was neither written nor read for so long; 0 = never.",
        ),
        key(
            "write.policy",
            Live,
            Slot::Choice(&mut c.write.policy),
            "When what memory holds is written to the tiers below: as soon as it can be read, after a while (sooner where much waits), or never.",
        ),
        key(
            "write.backAfter",
            Live,
            Slot::Time(&mut c.write.back_after, 0..=24 * HOUR_MS),
            "With WriteBack: how long a chunk waits until it is written.",
        ),
        key(
            "write.admission",
            Live,
            Slot::Choice(&mut c.write.admission),
            "Which chunks are written to the tiers below: all, or those that are used a second time.",
        ),
        key(
            "write.codec",
            Restart,
            Slot::Choice(&mut c.write.codec),
            "How chunks are packed in the tiers below: not at all, without loss, for three quarters of the bytes and some time of a core, or with loss (FP8, INT8, INT4, CacheGen). None and Lossless read what the other wrote; what loses something shares nothing with any other.",
        ),
        key(
            "s3.bucket",
            Restart,
            Slot::Text(&mut c.s3.bucket, s3::bucket),
            "Bucket of the S3 tier, shared by all sidecars of a pool. Without it there is no such tier.",
        ),
        key(
            "s3.region",
            Restart,
            Slot::Text(&mut c.s3.region, s3::region),
            "Region of the bucket; without it that of the environment, or us-east-1 with an endpoint.",
        ),
        key(
            "s3.endpoint",
            Restart,
            Slot::Text(&mut c.s3.endpoint, s3::endpoint),
            "http(s)://host[:port] of a server that is not AWS.",
        ),
        key(
            "s3.prefix",
            Restart,
            Slot::Text(&mut c.s3.prefix, s3::prefix),
            "What the names of all objects begin with, without slashes around it.",
        ),
        key(
            "s3.addressingStyle",
            Restart,
            Slot::Choice(&mut c.s3.addressing_style),
            "Where the bucket's name stands in URLs. Auto: in the host for AWS and for endpoints that are a name with a dot, else in the path.",
        ),
        key(
            "s3.accelerate",
            Restart,
            Slot::Flag(&mut c.s3.accelerate),
            "Use the Transfer Acceleration endpoint of AWS.",
        ),
        key(
            "s3.auth",
            Restart,
            Slot::File(&mut c.s3.auth),
            "Folder with the files AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and perhaps AWS_SESSION_TOKEN, read again when they change. Without it: environment, profile, web identity of the pod, instance.",
        ),
        key(
            "s3.ca",
            Restart,
            Slot::File(&mut c.s3.ca),
            "PEM file with the authorities that are trusted; without it those of the system.",
        ),
        key(
            "s3.checksums",
            Restart,
            Slot::Choice(&mut c.s3.checksums),
            "When S3's own checksums are sent and checked; older compatible servers refuse them. The digests of objects are checked in any case.",
        ),
        key(
            "s3.httpVersion",
            Restart,
            Slot::Choice(&mut c.s3.http_version),
            "Version of HTTP. Auto is HTTP/1.1, with a connection for each transfer; Http2 needs TLS.",
        ),
        key(
            "s3.maxConcurrency",
            Restart,
            Slot::Count(&mut c.s3.max_concurrency, 1..=4_096),
            "Requests that run at once.",
        ),
        key(
            "s3.capacity",
            Restart,
            Slot::Size(&mut c.s3.capacity, 0..=1024 * TI),
            "Bytes that may lie under the prefix, those of other sidecars included; the oldest objects go first. 0: no bound.",
        ),
        key(
            "s3.evictAtPercent",
            Restart,
            Slot::Count(&mut c.s3.evict_at_percent, 1..=100),
            "Percent of the capacity from which on the oldest objects are removed.",
        ),
        key(
            "s3.evictToPercent",
            Restart,
            Slot::Count(&mut c.s3.evict_to_percent, 1..=100),
            "Percent of the capacity that are left then.",
        ),
        key(
            "s3.expireAfter",
            Restart,
            Slot::Time(&mut c.s3.expire_after, 0..=87_600 * HOUR_MS),
            "Objects that were written longer ago are removed; 0: never.",
        ),
        key(
            "pacing.readBytesPerSecond",
            Live,
            Slot::Size(&mut c.pacing.read_bytes_per_second, 0..=TI),
            "Bytes that may come from the tiers below memory in a second, all together. 0: no bound.",
        ),
        key(
            "pacing.writeBytesPerSecond",
            Live,
            Slot::Size(&mut c.pacing.write_bytes_per_second, 0..=TI),
            "Bytes that may go to the tiers below memory in a second, all together, with those of checks that nobody waits for. 0: no bound.",
        ),
        key(
            "gpu.contextMemory",
            Restart,
            Slot::Size(&mut c.gpu.context_memory, 0..=TI),
            "Bytes of the container's memory that are kept free for CUDA contexts of the sidecar; 0 where it is given no GPU.",
        ),
        key(
            "transfer.mode",
            Live,
            Slot::Choice(&mut c.transfer.mode),
            "Who moves bytes between vLLM's KV blocks and the memory tier: Engine (vLLM's worker) or CudaWindow (the sidecar, by a window that the worker fills and empties). Auto is Engine. Taken when a worker registers.",
        ),
        key(
            "transfer.windowSize",
            Live,
            Slot::Size(&mut c.transfer.window_size, 16 * MI..=16 * 1024 * MI),
            "Bytes of a worker's window.",
        ),
        key(
            "limits.connections",
            Live,
            Slot::Count(&mut c.limits.connections, 4..=65_536),
            "Open connections on the socket.",
        ),
        key(
            "limits.sessions",
            Live,
            Slot::Count(&mut c.limits.sessions, 4..=65_536),
            "Sessions: roles of vLLM's processes.",
        ),
        key(
            "limits.requests",
            Live,
            Slot::Count(&mut c.limits.requests, 1..=1_000_000),
            "Requests with an open probe, pin or lease, per scheduler.",
        ),
        key(
            "limits.pinnedShare",
            Live,
            Slot::Share(&mut c.limits.pinned_share, 1..=90),
            "Share of the memory tier that soft pins may hold; the oldest end first.",
        ),
        key(
            "limits.grantedBytes",
            Live,
            Slot::Size(&mut c.limits.granted_bytes, MI..=16 * TI),
            "Bytes granted for writing and not yet committed, all workers together.",
        ),
        key(
            "limits.indexEntries",
            Restart,
            Slot::Count(&mut c.limits.index_entries, 256..=16_777_216),
            "Chunks that the index can hold; each takes 1Ki of the slot table once used.",
        ),
        key(
            "limits.frameBytes",
            Live,
            Slot::Size(&mut c.limits.frame_bytes, 64 * KI..=8 * MI),
            "Longest body of a frame.",
        ),
        key(
            "limits.sendBytes",
            Live,
            Slot::Size(&mut c.limits.send_bytes, MI..=1024 * MI),
            "Answers that may wait for one slow reader; more closes its connection.",
        ),
        key(
            "limits.helloTimeout",
            Live,
            Slot::Time(&mut c.limits.hello_timeout, 100..=HOUR_MS),
            "A connection that says no HELLO is closed after this.",
        ),
        key(
            "limits.events",
            Restart,
            Slot::Count(&mut c.limits.events, 16..=1_048_576),
            "Events kept for EVENTS; a reader further behind is told that some were lost.",
        ),
        key(
            "limits.tierLookups",
            Live,
            Slot::Count(&mut c.limits.tiers.lookups, 1..=4_096),
            "Of each tier below memory: lookups at once.",
        ),
        key(
            "limits.tierFetches",
            Live,
            Slot::Count(&mut c.limits.tiers.fetches, 1..=64),
            "Of each tier below memory: chunks that are fetched at once.",
        ),
        key(
            "limits.tierFetchBytes",
            Live,
            Slot::Size(&mut c.limits.tiers.fetch_bytes, MI..=256 * MI),
            "Bytes of those; a quarter of grantedBytes where that is less. One chunk may always be fetched.",
        ),
        key(
            "limits.tierFetchQueue",
            Live,
            Slot::Count(&mut c.limits.tiers.fetch_queue, 1..=1_000_000),
            "Of each tier below memory: chunks that wait to be fetched.",
        ),
        key(
            "limits.tierWrites",
            Live,
            Slot::Count(&mut c.limits.tiers.writes, 1..=64),
            "Of each tier below memory: chunks that are written at once.",
        ),
        key(
            "limits.tierWriteBytes",
            Live,
            Slot::Size(&mut c.limits.tiers.write_bytes, MI..=256 * MI),
            "Bytes of those; a quarter of grantedBytes where that is less. One chunk may always be written.",
        ),
        key(
            "limits.tierWriteQueueBytes",
            Live,
            Slot::Size(&mut c.limits.tiers.write_queue_bytes, MI..=16 * TI),
            "Of each tier below memory: bytes of chunks that wait to be written. The oldest goes where more come; one chunk may always wait.",
        ),
        key(
            "limits.tierWriteQueueAge",
            Live,
            Slot::Time(&mut c.limits.tiers.write_queue_age, 100..=24 * HOUR_MS),
            "A chunk that could have been written for so long and was not is dropped.",
        ),
        key(
            "log.level",
            Live,
            Slot::Choice(&mut c.log.level),
            "Least level that is written.",
        ),
        key(
            "log.format",
            Restart,
            Slot::Choice(&mut c.log.format),
            "One JSON object a line, or text for people.",
        ),
    ]
}

impl Slot<'_> {
    /// The value as the file writes it.
    pub fn text(&self) -> String {
        match self {
            Slot::Size(v, _) => v.to_string(),
            Slot::Time(v, _) => v.to_string(),
            Slot::Share(v, _) => v.to_string(),
            Slot::Count(v, _) => v.to_string(),
            Slot::Number(v, _) => v.to_string(),
            Slot::Flag(v) => v.to_string(),
            Slot::Name(v) | Slot::Text(v, _) => (*v).clone(),
            Slot::Listen(v) => v.to_string(),
            Slot::Socket(v) => v.display().to_string(),
            Slot::File(v) => v
                .as_ref()
                .map(|p| p.display().to_string())
                .unwrap_or_default(),
            // JSON is YAML.
            Slot::Urls(v) => serde_json::Value::from(v.as_slice()).to_string(),
            Slot::Choice(v) => v.name().to_string(),
        }
    }

    /// The same, without what may be secret.
    pub fn shown(&self) -> String {
        match self {
            Slot::Urls(v) => {
                let shown: Vec<String> = v.iter().map(|url| without_credentials(url)).collect();
                serde_json::Value::from(shown).to_string()
            }
            _ => self.text(),
        }
    }

    /// Takes a value from its text, or says what to write.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let problem = |bad: BadUnit| bad.0.to_string();
        match self {
            Slot::Size(v, range) => {
                let size: ByteSize = text.parse().map_err(problem)?;
                **v = within(size, size.0, range, ByteSize)?;
            }
            Slot::Time(v, range) => {
                let time: Duration = text.parse().map_err(problem)?;
                **v = within(time, time.ms, range, Duration::from_ms)?;
            }
            Slot::Share(v, range) => {
                let share: Percent = text.parse().map_err(problem)?;
                **v = within(share, share.0, range, Percent)?;
            }
            Slot::Count(v, range) => **v = whole(text, range)?,
            Slot::Number(v, range) => **v = whole(text, range)?,
            Slot::Flag(v) => **v = text.parse().map_err(|_| "true or false".to_string())?,
            Slot::Name(v) => {
                let plain =
                    |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
                if text.len() > NAME_BYTES || !text.bytes().all(plain) {
                    return Err(format!(
                        "a Kubernetes name: lower-case letters, digits, - and ., at most {NAME_BYTES} of them"
                    ));
                }
                **v = text.to_string();
            }
            Slot::Text(v, rule) => {
                rule(text)?;
                **v = text.to_string();
            }
            Slot::Listen(v) => {
                **v = text.parse().map_err(|_| {
                    "an address with a port such as 0.0.0.0:9797 or [::]:9797".to_string()
                })?;
            }
            Slot::Socket(v) => {
                if !absolute(text) || text.len() > SOCKET_PATH_BYTES || text.ends_with('/') {
                    return Err(format!(
                        "an absolute path of a socket, at most {SOCKET_PATH_BYTES} bytes long"
                    ));
                }
                **v = PathBuf::from(text);
            }
            Slot::File(v) => {
                if !text.is_empty() && !absolute(text) {
                    return Err("an absolute path of a file, or \"\" for none".to_string());
                }
                **v = (!text.is_empty()).then(|| PathBuf::from(text));
            }
            Slot::Urls(v) => {
                let urls: Vec<String> = serde_json::from_str(text).unwrap_or_default();
                let is_url = |url: &String| url.len() <= URL_BYTES && url.contains("://");
                let none = text == "[]";
                if (urls.is_empty() && !none) || urls.len() > URLS || !urls.iter().all(is_url) {
                    return Err(format!(
                        "a list of at most {URLS} URLs such as [\"redis://host:6379\"], or [] for none"
                    ));
                }
                **v = urls;
            }
            Slot::Choice(v) => {
                if !v.choose(text) {
                    return Err(format!("one of {}", v.names().join(", ")));
                }
            }
        }
        Ok(())
    }

    /// What the value may be, for the comment of the printed file; empty where the value itself shows it.
    pub fn range(&self) -> String {
        match self {
            Slot::Size(_, r) => format!("{} to {}", ByteSize(*r.start()), ByteSize(*r.end())),
            Slot::Time(_, r) => {
                let [least, most] = [r.start(), r.end()].map(|ms| Duration::from_ms(*ms));
                format!("{least} to {most}")
            }
            Slot::Share(_, r) => format!("{} to {}", Percent(*r.start()), Percent(*r.end())),
            Slot::Count(_, r) => format!("{} to {}", r.start(), r.end()),
            Slot::Number(_, r) => format!("{} to {}", r.start(), r.end()),
            Slot::Choice(v) => v.names().join(", "),
            Slot::Flag(_)
            | Slot::Name(_)
            | Slot::Text(..)
            | Slot::Listen(_)
            | Slot::Socket(_)
            | Slot::File(_)
            | Slot::Urls(_) => String::new(),
        }
    }
}

/// A URL whose user and password are not shown.
fn without_credentials(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
            format!("{scheme}://{place}")
        }
        None => String::new(),
    }
}

fn absolute(text: &str) -> bool {
    text.starts_with('/') && !text.contains('\0')
}

fn whole<N: FromStr + PartialOrd + Copy + fmt::Display>(
    text: &str,
    range: &RangeInclusive<N>,
) -> Result<N, String> {
    let number = text
        .parse()
        .map_err(|_| format!("a whole number from {} to {}", range.start(), range.end()))?;
    within(number, number, range, |n| n)
}

fn within<V, N: PartialOrd + Copy, S: fmt::Display>(
    value: V,
    number: N,
    range: &RangeInclusive<N>,
    shown: impl Fn(N) -> S,
) -> Result<V, String> {
    if range.contains(&number) {
        return Ok(value);
    }
    Err(format!(
        "a value from {} to {}",
        shown(*range.start()),
        shown(*range.end())
    ))
}

impl Config {
    /// Does a value of `newer` that takes effect in this way do so at once?
    fn takes(&self, reload: Reload, newer: &Config) -> bool {
        let (ours, theirs) = (&self.redis, &newer.redis);
        match reload {
            Reload::Live => true,
            Reload::Servers => {
                let both = !ours.urls.is_empty() && !theirs.urls.is_empty();
                both && (&ours.auth, &ours.ca) == (&theirs.auth, &theirs.ca)
            }
            Reload::Restart => false,
        }
    }

    /// What differs in `newer`, by how it takes effect.
    pub fn changes(&self, newer: &Config) -> Changes {
        let (mut a, mut b) = (self.clone(), newer.clone());
        let mut changes = Changes::default();
        for (old, new) in keys(&mut a).into_iter().zip(keys(&mut b)) {
            if old.slot.text() != new.slot.text() {
                match self.takes(old.reload, newer) {
                    true => changes.live.push(old.path),
                    false => changes.restart.push(old.path),
                }
            }
        }
        changes
    }

    /// What a sidecar with a file of its pod (`self`) and one of its pool goes by: the one with the higher `pool.generation`, the pod's
    /// where they are equal; but what the pod was made for stays the pod's: where to serve, its disk, and all that decides its memory.
    pub fn or_newer(self, pool: Config) -> Config {
        if pool.pool.generation <= self.pool.generation {
            return self;
        }
        let mut newer = pool;
        newer.socket = self.socket;
        newer.admin.listen = self.admin.listen;
        newer.memory.size = self.memory.size;
        newer.memory.huge_pages = self.memory.huge_pages;
        newer.limits.index_entries = self.limits.index_entries;
        newer.disk = self.disk;
        newer.gpu = self.gpu;
        newer
    }

    /// This config with those values of `newer` that take effect at once: what runs after a reload.
    pub fn with_live_from(&self, newer: &Config) -> Config {
        let (mut merged, mut from) = (self.clone(), newer.clone());
        for (mut old, new) in keys(&mut merged).into_iter().zip(keys(&mut from)) {
            if self.takes(old.reload, newer) {
                // A value that one config holds is within the range of the other.
                let _ = old.slot.set(&new.slot.text());
            }
        }
        merged
    }
}
